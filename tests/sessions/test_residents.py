"""What a Runtime keeps of idle sessions in memory: bounded in bytes, and read again when it is needed."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, ToolCall, tool
from perdure.errors import InvalidDefinition
from perdure.testing import FunctionModel

WORDS = "x" * 50_000


def model(request: ModelRequest) -> str:
    return f"{sum(message.role == 'user' for message in request.messages)} {WORDS}"


def kept(runtime: Runtime) -> list[str]:
    return [resident.session_id for resident in runtime._turns.cache.all() if resident.view is not None]


async def test_idle_sessions_are_kept_up_to_so_many_bytes_and_go_on_all_the_same(tmp_path: Any) -> None:
    agent = Agent(FunctionModel(model))
    async with Runtime(tmp_path / "x.db", agents=[agent], cache_bytes=350_000) as runtime:
        for number in range(6):
            await (await runtime.session(f"s{number}")).run(WORDS)

        assert kept(runtime) == ["s3", "s4", "s5"]
        assert runtime._turns.cache.cached <= 350_000
        assert (await (await runtime.session("s0")).run("again")).text.startswith("2 ")
        assert kept(runtime)[-1] == "s0"


async def test_reading_histories_is_bounded_too(tmp_path: Any) -> None:
    agent = Agent(FunctionModel(model))
    async with Runtime(tmp_path / "x.db", agents=[agent], cache_bytes=350_000) as runtime:
        for number in range(6):
            await (await runtime.session(f"s{number}")).run(WORDS)
        for number in range(6):
            assert len(await (await runtime.session(f"s{number}")).history()) == 2

        assert kept(runtime) == ["s3", "s4", "s5"]


async def test_a_session_heavier_than_all_that_may_be_kept_is_read_every_time(tmp_path: Any) -> None:
    async with Runtime(tmp_path / "x.db", agents=[Agent(FunctionModel(model))], cache_bytes=0) as runtime:
        session = await runtime.session("s")
        assert (await session.run(WORDS)).text.startswith("1 ")
        assert (await session.run(WORDS)).text.startswith("2 ")

        assert kept(runtime) == []
        assert len(await session.history()) == 4


async def test_values_of_tools_weigh_too(tmp_path: Any) -> None:
    @tool
    def fetch() -> list[str]:
        return [WORDS]

    def asks(request: ModelRequest) -> str | list[ToolCall]:
        return "done" if request.messages[-1].role == "tool" else [ToolCall(name="fetch")]

    async with Runtime(tmp_path / "x.db", agents=[Agent(FunctionModel(asks), tools=[fetch])]) as runtime:
        await (await runtime.session("s")).run("go")

        assert runtime._turns.cache.cached > 10_000


def test_a_limit_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidDefinition, match="cache_bytes"):
        Runtime("memory", cache_bytes=-1)
