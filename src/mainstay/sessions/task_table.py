"""What a Runtime has in memory of the tasks of its sessions. Everything else about them is on disk."""

from __future__ import annotations

import contextlib
import inspect
import logging

from mainstay.engine.supervisor import Supervisor
from mainstay.errors import UnknownProcess
from mainstay.model.process import Abandoned, Cancelled, Failure, ProcessRow
from mainstay.ports.tasks import CancelHook
from mainstay.processes.local import LocalEngine, token_of
from mainstay.processes.service import ProcessService

log = logging.getLogger("mainstay.sessions")

REMEMBERED = 4096
"""Sessions for which the first failure of a hidden task is remembered until it is awaited; the log has every one."""


class TaskTable:
    """What a Runtime has in memory of tasks: their code, how to stop those of others, which hidden ones to wait for.

    `hooks` are by the token of the asking, with the id of the process. `hidden` are the live ones of each session, in
    the order of their spawning; `failed` is, for each session, the first that has failed since the last wait.
    """

    def __init__(self, engine: LocalEngine, processes: ProcessService, supervisor: Supervisor) -> None:
        self.engine, self._processes, self._supervisor = engine, processes, supervisor
        self.hooks: dict[str, tuple[str, CancelHook]] = {}
        self.hidden: dict[str, dict[str, None]] = {}
        self.failed: dict[str, str] = {}

    @property
    def size(self) -> int:
        """How many entries there are in memory."""
        return len(self.engine.works) + len(self.hooks) + len(self.hidden) + len(self.failed)

    # ------------------------------------------------------------------ hidden ones

    def hide(self, session_id: str, process_id: str) -> None:
        """A hidden task was spawned: somebody may wait for it."""
        self.hidden.setdefault(session_id, {})[process_id] = None

    def reveal(self, session_id: str, process_id: str) -> None:
        """It is over, or was never spawned."""
        waiting = self.hidden.get(session_id, {})
        waiting.pop(process_id, None)
        if not waiting:
            self.hidden.pop(session_id, None)

    def wait_for(self, session_id: str) -> list[str]:
        """The hidden tasks to wait for, which are forgotten here: the first failure, then what was live just now."""
        failed = self.failed.pop(session_id, None)
        return ([] if failed is None else [failed]) + list(self.hidden.pop(session_id, ()))

    def _hidden_ended(self, row: ProcessRow) -> None:
        session_id = row.holder or ""
        if row.id not in self.hidden.get(session_id, ()):
            return  # a task that waits for it has it, and sees how it ended
        self.reveal(session_id, row.id)
        if isinstance(row.record.outcome, Failure | Abandoned) and len(self.failed) < REMEMBERED:
            self.failed.setdefault(session_id, row.id)

    # ------------------------------------------------------------------ stopping

    def take_hook(self, row: ProcessRow) -> CancelHook | None:
        """How to stop it, if we know: called once, by the caller."""
        _, hook = self.hooks.pop(token_of(row.registration), ("", None))
        return hook

    def give_back(self, row: ProcessRow, hook: CancelHook | None) -> None:
        """It is not to stop after all."""
        if hook is not None:
            self.hooks[token_of(row.registration)] = row.id, hook

    def of(self, row: ProcessRow) -> None:
        """A process has changed: it may be one that we know how to stop, and is to stop, or a hidden one that ended."""
        if self.hooks and (not row.live or row.record.cancel is not None):
            hook = self.take_hook(row)
            if hook is not None and row.live:
                _ = self._supervisor.spawn(self._stop(row, hook), f"stop task {row.id}")
        if self.hidden and not row.live:
            self._hidden_ended(row)

    async def look(self) -> None:
        """Others may have asked to stop what only we know how to."""
        for process_id, _ in list(self.hooks.values()):
            with contextlib.suppress(UnknownProcess):  # its registration is on its way
                self.of(await self._processes.get(process_id))

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
