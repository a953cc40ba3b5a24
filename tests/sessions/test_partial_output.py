"""Watching a typed answer grow: over HTTP in each mode, with failed attempts, mended answers and gaps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from perdure import Agent, ModelRequest, Runtime
from perdure.errors import InvalidInput, ProviderError
from perdure.model.event import Gap, Retracted, TextDelta
from perdure.model.llm import ModelSettings, OutputMode
from perdure.providers.registry import provider
from perdure.sessions.outcomes import PartialOutputs
from perdure.testing import FunctionModel
from perdure.testing.model_server import ModelServer, Reply
from tests.providers.wire import ANSWERS, MODEL

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class Person(msgspec.Struct):
    name: str


async def watched(agent: Agent[Any]) -> tuple[list[Any], Any]:
    async with Runtime("memory", agents=[agent]) as runtime:
        async with (await runtime.session("s")).stream("Who?") as turn:
            values = [value async for value in turn.partial_output()]
        return values, (await turn.result()).output


@pytest.mark.parametrize("mode", ["schema", "tool", "prompt"])
@pytest.mark.parametrize("name", ["anthropic", "openai", "openai-chat", "google"])
async def test_the_answer_is_seen_to_grow_in_each_mode(name: str, mode: OutputMode) -> None:
    reply = ANSWERS[name]["answer by tool" if mode == "tool" else "structured"].reply
    async with ModelServer([Reply(body=reply.body, headers=reply.headers, piece=9)]) as server:
        model = provider(f"{name}:{MODEL}", base_url=server.url, key="k")
        values, output = await watched(Agent(model, output=Person, settings=ModelSettings(output_mode=mode)))

    assert values[-1] == {"name": "Ada"}
    assert all(value.get("name", "") in ("", "A", "Ad", "Ada") for value in values)
    assert output == Person("Ada")


async def test_a_failed_attempt_takes_back_what_was_shown() -> None:
    async def model(request: ModelRequest) -> AsyncIterator[str]:
        yield '{"name": "Wro'
        if request.attempt == 1:
            raise ProviderError("gone", retryable=True, after=0)
        yield 'ng"}'

    values, output = await watched(Agent(FunctionModel(model), output=Person))

    assert [value for number, value in enumerate(values) if value not in values[:number]] == [
        {"name": "Wro"},
        None,
        {"name": "Wrong"},
    ]
    assert output == Person("Wrong")


async def test_an_answer_that_is_mended_takes_back_the_one_before() -> None:
    async def model(request: ModelRequest) -> AsyncIterator[str]:
        yield '{"nam": "x"' if len(request.messages) == 1 else '{"name": "Ada"'
        await asyncio.sleep(0)  # people see the first piece
        yield "}"

    values, output = await watched(Agent(FunctionModel(model), output=Person))

    assert values[-2:] == [None, {"name": "Ada"}]
    assert output == Person("Ada")


async def test_an_agent_without_an_output_type_has_no_partial_output() -> None:
    with pytest.raises(InvalidInput, match="no output type"):
        await watched(Agent())


def test_after_a_gap_the_rest_of_a_step_is_passed_over() -> None:
    values = PartialOutputs(SCHEMA)

    def text(words: str, step: int) -> list[Any]:
        return values.receive(TextDelta("s", "t", "c", words, step))

    assert text('{"name": "Ad', 1) == [{"name": "Ad"}]
    assert values.receive(Gap("s", "", "c", "too slow")) == [None]
    assert text('a", {"name": "inside"}', 1) == []
    assert text('{"name": "B', 2) == [{"name": "B"}]
    assert values.receive(Retracted("s", "t", "c", 2, "gone")) == [None]
    assert text('{"name": "C', 2) == [{"name": "C"}]


def test_an_attempt_that_is_retracted_after_a_gap_begins_anew() -> None:
    values = PartialOutputs(SCHEMA)

    assert values.receive(Gap("s", "", "c", "too slow")) == []
    assert values.receive(Retracted("s", "t", "c", 1, "gone")) == []
    assert values.receive(TextDelta("s", "t", "c", '{"name": "A', 1)) == [{"name": "A"}]
