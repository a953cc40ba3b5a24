"""How messages of a server come and go: lines over the pipes of a bound command, or requests over HTTP.

The SDK reads and writes messages; what is here bounds them. A message that is too large, or too many of them, end the
connection, and the reason is told to `lost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio
import httpx2
import mcp_types
import msgspec
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from perdure.errors import InvalidInput
from perdure.mcp.answers import REFUSED, UNREADABLE
from perdure.mcp.server import McpServer
from perdure.model.codec import clean
from perdure.ports.bound import BoundCommand

LARGEST_MESSAGE = 16 * 1024 * 1024
BURST, STEADY, PER_REQUEST = 5000, 100.0, 20
"""Messages that a server may send at once, each second besides, and for each request that is sent to it. What is beyond
is no conversation, and would starve everything else."""
AT_ONCE = 64
"""Messages that are read before other tasks have their turn."""
READ_SECONDS = 300.0
SEND_SECONDS = 30.0
GOODBYE_SECONDS = 2.0
"""How long a server behind a URL may take to be told that its session is over."""
SESSION_ID = "mcp-session-id"
MOST_PARTS = 4096
"""Entries of one list in an answer. Each costs the SDK some 15 µs, in which nothing else runs."""
LARGEST_MENDED = 1024 * 1024
"""Bytes of a message that is read a second time when it has text which is no Unicode."""

OnLost: TypeAlias = Callable[[str], None]


class Allowance:
    """How many messages a server may still send. It does not go by how fast they are read: a busy machine reads few."""

    def __init__(self) -> None:
        self._left, self._since = float(BURST), time.monotonic()

    def add(self) -> None:
        """A request is sent to it."""
        self._left = min(self._left + PER_REQUEST, BURST)

    def take(self) -> bool:
        """It has sent one; False where that is one too many."""
        if self._left < 1:
            now = time.monotonic()
            self._left, self._since = min((now - self._since) * STEADY, BURST), now
        self._left -= 1
        return self._left >= 0


Next: TypeAlias = Callable[[], Awaitable[SessionMessage | Exception]]
"""Gets the next message. Raises EndOfStream."""


class PacedReader:
    """The messages of a server, as the SDK reads a stream. Each is counted, and too many of them end it."""

    def __init__(self, next_: Next, lost: OnLost, allowance: Allowance) -> None:
        self._next, self._lost, self._allowance = next_, lost, allowance
        self._count = 0

    async def receive(self) -> SessionMessage | Exception:
        message = _sized(await self._next())
        self._count += 1
        if self._count % AT_ONCE == 0:
            await asyncio.sleep(0)
        if not self._allowance.take():
            self._lost(f"it sent thousands of messages that nothing had asked for, {self._count:,} in all")
            raise anyio.EndOfStream
        return message

    async def aclose(self) -> None:
        """The transport is closed by who opened it."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.aclose()


async def _line(reader: asyncio.StreamReader, lost: OnLost) -> SessionMessage | Exception:
    """The message in the next line of a server's stdout."""
    try:
        line = await reader.readuntil()
    except asyncio.IncompleteReadError:
        lost("it ended, or closed its output")
        raise anyio.EndOfStream from None
    except asyncio.LimitOverrunError:
        lost(f"it sent a message of more than {LARGEST_MESSAGE:,} bytes")
        raise anyio.EndOfStream from None
    except OSError as error:
        lost(f"its output cannot be read: {error.strerror}")
        raise anyio.EndOfStream from None
    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:  # a line that is no message: some servers print what should go to stderr
        return _mended(line) or error


def _mended(line: bytes) -> SessionMessage | None:
    """A message that has halves of surrogate pairs in it, as names of files may: without them. An answer that cannot be
    read at all ends the request that it is for, which would wait for its whole time otherwise."""
    try:
        found = json.loads(line) if len(line) <= LARGEST_MENDED else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or "jsonrpc" not in found:
        return None
    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_python(clean(found), by_name=False))
    except (ValueError, InvalidInput):
        number: Any = found.get("id")
        answers = type(number) in (int, str) and "method" not in found
        return _unreadable(number, "it is no message of the protocol") if answers else None


def _sized(message: SessionMessage | Exception) -> SessionMessage | Exception:
    """The message; or in place of an answer with very many parts, an error that says so."""
    answer = None if isinstance(message, Exception) else message.message
    if not isinstance(answer, mcp_types.JSONRPCResponse):
        return message
    most = max([len(value) for value in answer.result.values() if isinstance(value, list | dict)], default=0)
    return (
        message if most <= MOST_PARTS else _unreadable(answer.id, f"it has {most:,} parts, {MOST_PARTS:,} are the most")
    )


def _unreadable(number: mcp_types.RequestId, why: str) -> SessionMessage:
    error = mcp_types.ErrorData(code=UNREADABLE, message=why)
    return SessionMessage(mcp_types.JSONRPCError(jsonrpc="2.0", id=number, error=error))


class PipeWriter(asyncio.Protocol):
    """Messages to a server over its stdin, as the SDK writes a stream. A send waits while the server does not read."""

    def __init__(self, allowance: Allowance) -> None:
        self._room, self._open, self._allowance = asyncio.Event(), True, allowance
        self._room.set()
        self.pipe: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.pipe = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._open = False
        self._room.set()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    async def send(self, item: SessionMessage, /) -> None:
        if not self._open or self.pipe is None:
            raise anyio.ClosedResourceError
        self._allowance.add()
        self.pipe.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
        if not self._room.is_set():
            await self._room.wait()
            if not self._open:
                raise anyio.BrokenResourceError

    async def aclose(self) -> None:
        """The pipe is closed by who opened it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.aclose()


@contextlib.asynccontextmanager
async def over_pipes(command: BoundCommand, lost: OnLost) -> AsyncGenerator[TransportStreams, None]:
    """The streams of a server that was started; its pipes are closed behind it."""
    loop = asyncio.get_running_loop()
    reader, allowance = asyncio.StreamReader(LARGEST_MESSAGE, loop), Allowance()
    with contextlib.ExitStack() as opened:
        output, taken = os.fdopen(command.stdout, "rb", 0), os.fdopen(command.stdin, "wb", 0)
        opened.callback(output.close)
        opened.callback(taken.close)
        reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader, loop=loop), output)
        opened.callback(reading.close)
        writing, writer = await loop.connect_write_pipe(lambda: PipeWriter(allowance), taken)
        opened.callback(writing.abort)  # what a server does not read is of no use to it any more
        yield PacedReader(functools.partial(_line, reader, lost), lost, allowance), writer


class Bounded(httpx2.AsyncByteStream):
    """The body of a response, up to the size of the largest message."""

    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._inner:
            size += len(chunk)
            if size > LARGEST_MESSAGE:
                raise httpx2.ReadError(f"an answer of more than {LARGEST_MESSAGE:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class HttpBounds:
    """What is looked at in each request to a server and each response of it, before the SDK reads it."""

    def __init__(self, lost: OnLost, allowance: Allowance) -> None:
        self._lost, self._allowance = lost, allowance

    async def request(self, request: httpx2.Request) -> None:
        self._allowance.add()

    async def response(self, response: httpx2.Response) -> None:
        # The size of a body is known before it is unpacked only, and a few bytes may unpack to gigabytes.
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise httpx2.DecodingError("an answer that is packed, which was not asked for", request=response.request)
        if response.status_code == HTTPStatus.NOT_FOUND and SESSION_ID in response.request.headers:
            self._lost("it does not know the session any more")
        # The SDK bounds each event of a stream by itself; a stream as a whole may go on for days.
        kind = response.headers.get("content-type", "").lower()
        body = response.stream
        assert isinstance(body, httpx2.AsyncByteStream)
        if not kind.startswith("text/event-stream"):
            response.stream = Bounded(body)
        # A message that was refused by its status was not carried out; to the SDK it is like one that failed midway.
        posted = response.request.method == "POST" and response.status_code != HTTPStatus.NOT_FOUND
        if posted and response.is_client_error and not kind.startswith("application/json"):
            said = f"HTTP {response.status_code} {response.reason_phrase}".strip()
            error = {"jsonrpc": "2.0", "id": None, "error": {"code": REFUSED, "message": said}}
            await body.aclose()
            response.headers["content-type"] = "application/json"
            response.stream = httpx2.ByteStream(msgspec.json.encode(error))


@contextlib.asynccontextmanager
async def over_http(server: McpServer, lost: OnLost) -> AsyncGenerator[TransportStreams, None]:
    """The streams of a server behind a URL."""
    allowance = Allowance()
    bounds = HttpBounds(lost, allowance)
    client = httpx2.AsyncClient(
        headers={**server.headers, "Accept-Encoding": "identity"},
        auth=server.auth,
        timeout=httpx2.Timeout(SEND_SECONDS, read=READ_SECONDS),
        event_hooks={"request": [bounds.request], "response": [bounds.response]},
    )
    with anyio.CancelScope() as leaving:
        async with (
            client,
            streamable_http_client(server.url, http_client=client, max_sse_event_size=LARGEST_MESSAGE) as streams,
        ):
            reading, writing = streams
            try:
                yield PacedReader(reading.receive, lost, allowance), writing
            finally:
                leaving.deadline = anyio.current_time() + GOODBYE_SECONDS
