"""Attempts: retries with recorded due times, timeouts, limits and resources."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Retry, Runtime, ToolCall, ToolContext, TurnResult, tool
from perdure.errors import StoreUnavailable
from perdure.model.event import ToolFinished, ToolStarted
from perdure.model.tool import Cancelled, Failed, Ok, OutcomeUnknown
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock
from perdure.tools.attempt import needs_of
from tests.keys import within_store
from tests.kit import SOON, Place, crash, until, wait_for_thread


def calls(*names: str) -> Callable[[ModelRequest], Any]:
    """A model that asks for these once, and is content with whatever comes."""

    def answer(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall(f"p{n}", x) for n, x in enumerate(names)]

    return answer


def agent(*tools: Any, **options: Any) -> Agent[str]:
    return Agent(FunctionModel(calls(*(t.spec.name for t in tools))), tools=tools, **options)


async def run(runtime: Runtime, name: str = "chat") -> TurnResult[Any]:
    return await asyncio.wait_for((await runtime.session(name)).run("go"), SOON)


# ---------------------------------------------------------------------- retries


async def test_a_retry_waits_for_its_time_and_keeps_its_key(place: Place) -> None:
    seen: list[tuple[int, str, int]] = []
    clock = VirtualClock()

    @tool(retries=2)
    async def flaky(ctx: ToolContext[None]) -> str:
        seen.append((ctx.attempt, within_store(ctx.idempotency_key), clock.now()))
        if ctx.attempt < 3:
            raise Retry("busy", after=10)
        return "at last"

    async with place.runtime(agent(flaky), clock=clock) as runtime:
        receipt = await (await runtime.session("chat")).send("go")
        start = clock.now()
        for _ in range(2):
            await clock.wait_sleeping()
            clock.advance(9.9)
            assert clock.sleeping == 1
            clock.advance(0.1)
        result = await receipt.result(SOON)

    assert seen == [(1, "chat.1.1.0", start), (2, "chat.1.1.0", start + 10_000), (3, "chat.1.1.0", start + 20_000)]
    assert result.tool_calls[0].outcome == Ok("at last")
    assert (result.tool_calls[0].attempts, result.tool_calls[0].repeated) == (3, 0)


async def test_cancel_reaches_a_tool_that_waits_for_its_next_attempt(place: Place) -> None:
    clock = VirtualClock()

    @tool(retries=1)
    async def flaky() -> str:
        raise Retry("busy", after=3600)

    async with place.runtime(agent(flaky), clock=clock) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await clock.wait_sleeping()
        await session.cancel("enough")
        result = await receipt.result(SOON)

        assert result.outcome == Cancelled("host", "enough")
        assert result.tool_calls[0].outcome == Cancelled("runtime", "the turn ended before the next attempt")
        assert result.tool_calls[0].attempts == 1


async def test_watchers_see_every_attempt_begin_and_the_call_end_once(place: Place) -> None:
    @tool(retries=2)
    async def flaky(ctx: ToolContext[None]) -> str:
        if ctx.attempt < 3:
            raise Retry("busy", after=0)
        return "at last"

    async with place.runtime(agent(flaky)) as runtime, (await runtime.session("chat")).stream("go") as turn:
        events = [event async for event in turn if isinstance(event, ToolStarted | ToolFinished)]

    assert [(type(e), getattr(e, "attempt", None)) for e in events] == [
        (ToolStarted, 1),
        (ToolStarted, 2),
        (ToolStarted, 3),
        (ToolFinished, None),
    ]
    assert {e.call_id for e in events} == {"chat.1.1.0"}


async def test_retries_are_exhausted(place: Place) -> None:
    ran: list[int] = []

    @tool(retries=2)
    def hopeless(ctx: ToolContext[None]) -> None:
        ran.append(ctx.attempt)
        raise Retry("still busy", code="busy")

    async with place.runtime(agent(hopeless), clock=VirtualClock(auto=True)) as runtime:
        result = await run(runtime)

    assert ran == [1, 2, 3]
    assert result.tool_calls[0].outcome == Failed("busy", "still busy")
    assert result.tool_calls[0].attempts == 3


async def test_without_retries_a_retry_is_a_failure(place: Place) -> None:
    @tool
    def hopeless() -> None:
        raise Retry("busy")

    async with place.runtime(agent(hopeless)) as runtime:
        assert (await run(runtime)).tool_calls[0].outcome == Failed("retry", "busy")


@pytest.mark.parametrize("after", [float("nan"), float("inf"), -1.0, "soon"], ids=str)
async def test_nonsense_asked_for_by_a_tool_is_bounded(place: Place, after: Any) -> None:
    @tool(retries=1)
    def flaky(ctx: ToolContext[None]) -> str:
        if ctx.attempt == 1:
            raise Retry("busy", after=after)
        return "ok"

    clock = VirtualClock(auto=True)
    async with place.runtime(agent(flaky), clock=clock) as runtime:
        assert (await run(runtime)).tool_calls[0].outcome == Ok("ok")
        assert clock.monotonic() <= 3600


async def test_only_a_retry_is_retried(place: Place) -> None:
    ran: list[int] = []

    @tool(retries=5)
    def broken() -> None:
        ran.append(1)
        raise OSError("who knows how far it came")

    async with place.runtime(agent(broken), clock=VirtualClock(auto=True)) as runtime:
        await run(runtime)

    assert ran == [1]


async def test_a_crash_before_the_next_attempt_keeps_its_time_and_count(place: Place) -> None:
    seen: list[tuple[int, int]] = []
    clock = VirtualClock()

    @tool(retries=2)
    async def flaky(ctx: ToolContext[None]) -> str:
        seen.append((ctx.attempt, clock.now()))
        if ctx.attempt == 1:
            raise Retry("busy", after=100)
        return "ok"

    runtime = await place.runtime(agent(flaky), clock=clock).__aenter__()
    start = clock.now()
    await (await runtime.session("chat")).send("go")
    await clock.wait_sleeping()
    clock.advance(60)
    await crash(runtime)
    async with place.runtime(agent(flaky), clock=clock) as runtime:
        await clock.wait_sleeping()
        clock.advance(40)
        result = await (await runtime.session("chat")).result("chat.1")

    assert seen == [(1, start), (2, start + 100_000)]
    assert (result.tool_calls[0].attempts, result.tool_calls[0].repeated) == (2, 0)


async def test_another_call_goes_on_while_one_waits_for_its_retry(place: Place) -> None:
    clock = VirtualClock()
    done = asyncio.Event()

    @tool(retries=1)
    async def flaky(ctx: ToolContext[None]) -> str:
        if ctx.attempt == 1:
            raise Retry("busy", after=60)
        return "late"

    @tool
    async def steady() -> str:
        await clock.wait_sleeping()
        done.set()
        return "early"

    async with place.runtime(agent(flaky, steady), clock=clock) as runtime:
        receipt = await (await runtime.session("chat")).send("go")
        await asyncio.wait_for(done.wait(), SOON)
        clock.advance(60)
        result = await receipt.result(SOON)

    assert [c.outcome for c in result.tool_calls] == [Ok("late"), Ok("early")]


# ---------------------------------------------------------------------- timeouts


async def test_a_timed_out_once_call_is_unknown_and_never_repeated(place: Place) -> None:
    ran: list[int] = []

    @tool(timeout=0.02, retries=3)
    async def slow() -> None:
        ran.append(1)
        await asyncio.Event().wait()

    async with place.runtime(agent(slow), clock=VirtualClock(auto=True)) as runtime:
        result = await run(runtime)

    assert ran == [1]
    assert result.tool_calls[0].outcome == OutcomeUnknown("it did not end within 0.02 s")
    assert result.text == "done"


async def test_a_timed_out_rerun_call_is_tried_again(place: Place) -> None:
    seen: list[tuple[int, str]] = []

    @tool(timeout=0.02, retries=2, recovery="rerun")
    async def slow(ctx: ToolContext[None]) -> str:
        seen.append((ctx.attempt, within_store(ctx.idempotency_key)))
        if ctx.attempt < 3:
            await asyncio.Event().wait()
        return "ok"

    async with place.runtime(agent(slow), clock=VirtualClock(auto=True)) as runtime:
        result = await run(runtime)

    assert seen == [(1, "chat.1.1.0"), (2, "chat.1.1.0"), (3, "chat.1.1.0")]
    assert result.tool_calls[0].outcome == Ok("ok")


async def test_a_rerun_call_that_always_times_out_is_unknown(place: Place) -> None:
    @tool(timeout=0.01, retries=1, recovery="rerun")
    async def slow() -> None:
        await asyncio.Event().wait()

    async with place.runtime(agent(slow), clock=VirtualClock(auto=True)) as runtime:
        record = (await run(runtime)).tool_calls[0]

    assert record.outcome == OutcomeUnknown("it did not end within 0.01 s")
    assert record.attempts == 2


async def test_a_thread_that_does_not_end_is_left_behind(place: Place) -> None:
    release = threading.Event()

    @tool(timeout=0.02)
    def stuck() -> None:
        release.wait(SOON)

    async with place.runtime(agent(stuck)) as runtime:
        result = await run(runtime)
        release.set()

    assert type(result.tool_calls[0].outcome) is OutcomeUnknown
    assert result.text == "done"


async def test_a_thread_that_looks_at_its_context_may_report_after_its_time(place: Place) -> None:
    contexts = list[ToolContext[None]]()

    @tool(timeout=0.02)
    def patient(ctx: ToolContext[None]) -> str:
        contexts.append(ctx)
        end = time.monotonic() + SOON
        while not ctx.cancelled and time.monotonic() < end:
            time.sleep(0.001)
        return "gave up in good order"

    async with place.runtime(agent(patient)) as runtime:
        wait_for_thread(runtime, contexts)
        assert (await run(runtime)).tool_calls[0].outcome == Ok("gave up in good order")


async def test_a_body_that_ended_in_time_is_not_timed_out_while_its_output_is_stored(file: Place) -> None:
    """The output goes to a blob, which takes longer than what is left of the call's time."""

    class SlowBlobs(Around):
        async def put(self, data: bytes) -> str:
            await asyncio.sleep(0.05)
            return await self.inner.put(data)

    class Slow(Around):
        @property
        def blobs(self) -> Any:
            return SlowBlobs(self.inner.blobs)

    @tool(timeout=0.02)
    async def large() -> str:
        return "x" * 100_000

    store: Any = Slow(file.store())
    async with Runtime(store, agents=[agent(large)]) as runtime:
        outcome = (await run(runtime)).tool_calls[0].outcome

    assert isinstance(outcome, Ok)
    assert outcome.whole is not None


# ---------------------------------------------------------------------- limits and resources


class Around:
    """A real part with something in its way."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Overlap:
    """Counts how many are inside at once."""

    def __init__(self) -> None:
        self.inside = self.most = 0

    async def pass_through(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        for _ in range(3):
            await asyncio.sleep(0)
        self.inside -= 1


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_a_limit_holds_across_sessions(place: Place, limit: int) -> None:
    overlap = Overlap()

    @tool(limit=limit)
    async def narrow() -> None:
        await overlap.pass_through()

    model = FunctionModel(calls("narrow", "narrow", "narrow"))
    async with place.runtime(Agent(model, tools=[narrow])) as runtime:
        results = await asyncio.gather(*(run(runtime, f"s{n}") for n in range(6)))

    assert 0 < overlap.most <= limit
    assert {type(c.outcome) for r in results for c in r.tool_calls} == {Ok}


async def test_tools_of_one_resource_take_turns(place: Place) -> None:
    overlap = Overlap()

    @tool(resource="printer")
    async def draw() -> None:
        await overlap.pass_through()

    @tool(resource="printer", limit=3)
    async def write() -> None:
        await overlap.pass_through()

    async with place.runtime(agent(draw, write)) as runtime:
        await asyncio.gather(*(run(runtime, f"s{n}") for n in range(6)))

    assert overlap.most == 1


async def test_a_slot_is_held_until_the_thread_has_really_ended(place: Place) -> None:
    loop, inside, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    entered: list[str] = []

    @tool(limit=1)
    def narrow(ctx: ToolContext[None]) -> str:
        entered.append(ctx.session_id)
        if ctx.session_id == "first":
            loop.call_soon_threadsafe(inside.set)
            release.wait(SOON)
        return "through"

    async with place.runtime(agent(narrow)) as runtime:
        session = await runtime.session("first")
        receipt = await session.send("go")
        await inside.wait()
        await session.cancel()
        first = await receipt.result(SOON)
        second = await (await runtime.session("second")).send("go")
        with pytest.raises(TimeoutError):
            await second.result(timeout=0.05)
        assert entered == ["first"]
        release.set()
        result = await second.result(SOON)

    assert type(first.tool_calls[0].outcome) is OutcomeUnknown
    assert entered == ["first", "second"]
    assert result.tool_calls[0].outcome == Ok("through")


async def test_a_turn_cancelled_before_its_call_began_gives_its_slot_back(file: Place) -> None:
    """The reply is recorded with the call's start; the cancel request comes while that is being written."""
    writing, go_on = asyncio.Event(), asyncio.Event()

    class Pausing(Around):
        async def write(self, write: Any) -> Any:
            if type(write).__name__ == "Append" and not writing.is_set():
                writing.set()
                await go_on.wait()
            return await self.inner.write(write)

    ran: list[str] = []

    @tool(limit=1)
    async def narrow(ctx: ToolContext[None]) -> str:
        ran.append(ctx.session_id)
        return "through"

    pausing: Any = Pausing(file.store())
    async with Runtime(pausing, agents=[agent(narrow)]) as runtime:
        first = await runtime.session("first")
        receipt = await first.send("go")
        await asyncio.wait_for(writing.wait(), SOON)
        await first.cancel()
        go_on.set()
        cancelled = await receipt.result(SOON)
        second = await run(runtime, "second")

    assert ran == ["second"]
    assert type(cancelled.tool_calls[0].outcome).__name__ == "Cancelled"  # it is known that it never ran
    assert second.tool_calls[0].outcome == Ok("through")


async def test_an_output_that_the_disk_does_not_take_yet_is_not_lost(file: Place) -> None:
    """A full disk stalls the turn. The call ended, so it neither becomes unknown nor runs again."""
    ran: list[int] = []
    refused: list[int] = []

    class FullBlobs(Around):
        async def put(self, data: bytes) -> str:
            if len(refused) < 2:
                refused.append(len(data))
                raise StoreUnavailable("the disk is full")
            return await self.inner.put(data)

    class Full(Around):
        @property
        def blobs(self) -> Any:
            return FullBlobs(self.inner.blobs)

    @tool
    async def large() -> str:
        ran.append(1)
        return "x" * 100_000

    store: Any = Full(file.store())
    async with Runtime(store, agents=[agent(large)], clock=VirtualClock(auto=True)) as runtime:
        session = await runtime.session("chat")
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(session.run("go"), SOON)
        result = await asyncio.wait_for(session.result("chat.1"), SOON)

    assert len(refused) == 2
    assert ran == [1]
    assert isinstance(result.tool_calls[0].outcome, Ok)


async def test_calls_of_one_limited_tool_run_in_the_order_they_came(place: Place) -> None:
    order: list[int] = []

    @tool(limit=1)
    async def narrow(n: int) -> None:
        order.append(n)
        await asyncio.sleep(0)

    model = ScriptedModel([[ToolCall(f"p{n}", "narrow", {"n": n}) for n in range(8)], "done"])
    async with place.runtime(Agent(model, tools=[narrow])) as runtime:
        await run(runtime)

    assert order == list(range(8))


async def test_the_limit_ends_the_wait_for_a_tool_that_ignores_its_cancellation(place: Place) -> None:
    ended = asyncio.Event()

    @tool(timeout=0.05, limit=1)
    async def stubborn() -> str:
        while not ended.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ended.wait()
        return "late"

    model = ScriptedModel([[ToolCall("a", "stubborn")], "done"])
    async with place.runtime(Agent(model, tools=[stubborn])) as runtime:
        result = await (await runtime.session("chat")).run("go")
        holding = runtime._dispatcher.admission.try_take(needs_of(stubborn.spec))
        ended.set()
        await until(lambda: runtime._dispatcher.admission.try_take(needs_of(stubborn.spec)))

    assert [c.outcome for c in result.tool_calls] == [OutcomeUnknown("it did not end within 0.05 s")]
    assert result.text == "done"
    assert not holding, "its slot is held until it has really ended"
