"""An outage of a model is a wait: the turn is parked until its next attempt, and goes on in whatever process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Budget, ModelRequest, Retries, Runtime, ToolCall, ToolContext, tool
from perdure.errors import ProviderError
from perdure.model.event import ModelRetry
from perdure.model.llm import Delta
from perdure.model.outcome import BudgetSpent, Finished, PendingCall, ProviderFailed, Queued, Waiting
from perdure.model.record import Faltered
from perdure.model.tool import Ok
from perdure.providers.fallback import Fallback
from perdure.providers.scripted import as_response
from perdure.testing import FunctionModel, ScriptedModel, VirtualClock
from tests.kit import SOON, Place, crash, overloaded, until


class Steady:
    """A Random that takes nothing off."""

    def bits(self, count: int) -> int:
        return 0


class Outage:
    """A model that is down until virtual time `end`, in seconds since the clock was made; `asked` are its calls."""

    def __init__(self, clock: VirtualClock, end: float, name: str = "down", error: ProviderError | None = None) -> None:
        self._clock, self._end, self.name, self._error = clock, end, name, error or overloaded()
        self.asked: list[tuple[float, ModelRequest]] = []

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        self.asked.append((self._clock.monotonic(), request))
        if self._clock.monotonic() < self._end:
            raise self._error
        response = as_response("back")
        yield response.text
        yield response

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.asked]


async def parked(runtime: Runtime, session_id: str = "s") -> None:
    async def is_parked() -> bool:
        row = await runtime.store.session(session_id)
        return row is not None and row.state == "parked" and session_id not in runtime._turns.cache.tasks

    await until(is_parked)


async def test_a_turn_outlives_an_outage_and_runs_no_tool_again(place: Place) -> None:
    clock, ran = VirtualClock(auto=True), list[int]()

    @tool
    def look(number: int) -> int:
        ran.append(number)
        return number

    class ThenDown(Outage):
        async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
            if request.messages[-1].role == "user":
                yield as_response([ToolCall(f"c{n}", "look", {"number": n}) for n in range(3)])
                return
            async for delta in super().stream(request):
                yield delta

    model = ThenDown(clock, 600)
    async with place.runtime(Agent(model, tools=[look], retries=Retries()), clock=clock, wait_for=None) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert result.outcome == Finished("back")
    assert sorted(ran) == [0, 1, 2]
    assert 600 <= clock.monotonic() < 661
    assert result.model_calls[-1].attempts[-1].number == len(model.asked)


async def test_the_pauses_double_up_to_a_minute(place: Place) -> None:
    clock = VirtualClock(auto=True)
    model = Outage(clock, 200)
    agent = Agent(model, retries=Retries())
    async with place.runtime(agent, clock=clock, random=Steady(), wait_for=None) as runtime:
        await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    pauses = [round(after - before, 1) for before, after in zip(model.times, model.times[1:], strict=False)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


async def test_a_waiting_turn_has_no_task_and_says_what_it_waits_for(place: Place) -> None:
    clock = VirtualClock()
    agent = Agent(Outage(clock, 600, error=overloaded(after=30)), retries=Retries())
    async with place.runtime(agent, clock=clock, wait_for=0) as runtime:
        session = await runtime.session("s")
        result = await asyncio.wait_for(session.run("go"), SOON)

        due = clock.now() + 30_000
        reason = "overloaded: overloaded"
        wait = PendingCall("s.1.1.0", "model", "down", {}, clock.now(), due, reason, ordinal=2)
        assert result.outcome == Waiting((wait,))
        assert result.pending == ()
        assert await session.pending() == []
        await until(lambda: not runtime._turns.cache.tasks)
        assert (await session.run("behind", key="b")).outcome == Queued(
            "s.1", (wait,), "turn s.1 waits for down (s.1.1.0), and goes on by itself: this turn runs after it"
        )


async def test_a_crash_changes_neither_the_due_time_nor_the_count(place: Place) -> None:
    clock = VirtualClock()
    model = Outage(clock, 45, error=overloaded(after=50))
    runtime = await place.runtime(Agent(model, retries=Retries()), clock=clock).__aenter__()
    await (await runtime.session("s")).send("go")
    await parked(runtime)
    await crash(runtime)
    clock.advance(20)

    async with place.runtime(Agent(model, retries=Retries()), clock=clock) as second:
        receipt = await (await second.session("s")).send("go on")
        await parked(second)
        assert len(model.asked) == 1
        clock.advance(31)
        await asyncio.wait_for(receipt.result(), SOON)
        result = await (await second.session("s")).result("s.1")

    assert result.text == "back"
    assert [attempt.number for attempt in result.model_calls[0].attempts] == [1, 2]
    assert model.times == [0, 51, 51]


async def test_another_worker_takes_a_waiting_turn_when_it_is_due(tmp_path: Path) -> None:
    place, clock = Place("sqlite", tmp_path), VirtualClock()
    model = Outage(clock, 1, error=overloaded(after=50))
    async with place.runtime(Agent(model, retries=Retries()), clock=clock) as first:
        await (await first.session("s")).send("go")
        await parked(first)

    async with place.runtime(Agent(model, retries=Retries()), clock=clock) as second:
        clock.advance(50)
        result = await asyncio.wait_for((await second.session("s")).result("s.1"), SOON)

    assert result.text == "back"
    assert len(model.asked) == 2


async def test_time_on_disk_is_no_time_of_the_turn(place: Place) -> None:
    clock = VirtualClock(auto=True)
    agent = Agent(Outage(clock, 120), retries=Retries(), budget=Budget(seconds=5))
    async with place.runtime(agent, clock=clock, wait_for=None) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert result.outcome == Finished("back")


async def test_time_in_memory_is(place: Place) -> None:
    clock = VirtualClock(auto=True)
    agent = Agent(Outage(clock, 120), retries=Retries(), budget=Budget(seconds=5))
    async with place.runtime(agent, clock=clock, park_after=None) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert result.outcome == BudgetSpent("seconds", 5)


async def test_a_turn_is_given_up_when_its_time_for_retries_is_over(place: Place) -> None:
    clock = VirtualClock(auto=True)
    agent = Agent(Outage(clock, 9_000), retries=Retries(within=300))
    async with place.runtime(agent, clock=clock, wait_for=None) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert isinstance(result.outcome, ProviderFailed)
    assert 300 <= round(clock.monotonic(), 3) < 302


async def test_a_program_in_memory_gives_up_after_a_minute() -> None:
    def down(request: ModelRequest) -> str:
        raise overloaded(after=61)

    result = await asyncio.wait_for(Agent(FunctionModel(down)).run("go"), SOON)

    assert result.outcome == ProviderFailed("overloaded", "overloaded", 1, "function")


@pytest.mark.parametrize("code", ["unauthorized", "invalid_request", "unknown_model"])
async def test_what_no_retry_can_mend_ends_the_turn_at_once(place: Place, code: str) -> None:
    model = ScriptedModel([ProviderError("no", code=code)])
    async with place.runtime(Agent(model, retries=Retries()), clock=VirtualClock(auto=True)) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == ProviderFailed(code, "no", 1, "scripted")


async def test_an_agent_says_which_failures_are_retried(place: Place) -> None:
    model = ScriptedModel([ProviderError("no", code="odd"), ValueError("odder"), overloaded()])
    retries = Retries(on=lambda error: "od" in str(getattr(error, "code", error)), never=TypeError)
    async with place.runtime(Agent(model, retries=retries), clock=VirtualClock(auto=True)) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.outcome == ProviderFailed("overloaded", "overloaded", 3, "scripted")


async def test_a_fallback_asks_its_next_model_at_once_and_waits_after_the_last(place: Place) -> None:
    clock = VirtualClock(auto=True)
    models = Outage(clock, 100, "one"), Outage(clock, 100, "two")
    agent = Agent(Fallback(*models), retries=Retries())
    async with place.runtime(agent, clock=clock, wait_for=None) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert result.outcome == Finished("back")
    assert models[1].times == models[0].times[: len(models[1].times)]
    assert all(after > before for before, after in zip(models[0].times, models[0].times[1:], strict=False))


async def test_observers_hear_of_each_retry(place: Place) -> None:
    clock = VirtualClock(auto=True)
    model = Outage(clock, 4)
    async with place.runtime(Agent(model, retries=Retries()), clock=clock, random=Steady()) as runtime:
        session = await runtime.session("s")
        async with session.stream("go") as turn:
            told = [event async for event in turn if isinstance(event, ModelRetry)]
        records = [each for each in (await turn.result()).records if isinstance(each, Faltered)]

    assert [(each.model, each.attempt, each.error) for each in told] == [
        ("down", number, "overloaded: overloaded") for number in range(2, 2 + len(told))
    ]
    assert [each.due for each in told] == [each.due for each in records]


async def test_a_waiting_turn_can_be_cancelled(place: Place) -> None:
    clock = VirtualClock()
    agent = Agent(Outage(clock, 600, error=overloaded(after=500)), retries=Retries())
    async with place.runtime(agent, clock=clock) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await parked(runtime)
        await session.cancel("enough")
        result = await asyncio.wait_for(receipt.result(), SOON)

    assert result.failed
    assert result.error is not None
    assert "enough" in result.error


async def test_a_completion_of_a_plugin_obeys_the_retries_of_the_agent(place: Place) -> None:
    clock = VirtualClock(auto=True)
    asked = list[float]()

    def model(request: ModelRequest) -> Any:
        if request.label == "turn":
            return "done" if request.messages[-1].role == "tool" else [ToolCall("c", "ask", {})]
        asked.append(clock.monotonic())
        if len(asked) < 7:
            raise overloaded()
        return "seven"

    @tool
    async def ask(ctx: ToolContext[Any]) -> str:
        return (await ctx.host.complete("?", label="side")).text

    agent = Agent(FunctionModel(model), tools=[ask], retries=Retries(longest=3))
    async with place.runtime(agent, clock=clock) as runtime:
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert result.tool_calls[0].outcome == Ok("seven")
    assert len(asked) == 7


async def test_an_outage_under_many_turns_is_no_storm_and_ends_for_all_soon(tmp_path: Path) -> None:
    """Ten minutes, 500 turns in one Runtime."""
    clock, end, turns = VirtualClock(auto=True), 600, 500
    model = Outage(clock, end)
    agent = Agent(model, retries=Retries())
    async with Place("memory", tmp_path).runtime(agent, clock=clock, wait_for=None) as runtime:
        sessions = [await runtime.session(f"s{number}") for number in range(turns)]
        answers = await asyncio.wait_for(asyncio.gather(*[each.run("go") for each in sessions]), 5 * SOON)

    retried = sorted(at for at, request in model.asked if request.attempt > 1 and at < end)
    assert all(answer.text == "back" for answer in answers)
    assert max(model.times) <= end + 60
    assert len(retried) > end
    assert all(later - first >= 1 - 1e-6 for first, later in zip(retried, retried[2:], strict=False))
