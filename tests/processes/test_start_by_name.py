"""Starting what this Runtime lacks: an object is refused, a name is for a worker that has it."""

from __future__ import annotations

from typing import Any

import pytest

from mainstay import Agent, ProcessContext, process
from mainstay.errors import InvalidProcess
from mainstay.testing import ScriptedModel
from tests.kit import SOON, Place, until

Ctx = ProcessContext[Any]


@process
async def doubled(ctx: Ctx, n: int) -> int:
    return 2 * n


@process(version="2", signals={"go": int}, events=["half_way"])
async def careful(ctx: Ctx) -> Any:
    await ctx.emit("half_way")
    return await ctx.wait_signal("go")


async def test_function_that_this_runtime_lacks_is_refused_as_an_object(place: Place) -> None:
    async with place.runtime() as front:
        with pytest.raises(InvalidProcess, match=r"pass it in `processes=\[…\]`, or start it by its name 'doubled'"):
            await front.start(doubled, {"n": 2})

        assert await front.processes.list() == []


async def test_name_is_taken_for_a_worker_that_comes_later(place: Place) -> None:
    async with place.runtime() as front:
        handle = await front.start("doubled", {"n": 2}, id="d")
        assert await handle.status() == "queued"
    async with place.runtime(processes=[doubled]) as runtime:
        assert await runtime.handle("d").result(SOON) == 4


async def test_name_is_pinned_to_the_version_that_a_living_worker_has(file: Place) -> None:
    async with file.runtime(processes=[doubled, careful]) as worker, file.runtime() as front:
        handle = await front.start("careful", id="c")
        await until(lambda: _waits(worker))
        await handle.signal("go", 7)

        assert await handle.result(SOON) == 7
        assert (await handle.record()).registration.definition == "careful@2"
        assert "half_way" in [event.type async for event in handle.events()]


async def _waits(worker: Any) -> bool:
    return bool((await worker.processes.get("c")).status == "waiting")


async def test_agent_of_a_living_worker_is_started_by_name(file: Place) -> None:
    clerk = Agent(ScriptedModel(["done"]), name="clerk")
    async with file.runtime(clerk), file.runtime() as front:
        handle = await front.start("clerk", {"input": "hello"})

        assert await handle.result(SOON) == "done"


async def test_runtime_with_definitions_takes_only_names_that_a_living_worker_has(file: Place) -> None:
    async with file.runtime(processes=[careful]) as runtime:
        with pytest.raises(InvalidProcess, match="or the name of one that a worker on this store has"):
            await runtime.start("doubeld", {"n": 2})
        async with file.runtime(processes=[doubled]):
            assert await (await runtime.start("doubled", {"n": 2})).result(SOON) == 4


@pytest.mark.parametrize("name", ["", "no such thing", "a/b", "x" * 200])
async def test_what_no_function_can_be_called_is_refused(name: str, place: Place) -> None:
    async with place.runtime() as front:
        with pytest.raises(InvalidProcess):
            await front.start(name)
