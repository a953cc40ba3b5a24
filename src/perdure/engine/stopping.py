"""Stop signals of a worker, and the ready file that probes of its host read.

    StopSignals   SIGTERM and SIGINT of this process while a block runs: the first one drains, the second one cuts off
    ReadyFile     a file that exists while the worker accepts work, and that each renewal of its lease touches

The handlers are plain ones of `signal.signal`: they leave the handlers of the event loop alone, and the
handlers from before come back afterwards. Where several blocks are open, a signal reaches all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec
from msgspec import Struct

from perdure.engine.lease import Worker
from perdure.errors import InvalidInput, SignalsUnavailable

log = logging.getLogger("perdure.engine")

STOPPING = signal.SIGTERM, signal.SIGINT
RENEWALS = 2
"""A ready file that was not touched for so many renewals belongs to a worker that is dead, hung or without its disk."""


class StopSignals:
    """The stop signals of this process while the block runs, as two events. Only the main thread can enter it.

    `first` is set by the first signal and `second` by the next one, whichever signals they are.
    """

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            raise SignalsUnavailable
        self._loop = asyncio.get_running_loop()
        for number in STOPPING:
            self._before[number] = signal.signal(number, self._received)
            if (outer := _stop_signals(self._before[number])) is not None:
                self._count = max(self._count, outer._count)  # a signal may have come before this block
        self._tell()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            inner = None
            current = signal.getsignal(number)
            while current != self._received and (outer := _stop_signals(current)) is not None:
                inner, current = outer, outer._before[number]
            if inner is not None:
                inner._before[number] = before  # a block that was entered later is still open
            elif current == self._received:
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def _received(self, number: int, frame: FrameType | None) -> None:
        outer = _stop_signals(self._before[signal.Signals(number)])
        if outer is not None:
            outer._received(number, frame)
        self._count += 1
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self._count:
            self.first.set()
        if self._count > 1:
            self.second.set()


def _stop_signals(handler: Any) -> StopSignals | None:
    """The block behind a signal handler; None if the handler is not ours."""
    block = getattr(handler, "__self__", None)
    return block if isinstance(block, StopSignals) else None


async def unless(stopped: asyncio.Event, work: Coroutine[Any, Any, bool]) -> bool:
    """True if `work` returned True before the event was set, which cancels it."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
    await asyncio.wait({working})
    return not working.cancelled() and working.result()


# ---------------------------------------------------------------------- the ready file


class Readiness(Struct, frozen=True):
    """Content of a ready file: the worker, and the seconds between two renewals."""

    worker: str
    pid: int
    renewal: float


class ReadyFile:
    """The ready file of one worker. It belongs to the event loop, so a blocked loop does not touch it.

    A renewal counts when the store has confirmed it: a worker that cannot write is not ready.
    """

    def __init__(self, path: str | os.PathLike[str], worker: Worker, accepts: Callable[[], bool]) -> None:
        self._path, self._worker, self._accepts = Path(path), worker, accepts
        self._holds = msgspec.json.encode(Readiness(worker.id, os.getpid(), worker.terms.renewal))

    @contextlib.contextmanager
    def kept(self) -> Generator[None, None, None]:
        """Keep the file while the block runs. Raises InvalidInput if it cannot be written."""
        loop = asyncio.get_running_loop()
        try:
            self._touch()
        except OSError as error:
            raise InvalidInput(
                f"the ready file {str(self._path)!r} cannot be written ({error.strerror}): "
                "give a file in an existing folder that this user may write to"
            ) from None

        def renewed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the Runtime was left without its exit
                loop.call_soon_threadsafe(self._renewed)

        self._open = True
        self._worker.renewals.append(renewed)
        try:
            yield
        finally:
            self._open = False
            self._worker.renewals.remove(renewed)
            self._remove()

    def _renewed(self) -> None:
        if not self._open:
            return
        try:
            self._touch()
        except OSError as error:
            log.warning("the ready file %s cannot be touched: %s", self._path, error)

    def _touch(self) -> None:
        if not self._accepts():
            self._remove()
            return
        try:
            os.utime(self._path)
        except FileNotFoundError:
            whole = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            whole.write_bytes(self._holds)
            whole.replace(self._path)  # a probe never reads half of it

    def _remove(self) -> None:
        """Remove the file, unless another worker has replaced it by its own."""
        with contextlib.suppress(OSError):
            if self._path.read_bytes() == self._holds:
                self._path.unlink()


def unready(path: str | os.PathLike[str]) -> str | None:
    """Why the worker of a ready file does not accept work; None if it does."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Readiness)
        age = time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return "there is no ready file: the worker has not begun to accept work, or has stopped"
    except OSError as error:
        return f"the ready file cannot be read: {error.strerror}"
    except msgspec.DecodeError:
        return "this is not a ready file of `perdure worker`"
    # A clock that was set back makes the age negative until the next renewal.
    if abs(age) <= RENEWALS * found.renewal:
        return None
    return (
        f"worker {found.worker} (pid {found.pid}) has not renewed its lease for {age:.0f} s: it renews every "
        f"{found.renewal:g} s, so it is dead, its event loop is blocked, or its disk fails"
    )
