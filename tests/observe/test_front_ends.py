"""Front ends: Runtimes without definitions, that talk to sessions which workers on the same store run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from perdure import Agent, ModelRequest, ProcessContext, Runtime, Session, ToolCall, process, tool
from perdure.errors import InvalidDefinition, SessionDeleted
from perdure.model.event import (
    AnyEvent,
    Gap,
    InputDelivered,
    Retracted,
    TextDelta,
    ToolFinished,
    ToolStarted,
    TurnCommitted,
    TurnStarted,
    WaitingFor,
)
from perdure.model.llm import Delta, ModelResponse
from perdure.model.outcome import Finished, Queued
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, agent_calling, crash, until

END = object()


class PacedModel:
    """Streams what a test says, piece by piece. An answer ends with END."""

    name = "paced"

    def __init__(self) -> None:
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self.asked = 0

    def say(self, *pieces: Any) -> None:
        for piece in pieces:
            self._said.put_nowait(piece)

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        self.asked += 1
        text = ""
        while (piece := await self._said.get()) is not END:
            if isinstance(piece, list):
                yield ModelResponse(text, piece)
                return
            text += piece
            yield piece
        yield ModelResponse(text)


def paced(model: PacedModel, **options: Any) -> Agent[str]:
    return Agent(model, name="support", **options)


def echo(name: str = "support") -> Agent[str]:
    return Agent(FunctionModel(lambda request: f"re: {request.messages[-1].text}"), name=name)


class Watching:
    """Events of a session as one reader sees them."""

    def __init__(self, session: Session, cursor: str | None = None) -> None:
        self.seen: list[AnyEvent] = []
        self._task = asyncio.create_task(self._read(session.observe(cursor)))

    async def _read(self, events: AsyncIterator[AnyEvent]) -> None:
        async for event in events:
            self.seen.append(event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.seen if isinstance(event, TextDelta))

    @property
    def kinds(self) -> list[str]:
        """The kinds of events, pieces of text that follow each other told once."""
        names = [type(event).__name__ for event in self.seen]
        return [name for n, name in enumerate(names) if n == 0 or name != "TextDelta" or names[n - 1] != name]

    async def committed(self, turn: str) -> None:
        await until(lambda: any(isinstance(e, TurnCommitted) and e.turn_id == turn for e in self.seen))

    async def end(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@contextlib.asynccontextmanager
async def watching(runtime: Runtime, session_id: str, cursor: str | None = None) -> AsyncGenerator[Watching, None]:
    """A reader whose session is followed at every worker."""
    found = Watching(await runtime.session(session_id), cursor)
    assert runtime._parts is not None
    relay = runtime._parts.relay
    await until(lambda: session_id in relay._followed and relay._followed[session_id].ready.is_set())
    try:
        yield found
    finally:
        await found.end()


# ---------------------------------------------------------------------- talking


async def test_a_front_end_begins_a_session_and_sees_live_text(file: Place) -> None:
    model = PacedModel()
    async with file.runtime(paced(model)), file.runtime() as front:
        session = await front.session("new", agent="support")
        assert await front.store.session("new") is None
        async with session.stream("hello") as turn, asyncio.timeout(SOON):
            events = aiter(turn)
            model.say("One ")
            first = [await anext(events), await anext(events)]
            model.say("two", END)  # only now: the first piece came while the model was still speaking
            rest = [event async for event in events]
            result = await turn.result()

    assert isinstance(first[0], TurnStarted)
    assert isinstance(first[1], TextDelta)
    assert (first[1].text, [type(each) for each in rest]) == ("One ", [TextDelta, TurnCommitted])
    assert (result.text, result.outcome) == ("One two", Finished("One two"))


async def test_without_a_name_the_agent_is_the_first_of_the_only_workers(file: Place) -> None:
    async with file.runtime(echo(), echo("other")), file.runtime() as front:
        session = await front.session()

        assert session.agent == "support"
        assert (await session.run("hello")).text == "re: hello"


async def test_an_agent_that_living_workers_do_not_have_is_refused_before_anything_is_written(file: Place) -> None:
    async with file.runtime(echo()), file.runtime(echo("other")), file.runtime() as front:
        with pytest.raises(InvalidDefinition, match=r"no agent 'suport'.*support"):
            await front.session("s", agent="suport")
        with pytest.raises(InvalidDefinition, match=r"support, other|other, support"):
            await front.session("s")
        assert await front.store.session("s") is None


async def test_an_agent_that_nobody_alive_has_is_accepted_and_the_host_is_told(file: Place) -> None:
    async with file.runtime() as front:
        session = await front.session("s", agent="support")
        result = await session.run("hello", key="k")
        assert isinstance(result.outcome, Queued)
        assert "no living worker has agent 'support'" in result.outcome.reason
        async with session.stream("again", key="k2") as turn:
            assert [event async for event in turn] == []
            assert isinstance((await turn.result()).outcome, Queued)

        async with file.runtime(echo()):
            assert (await session.result(result.turn_id)).text == "re: hello"
            assert (await session.run("hello", key="k")).text == "re: hello"


async def test_an_agent_of_earlier_sessions_is_known_while_its_workers_are_down(file: Place) -> None:
    async with file.runtime(echo()) as worker:
        await (await worker.session("old")).run("hello")
    async with file.runtime(echo("other")), file.runtime() as front:
        session = await front.session("new", agent="support")

        assert isinstance((await session.run("hello")).outcome, Queued)


async def test_a_worker_opens_sessions_for_agents_of_other_workers_too(file: Place) -> None:
    async with file.runtime(echo()), file.runtime(echo("other")) as other:
        assert (await (await other.session("s", agent="support")).run("hello")).text == "re: hello"
        with pytest.raises(InvalidDefinition, match="no agent 'nobody'"):
            await other.session("t", agent="nobody")


async def test_a_front_end_starts_functions_by_name(file: Place) -> None:
    @process
    async def nightly(ctx: ProcessContext, day: str) -> str:
        return f"report of {day}"

    async with Runtime(file.store(), processes=[nightly]), file.runtime() as front:
        handle = await front.start("nightly", {"day": "Sunday"})
        assert await handle.result(timeout=SOON) == "report of Sunday"


async def test_a_front_end_approves_what_a_worker_asks_for_and_sees_it_go_on(file: Place) -> None:
    @tool(approval="ask")
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent = agent_calling("pay", tools=[pay], name="support")
    async with file.runtime(agent), file.runtime() as front:
        session = await front.session("s", agent="support")
        async with session.stream("go") as turn, asyncio.timeout(SOON):
            events = [event async for event in turn]
            assert isinstance(events[-1], WaitingFor)
            assert (await turn.result()).waiting
        async with watching(front, "s") as reader:
            [call] = await session.pending()
            await session.approve(call.call_id)
            await reader.committed("s.1")

    kinds = [type(event) for event in reader.seen]
    assert kinds[0] is TurnStarted
    assert Gap not in kinds
    assert ToolStarted in kinds
    assert ToolFinished in kinds


async def test_a_front_end_steers_and_cancels_the_turn_of_a_worker(file: Place) -> None:
    model = PacedModel()

    @tool
    async def look() -> str:
        """Look."""
        return "seen"

    async with file.runtime(paced(model, tools=[look])) as worker, file.runtime() as front:
        session = await front.session("s", agent="support")
        async with session.stream("go") as turn, asyncio.timeout(SOON):
            events = aiter(turn)
            assert isinstance(await anext(events), TurnStarted)
            await session.steer("and this")
            run = worker._turns.cache.run("s")
            assert run is not None
            await until(lambda: run.journal.inputs)
            model.say([ToolCall("c", "look")])
            while not isinstance(event := await anext(events), InputDelivered):
                assert not isinstance(event, Gap)
            await session.cancel("enough")
            *_, last = [event async for event in events]
            assert isinstance(last, TurnCommitted)
            assert (await turn.result()).outcome.__class__.__name__ == "Cancelled"


async def test_a_front_end_tells_workers_that_it_wrote_and_hears_of_the_end_by_the_event(file: Place) -> None:
    async with file.runtime(echo()) as worker, file.runtime() as front:
        session = await front.session("s", agent="support")
        async with watching(front, "s") as reader:
            # Neither polls its store any more, but for what it is told.
            front._watching.cancel()
            worker._watching.cancel()
            assert worker._parts is not None
            written = worker._parts.activity.written
            await until(lambda: worker._watching.done() and front._watching.done())
            written.clear()
            async with session.stream("hello") as turn:
                await until(written.is_set)
                await worker._watcher.poll()
                assert (await turn.result()).text == "re: hello"
            written.clear()
            receipt = await session.send("again")
            await until(written.is_set)
            await worker._watcher.poll()
            assert (await receipt.result()).text == "re: again"
            await reader.committed("s.2")

    assert reader.kinds == ["TurnStarted", "TextDelta", "TurnCommitted"] * 2


async def test_observing_ends_when_the_session_is_deleted_elsewhere(file: Place) -> None:
    async with file.runtime(echo()) as worker, file.runtime() as front:
        await (await worker.session("s")).run("one")
        session = await front.session("s")
        async with watching(front, "s") as reader:
            await worker.sessions.delete("s")
            await until(lambda: reader._task.done())
        with pytest.raises(SessionDeleted):
            await anext(session.observe())


# ---------------------------------------------------------------------- cursors


async def test_another_front_end_goes_on_from_a_cursor_in_the_middle_of_a_turn(file: Place) -> None:
    model = PacedModel()
    async with file.runtime(paced(model)) as worker:
        async with file.runtime() as front:
            session = await front.session("s", agent="support")
            async with watching(front, "s") as first:
                await session.send("go")
                model.say("a", "b")
                await until(lambda: first.text == "ab")
            cursor = first.seen[-1].cursor
            # Nobody reads now, and the worker goes on.
            model.say("c", "d")
            await until(lambda: worker._parts is not None and model._said.empty())
        async with file.runtime() as front, watching(front, "s", cursor) as second:
            model.say("e", END)
            await second.committed("s.1")

    assert second.text == "cde"
    assert second.kinds == ["TextDelta", "TurnCommitted"]


async def test_a_second_reader_with_an_older_cursor_gets_what_it_missed_once(file: Place) -> None:
    model = PacedModel()
    async with file.runtime(paced(model)), file.runtime() as front:
        session = await front.session("s", agent="support")
        async with watching(front, "s") as first:
            await session.send("go")
            model.say("a")
            await until(lambda: first.text == "a")
            cursor = first.seen[-1].cursor
            model.say("b")
            await until(lambda: first.text == "ab")
        async with file.runtime() as fresh, watching(fresh, "s") as late:
            model.say("c")
            await until(lambda: late.text == "c")
            async with watching(fresh, "s", cursor) as older:
                model.say("d", END)
                await older.committed("s.1")
                await late.committed("s.1")

    assert (older.text, late.text) == ("bcd", "cd")
    assert older.kinds == late.kinds == ["TextDelta", "TurnCommitted"]


async def test_a_cursor_after_a_turn_is_good_without_the_worker_that_ran_it(file: Place) -> None:
    async with file.runtime(echo()), file.runtime() as front:
        session = await front.session("s", agent="support")
        async with watching(front, "s") as reader:
            await session.run("one")
            await reader.committed("s.1")
    async with file.runtime(echo()), file.runtime() as front:
        session = await front.session("s")
        async with watching(front, "s", reader.seen[-1].cursor) as again:
            await session.run("two")
            await again.committed("s.2")

    assert again.kinds == ["TurnStarted", "TextDelta", "TurnCommitted"]


async def test_turns_that_were_committed_meanwhile_are_a_gap_and_the_last_end(file: Place) -> None:
    async with file.runtime(echo()) as worker:
        session = await worker.session("s")
        async with watching(worker, "s") as reader:
            await session.run("one")
            await reader.committed("s.1")
        cursor = reader.seen[-1].cursor
    async with file.runtime(echo()) as worker:
        await (await worker.session("s")).run("two")
    async with file.runtime() as front, watching(front, "s", cursor) as again:
        await again.committed("s.2")

    assert again.kinds == ["Gap", "TurnCommitted"]
    assert isinstance(again.seen[0], Gap)
    assert again.seen[0].last_committed == "s.2"


async def test_after_a_gap_a_front_end_does_not_repeat_what_it_kept_of_committed_turns(file: Place) -> None:
    @tool(approval="ask")
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent = agent_calling("pay", tools=[pay], name="support")
    async with file.runtime() as front, contextlib.AsyncExitStack() as workers:
        worker = await file.runtime(agent).__aenter__()
        session = await front.session("s", agent="support")
        cursor = None
        for turn in ("s.1", "s.2"):
            async with session.stream(turn) as stream, asyncio.timeout(SOON):
                cursor = [event.cursor async for event in stream][-1]
            if turn == "s.1":
                [call] = await session.pending()
                await session.approve(call.call_id)
                await session.result(turn)
        await workers.enter_async_context(file.runtime(agent))
        await crash(worker)
        [call] = await session.pending()
        await session.approve(call.call_id)
        await session.result("s.2")
        async with watching(front, "s", cursor) as reader:
            await session.send("three")
            await until(lambda: any(isinstance(event, WaitingFor) for event in reader.seen))

    assert isinstance(reader.seen[0], Gap)
    assert reader.seen[0].last_committed == "s.2"
    assert {event.turn_id for event in reader.seen[1:]} == {"s.3"}


# ---------------------------------------------------------------------- owners that go


async def test_a_dead_worker_is_a_gap_in_the_middle_of_its_turn(file: Place) -> None:
    model, second = PacedModel(), PacedModel()
    async with file.runtime() as front, contextlib.AsyncExitStack() as workers:
        worker = await file.runtime(paced(model)).__aenter__()
        session = await front.session("s", agent="support")
        async with watching(front, "s") as reader:
            await session.send("go")
            model.say("half of ")
            await until(lambda: reader.text == "half of ")
            await workers.enter_async_context(file.runtime(paced(second)))
            await crash(worker)
            second.say("all of it", END)
            await reader.committed("s.1")

    assert reader.kinds == ["TurnStarted", "TextDelta", "Gap", "TurnStarted", "TextDelta", "TurnCommitted"]
    started = [event for event in reader.seen if isinstance(event, TurnStarted)]
    assert [event.turn_id for event in started] == ["s.1", "s.1"]
    assert reader.text == "half of all of it"


async def test_a_worker_that_is_left_hands_its_turn_over_without_a_gap(file: Place) -> None:
    model, second = PacedModel(), PacedModel()
    async with file.runtime() as front, contextlib.AsyncExitStack() as workers:
        worker = await file.runtime(paced(model), grace=0).__aenter__()
        session = await front.session("s", agent="support")
        async with watching(front, "s") as reader:
            await session.send("go")
            model.say("half of ")
            await until(lambda: reader.text == "half of ")
            await workers.enter_async_context(file.runtime(paced(second)))
            await worker.__aexit__(None, None, None)
            second.say("all of it", END)
            await reader.committed("s.1")

    assert Gap not in [type(event) for event in reader.seen]
    [retracted] = [event for event in reader.seen if isinstance(event, Retracted)]
    assert (retracted.step, retracted.reason) == (1, "the runtime was closed")
    after = reader.seen[reader.seen.index(retracted) + 1 :]
    assert "".join(event.text for event in after if isinstance(event, TextDelta)) == "all of it"


async def test_a_worker_that_dies_between_turns_leaves_no_gap(file: Place) -> None:
    async with file.runtime() as front:
        worker = await file.runtime(echo()).__aenter__()
        session = await front.session("s", agent="support")
        async with watching(front, "s") as reader:
            await session.run("one")
            await reader.committed("s.1")
            await crash(worker)
            async with file.runtime(echo()):
                await session.run("two")
                await reader.committed("s.2")

    assert reader.kinds == ["TurnStarted", "TextDelta", "TurnCommitted"] * 2


async def test_a_broken_connection_to_a_living_worker_is_made_again_without_a_gap(file: Place) -> None:
    model = PacedModel()
    async with file.runtime(paced(model)) as worker, file.runtime() as front:
        session = await front.session("s", agent="support")
        async with watching(front, "s") as reader:
            await session.send("go")
            model.say("a")
            await until(lambda: reader.text == "a")
            for connection in list(worker._live_server.connections):
                connection.abort()
            model.say("b", "c", END)
            await reader.committed("s.1")

    assert reader.text == "abc"
    assert reader.kinds == ["TurnStarted", "TextDelta", "TurnCommitted"]


async def test_two_hundred_readers_of_a_front_end_cost_its_worker_one(file: Place) -> None:
    model = PacedModel()
    async with file.runtime(paced(model)) as worker, file.runtime() as front, contextlib.AsyncExitStack() as readers:
        session = await front.session("s", agent="support")
        all_of_them = [await readers.enter_async_context(watching(front, "s")) for _ in range(200)]
        await session.send("go")
        model.say(*[f"{n} " for n in range(100)], END)
        for reader in all_of_them:
            await reader.committed("s.1")

        assert len(worker._live_server.connections) == 1
        assert worker._parts is not None
        assert len(worker._parts.feed.channel("s").subscribers) == 1
    whole = "".join(f"{n} " for n in range(100))
    assert {reader.text for reader in all_of_them} == {whole}
    assert all(reader.kinds == ["TurnStarted", "TextDelta", "TurnCommitted"] for reader in all_of_them)


async def test_a_front_end_that_follows_nothing_tells_workers_that_it_wrote(file: Place) -> None:
    async with file.runtime(echo()) as worker, file.runtime() as front:
        session = await front.session("s", agent="support")
        # Neither polls its store any more, but for what it is told.
        front._watching.cancel()
        worker._watching.cancel()
        await until(lambda: worker._watching.done() and front._watching.done())
        assert worker._parts is not None
        written = worker._parts.activity.written
        written.clear()

        await session.send("hello")
        await until(written.is_set)
        await worker._watcher.poll()

        assert (await (await worker.session("s")).result("s.1")).text == "re: hello"


async def test_a_front_end_lets_go_of_workers_that_it_told_of_a_write(file: Place) -> None:
    async with file.runtime(echo()) as worker, file.runtime() as front:
        await (await front.session("s", agent="support")).send("hello")
        assert (await (await worker.session("s")).result("s.1")).text == "re: hello"
        assert worker._parts is not None
        assert front._parts is not None
        connections, relay = worker._live_server.connections, front._parts.relay
        await until(lambda: relay._announcing is not None and relay._announcing.done())
        await relay.poll()

        await until(lambda: not connections and not relay._links)


async def test_a_stream_is_told_of_no_gap_before_its_own_turn(file: Place) -> None:
    go = asyncio.Event()

    async def hold(request: ModelRequest) -> str:
        if request.messages[-1].text == "third":
            await go.wait()
        return "answer"

    async with file.runtime(Agent(FunctionModel(hold), name="support")), file.runtime() as front:
        assert front._parts is not None
        session = await front.session("s", agent="support")
        async with session.stream("first") as turn:
            first = [type(event).__name__ async for event in turn]
        await session.run("second")  # nobody watches it
        async with session.stream("third") as turn:
            await front._parts.relay.announce_missed("s")
            go.set()
            third = [type(event).__name__ async for event in turn]

    assert first == third == ["TurnStarted", "TextDelta", "TurnCommitted"]
