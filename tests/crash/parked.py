"""A turn that is parked until a process ends: what is killed.

A tool starts work outside, waits for it on disk, and has its own effect afterwards. The work is completed by the host
once the turn is parked, again in every incarnation: the first completion counts.
"""

from __future__ import annotations

from typing import Any

from perdure import Agent, ModelRequest, ModelResponse, ToolCall, ToolContext, Usage, tool
from perdure.ports.store import Store
from perdure.processes.local import External
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

WORK = "s.1.1.0.work"


def answer(request: ModelRequest) -> ModelResponse:
    last = request.messages[-1]
    usage = Usage(input=1, output=2)
    if last.role == "tool":
        return ModelResponse(f"it is {last.tool_results[0].content}", usage=usage)
    return ModelResponse("", [ToolCall("c", "build", {})], usage=usage)


async def left_memory(store: Store) -> bool:
    """The turn is parked, or further than that."""
    row, work = await store.session("s"), await store.process(WORK)
    if row is None or work is None:
        return False
    return row.state == "parked" or row.head == 1 or not work.live


async def awaiting(lab: Lab) -> None:
    @tool(recovery="rerun")
    async def build(ctx: ToolContext[Any]) -> str:
        work = await ctx.start(External("build"), key="work")
        await ctx.wait_ended(work)
        await lab.effect("built", ctx.idempotency_key.partition(".")[2])
        return str(await work.result())

    async with lab.runtime([Agent(FunctionModel(answer), name="builder", tools=[build])], park_after=0) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("make it", key="1")
        await lab.until(left_memory)
        await runtime.processes.complete(WORK, "built")
        await receipt.result()
