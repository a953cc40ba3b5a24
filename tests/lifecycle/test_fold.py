"""The record of a process is the fold of its events: every transition, written out by hand."""

from typing import Any

import msgspec
import pytest

from perdure.lifecycle import process as events
from perdure.lifecycle.process import ENDS, fold, replay, statuses
from perdure.model.process import (
    Abandoned,
    AbandonRequest,
    Cancelled,
    Event,
    Evidence,
    Failure,
    FirstStart,
    ProcessRecord,
    Success,
    WaitOn,
    WakeTarget,
)
from perdure.model.session import CancelRequest

OUTCOMES: dict[str, Any] = {
    "process.completed": Success({"n": 1}),
    "process.failed": Failure("bug", "why", [1]),
    "process.cancelled": Cancelled("ann", "enough", unknown=True),
    "process.abandoned": Abandoned(Evidence("sweep", 3, "w1", "its lock is free")),
}
WAITS = (WaitOn("0", "time", due=99), WaitOn("1", "signal", "go"))
STATUSES = ("running", "waiting", "completed", "failed", "cancelled", "abandoned", "caller_departed")

BECOMES = {
    "process.waiting": ("waiting", "waiting"),
    "process.resumed": ("running", "running"),
    "process.completed": ("completed", "completed"),
    "process.failed": ("failed", "failed"),
    "process.cancelled": ("cancelled", "cancelled"),
    "process.abandoned": ("abandoned", "abandoned"),
    "process.caller_departed": ("caller_departed", "caller_departed"),
}
"""What a running, and what a waiting process becomes. Everything else leaves the status alone."""

EVERY = [value for name, value in vars(events).items() if name.isupper() and str(value).startswith("process.")]
EVERY.remove("process.")


def event(kind: str) -> Event:
    payloads: dict[str, Any] = {
        **OUTCOMES,
        "process.waiting": {"waits": WAITS},
        "process.first_started": FirstStart("w1", 1, 1, 5),
        "process.cancel_requested": CancelRequest("ann"),
        "process.abandon_requested": AbandonRequest("ann"),
        "process.subscription_retargeted": WakeTarget("chat"),
        "process.continued": {"segment": 2},
        "process.transferred": {"from": "chat", "session_id": "desk"},
    }
    return Event(kind, payloads.get(kind), at=7)


def in_status(status: Any) -> ProcessRecord:
    return ProcessRecord(status, 4, 5, waits=WAITS if status == "waiting" else ())


def from_disk(told: Event) -> Event:
    return msgspec.json.decode(msgspec.json.encode(told), type=Event)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("status", STATUSES)
def test_every_event_in_every_status(status: str, kind: str) -> None:
    after = fold(in_status(status), event(kind))

    if status in ("running", "waiting"):
        same = (status, status)
        assert after.status == BECOMES.get(kind, same)[status == "waiting"]
        assert (after.sequence, after.updated) == (5, 7)
        assert (after.waits != ()) is (after.status == "waiting")
    else:
        assert after == msgspec.structs.replace(in_status(status), sequence=5), "what is over stays as it is"


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("status", STATUSES)
def test_an_event_from_disk_means_what_it_meant_when_it_was_written(status: str, kind: str) -> None:
    assert fold(in_status(status), from_disk(event(kind))) == fold(in_status(status), event(kind))


@pytest.mark.parametrize(
    ("told", "field", "value"),
    [
        (event("process.first_started"), "first_started", FirstStart("w1", 1, 1, 5)),
        (event("process.cancel_requested"), "cancel", CancelRequest("ann")),
        (event("process.abandon_requested"), "abandon", AbandonRequest("ann")),
        (Event("process.external_ref_set", {"pid": 3}), "external_ref", {"pid": 3}),
        (Event("process.progress", "half"), "progress", "half"),
        (Event("process.continued", {"segment": 2}), "segment", 2),
        (event("process.subscription_retargeted"), "wake", WakeTarget("chat")),
        (event("process.waiting"), "waits", WAITS),
        *[(event(kind), "outcome", outcome) for kind, outcome in OUTCOMES.items()],
        (Event("process.completed", {"outcome": Success(1), "authority": {}}), "outcome", Success(1)),
    ],
)
def test_what_an_event_says_is_in_the_record(told: Event, field: str, value: object) -> None:
    assert getattr(fold(ProcessRecord(), told), field) == value
    assert getattr(fold(ProcessRecord(), from_disk(told)), field) == value


@pytest.mark.parametrize("kind", ["process.invented_later", "tick", "signal.go", ""])
def test_an_event_of_an_unknown_kind_changes_nothing_but_the_count(kind: str) -> None:
    before = ProcessRecord("waiting", 4, 5, waits=WAITS, progress=1)

    after = fold(before, Event(kind, {"status": "completed"}, at=7))

    assert after == ProcessRecord("waiting", 5, 7, waits=WAITS, progress=1)


def test_a_life_by_hand() -> None:
    log = [
        Event("process.created", at=1),
        Event("process.first_started", FirstStart("w1", 1, 1, 2), 2),
        Event("process.waiting", {"waits": WAITS}, 3),
        Event("signal.go", "now", 4, "s1"),
        Event("process.resumed", at=4),
        Event("process.progress", 0.5, 5),
        Event("process.cancel_requested", CancelRequest("ann", "enough"), 6),
        Event("process.completed", Success("in time"), 7),
        Event("process.observer_added", {"session_id": "chat"}, 8),
    ]

    assert replay(log) == ProcessRecord(
        status="completed",
        sequence=9,
        updated=7,
        first_started=FirstStart("w1", 1, 1, 2),
        cancel=CancelRequest("ann", "enough"),
        progress=0.5,
        outcome=Success("in time"),
    )


def test_every_outcome_has_an_event_of_its_own() -> None:
    assert ENDS == {
        "success": "process.completed",
        "failure": "process.failed",
        "cancelled": "process.cancelled",
        "abandoned": "process.abandoned",
    }


def test_statuses_of_the_last_events_are_told_from_the_newest_back() -> None:
    types = ["signal.go", "process.resumed", "process.progress", "process.waiting", "signal.go", "process.resumed"]

    assert statuses(types, "running") == ["waiting", "running", "running", "waiting", "waiting", "running"]
    assert statuses(["tick", "process.completed"], "completed") == ["running", "completed"]
    assert statuses([], "running") == []
