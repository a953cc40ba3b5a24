"""How messages of a server come and go: lines over the pipes of a bound command, or requests over HTTP.

The SDK reads and writes messages; what is here bounds them. A message that is too large, or too many of them, end the
connection, and the reason is told to `lost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio
import httpx2
import mcp_types
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from mainstay.mcp.server import McpServer
from mainstay.ports.bound import BoundCommand

LARGEST_MESSAGE = 16 * 1024 * 1024
BURST, STEADY, PER_REQUEST = 5000, 100.0, 20
"""Messages that a server may send at once, each second besides, and for each request that is sent to it. What is beyond
is no conversation, and would starve everything else."""
AT_ONCE = 64
"""Messages that are read before other tasks have their turn."""
READ_SECONDS = 300.0
SEND_SECONDS = 30.0

Lost: TypeAlias = Callable[[str], None]


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


class Lines:
    """The messages of a server over its stdout, as the SDK reads a stream."""

    def __init__(self, reader: asyncio.StreamReader, lost: Lost, allowance: Allowance) -> None:
        self._reader, self._lost, self._allowance = reader, lost, allowance
        self._count = 0

    async def receive(self) -> SessionMessage | Exception:
        try:
            line = await self._reader.readuntil()
        except asyncio.IncompleteReadError:
            raise self._ended("it ended, or closed its output") from None
        except asyncio.LimitOverrunError:
            raise self._ended(f"it sent a message of more than {LARGEST_MESSAGE:,} bytes") from None
        except OSError as error:
            raise self._ended(f"its output cannot be read: {error.strerror}") from None
        await self._paced()
        try:
            return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError as error:  # a line that is no message: some servers print what should go to stderr
            return error

    async def _paced(self) -> None:
        self._count += 1
        if self._count % AT_ONCE == 0:
            await asyncio.sleep(0)
        if not self._allowance.take():
            raise self._ended(f"it sent thousands of messages that nothing had asked for, {self._count:,} in all")

    def _ended(self, why: str) -> anyio.EndOfStream:
        self._lost(why)
        return anyio.EndOfStream()

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
async def over_pipes(command: BoundCommand, lost: Lost) -> AsyncGenerator[TransportStreams, None]:
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
        yield Lines(reader, lost, allowance), writer


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


async def _bound(response: httpx2.Response) -> None:
    # The SDK bounds each event of a stream by itself; a stream as a whole may go on for days.
    streamed = response.headers.get("content-type", "").lower().startswith("text/event-stream")
    if not streamed and isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = Bounded(response.stream)


@contextlib.asynccontextmanager
async def over_http(server: McpServer) -> AsyncGenerator[TransportStreams, None]:
    """The streams of a server behind a URL."""
    timeout = httpx2.Timeout(SEND_SECONDS, read=READ_SECONDS)
    hooks: dict[str, list[Callable[..., Any]]] = {"response": [_bound]}
    client = httpx2.AsyncClient(headers=server.headers, auth=server.auth, timeout=timeout, event_hooks=hooks)
    async with (
        client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=LARGEST_MESSAGE) as streams,
    ):
        yield streams
