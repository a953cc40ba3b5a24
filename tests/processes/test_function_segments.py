"""Work that never ends, and processes that start others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import ProcessContext, process
from perdure.errors import (
    InvalidInput,
    MisplacedCheckpoint,
    ProcessCancelled,
    ProcessFailed,
    ProcessPruned,
    StepFailed,
    TimedOut,
    UnknownProcess,
)
from perdure.model.process import Cancelled, Cause, Failure, ParentEnd
from perdure.model.record import Done, Segment
from perdure.testing import VirtualClock
from tests.kit import SOON, Place, until, until_waits_for
from tests.processes.functions import World, dying, journal_of, living, memory, parked, result

__all__ = ["memory"]

Ctx = ProcessContext[World]


async def until_parked_in(handle: Any, segment: int) -> None:
    async def there() -> bool:
        row = await handle.record()
        return row.status == "waiting" and row.record.segment == segment

    await until(there)


# ---------------------------------------------------------------------- checkpoints


@process
async def summing(ctx: Ctx, rounds: int) -> int:
    total, number = ctx.state or [0, 0]
    while number < rounds:
        total += await ctx.wait_signal("add")
        number += 1
        await ctx.step(ctx.deps.act, number)
        await ctx.checkpoint([total, number])
    return total


async def test_a_checkpoint_forgets_what_was_recorded_and_keeps_the_signals_that_wait(place: Place) -> None:
    world = World()
    async with dying(place, summing, deps=world) as runtime:
        handle = await runtime.start(summing, {"rounds": 4}, id="p")
        for number in (1, 10):
            await handle.signal("add", number)
        await until(lambda: world.done == [1, 2])
        await until_waits_for(handle, "add")
        records = await journal_of(runtime, handle)
        assert [type(r).__name__ for r in records] == ["Segment", "Begun"]
        assert isinstance(records[0], Segment)
        assert (records[0].number, records[0].state) == (2, [11, 2])
    async with living(place, summing, deps=world) as runtime:
        handle = runtime.handle("p")
        for number in (100, 1000):
            await handle.signal("add", number)

        assert await result(handle) == 1111
        assert (await handle.record()).record.segment == 4
    assert world.done == [1, 2, 3, 4]


async def test_signals_of_another_name_outlive_a_checkpoint(place: Place) -> None:
    @process
    async def keeping(ctx: Ctx) -> list[Any]:
        if ctx.state is None:
            await ctx.wait_signal("first")
            await ctx.checkpoint("on", restart=True)
        return [await ctx.wait_signal("third"), await ctx.wait_signal("second")]

    async with dying(place, keeping) as runtime:
        handle = await runtime.start(keeping, id="p")
        await handle.signal("second", 2)
        await handle.signal("first", 1)
        await until_waits_for(handle, "third")
    async with living(place, keeping) as runtime:
        await runtime.handle("p").signal("third", 3)

        assert await result(runtime.handle("p")) == [3, 2]


async def test_the_state_is_a_copy_each_time(place: Place) -> None:
    @process
    async def changing(ctx: Ctx) -> Any:
        await ctx.checkpoint({"seen": [1]})
        ctx.state["seen"].append(2)
        return ctx.state

    async with living(place, changing) as runtime:
        assert await result(await runtime.start(changing)) == {"seen": [1]}


async def test_a_checkpoint_is_for_the_function_itself(place: Place) -> None:
    @process
    async def odd(ctx: Ctx) -> str:
        try:
            await ctx.gather(ctx.checkpoint(1), ctx.sleep(0))
        except InvalidInput as error:
            return str(error)
        return ""

    async with living(place, odd) as runtime:
        assert "for the function itself" in await result(await runtime.start(odd))


async def test_a_process_of_ten_thousand_rounds_keeps_one_of_them(memory: Place) -> None:
    @process
    async def looping(ctx: Ctx, rounds: int) -> int:
        for number in range(ctx.state or 0, rounds):
            ctx.now()
            await ctx.checkpoint(number + 1, restart=number + 1 == rounds)
        await ctx.wait_signal("go")
        return rounds

    async with living(memory, looping) as runtime:
        handle = await runtime.start(looping, {"rounds": 2000})
        await until_waits_for(handle, "go")

        assert len(await journal_of(runtime, handle)) == 2


async def test_a_large_state_is_kept_and_the_one_before_it_is_swept(place: Place) -> None:
    @process
    async def growing(ctx: Ctx) -> int:
        for letter in "ab"[len(ctx.state or ()) // 200_000 :]:
            await ctx.checkpoint((ctx.state or "") + letter * 200_000, restart=True)
        await ctx.wait_signal("go")
        return len(ctx.state)

    async with dying(place, growing) as runtime:
        handle = await runtime.start(growing, id="p")
        await until_waits_for(handle, "go")
        await runtime.store.sweep(grace=0)
    async with living(place, growing) as runtime:
        await runtime.handle("p").signal("go")

        assert await result(runtime.handle("p")) == 400_000


# ---------------------------------------------------------------------- where a checkpoint may stand


async def poll(cursor: int) -> int:
    return cursor + 1


async def test_the_call_after_a_checkpoint_that_no_replay_would_make_is_refused_before_it_is_recorded(
    place: Place,
) -> None:
    @process
    async def polling(ctx: Ctx) -> int:
        cursor = ctx.state or 0
        while cursor < 3:
            cursor = await ctx.step(poll, cursor)
            await ctx.checkpoint(cursor)
            await ctx.sleep(2)
        return cursor

    async with living(place, polling) as runtime:
        handle = await runtime.start(polling)
        with pytest.raises(ProcessFailed, match=r"first call after a checkpoint is sleep, .* begins with step poll"):
            await result(handle)

        failure = await handle.outcome(SOON)
        assert isinstance(failure, Failure)
        assert failure.code == "misplaced_checkpoint"
        assert "step, sleep, then checkpoint" in failure.message
        assert "restart=True" in failure.message
        assert [type(each).__name__ for each in await journal_of(runtime, handle)] == ["Segment"]


async def test_a_poller_that_sleeps_before_its_checkpoint_is_parked_every_round_and_ends(place: Place) -> None:
    clock = VirtualClock()

    @process
    async def polling(ctx: Ctx) -> int:
        cursor = ctx.state or 0
        while cursor < 3:
            cursor = await ctx.step(poll, cursor)
            await ctx.sleep(3600)
            await ctx.checkpoint(cursor)
        return cursor

    async with living(place, polling, clock=clock) as runtime:
        handle = await runtime.start(polling)
        for number in range(3):
            await until_parked_in(handle, number)
            clock.advance(3600)

        assert await result(handle) == 3
        assert (await handle.record()).record.segment == 3


@pytest.mark.parametrize("how", ["another step", "now", "branches", "a checkpoint first", "swallowed"])
async def test_whatever_the_function_does_not_begin_with_is_refused_after_a_checkpoint(place: Place, how: str) -> None:
    @process
    async def odd(ctx: Ctx) -> str:
        if how != "a checkpoint first":
            await ctx.step(poll, 1)
        await ctx.checkpoint("on")
        if how == "now":
            ctx.now()
        elif how == "branches":
            await ctx.gather(ctx.sleep(0))
        elif how == "swallowed":
            try:
                await ctx.sleep(0)
            except MisplacedCheckpoint:
                await ctx.wait_signal("go")
        else:
            await ctx.step(poll, 2, name="again")
        return "wrong"

    async with living(place, odd) as runtime:
        outcome = await (await runtime.start(odd)).outcome(SOON)

    assert isinstance(outcome, Failure)
    assert outcome.code == "misplaced_checkpoint"


async def test_a_checkpoint_that_begins_again_may_be_followed_by_whatever_its_state_leads_to(place: Place) -> None:
    world = World()

    @process
    async def in_stages(ctx: Ctx, name: str) -> list[Any]:
        stage = ctx.state or 0
        if stage == 0:
            await ctx.step(ctx.deps.act, f"{name} first")
            await ctx.checkpoint(1, restart=True)
        if stage == 1:
            await ctx.sleep(0)
            await ctx.checkpoint(2, restart=True)
        return [stage, await ctx.wait_signal("go"), await ctx.step(ctx.deps.act, f"{name} last")]

    async with dying(place, in_stages, deps=world) as runtime:
        await until_waits_for(await runtime.start(in_stages, {"name": "n"}, id="p"), "go")
    async with living(place, in_stages, deps=world) as runtime:
        await runtime.handle("p").signal("go", "on")

        assert await result(runtime.handle("p")) == [2, "on", "n last"]
        assert (await runtime.handle("p").record()).record.segment == 2
    assert world.done == ["n first", "n last"]


async def test_a_checkpoint_that_the_process_was_asked_to_end_at_does_not_begin_again(place: Place) -> None:
    inside, free = asyncio.Event(), asyncio.Event()

    @process
    async def waiting(ctx: Ctx) -> None:
        assert ctx.state is None
        inside.set()
        await free.wait()
        await ctx.checkpoint(1, restart=True)

    async with living(place, waiting) as runtime:
        handle = await runtime.start(waiting)
        await inside.wait()
        await handle.cancel()
        free.set()

        assert await handle.outcome(SOON) == Cancelled("host", "")


# ---------------------------------------------------------------------- beginning anew


@process
async def counting_down(ctx: Ctx, n: int) -> list[Any]:
    await ctx.step(ctx.deps.act, n)
    if n:
        await ctx.continue_as_new({"n": n - 1})
    return [n, await ctx.wait_signal("go")]


async def test_to_begin_anew_is_the_same_process_with_other_arguments_and_nothing_to_replay(place: Place) -> None:
    world = World()
    async with dying(place, counting_down, deps=world) as runtime:
        handle = await runtime.start(counting_down, {"n": 3}, id="p")
        await handle.signal("go", "early")  # waits through three segments
        await until(lambda: 0 in world.done)
    async with living(place, counting_down, deps=world) as runtime:
        assert await result(runtime.handle("p")) == [0, "early"]
        assert (await runtime.handle("p").record()).record.segment == 3
    assert world.done == [3, 2, 1, 0]


async def test_arguments_that_the_function_would_not_take_are_refused_at_the_line(place: Place) -> None:
    @process
    async def anew(ctx: Ctx, n: int = 0) -> str:
        try:
            await ctx.continue_as_new({"m": 1})
        except InvalidInput as error:
            return str(error)

    async with living(place, anew) as runtime:
        assert "invalid arguments for process anew" in await result(await runtime.start(anew))


# ---------------------------------------------------------------------- children


@process
async def child(ctx: Ctx, n: int) -> Any:
    return [n, await ctx.wait_signal("go")]


@process
async def parent(ctx: Ctx, end: ParentEnd = "cancel") -> Any:
    first = await ctx.start(child, {"n": 1}, parent_end=end)
    second = await ctx.start(child, {"n": 2}, label="the second", parent_end=end)
    await first.signal("go", "hello")
    got = await first.result()
    return [first.id, got, second.to_json(), await ctx.wait_signal("end")]


async def test_a_child_is_started_once_and_belongs_to_its_parent(place: Place) -> None:
    async with dying(place, parent, child) as runtime:
        handle = await runtime.start(parent, id="p")
        await until_waits_for(handle, "end")
    async with living(place, parent, child) as runtime:
        await runtime.handle("p").signal("end", "E")

        assert await result(runtime.handle("p")) == [
            "p.1",
            [1, "hello"],
            {"__handle__": "process", "id": "p.2"},
            "E",
        ]
        rows = {row.id: row for row in await runtime.processes.list(parent="p")}
        assert sorted(rows) == ["p.1", "p.2"]
        assert rows["p.2"].registration.label == "the second"
        assert rows["p.2"].registration.cause == Cause("process", "p")


@pytest.mark.parametrize(("end", "status"), [("cancel", "cancelled"), ("abandon", "waiting")])
async def test_what_becomes_of_a_child_when_its_parent_ends_first(place: Place, end: str, status: str) -> None:
    async with living(place, parent, child) as runtime:
        handle = await runtime.start(parent, {"end": end}, id="p")
        await parked(runtime.handle("p.2")) if await seen(runtime, "p.2") else None
        await handle.signal("end")
        await result(handle)
        if end == "cancel":
            assert await runtime.handle("p.2").outcome(SOON) == Cancelled("parent p", "its parent has ended")

        assert (await runtime.processes.get("p.2")).status == status


async def seen(runtime: Any, process_id: str) -> bool:
    async def there() -> bool:
        return await runtime.store.process(process_id) is not None

    await until(there)
    return True


async def test_children_of_later_segments_are_other_children(place: Place) -> None:
    @process
    async def leaf(ctx: Ctx, n: int) -> int:
        return await ctx.step(ctx.deps.act, n)

    @process
    async def starting(ctx: Ctx) -> int:
        total, number = ctx.state or [0, 1]
        while number < 4:
            started = await ctx.start(leaf, {"n": number})
            total, number = total + await started.result(), number + 1
            await ctx.checkpoint([total, number])
        return total

    world = World()
    async with living(place, starting, leaf, deps=world) as runtime:
        assert await result(await runtime.start(starting, id="p")) == 6
        assert sorted(r.id for r in await runtime.processes.list(parent="p")) == ["p.1", "p.s1.1", "p.s2.1"]
    assert sorted(world.done) == [1, 2, 3]


async def test_how_children_end_is_told_at_the_line_that_waits(place: Place) -> None:
    @process
    async def failing(ctx: Ctx) -> None:
        raise ValueError("no")

    @process
    async def watching(ctx: Ctx) -> list[Any]:
        said: list[Any] = []
        one = await ctx.start(failing)
        two = await ctx.start(child, {"n": 1})
        for each in (one, two):
            try:
                await each.result(timeout=0.05 if each is two else None)
            except (ProcessFailed, TimedOut) as error:
                said.append(type(error).__name__)
        await two.cancel("enough")
        try:
            await two.result()
        except ProcessCancelled as error:
            said.append(str(error))
        await ctx.wait_signal("go")
        return said

    async with living(place, watching, failing, child) as runtime:
        handle = await runtime.start(watching, id="p")
        await until_waits_for(handle, "go")
        await handle.signal("go")

        assert await result(handle) == [
            "ProcessFailed",
            "TimedOut",
            "process 'p.2' was cancelled by process p: enough",
        ]


async def test_what_cannot_be_asked_of_another_process_is_said_at_the_line_on_every_replay(place: Place) -> None:
    @process
    async def asking(ctx: Ctx) -> list[Any]:
        said: list[Any] = []
        over = await ctx.start(leaf)
        await over.result()
        calls = (
            lambda: ctx.result("nobody"),
            lambda: ctx.result(ctx.process_id),
            lambda: over.signal("go"),
            lambda: ctx.start("no such function"),
            lambda: ctx.result({"__handle__": "turn", "id": "x"}),
        )
        for each in calls:
            try:
                await each()
            except (UnknownProcess, StepFailed, InvalidInput) as error:
                said.append((type(error).__name__, getattr(error, "fault", None)))
        await ctx.wait_signal("go")
        return said

    @process
    async def leaf(ctx: Ctx) -> None: ...

    async with living(place, asking, leaf) as runtime:
        handle = await runtime.start(asking)
        await until_waits_for(handle, "go")
        await runtime.processes.register("nobody")  # too late: it has said so
        await handle.signal("go")

        assert await result(handle) == [
            ["UnknownProcess", None],
            ["InvalidInput", None],
            ["StepFailed", "process_already_terminal"],
            ["StepFailed", "invalid_process"],
            ["InvalidHandle", None],
        ]


async def test_a_payload_that_a_child_would_not_take_is_refused(place: Place) -> None:
    @process(signals={"go": int})
    async def typed(ctx: Ctx) -> int:
        return await ctx.wait_signal("go", int)

    @process
    async def telling(ctx: Ctx) -> list[Any]:
        started = await ctx.start(typed)
        try:
            await started.signal("go", "one")
        except StepFailed as failed:
            await started.signal("go", 1)
            return [failed.fault, await started.result()]
        return []

    async with living(place, telling, typed) as runtime:
        assert await result(await runtime.start(telling)) == ["invalid_process", 1]


async def test_whoever_waits_for_what_was_pruned_is_told_so(place: Place) -> None:
    @process
    async def late(ctx: Ctx) -> str:
        await ctx.wait_signal("go")
        try:
            return str(await ctx.result("gone"))
        except ProcessPruned as pruned:
            return pruned.code

    clock = VirtualClock()
    async with living(place, late, child, clock=clock) as runtime:
        await (await runtime.start(child, {"n": 1}, id="gone")).signal("go")
        await result(runtime.handle("gone"))
        handle = await runtime.start(late)
        await parked(handle)
        clock.advance(1)
        assert await runtime.processes.prune(older_than=0) == 1
        await handle.signal("go")

        assert await result(handle) == ProcessPruned.code


async def test_a_parent_that_is_parked_wakes_when_its_child_ends_with_a_huge_result(memory: Place) -> None:
    clock = VirtualClock()

    @process
    async def huge(ctx: Ctx) -> str:
        await ctx.sleep(600)
        return "x" * 200_000

    @process
    async def waiting(ctx: Ctx) -> int:
        started = await ctx.start(huge)
        return len(await started.result())

    async with living(memory, waiting, huge, clock=clock) as runtime:
        handle = await runtime.start(waiting, id="p")
        await parked(handle)
        await parked(runtime.handle("p.1"))
        clock.advance(600)

        assert await result(handle) == 200_000


async def test_events_are_told_once_and_only_those_that_were_declared(place: Place) -> None:
    @process(events=["half_way"])
    async def telling(ctx: Ctx) -> str:
        await ctx.emit("half_way", {"percent": 50})
        await ctx.wait_signal("go")
        try:
            await ctx.emit("elsewhere")
        except InvalidInput as error:
            return str(error)
        return ""

    async with living(place, telling) as runtime:
        handle = await runtime.start(telling)
        await parked(handle)
        await handle.signal("go")

        assert "declares no event 'elsewhere'" in await result(handle)
        told = [e.payload async for e in handle.events() if e.type == "half_way"]
        records = [r for r in await journal_of(runtime, handle) if isinstance(r, Done) and r.kind == "emit"]
    assert told == [{"percent": 50}]
    assert len(records) == 1
