"""A deferred call is completed from outside while its body still runs: that was acknowledged, and counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, Retry, Runtime, ToolCall, ToolContext, ToolError, TurnResult, tool
from perdure.errors import UnknownWait
from perdure.model.session import WaitRow
from perdure.model.tool import Failed, Ok
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place


class Office:
    """Tools that hand their key to somebody who is quick, and then go wrong. `began` counts bodies."""

    def __init__(self, quick: bool = True, limit: float = 0.01) -> None:
        self.quick, self.limit, self.began = quick, limit, 0
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

        @tool(deferred=True, timeout=self.limit)
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
    office = Office(limit=0.01 if place.kind == "memory" else 2)  # on a file, completing takes time too

    result = await office.send(place, name)

    assert (result.text, result.tool_calls[0].outcome, office.began) == ("done", Ok("delivered"), 1)


async def test_a_body_that_raises_before_anybody_completed_it_has_failed(place: Place) -> None:
    result = await Office(quick=False).send(place, "raises")

    assert result.tool_calls[0].outcome == Failed("tool_error", "the printer jams")


class Quick(MemoryStore):
    """Somebody completes the call just after it was looked at whether anybody had."""

    runtime: Runtime
    key = ""
    accepted: bool | None = None

    async def wait(self, wait_id: str) -> WaitRow | None:
        found = await super().wait(wait_id)
        if self.key and self.accepted is None:
            self.accepted = False
            try:
                await self.runtime.resolve(self.key, "delivered")
            except UnknownWait:
                return found
            self.accepted = True
        return found


async def test_a_completion_in_the_last_moment_is_refused_or_counts() -> None:
    store = Quick(MemoryRows())

    @tool(deferred=True)
    async def raises(ctx: ToolContext) -> None:
        store.key = ctx.defer()
        raise ToolError("the printer jams")

    agent = Agent(ScriptedModel([[ToolCall("a", "raises")], "done"]), tools=[raises])
    async with Runtime(store, agents=[agent]) as store.runtime:
        result = await asyncio.wait_for((await store.runtime.session("s")).run("go"), SOON)

    assert store.accepted is False
    assert result.tool_calls[0].outcome == Failed("tool_error", "the printer jams")
