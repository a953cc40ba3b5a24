"""Writing to a store in trouble: a full or locked disk stalls a scope, it does not lose what has happened."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mainstay.errors import StoreError, StoreInherited, StoreUnavailable
from mainstay.ports.host import Clock

R = TypeVar("R")
T = TypeVar("T")

log = logging.getLogger("mainstay.engine")

PAUSES = (0.1, 0.3, 1.0, 3.0)
"""Seconds between tries while the store is unavailable; the last one repeats."""


class Patience:
    """Tries again until the store has answered. `stalled` is why it does not take writes just now."""

    __slots__ = ("_clock", "_on_stall", "_what", "stalled")

    def __init__(self, what: str, clock: Clock, on_stall: Callable[[StoreError], None] | None = None) -> None:
        self._what, self._clock, self._on_stall = what, clock, on_stall
        self.stalled: StoreError | None = None

    async def until_done(self, work: Callable[[T], Awaitable[R]], subject: T) -> R:
        tries = 0
        while True:
            try:
                receipt = await work(subject)
            except StoreInherited:
                raise
            except StoreUnavailable as error:
                if self.stalled is None:
                    log.warning("%s stalls: %s", self._what, error)
                    if self._on_stall is not None:
                        self._on_stall(error)
                self.stalled = error
                await self._clock.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
                tries += 1
            else:
                self.stalled = None
                return receipt
