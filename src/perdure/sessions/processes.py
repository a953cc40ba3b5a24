"""The processes of a session: starting them for it, granting them to its forks, and what is in memory of its tasks."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from msgspec import to_builtins
from msgspec.structs import replace

from perdure.engine.runner import Supervisor
from perdure.engine.waiters import in_hand
from perdure.errors import (
    Conflict,
    InvalidInput,
    ProcessConflict,
    ProcessNotVisible,
    SessionDeleted,
    Unavailable,
    UnknownProcess,
    quoted,
)
from perdure.lifecycle.process import same, session_parent
from perdure.model import validate
from perdure.model.monitor import (
    MONITOR_KIND,
    MonitorSnapshot,
    MonitorSpec,
    MonitorStatus,
    MonitorUpdate,
    MonitorUpdates,
    PluginMonitor,
    monitor_status,
    monitor_update,
    read_spec,
)
from perdure.model.plugin import Issue
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Cause,
    Failure,
    ProcessRow,
    SessionOrigin,
    WakePolicy,
    WakeTarget,
)
from perdure.model.write import ProcessFilter
from perdure.ports.services import CancelHook
from perdure.ports.store import Store
from perdure.processes.handle import ProcessAsk, ProcessHandle, handle_id
from perdure.processes.local import LocalEngine, token_of
from perdure.processes.service import ProcessService, Start

log = logging.getLogger("perdure.sessions")

PAGE = 1000
MOST_UPDATES = 128
"""Updates of monitors that are read at a time."""


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

    async def monitor(
        self, given: MonitorSpec, cause: Cause | None = None, asker: ProcessAsk | None = None
    ) -> ProcessHandle[Any]:
        """Begin a monitor under its name, which is free again when the one before has ended. It ends with the session.

        The same spec while it lives is the same monitor; from the same `cause`, a call that runs again after a crash,
        also when it has ended.
        """
        spec = read_spec(given)
        while True:
            before = await self.monitor_rows(spec.id)
            newest = before[0] if before else None
            if newest is not None and (newest.live or (cause is not None and newest.registration.cause == cause)):
                if same(newest.registration.input, to_builtins(spec)):
                    return ProcessHandle(self._service, newest.id)
                if newest.live:
                    text = f"session {self._id!r} has a live monitor {spec.id!r} that is another: stop that first"
                    raise Conflict(text)
            name = await self._free_monitor_id(spec.id, len(before) + 1)
            start = Start(name, cause=cause, parent=session_parent(self._id), parent_end="cancel", asker=asker)
            try:
                return await self.start(spec, None, spec.wake, start)
            except ProcessConflict:
                continue  # another caller has used this id since we looked

    async def _free_monitor_id(self, name: str, number: int) -> str:
        """A process id for the monitor of this number. Those of monitors that were pruned are spent."""
        while True:
            found = first_monitor_id(self._id, name) + (f".{number}" if number > 1 else "")
            if await self._store.process(found) is None:
                return found
            number += 1

    async def arm(self, specs: Sequence[PluginMonitor]) -> list[Issue]:
        """Start the monitors that plugins want with the session: those that it has never had. What could not start."""
        issues = []
        for each in specs:
            if await self._store.process(first_monitor_id(self._id, each.spec.id)) is not None:
                continue
            try:
                await self.monitor(each.spec, asker=ProcessAsk("start", self._id))
            except (InvalidInput, Unavailable, Conflict) as refused:
                text = f"monitor {each.spec.id!r} could not start: {refused}"
                log.warning("session %s: %s", self._id, text)
                issues.append(Issue("monitor_not_started", text, each.plugin))
        return issues

    async def monitors(self, offered: Sequence[MonitorSpec] = ()) -> MonitorSnapshot:
        """The monitors of the session, the last one of each name, and those `offered` that it has never had."""
        newest: dict[str, ProcessRow] = {}
        rows = await self.monitor_rows()
        for row in rows:
            newest.setdefault(row.registration.name, row)
        found = {spec.id: MonitorStatus(spec.id, "", "idle", False) for spec in offered}
        found |= {name: monitor_status(row) for name, row in newest.items()}
        revision = max([await self._place(row, row.record.sequence) for row in rows], default=0)
        in_order = tuple([found[name] for name in sorted(found)])
        return MonitorSnapshot(revision, sum(each.armed for each in in_order), in_order)

    async def monitor_updates(self, after: int) -> MonitorUpdates:
        """What monitors of the session told after a place in the store, the oldest 128 of it."""
        # Places are given out in the order of writes: up to the newest of now, nothing can come in between any more.
        end = await self._store.last_change()
        rows = await self.monitor_rows()
        found = [each for row in rows for each in await self._updates(row, after, end)]
        found = sorted(found, key=lambda each: each.sequence)[:MOST_UPDATES]
        active = len({row.registration.name for row in rows if row.live})
        return MonitorUpdates(found[-1].sequence if found else after, active, tuple(found))

    async def _updates(self, row: ProcessRow, after: int, end: int) -> list[MonitorUpdate]:
        """The oldest updates of one monitor between two places."""
        # Its events have growing places: look for the last one that is not behind `after`, by halves.
        low, high = 0, row.record.sequence
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if await self._place(row, middle) <= after else (low, middle - 1)
        found: list[MonitorUpdate] = []
        while len(found) < MOST_UPDATES and (page := await self._store.events(row.pid, low, MOST_UPDATES)):
            last, low, _ = page[-1]
            told = [monitor_update(row, place, event) for place, _, event in page if place <= end]
            found += [each for each in told if each is not None]
            if last > end:
                break
        return found

    async def _place(self, row: ProcessRow, sequence: int) -> int:
        """The place in the store of an event of a process; 0 where it is not kept any more."""
        found = await self._store.events(row.pid, sequence - 1, 1)
        return found[0][0] if found else 0

    async def monitor_rows(self, name: str | None = None) -> list[ProcessRow]:
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


def first_monitor_id(session_id: str, name: str) -> str:
    """The process id of the first monitor that a session has under a name."""
    return f"{session_id}.monitor.{name}"


# ---------------------------------------------------------------------- tasks in memory

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
        """A hidden task was spawned: a task of the session may wait for it."""
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

    def process_changed(self, row: ProcessRow) -> None:
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
                self.process_changed(await self._processes.get(process_id))

    async def _stop(self, row: ProcessRow, hook: CancelHook) -> None:
        try:
            await self.stop(row, hook)
        except Exception as error:  # a hook of the host's may raise anything: its task stays as it is, asked to stop
            log.warning("task %s could not be stopped: %s", row.id, error)

    async def stop(self, row: ProcessRow, hook: CancelHook | None) -> None:
        """Stop work outside by the hook that was given for that, and record that it is cancelled."""
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
