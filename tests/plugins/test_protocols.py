"""Protocols that plugins bring, and sessions that go through several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from perdure import Agent, Plugin, Session, tool
from perdure.errors import InvalidDefinition
from perdure.model.message import Part, Text, ToolCall, ToolResult
from perdure.model.outcome import Finished, PluginAborted
from perdure.model.protocol import Prompt, Reading
from perdure.model.tool import Ok
from perdure.plugins.hooks import SessionContext
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, crashed_in, untyped
from tests.tools.coding import cell
from tests.turn.protocols import Planning, PlanProtocol

PLAN = '{"calls": [{"tool": "double", "args": {"n": 4}}, {"tool": "double", "args": {"n": 5}}]}'
ANSWER = '{"answer": "eight and ten"}'


@tool
async def double(n: int) -> int:
    """Twice as much."""
    return 2 * n


def speaker(*answers: Any, seen: list[Any] | None = None, **options: Any) -> Agent[Any]:
    """An agent that gives these answers in order. `seen` is filled with the requests."""
    given, requests = iter(answers), [] if seen is None else seen

    def answer(request: Any) -> Any:
        requests.append(request)
        return next(given)

    return Agent(FunctionModel(answer), name="speaker", tools=[double], **options)


async def test_turn_with_a_protocol_of_a_plugin_makes_the_calls_that_it_reads(place: Place) -> None:
    seen: list[Any] = []
    async with place.runtime(speaker(PLAN, ANSWER, seen=seen, plugins=[Planning()])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == Finished("eight and ten")
    assert [(call.call_id, call.outcome) for call in result.tool_calls] == [("s.1.1.0", Ok(8)), ("s.1.1.1", Ok(10))]
    assert [request.tools for request in seen] == [(), ()]
    assert seen[1].messages[-1].text == '[{"tool":"double","gave":10}]'


async def test_answer_that_the_protocol_cannot_read_is_told_to_the_model(place: Place) -> None:
    seen: list[Any] = []
    async with place.runtime(speaker("Let me see.", PLAN, ANSWER, seen=seen, plugins=[Planning()])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == Finished("eight and ten")
    assert seen[1].messages[-1].text == "Nothing was run: it is no plan (DecodeError)"


async def test_turn_goes_on_after_a_crash_as_its_protocol_read_it_although_that_is_gone(place: Place) -> None:
    entered, made = asyncio.Event(), list[int]()

    @tool(recovery="rerun")
    async def wait(n: int) -> int:
        """Wait."""
        made.append(n)
        if len(made) == 1:
            entered.set()
            await asyncio.Event().wait()
        return n

    plan = ScriptedModel(['{"calls": [{"tool": "wait", "args": {"n": 4}}]}'])
    await crashed_in(place.runtime(Agent(plan, name="speaker", tools=[wait], plugins=[Planning()])), entered)
    async with place.runtime(Agent(ScriptedModel(["done"]), name="speaker", tools=[wait])) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).result("s.1"), SOON)

    assert made == [4, 4]
    assert result.outcome == Finished("done")


NATIVE = [[ToolCall("p", "double", {"n": 2})], "four"]
CELLS = [cell("x = await double(3)\nprint(x)"), "six"]
PLANS = [PLAN, ANSWER]


async def say(session: Session[Any], text: str) -> None:
    result = await session.run(text)
    assert isinstance(result.outcome, Finished), result.outcome


async def test_one_session_and_its_forks_go_through_all_protocols(place: Place) -> None:
    """Each is shown what the others have left in a form that it knows, and variables are where they were."""
    seen: list[Any] = []
    async with place.runtime(speaker(*NATIVE)) as runtime:
        await say(await runtime.session("s"), "first")
    async with place.runtime(speaker(*CELLS, seen=seen, mode="code")) as runtime:
        await say(await runtime.session("s"), "second")
    async with place.runtime(speaker(*PLANS, seen=seen, plugins=[Planning()])) as runtime:
        await say(await runtime.session("s"), "third")
    async with place.runtime(speaker(*NATIVE, seen=seen)) as runtime:
        session = await runtime.session("s")
        await say(session, "fourth")
        early, late = await session.fork(at="s.1"), await session.fork(at="s.3")
    again = [cell("print(x)"), "done", cell("x = 7\nprint(x)"), "done", cell("print(x)"), "done"]
    async with place.runtime(speaker(*again, seen=seen, mode="code")) as runtime:
        told = [await (await runtime.session(each)).run("look") for each in (late.id, early.id, "s")]

    native, coded, planned = "[called double(", "x = await double(3)", '"tool":"double"'
    shown = ["\n".join(message.text for message in request.messages) for request in seen]
    assert native in shown[0]
    assert coded in shown[2]
    assert planned in shown[2]
    assert [part.name for m in seen[4].messages for part in m.parts if isinstance(part, ToolCall)] == ["double"] * 3
    assert [part.content for m in seen[4].messages for part in m.parts if isinstance(part, ToolResult)] == [4, 8, 10]
    assert [each.messages[-2].text.partition("\n")[2][:1] for each in told] == ["6", "7", "6"]


async def test_protocol_is_made_for_each_session_with_its_options(place: Place) -> None:
    class Named(Planning):
        def __init__(self, name: str = "") -> None:
            self.name = name

        def for_session(self, ctx: SessionContext) -> Named:
            return Named(ctx.session_id)

        def protocol(self) -> PlanProtocol:
            plugin = self

            class Told(PlanProtocol):
                def ask(self, prompt: Prompt) -> Prompt:
                    return Prompt(f"You are {plugin.name}.", super().ask(prompt).messages)

            return Told()

    seen: list[Any] = []
    async with place.runtime(speaker(ANSWER, ANSWER, seen=seen, plugins=[Named()])) as runtime:
        for name in ("ann", "bob"):
            await say(await runtime.session(name), "go")

    assert [request.messages[0].text for request in seen] == ["You are ann.", "You are bob."]


# ---------------------------------------------------------------------- protocols that are wrong


class Wrong(PlanProtocol):
    """Asks and reads as it was given."""

    def __init__(self, ask: Any = None, read: Any = None) -> None:
        self._ask, self._read = ask, read

    def ask(self, prompt: Prompt) -> Prompt:
        made: Prompt = super().ask(prompt) if self._ask is None else self._ask(prompt)
        return made

    def read(self, parts: Sequence[Part], name: str) -> Reading:
        made: Reading = super().read(parts, name) if self._read is None else self._read(parts)
        return made


def fails(given: object) -> Any:
    raise KeyError("plan")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: fails(None), "its protocol (protocol): KeyError: 'plan'"),
        (lambda: object(), "a object is no protocol: it has no method `ask`"),
        (lambda: Wrong(ask=fails), "its protocol (ask): KeyError: 'plan'"),
        (lambda: Wrong(ask=lambda prompt: "ask"), "it returned a str, not a Prompt"),
        (lambda: Wrong(ask=lambda prompt: Prompt("", untyped(["hello"]))), "its messages are no Messages"),
        (lambda: Wrong(ask=lambda prompt: Prompt("", [], untyped(["look"]))), "its tools are no ToolSpecs"),
        (lambda: Wrong(read=fails), "its protocol (read): KeyError: 'plan'"),
        (lambda: Wrong(read=lambda parts: parts), "it returned a tuple, not a Reading"),
        (lambda: Wrong(read=lambda parts: Reading(untyped((7,)))), "its protocol (read): "),
        (lambda: Wrong(read=lambda parts: Reading((Text("x"),), (0, 9))), "its cell (0, 9) is not within"),
        (lambda: Wrong(read=lambda parts: Reading((Text("x"), ToolCall("", "double")), (0, 1))), "calls and a cell"),
    ],
)
async def test_protocol_that_is_wrong_ends_the_turn_and_is_named(place: Place, made: Any, says: str) -> None:
    class Broken(Plugin):
        id = "broken"

        def protocol(self) -> Any:
            return made()

    async with place.runtime(speaker(PLAN, ANSWER, plugins=[Broken()])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, PluginAborted)
    assert (result.outcome.plugin, result.outcome.code) == ("broken", "plugin_protocol")
    assert says in result.outcome.message
    assert [message for message in result.messages if message.role == "assistant"] == []


def test_protocol_beside_code_mode_is_refused() -> None:
    with pytest.raises(InvalidDefinition, match="plugin 'planning' has protocol, and so has mode='code'"):
        speaker(mode="code", plugins=[Planning()])


def test_protocol_that_would_wait_is_refused() -> None:
    async def protocol(self: Plugin) -> PlanProtocol:
        return PlanProtocol()

    Waiting = type("Waiting", (Plugin,), {"id": "waiting", "protocol": protocol})
    with pytest.raises(InvalidDefinition, match="protocol of plugin 'waiting' is asked where nothing can wait"):
        speaker(plugins=[Waiting()])
