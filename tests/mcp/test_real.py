"""Servers of others, as they are installed from PyPI: driven for real, and killed in the middle of a call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ToolCall
from perdure.mcp import McpServer
from perdure.model.event import ToolStarted
from perdure.model.llm import ModelRequest
from perdure.model.tool import Failed, Ok, OutcomeUnknown
from perdure.testing import FunctionModel
from tests import programs
from tests.kit import Place, until


@pytest.fixture(autouse=True)
def needs_git() -> None:
    programs.git()  # the server for git runs it


def in_turn(*calls: tuple[str, dict[str, Any]]) -> Agent[str]:
    """Makes these calls one after the other."""

    def model(request: ModelRequest) -> Any:
        done = sum(message.role == "tool" for message in request.messages)
        if done == len(calls):
            return "done"
        name, args = calls[done]
        return [ToolCall(str(done), name, args)]

    return Agent(FunctionModel(model), name="a")


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "hello.txt").write_text("hello\n")
    git(folder, "add", "hello.txt")
    git(folder, "commit", "-qm", "Say hello")
    (folder / "hello.txt").write_text("hello, world\n")
    return folder


ASKING = """
from typing import Annotated
from mcp.server import MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import BaseModel

server = MCPServer("hotel")

class When(BaseModel):
    hour: int

async def when(room: str) -> Elicit[When]:
    return Elicit("When?", When)

@server.tool()
async def book(room: str, at: Annotated[When, Resolve(when)]) -> str:
    return f"{room} at {at.hour}"

server.run()
"""


async def test_question_of_a_server_that_was_started_again_is_over_and_may_be_asked_again(tmp_path: Path) -> None:
    """Unless it is given a key, a server of the SDK seals what it asks with one of its process."""
    (tmp_path / "hotel.py").write_text(ASKING)
    hotel = McpServer("hotel", command=[sys.executable, str(tmp_path / "hotel.py")], start_timeout=120)
    agent = in_turn(*[("mcp__hotel__book", {"room": "blue"})] * 2)
    place = Place("sqlite", tmp_path)
    async with place.runtime(agent, mcp=[hotel]) as runtime:
        parked = await (await runtime.session("s")).run("go")
    async with place.runtime(agent, mcp=[hotel]) as runtime:
        session = await runtime.session("s")
        await session.answer(parked.pending[0].call_id, {"hour": 7})
        await until(session.pending)
        await session.answer((await session.pending())[0].call_id, {"hour": 9})
        result = await session.result(parked.turn_id)

    over, again = result.tool_calls
    assert isinstance(over.outcome, Failed)
    assert over.outcome.code == "mcp_question_over"
    assert again.value == {"result": "blue at 9"}


async def test_two_servers_work_and_one_is_killed_in_mid_call(tmp_path: Path, repository: Path) -> None:
    python, repo = sys.executable, str(repository)
    servers = [
        McpServer("time", command=[python, "-m", "mcp_server_time", "--local-timezone", "UTC"], start_timeout=120),
        McpServer("git", command=[python, "-m", "mcp_server_git", "--repository", repo], start_timeout=120),
    ]
    convert = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    agent = in_turn(
        ("mcp__time__convert_time", convert),
        ("mcp__git__git_status", {"repo_path": repo}),
        ("mcp__git__git_add", {"repo_path": repo, "files": ["hello.txt"]}),
        ("mcp__git__git_diff_staged", {"repo_path": repo}),
    )
    async with Place("sqlite", tmp_path).runtime(agent, mcp=servers) as runtime:
        result = await (await runtime.session("work")).run("go")
        session = await runtime.session("killed")
        pid = runtime.mcp.attached["git"].connection.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it takes the call, and does not get to answer
        broken = []
        async with session.stream("go") as turn:
            async for event in turn:
                if isinstance(event, ToolStarted) and event.tool == "mcp__git__git_status":
                    os.kill(pid, signal.SIGKILL)
            broken = (await turn.result()).tool_calls
        await until(lambda: (runtime.mcp.status()[1].starts, runtime.mcp.status()[1].state) == (2, "ready"))
        after = await (await runtime.session("after")).run("go")

    assert [type(call.outcome) for call in result.tool_calls] == [Ok] * 4
    assert "21:00" in str(result.tool_calls[0].value)
    assert "hello.txt" in str(result.tool_calls[1].value)
    assert "+hello, world" in str(result.tool_calls[3].value)
    assert type(broken[0].outcome) is Ok  # the other server is not concerned
    assert isinstance(broken[1].outcome, OutcomeUnknown)
    assert [type(call.outcome) for call in after.tool_calls] == [Ok] * 4
