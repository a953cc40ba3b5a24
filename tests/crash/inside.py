"""Kills inside the transaction of one write, in scenarios whose writes have no order that is the same each time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from perdure.testing.crash import ForkServer, Lab, Statement
from tests.fuzzing import REAL_KILLS


def statements_of(forks: ForkServer, scenario: Callable[[Lab], Awaitable[None]], write: str) -> list[Statement]:
    """The statements of a write; in the gate the commit alone, before which all others have been executed."""
    assert forks.play([], scenario).problems == []
    found = [replace(each, number=0) for each in forks.statements if each.within == write]
    assert found[-1].text == "COMMIT"
    assert len(found) > 2
    return found if REAL_KILLS is None else found[-1:]
