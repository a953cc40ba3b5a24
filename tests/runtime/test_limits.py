"""`Runtime(limits=[…])`: what may be spent is never exceeded by our estimates, whoever asks and whatever dies."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from perdure import (
    Agent,
    Budget,
    Limit,
    ModelRequest,
    ModelResponse,
    ModelSettings,
    Price,
    RateLimit,
    Runtime,
    ToolCall,
    ToolContext,
    ToolResult,
    Usage,
    tool,
)
from perdure.engine.limits import RequestSizes, size_of
from perdure.errors import InvalidDefinition, LimitReached, ProviderError
from perdure.model.event import LimitNear, LimitWait, RateLimitWait
from perdure.model.limit import Account, parts_of
from perdure.model.message import Audio, Document, Image, Message, Role, Stored, Text, Url
from perdure.model.message import ToolCall as Called
from perdure.model.outcome import BudgetSpent, Finished, ProviderFailed
from perdure.model.outcome import LimitReached as Reached
from perdure.model.tool import Cancelled, Ok, ToolSpec
from perdure.model.write import Accept, Append, Commit, Write
from perdure.plugins.hooks import Plugin
from perdure.plugins.operations import CommandContext, command
from perdure.providers.dialect import Timeouts
from perdure.providers.fallback import Fallback
from perdure.providers.http import HttpProvider, no_key
from perdure.providers.openai_chat import ChatCompletions, Quirks
from perdure.stores.memory import MemoryStore
from perdure.testing import FunctionModel, VirtualClock
from perdure.testing.crash import Lab, kill_everywhere
from perdure.testing.model_server import ModelServer, Reply
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
        ({"turns": 1, "per": "metadata.\ud800"}, "'metadata.<key>'"),  # no store could keep it
        ({"turns": 1, "per": "metadata.a\0b"}, "'metadata.<key>'"),
        ({"money": 10**10}, "an amount from 0 to 4,611,686,018"),  # integers of a store have 64 bits
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


def test_every_month_and_week_begins_where_the_calendar_says() -> None:
    for days in range(0, 400 * 366, 13):
        day = datetime.date(1970, 1, 1) + datetime.timedelta(days)
        for at in (days * 86_400_000, days * 86_400_000 + 86_399_999):
            month, week = Limit(turns=1, window="month").start(at), Limit(turns=1, window="week").start(at)
            assert datetime.date(1970, 1, 1) + datetime.timedelta(milliseconds=month) == day.replace(day=1)
            assert week == max((days - day.weekday()) * 86_400_000, -3 * 86_400_000)


@pytest.mark.parametrize("window", [None, "month", 1, 90.5, 86_400, 1_000_000, 1_000_001, 2_592_000, 1_234_567.25])
@pytest.mark.parametrize("per", ["all", "metadata.user", "metadata.a/b"])
def test_name_of_a_limit_tells_what_it_bounds(per: str, window: Any) -> None:
    """Accounts are found by it, and doctor reads it."""
    assert parts_of(Limit(tokens=1, per=per, window=window).name) == ("tokens", per, window)


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


class TablePrices:
    """A table of the host's own that gives whatever it is made with."""

    def __init__(self, price: Any, cost: Any) -> None:
        self._price, self._cost = price, cost

    def price(self, model: str) -> Any:
        return self._price() if callable(self._price) else self._price

    def cost(self, model: str, usage: Usage) -> Any:
        return self._cost() if callable(self._cost) else self._cost


def failing() -> Any:
    raise KeyError("house:large")


@pytest.mark.parametrize("price", [failing, 3, "1"])
async def test_table_that_gives_no_price_ends_the_turn_before_the_model_is_asked(price: Any) -> None:
    model = FunctionModel(costing(), name="house:large")
    table = TablePrices(price, None)
    async with Runtime("memory", agents=[Agent(model)], limits=[Limit(money=5)], prices=table) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, ProviderFailed)
    assert (result.outcome.code, model.requests) == ("price_missing", 0)


@pytest.mark.parametrize("cost", [failing, -3, "much", float("nan"), True])
@pytest.mark.parametrize("limited", [True, False])
async def test_answer_is_kept_where_the_table_of_prices_gives_no_cost_of_it(cost: Any, limited: bool) -> None:
    """An answer that was paid for is not asked for again. Where money is limited it counts as it was reserved."""
    model, limits = FunctionModel(costing(), name="house:large"), [Limit(money=5, per="all")] if limited else []
    agent = Agent(model, settings=SMALL)
    async with Runtime("memory", agents=[agent], limits=limits, prices=TablePrices(Price(1, 1), cost)) as runtime:
        result = await (await runtime.session("s")).run("go")
        found = await account(runtime, "money/all/ever")

    assert isinstance(result.outcome, Finished)
    assert (result.usage.cost, model.requests) == (None, 1)
    assert (found.spent > 400_000, found.unknown) == (limited, int(limited))


async def test_budget_of_money_refuses_a_model_whose_price_is_not_known_before_the_call(place: Place) -> None:
    model = TellingModel()
    async with place.runtime(Agent(model, budget=Budget(money=1)), prices={"other": Price(1, 1)}) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, ProviderFailed)
    assert (result.outcome.code, model.asked.qsize()) == ("price_missing", 0)


async def test_budget_of_money_counts_by_the_table_of_prices() -> None:
    def tireless(request: ModelRequest) -> ModelResponse:
        return ModelResponse("", [ToolCall("", "look")], usage=Usage(1_000_000, 0), stop="tool_calls")

    @tool
    def look() -> str:
        """Look."""
        return "seen"

    agent = Agent(FunctionModel(tireless, name="house:large"), tools=[look], budget=Budget(money=2.5))
    async with Runtime("memory", agents=[agent], prices={"house:large": Price(1, 1)}) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert (result.outcome, result.usage.cost) == (BudgetSpent("money", 2.5), Decimal(3))


async def test_cost_beyond_all_figures_spends_a_limit_and_is_no_fault_of_the_store(place: Place) -> None:
    huge = Usage(2**53 - 1, 2**53 - 1, cost="9007199254740000")
    agent = Agent(FunctionModel(lambda request: ModelResponse("done", usage=huge), name="house:large"), settings=SMALL)
    limits = [Limit(money=4 * 10**9, per="all"), Limit(tokens=2**53 - 1, per="all")]
    async with place.runtime(agent, limits=limits, prices={"house:large": Price(1, 1)}) as runtime:
        session = await runtime.session("s")
        outcomes = [type((await session.run("go")).outcome) for _ in range(2)]
        found = await account(runtime, "money/all/ever")

    assert outcomes == [Finished, Reached]
    assert found.spent == 2**62


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
        assert not await session.resume(), "it is not stuck"
        last = await asyncio.wait_for(session.retry(), SOON)
        found = await account(runtime, "tokens/session/ever", '"s"')

    assert isinstance(first.outcome, Finished)
    assert second.outcome == Reached("tokens", Decimal(1_000), Decimal(600), "session", "s")
    assert isinstance(second.outcome, Reached)
    assert (type(second.outcome.limit), type(second.outcome.spent)) == (Decimal, Decimal)
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


@pytest.mark.parametrize(
    ("limit", "usage", "finished", "spent"),
    [
        (Limit(turns=0), Usage(10, 10), 0, 0),
        (Limit(tokens=0), Usage(10, 10), 0, 0),
        (Limit(money=0), Usage(10, 10), 0, 0),
        (Limit(tokens=2_000), Usage(900, 100), 2, 2_000),  # spent to the last one
        (Limit(tokens=2_000), Usage(10, 1_990), 1, 2_000),  # the answer is longer than it may be
        (Limit(tokens=3_000), Usage(10, 5, cache_read=1_480, cache_write=5), 2, 3_000),  # the cached ones count
        (Limit(tokens=500), Usage(0, 0), 3, 0),
        (Limit(money=1), Usage(10, 10, cost=Decimal("0.5")), 2, 1),  # what the provider reports, not the table
        (Limit(money=1), Usage(10, 10, cost=Decimal(0)), 3, 0),
    ],
)
async def test_limits_at_their_bounds(limit: Limit, usage: Usage, finished: int, spent: int) -> None:
    model = FunctionModel(lambda request: ModelResponse("done", usage=usage), name="house:model")
    agent = Agent(model, name="a", settings=SMALL)
    prices = {"house:model": Price(input=1, output=2)}
    async with Runtime("memory", agents=[agent], limits=[limit], prices=prices) as runtime:
        session = await runtime.session("s")
        outcomes = [(await session.run("go")).outcome for _ in range(3)]
        counted = await account(runtime, limit.name, '"s"')

    assert [type(each) for each in outcomes] == [Finished] * finished + [Reached] * (3 - finished)
    assert (counted.spent, counted.reserved) == (spent * 10**9 if limit.kind == "money" else spent, 0)


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


async def test_completions_of_calls_that_run_at_once_are_all_counted(place: Place) -> None:
    """They ask in the same writes, each for itself."""

    @tool
    async def look(ctx: ToolContext[Any], n: int) -> str:
        """Look."""
        return str((await ctx.host.complete(f"hm {n}?", label="inside")).text)

    def model(request: ModelRequest) -> Any:
        if request.turn_id and request.messages[-1].role != "tool":
            calls = [ToolCall(f"c{n}", "look", {"n": n}) for n in range(8)]
            return ModelResponse("", calls, usage=Usage(90, 10), stop="tool_calls")
        return ModelResponse("done", usage=Usage(90, 10))

    agent = Agent(FunctionModel(model), tools=[look], settings=SMALL)
    async with place.runtime(agent, limits=[Limit(tokens=900_000)]) as runtime:
        result = await (await runtime.session("s")).run("go")
        found = await account(runtime, "tokens/session/ever", '"s"')

    assert [type(call.outcome).__name__ for call in result.tool_calls] == ["Ok"] * 8
    assert (found.spent, found.reserved, found.unknown) == (1_000, 0, 0)


async def test_call_that_a_tool_waits_for_does_not_wait_for_what_the_tool_has_asked_before(place: Place) -> None:
    runtimes: list[Runtime] = []

    @tool
    async def look(ctx: ToolContext[Any]) -> str:
        """Look."""
        await ctx.host.complete("hm?", label="inside", settings=SMALL)
        other = await runtimes[0].session("other", agent="helper")
        return type((await other.run("hm?")).outcome).__name__

    def model(request: ModelRequest) -> Any:
        if request.turn_id.startswith("s.") and request.messages[-1].role != "tool":
            return ModelResponse("", [ToolCall("c", "look")], usage=Usage(90, 10), stop="tool_calls")
        return ModelResponse("done", usage=Usage(40, 10))

    boss = Agent(FunctionModel(model), name="boss", tools=[look], settings=SMALL)
    helper = Agent(FunctionModel(model), name="helper", settings=SMALL)
    async with place.runtime(boss, helper, limits=[Limit(tokens=900, per="all")]) as runtime, asyncio.timeout(SOON):
        runtimes.append(runtime)
        result = await (await runtime.session("s", agent="boss")).run("go")

    assert [call.outcome for call in result.tool_calls] == [Ok("Finished")]


class Breaking:
    """Breaks off its answers beside the conversation, then gives one with a usage that is none."""

    name = "breaking"

    def __init__(self, breaks: int) -> None:
        self.asked, self._breaks = 0, breaks

    async def stream(self, request: ModelRequest) -> AsyncIterator[Any]:
        if request.turn_id and request.label == "turn":
            yield ModelResponse("done", usage=Usage(90, 10))
            return
        self.asked += 1
        yield "d"
        if self.asked <= self._breaks:
            raise ProviderError("broke off", retryable=True, after=0.0, code="broken_stream")
        yield ModelResponse("done", usage=Usage(-90, 10))


@pytest.mark.parametrize("outside", [True, False])
async def test_each_attempt_of_a_completion_that_was_answered_in_part_counts_as_reserved(
    place: Place, outside: bool
) -> None:
    """Also one that is answered in whole with a usage that makes no sense."""
    model = Breaking(2)

    class Beside(Aside):
        async def prompt(self, ctx: Any) -> str:
            if not outside:
                with pytest.raises(ProviderError, match="reported a usage"):
                    await ctx.host.complete("hm?", label="aside")
            return ""

    async with place.runtime(
        Agent(model, plugins=[Beside()], settings=SMALL), limits=[Limit(tokens=900_000, per="all")]
    ) as runtime:
        session = await runtime.session("s")
        if outside:
            with pytest.raises(Exception, match="reported a usage"):
                await session.call("aside.ask")
        else:
            await session.run("go")
        found, usage = await account(runtime, "tokens/all/ever"), await session.usage()
        left = [each for each in await runtime.store.reservations() if each.holds]

    assert (model.asked, found.unknown, found.reserved, left) == (3, 3, 0, [])
    assert found.spent > 3 * 8_192
    assert usage["aside"] == Usage(unknown=3)


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


@pytest.mark.parametrize(
    ("told", "spent"),
    [(Usage(None, 10), "input"), (Usage(90, None), "output"), (Usage(), "both"), (None, "both"), (Usage(90, 10), "")],
)
async def test_half_that_a_provider_does_not_tell_counts_as_reserved(told: Usage | None, spent: str) -> None:
    agent = Agent(FunctionModel(lambda request: ModelResponse("done", usage=told)), settings=SMALL)
    async with Runtime("memory", agents=[agent], limits=[Limit(tokens=90_000, per="all")]) as runtime:
        await (await runtime.session("s")).run("go " * 1_000)
        found = await account(runtime, "tokens/all/ever")

    low = {"input": 1_010, "output": 490, "both": 1_400, "": 100}[spent]
    assert low <= found.spent <= (low if spent in ("output", "") else low + 500)
    assert found.unknown == (spent == "both")


async def test_call_that_is_cancelled_before_its_answer_begins_counts_as_reserved(place: Place) -> None:
    """Its provider has the request, and may have been paid."""
    model = TellingModel()
    async with place.runtime(Agent(model, settings=SMALL), limits=[Limit(tokens=7_500, per="all")]) as runtime:
        session = await runtime.session("s")
        turn = await session.send("go")
        await model.next()
        await session.cancel()
        await turn.result()
        found = await account(runtime, "tokens/all/ever")

    assert (found.unknown, found.reserved) == (1, 0)
    assert found.spent > 400


def over_http(url: str) -> HttpProvider:
    times = Timeouts(first_byte=0.05)
    return HttpProvider(
        ChatCompletions("house", Quirks()), "large", name="house", base_url=url, authorise=no_key, timeouts=times
    )


async def test_call_whose_answer_does_not_begin_in_time_counts_as_reserved() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    mute = await asyncio.start_server(never, "127.0.0.1", 0)
    async with mute:
        model = over_http(f"http://127.0.0.1:{mute.sockets[0].getsockname()[1]}")
        agent = Agent(Fallback(model, FunctionModel(costing())), settings=SMALL)
        async with Runtime("memory", agents=[agent], limits=[Limit(tokens=7_500, per="all")]) as runtime:
            result = await (await runtime.session("s")).run("go")
            found = await account(runtime, "tokens/all/ever")

    assert isinstance(result.outcome, Finished)
    assert (found.unknown, found.reserved, result.usage.unknown) == (1, 0, 1)


async def test_call_that_a_provider_refuses_takes_nothing_of_a_limit() -> None:
    async with ModelServer([Reply.error(400, {"error": {"message": "no"}})]) as server:
        agent = Agent(over_http(server.url), settings=SMALL)
        async with Runtime("memory", agents=[agent], limits=[Limit(tokens=7_500, per="all")]) as runtime:
            result = await (await runtime.session("s")).run("go")
            found = await account(runtime, "tokens/all/ever")

    assert isinstance(result.outcome, ProviderFailed)
    assert (found.unknown, found.reserved, found.spent) == (0, 0, 0)


async def test_what_was_reserved_and_not_used_is_given_back_when_the_runtime_is_left(place: Place) -> None:
    model, limits = TellingModel(), [Limit(tokens=7_500, per="all")]
    options: dict[str, Any] = {"limits": limits, "rate_limits": {"telling": RateLimit(concurrency=1)}}
    async with place.runtime(Agent(model, settings=SMALL), grace=0, **options) as runtime:
        await (await runtime.session("one")).send("go")
        await model.next()
        two = await runtime.session("two")
        async with two.stream("go") as turn, asyncio.timeout(SOON):
            async for event in turn:
                if isinstance(event, RateLimitWait):
                    break
            held = await account(runtime, "tokens/all/ever")
    async with place.runtime(limits=limits) as runtime:
        found = await account(runtime, "tokens/all/ever")

    assert held.reserved > 2 * 400
    assert (found.unknown, found.reserved) == (1, 0)


async def test_nobody_waits_for_what_a_dead_worker_has_reserved_for_an_agent_that_is_gone(place: Place) -> None:
    died, limits = TellingModel(), [Limit(tokens=700, per="all")]
    agent = Agent(died, name="gone", settings=ModelSettings(max_tokens=500))
    runtime = await place.runtime(agent, limits=limits).__aenter__()
    await (await runtime.session("s")).send("go")
    await died.next()
    await crash(runtime)
    other = Agent(FunctionModel(costing()), name="agent", settings=SMALL)
    async with place.runtime(other, limits=limits) as runtime, asyncio.timeout(SOON):
        result = await (await runtime.session("t")).run("go")
        found = await account(runtime, "tokens/all/ever")

    assert isinstance(result.outcome, Reached)
    assert (found.unknown, found.reserved) == (1, 0)


def test_files_count_by_what_they_may_hold() -> None:
    """A request tells of them by digest or address alone."""

    def size(*parts: Any) -> int:
        return size_of(ModelRequest([Message("user", [*parts])]))

    stored = Stored("d" * 64, 900_000)
    assert 900_000 < size(Document(stored, "text/plain")) < 901_000
    assert 225_000 < size(Document(stored, "application/pdf")) < 226_000
    assert 4_800 < size(Image(stored, "image/png")) < 5_000
    assert 4_800 < size(Image(Url("https://house/pic.png"))) < 5_000
    assert 4_800 < size(ToolResult("c", "look", files=(Image(stored, "image/png"),))) < 5_100
    assert 9_000 < size(Audio(stored, "audio/wav")) < 9_200


SAID: list[tuple[Role, str]] = [("system", "Be brief."), ("user", "a"), ("user", "bb"), ("user", "c")]
SYSTEM, FIRST, SECOND, OTHER = [Message(role, (Text(text),)) for role, text in SAID]
WEATHER = ToolSpec("weather", "Tells the weather.")


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, FIRST, SECOND],
        [SYSTEM, FIRST, SECOND, OTHER],
        [SYSTEM, FIRST, OTHER],
        [SYSTEM, OTHER, SECOND, FIRST],
        [SYSTEM, FIRST],
        [FIRST, SECOND],
        [],
    ],
    ids=["same", "longer", "other end", "other beginning", "shorter", "no instructions", "nothing"],
)
def test_request_after_another_has_the_size_that_it_has_alone(messages: list[Message]) -> None:
    sizes = RequestSizes()
    sizes.of(ModelRequest([SYSTEM, FIRST, SECOND], (WEATHER,), {"type": "object"}))
    for request in (ModelRequest(messages), ModelRequest(messages, (WEATHER,), {"type": "array"})):
        assert sizes.of(request) == size_of(request)


def test_size_of_a_request_is_that_of_its_messages_and_tools_as_json() -> None:
    each = len('{"role":"user","parts":[{"type":"text","text":"a"}]}')
    assert size_of(ModelRequest([FIRST, SECOND])) == each + each + 1
    assert size_of(ModelRequest([FIRST], (WEATHER,))) > each + len("weather") + len("Tells the weather.")
    assert size_of(ModelRequest([FIRST], output_schema={"type": "array"})) == each + len('{"type":"array"}')


def test_message_that_was_in_the_request_before_is_not_encoded_again() -> None:
    """Or what a limit costs would grow with the session, at every call."""
    arguments: dict[str, Any] = {"city": "Paris"}
    called, sizes = Message("assistant", [Called("c", "weather", arguments)]), RequestSizes()
    before = sizes.of(ModelRequest([FIRST, called]))
    arguments["city"] = "Paris, of which nobody has heard"  # nobody changes one: it shows who encodes it

    assert sizes.of(ModelRequest([FIRST, called])) == before
    assert size_of(ModelRequest([FIRST, called])) > before


async def test_answer_is_not_lowered_to_less_than_a_model_takes_to_think(place: Place) -> None:
    bounds: list[int | None] = []

    def model(request: ModelRequest) -> ModelResponse:
        bounds.append(request.settings.max_tokens)
        return ModelResponse("done", usage=Usage(10, 1_990))

    settings = ModelSettings(max_tokens=2_000, reasoning="high")
    agent = Agent(FunctionModel(model), settings=settings)
    async with place.runtime(agent, limits=[Limit(tokens=5_000)]) as runtime:
        session = await runtime.session("s")
        outcomes = [type((await session.run("go")).outcome) for _ in range(3)]

    assert outcomes == [Finished, Finished, Reached]
    assert bounds == [2_000, 2_000]


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


def test_outcome_of_an_earlier_version_has_its_amounts_as_numbers() -> None:
    stored = b'{"type":"limit_reached","kind":"money","limit":0.3,"spent":5,"per":"all"}'

    assert msgspec.json.decode(stored, type=Reached) == Reached("money", Decimal("0.3"), Decimal(5))


def test_limit_that_is_spent_says_what_to_do() -> None:
    refused = LimitReached("money", Decimal(5), Decimal("5.2"), "metadata.user", "ann", "day")

    assert str(refused) == (
        "the limit of 5 money a day of metadata.user 'ann' is spent (5.2): raise it in Runtime(limits=[…]), or wait "
        "for the next window, and call session.retry()"
    )
