"""Agents that the tests run from the command line: `perdure run sample_agents:helper …`."""

import asyncio
import os
from pathlib import Path

from msgspec import Struct

from perdure import Agent, Budget, Message, ModelRequest, ModelResponse, Plugin, ToolCall, Usage, tool
from perdure.errors import ProviderError
from perdure.model.plugin import PluginSnapshot
from perdure.plugins import InputContext, QueueTurn, Result, SessionContext, command, query, task
from perdure.testing import FunctionModel


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


@tool(recovery="rerun")
async def dawdle() -> str:
    """Take longer than others."""
    begun()
    await asyncio.sleep(float(os.environ.get("DAWDLE", "0")))
    return "at last"


def delegates(request: ModelRequest) -> object:
    """Dawdles and then asks its deputy, or waits, as it is told."""
    last: Message = request.messages[-1]
    if last.role == "tool":
        result = last.tool_results[0]
        if result.name == "dawdle":
            return [ToolCall("call-2", "deputy", {"task": "go on"})]
        return f"{result.name}: {result.content}"
    return [ToolCall("call-1", "dawdle") if last.text == "dawdle" else ToolCall("call-1", "wait", {"item": "tea"})]


def fails(request: ModelRequest) -> object:
    raise ProviderError("the key is not valid", code="bad_key")


def stops_short(request: ModelRequest) -> object:
    return ModelResponse("half a", stop="length")


def never_stops(request: ModelRequest) -> object:
    return [ToolCall("again", "look", {"item": "tea"})]


class Notes(Plugin):
    """Notes of a session, and what may be asked of them."""

    id = "notes"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def for_session(self, ctx: SessionContext) -> Plugin:
        return Notes()

    @property
    def revision(self) -> int:
        return len(self.texts)

    def snapshot(self, writer: object) -> object:
        return self.texts

    def restore(self, snapshot: PluginSnapshot, reader: object) -> None:
        self.texts = list(snapshot.state or [])

    @query
    def find(self, word: str = "") -> list[str]:
        """The notes that have a word.

        Args:
            word: what to look for
        """
        return [text for text in self.texts if word in text]

    @query(session="forbidden")
    def about(self) -> str:
        """What this is."""
        return "notes \x1b[31mof a session"

    @command
    def add(self, text: str, tell: bool = False) -> Result[int]:
        """Write something down, and perhaps tell the agent."""
        if not text:
            raise ValueError("nothing to write down")
        self.texts.append(text)
        turns = (QueueTurn(f"noted {text}", key=text),) if tell else ()
        return Result(len(self.texts), ({"added": text},), turns)

    @task
    def tidy(self) -> None:
        """Tidy up."""


helper = Agent(FunctionModel(answers), name="helper", tools=[look, pay, wait, odd, risky])
failing = Agent(FunctionModel(fails), name="failing")
short = Agent(FunctionModel(stops_short), name="short")
endless = Agent(FunctionModel(never_stops), name="endless", tools=[look], budget=Budget(steps=2))
typed = Agent(FunctionModel(lambda _: '{"green": true}'), name="typed", output=Colour)
noting = Agent(FunctionModel(answers), name="noting", plugins=[Notes()])
locked_out = Agent(FunctionModel(fails), name="noting", plugins=[Notes()])
not_an_agent = 7
deputy = Agent(FunctionModel(lambda request: "done"), name="deputy")
chief = Agent(
    FunctionModel(delegates), name="chief", tools=[wait, dawdle, deputy.as_tool(description="Does the rest.")]
)


class Masking(Plugin):
    """Takes what must not be stored out of what is said."""

    id = "masking"

    def transform_input(self, ctx: InputContext, message: Message) -> str:
        return message.text.replace("hunter2", "[secret]")


masked = Agent(FunctionModel(answers), name="masked", plugins=[Masking()])
