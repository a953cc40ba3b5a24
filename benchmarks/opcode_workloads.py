"""What `opcodes.py` counts: turns, and a process. Run by `opcode_child.py`, with this package or an older one.

Only names that both have may be used here, and nothing may wait for a timer.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from perdure import (
    Agent,
    Limit,
    ModelRequest,
    ModelResponse,
    ProcessContext,
    Runtime,
    ToolCall,
    Usage,
    process,
    tool,
)
from perdure.plugins.hooks import Plugin, ToolCallContext
from perdure.testing import FunctionModel

SYSTEM = "You are a helpful assistant."
QUESTION = "What is the weather in Paris?"
ANSWER = "It is 21 C and clear."
CELL = "```python\nx = await get_weather('Paris')\n```"

Turn: TypeAlias = Callable[[], Awaitable[None]]


@tool
async def get_weather(city: str) -> dict[str, object]:
    """Weather in a city."""
    return {"city": city, "temp_c": 21, "sky": "clear"}


def model(rounds: int, calls: int) -> FunctionModel:
    """Return a model that asks for so many calls in each of so many rounds, then answers."""
    made = 0

    async def respond(request: ModelRequest) -> ModelResponse:
        nonlocal made
        done = 0
        for message in reversed(request.messages):
            if message.role == "user":
                break
            done += message.role == "tool"
        if done >= rounds * calls:
            return ModelResponse(ANSWER, usage=Usage(input=50, output=10))
        asked = []
        for _ in range(calls):
            made += 1
            asked.append(ToolCall(f"call_{made}", "get_weather", {"city": "Paris"}))
        return ModelResponse(tool_calls=tuple(asked), usage=Usage(input=50, output=10), stop="tool_calls")

    return FunctionModel(respond)


def coder() -> FunctionModel:
    """Return a model that writes one cell with one call, then answers."""

    def respond(request: ModelRequest) -> str:
        return ANSWER if any(message.role == "assistant" for message in request.messages) else CELL

    return FunctionModel(respond)


class Vetting(Plugin):
    """A plugin that looks at every call and lets it pass."""

    id = "vetting"

    async def before_tool_call(self, ctx: ToolCallContext) -> None:
        return None


async def note(n: int) -> int:
    return n


@process
async def unit(ctx: ProcessContext[Any], n: int) -> int:
    """One step."""
    return await ctx.step(note, n)


def agent(rounds: int = 1, calls: int = 1, **more: Any) -> Agent[str]:
    return Agent(model(rounds, calls), instructions=SYSTEM, tools=[get_weather], **more)


@asynccontextmanager
async def turns(agent: Agent[str], store: Path | str = "memory", **options: Any) -> AsyncIterator[Turn]:
    """Open a Runtime, and yield a function that runs a turn in a new session."""
    async with Runtime(store, agents=[agent], **options) as runtime:

        async def turn() -> None:
            session = await runtime.session()
            assert (await session.run(QUESTION)).text == ANSWER

        yield turn


@asynccontextmanager
async def processes(store: Path) -> AsyncIterator[Turn]:
    async with Runtime(store, processes=[unit]) as runtime:

        async def run() -> None:
            assert await (await runtime.start(unit, {"n": 1})).result() == 1

        yield run


def cells() -> AbstractAsyncContextManager[Turn]:
    return turns(Agent(coder(), instructions=SYSTEM, tools=[get_weather], mode="code"))


ENTRIES: dict[str, tuple[Callable[[Path], AbstractAsyncContextManager[Turn]], int]] = {
    "one": (lambda file: turns(agent()), 20),
    "ten": (lambda file: turns(agent(rounds=10)), 10),
    "four": (lambda file: turns(agent(calls=4)), 20),
    "sqlite": (lambda file: turns(agent(), file), 20),
    "hook": (lambda file: turns(agent(plugins=[Vetting()])), 20),
    "limit": (lambda file: turns(agent(), limits=[Limit(tokens=10**12)]), 20),
    "cell": (lambda file: cells(), 20),
    "process": (processes, 20),
}
"""Each with the number of turns that are counted."""


@asynccontextmanager
async def opened(entry: str) -> AsyncIterator[tuple[Turn, int]]:
    open_, count = ENTRIES[entry]
    with tempfile.TemporaryDirectory() as folder:
        async with open_(Path(folder) / "agent.db") as turn:
            yield turn, count
