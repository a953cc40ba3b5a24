"""A worker that is stopped, and relieved meanwhile: it acts no more, and takes that for nothing but what it is."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from perdure import Agent, ToolCall, ToolContext, tool
from perdure.engine.journal import TurnJournal, load
from perdure.engine.lease import LeaseTerms
from perdure.graph.commit import End
from perdure.model.codec import encode
from perdure.model.llm import Usage
from perdure.model.message import Message
from perdure.model.outcome import BudgetSpent
from perdure.model.record import Replied, Said, Started
from perdure.model.write import Accept, Append, Claim, SessionRef, TurnScope, Write
from perdure.runtime import Runtime
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import ScriptedModel, VirtualClock
from tests.kit import SOON, TellingModel, until

R = TypeVar("R")

TERMS = LeaseTerms(term=30_000, renewal=10_000)  # in real time it never speaks again


class StoppedStore(MemoryStore):
    """Once, when a start is on disk, the process stands still: `meanwhile` is what others do then."""

    def __init__(self, rows: MemoryRows, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__(rows)
        self._meanwhile = meanwhile
        self.stopped = False

    async def write(self, write: Write[R]) -> R:
        receipt = await super().write(write)
        if isinstance(write, Append) and not self.stopped and await self._begins_call(write):
            self.stopped = True
            await self._meanwhile()
        return receipt

    async def _begins_call(self, write: Append) -> bool:
        records = [record for _, record in await load(self, write.scope.sid, write.scope.turn, write.scope.turn)]
        return isinstance(records[-1], Started) or (isinstance(records[-1], Replied) and bool(records[-1].started))


async def stop_after_the_start(relieved: bool, **options: Any) -> list[int]:
    """The attempts of a call whose worker stood still for more than its term, just before the call's body."""
    clock, rows, ran = VirtualClock(), MemoryRows(), list[int]()
    other = MemoryStore(rows)

    async def meanwhile() -> None:
        clock.advance(30_001)
        row = await other.session("chat")
        assert row is not None
        if relieved:
            claimed = await other.write(Claim(SessionRef("chat"), "somebody else", row.generation, clock.now()))
            assert claimed.won

    @tool(**options)
    async def pay(ctx: ToolContext[None]) -> str:
        ran.append(ctx.attempt)
        return "paid"

    store = StoppedStore(rows, meanwhile)
    agent = Agent(ScriptedModel([[ToolCall("a", "pay")], "done"]), tools=[pay])
    async with Runtime(store, agents=[agent], clock=clock, lease=TERMS, recover=False) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        assert await runtime.wait_idle(timeout=SOON)
        if not relieved:
            await asyncio.wait_for(receipt.result(), SOON)
        else:
            row = await other.session("chat")
            assert row is not None
            assert (row.owner, row.head) == ("somebody else", 0)
    assert store.stopped
    return ran


STARTS = pytest.mark.parametrize(
    "options",
    [{}, {"deferred": True}, {"background": True}],
    ids=["started with its reply", "with a start of its own", "in the background"],
)


@STARTS
async def test_a_relieved_owner_runs_no_body(options: dict[str, Any]) -> None:
    assert await stop_after_the_start(True, **options) == []


@STARTS
async def test_an_owner_whom_nobody_relieved_makes_sure_and_runs_it(options: dict[str, Any]) -> None:
    assert await stop_after_the_start(False, **options) == [1]


class SlowStore(MemoryStore):
    """Once, when a worker is about to read the records of its turn, the process stands still."""

    def __init__(self, rows: MemoryRows, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__(rows)
        self._meanwhile = meanwhile
        self.stopped = False

    async def nodes(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        row = await self.session_by_sid(sid)
        if row is not None and row.owner is not None and not self.stopped:
            self.stopped = True
            await self._meanwhile()
        return await super().nodes(sid, first, last)


async def end_by_another(store: MemoryStore) -> None:
    """Another worker claims the turn and ends it."""
    row = await store.session("chat")
    assert row is not None
    claimed = await store.write(Claim(SessionRef("chat"), "somebody else", row.generation, 1))
    assert claimed.won
    assert claimed.row is not None
    scope = TurnScope("chat", row.sid, 1, "somebody else", claimed.row.generation)
    await TurnJournal(store, scope, 1, VirtualClock()).commit(0, End(BudgetSpent("steps", 1), Usage()))


async def test_a_turn_that_another_worker_has_ended_while_it_was_loaded_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = MemoryRows()
    other = MemoryStore(rows)
    await other.write(Accept("chat", "agent", encode(Said(Message("user", "go"))), "op", 1))
    store = SlowStore(rows, functools.partial(end_by_another, other))
    agent = Agent(ScriptedModel([]), name="agent")
    async with Runtime(store, agents=[agent], clock=VirtualClock(), lease=TERMS) as runtime, asyncio.timeout(SOON):
        await until(lambda: store.stopped and "chat" not in runtime._turns.cache.tasks)
        result = await (await runtime.session("chat")).result("chat.1")

    assert result.outcome == BudgetSpent("steps", 1), "as the other worker has ended it"
    assert "InternalError" not in caplog.text
    assert "chat.1 was relieved" in caplog.text


async def test_a_host_of_a_relieved_worker_hears_how_the_other_one_has_ended_its_turn() -> None:
    """Its own run of the turn still waits for its model, and may do so for long."""
    rows, model = MemoryRows(), TellingModel()
    agent = Agent(model, name="agent")
    async with (
        Runtime(MemoryStore(rows), agents=[agent], clock=VirtualClock(), lease=TERMS, grace=0) as runtime,
        asyncio.timeout(SOON),
    ):
        waiting = asyncio.create_task((await runtime.session("chat")).run("go"))
        await model.next()
        await end_by_another(MemoryStore(rows))
        result = await waiting

    assert result.outcome == BudgetSpent("steps", 1)
