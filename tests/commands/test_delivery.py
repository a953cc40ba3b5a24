"""What a command writes and how it ended reach its session once and in order, wherever its Runtime is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, ToolCall, ToolContext, tool
from perdure.builtin.processes import process_tools
from perdure.model.monitor import MonitorSpec, Watch
from perdure.testing import FunctionModel
from tests.commands import told
from tests.kit import SOON, crash, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


@pytest.mark.kill
@pytest.mark.parametrize("point", [f"{when} {step}" for step in told.STEPS for when in ("before", "after")])
async def test_killed_anywhere_a_line_and_the_end_are_told_once_and_in_order(store: Path, point: str) -> None:
    program = [sys.executable, "-m", "tests.commands.told", str(store), point]
    died = await asyncio.to_thread(subprocess.run, program, cwd=ROOT, timeout=SOON, check=False)
    assert died.returncode == -9

    async with Runtime(store, agents=[told.agent()]) as runtime:
        session = await runtime.session("chat")
        result: Any = await runtime.handle("chat.command.c").result(SOON)
        assert await runtime.wait_idle(SOON)
        heard = "\n".join([message.text for message in await session.history() if message.role == "user"])

    assert result.exit_code == 3
    assert (heard.count("> FAILED one"), heard.count(" completed]")) == (1, 1)
    assert heard.index("> FAILED one") < heard.index(" completed]")


# ---------------------------------------------------------------------- a turn that waits


def gated(gate: Path, then: str) -> list[str]:
    return ["sh", "-c", f"until [ -e '{gate}' ]; do sleep 0.02; done; {then}"]


async def test_turn_waits_for_a_command_without_a_token_and_goes_on_after_a_crash(store: Path, tmp_path: Path) -> None:
    """The tool's body runs again, and finds the command that its first attempt began."""
    go, asked = tmp_path / "go", list[str]()

    @tool(recovery="rerun")
    async def build(ctx: ToolContext[Any]) -> str:
        """Build it."""
        return (await (await ctx.command(gated(go, f"echo run >> {tmp_path / 'runs'}; echo built"))).result()).stdout

    def answer(request: ModelRequest) -> Any:
        asked.append(request.messages[-1].role)
        return "Done." if request.messages[-1].role == "tool" else [ToolCall("c1", "build")]

    first = Runtime(store, agents=[Agent(FunctionModel(answer), name="builder", tools=[build])])
    await first.__aenter__()
    receipt = await (await first.session("chat")).send("build it")
    await until(lambda: any(Path(f"{store}-jobs").glob("*/started")))
    await crash(first)
    assert asked == ["user"]

    async with Runtime(store, agents=[Agent(FunctionModel(answer), name="builder", tools=[build])]) as runtime:
        go.touch()
        result = await (await runtime.session("chat")).result(receipt.turn_id)

    assert (result.text, result.tool_calls[0].value) == ("Done.", "built\n")
    assert asked == ["user", "tool"]
    assert (tmp_path / "runs").read_text() == "run\n"


async def test_model_waits_for_the_handle_of_a_command_and_is_not_woken_for_it(store: Path, tmp_path: Path) -> None:
    go, asked, handles = tmp_path / "go", list[str](), list[Any]()

    @tool
    async def build(ctx: ToolContext[Any]) -> Any:
        """Begin to build it."""
        handles.append((await ctx.command(gated(go, "echo built"), owner="session", wake="turn")).to_json())
        return handles[0]

    def answer(request: ModelRequest) -> Any:
        asked.append(request.messages[-1].role)
        if len(asked) == 1:
            return [ToolCall("c1", "build")]
        if len(asked) == 2:
            go.touch()
            return [ToolCall("c2", "await_process", {"handle": handles[0]})]
        return "Done."

    agent = Agent(FunctionModel(answer), name="builder", tools=[build, *process_tools()])
    async with Runtime(store, agents=[agent]) as runtime:
        session = await runtime.session("chat")
        result = await session.run("build it")
        assert await runtime.wait_idle(SOON)

    assert result.text == "Done."
    assert result.tool_calls[1].value["stdout"] == "built\n"
    assert asked == ["user", "tool", "tool"]


async def test_session_hears_of_a_command_that_its_tool_has_watched(store: Path) -> None:
    """Without wake=: who watches lines wants them told."""
    heard: list[str] = []

    @tool
    async def test(ctx: ToolContext[Any]) -> Any:
        """Begin the tests."""
        return (await ctx.command(["echo", "FAILED one"], watch=Watch(match=("FAILED",)))).to_json()

    def answer(request: ModelRequest) -> Any:
        last = request.messages[-1]
        heard.append(last.text)
        return [ToolCall("c1", "test")] if last.text == "test it" else "I see."

    async with Runtime(store, agents=[Agent(FunctionModel(answer), name="ear", tools=[test])]) as runtime:
        result = await (await runtime.session("chat")).run("test it")
        await runtime.handle(result.tool_calls[0].value).result(SOON)
        assert await runtime.wait_idle(SOON)

    told = "\n".join(heard)
    assert (told.count("> FAILED one"), told.count(" completed]")) == (1, 1)


async def test_tool_starts_a_monitor_for_its_session(store: Path) -> None:
    heard: list[str] = []

    @tool
    async def follow(ctx: ToolContext[Any]) -> str:
        """Follow the log."""
        spec = MonitorSpec("log", ["echo", "line"], batch=0.02)
        await ctx.host.start_process(spec, key="log", wake="turn")
        return "following"

    def answer(request: ModelRequest) -> Any:
        last = request.messages[-1]
        heard.append(last.text)
        return [ToolCall("c1", "follow")] if last.text == "follow it" else "I see."

    async with Runtime(store, agents=[Agent(FunctionModel(answer), name="ear", tools=[follow])]) as runtime:
        await (await runtime.session("chat")).run("follow it")
        await until(lambda: any("monitor log" in text and "completed]" in text for text in heard))

    (lines,) = [text for text in heard if "> line" in text]
    assert "asked for by call chat.1.1.0" in lines
