"""Servers behind streamable HTTP: the SDK's own server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from mcp.server import MCPServer

from perdure.mcp import McpServer
from perdure.model.tool import Failed, Ok, OutcomeUnknown
from perdure.testing import VirtualClock
from tests.kit import Place, agent_calling, until


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("memory", tmp_path)


class Shop:
    """A server with two tools, at a port of its own; `seen` are the headers of its requests."""

    def __init__(self) -> None:
        self.entered, self.release = asyncio.Event(), asyncio.Event()
        self.seen: list[dict[bytes, bytes]] = []
        self.calls = 0
        made = MCPServer("shop")

        @made.tool()
        async def order(item: str) -> str:
            """Order something."""
            self.calls += 1
            return f"ordered {item}"

        @made.tool()
        async def slow() -> str:
            """Take for ever."""
            self.calls += 1
            self.entered.set()
            await self.release.wait()
            return "at last"

        self._app = made.streamable_http_app()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.seen.append(dict(scope["headers"]))
        await self._app(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(shop: Shop) -> AsyncGenerator[tuple[str, uvicorn.Server], None]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            shop.app, interface="asgi3", log_config=None, lifespan="on", timeout_graceful_shutdown=0
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listening]))
        await until(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", server
        shop.release.set()
        server.should_exit = server.force_exit = True
        await task


class Token(httpx2.Auth):
    """Stands for the SDK's OAuth client, which is one of these."""

    def auth_flow(self, request: httpx2.Request) -> Any:
        request.headers["Authorization"] = "Bearer t0k3n"
        yield request


async def test_tools_behind_a_url_are_called_with_its_headers(place: Place) -> None:
    shop = Shop()
    async with serving(shop) as (url, _):
        server = McpServer("shop", url=url, headers={"X-Team": "blue"}, auth=Token())
        agent = agent_calling("mcp__shop__order", {"item": "tea"})
        async with place.runtime(agent, mcp=[server]) as runtime:
            result = await (await runtime.session("s")).run("go")
            [status] = runtime.mcp.status()

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Ok)
    assert "ordered tea" in str(outcome.value)
    assert (status.state, shop.calls) == ("ready", 1)
    assert {(each.get(b"x-team"), each.get(b"authorization")) for each in shop.seen} == {(b"blue", b"Bearer t0k3n")}


async def test_call_whose_server_goes_is_unknown(place: Place) -> None:
    shop, clock = Shop(), VirtualClock()
    agent = agent_calling("mcp__shop__slow")
    async with (
        serving(shop) as (url, server),
        place.runtime(agent, mcp=[McpServer("shop", url=url)], clock=clock) as runtime,
    ):
        receipt = await (await runtime.session("s")).send("go")
        await shop.entered.wait()
        server.should_exit = server.force_exit = True
        while runtime.mcp.status()[0].state == "ready":  # the SDK may wait on; questions for a sign of life do not
            clock.advance(31)
            await asyncio.sleep(0.001)
        result = await receipt.result()

    assert isinstance(result.tool_calls[0].outcome, OutcomeUnknown)
    assert shop.calls == 1


async def test_url_that_nothing_listens_at_is_down_and_turns_go_on(place: Place) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = McpServer("shop", url=f"http://127.0.0.1:{unused.getsockname()[1]}/mcp")
        agent = agent_calling("mcp__shop__order", {"item": "tea"})
        async with place.runtime(agent, mcp=[server], clock=VirtualClock()) as runtime:
            result = await (await runtime.session("s")).run("go")
            [status] = runtime.mcp.status()

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "tool_unavailable"
    assert (status.state, result.text) == ("down", "done")
