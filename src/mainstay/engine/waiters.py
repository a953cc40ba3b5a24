"""The tasks of this Runtime that wait for something to happen to a turn or a process, as one table of futures.

A future is resolved once, by whatever in this Runtime sees the result first: the task that works on the scope, a write
that ended it, or the watch that found it on disk. Its waiter may be cancelled at any time; that harms no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from mainstay.engine.deadlock import in_hand

P = TypeVar("P", bound=Hashable)
V = TypeVar("V")


class Waiters(Generic[P, V]):
    """Futures by the name of what is waited for, and which part of it: a session and the number of a turn, or a process
    and what may happen to it. It lives on the event loop.

    `_needed` are those futures that work of this Runtime waits for, not its host: they go on while it drains.
    """

    __slots__ = ("_futures", "_needed")

    def __init__(self) -> None:
        self._futures: dict[str, dict[P, list[asyncio.Future[V]]]] = {}
        self._needed: dict[asyncio.Future[V], tuple[str, P]] = {}

    def expect(self, name: str, part: P) -> asyncio.Future[V]:
        """A future for what happens. Give it back with `withdraw`, whatever came of it."""
        future: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._futures.setdefault(name, {}).setdefault(part, []).append(future)
        if in_hand():
            self._needed[future] = name, part
            future.add_done_callback(self._not_needed)
        return future

    def _not_needed(self, future: asyncio.Future[V]) -> None:
        self._needed.pop(future, None)

    def withdraw(self, name: str, part: P, future: asyncio.Future[V]) -> None:
        """Its task waits no more."""
        self._needed.pop(future, None)
        if future.done() and not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not complain
        futures = self._futures.get(name, {}).get(part, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                self._drop(name, part)

    def resolve(self, name: str, part: P, result: V | BaseException) -> list[asyncio.Future[V]]:
        """Give a result, or why there is none, to every task that waits for it: the futures, which are forgotten."""
        futures = self.of(name, part)
        if futures:
            self._drop(name, part)
        for future in futures:
            if future.done():
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
        return futures

    def _drop(self, name: str, part: P) -> None:
        parts = self._futures[name]
        del parts[part]
        if not parts:
            del self._futures[name]

    # ------------------------------------------------------------------ what is waited for

    def of(self, name: str, part: P) -> list[asyncio.Future[V]]:
        return self._futures.get(name, {}).get(part, [])

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
