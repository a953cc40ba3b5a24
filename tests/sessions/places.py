"""Where sessions live in these tests, and a model that answers when it is told to."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mainstay import Agent, Runtime, ToolContext
from mainstay.errors import ProviderError
from mainstay.model.llm import Delta, ModelRequest
from mainstay.ports.store import Store
from mainstay.providers.scripted import as_response
from mainstay.stores.memory import MemoryRows, MemoryStore
from mainstay.stores.sqlite import SqliteStore

SOON = 60
"""Seconds within which everything here happens, however busy the machine; a test that needs them all is broken."""


class Place:
    """One durable place: rows in memory or a file. Every Runtime opens it anew, as another process would."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.path = kind, folder / "agent.db"
        self._rows = MemoryRows()

    def store(self) -> Store:
        return MemoryStore(self._rows) if self.kind == "memory" else SqliteStore(self.path)

    def runtime(self, *agents: Agent[Any], **options: Any) -> Runtime:
        return Runtime(self.store(), agents=agents, **options)


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Place:
    """A real file, for what only a file can show."""
    return Place("sqlite", tmp_path)


async def crash(runtime: Runtime) -> None:
    """End a Runtime as SIGKILL would, as far as one process can: nothing more is recorded, its lock is free."""
    runtime._worker.abandon()
    for tasks in (runtime._background, runtime._supervisor):
        await tasks.stop()
    runtime._pulse.stop()
    runtime._parts = None
    await runtime.store.close()


async def until(met: Callable[[], Any]) -> None:
    """Wait for something that tells nobody, in small steps."""
    async with asyncio.timeout(SOON):
        while True:
            found = met()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.001)


def wait_for_thread(runtime: Runtime, contexts: Sequence[ToolContext[Any]]) -> None:
    """Hold the event loop up for the only thread of a tool: until it has begun, and until it has ended once it is
    cancelled. It has milliseconds to say how it ended, and a busy machine may not run it for longer than that.

    The tool adds its context to `contexts` when it begins.
    """
    loop, threads = asyncio.get_running_loop(), runtime._dispatcher.threads

    def hold(met: Callable[[], Any]) -> None:
        end = time.monotonic() + SOON
        while not met() and time.monotonic() < end:
            time.sleep(0.001)

    def look() -> None:
        if threads._count:
            hold(lambda: contexts)
            if contexts[0].cancelled:
                hold(lambda: threads._idle)
                return
        loop.call_soon(look)

    look()


async def noticed(runtime: Runtime) -> None:
    """Wait until a Runtime has seen what another one said to the turn it works on: it looks four times a second."""
    (resident,) = runtime._turns.cache.all()
    await until(lambda: resident.run is not None and resident.run.journal.mail)


class TellingModel:
    """A model that shows each request and then waits for its answer."""

    name = "telling"

    def __init__(self) -> None:
        self.asked: asyncio.Queue[ModelRequest] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        self.asked.put_nowait(request)
        answer = await self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        response = as_response(answer)
        if response.text:
            yield response.text
        yield response

    async def next(self) -> ModelRequest:
        """The next request, once the model is asked."""
        return await asyncio.wait_for(self.asked.get(), SOON)

    def say(self, *answers: Any) -> None:
        for answer in answers:
            self._answers.put_nowait(answer)


def overloaded(after: float | None = None) -> ProviderError:
    return ProviderError("overloaded", retryable=True, after=after, code="overloaded")


def texts(messages: Any) -> list[str]:
    return [m.text for m in messages]
