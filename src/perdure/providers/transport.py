"""HTTP/1.1 over asyncio for direct connections: the part of the HTTP client that every delta of an answer passes.

httpx2 asks a transport for one response to one request. Its own goes through a pool, a second library and anyio's
streams; this one is an asyncio protocol, h11 and a list of idle connections (docs/adr/0035). Proxies and HTTP/2 are
left to httpx2's own.

h11 decides what bytes mean and whether a connection may be used again. Rules here: a connection serves one request
at a time; it goes back to the idle ones only when h11 has seen the end of both messages; whatever else happens to a
request closes it at once. An idle connection on which anything came, or which the server closed, is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Generator
from typing import Any, TypeAlias

import h11
import httpx2

HttpOrigin: TypeAlias = tuple[bool, str, int]
"""Whether with TLS, host and port."""

IDLE, MOST_IDLE = 30.0, 64
"""Seconds that a connection waits for the next request, and how many of an origin do."""

NEXT_ADDRESS = 0.25
"""Seconds after which the next address of a host is tried beside the one that does not answer (RFC 8305): a network
that lets nothing through by IPv6 would use up the whole time otherwise."""

HIGH_WATER = 256 * 1024
"""Bytes received and not asked for, above which the socket is not read."""

MAX_HEAD = 64 * 1024


class AsyncioTransport(httpx2.AsyncBaseTransport):
    """Direct connections of one event loop. `_idle` is the only state, and only this loop touches it."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._idle: dict[HttpOrigin, list[_Connection]] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        timeouts: dict[str, float | None] = request.extensions.get("timeout") or {}
        connection = await self._connection(_origin(request.url), timeouts.get("connect"))
        try:
            with _mapped():
                await connection.send(request, timeouts)
                response = await connection.response(timeouts)
        except BaseException:  # also a cancellation: half an exchange leaves a connection that nothing can be sent on
            connection.abort()
            raise
        return httpx2.Response(
            response.status_code, headers=list(response.headers.raw_items()), stream=_Body(self, connection, timeouts)
        )

    async def _connection(self, origin: HttpOrigin, timeout: float | None) -> _Connection:
        idle = self._idle.get(origin, [])
        while idle:
            connection = idle.pop()
            if connection.usable():
                return connection
            connection.abort()
        return await self._connect(origin, timeout)

    async def _connect(self, origin: HttpOrigin, timeout: float | None) -> _Connection:
        tls, host, port = origin
        options: dict[str, Any] = {"ssl": self._context, "server_hostname": host} if tls else {}
        loop = asyncio.get_running_loop()
        if isinstance(loop, asyncio.BaseEventLoop):  # other loops try one address after the other
            options["happy_eyeballs_delay"] = NEXT_ADDRESS
        try:
            async with asyncio.timeout(timeout):
                _, connection = await loop.create_connection(lambda: _Connection(origin, loop), host, port, **options)
        except TimeoutError as error:
            raise httpx2.ConnectTimeout(str(error)) from error
        except OSError as error:  # TLS's too
            raise httpx2.ConnectError(str(error)) from error
        return connection

    def take_back(self, connection: _Connection) -> None:
        """A connection whose response was read, or left, by its reader."""
        idle = self._idle.setdefault(connection.origin, [])
        if len(idle) < MOST_IDLE and connection.begin_again():
            idle.append(connection)
        else:
            connection.abort()

    async def aclose(self) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop().abort()
        await asyncio.sleep(0)  # asyncio closes sockets in its next pass


class _Body(httpx2.AsyncByteStream):
    """What is left of a response. Closing it in the middle closes its connection."""

    def __init__(self, transport: AsyncioTransport, connection: _Connection, timeouts: dict[str, float | None]) -> None:
        self._transport, self._timeouts = transport, timeouts
        self._connection: _Connection | None = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self._connection
        if connection is None:
            return
        with _mapped():
            while piece := await connection.body(self._timeouts):
                yield piece

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.take_back(connection)


class _Connection(asyncio.Protocol):
    """One socket. asyncio calls the first methods; `send`, `response` and `body` wait for them one at a time."""

    def __init__(self, origin: HttpOrigin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin, self._loop = origin, loop
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self._socket: asyncio.Transport
        self._received: list[bytes] = []
        self._size = 0
        self._ended = False  # nothing more will come
        self._error: Exception | None = None
        self._full = False  # nothing more may be written just now
        self._waiter: asyncio.Future[None] | None = None
        self._idle_since = 0.0

    # ------------------------------------------------------------------ called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._size += len(data)
        if self._size > HIGH_WATER:
            self._socket.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._full, self._error = True, False, exc
        self._wake()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, timeout: float | None, late: type[httpx2.TimeoutException]) -> None:
        """Wait for the next call of asyncio. A timer of our own costs a fraction of `asyncio.timeout`."""
        waiter = self._waiter = self._loop.create_future()
        timer = None if timeout is None else self._loop.call_later(timeout, _expire, waiter, late)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    # ------------------------------------------------------------------ one request

    async def send(self, request: httpx2.Request, timeouts: dict[str, float | None]) -> None:
        """Send a request; also only a part of it, when the server answers before it has seen the whole."""
        asked = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
        head: bytes | None = self._http.send(asked)
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        async for piece in request.stream:
            data = self._http.send(h11.Data(data=piece)) or b""
            self._socket.write(data if head is None else head + data)  # small requests leave in one packet
            head = None
            while self._full and not self._refused():
                await self._wait(timeouts.get("write"), httpx2.WriteTimeout)
            if self._ended or self._refused():
                return
        self._socket.write((head or b"") + (self._http.send(h11.EndOfMessage()) or b""))

    def _refused(self) -> bool:
        """Whether a refusal has come: a server that has sent one may read no more of the request, and not close."""
        return bool(self._received) and self._received[0][9:10] in (b"3", b"4", b"5")  # of "HTTP/1.1 413 …"

    async def response(self, timeouts: dict[str, float | None]) -> h11.Response:
        while True:
            event = self._http.next_event()
            if type(event) is h11.Response:
                return event
            if event is h11.NEED_DATA:
                await self._receive(timeouts)
            elif type(event) is not h11.InformationalResponse:
                raise httpx2.RemoteProtocolError(f"the server sent {event!r:.80} in place of a response")

    async def body(self, timeouts: dict[str, float | None]) -> bytes:
        """The next bytes of the body, all that have come; none at its end."""
        found: list[bytes] = []
        while self._http.their_state is h11.SEND_BODY:
            event = self._http.next_event()
            if type(event) is h11.Data:
                found.append(bytes(event.data))
            elif found:
                break
            elif event is h11.NEED_DATA:
                await self._receive(timeouts)
        return b"".join(found)

    async def _receive(self, timeouts: dict[str, float | None]) -> None:
        if not self._received and not self._ended:
            await self._wait(timeouts.get("read"), httpx2.ReadTimeout)
        if self._received:
            data = b"".join(self._received)
            self._received.clear()
            if self._size > HIGH_WATER:
                self._socket.resume_reading()
            self._size = 0
            self._http.receive_data(data)
        elif self._error is not None:
            raise httpx2.ReadError(str(self._error)) from self._error
        else:
            self._http.receive_data(b"")  # the end: h11 knows whether it may be here

    # ------------------------------------------------------------------ between requests

    def begin_again(self) -> bool:
        """Make it ready for another request; False where the last one is not over, the server wants no more, or has
        said more than its response: that would be taken for the answer to the next request."""
        if (
            self._http.our_state is not h11.DONE
            or self._http.their_state is not h11.DONE
            or self._http.trailing_data[0]
        ):
            return False
        self._http.start_next_cycle()
        self._idle_since = self._loop.time()
        return self.usable()

    def usable(self) -> bool:
        """What came while nothing was asked is no answer to what is asked next."""
        return not self._ended and not self._received and self._loop.time() - self._idle_since < IDLE

    def abort(self) -> None:
        self._socket.abort()


def _expire(waiter: asyncio.Future[None], late: type[httpx2.TimeoutException]) -> None:
    if not waiter.done():
        waiter.set_exception(late(""))


def _origin(url: httpx2.URL) -> HttpOrigin:
    if url.scheme not in ("http", "https") or not url.host:
        raise httpx2.UnsupportedProtocol(f"{str(url)!r} begins with neither http:// nor https://")
    tls = url.scheme == "https"
    return tls, url.raw_host.decode(), url.port or (443 if tls else 80)


@contextlib.contextmanager
def _mapped() -> Generator[None, None, None]:
    try:
        yield
    except h11.LocalProtocolError as error:
        raise httpx2.LocalProtocolError(str(error)) from error
    except h11.RemoteProtocolError as error:
        raise httpx2.RemoteProtocolError(str(error)) from error
