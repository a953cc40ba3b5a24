"""`Agent(instructions=fn)`: text that a function of the caller writes for each turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure import Agent, Caller, ModelRequest, Plugin, Runtime, ToolCall, tool
from perdure.errors import InstructionsFailed, InvalidDefinition
from perdure.model.outcome import Finished
from perdure.model.tool import Failed
from perdure.plugins import SessionConfig, SessionContext
from perdure.testing import FunctionModel
from tests.kit import Place, until, untyped


def greets(caller: Caller) -> str:
    return f"You serve {caller.metadata.get('user', 'nobody')} in {caller.session_id}."


async def greets_later(caller: Caller) -> str:
    await asyncio.sleep(0)
    return greets(caller)


class Shown:
    """A model that calls a tool once, and keeps the instructions that it was shown."""

    def __init__(self) -> None:
        self.systems: list[str] = []

    def __call__(self, request: ModelRequest) -> Any:
        self.systems += [m.text for m in request.messages if m.role == "system"]
        return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "act", {})]


@tool
async def act() -> str:
    """Does something."""
    return "acted"


@pytest.mark.parametrize("fn", [greets, greets_later], ids=["sync", "async"])
async def test_the_function_writes_the_instructions_of_its_turn(fn: Any) -> None:
    shown = Shown()
    agent = Agent(FunctionModel(shown), instructions=fn, tools=[act])
    async with Runtime("memory", agents=[agent]) as runtime:
        session = await runtime.session("chat", metadata={"user": "ada"})
        await session.run("go")

    assert shown.systems == ["You serve ada in chat."] * 2


async def test_a_turn_shows_one_text_in_all_its_steps_and_the_next_turn_asks_again() -> None:
    """The beginning of the prompt is the same within a turn, so that a provider's cache holds."""
    shown, counted = Shown(), iter(range(10))
    agent = Agent(FunctionModel(shown), instructions=lambda caller: f"This is text {next(counted)}.", tools=[act])
    async with Runtime("memory", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await session.run("again")

    assert shown.systems == ["This is text 0."] * 2 + ["This is text 1."] * 2


async def test_what_configure_hooks_set_comes_after_the_text_of_the_function() -> None:
    class Briefly(Plugin):
        id = "briefly"

        def configure(self, ctx: SessionContext, config: SessionConfig) -> SessionConfig:
            return SessionConfig("Be brief.", config.budget)

    shown = Shown()
    agent = Agent(FunctionModel(shown), instructions=greets, tools=[act], plugins=[Briefly()])
    async with Runtime("memory", agents=[agent]) as runtime:
        await (await runtime.session("chat")).run("go")

    assert shown.systems[0] == "You serve nobody in chat.\n\nBe brief."


@pytest.mark.parametrize("made", [None, 7, ["text"]])
async def test_what_is_no_text_fails_a_turn_that_has_done_nothing(made: Any) -> None:
    agent = Agent("scripted", instructions=untyped(lambda caller: made))
    async with Runtime("memory", agents=[agent]) as runtime:
        result = await (await runtime.session("chat")).run("go")

    assert isinstance(result.outcome, Failed)
    assert result.outcome.code == "instructions_failed"


async def test_a_turn_with_records_is_set_aside_and_goes_on_when_it_is_resumed(place: Place) -> None:
    @tool(approval="ask")
    async def asks() -> str:
        """Waits for a person first."""
        return "allowed"

    broken: list[bool] = []

    def writes(caller: Caller) -> str:
        if broken:
            raise OSError("no template")
        return "Be kind."

    def model(request: ModelRequest) -> Any:
        return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "asks", {})]

    async with place.runtime(Agent(FunctionModel(model), instructions=writes, tools=[asks])) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        broken.append(True)
        await session.approve(parked.pending[0].call_id)
        with pytest.raises(InstructionsFailed, match="no template"):
            await session.result(parked.turn_id)
        await until(lambda: runtime.sessions.list(state="stuck"))
        broken.clear()
        await session.resume()
        result = await session.result(parked.turn_id)

    assert result.outcome == Finished("done")


@pytest.mark.parametrize("given", [7, None, lambda: "no caller", Agent])
def test_what_is_neither_text_nor_a_function_of_the_caller_is_refused(given: Any) -> None:
    with pytest.raises(InvalidDefinition, match="instructions="):
        Agent("scripted", instructions=untyped(given))


class Counting(FunctionModel):
    async def count_tokens(self, request: ModelRequest) -> int:
        return sum(len(message.text) for message in request.messages)


async def test_tokens_are_counted_with_the_text_of_the_function() -> None:
    agent = Agent(Counting(lambda request: "done"), instructions=greets)
    async with Runtime("memory", agents=[agent]) as runtime:
        counted = await (await runtime.session("chat")).count_tokens("go")

    assert counted == len("You serve nobody in chat.") + len("go")


@pytest.mark.parametrize("made", [False, True], ids=["object", "function"])
async def test_instructions_are_written_with_the_live_objects_of_the_run(made: bool) -> None:
    shown, counted, left = Shown(), list[str](), list[str]()

    @contextlib.asynccontextmanager
    async def names(caller: Caller) -> AsyncGenerator[dict[str, str]]:
        assert caller.deps is None
        yield {"u-1": "Ada"}
        left.append(caller.session_id)

    async def greeting(caller: Caller) -> str:
        counted.append(caller.session_id)
        return f"You speak with {caller.deps[caller.metadata['user']]}."

    agent = Agent(Counting(shown), instructions=greeting, tools=[act])
    async with Runtime("memory", agents=[agent], deps=names if made else {"u-1": "Ada"}) as runtime:
        session = await runtime.session("chat", metadata={"user": "u-1"})
        await session.run("go")
        tokens = await session.count_tokens("and?")

    assert shown.systems == ["You speak with Ada."] * 2
    assert tokens > len(shown.systems[0])
    assert counted == ["chat", "chat"]
    assert left == (["chat", "chat"] if made else [])
