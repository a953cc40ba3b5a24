"""A conversation that the model refuses as too long is made shorter once, and asked again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perdure import Agent, Message, ModelRequest, Plugin, Runtime
from perdure.builtin.compaction import SYSTEM, Compaction
from perdure.errors import ProviderError
from perdure.model.outcome import ProviderFailed
from perdure.model.plugin import Compaction as Frame
from perdure.model.record import Asking, Completed, Faltered, Framed
from perdure.plugins.hooks import CompactContext
from perdure.testing import FunctionModel
from perdure.testing.model_server import ModelServer
from tests.providers.test_http import connect
from tests.providers.wire import ANSWERS, FAILURES

TOO_LONG = ProviderError("the conversation does not fit the model: 9 > 8", code="context_overflow")


class Narrow:
    """A model that takes so many characters, whatever anybody estimates."""

    def __init__(self, most: int) -> None:
        self.asked: list[int] = []

        def answer(request: ModelRequest) -> str:
            size = sum(len(message.text) for message in request.messages)
            if request.messages[0].text == SYSTEM:
                return "They spoke of letters."
            self.asked.append(size)
            if size > most:
                raise TOO_LONG
            return f"answer {len(self.asked)}"

        self.model = FunctionModel(answer, name="narrow")


class Forget(Plugin):
    """Compacts to nothing much when it must, and never before."""

    id = "forget"

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def compact(self, ctx: CompactContext) -> Frame | None:
        self.calls.append(ctx.overflow)
        return Frame((Message("assistant", "[earlier]"),)) if ctx.overflow else None


async def test_the_builtin_compaction_makes_room_and_the_turn_goes_on(tmp_path: Path) -> None:
    narrow = Narrow(most=1_500)
    agent = Agent(narrow.model, plugins=[Compaction(context_tokens=100_000)])
    async with Runtime(tmp_path / "s.db", agents=[agent]) as runtime:
        session = await runtime.session("s")
        for letter in "abcd":
            await session.run(letter * 300)
        result = await session.run("e" * 400)
        follower = await session.run("f")
    async with Runtime(tmp_path / "s.db") as runtime:
        again = await (await runtime.session("s")).result(result.turn_id)

    assert result.text == "answer 6"
    kinds = [type(record) for record in result.records if isinstance(record, Faltered | Asking | Completed | Framed)]
    summed_up = [Asking, Completed] * 2  # piece by piece: as a whole it would not fit either
    assert kinds == [Faltered, *summed_up, Framed]
    assert narrow.asked[4] > 1_500 > narrow.asked[5]
    assert narrow.asked[6] < 1_500, "later turns go on from the frame"
    assert follower.text == "answer 7"
    own = [call for call in result.model_calls if call.label == "turn"]
    assert [(each.number, each.code) for each in own[0].attempts] == [(1, "context_overflow"), (2, "")]
    assert again.model_calls == result.model_calls


@pytest.mark.parametrize("name", list(FAILURES))
async def test_every_dialect_says_that_it_is_too_long_and_is_asked_again_with_less(name: str) -> None:
    plugin = Forget()
    answer = ANSWERS[name]["text"]
    async with ModelServer([answer.reply, FAILURES[name]["too long"].reply, answer.reply]) as server:
        agent = Agent(connect(server, name), plugins=[plugin])
        async with Runtime("memory", agents=[agent]) as runtime:
            session = await runtime.session("s")
            await session.run("a long story")
            result = await session.run("and on")
        bodies = [asked.body for asked in server.asked]

    assert result.raise_for_outcome().text
    assert b"a long story" in bodies[1]
    assert b"a long story" not in bodies[2]
    assert b"[earlier]" in bodies[2]
    assert plugin.calls == [False, False, True]


async def test_without_a_compactor_the_turn_ends_and_says_what_to_do() -> None:
    narrow = Narrow(most=5)
    async with Runtime("memory", agents=[Agent(narrow.model)]) as runtime:
        session = await runtime.session("s")
        await session.run("hi")
        result = await session.run("hello")

    assert isinstance(result.outcome, ProviderFailed)
    assert (result.outcome.code, result.outcome.attempts) == ("context_overflow", 1)
    assert "Compaction(context_tokens=" in result.outcome.message


async def test_a_conversation_that_stays_too_long_is_shortened_once_and_then_given_up() -> None:
    narrow, plugin = Narrow(most=5), Forget()
    async with Runtime("memory", agents=[Agent(narrow.model, plugins=[plugin])]) as runtime:
        session = await runtime.session("s")
        await session.run("hi")
        result = await session.run("a very long word")

    assert isinstance(result.outcome, ProviderFailed)
    assert (result.outcome.code, result.outcome.attempts) == ("context_overflow", 2)
    assert plugin.calls == [False, False, True]
    assert len(narrow.asked) == 3


async def test_a_first_turn_has_nothing_to_shorten() -> None:
    narrow, plugin = Narrow(most=5), Forget()
    async with Runtime("memory", agents=[Agent(narrow.model, plugins=[plugin])]) as runtime:
        result = await (await runtime.session("s")).run("a very long word")

    assert isinstance(result.outcome, ProviderFailed)
    assert (result.outcome.code, plugin.calls, len(narrow.asked)) == ("context_overflow", [False], 1)


async def test_a_compactor_that_leaves_the_history_as_it_is_ends_the_turn() -> None:
    class Stubborn(Forget):
        def compact(self, ctx: CompactContext) -> Frame | None:
            self.calls.append(ctx.overflow)
            return None

    narrow, plugin = Narrow(most=5), Stubborn()
    async with Runtime("memory", agents=[Agent(narrow.model, plugins=[plugin])]) as runtime:
        session = await runtime.session("s")
        await session.run("hi")
        result = await session.run("a very long word")

    assert isinstance(result.outcome, ProviderFailed)
    assert (result.outcome.code, result.outcome.attempts) == ("context_overflow", 1)
    assert "could not be made shorter" in result.outcome.message
    assert plugin.calls == [False, False, True]


async def test_a_turn_that_is_cancelled_while_it_is_made_shorter_ends_as_cancelled() -> None:
    entered = asyncio.Event()

    class Slow(Plugin):
        id = "slow"

        async def compact(self, ctx: CompactContext) -> Frame | None:
            if ctx.overflow:
                entered.set()
                await asyncio.Event().wait()
            return None

    async with Runtime("memory", agents=[Agent(Narrow(most=5).model, plugins=[Slow()])]) as runtime:
        session = await runtime.session("s")
        await session.run("hi")
        receipt = await session.send("a very long word")
        await entered.wait()
        await session.cancel()
        result = await receipt.result()

    assert type(result.outcome).__name__ == "Cancelled"
