"""The rows of a SQLite store as text and bytes: columns, statements that read them, checksums, and how a row becomes a
struct. SQLite notices a damaged page only where its structure suffers, so a checksum is kept beside every row."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.model.ids import MAX_ORDINAL, MAX_TURN
from perdure.model.limit import Account, Reservation
from perdure.model.llm import Usage
from perdure.model.process import (
    Event,
    ProcessRecord,
    ProcessRow,
    ProcessStatus,
    Registration,
    Tombstone,
    WakeRow,
)
from perdure.model.session import Deaths, Fork, InboxRow, Offers, SessionRow, WaitRow, WorkerRow
from perdure.model.spending import UsageFilter, UsageRow
from perdure.model.write import ProcessFilter, SessionFilter
from perdure.stores.rules.filters import where


def row_checksum(values: tuple[Any, ...]) -> int:
    """A checksum of a row's values, kept beside them."""
    return zlib.crc32(repr(values).encode())


def checked(table: str, found: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a row; refused when they are not those that were written."""
    if row_checksum(found[:-1]) != found[-1]:
        raise sqlite3.DatabaseError(f"malformed row of {table}: it does not match its checksum")
    return found[:-1]


def with_checksum(number: int, body: bytes) -> bytes:
    """A body as it is stored: after a checksum that belongs to the row of this number."""
    return zlib.crc32(body, number & 0xFFFFFFFF).to_bytes(4, "big") + body


def without_checksum(table: str, number: int, body: bytes) -> bytes:
    """A body as it was before; refused when it is not what was written."""
    if type(body) is not bytes or type(number) is not int or with_checksum(number, body[4:]) != body:
        raise sqlite3.DatabaseError(f"malformed row of {table}: it does not match its checksum")
    return body[4:]


# ---------------------------------------------------------------------- sessions


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
ADD_SESSION = f"INSERT INTO sessions ({SESSION}, listed) VALUES (?{', ?' * 19})"
NEXT_SID = "SELECT coalesce(max(sid), 0) + 1 FROM sessions"
KEY = "SELECT sid, key, turn, digest, crc FROM keys WHERE sid = (SELECT sid FROM sessions WHERE id = ?) AND key = ?"
PUT_SESSION = (
    "UPDATE sessions SET head = ?, next = ?, turn = ?, state = ?, owner = ?, generation = ?, takeovers = ?, "
    "cancel = ?, reason = ?, fork_sid = ?, fork_turn = ?, fork_ordinal = ?, updated = ?, deleted = ?, crc = ? "
    "WHERE sid = ?"
)
PUT_LISTED = PUT_SESSION.replace(" WHERE", ", listed = ? WHERE")
"""The same for one whose place in listings has changed too: what is not named costs its index nothing."""
FIRST_MAIL = f"SELECT {MAIL} FROM inbox WHERE sid = ? AND kind != 'note' {{}} ORDER BY input LIMIT 1"
SOME_MAIL = (
    "SELECT EXISTS (SELECT 1 FROM inbox WHERE sid = ?), "
    "EXISTS (SELECT 1 FROM inbox WHERE sid = ? AND kind != 'queue' {})"
)
ADD_NODE = "INSERT OR IGNORE INTO nodes (place, crc, body) VALUES (?, ?, ?)"
NODES = "SELECT place, crc, body FROM nodes WHERE place BETWEEN ? AND ? ORDER BY place"
NODE = "SELECT place, crc, body FROM nodes WHERE place = ?"
LAST_NODE = f"{NODES} DESC LIMIT 1"
NEWEST_DUMP = "SELECT place, digest, body FROM dumps WHERE place BETWEEN ? AND ? ORDER BY place DESC LIMIT 1"

encode_offers = msgspec.json.encode
decode_offers = msgspec.json.Decoder(Offers | None).decode

MAX_SID = 2**27 - 1
LATEST = 2**63 - 1
"""No time is later."""


def node_place(sid: int, turn: int, ordinal: int) -> int:
    """A node's place in the tree of all nodes; ordered as (session, turn, ordinal).

    Not a refusal of ours: rows may have been changed before, so the whole transaction must go.
    """
    if sid > MAX_SID or turn > MAX_TURN or ordinal > MAX_ORDINAL:
        raise OverflowError(
            f"a file holds {MAX_SID:,} sessions of {MAX_TURN:,} inputs with {MAX_ORDINAL:,} records each, "
            f"and this is record {ordinal} of turn {turn} of session number {sid}: fork the session, or begin another"
        )
    return (sid << 36) | (turn << 16) | ordinal


def node_position(place: int) -> tuple[int, int, int]:
    """Session number, turn and ordinal of a place."""
    return place >> 36, (place >> 16) & MAX_TURN, place & MAX_ORDINAL


def node_crc(place: int, body: bytes) -> int:
    """A checksum of a record at its place: one that turns up elsewhere does not match, nor one that became text."""
    if type(body) is not bytes or type(place) is not int:
        return -1
    return zlib.crc32(body, (place ^ place >> 32) & 0xFFFFFFFF)


def turn_ends(connection: sqlite3.Connection, sid: int, turn: int) -> tuple[bytes, bytes] | None:
    """The first and the last record of a turn; None where there is none, or none that is what was written."""
    begin = node_place(sid, turn, 0)
    first = connection.execute(NODE, (begin,)).fetchone()
    last = connection.execute(LAST_NODE, (begin, begin | MAX_ORDINAL)).fetchone()
    if first is None or any(node_crc(place, body) != crc for place, crc, body in (first, last)):
        return None
    return first[2], last[2]


def session_row(found: tuple[Any, ...]) -> SessionRow:
    if row_checksum(found[1:-2]) != found[-2]:  # without the number, which SQLite chose after the row was sealed
        raise sqlite3.DatabaseError("malformed row of sessions: it does not match its checksum")
    (sid, id_, agent, head, next_, turn, state, owner, generation, takeovers, cancel, reason, *rest) = found
    fork_sid, fork_turn, fork_ordinal, created, updated, deleted, _, settings = rest
    fork = None if fork_sid is None else Fork(fork_sid, fork_turn, fork_ordinal)
    return SessionRow(
        sid, id_, agent, head, next_, turn, state, owner, generation, takeovers, cancel, reason, fork,
        created, updated, bool(deleted), b"" if settings is None else without_checksum("settings", sid, settings),
    )  # fmt: skip


def wait_row(found: tuple[Any, ...]) -> WaitRow:
    return WaitRow(*checked("waits", found))


def input_row(found: tuple[Any, ...]) -> InboxRow:
    return InboxRow(*checked("inbox", found))


def worker_row(found: tuple[Any, ...]) -> WorkerRow:
    id_, host, boot, pid, started, beat, term_ms, offers, process, lived, suspect = found
    types = [type(value) for value in (*found[:7], process, lived)]
    if types != [str, str, str, int, int, int, int, str, int] or type(suspect) not in (int, type(None)):
        raise sqlite3.DatabaseError(f"malformed row of workers: {found!r:.200} describes no worker")
    try:
        known = None if offers is None else decode_offers(offers)
    except (msgspec.DecodeError, TypeError) as error:  # a column of another type is none of ours either
        raise sqlite3.DatabaseError(f"malformed row of workers: {error}") from None
    return WorkerRow(id_, host, boot, pid, started, beat, term_ms, known, process, lived, suspect)


def deaths_row(found: tuple[Any, ...]) -> Deaths:
    return Deaths(*checked("deaths", found))


USAGE = "sid, hour, label, model, metadata, session_id, agent, family, usage, crc"
USAGE_AT = f"SELECT {USAGE} FROM usage WHERE sid = ? AND hour = ? AND label = ? AND model = ? AND metadata = ?"
PUT_USAGE = f"INSERT OR REPLACE INTO usage ({USAGE}) VALUES (?{', ?' * 9})"

decode_usage = msgspec.json.Decoder(Usage).decode
decode_family = msgspec.json.Decoder(tuple[str, ...]).decode


def usage_row(found: tuple[Any, ...]) -> UsageRow:
    sid, hour, label, model, metadata, session_id, agent, family, usage = checked("usage", found)
    known = decode_family(family), decode_usage(usage)
    return UsageRow(sid, hour, label, model, metadata, session_id, agent, *known)


ACCOUNT = "name, key, start, spent, reserved, unknown, most, crc"
PUT_ACCOUNT = f"INSERT OR REPLACE INTO accounts ({ACCOUNT}) VALUES (?{', ?' * 7})"
RESERVATION = "sid, name, body"
PUT_RESERVATION = f"INSERT OR REPLACE INTO reservations ({RESERVATION}) VALUES (?, ?, ?)"

decode_reservation = msgspec.json.Decoder(Reservation).decode


def account_row(found: tuple[Any, ...]) -> Account:
    return Account(*checked("accounts", found))


def reservation_row(found: tuple[Any, ...]) -> Reservation:
    sid, name, body = found
    row = decode_reservation(without_checksum("reservations", sid, body))
    if row.name != name or row.sid != sid:
        raise sqlite3.DatabaseError("malformed row of reservations: it belongs to another call")
    return row


def usage_filter(wanted: UsageFilter) -> tuple[str, list[Any]]:
    """The rest of a SELECT from usage, and its arguments: what one comparison can tell. `UsageFilter.fits` does the
    rest."""
    given = [("hour >= ?", wanted.since), ("hour < ?", wanted.until), ("agent = ?", wanted.agent)]
    clauses = [clause for clause, value in given if value is not None]
    kept = f"usage WHERE {' AND '.join(clauses)}" if clauses else "usage"
    return f"{kept} ORDER BY sid, hour, label, model, metadata", [value for _, value in given if value is not None]


def session_values(row: SessionRow) -> tuple[Any, ...]:
    """The columns of a session, but for its number and its checksum."""
    fork = row.fork
    return (
        row.id, row.agent, row.head, row.next, row.turn, row.state, row.owner, row.generation, row.takeovers,
        row.cancel, row.reason, fork and fork.sid, fork and fork.turn, fork and fork.ordinal, row.created,
        row.updated, int(row.deleted),
    )  # fmt: skip


# ---------------------------------------------------------------------- processes


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
NEXT_PID = f"SELECT max((SELECT coalesce(max(pid), 0) FROM processes), coalesce(({SPENT}), 0)) + 1"
NEXT_PLACE = "SELECT coalesce(max(place), 0) + 1 FROM events"
ADD_PROCESS = f"INSERT INTO processes ({PROCESS}) VALUES (?{', ?' * 15})"
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
    "WHERE live = 0 AND pruned IS NULL AND updated < ? AND (updated, pid) > (?, ?) ORDER BY updated, pid LIMIT ?"
)
STATE = (
    "CASE WHEN stuck IS NOT NULL THEN 'stuck' WHEN active = 1 AND owner IS NULL THEN 'queued' "
    "ELSE coalesce(json_extract(CAST(record AS TEXT), '$.status'), 'running') END"
)
"""`ProcessRow.state`."""
ADD_EVENT = "INSERT INTO events (place, pid, sequence, key, crc, body) VALUES (?, ?, ?, ?, ?, ?)"
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
    return zlib.crc32(body, row_checksum(where)) if type(body) is bytes else -1


def process_row(found: tuple[Any, ...]) -> ProcessRow:
    pid, *values, crc, record, registration = found
    if registration is None or row_crc(values, record) != crc:
        raise sqlite3.DatabaseError("malformed row of processes: it does not match its checksum")
    body = without_checksum("registrations", pid, registration)
    return ProcessRow(pid, decode_registration(body), decode_record(record), *values[6:])


def process_or_tombstone(found: tuple[Any, ...]) -> ProcessRow:
    return tombstone_row(found[1:8]).row if found[0] else process_row(found[1:])


def tombstone_row(found: tuple[Any, ...]) -> Tombstone:
    process_id, pid, status, pruned, digest, _place = checked("tombstones", found)
    return Tombstone(process_id, pid, STATUSES[status], pruned, digest)


def row_crc(values: list[Any], record: bytes) -> int:
    """A checksum of a process but for its number, which SQLite chooses after the row was sealed."""
    return zlib.crc32(record, row_checksum(tuple(values))) if type(record) is bytes else -1


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
    return WakeRow(*checked("wakes", found))


def bad_nodes(connection: sqlite3.Connection) -> list[str]:
    """Records of turns that are not what was written."""
    return [
        "record {2} of turn {1} of session number {0} does not match its checksum".format(*node_position(place))
        for place, crc, body in connection.execute("SELECT place, crc, body FROM nodes")
        if node_crc(place, body) != crc
    ]


def bad_rows(connection: sqlite3.Connection) -> list[str]:
    """What is kept of processes, or is listed of sessions, and is not what was written."""
    problems: list[str] = []
    for query, read in (
        (f"SELECT {PROCESS_ROW} FROM processes", process_row),
        (f"SELECT {EVENT} FROM events", event_row),
        ("SELECT place, crc, body FROM steps", step_row),
        (f"SELECT {WAKE} FROM wakes", wake_row),
        (f"SELECT {TOMBSTONE} FROM tombstones", tombstone_row),
        (f"SELECT {USAGE} FROM usage", usage_row),
        (f"SELECT {ACCOUNT} FROM accounts", account_row),
        (f"SELECT {RESERVATION} FROM reservations", reservation_row),
        ("SELECT sid FROM sessions WHERE listed IS NOT iif(deleted, 0, (updated >> 13) + 1)", _misplaced),
    ):
        try:
            problems += [bad for found in connection.execute(query) if (bad := _problem(read, found))]
        except sqlite3.Error as error:  # not even to be had: text that is none
            problems.append(str(error))
    return problems


def _misplaced(_: tuple[int]) -> None:
    raise sqlite3.DatabaseError("malformed row of sessions: it is listed where it does not belong")


def _problem(read: Callable[[Any], object], found: tuple[Any, ...]) -> str:
    try:
        read(found)
    except (sqlite3.DatabaseError, ValueError) as error:  # ValueError: a body that is no JSON
        return f"{error} (number {found[0]})"
    return ""


def listed(updated: int, deleted: bool) -> int:
    """The period of a session's last change, of 8,192 ms: what listings are in order of first. 0 once it is deleted."""
    return 0 if deleted else (updated >> 13) + 1


FEW = 2_000
"""Sessions that are read and sorted for one page, or looked through for it."""


def find_sessions(live: sqlite3.Connection, wanted: SessionFilter) -> list[Any]:
    """The rows of sessions.

    Sessions with labels are found by the rarest of these, and sorted. Where even that one is common, so that sorting
    would read much of the store, the newest sessions are looked through in order first: most pages are full by then.
    """

    def rows(label: tuple[str, str] | None, periods: tuple[int, int] | None = None) -> list[Any]:
        rest, args = session_filter(wanted, label, periods)
        return live.execute(f"SELECT {SESSION_ROW} FROM {rest}", args).fetchall()

    if not wanted.metadata or wanted.state not in (None, "idle"):
        return rows(None)
    counts = [live.execute(COUNT_LABEL, (*label, FEW)).fetchone()[0] for label in wanted.metadata]
    rarest = wanted.metadata[counts.index(min(counts))]
    if min(counts) < FEW:
        return rows(rarest)
    first, last = _periods(wanted)
    earlier = live.execute(PERIOD_OF_NTH, (first, last, FEW)).fetchone()
    found = rows(None, (first if earlier is None else earlier[0], last))
    if earlier is None or len(found) == wanted.limit:
        return found
    is_in_index = wanted.agent is not None or wanted.prefix != ""  # then few rows have to be read in order, too
    return rows(None if is_in_index else rarest)


def session_filter(
    wanted: SessionFilter, label: tuple[str, str] | None = None, periods: tuple[int, int] | None = None
) -> tuple[str, list[Any]]:
    """The rest of a SELECT from sessions, and its arguments.

    Numbers are sorted first, and whole rows with their settings read for those on the page: SQLite would read them for
    all that are found. Those with a rare `label` are few, and so are those with an open turn. All others are read in
    order of their `periods` until the page is full: only within a period are they sorted.
    """
    others = tuple([each for each in wanted.metadata if each != label])
    clauses, args = where(replace(wanted, metadata=others), SESSION_COLUMNS)
    order = "updated DESC, sid DESC"
    if label is not None:
        labelled = "SELECT sid FROM labels WHERE key = ? AND value = ?"
        source, first = f"sessions NOT INDEXED WHERE deleted = 0 AND sid IN ({labelled})", order
        args = [*label, *args]
    elif wanted.state not in (None, "idle"):
        source, first = "sessions INDEXED BY sessions_open WHERE turn IS NOT NULL AND deleted = 0", order
    else:
        source = "sessions INDEXED BY sessions_listed WHERE listed BETWEEN {} AND {}".format(
            *periods or _periods(wanted)
        )
        first = f"listed DESC, {order}"
    page = f"SELECT sid FROM {' AND '.join([source, *clauses])} ORDER BY {first} LIMIT ?"
    return f"sessions WHERE sid IN ({page}) ORDER BY {order}", [*args, wanted.limit]


def _periods(wanted: SessionFilter) -> tuple[int, int]:
    """The first and the last period that what is wanted may have changed in."""
    times = [wanted.before, None if wanted.after is None else wanted.after[0]]
    last = min([listed(at, False) for at in times if at is not None], default=listed(LATEST, False))
    return listed(wanted.since or 0, False), last


def process_filter(wanted: ProcessFilter) -> tuple[str, list[Any]]:
    """The rest of a SELECT from processes, and its arguments."""
    clauses, args = where(wanted, PROCESS_COLUMNS)
    kept = " AND ".join(["pruned IS NULL", *clauses])
    return f"processes WHERE {kept} ORDER BY pid DESC LIMIT ?", [*args, max(0, wanted.limit)]


def _asked(path: str) -> str:
    return f"coalesce(json_extract(CAST(substr({REGISTRATION}, 5) AS TEXT), '$.{path}'), '')"


COUNT_LABEL = "SELECT count(*) FROM (SELECT 1 FROM labels WHERE key = ? AND value = ? LIMIT ?)"
PERIOD_OF_NTH = (
    "SELECT listed FROM sessions INDEXED BY sessions_listed WHERE listed BETWEEN ? AND ? "
    "ORDER BY listed DESC LIMIT 1 OFFSET ?"
)
SESSION_COLUMNS = {
    **{name: name for name in ("agent", "state", "id", "updated")},
    "labels": "EXISTS (SELECT 1 FROM labels WHERE key = ? AND value = ? AND labels.sid = sessions.sid)",
    "place": "(updated, sid)",
}
PROCESS_COLUMNS = {
    "state": STATE,
    "live": "live",
    "kind": _asked("kind"),
    "name": _asked("name"),
    "definition": _asked("definition"),
    "label": _asked("label"),
    "origin": _asked("origin.session_id"),
    "cause": _asked("cause.id"),
    "seen by": "pid IN (SELECT pid FROM grants WHERE session_id = ?)",
    "parent": "parent",
    "created": "created",
    "number": "pid",
    "stuck": "(stuck IS NOT NULL)",
}
"""What filters compare (`rules.filters`), as expressions."""


def process_values(row: ProcessRow) -> list[Any]:
    """The columns of a process, but for its number, its checksum and its record."""
    return [
        row.id, int(row.live), int(row.active), row.due, row.registration.parent, row.record.updated, row.created,
        row.owner, row.generation, row.attempts, row.takeovers, row.stuck, row.pruned,
    ]  # fmt: skip
