"""Workloads over HTTP: what a provider costs between the socket and the feed. The server is another process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

from wire_server import APART
from workload import ANSWER, ARGS, DELTA, DELTAS, QUESTION, SYSTEM, TOOL, Sample, Span, Yard, median, weather

from perdure import Agent, Message, ModelRequest, ModelResponse, Runtime, ToolCall, Usage, tool
from perdure.model.event import TextDelta
from perdure.testing import FunctionModel


@tool
async def get_weather(city: str) -> dict[str, object]:
    """Weather in a city."""
    return weather(city)


async def wh(params: Sample) -> Sample:
    what: dict[str, Callable[[Sample], Awaitable[Sample]]] = {
        "streams": _streams,
        "turns": _turns,
        "building": _building,
        "importing": _importing,
    }
    return await what[params["what"]](params)


@contextlib.contextmanager
def served() -> Generator[int, None, None]:
    """The port of a server in a process of its own."""
    command = [sys.executable, str(Path(__file__).parent / "wire_server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.kill()


def model_at(port: int, what: str) -> Any:
    from perdure.providers.registry import provider  # not before it is measured

    return provider("anthropic:m", base_url=f"http://127.0.0.1:{port}/{what}", key="k")


# ---------------------------------------------------------------------- streams


async def _streams(params: Sample) -> Sample:
    """CPU for a delta: many in one read, and one in each; beside what bare readers need for the same bytes."""
    sample: Sample = {}
    with served() as port:
        async with contextlib.AsyncExitStack() as stack:
            lanes: dict[str, tuple[Callable[[], Awaitable[int]], int]] = {}
            for what, count in (("together", DELTAS), ("apart", APART)):
                runtime = await stack.enter_async_context(
                    Runtime("memory", agents=[Agent(model_at(port, what), instructions=SYSTEM)])
                )
                lanes[f"{what}.feed"] = _to_the_feed(runtime), count
                model = model_at(port, what)
                await stack.enter_async_context(model.connected())
                lanes[f"{what}.provider"] = _to_the_engine(model), count
                lanes[f"{what}.httpx2"] = await _by_httpx2(stack, f"http://127.0.0.1:{port}/{what}"), count
                lanes[f"{what}.asyncio"] = _by_asyncio(port, what), count
            for lane, _ in lanes.values():
                await lane()
            spent: dict[str, list[float]] = {name: [] for name in lanes}
            for _ in range(params["repeats"]):
                for name, (lane, count) in lanes.items():
                    gc.collect()
                    Yard.take()
                    with Span() as span:
                        assert await lane() > 0.95 * count, name  # bare readers miss what is split between two reads
                    spent[name].append(1e6 * span.cpu / count)
    for name, found in spent.items():
        what, _, who = name.partition(".")
        sample.setdefault(what, {})[f"{who}_us"] = median(found)
    return sample


def _to_the_feed(runtime: Runtime) -> Callable[[], Awaitable[int]]:
    async def consume() -> int:
        session, characters = await runtime.session(), 0
        async with session.stream(QUESTION) as turn:
            async for event in turn:
                if isinstance(event, TextDelta):
                    characters += len(event.text)
        return characters // len(DELTA)

    return consume


def _to_the_engine(model: Any) -> Callable[[], Awaitable[int]]:
    async def consume() -> int:
        return sum([type(delta) is str async for delta in model.stream(ModelRequest([Message("user", QUESTION)]))])

    return consume


async def _by_httpx2(stack: contextlib.AsyncExitStack, url: str) -> Callable[[], Awaitable[int]]:
    import httpx2  # only these workloads have it

    client = await stack.enter_async_context(httpx2.AsyncClient())

    async def consume() -> int:
        events = 0
        async with client.stream("POST", url, content=b"{}") as response:
            async for data in response.aiter_raw():
                events += data.count(b"text_delta")
        return events

    return consume


def _by_asyncio(port: int, what: str) -> Callable[[], Awaitable[int]]:
    async def consume() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST /{what} HTTP/1.1\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        events, end = 0, b""
        while end != b"0\r\n\r\n":
            data = await reader.read(65536)
            events += data.count(b"text_delta")
            end = data[-5:]
        writer.close()
        return events

    return consume


# ---------------------------------------------------------------------- turns


async def _turns(params: Sample) -> Sample:
    """A turn with one tool call, two requests: over HTTP and with a model in this process, slice by slice."""

    async def respond(request: ModelRequest) -> ModelResponse:
        if request.messages[-1].role == "tool":
            return ModelResponse(ANSWER, usage=Usage(50, 10))
        return ModelResponse(tool_calls=(ToolCall("c", TOOL, ARGS),), stop="tool_calls", usage=Usage(50, 10))

    spent: dict[str, list[float]] = {"http": [], "scripted": []}
    with served() as port:
        models = {"http": model_at(port, "turn"), "scripted": FunctionModel(respond)}
        async with contextlib.AsyncExitStack() as stack:
            runtimes = {}
            for name, model in models.items():
                agent = Agent(model, instructions=SYSTEM, tools=[get_weather])
                runtimes[name] = await stack.enter_async_context(Runtime("memory", agents=[agent]))
            for round_ in range(params["rounds"] + 1):
                for name, runtime in runtimes.items():
                    Yard.take()
                    with Span() as span:
                        for _ in range(params["turns"]):
                            assert (await (await runtime.session()).run(QUESTION)).text == ANSWER
                    if round_:
                        spent[name].append(1e3 * span.cpu / params["turns"])
    found = {name: median(each) for name, each in spent.items()}
    return {"http_ms": found["http"], "scripted_ms": found["scripted"], "more_ms": found["http"] - found["scripted"]}


# ---------------------------------------------------------------------- imports


async def _importing(params: Sample) -> Sample:
    """What a provider adds to a process that has Perdure, and what its first request adds to that."""
    with served() as port:
        began = time.process_time()
        model = model_at(port, "turn")
        made = time.process_time()
        async for _ in model.stream(ModelRequest([Message("user", QUESTION)])):
            pass
        return {"import_ms": 1e3 * (made - began), "first_ms": 1e3 * (time.process_time() - made)}


# ---------------------------------------------------------------------- requests


async def _building(params: Sample) -> Sample:
    """What it takes to build the next request of a session with so many messages, in each dialect."""
    from perdure.providers.anthropic import AnthropicMessages  # not before it is measured
    from perdure.providers.bedrock import BedrockConverse
    from perdure.providers.google import GoogleGenerate
    from perdure.providers.openai_chat import ChatCompletions, Quirks
    from perdure.providers.openai_responses import OpenAIResponses

    dialects: dict[str, Any] = {
        "anthropic": AnthropicMessages(),
        "openai": OpenAIResponses(),
        "chat": ChatCompletions("openai-chat", Quirks()),
        "google": GoogleGenerate(),
        "bedrock": BedrockConverse(),
    }
    sample: Sample = {}
    for name, dialect in dialects.items():
        spent: list[float] = []
        async with Runtime(
            "memory", agents=[Agent(_Building(dialect, spent), instructions=SYSTEM, tools=[get_weather])]
        ) as runtime:
            session = await runtime.session()
            while len(spent) < params["messages"] // 2:  # each turn has four messages and two requests
                await session.run(QUESTION)
        Yard.take()
        sample[name] = {"next_ms": 1e3 * median(spent[-40:]), "first_ms": 1e3 * median(spent[:4])}
    sample["next_ms"] = max(each["next_ms"] for each in sample.values())
    return sample


class _Building:
    """A model that builds the request as its dialect would send it, and answers by itself."""

    name = "building"

    def __init__(self, dialect: Any, spent: list[float]) -> None:
        self._dialect, self._spent = dialect, spent

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelResponse]:
        began = time.thread_time()
        self._dialect.build(request, "m")
        self._spent.append(time.thread_time() - began)
        if request.messages[-1].role == "tool":
            yield ModelResponse(ANSWER, usage=Usage(50, 10))
        else:
            yield ModelResponse(tool_calls=(ToolCall(os.urandom(4).hex(), TOOL, ARGS),), stop="tool_calls")
