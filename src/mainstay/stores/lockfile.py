"""The lock file beside a database: who holds it may write, and it says what was last acknowledged.

After each commit, and before anybody hears of it, the holder notes here what the commit must have left in the database:
the last record written, or a count that every other transaction moves. A database that lacks it has lost acknowledged
work: its WAL was cut or removed, or it is an old copy. The note is not synced: after a power cut it may lag behind the
database, which is harmless, but it is never ahead.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from pathlib import Path

from msgspec import Struct

from mainstay.errors import StoreUnavailable

log = logging.getLogger("mainstay.store")

_FORMAT = struct.Struct("<QQQQ")


_locks: set[int] = set()
"""Descriptors of this process that hold locks, or may."""


def open_lock(path: Path) -> int:
    """A descriptor to lock. A child of a fork shares its parent's locks and would keep them after the parent's death:
    there, the descriptor is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _locks.add(descriptor)
    return descriptor


def close_lock(descriptor: int) -> bool:
    """Close it; False when it was a lock of the process that this one was forked from."""
    if descriptor not in _locks:
        return False
    _locks.discard(descriptor)
    os.close(descriptor)
    return True


def _in_child() -> None:
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_in_child)


class Noted(Struct, frozen=True):
    """`writes`: transactions of all processes so far; `tip`: of those without a record; the last record's identity."""

    writes: int = 0
    tip: int = 0
    place: int = 0
    crc: int = 0


class LockFile:
    """One per store and process. Used by the writer's thread; `noted` may be read from any."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = open_lock(path)
        except OSError as error:
            raise StoreUnavailable(f"cannot open {path}: {error.strerror}") from None

    def hold(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def free(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def noted(self) -> Noted:
        data = os.pread(self._descriptor, _FORMAT.size, 0)
        return Noted(*_FORMAT.unpack(data)) if len(data) == _FORMAT.size else Noted()

    def note(self, noted: Noted) -> None:
        try:
            os.pwrite(self._descriptor, _FORMAT.pack(noted.writes, noted.tip, noted.place, noted.crc), 0)
        except OSError as error:
            # The commit has landed, so it is no failure of the write; a note that lags only notices less.
            log.warning("cannot note the last commit: %s", error)

    def close(self) -> None:
        close_lock(self._descriptor)
