"""A transaction of a SQLite connection, seen as rows: what the rules read and change."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence, Sized
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.lifecycle.process import PRUNED
from perdure.model.codec import encode
from perdure.model.ids import MAX_ORDINAL, MAX_TURN
from perdure.model.limit import Account, Reservation
from perdure.model.process import Event, ProcessRow, Tombstone, WakeRow
from perdure.model.session import Deaths, InboxRow, SessionRow, WaitRow, WorkerRow
from perdure.model.spending import UsageRow
from perdure.model.write import ProcessFilter
from perdure.stores.rules import rows
from perdure.stores.rules.rows import (
    ALL_CHANGES,
    ALL_READS,
    MOST_DUMPS,
    RowChange,
    TurnRows,
    dumps_of,
    methods,
    waits_of,
)
from perdure.stores.sqlite.records import (
    ACCOUNT,
    ACTIVE,
    ADD_EVENT,
    ADD_NODE,
    ADD_PROCESS,
    ADD_SESSION,
    ADD_STEP,
    ALL_CHILDREN,
    CHILDREN,
    DEATHS,
    EVENT,
    FIRST_MAIL,
    KEY,
    MAIL,
    MAX_STEPS,
    NEXT_PID,
    NEXT_PLACE,
    NEXT_SID,
    OPEN_SESSIONS,
    PROCESS_BY_ID,
    PROCESS_BY_PID,
    PROCESS_COLUMNS,
    PROCESS_ROW,
    PRUNABLE,
    PUT_ACCOUNT,
    PUT_GOING_ON,
    PUT_LISTED,
    PUT_PROCESS,
    PUT_RESERVATION,
    PUT_SESSION,
    PUT_USAGE,
    RESERVATION,
    SESSION_BY_ID,
    SESSION_BY_SID,
    SOME_MAIL,
    SPENT,
    STATUSES,
    TOMBSTONE,
    TOMBSTONE_BY_ID,
    USAGE_AT,
    WAIT,
    WAKE,
    WORKER,
    account_row,
    body_crc,
    checked,
    deaths_row,
    encode_offers,
    event_row,
    input_row,
    listed,
    node_crc,
    node_place,
    process_filter,
    process_or_tombstone,
    process_row,
    process_values,
    reservation_row,
    row_checksum,
    row_crc,
    session_row,
    session_values,
    step_place,
    tombstone_row,
    usage_row,
    wait_row,
    wake_row,
    with_checksum,
    worker_row,
)
from perdure.stores.sqlite.search import WordIndex

REMEMBERED = 4096
"""Sessions whose rows are remembered between transactions."""


class Known(Struct):
    """What is known of a session that a worker owns. `inputs`, `waits`: whether it may have any.

    `records` is how many records turn `turn` has; 0 is no turn.
    """

    row: SessionRow
    inputs: bool = True
    waits: bool = True
    turn: int = 0
    records: int = 0


def _but_for(numbers: tuple[int, ...]) -> str:
    """A clause that excludes inputs which are delivered by the same write."""
    return f"AND input NOT IN ({', '.join('?' * len(numbers))})" if numbers else ""


class SqlRows:
    """A transaction of a SQLite connection, seen as rows (`rules.rows.Rows`). It answers at once.

    The owner of a turn writes to it again and again, and every write begins with the session's row. What this
    connection has written is therefore remembered, until anybody else commits anything or a transaction is undone: rows
    of sessions and processes that a worker owns, by number; where sessions are listed; how far journals go; the ids of
    new processes that no process waits for or is a child of; the sums of what sessions have spent, and of what counts
    against limits; all reservations of a session, by name; and the next numbers of new rows.
    """

    def __init__(self, connection: sqlite3.Connection, has_blob: Callable[[str], bool]) -> None:
        self._do = connection.execute
        self._known: dict[int, Known] = {}
        self._listed: dict[int, int] = {}
        self._processes: dict[int, ProcessRow] = {}
        self._last_steps: dict[int, int] = {}
        self._alone: set[str] = set()
        self._usage: dict[tuple[int, int, str, str, str], UsageRow] = {}
        self._accounts: dict[tuple[str, str], Account] = {}
        self._reservations: dict[int, dict[str, Reservation]] = {}
        self._numbers: dict[str, int] = {}
        self._version = -1
        self._has_blob = has_blob
        self.index: WordIndex | None = None
        self.readers = READERS
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
        if changed or any(len(each) > REMEMBERED for each in self._bounded()):
            self.forget()
            self._version = version
        return changed

    def _bounded(self) -> tuple[Sized, ...]:
        return self._listed, self._processes, self._alone, self._usage, self._accounts, self._reservations

    def forget(self) -> None:
        self._known.clear()
        self._listed.clear()
        self._processes.clear()
        self._last_steps.clear()
        self._alone.clear()
        self._usage.clear()
        self._accounts.clear()
        self._reservations.clear()
        self._numbers.clear()

    async def flush(self, changes: Sequence[RowChange]) -> None:
        self.make(changes)

    def make(self, changes: Sequence[RowChange]) -> None:
        for change in changes:
            CHANGERS[type(change)](self, change)

    def _next(self, name: str, query: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._do(query).fetchone()[0]
        return number

    def _remember(self, row: SessionRow, new: bool = False) -> None:
        if row.owner is None:
            self._known.pop(row.sid, None)
        elif (known := self._known.get(row.sid)) is not None:
            known.row = row
        else:
            self._known[row.sid] = Known(row, inputs=not new, waits=not new)

    def _one(self, sql: str, *args: Any) -> Any:
        return self._do(sql, args).fetchone()

    # ------------------------------------------------------------------ sessions

    async def session_by_id(self, read: rows.SessionById) -> SessionRow | None:
        found = self._do(SESSION_BY_ID, (read.session_id,)).fetchone()
        if found is None:
            return None
        row = session_row(found)
        self._listed[row.sid] = listed(row.updated, row.deleted)
        return row

    async def session_by_sid(self, read: rows.SessionBySid) -> SessionRow | None:
        known = self._known.get(read.sid)
        if known is not None:
            return known.row
        found = self._do(SESSION_BY_SID, (read.sid,)).fetchone()
        if found is None:
            return None
        row = session_row(found)
        self._listed[row.sid] = listed(row.updated, row.deleted)
        self._remember(row)
        return row

    async def owned_turn(self, read: rows.OwnedTurn) -> TurnRows:
        sid, turn, besides = read.sid, read.turn, read.besides
        known = self._known.get(sid)
        row = known.row if known is not None else await self.session_by_sid(rows.SessionBySid(sid))
        if row is None:
            return TurnRows(None)
        known = self._known.get(sid) or Known(row)  # one without an owner is not remembered
        if known.turn == turn:
            records = known.records
        else:
            span = (node_place(sid, turn, 0), node_place(sid, turn, MAX_ORDINAL))
            last = self._do("SELECT max(place) FROM nodes WHERE place BETWEEN ? AND ?", span).fetchone()[0]
            records = 0 if last is None else (int(last) & MAX_ORDINAL) + 1
        if not known.inputs:
            return TurnRows(row, records, waits=known.waits)
        some, for_the_turn = self._one(SOME_MAIL.format(_but_for(besides)), sid, sid, *besides)
        known.inputs = bool(some)
        following = self._one(FIRST_MAIL.format(_but_for(besides)), sid, *besides) if some else None
        return TurnRows(
            row, records, bool(for_the_turn), None if following is None else input_row(following), known.waits
        )

    async def next_sid(self, _: rows.NextSid) -> int:
        return self._next("sid", NEXT_SID)

    def add_session(self, change: rows.AddSession) -> None:
        row = change.row
        values = session_values(row)
        place = self._listed[row.sid] = listed(row.updated, row.deleted)
        self._do(ADD_SESSION, (row.sid, *values, row_checksum(values), place))
        self._numbers["sid"] = row.sid + 1
        self._reservations[row.sid] = {}
        self._remember(row, new=True)

    def put_session(self, change: rows.PutSession) -> None:
        row = change.row
        self._remember(row)
        values = session_values(row)
        # Neither the id nor the agent nor the birth of a session ever changes.
        changing = (*values[2:14], *values[15:], row_checksum(values))
        place = listed(row.updated, row.deleted)
        if place == self._listed.get(row.sid):
            self._do(PUT_SESSION, (*changing, row.sid))
        else:
            self._listed[row.sid] = place
            self._do(PUT_LISTED, (*changing, place, row.sid))

    def put_settings(self, change: rows.PutSettings) -> None:
        self._do(
            "INSERT OR REPLACE INTO settings (sid, body) VALUES (?, ?)",
            (change.sid, with_checksum(change.sid, change.settings)),
        )

    def put_labels(self, change: rows.PutLabels) -> None:
        self._do("DELETE FROM labels WHERE sid = ?", (change.sid,))
        for key, value in sorted(change.labels):
            self._do("INSERT INTO labels (key, value, sid) VALUES (?, ?, ?)", (key, value, change.sid))

    async def sessions_owned_by(self, read: rows.SessionsOwnedBy) -> list[SessionRow]:
        return [session_row(r) for r in self._do(f"{OPEN_SESSIONS} AND owner = ?", (read.worker_id,))]

    async def forks_of(self, read: rows.ForksOf) -> int:
        return int(self._one("SELECT count(*) FROM sessions WHERE fork_sid = ?", read.sid)[0])

    # ------------------------------------------------------------------ keys, nodes, blobs

    async def input_by_key(self, read: rows.InputByKey) -> tuple[int, bytes] | None:
        found = self._one(KEY, read.session_id, read.key)
        if found is None:
            return None
        _, _, turn, digest = checked("keys", found)
        return turn, digest

    def put_key(self, change: rows.PutKey) -> None:
        values = (change.sid, change.key, change.turn, change.digest)
        self._do(
            "INSERT INTO keys (sid, key, turn, digest, crc) VALUES (?, ?, ?, ?, ?)", (*values, row_checksum(values))
        )

    async def node_at(self, read: rows.NodeAt) -> bytes | None:
        found = self._one("SELECT body FROM nodes WHERE place = ?", node_place(read.sid, read.turn, read.ordinal))
        return None if found is None else found[0]

    def add_node(self, change: rows.AddNode) -> None:
        turn = change.turn
        where = node_place(change.sid, turn, change.ordinal)
        crc = node_crc(where, change.body)
        if self._do(ADD_NODE, (where, crc, change.body)).rowcount == 1:
            self.last = (where, crc)
            if self.index is not None:
                self.index.add(where, change.body)
            known = self._known.get(change.sid)
            if known is not None and known.row.turn == turn:
                known.turn, known.records = turn, change.ordinal + 1

    def put_node(self, change: rows.PutNode) -> None:
        where = node_place(change.sid, change.turn, change.ordinal)
        crc = node_crc(where, change.body)
        self._do("UPDATE nodes SET crc = ?, body = ? WHERE place = ?", (crc, change.body, where))
        self.last, self.rewrote = (where, crc), True
        if self.index is not None:
            self.index.replace(where, change.body)

    def drop_session_data(self, change: rows.DropSessionData) -> None:
        sid = change.sid
        self.last, self.rewrote = (0, 0), True
        self._do("DELETE FROM nodes WHERE place BETWEEN ? AND ?", (sid << 36, ((sid + 1) << 36) - 1))
        for table in ("inbox", "keys", "blobs", "settings", "labels"):
            self._do(f"DELETE FROM {table} WHERE sid = ?", (sid,))
        if self.index is not None:
            self.index.drop_session(sid)

    def refer_to_blobs(self, change: rows.ReferToBlobs) -> None:
        for digest in change.digests:
            self._do("INSERT OR IGNORE INTO blobs (digest, sid) VALUES (?, ?)", (digest, change.sid))

    async def has_blob(self, read: rows.HasBlob) -> bool:
        return self._has_blob(read.digest)

    # ------------------------------------------------------------------ inbox

    async def has_inputs(self, read: rows.HasInputs) -> bool:
        return self._one("SELECT 1 FROM inbox WHERE sid = ? LIMIT 1", read.sid) is not None

    async def input_at(self, read: rows.InputAt) -> InboxRow | None:
        found = self._one(f"SELECT {MAIL} FROM inbox WHERE sid = ? AND input = ?", read.sid, read.number)
        return None if found is None else input_row(found)

    def put_input(self, change: rows.PutInput) -> None:
        row = change.row
        if (known := self._known.get(row.sid)) is not None:
            known.inputs = True
        values = (row.sid, row.input, row.kind, row.cancel)
        self._do(f"INSERT OR REPLACE INTO inbox ({MAIL}) VALUES (?, ?, ?, ?, ?)", (*values, row_checksum(values)))

    def drop_input(self, change: rows.DropInput) -> None:
        self._do("DELETE FROM inbox WHERE sid = ? AND input = ?", (change.sid, change.number))

    # ------------------------------------------------------------------ waits

    async def wait_by_id(self, read: rows.WaitById) -> WaitRow | None:
        found = self._one(f"SELECT {WAIT} FROM waits WHERE id = ?", read.wait_id)
        return None if found is None else wait_row(found)

    def put_wait(self, change: rows.PutWait) -> None:
        row = change.row
        if (known := self._known.get(row.sid)) is not None:
            known.waits = True
        values = (row.id, row.sid, row.turn, row.call, row.kind, row.state, row.due, row.body, row.answer)
        self._do(
            f"INSERT OR REPLACE INTO waits ({WAIT}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*values, row_checksum(values)),
        )

    def drop_waits(self, change: rows.DropWaits) -> None:
        sid = change.sid
        known = self._known.get(sid)
        if (known is None or known.waits) and self._do("DELETE FROM waits WHERE sid = ?", (sid,)).rowcount:
            self._do("DELETE FROM blobs WHERE sid = ?", (waits_of(sid),))
        if known is not None:
            known.waits = False

    # ------------------------------------------------------------------ dumps

    def put_dump(self, change: rows.PutDump) -> None:
        sid, dump = change.sid, change.dump
        first, last = node_place(sid, 0, 0), node_place(sid, change.turn, 0)
        before = self._one("SELECT digest FROM dumps WHERE place = ?", last)
        if dump.digest is not None:
            self._do("INSERT OR IGNORE INTO blobs (digest, sid) VALUES (?, ?)", (dump.digest, dumps_of(sid)))
        self._do("INSERT OR REPLACE INTO dumps (place, digest, body) VALUES (?, ?, ?)", (last, dump.digest, dump.body))
        if before is None:
            self._do(
                "DELETE FROM dumps WHERE place BETWEEN ?1 AND ?2 AND place NOT IN "
                "(SELECT place FROM dumps WHERE place BETWEEN ?1 AND ?2 ORDER BY place DESC LIMIT ?3)",
                (first, last, MOST_DUMPS),
            )
        if before is None or before[0] is not None:
            self._do(
                "DELETE FROM blobs WHERE sid = ? AND digest NOT IN "
                "(SELECT digest FROM dumps WHERE place BETWEEN ? AND ? AND digest IS NOT NULL)",
                (dumps_of(sid), first, last),
            )

    def drop_dumps(self, change: rows.DropDumps) -> None:
        sid = change.sid
        self._do("DELETE FROM dumps WHERE place BETWEEN ? AND ?", (node_place(sid, 0, 0), node_place(sid, MAX_TURN, 0)))
        self._do("DELETE FROM blobs WHERE sid = ?", (dumps_of(sid),))

    # ------------------------------------------------------------------ what was spent

    def add_usage(self, change: rows.AddUsage) -> None:
        spent = change.spent
        key = spent.sid, spent.hour, spent.label, spent.model, spent.metadata
        known = self._usage.get(key)
        if known is None and (found := self._do(USAGE_AT, key).fetchone()) is not None:
            known = usage_row(found)
        row = spent if known is None else replace(known, usage=known.usage + spent.usage)
        self._usage[key] = row
        values = (*key, row.session_id, row.agent, encode(row.family).decode(), encode(row.usage))
        self._do(PUT_USAGE, (*values, row_checksum(values)))

    async def account_of(self, read: rows.AccountOf) -> Account | None:
        known = self._accounts.get((read.name, read.key))
        if known is not None:
            return known
        found = self._one(f"SELECT {ACCOUNT} FROM accounts WHERE name = ? AND key = ?", read.name, read.key)
        return None if found is None else account_row(found)

    def put_account(self, change: rows.PutAccount) -> None:
        values = msgspec.structs.astuple(change.row)
        self._accounts[change.row.name, change.row.key] = change.row
        self._do(PUT_ACCOUNT, (*values, row_checksum(values)))

    async def reservation_at(self, read: rows.ReservationAt) -> Reservation | None:
        return self._reservations_of(read.sid).get(read.name)

    async def reservations_by_sid(self, read: rows.ReservationsBySid) -> list[Reservation]:
        return [each for _, each in sorted(self._reservations_of(read.sid).items())]

    async def reservations_of(self, read: rows.ReservationsOf) -> list[Reservation]:
        query = "WHERE sid = (SELECT sid FROM sessions WHERE id = ?) ORDER BY name"
        found = self._do(f"SELECT {RESERVATION} FROM reservations {query}", (read.session_id,))
        return [reservation_row(each) for each in found]

    def _reservations_of(self, sid: int) -> dict[str, Reservation]:
        """All of a session. Those of one that was just created are none: nothing is read for its first turn."""
        known = self._reservations.get(sid)
        if known is None:
            found = self._do(f"SELECT {RESERVATION} FROM reservations WHERE sid = ?", (sid,))
            known = self._reservations[sid] = {each.name: each for each in map(reservation_row, found)}
        return known

    async def reservations_owned_by(self, read: rows.ReservationsOwnedBy) -> list[Reservation]:
        found = [
            reservation_row(each) for each in self._do(f"SELECT {RESERVATION} FROM reservations ORDER BY sid, name")
        ]
        return [each for each in found if each.owner == read.worker_id]

    def put_reservation(self, change: rows.PutReservation) -> None:
        row = change.row
        if (known := self._reservations.get(row.sid)) is not None:
            known[row.name] = row
        self._do(PUT_RESERVATION, (row.sid, row.name, with_checksum(row.sid, encode(row))))

    def drop_reservation(self, change: rows.DropReservation) -> None:
        if (known := self._reservations.get(change.sid)) is not None:
            known.pop(change.name, None)
        self._do("DELETE FROM reservations WHERE sid = ? AND name = ?", (change.sid, change.name))

    # ------------------------------------------------------------------ workers

    async def worker_by_id(self, read: rows.WorkerById) -> WorkerRow | None:
        found = self._one(f"SELECT {WORKER} FROM workers WHERE id = ?", read.worker_id)
        return None if found is None else worker_row(found)

    def put_worker(self, change: rows.PutWorker) -> None:
        row = change.row
        self._do(
            f"INSERT OR REPLACE INTO workers ({WORKER}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.id, row.host, row.boot, row.pid, row.started, row.beat, row.term_ms, encode_offers(row.offers),
                row.process, row.lived, row.suspect,
            ),
        )  # fmt: skip

    async def all_workers(self, _: rows.AllWorkers) -> list[WorkerRow]:
        return [worker_row(r) for r in self._do(f"SELECT {WORKER} FROM workers ORDER BY id")]

    async def deaths_of(self, read: rows.DeathsOf) -> Deaths | None:
        found = self._one(f"SELECT {DEATHS} FROM deaths WHERE scope = ?", read.scope)
        return None if found is None else deaths_row(found)

    async def deaths_of_session(self, read: rows.DeathsOfSession) -> Deaths | None:
        query = f"SELECT {DEATHS} FROM deaths WHERE scope = (SELECT sid FROM sessions WHERE id = ?)"
        found = self._one(query, read.session_id)
        return None if found is None else deaths_row(found)

    async def deaths_of_process(self, read: rows.DeathsOfProcess) -> Deaths | None:
        query = f"SELECT {DEATHS} FROM deaths WHERE scope = (SELECT -pid FROM processes WHERE id = ?)"
        found = self._one(query, read.process_id)
        return None if found is None else deaths_row(found)

    def put_deaths(self, change: rows.PutDeaths) -> None:
        row = change.row
        values = (row.scope, row.counted, row.alone, row.life, row.worker, row.since)
        self._do(
            f"INSERT OR REPLACE INTO deaths ({DEATHS}) VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, row_checksum(values))
        )

    def drop_deaths(self, change: rows.DropDeaths) -> None:
        self._do("DELETE FROM deaths WHERE scope = ?", (change.scope,))

    def drop_worker(self, change: rows.DropWorker) -> None:
        self._do("DELETE FROM workers WHERE id = ?", (change.worker_id,))

    # ------------------------------------------------------------------ processes

    def _remember_process(self, row: ProcessRow) -> None:
        if row.owner is not None:
            self._processes[row.pid] = row
            return
        self._processes.pop(row.pid, None)
        self._last_steps.pop(row.pid, None)

    async def process_by_id(self, read: rows.ProcessById) -> ProcessRow | None:
        found = self._do(PROCESS_BY_ID, (read.process_id,)).fetchone()
        return None if found is None else process_or_tombstone(found)

    async def tombstone_of(self, read: rows.TombstoneOf) -> Tombstone | None:
        found = self._do(TOMBSTONE_BY_ID, (read.process_id,)).fetchone()
        return None if found is None else tombstone_row(found)

    async def process_by_pid(self, read: rows.ProcessByPid) -> ProcessRow | None:
        known = self._processes.get(read.pid)
        if known is not None:
            return known
        found = self._do(PROCESS_BY_PID, (read.pid,)).fetchone()
        return None if found is None else process_row(found)

    async def next_pid(self, _: rows.NextPid) -> int:
        return self._next("pid", NEXT_PID)

    def add_process(self, change: rows.AddProcess) -> None:
        row = change.row
        values, record = process_values(row), encode(row.record)
        self._do(ADD_PROCESS, (row.pid, *values, row_crc(values, record), record))
        registration = with_checksum(row.pid, encode(row.registration))
        self._do("INSERT INTO registrations (pid, body) VALUES (?, ?)", (row.pid, registration))
        self._numbers["pid"] = row.pid + 1
        self._remember_process(row)
        if not row.id.rpartition(".")[2].isdecimal():  # a turn may be called so, and may have children
            self._alone.add(row.id)
        if row.registration.parent is not None:
            self._alone.discard(row.registration.parent)
        if row.owner is not None:
            self._last_steps[row.pid] = -1

    def put_process(self, change: rows.PutProcess) -> None:
        row = change.row
        before = self._processes.get(row.pid)
        self._remember_process(row)
        values, record = process_values(row), encode(row.record)
        # Neither its id nor its parent nor its birth ever changes while it is retained.
        changing = (values[5], *values[7:], row_crc(values, record), record, row.pid)
        if before is not None and values[1:4] == [before.live, before.active, before.due]:
            self._do(PUT_GOING_ON, changing)
        else:
            self._do(PUT_PROCESS, (*values[1:4], *changing))

    def entomb(self, change: rows.Entomb) -> None:
        tombstone = change.tombstone
        place = change.place
        pid = tombstone.pid
        self._numbers["place"] = place + 1
        spent = max(self._do(SPENT).fetchone()[0] or 0, pid)
        values = (tombstone.id, pid, STATUSES.index(tombstone.status), tombstone.pruned, tombstone.digest, place)
        self._do(f"INSERT INTO tombstones ({TOMBSTONE}) VALUES (?{', ?' * 6})", (*values, row_checksum(values)))
        self._processes.pop(pid, None)
        self._last_steps.pop(pid, None)
        self._do("DELETE FROM events WHERE pid IN (0, ?)", (pid,))
        body = encode(Event(PRUNED, at=tombstone.pruned))
        last = (place, 0, spent, None, body_crc(body, 0, spent), body)
        self._do(f"INSERT INTO events ({EVENT}) VALUES (?{', ?' * 5})", last)
        for table in ("processes", "registrations", "awaits", "grants", "wakes"):
            self._do(f"DELETE FROM {table} WHERE pid = ?", (pid,))
        self._do("DELETE FROM blobs WHERE sid = ?", (-pid,))
        self.drop_steps(rows.DropSteps(pid, MAX_STEPS))

    async def children_of(self, read: rows.ChildrenOf) -> list[ProcessRow]:
        query = ALL_CHILDREN if read.over else CHILDREN
        return [] if read.parent in self._alone else [process_row(r) for r in self._do(query, (read.parent,))]

    async def processes_owned_by(self, read: rows.ProcessesOwnedBy) -> list[ProcessRow]:
        return [process_row(r) for r in self._do(f"{ACTIVE} AND owner = ? ORDER BY pid", (read.worker_id,))]

    async def has_live_processes(self, read: rows.HasLiveProcesses) -> bool:
        query = "SELECT 1 FROM grants JOIN processes USING (pid) WHERE session_id = ? AND live = 1 LIMIT 1"
        return self._do(query, (read.session_id,)).fetchone() is not None

    async def active_processes_reach(self, read: rows.ActiveProcessesReach) -> bool:
        # Most often fewer are active at all, which the index says; to read their kinds takes longer.
        any_kind = "SELECT 1 FROM processes INDEXED BY processes_live WHERE live = 1 AND active = 1"
        skip = f"LIMIT 1 OFFSET {read.number - 1:d}"
        if self._do(f"{any_kind} {skip}").fetchone() is None:
            return False
        columns, of_session = PROCESS_COLUMNS, read.session_id is not None
        query = f"{any_kind} AND {columns['kind']} = ?" + (f" AND {columns['origin']} = ?" if of_session else "")
        args = (read.kind, read.session_id) if of_session else (read.kind,)
        return self._do(f"{query} {skip}", args).fetchone() is not None

    async def prunable_processes(self, read: rows.PrunableProcesses) -> list[ProcessRow]:
        return [process_row(r) for r in self._do(PRUNABLE, (read.before, *read.after, read.limit))]

    # ------------------------------------------------------------------ events and journals

    async def next_place(self, _: rows.NextPlace) -> int:
        return self._next("place", NEXT_PLACE)

    def log_event(self, change: rows.LogEvent) -> None:
        body = encode(change.event)
        self._do(
            ADD_EVENT,
            (
                change.place,
                change.pid,
                change.sequence,
                change.event.key,
                body_crc(body, change.pid, change.sequence),
                body,
            ),
        )
        self._numbers["place"] = change.place + 1

    async def event_by_key(self, read: rows.EventByKey) -> tuple[int, Event] | None:
        found = self._do(f"SELECT {EVENT} FROM events WHERE pid = ? AND key = ?", (read.pid, read.key)).fetchone()
        return None if found is None else event_row(found)[2:]

    async def events_after(self, read: rows.EventsAfter) -> list[Event]:
        found = self._do(f"SELECT {EVENT} FROM events WHERE pid = ? AND sequence > ?", (read.pid, read.sequence))
        return [event_row(r)[3] for r in found]

    async def last_event(self, read: rows.LastEvent) -> int:
        query = "SELECT place FROM events WHERE pid = ? ORDER BY sequence DESC LIMIT 1"
        return int(self._do(query, (read.pid,)).fetchone()[0])

    async def step_at(self, read: rows.StepAt) -> bytes | None:
        found = self._do("SELECT body FROM steps WHERE place = ?", (step_place(read.pid, read.ordinal),)).fetchone()
        return None if found is None else found[0]

    async def last_step(self, read: rows.LastStep) -> int:
        pid = read.pid
        known = self._last_steps.get(pid)
        if known is not None:
            return known
        span = (step_place(pid, 0), step_place(pid, MAX_STEPS))
        found = self._do("SELECT max(place) FROM steps WHERE place BETWEEN ? AND ?", span).fetchone()[0]
        return -1 if found is None else int(found) & MAX_STEPS

    def add_step(self, change: rows.AddStep) -> None:
        where = step_place(change.pid, change.ordinal)
        self._do(ADD_STEP, (where, body_crc(change.body, where), change.body))
        self._last_steps[change.pid] = change.ordinal

    def drop_steps(self, change: rows.DropSteps) -> None:
        self._do(
            "DELETE FROM steps WHERE place >= ? AND place < ?",
            (step_place(change.pid, 0), step_place(change.pid, change.before)),
        )

    # ------------------------------------------------------------------ who waits, who sees, who is told

    async def processes_awaiting(self, read: rows.ProcessesAwaiting) -> list[int]:
        if read.target in self._alone:
            return []
        return [r[0] for r in self._do("SELECT pid FROM awaits WHERE target = ? ORDER BY pid", (read.target,))]

    def put_awaits(self, change: rows.PutAwaits) -> None:
        self._alone.difference_update(change.targets)
        for target in change.targets:
            self._do("INSERT OR IGNORE INTO awaits (target, pid) VALUES (?, ?)", (target, change.pid))

    def drop_awaits(self, change: rows.DropAwaits) -> None:
        self._do("DELETE FROM awaits WHERE pid = ?", (change.pid,))

    async def is_granted(self, read: rows.IsGranted) -> bool:
        query = "SELECT 1 FROM grants WHERE session_id = ? AND pid = ?"
        return self._do(query, (read.session_id, read.pid)).fetchone() is not None

    def put_grant(self, change: rows.PutGrant) -> None:
        self._do("INSERT OR IGNORE INTO grants (session_id, pid) VALUES (?, ?)", (change.session_id, change.pid))

    def drop_grant(self, change: rows.DropGrant) -> None:
        self._do("DELETE FROM grants WHERE session_id = ? AND pid = ?", (change.session_id, change.pid))

    def drop_grants(self, change: rows.DropGrants) -> None:
        self._do("DELETE FROM grants WHERE session_id = ?", (change.session_id,))

    async def live_processes_seen_by(self, read: rows.LiveProcessesSeenBy) -> list[ProcessRow]:
        query, args = process_filter(ProcessFilter(session_id=read.session_id, live=True, limit=2**31))
        return [process_row(found) for found in self._do(f"SELECT {PROCESS_ROW} FROM {query}", args)]

    async def live_processes_named(self, read: rows.LiveProcessesNamed) -> list[ProcessRow]:
        query, args = process_filter(ProcessFilter(name=read.name, session_id=read.session_id, live=True, limit=2**31))
        return [process_row(found) for found in self._do(f"SELECT {PROCESS_ROW} FROM {query}", args)]

    def add_wake(self, change: rows.AddWake) -> None:
        row = change.row
        values = msgspec.structs.astuple(row)
        self._do(f"INSERT INTO wakes ({WAKE}) VALUES (?{', ?' * 10})", (*values, row_checksum(values)))

    async def wake_by_number(self, read: rows.WakeByNumber) -> WakeRow | None:
        found = self._do(f"SELECT {WAKE} FROM wakes WHERE number = ?", (read.number,)).fetchone()
        return None if found is None else wake_row(found)

    def put_wake(self, change: rows.PutWake) -> None:
        row = change.row
        self._do(
            "UPDATE wakes SET session_id = ?, policy = ?, at = ?, state = ?, turn = ?, reason = ?, crc = ? "
            "WHERE number = ?",
            (
                row.session_id, row.policy, row.at, row.state, row.turn, row.reason,
                row_checksum(msgspec.structs.astuple(row)), row.number,
            ),
        )  # fmt: skip

    async def pending_wakes_of(self, read: rows.PendingWakesOf) -> list[WakeRow]:
        query = f"SELECT {WAKE} FROM wakes WHERE pid = ? AND state = 'pending' ORDER BY number"
        return [wake_row(r) for r in self._do(query, (read.pid,))]

    async def pending_wakes_for(self, read: rows.PendingWakesFor) -> list[WakeRow]:
        query = f"SELECT {WAKE} FROM wakes WHERE session_id = ? AND state = 'pending' ORDER BY number"
        return [wake_row(r) for r in self._do(query, (read.session_id,))]


READERS, CHANGERS = methods(SqlRows, ALL_READS), methods(SqlRows, ALL_CHANGES)
