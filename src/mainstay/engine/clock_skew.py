"""ClockSkew of the wall clock, seen against the monotonic one: they neither end a wait early nor prolong it."""

from __future__ import annotations

from mainstay.ports.host import Clock

JUMP_MS = 1000
"""A clock that is nudged into step moves by less between two looks."""


class ClockSkew:
    """Those that were seen since this was made, by whoever looks a few times a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._seen = clock, list[tuple[int, int]]()
        self._base = self._offset()
        self.back = 0

    def _offset(self) -> int:
        return self._clock.now() - round(self._clock.monotonic() * 1000)

    def look(self) -> int:
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
        now = self.look()
        return max(0, self.due(since, due) - now) / 1000
