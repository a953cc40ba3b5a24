"""What a tool gives its context, and raises: wrong values are told to the tool, and the session goes on."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Agent, Retries, Retry, ToolCall, ToolContext, ToolError, tool
from perdure.engine.retry import pause
from perdure.model.tool import Failed, Ok
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place, untyped

HUGE = 10**5000


class Name(str, enum.Enum):  # noqa: UP042  # users write this, and `format` shows its name
    REPORT = "report"


class Loud(str):
    def __str__(self) -> str:
        return "LOUD"


GIVEN: dict[str, Callable[[ToolContext], Any]] = {
    "a time in words": lambda ctx: ctx.defer(untyped("soon")),
    "a time that is not a number": lambda ctx: ctx.defer(float("nan")),
    "a time that says yes": lambda ctx: ctx.defer(True),
    "a time that no timer can count": lambda ctx: ctx.defer(HUGE),
    "a name": lambda ctx: ctx.artifacts.put(b"x", name=untyped(5)),
    "a name too long to show": lambda ctx: ctx.artifacts.put(b"x", name=untyped(HUGE)),
    "a name to look for": lambda ctx: ctx.artifacts.get(untyped(["n"])),
    "a kind of bytes": lambda ctx: ctx.artifacts.put(untyped(bytearray(b"x")), name="n"),
}


@pytest.mark.parametrize("what", GIVEN)
async def test_a_wrong_value_from_inside_a_tool_is_an_error_of_the_tool(place: Place, what: str) -> None:
    @tool(deferred=True)
    async def give(ctx: ToolContext) -> str:
        """Give it."""
        with pytest.raises(ToolError):
            await GIVEN[what](ctx)
        return "refused"

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "give")], "done"]), tools=[give])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert [call.outcome for call in result.tool_calls] == [Ok("refused")]


@pytest.mark.parametrize("name", [Name.REPORT, Loud("report")], ids=["an enum", "a subclass"])
async def test_a_kind_of_string_names_an_artifact_by_its_value(place: Place, name: str) -> None:
    @tool
    async def keep(ctx: ToolContext) -> str:
        """Keep it."""
        await ctx.artifacts.put(b"all of it", name=name)
        return "kept"

    @tool
    async def look(ctx: ToolContext) -> str:
        """Look at it."""
        return (await ctx.artifacts.get("report")).decode()

    def agent(*answers: Any) -> Agent[str]:
        return Agent(ScriptedModel(answers), tools=[keep, look])

    async with place.runtime(agent([ToolCall("a", "keep")], "done")) as runtime:
        await asyncio.wait_for((await runtime.session("s")).run("keep it"), SOON)
    async with place.runtime(agent([ToolCall("a", "look")], "done")) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("look"), SOON)

    assert [call.outcome for call in result.tool_calls] == [Ok("all of it")]


@pytest.mark.parametrize("after", ["soon", float("nan"), None, b"2", [2]], ids=repr)
async def test_an_odd_time_to_try_again_is_no_time(place: Place, after: Any) -> None:
    @tool(retries=0)
    async def fetch() -> str:
        """Fetch it."""
        raise Retry("busy", after=after)

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "fetch")], "done"]), tools=[fetch])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert [call.outcome for call in result.tool_calls] == [Failed("retry", "busy")]


class Steady:
    """The least noise there is."""

    def bits(self, count: int) -> int:
        return 0


@pytest.mark.parametrize(
    ("asked", "waited"),
    [(HUGE, 1e9), (-HUGE, 0.0), (float("inf"), 0.5), (3, 3), (float("nan"), 0.5), ("soon", 0.5)],
    ids=["huge", "below none", "for ever", "three", "not a number", "in words"],
)
def test_a_wait_that_is_asked_for_is_bounded_whatever_it_is(asked: Any, waited: float) -> None:
    assert pause(Retries(), 1, asked, Steady()) == waited
