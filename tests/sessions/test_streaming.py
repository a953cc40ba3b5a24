"""Watching one turn."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest

from perdure import Agent, ModelRequest, Runtime, ToolCall, ToolContext, tool
from perdure.errors import InvalidInput, KeyConflict
from perdure.model.event import (
    TextDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
    TurnCommitted,
    TurnStarted,
    WaitingFor,
)
from perdure.model.outcome import Finished
from perdure.model.tool import Ok
from perdure.model.write import Commit, Write
from perdure.stores.memory import MemoryStore
from perdure.testing import FunctionModel, ScriptedModel
from tests.kit import SOON, Place, TellingModel, texts

R = TypeVar("R")


async def test_a_stream_shows_the_turn_and_then_gives_its_result(place: Place) -> None:
    async def words(request: ModelRequest) -> AsyncIterator[str]:
        for word in ("one ", "two ", "three"):
            yield word
            await asyncio.sleep(0)

    async with place.runtime(Agent(FunctionModel(words))) as runtime:
        session = await runtime.session("chat")
        async with session.stream("count") as turn:
            events = [event async for event in turn]
            result = await turn.result()

        assert [type(e) for e in events] == [TurnStarted, TextDelta, TextDelta, TextDelta, TurnCommitted]
        assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "one two three"
        assert result.text == "one two three"
        assert [e.outcome for e in events if isinstance(e, TurnCommitted)] == [Finished("one two three")]
        assert {e.turn_id for e in events} == {turn.turn_id} == {"chat.1"}


async def test_the_events_of_a_turn_with_a_tool_come_in_order(place: Place) -> None:
    @tool
    async def count(ctx: ToolContext[None]) -> int:
        ctx.progress({"done": 1})
        return 3

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "count")], "done"]), tools=[count])) as runtime:
        session = await runtime.session("chat")
        async with session.stream("count") as turn:
            events = [event async for event in turn]

        assert [type(e) for e in events] == [
            TurnStarted,
            ToolStarted,
            ToolProgress,
            ToolFinished,
            TextDelta,
            TurnCommitted,
        ]
        assert [e.value for e in events if isinstance(e, ToolProgress)] == [{"done": 1}]
        assert [e.outcome for e in events if isinstance(e, ToolFinished)] == [Ok(3)]


async def test_a_stream_ends_where_the_turn_parks(place: Place) -> None:
    @tool(approval="ask")
    async def shoot() -> str:
        return "bang"

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "shoot")]]), tools=[shoot])) as runtime:
        session = await runtime.session("chat")
        async with session.stream("go") as turn:
            events = [event async for event in turn]
            result = await turn.result()

        assert isinstance(events[-1], WaitingFor)
        assert events[-1].calls[0].call_id == "chat.1.1.0"
        assert result.waiting


async def test_a_queued_stream_shows_only_its_own_turn(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        await session.send("one")
        await model.next()
        async with session.stream("two") as turn:
            model.say("first", "second")
            events = [event async for event in turn]

        assert {e.turn_id for e in events} == {"chat.2"}
        assert texts(e for e in events if isinstance(e, TextDelta)) == ["second"]


async def test_leaving_a_stream_early_leaves_the_turn_alone(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        async with session.stream("go") as turn:
            await model.next()
        model.say("done")

        assert (await asyncio.wait_for(turn.result(), SOON)).text == "done"
        assert (await session.result("chat.1")).text == "done"


async def test_a_body_that_raises_leaves_the_turn_alone(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        with pytest.raises(ZeroDivisionError):
            async with session.stream("go"):
                raise ZeroDivisionError
        model.say("done")

        assert (await session.result("chat.1")).text == "done"


async def test_a_stream_of_a_turn_that_is_over_ends_at_once(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["done"]))) as runtime:
        session = await runtime.session("chat")
        await session.run("go", key="m1")
        async with asyncio.timeout(SOON), session.stream("go", key="m1") as turn:
            events = [event async for event in turn]
            result = await turn.result()

        assert events == []
        assert result.text == "done"


async def test_two_streams_of_one_key_show_the_same_turn(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        async with session.stream("go", key="m1") as one, session.stream("go", key="m1") as two:
            model.say("done")
            first = [event async for event in one]
            second = [event async for event in two]

        assert one.turn_id == two.turn_id == "chat.1"
        assert first[-1] == second[-1]


async def test_a_stream_is_used_inside_its_context(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["done"]))) as runtime:
        session = await runtime.session("chat")
        turn = session.stream("go")

        with pytest.raises(InvalidInput, match=r"async with session\.stream"):
            await turn.result()
        assert await session.history() == []


async def test_a_stream_refuses_like_run(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["done"]))) as runtime:
        session = await runtime.session("chat")
        await session.run("go", key="m1")

        with pytest.raises(KeyConflict):
            async with session.stream("other", key="m1"):
                pass
        with pytest.raises(InvalidInput, match="empty"):
            async with session.stream(" "):
                pass


async def test_the_built_in_model_streams_what_it_then_answers(place: Place) -> None:
    """Also where a word of the input is the first word of the answer."""
    async with place.runtime(Agent()) as runtime, (await runtime.session("s")).stream("You and You") as turn:
        shown = [event.text async for event in turn if isinstance(event, TextDelta)]
        result = await turn.result()

    assert "".join(shown) == result.text == "You said: You and You"


class SlowToTell(MemoryStore):
    """Commits, and says so when it is told to: what is on disk may be read before its writer hears of it."""

    def __init__(self) -> None:
        super().__init__()
        self.committed, self.tell = asyncio.Event(), asyncio.Event()

    async def write(self, write: Write[R]) -> R:
        receipt = await super().write(write)
        if isinstance(write, Commit):
            self.committed.set()
            await self.tell.wait()
        return receipt


async def test_whoever_asks_how_a_turn_of_ours_ended_hears_it_after_its_events() -> None:
    store = SlowToTell()
    async with Runtime(store, agents=[Agent(ScriptedModel(["hello"]))]) as runtime:
        session = await runtime.session("s")
        events = session.observe()
        turn = (await session.send("hi")).turn_id
        await store.committed.wait()
        asked = asyncio.create_task(session.result(turn))
        for _ in range(20):
            await asyncio.sleep(0)

        assert not asked.done()
        store.tell.set()
        seen = [await anext(events) for _ in range(3)]
        assert (type(seen[-1]), (await asked).text) == (TurnCommitted, "hello")
