"""Plugins and a model's answer: text on its way to people, whole answers, and how a model call ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, ModelRequest, ToolCall, tool
from perdure.model.event import Retracted, TextDelta
from perdure.model.llm import ModelResponse
from perdure.model.message import Text
from perdure.model.outcome import Finished, PluginAborted, ProviderFailed
from perdure.model.tool import Cancelled, Ok
from perdure.plugins.hooks import Plugin, StopStream, StreamContext
from perdure.testing import FunctionModel, VirtualClock
from tests.kit import SOON, Place, TellingModel, overloaded
from tests.plugins.made import having


async def watched(place: Place, agent: Agent[Any]) -> tuple[Any, str, list[str]]:
    """A turn's result, the text that was shown live, and the assistant's texts as another process reads them."""
    async with place.runtime(agent) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        async with session.stream("go") as turn:
            live = [event.text async for event in turn if isinstance(event, TextDelta)]
            result = await turn.result()
    async with place.runtime() as runtime:
        history = await (await runtime.session("s")).history()
    return result, "".join(live), [m.text for m in history if m.role == "assistant"]


async def words(request: ModelRequest) -> AsyncIterator[str]:
    for word in ("my ", "key ", "is ", "1234"):
        yield word


def shouting(ctx: StreamContext, text: str) -> str:
    return text.upper()


def dotted(ctx: StreamContext, text: str) -> str:
    return text if ctx.final else text.replace(" ", ".")


async def test_text_passes_all_plugins_in_order(place: Place) -> None:
    plugins = [
        having("transform_text", shouting, "a"),
        having("transform_text", lambda ctx, text: text.replace("KEY", "***"), "b"),
        having("transform_text", dotted, "c"),
    ]
    result, live, stored = await watched(place, Agent(FunctionModel(words), plugins=plugins))

    assert result.outcome == Finished("MY.***.IS.1234")
    assert live == "MY.***.IS.1234"
    assert stored == ["MY.***.IS.1234"]


async def test_text_that_is_held_back_is_given_out_at_the_end(place: Place) -> None:
    class Holding(Plugin):
        """Shows a word only when the next one is there, and the last one without its digits."""

        id = "holding"
        held = ""

        def transform_text(self, ctx: StreamContext, text: str) -> str:
            if ctx.final:
                return self.held.replace("1234", "****")
            self.held, shown = text, self.held
            return shown

    result, live, stored = await watched(place, Agent(FunctionModel(words), plugins=[Holding()]))

    assert (result.text, live, stored) == ("my key is ****", "my key is ****", ["my key is ****"])


async def test_stopped_stream_closes_the_provider_and_the_turn_goes_on_with_the_text_so_far(place: Place) -> None:
    said, closed, reasons = list[str](), list[str](), list[str]()

    async def endless(request: ModelRequest) -> AsyncIterator[str]:
        try:
            while True:
                said.append("blah ")
                yield "blah "
        finally:
            closed.append("closed")

    class Enough(Plugin):
        id = "enough"

        def transform_text(self, ctx: StreamContext, text: str) -> Any:
            return StopStream("enough", "it repeats itself") if len(said) == 3 and not ctx.final else text

        def stream_finished(self, ctx: StreamContext, reason: str) -> None:
            reasons.append(reason)

    plugins = [Enough(), having("transform_text", shouting, "after")]
    result, live, stored = await watched(place, Agent(FunctionModel(endless), plugins=plugins))

    assert result.outcome == Finished("BLAH BLAH ENOUGH")
    assert (live, stored) == ("BLAH BLAH ENOUGH", ["BLAH BLAH ENOUGH"])
    assert (len(said), closed, reasons) == (3, ["closed"], ["aborted"])


async def test_answer_that_was_not_streamed_passes_the_plugins_too(place: Place) -> None:
    async def whole(request: ModelRequest) -> AsyncIterator[Any]:
        yield ModelResponse("all at once")

    agent = Agent(FunctionModel(whole), plugins=[having("transform_text", shouting)])
    result, live, stored = await watched(place, agent)

    assert (result.text, live, stored) == ("ALL AT ONCE", "ALL AT ONCE", ["ALL AT ONCE"])


async def test_text_beside_calls_is_changed_and_the_calls_stay(place: Place) -> None:
    @tool
    async def add(n: int) -> int:
        """Add one."""
        return n + 1

    def model(request: ModelRequest) -> Any:
        if request.messages[-1].role == "tool":
            return "done"
        return ModelResponse(parts=(Text("one "), ToolCall("c", "add", {"n": 1}), Text("two")), stop="tool_calls")

    agent = Agent(FunctionModel(model), tools=[add], plugins=[having("transform_text", shouting)])
    result, _, stored = await watched(place, agent)

    assert [call.outcome for call in result.tool_calls] == [Ok(2)]
    assert stored[1] == "DONE"
    assert "".join(stored[0].split()) == "ONETWO"


async def test_whole_answers_pass_all_plugins_in_order(place: Place) -> None:
    async def louder(ctx: StreamContext, response: ModelResponse) -> ModelResponse:
        return replace(response, text=f"{response.text}!")

    plugins = [
        having("transform_response", louder, "a"),
        having("transform_response", lambda ctx, response: replace(response, text=f"({response.text})"), "b"),
    ]
    result, _, stored = await watched(place, Agent(FunctionModel(lambda request: "well"), plugins=plugins))

    assert (result.outcome, stored) == (Finished("(well!)"), ["(well!)"])


# ---------------------------------------------------------------------- how it ended


class Ends(Plugin):
    id = "ends"

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.told = asyncio.Event()

    async def stream_finished(self, ctx: StreamContext, reason: str) -> None:
        self.reasons.append(f"{ctx.step} {reason}")
        self.told.set()


async def test_reason_of_a_call_that_is_tried_again_and_then_complete(place: Place) -> None:
    ends, asked = Ends(), list[int]()

    def model(request: ModelRequest) -> Any:
        asked.append(request.attempt)
        if request.attempt < 3:
            raise overloaded()
        return "done"

    agent = Agent(FunctionModel(model), plugins=[ends])
    async with place.runtime(agent, clock=VirtualClock(auto=True)) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert (result.outcome, asked) == (Finished("done"), [1, 2, 3])
    assert ends.reasons == ["1 attempt_reset", "1 attempt_reset", "1 complete"]


async def test_reason_of_a_call_that_failed_for_good(place: Place) -> None:
    ends = Ends()

    def model(request: ModelRequest) -> Any:
        raise ValueError("no credit")

    async with place.runtime(Agent(FunctionModel(model), plugins=[ends])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, ProviderFailed)
    assert ends.reasons == ["1 provider_error"]


async def test_reason_of_a_call_that_was_cancelled(place: Place) -> None:
    ends, model = Ends(), TellingModel()
    async with place.runtime(Agent(model, plugins=[ends])) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await model.next()
        await session.cancel("enough")
        result = await receipt.result(SOON)

    assert result.outcome == Cancelled("host", "enough")
    assert ends.reasons == ["1 cancelled"]


async def test_reason_of_a_call_that_the_end_of_the_runtime_cut_off(place: Place) -> None:
    ends, model = Ends(), TellingModel()
    async with place.runtime(Agent(model, plugins=[ends]), grace=0) as runtime:
        await (await runtime.session("s")).send("go")
        await model.next()

    assert ends.reasons == ["1 cancelled"]


async def test_reason_of_a_call_that_another_plugin_aborted(place: Place) -> None:
    ends = Ends()

    def broken(ctx: StreamContext, text: str) -> str:
        raise ValueError("cannot read this")

    plugins = [having("transform_text", broken, "broken"), ends]
    async with place.runtime(Agent(FunctionModel(words), plugins=plugins)) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        async with session.stream("go") as turn:
            events = [event async for event in turn]
            result = await turn.result()

    assert result.outcome == PluginAborted(
        "broken", "plugin_output", "plugin 'broken': transform_text: ValueError: cannot read this"
    )
    assert [event.step for event in events if isinstance(event, Retracted)] == [1]
    assert ends.reasons == ["1 aborted"]


@pytest.mark.parametrize("hook", ["transform_response", "stream_finished"])
async def test_shown_text_is_taken_back_when_a_plugin_refuses_the_answer(place: Place, hook: str) -> None:
    async def refuse(*told: Any) -> Any:
        raise ValueError("not that")

    agent = Agent(FunctionModel(words), plugins=[having(hook, refuse)])
    async with place.runtime(agent) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        async with session.stream("go") as turn:
            events = [event async for event in turn]
            result = await turn.result()
        history = await session.history()

    assert isinstance(result.outcome, PluginAborted)
    assert [m.role for m in history] == ["user"]
    assert [event.step for event in events if isinstance(event, Retracted)] == [1]
