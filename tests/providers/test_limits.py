"""Rate limits of a Runtime: shared by everything that asks a model, seen by who watches, and no part of any timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Budget, ModelRequest, ModelResponse, ModelSettings, RateLimit, Retries, Runtime, Usage
from perdure.engine.rate_limits import RateLimits
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.event import RateLimitWait
from perdure.model.llm import Delta, RateReport, Remaining
from perdure.model.outcome import BudgetSpent, Finished, ProviderFailed
from perdure.model.record import Faltered
from perdure.model.tool import Cancelled
from perdure.ports.provider import Provider
from perdure.providers.dialect import rate_report
from perdure.providers.fallback import Fallback
from perdure.providers.registry import provider
from perdure.testing import FunctionModel, VirtualClock
from perdure.testing.model_server import Asked, ModelServer, Reply

REFUSED = {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}


def chat(text: str = "hello", **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    said = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    return Reply.sse(said, done=True, headers=named)


class Gated:
    """Answers when it is let, and counts how many ask at once."""

    name = "p:gated"

    def __init__(self) -> None:
        self.asked = self.now = self.most = 0
        self.entered, self.free = asyncio.Event(), asyncio.Event()

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        self.entered.set()
        try:
            await self.free.wait()
        finally:
            self.now -= 1
        yield ModelResponse("ok", usage=Usage(input=10, output=5))


async def waits(session: Any, count: int = 1) -> list[RateLimitWait]:
    """The first events of the session that say it waits for a limit."""
    found: list[RateLimitWait] = []
    async for event in session.observe():
        if isinstance(event, RateLimitWait):
            found.append(event)
            if len(found) == count:
                break
    return found


async def test_all_sessions_of_a_runtime_share_a_limit_and_who_watches_sees_the_wait() -> None:
    model = Gated()
    agent = Agent(model, settings=ModelSettings(timeout=0.2))
    async with Runtime("memory", agents=[agent], rate_limits={"p:": RateLimit(concurrency=2)}) as runtime:
        sessions = [await runtime.session(f"s{number}") for number in range(5)]
        seen = [asyncio.create_task(waits(session)) for session in sessions[2:]]
        await asyncio.sleep(0)
        receipts = [await session.send("hi") for session in sessions]
        events = [event for task in seen for event in await task]
        model.free.set()
        results = [await receipt.result() for receipt in receipts]

    assert model.most == 2
    assert {(event.limit, event.reason, event.model) for event in events} == {("p:", "concurrency", "p:gated")}
    assert [result.outcome for result in results] == [Finished("ok")] * 5


async def test_waiting_counts_in_no_timeout_of_the_call() -> None:
    slow, quick = Gated(), FunctionModel(lambda request: "quick", name="p:quick")
    agents = [Agent(slow, name="slow"), Agent(quick, name="quick", settings=ModelSettings(timeout=0.05))]
    async with Runtime("memory", agents=agents, rate_limits={"p:": RateLimit(concurrency=1)}) as runtime:
        first = await (await runtime.session("a", agent="slow")).send("hi")
        await slow.entered.wait()
        second = await (await runtime.session("b", agent="quick")).send("hi")
        asyncio.get_running_loop().call_later(0.2, slow.free.set)  # long after the timeout
        result = await second.result()
        await first.result()

    assert result.text == "quick"
    assert not [record for record in result.records if isinstance(record, Faltered)]


async def test_the_time_of_a_turn_goes_on_while_it_waits() -> None:
    model = Gated()
    agents = [Agent(model, name="a"), Agent(model, name="b", budget=Budget(seconds=0.05))]
    async with Runtime("memory", agents=agents, rate_limits={"p:gated": RateLimit(concurrency=1)}) as runtime:
        first = await (await runtime.session("a", agent="a")).send("hi")
        await model.entered.wait()
        result = await (await runtime.session("b", agent="b")).run("hi")
        model.free.set()
        await first.result()

    assert result.outcome == BudgetSpent("seconds", 0.05)
    assert result.usage == Usage(), "nothing was asked"
    assert model.asked == 1


async def test_a_cancelled_turn_stops_waiting_at_once_and_the_next_one_moves_up() -> None:
    model = Gated()
    async with Runtime("memory", agents=[Agent(model)], rate_limits={"p:": RateLimit(concurrency=1)}) as runtime:
        a, b, c = [await runtime.session(name) for name in "abc"]
        first = await a.send("hi")
        await model.entered.wait()
        seen = asyncio.create_task(waits(b))
        second, third = await b.send("hi"), await c.send("hi")
        await seen
        await b.cancel("changed my mind")
        cancelled = await second.result()
        model.free.set()
        results = [await first.result(), await third.result()]

    assert isinstance(cancelled.outcome, Cancelled)
    assert cancelled.usage == Usage(), "a call that was never made costs nothing"
    assert [result.text for result in results] == ["ok", "ok"]
    assert model.asked == 2


async def test_a_turn_that_waits_when_the_runtime_is_left_goes_on_in_the_next(tmp_path: Path) -> None:
    model = Gated()
    limits = {"p:": RateLimit(requests=1, per=3600)}
    store = tmp_path / "s.db"
    async with Runtime(store, agents=[Agent(model)], rate_limits=limits, grace=0) as runtime:
        model.free.set()
        await (await runtime.session("a")).run("hi")
        b = await runtime.session("b")
        seen = asyncio.create_task(waits(b))
        await b.send("hi", key="k")
        await seen
    async with Runtime(store, agents=[Agent(model)], rate_limits=limits) as runtime:
        result = await (await runtime.session("b")).run("hi", key="k")

    assert result.text == "ok"
    assert result.usage.unknown == 0
    assert model.asked == 2


async def test_requests_of_a_window_are_spread_over_time() -> None:
    clock, at = VirtualClock(auto=True), []

    def answer(request: ModelRequest) -> str:
        at.append(clock.monotonic())
        return "ok"

    agent = Agent(FunctionModel(answer, name="m"))
    async with Runtime("memory", agents=[agent], clock=clock, rate_limits={"m": RateLimit(requests=3)}) as runtime:
        sessions = [await runtime.session(f"s{number}") for number in range(7)]
        await asyncio.gather(*[session.run("hi") for session in sessions])

    assert [int(moment - at[0]) // 60 for moment in at] == [0, 0, 0, 1, 1, 1, 2]


async def test_a_name_of_the_runtimes_own_models_has_a_limit_too() -> None:
    model = Gated()
    rules = {"mine": RateLimit(concurrency=1)}
    async with Runtime("memory", agents=[Agent("scripted")], models={"mine": model}, rate_limits=rules) as runtime:
        model.free.set()
        sessions = [await runtime.session(f"s{number}") for number in range(3)]
        results = await asyncio.gather(*[session.run("hi", model="mine") for session in sessions])

    assert [result.text for result in results] == ["ok"] * 3
    assert model.most == 1


async def test_a_call_that_has_waited_too_long_ends_its_turn_and_names_the_setting() -> None:
    model, clock = Gated(), VirtualClock(auto=True)
    rules = {"p:": RateLimit(concurrency=1, wait=30)}
    async with Runtime("memory", agents=[Agent(model)], clock=clock, rate_limits=rules) as runtime:
        first = await (await runtime.session("a")).send("hi")
        await model.entered.wait()
        result = await (await runtime.session("b")).run("hi")
        model.free.set()
        await first.result()

    assert isinstance(result.outcome, ProviderFailed)
    assert result.outcome.code == "rate_limited"
    assert "RateLimit(wait=" in result.outcome.message


async def test_a_direct_completion_that_has_waited_too_long_holds_no_other_call_back() -> None:
    model, request, clock = Gated(), ModelRequest([]), VirtualClock(auto=True)
    rules = {model.name: RateLimit(concurrency=2, wait=5)}
    limits = RateLimits(rules, {}, clock, lambda work, name: asyncio.create_task(work, name=name))

    async def never(provider: Provider, request: ModelRequest) -> ModelResponse:
        raise AssertionError("there is no room for it")

    busy = [limits.join(model, request) for _ in range(2)]
    with pytest.raises(ProviderError, match="waited too long"):
        await limits.call(model, request, never)
    for ticket in busy:
        limits.answered(ticket, None)
    after = [limits.join(model, request) for _ in range(2)]

    assert limits.held(model) == 0
    assert [ticket.going for ticket in after] == [True, True], "its provider has refused nothing"


async def test_a_model_on_hold_is_passed_over_where_there_is_another() -> None:
    asked: list[str] = []

    def busy(request: ModelRequest) -> str:
        asked.append("busy")
        raise ProviderError("slow down", retryable=True, after=30, code="rate_limited")

    def spare(request: ModelRequest) -> str:
        asked.append("spare")
        return "ok"

    agent = Agent(Fallback(FunctionModel(busy, name="busy"), FunctionModel(spare, name="spare")))
    async with Runtime("memory", agents=[agent], clock=VirtualClock()) as runtime:
        results = [await (await runtime.session(f"s{number}")).run("hi") for number in range(3)]

    assert [result.text for result in results] == ["ok"] * 3
    assert asked == ["busy", "spare", "spare", "spare"]
    [skipped] = [record for record in results[1].records if isinstance(record, Faltered)]
    assert (skipped.code, skipped.model) == ("rate_limited", "busy")


async def test_an_outage_of_the_first_model_never_uses_up_the_way_to_the_second() -> None:
    def down(request: ModelRequest) -> str:
        raise ProviderError("down", retryable=True, code="unreachable")

    agent = Agent(Fallback(FunctionModel(down), FunctionModel(lambda request: "ok")))
    async with Runtime("memory", agents=[agent]) as runtime:
        session = await runtime.session("s")
        results = [await session.run("hi") for _ in range(300)]

    assert {result.text for result in results} == {"ok"}


async def test_what_a_server_says_is_left_holds_the_next_call_back() -> None:
    clock, at = VirtualClock(auto=True), []
    told = {"x_ratelimit_remaining_requests": "0", "x_ratelimit_reset_requests": "20s"}

    def answer(asked: Asked) -> Reply:
        at.append(clock.monotonic())
        return chat(**told)

    async with ModelServer(answer) as server:
        agent = Agent(provider("openai-chat:m", base_url=server.url, key="k"))
        async with Runtime("memory", agents=[agent], clock=clock) as runtime:
            session = await runtime.session("s")
            seen = asyncio.create_task(waits(session))
            results = [await session.run("hi"), await session.run("hi")]
            [event] = await seen

    assert [result.text for result in results] == ["hello", "hello"]
    assert at[1] - at[0] >= 20
    assert (event.reason, event.limit, event.model) == ("provider", "openai-chat:m", "openai-chat:m")
    assert event.seconds == pytest.approx(20, abs=0.5)


# ---------------------------------------------------------------------- storms


@pytest.mark.parametrize("status", [429, 529])
async def test_a_storm_of_refusals_ends_with_every_answer_and_hardly_more_requests_than_calls(status: int) -> None:
    clock, calls, refused = VirtualClock(auto=True), 60, 0

    def answer(asked: Asked) -> Reply:
        nonlocal refused
        if clock.monotonic() < 90:
            refused += 1
            return Reply.error(status, REFUSED, retry_after="20")
        return chat()

    async with ModelServer(answer) as server:
        agent = Agent(provider("openai-chat:m", base_url=server.url, key="k"))
        async with Runtime("memory", agents=[agent], clock=clock, rate_limits={}) as runtime:
            sessions = [await runtime.session(f"s{number}") for number in range(calls)]
            results = await asyncio.gather(*[session.run("hi") for session in sessions])
        requests = len(server.asked)

    recorded = [record for result in results for record in result.records if isinstance(record, Faltered)]
    assert all(isinstance(result.outcome, Finished | ProviderFailed) for result in results)
    assert sum(isinstance(result.outcome, Finished) for result in results) >= calls - 2
    gave_up = sum(isinstance(result.outcome, ProviderFailed) for result in results)
    assert len(recorded) + gave_up == refused, "every refusal is recorded, and nothing else is"
    assert refused <= calls + 10, "after the first round the model is asked by one at a time"
    assert requests == refused + calls - gave_up
    assert all(record.due - record.at == 20_000 for record in recorded), "as long as the server asked for"


async def test_a_wait_that_a_server_asks_for_is_obeyed_while_there_is_time_for_retries() -> None:
    clock, replies = VirtualClock(auto=True), [Reply.error(429, REFUSED, retry_after="7200"), chat()]
    async with ModelServer(replies) as server:
        agent = Agent(provider("openai-chat:m", base_url=server.url, key="k"), retries=Retries(within=7200))
        async with Runtime("memory", agents=[agent], clock=clock) as runtime:
            result = await (await runtime.session("s")).run("hi")

    [record] = [record for record in result.records if isinstance(record, Faltered)]
    assert result.text == "hello"
    assert record.due - record.at == 7_200_000


async def test_a_spent_quota_is_not_asked_for_again_and_holds_nobody_back() -> None:
    spent = {"error": {"code": "insufficient_quota", "message": "You exceeded your current quota"}}
    async with ModelServer(lambda asked: Reply.error(429, spent, retry_after="30")) as server:
        agent = Agent(provider("openai-chat:m", base_url=server.url, key="k"))
        async with Runtime("memory", agents=[agent], clock=VirtualClock()) as runtime:
            sessions = [await runtime.session(f"s{number}") for number in range(20)]
            results = await asyncio.gather(*[session.run("hi") for session in sessions])
        requests = len(server.asked)

    assert {result.outcome.code for result in results if isinstance(result.outcome, ProviderFailed)} == {"quota"}
    assert requests == 20


# ---------------------------------------------------------------------- headers

DATE = {"date": "Mon, 16 Nov 2026 06:00:00 GMT"}


@pytest.mark.parametrize(
    ("headers", "requests", "tokens"),
    [
        (
            {
                **DATE,
                "anthropic-ratelimit-requests-limit": "50",
                "anthropic-ratelimit-requests-remaining": "49",
                "anthropic-ratelimit-requests-reset": "2026-11-16T06:00:01Z",
                "anthropic-ratelimit-tokens-limit": "40000",
                "anthropic-ratelimit-tokens-remaining": "39000",
                "anthropic-ratelimit-tokens-reset": "2026-11-16T06:00:02Z",
            },
            Remaining(49, 1.0, 50),
            Remaining(39_000, 2.0, 40_000),
        ),
        (
            {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-remaining-requests": "59",
                "x-ratelimit-reset-requests": "1s",
                "x-ratelimit-limit-tokens": "150000",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "6m0.5s",
            },
            Remaining(59, 1.0, 60),
            Remaining(149_984, 360.5, 150_000),
        ),
        (
            {
                "x-ratelimit-remaining-tokens-minute": "99",
                "x-ratelimit-reset-tokens-minute": "11.38",
                "x-ratelimit-reset-requests-day": "33011",
                "x-ratelimit-remaining-requests-day": "9",
            },
            None,
            Remaining(99, 11.38),
        ),
        ({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "120ms"}, Remaining(3, 0.12), None),
        ({"x-ratelimit-remaining-requests": "3"}, None, None),
        ({"x-ratelimit-remaining-requests": "many", "x-ratelimit-reset-requests": "1s"}, None, None),
        ({"x-ratelimit-remaining-requests": "-1", "x-ratelimit-reset-requests": "1s"}, None, None),
        ({"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "1763272800000"}, None, None),
        ({"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "soon 1s"}, None, None),
        ({"x-ratelimit-remaining-requests": "nan", "x-ratelimit-reset-requests": "inf"}, None, None),
        ({"anthropic-ratelimit-requests-remaining": "1", "anthropic-ratelimit-requests-reset": "x"}, None, None),
        ({}, None, None),
    ],
)
def test_headers_of_every_kind_are_read_and_nonsense_is_none(
    headers: dict[str, str], requests: Remaining | None, tokens: Remaining | None
) -> None:
    assert rate_report(headers, accepted=True) == RateReport(requests, tokens)


@pytest.mark.parametrize("wrong", [["p:"], {"p:": 5}, {"": RateLimit(requests=1)}, {7: RateLimit(requests=1)}])
def test_rate_limits_that_mean_nothing_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidDefinition, match=r"rate_limits|name of a model"):
        Runtime("memory", rate_limits=wrong)


# ---------------------------------------------------------------------- the history of attempts


async def test_a_result_tells_every_attempt_of_every_model_call_also_after_a_restart(tmp_path: Path) -> None:
    clock, answers = VirtualClock(auto=True), iter(["busy", "slow", "ok"])

    def first(request: ModelRequest) -> str:
        if (said := next(answers)) == "ok":
            return said
        raise ProviderError(said, retryable=True, after=3, code="overloaded" if said == "busy" else "rate_limited")

    def second(request: ModelRequest) -> str:
        raise ProviderError("wrong key", code="authentication")

    agent = Agent(Fallback(FunctionModel(first, name="a"), FunctionModel(second, name="b")))
    async with Runtime(tmp_path / "s.db", agents=[agent], clock=clock) as runtime:
        result = await (await runtime.session("s")).run("hi")
    async with Runtime(tmp_path / "s.db") as runtime:
        again = await (await runtime.session("s")).result(result.turn_id)

    [call] = result.model_calls
    assert [(each.number, each.model, each.code, each.message) for each in call.attempts] == [
        (1, "a", "overloaded", "busy"),
        (2, "b", "authentication", "wrong key"),
        (3, "a", "rate_limited", "slow"),
        (4, "", "", ""),  # a FunctionModel does not say which model it is
    ]
    delays = [each.delay_ms for each in call.attempts]
    assert (delays[0], 375 <= delays[1] <= 500, delays[2:]) == (0, True, [3_000, 0])
    assert (call.step, call.stop, call.label) == (1, "end", "turn")
    assert sorted(each.at for each in call.attempts) == [each.at for each in call.attempts]
    assert again.model_calls == result.model_calls


async def test_the_last_attempt_of_a_turn_that_failed_is_told_too() -> None:
    def down(request: ModelRequest) -> str:
        raise ProviderError("wrong key", code="authentication")

    agent = Agent(Fallback(FunctionModel(down, name="a"), FunctionModel(down, name="b")))
    async with Runtime("memory", agents=[agent]) as runtime:
        result = await (await runtime.session("s")).run("hi")

    [call] = result.model_calls
    assert [(each.number, each.model, each.code) for each in call.attempts] == [
        (1, "a", "authentication"),
        (2, "b", "authentication"),
    ]
    assert (call.stop, call.usage) == (None, None)
    assert result.outcome == ProviderFailed("authentication", "wrong key", 2, "b")


@pytest.mark.parametrize("typo", ["antropic:", "antropic:claude-sonnet-4-5"])
def test_a_limit_for_a_service_that_there_is_not_is_refused(typo: str) -> None:
    """It would limit nothing, in silence."""
    with pytest.raises(InvalidDefinition, match="limits nothing: there is no provider 'antropic'"):
        Runtime("memory", agents=[Agent("scripted")], rate_limits={typo: RateLimit(concurrency=1)})


def test_a_limit_may_be_for_a_service_or_for_any_model_at_hand() -> None:
    listed = Fallback(FunctionModel(lambda request: "a", name="p:a"), FunctionModel(lambda request: "b", name="q:b"))
    mine = {"mine": FunctionModel(lambda request: "c", name="r:c")}
    for name in ("anthropic:", "groq:llama", "p:", "q:b", "r:", "mine", "whatever"):
        Runtime("memory", agents=[Agent(listed)], models=mine, rate_limits={name: RateLimit(concurrency=1)})
