"""Agents that the tests run from the command line: `mainstay run sample_agents:helper …`."""

import asyncio
import os
from pathlib import Path

from msgspec import Struct

from mainstay import Agent, Budget, Message, ModelRequest, ModelResponse, ToolCall, Usage, tool
from mainstay.errors import ProviderError
from mainstay.testing import FunctionModel


class Colour(Struct):
    green: bool


def last_said(request: ModelRequest) -> str:
    return next(m.text for m in reversed(request.messages) if m.role == "user")


def answers(request: ModelRequest) -> object:
    """Calls the tool that the prompt names, then tells its result; else says how many messages it has seen."""
    last: Message = request.messages[-1]
    if last.role == "tool":
        result = last.tool_results[0]
        return ModelResponse(f"{result.name}: {result.status}: {result.content}", usage=Usage(input=10, output=5))
    said = last_said(request)
    if said in ("look", "pay", "wait", "odd", "risky"):
        return [ToolCall("call-1", said, {"item": "tea"})]
    return ModelResponse(f"you said {said}, message {len(request.messages)}", usage=Usage(input=7, output=3))


@tool
def look(item: str) -> str:
    """Look at something."""
    return f"{item} is green"


@tool(approval="ask")
def pay(item: str) -> str:
    """Pay for something."""
    return f"paid for {item}"


def begun() -> None:
    """Tell the test, through the file it named, that the tool runs."""
    with Path(os.environ["BEGUN"]).open("a") as file:
        file.write("begun\n")


@tool(recovery="rerun")
async def wait(item: str) -> str:
    """Wait for as long as the test says."""
    begun()
    await asyncio.sleep(float(os.environ.get("WAIT", "0")))
    return f"waited for {item}"


@tool(recovery="ask")
async def risky(item: str) -> str:
    """Something only a person can judge after a crash."""
    begun()
    await asyncio.sleep(float(os.environ.get("WAIT", "0")))
    return f"risked {item}"


@tool
def odd(item: str) -> str:
    """Return what a terminal should not obey."""
    return "\x1b]0;pwned\x07red"


def fails(request: ModelRequest) -> object:
    raise ProviderError("the key is not valid", code="bad_key")


def stops_short(request: ModelRequest) -> object:
    return ModelResponse("half a", stop="length")


def never_stops(request: ModelRequest) -> object:
    return [ToolCall("again", "look", {"item": "tea"})]


helper = Agent(FunctionModel(answers), name="helper", tools=[look, pay, wait, odd, risky])
failing = Agent(FunctionModel(fails), name="failing")
short = Agent(FunctionModel(stops_short), name="short")
endless = Agent(FunctionModel(never_stops), name="endless", tools=[look], budget=Budget(steps=2))
typed = Agent(FunctionModel(lambda _: '{"green": true}'), name="typed", output=Colour)
elsewhere = Agent("anthropic:claude", name="elsewhere")
not_an_agent = 7
