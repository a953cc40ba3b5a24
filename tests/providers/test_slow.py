"""Servers that never answer, fall silent, or answer for ever: each attempt ends, and says which setting ended it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from perdure import Agent, Message, ModelRequest, Runtime
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.outcome import ProviderFailed
from perdure.providers.dialect import Timeouts
from perdure.providers.registry import provider
from perdure.testing import VirtualClock
from perdure.testing.model_server import ModelServer, Reply

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
REFUSAL = b"HTTP/1.1 529 Busy\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"

Answer = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def nothing(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def a_head_without_end(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
    await _trickle(writer, b"a")


async def pings_for_ever(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    await _trickle(writer, b"8\r\n: ping\n\n\r\n")


async def a_word_and_silence(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"8\r\n: ping\n\n\r\n")
    await asyncio.Event().wait()


async def a_refusal_without_end(writer: asyncio.StreamWriter) -> None:
    writer.write(REFUSAL)
    await _trickle(writer, b"1\r\nx\r\n")


async def _trickle(writer: asyncio.StreamWriter, piece: bytes) -> None:
    while True:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.002)  # the pace of the server, which no test waits for


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncGenerator[tuple[str, asyncio.Event], None]:
    """A server that answers every request so, and whether a client has gone before the end."""
    gone, tasks = asyncio.Event(), set[asyncio.Task[Any]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await reader.readuntil(b"\r\n\r\n")
        answering = asyncio.create_task(answer(writer))
        try:
            while await reader.read(65536):
                pass
            gone.set()
        except (ConnectionError, asyncio.CancelledError):
            gone.set()
        finally:
            writer.transport.abort()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", gone
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close in the next pass of the loop


@pytest.mark.parametrize(
    ("answer", "timeouts", "setting", "code"),
    [
        (nothing, Timeouts(first_byte=0.05), "first_byte", "timeout"),
        (a_word_and_silence, Timeouts(silence=0.05), "silence", "timeout"),
        (pings_for_ever, Timeouts(whole=0.1), "whole", "timeout"),
        (a_head_without_end, Timeouts(whole=0.1), "whole", "timeout"),
        (a_refusal_without_end, Timeouts(silence=0.1), "HTTP 529", "overloaded"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_an_attempt_ends_and_names_its_setting(
    answer: Answer, timeouts: Timeouts, setting: str, code: str
) -> None:
    async with serving(answer) as (url, gone):
        model = provider("openai-chat:m", base_url=url, key="k", timeouts=timeouts)
        with pytest.raises(ProviderError, match=setting) as caught:
            async for _ in model.stream(ModelRequest([Message("user", "hi")])):
                pass
        await asyncio.wait_for(gone.wait(), 5)

    assert (caught.value.code, caught.value.retryable) == (code, True)


async def test_a_turn_survives_an_attempt_that_never_ends() -> None:
    whole = Reply.sse({"choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": "stop"}]}, done=True)
    hanging = Reply(body=b": ping\n\n", headers=whole.headers, end="hang")
    async with ModelServer([hanging, whole]) as server:
        model = provider("openai-chat:m", base_url=server.url, key="k", timeouts=Timeouts(silence=0.1))
        async with Runtime("memory", agents=[Agent(model)], clock=VirtualClock(auto=True)) as runtime:
            result = await (await runtime.session("s")).run("hi")

    assert result.text == "hello"
    assert [attempt.code for attempt in result.model_calls[0].attempts] == ["timeout", ""]


async def test_a_server_that_never_answers_ends_the_turn_after_its_attempts() -> None:
    async with serving(nothing) as (url, _):
        model = provider("openai-chat:m", base_url=url, key="k", timeouts=Timeouts(first_byte=0.05))
        async with Runtime("memory", agents=[Agent(model, retries=3)], clock=VirtualClock(auto=True)) as runtime:
            result = await (await runtime.session("s")).run("hi")

    assert isinstance(result.outcome, ProviderFailed)
    assert (result.outcome.code, result.outcome.attempts) == ("timeout", 4)
    assert "Timeouts(first_byte=" in result.outcome.message


@pytest.mark.parametrize("wrong", [{"whole": 0}, {"silence": -1}, {"connect": None}, {"first_byte": float("nan")}])
def test_timeouts_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidDefinition, match=next(iter(wrong))):
        Timeouts(**wrong)
