"""Waiting until a server that was started as a command can be talked to.

    server = await session.command(["python", "-m", "http.server", "8000"])
    await wait_url("http://127.0.0.1:8000/", command=server)

Both try again and again, with pauses that grow to half a second, until the server answers, the time is over, or the
command has ended: a server that failed to start is not waited for. Cancelling ends them at once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

from perdure.errors import InvalidInput, ProcessEnded, TimedOut, quoted
from perdure.lifecycle.process import ENDS, RESERVED
from perdure.model import validate

R = TypeVar("R")

TIMEOUT = 60.0
TRY = 5.0
"""Seconds that one attempt may take."""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
LONGEST_STATUS_LINE = 8192


class Ends(Protocol):
    """A handle of a process: all that is asked of it here is when it ends."""

    @property
    def id(self) -> str: ...

    async def outcome(self, timeout: float | None = None) -> Any: ...


async def wait_port(
    port: int, *, host: str = "127.0.0.1", timeout: float | None = TIMEOUT, command: Ends | None = None
) -> None:
    """Wait until connections to a port are accepted.

    Raises TimedOut after `timeout` seconds, and ProcessEnded as soon as `command` has ended.
    """
    if type(port) is not int or not 0 < port < 65_536:
        raise InvalidInput(f"port={quoted(port):.80} is not usable: give a number from 1 to 65535")
    host = validate.name(host, "host")

    async def connect() -> None:
        _, writer = await asyncio.open_connection(host, port)
        await _close(writer)

    await _wait(connect, f"port {port} of {host} was not open", timeout, command)


async def wait_url(url: str, *, timeout: float | None = TIMEOUT, command: Ends | None = None) -> int:
    """Wait until a server answers a GET with a status below 500: that status. Redirections are not followed.

    Raises TimedOut after `timeout` seconds, and ProcessEnded as soon as `command` has ended.
    """
    parts = _parsed(url)
    if parts.hostname is None or parts.scheme not in ("http", "https"):
        raise InvalidInput(f"url={quoted(url):.200} is not usable: give one such as 'http://127.0.0.1:8000/health'")
    host, secure = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    authority = parts.netloc.rpartition("@")[2]
    request = f"GET {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\nUser-Agent: perdure\r\n\r\n"

    async def get() -> int:
        reader, writer = await asyncio.open_connection(host, port, ssl=secure, limit=LONGEST_STATUS_LINE)
        try:
            writer.write(request.encode())
            await writer.drain()
            words = (await reader.readline()).split()
        finally:
            await _close(writer)
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit() or int(words[1]) >= 500:
            raise ConnectionError("no answer of a server that is ready")
        return int(words[1])

    return await _wait(get, f"{url} did not answer", timeout, command)


def _parsed(url: object) -> SplitResult:
    """The parts of a URL; empty ones for what is none."""
    try:
        parts = urlsplit(url if isinstance(url, str) and url.isprintable() and " " not in url else "")
        return parts if parts.port != 0 else urlsplit("")
    except ValueError:  # its port is no number, or too large for one
        return urlsplit("")


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return  # the other side was faster


async def _wait(attempt: Callable[[], Awaitable[R]], what: str, timeout: float | None, command: Ends | None) -> R:
    seconds = validate.seconds(timeout)
    trying = asyncio.create_task(_try(attempt))
    ending = None if command is None else asyncio.create_task(_end(command))
    tasks: list[asyncio.Task[Any]] = [task for task in (trying, ending) if task is not None]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if trying.done():
            return trying.result()
        if command is not None and ending is not None and ending.done():
            raise ProcessEnded(command.id, ending.result())
        raise TimedOut(what, seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _try(attempt: Callable[[], Awaitable[R]]) -> R:
    pause = FIRST_PAUSE
    while True:
        try:
            async with asyncio.timeout(TRY):
                return await attempt()
        except (OSError, ValueError):  # nobody listens, or it is no server of this kind yet; TimeoutError is an OSError
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


async def _end(command: Ends) -> str:
    outcome = await command.outcome()
    return ENDS[type(outcome).__struct_config__.tag].removeprefix(RESERVED)
