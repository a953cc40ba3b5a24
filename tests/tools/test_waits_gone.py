"""What a turn asked of others goes with its commit; who answers later is told the same as before."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, Retry, Runtime, Session, ToolCall, ToolContext, tool
from perdure.errors import AlreadyAnswered, UnknownCall, UnknownWait
from perdure.model.outcome import Finished
from perdure.model.tool import Cancelled, Ok, OutcomeUnknown
from perdure.testing import ScriptedModel, VirtualClock
from tests.kit import SOON, Place, crash, until

CALL = "chat.1.1.0"


class Office:
    """Tools that ask for approval, a completion or a settlement. `ran` counts bodies, `keys` are handed out."""

    def __init__(self) -> None:
        self.ran, self.keys = 0, list[str]()
        self.hold = asyncio.Event()

    def agent(self, name: str = "pay", *more: Any) -> Agent[str]:
        @tool(approval="ask")
        async def pay() -> str:
            self.ran += 1
            return "paid"

        @tool(deferred=True)
        async def order(ctx: ToolContext[None], seconds: float | None = None) -> None:
            self.keys.append(ctx.defer(seconds))

        @tool(deferred=True)
        async def sell(ctx: ToolContext[None]) -> str:
            self.keys.append(ctx._host.completion_key() or "")
            return "in stock"

        @tool(recovery="ask")
        async def ship() -> str:
            self.ran += 1
            if self.ran == 1:
                await self.hold.wait()
            return "shipped"

        args = {"seconds": 3600} if name == "order in time" else {}
        called = [ToolCall("a", name.split()[0], args)]
        return Agent(ScriptedModel([called, *(more or ["done"])]), tools=[pay, order, sell, ship], name="office")


async def ends(session: Session, turn: str = "chat.1") -> Any:
    async def over() -> bool:
        return not (await session.result(turn)).waiting

    await asyncio.wait_for(until(over), SOON)
    return await session.result(turn)


async def no_waits(runtime: Runtime) -> bool:
    row = await runtime.store.session("chat")
    assert row is not None
    return await runtime.store.waits(row.sid) == []


Ask = Callable[[Runtime, Session], Awaitable[None]]


async def refusals(place: Place, ask: Ask, here: tuple[Runtime, Session]) -> list[Any]:
    """What an answer that comes too late is told: here, from another Runtime, and after a restart."""
    found = [await refusal(ask, *here)]
    async with place.runtime() as other:
        found.append(await refusal(ask, other, await other.session("chat")))
    return found


async def approve(call: str, _: Runtime, session: Session) -> None:
    await session.approve(call)


async def refusal(ask: Ask, runtime: Runtime, session: Session) -> Any:
    with pytest.raises((AlreadyAnswered, UnknownCall, UnknownWait)) as raised:
        await ask(runtime, session)
    error = raised.value
    return error.answer if isinstance(error, AlreadyAnswered) else type(error)


# ---------------------------------------------------------------------- after the commit


async def test_an_approval_goes_with_its_turn_and_is_remembered(place: Place) -> None:
    async with place.runtime(Office().agent()) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.approve(CALL, by="ann")
        assert (await ends(session)).tool_calls[0].outcome == Ok("paid")

        assert await no_waits(runtime)
        answer = {"verdict": "approved", "by": "ann"}
        assert await refusals(place, lambda _, s: s.approve(CALL), (runtime, session)) == [answer, answer]
        assert await refusals(place, lambda _, s: s.reject(CALL), (runtime, session)) == [answer, answer]
        with pytest.raises(AlreadyAnswered, match="before with 'approved' by ann: the first answer stands"):
            await session.approve(CALL)


async def test_a_rejection_goes_with_its_turn_and_is_remembered(place: Place) -> None:
    async with place.runtime(Office().agent()) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.reject(CALL, "too dear", by="bob")
        await ends(session)

        assert await no_waits(runtime)
        answer = {"verdict": "rejected", "reason": "too dear", "by": "bob"}
        assert await refusals(place, lambda _, s: s.approve(CALL), (runtime, session)) == [answer, answer]


async def test_an_approval_of_a_tool_that_was_taken_away_is_remembered(place: Place) -> None:
    async with place.runtime(Office().agent()) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime(Agent(ScriptedModel(["done"]), name="office")) as runtime:
        session = await runtime.session("chat")
        await session.approve(CALL, by="ann")
        assert (await ends(session)).tool_calls[0].outcome.code == "tool_unavailable"

        answer = {"verdict": "approved", "by": "ann"}
        assert await refusals(place, lambda _, s: s.approve(CALL), (runtime, session)) == [answer, answer]


async def test_a_completion_goes_with_its_turn_and_is_remembered(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("order")) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await runtime.resolve(office.keys[0], {"sent": 3})
        assert (await ends(session)).tool_calls[0].outcome == Ok({"sent": 3})

        assert await no_waits(runtime)
        answer = {"verdict": "value", "value": {"sent": 3}}
        assert await refusals(place, lambda r, _: r.resolve(office.keys[0], 4), (runtime, session)) == [answer, answer]
        assert await refusals(place, lambda _, s: s.settle(CALL, "done"), (runtime, session)) == [answer, answer]
        assert await refusals(place, lambda _, s: s.approve(CALL), (runtime, session)) == [UnknownCall, UnknownCall]


async def test_a_failed_completion_is_remembered(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("order")) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await runtime.resolve(office.keys[0], [1], error="sold out")
        await ends(session)

        answer = {"verdict": "error", "value": [1], "reason": "sold out"}
        assert await refusals(place, lambda r, _: r.resolve(office.keys[0], 4), (runtime, session)) == [answer, answer]


async def test_a_completion_that_came_too_late_stays_too_late(place: Place) -> None:
    office, clock = Office(), VirtualClock()
    async with place.runtime(office.agent("order in time"), clock=clock) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        clock.advance(3600)
        assert isinstance((await ends(session)).tool_calls[0].outcome, OutcomeUnknown)

        assert await no_waits(runtime)
        late = await refusals(place, lambda r, _: r.resolve(office.keys[0], 4), (runtime, session))
        assert late == ["expired", "expired"]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_key_that_was_taken_back_stays_unknown(place: Place, cancelled: bool) -> None:
    office = Office()
    async with place.runtime(office.agent("sell", [ToolCall("b", "pay")], "done")) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await (session.cancel() if cancelled else session.approve("chat.1.2.0"))
        assert type((await ends(session)).outcome) is (Cancelled if cancelled else Finished)

        assert await no_waits(runtime)
        late = await refusals(place, lambda r, _: r.resolve(office.keys[0], 4), (runtime, session))
        assert late == [UnknownWait, UnknownWait]


@pytest.mark.parametrize("verdict", ["done", "failed", "rerun"])
async def test_a_settlement_goes_with_its_turn_and_is_remembered(place: Place, verdict: Any) -> None:
    office = Office()
    runtime = await place.runtime(office.agent("ship")).__aenter__()
    await (await runtime.session("chat")).send("go")
    await until(lambda: office.ran)
    await crash(runtime)
    async with place.runtime(Agent(ScriptedModel(["done"]), tools=office.agent().tools, name="office")) as runtime:
        session = await runtime.session("chat")
        await asyncio.wait_for(session.result("chat.1"), SOON)
        await session.settle(CALL, verdict, value=None if verdict == "rerun" else 7, reason="seen", by="ann")
        await ends(session)

        assert await no_waits(runtime)
        value = {} if verdict == "rerun" else {"value": 7}
        answer = {"verdict": verdict, **value, "reason": "seen", "by": "ann"}
        assert await refusals(place, lambda _, s: s.settle(CALL, "done"), (runtime, session)) == [answer, answer]


async def test_calls_that_nobody_was_asked_about_stay_unknown(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent()) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.approve(CALL)
        await ends(session)

        for call in ("chat.1.1.1", "chat.1.9.0", "chat.2.1.0", "chat.0.1.0"):
            ask = functools.partial(approve, call)
            assert await refusals(place, ask, (runtime, session)) == [UnknownCall, UnknownCall]


async def test_an_answer_for_a_deleted_session_is_unknown_and_leaves_nothing(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("order")) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await runtime.sessions.delete("chat")

        assert await no_waits(runtime)
        assert await refusals(place, lambda r, _: r.resolve(office.keys[0], 4), (runtime, session)) == [UnknownWait] * 2


async def test_a_fork_neither_keeps_nor_takes_what_its_source_asked(place: Place) -> None:
    async with place.runtime(Office().agent("pay", "done", [ToolCall("b", "pay")], "well")) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.approve(CALL, by="ann")
        await ends(session)
        fork = await session.fork(session_id="fork")
        await fork.run("again")
        assert [call.call_id for call in await fork.pending()] == ["fork.1.1.0"]

        with pytest.raises(UnknownCall, match="another session"):
            await fork.approve(CALL)
        with pytest.raises(AlreadyAnswered, match="approved"):
            await session.approve(CALL)
        await fork.approve("fork.1.1.0")
        assert (await ends(fork, "fork.1")).text == "well"


# ---------------------------------------------------------------------- between a cancel and the commit


async def test_an_answer_to_a_turn_that_was_asked_to_stop_is_not_taken(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent()) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime() as runtime:  # works on nothing: the request waits for a worker
        session = await runtime.session("chat")
        assert await session.cancel("enough", by="ann") == "requested"

        assert await refusals(place, lambda _, s: s.approve(CALL), (runtime, session)) == ["cancelled"] * 2
        assert await refusals(place, lambda _, s: s.reject(CALL), (runtime, session)) == ["cancelled"] * 2
    async with place.runtime(office.agent()) as runtime:
        session = await runtime.session("chat")
        result = await ends(session)
        assert (result.outcome, office.ran) == (Cancelled("ann", "enough"), 0)

        assert await no_waits(runtime)
        assert await refusals(place, lambda _, s: s.approve(CALL), (runtime, session)) == ["cancelled"] * 2


async def test_a_completion_of_a_turn_that_was_asked_to_stop_is_not_taken(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("order")) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime() as runtime:
        session = await runtime.session("chat")
        await session.cancel()

        late = await refusals(place, lambda r, _: r.resolve(office.keys[0], 4), (runtime, session))
        assert late == ["cancelled", "cancelled"]
    async with place.runtime(office.agent("order")) as runtime:
        session = await runtime.session("chat")
        assert isinstance((await ends(session)).tool_calls[0].outcome, OutcomeUnknown)

        late = await refusals(place, lambda r, _: r.resolve(office.keys[0], 4), (runtime, session))
        assert late == ["cancelled", "cancelled"]


async def test_nothing_waits_any_more_once_the_turn_is_asked_to_stop(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent()) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime() as runtime:
        session = await runtime.session("chat")
        assert [call.call_id for call in await session.pending()] == [CALL]
        await session.cancel()

        assert await session.pending() == []
        with pytest.raises(AlreadyAnswered, match="cancelled"):
            await session.approve(CALL)


async def test_who_approved_of_a_call_that_was_cancelled_before_it_ran_is_told_for_good(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent()) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime() as runtime:
        session = await runtime.session("chat")
        await session.approve(CALL, by="ann")
        await session.cancel()
    async with place.runtime(office.agent()) as runtime:
        session = await runtime.session("chat")
        await ends(session)

        assert office.ran == 0
        approved = {"verdict": "approved", "by": "ann"}
        assert await refusals(place, lambda _, s: s.approve(CALL), (runtime, session)) == [approved] * 2


async def test_an_unknown_outcome_of_a_cancelled_turn_may_be_annotated(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("order", "good to know")) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.cancel()
        await ends(session)

        await session.settle(CALL, "done", reason="it came")
        assert "it took effect; it came" in (await session.run("well?")).messages[-2].text


# ---------------------------------------------------------------------- a deferred call is made again


async def test_a_deferred_call_that_a_person_has_made_again_runs_once_more_and_waits_anew(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("order")) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.settle(CALL, "rerun", by="ann")
        await until(lambda: len(office.keys) == 2)
        await asyncio.wait_for(session.result("chat.1"), SOON)

        (asked,) = await session.pending()
        assert (asked.call_id, asked.kind, len(office.keys)) == (CALL, "deferred", 2)
        with pytest.raises(AlreadyAnswered, match="'rerun' by ann"):
            await runtime.resolve(office.keys[0], "the first order")
    async with place.runtime(Agent(ScriptedModel(["done"]), tools=office.agent().tools, name="office")) as runtime:
        session = await runtime.session("chat")
        await runtime.resolve(office.keys[1], "the second order")
        (call,) = (await ends(session)).tool_calls

        assert (call.outcome, call.attempts, call.repeated) == (Ok("the second order"), 2, 1)
        assert await no_waits(runtime)
        with pytest.raises(AlreadyAnswered):
            await runtime.resolve(office.keys[0], "the first order")


async def test_a_deferred_call_may_be_settled_again_after_it_was_made_again(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("order")) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.settle(CALL, "rerun")
        await until(lambda: len(office.keys) == 2)
        await asyncio.wait_for(session.result("chat.1"), SOON)
        await session.settle(CALL, "done", value=7)

        assert (await ends(session)).tool_calls[0].outcome == Ok(7)
        assert len(office.keys) == 2


async def test_a_key_is_taken_back_when_the_last_attempt_has_failed(place: Place) -> None:
    keys: list[str] = []

    @tool(deferred=True, retries=1)
    async def order(ctx: ToolContext[None]) -> None:
        keys.append(ctx.defer())
        raise Retry("busy", after=0)

    @tool(approval="ask")
    async def pay() -> None: ...

    model = ScriptedModel([[ToolCall("a", "order")], [ToolCall("b", "pay")], "done"])
    async with place.runtime(Agent(model, tools=[order, pay])) as runtime:
        session = await runtime.session("chat")
        assert (await session.run("go")).waiting

        assert len(keys) == 2
        assert keys[0] == keys[1]
        with pytest.raises(UnknownWait):
            await runtime.resolve(keys[0], "too late")
