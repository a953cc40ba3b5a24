"""`perdure mcp` in a process of its own: over stdio and HTTP, killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
import mcp_types as types
import pytest
from mcp import Client, StdioServerParameters

from tests.kit import SOON, until
from tests.server.test_mcp import Person, facts, said, yes

ROOT = Path(__file__).parents[2]
AGENT = "tests.server.sample_shop:shop"


def words(folder: Path, *options: str, agent: str = AGENT) -> list[str]:
    return [sys.executable, "-m", "perdure", "mcp", agent, "--store", str(folder / "a.db"), *options]


def surroundings(folder: Path) -> dict[str, str]:
    return {**os.environ, "SHOP": str(folder)}


@asynccontextmanager
async def over_stdio(folder: Path, agent: str = AGENT, **options: Any) -> AsyncGenerator[Client, None]:
    command, *args = words(folder, agent=agent)
    target = StdioServerParameters(command=command, args=args, env=surroundings(folder), cwd=ROOT)
    async with Client(target, **options) as client:
        yield client


@contextmanager
def over_http(folder: Path, *options: str) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
    """A server, and where it is."""
    with subprocess.Popen(
        words(folder, "--http", "0", *options), cwd=ROOT, env=surroundings(folder), stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            assert line.startswith("perdure: serving http"), line
            yield server, line.split(" ")[2]
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_on_stdio_prompts_approves_and_cancels(tmp_path: Path, mode: Literal["auto", "legacy"]) -> None:
    async with over_stdio(tmp_path, mode=mode, elicitation_callback=Person(yes())) as client:
        paid = await client.call_tool("prompt", {"text": "pay 3", "session": "s"})
        asking = asyncio.create_task(client.call_tool("prompt", {"text": "deliver", "session": "s"}))
        await until((tmp_path / "begun").exists)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        ended = await client.call_tool("result", {"turn": "s.2"})

    assert said(paid) == "thank you"
    assert (tmp_path / "paid").read_text() == "3\n"
    assert facts(ended)["status"] == "cancelled"


@pytest.mark.slow
async def test_a_runtime_is_served_with_its_deps(tmp_path: Path) -> None:
    async with over_stdio(tmp_path, agent="tests.server.sample_shop:owned") as client:
        answer = await client.call_tool("prompt", {"text": "owner"})

    assert said(answer) == "owned by Ada"


@pytest.mark.kill
async def test_a_server_that_was_killed_in_a_turn_ends_it_when_it_is_started_again(tmp_path: Path) -> None:
    async def ask(url: str) -> None:
        async with Client(url) as client:
            await client.call_tool("prompt", {"text": "deliver", "session": "s"})

    with over_http(tmp_path) as (server, url):
        asking = asyncio.create_task(ask(url))
        await until((tmp_path / "begun").exists)
        server.kill()
        asking.cancel()  # a client of 2.3 waits on for an answer that cannot come
        await asyncio.gather(asking, return_exceptions=True)
    (tmp_path / "go").touch()
    async with over_stdio(tmp_path) as client:
        result = await client.call_tool("result", {"turn": "s.1"})

    assert said(result) == "thank you"


@pytest.mark.kill
async def test_a_question_outlives_the_server_that_asked_it(tmp_path: Path) -> None:
    arguments = {"text": "pay 3", "session": "s"}
    with over_http(tmp_path) as (server, url):
        async with Client(url, elicitation_callback=Person()) as client:
            asked = await client.session.call_tool("prompt", arguments, allow_input_required=True)
            assert isinstance(asked, types.InputRequiredResult)
            server.kill()
    with over_http(tmp_path) as (_, url):
        async with Client(url, elicitation_callback=Person()) as client:
            result = await client.session.call_tool(
                "prompt", arguments, input_responses={"s.1.1.0": yes()}, request_state=asked.request_state
            )

    assert said(result) == "thank you"
    assert (tmp_path / "paid").read_text() == "3\n"


HEADERS = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-11-25"}


def call(name: str, **arguments: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}


@pytest.mark.slow
async def test_a_page_of_another_site_cannot_use_the_server(tmp_path: Path) -> None:
    with over_http(tmp_path) as (server, url):
        async with httpx2.AsyncClient() as plain:
            for hostile in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
                answer = await plain.post(url, json=call("prompt", text="hello"), headers={**HEADERS, **hostile})
                assert answer.status_code in (403, 421), hostile
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, SOON) in (0, -signal.SIGTERM)


def refused(folder: Path, *options: str) -> str:
    ran = subprocess.run(
        words(folder, *options), cwd=ROOT, env=surroundings(folder), capture_output=True, text=True, timeout=SOON,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    return ran.stderr


def test_an_address_that_others_reach_is_refused(tmp_path: Path) -> None:
    assert "can be reached from other machines" in refused(tmp_path, "--http", "0", "--host", "0.0.0.0")


@pytest.mark.slow
def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with over_http(tmp_path) as (_, url):
        port = url.split(":")[2].partition("/")[0]
        assert f"127.0.0.1:{port} cannot be listened at" in refused(tmp_path, "--http", port)


@pytest.mark.slow
async def test_a_server_on_stdio_leaves_when_its_client_does(tmp_path: Path) -> None:
    server = subprocess.Popen(
        words(tmp_path), cwd=ROOT, env=surroundings(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with server:
        assert server.stdin is not None
        server.stdin.close()
        assert await asyncio.to_thread(server.wait, SOON) == 0


def first_lines(server: subprocess.Popen[bytes], *asked: dict[str, Any]) -> list[Any]:
    """What comes on stdout when these requests are sent, a line for each of them."""
    assert server.stdin is not None
    assert server.stdout is not None
    found = []
    for each in asked:
        server.stdin.write(json.dumps(each).encode() + b"\n")
        server.stdin.flush()
        found.append(json.loads(server.stdout.readline()))
    return found


INITIALIZE = {
    "jsonrpc": "2.0", "id": 0, "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "plain", "version": "1"},
    },
}  # fmt: skip


@pytest.mark.slow
async def test_what_agents_print_is_not_taken_for_messages(tmp_path: Path) -> None:
    agent = tmp_path / "noisy.py"
    agent.write_text(
        "print('loading')\nfrom perdure import Agent, ToolCall, tool\nfrom perdure.testing import ScriptedModel\n\n"
        "@tool\ndef shout() -> str:\n    print('working')\n    return 'ok'\n\n"
        "loud = Agent(ScriptedModel([[ToolCall(name='shout')], 'done']), name='loud', tools=[shout])\n"
    )
    command = [sys.executable, "-m", "perdure", "mcp", f"{agent}:loud", "--store", str(tmp_path / "a.db")]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        _, told = await asyncio.to_thread(first_lines, server, INITIALIZE, call("prompt", text="go"))
        _, complaints = server.communicate(timeout=SOON)

    assert told["result"]["structuredContent"]["text"] == "done"
    assert b"loading\n" in complaints
    assert b"working\n" in complaints


@pytest.mark.slow
async def test_server_whose_client_leaves_in_a_turn_leaves_too_and_the_turn_goes_on(tmp_path: Path) -> None:
    with subprocess.Popen(
        words(tmp_path), cwd=ROOT, env=surroundings(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        await asyncio.to_thread(first_lines, server, INITIALIZE)
        assert server.stdin is not None
        server.stdin.write(json.dumps(call("prompt", text="deliver", session="s")).encode() + b"\n")
        server.stdin.flush()
        await until((tmp_path / "begun").exists)
        server.stdin.close()
        assert await asyncio.to_thread(server.wait, SOON) == 0
    (tmp_path / "go").touch()
    async with over_stdio(tmp_path) as client:
        result = await client.call_tool("result", {"turn": "s.1"})

    assert said(result) == "thank you"
