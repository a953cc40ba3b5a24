"""Results are handed out in one order, live and on replay: what branches make of shared memory comes out the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from perdure import ProcessContext, Runtime, process
from perdure.model.codec import encode
from perdure.model.record import Begun, Done, Segment
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import VirtualClock
from tests.kit import Place, until, until_waits_for
from tests.processes.functions import World, dying, journal_of, living, memory, parked, result, stuck

__all__ = ["memory"]

Ctx = ProcessContext["Stage"]


class Stage(World):
    """Steps that end when they are told to, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, asyncio.Event] = {}

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    async def ask(self, name: str) -> str:
        self.begun.append(name)
        await self.gate(name).wait()
        self.done.append(name)
        return name

    async def end(self, *names: str) -> None:
        """Let steps end, one after another."""
        for name in names:
            await self.has_begun(name)
            self.gate(name).set()
            await until(lambda name=name: name in self.done)  # type: ignore[misc]


# ---------------------------------------------------------------------- what branches share


async def a_list(ctx: Ctx) -> Any:
    answers: list[str] = []

    async def bid(name: str) -> None:
        answers.append(await ctx.step(ctx.deps.ask, name))

    await ctx.gather(bid("slow"), bid("quick"))
    return answers


async def a_lock(ctx: Ctx) -> Any:
    lock, taken = asyncio.Lock(), list[str]()

    async def bid(name: str) -> None:
        await ctx.step(ctx.deps.ask, name)
        async with lock:
            taken.append(name)
            await ctx.step(ctx.deps.act, f"{name} has it")

    await ctx.gather(bid("slow"), bid("quick"))
    return taken


async def a_queue(ctx: Ctx) -> Any:
    queue: asyncio.Queue[str] = asyncio.Queue(1)

    async def put(name: str) -> None:
        await queue.put(await ctx.step(ctx.deps.ask, name))

    async def take() -> list[str]:
        return [await queue.get(), await queue.get()]

    return (await ctx.gather(put("slow"), put("quick"), take()))[2]


async def a_wait_for_the_lock(ctx: Ctx) -> Any:
    """asyncio wraps it in a task of its own, which takes some passes through the event loop."""
    first, order = asyncio.Event(), list[str]()

    async def quick() -> None:
        await ctx.step(ctx.deps.ask, "quick")
        first.set()

    async def behind() -> None:
        await asyncio.wait_for(first.wait(), 60)
        order.append("behind quick")

    async def slow() -> None:
        await ctx.step(ctx.deps.ask, "slow")
        order.append("slow")

    await ctx.gather(slow(), behind(), quick())
    return order


async def a_choice(ctx: Ctx) -> Any:
    seen: list[str] = []

    async def run(name: str) -> str:
        try:
            return await ctx.step(ctx.deps.ask, name)
        finally:
            seen.append(name)

    which, value = await ctx.any(run("slow"), run("quick"))
    return [which, value, *seen]


async def time_and_names(ctx: Ctx) -> Any:
    ids: list[str] = []

    async def bid(name: str) -> None:
        await ctx.step(ctx.deps.ask, name)
        ids.append(f"{name} {ctx.now().timestamp()} {ctx.uuid()}")

    await ctx.gather(bid("slow"), bid("quick"))
    return ids


SHARED: list[tuple[Callable[[Ctx], Coroutine[Any, Any, Any]], Any]] = [
    (a_list, ["quick", "slow"]),
    (a_lock, ["quick", "slow"]),
    (a_queue, ["quick", "slow"]),
    (a_wait_for_the_lock, ["behind quick", "slow"]),
    (a_choice, [1, "quick", "quick", "slow"]),
    (time_and_names, None),
]


@pytest.mark.parametrize(("sharing", "wanted"), SHARED, ids=lambda each: getattr(each, "__name__", ""))
async def test_what_branches_made_of_shared_memory_is_the_same_on_replay(
    place: Place, sharing: Callable[[Ctx], Coroutine[Any, Any, Any]], wanted: Any
) -> None:
    @process
    async def bidding(ctx: Ctx) -> list[Any]:
        live = await sharing(ctx)
        written: list[Any] = await ctx.step(list, live)  # another order on replay is another argument
        await ctx.wait_signal("go")
        return written

    stage = Stage()
    async with dying(place, bidding, deps=stage) as runtime:
        handle = await runtime.start(bidding, id="p")
        await stage.has_begun("slow")
        await stage.end("quick")
        if sharing is not a_choice:
            await stage.end("slow")
        await until_waits_for(handle, "go")
    async with living(place, bidding, deps=stage) as runtime:
        await runtime.handle("p").signal("go")

        found = await result(runtime.handle("p"))
    assert wanted is None or found == wanted
    assert stage.begun.count("quick") == 1


async def test_signals_timers_and_children_come_back_in_the_order_in_which_they_came(place: Place) -> None:
    clock = VirtualClock()

    @process
    async def child(ctx: Ctx) -> str:
        return str(await ctx.wait_signal("end"))

    @process
    async def gathering(ctx: Ctx) -> list[str]:
        seen: list[str] = []

        async def note(what: Coroutine[Any, Any, Any], name: str) -> None:
            await what
            seen.append(name)

        started = await ctx.start(child)
        await ctx.gather(
            note(ctx.sleep(3600), "time"),
            note(ctx.wait_signal("a"), "signal a"),
            note(started.result(), "child"),
            note(ctx.wait_signal("b"), "signal b"),
        )
        await ctx.wait_signal("go")
        return seen

    async with living(place, gathering, child, clock=clock) as runtime:
        handle = await runtime.start(gathering, id="p")

        async def left(*names: str) -> None:
            async def there() -> bool:
                row = await handle.record()
                return row.status == "waiting" and sorted(each.name for each in row.record.waits) == sorted(names)

            await until(there)

        await left("", "a", "p.1", "b")
        await handle.signal("b")
        await left("", "a", "p.1")
        await runtime.handle("p.1").signal("end", 1)
        await left("", "a")
        clock.advance(3600)
        await left("a")
        await handle.signal("a")
        await left("go")
        await handle.signal("go")

        assert await result(handle) == ["signal b", "child", "time", "signal a"]


async def test_the_next_result_is_handed_out_when_no_branch_can_run(memory: Place) -> None:
    """Both steps have ended before either branch goes on: the first one goes as far as it gets before the second."""
    seen: list[str] = []

    @process
    async def two(ctx: Ctx) -> list[str]:
        async def walk(name: str) -> None:
            await ctx.step(ctx.deps.ask, name)
            for number in range(3):
                seen.append(f"{name}{number}")
                await asyncio.sleep(0)

        await ctx.gather(walk("a"), walk("b"))
        return seen

    stage = Stage()
    async with living(memory, two, deps=stage) as runtime:
        handle = await runtime.start(two)
        await stage.has_begun("a")
        await stage.has_begun("b")
        stage.gate("b").set()
        stage.gate("a").set()

        assert await result(handle) == ["b0", "b1", "b2", "a0", "a1", "a2"]


async def test_code_that_only_looks_again_and_again_gets_its_result(memory: Place) -> None:
    @process
    async def polling(ctx: Ctx) -> int:
        found: list[int] = []

        async def look() -> int:
            while not found:  # noqa: ASYNC110  # what this is about
                await asyncio.sleep(0)
            return found[0]

        async def find() -> None:
            found.append(await ctx.step(ctx.deps.act, 7))

        return (await ctx.gather(look(), find()))[0]

    async with living(memory, polling, deps=Stage()) as runtime:
        assert await result(await runtime.start(polling)) == 7


async def test_a_result_that_was_not_handed_out_when_the_runtime_is_left_is_not_lost(place: Place) -> None:
    """Another branch works without a pause just then."""
    stage, busy = Stage(), asyncio.Event()

    @process
    async def two(ctx: Ctx) -> list[Any]:
        async def works() -> str:
            await ctx.step(ctx.deps.ask, "a")
            busy.set()
            while "left" not in stage.done:  # noqa: ASYNC110  # it never stops running
                await asyncio.sleep(0)
            return await ctx.step(ctx.deps.act, "after a", recovery="rerun")

        return [*await ctx.gather(works(), ctx.step(ctx.deps.ask, "b"))]

    async with living(place, two, deps=stage, grace=0) as runtime:
        await runtime.start(two, id="p")
        await stage.has_begun("b")
        await stage.end("a")
        await busy.wait()
        await stage.end("b")
    stage.done.append("left")
    async with living(place, two, deps=stage) as runtime:
        assert await result(runtime.handle("p")) == ["after a", "b"]
    assert (stage.begun.count("a"), stage.begun.count("b")) == (1, 1)


async def test_what_is_not_recorded_waits_until_all_that_is_was_handed_out(place: Place) -> None:
    """A replay that diverges has done nothing, though one branch comes to a new call before that shows."""
    stage = Stage()

    @process(name="changing")
    async def before(ctx: Ctx) -> Any:
        async def one() -> None:
            await asyncio.Event().wait()

        async def two() -> None:
            for number in (1, 2, 3):
                await ctx.step(ctx.deps.act, number)
            await ctx.wait_signal("go")

        return await ctx.gather(one(), two())

    @process(name="changing")
    async def after(ctx: Ctx) -> Any:
        async def one() -> None:
            await ctx.step(ctx.deps.act, "new", recovery="rerun")

        async def two() -> None:
            await ctx.step(ctx.deps.act, 1)
            await ctx.step(ctx.deps.act, "other")

        return await ctx.gather(one(), two())

    async with dying(place, before, deps=stage) as runtime:
        await runtime.start(before, id="p")
        await until(lambda: 3 in stage.done)
    async with living(place, after, deps=stage) as runtime:
        assert 'at 1.1.2: its journal says step act(2), its code asks for step act("other")' in await stuck(
            runtime.handle("p")
        )
    assert stage.begun == [1, 2, 3]


# ---------------------------------------------------------------------- nobody asks for what is next


@process(name="changing")
async def original(ctx: Ctx) -> list[Any]:
    async def one() -> Any:
        await ctx.step(ctx.deps.ask, "a")
        return await ctx.step(ctx.deps.act, "a2")

    async def two() -> Any:
        return await ctx.step(ctx.deps.ask, "b")

    pair = await ctx.gather(one(), two())
    return [*pair, await ctx.wait_signal("go")]


async def behind_a_lock(ctx: Ctx) -> Any:
    """The second branch cannot ask before the first has ended, and was first on record."""
    lock = asyncio.Lock()

    async def one() -> Any:
        async with lock:
            await ctx.step(ctx.deps.ask, "a")
            return await ctx.step(ctx.deps.act, "a2")

    async def two() -> Any:
        async with lock:
            return await ctx.step(ctx.deps.ask, "b")

    return await ctx.gather(one(), two())


async def no_such_call(ctx: Ctx) -> Any:
    async def one() -> Any:
        await ctx.step(ctx.deps.ask, "a")
        return await ctx.step(ctx.deps.act, "a2")

    async def two() -> None:
        pass

    await ctx.gather(one(), two())
    await ctx.wait_signal("go")


CHANGED = [
    (
        behind_a_lock,
        'at 1.1.1: its journal says step ask("b"), its code asks for nothing there; it waits for 1.0.1: step',
    ),
    (
        no_such_call,
        'at 1.1.1: its journal says step ask("b"), its code asks for nothing there; it waits for 1.0.1: step',
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changed", "sides"), CHANGED, ids=lambda each: getattr(each, "__name__", ""))
async def test_a_replay_where_no_branch_asks_for_the_next_result_has_diverged(
    memory: Place, changed: Callable[[Ctx], Any], sides: str
) -> None:
    """At once, or after some seconds where branches wait for a lock, which might be the host's."""
    stage = Stage()
    async with living(memory, original, deps=stage) as runtime:
        handle = await runtime.start(original, id="p")
        await stage.end("b", "a")
        await until_waits_for(handle, "go")
    async with living(memory, process(name="changing")(changed), deps=stage) as runtime:
        await runtime.handle("p").signal("go", "G")

        assert sides in await stuck(runtime.handle("p"))
    assert stage.done == ["b", "a", "a2"]
    async with living(memory, original, deps=stage) as runtime:
        await runtime.processes.resume("p")

        assert await result(runtime.handle("p")) == ["a2", "b", "G"]


async def test_what_is_awaited_outside_of_the_context_is_waited_for_again(place: Place) -> None:
    stage = Stage()

    @process
    async def mixed(ctx: Ctx) -> list[Any]:
        async def outside() -> Any:
            await asyncio.to_thread(stage.act_now, "outside")
            await asyncio.sleep(0.01)
            return await ctx.step(ctx.deps.act, "after it")

        pair = await ctx.gather(outside(), ctx.step(ctx.deps.ask, "b"))
        return [*pair, await ctx.wait_signal("go")]

    async with dying(place, mixed, deps=stage) as runtime:
        handle = await runtime.start(mixed, id="p")
        await until(lambda: "after it" in stage.done)
        await stage.end("b")
        await until_waits_for(handle, "go")
    async with living(place, mixed, deps=stage) as runtime:
        await runtime.handle("p").signal("go", "G")

        assert await result(runtime.handle("p")) == ["after it", "b", "G"]
    assert stage.count["after it"] == 1


# ---------------------------------------------------------------------- journals of older code


async def test_the_first_record_of_a_journal_is_marked_and_so_is_every_segment(place: Place) -> None:
    @process
    async def marking(ctx: Ctx, rounds: int) -> None:
        for number in range(ctx.state or 0, rounds):
            await ctx.step(ctx.deps.act, "round", recovery="once")
            await ctx.checkpoint(number + 1)
        await ctx.step(ctx.deps.act, "round", recovery="once")
        await ctx.wait_signal("go")

    async with living(place, marking, deps=Stage()) as runtime:
        marks = []
        for rounds in (0, 2):
            handle = await runtime.start(marking, {"rounds": rounds})
            await parked(handle)
            marks.append([(type(each), getattr(each, "ordered", None)) for each in await journal_of(runtime, handle)])

    step = [(Begun, False), (Done, False), (Begun, False)]
    assert marks == [[(Begun, True), *step[1:]], [(Segment, True), *step]]


OLD = [
    Begun("1.0.1", "step", "ask", '"slow"'),
    Begun("1.1.1", "step", "ask", '"quick"'),
    Done("1.1.1", "step", "ask", '"quick"', "quick"),
    Done("1.0.1", "step", "ask", '"slow"', "slow"),
    # What older code made of it live, and would make of it on replay: each branch is answered as it asks.
    Begun("2", "step", "list", '["slow","quick"]'),
    Done("2", "step", "list", '["slow","quick"]', ["slow", "quick"]),
    Begun("3", "signal", "go"),
]


class Older(MemoryStore):
    """A store whose processes have journals that code without the mark has begun."""

    async def steps(self, pid: int) -> list[tuple[int, bytes]]:
        return [(ordinal, encode(OLD[ordinal])) for ordinal, _ in await super().steps(pid)]


async def test_a_journal_without_the_mark_is_answered_as_its_branches_ask() -> None:
    @process
    async def bidding(ctx: Ctx) -> list[Any]:
        written: list[Any] = await ctx.step(list, await a_list(ctx))
        return [written, await ctx.wait_signal("go")]

    stage = Stage()
    async with Runtime(Older(MemoryRows()), processes=[bidding], deps=stage) as runtime:
        handle = await runtime.start(bidding, id="p")
        await stage.has_begun("slow")
        await stage.end("quick", "slow")
        await until_waits_for(handle, "go")
        await handle.signal("go", "on")

        assert await result(handle) == [["slow", "quick"], "on"]
