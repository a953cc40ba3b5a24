"""Agents as tools of other agents: `agent.as_tool()`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Struct

from perdure import Agent, ModelRequest, Runtime, ToolCall, ToolContext, tool
from perdure.errors import InvalidDefinition
from perdure.model.llm import ModelResponse, Usage
from perdure.model.outcome import ProviderFailed
from perdure.model.plugin import CreateSession
from perdure.model.process import Cancelled
from perdure.model.session import load_settings
from perdure.model.tool import Cancelled as TurnCancelled
from perdure.model.tool import Failed, Ok
from perdure.testing import FunctionModel, VirtualClock
from tests.kit import SOON, Place, TellingModel, results, texts, until

ECHO = FunctionModel(lambda request: f"{len(request.messages)}: {request.messages[-1].text}")


def asking(*calls: tuple[str, dict[str, Any]]) -> FunctionModel:
    """A model that makes these calls at once, and then answers with what came back."""

    def answer(request: ModelRequest) -> str | list[ToolCall]:
        found = results(request)
        if not found:
            return [ToolCall(str(n), name, args) for n, (name, args) in enumerate(calls)]
        return " | ".join([str(result.content) for result in found])

    return FunctionModel(answer)


async def test_the_answer_of_an_agent_is_the_result_of_its_call(place: Place) -> None:
    worker = Agent(ECHO, name="worker")
    boss = Agent(asking(("worker", {"task": "count"})), name="boss", tools=[worker.as_tool()])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")
        child = await runtime.session("s.1.1.0~worker")
        said = texts(await child.history())
        row = await runtime.store.session("s.1.1.0~worker")
        process = await runtime.handle("s.1.1.0").record()

    assert result.text == "1: count"
    assert said == ["count", "1: count"]
    assert row is not None
    assert (load_settings(row.settings).parent, load_settings(row.settings).depth) == ("s", 1)
    assert (process.status, process.registration.parent, process.registration.parent_end) == (
        "completed",
        "s.1",
        "cancel",
    )


def test_an_agent_with_subagents_runs_without_any_setup() -> None:
    worker = Agent(ECHO, name="worker")
    boss = Agent(asking(("worker", {"task": "count"})), name="boss", tools=[worker.as_tool()])

    assert boss.run_sync("go").text == "1: count"


class City(Struct):
    name: str


def test_a_tool_made_of_an_agent_says_what_it_is() -> None:
    typed: Agent[City] = Agent(ECHO, name="town clerk", output=City)
    plain, named = typed.as_tool(), typed.as_tool("ask_clerk", "Knows towns.", background=True)

    assert (plain.spec.name, plain.spec.recovery) == ("town_clerk", "rerun")
    assert plain.spec.description == "Give a task to the agent town clerk, who works on it alone and answers."
    assert list(plain.spec.input_schema["properties"]) == ["task"]
    assert plain.spec.output_schema is not None
    assert list(plain.spec.output_schema["properties"]) == ["name"]
    assert (named.spec.name, named.spec.description) == ("ask_clerk", "Knows towns.")
    with pytest.raises(InvalidDefinition, match="is no name for a tool"):
        typed.as_tool("ask the clerk")


async def test_typed_output_comes_back_as_json(place: Place) -> None:
    clerk: Agent[City] = Agent(FunctionModel(lambda _: '{"name": "Ulm"}'), name="clerk", output=City)
    boss = Agent(asking(("clerk", {"task": "where?"})), name="boss", tools=[clerk.as_tool()])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")

    assert result.tool_calls[0].outcome == Ok({"name": "Ulm"})


async def test_calls_of_one_reply_work_at_the_same_time(place: Place) -> None:
    model = TellingModel()
    worker = Agent(model, name="worker")
    calls = [("worker", {"task": f"job {n}"}) for n in range(3)]
    boss = Agent(asking(*calls), name="boss", tools=[worker.as_tool()])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        turn = asyncio.create_task((await runtime.session("s")).run("go"))
        at_once = {(await model.next()).messages[-1].text for _ in calls}
        model.say("a", "a", "a")
        result = await turn

    assert at_once == {"job 0", "job 1", "job 2"}
    assert result.text == "a | a | a"


async def test_a_failed_child_is_an_error_for_the_model_and_keeps_its_session(place: Place) -> None:
    def broken(request: ModelRequest) -> str:
        raise RuntimeError("no brain")

    worker = Agent(FunctionModel(broken), name="worker")
    boss = Agent(asking(("worker", {"task": "think"})), name="boss", tools=[worker.as_tool()])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")
        child = await runtime.session("s.1.1.0~worker")
        kept = await child.result("s.1.1.0~worker.1")

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "provider_failed"
    assert "no brain" in outcome.message
    assert outcome.data["handle"] == {"__handle__": "process", "id": "s.1.1.0"}
    assert kept.outcome == ProviderFailed("provider_raised", "RuntimeError: no brain", 1, "function")


async def test_a_child_that_somebody_cancelled_is_told_to_the_model(place: Place) -> None:
    model = TellingModel()
    worker = Agent(model, name="worker")
    boss = Agent(asking(("worker", {"task": "think"})), name="boss", tools=[worker.as_tool()])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        turn = asyncio.create_task((await runtime.session("s")).run("go"))
        await model.next()
        await runtime.handle("s.1.1.0").cancel("enough", by="ann")
        result = await turn

    assert result.tool_calls[0].outcome == Failed(
        "cancelled",
        "it was cancelled by ann: enough",
        {
            "handle": {"__handle__": "process", "id": "s.1.1.0"},
            "outcome": {"type": "cancelled", "by": "ann", "reason": "enough"},
        },
    )


async def test_cancelling_a_turn_cancels_the_whole_tree_below_it(place: Place) -> None:
    model = TellingModel()
    leaf = Agent(model, name="leaf")
    middle = Agent(asking(("leaf", {"task": "a"}), ("leaf", {"task": "b"})), name="middle", tools=[leaf.as_tool()])
    top = Agent(asking(("middle", {"task": "go"})), name="top", tools=[middle.as_tool()])
    async with place.runtime(top) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        turn = asyncio.create_task(session.run("go"))
        await model.next()
        await model.next()
        await session.cancel("stop", by="ann")
        result = await turn
        ended = {row.id: (await runtime.handle(row.id).outcome()) for row in await runtime.processes.list()}
        await until(lambda: _all_idle(runtime))

    assert result.outcome == TurnCancelled("ann", "stop")
    assert sorted(ended) == ["s.1.1.0", "s.1.1.0~middle.1.1.0", "s.1.1.0~middle.1.1.1"]
    assert {type(outcome) for outcome in ended.values()} == {Cancelled}


async def _all_idle(runtime: Runtime) -> bool:
    return all(row.state == "idle" for row in await runtime.sessions.list())


async def test_a_child_that_waits_for_a_person_keeps_its_parent_waiting(place: Place) -> None:
    @tool(approval="ask")
    async def pay(amount: int) -> str:
        return f"paid {amount}"

    worker = Agent(asking(("pay", {"amount": 3})), name="worker", tools=[pay])
    boss = Agent(asking(("worker", {"task": "buy"})), name="boss", tools=[worker.as_tool()])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        turn = asyncio.create_task((await runtime.session("s")).run("go"))
        await until(lambda: _has_status(runtime, "s.1.1.0", "waiting"))
        child = await runtime.session("s.1.1.0~worker")
        (call,) = await child.pending()
        await child.approve(call.call_id)
        result = await turn

    assert result.text == "paid 3"


async def test_an_approval_after_a_restart_lets_the_parent_go_on_at_once(place: Place) -> None:
    """The clock stands still: nothing is noticed because some time has passed."""

    @tool(approval="ask")
    async def pay(amount: int) -> str:
        return f"paid {amount}"

    worker = Agent(asking(("pay", {"amount": 3})), name="worker", tools=[pay])
    boss = Agent(asking(("worker", {"task": "buy"})), name="boss", tools=[worker.as_tool()])
    async with place.runtime(boss, grace=0) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).send("go")
        await until(lambda: _has_status(runtime, "s.1.1.0", "waiting"))
    async with place.runtime(boss, clock=VirtualClock()) as runtime, asyncio.timeout(SOON):
        child = await runtime.session("s.1.1.0~worker")
        (call,) = await child.pending()
        await until(lambda: runtime._turns.cache.run("s"))
        for _ in range(2):  # what was to be seen at the beginning is seen
            await looked(runtime)
        await child.approve(call.call_id)
        result = await (await runtime.session("s")).result("s.1")

    assert result.text == "paid 3"


async def test_a_child_ends_with_its_parent_when_the_session_of_that_is_deleted(place: Place) -> None:
    model = TellingModel()
    worker = Agent(model, name="worker")
    boss = Agent(asking(("worker", {"task": "buy"})), name="boss", tools=[worker.as_tool()])
    async with place.runtime(boss, clock=VirtualClock()) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).send("go")
        await model.next()
        await runtime.sessions.delete("s")
        outcome = await runtime.handle("s.1.1.0").outcome()

    assert outcome == Cancelled("parent s.1", "its parent has ended")


async def looked(runtime: Runtime) -> None:
    """Until the Runtime has looked at its store once more."""
    assert runtime._parts is not None
    runtime._parts.activity.polled.clear()
    await runtime._parts.activity.polled.wait()


async def _has_status(runtime: Runtime, process_id: str, status: str) -> bool:
    row = await runtime.store.process(process_id)
    return row is not None and row.status == status


async def test_what_children_cost_is_part_of_their_parents_usage(place: Place) -> None:
    def costing(tokens: int, then: FunctionModel | None = None) -> FunctionModel:
        def answer(request: ModelRequest) -> ModelResponse:
            calls = []
            if then is not None and not results(request):
                calls = [ToolCall("c", "leaf", {"task": "go"})]
            return ModelResponse("" if calls else "done", calls, usage=Usage(input=tokens))

        return FunctionModel(answer)

    leaf = Agent(costing(1), name="leaf")
    middle = Agent(costing(10, costing(0)), name="middle", tools=[leaf.as_tool()])
    top = Agent(
        asking(("middle", {"task": "go"}), ("leaf", {"task": "go"})),
        name="top",
        tools=[middle.as_tool(), leaf.as_tool()],
    )
    async with place.runtime(top) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        await session.run("go")
        usage = await session.usage()

    assert {label: each.input for label, each in usage.items()} == {"turns": None, "middle": 21, "leaf": 1}


async def test_depth_is_limited_and_the_model_is_told(place: Place) -> None:
    """Six agents, each with the one below as its tool: the sixth would be too deep."""
    agents = [Agent(ECHO, name="a0")]
    for n in range(1, 7):
        below = agents[-1]
        agents.append(Agent(asking((below.name, {"task": "go"})), name=f"a{n}", tools=[below.as_tool()]))
    async with place.runtime(agents[-1]) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")
        sessions = await runtime.sessions.list()

    assert "it must do its work by itself" in result.text
    assert "too_deep" in result.text
    assert len(sessions) == 6, "one, and five below it"


async def test_a_turn_that_is_left_goes_on_with_the_child_it_had(file: Place) -> None:
    model, asked = TellingModel(), TellingModel()
    worker = Agent(model, name="worker")
    boss = Agent(asked, name="boss", tools=[worker.as_tool()])
    async with file.runtime(boss, grace=0.01) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).send("go", key="go")
        await asked.next()
        asked.say([ToolCall("c", "worker", {"task": "think"})])
        await model.next()
    async with file.runtime(boss) as runtime, asyncio.timeout(SOON):
        await model.next()
        model.say("thought")
        request = await asked.next()
        asked.say("done")
        result = await (await runtime.session("s")).run("go", key="go")
        processes = await runtime.processes.list()

    assert [str(found.content) for found in results(request)] == ["thought"]
    assert (result.tool_calls[0].attempts, result.tool_calls[0].repeated) == (2, 1)
    assert [(row.id, row.status) for row in processes] == [("s.1.1.0", "completed")]


async def test_in_the_background_the_call_returns_a_handle_and_the_session_is_woken(place: Place) -> None:
    model, asked = TellingModel(), TellingModel()
    worker = Agent(model, name="worker")
    boss = Agent(asked, name="boss", tools=[worker.as_tool(background=True)])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        turn = asyncio.create_task(session.run("go"))
        await asked.next()
        asked.say([ToolCall("c", "worker", {"task": "think"})])
        handle = results(await asked.next())[0].content
        asked.say("I will tell you")
        first = await turn
        await model.next()
        model.say("forty-two")
        woken = (await asked.next()).messages[-1].text
        asked.say("it is forty-two")
        second = await session.result("s.2")

    assert handle == {"__handle__": "process", "id": "s.1.1.0"}
    assert (first.text, second.text) == ("I will tell you", "it is forty-two")
    assert "forty-two" in woken
    assert "s.1.1.0" in woken


async def test_a_background_agent_outlives_the_cancelled_turn_that_started_it(place: Place) -> None:
    model, asked = TellingModel(), TellingModel()
    worker = Agent(model, name="worker")
    boss = Agent(asked, name="boss", tools=[worker.as_tool(background=True)])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        turn = asyncio.create_task(session.run("go"))
        await asked.next()
        asked.say([ToolCall("c", "worker", {"task": "think"})])
        await asked.next()
        await session.cancel()
        await turn
        await model.next()
        model.say("forty-two")
        value = await runtime.handle("s.1.1.0").result()
        await asked.next()
        asked.say("ok")
        await session.result("s.2")

    assert value == "forty-two"


async def test_a_tool_may_start_agents_by_itself(place: Place) -> None:
    worker = Agent(ECHO, name="worker")

    @tool
    async def ask(ctx: ToolContext[None]) -> Any:
        handle = await ctx.start(worker, {"input": "hello"})
        return await handle.result()

    boss = Agent(asking(("ask", {})), name="boss", tools=[ask])
    async with place.runtime(boss, worker) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        result = await session.run("go")
        usage = await session.usage()

    assert result.text == "1: hello"
    assert usage["worker"].calls == 1


async def test_outside_of_a_session_the_tool_says_what_it_needs() -> None:
    worker = Agent(ECHO, name="worker")
    ctx: ToolContext[None] = ToolContext(call_id="x")

    with pytest.raises(Exception, match="belong to the call of a session"):
        await worker.as_tool().invoke({"task": "hello"}, ctx)


async def test_a_plugin_may_ask_a_child_for_json_too(place: Place) -> None:
    @tool
    async def begin(ctx: ToolContext[None]) -> Any:
        request = CreateSession("worker", "child", output={"type": "integer"})
        await ctx.host.create_session(request)
        return (await ctx.host.start_turn("child", "count", key="k")).output

    worker = Agent(FunctionModel(lambda _: "7"), name="worker")
    boss = Agent(asking(("begin", {})), name="boss", tools=[begin])
    async with place.runtime(boss, worker) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")

    assert result.tool_calls[0].outcome == Ok(7)
