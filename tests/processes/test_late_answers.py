"""Signals that are read while the answer to a write of the process is still on its way."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from perdure import ProcessContext, Runtime, process
from perdure.model.write import Advance, Write
from perdure.stores.memory import MemoryRows, MemoryStore
from tests.kit import SOON, until

R = TypeVar("R")


class SlowToTell(MemoryStore):
    """Says that the first checkpoint was written when it is told to, and shows events when it may (`show`).

    `shown` is the newest event that was read.
    """

    def __init__(self) -> None:
        super().__init__(MemoryRows())
        self.shown = 0
        self.written, self.tell, self.show = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.show.set()

    async def write(self, write: Write[R]) -> R:
        receipt = await super().write(write)
        if isinstance(write, Advance) and write.drop is not None:
            self.written.set()
            await self.tell.wait()
        return receipt

    async def events(self, *args: Any, **kwargs: Any) -> Any:
        found = await super().events(*args, **kwargs)
        self.shown = max([self.shown, *(sequence for _, sequence, _ in found)])
        await self.show.wait()
        return found


@process
async def collecting(ctx: ProcessContext[None]) -> list[int]:
    heard: list[int] = ctx.state or []
    while (amount := await ctx.wait_signal("add", int)) != 0:
        heard.append(amount)
        await ctx.checkpoint(heard)
    return heard


@process
async def restarting(ctx: ProcessContext[None]) -> list[int]:
    """Keeps the first amount, begins again with it, and collects the others."""
    if ctx.state is None:
        await ctx.checkpoint([await ctx.wait_signal("add", int)], restart=True)
    heard: list[int] = ctx.state
    while (amount := await ctx.wait_signal("add", int)) != 0:
        heard.append(amount)
    return heard


async def test_a_signal_that_was_read_before_the_answer_to_an_earlier_write_is_heard_once() -> None:
    store = SlowToTell()
    async with Runtime(store, processes=[collecting]) as runtime:
        handle = await runtime.start(collecting, id="c")
        await handle.signal("add", 1)
        await store.written.wait()
        for amount in (2, 3):
            await handle.signal("add", amount)
        newest = (await handle.record()).record.sequence
        await until(lambda: store.shown == newest)
        store.tell.set()
        await handle.signal("add", 0)

        assert await handle.result(SOON) == [1, 2, 3]


async def test_a_signal_that_is_being_read_while_the_function_begins_again_is_heard_once() -> None:
    store = SlowToTell()
    async with Runtime(store, processes=[restarting]) as runtime:
        handle = await runtime.start(restarting, id="c")
        await handle.signal("add", 1)
        await store.written.wait()
        store.show.clear()
        await handle.signal("add", 2)
        newest = (await handle.record()).record.sequence
        await until(lambda: store.shown == newest)
        store.tell.set()
        for _ in range(20):  # until the function has begun again, and waits for its turn to read
            await asyncio.sleep(0)
        store.show.set()
        await handle.signal("add", 0)

        assert await handle.result(SOON) == [1, 2]
