"""Machines whose wall clocks disagree, constantly: nothing is lost and nothing happens twice.

Who owns what rests on locks, generations and everybody's own monotonic clock. What is due at a time comes when the
clock of whoever looks says so: early where that is ahead, late where it is behind, and once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.engine.journal import load
from perdure.engine.lease import LeaseTerms
from perdure.errors import AlreadyAnswered
from perdure.model.record import Ended, Faltered
from perdure.model.tool import OutcomeUnknown
from perdure.testing import FunctionModel, VirtualClock
from perdure.testing.clock import EPOCH_MS
from perdure.testing.crash import Crash, ForkServer, play
from tests.crash.children import child, count, folder, rows
from tests.crash.outcomes import Fate
from tests.crash.process_worker import HOUR, Outside
from tests.crash.skewed import ahead, behind
from tests.crash.test_matrix import DEATHS, KILLS, check
from tests.kit import SOON, Place, crash, overloaded, until
from tests.processes.functions import World, dying, living, parked, result
from tests.runtime.test_clock import looking

__all__ = ["folder"]

MINUTES = 600
LONG = LeaseTerms(term=30_000, renewal=10_000)
"""Hours may pass on one of the clocks without anybody being thought dead."""
WRITES = [k for k in KILLS if str(k.id).split()[1] in ("beat", "accept", "append", "resolve", "commit", "retire")]


def at(skew: float) -> VirtualClock:
    """A clock that is wrong by so many seconds."""
    return VirtualClock(EPOCH_MS + round(skew * 1000))


# ---------------------------------------------------------------------- every kill, from one machine to another


@pytest.mark.parametrize(("death", "fate"), DEATHS)
def test_kill_on_a_machine_ahead_has_its_ruled_fate(death: Crash, fate: Fate) -> None:
    check(play(ahead, [death], store="sqlite", timeout=10), fate)


@pytest.mark.parametrize(("death", "fate"), DEATHS)
def test_kill_on_a_machine_behind_has_its_ruled_fate(death: Crash, fate: Fate) -> None:
    check(play(behind, [death], store="memory", timeout=10), fate)


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(ahead, timeout=15) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize(("death", "fate"), WRITES)
def test_real_kill_on_a_machine_ahead_has_its_ruled_fate(forks: ForkServer, death: Crash, fate: Fate) -> None:
    check(forks.play([death]), fate)


# ---------------------------------------------------------------------- deadlines of turns


class Shop:
    """An agent that orders once and then says how that ended, and what it has done so far."""

    def __init__(self) -> None:
        self.asked = 0
        self.keys: list[str] = []

    def agent(self) -> Agent[str]:
        @tool(deferred=True)
        async def order(ctx: ToolContext[None]) -> None:
            self.keys.append(ctx.defer(MINUTES))

        def answer(request: ModelRequest) -> Any:
            self.asked += 1
            results = [r for m in request.messages for r in m.tool_results]
            return results[0].status if results else [ToolCall("a", "order")]

        return Agent(FunctionModel(answer), name="shop", tools=[order])


async def expired_once(runtime: Runtime, shop: Shop) -> None:
    """The deadline came, the turn said so and committed, and whoever answers now is told that it is too late."""
    session = await runtime.session("chat")
    result = await session.result("chat.1")
    assert [call.outcome for call in result.tool_calls] == [OutcomeUnknown("nobody answered in time")]
    assert (result.text, shop.asked, len(shop.keys)) == ("outcome_unknown", 2, 1)
    with pytest.raises(AlreadyAnswered):
        await runtime.resolve(shop.keys[0], "here it is")
    row = await runtime.store.session("chat")
    assert row is not None
    assert (row.state, row.head, await runtime.store.inbox(row.sid)) == ("idle", 1, [])
    told = [record for _, record in await load(runtime.store, row.sid, 1, 1) if isinstance(record, Ended)]
    assert len(told) == 1


async def committed(runtime: Runtime) -> bool:
    row = await runtime.store.session("chat")
    return row is not None and row.head == 1


async def test_a_deadline_comes_early_where_another_machine_is_ahead_and_once(file: Place) -> None:
    shop, here, there = Shop(), at(0), at(HOUR)
    async with file.runtime(shop.agent(), clock=here, lease=LONG) as one:
        assert (await (await one.session("chat")).run("go")).waiting
        async with file.runtime(shop.agent(), clock=there, lease=LONG) as two:
            await until(lambda: committed(two))
            here.advance(2 * HOUR)
            await looking(one)()
            await expired_once(one, shop)
            await expired_once(two, shop)


async def test_a_deadline_comes_in_time_where_another_machine_is_behind_and_once(file: Place) -> None:
    shop, here, there = Shop(), at(0), at(-HOUR)
    async with (
        file.runtime(shop.agent(), clock=here, lease=LONG) as one,
        file.runtime(shop.agent(), clock=there, lease=LONG) as two,
    ):
        assert (await (await one.session("chat")).run("go")).waiting
        await looking(two)()
        assert not await committed(two)
        here.advance(MINUTES)
        await until(lambda: committed(one))
        there.advance(2 * HOUR)
        await looking(two)()
        await expired_once(one, shop)
        await expired_once(two, shop)


async def test_a_deadline_that_a_dead_machine_ahead_had_set_comes_late_and_once(file: Place) -> None:
    shop, here = Shop(), at(0)
    one = file.runtime(shop.agent(), clock=at(HOUR), lease=LONG)
    await one.__aenter__()
    assert (await (await one.session("chat")).run("go")).waiting
    await crash(one)
    async with file.runtime(shop.agent(), clock=here, lease=LONG) as two:
        here.advance(HOUR + MINUTES - 1)
        await looking(two)()
        assert not await committed(two)
        here.advance(1)
        await until(lambda: committed(two))
        here.advance(2 * HOUR)
        await looking(two)()
        await expired_once(two, shop)


# ---------------------------------------------------------------------- retries


@pytest.mark.parametrize(("skew", "late"), [(HOUR, 3600), (-HOUR, 0)], ids=["ahead", "behind"])
async def test_a_retry_that_a_dead_machine_had_put_off_is_made_once(file: Place, skew: int, late: int) -> None:
    """No later than retries are made at all, an hour, whatever hour it was there."""
    attempts: list[int] = []

    def answer(request: ModelRequest) -> str:
        attempts.append(request.attempt)
        if request.attempt == 1:
            raise overloaded(after=10)
        return "there"

    agent, before, after = Agent(FunctionModel(answer), name="shop"), at(skew), at(0)
    one = file.runtime(agent, clock=before, lease=LONG, park_after=None)
    await one.__aenter__()
    await (await one.session("chat")).send("go")
    await before.wait_sleeping()
    await crash(one)
    async with file.runtime(agent, clock=after, lease=LONG, park_after=None) as two:
        session = await two.session("chat")
        if late:
            await after.wait_sleeping()
            after.advance(late - 0.1)
            assert (after.sleeping, attempts) == (1, [1])
            after.advance(0.1)
        told = await asyncio.wait_for(session.result("chat.1"), SOON)
        row = await two.store.session("chat")
        assert row is not None
        records = [record for _, record in await load(two.store, row.sid, 1, 1)]

    assert (told.text, attempts) == ("there", [1, 2])
    assert [r.attempt for r in records if isinstance(r, Faltered)] == [1]


# ---------------------------------------------------------------------- processes


@process
async def napping(ctx: ProcessContext[World]) -> str:
    await ctx.sleep(MINUTES)
    return await ctx.step(ctx.deps.act, "woken")


async def test_a_sleep_ends_early_where_another_machine_is_ahead_and_once(file: Place) -> None:
    world, here = World(), at(0)
    async with living(file, napping, clock=here, lease=LONG, deps=world) as one:
        handle = await one.start(napping, id="p")
        await parked(handle)
        async with living(file, napping, clock=at(HOUR), lease=LONG, deps=world) as two:
            assert await result(two.handle("p")) == "woken"
            here.advance(2 * HOUR)
            await looking(one)()
            assert await result(handle) == "woken"
            row = await one.processes.get("p")

    assert world.count == {"woken": 1}
    assert (row.attempts, row.status) == (1, "completed")


async def test_a_sleep_that_a_dead_machine_ahead_had_begun_ends_late_and_once(file: Place) -> None:
    world, here = World(), at(0)
    async with dying(file, napping, clock=at(HOUR), lease=LONG, deps=world) as one:
        await parked(await one.start(napping, id="p"))
    async with living(file, napping, clock=here, lease=LONG, deps=world) as two:
        here.advance(HOUR + MINUTES - 1)
        await looking(two)()
        assert world.count == {}
        here.advance(1)
        assert await result(two.handle("p")) == "woken"

    assert world.count == {"woken": 1}


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
async def test_processes_of_a_real_machine_behind_are_woken_once_by_one_ahead(folder: Path) -> None:
    outside, total = Outside(folder), 40
    with child("ahead", folder) as early, child("doze", folder, total) as late:
        assert (early.line(), late.line()) == ("ready", "ready")
        (folder / "go").touch()
        told = await asyncio.to_thread(late.line)
        assert late.wait() == 0
        (folder / "stop").touch()
        assert early.wait() == 0
        who = Counter(line.incarnation for line in outside.lines("add"))
        found = await rows(outside)

    assert told == str(sum(range(total)))
    assert count(outside, "add") == {f"p-{n:03} {n}": 1 for n in range(total)}
    assert who == {early.pid: total}, "nobody else thought it was time"
    assert {row.status for row in found.values()} == {"completed"}
