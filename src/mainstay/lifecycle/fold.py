"""The record of a process is the fold of its events.

    status            event                                         becomes
    (registration)    process.created                               running
    running           process.waiting                               waiting
    waiting           process.resumed                               running
    running|waiting   process.completed|failed|cancelled|abandoned  that, for good
    running|waiting   process.caller_departed                       caller_departed, for good
    any               everything else                               unchanged

Once it is over nothing of it changes but the number of its last event: `updated` stays the time of its end.

A store writes an event and the folded record in one transaction, so folding the log again gives the record, field by
field. Unknown types change nothing: a newer writer may have told them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from msgspec import convert
from msgspec.structs import replace

from mainstay.model.process import (
    RETIRED,
    AbandonRequest,
    Event,
    FirstStart,
    ProcessOutcome,
    ProcessRecord,
    ProcessStatus,
    WaitOn,
    WakeTarget,
)
from mainstay.model.session import CancelRequest

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

ENDS: dict[str, str] = {
    "success": COMPLETED,
    "failure": FAILED,
    "cancelled": CANCELLED,
    "abandoned": ABANDONED,
}
"""The event of an outcome, by its tag."""


def ending(outcome: ProcessOutcome) -> str:
    """The type of the event that tells of an outcome."""
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
