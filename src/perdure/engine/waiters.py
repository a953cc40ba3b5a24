"""The tasks of this Runtime that wait for a turn or a process: what they work for, whether they may wait, and for what.

    CurrentWork    what the running task works for: a turn, a call in one, a process; nothing in the host's own tasks
    Deadlocks      refuses a wait that could never end
    Waiters        futures by what is waited for, resolved once

Work and the host call the same methods and are treated differently. What work waits for is part of that work while the
Runtime drains; what a host asks for is new. And work must not wait for itself: a turn ends when all that runs in it has
ended, and the turns of a session run one after the other, so a task of a turn that waited for that turn, or for one
behind it, would wait for ever, and so would two that wait for each other. The wait that would close such a circle is
refused.

What a task works for is a context variable: it reaches whatever a tool or a plugin awaits, in threads and tasks of its
own too, without being passed along. A task that is left to itself counts as its maker's until that has ended: whether
it is awaited cannot be seen.

A future is resolved by whatever in this Runtime sees the result first: the task that works on the scope, a write that
ended it, or the watch that found it on disk. Its waiter may be cancelled at any time; that harms no other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextvars import ContextVar
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct

from perdure.engine.admission import ThreadPlace, TurnPlace
from perdure.errors import WaitsForItself
from perdure.model.ids import turn_id
from perdure.model.message import NO_METADATA, Metadata

TurnOrProcess: TypeAlias = tuple[str, int | None]
"""A turn, by its session and number; a process, by its id and None."""
NEXT = 1 << 62
"""The turn of what is not accepted yet: behind all others."""


class CurrentWork(Struct, gc=False):
    """What a task works for: a turn, a tool's call in one, or a process. `home` is the worker that has it: other
    Runtimes in this process have sessions of the same names. `over`: what is left of it keeps nothing waiting. `depth`
    is the turn's own, or that of the wakes of the process. `metadata` says whom it is for."""

    home: str
    place: TurnOrProcess
    over: bool = False
    depth: int = 0
    metadata: Metadata = NO_METADATA

    def begin(self) -> CurrentWork:
        """From here on the running task, and every task and thread that it makes, works for this."""
        _work.set(self)
        _thread.set(None)
        return self

    def end(self) -> None:
        self.over = True


_work: ContextVar[CurrentWork | None] = ContextVar("perdure_work", default=None)
_thread: ContextVar[ThreadPlace | None] = ContextVar("perdure_thread", default=None)


_turn: ContextVar[TurnPlace | None] = ContextVar("perdure_turn", default=None)


def lend_while_waiting(place: TurnPlace | None) -> None:
    """Lend this place whenever the running task waits, or a task that it begins. None for a process, which has none.

    Without an end, because a place that was released is not lent.
    """
    _turn.set(place)


@contextlib.contextmanager
def on_thread_of(place: ThreadPlace | None) -> Generator[None, None, None]:
    """Run a body on a thread inside of this: while work that it asks for waits, its place is lent."""
    token = _thread.set(place)
    try:
        yield
    finally:
        _thread.reset(token)


def in_hand() -> bool:
    """Whether the running task works for a turn or a process, not for the host."""
    return _work.get() is not None


def current_metadata() -> Metadata:
    """Whom the running task works for; what it starts inherits this."""
    me = _work.get()
    return NO_METADATA if me is None else me.metadata


def set_origin(depth: int, metadata: Metadata) -> None:
    """The turn that the running task works for is so deep, and for whom: what it starts inherits both."""
    me = _work.get()
    if me is not None:
        me.depth, me.metadata = depth, metadata


def depth() -> int:
    """How deep an input is that the running task says: as deep as what it works for."""
    me = _work.get()
    return 0 if me is None else me.depth


def inherited() -> tuple[int, Metadata]:
    """What a process inherits that the running task starts: how deep its wakes are, which is one more than its turn, or
    as those of its process; and for whom it is. What a host starts begins anew."""
    me = _work.get()
    return (0, NO_METADATA) if me is None else (me.depth + (me.place[1] is not None), me.metadata)


class Deadlocks:
    """The waits of work in this Runtime, by the name of who waits. It lives on the event loop."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._waits: dict[str, list[tuple[CurrentWork, TurnOrProcess]]] = {}

    def check(self, goal: TurnOrProcess) -> CurrentWork | None:
        """Whose wait it would be; None where no work of ours would wait. Raises WaitsForItself when it never ended."""
        me = _work.get()
        if me is None or me.home != self._home or me.over:
            return None
        if self._needs(goal, me.place, set()):
            raise WaitsForItself(named(goal), named(me.place))
        return me

    @contextlib.contextmanager
    def waiting(self, goal: TurnOrProcess) -> Generator[None, None, None]:
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

    def park(self, place: TurnOrProcess, goals: Iterable[TurnOrProcess]) -> Callable[[], None]:
        """A turn left memory and waits for these on disk: its waits count until the returned function is called."""
        name, waits = place[0], [(CurrentWork(self._home, place), goal) for goal in goals]
        self._waits.setdefault(name, []).extend(waits)

        def forget() -> None:
            left = [each for each in self._waits.pop(name, []) if each not in waits]
            if left:
                self._waits[name] = left

        return forget

    def _needs(self, goal: TurnOrProcess, wanted: TurnOrProcess, seen: set[TurnOrProcess]) -> bool:
        """Whether `goal` can come to its end only after `wanted` has."""
        if _is_before(wanted, goal):
            return True
        seen.add(goal)
        waits = self._waits.get(goal[0], ())
        then = [to for work, to in waits if not work.over and _is_before(work.place, goal)]
        return any(self._needs(to, wanted, seen) for to in then if to not in seen)


def _is_before(first: TurnOrProcess, second: TurnOrProcess) -> bool:
    """Whether the second can end only when the first has: it is the same, or behind it in its session."""
    if first[1] is None or second[1] is None:
        return first == second
    return first[0] == second[0] and first[1] <= second[1]


def named(place: TurnOrProcess) -> str:
    """A place as an error shows it."""
    name, turn = place
    if turn is None:
        return f"process {name!r}"
    return f"the next turn of session {name!r}" if turn == NEXT else f"turn {turn_id(name, turn)}"


P = TypeVar("P", bound=Hashable)
V = TypeVar("V")


class Waiters(Generic[P, V]):
    """Futures by the name of what is waited for, and which part of it: a session and the number of a turn, or a process
    and what may happen to it. It lives on the event loop.

    `_needed` are those futures that work of this Runtime waits for, not its host: they go on while it drains. `_lent`
    are places on threads and places of turns that are lent meanwhile.
    """

    __slots__ = ("_futures", "_lent", "_needed")

    def __init__(self) -> None:
        self._futures: dict[str, dict[P, list[asyncio.Future[V]]]] = {}
        self._needed: dict[asyncio.Future[V], tuple[str, P]] = {}
        self._lent: dict[asyncio.Future[V], list[ThreadPlace | TurnPlace]] = {}

    def expect(self, name: str, part: P) -> asyncio.Future[V]:
        """A future for what happens. Give it back with `withdraw`, whatever came of it."""
        future: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._futures.setdefault(name, {}).setdefault(part, []).append(future)
        if _work.get() is not None:
            self._needed[future] = name, part
            future.add_done_callback(self._not_needed)
            if places := [place for place in (_thread.get(), _turn.get()) if place is not None]:
                for place in places:
                    place.lend()
                self._lent[future] = places
        return future

    def _not_needed(self, future: asyncio.Future[V]) -> None:
        self._needed.pop(future, None)
        for place in self._lent.pop(future, ()):
            place.take_back()

    def withdraw(self, name: str, part: P, future: asyncio.Future[V]) -> None:
        """Its task waits no more."""
        self._not_needed(future)
        if future.done() and not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not complain
        futures = self._futures.get(name, {}).get(part, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                del self._futures[name][part]
                if not self._futures[name]:
                    del self._futures[name]

    def resolve(self, name: str, part: P, result: V | BaseException) -> None:
        """Give a result, or why there is none, to every task that waits for it. The futures are forgotten."""
        parts = self._futures.get(name)
        futures = None if parts is None else parts.pop(part, None)
        if parts is None or futures is None:
            return
        if not parts:
            del self._futures[name]
        for future in futures:
            if future.done():
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    # ------------------------------------------------------------------ what is waited for

    def of(self, name: str, part: P) -> list[asyncio.Future[V]]:
        return self._futures.get(name, {}).get(part, [])

    @property
    def names(self) -> list[str]:
        return list(self._futures)

    def parts(self, name: str) -> list[P]:
        return list(self._futures.get(name, ()))

    def __contains__(self, name: str) -> bool:
        return name in self._futures

    def __iter__(self) -> Iterator[tuple[str, P]]:
        return iter([(name, part) for name, parts in self._futures.items() for part in parts])

    @property
    def needed(self) -> set[tuple[str, P]]:
        """What work of this Runtime waits for."""
        return set(self._needed.values())

    def close(self, why: Callable[[str], BaseException]) -> None:
        """The Runtime was left: nothing else will resolve what is left."""
        for name, part in self:
            self.resolve(name, part, why(name))
