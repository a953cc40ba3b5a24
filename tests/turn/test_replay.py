"""A turn goes on as recorded: from a dumped state, from its records, and under a changed definition."""

from __future__ import annotations

import pytest

from perdure.errors import InternalError
from perdure.model.agent import Budget
from perdure.model.effect import AskedCall, CallModel, Checkpoint, Delivery, Finish, RunTools
from perdure.model.llm import Usage
from perdure.model.message import Message, Text
from perdure.model.outcome import BudgetSpent, Finished
from perdure.model.record import Closed, Ended, Faltered, Framed, Joined, Record, Replied, Said, Slot
from perdure.model.tool import Ok
from perdure.turn.machine import Machine, OutputRule
from perdure.turn.prompt import request_messages
from tests.turn.play import HELLO, asking, begin, call, deliver, end, say


def bracketed(text: str) -> str:
    if not text.startswith("["):
        raise ValueError("put it in brackets")
    return text


def replayed(records: list[Record], budget: Budget | None = None, output: OutputRule | None = None) -> Machine:
    machine = begin(budget, output)
    machine.replay(records)
    return machine


def test_a_dumped_turn_asks_again_for_what_it_waited_for() -> None:
    machine = asking()
    say(machine, "let me see", call("a"), call("b"), started=(0,))
    end(machine, "1.1")

    loaded = Machine.load(machine.dump())

    assert loaded.state == machine.state
    assert loaded.next_effect() == RunTools(1, (AskedCall("1.0", "a", "look", {}, started=True, attempts=1),))


def test_a_replayed_turn_waits_where_the_records_end() -> None:
    reply = Replied(1, (call("a"), call("b")), Usage(input=5), started=(0, 1))

    machine = replayed([Said(HELLO), reply, Ended("1.1", Ok("b"))])

    assert machine.next_effect() == RunTools(1, (AskedCall("1.0", "a", "look", {}, started=True, attempts=1),))
    assert machine.messages() == [HELLO, Message("assistant", (call("a"), call("b")))]


def test_replayed_deliveries_stand_where_they_arrived() -> None:
    live = asking()
    first = say(live, "good day")
    deliver(live, "one more thing")
    second = say(live, "that too")

    machine = replayed([first, second])

    assert machine.messages() == live.messages()
    assert [m.text for m in machine.messages()] == ["hello", "good day", "one more thing", "that too"]
    assert machine.next_effect() == Checkpoint("before_completion")
    deliver(machine, "and now?")
    assert machine.next_effect() == CallModel(3)


def test_the_last_step_is_still_the_last_after_a_failed_attempt_and_a_restart() -> None:
    live = asking(Budget(steps=1))
    reply = say(live, call("a"), started=(0,))
    ended = end(live, "1.0")
    live.receive(Delivery())
    faltered = Faltered("busy", "busy", 7, 1, 2, slot=live.slot())
    live.receive(faltered)

    machine = replayed([reply, ended, faltered], Budget(steps=1))

    assert machine.next_effect() == live.next_effect() == CallModel(2, 2, 7, last=True)
    say(machine, call("b"))
    assert machine.next_effect() == Finish(BudgetSpent("steps", 1))


def test_what_is_not_of_a_running_turn_is_not_replayed() -> None:
    for record in (Closed(Finished("x"), Usage()), Joined(3)):
        with pytest.raises(InternalError):
            begin().replay([record])


def test_an_input_and_a_frame_need_no_answer() -> None:
    machine = replayed([Said(HELLO), Framed("too long")])

    assert machine.next_effect() == Checkpoint("opening")


# ---------------------------------------------------------------------- a changed definition


def test_recorded_steps_beyond_a_new_limit_stand() -> None:
    records: list[Record] = []
    for step in (1, 2, 3):
        records += [Replied(step, (call("a"),), started=(0,)), Ended(f"{step}.0", Ok(step))]

    machine = replayed(records, Budget(steps=1))

    assert machine.next_effect() == Checkpoint("after_work")
    machine.receive(Delivery())
    assert machine.next_effect() == CallModel(4, last=True)


def test_a_step_recorded_as_the_last_goes_on_freely_under_a_larger_limit() -> None:
    faltered = Faltered("busy", "busy", 0, 1, 2, slot=Slot(last=True))
    machine = replayed([Replied(1, (call("a"),)), Ended("1.0", Ok(1)), faltered], Budget(steps=50))

    assert machine.next_effect() == CallModel(2, 2, last=True)
    say(machine, "fine")
    deliver(machine, "go on")
    assert machine.next_effect() == CallModel(3)


def test_an_answer_that_a_new_rule_refuses_stands_when_a_step_follows_it() -> None:
    delivered = Slot(messages=(Message("user", "go on"),))
    records: list[Record] = [Replied(1, (Text("plain"),)), Replied(2, (call("a"),), started=(0,), slot=delivered)]

    machine = replayed(records, output=bracketed)

    assert [m.text for m in machine.messages()] == ["hello", "plain", "go on", ""]
    assert machine.next_effect() == RunTools(2, (AskedCall("2.0", "a", "look", {}, started=True, attempts=1),))


def test_a_recorded_repair_stands_when_the_rule_is_gone() -> None:
    live = asking(output=bracketed)
    first = say(live, "plain")
    second = say(live, "[better]")

    machine = replayed([first, second])
    machine.receive(Delivery())

    assert machine.next_effect() == Finish(Finished("[better]"))
    assert machine.messages() == live.messages()


def test_calls_recorded_after_a_repair_run_under_a_smaller_limit() -> None:
    # The new definition would have called the second step its last, and run no calls in it.
    records: list[Record] = [Replied(1, (Text("plain"),)), Replied(2, (call("a"),), started=(0,)), Ended("2.0", Ok(1))]

    machine = replayed(records, Budget(steps=1), bracketed)

    assert machine.next_effect() == Checkpoint("after_work")


def test_a_spent_budget_does_not_undo_what_was_recorded() -> None:
    records: list[Record] = [Replied(1, (Text("plain"),), Usage(input=100)), Faltered("busy", "busy", 0, 1, 2)]

    machine = replayed(records, Budget(tokens=5), bracketed)

    assert machine.next_effect() == CallModel(2, 2)


# ---------------------------------------------------------------------- what a model is shown


def test_instructions_go_first_and_the_turn_last() -> None:
    past, own = Message("user", "before"), Message("user", "now")

    assert request_messages("Be brief.", [past, own]) == [Message("system", "Be brief."), past, own]
    assert request_messages("", [past, own]) == [past, own]
