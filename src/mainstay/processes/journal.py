"""The journal of one process: what its owner has to say is gathered, and written before anything else is done.

Every write brings news back: an event that somebody else wrote moves the sequence further than our own did.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from mainstay.engine.journal import SPILL_BYTES, write_referring
from mainstay.engine.patience import Patience
from mainstay.errors import StoreDamaged
from mainstay.lifecycle.fold import PROGRESS
from mainstay.model.codec import encode
from mainstay.model.process import Event, ProcessOutcome, ProcessRow, Success, WaitOn
from mainstay.model.process_write import Advance, Advanced, ProcessScope
from mainstay.model.session import Node
from mainstay.model.step import SpilledStep, StepRecord, StepRow
from mainstay.model.tool import BlobRef
from mainstay.ports.host import Clock
from mainstay.ports.store import Store

decode_step = msgspec.json.Decoder(StepRow).decode

R = TypeVar("R")
T = TypeVar("T")


class ProcessJournal:
    """The unwritten tail of a process's records and events, and the scope under which they are written.

    `looked` is the event up to which the owner has looked at what others wrote; `row` is the process as last seen.
    `on_events` is told of the row after a write with events.
    """

    __slots__ = (
        "_blobs",
        "_clock",
        "_doubtful",
        "_events",
        "_kept",
        "_ordinal",
        "_patience",
        "_pending",
        "_progress",
        "_repeats",
        "_store",
        "_writing",
        "first",
        "looked",
        "on_events",
        "row",
        "scope",
        "woken",
    )

    def __init__(self, store: Store, scope: ProcessScope, row: ProcessRow, clock: Clock) -> None:
        self._store, self.scope, self._clock, self.row = store, scope, clock, row
        self._patience = Patience(f"process {scope.id}", clock)
        self._ordinal = 0
        # Bytes, made at once: what a call has returned is its caller's to change, and must not change here.
        self._pending: list[bytes] = []
        self._repeats = 0  # how many of these only say that something is attempted again
        self._events: list[Event] = []
        self._progress: list[Event] = []
        self._blobs: list[str] = []
        # Bytes of blobs that no row refers to yet: a sweep may take one, and then it is put again.
        self._kept: dict[str, bytes | str] = {}  # of a file, its path
        self.first = row.record.first_started is None
        self.looked = row.record.sequence
        self.woken: list[ProcessRow] = []
        self.on_events: Callable[[ProcessRow], None] | None = None
        # One write at a time, and one whose end nobody saw is sent again before anything else: as in a turn's journal.
        self._writing = asyncio.Lock()
        self._doubtful: Advance | None = None

    def begin_at(self, ordinal: int) -> None:
        """The number of the next record, where some were written before."""
        self._ordinal = ordinal

    def record(self, record: StepRecord, repeats: bool = False) -> None:
        """With `repeats` it only says that a step is attempted again: who dies of it has made no progress."""
        self._pending.append(encode(record))
        self._repeats += repeats

    def event(self, event: Event) -> None:
        """An event that goes with the next write. Of progress only the newest counts, and it causes no write."""
        if event.type != PROGRESS:
            self._events.append(event)
            return
        self._progress.append(event)  # a thread may be here: a list takes this, and what is below, in one piece
        del self._progress[:-1]

    @property
    def news(self) -> bool:
        """Whether somebody else has written an event that the owner has not looked at."""
        return self.row.record.sequence > self.looked

    @property
    def begun(self) -> bool:
        """Whether the work has begun, as far as the store may know."""
        return not self.first or self._doubtful is not None or self._writing.locked()

    async def patiently(self, work: Callable[[T], Awaitable[R]], subject: T) -> R:
        """Do something that the function must not go on without, however long it takes; perhaps more than once."""
        return await self._patience.until_done(work, subject)

    async def flush(self) -> None:
        """Make everything recorded durable, and the start of the work before anything of it is done."""
        if not (self._pending or self._events or self.first or self._doubtful or self._writing.locked()):
            return
        async with self._writing:
            await self._send_rest()

    async def report(self) -> None:
        """The same, and progress too though nothing else is to be written."""
        if self._progress:
            async with self._writing:
                await self._send_rest(report=True)

    async def keep(self, data: bytes) -> str:
        """Put a blob that the next write refers to."""
        return await self._keep(data, self._blobs)

    async def keep_file(self, path: str) -> tuple[str, int]:
        """The same for a file of the host; its digest and its size."""
        digest, size = await self._patience.until_done(self._store.blobs.put_file, path)
        self._kept[digest] = path
        self._blobs.append(digest)
        return digest, size

    async def park(self, waits: tuple[WaitOn, ...]) -> bool:
        """Leave the process on disk until one of `waits` is over; False when something has happened already."""
        seen = self.looked  # what is looked at from here on, while others write, goes against parking
        async with self._writing:
            return (await self._send_rest(park=waits, seen=seen)).parked

    async def cut(self, segment: StepRecord, event: Event) -> None:
        """Forget every record before this one. Those that are not written yet need never be."""
        async with self._writing:
            await self._send_doubtful()
            self._ordinal += len(self._pending)
            self._pending[:] = [encode(segment)]
            self._repeats = 0
            self._events.append(event)
            await self._send_rest(drop=self._ordinal)

    async def settle(self, outcome: ProcessOutcome) -> Advanced:
        """End the process."""
        async with self._writing:
            return await self._send_rest(outcome=outcome)

    # ------------------------------------------------------------------ parts

    async def _send_rest(
        self,
        park: tuple[WaitOn, ...] = (),
        outcome: ProcessOutcome | None = None,
        drop: int | None = None,
        report: bool = False,
        seen: int | None = None,
    ) -> Advanced:
        await self._send_doubtful()
        pending, events, progress = list(self._pending), list(self._events), self._progress[-1:]
        repeats = self._repeats
        if not (pending or events or self.first or park or outcome is not None or (report and progress)):
            return Advanced(self.row)
        referred, blobs = len(self._blobs), list(self._blobs)
        nodes = []
        for ordinal, body in enumerate(pending, self._ordinal):
            small = len(body) <= SPILL_BYTES
            nodes.append(Node(ordinal, body if small else await self._stand_in(body, blobs)))
        if isinstance(outcome, Success):
            outcome = await self._spilled(outcome, blobs)
        self._doubtful = Advance(
            self.scope, self._clock.now(), tuple(nodes), (*events, *progress), self.first,
            self.looked if seen is None else seen, park, outcome, drop, tuple(blobs), 0 < len(pending) == repeats,
            self._store.identity() if self.first else "",
        )  # fmt: skip
        # Only now: others may have recorded more while blobs were written.
        del self._pending[: len(pending)], self._events[: len(events)], self._progress[: len(progress)]
        del self._blobs[:referred]
        self._repeats -= repeats
        self._ordinal += len(nodes)
        return await self._send(self._doubtful)

    async def _send_doubtful(self) -> None:
        if self._doubtful is not None:
            await self._send(self._doubtful)

    async def _send(self, advance: Advance) -> Advanced:
        """Send the write that is due, until the store has answered it."""
        send = functools.partial(self._patience.until_done, self._store.write, advance)
        advanced: Advanced = await (write_referring(send, self._put_again) if advance.blobs else send())
        self._doubtful = None
        self._kept.clear()
        started = advance.first and self.row.record.first_started is None
        ours = len(advance.events) + started + advanced.parked + (advance.outcome is not None)
        if advanced.row.record.sequence <= self.looked + ours:
            self.looked = advanced.row.record.sequence
        self.first, self.row = False, advanced.row
        if advance.events and self.on_events is not None:
            self.on_events(advanced.row)
        self.woken += advanced.woken
        return advanced

    async def _put_again(self) -> None:
        blobs = self._store.blobs
        for kept in self._kept.values():
            if isinstance(kept, str):
                await self._patience.until_done(blobs.put_file, kept)
            else:
                await self._patience.until_done(blobs.put, kept)

    async def _stand_in(self, body: bytes, blobs: list[str]) -> bytes:
        return encode(SpilledStep(await self._keep(body, blobs), len(body)))

    async def _spilled(self, outcome: Success, blobs: list[str]) -> Success:
        body = encode(outcome.value)
        if len(body) <= SPILL_BYTES:
            return outcome
        return Success(None, BlobRef(await self._keep(body, blobs), len(body)))

    async def _keep(self, data: bytes, blobs: list[str]) -> str:
        digest = await self._patience.until_done(self._store.blobs.put, data)
        self._kept[digest] = data
        blobs.append(digest)
        return digest


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
            if type(row) is SpilledStep:
                row = decode_step(await store.blobs.get(row.digest))
        except ValueError as error:
            raise StoreDamaged(f"process {process_id}", f"record {ordinal} is unreadable: {error}") from None
        if type(row) is SpilledStep:
            raise StoreDamaged(f"process {process_id}", f"the blob of record {ordinal} stands for another blob")
        found.append(row)
    return found, following or 0
