"""The life of a server: starts that fail, hang or never end, floods, strangers' lists, attach and detach."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Runtime, tool
from perdure.errors import InvalidDefinition, InvalidInput, McpUnavailable
from perdure.mcp import McpServer
from perdure.model.llm import ModelRequest
from perdure.model.tool import Failed, Ok, OutcomeUnknown
from perdure.testing import FunctionModel, VirtualClock
from tests.kit import Place, agent_calling, until
from tests.mcp.conftest import Stub, runtime_with, servers_in


@pytest.fixture(params=["memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


def quiet() -> Agent[str]:
    return Agent(FunctionModel(lambda request: ", ".join(spec.name for spec in request.tools) or "none"), name="a")


async def status_of(runtime: Runtime, state: str) -> Any:
    await until(lambda: runtime.mcp.status()[0].state == state)
    return runtime.mcp.status()[0]


# ---------------------------------------------------------------------- starts that fail


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"die": ["server/discover"]}, "the last of its stderr: cannot answer server/discover"),
        ({"die": ["tools/list"]}, "the last of its stderr: cannot answer tools/list"),
        ({"version": "2025-11-25", "die": ["initialize"]}, "the last of its stderr: cannot answer initialize"),
        ({"tools": [{"name": "list", "inputSchema": {"type": "array"}}]}, "ValidationError"),
        ({"hang": ["server/discover"]}, "it did not start within 0.5 s"),
        ({"hang": ["tools/list"]}, "it did not "),  # list its tools in time, or start at all on a busy machine
    ],
    ids=[
        "dies at once",
        "dies while it lists",
        "dies at initialize",
        "lists nonsense",
        "hangs at once",
        "hangs while it lists",
    ],
)
async def test_server_that_does_not_start_is_down_and_turns_go_on(
    place: Place, stub: Stub, behaviour: dict[str, Any], reason: str
) -> None:
    stub.does(**behaviour)
    limit = 0.5 if "hang" in behaviour else 30
    clock = VirtualClock()  # it is not started again
    async with runtime_with(place, quiet(), stub.server(start_timeout=limit), clock=clock) as runtime:
        result = await (await runtime.session("s")).run("go")
        status = runtime.mcp.status()[0]
        with pytest.raises(McpUnavailable, match="MCP server 'stub' cannot be asked now"):
            await runtime.mcp.resources("stub")

    assert result.text == "none"
    assert status.state == "down"
    assert reason in status.reason


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"endless": True}, "its list of tools has more than 64 pages"),
        ({"tools": [f"t{number}" for number in range(600)]}, "it lists more than 512 tools"),
        ({"version": "1999-01-01"}, "Unsupported protocol version from the server: 1999-01-01"),
    ],
    ids=["endless pages", "too many tools", "another version"],
)
async def test_server_that_no_second_start_would_mend_is_refused(
    place: Place, stub: Stub, behaviour: dict[str, Any], reason: str
) -> None:
    stub.does(**behaviour)
    async with runtime_with(place, quiet(), stub.server()) as runtime:
        result = await (await runtime.session("s")).run("go")
        status = await status_of(runtime, "refused")

    assert result.text == "none"
    assert reason in status.reason
    assert status.starts == 1


async def test_program_that_is_not_there_is_refused(place: Place) -> None:
    async with runtime_with(place, quiet(), McpServer("x", command=["no-such-program"])) as runtime:
        status = await status_of(runtime, "refused")

    assert "there is no program 'no-such-program'" in status.reason


async def test_server_comes_up_again_with_growing_pauses(place: Place, stub: Stub) -> None:
    clock = VirtualClock()
    stub.does(die=["tools/list"])
    async with runtime_with(place, quiet(), stub.server(), clock=clock) as runtime:
        pauses = []
        for _ in range(3):
            starts = (await status_of(runtime, "down")).starts
            waited = 0.0
            while runtime.mcp.status()[0].starts == starts:
                clock.advance(0.125)
                waited += 0.125
                for _ in range(20):
                    await asyncio.sleep(0)
            pauses.append(waited)
        stub.does(die=[])
        while runtime.mcp.status()[0].state != "ready":
            clock.advance(1)
            await asyncio.sleep(0.001)
        result = await (await runtime.session("s")).run("go")

    assert pauses == sorted(pauses)
    assert 0.25 <= pauses[0] <= 1.0
    assert 1.0 <= pauses[2] <= 3.0
    assert result.text == "mcp__stub__echo"


# ---------------------------------------------------------------------- strangers


async def test_hostile_tools_are_left_out_and_the_others_offered(place: Place, stub: Stub) -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    huge = {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "description": "x" * 100} for n in range(2000)},
    }
    good: dict[str, Any] = {"type": "object", "properties": {}}
    tools = [
        {"name": "good", "description": "Fine.", "inputSchema": good},
        {"name": "good", "description": "Forged.", "inputSchema": good},
        {"name": "huge", "inputSchema": huge},
        {"name": "deep", "inputSchema": deep},
        {"name": "dotted.name with/signs", "inputSchema": good},
        {"name": "n" * 200, "inputSchema": good},
        {"name": "hidden", "description": "See\u200b\U000e0041\U000e0042 this\x1b[8m.", "inputSchema": good},
    ]
    stub.does(tools=tools)
    async with runtime_with(place, quiet(), stub.server()) as runtime:
        await runtime.mcp.ready()
        [status] = runtime.mcp.status()
        specs = {spec.name: spec.description for spec in runtime.mcp.attached["stub"].specs()}

    assert status.refused == {
        "good": "it is listed twice: the first counts",
        "huge": status.refused["huge"],
        "deep": "its schema is too deep",
    }
    assert "131,072 are the most" in status.refused["huge"]
    assert specs["mcp__stub__good"].endswith(": Fine.")
    assert specs["mcp__stub__hidden"].endswith(": See this[8m.")
    long = [name for name in specs if name.startswith("mcp__stub__nnn")]
    signs = [name for name in specs if name.startswith("mcp__stub__dotted_name_with_signs_")]
    assert [len(name) for name in long] == [64]
    assert len(signs) == 1
    assert len(specs) == 4


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("flood", "it sent thousands of messages that nothing had asked for"),
        ("huge", "it sent a message of more than 16,777,216 bytes"),
    ],
)
async def test_server_that_sends_too_much_is_cut_off(place: Place, stub: Stub, tool: str, reason: str) -> None:
    stub.does(tools=[tool, "echo"])
    clock = VirtualClock()  # it stays down for the test to see
    async with runtime_with(place, agent_calling(f"mcp__stub__{tool}"), stub.server(), clock=clock) as runtime:
        result = await (await runtime.session("s")).run("go")
        status = await status_of(runtime, "down")

    assert isinstance(result.tool_calls[0].outcome, OutcomeUnknown)
    assert result.text == "done"
    assert reason in status.reason


async def test_answers_under_wrong_ids_are_nobodys(place: Place, stub: Stub) -> None:
    stub.does(tools=["wrong_ids"])
    agent = agent_calling("mcp__stub__wrong_ids", {"text": "for you"})
    async with runtime_with(place, agent, stub.server()) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.tool_calls[0].outcome == Ok("for you")


async def test_server_that_stops_answering_is_given_up_after_three_questions(place: Place, stub: Stub) -> None:
    clock = VirtualClock()
    stub.does(tools=["hang"])
    agent = agent_calling("mcp__stub__hang")
    async with runtime_with(place, agent, stub.server(timeout=None), clock=clock) as runtime:
        receipt = await (await runtime.session("s")).send("go")
        await until(lambda: stub.ledger)
        asleep = clock.sleeping
        while runtime.mcp.status()[0].state == "ready":
            await clock.wait_sleeping(asleep)
            clock.advance(31)
            await asyncio.sleep(0)
        reason = runtime.mcp.status()[0].reason
        result = await receipt.result()

    assert isinstance(result.tool_calls[0].outcome, OutcomeUnknown)
    assert reason == "it left 3 questions for a sign of life unanswered"


async def test_own_tool_of_an_agent_goes_before_one_of_a_server(place: Place, stub: Stub) -> None:
    @tool(name="mcp__stub__echo")
    def echo() -> str:
        return "mine"

    agent = agent_calling("mcp__stub__echo", tools=[echo])
    async with runtime_with(place, agent, stub.server()) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.tool_calls[0].outcome == Ok("mine")


# ---------------------------------------------------------------------- attach and detach


async def test_servers_are_attached_and_detached_while_a_runtime_works(
    place: Place, stub: Stub, tmp_path: Path
) -> None:
    other = Stub(tmp_path, "other")
    async with runtime_with(place, quiet()) as runtime:
        session = await runtime.session("s")
        before = await session.run("go")
        await runtime.mcp.attach(stub.server())
        await runtime.mcp.attach(other.server())
        with pytest.raises(InvalidDefinition, match="two MCP servers are named 'stub'"):
            await runtime.mcp.attach(stub.server())
        during = await session.run("go")
        await runtime.mcp.detach("stub")
        after = await session.run("go")
        with pytest.raises(InvalidInput, match="there is no MCP server 'stub'; attached: other"):
            await runtime.mcp.detach("stub")

    assert [before.text, during.text, after.text] == ["none", "mcp__stub__echo, mcp__other__echo", "mcp__other__echo"]


async def test_detached_server_ends_though_it_will_not_leave(place: Place, stub: Stub, tmp_path: Path) -> None:
    stub.does(stubborn=True, tools=["hang"])
    async with runtime_with(place, agent_calling("mcp__stub__hang"), stub.server()) as runtime:
        receipt = await (await runtime.session("s")).send("go")
        await until(lambda: stub.ledger)
        await runtime.mcp.detach("stub")
        left = servers_in(tmp_path)
        result = await receipt.result()

    assert left == []
    assert isinstance(result.tool_calls[0].outcome, OutcomeUnknown)


async def test_call_of_a_server_that_is_down_fails_and_sends_nothing(place: Place, stub: Stub, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with runtime_with(place, agent_calling("mcp__stub__echo"), stub.server(), clock=clock) as runtime:
        await runtime.mcp.ready()
        for pid in servers_in(tmp_path):
            os.kill(pid, signal.SIGKILL)
        await status_of(runtime, "down")
        result = await (await runtime.session("s")).run("go")

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "mcp_unavailable"
    assert "nothing was sent" in outcome.message
    assert stub.ledger == []
    assert result.text == "done"


async def test_dead_server_harms_no_other_session(place: Place, stub: Stub, tmp_path: Path) -> None:
    other = Stub(tmp_path, "other")
    stub.does(tools=["die"])
    agents = [
        agent_calling("mcp__stub__die", name="one"),
        agent_calling("mcp__other__echo", {"text": "hi"}, name="two"),
    ]
    async with place.runtime(*agents, mcp=[stub.server(), other.server()]) as runtime:
        one, two = await runtime.session("a", agent="one"), await runtime.session("b", agent="two")
        results = await asyncio.gather(one.run("go"), *[two.run("go") for _ in range(5)])

    assert isinstance(results[0].tool_calls[0].outcome, OutcomeUnknown)
    assert [each.tool_calls[0].outcome for each in results[1:]] == [Ok("hi")] * 5


async def test_new_list_is_offered_to_the_next_turn(place: Place, stub: Stub) -> None:
    stub.does(tools=["changes"], version="2025-11-25")
    seen: list[list[str]] = []

    def model(request: ModelRequest) -> Any:
        seen.append([spec.name for spec in request.tools])
        return "done"

    async with runtime_with(place, Agent(FunctionModel(model), name="a"), stub.server(pin=False)) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        stub.does(tools=["changes", "echo"])
        connection = runtime.mcp.attached["stub"].connection
        await (await connection.client()).session.call_tool("changes", {})
        await until(lambda: len(runtime.mcp.status()[0].tools) == 2)
        await session.run("go")

    assert seen == [["mcp__stub__changes"], ["mcp__stub__changes", "mcp__stub__echo"]]


async def test_runtime_without_servers_says_how_to_have_some(place: Place) -> None:
    async with place.runtime(quiet()) as runtime:
        with pytest.raises(InvalidInput, match="give it mcp="):
            runtime.mcp.status()


async def test_leaving_ends_servers_that_are_just_starting(place: Place, stub: Stub, tmp_path: Path) -> None:
    stub.does(hang=["server/discover"], stubborn=True)
    async with runtime_with(place, quiet(), stub.server()):
        await until(lambda: servers_in(tmp_path))

    assert servers_in(tmp_path) == []


def test_sdk_is_imported_only_where_there_are_servers() -> None:
    import subprocess

    program = (
        "import sys, perdure.mcp; perdure.mcp.McpServer('a', command=['b']); "
        "sys.exit(any(name in sys.modules for name in ('mcp', 'mcp_types', 'pydantic', 'anyio', 'httpx2')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
