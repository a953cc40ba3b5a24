"""What happens to the tasks of a session, as it happens; what a record tells of them, and what closing leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure import Agent, ProcessContext, Runtime, process
from perdure.errors import Conflict, InvalidInput
from perdure.model.plugin import CreateSession
from perdure.model.process import TaskEvent, TaskSpec
from perdure.sessions.services.host import SessionHost
from perdure.testing import ScriptedModel
from tests.kit import Place, until, untyped
from tests.sessions.test_tasks import Gate, host, no_work


@contextlib.asynccontextmanager
async def listening(services: SessionHost, **wanted: Any) -> AsyncGenerator[list[TaskEvent]]:
    """What is told of tasks meanwhile, by a task that has begun to listen."""
    found: list[TaskEvent] = []
    events = services.task_events(**wanted)

    async def listen() -> None:
        async for event in events:
            found.append(event)

    task = asyncio.create_task(listen())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def told(found: list[TaskEvent], task: str) -> list[str]:
    return [event.change for event in found if event.task.id == task]


@process
async def patient(ctx: ProcessContext[Any]) -> str:
    ctx.progress({"done": 1})
    await ctx.wait_signal("go")
    return "went"


async def test_life_of_every_kind_of_task_is_told(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel([])), processes=[patient]) as runtime:
        services, gate = host(runtime), Gate("value")
        async with listening(services) as found:
            await services.spawn_managed_task(TaskSpec("managed"), gate)
            await services.register_background_task(TaskSpec("registered", kind="observer"))
            await services.transition_live_state("registered", "idle")
            durable = await services.start_process(patient, key="durable")
            await until(lambda: _is(durable, "waiting"))
            await durable.signal("go")
            gate.go.set()
            await services.complete_background_task("registered", "failed", error="broken")
            await services.register_background_task(TaskSpec("stopped"))
            await services.cancel_background_task("stopped")
            await until(lambda: told(found, "stopped")[-1:] == ["cancelled"])
            await until(lambda: told(found, durable.id)[-1:] == ["completed"])
            await until(lambda: told(found, "managed")[-1:] == ["completed"])

    assert told(found, "managed") == ["registered", "state_changed", "completed"]
    assert told(found, "registered") == ["registered", "state_changed", "failed"]
    assert told(found, "stopped") == ["registered", "cancel_requested", "cancelled"]
    life = told(found, durable.id)
    assert (life[0], life[-1]) == ("registered", "completed")
    assert {"progress", "state_changed"} <= set(life)


async def _is(handle: Any, status: str) -> bool:
    return bool(await handle.status() == status)


async def test_events_are_of_one_session_one_kind_and_of_live_tasks_where_that_is_asked_for() -> None:
    async with Runtime("memory", agents=[Agent(ScriptedModel([]))]) as runtime:
        services, other = host(runtime), host(runtime, "other")
        async with (
            listening(services, kind="observer", include_ended=False) as observers,
            listening(services) as everything,
            listening(other) as elsewhere,
        ):
            await services.register_background_task(TaskSpec("a", kind="observer"))
            await until(lambda: told(observers, "a"))
            await services.spawn_hidden_task("hidden", no_work)
            await services.register_background_task(TaskSpec("b"))
            await services.complete_background_task("a", "completed", 7)
            await until(lambda: told(everything, "a")[-1:] == ["completed"] and told(everything, "b"))

    assert [(event.change, event.task.id) for event in observers] == [("registered", "a")]
    assert {event.task.id for event in everything} == {"a", "b"}  # hidden tasks are listed nowhere
    assert elsewhere == []


async def test_task_that_is_handed_on_is_told_to_its_new_session() -> None:
    async with Runtime("memory", agents=[Agent(ScriptedModel([]))]) as runtime:
        services = host(runtime)
        child = await services.create_session(CreateSession(session_id="chat~child"))
        async with listening(host(runtime, child)) as found:
            await services.register_background_task(TaskSpec("job"))
            [task] = await services.list_background_tasks()
            await services.transfer_handles(child, [task.process_id])
            await until(lambda: "transferred" in told(found, "job"))

    assert told(found, "job")[-1] == "transferred"


async def test_events_of_another_runtime_are_told_too(place: Place) -> None:
    agent = Agent(ScriptedModel([]))
    async with place.runtime(agent) as one, place.runtime(agent) as two, listening(host(two)) as found:
        await until(lambda: two._process_feed._cursor is not None)  # it has polled, and hears of what comes after
        await host(one).register_background_task(TaskSpec("job"))
        await until(lambda: told(found, "job"))

    assert told(found, "job")[0] == "registered"


# ---------------------------------------------------------------------- records


async def test_record_tells_how_a_task_is_cancelled_and_how_often_it_was_begun() -> None:
    @process(max_attempts=3)
    async def rare(ctx: ProcessContext[Any]) -> None:
        await ctx.wait_signal("go")

    async with Runtime("memory", agents=[Agent(ScriptedModel([]))], processes=[rare]) as runtime:
        services, gate = host(runtime), Gate()
        await services.spawn_managed_task(TaskSpec("managed", close="cancel"), gate)
        await services.register_background_task(TaskSpec("registered"))
        durable = await services.start_process(rare, key="durable")
        await until(lambda: _is(durable, "waiting"))
        tasks = {task.id: task for task in await services.list_background_tasks()}
        gate.go.set()

    found = {name: (task.cancel_way, task.close, task.attempt, task.max_attempts) for name, task in tasks.items()}
    assert found == {
        "managed": ("abort_local", "cancel", 1, None),
        "registered": ("external", "keep", 0, None),
        durable.id: ("cooperative", "keep", 1, 3),
    }
    assert all(task.idempotency_key == task.process_id for task in tasks.values())


# ---------------------------------------------------------------------- closing


async def test_closing_a_child_keeps_cancels_or_hands_on_its_tasks_as_they_were_begun(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel([]))) as runtime:
        parent = host(runtime)
        child = await parent.create_session(CreateSession(session_id="chat~child"))
        services, gate = host(runtime, child), Gate()
        await services.register_background_task(TaskSpec("kept"))
        await services.spawn_managed_task(TaskSpec("cancelled", close="cancel"), gate)
        await services.register_background_task(TaskSpec("handed on", close="transfer"))
        await gate.begun.wait()
        await parent.close_session(child)
        await parent.close_session(child)  # as after a crash in the middle of it
        of_child = {task.id: task.state for task in await services.list_background_tasks(include_ended=True)}
        of_parent = {task.id: task.state for task in await parent.list_background_tasks()}

    assert of_child == {"kept": "running", "cancelled": "cancelled"}
    assert of_parent == {"handed on": "running"}
    assert gate.cancelled


async def test_closing_is_refused_where_the_parent_has_a_live_task_of_that_name() -> None:
    async with Runtime("memory", agents=[Agent(ScriptedModel([]))]) as runtime:
        parent = host(runtime)
        child = await parent.create_session(CreateSession(session_id="chat~child"))
        await parent.register_background_task(TaskSpec("job"))
        await host(runtime, child).register_background_task(TaskSpec("job", close="transfer"))
        with pytest.raises(Conflict):
            await parent.close_session(child)


async def test_close_policy_that_there_is_not_is_refused_before_anything_is_written() -> None:
    async with Runtime("memory", agents=[Agent(ScriptedModel([]))]) as runtime:
        with pytest.raises(InvalidInput, match="keep, cancel, transfer"):
            await host(runtime).register_background_task(TaskSpec("job", close=untyped("delete")))

        assert await runtime.processes.list() == []
