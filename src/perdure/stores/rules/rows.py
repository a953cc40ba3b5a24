"""Rows as the rules see them: what a rule may read and change, and the transaction that stands between it and a store.

Reads and changes are data, as writes are. A rule reads by awaiting. A store in this process answers at once, so that a
rule over it runs to its end in one `send(None)` (`run`) and needs no event loop; a store behind a network answers
later. A rule changes nothing itself: its changes are collected in a `Transaction`, and the store makes them in order.

    a read after a change       sees it: where the change may answer it otherwise, what is collected is flushed first
    a rule that is refused      leaves none of its changes; what rules before it in the batch changed stays
    a new row's number          is read (`NextSid`, `NextPid`, `NextPlace`) and counted on from there
    reads that are declared     are fetched together before the rules run (`rules.reads`, `Transaction.learn`)

What is known goes out of date by changes of the same transaction alone: the store keeps other writers out until it is
committed or rolled back.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import BlobMissing, InternalError
from perdure.model.limit import Account, Reservation
from perdure.model.process import Event, ProcessRow, Tombstone, WakeRow
from perdure.model.session import Deaths, Dump, InboxRow, SessionRow, WaitRow, WorkerRow
from perdure.model.spending import UsageRow

T = TypeVar("T")

MOST_DUMPS = 10
"""Dumps of a session that are kept: that of its open turn, that of the newest committed one, and eight older ones."""


class RowRead(Struct, Generic[T], frozen=True, gc=False):
    """Something that a rule asks of its store, whose answer is a T."""


class RowChange(Struct, frozen=True, gc=False):
    """Something that a store changes. Rows of processes refer to blobs under the negative of their number."""


# ---------------------------------------------------------------------- reads of sessions


class SessionById(RowRead["SessionRow | None"], frozen=True, gc=False):
    session_id: str


class SessionBySid(RowRead["SessionRow | None"], frozen=True, gc=False):
    sid: int


class TurnRows(Struct, frozen=True, gc=False):
    """What the owner of a turn writes beside: how many `records` the turn has, which is the ordinal of its next one;
    whether an input waits for it (`inputs`); the first one that waits for a turn of its own (`following`); and whether
    the session may have `waits`."""

    row: SessionRow | None
    records: int = 0
    inputs: bool = False
    following: InboxRow | None = None
    waits: bool = False


class OwnedTurn(RowRead[TurnRows], frozen=True, gc=False):
    """One read, because every write of an owner needs it. Inputs `besides` are delivered by the same write."""

    sid: int
    turn: int
    besides: tuple[int, ...]


class NextSid(RowRead[int], frozen=True, gc=False): ...


class SessionsOwnedBy(RowRead["list[SessionRow]"], frozen=True, gc=False):
    worker_id: str


class ForksOf(RowRead[int], frozen=True, gc=False):
    """How many there are."""

    sid: int


class InputByKey(RowRead["tuple[int, bytes] | None"], frozen=True, gc=False):
    """Its turn, and the digest of what was said."""

    session_id: str
    key: str


class NodeAt(RowRead["bytes | None"], frozen=True, gc=False):
    sid: int
    turn: int
    ordinal: int


class HasInputs(RowRead[bool], frozen=True, gc=False):
    """Whether anything waits in the inbox, notes too."""

    sid: int


class InputAt(RowRead["InboxRow | None"], frozen=True, gc=False):
    sid: int
    number: int


class WaitById(RowRead["WaitRow | None"], frozen=True, gc=False):
    wait_id: str


class AccountOf(RowRead["Account | None"], frozen=True, gc=False):
    name: str
    key: str


class ReservationAt(RowRead["Reservation | None"], frozen=True, gc=False):
    sid: int
    name: str


class ReservationsBySid(RowRead["list[Reservation]"], frozen=True, gc=False):
    sid: int


class ReservationsOf(RowRead["list[Reservation]"], frozen=True, gc=False):
    session_id: str


class ReservationsOwnedBy(RowRead["list[Reservation]"], frozen=True, gc=False):
    worker_id: str


# ---------------------------------------------------------------------- reads of processes


class ProcessById(RowRead["ProcessRow | None"], frozen=True, gc=False):
    """Also one that was pruned."""

    process_id: str


class ProcessByPid(RowRead["ProcessRow | None"], frozen=True, gc=False):
    pid: int


class NextPid(RowRead[int], frozen=True, gc=False): ...


class TombstoneOf(RowRead["Tombstone | None"], frozen=True, gc=False):
    """Of a pruned process; None too where an older version pruned it."""

    process_id: str


class ChildrenOf(RowRead["list[ProcessRow]"], frozen=True, gc=False):
    """Those that are not over; with `over`, those too that are."""

    parent: str
    over: bool


class ProcessesOwnedBy(RowRead["list[ProcessRow]"], frozen=True, gc=False):
    worker_id: str


class HasLiveProcesses(RowRead[bool], frozen=True, gc=False):
    """Whether a process lives that a session may see."""

    session_id: str


class ActiveProcessesReach(RowRead[bool], frozen=True, gc=False):
    """Whether so many processes of a kind are active (`ProcessRow.active`): all, or those which a session started."""

    kind: str
    session_id: str | None
    number: int


class PrunableProcesses(RowRead["list[ProcessRow]"], frozen=True, gc=False):
    """Processes that were over before then, the first to end first: those after a time and a number."""

    before: int
    after: tuple[int, int]
    limit: int


class NextPlace(RowRead[int], frozen=True, gc=False):
    """The place in the change feed that the next event, of any process, will have."""


class EventByKey(RowRead["tuple[int, Event] | None"], frozen=True, gc=False):
    pid: int
    key: str


class EventsAfter(RowRead["list[Event]"], frozen=True, gc=False):
    pid: int
    sequence: int


class LastEvent(RowRead[int], frozen=True, gc=False):
    """The place of a process's newest event in the change feed."""

    pid: int


class StepAt(RowRead["bytes | None"], frozen=True, gc=False):
    pid: int
    ordinal: int


class LastStep(RowRead[int], frozen=True, gc=False):
    """The number of the last record of a journal, -1 where there is none."""

    pid: int


class ProcessesAwaiting(RowRead["list[int]"], frozen=True, gc=False):
    """Those that wait for a target: a process by its number, a turn by that of its session, negated."""

    target: str


class IsGranted(RowRead[bool], frozen=True, gc=False):
    session_id: str
    pid: int


class LiveProcessesSeenBy(RowRead["list[ProcessRow]"], frozen=True, gc=False):
    """Those that a session may see."""

    session_id: str


class LiveProcessesNamed(RowRead["list[ProcessRow]"], frozen=True, gc=False):
    """Those that a session may see."""

    session_id: str
    name: str


class WakeByNumber(RowRead["WakeRow | None"], frozen=True, gc=False):
    number: int


class PendingWakesOf(RowRead["list[WakeRow]"], frozen=True, gc=False):
    pid: int


class PendingWakesFor(RowRead["list[WakeRow]"], frozen=True, gc=False):
    session_id: str


# ---------------------------------------------------------------------- reads of blobs and workers


class HasBlob(RowRead[bool], frozen=True, gc=False):
    digest: str


class WorkerById(RowRead["WorkerRow | None"], frozen=True, gc=False):
    worker_id: str


class AllWorkers(RowRead["list[WorkerRow]"], frozen=True, gc=False): ...


class DeathsOf(RowRead["Deaths | None"], frozen=True, gc=False):
    scope: int


class DeathsOfSession(RowRead["Deaths | None"], frozen=True, gc=False):
    session_id: str


class DeathsOfProcess(RowRead["Deaths | None"], frozen=True, gc=False):
    process_id: str


# ---------------------------------------------------------------------- changes of sessions


class AddSession(RowChange, frozen=True, gc=False):
    row: SessionRow


class PutSession(RowChange, frozen=True, gc=False):
    row: SessionRow


class PutSettings(RowChange, frozen=True, gc=False):
    sid: int
    settings: bytes


class PutLabels(RowChange, frozen=True, gc=False):
    """All that a session can be found by, in place of what it was found by before."""

    sid: int
    labels: frozenset[tuple[str, str]]


class DropSessionData(RowChange, frozen=True, gc=False):
    sid: int


class PutKey(RowChange, frozen=True, gc=False):
    sid: int
    key: str
    turn: int
    digest: bytes


class AddNode(RowChange, frozen=True, gc=False):
    """Unless there is one at this place."""

    sid: int
    turn: int
    ordinal: int
    body: bytes


class PutNode(RowChange, frozen=True, gc=False):
    """In the place of a record that is there."""

    sid: int
    turn: int
    ordinal: int
    body: bytes


class PutInput(RowChange, frozen=True, gc=False):
    row: InboxRow


class DropInput(RowChange, frozen=True, gc=False):
    sid: int
    number: int


class PutWait(RowChange, frozen=True, gc=False):
    row: WaitRow


class DropWaits(RowChange, frozen=True, gc=False):
    """All of a session, and what they refer to (`waits_of`)."""

    sid: int


class PutDump(RowChange, frozen=True, gc=False):
    """In the place of the one that the turn has. Of a session, the `MOST_DUMPS` newest stay; blobs that the others
    were are referred to no longer (`dumps_of`)."""

    sid: int
    turn: int
    dump: Dump


class DropDumps(RowChange, frozen=True, gc=False):
    """All of a session, and what they refer to."""

    sid: int


class ReferToBlobs(RowChange, frozen=True, gc=False):
    sid: int
    digests: tuple[str, ...]


class AddUsage(RowChange, frozen=True, gc=False):
    """To the sum with the same key, which is begun with it where there is none."""

    spent: UsageRow


class PutAccount(RowChange, frozen=True, gc=False):
    row: Account


class PutReservation(RowChange, frozen=True, gc=False):
    row: Reservation


class DropReservation(RowChange, frozen=True, gc=False):
    sid: int
    name: str


# ---------------------------------------------------------------------- changes of processes


class AddProcess(RowChange, frozen=True, gc=False):
    row: ProcessRow


class PutProcess(RowChange, frozen=True, gc=False):
    row: ProcessRow


class Entomb(RowChange, frozen=True, gc=False):
    """Drop everything of a process but its tombstone, which takes a place in the change feed."""

    tombstone: Tombstone
    place: int


class LogEvent(RowChange, frozen=True, gc=False):
    pid: int
    sequence: int
    event: Event
    place: int


class AddStep(RowChange, frozen=True, gc=False):
    pid: int
    ordinal: int
    body: bytes


class DropSteps(RowChange, frozen=True, gc=False):
    pid: int
    before: int


class PutAwaits(RowChange, frozen=True, gc=False):
    pid: int
    targets: tuple[str, ...]


class DropAwaits(RowChange, frozen=True, gc=False):
    pid: int


class PutGrant(RowChange, frozen=True, gc=False):
    session_id: str
    pid: int


class DropGrant(RowChange, frozen=True, gc=False):
    session_id: str
    pid: int


class DropGrants(RowChange, frozen=True, gc=False):
    session_id: str


class AddWake(RowChange, frozen=True, gc=False):
    row: WakeRow


class PutWake(RowChange, frozen=True, gc=False):
    row: WakeRow


# ---------------------------------------------------------------------- changes of workers


class PutWorker(RowChange, frozen=True, gc=False):
    row: WorkerRow


class DropWorker(RowChange, frozen=True, gc=False):
    worker_id: str


class PutDeaths(RowChange, frozen=True, gc=False):
    row: Deaths


class DropDeaths(RowChange, frozen=True, gc=False):
    scope: int


Kinds: TypeAlias = frozenset[type[RowRead[Any]]]

ALL_READS: Kinds = frozenset(RowRead.__subclasses__())
ALL_CHANGES: frozenset[type[RowChange]] = frozenset(RowChange.__subclasses__())

_INPUTS: Kinds = frozenset({InputAt, HasInputs, OwnedTurn})
_EVENTS: Kinds = frozenset({EventByKey, EventsAfter, LastEvent})
_STEPS: Kinds = frozenset({StepAt, LastStep})
_DEATHS: Kinds = frozenset({DeathsOf, DeathsOfSession, DeathsOfProcess})
_GRANTS: Kinds = frozenset({IsGranted, LiveProcessesNamed, LiveProcessesSeenBy, HasLiveProcesses})
_SESSIONS: Kinds = frozenset({SessionById, SessionBySid, OwnedTurn, SessionsOwnedBy, ForksOf})
_PROCESSES: Kinds = frozenset(
    {
        ProcessById,
        ProcessByPid,
        ChildrenOf,
        ProcessesOwnedBy,
        HasLiveProcesses,
        ActiveProcessesReach,
        PrunableProcesses,
        LiveProcessesNamed,
        LiveProcessesSeenBy,
    }
)
_RESERVATIONS: Kinds = frozenset({ReservationAt, ReservationsBySid, ReservationsOf, ReservationsOwnedBy})
_WAKES: Kinds = frozenset({WakeByNumber, PendingWakesOf, PendingWakesFor})

OUTDATED: Mapping[type[RowChange], Kinds] = {
    AddSession: _SESSIONS,
    PutSession: _SESSIONS,
    PutSettings: frozenset({SessionById, SessionBySid}),
    PutLabels: frozenset(),
    DropSessionData: frozenset({NodeAt, *_INPUTS, InputByKey}),
    PutKey: frozenset({InputByKey}),
    AddNode: frozenset({NodeAt, OwnedTurn}),
    PutNode: frozenset({NodeAt, OwnedTurn}),
    PutInput: _INPUTS,
    DropInput: _INPUTS,
    PutWait: frozenset({WaitById, OwnedTurn}),
    DropWaits: frozenset({WaitById, OwnedTurn}),
    PutDump: frozenset(),
    DropDumps: frozenset(),
    ReferToBlobs: frozenset(),
    AddUsage: frozenset(),
    PutAccount: frozenset({AccountOf}),
    PutReservation: _RESERVATIONS,
    DropReservation: _RESERVATIONS,
    AddProcess: _PROCESSES,
    PutProcess: _PROCESSES,
    Entomb: frozenset(
        {TombstoneOf, DeathsOfProcess, *_PROCESSES, *_EVENTS, *_STEPS, *_WAKES, IsGranted, ProcessesAwaiting}
    ),
    LogEvent: _EVENTS,
    AddStep: _STEPS,
    DropSteps: _STEPS,
    PutAwaits: frozenset({ProcessesAwaiting}),
    DropAwaits: frozenset({ProcessesAwaiting}),
    PutGrant: _GRANTS,
    DropGrant: _GRANTS,
    DropGrants: _GRANTS,
    AddWake: _WAKES,
    PutWake: _WAKES,
    PutWorker: frozenset({WorkerById, AllWorkers}),
    DropWorker: frozenset({WorkerById, AllWorkers}),
    PutDeaths: _DEATHS,
    DropDeaths: _DEATHS,
}
"""Which reads a change may answer otherwise (`_affects`). Rows themselves are known after it (`Transaction._note`)."""

PARTED: Kinds = frozenset({NodeAt, *_INPUTS, *_EVENTS, *_STEPS})
"""Reads of one session or process: a change of another one leaves them as they are."""


# ---------------------------------------------------------------------- what a store does


class Rows(Protocol):
    """What a store implements: a reader for every kind of read, and `flush`, which makes changes in order."""

    @property
    def readers(self) -> Mapping[type[RowRead[Any]], Callable[[Any, Any], Awaitable[Any]]]: ...

    def flush(self, changes: Sequence[RowChange]) -> Awaitable[None]: ...


def methods(of: type, kinds: frozenset[type[Any]]) -> dict[type[Any], Callable[[Any, Any], Any]]:
    """The methods of a class by the kinds of reads or changes that they serve: `put_session` for `PutSession`.

    A kind without a method is an AttributeError when the table is made.
    """
    return {kind: getattr(of, re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()) for kind in kinds}


# ---------------------------------------------------------------------- a transaction


class PartlyApplied(Exception):
    """A rule was refused after some of its changes had been flushed: the transaction must be rolled back.

    No PerdureError, which would say that the write alone is refused. It is a fault of the rule.
    """


class Transaction:
    """Rows as one batch of rules sees them, with what the rules before in the batch have changed.

    State, all of it used by the one thread or task that runs the batch: `changes` are collected and not flushed, and
    `change` adds one; `flushed` is how many were flushed; `numbers` are the next numbers of new rows; `_known` are
    answers that were fetched beforehand, brought up to date by the first `_noted` of the changes.
    """

    __slots__ = ("_known", "_noted", "_rows", "change", "changes", "flushed", "numbers")

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.changes: list[RowChange] = []
        self.change = self.changes.append
        self.flushed = 0
        self.numbers: dict[RowRead[int], int] = {}
        self._known: dict[RowRead[Any], Any] = {}
        self._noted = 0

    async def read(self, read: RowRead[T]) -> T:
        """The answer to a read, which sees all changes so far."""
        if self._known:
            self._note()
            if read in self._known:
                known: T = self._known[read]
                return known
        if self.changes:
            kind = type(read)
            for change in self.changes:
                if kind in OUTDATED[type(change)] and _affects(change, read):
                    await self.flush()
                    break
        answer: T = await self._rows.readers[type(read)](self._rows, read)
        return answer

    async def number(self, of: RowRead[int]) -> int:
        """The next number of a kind of rows, which is taken with this."""
        number = self.numbers.get(of)
        if number is None:  # no collected change has taken one, so nothing is flushed first
            number = self._known.get(of) or await self._rows.readers[type(of)](self._rows, of)
        self.numbers[of] = number + 1
        return number

    async def flush(self) -> None:
        """Let the store make the changes, in the order in which they were collected."""
        if self.changes:
            if self._known:
                self._note()
            changes = self.changes.copy()
            self.changes.clear()
            self._noted, self.flushed = 0, self.flushed + len(changes)
            await self._rows.flush(changes)

    def learn(self, answers: Mapping[RowRead[Any], Any]) -> None:
        """Answers of the store that hold now, when nothing is collected."""
        self._known.update(answers)

    def undo(self, before: int, numbers: dict[RowRead[int], int]) -> None:
        """A rule is refused: only so many changes, flushed or not, and numbers were there before it."""
        if self.flushed > before:
            raise PartlyApplied
        kept = before - self.flushed
        if self._noted > kept:
            self._known.clear()  # it holds what the rule has changed
            self._noted = kept
        del self.changes[kept:]
        self.numbers = numbers

    def _note(self) -> None:
        """Bring what is known up to date with the changes since the last time."""
        known = self._known
        for change in self.changes[self._noted :]:
            stale, row = OUTDATED[type(change)], getattr(change, "row", None)
            for read in [each for each in known if type(each) in stale and _affects(change, each)]:
                answer = known.pop(read)
                if isinstance(row, SessionRow) and isinstance(answer, TurnRows):
                    known[read] = replace(answer, row=row)
            if isinstance(row, SessionRow):
                known[SessionById(row.id)] = known[SessionBySid(row.sid)] = row
            elif isinstance(row, ProcessRow):
                known[ProcessById(row.id)] = known[ProcessByPid(row.pid)] = row
            elif isinstance(row, WaitRow):
                known[WaitById(row.id)] = row
        self._noted = len(self.changes)


def _affects(change: RowChange, read: RowRead[Any]) -> bool:
    """Whether a change may answer a read that it outdates (`OUTDATED`): of the same session, process or parent."""
    row = getattr(change, "row", getattr(change, "tombstone", change))
    if type(read) in PARTED:
        return _number(row) == _number(read)
    if isinstance(read, ChildrenOf) and isinstance(row, ProcessRow):
        return row.registration.parent == read.parent
    return True


def _number(about: object) -> int | None:
    """The number of the session or process that a row, a read or a change is about."""
    number: int | None = getattr(about, "sid", getattr(about, "pid", None))
    return number


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


def dumps_of(sid: int) -> int:
    """The same for its dumps."""
    return (1 << 41) + sid


async def check_blobs(tx: Transaction, digests: tuple[str, ...]) -> None:
    """Inside the transaction: the sweep deletes inside one too, so a reference is never left dangling."""
    for digest in digests:
        if not await tx.read(HasBlob(digest)):
            raise BlobMissing(digest)
