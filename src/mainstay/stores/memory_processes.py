"""Processes of the memory store: their tables as dictionaries, and what is read of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from mainstay.model.codec import convert, decode, encode
from mainstay.model.own import own
from mainstay.model.process import Event, ProcessRow, Tombstone, WakeRow
from mainstay.model.process_write import ProcessFilter


class MemoryProcessRows(ABC):
    """Tables as dictionaries. What was put in comes out as from disk: nobody may rely on the structs that were given.

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

    def process(self, process_id: str) -> ProcessRow | None:
        pid = self.process_ids.get(process_id)
        return None if pid is None else self.by_pid[pid]

    def process_by_pid(self, pid: int) -> ProcessRow | None:
        row = self.by_pid.get(pid)
        return row if row is not None and row.pruned is None else None

    def add_process(self, row: ProcessRow) -> ProcessRow:
        row = replace(row, pid=len(self.by_pid) + 1, registration=_again(row.registration))
        self.process_ids[row.id] = row.pid
        if row.registration.parent is not None:
            self.by_parent.setdefault(row.registration.parent, {})[row.pid] = None
        self.put_process(row)
        return row

    def put_process(self, row: ProcessRow) -> None:
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

    def entomb(self, tombstone: Tombstone) -> None:
        row = tombstone.row
        parent = self.by_pid[row.pid].registration.parent
        if parent is not None:
            self.by_parent[parent].pop(row.pid, None)
        self.put_process(row)
        self.tombstones[row.id] = tombstone
        for place, _ in self.events_of.pop(row.pid).values():
            del self.log[place]
        self.places += 1
        self.log[self.places] = row.pid
        self.event_keys.pop(row.pid, None)
        self.journals.pop(row.pid, None)
        self.wake_rows = {n: w for n, w in self.wake_rows.items() if w.pid != row.pid}
        self.drop_awaits(row.pid)
        for seen in self.grants.values():
            seen.pop(row.pid, None)
        self.drop_references(-row.pid)

    def tombstone(self, process_id: str) -> Tombstone | None:
        return self.tombstones.get(process_id)

    @abstractmethod
    def drop_references(self, number: int) -> None:
        """This session, or process, refers to no blob any more."""

    def children(self, parent: str, over: bool = False) -> list[ProcessRow]:
        rows = [self.by_pid[pid] for pid in self.by_parent.get(parent, ())]
        return [row for row in rows if row.live or (over and row.pruned is None)]

    def processes_of(self, worker_id: str) -> list[ProcessRow]:
        return [row for pid in sorted(self.active_pids) if (row := self.by_pid[pid]).owner == worker_id]

    def has_live_processes(self, session_id: str) -> bool:
        return any(self.by_pid[pid].live for pid in self.grants.get(session_id, ()))

    def prunable(self, before: int) -> list[ProcessRow]:
        over = [r for r in self.by_pid.values() if not r.live and r.pruned is None and r.record.updated < before]
        return sorted(over, key=lambda r: (r.record.updated, r.pid))

    def add_event(self, pid: int, sequence: int, event: Event) -> int:
        kept = _again(event)
        self.places += 1
        self.log[self.places] = pid
        self.events_of.setdefault(pid, {})[sequence] = (self.places, kept)
        if kept.key is not None:
            self.event_keys.setdefault(pid, {})[kept.key] = sequence
        return self.places

    def event_by_key(self, pid: int, key: str) -> tuple[int, Event] | None:
        sequence = self.event_keys.get(pid, {}).get(key)
        return None if sequence is None else (sequence, self.events_of[pid][sequence][1])

    def events_after(self, pid: int, sequence: int) -> list[Event]:
        return [event for n, (_, event) in self.events_of.get(pid, {}).items() if n > sequence]

    def last_event(self, pid: int) -> int:
        events = self.events_of[pid]
        return events[next(reversed(events))][0]

    def step(self, pid: int, ordinal: int) -> bytes | None:
        return self.journals.get(pid, {}).get(ordinal)

    def last_step(self, pid: int) -> int:
        return next(reversed(self.journals.get(pid, {})), -1)

    def add_step(self, pid: int, ordinal: int, body: bytes) -> None:
        self.journals.setdefault(pid, {})[ordinal] = body

    def drop_steps(self, pid: int, before: int) -> None:
        self.journals[pid] = {n: b for n, b in self.journals.get(pid, {}).items() if n >= before}

    def awaiting(self, process_id: str) -> list[int]:
        return sorted(self.awaits.get(process_id, ()))

    def put_awaits(self, pid: int, process_ids: tuple[str, ...]) -> None:
        for process_id in process_ids:
            self.awaits.setdefault(process_id, {})[pid] = None

    def drop_awaits(self, pid: int) -> None:
        for target in [t for t, waiting in self.awaits.items() if pid in waiting]:
            del self.awaits[target][pid]
            if not self.awaits[target]:
                del self.awaits[target]

    def granted(self, session_id: str, pid: int) -> bool:
        return pid in self.grants.get(session_id, ())

    def put_grant(self, session_id: str, pid: int) -> None:
        self.grants.setdefault(session_id, {})[pid] = None

    def drop_grant(self, session_id: str, pid: int) -> None:
        self.grants.get(session_id, {}).pop(pid, None)

    def drop_grants(self, session_id: str) -> None:
        self.grants.pop(session_id, None)

    def live_named(self, session_id: str, name: str) -> list[ProcessRow]:
        rows = [self.by_pid[pid] for pid in self.grants.get(session_id, ())]
        return [row for row in rows if row.live and row.registration.name == name]

    def add_wake(self, row: WakeRow) -> None:
        self.wake_rows[row.number] = row

    def wake(self, number: int) -> WakeRow | None:
        return self.wake_rows.get(number)

    def put_wake(self, row: WakeRow) -> None:
        self.wake_rows[row.number] = row

    def pending_wakes(self, pid: int) -> list[WakeRow]:
        return [w for w in self.wake_rows.values() if w.pid == pid and w.state == "pending"]

    def pending_wakes_for(self, session_id: str) -> list[WakeRow]:
        return [w for w in self.wake_rows.values() if w.session_id == session_id and w.state == "pending"]


S = TypeVar("S", bound=Struct)


def _again(value: S) -> S:
    """A struct as it comes back from disk."""
    return convert(decode(encode(value)), type(value))


class MemoryProcessReads:
    """The reading side of processes. The JSON in what is read is the reader's own, as it is when it comes from disk."""

    def __init__(self, rows: MemoryProcessRows) -> None:
        self._processes = rows

    async def process(self, process_id: str) -> ProcessRow | None:
        return own(self._processes.process(process_id))

    async def processes(self, wanted: ProcessFilter) -> list[ProcessRow]:
        rows = self._processes
        seen = None if wanted.session_id is None else rows.grants.get(wanted.session_id, {})
        found = [r for r in rows.by_pid.values() if matches_process(r, wanted) and (seen is None or r.pid in seen)]
        return own(found[::-1][: max(0, wanted.limit)])

    async def active_processes(self) -> list[ProcessRow]:
        return own([self._processes.by_pid[pid] for pid in sorted(self._processes.active_pids)])

    async def unowned_processes(self, after: int, limit: int) -> list[ProcessRow]:
        rows = (self._processes.by_pid[pid] for pid in sorted(self._processes.active_pids) if pid > after)
        return own([row for row in rows if row.owner is None][:limit])

    async def due_processes(self, now: int, limit: int = 1000, skip: int = 0) -> list[ProcessRow]:
        due = sorted((due, pid) for pid, due in self._processes.due_pids.items() if due <= now)
        return own([self._processes.by_pid[pid] for _, pid in due[skip : skip + limit]])

    async def events(self, pid: int, after: int = 0, limit: int = 1000) -> list[tuple[int, int, Event]]:
        events = self._processes.events_of.get(pid, {}).items()
        found = [(place, sequence, event) for sequence, (place, event) in events if sequence > after]
        return own(found[: max(0, limit)])

    async def changes(self, after: int = 0, limit: int = 1000) -> list[tuple[int, ProcessRow]]:
        page = [(place, pid) for place, pid in self._processes.log.items() if place > after][: max(0, limit)]
        latest = {pid: place for place, pid in page}
        return own([(place, self._processes.by_pid[pid]) for pid, place in sorted(latest.items(), key=lambda e: e[1])])

    async def last_change(self) -> int:
        return self._processes.places

    async def steps(self, pid: int) -> list[tuple[int, bytes]]:
        return sorted(self._processes.journals.get(pid, {}).items())

    async def is_granted(self, session_id: str, process_id: str) -> bool:
        row = self._processes.process(process_id)
        return row is not None and self._processes.granted(session_id, row.pid)

    async def grantees(self, process_id: str) -> list[str]:
        row = self._processes.process(process_id)
        return sorted(each for each, seen in self._processes.grants.items() if row is not None and row.pid in seen)

    async def wakes(self, session_id: str | None = None, state: str = "pending") -> list[WakeRow]:
        wakes = [w for _, w in sorted(self._processes.wake_rows.items()) if w.state == state]
        return [w for w in wakes if session_id is None or w.session_id == session_id]


def matches_process(row: ProcessRow, wanted: ProcessFilter) -> bool:
    """Whether a process is one of those wanted, whoever may see it."""
    each = row.registration
    origin = getattr(each.origin, "session_id", "")
    cause = each.cause.id if each.cause is not None else ""
    return (
        row.pruned is None
        and (not wanted.status or row.state in wanted.status)
        and all(
            value is None or value == actual
            for value, actual in (
                (wanted.kind, each.kind),
                (wanted.name, each.name),
                (wanted.definition, each.definition),
                (wanted.label, each.label),
                (wanted.origin, origin),
                (wanted.cause, cause),
                (wanted.parent, each.parent),
                (wanted.live, row.live),
                (wanted.stuck, row.stuck is not None),
            )
        )
        and (wanted.since is None or row.created >= wanted.since)
        and (wanted.until is None or row.created < wanted.until)
        and (wanted.before is None or row.pid < wanted.before)
    )
