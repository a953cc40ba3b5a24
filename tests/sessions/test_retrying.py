"""`session.retry()`: the last turn, which ended without an answer, is continued."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, Budget, Limit, ModelRequest, ModelResponse, Plugin, Runtime, ToolCall, Usage, tool
from perdure.errors import CannotRetry, ProviderError
from perdure.model.outcome import (
    BudgetSpent,
    Finished,
    Incomplete,
    LimitReached,
    ProviderFailed,
)
from perdure.model.tool import Failed, Ok
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, TellingModel, crash, results, texts

REFUSED = ProviderError("no such key", code="unauthorized")


def call(number: int = 1, name: str = "pay") -> list[ToolCall]:
    return [ToolCall(f"c{number}", name, {"number": number})]


async def test_a_failed_turn_is_continued_with_all_that_it_did(place: Place) -> None:
    paid = list[int]()

    @tool
    def pay(number: int) -> str:
        paid.append(number)
        return f"paid {number}"

    model = ScriptedModel([call(1), call(2), REFUSED, call(3), "done"])
    async with place.runtime(Agent(model, tools=[pay])) as runtime:
        session = await runtime.session("s")
        failed = await session.run("go", key="k")
        assert isinstance(failed.outcome, ProviderFailed)
        result = await asyncio.wait_for(session.retry(), SOON)

        assert result.outcome == Finished("done")
        assert result.turn_id == failed.turn_id
        assert paid == [1, 2, 3]
        assert [each.outcome for each in result.tool_calls] == [Ok("paid 1"), Ok("paid 2"), Ok("paid 3")]
        assert [each.content for each in results(model.requests[3])] == ["paid 1", "paid 2"]
        assert texts(await session.history())[0] == "go"
        assert len(await session.history()) == 8
        assert (await session.run("go", key="k")).outcome == Finished("done")
        assert (await session.result("s.1")).messages == result.messages

    async with place.runtime(Agent(ScriptedModel(["next"]), tools=[pay])) as runtime:
        session = await runtime.session("s")
        again = await session.result("s.1")
        assert (again.outcome, again.usage, again.messages) == (result.outcome, result.usage, result.messages)
        assert (await session.run("and now?")).text == "next"


async def test_a_turn_that_fails_again_is_continued_again(place: Place) -> None:
    model = ScriptedModel([REFUSED, REFUSED, "at last"])
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        assert isinstance((await session.retry()).outcome, ProviderFailed)
        assert (await session.retry("s.1")).text == "at last"


async def test_two_callers_at_once_continue_a_turn_once(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("s")
        model.say(REFUSED)
        await session.run("go")
        retries = [asyncio.create_task(session.retry()) for _ in range(3)]
        await model.next()
        await model.next()
        model.say("once")
        answers = await asyncio.wait_for(asyncio.gather(*retries), SOON)

    assert [each.text for each in answers] == ["once"] * 3
    assert model.asked.empty()


async def test_caller_that_read_the_session_before_another_continued_the_turn_joins_that_one(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("s")
        model.say(REFUSED)
        await session.run("go")
        await model.next()
        read_before = await runtime.store.session("s")
        assert read_before is not None
        retrying = asyncio.create_task(session.retry())
        await model.next()
        await session._parts.requests.reopen(read_before, 1, "late")
        model.say("once")

        assert (await asyncio.wait_for(retrying, SOON)).text == "once"
        assert (await session.result("s.1")).text == "once"

    assert model.asked.empty()


async def test_a_crash_after_the_turn_was_continued_loses_nothing(place: Place) -> None:
    model = TellingModel()
    runtime = await place.runtime(Agent(model)).__aenter__()
    session = await runtime.session("s")
    model.say(REFUSED)
    await session.run("go")
    await model.next()
    retrying = asyncio.create_task(session.retry())
    await model.next()
    await crash(runtime)
    retrying.cancel()
    await asyncio.gather(retrying, return_exceptions=True)

    async with place.runtime(Agent(ScriptedModel(["recovered"]))) as second:
        result = await asyncio.wait_for((await second.session("s")).result("s.1"), SOON)
        assert result.text == "recovered"
        assert texts(await (await second.session("s")).history()) == ["go", "recovered"]


async def test_bounds_count_from_zero_again(place: Place) -> None:
    @tool
    def pay(number: int) -> str:
        return "paid"

    model = ScriptedModel([call(1), call(2), call(3), call(4), "done"])
    async with place.runtime(Agent(model, tools=[pay], budget=Budget(steps=2))) as runtime:
        session = await runtime.session("s")
        assert (await session.run("go")).outcome == BudgetSpent("steps", 2)
        result = await session.retry()

    assert result.text == "done"


async def test_usage_is_counted_once(place: Place) -> None:
    usage = Usage(input=10, output=5)

    def response(number: int) -> ModelResponse:
        return ModelResponse("", tuple(call(number)), usage)

    @tool
    def pay(number: int) -> str:
        return "paid"

    model = ScriptedModel([response(1), REFUSED, response(2), ModelResponse("done", (), usage)])
    async with place.runtime(Agent(model, tools=[pay])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        result = await session.retry()
        [group] = await runtime.usage("agent")

        assert (result.usage.input, result.usage.output, result.usage.calls) == (30, 15, 3)
        assert (group.usage.input, group.usage.calls) == (30, 3)
        assert (await session.usage())["turns"].input == 30


async def test_an_answer_that_was_cut_off_is_gone_on_with(place: Place) -> None:
    model = ScriptedModel([ModelResponse("Once upon", stop="length"), "a time"])
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("s")
        assert isinstance((await session.run("tell")).outcome, Incomplete)
        result = await session.retry()

    assert result.text == "a time"
    assert texts(model.requests[1].messages) == ["tell", "Once upon", "Go on where you were stopped."]


async def test_no_hook_of_a_recorded_step_runs_again(place: Place) -> None:
    ran = list[str]()

    class Watching(Plugin):
        id = "watching"

        async def before_turn(self, ctx: Any) -> None:
            ran.append("before_turn")

        async def before_tool_call(self, ctx: Any) -> None:
            ran.append("before_tool")

    @tool
    def pay(number: int) -> str:
        return "paid"

    model = ScriptedModel([call(1), REFUSED, "done"])
    async with place.runtime(Agent(model, tools=[pay], plugins=[Watching()])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        before = list(ran)
        assert (await session.retry()).text == "done"

    assert before == ran


async def test_a_turn_whose_deps_failed_begins_at_its_opening(place: Place) -> None:
    down = [True]

    async def deps(caller: Any) -> str:
        if down[0]:
            raise OSError("the bank is closed")
        return "open"

    async with place.runtime(Agent(ScriptedModel(["served"])), deps=deps) as runtime:
        session = await runtime.session("s")
        assert isinstance((await session.run("go")).outcome, Failed)
        assert isinstance((await session.retry()).outcome, Failed)
        down[0] = False
        assert (await session.retry()).text == "served"


async def test_a_turn_that_a_limit_stopped_is_continued_when_that_is_raised(place: Place) -> None:
    def model() -> FunctionModel:
        def answer(request: ModelRequest) -> ModelResponse:
            return ModelResponse("fine", (), Usage(input=10, output=5))

        return FunctionModel(answer)

    async with place.runtime(Agent(model()), limits=[Limit(tokens=1)]) as runtime:
        session = await runtime.session("s")
        assert isinstance((await session.run("go")).outcome, LimitReached)
        assert await session.resume() is False
    async with place.runtime(Agent(model())) as runtime:
        result = await (await runtime.session("s")).retry()

        assert result.text == "fine"
        assert texts(await (await runtime.session("s")).history()) == ["go", "fine"]


async def test_a_turn_with_an_answer_or_a_later_turn_is_not_continued(place: Place) -> None:
    model = ScriptedModel(["fine", REFUSED, "later"])
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("s")
        with pytest.raises(CannotRetry, match="nothing was ever said"):
            await _retry_of_nothing(runtime)
        await session.run("one")
        with pytest.raises(CannotRetry, match="it has an answer: say something new"):
            await session.retry()
        await session.run("two")
        await session.run("three")
        with pytest.raises(CannotRetry, match="a later turn was begun"):
            await session.retry("s.2")


async def _retry_of_nothing(runtime: Runtime) -> None:
    session = await runtime.session("empty")
    await session.update(title="nothing yet")
    await session.retry()


async def test_a_cancelled_turn_is_not_continued(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await model.next()
        await session.cancel("enough")
        await receipt.result()
        with pytest.raises(CannotRetry, match="it ended as cancelled"):
            await session.retry()


async def test_a_fork_of_a_turn_that_is_continued_keeps_what_it_shared(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("s")
        model.say(REFUSED)
        await session.run("go")
        await model.next()
        fork = await session.fork(session_id="fork")
        retrying = asyncio.create_task(session.retry())
        await model.next()
        assert texts(await fork.history()) == ["go"]
        model.say("done")
        await retrying
    async with place.runtime(Agent(ScriptedModel(["forked"]))) as runtime:
        fork = await runtime.session("fork")
        assert texts(await fork.history()) == ["go"]
        assert (await fork.run("on")).text == "forked"
