"""Wake an event loop from another thread with something to handle."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any


class Wakeup:
    """An eventfd: sent to from any thread, received on its event loop. Linux only: elsewhere `wakeup_of` gives None.

    `call_soon_threadsafe` does the same through a socket, which costs the loop two reads and an exception each time.
    A durable turn waits four times for a write and does little else, so it shows.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[Any], None]) -> None:
        assert sys.platform == "linux"
        self.loop, self._receive = loop, receive
        self._sent: deque[Any] = deque()
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            loop.add_reader(self._descriptor, self._readable)
        except BaseException:  # whatever it was, nothing else would close the descriptor
            os.close(self._descriptor)
            raise

    def send(self, item: Any) -> None:
        assert sys.platform == "linux"
        self._sent.append(item)
        os.eventfd_write(self._descriptor, 1)

    def _readable(self) -> None:
        assert sys.platform == "linux"
        os.eventfd_read(self._descriptor)
        try:
            self._handle()
        except MemoryError:
            os.eventfd_write(self._descriptor, 1)  # tried again in the next pass of the loop: no item is lost

    def _handle(self) -> None:
        while self._sent:
            self._receive(self._sent[0])
            self._sent.popleft()

    def close(self) -> None:
        """Called by the sending thread as it ends. What was sent before is still received, if the loop is open."""
        try:
            self.loop.call_soon_threadsafe(self._close)
        except RuntimeError:
            os.close(self._descriptor)  # the loop was closed before

    def _close(self) -> None:
        self.loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._handle()


def wakeup_of(loop: asyncio.AbstractEventLoop, receive: Callable[[Any], None]) -> Wakeup | None:
    """A wake-up of this loop, where the system has eventfd and the loop can watch descriptors."""
    if sys.platform != "linux":
        return None
    try:
        return Wakeup(loop, receive)
    except (OSError, NotImplementedError):  # no descriptor to be had, or a loop that watches none
        return None
