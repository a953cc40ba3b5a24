"""`recover=False`: a Runtime works on what it is given itself, and takes up nothing else."""

import asyncio
from typing import Any

import pytest

from perdure import Agent, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.engine.lease import LeaseTerms
from perdure.errors import ProcessFailed, StoreUnavailable
from perdure.model.outcome import Waiting
from perdure.model.session import InboxRow
from perdure.model.tool import Ok
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import ScriptedModel, VirtualClock
from tests.kit import SOON, Place, until


@tool(approval="ask")
async def sign() -> str:
    return "signed"


@tool(deferred=True)
async def order(ctx: ToolContext[None]) -> None:
    ctx.defer(timeout=60)


@process
async def asked(ctx: ProcessContext) -> Any:
    return await ctx.wait_signal("go", timeout=60)


async def parked(place: Place, clock: VirtualClock) -> None:
    """A turn and a process of a Runtime that was left, both on disk until somebody answers."""
    agent = Agent(ScriptedModel([[ToolCall("s", "sign"), ToolCall("o", "order")]]), tools=[sign, order])
    async with place.runtime(agent, processes=[asked], clock=clock) as runtime:
        result = await (await runtime.session("chat")).run("go")
        handle = await runtime.start(asked, id="p")

        async def is_parked() -> bool:
            return await handle.status() == "waiting"

        await until(is_parked)
    assert isinstance(result.outcome, Waiting)


async def test_what_is_answered_there_goes_on_there_whoever_began_it(place: Place) -> None:
    clock = VirtualClock()
    await parked(place, clock)
    agent = Agent(ScriptedModel(["done"]), tools=[sign, order])
    async with place.runtime(agent, processes=[asked], clock=clock, recover=False) as runtime:
        session = await runtime.session("chat")
        await session.approve("chat.1.1.0")
        await session.settle("chat.1.1.1", "done", value="ordered")
        await runtime.handle("p").signal("go", "gone")
        result = await asyncio.wait_for(session.result("chat.1"), SOON)

        assert [call.outcome for call in result.tool_calls] == [Ok("signed"), Ok("ordered")]
        assert await runtime.handle("p").result(SOON) == "gone"


async def test_what_falls_due_is_left_to_those_who_recover(place: Place) -> None:
    clock = VirtualClock()
    await parked(place, clock)
    clock.advance(61)
    agent = Agent(ScriptedModel([]), tools=[sign, order])
    async with place.runtime(agent, processes=[asked], clock=clock, recover=False) as runtime:
        for _ in range(2):
            runtime._open().activity.polled.clear()
            await asyncio.wait_for(runtime._open().activity.polled.wait(), SOON)
        waits = await (await runtime.session("chat")).pending()

        assert [wait.call_id for wait in waits] == ["chat.1.1.0", "chat.1.1.1"]
        assert await runtime.handle("p").status() == "waiting"
    async with place.runtime(agent, processes=[asked], clock=clock) as runtime:
        session = await runtime.session("chat")

        async def is_over() -> bool:
            return [wait.call_id for wait in await session.pending()] == ["chat.1.1.0"]

        await until(is_over)
        with pytest.raises(ProcessFailed, match="timed_out"):
            await runtime.handle("p").result(SOON)


class Stumbling(MemoryStore):
    """Its inbox cannot be read once."""

    stumbled = False

    async def inbox(self, sid: int) -> list[InboxRow]:
        if not self.stumbled:
            self.stumbled = True
            raise StoreUnavailable("the disk is away")
        return await super().inbox(sid)


async def test_a_turn_that_rested_because_the_store_was_in_trouble_goes_on() -> None:
    agent, lease = Agent(ScriptedModel(["one", "two"])), LeaseTerms(term=30, renewal=0.1)
    async with Runtime(Stumbling(MemoryRows()), agents=[agent], lease=lease, recover=False) as runtime:
        session = await runtime.session("chat")
        await session.run("first")
        with pytest.raises(StoreUnavailable):
            await session.run("second")

        result = await asyncio.wait_for(session.result("chat.2"), SOON)
        assert result.text == "two"
