"""Wakes that cannot be delivered: discarded with a reason, visible, and brought back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, Plugin, Runtime
from perdure.errors import InvalidInput, SessionDeleted
from perdure.model.process import WakeTarget
from perdure.plugins.hooks import TurnEndContext
from perdure.processes.service import Start
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import VirtualClock
from tests.kit import SOON, Place, TellingModel, until
from tests.sessions.test_wakes import FUNCTIONS, Ear, double, idle, when_told

DAY = 86_400


def wakes(session_id: str, agent: str = "") -> Start:
    return Start(wake=WakeTarget(session_id, agent), grants=(session_id,))


async def reasons(runtime: Runtime) -> list[str | None]:
    return [wake.reason for wake in await runtime.processes.wakes("discarded")]


async def test_wake_of_a_session_that_was_deleted_is_discarded(place: Place) -> None:
    ear = Ear()
    async with place.runtime(Agent(ear.model), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        started = await session.start(when_told)
        await runtime.sessions.delete("chat")
        await started.signal("go", 1)
        assert await started.result(SOON) == 1  # a session's end ends no process
        await idle(runtime)

        assert await reasons(runtime) == ["its session was deleted"]
        assert ear.heard == ["hello"]


async def test_wake_that_waited_when_its_session_was_deleted_is_discarded(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        await session.send("hello")
        await model.next()
        await (await session.start(double, {"n": 1})).result(SOON)
        await runtime.sessions.delete("chat")
        await idle(runtime)

        assert await reasons(runtime) == ["its session was deleted"]
        with pytest.raises(SessionDeleted):
            await session.start(double, {"n": 1})


async def test_wake_of_no_session_at_all_is_discarded_and_may_be_brought_back(place: Place) -> None:
    ear = Ear()
    async with place.runtime(Agent(ear.model), processes=FUNCTIONS) as runtime:
        await (await runtime.processes.start(double, {"n": 1}, wakes("nobody"))).result(SOON)
        await until(lambda: _discarded(runtime, 1))
        (reason,) = await reasons(runtime)
        assert reason is not None
        assert reason.startswith("there is no session 'nobody'")

        await (await runtime.session("nobody")).run("here I am")
        (wake,) = await runtime.processes.wakes("discarded")
        assert await runtime.processes.redrive(wake.number) == 1
        await until(lambda: len(ear.heard) == 2)
        assert ear.heard[1].endswith("value: 2")
        assert await runtime.processes.redrive(wake.number) == 0


async def _discarded(runtime: Runtime, count: int) -> bool:
    return len(await reasons(runtime)) == count


async def test_wakes_that_nobody_can_deliver_expire_after_a_week() -> None:
    clock, ear, store = VirtualClock(), Ear(), MemoryStore()
    async with Runtime(store, agents=[Agent(name="other")], processes=FUNCTIONS, clock=clock) as runtime:
        await (await runtime.processes.start(double, {"n": 1}, wakes("chat", "gone"))).result(SOON)
        clock.advance(7 * DAY - 1)
        await _looked(runtime)
        assert len(await runtime.processes.wakes()) == 1

        await (await runtime.processes.start(double, {"n": 2}, wakes("chat", "gone"))).result(SOON)
        clock.advance(2)
        await until(lambda: _discarded(runtime, 1))
        assert await reasons(runtime) == ["it expired: no Runtime with the session's agent came within 7 days"]
        assert len(await runtime.processes.wakes()) == 1  # the younger one has its own week

        (wake,) = await runtime.processes.wakes("discarded")
        await runtime.processes.redrive(wake.number)
        clock.advance(6 * DAY)
        await _looked(runtime)
        assert await reasons(runtime) == []  # brought back, it has a week again
    async with Runtime(MemoryStore(store.rows), agents=[Agent(ear.model, name="gone")], clock=clock) as later:
        await until(lambda: len(ear.heard) == 1)
        await idle(later)
        assert [line for line in ear.heard[0].split("\n") if line.startswith("value")] == ["value: 2", "value: 4"]


async def _looked(runtime: Runtime) -> None:
    """Let the watch look at everything once."""
    assert runtime._parts is not None
    await runtime._wakes.poll()


async def test_wake_of_a_busy_session_never_expires() -> None:
    clock, model = VirtualClock(), TellingModel()
    async with Runtime("memory", agents=[Agent(model)], processes=FUNCTIONS, clock=clock) as runtime:
        session = await runtime.session("chat")
        running = asyncio.create_task(session.run("hello"))
        await model.next()
        await (await session.start(double, {"n": 1})).result(SOON)
        clock.advance(30 * DAY)
        await _looked(runtime)
        model.say("done", "heard")
        await running
        assert (await model.next()).messages[-1].text.endswith("value: 2")
        assert await reasons(runtime) == []


async def test_host_may_discard_what_waits(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        running = asyncio.create_task(session.run("hello"))
        await model.next()
        await (await session.start(double, {"n": 1})).result(SOON)
        await (await session.start(double, {"n": 2})).result(SOON)
        first, _ = await runtime.processes.wakes(session_id="chat")
        assert await runtime.processes.discard(first.number, reason="not needed") == 1
        model.say("done", "heard")
        await running
        told = (await model.next()).messages[-1].text
        await idle(runtime)

        assert [line for line in told.split("\n") if line.startswith("value")] == ["value: 4"]
        assert await reasons(runtime) == ["not needed"]


async def test_unreadable_wake_does_not_keep_others_waiting() -> None:
    model, store = TellingModel(), MemoryStore()
    async with Runtime(store, agents=[Agent(model)], processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        running = asyncio.create_task(session.run("hello"))
        await model.next()
        await (await session.start(double, {"n": 1})).result(SOON)
        await (await session.start(double, {"n": 2})).result(SOON)
        first, _ = await runtime.processes.wakes()
        rows = store.rows.wake_rows
        rows[first.number] = replace(first, body=b"no JSON")
        model.say("done", "heard")
        await running
        told = (await model.next()).messages[-1].text
        await idle(runtime)

        assert [line for line in told.split("\n") if line.startswith("value")] == ["value: 4"]
        (reason,) = await reasons(runtime)
        assert reason is not None
        assert reason.startswith("it is unreadable: ")


async def test_other_session_hears_of_a_process_that_was_retargeted(place: Place) -> None:
    ear = Ear()
    async with place.runtime(Agent(ear.model), processes=FUNCTIONS) as runtime:
        first, second = await runtime.session("first"), await runtime.session("second")
        await second.run("hello")
        started = await first.start(when_told)
        await runtime.processes.retarget(started, WakeTarget("second"))
        await started.signal("go", 1)
        await started.result(SOON)
        await idle(runtime)

        assert [row.id for row in await runtime.sessions.list()] == ["second"]
        assert ear.heard[1].endswith("value: 1")


async def test_state_of_wakes_that_does_not_exist_is_refused() -> None:
    async with Runtime("memory", agents=[Agent()]) as runtime:
        state: Any = "lost"
        with pytest.raises(InvalidInput, match="use pending, enqueued or discarded"):
            await runtime.processes.wakes(state)


# ---------------------------------------------------------------------- leaving, and coming late


async def test_wake_of_a_runtime_that_is_left_waits_for_the_next(place: Place) -> None:
    model, ear = TellingModel(), Ear()
    async with place.runtime(Agent(model, name="a"), processes=FUNCTIONS, grace=0) as runtime:
        session = await runtime.session("chat")
        await session.send("hello")
        await model.next()
        await (await session.start(double, {"n": 1})).result(SOON)
    async with place.runtime(Agent(ear.model, name="a"), processes=FUNCTIONS) as later:
        await until(lambda: len(ear.heard) == 2)
        await idle(later)
        assert [said.partition("\n")[0] for said in ear.heard] == ["hello", '[process "double" completed]']


class Slow(Plugin):
    """Takes its time after a commit."""

    id = "slow"

    def __init__(self) -> None:
        self.told, self.go = asyncio.Event(), asyncio.Event()

    async def turn_persisted(self, ctx: TurnEndContext) -> None:
        self.told.set()
        await self.go.wait()


async def test_input_that_comes_while_plugins_hear_of_the_last_commit_runs_at_once(place: Place) -> None:
    """The session is idle on disk then, and its task is not over yet."""
    slow, ear = Slow(), Ear()
    async with place.runtime(Agent(ear.model, plugins=[slow]), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        running = asyncio.create_task(session.run("one"))
        await slow.told.wait()
        receipt = await session.send("two")
        slow.go.set()
        await running

        assert (await receipt.result(SOON)).text == "answer 2"


async def test_wake_that_comes_while_plugins_hear_of_the_last_commit_runs_at_once(place: Place) -> None:
    slow, ear = Slow(), Ear()
    async with place.runtime(Agent(ear.model, plugins=[slow]), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        running = asyncio.create_task(session.run("one"))
        await slow.told.wait()
        await (await session.start(double, {"n": 1})).result(SOON)
        await until(lambda: _enqueued(runtime))
        slow.go.set()
        await running

        await until(lambda: len(ear.heard) == 2)
        assert ear.heard[1].endswith("value: 2")


async def _enqueued(runtime: Runtime) -> bool:
    return len(await runtime.processes.wakes("enqueued")) == 1
