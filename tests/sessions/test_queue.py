"""`session.queue()`: what waits in a session, and cancelling it."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, Runtime
from perdure.errors import InvalidInput, UnknownTurn
from perdure.model.tool import Cancelled
from tests.kit import Place, TellingModel, crash, untyped


async def test_what_waits_is_listed_in_order_and_the_running_turn_is_not() -> None:
    model = TellingModel()
    async with Runtime("memory", agents=[Agent(model)]) as runtime:
        session = await runtime.session("chat")
        await session.send("first")
        await model.next()
        await session.send("second", key="k-2", metadata={"source": "mail"})
        await session.steer("third")
        queue = await session.queue()
        empty = await (await runtime.session("another")).queue()
        model.say("one", "two", "three")

    assert [(each.turn_id, each.kind, each.message.text) for each in queue] == [
        ("chat.2", "queue", "second"),
        ("chat.3", "steer", "third"),
    ]
    assert (queue[0].key, queue[0].metadata) == ("k-2", {"source": "mail"})
    assert len(empty) == 0


async def test_one_some_or_all_are_cancelled_and_the_others_run(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        receipts = [await session.send(f"input {number}") for number in range(1, 6)]
        await model.next()
        queue = await session.queue()
        one = await queue.cancel("chat.2", reason="not needed")
        some = await queue.cancel(queue[1], "chat.2")
        rest = [each.turn_id for each in await session.queue()]
        model.say("one", "four", "five")
        results = [await receipt.result() for receipt in receipts]

    assert one == {"chat.2": "cancelled"}
    assert some == {"chat.3": "cancelled", "chat.2": "already_cancelled"}
    assert rest == ["chat.4", "chat.5"]
    assert [result.outcome for result in results[1:3]] == [Cancelled("host", "not needed"), Cancelled("host", "")]
    assert [result.text for result in results if not isinstance(result.outcome, Cancelled)] == ["one", "four", "five"]


async def test_all_of_a_list_is_cancelled_in_one_write_and_what_came_later_is_not() -> None:
    model = TellingModel()
    async with Runtime("memory", agents=[Agent(model)]) as runtime:
        session = await runtime.session("chat")
        await session.send("first")
        await model.next()
        await session.send("second")
        await session.steer("third")
        queue = await session.queue()
        later = await session.send("later")
        statuses = await queue.cancel()
        model.say("one", "later")
        result = await later.result()

    assert statuses == {"chat.2": "cancelled", "chat.3": "cancelled"}
    assert result.text == "later"


async def test_an_input_that_was_taken_meanwhile_says_so_and_goes_on() -> None:
    model = TellingModel()
    async with Runtime("memory", agents=[Agent(model)]) as runtime:
        session = await runtime.session("chat")
        await session.send("first")
        await model.next()
        second = await session.send("second")
        queue = await session.queue()
        model.say("one")
        await model.next()
        statuses = await queue.cancel()
        model.say("two")
        result = await second.result()
        after = await queue.cancel()

    assert (statuses, after) == ({"chat.2": "taken"}, {"chat.2": "taken"})
    assert result.text == "two"


async def test_a_cancelled_input_stays_cancelled_after_a_crash(place: Place) -> None:
    model = TellingModel()
    first = await place.runtime(Agent(model)).__aenter__()
    session = await first.session("chat")
    await session.send("first")
    await model.next()
    await session.send("second")
    await (await session.queue()).cancel()
    await crash(first)
    model.say("one")
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        result = await session.result("chat.2")
        queue = await session.queue()

    assert isinstance(result.outcome, Cancelled)
    assert len(queue) == 0


async def test_what_was_never_said_is_unknown_and_ids_of_others_are_refused_before_anything_is_written() -> None:
    model = TellingModel()
    async with Runtime("memory", agents=[Agent(model)]) as runtime:
        session = await runtime.session("chat")
        await session.send("first")
        await model.next()
        await session.send("second")
        queue = await session.queue()
        unknown = await queue.cancel("chat.99")
        with pytest.raises(UnknownTurn):
            await queue.cancel("chat.2", "another.2")
        left = [each.turn_id for each in await session.queue()]
        model.say("one", "two")

    assert unknown == {"chat.99": "unknown"}
    assert left == ["chat.2"]


@pytest.mark.parametrize("given", [7, "nonsense", None])
async def test_what_is_no_turn_id_is_refused(given: Any) -> None:
    async with Runtime("memory", agents=[Agent("scripted")]) as runtime:
        queue = await (await runtime.session("chat")).queue()
        with pytest.raises((InvalidInput, UnknownTurn)):
            await queue.cancel(untyped(given))
