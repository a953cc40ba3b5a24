"""Connections to a SQLite file: how one is made, brought to the current schema, checked, and what its errors mean."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sqlite3
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

from mainstay.errors import InvalidInput, MainstayError, NotAStore, StoreDamaged, StoreTooNew, StoreUnavailable
from mainstay.model.ids import MAX_ORDINAL, MAX_TURN
from mainstay.stores.files import LINK, open_file
from mainstay.stores.os_process import OUT_OF_MEMORY, new_store_id
from mainstay.stores.sqlite import schema
from mainstay.stores.sqlite.records import NODES, bad_nodes, bad_rows, node_crc, node_place, node_position
from mainstay.stores.sqlite.shared_lock import SharedLock, join

PAGE_SIZE = 1024

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
        _connections.discard(self)
        lock, self.lock = self.lock, None
        if lock is not None:
            with lock.leaving():
                super().close()


_connections: set[sqlite3.Connection] = set()


def _in_child() -> None:
    """Keep the parent's connections from the collector and from the end of the interpreter."""
    import ctypes  # noqa: PLC0415  # slow to import, and needed in forked children only

    for connection in _connections:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


os.register_at_fork(after_in_child=_in_child)


def connect(path: Path) -> Connection:
    """A connection as all of ours are: what it commits is synced, and it never checkpoints by itself."""
    with reading(path):
        check_beside(path)
        connection = sqlite3.connect(
            path, timeout=10, isolation_level=None, check_same_thread=False, cached_statements=256, factory=Connection
        )
        _connections.add(connection)
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


def _is_small(path: Path) -> bool:
    """A whole check of a large file takes seconds at every start; `mainstay doctor --deep` does it on request."""
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


def mapped(path: Path, error: sqlite3.Error | UnicodeDecodeError | OSError | MemoryError) -> MainstayError:
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
