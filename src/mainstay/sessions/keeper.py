"""What a Runtime has in memory of the tasks of its sessions. Everything else about them is on disk."""

from __future__ import annotations

import inspect
import logging

from mainstay.engine.supervisor import Supervisor
from mainstay.model.process import Cancelled, ProcessRow
from mainstay.ports.tasks import CancelHook
from mainstay.processes.local import LocalEngine
from mainstay.processes.service import ProcessService

log = logging.getLogger("mainstay.sessions")


class TaskKeeper:
    """What a Runtime has in memory of tasks: their code, how to stop those of others, which hidden ones to wait for."""

    def __init__(self, engine: LocalEngine, processes: ProcessService, supervisor: Supervisor) -> None:
        self.engine, self._processes, self._supervisor = engine, processes, supervisor
        self.hooks: dict[str, CancelHook] = {}
        self.hidden: dict[str, list[str]] = {}

    def of(self, row: ProcessRow) -> None:
        """A process has changed: it may be one that we know how to stop, and is to stop."""
        if row.id in self.hooks and (not row.live or row.record.cancel is not None):
            hook = self.hooks.pop(row.id)
            if row.live:
                _ = self._supervisor.spawn(self._stop(row, hook), f"stop task {row.id}")

    async def look(self) -> None:
        """Others may have asked to stop what only we know how to."""
        for process_id in list(self.hooks):
            row = await self._processes.get(process_id)
            self.of(row)

    async def _stop(self, row: ProcessRow, hook: CancelHook) -> None:
        try:
            await self.stop(row, hook)
        except Exception as error:  # somebody else's hook: its task stays as it is, asked to stop
            log.warning("task %s could not be stopped: %s", row.id, error)

    async def stop(self, row: ProcessRow, hook: CancelHook | None) -> None:
        """Stop what somebody else does, as far as he has told us how, and say that it is cancelled."""
        done = None if hook is None else hook()
        if inspect.isawaitable(done):
            await done
        request = (await self._processes.get(row.id)).record.cancel
        by, reason = ("", "") if request is None else (request.by, request.reason)
        await self._processes.complete(row.id, outcome=Cancelled(by, reason, unknown=hook is None))

    def is_stopped_elsewhere(self, row: ProcessRow) -> bool:
        """Whether another Runtime, which lives, knows how to stop it: it hears of the request."""
        spec, alive = row.registration.input, self.engine.alive()
        by = spec.get("stopped_by") if isinstance(spec, dict) else None
        return by is not None and alive is not None and by in alive
