"""`agent.chat()`: a conversation in memory, without a Runtime to learn first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure import Agent, Caller, ModelRequest, ToolCall, tool
from perdure.errors import AlreadyAnswered, InvalidDefinition, InvalidInput, UnknownCall
from perdure.model.event import TextDelta
from perdure.model.outcome import Queued
from perdure.testing import FunctionModel
from tests.kit import TellingModel, agent_calling, texts, untyped


def heard(request: ModelRequest) -> str:
    return " / ".join(m.text for m in request.messages if m.role == "user")


async def test_every_run_knows_what_was_said_before() -> None:
    chat = Agent(FunctionModel(heard)).chat()
    await chat.run("one")
    result = await chat.run("two")

    assert result.text == "one / two"
    assert texts(await chat.history()) == ["one", "one", "two", "one / two"]


async def test_two_chats_of_an_agent_know_nothing_of_each_other() -> None:
    agent = Agent(FunctionModel(heard))
    first, second = agent.chat(), agent.chat()
    await first.run("one")

    assert (await second.run("two")).text == "two"


async def test_a_stream_gives_events_and_its_answer_is_remembered() -> None:
    chat = Agent(FunctionModel(heard)).chat()
    async with chat.stream("one") as turn:
        pieces = [event.text async for event in turn if isinstance(event, TextDelta)]
        result = await turn.result()

    assert "".join(pieces) == result.text == "one"
    assert (await chat.run("two")).text == "one / two"


async def test_a_typed_agent_answers_with_its_type() -> None:
    chat = Agent(FunctionModel(lambda request: "[1, 2]"), output=list[int]).chat()

    assert (await chat.run("count")).output == [1, 2]


async def test_runs_at_the_same_time_come_one_after_the_other() -> None:
    chat = Agent(FunctionModel(heard)).chat()
    results = await asyncio.gather(chat.run("one"), chat.run("two"), chat.run("three"))

    assert [result.text for result in results] == ["one", "one / two", "one / two / three"]


async def test_a_cancelled_run_cancels_its_turn_and_the_chat_goes_on() -> None:
    model = TellingModel()
    chat = Agent(model).chat()
    running = asyncio.ensure_future(chat.run("one"))
    await model.next()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    model.say("two")

    assert (await chat.run("again")).text == "two"


async def test_a_stream_that_is_left_early_cancels_its_turn_and_the_chat_goes_on() -> None:
    model = TellingModel()
    chat = Agent(model).chat()
    async with chat.stream("one"):
        await model.next()
    model.say("two")

    assert (await chat.run("again")).text == "two"


async def test_what_a_chat_opened_is_closed_after_each_run() -> None:
    opened: list[str] = []

    @contextlib.asynccontextmanager
    async def deps(caller: Caller) -> AsyncGenerator[str]:
        opened.append(str(caller.metadata["user"]))
        yield "deps"
        opened.pop()

    chat = agent_calling("missing").chat(deps=deps, metadata={"user": "ada"})
    before = asyncio.all_tasks()
    await chat.run("one")

    assert opened == []
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("options", [{"deps": lambda: None}, {"metadata": {"user": ["nested"]}}, {"metadata": 7}])
def test_what_a_chat_cannot_use_is_refused_before_anything_is_said(options: Any) -> None:
    with pytest.raises((InvalidDefinition, InvalidInput)):
        Agent("scripted").chat(**untyped(options))


async def test_a_keyword_of_another_library_is_refused() -> None:
    with pytest.raises((InvalidInput, InvalidDefinition, TypeError)):
        await Agent("scripted").chat().run("go", **untyped({"message_history": []}))


@tool(approval="ask")
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


async def paying(request: ModelRequest) -> str | list[ToolCall]:
    last = request.messages[-1]
    for _ in range(50):  # a turn that is not waited for does not end by chance
        await asyncio.sleep(0)
    if last.role == "user":
        return [ToolCall("", "pay", {"amount": 3})] if "pay" in last.text else f"{last.text} back"
    return str(last.tool_results[0].content)


async def test_a_call_that_asks_is_approved_and_its_turn_goes_on() -> None:
    chat = Agent(FunctionModel(paying), tools=[pay]).chat()
    asked = await chat.run("pay")
    behind = await chat.run("hello")
    approved = await chat.approve(asked.pending[0].call_id)

    assert (asked.waiting, behind.outcome.__class__, approved.text) == (True, Queued, "paid 3")
    assert approved.turn_id == asked.turn_id
    assert (await chat.run("and now")).text == "and now back"
    assert texts(await chat.history())[-4:] == ["hello", "hello back", "and now", "and now back"]


async def test_a_call_that_asks_is_refused_with_a_reason_for_the_model() -> None:
    chat = Agent(FunctionModel(paying), tools=[pay]).chat()
    asked = await chat.run("pay")
    refused = await chat.reject(asked.pending[0].call_id, "too much")

    assert "too much" in refused.text
    assert (await chat.run("hello")).text == "hello back"


async def test_a_turn_that_waits_is_given_up_and_the_chat_goes_on() -> None:
    chat = Agent(FunctionModel(paying), tools=[pay]).chat()
    asked = await chat.run("pay")
    await chat.cancel("never mind")

    assert (await chat.run("hello")).text == "hello back"
    with pytest.raises((UnknownCall, AlreadyAnswered)):
        await chat.approve(asked.pending[0].call_id)


@pytest.mark.parametrize("call_id", ["", "chat.1", "other.1.1.0", 7])
async def test_what_is_no_call_of_a_chat_is_refused(call_id: Any) -> None:
    with pytest.raises(UnknownCall):
        await Agent(FunctionModel(paying), tools=[pay]).chat().approve(call_id)
