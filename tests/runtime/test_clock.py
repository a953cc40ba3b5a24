"""Time: the virtual clock itself, and wall clocks that jump."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, Budget, ModelRequest, Retry, ToolCall, ToolContext, tool
from perdure.engine.lease import LeaseTerms
from perdure.model.outcome import BudgetSpent
from perdure.model.tool import Ok, OutcomeUnknown
from perdure.ports.host import Clock
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock
from tests.kit import SOON, Place, TellingModel, claimable, overloaded

HOUR = 3600

# ---------------------------------------------------------------------- the clock


async def test_time_stands_still_until_it_is_moved() -> None:
    clock: Clock = VirtualClock(start=1_000)
    sleeper = asyncio.create_task(clock.sleep(10))
    for _ in range(20):
        await asyncio.sleep(0)

    assert (clock.now(), clock.monotonic(), sleeper.done()) == (1_000, 0.0, False)
    sleeper.cancel()


async def test_sleepers_wake_in_the_order_of_their_ends() -> None:
    clock = VirtualClock(start=0)
    woken: list[tuple[str, int]] = []

    async def sleep(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.now()))

    tasks = [asyncio.create_task(sleep(name, s)) for name, s in (("late", 3), ("early", 1), ("also early", 1))]
    await clock.wait_sleeping(3)
    clock.advance(0.9)
    assert clock.sleeping == 3
    clock.advance(0.1)
    await asyncio.wait(tasks[1:])
    clock.advance(5)
    await asyncio.wait(tasks)

    assert woken == [("early", 1_000), ("also early", 1_000), ("late", 6_000)]


async def test_a_jump_moves_wall_time_alone() -> None:
    clock = VirtualClock(start=0)
    sleeper = asyncio.create_task(clock.sleep(10))
    await clock.wait_sleeping()
    clock.jump(HOUR)
    assert (clock.now(), clock.monotonic(), clock.sleeping) == (3_600_000, 0.0, 1)
    clock.jump(-2 * HOUR)
    assert clock.now() == -3_600_000
    clock.advance(10)
    await asyncio.wait_for(sleeper, SOON)

    assert clock.monotonic() == 10


async def test_time_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match=r"jump\(-1\)"):
        VirtualClock().advance(-1)


async def test_an_automatic_clock_jumps_to_the_next_end() -> None:
    clock = VirtualClock(start=0, auto=True)
    ends: list[int] = []

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        ends.append(clock.now())

    async with asyncio.timeout(SOON):
        await asyncio.gather(sleep(3 * HOUR), sleep(1), sleep(HOUR))

    assert ends == [1_000, 3_600_000, 10_800_000]


async def test_an_automatic_clock_waits_while_the_loop_is_busy() -> None:
    clock = VirtualClock(auto=True)
    sleeper = asyncio.create_task(clock.sleep(1))
    busy = asyncio.create_task(spin())
    await asyncio.sleep(0.03)
    busy.cancel()
    assert not sleeper.done()

    await asyncio.wait_for(sleeper, SOON)


async def spin() -> None:
    for _ in itertools.count():
        await asyncio.sleep(0)


async def test_a_sleeper_that_gives_up_is_forgotten() -> None:
    clock = VirtualClock(auto=True)
    sleeper = asyncio.create_task(clock.sleep(10))
    await clock.wait_sleeping()
    sleeper.cancel()
    await asyncio.wait({sleeper})

    assert clock.sleeping == 0
    await asyncio.wait_for(clock.sleep(1), SOON)
    assert clock.monotonic() == 1


async def test_a_sleep_of_nothing_is_a_pass_of_the_loop() -> None:
    clock = VirtualClock()
    await clock.sleep(0)
    await clock.sleep(-1)

    assert clock.monotonic() == 0


# ---------------------------------------------------------------------- jumps


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_neither_hurries_nor_delays_a_retry_of_the_model(place: Place, jump: int) -> None:
    clock = VirtualClock()
    async with place.runtime(Agent(ScriptedModel([overloaded(after=10), "there"])), clock=clock) as runtime:
        receipt = await (await runtime.session("chat")).send("go")
        await clock.wait_sleeping()
        clock.jump(jump)
        clock.advance(9.9)
        assert clock.sleeping == 1
        clock.advance(0.1)

        assert (await receipt.result(SOON)).text == "there"


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_neither_hurries_nor_delays_a_retry_of_a_tool(place: Place, jump: int) -> None:
    clock = VirtualClock()

    @tool(retries=1)
    async def flaky(ctx: ToolContext[None]) -> str:
        if ctx.attempt == 1:
            raise Retry("busy", after=10)
        return "ok"

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "flaky")], "x"]), tools=[flaky]), clock=clock) as r:
        receipt = await (await r.session("chat")).send("go")
        await clock.wait_sleeping()
        clock.jump(jump)
        clock.advance(9.9)
        assert clock.sleeping == 1
        clock.advance(0.1)

        assert (await receipt.result(SOON)).tool_calls[0].outcome == Ok("ok")


def orderer(seconds: float) -> Agent[str]:
    @tool(deferred=True)
    async def order(ctx: ToolContext[None]) -> None:
        ctx.defer(seconds)

    return Agent(ScriptedModel([[ToolCall("a", "order")], "done"]), tools=[order])


@pytest.mark.parametrize("jump", [2 * HOUR, -HOUR])
async def test_a_jump_neither_ends_nor_prolongs_a_deferred_call(place: Place, jump: int) -> None:
    clock = VirtualClock()
    async with place.runtime(orderer(4 * HOUR), clock=clock) as runtime:
        session = await runtime.session("chat")
        look = looking(runtime)
        await session.run("go")
        clock.advance(3 * HOUR)
        await look()
        clock.jump(jump)
        await look()
        clock.advance(HOUR - 1)
        await look()
        assert (await session.result("chat.1")).waiting
        clock.advance(1)
        await look()
        result = await asyncio.wait_for(session.result("chat.1"), SOON)

        assert result.tool_calls[0].outcome == OutcomeUnknown("nobody answered in time")


def looking(runtime: Any) -> Callable[[], Awaitable[None]]:
    """Have the Runtime poll its store now, instead of within a quarter of a second."""
    poll: Callable[[], Awaitable[None]] = runtime._watcher.poll
    return poll


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_costs_no_ownership(file: Place, jump: int) -> None:
    """Two runtimes on one file, one of whose clocks jumps: neither robs the other."""
    here, there = VirtualClock(), VirtualClock()
    model = TellingModel()
    terms = LeaseTerms(term=30, renewal=10)
    async with (
        file.runtime(Agent(model), clock=here, lease=terms) as one,
        file.runtime(Agent(ScriptedModel([])), clock=there, lease=terms) as two,
    ):
        receipt = await (await one.session("chat")).send("go")
        await model.next()
        here.jump(jump)
        there.jump(-jump)
        await claimable(two._worker, two.store)
        rows, gone = await claimable(two._worker, two.store)
        model.say("mine")

        assert (rows, gone) == ([], {})
        assert (await receipt.result(SOON)).text == "mine"


async def test_a_silent_owner_is_relieved_only_after_its_term(file: Place) -> None:
    here, there = VirtualClock(), VirtualClock()
    model = TellingModel()
    terms = LeaseTerms(term=30_000, renewal=10_000)  # in real time it never speaks again
    async with file.runtime(Agent(model), clock=here, lease=terms, grace=0) as one:
        await (await one.session("chat")).send("go")
        await model.next()
        async with file.runtime(Agent(ScriptedModel(["relieved"])), clock=there, lease=terms) as two:
            await claimable(two._worker, two.store)
            there.advance(29_999)
            assert await claimable(two._worker, two.store) == ([], {})
            there.advance(2)
            rows, gone = await claimable(two._worker, two.store)

            assert [row.id for row in rows] == ["chat"]
            assert set(gone) == {one._worker.id}


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_spends_no_budget_of_seconds(place: Place, jump: int) -> None:
    clock = VirtualClock()

    @tool
    async def look() -> str:
        clock.jump(jump)
        return "seen"

    agent = Agent(ScriptedModel([[ToolCall("a", "look")], "done"]), tools=[look], budget=Budget(seconds=60))
    async with place.runtime(agent, clock=clock) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

        assert result.text == "done"


async def test_time_that_passes_does_spend_it(place: Place) -> None:
    clock = VirtualClock()

    @tool
    async def work() -> str:
        clock.advance(61)
        return "worked"

    def model(request: ModelRequest) -> Any:
        return [ToolCall("a", "work")]

    agent = Agent(FunctionModel(model), tools=[work], budget=Budget(seconds=60))
    async with place.runtime(agent, clock=clock) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

        assert result.outcome == BudgetSpent("seconds", 60)
        assert len(result.tool_calls) == 1


async def test_an_hour_of_sleep_does_not_cost_a_turn(place: Place) -> None:
    """A laptop that was suspended: the lease ran out, nobody took over, and the next call makes sure and runs."""
    clock = VirtualClock()

    @tool
    async def look() -> str:
        return "seen"

    model = TellingModel()
    async with place.runtime(Agent(model, tools=[look]), clock=clock) as runtime:
        receipt = await (await runtime.session("chat")).send("go")
        await model.next()
        clock.advance(HOUR)
        model.say([ToolCall("a", "look")], "done")

        assert (await receipt.result(SOON)).tool_calls[0].outcome == Ok("seen")
