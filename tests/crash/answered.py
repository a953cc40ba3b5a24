"""A turn that waits is answered, and then called off, while no worker is there: what is killed.

The model asks for `build`, which is completed from outside, and `pay`, of which a person must approve. The completion
and a rejection are acknowledged before the cancel.
"""

from __future__ import annotations

import contextlib
from typing import Any

from perdure import Agent, ModelRequest, ModelResponse, ToolCall, ToolContext, Usage, tool
from perdure.errors import AlreadyAnswered
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab
from tests.crash.reference import SESSION


def clerk(lab: Lab) -> Agent[str]:
    @tool(deferred=True)
    async def build(ctx: ToolContext[Any]) -> None:
        """Build."""
        await lab.effect("build", ctx.idempotency_key, ctx.defer())

    @tool(approval="ask")
    async def pay(ctx: ToolContext[Any]) -> str:
        """Pay."""
        await lab.effect("pay", ctx.idempotency_key)
        return "paid"

    def answer(request: ModelRequest) -> ModelResponse:
        if request.messages[-1].role == "tool":
            return ModelResponse("done", usage=Usage(input=1, output=2))
        calls = (ToolCall("a", "build"), ToolCall("b", "pay"))
        return ModelResponse("", calls, Usage(input=1, output=2), stop="tool_calls")

    return Agent(FunctionModel(answer), name="clerk", tools=[build, pay])


async def answered(lab: Lab) -> None:
    async with lab.runtime([clerk(lab)]) as runtime:
        session = await runtime.session(SESSION)
        if not (await session.run("go", key="go")).waiting:
            return
    async with lab.runtime() as runtime:
        session = await runtime.session(SESSION, agent="clerk")
        for line in [line for line in lab.ledger if line.name == "build"]:
            with contextlib.suppress(AlreadyAnswered):
                await runtime.resolve(line.data, "all green")
        with contextlib.suppress(AlreadyAnswered):
            await session.reject(f"{SESSION}.1.1.1", "too dear")
        await session.cancel("enough", turn_id=f"{SESSION}.1")
    async with lab.runtime([clerk(lab)]) as runtime:
        session = await runtime.session(SESSION)
        await session.result(f"{SESSION}.1")
