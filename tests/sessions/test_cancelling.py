"""Cancelling: a request on disk races the completion, and the cancelled turn commits with its evidence."""

import asyncio
import time

import pytest

from perdure import Agent, ModelRequest, Runtime, Session, ToolCall, ToolContext, TurnFailed, tool
from perdure.errors import UnknownTurn
from perdure.model.outcome import Finished, Waiting
from perdure.model.tool import Cancelled, Ok, OutcomeUnknown
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock
from tests.kit import SOON, Place, TellingModel, crash, overloaded, texts, until, wait_for_thread


async def goes_on(session: Session, model: TellingModel) -> str:
    """What the session answers next: a cancelled turn must leave it usable."""
    model.say("still here")
    return (await session.run("and now?")).text


async def test_cancel_during_a_model_call(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await model.next()
        status = await session.cancel("changed my mind", by="operator")
        result = await receipt.result(SOON)

        assert status == "requested"
        assert result.outcome == Cancelled("operator", "changed my mind")
        assert texts(await session.history()) == ["go"]
        assert await goes_on(session, model) == "still here"


async def test_cancel_before_the_turn_has_begun(place: Place) -> None:
    async with place.runtime(Agent(TellingModel())) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await session.cancel()

        assert (await receipt.result(SOON)).outcome == Cancelled("host", "")


async def test_cancel_during_an_async_tool_records_that_its_effect_is_unknown(place: Place) -> None:
    running = asyncio.Event()

    @tool
    async def dig() -> str:
        running.set()
        await asyncio.Event().wait()
        return "never"

    model = TellingModel()
    async with place.runtime(Agent(model, tools=[dig])) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        model.say([ToolCall("a", "dig"), ToolCall("b", "dig")])
        await running.wait()
        await session.cancel()
        result = await receipt.result(SOON)

        assert result.outcome == Cancelled("host", "")
        assert [type(c.outcome) for c in result.tool_calls] == [OutcomeUnknown, OutcomeUnknown]
        assert [m.role for m in await session.history()] == ["user", "assistant", "tool", "tool"]
        assert await goes_on(session, model) == "still here"


async def test_a_cancelled_tool_may_say_how_it_ended(place: Place) -> None:
    running = asyncio.Event()

    @tool
    async def dig() -> str:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "stopped at three metres"
        return "never"

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "dig")]]), tools=[dig])) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await running.wait()
        await session.cancel()
        result = await receipt.result(SOON)

        assert result.tool_calls[0].outcome == Ok("stopped at three metres")


async def test_a_tool_on_a_thread_sees_the_cancel_and_may_report(place: Place) -> None:
    contexts = list[ToolContext[None]]()

    @tool
    def dig(ctx: ToolContext[None]) -> str:
        contexts.append(ctx)
        end = time.monotonic() + SOON
        while not ctx.cancelled and time.monotonic() < end:
            time.sleep(0.001)
        return "stopped at three metres"

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "dig")]]), tools=[dig])) as runtime:
        wait_for_thread(runtime, contexts)
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await until(lambda: contexts)
        await session.cancel()
        result = await receipt.result(SOON)

        assert result.tool_calls[0].outcome == Ok("stopped at three metres")


async def test_a_tool_that_ignores_its_cancellation_does_not_hold_up_the_turn(place: Place) -> None:
    running, stop = asyncio.Event(), asyncio.Event()

    @tool
    async def stubborn() -> str:
        running.set()
        while not stop.is_set():
            try:
                await stop.wait()
            except asyncio.CancelledError:
                continue
        return "at last"

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "stubborn")]]), tools=[stubborn])) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await running.wait()
        await session.cancel()
        result = await receipt.result(SOON)
        stop.set()

        assert result.outcome == Cancelled("host", "")
        assert type(result.tool_calls[0].outcome) is OutcomeUnknown


async def test_cancel_while_queued_never_asks_the_model(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        await session.send("one")
        await model.next()
        second, third = await session.send("two"), await session.send("three")
        status = await session.cancel("not needed", turn_id=second.turn_id)
        model.say("first", "third")
        result = await third.result(SOON)

        assert status == "requested"
        assert (await second.result(SOON)).outcome == Cancelled("host", "not needed")
        assert result.text == "third"
        assert texts(await session.history()) == ["one", "first", "two", "three", "third"]


async def test_who_waits_for_a_cancelled_queued_turn_need_not_wait_for_the_running_one(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as runtime:
        session = await runtime.session("chat")
        await session.send("one")
        await model.next()
        second = await session.send("two")
        await session.cancel(turn_id=second.turn_id)

        assert (await second.result(SOON)).outcome == Cancelled("host", "")
        assert texts((await second.result(SOON)).new_messages) == ["two"]


async def test_cancel_while_parked(place: Place) -> None:
    @tool(approval="ask")
    async def shoot() -> str:
        return "bang"

    model = ScriptedModel([[ToolCall("a", "shoot")], "still here"])
    async with place.runtime(Agent(model, tools=[shoot])) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        status = await session.cancel("no shooting")
        result = await session.result(parked.turn_id)

        assert isinstance(parked.outcome, Waiting)
        assert status == "requested"
        assert result.outcome == Cancelled("host", "no shooting")
        assert result.tool_calls[0].outcome == Cancelled("runtime", "the turn ended before the call ran")
        assert await session.pending() == []
        assert (await session.run("and now?")).text == "still here"


async def test_a_deferred_call_of_a_cancelled_turn_is_unknown_not_cancelled(place: Place) -> None:
    """It has started: somebody outside may have acted on its key."""

    @tool(deferred=True)
    async def order(ctx: ToolContext[None]) -> None:
        ctx.defer()

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "order")]]), tools=[order])) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        await session.cancel()
        result = await session.result(parked.turn_id)

        assert type(result.tool_calls[0].outcome) is OutcomeUnknown
        assert [m.tool_results[0].status for m in await session.history() if m.role == "tool"] == ["outcome_unknown"]


async def test_cancel_that_comes_after_a_crash_does_not_hide_an_unknown_effect(place: Place) -> None:
    running = asyncio.Event()

    @tool
    async def dig() -> None:
        running.set()
        await asyncio.Event().wait()

    runtime = await place.runtime(Agent(ScriptedModel([[ToolCall("a", "dig")]]), tools=[dig])).__aenter__()
    await (await runtime.session("chat")).send("go")
    await running.wait()
    await crash(runtime)
    async with place.runtime() as runtime:
        assert await (await runtime.session("chat")).cancel() == "requested"
    async with place.runtime(Agent(ScriptedModel([]), tools=[dig])) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

        assert result.outcome == Cancelled("host", "")
        assert type(result.tool_calls[0].outcome) is OutcomeUnknown


async def test_cancel_after_completion_changes_nothing(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["done"]))) as runtime:
        session = await runtime.session("chat")
        result = await session.run("go")

        assert await session.cancel() == "completion_won"
        assert await session.cancel(turn_id=result.turn_id) == "completion_won"
        assert (await session.result(result.turn_id)).text == "done"


async def test_cancel_twice_is_the_first_request(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("one")
        await model.next()
        queued = await session.send("two")
        once = await session.cancel("first", turn_id=queued.turn_id)
        twice = await session.cancel("second", turn_id=queued.turn_id)
        model.say("done")
        await receipt.result(SOON)

        assert (once, twice) == ("requested", "already_requested")
        assert (await queued.result(SOON)).outcome == Cancelled("host", "first")


async def test_cancel_of_what_does_not_exist(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["done"]))) as runtime:
        session = await runtime.session("chat")
        assert await session.cancel() == "unknown"
        await session.run("go")

        assert await session.cancel(turn_id="chat.99") == "unknown"
        with pytest.raises(UnknownTurn, match="receipt or result"):
            await session.cancel(turn_id="other.1")
        with pytest.raises(UnknownTurn):
            await session.cancel(turn_id="nonsense")


async def test_a_timeout_of_run_cancels_the_turn(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        result = await session.run("go", timeout=0.02)

        assert result.outcome == Cancelled("timeout", "it did not end within 0.02 s")
        with pytest.raises(TurnFailed, match="cancelled"):
            _ = result.output
        assert await goes_on(session, model) == "still here"


async def test_a_timeout_of_run_on_a_busy_session_does_not_wait_for_it(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), grace=0) as runtime:
        session = await runtime.session("chat")
        await session.send("one")
        await model.next()
        async with asyncio.timeout(SOON):
            result = await session.run("two", timeout=0.02)

        assert result.outcome == Cancelled("timeout", "it did not end within 0.02 s")


async def test_a_timeout_around_run_leaves_the_turn_alone(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")

        async def give_up_when_asked() -> None:
            async with asyncio.timeout(SOON) as limit:
                asked = asyncio.create_task(model.next())
                asked.add_done_callback(lambda _: limit.reschedule(0))
                await session.run("go")

        with pytest.raises(TimeoutError):
            await give_up_when_asked()
        model.say("done")
        result = await session.result("chat.1")

        assert result.outcome == Finished("done")


async def test_dropping_the_waiter_leaves_the_turn_alone(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        waiter = asyncio.create_task(session.run("go"))
        await model.next()
        waiter.cancel()
        model.say("done")

        assert (await session.result("chat.1")).text == "done"


async def test_a_receipts_timeout_ends_the_wait_only(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        with pytest.raises(TimeoutError):
            await receipt.result(timeout=0.02)
        model.say("done")

        assert (await receipt.result(SOON)).text == "done"


async def test_a_cancel_request_from_another_runtime_on_the_same_file(file: Place) -> None:
    model = TellingModel()
    async with file.runtime(Agent(model)) as working, file.runtime() as watching:
        receipt = await (await working.session("chat")).send("go")
        await model.next()
        await (await watching.session("chat")).cancel("from elsewhere", by="operator")

        assert (await receipt.result(SOON)).outcome == Cancelled("operator", "from elsewhere")


async def test_cancel_reaches_a_turn_that_waits_to_ask_again(place: Place) -> None:
    clock = VirtualClock()
    async with place.runtime(Agent(ScriptedModel([overloaded()])), clock=clock) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await clock.wait_sleeping()
        await session.cancel()

        assert (await receipt.result(SOON)).outcome == Cancelled("host", "")


async def test_cancel_reaches_a_tool_that_waits_for_its_slot(place: Place) -> None:
    running, release = asyncio.Event(), asyncio.Event()

    @tool(limit=1)
    async def narrow() -> str:
        running.set()
        await release.wait()
        return "through"

    def model(request: ModelRequest) -> object:
        last = request.messages[-1]
        return "done" if last.role == "tool" else [ToolCall("a", "narrow")]

    async with place.runtime(Agent(FunctionModel(model), tools=[narrow])) as runtime:
        first, second = await runtime.session("first"), await runtime.session("second")
        ahead = await first.send("go")
        await running.wait()
        behind = await second.send("go")
        await wait_queued(runtime)
        await second.cancel()
        result = await behind.result(SOON)
        release.set()

        assert result.tool_calls[0].outcome == Cancelled("runtime", "the turn ended before the call ran")
        assert result.tool_calls[0].attempts == 0
        assert (await ahead.result(SOON)).text == "done"
        assert (await second.run("again")).text == "done"


async def wait_queued(runtime: Runtime) -> None:
    """Until a call stands in line: nothing outside shows that."""
    await until(lambda: runtime._dispatcher.admission.waiting())
