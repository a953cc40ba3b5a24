"""What must not overlap: limits of tools and resource keys, first come first served."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mainstay.model.tool import ToolSpec
from mainstay.tools.slots import Slots
from tests.fuzzing import cases

FREE = ToolSpec("free")
ONE = ToolSpec("one", limit=1)
TWO = ToolSpec("two", limit=2)
DESK = ToolSpec("write", resource="desk")
DESK_TOO = ToolSpec("read", resource="desk")
BOTH = ToolSpec("one", limit=1, resource="desk")


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(3):
        await asyncio.sleep(0)


def taking(slots: Slots, spec: ToolSpec) -> asyncio.Task[None]:
    return asyncio.create_task(slots.take(spec))


async def test_a_tool_without_limits_is_always_free() -> None:
    slots = Slots()

    assert all(slots.try_take(FREE) for _ in range(100))
    await slots.take(FREE)
    slots.give(FREE)


async def test_a_limit_is_a_number_of_places() -> None:
    slots = Slots()

    assert [slots.try_take(TWO) for _ in range(3)] == [True, True, False]
    slots.give(TWO)
    assert [slots.try_take(TWO) for _ in range(2)] == [True, False]


async def test_a_resource_is_for_one_call_whatever_its_tool() -> None:
    slots = Slots()

    assert slots.try_take(DESK)
    assert not slots.try_take(DESK_TOO)
    assert slots.try_take(ONE)
    slots.give(DESK)
    assert slots.try_take(DESK_TOO)


async def test_a_tool_with_a_limit_and_a_resource_needs_both_or_takes_nothing() -> None:
    slots = Slots()
    assert slots.try_take(DESK)

    assert not slots.try_take(BOTH)

    assert slots.try_take(ONE), "the place of the tool was not held while the desk was taken"
    slots.give(DESK)
    assert not slots.try_take(BOTH)
    assert slots.try_take(DESK)


async def test_waiters_are_served_in_the_order_they_came() -> None:
    slots = Slots()
    await slots.take(ONE)
    waiters = [taking(slots, ONE) for _ in range(4)]
    await settle()

    for position, waiter in enumerate(waiters):
        assert [w.done() for w in waiters] == [True] * position + [False] * (4 - position)
        slots.give(ONE)
        await waiter
    slots.give(ONE)
    assert slots.try_take(ONE)


async def test_a_newcomer_does_not_overtake_whoever_waits() -> None:
    slots = Slots()
    await slots.take(DESK)
    waiter = taking(slots, BOTH)
    await settle()

    assert not slots.try_take(ONE), "the place is free, but somebody waits for it"
    slots.give(DESK)
    assert not slots.try_take(DESK)

    await waiter


async def test_a_later_waiter_does_not_overtake_one_that_needs_the_same_and_more() -> None:
    slots = Slots()
    await slots.take(ONE)
    await slots.take(DESK)
    first, second = taking(slots, BOTH), taking(slots, DESK)
    await settle()

    slots.give(DESK)
    await settle()
    assert not second.done(), "it would keep the first from the desk for ever"

    slots.give(ONE)
    await first
    slots.give(BOTH)
    await second


async def test_waiters_that_need_something_else_are_not_held_up() -> None:
    slots = Slots()
    await slots.take(ONE)
    await slots.take(DESK)
    first, second = taking(slots, ONE), taking(slots, DESK)
    await settle()

    slots.give(DESK)
    await second

    assert not first.done()
    slots.give(ONE)
    await first


async def test_several_waiters_are_served_at_once_when_there_is_room() -> None:
    slots = Slots()
    await slots.take(TWO)
    await slots.take(TWO)
    waiters = [taking(slots, TWO) for _ in range(3)]
    await settle()

    slots.give(TWO)
    slots.give(TWO)
    await settle()

    assert [w.done() for w in waiters] == [True, True, False]
    waiters[2].cancel()


async def test_a_cancelled_waiter_holds_nothing() -> None:
    slots = Slots()
    await slots.take(ONE)
    first, second = taking(slots, ONE), taking(slots, ONE)
    await settle()

    first.cancel()
    await settle()
    slots.give(ONE)

    await second
    slots.give(ONE)
    assert slots.try_take(ONE)


async def test_a_waiter_cancelled_in_the_moment_it_is_served_passes_its_place_on() -> None:
    slots = Slots()
    await slots.take(ONE)
    first, second = taking(slots, ONE), taking(slots, ONE)
    await settle()

    slots.give(ONE)
    first.cancel()

    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    slots.give(ONE)
    assert slots.try_take(ONE)


async def test_whoever_stood_behind_a_cancelled_waiter_is_served_at_once() -> None:
    slots = Slots()
    await slots.take(ONE)
    ahead, behind = taking(slots, BOTH), taking(slots, DESK)
    await settle()
    assert not behind.done(), "the desk is free, but somebody ahead waits for it"

    ahead.cancel()
    await settle()

    assert behind.done()


SPECS = (ONE, TWO, DESK, DESK_TOO, BOTH, FREE)
CAPACITY = {"tool one": 1, "tool two": 2, "resource desk": 1}


def needs(spec: ToolSpec) -> list[str]:
    tool = [f"tool {spec.name}"] if spec.limit is not None else []
    return tool + ([f"resource {spec.resource}"] if spec.resource is not None else [])


class SlotsMachine(RuleBasedStateMachine):
    """Calls come, wait, are served, end and go away in any order.

    Laws: nothing is used beyond its capacity, nobody waits for what is free and unclaimed by somebody ahead, and
    nobody is served before somebody who needs the same and came earlier.
    """

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.slots = Slots()
        self.holders: list[ToolSpec] = []
        self.waiters: list[tuple[ToolSpec, asyncio.Task[None]]] = []

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for _, task in self.waiters:
                task.cancel()
            self.run()
            self.loop.close()

    def run(self) -> None:
        self.loop.run_until_complete(settle())
        ahead: set[str] = set()
        for spec, task in self.waiters:
            if not task.done():
                ahead |= set(needs(spec))
            elif not task.cancelled():
                assert not ahead & set(needs(spec)), "it was served before somebody who came earlier"
        served = [spec for spec, task in self.waiters if task.done() and not task.cancelled()]
        self.waiters = [(spec, task) for spec, task in self.waiters if not task.done()]
        self.holders += served

    @rule(spec=st.sampled_from(SPECS))
    def come(self, spec: ToolSpec) -> None:
        self.waiters.append((spec, self.loop.create_task(self.slots.take(spec))))
        self.run()

    @rule(spec=st.sampled_from(SPECS))
    def try_once(self, spec: ToolSpec) -> None:
        if self.slots.try_take(spec):
            self.holders.append(spec)

    @precondition(lambda self: bool(getattr(self, "holders", None)))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.slots.give(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))
        self.run()

    @precondition(lambda self: bool(getattr(self, "waiters", None)))
    @rule(data=st.data())
    def go_away(self, data: st.DataObject) -> None:
        self.waiters[data.draw(st.integers(0, len(self.waiters) - 1))][1].cancel()
        self.run()

    @precondition(lambda self: bool(getattr(self, "holders", None)) and bool(getattr(self, "waiters", None)))
    @rule(data=st.data())
    def end_and_go_away_at_once(self, data: st.DataObject) -> None:
        self.slots.give(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))
        self.waiters[data.draw(st.integers(0, len(self.waiters) - 1))][1].cancel()
        self.run()

    @invariant()
    def nothing_is_used_beyond_its_capacity(self) -> None:
        used = Counter(key for spec in getattr(self, "holders", ()) for key in needs(spec))
        assert all(count <= CAPACITY[key] for key, count in used.items())

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        used = Counter(key for spec in getattr(self, "holders", ()) for key in needs(spec))
        claimed: set[str] = set()
        for spec, _ in getattr(self, "waiters", ()):
            keys = needs(spec)
            assert set(keys) & claimed or any(used[key] >= CAPACITY[key] for key in keys)
            claimed |= set(keys)


SlotsMachine.TestCase.settings = settings(
    max_examples=cases(40, 1_000), stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSlotsMachine = SlotsMachine.TestCase
