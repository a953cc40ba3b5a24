"""Telling an event loop from another thread that something is done."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any


class Bell:
    """Rung on any thread, heard on its event loop. Linux only: elsewhere `hung` gives None.

    `call_soon_threadsafe` does the same through a socket, which costs the loop two reads and an exception each time.
    A durable turn waits four times for a write and does little else, so it shows.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, hear: Callable[[Any], None]) -> None:
        assert sys.platform == "linux"
        self.loop, self._hear = loop, hear
        self._news: deque[Any] = deque()
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            loop.add_reader(self._descriptor, self._rung)
        except BaseException:  # whatever it was, nobody else knows of the descriptor
            os.close(self._descriptor)
            raise

    def ring(self, news: Any) -> None:
        assert sys.platform == "linux"
        self._news.append(news)
        os.eventfd_write(self._descriptor, 1)

    def _rung(self) -> None:
        assert sys.platform == "linux"
        os.eventfd_read(self._descriptor)
        try:
            self._tell()
        except MemoryError:
            os.eventfd_write(self._descriptor, 1)  # heard again in the next pass of the loop: nothing is left out

    def _tell(self) -> None:
        while self._news:
            self._hear(self._news[0])
            self._news.popleft()

    def take_down(self) -> None:
        """The last act of whoever rings: what was rung is still heard, if there is anybody to hear it."""
        try:
            self.loop.call_soon_threadsafe(self._close)
        except RuntimeError:
            os.close(self._descriptor)  # the loop was closed before

    def _close(self) -> None:
        self.loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._tell()


def hung(loop: asyncio.AbstractEventLoop, hear: Callable[[Any], None]) -> Bell | None:
    """A bell for this loop, where the system and the loop have what it takes."""
    if sys.platform != "linux":
        return None
    try:
        return Bell(loop, hear)
    except (OSError, NotImplementedError):  # no descriptor to be had, or a loop that watches none
        return None
