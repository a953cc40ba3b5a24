"""`session.usage()`: everything a session asked of models is counted once, under the label that asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mainstay import Agent, ModelRequest, ModelResponse, ToolCall, ToolContext, Usage, tool
from mainstay.errors import SessionDeleted
from mainstay.model.outcome import Finished
from mainstay.plugins.hooks import Plugin
from mainstay.plugins.operations import CommandContext, command
from mainstay.testing import FunctionModel
from mainstay.testing.crash import Lab, kill_everywhere
from tests.sessions.places import SOON, Place, TellingModel, crash


class Books:
    """A model that keeps books of its own: who asked, and what it was told it had cost."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, request: ModelRequest) -> Any:
        said = request.messages[-1].text
        self.asked.append("turn" if request.turn_id else said)
        usage = Usage(input=10, output=len(self.asked), cost=0.5)
        if not request.turn_id or request.messages[-1].role == "tool":
            return ModelResponse(f"about {said}", usage=usage)
        return ModelResponse("", [ToolCall("c", "look")], usage=usage, stop="tool_calls")

    def total(self) -> Usage:
        count = len(self.asked)
        return Usage(10 * count, count * (count + 1) // 2, calls=count, cost=0.5 * count)


class Asking(Plugin):
    """Asks a model of its own wherever it can."""

    id = "asking"

    async def _ask(self, ctx: Any, label: str) -> None:
        await ctx.host.complete(label, label=label)

    async def prompt(self, ctx: Any) -> str:
        if ctx.step == 1:
            await self._ask(ctx, "prompt")
        return ""

    async def after_tool_call(self, ctx: Any) -> None:
        await self._ask(ctx, "review")

    async def turn_persisted(self, ctx: Any) -> None:
        await asyncio.gather(ctx.host.complete("after", label="after"), ctx.host.complete("after", label="after"))

    @command
    async def check(self, ctx: CommandContext) -> str:
        """Ask between two turns."""
        return (await ctx.host.complete("check", label="check")).text


@tool
async def look(ctx: ToolContext[Any]) -> str:
    """Look."""
    return (await ctx.host.complete("inside", label="inside")).text


def added(usage: dict[str, Usage]) -> Usage:
    return sum(usage.values(), Usage())


async def test_session_in_which_nothing_was_said_has_cost_nothing(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(Books()), tools=[look])) as runtime:
        assert await (await runtime.session("s")).usage() == {"turns": Usage()}


async def test_everything_that_was_asked_is_counted_once_by_its_label(place: Place) -> None:
    books = Books()
    async with place.runtime(Agent(FunctionModel(books), tools=[look], plugins=[Asking()])) as runtime:
        session = await runtime.session("s")
        first = await session.run("go")
        await session.call("asking.check")
        second = await session.run("again")
        usage = await session.usage()
    async with place.runtime() as runtime:
        later = await (await runtime.session("s")).usage()

    assert {label: each.calls for label, each in usage.items()} == {
        "turns": 4,
        "prompt": 2,
        "inside": 2,
        "review": 2,
        "after": 4,
        "check": 1,
    }
    assert len(books.asked) == 15
    assert added(usage) == books.total()
    assert usage["turns"] == first.usage + second.usage
    assert later == usage


async def test_open_turn_counts_as_far_as_it_is_recorded(place: Place) -> None:
    answered = Books()

    @tool(approval="ask", name="look")
    async def ask_first() -> str:
        """Look, if a person agrees."""
        return "seen"

    async with place.runtime(Agent(FunctionModel(answered), tools=[ask_first])) as runtime:
        session = await runtime.session("s")
        result = await session.run("go")
        assert result.waiting
        waiting = await session.usage()
        await session.send("and then?")  # said, and nothing asked for it yet
        assert await session.usage() == waiting
        [call] = await session.pending()
        await session.approve(call.call_id)
        await session.result("s.1")
        assert await runtime.wait_idle(SOON)

    assert waiting == {"turns": Usage(10, 1, calls=1, cost=0.5)}


async def test_usage_that_a_provider_does_not_tell_is_unknown_and_not_zero(place: Place) -> None:
    def model(request: ModelRequest) -> str:
        return "done"

    class Once(Plugin):
        id = "once"

        async def prompt(self, ctx: Any) -> str:
            await ctx.host.complete("hm?", label="turns")
            return ""

    async with place.runtime(Agent(FunctionModel(model), plugins=[Once()])) as runtime:
        session = await runtime.session("s")
        await session.run("go")

        assert await session.usage() == {"turns": Usage(calls=2, unknown=2)}, "also under a label that is taken"


async def test_two_questions_that_cost_the_same_at_the_same_time_are_both_counted(place: Place) -> None:
    class Reviews(Plugin):
        id = "reviews"

        async def turn_persisted(self, ctx: Any) -> None:
            await asyncio.gather(*[ctx.host.complete("hm?", label="review") for _ in range(5)])

    model = FunctionModel(lambda request: ModelResponse("done", usage=Usage(2, 1)))
    async with place.runtime(Agent(model, plugins=[Reviews()])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        assert await runtime.wait_idle(SOON)

        assert (await session.usage())["review"] == Usage(10, 5, calls=5)


async def test_fork_begins_with_nothing_and_its_source_keeps_what_it_spent(place: Place) -> None:
    books = Books()
    async with place.runtime(Agent(FunctionModel(books), tools=[look], plugins=[Asking()])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        before = await session.usage()
        fork = await session.fork(session_id="fork")
        nothing = await fork.usage()
        await fork.run("go on")
        together = added(await session.usage()) + added(await fork.usage())

        assert await session.usage() == before
    assert (nothing, together) == ({"turns": Usage()}, books.total())


async def test_deleted_session_has_no_usage_to_tell(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(Books()), tools=[look])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await runtime.sessions.delete("s")
        with pytest.raises(SessionDeleted):
            await session.usage()


async def test_long_session_is_added_up_over_many_pieces(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(lambda request: ModelResponse("done", usage=Usage(2, 1))))) as runtime:
        session = await runtime.session("s")
        for n in range(130):
            await session.run(str(n))

        assert await session.usage() == {"turns": Usage(260, 130, calls=130)}


# ---------------------------------------------------------------------- crashes


async def test_what_was_recorded_before_a_crash_is_counted_once_and_what_was_lost_is_unknown(place: Place) -> None:
    died = TellingModel()
    runtime = await place.runtime(Agent(died, name="agent", tools=[look], plugins=[Asking()])).__aenter__()
    receipt = await (await runtime.session("s")).send("go")
    assert not (await died.next()).turn_id
    died.say(ModelResponse("in short", usage=Usage(3, 2)))
    assert (await died.next()).turn_id
    await crash(runtime)  # the completion is recorded, the turn's own question is in flight
    books = Books()
    async with place.runtime(Agent(FunctionModel(books), name="agent", tools=[look], plugins=[Asking()])) as runtime:
        session = await runtime.session("s")
        result = await session.result(receipt.turn_id)
        assert await runtime.wait_idle(SOON)
        usage = await session.usage()

    assert isinstance(result.outcome, Finished)
    assert "prompt" not in books.asked
    assert added(usage) == Usage(3, 2, calls=1, unknown=1) + books.total()


async def spending(lab: Lab) -> None:
    agent = Agent(FunctionModel(Books()), tools=[look], plugins=[Asking()])
    async with lab.runtime([agent]) as runtime:
        session = await runtime.session("s")
        await session.run("go", key="go")
        await runtime.wait_idle(timeout=20)
        usage = added(await session.usage())
        await lab.effect("counted", "s", [usage.calls, usage.unknown])


def test_nothing_is_counted_twice_wherever_it_is_killed_and_only_what_was_in_flight_is_missing() -> None:
    report = kill_everywhere(spending)

    assert (report.lost, report.problems) == (0, [])
    for row in report.rows:
        asked = sum(1 for line in row.played.ledger if line.name == "model")
        calls, unknown = next(line.data for line in reversed(row.played.ledger) if line.name == "counted")
        assert calls <= asked, f"{row.crash}: something is counted twice"
        # A question inside the tool and one of the hook after it may both wait for the record that was never written.
        assert calls + unknown >= asked - 2, f"{row.crash}: {asked} were asked, {calls} counted, {unknown} unknown"
    plain = [line.data for line in report.plain.ledger if line.name == "counted"]
    assert plain == [[7, 0]]
