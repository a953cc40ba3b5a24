"""How much is tried: a sample in the gate, the same one every time; new cases, and many, in `make fuzz`."""

from __future__ import annotations

import os

FULL = os.environ.get("MAINSTAY_FUZZ") == "full"


def cases(sample: int, full: int) -> int:
    """How many examples of something are tried."""
    return full if FULL else sample
