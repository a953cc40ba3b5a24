"""Tasks of a session: background work as plugins and tools ask for it, done with processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from perdure.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    PerdureError,
    ProcessConflict,
    ProcessEnded,
    ProcessNotVisible,
    ProcessShared,
    TimedOut,
    UnknownMonitor,
)
from perdure.lifecycle.process import (
    ABANDONED,
    CANCEL_REQUESTED,
    CANCELLED,
    COMPLETED,
    CREATED,
    FAILED,
    FIRST_STARTED,
    PROGRESS,
    RESUMED,
    TRANSFERRED,
    WAITING,
    session_parent,
)
from perdure.model import validate
from perdure.model.codec import clean, clean_text, encode
from perdure.model.event import AnyEvent, ProcessChanged
from perdure.model.ids import turn_id
from perdure.model.message import Message
from perdure.model.monitor import MonitorSnapshot, MonitorSpec, MonitorStatus, MonitorUpdates, monitor_status
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Cause,
    ClosePolicy,
    Failure,
    LiveState,
    ParentEnd,
    ProcessRow,
    Success,
    TaskChange,
    TaskEnd,
    TaskEvent,
    TaskKind,
    TaskRecord,
    TaskSpec,
    TaskState,
    WakePolicy,
)
from perdure.model.session import SessionRow, load_settings
from perdure.model.write import ProcessFilter
from perdure.ports.services import CancelHook, Work
from perdure.processes.handle import CancelAsk, ProcessAsk, ProcessHandle, handle_id, value_of
from perdure.processes.local import KIND, LocalWork
from perdure.processes.service import ProcessService, Start
from perdure.sessions.parts import ServiceScope
from perdure.sessions.processes import SessionProcesses, TaskTable
from perdure.sessions.setup import Setup
from perdure.wire import handle_json

MAX_TASK_ID = 150
PAGE = 1000
CANCEL_SECONDS = 0.1
"""A task that is cancelled has so long to end before its cancelling is told as under way."""
HIDDEN = "hidden task"

CHANGES: dict[str, TaskChange] = {
    CREATED: "registered",
    FIRST_STARTED: "state_changed",
    WAITING: "state_changed",
    RESUMED: "state_changed",
    PROGRESS: "progress",
    CANCEL_REQUESTED: "cancel_requested",
    TRANSFERRED: "transferred",
    COMPLETED: "completed",
    FAILED: "failed",
    ABANDONED: "failed",
    CANCELLED: "cancelled",
}
"""What an event of a process is to its task; the others are none."""

KINDS: dict[str, TaskKind] = {"turn": "subagent", "monitor": "monitor"}
"""What a process of another kind is as a task; everything else is "other"."""


class TaskServices:
    """The part of a session's services that is about its background work."""

    @property
    def scope(self) -> ServiceScope:
        """The session, and who in it asks. `SessionHost`, which these are a part of, makes it when it is first read."""
        raise NotImplementedError

    # ------------------------------------------------------------------ saying and starting

    async def inject_turn_input(
        self, said: str | Message, *, session_id: str | None = None, key: str | None = None
    ) -> str:
        row = await self.scope.row_or_new(session_id)
        if key is not None:
            key = f"inject {validate.name(key, 'key')}"
        elif self.scope.run is not None:
            # Asked again after a crash, by the same hook or tool, it is the same input.
            key = f"inject {self.scope.turn}:{self.scope.key(_digest(said))}"
        accepted = await self.scope.parts.inbox.accept(row.id, row.agent, said, "note", key)
        return turn_id(row.id, accepted.turn)

    async def start_process(
        self,
        what: Any,
        args: Mapping[str, Any] | None = None,
        *,
        key: str,
        label: str = "",
        wake: WakePolicy = "none",
        parent_end: ParentEnd = "abandon",
    ) -> ProcessHandle[Any]:
        if parent_end not in get_args(ParentEnd):
            raise InvalidInput(f"a process ends with its parent by 'cancel' or 'abandon', not {parent_end!r:.80}")
        row, run = await self.scope.row_or_new(), self.scope.run
        start = Start(f"{row.id}~{key}", label)
        if run is not None:
            call = self.scope.call
            cause = Cause("tool_call", call) if call else Cause("turn", run.turn_id)
            place = self.scope.key(key)  # a call's begins with its id
            start = Start(
                place if call else f"{run.turn_id}~{place}",
                label,
                cause=cause,
                parent=run.turn_id,
                parent_end=parent_end,
            )
            if parent_end == "cancel":
                run.start_children()
        if isinstance(what, MonitorSpec) and parent_end == "abandon":  # no session is left to be told
            start = replace(start, parent=session_parent(row.id), parent_end="cancel")
        start = replace(start, asker=ProcessAsk("start", row.id, self.scope.call))
        begin = functools.partial(self._owned(row).start, what, args, wake)
        handle = await (begin(start) if run is None else run.journal.patiently(begin, start))
        return TaskHandle(self._processes, handle.id, functools.partial(self._cancel, session_id=row.id))

    # ------------------------------------------------------------------ hidden ones

    async def spawn_hidden_task(self, label: str, work: Work, *, session_id: str | None = None) -> ProcessHandle[Any]:
        row, process_id = await self.scope.row_or_new(session_id), self.scope.parts.mint("t")
        what = LocalWork(HIDDEN, label, {}, self.scope.parts.mint("n"))
        self._keeper.hide(row.id, process_id)  # before it begins: it may have ended when its registration returns
        try:
            return await self._spawn(row, process_id, what, work, listed=False)
        except BaseException:  # also a cancellation: its caller gets no handle, and no task waits for it
            self._keeper.reveal(row.id, process_id)
            raise

    async def await_hidden_tasks(self, *, session_id: str | None = None) -> None:
        row, failed = await self.scope.row_or_new(session_id), None
        while waiting := await self._hidden(row.id):
            for process_id in waiting:
                outcome = await self._processes.outcome(process_id)
                if failed is None and isinstance(outcome, Failure | Abandoned):
                    failed = process_id, msgspec.to_builtins(outcome)
        if failed is not None:
            value_of(*failed)

    async def _hidden(self, session_id: str) -> list[str]:
        """Those that were spawned here since the last wait, and what other Runtimes have under way."""
        wanted = ProcessFilter(kind=KIND, name=HIDDEN, origin=session_id, live=True, limit=PAGE)
        others = [row.id for row in await self.scope.parts.store.processes(wanted)]
        return list(dict.fromkeys([*self._keeper.wait_for(session_id), *others]))

    # ------------------------------------------------------------------ managed and registered ones

    async def spawn_managed_task(
        self, task: TaskSpec, work: Work, *, session_id: str | None = None
    ) -> ProcessHandle[Any]:
        row = await self.scope.row_or_new(session_id)
        what = LocalWork(task.id, _label(task), _spec(task), self.scope.parts.mint("n"))
        return await self._named(row, task, functools.partial(self._spawn, row, what=what, work=work))

    async def register_background_task(
        self, task: TaskSpec, cancel: CancelHook | None = None, *, session_id: str | None = None
    ) -> ProcessHandle[Any]:
        row = await self.scope.row_or_new(session_id)
        spec = _spec(task) | ({"stopped_by": self.scope.parts.worker.id} if cancel is not None else {})
        what = LocalWork(task.id, _label(task), spec, self.scope.parts.mint("n"), outside=True)
        return await self._named(row, task, functools.partial(self._register, row, what=what, hook=cancel))

    async def _register(
        self, row: SessionRow, process_id: str, what: LocalWork, hook: CancelHook | None
    ) -> ProcessHandle[Any]:
        hooks = self._keeper.hooks
        if hook is not None:
            hooks[what.token] = process_id, hook
        try:
            return await self._owned(row).start(what, None, "none", Start(process_id))
        except PerdureError:  # and not a cancellation: the write may land all the same
            hooks.pop(what.token, None)
            raise

    async def _named(
        self, row: SessionRow, task: TaskSpec, begin: Callable[[str], Awaitable[ProcessHandle[Any]]]
    ) -> ProcessHandle[Any]:
        """Begin a task under its name: the write refuses a second live one, also one begun at the same time."""
        while True:
            process_id = await self._free_id(row.id, task)
            try:
                handle = await begin(process_id)
            except ProcessConflict:
                continue  # another task has used this id since we looked, and may have ended
            return TaskHandle(self._processes, handle.id, functools.partial(self._cancel, session_id=row.id))

    async def unregister_background_task(self, task_id: str, *, session_id: str | None = None) -> None:
        session = await self.scope.row_or_new(session_id)
        row = await self._find(session.id, task_id)
        if row is None:
            return
        if row.holder == session.id:
            self._keeper.take_hook(row)
            if row.live and not row.registration.contract.may_begin:
                await self._processes.caller_departed(row.id)
        await self._processes.revoke(session.id, row.id)

    async def complete_background_task(
        self, task_id: str, state: TaskEnd, value: Any = None, *, error: str = "", session_id: str | None = None
    ) -> None:
        if state not in get_args(TaskEnd):
            raise InvalidInput(f"a task ends as 'completed', 'failed' or 'cancelled', not {state!r:.80}")
        row = await self._own(session_id, task_id)
        if not row.live:
            return
        plain, why = clean(value), clean_text(error)
        outcome: Success | Failure | Cancelled = Success(plain)
        if state != "completed":
            outcome = Failure("failed", why, plain) if state == "failed" else Cancelled("its owner", why)
        await self._processes.complete(row.id, outcome=outcome)
        self._keeper.take_hook(row)

    async def transition_live_state(self, task_id: str, state: LiveState, *, session_id: str | None = None) -> None:
        if state not in get_args(LiveState):
            raise InvalidInput(f"a live task is 'running' or 'idle', not {state!r:.80}")
        row = await self._own(session_id, task_id)
        try:
            if _state(row) not in (state, "cancel_requested"):
                await self._processes.emit(row.id, PROGRESS, {"state": state})
        except ProcessEnded:
            return

    async def list_background_tasks(
        self, *, kind: TaskKind | None = None, include_ended: bool = False, session_id: str | None = None
    ) -> list[TaskRecord]:
        session = await self.scope.row_or_new(session_id)
        rows = await self._visible(session.id, None if include_ended else True)
        found = [record_of(row, session.id) for row in rows]
        return [each for each in found if kind is None or each.kind == kind]

    def task_events(
        self, *, kind: TaskKind | None = None, include_ended: bool = True, session_id: str | None = None
    ) -> AsyncGenerator[TaskEvent, None]:
        name = session_id or self.scope.id
        return self._task_events(name, self.scope.parts.relay.observe(name, None), kind, include_ended)

    async def _task_events(
        self, session_id: str, events: AsyncGenerator[AnyEvent, None], kind: TaskKind | None, include_ended: bool
    ) -> AsyncGenerator[TaskEvent, None]:
        store = self.scope.parts.store
        async with contextlib.aclosing(events):
            async for event in events:
                if type(event) is not ProcessChanged or event.change not in CHANGES:
                    continue
                row = await store.process(event.process_id)
                if row is None or row.pruned is not None or not await store.is_granted(session_id, row.id):
                    continue
                task = record_of(row, session_id)
                wanted = kind in (None, task.kind) and (include_ended or task.live)
                if wanted and await self._shown(session_id, [row]):
                    is_state = event.change == PROGRESS and _told_state(row) is not None
                    yield TaskEvent("state_changed" if is_state else CHANGES[event.change], task)

    # ------------------------------------------------------------------ cancelling

    async def close_tasks(self, session: SessionRow) -> None:
        """A session is closed: cancel or hand on those of its own tasks that were begun so. The others go on."""
        parent = load_settings(session.settings).parent
        for row in await self._visible(session.id, True):
            close = row.registration.input.get("close") if row.task is not None and row.holder == session.id else None
            if close == "cancel":
                await self._cancel(row, "its session was closed", session.id)
            elif close == "transfer" and parent is not None:
                await self._processes.transfer(session.id, parent, row.id)

    async def cancel_managed_task(self, task_id: str, reason: str = "", *, session_id: str | None = None) -> TaskRecord:
        return await self.cancel_background_task(task_id, reason, session_id=session_id)

    async def cancel_background_task(
        self, task_id: str, reason: str = "", *, session_id: str | None = None
    ) -> TaskRecord:
        session = await self.scope.row_or_new(session_id)
        return await self._cancel(await self._known(session_id, task_id), reason, session.id)

    async def cancel_all_background_tasks(self, reason: str = "", *, session_id: str | None = None) -> list[TaskRecord]:
        session = await self.scope.row_or_new(session_id)
        rows = [row for row in await self._visible(session.id, True) if row.holder == session.id]
        return [await self._cancel(row, reason, session.id) for row in rows]

    async def cancel_unreferenced_handles(
        self, keep: Sequence[Any], reason: str = "", *, session_id: str | None = None
    ) -> list[TaskRecord]:
        session, kept = await self.scope.row_or_new(session_id), {handle_id(each) for each in keep}
        rows = [row for row in await self._visible(session.id, True) if row.holder == session.id and row.id not in kept]
        alone = [row for row in rows if await self.scope.parts.store.grantees(row.id) == [session.id]]
        return [await self._cancel(row, reason, session.id) for row in alone]

    async def _cancel(self, row: ProcessRow, reason: str, session_id: str) -> TaskRecord:
        if not row.live:
            return record_of(row, session_id)
        own = row.holder == session_id
        if not own and self._processes.cancel_policy is None:
            raise ProcessShared(row.id, session_id)
        hook = self._keeper.take_hook(row) if own else None  # called here, and not by who hears of the request
        try:
            ask = CancelAsk(session_id, row.id, self.scope.call, "host_api", handle_json(row.id), reason, granted=True)
            await self._processes.cancel_for(ask, started=self._started(row))
            asked = await self._processes.get(row.id)
        except BaseException:  # the host's policy may raise anything; the task goes on, and can be stopped later
            self._keeper.give_back(row, hook)
            raise
        if asked.live and asked.record.cancel is None:
            self._keeper.give_back(row, hook)  # the host's policy lets it go on
        elif row.registration.contract.may_begin:
            await self._wait_a_little(row.id)
        elif own and (hook is not None or not self._keeper.is_stopped_elsewhere(row)):
            await self._keeper.stop(row, hook)
        return record_of(await self._processes.get(row.id), session_id)

    def _started(self, row: ProcessRow) -> bool:
        """Whether the turn at hand has started it."""
        run = self.scope.run
        return run is not None and row.registration.parent == run.turn_id

    async def _wait_a_little(self, process_id: str) -> None:
        try:
            await self._processes.outcome(process_id, CANCEL_SECONDS)
        except (TimedOut, PerdureError):
            return  # it is asked to; its record tells how far that has come

    # ------------------------------------------------------------------ handles

    async def validate_handles_visible(self, handles: Sequence[Any], *, session_id: str | None = None) -> None:
        session = await self.scope.row_or_new(session_id)
        for process_id in [handle_id(each) for each in handles]:
            row = await self.scope.parts.store.process(process_id)
            granted = row is not None and await self.scope.parts.store.is_granted(session.id, process_id)
            if row is None or not granted or not await self._shown(session.id, [row]):
                raise ProcessNotVisible(process_id, session.id)

    async def transfer_handles(self, target: str, handles: Sequence[Any], *, session_id: str | None = None) -> int:
        source = await self.scope.row_or_new(session_id)
        ids = list(dict.fromkeys(handle_id(each) for each in handles))
        if not ids or source.id == target:
            return 0
        await self.validate_handles_visible(ids, session_id=session_id)
        taker = await self.scope.row(target)
        return await self._processes.transfer(source.id, taker.id, *ids)

    # ------------------------------------------------------------------ parts

    @property
    def _keeper(self) -> TaskTable:
        return self.scope.parts.tasks

    @property
    def _processes(self) -> ProcessService:
        return self.scope.parts.processes

    def _owned(self, row: SessionRow) -> SessionProcesses:
        return SessionProcesses(self._processes, self.scope.parts.store, row.id, row.agent)

    async def _spawn(
        self, row: SessionRow, process_id: str, what: LocalWork, work: Work, listed: bool = True
    ) -> ProcessHandle[Any]:
        if not callable(work):
            raise InvalidInput(f"a task is a function without arguments, not {type(work).__name__}: it is called once")
        works = self._keeper.engine.works
        works[what.token] = work
        try:
            return await self._owned(row).start(what, None, "none", Start(process_id), listed=listed)
        except BaseException:  # if it was registered all the same, it is given up: its caller knows nothing of it
            works.pop(what.token, None)
            raise

    async def _free_id(self, session_id: str, task: TaskSpec) -> str:
        """A process for a task's name, which is free once the task before has ended. Process ids are used once."""
        if not task.id or len(task.id) > MAX_TASK_ID or task.id == HIDDEN:
            raise InvalidInput(f"{task.id!r:.80} is no id of a task: use 1 to {MAX_TASK_ID} characters")
        if task.kind not in get_args(TaskKind):
            raise InvalidInput(f"a task is a {', '.join(get_args(TaskKind))}, not {task.kind!r:.80}")
        if task.close not in get_args(ClosePolicy):
            raise InvalidInput(f"a closed session's task is {', '.join(get_args(ClosePolicy))}, not {task.close!r:.80}")
        before = await self._find(session_id, task.id)
        if before is not None and before.holder != session_id:
            before = None  # another session's, which this one only sees
        if before is not None and before.live:
            raise Conflict(f"session {session_id!r} has a live task {task.id!r}: cancel it, or use another id")
        name, count = f"{session_id}~{task.id}", 1
        if before is not None and before.id.startswith(f"{name}~"):
            last = before.id.rpartition("~")[2]
            count = int(last) if last.isascii() and last.isdigit() else 1
        process_id = name if count == 1 else f"{name}~{count}"
        while await self.scope.parts.store.process(process_id) is not None:
            count += 1
            process_id = f"{name}~{count}"
        return process_id

    async def _visible(self, session_id: str, live: bool | None) -> Sequence[ProcessRow]:
        """What a session may see, the oldest first."""
        found: list[ProcessRow] = []
        before: int | None = None
        while True:
            wanted = ProcessFilter(session_id=session_id, live=live, before=before, limit=PAGE)
            page = await self.scope.parts.store.processes(wanted)
            found += page
            if len(page) < PAGE:
                return await self._shown(session_id, found[::-1])
            before = page[-1].pid

    async def _find(self, session_id: str, task_id: str) -> ProcessRow | None:
        """The newest task of that name, the session's own first, or the process of that id."""
        wanted = ProcessFilter(name=task_id, session_id=session_id, limit=PAGE)
        named = [row for row in await self.scope.parts.store.processes(wanted) if row.task is not None]
        if named:
            return next((row for row in named if row.holder == session_id), named[0])
        row = await self.scope.parts.store.process(task_id)
        seen = row is not None and await self.scope.parts.store.is_granted(session_id, task_id)
        return row if seen else None

    async def _shown(self, session_id: str, rows: Sequence[ProcessRow]) -> Sequence[ProcessRow]:
        """Those that the host's policy lets the session see. What the turn at hand has started is its own to see."""
        seen = await self._processes.seen(session_id, [row for row in rows if not self._started(row)])
        numbers = {row.pid for row in seen}
        return [row for row in rows if row.pid in numbers or self._started(row)]

    async def _known(self, session_id: str | None, task_id: str) -> ProcessRow:
        session = await self.scope.row_or_new(session_id)
        row = await self._find(session.id, task_id)
        if row is None or not await self._shown(session.id, [row]):
            raise NotFound(f"session {session.id!r} has no task {task_id!r}: list_background_tasks shows what it has")
        return row

    async def _own(self, session_id: str | None, task_id: str) -> ProcessRow:
        """A task that the session may say something about: one of its own."""
        row, session = await self._known(session_id, task_id), await self.scope.row_or_new(session_id)
        if row.holder != session.id:
            raise ProcessShared(row.id, session.id)
        return row


class TaskHandle(ProcessHandle[Any]):
    """A handle that a plugin or a tool got from its services: it cancels as they do."""

    __slots__ = ("_cancel",)

    def __init__(
        self, processes: ProcessService, process_id: str, cancel: Callable[[ProcessRow, str], Awaitable[TaskRecord]]
    ) -> None:
        super().__init__(processes, process_id)
        self._cancel = cancel

    async def cancel(self, reason: str = "", *, by: str = "") -> str:
        """Ask it to end: "requested", "already_requested" or "ended". The session asks, whatever `by` says."""
        row = await self.record()
        if not row.live or row.record.cancel is not None:
            return "already_requested" if row.live else "ended"
        await self._cancel(row, reason)
        return "requested"


# ---------------------------------------------------------------------- a process as a task


def record_of(row: ProcessRow, session_id: str) -> TaskRecord:
    """A process as a task of the session that sees it."""
    asked, record = row.registration, row.record
    spec = asked.input if row.task is not None else {}
    value, error = None, ""
    if isinstance(record.outcome, Success):
        value = record.outcome.value
    elif isinstance(record.outcome, Failure):
        error = f"{record.outcome.code}: {record.outcome.message}"
    elif isinstance(record.outcome, Abandoned):
        error = f"outcome_unknown: {record.outcome.evidence.proof}"
    elif isinstance(record.outcome, Cancelled):
        error = record.outcome.reason
    return TaskRecord(
        row.id if row.task is None else row.task,
        row.id,
        spec.get("kind") or KINDS.get(asked.kind, "other"),
        _state(row),
        session_id,
        spec.get("producer", asked.kind),
        asked.label,
        spec.get("child_session_id"),
        spec.get("parent_task_id"),
        row.created,
        record.updated,
        None if row.live else record.updated,
        value,
        error,
        "external" if not asked.contract.may_begin else "abort_local" if asked.kind == KIND else "cooperative",
        spec.get("close", "keep"),
        row.attempts,
        asked.max_attempts,
        row.id,
    )


def _state(row: ProcessRow) -> TaskState:
    if row.status in ("completed", "cancelled"):
        return "completed" if row.status == "completed" else "cancelled"
    if not row.live:
        return "failed"
    if row.record.cancel is not None:
        return "cancel_requested"
    if row.status == "waiting" or _told_state(row) == "idle":
        return "idle"
    begun = row.record.first_started is not None or not row.registration.contract.may_begin
    return "running" if begun else "pending"


def _told_state(row: ProcessRow) -> Any:
    """The state that a task was last said to be in (`transition_live_state`), if that is the last it told."""
    told = row.record.progress
    return told.get("state") if row.task is not None and isinstance(told, dict) else None


def _spec(task: TaskSpec) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(task)
    return {"task": task.id, "kind": task.kind, **found}


def _label(task: TaskSpec) -> str:
    return task.label or task.id


def _digest(said: str | Message) -> str:
    return hashlib.blake2b(encode(said), digest_size=8).hexdigest()


class MonitorServices(TaskServices):
    """The part of a session's services that is about commands whose lines it is told."""

    async def setup(self, row: SessionRow) -> Setup:
        """What a session runs with. `SessionHost`, which these are a part of, finds it."""
        raise NotImplementedError

    async def monitor_snapshot(self, *, session_id: str | None = None) -> MonitorSnapshot:
        row = await self.scope.row_or_new(session_id)
        return await self._owned(row).monitors(await self._offered(row))

    async def take_monitor_updates(self, after: int = 0, *, session_id: str | None = None) -> MonitorUpdates:
        row = await self.scope.row_or_new(session_id)
        return await self._owned(row).monitor_updates(validate.count(after, "after"))

    async def start_monitor(self, spec: MonitorSpec | str, *, session_id: str | None = None) -> MonitorStatus:
        row, run = await self.scope.row_or_new(session_id), self.scope.run
        found, cause = await self.monitor_spec(spec, row), None
        if run is not None:
            cause = Cause("tool_call", self.scope.call) if self.scope.call else Cause("turn", run.turn_id)
        await self.scope.exist(row)
        asker = ProcessAsk("start", row.id, self.scope.call)
        begin = functools.partial(self._owned(row).monitor, found, cause)
        handle = await (begin(asker) if run is None else run.journal.patiently(begin, asker))
        return monitor_status(await self._processes.get(handle.id))

    async def stop_monitor(self, monitor_id: str, reason: str = "", *, session_id: str | None = None) -> MonitorStatus:
        row = await self.scope.row_or_new(session_id)
        name = validate.name(monitor_id, "monitor_id")
        found = await self._owned(row).monitor_rows(name)
        if not found:
            spec = await self.monitor_spec(name, row)
            return MonitorStatus(spec.id, "", "idle", False)
        await self._cancel(found[0], reason, row.id)
        return monitor_status(await self._processes.get(found[0].id))

    async def monitor_spec(self, given: MonitorSpec | str, row: SessionRow) -> MonitorSpec:
        """A spec, or that of a monitor which a plugin offers. Raises UnknownMonitor for an id of none."""
        if not isinstance(given, str):
            return given
        for each in await self._offered(row):
            if each.id == given:
                return each
        raise UnknownMonitor(given, row.id)

    async def _offered(self, row: SessionRow) -> Sequence[MonitorSpec]:
        """The monitors that plugins offer to a session; none where its agent is not here."""
        definition = self.scope.parts.definitions.get(row.agent)
        if definition is None or not definition.plugins.has("monitors"):
            return ()
        return [each.spec for each in (await self.setup(row)).monitors]
