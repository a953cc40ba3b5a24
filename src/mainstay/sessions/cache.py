"""What this process has in memory of sessions. All of it is on disk too, and is dropped when it is idle longest."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from mainstay.engine.driver import Run
from mainstay.graph.view import View
from mainstay.model.codec import encode
from mainstay.model.message import Text
from mainstay.model.session import SessionRow
from mainstay.sessions.archive import Archive
from mainstay.sessions.setup import Overlay, Setup

KEEP = 4096
"""Sessions in memory; running ones, and those with an overlay, are kept beyond that."""

CACHE_BYTES = 64 * 1024 * 1024
"""What idle sessions may hold of their histories, together."""

MESSAGE_BYTES = 500
"""What a message takes besides its text, about."""


class SessionWork(Protocol):
    """The task that works on a session: its running turn, and the number of that until its end is announced."""

    @property
    def run(self) -> Run | None: ...

    @property
    def turn(self) -> int | None: ...


TaskT = TypeVar("TaskT", bound=SessionWork)


class CachedSession:
    """What is kept of a session: its view, what it runs with, and what a host laid over it.

    `setup` is what plugins have in memory; it is as good as the view beside it, and that of the turn while one runs.
    `weight` is of the first `weighed` messages of the view: a history is weighed once, not with every turn.
    """

    __slots__ = ("_saving", "overlay", "session_id", "setup", "view", "weighed", "weight")

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.view: View | None = None
        self.setup: Setup | None = None
        self.overlay: Overlay | None = None
        self.weight = self.weighed = 0
        self._saving: asyncio.Lock | None = None

    def keep_setup(self, setup: Setup | None) -> None:
        self.setup = setup

    def drop_view(self) -> None:
        """It may be ahead of what another worker has committed."""
        self.view = None

    @property
    def saving(self) -> asyncio.Lock:
        """Keeps operations from loading plugins while another one puts theirs on disk. Few sessions ever need it."""
        if self._saving is None:
            self._saving = asyncio.Lock()
        return self._saving

    @property
    def is_saving(self) -> bool:
        return self._saving is not None and self._saving.locked()


class SessionCache(Generic[TaskT]):
    """The sessions in memory, the one idle longest first.

    `tasks` are those that work on a session, by its id: `Turns` puts them there. `cached` is the weight of all
    histories together.
    """

    def __init__(self, archive: Archive, cache_bytes: int = CACHE_BYTES) -> None:
        self._archive, self._limit, self.cached = archive, cache_bytes, 0
        self.tasks: dict[str, TaskT] = {}
        self._by_id: OrderedDict[str, CachedSession] = OrderedDict()

    def of(self, session_id: str) -> CachedSession:
        found = self._by_id.get(session_id)
        if found is None:
            if len(self._by_id) >= KEEP:
                self._evict()
            found = self._by_id[session_id] = CachedSession(session_id)
        return found

    def get(self, session_id: str) -> CachedSession | None:
        """What is kept of a session; None, and nothing new, when nothing is."""
        return self._by_id.get(session_id)

    def all(self) -> list[CachedSession]:
        return list(self._by_id.values())

    def run(self, session_id: str) -> Run | None:
        """The running turn of a session."""
        task = self.tasks.get(session_id)
        return None if task is None else task.run

    async def view(self, row: SessionRow) -> View:
        """Committed history of a session, kept as long as it is in memory."""
        session = self.of(row.id)
        view = session.view
        # At head 0 there may be a fork's past, or a prelude that was set meanwhile.
        if view is None or view.head != row.head or (view.head == 0 and (row.fork is not None or row.settings)):
            session.view = view = await self._archive.view(row, view)
        return view

    def rest(self, session_id: str) -> None:
        """A session has become idle just now, or was read while it is: take note of what its view has grown by."""
        resident = self._by_id.get(session_id)
        if resident is None:
            return
        self._by_id.move_to_end(session_id)
        messages = [] if resident.view is None else resident.view.messages
        if len(messages) < resident.weighed:  # another view
            self._unload(resident)
        for message in messages[resident.weighed :]:
            grown = MESSAGE_BYTES
            for part in message.parts:
                grown += len(part.text) if type(part) is Text else len(encode(part))
            resident.weight += grown
            self.cached += grown
        resident.weighed = len(messages)
        if self.cached > self._limit or len(self._by_id) >= KEEP:
            self._evict()

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
        return resident.session_id not in self.tasks and not resident.is_saving

    def forget(self, session_id: str) -> bool:
        """Drop what is in memory of a session; False while a task works on it."""
        resident = self._by_id.get(session_id)
        if resident is None:
            return True
        if not self._is_idle(resident):
            return False
        self._unload(self._by_id.pop(session_id))
        return True

    def deleted(self, session_id: str) -> None:
        """The session is gone: stop what runs of it."""
        found, run = self._by_id.get(session_id), self.run(session_id)
        if found is not None:
            found.view = None
        if run is not None:
            run.control.leave()

    def lay_over(self, session_id: str, overlay: Overlay) -> bool:
        """Lay tools and prompts over a session from its next turn on; False when that changes nothing."""
        resident = self.of(session_id)
        if overlay.same(resident.overlay):
            return False
        resident.overlay = overlay
        if self.run(session_id) is None:
            resident.setup = None
        return True
