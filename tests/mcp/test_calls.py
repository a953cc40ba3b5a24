"""Tools of MCP servers in turns: what a model sees of them, what calls return, and what becomes of broken ones."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ToolCall
from perdure.errors import AlreadyAnswered, InvalidInput, UnknownCall
from perdure.mcp import Elicitation, McpServer, Sampling
from perdure.model.event import ToolProgress
from perdure.model.llm import ModelRequest, ModelResponse, Usage
from perdure.model.message import Image, Text
from perdure.model.outcome import Finished, Waiting
from perdure.model.tool import Failed, Ok, OutcomeUnknown
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import Place, agent_calling, crash, until
from tests.mcp.conftest import Stub, runtime_with, servers_in


def calling(tool: str, args: dict[str, Any] | None = None) -> Agent[str]:
    return agent_calling(f"mcp__stub__{tool}", args or {})


async def test_model_sees_tools_of_a_server_and_calls_them(place: Place, stub: Stub) -> None:
    seen: list[Any] = []

    def model(request: ModelRequest) -> Any:
        seen.append([(spec.name, spec.description, spec.recovery, spec.approval) for spec in request.tools])
        return [ToolCall("1", "mcp__stub__echo", {"text": "hi"})] if len(seen) == 1 else "done"

    async with runtime_with(place, Agent(FunctionModel(model), name="a"), stub.server()) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")

    assert result.tool_calls[0].outcome == Ok("hi")
    assert seen[0] == [("mcp__stub__echo", "(Tool of the MCP server stub): The tool echo.", "once", "never")]
    assert stub.ledger == ['echo {"text": "hi"}']


@pytest.mark.parametrize("version", ["2025-11-25", "2024-11-05"])
async def test_servers_of_earlier_versions_are_called_alike(place: Place, stub: Stub, version: str) -> None:
    stub.does(version=version)
    async with runtime_with(place, calling("echo", {"text": "hi"}), stub.server()) as runtime:
        result = await (await runtime.session("s")).run("go")
        [status] = runtime.mcp.status()

    assert result.tool_calls[0].outcome == Ok("hi")
    assert (status.state, status.version) == ("ready", version)


@pytest.mark.parametrize(
    ("result", "value"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": []}, ""),
        ({"content": [{"type": "text", "text": '{"n": 1}'}]}, '{"n": 1}'),  # text stays text
        ({"content": [{"type": "text", "text": "one"}], "structuredContent": {"n": 1}}, {"n": 1}),
        ({"content": [{"type": "text", "text": "none"}], "structuredContent": {}}, {}),
        ({"content": [{"type": "resource", "resource": {"uri": "x://a", "text": "inside"}}]}, "inside"),
        (
            {"content": [{"type": "text", "text": "see"}, {"type": "resource_link", "uri": "x://a", "name": "a"}]},
            ["see", {"type": "resource_link", "uri": "x://a", "name": "a"}],
        ),
    ],
)
async def test_value_of_a_call_is_what_its_result_holds(
    place: Place, stub: Stub, result: dict[str, Any], value: Any
) -> None:
    stub.does(tools=["raw"], raw=json.dumps({"resultType": "complete", **result}))
    async with runtime_with(place, calling("raw"), stub.server()) as runtime:
        ran = await (await runtime.session("s")).run("go")

    assert ran.tool_calls[0].outcome == Ok(value)


async def test_servers_with_tools_of_the_same_name_are_told_apart(place: Place, tmp_path: Path) -> None:
    one, two = Stub(tmp_path, "one"), Stub(tmp_path, "two")
    calls = [ToolCall(name, f"mcp__{name}__echo", {"text": name}) for name in ("two", "one")]
    agent = Agent(ScriptedModel([calls, "done"]), name="a")
    async with runtime_with(place, agent, one.server(), two.server()) as runtime:
        ran = await (await runtime.session("s")).run("go")

    assert [call.outcome for call in ran.tool_calls] == [Ok("two"), Ok("one")]
    assert (one.ledger, two.ledger) == (['echo {"text": "one"}'], ['echo {"text": "two"}'])


async def test_pictures_come_as_parts(place: Place, stub: Stub) -> None:
    stub.does(tools=["picture"])
    async with runtime_with(place, calling("picture"), stub.server()) as runtime:
        result = await (await runtime.session("s")).run("go")

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Ok)
    assert isinstance(outcome.files[0], Image)
    assert outcome.files[0].media_type == "image/png"
    assert outcome.value[0] == "a dot"


async def test_progress_is_an_event(place: Place, stub: Stub) -> None:
    stub.does(tools=["progress"])
    async with runtime_with(place, calling("progress"), stub.server()) as runtime:
        told = []
        async with (await runtime.session("s")).stream("go") as turn:
            told += [event.value async for event in turn if isinstance(event, ToolProgress)]

    assert told == [
        {"progress": 1, "total": 2, "message": "step 1"},
        {"progress": 2, "total": 2, "message": "step 2"},
    ]


async def test_server_is_told_the_idempotency_key(place: Place, stub: Stub) -> None:
    stub.does(tools=["meta"])
    async with runtime_with(place, calling("meta"), stub.server()) as runtime:
        result = await (await runtime.session("s")).run("go")
        identity = runtime.store.identity()

    assert f'"mainstay/idempotency-key": "{identity}.s.1.1.0"' in result.tool_calls[0].value


@pytest.mark.parametrize(
    ("tool", "code", "said"),
    [
        ("fail", "mcp_tool_error", "it cannot be done"),
        ("error", "mcp_error", "no, thank you"),
        ("nonsense", "mcp_invalid_answer", "the call was made, and MCP server stub answered with what is no result"),
    ],
)
async def test_what_a_server_says_went_wrong_reaches_the_model(
    place: Place, stub: Stub, tool: str, code: str, said: str
) -> None:
    stub.does(tools=[tool])
    async with runtime_with(place, calling(tool), stub.server()) as runtime:
        result = await (await runtime.session("s")).run("go")

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.message[: len(said)]) == (code, said)
    assert result.text == "done"


async def test_call_whose_server_dies_is_unknown_and_the_server_is_started_again(place: Place, stub: Stub) -> None:
    stub.does(tools=["die", "echo"])
    async with runtime_with(place, calling("die"), stub.server()) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        await until(lambda: runtime.mcp.status()[0].starts == 2 and runtime.mcp.status()[0].state == "ready")

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, OutcomeUnknown)
    assert outcome.reason.startswith("MCP server stub was lost while the call ran")
    assert stub.ledger == ["die {}"]
    assert result.text == "done"


async def test_call_whose_server_is_killed_is_unknown(place: Place, stub: Stub, tmp_path: Any) -> None:
    stub.does(tools=["hang"])
    async with runtime_with(place, calling("hang"), stub.server()) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await until(lambda: stub.ledger)
        for pid in servers_in(tmp_path):
            os.kill(pid, signal.SIGKILL)
        result = await receipt.result()

    assert isinstance(result.tool_calls[0].outcome, OutcomeUnknown)
    assert stub.ledger == ["hang {}"]


async def test_cancel_of_a_turn_ends_its_call_and_leaves_the_server(place: Place, stub: Stub) -> None:
    stub.does(tools=["gate", "echo"])
    async with runtime_with(place, calling("gate", {"gate": "/nowhere"}), stub.server()) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await until(lambda: stub.ledger)
        await session.cancel()
        result = await receipt.result()

    assert isinstance(result.tool_calls[0].outcome, OutcomeUnknown)


async def test_call_after_a_timeout_is_unknown(place: Place, stub: Stub) -> None:
    stub.does(tools=["hang"])
    async with runtime_with(place, calling("hang"), stub.server(timeout=0.05)) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.tool_calls[0].outcome, OutcomeUnknown)
    assert result.text == "done"


# ---------------------------------------------------------------------- what the host decides


@pytest.mark.parametrize(
    ("hints", "declared", "recovery"),
    [
        ({"readOnlyHint": True}, None, "rerun"),
        ({"idempotentHint": True, "destructiveHint": True}, None, "rerun"),
        ({"readOnlyHint": False, "idempotentHint": False}, None, "once"),
        ({"readOnlyHint": True}, "once", "once"),
        ({"readOnlyHint": True}, {"put_*": "rerun", "get_*": "ask"}, "ask"),
        ({"readOnlyHint": True}, {"put_*": "once"}, "rerun"),
        (None, None, "once"),
    ],
)
async def test_tool_that_its_server_annotates_as_repeatable_is_rerun_unless_the_host_says_otherwise(
    place: Place, stub: Stub, hints: Any, declared: Any, recovery: str
) -> None:
    described = {"name": "get_a", "inputSchema": {"type": "object"}}
    stub.does(tools=[described if hints is None else {**described, "annotations": hints}])
    async with runtime_with(place, calling("get_a", {}), stub.server(recovery=declared)) as runtime:
        await (await runtime.session("s")).run("go")
        [spec] = runtime.mcp.attached["stub"].specs()

    assert (spec.recovery, spec.approval) == (recovery, "never")


async def test_recovery_and_approval_that_the_host_names_count_whatever_the_server_hints(
    place: Place, stub: Stub
) -> None:
    hints = {"destructiveHint": False}
    tools = [
        {"name": name, "inputSchema": {"type": "object"}, "annotations": hints}
        for name in ("get_a", "get_b", "put_a", "other")
    ]
    stub.does(tools=tools)
    server = stub.server(
        tools=["get_*", "put_*"], without=["get_b"], recovery={"get_*": "rerun"}, approval={"put_*": "ask"}
    )
    async with runtime_with(place, calling("put_a", {"text": "x"}), server) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        specs = {spec.name: (spec.recovery, spec.approval) for spec in runtime.mcp.attached["stub"].specs()}
        asked = result.outcome
        await session.approve((await session.pending())[0].call_id)
        await until(lambda: stub.ledger)

    assert specs == {"mcp__stub__get_a": ("rerun", "never"), "mcp__stub__put_a": ("once", "ask")}
    assert isinstance(asked, Waiting)
    assert stub.ledger == ['put_a {"text": "x"}']


async def test_tools_are_for_the_agents_that_the_host_names(place: Place, stub: Stub) -> None:
    seen: dict[str, list[str]] = {}

    def agent(name: str) -> Agent[str]:
        def model(request: ModelRequest) -> str:
            seen[name] = [spec.name for spec in request.tools]
            return "done"

        return Agent(FunctionModel(model), name=name)

    async with place.runtime(agent("one"), agent("two"), mcp=[stub.server(agents=["two"])]) as runtime:
        await (await runtime.session("a", agent="one")).run("go")
        await (await runtime.session("b", agent="two")).run("go")

    assert seen == {"one": [], "two": ["mcp__stub__echo"]}


# ---------------------------------------------------------------------- questions of the server


async def test_question_parks_the_call_and_another_process_goes_on_with_the_answer(place: Place, stub: Stub) -> None:
    stub.does(tools=["ask"])
    first = runtime_with(place, calling("ask", {"text": "Dear"}), stub.server())
    async with first as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        [pending] = await session.pending()
        await crash(runtime)
    async with runtime_with(place, calling("ask", {"text": "Dear"}), stub.server()) as runtime:
        session = await runtime.session("s")
        assert await session.pending() == [pending]
        with pytest.raises(InvalidInput, match="does not fit"):
            await session.answer(pending.call_id, {"name": 7})
        with pytest.raises(InvalidInput, match="a dict of its fields"):
            await session.answer(pending.call_id, {"who": "me"})
        with pytest.raises(UnknownCall):
            await session.answer("s.1.9.9", {"name": "me"})
        await session.answer(pending.call_id, {"name": "Ann"}, by="operator")
        end = await session.result(result.turn_id)

    assert isinstance(result.outcome, Waiting)
    assert (pending.kind, pending.reason) == ("input", "MCP server stub asks: Who are you?")
    assert pending.asks is not None
    assert pending.asks["who"]["schema"]["required"] == ["name"]
    assert isinstance(end.outcome, Finished)
    assert end.tool_calls[0].outcome == Ok("Dear accept Ann")
    assert end.tool_calls[0].attempts == 1
    assert stub.ledger == ['ask {"text": "Dear"}'] * 2  # asked, and answered


async def test_first_answer_to_a_question_stands(place: Place, stub: Stub) -> None:
    """While the turn waits, and after its commit, when its records alone know of the answer."""
    stub.does(tools=["ask"])
    async with runtime_with(place, calling("ask"), stub.server()) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        [pending] = await session.pending()
        async with place.runtime() as front_end:
            elsewhere = await front_end.session("s")
            await elsewhere.answer(pending.call_id, {"name": "Ann"}, by="operator")
            with pytest.raises(AlreadyAnswered) as early:
                await elsewhere.answer(pending.call_id, {"name": "Bob"}, by="someone")
        end = await session.result(result.turn_id)
        with pytest.raises(AlreadyAnswered, match="'value' by operator") as late:
            await session.answer(pending.call_id, {"name": "Bob"}, by="someone")

    assert end.tool_calls[0].outcome == Ok("accept Ann")
    for refused in (early, late):
        assert refused.value.answer == {"verdict": "value", "value": {"who": {"name": "Ann"}}, "by": "operator"}


@pytest.mark.parametrize("verb", ["approve", "reject", "settle"])
async def test_another_verb_is_told_what_a_question_waits_for(place: Place, stub: Stub, verb: str) -> None:
    stub.does(tools=["ask"])
    async with runtime_with(place, calling("ask"), stub.server()) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        [pending] = await session.pending()
        with pytest.raises(UnknownCall, match="it waits for an answer to what it asks"):
            await getattr(session, verb)(pending.call_id, *(["done"] if verb == "settle" else []))

        assert await session.pending() == [pending]


async def test_declined_question_reaches_the_server(place: Place, stub: Stub) -> None:
    stub.does(tools=["ask"])
    async with runtime_with(place, calling("ask"), stub.server()) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        await session.answer((await session.pending())[0].call_id, None)
        end = await session.result(result.turn_id)

    assert end.tool_calls[0].outcome == Ok("decline")


async def test_cancel_ends_a_call_that_asks(place: Place, stub: Stub) -> None:
    stub.does(tools=["ask"])
    async with runtime_with(place, calling("ask"), stub.server()) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        [pending] = await session.pending()
        await session.cancel()
        end = await session.result(result.turn_id)
        with pytest.raises(UnknownCall):
            await session.answer(pending.call_id, {"name": "late"})

    assert isinstance(end.tool_calls[0].outcome, OutcomeUnknown)
    assert stub.ledger == ["ask {}"]


async def test_handler_of_the_host_answers_questions(place: Place, stub: Stub) -> None:
    stub.does(tools=["ask"])
    asked = []

    async def elicit(question: Elicitation) -> dict[str, Any]:
        asked.append(question)
        return {"name": "Bob"}

    async with runtime_with(place, calling("ask"), stub.server(elicit=elicit)) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.tool_calls[0].outcome == Ok("accept Bob")
    assert [(each.server, each.message, each.call_id) for each in asked] == [("stub", "Who are you?", "s.1.1.0")]


async def test_handler_that_raises_declines_and_harms_nothing(place: Place, stub: Stub) -> None:
    stub.does(tools=["ask"])

    async def elicit(question: Elicitation) -> dict[str, Any]:
        raise ValueError("no")

    async with runtime_with(place, calling("ask"), stub.server(elicit=elicit)) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.tool_calls[0].outcome == Ok("cancel")


async def test_question_to_the_sessions_model_is_in_the_usage_of_the_session(place: Place, stub: Stub) -> None:
    stub.does(tools=["model"])

    def model(request: ModelRequest) -> Any:
        if request.label == "mcp:stub":
            return ModelResponse("swordfish", usage=Usage(input=7, output=1, calls=1))
        answered = any(part for message in request.messages for part in message.parts if message.role == "tool")
        return "done" if answered else [ToolCall("1", "mcp__stub__model", {})]

    agent = Agent(FunctionModel(model), name="a")
    async with runtime_with(place, agent, stub.server(sample=True)) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        usage = await session.usage()

    assert result.tool_calls[0].outcome == Ok("the model said swordfish")
    assert (usage["mcp:stub"].calls, usage["mcp:stub"].input) == (1, 7)


async def test_question_to_a_model_is_the_hosts_to_answer_or_refused(place: Place, stub: Stub) -> None:
    stub.does(tools=["model"])

    async def sample(question: Sampling) -> str:
        return f"{question.messages[0][1]} {question.max_tokens}"

    async with runtime_with(place, calling("model"), stub.server(sample=sample)) as runtime:
        heard = await (await runtime.session("s")).run("go")
    async with runtime_with(place, calling("model"), stub.server()) as runtime:
        refused = await (await runtime.session("t")).run("go")

    assert heard.tool_calls[0].outcome == Ok("the model said What is the word? 20")
    outcome = refused.tool_calls[0].outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "mcp_refused"


# ---------------------------------------------------------------------- resources and prompts


async def test_resources_and_prompts_are_the_hosts_to_read(place: Place, stub: Stub) -> None:
    stub.does(capabilities={"resources": {}, "prompts": {}})
    async with runtime_with(place, calling("echo"), stub.server()) as runtime:
        resources = await runtime.mcp.resources("stub")
        text = await runtime.mcp.read_resource("stub", "stub://greeting")
        prompts = await runtime.mcp.prompts("stub")
        messages = await runtime.mcp.prompt("stub", "greet", {"who": "Ann"})
        with pytest.raises(InvalidInput, match="there is no MCP server 'other'; attached: stub"):
            await runtime.mcp.resources("other")

    assert [each["uri"] for each in resources] == ["stub://greeting"]
    assert text == ["hello from a resource"]
    assert [each["name"] for each in prompts] == ["greet"]
    assert [(each.role, each.parts) for each in messages] == [("user", (Text("Greet Ann."),))]


async def test_resources_may_be_offered_to_models(place: Place, stub: Stub) -> None:
    stub.does(capabilities={"resources": {}})
    server: McpServer = stub.server(resources=True)
    async with runtime_with(place, calling("read_resource", {"uri": "stub://greeting"}), server) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.tool_calls[0].outcome == Ok("hello from a resource")
