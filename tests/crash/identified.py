"""Two tenants in one store. Whatever works for one of them writes down whom it works for, outside of the store.

Session `a` is for one tenant, `b` for another. Each is said something twice, at the same time; between the two, `a` is
made over to a third tenant.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mainstay import Agent, ModelRequest, ProcessContext, ToolCall, ToolContext, process, tool
from mainstay.testing import FunctionModel
from mainstay.testing.crash import Lab


def model(request: ModelRequest) -> str | list[ToolCall]:
    last, whom = request.messages[-1], request.metadata
    if last.role == "tool":
        return f"{last.tool_results[0].content} for {whom['tenant']}, by {whom['ip']}"
    return [ToolCall("", "work", {})]


async def identified(lab: Lab) -> None:
    @process
    async def job(ctx: ProcessContext[Any]) -> str:
        await lab.effect("job", ctx.process_id, dict(ctx.metadata))
        return "done"

    @tool(recovery="rerun")
    async def work(ctx: ToolContext[Any]) -> str:
        """Do something for a tenant."""
        await lab.effect("work", ctx.idempotency_key, [ctx.session_id, dict(ctx.metadata)])
        handle = await ctx.start(job)
        return str(await handle.result())

    agent = Agent(FunctionModel(model), name="agent", tools=[work])

    async with lab.runtime([agent], processes=[job]) as runtime:

        async def talk(name: str, tenant: str) -> None:
            row = await runtime.store.session(name)
            # A program that starts again after the update opens the session as what it is by then.
            session = await runtime.session(name, metadata={"tenant": tenant} if row is None else None)
            await session.run("one", key="one", metadata={"ip": f"{name}-1"})
            if name == "a":
                await session.update(metadata={"tenant": "third"})
            await session.run("two", key="two", metadata={"ip": f"{name}-2"})

        await asyncio.gather(talk("a", "first"), talk("b", "second"))
        found = {each: [r.id for r in await runtime.sessions.list(metadata={"tenant": each})] for each in TENANTS}
        await lab.effect("found", "found", found)
        await runtime.wait_idle(timeout=60)


TENANTS = ("first", "second", "third")
