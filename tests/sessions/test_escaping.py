"""Code of others that raises what ends a coroutine or a program, or cancels the task it runs in: it alone ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perdure import Agent, Plugin, ProcessContext, ToolCall, ToolContext, process, tool
from perdure.errors import ProcessFailed
from perdure.model.llm import Delta, ModelRequest, ModelResponse
from perdure.model.outcome import Finished, PluginAborted, ProviderFailed
from perdure.model.tool import Failed
from perdure.plugins.hooks import CompactContext, TurnContext
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def exit_generator() -> None:
    await asyncio.sleep(0)
    raise GeneratorExit


async def interrupt() -> None:
    raise KeyboardInterrupt("enough")


WAYS = {"GeneratorExit": exit_generator, "KeyboardInterrupt": interrupt, "CancelledError": cancel_itself}
ways = pytest.mark.parametrize("way", WAYS)


class Leaving:
    """A provider that goes in one of these ways, after some text; the next time it answers."""

    name = "leaving"

    def __init__(self, way: str, text: str = "") -> None:
        self.way, self.text, self.asked = way, text, 0

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        self.asked += 1
        if self.asked == 1:
            if self.text:
                yield self.text
            await WAYS[self.way]()
        yield ModelResponse("still here")


@ways
@pytest.mark.parametrize("text", ["", "so far"])
async def test_a_provider_that_goes_ends_its_turn_and_the_session_goes_on(place: Place, way: str, text: str) -> None:
    async with place.runtime(Agent(Leaving(way, text))) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        result = await session.run("go")

        assert isinstance(result.outcome, ProviderFailed)
        assert result.outcome.code == "provider_raised"
        assert way in result.outcome.message
        assert (await session.run("and now?")).text == "still here"


async def test_a_provider_that_cancels_its_task_and_answers_nevertheless_has_answered(place: Place) -> None:
    class Swallowing:
        name = "swallowing"

        async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
            with contextlib.suppress(asyncio.CancelledError):
                await cancel_itself()
            yield ModelResponse("still here")

    async with place.runtime(Agent(Swallowing())) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")

        assert (await session.run("go")).outcome == Finished("still here")
        assert (await session.run("and now?")).outcome == Finished("still here")


@ways
async def test_a_tool_that_goes_fails(place: Place, way: str) -> None:
    @tool
    async def leave(ctx: ToolContext[Any]) -> None:
        """Leave."""
        await WAYS[way]()

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "leave")], "done"]), tools=[leave])) as runtime:
        async with asyncio.timeout(SOON):
            result = await (await runtime.session("s")).run("go")

        assert result.text == "done"
        assert isinstance(result.tool_calls[0].outcome, Failed)
        assert way in result.tool_calls[0].outcome.message


@ways
async def test_a_hook_that_goes_is_a_fault_of_its_plugin(place: Place, way: str) -> None:
    class Leaver(Plugin):
        id = "leaver"

        async def before_turn(self, ctx: TurnContext) -> None:
            if "go" in ctx.said.text:
                await WAYS[way]()

    async with place.runtime(Agent(FunctionModel(lambda _: "done"), plugins=[Leaver()])) as runtime:
        session = await runtime.session("s")
        async with asyncio.timeout(SOON):
            result = await session.run("go")

            assert isinstance(result.outcome, PluginAborted)
            assert (await session.run("and now?")).text == "done"


@ways
async def test_a_direct_completion_whose_provider_goes_fails(place: Place, way: str) -> None:
    class Asker(Plugin):
        id = "asker"

        async def compact(self, ctx: CompactContext) -> None:
            await ctx.host.complete("what?", label="ask")

    async with place.runtime(Agent(Leaving(way), plugins=[Asker()])) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")

        assert isinstance((await session.run("go")).outcome, PluginAborted)
        assert (await session.run("and now?")).text == "still here"


@ways
async def test_a_durable_function_that_goes_has_failed(place: Place, way: str) -> None:
    @process
    async def leave(ctx: ProcessContext) -> None:
        if way == "CancelledError":
            raise asyncio.CancelledError
        await WAYS[way]()

    async with place.runtime(processes=[leave]) as runtime, asyncio.timeout(SOON):
        with pytest.raises(ProcessFailed, match=way):
            await (await runtime.start(leave)).result()


@ways
async def test_a_step_that_goes_has_failed(place: Place, way: str) -> None:
    async def leave() -> None:
        await WAYS[way]()

    @process
    async def steps(ctx: ProcessContext) -> None:
        await ctx.step(leave)

    async with place.runtime(processes=[steps]) as runtime, asyncio.timeout(SOON):
        with pytest.raises(ProcessFailed, match=way):
            await (await runtime.start(steps)).result()
