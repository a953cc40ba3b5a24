"""The SQLite store: one file, one writing connection, readers beside it.

    agent.db            the database, in WAL mode with synchronous=FULL: what is acknowledged has been synced
    agent.db-lock       held by the process that writes or checkpoints; it says what was last acknowledged
    agent.db-workers/   one locked file for each live Runtime: the kernel frees the lock when its process dies
    agent.db-blobs/     what is too large for a row
    agent.db-jobs/      one folder for each command: its output, its exit status, the socket of its shim

SQLite before 3.51.3 can corrupt a WAL when two connections write and checkpoint at once. Every transaction and
checkpoint of ours, from any process, therefore runs under the lock, and no connection of ours checkpoints by itself. A
database that lacks what the lock file says was acknowledged has lost its tail and is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from perdure.errors import InvalidInput, StoreInherited, StoreUnavailable
from perdure.model.ids import MAX_TURN
from perdure.model.limit import Account, Reservation
from perdure.model.process import Event, ProcessRow, WakeRow
from perdure.model.search import FoundRecord, SearchFilter
from perdure.model.session import Deaths, Dump, InboxRow, SessionRow, WaitRow, WorkerRow
from perdure.model.spending import UsageFilter, UsageRow
from perdure.model.write import ProcessFilter, SessionFilter, StoreFacts, Write
from perdure.ports.store import SWEEP_GRACE, Tell, WorkerSocket
from perdure.stores import os_process
from perdure.stores.blobs import FileBlobs
from perdure.stores.files import PRIVATE, access_of, make_folder, shared
from perdure.stores.os_process import NO_THREAD, in_thread
from perdure.stores.sqlite import maintenance, records, schema, search, sockets
from perdure.stores.sqlite.database import (
    IndexMore,
    KeepIndex,
    Sweep,
    WriterFile,
    connect,
    fold,
    is_referred_to,
    read_nodes,
    reading,
)
from perdure.stores.sqlite.group_commit import LOOP_SYNC, Done, GroupWriter
from perdure.stores.sqlite.locks import FileLease, LockFile, is_freed, workers_folder
from perdure.stores.sqlite.maintenance import on_thread, refuse_moved
from perdure.stores.sqlite.records import (
    bad_nodes,
    bad_rows,
    deaths_row,
    event_row,
    input_row,
    process_or_tombstone,
    process_row,
    session_row,
    step_row,
    wait_row,
    wake_row,
    worker_row,
)

R = TypeVar("R")

INLINE_STEPS = 64
"""A read of at most so many records of a journal is done on the event loop, for the same reason."""
INLINE_TURNS = 64
"""A read of at most so many turns is done on the event loop: it takes less time than a change of threads."""
SWEEP_AT_ONCE = 256
"""Blobs that go in one transaction: everybody else's writes wait for it."""


class SqliteStore:
    """A store in one file, which several processes may have open.

    `loop_sync`: seconds that recent commits may take on average for the event loop to commit light writes itself,
    rather than leave them to the writer thread. 0 leaves all to the thread.
    """

    def __init__(self, path: str | os.PathLike[str], loop_sync: float = LOOP_SYNC) -> None:
        # Whole, and without links: a host may change its folder, and a file has one lock whatever it is called.
        self.path = Path(os.path.realpath(path))
        self.blobs = FileBlobs(Path(f"{self.path}-blobs"), self.path)
        self._pid = os_process.pid()
        self._loop_sync = loop_sync
        self._file: WriterFile | None = None
        self._writer: GroupWriter | None = None
        self._reader: sqlite3.Connection | None = None
        self._others = 0
        self._secret = b""

    # ------------------------------------------------------------------ life

    async def open(self) -> None:
        self._pid = os_process.pid()
        refuse_moved(self.path)
        self._file = await _whole(WriterFile, self.path, self.blobs)
        self._secret = self._file.secret
        try:
            with reading(self.path):
                self._reader = connect(self.path)
                self._reader.execute("PRAGMA query_only = 1")
            writer = GroupWriter(self._file, f"perdure-writer {self.path.name}", self._loop_sync)
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
        if self._writer is None or self._file is None or self._reader is None or self._pid != os_process.pid():
            return  # a forked child leaves its parent's connections alone
        self._writer.leave_loop()
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
        if self._pid != os_process.pid():
            raise StoreInherited(self._pid, os_process.pid())
        if self._reader is None:
            raise StoreUnavailable(f"the store {self.path} is not open")
        return self._reader

    # ------------------------------------------------------------------ writing

    async def write(self, write: Write[R]) -> R:
        self._live()
        assert self._writer is not None
        return cast(R, await self._writer.write(write))

    def submit(self, write: Write[Any], done: Done) -> None:
        if self._pid != os_process.pid():
            done(None, StoreInherited(self._pid, os_process.pid()))
        elif self._writer is None:
            done(None, StoreUnavailable(f"the store {self.path} is not open"))
        else:
            self._writer.submit(write, done)

    async def sweep(self, grace: float = SWEEP_GRACE) -> int:
        self._live()
        before, swept = time.time_ns() - round(grace * 1e9), 0
        # Chosen in pieces outside of any transaction, so that a folder full of blobs stops no writer. Whether they
        # really go is decided in the transaction that deletes them.
        old = await in_thread(self.blobs.old, before)
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
            found = self._live().execute(records.SESSION_BY_ID, (session_id,)).fetchone()
            return None if found is None else session_row(found)

    async def session_by_sid(self, sid: int) -> SessionRow | None:
        with reading(self.path):
            found = self._live().execute(records.SESSION_BY_SID, (sid,)).fetchone()
            return None if found is None else session_row(found)

    async def sessions(self, wanted: SessionFilter) -> list[SessionRow]:
        with reading(self.path):
            return [session_row(found) for found in records.find_sessions(self._live(), wanted)]

    async def open_sessions(self) -> list[SessionRow]:
        with reading(self.path):
            return [session_row(r) for r in self._live().execute(records.OPEN_SESSIONS)]

    async def nodes(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        live = self._live()
        if last - first < INLINE_TURNS:
            return read_nodes(self.path, live, sid, first, last)
        return await in_thread(self._nodes_in_thread, sid, first, last)

    async def turn_ends(self, turns: Sequence[tuple[int, int]]) -> list[tuple[bytes, bytes] | None]:
        with reading(self.path):
            return [records.turn_ends(self._live(), sid, turn) for sid, turn in turns]

    def _nodes_in_thread(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        with contextlib.closing(connect(self.path)) as connection:
            return read_nodes(self.path, connection, sid, first, last)

    async def keep_index(self, keep: bool) -> None:
        await self.write(KeepIndex(keep))

    async def index_more(self) -> bool:
        return await self.write(IndexMore())

    async def search(self, wanted: SearchFilter) -> tuple[list[FoundRecord], float]:
        self._live()
        return await in_thread(self._search_in_thread, wanted)

    def _search_in_thread(self, wanted: SearchFilter) -> tuple[list[FoundRecord], float]:
        with contextlib.closing(connect(self.path)) as connection, reading(self.path):
            return search.find(connection, wanted)

    async def inbox(self, sid: int) -> list[InboxRow]:
        with reading(self.path):
            found = self._live().execute(f"SELECT {records.MAIL} FROM inbox WHERE sid = ? ORDER BY input", (sid,))
            return [input_row(r) for r in found]

    async def waits(self, sid: int | None = None, due: int | None = None) -> list[WaitRow]:
        where, args = "state = 'open'", list[Any]()
        if sid is not None:
            where, args = "sid = ?", [sid]
        if due is not None:
            where, args = f"{where} AND due IS NOT NULL AND due <= ?", [*args, due]
        with reading(self.path):
            found = self._live().execute(f"SELECT {records.WAIT} FROM waits WHERE {where} ORDER BY id", args)
            return [wait_row(r) for r in found]

    async def wait(self, wait_id: str) -> WaitRow | None:
        with reading(self.path):
            found = self._live().execute(f"SELECT {records.WAIT} FROM waits WHERE id = ?", (wait_id,)).fetchone()
            return None if found is None else wait_row(found)

    async def dump(self, sid: int, last: int) -> tuple[int, Dump] | None:
        span = (records.node_place(sid, 0, 0), records.node_place(sid, min(last, MAX_TURN), 0))
        with reading(self.path):
            found = self._live().execute(records.NEWEST_DUMP, span).fetchone()
        if found is None:
            return None
        place, digest, body = found
        return records.node_position(place)[1], Dump(body if isinstance(body, bytes) else b"", digest)

    async def usage(self, wanted: UsageFilter) -> list[UsageRow]:
        query, args = records.usage_filter(wanted)
        with reading(self.path):
            found = self._live().execute(f"SELECT {records.USAGE} FROM {query}", args)
            return [row for each in found if wanted.fits(row := records.usage_row(each))]

    async def accounts(self) -> list[Account]:
        with reading(self.path):
            found = self._live().execute(f"SELECT {records.ACCOUNT} FROM accounts ORDER BY name, key")
            return [records.account_row(each) for each in found]

    async def reservations(self, sid: int | None = None) -> list[Reservation]:
        where, args = ("", []) if sid is None else (" WHERE sid = ?", [sid])
        with reading(self.path):
            query = f"SELECT {records.RESERVATION} FROM reservations{where} ORDER BY sid, name"
            return [records.reservation_row(each) for each in self._live().execute(query, args)]

    async def workers(self) -> list[WorkerRow]:
        with reading(self.path):
            return [worker_row(r) for r in self._live().execute(f"SELECT {records.WORKER} FROM workers ORDER BY id")]

    async def deaths(self) -> list[Deaths]:
        with reading(self.path):
            return [deaths_row(r) for r in self._live().execute(f"SELECT {records.DEATHS} FROM deaths ORDER BY scope")]

    async def changed(self) -> bool:
        if self._file is None:
            return False
        self._live()
        before, self._others = self._others, self._file.others()
        return before != self._others

    async def facts(self, deep: bool = False) -> StoreFacts:
        self._live()
        return await in_thread(self._facts_in_thread, deep)

    def _facts_in_thread(self, deep: bool) -> StoreFacts:
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

    # ------------------------------------------------------------------ reading processes

    async def process(self, process_id: str) -> ProcessRow | None:
        with reading(self.path):
            found = self._live().execute(records.PROCESS_BY_ID, (process_id,)).fetchone()
            return None if found is None else process_or_tombstone(found)

    async def processes(self, wanted: ProcessFilter) -> list[ProcessRow]:
        rest, args = records.process_filter(wanted)
        with reading(self.path):
            return [process_row(r) for r in self._live().execute(f"SELECT {records.PROCESS_ROW} FROM {rest}", args)]

    async def active_processes(self) -> list[ProcessRow]:
        with reading(self.path):
            return [process_row(r) for r in self._live().execute(f"{records.ACTIVE} ORDER BY pid")]

    async def unowned_processes(self, after: int, limit: int) -> list[ProcessRow]:
        with reading(self.path):
            return [process_row(r) for r in self._live().execute(records.UNOWNED, (after, limit))]

    async def due_processes(self, now: int, limit: int = 1000, skip: int = 0) -> list[ProcessRow]:
        with reading(self.path):
            return [process_row(r) for r in self._live().execute(records.DUE, (now, limit, skip))]

    async def events(self, pid: int, after: int = 0, limit: int = 1000) -> list[tuple[int, int, Event]]:
        query = f"SELECT {records.EVENT} FROM events WHERE pid = ? AND sequence > ? ORDER BY sequence LIMIT ?"
        with reading(self.path):
            found = [event_row(r) for r in self._live().execute(query, (pid, after, max(0, limit)))]
        return [(place, sequence, event) for place, _, sequence, event in found]

    async def changes(self, after: int = 0, limit: int = 1000) -> list[tuple[int, ProcessRow]]:
        with reading(self.path):
            found = self._live().execute(records.CHANGES, (after, max(0, limit)))
            return [(r[0], process_or_tombstone(r[1:])) for r in found]

    async def last_change(self) -> int:
        with reading(self.path):
            return int(self._live().execute("SELECT coalesce(max(place), 0) FROM events").fetchone()[0])

    async def steps(self, pid: int) -> list[tuple[int, bytes]]:
        live = self._live()
        span = (records.step_place(pid, 0), records.step_place(pid, records.MAX_STEPS))
        with reading(self.path):
            found = live.execute(f"{records.STEPS} LIMIT {INLINE_STEPS + 1}", span).fetchall()
            if len(found) <= INLINE_STEPS:
                return [step_row(r) for r in found]
        return await in_thread(self._steps_in_thread, span)

    def _steps_in_thread(self, span: tuple[int, int]) -> list[tuple[int, bytes]]:
        with contextlib.closing(connect(self.path)) as connection, reading(self.path):
            return [step_row(r) for r in connection.execute(records.STEPS, span)]

    async def is_granted(self, session_id: str, process_id: str) -> bool:
        query = "SELECT 1 FROM grants JOIN processes USING (pid) WHERE session_id = ? AND id = ?"
        with reading(self.path):
            return self._live().execute(query, (session_id, process_id)).fetchone() is not None

    async def grantees(self, process_id: str) -> list[str]:
        query = "SELECT session_id FROM grants JOIN processes USING (pid) WHERE id = ? ORDER BY session_id"
        with reading(self.path):
            return [session_id for (session_id,) in self._live().execute(query, (process_id,))]

    async def wakes(self, session_id: str | None = None, state: str = "pending") -> list[WakeRow]:
        # Spelt out, and ordered by an expression: only so is the index of pending ones used.
        where, args = ("state = 'pending'", list[str]()) if state == "pending" else ("state = ?", [state])
        if session_id is not None:
            where, args = f"session_id = ? AND {where}", [session_id, *args]
        with reading(self.path):
            found = self._live().execute(f"SELECT {records.WAKE} FROM wakes WHERE {where} ORDER BY +number", args)
            return [wake_row(r) for r in found]

    # ------------------------------------------------------------------ copies

    @property
    def location(self) -> str:
        return str(self.path)

    def new_socket(self, worker_id: str) -> WorkerSocket | None:
        return sockets.new_socket(workers_folder(self.path), worker_id)

    def find_socket(self, worker: WorkerRow) -> WorkerSocket:
        named = "" if worker.offers is None else worker.offers.socket
        return sockets.find_socket(workers_folder(self.path), worker.id, named)

    def remove_socket(self, where: WorkerSocket) -> None:
        sockets.remove_socket(where.path)

    outlives_us = True

    def jobs_folder(self, make: bool = True) -> str:
        folder = self.path.with_name(f"{self.path.name}-jobs")
        if not make:
            return str(folder)
        try:
            # For its owner alone, although others may use the database: output of commands and their sockets are there.
            make_folder(folder, replace(access_of(self.path), mode=PRIVATE.mode))
        except OSError as error:
            raise StoreUnavailable(f"cannot make the folder {folder} for commands: {error.strerror}") from None
        return str(folder)

    async def backup(self, to: str, tell: Tell) -> None:
        self._live()
        await on_thread(lambda told: maintenance.back_up(self.path, self.blobs, Path(to), told), tell)

    async def restore(self) -> str:
        if self._reader is not None:
            raise InvalidInput(f"{self.path} is open here: close it, and restore it then")
        return await in_thread(maintenance.restore, self.path)

    async def compact(self, tell: Tell) -> tuple[int, int]:
        if self._reader is not None:
            raise InvalidInput(f"{self.path} is open here: close it, and compact it then")
        return await on_thread(lambda told: maintenance.compact(self.path, told), tell)

    # ------------------------------------------------------------------ who is alive, what is signed

    def identity(self) -> str:
        return self._file.store_id if self._file is not None else ""

    def held(self) -> str | None:
        return self._file.held if self._file is not None else None

    async def secret(self) -> bytes:
        return self._secret

    def lease(self, worker_id: str) -> FileLease:
        return FileLease(self.path, worker_id)

    async def proven_dead(self, worker: WorkerRow) -> bool:
        return is_freed(self.path, worker)


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
