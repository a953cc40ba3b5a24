"""What the machine around us supplies: time and randomness. Nothing above reads a clock by itself."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """`now` is wall time in milliseconds, for people and due times; `monotonic` is seconds, for ownership."""

    def now(self) -> int: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class Random(Protocol):
    """Noise for ids, keys and jitter."""

    def bits(self, count: int) -> int: ...
