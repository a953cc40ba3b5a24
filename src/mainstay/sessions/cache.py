"""What this process has in memory of sessions. All of it is on disk too, and is dropped when it is idle longest."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from mainstay.engine.driver import Run
from mainstay.engine.waiters import Waiters
from mainstay.errors import SessionDeleted
from mainstay.graph.view import View
from mainstay.model.codec import encode
from mainstay.model.message import Message, Text
from mainstay.model.session import CancelRequest, SessionRow
from mainstay.sessions.archive import Archive
from mainstay.sessions.result import TurnResult
from mainstay.sessions.setup import Overlay, Setup

KEEP = 4096
"""Sessions in memory; running ones, and those with an overlay, are kept beyond that."""

CACHE_BYTES = 64 * 1024 * 1024
"""What idle sessions may hold of their histories, together."""

MESSAGE_BYTES = 500
"""What a message takes besides its text, about."""


def weight(message: Message) -> int:
    """What a message takes in memory, about."""
    return MESSAGE_BYTES + sum(len(part.text) if type(part) is Text else len(encode(part)) for part in message.parts)


class CachedSession:
    """What is kept of a session: its view, what it runs with, and the running turn.

    `setup` is what plugins have in memory; it is as good as the view beside it. `weight` is of the first `weighed`
    messages of the view: a history is weighed once, not with every turn.
    """

    __slots__ = (
        "_saving",
        "cancel",
        "following",
        "mail",
        "overlay",
        "run",
        "session_id",
        "setup",
        "task",
        "turn",
        "view",
        "weighed",
        "weight",
    )

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.view: View | None = None
        self.setup: Setup | None = None
        self.overlay: Overlay | None = None
        self.run: Run | None = None
        self.task: asyncio.Task[None] | None = None
        self.turn: int | None = None  # what the task works on, until its end was told
        self.following: SessionRow | None = None  # what the task finds open when it is done
        # What came for the turn that is just being loaded: a cancel request, an input.
        self.cancel: tuple[int, CancelRequest] | None = None
        self.mail = False
        self.weight = self.weighed = 0
        self._saving: asyncio.Lock | None = None

    @property
    def saving(self) -> asyncio.Lock:
        """Keeps operations from loading plugins while another one puts theirs on disk. Few sessions ever need it."""
        if self._saving is None:
            self._saving = asyncio.Lock()
        return self._saving


class SessionCache:
    """The sessions in memory, the one idle longest first.

    `cached` is the weight of all of them together. `_waiters` wait for results of turns, `_hosts` are those that also
    hear of a turn that is only queued.
    """

    def __init__(self, archive: Archive, cache_bytes: int = CACHE_BYTES) -> None:
        self._archive, self._limit, self.cached = archive, cache_bytes, 0
        self._by_id: OrderedDict[str, CachedSession] = OrderedDict()
        self._waiters: Waiters[int, TurnResult[Any]] = Waiters()
        self._hosts: set[asyncio.Future[TurnResult[Any]]] = set()

    def of(self, session_id: str) -> CachedSession:
        found = self._by_id.get(session_id)
        if found is None:
            self._evict()
            found = self._by_id[session_id] = CachedSession(session_id)
        return found

    def get(self, session_id: str) -> CachedSession | None:
        """What is kept of a session; None, and nothing new, when nothing is."""
        return self._by_id.get(session_id)

    def all(self) -> list[CachedSession]:
        return list(self._by_id.values())

    async def view(self, row: SessionRow) -> View:
        """Committed history of a session, kept as long as it is in memory."""
        session = self.of(row.id)
        session.view = view = await self._archive.view(row, session.view)
        return view

    def rest(self, session_id: str) -> None:
        """A session has become idle just now, or was read while it is."""
        resident = self._by_id.get(session_id)
        if resident is not None:
            self._by_id.move_to_end(session_id)
            self._weigh(resident)
            self._evict()

    def _weigh(self, resident: CachedSession) -> None:
        """Take note of what the view of a session has grown by."""
        messages = [] if resident.view is None else resident.view.messages
        if len(messages) < resident.weighed:  # another view
            self._unload(resident)
        grown = sum(map(weight, messages[resident.weighed :]))
        resident.weighed, resident.weight = len(messages), resident.weight + grown
        self.cached += grown

    def _unload(self, resident: CachedSession) -> None:
        self.cached -= resident.weight
        resident.weight = resident.weighed = 0

    def _evict(self) -> None:
        """Drop the sessions that have been idle longest, until the others are neither too many nor too heavy."""
        many, heavy, dropped = len(self._by_id) + 1 - KEEP, self.cached - self._limit, list[CachedSession]()
        for resident in self._by_id.values():
            if many <= 0 and heavy <= 0:
                break
            if self._is_idle(resident) and resident.overlay is None:
                dropped.append(resident)
                many, heavy = many - 1, heavy - resident.weight
        for resident in dropped:
            self._unload(self._by_id.pop(resident.session_id))

    def _is_idle(self, resident: CachedSession) -> bool:
        saving = resident._saving is not None and resident._saving.locked()
        return resident.task is None and resident.session_id not in self._waiters and not saving

    def forget(self, session_id: str) -> bool:
        """Drop what is in memory of a session; False while somebody works on it."""
        resident = self._by_id.get(session_id)
        if resident is None:
            return True
        if not self._is_idle(resident):
            return False
        self._unload(self._by_id.pop(session_id))
        return True

    def deleted(self, session_id: str) -> None:
        """The session is gone: stop what runs of it, and tell who waits."""
        found = self._by_id.get(session_id)
        if found is None:
            return
        found.view = None
        if found.run is not None:
            found.run.control.leave()
        for turn in self._waiters.parts(session_id):
            self.tell(session_id, turn, SessionDeleted(session_id))

    def lay_over(self, session_id: str, overlay: Overlay) -> bool:
        """Lay tools and prompts over a session from its next turn on; False when that changes nothing."""
        resident = self.of(session_id)
        if overlay.same(resident.overlay):
            return False
        resident.overlay = overlay
        if resident.run is None:
            resident.setup = None
        return True

    # ------------------------------------------------------------------ who waits

    def expect(self, session_id: str, turn: int, host: bool = False) -> asyncio.Future[TurnResult[Any]]:
        """A future for how a turn ends or parks; of a `host`, also for that it is queued and cannot begin."""
        self.of(session_id)  # the watch looks after the waiters of sessions in memory
        future = self._waiters.expect(session_id, turn)
        if host:
            self._hosts.add(future)
        return future

    def awaited(self, session_id: str) -> list[int]:
        """The turns of a session that are waited for here."""
        return self._waiters.parts(session_id)

    @property
    def needed(self) -> dict[str, int]:
        """Sessions with a turn that work in hand waits for: the last such turn of each."""
        last: dict[str, int] = {}
        for session_id, turn in self._waiters.needed:
            last[session_id] = max(turn, last.get(session_id, 0))
        return last

    def withdraw(self, session_id: str, turn: int, future: asyncio.Future[TurnResult[Any]]) -> None:
        """Its task waits no more."""
        self._hosts.discard(future)
        self._waiters.withdraw(session_id, turn, future)

    def tell(self, session_id: str, turn: int, result: TurnResult[Any] | BaseException) -> None:
        """Give a result, or why there is none, to every task that waits for it."""
        self._hosts.difference_update(self._waiters.resolve(session_id, turn, result))

    def hosts(self, session_id: str) -> list[int]:
        """Turns of a session that a host waits for who wants to know when one is only queued."""
        turns = self._waiters.parts(session_id)
        return [turn for turn in turns if not self._hosts.isdisjoint(self._waiters.of(session_id, turn))]

    def tell_queued(self, session_id: str, turn: int, result: TurnResult[Any]) -> None:
        """Give hosts the news that their turn is queued; all others wait on."""
        told = [future for future in self._waiters.of(session_id, turn) if future in self._hosts]
        for future in told:
            if not future.done():
                future.set_result(result)
            self.withdraw(session_id, turn, future)
