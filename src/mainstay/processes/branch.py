"""One branch of a durable function: a line of execution, and what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from mainstay.engine.gate import Gate

CANCEL, DROP = "cancel", "drop"


class PutAway(BaseException):
    """The process leaves this worker's memory: it is parked, or left to whoever takes it next."""


class Cut(asyncio.CancelledError):
    """A branch is asked to end, at the call where that finds it."""


class Branch:
    """One line of execution. `gate` is how a request reaches a step that it runs.

    `owes`, `paid`: see `branches.py`; `passed` is what it owes because its parent does. `unrecorded` counts its calls
    that no record answered. `in_call` and `in_step` say where it is, `refused` how often it was told that it is put
    away. `children` are the branches that it waits for, `work` is its code; `can_run` and `outside` are `Ordering`'s,
    which says what they mean.
    """

    __slots__ = (
        "calls",
        "can_run",
        "children",
        "gate",
        "in_call",
        "in_step",
        "key",
        "outside",
        "owes",
        "paid",
        "passed",
        "refused",
        "unrecorded",
        "work",
    )

    def __init__(self, key: str, parent: Branch | None = None) -> None:
        self.key, self.calls = key, 0
        self.work: Coroutine[Any, Any, Any] | None = None
        self.can_run = False
        self.outside: asyncio.Future[Any] | None = None
        self.gate = Gate()
        self.children: list[Branch] = []
        self.owes: set[str] = set() if parent is None else set(parent.owes)
        self.passed: set[str] = set(self.owes)
        self.paid: set[str] = set() if parent is None else set(parent.paid)
        self.unrecorded: int = 0 if parent is None else parent.unrecorded
        self.in_call = self.in_step = False
        self.refused = 0

    def next_key(self) -> str:
        self.calls += 1
        return f"{self.key}.{self.calls}" if self.key else str(self.calls)

    def pay(self) -> bool:
        """The call at hand is cut off. Whether that is because another branch was chosen."""
        dropped = DROP in self.owes
        self.paid |= self.owes
        self.owes.clear()
        self.gate.request = None
        return dropped

    def has_paid(self, dropped: bool) -> None:
        """The same on replay, where a record says so."""
        self.paid.add(DROP if dropped else CANCEL)
        if dropped:
            self.paid |= self.owes
        self.owes -= self.paid
        if not self.owes:
            self.gate.request = None

    def pay_through(self, branches: Sequence[Branch]) -> bool:
        """What was passed on to its branches, and paid by one of these, is paid. Whether there was anything."""
        due = {cause for each in branches for cause in each.paid & each.passed & self.owes}
        self.paid |= due
        self.owes -= due
        if not self.owes:
            self.gate.request = None
        return bool(due)
