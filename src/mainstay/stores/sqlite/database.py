"""The database file as the writer thread uses it: the writing connection, its transactions, and the lock file."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from mainstay.errors import InternalError, InvalidInput, MainstayError, StoreDamaged, StoreUnavailable
from mainstay.model.write import Delete, Prune, Write
from mainstay.stores import rules
from mainstay.stores.blobs import FileBlobs
from mainstay.stores.files import access_of, identity, make_parents
from mainstay.stores.rules.rows import Transaction, run
from mainstay.stores.sqlite.backup import COPY, ID, WITHOUT_LOCK, has_rows, held_because
from mainstay.stores.sqlite.compaction import give_back
from mainstay.stores.sqlite.connection import (
    Connection,
    connect,
    is_referred_to,
    mapped,
    marks,
    migrate,
    put_mark,
    reading,
)
from mainstay.stores.sqlite.lockfile import LockFile, Noted
from mainstay.stores.sqlite.rows import SqlRows

log = logging.getLogger("mainstay.store")

CHECKPOINT_WRITES = 2048
"""Fold the WAL back after so many writes: some megabytes. Its file keeps its size, so size says nothing."""


class Sweep(Write[int], frozen=True):
    """Delete those of `digests` that nothing refers to and that were last put before then, in nanoseconds."""

    digests: tuple[str, ...]
    before: int


class WriterFile:
    """The writing connection and the lock file. Born on a thread, then used by the writer's only."""

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
        # What must not be moved, removed or replaced while it is open.
        self._wal = f"{path}-wal"
        # The index of the WAL (`-shm`) counts as well: two processes with one each write over each other's frames.
        self._places = [(name, identity(name)) for name in (str(path), self._wal, f"{path}-shm")]
        self._lock.free()
        self._folded = self._freed = False
        self._doomed: dict[str, int] = {}
        self._rows = SqlRows(self._connection, self._has_blob)
        self._transaction = Transaction(self._rows)

    def _open(self) -> Connection:
        """Bring the file to the current schema, or refuse it whole."""
        connection = None
        try:
            with reading(self._path):
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

    def _check_tail(self, connection: sqlite3.Connection) -> None:
        """Refuse a database that lacks what was acknowledged last."""
        noted = self._lock.noted()
        self._tip = connection.execute("SELECT count FROM tip").fetchone()[0]
        whole = self._tip >= noted.tip
        if noted.place:
            found = connection.execute("SELECT crc FROM nodes WHERE place = ?", (noted.place,)).fetchone()
            whole = whole and found is not None and found[0] == noted.crc
        if not whole:
            raise StoreDamaged(
                str(self._path),
                "acknowledged transactions are missing: its WAL was cut or removed, or it is an old copy; "
                f"to go on with an old copy on purpose: `mainstay restore {self._path}`",
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
        self._lock.note_first(Noted(0, self._tip))

    def _read_marks(self, connection: sqlite3.Connection) -> None:
        """What the store knows of itself: its secret, its id, and why nothing in it may be worked on, if so."""
        found = marks(connection, self._path)
        if "secret" not in found or ID not in found:
            raise StoreDamaged(str(self._path), "it lacks its own marks")
        self.secret, self.store_id = found["secret"], found[ID].decode()
        self.held = held_because(self._path, found[COPY]) if COPY in found else None

    def others(self) -> int:
        """How many transactions other processes have made: it moves when one of them writes."""
        noted = self._lock.noted().writes
        others, last = self._counted
        return others + max(0, noted - last)

    # ------------------------------------------------------------------ the writer's backend

    def begin(self) -> None:
        self._lock.hold()
        if (gone := self._displaced()) is not None:
            self._fold(gone)
            raise self._refusal(gone)
        self._doomed.clear()
        if self._connection.lock is None:  # it was closed by a rollback
            self._connection = connect(self._path)
            self._rows = SqlRows(self._connection, self._has_blob)
            self._transaction = Transaction(self._rows)
        self._transaction.begin()
        self._connection.execute("BEGIN IMMEDIATE")
        if self._rows.begin():
            self._read_marks(self._connection)  # it may have been restored meanwhile

    def apply(self, write: Write[Any]) -> Any:
        self._unfolded += 1
        self._freed = self._freed or isinstance(write, Delete | Prune)
        if isinstance(write, Sweep):
            return self._sweep(write)
        receipt = run(rules.apply(self._transaction, write, self.held is not None))
        self._rows.make(self._transaction.take_changes())
        return receipt

    def applied(self, write: Write[Any]) -> Any | None:
        held = self.held is not None
        return None if isinstance(write, Sweep) else run(rules.applied(self._transaction, write, held))

    def commit(self) -> None:
        if self._rows.last is None or self._rows.last == (0, 0):
            self._tip = self._connection.execute("UPDATE tip SET count = count + 1 RETURNING count").fetchone()[0]
        if self._rows.rewrote:
            # Killed before the new note, a store whose noted record is gone or another one would be refused.
            noted = self._lock.noted()
            self._lock.note(Noted(noted.writes, noted.tip, 0, 0))
        self._connection.execute("COMMIT")
        if (gone := self._displaced()) is not None and not self._fold(gone):
            raise self._refusal(gone)
        # Under the lock still: whoever refers to one of these later finds it gone.
        while self._doomed:
            self._blobs.remove(*self._doomed.popitem())
        before = self._lock.noted()
        # Before it is noted: counted a moment late, our own would pass for somebody else's.
        others, last = self._counted
        self._counted = (others + max(0, before.writes - last), before.writes + 1)
        place, crc = self._rows.last or (before.place, before.crc)
        self._lock.note(Noted(before.writes + 1, max(self._tip, before.tip), place, crc))
        self._lock.free()

    def _displaced(self) -> str | None:
        """The file that is not under its name any more, of those that an acknowledged transaction must be found by."""
        for name, known in self._places:
            if identity(name) != known:
                return name
        return None if self._lock.in_place() else str(self._lock.path)

    def _fold(self, gone: str) -> bool:
        """Fold a WAL that has lost its name into the database, whole and synced: then nothing of it can be lost.

        Once only: the shared memory says now that the WAL is empty, and others may fill one of that name.
        """
        if gone != self._wal or self._folded:
            return False
        try:
            self._folded = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        except sqlite3.Error as error:
            log.error("%s is not under its name any more, and cannot be folded into %s: %s", gone, self._path, error)
        return self._folded

    def _refusal(self, gone: str) -> MainstayError:
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
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            # A connection that cannot roll back is not used again: closing it discards its transaction.
            log.error("rollback failed, reopening %s: %s", self._path, error)
            self._connection.close()
        finally:
            self._lock.free()

    def mapped(self, error: Exception) -> MainstayError:
        if isinstance(error, sqlite3.Error | UnicodeDecodeError | OSError | MemoryError):
            return mapped(self._path, error)
        if isinstance(error, OverflowError):
            return InvalidInput(str(error))
        log.error("a write failed", exc_info=error)
        return InternalError(f"{type(error).__name__} while writing: {error}")

    def tired(self) -> bool:
        return self._unfolded >= CHECKPOINT_WRITES or self._freed

    def rest(self) -> None:
        """Nothing waits: give back pages that are free, or fold the WAL, which has grown, back into the file."""
        if self._freed:
            self._freed = self._give_back()
        if not self._freed:
            self._unfolded = 0
            self.checkpoint("PASSIVE")

    def _give_back(self) -> bool:
        """One step of giving free pages back; whether there are more. Nothing that was acknowledged depends on it."""
        try:
            self._lock.hold()
            return self._displaced() is None and give_back(self._connection)
        except (sqlite3.Error, StoreUnavailable) as error:
            log.warning("free pages of %s are not given back, it is tried again later: %s", self._path, error)
            return False
        finally:
            self._lock.free()

    def checkpoint(self, mode: str) -> None:
        try:
            self._lock.hold()
            fold(self._connection, self._lock, mode)
        except (sqlite3.Error, StoreUnavailable) as error:
            log.warning("checkpoint of %s failed, it is tried again later: %s", self._path, error)
        finally:
            self._lock.free()

    def _sweep(self, write: Sweep) -> int:
        """Judge orphans inside the transaction, where nobody can add a reference meanwhile; they go when it is through.

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
            with contextlib.suppress(StoreUnavailable):  # whoever holds it has the file open: we fold nothing back
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
