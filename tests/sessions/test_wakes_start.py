"""Processes of a session: starting them, listing them, handing them on to forks, observing them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, Runtime, tool
from perdure.errors import InvalidHandle, InvalidInput, ProcessConflict, ProcessNotVisible
from perdure.model.event import ProcessChanged
from perdure.model.process import SessionOrigin, WakeTarget
from tests.kit import SOON, Place, until
from tests.sessions.test_wakes import FUNCTIONS, Ear, double, idle, when_told


@tool(recovery="rerun")
async def shout(word: str) -> str:
    """Say it loudly."""
    return word.upper()


async def ids(session: Any, **wanted: Any) -> list[str]:
    return [row.id for row in await session.processes(**wanted)]


# ---------------------------------------------------------------------- starting


async def test_started_process_is_the_sessions_own(place: Place) -> None:
    async with place.runtime(Agent(Ear().model, name="a"), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        started = await session.start(when_told, {"n": 1}, id="p1", label="mine")
        row = await started.record()

        assert row.registration.origin == SessionOrigin("chat")
        assert row.registration.wake == WakeTarget("chat", "a", "turn")
        assert row.registration.label == "mine"
        assert await runtime.store.is_granted("chat", "p1")
        assert not await runtime.store.is_granted("other", "p1")


async def test_tool_of_the_agent_may_be_started(place: Place) -> None:
    ear = Ear()
    async with place.runtime(Agent(ear.model, tools=[shout]), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        started = await session.start(shout, {"word": "hey"})

        assert await started.result(SOON) == "HEY"
        await idle(runtime)
        assert ear.heard[0].endswith("value: HEY")


async def test_same_id_is_the_same_process_and_wakes_once(place: Place) -> None:
    ear = Ear()
    async with place.runtime(Agent(ear.model), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        many = await asyncio.gather(*(session.start(double, {"n": 2}, id="p1") for _ in range(20)))
        assert {await each.result(SOON) for each in many} == {4}
        await idle(runtime)

        assert len(ear.heard) == 1
        with pytest.raises(ProcessConflict):
            await session.start(double, {"n": 3}, id="p1")


@pytest.mark.parametrize("wake", ["", "later", None, 1])
async def test_unknown_way_to_be_woken_is_refused_before_anything_is_written(wake: Any) -> None:
    async with Runtime("memory", agents=[Agent()], processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        with pytest.raises(InvalidInput, match="'turn', 'notify' or 'none'"):
            await session.start(double, {"n": 2}, wake=wake)
        assert await runtime.processes.list() == []


async def test_listing_shows_what_the_session_may_see(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        session, other = await runtime.session("chat"), await runtime.session("other")
        await (await session.start(double, {"n": 1}, id="p1", wake="none")).result(SOON)
        await session.start(when_told, id="p2")
        foreign = await other.start(when_told, id="p3")
        await runtime.start(when_told, id="p4")
        assert await ids(session) == ["p2", "p1"]
        assert await ids(session, live=True) == ["p2"]
        assert await ids(session, status="completed") == ["p1"]

        await runtime.processes.grant("chat", foreign)
        assert await ids(session) == ["p3", "p2", "p1"]
        await runtime.processes.revoke("chat", foreign)
        assert await ids(session) == ["p2", "p1"]
        assert (await foreign.record()).live


# ---------------------------------------------------------------------- forks


@pytest.mark.parametrize(
    ("grants", "seen"),
    [
        ("none", []),
        ("all", ["p2", "p1"]),
        (["p1"], ["p1"]),
        ([{"__handle__": "process", "id": "p2"}], ["p2"]),
        ([], []),
    ],
)
async def test_fork_sees_what_it_is_granted(place: Place, grants: Any, seen: list[str]) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        await session.start(when_told, id="p1")
        await session.start(when_told, id="p2")
        fork = await session.fork(session_id="fork", grants=grants)

        assert await ids(fork) == seen
        assert await ids(session) == ["p2", "p1"]


async def test_fork_of_a_session_with_very_many_processes_sees_them_all() -> None:
    async with Runtime("memory", agents=[Agent(Ear().model)], processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        for n in range(1100):
            await runtime.processes.register(f"p{n}", grants=["chat"])
        fork = await session.fork(grants="all")

        assert len(await fork.processes(limit=5000)) == 1100


async def test_fork_is_granted_nothing_that_its_source_may_not_see(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        await runtime.start(when_told, id="p1")
        with pytest.raises(ProcessNotVisible, match="chat"):
            await session.fork(session_id="fork", grants=["p1"])
        with pytest.raises(InvalidInput, match="'none', 'all' or a list"):
            await session.fork(session_id="fork", grants="some")
        with pytest.raises(InvalidHandle):
            await session.fork(session_id="fork", grants=[{"id": "p1"}])
        assert await runtime.store.session("fork") is None


async def test_fork_is_not_told_of_what_its_source_started(place: Place) -> None:
    ear = Ear()
    async with place.runtime(Agent(ear.model), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        started = await session.start(when_told, id="p1")
        await session.fork(session_id="fork", grants="all")
        await started.signal("go", 1)
        await started.result(SOON)
        await idle(runtime)

        assert {row.id: row.head for row in await runtime.sessions.list()} == {"chat": 2, "fork": 0}


# ---------------------------------------------------------------------- observing


class Watcher:
    """What a session's feed tells of processes."""

    def __init__(self, session: Any) -> None:
        self.seen: list[tuple[str, str]] = []
        self.events: list[ProcessChanged] = []
        self._task = asyncio.create_task(self._watch(session.observe()))

    async def _watch(self, events: Any) -> None:
        async for event in events:
            if isinstance(event, ProcessChanged):
                self.seen.append((event.process_id, event.status))
                self.events.append(event)

    async def stop(self) -> list[tuple[str, str]]:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self.seen


async def test_feed_tells_of_the_sessions_processes_and_of_no_others(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        session, other = await runtime.session("chat"), await runtime.session("other")
        watcher = Watcher(session)
        await asyncio.sleep(0)
        started = await session.start(when_told, id="p1", wake="none")
        foreign = await other.start(when_told, id="p2", wake="none")
        granted = await runtime.start(when_told, id="p3")
        await runtime.processes.grant("chat", granted)
        for each in (started, foreign, granted):
            await each.signal("go")
            await each.result(SOON)
        await until(lambda: ("p1", "completed") in watcher.seen and ("p3", "completed") in watcher.seen)

        seen = await watcher.stop()
        assert {process_id for process_id, _ in seen} == {"p1", "p3"}
        assert [status for process_id, status in seen if process_id == "p1"][-1] == "completed"


async def test_feed_tells_of_what_another_runtime_does(file: Place) -> None:
    async with file.runtime(Agent(Ear().model, name="a")) as here, file.runtime(processes=FUNCTIONS) as there:
        session = await here.session("chat")
        watcher = Watcher(session)
        await asyncio.sleep(0)
        started = await there.start(when_told, id="p1")
        await there.processes.grant("chat", started)
        await started.signal("go")
        await started.result(SOON)
        await until(lambda: ("p1", "completed") in watcher.seen)
        await watcher.stop()


async def test_nothing_is_looked_up_while_nobody_observes(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        await (await session.start(double, {"n": 1}, wake="none")).result(SOON)
        assert runtime._parts is not None

        assert runtime._process_feed._published == {}
        assert runtime._parts.feed.sessions == []


async def test_feed_says_what_has_changed(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        watcher = Watcher(session)
        await asyncio.sleep(0)
        started = await session.start(when_told, id="p1", wake="none")
        await until(lambda: ("p1", "waiting") in watcher.seen)
        await started.signal("go", 7)
        await started.result(SOON)
        await until(lambda: ("p1", "completed") in watcher.seen)
        await watcher.stop()

        told = [event.type async for event in started.events()]
        assert [(each.change, each.sequence) for each in watcher.events] == [
            (each, n) for n, each in enumerate(told, 1)
        ]
        assert [(each.change, each.status) for each in watcher.events] == [
            ("process.created", "running"),
            ("process.first_started", "running"),
            ("process.waiting", "waiting"),
            ("signal.go", "waiting"),
            ("process.resumed", watcher.events[4].status),  # queued, if it is told before it is taken up
            ("process.completed", "completed"),
        ]


async def test_feed_says_what_another_runtime_has_changed(file: Place) -> None:
    async with file.runtime(Agent(Ear().model, name="a")) as here, file.runtime(processes=FUNCTIONS) as there:
        session = await here.session("chat")
        build = await there.processes.register("b7", grants=["chat"], signals=["go"])
        watcher = Watcher(session)
        await until(lambda: here._parts is not None and here._process_feed._cursor is not None)
        await build.signal("go", 1)
        await build.signal("go", 2)
        await there.processes.complete(build, 3)
        await until(lambda: ("b7", "completed") in watcher.seen)
        await watcher.stop()

        ours = [each for each in watcher.events if each.sequence > 1]
        assert [(each.change, each.status, each.sequence) for each in ours] == [
            ("signal.go", "running", 2),
            ("signal.go", "running", 3),
            ("process.completed", "completed", 4),
        ]
