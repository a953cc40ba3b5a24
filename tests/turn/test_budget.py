"""When a turn has had enough: each limit, to the step."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from perdure.model.agent import Budget
from perdure.model.effect import CallModel, Checkpoint, Delivery, Effect, Finish, RunTools
from perdure.model.llm import Usage
from perdure.model.message import Message
from perdure.model.outcome import BudgetSpent, Finished, Incomplete
from perdure.model.record import Faltered, Replied, Slot
from perdure.model.tool import Failed
from perdure.turn.machine import Machine
from tests.turn.play import asking, begin, call, deliver, end, one_step, say

LAST_WORD = Message(
    "system", "The limit of 2 steps for this turn is reached. Answer now with what you have; tools are off."
)


def steps_until_the_end(machine: Machine, failing: bool = False, **fields: object) -> tuple[int, Effect]:
    """How many whole steps a turn that calls a tool every time gets, and what follows."""
    steps = 0
    while isinstance(effect := machine.next_effect(), CallModel) and not effect.last and steps < 500:
        one_step(machine, Failed("tool_error", "no") if failing else None, **fields)
        machine.receive(Delivery())
        steps += 1
    return steps, machine.next_effect()


# ---------------------------------------------------------------------- steps


def test_the_step_limit_grants_one_last_step_without_tools() -> None:
    machine = asking(Budget(steps=2))

    assert steps_until_the_end(machine) == (2, CallModel(3, last=True))
    assert machine.messages()[-1] == LAST_WORD
    assert machine.slot() == Slot(messages=(LAST_WORD,), last=True)


def test_an_answer_in_the_last_step_finishes_the_turn() -> None:
    machine = asking(Budget(steps=2))
    steps_until_the_end(machine)

    say(machine, "this is all I know")
    machine.receive(Delivery())

    assert machine.next_effect() == Finish(Finished("this is all I know"))


def test_calls_in_the_last_step_are_not_run() -> None:
    machine = asking(Budget(steps=2))
    steps_until_the_end(machine)

    say(machine, call("a"))

    assert machine.next_effect() == Finish(BudgetSpent("steps", 2))


def test_output_of_the_last_step_is_not_repaired() -> None:
    def never(text: str) -> None:
        raise ValueError("wrong")

    machine = asking(Budget(steps=2), never)
    steps_until_the_end(machine)

    say(machine, "word")

    assert machine.next_effect() == Finish(Incomplete("the output did not validate: wrong", "word"))


def test_the_last_word_stands_and_what_is_said_after_it_belongs_to_the_next_turn() -> None:
    machine = asking(Budget(steps=2))
    steps_until_the_end(machine)
    say(machine, "this is all I know")

    assert not machine.may_ask()
    deliver(machine, "one more thing")  # and what was delivered all the same is kept

    assert machine.next_effect() == Finish(Finished("this is all I know"))
    slot = machine.slot()
    assert slot is not None
    assert [d.input for d in slot.delivered] == [2]


def test_a_repair_counts_as_a_step() -> None:
    def never(text: str) -> None:
        raise ValueError("wrong")

    machine = asking(Budget(steps=1), never)

    say(machine, "word")

    assert machine.next_effect() == CallModel(2, last=True)


def test_a_limit_of_no_steps_allows_only_the_last_word() -> None:
    assert asking(Budget(steps=0)).next_effect() == CallModel(1, last=True)


def test_a_hundred_steps_are_the_default() -> None:
    assert steps_until_the_end(asking()) == (100, CallModel(101, last=True))


def test_without_a_step_limit_steps_go_on() -> None:
    machine = asking(Budget(steps=None))

    assert steps_until_the_end(machine)[0] == 500


# ---------------------------------------------------------------------- tokens, money, time


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (21, 1), (22, 1), (23, 2), (44, 2), (45, 3)])
def test_tokens_end_the_turn_at_the_step_that_reaches_the_limit(tokens: int, steps: int) -> None:
    # Every kind of token counts: 22 a step.
    usage = Usage(input=10, output=1, cache_read=7, cache_write=4, reasoning=1)
    machine = asking(Budget(tokens=tokens))

    assert steps_until_the_end(machine, usage=usage) == (steps, Finish(BudgetSpent("tokens", tokens)))


@pytest.mark.parametrize(("money", "steps"), [(0.25, 1), (0.5, 2), (0.6, 3)])
def test_money_ends_the_turn_at_the_step_that_reaches_the_limit(money: float, steps: int) -> None:
    machine = asking(Budget(money=money))

    assert steps_until_the_end(machine, usage=Usage(cost=0.25)) == (steps, Finish(BudgetSpent("money", money)))


@pytest.mark.parametrize("money", [0.1, "0.1", Decimal("0.1")], ids=repr)
def test_a_tenth_of_money_is_a_tenth_however_it_is_given(money: Any) -> None:
    """As a float it is a little more, and a cost of exactly that would let another call through."""
    machine = asking(Budget(money=money))

    assert steps_until_the_end(machine, usage=Usage(cost=Decimal("0.1"))) == (1, Finish(BudgetSpent("money", 0.1)))


@pytest.mark.parametrize(("elapsed", "effect"), [(1_999, CallModel(2)), (2_000, Finish(BudgetSpent("seconds", 2.0)))])
def test_time_ends_the_turn_at_the_boundary_after_it_is_up(elapsed: int, effect: Effect) -> None:
    machine = asking(Budget(seconds=2.0))
    machine.receive(Replied(1, (call("a"),), started=(0,), slot=machine.slot(elapsed)))
    end(machine, "1.0")

    machine.receive(Delivery())

    assert machine.next_effect() == effect


def test_time_already_worked_is_remembered_by_later_records_without_a_reading() -> None:
    machine = asking(Budget(seconds=2.0))
    machine.receive(Faltered("busy", "busy", 0, 1, 1, slot=Slot(elapsed_ms=2_500)))
    one_step(machine)

    machine.receive(Delivery())

    assert machine.next_effect() == Finish(BudgetSpent("seconds", 2.0))


def test_a_budget_of_nothing_ends_the_turn_before_the_first_call() -> None:
    machine = begin(Budget(tokens=0))

    machine.receive(Delivery())

    assert machine.next_effect() == Finish(BudgetSpent("tokens", 0))


def test_a_spent_budget_lets_the_answer_in_hand_stand() -> None:
    machine = asking(Budget(tokens=5))

    say(machine, "good day", usage=Usage(input=100))
    machine.receive(Delivery())

    assert machine.next_effect() == Finish(Finished("good day"))


def test_a_spent_budget_stops_a_repair() -> None:
    def never(text: str) -> None:
        raise ValueError("wrong")

    machine = asking(Budget(tokens=5), never)

    say(machine, "word", usage=Usage(input=100))

    assert machine.next_effect() == Finish(BudgetSpent("tokens", 5))


# ---------------------------------------------------------------------- progress


@pytest.mark.parametrize(("budget", "steps"), [(Budget(), 12), (Budget(no_progress=3), 3)])
def test_steps_without_a_successful_call_end_the_turn(budget: Budget, steps: int) -> None:
    assert steps_until_the_end(asking(budget), failing=True) == (steps, Finish(BudgetSpent("no_progress", steps)))


def test_one_success_in_a_step_is_progress() -> None:
    machine = asking(Budget(no_progress=2))
    for _ in range(4):
        reply = say(machine, call("a"), call("b"), started=(0, 1))
        end(machine, f"{reply.step}.0")
        end(machine, f"{reply.step}.1", Failed("tool_error", "no"))
        machine.receive(Delivery())

    assert machine.next_effect() == CallModel(5)


def test_progress_counts_consecutive_steps_only() -> None:
    machine = asking(Budget(no_progress=2))
    for failing in (True, False, True, False, True):
        one_step(machine, Failed("tool_error", "no") if failing else None)
        machine.receive(Delivery())

    assert machine.next_effect() == CallModel(6)


def test_without_a_progress_limit_failures_go_on() -> None:
    machine = asking(Budget(no_progress=None, steps=30))

    assert steps_until_the_end(machine, failing=True) == (30, CallModel(31, last=True))


def test_boundaries_between_steps_are_where_limits_are_looked_at() -> None:
    machine = asking(Budget(no_progress=1))
    one_step(machine, Failed("tool_error", "no"))

    assert machine.next_effect() == Checkpoint("after_work")
    machine.receive(Delivery())
    assert machine.next_effect() == Finish(BudgetSpent("no_progress", 1))


def test_work_is_not_cut_short_by_a_limit() -> None:
    machine = asking(Budget(tokens=5))

    say(machine, call("a"), usage=Usage(input=100))

    assert isinstance(machine.next_effect(), RunTools)
