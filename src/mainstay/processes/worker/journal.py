"""The journal of one process: records and events of its owner are gathered, and written before anything else is done.

The answer to every write shows whether others wrote too: their events move the sequence further than ours did.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mainstay.engine.journal import SPILL_BYTES, Journal
from mainstay.errors import StoreDamaged
from mainstay.lifecycle.fold import PROGRESS
from mainstay.model.codec import encode
from mainstay.model.process import Event, ProcessOutcome, ProcessRow, Success, WaitOn
from mainstay.model.record import Spilled, StepRecord, StepRow
from mainstay.model.session import Node
from mainstay.model.tool import BlobRef
from mainstay.model.write import Advance, Advanced, ProcessScope, Write
from mainstay.ports.host import Clock
from mainstay.ports.store import Store

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
