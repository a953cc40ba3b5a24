"""When a failed attempt is made again. Due times are recorded, so a crash in between neither hurries nor forgets."""

from __future__ import annotations

from msgspec import Struct

from perdure.ports.host import Random


class RetryPolicy(Struct, frozen=True):
    """`attempts` in all; the wait doubles from `base` to `cap` seconds, with up to a quarter of jitter."""

    attempts: int = 4
    base: float = 0.5
    cap: float = 10.0
    asked_cap: float = 60.0

    def delay(self, attempt: int, asked: float | None, random: Random) -> float:
        """Seconds to wait after failed attempt number `attempt`; what the other side asked for goes first."""
        if isinstance(asked, int | float) and asked == asked:  # not NaN; an int may be beyond what a float can hold
            return min(max(asked, 0.0), self.asked_cap)
        wait = min(self.base * 2.0 ** min(attempt - 1, 60), self.cap)
        return wait * (1 - random.bits(16) / 65536 / 4)

    def due(self, recorded: int, now: int) -> int:
        """When a recorded attempt is due (ms): in no case later than any wait of this policy. The clock that set it may
        have been ahead of ours."""
        return min(recorded, now + int(max(self.cap, self.asked_cap) * 1000))


class RetryBudget:
    """How many more attempts a Runtime makes while nothing answers, so that an outage is no storm of requests.

    An attempt that follows a failed one costs one; an answer earns a tenth of one. Not durable: a new Runtime begins
    with a full budget.
    """

    def __init__(self, capacity: int = 200, earned: float = 0.1) -> None:
        self._left, self._capacity, self._earned = float(capacity), float(capacity), earned
        self.is_full = True

    def take(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        self.is_full = False
        return True

    def answered(self) -> None:
        """An answer came; says nothing new while the budget `is_full`."""
        self._left = min(self._left + self._earned, self._capacity)
        self.is_full = self._left == self._capacity


MODEL_RETRIES = RetryPolicy()
