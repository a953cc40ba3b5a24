"""What is asked of others, and what they answer, may be large: it lies beside the store while the turn needs it."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pytest

from perdure import Agent, Runtime, Session, ToolCall, ToolContext, TurnResult, tool
from perdure.engine.journal import SPILL_BYTES
from perdure.errors import AlreadyAnswered, BlobMissing
from perdure.model.outcome import PendingCall, Waiting
from perdure.model.tool import Denied, Ok, OutputBudget
from perdure.model.write import Append, Resolve, Write
from perdure.ports.store import Store
from perdure.testing import ScriptedModel, VirtualClock
from perdure.testing.crash.injection import FaultInjector, InstrumentedStore
from tests.kit import SOON, Place, until

CALL = "chat.1.1.0"
LARGE = "x" * 300_000

R = TypeVar("R")


class Office:
    """`given` is what its tools were called with, `keys` what they handed out."""

    def __init__(self) -> None:
        self.keys, self.given = list[str](), list[str]()

    def agent(self, name: str, **args: Any) -> Agent[str]:
        return self._agent(ScriptedModel([[ToolCall("a", name, args)], "done"]))

    def again(self) -> Agent[str]:
        """The agent of a Runtime that finds the call asked for."""
        return self._agent(ScriptedModel(["done"]))

    def _agent(self, model: ScriptedModel) -> Agent[str]:
        @tool(approval="ask")
        async def write(text: str) -> str:
            self.given.append(text)
            return "written"

        @tool(deferred=True)
        async def order(ctx: ToolContext[None], text: str = "", seconds: float | None = None) -> None:
            self.keys.append(ctx.defer(seconds))

        wide = OutputBudget(bytes=None, lines=None)
        return Agent(model, tools=[write, order], name="office", output_budget=wide)


def waiting(result: TurnResult[Any]) -> tuple[PendingCall, ...]:
    assert isinstance(result.outcome, Waiting)
    return result.outcome.calls


async def ends(session: Session) -> Any:
    async def over() -> bool:
        return not (await session.result("chat.1")).waiting

    await asyncio.wait_for(until(over), SOON)
    return await session.result("chat.1")


async def largest(store: Store) -> int:
    """The largest row of a wait."""
    rows = [w for s in await store.open_sessions() for w in await store.waits(s.sid)]
    return max(len(w.body) + len(w.answer or b"") for w in rows)


async def blobs(runtime: Runtime) -> int:
    """How many there are once all that nothing refers to is swept."""
    await runtime.store.sweep(grace=0)
    return (await runtime.store.facts()).blobs


async def test_large_arguments_that_wait_for_approval_lie_beside_the_store(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("write", text=LARGE)) as runtime:
        parked = await (await runtime.session("chat")).run("go")
        assert waiting(parked)[0].args == {"text": LARGE}
        assert await largest(runtime.store) < SPILL_BYTES
        await runtime.store.sweep(grace=0)
    async with place.runtime(office.agent("write", text=LARGE)) as runtime:
        session = await runtime.session("chat")
        assert (await session.pending())[0].args == {"text": LARGE}
        assert (await session.result("chat.1")).outcome == parked.outcome
    async with place.runtime(office.again()) as runtime:
        session = await runtime.session("chat")
        await session.approve(CALL)
        assert (await ends(session)).tool_calls[0].outcome == Ok("written")

    assert office.given == [LARGE]


@pytest.mark.parametrize("error", [None, LARGE])
async def test_a_large_completion_lies_beside_the_store_until_it_is_taken(place: Place, error: str | None) -> None:
    office = Office()
    async with place.runtime(office.agent("order")) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime() as runtime:  # works on nothing: the answer waits for a worker
        await runtime.resolve(office.keys[0], [LARGE], error=error)
        assert await largest(runtime.store) < SPILL_BYTES
        with pytest.raises(AlreadyAnswered) as raised:
            await runtime.resolve(office.keys[0], 1)
        given = {"verdict": "value"} if error is None else {"verdict": "error", "reason": LARGE}
        assert raised.value.answer == {**given, "value": [LARGE]}
        await runtime.store.sweep(grace=0)
    async with place.runtime(office.again()) as runtime:
        outcome = (await ends(await runtime.session("chat"))).tool_calls[0].outcome

        assert (outcome.value if error is None else outcome.data) == [LARGE]
        with pytest.raises(AlreadyAnswered) as raised:
            await runtime.resolve(office.keys[0], 1)
        assert raised.value.answer == {**given, "value": [LARGE]}


async def test_a_large_reason_lies_beside_the_store(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("write", text="x")) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime() as runtime:
        await (await runtime.session("chat")).reject(CALL, LARGE, by="ann")
        assert await largest(runtime.store) < SPILL_BYTES
    async with place.runtime(office.again()) as runtime:
        assert (await ends(await runtime.session("chat"))).tool_calls[0].outcome == Denied(LARGE, "ann")


async def test_a_large_wait_that_nobody_answers_expires(place: Place) -> None:
    office, clock = Office(), VirtualClock()
    async with place.runtime(office.agent("order", text=LARGE, seconds=60), clock=clock) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        assert await largest(runtime.store) < SPILL_BYTES
        clock.advance(60)
        assert (await ends(session)).tool_calls[0].outcome.reason == "nobody answered in time"


async def test_what_a_wait_kept_is_swept_after_its_turn_and_not_before(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("order", text=LARGE)) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        records = 2  # the reply and the start, both with the arguments
        assert await blobs(runtime) == records + 2  # reserved, then handed over
    async with place.runtime() as runtime:
        await runtime.resolve(office.keys[0], {"n": LARGE})
        with pytest.raises(AlreadyAnswered):
            await runtime.resolve(office.keys[0], {"m": LARGE})
        assert await blobs(runtime) == records + 3  # the answer, and not the second
    async with place.runtime(office.again()) as runtime:
        session = await runtime.session("chat")
        await ends(session)
        kept = await blobs(runtime)
        assert [len(m.text) for m in await session.history()]
        assert (await session.result("chat.1")).tool_calls[0].outcome == Ok({"n": LARGE})
        assert kept == records + 1  # the end of the call


async def test_small_ones_stay_in_their_row(place: Place) -> None:
    office = Office()
    async with place.runtime(office.agent("order", text="x" * 60_000)) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        assert await largest(runtime.store) > 60_000
        await runtime.resolve(office.keys[0], "y" * 60_000)
        await ends(session)
        assert await blobs(runtime) == 0


class SweptFirst(InstrumentedStore):
    """Somebody sweeps just before each write about a wait, once."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, FaultInjector())
        self.refused = 0
        self._last: object = None

    async def write(self, write: Write[R]) -> R:
        again, self._last = write is self._last, write
        if not again and (isinstance(write, Resolve) or (isinstance(write, Append) and write.waits)):
            await self.sweep(grace=0)
        try:
            return await super().write(write)
        except BlobMissing:
            self.refused += 1
            raise


async def test_what_a_sweep_took_before_the_wait_was_written_is_put_again(place: Place) -> None:
    office, store = Office(), SweptFirst(place.store())
    async with Runtime(store, agents=[office.agent("order", text=LARGE)]) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        assert waiting(parked)[0].args == {"text": LARGE}
        assert (await session.pending())[0].args == {"text": LARGE}
        await runtime.resolve(office.keys[0], [LARGE])
        assert (await ends(session)).tool_calls[0].outcome == Ok([LARGE])

    assert store.refused == 3  # reserved, handed over, answered
