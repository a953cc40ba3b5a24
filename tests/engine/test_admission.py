"""Admission under named limits: never too many at once, first come first served, nothing lost or held for ever."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from perdure.engine.admission import Admission, Capacity, Needs
from tests.fuzzing import cases

FREE: Needs = ()
ONE = (Capacity("tool one", 1),)
TWO = (Capacity("tool two", 2),)
DESK = (Capacity("resource desk", 1),)
BOTH = (*ONE, *DESK)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(3):
        await asyncio.sleep(0)


def taking(admission: Admission, needs: Needs) -> asyncio.Task[None]:
    return asyncio.create_task(admission.take(needs))


async def test_work_without_limits_is_always_admitted() -> None:
    admission = Admission()

    assert all(admission.try_take(FREE) for _ in range(100))
    await admission.take(FREE)
    admission.release(FREE)


async def test_a_limit_is_a_number_of_places() -> None:
    admission = Admission()

    assert [admission.try_take(TWO) for _ in range(3)] == [True, True, False]
    admission.release(TWO)
    assert [admission.try_take(TWO) for _ in range(2)] == [True, False]


async def test_work_that_must_go_on_is_over_the_limit_and_later_work_waits_for_it() -> None:
    admission = Admission()
    admission.take_beyond(ONE)
    admission.take_beyond(ONE)
    assert (admission.in_use("tool one"), admission.free(ONE[0])) == (2, 0)
    waiter = taking(admission, ONE)

    admission.release(ONE)
    await settle()
    assert not waiter.done()
    admission.release(ONE)
    await waiter

    assert (admission.in_use("tool one"), admission.free(ONE[0])) == (1, 0)


async def test_no_place_is_free_while_a_waiter_is_first_in_line_for_it() -> None:
    admission = Admission()
    assert admission.free(TWO[0]) == 2
    await admission.take(DESK)
    waiter = taking(admission, (*TWO, *DESK))
    await settle()

    assert admission.free(TWO[0]) == 0
    admission.release(DESK)
    await waiter

    assert admission.free(TWO[0]) == 1


async def test_a_body_on_a_thread_releases_its_place_from_there() -> None:
    admission = Admission()
    await admission.take(ONE)
    waiter = taking(admission, ONE)
    await settle()
    assert (admission.in_use("tool one"), admission.waiting()) == (1, 1)

    await asyncio.to_thread(admission.release_from_thread, asyncio.get_running_loop(), ONE)
    await waiter

    assert (admission.in_use("tool one"), admission.waiting()) == (1, 0)


def test_a_thread_that_outlives_its_event_loop_releases_nothing_and_raises_nothing() -> None:
    admission, loop = Admission(), asyncio.new_event_loop()
    loop.close()

    admission.release_from_thread(loop, ONE)

    assert admission.in_use("tool one") == 0


async def test_a_limit_does_not_hold_up_another_one() -> None:
    admission = Admission()

    assert admission.try_take(DESK)
    assert not admission.try_take(DESK)
    assert admission.try_take(ONE)
    admission.release(DESK)
    assert admission.try_take(DESK)


async def test_work_under_two_limits_takes_both_places_or_none() -> None:
    admission = Admission()
    assert admission.try_take(DESK)

    assert not admission.try_take(BOTH)

    assert admission.try_take(ONE), "the place of the tool was not held while the desk was taken"
    admission.release(DESK)
    assert not admission.try_take(BOTH)
    assert admission.try_take(DESK)


async def test_waiters_are_served_in_the_order_they_came() -> None:
    admission = Admission()
    await admission.take(ONE)
    waiters = [taking(admission, ONE) for _ in range(4)]
    await settle()

    for position, waiter in enumerate(waiters):
        assert [w.done() for w in waiters] == [True] * position + [False] * (4 - position)
        admission.release(ONE)
        await waiter
    admission.release(ONE)
    assert admission.try_take(ONE)


async def test_a_newcomer_does_not_overtake_whoever_waits() -> None:
    admission = Admission()
    await admission.take(DESK)
    waiter = taking(admission, BOTH)
    await settle()

    assert not admission.try_take(ONE), "the place is free, but somebody waits for it"
    admission.release(DESK)
    assert not admission.try_take(DESK)

    await waiter


async def test_a_later_waiter_does_not_overtake_one_that_needs_the_same_and_more() -> None:
    admission = Admission()
    await admission.take(ONE)
    await admission.take(DESK)
    first, second = taking(admission, BOTH), taking(admission, DESK)
    await settle()

    admission.release(DESK)
    await settle()
    assert not second.done(), "it would keep the first from the desk for ever"

    admission.release(ONE)
    await first
    admission.release(BOTH)
    await second


async def test_waiters_that_need_something_else_are_not_held_up() -> None:
    admission = Admission()
    await admission.take(ONE)
    await admission.take(DESK)
    first, second = taking(admission, ONE), taking(admission, DESK)
    await settle()

    admission.release(DESK)
    await second

    assert not first.done()
    admission.release(ONE)
    await first


async def test_several_waiters_are_served_at_once_when_there_is_room() -> None:
    admission = Admission()
    await admission.take(TWO)
    await admission.take(TWO)
    waiters = [taking(admission, TWO) for _ in range(3)]
    await settle()

    admission.release(TWO)
    admission.release(TWO)
    await settle()

    assert [w.done() for w in waiters] == [True, True, False]
    waiters[2].cancel()


async def test_a_cancelled_waiter_holds_nothing() -> None:
    admission = Admission()
    await admission.take(ONE)
    first, second = taking(admission, ONE), taking(admission, ONE)
    await settle()

    first.cancel()
    await settle()
    admission.release(ONE)

    await second
    admission.release(ONE)
    assert admission.try_take(ONE)


async def test_a_waiter_cancelled_in_the_moment_it_is_served_passes_its_place_on() -> None:
    admission = Admission()
    await admission.take(ONE)
    first, second = taking(admission, ONE), taking(admission, ONE)
    await settle()

    admission.release(ONE)
    first.cancel()

    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    admission.release(ONE)
    assert admission.try_take(ONE)


async def test_whoever_stood_behind_a_cancelled_waiter_is_served_at_once() -> None:
    admission = Admission()
    await admission.take(ONE)
    ahead, behind = taking(admission, BOTH), taking(admission, DESK)
    await settle()
    assert not behind.done(), "the desk is free, but somebody ahead waits for it"

    ahead.cancel()
    await settle()

    assert behind.done()


NEEDS = (ONE, TWO, DESK, BOTH, FREE)
CAPACITY = {"tool one": 1, "tool two": 2, "resource desk": 1}


def names(needs: Needs) -> list[str]:
    return [need.name for need in needs]


class AdmissionMachine(RuleBasedStateMachine):
    """Calls come, wait, are served, end and go away in any order.

    Laws: nothing is used beyond its capacity, nobody waits for what is free and unclaimed by somebody ahead, and
    nobody is served before somebody who needs the same and came earlier.
    """

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.admission = Admission()
        self.holders: list[Needs] = []
        self.waiters: list[tuple[Needs, asyncio.Task[None]]] = []

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for _, task in self.waiters:
                task.cancel()
            self.run()
            self.loop.close()

    def run(self) -> None:
        self.loop.run_until_complete(settle())
        ahead: set[str] = set()
        for needs, task in self.waiters:
            if not task.done():
                ahead |= set(names(needs))
            elif not task.cancelled():
                assert not ahead & set(names(needs)), "it was served before somebody who came earlier"
        served = [needs for needs, task in self.waiters if task.done() and not task.cancelled()]
        self.waiters = [(needs, task) for needs, task in self.waiters if not task.done()]
        self.holders += served

    @rule(needs=st.sampled_from(NEEDS))
    def come(self, needs: Needs) -> None:
        self.waiters.append((needs, self.loop.create_task(self.admission.take(needs))))
        self.run()

    @rule(needs=st.sampled_from(NEEDS))
    def try_once(self, needs: Needs) -> None:
        if self.admission.try_take(needs):
            self.holders.append(needs)

    @precondition(lambda self: bool(getattr(self, "holders", None)))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.admission.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))
        self.run()

    @precondition(lambda self: bool(getattr(self, "waiters", None)))
    @rule(data=st.data())
    def go_away(self, data: st.DataObject) -> None:
        self.waiters[data.draw(st.integers(0, len(self.waiters) - 1))][1].cancel()
        self.run()

    @precondition(lambda self: bool(getattr(self, "holders", None)) and bool(getattr(self, "waiters", None)))
    @rule(data=st.data())
    def end_and_go_away_at_once(self, data: st.DataObject) -> None:
        self.admission.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))
        self.waiters[data.draw(st.integers(0, len(self.waiters) - 1))][1].cancel()
        self.run()

    @invariant()
    def nothing_is_used_beyond_its_capacity(self) -> None:
        used = Counter(key for needs in getattr(self, "holders", ()) for key in names(needs))
        assert all(count <= CAPACITY[key] for key, count in used.items())

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        used = Counter(key for needs in getattr(self, "holders", ()) for key in names(needs))
        claimed: set[str] = set()
        for needs, _ in getattr(self, "waiters", ()):
            keys = names(needs)
            assert set(keys) & claimed or any(used[key] >= CAPACITY[key] for key in keys)
            claimed |= set(keys)


AdmissionMachine.TestCase.settings = settings(
    max_examples=cases(40, 1_000), stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAdmissionMachine = AdmissionMachine.TestCase
