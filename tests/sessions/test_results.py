"""What a turn led to, as its caller reads it: typed output, repair, usage, budgets."""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

from perdure import (
    Agent,
    Budget,
    ModelRequest,
    ModelResponse,
    Runtime,
    ToolCall,
    ToolContext,
    TurnFailed,
    TurnPending,
    Usage,
    tool,
)
from perdure.errors import ProviderError, UnknownSession, UnknownTurn
from perdure.model.outcome import BudgetSpent, Finished, Incomplete, text_of
from perdure.model.session import InboxRow
from perdure.model.tool import Cancelled, Ok
from perdure.stores.memory import MemoryStore
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, TellingModel, crash, texts


@dataclass
class Point:
    x: int
    y: int


class Spot(pydantic.BaseModel):
    x: int
    y: int


class Dot(msgspec.Struct):
    x: int
    y: int


@pytest.mark.parametrize(
    ("output", "text", "value"),
    [
        (Point, '{"x": 1, "y": 2}', Point(1, 2)),
        (Spot, '{"x": 1, "y": 2}', Spot(x=1, y=2)),
        (Dot, '{"x": 1, "y": 2}', Dot(1, 2)),
        (list[int], "[1, 2, 3]", [1, 2, 3]),
        (int, "42", 42),
        (bool, "true", True),
        (dict[str, float], '{"a": 0.5}', {"a": 0.5}),
    ],
    ids=["dataclass", "pydantic", "msgspec", "list", "int", "bool", "dict"],
)
async def test_output_has_the_declared_type_now_and_after_a_restart(
    place: Place, output: Any, text: str, value: Any
) -> None:
    async with place.runtime(Agent(ScriptedModel([text]), output=output)) as runtime:
        result = await (await runtime.session("chat")).run("go")
        assert result.output == value
        assert type(result.output) is type(value)
    async with place.runtime(Agent(ScriptedModel([]), output=output)) as runtime:
        again = await (await runtime.session("chat")).result("chat.1")
        assert again.output == value
        assert type(again.output) is type(value)


async def test_without_a_declared_type_the_output_is_the_text(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["words"]))) as runtime:
        result = await (await runtime.session("chat")).run("go")

        assert result.output == "words"
        assert result.raise_for_outcome() is result


async def test_output_that_does_not_validate_is_repaired(place: Place) -> None:
    model = ScriptedModel(["about four", "4"])
    async with place.runtime(Agent(model, output=int)) as runtime:
        session = await runtime.session("chat")
        result = await session.run("two and two?")

        assert result.output == 4
        assert "required form" in model.requests[1].messages[-1].text
        assert [m.role for m in await session.history()] == ["user", "assistant", "user", "assistant"]


async def test_repair_is_given_up_after_two_attempts(place: Place) -> None:
    model = ScriptedModel(["one", "two", "three", "fine"])
    async with place.runtime(Agent(model, output=int)) as runtime:
        session = await runtime.session("chat")
        result = await session.run("a number, please")

        assert isinstance(result.outcome, Incomplete)
        assert result.outcome.reason.startswith("the output did not validate")
        assert result.outcome.text == "three"
        with pytest.raises(TurnFailed) as caught:
            _ = result.output
        assert (caught.value.kind, caught.value.turn_id) == ("incomplete", "chat.1")
        assert model.remaining == 1
    async with place.runtime(Agent(ScriptedModel(["7"]), output=int)) as runtime:
        session = await runtime.session("chat")
        assert text_of((await session.result("chat.1")).outcome) == "three"
        assert (await session.run("again")).output == 7


async def test_a_crash_during_repair_neither_forgets_nor_repeats(place: Place) -> None:
    model = TellingModel()
    runtime = await place.runtime(Agent(model, output=int)).__aenter__()
    await (await runtime.session("chat")).send("two and two?")
    await model.next()
    model.say("about four")
    await model.next()
    await crash(runtime)
    again = ScriptedModel(["4"])
    async with place.runtime(Agent(again, output=int)) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

        assert result.output == 4
        assert [m.role for m in again.requests[0].messages] == ["user", "assistant", "user"]
        assert result.usage == Usage(calls=2, unknown=3)  # two that did not say, one that the crash cut off


async def test_tool_calls_are_reported_as_a_person_reads_them(place: Place) -> None:
    @tool
    async def add(a: int, b: int) -> int:
        return a + b

    model = ScriptedModel([[ToolCall("p1", "add", {"a": 1, "b": 2}), ToolCall("p2", "add", {"a": 3, "b": 4})], "done"])
    async with place.runtime(Agent(model, tools=[add])) as runtime:
        session = await runtime.session("chat")
        live = await session.run("go")
    async with place.runtime(Agent()) as runtime:
        stored = await (await runtime.session("chat")).result("chat.1")

    for result in (live, stored):
        first, second = result.tool_calls
        assert (first.call_id, first.tool, first.args, first.outcome) == ("chat.1.1.0", "add", {"a": 1, "b": 2}, Ok(3))
        assert (second.call_id, second.outcome) == ("chat.1.1.1", Ok(7))
        assert (first.attempts, first.repeated) == (1, 0)
        assert [m.role for m in result.new_messages] == ["user", "assistant", "tool", "tool", "assistant"]


async def test_usage_is_summed_and_unknown_is_not_zero(place: Place) -> None:
    @tool
    async def look() -> None: ...

    answers = [
        ModelResponse(
            tool_calls=[ToolCall("a", "look")], usage=Usage(input=10, output=2, cache_read=3), stop="tool_calls"
        ),
        [ToolCall("b", "look")],
        ModelResponse("done", usage=Usage(input=20, output=5, cost=0.25)),
    ]
    async with place.runtime(Agent(ScriptedModel(answers), tools=[look])) as runtime:
        live = await (await runtime.session("chat")).run("go")
    async with place.runtime(Agent()) as runtime:
        stored = await (await runtime.session("chat")).result("chat.1")

    # The second call told nothing; of the others, each leaves something out that the other one tells.
    missing = {"input": 1, "output": 1, "cache_read": 2, "cost": 2}
    expected = Usage(input=30, output=7, cache_read=3, calls=3, unknown=1, cost=0.25, missing=missing)
    assert live.usage == stored.usage == expected
    assert expected.total == 40


@pytest.mark.parametrize("stop", ["length", "filtered"])
async def test_an_answer_that_was_cut_short_is_incomplete(place: Place, stop: Any) -> None:
    async with place.runtime(Agent(ScriptedModel([ModelResponse("half an ans", stop=stop), "whole"]))) as runtime:
        session = await runtime.session("chat")
        result = await session.run("go")

        assert result.outcome == Incomplete(stop, "half an ans")
        with pytest.raises(TurnFailed, match=r"incomplete.*read the partial text as result\.outcome\.text"):
            _ = result.text
        with pytest.raises(TurnFailed, match="incomplete"):
            result.raise_for_outcome()
        assert (await session.run("go on")).text == "whole"


@tool
async def look() -> str:
    return "seen"


@tool
async def fail() -> str:
    raise RuntimeError("as always")


def for_ever(name: str) -> Callable[[ModelRequest], Any]:
    return lambda request: [ToolCall("a", name)]


async def test_a_model_that_never_stops_gets_a_last_word_and_no_more(place: Place) -> None:
    model = FunctionModel(for_ever("look"))
    async with place.runtime(Agent(model, tools=[look], budget=Budget(steps=3))) as runtime:
        session = await runtime.session("chat")
        result = await session.run("go")

        assert result.outcome == BudgetSpent("steps", 3)
        assert model.requests == 4  # three steps, and the last word
        assert [type(c.outcome) for c in result.tool_calls] == [Ok, Ok, Ok, Cancelled]
        paired = [m.role for m in await session.history()]
        assert paired.count("tool") == 4


async def test_the_last_word_is_an_answer_when_the_model_gives_one(place: Place) -> None:
    def model(request: ModelRequest) -> Any:
        return "enough" if request.tool_choice == "none" else [ToolCall("a", "look")]

    async with place.runtime(Agent(FunctionModel(model), tools=[look], budget=Budget(steps=2))) as runtime:
        result = await (await runtime.session("chat")).run("go")

        assert result.outcome == Finished("enough")


@pytest.mark.parametrize(
    ("budget", "spent"),
    [
        (Budget(tokens=25), BudgetSpent("tokens", 25)),
        (Budget(money=0.5), BudgetSpent("money", 0.5)),
    ],
    ids=["tokens", "money"],
)
async def test_a_spent_budget_ends_the_turn(place: Place, budget: Budget, spent: BudgetSpent) -> None:
    call = ModelResponse(tool_calls=[ToolCall("a", "look")], usage=Usage(input=10, cost=0.2), stop="tool_calls")
    model = FunctionModel(lambda request: call)
    async with place.runtime(Agent(model, tools=[look], budget=budget)) as runtime:
        result = await (await runtime.session("chat")).run("go")

        assert result.outcome == spent
        assert model.requests == 3


async def test_steps_without_progress_end_the_turn(place: Place) -> None:
    model = FunctionModel(for_ever("fail"))
    async with place.runtime(Agent(model, tools=[fail], budget=Budget(no_progress=2))) as runtime:
        result = await (await runtime.session("chat")).run("go")

        assert result.outcome == BudgetSpent("no_progress", 2)
        assert model.requests == 2


async def test_asking_for_unknown_turns(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["done"]))) as runtime:
        session = await runtime.session("chat")
        with pytest.raises(UnknownSession, match=r"sessions\.list"):
            await session.result("chat.1")
        await session.run("go")

        for turn in ("chat.2", "chat.0", "other.1", "nonsense", "chat.x", "chat.-1", ""):
            with pytest.raises(UnknownTurn, match="receipt or result"):
                await session.result(turn)


async def test_a_result_shows_itself() -> None:
    agent = Agent(ScriptedModel(["a" * 100]))
    result = await agent.run("go")

    assert repr(result).startswith("TurnResult('s-")
    assert f"Finished(text='{'a' * 100}'" in repr(result)


async def test_a_result_shows_itself_in_a_bounded_line() -> None:
    result = await Agent(ScriptedModel(["a" * 10_000])).run("go")

    assert len(repr(result)) < 300


async def test_a_long_history_read_by_many_at_once_is_the_same_for_all(place: Place) -> None:
    """More than 64 turns are read on a thread: readers and a new turn must not mix."""
    echo = FunctionModel(lambda request: "ok")
    async with place.runtime(Agent(echo)) as runtime:
        session = await runtime.session("chat")
        for receipt in [await session.send(f"say {n}") for n in range(70)]:
            await receipt.result()
    async with place.runtime(Agent(echo)) as runtime:
        session = await runtime.session("chat")
        first, second, result = await asyncio.gather(session.history(), session.history(), session.run("last"))

        assert texts(first)[:140] == texts(second)[:140] == texts(result.messages)[:140]
        assert len(result.messages) == 142
        assert len(await session.history()) == 142


class SlowInbox(MemoryStore):
    """A store whose inbox is read slowly when somebody says so: the last thing that is read of an open turn."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.go_on = asyncio.Event(), asyncio.Event()
        self.slow = False

    async def inbox(self, sid: int) -> list[InboxRow]:
        found = await super().inbox(sid)
        if self.slow:
            self.reading.set()
            await self.go_on.wait()
        return found


async def test_turn_that_ends_while_its_result_is_looked_up_is_told_although_the_next_one_runs() -> None:
    model, store = TellingModel(), SlowInbox()
    async with Runtime(store, agents=[Agent(model)]) as runtime, asyncio.timeout(SOON):
        session = await runtime.session("s")
        await session.send("one")
        await model.next()
        second, third = await session.send("two"), await session.send("three")
        store.slow = True
        looking = asyncio.create_task(second.result())
        await store.reading.wait()
        store.slow = False
        for said in ("first", "second"):
            model.say(said)
            await model.next()  # that turn has ended, the next one is under way
        store.go_on.set()

        assert (await looking).text == "second"
        model.say("third")
        assert (await third.result()).text == "third"


async def test_what_was_tried_is_told_as_it_is_read_later(tmp_path: Path) -> None:
    def unable(request: ModelRequest) -> str:
        raise ProviderError("no such model", code="unknown_model")

    agent = Agent(FunctionModel(unable))
    async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
        live = await (await runtime.session("s")).run("hello")
    async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
        later = await (await runtime.session("s")).result(live.turn_id)

    assert live.model_calls == later.model_calls
    assert live.model_calls[0].attempts[0].at > 0


def test_program_that_prints_the_text_of_a_failed_turn_ends_with_an_error(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        from perdure import Agent
        from perdure.errors import ProviderError
        from perdure.testing import FunctionModel

        def refuses(request):
            raise ProviderError("invalid x-api-key", code="authentication")

        print(Agent(FunctionModel(refuses)).run_sync("Do I need an umbrella?").text)
    """)

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)

    assert (ended.returncode, ended.stdout) == (1, "")
    *_, message, page = ended.stderr.splitlines()
    assert message.startswith("perdure.errors.TurnFailed: ")
    assert "invalid x-api-key" in message
    assert page == "See docs/troubleshooting.md#turnfailed"


@tool(approval="ask")
async def sign() -> str:
    return "signed"


@tool(deferred=True)
async def build(ctx: ToolContext) -> str:
    ctx.defer()
    return "begun"


@pytest.mark.parametrize("read", ["text", "output"])
@pytest.mark.parametrize(
    ("name", "kind", "verb"),
    [
        ("sign", "approval", "session.approve('chat.1.1.0') or session.reject('chat.1.1.0', 'reason')"),
        ("build", "deferred", "runtime.resolve(key, value) with the key of chat.1.1.0"),
    ],
)
async def test_turn_that_waits_raises_where_its_answer_is_read_and_names_the_verb(
    place: Place, read: str, name: str, kind: str, verb: str
) -> None:
    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", name)]]), tools=[sign, build])) as runtime:
        result = await (await runtime.session("chat")).run("go")

        with pytest.raises(TurnPending) as caught:
            getattr(result, read)

    assert f"turn chat.1 has no answer yet: waiting: {name} (chat.1.1.0) waits for {kind}" in str(caught.value)
    assert f"answer with {verb}, then read it with `await session.result('chat.1')`" in str(caught.value)
    assert not isinstance(caught.value, TurnFailed)
    assert (result.failed, result.error, len(result.pending)) == (False, None, 1)
    assert "Waiting(" in repr(result)


async def test_chat_of_an_agent_raises_for_an_answer_that_does_not_exist() -> None:
    def refuses(request: ModelRequest) -> str:
        raise ProviderError("invalid x-api-key", code="authentication")

    chat = Agent(FunctionModel(refuses)).chat()
    result = await chat.run("hello")

    with pytest.raises(TurnFailed, match="invalid x-api-key"):
        _ = result.text
