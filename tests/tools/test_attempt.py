"""The rules of attempts, without a driver: what a call needs next, and what the end of an attempt means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure import Retries
from perdure.engine.admission import Capacity
from perdure.errors import Retry, ToolError
from perdure.model.effect import AskedCall
from perdure.model.session import Answer
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown, ToolOutcome, ToolSpec
from perdure.tools.attempt import (
    DIED,
    Again,
    AskPlugins,
    AttemptEnd,
    Attempts,
    AwaitAnswer,
    Begin,
    CallRecord,
    Circumstances,
    Conclude,
    EndCall,
    EndsAs,
    Leave,
    NotBegun,
    Return,
    RunBody,
    StartProcess,
    StopCause,
    TryAgain,
    Withdraw,
    cut_off,
    need_after,
    needs_of,
    next_need,
    raised,
    settle,
)
from tests.fuzzing import cases

ONCE, RERUN, ASKS = ToolSpec("t"), ToolSpec("t", recovery="rerun"), ToolSpec("t", recovery="ask")
APPROVED = ToolSpec("t", approval="ask")
GONE = Failed("tool_unavailable", "there is no such tool")
NEW, STARTED, FALTERED = Attempts(), Attempts(started=True, attempts=1), Attempts(attempts=1)
DEFERRED, BACKGROUND = Attempts(True, 1, deferred=True), Attempts(True, 1, background=True)
BUSY = Failed("busy", "come back later")
RETRY, LATE = Again(BUSY, 2.0, BUSY), Again(Failed("timeout", "too slow"), None, OutcomeUnknown("too slow"))
UNKNOWN = OutcomeUnknown("it was cancelled while it ran")


def asked_of_a_model(**recorded: Any) -> CallRecord:
    return AskedCall("1.0", "p", "t", {}, **recorded)


def test_the_call_of_a_turn_is_recorded_as_the_rules_read_it() -> None:
    assert next_need(asked_of_a_model(), ONCE) == Begin()
    assert next_need(asked_of_a_model(started=True, attempts=1), RERUN) == Begin(repeat=True)


@pytest.mark.parametrize(
    ("call", "usable", "known", "need"),
    [
        (NEW, ONCE, Circumstances(), Begin()),
        (NEW, APPROVED, Circumstances(), AwaitAnswer("approval", "the tool asks for approval")),
        (NEW, GONE, Circumstances(), Conclude(GONE)),
        (NEW, ONCE, Circumstances(vetted=True), AskPlugins()),
        (NEW, APPROVED, Circumstances(vetted=True), AskPlugins()),
        (NEW, ONCE, Circumstances(asked=True, vetted=True), AwaitAnswer("approval")),
        (NEW, GONE, Circumstances(asked=True), AwaitAnswer("approval")),
        (STARTED, ONCE, Circumstances(here=True), RunBody()),
        (STARTED, ONCE, Circumstances(), Conclude(OutcomeUnknown(DIED))),
        (STARTED, RERUN, Circumstances(), Begin(repeat=True)),
        (STARTED, ASKS, Circumstances(), AwaitAnswer("recovery", DIED)),
        (STARTED, GONE, Circumstances(), Conclude(OutcomeUnknown(DIED))),
        (DEFERRED, ONCE, Circumstances(), AwaitAnswer("deferred")),
        (DEFERRED, ASKS, Circumstances(), AwaitAnswer("deferred")),
        (DEFERRED, RERUN, Circumstances(), Begin(repeat=True)),
        (DEFERRED, RERUN, Circumstances(completed=True), AwaitAnswer("deferred")),
        (BACKGROUND, ONCE, Circumstances(), StartProcess()),
        (BACKGROUND, GONE, Circumstances(), StartProcess()),
        (FALTERED, ONCE, Circumstances(), Begin()),
        (FALTERED, APPROVED, Circumstances(), Begin()),
        (FALTERED, ONCE, Circumstances(vetted=True), Begin()),
        (FALTERED, GONE, Circumstances(), Conclude(GONE)),
    ],
)
def test_what_a_call_needs_follows_from_what_is_recorded(
    call: Attempts, usable: ToolSpec | Failed, known: Circumstances, need: object
) -> None:
    assert next_need(call, usable, known) == need


@pytest.mark.parametrize(
    ("answer", "call", "need"),
    [
        (None, NEW, Conclude(Denied("nobody answered in time"))),
        (None, STARTED, Conclude(OutcomeUnknown("nobody answered in time"))),
        (Answer("approved", by="ann"), NEW, Begin()),
        (Answer("rerun"), STARTED, Begin(repeat=True)),
        (Answer("rejected", reason="no", by="ann"), NEW, Conclude(Denied("no", "ann"))),
        (Answer("cancelled", reason="gone", by="ann"), NEW, Conclude(Cancelled("ann", "gone"))),
        (Answer("cancelled"), DEFERRED, Conclude(OutcomeUnknown("somebody does not wait for its end any more"))),
        (Answer("done", 3), STARTED, Return(Ok(3))),
        (Answer("value", None), DEFERRED, Return(Ok(None))),
        (Answer("failed", reason="sold out"), STARTED, Return(Failed("settled_as_failed", "sold out"))),
        (Answer("error", {"n": 1}), DEFERRED, Return(Failed("settled_as_failed", "settled as failed", {"n": 1}))),
    ],
)
def test_what_a_call_needs_after_an_answer(answer: Answer | None, call: Attempts, need: object) -> None:
    assert need_after(answer, call) == need


CANCELLED, LEFT = StopCause.CANCELLED, StopCause.LEFT


@pytest.mark.parametrize(
    ("end", "retries", "stop", "verdict"),
    [
        (Ok(1), 0, None, EndCall(Ok(1))),
        (Ok(1), 0, CANCELLED, EndCall(Ok(1))),
        (Ok(1), 0, LEFT, EndCall(Ok(1))),
        (GONE, 3, None, EndCall(GONE)),
        (RETRY, 1, None, TryAgain(BUSY, 2.0)),
        (RETRY, 0, None, EndCall(BUSY, harmless=True)),
        (RETRY, 1, CANCELLED, EndCall(BUSY, harmless=True)),
        (RETRY, 1, LEFT, TryAgain(BUSY, 2.0)),
        (LATE, 1, None, TryAgain(LATE.failed)),
        (LATE, 0, None, EndCall(LATE.otherwise)),
        (LATE, 1, CANCELLED, EndCall(LATE.otherwise)),
        (UNKNOWN, 1, None, EndCall(UNKNOWN)),
        (UNKNOWN, 1, CANCELLED, EndCall(UNKNOWN)),
        (NotBegun(), 0, None, Withdraw()),
        (NotBegun(), 0, CANCELLED, Withdraw()),
        (NotBegun(), 0, LEFT, Withdraw()),
    ],
)
@pytest.mark.parametrize("recovery", ["once", "rerun", "ask"])
def test_what_the_end_of_an_attempt_means(
    end: AttemptEnd, retries: int, stop: StopCause | None, verdict: object, recovery: Any
) -> None:
    contract = ToolSpec("t", recovery=recovery, retries=retries)

    assert settle(end, STARTED, contract, stop) == verdict


@pytest.mark.parametrize(
    ("call", "contract"), [(STARTED, RERUN), (STARTED, ASKS), (BACKGROUND, ONCE), (DEFERRED, ONCE)]
)
def test_what_was_cut_off_when_the_runtime_is_left_is_for_the_next_owner(call: Attempts, contract: ToolSpec) -> None:
    assert settle(UNKNOWN, call, contract, LEFT) == Leave()


@pytest.mark.parametrize("contract", [ONCE, None])
def test_what_may_not_be_repeated_is_unknown_when_the_runtime_is_left(contract: ToolSpec | None) -> None:
    assert settle(UNKNOWN, STARTED, contract, LEFT) == EndCall(UNKNOWN)


def test_a_deferred_call_that_returned_by_itself_has_ended_also_when_the_runtime_is_left() -> None:
    assert settle(Ok(1), DEFERRED, ONCE, LEFT) == EndCall(Ok(1))


def test_an_attempt_that_a_crash_cut_off_does_not_count_as_a_failure() -> None:
    contract = ToolSpec("t", recovery="rerun", retries=1)

    assert settle(RETRY, Attempts(True, attempts=3, repeated=2), contract) == TryAgain(BUSY, 2.0)
    assert settle(RETRY, Attempts(True, attempts=3, repeated=1), contract) == EndCall(BUSY, harmless=True)


def test_without_room_for_records_there_is_no_further_attempt() -> None:
    assert settle(RETRY, STARTED, ToolSpec("t", retries=9), room=False) == EndCall(BUSY, harmless=True)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (Retry("busy", after=2), Again(Failed("retry", "busy"), 2, Failed("retry", "busy"))),
        (ToolError("no", code="gone", data=[1]), Failed("gone", "no", [1])),
        (EndsAs(Denied("no")), Denied("no")),
        (ValueError("odd"), Failed("tool_raised", "ValueError: odd")),
        (SystemExit(3), Failed("tool_raised", "SystemExit: 3")),
    ],
)
def test_what_a_body_raises_is_how_its_attempt_ended(error: BaseException, end: AttemptEnd) -> None:
    assert raised(error, Retries(attempts=2)) == end


@pytest.mark.parametrize(
    ("error", "retries", "again"),
    [
        (ValueError("odd"), Retries(on=ValueError), True),
        (ToolError("odd"), Retries(on=ToolError), True),
        (ValueError("odd"), Retries(on=KeyError), False),
        (Retry("odd"), Retries(on=KeyError), True),
        (Retry("odd"), Retries(never=Retry), False),
    ],
)
def test_a_tool_names_failures_after_which_a_repetition_is_safe(
    error: Exception, retries: Retries, again: bool
) -> None:
    assert isinstance(raised(error, retries), Again) is again


def test_a_body_that_was_cut_off_is_unknown_unless_it_cancelled_itself() -> None:
    assert cut_off("once", None, timed_out=False) == Failed("tool_raised", "CancelledError: the tool cancelled itself")
    assert cut_off("rerun", "left", timed_out=False) == OutcomeUnknown("left")
    assert cut_off("once", "slow", timed_out=True) == OutcomeUnknown("slow")
    late = Again(Failed("timeout", "slow"), None, OutcomeUnknown("slow"))
    assert cut_off("rerun", "slow", timed_out=True) == late


def test_limits_of_tools_are_named_by_tool_and_by_resource() -> None:
    assert needs_of(ToolSpec("t")) == ()
    assert needs_of(ToolSpec("t", limit=2, resource="net")) == (Capacity("tool t", 2), Capacity("resource net", 1))


# ---------------------------------------------------------------------- whole lives

ENDS: st.SearchStrategy[AttemptEnd | str] = st.sampled_from(
    [Ok(1), BUSY, RETRY, LATE, UNKNOWN, Denied("no"), Cancelled("plugin"), NotBegun(), "crash"]
)
CONTRACTS = st.builds(
    ToolSpec,
    st.just("t"),
    recovery=st.sampled_from(["once", "rerun", "ask"]),
    retries=st.integers(0, 3),
    approval=st.sampled_from(["never", "ask"]),
)


NO, YES, FAILED, AGAIN = Answer("rejected"), Answer("approved"), Answer("failed"), Answer("rerun")
SETTLED = Failed("settled_as_failed", "settled as failed")


class Life:
    """A call from its first record on, as a driver would lead it: `bodies` is how often its body has run."""

    def __init__(self, contract: ToolSpec) -> None:
        self.contract, self.call = contract, Attempts()
        self.bodies = self.deaths = self.failures = 0
        self.outcome: ToolOutcome | None = None

    def lead(self, events: list[tuple[AttemptEnd | str, StopCause | None]], answers: list[bool]) -> None:
        """`answers` are those of people: whether it may run, or run again. Without one the time for it runs out."""
        for end, stop in events:
            need: object = next_need(self.call, self.contract)
            if isinstance(need, AwaitAnswer):
                verdicts = (NO, YES) if need.kind == "approval" else (FAILED, AGAIN)
                need = need_after(verdicts[answers.pop()] if answers else None, self.call)
            if not isinstance(need, Begin):
                assert isinstance(need, Conclude | Return)
                self.outcome = need.outcome
                return
            self.attempt(end, stop, need.repeat)
            if self.outcome is not None:
                return

    def attempt(self, end: AttemptEnd | str, stop: StopCause | None, repeat: bool) -> None:
        before = self.call
        self.call = Attempts(True, before.attempts + 1, before.repeated + repeat)
        self.bodies += 1
        if isinstance(end, str):
            self.deaths += 1
            return
        if end is LATE and self.contract.recovery != "rerun":
            end = LATE.otherwise
        match settle(end, self.call, self.contract, stop):
            case EndCall(outcome):
                self.outcome = outcome
            case TryAgain():
                self.failures += 1
                self.call = Attempts(False, self.call.attempts, self.call.repeated)
            case Withdraw():
                self.bodies -= 1
                self.call = Attempts(False, self.call.attempts - 1, before.repeated)
            case Leave():
                self.deaths += 1


@settings(max_examples=cases(300, 5_000), deadline=None)
@given(
    contract=CONTRACTS,
    events=st.lists(st.tuples(ENDS, st.sampled_from([None, None, CANCELLED, LEFT])), min_size=1, max_size=12),
    answers=st.lists(st.booleans(), max_size=6),
)
def test_no_life_of_a_call_runs_a_body_that_its_contract_does_not_allow(
    contract: ToolSpec, events: list[tuple[AttemptEnd | str, StopCause | None]], answers: list[bool]
) -> None:
    life = Life(contract)
    life.lead(events, answers)

    assert life.failures <= contract.retries, "retries count failures, and there is one attempt more than retries"
    assert life.bodies <= 1 + life.failures + life.deaths
    assert life.call.repeated <= life.deaths
    if contract.recovery == "once":
        assert life.call.repeated == 0, "what may have had an effect is not run again"
        assert life.bodies <= 1 + life.failures
    if isinstance(life.outcome, Ok | Failed) and life.bodies:
        assert life.outcome in (Ok(1), BUSY, SETTLED), "nothing is said that no attempt and no person has said"
