"""What a host hears that says something behind a parked turn, or where no living worker has the agent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, ModelRequest, ProcessContext, Runtime, ToolCall, TurnPending, process, tool
from perdure.engine.lease import LeaseTerms
from perdure.errors import InvalidDefinition
from perdure.model.outcome import Queued
from perdure.model.session import Offers
from perdure.testing import FunctionModel, VirtualClock
from tests.kit import SOON, Place, TellingModel, crash, until


@tool(approval="ask")
async def sign() -> str:
    """Sign it."""
    return "signed"


def answer(request: ModelRequest) -> Any:
    """Sign when that is asked for, else say what was said."""
    last = request.messages[-1]
    if last.role == "tool":
        return "It is signed."
    return [ToolCall("c", "sign")] if last.text == "sign" else f"You said: {last.text}"


def clerk() -> Agent[str]:
    return Agent(FunctionModel(answer), name="clerk", tools=[sign])


async def parked(runtime: Runtime) -> Any:
    """A session whose turn waits for approval."""
    session = await runtime.session("s")
    assert (await session.run("sign")).waiting
    return session


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, SOON)


async def test_a_run_behind_a_parked_turn_says_what_it_waits_behind(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        session = await parked(runtime)
        result = await soon(session.run("hello", key="k"))

    assert isinstance(result.outcome, Queued)
    assert (result.turn_id, result.outcome.behind) == ("s.2", "s.1")
    assert [(call.call_id, call.tool) for call in result.outcome.calls] == [("s.1.1.0", "sign")]
    assert "s.1.1.0" in result.outcome.reason
    assert [m.text for m in result.new_messages] == ["hello"]
    assert (result.waiting, result.tool_calls) == (False, [])
    with pytest.raises(
        TurnPending, match=r"s\.2 has no answer yet: queued: turn s\.1 waits.*session\.approve\('s\.1\.1\.0'\)"
    ):
        _ = result.text


async def test_queued_is_no_end_and_the_same_key_returns_the_result_later(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        session = await parked(runtime)
        queued = await soon(session.run("hello", key="k"))
        with pytest.raises(TurnPending, match="queued"):
            queued.raise_for_outcome()
        await session.approve("s.1.1.0")
        again = await soon(session.run("hello", key="k"))

    assert (again.turn_id, again.output) == ("s.2", "You said: hello")


async def test_a_run_is_told_when_the_turn_ahead_parks_later(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, name="clerk", tools=[sign])) as runtime:
        session = await runtime.session("s")
        await session.send("sign")
        await model.next()
        waiting = asyncio.create_task(session.run("hello"))
        receipt = await session.send("and this")
        patient = asyncio.create_task(receipt.result())
        model.say([ToolCall("c", "sign")])
        result = await soon(waiting)

        assert isinstance(result.outcome, Queued)
        assert result.outcome.behind == "s.1"
        assert not patient.done()
        patient.cancel()


async def test_a_run_is_told_when_the_turn_ahead_parks_in_another_runtime(place: Place) -> None:
    model = TellingModel()
    async with (
        place.runtime(Agent(model, name="clerk", tools=[sign])) as owner,
        place.runtime(clerk(), clock=VirtualClock()) as other,
    ):
        await (await owner.session("s")).send("sign")
        await model.next()
        waiting = asyncio.create_task((await other.session("s")).run("hello"))
        await until(lambda: other._turns.outcomes.awaited_by_hosts("s"))
        model.say([ToolCall("c", "sign")])
        result = await soon(waiting)

    assert isinstance(result.outcome, Queued)
    assert result.outcome.behind == "s.1"


async def test_a_stream_behind_a_parked_turn_ends_and_says_so(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        session = await parked(runtime)
        async with asyncio.timeout(SOON), session.stream("hello") as turn:
            events = [event async for event in turn]
            result = await turn.result()

    assert events == []
    assert isinstance(result.outcome, Queued)


async def test_a_stream_is_told_when_the_turn_ahead_parks_later(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, name="clerk", tools=[sign])) as runtime:
        session = await runtime.session("s")
        await session.send("sign")
        await model.next()
        async with asyncio.timeout(SOON), session.stream("hello") as turn:
            model.say([ToolCall("c", "sign")])
            events = [event async for event in turn]
            result = await turn.result()

    assert events == []
    assert isinstance(result.outcome, Queued)


async def test_a_timeout_does_not_withdraw_what_is_queued(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        session = await parked(runtime)
        queued = await session.run("hello", key="k", timeout=SOON)
        await session.approve("s.1.1.0")
        result = await soon(session.result("s.2"))

    assert isinstance(queued.outcome, Queued)
    assert result.text == "You said: hello"


async def test_a_receipt_and_a_result_wait_behind_a_parked_turn(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        session = await parked(runtime)
        receipt = await session.send("hello")
        both = asyncio.gather(receipt.result(), session.result("s.2"))
        await until(lambda: len(runtime._turns.outcomes.waiters.of("s", 2)) == 2)
        await session.approve("s.1.1.0")
        first, second = await soon(both)

    assert first.text == second.text == "You said: hello"


# ---------------------------------------------------------------------- no worker for it


async def test_a_run_without_a_living_worker_for_the_agent_says_so(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        await (await runtime.session("s")).run("one")
    async with place.runtime() as front:
        session = await front.session("s")
        result = await soon(session.run("hello", key="k"))

        assert isinstance(result.outcome, Queued)
        assert (result.outcome.behind, result.outcome.calls) == (None, ())
        assert "'clerk'" in result.outcome.reason

        async with place.runtime(clerk()):
            again = await soon(session.run("hello", key="k"))
            assert again.text == "You said: hello"


async def test_a_run_waits_for_the_living_worker_that_has_the_agent(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, name="clerk")) as worker:
        model.say("first")
        await (await worker.session("s")).run("one")
        await model.next()
        async with place.runtime() as front:
            session = await front.session("s")
            waiting = asyncio.create_task(session.run("hello"))
            await model.next()
            assert not waiting.done()
            model.say("second")
            result = await soon(waiting)

    assert result.text == "second"


async def test_a_worker_of_another_agent_or_one_that_does_not_recover_is_no_worker_for_it(place: Place) -> None:
    async with place.runtime(clerk()) as runtime:
        await (await runtime.session("s")).run("one")
    other = Agent(FunctionModel(answer), name="other")
    async with (
        place.runtime(other),
        place.runtime(clerk(), recover=False),
        place.runtime() as front,
    ):
        result = await soon((await front.session("s")).run("hello"))

    assert isinstance(result.outcome, Queued)
    assert result.outcome.behind is None


async def asked_in_vain(place: Place, model: TellingModel) -> Runtime:
    """A worker that has had a session; it dies when it is asked again."""
    worker = await place.runtime(Agent(model, name="clerk")).__aenter__()
    model.say("first")
    await (await worker.session("s")).run("one")
    await model.next()
    return worker


async def test_a_run_is_told_when_the_only_worker_for_it_dies(place: Place) -> None:
    model = TellingModel()
    worker = await asked_in_vain(place, model)
    async with place.runtime(clock=VirtualClock(), lease=LeaseTerms(restart=0)) as front:
        waiting = asyncio.create_task((await front.session("s")).run("hello"))
        await model.next()
        await crash(worker)
        result = await soon(waiting)

    assert isinstance(result.outcome, Queued)
    assert result.outcome.behind is None


async def test_a_run_waits_some_seconds_for_a_worker_that_is_started_again(place: Place) -> None:
    model, clock = TellingModel(), VirtualClock()
    worker = await asked_in_vain(place, model)
    async with place.runtime(clock=clock, lease=LeaseTerms(restart=5)) as front:
        session = await front.session("s")
        first = asyncio.create_task(session.run("hello", key="hello"))
        await model.next()
        await crash(worker)
        await until(lambda: not front._worker.is_alive(worker._worker.id))
        clock.advance(4.9)
        await polled(front)
        second = asyncio.create_task(session.run("are you there?"))
        await polled(front)
        told_early = first.done() or second.done()
        clock.advance(0.2)
        results = [await soon(first), await soon(second)]
        at_once = await soon(session.run("still nobody?"))

    assert not told_early
    assert [type(result.outcome) for result in (*results, at_once)] == [Queued] * 3


async def test_a_run_ends_as_its_turn_does_where_the_worker_is_started_again_in_time(place: Place) -> None:
    model = TellingModel()
    worker = await asked_in_vain(place, model)
    async with place.runtime(clock=VirtualClock()) as front:
        waiting = asyncio.create_task((await front.session("s")).run("hello"))
        await model.next()
        await crash(worker)
        await until(lambda: not front._worker.is_alive(worker._worker.id))
        model.say("hello again")
        async with place.runtime(Agent(model, name="clerk")):
            result = await soon(waiting)

    assert result.text == "hello again"


async def polled(runtime: Runtime) -> None:
    """Wait until a Runtime has looked at its store twice, so that once was all of it from now on."""
    assert runtime._parts is not None
    for _ in range(2):
        runtime._parts.activity.polled.clear()
        await runtime._parts.activity.polled.wait()


@pytest.mark.parametrize("restart", [-1, "5", float("nan"), float("inf"), None, True])
def test_time_for_a_restart_is_a_number_of_seconds(restart: Any) -> None:
    with pytest.raises(InvalidDefinition, match="give seconds, 0 or more"):
        LeaseTerms(restart=restart)


async def test_workers_publish_what_they_take_up(place: Place) -> None:
    @process
    async def nightly(ctx: ProcessContext) -> None: ...

    async with place.runtime(clerk(), processes=[nightly]) as runtime:
        [row] = await runtime.store.workers()
        assert row.offers is not None
        assert replace(row.offers, socket="", version="") == Offers(("clerk",), (nightly.definition,))
    async with place.runtime(clerk(), recover=False) as runtime:
        [row] = await runtime.store.workers()
        assert row.offers is not None
        assert replace(row.offers, socket="", version="") == Offers()
