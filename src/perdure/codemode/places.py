"""Places for processes that run cells: few, and shared by many REPLs.

A REPL takes a place when its cell is to run. When it rests (its cell waits, or none runs) it may keep the place for a
while, because most answers come soon; it leaves it when the time is over, or at once when another REPL wants one. So
cells that wait for cells never wait for a place, whatever their depth.

The event loop owns every state here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from perdure.codemode.stubs import Functions
from perdure.errors import RuntimeClosed
from perdure.model.tool import ToolSpec

T = TypeVar("T")


class Resting(Protocol):
    async def leave(self) -> None:
        """Give up the place, unless it is used again by now."""
        ...


R = TypeVar("R", bound=Resting)


class Places(Generic[R]):
    """`most` places, which who rests may keep for `keep` seconds.

    `_wanted` are callers that wait for a place, first come first served; `_resting` who rests and has one, the oldest
    first; `_leaving` the tasks of those that leave theirs.
    """

    def __init__(self, most: int, keep: float) -> None:
        self._most, self._keep, self._free = most, keep, most
        self._wanted: deque[asyncio.Future[None]] = deque()
        self._resting: OrderedDict[R, asyncio.TimerHandle] = OrderedDict()
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def taken(self) -> int:
        return self._most - self._free

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeClosed("the executor of code is closed")

    async def take(self) -> None:
        """Have a place, when there is one; it is given back with `release`."""
        self.check_open()
        if self._free and not self._wanted:
            self._free -= 1
            return
        wanted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wanted.append(wanted)
        if self._resting and len(self._leaving) < len(self._wanted):
            self._leave(next(iter(self._resting)))
        try:
            await wanted
        except asyncio.CancelledError:
            if wanted.done() and not wanted.cancelled():
                self.release()
            self.check_open()
            raise

    def release(self) -> None:
        while self._wanted:
            wanted = self._wanted.popleft()
            if not wanted.done():
                wanted.set_result(None)
                return
        self._free += 1

    def rests(self, repl: R) -> None:
        """`repl` has a place, and does not use it now."""
        if self._wanted:
            self._leave(repl)
        else:
            self._resting[repl] = asyncio.get_running_loop().call_later(self._keep, self._leave, repl)

    def goes_on(self, repl: R) -> None:
        """`repl` uses its place again, or has none any more."""
        timer = self._resting.pop(repl, None)
        if timer is not None:
            timer.cancel()

    def _leave(self, repl: R) -> None:
        self.goes_on(repl)
        task = asyncio.create_task(repl.leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def close(self) -> None:
        """Refuse whoever wants a place from now on, or waits for one."""
        self._closed = True
        for wanted in self._wanted:
            wanted.cancel()

    async def wait_left(self) -> None:
        if self._leaving:
            await asyncio.gather(*self._leaving)


class Catalogues:
    """The tools of a cell as functions. The last few are kept, because every cell of a turn has the same."""

    MOST = 32

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, ...], tuple[tuple[ToolSpec, ...], Functions]] = OrderedDict()

    def functions(self, tools: Sequence[ToolSpec]) -> Functions:
        key = tuple(map(id, tools))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = tuple(tools), Functions(tools)  # held, so that their ids stay theirs
            if len(self._known) > self.MOST:
                self._known.popitem(last=False)
        return found[1]


async def to_its_end(running: asyncio.Future[T], undo: Callable[[], Coroutine[Any, Any, None]] | None = None) -> T:
    """Wait for it, through a cancel too: until it is back, nothing else may use what it works on. `undo` is for what it
    made that its caller will not get."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if undo is not None and running.exception() is None:
            await undo()
        raise
