"""Steering: words for the running turn, delivered at its next boundary."""

import asyncio
from typing import Any

import pytest

from perdure import Agent, Budget, ModelResponse, Runtime, ToolCall, Usage, tool
from perdure.errors import InvalidInput, ProviderError
from perdure.model.event import InputDelivered
from perdure.model.outcome import BudgetSpent
from perdure.model.tool import Cancelled
from perdure.testing import ScriptedModel
from tests.kit import SOON, Place, TellingModel, crash, texts


@tool
async def look() -> str:
    """Look."""
    return "seen"


async def test_steering_reaches_the_turn_after_its_work(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, tools=[look])) as runtime:
        session = await runtime.session("chat")
        running = await session.send("go")
        await model.next()
        steered = await session.steer("left, please")
        model.say([ToolCall("a", "look")])
        request = await model.next()
        model.say("went left")

        assert texts(request.messages)[-1] == "left, please"
        assert (await steered.result(SOON)).turn_id == "chat.1"
        assert (await running.result(SOON)).text == "went left"
        assert [m.role for m in await session.history()] == ["user", "assistant", "tool", "user", "assistant"]


async def test_steering_reaches_the_turn_before_it_completes(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        running = await session.send("go")
        await model.next()
        steered = await session.steer("wait")
        model.say("gone")
        request = await model.next()
        model.say("came back")
        result = await running.result(SOON)

        assert texts(request.messages) == ["go", "gone", "wait"]
        assert result.text == "came back"
        assert (await steered.result(SOON)).turn_id == "chat.1"
        assert texts(await session.history()) == ["go", "gone", "wait", "came back"]


async def test_steering_for_the_end_of_a_turn_lets_its_work_go_on_undisturbed(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, tools=[look])) as runtime:
        session = await runtime.session("chat")
        running = await session.send("go")
        await model.next()
        steered = await session.steer("and then left", boundary="before_completion")
        early = await session.steer("look twice")
        queue = await session.queue()
        model.say([ToolCall("a", "look")])
        first = await model.next()
        model.say([ToolCall("b", "look")])
        second = await model.next()
        model.say("seen")
        third = await model.next()
        model.say("went left")
        result = await running.result(SOON)

        assert [(each.message.text, each.boundary) for each in queue] == [
            ("and then left", "before_completion"),
            ("look twice", "after_work"),
        ]
        assert [texts(each.messages)[-1] for each in (first, second, third)] == ["look twice", "", "and then left"]
        assert (result.text, (await steered.result(SOON)).turn_id) == ("went left", "chat.1")
        assert (await early.result(SOON)).turn_id == "chat.1"


async def test_steering_for_the_end_of_a_turn_is_kept_through_a_crash(place: Place) -> None:
    model = TellingModel()
    first = await place.runtime(Agent(model, tools=[look])).__aenter__()
    session = await first.session("chat")
    await session.send("go")
    await model.next()
    await session.steer("and then left", boundary="before_completion")
    model.say([ToolCall("a", "look")])
    await model.next()
    await crash(first)
    async with place.runtime(Agent(model, tools=[look])) as runtime:
        after_work = await model.next()
        model.say("seen")
        at_the_end = await model.next()
        model.say("went left")
        result = await (await runtime.session("chat")).result("chat.1")

    assert [texts(each.messages)[-1] for each in (after_work, at_the_end)] == ["", "and then left"]
    assert result.text == "went left"


async def test_steering_for_the_end_opens_a_turn_where_none_runs_and_the_next_one_where_none_is_left(
    place: Place,
) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        opening = await session.steer("hello", boundary="before_completion")
        await model.next()
        steered = await session.steer("and?", boundary="before_completion")
        await session.cancel()
        model.say("one", "two")

        assert isinstance((await opening.result(SOON)).outcome, Cancelled)
        assert (await steered.result(SOON)).turn_id == "chat.2"


@pytest.mark.parametrize("boundary", ["opening", "", None, 3])
async def test_boundary_that_there_is_not_is_refused_before_anything_is_written(boundary: Any) -> None:
    async with Runtime("memory", agents=[Agent("scripted")]) as runtime:
        session = await runtime.session("chat")
        with pytest.raises(InvalidInput, match="give 'after_work' or 'before_completion'"):
            await session.steer("hello", boundary=boundary)

        assert await runtime.sessions.list() == []


async def test_steering_right_after_sending_reaches_that_turn(place: Place) -> None:
    """The turn is on disk, but in memory its task has not begun."""
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        running, steered = await session.send("go"), await session.steer("left")
        model.say("one answer", "another")

        assert (await steered.result(SOON)).turn_id == running.turn_id


async def test_steering_an_idle_session_opens_a_turn(place: Place) -> None:
    async with place.runtime(Agent(ScriptedModel(["fine"]))) as runtime:
        session = await runtime.session("chat")
        steered = await session.steer("hello")

        assert steered.turn_id == "chat.1"
        assert (await steered.result(SOON)).text == "fine"


async def test_steering_overtakes_what_is_queued(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        await session.send("go")
        await model.next()
        queued = await session.send("afterwards")
        steered = await session.steer("now")
        model.say("one", "two", "three")

        assert (await steered.result(SOON)).turn_id == "chat.1"
        assert (await queued.result(SOON)).turn_id == "chat.2"
        assert texts(await session.history()) == ["go", "one", "now", "two", "afterwards", "three"]


async def test_several_steered_inputs_arrive_together_and_in_order(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        await session.send("go")
        await model.next()
        receipts = [await session.steer(f"hint {n}") for n in range(3)]
        model.say("gone")
        request = await model.next()
        model.say("back")
        results = [await r.result(SOON) for r in receipts]

        assert texts(request.messages) == ["go", "gone", "hint 0", "hint 1", "hint 2"]
        assert {r.turn_id for r in results} == {"chat.1"}


async def test_a_steered_input_is_announced(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        async with session.stream("go") as turn:
            await model.next()
            await session.steer("left", metadata={"channel": "sms"})
            await session.steer("right")
            model.say("one", "two")
            delivered = [(e.input_id, e.metadata) async for e in turn if isinstance(e, InputDelivered)]

        assert delivered == [("chat.2", {"channel": "sms"}), ("chat.3", {})]


async def test_the_result_of_a_steered_input_is_found_after_a_restart(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        await session.send("go")
        await model.next()
        steered = await session.steer("left")
        model.say("one", "two")
        await steered.result(SOON)
    async with place.runtime(Agent()) as runtime:
        session = await runtime.session("chat")
        result = await session.result(steered.turn_id)

        assert (result.turn_id, result.text) == ("chat.1", "two")
        assert texts(await session.history()) == ["go", "one", "left", "two"]


async def test_a_delivered_input_survives_a_crash_and_is_delivered_once(place: Place) -> None:
    model = TellingModel()
    runtime = await place.runtime(Agent(model, tools=[look])).__aenter__()
    session = await runtime.session("chat")
    await session.send("go")
    await model.next()
    await session.steer("left")
    model.say([ToolCall("a", "look")])
    await model.next()
    await crash(runtime)
    again = ScriptedModel(["done"])
    async with place.runtime(Agent(again, tools=[look])) as runtime:
        session = await runtime.session("chat")
        result = await session.result("chat.1")

        assert result.text == "done"
        assert texts(again.requests[0].messages) == ["go", "", "", "left"]
        assert texts(await session.history()) == ["go", "", "", "left", "done"]


async def test_an_answer_that_spent_the_budget_stands_and_what_was_steered_is_answered_in_the_next_turn(
    place: Place,
) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, budget=Budget(tokens=5))) as runtime:
        session = await runtime.session("chat")
        first = await session.send("go")
        await model.next()
        steered = await session.steer("more")
        model.say(ModelResponse("answer", usage=Usage(input=10)), ModelResponse("more of it", usage=Usage(input=10)))

        assert ((await first.result(SOON)).turn_id, (await first.result(SOON)).text) == ("chat.1", "answer")
        assert ((await steered.result(SOON)).turn_id, (await steered.result(SOON)).text) == ("chat.2", "more of it")
        assert texts(await session.history()) == ["go", "answer", "more", "more of it"]


async def test_what_is_said_while_the_tools_spend_the_budget_is_answered_in_the_next_turn(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, tools=[look], budget=Budget(tokens=5))) as runtime:
        session = await runtime.session("chat")
        first = await session.send("go")
        await model.next()
        steered = await session.steer("more")
        model.say(ModelResponse(tool_calls=(ToolCall("a", "look"),), usage=Usage(input=10)), "here it is")

        assert (await first.result(SOON)).outcome == BudgetSpent("tokens", 5)
        assert ((await steered.result(SOON)).turn_id, (await steered.result(SOON)).text) == ("chat.2", "here it is")


async def test_who_waits_for_a_steered_input_hears_that_its_turn_parked(place: Place) -> None:
    @tool(approval="ask")
    async def shoot() -> str:
        return "bang"

    model = TellingModel()
    async with place.runtime(Agent(model, tools=[look, shoot])) as runtime:
        session = await runtime.session("chat")
        await session.send("go")
        await model.next()
        steered = await session.steer("shoot")
        waiting = asyncio.create_task(steered.result(SOON))
        model.say([ToolCall("a", "look")], [ToolCall("b", "shoot")])

        assert (await waiting).waiting
        assert (await session.result(steered.turn_id)).waiting


async def test_steering_a_parked_turn_waits_for_it_to_go_on(place: Place) -> None:
    @tool(approval="ask")
    async def shoot() -> str:
        return "bang"

    model = ScriptedModel([[ToolCall("a", "shoot")], "shot"])
    async with place.runtime(Agent(model, tools=[shoot])) as runtime:
        session = await runtime.session("chat")
        parked = await session.run("go")
        steered = await session.steer("at the moon")
        assert parked.waiting
        await session.approve("chat.1.1.0")

        assert (await steered.result(SOON)).text == "shot"
        assert texts(model.requests[1].messages)[-1] == "at the moon"


@pytest.mark.parametrize(
    "end", [ModelResponse("half", stop="length"), ProviderError("down")], ids=["cut off", "provider failed"]
)
async def test_steering_that_misses_the_last_boundary_opens_the_next_turn(place: Place, end: Any) -> None:
    """A turn that does not complete has no boundary before its end: what was said to it is not lost."""
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        running = await session.send("go")
        await model.next()
        steered = await session.steer("and this?")
        model.say(end, "yes")
        request = await model.next()
        result = await steered.result(SOON)

        assert type((await running.result(SOON)).outcome).__name__ in ("Incomplete", "ProviderFailed")
        assert texts(request.messages)[-1] == "and this?"
        assert (result.turn_id, result.text) == (steered.turn_id, "yes")


async def test_a_steered_input_may_be_taken_back_before_it_is_delivered(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model)) as runtime:
        session = await runtime.session("chat")
        running = await session.send("go")
        await model.next()
        steered = await session.steer("left, please")
        status = await session.cancel("never mind", turn_id=steered.turn_id)
        model.say("gone")
        result = await running.result(SOON)

        assert status == "requested"
        assert result.text == "gone"
        assert [m.text for m in result.new_messages] == ["go", "gone"]
        assert (await steered.result(SOON)).outcome == Cancelled("host", "never mind")
        assert model.asked.empty()


async def test_a_steered_input_that_was_delivered_is_not_taken_back(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, tools=[look])) as runtime:
        session = await runtime.session("chat")
        running = await session.send("go")
        await model.next()
        steered = await session.steer("left, please")
        model.say([ToolCall("a", "look")])
        await model.next()
        model.say([ToolCall("b", "look")])  # its record tells of the delivery
        await model.next()

        assert await session.cancel(turn_id=steered.turn_id) == "completion_won"
        model.say("went left")
        assert (await running.result(SOON)).text == "went left"
        assert (await steered.result(SOON)).turn_id == running.turn_id
