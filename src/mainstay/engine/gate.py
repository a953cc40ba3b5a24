"""The gate of a running turn: where a cancel request, a nudge or the end of the Runtime reaches whoever waits in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from mainstay.model.session import CancelRequest

R = TypeVar("R")

log = logging.getLogger("mainstay.engine")

CANCEL_GRACE = 0.05
"""Seconds a cancelled body has to say how it ended."""


class TurnCancelled(Exception):
    """A cancel request won; the turn commits as cancelled."""


class Leaving(Exception):
    """The Runtime is being left; the turn stays open for whoever comes next."""


class Gate:
    """What a turn in this process listens to besides its own work.

    `request` is the cancel request, `leaving` the end of the Runtime, `nudged` a hint that something outside has
    changed (an answer, an input). All are set on the event loop and wake whoever waits in `pause`.
    """

    __slots__ = ("_waiter", "leaving", "nudged", "request")

    def __init__(self) -> None:
        self.request: CancelRequest | None = None
        self.leaving = False
        self.nudged = False
        self._waiter: asyncio.Future[None] | None = None

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
            self.wake()

    def leave(self) -> None:
        self.leaving = True
        self.wake()

    def nudge(self) -> None:
        self.nudged = True
        self.wake()

    def wake(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def pause(self) -> None:
        """Wait for the next wake: a request, a nudge, or a task that has `wake` as its callback."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def guard(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` to its end, unless the gate shuts first: then it is cancelled and given a moment."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self.wake)
        try:
            while not task.done() and not self.shut:
                await self.pause()
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            await stop(task)
            self.check()
        return task.result()


async def stop(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait a moment for it. One that does not listen is left behind, and named."""
    task.cancel()
    _, late = await asyncio.wait({task}, timeout=CANCEL_GRACE)
    if late:
        log.warning("%s did not end when it was cancelled; it is left behind", task.get_name())
        task.add_done_callback(_forget)
    elif not task.cancelled():
        task.exception()  # looked at, so that asyncio does not complain that nobody did


def _forget(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
