"""Cancel requests in durable functions: once per branch, at the same call on every replay, with time to clean up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import ProcessContext, Runtime, process
from perdure.errors import ProcessCancelled
from perdure.model.process import Cancelled, Failure, Success
from perdure.model.record import Done
from perdure.model.session import CancelRequest
from perdure.model.write import Cancel, ProcessRef
from perdure.stores.memory import MemoryRows, MemoryStore
from tests.kit import SOON, Place, until, until_waits_for
from tests.processes.functions import World, dying, journal_of, living, memory, parked, result, stuck

__all__ = ["memory"]

Ctx = ProcessContext[World]


def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@process
async def quits(ctx: Ctx, then: str) -> str:
    cancel_own_task()
    if then == "waits":
        await asyncio.Event().wait()
    elif then == "raises":
        raise ValueError("no")
    elif then == "catches":
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return str(await ctx.step(ctx.deps.act, "after all"))
    return "done"


@pytest.mark.parametrize(
    ("then", "outcome"),
    [
        ("waits", Failure("raised", "CancelledError: the function cancelled itself")),
        ("raises", Failure("raised", "ValueError: no")),
        ("returns", Success("done")),
        ("catches", Success("after all")),
    ],
)
async def test_a_function_that_cancels_its_own_task_ends_as_it_says(place: Place, then: str, outcome: Any) -> None:
    async with living(place, quits, deps=World()) as runtime:
        ended = await (await runtime.start(quits, {"then": then})).outcome(SOON)

    assert (replace(ended, traceback="") if isinstance(ended, Failure) else ended) == outcome


async def test_a_function_whose_branch_cancels_the_task_of_the_function_is_stuck_and_says_so(place: Place) -> None:
    @process
    async def undermined(ctx: Ctx) -> None:
        own = asyncio.current_task()
        assert own is not None

        async def cancels() -> None:
            own.cancel()
            await asyncio.sleep(0)

        await ctx.gather(cancels(), ctx.sleep(60))

    async with living(place, undermined, deps=World()) as runtime:
        why = await stuck(await runtime.start(undermined))

    assert "was cancelled from outside, which no replay could repeat" in why


@process
async def tidy(ctx: Ctx) -> None:
    try:
        await ctx.wait_signal("go")
    finally:
        await ctx.step(ctx.deps.act, "cleaned up", recovery="rerun")


async def test_a_parked_process_is_taken_up_cut_off_where_it_waits_and_cleans_up(place: Place) -> None:
    world = World()
    async with living(place, tidy, deps=world) as runtime:
        handle = await runtime.start(tidy)
        await parked(handle)

        assert await handle.cancel("enough", by="ops") == "requested"
        assert await handle.outcome(SOON) == Cancelled("ops", "enough")
        assert await handle.cancel() == "ended"
        with pytest.raises(ProcessCancelled, match="enough"):
            await result(handle)
    assert world.done == ["cleaned up"]


async def test_a_request_is_delivered_once_though_the_clean_up_is_killed(place: Place) -> None:
    world = World()
    world.open.clear()
    async with dying(place, tidy, deps=world) as runtime:
        handle = await runtime.start(tidy, id="p")
        await parked(handle)
        await handle.cancel()
        await world.has_begun("cleaned up")
    world.open.set()
    async with living(place, tidy, deps=world) as runtime:
        assert await runtime.handle("p").outcome(SOON) == Cancelled("host", "")
        cuts = [r.key for r in await journal_of(runtime, runtime.handle("p")) if isinstance(r, Done) and r.cut]

    assert cuts == ["1"]
    assert world.done == ["cleaned up"]


async def test_a_second_request_changes_nothing(place: Place) -> None:
    world = World()
    world.open.clear()
    async with living(place, tidy, deps=world) as runtime:
        handle = await runtime.start(tidy)
        await parked(handle)
        await handle.cancel("first")
        await world.has_begun("cleaned up")

        assert await handle.cancel("second") == "already_requested"
        world.open.set()
        assert await handle.outcome(SOON) == Cancelled("host", "first")
    assert world.done == ["cleaned up"]


@process
async def working(ctx: Ctx) -> Any:
    return await ctx.step(ctx.deps.act, "work")


async def test_a_step_that_runs_is_cancelled_and_the_process_says_that_nobody_knows(place: Place) -> None:
    world = World()
    world.open.clear()
    async with living(place, working, deps=world) as runtime:
        handle = await runtime.start(working)
        await world.has_begun("work")
        await handle.cancel()

        assert await handle.outcome(SOON) == Cancelled("host", "", unknown=True)
    assert world.done == []


async def test_what_nobody_has_begun_ends_at_once(place: Place) -> None:
    async with living(place, working) as runtime:
        runtime._work.passive = True
        handle = await runtime.start(working)
        await handle.cancel("changed my mind")

        assert await handle.outcome(SOON) == Cancelled("host", "changed my mind")


async def test_a_request_is_heard_at_the_next_call_when_none_is_under_way(place: Place) -> None:
    inside, free = asyncio.Event(), asyncio.Event()

    @process
    async def thinking(ctx: Ctx) -> None:
        inside.set()
        await free.wait()
        await ctx.step(ctx.deps.act, "too late")

    world = World()
    async with living(place, thinking, deps=world) as runtime:
        handle = await runtime.start(thinking)
        await inside.wait()
        await handle.cancel()
        free.set()

        assert await handle.outcome(SOON) == Cancelled("host", "")
    assert world.begun == []


async def test_a_request_that_comes_while_a_worker_takes_it_up_is_not_lost(place: Place) -> None:
    async with living(place, tidy, deps=World()) as runtime:
        handles = [await runtime.start(tidy) for _ in range(30)]
        for handle in handles:
            await parked(handle)

        async def disturb(handle: Any) -> None:
            await asyncio.gather(handle.signal("other"), handle.cancel("now"), handle.signal("other"))

        await asyncio.gather(*map(disturb, handles))
        for handle in handles:
            assert await handle.outcome(SOON) == Cancelled("host", "now")


class Asking(MemoryStore):
    """Somebody asks a process to end in the moment in which its new owner reads its journal."""

    asked = False

    async def steps(self, pid: int) -> list[tuple[int, bytes]]:
        if not self.asked:
            self.asked = True
            await self.write(Cancel(ProcessRef("p"), CancelRequest("host", "just then"), 5))
        return await super().steps(pid)


async def test_nor_one_that_comes_between_the_claim_and_the_first_line() -> None:
    @process
    async def two_waits(ctx: Ctx) -> None:
        await ctx.wait_signal("go")
        await ctx.wait_signal("more")

    async with Runtime(Asking(MemoryRows()), processes=[two_waits]) as runtime:
        handle = await runtime.start(two_waits, id="p")
        await parked(handle)
        await handle.signal("go")

        assert await handle.outcome(SOON) == Cancelled("host", "just then")


# ---------------------------------------------------------------------- branches


@process
async def three(ctx: Ctx) -> None:
    async def branch(name: str) -> None:
        try:
            await ctx.wait_signal(name)
        finally:
            await ctx.step(ctx.deps.act, name, recovery="rerun")

    try:
        await ctx.gather(branch("a"), ctx.gather(branch("b"), branch("c")))
    finally:
        await ctx.step(ctx.deps.act, "all")


async def test_every_branch_is_cut_off_once_and_their_parents_through_them(place: Place) -> None:
    world = World()
    async with living(place, three, deps=world) as runtime:
        handle = await runtime.start(three)
        await until_waits_for(handle, "a", "b", "c")
        await handle.cancel()

        assert await handle.outcome(SOON) == Cancelled("host", "")
        cuts = [r.key for r in await journal_of(runtime, handle) if isinstance(r, Done) and r.cut]
    assert sorted(cuts) == ["1.0.1", "1.1.1.0.1", "1.1.1.1.1"]
    assert world.count == {"a": 1, "b": 1, "c": 1, "all": 1}


async def test_a_kill_between_two_branches_that_are_cut_off_loses_neither(place: Place) -> None:
    """The first branch has been cut off and that is on disk; the second is still being told."""

    class Holding(World):
        async def act(self, what: Any = "act") -> Any:
            self.begun.append(what)
            if what == "long":
                try:
                    await asyncio.Event().wait()
                finally:
                    if self.begun.count("long") == 1:
                        await asyncio.Event().wait()  # does not end when it is cancelled: the worker dies first
            self.done.append(what)
            return what

    world = Holding()

    @process
    async def two(ctx: Ctx) -> None:
        async def cleans() -> None:
            try:
                await ctx.wait_signal("a")
            finally:
                await ctx.step(ctx.deps.act, "first", recovery="once")

        async def stubborn() -> None:
            try:
                await ctx.step(ctx.deps.act, "long", recovery="rerun")
            except asyncio.CancelledError:
                await ctx.step(ctx.deps.act, "second")
                raise

        await ctx.gather(cleans(), stubborn())

    async with dying(place, two, deps=world) as runtime:
        handle = await runtime.start(two, id="p")
        await world.has_begun("long")
        await handle.cancel()
        await until(lambda: "first" in world.done)
    async with living(place, two, deps=world) as runtime:
        assert (await runtime.handle("p").outcome(SOON)).__class__ is Cancelled

    assert world.count["second"] == 1
    assert world.count["first"] == 1 or world.begun.count("first") == 1


async def test_branches_that_a_clean_up_makes_are_not_cut_off(place: Place) -> None:
    @process
    async def thorough(ctx: Ctx) -> None:
        try:
            await ctx.wait_signal("go")
        finally:
            await ctx.gather(ctx.step(ctx.deps.act, 1), ctx.step(ctx.deps.act, 2))
            await ctx.any(ctx.wait_signal("never"), ctx.sleep(0))

    world = World()
    async with living(place, thorough, deps=world) as runtime:
        handle = await runtime.start(thorough)
        await parked(handle)
        await handle.cancel()

        assert await handle.outcome(SOON) == Cancelled("host", "")
    assert world.count == {1: 1, 2: 1}


async def test_a_branch_that_has_failed_does_not_hide_that_it_was_asked_to_end(place: Place) -> None:
    async def fail() -> None:
        raise ValueError("no")

    @process
    async def mixed(ctx: Ctx) -> None:
        await ctx.gather(fail(), ctx.wait_signal("go"))

    async with living(place, mixed) as runtime:
        handle = await runtime.start(mixed)
        await parked(handle)
        await handle.cancel()

        assert await handle.outcome(SOON) == Cancelled("host", "")


async def test_a_function_that_swallows_it_and_returns_has_completed(place: Place) -> None:
    @process
    async def stubborn(ctx: Ctx) -> list[Any]:
        try:
            await ctx.wait_signal("go")
        except asyncio.CancelledError:
            return ["anyway", await ctx.step(ctx.deps.act, "more"), await ctx.wait_signal("on")]
        return []

    async with living(place, stubborn, deps=World()) as runtime:
        handle = await runtime.start(stubborn)
        await parked(handle)
        await handle.cancel()
        await until_waits_for(handle, "on")  # a parked process that was asked to end may park again
        await handle.signal("on", "now")

        assert await result(handle) == ["anyway", "more", "now"]


async def test_a_request_finds_a_loop_at_its_checkpoint_and_not_again_in_the_next_segment(place: Place) -> None:
    seen: list[str] = []
    inside, free = asyncio.Event(), asyncio.Event()

    @process
    async def looping(ctx: Ctx) -> str:
        if ctx.state == "two":
            await ctx.wait_signal("go")
            return "not asked again"
        inside.set()
        await free.wait()
        try:
            await ctx.checkpoint("one")
        except asyncio.CancelledError:
            seen.append("cut")
            await ctx.checkpoint("two", restart=True)
        return "went on"

    async with dying(place, looping) as runtime:
        handle = await runtime.start(looping, id="p")
        await inside.wait()
        await handle.cancel()
        free.set()
        await until_waits_for(handle, "go")

    async with living(place, looping) as runtime:
        await runtime.handle("p").signal("go")

        assert await result(runtime.handle("p")) == "not asked again"
    assert seen == ["cut"]


async def test_a_kill_after_a_cut_checkpoint_replays_it(place: Place) -> None:
    seen: list[str] = []
    inside, free = asyncio.Event(), asyncio.Event()

    @process
    async def looping(ctx: Ctx) -> str:
        inside.set()
        await free.wait()
        try:
            await ctx.checkpoint("one")
        except asyncio.CancelledError:
            seen.append("cut")
            await ctx.wait_signal("go")
        return "over"

    async with living(place, looping) as runtime:
        handle = await runtime.start(looping)
        await inside.wait()
        await handle.cancel()
        free.set()
        await until_waits_for(handle, "go")
        await handle.signal("go")

        assert await result(handle) == "over"
    assert seen == ["cut", "cut"]


# ---------------------------------------------------------------------- joins


JOINS: dict[str, Callable[..., Any]] = {
    "gather": lambda ctx, *works: ctx.gather(*works),
    "gather with errors as values": lambda ctx, *works: ctx.gather(*works, return_exceptions=True),
    "all": lambda ctx, *works: ctx.all(*works),
    "any": lambda ctx, *works: ctx.any(*works),
}


async def swallowing(ctx: Ctx, name: str) -> str:
    try:
        return str(await ctx.wait_signal(name))
    except asyncio.CancelledError:
        return f"{name} swallowed it"


@process
async def joining(ctx: Ctx, join: str, swallows: list[str]) -> str:
    works = [swallowing(ctx, name) if name in swallows else ctx.wait_signal(name) for name in "ab"]
    await JOINS[join](ctx, *works)
    ctx.deps.act_now("past the join")
    await ctx.step(ctx.deps.act, "went on")
    return "went on"


@pytest.mark.parametrize("join", JOINS)
async def test_no_join_swallows_a_request_that_a_branch_let_through(place: Place, join: str) -> None:
    world = World()
    for number, swallows in enumerate(([], ["a"], ["b"])):
        async with dying(place, joining, deps=world) as runtime:
            handle = await runtime.start(joining, {"join": join, "swallows": swallows}, id=f"p{number}")
            await parked(handle)
            await handle.cancel()
        async with living(place, joining, deps=world) as runtime:
            assert await runtime.handle(f"p{number}").outcome(SOON) == Cancelled("host", "")
    assert world.begun == []


@pytest.mark.parametrize("join", JOINS)
async def test_a_request_that_all_branches_swallowed_is_delivered_at_their_parents_next_call(
    place: Place, join: str
) -> None:
    world = World()
    async with living(place, joining, deps=world) as runtime:
        handle = await runtime.start(joining, {"join": join, "swallows": ["a", "b"]})
        await parked(handle)
        await handle.cancel()

        assert await handle.outcome(SOON) == Cancelled("host", "")
        cuts = [r.key for r in await journal_of(runtime, handle) if isinstance(r, Done) and r.cut]
    assert world.begun == ["past the join"]
    assert cuts == ["1.0.1", "1.1.1", "2"]


async def test_code_around_a_join_may_swallow_a_request_once_and_for_all(place: Place) -> None:
    @process
    async def stubborn(ctx: Ctx) -> list[Any]:
        try:
            await ctx.gather(ctx.wait_signal("a"), ctx.wait_signal("b"), return_exceptions=True)
        except asyncio.CancelledError:
            return [await ctx.step(ctx.deps.act, "anyway"), await ctx.wait_signal("on")]
        return []

    world = World()
    async with living(place, stubborn, deps=world) as runtime:
        handle = await runtime.start(stubborn)
        await parked(handle)
        await handle.cancel()
        await until_waits_for(handle, "on")
        await handle.signal("on", "now")

        assert await result(handle) == ["anyway", "now"]
    assert world.done == ["anyway"]


async def test_a_request_that_comes_while_the_losers_of_a_choice_clean_up_is_not_lost(place: Place) -> None:
    async def tidies(ctx: Ctx) -> None:
        try:
            await ctx.wait_signal("never")
        finally:
            await ctx.step(ctx.deps.act, "tidied")

    @process
    async def choosing(ctx: Ctx) -> str:
        await ctx.any(tidies(ctx), ctx.wait_signal("now"))
        await ctx.step(ctx.deps.act, "went on")
        return "went on"

    world = World()
    world.open.clear()
    async with living(place, choosing, deps=world) as runtime:
        handle = await runtime.start(choosing)
        await parked(handle)
        await handle.signal("now")
        await world.has_begun("tidied")
        await handle.cancel()

        assert await handle.outcome(SOON) == Cancelled("host", "", unknown=True)
    assert world.begun == ["tidied"]


async def test_a_dropped_branch_does_not_go_on_past_a_join_of_its_own(place: Place) -> None:
    world = World()

    async def loser(ctx: Ctx) -> None:
        await ctx.gather(ctx.wait_signal("a"), ctx.wait_signal("b"), return_exceptions=True)
        ctx.deps.act_now("past the join")

    @process
    async def choosing(ctx: Ctx) -> list[Any]:
        return [*await ctx.any(loser(ctx), ctx.wait_signal("now")), await ctx.wait_signal("go")]

    async with living(place, choosing, deps=world) as runtime:
        handle = await runtime.start(choosing)
        await parked(handle)
        await handle.signal("now", "N")
        await until_waits_for(handle, "go")
        await handle.signal("go", "G")

        assert await result(handle) == [1, "N", "G"]
    assert world.begun == []


# ---------------------------------------------------------------------- nobody's request


async def test_a_function_that_cancels_itself_has_failed(place: Place) -> None:
    @process
    async def giving_up(ctx: Ctx) -> None:
        await ctx.sleep(0)
        raise asyncio.CancelledError("of my own")

    async with living(place, giving_up) as runtime:
        outcome = await (await runtime.start(giving_up)).outcome(SOON)

    assert outcome == Failure("raised", "CancelledError: of my own")


async def test_a_step_that_cancels_itself_has_failed(place: Place) -> None:
    async def cancels() -> None:
        raise asyncio.CancelledError

    @process
    async def stepping(ctx: Ctx) -> None:
        await ctx.step(cancels)

    async with living(place, stepping) as runtime:
        outcome = await (await runtime.start(stepping)).outcome(SOON)

    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.message) == ("raised", "step cancels: CancelledError: the step cancelled itself")
