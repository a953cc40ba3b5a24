"""Scenarios with background tools, to be killed anywhere. Each is at the top level: real kills need it there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from perdure import Agent, ModelRequest, Plugin, ToolCall, ToolContext, tool
from perdure.builtin.processes import process_tools
from perdure.engine.lease import LeaseTerms
from perdure.model.plugin import ShortCircuit
from perdure.model.tool import Ok, Recovery
from perdure.plugins.hooks import ToolEndContext
from perdure.ports.store import Store
from perdure.processes.function.context import ProcessContext
from perdure.processes.function.engine import process
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab
from tests.crash.reference import patiently

SESSION = "chat"
PROCESS = "chat.1.1.0"
ATTENDED = LeaseTerms(term=30.0, renewal=0.4)
"""Looks round often, so that what nobody attends to is soon found."""


def committed(turn: int) -> Callable[[Store], Awaitable[bool]]:
    async def check(store: Store) -> bool:
        row = await store.session(SESSION)
        return row is not None and row.head >= turn

    return check


class Censor(Plugin):
    """Lets pass what a call came to only after a look that the world can count; handles are no results."""

    id = "censor"

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    async def after_tool_call(self, ctx: ToolEndContext) -> ShortCircuit | None:
        if not isinstance(ctx.outcome, Ok) or not isinstance(ctx.outcome.value, str):
            return None
        await self._lab.effect("look", ctx.call_id)
        return ShortCircuit(Ok(f"censored {ctx.outcome.value}"))


def spider(lab: Lab, recovery: Recovery, awaits: bool = False, plugins: Sequence[Plugin] = ()) -> Agent[Any]:
    """Starts one background call. It either goes on and hears of its end, or awaits it in the same turn."""

    @tool(background=True, recovery=recovery)
    async def crawl(ctx: ToolContext[Any]) -> str:
        """Crawl, once the order of everything before is settled."""
        if not awaits:
            await lab.until(committed(1))
        await lab.effect("crawl", ctx.idempotency_key)
        return "crawled"

    def think(request: ModelRequest) -> str | list[ToolCall]:
        last = request.messages[-1]
        if last.role == "user":
            return "heard" if last.text.startswith("[process") else [ToolCall(name="crawl")]
        (result,) = last.tool_results
        if awaits and result.name == "crawl":
            return [ToolCall(name="await_process", args={"handle": result.content})]
        return f"{result.name}: {result.status}"

    return Agent(FunctionModel(think), name="spider", tools=[crawl], plugins=plugins)


async def wake(lab: Lab, recovery: Recovery) -> None:
    """One turn starts it, the next one hears of its end."""
    async with lab.runtime([spider(lab, recovery)], lease=ATTENDED) as runtime:
        await (await runtime.session(SESSION)).run("go", key="1")
        await runtime.handle(PROCESS).outcome()
        await lab.until(committed(2))


async def wake_once(lab: Lab) -> None:
    await wake(lab, "once")


async def wake_ask(lab: Lab) -> None:
    await wake(lab, "ask")


async def wake_rerun(lab: Lab) -> None:
    await wake(lab, "rerun")


async def wake_censored(lab: Lab) -> None:
    """The same before the eyes of a plugin."""
    agent = spider(lab, "rerun", plugins=[Censor(lab)])
    async with lab.runtime([agent], lease=ATTENDED) as runtime:
        await (await runtime.session(SESSION)).run("go", key="1")
        await runtime.handle(PROCESS).outcome()
        await lab.until(committed(2))


@process
async def greet(ctx: ProcessContext[Any]) -> str:
    return "hello"


async def heard_censored(lab: Lab) -> None:
    """A session hears of a function before the eyes of a plugin."""
    agent = Agent(FunctionModel(lambda _: "heard"), name="listener", plugins=[Censor(lab)])
    async with lab.runtime([agent], processes=[greet], lease=ATTENDED) as runtime:
        session = await runtime.session(SESSION)
        await patiently(lambda: session.start(greet, id="greeting"))
        await lab.until(committed(1))


async def awaited(lab: Lab, recovery: Recovery) -> None:
    """One turn starts it and awaits it."""
    async with lab.runtime([spider(lab, recovery, awaits=True)], lease=ATTENDED) as runtime:
        await (await runtime.session(SESSION)).run("go", key="1")


async def awaited_once(lab: Lab) -> None:
    await awaited(lab, "once")


async def awaited_rerun(lab: Lab) -> None:
    await awaited(lab, "rerun")


async def signalled(lab: Lab) -> None:
    """A model signals a process, then asks it to end; somebody outside ends it."""

    def think(request: ModelRequest) -> str | list[ToolCall]:
        last = request.messages[-1]
        handle = {"__handle__": "process", "id": "job"}
        if last.role == "user":
            return [ToolCall(name="signal_process", args={"handle": handle, "signal_name": "go", "payload": 1})]
        (result,) = last.tool_results
        if result.name == "signal_process":
            return [ToolCall(name="cancel_process", args={"handle": handle})]
        return f"{result.name}: {result.status}"

    agent = Agent(FunctionModel(think), name="clerk", tools=process_tools())
    async with lab.runtime([agent], lease=ATTENDED) as runtime:
        await runtime.processes.register("job", signals=["go"], grants=[SESSION])
        await (await runtime.session(SESSION)).run("go", key="1")
