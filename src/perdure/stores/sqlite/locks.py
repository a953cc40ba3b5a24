"""The locks of a store, and what each of them proves.

`LockFile`, `<store>-lock`: its holder may write, and it says what was last acknowledged. After each commit, and before
its caller hears of it, the holder notes here what the commit must have left in the database: the last record written,
or a count that every other transaction moves. A database that lacks it has lost acknowledged work: its WAL was cut or
removed, or it is an old copy. The note is not synced: after a power cut it may lag behind the database, which is
harmless, but it is never ahead. Only the first one is synced, with the file's name: a database whose lock file is
missing, or has never had a note, and that holds rows all the same, came here without it: it is a copy.

`SharedLock`, on the database itself: it keeps other processes from folding and unlinking the WAL of a database that
this one has open. SQLite holds a shared lock for that, and a process that closes a connection and is given the
exclusive lock takes itself for the last one. But SQLite's locks are POSIX locks, which belong to a process and a file:
closing any descriptor of the database in this process drops them all, and a host that reads or copies its own file
closes one. Then another process may unlink the WAL under us, and what is committed afterwards goes into a file without
a name. Locks of an open file description (Linux) belong to their descriptor and are not dropped so. One per process and
database is held on the bytes of SQLite's shared lock, from the first connection until the last is about to close:

- It is taken when the database is in WAL mode already: to get there SQLite needs the exclusive lock.
- It is released before the last connection closes, so that SQLite folds and unlinks the WAL then.
- Its descriptor is one whose closing drops SQLite's locks, too. A connection of the host's own may outlive ours, so
  the descriptor is closed only when nothing in this process can have a lock on the file; until then it stays, unlocked.
- The same is done for the byte of `-shm` that says that it is in use: a process that finds it free truncates the file.

Where the system has no such locks the writer still notices that the WAL lost its name (`WriterFile.begin`, `commit`).

`FileLease`, `<store>-workers/<id>`: locked, its worker's process lives, perhaps stopped; not locked, it is dead. The
ids of workers are read from a store, and become names of files. A row may be a stranger's: an id that is not of our
form belongs to no worker that lives, and no file is looked at for it.

A forked child closes its copies of all these descriptors, and unlocks nothing: that would unlock its parent's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Generator
from pathlib import Path

from msgspec import Struct

from perdure.errors import InternalError, StoreInherited, StoreUnavailable
from perdure.model.session import WorkerRow
from perdure.stores import os_process
from perdure.stores.files import (
    PRIVATE,
    Access,
    access_of,
    check_folder,
    identity,
    make_folder,
    open_file,
    regular,
    sync_folder,
)
from perdure.stores.sqlite import sockets

log = logging.getLogger("perdure.store")

_FORMAT = struct.Struct("<QQQQ")
_SINCE = struct.Struct("<Q")
"""After the note: since when the WAL could not be folded whole, in milliseconds; 0 when the last try did it."""

LOCK_SECONDS = 10.0
"""Seconds to wait for another process that writes. A transaction takes milliseconds; where it does not end, the process
was stopped in it."""

_own: set[int] = set()
"""Descriptors of this process that may hold locks."""

_inherited: dict[tuple[int, int], int] = {}
"""Lock files that were open when this process was forked, and the parent that had them open."""


def open_lock(path: Path, access: Access) -> int:
    """Open a file to lock it. A forked child closes the descriptor, because it would keep its parent's lock alive."""
    descriptor = open_file(path, os.O_RDWR, access)
    _own.add(descriptor)
    return descriptor


def close_lock(descriptor: int) -> bool:
    """Close a descriptor of `open_lock`. True if this process had opened it, and not the process it was forked from."""
    if descriptor not in _own:
        return False
    _own.discard(descriptor)
    os.close(descriptor)
    return True


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def locked_files(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the files of a folder that match the pattern and that some process holds a lock on."""
    found = []
    for file in sorted(folder.glob(pattern)) if folder.is_dir() else ():
        try:
            descriptor = open_file(file, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or nothing that a worker would lock
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append(file)
        finally:
            os.close(descriptor)
    return found


class LockNote(Struct, frozen=True):
    """`writes`: transactions of all processes so far; `tip`: of those without a record; the last record's identity."""

    writes: int = 0
    tip: int = 0
    place: int = 0
    crc: int = 0


class LockFile:
    """The open lock file of a store, one per process. The writer thread uses it; any thread may call `noted`."""

    def __init__(self, path: Path, access: Access = PRIVATE, wait_seconds: float = LOCK_SECONDS) -> None:
        self.path, self._wait = path, wait_seconds
        try:
            self._descriptor = open_lock(path, access)
        except OSError as error:
            raise StoreUnavailable(f"cannot open {path}: {error.strerror}") from None
        self.identity = _identity(self._descriptor)
        parent = _inherited.get(self.identity)
        if parent is not None:
            # SQLite believes that the parent's locks are this process's own, and takes none: a parent that leaves
            # would remove the WAL under the child.
            self.close()
            raise StoreInherited(parent, os.getpid())

    def hold(self) -> None:
        """Wait for the lock. Raises StoreUnavailable after `wait_seconds`: its holder may be a stopped process."""
        until = time.monotonic() + self._wait
        while not self.hold_nowait():
            if time.monotonic() > until:
                raise StoreUnavailable(
                    f"another process has held {self.path} for {self._wait:g} s: it was stopped in a transaction, "
                    "or its disk does not answer; let it go on, or end it"
                )
            time.sleep(0.001)

    def hold_nowait(self) -> bool:
        """Take the lock without waiting. True if it was free."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreUnavailable(f"cannot lock {self.path}: {error.strerror}; it belongs on a local disk") from None
        return True

    def free(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        except OSError as error:  # only when the descriptor is gone, and with it the lock
            log.error("cannot unlock %s: %s", self.path, error)

    def noted(self) -> LockNote:
        try:
            data = os.pread(self._descriptor, _FORMAT.size, 0)
        except OSError as error:
            raise StoreUnavailable(f"cannot read {self.path}: {error.strerror}") from None
        return LockNote(*_FORMAT.unpack(data)) if len(data) == _FORMAT.size else LockNote()

    @property
    def blank(self) -> bool:
        """True if the lock file has never held a note."""
        return os.fstat(self._descriptor).st_size < _FORMAT.size

    def note_first(self, noted: LockNote) -> None:
        """Write the first note of a new or restored store, and sync it."""
        try:
            os.pwrite(self._descriptor, _FORMAT.pack(noted.writes, noted.tip, noted.place, noted.crc), 0)
            os.fsync(self._descriptor)
            sync_folder(self.path.parent)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {self.path}: {error.strerror}") from None

    def note(self, noted: LockNote) -> None:
        try:
            os.pwrite(self._descriptor, _FORMAT.pack(noted.writes, noted.tip, noted.place, noted.crc), 0)
        except OSError as error:
            # The commit has landed, so it is no failure of the write; a note that lags only notices less.
            log.warning("cannot note the last commit: %s", error)

    def unfolded_since(self) -> int:
        """Return since when every checkpoint has left a part of the WAL, in milliseconds of wall time, or 0."""
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


# ---------------------------------------------------------------------- the shared lock of a database


SHARED_BYTES = (0x40000002, 510)
"""SQLite's shared lock in a database: PENDING_BYTE + 2, and 510 bytes."""
IN_USE_BYTE = (128, 1)
"""SQLite's "dead man's switch" in `-shm`."""

_SET, _GET = getattr(fcntl, "F_OFD_SETLK", None), getattr(fcntl, "F_OFD_GETLK", None)
_FLOCK = struct.Struct("hhqqi4x")

_shared: dict[tuple[int, int], SharedLock] = {}
"""The locks by device and inode of their database: with connections, or with descriptors that must stay open."""
_guard = threading.Lock()
"""Guards `_shared` and the count of connections in each."""


class SharedLock:
    """The shared lock on a database that this process has open."""

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
        """Take the lock unless this process has it. Waits while another program has the database exclusively."""
        with self._changing:
            if not self._descriptors:
                return
            until = time.monotonic() + LOCK_SECONDS
            while not self._held and not (_lock(self._descriptors[0], fcntl.F_RDLCK, SHARED_BYTES)):
                if time.monotonic() > until:
                    raise StoreUnavailable(
                        f"another program has held {self._path} for itself for {LOCK_SECONDS:g} s: let it finish"
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
        """Release the lock around the block if the connection that the block closes is the last one."""
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
        """True if the descriptors can be closed, because SQLite holds no lock of this process on the file.

        The system reports any one of several locks, so another process's lock can hide one of this process.
        """
        return self.connections == 0 and not any(_is_locked(each) for each in self._descriptors)

    def close(self) -> None:
        for descriptor in (*self._descriptors, *(() if self._memory is None else (self._memory,))):
            os.close(descriptor)
        self._descriptors, self._memory, self._held = [], None, False

    def abandon(self) -> None:
        """Close everything in a forked child, where another thread of the parent may have held the mutex."""
        self._changing = threading.Lock()
        self.close()


def join(path: Path) -> SharedLock:
    """Return the shared lock of a database and count one more connection. Creates a missing database as 0600."""
    with _guard:
        _close_unused()
        found = identity(path)
        lock = None if found is None else _shared.get(found)
        if lock is None:
            lock = _open(path, is_new=found is None)
        lock.connections += 1
        return lock


def _open(path: Path, is_new: bool) -> SharedLock:
    """Open a database to which this process has no connection. If it had one, the descriptor could never be closed,
    because closing it would drop SQLite's locks."""
    if _SET is None and not is_new:
        # A descriptor would protect nothing here, and closing it would drop the locks of a connection of the host's.
        return _shared.setdefault(regular(os.stat(path), path), SharedLock(path))
    descriptor = open_file(path, os.O_RDONLY, PRIVATE)
    lock = _shared.setdefault(regular(os.fstat(descriptor), path), SharedLock(path))
    if _SET is None:
        os.close(descriptor)
    else:
        lock.add(descriptor)
    return lock


def is_open_elsewhere(path: Path) -> bool:
    """True if another process has the database open. This process must have no connection to it."""
    try:
        descriptor = open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return _is_locked(descriptor)
    finally:
        os.close(descriptor)


def _close_unused() -> None:
    for key, lock in list(_shared.items()):
        if lock.unused():
            del _shared[key]
            lock.close()


def _lock(descriptor: int, kind: int, where: tuple[int, int]) -> bool:
    """Set or clear a lock on a range of bytes. True unless another process holds a conflicting lock."""
    if _SET is None:
        return True
    try:
        fcntl.fcntl(descriptor, _SET, _FLOCK.pack(kind, os.SEEK_SET, *where, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        log.warning("the system gives no lock that survives another read of the file: %s", error)
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


# ---------------------------------------------------------------------- a worker's locked file


WORKER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def workers_folder(database: Path) -> Path:
    return Path(f"{database}-workers")


class FileLease:
    """The locked file of a living worker: `<store>-workers/<id>`."""

    def __init__(self, database: Path, worker_id: str) -> None:
        self._database, self._id, self.process = database, worker_id, os_process.name()
        self._folder = workers_folder(database)
        self._descriptor: int | None = None

    async def hold(self) -> None:
        if not _is_ours(self._id):
            raise InternalError(f"worker id {self._id!r} is no name for a file")
        access = access_of(self._database)
        try:
            make_folder(self._folder, access)
            self._descriptor = open_lock(self._folder / self._id, access)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            await self.drop()
            raise StoreUnavailable(f"cannot lock a file in {self._folder}: {error.strerror}") from None

    async def drop(self) -> None:
        """Release the lock, so that others see this worker as gone, and remove its file if possible."""
        if self._descriptor is not None and close_lock(self._descriptor):
            with contextlib.suppress(OSError):
                (self._folder / self._id).unlink()
        self._descriptor = None


def is_freed(database: Path, worker: WorkerRow) -> bool:
    """True if a worker's lock is free, which proves the worker dead. False too if the file cannot be opened or locked,
    for lack of a descriptor or of permission."""
    if not _is_ours(worker.id):
        return True
    folder = workers_folder(database)
    path = folder / worker.id
    try:
        check_folder(folder)
        descriptor = open_file(path, os.O_RDWR)
    except FileNotFoundError:
        _remove_socket(folder, worker)
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        with contextlib.suppress(OSError):  # where it may not be removed it is proof all the same
            path.unlink()  # ids are used once: no process will lock it again
        _remove_socket(folder, worker)
        return True
    finally:
        os.close(descriptor)


def _remove_socket(folder: Path, dead: WorkerRow) -> None:
    if dead.offers is not None and dead.offers.socket:
        sockets.remove_left(folder, dead.id, dead.offers.socket)


def _is_ours(worker_id: object) -> bool:
    return isinstance(worker_id, str) and WORKER_ID.fullmatch(worker_id) is not None


# ---------------------------------------------------------------------- forks


def _in_child() -> None:
    global _guard
    while _own:
        descriptor = _own.pop()
        _inherited[_identity(descriptor)] = os.getppid()
        os.close(descriptor)
    _guard = threading.Lock()  # another thread of the parent may have held it
    while _shared:
        _shared.popitem()[1].abandon()


os.register_at_fork(after_in_child=_in_child)
