"""Whatever a tool returns and a provider answers: a typed outcome, a host that lives, a session that goes on."""

import asyncio
import collections
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from perdure import Agent, ModelResponse, ToolCall, Usage, tool
from perdure.model.llm import Delta, ModelRequest
from perdure.model.message import Reasoning, Text, ToolResult
from perdure.model.outcome import Finished, ProviderFailed
from perdure.model.tool import Failed, Ok
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place, untyped


class Fatal(BaseException):
    """Like what a test framework raises to end a test: no Exception."""


class Entries(collections.UserDict[str, int]):
    def __init__(self, error: BaseException) -> None:
        super().__init__(a=1)
        self.error = error

    def items(self) -> Any:
        raise self.error


class Model:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def model_dump(self, mode: str) -> Any:
        raise self.error


class Unlooked:
    """Neither shown, compared nor hashed."""

    def __repr__(self) -> str:
        raise SystemExit("shown")

    def __eq__(self, other: object) -> bool:
        raise SystemExit("compared")

    def __hash__(self) -> int:
        raise SystemExit("hashed")


ERRORS = [ValueError("x"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Fatal("x")]


@pytest.mark.parametrize("thread", [False, True], ids=["async", "on a thread"])
@pytest.mark.parametrize("make", [Entries, Model])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
async def test_an_output_that_raises_when_it_is_looked_at_is_a_failed_call(
    place: Place, make: Callable[[BaseException], Any], error: BaseException, thread: bool
) -> None:
    @tool(name="give")
    async def give() -> Any:
        return make(error)

    @tool(name="give")
    def give_on_a_thread() -> Any:
        return make(error)

    agent = Agent(
        ScriptedModel([[ToolCall("a", "give")], "done", "still here"]), tools=[give_on_a_thread if thread else give]
    )
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        result = await asyncio.wait_for(session.run("go"), SOON)

        (call,) = result.tool_calls
        assert isinstance(call.outcome, Failed)
        assert call.outcome.code == "invalid_output"
        assert (await asyncio.wait_for(session.run("and now?"), SOON)).text == "still here"


@pytest.mark.parametrize("value", [{1: "a", "1": "b"}, {"x\0": 1, "x\ufffd": 2}, {"deep": [{None: 1, "null": 2}]}])
async def test_an_output_of_which_a_part_would_be_lost_is_a_failed_call(place: Place, value: Any) -> None:
    @tool
    async def give() -> Any:
        return value

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "give")], "done"]), tools=[give])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert isinstance(result.tool_calls[0].outcome, Failed)
    assert "one value would be lost" in result.tool_calls[0].outcome.message


async def test_a_tool_that_cannot_have_a_thread_fails_and_never_runs_later(place: Place) -> None:
    """The interpreter has no more threads to give: said to the model, and the call's slot is free again."""
    ran = []

    @tool(limit=1)
    def work(n: int) -> str:
        ran.append(n)
        return "worked"

    answers = [[ToolCall("a", "work", {"n": 1})], "one", [ToolCall("a", "work", {"n": 2})], "two"]
    async with place.runtime(Agent(ScriptedModel(answers), tools=[work])) as runtime:
        session = await runtime.session("s")
        start = threading.Thread.start
        threading.Thread.start = no_more  # type: ignore[method-assign]  # the interpreter's, not ours
        try:
            first = await asyncio.wait_for(session.run("go"), SOON)
        finally:
            threading.Thread.start = start  # type: ignore[method-assign]
        second = await asyncio.wait_for(session.run("again"), SOON)

    assert first.tool_calls[0].outcome == Failed("no_thread", "the tool could not be started: can't start new thread")
    assert second.tool_calls[0].outcome == Ok("worked")
    assert ran == [2]


def no_more(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


# ---------------------------------------------------------------------- providers


class Answering:
    """A provider that answers with whatever it was given, then with sense."""

    name = "answering"

    def __init__(self, make: Callable[[], Any]) -> None:
        self.answers: list[Callable[[], Any]] = [make, lambda: ModelResponse("fine")]

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        answer: Delta = self.answers.pop(0)()
        yield answer


ODD: Any = Unlooked()
NONE: Any = None


def fail() -> Any:
    raise Fatal("this test is over")


ANSWERS: dict[str, Callable[[], Any]] = {
    "raises what is no Exception": fail,
    "usage that cannot be shown": lambda: ModelResponse("x", usage=ODD),
    "a stop that cannot be compared": lambda: ModelResponse("x", stop=ODD),
    "a model that cannot be shown": lambda: ModelResponse("x", model=ODD),
    "a cost that says yes": lambda: ModelResponse("x", usage=Usage(cost=True)),
    "a cost that no float can hold": lambda: ModelResponse("x", usage=Usage(cost=10**5000)),
    "usage of nothing": lambda: ModelResponse("x", usage=Usage(input=untyped("many"))),
    "no calls at all": lambda: ModelResponse("x", NONE),
    "a call without a name": lambda: ModelResponse("", [ToolCall("a", NONE)]),
    "reasoning of bytes": lambda: ModelResponse("x", reasoning=[Reasoning(untyped(b"x"))]),
    "a tool result": lambda: ModelResponse(parts=[Text("x"), ToolResult("a", "b", "c")]),
    "a tool result of no kind": lambda: ModelResponse(parts=[ToolResult("a", "b", "c", untyped("odd"))]),
    "forty megabytes of what is no JSON": lambda: ModelResponse("", [ToolCall("a", "b", {}, "x" * 40_000_000)]),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_nonsensical_answer_is_a_failed_turn_and_the_session_goes_on_after_a_restart(
    place: Place, name: str
) -> None:
    async with place.runtime(Agent(Answering(ANSWERS[name]))) as runtime:
        session = await runtime.session("s")
        result = await asyncio.wait_for(session.run("go"), SOON)
        assert isinstance(result.outcome, ProviderFailed)
        assert isinstance((await asyncio.wait_for(session.run("again"), SOON)).outcome, Finished)
    async with place.runtime(Agent("scripted")) as runtime:
        session = await runtime.session("s")
        assert (await asyncio.wait_for(session.run("hello"), SOON)).text == "You said: hello"
        assert [m.role for m in await session.history()] == ["user", "user", "assistant", "user", "assistant"]
