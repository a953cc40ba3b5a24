"""Who works in a process, who waits for what, and when the whole of it may rest.

    blocked     a branch that waits for a time, a signal or another process
    in line     a branch that waits for what calls in this worker share: it cannot be parked, but needs no place
    idle        nobody works and everybody is blocked: after a short linger the process is parked, and nothing of it
                stays in memory

A branch that waits holds one future, and whoever has something for it sets that. A branch that was told counts as at
work from that moment, not from its next step: nobody can think the process idle in between.
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

LINGER = 0.05
"""Seconds that an idle process stays in memory: an answer often comes at once."""
NAP = 1.0
"""Sleeps up to so many seconds are spent in memory: to park and come back would cost more."""

CUT, AWAY = object(), object()

R = TypeVar("R")


class Waiter(Struct, eq=False):
    """A branch that is blocked, and how it is told."""

    on: WaitOn
    told: asyncio.Future[Any]


class Signal(Struct, frozen=True):
    sequence: int
    payload: Any


class Waiting:
    """The waits of one process. `park` writes it away, or says that something has happened; `failed` hears of a fault.

    `working` counts the branches that are neither blocked nor in line, `_eager` the waits that may be over at any
    moment: those for more than a time. `seconds_until` says how far off a wait's due time is.
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
        self.working = self._in_line = 0
        self._waiters: dict[str, Waiter] = {}
        self._by_name: dict[tuple[str, str], dict[str, Waiter]] = {}
        self._eager = 0
        self._signals: dict[str, deque[Signal]] = {}
        self._over: set[str] = set()
        # Due times on the monotonic clock; the alarm sleeps until the first of them.
        self._dues: list[tuple[float, int, Waiter]] = []
        self._order = itertools.count()
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_at = 0.0
        self._linger: asyncio.Handle | None = None
        self._parking: asyncio.Task[None] | None = None
        self._is_closed = False

    # ------------------------------------------------------------------ waiting

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals that branches wait for in memory."""
        return tuple(name for kind, name in self._by_name if kind == "signal")

    async def wait(self, on: WaitOn) -> Any:
        """What it brought: None when its time was up, CUT, or AWAY."""
        if on.kind == "process" and on.name in self._over:
            return True
        waiter = Waiter(on, asyncio.get_running_loop().create_future())
        self._add(waiter)
        self._block()
        try:
            return await waiter.told
        finally:
            if not waiter.told.done() or waiter.told.cancelled():
                self.working += 1  # torn out of its wait: nobody told it anything
                self._stir()
            self._remove(waiter)

    async def stand_in_line(self, turn: Callable[[], Awaitable[R]]) -> R:
        """Wait for something in this worker's memory that other processes hold."""
        self._in_line += 1
        self._block()
        try:
            return await turn()
        finally:
            self._in_line -= 1
            self.working += 1
            self._stir()

    def _add(self, waiter: Waiter) -> None:
        on = waiter.on
        self._waiters[on.key] = waiter
        if on.kind != "time":
            self._eager += 1
            self._by_name.setdefault((on.kind, on.name), {})[on.key] = waiter
        if on.due is not None:
            ends = self._clock.monotonic() + self._seconds_until(on.since, on.due)
            heapq.heappush(self._dues, (ends, next(self._order), waiter))

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
            self._arm()

    def tell(self, key: str, what: Any) -> None:
        """Tell the branch that waits at `key`, if it does and has not been told."""
        waiter = self._waiters.get(key)
        if waiter is not None:
            self._tell(waiter, what)

    def tell_all(self, what: Any) -> None:
        for waiter in list(self._waiters.values()):
            self._tell(waiter, what)

    def _tell(self, waiter: Waiter, what: Any) -> None:
        if not waiter.told.done():
            waiter.told.set_result(what)
            self.working += 1
            self._stir()

    # ------------------------------------------------------------------ time

    def _arm(self) -> None:
        """Have somebody wake the branch whose time comes first."""
        while self._dues and self._dues[0][2].told.done():
            heapq.heappop(self._dues)
        if not self._dues or self._is_closed:
            return
        first = self._dues[0][0]
        if self._alarm is not None and not self._alarm.done():
            if self._alarm_at <= first:
                return
            self._alarm.cancel()
        self._alarm_at = first
        self._alarm = asyncio.get_running_loop().create_task(self._ring(first))

    async def _ring(self, at: float) -> None:
        await self._clock.sleep(max(0.0, at - self._clock.monotonic()))
        now = max(at, self._clock.monotonic())
        while self._dues and self._dues[0][0] <= now:
            self._tell(heapq.heappop(self._dues)[2], None)
        self._alarm = None
        self._arm()

    # ------------------------------------------------------------------ resting

    def check_idle(self) -> None:
        """If nobody works, linger; then park."""
        blocked = self._waiters or self._in_line
        if self.working or not blocked or self._linger is not None or self._is_closed:
            return
        if self._parking is not None and not self._parking.done():
            return
        self._rest(True)
        while self._dues and self._dues[0][2].told.done():
            heapq.heappop(self._dues)
        if self._in_line or (self._dues and self._dues[0][0] - self._clock.monotonic() <= NAP):
            self._arm()
            return
        loop = asyncio.get_running_loop()
        self._linger = loop.call_later(LINGER if self._eager else 0, self._lie_down)

    def _lie_down(self) -> None:
        self._linger = None
        if not self.working and not self._in_line and not self._is_closed:
            self._parking = asyncio.get_running_loop().create_task(self._try_to_park())

    async def _try_to_park(self) -> None:
        if self.working:  # somebody was told something since this task was made
            self._parking = None
            return
        try:
            parked = await self._park(tuple(waiter.on for waiter in self._waiters.values()))
        except Exception as error:  # whatever it is, every branch must hear of it instead of waiting for ever
            self._failed(error)
            return
        self._parking = None
        if not parked:
            self.check_idle()

    def _stir(self) -> None:
        """Somebody works again."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._rest(False)
        self._arm()

    async def close(self) -> None:
        """The run is over: nothing rings any more."""
        self._is_closed = True
        if self._linger is not None:
            self._linger.cancel()
        late = [task for task in (self._alarm, self._parking) if task is not None and not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        del self._park, self._rest, self._failed  # they lead back here: without them the run is freed at once

    # ------------------------------------------------------------------ signals and ends of others

    def signalled(self, name: str, signal: Signal) -> None:
        """A signal goes to who has waited for it longest, or waits itself."""
        for waiter in self._by_name.get(("signal", name), {}).values():
            if not waiter.told.done():
                self._tell(waiter, signal)
                return
        self._signals.setdefault(name, deque()).append(signal)

    def take_signal(self, name: str) -> Signal | None:
        waiting = self._signals.get(name)
        return waiting.popleft() if waiting else None

    def give_back(self, name: str, signal: Signal) -> None:
        """Nobody has made anything of this signal after all: it is the next one's, in its old place."""
        for waiter in self._by_name.get(("signal", name), {}).values():
            if not waiter.told.done():
                self._tell(waiter, signal)
                return
        waiting = [signal, *self._signals.get(name, ())]
        self._signals[name] = deque(sorted(waiting, key=lambda each: each.sequence))

    def waiting_signals(self) -> list[int]:
        return sorted(each.sequence for waiting in self._signals.values() for each in waiting)

    def ended(self, process_id: str) -> None:
        """A process that somebody waits for, or is about to, has ended."""
        self._over.add(process_id)
        for waiter in list(self._by_name.get(("process", process_id), {}).values()):
            self._tell(waiter, True)
