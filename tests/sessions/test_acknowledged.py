"""What was acknowledged stands: a cancel that comes later ends the turn and changes no answer that was given before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Plugin, Runtime, Session, ToolCall, ToolContext, tool
from perdure.engine.control import CANCEL_GRACE
from perdure.errors import AlreadyAnswered, UnknownWait
from perdure.model.outcome import PluginAborted
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown
from perdure.model.write import Resolve
from perdure.plugins.hooks import ToolEndContext
from perdure.testing import FunctionModel, VirtualClock
from tests.kit import SOON, Place, crash, until


class Office:
    """An agent with a tool for every kind of wait, and the keys that its deferred calls handed out."""

    def __init__(self, *calls: str, plugins: tuple[Plugin, ...] = ()) -> None:
        self.keys: list[str] = []
        self.running = asyncio.Event()

        @tool(deferred=True)
        async def build(ctx: ToolContext[Any]) -> None:
            self.keys.append(ctx.defer())

        @tool(deferred=True)
        async def build_soon(ctx: ToolContext[Any]) -> None:
            self.keys.append(ctx.defer(timeout=60))

        @tool(approval="ask")
        async def pay() -> str:
            return "paid"

        @tool(recovery="ask")
        async def dig() -> str:
            self.running.set()
            await asyncio.Event().wait()
            return "never"

        def answer(request: ModelRequest) -> Any:
            if request.messages[-1].role == "tool":
                return "done"
            return [ToolCall(name, name) for name in calls]

        self.agent: Agent[Any] = Agent(
            FunctionModel(answer), name="office", tools=[build, build_soon, pay, dig], plugins=plugins
        )


async def parked(place: Place, office: Office) -> None:
    """Run the turn until it waits, and leave."""
    async with place.runtime(office.agent) as runtime:
        assert (await (await runtime.session("s")).run("go")).waiting


async def dug(place: Place, office: Office) -> None:
    """Die in the call, and come back to ask a person what became of it."""
    runtime = await place.runtime(office.agent).__aenter__()
    await (await runtime.session("s")).send("go")
    await office.running.wait()
    await crash(runtime)
    async with place.runtime(office.agent) as runtime:
        session = await runtime.session("s")
        await until(session.pending)


async def ended(place: Place, office: Office) -> Any:
    async with place.runtime(office.agent) as runtime:
        return await (await runtime.session("s")).result("s.1")


Answer = Callable[[Runtime, Session, Office], Awaitable[Any]]

ANSWERS: dict[str, tuple[str, Answer, Any]] = {
    "completed": ("build", lambda runtime, _, office: runtime.resolve(office.keys[0], "all green"), Ok("all green")),
    "completed as failed": (
        "build",
        lambda runtime, _, office: runtime.resolve(office.keys[0], {"at": 3}, error="two red"),
        Failed("settled_as_failed", "two red", {"at": 3}),
    ),
    "approved": (
        "pay",
        lambda _, session, office: session.approve("s.1.1.0", by="ada"),
        Cancelled("host", "stop"),
    ),
    "rejected": (
        "pay",
        lambda _, session, office: session.reject("s.1.1.0", "too dear", by="ada"),
        Denied("too dear", "ada"),
    ),
    "settled as done": (
        "dig",
        lambda _, session, office: session.settle("s.1.1.0", "done", value="three metres"),
        Ok("three metres"),
    ),
    "settled as failed": (
        "dig",
        lambda _, session, office: session.settle("s.1.1.0", "failed", reason="rock"),
        Failed("settled_as_failed", "rock"),
    ),
}


@pytest.mark.parametrize("how", ANSWERS)
async def test_an_answer_that_was_acknowledged_outlives_a_later_cancel(place: Place, how: str) -> None:
    name, answer, expected = ANSWERS[how]
    office = Office(name)
    await (dug if name == "dig" else parked)(place, office)
    async with place.runtime() as runtime:
        session = await runtime.session("s", agent="office")
        await answer(runtime, session, office)
        assert await session.cancel("stop") == "requested"
    result = await ended(place, office)

    assert result.outcome == Cancelled("host", "stop")
    assert [call.outcome for call in result.tool_calls] == [expected]


async def test_a_wait_that_had_expired_ends_as_expired(place: Place) -> None:
    office, clock = Office("build_soon", "pay"), VirtualClock()
    async with place.runtime(office.agent, clock=clock) as runtime:
        assert (await (await runtime.session("s")).run("go")).waiting
    async with place.runtime(clock=clock) as runtime:
        await runtime.store.write(Resolve("s.1.1.0:deferred", None, clock.now()))
        await (await runtime.session("s", agent="office")).cancel("stop")
    result = await ended(place, office)

    assert result.outcome == Cancelled("host", "stop")
    assert result.tool_calls[0].outcome == OutcomeUnknown("nobody answered in time")


async def test_a_call_that_was_to_run_again_is_unknown_and_who_said_so_is_recorded(place: Place) -> None:
    office = Office("dig")
    await dug(place, office)
    async with place.runtime() as runtime:
        session = await runtime.session("s", agent="office")
        await session.settle("s.1.1.0", "rerun", by="ada")
        await session.cancel("stop")
    result = await ended(place, office)

    assert type(result.tool_calls[0].outcome) is OutcomeUnknown
    async with place.runtime(office.agent) as runtime:
        with pytest.raises(AlreadyAnswered, match="rerun"):
            await (await runtime.session("s")).settle("s.1.1.0", "done")


async def test_who_approved_of_a_call_that_was_cancelled_before_it_ran_is_recorded(place: Place) -> None:
    office = Office("pay")
    await parked(place, office)
    async with place.runtime() as runtime:
        session = await runtime.session("s", agent="office")
        await session.approve("s.1.1.0", by="ada")
        await session.cancel("stop")
    await ended(place, office)

    async with place.runtime(office.agent) as runtime:
        with pytest.raises(AlreadyAnswered, match="ada"):
            await (await runtime.session("s")).reject("s.1.1.0")


async def test_each_call_of_a_cancelled_round_ends_as_it_was_answered(place: Place) -> None:
    office = Office("build", "pay", "build", "pay")
    await parked(place, office)
    async with place.runtime() as runtime:
        session = await runtime.session("s", agent="office")
        await runtime.resolve(office.keys[1], "green")
        await session.reject("s.1.1.3", "no")
        await session.cancel("stop")
    result = await ended(place, office)

    assert [type(call.outcome) for call in result.tool_calls] == [OutcomeUnknown, Cancelled, Ok, Denied]


async def test_an_answer_that_the_running_turn_has_not_noticed_outlives_a_cancel(file: Place) -> None:
    """Another Runtime resolves; the owner hears of the cancel first."""
    office = Office("build", "dig")
    async with file.runtime(office.agent) as runtime, file.runtime() as other:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await office.running.wait()
        await until(lambda: office.keys)
        await other.resolve(office.keys[0], "all green")
        await session.cancel("stop")
        result = await receipt.result(SOON)

        assert [type(call.outcome) for call in result.tool_calls] == [Ok, OutcomeUnknown]


async def test_a_cancelled_body_that_has_deferred_and_returns_is_not_done(place: Place) -> None:
    running = asyncio.Event()

    @tool(deferred=True)
    async def build(ctx: ToolContext[Any]) -> str:
        ctx.defer()
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "handed over"
        return "never"

    agent = Agent(FunctionModel(lambda _: [ToolCall("a", "build")]), tools=[build])
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await running.wait()
        await session.cancel("stop")

        assert type((await receipt.result(SOON)).tool_calls[0].outcome) is OutcomeUnknown


class Slow(Plugin):
    """Takes its time to look at what a call returned."""

    id = "slow"

    def __init__(self) -> None:
        self.looking, self.go_on = asyncio.Event(), asyncio.Event()

    async def after_tool_call(self, ctx: ToolEndContext) -> Any:
        if ctx.outcome == Ok("all green"):
            self.looking.set()
            await self.go_on.wait()


async def test_an_acknowledged_value_that_plugins_look_at_is_waited_for(place: Place) -> None:
    plugin = Slow()
    office = Office("build", plugins=(plugin,))
    await parked(place, office)
    async with place.runtime(office.agent) as runtime:
        session = await runtime.session("s")
        await runtime.resolve(office.keys[0], "all green")
        await plugin.looking.wait()
        await session.cancel("stop")
        asyncio.get_running_loop().call_later(4 * CANCEL_GRACE, plugin.go_on.set)
        result = await session.result("s.1")

        assert result.tool_calls[0].outcome == Ok("all green")


class Refusing(Plugin):
    """Does not let its session begin."""

    id = "refusing"

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def session_ready(self, ctx: Any) -> None:
        if self.refuses:
            raise RuntimeError("not today")


async def test_a_value_that_no_plugin_could_look_at_is_withheld_and_the_call_is_done(place: Place) -> None:
    plugin = Refusing(False)
    office = Office("build", plugins=(plugin,))
    await parked(place, office)
    async with place.runtime() as runtime:
        await runtime.resolve(office.keys[0], "secret")
    plugin.refuses = True
    result = await ended(place, office)

    assert isinstance(result.outcome, PluginAborted)
    assert result.tool_calls[0].outcome == Ok("result withheld: plugin 'refusing' could not look at it")


async def test_no_answer_is_accepted_for_a_turn_that_a_plugin_ends(place: Place) -> None:
    plugin = Refusing(False)
    office = Office("build", "pay", plugins=(plugin,))
    await parked(place, office)
    async with place.runtime() as runtime:
        await (await runtime.session("s", agent="office")).reject("s.1.1.1", "no")
    plugin.refuses = True
    result = await ended(place, office)

    assert [type(call.outcome) for call in result.tool_calls] == [OutcomeUnknown, Denied]
    async with place.runtime(office.agent) as runtime:
        with pytest.raises(UnknownWait):
            await runtime.resolve(office.keys[0], "all green")
