"""Every transition of a turn, one test each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.errors import InternalError
from perdure.model.agent import Budget
from perdure.model.effect import (
    AskedCall,
    CallModel,
    CancelTurn,
    Checkpoint,
    Delivery,
    Finish,
    GaveUp,
    Received,
    RunTools,
    TimeIsUp,
)
from perdure.model.llm import Stop, Usage
from perdure.model.message import Message, Reasoning, Text, ToolCall, ToolResult
from perdure.model.outcome import BudgetSpent, Finished, Incomplete, ProviderFailed
from perdure.model.record import INTERRUPTED, Delivered, Ended, Faltered, Replied, Slot, Started
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown, ToolOutcome
from perdure.model.transcript import Transcript
from perdure.turn.machine import Machine, Phase, TurnState, usage_of
from tests.turn.play import HELLO, asking, begin, call, deliver, end, one_step, say


def reading(text: str) -> dict[str, str]:
    """An output rule: the answer must be a word in brackets."""
    if not text.startswith("["):
        raise ValueError("put it in brackets")
    return {"word": text.strip("[]")}


# ---------------------------------------------------------------------- opening and asking


def test_a_turn_opens_with_a_checkpoint() -> None:
    machine = begin()

    assert machine.next_effect() == Checkpoint("opening")
    assert machine.messages() == [HELLO]
    assert machine.slot() is None


def test_after_an_empty_opening_the_model_is_asked() -> None:
    assert asking().next_effect() == CallModel(1)


def test_inputs_delivered_at_the_opening_are_shown_and_ride_in_the_next_record() -> None:
    machine = begin()

    deliver(machine, "and be quick")

    assert machine.messages() == [HELLO, Message("user", "and be quick")]
    assert machine.slot() == Slot(delivered=(Delivered(2, Message("user", "and be quick")),))


def test_what_was_gathered_is_handed_over_once() -> None:
    machine = begin()
    deliver(machine, "and be quick")

    say(machine, call("a"))

    assert machine.slot() is None
    assert machine.messages() == [
        HELLO,
        Message("user", "and be quick"),
        Message("assistant", (call("a"),)),
    ]


def test_asking_for_the_effect_changes_nothing() -> None:
    machine = asking()
    before = machine.dump()

    assert machine.next_effect() == machine.next_effect()
    assert machine.dump() == before


# ---------------------------------------------------------------------- the model


def test_an_answer_leads_to_the_last_boundary_and_then_to_the_end() -> None:
    machine = asking()

    say(machine, Reasoning("hm"), "good ", "day")

    assert machine.next_effect() == Checkpoint("before_completion")
    machine.receive(Delivery())
    assert machine.next_effect() == Finish(Finished("good day"))
    assert machine.state.usage == Usage(input=10, output=1, calls=1)


def test_an_empty_answer_is_an_answer() -> None:
    machine = asking()

    say(machine)
    machine.receive(Delivery())

    assert machine.next_effect() == Finish(Finished(""))


def test_an_input_that_arrives_before_completion_is_answered_too() -> None:
    machine = asking()
    say(machine, "good day")

    deliver(machine, "one more thing")

    assert machine.next_effect() == CallModel(2)
    assert machine.messages()[-2:] == [Message("assistant", "good day"), Message("user", "one more thing")]
    say(machine, "that too")
    machine.receive(Delivery())
    assert machine.next_effect() == Finish(Finished("that too"))


@pytest.mark.parametrize("stop", ["length", "filtered"])
def test_an_answer_that_was_cut_off_ends_the_turn_as_incomplete(stop: str) -> None:
    machine = asking(output=reading)

    say(machine, "[half an ans", stop=stop)

    assert machine.next_effect() == Finish(Incomplete(stop, "[half an ans"))


def test_a_failed_attempt_is_made_again_at_its_due_time() -> None:
    machine = asking()

    machine.receive(Faltered("overloaded", "busy", 5_000, 1, 1))

    assert machine.next_effect() == CallModel(1, 2, 5_000)
    assert machine.state.usage == Usage()


def test_an_interrupted_attempt_leaves_unknown_usage() -> None:
    machine = asking()

    machine.receive(Faltered(INTERRUPTED, "closed", 0, 1, 1))

    assert machine.next_effect() == CallModel(1, 2)
    assert machine.state.usage == Usage(unknown=1)


def test_attempts_start_from_one_again_with_the_next_step() -> None:
    machine = asking()
    machine.receive(Faltered("overloaded", "busy", 5_000, 1, 1))

    one_step(machine)
    machine.receive(Delivery())

    assert machine.next_effect() == CallModel(2)


def test_giving_up_on_the_model_ends_the_turn() -> None:
    machine = asking()

    machine.receive(GaveUp("overloaded", "busy", 4))

    assert machine.next_effect() == Finish(ProviderFailed("overloaded", "busy", 4))


def test_time_that_runs_out_while_the_model_is_asked_ends_the_turn() -> None:
    machine = asking(Budget(seconds=2.0))

    machine.receive(TimeIsUp())

    assert machine.next_effect() == Finish(BudgetSpent("seconds", 2.0))


@pytest.mark.parametrize(
    ("reply", "usage"),
    [
        (Replied(1, (), Usage(input=3)), Usage(input=3, calls=1)),
        (Replied(1, ()), Usage(calls=1, unknown=1)),
        (Replied(1, (), Usage(input=3), interrupted=2), Usage(input=3, calls=1, unknown=2)),
        (Replied(1, (), interrupted=1), Usage(calls=1, unknown=2)),
    ],
)
def test_usage_that_nobody_saw_is_unknown_and_not_zero(reply: Replied, usage: Usage) -> None:
    assert usage_of(reply) == usage


# ---------------------------------------------------------------------- typed output


def test_output_that_validates_is_the_value_of_the_turn() -> None:
    machine = asking(output=reading)

    say(machine, "[yes]")
    machine.receive(Delivery())

    assert machine.next_effect() == Finish(Finished("[yes]", {"word": "yes"}))


def test_output_that_does_not_validate_is_asked_for_again_with_the_reason() -> None:
    machine = asking(output=reading)

    say(machine, "yes")

    assert machine.next_effect() == CallModel(2)
    assert machine.messages()[-1] == Message(
        "user", "The answer does not have the required form: put it in brackets. Answer again, corrected."
    )
    say(machine, "[yes]")
    machine.receive(Delivery())
    assert machine.next_effect() == Finish(Finished("[yes]", {"word": "yes"}))


def test_output_is_repaired_twice_and_then_the_turn_is_incomplete() -> None:
    machine = asking(output=reading)

    say(machine, "one")
    say(machine, "two")
    assert machine.next_effect() == CallModel(3)
    say(machine, "three")

    assert machine.next_effect() == Finish(Incomplete("the output did not validate: put it in brackets", "three"))


# ---------------------------------------------------------------------- tools


def test_calls_are_asked_for_all_at_once() -> None:
    machine = asking()

    say(machine, "let me see", call("a", q=1), ToolCall("b", "look", raw="{oops"), started=(0,))

    assert machine.next_effect() == RunTools(
        1,
        (
            AskedCall("1.0", "a", "look", {"q": 1}, started=True, attempts=1),
            AskedCall("1.1", "b", "look", {}, raw="{oops"),
        ),
    )


def test_a_started_call_carries_what_its_start_recorded() -> None:
    machine = asking()
    say(machine, call("a", q=1))

    machine.receive(Started("1.0", {"q": 2}, 3, payload={"p": 1}, deferred=True, repeated=1))

    assert machine.next_effect() == RunTools(
        1,
        (
            AskedCall(
                "1.0", "a", "look", {"q": 2}, started=True, deferred=True, attempts=3, repeated=1, payload={"p": 1}
            ),
        ),
    )


def test_a_call_that_faltered_is_due_later_and_not_started() -> None:
    machine = asking()
    say(machine, call("a"), started=(0,))

    machine.receive(Faltered("retry", "later", 9_000, 1, 1, "1.0"))

    assert machine.next_effect() == RunTools(1, (AskedCall("1.0", "a", "look", {}, attempts=1, due=9_000),))


def test_a_new_start_forgets_the_due_time() -> None:
    machine = asking()
    say(machine, call("a"), started=(0,))
    machine.receive(Faltered("retry", "later", 9_000, 1, 1, "1.0"))

    machine.receive(Started("1.0", {}, 2))

    assert machine.next_effect() == RunTools(1, (AskedCall("1.0", "a", "look", {}, started=True, attempts=2),))


def test_only_calls_without_an_outcome_are_asked_for() -> None:
    machine = asking()
    say(machine, call("a"), call("b"), started=(0, 1))

    end(machine, "1.0")

    assert machine.next_effect() == RunTools(1, (AskedCall("1.1", "b", "look", {}, started=True, attempts=1),))


def test_after_the_last_outcome_comes_a_boundary_and_the_next_step() -> None:
    machine = asking()

    one_step(machine)

    assert machine.next_effect() == Checkpoint("after_work")
    deliver(machine, "hurry")
    assert machine.next_effect() == CallModel(2)
    assert machine.messages()[-2:] == [
        Message("tool", (ToolResult("a", "look", "result of 1.0"),)),
        Message("user", "hurry"),
    ]


@pytest.mark.parametrize(
    ("outcome", "result"),
    [
        (Ok({"n": 1}), ToolResult("a", "look", {"n": 1})),
        (
            Failed("tool_error", "no such city"),
            ToolResult("a", "look", {"error": "tool_error", "message": "no such city"}, "failed"),
        ),
        (Denied("too dear"), ToolResult("a", "look", {"error": "denied", "message": "too dear"}, "denied")),
        (Denied(), ToolResult("a", "look", {"error": "denied", "message": "the call was not approved"}, "denied")),
        (Cancelled("ann", "stop"), ToolResult("a", "look", {"error": "cancelled", "message": "stop"}, "cancelled")),
        (
            Cancelled("ann"),
            ToolResult("a", "look", {"error": "cancelled", "message": "the call was cancelled"}, "cancelled"),
        ),
        (
            OutcomeUnknown("it died"),
            ToolResult(
                "a",
                "look",
                {
                    "error": "outcome_unknown",
                    "message": "it died: the call may or may not have taken effect and was not repeated; "
                    "check before you call it again",
                },
                "outcome_unknown",
            ),
        ),
    ],
)
def test_the_model_is_told_how_each_call_ended(outcome: ToolOutcome, result: ToolResult) -> None:
    machine = asking()

    one_step(machine, outcome)

    assert machine.messages()[-1] == Message("tool", (result,))


# ---------------------------------------------------------------------- cancelling


def opening() -> Machine:
    return begin()


def with_tools() -> Machine:
    machine = asking()
    say(machine, call("a"), call("b"), started=(0, 1))
    end(machine, "1.1")
    return machine


def after_work() -> Machine:
    machine = asking()
    one_step(machine)
    return machine


def before_completion() -> Machine:
    machine = asking()
    say(machine, "good day")
    return machine


def done() -> Machine:
    machine = before_completion()
    machine.receive(Delivery())
    return machine


@pytest.mark.parametrize("make", [opening, asking, with_tools, after_work, before_completion, done])
def test_a_turn_can_be_cancelled_in_every_state(make: Callable[[], Machine]) -> None:
    machine = make()

    machine.receive(CancelTurn("ann", "changed my mind"))

    assert machine.next_effect() == Finish(Cancelled("ann", "changed my mind"))


def test_calls_that_a_cancel_cut_off_are_told_so_in_emission_order() -> None:
    machine = with_tools()

    machine.receive(CancelTurn("ann", "enough"))
    machine.state.transcript.pair(Cancelled("ann", "enough"))

    assert machine.messages()[-2:] == [
        Message("tool", (ToolResult("a", "look", {"error": "cancelled", "message": "enough"}, "cancelled"),)),
        Message("tool", (ToolResult("b", "look", "result of 1.1"),)),
    ]


# ---------------------------------------------------------------------- what does not fit


REPLY = Replied(1, (Text("hi"),))
STARTED = Started("1.0", {})
ENDED = Ended("1.0", Ok(1))
FALTERED = Faltered("busy", "busy", 0, 1, 1)


@pytest.mark.parametrize(
    ("make", "received"),
    [
        (opening, REPLY),
        (opening, ENDED),
        (opening, GaveUp("a", "b")),
        (opening, TimeIsUp()),
        (with_tools, TimeIsUp()),
        (asking, Delivery()),
        (asking, STARTED),
        (asking, ENDED),
        (with_tools, REPLY),
        (with_tools, Delivery()),
        (with_tools, GaveUp("a", "b")),
        (with_tools, Ended("1.1", Ok(2))),
        (with_tools, Ended("7.0", Ok(2))),
        (with_tools, Started("1.1", {})),
        (with_tools, Faltered("busy", "busy", 0, 1, 1, "1.1")),
        (with_tools, FALTERED),
        (after_work, ENDED),
        (after_work, REPLY),
        (before_completion, REPLY),
        (before_completion, FALTERED),
        (done, Delivery()),
        (done, REPLY),
    ],
)
def test_what_a_state_does_not_wait_for_is_refused_and_changes_nothing(
    make: Callable[[], Machine], received: Received
) -> None:
    machine = make()
    before = machine.dump()

    with pytest.raises(InternalError):
        machine.receive(received)

    assert machine.dump() == before


def test_a_turn_that_is_done_without_an_outcome_is_our_bug() -> None:
    machine = Machine(TurnState("s.1", Transcript(), Phase.DONE))

    with pytest.raises(InternalError, match=r"s\.1 is done without an outcome"):
        machine.next_effect()


@pytest.mark.parametrize("stop", ["length", "filtered"])
def test_calls_of_a_reply_that_was_cut_off_are_not_run(stop: Stop) -> None:
    machine = Machine(TurnState("s.1", Transcript([Message("user", "hi")])))
    machine.receive(Delivery())

    machine.receive(Replied(1, (ToolCall("a", "wire", {"amount": 1}),), stop=stop))

    assert machine.next_effect() == Finish(Incomplete(stop))
