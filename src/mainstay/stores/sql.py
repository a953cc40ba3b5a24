"""Rows in SQL: the statements behind `rules.Rows`, and how a row becomes a struct."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mainstay.model.ids import MAX_ORDINAL, MAX_TURN
from mainstay.model.session import Deaths, Fork, InboxRow, Node, Offers, SessionRow, WaitRow, WorkerRow
from mainstay.stores.process_sql import SqlProcessRows
from mainstay.stores.rows import waits_of
from mainstay.stores.seal import opened, seal, sealed, unsealed

SESSION = (
    "sid, id, agent, head, next, turn, state, owner, generation, takeovers, cancel, reason, "
    "fork_sid, fork_turn, fork_ordinal, created, updated, deleted, crc"
)
WAIT = "id, sid, turn, call, kind, state, due, body, answer, crc"
MAIL = "sid, input, kind, cancel, crc"
WORKER = "id, host, boot, pid, started, beat, term_ms, offers, process, lived, suspect"
DEATHS = "scope, counted, alone, life, worker, since, crc"

SESSION_ROW = f"{SESSION}, (SELECT body FROM settings WHERE settings.sid = sessions.sid)"
"""What `session_row` reads."""

SESSION_BY_ID = f"SELECT {SESSION_ROW} FROM sessions WHERE id = ?"
SESSION_BY_SID = f"SELECT {SESSION_ROW} FROM sessions WHERE sid = ?"
OPEN_SESSIONS = f"SELECT {SESSION_ROW} FROM sessions INDEXED BY sessions_open WHERE turn IS NOT NULL"
ADD_SESSION = f"INSERT INTO sessions ({SESSION}) VALUES (NULL{', ?' * 18})"
PUT_SESSION = (
    "UPDATE sessions SET head = ?, next = ?, turn = ?, state = ?, owner = ?, generation = ?, takeovers = ?, "
    "cancel = ?, reason = ?, fork_sid = ?, fork_turn = ?, fork_ordinal = ?, updated = ?, deleted = ?, crc = ? "
    "WHERE sid = ?"
)
FIRST_MAIL = f"SELECT {MAIL} FROM inbox WHERE sid = ? AND kind != 'note' ORDER BY input LIMIT 1"
SOME_MAIL = (
    "SELECT EXISTS (SELECT 1 FROM inbox WHERE sid = ?), EXISTS (SELECT 1 FROM inbox WHERE sid = ? AND kind != 'queue')"
)
ADD_NODE = "INSERT OR IGNORE INTO nodes (place, crc, body) VALUES (?, ?, ?)"
NODES = "SELECT place, crc, body FROM nodes WHERE place BETWEEN ? AND ? ORDER BY place"

_offers, _offers_in = msgspec.json.Encoder(), msgspec.json.Decoder(Offers | None)

REMEMBERED = 4096
"""Sessions whose rows are remembered between transactions."""

MAX_SID = 2**27 - 1


def place(sid: int, turn: int, ordinal: int) -> int:
    """A node's place in the tree of all nodes; ordered as (session, turn, ordinal).

    Not a refusal of ours: rows may have been changed before, so the whole transaction must go.
    """
    if sid > MAX_SID or turn > MAX_TURN or ordinal > MAX_ORDINAL:
        raise OverflowError(
            f"a file holds {MAX_SID:,} sessions of {MAX_TURN:,} inputs with {MAX_ORDINAL:,} records each, "
            f"and this is record {ordinal} of turn {turn} of session number {sid}: fork the session, or begin another"
        )
    return (sid << 36) | (turn << 16) | ordinal


def placed(place: int) -> tuple[int, int, int]:
    """Session number, turn and ordinal of a place."""
    return place >> 36, (place >> 16) & MAX_TURN, place & MAX_ORDINAL


def node_crc(place: int, body: bytes) -> int:
    """A checksum of a record at its place: one that turns up elsewhere does not match, nor one that became text."""
    if type(body) is not bytes or type(place) is not int:
        return -1
    return zlib.crc32(body, (place ^ place >> 32) & 0xFFFFFFFF)


def session_row(found: tuple[Any, ...]) -> SessionRow:
    if seal(found[1:-2]) != found[-2]:  # without the number, which SQLite chose after the row was sealed
        raise sqlite3.DatabaseError("malformed row of sessions: it does not match its checksum")
    (sid, id_, agent, head, next_, turn, state, owner, generation, takeovers, cancel, reason, *rest) = found
    fork_sid, fork_turn, fork_ordinal, created, updated, deleted, _, settings = rest
    fork = None if fork_sid is None else Fork(fork_sid, fork_turn, fork_ordinal)
    return SessionRow(
        sid, id_, agent, head, next_, turn, state, owner, generation, takeovers, cancel, reason, fork,
        created, updated, bool(deleted), b"" if settings is None else opened("settings", sid, settings),
    )  # fmt: skip


def wait_row(found: tuple[Any, ...]) -> WaitRow:
    return WaitRow(*unsealed("waits", found))


def mail_row(found: tuple[Any, ...]) -> InboxRow:
    return InboxRow(*unsealed("inbox", found))


def worker_row(found: tuple[Any, ...]) -> WorkerRow:
    id_, host, boot, pid, started, beat, term_ms, offers, process, lived, suspect = found
    types = [type(value) for value in (*found[:7], process, lived)]
    if types != [str, str, str, int, int, int, int, str, int] or type(suspect) not in (int, type(None)):
        raise sqlite3.DatabaseError(f"malformed row of workers: {found!r:.200} describes no worker")
    try:
        known = None if offers is None else _offers_in.decode(offers)
    except (msgspec.DecodeError, TypeError) as error:  # a column of another type is none of ours either
        raise sqlite3.DatabaseError(f"malformed row of workers: {error}") from None
    return WorkerRow(id_, host, boot, pid, started, beat, term_ms, known, process, lived, suspect)


def deaths_row(found: tuple[Any, ...]) -> Deaths:
    return Deaths(*unsealed("deaths", found))


def _values(row: SessionRow) -> tuple[Any, ...]:
    """The columns of a session, but for its number and its checksum."""
    fork = row.fork
    return (
        row.id, row.agent, row.head, row.next, row.turn, row.state, row.owner, row.generation, row.takeovers,
        row.cancel, row.reason, fork and fork.sid, fork and fork.turn, fork and fork.ordinal, row.created,
        row.updated, int(row.deleted),
    )  # fmt: skip


class Known(Struct):
    """What is known of a session that somebody works on. `mail`, `waits`: whether it may have any."""

    row: SessionRow
    mail: bool = True
    waits: bool = True


class SqlRows(SqlProcessRows):
    """A transaction of a SQLite connection, seen as rows.

    The owner of a turn writes to it again and again, and every write begins with the session's row. What this
    connection has written is therefore remembered, until anybody else commits anything or a transaction is undone.
    """

    def __init__(self, connection: sqlite3.Connection, has_blob: Callable[[str], bool]) -> None:
        super().__init__(connection)
        self._known: dict[int, Known] = {}
        self._version = -1
        self._many = connection.executemany
        self._has_blob = has_blob
        # Identity of the last record written in this transaction; (0, 0) when records were deleted since. `rewrote`: a
        # record that was there before this transaction is gone, or is another one now.
        self.last: tuple[int, int] | None = None
        self.rewrote = False

    def begin(self) -> bool:
        """In a new transaction: whether others have written since the last one, and what is remembered may not be so
        any more."""
        self.last, self.rewrote = None, False
        version = self._do("PRAGMA data_version").fetchone()[0]
        changed = bool(version != self._version)
        if changed or max(len(self._known), self.remembered) > REMEMBERED:
            self.forget()
            self._version = version
        return changed

    def forget(self) -> None:
        self._known.clear()
        self.forget_processes()

    def _remember(self, row: SessionRow, new: bool = False) -> None:
        if row.owner is None:
            self._known.pop(row.sid, None)
        elif (known := self._known.get(row.sid)) is not None:
            known.row = row
        else:
            self._known[row.sid] = Known(row, mail=not new, waits=not new)

    def _one(self, sql: str, *args: Any) -> Any:
        return self._do(sql, args).fetchone()

    # ------------------------------------------------------------------ sessions

    def session(self, session_id: str) -> SessionRow | None:
        found = self._do(SESSION_BY_ID, (session_id,)).fetchone()
        return None if found is None else session_row(found)

    def session_by_sid(self, sid: int) -> SessionRow | None:
        known = self._known.get(sid)
        if known is not None:
            return known.row
        found = self._do(SESSION_BY_SID, (sid,)).fetchone()
        if found is None:
            return None
        row = session_row(found)
        self._remember(row)
        return row

    def add_session(self, row: SessionRow) -> SessionRow:
        values = _values(row)
        cursor = self._do(ADD_SESSION, (*values, seal(values)))
        row = replace(row, sid=cursor.lastrowid)
        self._remember(row, new=True)
        return row

    def put_session(self, row: SessionRow) -> None:
        self._remember(row)
        values = _values(row)
        # Neither the id nor the agent nor the birth of a session ever changes.
        self._do(PUT_SESSION, (*values[2:14], *values[15:], seal(values), row.sid))

    def put_settings(self, sid: int, settings: bytes) -> None:
        self._do("INSERT OR REPLACE INTO settings (sid, body) VALUES (?, ?)", (sid, sealed(sid, settings)))

    def owned_by(self, worker_id: str) -> list[SessionRow]:
        return [session_row(r) for r in self._do(f"{OPEN_SESSIONS} AND owner = ?", (worker_id,))]

    def forks_of(self, sid: int) -> int:
        return int(self._one("SELECT count(*) FROM sessions WHERE fork_sid = ?", sid)[0])

    # ------------------------------------------------------------------ keys, nodes, blobs

    def key(self, sid: int, key: str) -> tuple[int, bytes] | None:
        found = self._one("SELECT sid, key, turn, digest, crc FROM keys WHERE sid = ? AND key = ?", sid, key)
        if found is None:
            return None
        _, _, turn, digest = unsealed("keys", found)
        return turn, digest

    def put_key(self, sid: int, key: str, turn: int, digest: bytes) -> None:
        values = (sid, key, turn, digest)
        self._do("INSERT INTO keys (sid, key, turn, digest, crc) VALUES (?, ?, ?, ?, ?)", (*values, seal(values)))

    def node(self, sid: int, turn: int, ordinal: int) -> bytes | None:
        found = self._one("SELECT body FROM nodes WHERE place = ?", place(sid, turn, ordinal))
        return None if found is None else found[0]

    def add_node(self, sid: int, turn: int, ordinal: int, body: bytes) -> bool:
        where = place(sid, turn, ordinal)
        crc = node_crc(where, body)
        added = self._do(ADD_NODE, (where, crc, body)).rowcount == 1
        if added:
            self.last = (where, crc)
        return added

    def put_node(self, sid: int, turn: int, ordinal: int, body: bytes) -> None:
        where = place(sid, turn, ordinal)
        crc = node_crc(where, body)
        self._do("UPDATE nodes SET crc = ?, body = ? WHERE place = ?", (crc, body, where))
        self.last, self.rewrote = (where, crc), True

    def add_nodes(self, sid: int, turn: int, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.add_node(sid, turn, node.ordinal, node.body)

    def drop_session_data(self, sid: int) -> None:
        self.last, self.rewrote = (0, 0), True
        self._do("DELETE FROM nodes WHERE place BETWEEN ? AND ?", (sid << 36, ((sid + 1) << 36) - 1))
        for table in ("inbox", "keys", "blobs", "settings"):
            self._do(f"DELETE FROM {table} WHERE sid = ?", (sid,))

    def add_blobs(self, sid: int, digests: Iterable[str]) -> None:
        for digest in digests:
            self._do("INSERT OR IGNORE INTO blobs (digest, sid) VALUES (?, ?)", (digest, sid))

    def has_blob(self, digest: str) -> bool:
        return self._has_blob(digest)

    # ------------------------------------------------------------------ inbox

    def first_mail(self, sid: int) -> InboxRow | None:
        if (known := self._known.get(sid)) is not None and not known.mail:
            return None
        found = self._one(FIRST_MAIL, sid)
        return None if found is None else mail_row(found)

    def has_mail(self, sid: int) -> bool:
        known = self._known.get(sid)
        if known is not None and not known.mail:
            return False
        some, for_the_turn = self._one(SOME_MAIL, sid, sid)
        if known is not None:
            known.mail = bool(some)
        return bool(for_the_turn)

    def some_mail(self, sid: int) -> bool:
        return self._one("SELECT 1 FROM inbox WHERE sid = ? LIMIT 1", sid) is not None

    def mail(self, sid: int, number: int) -> InboxRow | None:
        found = self._one(f"SELECT {MAIL} FROM inbox WHERE sid = ? AND input = ?", sid, number)
        return None if found is None else mail_row(found)

    def put_mail(self, row: InboxRow) -> None:
        if (known := self._known.get(row.sid)) is not None:
            known.mail = True
        values = (row.sid, row.input, row.kind, row.cancel)
        self._do(f"INSERT OR REPLACE INTO inbox ({MAIL}) VALUES (?, ?, ?, ?, ?)", (*values, seal(values)))

    def drop_mail(self, sid: int, number: int) -> None:
        self._do("DELETE FROM inbox WHERE sid = ? AND input = ?", (sid, number))

    # ------------------------------------------------------------------ waits

    def wait(self, wait_id: str) -> WaitRow | None:
        found = self._one(f"SELECT {WAIT} FROM waits WHERE id = ?", wait_id)
        return None if found is None else wait_row(found)

    def put_wait(self, row: WaitRow) -> None:
        if (known := self._known.get(row.sid)) is not None:
            known.waits = True
        values = (row.id, row.sid, row.turn, row.call, row.kind, row.state, row.due, row.body, row.answer)
        self._do(
            f"INSERT OR REPLACE INTO waits ({WAIT}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, seal(values))
        )

    def drop_waits(self, sid: int) -> None:
        known = self._known.get(sid)
        if (known is None or known.waits) and self._do("DELETE FROM waits WHERE sid = ?", (sid,)).rowcount:
            self._do("DELETE FROM blobs WHERE sid = ?", (waits_of(sid),))
        if known is not None:
            known.waits = False

    # ------------------------------------------------------------------ workers

    def worker(self, worker_id: str) -> WorkerRow | None:
        found = self._one(f"SELECT {WORKER} FROM workers WHERE id = ?", worker_id)
        return None if found is None else worker_row(found)

    def put_worker(self, row: WorkerRow) -> None:
        self._do(
            f"INSERT OR REPLACE INTO workers ({WORKER}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.id, row.host, row.boot, row.pid, row.started, row.beat, row.term_ms, _offers.encode(row.offers),
                row.process, row.lived, row.suspect,
            ),
        )  # fmt: skip

    def workers(self) -> list[WorkerRow]:
        return [worker_row(r) for r in self._do(f"SELECT {WORKER} FROM workers ORDER BY id")]

    def deaths(self, scope: int) -> Deaths | None:
        found = self._one(f"SELECT {DEATHS} FROM deaths WHERE scope = ?", scope)
        return None if found is None else deaths_row(found)

    def put_deaths(self, row: Deaths) -> None:
        values = (row.scope, row.counted, row.alone, row.life, row.worker, row.since)
        self._do(f"INSERT OR REPLACE INTO deaths ({DEATHS}) VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, seal(values)))

    def drop_deaths(self, scope: int) -> None:
        self._do("DELETE FROM deaths WHERE scope = ?", (scope,))

    def drop_worker(self, worker_id: str) -> None:
        self._do("DELETE FROM workers WHERE id = ?", (worker_id,))
