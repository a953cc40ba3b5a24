"""Work in hand: whether code runs in a turn or a process of this Runtime, or beside them in the host.

Both ask through the same doors and are treated differently. What work in hand waits for is part of that work while the
Runtime drains; what a host asks for is new. And work must not wait for itself: a turn ends when all that runs in it has
ended, and the turns of a session come one after the other, so whoever waits in a turn for that turn, or for one behind
it, would wait for ever, and so would two that wait for each other. The wait that would close such a circle is refused.

What a task works for is a context variable: it reaches whatever a tool or a plugin awaits, in threads and tasks of its
own too, without being passed along. A task that is left to itself counts as its maker's until that has ended: nobody
can see whether it is awaited.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import TypeAlias

from msgspec import Struct

from mainstay.errors import WaitsForItself
from mainstay.model.ids import turn_id

Place: TypeAlias = tuple[str, int | None]
"""A turn, by its session and number; a process, by its id and None."""
NEXT = 1 << 62
"""The turn of what is not accepted yet: behind all others."""


class Work(Struct, gc=False):
    """What a task works for: a turn, a tool's call in one, or a process. `home` is the worker that has it: other
    Runtimes in this process have sessions of the same names. `over`: what is left of it holds up nobody. `depth` is the
    turn's own, or that of the wakes of the process."""

    home: str
    place: Place
    over: bool = False
    depth: int = 0

    def begin(self) -> Work:
        """From here on the running task, and every task and thread that it makes, works for this."""
        _work.set(self)
        return self

    def end(self) -> None:
        self.over = True


_work: ContextVar[Work | None] = ContextVar("mainstay_work", default=None)


def in_hand() -> bool:
    """Whether the running task works for a turn or a process, not for the host."""
    return _work.get() is not None


def set_depth(depth: int) -> None:
    """The turn that the running task works for is so deep: its first record says so."""
    me = _work.get()
    if me is not None:
        me.depth = depth


def depth() -> int:
    """How deep an input is that the running task says: as deep as what it works for."""
    me = _work.get()
    return 0 if me is None else me.depth


def wake_depth() -> int:
    """How deep the wakes of a process are that the running task starts: one more than its turn, or as those of its
    process. What a host starts begins anew."""
    me = _work.get()
    return 0 if me is None else me.depth + (me.place[1] is not None)


class Deadlocks:
    """The waits of work in this Runtime, by the name of who waits. It lives on the event loop."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._waits: dict[str, list[tuple[Work, Place]]] = {}

    def check(self, goal: Place) -> Work | None:
        """Whose wait it would be; None where no work of ours would wait. Raises WaitsForItself when it never ended."""
        me = _work.get()
        if me is None or me.home != self._home or me.over:
            return None
        if self._needs(goal, me.place, set()):
            raise WaitsForItself(named(goal), named(me.place))
        return me

    @contextlib.contextmanager
    def waiting(self, goal: Place) -> Generator[None, None, None]:
        """Wait for something inside of this."""
        me = self.check(goal)
        if me is None:
            yield
            return
        name, wait = me.place[0], (me, goal)
        self._waits.setdefault(name, []).append(wait)
        try:
            yield
        finally:
            self._waits[name].remove(wait)
            if not self._waits[name]:
                del self._waits[name]

    def _needs(self, goal: Place, wanted: Place, seen: set[Place]) -> bool:
        """Whether `goal` can come to its end only after `wanted` has."""
        if _is_before(wanted, goal):
            return True
        seen.add(goal)
        waits = self._waits.get(goal[0], ())
        then = [to for work, to in waits if not work.over and _is_before(work.place, goal)]
        return any(self._needs(to, wanted, seen) for to in then if to not in seen)


def _is_before(first: Place, second: Place) -> bool:
    """Whether the second can end only when the first has: it is the same, or behind it in its session."""
    if first[1] is None or second[1] is None:
        return first == second
    return first[0] == second[0] and first[1] <= second[1]


def named(place: Place) -> str:
    """A place as an error shows it."""
    name, turn = place
    if turn is None:
        return f"process {name!r}"
    return f"the next turn of session {name!r}" if turn == NEXT else f"turn {turn_id(name, turn)}"
