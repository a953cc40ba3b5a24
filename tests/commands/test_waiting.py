"""Turns that are parked while a command runs, and what a Runtime that waits to be idle waits for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from perdure import Agent, ModelRequest, Runtime, ToolCall, ToolContext, tool
from perdure.testing import FunctionModel
from tests.kit import SOON, crash, until

UNTIL_TOLD = "while ! [ -e go ]; do sleep 0.01; done; echo made it; exit 3"


@tool(recovery="rerun")
async def build(ctx: ToolContext[Any]) -> str:
    job = await ctx.command(["sh", "-c", UNTIL_TOLD], cwd=ctx.deps)
    how = await ctx.wait_ended(job)
    result = await job.result()
    return f"{how} {result.exit_code} {result.stdout}"


def answer(request: ModelRequest) -> str | list[ToolCall]:
    last = request.messages[-1]
    return str(last.tool_results[0].content) if last.role == "tool" else [ToolCall("c", "build", {})]


def opened(folder: Path) -> Runtime:
    agent = Agent(FunctionModel(answer), name="builder", tools=[build])
    return Runtime(folder / "agent.db", agents=[agent], deps=str(folder), park_after=0)


async def is_parked(runtime: Runtime) -> bool:
    row = await runtime.store.session("chat")
    return row is not None and row.state == "parked" and "chat" not in runtime._turns.cache.tasks


async def test_a_turn_that_waits_for_a_command_goes_on_after_a_crash_with_its_exit_code(tmp_path: Path) -> None:
    first = opened(tmp_path)
    await first.__aenter__()
    receipt = await (await first.session("chat")).send("make it")
    await until(lambda: is_parked(first))
    await crash(first)
    (tmp_path / "go").touch()
    async with opened(tmp_path) as second:
        result = await asyncio.wait_for((await second.session("chat")).result(receipt.turn_id), SOON)

    [call] = result.tool_calls
    assert result.text == "ended 3 made it\n"
    assert (call.attempts, call.repeated) == (1, 0)


async def test_a_command_that_nothing_waits_for_does_not_keep_a_runtime_busy(tmp_path: Path) -> None:
    async with opened(tmp_path) as runtime:
        server = await runtime.command(["sleep", "100000"])
        idle = await runtime.wait_idle(SOON)
        status = await server.status()
        await server.cancel("enough")
        await server.result(SOON)

    assert (idle, status) == (True, "running")


async def test_a_command_whose_end_a_session_hears_of_is_waited_for(tmp_path: Path) -> None:
    heard: list[str] = []

    def hear(request: ModelRequest) -> str:
        heard.append(request.messages[-1].text)
        return "heard"

    agent = Agent(FunctionModel(hear), name="builder")
    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        job = await session.command(["sh", "-c", UNTIL_TOLD], cwd=str(tmp_path), wake="turn")
        busy = await runtime.wait_idle(0.2)
        (tmp_path / "go").touch()
        idle = await runtime.wait_idle(SOON)

    assert (busy, idle, len(heard)) == (False, True, 1)
    assert job.id in heard[0]
