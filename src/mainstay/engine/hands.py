"""Whether code runs in a turn or a process of this Runtime, or beside them in the host.

Both ask through the same doors, and a Runtime that drains treats them differently: what work in hand waits for is part
of that work, what a host asks for is new. It is a context variable so that whatever a tool or a plugin awaits, in tasks
of its own too, is known as theirs without being passed along.
"""

from __future__ import annotations

from contextvars import ContextVar

_in_hand: ContextVar[bool] = ContextVar("mainstay_in_hand", default=False)


def take_in_hand() -> None:
    """From here on the running task, and every task that it makes, is work in hand."""
    _in_hand.set(True)


def in_hand() -> bool:
    return _in_hand.get()
