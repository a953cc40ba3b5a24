"""The real clock and real noise."""

from __future__ import annotations

import asyncio
import secrets
import time

# Ownership must not outlive a suspended laptop: this clock counts the time asleep where the system has one.
_MONOTONIC = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.clock_gettime(_MONOTONIC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SystemRandom:
    def bits(self, count: int) -> int:
        return secrets.randbits(count)
