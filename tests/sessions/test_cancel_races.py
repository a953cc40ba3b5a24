"""A cancel request that another process writes in the last moment: just before the commit, just before the parking."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pytest

from perdure import Agent, ToolCall, tool
from perdure.model.session import CancelRequest
from perdure.model.tool import Cancelled
from perdure.model.write import Append, Cancel, Commit, SessionRef, Write
from perdure.runtime import Runtime
from perdure.stores.memory import MemoryStore
from perdure.testing import ScriptedModel
from tests.kit import SOON

R = TypeVar("R")


class RacedStore(MemoryStore):
    """Somebody else's cancel request lands before the first commit, or the first parking, which is on its way."""

    def __init__(self, before: str) -> None:
        super().__init__()
        self._before = before
        self.raced = False

    async def write(self, write: Write[R]) -> R:
        parks = isinstance(write, Append) and bool(write.park)
        if not self.raced and (isinstance(write, Commit) if self._before == "commit" else parks):
            self.raced = True
            receipt = await super().write(Cancel(SessionRef("chat"), CancelRequest("ann", "enough"), 1))
            assert receipt.status == "requested"
        return await super().write(write)


@tool(approval="ask")
async def book() -> str:
    return "booked"


@pytest.mark.parametrize(
    ("before", "answers"),
    [("commit", ["done"]), ("parking", [[ToolCall("a", "book")]])],
    ids=["before the commit", "before it parks"],
)
async def test_a_request_that_is_on_disk_first_wins(before: str, answers: list[Any]) -> None:
    store, model = RacedStore(before), ScriptedModel(answers)
    async with Runtime(store, agents=[Agent(model, tools=[book])]) as runtime:
        session = await runtime.session("chat")
        result = await asyncio.wait_for(session.run("go"), SOON)

        assert store.raced
        assert result.outcome == Cancelled("ann", "enough")
        assert len(model.requests) == 1
        assert await session.pending() == []
    row = await store.session("chat")
    assert row is not None
    assert (row.state, row.head, row.turn, row.cancel) == ("idle", 1, None, None)
