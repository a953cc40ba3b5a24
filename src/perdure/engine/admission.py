"""Admission: how many may work at once, under named limits, first come first served.

One mechanism for all places of a Runtime: of tools, of resources, and of processes. A limit has a name
(`Capacity("tool search", 4)`, `Capacity("resource net", 1)`, `Capacity("processes", 64)`). Work names the limits that
it counts against, takes a place under each of them or under none, and releases them together, so that no two waiters
can each hold what the other one waits for.

    try_take               now or not at all; never overtakes a waiter that needs one of the same limits
    take                   waits for its turn; a cancelled wait holds nothing
    take_beyond            at once, even if that is more than the limit: for work that is already ours and must go on
    release                gives the places back and admits those whose turn it is
    release_from_thread    the same, for work whose end only its own thread sees
    free                   how many more could begin now

It is local to one Runtime and is not durable: after a crash nothing is held. Work that lies on disk does not stand in
line here: its owner releases, and then claims from disk as many as are `free`. For processes that is

    place = (Capacity("processes", concurrency),)

    admission.try_take(place)       before the write that makes a process ours (Register, Claim): a sweep of many must
                                    not claim more than can run; released again when the write did not make it ours
    admission.take_beyond(place)    for a process that is found to be ours already
    admission.release(place)        when it rests, parks or ends; then `free` more are claimed
    await control.guard(admission.take(place))
                                    before a rested process acts again; a stop ends the wait, and nothing is held
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple, TypeAlias


class Capacity(NamedTuple):
    """At most `limit` holders at once of what is called `name`. All who name it give the same limit."""

    name: str
    limit: int


Needs: TypeAlias = tuple[Capacity, ...]
"""What one piece of work takes a place of, all at once. Empty: it is always admitted, and holds nothing."""


class Admission:
    """The places in use and the line of waiters. Lives on the event loop: only `release_from_thread` may be called
    elsewhere.

    `_used` counts holders by name, without names that have no holder. `_line` are the waiters in the order they came; a
    waiter whose future is done has been admitted or has given up, and is removed at the next pass.
    """

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._line: deque[tuple[Needs, asyncio.Future[None]]] = deque()

    def try_take(self, needs: Needs) -> bool:
        """Take a place of each, if all are free and no waiter needs one of them."""
        if not needs:
            return True
        if self._line:
            names = {need.name for need in needs}
            if any(need.name in names for wanted, waiter in self._line if not waiter.done() for need in wanted):
                return False
        return self._grab(needs)

    async def take(self, needs: Needs) -> None:
        """Wait for them. Once this returns they are held, and must be released."""
        if self.try_take(needs):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((needs, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(needs)  # admitted and cancelled in the same pass of the loop
            else:
                self._admit()  # waiters behind this one may have been blocked by it alone
            raise

    def take_beyond(self, needs: Needs) -> None:
        """Take them at once, even where none is free: the limit holds for what begins, not for what must go on."""
        for name, _ in needs:
            self._used[name] = self._used.get(name, 0) + 1

    def release(self, needs: Needs) -> None:
        """Give back what was taken, and admit waiters whose turn it is."""
        if not needs:
            return
        for name, _ in needs:
            self._used[name] -= 1
            if not self._used[name]:
                del self._used[name]
        if self._line:
            self._admit()

    def release_from_thread(self, loop: asyncio.AbstractEventLoop, needs: Needs) -> None:
        """`release`, from any thread: a body on a thread may end long after its caller gave up on it."""
        if not needs:
            return
        try:
            loop.call_soon_threadsafe(self.release, needs)
        except RuntimeError:
            return  # the loop is closed, and every holder and waiter with it

    def in_use(self, name: str) -> int:
        """How many hold a place of that name."""
        return self._used.get(name, 0)

    def free(self, capacity: Capacity) -> int:
        """How many more could take a place now: none while a waiter stands in line for one."""
        if any(capacity in wanted for wanted, waiter in self._line if not waiter.done()):
            return 0
        return max(capacity.limit - self._used.get(capacity.name, 0), 0)

    def waiting(self) -> int:
        """How many stand in line, whatever they need."""
        return sum(not waiter.done() for _, waiter in self._line)

    def _admit(self) -> None:
        """Admit every waiter that needs nothing which a waiter before it needs and did not get."""
        waiting, self._line = self._line, deque()
        blocked: set[str] = set()
        for needs, waiter in waiting:
            if waiter.done():
                continue
            names = {need.name for need in needs}
            if not names & blocked and self._grab(needs):
                waiter.set_result(None)
            else:
                blocked |= names
                self._line.append((needs, waiter))

    def _grab(self, needs: Needs) -> bool:
        used = self._used
        for name, limit in needs:
            if used.get(name, 0) >= limit:
                return False
        for name, _ in needs:
            used[name] = used.get(name, 0) + 1
        return True
