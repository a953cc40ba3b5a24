"""What the branches of a process wait for, and when the whole process is parked.

    blocked     a branch that waits for a time, a signal or another process
    queueing    a branch that waits for what calls in this worker share (a slot of a tool): it cannot be parked, but
                needs no place of the worker
    idle        no branch works: after a short delay the process is parked, and nothing of it stays in memory

A blocked branch holds one future, which a signal, a timer, the end of a process or a stop resolves. The branch counts
as working from that moment on, not from when its task is resumed: otherwise the process could be found idle, and
parked, in between.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec import Struct

from mainstay.model.process import WaitOn
from mainstay.ports.host import Clock

PARK_DELAY = 0.05
"""Seconds that an idle process stays in memory: an answer often comes at once."""
SHORT_SLEEP = 1.0
"""Sleeps up to so many seconds are spent in memory: to park and come back would cost more."""

STOP, UNLOAD = object(), object()
"""What a wait ends with when its branch is asked to stop, and when the process is unloaded."""

R = TypeVar("R")


class Waiter(Struct, eq=False):
    """A blocked branch, and the future that ends its wait."""

    on: WaitOn
    result: asyncio.Future[Any]


class Signal(Struct, frozen=True):
    sequence: int
    payload: Any


class Waits:
    """The waits of one process. `park` writes it to disk, or returns False when something has happened meanwhile;
    `failed` is given an error of that.

    `working` counts the branches that are neither blocked nor queueing, `_eager` the waits that may end at any moment:
    those for more than a time. `_signals` have come and no branch has taken them; `_ended` are processes that have
    ended. `seconds_until` says how far off a due time is. Everything changes on the event loop only.
    """

    def __init__(
        self,
        clock: Clock,
        seconds_until: Callable[[int, int], float],
        park: Callable[[tuple[WaitOn, ...]], Awaitable[bool]],
        rest: Callable[[bool], None],
        failed: Callable[[Exception], object],
    ) -> None:
        self._clock, self._seconds_until, self._park = clock, seconds_until, park
        self._rest, self._failed = rest, failed
        self.working = self._queueing = 0
        self._waiters: dict[str, Waiter] = {}
        self._by_name: dict[tuple[str, str], dict[str, Waiter]] = {}
        self._eager = 0
        self._signals: dict[str, deque[Signal]] = {}
        self._ended: set[str] = set()
        # Due times on the monotonic clock; one task sleeps until the first of them.
        self._dues: list[tuple[float, int, Waiter]] = []
        self._order = itertools.count()
        self._timer: asyncio.Task[None] | None = None
        self._timer_at = 0.0
        self._park_delay: asyncio.Handle | None = None
        self._parking: asyncio.Task[None] | None = None
        self._is_closed = False

    # ------------------------------------------------------------------ waiting

    @property
    def signal_names(self) -> tuple[str, ...]:
        """The signals that branches wait for in memory."""
        return tuple(name for kind, name in self._by_name if kind == "signal")

    async def wait(self, on: WaitOn) -> Any:
        """What it brought: None when its time was up, STOP, or UNLOAD."""
        if on.kind == "process" and on.name in self._ended:
            return True
        waiter = Waiter(on, asyncio.get_running_loop().create_future())
        self._waiters[on.key] = waiter
        if on.kind != "time":
            self._eager += 1
            self._by_name.setdefault((on.kind, on.name), {})[on.key] = waiter
        if on.due is not None:
            ends = self._clock.monotonic() + self._seconds_until(on.since, on.due)
            heapq.heappush(self._dues, (ends, next(self._order), waiter))
        self._block()
        try:
            return await waiter.result
        finally:
            if not waiter.result.done() or waiter.result.cancelled():
                self._resume()  # its task was cancelled: nothing has resolved its wait
            self._remove(waiter)

    async def queue(self, turn: Callable[[], Awaitable[R]]) -> R:
        """Wait for something in this worker's memory that other processes hold."""
        self._queueing += 1
        self._block()
        try:
            return await turn()
        finally:
            self._queueing -= 1
            self._resume()

    def _remove(self, waiter: Waiter) -> None:
        on = waiter.on
        del self._waiters[on.key]
        if on.kind == "time":
            return
        self._eager -= 1
        named = self._by_name[on.kind, on.name]
        del named[on.key]
        if not named:
            del self._by_name[on.kind, on.name]

    def _block(self) -> None:
        self.working -= 1
        self.check_idle()
        if self.working:
            self._start_timer()

    def resolve(self, key: str, value: Any) -> None:
        """End the wait of the branch at `key`, if it waits and nothing has ended that before."""
        waiter = self._waiters.get(key)
        if waiter is not None:
            self._resolve(waiter, value)

    def resolve_all(self, value: Any) -> None:
        for waiter in list(self._waiters.values()):
            self._resolve(waiter, value)

    def _resolve(self, waiter: Waiter, value: Any) -> None:
        if not waiter.result.done():
            waiter.result.set_result(value)
            self._resume()

    # ------------------------------------------------------------------ time

    def _start_timer(self) -> None:
        """Have a task wake the branch whose time comes first."""
        while self._dues and self._dues[0][2].result.done():
            heapq.heappop(self._dues)
        if not self._dues or self._is_closed:
            return
        first = self._dues[0][0]
        if self._timer is not None and not self._timer.done():
            if self._timer_at <= first:
                return
            self._timer.cancel()
        self._timer_at = first
        self._timer = asyncio.get_running_loop().create_task(self._fire(first))

    async def _fire(self, at: float) -> None:
        await self._clock.sleep(max(0.0, at - self._clock.monotonic()))
        now = max(at, self._clock.monotonic())
        while self._dues and self._dues[0][0] <= now:
            self._resolve(heapq.heappop(self._dues)[2], None)
        self._timer = None
        self._start_timer()

    # ------------------------------------------------------------------ parking

    def check_idle(self) -> None:
        """If no branch works, give up the worker's place; park after a delay, unless a wait is over soon."""
        blocked = self._waiters or self._queueing
        if self.working or not blocked or self._park_delay is not None or self._is_closed:
            return
        if self._parking is not None and not self._parking.done():
            return
        self._rest(True)
        while self._dues and self._dues[0][2].result.done():
            heapq.heappop(self._dues)
        if self._queueing or (self._dues and self._dues[0][0] - self._clock.monotonic() <= SHORT_SLEEP):
            self._start_timer()
            return
        loop = asyncio.get_running_loop()
        self._park_delay = loop.call_later(PARK_DELAY if self._eager else 0, self._begin_parking)

    def _begin_parking(self) -> None:
        self._park_delay = None
        if not self.working and not self._queueing and not self._is_closed:
            self._parking = asyncio.get_running_loop().create_task(self._try_to_park())

    async def _try_to_park(self) -> None:
        if self.working:  # a wait has ended since this task was made
            self._parking = None
            return
        try:
            parked = await self._park(tuple(waiter.on for waiter in self._waiters.values()))
        except Exception as error:  # whatever it is, it must end the waits: no branch waits for this task
            self._failed(error)
            return
        self._parking = None
        if not parked:
            self.check_idle()

    def _resume(self) -> None:
        """A branch works again."""
        self.working += 1
        if self._park_delay is not None:
            self._park_delay.cancel()
            self._park_delay = None
        self._rest(False)
        self._start_timer()

    async def close(self) -> None:
        """The run is over: no timer fires any more."""
        self._is_closed = True
        if self._park_delay is not None:
            self._park_delay.cancel()
        late = [task for task in (self._timer, self._parking) if task is not None and not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        del self._park, self._rest, self._failed  # they lead back here: without them the run is freed at once

    # ------------------------------------------------------------------ signals and ends of others

    def add_signal(self, name: str, signal: Signal) -> None:
        """A signal goes to the branch that has waited for it longest, or is kept."""
        for waiter in self._by_name.get(("signal", name), {}).values():
            if not waiter.result.done():
                self._resolve(waiter, signal)
                return
        self._signals.setdefault(name, deque()).append(signal)

    def take_signal(self, name: str) -> Signal | None:
        kept = self._signals.get(name)
        return kept.popleft() if kept else None

    def return_signal(self, name: str, signal: Signal) -> None:
        """The branch that took this signal was stopped before it was recorded: the next branch gets it, in its place
        by number."""
        for waiter in self._by_name.get(("signal", name), {}).values():
            if not waiter.result.done():
                self._resolve(waiter, signal)
                return
        kept = [signal, *self._signals.get(name, ())]
        self._signals[name] = deque(sorted(kept, key=lambda each: each.sequence))

    def kept_signals(self) -> list[int]:
        return sorted(each.sequence for kept in self._signals.values() for each in kept)

    def process_ended(self, process_id: str) -> None:
        """A process that a branch waits for, or is about to wait for, has ended."""
        self._ended.add(process_id)
        for waiter in list(self._by_name.get(("process", process_id), {}).values()):
            self._resolve(waiter, True)
