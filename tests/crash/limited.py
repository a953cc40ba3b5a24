"""A turn under limits whose first attempt breaks off, whose tool asks a model as well, and whose answer is first none:
what is killed."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from perdure import Agent, Limit, ModelRequest, ModelResponse, ModelSettings, ToolCall, ToolContext, Usage, tool
from perdure.errors import ProviderError
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

SMALL = ModelSettings(max_tokens=400)


class Found(Struct):
    """What the turn answers with."""

    what: str


async def limited(lab: Lab) -> None:
    @tool(recovery="rerun")
    async def look(ctx: ToolContext[Any]) -> str:
        """Look."""
        await lab.effect("looked", "look")
        return str((await ctx.host.complete("hm?", label="inside", settings=SMALL)).text)

    def model(request: ModelRequest) -> Any:
        if request.label == "inside":
            return ModelResponse("seen", usage=Usage(30, 20))
        if request.messages[-1].role == "tool":
            return ModelResponse("none", usage=Usage(90, 10))
        if any(message.role == "tool" for message in request.messages):
            return ModelResponse('{"what": "a bird"}', usage=Usage(90, 10))
        if request.attempt == 1:
            raise ProviderError("broke off", retryable=True, after=0.0, code="broken_stream", unseen=True)
        return ModelResponse("", [ToolCall("c", "look")], usage=Usage(90, 10), stop="tool_calls")

    agent = Agent(FunctionModel(model), tools=[look], settings=SMALL, output=Found)
    limits = [Limit(tokens=90_000), Limit(turns=10, per="all")]
    async with lab.runtime([agent], limits=limits) as runtime:
        session = await runtime.session("s")
        await session.run("go", key="go")
        await runtime.wait_idle(timeout=60)
        accounts = {each.name: each for each in await runtime.store.accounts()}
        tokens, turns = accounts["tokens/session/ever"], accounts["turns/all/ever"]
        held = [each for each in await runtime.store.reservations() if each.holds]
        told = [tokens.spent, tokens.reserved, tokens.unknown, turns.spent, len(held)]
        await lab.effect("counted", "s", told)
