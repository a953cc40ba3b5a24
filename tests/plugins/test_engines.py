"""Plugins that run kinds of processes of their own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from perdure import Agent, Plugin, Runtime
from perdure.engine.runner import Stage
from perdure.errors import InvalidProcess
from perdure.model.process import Abandoned, Evidence, ProcessOutcome, Registration, Success
from perdure.ports.process import Engine, EngineRun
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place, crash, until


class Echo:
    """Gives back what it was asked for."""

    kind = "echo"

    def knows(self, registration: Registration) -> bool:
        return True

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        return Registration("", "echo", "rerunnable", input=dict(args)) if what == "echo" else None

    async def run(self, run: EngineRun) -> ProcessOutcome:
        await run.begin()
        return Success(run.registration.input)


class Remote:
    """Work that goes on elsewhere, whatever becomes of us: found again by its reference, or given up."""

    kind = "remote"

    def __init__(self, jobs: dict[str, asyncio.Future[str]]) -> None:
        self.jobs, self.attached = jobs, list[bool]()

    def knows(self, registration: Registration) -> bool:
        return True

    async def run(self, run: EngineRun) -> ProcessOutcome:
        name = run.registration.id
        self.attached.append(run.resumed)
        await run.begin()
        if not run.resumed:
            self.jobs[name] = asyncio.get_running_loop().create_future()
        if name not in self.jobs:
            return Abandoned(Evidence("engine_gave_up", proof=f"there is no job {name}"))
        return Success(await run.guard(_awaited(self.jobs[name])))


async def _awaited(job: asyncio.Future[str]) -> str:
    return await asyncio.shield(job)


class Brings(Plugin):
    """A plugin with one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.id = engine, f"brings-{engine.kind}"

    def engines(self) -> Iterable[Engine]:
        return [self.engine]


def agent(*plugins: Plugin, name: str = "a") -> Agent[str]:
    return Agent(ScriptedModel([]), name=name, plugins=plugins)


async def test_a_plugin_may_add_a_kind_of_process(place: Place) -> None:
    async with place.runtime(agent(Brings(Echo()))) as runtime:
        handle = await runtime.start("echo", {"x": 1})

        assert await handle.result(SOON) == {"x": 1}


async def test_a_plugin_that_two_agents_share_is_asked_once(place: Place) -> None:
    shared = Brings(Echo())
    async with place.runtime(agent(shared), agent(shared, name="b")) as runtime:
        assert await (await runtime.start("echo", {"x": 2})).result(SOON) == {"x": 2}


async def test_a_registration_made_by_hand_is_started_as_it_is(place: Place) -> None:
    async with place.runtime(agent(Brings(Echo()))) as runtime:
        handle = await runtime.start(Registration("", "echo", "rerunnable", input=[1, 2]), id="e-1")

        assert await handle.result(SOON) == [1, 2]
        with pytest.raises(InvalidProcess, match="no engine of kind 'smoke' here; there are: function"):
            await runtime.start(Registration("", "smoke", "rerunnable"))


async def test_work_elsewhere_is_found_again_after_a_crash(file: Place) -> None:
    jobs: dict[str, asyncio.Future[str]] = {}
    first = Remote(jobs)
    dying = file.runtime(agent(Brings(first)))
    await dying.__aenter__()
    await dying.start(Registration("", "remote", "reattachable"), id="job-1")
    await until(lambda: jobs)
    await crash(dying)

    second = Remote(jobs)
    async with file.runtime(agent(Brings(second))) as runtime:
        await until(lambda: second.attached)
        jobs["job-1"].set_result("built")
        assert await runtime.handle("job-1").result(SOON) == "built"

    assert (first.attached, second.attached) == ([False], [True])


async def test_work_elsewhere_outlives_any_number_of_crashes_of_its_host(file: Place) -> None:
    """Six owners die one after the other, with nothing else in their hands: enough to make work of ours stuck."""
    jobs: dict[str, asyncio.Future[str]] = {}
    for life in range(6):
        engine = Remote(jobs)
        dying = file.runtime(agent(Brings(engine)))
        await dying.__aenter__()
        if not life:
            await dying.start(Registration("", "remote", "reattachable", max_attempts=2), id="job-1")
        await until(functools.partial(engine.attached.__contains__, life > 0))
        await until(lambda: jobs)
        await crash(dying)

    async with file.runtime(agent(Brings(Remote(jobs)))) as runtime:
        row = await runtime.handle("job-1").record()
        jobs["job-1"].set_result("built")
        assert await runtime.handle("job-1").result(SOON) == "built"

    assert (row.attempts, row.takeovers, row.stuck) == (1, 0, None)


async def test_work_elsewhere_that_is_gone_is_given_up_with_evidence(file: Place) -> None:
    jobs: dict[str, asyncio.Future[str]] = {}
    dying = file.runtime(agent(Brings(Remote(jobs))))
    await dying.__aenter__()
    await dying.start(Registration("", "remote", "reattachable"), id="job-1")
    await until(lambda: jobs)
    await crash(dying)

    async with file.runtime(agent(Brings(Remote({})))) as runtime:
        outcome = await runtime.handle("job-1").outcome(SOON)

    assert outcome == Abandoned(Evidence("engine_gave_up", proof="there is no job job-1"))


async def test_what_no_plugin_runs_any_more_waits(place: Place) -> None:
    async with place.runtime(agent(Brings(Echo())), concurrency=1) as runtime:
        runtime._work.mode.advance(Stage.DRAINING)
        handle = await runtime.start("echo", {"x": 1})
    async with place.runtime(agent()) as runtime:
        await runtime.wait_idle(SOON)
        assert await runtime.handle(handle.id).status() == "queued"
    async with Runtime(place.store(), agents=[agent(Brings(Echo()))]) as runtime:
        assert await runtime.handle(handle.id).result(SOON) == {"x": 1}
