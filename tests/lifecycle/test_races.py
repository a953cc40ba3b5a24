"""A cancel request, a signal and a takeover race the end of a process, in every order: there is exactly one end.

Purely on rows: each order is one life, and what each write is told is part of it.
"""

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from perdure.errors import Fenced, PerdureError, ProcessEnded
from perdure.lifecycle.process import replay
from perdure.model.process import TERMINAL, Cancelled, EventType, Failure, ProcessRow, Registration, Success, WaitOn
from perdure.model.session import CancelRequest, Node
from perdure.model.write import (
    Advance,
    Cancel,
    Claim,
    Complete,
    ExternalOwner,
    ProcessRef,
    ProcessScope,
    Register,
    Release,
    SendSignal,
    Write,
)
from perdure.stores import rules
from perdure.stores.memory import MemoryRows
from perdure.stores.rules.rows import ProcessById, run

ASKED = Registration("p", "function", "rerunnable", events=(EventType("signal.go"),))
FIRST = ProcessScope("p", 1, "w1", 1)
SECOND = ProcessScope("p", 1, "w2", 2)

STOP = Cancel(ProcessRef("p"), CancelRequest("ann", "enough"), 10)
END = Advance(FIRST, 11, (Node(1, b"done"),), outcome=Success("first"))
OTHER_END = Advance(SECOND, 12, (Node(1, b"other"),), outcome=Cancelled("ann", "enough"))
SIGNAL = SendSignal("p", "go", {"n": 1}, "s1", 13)
TAKE = Claim(ProcessRef("p"), "w2", 1, 14)
PARK = Advance(FIRST, 15, (Node(1, b"parks"),), park=(WaitOn("1", "signal", "go"),), seen=2)
LET_GO = Release(FIRST, 16)


WRITES: dict[str, Write[Any]] = {
    "stop": STOP,
    "end": END,
    "other end": OTHER_END,
    "signal": SIGNAL,
    "take": TAKE,
    "park": PARK,
    "let go": LET_GO,
}


def orders(*names: str) -> pytest.MarkDecorator:
    """Every order of these writes."""
    return pytest.mark.parametrize("order", list(itertools.permutations(names)), ids=" ".join)


def applied(rows: MemoryRows, write: Write[Any]) -> Any:
    return run(rules.transact(rows, write))


def begun(registration: Registration = ASKED) -> MemoryRows:
    rows = MemoryRows()
    applied(rows, Register(registration, 1, "w1"))
    if registration.recovery != "externally_owned":
        applied(rows, Advance(FIRST, 2, (Node(0, b"begun"),), first=True, seen=1))
    return rows


def tried(rows: MemoryRows, write: Write[Any]) -> Any:
    try:
        return applied(rows, write)
    except PerdureError as refusal:
        return type(refusal)


def process(rows: MemoryRows) -> ProcessRow:
    row = run(rows.process_by_id(ProcessById("p")))
    assert row is not None
    return row


def events(rows: MemoryRows) -> list[str]:
    return [event.type for _, event in rows.events_of[1].values()]


def check_whole(rows: MemoryRows) -> None:
    """What must hold in whatever order things came."""
    row, log = process(rows), [event for _, event in rows.events_of[1].values()]
    ends = [kind for kind in events(rows) if kind.removeprefix("process.") in TERMINAL]
    assert len(ends) == int(row.status in TERMINAL), "one end, and it is the record's"
    assert replay(log) == row.record
    assert events(rows).count("process.cancel_requested") <= 1
    assert events(rows).count("signal.go") <= 1
    assert row.owner is None or row.live, "nobody owns what is over"
    assert list(rows.active_pids) == ([1] if row.active else [])


@orders("stop", "end", "signal", "take")
def test_a_cancel_request_races_the_end_a_signal_and_a_takeover(order: tuple[str, ...]) -> None:
    rows = begun()
    answers = {name: tried(rows, WRITES[name]) for name in order}
    before = {name: order.index(name) for name in order}

    check_whole(rows)
    if before["take"] < before["end"]:
        assert answers["end"] is Fenced
        assert process(rows).owner == "w2"
        assert process(rows).record.cancel is not None, "whoever has it now is told"
    else:
        assert process(rows).record.outcome == Success("first"), "completion wins"
        assert not answers["take"].won
    ended_first = before["end"] < before["stop"] and before["end"] < before["take"]
    assert answers["stop"].status == ("completion_won" if ended_first else "requested")
    told_late = before["end"] < before["signal"] and before["end"] < before["take"]
    assert answers["signal"] is ProcessEnded if told_late else answers["signal"].sequence > 2


@orders("stop", "park", "signal", "take")
def test_whatever_comes_while_a_process_parks_it_does_not_sleep_through(order: tuple[str, ...]) -> None:
    rows = begun()
    answers = {name: tried(rows, WRITES[name]) for name in order}

    check_whole(rows)
    row = process(rows)
    assert row.status == "running", "a signal and a cancel request have come: somebody has something to do"
    assert row.record.cancel is not None
    parked = answers["park"] is not Fenced and answers["park"].parked
    assert parked is (order[0] == "park"), "it parks only if nothing has happened since it looked"


@orders("take", "end", "other end", "stop", "let go")
def test_two_owners_and_a_person_race_and_one_end_stands(order: tuple[str, ...]) -> None:
    rows = begun()
    for name in order:
        tried(rows, WRITES[name])
        check_whole(rows)
    settled = process(rows)

    for name in order:
        tried(rows, WRITES[name])

    if settled.status in TERMINAL:
        assert process(rows) == settled, "nothing that comes again changes what is over"
    check_whole(rows)


@orders("stop", "done", "failed", "signal")
def test_what_somebody_outside_does_ends_once(order: tuple[str, ...]) -> None:
    rows = begun(replace(ASKED, recovery="externally_owned"))
    writes: dict[str, Write[Any]] = {
        "stop": STOP,
        "done": Complete("p", Success(1), ExternalOwner("ann"), 11),
        "failed": Complete("p", Failure("bug"), ExternalOwner("bob"), 12),
        "signal": SIGNAL,
    }
    answers = {name: tried(rows, writes[name]) for name in order}

    check_whole(rows)
    first, second = sorted(["done", "failed"], key=order.index)
    assert (answers[first].status, answers[second].status) == ("committed", "superseded")
    assert tried(rows, writes[first]).status == "already_applied"
    assert process(rows).record.outcome == (Success(1) if first == "done" else Failure("bug"))


@orders("stop", "take")
def test_what_nobody_has_begun_ends_with_the_request_unless_it_is_claimed_first(order: tuple[str, ...]) -> None:
    rows = MemoryRows()
    applied(rows, Register(ASKED, 1))
    for name in order:
        tried(rows, Claim(ProcessRef("p"), "w2", 0, 14) if name == "take" else STOP)

    check_whole(rows)
    if order[0] == "stop":
        assert process(rows).record.outcome == Cancelled("ann", "enough")
    else:
        assert (process(rows).owner, process(rows).status) == ("w2", "running")
