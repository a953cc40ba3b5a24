"""How a process lives: its record is the fold of its events.

    status            event                                         becomes
    (registration)    process.created                               running
    running           process.waiting                               waiting
    waiting           process.resumed                               running
    running|waiting   process.completed|failed|cancelled|abandoned  that, for good
    running|waiting   process.caller_departed                       caller_departed, for good
    any               everything else                               unchanged

Once it is over nothing of it changes but the number of its last event: `updated` stays the time of its end.

A store writes an event and the folded record in one transaction, so folding the log again gives the record, field by
field. Unknown types change nothing: a newer writer may have written them.

`wake_for` is what a process reports to a session: its end, and those of its events that were declared to wake. The
checks at the end of the file say what may be asked of a process, and what may happen to it next. Nothing here waits or
writes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec import convert
from msgspec.structs import replace

from perdure.errors import (
    InvalidProcess,
    ProcessEnded,
    ProcessPruned,
    UndeclaredEvent,
    UnknownProcess,
    WrongAuthority,
    quoted,
)
from perdure.model import validate
from perdure.model.codec import clean_text, encode
from perdure.model.process import (
    MAX_PROCESS_ID,
    RETIRED,
    Abandoned,
    AbandonRequest,
    Event,
    EventType,
    Failure,
    FirstStart,
    ProcessOutcome,
    ProcessRecord,
    ProcessRow,
    ProcessStatus,
    Registration,
    WaitOn,
    Wake,
    WakeRow,
    WakeTarget,
)
from perdure.model.session import CancelRequest
from perdure.model.write import Authority, ExternalOwner, ReconciledAbandon, WorkflowKey

T = TypeVar("T")

CREATED = "process.created"
FIRST_STARTED = "process.first_started"
WAITING = "process.waiting"
RESUMED = "process.resumed"
CANCEL_REQUESTED = "process.cancel_requested"
ABANDON_REQUESTED = "process.abandon_requested"
EXTERNAL_REF_SET = "process.external_ref_set"
OBSERVER_ADDED = "process.observer_added"
OBSERVER_REMOVED = "process.observer_removed"
SUBSCRIPTION_RETARGETED = "process.subscription_retargeted"
TRANSFERRED = "process.transferred"
CALLER_DEPARTED = "process.caller_departed"
WAKE = "process.wake"
PROGRESS = "process.progress"
CONTINUED = "process.continued"
STUCK = "process.stuck"
REVIVED = "process.revived"
COMPLETED = "process.completed"
FAILED = "process.failed"
CANCELLED = "process.cancelled"
ABANDONED = "process.abandoned"
PRUNED = "process.pruned"

RESERVED = "process."
"""No process may declare an event whose type begins like this."""
SIGNAL = "signal."
SETTLES = "settle:"
"""No host or model may send a signal whose name begins like this: it settles a step, see `settlement_name`."""
SETTLEMENT = SIGNAL + SETTLES

ENDS: dict[str, str] = {
    "success": COMPLETED,
    "failure": FAILED,
    "cancelled": CANCELLED,
    "abandoned": ABANDONED,
}
"""The event of an outcome, by its tag."""
_ENDS = frozenset(ENDS.values())
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}").fullmatch

COMPLETES_OUR_WORK: dict[type, bool] = {ExternalOwner: False, WorkflowKey: True, ReconciledAbandon: False}
"""Whether an authority may end a process that workers may begin; the others may end work that is done outside. A
granted request to abandon also ends work that lives elsewhere: that place may be gone for good."""


def ending(outcome: ProcessOutcome) -> str:
    """The type of the event that ends a process so."""
    tag: Any = outcome.__struct_config__.tag
    return ENDS[tag]


def fold(record: ProcessRecord, event: Event) -> ProcessRecord:
    """The record after one more event."""
    if record.status in RETIRED:
        return replace(record, sequence=record.sequence + 1)
    change = CHANGES.get(event.type)
    changed = {} if change is None else change(event.payload)
    return replace(record, sequence=record.sequence + 1, updated=event.at, **changed)


def replay(events: Iterable[Event]) -> ProcessRecord:
    """The record that a whole log makes."""
    record = ProcessRecord()
    for event in events:
        record = fold(record, event)
    return record


BEFORE: dict[str, ProcessStatus] = {
    CREATED: "running",
    WAITING: "running",
    RESUMED: "waiting",
    COMPLETED: "running",
    FAILED: "running",
    CANCELLED: "running",
    ABANDONED: "running",
    CALLER_DEPARTED: "running",
}
"""The status before an event that changes it."""


def statuses(types: Sequence[str], last: ProcessStatus) -> list[ProcessStatus]:
    """The status after each of the last events of a process, of which `last` is the newest."""
    found = [last]
    for kind in reversed(types):
        found.append(BEFORE[kind] if kind in BEFORE else found[-1])
    return found[-2::-1]


def _as(kind: Any, payload: Any) -> Any:
    """A payload as what it is: from disk it comes as plain JSON."""
    return payload if type(payload) is kind else convert(payload, kind)


def _ended(status: ProcessStatus) -> Callable[[Any], dict[str, Any]]:
    def ended(payload: Any) -> dict[str, Any]:
        outcome = payload["outcome"] if isinstance(payload, dict) and "outcome" in payload else payload
        outcome = convert(outcome, ProcessOutcome) if isinstance(outcome, dict) else outcome
        return {"status": status, "waits": (), "outcome": outcome}

    return ended


def _waits(payload: Any) -> dict[str, Any]:
    return {"status": "waiting", "waits": tuple(_as(WaitOn, each) for each in payload["waits"])}


CHANGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    FIRST_STARTED: lambda payload: {"first_started": _as(FirstStart, payload)},
    WAITING: _waits,
    RESUMED: lambda _: {"status": "running", "waits": ()},
    CANCEL_REQUESTED: lambda payload: {"cancel": _as(CancelRequest, payload)},
    ABANDON_REQUESTED: lambda payload: {"abandon": _as(AbandonRequest, payload)},
    EXTERNAL_REF_SET: lambda payload: {"external_ref": payload},
    PROGRESS: lambda payload: {"progress": payload},
    CONTINUED: lambda payload: {"segment": payload["segment"]},
    SUBSCRIPTION_RETARGETED: lambda payload: {"wake": _as(WakeTarget, payload)},
    TRANSFERRED: lambda payload: {"holder": payload["session_id"]},
    CALLER_DEPARTED: lambda _: {"status": "caller_departed", "waits": ()},
    COMPLETED: _ended("completed"),
    FAILED: _ended("failed"),
    CANCELLED: _ended("cancelled"),
    ABANDONED: _ended("abandoned"),
}


AWAITED = "the session awaited it"
"""Why a wake is discarded whose news the session has already."""
OF_SESSION = "#"
"""The parent of what ends with its session is this before the session's id: no process has an id with it."""


def session_parent(session_id: str) -> str:
    """The parent of a process that ends with its session."""
    return f"{OF_SESSION}{session_id}"


def wake_target(row: ProcessRow) -> WakeTarget | None:
    """The session that a process wakes; None when it wakes none."""
    found = row.record.wake or row.registration.wake
    return None if found is None or found.policy == "none" else found


def wake_for(row: ProcessRow, event: Event) -> WakeRow | None:
    """The wake that goes with an event, for the outbox; None for most. `row` is the process after the event."""
    to = wake_target(row)
    if to is None:
        return None
    if event.type == CANCELLED and _asked_for(row, to.session_id):
        return None
    if event.type in _ENDS:
        payload: Any = row.record.outcome
        if isinstance(payload, Failure):
            payload = replace(payload, traceback="")  # for people who look after it, and not for a model
    else:
        rule = next((each.wake for each in row.registration.events if each.name == event.type), None)
        if rule is None or (rule.when is not None and not _found(event.payload, rule.when)):
            return None
        payload = _at(event.payload, rule.input)
    cause = row.registration.cause
    call = cause.id if cause is not None and cause.type == "tool_call" else None
    each = row.registration
    wake = Wake(row.id, event.type, each.name, each.label, row.status, payload, call, event.at, each.depth)
    return WakeRow(0, to.session_id, row.pid, row.record.sequence, to.policy, encode(wake), event.at)


def _asked_for(row: ProcessRow, session_id: str) -> bool:
    """Whether the session has ended the process itself, and knows."""
    return row.record.cancel is not None and row.record.cancel.by == f"session {session_id}"


def _found(payload: Any, pointer: str) -> bool:
    found = _at(payload, pointer)
    return found is not None and found is not False


def _at(payload: Any, pointer: str) -> Any:
    """What a JSON pointer points at; None where there is nothing."""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(payload, dict):
            payload = payload.get(name)
        elif isinstance(payload, list | tuple) and _INDEX(name) and int(name) < len(payload):
            payload = payload[int(name)]
        else:
            return None
    return payload


def check_process_id(process_id: object) -> str:
    """The id itself when a process may carry it."""
    if not isinstance(process_id, str) or not process_id or len(process_id) > MAX_PROCESS_ID:
        wanted = f"use 1 to {MAX_PROCESS_ID} printable characters"
        raise InvalidProcess(f"process id {quoted(process_id)} is not usable: {wanted}")
    if not process_id.isprintable() or process_id != process_id.strip() or "#" in process_id:
        raise InvalidProcess(f"process id {quoted(process_id)} is not usable: use printable characters, and no '#'")
    # An enum of strings is its value: its name, which `format` would show, is in no row.
    return process_id if type(process_id) is str else str.__str__(process_id)


def check(registration: Registration) -> Registration:
    """The registration itself, when it is one."""
    check_process_id(registration.id)
    # A wrong type fails the call that gave it, not a later read.
    validate.read_back(replace(registration, input=None), f"process {registration.id!r}", InvalidProcess)
    if not registration.kind:
        raise InvalidProcess("a process needs a kind: it says which engine runs it")
    if registration.max_attempts is not None and registration.max_attempts < 1:
        raise InvalidProcess(f"a process is begun at least once, not {registration.max_attempts} times")
    seen = set[str]()
    for each in registration.events:
        _check_event_type(each, seen)
    return registration


def _check_event_type(declared: EventType, seen: set[str]) -> None:
    if not declared.name or declared.name == SIGNAL:
        raise InvalidProcess("an event type needs a name")
    if declared.name.startswith(RESERVED):
        raise InvalidProcess(f"event type {declared.name!r} is reserved: choose a name that begins otherwise")
    if declared.name in seen:
        raise InvalidProcess(f"event type {declared.name!r} is declared twice")
    seen.add(declared.name)
    for pointer in () if declared.wake is None else (declared.wake.when, declared.wake.input):
        if pointer and not pointer.startswith("/"):
            raise InvalidProcess(f"{pointer!r} of event type {declared.name!r} is no JSON pointer: begin it with '/'")


def same_asking(one: Registration, other: Registration) -> bool:
    """Whether two registrations are the same asking. Code and environment may have moved on since the first."""
    return same(_content(one), _content(other))


def asking_digest(registration: Registration) -> int:
    """A digest of what `same_asking` compares, as a signed integer of 64 bits."""
    content = hashlib.sha256(encode(_content(registration))).digest()
    return int.from_bytes(content[:8], "big", signed=True)


def _content(each: Registration) -> tuple[Any, ...]:
    return (each.kind, each.name, each.asked or each.input, each.recovery, each.origin, each.parent)


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same on disk: one of them comes from there, the other from a caller."""
    return one == other or encode(one) == encode(other)


def declared(registration: Registration, event_type: str) -> EventType:
    """The declaration of an event that the process may have; refused when there is none."""
    for each in registration.events:
        if each.name == event_type:
            return each
    event_type = clean_text(event_type)
    if event_type.startswith(SETTLEMENT) and registration.kind == "function":
        return EventType(event_type)
    if event_type.startswith(SIGNAL) and len(event_type) > len(SIGNAL) and registration.open_signals:
        return EventType(event_type)
    raise UndeclaredEvent(registration.id, event_type, [each.name for each in registration.events])


def check_args(args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments as they are kept: by name."""
    if args is not None and not isinstance(args, Mapping):
        raise InvalidProcess(f"arguments are given by name, such as {{'day': 'Sunday'}}, not as {type(args).__name__}")
    return dict(args or {})


def check_signal(name: object) -> str:
    """The name itself when a signal may carry it."""
    if not isinstance(name, str) or not name or clean_text(name) != name:
        raise InvalidProcess(f"a signal needs a name, not {quoted(name)}")
    if name.startswith(SETTLES):
        raise InvalidProcess(f"{quoted(name)} cannot be sent: a step is settled with `handle.settle(call_id, verdict)`")
    return name if type(name) is str else str.__str__(name)


def settlement_name(key: str, attempt: int, step: str) -> str:
    """Return the name of the signal that settles this attempt of a step; `key` is unique in its process."""
    return f"{SETTLES}{key}:{attempt}:{step}"


class UnsettledStep(NamedTuple):
    """A step that waits until a person has said what became of it: `signal` settles it, `since` is in ms."""

    key: str
    attempt: int
    step: str
    signal: str
    since: int


def is_settlement(wait: WaitOn) -> bool:
    """True if a person has to settle a step before this wait ends."""
    return wait.kind == "signal" and wait.name.startswith(SETTLES)


def unsettled_steps(waits: Iterable[WaitOn]) -> list[UnsettledStep]:
    """Return the steps among these waits that a person has to settle."""
    found = []
    for wait in waits:
        if is_settlement(wait):
            key, attempt, step = wait.name.removeprefix(SETTLES).split(":", 2)
            found.append(UnsettledStep(key, int(attempt), step, wait.name, wait.since))
    return found


def known(row: ProcessRow | None, process_id: str) -> ProcessRow:
    """The process, when there is still something of it."""
    if row is None:
        raise UnknownProcess(process_id)
    if row.pruned is not None:
        raise ProcessPruned(process_id, row.status, row.pruned)
    return row


def alive(row: ProcessRow | None, process_id: str) -> ProcessRow:
    """The process, when something may still happen to it."""
    found = known(row, process_id)
    if found.status in RETIRED:
        raise ProcessEnded(process_id, found.status)
    return found


def awaits(row: ProcessRow, event: Event) -> bool:
    """Whether a parked process has something to do because of this."""
    awaited = [SIGNAL + wait.name for wait in row.record.waits if wait.kind == "signal"]
    return row.status == "waiting" and event.type in awaited


def is_due(row: ProcessRow, now: int) -> bool:
    due = row.due
    return row.status == "waiting" and due is not None and due <= now


def check_authority(row: ProcessRow, authority: Authority, outcome: ProcessOutcome) -> None:
    """Refuse an authority that may not report how this process ended."""
    abandons = isinstance(authority, ReconciledAbandon) and row.registration.contract.once_begun == "reattach"
    if COMPLETES_OUR_WORK.get(type(authority)) is not row.registration.contract.may_begin and not abandons:
        raise WrongAuthority(row.id, type(authority).__name__, row.registration.recovery)
    if isinstance(authority, ReconciledAbandon) and not isinstance(outcome, Abandoned):
        raise WrongAuthority(row.id, "ReconciledAbandon", "an outcome that is not abandoned")
