"""The SQLite store: one file, one writer thread, readers beside it.

    agent.db            the database, in WAL mode with synchronous=FULL: what is acknowledged has been synced
    agent.db-lock       held by whoever writes or checkpoints; it says what was last acknowledged
    agent.db-workers/   one locked file for each live Runtime: the kernel frees the lock when its process dies
    agent.db-blobs/     what is too large for a row

SQLite before 3.51.3 can corrupt a WAL when two connections write and checkpoint at once. Every transaction and
checkpoint of ours, from any process, therefore runs under the lock, and no connection of ours checkpoints by itself. A
database that lacks what the lock file says was acknowledged has lost its tail and is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

from mainstay.errors import (
    InternalError,
    InvalidInput,
    MainstayError,
    StoreDamaged,
    StoreInherited,
    StoreUnavailable,
)
from mainstay.model.process_write import Prune
from mainstay.model.session import Deaths, InboxRow, SessionRow, WaitRow, WorkerRow
from mainstay.model.write import Delete, SessionFilter, StoreFacts, Write
from mainstay.ports.store import SWEEP_GRACE, Tell
from mainstay.stores import compaction, copies, forks, rules, schema, sql
from mainstay.stores.aside import NO_THREAD, aside
from mainstay.stores.blobs import FileBlobs
from mainstay.stores.compaction import give_back
from mainstay.stores.connection import (
    Connection,
    bad_nodes,
    connect,
    is_referred_to,
    mapped,
    marks,
    migrate,
    put_mark,
    read_nodes,
    reading,
)
from mainstay.stores.copies import COPY, ID, WITHOUT_LOCK, has_rows, held_because, on_thread
from mainstay.stores.files import access_of, identity, make_parents, shared
from mainstay.stores.lease import FileLease
from mainstay.stores.lockfile import LockFile, Noted
from mainstay.stores.process_reads import SqliteProcessReads
from mainstay.stores.process_sql import bad_rows
from mainstay.stores.sql import SqlRows, deaths_row, mail_row, session_row, wait_row, worker_row
from mainstay.stores.writer import Done, GroupWriter

R = TypeVar("R")

log = logging.getLogger("mainstay.store")

CHECKPOINT_WRITES = 2048
"""Fold the WAL back after so many writes: some megabytes. Its file keeps its size, so size says nothing."""
INLINE_TURNS = 64
"""A read of at most so many turns is done on the event loop: it takes less time than a change of threads."""
SWEEP_AT_ONCE = 256
"""Blobs that go in one transaction: everybody else's writes wait for it."""


class Sweep(Write[int], frozen=True):
    """Delete those of `digests` that nothing refers to and that were last put before then, in nanoseconds."""

    digests: tuple[str, ...]
    before: int


class SqliteStore(SqliteProcessReads):
    """A store in one file, which several processes may have open."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Whole, and without links: a host may change its folder, and a file has one lock whatever it is called.
        self.path = Path(os.path.realpath(path))
        self.blobs = FileBlobs(Path(f"{self.path}-blobs"), self.path)
        self._pid = forks.pid()
        self._file: WriterFile | None = None
        self._writer: GroupWriter | None = None
        self._reader: sqlite3.Connection | None = None
        self._others = 0
        self._secret = b""

    # ------------------------------------------------------------------ life

    async def open(self) -> None:
        self._pid = forks.pid()
        self._file = await _whole(WriterFile, self.path, self.blobs)
        self._secret = self._file.secret
        try:
            with reading(self.path):
                self._reader = connect(self.path)
                self._reader.execute("PRAGMA query_only = 1")
            writer = GroupWriter(self._file, f"mainstay-writer {self.path.name}")
            writer.start(asyncio.get_running_loop())
        except BaseException:  # also when the opening is cancelled: the lock must not stay behind
            if self._reader is not None:
                self._reader.close()
            self._file.close()
            self._reader = self._file = None
            raise
        self._writer = writer
        self._others = self._file.others()

    async def close(self) -> None:
        if self._writer is None or self._file is None or self._reader is None or self._pid != forks.pid():
            return  # a forked child leaves its parent's connections alone
        parts, self._writer = (self._writer.stop, self._reader.close, self._file.close), None
        self._reader = self._file = None
        # On a thread, and shielded: a cancelled caller stops it neither half-way nor before it has begun.
        try:
            closing = asyncio.get_running_loop().run_in_executor(None, _each, parts)
        except RuntimeError:  # there is no thread to be had: then here, rather than not at all
            _each(parts)
        else:
            await asyncio.shield(closing)

    def _live(self) -> sqlite3.Connection:
        if self._pid != forks.pid():
            raise StoreInherited(self._pid, forks.pid())
        if self._reader is None:
            raise StoreUnavailable(f"the store {self.path} is not open")
        return self._reader

    # ------------------------------------------------------------------ writing

    async def write(self, write: Write[R]) -> R:
        self._live()
        assert self._writer is not None
        return cast(R, await self._writer.write(write))

    def submit(self, write: Write[Any], done: Done) -> None:
        if self._pid != forks.pid():
            done(None, StoreInherited(self._pid, forks.pid()))
        elif self._writer is None:
            done(None, StoreUnavailable(f"the store {self.path} is not open"))
        else:
            self._writer.submit(write, done)

    async def sweep(self, grace: float = SWEEP_GRACE) -> int:
        self._live()
        before, swept = time.time_ns() - round(grace * 1e9), 0
        # Chosen in pieces outside of any transaction, so that a folder full of blobs stops nobody. Whether they really
        # go is decided in the transaction that deletes them.
        old = await aside(self.blobs.old, before)
        for at in range(0, len(old), SWEEP_AT_ONCE):
            with reading(self.path):
                orphans = [d for d in old[at : at + SWEEP_AT_ONCE] if not is_referred_to(self._live(), d)]
            if orphans:
                swept += await self.write(Sweep(tuple(orphans), before))
            await asyncio.sleep(0)
        return swept

    @property
    def batches(self) -> int:
        """Transactions of this store so far: what `make bench` counts as commits."""
        return self._writer.batches if self._writer is not None else 0

    # ------------------------------------------------------------------ reading

    async def session(self, session_id: str) -> SessionRow | None:
        with reading(self.path):
            found = self._live().execute(sql.SESSION_BY_ID, (session_id,)).fetchone()
            return None if found is None else session_row(found)

    async def session_by_sid(self, sid: int) -> SessionRow | None:
        with reading(self.path):
            found = self._live().execute(sql.SESSION_BY_SID, (sid,)).fetchone()
            return None if found is None else session_row(found)

    async def sessions(self, wanted: SessionFilter) -> list[SessionRow]:
        clauses, args = ["deleted = 0"], list[Any]()
        for clause, value in (("agent = ?", wanted.agent), ("state = ?", wanted.state), ("updated < ?", wanted.before)):
            if value is not None:
                clauses.append(clause)
                args.append(value)
        if wanted.prefix:
            clauses.append("substr(id, 1, ?) = ?")
            args += [len(wanted.prefix), wanted.prefix]
        where = " AND ".join(clauses)
        with reading(self.path):
            found = self._live().execute(
                f"SELECT {sql.SESSION_ROW} FROM sessions WHERE {where} ORDER BY updated DESC, sid DESC LIMIT ?",
                (*args, wanted.limit),
            )
            return [session_row(r) for r in found]

    async def open_sessions(self) -> list[SessionRow]:
        with reading(self.path):
            return [session_row(r) for r in self._live().execute(sql.OPEN_SESSIONS)]

    async def nodes(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        live = self._live()
        if last - first < INLINE_TURNS:
            return read_nodes(self.path, live, sid, first, last)
        return await aside(self._nodes_aside, sid, first, last)

    def _nodes_aside(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        with contextlib.closing(connect(self.path)) as connection:
            return read_nodes(self.path, connection, sid, first, last)

    async def inbox(self, sid: int) -> list[InboxRow]:
        with reading(self.path):
            found = self._live().execute(f"SELECT {sql.MAIL} FROM inbox WHERE sid = ? ORDER BY input", (sid,))
            return [mail_row(r) for r in found]

    async def waits(self, sid: int | None = None, due: int | None = None) -> list[WaitRow]:
        where, args = "state = 'open'", list[Any]()
        if sid is not None:
            where, args = "sid = ?", [sid]
        if due is not None:
            where, args = f"{where} AND due IS NOT NULL AND due <= ?", [*args, due]
        with reading(self.path):
            found = self._live().execute(f"SELECT {sql.WAIT} FROM waits WHERE {where} ORDER BY id", args)
            return [wait_row(r) for r in found]

    async def wait(self, wait_id: str) -> WaitRow | None:
        with reading(self.path):
            found = self._live().execute(f"SELECT {sql.WAIT} FROM waits WHERE id = ?", (wait_id,)).fetchone()
            return None if found is None else wait_row(found)

    async def workers(self) -> list[WorkerRow]:
        with reading(self.path):
            return [worker_row(r) for r in self._live().execute(f"SELECT {sql.WORKER} FROM workers ORDER BY id")]

    async def deaths(self) -> list[Deaths]:
        with reading(self.path):
            return [deaths_row(r) for r in self._live().execute(f"SELECT {sql.DEATHS} FROM deaths ORDER BY scope")]

    async def changed(self) -> bool:
        if self._file is None:
            return False
        self._live()
        before, self._others = self._others, self._file.others()
        return before != self._others

    async def facts(self, deep: bool = False) -> StoreFacts:
        self._live()
        return await aside(self._facts_aside, deep)

    def _facts_aside(self, deep: bool) -> StoreFacts:
        with contextlib.closing(connect(self.path)) as connection, reading(self.path):
            checks = [str(r[0]) for r in connection.execute("PRAGMA integrity_check(20)")] if deep else []
            sessions, nodes, processes = (
                connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("sessions WHERE deleted = 0", "nodes", "processes WHERE pruned IS NULL")
            )
            if deep:
                checks += bad_nodes(connection) + bad_rows(connection)
            since = self._unfolded_since(connection)
        size, wal = (f.stat().st_size if f.exists() else 0 for f in (self.path, Path(f"{self.path}-wal")))
        blobs = sum(1 for _ in self.blobs.all())
        counts = (sessions, nodes, blobs, size + wal)
        others = tuple(shared(self.path))
        return StoreFacts(
            "sqlite", str(self.path), schema.VERSION, *counts, tuple(checks), processes, others, wal, self.held(), since
        )

    def _unfolded_since(self, connection: sqlite3.Connection) -> int:
        """Since when the WAL could not be folded whole; found by trying once more, where the last try could not."""
        lock = LockFile(Path(f"{self.path}-lock"), access_of(self.path))
        try:
            if lock.unfolded_since():
                lock.hold()
                fold(connection, lock, "PASSIVE")
            return lock.unfolded_since()
        finally:
            lock.close()

    # ------------------------------------------------------------------ copies

    @property
    def location(self) -> str:
        return str(self.path)

    async def backup(self, to: str, tell: Tell) -> None:
        self._live()
        await on_thread(lambda told: copies.back_up(self.path, self.blobs, Path(to), told), tell)

    async def restore(self) -> str:
        if self._reader is not None:
            raise InvalidInput(f"{self.path} is open here: close it, and restore it then")
        return await aside(copies.restore, self.path)

    async def compact(self, tell: Tell) -> tuple[int, int]:
        if self._reader is not None:
            raise InvalidInput(f"{self.path} is open here: close it, and compact it then")
        return await on_thread(lambda told: compaction.compact(self.path, told), tell)

    # ------------------------------------------------------------------ who is alive, what is signed

    def identity(self) -> str:
        return self._file.store_id if self._file is not None else ""

    def held(self) -> str | None:
        return self._file.held if self._file is not None else None

    def secret(self) -> bytes:
        return self._secret

    def lease(self, worker_id: str) -> FileLease:
        return FileLease(self.path, worker_id)


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
        self._connection.execute("BEGIN IMMEDIATE")
        if self._rows.begin():
            self._read_marks(self._connection)  # it may have been restored meanwhile

    def apply(self, write: Write[Any]) -> Any:
        self._unfolded += 1
        self._freed = self._freed or isinstance(write, Delete | Prune)
        if isinstance(write, Sweep):
            return self._sweep(write)
        return rules.apply(self._rows, write, self.held is not None)

    def applied(self, write: Write[Any]) -> Any | None:
        return None if isinstance(write, Sweep) else rules.applied(self._rows, write, self.held is not None)

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


async def _whole(make: Callable[..., WriterFile], *arguments: Any) -> WriterFile:
    """Make a file on a thread. One whose caller is cancelled is closed again, not left behind half made."""
    try:
        made = asyncio.get_running_loop().run_in_executor(None, make, *arguments)
    except RuntimeError as error:
        raise StoreUnavailable(NO_THREAD.format(error)) from None
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        made.add_done_callback(_unmake)
        await asyncio.wait({made})
        raise


def _unmake(made: asyncio.Future[WriterFile]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


def _each(parts: Iterable[Callable[[], None]]) -> None:
    for part in parts:
        part()
