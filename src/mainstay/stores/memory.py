"""The memory store: the reference every other store is compared with, and what tests run on.

Its rows outlive the store object (`MemoryRows`), so that a test can crash a runtime and open another on what is left.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from msgspec.structs import replace

from mainstay.errors import BlobMissing, MainstayError
from mainstay.model.session import Deaths, InboxRow, Node, SessionRow, WaitRow, WorkerRow
from mainstay.model.write import SessionFilter, StoreFacts, Write
from mainstay.ports.host import Clock
from mainstay.ports.store import SWEEP_GRACE
from mainstay.stores import fork_guard, identity, rules
from mainstay.stores.blobs import host_pieces
from mainstay.stores.memory_processes import MemoryProcessReads, MemoryProcessRows
from mainstay.stores.rules.rows import waits_of

R = TypeVar("R")


def _system_time() -> int:
    return time.time_ns() // 1_000_000


class MemoryRows(MemoryProcessRows):
    """Tables as dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.by_id: dict[str, int] = {}
        self.by_sid: dict[int, SessionRow] = {}
        self.open_sids: dict[int, None] = {}
        self.keys: dict[tuple[int, str], tuple[int, bytes]] = {}
        self.bodies: dict[int, dict[int, list[bytes]]] = {}
        self.letters: dict[int, dict[int, InboxRow]] = {}
        self.waits: dict[str, WaitRow] = {}
        self.waits_by_sid: dict[int, dict[str, None]] = {}
        self.workers_by_id: dict[str, WorkerRow] = {}
        self.deaths_by_scope: dict[int, Deaths] = {}
        self.blobs: dict[str, bytes] = {}
        self.blob_puts: dict[str, int] = {}
        self.blob_refs: dict[str, set[int]] = {}
        self.alive: set[str] = set()
        self.secret, self.identity = secrets.token_bytes(32), identity.mint()
        self.held: str | None = None
        self.changes = 0

    def session(self, session_id: str) -> SessionRow | None:
        sid = self.by_id.get(session_id)
        return None if sid is None else self.by_sid[sid]

    def session_by_sid(self, sid: int) -> SessionRow | None:
        return self.by_sid.get(sid)

    def add_session(self, row: SessionRow) -> SessionRow:
        row = replace(row, sid=len(self.by_sid) + 1)
        self.by_id[row.id] = row.sid
        self.put_session(row)
        return row

    def put_session(self, row: SessionRow) -> None:
        self.by_sid[row.sid] = row
        if row.turn is None:
            self.open_sids.pop(row.sid, None)
        else:
            self.open_sids[row.sid] = None

    def put_settings(self, sid: int, settings: bytes) -> None:
        """Nothing to do: the row itself keeps them here."""

    def owned_by(self, worker_id: str) -> list[SessionRow]:
        return [row for sid in self.open_sids if (row := self.by_sid[sid]).owner == worker_id]

    def forks_of(self, sid: int) -> int:
        return sum(1 for row in self.by_sid.values() if row.fork is not None and row.fork.sid == sid)

    def key(self, sid: int, key: str) -> tuple[int, bytes] | None:
        return self.keys.get((sid, key))

    def put_key(self, sid: int, key: str, turn: int, digest: bytes) -> None:
        self.keys[sid, key] = (turn, digest)

    def node(self, sid: int, turn: int, ordinal: int) -> bytes | None:
        bodies = self.bodies.get(sid, {}).get(turn, ())
        return bodies[ordinal] if ordinal < len(bodies) else None

    def add_node(self, sid: int, turn: int, ordinal: int, body: bytes) -> bool:
        bodies = self.bodies.setdefault(sid, {}).setdefault(turn, [])
        if ordinal < len(bodies):
            return False
        assert ordinal == len(bodies), "ordinals have no gaps"
        bodies.append(body)
        return True

    def add_nodes(self, sid: int, turn: int, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.add_node(sid, turn, node.ordinal, node.body)

    def put_node(self, sid: int, turn: int, ordinal: int, body: bytes) -> None:
        self.bodies[sid][turn][ordinal] = body

    def drop_session_data(self, sid: int) -> None:
        self.bodies.pop(sid, None)
        self.letters.pop(sid, None)
        self.keys = {k: v for k, v in self.keys.items() if k[0] != sid}
        self.drop_references(sid)

    def drop_references(self, number: int) -> None:
        for refs in self.blob_refs.values():
            refs.discard(number)

    def add_blobs(self, sid: int, digests: Iterable[str]) -> None:
        for digest in digests:
            self.blob_refs.setdefault(digest, set()).add(sid)

    def has_blob(self, digest: str) -> bool:
        return digest in self.blobs

    def first_mail(self, sid: int) -> InboxRow | None:
        letters = self.letters.get(sid)
        return None if letters is None else next((m for m in letters.values() if m.kind != "note"), None)

    def has_mail(self, sid: int) -> bool:
        letters = self.letters.get(sid)
        return letters is not None and any(m.kind != "queue" for m in letters.values())

    def some_mail(self, sid: int) -> bool:
        return bool(self.letters.get(sid))

    def mail(self, sid: int, number: int) -> InboxRow | None:
        return self.letters.get(sid, {}).get(number)

    def put_mail(self, row: InboxRow) -> None:
        self.letters.setdefault(row.sid, {})[row.input] = row

    def drop_mail(self, sid: int, number: int) -> None:
        letters = self.letters.get(sid, {})
        letters.pop(number, None)
        if not letters:
            self.letters.pop(sid, None)

    def wait(self, wait_id: str) -> WaitRow | None:
        return self.waits.get(wait_id)

    def put_wait(self, row: WaitRow) -> None:
        self.waits[row.id] = row
        self.waits_by_sid.setdefault(row.sid, {})[row.id] = None

    def drop_waits(self, sid: int) -> None:
        if sid in self.waits_by_sid:
            for wait_id in self.waits_by_sid.pop(sid):
                del self.waits[wait_id]
            self.drop_references(waits_of(sid))

    def worker(self, worker_id: str) -> WorkerRow | None:
        return self.workers_by_id.get(worker_id)

    def put_worker(self, row: WorkerRow) -> None:
        self.workers_by_id[row.id] = row

    def drop_worker(self, worker_id: str) -> None:
        self.workers_by_id.pop(worker_id, None)

    def workers(self) -> list[WorkerRow]:
        return list(self.workers_by_id.values())

    def deaths(self, scope: int) -> Deaths | None:
        return self.deaths_by_scope.get(scope)

    def put_deaths(self, row: Deaths) -> None:
        self.deaths_by_scope[row.scope] = row

    def drop_deaths(self, scope: int) -> None:
        self.deaths_by_scope.pop(scope, None)


class MemoryStore(MemoryProcessReads):
    """A store whose rows live as long as their object. `clock` tells the age of blobs; without one, the system does."""

    def __init__(self, rows: MemoryRows | None = None, clock: Clock | None = None) -> None:
        self.rows = rows or MemoryRows()
        super().__init__(self.rows)
        self._now = clock.now if clock is not None else _system_time
        self._ours = 0
        self._others = 0

    async def open(self) -> None:
        self._others = self.rows.changes - self._ours

    async def close(self) -> None: ...

    async def write(self, write: Write[R]) -> R:
        return self._apply(write)

    def submit(self, write: Write[R], done: Callable[[R | None, BaseException | None], None]) -> None:
        try:
            receipt = self._apply(write)
        except MainstayError as refusal:
            done(None, refusal)
        else:
            done(receipt, None)

    def _apply(self, write: Write[R]) -> R:
        receipt = rules.apply(self.rows, write, self.rows.held is not None)
        self.rows.changes += 1
        self._ours += 1
        return receipt

    async def session(self, session_id: str) -> SessionRow | None:
        return self.rows.session(session_id)

    async def session_by_sid(self, sid: int) -> SessionRow | None:
        return self.rows.by_sid.get(sid)

    async def sessions(self, wanted: SessionFilter) -> list[SessionRow]:
        found = [r for r in self.rows.by_sid.values() if not r.deleted and matches(r, wanted)]
        found.sort(key=lambda r: (r.updated, r.sid), reverse=True)
        return found[: wanted.limit]

    async def open_sessions(self) -> list[SessionRow]:
        return [self.rows.by_sid[sid] for sid in self.rows.open_sids]

    async def nodes(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        turns = self.rows.bodies.get(sid, {})
        chosen = range(first, last + 1) if last - first < len(turns) else sorted(t for t in turns if first <= t <= last)
        return [(turn, i, body) for turn in chosen for i, body in enumerate(turns.get(turn, ()))]

    async def inbox(self, sid: int) -> list[InboxRow]:
        return list(self.rows.letters.get(sid, {}).values())

    async def waits(self, sid: int | None = None, due: int | None = None) -> list[WaitRow]:
        if sid is not None:
            found = [self.rows.waits[i] for i in self.rows.waits_by_sid.get(sid, ())]
        else:
            found = [w for w in self.rows.waits.values() if w.state == "open"]
        return found if due is None else [w for w in found if w.due is not None and w.due <= due]

    async def wait(self, wait_id: str) -> WaitRow | None:
        return self.rows.waits.get(wait_id)

    async def workers(self) -> list[WorkerRow]:
        return self.rows.workers()

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

    def secret(self) -> bytes:
        return self.rows.secret

    def lease(self, worker_id: str) -> MemoryLease:
        return MemoryLease(self.rows, worker_id)

    @property
    def blobs(self) -> MemoryBlobs:
        return MemoryBlobs(self.rows, self._now)


class MemoryLease:
    """A worker in this process lives while it says so."""

    def __init__(self, rows: MemoryRows, worker_id: str) -> None:
        self._rows, self._id, self.process = rows, worker_id, fork_guard.name()

    def hold(self) -> None:
        self._rows.alive.add(self._id)

    def drop(self) -> None:
        self._rows.alive.discard(self._id)

    def proven_dead(self, worker: WorkerRow) -> bool:
        return worker.id not in self._rows.alive


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


def matches(row: Any, wanted: SessionFilter) -> bool:
    """Whether a session is one of those wanted."""
    return (
        (wanted.agent is None or row.agent == wanted.agent)
        and (wanted.state is None or row.state == wanted.state)
        and row.id.startswith(wanted.prefix)
        and (wanted.before is None or row.updated < wanted.before)
    )
