"""Processes that tools and hosts start: ctx.start, a tool of a host, external work."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import ProcessContext, Runtime, ToolContext, ToolError, process, tool
from perdure.errors import InvalidDefinition, InvalidInput, InvalidProcess, WrongAuthority
from perdure.model.process import Cause, EventType, HostOrigin, SessionOrigin, Success, WakeTarget
from perdure.model.tool import Failed, Ok
from perdure.model.write import WorkflowKey
from perdure.processes.local import External
from tests.keys import within_store
from tests.kit import SOON, Place, until
from tests.processes_tools.talk import Talk, agent_of, call, ended, event_types, handle, ids, outcomes, row_of, said


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@process
async def twice(ctx: ProcessContext[Any], n: int) -> int:
    return await ctx.step(double, n)


async def double(n: int) -> int:
    return 2 * n


# ---------------------------------------------------------------------- a tool starts something


async def test_a_tool_starts_a_function_and_waits_for_it(place: Place) -> None:
    @tool
    async def work(ctx: ToolContext[Any]) -> int:
        started = await ctx.start(twice, {"n": 21}, label="the answer")
        found: int = await started.result()
        return found

    async with place.runtime(agent_of(Talk([call("work")]), work), processes=[twice]) as runtime:
        assert await outcomes(runtime) == [Ok(42)]
        row = await row_of(runtime, "chat.1.1.0.1")
        granted = await runtime.store.is_granted("chat", "chat.1.1.0.1")

    registration = row.registration
    assert (registration.kind, registration.label) == ("function", "the answer")
    assert registration.origin == SessionOrigin("chat")
    assert registration.cause == Cause("tool_call", "chat.1.1.0")
    assert (registration.parent, registration.parent_end) == ("chat.1", "abandon")
    assert registration.wake is None
    assert registration.env is not None
    assert granted


async def test_starts_are_told_apart_by_their_number_or_their_key(place: Place) -> None:
    @tool
    async def work(ctx: ToolContext[Any]) -> list[str]:
        started = [
            await ctx.start(twice, {"n": 1}),
            await ctx.start(twice, {"n": 1}),
            await ctx.start(twice, {"n": 2}, key="nightly"),
            await ctx.start(twice, {"n": 2}, key="nightly"),
        ]
        return [each.id for each in started]

    async with place.runtime(agent_of(Talk([call("work")]), work), processes=[twice]) as runtime:
        (outcome,) = await outcomes(runtime)

    assert outcome == Ok(["chat.1.1.0.1", "chat.1.1.0.2", "chat.1.1.0.nightly", "chat.1.1.0.nightly"])


async def test_an_attempt_that_is_made_again_starts_the_same_process(place: Place) -> None:
    @tool(recovery="rerun")
    async def work(ctx: ToolContext[Any]) -> str:
        started = await ctx.start(twice, {"n": 1})
        if ctx.attempt == 1:
            begun.set()
            await asyncio.Event().wait()
        return started.id

    begun = asyncio.Event()
    agent = agent_of(Talk([call("work")]), work)
    async with place.runtime(agent, processes=[twice], grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await begun.wait()
    async with place.runtime(agent, processes=[twice]) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).result("chat.1"), SOON)
        rows = await runtime.processes.list()

    assert result.tool_calls[0].outcome == Ok("chat.1.1.0.1")
    assert ids(rows) == ["chat.1.1.0.1"]


async def test_a_start_may_wake_the_session(place: Place) -> None:
    @tool
    async def work(ctx: ToolContext[Any]) -> None:
        await ctx.start(twice, {"n": 1}, wake="notify")

    async with place.runtime(agent_of(Talk([call("work")]), work, name="clerk"), processes=[twice]) as runtime:
        await said(runtime)
        row = await row_of(runtime, "chat.1.1.0.1")

    assert row.registration.wake == WakeTarget("chat", "clerk", "notify")


@process
async def patient(ctx: ProcessContext[Any]) -> None:
    await ctx.wait_signal("never")


@pytest.mark.parametrize(("parent_end", "status"), [("cancel", "cancelled"), ("abandon", "waiting")])
async def test_what_a_turn_started_ends_with_it_only_if_that_was_said(
    place: Place, parent_end: Any, status: str
) -> None:
    @tool
    async def work(ctx: ToolContext[Any]) -> None:
        await ctx.start(patient, parent_end=parent_end)

    async with place.runtime(agent_of(Talk([call("work")]), work), processes=[patient]) as runtime:
        await said(runtime)
        await until(lambda: has_status(runtime, "chat.1.1.0.1", status))
        asked = (await row_of(runtime, "chat.1.1.0.1")).record.cancel

    assert (asked is not None) == (parent_end == "cancel")


async def has_status(runtime: Runtime, process_id: str, status: str) -> bool:
    return (await row_of(runtime, process_id)).status == status


@pytest.mark.parametrize("options", [{"wake": "loudly"}, {"parent_end": "kill"}])
async def test_a_start_with_a_word_that_nobody_knows_is_refused(place: Place, options: dict[str, Any]) -> None:
    @tool
    async def work(ctx: ToolContext[Any]) -> str:
        try:
            await ctx.start(twice, {"n": 1}, **options)
        except InvalidInput as error:
            return str(error)
        return "started"

    async with place.runtime(agent_of(Talk([call("work")]), work), processes=[twice]) as runtime:
        (outcome,) = await outcomes(runtime)
        rows = await runtime.processes.list()

    assert isinstance(outcome, Ok)
    assert "is not usable here: give one of" in outcome.value
    assert ids(rows) == []


async def test_what_cannot_be_started_is_told_to_the_tool(place: Place) -> None:
    @tool
    async def work(ctx: ToolContext[Any]) -> str:
        try:
            await ctx.start("no such thing", {})
        except InvalidProcess as error:
            return str(error)
        return "started"

    async with place.runtime(agent_of(Talk([call("work")]), work)) as runtime:
        (outcome,) = await outcomes(runtime)

    assert isinstance(outcome, Ok)
    assert "'no such thing' cannot be started" in outcome.value


async def test_a_tool_on_a_thread_cannot_start_anything(place: Place) -> None:
    @tool
    def work(ctx: ToolContext[Any]) -> None:
        _ = ctx.start(twice, {"n": 1})

    async with place.runtime(agent_of(Talk([call("work")]), work), processes=[twice]) as runtime:
        assert await outcomes(runtime) == [
            Failed(
                "start_needs_async",
                "tool 'work' runs on a thread and cannot await a start: declare it with `async def`",
            )
        ]


async def test_a_context_of_no_session_says_that_it_cannot_start_anything() -> None:
    with pytest.raises(ToolError, match="they belong to the call of a session"):
        await ToolContext[Any]().start(twice)


# ---------------------------------------------------------------------- a background tool starts something


async def test_what_a_background_tool_starts_is_its_child_in_the_same_environment(place: Place) -> None:
    @tool(background=True)
    async def work(ctx: ToolContext[Any]) -> int:
        found: int = await (await ctx.start(add, {"a": 1, "b": 2})).result()
        return found

    async with place.runtime(agent_of(Talk([call("work")]), work, add)) as runtime:
        await said(runtime)
        assert await runtime.handle("chat.1.1.0").result(SOON) == 3
        parent, child = await row_of(runtime, "chat.1.1.0"), await row_of(runtime, "chat.1.1.0.1")

    assert child.registration.parent == "chat.1.1.0"
    assert child.registration.cause == Cause("process", "chat.1.1.0")
    assert child.registration.origin == SessionOrigin("chat")
    assert child.registration.env == parent.registration.env is not None
    assert child.registration.wake is None


async def test_background_tools_that_wait_for_their_children_do_not_block_each_other(place: Place) -> None:
    """More parents than places: who only waits has given its place up."""

    @tool(background=True)
    async def work(n: int, ctx: ToolContext[Any]) -> int:
        found: int = await (await ctx.start(add, {"a": n, "b": n})).result()
        return found

    talk = Talk([call("work", n=n) for n in range(70)])
    async with place.runtime(agent_of(talk, work, add)) as runtime:
        await said(runtime)
        found = [await runtime.handle(f"chat.1.1.{n}").result(SOON) for n in range(70)]
        busy = runtime._work.admission.in_use("processes")

    assert found == [2 * n for n in range(70)]
    assert busy == 0, "every place was given back"


# ---------------------------------------------------------------------- a host starts a tool


async def test_a_host_starts_a_tool_of_an_agent(place: Place) -> None:
    @tool(recovery="rerun")
    async def look(ctx: ToolContext[Any]) -> dict[str, Any]:
        return {"session": ctx.session_id, "turn": ctx.turn_id, "key": within_store(ctx.idempotency_key)}

    async with place.runtime(agent_of(Talk(), look)) as runtime:
        started = await runtime.start(look, id="look-1")
        assert await started.result(SOON) == {"session": "", "turn": "", "key": "look-1"}
        again = await runtime.start(look, id="look-1")
        row = await row_of(runtime, "look-1")
        assert await again.outcome() == await started.outcome()

    assert row.registration.origin == HostOrigin()
    assert (row.registration.recovery, row.registration.wake, row.registration.env) == ("rerunnable", None, None)


@pytest.mark.parametrize(
    ("recovery", "contract"), [("once", "owner_bound"), ("ask", "owner_bound"), ("rerun", "rerunnable")]
)
async def test_a_tool_s_recovery_is_its_contract(place: Place, recovery: Any, contract: str) -> None:
    @tool(recovery=recovery)
    async def look() -> None: ...

    async with place.runtime(agent_of(Talk(), look)) as runtime:
        started = await runtime.start(look)
        assert (await row_of(runtime, started.id)).registration.recovery == contract


async def test_a_host_is_told_what_cannot_be_started(place: Place) -> None:
    @tool
    async def stranger() -> None: ...

    @tool(deferred=True)
    async def later() -> None: ...

    async with place.runtime(agent_of(Talk(), add, later)) as runtime:
        with pytest.raises(InvalidProcess, match="give it to one of its agents"):
            await runtime.start(stranger)
        with pytest.raises(InvalidProcess, match="invalid arguments for add"):
            await runtime.start(add, {"a": 1})
        with pytest.raises(InvalidProcess, match="defers its completion"):
            await runtime.start(later)
        assert ids(await runtime.processes.list()) == []


# ---------------------------------------------------------------------- external work

BUILD = External("build", signals={"stop": {"type": "string"}}, events=["built", EventType("log")])


async def test_external_work_is_completed_by_whoever_does_it(place: Place) -> None:
    async with place.runtime(agent_of(Talk(), add)) as runtime:
        started = await runtime.start(BUILD, {"branch": "main"}, id="build-1", label="main")
        await started.signal("stop", "now")
        await runtime.processes.emit("build-1", "built", {"n": 1})
        row = await row_of(runtime, "build-1")
        ending = await runtime.processes.complete(started, {"file": "main.tar"})
        again = await runtime.processes.complete(started, {"file": "main.tar"})
        late = await runtime.processes.complete(started, "something else")
        output, types = await started.outcome(), await event_types(runtime, "build-1")

    registration = row.registration
    assert (registration.kind, registration.name, registration.input) == ("external", "build", {"branch": "main"})
    assert (registration.recovery, row.owner) == ("externally_owned", None)
    assert [ending.status, again.status, late.status] == ["committed", "already_applied", "superseded"]
    assert output == Success({"file": "main.tar"})
    assert types == ["process.created", "signal.stop", "built", "process.completed"]


async def test_nobody_here_claims_external_work(place: Place) -> None:
    async with place.runtime(agent_of(Talk(), add)) as runtime:
        await runtime.start(BUILD, id="build-1")
    async with place.runtime(agent_of(Talk(), add)) as runtime:
        await runtime.start(add, {"a": 1, "b": 2}, id="other")
        await ended(runtime, "other")
        row = await row_of(runtime, "build-1")

    assert (row.status, row.owner, row.record.first_started) == ("running", None, None)


async def test_only_its_owner_says_how_external_work_ended(place: Place) -> None:
    async with place.runtime(agent_of(Talk(), add)) as runtime:
        started = await runtime.start(BUILD)
        with pytest.raises(WrongAuthority):
            await runtime.processes.complete(started, 1, authority=WorkflowKey("k"))
        assert await started.status() == "running"


async def test_a_tool_may_start_external_work_whose_end_its_session_hears_of(place: Place) -> None:
    @tool
    async def build(ctx: ToolContext[Any]) -> dict[str, str]:
        return (await ctx.start(BUILD, {"branch": "main"}, wake="turn")).to_json()

    talk = Talk([call("build")])
    async with place.runtime(agent_of(talk, build)) as runtime:
        assert await outcomes(runtime) == [Ok(handle("chat.1.1.0.1"))]
        await runtime.processes.complete("chat.1.1.0.1", "all green")
        await until(lambda: talk.news)
        await runtime.wait_idle(SOON)

    assert "all green" in talk.news[0]


@pytest.mark.parametrize("name", ["", "x\n", "x" * 121])
def test_external_work_needs_a_name(name: str) -> None:
    with pytest.raises(InvalidDefinition, match="1 to 120 printable characters"):
        External(name)


@pytest.mark.parametrize("event", ["process.completed", "signal.go"])
def test_external_work_has_no_reserved_events(event: str) -> None:
    with pytest.raises(InvalidDefinition, match="is reserved"):
        External("x", events=[event])
