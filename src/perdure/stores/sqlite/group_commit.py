"""Group commit: everything that waits shares one transaction and one fsync.

There are two ways to write. The light writes of one pass of the store's event loop are collected and committed at its
end, on the loop's own thread: handing them to another thread and back costs more than all that is done with them there.
The loop waits for nothing but the sync, and for that only while syncs are fast. Everything else goes to the writer
thread: large writes and batches, writes that refer to blobs or change many rows, writes from other threads (renewals
among them, which a blocked loop must not hold up), and whatever finds a lock taken. It also folds the WAL.

The rules, each with a test:

- Writes are taken in the order they were submitted, on both ways together: the loop writes only what overtakes nothing.
- A refused write (a typed error, raised before it changed anything) fails alone, and with it the later writes of the
  same scope in that batch, with the same error: they were made in the belief that it would land. Scopes are owned
  turns and processes; every write from outside is a scope of its own.
- A batch that cannot even begin, because the file is not to be had, fails as a whole.
- A batch that fails as a whole, in a statement or at COMMIT, is rolled back; then each of its writes is read back, in
  case the commit had landed after all, and otherwise sent again in a transaction of its own. This is the thread's work,
  also for a batch that failed on the loop.
- A process that is out of memory or threads is told so by `StoreUnavailable`; the thread lives on.
- A cancelled `await` cancels nothing here: the write lands, only no task gets its answer.
- A write's size is capped before it gets here, so one session cannot hold up the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from perdure.errors import PerdureError, StoreInherited, StoreUnavailable
from perdure.model.write import Accept, Advance, Append, Claim, Commit, OwnedScope, Register, Release, Write
from perdure.stores import os_process
from perdure.stores.os_process import NO_THREAD, OUT_OF_MEMORY

log = logging.getLogger("perdure.store")

MAX_BATCH = 512
MAINTENANCE_BATCHES = 256
"""Maintenance that is due is done when no write waits; where one always waits, after so many batches."""

LOOP_SYNC = 0.002
"""Seconds that a commit may take on average for the event loop to wait for it."""
RECENT_SYNCS = 8
"""Commits that the average is about. One that takes so many times the limit exceeds it alone."""
STALLS_APART = 100
"""After a slow commit, the loop leaves writing to the thread for so many times as long as it took."""
LOOP_BATCH = 128
"""Writes that the loop commits at once: a few milliseconds, for which its other tasks wait."""
LIGHT_RECORDS, LIGHT_BYTES = 32, 16 * 1024
"""Records in a light write, and the bytes of all of them."""

SHORT_OF_MEMORY = 0.01
"""Seconds to wait for others to give memory back."""

Done = Callable[[Any, BaseException | None], None]


class Backend(Protocol):
    """The store's side of the writer; called by one thread at a time."""

    def begin(self) -> None: ...

    def begin_nowait(self) -> bool:
        """Begin unless anything is to be waited for or put right first. False has changed nothing."""
        ...

    def apply(self, write: Write[Any]) -> Any: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def applied(self, write: Write[Any]) -> Any | None: ...

    def mapped(self, error: Exception) -> PerdureError: ...

    def maintenance_due(self) -> bool: ...

    def maintain(self) -> None: ...


class Item:
    """A write, and who hears of its end. Born on any thread, ended on the one that writes it."""

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


class SyncPace:
    """Whether syncs are fast enough for an event loop to wait for them. Used on the loop's thread only.

    A sync that stalls sends the following writes to the writer thread at once, and for a hundred times as long as it
    took; then one batch tries again. So a slow disk costs the loop one stall, and about a hundredth of its time.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._average: float | None = None
        self._not_before = 0.0 if limit > 0 else math.inf

    def is_fast(self) -> bool:
        return self._clock() >= self._not_before

    def note(self, took: float) -> None:
        average = took if self._average is None else self._average + (took - self._average) / RECENT_SYNCS
        self._average = average
        if average > self._limit:
            self._average, self._not_before = None, self._clock() + STALLS_APART * took


class GroupWriter:
    """Both ways to write, in one order.

    `_queue` holds what the thread is to write, `None` to end it, and `_doubtful` a batch that failed on the loop: its
    commit may have landed. Both are filled from any thread, and emptied under `_in_use`, which is held as long as the
    backend is used. So a loop that gets `_in_use` and finds both empty overtakes nothing. `_collected` belongs to the
    loop.

    `_in_use` is reentrant only because such a lock knows its thread, see `_flush`.
    """

    def __init__(self, backend: Backend, name: str, loop_sync: float = LOOP_SYNC) -> None:
        self._backend = backend
        self._queue: deque[Item | None] = deque()
        self._doubtful: Sequence[Item] = ()
        self._in_use = threading.RLock()
        # A token says that the queue may hold something. One is enough, whatever it holds.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._wakeup: Wakeup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._collected: list[Item] = []
        self._pace = SyncPace(loop_sync)
        self._pid = os_process.pid()
        # Made beforehand: when it is needed there is no memory to make one.
        self._exhausted = StoreUnavailable(OUT_OF_MEMORY)
        self.batches = 0

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is where most writes come from: it commits the light ones itself, and is told of the end of others by
        the cheapest way there is."""
        if loop is not None:
            self._wakeup = wakeup_of(loop, _resolve)
        try:
            self._thread.start()
        except RuntimeError as error:
            if self._wakeup is not None:
                self._wakeup.close()
            raise StoreUnavailable(NO_THREAD.format(error)) from None
        self._loop = loop

    def leave_loop(self) -> None:
        """Hand over what is collected, and collect no more. On the loop, before `stop`."""
        self._loop = None
        self._queue_collected()
        self._hand_over(())

    def stop(self) -> None:
        """End after what is queued; waits for it."""
        self._queue.append(None)
        self._tokens.put(None)
        self._thread.join()

    def write(self, write: Write[Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        item = Item(write, loop, future)
        if loop is not self._loop:
            self._hand_over([item])
        elif is_light(write) and self._pace.is_fast():
            if not self._collected:
                loop.call_soon(self._flush)
            self._collected.append(item)
        else:
            self._queue_collected()
            self._hand_over([item])
        return future

    def submit(self, write: Write[Any], done: Done) -> None:
        """The same from any thread; `done` is called on the writer's, even while the event loop is blocked."""
        self._hand_over([Item(write, done=done)])
        loop = self._loop
        if self._collected and loop is not None:
            # A signal handler that raises as `_flush` is entered ends that call, and asyncio forgets it: what is
            # collected would wait for ever. The renewals of a worker come this way, so it waits for one of them.
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._flush)

    def _hand_over(self, items: Sequence[Item]) -> None:
        self._queue.extend(items)
        if self._tokens.empty():  # one that is there is taken after this, and finds the items
            self._tokens.put(None)

    # ------------------------------------------------------------------ the event loop

    def _queue_collected(self) -> None:
        """Both at once: without a call, nothing comes between."""
        self._queue += self._collected
        self._collected = []

    def _flush(self) -> None:
        """Commit what one pass of the loop has collected, or hand it over where anything but the sync is to be waited
        for.

        A signal handler of the host may raise after any call here. What is collected stays collected until it is in the
        queue, in doubt or written, and `release` refuses a lock that is not this thread's: no write is forgotten, and
        no lock is kept.
        """
        batch = self._collected
        try:
            if os_process.pid() != self._pid:  # in a forked child: its parent has a flush of its own
                for item in batch:
                    item.error = StoreInherited(self._pid, os_process.pid())
                self._collected = []
                _resolve(batch)
            elif 0 < len(batch) <= LOOP_BATCH and self._in_use.acquire(blocking=False):
                self._commit_on_loop(batch)
        finally:
            try:  # noqa: SIM105  # a call of `suppress` would come before the one of `release`
                self._in_use.release()
            except RuntimeError:
                pass
            if self._collected:
                self._queue_collected()
                self._hand_over(())

    def _commit_on_loop(self, batch: list[Item]) -> None:
        """Leaves `_collected` as it is where the thread is to write it."""
        backend = self._backend
        if self._queue or self._doubtful:
            return
        try:
            if not backend.begin_nowait():
                return
            self.batches += 1
            self._apply_all(batch)
            began = time.perf_counter()
            backend.commit()
            self._pace.note(time.perf_counter() - began)
        except BaseException as error:  # also what a signal handler of the host raises: no write may be forgotten
            self._doubtful, self._collected = batch, []
            with contextlib.suppress(Exception):  # the thread does it again
                backend.rollback()
            self._tokens.put(None)
            if not isinstance(error, Exception):
                raise
            return
        self._collected = []
        try:
            _resolve(batch)
        except BaseException:  # the same: the others wait for their answers
            _resolve(batch)
            raise
        if backend.maintenance_due():
            self._tokens.put(None)  # only the thread folds the WAL

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        going = True
        while going:
            self._tokens.get()
            with self._in_use:
                doubtful, self._doubtful = self._doubtful, ()
                batch, going = self._gather()
                self._serve(self._write_singly, doubtful)
                self._serve(self._write_batch, batch)
                if self._backend.maintenance_due() and (not self._queue or self.batches % MAINTENANCE_BATCHES == 0):
                    self._maintain()
            # Without the lock: the loop, once woken, finds it free. And before anything else: whatever ran here now
            # would keep the loop from the GIL.
            _insist(self._announce, doubtful)
            _insist(self._announce, batch)
            while self._backend.maintenance_due() and not self._queue:
                with self._in_use:
                    if not self._maintain():
                        break  # and otherwise in small steps, each of which may find that something waits
        if self._wakeup is not None:
            self._wakeup.close()

    def _serve(self, work: Callable[[Sequence[Item]], None], batch: Sequence[Item]) -> None:
        """Write a batch. Nothing ends the thread: the next write would wait for ever."""
        if not batch:
            return
        self.batches += 1
        try:
            work(batch)
        except Exception:  # out of memory in what handles errors: each write may have landed or not
            for item in batch:
                item.receipt, item.error = None, self._exhausted

    def _maintain(self) -> bool:
        try:
            self._backend.maintain()
        except Exception as error:  # what is written stays written, and the thread must live
            log.warning("maintenance of the store failed, it is tried again later: %s", error)
            return False
        return True

    def _gather(self) -> tuple[list[Item], bool]:
        """Everything that waits, up to a batch; and whether to go on after it."""
        batch: list[Item] = []
        while self._queue and len(batch) < MAX_BATCH:
            item = self._queue[0]
            if item is None:
                return batch, False
            _insist(batch.append, item)
            self._queue.popleft()
        if self._queue:
            self._tokens.put(None)
        return batch, True

    def _write_batch(self, batch: Sequence[Item]) -> None:
        try:
            self._backend.begin()
        except Exception as error:  # whatever it was, everybody waits for an answer and the thread must live
            self._give_up(batch, error)
            return
        try:
            self._apply_all(batch)
            self._backend.commit()
        except Exception:  # one write may have caused it, and the others of the batch must land: each is tried alone
            self._write_singly(batch)

    def _give_up(self, batch: Sequence[Item], error: Exception) -> None:
        """The file is not to be had: told at once to all, who would otherwise wait for it one after the other."""
        with contextlib.suppress(Exception):
            self._backend.rollback()
        refusal = error if isinstance(error, PerdureError) else self._backend.mapped(error)
        for item in batch:
            item.error = refusal

    def _apply_all(self, batch: Sequence[Item]) -> None:
        failed: dict[object, BaseException] = {}
        for item in batch:
            if _follows(item, failed):
                continue
            try:
                item.receipt, item.error = self._backend.apply(item.write), None
            except PerdureError as refusal:
                item.error = refusal
                failed[scope_of(item.write)] = refusal

    def _write_singly(self, batch: Sequence[Item]) -> None:
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
        except PerdureError as refusal:
            item.error = refusal
            self._backend.rollback()
        except Exception as error:  # a driver may raise anything; it ends this write, and the thread goes on
            item.error = self._backend.mapped(error)
            self._backend.rollback()

    def _announce(self, batch: Sequence[Item]) -> None:
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

    def _wake(self, loop: asyncio.AbstractEventLoop, items: Sequence[Item]) -> None:
        if self._wakeup is not None and self._wakeup.loop is loop:
            self._wakeup.send(items)
            return
        try:
            loop.call_soon_threadsafe(_resolve, items)
        except RuntimeError:
            return  # the loop was closed under us: what was written stays written, and no task waits for it


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


def is_light(write: Write[Any]) -> bool:
    """Whether a write changes few rows and no large ones, and needs no look at a blob."""
    if isinstance(write, Accept):
        return not write.blobs and len(write.body) <= LIGHT_BYTES
    if not isinstance(write, (Append, Commit, Advance)):
        return isinstance(write, (Claim, Release)) or (isinstance(write, Register) and not write.blobs)
    nodes = write.records if isinstance(write, Advance) else write.nodes
    return not write.blobs and len(nodes) <= LIGHT_RECORDS and sum([len(node.body) for node in nodes]) <= LIGHT_BYTES


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


def _resolve(items: Sequence[Item]) -> None:
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
