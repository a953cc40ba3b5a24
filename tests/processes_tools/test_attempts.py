"""What holds for a tool in the foreground holds for it in the background: attempts, time, places, requests to stop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from perdure import Retry, Runtime, ToolContext, ToolError, tool
from perdure.model.process import Abandoned, Cancelled, Failure, Success
from perdure.testing.clock import VirtualClock
from perdure.tools.define import Tool
from tests.keys import within_store
from tests.kit import SOON, Place, until, wait_for_thread
from tests.processes_tools.talk import Talk, agent_of, call, ended, event_types, row_of, said

FIRST = "chat.1.1.0"


async def started(runtime: Runtime) -> None:
    """Make the model ask for what it was told to."""
    await said(runtime)


# ---------------------------------------------------------------------- retries


def flaky(times: int, **options: Any) -> tuple[Tool[..., Any], list[int]]:
    """A tool that asks for another attempt so often."""
    attempts: list[int] = []

    @tool(background=True, **options)
    async def look(ctx: ToolContext[Any]) -> str:
        attempts.append(ctx.attempt)
        if ctx.attempt <= times:
            raise Retry("not yet", after=60)
        return "found"

    return look, attempts


@pytest.mark.parametrize("recovery", ["once", "rerun", "ask"])
async def test_a_retry_parks_the_process_until_it_is_due(place: Place, recovery: str) -> None:
    look, attempts = flaky(1, retries=1, recovery=recovery)
    clock = VirtualClock()
    async with place.runtime(agent_of(Talk([call("look")]), look), clock=clock) as runtime:
        await started(runtime)
        await until(lambda: waits(runtime))
        row = await row_of(runtime, FIRST)
        assert row.owner is None
        assert row.due == clock.now() + 60_000

        clock.advance(59)
        assert (await row_of(runtime, FIRST)).status == "waiting"
        clock.advance(1)
        assert await runtime.handle(FIRST).result(SOON) == "found"

    assert attempts == [1, 2]


async def waits(runtime: Runtime) -> bool:
    return (await row_of(runtime, FIRST)).status == "waiting"


async def test_retries_are_counted_and_then_it_has_failed(place: Place) -> None:
    attempts: list[int] = []

    @tool(background=True, retries=2)
    async def look(ctx: ToolContext[Any]) -> None:
        attempts.append(ctx.attempt)
        raise Retry("not yet", after=0, code="busy")

    async with place.runtime(agent_of(Talk([call("look")]), look)) as runtime:
        await started(runtime)
        output = await runtime.handle(FIRST).outcome(SOON)

    assert attempts == [1, 2, 3]
    assert output == Failure("busy", "not yet")


async def test_a_once_tool_between_two_attempts_survives_its_runtime(place: Place) -> None:
    """It is known that the first attempt had no effect: nothing is unknown, and nothing is given up."""
    look, attempts = flaky(1, retries=1)
    clock = VirtualClock()
    async with place.runtime(agent_of(Talk([call("look")]), look), clock=clock) as runtime:
        await started(runtime)
        await until(lambda: waits(runtime))
    clock.advance(3600)
    async with place.runtime(agent_of(Talk(), look), clock=clock) as runtime:
        assert await runtime.handle(FIRST).result(SOON) == "found"

    assert attempts == [1, 2]


async def test_between_two_attempts_it_can_be_cancelled(place: Place) -> None:
    look, attempts = flaky(1, retries=1)
    async with place.runtime(agent_of(Talk([call("look")]), look), clock=VirtualClock()) as runtime:
        await started(runtime)
        await until(lambda: waits(runtime))
        assert await runtime.handle(FIRST).cancel("enough", by="kim") == "requested"
        output = await runtime.handle(FIRST).outcome(SOON)

    assert output == Cancelled("kim", "enough")
    assert attempts == [1]


# ---------------------------------------------------------------------- time


async def test_a_timeout_leaves_a_once_tool_unknown(place: Place) -> None:
    @tool(background=True, timeout=0.01)
    async def hang() -> None:
        await asyncio.Event().wait()

    async with place.runtime(agent_of(Talk([call("hang")]), hang)) as runtime:
        await started(runtime)
        output = await runtime.handle(FIRST).outcome(SOON)
        row = await row_of(runtime, FIRST)

    assert isinstance(output, Abandoned)
    assert (output.evidence.writer, output.evidence.proof) == ("engine_gave_up", "it did not end within 0.01 s")
    assert row.status == "abandoned"


async def test_a_timeout_of_a_rerun_tool_is_another_attempt(place: Place) -> None:
    @tool(background=True, timeout=0.02, recovery="rerun", retries=1)
    async def hang(ctx: ToolContext[Any]) -> int:
        if ctx.attempt == 1:
            await asyncio.Event().wait()
        return ctx.attempt

    async with place.runtime(agent_of(Talk([call("hang")]), hang)) as runtime:
        await started(runtime)
        assert await runtime.handle(FIRST).result(SOON) == 2


async def test_what_a_tool_says_when_its_time_is_up_counts(place: Place) -> None:
    @tool(background=True, timeout=0.01)
    async def hang() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "half of it"
        return "all"

    async with place.runtime(agent_of(Talk([call("hang")]), hang)) as runtime:
        await started(runtime)
        assert await runtime.handle(FIRST).result(SOON) == "half of it"


# ---------------------------------------------------------------------- places


async def test_limits_hold_across_turns_and_processes(place: Place) -> None:
    at_once, most, going = 0, 0, asyncio.Event()

    @tool(background=True, limit=2)
    async def crawl(page: int) -> int:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await going.wait()
        at_once -= 1
        return page

    talk = Talk([call("crawl", page=n) for n in range(6)])
    async with place.runtime(agent_of(talk, crawl)) as runtime:
        await started(runtime)
        await until(lambda: at_once == 2)
        begun = [row for row in await runtime.processes.list() if row.record.first_started is not None]
        assert len(begun) == 2
        going.set()
        found = [await runtime.handle(f"chat.1.1.{n}").result(SOON) for n in range(6)]

    assert found == list(range(6))
    assert most == 2


async def test_a_resource_is_shared_with_tools_of_the_foreground(place: Place) -> None:
    printing, done = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    @tool(background=True, resource="printer")
    async def print_all() -> None:
        printing.set()
        await done.wait()
        order.append("all")

    @tool(resource="printer")
    async def print_one() -> None:
        order.append("one")

    talk = Talk([call("print_all")], "started", [call("print_one")])
    async with place.runtime(agent_of(talk, print_all, print_one)) as runtime:
        await started(runtime)
        await printing.wait()
        session = await runtime.session("chat")
        receipt = await session.send("one")
        await until(lambda: len(talk.requests) == 3)
        done.set()
        await asyncio.wait_for(receipt.result(), SOON)

    assert order == ["all", "one"]


async def test_who_waits_for_a_place_can_be_cancelled_and_has_done_nothing(place: Place) -> None:
    going, ran = asyncio.Event(), list[int]()

    @tool(background=True, limit=1)
    async def crawl(page: int) -> int:
        ran.append(page)
        await going.wait()
        return page

    async with place.runtime(agent_of(Talk([call("crawl", page=n) for n in range(3)]), crawl)) as runtime:
        await started(runtime)
        await until(lambda: ran)
        second = f"chat.1.1.{1 if ran == [0] else 0}"
        await runtime.handle(second).cancel("not needed")
        output = await runtime.handle(second).outcome(SOON)
        going.set()
        assert await ended(runtime, "chat.1.1.2") == ["completed"], "the place was not lost with who waited for it"

    assert output == Cancelled("host", "not needed")


async def test_a_sync_tool_holds_its_place_until_its_thread_has_ended(place: Place) -> None:
    going, ran = threading.Event(), list[int]()

    @tool(background=True, limit=1)
    def crawl(page: int) -> int:
        ran.append(page)
        going.wait(SOON)
        return page

    async with place.runtime(agent_of(Talk([call("crawl", page=n) for n in range(2)]), crawl)) as runtime:
        await started(runtime)
        await until(lambda: ran)
        first, second = f"chat.1.1.{ran[0]}", f"chat.1.1.{1 - ran[0]}"
        await runtime.handle(first).cancel()
        assert await ended(runtime, first) == ["cancelled"]
        assert len(ran) == 1
        going.set()
        assert await ended(runtime, second) == ["completed"]


# ---------------------------------------------------------------------- requests to stop


def stubborn(begun: asyncio.Event, **options: Any) -> Tool[..., Any]:
    @tool(background=True, **options)
    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    return hang


async def test_a_cancelled_body_leaves_its_outcome_unknown(place: Place) -> None:
    begun = asyncio.Event()
    async with place.runtime(agent_of(Talk([call("hang")]), stubborn(begun))) as runtime:
        await started(runtime)
        await begun.wait()
        assert await runtime.handle(FIRST).cancel("enough", by="kim") == "requested"
        output = await runtime.handle(FIRST).outcome(SOON)

    assert output == Cancelled("kim", "enough", unknown=True)


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("value", Success("half")),
        ("error", Failure("undone", "rolled back")),
        ("retry", Cancelled("kim", "enough")),
    ],
)
async def test_what_a_cancelled_tool_reports_counts(place: Place, says: str, expected: Any) -> None:
    begun = asyncio.Event()

    @tool(background=True, retries=3)
    async def hang() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if says == "error":
                raise ToolError("rolled back", code="undone") from None
            if says == "retry":
                raise Retry("nothing happened") from None
        return "half"

    async with place.runtime(agent_of(Talk([call("hang")]), hang)) as runtime:
        await started(runtime)
        await begun.wait()
        await runtime.handle(FIRST).cancel("enough", by="kim")
        assert await runtime.handle(FIRST).outcome(SOON) == expected


async def test_a_body_that_does_not_listen_is_left_behind(place: Place) -> None:
    begun, going = asyncio.Event(), asyncio.Event()

    @tool(background=True)
    async def deaf() -> None:
        begun.set()
        while not going.is_set():
            try:
                await going.wait()
            except asyncio.CancelledError:
                continue

    async with place.runtime(agent_of(Talk([call("deaf")]), deaf)) as runtime:
        await started(runtime)
        await begun.wait()
        await runtime.handle(FIRST).cancel()
        assert await runtime.handle(FIRST).outcome(SOON) == Cancelled("host", "", unknown=True)
        going.set()


async def test_a_thread_is_told_that_it_is_cancelled(place: Place) -> None:
    contexts = list[ToolContext[Any]]()

    @tool(background=True)
    def look(ctx: ToolContext[Any]) -> str:
        contexts.append(ctx)
        while not ctx.cancelled:
            threading.Event().wait(0.001)
        return "stopped in time"

    async with place.runtime(agent_of(Talk([call("look")]), look)) as runtime:
        wait_for_thread(runtime, contexts)
        await started(runtime)
        await until(lambda: contexts)
        await runtime.handle(FIRST).cancel()
        assert await runtime.handle(FIRST).outcome(SOON) == Success("stopped in time")


async def test_a_cancel_of_another_process_reaches_the_body(file: Place) -> None:
    begun = asyncio.Event()
    async with file.runtime(agent_of(Talk([call("hang")]), stubborn(begun))) as runtime:
        await started(runtime)
        await begun.wait()
        async with file.runtime() as other:
            assert await other.handle(FIRST).cancel("enough", by="kim") == "requested"
            assert await other.handle(FIRST).outcome(SOON) == Cancelled("kim", "enough", unknown=True)


async def test_a_cancel_that_comes_before_the_body_has_begun_is_known_to_have_stopped_it(place: Place) -> None:
    ran: list[int] = []

    @tool(background=True)
    async def quick() -> None:
        ran.append(1)

    async with place.runtime(agent_of(Talk([call("quick")]), quick), recover=False) as runtime:
        runtime._work.passive = True  # nobody here works on it yet
        await started(runtime)
        assert await runtime.handle(FIRST).cancel("enough", by="kim") == "requested"
        assert await runtime.handle(FIRST).outcome(SOON) == Cancelled("kim", "enough")

    assert ran == []


async def test_a_cancel_that_comes_when_it_has_ended_changes_nothing(place: Place) -> None:
    @tool(background=True)
    async def quick() -> str:
        return "done"

    async with place.runtime(agent_of(Talk([call("quick")]), quick)) as runtime:
        await started(runtime)
        assert await ended(runtime, FIRST) == ["completed"]
        assert await runtime.handle(FIRST).cancel() == "ended"
        assert await runtime.handle(FIRST).outcome() == Success("done")


# ---------------------------------------------------------------------- leaving


async def test_left_while_it_runs_a_rerun_tool_runs_again_under_the_same_key(place: Place) -> None:
    begun, keys = asyncio.Event(), list[tuple[str, int]]()

    @tool(background=True, recovery="rerun")
    async def pay(ctx: ToolContext[Any]) -> str:
        keys.append((within_store(ctx.idempotency_key), ctx.attempt))
        begun.set()
        if ctx.attempt == 1:
            await asyncio.Event().wait()
        return "paid"

    async with place.runtime(agent_of(Talk([call("pay")]), pay), grace=0) as runtime:
        await started(runtime)
        await begun.wait()
    async with place.runtime(agent_of(Talk(), pay)) as runtime:
        assert await runtime.handle(FIRST).result(SOON) == "paid"

    assert keys == [(FIRST, 1), (FIRST, 2)]


@pytest.mark.parametrize("recovery", ["once", "ask"])
async def test_left_while_it_runs_another_tool_is_abandoned_with_the_reason(place: Place, recovery: str) -> None:
    begun = asyncio.Event()
    hang = stubborn(begun, recovery=recovery)
    async with place.runtime(agent_of(Talk([call("hang")]), hang), grace=0) as runtime:
        await started(runtime)
        await begun.wait()
    async with place.runtime(agent_of(Talk(), hang)) as runtime:
        output = await runtime.handle(FIRST).outcome(SOON)

    assert isinstance(output, Abandoned)
    assert output.evidence.writer == "owner_drain"


async def test_left_before_it_began_any_tool_runs_once(place: Place) -> None:
    begun, going, ran = asyncio.Event(), asyncio.Event(), list[int]()

    @tool(background=True, limit=1)
    async def crawl(page: int) -> int:
        ran.append(page)
        begun.set()
        await going.wait()
        return page

    async with place.runtime(agent_of(Talk([call("crawl", page=n) for n in range(2)]), crawl), grace=0) as runtime:
        await started(runtime)
        await begun.wait()
    going.set()
    (first,) = ran
    async with place.runtime(agent_of(Talk(), crawl)) as runtime:
        assert await ended(runtime, f"chat.1.1.{first}", f"chat.1.1.{1 - first}") == ["abandoned", "completed"]

    assert sorted(ran) == [0, 1]


async def test_left_while_it_waits_for_a_place_between_two_attempts_nothing_is_given_up(place: Place) -> None:
    """Its first attempt had no effect, and its second has not begun: that is known, whoever leaves."""
    falters, holds, going, ran = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[tuple[str, int]]()

    @tool(background=True, limit=1, retries=1)
    async def crawl(page: str, ctx: ToolContext[Any]) -> str:
        ran.append((page, ctx.attempt))
        if page == "flaky" and ctx.attempt == 1:
            falters.set()
            raise Retry("not yet", after=60)
        if page == "slow":
            holds.set()
            await going.wait()
        return page

    talk = Talk([call("crawl", page="flaky")], "one", [call("crawl", page="slow")])
    clock = VirtualClock()
    agent = agent_of(talk, crawl)
    async with place.runtime(agent, grace=0, clock=clock) as runtime:
        await started(runtime)
        await falters.wait()
        await until(lambda: waits(runtime))
        await said(runtime, "and the slow one")
        await holds.wait()
        clock.advance(3600)
        await until(lambda: is_owned(runtime))
    going.set()
    async with place.runtime(agent, clock=clock) as runtime:
        assert await runtime.handle(FIRST).result(SOON) == "flaky"

    assert ran == [("flaky", 1), ("slow", 1), ("flaky", 2)]


async def is_owned(runtime: Runtime) -> bool:
    return (await row_of(runtime, FIRST)).owner is not None


async def test_a_tool_that_ends_within_the_grace_has_ended(place: Place) -> None:
    begun, going = asyncio.Event(), asyncio.Event()

    @tool(background=True)
    async def work() -> str:
        begun.set()
        await going.wait()
        return "done"

    async with place.runtime(agent_of(Talk([call("work")]), work)) as runtime:
        await started(runtime)
        await begun.wait()
        asyncio.get_running_loop().call_later(0.01, going.set)
    async with place.runtime(agent_of(Talk(), work)) as runtime:
        assert await runtime.handle(FIRST).result() == "done"


# ---------------------------------------------------------------------- progress


async def test_progress_is_the_process_s_and_the_newest_counts(place: Place) -> None:
    going = asyncio.Event()

    @tool(background=True)
    async def work(ctx: ToolContext[Any]) -> str:
        for n in range(1000):
            ctx.progress({"n": n})
        await going.wait()
        ctx.progress("nearly")
        return "done"

    async with place.runtime(agent_of(Talk([call("work")]), work)) as runtime:
        await started(runtime)
        await until(lambda: progress_is(runtime, {"n": 999}))
        going.set()
        await ended(runtime, FIRST)
        types, row = await event_types(runtime, FIRST), await row_of(runtime, FIRST)

    assert row.record.progress == "nearly"
    assert types.count("process.progress") <= 4, "a chatty tool does not fill the log"


async def progress_is(runtime: Runtime, value: Any) -> bool:
    return (await row_of(runtime, FIRST)).record.progress == value


async def test_progress_that_is_no_json_fails_the_tool_and_nobody_else(place: Place) -> None:
    @tool(background=True)
    async def work(ctx: ToolContext[Any]) -> None:
        ctx.progress(object())

    async with place.runtime(agent_of(Talk([call("work")]), work)) as runtime:
        await started(runtime)
        output = await runtime.handle(FIRST).outcome(SOON)

    assert isinstance(output, Failure)
    assert output.code == "tool_raised"
