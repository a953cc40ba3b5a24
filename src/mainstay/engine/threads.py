"""Threads of our own for sync tools. Daemons: a tool that hangs must not keep the interpreter from leaving."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

IDLE_SECONDS = 30.0
SHORT_OF_MEMORY = 0.01


class Threads:
    """As many threads as there is work at once, kept for a while. One instance per Runtime and loop."""

    def __init__(self, name: str = "mainstay-tool", idle_seconds: float = IDLE_SECONDS) -> None:
        self._name, self._idle_seconds = name, idle_seconds
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0
        self._closed = False

    def run(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `work` with a copy of the caller's context variables. Cancelling the future does not stop it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def body() -> None:
            result, error = None, None
            try:
                result = context.run(work)
            except BaseException as raised:  # SystemExit in a tool ends the tool, not the thread
                error = raised
            while True:
                try:
                    loop.call_soon_threadsafe(_settle, future, result, error)
                except MemoryError:
                    time.sleep(SHORT_OF_MEMORY)  # whoever waits must hear of it, and others give memory back
                except RuntimeError:
                    return  # the loop is closed; nobody waits any more
                else:
                    return

        with self._lock:
            spawn = self._idle == 0
            if spawn:
                self._count += 1
            else:
                self._idle -= 1
        if spawn:
            # Before the work is queued: if there can be no thread, nobody may find it later and run it after all.
            threading.Thread(target=self._serve, name=f"{self._name}-{self._count}", daemon=True).start()
        self._queue.put(body)
        return future

    def _serve(self) -> None:
        while True:
            try:
                body = self._queue.get(timeout=self._idle_seconds)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:
                        self._idle -= 1
                        return
                continue
            if body is None:
                return
            body()
            with self._lock:
                if self._closed:
                    return
                self._idle += 1

    def close(self) -> None:
        """Let idle threads go. Those at work end with it."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._queue.put(None)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration | GeneratorExit):
        # Inside a coroutine these would end whoever waits, not reach it.
        future.set_exception(RuntimeError(f"the function raised {error!r}"))
    else:
        future.set_exception(error)
