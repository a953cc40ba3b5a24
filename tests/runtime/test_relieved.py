"""A worker that is stopped between the record of a call's start and the call: whoever was relieved acts no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from mainstay import Agent, ToolCall, ToolContext, tool
from mainstay.engine.journal import load
from mainstay.engine.lease import LeaseTerms
from mainstay.model.record import Replied, Started
from mainstay.model.write import Append, Claim, Write
from mainstay.runtime import Runtime
from mainstay.stores.memory import MemoryRows, MemoryStore
from mainstay.testing import ScriptedModel, VirtualClock
from tests.sessions.places import SOON

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
            claimed = await other.write(Claim("chat", "somebody else", row.generation, clock.now()))
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
