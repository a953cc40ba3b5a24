"""A local HTTP server in the place of a provider: it answers from a script and remembers what it was asked.

    async with ModelServer([Reply.sse(("message_start", {…}), …), Reply(status=529)]) as server:
        model = provider("anthropic:any", base_url=server.url, key="k")

It speaks real HTTP on a real socket of this machine, so a test goes through the client, the reader and the dialect as a
real call does. A reply may be cut off at any byte, come in pieces of any size, or hang until the test lets it go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct, field

AnswerEnd: TypeAlias = Literal["whole", "rest", "cut", "hang"]
"""How a reply ends: as HTTP wants it, with what is left of its body and then so, with the connection cut off, or not
before the client goes or the server is closed."""


class Asked(Struct, frozen=True):
    """A request that the server received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Reply(Struct, frozen=True, kw_only=True):
    """What the server answers: `body` in pieces of `piece` bytes, the first `upto` bytes of it, then the `end`.

    `then` is called, and awaited where it can be, when these bytes are sent, before the end: a crash test kills its
    client there.
    """

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    piece: int = 0
    upto: int | None = None
    end: AnswerEnd = "whole"
    then: Callable[[], object] | None = None

    @staticmethod
    def sse(*events: tuple[str, Any] | Any, done: bool = False, **fields: Any) -> Reply:
        """Server-sent events: `(name, data)`, or data alone; data that is no text is sent as JSON."""
        lines: list[bytes] = []
        for event in events:
            name, data = event if isinstance(event, tuple) else ("", event)
            text = data.encode() if isinstance(data, str) else msgspec.json.encode(data)
            lines.append((f"event: {name}\n".encode() if name else b"") + b"data: " + text + b"\n\n")
        if done:
            lines.append(b"data: [DONE]\n\n")
        headers = {"content-type": "text/event-stream", **fields.pop("headers", {})}
        return Reply(body=b"".join(lines), headers=headers, **fields)

    @staticmethod
    def error(status: int, body: Any, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Reply(
            status=status, body=msgspec.json.encode(body), headers={"content-type": "application/json", **named}
        )


Script: TypeAlias = Sequence[Reply] | Callable[[Asked], Reply]


class ModelServer:
    """Answers one request after the other from a list, which must not run dry; or by a function of the request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.open = 0
        self._asked, self._closed_by_client = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ModelServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def was_asked(self) -> None:
        """Wait for the first request."""
        await self._asked.wait()

    async def client_gone(self) -> None:
        """Wait until a client has closed a connection before its reply was whole."""
        await self._closed_by_client.wait()

    def _answer(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        self._asked.set()
        if not isinstance(self.script, Sequence):
            try:
                return self.script(asked)
            except Exception as error:  # the test's own code: its client gets the error
                return Reply.error(501, {"error": {"message": f"the script raised {type(error).__name__}: {error}"}})
        if len(self.asked) > len(self.script):
            return Reply.error(500, {"error": {"message": f"the script has {len(self.script)} replies"}})
        return self.script[len(self.asked) - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open += 1
        try:
            while (asked := await _read(reader)) is not None:
                reply = self._answer(asked)
                await self._send(reply, reader, writer)
                if reply.end not in ("whole", "rest"):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            self._closed_by_client.set()
        except asyncio.CancelledError:
            pass  # the server is closed: asyncio would log a cancelled handler as an error
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _send(self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {reply.status} Scripted", "transfer-encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        await _send_body(reply.body[: reply.upto], reply.piece, writer)
        if reply.then is not None:
            await writer.drain()
            following = reply.then()
            if inspect.isawaitable(following):
                await following
        if reply.end == "rest" and reply.upto is not None:
            await _send_body(reply.body[reply.upto :], reply.piece, writer)
        if reply.end in ("whole", "rest"):
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        elif reply.end == "hang":
            await reader.read()  # ends when the client goes
            self._closed_by_client.set()


async def _send_body(body: bytes, piece: int, writer: asyncio.StreamWriter) -> None:
    size = piece or max(len(body), 1)
    for start in range(0, len(body), size):
        data = body[start : start + size]
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await writer.drain()
        if piece:
            await asyncio.sleep(0)  # the client reads a piece at a time


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await _read_body(reader, headers)
    return Asked(method, path, headers, body)


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding") == "chunked":
        pieces: list[bytes] = []
        while size := int(await reader.readline(), 16):
            pieces.append(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
        return b"".join(pieces)
    return await reader.readexactly(int(headers.get("content-length", "0")))


def frames(events: Iterable[tuple[str, Any]]) -> bytes:
    """AWS's event-stream frames of `(event type, payload)`; a type that ends with "Exception" is one."""
    import struct  # noqa: PLC0415  # needed for this one dialect
    import zlib  # noqa: PLC0415

    out = b""
    for name, payload in events:
        failed = name.endswith("Exception")
        pairs = {
            ":message-type": "exception" if failed else "event",
            ":exception-type" if failed else ":event-type": name,
            ":content-type": "application/json",
        }
        headers = b"".join(
            bytes([len(k)]) + k.encode() + b"\x07" + struct.pack(">H", len(v)) + v.encode() for k, v in pairs.items()
        )
        body = msgspec.json.encode(payload)
        prelude = struct.pack(">II", 16 + len(headers) + len(body), len(headers))
        frame = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + body
        out += frame + struct.pack(">I", zlib.crc32(frame))
    return out
