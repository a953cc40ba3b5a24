"""`runtime.usage()`: what sessions have spent, in sums that every commit adds to and that no crash counts twice."""

from __future__ import annotations

import datetime
import sys
from decimal import Decimal
from typing import Any

import pytest

from perdure import Agent, ModelRequest, ModelResponse, Runtime, ToolCall, ToolContext, Usage, tool
from perdure.errors import InvalidDefinition, InvalidInput, MissingExtra
from perdure.model.spending import Price
from perdure.providers.prices import checked
from perdure.sessions.usage import UsageGroup
from perdure.testing import FunctionModel, VirtualClock
from perdure.testing.crash import Lab, kill_everywhere
from tests.kit import SOON, Place
from tests.sessions.test_usage import Asking, Books, Delegating, added, look

DAY = 86_400_000


async def sums(runtime: Runtime, by: Any = "model", **wanted: Any) -> dict[Any, Usage]:
    found: list[UsageGroup] = await runtime.usage(by, **wanted)
    return {each.key[0] if len(each.key) == 1 else each.key: each.usage for each in found}


def counting(request: ModelRequest) -> ModelResponse:
    return ModelResponse("done", usage=Usage(10, 2), model="m-1")


async def test_sums_are_what_sessions_say_of_themselves(place: Place) -> None:
    books = Books()
    async with place.runtime(Agent(FunctionModel(books), tools=[look], plugins=[Asking()])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.call("asking.check")
        await session.run("again")
        assert await runtime.wait_idle(SOON)
        told, found = await session.usage(), await sums(runtime, "label")
    async with place.runtime() as runtime:
        assert await sums(runtime, "label") == found

    assert found == told
    assert added(found) == books.total()


async def test_sums_are_told_apart_by_whom_they_were_for_by_day_and_by_agent(place: Place) -> None:
    clock = VirtualClock()
    agents = [Agent(FunctionModel(counting), name=name) for name in ("one", "two")]
    async with place.runtime(*agents, clock=clock) as runtime:
        ann = await runtime.session("a", agent="one", metadata={"user": "ann", "tenant": 4})
        await ann.run("go")
        began = clock.now()
        clock.advance(DAY / 1000)
        await ann.run("go on", metadata={"user": "bob"})
        await (await runtime.session("b", agent="two")).run("go")
        today = datetime.datetime.fromtimestamp(clock.now() / 1000, datetime.UTC)
        users, days = await sums(runtime, "metadata.user"), await sums(runtime, ["day", "agent"])
        tenants = await sums(runtime, "metadata.tenant")
        since = await sums(runtime, since=today)
        of_ann = await sums(runtime, "session", metadata={"user": "ann"})
        before = await sums(runtime, until=began + 1)

    one = Usage(10, 2, calls=1)
    yesterday = (today - datetime.timedelta(days=1)).date().isoformat()
    assert users == {"": one, "ann": one, "bob": one}
    assert tenants == {"": one, "4": one + one}
    assert days == {
        (yesterday, "one"): one,
        (today.date().isoformat(), "one"): one,
        (today.date().isoformat(), "two"): one,
    }
    assert (since, before) == ({"m-1": one + one}, {"m-1": one})
    assert of_ann == {"a": one}


async def test_sums_of_a_session_are_those_of_its_family(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(counting), plugins=[Delegating()])) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await (await runtime.session("other")).run("one")
        assert await runtime.wait_idle(SOON)
        whole, of_a = await sums(runtime, "session", session="s"), await sums(runtime, "session", session="a")
        families = await sums(runtime, "family")

    assert set(whole) == {"s", "a", "a2", "b"}
    assert set(of_a) == {"a", "a2"}
    assert {name: usage.calls for name, usage in families.items()} == {"s": 4, "other": 1}


async def test_what_was_spent_stays_when_its_session_is_deleted_and_a_fork_begins_with_nothing(place: Place) -> None:
    async with place.runtime(Agent(FunctionModel(counting))) as runtime:
        session = await runtime.session("s", metadata={"user": "ann"})
        await session.run("go")
        fork = await session.fork(session_id="fork")
        before = await sums(runtime, "session")
        await fork.run("go on")
        await runtime.sessions.delete("s")

        assert await sums(runtime, "session") == {"s": Usage(10, 2, calls=1), "fork": Usage(10, 2, calls=1)}
        assert await sums(runtime, "metadata.user") == {"ann": Usage(20, 4, calls=2)}
    assert before == {"s": Usage(10, 2, calls=1)}


async def test_turn_counts_once_it_has_ended(place: Place) -> None:
    @tool(approval="ask", name="look")
    async def ask_first() -> str:
        """Look, if a person agrees."""
        return "seen"

    async with place.runtime(Agent(FunctionModel(Books()), tools=[ask_first])) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        open_turn = await runtime.usage()
        [call] = await session.pending()
        await session.approve(call.call_id)
        await session.result("s.1")

        assert open_turn == []
        assert (await sums(runtime, "label"))["turns"].calls == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"by": "colour"}, "usage is not told by 'colour'"),
        ({"by": "metadata."}, "usage is not told by 'metadata.'"),
        ({"by": []}, "is not usable"),
        ({"by": ["model", 3]}, "usage is not told by 3"),
        ({"since": "yesterday"}, "since='yesterday' is not usable"),
        ({"until": datetime.datetime(2026, 1, 1)}, "a datetime with a time zone"),
        ({"since": -1}, "since=-1 is not usable"),
        ({"session": ""}, "session"),
    ],
)
async def test_sums_by_what_they_are_not_kept_by_are_refused_in_words(wrong: dict[str, Any], words: str) -> None:
    async with Runtime("memory") as runtime:
        with pytest.raises(InvalidInput, match=words):
            await runtime.usage(**wrong)


# ---------------------------------------------------------------------- money


PRICE = Price(input=3, output=15, cache_read="0.30", cache_write="3.75")


async def test_calls_cost_what_the_hosts_table_says_to_the_last_digit(place: Place) -> None:
    """A third of them would be off by a binary fraction."""

    def model(request: ModelRequest) -> ModelResponse:
        return ModelResponse("done", usage=Usage(100_000, 10_000, cache_read=1_000, cache_write=100))

    agent = Agent(FunctionModel(model, name="house:large"))
    async with place.runtime(agent, prices={"house:large": PRICE}) as runtime:
        session = await runtime.session("s")
        results = [await session.run(str(n)) for n in range(3)]
        found = await sums(runtime)

    assert [result.usage.cost for result in results] == [Decimal("0.450675")] * 3
    assert found["house:large"].cost == Decimal("1.352025")


@pytest.mark.parametrize(
    ("told", "cost"),
    [
        (Usage(1_000_000, 0, cost="0.5"), Decimal("0.5")),  # the provider's own figure
        (Usage(1_000_000, 0), Decimal(3)),
        (Usage(1_000_000), None),  # how much it said is not known
        (None, None),
    ],
)
async def test_what_a_provider_reports_comes_first_and_what_is_not_known_has_no_price(
    told: Usage | None, cost: Decimal | None
) -> None:
    agent = Agent(FunctionModel(lambda request: ModelResponse("done", usage=told), name="house:large"))
    async with Runtime("memory", agents=[agent], prices={"house:large": PRICE}) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.usage.cost == cost


async def test_direct_completions_are_priced_like_turns(place: Place) -> None:
    @tool(name="look")
    async def ask(ctx: ToolContext[Any]) -> str:
        """Look."""
        return (await ctx.host.complete("inside", label="inside")).text

    def model(request: ModelRequest) -> Any:
        usage = Usage(1_000_000, 0)
        if request.turn_id and request.messages[-1].role != "tool":
            return ModelResponse("", [ToolCall("c", "look")], usage=usage, stop="tool_calls")
        return ModelResponse("done", usage=usage)

    agent = Agent(FunctionModel(model, name="house:large"), tools=[ask])
    async with place.runtime(agent, prices=lambda name: PRICE if name == "house:large" else None) as runtime:
        await (await runtime.session("s")).run("go")
        found = await sums(runtime, "label")

    assert {label: usage.cost for label, usage in found.items()} == {"turns": Decimal(6), "inside": Decimal(3)}


@pytest.mark.parametrize(
    "wrong",
    [{"m": 3}, {"": PRICE}, {3: PRICE}, "the other table", 7],
)
def test_table_of_prices_that_is_none_is_refused_in_words(wrong: Any) -> None:
    with pytest.raises(InvalidDefinition, match="is not usable: give"):
        Runtime("memory", prices=wrong)


@pytest.mark.parametrize("wrong", [-1, "much", float("nan"), float("inf"), True, None, "-0.1"])
def test_price_that_is_no_amount_is_refused_in_words(wrong: Any) -> None:
    with pytest.raises(InvalidDefinition, match=r"Price\(output=.*give 0 or more"):
        Price(1, wrong)


def test_bundled_table_is_read_as_it_was_installed() -> None:
    pytest.importorskip("genai_prices")
    table = checked("genai-prices")

    price = table.price("anthropic:claude-3-haiku-20240307")

    assert price is not None
    assert (price.input, price.output) == (Decimal("0.25"), Decimal("1.25"))
    assert table.cost("anthropic:claude-3-haiku-20240307", Usage(1_000_000, 1_000_000)) == Decimal("1.50")
    assert table.price("anthropic:no-such-model") is None
    assert table.price("function") is None


def test_bundled_table_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[prices\]'"):
        checked("genai-prices")


# ---------------------------------------------------------------------- crashes


async def spending(lab: Lab) -> None:
    agent = Agent(FunctionModel(Books()), tools=[look], plugins=[Asking()])
    async with lab.runtime([agent]) as runtime:
        session = await runtime.session("s", metadata={"user": "ann"})
        await session.run("go", key="go")
        await runtime.wait_idle(timeout=60)
        told, found = await session.usage(), await sums(runtime, "label")
        await lab.effect("counted", "s", [[usage.calls, usage.unknown] for usage in (added(told), added(found))])
        assert found == told


def test_sums_are_what_the_records_say_wherever_the_process_dies() -> None:
    report = kill_everywhere(spending)

    assert (report.lost, report.problems, report.unreached) == (0, [], [])
    assert report.rows
    for row in report.rows:
        told, found = next(line.data for line in reversed(row.played.ledger) if line.name == "counted")
        assert told == found, f"{row.crash}: the records say {told}, the sums {found}"


async def test_model_that_its_answers_do_not_name_is_told_by_the_name_it_was_priced_by(place: Place) -> None:
    def unnamed(request: ModelRequest) -> ModelResponse:
        return ModelResponse("done", usage=Usage(1_000, 100))

    agent = Agent(FunctionModel(unnamed, name="house:large"), plugins=[Asking()])
    async with place.runtime(agent, prices={"house:large": PRICE}) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.call("asking.check")
        assert await runtime.wait_idle(SOON)
        told, found = await session.usage("model"), await sums(runtime, "model")

    assert found == told
    assert list(found) == ["house:large"]
