"""What exists of a process: how it was registered, what happened to it, what it waits for, how it ended.

A process is an event log. Its record is the fold of that log (`perdure.lifecycle`), and both change in one
transaction. Beside them a worker keeps its journal of what a durable function has done (`perdure.model.record`).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from perdure.model.message import Scalar
from perdure.model.session import CancelRequest
from perdure.model.tool import BlobRef

ProcessStatus: TypeAlias = Literal[
    "running", "waiting", "completed", "failed", "cancelled", "abandoned", "caller_departed"
]
ProcessRecovery: TypeAlias = Literal["rerunnable", "owner_bound", "reattachable", "externally_owned"]
AfterOwnerDeath: TypeAlias = Literal["rerun", "abandon", "reattach", "leave"]
ParentEnd: TypeAlias = Literal["cancel", "abandon"]
WakePolicy: TypeAlias = Literal["turn", "notify", "none"]

ProcessState: TypeAlias = ProcessStatus | Literal["queued", "stuck"]
"""How a process is: its status, or that no worker works on one whose status is "running"."""

TERMINAL: frozenset[str] = frozenset({"completed", "failed", "cancelled", "abandoned"})
RETIRED: frozenset[str] = TERMINAL | {"caller_departed"}
"""States in which no worker will run it any more."""

MAX_PROCESS_ID = 400

TASK_KINDS = ("task", "external")
"""Kinds of processes that may be tasks: code in the memory of one Runtime, and work of others."""


class HostOrigin(Struct, frozen=True, gc=False, tag_field="type", tag="host", omit_defaults=True):
    """The host asked for it."""

    scope: str = ""


class SessionOrigin(Struct, frozen=True, gc=False, tag_field="type", tag="session"):
    """A session asked for it: its model, a tool or a plugin of it."""

    session_id: str


Origin: TypeAlias = HostOrigin | SessionOrigin


class Cause(Struct, frozen=True, gc=False):
    """What led to it: a tool call, a turn, a process, an occurrence of a trigger."""

    type: Literal["tool_call", "turn", "process", "trigger", "operation"]
    id: str


class WakeRule(Struct, frozen=True, gc=False, omit_defaults=True):
    """An event of this type wakes the session: if the payload has something at `when`, with what is at `input`.

    Both are JSON pointers; "" is the whole payload.
    """

    when: str | None = None
    input: str = ""


class EventType(Struct, frozen=True, gc=False, omit_defaults=True):
    """A type of event that a process may have besides its own: its payload's schema, and whether it wakes."""

    name: str
    schema: dict[str, Any] | None = None
    wake: WakeRule | None = None


class WakeTarget(Struct, frozen=True, gc=False, omit_defaults=True):
    """The session that gets a wake when a process ends, and how."""

    session_id: str
    agent: str = ""
    policy: WakePolicy = "turn"


class RecoveryContract(Struct, frozen=True, gc=False):
    """Who may work on a process, and what becomes of it when its owner dies.

    `may_begin`: workers own it and begin it; otherwise the work is done outside, and completed by authority.
    `once_begun` is what becomes of it if the owner dies after the work has begun.
    """

    may_begin: bool
    once_begun: AfterOwnerDeath

    def after_owner_death(self, begun: bool) -> AfterOwnerDeath:
        """What becomes of a process whose owner is dead, or gave it up without parking it.

        "rerun": any worker runs it, and the death counts as a takeover. "reattach": any worker finds the work that goes
        on elsewhere, and nothing is counted, because the work did not die. "abandon": it ends as abandoned, because its
        last effect is unknown. "leave": it is nothing of ours. What has not begun has had no effect: it is run.
        """
        if not self.may_begin:
            return "leave"
        return self.once_begun if begun else "rerun"


RECOVERY_CONTRACTS: dict[ProcessRecovery, RecoveryContract] = {
    "rerunnable": RecoveryContract(may_begin=True, once_begun="rerun"),
    "owner_bound": RecoveryContract(may_begin=True, once_begun="abandon"),
    "reattachable": RecoveryContract(may_begin=True, once_begun="reattach"),
    "externally_owned": RecoveryContract(may_begin=False, once_begun="leave"),
}


class Registration(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a process was asked to be. It never changes.

    `kind` says which engine runs it, `name` what, `definition` which version of that. `recovery` has no default: the
    caller that starts work says what becomes of it when its owner dies. `env` is the digest of the environment it was
    asked for in. Signals are declared among `events`, as `signal.<name>`; with `open_signals` any other may be sent
    too. `depth` is that of the wakes which it leads to (see `Said`): one more than that of the turn that started it.
    `metadata` is that of the turn or process which asked for it. `asked` is a digest of the input as it was given,
    where filters have changed it before it was stored, or a Runtime has added its own folder and limits to it.
    `step_recovery` is the recovery of a durable function's steps that declare none: "once" for processes begun before
    registrations had this field, so that it stays the default here; the engine writes "rerun" for new ones.
    """

    id: str
    kind: str
    recovery: ProcessRecovery
    name: str = ""
    definition: str = ""
    input: Any = None
    label: str = ""
    origin: Origin = HostOrigin()
    cause: Cause | None = None
    events: tuple[EventType, ...] = ()
    open_signals: bool = False
    env: str | None = None
    max_attempts: int | None = None
    wake: WakeTarget | None = None
    parent: str | None = None
    parent_end: ParentEnd = "abandon"
    depth: int = 0
    metadata: dict[str, Scalar] = {}
    asked: str = ""
    step_recovery: Literal["once", "rerun"] = "once"

    @property
    def contract(self) -> RecoveryContract:
        return RECOVERY_CONTRACTS[self.recovery]


def is_task(asked: Registration) -> bool:
    """Whether it is asked for under a name in its session, which one live process at a time may have."""
    return asked.kind in TASK_KINDS and isinstance(asked.input, dict) and "task" in asked.input


class FirstStart(Struct, frozen=True, gc=False, omit_defaults=True):
    """The work of a process began for the first time: by whom, when, and in the store of which id. A fact, recorded
    before it is one."""

    owner: str
    generation: int
    attempt: int
    at: int
    store: str = ""


class AbandonRequest(Struct, frozen=True, gc=False, omit_defaults=True):
    """A request to abandon a process that will not end by itself, and by whom."""

    by: str
    at: int = 0
    reason: str = ""


class Evidence(Struct, frozen=True, gc=False, omit_defaults=True):
    """Why a process was given up, by whom, and what proves it."""

    writer: Literal["owner_drain", "sweep", "reconciled_request", "engine_gave_up"]
    at: int = 0
    owner: str | None = None
    proof: str = ""


class WaitOn(Struct, frozen=True, gc=False, omit_defaults=True):
    """One thing that a parked process waits for: a time, a signal, the end of another process.

    `key` is the place in its code, `since` the clock when `due` was set.
    """

    key: str
    kind: Literal["time", "signal", "process", "turn"]
    name: str = ""
    due: int | None = None
    since: int = 0


class Success(Struct, frozen=True, gc=False, tag_field="type", tag="success", omit_defaults=True):
    """It ended well. A large value is a blob."""

    value: Any = None
    blob: BlobRef | None = None


class Failure(Struct, frozen=True, gc=False, tag_field="type", tag="failure", omit_defaults=True):
    """It ended with an error of its own. `traceback` is where its code raised that, for people: no model sees it."""

    code: str
    message: str = ""
    data: Any = None
    traceback: str = ""


class Cancelled(Struct, frozen=True, gc=False, tag_field="type", tag="cancelled", omit_defaults=True):
    """It ended because it was asked to. `unknown`: how far its last effect came is not known. `value`: what it has to
    show all the same, such as the result of a command that was killed."""

    by: str = ""
    reason: str = ""
    unknown: bool = False
    value: Any = None


class Abandoned(Struct, frozen=True, gc=False, tag_field="type", tag="abandoned", omit_defaults=True):
    """It was given up: whether its last effect happened is not known. `value`: what was found of it."""

    evidence: Evidence
    value: Any = None


class NoLongerRetained(Struct, frozen=True, gc=False, tag_field="type", tag="no_longer_retained"):
    """It ended, and what it left was pruned."""

    status: str
    pruned_at: int


ProcessOutcome: TypeAlias = Success | Failure | Cancelled | Abandoned
AwaitOutput: TypeAlias = ProcessOutcome | NoLongerRetained


class Event(Struct, frozen=True, gc=False, omit_defaults=True):
    """Something that happened to a process. `key` names it, so that telling it twice is telling it once."""

    type: str
    payload: Any = None
    at: int = 0
    key: str | None = None


class ProcessEvent(Struct, frozen=True, gc=False, omit_defaults=True):
    """An event as readers see it: `sequence` counts within its process, `cursor` within the store."""

    process_id: str
    sequence: int
    cursor: int
    type: str
    payload: Any = None
    at: int = 0
    key: str | None = None


class Signal(Struct, frozen=True, gc=False):
    """A signal that was sent to a process: `sequence` is the number of its event."""

    sequence: int
    name: str
    payload: Any


class ProcessRecord(Struct, frozen=True, gc=False, omit_defaults=True):
    """The fold of a process's events. `wake` stands in for the target that it was registered with.

    `holder` is the session that it was handed on to, in place of the one that asked for it.
    """

    status: ProcessStatus = "running"
    sequence: int = 0
    updated: int = 0
    first_started: FirstStart | None = None
    cancel: CancelRequest | None = None
    abandon: AbandonRequest | None = None
    waits: tuple[WaitOn, ...] = ()
    external_ref: Any = None
    progress: Any = None
    segment: int = 0
    wake: WakeTarget | None = None
    outcome: ProcessOutcome | None = None
    holder: str | None = None


class ProcessRow(Struct, frozen=True, gc=False):
    """One process. `pid` is the store's own number for it.

    Besides registration and record it holds what its workers need: who owns it under which generation, how often it
    was begun (`attempts`) and taken over without progress (`takeovers`), when it is due, and why it is stuck.
    """

    pid: int
    registration: Registration
    record: ProcessRecord
    created: int = 0
    owner: str | None = None
    generation: int = 0
    attempts: int = 0
    takeovers: int = 0
    stuck: str | None = None
    pruned: int | None = None

    @property
    def id(self) -> str:
        return self.registration.id

    @property
    def kind(self) -> str:
        return self.registration.kind

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def label(self) -> str:
        return self.registration.label

    @property
    def status(self) -> ProcessStatus:
        return self.record.status

    @property
    def state(self) -> ProcessState:
        """Its status, or "queued" until a worker has taken it up, or "stuck" until a person has looked."""
        if self.stuck is not None:
            return "stuck"
        return "queued" if self.active and self.owner is None else self.record.status

    @property
    def live(self) -> bool:
        return self.record.status not in RETIRED and self.pruned is None

    @property
    def holder(self) -> str | None:
        """The session whose own it is: the one that asked for it, or the one that it was handed on to."""
        origin = self.registration.origin
        return self.record.holder or (origin.session_id if isinstance(origin, SessionOrigin) else None)

    @property
    def task(self) -> str | None:
        """Its name as a task of its holder: set if it was spawned or registered under one."""
        asked = self.registration
        return asked.name if is_task(asked) else None

    @property
    def active(self) -> bool:
        """Whether a worker works on it, or should."""
        running = self.record.status == "running" and self.stuck is None and self.pruned is None
        return running and self.registration.contract.may_begin

    @property
    def after_owner_death(self) -> AfterOwnerDeath:
        """What becomes of it if its owner dies now."""
        return self.registration.contract.after_owner_death(self.record.first_started is not None)

    @property
    def due(self) -> int | None:
        """The earliest time that it waits for."""
        if not self.record.waits:
            return None
        waits = self.record.waits
        return min([w.due for w in waits if w.due is not None], default=None) if waits else None


class Tombstone(Struct, frozen=True, gc=False):
    """What stays of a pruned process: its id, which is spent, and a digest of what it was asked to be."""

    id: str
    pid: int
    status: ProcessStatus
    pruned: int
    digest: int

    @property
    def row(self) -> ProcessRow:
        """A row as readers see it: whatever is not said here is not known any more."""
        registration = Registration(self.id, "", "externally_owned")
        return ProcessRow(self.pid, registration, ProcessRecord(self.status, 0, self.pruned), pruned=self.pruned)


WakeState: TypeAlias = Literal["pending", "enqueued", "discarded"]


class WakeRow(Struct, frozen=True, gc=False):
    """A wake of a session by a process, written with the event that it is about, whose cursor is its `number`.

    `turn` is the input it became, `reason` why it was discarded, `at` when it came to wait, first or again.
    """

    number: int
    session_id: str
    pid: int
    sequence: int
    policy: WakePolicy
    body: bytes
    at: int
    state: WakeState = "pending"
    turn: int | None = None
    reason: str | None = None


class Wake(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a wake says to its session of a process."""

    process_id: str
    type: str
    name: str = ""
    label: str = ""
    status: str = ""
    payload: Any = None
    call_id: str | None = None
    at: int = 0
    depth: int = 0


# ------------------------------------------------------------- tasks


TaskKind: TypeAlias = Literal["monitor", "subagent", "observer", "other"]
TaskState: TypeAlias = Literal["pending", "running", "idle", "cancel_requested", "completed", "failed", "cancelled"]
TaskEnd: TypeAlias = Literal["completed", "failed", "cancelled"]
LiveState: TypeAlias = Literal["running", "idle"]
ClosePolicy: TypeAlias = Literal["keep", "cancel", "transfer"]
"""What becomes of a task when its session is closed: it goes on, is cancelled, or is its parent's from then on."""
CancelWay: TypeAlias = Literal["cooperative", "abort_local", "external"]
"""How a task ends that is cancelled: its durable code is asked to; its code in memory is cut off; others stop it."""


class TaskSpec(Struct, frozen=True, omit_defaults=True):
    """What a task is. `id` is its name in its session: it may be used again once the task before has ended. `close`
    says what becomes of it when a child session is closed that it belongs to."""

    id: str
    kind: TaskKind = "other"
    producer: str = ""
    label: str = ""
    child_session_id: str | None = None
    parent_task_id: str | None = None
    close: ClosePolicy = "keep"


class TaskRecord(Struct, frozen=True, omit_defaults=True):
    """A task as it is now. `state` "idle" waits for something; `ended` is when it ended, in `value` or `error` how.

    `attempt` counts how often it was begun, of at most `max_attempts`; `idempotency_key` is the same for all of them.
    """

    id: str
    process_id: str
    kind: TaskKind
    state: TaskState
    session_id: str
    producer: str = ""
    label: str = ""
    child_session_id: str | None = None
    parent_task_id: str | None = None
    created: int = 0
    updated: int = 0
    ended: int | None = None
    value: Any = None
    error: str = ""
    cancel_way: CancelWay = "cooperative"
    close: ClosePolicy = "keep"
    attempt: int = 0
    max_attempts: int | None = None
    idempotency_key: str = ""

    @property
    def live(self) -> bool:
        return self.ended is None


TaskChange: TypeAlias = Literal[
    "registered", "state_changed", "progress", "completed", "failed", "cancel_requested", "cancelled", "transferred"
]


class TaskEvent(Struct, frozen=True):
    """Something has happened to a task. `task` is how it is now, which may be later than that."""

    change: TaskChange
    task: TaskRecord
