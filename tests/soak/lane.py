"""What the lanes of the soak have in common: reading a ledger, and telling how it went."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

SHOWN = 20
"""Broken promises that are told one by one."""


class Counted(Protocol):
    """What a lane counts; as text it is the line that sums it up."""

    problems: list[str]


def lines(path: Path) -> list[str]:
    """What was written to a ledger so far."""
    return path.read_text().splitlines() if path.exists() else []


def report(count: Counted) -> int:
    """Say how a lane went; the exit status of its program."""
    print(f"\n{count}")
    for problem in count.problems[:SHOWN]:
        print(f"  {problem}")
    return 1 if count.problems else 0
