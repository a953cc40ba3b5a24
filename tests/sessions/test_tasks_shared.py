"""Whose a task is: what a session only sees it does not end, and a name has one live task however it is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, ToolCall, ToolContext, tool
from perdure.errors import Conflict, PerdureError, ProcessNotVisible, ProcessShared
from perdure.model.process import Cancelled, EventType, TaskSpec, WakeRule, WakeTarget
from perdure.processes.handle import CancelAsk
from tests.kit import SOON, Place, TellingModel, until
from tests.processes_tools.test_visible import Policy
from tests.sessions.test_tasks import Gate, host, no_work, states
from tests.sessions.test_wakes import FUNCTIONS, Ear, when_told

# ---------------------------------------------------------------------- what is only shared


async def test_shared_work_is_not_ended_by_a_session_that_sees_it(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        await runtime.processes.register("b7", grants=["chat"])
        with pytest.raises(ProcessShared, match="'b7' is shared with session 'chat'"):
            await host(runtime).cancel_background_task("b7")
        with pytest.raises(ProcessShared):
            await host(runtime).complete_background_task("b7", "failed", error="I think so")
        with pytest.raises(ProcessShared):
            await host(runtime).transition_live_state("b7", "idle")
        ending = await runtime.processes.complete("b7", "built")

        assert ending.status == "committed"
        assert ending.row.record.cancel is None


async def test_shared_work_that_is_unregistered_is_only_listed_no_longer(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        await runtime.processes.register("b7", grants=["chat"])
        await host(runtime).unregister_background_task("b7")

        assert await states(host(runtime)) == {}
        assert (await runtime.processes.complete("b7", "built")).status == "committed"


async def test_task_of_another_session_is_not_ended_under_its_name(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), grace=0) as runtime:
        one, two = host(runtime, "one"), host(runtime, "two")
        task = await one.spawn_managed_task(TaskSpec("watch"), Gate())
        await runtime.processes.grant("two", task)
        with pytest.raises(ProcessShared):
            await two.cancel_managed_task("watch")
        own = await two.spawn_managed_task(TaskSpec("watch"), Gate())  # the name is taken in the other session only
        assert (await two.cancel_managed_task("watch")).process_id == own.id

        assert await states(one) == {"watch": "running"}


async def test_all_that_is_cancelled_is_the_sessions_own(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS, grace=0) as runtime:
        services, other = host(runtime), await runtime.session("other")
        await runtime.processes.register("b7", grants=["chat"])
        theirs = await other.start(when_told, id="theirs", wake="none")
        await runtime.processes.grant("chat", theirs)
        await services.register_background_task(TaskSpec("mine"))
        cancelled = await services.cancel_all_background_tasks("enough")

        assert [each.id for each in cancelled] == ["mine"]
        assert await states(services) == {
            "b7": "running",
            "theirs": (await states(services))["theirs"],
            "mine": "cancelled",
        }
        assert (await runtime.processes.get("theirs")).record.cancel is None


async def test_what_another_session_refers_to_is_not_cancelled_as_unreferenced(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), grace=0) as runtime:
        services = host(runtime)
        await runtime.processes.register("b7", grants=["chat"])
        both = await services.spawn_managed_task(TaskSpec("both"), Gate())
        await services.spawn_managed_task(TaskSpec("mine"), Gate())
        await runtime.processes.grant("other", both)
        cancelled = await services.cancel_unreferenced_handles([])

        assert [each.id for each in cancelled] == ["mine"]
        assert await states(services) == {"b7": "running", "both": "running", "mine": "cancelled"}


async def test_what_was_handed_on_is_the_new_sessions_own(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), grace=0) as runtime:
        one, two = host(runtime, "one"), host(runtime, "two")
        await (await runtime.session("two")).run("hello")
        task = await one.spawn_managed_task(TaskSpec("watch"), Gate())
        await one.transfer_handles("two", [task])
        await runtime.processes.grant("one", task)  # it may see what it has handed on
        with pytest.raises(ProcessShared):
            await one.cancel_managed_task("watch")

        assert [each.state for each in await two.cancel_all_background_tasks()] == ["cancelled"]


async def test_what_is_only_shared_is_handed_on_as_that(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        one, two = host(runtime, "one"), host(runtime, "two")
        await (await runtime.session("two")).run("hello")
        await runtime.processes.register("b7", grants=["one"])
        assert await one.transfer_handles("two", ["b7"]) == 1

        assert (await states(one), await states(two)) == ({}, {"b7": "running"})
        assert await two.cancel_all_background_tasks() == []


# ---------------------------------------------------------------------- handing on is one write


async def test_transfer_is_one_write_with_names_and_news(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        one = host(runtime, "one")
        await (await runtime.session("two")).run("hello")
        session = await runtime.session("one")
        started = [await session.start(when_told, id=f"p{n}") for n in range(3)]
        cursor = await runtime.store.last_change()
        assert await one.transfer_handles("two", started) == 3

        for handle in started:
            row = await handle.record()
            assert (row.record.holder, row.record.wake) == ("two", WakeTarget("two", "assistant"))
            told = [event.type async for event in handle.events() if event.cursor > cursor]
            assert sorted(told) == [
                "process.observer_added",
                "process.observer_removed",
                "process.subscription_retargeted",
                "process.transferred",
            ]


async def test_what_the_source_had_not_heard_yet_is_heard_by_the_target(place: Place) -> None:
    """The source is busy, so its news gathers; it is handed on with the process."""
    ear, model = Ear(), TellingModel()
    agents = Agent(ear.model), Agent(model, name="slow")
    async with place.runtime(*agents) as runtime:
        await (await runtime.session("two")).run("hello")
        busy = asyncio.create_task((await runtime.session("one", agent="slow")).run("think"))
        await model.next()
        events = [EventType("built", wake=WakeRule())]
        build = await runtime.processes.register("b7", events=events, wake=WakeTarget("one", "slow"), grants=["one"])
        await runtime.processes.emit(build, "built", "half of it")
        await host(runtime, "one").transfer_handles("two", [build])
        await until(lambda: len(ear.heard) == 2)
        model.say("thought")
        await busy

        assert "half of it" in ear.heard[1]


async def test_transfer_of_something_that_is_not_visible_moves_nothing(place: Place) -> None:
    async with place.runtime(Agent(Ear().model), processes=FUNCTIONS) as runtime:
        mine = await (await runtime.session("one")).start(when_told, id="mine")
        await runtime.start(when_told, id="foreign")
        with pytest.raises(ProcessNotVisible, match="foreign"):
            await runtime.processes.transfer("one", "two", mine, "foreign")

        assert [row.id for row in await runtime.processes.list(session_id="one")] == ["mine"]
        assert await runtime.processes.list(session_id="two") == []


# ---------------------------------------------------------------------- one live task of a name


async def test_task_spawned_twice_at_once_is_begun_once_and_the_other_is_told(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        services, bodies = host(runtime), [Gate(0), Gate(1)]
        found = await asyncio.gather(
            *(services.spawn_managed_task(TaskSpec("x"), body) for body in bodies), return_exceptions=True
        )
        refused = [each for each in found if isinstance(each, BaseException)]
        [begun] = [n for n, each in enumerate(found) if not isinstance(each, BaseException)]
        bodies[begun].go.set()

        assert [type(each) for each in refused] == [Conflict]
        assert "has a live task 'x'" in str(refused[0])
        assert await runtime.handle("chat~x").result(SOON) == begun
        assert not bodies[1 - begun].begun.is_set()


async def test_task_spawned_twice_at_once_by_two_runtimes_is_begun_once(file: Place) -> None:
    async with file.runtime(Agent(Ear().model)) as here, file.runtime(Agent(Ear().model)) as there:
        bodies = [Gate(0), Gate(1)]
        found = await asyncio.gather(
            host(here).spawn_managed_task(TaskSpec("x"), bodies[0]),
            host(there).spawn_managed_task(TaskSpec("x"), bodies[1]),
            return_exceptions=True,
        )
        [begun] = [n for n, each in enumerate(found) if not isinstance(each, BaseException)]
        bodies[begun].go.set()

        assert isinstance(found[1 - begun], Conflict)
        assert await here.handle("chat~x").result(SOON) == begun


async def test_task_registered_twice_at_once_keeps_the_hook_of_the_first(place: Place) -> None:
    called: list[int] = []
    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)
        found = await asyncio.gather(
            *(services.register_background_task(TaskSpec("x"), lambda n=n: called.append(n)) for n in range(2)),  # type: ignore[misc]
            return_exceptions=True,
        )
        [registered] = [n for n, each in enumerate(found) if not isinstance(each, BaseException)]
        await services.cancel_background_task("x")

        assert called == [registered]


async def test_name_that_a_transfer_brings_is_taken(place: Place) -> None:
    """Both are looked at inside their writes: neither order leaves two live tasks of one name."""
    async with place.runtime(Agent(Ear().model), grace=0) as runtime:
        one, two = host(runtime, "one"), host(runtime, "two")
        await (await runtime.session("two")).run("hello")
        mine = await one.spawn_managed_task(TaskSpec("watch"), Gate())
        await asyncio.gather(
            one.transfer_handles("two", [mine]),
            two.spawn_managed_task(TaskSpec("watch"), Gate()),
            return_exceptions=True,
        )

        assert len(await two.list_background_tasks()) == 1


# ---------------------------------------------------------------------- the host's policy


async def test_policy_is_asked_whichever_way_a_task_is_cancelled(place: Place) -> None:
    policy = Policy(PerdureError("not at night"))
    async with place.runtime(Agent(Ear().model), cancel_policy=policy) as runtime:
        services, called = host(runtime), list[str]()
        task = await services.register_background_task(TaskSpec("mine"), lambda: called.append("stop"))
        for ask in (
            lambda: services.cancel_background_task("mine", "enough"),
            lambda: services.cancel_managed_task("mine", "enough"),
            lambda: services.cancel_all_background_tasks("enough"),
            lambda: services.cancel_unreferenced_handles([], "enough"),
            lambda: task.cancel("enough"),
        ):
            with pytest.raises(PerdureError, match="not at night"):
                await ask()
        row = await runtime.processes.get(task.id)
        policy.refusal = None
        await services.cancel_background_task("mine", "enough")

        assert row.record.cancel is None
        handle = {"__handle__": "process", "id": "chat~mine"}
        assert policy.asked == [CancelAsk("chat", "chat~mine", "", "host_api", handle, "enough", True)] * 6
        assert called == ["stop"]


async def test_policy_is_asked_for_what_a_tool_cancels_through_its_services(place: Place) -> None:
    model, policy = TellingModel(), Policy(PerdureError("not at night"))

    @tool
    async def stop(ctx: ToolContext[Any]) -> str:
        """Stop it."""
        await ctx.host.cancel_background_task("b7")
        return "stopped"

    async with place.runtime(Agent(model, tools=[stop]), cancel_policy=policy) as runtime:
        await runtime.processes.register("b7", grants=["chat"])
        model.say(ToolCall("c1", "stop"), "done")
        await (await runtime.session("chat")).run("go")

        assert [(ask.process_id, ask.call_id, ask.granted) for ask in policy.asked] == [("b7", "chat.1.1.0", True)]
        assert (await runtime.processes.get("b7")).record.cancel is None


async def test_policy_may_let_a_session_end_what_is_only_shared(place: Place) -> None:
    policy = Policy()
    async with place.runtime(Agent(Ear().model), cancel_policy=policy) as runtime:
        await runtime.processes.register("b7", grants=["chat"])
        record = await host(runtime).cancel_background_task("b7", "enough")
        ending = await runtime.processes.complete("b7", outcome=Cancelled("its owner", "as asked"))

        assert record.state == "cancel_requested"  # its owner says how it ended
        assert ending.status == "committed"


# ---------------------------------------------------------------------- hidden ones


async def test_hidden_task_that_has_ended_leaves_nothing_in_memory(place: Place) -> None:
    async with place.runtime(Agent(Ear().model)) as runtime:
        assert runtime._parts is not None
        services, keeper = host(runtime), runtime._parts.tasks
        for _ in range(20):
            await (await services.spawn_hidden_task("quick", no_work)).outcome(SOON)
        await until(lambda: not keeper.hidden)

        assert keeper.size == 0


async def test_failure_of_a_hidden_task_that_ended_before_is_raised_once(place: Place) -> None:
    async def fail() -> None:
        raise ValueError("first")

    async with place.runtime(Agent(Ear().model)) as runtime:
        services = host(runtime)
        for _ in range(3):
            await (await services.spawn_hidden_task("f", fail)).outcome(SOON)
        with pytest.raises(PerdureError, match="ValueError: first"):
            await services.await_hidden_tasks()
        await services.await_hidden_tasks()
