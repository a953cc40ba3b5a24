"""Turns that outlive their model: one is continued after its end, the other waits on disk for the end of an outage."""

from __future__ import annotations

from perdure import Agent, ModelRequest, Retries, ToolCall, ToolContext, tool
from perdure.errors import ProviderError
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

OUTAGE = 1
"""Model calls that fail in each life of the process before the outage is over."""


def paid(request: ModelRequest) -> int:
    return sum(len(message.tool_results) for message in request.messages)


def payer(lab: Lab, model: FunctionModel, retries: Retries | None = None) -> Agent[str]:
    @tool(recovery="rerun")
    async def pay(number: int, ctx: ToolContext) -> str:
        """Pay a bill."""
        await lab.effect("pay", ctx.idempotency_key)
        return f"paid {number}"

    return Agent(model, name="payer", tools=[pay], retries=retries)


def next_step(request: ModelRequest) -> str | list[ToolCall]:
    done = paid(request)
    return [ToolCall(name="pay", args={"number": done + 1})] if done < 2 else "done"


async def continued(lab: Lab) -> None:
    """A turn fails between its two payments, because a key has expired, and is continued."""
    renewed = False

    def answer(request: ModelRequest) -> str | list[ToolCall]:
        if paid(request) == 1 and not renewed:
            raise ProviderError("the key has expired", code="unauthorized")
        return next_step(request)

    async with lab.runtime([payer(lab, FunctionModel(answer))]) as runtime:
        session = await runtime.session("s")
        result = await session.run("go", key="k")
        renewed = True
        if result.failed:
            result = await session.retry()
        assert result.text == "done"


async def waited_out(lab: Lab) -> None:
    """The model is down between the two payments, and the turn is parked before each further attempt."""
    failures = 0

    def answer(request: ModelRequest) -> str | list[ToolCall]:
        nonlocal failures
        if paid(request) == 1 and failures < OUTAGE:
            failures += 1
            raise ProviderError("overloaded", code="overloaded", retryable=True)
        return next_step(request)

    retries = Retries(first=0.01, longest=0.01)
    async with lab.runtime([payer(lab, FunctionModel(answer), retries)], park_after=0) as runtime:
        session = await runtime.session("s")
        result = await session.run("go", key="k")
        assert result.text == "done"
