"""Finds processes whose owner died, whose time has come, or that other Runtimes wrote about."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Mapping, Sequence

from mainstay.model.process import ProcessRow
from mainstay.ports.host import Clock
from mainstay.processes.worker.worker import PAGE, ProcessWorker

log = logging.getLogger("mainstay.processes")

DUE_AT_ONCE = 1024
"""Parked processes whose time has come that are looked at at a time."""


class ProcessWatch:
    """Called by the watch of the Runtime, a few times a second."""

    def __init__(self, worker: ProcessWorker, clock: Clock) -> None:
        self._worker, self._store, self._clock = worker, worker.store, clock

    async def take_over(
        self, rows: Sequence[ProcessRow], gone: Mapping[str, str | None], known: set[str], held: Container[int]
    ) -> None:
        """Claim every process of `rows` that no living worker owns, except those of the numbers in `held`.

        `gone` are dead workers, with the proof of it if any.
        """
        found, unowned = list[tuple[ProcessRow, str | None]](), False
        for row in rows:
            if row.owner is None:
                unowned = True
            elif row.pid in held or row.owner == self._worker.id:
                continue
            elif row.owner in gone:
                found.append((row, gone[row.owner]))
            elif row.owner not in known:
                found.append((row, "its worker has retired"))
        for at in range(0, len(found), PAGE):
            await asyncio.gather(*(self._worker.recover(row, proof) for row, proof in found[at : at + PAGE]))
        if unowned:
            self._worker.find_unowned()
        self._worker.runner.adopt(rows)

    def adopt(self, rows: Sequence[ProcessRow]) -> None:
        """Launch processes of ours that have no task."""
        self._worker.runner.adopt(rows)

    def is_for_us(self, row: ProcessRow) -> bool:
        """Whether this worker could run the process."""
        return self._worker.works and self._worker.can(row.registration) and not self._worker.mode.leaving

    async def claim(self, row: ProcessRow, proof: str | None) -> bool:
        """Claim one process."""
        return await self._worker.claim(row, proof)

    @property
    def holds(self) -> bool:
        """Whether processes wait for a suspect to make room."""
        return bool(self._worker.held)

    def retry_held(self) -> None:
        """No suspect runs here: processes that were held back may be tried again."""
        self._worker.retry_held()

    async def wake(self, now: int) -> None:
        """Claim the parked processes whose time has come."""
        if self._worker.backlog:
            return  # what was found before has no place yet, and would be found again
        skew = self._worker.skew
        now = skew.look()
        passed = 0
        while True:
            due = await self._store.due_processes(now + skew.back, DUE_AT_ONCE, passed)
            ripe = [row for row in due if any(w.due and skew.due(w.since, w.due) <= now for w in row.record.waits)]
            ours = [row for row in ripe if self._worker.can(row.registration)]
            await asyncio.gather(*(self._worker.recover(row, None) for row in ours))
            if len(due) < DUE_AT_ONCE or ours:
                return
            passed += len(due)  # none of them is for us: do not let them stand in the way of those that are

    async def notice(self) -> None:
        """Another process wrote: signals and requests for what runs here, ends of what is waited for."""
        for process_id in {*self._worker.waiters.ids, *self._worker.runs}:
            row = await self._store.process(process_id)
            if row is not None and (not row.live or row.stuck is not None or self._is_news(row)):
                self._worker.reconcile(row)

    def _is_news(self, row: ProcessRow) -> bool:
        run = self._worker.runs.get(row.id)
        return run is not None and (row.record.sequence > run.journal.read_to or row.owner != self._worker.id)
