"""The model calls of one Runtime that wait for another attempt, and when each is made.

A failed call enters the queue with the time at which its next attempt is due. It waits in memory, or its turn is parked
(`park`) and the entry only remembers which wait to resolve. The queue starts attempts in the order of their due times:

    while a model fails    at most two a second per model (`PER_SECOND`): an outage causes no storm of requests
    its first answer       makes all attempts that wait for this model due within 30 s (`WAKE_SECONDS`), spread evenly

First attempts do not pass here. The queue is not durable: the due time of a parked turn is in its wait, and each worker
of a store takes such waits into its own queue when they are due (`found`). The first worker that resolves one has it.

All times of entries are on the monotonic clock, because the wall clock may jump. The queue lives on the event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from perdure.ports.host import Clock

PER_SECOND = 2
"""Retries of one model that a Runtime starts in a second."""
WAKE_SECONDS = 30.0
"""After the first answer of a model, all calls that wait for it are made within this time."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One call that waits for its next attempt, at `at` on the monotonic clock.

    `wake` is the future of a task in memory; `wait_id` is the wait of a parked turn. `woken`: an answer of the model
    has made it due, so that it starts without regard to the rate while the model answers.
    """

    model: str
    at: float
    wake: asyncio.Future[None] | None = None
    wait_id: str = ""
    turn_id: str = ""
    woken: bool = False
    left: bool = False


@dataclass(slots=True, eq=False)
class ModelState:
    """The state of one model. `free` is the earliest time of its next retry."""

    entries: list[tuple[float, int, Waiting]] = field(default_factory=list)
    failing: bool = False
    free: float = 0.0

    def starts_at(self, entry: Waiting) -> float:
        exempt = entry.woken and not self.failing
        return entry.at if exempt else max(entry.at, self.free)


class RetryQueue:
    """`resolve` opens a parked turn again by its wait, and is False if another worker was first.

    `_parked` are the entries of parked turns by the ids of their waits, `_granted` turns that were opened here and may
    make their attempt at once. `failing`: some model has failed since its last answer.
    """

    def __init__(
        self,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        resolve: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._clock, self._spawn, self._resolve = clock, spawn, resolve
        self._models: dict[str, ModelState] = {}
        self._parked: dict[str, Waiting] = {}
        self._granted: set[str] = set()
        self._order = itertools.count()
        self._timer: asyncio.Task[None] | None = None
        self._timer_at = 0.0
        self.failing = False

    def answered(self, model: str) -> None:
        """The model has answered. The first answer after failures makes all calls that wait for it due."""
        state = self._models.get(model)
        if state is None or not state.failing:
            return
        state.failing, now = False, self._clock.monotonic()
        self.failing = any(each.failing for each in self._models.values())
        waiting = [entry for _, _, entry in sorted(state.entries, key=lambda each: each[:2]) if not entry.left]
        for number, entry in enumerate(waiting):
            entry.at, entry.woken = min(entry.at, now + WAKE_SECONDS * number / len(waiting)), True
        state.entries = [(entry.at, next(self._order), entry) for entry in waiting]
        heapq.heapify(state.entries)
        self._advance()

    # ------------------------------------------------------------------ calls that wait

    def delay(self, model: str, due: int) -> float:
        """Return in how many seconds an attempt that is due then (ms) would start, behind those that wait already."""
        state, now = self._state(model), self._clock.monotonic()
        at = now + (due - self._clock.now()) / 1000
        before = sum(1 for earlier, _, entry in state.entries if earlier <= at and not entry.left)
        return max(at, state.free + before / PER_SECOND, now) - now

    async def wait(self, model: str, due: int) -> None:
        """Wait in memory until the attempt may start."""
        entry = Waiting(model, self._at(due), asyncio.get_running_loop().create_future())
        self._add(entry)
        try:
            assert entry.wake is not None
            await entry.wake
        finally:
            entry.left = True

    def park(self, model: str, due: int, wait_id: str, turn_id: str) -> None:
        """A turn was parked until its next attempt."""
        self._granted.discard(turn_id)
        if wait_id not in self._parked:
            entry = self._parked[wait_id] = Waiting(model, self._at(due), wait_id=wait_id, turn_id=turn_id)
            self._add(entry)

    def knows(self, wait_id: str) -> bool:
        return wait_id in self._parked

    def take_grant(self, turn_id: str) -> bool:
        """True if the turn was opened by this queue, so that its attempt starts at once; once for each opening."""
        if turn_id in self._granted:
            self._granted.remove(turn_id)
            return True
        return False

    # ------------------------------------------------------------------ parts

    def _state(self, model: str) -> ModelState:
        state = self._models.get(model)
        if state is None:
            state = self._models[model] = ModelState()
        return state

    def _at(self, due: int) -> float:
        return self._clock.monotonic() + (due - self._clock.now()) / 1000

    def _add(self, entry: Waiting) -> None:
        state = self._state(entry.model)
        state.failing = self.failing = True  # else nothing would wait for it
        heapq.heappush(state.entries, (entry.at, next(self._order), entry))
        self._advance()

    def _advance(self) -> None:
        """Start the entries that may start now, and set the timer for the next one."""
        now, first = self._clock.monotonic(), None
        for state in self._models.values():
            entries = state.entries
            while entries:
                entry = entries[0][2]
                if not entry.left:
                    at = state.starts_at(entry)
                    if at > now:
                        first = at if first is None else min(first, at)
                        break
                    if not (entry.woken and not state.failing):
                        state.free = now + 1 / PER_SECOND
                    self._start(entry, state)
                heapq.heappop(entries)
        if self._timer is not None and (first is None or first < self._timer_at):
            self._timer.cancel()
            self._timer = None
        if first is not None and self._timer is None:
            self._timer_at = first
            self._timer = self._spawn(self._sleep_until(first), "perdure retries")

    async def _sleep_until(self, at: float) -> None:
        await self._clock.sleep(max(at - self._clock.monotonic(), 0))
        self._timer = None
        self._advance()

    def _start(self, entry: Waiting, state: ModelState) -> None:
        if entry.wake is not None:
            if not entry.wake.done():
                entry.wake.set_result(None)
            return
        _ = self._spawn(self._open(entry, state), f"retry {entry.turn_id}")

    async def _open(self, entry: Waiting, state: ModelState) -> None:
        """Open a parked turn. If it is open already, or gone, its place in the rate is given back."""
        self._granted.add(entry.turn_id)
        opened = False
        try:
            opened = await self._resolve(entry.wait_id)
        finally:
            self._parked.pop(entry.wait_id, None)
            if not opened:
                self._granted.discard(entry.turn_id)
        if not opened:
            state.free = min(state.free, self._clock.monotonic())
            self._advance()
