"""The code protocol, and the machine of a turn that uses it."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from perdure.errors import InternalError
from perdure.model.agent import Budget
from perdure.model.effect import CancelTurn, Checkpoint, Delivery, Finish, NoRoom, RunCode, RunTools
from perdure.model.message import Message, Text, ToolCall, ToolResult
from perdure.model.outcome import BudgetSpent, Finished, Incomplete
from perdure.model.protocol import Prompt
from perdure.model.record import Called, Closed, Ended, Replied
from perdure.model.tool import Cancelled, Failed, Ok, ToolSpec
from perdure.model.transcript import Transcript
from perdure.turn.code import BEHIND, RULES, CodeProtocol
from perdure.turn.machine import Machine, OutputRule, TurnState
from perdure.turn.tools import ToolsProtocol
from tests.turn import play
from tests.turn.play import HELLO, deliver, end

PROTOCOL = CodeProtocol(lambda tools, output: f"Functions: {', '.join(tool.name for tool in tools)}.")
CELL = "Let me see.\n```python\nx = await look(1)\n```\n"


def coding(budget: Budget | None = None, output: OutputRule | None = None) -> Machine:
    machine = Machine(TurnState("s.1", Transcript([HELLO])), budget or Budget(), output)
    machine.receive(Delivery())
    return machine


def say(machine: Machine, text: str, **fields: Any) -> Replied:
    return play.say(machine, text, protocol=PROTOCOL, **fields)


def called(machine: Machine, first: int, *names: str, **fields: Any) -> Called:
    calls = tuple([ToolCall(f"c{first + n}", name, fields.pop("args", {})) for n, name in enumerate(names)])
    record = Called(machine.state.step, first, calls, slot=machine.slot(), **fields)
    machine.receive(record)
    return record


def test_reply_with_a_fence_is_a_cell() -> None:
    machine = coding()

    say(machine, CELL, at=7)

    assert machine.next_effect() == RunCode(1, "x = await look(1)\n", 7)


def test_reply_without_a_fence_is_the_answer() -> None:
    machine = coding()

    say(machine, "It is done.")

    assert machine.next_effect() == Checkpoint("before_completion")
    assert machine.state.outcome == Finished("It is done.")


def test_in_the_tools_protocol_a_fence_is_part_of_the_answer() -> None:
    machine = coding()

    play.say(machine, CELL)

    assert machine.state.outcome == Finished(CELL)


def test_half_a_fence_is_told_to_the_model_as_often_as_outputs_are_repaired() -> None:
    machine = coding()
    for _ in range(2):
        say(machine, "```python\nx = 1")
        assert machine.messages()[-1].text.startswith("Nothing was run: The code block is not closed")
    say(machine, "```python\nx = 1")

    assert isinstance(machine.state.outcome, Incomplete)


def test_half_a_fence_of_a_reply_that_was_cut_off_ends_the_turn_as_incomplete() -> None:
    machine = coding()

    say(machine, "```python\nx = 1", stop="length")

    assert machine.state.outcome == Incomplete("length", "```python\nx = 1")


def test_calls_of_a_cell_are_restated_until_they_have_an_outcome() -> None:
    machine = coding()
    say(machine, CELL)

    called(machine, 0, "look", "pay", started=(0,), store="here")
    end(machine, "1.1")

    effect = machine.next_effect()
    assert isinstance(effect, RunCode)
    (left,) = effect.calls
    assert (left.call, left.name, left.started, left.attempts, left.store) == ("1.0", "look", True, 1, "here")
    assert machine.state.called == 2


def test_cell_that_ended_is_followed_by_the_next_model_call() -> None:
    machine = coding()
    say(machine, CELL)
    end(machine, "1", Ok({"output": "42"}))

    assert machine.next_effect() == Checkpoint("after_work")
    deliver(machine)
    assert machine.messages()[-1] == Message("user", "Output of the cell:\n42")
    assert machine.state.step == 2


def test_cell_cannot_end_before_its_calls() -> None:
    machine = coding()
    say(machine, CELL)
    called(machine, 0, "look")

    with pytest.raises(InternalError, match=r"before 1\.0"):
        end(machine, "1")


def test_cells_that_failed_are_steps_without_progress() -> None:
    machine = coding(Budget(no_progress=2))
    for step in ("1", "2"):
        say(machine, CELL)
        end(machine, step, Failed("code_raised", "it raised"))
        deliver(machine)

    assert machine.next_effect() == Finish(BudgetSpent("no_progress", 2))


@pytest.mark.parametrize(("output", "value"), [(None, None), (lambda given: given, [1])])
def test_cell_that_finished_ends_the_turn_with_its_answer(output: OutputRule | None, value: Any) -> None:
    machine = coding(output=output)
    say(machine, CELL)
    called(machine, 0, "finish")
    end(machine, "1.0", Ok([1]))
    end(machine, "1", Ok({"output": "", "answer": "[1]"}))

    assert machine.state.outcome == Finished("[1]", value)
    assert machine.messages()[-1] == Message("assistant", "[1]")
    deliver(machine)
    assert machine.next_effect() == Finish(Finished("[1]", value))


def test_finish_that_did_not_fit_does_not_end_the_turn() -> None:
    machine = coding()
    say(machine, CELL)
    called(machine, 0, "finish")
    end(machine, "1.0", Failed("invalid_output", "it is no list"))
    end(machine, "1", Ok({"output": ""}))

    assert machine.next_effect() == Checkpoint("after_work")


def test_input_that_comes_when_a_cell_has_finished_is_answered_first() -> None:
    machine = coding()
    say(machine, CELL)
    called(machine, 0, "finish")
    end(machine, "1.0", Ok("done"))
    end(machine, "1", Ok({"output": "", "answer": "done"}))

    deliver(machine, "one more thing")
    say(machine, CELL)
    end(machine, "2", Ok({"output": ""}))

    assert machine.next_effect() == Checkpoint("after_work")
    assert machine.state.outcome is None


def test_sleep_is_due_from_its_record_on() -> None:
    machine = coding()
    say(machine, CELL)
    machine.receive(Called(1, 0, (ToolCall("c", "sleep", {"seconds": 2.5}),), at=1_000))

    assert machine.state.calls["1.0"].due == 3_500


def test_cell_in_the_last_step_is_not_run() -> None:
    machine = coding(Budget(steps=1))
    say(machine, CELL)
    end(machine, "1", Ok({"output": ""}))
    deliver(machine)
    say(machine, CELL)

    assert machine.next_effect() == Finish(BudgetSpent("steps", 1))


@pytest.mark.parametrize(
    ("received", "outcome"),
    [(CancelTurn("user", "enough"), Cancelled("user", "enough")), (NoRoom(), BudgetSpent("records", 65535))],
)
def test_turn_may_end_in_the_middle_of_a_cell(received: Any, outcome: Any) -> None:
    machine = coding()
    say(machine, CELL)

    machine.receive(received)

    assert machine.next_effect() == Finish(outcome)


@pytest.mark.parametrize(
    ("budget", "count", "refused"),
    [
        (Budget(calls=3), 2, BudgetSpent("calls", 3)),
        (Budget(calls=4), 2, None),
        (Budget(tokens=11), 1, BudgetSpent("tokens", 11)),
        (Budget(no_progress=0), 1, None),
    ],
)
def test_calls_of_a_cell_are_within_the_budget(budget: Budget, count: int, refused: BudgetSpent | None) -> None:
    machine = Machine(TurnState("s.1", Transcript([HELLO])), budget)
    machine.state.phase = coding().state.phase
    say(machine, CELL)
    called(machine, 0, "look", "look")

    assert machine.refusal(count) == refused


# ---------------------------------------------------------------------- replay


Own: TypeAlias = Replied | Called | Ended


def records() -> list[Own]:
    machine = coding()
    found: list[Own] = [say(machine, CELL), called(machine, 0, "look", "pay"), end(machine, "1.1")]
    found += [end(machine, "1.0"), end(machine, "1", Ok({"output": "so"}))]
    deliver(machine)
    found += [say(machine, CELL), called(machine, 0, "finish"), end(machine, "2.0", Ok("done"))]
    return [*found, end(machine, "2", Ok({"output": "", "answer": "done"}))]


@pytest.mark.parametrize("count", range(10))
def test_replayed_cell_leads_to_the_same_state_and_so_does_its_dump(count: int) -> None:
    given = records()[:count]
    live, again = coding(), coding()
    for record in given:
        if isinstance(record, Replied) and record.step > 1:
            deliver(live)
        live.receive(record)

    again.replay(given)

    if count and isinstance(given[-1], Ended) and given[-1].call == "1":
        deliver(again)
        deliver(live)
    assert again.dump() == live.dump()
    assert Machine.load(again.dump()).next_effect() == live.next_effect()


def test_cell_goes_on_as_recorded_where_the_budget_grants_no_step_any_more() -> None:
    machine = coding(Budget(steps=0))

    machine.replay(records()[:3])

    effect = machine.next_effect()
    assert isinstance(effect, RunCode)
    assert (effect.code, [call.call for call in effect.calls]) == ("x = await look(1)\n", ["1.0"])


def test_history_reads_as_the_turn_ran() -> None:
    machine = coding()
    machine.replay(records())
    told = Transcript([HELLO])
    for record in [*records(), Closed(Finished(""), machine.state.usage)]:
        told.add(record)

    assert told.messages == list(machine.messages())
    assert told.messages[-1] == Message("assistant", "done")


# ---------------------------------------------------------------------- what the model is shown


def test_native_calls_are_shown_as_text() -> None:
    asked = Message("assistant", (Text("Let me look."), ToolCall("p", "look", {"n": 1})))
    told = Message("tool", (ToolResult("p", "look", {"found": 2}),))

    assert PROTOCOL.ask(Prompt("", [HELLO, asked, told])).messages == [
        HELLO,
        Message("assistant", (Text("Let me look."), Text('[called look({"n":1})]'))),
        Message("user", (Text('[look returned: {"found":2}]'),)),
    ]


def test_what_follows_a_cell_is_not_shown_again() -> None:
    said = Message("assistant", f"{CELL}Output: 43\n")

    (shown,) = PROTOCOL.ask(Prompt("", [said])).messages

    assert shown.text == f"{CELL}\n\n{BEHIND}"


def test_instructions_describe_the_functions() -> None:
    asked = PROTOCOL.ask(Prompt("Be kind.", [], [ToolSpec("look"), ToolSpec("pay")]))

    assert asked == Prompt(f"Be kind.\n\n{RULES}\n\nFunctions: look, pay.", [])


def test_instructions_state_the_form_of_the_answer() -> None:
    asked = PROTOCOL.ask(Prompt("", [], [], {"type": "integer"}))

    assert asked.instructions.endswith('without a block: {"type":"integer"}')
    assert asked.output is None


# ---------------------------------------------------------------------- calls that are cells

TOOLS = ToolsProtocol(lambda tools, output: f"Functions: {', '.join(tool.name for tool in tools)}.")


def code_call(text: str) -> ToolCall:
    return ToolCall("", "run_code", {"code": text})


def calling() -> Machine:
    """The model has asked for a cell, a plain call and another cell."""
    machine = coding()
    play.say(machine, code_call("x"), ToolCall("", "look"), code_call("y"), protocol=TOOLS, at=7)
    return machine


def test_cells_among_calls_run_after_the_others_one_after_the_other() -> None:
    machine = calling()

    effects = [machine.next_effect()]
    end(machine, "1.1")
    effects.append(machine.next_effect())
    machine.receive(Called(1, 0, (ToolCall("c", "pay"),), cell="1.0"))
    effects.append(machine.next_effect())
    end(machine, "1.0.0")
    end(machine, "1.0", Ok({"output": ""}))
    effects.append(machine.next_effect())
    end(machine, "1.2", Failed("code_raised", "it raised"))
    effects.append(machine.next_effect())

    plain, first, asked, second, after = effects
    assert isinstance(plain, RunTools)
    assert [call.call for call in plain.calls] == ["1.1"]
    assert first == RunCode(1, "x", 7, (), "1.0")
    assert isinstance(asked, RunCode)
    assert [call.call for call in asked.calls] == ["1.0.0"]
    assert second == RunCode(1, "y", 7, (), "1.2")
    assert after == Checkpoint("after_work")
    assert [part.call_id for m in machine.messages() for part in m.parts if isinstance(part, ToolResult)] == [
        "s.1.1.0",
        "s.1.1.1",
        "s.1.1.2",
    ]


def test_cell_among_calls_cannot_end_before_its_calls_or_before_another_one() -> None:
    machine = calling()
    end(machine, "1.1")
    with pytest.raises(InternalError, match=r"cell 1\.2 ended before 1\.0"):
        end(machine, "1.2")
    machine.receive(Called(1, 0, (ToolCall("c", "pay"),), cell="1.0"))

    with pytest.raises(InternalError, match=r"cell 1\.0 ended before 1\.0\.0"):
        end(machine, "1.0")


def test_instructions_describe_the_functions_of_run_code_where_it_is_offered() -> None:
    tools = [ToolSpec("look"), ToolSpec("run_code")]

    assert TOOLS.ask(Prompt("Be kind.", [], tools)).instructions.endswith("Functions: look.")
    assert TOOLS.ask(Prompt("Be kind.", [], tools)).tools == tools
    assert TOOLS.ask(Prompt("Be kind.", [], tools[:1])).instructions == "Be kind."
