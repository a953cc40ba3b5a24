"""What the SQLite store reads of processes."""

from __future__ import annotations

import contextlib
import sqlite3
from abc import ABC, abstractmethod
from pathlib import Path

from mainstay.model.process import Event, ProcessRow, WakeRow
from mainstay.model.process_write import ProcessFilter
from mainstay.stores import process_sql as sql
from mainstay.stores.aside import aside
from mainstay.stores.connection import connect, reading
from mainstay.stores.process_sql import event_row, process_or_tombstone, process_row, step_row, wake_row

INLINE_STEPS = 64
"""A read of at most so many records is done on the event loop: it takes less time than a change of threads."""


class SqliteProcessReads(ABC):
    """The reading side of processes, for a store that has a connection to read with."""

    path: Path

    @abstractmethod
    def _live(self) -> sqlite3.Connection:
        """The connection to read with, if the store is open and ours."""

    async def process(self, process_id: str) -> ProcessRow | None:
        with reading(self.path):
            found = self._live().execute(sql.PROCESS_BY_ID, (process_id,)).fetchone()
            return None if found is None else process_or_tombstone(found)

    async def processes(self, wanted: ProcessFilter) -> list[ProcessRow]:
        rest, args = sql.process_filter(wanted)
        with reading(self.path):
            return [process_row(r) for r in self._live().execute(f"SELECT {sql.PROCESS_ROW} FROM {rest}", args)]

    async def active_processes(self) -> list[ProcessRow]:
        with reading(self.path):
            return [process_row(r) for r in self._live().execute(f"{sql.ACTIVE} ORDER BY pid")]

    async def unowned_processes(self, after: int, limit: int) -> list[ProcessRow]:
        with reading(self.path):
            return [process_row(r) for r in self._live().execute(sql.UNOWNED, (after, limit))]

    async def due_processes(self, now: int, limit: int = 1000, skip: int = 0) -> list[ProcessRow]:
        with reading(self.path):
            return [process_row(r) for r in self._live().execute(sql.DUE, (now, limit, skip))]

    async def events(self, pid: int, after: int = 0, limit: int = 1000) -> list[tuple[int, int, Event]]:
        query = f"SELECT {sql.EVENT} FROM events WHERE pid = ? AND sequence > ? ORDER BY sequence LIMIT ?"
        with reading(self.path):
            found = [event_row(r) for r in self._live().execute(query, (pid, after, max(0, limit)))]
        return [(place, sequence, event) for place, _, sequence, event in found]

    async def changes(self, after: int = 0, limit: int = 1000) -> list[tuple[int, ProcessRow]]:
        with reading(self.path):
            found = self._live().execute(sql.CHANGES, (after, max(0, limit)))
            return [(r[0], process_or_tombstone(r[1:])) for r in found]

    async def last_change(self) -> int:
        with reading(self.path):
            return int(self._live().execute("SELECT coalesce(max(place), 0) FROM events").fetchone()[0])

    async def steps(self, pid: int) -> list[tuple[int, bytes]]:
        live = self._live()
        span = (sql.step_place(pid, 0), sql.step_place(pid, sql.MAX_STEPS))
        with reading(self.path):
            found = live.execute(f"{sql.STEPS} LIMIT {INLINE_STEPS + 1}", span).fetchall()
            if len(found) <= INLINE_STEPS:
                return [step_row(r) for r in found]
        return await aside(self._steps_aside, span)

    def _steps_aside(self, span: tuple[int, int]) -> list[tuple[int, bytes]]:
        with contextlib.closing(connect(self.path)) as connection, reading(self.path):
            return [step_row(r) for r in connection.execute(sql.STEPS, span)]

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
            found = self._live().execute(f"SELECT {sql.WAKE} FROM wakes WHERE {where} ORDER BY +number", args)
            return [wake_row(r) for r in found]
