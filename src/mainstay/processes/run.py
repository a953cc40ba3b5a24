"""One process that a worker owns: its journal, what its engine sees of it, and how events of other writers reach it.

The owner's records and events are gathered in the journal, and written as one `Advance` before anything acts outside.
The answer to every write shows whether other writers added events too: the sequence has then moved further than ours
did. They are read (`catch_up`) and given to the listener of the run, which an engine may replace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from mainstay.engine.admission import Admission
from mainstay.engine.control import Control
from mainstay.engine.host import ClockSkew
from mainstay.engine.journal import SPILL_BYTES, Journal
from mainstay.errors import StoreDamaged
from mainstay.lifecycle.process import PROGRESS, declared
from mainstay.model.codec import clean, encode
from mainstay.model.process import (
    Event,
    ParentEnd,
    ProcessOutcome,
    ProcessRecord,
    ProcessRow,
    Success,
    WaitOn,
    WakePolicy,
)
from mainstay.model.record import Spilled, StepRecord, StepRow
from mainstay.model.session import CancelRequest, Node
from mainstay.model.tool import BlobRef
from mainstay.model.write import Advance, Advanced, ProcessScope, Write
from mainstay.ports.host import Clock, Random
from mainstay.ports.store import Store
from mainstay.tools.invoke import Threads

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

    def begin_at(self, ordinal: int) -> None:
        """The number of the next record, where some were written before."""
        self._ordinal = ordinal

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

    async def flush(self) -> None:
        """Make everything recorded durable, and the start of the work before anything of it is done."""
        if self._pending or self._events or self.first or not self._quiet:
            async with self._writing:
                await self._write()

    async def report(self) -> None:
        """The same, and progress too though nothing else is to be written."""
        if self._progress:
            async with self._writing:
                await self._write(report=True)

    async def keep(self, data: bytes) -> str:
        """Put a blob that the next write refers to."""
        digest = await super().keep(data)
        self._blobs.append(digest)
        return digest

    async def keep_file(self, path: str) -> tuple[str, int]:
        digest, size = await super().keep_file(path)
        self._blobs.append(digest)
        return digest, size

    async def park(self, waits: tuple[WaitOn, ...]) -> bool:
        """Leave the process on disk until one of `waits` is over; False when something has happened already."""
        seen = self.read_to  # what is read from here on, while others write, goes against parking
        async with self._writing:
            return (await self._write(park=waits, seen=seen)).parked

    async def cut(self, segment: StepRecord, event: Event) -> None:
        """Forget every record before this one. Those that are not written yet need never be."""
        async with self._writing:
            if self._in_doubt is not None:
                await self._settle()
            self._ordinal += len(self._pending)
            self._pending[:] = [encode(segment)]
            self._repeats = 0
            self._events.append(event)
            await self._write(drop=self._ordinal)

    async def settle(self, outcome: ProcessOutcome) -> Advanced:
        """End the process."""
        async with self._writing:
            return await self._write(outcome=outcome)

    async def _write(
        self,
        park: tuple[WaitOn, ...] = (),
        outcome: ProcessOutcome | None = None,
        drop: int | None = None,
        report: bool = False,
        seen: int | None = None,
    ) -> Advanced:
        """Write all that is gathered, if there is anything, as one `Advance`."""
        if self._in_doubt is not None:
            await self._settle()
        pending, events, progress = list(self._pending), list(self._events), self._progress[-1:]
        repeats = self._repeats
        if not (pending or events or self.first or park or outcome is not None or (report and progress)):
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
            self.read_to if seen is None else seen, park, outcome, drop, tuple(blobs), 0 < len(pending) == repeats,
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
        if answer.row.record.sequence <= self.read_to + ours:
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


class Unloaded(BaseException):
    """The process leaves this worker's memory: it is parked, or another worker goes on with it."""


class Listener(Protocol):
    """Given what happens to a process while it runs here."""

    def cancel(self, request: CancelRequest) -> None: ...

    def leave(self) -> None:
        """The Runtime is left, or another worker owns the process."""
        ...

    def on_event(self, sequence: int, kind: str, payload: Any) -> None:
        """Another writer has added an event to the process."""
        ...

    def process_ended(self, process_id: str) -> None:
        """A process has ended that this one waits for."""
        ...

    def awaited_signals(self) -> tuple[str, ...] | None:
        """The signals that it waits for in memory; None where that is not known."""
        ...


class GateListener:
    """For engines that only need to know when to stop."""

    def __init__(self, control: Control) -> None:
        self.control = control

    def cancel(self, request: CancelRequest) -> None:
        self.control.cancel(request)

    def leave(self) -> None:
        self.control.leave()

    def on_event(self, sequence: int, kind: str, payload: Any) -> None:
        """Nothing to do: it takes no signals."""

    def process_ended(self, process_id: str) -> None:
        """Nothing to do: it waits for no process."""

    def awaited_signals(self) -> tuple[str, ...] | None:
        return None


class ProcessRun:
    """One process that this worker owns and runs. It lives on the event loop.

    `parked`: it is on disk, waits, and has no owner now. `leaving`: the Runtime is left, or another worker owns it.
    `resting`: it only waits, so its place may be given to another; `placed`: it has one. `written_about`: others wrote
    about it while it ran, perhaps after it was parked. `listens` are the processes whose end it waits for.
    """

    def __init__(
        self, row: ProcessRow, scope: ProcessScope, store: Store, clock: Clock, changed: Callable[[ProcessRow], None]
    ) -> None:
        self.row, self.scope, self._store, self._clock = row, scope, store, clock
        self.registration = row.registration
        self.on_rest: Callable[[bool], None] | None = None
        self.journal = ProcessJournal(store, scope, row, clock, changed)
        self.control = Control()
        self.listener: Listener = GateListener(self.control)
        self.parked = self.resting = self.placed = False
        self.leaving = False
        self.written_about = False
        self.listens: set[str] = set()
        self._reading = asyncio.Lock()
        self._wanted = False

    # ------------------------------------------------------------------ for engines

    @property
    def record(self) -> ProcessRecord:
        return self.journal.row.record

    @property
    def attempt(self) -> int:
        return self.row.attempts

    @property
    def resumed(self) -> bool:
        return self.row.record.first_started is not None

    async def begin(self) -> None:
        await self.journal.flush()

    async def guard(self, work: Coroutine[Any, Any, R], seconds: float | None = None) -> R:
        return await self.control.guard(work, seconds)

    async def emit(self, event: str, payload: Any = None) -> None:
        declared(self.registration, event)
        self.journal.event(Event(event, clean(payload), self._clock.now()))
        await self.journal.flush()

    def progress(self, value: Any) -> None:
        self.journal.event(Event(PROGRESS, clean(value), self._clock.now()))

    # ------------------------------------------------------------------ what others write

    async def read_events_after(self, floor: int) -> None:
        """Give the listener, which is a new one, every event after number `floor`."""
        async with self._reading:
            self.journal.read_to = floor
            await self._read_events()

    async def _read_events(self) -> None:
        more = True
        while more:
            found = await self._store.events(self.row.pid, self.journal.read_to, EVENTS)
            for _, sequence, event in found:
                if sequence > self.journal.read_to:  # a write of ours may have moved it meanwhile
                    self.journal.read_to = sequence
                    self.listener.on_event(sequence, event.type, event.payload)
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
            row = await self._store.process(self.row.id)
        if row is None or row.owner != self.scope.owner or row.generation != self.scope.generation:
            self.leave()  # another worker owns it, or it has ended: the store refuses what is written from here
        elif row.record.cancel is not None:
            self.listener.cancel(row.record.cancel)

    def leave(self) -> None:
        self.leaving = True
        self.listener.leave()

    def rest(self, resting: bool) -> None:
        """It only waits from now on, or works again."""
        if resting != self.resting:
            self.resting = resting
            if self.on_rest is not None:
                self.on_rest(resting)


class Host(Protocol):
    """What a worker does for the functions that it runs."""

    store: Store
    clock: Clock
    random: Random
    threads: Threads
    admission: Admission
    deps: Any
    skew: ClockSkew

    async def still_ours(self, row: ProcessRow) -> bool:
        """Whether no other worker can have claimed the process."""
        ...

    def placed(self, process_id: str) -> bool:
        """Whether a process has a place to work in."""
        ...

    async def place(self, process_id: str) -> None:
        """Wait for one."""
        ...

    def listen(self, process_id: str, other: str) -> None:
        """Tell the one when the other has ended."""
        ...

    async def start_child(
        self, parent: ProcessRow, key: str, what: Any, args: Mapping[str, Any], options: ChildOptions
    ) -> str: ...

    async def signal(self, process_id: str, name: str, payload: Any, key: str) -> int: ...

    async def cancel(self, process_id: str, request: CancelRequest) -> None: ...


class ChildOptions(Struct, frozen=True):
    """How a child is started."""

    parent_end: ParentEnd = "cancel"
    label: str = ""
    wake: WakePolicy = "none"
