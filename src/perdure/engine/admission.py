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

`ThreadPlaces` are the places of sync tools and steps on threads, which are lent while a call waits for other work.

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
from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class Capacity(NamedTuple):
    """At most `limit` holders at once of what is called `name`. All who name it give the same limit.

    `shared`: work with different other needs shares it, as threads. A waiter that lacks something else does not keep
    later ones from it.
    """

    name: str
    limit: int
    shared: bool = False


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
            if any(names & self._kept_by(wanted) for wanted, waiter in self._line if not waiter.done()):
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
        for name, _, _ in needs:
            self._used[name] = self._used.get(name, 0) + 1

    def release(self, needs: Needs) -> None:
        """Give back what was taken, and admit waiters whose turn it is."""
        if not needs:
            return
        for name, _, _ in needs:
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
                blocked |= self._kept_by(needs)
                self._line.append((needs, waiter))

    def _kept_by(self, needs: Needs) -> set[str]:
        """Return the names that a waiter with these needs keeps for itself: work behind it must not take them."""
        used = self._used
        return {name for name, limit, shared in needs if not shared or used.get(name, 0) >= limit}

    def _grab(self, needs: Needs) -> bool:
        used = self._used
        for name, limit, _ in needs:
            if used.get(name, 0) >= limit:
                return False
        for name, _, _ in needs:
            used[name] = used.get(name, 0) + 1
        return True


THREADS = "threads"
"""Name of the capacity of threads in `Admission`."""
MOST_THREADS = 64
MOST_TURNS = 1000


class ThreadPlaces:
    """The places for sync tools and steps on threads, of one Runtime. Lives on the event loop.

    A place is taken and released with the other needs of its call. The thread itself releases it, at its real end, so
    that a call which outlived its time limit still counts. `calls` holds the calls on threads.
    """

    def __init__(self, admission: Admission, most: int) -> None:
        self.admission, self.capacity = admission, Capacity(THREADS, most, shared=True)
        self.calls: set[ThreadPlace] = set()

    def needs(self, needs: Needs, threaded: bool) -> Needs:
        """Return the needs of a call, with a place on a thread if its function is not async."""
        return (*needs, self.capacity) if threaded else needs

    @property
    def full(self) -> bool:
        return self.admission.in_use(THREADS) >= self.capacity.limit

    def begin(self, name: str, needs: Needs) -> ThreadPlace:
        """Return the place of a call that holds its `needs` and is about to run on a thread."""
        place = ThreadPlace(self, name, needs)
        self.calls.add(place)
        return place


class ThreadPlace:
    """The place of one call on a thread. The call lends it while it waits for a turn or a process, which may need it.

    `given_up`: the caller waits for the thread no longer, because the call was cut off.
    """

    __slots__ = ("_needs", "_over", "_places", "_waits", "given_up", "name")

    def __init__(self, places: ThreadPlaces, name: str, needs: Needs) -> None:
        self._places, self.name, self._needs = places, name, needs
        self.given_up, self._over, self._waits = False, False, 0

    def lend(self) -> None:
        """Let another call have the place. Once for each wait; the call itself goes on."""
        if not self._over:
            self._waits += 1
            if self._waits == 1:
                self._places.admission.release((self._places.capacity,))

    def take_back(self) -> None:
        """Hold the place again at once, even if another call still has it: this one runs."""
        if not self._over:
            self._waits -= 1
            if not self._waits:
                self._places.admission.take_beyond((self._places.capacity,))

    def end(self) -> None:
        """Release the needs of the call: its thread has ended."""
        if not self._over:
            self._over = True
            self._places.calls.discard(self)
            lent = self._places.capacity if self._waits else None
            self._places.admission.release(tuple([need for need in self._needs if need is not lent]))

    def end_from_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        """`end`, from any thread."""
        try:
            loop.call_soon_threadsafe(self.end)
        except RuntimeError:
            return  # the loop is closed, and every holder and waiter with it

    def leave(self) -> None:
        """The caller is done with the call. If the thread goes on, the call keeps its place."""
        self.given_up = not self._over


class TurnPlaces:
    """The places for turns that one Runtime works on. Lives on the event loop.

    `waiting` are sessions whose open turn has no place, first come first served: it is on disk and has no owner.
    `claiming` are sessions that have a place and are being claimed. `claim` is called with each such session.
    """

    def __init__(self, most: int, claim: Callable[[str], None]) -> None:
        self.most, self.used = most, 0
        self.waiting: dict[str, None] = {}
        self.claiming: set[str] = set()
        self._claim = claim

    def try_take(self) -> bool:
        if self.used >= self.most:
            return False
        self.used += 1
        return True

    def take_beyond(self) -> None:
        """Take a place at once, for work that must go on or is about to end."""
        self.used += 1

    def release(self) -> None:
        """Give a place back, and let the next waiting session have it."""
        self.used -= 1
        self._fill()

    def wait(self, session_id: str) -> None:
        """Put a session in line. Nothing of its turn stays in memory."""
        if session_id not in self.claiming:
            self.waiting[session_id] = None
            self._fill()

    def expects(self, session_id: str) -> bool:
        """True if the turn of the session begins here as soon as there is a place."""
        return session_id in self.waiting or session_id in self.claiming

    def begin(self) -> TurnPlace:
        """Return a place that was taken, for the turn that is about to run."""
        return TurnPlace(self)

    def _fill(self) -> None:
        while self.waiting and self.try_take():
            session_id = next(iter(self.waiting))
            del self.waiting[session_id]
            self.claiming.add(session_id)
            self._claim(session_id)


class TurnPlace:
    """The place of one running turn. It is lent while the turn waits for a turn or a process."""

    __slots__ = ("_over", "_places", "_waits")

    def __init__(self, places: TurnPlaces) -> None:
        self._places, self._over, self._waits = places, False, 0

    def lend(self) -> None:
        """Let another turn have the place. Once for each wait."""
        if not self._over:
            self._waits += 1
            if self._waits == 1:
                self._places.release()

    def take_back(self) -> None:
        """Hold the place again at once, even if another turn still has it."""
        if not self._over:
            self._waits -= 1
            if not self._waits:
                self._places.take_beyond()

    def end(self) -> None:
        """The turn has ended, is parked or was given back."""
        if not self._over:
            self._over = True
            if not self._waits:
                self._places.release()
