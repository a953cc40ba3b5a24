"""`Runtime(model_calls=…)`: how many calls of a model are in flight, where no rate limit says so."""

import asyncio
from typing import Any

import pytest

from perdure import Agent, RateLimit, Runtime
from perdure.engine.rate_limits import RateLimits
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.event import RateLimitWait
from perdure.model.llm import ModelRequest
from perdure.model.outcome import Finished
from perdure.model.tool import Cancelled
from perdure.providers.scripted import FunctionModel
from perdure.testing import VirtualClock
from tests.kit import SOON, Place, until, untyped


class Gated:
    """A model whose calls end when they are let: it counts those in flight."""

    def __init__(self, name: str = "gated") -> None:
        self.gate, self.now, self.most, self.asked = asyncio.Event(), 0, 0, 0
        self.model = FunctionModel(self.answer, name=name)

    async def answer(self, request: ModelRequest) -> str:
        self.now, self.asked = self.now + 1, self.asked + 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
        finally:
            self.now -= 1
        return "ok"


async def say(runtime: Runtime, count: int, **options: Any) -> list[Any]:
    sessions = [await runtime.session(f"s{number}", **options) for number in range(count)]
    return [await session.send("hi") for session in sessions]


async def test_calls_beyond_the_bound_wait_in_line_and_all_are_answered(place: Place) -> None:
    gated = Gated()
    async with place.runtime(Agent(gated.model), model_calls=3) as runtime:
        receipts = await say(runtime, 20)
        await until(lambda: gated.now == 3)
        gated.gate.set()
        results = [await each.result(SOON) for each in receipts]

    assert [result.outcome for result in results] == [Finished("ok")] * 20
    assert (gated.most, gated.asked) == (3, 20)
    assert {result.usage.calls for result in results} == {1}  # a wait spends no attempt


async def test_the_default_is_64(place: Place) -> None:
    gated = Gated()
    async with place.runtime(Agent(gated.model)) as runtime:
        receipts = await say(runtime, 80)
        await until(lambda: gated.now == 64)
        gated.gate.set()
        for each in receipts:
            await each.result(SOON)

    assert gated.most == 64


@pytest.mark.parametrize(
    ("rule", "most"),
    [({"gated": RateLimit(concurrency=5)}, 5), ({"gated": RateLimit(tokens=10**9)}, 8), ({}, 2)],
)
async def test_a_rate_limit_for_the_model_replaces_the_bound(rule: dict[str, RateLimit], most: int) -> None:
    gated = Gated()
    limits = RateLimits(rule, {}, VirtualClock(), untyped(None), 2)
    tickets = [limits.join(gated.model, ModelRequest([])) for _ in range(8)]

    assert sum(ticket.going for ticket in tickets) == most


async def test_one_model_does_not_take_the_places_of_another(place: Place) -> None:
    first, second = Gated("a"), Gated("b")
    agents = [Agent(first.model, name="a"), Agent(second.model, name="b")]
    async with place.runtime(*agents, model_calls=1) as runtime:
        await (await runtime.session("one", agent="a")).send("hi")
        await (await runtime.session("two", agent="b")).send("hi")
        await until(lambda: first.now == second.now == 1)
        first.gate.set()
        second.gate.set()


async def test_a_call_that_waits_says_so_and_its_turn_can_be_cancelled(place: Place) -> None:
    gated = Gated()
    async with place.runtime(Agent(gated.model), model_calls=1) as runtime:
        [first] = await say(runtime, 1)
        await until(lambda: gated.now == 1)
        session = await runtime.session("waiting")
        async with session.stream("hi") as turn:
            async for event in turn:
                if isinstance(event, RateLimitWait):
                    await session.cancel()
            cancelled = await turn.result()
        third = await (await runtime.session("third")).send("hi")
        gated.gate.set()

        assert isinstance(cancelled.outcome, Cancelled)
        assert [(await each.result(SOON)).text for each in (first, third)] == ["ok", "ok"]
    assert gated.asked == 2


async def test_every_end_of_a_call_gives_its_place_back() -> None:
    gated = Gated()
    limits = RateLimits({}, {}, VirtualClock(), untyped(None), 1)

    def join() -> Any:
        return limits.join(gated.model, ModelRequest([]))

    answered = join()
    limits.answered(answered, None)
    failed = join()
    limits.failed(failed, ProviderError("no"), begun=True)
    left = join()
    waiting, admitted, last = join(), join(), join()
    limits.leave(waiting)  # out of the line
    waiter = asyncio.create_task(limits.wait(admitted))
    await asyncio.sleep(0)
    limits.leave(left)
    limits.leave(admitted)  # cancelled in the instant in which it was admitted
    waiter.cancel()
    await limits.wait(last)

    assert (answered.going, failed.going, left.going, last.going) == (True, True, True, True)
    assert not waiting.going
    assert [limits.why(join()).reason, limits.why(join()).limit] == ["concurrency", "gated"]


async def test_a_call_that_waits_for_a_place_does_not_run_out_of_time() -> None:
    """Only the wait for its provider has a limit, and that begins when the call has its place."""
    gated, clock = Gated(), VirtualClock()
    limits = RateLimits({}, {}, clock, untyped(None), 1)
    first = limits.join(gated.model, ModelRequest([]))
    second = limits.join(gated.model, ModelRequest([]))
    clock.advance(3600)
    limits.answered(first, None)
    await limits.wait(second)

    assert second.going


@pytest.mark.parametrize("wrong", [0, -1, None, 1.5, True])
def test_a_bound_that_is_no_number_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidDefinition, match="model_calls="):
        Runtime("memory", model_calls=untyped(wrong))
