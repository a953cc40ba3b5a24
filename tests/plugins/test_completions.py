"""Direct completions as raw requests: with messages, tools, settings and a model of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Image, Message, ModelRequest, ModelResponse, ModelSettings, ToolCall, Usage, tool
from perdure.errors import InvalidInput, ProviderError
from perdure.model.message import ProviderPart, Reasoning, Stored, Text, ToolResult
from perdure.model.record import Completed
from perdure.model.tool import ToolSpec
from perdure.plugins.hooks import Plugin
from perdure.plugins.operations import CommandContext, command
from perdure.providers.fallback import Fallback
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import Place, TellingModel, crash
from tests.plugins.made import having

PICK = ToolSpec("pick", "Pick one.", {"type": "object", "properties": {"n": {"type": "integer"}}})


@tool
def weigh(grams: int) -> int:
    """Weigh something."""
    raise AssertionError("a direct completion runs no tool")


class Recorded:
    """A model that keeps what it was asked and gives one answer after the other."""

    def __init__(self, *answers: Any, name: str = "m") -> None:
        self.asked: list[ModelRequest] = []
        self._answers = list(answers)
        self.model = FunctionModel(self._answer, name)

    def _answer(self, request: ModelRequest) -> Any:
        self.asked.append(request)
        answer = self._answers.pop(0) if self._answers else "done"
        if isinstance(answer, Exception):
            raise answer
        return answer


def asking(do: Callable[[Any], Awaitable[Any]]) -> Plugin:
    async def ask(ctx: Any) -> list[str]:
        if ctx.step == 1:
            await do(ctx)
        return []

    return having("prompt", ask)


async def test_a_model_is_asked_with_tools_and_its_calls_are_returned_and_not_run(place: Place) -> None:
    parts = (
        Reasoning("hm", {"signature": "s"}),
        ProviderPart("anthropic", "m", "redacted_thinking", '{"type":"redacted_thinking"}', ""),
        Text("One moment."),
        ToolCall("c1", "pick", {"n": 2}),
        ToolCall("", "weigh", {"grams": 3}),
    )
    first = ModelResponse(parts=parts, stop="tool_calls", usage=Usage(5, 4), model="judge-1")
    judge, own, seen = Recorded(first, ModelResponse("Two it is.", usage=Usage(9, 1))), Recorded(), list[Any]()

    async def ask(ctx: Any) -> None:
        said = [Message("user", "Which one?")]
        settings = ModelSettings(tool_choice="required", max_tokens=50)
        one = await ctx.host.complete(said, label="judge", tools=[PICK, weigh], settings=settings, model="judge")
        results = [Message("tool", [ToolResult(call.id, call.name, "ok")]) for call in one.tool_calls]
        two = await ctx.host.complete([*said, Message("assistant", one.parts), *results], label="judge", model="judge")
        seen.extend([one, two])

    agent = Agent(own.model, settings=ModelSettings(temperature=0.3), plugins=[asking(ask)])
    async with place.runtime(agent, models={"judge": judge.model}) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        usage = await session.usage()

    one, two = seen
    assert (one.text, one.stop, one.model, one.value) == ("One moment.", "tool_calls", "judge-1", None)
    assert [(call.name, call.args) for call in one.tool_calls] == [("pick", {"n": 2}), ("weigh", {"grams": 3})]
    assert one.parts[:4] == parts[:4]
    assert one.tool_calls[1].id not in ("", "c1")
    assert (two.text, two.stop, two.tool_calls) == ("Two it is.", "end", ())
    assert [spec.name for spec in judge.asked[0].tools] == ["pick", "weigh"]
    assert judge.asked[0].settings == ModelSettings(tool_choice="required", max_tokens=50)
    assert judge.asked[1].settings == ModelSettings()
    assert [message.role for message in judge.asked[1].messages] == ["user", "assistant", "tool", "tool"]
    assert {request.label for request in judge.asked} == {"judge"}
    assert [(request.label, request.settings.temperature) for request in own.asked] == [("turn", 0.3)]
    assert usage["judge"] == Usage(14, 5, calls=2)
    records = [record for record in result.records if isinstance(record, Completed)]
    assert [(record.text, len(record.parts), record.stop) for record in records] == [
        ("", 5, "tool_calls"),
        ("Two it is.", 0, "end"),
    ]


async def test_a_recorded_answer_is_given_again_with_all_its_parts_and_nobody_is_asked(place: Place) -> None:
    call = ToolCall("c", "pick", {"n": 1})
    judge, seen = Recorded(ModelResponse(tool_calls=(call,), stop="tool_calls"), name="judge"), list[Any]()

    async def ask(ctx: Any) -> None:
        seen.append(await ctx.host.complete("which?", label="judge", tools=[PICK], model="judge"))

    died, models = TellingModel(), {"judge": judge.model}
    runtime = await place.runtime(Agent(died, plugins=[asking(ask)]), models=models).__aenter__()
    receipt = await (await runtime.session("s")).send("go")
    assert (await died.next()).label == "turn"
    await crash(runtime)
    agent = Agent(ScriptedModel(["done"]), plugins=[asking(ask)])
    async with place.runtime(agent, models={"judge": judge.model}) as runtime:
        await (await runtime.session("s")).result(receipt.turn_id)

    assert [(each.tool_calls, each.stop) for each in seen] == [((call,), "tool_calls")] * 2
    assert len(judge.asked) == 1


async def test_completions_ask_the_model_of_their_turn_and_outside_of_turns_that_of_the_session(place: Place) -> None:
    class Desk(Plugin):
        id = "desk"

        @command
        async def ask(self, ctx: CommandContext) -> str:
            """Ask."""
            return (await ctx.host.complete("hm?", label="desk")).text

    texts: list[str] = []

    async def ask(ctx: Any) -> None:
        texts.append((await ctx.host.complete("hm?", label="aside")).text)

    own, other = Recorded(*["own"] * 9), Recorded(*["other"] * 9)
    async with place.runtime(Agent(own.model, plugins=[Desk(), asking(ask)]), models={"other": other.model}) as runtime:
        session = await runtime.session("s")
        await session.run("1")
        await session.run("2", model="other")
        await session.configure(model="other")
        outside = (await session.call("desk.ask")).output
        await session.run("3")

    assert texts == ["own", "other", "other"]
    assert outside == "other"


async def test_a_typed_answer_is_read_unless_the_model_calls_a_tool(place: Place) -> None:
    own, seen = Recorded([ToolCall("c", "pick")], '{"a": 1}'), list[Any]()

    async def ask(ctx: Any) -> None:
        for _ in range(2):
            seen.append(await ctx.host.complete("hm?", label="x", output="json", tools=[PICK]))

    async with place.runtime(Agent(own.model, plugins=[asking(ask)])) as runtime:
        await (await runtime.session("s")).run("go")

    assert [(each.value, len(each.tool_calls)) for each in seen] == [(None, 1), ({"a": 1}, 0)]


async def test_the_models_of_a_fallback_are_asked_one_after_the_other(place: Place) -> None:
    busy = Recorded(ProviderError("busy", retryable=True), ProviderError("busy", retryable=True))
    wrong = Recorded(ProviderError("no key", code="missing_key"))
    spare, texts = Recorded(ProviderError("busy", retryable=True, after=0.0), "spare"), list[str]()

    async def ask(ctx: Any) -> None:
        texts.append((await ctx.host.complete("hm?", label="x", model="several")).text)

    several = Fallback(busy.model, wrong.model, spare.model)
    async with place.runtime(Agent(Recorded().model, plugins=[asking(ask)]), models={"several": several}) as runtime:
        await (await runtime.session("s")).run("go")

    assert texts == ["spare"]
    assert [len(each.asked) for each in (busy, wrong, spare)] == [2, 1, 2]
    assert [request.attempt for request in spare.asked] == [3, 5]


async def test_a_picture_in_the_history_can_be_asked_about(place: Place, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"PNG bytes")
    seen: list[bytes] = []

    async def look(request: ModelRequest) -> str:
        if request.label == "look":
            [picture] = [part for part in request.messages[0].parts if isinstance(part, Image)]
            assert request.open_file is not None
            assert isinstance(picture.source, Stored)
            seen.append(b"".join([piece async for piece in request.open_file(picture.source)]))
        return "done"

    async def ask(ctx: Any) -> None:
        snapshot = await ctx.host.snapshot()
        if snapshot.messages:
            await ctx.host.complete(list(snapshot.messages), label="look")

    async with place.runtime(Agent(FunctionModel(look), plugins=[asking(ask)])) as runtime:
        session = await runtime.session("s")
        await session.run(["what is it?", Image.file(tmp_path / "x.png")])
        await session.run("look again")

    assert seen == [b"PNG bytes"]


async def test_an_answer_that_takes_too_long_is_asked_for_again(place: Place) -> None:
    asked: list[int] = []

    async def slow(request: ModelRequest) -> str:
        if request.label == "x":
            asked.append(request.attempt)
            if len(asked) == 1:
                await asyncio.Event().wait()
        return "done"

    async def ask(ctx: Any) -> None:
        await ctx.host.complete("hm?", label="x", settings=ModelSettings(timeout=0.01))

    async with place.runtime(Agent(FunctionModel(slow), plugins=[asking(ask)])) as runtime:
        await (await runtime.session("s")).run("go")

    assert asked == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": ["pick"]},
        {"tools": [PICK, PICK]},
        {"tools": 5},
        {"tools": [ToolSpec("x", "", {"type": object()})]},
        {"settings": {"temperature": 1}},
        {"model": "nobody:x"},
        {"model": 5},
    ],
    ids=["a name", "twice", "no tools", "no JSON", "a dict", "an unknown service", "no model"],
)
async def test_what_no_model_could_be_asked_with_is_refused_before_one_is(place: Place, wrong: dict[str, Any]) -> None:
    own, refused = Recorded(), list[Exception]()

    async def ask(ctx: Any) -> None:
        with pytest.raises(InvalidInput) as error:
            await ctx.host.complete("hm?", label="x", **wrong)
        refused.append(error.value)

    async with place.runtime(Agent(own.model, plugins=[asking(ask)])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert (len(refused), result.text, len(own.asked)) == (1, "done", 1)
