"""The database file: its connections, what it says of itself, and the one connection that writes.

SQLite keeps the pages of deleted rows in the file and uses them again; the file itself never shrinks by that. New
stores are made so that single pages can be moved from its end (`auto_vacuum=INCREMENTAL`, `connect`), which the writer
does in small steps when it has nothing else to do. An older file must be written anew for that, once
(`maintenance.compact`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import sqlite3
import time
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from perdure.errors import (
    InternalError,
    InvalidInput,
    NotAStore,
    PerdureError,
    StoreDamaged,
    StoreEmptied,
    StoreTooNew,
    StoreUnavailable,
)
from perdure.model.ids import MAX_ORDINAL, MAX_TURN
from perdure.model.write import Delete, Prune, Write
from perdure.stores import rules
from perdure.stores.blobs import FileBlobs
from perdure.stores.files import LINK, access_of, identity, make_parents, open_file
from perdure.stores.os_process import OUT_OF_MEMORY, new_store_id
from perdure.stores.rules.rows import Transaction, run
from perdure.stores.sqlite import schema
from perdure.stores.sqlite.locks import LockFile, LockNote, SharedLock, join
from perdure.stores.sqlite.records import NODES, bad_nodes, bad_rows, node_crc, node_place, node_position
from perdure.stores.sqlite.rows import SqlRows
from perdure.stores.sqlite.search import MARK, WHOLE, WordIndex

log = logging.getLogger("perdure.store")

PAGE_SIZE = 1024
BUSY_TIMEOUT = 10
"""Seconds for which a connection waits for the transaction of another program."""

OURS = ("tip", "nodes")
"""Tables that every store of ours has had from its first transaction on."""

DAMAGE = ("malformed", "no such ", "Could not decode", "unsupported file format")
"""Damage for which SQLite or its driver has no code of its own."""

SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""How a rollback journal ends that names another one; no transaction of ours spans two databases."""

HINTS = {
    "SQLITE_FULL": "the disk is full: free space and try again",
    "SQLITE_READONLY": "the file or its folder is read-only: make it writable",
    "SQLITE_BUSY": "another program holds a write lock on the file: let it finish its transaction",
    "SQLITE_LOCKED": "another program holds a write lock on the file: let it finish its transaction",
    "SQLITE_CANTOPEN": "the file cannot be opened: check that its folder exists and is writable",
    "SQLITE_IOERR": "the disk reported an error: check it, then try again",
}

ID, COPY = "id", "copy"
BACKUP, WITHOUT_LOCK = b"backup", b"without lock"
"""What a mark is called, and where the copy that bears it came from."""

TICK, COARSE_TICK = 100_000_000, 5_000_000_000
"""Nanoseconds, longer than a tick of the clock for files; on a file system that keeps whole seconds, the second."""
CHECKPOINT_WRITES = 2048
"""Fold the WAL back after so many writes: some megabytes. Its file keeps its size, so size says nothing."""
SPARE_PAGES = 256
"""Free pages that stay in the file: the next rows want them."""
FREED_AT_ONCE = 512
"""Pages given back in one transaction: all other writes wait for it."""


class Connection(sqlite3.Connection):
    """One of those for which this process holds the shared lock of its file.

    A forked child never closes it: it would roll back a transaction that is its parent's.
    """

    def __init__(self, path: Path, *args: Any, **options: Any) -> None:
        self.lock: SharedLock | None = join(path)
        try:
            super().__init__(path, *args, **options)
        except BaseException:  # whatever it was, a connection that is none must not be counted
            with self.lock.leaving():
                raise

    def close(self) -> None:
        _open_connections.discard(self)
        lock, self.lock = self.lock, None
        if lock is not None:
            with lock.leaving():
                super().close()


_open_connections: set[sqlite3.Connection] = set()


def _in_child() -> None:
    """Keep the parent's connections from the collector and from the end of the interpreter."""
    import ctypes  # noqa: PLC0415  # slow to import, and needed in forked children only

    for connection in _open_connections:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


os.register_at_fork(after_in_child=_in_child)


def connect(path: Path) -> Connection:
    """A connection as all of ours are: what it commits is synced, and it never checkpoints by itself."""
    with reading(path):
        check_beside(path)
        connection = sqlite3.connect(
            path,
            timeout=BUSY_TIMEOUT,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            factory=Connection,
        )
        _open_connections.add(connection)
        try:
            # A schema that was made by a stranger may call no function that has an effect.
            connection.execute("PRAGMA trusted_schema = 0")
            check_ours(connection, path)
            connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file, or one that is written anew
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.execute("PRAGMA cache_size = -8192")
            assert connection.lock is not None
            connection.lock.hold()
        except BaseException:  # whatever it was, the connection must not stay behind
            connection.close()
            raise
    return connection


def check_beside(path: Path) -> None:
    """Refuse links in the place of the files that SQLite writes, truncates and deletes beside a database, and a journal
    that names a file elsewhere: SQLite would delete that one."""
    wal, memory, journal = (Path(f"{path}{suffix}") for suffix in ("-wal", "-shm", "-journal"))
    for beside in (wal, memory, journal):
        if beside.is_symlink():
            raise OSError(errno.ELOOP, LINK, str(beside))
    try:
        descriptor = open_file(journal, os.O_RDONLY)
    except FileNotFoundError:
        return
    with open(descriptor, "rb") as file:
        file.seek(-min(len(SUPER_JOURNAL), os.fstat(descriptor).st_size), os.SEEK_END)
        if file.read() == SUPER_JOURNAL:
            raise StoreDamaged(str(path), "its journal belongs to a transaction over several databases: it is not ours")


def check_ours(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse the database of another program before anything of it is changed, and be it the mode of its journal."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if tables and not tables.issuperset(OURS):
        raise NotAStore(str(path))


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a file to the current schema, or refuse it whole."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > schema.VERSION:
        raise StoreTooNew(str(path), version, schema.VERSION)
    foreign = version == 0 and connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if foreign:
        raise NotAStore(str(path))
    if version == schema.VERSION:
        if _is_small(path):
            problems = [str(r[0]) for r in connection.execute("PRAGMA integrity_check(1)")]
            problems += bad_nodes(connection) + bad_rows(connection)
            if problems != ["ok"]:
                raise StoreDamaged(str(path), "; ".join(problems))
        return
    connection.execute("BEGIN IMMEDIATE")
    for number in range(version + 1, schema.VERSION + 1):
        for statement in schema.MIGRATIONS[number]:
            connection.execute(statement)
    if version == 0:
        put_mark(connection, "secret", secrets.token_bytes(32))
    if version < 4:
        put_mark(connection, "id", new_store_id().encode())
    connection.execute(f"PRAGMA user_version = {schema.VERSION}")
    connection.execute("COMMIT")


def _is_small(path: Path) -> bool:
    """A whole check of a large file takes seconds at every start; `perdure doctor --deep` does it on request."""
    return path.stat().st_size <= 16 * 1024 * 1024


def read_nodes(
    path: Path, connection: sqlite3.Connection, sid: int, first: int, last: int
) -> list[tuple[int, int, bytes]]:
    with reading(path):
        span = (node_place(sid, first, 0), node_place(sid, min(last, MAX_TURN), MAX_ORDINAL))
        rows = connection.execute(NODES, span).fetchall()
    turns, ordinals = MAX_TURN, MAX_ORDINAL
    for place, crc, body in rows:
        if node_crc(place, body) != crc:
            _, turn, ordinal = node_position(place)
            raise StoreDamaged(str(path), f"record {ordinal} of turn {turn} does not match its checksum")
    return [((place >> 16) & turns, place & ordinals, body) for place, _, body in rows]


def is_referred_to(connection: sqlite3.Connection, digest: str) -> bool:
    return connection.execute("SELECT 1 FROM blobs WHERE digest = ? LIMIT 1", (digest,)).fetchone() is not None


@contextlib.contextmanager
def reading(path: Path) -> Generator[None, None, None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, OSError, MemoryError) as error:
        raise mapped(path, error) from error
    except (UnicodeEncodeError, OverflowError) as error:  # what was asked for is in no store
        raise InvalidInput(f"no store can hold what is asked for ({error}): correct it") from None


def mapped(path: Path, error: sqlite3.Error | UnicodeDecodeError | OSError | MemoryError) -> PerdureError:
    """A driver's error as one of ours, with what to do about it. Text that is none comes from a damaged page."""
    if isinstance(error, MemoryError):
        return StoreUnavailable(OUT_OF_MEMORY)
    if isinstance(error, OSError):
        return StoreUnavailable(f"cannot use {error.filename or path}: {error.strerror or error}")
    name = getattr(error, "sqlite_errorname", "") or ""
    if (
        isinstance(error, UnicodeDecodeError)
        or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
        or any(sign in str(error) for sign in DAMAGE)
    ):
        return StoreDamaged(str(path), str(error))
    for prefix, hint in HINTS.items():
        if name.startswith(prefix):
            return StoreUnavailable(f"{path}: {hint} ({error})")
    return StoreUnavailable(f"{path}: {error}")


# ---------------------------------------------------------------------- what a store knows of itself


def put_mark(connection: sqlite3.Connection, key: str, value: bytes) -> None:
    """Write something that the store is to know of itself, with its checksum."""
    marks = ((key, value), (f"{key}_crc", mark_checksum(value)))
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", marks)


def marks(connection: sqlite3.Connection, path: Path) -> dict[str, bytes]:
    """What the store knows of itself, by name; refused when it is not what was written."""
    found = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    for key in {key.removesuffix("_crc") for key in found}:
        value = found.get(key)
        if type(value) is not bytes or found.pop(f"{key}_crc", None) != mark_checksum(value):
            raise StoreDamaged(str(path), f"its {key} does not match its checksum")
    return found


def mark_checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def has_rows(connection: sqlite3.Connection) -> bool:
    """Whether a database holds anything that could be worked on."""
    query = "SELECT EXISTS (SELECT 1 FROM sessions) OR EXISTS (SELECT 1 FROM processes)"
    return bool(connection.execute(query).fetchone()[0])


def held_because(path: Path, copy: bytes) -> str:
    """Why nothing in a marked store is worked on, and what to do about it."""
    what = "is a backup" if copy == BACKUP else f"was found without {path.name}-lock, as a copy is"
    return (
        f"{path} {what}: it accepts everything and works on nothing, because its original may still be at work; "
        f"`perdure restore {path}` gives it an id of its own and lets it go on"
    )


# ---------------------------------------------------------------------- the writer


class Sweep(Write[int], frozen=True):
    """Delete those of `digests` that nothing refers to and that were last put before then, in nanoseconds."""

    digests: tuple[str, ...]
    before: int


class KeepIndex(Write[None], frozen=True):
    """Keep an index of words from now on, or drop it."""

    keep: bool


class IndexMore(Write[bool], frozen=True):
    """Take some records into the index that are older than it; whether there are more."""


class OpenFiles:
    """The files that an acknowledged transaction must be found by, and whether their names still lead to them.

    Looked at before and after each transaction, so it matters what that costs. All of them are in one folder, and a
    folder's time of change moves with every name in it. While the folder is as it was when all files were last found in
    place, they still are. Its time is only believed when it lies back far enough: the system's clock for files has
    ticks, and a second change in one tick would not show.
    """

    def __init__(self, *names: str, lock: LockFile) -> None:
        self._known = [*((name, identity(name)) for name in names), (str(lock.path), lock.identity)]
        self._folder = os.path.dirname(names[0])
        self._seen: tuple[int, int, int] | None = None

    def displaced(self) -> str | None:
        """A file that is not under its name any more."""
        if self._seen is not None and self._folder_state() == self._seen:
            return None
        # In this order: whatever changes after the folder was looked at changes later than `now`, in another tick.
        now, folder = time.time_ns(), self._folder_state()
        self._seen = None
        for name, known in self._known:
            if identity(name) != known:
                return name
        if folder is not None and now - folder[2] > (TICK if folder[2] % 10**9 else COARSE_TICK):
            self._seen = folder
        return None

    def _folder_state(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._folder)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_ctime_ns


class WriterFile:
    """The writing connection and the lock file. Used by one thread at a time (`GroupWriter`)."""

    def __init__(self, path: Path, blobs: FileBlobs) -> None:
        self._path, self._blobs = path, blobs
        try:
            make_parents(path.parent)
        except OSError as error:
            raise StoreUnavailable(f"cannot make the folder {path.parent}: {error.strerror}") from None
        self._lock = LockFile(Path(f"{path}-lock"), access_of(path))
        # Transactions of others, and of anybody, as of our last one. One tuple: the event loop reads it while we write.
        self._counted = (0, 0)
        self._tip = 0
        self._unfolded = 0
        try:
            self._lock.hold()
            self._connection = self._open()
        except BaseException:  # whatever it was, the lock must not stay behind
            self._lock.close()
            raise
        self._wal = f"{path}-wal"
        # The index of the WAL (`-shm`) counts as well: two processes with one each write over each other's frames.
        self._files = OpenFiles(str(path), self._wal, f"{path}-shm", lock=self._lock)
        self._lock.free()
        self._folded = self._freed = False
        self._busy_timeout: float = BUSY_TIMEOUT
        self._doomed: dict[str, int] = {}
        self._marks_known = True
        self._unmerged: bool | None = None  # of the index: None when there is nothing to merge, True to begin
        self._rows = self._new_rows()
        self._transaction = Transaction(self._rows)

    def _new_rows(self) -> SqlRows:
        rows = SqlRows(self._connection, self._has_blob)
        rows.index = self._new_index() if self._searched else None
        return rows

    def _new_index(self) -> WordIndex:
        return WordIndex(self._connection, self._blobs.read)

    def _open(self) -> Connection:
        """Bring the file to the current schema, or refuse it whole."""
        connection = None
        try:
            with reading(self._path):
                if self._notes_work() and (not self._path.exists() or not self._path.stat().st_size):
                    raise StoreEmptied(str(self._path))  # before SQLite makes a database there
                connection = connect(self._path)
                migrate(connection, self._path)
                self._check_tail(connection)
                self._recognise(connection)
                self._read_marks(connection)
        except BaseException as error:  # whatever it was, the connection must not stay behind
            if connection is not None:
                connection.close()
            if isinstance(error, TypeError):  # a row that every store has is missing, or is not what it was
                raise StoreDamaged(str(self._path), "it lacks its own marks") from error
            raise
        return connection

    def _notes_work(self) -> bool:
        """True if the lock file notes a transaction that its database must have."""
        noted = self._lock.noted()
        return bool(noted.tip or noted.place)

    def _check_tail(self, connection: sqlite3.Connection) -> None:
        """Refuse a database that lacks what was acknowledged last."""
        noted = self._lock.noted()
        self._tip = connection.execute("SELECT count FROM tip").fetchone()[0]
        whole = self._tip >= noted.tip
        if noted.place:
            found = connection.execute("SELECT crc FROM nodes WHERE place = ?", (noted.place,)).fetchone()
            whole = whole and found is not None and found[0] == noted.crc
        if not whole:
            if not self._tip and connection.execute("SELECT 1 FROM nodes LIMIT 1").fetchone() is None:
                raise StoreEmptied(str(self._path))
            raise StoreDamaged(
                str(self._path),
                "acknowledged transactions are missing: its WAL was cut or removed, or it is an old copy; "
                f"to go on with an old copy on purpose: `perdure restore {self._path}`",
            )

    def _recognise(self, connection: sqlite3.Connection) -> None:
        """Mark a database that came here without its lock file: it is a copy of one that others may still work on.

        The mark first, then the note that says that the lock file belongs to it: killed in between, it is recognised
        again.
        """
        if not self._lock.blank:
            return
        if COPY not in marks(connection, self._path) and has_rows(connection):
            connection.execute("BEGIN IMMEDIATE")
            put_mark(connection, COPY, WITHOUT_LOCK)
            self._tip = connection.execute("UPDATE tip SET count = count + 1 RETURNING count").fetchone()[0]
            connection.execute("COMMIT")
        self._lock.note_first(LockNote(0, self._tip))

    def _read_marks(self, connection: sqlite3.Connection) -> None:
        """What the store knows of itself: its secret, its id, and why nothing in it may be worked on, if so."""
        found = marks(connection, self._path)
        if "secret" not in found or ID not in found:
            raise StoreDamaged(str(self._path), "it lacks its own marks")
        self.secret, self.store_id = found["secret"], found[ID].decode()
        self.held = held_because(self._path, found[COPY]) if COPY in found else None
        self._searched = MARK in found

    def others(self) -> int:
        """How many transactions other processes have made: it moves when one of them writes."""
        noted = self._lock.noted().writes
        others, last = self._counted
        return others + max(0, noted - last)

    # ------------------------------------------------------------------ the writer's backend

    def begin(self) -> None:
        self._lock.hold()
        if (gone := self._files.displaced()) is not None:
            self._fold(gone)
            raise self._refusal(gone)
        if self._connection.lock is None:  # it was closed by a rollback
            self._connection = connect(self._path)
            self._busy_timeout = BUSY_TIMEOUT
            self._rows = self._new_rows()
        self._begin(BUSY_TIMEOUT)

    def begin_nowait(self) -> bool:
        """Begin unless another process writes or there is something to put right, which may take long: then `begin`
        does it, and says what is wrong."""
        if self._connection.lock is None:
            return False
        try:
            if not self._lock.hold_nowait():
                return False
            if self._files.displaced() is None:
                self._begin(0)
                return True
        except Exception as error:  # of any kind: the writer thread tries again, and reports it
            log.debug("a transaction on %s could not begin at once: %s", self._path, error)
        self.rollback()
        return False

    def _begin(self, busy_timeout: float) -> None:
        """`busy_timeout`: seconds for which another program's transaction is waited for."""
        self._wait_for_others(busy_timeout)
        self._doomed.clear()
        self._transaction = Transaction(self._rows)
        self._connection.execute("BEGIN IMMEDIATE")
        if self._rows.begin() or not self._marks_known:
            # It may have been restored meanwhile, or be searched now.
            self._read_marks(self._connection)
            self._rows.index = self._new_index() if self._searched else None
            self._marks_known = True

    def _wait_for_others(self, seconds: float) -> None:
        if seconds != self._busy_timeout:
            self._connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")
            self._busy_timeout = seconds

    def apply(self, write: Write[Any]) -> Any:
        self._unfolded += 1
        self._freed = self._freed or isinstance(write, Delete | Prune)
        if self._searched and isinstance(write, Delete):
            self._unmerged = True
        match write:
            case Sweep():
                return self._sweep(write)
            case KeepIndex():
                return self._keep_index(write.keep)
            case IndexMore():
                return self._index_more()
            case _:
                pass
        receipt = run(rules.apply(self._transaction, write, self.held is not None))
        # At once, not at the end of the batch: what cannot be stored is then the fault of this write.
        self._rows.make(self._transaction.changes)
        self._transaction.changes.clear()
        return receipt

    def applied(self, write: Write[Any]) -> Any | None:
        held = self.held is not None
        if isinstance(write, Sweep | KeepIndex | IndexMore):
            return None
        return run(rules.applied(self._transaction, write, held))

    def commit(self) -> None:
        if self._rows.last is None or self._rows.last == (0, 0):
            self._tip = self._connection.execute("UPDATE tip SET count = count + 1 RETURNING count").fetchone()[0]
        if self._rows.rewrote:
            # Killed before the new note, a store whose noted record is gone or another one would be refused.
            noted = self._lock.noted()
            self._lock.note(LockNote(noted.writes, noted.tip, 0, 0))
        self._connection.execute("COMMIT")
        if (gone := self._files.displaced()) is not None and not self._fold(gone):
            raise self._refusal(gone)
        # Under the lock still: a write that refers to one of these later finds it gone.
        while self._doomed:
            self._blobs.remove(*self._doomed.popitem())
        before = self._lock.noted()
        # Before it is noted: counted a moment late, our own would pass for one of another process.
        others, last = self._counted
        self._counted = (others + max(0, before.writes - last), before.writes + 1)
        place, crc = self._rows.last or (before.place, before.crc)
        self._lock.note(LockNote(before.writes + 1, max(self._tip, before.tip), place, crc))
        self._lock.free()

    def _fold(self, gone: str) -> bool:
        """Fold a WAL that has lost its name into the database, whole and synced: then nothing of it can be lost.

        Once only: the shared memory says now that the WAL is empty, and others may fill one of that name.
        """
        if gone != self._wal or self._folded:
            return False
        try:
            self._wait_for_others(BUSY_TIMEOUT)
            self._folded = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        except sqlite3.Error as error:
            log.error("%s is not under its name any more, and cannot be folded into %s: %s", gone, self._path, error)
        return self._folded

    def _refusal(self, gone: str) -> PerdureError:
        advice = "put it back, or restart"
        if gone == self._wal:
            advice = "restart; nothing that was acknowledged is lost" if self._folded else "restart"
        why = "was moved, removed or replaced while it was open: what is written now would be lost"
        try:
            os.stat(gone)
        except PermissionError as error:
            return mapped(self._path, error)
        except OSError:
            pass
        return StoreUnavailable(f"{gone} {why}; {advice}")

    def rollback(self) -> None:
        self._rows.forget()
        self._marks_known = False
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            # A connection that cannot roll back is not used again: closing it discards its transaction.
            log.error("rollback failed, reopening %s: %s", self._path, error)
            self._connection.close()
        finally:
            self._lock.free()

    def mapped(self, error: Exception) -> PerdureError:
        if isinstance(error, sqlite3.Error | UnicodeDecodeError | OSError | MemoryError):
            return mapped(self._path, error)
        if isinstance(error, OverflowError):
            return InvalidInput(str(error))
        log.error("a write failed", exc_info=error)
        return InternalError(f"{type(error).__name__} while writing: {error}")

    def maintenance_due(self) -> bool:
        return self._unfolded >= CHECKPOINT_WRITES or self._freed

    def maintain(self) -> None:
        """Nothing waits: give back pages that are free, or fold the WAL, which has grown, back into the file."""
        self._wait_for_others(BUSY_TIMEOUT)
        if self._unmerged is not None:
            self._unmerged = False if self._step_of_maintenance(self._merge) else None
        elif self._freed:
            self._freed = self._step_of_maintenance(self._give_back)
        if self._unmerged is None and not self._freed:
            self._unfolded = 0
            self.checkpoint("PASSIVE")

    def _step_of_maintenance(self, step: Callable[[], bool]) -> bool:
        """One step of work that nothing acknowledged depends on; whether there is more of it."""
        try:
            self._lock.hold()
            return self._files.displaced() is None and step()
        except (sqlite3.Error, StoreUnavailable) as error:
            log.warning("free space of %s is not given back, it is tried again later: %s", self._path, error)
            return False
        finally:
            self._lock.free()

    def _give_back(self) -> bool:
        return give_back(self._connection)

    def _merge(self) -> bool:
        if MARK not in marks(self._connection, self._path):
            return False
        return self._new_index().merge(begin=self._unmerged is True)

    def checkpoint(self, mode: str) -> None:
        try:
            self._lock.hold()
            fold(self._connection, self._lock, mode)
        except (sqlite3.Error, StoreUnavailable) as error:
            log.warning("checkpoint of %s failed, it is tried again later: %s", self._path, error)
        finally:
            self._lock.free()

    def _keep_index(self, keep: bool) -> None:
        if keep == self._searched:
            return
        index = self._new_index()
        if keep:
            index.create()
            older = self._connection.execute("SELECT EXISTS (SELECT 1 FROM nodes)").fetchone()[0]
            put_mark(self._connection, MARK, b"0" if older else WHOLE)
        else:
            index.drop()
            self._connection.execute("DELETE FROM meta WHERE key IN (?, ?)", (MARK, f"{MARK}_crc"))
            self._freed = True
        self._searched = keep
        self._rows.index = index if keep else None

    def _index_more(self) -> bool:
        mark = marks(self._connection, self._path).get(MARK, WHOLE)
        if mark == WHOLE or self._rows.index is None:
            return False
        last = self._rows.index.take_in(int(mark))
        put_mark(self._connection, MARK, WHOLE if last is None else str(last).encode())
        return last is not None

    def _sweep(self, write: Sweep) -> int:
        """Judge orphans inside the transaction, where no write can add a reference; they go when it is through.

        Deleted at once, a blob would be missing if a rollback brought its last reference back.
        """
        found = [d for d in write.digests if self._has_blob(d) and self._blobs.is_old(d, write.before)]
        orphans = [d for d in found if not is_referred_to(self._connection, d)]
        self._doomed |= dict.fromkeys(orphans, write.before)
        return len(orphans)

    def _has_blob(self, digest: str) -> bool:
        return digest not in self._doomed and self._blobs.has(digest)

    def close(self) -> None:
        try:
            with contextlib.suppress(StoreUnavailable):  # a process that holds it has the file open: no checkpoint here
                self._lock.hold()
            self._connection.close()
        finally:
            self._lock.close()


def fold(connection: sqlite3.Connection, lock: LockFile, mode: str) -> None:
    """Fold the WAL back into the file, under the lock. A connection that reads an older state keeps what was written
    since from being folded: then the WAL grows, and how long it has done so is noted."""
    busy, frames, folded = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    whole = busy == 0 and frames == folded
    lock.note_unfolded(0 if whole else lock.unfolded_since() or time.time_ns() // 1_000_000)


def give_back(connection: sqlite3.Connection) -> bool:
    """Give back some free pages; whether there are more. A file that was not made for it keeps them all."""
    if _free_pages(connection) <= SPARE_PAGES or not _is_incremental(connection):
        return False
    connection.execute(f"PRAGMA incremental_vacuum({FREED_AT_ONCE})").fetchall()
    return _free_pages(connection) > SPARE_PAGES


def _free_pages(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


def _is_incremental(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("PRAGMA auto_vacuum").fetchone()[0] == 2)
