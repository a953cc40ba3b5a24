"""Tasks of plugins: long work that is a process. Calling one returns its handle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, Plugin, Runtime
from perdure.errors import InvalidArguments, InvalidDefinition, MissingSession
from perdure.model.plugin import PluginSnapshot
from perdure.model.process import Abandoned, Cancelled, Failure, SessionOrigin
from perdure.plugins import SessionContext, SnapshotReader, SnapshotWriter
from perdure.plugins.operations import QueueTurn, Result, TaskContext, command, query, task
from tests.kit import SOON, Place, crash, texts, until
from tests.sessions.test_wakes import Ear


class Crawler(Plugin):
    """Counts pages, for a session or for nobody."""

    id = "crawler"

    def __init__(self, world: World | None = None) -> None:
        self.world, self.pages, self.changes = world or World(), 0, 0

    def for_session(self, ctx: SessionContext) -> Crawler:
        return Crawler(self.world)

    @property
    def revision(self) -> int:
        return self.changes

    def snapshot(self, writer: SnapshotWriter) -> int:
        return self.pages

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        self.pages = snapshot.state or 0

    @task
    async def crawl(self, pages: int, ctx: TaskContext) -> int:
        """Fetch pages."""
        self.world.begun.append((ctx.process_id, ctx.attempt))
        ctx.progress({"of": pages})
        await self.world.go.wait()
        self.pages += pages
        self.changes += 1
        return self.pages

    @task(recovery="rerun", session="forbidden")
    async def again(self, ctx: TaskContext) -> str:
        """May be called twice."""
        self.world.begun.append((ctx.process_id, ctx.attempt))
        await self.world.go.wait()
        return f"attempt {ctx.attempt}"

    @task
    def speak(self, ctx: TaskContext) -> Result[str]:
        """Leads to a turn."""
        return Result("spoken", ({"said": 1},), (QueueTurn("the crawl is over"),))

    @task(session="forbidden")
    def fail(self) -> None:
        """Never works."""
        raise ValueError("no network")

    @query
    def count(self) -> int:
        """How many pages."""
        return self.pages


class World:
    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.go = asyncio.Event()


async def start(runtime: Runtime, name: str, args: Any = None, session: str | None = None) -> Any:
    outcome = await runtime.operations.call(name, args, session=session, agent="assistant")
    return runtime.handle(outcome.output)


async def test_task_is_a_process_of_its_session_and_keeps_what_it_changed(place: Place) -> None:
    world, ear = World(), Ear()
    async with place.runtime(Agent(ear.model, plugins=[Crawler(world)])) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        handle = await start(runtime, "crawler.crawl", {"pages": 3}, "chat")
        await until(lambda: len(world.begun) == 1)
        row = await handle.record()
        assert (row.status, row.registration.kind, row.registration.name) == ("running", "operation", "crawler.crawl")
        assert row.registration.origin == SessionOrigin("chat")
        assert world.begun == [(handle.id, 1)]
        assert [each.id for each in await session.processes()] == [handle.id]

        world.go.set()
        assert await handle.result(SOON) == 3
        assert (await session.call("crawler.count")).output == 3
        assert ear.heard == ["hello"]  # a task wakes nobody: it may queue a turn
    async with place.runtime(Agent(ear.model, plugins=[Crawler(world)])) as later:
        assert (await (await later.session("chat")).call("crawler.count")).output == 3


async def test_arguments_are_checked_before_anything_is_written() -> None:
    async with Runtime("memory", agents=[Agent(plugins=[Crawler()])]) as runtime:
        with pytest.raises(InvalidArguments):
            await start(runtime, "crawler.crawl", {"pages": "many"}, "chat")
        with pytest.raises(MissingSession):
            await start(runtime, "crawler.crawl", {"pages": 1})
        assert await runtime.processes.list() == []


async def test_task_without_a_session_runs_on_the_shared_plugin(place: Place) -> None:
    world = World()
    world.go.set()
    async with place.runtime(Agent(Ear().model, plugins=[Crawler(world)])) as runtime:
        assert await (await start(runtime, "crawler.again")).result(SOON) == "attempt 1"


async def test_turn_that_a_task_queues_is_a_turn(place: Place) -> None:
    ear = Ear()
    async with place.runtime(Agent(ear.model, plugins=[Crawler()])) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        assert await (await start(runtime, "crawler.speak", None, "chat")).result(SOON) == "spoken"
        assert await runtime.wait_idle(SOON)

        assert texts(await session.history()) == ["hello", "answer 1", "the crawl is over", "answer 2"]


async def test_failed_task_is_a_failed_process(place: Place) -> None:
    async with place.runtime(Agent(Ear().model, plugins=[Crawler()])) as runtime:
        outcome = await (await start(runtime, "crawler.fail")).outcome(SOON)

        assert isinstance(outcome, Failure)
        assert outcome.code == "operation_failed"
        assert "ValueError: no network" in outcome.message


async def test_task_is_cancelled_by_its_handle(place: Place) -> None:
    world = World()
    async with place.runtime(Agent(Ear().model, plugins=[Crawler(world)])) as runtime:
        handle = await start(runtime, "crawler.again")
        await until(lambda: len(world.begun) == 1)
        await handle.cancel("enough")

        assert await handle.outcome(SOON) == Cancelled("host", "enough", unknown=True)


@pytest.mark.parametrize(("name", "args", "session"), [("crawl", {"pages": 1}, "chat"), ("again", None, None)])
async def test_task_whose_runtime_died_follows_its_recovery(place: Place, name: str, args: Any, session: Any) -> None:
    world = World()
    runtime = place.runtime(Agent(Ear().model, name="assistant", plugins=[Crawler(world)]))
    await runtime.__aenter__()
    handle = await start(runtime, f"crawler.{name}", args, session)
    await until(lambda: len(world.begun) == 1)
    await crash(runtime)

    world.go.set()
    async with place.runtime(Agent(Ear().model, name="assistant", plugins=[Crawler(world)])) as later:
        outcome = await later.handle(handle.id).outcome(SOON)
        if name == "crawl":
            assert isinstance(outcome, Abandoned)
            assert world.begun == [(handle.id, 1)]
        else:
            assert await later.handle(handle.id).result(SOON) == "attempt 2"
            assert world.begun == [(handle.id, 1), (handle.id, 2)]


@pytest.mark.parametrize(("kind", "recovery"), [(command, "rerun"), (query, "rerun"), (task, "ask")])
def test_only_tasks_have_a_recovery(kind: Any, recovery: Any) -> None:
    def method(self: Any) -> None: ...

    with pytest.raises(InvalidDefinition, match='a task is "once" or "rerun", others have none'):
        kind(recovery=recovery)(method)
