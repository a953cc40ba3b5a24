"""A clock that moves when a test says so.

    clock = VirtualClock()
    async with Runtime("memory", agents=[agent], clock=clock) as runtime:
        receipt = await session.send("hello")      # the provider fails, and is asked again in half a second
        await clock.wait_sleeping()                # …so a task sleeps now
        clock.advance(1)                           # half a second is over

Virtual is what reads this clock: due times, retries, leases, budgets, the age of events. Real are the delays of the
event loop itself: a tool's `timeout`, `run(timeout=…)`, the `grace` of leaving, how often a Runtime polls its store.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Any

EPOCH_MS = 1_767_225_600_000
"""Where virtual time begins: the first instant of 2026."""

QUIET_POLLS = 5
POLL_SECONDS = 0.001


class VirtualClock:
    """Wall and monotonic time that stand still until they are moved.

    `auto=True` moves them by itself: when a task sleeps and the event loop has had nothing to run for five
    milliseconds of real time, the clock jumps to the end of the earliest sleep. Work on other threads (a sync tool, a
    write to disk) is invisible to an event loop, so a body that takes longer than that on a thread may see time pass.
    Where that matters, use `advance`.

    Reading is safe from any thread; sleeping and moving belong to one event loop.
    """

    def __init__(self, start: int = EPOCH_MS, *, auto: bool = False) -> None:
        self._wall, self._passed, self._auto = start, 0.0, auto
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._watchers: list[tuple[int, asyncio.Future[None]]] = []
        self._polling = False

    # ------------------------------------------------------------------ the port

    def now(self) -> int:
        """Wall time in milliseconds."""
        return self._wall + round(self._passed * 1000)

    def monotonic(self) -> float:
        """Seconds since the clock was made; `jump` does not move it."""
        return self._passed

    async def sleep(self, seconds: float) -> None:
        """Wait until so much virtual time has passed. A jump of the wall clock neither ends nor prolongs it."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._sleepers, (self._passed + seconds, next(self._order), future))
        self._wake_watchers()
        if self._auto and not self._polling:
            self._polling = True
            loop.call_later(POLL_SECONDS, self._poll, loop, 0)
        await future

    # ------------------------------------------------------------------ the test's side

    @property
    def sleeping(self) -> int:
        """How many sleep now."""
        return sum(1 for _, _, future in self._sleepers if not future.done())

    async def wait_sleeping(self, count: int = 1) -> None:
        """Wait, in real time, until at least `count` sleep: nothing more will happen before the clock moves."""
        if self.sleeping >= count:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append((count, future))
        await future

    def advance(self, seconds: float) -> None:
        """Let time pass. Sleepers wake in the order in which their sleeps end."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: jump({seconds:g}) moves the wall clock alone")
        self._move_to(self._passed + seconds)

    def jump(self, seconds: float) -> None:
        """Move wall time alone, forwards or backwards, as an administrator, NTP or a flat battery would."""
        self._wall += round(seconds * 1000)

    # ------------------------------------------------------------------ parts

    def _move_to(self, moment: float) -> None:
        self._passed = moment
        while self._sleepers and self._sleepers[0][0] <= self._passed:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)

    def _wake_watchers(self) -> None:
        sleeping, waiting = self.sleeping, self._watchers
        self._watchers = [(count, future) for count, future in waiting if count > sleeping]
        for count, future in waiting:
            if count <= sleeping and not future.done():
                future.set_result(None)

    def _poll(self, loop: asyncio.AbstractEventLoop, quiet: int) -> None:
        """Check whether the loop had anything to run since the last poll; after enough quiet, jump ahead."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        if not self._sleepers:
            self._polling = False
            return
        # asyncio keeps what is to run next in `_ready`. Other loops do not show it; there real time alone decides.
        ready: Any = getattr(loop, "_ready", ())
        quiet = 0 if len(ready) else quiet + 1
        if quiet >= QUIET_POLLS:
            quiet = 0
            self._move_to(self._sleepers[0][0])
        loop.call_later(POLL_SECONDS, self._poll, loop, quiet)
