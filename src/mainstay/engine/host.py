"""The real clock and real noise."""

from __future__ import annotations

import asyncio
import os
import struct
import time

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
    """The system's noise, drawn in blocks: each draw is a system call that gives the interpreter away."""

    def __init__(self) -> None:
        self._words: list[int] = []
        self._pid = 0

    def bits(self, count: int) -> int:
        if not self._words or self._pid != os.getpid():
            self._words, self._pid = list(struct.unpack(f"{WORDS}Q", os.urandom(WORDS * 8))), os.getpid()
        word = self._words.pop() >> max(64 - count, 0)
        return word if count <= 64 else word << (count - 64) | self.bits(count - 64)
