"""Forgetting what is too old: idle sessions that nothing can come of, and processes that are over."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, ProcessContext, Retention, Runtime, ToolCall, process, tool
from perdure.errors import InvalidDefinition, InvalidInput, SessionDeleted
from perdure.model.write import Delete
from perdure.testing import FunctionModel, VirtualClock
from tests.kit import SOON, Place, until

DAY = 86_400


@tool(approval="ask")
async def ask() -> str:
    return "asked"


@process(name="waits")
async def waits(ctx: ProcessContext) -> str:
    await ctx.wait_signal("go")
    return "gone"


@process(name="done")
async def done(ctx: ProcessContext) -> str:
    return "done"


def clerk() -> Agent[str]:
    def answer(request: Any) -> Any:
        return [ToolCall("a", "ask")] if request.messages[-1].text == "ask" else "answered"

    return Agent(FunctionModel(answer), name="clerk", tools=[ask])


async def furnished(place: Place, clock: VirtualClock) -> None:
    """A session for each reason to stay, and one without any; a process that is over and one that is not."""
    async with place.runtime(clerk(), processes=[waits, done], clock=clock) as runtime:
        for name in ("idle", "forked", "started", "origin"):
            await (await runtime.session(name)).run("hello")
        await (await runtime.session("parked")).run("ask")
        await (await runtime.session("queued")).run("ask")
        await (await runtime.session("queued")).send("and then")
        await (await (await runtime.session("forked")).fork(session_id="fork")).run("ask")
        await (await runtime.session("started")).start(waits, id="living")
        await (await runtime.session("origin")).start(waits, id="unseen", wake="none")
        await runtime.processes.revoke("origin", "unseen")
        handle = await runtime.start(done, id="over")
        await handle.result(SOON)
        await until(lambda: parked(runtime, "living", "unseen"))


async def parked(runtime: Runtime, *names: str) -> bool:
    return all([(await runtime.handle(name).record()).record.waits for name in names])


async def left(runtime: Runtime) -> set[str]:
    return {row.id for row in await runtime.sessions.list(limit=1000)}


async def test_only_what_is_idle_and_free_is_forgotten(place: Place) -> None:
    clock = VirtualClock()
    await furnished(place, clock)
    clock.advance(40 * DAY)
    async with place.runtime(clerk(), processes=[waits, done], clock=clock, retention=Retention(days=30)) as runtime:
        await until(lambda: forgotten(runtime))

        stay = {"forked", "started", "origin", "parked", "queued", "fork"}
        assert await left(runtime) == stay
        assert {row.id for row in await runtime.processes.list()} == {"living", "unseen"}
        with pytest.raises(SessionDeleted):
            await (await runtime.session("idle")).run("again")
        await runtime.handle("living").signal("go")
        assert await runtime.handle("living").result(SOON) == "gone"


async def forgotten(runtime: Runtime) -> bool:
    over = await runtime.store.process("over")
    return "idle" not in await left(runtime) and (over is None or over.pruned is not None)


async def test_what_is_young_stays_and_goes_when_its_time_has_come(place: Place) -> None:
    clock = VirtualClock()
    await furnished(place, clock)
    clock.advance(29 * DAY)
    async with place.runtime(clerk(), clock=clock, retention=Retention(days=30)) as runtime:
        assert "idle" in await left(runtime)
        clock.advance(2 * DAY)
        await until(lambda: forgotten(runtime))


async def test_a_session_that_was_used_meanwhile_is_not_deleted_by_who_looked_before(place: Place) -> None:
    clock = VirtualClock(start=1_000)
    async with place.runtime(clerk(), clock=clock) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        since = clock.now() + 1
        clock.advance(5)
        await session.run("again")

        assert await runtime.store.write(Delete("chat", clock.now(), since)) is False
        assert await runtime.store.write(Delete("chat", clock.now(), clock.now() + 1)) is True


async def test_one_worker_at_a_time_forgets(place: Place) -> None:
    clock = VirtualClock()
    async with place.runtime(clock=clock, retention=Retention(days=1)) as runtime:
        first = await runtime._worker.is_first_to_forget()
        async with place.runtime(clock=clock, retention=Retention(days=1)) as other:
            both = [await each._worker.is_first_to_forget() for each in (runtime, other)]
        async with place.runtime(clock=clock) as other:
            without = await runtime._worker.is_first_to_forget()

    assert (first, without) == (True, True)
    assert sorted(both) == [False, True]


async def test_a_host_prunes_when_it_wants_to(place: Place) -> None:
    clock = VirtualClock()
    async with place.runtime(clerk(), clock=clock) as runtime:
        await (await runtime.session("chat")).run("hello")
        assert await runtime.sessions.prune(3600) == 0
        clock.advance(3601)
        assert await runtime.sessions.prune(3600) == 1
        assert await left(runtime) == set()
        with pytest.raises(InvalidInput):
            await runtime.sessions.prune(-1)


@pytest.mark.parametrize("days", [0, -1, "30", None, True, float("nan"), 1e9])
def test_days_are_days(days: Any) -> None:
    with pytest.raises(InvalidDefinition, match="days="):
        Retention(days=days)


def test_retention_is_a_retention() -> None:
    wrong: Any = 30
    with pytest.raises(InvalidDefinition, match="retention="):
        Runtime("memory", retention=wrong)
