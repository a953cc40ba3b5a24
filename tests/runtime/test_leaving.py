"""Leaving a Runtime: what runs is given a moment, what is cut off is recorded, and the next entry goes on."""

import asyncio
import threading
from typing import Any

from perdure import Agent, ModelResponse, ProcessContext, Retry, Runtime, ToolCall, ToolContext, Usage, process, tool
from perdure.errors import RuntimeClosed
from perdure.model.event import ToolProgress
from perdure.model.outcome import Waiting
from perdure.model.tool import Failed, Ok, OutcomeUnknown
from perdure.testing import ScriptedModel
from tests.keys import within_store
from tests.kit import SOON, Place, TellingModel, crash, texts


class Work:
    """A tool body under control: it says that it runs, and ends when it is told to."""

    def __init__(self, recovery: Any = "once") -> None:
        self.running, self.release = asyncio.Event(), asyncio.Event()
        self.ledger: list[tuple[int, str]] = []

        @tool(name="work", recovery=recovery)
        async def body(ctx: ToolContext[None]) -> str:
            self.ledger.append((ctx.attempt, within_store(ctx.idempotency_key)))
            self.running.set()
            await self.release.wait()
            return "worked"

        self.tool = body

    def agent(self, *answers: Any) -> Agent[str]:
        return Agent(ScriptedModel(answers), tools=[self.tool])


ASK = [ToolCall("a", "work")]


async def test_a_running_tool_may_finish_in_the_grace_period(place: Place) -> None:
    work = Work()
    async with place.runtime(work.agent(ASK, "done"), grace=SOON) as runtime:
        receipt = await (await runtime.session("chat")).send("go")
        waiter = asyncio.create_task(receipt.result())
        await work.running.wait()
        asyncio.get_running_loop().call_later(0.02, work.release.set)

    assert (await waiter).text == "done"
    assert work.ledger == [(1, "chat.1.1.0")]


async def test_a_once_tool_cut_off_at_leaving_is_recorded_as_unknown(place: Place) -> None:
    work = Work()
    async with place.runtime(work.agent(ASK), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await work.running.wait()
    async with place.runtime(work.agent("done")) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

    assert result.tool_calls[0].outcome == OutcomeUnknown("the runtime was closed while it ran")
    assert result.text == "done"
    assert work.ledger == [(1, "chat.1.1.0")]


async def test_a_rerun_tool_cut_off_at_leaving_runs_again(place: Place) -> None:
    work = Work("rerun")
    async with place.runtime(work.agent(ASK), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await work.running.wait()
    work.release.set()
    async with place.runtime(work.agent("done")) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

    assert result.tool_calls[0].outcome == Ok("worked")
    assert (result.tool_calls[0].attempts, result.tool_calls[0].repeated) == (2, 1)
    assert work.ledger == [(1, "chat.1.1.0"), (2, "chat.1.1.0")]


async def test_an_ask_tool_cut_off_at_leaving_asks(place: Place) -> None:
    work = Work("ask")
    async with place.runtime(work.agent(ASK), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await work.running.wait()
    async with place.runtime(work.agent("done")) as runtime:
        session = await runtime.session("chat")
        parked = await session.result("chat.1")

        assert isinstance(parked.outcome, Waiting)
        assert [c.kind for c in parked.outcome.calls] == ["recovery"]
        await session.settle("chat.1.1.0", "done", value="I saw it")
        assert (await session.result("chat.1")).tool_calls[0].outcome == Ok("I saw it")


async def test_an_exception_in_the_body_gives_no_grace(place: Place) -> None:
    work = Work()
    runtime = await place.runtime(work.agent(ASK), grace=3600).__aenter__()
    await (await runtime.session("chat")).send("go")
    await work.running.wait()
    await runtime.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
    async with place.runtime(work.agent("done")) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

    assert type(result.tool_calls[0].outcome) is OutcomeUnknown


async def test_a_model_call_cut_off_at_leaving_is_asked_again_and_counted(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await model.next()
    again = ScriptedModel([ModelResponse("done", usage=Usage(input=3))])
    async with place.runtime(Agent(again)) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

    assert result.text == "done"
    assert result.usage == Usage(input=3, calls=1, unknown=1)
    assert again.requests[0].attempt == 2


async def test_what_ended_while_leaving_is_not_lost(place: Place) -> None:
    """The body returns when it is told to stop: that is its outcome, and it does not run again."""
    running = asyncio.Event()
    ran: list[int] = []

    @tool(recovery="rerun")
    async def tidy() -> str:
        ran.append(1)
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "tidied up"
        return "never"

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "tidy")]]), tools=[tidy]), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await running.wait()
    async with place.runtime(Agent(ScriptedModel(["done"]), tools=[tidy])) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

    assert result.tool_calls[0].outcome == Ok("tidied up")
    assert ran == [1]


class Tidy:
    """A tool that ends as it likes when it is told to stop, and returns at once in a later attempt."""

    def __init__(self, end: Any, **options: Any) -> None:
        self.running = asyncio.Event()
        self.attempts: list[int] = []

        @tool(name="tidy", **options)
        async def body(ctx: ToolContext[Any]) -> str:
            self.attempts.append(ctx.attempt)
            if len(self.attempts) == 1:
                self.running.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    return end() if callable(end) else str(end)
            return "tidied up"

        self.tool = body

    async def cut_off(self, place: Place) -> None:
        agent = Agent(ScriptedModel([[ToolCall("a", "tidy")]]), tools=[self.tool])
        async with place.runtime(agent, grace=0) as runtime:
            await (await runtime.session("chat")).send("go")
            await self.running.wait()

    async def go_on(self, place: Place) -> Any:
        async with place.runtime(Agent(ScriptedModel(["done"]), tools=[self.tool])) as runtime:
            return await (await runtime.session("chat")).result("chat.1")


def no_effect() -> str:
    raise Retry("not yet", after=0)


async def test_a_retry_that_is_left_is_made_by_the_next_owner(place: Place) -> None:
    tidy = Tidy(no_effect, retries=1)
    await tidy.cut_off(place)
    result = await tidy.go_on(place)

    assert result.tool_calls[0].outcome == Ok("tidied up")
    assert (tidy.attempts, result.tool_calls[0].repeated) == ([1, 2], 0)


async def test_a_retry_without_retries_left_has_failed_when_the_runtime_is_left(place: Place) -> None:
    tidy = Tidy(no_effect)
    await tidy.cut_off(place)

    assert (await tidy.go_on(place)).tool_calls[0].outcome == Failed("retry", "not yet")
    assert tidy.attempts == [1]


async def test_a_deferring_tool_that_returns_by_itself_when_it_is_left_waits_for_nobody(place: Place) -> None:
    tidy = Tidy("nothing to wait for", deferred=True)
    await tidy.cut_off(place)

    assert (await tidy.go_on(place)).tool_calls[0].outcome == Ok("nothing to wait for")
    assert tidy.attempts == [1]


async def test_an_attempt_that_was_left_is_no_failure_that_retries_count(place: Place) -> None:
    work, attempts = asyncio.Event(), list[int]()

    @tool(recovery="rerun", retries=1)
    async def fetch(ctx: ToolContext[Any]) -> str:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            work.set()
            await asyncio.Event().wait()
        if len(attempts) == 2:
            raise Retry("not yet", after=0)
        return "found"

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "fetch")]]), tools=[fetch]), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await work.wait()
    async with place.runtime(Agent(ScriptedModel(["done"]), tools=[fetch])) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

    assert result.tool_calls[0].outcome == Ok("found")
    assert (attempts, result.tool_calls[0].repeated) == ([1, 2, 3], 1)


async def test_an_outcome_that_comes_in_the_last_moment_is_recorded(place: Place) -> None:
    """The body returns in the very pass of the event loop in which the Runtime is left."""
    ended = asyncio.Event()
    ran: list[int] = []

    @tool(recovery="rerun")
    async def quick() -> str:
        ran.append(1)
        await asyncio.sleep(0)
        ended.set()
        return "worked"

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "quick")]]), tools=[quick]), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await ended.wait()
    async with place.runtime(Agent(ScriptedModel(["done"]), tools=[quick])) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

    assert result.tool_calls[0].outcome == Ok("worked")
    assert ran == [1]


async def test_a_call_that_had_not_begun_runs_at_the_next_entry(file: Place) -> None:
    """Its start is in the reply's record, but the Runtime was left before its body ran: that is known, not unknown."""
    writing, go_on = asyncio.Event(), asyncio.Event()
    store: Any = file.store()

    class Pausing:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def write(self, write: Any) -> Any:
            if type(write).__name__ == "Append" and not writing.is_set():
                writing.set()
                await go_on.wait()
            return await store.write(write)

    work = Work()
    work.release.set()
    pausing: Any = Pausing()
    runtime = Runtime(pausing, agents=[work.agent(ASK)], grace=0)
    async with runtime:
        await (await runtime.session("chat")).send("go")
        await asyncio.wait_for(writing.wait(), SOON)
        asyncio.get_running_loop().call_later(0.02, go_on.set)
    assert work.ledger == []
    async with file.runtime(work.agent("done")) as again:
        result = await (await again.session("chat")).result("chat.1")

    assert result.tool_calls[0].outcome == Ok("worked")
    assert work.ledger == [(1, "chat.1.1.0")]


async def test_a_tool_that_ignores_leaving_is_left_behind(place: Place) -> None:
    running, stop = asyncio.Event(), asyncio.Event()

    @tool
    async def stubborn() -> None:
        running.set()
        while not stop.is_set():
            try:
                await stop.wait()
            except asyncio.CancelledError:
                continue

    agent = Agent(ScriptedModel([[ToolCall("a", "stubborn")]]), tools=[stubborn])
    async with asyncio.timeout(SOON):
        async with place.runtime(agent, grace=0) as runtime:
            await (await runtime.session("chat")).send("go")
            await running.wait()
    stop.set()
    async with place.runtime(Agent(ScriptedModel(["done"]), tools=[stubborn])) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

    assert type(result.tool_calls[0].outcome) is OutcomeUnknown


async def test_a_thread_that_does_not_end_does_not_keep_the_runtime(place: Place) -> None:
    loop, running, stop = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    @tool
    def stuck() -> None:
        loop.call_soon_threadsafe(running.set)
        stop.wait(SOON)

    agent = Agent(ScriptedModel([[ToolCall("a", "stuck")]]), tools=[stuck])
    async with asyncio.timeout(SOON):
        async with place.runtime(agent, grace=0) as runtime:
            await (await runtime.session("chat")).send("go")
            await running.wait()
    stop.set()


def test_a_thread_that_outlives_its_event_loop_may_still_tell_of_progress(place: Place) -> None:
    left, ended, told = threading.Event(), threading.Event(), []

    @tool
    def write_all(ctx: ToolContext) -> None:
        ctx.progress("begun")
        left.wait(SOON)
        for row in range(3):
            told.append(row)
            ctx.progress(row)
        ended.set()

    async def leave() -> None:
        agent = Agent(ScriptedModel([[ToolCall("a", "write_all")]]), tools=[write_all])
        async with place.runtime(agent, grace=0) as runtime:
            session = await runtime.session("chat")
            async with session.stream("go") as turn:
                async for event in turn:
                    if isinstance(event, ToolProgress):
                        break

    asyncio.run(leave())
    left.set()

    assert ended.wait(SOON)
    assert told == [0, 1, 2]


async def test_who_waits_when_the_runtime_is_left_is_told(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as runtime:
        session = await runtime.session("chat")
        waiters = [asyncio.create_task(session.run(f"say {n}")) for n in range(3)]
        await model.next()
    ends = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), SOON)

    assert [type(e) for e in ends] == [RuntimeClosed] * 3
    async with place.runtime(Agent(ScriptedModel(["a", "b", "c"]))) as runtime:
        results = [await (await runtime.session("chat")).result(f"chat.{n}") for n in (1, 2, 3)]
        assert sorted(texts(results)) == ["a", "b", "c"]


async def test_cancel_and_leaving_at_the_same_moment(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as runtime:
        session = await runtime.session("chat")
        await session.send("go")
        await model.next()
        await session.cancel("stop")
    async with place.runtime(Agent(ScriptedModel([]))) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

        assert type(result.outcome).__name__ == "Cancelled"


async def test_wait_idle_sees_everything_done(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["a", "b", "c"]))) as runtime:
        session = await runtime.session("chat")
        for n in range(3):
            await session.send(f"say {n}")

        assert await runtime.wait_idle(SOON)
        assert texts(await session.history()) == ["say 0", "a", "say 1", "b", "say 2", "c"]


async def test_wait_idle_gives_up_in_time(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")

        assert not await runtime.wait_idle(0.02)


async def test_without_recovery_wait_idle_does_not_wait_for_what_others_have(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as other:
        await (await other.session("theirs")).send("go")
        await model.next()
        async with place.runtime(Agent(ScriptedModel(["a"])), recover=False) as runtime:
            session = await runtime.session("mine")
            await session.send("say")

            assert await runtime.wait_idle(SOON)
            assert texts(await session.history()) == ["say", "a"]


async def test_wait_idle_does_not_wait_for_what_a_living_runtime_has(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as other:
        await (await other.session("theirs")).send("go")
        await model.next()
        async with place.runtime(Agent(ScriptedModel(["a"]))) as runtime:
            session = await runtime.session("mine")
            await session.send("say")

            assert await runtime.wait_idle(SOON)
            assert texts(await session.history()) == ["say", "a"]


async def test_wait_idle_does_not_wait_for_a_process_that_a_living_runtime_has(place: Place) -> None:
    begun = asyncio.Event()

    @process
    async def waiting(ctx: ProcessContext) -> None:
        async def wait() -> None:
            begun.set()
            await asyncio.Event().wait()

        await ctx.step(wait)

    async with place.runtime(processes=[waiting], grace=0) as other:
        await other.start(waiting)
        await begun.wait()
        async with place.runtime(processes=[waiting]) as runtime:
            assert await runtime.wait_idle(SOON)


async def test_wait_idle_waits_for_what_a_dead_runtime_had(file: Place) -> None:
    model = TellingModel()
    dead = await file.runtime(Agent(model), grace=0).__aenter__()
    await (await dead.session("theirs")).send("go")
    await model.next()
    async with file.runtime(Agent(ScriptedModel(["a"]))) as runtime:
        assert await runtime.wait_idle(SOON)  # they live, as far as anybody knows
        await crash(dead)
        assert await runtime.wait_idle(SOON)
        assert texts(await (await runtime.session("theirs")).history()) == ["go", "a"]


async def test_what_draining_left_behind_is_not_waited_for(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel([]))) as runtime:
        assert await runtime.drain(SOON)
        await (await runtime.session("chat")).send("late")

        assert await runtime.wait_idle(SOON)


async def test_draining_finishes_what_runs_and_starts_nothing_new(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session, other = await runtime.session("chat"), await runtime.session("other")
        first, second = await session.send("one"), await session.send("two")
        await model.next()
        draining = asyncio.create_task(runtime.drain())
        await asyncio.sleep(0)
        late = await other.send("late")
        model.say("done")

        assert await asyncio.wait_for(draining, SOON)
        assert (await first.result(SOON)).text == "done"
        assert model.asked.empty()
    async with place.runtime(Agent(ScriptedModel(["x", "x"]))) as runtime:
        assert (await (await runtime.session("chat")).result(second.turn_id)).text == "x"
        assert (await (await runtime.session("other")).result(late.turn_id)).text == "x"


async def test_draining_gives_up_in_time(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await model.next()

        assert not await runtime.drain(0.02)
