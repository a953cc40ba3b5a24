"""Starting what this Runtime lacks: an object is refused, a name is for a worker that has it."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, ProcessContext, process
from perdure.errors import InvalidProcess
from perdure.testing import ScriptedModel
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


async def test_name_that_no_worker_has_or_had_is_refused_where_others_are_published(file: Place) -> None:
    clerk = Agent(ScriptedModel([]), name="clerk")
    async with file.runtime(clerk, processes=[doubled, careful]), file.runtime() as front:
        with pytest.raises(InvalidProcess, match=r"no worker on this store has 'doubeld'.* doubled, careful, clerk"):
            await front.start("doubeld", {"n": 2})
        with pytest.raises(InvalidProcess, match="no worker on this store has 'clrek'"):
            await (await front.session("s", agent="clerk")).start("clrek", {"input": "hello"})

        assert await front.processes.list() == []


async def test_name_that_the_store_has_seen_waits_for_its_workers_while_others_are_published(file: Place) -> None:
    async with file.runtime(processes=[doubled]) as runtime:
        await (await runtime.start(doubled, {"n": 1})).result(SOON)
    async with file.runtime(processes=[careful]), file.runtime() as front:
        handle = await front.start("doubled", {"n": 2})
        status = await handle.status()
        async with file.runtime(processes=[doubled]):
            assert await handle.result(SOON) == 4

    assert status == "queued"


async def test_signals_that_a_published_function_does_not_declare_are_refused(file: Place) -> None:
    async with file.runtime(processes=[careful, doubled]) as worker, file.runtime() as front:
        handle = await front.start("careful", id="c")
        with pytest.raises(InvalidProcess, match="stop"):
            await handle.signal("stop")
        with pytest.raises(InvalidProcess, match="does not fit"):
            await handle.signal("go", "seven")
        await until(lambda: _waits(worker))
        await handle.signal("go", 7)
        result = await handle.result(SOON)
        open_to_all = (await (await front.start("doubled", {"n": 2})).record()).registration.open_signals

    assert (result, open_to_all) == (7, True)


async def test_process_is_the_same_whoever_starts_it(file: Place) -> None:
    async with file.runtime(processes=[careful]) as worker, file.runtime() as front:
        by_name = await front.start("careful", id="c")
        by_function = await worker.start(careful, id="c")
        await by_name.signal("go", 1)

        assert await by_function.result(SOON) == 1
        assert len(await front.processes.list()) == 1


async def test_function_that_may_be_attempted_so_often_is_also_where_it_is_started_by_name(file: Place) -> None:
    @process(max_attempts=2)
    async def rare(ctx: Ctx) -> None: ...

    async with file.runtime(processes=[rare]), file.runtime() as front:
        handle = await front.start("rare")

        assert (await handle.record()).registration.max_attempts == 2


@pytest.mark.parametrize("name", ["", "no such thing", "a/b", "x" * 200])
async def test_what_no_function_can_be_called_is_refused(name: str, place: Place) -> None:
    async with place.runtime() as front:
        with pytest.raises(InvalidProcess):
            await front.start(name)
