"""Processes for the tests of the command line."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from perdure import Process, ProcessContext, Runtime, call, process
from perdure.processes.run import load_steps
from perdure.stores.sqlite import SqliteStore
from tests.kit import crash, until


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


async def charge() -> int:
    """Take long enough to be interrupted."""
    await asyncio.Event().wait()
    return 0


@process
async def charging(ctx: ProcessContext[object]) -> int:
    """Asks a person what became of its step."""
    return await ctx.step(call(charge), recovery="ask")


ALL: list[Process[..., Any]] = [doubled, approved, napping, broken, charging]


def prepare(store: Path, work: Callable[[Runtime], Awaitable[None]]) -> None:
    """Bring a store into some state with these processes, and leave it."""

    async def main() -> None:
        async with Runtime(store, processes=ALL) as runtime:
            await work(runtime)

    asyncio.run(main())


def interrupt(store: Path, what: Process[..., Any], process_id: str) -> None:
    """Kill a worker in the first step of a process, and have the next one look at what was left."""

    async def main() -> None:
        runtime = await Runtime(store, processes=ALL).__aenter__()
        handle = await runtime.start(what, id=process_id)

        async def has_begun() -> bool:
            row = await handle.record()
            return bool((await load_steps(runtime.store, row.pid, row.id))[0])

        await until(has_begun)
        await crash(runtime)
        async with Runtime(store, processes=ALL) as runtime:
            await parked(runtime, process_id)

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
