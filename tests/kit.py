"""What tests of all packages share: a durable place, models, waiting for a condition, a crash in process.

agent = agent_calling("pay", {"cents": 500}, tools=[pay])     # one call, then "done"
async with place.runtime(agent) as runtime:                   # `place` is a fixture: in memory, and a file
    ...
    await until(lambda: paid)
    await crash(runtime)
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from perdure import Agent, ProcessHandle, Runtime, ToolCall, ToolContext, ToolResult
from perdure.engine.lease import Worker
from perdure.errors import ProviderError
from perdure.model.llm import Delta, ModelRequest
from perdure.model.session import SessionRow
from perdure.ports.store import Store
from perdure.providers.scripted import FunctionModel, as_response
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.stores.sqlite import SqliteStore

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


async def crash(runtime: Runtime) -> None:
    """End a Runtime as SIGKILL would, as far as one process can: nothing more is recorded, its lock is free."""
    await runtime._worker.abandon()
    runtime._live_server.abandon()
    if runtime._parts is not None:
        runtime._parts.relay.close()
    for tasks in (runtime._background, runtime._supervisor):
        await tasks.stop()
    runtime._pulse.stop()
    if runtime._mcp is not None:
        await runtime._mcp.close()  # the kernel closes the pipes of a process that dies
    await runtime._command_engine.close()  # its spawner ends with it; shims go on
    await runtime._close_code()
    runtime._parts = None
    await runtime.store.close()


async def crashed_in(runtime: Runtime, entered: asyncio.Event, said: str = "go") -> None:
    """Say something to the session "s", and end the Runtime as SIGKILL would once `entered` is set."""
    await runtime.__aenter__()
    await (await runtime.session("s")).send(said)
    await asyncio.wait_for(entered.wait(), SOON)
    await crash(runtime)


async def until(met: Callable[[], Any]) -> None:
    """Wait for a condition that has no event, by polling it. A condition may be async."""
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

    def check() -> None:
        if threads._count:
            hold(lambda: contexts)
            if contexts[0].cancelled:
                hold(lambda: threads._idle)
                return
        loop.call_soon(check)

    check()


async def noticed(runtime: Runtime) -> None:
    """Wait until a Runtime has seen what another one said to the turn it works on: it looks four times a second."""
    (task,) = runtime._turns.cache.tasks.values()
    await until(lambda: task.run is not None and task.run.journal.inputs)


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


def results(request: ModelRequest) -> list[ToolResult]:
    """All tool results that a model is shown."""
    return [result for message in request.messages for result in message.tool_results]


def agent_calling(tool: str, args: dict[str, Any] | None = None, answer: str = "done", **options: Any) -> Agent[str]:
    """An agent whose model makes one call in each turn, and answers when it has the result."""

    def model(request: ModelRequest) -> Any:
        return answer if request.messages[-1].role == "tool" else [ToolCall("c", tool, args or {})]

    return Agent(FunctionModel(model), **options)


async def until_waits_for(handle: ProcessHandle[Any], *names: str) -> None:
    """Wait until a process is on disk and waits for exactly these."""

    async def there() -> bool:
        return sorted(str(wait.name) for wait in (await handle.record()).record.waits) == sorted(names)

    await until(there)


def untyped(value: object) -> Any:
    """A value that type checkers do not look at, as in the code of users who have none."""
    return value


def print_line(text: object) -> None:
    """Print from a child process, in one write that its parent can rely on also if it is killed right after."""
    os.write(1, f"{text}\n".encode())


async def claimable(worker: Worker, store: Store) -> tuple[list[SessionRow], dict[str, str | None]]:
    """The open turns that a worker may claim, and the workers that it finds gone."""
    rows, gone = await store.open_sessions(), await worker.gone()
    return [row for row in rows if worker.may_claim(row.owner, gone)], gone
