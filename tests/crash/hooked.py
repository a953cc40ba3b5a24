"""A turn whose calls plugins decide about: one is denied, one gets other arguments, one waits for a person.

    call 0  drop   denied by Veto
    call 1  tally  asked about a model, then with other arguments by Replace; its outcome is replaced afterwards
    call 2  book   shown to a person by Ask, with other arguments

Every hook leaves a line in the ledger, so that it can be counted across kills. The plugins count too, in state of their
own. A child session is begun with the turn.
"""

from __future__ import annotations

from typing import Any

from perdure import Agent, Message, ModelRequest, ToolCall, ToolContext, tool
from perdure.engine.journal import load
from perdure.model.plugin import AskPerson, CreateSession, ReplaceArgs, ShortCircuit
from perdure.model.record import Completed, Ended, Started
from perdure.model.tool import Denied, Ok
from perdure.plugins.hooks import Plugin, SessionContext, ToolCallContext, ToolEndContext, TurnContext
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab


class Counting(Plugin):
    """Leaves a line for each of its hooks, and counts them in its state."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.count = lab, 0

    def for_session(self, ctx: SessionContext) -> Plugin:
        return type(self)(self.lab)

    async def note(self, hook: str, key: str) -> None:
        await self.lab.effect(hook, key)
        self.count += 1

    @property
    def revision(self) -> int:
        return self.count

    def snapshot(self, writer: Any) -> Any:
        return self.count

    def restore(self, snapshot: Any, reader: Any) -> None:
        self.count = snapshot.state or 0


class Veto(Counting):
    id = "veto"

    async def before_turn(self, ctx: TurnContext) -> Any:
        if ctx.agent == "worker":
            return CreateSession(agent="helper", said=Message("user", "help"))
        return None

    async def before_tool_call(self, ctx: ToolCallContext) -> Any:
        if ctx.tool.name != "drop":
            return None
        await self.note("veto", ctx.call_id)
        return ShortCircuit(Denied("never", "policy"))


class Replace(Counting):
    id = "replace"

    async def before_tool_call(self, ctx: ToolCallContext) -> Any:
        if ctx.tool.name != "tally":
            return None
        checked = await ctx.host.complete("is it safe?", label="guard")
        await self.note("replace", ctx.call_id)
        return ReplaceArgs({"n": 5 if checked.text == "safe" else -1})

    async def after_tool_call(self, ctx: ToolEndContext) -> Any:
        if ctx.tool.name != "tally":
            return None
        await self.note("looked", ctx.call_id)
        return ShortCircuit(Ok("counted"))


class Ask(Counting):
    id = "ask"

    async def before_tool_call(self, ctx: ToolCallContext) -> Any:
        if ctx.tool.name != "book":
            return None
        await self.note("ask", ctx.call_id)
        return [ReplaceArgs({"n": 7}), AskPerson("is that fine?")]


def answer(request: ModelRequest) -> Any:
    if not request.turn_id:
        return "safe"
    if any(m.tool_results for m in request.messages):
        return "done"
    return [ToolCall(f"c{i}", name, {"n": 1}) for i, name in enumerate(("drop", "tally", "book"))]


def agents(lab: Lab) -> list[Agent[Any]]:
    async def work(ctx: ToolContext[Any], n: int) -> str:
        """Work."""
        await lab.effect(ctx.tool, ctx.idempotency_key, n)
        return f"{ctx.tool} {n}"

    tools = [tool(name=name, recovery="rerun")(work) for name in ("drop", "tally", "book")]
    plugins = [Veto(lab), Replace(lab), Ask(lab)]
    helper = Agent(FunctionModel(lambda request: "helped"), name="helper")
    return [Agent(FunctionModel(answer), name="worker", tools=tools, plugins=plugins), helper]


async def look_at_what_is_recorded(lab: Lab) -> None:
    """Leave a line for everything that the incarnation before had recorded: what is told so is not asked again."""
    async with lab.runtime() as reader:
        row = await reader.store.session("s")
        if row is None:
            return
        for _, record in await load(reader.store, row.sid, 1, 1):
            if isinstance(record, Started | Ended):
                await lab.effect("recorded", record.call)
            elif isinstance(record, Completed):
                await lab.effect("recorded", "completion")
        for wait in await reader.store.waits(row.sid):
            await lab.effect("recorded", wait.call)


async def hooked(lab: Lab) -> None:
    if lab.incarnation > 1:
        await look_at_what_is_recorded(lab)
    async with lab.runtime(agents(lab)) as runtime:
        session = await runtime.session("s", agent="worker")
        result = await session.run("go", key="go")
        while result.waiting:
            for pending in await session.pending():
                assert pending.args == {"n": 7}, "a person is shown what will run"
                await session.approve(pending.call_id)
            result = await session.result(result.turn_id)
        await runtime.wait_idle(timeout=60)


class Tally(Plugin):
    """Counts what its own tool is told. Nothing else remembers it."""

    id = "tally"

    def __init__(self) -> None:
        self.count = 0

    def for_session(self, ctx: SessionContext) -> Tally:
        return Tally()

    def tools(self) -> list[Any]:
        @tool(recovery="rerun")
        async def bump(n: int) -> int:
            """Count on."""
            self.count += n
            return self.count

        return [bump]

    @property
    def revision(self) -> int:
        return self.count

    def snapshot(self, writer: Any) -> Any:
        return self.count

    def restore(self, snapshot: Any, reader: Any) -> None:
        self.count = snapshot.state or 0


async def remembering(lab: Lab) -> None:
    """Two turns of a plugin's own tool: the second one goes on where the first one ended."""

    def count(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if last.role == "user":
            return [ToolCall("c", "bump", {"n": int(last.text)})]
        return f"counted {last.tool_results[0].content}"

    async with lab.runtime([Agent(FunctionModel(count), plugins=[Tally()])]) as runtime:
        session = await runtime.session("s")
        for said in ("3", "4"):
            await session.run(said, key=said)
