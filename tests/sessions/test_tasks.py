"""Background tasks of a session: hidden, managed and registered ones, and what may be done with all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Agent, Message, Runtime, ToolCall, ToolContext, tool
from perdure.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    ProcessFailed,
    ProcessNotVisible,
    UnknownSession,
)
from perdure.model.process import Abandoned, Cancelled, Registration, TaskSpec, WakeTarget
from perdure.model.session import WorkerRow
from perdure.model.write import Beat, Register
from perdure.sessions.services.host import SessionHost
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place, TellingModel, crash, texts, until
from tests.sessions.test_wakes import FUNCTIONS, Ear, when_told


def host(runtime: Runtime, session_id: str = "chat") -> SessionHost:
    assert runtime._parts is not None
    return SessionHost(runtime._parts, session_id, "assistant")


async def states(services: SessionHost, **wanted: Any) -> dict[str, str]:
    return {each.id: each.state for each in await services.list_background_tasks(include_ended=True, **wanted)}


class Gate:
    """Work that ends when it is let to."""

    def __init__(self, value: Any = None) -> None:
        self.value, self.begun, self.go, self.cancelled = value, asyncio.Event(), asyncio.Event(), False

    async def __call__(self) -> Any:
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


async def no_work() -> None: ...


def odd(value: Any) -> Any:
    """Something that no type checker would let through."""
    return value


# ---------------------------------------------------------------------- saying something


async def test_injected_input_reaches_the_running_turn(place: Place) -> None:
    model = TellingModel()

    @tool
    async def look() -> str:
        """Look."""
        return "nothing"

    async with place.runtime(Agent(model, tools=[look])) as runtime:
        session = await runtime.session("chat")
        running = asyncio.create_task(session.run("hello"))
        await model.next()
        assert await host(runtime).inject_turn_input("by the way") == "chat.2"
        model.say(ToolCall("c1", "look"), "done")
        assert (await model.next()).messages[-1].text == "by the way"
        await running


async def test_injected_input_waits_for_the_next_turn_of_an_idle_session(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        session = await runtime.session("chat")
        await host(runtime).inject_turn_input("by the way")
        assert await runtime.wait_idle(SOON)
        assert await session.history() == []
        await session.run("hello")

        assert texts(await session.history()) == ["hello", "by the way", "answer 1"]


async def test_nothing_is_injected_into_an_unknown_session(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        with pytest.raises(UnknownSession):
            await host(runtime).inject_turn_input("hello?", session_id="nobody")


async def test_input_that_a_repeated_tool_injects_is_injected_once(place: Place) -> None:
    """The body runs again after a crash; what it said before is not said again."""
    model, spoken = TellingModel(), asyncio.Event()

    @tool(recovery="rerun")
    async def speak(ctx: ToolContext[Any]) -> str:
        """Say something beside."""
        await ctx.host.inject_turn_input("psst")
        spoken.set()
        if ctx.attempt == 1:
            await asyncio.Event().wait()
        return "said"

    runtime = place.runtime(Agent(model, name="a", tools=[speak]))
    await runtime.__aenter__()
    await (await runtime.session("chat")).send("go")
    await model.next()
    model.say(ToolCall("c1", "speak"))
    await spoken.wait()
    await crash(runtime)
    async with place.runtime(Agent(ScriptedModel(["done"]), name="a", tools=[speak])) as later:
        session = await later.session("chat")
        await session.result("chat.1")
        assert texts(await session.history()).count("psst") == 1


async def test_messages_that_a_repeated_tool_appends_are_appended_once(place: Place) -> None:
    """It died between two appends of the same words, and runs again from its beginning."""
    model, spoken = TellingModel(), asyncio.Event()

    @tool(recovery="rerun")
    async def note(ctx: ToolContext[Any]) -> str:
        """Write something down."""
        await ctx.host.append([Message("user", "by the way"), Message("user", "and this")])
        if ctx.attempt == 1:
            spoken.set()
            await asyncio.Event().wait()
        await ctx.host.append([Message("user", "by the way")])
        return "noted"

    runtime = place.runtime(Agent(model, name="a", tools=[note]))
    await runtime.__aenter__()
    await (await runtime.session("chat")).send("go")
    await model.next()
    model.say(ToolCall("c1", "note"))
    await spoken.wait()
    await crash(runtime)
    async with place.runtime(Agent(ScriptedModel(["done"]), name="a", tools=[note])) as later:
        session = await later.session("chat")
        await session.result("chat.1")
        history = texts(await session.history())

    assert [text for text in history if text in ("by the way", "and this")] == ["by the way", "and this", "by the way"]


# ---------------------------------------------------------------------- hidden ones


async def test_hidden_tasks_are_listed_nowhere_and_waited_for(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services, one, two = host(runtime), Gate(), Gate()
        await services.spawn_hidden_task("one", one)
        await services.spawn_hidden_task("two", two)
        assert await services.list_background_tasks(include_ended=True) == []
        assert await (await runtime.session("chat")).processes() == []
        waiting = asyncio.create_task(services.await_hidden_tasks())
        await asyncio.gather(one.begun.wait(), two.begun.wait())
        one.go.set()
        assert not waiting.done()
        two.go.set()
        await asyncio.wait_for(waiting, SOON)
        await services.await_hidden_tasks()  # nothing left


async def test_waiting_for_hidden_tasks_includes_those_that_they_spawn(place: Place) -> None:
    ended: list[str] = []
    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)

        async def inner() -> None:
            ended.append("inner")

        async def outer() -> None:
            await services.spawn_hidden_task("inner", inner)
            ended.append("outer")

        await services.spawn_hidden_task("outer", outer)
        await asyncio.wait_for(services.await_hidden_tasks(), SOON)
        assert sorted(ended) == ["inner", "outer"]


async def test_first_failure_of_hidden_tasks_is_raised_after_all_have_ended(place: Place) -> None:
    ended: list[str] = []

    def work(name: str, error: Exception | None = None) -> Callable[[], Any]:
        async def run() -> None:
            ended.append(name)
            if error is not None:
                raise error

        return run

    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)
        await services.spawn_hidden_task("a", work("a"))
        await services.spawn_hidden_task("b", work("b", ValueError("first")))
        await services.spawn_hidden_task("c", work("c", KeyError("second")))
        with pytest.raises(ProcessFailed, match="ValueError: first"):
            await services.await_hidden_tasks()
        assert sorted(ended) == ["a", "b", "c"]
        await services.await_hidden_tasks()  # it was told


async def test_hidden_task_of_an_unknown_session_is_refused(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        with pytest.raises(UnknownSession):
            await host(runtime).spawn_hidden_task("x", no_work, session_id="nobody")
        with pytest.raises(InvalidInput, match="a function without arguments"):
            await host(runtime).spawn_hidden_task("x", odd("work"))


# ---------------------------------------------------------------------- managed ones


async def test_managed_task_lives_and_ends_under_its_name(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services, gate = host(runtime), Gate({"lines": 3})
        spec = TaskSpec("watch", "observer", "linter", "Linting", "child-1", "parent-1")
        handle = await services.spawn_managed_task(spec, gate)
        await gate.begun.wait()
        (record,) = await services.list_background_tasks()
        assert (record.id, record.process_id, record.session_id) == ("watch", handle.id, "chat")
        assert (record.kind, record.producer, record.label) == ("observer", "linter", "Linting")
        assert (record.child_session_id, record.parent_task_id, record.state) == ("child-1", "parent-1", "running")

        gate.go.set()
        assert await handle.result(SOON) == {"lines": 3}
        assert await services.list_background_tasks() == []
        (record,) = await services.list_background_tasks(include_ended=True)
        assert (record.state, record.value, record.live) == ("completed", {"lines": 3}, False)


async def test_name_is_free_again_once_its_task_has_ended(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services, gate = host(runtime), Gate()
        first = await services.spawn_managed_task(TaskSpec("watch"), gate)
        with pytest.raises(Conflict, match="has a live task 'watch'"):
            await services.spawn_managed_task(TaskSpec("watch"), gate)
        with pytest.raises(Conflict):
            await services.register_background_task(TaskSpec("watch"))
        gate.go.set()
        await first.result(SOON)
        used = {first.id}
        for _ in range(3):
            again = await services.spawn_managed_task(TaskSpec("watch"), no_work)
            await again.result(SOON)
            used.add(again.id)
        assert len(used) == 4


async def test_same_name_in_another_session_is_another_task(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), grace=0) as runtime:
        one, two = host(runtime, "one"), host(runtime, "two")
        first = await one.spawn_managed_task(TaskSpec("watch"), Gate())
        second = await two.spawn_managed_task(TaskSpec("watch"), Gate())
        assert first.id != second.id
        await two.cancel_managed_task("watch")

        assert await states(one) == {"watch": "running"}
        assert await states(two) == {"watch": "cancelled"}


async def test_cancelled_task_is_aborted_and_its_effect_is_unknown(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services, gate = host(runtime), Gate()
        handle = await services.spawn_managed_task(TaskSpec("watch"), gate)
        await gate.begun.wait()
        record = await services.cancel_managed_task("watch", "enough")

        assert (record.state, record.error) == ("cancelled", "enough")
        assert gate.cancelled
        assert await handle.outcome(SOON) == Cancelled("session chat", "enough", unknown=True)
        assert (await services.cancel_managed_task("watch")).state == "cancelled"


async def test_task_that_failed_says_why(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services, gate = host(runtime), Gate(ValueError("no paper"))
        gate.go.set()
        handle = await services.spawn_managed_task(TaskSpec("print"), gate)
        await handle.outcome(SOON)

        (record,) = await services.list_background_tasks(include_ended=True)
        assert (record.state, record.error) == ("failed", "raised: ValueError: no paper")


async def test_task_whose_runtime_died_is_given_up_and_reads_as_unknown(place: Place) -> None:
    gate = Gate()
    runtime = place.runtime(Agent(Ear().model, name="assistant"))
    await runtime.__aenter__()
    handle = await host(runtime).spawn_managed_task(TaskSpec("watch"), gate)
    await gate.begun.wait()
    await crash(runtime)

    async with place.runtime(Agent(Ear().model, name="assistant")) as later:
        assert isinstance(await later.handle(handle.id).outcome(SOON), Abandoned)
        (record,) = await host(later).list_background_tasks(include_ended=True)
        assert record.state == "failed"
        assert record.error.startswith("outcome_unknown: ")
        await host(later).spawn_managed_task(TaskSpec("watch"), no_work)  # its name is free


async def test_task_of_a_runtime_that_is_left_is_given_up(place: Place) -> None:
    gate = Gate()
    async with place.runtime(Agent(Ear().model), grace=0) as runtime:
        handle = await host(runtime).spawn_managed_task(TaskSpec("watch"), gate)
        await gate.begun.wait()
    async with place.runtime(Agent(Ear().model)) as later:
        outcome = await later.handle(handle.id).outcome(SOON)
        assert isinstance(outcome, Abandoned)
        assert outcome.evidence.writer == "owner_drain"


async def test_more_tasks_than_there_are_places_all_run_here(file: Place) -> None:
    """Another Runtime on the same store has room, and leaves them alone: it has not their code."""
    async with file.runtime(Agent(Ear().model)) as runtime, file.runtime(Agent(Ear().model)):
        services, gates = host(runtime), [Gate(n) for n in range(100)]
        handles = [await services.spawn_managed_task(TaskSpec(f"t{n}"), gate) for n, gate in enumerate(gates)]
        for gate in gates:
            gate.go.set()
        assert [await each.result(SOON) for each in handles] == list(range(100))


async def test_task_that_was_never_begun_is_known_to_be_harmless(place: Place) -> None:
    """Its code is gone with its Runtime: whoever comes next gives it up, and it was never begun."""
    asked = Registration("t1", "task", "owner_bound", "watch", "w-gone", {"task": "watch"})
    async with place.runtime(Agent(Ear().model)) as runtime:
        await until(lambda: runtime._worker.alive is not None)
        await runtime.store.write(Register(asked, 1))
        await runtime._work.recover(await runtime.processes.get("t1"), None)
        outcome = await runtime.handle("t1").outcome(SOON)

        assert isinstance(outcome, Abandoned)
        assert outcome.evidence.writer == "engine_gave_up"


async def test_task_of_a_runtime_that_has_just_come_is_left_to_it(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        await until(lambda: runtime._worker.alive is not None)
        await runtime.store.write(Beat(WorkerRow("w-new", "here", "boot", 1, 0)))
        asked = Registration("t1", "task", "owner_bound", "watch", "w-new", {"task": "watch"})
        await runtime.store.write(Register(asked, 1))
        await runtime._work.recover(await runtime.processes.get("t1"), None)
        await until(lambda: _is_free(runtime, "t1"))

        row = await runtime.processes.get("t1")
        assert (row.status, row.owner, row.record.first_started) == ("running", None, None)


async def _is_free(runtime: Runtime, process_id: str) -> bool:
    """Whether somebody has had it, and has it no more."""
    row = await runtime.processes.get(process_id)
    return row.generation == 1 and row.owner is None and process_id not in runtime._work.runs


@pytest.mark.parametrize(
    ("name", "kind"), [("", "other"), ("x" * 151, "other"), ("x", "chore"), ("hidden task", "other")]
)
async def test_unusable_task_is_refused_before_anything_is_written(name: str, kind: Any) -> None:
    async with Runtime("memory", agents=[Agent()]) as runtime:
        with pytest.raises(InvalidInput):
            await host(runtime).spawn_managed_task(TaskSpec(name, kind), no_work)
        assert await runtime.processes.list() == []


# ---------------------------------------------------------------------- registered ones


async def test_registered_task_is_completed_by_whoever_does_it(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)
        handle = await services.register_background_task(TaskSpec("build", "monitor", "ci"))
        assert await states(services) == {"build": "running"}
        with pytest.raises(InvalidInput, match="'completed', 'failed' or 'cancelled'"):
            await services.complete_background_task("build", odd("running"))
        await services.complete_background_task("build", "completed", {"green": True})
        assert await handle.result(SOON) == {"green": True}

        await services.complete_background_task("build", "failed", error="too late")  # ignored
        await services.transition_live_state("build", "idle")
        assert await states(services) == {"build": "completed"}


@pytest.mark.parametrize(
    ("end", "state", "error"), [("failed", "failed", "failed: red"), ("cancelled", "cancelled", "red")]
)
async def test_registered_task_ends_otherwise(place: Place, end: Any, state: str, error: str) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)
        await services.register_background_task(TaskSpec("build"))
        await services.complete_background_task("build", end, error="red")

        (record,) = await services.list_background_tasks(include_ended=True)
        assert (record.state, record.error) == (state, error)


async def test_live_task_flips_between_running_and_idle(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)
        await services.register_background_task(TaskSpec("agent", "subagent"))
        await services.transition_live_state("agent", "idle")
        assert await states(services) == {"agent": "idle"}
        await services.transition_live_state("agent", "running")
        assert await states(services) == {"agent": "running"}
        with pytest.raises(InvalidInput, match="'running' or 'idle'"):
            await services.transition_live_state("agent", odd("failed"))


async def test_cancel_hook_is_called_once(place: Place) -> None:
    called: list[str] = []

    async def hook() -> None:
        called.append("stop")

    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)
        await services.register_background_task(TaskSpec("build"), hook)
        assert (await services.cancel_background_task("build", "enough")).state == "cancelled"
        assert (await services.cancel_background_task("build")).state == "cancelled"
        assert called == ["stop"]


async def test_cancel_hook_is_called_when_the_host_cancels(place: Place) -> None:
    called: list[str] = []
    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)
        handle = await services.register_background_task(TaskSpec("build"), lambda: called.append("stop"))
        await runtime.handle(handle.id).cancel("by hand")

        assert await handle.outcome(SOON) == Cancelled("host", "by hand")
        assert called == ["stop"]


async def test_cancel_hook_is_called_when_another_runtime_cancels(file: Place) -> None:
    called: list[str] = []
    async with file.runtime(Agent(Ear().model)) as here, file.runtime(Agent(Ear().model)) as there:
        handle = await host(here).register_background_task(TaskSpec("build"), lambda: called.append("stop"))
        await until(lambda: _sees(there, here._worker.id))
        record = await host(there).cancel_background_task("build")
        assert record.state in ("cancel_requested", "cancelled")

        assert isinstance(await there.handle(handle.id).outcome(SOON), Cancelled)
        assert called == ["stop"]


def _sees(runtime: Runtime, worker_id: str) -> bool:
    return worker_id in (runtime._worker.alive or ())


async def test_task_whose_hook_died_with_its_runtime_can_be_cancelled(place: Place) -> None:
    runtime = place.runtime(Agent(Ear().model, name="assistant"))
    await runtime.__aenter__()
    await host(runtime).register_background_task(TaskSpec("build"), lambda: None)
    await crash(runtime)
    async with place.runtime(Agent(Ear().model, name="assistant")) as later:
        await until(lambda: later._worker.alive is not None)
        assert await states(host(later)) == {"build": "running"}  # it is not ours: nobody knows how it ended
        assert (await host(later).cancel_background_task("build")).state == "cancelled"


async def test_unregistered_task_is_listed_no_longer(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)
        handle = await services.register_background_task(TaskSpec("build"))
        await services.unregister_background_task("build")
        await services.unregister_background_task("build")  # nothing to do
        assert await services.list_background_tasks(include_ended=True) == []
        assert (await runtime.processes.get(handle.id)).status == "caller_departed"
        with pytest.raises(NotFound, match="has no task 'build'"):
            await services.complete_background_task("build", "completed")
        await services.register_background_task(TaskSpec("build"))


# ---------------------------------------------------------------------- all of them


async def test_everything_that_the_session_sees_is_a_task_the_oldest_first(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS, grace=0) as runtime:
        services, session = host(runtime), await runtime.session("chat")
        await services.register_background_task(TaskSpec("b", "monitor"))
        started = await session.start(when_told, id="p1", wake="none")
        await services.spawn_managed_task(TaskSpec("a"), Gate())
        await until(lambda: _waits(started))

        found = await services.list_background_tasks()
        assert [(each.id, each.kind) for each in found] == [("b", "monitor"), ("p1", "other"), ("a", "other")]
        assert found[1].state == "idle"
        assert [each.id for each in await services.list_background_tasks(kind="monitor")] == ["b"]


async def _waits(started: Any) -> bool:
    return bool(await started.status() == "waiting")


async def test_all_live_tasks_are_cancelled_in_order(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services, order = host(runtime), list[str]()
        for name in ("c", "a", "b"):
            await services.register_background_task(TaskSpec(name), lambda name=name: order.append(name))  # type: ignore[misc]
        await services.complete_background_task("a", "completed")
        cancelled = await services.cancel_all_background_tasks("enough")

        assert order == ["c", "b"]
        assert [(each.id, each.state) for each in cancelled] == [("c", "cancelled"), ("b", "cancelled")]


async def test_task_that_cannot_be_cancelled_stops_the_cancelling_of_all(place: Place) -> None:
    def refuse() -> None:
        raise OSError("no answer")

    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)
        await services.register_background_task(TaskSpec("one"))
        await services.register_background_task(TaskSpec("two"), refuse)
        await services.register_background_task(TaskSpec("three"))
        with pytest.raises(OSError, match="no answer"):
            await services.cancel_all_background_tasks()

        assert await states(services) == {"one": "cancelled", "two": "cancel_requested", "three": "running"}


async def test_what_nobody_refers_to_is_cancelled(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        services, session = host(runtime), await runtime.session("chat")
        for n in range(3):
            await session.start(when_told, id=f"p{n}", wake="none")
        cancelled = await services.cancel_unreferenced_handles([{"__handle__": "process", "id": "p1"}], "forgotten")
        await until(lambda: _live(runtime, ["p1"]))

        assert [each.process_id for each in cancelled] == ["p0", "p2"]


async def _live(runtime: Runtime, wanted: list[str]) -> bool:
    return [row.id for row in await runtime.processes.list(live=True)] == wanted


# ---------------------------------------------------------------------- handing on


async def test_handles_are_visible_or_refused(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        session = await runtime.session("chat")
        mine = await session.start(when_told, wake="none")
        foreign = await runtime.start(when_told, id="foreign")
        await host(runtime).validate_handles_visible([mine, mine.to_json(), mine.id])
        await host(runtime).validate_handles_visible([])
        with pytest.raises(ProcessNotVisible, match="foreign"):
            await host(runtime).validate_handles_visible([mine, foreign])


async def test_transfer_moves_handles_names_and_news(place: Place) -> None:
    ear = Ear()
    async with place.runtime(Agent(ear.model), processes=FUNCTIONS) as runtime:
        one, two = host(runtime, "one"), host(runtime, "two")
        await (await runtime.session("two")).run("hello")
        gate = Gate()
        task = await one.spawn_managed_task(TaskSpec("watch"), gate)
        woken = await (await runtime.session("one")).start(when_told, id="p1")
        assert await one.transfer_handles("two", [task.to_json(), woken]) == 2
        assert await states(one) == {}
        assert set(await states(two)) == {"watch", "p1"}
        assert (await runtime.processes.get("p1")).record.wake == WakeTarget("two", "assistant")

        await woken.signal("go", 5)
        await until(lambda: len(ear.heard) == 2)
        assert ear.heard[1].endswith("value: 5")
        assert (await two.cancel_managed_task("watch")).state == "cancelled"


async def test_transfer_of_nothing_or_to_itself_does_nothing(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        services = host(runtime)
        started = await (await runtime.session("chat")).start(when_told, wake="none")
        assert await services.transfer_handles("nobody", []) == 0
        assert await services.transfer_handles("chat", [started]) == 0
        with pytest.raises(UnknownSession):
            await services.transfer_handles("nobody", [started])


async def test_transfer_is_refused_where_the_name_is_taken_by_a_live_task(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), grace=0) as runtime:
        one, two = host(runtime, "one"), host(runtime, "two")
        await (await runtime.session("two")).run("hello")
        mine = await one.spawn_managed_task(TaskSpec("watch"), Gate())
        await two.spawn_managed_task(TaskSpec("watch"), Gate())
        with pytest.raises(Conflict, match="has a live task 'watch' of its own"):
            await one.transfer_handles("two", [mine])
        assert list(await states(one)) == ["watch"]

        await two.cancel_managed_task("watch")
        assert await one.transfer_handles("two", [mine]) == 1
