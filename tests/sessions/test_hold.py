"""A turn whose model answers while commands of it run is held until they end, where its agent says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mainstay import Agent, ModelRequest, Runtime, ToolCall, ToolContext, tool
from mainstay.errors import InvalidDefinition
from mainstay.testing import FunctionModel
from tests.kit import SOON, crash, until


class Model:
    """Starts a command, and answers whatever comes then."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __call__(self, request: ModelRequest) -> str | list[ToolCall]:
        last = request.messages[-1]
        self.heard.append(last.text)
        if len(self.heard) == 1:
            return [ToolCall("c", "build", {})]
        return "I will wait" if last.role == "tool" else f"answer {len(self.heard)}"


@tool
async def build(ctx: ToolContext[Any]) -> dict[str, str]:
    script = "while ! [ -e go ]; do sleep 0.01; done; echo '[process x]'; echo made it; exit 3"
    return (await ctx.command(["sh", "-c", script], cwd=ctx.deps, **OPTIONS)).to_json()


OPTIONS: dict[str, Any] = {"owner": "turn", "wake": "turn"}


def opened(folder: Path, model: Model, seconds: float | None = 600) -> Runtime:
    agent = Agent(FunctionModel(model), name="builder", tools=[build], wait_for_commands=seconds)
    return Runtime(folder / "agent.db", agents=[agent], deps=str(folder))


async def is_parked(runtime: Runtime) -> bool:
    row = await runtime.store.session("chat")
    return row is not None and row.state == "parked" and "chat" not in runtime._turns.cache.tasks


async def test_a_turn_is_held_until_its_command_has_ended_and_the_model_is_told_once(tmp_path: Path) -> None:
    model = Model()
    async with opened(tmp_path, model) as runtime:
        session = await runtime.session("chat")
        result = asyncio.create_task(session.run("make it"))
        await until(lambda: is_parked(runtime))
        asked = len(model.heard)
        (tmp_path / "go").touch()
        ended = await asyncio.wait_for(result, SOON)
        await runtime.wait_idle(SOON)

    told = model.heard[2].splitlines()
    assert asked == 2
    assert ended.text == "answer 3"
    assert len(model.heard) == 3
    assert told[0].startswith("[process commands]")
    assert "has ended: exited 3" in told[1]
    assert told[2:] == ["stdout:", "> [process x]", "> made it"]


async def test_without_it_the_turn_ends_and_its_command_with_it(tmp_path: Path) -> None:
    model = Model()
    async with opened(tmp_path, model, None) as runtime:
        ended = await asyncio.wait_for((await runtime.session("chat")).run("make it"), SOON)
        await runtime.wait_idle(SOON)

    assert ended.text == "I will wait"


async def test_a_held_turn_goes_on_after_a_crash_also_if_its_command_ended_meanwhile(tmp_path: Path) -> None:
    model = Model()
    first = opened(tmp_path, model)
    await first.__aenter__()
    receipt = await (await first.session("chat")).send("make it")
    await until(lambda: is_parked(first))
    await crash(first)
    (tmp_path / "go").touch()
    async with opened(tmp_path, model) as second:
        ended = await asyncio.wait_for((await second.session("chat")).result(receipt.turn_id), SOON)

    assert ended.text == "answer 3"
    assert "exited 3" in model.heard[2]


async def test_what_is_said_comes_before_the_command(tmp_path: Path) -> None:
    model = Model()
    async with opened(tmp_path, model) as runtime:
        session = await runtime.session("chat")
        result = asyncio.create_task(session.run("make it"))
        await until(lambda: is_parked(runtime))
        await session.steer("how far are you?")
        await until(lambda: len(model.heard) == 3)
        await until(lambda: is_parked(runtime))  # the answer to that is no end either
        (tmp_path / "go").touch()
        ended = await asyncio.wait_for(result, SOON)

    assert model.heard[2] == "how far are you?"
    assert "exited 3" in model.heard[3]
    assert ended.text == "answer 4"


async def test_when_its_time_is_over_the_model_is_told_and_the_turn_ends(tmp_path: Path) -> None:
    model = Model()
    async with opened(tmp_path, model, 0.3) as runtime:
        ended = await asyncio.wait_for((await runtime.session("chat")).run("make it"), SOON)
        await runtime.wait_idle(SOON)

    late = [text for text in model.heard if "is not waited for any longer" in text]
    assert len(late) <= 1  # a slow machine may take so long to start it that nothing is held at all
    assert ended.text == ("answer 3" if late else "I will wait")


async def test_a_cancel_ends_a_held_turn_and_its_command(tmp_path: Path) -> None:
    model = Model()
    async with opened(tmp_path, model) as runtime:
        session = await runtime.session("chat")
        result = asyncio.create_task(session.run("make it"))
        await until(lambda: is_parked(runtime))
        await session.cancel("enough")
        ended = await asyncio.wait_for(result, SOON)
        await runtime.handle("chat.1.1.0.1").result(SOON)

    assert type(ended.outcome).__name__ == "Cancelled"


def test_seconds_are_seconds() -> None:
    with pytest.raises(InvalidDefinition, match="wait_for_commands"):
        Agent(wait_for_commands=-1)
