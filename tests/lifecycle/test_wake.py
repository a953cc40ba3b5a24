"""What a session is told of a process, and what not."""

from typing import Any

import msgspec
import pytest

from perdure.lifecycle.process import wake_for, wake_target
from perdure.model.process import (
    Cause,
    Event,
    EventType,
    Failure,
    ProcessRecord,
    ProcessRow,
    Registration,
    Success,
    Wake,
    WakePolicy,
    WakeRule,
    WakeTarget,
)

EVENTS = (
    EventType("plain"),
    EventType("always", wake=WakeRule()),
    EventType("part", wake=WakeRule(input="/said/0/a~1b")),
    EventType("loud", wake=WakeRule("/loud")),
)


def row(wake: WakeTarget | None, record: ProcessRecord | None = None) -> ProcessRow:
    asked = Registration("p", "tool", "rerunnable", "fetch", label="the page", events=EVENTS, wake=wake)
    asked = msgspec.structs.replace(asked, cause=Cause("tool_call", "chat.1.1.0"))
    return ProcessRow(4, asked, record or ProcessRecord(sequence=6))


CHAT = WakeTarget("chat")


def payload_of(event: Event, record: ProcessRecord | None = None, wake: WakeTarget | None = CHAT) -> Any:
    """The payload that the session is told; `...` when it is told nothing."""
    found = wake_for(row(wake, record), event)
    return ... if found is None else msgspec.json.decode(found.body, type=Wake).payload


def test_the_end_of_a_process_is_told_with_its_outcome() -> None:
    ended = ProcessRecord("failed", 6, outcome=Failure("bug", "why"))

    found = wake_for(row(WakeTarget("chat", policy="notify"), ended), Event("process.failed", ended.outcome, 9))

    assert found is not None
    assert (found.session_id, found.pid, found.sequence, found.policy) == ("chat", 4, 6, "notify")
    assert (found.at, found.state, found.turn) == (9, "pending", None)
    assert msgspec.json.decode(found.body) == {
        "process_id": "p",
        "type": "process.failed",
        "name": "fetch",
        "label": "the page",
        "status": "failed",
        "payload": {"type": "failure", "code": "bug", "message": "why"},
        "call_id": "chat.1.1.0",
        "at": 9,
    }


@pytest.mark.parametrize("policy", ["turn", "notify"])
def test_every_end_is_told(policy: WakePolicy) -> None:
    for kind in ("process.completed", "process.failed", "process.cancelled", "process.abandoned"):
        assert payload_of(Event(kind), ProcessRecord(outcome=Success()), WakeTarget("chat", policy=policy)) is not ...


@pytest.mark.parametrize("wake", [None, WakeTarget("chat", policy="none")])
def test_nobody_is_told_who_did_not_ask(wake: WakeTarget | None) -> None:
    assert payload_of(Event("process.completed"), ProcessRecord(outcome=Success()), wake) is ...
    assert payload_of(Event("always", 1), None, wake) is ...


def test_the_target_that_was_set_last_is_told() -> None:
    moved = ProcessRecord(wake=WakeTarget("other"))

    assert wake_target(row(WakeTarget("chat"), moved)) == WakeTarget("other")
    assert wake_target(row(None, moved)) == WakeTarget("other")
    assert wake_target(row(WakeTarget("chat"), ProcessRecord(wake=WakeTarget("other", policy="none")))) is None


@pytest.mark.parametrize(
    "kind", ["process.created", "process.waiting", "process.cancel_requested", "process.progress", "plain", "unknown"]
)
def test_nothing_else_is_told(kind: str) -> None:
    assert payload_of(Event(kind, {"loud": True})) is ...


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"said": [{"a/b": "here"}]}, "here"),
        ({"said": ({"a/b": 0},)}, 0),
        ({"said": []}, None),
        ({"said": {"0": {"a/b": "by name"}}}, "by name"),
        ("text", None),
        (None, None),
    ],
)
def test_a_pointer_chooses_what_is_told(payload: Any, expected: Any) -> None:
    assert payload_of(Event("part", payload)) == expected


@pytest.mark.parametrize("loud", [True, 0, 0.0, "", [], {}, "x"])
def test_something_at_the_condition_wakes(loud: Any) -> None:
    assert payload_of(Event("loud", {"loud": loud})) == {"loud": loud}


@pytest.mark.parametrize("payload", [{"loud": False}, {"loud": None}, {}, None, "loud", ["loud"], 3])
def test_nothing_at_the_condition_wakes_nobody(payload: Any) -> None:
    assert payload_of(Event("loud", payload)) is ...


@pytest.mark.parametrize("index", ["²", "01", "-1", "1", "x", "9" * 30, ""])
def test_an_index_that_points_nowhere_finds_nothing(index: str) -> None:
    wakes = EventType("odd", wake=WakeRule(input=f"/{index}"))
    asked = Registration("p", "tool", "rerunnable", events=(wakes,), wake=WakeTarget("chat"))

    found = wake_for(ProcessRow(4, asked, ProcessRecord()), Event("odd", ["only one"]))

    assert found is not None
    assert msgspec.json.decode(found.body, type=Wake).payload is None
