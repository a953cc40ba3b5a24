"""A process that becomes ours while the Runtime is being left."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from perdure import Runtime
from perdure.model.write import Claim, Write
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing.clock import VirtualClock
from tests.kit import SOON, until
from tests.processes_tools.talk import Talk, agent_of, call, row_of, said
from tests.processes_tools.test_attempts import FIRST, flaky

R = TypeVar("R")


class SlowToTell(MemoryStore):
    """Says that a process was taken when it is told to."""

    def __init__(self, rows: MemoryRows) -> None:
        super().__init__(rows)
        self.taken, self.tell = asyncio.Event(), asyncio.Event()

    async def write(self, write: Write[R]) -> R:
        receipt = await super().write(write)
        if isinstance(write, Claim):
            self.taken.set()
            await self.tell.wait()
        return receipt


async def test_what_was_taken_between_two_attempts_is_put_back_and_not_given_up() -> None:
    look, attempts = flaky(1, retries=1)
    rows, clock = MemoryRows(), VirtualClock()
    store, agent = SlowToTell(rows), agent_of(Talk([call("look")]), look)
    runtime = Runtime(store, agents=[agent], grace=0, clock=clock)

    async def host() -> None:
        async with runtime:
            await said(runtime)
            await until(lambda: waits(runtime))
            clock.advance(60)
            await store.taken.wait()

    leaving = asyncio.create_task(host())
    await until(lambda: runtime._work.mode.leaving if store.taken.is_set() else False)
    store.tell.set()
    await asyncio.wait_for(leaving, SOON)
    async with Runtime(MemoryStore(rows), agents=[agent], clock=clock) as after:
        assert await after.handle(FIRST).result(SOON) == "found"

    assert attempts == [1, 2]


async def waits(runtime: Runtime) -> bool:
    return (await row_of(runtime, FIRST)).status == "waiting"
