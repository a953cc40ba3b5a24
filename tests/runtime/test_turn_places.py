"""`Runtime(turns=…)`: how many turns are worked on at once, what waits on disk, and what does not count."""

import asyncio
from typing import Any

import pytest

from perdure import Agent, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.errors import InvalidDefinition
from perdure.model.llm import ModelRequest
from perdure.model.outcome import Finished, Waiting
from perdure.model.tool import Cancelled, Ok
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, crash, until, untyped


class Gated:
    """An agent whose turns end when they are let: it counts those at work."""

    def __init__(self) -> None:
        self.gate, self.now, self.most = asyncio.Event(), 0, 0
        self.asked: list[str] = []

    async def answer(self, request: ModelRequest) -> str:
        self.now += 1
        self.most = max(self.most, self.now)
        self.asked.append(request.messages[-1].text)
        try:
            await self.gate.wait()
        finally:
            self.now -= 1
        return "ok"

    def agent(self) -> Agent[str]:
        return Agent(FunctionModel(self.answer), name="gated")


@pytest.mark.parametrize("recover", [True, False])
async def test_inputs_beyond_the_bound_wait_on_disk_and_run_in_order(place: Place, recover: bool) -> None:
    gated = Gated()
    async with place.runtime(gated.agent(), turns=2, recover=recover) as runtime:
        sessions = [await runtime.session(f"s{number}") for number in range(8)]
        for number, session in enumerate(sessions):
            await session.send(str(number), key="k")
        runs = [asyncio.create_task(session.run(str(n), key="k")) for n, session in enumerate(sessions)]
        await until(lambda: gated.now == 2)
        rows = [await runtime.store.session(f"s{number}") for number in range(8)]
        tasks = len(runtime._turns.cache.tasks)
        gated.gate.set()
        results = [await asyncio.wait_for(run, SOON) for run in runs]
        assert await runtime.wait_idle(SOON)
        assert runtime._turns.places.used == 0

    assert [row.owner is None for row in rows if row is not None] == [False, False, *[True] * 6]
    assert tasks == 2
    assert [result.outcome for result in results] == [Finished("ok")] * 8
    assert gated.most == 2
    assert gated.asked == [str(number) for number in range(8)]


async def test_many_inputs_at_once_keep_to_the_bound(place: Place) -> None:
    gated = Gated()
    async with place.runtime(gated.agent(), turns=3) as runtime:
        sessions = [await runtime.session(f"s{number % 10}") for number in range(40)]
        receipts = await asyncio.gather(*[session.send("hi") for session in sessions])
        await until(lambda: gated.now == 3)
        gated.gate.set()
        results = [await receipt.result(SOON) for receipt in receipts]
        await until(lambda: runtime._turns.places.used == 0)

    assert [result.outcome for result in results] == [Finished("ok")] * 40
    assert gated.most == 3


async def test_a_parked_turn_does_not_count(place: Place) -> None:
    @tool(approval="ask")
    async def sign() -> str:
        return "signed"

    agent = Agent(ScriptedModel([[ToolCall("s", "sign")], "other", "done"]), tools=[sign])
    async with place.runtime(agent, turns=1) as runtime:
        first = await runtime.session("first")
        parked = await first.run("go")
        other = await (await runtime.session("other")).run("go")
        await first.approve("first.1.1.0")
        done = await first.result("first.1")

    assert isinstance(parked.outcome, Waiting)
    assert (other.text, done.text) == ("other", "done")


@pytest.mark.parametrize("park_after", [None, 0])
async def test_turns_that_wait_for_their_children_give_their_places_up(place: Place, park_after: float | None) -> None:
    """Three levels of subagents below the first, with one place."""
    level = Agent(ScriptedModel(["bottom"]), name="level3")
    for number in (2, 1, 0):
        calls = [[ToolCall("c", f"level{number + 1}", {"task": "go"})], f"level {number}"]
        level = Agent(ScriptedModel(calls), name=f"level{number}", tools=[level.as_tool(description="The next level.")])
    async with place.runtime(level, turns=1, park_after=park_after) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)
        await until(lambda: runtime._turns.places.used == 0)

    assert result.text == "level 0"
    assert result.tool_calls[0].outcome == Ok("level 1")


async def test_a_tool_that_waits_for_another_session_or_a_process_gives_the_place_of_its_turn_up(place: Place) -> None:
    rooms = list[Runtime]()

    @process
    async def chore(ctx: ProcessContext[None]) -> str:
        session = await rooms[0].session("of the process", agent="other")
        return (await session.run("go")).text

    @tool
    async def ask(ctx: ToolContext[None]) -> str:
        other = await (await rooms[0].session("other", agent="other")).run("go")
        return f"{other.text}, {await (await ctx.start(chore)).result()}"

    agents = [
        Agent(ScriptedModel([[ToolCall("a", "ask")], "done"]), name="asking", tools=[ask]),
        Agent(ScriptedModel(["one", "two"]), name="other"),
    ]
    async with place.runtime(*agents, processes=[chore], turns=1) as runtime:
        rooms.append(runtime)
        result = await asyncio.wait_for((await runtime.session("s", agent="asking")).run("go"), SOON)

    assert result.tool_calls[0].outcome == Ok("one, two")


async def test_a_waiting_turn_can_be_cancelled_at_once(place: Place) -> None:
    gated = Gated()
    async with place.runtime(gated.agent(), turns=1) as runtime:
        await (await runtime.session("first")).send("hi")
        await until(lambda: gated.now == 1)
        session = await runtime.session("second")
        receipt = await session.send("hi")
        await session.cancel()
        cancelled = await receipt.result(SOON)
        gated.gate.set()
        await runtime.wait_idle(SOON)
        assert runtime._turns.places.used == 0

    assert isinstance(cancelled.outcome, Cancelled)
    assert gated.asked == ["hi"]


async def test_what_waited_at_a_crash_is_begun_by_the_next_runtime_and_suspected_of_nothing(place: Place) -> None:
    gated = Gated()
    for _ in range(2):
        runtime = await place.runtime(gated.agent(), turns=1).__aenter__()
        await (await runtime.session("first")).send("hi", key="first")
        await until(lambda: gated.now == 1)
        await (await runtime.session("second")).send("hi", key="second")
        await crash(runtime)
    gated.gate.set()
    async with place.runtime(gated.agent(), turns=1) as runtime:
        result = await (await runtime.session("second")).result("second.1")
        row = await runtime.store.session("second")

    assert result.text == "ok"
    assert row is not None
    assert row.takeovers == 0


async def test_draining_leaves_waiting_turns_to_the_next_runtime(place: Place) -> None:
    gated = Gated()
    async with place.runtime(gated.agent(), turns=1) as runtime:
        first = await (await runtime.session("first")).send("hi")
        await until(lambda: gated.now == 1)
        await (await runtime.session("second")).send("hi")
        draining = asyncio.create_task(runtime.drain(SOON))
        await asyncio.sleep(0)
        gated.gate.set()
        assert await draining
        assert (await first.result()).text == "ok"
    async with place.runtime(gated.agent(), turns=1) as runtime:
        assert (await (await runtime.session("second")).result("second.1")).text == "ok"


@pytest.mark.parametrize("wrong", [0, -1, None, 1.5, True])
def test_a_bound_that_is_no_number_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidDefinition, match="turns="):
        Runtime("memory", turns=untyped(wrong))
