"""`Runtime(limits=[…])`: what may be spent is never exceeded by our estimates, whoever asks and whatever dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mainstay import Agent, Limit, ModelRequest, ModelResponse, ModelSettings, Price, Runtime, ToolCall, Usage, tool
from mainstay.errors import InvalidDefinition, LimitReached
from mainstay.model.event import LimitNear, LimitWait
from mainstay.model.limit import Account
from mainstay.model.outcome import Finished, ProviderFailed
from mainstay.model.outcome import LimitReached as Reached
from mainstay.model.tool import Cancelled
from mainstay.model.write import Accept, Append, Commit, Write
from mainstay.plugins.hooks import Plugin
from mainstay.plugins.operations import CommandContext, command
from mainstay.stores.memory import MemoryStore
from mainstay.testing import FunctionModel, VirtualClock
from mainstay.testing.crash import Lab, kill_everywhere
from tests.kit import SOON, Place, TellingModel, crash, until

SMALL = ModelSettings(max_tokens=400)


def costing(tokens: int = 100) -> Any:
    return lambda request: ModelResponse("done", usage=Usage(tokens - 10, 10))


async def account(runtime: Runtime, name: str, key: str = "null") -> Account:
    found = [each for each in await runtime.store.accounts() if (each.name, each.key) == (name, key)]
    return found[0] if found else Account(name, key)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "give one of money=, tokens= and turns="),
        ({"money": 5, "turns": 3}, "give one of"),
        ({"money": -1}, r"Limit\(money=-1\) is not usable"),
        ({"money": "much"}, "is not usable"),
        ({"tokens": -5}, r"Limit\(tokens=-5\) is not usable"),
        ({"tokens": 1.5}, "a whole number"),
        ({"turns": True}, "a whole number"),
        ({"turns": 1, "per": "user"}, "'metadata.<key>'"),
        ({"turns": 1, "per": "metadata."}, "'metadata.<key>'"),
        ({"turns": 1, "per": 3}, "'metadata.<key>'"),
        ({"turns": 1, "window": "fortnight"}, "'minute', 'hour', 'day', 'week', 'month'"),
        ({"turns": 1, "window": 0}, "seconds from 1 on"),
        ({"turns": 1, "window": True}, "seconds from 1 on"),
        ({"turns": 1, "warn": 0}, "a part above 0, at most 1"),
    ],
)
def test_limit_that_means_nothing_is_refused_in_words(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidDefinition, match=words):
        Limit(**wrong)


@pytest.mark.parametrize("wrong", [[3], "money", [Limit(turns=1), Limit(turns=2)]])
def test_limits_that_are_none_or_the_same_twice_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidDefinition):
        Runtime("memory", limits=wrong)


@pytest.mark.parametrize(
    ("window", "start"),
    [
        (None, 0),
        ("minute", 1_772_368_260_000),
        ("hour", 1_772_366_400_000),
        ("day", 1_772_323_200_000),
        ("week", 1_771_804_800_000),
        ("month", 1_772_323_200_000),
        (90, 1_772_368_290_000),
    ],
)
def test_windows_begin_with_the_calendar(window: Any, start: int) -> None:
    """2026-03-01 12:31:40 UTC, a Sunday."""
    assert Limit(turns=1, window=window).start(1_772_368_300_000) == start


async def test_model_without_a_price_is_not_asked_where_money_is_limited(place: Place) -> None:
    asked: list[ModelRequest] = []

    def model(request: ModelRequest) -> str:
        asked.append(request)
        return "done"

    agent = Agent(FunctionModel(model, name="house:new"))
    async with place.runtime(agent, limits=[Limit(money=5)], prices={"house:old": Price(1, 1)}) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, ProviderFailed)
    assert result.outcome.code == "price_missing"
    assert "Runtime(prices={'house:new': Price(" in result.outcome.message
    assert asked == []


# ---------------------------------------------------------------------- stopping


async def until_waiting(turn: Any) -> AsyncIterator[LimitWait]:
    """The event of a turn that waits for room, once it does."""
    async for event in turn:
        if isinstance(event, LimitWait):
            yield event
            return


async def test_turn_ends_typed_when_what_may_be_spent_is_spent_and_goes_on_when_that_is_raised(place: Place) -> None:
    agent = Agent(FunctionModel(costing(600)), name="agent", settings=SMALL)
    async with place.runtime(agent, limits=[Limit(tokens=1_000)]) as runtime:
        session = await runtime.session("s")
        first, second = await session.run("go"), await session.run("go on")
        other = await (await runtime.session("other")).run("go")
        assert not await (await runtime.session("other")).resume(), "it ended well"
    async with place.runtime(agent, limits=[Limit(tokens=5_000)]) as runtime:
        session = await runtime.session("s")
        assert await session.resume()
        assert await runtime.wait_idle(SOON)
        last = await session.result("s.3")
        found = await account(runtime, "tokens/session/ever", '"s"')

    assert isinstance(first.outcome, Finished)
    assert second.outcome == Reached("tokens", 1_000, 600, "session", "s")
    assert isinstance(other.outcome, Finished), "another session has a limit of its own"
    assert isinstance(last.outcome, Finished)
    assert (found.spent, found.reserved, found.unknown, found.most) == (1_200, 0, 0, 5_000)


async def test_answer_is_bounded_to_what_is_left(place: Place) -> None:
    bounds: list[int | None] = []

    def model(request: ModelRequest) -> ModelResponse:
        bounds.append(request.settings.max_tokens)
        return ModelResponse("done", usage=Usage(300, 200))

    async with place.runtime(Agent(FunctionModel(model), settings=ModelSettings(max_tokens=900)),
                             limits=[Limit(tokens=1_100, per="all")]) as runtime:  # fmt: skip
        session = await runtime.session("s")
        results = [await session.run("go") for _ in range(3)]
        found = await account(runtime, "tokens/all/ever")

    assert bounds[0] == 900
    assert bounds[1] is not None
    assert 256 <= bounds[1] < 600
    assert len(bounds) == 2
    assert isinstance(results[2].outcome, Reached)
    assert (found.spent, found.reserved) == (1_000, 0)


async def test_call_waits_while_others_may_give_back_what_they_reserved(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, settings=SMALL), limits=[Limit(tokens=750, per="all")]) as runtime:
        one, two = await runtime.session("one"), await runtime.session("two")
        first = await one.send("go")
        await model.next()
        async with two.stream("go") as turn, asyncio.timeout(SOON):
            waits = [event async for event in until_waiting(turn)]
            assert ([each.name for each in waits], model.asked.qsize()) == (["tokens/all/ever"], 0)
            model.say(ModelResponse("done", usage=Usage(90, 10)))
            await model.next()
            model.say(ModelResponse("done", usage=Usage(90, 10)))
            second = await turn.result()
        assert isinstance((await first.result()).outcome, Finished)
        found = await account(runtime, "tokens/all/ever")

    assert isinstance(second.outcome, Finished)
    assert (found.spent, found.reserved) == (200, 0)


async def test_turn_that_waits_for_room_can_be_cancelled(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, settings=SMALL), limits=[Limit(tokens=750, per="all")]) as runtime:
        await (await runtime.session("one")).send("go")
        await model.next()
        two = await runtime.session("two")
        async with two.stream("go") as turn, asyncio.timeout(SOON):
            async for event in turn:
                if isinstance(event, LimitWait):
                    await two.cancel()
            result = await turn.result()
        model.say("done")
        assert await runtime.wait_idle(SOON)

    assert isinstance(result.outcome, Cancelled)


async def test_turns_are_counted_per_user_and_day_over_restarts(place: Place) -> None:
    clock = VirtualClock()
    agent = Agent(FunctionModel(costing()), name="agent")
    limits = [Limit(turns=2, per="metadata.user", window="day")]

    async def outcomes(*said: tuple[str, str]) -> list[str]:
        async with place.runtime(agent, limits=limits, clock=clock) as runtime:
            found = []
            for session, user in said:
                opened = await runtime.session(session, metadata={"user": user})
                found.append(type((await opened.run("go")).outcome).__name__)
            return found

    assert await outcomes(("a", "ann"), ("b", "bob")) == ["Finished", "Finished"]
    assert await outcomes(("a2", "ann"), ("a", "ann"), ("b", "bob")) == ["Finished", "LimitReached", "Finished"]
    clock.advance(86_400)
    assert await outcomes(("a", "ann")) == ["Finished"]


async def test_money_is_counted_to_the_last_digit_and_a_turn_hears_that_it_is_nearly_spent(place: Place) -> None:
    agent = Agent(FunctionModel(costing(1_000), name="house:large"), name="agent", settings=SMALL)
    prices = {"house:large": Price(input="0.15", output="0.6")}
    async with place.runtime(agent, limits=[Limit(money="0.001", per="agent")], prices=prices) as runtime:
        session = await runtime.session("s")
        heard, last = [], None
        for _ in range(4):
            async with session.stream("go") as turn:
                heard.append([event async for event in turn if isinstance(event, LimitNear)])
            last = await turn.result()
        found = await account(runtime, "money/agent/ever", '"agent"')

    assert found.spent == 4 * 154_500
    assert [len(each) for each in heard] == [0, 0, 0, 1]
    assert (heard[3][0].name, heard[3][0].key, heard[3][0].limit) == ("money/agent/ever", "agent", 0.001)
    assert last is not None
    assert isinstance(last.outcome, Finished)


# ---------------------------------------------------------------------- who counts


class Aside(Plugin):
    """Asks a model beside the conversation."""

    id = "aside"

    async def prompt(self, ctx: Any) -> str:
        await ctx.host.complete("hm?", label="aside")
        return ""

    @command
    async def ask(self, ctx: CommandContext) -> str:
        """Ask between two turns."""
        return (await ctx.host.complete("hm?", label="aside")).text


async def test_direct_completions_count_and_are_refused_like_turns(place: Place) -> None:
    agent = Agent(FunctionModel(costing(100)), settings=SMALL, plugins=[Aside()])
    async with place.runtime(agent, limits=[Limit(tokens=9_000)]) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.call("aside.ask")
        found = await account(runtime, "tokens/session/ever", '"s"')
    async with place.runtime(agent, limits=[Limit(tokens=350)]) as runtime:
        session = await runtime.session("s")
        with pytest.raises(Exception, match="the limit of 350 tokens of session 's' is spent"):
            await session.call("aside.ask")
        after, left = await account(runtime, "tokens/session/ever", '"s"'), await runtime.store.reservations()

    assert (found.spent, found.reserved, found.unknown) == (300, 0, 0)
    assert (after.spent, after.reserved) == (300, 0)
    assert left == []


@pytest.mark.parametrize("many", [50])
async def test_fifty_subagents_at_once_stay_within_the_limit_of_their_root(place: Place, many: int) -> None:
    """The model keeps books of its own: what it has answered with, and what was promised to those it is answering."""
    books = {"spent": 0, "asked": 0}

    async def answer(request: ModelRequest) -> Any:
        if request.messages[-1].role == "user" and request.messages[-1].text == "share it out":
            calls = [ToolCall(f"c{n}", "helper", {"task": f"part {n}"}) for n in range(many)]
            return ModelResponse("", calls, usage=Usage(50, 50), stop="tool_calls")
        books["asked"] += 1
        await asyncio.sleep(0)
        output = request.settings.max_tokens or 0
        books["spent"] += 20 + output
        return ModelResponse("done", usage=Usage(20, output))

    helper = Agent(FunctionModel(answer), name="helper", instructions="Help.", settings=SMALL)
    boss = Agent(FunctionModel(answer), name="boss", tools=[helper.as_tool()], settings=SMALL)
    async with place.runtime(boss, helper, limits=[Limit(tokens=12_000)]) as runtime:
        result = await (await runtime.session("root")).run("share it out")
        found = await account(runtime, "tokens/session/ever", '"root"')
        left = await runtime.store.reservations()

    ended = [type(call.outcome).__name__ for call in result.tool_calls]
    assert found.spent == books["spent"] + 100
    assert (found.reserved, [each for each in left if each.holds]) == (0, [])
    assert found.spent <= 12_000
    assert 15 <= ended.count("Ok") < many
    assert ended.count("Ok") + ended.count("Failed") == many


# ---------------------------------------------------------------------- writes, and dying in them


class Counting(MemoryStore):
    writes: list[str]

    async def write(self, write: Write[Any]) -> Any:
        if isinstance(write, Accept | Append | Commit):
            self.writes.append(type(write).__name__)
        return await super().write(write)


async def test_limit_takes_no_transaction_of_its_own_in_a_plain_turn() -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    def model(request: ModelRequest) -> Any:
        if request.messages[-1].role == "tool":
            return ModelResponse("done", usage=Usage(90, 10))
        return ModelResponse("", [ToolCall("c", "look")], usage=Usage(90, 10), stop="tool_calls")

    store = Counting()
    store.writes = []
    async with Runtime(
        store, agents=[Agent(FunctionModel(model), tools=[look])], limits=[Limit(tokens=90_000)]
    ) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.run("go on")
        found = await account(runtime, "tokens/session/ever", '"s"')

    assert store.writes == ["Accept", "Append", "Append", "Commit"] * 2
    assert (found.spent, found.reserved) == (400, 0)


async def test_call_that_a_crash_cuts_off_counts_as_what_was_reserved_for_it(place: Place) -> None:
    died, limits = TellingModel(), [Limit(tokens=5_000)]
    runtime = await place.runtime(Agent(died, name="agent", settings=SMALL), limits=limits).__aenter__()
    await (await runtime.session("s")).send("go")
    await died.next()
    [held] = await runtime.store.reservations()
    await crash(runtime)
    agent = Agent(FunctionModel(costing(100)), name="agent", settings=SMALL)
    async with place.runtime(agent, limits=limits) as runtime:
        session = await runtime.session("s")
        async with asyncio.timeout(SOON):
            result = await session.result("s.1")
        found = await account(runtime, "tokens/session/ever", '"s"')

    assert isinstance(result.outcome, Finished)
    assert held.holds[0].amount > 400
    assert (found.spent, found.unknown, found.reserved) == (held.holds[0].amount + 100, 1, 0)


async def test_completion_outside_of_turns_that_a_crash_cuts_off_counts_as_reserved(place: Place) -> None:
    died, limits = TellingModel(), [Limit(tokens=5_000)]
    runtime = await place.runtime(
        Agent(died, name="agent", settings=SMALL, plugins=[Aside()]), limits=limits
    ).__aenter__()
    call = asyncio.create_task((await runtime.session("s")).call("aside.ask"))
    await died.next()
    [held] = await runtime.store.reservations()
    await crash(runtime)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    async with place.runtime(Agent(FunctionModel(costing()), name="agent"), limits=limits) as runtime:

        async def settled() -> bool:
            return await runtime.store.reservations() == []

        await until(settled)
        found = await account(runtime, "tokens/session/ever", '"s"')

    assert (found.spent, found.unknown, found.reserved) == (held.holds[0].amount, 1, 0)


async def limited(lab: Lab) -> None:
    @tool(recovery="rerun")
    async def look() -> str:
        """Look."""
        await lab.effect("looked", "look")
        return "seen"

    def model(request: ModelRequest) -> Any:
        if request.messages[-1].role == "tool":
            return ModelResponse("done", usage=Usage(90, 10))
        return ModelResponse("", [ToolCall("c", "look")], usage=Usage(90, 10), stop="tool_calls")

    agent = Agent(FunctionModel(model), tools=[look], settings=SMALL)
    limits = [Limit(tokens=50_000), Limit(turns=10, per="all")]
    async with lab.runtime([agent], limits=limits) as runtime:
        session = await runtime.session("s")
        await session.run("go", key="go")
        await runtime.wait_idle(timeout=60)
        tokens = await account(runtime, "tokens/session/ever", '"s"')
        turns = await account(runtime, "turns/all/ever")
        held = [each for each in await runtime.store.reservations() if each.holds]
        await lab.effect("counted", "s", [tokens.spent, tokens.reserved, tokens.unknown, turns.spent, len(held)])


def test_wherever_the_process_dies_every_call_is_counted_and_nothing_stays_reserved() -> None:
    report = kill_everywhere(limited)

    assert (report.lost, report.problems, report.unreached) == (0, [], [])
    for row in report.rows:
        asked = sum(1 for line in row.played.ledger if line.name == "model")
        spent, reserved, unknown, turns, held = next(
            line.data for line in reversed(row.played.ledger) if line.name == "counted"
        )
        assert (reserved, turns, held) == (0, 1, 0), str(row.crash)
        assert spent >= 200 + 400 * unknown, f"{row.crash}: {spent}"
        assert 2 + unknown >= asked, f"{row.crash}: {asked} were asked, {unknown} of them not known"
    assert [line.data for line in report.plain.ledger if line.name == "counted"] == [[200, 0, 0, 1, 0]]


def test_limit_that_is_spent_says_what_to_do() -> None:
    refused = LimitReached("money", 5, 5.2, "metadata.user", "ann", "day")

    assert str(refused) == (
        "the limit of 5 money a day of metadata.user 'ann' is spent (5.2): raise it in Runtime(limits=[…]) and call "
        "session.resume(), or wait for the next window"
    )
