"""What tests of durable functions share: a world outside that counts, and lives that end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure import Process, Runtime
from perdure.model.process import ProcessRow
from perdure.model.record import StepRecord
from perdure.processes.handle import ProcessHandle
from perdure.processes.run import load_steps
from perdure.testing import VirtualClock
from tests.kit import SOON, Place, crash, until


@pytest.fixture
def memory() -> Place:
    """For what no file could make different."""
    return Place("memory", Path())


class World:
    """What happens outside. Steps act on it, and wait at its gate while that is shut."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.begun: list[Any] = []
        self.open = asyncio.Event()
        self.open.set()

    @property
    def count(self) -> Counter[Any]:
        return Counter(self.done)

    async def act(self, what: Any = "act") -> Any:
        self.begun.append(what)
        await self.open.wait()
        self.done.append(what)
        return what

    def act_now(self, what: Any = "act") -> Any:
        self.begun.append(what)
        self.done.append(what)
        return what

    async def has_begun(self, what: Any) -> None:
        await until(lambda: what in self.begun)


@asynccontextmanager
async def living(place: Place, *functions: Process[..., Any], **options: Any) -> AsyncGenerator[Runtime]:
    async with place.runtime(processes=functions, **options) as runtime:
        yield runtime


@asynccontextmanager
async def dying(place: Place, *functions: Process[..., Any], **options: Any) -> AsyncGenerator[Runtime]:
    """A Runtime that ends as SIGKILL would end it, as far as one process can."""
    runtime = place.runtime(processes=functions, **options)
    await runtime.__aenter__()
    try:
        yield runtime
    finally:
        await crash(runtime)


async def parked(handle: ProcessHandle[Any]) -> ProcessRow:
    """Wait until it is on disk, and in nobody's memory."""

    async def is_parked() -> bool:
        return (await handle.record()).status == "waiting"

    await until(is_parked)
    return await handle.record()


async def stuck(handle: ProcessHandle[Any]) -> str:
    async def is_stuck() -> bool:
        return (await handle.record()).stuck is not None

    await until(is_stuck)
    return str((await handle.record()).stuck)


async def journal_of(runtime: Runtime, handle: ProcessHandle[Any]) -> list[StepRecord]:
    row = await handle.record()
    return (await load_steps(runtime.store, row.pid, row.id))[0]


async def result(handle: ProcessHandle[Any]) -> Any:
    return await handle.result(SOON)


async def pass_time(clock: VirtualClock, seconds: float) -> None:
    """Let virtual time pass once somebody sleeps."""
    await asyncio.wait_for(clock.wait_sleeping(), SOON)
    clock.advance(seconds)
