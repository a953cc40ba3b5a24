"""A turn that is called off by a person, and one whose runtime is left in the middle of it: what is killed.

The model asks for `pay` (once) and `hold` (rerun). `hold` begins when `pay` is recorded, and does not end by itself;
only for `left` does a second attempt of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from perdure import Agent, ModelRequest, ModelResponse, ToolCall, ToolContext, Usage, tool
from perdure.model.record import Ended
from perdure.ports.store import Store
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab
from tests.crash.reference import SESSION, recorded


def clerk(lab: Lab, ends: int) -> Agent[str]:
    """`ends`: the attempt from which on `hold` ends by itself."""

    @tool(recovery="once")
    async def pay(ctx: ToolContext[Any]) -> str:
        """Pay."""
        await lab.effect("pay", ctx.idempotency_key)
        return "paid"

    @tool(recovery="rerun")
    async def hold(ctx: ToolContext[Any]) -> str:
        """Hold the line."""
        await lab.until(recorded(Ended, "1.0"))
        await lab.effect("hold", ctx.idempotency_key, ctx.attempt)
        if ctx.attempt < ends:
            await asyncio.Event().wait()
        return "held"

    def answer(request: ModelRequest) -> ModelResponse:
        if request.messages[-1].role == "tool":
            return ModelResponse("done", usage=Usage(input=1, output=2))
        calls = (ToolCall("a", "pay"), ToolCall("b", "hold"))
        return ModelResponse("", calls, Usage(input=1, output=2), stop="tool_calls")

    return Agent(FunctionModel(answer), name="clerk", tools=[pay, hold])


def in_hand(lab: Lab, attempts: tuple[int, ...]) -> Callable[[Store], Awaitable[bool]]:
    """Whether one of these attempts of `hold` is under way here, or it is too late for that."""

    async def check(store: Store) -> bool:
        held = [x for x in lab.ledger if x.name == "hold" and x.incarnation == lab.incarnation and x.data in attempts]
        row = await store.session(SESSION)
        return bool(held) or (row is not None and (row.head == 1 or row.cancel is not None))

    return check


async def called_off(lab: Lab) -> None:
    async with lab.runtime([clerk(lab, ends=99)]) as runtime:
        session = await runtime.session(SESSION)
        receipt = await session.send("go", key="go")
        await lab.until(in_hand(lab, (1, 2)))
        await session.cancel("enough", by="ann", turn_id=receipt.turn_id)
        await receipt.result()


async def left(lab: Lab) -> None:
    """The runtime is left without grace; the next one, in the same process or another, takes the turn to its end."""
    async with lab.runtime([clerk(lab, ends=2)], grace=0) as runtime:
        session = await runtime.session(SESSION)
        await session.send("go", key="go")
        await lab.until(in_hand(lab, (1,)))
    async with lab.runtime([clerk(lab, ends=2)]) as runtime:
        session = await runtime.session(SESSION)
        await session.result(f"{SESSION}.1")
