"""Group commit: one thread writes for everybody, and everything that waits shares one fsync.

The rules, each with a test:

- Writes are taken in the order they were submitted, so order within a scope is kept.
- A refused write (a typed error, raised before it changed anything) fails alone, and with it the later writes of the
  same scope in that batch, with the same error: they were made in the belief that it would land. Scopes are owned
  turns and processes; every write from outside is a scope of its own.
- A batch that cannot even begin, because the file is not to be had, fails as a whole.
- A batch that fails as a whole, in a statement or at COMMIT, is rolled back; then each of its writes is read back, in
  case the commit had landed after all, and otherwise sent again in a transaction of its own.
- A process that is out of memory or threads is told so by `StoreUnavailable`; the thread lives on.
- A cancelled `await` cancels nothing here: the write lands, only nobody hears of it.
- A write's size is capped before it gets here, so one session cannot hold up the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from mainstay.errors import MainstayError, StoreUnavailable
from mainstay.model.write import OwnedScope, Write
from mainstay.stores.os_process import NO_THREAD, OUT_OF_MEMORY

log = logging.getLogger("mainstay.store")

MAX_BATCH = 512
PATIENCE = 256
"""A tired backend rests when nothing waits; where something always waits, after so many batches."""

SHORT_OF_MEMORY = 0.01
"""Seconds to wait for others to give memory back."""

Done = Callable[[Any, BaseException | None], None]


class Backend(Protocol):
    """The store's side of the writer; called from the writer's thread only."""

    def begin(self) -> None: ...

    def apply(self, write: Write[Any]) -> Any: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def applied(self, write: Write[Any]) -> Any | None: ...

    def mapped(self, error: Exception) -> MainstayError: ...

    def tired(self) -> bool: ...

    def rest(self) -> None: ...


class Item:
    """A write, and who hears of its end. Born on any thread, ended on the writer's."""

    __slots__ = ("done", "error", "future", "loop", "receipt", "write")

    def __init__(
        self,
        write: Write[Any],
        loop: asyncio.AbstractEventLoop | None = None,
        future: asyncio.Future[Any] | None = None,
        done: Done | None = None,
    ) -> None:
        self.write, self.loop, self.future, self.done = write, loop, future, done
        self.receipt: Any = None
        self.error: BaseException | None = None


class GroupWriter:
    """The writer thread and its queue. `None` in the queue ends it."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._wakeup: Wakeup | None = None
        # Made beforehand: when it is needed there is no memory to make one.
        self._exhausted = StoreUnavailable(OUT_OF_MEMORY)
        self.batches = 0

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is where most writes come from: it is told of their end by the cheapest way there is."""
        if loop is not None:
            self._wakeup = wakeup_of(loop, _resolve)
        try:
            self._thread.start()
        except RuntimeError as error:
            if self._wakeup is not None:
                self._wakeup.close()
            raise StoreUnavailable(NO_THREAD.format(error)) from None

    def stop(self) -> None:
        """End after what is queued; waits for it."""
        self._queue.put(None)
        self._thread.join()

    def write(self, write: Write[Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.put(Item(write, loop, future))
        return future

    def submit(self, write: Write[Any], done: Done) -> None:
        """The same from any thread; `done` is called on the writer's, even while the event loop is blocked."""
        self._queue.put(Item(write, done=done))

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        take, going = self._queue.get, True
        while going:
            batch, going = self._gather(take())
            if batch:
                self._serve(batch)
        if self._wakeup is not None:
            self._wakeup.close()

    def _serve(self, batch: list[Item]) -> None:
        """Write a batch and tell how it ended. Nothing ends the thread: whoever writes next would wait for ever."""
        self.batches += 1
        try:
            self._write_batch(batch)
        except Exception:  # out of memory in what handles errors: each write may have landed or not
            for item in batch:
                item.receipt, item.error = None, self._exhausted
        backend, waiting = self._backend, self._queue
        if backend.tired() and (waiting.empty() or self.batches % PATIENCE == 0):
            self._rest()
        # Before anything else, and then back to waiting: whatever ran here now would keep the loop from the GIL.
        _insist(self._announce, batch)
        while backend.tired() and waiting.empty() and self._rest():
            pass  # in small steps, each of which may find that something waits

    def _rest(self) -> bool:
        try:
            self._backend.rest()
        except Exception as error:  # what is written stays written, and the thread must live
            log.warning("the store could not rest, it is tried again later: %s", error)
            return False
        return True

    def _gather(self, item: Item | None) -> tuple[list[Item], bool]:
        """Everything that waits, up to a batch; and whether to go on after it."""
        batch: list[Item] = []
        while item is not None:
            _insist(batch.append, item)
            if len(batch) >= MAX_BATCH or self._queue.empty():
                return batch, True
            item = self._queue.get()  # at once: nobody else takes from it
        return batch, False

    def _write_batch(self, batch: list[Item]) -> None:
        try:
            self._backend.begin()
        except Exception as error:  # whatever it was, everybody waits for an answer and the thread must live
            self._give_up(batch, error)
            return
        try:
            self._apply_all(batch)
            self._backend.commit()
        except Exception:  # whoever caused it, the others of the batch must not suffer: each is tried alone
            self._write_singly(batch)

    def _give_up(self, batch: list[Item], error: Exception) -> None:
        """The file is not to be had: told at once to all, who would otherwise wait for it one after the other."""
        with contextlib.suppress(Exception):
            self._backend.rollback()
        refusal = error if isinstance(error, MainstayError) else self._backend.mapped(error)
        for item in batch:
            item.error = refusal

    def _apply_all(self, batch: list[Item]) -> None:
        failed: dict[object, BaseException] = {}
        for item in batch:
            if _follows(item, failed):
                continue
            try:
                item.receipt, item.error = self._backend.apply(item.write), None
            except MainstayError as refusal:
                item.error = refusal
                failed[scope_of(item.write)] = refusal

    def _write_singly(self, batch: list[Item]) -> None:
        failed: dict[object, BaseException] = {}
        try:
            self._backend.rollback()
            for item in batch:
                if not _follows(item, failed):
                    self._write_single(item)
                if item.error is not None:
                    failed[scope_of(item.write)] = item.error
        except Exception as error:
            # Not even the rollback worked. The thread outlives it: the next batch may find the disk repaired.
            for item in batch:
                item.receipt, item.error = None, self._backend.mapped(error)

    def _write_single(self, item: Item) -> None:
        item.receipt, item.error = None, None
        try:
            self._backend.begin()
            item.receipt = self._backend.applied(item.write)
            if item.receipt is None:
                item.receipt = self._backend.apply(item.write)
            self._backend.commit()
        except MainstayError as refusal:
            item.error = refusal
            self._backend.rollback()
        except Exception as error:  # a driver may raise anything; it ends this write, and the thread goes on
            item.error = self._backend.mapped(error)
            self._backend.rollback()

    def _announce(self, batch: list[Item]) -> None:
        """Tell everybody, with one wake-up per event loop."""
        if len(batch) == 1 and batch[0].loop is not None:
            self._wake(batch[0].loop, batch)
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[Item]] = {}
        for item in batch:
            if item.loop is not None:
                by_loop.setdefault(item.loop, []).append(item)
            elif item.done is not None:
                done, item.done = item.done, None
                try:
                    done(item.receipt, item.error)
                except Exception:  # it is the caller's code, and others wait for their answers
                    log.exception("whoever submitted %s could not bear its answer", type(item.write).__name__)
        for loop, items in by_loop.items():
            self._wake(loop, items)

    def _wake(self, loop: asyncio.AbstractEventLoop, items: list[Item]) -> None:
        if self._wakeup is not None and self._wakeup.loop is loop:
            self._wakeup.send(items)
            return
        try:
            loop.call_soon_threadsafe(_resolve, items)
        except RuntimeError:
            return  # the loop was closed under us; what was written stays written, and nobody is left to hear of it


def _insist(work: Callable[[Any], None], subject: Any) -> None:
    """Do what must be done, however short memory is just now: a write that is forgotten is waited for for ever."""
    while True:
        try:
            return work(subject)
        except MemoryError:
            time.sleep(SHORT_OF_MEMORY)


def scope_of(write: Write[Any]) -> object:
    """What a write belongs to: the owned turn or process whose order matters, or nothing."""
    scope = getattr(write, "scope", None)
    return scope if isinstance(scope, OwnedScope) else None


def _follows(item: Item, failed: dict[object, BaseException]) -> bool:
    """Whether a write was made in the belief that one would land which did not: then it fails too, for the same reason.

    That is an ordinary outcome: a task that was cancelled during a write sends the next one while the first is in the
    queue. A relieved owner must hear that it was relieved, and a scope whose store is not to be had that it may wait.
    """
    scope = scope_of(item.write) if failed else None
    if scope is None or scope not in failed:
        return False
    item.error = failed[scope]
    return True


def _resolve(items: list[Item]) -> None:
    for item in items:
        future = item.future
        if future is None or future.done():
            continue
        if item.error is not None:
            future.set_exception(item.error)
        else:
            future.set_result(item.receipt)


# ---------------------------------------------------------------------- the way back to an event loop


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
