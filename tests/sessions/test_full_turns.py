"""A turn has a last record and a session a last input: whatever uses them up, both can go on or come to their end."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, Budget, ModelRequest, Plugin, ToolCall, ToolContext, tool
from perdure.errors import InvalidDefinition, SessionFull, TurnFull
from perdure.model.codec import encode
from perdure.model.ids import MAX_ORDINAL, MAX_TURN
from perdure.model.message import Message, Text
from perdure.model.outcome import BudgetSpent
from perdure.model.record import Ended, Noted, Replied, Said
from perdure.model.session import Node
from perdure.model.tool import Cancelled, Ok, OutcomeUnknown
from perdure.model.write import Accept, Append, Release, TurnScope
from perdure.plugins.hooks import CompactContext
from perdure.stores.memory import MemoryStore
from perdure.stores.rules.rows import PutSession
from perdure.testing import FunctionModel
from tests.kit import Place

OTHER = "another worker"


def asking(*counts: int, **budget: Any) -> tuple[Agent[str], list[str]]:
    """An agent whose model asks for so many calls in each reply of its first turn, and the calls that were made."""
    made: list[str] = []

    @tool
    async def work(ctx: ToolContext[Any]) -> str:
        made.append(ctx.call_id)
        return "done"

    def answer(request: ModelRequest) -> Any:
        if sum(message.role == "user" for message in request.messages) > 1:
            return f"{len(request.messages)} messages"
        step = sum(message.role == "assistant" for message in request.messages)
        return [ToolCall("", "work")] * counts[step] if step < len(counts) else "done"

    return Agent(FunctionModel(answer), name="worker", tools=[work], budget=Budget(**budget)), made


async def test_a_reply_with_more_calls_than_one_may_have_ends_the_turn_and_none_is_made(place: Place) -> None:
    agent, made = asking(1, 1_001)
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")

        assert result.outcome == BudgetSpent("calls_per_reply", 1_000)
        assert made == ["s.1.1.0"]
        assert "1,001 calls" in (await session.history())[-1].text
        assert (await session.run("and now?")).text in ("5 messages", "6 messages")


async def test_the_calls_of_one_more_reply_than_the_turn_may_have_are_not_made(place: Place) -> None:
    agent, made = asking(2, 2, 2, calls=5)
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")

        assert result.outcome == BudgetSpent("calls", 5)
        assert made == ["s.1.1.0", "s.1.1.1", "s.1.2.0", "s.1.2.1"]
        assert [type(call.outcome) for call in result.tool_calls[4:]] == [Cancelled, Cancelled]


async def test_without_a_limit_a_reply_may_not_use_up_the_records_of_its_turn(place: Place) -> None:
    agent, made = asking(70_000, calls=None, calls_per_reply=None)
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")

        assert (await session.run("go")).outcome == BudgetSpent("records", MAX_ORDINAL)
        assert made == []
        assert (await session.run("and now?")).text in ("3 messages", "4 messages")


@pytest.mark.parametrize("name", ["calls", "calls_per_reply"])
def test_a_limit_of_calls_is_a_number(name: str) -> None:
    with pytest.raises(InvalidDefinition, match=name):
        Budget(**{name: -1})


# ---------------------------------------------------------------------- turns that were filled before there were limits


async def filled(place: Place, records: list[bytes], stuck: str | None = "InvalidInput: too many records") -> None:
    """A turn of another worker with these records after its input, as it was left when no more could be written."""
    store = place.store()
    await store.open()
    said = encode(Said(Message("user", (Text("go"),)), op="op"))
    accepted = await store.write(Accept("s", "worker", said, "op", 1, worker=OTHER))
    scope = TurnScope("s", accepted.row.sid, 1, OTHER, accepted.row.generation)
    nodes = tuple(Node(ordinal, body) for ordinal, body in enumerate(records, 1))
    await store.write(Append(scope, nodes, 2))
    await store.write(Release(scope, 3, stuck=stuck))
    await store.close()


def ended(calls: int, of: int) -> list[bytes]:
    """A reply with `of` calls that all have started, of which the first `calls` have ended."""
    parts = tuple([ToolCall(f"c{index}", "work") for index in range(of)])
    reply = Replied(1, parts, started=tuple(range(of)))
    return [encode(reply), *[encode(Ended(f"1.{index}", Ok("done"))) for index in range(calls)]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls", [MAX_ORDINAL - 1, MAX_ORDINAL - 2, MAX_ORDINAL - 100], ids=["full", "one left", "some"]
)
async def test_a_turn_that_was_stuck_for_want_of_records_can_be_cancelled(place: Place, calls: int) -> None:
    await filled(place, ended(calls, MAX_ORDINAL + 20))
    agent, made = asking()
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        assert await session.cancel("enough") == "requested"
        result = await session.result("s.1")

        assert result.outcome == Cancelled("host", "enough")
        assert [type(call.outcome) for call in result.tool_calls] == [Ok] * calls + [OutcomeUnknown] * (
            MAX_ORDINAL + 20 - calls
        )
        assert made == []
        assert (await session.run("and now?")).text == f"{MAX_ORDINAL + 23} messages"
    async with place.runtime(agent) as runtime:
        assert len((await (await runtime.session("s")).result("s.1")).tool_calls) == MAX_ORDINAL + 20


async def test_a_turn_that_was_stuck_for_want_of_records_ends_when_it_is_resumed(place: Place) -> None:
    await filled(place, ended(MAX_ORDINAL - 1, MAX_ORDINAL))
    agent, _ = asking()
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        await session.resume()

        assert (await session.result("s.1")).outcome == BudgetSpent("records", MAX_ORDINAL)


async def test_a_turn_that_has_noted_too_much_ends_before_it_asks_its_model(place: Place) -> None:
    await filled(place, [encode(Noted())] * (MAX_ORDINAL - 10), stuck=None)
    agent, _ = asking()
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).result("s.1")

        assert result.outcome == BudgetSpent("records", MAX_ORDINAL)


class Asker(Plugin):
    """Asks its model beside the turn until it may not any more."""

    id = "asker"

    def __init__(self) -> None:
        self.asked, self.refused = 0, ""

    async def compact(self, ctx: CompactContext) -> None:
        try:
            for number in range(1_000):
                await ctx.host.complete(f"question {number}", label="ask")
                self.asked += 1
        except TurnFull as full:
            self.refused = str(full)


async def test_direct_completions_leave_room_for_the_end_of_their_turn(place: Place) -> None:
    await filled(place, [encode(Noted())] * (MAX_ORDINAL - 300), stuck=None)
    plugin = Asker()
    agent = Agent(FunctionModel(lambda _: "done"), name="worker", plugins=[plugin])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).result("s.1")

        assert 0 < plugin.asked < 100
        assert "s.1" in plugin.refused
        assert result.text == "done"


# ---------------------------------------------------------------------- inputs of a session


async def test_a_session_that_has_had_its_last_input_refuses_the_next_one_and_can_be_forked(tmp_path: Any) -> None:
    place = Place("memory", tmp_path)
    agent, _ = asking()
    async with place.runtime(agent) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        store = runtime.store
        assert isinstance(store, MemoryStore)
        row = await store.session("s")
        assert row is not None
        store.rows.put_session(PutSession(replace(row, next=MAX_TURN + 1)))

        with pytest.raises(SessionFull, match="fork it"):
            await session.run("one more")
        assert (await (await session.fork()).run("one more")).text == "3 messages"
