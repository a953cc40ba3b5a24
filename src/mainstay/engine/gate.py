"""The gate of a running turn: where a cancel request, a nudge or the end of the Runtime reaches whoever waits in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from mainstay.model.session import CancelRequest

R = TypeVar("R")

CANCEL_GRACE = 0.05
"""Seconds a cancelled tool body has to say how it ended."""


class TurnCancelled(Exception):
    """A cancel request won; the turn commits as cancelled."""


class Leaving(Exception):
    """The Runtime is being left; the turn stays open for whoever comes next."""


class SelfCancelled(Exception):
    """The work was cancelled, but not by us: something inside it gave up."""


class Gate:
    """What a turn in this process listens to besides its own work.

    `request` is the cancel request, `leaving` the end of the Runtime, `nudged` a hint that something outside has
    changed (an answer, an input). All are set on the event loop. They wake whoever waits in `pause` and cancel what
    runs in `guard`.
    """

    __slots__ = ("_guarded", "_waiter", "leaving", "nudged", "request")

    def __init__(self) -> None:
        self.request: CancelRequest | None = None
        self.leaving = False
        self.nudged = False
        self._waiter: asyncio.Future[None] | None = None
        self._guarded: asyncio.Task[Any] | None = None

    @property
    def shut(self) -> bool:
        return self.request is not None or self.leaving

    def check(self) -> None:
        """Raise what has been asked for. A cancel request goes before leaving: it ends the turn for good."""
        if self.request is not None:
            raise TurnCancelled
        if self.leaving:
            raise Leaving

    def cancel(self, request: CancelRequest) -> None:
        if self.request is None:
            self.request = request
            self._shut()

    def leave(self) -> None:
        if not self.leaving:
            self.leaving = True
            self._shut()

    def nudge(self) -> None:
        self.nudged = True
        self.wake()

    def _shut(self) -> None:
        self.wake()
        guarded, self._guarded = self._guarded, None
        if guarded is not None:  # once: a cancel request and the end of the Runtime may come together
            guarded.cancel()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def pause(self) -> None:
        """Wait for the next wake: a request, a nudge, or work that calls `wake` when it ends."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def guard(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` to its end, unless the gate shuts first: then it is cancelled and what shut the gate is raised.

        It runs in the turn's own task: a model call is the common case, and a task of its own would cost it three
        passes of the event loop.
        """
        if self.shut:
            work.close()
            self.check()
        task = asyncio.current_task()
        assert task is not None
        self._guarded = task
        try:
            result = await work
        except asyncio.CancelledError:
            self._guarded = None
            if task.cancelling() == 0:
                raise SelfCancelled("CancelledError: the work cancelled itself") from None
            if self.shut and task.uncancel() == 0:
                self.check()
            raise
        finally:
            self._guarded = None
        if task.cancelling() and self.shut and task.uncancel() == 0:
            self.check()  # the work swallowed its cancellation; the request stands
        return result
