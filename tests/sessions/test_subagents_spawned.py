"""Agents that a model chooses, briefs and follows up by itself: the tool `spawn_agent`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, ToolCall, tool
from perdure.builtin import Subagents
from perdure.errors import InvalidDefinition
from perdure.model.tool import Failed, Ok, ToolOutcome
from perdure.sessions.result import TurnResult
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, TellingModel, results, texts, until

ECHO = FunctionModel(lambda request: f"{len(request.messages)}: {request.messages[-1].text}")


def steps(*replies: Any) -> FunctionModel:
    """A model that goes through these replies; a function makes one from the request."""
    left = list(replies)

    def answer(request: ModelRequest) -> Any:
        reply = left.pop(0)
        return reply(request) if callable(reply) else reply

    return FunctionModel(answer)


def spawn(prompt: str, **args: Any) -> ToolCall:
    return ToolCall(f"spawn {prompt}", "spawn_agent", {"prompt": prompt, **args})


def outcomes(result: TurnResult[Any]) -> list[ToolOutcome]:
    return [call.outcome for call in result.tool_calls]


async def test_a_model_gives_work_to_agents_of_its_choice_all_at_once(place: Place) -> None:
    writer, critic = Agent(ECHO, name="writer"), Agent(FunctionModel(lambda _: "bad"), name="critic")
    calls = [spawn("a poem", agent="writer", label="poem"), spawn("judge it", agent="critic"), spawn("a song")]
    boss = Agent(steps(calls, "done"), name="boss", plugins=[Subagents([writer, critic])])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        result = await session.run("go")
        usage = await session.usage()
        labels = {row.id: row.registration.label for row in await runtime.processes.list()}

    assert outcomes(result) == [Ok("1: a poem"), Ok("bad"), Ok("1: a song")]
    assert {label: each.calls for label, each in usage.items()} == {"turns": 2, "poem": 1, "critic": 1, "writer": 1}
    assert labels == {"s.1.1.0": "poem", "s.1.1.1": "critic", "s.1.1.2": "writer"}


async def test_a_model_may_ask_for_json_and_give_values(place: Place) -> None:
    seen: list[ModelRequest] = []

    def answer(request: ModelRequest) -> str:
        seen.append(request)
        return '{"sum": 5}'

    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    worker = Agent(FunctionModel(answer), name="worker")
    calls = [spawn("add them", output=schema, seed={"a": 2, "b": [3]})]
    boss = Agent(steps(calls, "done"), name="boss", plugins=[Subagents([worker])])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")

    assert outcomes(result) == [Ok({"sum": 5})]
    assert texts(seen[0].messages) == ["These values are given:\na: 2\nb: [3]", "add them"]
    assert seen[0].output_schema == schema


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"agent": "nobody"}, "agent"),
        ({"prompt": ""}, "empty"),
        ({"output": {"$ref": "#/lost"}}, "refers to '#/lost'"),
        ({"follow": {"id": "x"}}, "Invalid process handle: missing `__handle__`"),
        ({"follow": {"__handle__": "process", "id": "x"}}, "'x'"),
        ({"follow": {"__handle__": "process", "id": "x"}, "seed": {"a": 1}}, "given when an agent begins"),
    ],
)
async def test_what_a_model_does_wrong_is_told_to_it(args: dict[str, Any], told: str) -> None:
    worker = Agent(ECHO, name="worker")
    call = ToolCall("c", "spawn_agent", {"prompt": "go", **args})
    boss = Agent(steps([call], "sorry"), name="boss", plugins=[Subagents([worker])])
    async with Runtime("memory", agents=[boss]) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")
        left = [*await runtime.processes.list(), *[r for r in await runtime.sessions.list() if r.id != "s"]]

    (outcome,) = outcomes(result)
    assert isinstance(outcome, Failed)
    assert told in outcome.message
    assert left == []


async def test_children_do_not_see_what_is_hidden_from_them_nor_do_theirs(place: Place) -> None:
    @tool
    def send_mail() -> str:
        return "sent"

    @tool
    def look() -> str:
        return "seen"

    seen: dict[str, list[str]] = {}

    def answer(request: ModelRequest) -> Any:
        prompt = request.messages[0].text
        seen[prompt] = sorted(
            [spec.name for spec in request.tools if not spec.name.endswith(("_process", "_processes"))]
        )
        if prompt == "three" or results(request):
            return "done"
        return [spawn({"one": "two", "two": "three"}[prompt])]

    boss = Agent(
        FunctionModel(answer),
        name="boss",
        tools=[send_mail, look],
        plugins=[Subagents("boss", hidden=["send_mail"])],
    )
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("s")).run("one")

    assert seen == {
        "one": ["look", "send_mail", "spawn_agent"],
        "two": ["look", "spawn_agent"],
        "three": ["look", "spawn_agent"],
    }


@pytest.mark.parametrize(("depth", "sessions"), [(5, 6), (2, 3)])
async def test_at_the_limit_the_tool_is_not_there(place: Place, depth: int, sessions: int) -> None:
    """An agent that spawns itself for as long as it can."""
    seen: list[bool] = []

    def answer(request: ModelRequest) -> Any:
        if results(request):
            return f"{results(request)[0].content} up"
        can = "spawn_agent" in [spec.name for spec in request.tools]
        seen.append(can)
        return [spawn("deeper")] if can else "bottom"

    boss = Agent(FunctionModel(answer), name="boss", plugins=[Subagents("boss", depth=depth)])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")
        rows = await runtime.sessions.list()

    assert result.text == "bottom" + " up" * depth
    assert seen == [True] * depth + [False]
    assert len(rows) == sessions


async def test_a_failed_child_is_an_error_and_the_model_goes_on(place: Place) -> None:
    def broken(request: ModelRequest) -> str:
        raise RuntimeError("no brain")

    worker = Agent(FunctionModel(broken), name="worker")
    boss = Agent(steps([spawn("think")], "then I do it myself"), name="boss", plugins=[Subagents([worker])])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("s")).run("go")

    (outcome,) = outcomes(result)
    assert isinstance(outcome, Failed)
    assert outcome.code == "provider_failed"
    assert result.text == "then I do it myself"


# ---------------------------------------------------------------------- by handle


async def test_in_the_background_it_returns_a_handle_and_wakes_its_session(place: Place) -> None:
    model, asked = TellingModel(), TellingModel()
    worker = Agent(model, name="worker")
    boss = Agent(asked, name="boss", plugins=[Subagents([worker])])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        receipt = await session.send("go")
        await asked.next()
        asked.say([spawn("think", background=True, label="riddle")])
        handle = results(await asked.next())[0].content
        asked.say("started")
        first = await receipt.result()
        await model.next()
        model.say("forty-two")
        news = (await asked.next()).messages[-1].text
        asked.say("it is forty-two")
        second = await session.result("s.2")

    assert handle == {"__handle__": "process", "id": "s.1.1.0"}
    assert (first.text, second.text) == ("started", "it is forty-two")
    assert "riddle" in news
    assert "forty-two" in news


async def test_a_follow_up_goes_on_with_the_session_of_a_child_that_has_answered(place: Place) -> None:
    worker = Agent(ECHO, name="worker")
    handle = {"__handle__": "process", "id": "s.1.1.0"}
    again = {"__handle__": "process", "id": "s.1.2.0"}
    boss = Agent(
        steps([spawn("one")], [spawn("two", follow=handle)], [spawn("three", follow=again)], "done"),
        name="boss",
        plugins=[Subagents([worker])],
    )
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        result = await session.run("go")
        usage = await session.usage()
        sessions = sorted([row.id for row in await runtime.sessions.list()])

    assert outcomes(result) == [Ok("1: one"), Ok("3: two"), Ok("5: three")]
    assert sessions == ["s", "s.1.1.0~worker"]
    assert usage["worker"].calls == 3


async def test_a_follow_up_to_a_child_that_waits_reaches_its_turn(place: Place) -> None:
    @tool(approval="ask")
    async def pay(amount: int) -> str:
        return f"paid {amount}"

    def paying(request: ModelRequest) -> Any:
        found = results(request)
        if not found:
            return [ToolCall("p", "pay", {"amount": 3})]
        return f"{found[0].content}, {request.messages[-1].text}"

    asked = TellingModel()
    worker = Agent(FunctionModel(paying), name="worker", tools=[pay])
    boss = Agent(asked, name="boss", plugins=[Subagents([worker])])
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        receipt = await session.send("go")
        await asked.next()
        asked.say([spawn("buy", background=True)])
        handle = results(await asked.next())[0].content
        asked.say([spawn("the red one", follow=handle)])
        child = await runtime.session("s.1.1.0~worker")
        await until(lambda: _waits_with(runtime, "s.1.1.0~worker", 2))
        (call,) = await child.pending()
        await child.approve(call.call_id)
        answer = results(await asked.next())[-1].content
        asked.say("bought")
        await receipt.result()
        processes = [row.id for row in await runtime.processes.list()]
        await asked.next()  # the background child has ended, too
        asked.say("I know")

    assert answer == "paid 3, the red one"
    assert processes == ["s.1.1.0"], "what was said went to the child that was there"


async def _waits_with(runtime: Runtime, session_id: str, inputs: int) -> bool:
    row = await runtime.store.session(session_id)
    return row is not None and row.state == "parked" and row.next == inputs + 1


async def test_nobody_follows_up_the_children_of_others(place: Place) -> None:
    worker = Agent(ECHO, name="worker")
    handle = {"__handle__": "process", "id": "mine.1.1.0"}
    boss = Agent(
        steps([spawn("one")], "done", [spawn("two", follow=handle)], "oh"), name="boss", plugins=[Subagents([worker])]
    )
    async with place.runtime(boss) as runtime, asyncio.timeout(SOON):
        await (await runtime.session("mine")).run("go")
        result = await (await runtime.session("yours")).run("go")
        said = texts(await (await runtime.session("mine.1.1.0~worker")).history())

    (outcome,) = outcomes(result)
    assert isinstance(outcome, Failed)
    assert outcome.code == "process_not_visible"
    assert said == ["one", "1: one"]


# ---------------------------------------------------------------------- how it is made


@pytest.mark.parametrize("plugin", [True, False])
def test_who_gets_handles_has_what_it_takes_to_use_them(plugin: bool) -> None:
    worker = Agent(ECHO, name="worker")
    extra: dict[str, Any] = (
        {"plugins": [Subagents([worker])]} if plugin else {"tools": [worker.as_tool(background=True)]}
    )
    plain = Agent(ECHO, tools=[worker.as_tool()])

    assert {"await_process", "cancel_process", "signal_process"} <= set(Agent(ECHO, **extra).spec.tools)
    assert plain.spec.tools == ("worker",)


def test_the_model_is_shown_whom_it_may_choose() -> None:
    boss = Agent(ECHO, plugins=[Subagents([Agent(ECHO, name="writer"), "critic", "critic"])])

    (made,) = boss.definition().plugins.plugins[0].tools()
    agent = made.spec.input_schema["properties"]["agent"]
    assert sorted(agent["enum"]) == ["critic", "writer"]
    assert agent["default"] == "writer"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (([],), "at least one agent"),
        (("boss", "x"), "positional"),
    ],
)
def test_a_plugin_without_agents_is_refused(args: tuple[Any, ...], told: str) -> None:
    with pytest.raises((InvalidDefinition, TypeError), match=told):
        Subagents(*args)


@pytest.mark.parametrize("options", [{"depth": 0}, {"depth": 6}, {"depth": True}, {"hidden": "send_mail"}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidDefinition, match="is not usable"):
        Subagents("boss", **options)
