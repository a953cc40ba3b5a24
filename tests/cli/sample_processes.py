"""Processes for the tests of the command line."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from perdure import Process, ProcessContext, Runtime, process
from perdure.stores.sqlite import SqliteStore


def double(n: int) -> int:
    return 2 * n


@process
async def doubled(ctx: ProcessContext[object], n: int) -> int:
    """Ends at once."""
    return await ctx.step(double, n)


@process(version="2", signals={"approve": dict[str, str], "go": None})
async def approved(ctx: ProcessContext[object], what: str) -> str:
    """Waits for a person."""
    ctx.progress(f"{what} is ready")
    answer = await ctx.wait_signal("approve", timeout=3600)
    return f"{what} approved by {answer['by']}"


@process
async def napping(ctx: ProcessContext[object], seconds: float) -> str:
    await ctx.sleep(seconds)
    return "rested"


@process
async def broken(ctx: ProcessContext[object]) -> None:
    raise ValueError("no such order")


ALL: list[Process[..., Any]] = [doubled, approved, napping, broken]


def prepare(store: Path, work: Callable[[Runtime], Awaitable[None]]) -> None:
    """Bring a store into some state with these processes, and leave it."""

    async def main() -> None:
        async with Runtime(store, processes=ALL) as runtime:
            await work(runtime)

    asyncio.run(main())


def write(store: Path, work: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Write to a store as a runtime would."""

    async def main() -> None:
        opened = SqliteStore(store)
        await opened.open()
        try:
            await work(opened)
        finally:
            await opened.close()

    asyncio.run(main())


async def parked(runtime: Runtime, process_id: str) -> None:
    """Wait until a process of this Runtime is on disk and nowhere else."""
    async for _ in runtime.processes.events(process_id, follow=True):
        if await runtime.handle(process_id).status() == "waiting":
            return
