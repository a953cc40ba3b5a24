"""The lock by which an OS process keeps others from folding and unlinking the WAL of a database that it has open.

While a connection is open, SQLite holds a shared lock on the database. A process that closes a connection and is given
the exclusive lock takes itself for the last one: it folds the WAL back and unlinks it. But SQLite's locks are POSIX
locks, which belong to a process and a file: closing any descriptor of the database in this process drops them all, and
a host that reads or copies its own file closes one. Then another process may unlink the WAL under us, and what is
committed afterwards goes into a file without a name.

Locks of an open file description (Linux) belong to their descriptor and are not dropped so. One per process and
database is held on the bytes of SQLite's shared lock, from the first connection until the last is about to close:

- It is taken when the database is in WAL mode already: to get there SQLite needs the exclusive lock.
- It is released before the last connection closes, so that SQLite folds and unlinks the WAL then.
- Its descriptor is one whose closing drops SQLite's locks, too. A connection of the host's own may outlive ours, so
  the descriptor is closed only when nothing in this process can have a lock on the file; until then it stays, unlocked.
- A forked child closes its copies of descriptors, and unlocks nothing: that would unlock its parent's.
- The same is done for the byte of `-shm` that says that it is in use: a process that finds it free truncates the file.

Where the system has no such locks the writer still notices that the WAL lost its name (`WriterFile.begin`, `commit`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Generator
from pathlib import Path

from mainstay.errors import StoreUnavailable
from mainstay.stores.files import PRIVATE, identity, open_file, regular

log = logging.getLogger("mainstay.store")

SHARED_BYTES = (0x40000002, 510)
"""SQLite's shared lock in a database: PENDING_BYTE + 2, and 510 bytes."""
IN_USE_BYTE = (128, 1)
"""SQLite's "dead man's switch" in `-shm`."""
PATIENCE = 10.0

_SET, _GET = getattr(fcntl, "F_OFD_SETLK", None), getattr(fcntl, "F_OFD_GETLK", None)
_FLOCK = struct.Struct("hhqqi4x")

_locks: dict[tuple[int, int], SharedLock] = {}
"""By identity of the database: those with connections, and those whose descriptors cannot be closed yet."""
_guard = threading.Lock()
"""Guards `_locks` and the count of connections in each."""


class SharedLock:
    """One for each database that this process has open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.connections = 0
        # Guarded by `_changing`, which is taken before `_guard`. The first is the locked one; more than one only when
        # the file came back under its name at the wrong moment.
        self._changing = threading.Lock()
        self._descriptors: list[int] = []
        self._memory: int | None = None
        self._held = False

    def add(self, descriptor: int) -> None:
        self._descriptors.append(descriptor)

    def hold(self) -> None:
        """Take the lock, unless it is held; a database that another program has for itself is waited for."""
        with self._changing:
            if not self._descriptors:
                return
            until = time.monotonic() + PATIENCE
            while not self._held and not (_lock(self._descriptors[0], fcntl.F_RDLCK, SHARED_BYTES)):
                if time.monotonic() > until:
                    raise StoreUnavailable(
                        f"another program has held {self._path} for itself for {PATIENCE:g} s: let it finish"
                    )
                time.sleep(0.001)
            self._held = True
            if self._memory is None:
                # Not there before the first read; a later connection finds it.
                with contextlib.suppress(OSError):
                    self._memory = open_file(Path(f"{self._path}-shm"), os.O_RDONLY)
                    _lock(self._memory, fcntl.F_RDLCK, IN_USE_BYTE)

    @contextlib.contextmanager
    def leaving(self) -> Generator[None, None, None]:
        """The block closes one connection."""
        with self._changing:
            with _guard:
                last = self.connections == 1
            if last:
                self._release()
            try:
                yield
            finally:
                with _guard:
                    self.connections -= 1
                    _close_unused()

    def _release(self) -> None:
        if self._held:
            _lock(self._descriptors[0], fcntl.F_UNLCK, SHARED_BYTES)
            self._held = False
        if self._memory is not None:
            _lock(self._memory, fcntl.F_UNLCK, IN_USE_BYTE)

    def unused(self) -> bool:
        """Whether closing the descriptors drops no lock of this process: SQLite has none on the file.

        Of several locks the system names any one, so that one of another process may hide one of ours.
        """
        return self.connections == 0 and not any(_is_locked(each) for each in self._descriptors)

    def close(self) -> None:
        for descriptor in (*self._descriptors, *(() if self._memory is None else (self._memory,))):
            os.close(descriptor)
        self._descriptors, self._memory, self._held = [], None, False

    def abandon(self) -> None:
        """In a forked child: another thread of the parent may have been about to change it."""
        self._changing = threading.Lock()
        self.close()


def join(path: Path) -> SharedLock:
    """The lock of a database, with one more connection. A database that is not there is made, for its owner alone."""
    with _guard:
        _close_unused()
        found = identity(path)
        lock = None if found is None else _locks.get(found)
        if lock is None:
            lock = _open(path, is_new=found is None)
        lock.connections += 1
        return lock


def _open(path: Path, is_new: bool) -> SharedLock:
    """Open a database that this process has no connection to. With one it would be a second descriptor, which could not
    be closed again."""
    if _SET is None and not is_new:
        # A descriptor would protect nothing here, and closing it would drop the locks of a connection of the host's.
        return _locks.setdefault(regular(os.stat(path), path), SharedLock(path))
    descriptor = open_file(path, os.O_RDONLY, PRIVATE)
    lock = _locks.setdefault(regular(os.fstat(descriptor), path), SharedLock(path))
    if _SET is None:
        os.close(descriptor)
    else:
        lock.add(descriptor)
    return lock


def _close_unused() -> None:
    for key, lock in list(_locks.items()):
        if lock.unused():
            del _locks[key]
            lock.close()


def _lock(descriptor: int, kind: int, where: tuple[int, int]) -> bool:
    """False when another process has a lock in the way."""
    if _SET is None:
        return True
    try:
        fcntl.fcntl(descriptor, _SET, _FLOCK.pack(kind, os.SEEK_SET, *where, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        log.warning("no lock that outlives a reading of the file is to be had here: %s", error)
    return True


def _is_locked(descriptor: int) -> bool:
    if _GET is None:
        return False
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, *SHARED_BYTES, 0)
    try:
        found: bytes = fcntl.fcntl(descriptor, _GET, asked)
    except OSError:
        return False
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _in_child() -> None:
    global _guard
    _guard = threading.Lock()  # another thread of the parent may have held it
    while _locks:
        _locks.popitem()[1].abandon()


os.register_at_fork(after_in_child=_in_child)
