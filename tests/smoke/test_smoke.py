"""The public API in a few seconds, on memory and on a file: what must work on every interpreter we support."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from perdure import (
    Agent,
    Budget,
    ModelRequest,
    ModelResponse,
    Retry,
    Runtime,
    ToolCall,
    ToolContext,
    ToolError,
    TurnFailed,
    Usage,
    tool,
)
from perdure.model.event import TextDelta, ToolFinished, ToolStarted, TurnCommitted
from perdure.model.outcome import BudgetSpent, Finished, Waiting
from perdure.model.tool import Cancelled, Denied, Failed, Ok
from perdure.stores.memory import MemoryStore
from perdure.testing import FunctionModel, ScriptedModel


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory" if request.param == "memory" else str(tmp_path / "agent.db")


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def shout(text: str, ctx: ToolContext[dict[str, str]]) -> str:
    """Say it louder.

    Args:
        text: what to say
    """
    return text.upper() + ctx.deps["mark"]


@tool
async def divide(a: int, b: int) -> float:
    """Divide."""
    if b == 0:
        raise ToolError("nothing divides by zero", code="division")
    return a / b


@tool(approval="ask")
async def pay(amount: int) -> str:
    """Pay somebody."""
    return f"paid {amount}"


def test_one_line_is_enough() -> None:
    result = Agent("scripted").run_sync("hello")

    assert result.text == "You said: hello"
    assert result.outcome == Finished("You said: hello")


async def test_a_conversation_remembers_what_was_said(store: str) -> None:
    def count(request: ModelRequest) -> str:
        return f"{len(request.messages)} messages so far"

    async with Runtime(store, agents=[Agent(FunctionModel(count), instructions="Count.")]) as runtime:
        session = await runtime.session("chat-1")
        first = await session.run("one")
        second = await session.run("two")

        assert (first.text, second.text) == ("2 messages so far", "4 messages so far")
        assert (first.turn_id, second.turn_id) == ("chat-1.1", "chat-1.2")
        assert [m.text for m in await session.history()] == [
            "one",
            "2 messages so far",
            "two",
            "4 messages so far",
        ]


async def test_tools_run_and_their_results_reach_the_model_in_order(store: str) -> None:
    calls = [
        ToolCall("x", "add", {"a": 2, "b": 3}),
        ToolCall("y", "shout", {"text": "hey"}),
        ToolCall("z", "divide", {"a": 1, "b": 0}),
    ]
    model = ScriptedModel([calls, ModelResponse("done", usage=Usage(input=7))])

    async with Runtime(store, agents=[Agent(model, tools=[add, shout, divide])], deps={"mark": "!"}) as runtime:
        result = await (await runtime.session()).run("go")

    assert result.text == "done"
    assert [r.outcome for r in result.tool_calls] == [
        Ok(5),
        Ok("HEY!"),
        Failed("division", "nothing divides by zero"),
    ]
    told = [part for message in model.requests[1].messages for part in message.tool_results]
    assert [(r.call_id, r.status) for r in told] == [("x", "ok"), ("y", "ok"), ("z", "failed")]
    assert result.usage.calls == 2


async def test_a_turn_can_be_watched(store: str) -> None:
    model = ScriptedModel([[ToolCall("x", "add", {"a": 2, "b": 3})], "five"])

    async with Runtime(store, agents=[Agent(model, tools=[add])]) as runtime:
        session = await runtime.session("chat-1")
        events = []
        async with session.stream("what is 2 + 3?") as turn:
            async for event in turn:
                events.append(event)
            result = await turn.result()

    kinds = [type(e) for e in events]
    assert [k for k in kinds if k in (ToolStarted, ToolFinished, TurnCommitted)] == [
        ToolStarted,
        ToolFinished,
        TurnCommitted,
    ]
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "five" == result.text


async def test_an_approval_waits_on_disk_and_a_refusal_reaches_the_model(store: str) -> None:
    model = ScriptedModel([[ToolCall("x", "pay", {"amount": 5}), ToolCall("y", "pay", {"amount": 900})], "so be it"])

    async with Runtime(store, agents=[Agent(model, tools=[pay])]) as runtime:
        session = await runtime.session("chat-1")
        parked = await session.run("pay them")
        pending = await session.pending()
        assert isinstance(parked.outcome, Waiting)
        assert [(p.tool, p.args) for p in pending] == [("pay", {"amount": 5}), ("pay", {"amount": 900})]

        await session.approve(pending[0].call_id, by="ann")
        await session.reject(pending[1].call_id, "too dear", by="ann")
        result = await session.result(parked.turn_id)

    assert result.text == "so be it"
    assert [r.outcome for r in result.tool_calls] == [Ok("paid 5"), Denied("too dear", "ann")]


async def test_a_fork_shares_the_past_and_nothing_else(store: str) -> None:
    async with Runtime(store, agents=[Agent("scripted")]) as runtime:
        session = await runtime.session("chat-1")
        await session.run("one")
        await session.run("two")

        branch = await session.fork(at="chat-1.1", session_id="branch")
        twig = await branch.fork(session_id="twig")
        await branch.run("three")
        await twig.run("four")

        said = {s.id: [m.text for m in await s.history() if m.role == "user"] for s in (session, branch, twig)}
    assert said == {"chat-1": ["one", "two"], "branch": ["one", "three"], "twig": ["one", "four"]}


async def test_the_same_key_is_the_same_turn(store: str) -> None:
    asked: list[ModelRequest] = []

    def answer(request: ModelRequest) -> str:
        asked.append(request)
        return "once"

    async with Runtime(store, agents=[Agent(FunctionModel(answer))]) as runtime:
        session = await runtime.session("chat-1")
        results = await asyncio.gather(*[session.run("hello", key="msg-1") for _ in range(5)])

    assert {r.turn_id for r in results} == {"chat-1.1"}
    assert len(asked) == 1


async def test_a_running_turn_can_be_cancelled(store: str) -> None:
    asked = asyncio.Event()

    async def never(request: ModelRequest) -> str:
        asked.set()
        await asyncio.Event().wait()
        return "never"

    async with Runtime(store, agents=[Agent(FunctionModel(never))]) as runtime:
        session = await runtime.session("chat-1")
        receipt = await session.send("hello")
        await asked.wait()

        assert await session.cancel("enough", by="ann") == "requested"
        result = await receipt.result()

    assert result.outcome == Cancelled("ann", "enough")
    with pytest.raises(TurnFailed, match="cancelled"):
        result.raise_for_outcome()


async def test_a_budget_ends_a_turn(store: str) -> None:
    def again(request: ModelRequest) -> list[ToolCall]:
        return [ToolCall("", "add", {"a": 1, "b": 1})]

    async with Runtime(store, agents=[Agent(FunctionModel(again), tools=[add], budget=Budget(steps=2))]) as runtime:
        result = await (await runtime.session()).run("go")

    assert result.outcome == BudgetSpent("steps", 2)
    assert len(result.tool_calls) == 3


async def test_a_tool_that_asks_for_another_attempt_gets_it(store: str) -> None:
    attempts: list[int] = []

    @tool(retries=2)
    async def flaky(ctx: ToolContext[None]) -> str:
        attempts.append(ctx.attempt)
        if ctx.attempt < 3:
            raise Retry("not yet", after=0)
        return "at last"

    async with Runtime(store, agents=[Agent(ScriptedModel([ToolCall("x", "flaky"), "ok"]), tools=[flaky])]) as runtime:
        result = await (await runtime.session()).run("go")

    assert attempts == [1, 2, 3]
    assert [(r.outcome, r.attempts) for r in result.tool_calls] == [(Ok("at last"), 3)]


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_waiting_turn_goes_on_in_another_runtime(kind: str, tmp_path: Path) -> None:
    memory = MemoryStore()

    def opened(answers: list[object]) -> Runtime:
        place = MemoryStore(memory.rows) if kind == "memory" else tmp_path / "agent.db"
        return Runtime(place, agents=[Agent(ScriptedModel(answers), tools=[pay])])

    async with opened([[ToolCall("x", "pay", {"amount": 5})]]) as runtime:
        parked = await (await runtime.session("chat-1")).run("pay")
        assert parked.waiting

    async with opened(["paid, thank you"]) as runtime:
        session = await runtime.session("chat-1")
        (pending,) = await session.pending()
        await session.approve(pending.call_id)
        result = await session.result(parked.turn_id)

    async with opened([]) as runtime:
        session = await runtime.session("chat-1")
        assert (await session.result(parked.turn_id)).text == result.text == "paid, thank you"
        assert [m.role for m in await session.history()] == ["user", "assistant", "tool", "assistant"]
        assert [row.id for row in await runtime.sessions.list()] == ["chat-1"]
        assert await runtime.sessions.delete("chat-1")
        assert list(await runtime.sessions.list()) == []


@pytest.mark.filterwarnings("ignore:Binding 1:DeprecationWarning")  # of `?1`, by Python 3.12.0 to 3.12.3
@pytest.mark.skipif(sys.platform != "linux", reason="commands run on Linux")
async def test_commands_run_and_are_killed(store: str) -> None:
    async with Runtime(store, agents=[]) as runtime:
        ended = await (await runtime.command(["sh", "-c", "echo out; exit 3"])).result()
        running = await runtime.command(["sleep", "600"])
        await running.cancel()
        killed = await running.result()

    assert (ended.status, ended.exit_code, ended.stdout) == ("exited", 3, "out\n")
    assert killed.status == "killed"
