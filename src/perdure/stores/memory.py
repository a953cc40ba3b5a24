"""The memory store: the reference every other store is compared with, and what tests run on.

Its rows outlive the store object (`MemoryRows`), so that a test can crash a runtime and open another on what is left.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import BlobMissing, PerdureError, SearchUnavailable
from perdure.model.codec import convert, copied, decode, decode_row, encode
from perdure.model.limit import Account, Reservation
from perdure.model.process import Event, ProcessRow, SessionOrigin, Tombstone, WakeRow
from perdure.model.record import Spilled
from perdure.model.search import FoundRecord, SearchFilter, snippet, spoken
from perdure.model.session import Deaths, Dump, InboxRow, SessionRow, WaitRow, WorkerRow
from perdure.model.spending import UsageFilter, UsageRow
from perdure.model.write import ProcessFilter, SessionFilter, StoreFacts, Write
from perdure.ports.host import Clock
from perdure.ports.store import SWEEP_GRACE
from perdure.stores import os_process, rules
from perdure.stores.blobs import host_pieces
from perdure.stores.rules import rows
from perdure.stores.rules.filters import PROCESS_ATTRIBUTES, SESSION_ATTRIBUTES, matches
from perdure.stores.rules.rows import (
    ALL_CHANGES,
    ALL_READS,
    MOST_DUMPS,
    RowChange,
    Transaction,
    TurnRows,
    dumps_of,
    methods,
    run,
    waits_of,
)

R = TypeVar("R")
S = TypeVar("S", bound=Struct)


def _system_time() -> int:
    return time.time_ns() // 1_000_000


class MemoryRows:
    """Tables as dictionaries. What is put in comes out as from disk: no reader shares a struct with a writer.

    `log` is the change feed: which process has the event at a place. The dictionaries of one process's events and
    records are in order, because both only grow.
    """

    def __init__(self) -> None:
        self.process_ids: dict[str, int] = {}
        self.by_pid: dict[int, ProcessRow] = {}
        self.active_pids: dict[int, None] = {}
        self.due_pids: dict[int, int] = {}
        self.by_parent: dict[str, dict[int, None]] = {}
        self.log: dict[int, int] = {}
        self.places = 0
        self.events_of: dict[int, dict[int, tuple[int, Event]]] = {}
        self.event_keys: dict[int, dict[str, int]] = {}
        self.journals: dict[int, dict[int, bytes]] = {}
        self.awaits: dict[str, dict[int, None]] = {}
        self.grants: dict[str, dict[int, None]] = {}
        self.wake_rows: dict[int, WakeRow] = {}
        self.tombstones: dict[str, Tombstone] = {}
        self.by_id: dict[str, int] = {}
        self.by_sid: dict[int, SessionRow] = {}
        self.open_sids: dict[int, None] = {}
        self.keys: dict[tuple[int, str], tuple[int, bytes]] = {}
        self.bodies: dict[int, dict[int, list[bytes]]] = {}
        self.inbox: dict[int, dict[int, InboxRow]] = {}
        self.waits: dict[str, WaitRow] = {}
        self.waits_by_sid: dict[int, dict[str, None]] = {}
        self.dumps: dict[int, dict[int, Dump]] = {}
        self.workers_by_id: dict[str, WorkerRow] = {}
        self.deaths_by_scope: dict[int, Deaths] = {}
        self.usage: dict[tuple[int, int, str, str, str], UsageRow] = {}
        self.accounts: dict[tuple[str, str], Account] = {}
        self.reservations: dict[tuple[int, str], Reservation] = {}
        self.blobs: dict[str, bytes] = {}
        self.blob_puts: dict[str, int] = {}
        self.blob_refs: dict[str, set[int]] = {}
        self.alive: set[str] = set()
        self.secret, self.identity = secrets.token_bytes(32), os_process.new_store_id()
        self.held: str | None = None
        self.searched = False
        self.changes = 0
        self.readers = READERS

    async def flush(self, changes: Sequence[RowChange]) -> None:
        for change in changes:
            CHANGERS[type(change)](self, change)

    async def session_by_id(self, read: rows.SessionById) -> SessionRow | None:
        sid = self.by_id.get(read.session_id)
        return None if sid is None else self.by_sid[sid]

    async def session_by_sid(self, read: rows.SessionBySid) -> SessionRow | None:
        return self.by_sid.get(read.sid)

    async def owned_turn(self, read: rows.OwnedTurn) -> TurnRows:
        sid, besides = read.sid, read.besides
        row, inputs, following = self.by_sid.get(sid), False, None
        if sid in self.inbox:
            inbox = [m for m in self.inbox[sid].values() if m.input not in besides]
            inputs = any(m.kind != "queue" for m in inbox)
            following = next((m for m in inbox if m.kind != "note"), None)
        records = len(self.bodies[sid].get(read.turn, ())) if sid in self.bodies else 0
        return TurnRows(row, records, inputs, following, sid in self.waits_by_sid)

    async def next_sid(self, _: rows.NextSid) -> int:
        return len(self.by_sid) + 1

    def add_session(self, change: rows.AddSession) -> None:
        self.by_id[change.row.id] = change.row.sid
        self.put_session(change)

    def put_session(self, change: rows.PutSession | rows.AddSession) -> None:
        row = change.row
        self.by_sid[row.sid] = row
        if row.turn is None:
            self.open_sids.pop(row.sid, None)
        else:
            self.open_sids[row.sid] = None

    def put_settings(self, change: rows.PutSettings) -> None:
        """Nothing to do: the row itself keeps them here."""

    def put_labels(self, change: rows.PutLabels) -> None:
        """Nothing to do: a listing looks into the settings of each row."""

    async def sessions_owned_by(self, read: rows.SessionsOwnedBy) -> list[SessionRow]:
        return [row for sid in self.open_sids if (row := self.by_sid[sid]).owner == read.worker_id]

    async def forks_of(self, read: rows.ForksOf) -> int:
        return sum(1 for row in self.by_sid.values() if row.fork is not None and row.fork.sid == read.sid)

    async def input_by_key(self, read: rows.InputByKey) -> tuple[int, bytes] | None:
        return self.keys.get((self.by_id[read.session_id], read.key)) if read.session_id in self.by_id else None

    def put_key(self, change: rows.PutKey) -> None:
        self.keys[change.sid, change.key] = (change.turn, change.digest)

    async def node_at(self, read: rows.NodeAt) -> bytes | None:
        bodies = self.bodies.get(read.sid, {}).get(read.turn, ())
        return bodies[read.ordinal] if read.ordinal < len(bodies) else None

    def add_node(self, change: rows.AddNode) -> None:
        bodies = self.bodies.setdefault(change.sid, {}).setdefault(change.turn, [])
        if change.ordinal >= len(bodies):
            assert change.ordinal == len(bodies), "ordinals have no gaps"
            bodies.append(change.body)

    def put_node(self, change: rows.PutNode) -> None:
        self.bodies[change.sid][change.turn][change.ordinal] = change.body

    def drop_session_data(self, change: rows.DropSessionData) -> None:
        sid = change.sid
        self.bodies.pop(sid, None)
        self.inbox.pop(sid, None)
        self.keys = {k: v for k, v in self.keys.items() if k[0] != sid}
        self.drop_references(sid)

    def drop_references(self, number: int) -> None:
        for refs in self.blob_refs.values():
            refs.discard(number)

    def refer_to_blobs(self, change: rows.ReferToBlobs) -> None:
        for digest in change.digests:
            self.blob_refs.setdefault(digest, set()).add(change.sid)

    async def has_blob(self, read: rows.HasBlob) -> bool:
        return read.digest in self.blobs

    async def has_inputs(self, read: rows.HasInputs) -> bool:
        return bool(self.inbox.get(read.sid))

    async def input_at(self, read: rows.InputAt) -> InboxRow | None:
        return self.inbox.get(read.sid, {}).get(read.number)

    def put_input(self, change: rows.PutInput) -> None:
        self.inbox.setdefault(change.row.sid, {})[change.row.input] = change.row

    def drop_input(self, change: rows.DropInput) -> None:
        inbox = self.inbox.get(change.sid, {})
        inbox.pop(change.number, None)
        if not inbox:
            self.inbox.pop(change.sid, None)

    async def wait_by_id(self, read: rows.WaitById) -> WaitRow | None:
        return self.waits.get(read.wait_id)

    def put_wait(self, change: rows.PutWait) -> None:
        row = change.row
        self.waits[row.id] = row
        self.waits_by_sid.setdefault(row.sid, {})[row.id] = None

    def drop_waits(self, change: rows.DropWaits) -> None:
        sid = change.sid
        if sid in self.waits_by_sid:
            for wait_id in self.waits_by_sid.pop(sid):
                del self.waits[wait_id]
            self.drop_references(waits_of(sid))

    def put_dump(self, change: rows.PutDump) -> None:
        dumps = self.dumps.setdefault(change.sid, {})
        dumps[change.turn] = change.dump
        for turn in sorted(dumps)[:-MOST_DUMPS]:
            del dumps[turn]
        self.drop_references(dumps_of(change.sid))
        for dump in dumps.values():
            if dump.digest is not None:
                self.blob_refs.setdefault(dump.digest, set()).add(dumps_of(change.sid))

    def drop_dumps(self, change: rows.DropDumps) -> None:
        self.dumps.pop(change.sid, None)
        self.drop_references(dumps_of(change.sid))

    async def worker_by_id(self, read: rows.WorkerById) -> WorkerRow | None:
        return self.workers_by_id.get(read.worker_id)

    def put_worker(self, change: rows.PutWorker) -> None:
        self.workers_by_id[change.row.id] = change.row

    def drop_worker(self, change: rows.DropWorker) -> None:
        self.workers_by_id.pop(change.worker_id, None)

    async def all_workers(self, _: rows.AllWorkers) -> list[WorkerRow]:
        return list(self.workers_by_id.values())

    async def deaths_of(self, read: rows.DeathsOf) -> Deaths | None:
        return self.deaths_by_scope.get(read.scope)

    async def deaths_of_session(self, read: rows.DeathsOfSession) -> Deaths | None:
        return self.deaths_by_scope.get(self.by_id.get(read.session_id, 0))

    async def deaths_of_process(self, read: rows.DeathsOfProcess) -> Deaths | None:
        return self.deaths_by_scope.get(-self.process_ids.get(read.process_id, 0))

    def put_deaths(self, change: rows.PutDeaths) -> None:
        self.deaths_by_scope[change.row.scope] = change.row

    def drop_deaths(self, change: rows.DropDeaths) -> None:
        self.deaths_by_scope.pop(change.scope, None)

    # ------------------------------------------------------------------ what was spent

    def add_usage(self, change: rows.AddUsage) -> None:
        spent = change.spent
        key = spent.sid, spent.hour, spent.label, spent.model, spent.metadata
        known = self.usage.get(key)
        self.usage[key] = spent if known is None else replace(known, usage=known.usage + spent.usage)

    async def account_of(self, read: rows.AccountOf) -> Account | None:
        return self.accounts.get((read.name, read.key))

    def put_account(self, change: rows.PutAccount) -> None:
        self.accounts[change.row.name, change.row.key] = change.row

    async def reservation_at(self, read: rows.ReservationAt) -> Reservation | None:
        return self.reservations.get((read.sid, read.name))

    async def reservations_by_sid(self, read: rows.ReservationsBySid) -> list[Reservation]:
        return [each for key, each in sorted(self.reservations.items()) if key[0] == read.sid]

    async def reservations_of(self, read: rows.ReservationsOf) -> list[Reservation]:
        sid = self.by_id.get(read.session_id, 0)
        return [each for key, each in sorted(self.reservations.items()) if key[0] == sid]

    async def reservations_owned_by(self, read: rows.ReservationsOwnedBy) -> list[Reservation]:
        return [each for _, each in sorted(self.reservations.items()) if each.owner == read.worker_id]

    def put_reservation(self, change: rows.PutReservation) -> None:
        self.reservations[change.row.sid, change.row.name] = change.row

    def drop_reservation(self, change: rows.DropReservation) -> None:
        self.reservations.pop((change.sid, change.name), None)

    # ------------------------------------------------------------------ processes

    async def process_by_id(self, read: rows.ProcessById) -> ProcessRow | None:
        pid = self.process_ids.get(read.process_id)
        return None if pid is None else self.by_pid[pid]

    async def process_by_pid(self, read: rows.ProcessByPid) -> ProcessRow | None:
        row = self.by_pid.get(read.pid)
        return row if row is not None and row.pruned is None else None

    async def next_pid(self, _: rows.NextPid) -> int:
        return len(self.by_pid) + 1

    def add_process(self, change: rows.AddProcess) -> None:
        row = replace(change.row, registration=_again(change.row.registration))
        self.process_ids[row.id] = row.pid
        if row.registration.parent is not None:
            self.by_parent.setdefault(row.registration.parent, {})[row.pid] = None
        self.put_process(rows.PutProcess(row))

    def put_process(self, change: rows.PutProcess) -> None:
        row = change.row
        self.by_pid[row.pid] = replace(row, record=_again(row.record))
        if row.active:
            self.active_pids[row.pid] = None
        else:
            self.active_pids.pop(row.pid, None)
        due = row.due
        if due is None:
            self.due_pids.pop(row.pid, None)
        else:
            self.due_pids[row.pid] = due

    def entomb(self, change: rows.Entomb) -> None:
        tombstone = change.tombstone
        row = tombstone.row
        parent = self.by_pid[row.pid].registration.parent
        if parent is not None:
            self.by_parent[parent].pop(row.pid, None)
        self.put_process(rows.PutProcess(row))
        self.tombstones[row.id] = tombstone
        for freed, _ in self.events_of.pop(row.pid).values():
            del self.log[freed]
        self.places = change.place
        self.log[change.place] = row.pid
        self.event_keys.pop(row.pid, None)
        self.journals.pop(row.pid, None)
        self.wake_rows = {n: w for n, w in self.wake_rows.items() if w.pid != row.pid}
        self.drop_awaits(rows.DropAwaits(row.pid))
        for seen in self.grants.values():
            seen.pop(row.pid, None)
        self.drop_references(-row.pid)

    async def tombstone_of(self, read: rows.TombstoneOf) -> Tombstone | None:
        return self.tombstones.get(read.process_id)

    async def children_of(self, read: rows.ChildrenOf) -> list[ProcessRow]:
        rows = [self.by_pid[pid] for pid in self.by_parent.get(read.parent, ())]
        return [row for row in rows if row.live or (read.over and row.pruned is None)]

    async def processes_owned_by(self, read: rows.ProcessesOwnedBy) -> list[ProcessRow]:
        return [row for pid in sorted(self.active_pids) if (row := self.by_pid[pid]).owner == read.worker_id]

    async def has_live_processes(self, read: rows.HasLiveProcesses) -> bool:
        return any(self.by_pid[pid].live for pid in self.grants.get(read.session_id, ()))

    async def active_processes_reach(self, read: rows.ActiveProcessesReach) -> bool:
        found = [self.by_pid[pid].registration for pid in self.active_pids]
        wanted = [each.origin for each in found if each.kind == read.kind]
        if read.session_id is not None:
            wanted = [o for o in wanted if isinstance(o, SessionOrigin) and o.session_id == read.session_id]
        return len(wanted) >= read.number

    async def prunable_processes(self, read: rows.PrunableProcesses) -> list[ProcessRow]:
        over = [r for r in self.by_pid.values() if not r.live and r.pruned is None and r.record.updated < read.before]
        over.sort(key=lambda r: (r.record.updated, r.pid))
        return [r for r in over if (r.record.updated, r.pid) > read.after][: read.limit]

    async def next_place(self, _: rows.NextPlace) -> int:
        return self.places + 1

    def log_event(self, change: rows.LogEvent) -> None:
        pid, place = change.pid, change.place
        kept = _again(change.event)
        self.places = place
        self.log[place] = pid
        self.events_of.setdefault(pid, {})[change.sequence] = (place, kept)
        if kept.key is not None:
            self.event_keys.setdefault(pid, {})[kept.key] = change.sequence

    async def event_by_key(self, read: rows.EventByKey) -> tuple[int, Event] | None:
        sequence = self.event_keys.get(read.pid, {}).get(read.key)
        return None if sequence is None else (sequence, self.events_of[read.pid][sequence][1])

    async def events_after(self, read: rows.EventsAfter) -> list[Event]:
        return [event for n, (_, event) in self.events_of.get(read.pid, {}).items() if n > read.sequence]

    async def last_event(self, read: rows.LastEvent) -> int:
        events = self.events_of[read.pid]
        return events[next(reversed(events))][0]

    async def step_at(self, read: rows.StepAt) -> bytes | None:
        return self.journals.get(read.pid, {}).get(read.ordinal)

    async def last_step(self, read: rows.LastStep) -> int:
        return next(reversed(self.journals.get(read.pid, {})), -1)

    def add_step(self, change: rows.AddStep) -> None:
        self.journals.setdefault(change.pid, {})[change.ordinal] = change.body

    def drop_steps(self, change: rows.DropSteps) -> None:
        self.journals[change.pid] = {n: b for n, b in self.journals.get(change.pid, {}).items() if n >= change.before}

    async def processes_awaiting(self, read: rows.ProcessesAwaiting) -> list[int]:
        return sorted(self.awaits.get(read.target, ()))

    def put_awaits(self, change: rows.PutAwaits) -> None:
        for target in change.targets:
            self.awaits.setdefault(target, {})[change.pid] = None

    def drop_awaits(self, change: rows.DropAwaits) -> None:
        for target in [t for t, waiting in self.awaits.items() if change.pid in waiting]:
            del self.awaits[target][change.pid]
            if not self.awaits[target]:
                del self.awaits[target]

    async def is_granted(self, read: rows.IsGranted) -> bool:
        return read.pid in self.grants.get(read.session_id, ())

    def put_grant(self, change: rows.PutGrant) -> None:
        self.grants.setdefault(change.session_id, {})[change.pid] = None

    def drop_grant(self, change: rows.DropGrant) -> None:
        self.grants.get(change.session_id, {}).pop(change.pid, None)

    def drop_grants(self, change: rows.DropGrants) -> None:
        self.grants.pop(change.session_id, None)

    async def live_processes_seen_by(self, read: rows.LiveProcessesSeenBy) -> list[ProcessRow]:
        return [row for pid in self.grants.get(read.session_id, ()) if (row := self.by_pid[pid]).live]

    async def live_processes_named(self, read: rows.LiveProcessesNamed) -> list[ProcessRow]:
        rows = [self.by_pid[pid] for pid in self.grants.get(read.session_id, ())]
        return [row for row in rows if row.live and row.registration.name == read.name]

    def add_wake(self, change: rows.AddWake) -> None:
        self.wake_rows[change.row.number] = change.row

    async def wake_by_number(self, read: rows.WakeByNumber) -> WakeRow | None:
        return self.wake_rows.get(read.number)

    def put_wake(self, change: rows.PutWake) -> None:
        self.wake_rows[change.row.number] = change.row

    async def pending_wakes_of(self, read: rows.PendingWakesOf) -> list[WakeRow]:
        return [w for w in self.wake_rows.values() if w.pid == read.pid and w.state == "pending"]

    async def pending_wakes_for(self, read: rows.PendingWakesFor) -> list[WakeRow]:
        return [w for w in self.wake_rows.values() if w.session_id == read.session_id and w.state == "pending"]


READERS, CHANGERS = methods(MemoryRows, ALL_READS), methods(MemoryRows, ALL_CHANGES)


class MemoryStore:
    """A store whose rows live as long as their object. The age of blobs goes by `clock`, or by the system's."""

    def __init__(self, rows: MemoryRows | None = None, clock: Clock | None = None) -> None:
        self.rows = rows or MemoryRows()
        self._now = clock.now if clock is not None else _system_time
        self.blobs = MemoryBlobs(self.rows, self._now)
        self._ours = 0
        self._others = 0
        self._jobs: str | None = None

    async def open(self) -> None:
        self._others = self.rows.changes - self._ours

    async def close(self) -> None:
        if self._jobs is not None:
            shutil.rmtree(self._jobs, ignore_errors=True)
            self._jobs = None

    outlives_us = False

    def jobs_folder(self, make: bool = True) -> str:
        if self._jobs is None and make:
            self._jobs = tempfile.mkdtemp(prefix="perdure-jobs-")
        return self._jobs or ""

    async def write(self, write: Write[R]) -> R:
        tx = Transaction(self.rows)
        receipt = await rules.apply(tx, write, self.rows.held is not None)
        for change in tx.changes:
            CHANGERS[type(change)](self.rows, change)
        self.rows.changes += 1
        self._ours += 1
        return receipt

    def submit(self, write: Write[R], done: Callable[[R | None, BaseException | None], None]) -> None:
        try:
            receipt = run(MemoryStore.write(self, write))  # that of a subclass may wait
        except PerdureError as refusal:
            done(None, refusal)
        else:
            done(receipt, None)

    async def session(self, session_id: str) -> SessionRow | None:
        sid = self.rows.by_id.get(session_id)
        return None if sid is None else self.rows.by_sid[sid]

    async def session_by_sid(self, sid: int) -> SessionRow | None:
        return self.rows.by_sid.get(sid)

    async def sessions(self, wanted: SessionFilter) -> list[SessionRow]:
        found = [r for r in self.rows.by_sid.values() if not r.deleted and matches(r, wanted, SESSION_ATTRIBUTES)]
        found.sort(key=lambda r: (r.updated, r.sid), reverse=True)
        return found[: wanted.limit]

    async def open_sessions(self) -> list[SessionRow]:
        return [self.rows.by_sid[sid] for sid in self.rows.open_sids]

    async def nodes(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        turns = self.rows.bodies.get(sid, {})
        chosen = range(first, last + 1) if last - first < len(turns) else sorted(t for t in turns if first <= t <= last)
        return [(turn, i, body) for turn in chosen for i, body in enumerate(turns.get(turn, ()))]

    async def turn_ends(self, turns: Sequence[tuple[int, int]]) -> list[tuple[bytes, bytes] | None]:
        found = [self.rows.bodies.get(sid, {}).get(turn) for sid, turn in turns]
        return [(bodies[0], bodies[-1]) if bodies else None for bodies in found]

    async def keep_index(self, keep: bool) -> None:
        """There is none: a search reads every record. What was asked for holds for the rows, as it does for a file."""
        self.rows.searched = keep

    async def index_more(self) -> bool:
        return False

    async def search(self, wanted: SearchFilter) -> tuple[list[FoundRecord], float]:
        if not self.rows.searched:
            raise SearchUnavailable("this store keeps no index of words")
        listed = SessionFilter(wanted.agent, metadata=wanted.metadata)
        sessions = [r for r in self.rows.by_sid.values() if not r.deleted and matches(r, listed, SESSION_ATTRIBUTES)]
        found = list[FoundRecord]()
        for row in sorted(sessions, key=lambda row: row.sid, reverse=True):
            for turn, bodies in sorted(self.rows.bodies.get(row.sid, {}).items(), reverse=True):
                for ordinal in range(len(bodies) - 1, -1, -1):
                    if wanted.before is not None and (row.sid, turn, ordinal) >= wanted.before:
                        continue
                    piece = snippet(self._spoken(bodies[ordinal]), wanted.words)
                    if piece is not None:
                        found.append(FoundRecord(row.sid, turn, ordinal, row.id, piece))
        return found[: wanted.limit], 1.0

    def _spoken(self, body: bytes) -> str:
        try:
            record = decode_row(body)
            if isinstance(record, Spilled):
                record = decode_row(self.rows.blobs[record.digest])
        except (ValueError, KeyError):  # reading the session reports it
            return ""
        return spoken(record)

    async def inbox(self, sid: int) -> list[InboxRow]:
        return list(self.rows.inbox.get(sid, {}).values())

    async def waits(self, sid: int | None = None, due: int | None = None) -> list[WaitRow]:
        if sid is not None:
            found = [self.rows.waits[i] for i in self.rows.waits_by_sid.get(sid, ())]
        else:
            found = [w for w in self.rows.waits.values() if w.state == "open"]
        return found if due is None else [w for w in found if w.due is not None and w.due <= due]

    async def wait(self, wait_id: str) -> WaitRow | None:
        return self.rows.waits.get(wait_id)

    async def dump(self, sid: int, last: int) -> tuple[int, Dump] | None:
        found = [(turn, dump) for turn, dump in self.rows.dumps.get(sid, {}).items() if turn <= last]
        return max(found, key=lambda each: each[0], default=None)

    async def process(self, process_id: str) -> ProcessRow | None:
        return copied(self._process(process_id))

    def _process(self, process_id: str) -> ProcessRow | None:
        pid = self.rows.process_ids.get(process_id)
        return None if pid is None else self.rows.by_pid[pid]

    async def processes(self, wanted: ProcessFilter) -> list[ProcessRow]:
        asking = wanted.session_id or ""
        seen = self.rows.grants.get(asking, {})
        attributes = {**PROCESS_ATTRIBUTES, "seen by": lambda row: (asking,) if row.pid in seen else ()}
        found = [r for r in self.rows.by_pid.values() if r.pruned is None and matches(r, wanted, attributes)]
        return copied(found[::-1][: max(0, wanted.limit)])

    async def active_processes(self) -> list[ProcessRow]:
        return copied([self.rows.by_pid[pid] for pid in sorted(self.rows.active_pids)])

    async def unowned_processes(self, after: int, limit: int) -> list[ProcessRow]:
        rows = (self.rows.by_pid[pid] for pid in sorted(self.rows.active_pids) if pid > after)
        return copied([row for row in rows if row.owner is None][:limit])

    async def due_processes(self, now: int, limit: int = 1000, skip: int = 0) -> list[ProcessRow]:
        due = sorted((due, pid) for pid, due in self.rows.due_pids.items() if due <= now)
        return copied([self.rows.by_pid[pid] for _, pid in due[skip : skip + limit]])

    async def events(self, pid: int, after: int = 0, limit: int = 1000) -> list[tuple[int, int, Event]]:
        events = self.rows.events_of.get(pid, {}).items()
        found = [(place, sequence, event) for sequence, (place, event) in events if sequence > after]
        return copied(found[: max(0, limit)])

    async def changes(self, after: int = 0, limit: int = 1000) -> list[tuple[int, ProcessRow]]:
        page = [(place, pid) for place, pid in self.rows.log.items() if place > after][: max(0, limit)]
        latest = {pid: place for place, pid in page}
        return copied([(place, self.rows.by_pid[pid]) for pid, place in sorted(latest.items(), key=lambda e: e[1])])

    async def last_change(self) -> int:
        return self.rows.places

    async def steps(self, pid: int) -> list[tuple[int, bytes]]:
        return sorted(self.rows.journals.get(pid, {}).items())

    async def is_granted(self, session_id: str, process_id: str) -> bool:
        row = self._process(process_id)
        return row is not None and row.pid in self.rows.grants.get(session_id, ())

    async def grantees(self, process_id: str) -> list[str]:
        row = self._process(process_id)
        return sorted(each for each, seen in self.rows.grants.items() if row is not None and row.pid in seen)

    async def wakes(self, session_id: str | None = None, state: str = "pending") -> list[WakeRow]:
        wakes = [w for _, w in sorted(self.rows.wake_rows.items()) if w.state == state]
        return [w for w in wakes if session_id is None or w.session_id == session_id]

    async def usage(self, wanted: UsageFilter) -> list[UsageRow]:
        return [row for _, row in sorted(self.rows.usage.items()) if wanted.fits(row)]

    async def accounts(self) -> list[Account]:
        return [account for _, account in sorted(self.rows.accounts.items())]

    async def reservations(self, sid: int | None = None) -> list[Reservation]:
        return [each for key, each in sorted(self.rows.reservations.items()) if sid is None or key[0] == sid]

    async def workers(self) -> list[WorkerRow]:
        return list(self.rows.workers_by_id.values())

    async def deaths(self) -> list[Deaths]:
        return list(self.rows.deaths_by_scope.values())

    async def changed(self) -> bool:
        before, self._others = self._others, self.rows.changes - self._ours
        return before != self._others

    async def facts(self, deep: bool = False) -> StoreFacts:
        rows = self.rows
        bodies = [b for turns in rows.bodies.values() for t in turns.values() for b in t]
        live = sum(1 for r in rows.by_sid.values() if not r.deleted)
        processes = sum(1 for r in rows.by_pid.values() if r.pruned is None)
        size = sum(map(len, bodies))
        return StoreFacts("memory", "memory", 0, live, len(bodies), len(rows.blobs), size, processes=processes)

    async def sweep(self, grace: float = SWEEP_GRACE) -> int:
        rows, before = self.rows, self._now() - round(grace * 1000)
        orphans = [d for d in rows.blobs if not rows.blob_refs.get(d) and rows.blob_puts[d] <= before]
        for digest in orphans:
            del rows.blobs[digest], rows.blob_puts[digest]
        return len(orphans)

    def identity(self) -> str:
        return self.rows.identity

    def held(self) -> str | None:
        return self.rows.held

    async def secret(self) -> bytes:
        return self.rows.secret

    def lease(self, worker_id: str) -> MemoryLease:
        return MemoryLease(self.rows, worker_id)

    async def proven_dead(self, worker: WorkerRow) -> bool:
        return worker.id not in self.rows.alive


class MemoryLease:
    """A worker in this process lives while it says so."""

    def __init__(self, rows: MemoryRows, worker_id: str) -> None:
        self._rows, self._id, self.process = rows, worker_id, os_process.name()

    async def hold(self) -> None:
        self._rows.alive.add(self._id)

    async def drop(self) -> None:
        self._rows.alive.discard(self._id)


class MemoryBlobs:
    def __init__(self, rows: MemoryRows, now: Callable[[], int] = _system_time) -> None:
        self._rows, self._now = rows, now

    async def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self._rows.blobs[digest], self._rows.blob_puts[digest] = data, self._now()
        return digest

    async def put_file(self, path: str) -> tuple[str, int]:
        data = await asyncio.to_thread(_host_bytes, path)
        return await self.put(data), len(data)

    async def get(self, digest: str) -> bytes:
        try:
            return self._rows.blobs[digest]
        except KeyError:
            raise BlobMissing(digest) from None

    async def pieces(self, digest: str) -> AsyncIterator[bytes]:
        yield await self.get(digest)


def _host_bytes(path: str) -> bytes:
    return b"".join(host_pieces(path))


def _again(value: S) -> S:
    """A struct as it comes back from disk."""
    return convert(decode(encode(value)), type(value))
