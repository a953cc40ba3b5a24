"""Replay: code that has changed, versions, code that does not let go, a store in trouble, a relieved owner."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Process, ProcessContext, Runtime, process
from perdure.errors import ProcessStuck, StoreUnavailable
from perdure.model.write import Advance, Claim, ProcessRef, Write
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import VirtualClock
from tests.kit import SOON, Place, until
from tests.processes.functions import World, dying, living, memory, parked, result, stuck

__all__ = ["memory"]

Ctx = ProcessContext[World]


# ---------------------------------------------------------------------- divergence


def version(work: Callable[[Ctx], Any]) -> Process[..., Any]:
    return process(name="changing")(work)


@version
async def original(ctx: Ctx) -> list[Any]:
    first = await ctx.step(ctx.deps.act, 1, name="one")
    pair = await ctx.gather(ctx.step(ctx.deps.act, 2, name="two"), ctx.step(ctx.deps.act, 3, name="three"))
    return [first, *pair, await ctx.wait_signal("go"), await ctx.step(ctx.deps.act, 4, name="four")]


async def other_name(ctx: Ctx) -> Any:
    await ctx.step(ctx.deps.act, 1, name="uno")


async def other_arguments(ctx: Ctx) -> Any:
    await ctx.step(ctx.deps.act, 7, name="one")


async def other_kind(ctx: Ctx) -> Any:
    await ctx.sleep(1)


async def other_order(ctx: Ctx) -> Any:
    await ctx.gather(ctx.step(ctx.deps.act, 2, name="two"), ctx.step(ctx.deps.act, 3, name="three"))
    await ctx.step(ctx.deps.act, 1, name="one")


async def a_step_in_place_of_branches(ctx: Ctx) -> Any:
    await ctx.step(ctx.deps.act, 1, name="one")
    await ctx.step(ctx.deps.act, "new", name="new")


async def fewer_branches(ctx: Ctx) -> Any:
    await ctx.step(ctx.deps.act, 1, name="one")
    await ctx.gather(ctx.step(ctx.deps.act, 2, name="two"))


async def an_extra_step_in_a_branch(ctx: Ctx) -> Any:
    async def longer() -> None:
        await ctx.step(ctx.deps.act, "new", name="new")
        await ctx.step(ctx.deps.act, 2, name="two")

    await ctx.step(ctx.deps.act, 1, name="one")
    await ctx.gather(longer(), ctx.step(ctx.deps.act, 3, name="three"))


async def an_end_that_comes_too_early(ctx: Ctx) -> Any:
    await ctx.step(ctx.deps.act, 1, name="one")
    return "over"


async def an_error_that_comes_too_early(ctx: Ctx) -> Any:
    await ctx.step(ctx.deps.act, 1, name="one")
    raise ValueError("no")


async def another_signal(ctx: Ctx) -> Any:
    await ctx.step(ctx.deps.act, 1, name="one")
    await ctx.gather(ctx.step(ctx.deps.act, 2, name="two"), ctx.step(ctx.deps.act, 3, name="three"))
    await ctx.wait_signal("start")


async def a_swallowed_divergence(ctx: Ctx) -> Any:
    try:
        await ctx.step(ctx.deps.act, 1, name="uno")
    except Exception:
        return await ctx.step(ctx.deps.act, "new", name="new")


SIDES = [
    (other_name, "at 1: its journal says step one(1), its code asks for step uno(1)"),
    (other_arguments, "at 1: its journal says step one(1), its code asks for step one(7)"),
    (other_kind, "at 1: its journal says step one(1), its code asks for sleep (1)"),
    (other_order, "at 1: its journal says step one(1), its code asks for gather (2)"),
    (a_step_in_place_of_branches, 'at 2: its journal says 2 branches or more, its code asks for step new("new")'),
    (fewer_branches, "at 2: its journal says 2 branches or more, its code asks for gather (1)"),
    (an_extra_step_in_a_branch, 'at 2.0.1: its journal says step two(2), its code asks for step new("new")'),
    (an_end_that_comes_too_early, "at 2.0.1: its journal says step two(2), its code asks for its end, as Success"),
    (an_error_that_comes_too_early, "at 2.0.1: its journal says step two(2), its code asks for its end, as Failure"),
    (another_signal, "at 3: its journal says signal go, its code asks for signal start"),
    (a_swallowed_divergence, "at 1: its journal says step one(1), its code asks for step uno(1)"),
]


@pytest.mark.parametrize(("changed", "sides"), SIDES, ids=lambda each: getattr(each, "__name__", ""))
async def test_changed_code_does_nothing_shows_both_sides_and_goes_on_when_it_is_back(
    place: Place, changed: Callable[[Ctx], Any], sides: str
) -> None:
    world = World()
    async with living(place, original, deps=world) as runtime:
        await parked(await runtime.start(original, id="p"))
    async with living(place, version(changed), deps=world) as runtime:
        handle = runtime.handle("p")
        await handle.signal("go", "G")

        assert sides in (await stuck(handle)).replace("signal go()", "signal go")
        with pytest.raises(ProcessStuck):
            await result(handle)
    assert world.done == [1, 2, 3]
    async with living(place, original, deps=world) as runtime:
        assert await runtime.processes.resume("p") is True

        assert await result(runtime.handle("p")) == [1, 2, 3, "G", 4]
    assert world.done == [1, 2, 3, 4]


async def test_arguments_that_do_not_fit_any_more_leave_it_stuck_not_failed(place: Place) -> None:
    @process(name="changing")
    async def before(ctx: Ctx, day: str) -> str:
        await ctx.wait_signal("go")
        return day

    @process(name="changing")
    async def after(ctx: Ctx, night: int) -> int:
        return night

    async with living(place, before) as runtime:
        await parked(await runtime.start(before, {"day": "monday"}, id="p"))
    async with living(place, after) as runtime:
        await runtime.handle("p").signal("go")

        assert "invalid arguments for process changing" in await stuck(runtime.handle("p"))
    async with living(place, before) as runtime:
        await runtime.processes.resume("p")

        assert await result(runtime.handle("p")) == "monday"


async def test_what_another_branch_has_done_is_kept_when_one_diverges(place: Place) -> None:
    """Its step ran before anybody noticed: a step that happened is never done again."""
    world = World()

    @process(name="changing")
    async def before(ctx: Ctx) -> list[Any]:
        return [*await ctx.gather(ctx.wait_signal("go"), then(ctx))]

    async def then(ctx: Ctx) -> Any:
        await ctx.wait_signal("on")
        return await ctx.step(ctx.deps.act, "done")

    @process(name="changing")
    async def after(ctx: Ctx) -> list[Any]:
        async def late() -> None:
            await asyncio.wait_for(until_done(), SOON)
            await ctx.wait_signal("other")

        return [*await ctx.gather(late(), then(ctx))]

    async def until_done() -> None:
        await until(lambda: world.done == ["done"])

    async with living(place, before, deps=world) as runtime:
        await parked(await runtime.start(before, id="p"))
    async with living(place, after, deps=world) as runtime:
        await runtime.handle("p").signal("on")
        await stuck(runtime.handle("p"))
    async with living(place, before, deps=world) as runtime:
        await runtime.processes.resume("p")
        await runtime.handle("p").signal("go", "G")

        assert await result(runtime.handle("p")) == ["G", "done"]
    assert world.done == ["done"]


# ---------------------------------------------------------------------- versions


@process(name="nightly", version="1")
async def nightly_1(ctx: Ctx) -> str:
    await ctx.wait_signal("go")
    return "the old way"


@process(name="nightly", version="2")
async def nightly_2(ctx: Ctx) -> str:
    await ctx.wait_signal("go")
    return "the new way"


async def test_a_process_keeps_to_the_version_it_was_begun_with(place: Place) -> None:
    async with living(place, nightly_1) as runtime:
        await parked(await runtime.start(nightly_1, id="old"))
    async with living(place, nightly_1, nightly_2) as runtime:
        new = await runtime.start("nightly", id="new")
        await parked(new)

        assert await runtime.processes.drain_status() == {"nightly@1": 1, "nightly@2": 1}
        for process_id in ("old", "new"):
            await runtime.handle(process_id).signal("go")
        assert await result(runtime.handle("old")) == "the old way"
        assert await result(new) == "the new way"


async def test_a_process_whose_code_is_gone_waits_and_is_seen(place: Place) -> None:
    async with living(place, nightly_1) as runtime:
        await parked(await runtime.start(nightly_1, id="old"))
    async with living(place, nightly_2) as runtime:
        await runtime.handle("old").signal("go")
        [row] = await runtime.processes.list("queued")

        assert (row.id, row.owner, row.stuck) == ("old", None, None)
    async with living(place, nightly_1) as runtime:
        assert await result(runtime.handle("old")) == "the old way"


# ---------------------------------------------------------------------- code that does not let go


async def test_code_that_catches_everything_cannot_hold_a_process_in_memory(place: Place) -> None:
    seen: list[str] = []

    @process
    async def clinging(ctx: Ctx) -> Any:
        try:
            return await ctx.wait_signal("go")
        except BaseException:
            seen.append("caught")
            return "wrong"
        finally:
            if not seen:
                await ctx.step(ctx.deps.act, "cleaned up")

    world = World()
    async with living(place, clinging, deps=world) as runtime:
        handle = await runtime.start(clinging)
        await parked(handle)
        await handle.signal("go", "right")

        assert await result(handle) == "right"
    assert seen == ["caught"]


async def test_calls_in_finally_do_nothing_while_a_process_is_put_away(place: Place) -> None:
    world = World()

    @process
    async def tidy(ctx: Ctx) -> Any:
        try:
            return await ctx.wait_signal("go")
        finally:
            await ctx.step(ctx.deps.act, "cleaned up")

    async with living(place, tidy, deps=world) as runtime:
        handle = await runtime.start(tidy)
        await parked(handle)
        assert world.begun == []
        await handle.signal("go", 1)

        assert await result(handle) == 1
    assert world.done == ["cleaned up"]


async def test_a_branch_that_swallows_its_end_is_not_chosen(place: Place) -> None:
    """It would be recorded as the winner, with a value that never was."""

    @process
    async def racing(ctx: Ctx) -> Any:
        async def clinging() -> Any:
            try:
                return await ctx.step(ctx.deps.act, "slow", recovery="rerun")
            except BaseException:
                return "wrong"

        return list(await ctx.any(clinging(), ctx.wait_signal("a")))

    world = World()
    world.open.clear()
    async with living(place, racing, deps=world, grace=0) as runtime:
        await runtime.start(racing, id="p")
        await world.has_begun("slow")
    async with living(place, racing, deps=world) as runtime:
        await runtime.handle("p").signal("a", "A")

        assert await result(runtime.handle("p")) == [1, "A"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("where", ["itself", "a branch"])
async def test_code_that_swallows_its_end_for_ever_is_left(memory: Place, where: str) -> None:
    @process
    async def deaf(ctx: Ctx) -> Any:
        async def listen() -> None:
            while True:
                try:
                    await ctx.wait_signal("go")
                except BaseException:
                    continue

        await (listen() if where == "itself" else ctx.gather(listen(), ctx.wait_signal("never")))

    async with living(memory, deaf) as runtime:
        handle = await runtime.start(deaf)
        await parked(handle)
        await until(lambda: not runtime._work.runs)

        assert (await handle.record()).status == "waiting"
    gc.collect()  # here, where what is left of it may complain


# ---------------------------------------------------------------------- a store in trouble, and a new owner


class Troubled(MemoryStore):
    """A store that fails as it is told: `before` or `after` the write is applied, or when processes are read."""

    def __init__(self, rows: MemoryRows) -> None:
        super().__init__(rows)
        self.fails: list[tuple[str, type[Write[Any]]]] = []
        self.hold: asyncio.Event | None = None
        self.reads_fail = 0

    async def write(self, write: Write[Any]) -> Any:
        plan = self.fails.pop(0)[0] if self.fails and isinstance(write, self.fails[0][1]) else None
        if plan == "before":
            raise StoreUnavailable("the disk is full")
        if plan == "slow" and self.hold is not None:
            await self.hold.wait()
        done = await super().write(write)
        if plan == "after":
            raise StoreUnavailable("the reply was lost")
        return done

    async def process(self, process_id: str) -> Any:
        if self.reads_fail and process_id == "awaited":
            self.reads_fail -= 1
            raise StoreUnavailable("the disk is away")
        return await super().process(process_id)


@process
async def plain(ctx: Ctx) -> list[Any]:
    found = [await ctx.step(ctx.deps.act, 1), await ctx.step(ctx.deps.act, 2)]
    await ctx.sleep(0.5)
    return [*found, await ctx.wait_signal("go")]


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("which", range(4))
async def test_a_write_that_fails_or_whose_reply_is_lost_is_sent_again_and_applied_once(how: str, which: int) -> None:
    world, clock = World(), VirtualClock(auto=True)
    store = Troubled(MemoryRows())
    store.fails = [*[("well", Advance)] * which, (how, Advance), (how, Advance)]
    async with Runtime(store, processes=[plain], deps=world, clock=clock) as runtime:
        handle = await runtime.start(plain)
        await handle.signal("go", 3)

        assert await result(handle) == [1, 2, 3]
    assert world.done == [1, 2]


async def test_a_read_that_fails_is_no_news_to_the_function(memory: Place) -> None:
    """Were it raised at its line, code that catches it would go another way than every replay."""
    caught: list[Exception] = []

    @process
    async def awaiting(ctx: Ctx) -> Any:
        try:
            return await ctx.result("awaited")
        except Exception as error:
            caught.append(error)
            return "wrong"

    store = Troubled(MemoryRows())
    async with Runtime(store, processes=[awaiting, plain], deps=World(), clock=VirtualClock(auto=True)) as runtime:
        await runtime.processes.register("awaited")
        await runtime.processes.complete("awaited", 5)
        store.reads_fail = 1
        handle = await runtime.start(awaiting)

        assert await result(handle) == 5
    assert store.reads_fail == 0
    assert caught == []


async def test_a_relieved_owner_is_told_by_its_next_write_and_changes_nothing(memory: Place) -> None:
    """Its code must not hear of it either: `except Exception` would make something of it."""
    world, caught = World(), list[Exception]()
    world.open.clear()

    @process
    async def stepping(ctx: Ctx) -> Any:
        try:
            await ctx.step(ctx.deps.act, 1, recovery="rerun")
            return await ctx.step(ctx.deps.act, 2)
        except Exception as error:
            caught.append(error)
            return "wrong"

    async with dying(memory, stepping, deps=world) as old:
        handle = await old.start(stepping, id="p")
        await world.has_begun(1)
        row = await handle.record()
        taken = await old.store.write(
            Claim(ProcessRef("p"), "somebody else", row.generation, 0, "it was declared dead")
        )
        assert taken.won
        world.open.set()
        await until(lambda: not old._work.runs)

        assert (await handle.record()).owner == "somebody else"
    assert world.begun == [1]
    assert caught == []


async def test_a_signal_that_comes_while_it_is_being_parked_is_heard_at_once(memory: Place) -> None:
    @process
    async def calling(ctx: Ctx) -> Any:
        await ctx.step(ctx.deps.act, 1)
        return await ctx.wait_signal("go")

    store = Troubled(MemoryRows())
    store.hold = asyncio.Event()
    store.fails = [("well", Advance), ("slow", Advance)]
    # The clock stands still: nobody comes round to look for what was not heard.
    async with Runtime(store, processes=[calling], deps=World(), clock=VirtualClock()) as runtime:
        handle = await runtime.start(calling)
        await until(lambda: not store.fails)  # the parking is under way
        await handle.signal("go", "now")
        store.hold.set()

        assert await result(handle) == "now"


async def test_progress_is_told_once_and_only_the_newest(place: Place) -> None:
    @process
    async def counting(ctx: Ctx) -> None:
        for number in range(100):
            ctx.progress(number)
        await ctx.step(ctx.deps.act, 1)
        ctx.progress("half")
        await ctx.wait_signal("go")
        await ctx.step(ctx.deps.act, 2)
        ctx.progress("whole")

    async with living(place, counting, deps=World()) as runtime:
        handle = await runtime.start(counting)
        await parked(handle)
        await handle.signal("go")
        await result(handle)
        told = [e.payload async for e in handle.events() if e.type == "process.progress"]

    assert told == [99, "half", "whole"]
