"""Giving free pages back: in small steps while a store is used, or all of them at once while nobody has it open.

SQLite keeps the pages of deleted rows in the file and uses them again; the file itself never shrinks by that. New
stores are made so that single pages can be moved from its end (`auto_vacuum=INCREMENTAL`, `connection.connect`),
which the writer does in small steps when it has nothing else to do. An older file must be written anew for that,
once: `compact`. It is one transaction of SQLite's, so that a process killed in it leaves the file as it was.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from mainstay.errors import InvalidInput
from mainstay.ports.store import Tell
from mainstay.stores.files import access_of
from mainstay.stores.sqlite.backup import refuse_if_open
from mainstay.stores.sqlite.connection import connect, migrate, reading
from mainstay.stores.sqlite.lockfile import LockFile

SPARE_PAGES = 256
"""Free pages that stay in the file: the next rows want them."""
PAGES_AT_ONCE = 512
"""Pages given back in one transaction: all other writes wait for it."""
STEPS_BETWEEN_LOOKS: int = 100_000
"""Steps of SQLite's machine between two looks at whether the caller still waits."""


def give_back(connection: sqlite3.Connection) -> bool:
    """Give back some free pages; whether there are more. A file that was not made for it keeps them all."""
    if _free_pages(connection) <= SPARE_PAGES or not _is_incremental(connection):
        return False
    connection.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()
    return _free_pages(connection) > SPARE_PAGES


def compact(path: Path, tell: Tell, steps: int = STEPS_BETWEEN_LOOKS) -> tuple[int, int]:
    """Write a database anew without free pages, so that it gives them back by itself from then on. Returns its size in
    bytes before and after. Refused while a Runtime has it open."""
    if not path.exists():
        raise InvalidInput(f"there is no store at {path}")
    lock = LockFile(Path(f"{path}-lock"), access_of(path))
    try:
        lock.hold()
        refuse_if_open(path)
        with contextlib.closing(connect(path)) as connection, reading(path):
            migrate(connection, path)
            before = _size(connection)
            connection.set_progress_handler(lambda: tell(0, before), steps)
            connection.execute("VACUUM")
            connection.set_progress_handler(None, 0)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            after = _size(connection)
            tell(after, after)
            return before, after
    finally:
        lock.close()


def _free_pages(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


def _is_incremental(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("PRAGMA auto_vacuum").fetchone()[0] == 2)


def _size(connection: sqlite3.Connection) -> int:
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return int(pages * size)
