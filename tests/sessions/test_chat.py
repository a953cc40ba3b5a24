"""`agent.chat()`: a conversation in memory, without a Runtime to learn first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from mainstay import Agent, Caller, ModelRequest
from mainstay.errors import InvalidDefinition, InvalidInput
from mainstay.model.event import TextDelta
from mainstay.testing import FunctionModel
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
