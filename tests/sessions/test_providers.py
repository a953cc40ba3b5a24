"""Providers that fail, break off, talk nonsense or never end: every one ends in a typed outcome."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from perdure import Agent, Budget, ModelRequest, ModelResponse, Plugin, ToolCall, Usage, tool
from perdure.errors import ProviderError, ScriptExhausted
from perdure.model.event import Retracted, TextDelta, TurnCommitted
from perdure.model.message import Reasoning, Text
from perdure.model.outcome import BudgetSpent, Finished, InvalidInput, Outcome, ProviderFailed
from perdure.model.tool import Cancelled
from perdure.plugins.hooks import StreamContext
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock
from tests.kit import SOON, Place, TellingModel, crash, overloaded, texts, until


async def two_turns(place: Place, agent: Agent[Any]) -> tuple[Outcome, Outcome]:
    """How the first turn ends, and whether the session can be used afterwards, also after a restart."""
    async with place.runtime(agent) as runtime:
        first = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)
    async with place.runtime(Agent(ScriptedModel(["fine"]))) as runtime:
        session = await runtime.session("chat")
        stored = await session.result("chat.1")
        second = await session.run("again")

    assert stored.outcome == first.outcome
    return first.outcome, second.outcome


async def test_a_conversation_that_the_model_does_not_take_is_an_invalid_input(place: Place) -> None:
    too_long = ProviderError("the prompt has 300,000 tokens, the model takes 200,000", code="invalid_input")

    first, second = await two_turns(place, Agent(ScriptedModel([too_long])))

    assert first == InvalidInput("invalid_input", "the prompt has 300,000 tokens, the model takes 200,000")
    assert second == Finished("fine")


async def test_a_failed_attempt_is_made_again_when_it_is_due(place: Place) -> None:
    clock = VirtualClock()
    model = ScriptedModel([overloaded(), overloaded(), "there you are"])
    async with place.runtime(Agent(model), clock=clock) as runtime:
        receipt = await (await runtime.session("chat")).send("go")
        await clock.wait_sleeping()
        clock.advance(0.37)
        assert clock.sleeping == 1
        clock.advance(0.13)  # half a second, less up to a quarter
        await until(lambda: len(model.requests) == 2)
        await clock.wait_sleeping()
        clock.advance(1)
        result = await receipt.result(SOON)

        assert result.text == "there you are"
        assert [r.attempt for r in model.requests] == [1, 2, 3]
        assert len({r.call_id for r in model.requests}) == 1


async def test_what_the_provider_asks_for_is_honoured(place: Place) -> None:
    clock = VirtualClock()
    model = ScriptedModel([overloaded(after=30), "there you are"])
    async with place.runtime(Agent(model), clock=clock) as runtime:
        receipt = await (await runtime.session("chat")).send("go")
        await clock.wait_sleeping()
        clock.advance(29.9)
        assert clock.sleeping == 1
        clock.advance(0.1)

        assert (await receipt.result(SOON)).text == "there you are"


@pytest.mark.parametrize("after", [float("nan"), float("inf"), -5.0, "soon"], ids=str)
async def test_nonsense_asked_for_by_a_provider_is_bounded(place: Place, after: Any) -> None:
    clock = VirtualClock(auto=True)
    async with place.runtime(Agent(ScriptedModel([overloaded(after), "ok"])), clock=clock) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

        assert result.text == "ok"
        assert clock.monotonic() <= 60


async def test_four_attempts_and_then_it_is_given_up(place: Place) -> None:
    model = ScriptedModel([overloaded() for _ in range(4)])
    async with place.runtime(Agent(model, retries=3), clock=VirtualClock(auto=True)) as runtime:
        session = await runtime.session("chat")
        result = await asyncio.wait_for(session.run("go"), SOON)

        assert result.outcome == ProviderFailed("overloaded", "overloaded", 4, "scripted")
        assert texts(await session.history()) == ["go"]
    async with place.runtime(Agent(ScriptedModel(["fine"]))) as runtime:
        session = await runtime.session("chat")
        assert (await session.result("chat.1")).outcome == ProviderFailed("overloaded", "overloaded", 4, "scripted")
        assert (await session.run("again")).text == "fine"


async def test_a_crash_between_attempts_keeps_the_due_time_and_the_count(place: Place) -> None:
    clock = VirtualClock()
    runtime = await place.runtime(
        Agent(ScriptedModel([overloaded(after=50)])), clock=clock, park_after=None
    ).__aenter__()
    await (await runtime.session("chat")).send("go")
    await clock.wait_sleeping()
    clock.advance(20)
    await crash(runtime)
    model = ScriptedModel(["there you are"])
    async with place.runtime(Agent(model), clock=clock, park_after=None) as runtime:
        await clock.wait_sleeping()
        clock.advance(29.9)
        assert clock.sleeping == 1
        clock.advance(0.1)
        result = await (await runtime.session("chat")).result("chat.1")

        assert result.text == "there you are"
        assert model.requests[0].attempt == 2


async def test_a_stream_that_breaks_off_takes_its_text_back(place: Place) -> None:
    attempts = 0

    async def breaking(request: ModelRequest) -> AsyncIterator[str]:
        nonlocal attempts
        attempts += 1
        yield f"attempt {attempts}"
        await asyncio.sleep(0)
        if attempts == 1:
            raise ProviderError("connection reset", retryable=True)

    clock = VirtualClock(auto=True)
    async with place.runtime(Agent(FunctionModel(breaking)), clock=clock) as runtime:
        session = await runtime.session("chat")
        async with session.stream("go") as turn:
            events = [e async for e in turn if isinstance(e, TextDelta | Retracted | TurnCommitted)]

        assert [type(e) for e in events] == [TextDelta, Retracted, TextDelta, TurnCommitted]
        assert [e.reason for e in events if isinstance(e, Retracted)] == ["connection reset"]
        assert texts(await session.history()) == ["go", "attempt 2"]


async def test_a_stream_that_only_ends_is_broken_too(place: Place) -> None:
    class Silent:
        name = "silent"

        async def stream(self, request: ModelRequest) -> AsyncIterator[str]:
            yield "half an answ"

    outcome, then = await gives_up(place, Silent())

    assert isinstance(outcome, ProviderFailed)
    assert (outcome.code, outcome.attempts) == ("broken_stream", 4)
    assert then == Finished("fine")


async def gives_up(place: Place, provider: Any) -> tuple[Outcome, Outcome]:
    async with place.runtime(Agent(provider, retries=3), clock=VirtualClock(auto=True)) as runtime:
        session = await runtime.session("chat")
        first = await asyncio.wait_for(session.run("go"), SOON)
        assert texts(await session.history()) == ["go"]
    async with place.runtime(Agent(ScriptedModel(["fine"]))) as runtime:
        second = await (await runtime.session("chat")).run("again")
    return first.outcome, second.outcome


class HttpError(Exception):
    """Like those of many HTTP clients: its code is a number."""

    code = 503


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (HttpError("unavailable"), "HttpError: unavailable"),
        (Unspeakable(), "Unspeakable: (it cannot be shown)"),
        (RecursionError("deep"), "RecursionError: deep"),
        (asyncio.CancelledError(), "SelfCancelled: CancelledError: the work cancelled itself"),
        (SystemExit(3), "SystemExit: 3"),
        (TimeoutError(), "TimeoutError: TimeoutError"),
        (KeyError("lone \ud800"), "KeyError: 'lone \\ud800'"),
        (StopAsyncIteration(), None),
    ],
    ids=lambda p: type(p).__name__ if isinstance(p, BaseException) else "",
)
async def test_whatever_a_provider_raises_is_a_failed_turn(
    place: Place, error: BaseException, message: str | None
) -> None:
    first, then = await two_turns(place, Agent(ScriptedModel([error])))

    assert isinstance(first, ProviderFailed)
    assert first.code == "provider_raised"
    assert message is None or first.message == message
    assert then == Finished("fine")


def odd_call(**odd: Any) -> ToolCall:
    return ToolCall(**odd)


# Without their types: none of these could be written by a provider that a checker has seen.
Response: Any = ModelResponse
Spent: Any = Usage
Words: Any = Text


@pytest.mark.parametrize(
    "answer",
    [
        Response("x", stop="whenever"),
        Response("x", usage={"input": 3}),
        Response("x", usage=Spent(input=1.5)),
        Response("x", usage=Spent(input=-1)),
        Response("x", usage=Spent(cost=float("nan"))),
        Response("x", model=None),
        Response(5),
        Response(parts=["text"]),
        Response(parts=[Words(None)]),
        Response(tool_calls=5),
        Response(tool_calls=[odd_call(id=5)]),
        Response(tool_calls=[odd_call(name=None)]),
        Response(reasoning=[Reasoning(replay=object())]),
    ],
    ids=[
        "stop",
        "usage",
        "half a token",
        "minus a token",
        "nan",
        "model",
        "number",
        "bare part",
        "no text",
        "no calls",
        "call id",
        "call name",
        "replay",
    ],
)
async def test_an_answer_that_no_store_could_give_back_is_a_failed_turn(place: Place, answer: ModelResponse) -> None:
    class Odd:
        name = "odd"

        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelResponse]:
            yield answer

    first, then = await two_turns(place, Agent(Odd()))

    assert isinstance(first, ProviderFailed)
    assert first.code == "provider_nonsense"
    assert then == Finished("fine")


@pytest.mark.parametrize("piece", [None, 5, b"bytes", {"text": "x"}, ["x"]], ids=lambda p: type(p).__name__)
async def test_a_stream_of_nonsense_is_a_failed_turn(place: Place, piece: object) -> None:
    class Odd:
        name = "odd"

        async def stream(self, request: ModelRequest) -> AsyncIterator[Any]:
            yield "shown "
            yield piece

    first, then = await two_turns(place, Agent(Odd()))

    assert isinstance(first, ProviderFailed)
    assert first.code == "provider_nonsense"
    assert then == Finished("fine")


@pytest.mark.parametrize(
    "stream", [lambda request: None, lambda request: "text", lambda: None], ids=["none", "str", "?"]
)
async def test_a_provider_that_does_not_stream_is_a_failed_turn(place: Place, stream: Callable[..., Any]) -> None:
    class Odd:
        name = "odd"

    odd: Any = Odd()
    odd.stream = stream
    first, then = await two_turns(place, Agent(odd))

    assert isinstance(first, ProviderFailed)
    assert then == Finished("fine")


async def test_refused_nonsense_takes_its_text_back(place: Place) -> None:
    class Odd:
        name = "odd"

        async def stream(self, request: ModelRequest) -> AsyncIterator[Any]:
            yield "shown"
            yield Response("shown", stop="whenever")

    async with place.runtime(Agent(Odd())) as runtime:
        session = await runtime.session("chat")
        async with session.stream("go") as turn:
            events = [e async for e in turn if isinstance(e, TextDelta | Retracted)]

        assert [type(e) for e in events] == [TextDelta, Retracted]


async def test_odd_characters_from_a_model_are_stored_alike(place: Place) -> None:
    reply = ModelResponse("nul \0, lone \ud800", reasoning=[Reasoning("why \0", {"n": float("nan")})])
    async with place.runtime(Agent(ScriptedModel([reply]))) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime(Agent()) as runtime:
        history = await (await runtime.session("chat")).history()

        assert history[1].parts == (Reasoning("why \ufffd", {"n": "NaN"}), Text("nul \ufffd, lone \ufffd"))


async def test_a_large_answer_is_kept_whole(place: Place) -> None:
    words = "wörter " * 100_000
    async with place.runtime(Agent(ScriptedModel([words]))) as runtime:
        await (await runtime.session("chat")).run("go")
    async with place.runtime(Agent()) as runtime:
        session = await runtime.session("chat")

        assert (await session.history())[1].text == words
        assert (await session.result("chat.1")).text == words


async def test_an_empty_answer_is_an_answer(place: Place) -> None:
    first, then = await two_turns(place, Agent(ScriptedModel([""])))

    assert (first, then) == (Finished(""), Finished("fine"))


async def test_a_scripted_model_that_runs_dry_says_so(place: Place) -> None:
    first, then = await two_turns(place, Agent(ScriptedModel([])))

    assert isinstance(first, ProviderFailed)
    assert (first.code, first.attempts) == ("script_exhausted", 1)
    assert re.search(r"has 0 answers and was asked for number 1", first.message)
    assert then == Finished("fine")


async def test_a_scripted_model_complains_about_answers_left_over() -> None:
    with pytest.raises(ScriptExhausted, match="1 of 2"), ScriptedModel(["one", "two"]) as model:
        await Agent(model).run("go")

    with pytest.raises(ZeroDivisionError), ScriptedModel(["one"]):
        raise ZeroDivisionError


@pytest.mark.parametrize("answer", [5, None, [1], {"text": "x"}], ids=str)
async def test_a_function_model_that_answers_nonsense(place: Place, answer: Any) -> None:
    first, then = await two_turns(place, Agent(FunctionModel(lambda request: answer)))

    assert isinstance(first, ProviderFailed)
    assert first.code == "provider_nonsense"
    assert then == Finished("fine")


async def test_a_model_sees_instructions_history_and_tools(place: Place) -> None:
    @tool
    async def look(where: str) -> str:
        """Look somewhere."""
        return "seen"

    model = ScriptedModel(["one", "two"])
    async with place.runtime(Agent(model, instructions="Be brief.", tools=[look])) as runtime:
        session = await runtime.session("chat")
        await session.run("first")
        await session.run("second")

        request = model.requests[1]
        assert [(m.role, m.text) for m in request.messages] == [
            ("system", "Be brief."),
            ("user", "first"),
            ("assistant", "one"),
            ("user", "second"),
        ]
        assert [(t.name, t.description) for t in request.tools] == [("look", "Look somewhere.")]
        assert (request.session_id, request.turn_id, request.attempt) == ("chat", "chat.2", 1)


async def test_what_a_provider_needs_to_see_again_it_sees_again(place: Place) -> None:
    """Reasoning and calls carry opaque data of their provider: in the next step, and after a restart."""

    @tool
    def look() -> str:
        """Look somewhere."""
        return "seen"

    thought = Reasoning("hm", {"signature": "s1"})
    call = ToolCall("a", "look", replay={"item": "i1"})
    first = ScriptedModel([ModelResponse(reasoning=(thought,), tool_calls=(call,), stop="tool_calls"), "done"])
    async with place.runtime(Agent(first, tools=[look])) as runtime:
        await (await runtime.session("chat")).run("go")
    second = ScriptedModel(["fine"])
    async with place.runtime(Agent(second, tools=[look])) as runtime:
        await (await runtime.session("chat")).run("again")

    assert first.requests[1].messages[1].parts == (thought, call)
    assert second.requests[0].messages[1].parts == (thought, call)


async def test_instructions_belong_to_the_agent_and_not_to_the_session(place: Place) -> None:
    models = [ScriptedModel(["one"]), ScriptedModel(["two"])]
    for model, instructions in zip(models, ["Be brief.", "Be kind."], strict=True):
        async with place.runtime(Agent(model, instructions=instructions)) as runtime:
            result = await (await runtime.session("chat")).run("go")
            assert "system" not in [m.role for m in result.messages]

    assert texts(models[1].requests[0].messages) == ["Be kind.", "go", "one", "go"]


async def test_a_model_that_ignores_its_cancellation_is_still_heeded(place: Place) -> None:
    """It swallows the cancellation and answers anyway; the request stands."""
    running = asyncio.Event()

    async def stubborn(request: ModelRequest) -> str:
        running.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "anyway"

    async with place.runtime(Agent(FunctionModel(stubborn))) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await running.wait()
        await session.cancel("stop")
        result = await receipt.result(SOON)

        assert type(result.outcome).__name__ == "Cancelled"
        assert texts(await session.history()) == ["go"]


@pytest.mark.slow
async def test_a_model_that_never_listens_holds_up_neither_its_caller_nor_a_neighbour(place: Place) -> None:
    running = asyncio.Event()

    async def deaf(request: ModelRequest) -> str:
        if request.messages[-1].text != "go":
            return "fine"
        running.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async with place.runtime(Agent(FunctionModel(deaf))) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await running.wait()
        await session.cancel("stop")
        neighbour = await asyncio.wait_for((await runtime.session("other")).run("hello"), SOON)
        result = await receipt.result(SOON)
        after = await asyncio.wait_for(session.run("hello"), SOON)

    assert neighbour.text == "fine"
    assert result.outcome == Cancelled("host", "stop")
    assert after.text == "fine"
    async with place.runtime() as runtime:
        assert texts(await (await runtime.session("chat")).history()) == ["go", "hello", "fine"]


@pytest.mark.slow
async def test_time_that_is_up_ends_a_turn_whose_model_never_listens(place: Place) -> None:
    async def deaf(request: ModelRequest) -> str:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async with place.runtime(Agent(FunctionModel(deaf), budget=Budget(seconds=0.01))) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).run("go"), SOON)

    assert result.outcome == BudgetSpent("seconds", 0.01)


@pytest.mark.slow
async def test_a_runtime_is_left_while_a_model_does_not_listen(place: Place) -> None:
    running = asyncio.Event()

    async def deaf(request: ModelRequest) -> str:
        running.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async with place.runtime(Agent(FunctionModel(deaf)), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        await running.wait()
    async with place.runtime(Agent(ScriptedModel(["done"]))) as runtime:
        result = await asyncio.wait_for((await runtime.session("chat")).result("chat.1"), SOON)

    assert result.text == "done"
    assert result.usage.unknown == 2  # the attempt that was cut off, and a script says nothing of usage


async def test_a_cancel_that_a_model_turns_into_an_error_is_still_a_cancel(place: Place) -> None:
    """And the next turn of the same session can be cancelled as well."""
    running: asyncio.Queue[None] = asyncio.Queue()

    async def lossy(request: ModelRequest) -> str:
        running.put_nowait(None)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if request.turn_id == "chat.2":
                raise
            raise ProviderError("connection lost", retryable=True) from None
        return "never"

    async with place.runtime(Agent(FunctionModel(lossy))) as runtime:
        session = await runtime.session("chat")
        receipts = [await session.send("one"), await session.send("two")]
        for receipt in receipts:
            await asyncio.wait_for(running.get(), SOON)
            await session.cancel("stop", turn_id=receipt.turn_id)

            assert (await receipt.result(SOON)).outcome == Cancelled("host", "stop")


async def test_a_model_call_cut_off_by_a_crash_is_asked_again_and_counted(place: Place) -> None:
    model = TellingModel()
    runtime = await place.runtime(Agent(model)).__aenter__()
    await (await runtime.session("chat")).send("go")
    await model.next()
    await crash(runtime)
    again = ScriptedModel([ModelResponse("done", usage=Usage(input=5))])
    async with place.runtime(Agent(again)) as runtime:
        result = await (await runtime.session("chat")).result("chat.1")

        assert result.text == "done"
        assert result.usage == Usage(input=5, calls=1, unknown=1)


@pytest.mark.parametrize("said", ["", " ", "\n"])
async def test_an_answer_that_says_nothing_is_in_no_later_prompt(place: Place, said: str) -> None:
    shown: list[list[str]] = []

    def answer(request: ModelRequest) -> ModelResponse:
        shown.append([f"{message.role}: {message.text}" for message in request.messages])
        return ModelResponse(said if len(shown) == 1 else "here")

    async with place.runtime(Agent(FunctionModel(answer))) as runtime:
        session = await runtime.session("s")
        result = await session.run("anybody?")
        assert result.outcome == Finished(said)
        await session.run("and now?")

        assert shown[1] == ["user: anybody?", "user: and now?"]
    async with place.runtime(Agent(FunctionModel(answer))) as runtime:
        assert [message.role for message in await (await runtime.session("s")).history()] == [
            "user",
            "user",
            "assistant",
        ]


async def test_an_answer_whose_text_a_plugin_takes_away_is_in_no_later_prompt(place: Place) -> None:
    class Mute(Plugin):
        id = "mute"

        def transform_text(self, ctx: StreamContext, text: str) -> str:
            return ""

    async with place.runtime(Agent(FunctionModel(lambda _: "secret"), plugins=[Mute()])) as runtime:
        session = await runtime.session("s")
        await session.run("say it")
        result = await session.run("again")

        assert [message.role for message in result.messages] == ["user", "user"]
