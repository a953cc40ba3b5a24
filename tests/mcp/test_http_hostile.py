"""Servers behind a URL that mean harm: what they send is bounded, and nothing of ours goes where they point."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from perdure.mcp import McpServer
from perdure.mcp.transport import LARGEST_MESSAGE
from perdure.model.tool import Failed, Ok, OutcomeUnknown
from perdure.testing import VirtualClock
from tests.kit import Place, agent_calling, until

SECRET = "s3cret"
JSON, EVENTS = "application/json", "text/event-stream"

Send = Callable[[int, str, bytes, bool], Awaitable[None]]
"""Sends a status, a content type, a part of a body, and whether more comes."""
Behaves = Callable[["Evil", dict[str, Any], Send], Awaitable[None]]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("memory", tmp_path)


def answer(number: Any, **result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode()


def event(data: bytes) -> bytes:
    return b"event: message\ndata: " + data + b"\n\n"


def echoed(number: Any) -> bytes:
    return answer(number, content=[{"type": "text", "text": "hi"}])


class Evil:
    """A server of 2025 with one tool, whose calls a test answers. It knows the session that it has begun last, unless
    it is told to forget."""

    def __init__(self, behaves: Behaves) -> None:
        self.behaves = behaves
        self.session, self.begun, self.calls = "", 0, 0
        self.headers: dict[str, str] = {}
        self.gone = asyncio.Event()
        self.deletes: Callable[[], Awaitable[None]] | None = None

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        got = {name.decode(): value.decode() for name, value in scope["headers"]}
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        begun = False

        async def reply(status: int, kind: str, part: bytes, more: bool = False) -> None:
            nonlocal begun
            if not begun:
                begun = True
                headers = {"content-type": kind, "mcp-session-id": self.session, **self.headers}
                coded = [(name.encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": status, "headers": coded})
            await send({"type": "http.response.body", "body": part, "more_body": more})

        if scope["method"] != "POST":
            if scope["method"] == "DELETE" and self.deletes is not None:
                await self.deletes()
            return await reply(405, "text/plain", b"")
        asked = json.loads(body)
        number = asked.get("id")
        if asked["method"] == "initialize":
            self.begun += 1
            self.session = f"session-{self.begun}"
            info = {"name": "evil", "version": "1"}
            known = answer(number, protocolVersion="2025-11-25", capabilities={"tools": {}}, serverInfo=info)
            return await reply(200, JSON, known)
        if asked["method"] == "server/discover":
            return await reply(400, "text/plain", b"what?")
        if got.get("mcp-session-id") != self.session:
            return await reply(404, "text/plain", b"")
        if number is None:
            return await reply(202, JSON, b"")
        if asked["method"] == "tools/list":
            return await reply(200, JSON, answer(number, tools=[{"name": "echo", "inputSchema": {"type": "object"}}]))
        if asked["method"] == "ping":
            return await reply(200, JSON, answer(number))
        self.calls += 1
        await self.behaves(self, asked, reply)


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncGenerator[str, None]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, interface="asgi3", log_config=None, lifespan="off", timeout_graceful_shutdown=0)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listening]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        finally:
            server.should_exit = server.force_exit = True
            await task


async def outcome_of(place: Place, evil: Evil, state: str = "ready", **options: Any) -> tuple[Any, Any]:
    """How a call of it ends in a turn that is finished in any case, and how the server stands in the end."""
    async with serving(evil.app) as url:
        server = McpServer("evil", url=url, headers={"Authorization": f"Bearer {SECRET}"}, **options)
        async with place.runtime(agent_calling("mcp__evil__echo"), mcp=[server], clock=VirtualClock()) as runtime:
            result = await (await runtime.session("s")).run("go")
            await until(lambda: runtime.mcp.status()[0].state == state)
            [status] = runtime.mcp.status()
        evil.gone.set()

    assert result.text == "done"
    return result.tool_calls[0].outcome, status


# ---------------------------------------------------------------------- what it sends


async def test_answer_without_end_is_cut_off(place: Place) -> None:
    async def endless(evil: Evil, asked: Any, send: Send) -> None:
        await send(200, JSON, b'{"jsonrpc": "2.0", "result": "', True)
        with contextlib.suppress(Exception):
            for _ in range(3 * LARGEST_MESSAGE // (1 << 20)):
                await send(200, JSON, b"x" * (1 << 20), True)

    outcome, status = await outcome_of(place, Evil(endless), "down")

    assert isinstance(outcome, OutcomeUnknown)
    assert f"an answer of more than {LARGEST_MESSAGE:,} bytes" in status.reason


@pytest.mark.parametrize("kind", [JSON, EVENTS])
async def test_answer_that_unpacks_to_gigabytes_is_not_unpacked(place: Place, kind: str) -> None:
    async def packed(evil: Evil, asked: Any, send: Send) -> None:
        evil.headers = {"content-encoding": "gzip"}
        await send(200, kind, gzip.compress(b" " * (1 << 20), 1) * 64, False)

    outcome, status = await outcome_of(place, Evil(packed), "down")

    assert isinstance(outcome, OutcomeUnknown)
    assert "an answer that is packed" in status.reason


async def test_flood_of_messages_over_http_is_cut_off(place: Place) -> None:
    async def flood(evil: Evil, asked: Any, send: Send) -> None:
        told = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}
        with contextlib.suppress(Exception):
            for _ in range(2000):
                await send(200, EVENTS, event(json.dumps(told).encode()) * 10, True)
        await evil.gone.wait()

    outcome, status = await outcome_of(place, Evil(flood), "down")

    assert isinstance(outcome, OutcomeUnknown)
    assert "it sent thousands of messages that nothing had asked for" in status.reason


@pytest.mark.parametrize("kind", [JSON, EVENTS])
async def test_answer_that_never_ends_has_the_time_of_a_call(place: Place, kind: str) -> None:
    async def drip(evil: Evil, asked: Any, send: Send) -> None:
        with contextlib.suppress(Exception):
            while not evil.gone.is_set():
                await send(200, kind, b": still here\n\n" if kind == EVENTS else b" ", True)
                await asyncio.sleep(0.01)

    outcome, _ = await outcome_of(place, Evil(drip), timeout=0.1)

    assert isinstance(outcome, OutcomeUnknown)


async def test_request_on_the_stream_of_an_answer_is_not_the_answer(place: Place) -> None:
    async def wrong(evil: Evil, asked: Any, send: Send) -> None:
        told = json.dumps({"jsonrpc": "2.0", "id": 9999, "method": "ping"}).encode()
        await send(200, EVENTS, event(told) + event(echoed(asked["id"])), False)

    outcome, _ = await outcome_of(place, Evil(wrong))

    assert outcome == Ok("hi")


# ---------------------------------------------------------------------- statuses


@pytest.mark.parametrize(
    ("status", "told"), [(401, "HTTP 401 Unauthorized"), (403, "HTTP 403 Forbidden"), (413, "HTTP 413")]
)
async def test_call_that_a_status_refuses_has_failed(place: Place, status: int, told: str) -> None:
    async def refuse(evil: Evil, asked: Any, send: Send) -> None:
        await send(status, "text/html", b"<h1>no</h1>", False)

    outcome, _ = await outcome_of(place, Evil(refuse))

    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.message[: len(told)]) == ("mcp_error", told)


async def test_call_that_a_gateway_gave_up_is_unknown(place: Place) -> None:
    async def fail(evil: Evil, asked: Any, send: Send) -> None:
        await send(502, "text/html", b"<h1>bad gateway</h1>", False)

    outcome, _ = await outcome_of(place, Evil(fail))

    assert isinstance(outcome, OutcomeUnknown)


async def test_redirect_to_another_host_is_not_followed(place: Place) -> None:
    seen: list[dict[bytes, bytes]] = []

    async def other(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]))

    async with serving(other) as elsewhere:

        async def redirect(evil: Evil, asked: Any, send: Send) -> None:
            evil.headers = {"location": elsewhere}
            await send(307, "text/plain", b"", False)

        outcome, _ = await outcome_of(place, Evil(redirect))

    assert isinstance(outcome, Failed)
    assert "not followed" in outcome.message
    assert seen == []


async def test_session_that_the_server_has_forgotten_is_begun_anew(place: Place) -> None:
    async def echo(evil: Evil, asked: Any, send: Send) -> None:
        await send(200, JSON, echoed(asked["id"]), False)

    evil, clock = Evil(echo), VirtualClock()
    async with serving(evil.app) as url:
        agent = agent_calling("mcp__evil__echo")
        async with place.runtime(agent, mcp=[McpServer("evil", url=url)], clock=clock) as runtime:
            session = await runtime.session("s")
            before = await session.run("go")
            evil.session = "another"
            refused = await session.run("go")
            while (runtime.mcp.status()[0].state, runtime.mcp.status()[0].starts) != ("ready", 2):
                clock.advance(1)
                await asyncio.sleep(0.001)
            after = await session.run("go")

    outcome = refused.tool_calls[0].outcome
    assert (before.tool_calls[0].outcome, after.tool_calls[0].outcome) == (Ok("hi"), Ok("hi"))
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.message) == ("mcp_unavailable", "its session at the server is over; nothing was done")
    assert (evil.begun, evil.calls) == (2, 2)


async def test_server_that_fails_every_question_for_life_is_started_anew(place: Place) -> None:
    async def fail(evil: Evil, asked: Any, send: Send) -> None:
        await send(503, "text/plain", b"", False)

    evil, clock = Evil(fail), VirtualClock()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if broken:
            while (await receive()).get("more_body"):
                pass
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await evil.app(scope, receive, send)

    broken = False
    async with (
        serving(app) as url,
        place.runtime(agent_calling("x"), mcp=[McpServer("evil", url=url)], clock=clock) as runtime,
    ):
        assert await runtime.mcp.ready()
        broken = True
        while runtime.mcp.status()[0].state == "ready":
            clock.advance(31)
            await asyncio.sleep(0.001)
        [status] = runtime.mcp.status()

    # The SDK closes the connection by itself when a notification is refused in time.
    assert status.reason in ("it left 3 questions for a sign of life unanswered", "its connection was closed")


async def test_server_that_will_not_say_goodbye_holds_no_runtime_up(place: Place) -> None:
    async def echo(evil: Evil, asked: Any, send: Send) -> None:
        await send(200, JSON, echoed(asked["id"]), False)

    evil = Evil(echo)

    async def never() -> None:
        await evil.gone.wait()

    evil.deletes = never
    async with serving(evil.app) as url:
        async with place.runtime(agent_calling("mcp__evil__echo"), mcp=[McpServer("evil", url=url)]) as runtime:
            assert await runtime.mcp.ready()
            left = time.monotonic()
        took = time.monotonic() - left
        evil.gone.set()

    assert took < 8  # it is told for two seconds; the Runtime itself would wait for ten
