"""Randomness that is the same on every replay. A module of its own, so that `random` is imported when it is used."""

from __future__ import annotations

import random


class SeededRandom(random.Random):
    """`ctx.random()` is a float, `ctx.random.choice(…)` works too."""

    def __call__(self) -> float:
        return self.random()
