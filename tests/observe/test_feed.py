"""Live events: cursors, bounded replay, gaps, and readers that never slow anybody."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, Session, ToolCall, ToolContext, tool
from perdure.errors import InvalidCursor
from perdure.model.event import (
    AnyEvent,
    Gap,
    ReasoningDelta,
    TextDelta,
    ToolProgress,
    TurnCommitted,
    TurnStarted,
)
from perdure.model.message import Reasoning
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock
from tests.kit import SOON, Place, TellingModel, until

WORDS = ("one ", "two ", "three ", "four")


async def words(request: ModelRequest) -> AsyncIterator[str]:
    for word in WORDS:
        yield word
        await asyncio.sleep(0)


def talker() -> Agent[str]:
    return Agent(FunctionModel(words))


async def take(events: AsyncIterator[AnyEvent], count: int) -> list[AnyEvent]:
    async with asyncio.timeout(SOON):
        return [await anext(events) for _ in range(count)]


async def until_committed(events: AsyncIterator[AnyEvent]) -> list[AnyEvent]:
    found = []
    async with asyncio.timeout(SOON):
        async for event in events:
            found.append(event)
            if isinstance(event, TurnCommitted):
                break
    return found


async def reading(session: Session, cursor: str | None = None) -> asyncio.Task[list[AnyEvent]]:
    """A reader that stands at its place and reads to the next commit."""
    task = asyncio.create_task(until_committed(session.observe(cursor)))
    await asyncio.sleep(0)
    return task


async def test_an_observer_sees_what_happens_from_now_on(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        session = await runtime.session("chat")
        await session.run("before")
        reader = await reading(session)
        await session.run("after")
        events = await reader

        assert [type(e) for e in events] == [TurnStarted, *[TextDelta] * 4, TurnCommitted]
        assert {(e.session_id, e.turn_id) for e in events} == {("chat", "chat.2")}
        assert len({e.cursor for e in events}) == 6


async def test_a_reader_goes_on_after_its_cursor_without_loss_or_repetition(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        session = await runtime.session("chat")
        reader = await reading(session)
        await session.run("go")
        events = await reader

        for n, event in enumerate(events[:-1]):
            assert await until_committed(session.observe(event.cursor)) == events[n + 1 :]


async def test_the_cursor_of_the_newest_event_waits_for_the_next(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        session = await runtime.session("chat")
        reader = await reading(session)
        await session.run("go")
        last = (await reader)[-1]
        again = await reading(session, last.cursor)
        await session.run("go on")

        assert {e.turn_id for e in await again} == {"chat.2"}


@pytest.mark.parametrize("cursor", ["", "nonsense", "a:b:c", "x:-1:chat", "x:1", b"x:1:chat", 5, ["x"]], ids=repr)
async def test_a_malformed_cursor_is_refused_at_once(cursor: Any) -> None:
    async with Runtime("memory", agents=[talker()]) as runtime:
        session = await runtime.session("chat")

        with pytest.raises(InvalidCursor, match="start again without a cursor"):
            session.observe(cursor)


async def test_a_cursor_of_another_session_or_ahead_of_its_own_is_refused(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        session, other = await runtime.session("chat"), await runtime.session("other")
        reader = await reading(session)
        await session.run("go")
        cursor = (await reader)[-1].cursor

        with pytest.raises(InvalidCursor, match="belongs to session 'chat'"):
            other.observe(cursor)
        incarnation, position, name = cursor.split(":", 2)
        with pytest.raises(InvalidCursor, match="ahead"):
            session.observe(f"{incarnation}:{int(position.partition('.')[0]) + 1}:{name}")


async def test_cursors_of_sessions_with_odd_names(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        session = await runtime.session("a:b:1")
        reader = await reading(session)
        await session.run("go")
        events = await reader

        assert await until_committed(session.observe(events[0].cursor)) == events[1:]


async def test_a_cursor_from_before_a_restart_gets_a_gap_first(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        session = await runtime.session("chat")
        reader = await reading(session)
        await session.run("go")
        cursor = (await reader)[2].cursor
    async with place.runtime(talker()) as runtime:
        session = await runtime.session("chat")
        reader = await reading(session, cursor)
        await session.run("again")
        events = await reader

        assert isinstance(events[0], Gap)
        assert "the worker that this cursor is from is gone" in events[0].reason
        assert [type(e) for e in events[1:3]] == [TurnStarted, TextDelta]
        assert await until_committed(session.observe(events[0].cursor)) == events[1:]


async def test_a_reader_that_falls_behind_gets_a_gap_and_the_rest(place: Place) -> None:
    @tool
    async def chatty(ctx: ToolContext[None]) -> None:
        for n in range(3000):
            ctx.progress(n)

    async with place.runtime(Agent(ScriptedModel([[ToolCall("a", "chatty")], "done"]), tools=[chatty])) as runtime:
        session = await runtime.session("chat")
        events = session.observe()
        first = asyncio.create_task(take(events, 1))
        await asyncio.sleep(0)
        await session.run("go")
        assert isinstance((await first)[0], TurnStarted)
        rest = await until_committed(events)

        assert isinstance(rest[0], Gap)
        assert "fell behind" in rest[0].reason
        assert len(rest) == 1 + 2048
        kept = [e.value for e in rest if isinstance(e, ToolProgress)]
        assert kept == list(range(3000 - len(kept), 3000))


async def test_events_are_forgotten_after_two_minutes(place: Place) -> None:
    clock = VirtualClock()
    async with place.runtime(talker(), clock=clock) as runtime:
        session = await runtime.session("chat")
        reader = await reading(session)
        await session.run("go")
        events = await reader
        clock.advance(119)
        assert runtime._parts is not None
        feed = runtime._parts.feed
        feed.trim()
        assert await until_committed(session.observe(events[0].cursor)) == events[1:]
        clock.advance(2)
        feed.trim()

        again = await take(session.observe(events[0].cursor), 1)
        assert isinstance(again[0], Gap)


async def test_a_runtime_forgets_old_events_by_itself(place: Place) -> None:
    clock = VirtualClock()
    async with place.runtime(talker(), clock=clock) as runtime:
        session = await runtime.session("chat")
        reader = await reading(session)
        await session.run("go")
        cursor = (await reader)[0].cursor
        clock.advance(130)

        async def forgotten() -> bool:
            return isinstance((await take(session.observe(cursor), 1))[0], Gap)

        await until(forgotten)


async def test_a_slow_reader_never_slows_a_turn(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        session = await runtime.session("chat")
        stuck = session.observe()
        first = asyncio.create_task(take(stuck, 1))  # it takes one event and never comes back
        await asyncio.sleep(0)
        turns = [(await asyncio.wait_for(session.run(f"say {n}"), SOON)).turn_id for n in range(20)]

        assert isinstance((await first)[0], TurnStarted)
        assert turns[-1] == "chat.20"


async def test_many_readers_see_the_same(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        session = await runtime.session("chat")
        readers = [await reading(session) for _ in range(50)]
        await session.run("go")
        seen = await asyncio.gather(*readers)

        assert all(events == seen[0] for events in seen)
        assert len(seen[0]) == 6


async def test_readers_of_one_session_do_not_see_another(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        session, other = await runtime.session("chat"), await runtime.session("other")
        reader = await reading(session)
        await other.run("go")
        await session.run("go")

        assert {e.session_id for e in await reader} == {"chat"}


async def test_a_session_may_be_watched_before_it_exists(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        reader = await reading(await runtime.session("chat"))
        await (await runtime.session("chat")).run("go")

        assert isinstance((await reader)[-1], TurnCommitted)


async def test_text_that_comes_in_one_pass_is_one_event(place: Place) -> None:
    class Fast:
        name = "fast"

        async def stream(self, request: ModelRequest) -> AsyncIterator[Any]:
            async for piece in FunctionModel(hurried).stream(request):
                yield piece

    async def hurried(request: ModelRequest) -> AsyncIterator[Any]:
        for n in range(100):
            yield f"{n} "
        await asyncio.sleep(0)
        yield Reasoning("hm")
        yield "end"

    async with place.runtime(Agent(Fast())) as runtime:
        session = await runtime.session("chat")
        reader = await reading(session)
        result = await session.run("count")
        events = await reader

        text = [e for e in events if isinstance(e, TextDelta)]
        assert [type(e) for e in events[1:-1]] == [TextDelta, ReasoningDelta, TextDelta]
        assert "".join(e.text for e in text) == result.text


async def test_text_of_two_steps_in_one_pass_is_two_events(place: Place) -> None:
    """A model that never waits: its first answer does not fit, and its second follows in the same pass of the loop."""

    def hurried(request: ModelRequest) -> str:
        return "many" if len(request.messages) == 1 else "7"

    async with place.runtime(Agent(FunctionModel(hurried), output=int)) as runtime:
        session = await runtime.session("chat")
        reader = await reading(session)
        await session.run("count")
        events = await reader

    assert [(e.step, e.text) for e in events if isinstance(e, TextDelta)] == [(1, "many"), (2, "7")]


async def test_live_text_is_valid_unicode_even_when_a_character_comes_in_halves(place: Place) -> None:
    async def halves(request: ModelRequest) -> AsyncIterator[str]:
        yield "\ud83d"
        yield "\ude00 and lone \ud800"

    async with place.runtime(Agent(FunctionModel(halves))) as runtime:
        session = await runtime.session("chat")
        reader = await reading(session)
        result = await session.run("go")
        text = "".join(e.text for e in await reader if isinstance(e, TextDelta))

        assert text == result.text == "\U0001f600 and lone \ufffd"


async def test_a_model_that_never_waits_lets_others_run(place: Place) -> None:
    """Ten thousand pieces without an await of its own."""

    async def endless(request: ModelRequest) -> AsyncIterator[str]:
        for _ in range(10_000):
            yield "x"

    passes = 0

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    async with place.runtime(Agent(FunctionModel(endless))) as runtime:
        counting = asyncio.create_task(count())
        result = await (await runtime.session("chat")).run("go")
        counting.cancel()

        assert len(result.text) == 10_000
        assert passes >= 30


async def test_readers_come_to_their_end_when_the_runtime_is_left(place: Place) -> None:
    async with place.runtime(talker()) as runtime:
        session = await runtime.session("chat")

        async def read_all() -> list[AnyEvent]:
            return [event async for event in session.observe()]

        idle, busy = asyncio.create_task(read_all()), asyncio.create_task(read_all())
        await asyncio.sleep(0)
        await session.run("go")
    seen = await asyncio.wait_for(asyncio.gather(idle, busy), SOON)

    assert isinstance(seen[0][-1], TurnCommitted)
    assert seen[0] == seen[1]


async def test_a_resumed_turn_says_so(place: Place) -> None:
    @tool
    async def look() -> str:
        return "seen"

    model = TellingModel()
    async with place.runtime(Agent(model, tools=[look]), grace=0) as runtime:
        await (await runtime.session("chat")).send("go")
        model.say([ToolCall("a", "look")])
        await model.next()
        await model.next()
    async with place.runtime(Agent(ScriptedModel(["done"]), tools=[look])) as runtime:
        session = await runtime.session("chat")
        await session.result("chat.1")
        events = await until_committed(session.observe("earlier:0:chat"))

        assert [type(e) for e in events] == [Gap, TurnStarted, TextDelta, TurnCommitted]
        started = events[1]
        assert isinstance(started, TurnStarted)
        assert started.resumed
