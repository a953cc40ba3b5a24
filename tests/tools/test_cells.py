"""Cells: code of a model whose calls are effects, and whose variables live as long as the session."""

import asyncio
from typing import Any

import pytest

from perdure import Agent, Budget, Plugin, Session, ToolContext, ToolError, tool
from perdure.errors import InvalidDefinition
from perdure.graph.cells import Cell
from perdure.model.code import CodeCall
from perdure.model.message import Text, ToolCall, ToolResult
from perdure.model.outcome import BudgetSpent, Finished, Incomplete, Waiting
from perdure.model.plugin import ShortCircuit
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown, OutputBudget
from perdure.plugins.hooks import ToolCallContext
from perdure.testing import ScriptedModel, VirtualClock
from perdure.tools.dialogue import CellDiverged, Dialogue
from tests.kit import SOON, Place, crashed_in, until
from tests.tools.coding import cell, coder, outputs


@tool
async def double(n: int) -> int:
    """Twice as much."""
    return 2 * n


class Counter:
    """A tool that counts its calls, and returns how many there were."""

    def __init__(self, **options: Any) -> None:
        self.made: list[int] = []

        @tool(**options)
        async def count(n: int) -> int:
            """Count."""
            self.made.append(n)
            return len(self.made)

        self.tool = count


async def is_over(session: Session[Any]) -> bool:
    """Whether its first turn has ended, and does not wait any more."""
    return not (await session.result("s.1")).waiting


# ---------------------------------------------------------------------- variables


async def test_cell_calls_tools_and_its_output_is_told_to_the_model(place: Place) -> None:
    agent = coder(cell("x = await double(21)\nprint('x is', x)\nx + 1"), "It is 42.", tools=[double])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == Finished("It is 42.")
    assert outputs(result.messages) == ["Output of the cell:\nx is 42\n43"]
    assert [(call.call_id, call.tool, call.args, call.outcome) for call in result.tool_calls] == [
        ("s.1.1.0", "double", {"n": 21}, Ok(42))
    ]


async def test_variables_live_across_cells_and_turns(place: Place) -> None:
    count = Counter()
    cells = [cell("a = await count(1)"), cell("b = a + await count(2)"), "one", cell("print(a, b)"), "two"]
    agent = coder(*cells, tools=[count.tool])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        result = await session.run("and again")

    assert outputs(result.new_messages) == ["Output of the cell:\n1 3"]
    assert count.made == [1, 2]


async def test_variables_are_made_again_in_another_process_without_calling_anything(place: Place) -> None:
    count = Counter()
    async with place.runtime(coder(cell("a = await count(5)\nb = [a] * 3"), "one", tools=[count.tool])) as runtime:
        await (await runtime.session("s")).run("go")
    async with place.runtime(coder(cell("print(a, b)"), "two", tools=[count.tool])) as runtime:
        result = await (await runtime.session("s")).run("and again")

    assert outputs(result.new_messages) == ["Output of the cell:\n1 [1, 1, 1]"]
    assert count.made == [5]


async def test_fork_has_the_variables_of_where_it_was_forked(place: Place) -> None:
    agent = coder(
        cell("a = 1"), "one", cell("a = 2"), "two", cell("print(a)"), "in the fork", cell("print(a)"), "here",
        cell("a = 3\nprint(a)"), "in the fork again", cell("print(a)"), "still here", tools=[double],
    )  # fmt: skip
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await session.run("two")
        branch = await session.fork(at="s.1")
        told = [await each.run("look") for each in (branch, session, branch, session)]

    assert [outputs(each.new_messages)[0][-1] for each in told] == ["1", "2", "3", "2"]


async def test_cell_that_raises_tells_the_error_and_keeps_what_it_had(place: Place) -> None:
    agent = coder(cell("a = 1\nprint('so far')\nb = a / 0"), cell("print(a)"), "done", tools=[double])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    first, second = outputs(result.messages)
    assert first.startswith("Output of the cell:\nso far\n")
    assert "ZeroDivisionError" in first
    assert second == "Output of the cell:\n1"


# ---------------------------------------------------------------------- calls


async def test_calls_at_once_are_answered_in_the_order_of_their_records(place: Place) -> None:
    released = asyncio.Event()

    @tool
    async def slow() -> str:
        """Slow."""
        await released.wait()
        return "slow"

    @tool
    async def fast() -> str:
        """Fast."""
        return "fast"

    @tool
    async def release() -> str:
        """Release."""
        released.set()
        return "release"

    code = """
import asyncio
seen = []
async def first():
    seen.append(await slow())
async def second():
    seen.append(await fast())
    await release()
await asyncio.gather(first(), second())
print(seen)"""
    tools = [slow, fast, release]
    async with place.runtime(coder(cell(code), "done", tools=tools)) as runtime:
        result = await (await runtime.session("s")).run("go")
    async with place.runtime(coder(cell("print(seen)"), "done", tools=tools)) as runtime:
        again = await (await runtime.session("s")).run("go")

    assert outputs(result.messages) == outputs(again.new_messages) == ["Output of the cell:\n['fast', 'slow']"]


async def test_values_come_into_a_cell_whole_and_only_its_output_is_cut(place: Place) -> None:
    @tool
    async def long() -> str:
        """Long."""
        return "word " * 10_000

    code, budget = "text = await long()\nprint(text)\nlen(text)", OutputBudget(bytes=1024)
    agent = coder(cell(code), "done", tools=[long], output_budget=budget)
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    (shown,) = outputs(result.messages)
    assert len(shown) < 1200
    assert shown.endswith("50000")


async def test_failed_and_denied_calls_raise_what_a_cell_may_catch(place: Place) -> None:
    class Guard(Plugin):
        id = "guard"

        def before_tool_call(self, ctx: ToolCallContext) -> Any:
            return ShortCircuit(Denied("not today")) if ctx.tool.name == "open_door" else None

    @tool
    async def fail() -> str:
        """Fail."""
        raise ToolError("out of paper", code="no_paper")

    @tool
    async def open_door() -> str:
        """Open."""
        return "opened"

    code = """
try:
    await fail()
except Exception as error:
    print(error)
try:
    await open_door()
except Exception as error:
    print(error)"""
    agent = coder(cell(code), "done", tools=[fail, open_door], plugins=[Guard()])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert [type(call.outcome) for call in result.tool_calls] == [Failed, Denied]
    assert outputs(result.messages) == ["Output of the cell:\nno_paper: out of paper\nnot today"]


async def test_after_a_call_with_an_unknown_end_nothing_that_runs_once_is_called_however_it_was_caught(
    place: Place,
) -> None:
    entered, paid = asyncio.Event(), list[int]()

    @tool
    async def pay(n: int) -> str:
        """Pay."""
        paid.append(n)
        entered.set()
        await asyncio.Event().wait()
        return "paid"

    @tool(recovery="rerun")
    async def again(n: int) -> int:
        """Twice as much."""
        return 2 * n

    code = """
for n in range(3):
    try:
        await pay(n)
    except BaseException as error:
        print('caught', n)
print(await again(4))"""
    await crashed_in(place.runtime(coder(cell(code), "", tools=[pay, again])), entered)
    async with place.runtime(coder("done", tools=[pay, again])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).result("s.1"), SOON)

    assert paid == [0]
    assert [type(call.outcome) for call in result.tool_calls] == [OutcomeUnknown, Failed, Failed, Ok]
    assert outputs(result.messages) == ["Output of the cell:\ncaught 0\ncaught 1\ncaught 2\n8"]


async def test_loop_that_goes_on_after_any_failure_does_not_go_on_after_an_unknown_one(place: Place) -> None:
    entered, paid = asyncio.Event(), list[int]()

    @tool
    async def pay(n: int) -> str:
        """Pay."""
        paid.append(n)
        entered.set()
        await asyncio.Event().wait()
        return "paid"

    code = "for n in range(3):\n    try:\n        await pay(n)\n    except Exception:\n        print('caught', n)"
    await crashed_in(place.runtime(coder(cell(code), "", tools=[pay])), entered)
    async with place.runtime(coder("done", tools=[pay])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).result("s.1"), SOON)

    assert paid == [0]
    assert [type(call.outcome) for call in result.tool_calls] == [OutcomeUnknown]
    assert outputs(result.messages)[0].startswith("The cell printed nothing.")


async def test_approval_in_the_middle_of_a_cell_parks_it_and_it_goes_on_there_in_another_process(place: Place) -> None:
    count = Counter()

    @tool(approval="ask")
    async def shoot(at: str) -> str:
        """Shoot."""
        return f"shot {at}"

    code = "a = await count(1)\nprint('asking')\nb = await shoot('the moon')\nprint(a, b)\nawait count(2)"
    tools = [count.tool, shoot]
    async with place.runtime(coder(cell(code), tools=tools)) as runtime:
        parked = await (await runtime.session("s")).run("go")
    async with place.runtime() as runtime:
        await (await runtime.session("s", agent="coder")).approve("s.1.1.1", by="operator")
    async with place.runtime(coder("done", tools=tools)) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).result("s.1"), SOON)

    assert isinstance(parked.outcome, Waiting)
    assert [call.call_id for call in parked.outcome.calls] == ["s.1.1.1"]
    assert outputs(result.messages) == ["Output of the cell:\nasking\n1 shot the moon\n2"]
    assert count.made == [1, 2]
    assert result.outcome == Finished("done")


async def test_rejected_call_in_the_middle_of_a_cell_raises_at_its_line(place: Place) -> None:
    @tool(approval="ask")
    async def shoot() -> str:
        """Shoot."""
        return "shot"

    code = "try:\n    await shoot()\nexcept Exception as error:\n    print('no:', error)"
    async with place.runtime(coder(cell(code), "done", tools=[shoot])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.reject("s.1.1.0", "too loud")
        result = await asyncio.wait_for(session.result("s.1"), SOON)

    assert outputs(result.messages) == ["Output of the cell:\nno: too loud"]


async def test_cancel_drops_the_cell_and_its_variables(place: Place) -> None:
    entered = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        entered.set()
        await asyncio.Event().wait()
        return "never"

    agent = coder(cell("a = 1"), "one", cell("a = 2\nawait wait()"), cell("print(a)"), "three", tools=[wait])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        receipt = await session.send("two")
        await asyncio.wait_for(entered.wait(), SOON)
        await session.cancel("enough")
        cancelled = await receipt.result()
        result = await session.run("three")

    assert isinstance(cancelled.outcome, Cancelled)
    assert [type(call.outcome) for call in cancelled.tool_calls] == [OutcomeUnknown]
    assert "dropped" in outputs(cancelled.messages)[-1]
    assert outputs(cancelled.messages)[-1].endswith("\nWhether these were done is unknown: wait() 1x.")
    assert outputs(result.new_messages) == ["Output of the cell:\n1"]


async def test_sleep_parks_the_turn_and_it_goes_on_when_it_is_due_in_another_process(place: Place) -> None:
    count, clock = Counter(), VirtualClock()
    code = "await count(1)\nawait sleep(3600)\nprint('up', await count(2))"
    async with place.runtime(coder(cell(code), tools=[count.tool]), clock=clock, wait_for=0) as runtime:
        parked = await (await runtime.session("s")).run("go")
    async with place.runtime(coder("done", tools=[count.tool]), clock=clock) as runtime:
        clock.advance(3601)
        session = await runtime.session("s")
        await until(lambda: is_over(session))
        result = await session.result("s.1")

    assert isinstance(parked.outcome, Waiting)
    assert [(call.kind, call.call_id) for call in parked.outcome.calls] == [("sleep", "s.1.1.1")]
    assert outputs(result.messages) == ["Output of the cell:\nup 2"]
    assert count.made == [1, 2]


async def test_short_sleep_ends_in_memory(place: Place) -> None:
    async with place.runtime(coder(cell("await sleep(0.01)\nprint('up')"), "done", tools=[double])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert outputs(result.messages) == ["Output of the cell:\nup"]


# ---------------------------------------------------------------------- finish


async def test_finish_ends_the_turn_with_a_value_of_the_output_type(place: Place) -> None:
    @tool
    async def never() -> str:
        """Never."""
        raise AssertionError

    code = "total = 3\nfinish([total, 4])\nawait never()"
    agent = coder(cell(code), cell("print(total)"), "[1]", tools=[never], output=list[int])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        after = await session.run("and then")

    assert result.output == [3, 4]
    assert result.text == "[3,4]"
    assert outputs(after.new_messages) == ["Output of the cell:\n3"]
    assert after.output == [1]


async def test_finish_with_a_value_that_does_not_fit_raises_at_its_line(place: Place) -> None:
    code = "try:\n    finish('words')\nexcept Exception as error:\n    print('misfit')\nfinish([1, 2])"
    async with place.runtime(coder(cell(code), tools=[double], output=list[int])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.output == [1, 2]
    assert outputs(result.messages) == ["Output of the cell:\nmisfit"]


async def test_finish_cancels_calls_in_flight_and_records_them(place: Place) -> None:
    entered = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        entered.set()
        await asyncio.Event().wait()
        return "never"

    @tool
    async def ready() -> str:
        """Ready."""
        await entered.wait()
        return "ready"

    code = "import asyncio\nasync def end():\n    finish(await ready())\nawait asyncio.gather(wait(), end())"
    async with place.runtime(coder(cell(code), tools=[wait, ready])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.text == "ready"
    assert [(call.tool, type(call.outcome)) for call in result.tool_calls] == [
        ("wait", OutcomeUnknown),
        ("ready", Ok),
        ("finish", Ok),
    ]


# ---------------------------------------------------------------------- limits


async def test_calls_beyond_the_budget_end_the_turn_and_are_not_made(place: Place) -> None:
    count = Counter()
    agent = coder(cell("for n in range(9):\n    await count(n)"), tools=[count.tool], budget=Budget(calls=3))
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == BudgetSpent("calls", 3)
    assert count.made == [0, 1, 2]


async def test_cells_that_fail_are_no_progress(place: Place) -> None:
    answers = [cell("1 / 0")] * 5
    async with place.runtime(coder(*answers, tools=[double], budget=Budget(no_progress=3))) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == BudgetSpent("no_progress", 3)


# ---------------------------------------------------------------------- protocol


async def test_what_follows_a_cell_is_not_run_and_not_shown_to_the_model_again(place: Place) -> None:
    seen: list[Any] = []
    made_up = f"{cell('print(1)')}\nOutput: 2\n{cell('print(3)')}"
    async with place.runtime(coder(made_up, "done", seen=seen, tools=[double])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert outputs(result.messages) == ["Output of the cell:\n1"]
    shown = next(message.text for message in seen[1] if message.role == "assistant")
    assert "Output: 2" not in shown
    assert "dropped" in shown


async def test_half_a_fence_is_never_run_and_the_model_is_told(place: Place) -> None:
    count = Counter()
    agent = coder("```python\nawait count(1)", cell("await count(2)"), "done", tools=[count.tool])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert count.made == [2]
    assert result.outcome == Finished("done")


async def test_half_fences_without_end_end_the_turn(place: Place) -> None:
    async with place.runtime(coder(*["```python\nprint(1)"] * 3, tools=[double])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, Incomplete)


async def test_session_goes_on_after_its_agent_changed_to_code_and_back(place: Place) -> None:
    seen: list[Any] = []
    native = [[ToolCall("p", "double", {"n": 4})], "eight"]
    async with place.runtime(Agent(ScriptedModel(native), name="coder", tools=[double])) as runtime:
        await (await runtime.session("s")).run("first")
    async with place.runtime(coder(cell("print(await double(5))"), "ten", seen=seen, tools=[double])) as runtime:
        await (await runtime.session("s")).run("second")
    last = ScriptedModel([[ToolCall("q", "double", {"n": 6})], "twelve"])
    async with place.runtime(Agent(last, name="coder", tools=[double])) as runtime:
        session = await runtime.session("s")
        result = await session.run("third")
        history = await session.history()

    assert not any(isinstance(part, ToolCall | ToolResult) for message in seen[0] for part in message.parts)
    assert any("[called double(" in message.text for message in seen[0])
    assert result.outcome == Finished("twelve")
    assert [m.text for m in history if m.role == "user"] == ["first", "second", "Output of the cell:\n10", "third"]
    assert all(isinstance(part, Text) for part in history[5].parts)


async def test_cell_of_an_agent_that_runs_no_code_any_more_ends_and_the_turn_goes_on(place: Place) -> None:
    @tool(approval="ask")
    async def shoot() -> str:
        """Shoot."""
        return "shot"

    async with place.runtime(coder(cell("await shoot()"), tools=[shoot])) as runtime:
        await (await runtime.session("s")).run("go")
    async with place.runtime(Agent(ScriptedModel(["done"]), name="coder", tools=[shoot])) as runtime:
        session = await runtime.session("s")
        await session.approve("s.1.1.0")
        result = await asyncio.wait_for(session.result("s.1"), SOON)

    assert result.outcome == Finished("done")
    assert "not run" in outputs(result.messages)[0]


def test_call_that_is_recorded_as_another_shows_both() -> None:
    recorded = Cell(1, "1", "await pay(1)", 0, calls=[ToolCall("", "pay", {"n": 1})])

    with pytest.raises(CellDiverged) as error:
        Dialogue(recorded).asked([CodeCall(0, "pay", {"n": 2}, line=1)])

    assert str(error.value) == ('Line 1 calls pay({"n":2}), and call 0 of this cell is recorded as pay({"n":1}).')


@pytest.mark.parametrize("name", ["finish", "sleep", "settle"])
def test_tool_that_hides_a_function_of_cells_is_refused(name: str) -> None:
    @tool(name=name)
    async def hides(ctx: ToolContext[Any]) -> None:
        """Hide."""

    with pytest.raises(InvalidDefinition, match=name):
        coder(tools=[hides])
