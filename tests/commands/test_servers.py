"""Waiting for servers: until they answer, the time is over, or their command has ended."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perdure.commands.servers import wait_port, wait_url
from perdure.errors import InvalidInput, ProcessEnded, TimedOut
from perdure.model.process import Failure


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port that is nobody else's, and at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def port_of(taken: socket.socket) -> int:
    port: int = taken.getsockname()[1]
    return port


@asynccontextmanager
async def serving(taken: socket.socket, answer: bytes = b"") -> AsyncGenerator[list[bytes]]:
    """A server that answers every request so; the requests."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if answer:
                asked.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(answer)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, sock=taken)
    async with server:
        yield asked


class Ended:
    """The handle of a command that ends when it is let."""

    id = "server"

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def outcome(self, timeout: float | None = None) -> Any:
        await self.ended.wait()
        return Failure("exited")


async def test_port_is_waited_for_until_it_is_open(taken: socket.socket) -> None:
    port = port_of(taken)
    waiting = asyncio.create_task(wait_port(port, timeout=30))
    await asyncio.sleep(0)
    async with serving(taken):
        await waiting


async def test_url_is_asked_until_it_answers(taken: socket.socket) -> None:
    port = port_of(taken)
    waiting = asyncio.create_task(wait_url(f"http://127.0.0.1:{port}/health?deep=1", timeout=30))
    await asyncio.sleep(0)
    async with serving(taken, b"HTTP/1.1 404 Not Found\r\n\r\n") as asked:
        assert await waiting == 404

    assert asked[0].startswith(f"GET /health?deep=1 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode())


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 503 Busy\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"x" * 20_000 + b"\n", b"\r\n"]
)
async def test_url_that_answers_otherwise_is_not_ready(taken: socket.socket, answer: bytes) -> None:
    port = port_of(taken)
    async with serving(taken, answer):
        with pytest.raises(TimedOut, match=r"did not answer within 0\.2 s"):
            await wait_url(f"http://127.0.0.1:{port}", timeout=0.2)


async def test_time_ends_the_wait_with_a_typed_error(taken: socket.socket) -> None:
    with pytest.raises(TimedOut, match=r"port \d+ of 127.0.0.1 was not open within 0.05 s"):
        await wait_port(port_of(taken), timeout=0.05)


async def test_command_that_ends_is_not_waited_for(taken: socket.socket) -> None:
    command = Ended()
    waiting = asyncio.create_task(wait_port(port_of(taken), timeout=None, command=command))
    await asyncio.sleep(0)
    command.ended.set()

    with pytest.raises(ProcessEnded, match="process 'server' is failed"):
        await waiting


async def test_cancelled_wait_leaves_no_task(taken: socket.socket) -> None:
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(wait_url(f"http://127.0.0.1:{port_of(taken)}/", timeout=None, command=Ended()))
    await asyncio.sleep(0)
    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("port", [0, 65_536, "80", True, None])
async def test_port_that_is_none_is_refused(port: Any) -> None:
    with pytest.raises(InvalidInput, match="from 1 to 65535"):
        await wait_port(port)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:80",
        "ftp://a/",
        "http://",
        "http://a:99999/",
        "http://a:x/",
        "http://a/\r\nX: y",
        "http://a b/",
        7,
    ],
)
async def test_url_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(InvalidInput, match="give one such as"):
        await wait_url(url)
