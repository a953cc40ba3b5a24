"""Tools as steps share their limits and resources with all other calls of the Runtime, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from perdure import Agent, ModelRequest, ProcessContext, Tool, ToolCall, process, tool
from perdure.errors import OutcomeUnknown
from perdure.model.process import Cancelled
from perdure.processes.function.scheduler import PARK_DELAY
from perdure.testing import FunctionModel
from perdure.tools.attempt import needs_of
from tests.kit import SOON, Place, until
from tests.processes.functions import dying, journal_of, living, memory, result

__all__ = ["memory"]


class Press:
    """Something that may not be used by several at once. `begun` and `done` are in order; it works while it may."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: list[str] = []
        self.most = 0
        self.go = asyncio.Event()

    async def use(self, who: str) -> str:
        self.begun.append(who)
        self.most = max(self.most, len(self.begun) - len(self.done))
        await self.go.wait()
        self.done.append(who)
        return who

    async def has_begun(self, count: int) -> None:
        await until(lambda: len(self.begun) >= count)


def printing(press: Press, **limits: Any) -> Tool[..., Any]:
    @tool(name="print_it", **limits)
    async def print_it(who: str) -> str:
        return await press.use(who)

    return print_it


def one_step(given: Tool[..., Any]) -> Any:
    @process
    async def one(ctx: ProcessContext[Any], who: str) -> str:
        return await ctx.step(given, who)

    return one


async def settled() -> None:
    """Let everybody come as far as they can without anything from outside."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("limits", [{"limit": 1}, {"resource": "press"}], ids=["limit", "resource"])
async def test_steps_of_several_processes_do_not_overlap(place: Place, limits: dict[str, Any]) -> None:
    press = Press()
    one = one_step(printing(press, **limits))
    async with living(place, one) as runtime:
        handles = [await runtime.start(one, {"who": who}) for who in "abc"]
        await press.has_begun(1)
        await settled()
        first = list(press.begun)
        press.go.set()
        found = [await result(handle) for handle in handles]

    assert first == ["a"]
    assert found == ["a", "b", "c"]
    assert press.most == 1


async def test_a_step_waits_for_a_call_of_a_turn_and_the_other_way_round(place: Place) -> None:
    press = Press()
    print_it = printing(press, limit=1)
    one = one_step(print_it)

    def answer(request: ModelRequest) -> Any:
        return ToolCall("c", "print_it", {"who": "turn"}) if request.messages[-1].role == "user" else "printed"

    agent = Agent(FunctionModel(answer), tools=[print_it])
    async with place.runtime(agent, processes=[one]) as runtime:
        session = await runtime.session("s")
        first = await session.send("print")
        await press.has_begun(1)
        handle = await runtime.start(one, {"who": "process"})
        await settled()
        second = await session.send("print")
        press.go.set()
        await asyncio.wait_for(first.result(), SOON)
        assert await result(handle) == "process"
        await asyncio.wait_for(second.result(), SOON)

    assert press.begun == ["turn", "process", "turn"]
    assert press.most == 1


async def test_branches_of_one_function_wait_for_each_other(place: Place) -> None:
    press = Press()
    print_it = printing(press, limit=2)

    @process
    async def several(ctx: ProcessContext[Any]) -> list[Any]:
        return [*await ctx.gather(*[ctx.step(print_it, who) for who in "abcd"])]

    async with living(place, several) as runtime:
        handle = await runtime.start(several)
        await press.has_begun(2)
        await settled()
        assert press.begun == ["a", "b"]
        press.go.set()
        assert await result(handle) == ["a", "b", "c", "d"]

    assert press.most == 2


async def test_a_thread_holds_its_slot_until_it_has_really_ended(place: Place) -> None:
    begun, go = list[str](), threading.Event()

    @tool(limit=1)
    def press(who: str) -> str:
        begun.append(who)
        go.wait(SOON)
        return who

    @process
    async def one(ctx: ProcessContext[Any], who: str) -> str:
        try:
            return await ctx.step(press, who, timeout=0.05 if who == "a" else None)
        except OutcomeUnknown:
            return "late"

    async with living(place, one) as runtime:
        first = await runtime.start(one, {"who": "a"})
        assert await result(first) == "late"
        await until(lambda: begun)
        second = await runtime.start(one, {"who": "b"})
        await settled()
        assert begun == ["a"]
        go.set()
        assert await result(second) == "b"

    assert begun == ["a", "b"]


async def test_a_slot_is_free_between_two_attempts_and_after_a_failure(place: Place) -> None:
    tries = list[str]()

    @tool(limit=1, retries=1)
    async def press(who: str) -> str:
        tries.append(who)
        if tries.count(who) == 1:
            raise ValueError("out of paper")
        return who

    one = one_step(press)
    async with living(place, one) as runtime:
        handles = [await runtime.start(one, {"who": who}) for who in "ab"]
        assert [await result(handle) for handle in handles] == ["a", "b"]

    assert tries[:2] == ["a", "b"]


async def test_who_waits_for_a_slot_can_be_cancelled_and_has_done_nothing(place: Place) -> None:
    press = Press()
    one = one_step(printing(press, limit=1))
    async with living(place, one) as runtime:
        first, second, third = [await runtime.start(one, {"who": who}) for who in "abc"]
        await press.has_begun(1)
        await second.cancel("not needed")
        outcome = await second.outcome(SOON)
        press.go.set()
        assert [await result(first), await result(third)] == ["a", "c"]

    assert outcome == Cancelled("host", "not needed")
    assert press.begun == ["a", "c"]


async def test_a_runtime_that_is_left_leaves_nothing_of_who_waits_for_a_slot(file: Place) -> None:
    press, later = Press(), Press()
    one = one_step(printing(press, limit=1, recovery="rerun"))
    async with living(file, one, grace=0.01) as runtime:
        for who in "ab":
            await runtime.start(one, {"who": who}, id=who)
        await press.has_begun(1)
        await settled()
        assert await journal_of(runtime, runtime.handle("b")) == []
    later.go.set()
    one = one_step(printing(later, limit=1, recovery="rerun"))
    async with living(file, one) as runtime:
        assert [await result(runtime.handle(who)) for who in "ab"] == ["a", "b"]

    assert press.begun == ["a"]
    assert later.most == 1


async def test_a_crash_while_one_waits_for_a_slot_is_no_attempt(file: Place) -> None:
    press, later = Press(), Press()
    one = one_step(printing(press, limit=1))
    async with dying(file, one) as runtime:
        for who in "ab":
            await runtime.start(one, {"who": who}, id=who)
        await press.has_begun(1)
        await settled()
    later.go.set()
    one = one_step(printing(later, limit=1))
    async with living(file, one) as runtime:
        assert await result(runtime.handle("b")) == "b"

    assert later.begun == ["b"]


async def test_who_waits_for_a_slot_leaves_its_place_to_others(memory: Place) -> None:
    """Who holds the slot waits for a process that has no place yet: it gets that of the one in line."""
    met = asyncio.Event()

    @tool(limit=1)
    async def meet(who: str) -> str:
        await met.wait()
        return who

    @process
    async def other(ctx: ProcessContext[Any]) -> None:
        await ctx.step(met.set)

    one = one_step(meet)
    async with living(memory, one, other, concurrency=2) as runtime:
        handles = [await runtime.start(one, {"who": who}) for who in "abc"]
        await settled()
        await runtime.start(other)
        assert [await result(handle) for handle in handles] == ["a", "b", "c"]


async def test_other_branches_go_on_while_one_waits_for_a_slot(place: Place) -> None:
    press = Press()
    print_it = printing(press, limit=1)
    heard = list[Any]()

    @process
    async def several(ctx: ProcessContext[Any]) -> list[Any]:
        async def sleeper() -> str:
            await ctx.sleep(0.01)
            heard.append("slept")
            return "slept"

        async def listener() -> Any:
            heard.append(await ctx.wait_signal("go"))
            return heard[-1]

        return [*await ctx.gather(ctx.step(print_it, "b"), sleeper(), listener())]

    one = one_step(print_it)
    async with living(place, one, several) as runtime:
        await runtime.start(one, {"who": "a"})
        await press.has_begun(1)
        handle = await runtime.start(several)
        await until(lambda: heard == ["slept"])
        await asyncio.sleep(2 * PARK_DELAY)  # after that it would be parked, and nobody would tell
        assert (await handle.record()).status == "running"
        await handle.signal("go", 1)
        await until(lambda: heard == ["slept", 1])
        press.go.set()
        assert await result(handle) == ["b", "slept", 1]


async def test_a_branch_that_is_not_chosen_leaves_the_line(place: Place) -> None:
    press = Press()
    print_it = printing(press, limit=1)

    @process
    async def hasty(ctx: ProcessContext[Any]) -> list[Any]:
        return list(await ctx.any(ctx.step(print_it, "b"), ctx.sleep(0.01)))

    one = one_step(print_it)
    async with living(place, one, hasty) as runtime:
        first = await runtime.start(one, {"who": "a"})
        await press.has_begun(1)
        assert await result(await runtime.start(hasty)) == [1, None]
        press.go.set()
        assert await result(first) == "a"
        assert await result(await runtime.start(one, {"who": "c"})) == "c"

    assert press.begun == ["a", "c"]


async def test_a_plain_tool_that_returns_a_coroutine_holds_its_place_until_that_has_ended(place: Place) -> None:
    press = Press()

    @tool(name="print_it", limit=1)
    def print_it(who: str) -> Any:
        return press.use(who)

    one = one_step(print_it)
    async with living(place, one) as runtime:
        first = await runtime.start(one, {"who": "a"})
        await press.has_begun(1)
        held = not runtime._dispatcher.admission.try_take(needs_of(print_it.spec))
        press.go.set()

        assert (await result(first), held) == ("a", True)
