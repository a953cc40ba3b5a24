"""How far a Runtime has come: one value that everything in it reads.

    running    takes up whatever it may work on
    draining   goes on with what it works on, and with what that waits for; takes up nothing else
    leaving    the host's calls are refused; running effects have their grace, then they are cut off
    closed     nothing of it works any more; whoever still holds a handle is told so

It only moves forward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum

from mainstay.errors import RuntimeClosed, StoreInherited, WrongLoop


class Stage(IntEnum):
    RUNNING = 0
    DRAINING = 1
    LEAVING = 2
    CLOSED = 3


class Mode:
    """The stage of one Runtime, and whether a caller may use it: made on the event loop that the Runtime lives on.

    `pid` gives the id of this OS process, which is another one in a forked child.
    """

    __slots__ = ("_home", "_loop", "_pid", "_stage")

    def __init__(self, pid: Callable[[], int]) -> None:
        self._stage = Stage.RUNNING
        self._loop, self._pid, self._home = asyncio.get_running_loop(), pid, pid()

    def advance(self, stage: Stage) -> None:
        self._stage = max(self._stage, stage)

    @property
    def draining(self) -> bool:
        return self._stage >= Stage.DRAINING

    @property
    def leaving(self) -> bool:
        return self._stage >= Stage.LEAVING

    def check(self) -> None:
        """Refuse a call of the host after the Runtime was left, from another loop, or in a forked child."""
        if self._stage >= Stage.LEAVING:
            raise RuntimeClosed
        if self._home != self._pid():
            raise StoreInherited(self._home, self._pid())
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop

    def check_work(self) -> None:
        """The same for what running work asks for: it goes on while the Runtime is being left."""
        if self._stage is Stage.CLOSED:
            raise RuntimeClosed
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop


class Activity:
    """When to look again: `changed` is set when something of this Runtime has changed or running work begins to wait,
    `polled` when the store was looked at for what others have written."""

    __slots__ = ("changed", "polled")

    def __init__(self) -> None:
        self.changed, self.polled = asyncio.Event(), asyncio.Event()
