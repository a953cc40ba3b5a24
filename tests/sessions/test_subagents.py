"""An agent as a process: one turn of a session of its own, from its start to its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Struct

from perdure import Agent, Budget, Message, ModelRequest, ProcessContext, Runtime, ToolCall, process, tool
from perdure.errors import (
    InvalidDefinition,
    InvalidProcess,
    ProcessConflict,
    ProcessEnded,
    ProcessFailed,
    ProcessStuck,
)
from perdure.model.llm import ModelResponse, Usage
from perdure.model.process import Cancelled, Failure, Success
from perdure.model.tool import Cancelled as TurnCancelled
from perdure.processes.handle import ProcessHandle
from perdure.testing import FunctionModel, VirtualClock
from tests.kit import SOON, Place, TellingModel, crash, texts, until

ECHO = FunctionModel(lambda request: f"{len(request.messages)}: {request.messages[-1].text}")


@tool(approval="ask")
async def pay(amount: int) -> str:
    return f"paid {amount}"


def paying(request: ModelRequest) -> str | list[ToolCall]:
    found = [result for message in request.messages for result in message.tool_results]
    if not found:
        return [ToolCall("p", "pay", {"amount": 3})]
    return f"{found[0].content}, {request.messages[-1].text}".strip(", ")


async def waits(handle: ProcessHandle[Any]) -> None:
    await until(lambda: _is(handle, "waiting"))


async def _is(handle: ProcessHandle[Any], status: str) -> bool:
    return await handle.status() == status


async def events(handle: ProcessHandle[Any]) -> list[str]:
    return [event.type async for event in handle.events()]


# ---------------------------------------------------------------------- starting and ending


async def test_an_agent_is_started_like_any_process_and_its_answer_is_the_value(place: Place) -> None:
    worker = Agent(ECHO, name="worker")
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "hello"}, id="job")
        value = await handle.result()
        history = texts(await (await runtime.session("job~worker")).history())
        record = (await handle.record()).record

    assert value == "1: hello"
    assert history == ["hello", "1: hello"]
    assert record.external_ref == {"session_id": "job~worker"}, "where to look for what it did"


async def test_the_same_start_is_the_same_turn_and_another_content_conflicts(place: Place) -> None:
    model = TellingModel()
    worker = Agent(model, name="worker")
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        first = await runtime.start(worker, {"input": "hello"}, id="job")
        again = await runtime.start("worker", {"input": "hello"}, id="job")
        with pytest.raises(ProcessConflict):
            await runtime.start(worker, {"input": "something else"}, id="job")
        await model.next()
        model.say("once")
        values = [await first.result(), await again.result()]

    assert values == ["once", "once"]
    assert model.asked.empty()


class City(Struct):
    name: str
    people: int


async def test_the_value_of_an_agent_with_an_output_type_is_its_json(place: Place) -> None:
    typed: Agent[City] = Agent(FunctionModel(lambda _: '{"name": "Ulm", "people": 128000}'), name="typed", output=City)
    maybe: Any = City | None
    nothing: Agent[Any] = Agent(FunctionModel(lambda _: "null"), name="nothing", output=maybe)
    async with place.runtime(typed, nothing) as runtime, asyncio.timeout(SOON):
        city = await (await runtime.start(typed, {"input": "where?"})).result()
        none = await (await runtime.start(nothing, {"input": "where?"})).result()

    assert city == {"name": "Ulm", "people": 128000}
    assert none is None


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


async def test_a_schema_given_at_the_start_holds_for_the_answer_and_the_model_may_mend_it(place: Place) -> None:
    asked: list[ModelRequest] = []

    def answer(request: ModelRequest) -> str:
        asked.append(request)
        return "seven" if len(asked) == 1 else '```json\n{"n": 7}\n```'

    worker = Agent(FunctionModel(answer), name="worker")
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "count", "output": SCHEMA}, id="job")
        value = await handle.result()
        session = await runtime.session("job~worker")
        live = (await session.result("job~worker.1")).output
    async with place.runtime(worker) as runtime:
        read = (await (await runtime.session("job~worker")).result("job~worker.1")).output

    assert value == live == read == {"n": 7}
    assert [request.output_schema for request in asked] == [SCHEMA, SCHEMA]
    assert len(asked) == 2


async def test_it_begins_with_what_it_is_given_and_without_what_is_hidden(place: Place) -> None:
    seen: list[ModelRequest] = []

    @tool
    def look() -> str:
        return "nothing"

    @tool
    def send() -> str:
        return "sent"

    def answer(request: ModelRequest) -> str:
        seen.append(request)
        return "ok"

    worker = Agent(FunctionModel(answer), name="worker", tools=[look, send])
    seed = [Message("user", "The sky is green."), Message("assistant", "Noted.")]
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        args = {"input": "go", "seed": seed, "hidden": ["send"]}
        await (await runtime.start(worker, args, id="job")).result()

    (request,) = seen
    assert texts(request.messages) == ["The sky is green.", "Noted.", "go"]
    assert [spec.name for spec in request.tools] == ["look"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({}, "missing required field `input`"),
        ({"input": ""}, "empty"),
        ({"input": "a", "prompt": "b"}, "it takes: input, session_id, output"),
        ({"input": "a", "output": {"$ref": "#/lost"}}, "refers to '#/lost'"),
        ({"input": "a", "output": "str"}, "Expected `object | null`"),
        ({"input": "a", "seed": [{"role": "tool", "parts": []}]}, "cannot be said by 'tool'"),
        ({"input": "a", "session_id": " "}, "session id"),
        ({"input": "a", "session_id": "s", "hidden": ["x"]}, "settled when a session begins"),
    ],
)
async def test_a_start_that_makes_no_sense_is_refused_and_writes_nothing(args: dict[str, Any], told: str) -> None:
    async with Runtime("memory", agents=[Agent(ECHO, name="worker")]) as runtime:
        with pytest.raises(InvalidProcess, match=told):
            await runtime.start("worker", args)
        left = [*await runtime.processes.list(), *await runtime.sessions.list()]

    assert left == []


async def test_an_agent_that_is_not_part_of_the_runtime_is_refused_with_that_advice() -> None:
    other = Agent(ECHO, name="other")
    async with Runtime("memory", agents=[Agent(ECHO)]) as runtime:
        with pytest.raises(InvalidProcess, match=r"'other' is not part of this Runtime: pass it in `agents=\[…\]`"):
            await runtime.start(other, {"input": "hello"})
        with pytest.raises(InvalidProcess, match="cannot be started"):
            await runtime.start("other", {"input": "hello"})


async def test_who_runs_no_agents_may_leave_work_to_who_does(file: Place) -> None:
    worker = Agent(ECHO, name="worker")
    async with file.runtime() as client, asyncio.timeout(SOON):
        handle = await client.start(worker, {"input": "hello"}, id="job")
        async with file.runtime(worker):
            value = await handle.result()

    assert value == "1: hello"


# ---------------------------------------------------------------------- under a session


async def test_a_session_starts_an_agent_and_pays_for_it_under_its_label(place: Place) -> None:
    spending = FunctionModel(lambda _: ModelResponse("done", usage=Usage(input=10, output=1)))
    boss, worker = Agent(ECHO, name="boss"), Agent(spending, name="worker")
    async with place.runtime(boss, worker) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        handle = await session.start(worker, {"input": "look"}, id="job", label="research", wake="none")
        value = await handle.result()
        usage = await session.usage()
    async with place.runtime(boss, worker) as runtime:
        later = await (await runtime.session("s")).usage()
        said = (await (await runtime.session("s")).run("hello")).text

    assert (value, said) == ("done", "1: hello")
    assert (usage["research"].input, usage["research"].calls) == (10, 1)
    assert later == usage


async def test_a_durable_function_starts_agents_at_once_and_joins_them(place: Place) -> None:
    worker = Agent(ECHO, name="worker")

    @process
    async def panel(ctx: ProcessContext[None], topics: list[str]) -> list[str]:
        children = [await ctx.start(worker, {"input": topic}) for topic in topics]
        return [*await ctx.gather(*(child.result() for child in children))]

    async with place.runtime(worker, processes=[panel]) as runtime, asyncio.timeout(SOON):
        value = await (await runtime.start(panel, {"topics": ["tea", "milk"]}, id="p")).result()
        sessions = sorted([row.id for row in await runtime.sessions.list()])

    assert value == ["1: tea", "1: milk"]
    assert sessions == ["p.1~worker", "p.2~worker"]


async def test_many_more_agents_wait_than_processes_are_worked_on_at_once(place: Place) -> None:
    """A process that waits for its turn has no place among those that are worked on: nested ones cannot block."""
    gate = asyncio.Event()

    async def answer(request: ModelRequest) -> str:
        await gate.wait()
        return request.messages[-1].text

    worker = Agent(FunctionModel(answer), name="worker")
    async with place.runtime(worker) as runtime, asyncio.timeout(2 * SOON):
        handles = [await runtime.start(worker, {"input": str(n)}) for n in range(100)]
        await until(lambda: _begun(runtime, 100))
        gate.set()
        values = [await handle.result() for handle in handles]

    assert values == [str(n) for n in range(100)]


async def _begun(runtime: Runtime, count: int) -> bool:
    return len(await runtime.sessions.list(limit=1000)) == count


# ---------------------------------------------------------------------- ending badly


async def test_a_failed_child_tells_why_and_keeps_its_session(place: Place) -> None:
    def broken(request: ModelRequest) -> str:
        raise RuntimeError("no brain")

    lazy = Agent(FunctionModel(lambda _: [ToolCall("x", "nothing", {})]), name="lazy", budget=Budget(steps=2))
    worker = Agent(FunctionModel(broken), name="worker")
    async with place.runtime(worker, lazy) as runtime, asyncio.timeout(SOON):
        failed = await runtime.start(worker, {"input": "think"}, id="job")
        outcome, spent = await failed.outcome(), await (await runtime.start(lazy, {"input": "go"}, id="dear")).outcome()
        with pytest.raises(ProcessFailed, match="no brain"):
            await failed.result()
        history = texts(await (await runtime.session("job~worker")).history())

    assert isinstance(outcome, Failure)
    assert isinstance(spent, Failure)
    assert (outcome.code, outcome.message) == ("provider_failed", "provider_raised: RuntimeError: no brain")
    assert (outcome.data["session_id"], outcome.data["turn_id"]) == ("job~worker", "job~worker.1")
    assert (spent.code, spent.message) == ("budget_spent", "its budget of 2 steps is spent")
    assert history[0] == "think"


async def test_a_child_whose_session_is_deleted_fails(place: Place) -> None:
    model = TellingModel()
    worker = Agent(model, name="worker")
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "think"}, id="job")
        await model.next()
        await runtime.sessions.delete("job~worker")
        outcome = await handle.outcome()

    assert isinstance(outcome, Failure)
    assert outcome.code == "session_deleted"


# ---------------------------------------------------------------------- cancelling


async def test_cancelling_the_process_cancels_its_turn(place: Place) -> None:
    model = TellingModel()
    worker = Agent(model, name="worker")
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "think"}, id="job")
        await model.next()
        asked = await handle.cancel("too slow", by="ann")
        outcome = await handle.outcome()
        result = await (await runtime.session("job~worker")).result("job~worker.1")

    assert asked == "requested"
    assert outcome == Cancelled("ann", "too slow")
    assert result.outcome == TurnCancelled("ann", "too slow")


async def test_what_is_cancelled_before_anybody_began_it_makes_no_session(file: Place) -> None:
    worker = Agent(ECHO, name="worker")
    async with file.runtime() as client, asyncio.timeout(SOON):
        handle = await client.start(worker, {"input": "hello"}, id="job")
        await handle.cancel()
        async with file.runtime(worker) as runtime:
            outcome = await handle.outcome()
            sessions = await runtime.sessions.list()

    assert outcome == Cancelled("host", "")
    assert sessions == []


async def test_a_turn_that_somebody_cancelled_ends_its_process_so(place: Place) -> None:
    model = TellingModel()
    worker = Agent(model, name="worker")
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "think"}, id="job")
        await model.next()
        await (await runtime.session("job~worker")).cancel("wrong way", by="ann")
        outcome = await handle.outcome()

    assert outcome == Cancelled("ann", "wrong way")


async def test_cancelling_an_agent_cancels_what_it_has_left_running(place: Place) -> None:
    """boss → worker (waits for a person), and a background clerk of the worker's session."""
    clerk_model = TellingModel()
    clerk = Agent(clerk_model, name="clerk")
    worker = Agent(FunctionModel(paying), name="worker", tools=[pay])
    async with place.runtime(worker, clerk) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "go"}, id="job")
        await waits(handle)
        inner = await (await runtime.session("job~worker")).start(clerk, {"input": "file"}, id="inner", wake="none")
        await clerk_model.next()
        await handle.cancel("stop all")
        ends = [await handle.outcome(), await inner.outcome()]

    assert ends == [Cancelled("host", "stop all"), Cancelled("process job", "what started it was cancelled")]


# ---------------------------------------------------------------------- waiting


async def test_a_child_that_waits_for_a_person_is_parked_with_its_process(place: Place) -> None:
    worker = Agent(FunctionModel(paying), name="worker", tools=[pay])
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "buy"}, id="job")
        await waits(handle)
        await until(lambda: len(runtime._supervisor) == 0)
        idle = len(runtime._supervisor)
        session = await runtime.session("job~worker")
        (call,) = await session.pending()
        await session.approve(call.call_id)
        value = await handle.result()

    assert value == "paid 3"
    assert idle == 0, "neither the turn nor the process has a task"


async def test_an_approval_given_elsewhere_later_wakes_both(file: Place) -> None:
    worker = Agent(FunctionModel(paying), name="worker", tools=[pay])
    async with file.runtime(worker) as runtime, asyncio.timeout(SOON):
        await waits(await runtime.start(worker, {"input": "buy"}, id="job"))
    async with file.runtime() as client:
        session = await client.session("job~worker")
        (call,) = await session.pending()
        await session.approve(call.call_id)
        status = await client.handle("job").status()
    async with file.runtime(worker) as runtime, asyncio.timeout(SOON):
        value = await runtime.handle("job").result()

    assert status == "queued", "it has something to do, and nobody is there who could"
    assert value == "paid 3"


async def test_deleting_the_session_of_a_parked_process_ends_it(place: Place) -> None:
    worker = Agent(FunctionModel(paying), name="worker", tools=[pay])
    async with place.runtime(worker, clock=VirtualClock()) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "buy"}, id="job")
        await waits(handle)
        await runtime.sessions.delete("job~worker")
        outcome = await handle.outcome()

    assert isinstance(outcome, Failure)
    assert outcome.code == "session_deleted"


async def test_cancelling_a_parked_process_cancels_the_turn_that_waits(place: Place) -> None:
    worker = Agent(FunctionModel(paying), name="worker", tools=[pay])
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "buy"}, id="job")
        await waits(handle)
        await handle.cancel("changed my mind")
        outcome = await handle.outcome()
        session = await runtime.session("job~worker")
        pending, result = await session.pending(), await session.result("job~worker.1")

    assert outcome == Cancelled("host", "changed my mind")
    assert pending == []
    assert result.outcome == TurnCancelled("host", "changed my mind")


# ---------------------------------------------------------------------- messages


async def test_a_message_reaches_the_turn_that_runs(place: Place) -> None:
    @tool
    async def look() -> str:
        await said.wait()
        return "found"

    def answer(request: ModelRequest) -> str | list[ToolCall]:
        if len(request.messages) == 1:
            return [ToolCall("l", "look", {})]
        return " / ".join([message.text for message in request.messages if message.role == "user"])

    said = asyncio.Event()
    worker = Agent(FunctionModel(answer), name="worker", tools=[look])
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "go"}, id="job")
        await handle.signal("message", "and hurry")
        await until(lambda: _inputs(runtime, "job~worker", 2))
        said.set()
        value = await handle.result()

    assert value == "go / and hurry"


async def _inputs(runtime: Runtime, session_id: str, count: int) -> bool:
    row = await runtime.store.session(session_id)
    return row is not None and row.next == count + 1


async def test_a_message_to_a_child_that_waits_is_there_when_it_goes_on(place: Place) -> None:
    worker = Agent(FunctionModel(paying), name="worker", tools=[pay])
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "buy"}, id="job")
        await waits(handle)
        await handle.signal("message", "the red one")
        await until(lambda: _inputs(runtime, "job~worker", 2))
        await waits(handle)
        session = await runtime.session("job~worker")
        (call,) = await session.pending()
        await session.approve(call.call_id)
        value = await handle.result()

    assert value == "paid 3, the red one"


async def test_a_message_sent_elsewhere_just_before_the_end_is_answered_too(file: Place) -> None:
    """Another Runtime wrote it, and nobody here has noticed when the turn ends."""
    model = TellingModel()
    worker = Agent(model, name="worker")
    async with file.runtime(worker) as runtime, file.runtime() as client, asyncio.timeout(SOON):
        handle = await runtime.start(worker, {"input": "one"}, id="job")
        await model.next()
        await client.handle("job").signal("message", "two")
        model.say("1")
        asked = await model.next()
        model.say("2")
        value = await handle.result()

    assert value == "2"
    assert texts(asked.messages) == ["one", "1", "two"]


@pytest.mark.parametrize("payload", [None, "", 7, {"text": "hello"}])
async def test_a_message_is_text(payload: Any) -> None:
    model = TellingModel()
    async with Runtime("memory", agents=[Agent(model, name="worker")]) as runtime, asyncio.timeout(SOON):
        handle = await runtime.start("worker", {"input": "go"})
        await model.next()
        with pytest.raises(InvalidProcess, match="does not fit"):
            await handle.signal("message", payload)
        model.say("done")
        await handle.result()
        with pytest.raises(ProcessEnded):
            await handle.signal("message", "too late")


async def test_a_later_process_goes_on_with_the_session_of_an_earlier_one(place: Place) -> None:
    worker = Agent(ECHO, name="worker")
    async with place.runtime(worker) as runtime, asyncio.timeout(SOON):
        first = await (await runtime.start(worker, {"input": "one"}, id="a")).result()
        args = {"input": "two", "session_id": "a~worker"}
        second = await (await runtime.start(worker, args, id="b")).result()
        other = await (await runtime.start(worker, {"input": "x", "session_id": "a~worker"}, id="c")).outcome()

    assert (first, second) == ("1: one", "3: two")
    assert other == Success("5: x")


async def test_a_session_of_another_agent_is_not_gone_on_with(place: Place) -> None:
    one, two = Agent(ECHO, name="one"), Agent(ECHO, name="two")
    async with place.runtime(one, two) as runtime, asyncio.timeout(SOON):
        await (await runtime.start(one, {"input": "hello"}, id="a")).result()
        outcome = await (await runtime.start(two, {"input": "hello", "session_id": "a~one"})).outcome()

    assert isinstance(outcome, Failure)
    assert outcome.code == "wrong_agent"


# ---------------------------------------------------------------------- dying and leaving


async def test_a_runtime_that_is_left_takes_up_its_agents_when_it_comes_back(file: Place) -> None:
    model = TellingModel()
    worker = Agent(model, name="worker")
    async with file.runtime(worker, grace=0.01) as runtime, asyncio.timeout(SOON):
        await runtime.start(worker, {"input": "think"}, id="job")
        await model.next()
    async with file.runtime(worker) as runtime, asyncio.timeout(SOON):
        await model.next()
        model.say("at last")
        value = await runtime.handle("job").result()
        history = texts(await (await runtime.session("job~worker")).history())

    assert value == "at last"
    assert history == ["think", "at last"]


async def test_messages_of_a_dead_owner_are_said_once(file: Place) -> None:
    worker = Agent(FunctionModel(paying), name="worker", tools=[pay])
    dead = file.runtime(worker)
    await dead.__aenter__()
    async with asyncio.timeout(SOON):
        handle = await dead.start(worker, {"input": "buy"}, id="job")
        await waits(handle)
        await handle.signal("message", "the red one")
        await until(lambda: _inputs(dead, "job~worker", 2))
        await waits(handle)
    await crash(dead)
    async with file.runtime(worker) as runtime, asyncio.timeout(SOON):
        await runtime.handle("job").signal("message", "and the blue one")
        await until(lambda: _inputs(runtime, "job~worker", 3))
        session = await runtime.session("job~worker")
        (call,) = await session.pending()
        await session.approve(call.call_id)
        await runtime.handle("job").result()
        said = [message.text for message in await session.history() if message.role == "user"]

    assert said == ["buy", "the red one", "and the blue one"]


async def test_a_child_that_kills_its_workers_gets_stuck_and_goes_on_when_a_person_says_so(file: Place) -> None:
    """Five die: the owner, the one that takes the turn over at once, and three that have it as their only suspect."""
    model = TellingModel()
    worker = Agent(model, name="worker")
    for _ in range(5):
        runtime = file.runtime(worker)
        await runtime.__aenter__()
        async with asyncio.timeout(SOON):
            await runtime.start(worker, {"input": "think"}, id="job")
            await model.next()
        await crash(runtime)
    async with file.runtime(worker) as runtime, asyncio.timeout(SOON):
        with pytest.raises(ProcessStuck, match="stuck"):
            await runtime.handle("job").result()
        session = await runtime.session("job~worker")
        await until(lambda: _state(runtime, "job~worker", "stuck"))
        resumed = [await session.resume(), await runtime.processes.resume("job")]
        await model.next()
        model.say("still here")
        value = await runtime.handle("job").result()

    assert resumed == [True, True]
    assert value == "still here"


async def test_a_long_turn_that_goes_on_outlives_any_number_of_workers(file: Place) -> None:
    """Each owner dies after a step of the child: that is progress, and nobody gives up."""
    model = TellingModel()

    @tool(recovery="rerun")
    def step() -> str:
        return "ok"

    worker = Agent(model, name="worker", tools=[step])
    for n in range(6):
        runtime = file.runtime(worker)
        await runtime.__aenter__()
        async with asyncio.timeout(SOON):
            await runtime.start(worker, {"input": "go"}, id="job")
            await model.next()
            model.say([ToolCall(str(n), "step", {})])
            await model.next()
        await crash(runtime)
    async with file.runtime(worker) as runtime, asyncio.timeout(SOON):
        await model.next()
        model.say("all done")
        value = await runtime.handle("job").result()
        record = await runtime.handle("job").record()

    assert value == "all done"
    assert record.attempts == 7


async def _state(runtime: Runtime, session_id: str, state: str) -> bool:
    row = await runtime.store.session(session_id)
    return row is not None and row.state == state


# ---------------------------------------------------------------------- who is part of a Runtime


async def test_a_runtime_has_the_agents_that_its_agents_give_work_to() -> None:
    leaf = Agent(ECHO, name="leaf")
    middle = Agent(ECHO, name="middle", tools=[leaf.as_tool()])
    top = Agent(ECHO, name="top", tools=[middle.as_tool(), leaf.as_tool()])
    async with Runtime("memory", agents=[top]) as runtime, asyncio.timeout(SOON):
        value = await (await runtime.start("leaf", {"input": "hello"})).result()
        default = (await runtime.session()).agent

    assert value == "1: hello"
    assert default == "top"


def test_two_different_agents_of_one_name_are_refused_wherever_they_come_from() -> None:
    one, other = Agent(ECHO, name="twin"), Agent(ECHO, name="twin")
    with pytest.raises(InvalidDefinition, match="two agents are named 'twin'"):
        Runtime("memory", agents=[Agent(ECHO, tools=[one.as_tool("a"), other.as_tool("b")])])
    with pytest.raises(InvalidDefinition, match="two agents are named 'twin'"):
        Runtime("memory", agents=[one, other])
