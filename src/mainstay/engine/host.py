"""The real clock and real noise."""

from __future__ import annotations

import asyncio
import os
import time

# Ownership must not outlive a suspended laptop: this clock counts the time asleep where the system has one.
_MONOTONIC = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
BLOCK = 2048


class SystemClock:
    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.clock_gettime(_MONOTONIC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SystemRandom:
    """The system's noise, drawn in blocks: each draw is a system call that gives the interpreter away."""

    def __init__(self) -> None:
        self._block, self._at, self._pid = b"", 0, 0

    def bits(self, count: int) -> int:
        size = (count + 7) // 8
        if self._at + size > len(self._block) or self._pid != os.getpid():
            self._block, self._at, self._pid = os.urandom(max(BLOCK, size)), 0, os.getpid()
        drawn = self._block[self._at : self._at + size]
        self._at += size
        return int.from_bytes(drawn, "big") >> (size * 8 - count)
