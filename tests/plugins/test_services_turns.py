"""Turns of other sessions that a hook starts, listens to, waits for and cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, tool
from perdure.errors import Conflict, UnknownSession, UnknownTurn
from perdure.model.event import TextDelta, TurnCommitted, TurnStarted, WaitingFor
from perdure.model.outcome import Finished
from perdure.model.plugin import CreateSession
from perdure.model.tool import Cancelled, Ok
from perdure.plugins.hooks import Plugin
from perdure.plugins.operations import CommandContext, command
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, TellingModel, agent_calling, crash
from tests.plugins.made import having

Do = Callable[[Any], Awaitable[Any]]


@tool
def add(n: int) -> int:
    """Add one."""
    return n + 1


def boss(do: Do) -> Agent[str]:
    """An agent whose plugin does something before its call, in session `s`."""

    async def answer(ctx: Any) -> None:
        await do(ctx)

    return agent_calling("add", {"n": 1}, name="boss", tools=[add], plugins=[having("before_tool_call", answer)])


def echo(request: ModelRequest) -> str:
    return f"heard {request.messages[-1].text}"


HELPER = Agent(FunctionModel(echo), name="helper")


async def ask(runtime: Runtime) -> Any:
    """A turn of `s`, whose hook must not have failed."""
    await (await runtime.session("other", agent="helper")).run("hello")
    result = await (await runtime.session("s", agent="boss")).run("go")
    assert [call.outcome for call in result.tool_calls] == [Ok(2)]
    return result


async def test_turn_that_is_started_tells_its_events_from_the_first_to_the_last(place: Place) -> None:
    seen: list[Any] = []

    async def listen(ctx: Any) -> None:
        begun = await ctx.host.start_turn_stream("other", "work", key="k")
        seen.append(begun.turn_id)
        seen.extend([event async for event in begun.events])
        seen.append((await ctx.host.await_turn(begun.turn_id)).outcome)

    async with place.runtime(boss(listen), HELPER) as runtime, asyncio.timeout(SOON):
        await ask(runtime)

    assert (seen[0], seen[-1]) == ("other.2", Finished("heard work"))
    assert [type(event) for event in seen[1:-1]] == [TurnStarted, TextDelta, TurnCommitted]
    assert {event.turn_id for event in seen[1:-1]} == {"other.2"}


async def test_turn_goes_on_when_nobody_listens_or_stops_listening(place: Place) -> None:
    busy, seen = TellingModel(), list[Any]()

    async def leave(ctx: Any) -> None:
        begun = await ctx.host.start_turn_stream("slow", "work", key="k")
        async for event in begun.events:
            seen.append(type(event))
            break
        busy.say("at last")
        seen.append((await ctx.host.await_turn(begun.turn_id)).text)
        seen.extend([type(event) async for event in begun.events])

    async with place.runtime(boss(leave), HELPER, Agent(busy, name="slow")) as runtime, asyncio.timeout(SOON):
        busy.say("ready")
        await (await runtime.session("slow", agent="slow")).run("are you?")
        await ask(runtime)

    assert seen == [TurnStarted, "at last", TextDelta, TurnCommitted], "reading on goes on where it was left"


async def test_turn_that_parks_ends_its_events_and_is_told_as_waiting(place: Place) -> None:
    @tool(approval="ask", name="add")
    def careful(n: int) -> int:
        """Add, if a person agrees."""
        return n + 1

    seen: list[Any] = []

    async def listen(ctx: Any) -> None:
        await ctx.host.create_session(CreateSession("careful", "careful"))
        begun = await ctx.host.start_turn_stream("careful", "work", key="k")
        seen.extend([type(event) async for event in begun.events])
        seen.append((await ctx.host.await_turn(begun.turn_id)).waiting)

    made = agent_calling("add", {"n": 1}, name="careful", tools=[careful])
    async with place.runtime(boss(listen), HELPER, made) as runtime, asyncio.timeout(SOON):
        await ask(runtime)

    assert seen[-2:] == [WaitingFor, True]


async def test_same_key_is_the_same_turn_also_when_it_is_over(place: Place) -> None:
    seen: list[Any] = []

    async def again(ctx: Any) -> None:
        first = await ctx.host.start_turn("other", "work", key="k")
        begun = await ctx.host.start_turn_stream("other", "work", key="k")
        seen.extend([first.turn_id, begun.turn_id, [event async for event in begun.events]])
        seen.append((await ctx.host.await_turn(begun.turn_id)).text)

    async with place.runtime(boss(again), HELPER) as runtime, asyncio.timeout(SOON):
        await ask(runtime)

    assert seen == ["other.2", "other.2", [], "heard work"]


async def test_hook_that_runs_again_after_a_crash_finds_the_turn_it_had_started(place: Place) -> None:
    reached, seen = asyncio.Event(), list[str]()

    async def die(ctx: Any) -> None:
        await ctx.host.start_turn("other", "work", key=ctx.call_id)
        reached.set()
        await asyncio.Event().wait()

    async def live(ctx: Any) -> None:
        begun = await ctx.host.start_turn_stream("other", "work", key=ctx.call_id)
        seen.append((await ctx.host.await_turn(begun.turn_id)).turn_id)

    runtime = await place.runtime(boss(die), HELPER).__aenter__()
    await (await runtime.session("other", agent="helper")).run("hello")
    receipt = await (await runtime.session("s", agent="boss")).send("go")
    async with asyncio.timeout(SOON):
        await reached.wait()
    await crash(runtime)
    async with place.runtime(boss(live), HELPER) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).result(receipt.turn_id)
        row = await runtime.store.session("other")

    assert row is not None
    assert (seen, row.head, row.next) == (["other.2"], 2, 3)


async def test_waiting_for_its_own_session_is_refused_and_reading_what_is_over_is_not(place: Place) -> None:
    seen: list[Any] = []

    async def wait(ctx: Any) -> None:
        if ctx.turn_id == "s.1":
            return
        seen.append((await ctx.host.await_turn("s.1")).text)
        for own in ("s.2", "s.3"):
            with pytest.raises(Conflict, match="cannot end while another one of its session waits for it"):
                await ctx.host.await_turn(own)
        with pytest.raises(Conflict, match="of its own session"):
            await ctx.host.start_turn_stream("s", "work", key="k")

    async with place.runtime(boss(wait), HELPER) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        await session.run("go")
        second = await session.send("again")
        third = await session.send("and then?")
        results = [await second.result(), await third.result()]

    assert [call.outcome for result in results[:1] for call in result.tool_calls] == [Ok(2)]
    assert seen[0] == "done"


@pytest.mark.parametrize(
    ("name", "error"),
    [("nobody.1", UnknownSession), ("other.0", UnknownTurn), ("other.7", UnknownTurn), ("other", UnknownTurn)],
)
async def test_turn_that_nobody_knows_cannot_be_waited_for(place: Place, name: str, error: type[Exception]) -> None:
    async def wait(ctx: Any) -> None:
        with pytest.raises(error):
            await ctx.host.await_turn(name)

    async with place.runtime(boss(wait), HELPER) as runtime, asyncio.timeout(SOON):
        await ask(runtime)


async def test_turn_that_is_queued_behind_another_is_cancelled_by_its_id(place: Place) -> None:
    busy, seen = TellingModel(), list[Any]()

    async def cancel(ctx: Any) -> None:
        begun = await ctx.host.start_turn_stream("slow", "work", key="k")
        seen.append(await ctx.host.cancel_turn("slow", "changed my mind", turn_id=begun.turn_id))
        with pytest.raises(UnknownTurn):
            await ctx.host.cancel_turn("slow", turn_id="other.1")
        busy.say("ready")
        seen.append((await ctx.host.await_turn(begun.turn_id)).outcome)

    async with place.runtime(boss(cancel), HELPER, Agent(busy, name="slow")) as runtime, asyncio.timeout(SOON):
        first = await (await runtime.session("slow", agent="slow")).send("take your time")
        await busy.next()
        await ask(runtime)
        kept = await first.result()

    assert seen == ["requested", Cancelled("session s", "changed my mind")]
    assert kept.outcome == Finished("ready"), "the one that ran before it was left alone"


async def test_command_may_wait_for_a_turn_of_the_session_it_is_called_on(place: Place) -> None:
    class Waits(Plugin):
        id = "waits"

        @command
        async def until(self, turn_id: str, ctx: CommandContext) -> str:
            """Wait for a turn."""
            return str((await ctx.host.await_turn(turn_id)).text)

    busy = TellingModel()
    async with place.runtime(Agent(busy, name="slow", plugins=[Waits()])) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        receipt = await session.send("go")
        await busy.next()
        waiting = asyncio.create_task(session.call("waits.until", {"turn_id": receipt.turn_id}))
        busy.say("ready")

        assert (await waiting).output == "ready"


async def test_starting_a_turn_without_listening_makes_nobody_write_events(place: Place) -> None:
    async def start(ctx: Any) -> None:
        await ctx.host.start_turn("other", "work", key="k")

    async with place.runtime(boss(start), HELPER) as runtime, asyncio.timeout(SOON):
        await ask(runtime)
        desk = runtime._parts
        assert desk is not None
        assert desk.feed.listening("other") is None
