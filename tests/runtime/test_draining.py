"""Draining a Runtime: nothing new is taken up, and what running work waits for goes on as part of it."""

import asyncio
from typing import Any

import pytest

from perdure import Agent, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.errors import RuntimeClosed
from perdure.model.tool import Ok
from perdure.sessions.services.host import SessionHost
from perdure.testing import ScriptedModel, VirtualClock
from tests.kit import SOON, Place, until


class Held:
    """A turn that is under way when draining begins: its first call is held, and what follows it comes after."""

    def __init__(self) -> None:
        self.running, self.release = asyncio.Event(), asyncio.Event()

        @tool
        async def hold() -> str:
            self.running.set()
            await self.release.wait()
            return "held"

        self.tool = hold

    def agent(self, then: Any, *tools: Any, **more: Any) -> Agent[str]:
        return Agent(ScriptedModel([[ToolCall("h", "hold")], *then]), name="parent", tools=[self.tool, *tools], **more)

    async def drained(self, runtime: Runtime) -> tuple[bool, Any]:
        """Say something, drain while that is held, and let it go on: whether that ended, and how the turn did."""
        receipt = await (await runtime.session("chat", agent="parent")).send("go")
        await self.running.wait()
        draining = asyncio.create_task(runtime.drain(SOON))
        await asyncio.sleep(0)
        self.release.set()
        return await draining, (await receipt.result(SOON))


async def test_a_subagent_that_is_asked_while_draining_answers(place: Place) -> None:
    held = Held()
    child = Agent(ScriptedModel(["from the child"]), name="child")
    agent = held.agent([[ToolCall("c", "child", {"task": "x"})], "done"], child.as_tool(description="A child."))
    async with place.runtime(agent, grace=0) as runtime:
        drained, result = await held.drained(runtime)

    assert drained
    assert (result.text, result.tool_calls[1].outcome) == ("done", Ok("from the child"))


async def test_what_running_work_begins_to_wait_for_is_taken_up_before_the_watch_looks_again(place: Place) -> None:
    held, rooms = Held(), list[Runtime]()

    @tool
    async def consult() -> str:
        other = await rooms[0].session("other", agent="child")
        return (await other.run("x")).text

    child = Agent(ScriptedModel(["from the child", "to the tool"]), name="child")
    calls = [[ToolCall("c", "child", {"task": "x"})], [ToolCall("o", "consult")], "done"]
    agent = held.agent(calls, child.as_tool(description="A child."), consult)
    async with place.runtime(agent, grace=0) as runtime:
        rooms.append(runtime)
        runtime._watching.cancel()  # it does not look at all
        drained, result = await held.drained(runtime)

    assert drained
    assert [call.outcome for call in result.tool_calls[1:]] == [Ok("from the child"), Ok("to the tool")]


async def test_a_subagent_of_a_subagent_answers_while_draining(place: Place) -> None:
    held = Held()
    least = Agent(ScriptedModel(["least"]), name="least")
    child = Agent(
        ScriptedModel([[ToolCall("l", "least", {"task": "x"})], "child"]),
        name="child",
        tools=[least.as_tool(description="The least.")],
    )
    agent = held.agent([[ToolCall("c", "child", {"task": "x"})], "done"], child.as_tool(description="A child."))
    async with place.runtime(agent, grace=0) as runtime:
        drained, result = await held.drained(runtime)

    assert drained
    assert result.tool_calls[1].outcome == Ok("child")


async def test_a_process_that_a_tool_starts_and_awaits_while_draining_runs(place: Place) -> None:
    """It is started to outlive its turn, and awaited all the same: being waited for is what counts."""
    held = Held()

    @process
    async def leaf(ctx: ProcessContext) -> str:
        return "leaf"

    @process
    async def stem(ctx: ProcessContext) -> str:
        return f"stem and {await (await ctx.start(leaf)).result()}"

    @tool
    async def grow(ctx: ToolContext[None]) -> str:
        return str(await (await ctx.start(stem)).result())

    agent = held.agent([[ToolCall("g", "grow")], "done"], grow)
    async with place.runtime(agent, processes=[stem, leaf], grace=0) as runtime:
        drained, result = await held.drained(runtime)

    assert drained
    assert result.tool_calls[1].outcome == Ok("stem and leaf")


async def test_a_process_that_waits_for_a_place_when_draining_begins_gets_one(place: Place) -> None:
    held, begun, go_on = Held(), asyncio.Event(), asyncio.Event()

    @process
    async def first(ctx: ProcessContext) -> str:
        async def wait() -> str:
            begun.set()
            await go_on.wait()
            return "first"

        return str(await ctx.step(wait))

    @process
    async def second(ctx: ProcessContext) -> str:
        return "second"

    @tool
    async def ask(ctx: ToolContext[None]) -> str:
        handle = await ctx.start(second)
        held.running.set()
        return str(await handle.result())

    agent = Agent(ScriptedModel([[ToolCall("a", "ask")], "done"]), name="parent", tools=[ask])
    async with place.runtime(agent, processes=[first, second], concurrency=1, grace=0) as runtime:
        await runtime.start(first)
        await begun.wait()
        other = await runtime.start(second, id="of the host")
        receipt = await (await runtime.session("chat")).send("go")
        await held.running.wait()
        draining = asyncio.create_task(runtime.drain(SOON))
        await asyncio.sleep(0)
        go_on.set()

        assert await draining
        assert (await receipt.result(SOON)).tool_calls[0].outcome == Ok("second")
        assert await other.status() == "queued"
        row = await runtime.store.process("of the host")
        assert row is not None
        assert (row.owner, row.attempts) == (None, 0)


async def test_processes_that_wait_on_disk_are_taken_up_while_draining_if_running_work_waits(place: Place) -> None:
    """The tool waits for `parent`, which waits for `sleeper`; both are nothing but rows when the time has come."""
    held, clock = Held(), VirtualClock()

    @process
    async def sleeper(ctx: ProcessContext) -> str:
        await ctx.sleep(60)
        return "awake"

    @process
    async def parent(ctx: ProcessContext) -> str:
        return str(await (await ctx.start(sleeper)).result())

    @tool
    async def nap(ctx: ToolContext[None]) -> str:
        return str(await (await ctx.start(parent)).result())

    agent = held.agent([[ToolCall("n", "nap")], "done"], nap)
    async with place.runtime(agent, processes=[parent, sleeper], grace=0, clock=clock) as runtime:

        async def both_wait() -> bool:
            return len(await runtime.processes.list("waiting")) == 2

        draining = asyncio.create_task(held.drained(runtime))
        await until(both_wait)
        clock.advance(61)
        drained, result = await draining

    assert drained
    assert result.tool_calls[1].outcome == Ok("awake")


async def test_a_turn_of_another_session_that_a_tool_waits_for_runs_while_draining(place: Place) -> None:
    """Also behind an input that nobody waits for; what comes after it stays for the next entry."""
    held, rooms = Held(), list[Runtime]()

    @tool
    async def consult() -> str:
        other = await rooms[0].session("other", agent="other")
        await other.send("before")
        answer = await other.send("the question")
        await other.send("after")
        return (await answer.result()).text

    other = Agent(ScriptedModel(["a", "b", "c"]), name="other")
    agent = held.agent([[ToolCall("c", "consult")], "done"], consult)
    async with place.runtime(agent, other, grace=0) as runtime:
        rooms.append(runtime)
        drained, result = await held.drained(runtime)
        row = await runtime.store.session("other")

    assert drained
    assert result.tool_calls[1].outcome == Ok("b")
    assert row is not None
    assert (row.head, row.turn, row.owner) == (2, 3, None)


async def test_a_subagent_that_waits_for_a_person_goes_on_while_draining(place: Place) -> None:
    held = Held()

    @tool(approval="ask")
    async def sign() -> str:
        return "signed"

    child = Agent(ScriptedModel([[ToolCall("s", "sign")], "child"]), name="child", tools=[sign])
    agent = held.agent([[ToolCall("c", "child", {"task": "x"})], "done"], child.as_tool(description="A child."))
    async with place.runtime(agent, grace=0) as runtime:
        drain = asyncio.create_task(held.drained(runtime))
        session = await runtime.session("chat.1.2.0~child", agent="child")
        await until(session.pending)
        await session.approve("chat.1.2.0~child.1.1.0")
        drained, result = await drain

    assert drained
    assert result.tool_calls[1].outcome == Ok("child")


async def test_what_is_only_started_while_draining_is_left_for_the_next_entry(place: Place) -> None:
    held = Held()
    child = Agent(ScriptedModel(["later"]), name="child")

    @process
    async def chore(ctx: ProcessContext) -> str:
        return "done too"

    @tool
    async def order(ctx: ToolContext[None]) -> str:
        return (await ctx.start(chore, wake="none")).id

    calls = [ToolCall("c", "child", {"task": "x"}), ToolCall("o", "order")]
    agent = held.agent([calls, "done"], child.as_tool(description="A child.", background=True), order)
    async with place.runtime(agent, processes=[chore], grace=0) as runtime:
        drained, result = await held.drained(runtime)
        rows = await runtime.processes.list()

        assert drained
        assert result.text == "done"
        assert [(row.owner, row.attempts, row.status) for row in rows] == [(None, 0, "running")] * 2
    again = Agent(ScriptedModel(["told"]), name="parent", tools=[held.tool, child.as_tool(description="A child.")])
    async with place.runtime(again, processes=[chore]) as runtime:
        assert sorted([await runtime.handle(row.id).result(SOON) for row in rows]) == ["done too", "later"]


async def test_code_in_memory_that_is_spawned_while_draining_runs_before_it_is_over(place: Place) -> None:
    """No other Runtime could ever begin it, and nobody waits for it."""
    held, done = Held(), list[str]()

    async def tidy() -> None:
        done.append("tidied up")

    @tool
    async def spawn(ctx: ToolContext[None]) -> None:
        host = ctx.host
        assert isinstance(host, SessionHost)
        await host.spawn_hidden_task("tidy", tidy)

    agent = held.agent([[ToolCall("s", "spawn")], "done"], spawn)
    async with place.runtime(agent, grace=0) as runtime:
        drained, _ = await held.drained(runtime)

        assert drained
        assert done == ["tidied up"]


async def test_the_host_may_wait_while_draining_and_nothing_is_begun_for_it(place: Place) -> None:
    """What running work waits for is begun after it, so somebody has looked at both."""
    held = Held()
    child = Agent(ScriptedModel(["from the child"]), name="child")
    agent = held.agent([[ToolCall("c", "child", {"task": "x"})], "done"], child.as_tool(description="A child."))
    other = Agent(ScriptedModel([]), name="other")
    async with place.runtime(agent, other, grace=0) as runtime:
        first = await (await runtime.session("chat", agent="parent")).send("one")
        await held.running.wait()
        draining = asyncio.create_task(runtime.drain(SOON))
        await asyncio.sleep(0)
        session = await runtime.session("other", agent="other")
        waiter = asyncio.create_task(session.run("two"))

        async def is_accepted() -> bool:
            return await runtime.store.session("other") is not None

        await until(is_accepted)
        held.release.set()

        assert await draining
        assert (await first.result(SOON)).tool_calls[1].outcome == Ok("from the child")
        row = await runtime.store.session("other")
        assert row is not None
        assert (row.turn, row.owner, row.generation) == (1, None, 0)
    with pytest.raises(RuntimeClosed):
        await waiter
