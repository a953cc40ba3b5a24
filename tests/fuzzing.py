"""How much is tried: a sample in every lane, the same one each time; new cases, and many, in `make fuzz`."""

from __future__ import annotations

import os

FULL = os.environ.get("PERDURE_FUZZ") == "full"
REAL_KILLS = None if os.environ.get("PERDURE_CRASH") == "full" else 20
"""How often a scenario is really killed, of all its points. It dies at each of them on a store in memory and on a file,
in a tenth of the time; `make test-crash` kills it really at each."""


def cases(sample: int, full: int) -> int:
    """How many examples of something are tried."""
    return full if FULL else sample
