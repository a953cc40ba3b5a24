"""Two tenants in one store. Whatever works for one of them writes down whom it works for, outside of the store.

Session `a` is for one tenant, `b` for another. Each is said something twice, at the same time; between the two, `a` is
made over to a third tenant.
"""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import Agent, ModelRequest, Plugin, ProcessContext, ToolCall, ToolContext, process, tool
from perdure.errors import Conflict
from perdure.plugins import CommandContext, QueueTurn, Result, SessionContext, SnapshotWriter, command
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab


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


class Clerk(Plugin):
    """Counts what it is asked, and has the agent greet."""

    id = "clerk"

    def __init__(self, lab: Lab) -> None:
        self.lab, self.asked = lab, 0

    def for_session(self, ctx: SessionContext) -> Clerk:
        return Clerk(self.lab)

    @property
    def revision(self) -> int:
        return self.asked

    def snapshot(self, writer: SnapshotWriter) -> int:
        return self.asked

    @command
    async def greet(self, ctx: CommandContext) -> Result[str]:
        await self.lab.effect("command", "greet", dict(ctx.metadata))
        self.asked += 1
        return Result("greeted", directives=(QueueTurn("greet", "greeting"),))


async def begun_by_an_operation(lab: Lab) -> None:
    """A command of a plugin is the first thing that is asked of a new session, before anything is said to it."""

    async def greeting(request: ModelRequest) -> str:
        await lab.effect("answer", request.messages[-1].text, dict(request.metadata))
        return f"for {request.metadata['tenant']}"

    agent = Agent(FunctionModel(greeting), name="agent", plugins=[Clerk(lab)])
    async with lab.runtime([agent]) as runtime:
        session = await runtime.session("a", metadata={"tenant": "first"})
        while True:
            try:
                await session.call("clerk.greet")
                break
            except Conflict:  # the turn of a command in an earlier life of the program runs
                await runtime.wait_idle(timeout=60)
        await session.run("one", key="one")
        found = [[row.id, row.metadata] for row in await runtime.sessions.list()]
        await lab.effect("found", "found", found)
        await runtime.wait_idle(timeout=60)


TENANTS = ("first", "second", "third")
