"""Processes in SQL: the statements behind `rows.ProcessRows`, and how their rows become structs."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from mainstay.lifecycle.fold import PRUNED
from mainstay.model.codec import encode
from mainstay.model.process import (
    Event,
    ProcessRecord,
    ProcessRow,
    ProcessStatus,
    Registration,
    Tombstone,
    WakeRow,
)
from mainstay.model.process_write import ProcessFilter
from mainstay.stores.seal import opened, seal, sealed, unsealed

PROCESS = (
    "pid, id, live, active, due, parent, updated, created, owner, generation, attempts, takeovers, stuck, pruned, crc, "
    "record"
)
EVENT = "place, pid, sequence, key, crc, body"
WAKE = "number, session_id, pid, sequence, policy, body, at, state, turn, reason, crc"

REGISTRATION = "(SELECT body FROM registrations WHERE registrations.pid = processes.pid)"
PROCESS_ROW = f"{', '.join(f'processes.{column}' for column in PROCESS.split(', '))}, {REGISTRATION}"
"""What `process_row` reads."""

TOMBSTONE = "id, pid, status, pruned, digest, place, crc"
TOMBSTONE_BY_ID = f"SELECT {TOMBSTONE} FROM tombstones WHERE id = ?"
PROCESS_BY_ID = (
    f"SELECT 0, {PROCESS_ROW} FROM processes WHERE id = ?1 UNION ALL "
    f"SELECT 1, {TOMBSTONE}{', NULL' * 10} FROM tombstones WHERE id = ?1"
)
"""What `process_or_tombstone` reads."""
CHANGES = (
    "WITH page AS MATERIALIZED (SELECT pid, place FROM events WHERE place > ?1 AND +pid > 0 "
    "UNION ALL SELECT 0, place FROM tombstones WHERE place > ?1 ORDER BY place LIMIT ?2) "
    f"SELECT latest.place, 0, {PROCESS_ROW} "
    "FROM (SELECT pid, max(place) AS place FROM page WHERE pid > 0 GROUP BY pid) AS latest "
    "CROSS JOIN processes ON processes.pid = latest.pid UNION ALL "
    f"SELECT page.place, 1, {', '.join(f'tombstones.{column}' for column in TOMBSTONE.split(', '))}{', NULL' * 10} "
    "FROM page CROSS JOIN tombstones ON tombstones.place = page.place WHERE page.pid = 0 ORDER BY 1"
)
"""The same, each after the place of its last change on a page of the feed."""
STATUSES: tuple[ProcessStatus, ...] = ("completed", "failed", "cancelled", "abandoned", "caller_departed")
"""How a process may have ended, by its number in `tombstones`: on disk, so it is only ever added to."""
SPENT = "SELECT max(sequence) FROM events WHERE pid = 0"
"""The highest number of a process that was pruned. One row of `events` belongs to no process: that of the last pruning.
Its place and its sequence keep those numbers from being given out again."""
PROCESS_BY_PID = f"SELECT {PROCESS_ROW} FROM processes WHERE pid = ?"
NEXT_PID = f"max((SELECT coalesce(max(pid), 0) FROM processes), coalesce(({SPENT}), 0)) + 1"
ADD_PROCESS = f"INSERT INTO processes ({PROCESS}) VALUES ({NEXT_PID}{', ?' * 15})"
PUT_PROCESS = (
    "UPDATE processes SET live = ?, active = ?, due = ?, updated = ?, owner = ?, generation = ?, attempts = ?, "
    "takeovers = ?, stuck = ?, pruned = ?, crc = ?, record = ? WHERE pid = ?"
)
PUT_GOING_ON = PUT_PROCESS.replace("live = ?, active = ?, due = ?, ", "")
"""The same for one that goes on as before: what is not named here costs its indexes nothing."""
ACTIVE = f"SELECT {PROCESS_ROW} FROM processes INDEXED BY processes_live WHERE live = 1 AND active = 1"
UNOWNED = f"{ACTIVE} AND owner IS NULL AND pid > ? ORDER BY pid LIMIT ?"
DUE = (
    f"SELECT {PROCESS_ROW} FROM processes INDEXED BY processes_due "
    "WHERE due IS NOT NULL AND due <= ? ORDER BY due, pid LIMIT ? OFFSET ?"
)
CHILDREN = f"SELECT {PROCESS_ROW} FROM processes WHERE parent = ? AND live = 1 ORDER BY pid"
ALL_CHILDREN = f"SELECT {PROCESS_ROW} FROM processes WHERE parent = ? AND pruned IS NULL ORDER BY pid"
PRUNABLE = (
    f"SELECT {PROCESS_ROW} FROM processes INDEXED BY processes_over "
    "WHERE live = 0 AND pruned IS NULL AND updated < ? ORDER BY updated, pid"
)
STATE = (
    "CASE WHEN stuck IS NOT NULL THEN 'stuck' WHEN active = 1 AND owner IS NULL THEN 'queued' "
    "ELSE coalesce(json_extract(CAST(record AS TEXT), '$.status'), 'running') END"
)
"""`ProcessRow.state`."""
ADD_EVENT = "INSERT INTO events (pid, sequence, key, crc, body) VALUES (?, ?, ?, ?, ?)"
ADD_STEP = "INSERT INTO steps (place, crc, body) VALUES (?, ?, ?)"
STEPS = "SELECT place, crc, body FROM steps WHERE place BETWEEN ? AND ? ORDER BY place"

MAX_STEPS = 2**28 - 1
MAX_PID = 2**35 - 1

decode_registration = msgspec.json.Decoder(Registration).decode
decode_record = msgspec.json.Decoder(ProcessRecord).decode
decode_event = msgspec.json.Decoder(Event).decode


def step_place(pid: int, ordinal: int) -> int:
    """A record's place in the tree of all journals. Not a refusal of ours: the whole transaction must go."""
    if pid > MAX_PID or ordinal > MAX_STEPS:
        raise OverflowError(
            f"a file holds {MAX_PID:,} processes with {MAX_STEPS:,} records each, and this is record {ordinal} of "
            f"process number {pid}: use `ctx.checkpoint` in functions that never end"
        )
    return pid << 28 | ordinal


def body_crc(body: bytes, *where: int) -> int:
    """A checksum of a body at its place: one that turns up elsewhere does not match, nor does one that became text."""
    return zlib.crc32(body, seal(where)) if type(body) is bytes else -1


def process_row(found: tuple[Any, ...]) -> ProcessRow:
    pid, *values, crc, record, registration = found
    if registration is None or row_crc(values, record) != crc:
        raise sqlite3.DatabaseError("malformed row of processes: it does not match its checksum")
    body = opened("registrations", pid, registration)
    return ProcessRow(pid, decode_registration(body), decode_record(record), *values[6:])


def process_or_tombstone(found: tuple[Any, ...]) -> ProcessRow:
    return tombstone_row(found[1:8]).row if found[0] else process_row(found[1:])


def tombstone_row(found: tuple[Any, ...]) -> Tombstone:
    process_id, pid, status, pruned, digest, _place = unsealed("tombstones", found)
    return Tombstone(process_id, pid, STATUSES[status], pruned, digest)


def row_crc(values: list[Any], record: bytes) -> int:
    """A checksum of a process but for its number, which SQLite chooses after the row was sealed."""
    return zlib.crc32(record, seal(tuple(values))) if type(record) is bytes else -1


def event_row(found: tuple[Any, ...]) -> tuple[int, int, int, Event]:
    """Place, process number, sequence and event."""
    place, pid, sequence, key, crc, body = found
    if body_crc(body, pid, sequence) != crc or (event := decode_event(body)).key != key:
        raise sqlite3.DatabaseError(f"malformed row of events: event {sequence} does not match its checksum")
    return place, pid, sequence, event


def step_row(found: tuple[int, int, bytes]) -> tuple[int, bytes]:
    """Ordinal and body."""
    place, crc, body = found
    if body_crc(body, place) != crc:
        raise sqlite3.DatabaseError(f"malformed row of steps: record {place & MAX_STEPS} does not match its checksum")
    return place & MAX_STEPS, body


def wake_row(found: tuple[Any, ...]) -> WakeRow:
    return WakeRow(*unsealed("wakes", found))


def bad_rows(connection: sqlite3.Connection) -> list[str]:
    """What is kept of processes and is not what was written."""
    problems: list[str] = []
    for query, read in (
        (f"SELECT {PROCESS_ROW} FROM processes", process_row),
        (f"SELECT {EVENT} FROM events", event_row),
        ("SELECT place, crc, body FROM steps", step_row),
        (f"SELECT {WAKE} FROM wakes", wake_row),
        (f"SELECT {TOMBSTONE} FROM tombstones", tombstone_row),
    ):
        try:
            problems += [bad for found in connection.execute(query) if (bad := _problem(read, found))]
        except sqlite3.Error as error:  # not even to be had: text that is none
            problems.append(str(error))
    return problems


def _problem(read: Callable[[Any], object], found: tuple[Any, ...]) -> str:
    try:
        read(found)
    except (sqlite3.DatabaseError, ValueError) as error:  # ValueError: a body that is no JSON
        return f"{error} (number {found[0]})"
    return ""


def process_filter(wanted: ProcessFilter) -> tuple[str, list[Any]]:
    """The rest of a SELECT from processes, and its arguments."""
    clauses, args = ["pruned IS NULL"], list[Any]()
    if wanted.status:
        clauses.append(f"{STATE} IN ({', '.join('?' * len(wanted.status))})")
        args += wanted.status
    if wanted.live is not None:
        clauses.append(f"live = {int(wanted.live)}")  # spelt out: only so is the index of live ones used
    for clause, value in (
        (f"{_asked('kind')} = ?", wanted.kind),
        (f"{_asked('name')} = ?", wanted.name),
        (f"{_asked('definition')} = ?", wanted.definition),
        (f"{_asked('label')} = ?", wanted.label),
        (f"{_asked('origin.session_id')} = ?", wanted.origin),
        (f"{_asked('cause.id')} = ?", wanted.cause),
        ("pid IN (SELECT pid FROM grants WHERE session_id = ?)", wanted.session_id),
        ("parent = ?", wanted.parent),
        ("created >= ?", wanted.since),
        ("created < ?", wanted.until),
        ("pid < ?", wanted.before),
        ("(stuck IS NOT NULL) = ?", wanted.stuck),
    ):
        if value is not None:
            clauses.append(clause)
            args.append(value)
    return f"processes WHERE {' AND '.join(clauses)} ORDER BY pid DESC LIMIT ?", [*args, max(0, wanted.limit)]


def _asked(path: str) -> str:
    return f"coalesce(json_extract(CAST(substr({REGISTRATION}, 5) AS TEXT), '$.{path}'), '')"


class SqlProcessRows:
    """The part of a transaction that is about processes.

    What this connection has written is remembered, until anybody else commits or a transaction is undone: rows that
    somebody owns, by number; how far their journals go; and the ids of new ones that nobody waits for or is a child of.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._do = connection.execute
        self._processes: dict[int, ProcessRow] = {}
        self._last_steps: dict[int, int] = {}
        self._alone: set[str] = set()

    @property
    def remembered(self) -> int:
        return max(len(self._processes), len(self._alone))

    def forget_processes(self) -> None:
        self._processes.clear()
        self._last_steps.clear()
        self._alone.clear()

    def _remember_process(self, row: ProcessRow) -> None:
        if row.owner is not None:
            self._processes[row.pid] = row
            return
        self._processes.pop(row.pid, None)
        self._last_steps.pop(row.pid, None)

    def process(self, process_id: str) -> ProcessRow | None:
        found = self._do(PROCESS_BY_ID, (process_id,)).fetchone()
        return None if found is None else process_or_tombstone(found)

    def tombstone(self, process_id: str) -> Tombstone | None:
        found = self._do(TOMBSTONE_BY_ID, (process_id,)).fetchone()
        return None if found is None else tombstone_row(found)

    def process_by_pid(self, pid: int) -> ProcessRow | None:
        known = self._processes.get(pid)
        if known is not None:
            return known
        found = self._do(PROCESS_BY_PID, (pid,)).fetchone()
        return None if found is None else process_row(found)

    def add_process(self, row: ProcessRow) -> ProcessRow:
        values, record = _values(row), encode(row.record)
        pid = self._do(ADD_PROCESS, (*values, row_crc(values, record), record)).lastrowid
        assert pid is not None
        self._do("INSERT INTO registrations (pid, body) VALUES (?, ?)", (pid, sealed(pid, encode(row.registration))))
        row = replace(row, pid=pid)
        self._remember_process(row)
        if not row.id.rpartition(".")[2].isdecimal():  # a turn may be called so, and may have children
            self._alone.add(row.id)
        if row.registration.parent is not None:
            self._alone.discard(row.registration.parent)
        if row.owner is not None:
            self._last_steps[pid] = -1
        return row

    def put_process(self, row: ProcessRow) -> None:
        before = self._processes.get(row.pid)
        self._remember_process(row)
        values, record = _values(row), encode(row.record)
        # Neither its id nor its parent nor its birth ever changes while it is retained.
        changing = (values[5], *values[7:], row_crc(values, record), record, row.pid)
        if before is not None and values[1:4] == [before.live, before.active, before.due]:
            self._do(PUT_GOING_ON, changing)
        else:
            self._do(PUT_PROCESS, (*values[1:4], *changing))

    def entomb(self, tombstone: Tombstone) -> None:
        pid = tombstone.pid
        place = self._do("SELECT max(place) + 1 FROM events").fetchone()[0]
        spent = max(self._do(SPENT).fetchone()[0] or 0, pid)
        values = (tombstone.id, pid, STATUSES.index(tombstone.status), tombstone.pruned, tombstone.digest, place)
        self._do(f"INSERT INTO tombstones ({TOMBSTONE}) VALUES (?{', ?' * 6})", (*values, seal(values)))
        self._processes.pop(pid, None)
        self._last_steps.pop(pid, None)
        self._do("DELETE FROM events WHERE pid IN (0, ?)", (pid,))
        body = encode(Event(PRUNED, at=tombstone.pruned))
        last = (place, 0, spent, None, body_crc(body, 0, spent), body)
        self._do(f"INSERT INTO events ({EVENT}) VALUES (?{', ?' * 5})", last)
        for table in ("processes", "registrations", "awaits", "grants", "wakes"):
            self._do(f"DELETE FROM {table} WHERE pid = ?", (pid,))
        self._do("DELETE FROM blobs WHERE sid = ?", (-pid,))
        self.drop_steps(pid, MAX_STEPS)

    def children(self, parent: str, over: bool = False) -> list[ProcessRow]:
        query = ALL_CHILDREN if over else CHILDREN
        return [] if parent in self._alone else [process_row(r) for r in self._do(query, (parent,))]

    def processes_of(self, worker_id: str) -> list[ProcessRow]:
        return [process_row(r) for r in self._do(f"{ACTIVE} AND owner = ? ORDER BY pid", (worker_id,))]

    def has_live_processes(self, session_id: str) -> bool:
        query = "SELECT 1 FROM grants JOIN processes USING (pid) WHERE session_id = ? AND live = 1 LIMIT 1"
        return self._do(query, (session_id,)).fetchone() is not None

    def prunable(self, before: int) -> Iterator[ProcessRow]:
        """Those that are over since before then, the first to end first."""
        return map(process_row, self._do(PRUNABLE, (before,)))

    # ------------------------------------------------------------------ events and journals

    def add_event(self, pid: int, sequence: int, event: Event) -> int:
        body = encode(event)
        place = self._do(ADD_EVENT, (pid, sequence, event.key, body_crc(body, pid, sequence), body)).lastrowid
        assert place is not None
        return place

    def event_by_key(self, pid: int, key: str) -> tuple[int, Event] | None:
        found = self._do(f"SELECT {EVENT} FROM events WHERE pid = ? AND key = ?", (pid, key)).fetchone()
        return None if found is None else event_row(found)[2:]

    def events_after(self, pid: int, sequence: int) -> list[Event]:
        found = self._do(f"SELECT {EVENT} FROM events WHERE pid = ? AND sequence > ?", (pid, sequence))
        return [event_row(r)[3] for r in found]

    def last_event(self, pid: int) -> int:
        query = "SELECT place FROM events WHERE pid = ? ORDER BY sequence DESC LIMIT 1"
        return int(self._do(query, (pid,)).fetchone()[0])

    def step(self, pid: int, ordinal: int) -> bytes | None:
        found = self._do("SELECT body FROM steps WHERE place = ?", (step_place(pid, ordinal),)).fetchone()
        return None if found is None else found[0]

    def last_step(self, pid: int) -> int:
        """The number of the last record of a journal, -1 where there is none."""
        known = self._last_steps.get(pid)
        if known is not None:
            return known
        span = (step_place(pid, 0), step_place(pid, MAX_STEPS))
        found = self._do("SELECT max(place) FROM steps WHERE place BETWEEN ? AND ?", span).fetchone()[0]
        return -1 if found is None else int(found) & MAX_STEPS

    def add_step(self, pid: int, ordinal: int, body: bytes) -> None:
        where = step_place(pid, ordinal)
        self._do(ADD_STEP, (where, body_crc(body, where), body))
        self._last_steps[pid] = ordinal

    def drop_steps(self, pid: int, before: int) -> None:
        self._do("DELETE FROM steps WHERE place >= ? AND place < ?", (step_place(pid, 0), step_place(pid, before)))

    # ------------------------------------------------------------------ who waits, who sees, who is told

    def awaiting(self, process_id: str) -> list[int]:
        if process_id in self._alone:
            return []
        return [r[0] for r in self._do("SELECT pid FROM awaits WHERE target = ? ORDER BY pid", (process_id,))]

    def put_awaits(self, pid: int, process_ids: tuple[str, ...]) -> None:
        self._alone.difference_update(process_ids)
        for process_id in process_ids:
            self._do("INSERT OR IGNORE INTO awaits (target, pid) VALUES (?, ?)", (process_id, pid))

    def drop_awaits(self, pid: int) -> None:
        self._do("DELETE FROM awaits WHERE pid = ?", (pid,))

    def granted(self, session_id: str, pid: int) -> bool:
        query = "SELECT 1 FROM grants WHERE session_id = ? AND pid = ?"
        return self._do(query, (session_id, pid)).fetchone() is not None

    def put_grant(self, session_id: str, pid: int) -> None:
        self._do("INSERT OR IGNORE INTO grants (session_id, pid) VALUES (?, ?)", (session_id, pid))

    def drop_grant(self, session_id: str, pid: int) -> None:
        self._do("DELETE FROM grants WHERE session_id = ? AND pid = ?", (session_id, pid))

    def drop_grants(self, session_id: str) -> None:
        self._do("DELETE FROM grants WHERE session_id = ?", (session_id,))

    def live_named(self, session_id: str, name: str) -> list[ProcessRow]:
        query, args = process_filter(ProcessFilter(name=name, session_id=session_id, live=True, limit=2**31))
        return [process_row(found) for found in self._do(f"SELECT {PROCESS_ROW} FROM {query}", args)]

    def add_wake(self, row: WakeRow) -> None:
        values = msgspec.structs.astuple(row)
        self._do(f"INSERT INTO wakes ({WAKE}) VALUES (?{', ?' * 10})", (*values, seal(values)))

    def wake(self, number: int) -> WakeRow | None:
        found = self._do(f"SELECT {WAKE} FROM wakes WHERE number = ?", (number,)).fetchone()
        return None if found is None else wake_row(found)

    def put_wake(self, row: WakeRow) -> None:
        self._do(
            "UPDATE wakes SET session_id = ?, policy = ?, at = ?, state = ?, turn = ?, reason = ?, crc = ? "
            "WHERE number = ?",
            (
                row.session_id, row.policy, row.at, row.state, row.turn, row.reason,
                seal(msgspec.structs.astuple(row)), row.number,
            ),
        )  # fmt: skip

    def pending_wakes(self, pid: int) -> list[WakeRow]:
        query = f"SELECT {WAKE} FROM wakes WHERE pid = ? AND state = 'pending' ORDER BY number"
        return [wake_row(r) for r in self._do(query, (pid,))]

    def pending_wakes_for(self, session_id: str) -> list[WakeRow]:
        query = f"SELECT {WAKE} FROM wakes WHERE session_id = ? AND state = 'pending' ORDER BY number"
        return [wake_row(r) for r in self._do(query, (session_id,))]


def _values(row: ProcessRow) -> list[Any]:
    """The columns of a process, but for its number, its checksum and its record."""
    return [
        row.id, int(row.live), int(row.active), row.due, row.registration.parent, row.record.updated, row.created,
        row.owner, row.generation, row.attempts, row.takeovers, row.stuck, row.pruned,
    ]  # fmt: skip
