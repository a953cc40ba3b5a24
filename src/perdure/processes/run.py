"""One process that a worker owns: its journal, what its engine sees of it, and how events of other writers reach it.

The owner's records and events are gathered in the journal, and written as one `Advance` before anything acts outside.
The answer to every write shows whether other writers added events too: the sequence has then moved further than ours
did. They are read (`catch_up`) and given to the listener of the run, which an engine may replace.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from perdure.engine.admission import Admission, Needs, ThreadPlaces
from perdure.engine.control import Control, OutOfTime, TurnCancelled
from perdure.engine.host import ClockSkew
from perdure.engine.journal import SPILL_BYTES, Journal
from perdure.engine.lease import Worker
from perdure.errors import Fenced, StoreDamaged, TimedOut
from perdure.lifecycle.process import EXTERNAL_REF_SET, PROGRESS, SIGNAL, declared
from perdure.model.codec import clean, encode
from perdure.model.process import (
    Event,
    ProcessOutcome,
    ProcessRecord,
    ProcessRow,
    Signal,
    Success,
    WaitOn,
)
from perdure.model.record import Spilled, StepRecord, StepRow
from perdure.model.session import CancelRequest, Node
from perdure.model.tool import BlobRef
from perdure.model.write import Advance, Advanced, ProcessScope, Write
from perdure.ports.host import Clock
from perdure.ports.process import CancelRequested, EngineHost, Leaving, ProcessListener, Unloaded
from perdure.ports.store import Store
from perdure.tools.invoke import Threads

R = TypeVar("R")

EVENTS = 1000
"""Events that are read at a time."""

decode_step = msgspec.json.Decoder(StepRow).decode


class ProcessJournal(Journal[Advanced]):
    """The unwritten tail of a process's records and events, and the scope under which they are written.

    `read_to` is the event up to which the owner has read what others wrote; `row` is the process as last seen; `first`:
    its start is not written yet. `woken` are processes that writes of ours gave something to do. `changed` is called
    with the row after a write with events.
    """

    __slots__ = (
        "_blobs",
        "_changed",
        "_events",
        "_pending",
        "_progress",
        "_repeats",
        "first",
        "read_to",
        "row",
        "scope",
        "woken",
    )

    def __init__(
        self,
        store: Store,
        scope: ProcessScope,
        row: ProcessRow,
        clock: Clock,
        changed: Callable[[ProcessRow], None],
    ) -> None:
        super().__init__(store, clock, f"process {scope.id}", 0)
        self.scope, self.row = scope, row
        # Bytes, made at once: what a call has returned is its caller's to change, and must not change here.
        self._pending: list[bytes] = []
        self._repeats = 0  # how many of these only say that something is attempted again
        self._events: list[Event] = []
        self._progress: list[Event] = []
        self._blobs: list[str] = []
        self.first = row.record.first_started is None
        self.read_to = row.record.sequence
        self.woken: list[ProcessRow] = []
        self._changed = changed

    async def load(self) -> list[StepRecord]:
        """What earlier owners recorded. The next record of this one follows."""
        records, self._ordinal = await load_steps(self._store, self.scope.pid, self.scope.id)
        return records

    def record(self, record: StepRecord, repeats: bool = False) -> None:
        """With `repeats` it only says that a step is attempted again: a worker that dies then has made no progress."""
        self._pending.append(encode(record))
        self._repeats += repeats

    def event(self, event: Event) -> None:
        """An event that goes with the next write. Of progress only the newest counts, and it causes no write."""
        if event.type != PROGRESS:
            self._events.append(event)
            return
        # Threads report progress too: each of these two list operations is atomic.
        self._progress.append(event)
        del self._progress[:-1]

    @property
    def has_unread(self) -> bool:
        """Whether another writer has added an event that the owner has not read."""
        return self.row.record.sequence > self.read_to

    @property
    def begun(self) -> bool:
        """Whether the work has begun, as far as the store may know."""
        return not (self.first and self._quiet)

    async def report(self) -> None:
        """Flush, and write progress too though nothing else is to be written."""
        if self._progress:
            await self.flush(report=True)

    async def keep(self, data: bytes) -> str:
        """Put a blob that the next write refers to."""
        digest = await super().keep(data)
        self._blobs.append(digest)
        return digest

    async def keep_file(self, path: str, patient: bool = True) -> tuple[str, int]:
        digest, size = await super().keep_file(path, patient)
        self._blobs.append(digest)
        return digest, size

    async def cut(self, segment: StepRecord, event: Event) -> None:
        """Forget every record before this one. Those that are not written yet need never be."""
        await self.flush(cut=(segment, event))

    async def flush(
        self,
        park: tuple[WaitOn, ...] = (),
        outcome: ProcessOutcome | None = None,
        cut: tuple[StepRecord, Event] | None = None,
        report: bool = False,
    ) -> Advanced:
        """Make everything recorded durable as one `Advance`, and the start of the work before anything of it is done.

        With `park` the process is left on disk until one of these waits is over, unless another writer has added an
        event meanwhile: then the answer is not parked. `outcome` ends it, `cut` is what `cut` was given, and `report`
        writes progress although nothing else is to be written.
        """
        ends = bool(park) or outcome is not None or cut is not None
        if not (self._pending or self._events or self.first or ends or report or not self._quiet):
            return Advanced(self.row)
        read_to, drop = self.read_to, None  # with `park`, an event that is read while other writes go on counts
        async with self._writing:
            if self._in_doubt is not None:
                await self._settle()
            if cut is not None:
                self._ordinal += len(self._pending)
                self._pending[:], self._repeats, drop = [encode(cut[0])], 0, self._ordinal
                self._events.append(cut[1])
            pending, events, progress = list(self._pending), list(self._events), self._progress[-1:]
            repeats = self._repeats
            if not (pending or events or self.first or ends or (report and progress)):
                return Advanced(self.row)
            referred, blobs = len(self._blobs), list(self._blobs)
            nodes = []
            for ordinal, body in enumerate(pending, self._ordinal):
                if len(body) > SPILL_BYTES:
                    digest = await Journal.keep(self, body)
                    blobs.append(digest)
                    body = encode(Spilled(digest, len(body)))
                nodes.append(Node(ordinal, body))
            if isinstance(outcome, Success) and len(value := encode(outcome.value)) > SPILL_BYTES:
                blobs.append(await Journal.keep(self, value))
                outcome = Success(None, BlobRef(blobs[-1], len(value)))
            advance = Advance(
                self.scope, self._clock.now(), tuple(nodes), (*events, *progress), self.first,
                read_to if park else self.read_to, park, outcome, drop, tuple(blobs), 0 < len(pending) == repeats,
                self._store.identity() if self.first else "",
            )  # fmt: skip
            self._in_doubt = advance, advance.blobs
            # Only now: others may have recorded more while blobs were written.
            del self._pending[: len(pending)], self._events[: len(events)], self._progress[: len(progress)]
            del self._blobs[:referred]
            self._repeats -= repeats
            self._ordinal += len(nodes)
            return await self._settle()

    def _answered(self, write: Write[Advanced], answer: Advanced) -> None:
        assert isinstance(write, Advance)
        started = write.first and self.row.record.first_started is None
        ours = len(write.events) + started + answer.parked + (write.outcome is not None)
        # What came after the write may have been read before its answer: `read_to` never goes back.
        if self.read_to < answer.row.record.sequence <= self.read_to + ours:
            self.read_to = answer.row.record.sequence
        self.first, self.row = False, answer.row
        if write.events:
            self._changed(answer.row)
        self.woken += answer.woken


async def load_steps(store: Store, pid: int, process_id: str) -> tuple[list[StepRecord], int]:
    """The records of a process and the number of the next one. A missing or unreadable one is damage."""
    found: list[StepRecord] = []
    following: int | None = None
    for ordinal, body in await store.steps(pid):
        if following is not None and ordinal != following:
            raise StoreDamaged(f"process {process_id}", f"its journal lacks a record before {ordinal}")
        following = ordinal + 1
        try:
            row = decode_step(body)
            if type(row) is Spilled:
                row = decode_step(await store.blobs.get(row.digest))
        except ValueError as error:
            raise StoreDamaged(f"process {process_id}", f"record {ordinal} is unreadable: {error}") from None
        if type(row) is Spilled:
            raise StoreDamaged(f"process {process_id}", f"the blob of record {ordinal} stands for another blob")
        found.append(row)
    return found, following or 0


class Host(EngineHost, Protocol):
    """What a worker does for the processes that it runs, and for the engines that run durable functions and tools."""

    worker: Worker
    threads: Threads
    admission: Admission
    thread_places: ThreadPlaces
    skew: ClockSkew

    @property
    def place_needs(self) -> Needs:
        """What a process takes while it works."""
        ...

    async def still_ours(self, row: ProcessRow) -> bool:
        """Whether no other worker has claimed the process, asked of the store."""
        ...

    def announce(self, row: ProcessRow) -> None:
        """Events of the owner were written."""
        ...

    def fill_places(self) -> None:
        """A place is free: give it to a process that waits on disk for one."""
        ...

    def listen(self, process_id: str, other: str) -> None:
        """Tell the one when the other has ended."""
        ...


H = TypeVar("H", bound=Host)


class SignalQueue:
    """The listener of `ProcessRun.signals`: signals that were not taken yet, and whether there will be more."""

    def __init__(self) -> None:
        self.signals: deque[Signal] = deque()
        self.changed = asyncio.Event()
        self.stopped = False

    def cancel(self, request: CancelRequest) -> None:
        self.leave()

    def leave(self) -> None:
        self.stopped = True
        self.changed.set()

    def on_event(self, sequence: int, kind: str, payload: Any) -> None:
        if kind.startswith(SIGNAL):
            self.signals.append(Signal(sequence, kind.removeprefix(SIGNAL), payload))
            self.changed.set()

    def process_ended(self, process_id: str) -> None:
        """Nothing to do: signals are all that is listened for."""

    def awaited_signals(self) -> tuple[str, ...] | None:
        return None


class ProcessRun(Generic[H]):
    """One process that this worker owns and runs, as its engine sees it (`EngineRun`). It lives on the event loop.

    `parked`: it is on disk, waits, and has no owner now. `leaving`: the Runtime is left, or another worker owns it.
    `_over`: its engine has returned; a tool that ignored its cancellation may still call it, and changes nothing.
    `placed`: it has a place among the processes that run at once; `resting`: it only waits, and needs none. `_placing`
    waits for one, for all branches that want it. `written_about`: others wrote about it while it ran, perhaps after it
    was parked. `listens` are the processes whose end it waits for. `_listener` is given what happens, after `control`.
    """

    def __init__(self, row: ProcessRow, host: H, owner: str) -> None:
        self.row, self.host, self.registration, self.name = row, host, row.registration, f"process {row.id}"
        self.resumed = row.record.first_started is not None
        self.scope = ProcessScope(row.id, row.pid, owner, row.generation)
        self.journal = ProcessJournal(host.store, self.scope, row, host.clock, host.announce)
        self.control, self.deps = Control(), host.deps
        self._listener: ProcessListener | None = None
        self.placed, self.resting = True, False
        self.parked = self.leaving = self.written_about = self._over = False
        self.listens: set[str] = set()
        self._placing: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._wanted = False

    @property
    def record(self) -> ProcessRecord:
        return self.journal.row.record

    @property
    def attempt(self) -> int:
        return self.row.attempts

    # ------------------------------------------------------------------ writing

    async def begin(self) -> None:
        await self.journal.flush()
        if self.journal.has_unread:
            await self.journal.patiently(ProcessRun.catch_up, self)
        if not self.host.worker.sure() and not await self.host.still_ours(self.row):
            raise Fenced(self.name, self.scope.generation)

    async def emit(self, event: str, payload: Any = None) -> None:
        declared(self.registration, event)
        await self._write(event, payload)

    def progress(self, value: Any) -> None:
        self.journal.event(Event(PROGRESS, clean(value), self.host.clock.now()))

    async def set_external_ref(self, reference: Any) -> None:
        await self._write(EXTERNAL_REF_SET, reference)

    async def _write(self, event: str, payload: Any) -> None:
        self.journal.event(Event(event, clean(payload), self.host.clock.now()))
        await self.journal.flush()

    # ------------------------------------------------------------------ what others write

    @property
    def cancel_request(self) -> CancelRequest | None:
        return self.control.request

    def check(self) -> None:
        if self.control.request is not None:
            raise CancelRequested(self.control.request)
        if self.leaving:
            raise Leaving

    async def signals(self, after: int = 0) -> AsyncIterator[Signal]:
        queue = SignalQueue()
        await self.listen(queue, after)
        while not queue.stopped:
            while queue.signals:
                yield queue.signals.popleft()
            queue.changed.clear()
            await queue.changed.wait()

    async def listen(self, listener: ProcessListener, after: int | None = None) -> None:
        journal = self.journal
        async with self._reading:  # what another task is reading is for the listener before this one
            self._listener = listener
            # The first event is `process.created`, which no listener needs. `read_to` may be ahead of the row: another
            # task has read more.
            if after is not None and max(journal.row.record.sequence, journal.read_to) > max(after, 1):
                journal.read_to = after
                await self._read_events()
        if self.leaving:
            listener.leave()
        if self.control.request is None and journal.row.record.cancel is not None:
            self.control.cancel(journal.row.record.cancel)
        if self.control.request is not None:
            listener.cancel(self.control.request)

    async def _read_events(self) -> None:
        journal, more = self.journal, True
        while more:
            found = await self.host.store.events(self.row.pid, journal.read_to, EVENTS)
            for _, sequence, event in found:
                if sequence > journal.read_to:  # a write of ours may have moved it meanwhile
                    journal.read_to = sequence
                    if self._listener is not None:
                        self._listener.on_event(sequence, event.type, event.payload)
            more = len(found) == EVENTS

    async def catch_up(self) -> None:
        """Read what others wrote since the last time. Of many tasks that want that at once, one reads."""
        if self._wanted:
            async with self._reading:
                return
        self._wanted = True
        async with self._reading:
            self._wanted = False
            await self._read_events()
            row = await self.host.store.process(self.row.id)
        if row is None or row.owner != self.scope.owner or row.generation != self.scope.generation:
            self.leave()  # another worker owns it, or it has ended: the store refuses what is written from here
        elif row.record.cancel is not None:
            self.cancel(row.record.cancel)

    def noticed(self) -> Coroutine[Any, Any, None]:
        """Another writer has changed the row: what reads that, for a task of its own."""
        self.written_about = True
        return self.catch_up()

    def cancel(self, request: CancelRequest) -> None:
        """It was asked to end."""
        self.control.cancel(request)
        if self._listener is not None:
            self._listener.cancel(request)

    def leave(self) -> None:
        """The Runtime is left, or another worker owns it."""
        self.leaving = True
        self.control.leave()
        if self._listener is not None:
            self._listener.leave()

    def process_ended(self, process_id: str) -> None:
        if self._listener is not None:
            self._listener.process_ended(process_id)

    def awaited_signals(self) -> tuple[str, ...] | None:
        return None if self._listener is None else self._listener.awaited_signals()

    async def watch_end(self, process_id: str) -> ProcessRow | None:
        self.host.listen(self.row.id, process_id)  # before the row is read: it may end meanwhile
        self.listens.add(process_id)
        return await self.journal.patiently(self.host.store.process, process_id)

    # ------------------------------------------------------------------ waiting

    async def guard(self, work: Coroutine[Any, Any, R], seconds: float | None = None) -> R:
        try:
            return await self.control.guard(work, seconds)
        except TurnCancelled:
            assert self.control.request is not None
            raise CancelRequested(self.control.request) from None
        except OutOfTime:
            raise TimedOut("the work did not end", seconds) from None

    def rest(self, resting: bool = True) -> None:
        """It only waits from now on, or works again: then it has its place back if one is free."""
        if resting == self.resting or self._over:
            return
        self.resting = resting
        if not resting:
            self.placed = self.placed or self.host.admission.try_take(self.host.place_needs)
        elif self.placed:
            self.placed = False
            self.host.admission.release(self.host.place_needs)
            self.host.fill_places()

    async def place(self) -> None:
        """Wait for a place, all branches of it for the same one."""
        if self.placed:
            return
        if self._placing is None or self._placing.done():
            self._placing = asyncio.get_running_loop().create_task(self._take_place())
        await asyncio.shield(self._placing)

    async def _take_place(self) -> None:
        await self.host.admission.take(self.host.place_needs)
        if self.placed:  # it had one again meanwhile
            self.host.admission.release(self.host.place_needs)
        self.placed = True

    async def park(self, *waits: WaitOn) -> None:
        self.parked = not self.journal.has_unread and (await self.journal.flush(park=waits)).parked
        if self.parked:
            raise Unloaded
        await self.journal.patiently(ProcessRun.catch_up, self)
