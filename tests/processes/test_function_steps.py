"""Steps of durable functions: done once, recorded, retried, cut off, and what becomes of each after a crash."""

from __future__ import annotations

import asyncio
import datetime
import functools
import threading
from typing import Any

import pytest

from perdure import ProcessContext, Retry, ToolContext, ToolError, process, tool
from perdure.errors import OutcomeUnknown, ProcessFailed, StepFailed
from perdure.model.process import Failure
from perdure.model.record import Begun, Done, StepFaltered
from perdure.testing import VirtualClock
from tests.keys import within_store
from tests.kit import SOON, Place, until
from tests.processes.functions import World, dying, journal_of, living, memory, parked, result

__all__ = ["memory"]

Ctx = ProcessContext[World]


def finished(records: list[Any]) -> list[Done]:
    return [record for record in records if isinstance(record, Done)]


# ---------------------------------------------------------------------- once


@process
async def two_steps(ctx: Ctx) -> list[Any]:
    first = await ctx.step(ctx.deps.act, "first")
    await ctx.wait_signal("go")
    return [first, await ctx.step(ctx.deps.act_now, "second")]


async def test_a_recorded_step_is_not_done_again(place: Place) -> None:
    world = World()
    async with dying(place, two_steps, deps=world) as runtime:
        await parked(await runtime.start(two_steps, id="p"))
    async with living(place, two_steps, deps=world) as runtime:
        handle = runtime.handle("p")
        await handle.signal("go")

        assert await result(handle) == ["first", "second"]
    assert world.count == {"first": 1, "second": 1}


async def test_one_step_costs_a_registration_and_two_writes(file: Place) -> None:
    world = World()

    @process
    async def unit(ctx: Ctx) -> str:
        return await ctx.step(ctx.deps.act, "it")

    async with living(file, unit, deps=world) as runtime:
        handle = await runtime.start(unit)
        await result(handle)
        events = [(e.sequence, e.type) async for e in handle.events()]
        records = await journal_of(runtime, handle)

    assert events == [(1, "process.created"), (2, "process.first_started"), (3, "process.completed")]
    assert [type(record) for record in records] == [Begun, Done]


@process
async def careful(ctx: Ctx) -> list[str]:
    try:
        return ["done", await ctx.step(ctx.deps.act, "pay")]
    except OutcomeUnknown as unknown:
        await ctx.wait_signal("go")
        return [unknown.step, unknown.fault, unknown.message]


async def test_a_once_step_that_a_crash_cut_off_is_unknown_at_its_line_and_stays_so(place: Place) -> None:
    world = World()
    world.open.clear()
    async with dying(place, careful, deps=world) as runtime:
        await runtime.start(careful, id="p")
        await world.has_begun("pay")
    world.open.set()
    async with living(place, careful, deps=world) as runtime:
        handle = runtime.handle("p")
        await parked(handle)  # the second life has written it down; the third only reads it
        await handle.signal("go")

        assert await result(handle) == ["act", "outcome_unknown", "its worker died before its end was written"]
    assert world.count == {}


async def test_a_once_step_that_leaving_cut_off_is_unknown(place: Place) -> None:
    world = World()
    world.open.clear()
    async with living(place, careful, deps=world, grace=0) as runtime:
        await runtime.start(careful, id="p")
        await world.has_begun("pay")
    async with living(place, careful, deps=world) as runtime:
        handle = runtime.handle("p")
        await parked(handle)
        await handle.signal("go")

        assert await result(handle) == ["act", "outcome_unknown", "the runtime was left while it ran"]


# ---------------------------------------------------------------------- rerun


@process
async def rerunning(ctx: Ctx) -> Any:
    return await ctx.step(ctx.deps.act, "note", recovery="rerun")


async def test_a_rerun_step_is_done_again_after_each_crash_and_counted(place: Place) -> None:
    world = World()
    world.open.clear()
    async with dying(place, rerunning, deps=world) as runtime:
        await runtime.start(rerunning, id="p")
        await world.has_begun("note")
    async with dying(place, rerunning, deps=world):
        await until(lambda: len(world.begun) == 2)
    world.open.set()
    async with living(place, rerunning, deps=world) as runtime:
        assert await result(runtime.handle("p")) == "note"
        [done] = finished(await journal_of(runtime, runtime.handle("p")))

    assert (done.attempts, done.repeated) == (3, 2)
    assert world.begun == ["note"] * 3


async def test_a_rerun_step_that_leaving_cut_off_counts_as_repeated(place: Place) -> None:
    world = World()
    world.open.clear()
    async with living(place, rerunning, deps=world, grace=0) as runtime:
        await runtime.start(rerunning, id="p")
        await world.has_begun("note")
    world.open.set()
    async with living(place, rerunning, deps=world) as runtime:
        assert await result(runtime.handle("p")) == "note"
        [done] = finished(await journal_of(runtime, runtime.handle("p")))

    assert (done.attempts, done.repeated) == (2, 1)


@process
async def two_reruns(ctx: Ctx) -> Any:
    return await ctx.gather(*(ctx.step(ctx.deps.act, n, recovery="rerun") for n in (1, 2)))


def begun_so_often(world: World, count: int) -> bool:
    return len(world.begun) == count


async def test_every_branch_counts_what_it_repeats(place: Place) -> None:
    world = World()
    world.open.clear()
    for life in (1, 2):
        async with dying(place, two_reruns, deps=world) as runtime:
            if life == 1:
                await runtime.start(two_reruns, id="p")
            await until(functools.partial(begun_so_often, world, 2 * life))
    world.open.set()
    async with living(place, two_reruns, deps=world) as runtime:
        assert await result(runtime.handle("p")) == [1, 2]
        done = finished(await journal_of(runtime, runtime.handle("p")))

    assert {d.key: (d.attempts, d.repeated) for d in done} == {"1.0.1": (3, 2), "1.1.1": (3, 2)}


# ---------------------------------------------------------------------- failing and trying again


async def test_a_failed_step_raises_the_same_at_its_line_on_every_replay(place: Place) -> None:
    calls = []

    async def fail() -> None:
        calls.append(1)
        raise ToolError("no such account", code="unknown_account", data={"account": 7})

    @process
    async def failing(ctx: Ctx) -> list[Any]:
        try:
            await ctx.step(fail)
        except StepFailed as failed:
            await ctx.wait_signal("go")
            return [failed.step, failed.fault, failed.message, failed.data]
        return []

    async with living(place, failing) as runtime:
        handle = await runtime.start(failing)
        await parked(handle)
        await handle.signal("go")

        assert await result(handle) == ["fail", "unknown_account", "no such account", {"account": 7}]
    assert calls == [1]


async def test_a_step_that_fails_for_good_ends_the_process_and_says_how(place: Place) -> None:
    async def fail() -> None:
        raise ValueError("no\0 such \ud800 thing")

    @process
    async def failing(ctx: Ctx) -> None:
        await ctx.step(fail)

    async with living(place, failing) as runtime:
        handle = await runtime.start(failing)
        with pytest.raises(ProcessFailed, match=r"step fail: ValueError: no\ufffd such \ufffd thing") as failed:
            await result(handle)

    assert failed.value.outcome["code"] == "raised"


async def test_attempts_wait_for_their_recorded_due_time_across_a_crash(memory: Place) -> None:
    clock, tries = VirtualClock(), list[int]()

    async def flaky() -> str:
        tries.append(clock.now() - 1_767_225_600_000)
        if len(tries) < 3:
            raise Retry("busy", after=40)
        return "through"

    @process
    async def trying(ctx: Ctx) -> Any:
        return await ctx.step(flaky, retries=2)

    async with dying(memory, trying, clock=clock) as runtime:
        handle = await runtime.start(trying, id="p")
        assert (await parked(handle)).due == 1_767_225_640_000
        clock.advance(15)  # 25 are left, in whatever life
    async with living(memory, trying, clock=clock) as runtime:
        handle = runtime.handle("p")
        clock.advance(25)
        await until(lambda: len(tries) == 2)
        await parked(handle)
        clock.advance(40)

        assert await result(handle) == "through"
        [done] = finished(await journal_of(runtime, handle))
    assert tries == [0, 40_000, 80_000]
    assert (done.attempts, done.repeated) == (3, 0)


async def test_a_step_that_raised_is_tried_again_though_it_is_once_and_no_more_often_than_it_says(place: Place) -> None:
    tries = []

    async def flaky() -> None:
        tries.append(1)
        raise Retry("busy", after=0)

    @process
    async def trying(ctx: Ctx) -> Any:
        try:
            await ctx.step(flaky, retries=2)
        except StepFailed as failed:
            return failed.message

    async with living(place, trying) as runtime:
        handle = await runtime.start(trying)

        assert await result(handle) == "busy"
        records = await journal_of(runtime, handle)
    assert len(tries) == 3
    assert [type(r) for r in records] == [Begun, StepFaltered, Begun, StepFaltered, Begun, Done]


async def test_a_crash_uses_up_no_retry(place: Place) -> None:
    world, tries = World(), []
    world.open.clear()

    async def flaky() -> str:
        await world.act("try")
        tries.append(1)
        if len(tries) == 1:
            raise Retry("busy", after=0)
        return "through"

    @process
    async def trying(ctx: Ctx) -> Any:
        return await ctx.step(flaky, retries=1, recovery="rerun")

    async with dying(place, trying) as runtime:
        await runtime.start(trying, id="p")
        await world.has_begun("try")
    world.open.set()
    async with living(place, trying) as runtime:
        assert await result(runtime.handle("p")) == "through"
        [done] = finished(await journal_of(runtime, runtime.handle("p")))

    assert (done.attempts, done.repeated) == (3, 1)


async def test_a_once_step_out_of_time_is_unknown_and_a_rerun_one_is_tried_again(place: Place) -> None:
    tries = []

    async def slow(who: str) -> str:
        tries.append(who)
        if tries.count(who) == 1:
            await asyncio.Event().wait()
        return who

    @process
    async def hurried(ctx: Ctx) -> list[str]:
        try:
            await ctx.step(slow, "once", timeout=0.01)
        except OutcomeUnknown as unknown:
            return [unknown.message, await ctx.step(slow, "rerun", timeout=0.01, retries=1, recovery="rerun")]
        return []

    async with living(place, hurried) as runtime:
        assert await result(await runtime.start(hurried)) == ["it did not end within 0.01 s", "rerun"]

    assert tries == ["once", "rerun", "rerun"]


# ---------------------------------------------------------------------- what runs


async def test_sync_steps_run_on_a_thread(place: Place) -> None:
    @process
    async def threads(ctx: Ctx) -> bool:
        return await ctx.step(lambda: threading.current_thread() is threading.main_thread(), name="which")

    async with living(place, threads) as runtime:
        assert await result(await runtime.start(threads)) is False


async def test_a_tool_as_a_step_brings_its_contract_and_the_same_key_for_every_attempt(place: Place) -> None:
    seen: list[tuple[str, str, int, Any]] = []

    @tool(recovery="rerun", retries=1)
    async def pay(order: int, ctx: ToolContext[World]) -> str:
        """Pay."""
        seen.append((ctx.tool, within_store(ctx.idempotency_key), ctx.attempt, ctx.deps))
        ctx.progress({"paying": order})
        if len(seen) == 1:
            raise Retry("busy", after=0)
        return f"paid {order}"

    @process
    async def paying(ctx: Ctx) -> Any:
        await ctx.sleep(0)
        return await ctx.step(pay, order=7)

    world = World()
    async with living(place, paying, deps=world) as runtime:
        handle = await runtime.start(paying, id="p")

        assert await result(handle) == "paid 7"
        assert (await handle.record()).record.progress == {"paying": 7}
    assert seen == [("pay", "p.2", 1, world), ("pay", "p.2", 2, world)]


async def test_keys_of_later_segments_are_other_keys(place: Place) -> None:
    keys: list[str] = []

    @tool
    async def note(ctx: ToolContext[Any]) -> None:
        """Note."""
        keys.append(within_store(ctx.idempotency_key))

    @process
    async def looping(ctx: Ctx) -> None:
        for number in range(ctx.state or 0, 3):
            await ctx.step(note)
            await ctx.checkpoint(number + 1)

    async with living(place, looping) as runtime:
        await result(await runtime.start(looping, id="p"))

    assert keys == ["p.1", "p.s1.1", "p.s2.1"]


async def test_a_tool_that_asks_a_person_is_no_step(place: Place) -> None:
    @tool(recovery="ask")
    async def pay(ctx: ToolContext[Any]) -> None:
        """Pay."""

    @process
    async def paying(ctx: Ctx) -> None:
        await ctx.step(pay)

    async with living(place, paying) as runtime:
        with pytest.raises(ProcessFailed, match="say recovery='once' or 'rerun'"):
            await result(await runtime.start(paying))


async def test_a_step_may_not_use_the_context(place: Place) -> None:
    @process
    async def nested(ctx: Ctx) -> str:
        async def inner() -> None:
            await ctx.sleep(0)

        try:
            await ctx.step(inner)
        except StepFailed as failed:
            return failed.message
        return ""

    async with living(place, nested) as runtime:
        assert (await result(await runtime.start(nested))).startswith("ForeignTask: ")


# ---------------------------------------------------------------------- results


async def test_results_are_json_on_the_first_run_too(place: Place) -> None:
    async def odd() -> Any:
        return {"when": datetime.date(2026, 1, 2), "pair": (1, 2), "nan": float("nan"), 3: {4}}

    @process
    async def returning(ctx: Ctx) -> list[Any]:
        before = await ctx.step(odd)
        await ctx.wait_signal("go")
        return [before]

    async with living(place, returning) as runtime:
        handle = await runtime.start(returning)
        await handle.signal("go")
        first = await result(handle)
        handle = await runtime.start(returning)
        await parked(handle)
        await handle.signal("go")

        assert first == await result(handle) == [{"when": "2026-01-02", "pair": [1, 2], "nan": "NaN", "3": [4]}]


async def test_what_a_function_does_to_a_result_is_not_in_its_record(place: Place) -> None:
    async def rows() -> list[int]:
        return [1]

    @process
    async def changing(ctx: Ctx, given: list[int]) -> Any:
        given.append(2)
        found = await ctx.step(rows)
        found.append(2)
        told = await ctx.wait_signal("go")
        told.append(2)
        await ctx.wait_signal("on")
        return [given, found, told]

    async with living(place, changing) as runtime:
        handle = await runtime.start(changing, {"given": [1]})
        await parked(handle)
        await handle.signal("go", [1])
        await parked(handle)
        await handle.signal("on")

        assert await result(handle) == [[1, 2], [1, 2], [1, 2]]


async def test_a_result_that_is_no_json_fails_the_step_and_the_process_goes_on(place: Place) -> None:
    async def odd() -> Any:
        return object()

    @process
    async def returning(ctx: Ctx) -> Any:
        try:
            await ctx.step(odd)
        except StepFailed as failed:
            return failed.fault

    async with living(place, returning) as runtime:
        assert await result(await runtime.start(returning)) == "invalid_output"


async def test_a_function_that_returns_no_json_fails(place: Place) -> None:
    @process
    async def returning(ctx: Ctx) -> Any:
        return object()

    async with living(place, returning) as runtime:
        handle = await runtime.start(returning)
        with pytest.raises(ProcessFailed, match="invalid_output"):
            await result(handle)


async def test_huge_results_are_kept_beside_the_store_and_survive_a_sweep(place: Place) -> None:
    async def huge() -> str:
        return "x" * 300_000

    @process
    async def returning(ctx: Ctx) -> Any:
        first = await ctx.step(huge)
        await ctx.wait_signal("go")
        return first + await ctx.wait_signal("more")

    async with living(place, returning) as runtime:
        handle = await runtime.start(returning)
        await parked(handle)
        await runtime.store.sweep(grace=0)
        await handle.signal("go")
        await handle.signal("more", "y" * 100_000)
        ended = await result(handle)
        await runtime.store.sweep(grace=0)

        assert ended == await handle.result(SOON) == "x" * 300_000 + "y" * 100_000


async def test_an_error_as_long_as_a_book_is_cut(place: Place) -> None:
    async def fail() -> None:
        raise ValueError("x" * 1_000_000)

    @process
    async def failing(ctx: Ctx) -> None:
        await ctx.step(fail)

    async with living(place, failing) as runtime:
        outcome = await (await runtime.start(failing)).outcome(SOON)

    assert isinstance(outcome, Failure)
    assert 16_000 < len(outcome.message) < 17_000


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"retries": -1}, "give a whole number, 0 or more"),
        ({"timeout": 0}, "give seconds, more than 0"),
        ({"recovery": "ask"}, "say recovery='once' or 'rerun'"),
    ],
)
async def test_options_of_a_step_that_mean_nothing_are_refused(
    memory: Place, options: dict[str, Any], advice: str
) -> None:
    @process
    async def stepping(ctx: Ctx) -> None:
        await ctx.step(print, **options)

    async with living(memory, stepping) as runtime:
        with pytest.raises(ProcessFailed, match=advice):
            await result(await runtime.start(stepping))
