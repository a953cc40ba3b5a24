"""Chance that does not differ from run to run."""

from __future__ import annotations

import random


class Chance(random.Random):
    """Randomness that is the same on every replay. `ctx.random()` is a float, `ctx.random.choice(…)` works too."""

    def __call__(self) -> float:
        return self.random()
