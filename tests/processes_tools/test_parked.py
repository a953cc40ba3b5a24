"""A turn that only waits for processes is parked on disk, and goes on by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import ProcessContext, Runtime, ToolContext, process, tool
from perdure.builtin.processes import process_tools
from perdure.errors import ToolError
from perdure.model.outcome import Finished, Waiting
from perdure.model.session import SessionRow
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown
from perdure.processes.local import External
from tests.kit import SOON, Place, crash, until
from tests.processes_tools.talk import Talk, agent_of, call


@process(signals={"go": str})
async def waits(ctx: ProcessContext[Any]) -> str:
    answer: str = await ctx.wait_signal("go")
    return answer


def awaiting(**more: Any) -> Talk:
    return Talk(
        [call("start_process", name="waits")],
        lambda found: [call("await_process", handle=found[0], **more)],
        lambda found: f"got {found[0]}",
    )


def agent(talk: Talk, *tools: Any, **options: Any) -> Any:
    return agent_of(talk, *process_tools(waits), *tools, **options)


def opened(place: Place, talk: Talk, *tools: Any, **options: Any) -> Runtime:
    return place.runtime(agent(talk, *tools), processes=[waits], park_after=0, **options)


async def parked(runtime: Runtime) -> SessionRow:
    """The row of the session, once its turn is parked and has left memory."""

    async def there() -> bool:
        row = await runtime.store.session("chat")
        return row is not None and row.state == "parked" and "chat" not in runtime._turns.cache.tasks

    await until(there)
    row = await runtime.store.session("chat")
    assert row is not None
    return row


async def test_a_turn_that_only_waits_for_a_process_is_parked_and_goes_on_by_itself(place: Place) -> None:
    talk = awaiting()
    async with opened(place, talk) as runtime:
        session = await runtime.session("chat")
        result = asyncio.create_task(session.run("go"))
        row = await parked(runtime)
        waits = [(w.kind, w.state, w.due is not None) for w in await runtime.store.waits(row.sid)]
        shown = await session.pending()
        await until(lambda: not len(runtime._supervisor))
        asked = len(talk.requests)
        await runtime.handle("chat.1.1.0").signal("go", "on")
        ended = await asyncio.wait_for(result, SOON)

    assert (row.owner, row.reason) == (None, "waits for processes")
    assert waits == [("process", "open", True)]
    assert shown == []
    assert asked == 2
    assert ended.outcome == Finished("got on")
    assert [(each.tool, each.attempts, each.repeated) for each in ended.tool_calls] == [
        ("start_process", 1, 0),
        ("await_process", 1, 0),
    ]


async def test_the_host_of_a_parked_turn_is_not_told_that_it_waits(place: Place) -> None:
    """It needs no answer: `run` and a stream wait on, and what is queued behind it is not refused."""
    talk = awaiting()
    async with opened(place, talk) as runtime:
        session = await runtime.session("chat")
        async with session.stream("go") as turn:
            first = asyncio.create_task(turn.result())
            await parked(runtime)
            behind = asyncio.create_task(session.run("and then?"))
            await until(lambda: session_has_input(runtime))
            await runtime.handle("chat.1.1.0").signal("go", "on")
            ended = await asyncio.wait_for(first, SOON)
        later = await asyncio.wait_for(behind, SOON)

    assert ended.outcome == Finished("got on")
    assert isinstance(later.outcome, Finished)


async def session_has_input(runtime: Runtime) -> bool:
    row = await runtime.store.session("chat")
    return row is not None and bool(await runtime.store.inbox(row.sid))


async def test_any_runtime_of_the_store_goes_on_after_a_crash(place: Place) -> None:
    talk = awaiting()
    first = opened(place, talk)
    await first.__aenter__()
    receipt = await (await first.session("chat")).send("go", key="1")
    await parked(first)
    await crash(first)
    async with opened(place, talk) as second:
        session = await second.session("chat")
        row = await parked(second)
        await until(lambda: second._turns.parked.waiting)  # the watch has found it
        await second.handle("chat.1.1.0").signal("go", "on")
        ended = await asyncio.wait_for(session.result(receipt.turn_id), SOON)

    assert row.generation == 1
    assert ended.outcome == Finished("got on")
    assert ended.tool_calls[1].attempts == 1
    assert len(talk.requests) == 3


async def test_a_process_that_ends_while_nobody_is_there_opens_the_turn(place: Place) -> None:
    talk = Talk(
        [call("begin")],
        lambda found: [call("await_process", handle=found[0])],
        lambda found: f"got {found[0]}",
    )

    @tool
    async def begin(ctx: ToolContext[Any]) -> dict[str, str]:
        return (await ctx.start(External("build"))).to_json()

    async with opened(place, talk, begin) as runtime:
        receipt = await (await runtime.session("chat")).send("go")
        await parked(runtime)
    async with Runtime(place.store()) as front:
        await front.processes.complete("chat.1.1.0.1", "built")
        row = await front.store.session("chat")
    async with opened(place, talk, begin) as runtime:
        ended = await asyncio.wait_for((await runtime.session("chat")).result(receipt.turn_id), SOON)

    assert row is not None
    assert (row.state, row.owner, row.reason) == ("open", None, None)
    assert ended.outcome == Finished("got built")


async def test_the_end_of_the_time_opens_a_parked_turn(place: Place) -> None:
    talk = awaiting(timeout=0.2)
    async with opened(place, talk) as runtime:
        ended = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)
        live = await runtime.handle("chat.1.1.0").status()

    outcome = ended.tool_calls[1].outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "timed_out"
    assert live in ("running", "waiting")


async def test_two_runtimes_go_on_with_a_parked_turn_once(place: Place) -> None:
    talk = awaiting()
    async with opened(place, talk) as first, opened(place, talk) as second:
        result = asyncio.create_task((await first.session("chat")).run("go"))
        await parked(first)
        await second.handle("chat.1.1.0").signal("go", "on")
        ended = await asyncio.wait_for(result, SOON)

    assert ended.outcome == Finished("got on")
    assert len(talk.requests) == 3


async def test_what_is_said_to_a_parked_turn_ends_its_wait(place: Place) -> None:
    talk = Talk(
        [call("start_process", name="waits")],
        lambda found: [call("await_process", handle=found[0])],
        "I stopped waiting",
    )
    async with opened(place, talk) as runtime:
        session = await runtime.session("chat")
        result = asyncio.create_task(session.run("go"))
        await parked(runtime)
        await session.steer("forget it")
        ended = await asyncio.wait_for(result, SOON)
        live = await runtime.handle("chat.1.1.0").status()

    outcome = ended.tool_calls[1].outcome
    assert isinstance(outcome, Ok)
    assert outcome.value["process_id"] == "chat.1.1.0"
    assert outcome.value["status"] in ("running", "waiting")
    assert [m.text for m in talk.requests[2].messages if m.role == "user"] == ["go", "forget it"]
    assert ended.text == "I stopped waiting"
    assert live in ("running", "waiting")


async def test_what_is_said_ends_a_wait_in_memory_too(place: Place) -> None:
    talk = awaiting()
    async with place.runtime(agent(talk), processes=[waits], park_after=None) as runtime:
        session = await runtime.session("chat")
        result = asyncio.create_task(session.run("go"))
        await until(lambda: "await_process" in runtime._dispatcher.running.values())
        await session.steer("forget it")
        ended = await asyncio.wait_for(result, SOON)

    outcome = ended.tool_calls[1].outcome
    assert isinstance(outcome, Ok)
    assert outcome.value["status"] in ("running", "waiting")


async def test_what_is_for_the_end_of_the_turn_does_not_end_its_wait(place: Place) -> None:
    talk = Talk(
        [call("start_process", name="waits")],
        lambda found: [call("await_process", handle=found[0])],
        lambda found: f"got {found[0]}",
        "and that",
    )
    async with opened(place, talk) as runtime:
        session = await runtime.session("chat")
        result = asyncio.create_task(session.run("go"))
        before = (await parked(runtime)).generation
        await session.steer("when you are done", boundary="before_completion")
        await until(lambda: generation_above(runtime, before))  # it looked, and parked again
        await parked(runtime)
        await runtime.handle("chat.1.1.0").signal("go", "on")
        ended = await asyncio.wait_for(result, SOON)

    assert ended.tool_calls[1].outcome == Ok("on")
    assert ended.text == "and that"


async def generation_above(runtime: Runtime, number: int) -> bool:
    row = await runtime.store.session("chat")
    return row is not None and row.generation > number


async def test_a_cancel_ends_a_parked_turn_and_what_it_started(place: Place) -> None:
    talk = awaiting()
    async with opened(place, talk) as runtime:
        session = await runtime.session("chat")
        result = asyncio.create_task(session.run("go"))
        await parked(runtime)
        await session.cancel("enough")
        ended = await asyncio.wait_for(result, SOON)
        row = await runtime.store.session("chat")
        assert row is not None
        left = [wait for wait in await runtime.store.waits(row.sid) if wait.turn == 1]
        await until(lambda: is_over(runtime, "chat.1.1.0"))

    assert isinstance(ended.outcome, Cancelled)
    assert isinstance(ended.tool_calls[1].outcome, OutcomeUnknown)
    assert (row.head, left) == (1, [])


async def is_over(runtime: Runtime, process_id: str) -> bool:
    row = await runtime.store.process(process_id)
    return row is not None and not row.live


async def test_a_session_is_deleted_while_its_turn_is_parked(place: Place) -> None:
    talk = awaiting()
    async with opened(place, talk) as runtime:
        session = await runtime.session("chat")
        await session.send("go")
        await parked(runtime)
        await runtime.sessions.delete("chat")
        await runtime.handle("chat.1.1.0").signal("go", "on")
        assert await runtime.handle("chat.1.1.0").result(SOON) == "on"
        row = await runtime.store.session("chat")

    assert row is not None
    assert (row.deleted, row.turn, row.state) == (True, None, "idle")


async def test_a_fork_of_a_session_with_a_parked_turn_waits_for_nothing(place: Place) -> None:
    talk = Talk("first", [call("start_process", name="waits")], lambda found: [call("await_process", handle=found[0])])
    async with opened(place, talk) as runtime:
        session = await runtime.session("chat")
        first = await session.run("hello")
        await session.send("go")
        await parked(runtime)
        branch = await session.fork(session_id="branch")
        row = await runtime.store.session("branch")
        history = await branch.history()

    assert row is not None
    assert (row.state, row.turn) == ("idle", None)
    assert [message.text for message in history] == ["hello", first.text]


async def test_a_call_that_waits_for_a_person_beside_is_asked_for(place: Place) -> None:
    @tool(approval="ask")
    async def order() -> str:
        return "ordered"

    talk = Talk(
        [call("start_process", name="waits")],
        lambda found: [call("await_process", handle=found[0]), call("order")],
        lambda found: f"got {found}",
    )
    async with opened(place, talk, order) as runtime:
        session = await runtime.session("chat")
        waiting = await asyncio.wait_for(session.run("go", key="1"), SOON)
        row = await parked(runtime)
        assert isinstance(waiting.outcome, Waiting)
        await session.reject(waiting.pending[0].call_id, "no")
        await until(lambda: only_processes(runtime))
        await runtime.handle("chat.1.1.0").signal("go", "on")
        ended = await asyncio.wait_for(session.result(waiting.turn_id), SOON)

    assert [each.tool for each in waiting.pending] == ["order"]
    assert row.reason is None
    assert [each.outcome for each in ended.tool_calls[1:]] == [Ok("on"), Denied("no", "host")]


async def only_processes(runtime: Runtime) -> bool:
    row = await runtime.store.session("chat")
    return row is not None and row.state == "parked" and row.reason == "waits for processes"


async def test_several_waits_of_one_reply_end_one_by_one(place: Place) -> None:
    talk = Talk(
        [call("start_process", name="waits"), call("start_process", name="waits")],
        lambda found: [call("await_process", handle=each) for each in found],
        lambda found: " ".join(found),
    )
    async with opened(place, talk) as runtime:
        result = asyncio.create_task((await runtime.session("chat")).run("go"))
        before = (await parked(runtime)).generation
        await runtime.handle("chat.1.1.1").signal("go", "second")
        await until(lambda: generation_above(runtime, before))
        await parked(runtime)
        await runtime.handle("chat.1.1.0").signal("go", "first")
        ended = await asyncio.wait_for(result, SOON)

    assert ended.text == "first second"
    assert [each.attempts for each in ended.tool_calls[2:]] == [1, 1]


# ---------------------------------------------------------------------- tools of a host


async def test_a_tool_of_the_host_parks_and_runs_again_to_where_it_was(place: Place) -> None:
    runs: list[tuple[int, str]] = []

    @tool(recovery="rerun")
    async def both(ctx: ToolContext[Any]) -> list[Any]:
        one, two = await ctx.start(waits, key="one"), await ctx.start(waits, key="two")
        runs.append((ctx.attempt, ctx.idempotency_key))
        early = await ctx.wait_ended(one, timeout=0)
        first = await ctx.wait_ended(one)
        then = await ctx.wait_ended(two.to_json(), one.id) if first == "ended" else ""
        return [early, first, then, await one.result()]

    talk = Talk([call("both")], lambda found: str(found[0]))
    async with opened(place, talk, both) as runtime:
        result = asyncio.create_task((await runtime.session("chat")).run("go"))
        await parked(runtime)
        await runtime.handle("chat.1.1.0.one").signal("go", "on")
        ended = await asyncio.wait_for(result, SOON)

    assert ended.tool_calls[0].outcome == Ok(["ended", "ended", "ended", "on"])
    assert len(runs) == 2
    assert len(set(runs)) == 1


async def test_a_tool_that_may_not_run_again_may_not_wait_so(place: Place) -> None:
    @tool
    async def once(ctx: ToolContext[Any]) -> str:
        return await ctx.wait_ended(await ctx.start(waits))

    talk = Talk([call("once")], "ok")
    async with opened(place, talk, once) as runtime:
        ended = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

    outcome = ended.tool_calls[0].outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "tool_wait_not_declared"
    assert 'recovery="rerun"' in outcome.message


@pytest.mark.parametrize("given", [(), ("nobody",), ({"__handle__": "process", "id": "nobody"},), (3,)])
async def test_what_cannot_be_waited_for_is_refused(place: Place, given: tuple[Any, ...]) -> None:
    @tool(recovery="rerun")
    async def wait(ctx: ToolContext[Any]) -> str:
        return await ctx.wait_ended(*given)

    talk = Talk([call("wait")], "ok")
    async with opened(place, talk, wait) as runtime:
        ended = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

    assert isinstance(ended.tool_calls[0].outcome, Failed)


async def test_a_tool_without_a_session_cannot_wait() -> None:
    context: ToolContext[Any] = ToolContext(tool="alone")
    with pytest.raises(ToolError, match="processes are unavailable here"):
        await context.wait_ended("x")


async def test_a_background_tool_waits_without_a_place(place: Place) -> None:
    @tool(background=True, recovery="rerun")
    async def follow(ctx: ToolContext[Any]) -> str:
        work = await ctx.start(waits, key="w")
        return f"{await ctx.wait_ended(work)} {await ctx.wait_ended(work, timeout=0)}"

    talk = Talk([call("follow")], "ok")
    async with opened(place, talk, follow, concurrency=1) as runtime:
        await (await runtime.session("chat")).run("go")
        await until(lambda: is_there(runtime, "chat.1.1.0.w"))
        await runtime.handle("chat.1.1.0.w").signal("go", "on")
        value = await runtime.handle("chat.1.1.0").result(SOON)

    assert value == "ended ended"


async def is_there(runtime: Runtime, process_id: str) -> bool:
    return await runtime.store.process(process_id) is not None


async def test_a_circle_of_waits_is_refused_also_where_one_of_them_is_parked(place: Place) -> None:
    """A turn waits on disk for a process that wants to wait for the next turn of the same session."""
    said_back: list[str] = []

    @tool(background=True)
    async def asks_back(ctx: ToolContext[Any]) -> str:
        await until(lambda: is_parked(ctx.deps["runtime"]))
        try:
            await (await ctx.deps["runtime"].session("chat")).run("what?")
        except Exception as error:
            said_back.append(type(error).__name__)
        return "done"

    talk = Talk([call("asks_back")], lambda found: [call("await_process", handle=found[0])], lambda found: str(found))
    deps: dict[str, Any] = {}
    async with opened(place, talk, asks_back, deps=deps) as runtime:
        deps["runtime"] = runtime
        ended = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

    assert said_back == ["WaitsForItself"]
    assert ended.tool_calls[1].outcome == Ok("done")


async def is_parked(runtime: Runtime) -> bool:
    row = await runtime.store.session("chat")
    return row is not None and row.state == "parked"
