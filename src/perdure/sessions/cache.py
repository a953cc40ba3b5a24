"""What is committed of sessions: read from the store (`Archive`), and kept in memory (`SessionCache`).

All that is in memory is on disk too. The sessions that have been idle longest are dropped first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from msgspec.structs import replace

from perdure.engine.driver import SPARE, Run, decode_cancel
from perdure.engine.journal import load, load_turns
from perdure.engine.limits import RequestSizes
from perdure.engine.waits import asked, named, recalled
from perdure.errors import BlobMissing, CannotRetry, SessionDeleted, StoreDamaged
from perdure.graph.cells import Cell, PastCells
from perdure.graph.view import Stretch, TurnReader, View, stretches, with_text
from perdure.model.codec import encode
from perdure.model.ids import MAX_ORDINAL, call_in, turn_id
from perdure.model.llm import Usage
from perdure.model.message import Message, Text
from perdure.model.outcome import Finished, Outcome, PendingCall, Queued, Waiting, answerable
from perdure.model.record import Closed, Record, Replied
from perdure.model.session import SessionRow, WaitRow, dump_settings, load_settings
from perdure.model.tool import Cancelled
from perdure.ports.store import Store
from perdure.sessions.definition import Definition, plainly
from perdure.sessions.result import TurnResult
from perdure.sessions.setup import Overlay, Setup
from perdure.turn.machine import usage_of

PIECE = 64
"""A long history is read so many turns at a time, and others get their turn in between."""


class Archive:
    """Reads a store. Keeps nothing."""

    def __init__(self, store: Store, definitions: Mapping[str, Definition]) -> None:
        self._store, self._definitions = store, definitions

    @contextlib.asynccontextmanager
    async def _reading(self, row: SessionRow) -> AsyncGenerator[None, None]:
        """What is missing of a session that was deleted since `row` was read is no damage."""
        try:
            yield
        except (StoreDamaged, BlobMissing) as error:
            now = await self._store.session(row.id)
            if now is None or now.deleted:
                raise SessionDeleted(row.id) from error
            raise

    # ------------------------------------------------------------------ one turn

    async def records(self, row: SessionRow, turn: int) -> list[Record]:
        async with self._reading(row):
            records = [record for _, record in await load(self._store, row.sid, turn, turn)]
            if not records:
                raise StoreDamaged(f"session {row.id}", f"turn {turn} has no records")
            return records

    async def retriable(self, row: SessionRow) -> tuple[Outcome, int] | None:
        """Return the end of the last turn and the ordinal behind its records, or None if the turn is open again.

        Raises CannotRetry if there is no room for another record.
        """
        found = await load_turns(self._store, row.sid, row.head, row.head)
        closed = found[0].closed if found else None
        if closed is None:
            if found and found[0].last_end is not None:
                return None  # another caller continued it after `row` was read
            raise StoreDamaged(f"session {row.id}", f"turn {row.head} is its head and has no end")
        count = len(found[0].records)
        if closed.rest or count + SPARE > MAX_ORDINAL:
            raise CannotRetry(turn_id(row.id, row.head), "it has no room for more records: say something new")
        return closed.outcome, count

    async def before(self, row: SessionRow, turn: int) -> tuple[int, bytes | None]:
        """The head of a session before a committed turn; and its settings with the prelude that this turn recorded, if
        it recorded one."""
        prelude = (await load_turns(self._store, row.sid, turn, turn))[0].last_end
        settings = None
        if prelude is not None and prelude.prelude:
            settings = dump_settings(replace(load_settings(row.settings), prelude=prelude.prelude))
        for number in range(turn - 1, 0, -1):
            found = await load_turns(self._store, row.sid, number, number)
            if found and found[0].closed is not None:
                return number, settings
        return 0, settings

    async def joined(self, row: SessionRow, turn: int) -> int:
        """The turn that an input opened, or was delivered into."""
        found = await load_turns(self._store, row.sid, turn, turn)
        return turn if not found or found[0].joined is None else found[0].joined

    async def result(self, row: SessionRow, turn: int) -> TurnResult[Any] | None:
        """How a turn ended; None when it has not."""
        found = await load_turns(self._store, row.sid, turn, turn)
        closed = found[0].closed if found else None
        if closed is None:
            return None
        past, own = View(), View()
        async with self._reading(row):
            await self._load(row, past, turn - 1)
        past.messages.extend(closed.prelude)
        own.extend(turn, found[0].records)
        return TurnResult(
            turn_id(row.id, turn),
            row.id,
            row.agent,
            with_text(closed.outcome, own.messages),
            found[0].usage,
            found[0].records,
            past.messages,
            self._revive(row),
        )

    async def outcome(self, row: SessionRow, turn: int) -> Outcome:
        """How a committed turn ended, without its past."""
        async with self._reading(row):
            found = await load_turns(self._store, row.sid, turn, turn)
            closed = found[0].closed if found else None
            if closed is None:
                raise StoreDamaged(f"session {row.id}", f"turn {turn} is before its head and has no end")
            own = View()
            own.extend(turn, found[0].records)
            return with_text(closed.outcome, own.messages)

    def _revive(self, row: SessionRow) -> Callable[[Finished], Any] | None:
        if row.settings and load_settings(row.settings).output is not None:
            return plainly
        definition = self._definitions.get(row.agent)
        return None if definition is None else definition.revive

    async def refused(self, row: SessionRow, turn: int) -> TurnResult[Any] | None:
        """How a queued input will end that was cancelled before its turn came: there is nothing to wait for."""
        waiting = next((m for m in await self._store.inbox(row.sid) if m.input == turn), None)
        if waiting is None or waiting.cancel is None:
            return None
        request = decode_cancel(waiting.cancel)
        closed = Closed(Cancelled(request.by, request.reason), Usage())
        records = [*await self.records(row, turn), closed]
        past = (await self.view(row, None)).messages
        return TurnResult(turn_id(row.id, turn), row.id, row.agent, closed.outcome, closed.usage, records, past)

    async def parked(self, row: SessionRow, past: list[Message]) -> TurnResult[Any]:
        """A turn that waits."""
        assert row.turn is not None
        records = await self.records(row, row.turn)
        outcome = Waiting(await self.waits(row))
        usage = sum((usage_of(r) for r in records if isinstance(r, Replied)), Usage())
        closed = Closed(outcome, usage)
        return TurnResult(turn_id(row.id, row.turn), row.id, row.agent, outcome, usage, [*records, closed], past)

    async def queued(self, row: SessionRow, turn: int, outcome: Queued) -> TurnResult[Any]:
        """A turn that has not begun: nothing but its input is recorded."""
        records = [*await self.records(row, turn), Closed(outcome, Usage())]
        past = (await self.view(row, None)).messages
        return TurnResult(turn_id(row.id, turn), row.id, row.agent, outcome, Usage(), records, past)

    async def pending(self, row: SessionRow) -> tuple[PendingCall, ...]:
        """The open turn's waits that a person or an outside key can answer, in the order of their calls."""
        return answerable(await self.waits(row))

    async def waits(self, row: SessionRow) -> tuple[PendingCall, ...]:
        """All open waits of the open turn, in the order of their calls."""
        waits = await asked(self._store, [w for w in await self._store.waits(row.sid) if w.state == "open"])
        return tuple(sorted(waits, key=lambda p: [int(n) for n in call_in(row.id, p.call_id)[1].split(".")]))

    async def recalled(self, row: SessionRow, wait_id: str) -> WaitRow | None:
        """How a wait of a turn that has ended did; None when there was none."""
        turn = named(wait_id)[1]
        if not 0 < turn < row.next or turn == row.turn:
            return None
        return recalled(wait_id, row.sid, [record for _, record in await load(self._store, row.sid, turn, turn)])

    # ------------------------------------------------------------------ a history

    async def view(self, row: SessionRow, known: View | None) -> View:
        """Committed history up to the head: what is known of it, and what was committed since."""
        # A new object: another task may be loading the same history, or running on what is remembered.
        fresh = View()
        if known is not None and 0 < known.head < row.head:
            fresh = View(known.head, list(known.messages), known.frame, known.summary, dict(known.snapshots))
        async with self._reading(row):
            await self._load(row, fresh, row.head)
        if row.head == 0:
            fresh.messages.extend(load_settings(row.settings).prelude)
        return fresh

    async def cells(self, row: SessionRow, after: int, last: int) -> list[Cell]:
        """The cells of turns after one of the session's, up to another; after 0 also those that it was forked with."""
        found: list[Cell] = []
        async with self._reading(row):
            for stretch in await self._past(row) if after == 0 else ():
                part = PastCells(stretch.sid)
                await self._extend(stretch.sid, part, 1, stretch.last, stretch.ordinal)
                found += part.cells
            own = PastCells(row.sid)
            await self._extend(row.sid, own, after + 1, last, None)
        return [*found, *own.cells]

    async def _load(self, row: SessionRow, view: TurnReader, last: int) -> None:
        if view.head == 0 and row.fork is not None:
            for stretch in await self._past(row):
                await self._extend(stretch.sid, view, 1, stretch.last, stretch.ordinal)
            view.reach(0)  # its own turns begin here
        view.reach(await self._extend(row.sid, view, view.head + 1, last, None))

    async def _past(self, row: SessionRow) -> list[Stretch]:
        """What a session was forked with, of each session that it goes back to."""
        lineage = [row]
        while (fork := lineage[-1].fork) is not None:
            source = await self._store.session_by_sid(fork.sid)
            if source is None:
                raise StoreDamaged(f"session {row.id}", "the session it was forked from is gone")
            lineage.append(source)
        return stretches(lineage)[:-1]

    async def _extend(self, sid: int, view: TurnReader, first: int, last: int, ordinal: int | None) -> int:
        if last < first:
            return last
        for begin in range(first, last + 1, PIECE):
            end = min(begin + PIECE - 1, last)
            found = await load_turns(self._store, sid, begin, end)
            if [turn.number for turn in found] != list(range(begin, end + 1)):
                raise StoreDamaged(f"session number {sid}", f"a turn between {begin} and {end} is missing")
            for turn in found:
                closed = turn.closed if turn.number != last or ordinal is None else turn.last_end
                if closed is None:
                    continue  # an input that was delivered into another turn, or a note that still waits for one
                records = turn.records if turn.number != last or ordinal is None else turn.records[: ordinal + 1]
                view.extend(turn.number, records, closed.prelude)
            await asyncio.sleep(0)
        return last


# ---------------------------------------------------------------------- in memory

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

    __slots__ = ("_saving", "_sizes", "overlay", "session_id", "setup", "view", "weighed", "weight")

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.view: View | None = None
        self.setup: Setup | None = None
        self.overlay: Overlay | None = None
        self.weight = self.weighed = 0
        self._saving: asyncio.Lock | None = None
        self._sizes: RequestSizes | None = None

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
    def sizes(self) -> RequestSizes:
        """How large its requests are, where limits hold."""
        if self._sizes is None:
            self._sizes = RequestSizes()
        return self._sizes

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
        session = self._by_id.get(session_id)
        if session is None:
            return
        self._by_id.move_to_end(session_id)
        messages = [] if session.view is None else session.view.messages
        if len(messages) < session.weighed:  # another view
            self._unload(session)
        for message in messages[session.weighed :]:
            grown = MESSAGE_BYTES
            for part in message.parts:
                grown += len(part.text) if type(part) is Text else len(encode(part))
            session.weight += grown
            self.cached += grown
        session.weighed = len(messages)
        if self.cached > self._limit or len(self._by_id) >= KEEP:
            self._evict()

    def _unload(self, session: CachedSession) -> None:
        self.cached -= session.weight
        session.weight = session.weighed = 0

    def _evict(self) -> None:
        """Drop the sessions that have been idle longest, until the others are neither too many nor too heavy."""
        many, heavy, dropped = len(self._by_id) + 1 - KEEP, self.cached - self._limit, list[CachedSession]()
        for session in self._by_id.values():
            if many <= 0 and heavy <= 0:
                break
            if self._is_idle(session) and session.overlay is None:
                dropped.append(session)
                many, heavy = many - 1, heavy - session.weight
        for session in dropped:
            self._unload(self._by_id.pop(session.session_id))

    def _is_idle(self, session: CachedSession) -> bool:
        return session.session_id not in self.tasks and not session.is_saving

    def forget(self, session_id: str) -> bool:
        """Drop what is in memory of a session; False while a task works on it."""
        session = self._by_id.get(session_id)
        if session is None:
            return True
        if not self._is_idle(session):
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
        session = self.of(session_id)
        if overlay.same(session.overlay):
            return False
        session.overlay = overlay
        if self.run(session_id) is None:
            session.setup = None
        return True
