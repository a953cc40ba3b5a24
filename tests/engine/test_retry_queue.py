"""The queue of model calls that wait for another attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from perdure.engine.retry_queue import RetryQueue
from perdure.engine.runner import Supervisor
from perdure.testing import VirtualClock
from tests.kit import SOON


class Opened:
    """What the queue has opened, each with the time."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.waits, self.taken = clock, list[tuple[float, str]](), set[str]()
        self._changed = asyncio.Event()

    async def until(self, count: int) -> None:
        while len(self.waits) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), SOON)

    async def resolve(self, wait_id: str) -> bool:
        if wait_id in self.taken:
            return False
        self.waits.append((round(self.clock.monotonic(), 3), wait_id))
        self._changed.set()
        return True

    @property
    def names(self) -> list[str]:
        return [name for _, name in self.waits]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(auto=True)


@pytest.fixture
def opened(clock: VirtualClock) -> Opened:
    return Opened(clock)


@pytest.fixture
async def queue(clock: VirtualClock, opened: Opened) -> AsyncGenerator[RetryQueue]:
    tasks = Supervisor()

    def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return tasks.spawn(work, name)

    yield RetryQueue(clock, spawn, opened.resolve)
    await tasks.stop()


async def test_two_retries_of_a_model_start_in_a_second(queue: RetryQueue, clock: VirtualClock, opened: Opened) -> None:
    for number in range(6):
        queue.park("m", clock.now() + 1_000, f"w{number}", f"t{number}")
    await opened.until(6)

    assert opened.waits == [(1.0, "w0"), (1.5, "w1"), (2.0, "w2"), (2.5, "w3"), (3.0, "w4"), (3.5, "w5")]


async def test_the_oldest_goes_first(queue: RetryQueue, clock: VirtualClock, opened: Opened) -> None:
    for number, seconds in enumerate((9, 3, 5)):
        queue.park("m", clock.now() + seconds * 1_000, f"w{number}", f"t{number}")
    await opened.until(3)

    assert opened.names == ["w1", "w2", "w0"]


async def test_models_do_not_wait_for_each_other(queue: RetryQueue, clock: VirtualClock, opened: Opened) -> None:
    for model in "ab":
        for number in range(2):
            queue.park(model, clock.now(), f"{model}{number}", f"t{model}{number}")
    await opened.until(4)

    assert sorted(opened.waits) == [(0.0, "a0"), (0.0, "b0"), (0.5, "a1"), (0.5, "b1")]


async def test_the_first_answer_wakes_all_within_half_a_minute(
    queue: RetryQueue, clock: VirtualClock, opened: Opened
) -> None:
    for number in range(300):
        queue.park("m", clock.now() + 3_600_000, f"w{number}", f"t{number}")
    queue.answered("m")
    await opened.until(300)

    times = [at for at, _ in opened.waits]
    assert times == sorted(times)
    assert times[0] == 0
    assert 29 < times[-1] < 30
    assert max(times.count(at) for at in times) == 1
    assert not queue.failing


async def test_calls_that_are_woken_wait_again_when_the_model_fails_again(
    queue: RetryQueue, clock: VirtualClock, opened: Opened
) -> None:
    for number in range(300):
        queue.park("m", clock.now() + 3_600_000, f"w{number}", f"t{number}")
    queue.answered("m")
    await opened.until(10)
    queue.park("m", clock.now() + 3_600_000, "again", "t")
    seen, at = len(opened.waits), clock.monotonic()
    await opened.until(seen + 20)

    assert clock.monotonic() - at >= 9
    assert queue.failing


async def test_what_another_worker_has_taken_costs_no_retry(
    queue: RetryQueue, clock: VirtualClock, opened: Opened
) -> None:
    opened.taken = {f"w{number}" for number in range(50)}
    for number in range(52):
        queue.park("m", clock.now(), f"w{number}", f"t{number}")
    await opened.until(2)

    assert opened.waits == [(0.0, "w50"), (0.5, "w51")]
    assert queue.take_grant("t50")
    assert not queue.take_grant("t50")
    assert not queue.take_grant("t1")


async def test_a_task_that_is_cancelled_leaves_the_queue(
    queue: RetryQueue, clock: VirtualClock, opened: Opened
) -> None:
    waiting = asyncio.create_task(queue.wait("m", clock.now() + 60_000))
    await clock.wait_sleeping()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    queue.park("m", clock.now() + 60_000, "w", "t")
    await opened.until(1)

    assert opened.waits == [(60.0, "w")]
