"""Telling sessions what their processes have to say: what waits in the outbox becomes inputs.

    session idle     everything that waits, in order, is one input: a turn when any of it asks for one, else a note
    session busy     it gathers; when the turn has committed and no input waits, it is the next turn
    next is open     people go first: what only notifies is a note to their turn, what asks for a turn waits on
    woken just now   it gathers until `GATHER_SECONDS` have passed since the last woken turn began: a process that tells
                     something a hundred times a second makes a few turns, not a hundred

Each delivery is one write (`Deliver`), so a wake is told once however often a Runtime dies. Who delivers is who has the
session's agent. What cannot be delivered is discarded with its reason, and may be brought back.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from perdure.engine.journal import spill, write_referring
from perdure.engine.runner import RuntimeMode, Supervisor
from perdure.errors import PerdureError, SessionDeleted, SessionFull, StoreError, UnknownSession
from perdure.lifecycle.process import statuses, wake_target
from perdure.model.codec import encode_checked
from perdure.model.event import ProcessChanged
from perdure.model.message import Message
from perdure.model.process import ProcessRow, WakeRow
from perdure.model.record import InputKind, Said
from perdure.model.session import SessionRow
from perdure.model.write import Accepted, Deliver, Dismiss
from perdure.observe.feed import Feed
from perdure.ports.host import Clock, Random
from perdure.ports.store import Store
from perdure.sessions.definition import Definition
from perdure.sessions.turns import Turns
from perdure.sessions.wakes.late_results import WakeNews, read, read_news

log = logging.getLogger("perdure.sessions")

EXPIRY_MS = 7 * 86_400_000
"""For so long a wake waits for a worker that has its session's agent."""
AT_ONCE = 1000
"""Wakes in one input; more are the turn after it."""
GATHER_SECONDS = 0.25
"""Between the beginnings of two woken turns of a session. Not for news of work that the last woken turn has started:
such work tells of itself when it has got somewhere, however soon that is."""


AllowedText: TypeAlias = Callable[[SessionRow, Sequence[WakeNews]], Awaitable[str]]
"""Makes the text that plugins of a session let it read."""


class Wakes:
    """Delivers wakes to the sessions of a Runtime.

    `_called` are sessions whose wakes are to be read, `_reading` those whose wakes a task reads. `_blocked` are those
    whose wakes have to wait for a commit: turns share this set, and call `between` for a session in it. `_woken` has
    the sessions that were woken just now, in order: when, by the event loop's clock, and the depth of that turn.
    """

    def __init__(  # noqa: PLR0913  # put together in one place
        self,
        store: Store,
        clock: Clock,
        random: Random,
        mode: RuntimeMode,
        supervisor: Supervisor,
        turns: Turns,
        definitions: Mapping[str, Definition],
        allowed_text: AllowedText,
        blocked: set[str],
    ) -> None:
        self._store, self._clock, self._random, self._mode = store, clock, random, mode
        self._supervisor, self._turns, self._definitions, self._allowed_text = (
            supervisor,
            turns,
            definitions,
            allowed_text,
        )
        self._called, self._reading, self._blocked = set[str](), set[str](), blocked
        self._woken: OrderedDict[str, tuple[float, int]] = OrderedDict()

    # ------------------------------------------------------------------ when

    def process_changed(self, row: ProcessRow) -> None:
        """A process has changed here: it may have left a wake for its session."""
        to = wake_target(row)
        if to is not None and (not row.live or any(each.wake is not None for each in row.registration.events)):
            self.call(to.session_id)

    def call(self, session_id: str) -> None:
        """Something may wait for this session."""
        if self._mode.draining:
            return  # it stays in the outbox, for the next Runtime
        self._called.add(session_id)
        if session_id not in self._reading:
            self._reading.add(session_id)
            _ = self._supervisor.spawn(self._deliver_called(session_id), f"wakes of {session_id}")

    async def _deliver_called(self, session_id: str) -> None:
        try:
            while session_id in self._called and not self._mode.draining:
                self._called.discard(session_id)
                opened = await self._deliver(session_id)
                if opened is not None and opened.row.state != "stuck":
                    self._turns.launch(opened.row)
        except StoreError as error:
            log.warning("wakes of session %s wait: %s", session_id, error)  # the watch comes back to them
        finally:
            self._reading.discard(session_id)

    async def between(self, row: SessionRow) -> SessionRow:
        """A turn has committed. What had to wait for it may be the next one: the session after that."""
        if self._mode.draining:
            return row
        try:
            opened = await self._deliver(row.id, between=True)
        except PerdureError as error:
            log.warning("wakes of session %s wait: %s", row.id, error)
            return row
        return row if opened is None else opened.row

    async def poll(self) -> None:
        """Deliver everything that waits: what a crash left, what other Runtimes have written; discard what expired."""
        if self._store.held() is not None:
            return
        waiting: dict[str, list[WakeRow]] = {}
        for wake in await self._store.wakes():
            waiting.setdefault(wake.session_id, []).append(wake)
        self._blocked.clear()
        self._blocked.update(waiting)  # before reading which sessions are busy, as below
        busy = {row.id for row in await self._store.open_sessions()} if waiting else ()
        for session_id, wakes in waiting.items():
            if session_id in busy:
                continue  # they gather, until the turn has committed
            self.call(session_id)
            if wakes[0].at <= self._clock.now() - EXPIRY_MS:
                await self._expire(session_id, wakes)

    async def could_deliver(self) -> bool:
        """Whether something waits that a session of this Runtime can be told now."""
        first = {wake.session_id: wake for wake in reversed(await self._store.wakes())}
        busy = {row.id for row in await self._store.open_sessions()} if first else ()
        for session_id in first.keys() - busy:
            row = await self._store.session(session_id)
            if row is not None and row.deleted:
                continue  # it is discarded
            agent = await self._agent_of(row, first[session_id])
            if agent is not None and self._turns.worker_for(agent) is not None:
                return True
        return False

    async def _expire(self, session_id: str, wakes: list[WakeRow]) -> None:
        """Discard wakes that no worker can deliver. A busy session is no reason: it is woken when it is idle."""
        row = await self._store.session(session_id)
        if (row is not None and row.turn is not None) or await self._agent_of(row, wakes[0]) in self._definitions:
            return
        before = self._clock.now() - EXPIRY_MS
        old = [wake for wake in wakes if wake.at <= before]
        await self._discard(old, "it expired: no Runtime with the session's agent came within 7 days")

    # ------------------------------------------------------------------ what

    async def _deliver(self, session_id: str, between: bool = False) -> Accepted | None:
        """Tell a session what waits for it. Returns the turn that this opened, if it did, for us to work on."""
        self._blocked.add(session_id)  # before looking: a commit meanwhile must not miss it
        while True:
            row, wakes = await self._store.session(session_id), await self._store.wakes(session_id)
            if not wakes:
                self._blocked.discard(session_id)
                return None
            if row is not None and row.deleted:
                await self._discard(wakes, "its session was deleted")
                continue
            busy = row is not None and row.turn is not None
            if busy:
                wakes = [wake for wake in wakes if wake.policy == "notify"] if between else []
            if not wakes:
                return None  # they gather, until the turn has committed
            agent = await self._agent_of(row, wakes[0])
            if agent is not None and self._turns.worker_for(agent) is None:
                self._blocked.discard(session_id)
                return None  # for a Runtime that has the agent
            if not busy and (seconds := self._gathers(session_id, wakes)) > 0:
                if between:
                    self.call(session_id)  # its task waits: the turn's has other things to do
                    return None
                await asyncio.sleep(seconds)
                continue
            whom = row or SessionRow(0, session_id, agent or "")
            delivered = await self._try(whom, wakes[:AT_ONCE], busy)
            if delivered is not None and delivered.opened:
                return delivered

    def _gathers(self, session_id: str, wakes: Sequence[WakeRow]) -> float:
        """For how many seconds these are to wait for more of their kind."""
        now = asyncio.get_running_loop().time()
        while self._woken and next(iter(self._woken.values()))[0] <= now - GATHER_SECONDS:
            self._woken.popitem(last=False)
        if session_id not in self._woken:
            return 0.0
        at, depth = self._woken[session_id]
        deeper = any(_depth(wake) > depth for wake in wakes)
        return 0.0 if deeper else at + GATHER_SECONDS - now

    async def _try(self, whom: SessionRow, wakes: list[WakeRow], busy: bool) -> Accepted | None:
        """One attempt. None: look again, something has changed."""
        known = await self._readable(wakes)
        if not known:
            return None
        turn = not busy and any(row.policy == "turn" for row, _ in known)
        try:
            return await self._put(whom, known, turn)
        except (SessionDeleted, SessionFull, UnknownSession) as error:
            await self._discard(wakes, str(error))
            return None

    async def _readable(self, wakes: Sequence[WakeRow]) -> list[tuple[WakeRow, WakeNews]]:
        """Wakes with what they say. One that cannot be read must not keep the others waiting."""
        known = []
        for row in wakes:
            try:
                known.append((row, await read_news(self._store, row)))
            except ValueError as error:
                log.error("wake %d of session %s is unreadable: %s", row.number, row.session_id, error)
                await self._discard([row], f"it is unreadable: {error}")
        return known

    async def _put(self, whom: SessionRow, known: list[tuple[WakeRow, WakeNews]], turn: bool) -> Accepted | None:
        session_id, agent = whom.id, whom.agent
        text = await self._allowed_text(whom, [each for _, each in known])
        now, op = self._clock.now(), f"{self._random.bits(64):016x}"
        kind: InputKind = "queue" if turn else "note"
        names = tuple(dict.fromkeys(each.wake.process_id for _, each in known))
        depth = max(each.wake.depth for _, each in known)
        stuck = self._too_deep(agent, depth) if turn else None
        # A person who lets a turn go on that was set aside begins anew.
        said = Said(Message("user", text), now, op, kind, wakes=names, depth=0 if stuck else depth)
        whole = encode_checked(said, "the news of processes")
        body, blobs = await spill(self._store, whole)
        numbers = tuple(row.number for row, _ in known)
        worker = self._turns.worker_for(agent)
        deliver = Deliver(session_id, agent, numbers, body, op, now, turn, worker, blobs, stuck)
        write = functools.partial(self._turns.runner.write, session_id, deliver)
        put_again = functools.partial(spill, self._store, whole)
        accepted = await (write_referring(write, put_again) if blobs else write())
        if accepted is not None and not accepted.opened:
            self._turns.note_inputs(session_id)
        if accepted is not None and accepted.opened:
            self._woken[session_id] = asyncio.get_running_loop().time(), depth
            self._woken.move_to_end(session_id)
        if stuck is not None:
            log.warning("session %s is set aside: %s", session_id, stuck)
        return accepted

    def _too_deep(self, agent: str, depth: int) -> str | None:
        """Why a session is set aside whose turns start work that wakes it, again and again; None while it may go on."""
        definition = self._definitions.get(agent)
        limit = None if definition is None else definition.wake_depth
        if limit is None or depth < limit:
            return None
        return (
            f"{depth} wakes in a row, each by work that the turn before had started: resume it if it should go on, or "
            "give its agent another wake_depth"
        )

    async def _agent_of(self, row: SessionRow | None, wake: WakeRow) -> str | None:
        """Whose session it is, or will be: one without any input is begun by its first wake."""
        if row is not None:
            return row.agent
        process = await self._store.process(read(wake).process_id)
        to = None if process is None else wake_target(process)
        return None if to is None else to.agent or None

    async def _discard(self, wakes: Sequence[WakeRow], reason: str) -> None:
        await self._store.write(Dismiss(tuple(wake.number for wake in wakes), self._clock.now(), reason))


def _depth(wake: WakeRow) -> int:
    try:
        return read(wake).depth
    except ValueError:
        return 0  # it is discarded when it is read for delivery


# ---------------------------------------------------------------------- events of processes

# Live events about a process for the observers of its sessions, in the order in which they happened.
#
# A process belongs to a session that asked for it, is woken by it, or may see it. The store is not read while there is
# no observer.

REMEMBERED = 4096
"""Processes whose last published event is remembered, so that nothing is published twice."""
LATEST = 32
"""Events of a process that are published when nothing of it was before, and another OS process has written them."""


class ProcessFeed:
    """Brings events of processes into the feed, each once and in order.

    `_rows` wait for that, each with the sequence after which its news begins; one task takes them. `_published` has the
    last event of each that was published.
    """

    def __init__(self, feed: Feed, store: Store, supervisor: Supervisor) -> None:
        self._feed, self._store, self._supervisor = feed, store, supervisor
        self._rows: dict[str, tuple[ProcessRow, int]] = {}
        self._publishing = False
        self._published: OrderedDict[str, int] = OrderedDict()
        self._cursor: int | None = None

    def process_changed(self, row: ProcessRow) -> None:
        """A process has changed here."""
        if self._feed.sessions:
            self._add(row, row.record.sequence - 1)

    async def poll(self) -> None:
        """Announce what other Runtimes have written."""
        before, self._cursor = self._cursor, await self._store.last_change()
        if before is None or not self._feed.sessions:
            return  # who observes from now on hears of what changes from now on
        while before < self._cursor and (found := await self._store.changes(before)):
            for _, row in found:
                self._add(row, await self._before(row, before))
            before = found[-1][0]

    async def _before(self, row: ProcessRow, cursor: int) -> int:
        """The last event of a process that had happened at a cursor."""
        if row.id in self._published:
            return self._published[row.id]
        oldest = max(0, row.record.sequence - LATEST)
        return next((n - 1 for place, n, _ in await self._store.events(row.pid, oldest) if place > cursor), oldest)

    def _add(self, row: ProcessRow, after: int) -> None:
        waiting = self._rows.get(row.id)
        if waiting is not None and waiting[0].record.sequence > row.record.sequence:
            row = waiting[0]
        self._rows[row.id] = row, after if waiting is None else min(after, waiting[1])
        if not self._publishing:
            self._publishing = True
            _ = self._supervisor.spawn(self._publish_all(), "events of processes")

    async def _publish_all(self) -> None:
        try:
            while self._rows:
                row, after = self._rows.pop(next(iter(self._rows)))
                await self._publish(row, self._published.get(row.id, after))
        finally:
            self._publishing = False

    async def _publish(self, row: ProcessRow, after: int) -> None:
        if after >= row.record.sequence:
            return
        channels = [channel for each in await self._observers(row) if (channel := self._feed.listening(each))]
        found = await self._store.events(row.pid, after) if channels else []
        happened = [(sequence, event) for _, sequence, event in found if sequence <= row.record.sequence]
        self._published[row.id] = row.record.sequence
        self._published.move_to_end(row.id)
        if len(self._published) > REMEMBERED:
            self._published.popitem(last=False)
        known = {"process_id": row.id, "name": row.registration.name, "label": row.registration.label}
        became = statuses([event.type for _, event in happened], row.status)
        for (sequence, event), status in zip(happened, became, strict=True):
            last = sequence == row.record.sequence
            fields = {
                "status": row.state if last else status,
                "change": event.type,
                "sequence": sequence,
                "at": event.at,
            }
            for channel in channels:
                channel.publish_relayed(ProcessChanged, "", known | fields)

    async def _observers(self, row: ProcessRow) -> list[str]:
        """Sessions that have readers and whose process it is."""
        to = wake_target(row)
        near = {row.holder, None if to is None else to.session_id}
        observed = list(self._feed.sessions)
        return [each for each in observed if each in near or await self._store.is_granted(each, row.id)]
