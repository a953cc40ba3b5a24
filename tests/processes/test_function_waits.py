"""Sleeping, signals, time and chance in durable functions."""

from __future__ import annotations

import random
import uuid
from typing import Any

import msgspec
import pytest

from perdure import ProcessContext, process
from perdure.errors import InvalidInput, ProcessFailed, TimedOut
from perdure.model.record import Done
from perdure.model.write import SendSignal
from perdure.testing import VirtualClock
from tests.kit import Place, until
from tests.processes.functions import World, dying, journal_of, living, memory, parked, result

__all__ = ["memory"]

Ctx = ProcessContext[World]

DAY = 86_400


@process
async def sleeping(ctx: Ctx, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "awake"


@process
async def calling(ctx: Ctx, count: int = 1) -> list[Any]:
    return [await ctx.wait_signal("go") for _ in range(count)]


# ---------------------------------------------------------------------- sleeping


async def test_a_long_sleep_is_a_row_and_ends_in_whatever_life(memory: Place) -> None:
    clock = VirtualClock()
    async with dying(memory, sleeping, clock=clock) as runtime:
        row = await parked(await runtime.start(sleeping, {"seconds": 3 * DAY}, id="p"))
        assert row.owner is None
        await until(lambda: len(runtime._supervisor) == 0)
    clock.advance(3 * DAY)
    async with living(memory, sleeping, clock=clock) as runtime:
        assert await result(runtime.handle("p")) == "awake"


async def test_a_sleep_is_not_over_before_its_time(memory: Place) -> None:
    clock = VirtualClock()
    async with living(memory, sleeping, clock=clock) as runtime:
        handle = await runtime.start(sleeping, {"seconds": 60})
        await parked(handle)
        clock.advance(59)
        with pytest.raises(TimedOut):
            await handle.result(0.6)
        clock.advance(1)

        assert await result(handle) == "awake"


@pytest.mark.parametrize("seconds", [0, 0.01])
async def test_short_sleeps_are_not_written_down_by_themselves(place: Place, seconds: float) -> None:
    async with living(place, sleeping) as runtime:
        handle = await runtime.start(sleeping, {"seconds": seconds})

        assert await result(handle) == "awake"
        assert "process.waiting" not in [e.type async for e in handle.events()]


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "1"])
async def test_a_sleep_that_means_nothing_is_refused(memory: Place, seconds: Any) -> None:
    @process
    async def odd(ctx: Ctx) -> None:
        await ctx.sleep(seconds)

    async with living(memory, odd) as runtime:
        with pytest.raises(ProcessFailed, match="sleep for 0 to"):
            await result(await runtime.start(odd))


# ---------------------------------------------------------------------- jumps of the clock


JUMPS = pytest.mark.parametrize("jump", [7 * DAY, -200], ids=["forwards", "backwards"])


@JUMPS
async def test_a_jump_of_the_wall_clock_neither_ends_a_parked_sleep_nor_prolongs_it(memory: Place, jump: int) -> None:
    clock = VirtualClock()
    async with living(memory, sleeping, clock=clock) as runtime:
        handle = await runtime.start(sleeping, {"seconds": 600})
        await parked(handle)
        clock.advance(300)
        clock.jump(jump)
        clock.advance(299)
        with pytest.raises(TimedOut):
            await handle.result(0.6)
        clock.advance(1)

        assert await result(handle) == "awake"


@process
async def patient(ctx: Ctx) -> str:
    """A signal in the middle takes the process up again, with the rest of its time still to come."""

    async def disturbed() -> None:
        await ctx.wait_signal("hello")
        await ctx.wait_signal("never")

    await ctx.any(ctx.sleep(600), disturbed())
    return "awake"


@JUMPS
async def test_nor_that_of_a_process_that_comes_back_meanwhile(memory: Place, jump: int) -> None:
    clock = VirtualClock()
    async with living(memory, patient, clock=clock) as runtime:
        handle = await runtime.start(patient)
        await parked(handle)
        clock.advance(300)
        clock.jump(jump)
        await handle.signal("hello")
        await until_parked_again(runtime, handle)
        clock.advance(299)
        with pytest.raises(TimedOut):
            await handle.result(0.6)
        clock.advance(1)

        assert await result(handle) == "awake"


async def until_parked_again(runtime: Any, handle: Any) -> None:
    async def again() -> bool:
        return [e.type async for e in handle.events()].count("process.waiting") == 2

    await until(again)


# ---------------------------------------------------------------------- signals


async def test_a_signal_that_came_before_the_function_began_is_not_lost(place: Place) -> None:
    async with place.runtime() as passive:
        pass
    async with living(place, calling, recover=False) as runtime:
        runtime._work.passive = True
        handle = await runtime.start(calling, id="p")
        await handle.signal("go", "early")
    async with living(place, calling) as runtime:
        assert await result(runtime.handle("p")) == ["early"]
    assert passive is not runtime


async def test_signals_of_one_name_are_taken_in_the_order_in_which_they_came(place: Place) -> None:
    async with living(place, calling) as runtime:
        handle = await runtime.start(calling, {"count": 3})
        for number in (1, 2, 3):
            await handle.signal("go", number)

        assert await result(handle) == [1, 2, 3]


async def test_a_signal_told_twice_under_one_key_comes_once(place: Place) -> None:
    async with living(place, calling) as runtime:
        handle = await runtime.start(calling, {"count": 2})
        for payload, key in (("a", "1"), ("a", "1"), ("b", "2")):
            await handle.signal("go", payload, key=key)

        assert await result(handle) == ["a", "b"]


async def test_a_signal_is_taken_once_whatever_dies_in_between(place: Place) -> None:
    async with dying(place, calling) as runtime:
        handle = await runtime.start(calling, {"count": 3}, id="p")
        await parked(handle)
        await handle.signal("go", 1)
        await until_waits(handle, "2")
    async with dying(place, calling) as runtime:
        handle = runtime.handle("p")
        await handle.signal("go", 2)
        await until_waits(handle, "3")
    async with living(place, calling) as runtime:
        handle = runtime.handle("p")
        await handle.signal("go", 3)

        assert await result(handle) == [1, 2, 3]


async def until_waits(handle: Any, key: str) -> None:
    """Wait until it is parked at that call."""

    async def there() -> bool:
        return [wait.key for wait in (await handle.record()).record.waits] == [key]

    await until(there)


async def test_signals_of_other_names_wait_for_their_turn(place: Place) -> None:
    @process
    async def ordered(ctx: Ctx) -> list[Any]:
        return [await ctx.wait_signal("first"), await ctx.wait_signal("second")]

    async with living(place, ordered) as runtime:
        handle = await runtime.start(ordered)
        await handle.signal("second", 2)
        await parked(handle)
        await handle.signal("first", 1)

        assert await result(handle) == [1, 2]


async def test_two_branches_that_wait_for_one_name_get_one_signal_each(place: Place) -> None:
    @process
    async def twins(ctx: Ctx) -> list[Any]:
        got = await ctx.gather(ctx.wait_signal("go"), ctx.wait_signal("go"))
        return [got, await ctx.wait_signal("go")]

    async with living(place, twins) as runtime:
        handle = await runtime.start(twins)
        await parked(handle)
        for number in (1, 2, 3):
            await handle.signal("go", number)
        got, last = await result(handle)

    assert sorted(got) == [1, 2]
    assert last == 3


async def test_a_branch_that_is_not_chosen_takes_no_signal(place: Place) -> None:
    @process
    async def choosing(ctx: Ctx) -> list[Any]:
        first = await ctx.any(ctx.wait_signal("a"), ctx.wait_signal("b"))
        return [list(first), await ctx.wait_signal("a" if first[0] else "b")]

    async with living(place, choosing) as runtime:
        early = await runtime.start(choosing, id="early")
        await early.signal("a", "A")
        await early.signal("b", "B")
        late = await runtime.start(choosing, id="late")
        await parked(late)
        await late.signal("b", "B")
        await late.signal("a", "A")
        found = [await result(early), await result(late)]

    for (which, payload), other in found:
        assert [payload, other] == (["B", "A"] if which else ["A", "B"])


async def test_nor_does_one_that_was_told_of_a_signal_in_the_same_moment(memory: Place) -> None:
    """Both signals are heard in one look, while the process is in memory: the second goes back to where it was."""

    @process
    async def choosing(ctx: Ctx) -> list[Any]:
        async def choose() -> list[Any]:
            which, first = await ctx.any(ctx.wait_signal("a"), ctx.wait_signal("b"))
            return [first, await ctx.wait_signal("a" if which else "b", timeout=1)]

        found, _ = await ctx.gather(choose(), ctx.step(ctx.deps.act, "busy"))
        return found

    world = World()
    world.open.clear()
    async with living(memory, choosing, deps=world) as runtime:
        handle = await runtime.start(choosing, id="p")
        await world.has_begun("busy")
        await runtime.store.write(SendSignal("p", "a", "A", "one", 1))
        told = await runtime.store.write(SendSignal("p", "b", "B", "two", 1))
        runtime._work.reconcile(told.row)
        world.open.set()

        assert sorted(await result(handle)) == ["A", "B"]


class Order(msgspec.Struct):
    number: int
    note: str = ""


async def test_typed_signals_become_what_they_are(place: Place) -> None:
    @process(signals={"order": Order})
    async def typed(ctx: Ctx) -> list[Any]:
        order = await ctx.wait_signal("order", Order)
        return [type(order).__name__, order.number]

    async with living(place, typed) as runtime:
        handle = await runtime.start(typed)
        with pytest.raises(InvalidInput, match="does not fit"):
            await handle.signal("order", {"number": "seven"})
        await handle.signal("order", {"number": 7})

        assert await result(handle) == ["Order", 7]


async def test_a_payload_that_does_not_fit_is_said_at_its_line_where_any_signal_may_come(place: Place) -> None:
    @process
    async def lenient(ctx: Ctx) -> list[Any]:
        try:
            await ctx.wait_signal("order", Order)
        except InvalidInput as error:
            return [str(error), (await ctx.wait_signal("order", Order)).number]
        return []

    async with living(place, lenient) as runtime:
        handle = await runtime.start(lenient)
        await handle.signal("order", [1])
        await handle.signal("order", {"number": 8})
        said, number = await result(handle)

    assert said.startswith("signal 'order' came with a payload that does not fit")
    assert number == 8


async def test_a_wait_that_ends_first_is_over_and_the_signal_is_for_the_next(memory: Place) -> None:
    clock = VirtualClock()

    @process
    async def hurried(ctx: Ctx) -> list[Any]:
        try:
            await ctx.wait_signal("go", timeout=60)
        except TimedOut as late:
            return [str(late), await ctx.wait_signal("go")]
        return []

    async with living(memory, hurried, clock=clock) as runtime:
        handle = await runtime.start(hurried)
        await parked(handle)
        clock.advance(60)
        await until_waits(handle, "2")
        await handle.signal("go", "late")

        assert await result(handle) == ["no signal 'go' came within 60 s", "late"]


async def test_a_signal_and_the_end_of_its_time_at_once_end_the_wait_one_way_only(place: Place) -> None:
    @process
    async def hurried(ctx: Ctx) -> list[Any]:
        taken, late = list[Any](), 0
        while len(taken) < 20:
            try:
                taken.append(await ctx.wait_signal("go", timeout=0))
            except TimedOut:
                late += 1
                await ctx.sleep(0.001)
        return taken

    async with living(place, hurried) as runtime:
        handle = await runtime.start(hurried)
        for number in range(20):
            await handle.signal("go", number)

        assert await result(handle) == list(range(20))


# ---------------------------------------------------------------------- time and chance


async def test_time_and_chance_are_the_same_on_every_replay(place: Place) -> None:
    seen: list[Any] = []

    @process
    async def wondering(ctx: Ctx) -> list[Any]:
        def look() -> list[Any]:
            chance = ctx.random
            return [str(ctx.now()), ctx.random(), chance.choice("abc"), chance.randint(1, 6), str(ctx.uuid())]

        async def branch() -> list[Any]:
            return look()

        found = [look(), *await ctx.gather(branch(), branch()), look()]
        seen.append(found)
        await ctx.wait_signal("go")
        return found

    async with dying(place, wondering) as runtime:
        await parked(await runtime.start(wondering, id="p"))
    async with living(place, wondering) as runtime:
        await runtime.handle("p").signal("go")
        ended = await result(runtime.handle("p"))

    assert seen == [ended, ended]
    assert len({look[4] for look in ended}) == 4
    assert all(uuid.UUID(look[4]).version == 4 for look in ended)


async def test_chance_differs_from_process_to_process(memory: Place) -> None:
    @process
    async def rolling(ctx: Ctx) -> float:
        return ctx.random()

    state = random.getstate()
    async with living(memory, rolling) as runtime:
        rolled = {await result(await runtime.start(rolling)) for _ in range(20)}

    assert len(rolled) == 20
    assert random.getstate() == state


async def test_the_time_that_a_function_saw_is_written_with_what_came_of_it(place: Place) -> None:
    @process
    async def dated(ctx: Ctx) -> str:
        day = ctx.now().date()
        return await ctx.step(str, day, recovery="rerun")

    async with living(place, dated) as runtime:
        handle = await runtime.start(dated)
        await result(handle)
        records = await journal_of(runtime, handle)

    assert [r.kind for r in records if isinstance(r, Done)] == ["now", "step"]
