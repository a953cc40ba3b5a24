"""`gather`, `any` and `all`: branches of durable functions, and what becomes of those that nobody wants any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import ProcessContext, process
from perdure.errors import ForeignTask, OutcomeUnknown, ProcessFailed, TimedOut
from perdure.model.record import Done
from perdure.testing import VirtualClock
from tests.kit import Place, until, until_waits_for
from tests.processes.functions import World, dying, journal_of, living, memory, parked, result

__all__ = ["memory"]

Ctx = ProcessContext[World]


# ---------------------------------------------------------------------- gather


async def test_results_come_in_order_and_every_branch_has_keys_of_its_own(place: Place) -> None:
    async def leaf(ctx: Ctx, name: str) -> str:
        await ctx.step(ctx.deps.act, f"{name} 1")
        return await ctx.step(ctx.deps.act, f"{name} 2")

    @process
    async def gathering(ctx: Ctx) -> Any:
        return await ctx.gather(leaf(ctx, "a"), ctx.gather(leaf(ctx, "b"), leaf(ctx, "c")), ctx.sleep(0))

    world = World()
    async with living(place, gathering, deps=world) as runtime:
        handle = await runtime.start(gathering)

        assert await result(handle) == ["a 2", ["b 2", "c 2"], None]
        keys = [r.key for r in await journal_of(runtime, handle) if isinstance(r, Done)]
    assert sorted(keys) == ["1.0.1", "1.0.2", "1.1.1.0.1", "1.1.1.0.2", "1.1.1.1.1", "1.1.1.1.2", "1.2.1"]
    assert world.count == {f"{name} {n}": 1 for name in "abc" for n in (1, 2)}


async def test_a_gather_of_nothing_is_nothing_and_any_needs_something(place: Place) -> None:
    @process
    async def empty(ctx: Ctx) -> list[Any]:
        await ctx.gather()
        await ctx.all()
        await ctx.any()
        return []

    async with living(place, empty) as runtime:
        with pytest.raises(ProcessFailed, match=r"ctx\.any needs at least one branch"):
            await result(await runtime.start(empty))


async def test_gather_waits_for_all_and_raises_the_first_error_in_order(place: Place) -> None:
    world = World()

    async def fail(ctx: Ctx, name: str) -> None:
        await ctx.step(ctx.deps.act, name)
        raise ValueError(name)

    @process
    async def gathering(ctx: Ctx) -> list[Any]:
        both = await ctx.gather(fail(ctx, "x"), ctx.step(ctx.deps.act, "y"), return_exceptions=True)
        try:
            await ctx.gather(ctx.sleep(0.01), fail(ctx, "a"), fail(ctx, "b"))
        except ValueError as error:
            return [str(both[0]), both[1], str(error)]
        return []

    async with living(place, gathering, deps=world) as runtime:
        assert await result(await runtime.start(gathering)) == ["x", "y", "a"]


async def test_a_thousand_branches_wait_at_once(memory: Place) -> None:
    clock = VirtualClock()

    async def one(ctx: Ctx, number: int) -> int:
        await ctx.sleep(3600 + number % 7)
        return number

    @process
    async def many(ctx: Ctx) -> int:
        return sum(await ctx.gather(*(one(ctx, n) for n in range(1000))))

    async with living(memory, many, clock=clock) as runtime:
        handle = await runtime.start(many)
        assert len((await parked(handle)).record.waits) == 1000
        clock.advance(3600 + 7)

        assert await result(handle) == 499_500


# ---------------------------------------------------------------------- any and all


@process
async def racing(ctx: Ctx) -> list[Any]:
    which, value = await ctx.any(ctx.wait_signal("a"), ctx.wait_signal("b"), ctx.sleep(3600))
    await ctx.wait_signal("go")
    return [which, value]


async def test_the_chosen_branch_stays_chosen_on_replay(place: Place) -> None:
    async with dying(place, racing) as runtime:
        handle = await runtime.start(racing, id="p")
        await parked(handle)
        await handle.signal("b", "B")
        await until_waits_for(handle, "go")
        await handle.signal("a", "A")
    async with living(place, racing) as runtime:
        await runtime.handle("p").signal("go")

        assert await result(runtime.handle("p")) == [1, "B"]


async def test_any_passes_over_errors_and_raises_the_first_when_there_is_nothing_else(place: Place) -> None:
    async def fail(name: str) -> None:
        raise ValueError(name)

    @process
    async def racing(ctx: Ctx) -> list[Any]:
        first = await ctx.any(fail("a"), ctx.step(ctx.deps.act, "b"))
        try:
            await ctx.any(fail("x"), fail("y"))
        except ValueError as error:
            return [list(first), str(error)]
        return []

    async with living(place, racing, deps=World()) as runtime:
        assert await result(await runtime.start(racing)) == [[1, "b"], "x"]


async def test_all_is_given_up_by_the_first_error_and_drops_the_others(place: Place) -> None:
    async def fail(ctx: Ctx) -> None:
        await ctx.step(ctx.deps.act, "then")
        raise ValueError("no")

    @process
    async def trying(ctx: Ctx) -> str:
        try:
            await ctx.all(ctx.wait_signal("never"), fail(ctx))
        except ValueError as error:
            await ctx.wait_signal("go")
            return str(error)
        return ""

    world = World()
    async with living(place, trying, deps=world) as runtime:
        handle = await runtime.start(trying)
        await parked(handle)
        await handle.signal("go")

        assert await result(handle) == "no"
    assert world.done == ["then"]


async def test_all_that_go_well_are_all_results(place: Place) -> None:
    @process
    async def trying(ctx: Ctx) -> Any:
        return await ctx.all(ctx.step(ctx.deps.act, 1), ctx.step(ctx.deps.act, 2))

    async with living(place, trying, deps=World()) as runtime:
        assert await result(await runtime.start(trying)) == [1, 2]


# ---------------------------------------------------------------------- those that are dropped


async def loser(ctx: Ctx, how: str) -> None:
    """Waits, in one way or another, and cleans up when it is dropped."""
    try:
        if how == "in a step":
            await ctx.step(ctx.deps.act, "never")
        elif how == "in a wait":
            await ctx.wait_signal("never")
        elif how == "in branches":
            await ctx.gather(ctx.wait_signal("never"), ctx.sleep(3600))
        else:
            await asyncio.Event().wait()
    finally:
        await ctx.step(ctx.deps.act_now, f"cleaned up {how}")


HOW = pytest.mark.parametrize("how", ["in a step", "in a wait", "in branches", "in something of its own"])


@process
async def dropping(ctx: Ctx, how: str) -> list[Any]:
    which, _ = await ctx.any(loser(ctx, how), ctx.wait_signal("now"))
    told = await ctx.wait_signal("go")
    return [which, told]


@HOW
async def test_a_dropped_branch_is_cut_off_where_it_is_and_may_clean_up_durably(place: Place, how: str) -> None:
    world = World()
    world.open.clear()
    async with dying(place, dropping, deps=world) as runtime:
        handle = await runtime.start(dropping, {"how": how}, id="p")
        await handle.signal("now")
        await until_waits_for(handle, "go")
    async with living(place, dropping, deps=world) as runtime:
        await runtime.handle("p").signal("go", "on")

        assert await result(runtime.handle("p")) == [1, "on"]
    assert world.count == {f"cleaned up {how}": 1}


async def test_a_crash_in_the_clean_up_of_a_dropped_branch_is_made_good(place: Place) -> None:
    world = World()

    async def tidy(ctx: Ctx) -> None:
        try:
            await ctx.wait_signal("b")
        finally:
            await ctx.step(ctx.deps.act, "half", recovery="rerun")
            await ctx.step(ctx.deps.act, "whole")

    @process
    async def dropping(ctx: Ctx) -> Any:
        which, _ = await ctx.any(ctx.wait_signal("a"), tidy(ctx))
        return [which, await ctx.wait_signal("b")]

    world.open.clear()
    async with dying(place, dropping, deps=world) as runtime:
        handle = await runtime.start(dropping, id="p")
        await parked(handle)
        await handle.signal("a")
        await world.has_begun("half")
        await handle.signal("b", "kept")
    world.open.set()
    async with living(place, dropping, deps=world) as runtime:
        assert await result(runtime.handle("p")) == [0, "kept"]

    assert world.count == {"half": 1, "whole": 1}


async def test_a_branch_that_was_dropped_does_nothing_more_in_the_next_life(place: Place) -> None:
    """That it was dropped is on disk, that it was cut off is not: it was slow to end."""

    class Slow(World):
        async def act(self, what: Any = "act") -> Any:
            self.begun.append(what)
            if what == "slow":
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.Event().wait()
            self.done.append(what)
            return what

    @process
    async def dropping(ctx: Ctx) -> Any:
        async def choose() -> Any:
            slow = ctx.step(ctx.deps.act, "slow", recovery="rerun")
            return list(await ctx.any(slow, ctx.wait_signal("a")))

        async def write() -> Any:
            await ctx.wait_signal("b")
            return await ctx.step(ctx.deps.act, "written", recovery="rerun")

        return await ctx.gather(choose(), write())

    world = Slow()
    async with dying(place, dropping, deps=world) as runtime:
        handle = await runtime.start(dropping, id="p")
        await world.has_begun("slow")
        await handle.signal("a", "A")
        await handle.signal("b", "B")
        await until(lambda: "written" in world.begun)
    async with living(place, dropping, deps=world) as runtime:
        assert await result(runtime.handle("p")) == [[1, "A"], "written"]
    assert world.begun.count("slow") == 1


async def test_a_once_step_of_a_dropped_branch_leaves_no_trace_for_the_chosen_one(place: Place) -> None:
    @process
    async def dropping(ctx: Ctx) -> list[Any]:
        found = await ctx.any(ctx.step(ctx.deps.act, "slow"), ctx.wait_signal("a"))
        return [*found, await ctx.wait_signal("go")]

    world = World()
    world.open.clear()
    async with living(place, dropping, deps=world) as runtime:
        handle = await runtime.start(dropping)
        await world.has_begun("slow")
        await handle.signal("a", "A")
        await until_waits_for(handle, "go")
        await handle.signal("go", "G")

        assert await result(handle) == [1, "A", "G"]
        done = {r.key: r for r in await journal_of(runtime, handle) if isinstance(r, Done)}
    assert (done["1.0.1"].cut, done["1.0.1"].dropped) == (True, True)
    assert done["1.0.1"].unknown == "it was cancelled while it ran"


# ---------------------------------------------------------------------- not the way


async def test_a_task_of_asyncio_is_refused_with_advice(place: Place) -> None:
    @process
    async def foreign(ctx: Ctx) -> list[str]:
        said = []
        for attempt in (asyncio.gather(ctx.sleep(0), ctx.sleep(0)), asyncio.create_task(ctx.step(print))):
            try:
                await attempt
            except ForeignTask as error:
                said.append(str(error))
        try:
            await asyncio.to_thread(ctx.now)
        except ForeignTask as error:
            said.append(str(error))
        return said

    async with living(place, foreign) as runtime:
        said = await result(await runtime.start(foreign))

    assert len(said) == 3
    assert all("ctx.gather(…)" in each for each in said)


async def test_what_is_no_coroutine_is_refused(memory: Place) -> None:
    @process
    async def odd(ctx: Ctx) -> Any:
        future: Any = asyncio.get_running_loop().create_future()
        await ctx.gather(ctx.sleep(0), future)

    @process
    async def twice(ctx: Ctx) -> Any:
        same = ctx.sleep(0)
        await ctx.gather(same, same)

    async with living(memory, odd, twice) as runtime:
        with pytest.raises(ProcessFailed, match=r"ctx\.gather runs coroutines"):
            await result(await runtime.start(odd))
        with pytest.raises(ProcessFailed, match="the same coroutine twice"):
            await result(await runtime.start(twice))


async def test_a_time_limit_of_a_branch_is_a_sleep_beside_it(place: Place) -> None:
    @process
    async def patient(ctx: Ctx) -> list[Any]:
        which, _ = await ctx.any(ctx.step(ctx.deps.act, "slow"), ctx.sleep(0.01))
        try:
            await ctx.wait_signal("go", timeout=0.01)
        except TimedOut:
            return [which, "late"]
        return []

    world = World()
    world.open.clear()
    async with living(place, patient, deps=world) as runtime:
        assert await result(await runtime.start(patient)) == [1, "late"]


# ---------------------------------------------------------------------- two branches, killed


@process
async def two_of_them(ctx: Ctx) -> list[Any]:
    async def branch(name: str) -> list[Any]:
        found: list[Any] = []
        for number in (1, 2):
            try:
                found.append(await ctx.step(ctx.deps.act, f"{name}{number}", recovery="once"))
            except OutcomeUnknown:
                found.append(None)
        return found

    return [*await ctx.gather(branch("a"), branch("b"))]


@pytest.mark.parametrize("shut", ["a1", "a2", "b1", "b2"])
async def test_a_branch_that_was_cut_off_does_not_disturb_the_other(place: Place, shut: str) -> None:
    class Holding(World):
        async def act(self, what: Any = "act") -> Any:
            self.begun.append(what)
            if what == shut and self.begun.count(what) == 1:
                await asyncio.Event().wait()
            self.done.append(what)
            return what

    world = Holding()
    async with dying(place, two_of_them, deps=world) as runtime:
        await runtime.start(two_of_them, id="p")
        other = "b2" if shut.startswith("a") else "a2"
        await until(lambda: shut in world.begun and other in world.done)
    async with living(place, two_of_them, deps=world) as runtime:
        found = await result(runtime.handle("p"))

    flat = [each for branch in found for each in branch]
    # What the other branch did last may not have been written when the process died.
    assert [each for each in flat if each is None] in ([None], [None, None])
    assert all(world.count[name] <= 1 for name in ("a1", "a2", "b1", "b2"))
    assert shut not in flat
