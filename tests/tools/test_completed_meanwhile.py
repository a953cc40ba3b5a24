"""A deferred call is completed from outside while its body still runs: that was acknowledged, and counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mainstay import Agent, Retry, Runtime, ToolCall, ToolContext, ToolError, TurnResult, tool
from mainstay.model.tool import Failed, Ok
from mainstay.testing import ScriptedModel
from tests.sessions.places import SOON, Place


class Office:
    """Tools that hand their key to somebody who is quick, and then go wrong. `began` counts bodies."""

    def __init__(self, quick: bool = True) -> None:
        self.quick, self.began = quick, 0
        self.runtime: Runtime | None = None

    async def hand_out(self, ctx: ToolContext) -> None:
        self.began += 1
        key = ctx.defer()
        if self.quick:
            assert self.runtime is not None
            await self.runtime.resolve(key, "delivered")

    def tools(self) -> list[Any]:
        @tool(deferred=True)
        async def raises(ctx: ToolContext) -> None:
            await self.hand_out(ctx)
            raise ToolError("the printer jams")

        @tool(deferred=True, retries=3)
        async def retries(ctx: ToolContext) -> None:
            await self.hand_out(ctx)
            raise Retry("once more", after=0)

        @tool(deferred=True, timeout=0.01)
        async def hangs(ctx: ToolContext) -> None:
            await self.hand_out(ctx)
            await asyncio.Event().wait()

        return [raises, retries, hangs]

    async def send(self, place: Place, name: str) -> TurnResult[Any]:
        model = ScriptedModel([[ToolCall("a", name)], "done"])
        async with place.runtime(Agent(model, tools=self.tools())) as runtime:
            self.runtime = runtime
            return await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)


@pytest.mark.parametrize("name", ["raises", "retries", "hangs"])
async def test_a_completion_that_was_accepted_is_the_outcome_however_the_body_ends(place: Place, name: str) -> None:
    office = Office()

    result = await office.send(place, name)

    assert (result.text, result.tool_calls[0].outcome, office.began) == ("done", Ok("delivered"), 1)


async def test_a_body_that_raises_before_anybody_completed_it_has_failed(place: Place) -> None:
    result = await Office(quick=False).send(place, "raises")

    assert result.tool_calls[0].outcome == Failed("tool_error", "the printer jams")
