"""A plain function that gives a coroutine is a tool whose work is not over when its thread is."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from perdure import Agent, ToolCall, tool
from perdure.model.tool import Ok, OutcomeUnknown
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """As decorators do that do not know of coroutines."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


async def test_a_limit_is_held_until_the_coroutine_has_ended(place: Place) -> None:
    now, most = 0, 0

    @tool(limit=1)
    @wrapped
    async def work() -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)  # long enough for another thread to begin, if one were let
        now -= 1
        return "worked"

    model = ScriptedModel([[ToolCall("a", "work"), ToolCall("b", "work"), ToolCall("c", "work")], "done"])
    async with place.runtime(Agent(model, tools=[work])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert most == 1
    assert [call.outcome for call in result.tool_calls] == [Ok("worked")] * 3


async def test_a_cancelled_one_gives_its_place_back(place: Place) -> None:
    began = asyncio.Event()

    @tool(resource="printer")
    @wrapped
    async def hang() -> None:
        began.set()
        await asyncio.Event().wait()

    @tool(resource="printer")
    async def after() -> str:
        return "printed"

    model = ScriptedModel([[ToolCall("a", "hang")], [ToolCall("b", "after")], "done"])
    async with place.runtime(Agent(model, tools=[hang, after])) as runtime:
        session = await runtime.session("s")
        first = await session.send("go")
        await began.wait()
        await session.cancel()
        stopped = await first.result(SOON)
        result = await asyncio.wait_for(session.run("again"), SOON)

    assert isinstance(stopped.tool_calls[0].outcome, OutcomeUnknown)
    assert result.tool_calls[0].outcome == Ok("printed")
