"""The tool run_code: cells of a model that calls tools by the means of its provider."""

import asyncio
from typing import Any

import pytest

from perdure import Agent, Budget, Plugin, ToolContext, tool
from perdure.codemode import run_code
from perdure.errors import AlreadyAnswered, InvalidDefinition, UnknownCall
from perdure.model.message import ToolCall, ToolResult
from perdure.model.outcome import BudgetSpent, Finished, Waiting
from perdure.model.tool import Cancelled, Failed, Ok, OutcomeUnknown
from perdure.plugins.hooks import ToolCallContext
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, crashed_in
from tests.tools.coding import CODE, cell
from tests.turn.protocols import Planning


@tool
async def double(n: int) -> int:
    """Twice as much."""
    return 2 * n


@tool(approval="ask")
async def sign(what: str) -> str:
    """Sign."""
    return f"signed {what}"


def code(text: str, id: str = "c") -> ToolCall:
    return ToolCall(id, "run_code", {"code": text})


def caller(*answers: Any, seen: list[Any] | None = None, tools: Any = (double, sign), **options: Any) -> Agent[Any]:
    """An agent with run_code that gives these answers in order. `seen` is filled with the requests."""
    given, requests = iter(answers), [] if seen is None else seen

    def answer(request: Any) -> Any:
        requests.append(request)
        return next(given)

    options.setdefault("code", CODE)
    return Agent(FunctionModel(answer), name="caller", tools=[*tools, run_code], **options)


def results(result: Any) -> list[Any]:
    """What the model was given for its calls."""
    return [part.content for message in result.new_messages for part in message.parts if isinstance(part, ToolResult)]


async def test_code_calls_tools_and_its_output_is_the_result(place: Place) -> None:
    seen: list[Any] = []
    agent = caller([code("x = await double(21)\nprint('x is', x)\nx + 1")], "It is 42.", seen=seen)
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == Finished("It is 42.")
    assert results(result) == [{"output": "x is 42\n43"}]
    assert [(call.call_id, call.tool, call.outcome) for call in result.tool_calls] == [
        ("s.1.1.0", "run_code", Ok({"output": "x is 42\n43"})),
        ("s.1.1.0.0", "double", Ok(42)),
    ]
    assert "async def double(n: int)" in seen[0].messages[0].text
    assert "async def run_code" not in seen[0].messages[0].text
    assert {spec.name for spec in seen[0].tools} == {"double", "sign", "run_code"}


async def test_two_in_one_reply_run_one_after_the_other_and_after_the_other_calls(place: Place) -> None:
    order: list[str] = []

    @tool
    async def note(what: str) -> str:
        """Note."""
        order.append(f"begin {what}")
        await asyncio.sleep(0)
        order.append(f"end {what}")
        return what

    calls = [
        code("a = await note('first')", "c1"),
        ToolCall("n", "note", {"what": "plain"}),
        code("print(a, await note('second'))", "c2"),
    ]
    async with place.runtime(caller(calls, "done", tools=[note])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert order == ["begin plain", "end plain", "begin first", "end first", "begin second", "end second"]
    assert results(result) == [{"output": ""}, "plain", {"output": "first second"}]
    assert [call.call_id for call in result.tool_calls] == [
        "s.1.1.0", "s.1.1.0.0", "s.1.1.1", "s.1.1.2", "s.1.1.2.0",
    ]  # fmt: skip


async def test_variables_are_those_of_the_session_in_either_mode(place: Place) -> None:
    async with place.runtime(caller([code("a = await double(2)")], "one")) as runtime:
        await (await runtime.session("s")).run("go")
    answers = iter([cell("b = a + 1"), "two"])
    coder = Agent(FunctionModel(lambda request: next(answers)), name="caller", tools=[double], mode="code")
    async with place.runtime(coder) as runtime:
        await (await runtime.session("s")).run("go")
    async with place.runtime(caller([code("print(a, b)")], "three")) as runtime:
        session = await runtime.session("s")
        branch = await session.fork(at="s.2")
        result = await branch.run("go")

    assert results(result) == [{"output": "4 5"}]


async def test_approval_in_the_middle_of_the_code_parks_it_and_it_goes_on_there(place: Place) -> None:
    made: list[int] = []

    @tool
    async def count(n: int) -> int:
        """Count."""
        made.append(n)
        return n

    text = "a = await count(1)\nb = await sign('it')\nprint(a, b, await count(2))"
    async with place.runtime(caller([code(text)], tools=[count, sign])) as runtime:
        parked = await (await runtime.session("s")).run("go")
    async with place.runtime() as runtime:
        session = await runtime.session("s", agent="caller")
        asked = await session.pending()
        await session.approve("s.1.1.0.1", by="operator")
        with pytest.raises(AlreadyAnswered):
            await session.approve("s.1.1.0.1")
    async with place.runtime(caller("done", tools=[count, sign])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).result("s.1"), SOON)

    assert isinstance(parked.outcome, Waiting)
    assert [(call.call_id, call.tool) for call in asked] == [("s.1.1.0.1", "sign")]
    assert results(result) == [{"output": "1 signed it 2"}]
    assert made == [1, 2]


@pytest.mark.parametrize("name", ["s", "s.1"])
async def test_verbs_take_the_ids_of_its_calls(place: Place, name: str) -> None:
    """Also in a session whose id ends in a number: four numbers are then no call of another one."""
    text = "try:\n    await sign('it')\nexcept Exception as error:\n    print('no:', error)"
    async with place.runtime(caller([code(text)], "one", [code(text)], "two")) as runtime:
        for each in ("s", "s.1"):
            await runtime.session(each)
        session = await runtime.session(name)
        await session.run("go")
        with pytest.raises(UnknownCall):
            await session.approve(f"{name}.1.1.0.7")
        with pytest.raises(UnknownCall):
            await session.approve(f"{name}.1.1.0.0.0")
        await session.reject(f"{name}.1.1.0.0", "too late")
        rejected = await asyncio.wait_for(session.result(f"{name}.1"), SOON)
        receipt = await session.send("again")
        await asyncio.wait_for(receipt.result(), SOON)
        assert await session.cancel_waits("enough") == [f"{name}.2.1.0.0"]
        taken_back = await asyncio.wait_for(session.result(f"{name}.2"), SOON)

    assert results(rejected) == [{"output": "no: too late"}]
    assert results(taken_back) == [{"output": "no: cancelled: enough"}]


async def test_completion_from_outside_reaches_a_call_of_the_code(place: Place) -> None:
    keys: list[str] = []

    @tool(deferred=True)
    async def outside(ctx: ToolContext[Any]) -> None:
        """Outside."""
        keys.append(ctx.defer())

    async with place.runtime(caller([code("print(await outside())")], "done", tools=[outside])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await runtime.resolve(keys[0], "from outside")
        result = await asyncio.wait_for(session.result("s.1"), SOON)

    assert results(result) == [{"output": "from outside"}]


async def paid_once(place: Place, recovery: Any) -> None:
    """A turn whose code was killed in its second call."""
    entered = asyncio.Event()

    @tool(recovery=recovery)
    async def pay(n: int) -> int:
        """Pay."""
        if n == 2:
            entered.set()
            await asyncio.Event().wait()
        return n

    text = "a = await pay(1)\nb = await pay(2)\nprint(a, b)"
    await crashed_in(place.runtime(caller([code(text)], tools=[pay])), entered)


def paying(recovery: Any, made: list[int]) -> Any:
    @tool(recovery=recovery)
    async def pay(n: int) -> int:
        """Pay."""
        made.append(n)
        return n

    return pay


async def test_killed_code_goes_on_in_its_middle(place: Place) -> None:
    made: list[int] = []
    await paid_once(place, "rerun")
    async with place.runtime(caller("done", tools=[paying("rerun", made)])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).result("s.1"), SOON)

    assert made == [2]
    assert results(result) == [{"output": "1 2"}]
    assert [(call.call_id, call.repeated) for call in result.tool_calls] == [
        ("s.1.1.0", 0), ("s.1.1.0.0", 0), ("s.1.1.0.1", 1),
    ]  # fmt: skip


async def test_person_settles_a_call_of_killed_code(place: Place) -> None:
    made: list[int] = []
    await paid_once(place, "ask")
    async with place.runtime(caller("done", tools=[paying("ask", made)])) as runtime:
        session = await runtime.session("s")
        await asyncio.wait_for(session.result("s.1"), SOON)
        await session.settle("s.1.1.0.1", "done", value=7)
        result = await asyncio.wait_for(session.result("s.1"), SOON)

    assert (made, results(result)) == ([], [{"output": "1 7"}])


async def test_call_that_ended_unknown_is_settled_afterwards(place: Place) -> None:
    await paid_once(place, "once")
    async with place.runtime(caller("I stop.", "I see.", tools=[paying("once", [])])) as runtime:
        session = await runtime.session("s")
        result = await asyncio.wait_for(session.result("s.1"), SOON)
        await session.settle("s.1.1.0.1", "done", value=7)
        after = await session.run("and?")

    assert isinstance(result.tool_calls[2].outcome, OutcomeUnknown)
    assert "s.1.1.0.1" in "\n".join(message.text for message in after.new_messages)


async def test_killed_with_one_of_two_run_the_first_is_not_run_again(place: Place) -> None:
    made, entered = list[str](), asyncio.Event()

    def noting(held: bool) -> Any:
        @tool(recovery="rerun")
        async def note(what: str) -> str:
            """Note."""
            made.append(what)
            if held and what == "second":
                entered.set()
                await asyncio.Event().wait()
            return what

        return note

    calls = [code("a = await note('first')\nprint(a)", "c1"), code("print(a, await note('second'))", "c2")]
    await crashed_in(place.runtime(caller(calls, tools=[noting(True)])), entered)
    async with place.runtime(caller("done", tools=[noting(False)])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).result("s.1"), SOON)

    assert made == ["first", "second", "second"]
    assert results(result) == [{"output": "first"}, {"output": "first second"}]


async def test_cancel_drops_the_code_that_runs_and_what_stands_behind_it(place: Place) -> None:
    entered = asyncio.Event()

    @tool
    async def wait() -> None:
        """Wait."""
        entered.set()
        await asyncio.Event().wait()

    calls = [code("a = 1", "c0"), code("a = 2\nawait wait()", "c1"), code("a = 3", "c2")]
    async with place.runtime(caller(calls, [code("print(a)")], "done", tools=[wait])) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await asyncio.wait_for(entered.wait(), SOON)
        await session.cancel("enough")
        cancelled = await asyncio.wait_for(receipt.result(), SOON)
        result = await session.run("and then")

    assert isinstance(cancelled.outcome, Cancelled)
    assert [(call.call_id, type(call.outcome)) for call in cancelled.tool_calls] == [
        ("s.1.1.0", Ok), ("s.1.1.1", Failed), ("s.1.1.1.0", OutcomeUnknown), ("s.1.1.2", Cancelled),
    ]  # fmt: skip
    assert results(result) == [{"output": "1"}]


async def test_error_comes_back_with_what_was_printed_before_it(place: Place) -> None:
    async with place.runtime(caller([code("a = 1\nprint('so far')\na / 0")], "done")) as runtime:
        result = await (await runtime.session("s")).run("go")

    (told,) = results(result)
    assert told["error"] == "code_raised"
    assert told["message"].startswith("so far\n\n")
    assert "ZeroDivisionError" in told["message"]


async def test_finish_answers_the_call_and_not_the_turn(place: Place) -> None:
    agent = caller([code("finish([1, 2])\nawait double(3)")], '{"n": 3}', output=dict[str, int])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert results(result) == [{"output": "", "answer": "[1,2]"}]
    assert result.output == {"n": 3}
    assert [call.tool for call in result.tool_calls] == ["run_code", "finish"]


async def test_plugins_are_asked_about_its_calls(place: Place) -> None:
    asked: list[str] = []

    class Guard(Plugin):
        id = "guard"

        def before_tool_call(self, ctx: ToolCallContext) -> Any:
            asked.append(f"{ctx.call_id} {ctx.tool.name}")

    async with place.runtime(caller([code("await double(1)")], "done", plugins=[Guard()])) as runtime:
        await (await runtime.session("s")).run("go")

    assert asked == ["s.1.1.0.0 double"]


async def test_its_calls_are_within_the_budget(place: Place) -> None:
    text = "for n in range(9):\n    await double(n)"
    async with place.runtime(caller([code(text)], budget=Budget(calls=3))) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == BudgetSpent("calls", 3)
    assert [type(call.outcome) for call in result.tool_calls] == [Failed, Ok, Ok]


@pytest.mark.parametrize(
    ("args", "says"), [({}, "code"), ({"code": 7}, "code"), ({"code": "1", "more": 2}, "more")], ids=repr
)
async def test_arguments_that_do_not_fit_are_told_to_the_model(place: Place, args: Any, says: str) -> None:
    call = ToolCall("c", "run_code", args)
    async with place.runtime(caller([call], "done")) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert results(result)[0]["error"] == "invalid_tool_args"
    assert says in results(result)[0]["message"]


async def test_code_cannot_run_code(place: Place) -> None:
    async with place.runtime(caller([code("await run_code('1')")], "done")) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert results(result)[0]["error"] == "code_check"


async def test_code_of_an_agent_that_has_the_tool_no_more_ends_and_the_turn_goes_on(place: Place) -> None:
    async with place.runtime(caller([code("await sign('it')")])) as runtime:
        await (await runtime.session("s")).run("go")
    without = Agent(FunctionModel(lambda request: "done"), name="caller", tools=[sign])
    async with place.runtime(without) as runtime:
        session = await runtime.session("s")
        await session.approve("s.1.1.0.0")
        result = await asyncio.wait_for(session.result("s.1"), SOON)

    assert result.outcome == Finished("done")
    assert results(result)[0]["error"] == "code_unavailable"


async def test_protocol_of_a_plugin_may_have_it(place: Place) -> None:
    plan = '{"calls": [{"tool": "run_code", "args": {"code": "print(await double(4))"}}]}'
    async with place.runtime(caller(plan, '{"answer": "8"}', plugins=[Planning()])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert results(result) == [{"output": "8"}]


async def test_another_tool_of_that_name_is_a_tool(place: Place) -> None:
    @tool(name="run_code")
    async def own(code: str) -> str:
        """My own."""
        return f"ran {code}"

    answers = iter([[code("1")], "done"])
    agent = Agent(FunctionModel(lambda request: next(answers)), name="caller", tools=[own])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert results(result) == ["ran 1"]


def test_it_is_refused_in_code_mode_and_beside_tools_that_cannot_be_functions() -> None:
    @tool(name="finish")
    async def hides() -> None:
        """Hide."""

    with pytest.raises(InvalidDefinition, match="run_code is a tool of mode='tools'"):
        caller(mode="code")
    with pytest.raises(InvalidDefinition, match="finish"):
        caller(tools=[hides])
