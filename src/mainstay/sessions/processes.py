"""The processes of a session: starting them for it, granting them to its forks, and what is in memory of its tasks."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from msgspec import to_builtins
from msgspec.structs import replace

from mainstay.engine.runner import Supervisor
from mainstay.engine.waiters import in_hand
from mainstay.errors import Conflict, InvalidInput, ProcessNotVisible, SessionDeleted, UnknownProcess, quoted
from mainstay.lifecycle.process import same, session_parent
from mainstay.model import validate
from mainstay.model.monitor import MONITOR_KIND, MonitorSnapshot, MonitorSpec, monitor_status, read_spec
from mainstay.model.process import Abandoned, Cancelled, Failure, ProcessRow, SessionOrigin, WakePolicy, WakeTarget
from mainstay.model.write import ProcessFilter
from mainstay.ports.services import CancelHook
from mainstay.ports.store import Store
from mainstay.processes.handle import ProcessHandle, handle_id
from mainstay.processes.local import LocalEngine, token_of
from mainstay.processes.service import ProcessService, Start

PAGE = 1000


class SessionProcesses:
    """Processes as a session has them: it asked for them, it may see them, it is told of their end."""

    __slots__ = ("_agent", "_id", "_service", "_store")

    def __init__(self, service: ProcessService, store: Store, session_id: str, agent: str) -> None:
        self._service, self._store, self._id, self._agent = service, store, session_id, agent

    async def start(
        self,
        what: Any,
        args: Mapping[str, Any] | None,
        wake: WakePolicy = "turn",
        start: Start | None = None,
        *,
        listed: bool = True,
    ) -> ProcessHandle[Any]:
        """Begin a process for the session, which may see it if it is `listed`; `start` says the rest."""
        if wake not in get_args(WakePolicy):
            raise InvalidInput(f"a session is woken by 'turn', 'notify' or 'none', not {quoted(wake):.80}")
        row = await self._store.session(self._id)
        if row is not None and row.deleted:
            raise SessionDeleted(self._id)
        ours = replace(
            start or Start(),
            origin=SessionOrigin(self._id),
            wake=WakeTarget(self._id, self._agent, wake),  # also for "none": it tells whose session it is
            grants=(self._id,) if listed else (),
            metadata=None if row is None or in_hand() else row.metadata,
        )
        return await self._service.start(what, args, ours)

    async def monitor(self, given: MonitorSpec) -> ProcessHandle[Any]:
        """Begin a monitor under its name, which is free again when the one before has ended. It ends with the session.

        The same spec while it lives is the same monitor.
        """
        spec = read_spec(given)
        before = await self._monitors(spec.id)
        if before and before[0].live:
            if not same(before[0].registration.input, to_builtins(spec)):
                raise Conflict(f"session {self._id!r} has a live monitor {spec.id!r} that is another: stop that first")
            return ProcessHandle(self._service, before[0].id)
        number = f".{len(before) + 1}" if before else ""
        name = f"{self._id}.monitor.{spec.id}{number}"
        start = Start(name, parent=session_parent(self._id), parent_end="cancel")
        return await self.start(spec, None, spec.wake, start)

    async def monitors(self) -> MonitorSnapshot:
        """The monitors of the session, the last one of each name."""
        newest: dict[str, ProcessRow] = {}
        rows = await self._monitors(None)
        for row in rows:
            newest.setdefault(row.registration.name, row)
        found = tuple([monitor_status(newest[name]) for name in sorted(newest)])
        revision = sum(row.record.sequence for row in rows)
        return MonitorSnapshot(revision, sum(each.armed for each in found), found)

    async def _monitors(self, name: str | None) -> list[ProcessRow]:
        """Monitors that the session has asked for, the newest first."""
        found: list[ProcessRow] = []
        before: int | None = None
        wanted = ProcessFilter(kind=MONITOR_KIND, name=name, origin=self._id, limit=PAGE)
        while page := await self._store.processes(replace(wanted, before=before)):
            found += [row for row in page if row.pruned is None]
            before = page[-1].pid
        return found

    async def chosen(self, grants: Literal["none", "all"] | Sequence[Any]) -> tuple[str, ...]:
        """The ids of processes that a fork may see too. None may be among them that this session may not."""
        if grants == "none":
            return ()
        if grants == "all":
            return await self._all()
        if isinstance(grants, str):
            raise InvalidInput(f"a fork is granted 'none', 'all' or a list of processes, not {quoted(grants):.80}")
        chosen = tuple(dict.fromkeys(handle_id(each) for each in validate.several(grants, "grants")))
        for process_id in chosen:
            if not await self._store.is_granted(self._id, process_id):
                raise ProcessNotVisible(process_id, self._id)
        return chosen

    async def _all(self) -> tuple[str, ...]:
        found: list[str] = []
        before: int | None = None
        while page := await self._store.processes(ProcessFilter(session_id=self._id, before=before, limit=PAGE)):
            found += [row.id for row in page if row.pruned is None]
            before = page[-1].pid
        return tuple(found)


# ---------------------------------------------------------------------- tasks in memory

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

    async def poll(self) -> None:
        """Stop tasks that other Runtimes asked to stop: only this one has their hooks."""
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
