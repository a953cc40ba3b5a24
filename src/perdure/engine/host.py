"""The real clock and its jumps, and random numbers of the system."""

from __future__ import annotations

import asyncio
import os
import struct
import time

from perdure.ports.host import Clock

# Ownership must not outlive a suspended laptop: this clock counts the time asleep where the system has one.
_MONOTONIC = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
WORDS = 256


class SystemClock:
    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.clock_gettime(_MONOTONIC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SystemRandom:
    """Random numbers of the system, drawn in blocks: each draw is a system call that releases the interpreter."""

    def __init__(self) -> None:
        self._words: list[int] = []
        self._pid = 0

    def bits(self, count: int) -> int:
        if not self._words or self._pid != os.getpid():
            self._words, self._pid = list(struct.unpack(f"{WORDS}Q", os.urandom(WORDS * 8))), os.getpid()
        word = self._words.pop() >> max(64 - count, 0)
        return word if count <= 64 else word << (count - 64) | self.bits(count - 64)


JUMP_MS = 1000
"""A clock that is nudged into step moves by less between two looks."""


class ClockSkew:
    """Jumps of the wall clock, seen against the monotonic one, so that they neither end a wait early nor prolong it.

    `look` is called a few times a second; `_seen` are the jumps since this was made, each as the times before and after
    it, and `back` counts the milliseconds of those that went backwards.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._seen = clock, list[tuple[int, int]]()
        self._base = self._offset()
        self.back = 0

    def _offset(self) -> int:
        return self._clock.now() - round(self._clock.monotonic() * 1000)

    def measure(self) -> int:
        """The time now, after taking note of a jump since the last look."""
        now, jump = self._clock.now(), self._offset() - self._base
        if abs(jump) > JUMP_MS:
            self._base += jump
            self._seen.append((now - jump, now))
            self.back += max(-jump, 0)
        return now

    def due(self, since: int, due: int) -> int:
        """When something is due on today's clock. What was set just before a jump backwards counts as set after it."""
        for before, after in self._seen:
            if since <= before < after or since < after < before:
                since, due = since + after - before, due + after - before
        return due

    def seconds_until(self, since: int, due: int) -> float:
        now = self.measure()
        return max(0, self.due(since, due) - now) / 1000
