"""The lock file beside a database: who holds it may write, and it says what was last acknowledged.

After each commit, and before anybody hears of it, the holder notes here what the commit must have left in the database:
the last record written, or a count that every other transaction moves. A database that lacks it has lost acknowledged
work: its WAL was cut or removed, or it is an old copy. The note is not synced: after a power cut it may lag behind the
database, which is harmless, but it is never ahead. Only the first one is synced, with the file's name: a database whose
lock file is missing, or has never had a note, and that holds rows all the same, came here without it: it is a copy.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from pathlib import Path

from msgspec import Struct

from mainstay.errors import StoreInherited, StoreUnavailable
from mainstay.stores.files import PRIVATE, Access, identity, open_file, sync_folder

log = logging.getLogger("mainstay.store")

_FORMAT = struct.Struct("<QQQQ")
_SINCE = struct.Struct("<Q")
"""After the note: since when the WAL could not be folded whole, in milliseconds; 0 when the last try did it."""


PATIENCE = 10.0
"""Seconds to wait for whoever writes. A transaction takes milliseconds; one that does not end was stopped in it."""

_locks: set[int] = set()
"""Descriptors of this process that hold locks, or may."""

_inherited: dict[tuple[int, int], int] = {}
"""Lock files that were open when this process was forked, and the parent that had them open."""


def open_lock(path: Path, access: Access) -> int:
    """A descriptor to lock. A child of a fork shares its parent's locks and would keep them after the parent's death:
    there, the descriptor is closed."""
    descriptor = open_file(path, os.O_RDWR, access)
    _locks.add(descriptor)
    return descriptor


def close_lock(descriptor: int) -> bool:
    """Close it; False when it was a lock of the process that this one was forked from."""
    if descriptor not in _locks:
        return False
    _locks.discard(descriptor)
    os.close(descriptor)
    return True


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _in_child() -> None:
    while _locks:
        descriptor = _locks.pop()
        _inherited[_identity(descriptor)] = os.getppid()
        os.close(descriptor)


os.register_at_fork(after_in_child=_in_child)


def locked_files(folder: Path) -> list[str]:
    """The names of files in a folder that some process holds a lock on."""
    found = []
    for file in sorted(folder.glob("*")) if folder.is_dir() else ():
        try:
            descriptor = open_file(file, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or nothing that a worker would lock
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append(file.name)
        finally:
            os.close(descriptor)
    return found


class Noted(Struct, frozen=True):
    """`writes`: transactions of all processes so far; `tip`: of those without a record; the last record's identity."""

    writes: int = 0
    tip: int = 0
    place: int = 0
    crc: int = 0


class LockFile:
    """One per store and process. Used by the writer's thread; `noted` may be read from any."""

    def __init__(self, path: Path, access: Access = PRIVATE, patience: float = PATIENCE) -> None:
        self.path, self._patience = path, patience
        try:
            self._descriptor = open_lock(path, access)
        except OSError as error:
            raise StoreUnavailable(f"cannot open {path}: {error.strerror}") from None
        self._identity = _identity(self._descriptor)
        parent = _inherited.get(self._identity)
        if parent is not None:
            # SQLite believes that the parent's locks are this process's own, and takes none: a parent that leaves
            # would remove the WAL under the child.
            self.close()
            raise StoreInherited(parent, os.getpid())

    def hold(self) -> None:
        """Wait for it, but not for ever: a process that was stopped in a transaction must not stop all in silence."""
        until = time.monotonic() + self._patience
        while not self._try():
            if time.monotonic() > until:
                raise StoreUnavailable(
                    f"another process has held {self.path} for {self._patience:g} s: it was stopped in a transaction, "
                    "or its disk does not answer; let it go on, or end it"
                )
            time.sleep(0.001)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreUnavailable(f"cannot lock {self.path}: {error.strerror}; it belongs on a local disk") from None
        return True

    def in_place(self) -> bool:
        """Whether its name still leads to it: who locked another file by that name would not be kept out."""
        return identity(self.path) == self._identity

    def free(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        except OSError as error:  # only when the descriptor is gone, and with it the lock
            log.error("cannot unlock %s: %s", self.path, error)

    def noted(self) -> Noted:
        try:
            data = os.pread(self._descriptor, _FORMAT.size, 0)
        except OSError as error:
            raise StoreUnavailable(f"cannot read {self.path}: {error.strerror}") from None
        return Noted(*_FORMAT.unpack(data)) if len(data) == _FORMAT.size else Noted()

    @property
    def blank(self) -> bool:
        """Whether nothing was ever noted here."""
        return os.fstat(self._descriptor).st_size < _FORMAT.size

    def note_first(self, noted: Noted) -> None:
        """Note where there was no note, or none that holds any more, and make that durable."""
        try:
            os.pwrite(self._descriptor, _FORMAT.pack(noted.writes, noted.tip, noted.place, noted.crc), 0)
            os.fsync(self._descriptor)
            sync_folder(self.path.parent)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {self.path}: {error.strerror}") from None

    def note(self, noted: Noted) -> None:
        try:
            os.pwrite(self._descriptor, _FORMAT.pack(noted.writes, noted.tip, noted.place, noted.crc), 0)
        except OSError as error:
            # The commit has landed, so it is no failure of the write; a note that lags only notices less.
            log.warning("cannot note the last commit: %s", error)

    def unfolded_since(self) -> int:
        """Since when nobody could fold the WAL whole, in milliseconds of wall time; 0 when that is no trouble."""
        try:
            data = os.pread(self._descriptor, _SINCE.size, _FORMAT.size)
        except OSError as error:
            raise StoreUnavailable(f"cannot read {self.path}: {error.strerror}") from None
        return int(_SINCE.unpack(data)[0]) if len(data) == _SINCE.size else 0

    def note_unfolded(self, since: int) -> None:
        try:
            os.pwrite(self._descriptor, _SINCE.pack(since), _FORMAT.size)
        except OSError as error:
            log.warning("cannot note how the WAL was folded: %s", error)

    def close(self) -> None:
        close_lock(self._descriptor)
