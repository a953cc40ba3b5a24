"""What may be asked of a process: who may end it, what it may be called, which events it may have."""

from typing import Any

import pytest

from perdure.errors import InvalidProcess, ProcessEnded, ProcessPruned, UndeclaredEvent, UnknownProcess, WrongAuthority
from perdure.lifecycle.process import (
    alive,
    awaits,
    check,
    check_authority,
    check_process_id,
    declared,
    is_due,
    known,
    same_asking,
)
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Event,
    EventType,
    Evidence,
    Failure,
    ProcessRecord,
    ProcessRow,
    Registration,
    SessionOrigin,
    Success,
    WaitOn,
    WakeRule,
)
from perdure.model.write import ExternalOwner, ReconciledAbandon, WorkflowKey

RECOVERIES: tuple[Any, ...] = ("rerunnable", "owner_bound", "reattachable", "externally_owned")
OUTCOMES = [Success(1), Failure("bug"), Cancelled(), Abandoned(Evidence("reconciled_request"))]

MAY_END = {
    ("external owner", "externally_owned", "success"),
    ("external owner", "externally_owned", "failure"),
    ("external owner", "externally_owned", "cancelled"),
    ("external owner", "externally_owned", "abandoned"),
    ("workflow key", "rerunnable", "success"),
    ("workflow key", "rerunnable", "failure"),
    ("workflow key", "rerunnable", "cancelled"),
    ("workflow key", "rerunnable", "abandoned"),
    ("workflow key", "owner_bound", "success"),
    ("workflow key", "owner_bound", "failure"),
    ("workflow key", "owner_bound", "cancelled"),
    ("workflow key", "owner_bound", "abandoned"),
    ("workflow key", "reattachable", "success"),
    ("workflow key", "reattachable", "failure"),
    ("workflow key", "reattachable", "cancelled"),
    ("workflow key", "reattachable", "abandoned"),
    ("reconciled abandon", "externally_owned", "abandoned"),
    ("reconciled abandon", "reattachable", "abandoned"),
}


def row(recovery: Any = "rerunnable", record: ProcessRecord | None = None, **more: Any) -> ProcessRow:
    return ProcessRow(1, Registration("p", "function", recovery), record or ProcessRecord(), **more)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=["success", "failure", "cancelled", "abandoned"])
@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize(
    ("name", "authority"),
    [
        ("external owner", ExternalOwner("ann")),
        ("workflow key", WorkflowKey("wf")),
        ("reconciled abandon", ReconciledAbandon("ann")),
    ],
    ids=["external owner", "workflow key", "reconciled abandon"],
)
def test_who_may_end_what_nobody_owns(name: str, authority: Any, recovery: Any, outcome: Any) -> None:
    tag = outcome.__struct_config__.tag
    if (name, recovery, tag) in MAY_END:
        check_authority(row(recovery), authority, outcome)
    else:
        with pytest.raises(WrongAuthority, match="may not end process 'p'"):
            check_authority(row(recovery), authority, outcome)


@pytest.mark.parametrize("good", ["p", "a b", "chat-1.7.1.0", "名前 🦊", "x" * 400, "%_'\"; --", "../up"])
def test_ids_that_a_process_may_carry(good: str) -> None:
    assert check_process_id(good) == good


@pytest.mark.parametrize(
    "bad", ["", " ", "p ", " p", "a#b", "#", "x" * 401, "a\nb", "a\0b", "\x1b[31m", "\ud800", "a\u2028b", None, 7, b"p"]
)
def test_ids_that_no_process_may_carry(bad: object) -> None:
    with pytest.raises(InvalidProcess, match="is not usable: use"):
        check_process_id(bad)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([""], "needs a name"),
        (["signal."], "needs a name"),
        (["process.completed"], "is reserved"),
        (["process."], "is reserved"),
        (["process.mine"], "is reserved"),
        (["tick", "news", "tick"], "is declared twice"),
    ],
)
def test_event_types_that_no_process_may_declare(names: list[str], why: str) -> None:
    with pytest.raises(InvalidProcess, match=why):
        check(Registration("p", "function", "rerunnable", events=tuple(map(EventType, names))))


@pytest.mark.parametrize("rule", [WakeRule("loud"), WakeRule(input="text"), WakeRule("/a", "b/c")])
def test_a_wake_rule_needs_json_pointers(rule: WakeRule) -> None:
    with pytest.raises(InvalidProcess, match="begin it with '/'"):
        check(Registration("p", "function", "rerunnable", events=(EventType("tick", wake=rule),)))


def test_a_registration_needs_a_kind_and_at_least_one_attempt() -> None:
    with pytest.raises(InvalidProcess, match="needs a kind"):
        check(Registration("p", "", "rerunnable"))
    with pytest.raises(InvalidProcess, match="at least once"):
        check(Registration("p", "function", "rerunnable", max_attempts=0))
    good = Registration("p", "function", "rerunnable", events=(EventType("process"), EventType("processed.x")))
    assert check(good) is good


ASKED = Registration("p", "function", "rerunnable", "nightly", input={"day": [1, 2]})


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (Registration("p", "function", "rerunnable", "nightly", input={"day": (1, 2)}), True),
        (Registration("p", "function", "rerunnable", "nightly", "v2", input={"day": [1, 2]}, env="other"), True),
        (Registration("p", "function", "rerunnable", "nightly", input={"day": [1, 2]}, max_attempts=3), True),
        (Registration("p", "function", "rerunnable", "nightly", input={"day": [2, 1]}), False),
        (Registration("p", "function", "rerunnable", "daily", input={"day": [1, 2]}), False),
        (Registration("p", "tool", "rerunnable", "nightly", input={"day": [1, 2]}), False),
        (Registration("p", "function", "owner_bound", "nightly", input={"day": [1, 2]}), False),
        (
            Registration("p", "function", "rerunnable", "nightly", input={"day": [1, 2]}, origin=SessionOrigin("s")),
            False,
        ),
        (Registration("p", "function", "rerunnable", "nightly", input={"day": [1, 2]}, parent="q"), False),
    ],
)
def test_what_makes_two_askings_the_same(other: Registration, same: bool) -> None:
    assert same_asking(ASKED, other) is same


def test_signals_are_declared_or_open() -> None:
    closed = Registration("p", "function", "rerunnable", events=(EventType("signal.go"),))
    opened = Registration("p", "function", "rerunnable", open_signals=True)

    assert declared(closed, "signal.go").name == "signal.go"
    assert declared(opened, "signal.anything").name == "signal.anything"
    for registration, name in ((closed, "signal.stop"), (opened, "signal."), (opened, "tick"), (closed, "")):
        with pytest.raises(UndeclaredEvent, match=r"declares no event|takes no signal"):
            declared(registration, name)


def test_what_is_not_there_and_what_is_over_is_told_apart() -> None:
    ended, pruned = row(record=ProcessRecord("failed")), row(record=ProcessRecord("failed"), pruned=9)

    assert known(ended, "p") is ended
    assert alive(row(), "p").id == "p"
    for made in (None, pruned):
        with pytest.raises(UnknownProcess if made is None else ProcessPruned):
            known(made, "p")
    for status in ("completed", "failed", "cancelled", "abandoned", "caller_departed"):
        with pytest.raises(ProcessEnded, match=f"'p' is {status}"):
            alive(row(record=ProcessRecord(status)), "p")


WAITS = (
    WaitOn("0", "time", due=50),
    WaitOn("1", "signal", "go"),
    WaitOn("2", "time", due=40),
    WaitOn("3", "process", "q"),
)


def test_a_parked_process_has_something_to_do_when_one_of_its_waits_is_over() -> None:
    parked, running = row(record=ProcessRecord("waiting", waits=WAITS)), row()

    assert awaits(parked, Event("signal.go"))
    assert not awaits(parked, Event("signal.stop"))
    assert not awaits(parked, Event("go"))
    assert not awaits(running, Event("signal.go"))
    assert parked.due == 40
    assert [is_due(parked, now) for now in (39, 40, 99)] == [False, True, True]
    assert not is_due(running, 99)


@pytest.mark.parametrize(
    ("recovery", "record", "more", "live", "active"),
    [
        ("rerunnable", ProcessRecord(), {}, True, True),
        ("owner_bound", ProcessRecord(), {}, True, True),
        ("externally_owned", ProcessRecord(), {}, True, False),
        ("rerunnable", ProcessRecord("waiting", waits=WAITS), {}, True, False),
        ("rerunnable", ProcessRecord(), {"stuck": "why"}, True, False),
        ("rerunnable", ProcessRecord("completed"), {}, False, False),
        ("externally_owned", ProcessRecord("caller_departed"), {}, False, False),
        ("rerunnable", ProcessRecord("completed"), {"pruned": 1}, False, False),
    ],
)
def test_what_lives_and_what_a_worker_should_look_at(
    recovery: Any, record: ProcessRecord, more: Any, live: bool, active: bool
) -> None:
    made = row(recovery, record, **more)

    assert (made.live, made.active) == (live, active)
