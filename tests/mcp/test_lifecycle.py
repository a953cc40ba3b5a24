"""What outlives what: two Runtimes on one store, answers from elsewhere, servers that leave, budgets, environments."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Budget, Limit, ToolCall
from perdure.errors import AlreadyAnswered, UnknownCall
from perdure.mcp import Elicitation, McpServer
from perdure.model.llm import ModelRequest, ModelResponse, Usage
from perdure.model.outcome import BudgetSpent, Finished, LimitReached
from perdure.model.sandbox import Confinement
from perdure.model.tool import Failed, Ok, OutcomeUnknown
from perdure.testing import FunctionModel
from tests.kit import Place, agent_calling, crash, until, untyped
from tests.mcp.conftest import STUB, Stub, runtime_with, servers_in


@pytest.fixture(params=["sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


def asking(stub: Stub) -> Agent[str]:
    stub.does(tools=["ask"])
    return agent_calling("mcp__stub__ask", {"text": "Dear"})


# ---------------------------------------------------------------------- two Runtimes


async def test_two_runtimes_on_a_store_have_a_server_each_and_share_what_is_approved(place: Place, stub: Stub) -> None:
    agent = agent_calling("mcp__stub__echo", {"text": "hi"})
    async with runtime_with(place, agent, stub.server()) as one, runtime_with(place, agent, stub.server()) as two:
        assert await one.mcp.ready()
        assert await two.mcp.ready()
        pids = {runtime.mcp.attached["stub"].connection.pid for runtime in (one, two)}
        results = [await (await runtime.session(f"s{n}")).run("go") for n, runtime in enumerate((one, two))]
        events = [event async for event in one.processes.events("mcp.stub") if event.type == "approved"]

    assert len(pids) == 2
    assert [each.tool_calls[0].outcome for each in results] == [Ok("hi")] * 2
    assert {each["name"] for event in events for each in event.payload["tools"]} == {"echo"}


async def test_question_is_answered_once_however_many_answer(place: Place, stub: Stub) -> None:
    agent = asking(stub)
    async with runtime_with(place, agent, stub.server()) as one, runtime_with(place, agent, stub.server()) as two:
        session = await one.session("s")
        result = await session.run("go")
        [pending] = await session.pending()
        answers = [
            (await runtime.session("s")).answer(pending.call_id, {"name": f"Ann{n}"})
            for n, runtime in enumerate([one, two] * 3)
        ]
        told = await asyncio.gather(*answers, return_exceptions=True)
        end = await session.result(result.turn_id)
        with pytest.raises((UnknownCall, AlreadyAnswered)):
            await session.answer(pending.call_id, {"name": "late"})

    accepted = [n for n, each in enumerate(told) if each is None]
    assert len(accepted) >= 1
    assert all(isinstance(each, UnknownCall | AlreadyAnswered) for each in told if each is not None)
    assert end.tool_calls[0].outcome == Ok(f"Dear accept Ann{accepted[0]}")
    assert len(stub.ledger) == 2


@pytest.mark.parametrize(
    "answer",
    [
        {"name": ["a"]}, {"name": None}, {"nam": "x"}, "text", 7, [], {"who": {"name": 3}}, {"other": {"name": "x"}},
        {"name": "x" * (40 << 20)},
    ],
    ids=range(9),
)  # fmt: skip
async def test_answer_that_does_not_fit_is_refused_and_the_question_stays(
    place: Place, stub: Stub, answer: Any
) -> None:
    async with runtime_with(place, asking(stub), stub.server()) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        [pending] = await session.pending()
        with pytest.raises(Exception, match=r"fit|answer|bytes"):  # InvalidInput, or TooLarge
            await session.answer(pending.call_id, untyped(answer))

        assert await session.pending() == [pending]
    assert len(stub.ledger) == 1


async def test_hidden_signs_of_an_answer_reach_the_server_as_they_are_text(place: Place, stub: Stub) -> None:
    async with runtime_with(place, asking(stub), stub.server()) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        [pending] = await session.pending()
        await session.answer(pending.call_id, {"name": "A\u202en\ud800\0n"})
        end = await session.result(result.turn_id)

    assert end.tool_calls[0].outcome == Ok("Dear accept A\u202en\ufffd\ufffdn")


# ---------------------------------------------------------------------- servers that are not there any more


@pytest.mark.parametrize("gone", ["detached", "renamed"])
async def test_answer_for_a_server_that_is_gone_ends_its_call(place: Place, stub: Stub, gone: str) -> None:
    async with runtime_with(place, asking(stub), stub.server()) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        [pending] = await session.pending()
        await crash(runtime)
    now = [] if gone == "detached" else [McpServer("new", command=[sys.executable, "-I", "-S", str(STUB), stub.file])]
    async with runtime_with(place, asking(stub), *now) as runtime:
        session = await runtime.session("s")
        await session.answer(pending.call_id, {"name": "Ann"})
        end = await session.result(result.turn_id)

    assert isinstance(end.outcome, Finished)
    assert isinstance(end.tool_calls[0].outcome, Failed | OutcomeUnknown)
    assert len(stub.ledger) == 1


async def test_answer_while_the_server_is_down_ends_its_call(place: Place, stub: Stub) -> None:
    async with runtime_with(place, asking(stub), stub.server()) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        [pending] = await session.pending()
        await runtime.mcp.detach("stub")
        await session.answer(pending.call_id, {"name": "Ann"})
        end = await session.result(result.turn_id)

    assert isinstance(end.outcome, Finished)
    assert isinstance(end.tool_calls[0].outcome, Failed | OutcomeUnknown)
    assert len(stub.ledger) == 1


async def test_question_of_an_earlier_version_dies_with_its_runtime_and_its_call_is_unknown(
    place: Place, stub: Stub
) -> None:
    wanted = {"mode": "form", "message": "Who?", "requestedSchema": {"type": "object", "properties": {}}}
    stub.does(tools=["asks"], version="2025-11-25", asks="elicitation/create", asks_params=wanted)
    asked = asyncio.Event()

    async def elicit(question: Elicitation) -> dict[str, Any]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    agent = agent_calling("mcp__stub__asks")
    async with runtime_with(place, agent, stub.server(elicit=elicit)) as runtime:
        receipt = await (await runtime.session("s")).send("go")
        await asked.wait()
        await crash(runtime)
    async with runtime_with(place, agent, stub.server(elicit=elicit)) as runtime:
        end = await (await runtime.session("s")).result(receipt.turn_id)

    assert isinstance(end.outcome, Finished)
    assert isinstance(end.tool_calls[0].outcome, OutcomeUnknown)
    assert len(stub.ledger) == 1


@pytest.mark.parametrize(("hints", "calls"), [({"readOnlyHint": True}, 2), ({}, 1)], ids=["reads", "not said"])
async def test_call_that_a_crash_cut_off_is_sent_again_if_the_server_says_that_it_only_reads(
    place: Place, stub: Stub, hints: dict[str, Any], calls: int
) -> None:
    described = {"name": "hang", "inputSchema": {"type": "object"}, "annotations": hints}
    stub.does(tools=[described])
    agent = agent_calling("mcp__stub__hang")
    async with runtime_with(place, agent, stub.server()) as runtime:
        receipt = await (await runtime.session("s")).send("go")
        await until(lambda: len(stub.ledger) == 1)
        await crash(runtime)
    async with runtime_with(place, agent, stub.server(timeout=0.2)) as runtime:
        end = await (await runtime.session("s")).result(receipt.turn_id)

    assert len(stub.ledger) == calls
    assert [(each.attempts, each.repeated) for each in end.tool_calls] == [(calls, calls - 1)]


# ---------------------------------------------------------------------- what sampling costs


def paying(answer: Usage) -> Agent[str]:
    """Calls the tool that asks its model; each answer to the server costs `answer`."""

    def model(request: ModelRequest) -> Any:
        if request.label == "mcp:stub":
            return ModelResponse("swordfish", usage=answer)
        return [ToolCall("1", "mcp__stub__model", {})]

    return Agent(FunctionModel(model), name="a", budget=Budget(steps=50, tokens=1000))


async def test_question_to_a_model_counts_in_the_budget_of_its_turn(place: Place, stub: Stub) -> None:
    stub.does(tools=["model"])
    agent = paying(Usage(input=500, output=1, calls=1))
    async with runtime_with(place, agent, stub.server(sample=True)) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == BudgetSpent("tokens", 1000)
    assert len(stub.ledger) == 4  # each call asks once, and has the answer


async def test_question_to_a_model_counts_in_the_limits(place: Place, stub: Stub) -> None:
    stub.does(tools=["model"])
    agent = paying(Usage(input=5, output=400, calls=1))
    limits = [Limit(tokens=900, per="session")]
    async with runtime_with(place, agent, stub.server(sample=True), limits=limits) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        usage = await session.usage()

    assert isinstance(result.outcome, LimitReached | BudgetSpent)
    assert usage["mcp:stub"].calls <= 3


# ---------------------------------------------------------------------- environment and sandbox


async def test_server_has_the_environment_of_commands_and_none_of_the_host(
    place: Place, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "hunter2")
    stub.does(tools=["environment"])
    agent = agent_calling("mcp__stub__environment")
    async with runtime_with(place, agent, stub.server(env={"GIVEN": "yes"})) as runtime:
        result = await (await runtime.session("s")).run("go")

    told = result.tool_calls[0].value
    assert "GIVEN=yes" in told
    assert "hunter2" not in told
    assert "hunter2" not in Path(place.path).read_bytes().decode(errors="replace")


async def test_secrets_of_a_server_are_not_stored(place: Place, stub: Stub) -> None:
    agent = agent_calling("mcp__stub__environment")
    stub.does(tools=["echo"])
    async with runtime_with(place, agent, stub.server(env={"TOKEN": "hunter2"})) as runtime:
        assert await runtime.mcp.ready()
        await (await runtime.session("s")).run("go")

    for file in place.path.parent.rglob("*"):
        if file.is_file():
            assert b"hunter2" not in file.read_bytes(), file


async def test_confined_server_reads_what_it_is_given(place: Place, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    stub = Stub(given)
    stub.does(tools=["open"])
    python = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)}
    box = Confinement(write=(str(given),), read=(*python, str(STUB.parent)))
    agent = agent_calling("mcp__stub__open", {"path": "/etc/shadow"})
    async with runtime_with(place, agent, stub.server(sandbox=box, start_timeout=60)) as runtime:
        assert await runtime.mcp.ready(), runtime.mcp.status()[0].reason
        result = await (await runtime.session("s")).run("go")

    assert result.tool_calls[0].outcome in (Ok("PermissionError"), Ok("FileNotFoundError"))


async def test_store_is_not_shown_to_a_confined_server(place: Place, stub: Stub, tmp_path: Path) -> None:
    box = Confinement(write=(str(tmp_path),))
    async with runtime_with(place, agent_calling("x"), stub.server(sandbox=box)) as runtime:
        ready = await runtime.mcp.ready()
        [status] = runtime.mcp.status()

    assert not ready
    assert "which the command may see" in status.reason


async def test_server_ends_with_what_it_has_begun(place: Place, stub: Stub, tmp_path: Path) -> None:
    stub.does(tools=["begin"])
    async with runtime_with(place, agent_calling("mcp__stub__begin"), stub.server()) as runtime:
        result = await (await runtime.session("s")).run("go")
        child = int(result.tool_calls[0].value)
        assert child in servers_in(tmp_path)

    assert child not in servers_in(tmp_path)
