"""HTTP/1.1 over asyncio: what servers may do to a connection, and what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure.providers.registry import provider
from perdure.providers.transport import AsyncioTransport
from perdure.testing.model_server import ModelServer
from tests.providers.test_http import answer
from tests.providers.wire import ANSWERS

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


async def asked(reader: asyncio.StreamReader) -> bytes:
    """The head of a request without a body; nothing when the client is gone."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        return await reader.readuntil(b"\r\n\r\n")
    return b""


def always(reply: bytes, close: bool = True) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await asked(reader):
            writer.write(reply)
            if close:
                return

    return serve


@contextlib.asynccontextmanager
async def served(
    serve: Serve, secured: ssl.SSLContext | None = None, trust: ssl.SSLContext | None = None
) -> AsyncGenerator[tuple[httpx2.AsyncClient, list[str]], None]:
    """A client of a server that does this; and a line for every connection that was made."""
    connections: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append("made")
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=secured)
    url = f"{'https' if secured else 'http'}://localhost:{server.sockets[0].getsockname()[1]}"
    transport = AsyncioTransport(trust or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    async with server, httpx2.AsyncClient(transport=transport, base_url=url, timeout=30) as client:
        yield client, connections


async def test_a_connection_is_used_again() -> None:
    async with served(always(OK, close=False)) as (client, connections):
        texts = [(await client.get("/")).text for _ in range(3)]

    assert (texts, connections) == (["hi"] * 3, ["made"])


async def test_requests_at_once_have_connections_of_their_own() -> None:
    together = asyncio.Barrier(3)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await asked(reader):
            await together.wait()
            writer.write(OK)

    async with served(serve) as (client, connections):
        responses = await asyncio.gather(*[client.get("/") for _ in range(3)])

    assert [each.text for each in responses] == ["hi"] * 3
    assert len(connections) == 3


@pytest.mark.parametrize(
    "after", [b"", b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"], ids=["closed", "spoke and closed"]
)
async def test_an_idle_connection_that_the_server_gave_up_is_not_used(after: bytes) -> None:
    given_up = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(OK)
        await writer.drain()
        if not given_up.is_set():
            writer.write(after)
            writer.close()
            await writer.wait_closed()
            given_up.set()

    async with served(serve) as (client, connections):
        await client.get("/")
        await given_up.wait()
        await asyncio.to_thread(lambda: None)  # a pass of the loop that looks at its sockets
        response = await client.get("/")

    assert (response.text, response.status_code, len(connections)) == ("hi", 200, 2)


@pytest.mark.parametrize(
    ("reply", "reused"),
    [
        (OK, True),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n1;x=y\r\ni\r\n0\r\ntrailer: t\r\n\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK, True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi", False),
        (b"HTTP/1.0 200 OK\r\n\r\nhi", False),
        (b"HTTP/1.1 200 OK\r\n\r\nhi", False),
        (b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nhi", True),
        (b"HTTP/1.1 200 OK\ncontent-length: 2\n\nhi", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nhi", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx: a\r\n  b\r\n\r\nhi", True),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 60_000 + b"\r\ncontent-length: 2\r\n\r\nhi", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", True),
    ],
    ids=[
        "length",
        "chunked",
        "informational",
        "close",
        "until the end",
        "until the end of HTTP/1.1",
        "no reason",
        "bare line feeds",
        "length twice",
        "folded header",
        "large head",
        "chunked and a length that is wrong",
    ],
)
async def test_every_way_to_frame_a_body_is_read(reply: bytes, reused: bool) -> None:
    async with served(always(reply, close=not reused)) as (client, connections):
        texts = [(await client.get("/")).text for _ in range(2)]

    assert texts == ["hi", "hi"]
    assert len(connections) == (1 if reused else 2)


@pytest.mark.parametrize("cut", range(1, len(OK)))
async def test_a_response_that_is_cut_off_anywhere_is_an_error(cut: int) -> None:
    async with served(always(OK[:cut])) as (client, _):
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.get("/")


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\nhi",
    ],
    ids=[
        "nothing",
        "another protocol",
        "endless head",
        "no chunk",
        "another protocol that nobody asked for",
        "two lengths",
        "less than nothing",
        "an unknown way to frame",
        "no header",
    ],
)
async def test_what_is_no_response_is_an_error(reply: bytes) -> None:
    async with served(always(reply)) as (client, _):
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.get("/")


async def test_a_connection_whose_response_was_left_unread_is_not_used_again() -> None:
    async with served(always(OK, close=False)) as (client, connections):
        async with client.stream("GET", "/") as response:
            assert response.status_code == 200
        text = (await client.get("/")).text

    assert (text, len(connections)) == ("hi", 2)


async def test_what_a_server_says_beyond_its_response_is_not_the_next_one() -> None:
    async with served(always(OK + OK.replace(b"hi", b"no"), close=False)) as (client, connections):
        texts = [(await client.get("/")).text for _ in range(2)]

    assert (texts, len(connections)) == (["hi", "hi"], 2)


async def test_a_request_under_way_outlives_that_idle_connections_are_closed() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        begun.set()
        await go_on.wait()
        writer.write(OK)

    async with served(serve) as (client, _):
        pending = asyncio.create_task(client.get("/"))
        await begun.wait()
        await client._transport.aclose()
        go_on.set()

        assert (await pending).text == "hi"


async def test_an_answer_that_comes_before_the_whole_request_was_sent_is_read() -> None:
    refused = b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    async with served(always(refused)) as (client, _):
        response = await client.post("/", content=b"x" * 20_000_000)

    assert response.status_code == 413


async def test_a_large_body_arrives_whole_though_its_reader_is_slow() -> None:
    data = bytes(range(256)) * 20_000

    async with served(always(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)) as (client, _):
        found = b""
        async with client.stream("GET", "/") as response:
            async for piece in response.aiter_raw():
                found += piece
                await asyncio.to_thread(lambda: None)

    assert found == data


async def test_a_header_with_a_line_break_is_not_sent() -> None:
    async with served(always(OK)) as (client, _):
        with pytest.raises(httpx2.LocalProtocolError):
            await client.get("/", headers={"x": "a\r\nb: c"})


async def test_silence_is_a_timeout_and_not_reading_is_one() -> None:
    forever = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await forever.wait()

    async with served(silent) as (client, _):
        with pytest.raises(httpx2.ReadTimeout):
            await client.get("/", timeout=httpx2.Timeout(30, read=0.05))
        with pytest.raises(httpx2.WriteTimeout):
            await client.post("/", content=b"x" * 50_000_000, timeout=httpx2.Timeout(30, write=0.05))
        forever.set()


async def test_nobody_there_and_no_such_host_is_no_connection() -> None:
    async with httpx2.AsyncClient(transport=AsyncioTransport(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))) as client:
        for url in ("http://127.0.0.1:1/", "http://nobody.invalid/"):
            with pytest.raises(httpx2.ConnectError):
                await client.get(url)
        with pytest.raises(httpx2.UnsupportedProtocol):
            await client.get("ftp://localhost/")


async def test_a_certificate_is_trusted_or_there_is_no_connection(authority: Path) -> None:
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(authority / "cert.pem", authority / "key.pem")
    trusting = ssl.create_default_context(cafile=str(authority / "ca.pem"))

    async with served(always(OK, close=False), secured, trusting) as (client, connections):
        assert [(await client.get("/")).text for _ in range(2)] == ["hi", "hi"]
        assert len(connections) == 1
    async with served(always(OK, close=False), secured) as (client, _):
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY") as caught:
            await client.get("/")
    assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)


async def test_a_proxy_that_the_environment_names_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ModelServer([ANSWERS["anthropic"]["text"].reply]) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        response, _ = await answer(provider("anthropic:any", base_url="http://model.invalid", key="k"))

        assert response == ANSWERS["anthropic"]["text"].response
        assert proxy.asked[0].path.startswith("http://model.invalid/")


async def test_an_address_that_lets_nothing_through_does_not_use_up_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two addresses: at the first one nobody takes connections, as where a network drops IPv6."""
    with contextlib.ExitStack() as sockets:
        dead = sockets.enter_context(socket.socket())
        dead.bind(("127.0.0.1", 0))
        dead.listen(0)
        for _ in range(4):  # its queue is full, and stays so
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(dead.getsockname())
        async with served(always(OK)) as (client, _):
            alive = ("127.0.0.1", client.base_url.port)

            async def resolve(*_: object, **__: object) -> list[Any]:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in (dead.getsockname(), alive)]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
            response = await client.get("http://two.example/", timeout=5)

    assert response.text == "hi"
