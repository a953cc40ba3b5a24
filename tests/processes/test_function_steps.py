"""Steps of durable functions: done once, recorded, retried, cut off, and what becomes of each after a crash."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Process, ProcessContext, Retry, Runtime, ToolContext, ToolError, call, process, tool
from perdure.errors import (
    InvalidInput,
    InvalidProcess,
    OutcomeUnknown,
    ProcessEnded,
    ProcessFailed,
    StepFailed,
    UnknownStep,
)
from perdure.model.process import Cancelled, Failure
from perdure.model.record import Begun, Done, StepFaltered
from perdure.model.write import Register
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import VirtualClock
from tests.keys import within_store
from tests.kit import SOON, Place, crash, until
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
    assert [type(record) for record in records] == [Done]


@process
async def careful(ctx: Ctx) -> list[str]:
    try:
        return ["done", await ctx.step(ctx.deps.act, "pay", recovery="once")]
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
async def nightly(ctx: Ctx) -> list[Any]:
    return [await ctx.step(ctx.deps.act, "count"), await ctx.step(ctx.deps.act, "publish")]


@pytest.mark.parametrize("shut", ["count", "publish"])
async def test_a_step_that_declares_nothing_is_done_again_after_a_crash_and_counted(place: Place, shut: str) -> None:
    class Holding(World):
        async def act(self, what: Any = "act") -> Any:
            self.begun.append(what)
            if what == shut and self.begun.count(what) == 1:
                await asyncio.Event().wait()
            self.done.append(what)
            return what

    world = Holding()
    async with dying(place, nightly, deps=world) as runtime:
        await runtime.start(nightly, id="p")
        await world.has_begun(shut)
    async with living(place, nightly, deps=world) as runtime:
        assert await result(runtime.handle("p")) == ["count", "publish"]
        done = finished(await journal_of(runtime, runtime.handle("p")))

    [counted] = [(each.attempts, each.repeated) for each in done if shut in each.asked]
    assert counted == (2, 1)
    assert world.count[shut] == 1


class Former(MemoryStore):
    """A store whose processes were begun when steps were never repeated by default."""

    async def write(self, write: Any) -> Any:
        if isinstance(write, Register):
            write = replace(write, registration=replace(write.registration, step_recovery="once"))
        return await super().write(write)


@process
async def relying(ctx: Ctx) -> list[str]:
    try:
        return [await ctx.step(ctx.deps.act, "pay")]
    except OutcomeUnknown as unknown:
        return [unknown.step, unknown.fault, await ctx.step(ctx.deps.act, "tidy")]


async def test_a_process_that_was_begun_before_the_default_changed_keeps_it_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, rows = World(), MemoryRows()
    world.open.clear()
    runtime = await Runtime(Former(rows), processes=[relying], deps=world).__aenter__()
    await runtime.start(relying, id="p")
    await world.has_begun("pay")
    await crash(runtime)
    world.open.set()
    caplog.clear()
    async with Runtime(Former(rows), processes=[relying], deps=world) as runtime:
        assert await result(runtime.handle("p")) == ["act", "outcome_unknown", "tidy"]

    [line] = [each.getMessage() for each in caplog.records if "without recovery=" in each.getMessage()]
    assert line.startswith("durable function relying@1 has steps without recovery=, and process p was begun when")
    assert "say recovery='once' or 'ask' for steps that must not be done twice" in line
    assert world.count == {"tidy": 1}


async def test_a_process_that_is_begun_now_logs_nothing_about_the_default(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async with living(place, nightly, deps=World()) as runtime:
        await result(await runtime.start(nightly))

    assert [each for each in caplog.records if "recovery" in each.getMessage()] == []


async def test_a_step_that_began_as_once_stays_so_though_its_code_declares_nothing_any_more(place: Place) -> None:
    """What a record says holds for its attempt, whatever default the code has by now."""

    def version(declared: Any) -> Process[Any, Any]:
        @process(name="changing")
        async def changing(ctx: Ctx) -> str:
            try:
                options = {} if declared is None else {"recovery": declared}
                return str(await ctx.step(ctx.deps.act, "pay", **options))
            except OutcomeUnknown:
                return "unknown"

        return changing

    world = World()
    world.open.clear()
    before, after = version("once"), version(None)
    async with dying(place, before, deps=world) as runtime:
        await runtime.start(before, id="p")
        await world.has_begun("pay")
    world.open.set()
    async with living(place, after, deps=world) as runtime:
        assert await result(runtime.handle("p")) == "unknown"
    assert world.count == {}


# ---------------------------------------------------------------------- ask


@dataclasses.dataclass
class Receipt:
    number: int


async def pay_with(world: World) -> Receipt:
    await world.act("pay")
    return Receipt(7)


@process
async def paying(ctx: Ctx) -> str:
    try:
        receipt = await ctx.step(call(pay_with, ctx.deps), recovery="ask")
    except StepFailed as failed:
        return f"{failed.fault}: {failed.message}"
    return f"receipt {receipt.number}"


async def interrupted(place: Place, world: World) -> None:
    """Kill a worker in the step of `paying`."""
    world.open.clear()
    async with dying(place, paying, deps=world) as runtime:
        await runtime.start(paying, id="p")
        await world.has_begun("pay")
    world.open.set()


@pytest.mark.parametrize(
    ("verdict", "options", "ends", "made"),
    [
        ("done", {"value": {"number": 9}}, "receipt 9", 0),
        ("rerun", {}, "receipt 7", 1),
        ("failed", {"reason": "the bank says no"}, "settled_as_failed: the bank says no", 0),
    ],
)
async def test_an_ask_step_that_a_crash_cut_off_waits_until_a_person_has_settled_it(
    place: Place, verdict: Any, options: dict[str, Any], ends: str, made: int
) -> None:
    world = World()
    await interrupted(place, world)
    async with living(place, paying, deps=world) as runtime:
        row = await parked(runtime.handle("p"))
    async with living(place, paying, deps=world) as runtime:  # it waits on disk, for whichever worker comes
        handle = runtime.handle("p")
        [asked] = await handle.pending()
        await handle.settle(asked.call_id, verdict, by="kim", **options)

        assert await result(handle) == ends
    assert row.live
    assert (asked.call_id, asked.kind, asked.tool) == ("p.1", "recovery", "pay_with")
    assert world.count["pay"] == made


async def test_an_ask_step_that_is_settled_as_rerun_and_cut_off_again_asks_again(place: Place) -> None:
    world = World()
    await interrupted(place, world)
    world.open.clear()
    async with dying(place, paying, deps=world) as runtime:
        handle = runtime.handle("p")
        await parked(handle)
        await handle.settle("p.1", "rerun")
        await until(lambda: len(world.begun) == 2)
    world.open.set()
    async with living(place, paying, deps=world) as runtime:
        handle = runtime.handle("p")
        await parked(handle)
        begun = len(world.begun)
        await handle.settle("p.1", "rerun")

        assert await result(handle) == "receipt 7"
        [done] = finished(await journal_of(runtime, handle))
    assert (begun, len(world.begun)) == (2, 3)
    assert (done.attempts, done.repeated) == (3, 2)


async def test_an_ask_step_that_is_cancelled_while_it_waits_ends_as_unknown(place: Place) -> None:
    world = World()
    await interrupted(place, world)
    async with living(place, paying, deps=world) as runtime:
        handle = runtime.handle("p")
        await parked(handle)
        await handle.cancel("enough")
        outcome = await handle.outcome(SOON)

    assert outcome == Cancelled("host", "enough", unknown=True)


async def test_a_settlement_that_does_not_fit_the_annotation_is_logged_and_another_one_is_taken(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    await interrupted(place, world)
    async with living(place, paying, deps=world) as runtime:
        handle = runtime.handle("p")
        await parked(handle)
        await handle.settle("p.1", "done", value="nine")
        await until(lambda: any("is not used, settle it again" in each.getMessage() for each in caplog.records))
        await parked(handle)
        await handle.settle("p.1", "done", value={"number": 9})

        assert await result(handle) == "receipt 9"


async def test_a_settlement_that_nothing_waits_for_is_refused(place: Place) -> None:
    world = World()
    perhaps: Any = "perhaps"
    await interrupted(place, world)
    async with living(place, paying, deps=world) as runtime:
        handle = runtime.handle("p")
        await parked(handle)
        with pytest.raises(UnknownStep, match=r"call 'p\.2': no step waits.*handle\.pending\(\)"):
            await handle.settle("p.2", "done")
        with pytest.raises(InvalidInput, match="settle a step as 'rerun', 'done' or 'failed', not 'perhaps'"):
            await handle.settle("p.1", perhaps)
        with pytest.raises(InvalidProcess, match=r"a step is settled with `handle\.settle\(call_id, verdict\)`"):
            await handle.signal("settle:1:1:pay_with", {"verdict": "done"})
        receipt = await handle.signal("unasked")
        await handle.settle("p.1", "rerun")
        await result(handle)
        with pytest.raises(ProcessEnded):
            await handle.settle("p.1", "rerun")

    assert receipt.note("unasked").startswith("it does not wait for 'unasked', it waits for no signal now")


async def test_a_tool_that_asks_a_person_does_so_as_a_step_too(place: Place) -> None:
    world = World()

    @tool(recovery="ask")
    async def buy(ctx: ToolContext[Any]) -> str:
        """Buy."""
        await ctx.deps.act("buy")
        return ctx.idempotency_key

    @process(signals={})
    async def buying(ctx: Ctx) -> str:
        return str(await ctx.step(buy))

    world.open.clear()
    async with dying(place, buying, deps=world) as runtime:
        await runtime.start(buying, id="p")
        await world.has_begun("buy")
    world.open.set()
    async with living(place, buying, deps=world) as runtime:
        handle = runtime.handle("p")
        await parked(handle)
        await handle.settle("p.1", "rerun")

        assert (await result(handle)).endswith(".p.1")
    assert world.count == {"buy": 1}


# ---------------------------------------------------------------------- rerun, declared


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
        ({"recovery": "never"}, "say recovery='rerun', 'once' or 'ask'"),
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
