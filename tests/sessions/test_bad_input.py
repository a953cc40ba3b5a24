"""Wrong arguments to the verbs of sessions: a typed error, nothing written, and the session goes on after a restart."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, Runtime, Session, ToolCall, ToolContext, tool
from perdure.errors import InvalidDefinition, InvalidInput, NotFound, TimedOut
from perdure.model.message import Message, Text
from perdure.model.plugin import CreateSession, PromptPart
from perdure.model.session import ToolState
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, TellingModel, untyped

WRONG: Any = 5
NAN = float("nan")
HUGE = 10**5000
"""More digits than the interpreter shows, and more than a float holds."""


class Chat(str, enum.Enum):  # noqa: UP042  # users write this, and `format` shows its name
    FIRST = "first"


class Loud(str):
    def __str__(self) -> str:
        return "LOUD"


@tool
def add(n: int) -> int:
    """Add one."""
    return n + 1


def agent() -> Agent[str]:
    return Agent(FunctionModel(lambda request: "fine"), tools=[add])


Ask = Callable[[Runtime, Session], Awaitable[object]]

ASKED: dict[str, Ask] = {
    "the id of a session": lambda runtime, _: runtime.session(WRONG),
    "the id of a session, too long to show": lambda runtime, _: runtime.session(untyped(HUGE)),
    "the agent of a session": lambda runtime, _: runtime.session("new", agent=untyped(["assistant"])),
    "options": lambda runtime, _: runtime.session("new", options=WRONG),
    "options by position": lambda runtime, _: runtime.session("new", options=untyped([])),
    "what is said": lambda _, session: session.run(WRONG),
    "what is said, in bytes": lambda _, session: session.send(untyped(b"hi")),
    "what is said, as a list": lambda _, session: session.steer(untyped(["hi", 5])),
    "no text in a message": lambda _, session: session.run(Message("user", [Text(WRONG)])),
    "a part of a message": lambda _, session: session.run(Message("user", [WRONG])),
    "fifty megabytes": lambda _, session: session.send("x" * 50_000_000),
    "a key": lambda _, session: session.run("hi", key=WRONG),
    "an empty key": lambda _, session: session.run("hi", key=""),
    "a key of a megabyte": lambda _, session: session.run("hi", key="x" * 1_000_000),
    "a key that is no text": lambda _, session: session.run("hi", key="\ud800"),
    "a time": lambda _, session: session.run("hi", timeout=untyped("soon")),
    "a time below none": lambda _, session: session.run("hi", timeout=-1),
    "a time that is not a number": lambda _, session: session.run("hi", timeout=NAN),
    "a time that no timer can count": lambda _, session: session.run("hi", timeout=HUGE),
    "the id of a turn": lambda _, session: session.result(WRONG),
    "the id of a turn to cancel": lambda _, session: session.cancel(turn_id=untyped(b"s.1")),
    "a reason": lambda _, session: session.cancel(WRONG),
    "who cancels": lambda _, session: session.cancel(by=untyped(None)),
    "a call to approve": lambda _, session: session.approve(WRONG),
    "a call to reject": lambda _, session: session.reject(untyped(None)),
    "a call to settle": lambda _, session: session.settle(untyped(["s.1.1.0"]), "done"),
    "a verdict": lambda _, session: session.settle("s.1.1.0", untyped(HUGE)),
    "a value of no JSON": lambda _, session: session.settle("s.1.1.0", "done", value=object()),
    "a node": lambda _, session: session.fork(WRONG),
    "the id of a fork": lambda _, session: session.fork(session_id=untyped(b"f")),
    "grants": lambda _, session: session.fork(grants=WRONG),
    "one grant of letters": lambda _, session: session.fork(grants=untyped(b"ext")),
    "how usage is told": lambda _, session: session.usage(untyped(["label"])),
    "an operation": lambda _, session: session.call(untyped({})),
    "a state of tools": lambda _, session: session.tools.apply(WRONG),
    "the members of a state of tools": lambda _, session: session.tools.apply(ToolState(0, WRONG)),
    "whether a tool is a member": lambda _, session: session.tools.apply(ToolState(0, {"add": untyped("no")})),
    "the number one for a member": lambda _, session: session.tools.apply(ToolState(0, {"add": untyped(1)})),
    "the generation of a state": lambda _, session: session.tools.apply(ToolState(untyped("0"), {})),
    "a tool to take away": lambda _, session: session.tools.disable(untyped(["add"])),
    "whose processes": lambda _, session: session.processes(session_id="other"),
    "how many processes": lambda _, session: session.processes(limit=untyped(None)),
    "how many sessions": lambda runtime, _: runtime.sessions.list(limit=untyped(None)),
    "fewer sessions than none": lambda runtime, _: runtime.sessions.list(limit=-1),
    "more sessions than a store can count": lambda runtime, _: runtime.sessions.list(limit=2**70),
    "sessions of an agent": lambda runtime, _: runtime.sessions.list(agent=WRONG),
    "sessions of an agent that is no text": lambda runtime, _: runtime.sessions.list(agent="\ud800"),
    "sessions in a state": lambda runtime, _: runtime.sessions.list(state="running"),
    "a beginning of ids": lambda runtime, _: runtime.sessions.list(prefix=untyped(None)),
    "a session to delete": lambda runtime, _: runtime.sessions.delete(WRONG),
    "how long to wait": lambda runtime, _: runtime.wait_idle(untyped("soon")),
    "how long to drain": lambda runtime, _: runtime.drain(untyped("soon")),
    "a key of a completion": lambda runtime, _: runtime.resolve(WRONG, 1),
    "an agent's operations": lambda runtime, _: runtime.operations.call("look", agent=untyped(["assistant"])),
}


@pytest.mark.parametrize("what", ASKED)
async def test_a_wrong_argument_is_refused_and_nothing_is_written(place: Place, what: str) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        await session.run("hello")
        before = await runtime.sessions.list()

        with pytest.raises((InvalidInput, NotFound)):
            await ASKED[what](runtime, session)

        assert await runtime.sessions.list() == before
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")
        assert (await asyncio.wait_for(session.run("and now?"), SOON)).text == "fine"
        assert [m.text for m in await session.history()] == ["hello", "fine", "and now?", "fine"]


LAID_OVER: dict[str, Callable[[Session], object]] = {
    "tools": lambda session: session.tools.overlay(WRONG),
    "a tool": lambda session: session.tools.overlay([None]),
    "prompts": lambda session: session.tools.overlay(prompts=WRONG),
    "letters for prompts": lambda session: session.tools.overlay(prompts="Be brief."),
    "a piece of prompt": lambda session: session.tools.overlay(prompts=[untyped(None)]),
    "no text in a piece of prompt": lambda session: session.tools.overlay(prompts=[PromptPart(WRONG)]),
    "whether its agent's tools stay": lambda session: session.tools.overlay(include_base=untyped([])),
}


@pytest.mark.parametrize("what", LAID_OVER)
async def test_a_wrong_overlay_is_refused_where_it_is_given_and_turns_go_on(place: Place, what: str) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s")

        with pytest.raises(InvalidDefinition):
            LAID_OVER[what](session)

        assert (await asyncio.wait_for(session.run("hello"), SOON)).text == "fine"


@pytest.mark.parametrize("name", [Chat.FIRST, Loud("first")], ids=["an enum", "a subclass"])
async def test_a_kind_of_string_names_the_session_of_its_value(place: Place, name: str) -> None:
    """Not of what `format` makes of it: a row whose key and content differ is a damaged one."""
    async with place.runtime(agent()) as runtime:
        session = await runtime.session(name)
        result = await session.run("hello", key=name)
        assert result.turn_id == "first.1"
        assert (await session.fork(session_id=Chat.FIRST.value + "-2")).id == "first-2"
        assert (await session.run("hello", key="first")).turn_id == "first.1"
    async with place.runtime(agent()) as runtime:
        assert [m.text for m in await (await runtime.session("first")).history()] == ["hello", "fine"]
        assert await runtime.sessions.delete(name)
        assert [row.id for row in await runtime.sessions.list()] == ["first-2"]


async def test_a_wait_for_a_turn_that_is_over_before_the_turn_says_so(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        receipt = await (await runtime.session("s")).send("hello")
        await model.next()

        with pytest.raises(InvalidInput, match="timeout='soon' is not usable"):
            await receipt.result(untyped("soon"))
        with pytest.raises(TimedOut, match=r"turn s\.1 did not end within 0 s"):
            await receipt.result(0)
        model.say("there")

        assert (await receipt.result(SOON)).text == "there"


# ---------------------------------------------------------------------- what tools and plugins ask of a session


HOSTED: dict[str, Callable[[Any], Awaitable[object]]] = {
    "a child": lambda host: host.create_session(WRONG),
    "the hidden tools of a child": lambda host: host.create_session(CreateSession(hidden=WRONG)),
    "messages": lambda host: host.append(WRONG),
    "the session of messages": lambda host: host.append([Message("user", "x")], session_id=["other"]),
    "a session to look at": lambda host: host.snapshot({"id": "other"}),
    "what a model is asked": lambda host: host.complete(WRONG, label="l"),
    "nothing to ask a model": lambda host: host.complete([], label="l"),
    "no messages to ask a model": lambda host: host.complete(["hi"], label="l"),
    "what a model is told first": lambda host: host.complete("hi", label="l", system=WRONG),
    "tools": lambda host: host.set_tools(WRONG, False),
    "whether tools are members": lambda host: host.set_tools(["add"], "no"),
}


@pytest.mark.parametrize("what", HOSTED)
async def test_a_tool_that_asks_wrongly_is_told_and_the_session_goes_on(place: Place, what: str) -> None:
    seen: list[Exception] = []

    @tool
    async def ask(ctx: ToolContext) -> str:
        """Ask the host."""
        try:
            await HOSTED[what](ctx.host)
        except Exception as error:
            seen.append(error)
        return "asked"

    model = FunctionModel(lambda r: "fine" if r.messages[-1].text != "ask" else [ToolCall("a", "ask")])
    asking = Agent(model, tools=[ask, add])
    async with place.runtime(asking) as runtime:
        await asyncio.wait_for((await runtime.session("s")).run("ask"), SOON)
    async with place.runtime(asking) as runtime:
        assert (await asyncio.wait_for((await runtime.session("s")).run("hello"), SOON)).text == "fine"

    assert [isinstance(error, InvalidInput) for error in seen] == [True]


async def test_messages_are_appended_all_or_none(place: Place) -> None:
    said: list[str] = []

    @tool
    async def note(ctx: ToolContext) -> str:
        """Note two things, one of which is none."""
        with pytest.raises(InvalidInput):
            await ctx.host.append([Message("user", "one"), Message("user", " ")])
        return "noted"

    def answer(request: Any) -> Any:
        said.extend(m.text for m in request.messages if m.role == "user")
        return "fine" if request.messages[-1].role == "tool" else [ToolCall("a", "note")]

    async with place.runtime(Agent(FunctionModel(answer), tools=[note])) as runtime:
        await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert said == ["go", "go"]
