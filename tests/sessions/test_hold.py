"""A turn whose model answers while commands of it run is held until they end, where its agent says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, ToolCall, ToolContext, tool
from perdure.errors import InvalidDefinition, InvalidInput
from perdure.model.command import CommandHold
from perdure.model.session import CancelRequest
from perdure.testing import FunctionModel, VirtualClock
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


def opened(folder: Path, model: Model, rule: float | CommandHold | None = 600) -> Runtime:
    agent = Agent(FunctionModel(model), name="builder", tools=[build], wait_for_commands=rule)
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
    assert all("it ends with your turn" in text for text in late)
    assert len(late) <= 1  # a slow machine may take so long to start it that nothing is held at all
    assert ended.text == ("answer 3" if late else "I will wait")


CHATTY = "echo one; while ! [ -e more ]; do sleep 0.01; done; echo two >&2; while ! [ -e go ]; do sleep 0.01; done"


@tool
async def chatty(ctx: ToolContext[Any]) -> dict[str, str]:
    return (await ctx.command(["sh", "-c", CHATTY], cwd=ctx.deps, owner="turn")).to_json()


class Chatty(Model):
    def __call__(self, request: ModelRequest) -> str | list[ToolCall]:
        answer = super().__call__(request)
        return [ToolCall("c", "chatty", {})] if isinstance(answer, list) else answer


async def test_the_model_is_shown_what_a_command_has_written_since_and_nothing_twice(tmp_path: Path) -> None:
    model, clock = Chatty(), VirtualClock()
    agent = Agent(FunctionModel(model), name="builder", tools=[chatty], wait_for_commands=900)
    async with Runtime(tmp_path / "agent.db", agents=[agent], deps=str(tmp_path), clock=clock) as runtime:
        result = asyncio.create_task((await runtime.session("chat")).run("make it"))

        async def has_written(stream: str) -> bool:
            files = list((tmp_path / "agent.db-jobs").glob(f"*/{stream}"))
            return bool(files) and files[0].stat().st_size > 0

        await until(lambda: is_parked(runtime))
        await until(lambda: has_written("stdout"))
        clock.advance(30)
        await until(lambda: len(model.heard) == 3)
        await until(lambda: is_parked(runtime))
        (tmp_path / "more").touch()
        await until(lambda: len(model.heard) == 4)  # at once: it is the first on stderr
        await until(lambda: is_parked(runtime))
        clock.advance(60)  # a look that finds nothing new asks nobody
        await until(lambda: is_looked_at(runtime, 4))
        await until(lambda: is_parked(runtime))
        (tmp_path / "go").touch()
        ended = await asyncio.wait_for(result, SOON)

    first, second = model.heard[2].splitlines(), model.heard[3].splitlines()
    assert first[2:4] == ["stdout:", "> one"]
    assert "the next update is in 60 seconds at the earliest" in first[4]
    assert second[2:4] == ["stderr:", "> two"]
    assert "in 60 seconds" in second[4]
    assert "has ended: exited 0" in model.heard[4]
    assert (ended.text, len(model.heard)) == ("answer 5", 5)


async def test_an_update_that_a_crash_kept_from_the_model_is_told_again_as_it_was(tmp_path: Path) -> None:
    model, clock, asked = Chatty(), VirtualClock(), asyncio.Event()

    async def never(request: ModelRequest) -> str | list[ToolCall]:
        answer = model(request)
        if len(model.heard) == 3:
            asked.set()
            await asyncio.Event().wait()
        return answer

    def runtime_of(answer: Any) -> Runtime:
        agent = Agent(FunctionModel(answer), name="builder", tools=[chatty], wait_for_commands=900)
        return Runtime(tmp_path / "agent.db", agents=[agent], deps=str(tmp_path), clock=clock)

    first = runtime_of(never)
    await first.__aenter__()
    receipt = await (await first.session("chat")).send("make it")
    await until(lambda: is_parked(first))
    await until(lambda: any(each.stat().st_size for each in (tmp_path / "agent.db-jobs").glob("*/stdout")))
    clock.advance(30)
    await asyncio.wait_for(asked.wait(), SOON)
    await crash(first)
    (tmp_path / "more").touch()
    await until(lambda: any(each.stat().st_size for each in (tmp_path / "agent.db-jobs").glob("*/stderr")))
    async with runtime_of(model) as second:
        await until(lambda: len(model.heard) == 5)
        await until(lambda: is_parked(second))
        (tmp_path / "go").touch()
        ended = await asyncio.wait_for((await second.session("chat")).result(receipt.turn_id), SOON)

    assert model.heard[3] == model.heard[2]
    assert "> two" in model.heard[4]
    assert "has ended: exited 0" in model.heard[5]
    assert ended.text == "answer 6"


async def is_looked_at(runtime: Runtime, step: int) -> bool:
    """Whether the turn was held a second time since the model's answer of this step."""
    return await runtime.store.wait(f"chat.1.{step}.0:process#2") is not None


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


async def test_a_command_whose_time_is_over_is_ended_where_the_agent_says_so(tmp_path: Path) -> None:
    model = Model()
    rule = CommandHold(0.3, at_limit="cancel")
    async with opened(tmp_path, model, rule) as runtime:
        ended = await asyncio.wait_for((await runtime.session("chat")).run("make it"), SOON)
        command = await runtime.handle("chat.1.1.0.1").record()

    assert "has ended: killed" in model.heard[2]
    assert (ended.text, command.record.cancel) == (
        "answer 3",
        CancelRequest("hold", "its turn was held for it for 0.3 seconds"),
    )


async def test_a_turn_is_held_no_longer_for_a_command_that_is_released(tmp_path: Path) -> None:
    model = Model()
    async with opened(tmp_path, model) as runtime:
        result = asyncio.create_task((await runtime.session("chat")).run("make it"))
        await until(lambda: is_parked(runtime))
        await runtime.handle("chat.1.1.0.1").signal("release")
        ended = await asyncio.wait_for(result, SOON)

    assert (ended.text, len(model.heard)) == ("I will wait", 2)


async def test_a_command_for_which_no_turn_is_held_cannot_be_released(tmp_path: Path) -> None:
    async with opened(tmp_path, Model()) as runtime:
        handle = await runtime.command(["sleep", "600"])
        with pytest.raises(InvalidInput, match="release"):
            await handle.signal("release")
        await handle.cancel()
        await handle.result()


@pytest.mark.parametrize("rule", [-1, "long", CommandHold])
def test_seconds_are_seconds(rule: Any) -> None:
    with pytest.raises(InvalidDefinition, match="wait_for_commands"):
        Agent(wait_for_commands=rule)


def test_what_is_done_at_the_limit_is_one_of_two() -> None:
    limit: Any = "explode"
    with pytest.raises(InvalidDefinition, match="at_limit='explode' is not usable: give one of release, cancel"):
        CommandHold(1, limit)
