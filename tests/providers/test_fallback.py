"""Several models for one agent, and attempts that do not become a storm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, ModelResponse, Runtime, ToolCall, Usage, tool
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.event import Retracted, TextDelta
from perdure.model.llm import Delta
from perdure.model.outcome import ProviderFailed
from perdure.providers.fallback import Fallback
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock

BUSY = ProviderError("busy", retryable=True, code="overloaded")
WRONG_KEY = ProviderError("wrong key", code="authentication")


@tool
def look() -> str:
    """Look."""
    return "seen"


class Failing:
    """Says half a word, and fails."""

    def __init__(self, name: str, error: ProviderError) -> None:
        self.name, self.error, self.asked = name, error, 0

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        self.asked += 1
        yield "Hal"
        raise self.error


@pytest.mark.parametrize("error", [BUSY, WRONG_KEY])
async def test_the_next_model_is_asked_and_the_first_ones_words_are_taken_back(error: ProviderError) -> None:
    first = Failing("first", error)
    agent = Agent(Fallback(first, ScriptedModel([[ToolCall("c", "look")], "done"])), tools=[look])
    async with Runtime("memory", agents=[agent]) as runtime:
        events = []
        async with (await runtime.session("s")).stream("go") as turn:
            async for event in turn:
                events.append(event)
            result = await turn.result()

    assert result.text == "done"
    assert first.asked == 1, "the model that answered stays with the turn"
    kinds = [event for event in events if isinstance(event, TextDelta | Retracted)]
    assert [type(event) for event in kinds] == [TextDelta, Retracted, TextDelta]


async def test_models_that_may_recover_are_asked_in_rounds_until_the_attempts_are_spent() -> None:
    models = [Failing("a", BUSY), Failing("b", WRONG_KEY), Failing("c", BUSY)]
    clock = VirtualClock(auto=True)
    async with Runtime("memory", agents=[Agent(Fallback(*models))], clock=clock) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")

    assert isinstance(result.outcome, ProviderFailed)
    assert [model.asked for model in models][1] == 1, "a wrong key does not become right"
    assert models[0].asked >= 4
    assert models[2].asked >= 4


async def test_a_turn_goes_on_with_the_model_that_was_to_be_asked(tmp_path: Path) -> None:
    first, waits = Failing("first", BUSY), asyncio.Event()

    async def hangs(request: ModelRequest) -> str:
        waits.set()
        await asyncio.Event().wait()
        return "never"

    async with Runtime(tmp_path / "a.db", agents=[Agent(Fallback(first, FunctionModel(hangs)))], grace=0) as runtime:
        receipt = await (await runtime.session("s")).send("go")
        await waits.wait()
    answers = ScriptedModel([ModelResponse("done", usage=Usage(input=1))])
    async with Runtime(tmp_path / "a.db", agents=[Agent(Fallback(first, answers))]) as runtime:
        result = await (await runtime.session("s")).result(receipt.turn_id)

    assert result.text == "done"
    assert first.asked == 1
    assert result.usage.unknown == 2, "what broke off after half a word, and the call that was cut off"


async def test_fewer_models_than_before_are_no_reason_to_stop(tmp_path: Path) -> None:
    waits = asyncio.Event()

    async def hangs(request: ModelRequest) -> str:
        waits.set()
        await asyncio.Event().wait()
        return "never"

    both = Fallback(Failing("first", BUSY), FunctionModel(hangs))
    async with Runtime(tmp_path / "a.db", agents=[Agent(both)], grace=0) as runtime:
        receipt = await (await runtime.session("s")).send("go")
        await waits.wait()
    async with Runtime(tmp_path / "a.db", agents=[Agent(ScriptedModel(["done"]))]) as runtime:
        assert (await (await runtime.session("s")).result(receipt.turn_id)).text == "done"


@pytest.mark.slow
async def test_an_outage_is_no_storm() -> None:
    """A thousand turns ask a model twice a second together, after the first attempt of each."""
    asked: list[float] = []

    def busy(request: ModelRequest) -> ModelResponse:
        asked.append(clock.monotonic())
        raise BUSY

    clock = VirtualClock(auto=True)
    async with Runtime("memory", agents=[Agent(FunctionModel(busy))], clock=clock) as runtime:
        sessions = [await runtime.session(f"s{number}") for number in range(1000)]
        results = await asyncio.gather(*[session.run("go") for session in sessions])

    assert all(isinstance(result.outcome, ProviderFailed) for result in results)
    assert len(asked) > 1000
    assert len(asked) - 1000 <= 2 * (asked[-1] - asked[0]) + 1


@pytest.mark.parametrize("models", [(), ("scripted",), (5, 6), ("nobody:x", "anthropic:y")])
def test_what_is_no_list_of_models_is_refused(models: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidDefinition):
        Fallback(*models)
