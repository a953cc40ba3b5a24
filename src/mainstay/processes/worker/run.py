"""A process that this worker works on: what its engine sees of it, and how what others write reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from mainstay.engine.gate import Gate
from mainstay.lifecycle.decide import declared
from mainstay.lifecycle.fold import PROGRESS
from mainstay.model.codec import clean
from mainstay.model.process import Event, ProcessRecord, ProcessRow
from mainstay.model.session import CancelRequest
from mainstay.model.write import ProcessScope
from mainstay.ports.host import Clock
from mainstay.ports.store import Store
from mainstay.processes.worker.journal import ProcessJournal

R = TypeVar("R")

EVENTS = 1000
"""Events that are read at a time."""


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

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def cancel(self, request: CancelRequest) -> None:
        self.gate.cancel(request)

    def leave(self) -> None:
        self.gate.leave()

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
        self.gate = Gate()
        self.listener: Listener = GateListener(self.gate)
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
        return await self.gate.guard(work, seconds)

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
