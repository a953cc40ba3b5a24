"""Servers and proxies that answer as none should: keys stay ours, memory is bounded, errors name the cause."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import logging
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import pytest

from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.llm import ModelRequest
from perdure.model.message import Message
from perdure.ports.provider import Provider
from perdure.providers.dialect import Timeouts, rate_report, status_error
from perdure.providers.registry import provider
from perdure.testing.model_server import ModelServer, Reply
from tests.providers.test_http import answer, connect
from tests.providers.wire import ANSWERS

SECRET = "sk-proj-aVeryLong_Secret+Key/4711"
PASSWORD = "open-sesame-4711"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(serve: Serve) -> AsyncGenerator[Provider, None]:
    """A model behind a server that does this."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield provider("openai-chat:m", base_url=url, key=SECRET, timeouts=Timeouts(silence=20, first_byte=20))


async def refused(model: Provider, request: ModelRequest | None = None) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        await answer(model, request)
    return caught.value


# ---------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "quoted",
    [
        SECRET[9:],
        SECRET.upper(),
        quote(SECRET, safe=""),
        SECRET.encode().hex(),
        base64.b64encode(SECRET.encode()).decode(),
        base64.b64encode(f"Bearer {SECRET}".encode()).decode(),
        base64.b64encode(f"me:{SECRET}".encode()).decode(),
    ],
    ids=[
        "its end",
        "upper case",
        "in an address",
        "hexadecimal",
        "base64",
        "base64 of the header",
        "base64 of a login",
    ],
)
async def test_a_key_that_a_server_quotes_in_another_spelling_is_in_no_message(quoted: str) -> None:
    async with ModelServer([Reply.error(401, {"error": {"message": f"who is {quoted}?"}})]) as server:
        error = await refused(provider("openai-chat:m", base_url=server.url, key=SECRET))

    assert "[key]" in str(error)
    middle = len(quoted) // 2
    assert quoted[middle - 6 : middle + 6] not in str(error)


async def test_a_login_in_the_base_url_is_sent_and_in_no_repr_log_or_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    replies = [ANSWERS["openai-chat"]["text"].reply, Reply.error(401, {"error": {"message": f"not {PASSWORD}"}})]
    async with ModelServer(replies) as server:
        url = server.url.replace("://", f"://me:{PASSWORD}@")
        model = provider("ollama:m", base_url=url)
        await answer(model)
        error = await refused(model)
    unusable = await refused(provider("ollama:m", base_url=f"ftp://me:{PASSWORD}@127.0.0.1/v1"))

    login = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    assert [each.headers["authorization"] for each in server.asked] == [f"Basic {login}"] * 2
    assert PASSWORD not in repr(model) + caplog.text + str(error) + str(unusable)


@pytest.mark.parametrize(
    "headers", [{"x": 5}, {5: "x"}, {"x": None}, {"x": f"é{SECRET}"}, {"x": f"a\n{SECRET}"}, {"x\r": "y"}, "x: y", 5]
)
def test_headers_that_http_cannot_say_are_refused_without_their_values(headers: Any) -> None:
    with pytest.raises(InvalidDefinition) as caught:
        provider("openai:m", headers=headers, key="k")

    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("options", [{"base_url": 5}, {"base_url": b"http://x"}])
def test_an_address_that_is_no_text_is_refused(options: Any) -> None:
    with pytest.raises(InvalidDefinition, match="base_url"):
        provider("openai:m", **options)


@pytest.mark.parametrize("model", [None, 5, b"openai:m", ["openai:m"]])
def test_a_model_that_is_no_text_is_refused(model: Any) -> None:
    with pytest.raises(InvalidDefinition, match="provider:model"):
        provider(model)


# ---------------------------------------------------------------------- bodies


async def test_a_proxy_that_compresses_answers_is_named() -> None:
    reply = ANSWERS["anthropic"]["text"].reply
    packed = Reply(body=gzip.compress(reply.body), headers={**reply.headers, "content-encoding": "gzip"})
    async with ModelServer([packed]) as server:
        error = await refused(connect(server))

    assert (error.code, error.retryable) == ("provider_nonsense", False)
    assert "gzip" in str(error)


async def test_a_compressed_refusal_is_read_and_never_unpacked_as_a_whole() -> None:
    said = b'{"error":{"type":"api_error","message":"out of order"}}'
    bomb = gzip.compress(said + b" " * 60_000_000)
    async with ModelServer([Reply(status=500, body=bomb, headers={"content-encoding": "gzip"})]) as server:
        model = connect(server)
        tracemalloc.start()
        try:
            error = await refused(model)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert "api_error" in str(error) or "out of order" in str(error)
    assert peak < 10_000_000


async def test_an_answer_that_never_ends_and_says_nothing_is_cut_off() -> None:
    piece = b'data: {"padding":"' + b"x" * 1_000_000 + b'"}\n\n'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(STREAM + b"\r\n")
        while True:
            writer.write(piece)
            await writer.drain()

    async with served(serve) as model:
        error = await refused(model)

    assert error.code == "answer_too_large"


async def test_a_refusal_is_heard_while_the_request_is_still_being_sent() -> None:
    """The server answers at once, reads no more, and leaves the connection open."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await done.wait()

    async with served(serve) as model:
        try:
            error = await refused(model, ModelRequest([Message("user", "x" * 20_000_000)]))
        finally:
            done.set()

    assert error.code == "context_overflow"


# ---------------------------------------------------------------------- heads


@pytest.mark.parametrize("date", ["Mon, 01 Jan 2024 00:00:00 +99999999999999", "nan", "1e999", "-5", "x" * 5_000, "٣"])
def test_times_that_make_no_sense_are_none(date: str) -> None:
    headers = {"retry-after": date, "date": date}
    limits = {"x-ratelimit-remaining-requests": "5", "x-ratelimit-reset-requests": date, "date": date}

    error = status_error(429, headers, "slow down")

    assert (error.code, error.retryable) == ("rate_limited", True)
    assert error.after is None or error.after >= 0
    assert rate_report(limits, accepted=True).tokens is None


async def test_a_redirect_names_the_address_and_the_setting() -> None:
    async with ModelServer([Reply(status=308, headers={"location": "https://new.example/v1"})]) as server:
        error = await refused(connect(server))

    assert error.code == "invalid_base_url"
    assert "https://new.example/v1" in str(error)
    assert "base_url" in str(error)
