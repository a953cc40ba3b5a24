"""Rows as the rules see them: what a store answers and changes, and the transaction that stands between.

A rule reads by awaiting. A store in this process answers at once, so that a rule over it runs to its end in one
`send(None)` (`run`) and needs no event loop; a store behind a network answers later. A rule changes nothing itself:
its changes are collected in a `Transaction`, and the store flushes them in order.

    a read after a change       sees it: what is collected is flushed first, unless the answer is known already
    a rule that is refused      leaves none of its changes; what rules before it in the batch changed stays
    a new row's number          is read (`next_sid`, `next_pid`, `next_place`) and counted on from there
    reads that are declared     are fetched together before the rules run (`reads.reads`, `Transaction.learn`)

What is known goes out of date by changes of the same transaction alone: the store keeps other writers out until it is
committed or rolled back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from mainstay.errors import BlobMissing, InternalError
from mainstay.model.process import Event, ProcessRow, Tombstone, WakeRow
from mainstay.model.session import Deaths, InboxRow, SessionRow, WaitRow, WorkerRow

T = TypeVar("T")

Read: TypeAlias = tuple[str, tuple[Any, ...]]
"""The name of a method of `RowReads`, and its arguments."""

Change: TypeAlias = tuple[str, tuple[Any, ...]]
"""The name of a method of `RowChanges`, and its arguments."""


class RowReads(Protocol):
    """What a store answers inside a transaction."""

    def session(self, session_id: str) -> Awaitable[SessionRow | None]: ...
    def session_by_sid(self, sid: int) -> Awaitable[SessionRow | None]: ...
    def next_sid(self) -> Awaitable[int]: ...
    def owned_by(self, worker_id: str) -> Awaitable[list[SessionRow]]: ...
    def forks_of(self, sid: int) -> Awaitable[int]: ...

    def key(self, session_id: str, key: str) -> Awaitable[tuple[int, bytes] | None]: ...

    def node(self, sid: int, turn: int, ordinal: int) -> Awaitable[bytes | None]: ...
    def records(self, sid: int, turn: int) -> Awaitable[int]:
        """How many records a turn has: the ordinal of its next one."""
        ...

    def first_mail(self, sid: int, besides: tuple[int, ...]) -> Awaitable[InboxRow | None]:
        """The first input that waits for a turn of its own, but for these."""
        ...

    def has_mail(self, sid: int, besides: tuple[int, ...]) -> Awaitable[bool]:
        """Whether an input waits for the open turn, but for these."""
        ...

    def some_mail(self, sid: int) -> Awaitable[bool]:
        """Whether anything waits in its inbox, notes too."""
        ...

    def mail(self, sid: int, number: int) -> Awaitable[InboxRow | None]: ...

    def wait(self, wait_id: str) -> Awaitable[WaitRow | None]: ...

    def process(self, process_id: str) -> Awaitable[ProcessRow | None]: ...
    def process_by_pid(self, pid: int) -> Awaitable[ProcessRow | None]: ...
    def next_pid(self) -> Awaitable[int]: ...
    def tombstone(self, process_id: str) -> Awaitable[Tombstone | None]:
        """Of a pruned process; None too where an older version pruned it."""
        ...

    def children(self, parent: str, over: bool) -> Awaitable[list[ProcessRow]]:
        """Those that are not over; with `over`, those too that are."""
        ...

    def processes_of(self, worker_id: str) -> Awaitable[list[ProcessRow]]: ...
    def has_live_processes(self, session_id: str) -> Awaitable[bool]:
        """Whether a process lives that a session may see."""
        ...

    def prunable(self, before: int, after: tuple[int, int], limit: int) -> Awaitable[list[ProcessRow]]:
        """Processes that were over before then, the first to end first: those after a time and a number."""
        ...

    def next_place(self) -> Awaitable[int]:
        """The place in the change feed that the next event, of any process, will have."""
        ...

    def event_by_key(self, pid: int, key: str) -> Awaitable[tuple[int, Event] | None]: ...
    def events_after(self, pid: int, sequence: int) -> Awaitable[list[Event]]: ...
    def last_event(self, pid: int) -> Awaitable[int]: ...

    def step(self, pid: int, ordinal: int) -> Awaitable[bytes | None]: ...
    def last_step(self, pid: int) -> Awaitable[int]:
        """The number of the last record of a journal, -1 where there is none."""
        ...

    def awaiting(self, target: str) -> Awaitable[list[int]]: ...
    def granted(self, session_id: str, pid: int) -> Awaitable[bool]: ...
    def live_named(self, session_id: str, name: str) -> Awaitable[list[ProcessRow]]:
        """Live processes of a name that a session may see."""
        ...

    def wake(self, number: int) -> Awaitable[WakeRow | None]: ...
    def pending_wakes(self, pid: int) -> Awaitable[list[WakeRow]]: ...
    def pending_wakes_for(self, session_id: str) -> Awaitable[list[WakeRow]]: ...

    def has_blob(self, digest: str) -> Awaitable[bool]: ...

    def worker(self, worker_id: str) -> Awaitable[WorkerRow | None]: ...
    def workers(self) -> Awaitable[list[WorkerRow]]: ...

    def deaths(self, scope: int) -> Awaitable[Deaths | None]: ...
    def session_deaths(self, session_id: str) -> Awaitable[Deaths | None]: ...
    def process_deaths(self, process_id: str) -> Awaitable[Deaths | None]: ...


class RowChanges(Protocol):
    """What a store changes. Rows of processes refer to blobs under the negative of their number."""

    def add_session(self, row: SessionRow) -> None: ...
    def put_session(self, row: SessionRow) -> None: ...
    def put_settings(self, sid: int, settings: bytes) -> None: ...
    def drop_session_data(self, sid: int) -> None: ...

    def put_key(self, sid: int, key: str, turn: int, digest: bytes) -> None: ...

    def add_node(self, sid: int, turn: int, ordinal: int, body: bytes) -> None:
        """Unless there is one at this place."""
        ...

    def put_node(self, sid: int, turn: int, ordinal: int, body: bytes) -> None:
        """In the place of a record that is there."""
        ...

    def put_mail(self, row: InboxRow) -> None: ...
    def drop_mail(self, sid: int, number: int) -> None: ...

    def put_wait(self, row: WaitRow) -> None: ...
    def drop_waits(self, sid: int) -> None:
        """All of a session, and what they refer to (`waits_of`)."""
        ...

    def add_process(self, row: ProcessRow) -> None: ...
    def put_process(self, row: ProcessRow) -> None: ...
    def entomb(self, tombstone: Tombstone, place: int) -> None:
        """Drop everything of a process but its tombstone, which takes a place in the change feed."""
        ...

    def add_event(self, pid: int, sequence: int, event: Event, place: int) -> None: ...
    def add_step(self, pid: int, ordinal: int, body: bytes) -> None: ...
    def drop_steps(self, pid: int, before: int) -> None: ...

    def put_awaits(self, pid: int, targets: tuple[str, ...]) -> None: ...
    def drop_awaits(self, pid: int) -> None: ...

    def put_grant(self, session_id: str, pid: int) -> None: ...
    def drop_grant(self, session_id: str, pid: int) -> None: ...
    def drop_grants(self, session_id: str) -> None: ...

    def add_wake(self, row: WakeRow) -> None: ...
    def put_wake(self, row: WakeRow) -> None: ...

    def add_blobs(self, sid: int, digests: tuple[str, ...]) -> None: ...

    def put_worker(self, row: WorkerRow) -> None: ...
    def drop_worker(self, worker_id: str) -> None: ...

    def put_deaths(self, row: Deaths) -> None: ...
    def drop_deaths(self, scope: int) -> None: ...


class Rows(RowReads, RowChanges, Protocol):
    """What a store implements. `flush` is given the collected changes, to be made in order."""

    def flush(self, changes: Sequence[Change]) -> Awaitable[None]: ...


_NODES, _MAIL = frozenset({"node", "records"}), frozenset({"first_mail", "has_mail", "some_mail", "mail"})
_EVENTS, _STEPS = frozenset({"event_by_key", "events_after", "last_event"}), frozenset({"step", "last_step"})
_DEATHS = frozenset({"deaths", "session_deaths", "process_deaths"})
_GRANTS = frozenset({"granted", "live_named", "has_live_processes"})
_SETS = frozenset({"children", "processes_of", "has_live_processes", "prunable", "live_named"})
_WAKES = frozenset({"wake", "pending_wakes", "pending_wakes_for"})

OUTDATED: dict[str, frozenset[str]] = {
    "add_session": frozenset({"owned_by", "forks_of"}),
    "put_session": frozenset({"owned_by", "forks_of"}),
    "put_settings": frozenset(),
    "drop_session_data": frozenset({*_NODES, *_MAIL, "key"}),
    "put_key": frozenset({"key"}),
    "add_node": _NODES,
    "put_node": _NODES,
    "put_mail": _MAIL,
    "drop_mail": _MAIL,
    "put_wait": frozenset(),
    "drop_waits": frozenset({"wait"}),
    "add_process": _SETS,
    "put_process": _SETS,
    "entomb": frozenset(
        {"process", "process_by_pid", "tombstone", *_SETS, *_EVENTS, *_STEPS, *_WAKES, "granted", "awaiting"}
    ),
    "add_event": _EVENTS,
    "add_step": _STEPS,
    "drop_steps": _STEPS,
    "put_awaits": frozenset({"awaiting"}),
    "drop_awaits": frozenset({"awaiting"}),
    "put_grant": _GRANTS,
    "drop_grant": _GRANTS,
    "drop_grants": _GRANTS,
    "add_wake": _WAKES,
    "put_wake": _WAKES,
    "add_blobs": frozenset(),
    "put_worker": frozenset({"worker", "workers"}),
    "drop_worker": frozenset({"worker", "workers"}),
    "put_deaths": _DEATHS,
    "drop_deaths": _DEATHS,
}
"""Which reads a change may answer otherwise. Rows themselves are known anew after it (`Transaction._remember`)."""

PARTED = _NODES | _MAIL | _EVENTS | _STEPS
"""Reads whose first argument is the number of a session or process: a change of another one leaves them as they are."""


class PartlyApplied(Exception):
    """A rule was refused after some of its changes had been flushed: the transaction must be rolled back.

    No MainstayError, which would say that the write alone is refused. It is a fault of the rule.
    """


class Transaction:
    """Rows as one batch of rules sees them, with what the rules before in the batch have changed.

    State, all of it used by the one thread or task that runs the batch: `_changes` are collected and not flushed, the
    first `_kept` of them by rules that were accepted; `_known` are answers that were fetched beforehand, brought up to
    date by changes; `_dirty`: there is something of either, which a read must look at; `_numbers` are the next numbers
    of new rows, `_granted_numbers` those that accepted rules left; `_flushed`: changes of the rule that runs were.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._reset()

    def _reset(self) -> None:
        self._changes: list[Change] = []
        self._known: dict[Read, Any] = {}
        self._numbers: dict[str, int] = {}
        self._granted_numbers: dict[str, int] = {}
        self._kept = 0
        self._flushed = self._dirty = False

    def begin(self) -> None:
        """A new batch: nothing is collected or known."""
        if self._dirty or self._numbers or self._flushed:
            self._reset()

    def learn(self, answers: dict[Read, Any]) -> None:
        """Answers of the store that hold now, when nothing is collected."""
        self._known.update(answers)
        self._dirty = True

    def keep(self) -> None:
        """The rule that ran is accepted."""
        self._kept, self._flushed = len(self._changes), False
        if self._numbers:
            self._granted_numbers = self._numbers.copy()

    def discard(self) -> None:
        """The rule that ran is refused."""
        if self._flushed:
            raise PartlyApplied
        if len(self._changes) > self._kept:
            del self._changes[self._kept :]
            self._known.clear()  # it may hold what the rule has changed
        self._numbers = self._granted_numbers.copy()

    async def flush(self) -> None:
        """Let the store make the changes, in the order in which they were collected."""
        changes = self.take_changes()
        if changes:
            await self._rows.flush(changes)

    def take_changes(self) -> list[Change]:
        """The changes that were collected, for a store that makes them at once."""
        changes = self._changes
        if changes:
            self._flushed = self._flushed or len(changes) > self._kept
            self._changes, self._kept, self._dirty = [], 0, bool(self._known)
        return changes

    # ------------------------------------------------------------------ reads

    async def _get(self, name: str, *args: Any) -> Any:
        if self._known and (name, args) in self._known:
            return self._known[name, args]
        if self._changes:
            await self.flush()
        return await getattr(self._rows, name)(*args)

    async def _next(self, name: str) -> int:
        number: int | None = self._numbers.get(name)
        if number is None:
            number = int(await self._get(name))
        self._numbers[name] = number + 1
        return number

    def session(self, session_id: str) -> Awaitable[SessionRow | None]:
        return self._get("session", session_id) if self._dirty else self._rows.session(session_id)

    def session_by_sid(self, sid: int) -> Awaitable[SessionRow | None]:
        return self._get("session_by_sid", sid) if self._dirty else self._rows.session_by_sid(sid)

    def owned_by(self, worker_id: str) -> Awaitable[list[SessionRow]]:
        return self._get("owned_by", worker_id) if self._dirty else self._rows.owned_by(worker_id)

    def forks_of(self, sid: int) -> Awaitable[int]:
        return self._get("forks_of", sid) if self._dirty else self._rows.forks_of(sid)

    def key(self, session_id: str, key: str) -> Awaitable[tuple[int, bytes] | None]:
        return self._get("key", session_id, key) if self._dirty else self._rows.key(session_id, key)

    def node(self, sid: int, turn: int, ordinal: int) -> Awaitable[bytes | None]:
        return self._get("node", sid, turn, ordinal) if self._dirty else self._rows.node(sid, turn, ordinal)

    def records(self, sid: int, turn: int) -> Awaitable[int]:
        return self._get("records", sid, turn) if self._dirty else self._rows.records(sid, turn)

    def first_mail(self, sid: int, besides: tuple[int, ...]) -> Awaitable[InboxRow | None]:
        return self._get("first_mail", sid, besides) if self._dirty else self._rows.first_mail(sid, besides)

    def has_mail(self, sid: int, besides: tuple[int, ...]) -> Awaitable[bool]:
        return self._get("has_mail", sid, besides) if self._dirty else self._rows.has_mail(sid, besides)

    def some_mail(self, sid: int) -> Awaitable[bool]:
        return self._get("some_mail", sid) if self._dirty else self._rows.some_mail(sid)

    def mail(self, sid: int, number: int) -> Awaitable[InboxRow | None]:
        return self._get("mail", sid, number) if self._dirty else self._rows.mail(sid, number)

    def wait(self, wait_id: str) -> Awaitable[WaitRow | None]:
        return self._get("wait", wait_id) if self._dirty else self._rows.wait(wait_id)

    def process(self, process_id: str) -> Awaitable[ProcessRow | None]:
        return self._get("process", process_id) if self._dirty else self._rows.process(process_id)

    def process_by_pid(self, pid: int) -> Awaitable[ProcessRow | None]:
        return self._get("process_by_pid", pid) if self._dirty else self._rows.process_by_pid(pid)

    def tombstone(self, process_id: str) -> Awaitable[Tombstone | None]:
        return self._get("tombstone", process_id) if self._dirty else self._rows.tombstone(process_id)

    def children(self, parent: str, over: bool) -> Awaitable[list[ProcessRow]]:
        return self._get("children", parent, over) if self._dirty else self._rows.children(parent, over)

    def processes_of(self, worker_id: str) -> Awaitable[list[ProcessRow]]:
        return self._get("processes_of", worker_id) if self._dirty else self._rows.processes_of(worker_id)

    def has_live_processes(self, session_id: str) -> Awaitable[bool]:
        return self._get("has_live_processes", session_id) if self._dirty else self._rows.has_live_processes(session_id)

    def prunable(self, before: int, after: tuple[int, int], limit: int) -> Awaitable[list[ProcessRow]]:
        return self._get("prunable", before, after, limit) if self._dirty else self._rows.prunable(before, after, limit)

    def event_by_key(self, pid: int, key: str) -> Awaitable[tuple[int, Event] | None]:
        return self._get("event_by_key", pid, key) if self._dirty else self._rows.event_by_key(pid, key)

    def events_after(self, pid: int, sequence: int) -> Awaitable[list[Event]]:
        return self._get("events_after", pid, sequence) if self._dirty else self._rows.events_after(pid, sequence)

    def last_event(self, pid: int) -> Awaitable[int]:
        return self._get("last_event", pid) if self._dirty else self._rows.last_event(pid)

    def step(self, pid: int, ordinal: int) -> Awaitable[bytes | None]:
        return self._get("step", pid, ordinal) if self._dirty else self._rows.step(pid, ordinal)

    def last_step(self, pid: int) -> Awaitable[int]:
        return self._get("last_step", pid) if self._dirty else self._rows.last_step(pid)

    def awaiting(self, target: str) -> Awaitable[list[int]]:
        return self._get("awaiting", target) if self._dirty else self._rows.awaiting(target)

    def granted(self, session_id: str, pid: int) -> Awaitable[bool]:
        return self._get("granted", session_id, pid) if self._dirty else self._rows.granted(session_id, pid)

    def live_named(self, session_id: str, name: str) -> Awaitable[list[ProcessRow]]:
        return self._get("live_named", session_id, name) if self._dirty else self._rows.live_named(session_id, name)

    def wake(self, number: int) -> Awaitable[WakeRow | None]:
        return self._get("wake", number) if self._dirty else self._rows.wake(number)

    def pending_wakes(self, pid: int) -> Awaitable[list[WakeRow]]:
        return self._get("pending_wakes", pid) if self._dirty else self._rows.pending_wakes(pid)

    def pending_wakes_for(self, session_id: str) -> Awaitable[list[WakeRow]]:
        return self._get("pending_wakes_for", session_id) if self._dirty else self._rows.pending_wakes_for(session_id)

    def has_blob(self, digest: str) -> Awaitable[bool]:
        return self._get("has_blob", digest) if self._dirty else self._rows.has_blob(digest)

    def worker(self, worker_id: str) -> Awaitable[WorkerRow | None]:
        return self._get("worker", worker_id) if self._dirty else self._rows.worker(worker_id)

    def workers(self) -> Awaitable[list[WorkerRow]]:
        return self._get("workers") if self._dirty else self._rows.workers()

    def deaths(self, scope: int) -> Awaitable[Deaths | None]:
        return self._get("deaths", scope) if self._dirty else self._rows.deaths(scope)

    def session_deaths(self, session_id: str) -> Awaitable[Deaths | None]:
        return self._get("session_deaths", session_id) if self._dirty else self._rows.session_deaths(session_id)

    def process_deaths(self, process_id: str) -> Awaitable[Deaths | None]:
        return self._get("process_deaths", process_id) if self._dirty else self._rows.process_deaths(process_id)

    def next_sid(self) -> Awaitable[int]:
        return self._next("next_sid")

    def next_pid(self) -> Awaitable[int]:
        return self._next("next_pid")

    def next_place(self) -> Awaitable[int]:
        return self._next("next_place")

    # ------------------------------------------------------------------ changes

    def _do(self, change: Change) -> None:
        self._dirty = True
        self._changes.append(change)
        if self._known:
            self._outdate(*change)

    def _outdate(self, name: str, args: tuple[Any, ...]) -> None:
        stale, part = OUTDATED[name], getattr(args[0], "sid", args[0])
        for key in [k for k in self._known if k[0] in stale and (k[0] not in PARTED or k[1][0] == part)]:
            del self._known[key]
        row = args[0]
        if isinstance(row, SessionRow):
            self._known["session", (row.id,)] = self._known["session_by_sid", (row.sid,)] = row
        elif isinstance(row, ProcessRow):
            self._known["process", (row.id,)] = self._known["process_by_pid", (row.pid,)] = row
        elif isinstance(row, WaitRow):
            self._known["wait", (row.id,)] = row

    def add_session(self, row: SessionRow) -> None:
        self._do(("add_session", (row,)))

    def put_session(self, row: SessionRow) -> None:
        self._do(("put_session", (row,)))

    def put_settings(self, sid: int, settings: bytes) -> None:
        self._do(("put_settings", (sid, settings)))

    def drop_session_data(self, sid: int) -> None:
        self._do(("drop_session_data", (sid,)))

    def put_key(self, sid: int, key: str, turn: int, digest: bytes) -> None:
        self._do(("put_key", (sid, key, turn, digest)))

    def add_node(self, sid: int, turn: int, ordinal: int, body: bytes) -> None:
        self._do(("add_node", (sid, turn, ordinal, body)))

    def put_node(self, sid: int, turn: int, ordinal: int, body: bytes) -> None:
        self._do(("put_node", (sid, turn, ordinal, body)))

    def put_mail(self, row: InboxRow) -> None:
        self._do(("put_mail", (row,)))

    def drop_mail(self, sid: int, number: int) -> None:
        self._do(("drop_mail", (sid, number)))

    def put_wait(self, row: WaitRow) -> None:
        self._do(("put_wait", (row,)))

    def drop_waits(self, sid: int) -> None:
        self._do(("drop_waits", (sid,)))

    def add_process(self, row: ProcessRow) -> None:
        self._do(("add_process", (row,)))

    def put_process(self, row: ProcessRow) -> None:
        self._do(("put_process", (row,)))

    def entomb(self, tombstone: Tombstone, place: int) -> None:
        self._do(("entomb", (tombstone, place)))

    def add_event(self, pid: int, sequence: int, event: Event, place: int) -> None:
        self._do(("add_event", (pid, sequence, event, place)))

    def add_step(self, pid: int, ordinal: int, body: bytes) -> None:
        self._do(("add_step", (pid, ordinal, body)))

    def drop_steps(self, pid: int, before: int) -> None:
        self._do(("drop_steps", (pid, before)))

    def put_awaits(self, pid: int, targets: tuple[str, ...]) -> None:
        self._do(("put_awaits", (pid, targets)))

    def drop_awaits(self, pid: int) -> None:
        self._do(("drop_awaits", (pid,)))

    def put_grant(self, session_id: str, pid: int) -> None:
        self._do(("put_grant", (session_id, pid)))

    def drop_grant(self, session_id: str, pid: int) -> None:
        self._do(("drop_grant", (session_id, pid)))

    def drop_grants(self, session_id: str) -> None:
        self._do(("drop_grants", (session_id,)))

    def add_wake(self, row: WakeRow) -> None:
        self._do(("add_wake", (row,)))

    def put_wake(self, row: WakeRow) -> None:
        self._do(("put_wake", (row,)))

    def add_blobs(self, sid: int, digests: tuple[str, ...]) -> None:
        self._do(("add_blobs", (sid, digests)))

    def put_worker(self, row: WorkerRow) -> None:
        self._do(("put_worker", (row,)))

    def drop_worker(self, worker_id: str) -> None:
        self._do(("drop_worker", (worker_id,)))

    def put_deaths(self, row: Deaths) -> None:
        self._do(("put_deaths", (row,)))

    def drop_deaths(self, scope: int) -> None:
        self._do(("drop_deaths", (scope,)))


def run(rule: Coroutine[Any, Any, T]) -> T:
    """Run a rule to its end over a store that answers at once."""
    try:
        rule.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    rule.close()
    raise InternalError("a store that answers at once has waited for something in a transaction")


def waits_of(sid: int) -> int:
    """The number under which the waits of a session refer to blobs: their references go with them."""
    return (1 << 40) + sid


async def check_blobs(rows: Transaction, digests: tuple[str, ...]) -> None:
    """Inside the transaction: the sweep deletes inside one too, so a reference is never left dangling."""
    for digest in digests:
        if not await rows.has_blob(digest):
            raise BlobMissing(digest)
