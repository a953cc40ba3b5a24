"""The journal of a turn or a process: what has happened is written down before anything else is done.

`Journal` is what both have in common, for the owner of one scope:

    one write at a time     A later write that overtook one which the store does not take just now would leave a hole in
                            the records.
    a write in doubt        One whose answer did not arrive, because its caller was cancelled or it was refused, is sent
                            again before anything else. Stores know a write that they have applied, so no caller goes on
                            as if its record were durable when it is not.
    retried                 While the store is unavailable the scope waits (`patiently`): nothing is lost.
    fenced                  Every write carries the scope; after another worker has claimed it, the store refuses.
    blobs first             Values too large for a row are put as blobs before the write that refers to them. A blob
                            that was swept in between is put again.

`TurnJournal` gathers records with `record` and writes them with `flush`. Every effect that acts outside is preceded by
a flush, so nothing acts while an outcome is unwritten; a last reply that leads straight to the commit is never flushed
by itself and rides in the commit. `processes/run.py` has the journal of a process. Replay is reading: `load`
gives back the records of turns, from rows or from blobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from perdure.errors import BlobMissing, StoreDamaged, StoreError, StoreInherited, StoreUnavailable, TurnFull
from perdure.graph import commit as commits
from perdure.graph.view import Turn
from perdure.model.codec import decode_row, encode, spilled
from perdure.model.ids import MAX_ORDINAL
from perdure.model.limit import Granted, Spending
from perdure.model.record import Closed, Ended, Record, Replied, Spilled, Started
from perdure.model.session import Dump, Node, WaitRow
from perdure.model.write import Append, Appended, CancelWon, Committed, TurnScope, Write
from perdure.ports.host import Clock
from perdure.ports.store import Store

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")

log = logging.getLogger("perdure.engine")

SPILL_BYTES = 64 * 1024


PAUSES = (0.1, 0.3, 1.0, 3.0)
"""Seconds between tries while the store is unavailable; the last one repeats."""


class Journal(Generic[A]):
    """The writes of the owner of one scope: see the top of this file. `A` is what the store answers.

    `_writing` guards `_in_doubt`, a write that was not answered with the blobs that it refers to, and `_ordinal`, the
    number of the next record. `_kept` are the bytes of blobs that no row refers to yet, or the path of a file.
    `stalled` is why the store does not take writes just now.
    """

    __slots__ = ("_clock", "_in_doubt", "_kept", "_on_stall", "_ordinal", "_store", "_what", "_writing", "stalled")

    def __init__(
        self, store: Store, clock: Clock, what: str, ordinal: int, on_stall: Callable[[StoreError], None] | None = None
    ) -> None:
        self._store, self._clock, self._what, self._ordinal = store, clock, what, ordinal
        self._on_stall = on_stall
        self.stalled: StoreError | None = None
        self._kept: dict[str, bytes | str] = {}
        self._writing = asyncio.Lock()
        self._in_doubt: tuple[Write[A], tuple[str, ...]] | None = None

    @property
    def _quiet(self) -> bool:
        """No write is on its way to the store, and none is in doubt."""
        return self._in_doubt is None and not self._writing.locked()

    def _answered(self, write: Write[A], answer: A) -> None:
        """What the store's answer means for the journal of a turn, or of a process: each encoder says it for itself."""
        raise NotImplementedError

    async def _settle(self) -> A:
        """Send the write that is in doubt, until the store has answered it."""
        assert self._in_doubt is not None
        write, blobs = self._in_doubt
        answer = await self.patiently(self._store.write, write, blobs)
        self._in_doubt = None
        for digest in blobs:
            self._kept.pop(digest, None)
        self._answered(write, answer)
        return answer

    async def patiently(self, work: Callable[[T], Awaitable[R]], subject: T, blobs: tuple[str, ...] = ()) -> R:
        """Do something that the scope must not go on without, until the store has answered; it may be done more than
        once. Where one of `blobs` was swept since its put, all are put again, once: a blob just put is too young."""
        tries = 0
        while True:
            try:
                receipt = await work(subject)
            except StoreInherited:
                raise
            except BlobMissing:
                if not blobs:
                    raise
                await self._put_again(blobs)
                blobs = ()
            except StoreUnavailable as error:
                if self.stalled is None:
                    log.warning("%s stalls: %s", self._what, error)
                    if self._on_stall is not None:
                        self._on_stall(error)
                self.stalled = error
                await self._clock.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
                tries += 1
            else:
                self.stalled = None
                return receipt

    async def _put_again(self, blobs: tuple[str, ...]) -> None:
        log.warning("blobs of %s were swept; they are put again", self._what)
        for digest in blobs:
            kept = self._kept.get(digest)
            if isinstance(kept, str):
                await self.patiently(self._store.blobs.put_file, kept)
            elif kept is not None:
                await self.patiently(self._store.blobs.put, kept)

    async def keep(self, data: bytes) -> str:
        """Put a blob, however long the disk takes: what it holds has happened."""
        digest = await self.patiently(self._store.blobs.put, data)
        self._kept[digest] = data
        return digest

    async def keep_file(self, path: str, patient: bool = True) -> tuple[str, int]:
        """The same for a file of the host; its digest and its size. Not `patient`, it raises StoreUnavailable."""
        put = self._store.blobs.put_file
        digest, size = await (self.patiently(put, path) if patient else put(path))
        self._kept[digest] = path
        return digest, size


class TurnJournal(Journal[Appended]):
    """The unwritten tail of a turn's records, and the scope under which they are written.

    Every append brings news back: `cancel` is a cancel request that was written meanwhile, `inputs` says that inputs
    wait. `store_id` is what the record of a call's start names: its idempotency key is made from it. `_dump` goes with
    the next write, whatever that is for: by itself it is worth none. `spending` is what the next write settles and asks
    for, `granted` what was answered to each that asked, until who asked takes it: tasks of one turn ask at once.
    """

    __slots__ = (
        "_blobs", "_dump", "_pending", "_staged", "cancel", "granted", "inputs", "scope", "spending", "store_id",
    )  # fmt: skip

    def __init__(
        self,
        store: Store,
        scope: TurnScope,
        ordinal: int,
        clock: Clock,
        on_stall: Callable[[StoreError], None] | None = None,
        inputs: bool = False,
    ) -> None:
        super().__init__(store, clock, f"turn {scope.session_id}.{scope.turn}", ordinal, on_stall)
        self.scope, self.store_id = scope, store.identity
        self._pending: list[Record] = []
        self._blobs: list[str] = []
        self._staged: dict[str, bytes] = {}
        self._dump: bytes | None = None
        self.cancel: bytes | None = None
        self.inputs = inputs
        self.spending: list[Spending] = []
        self.granted: dict[str, Granted] = {}

    def note_inputs(self) -> None:
        """Inputs wait: the turn looks at its next boundary."""
        self.inputs = True

    def take_inputs(self) -> None:
        """The inbox is read now: inputs that come later are announced again."""
        self.inputs = False

    def record(self, record: Record, blobs: Sequence[str] = ()) -> None:
        self._pending.append(record)
        self._blobs += blobs

    def stage(self, blobs: Mapping[str, bytes]) -> None:
        """The next record refers to these bytes: they are put before it is written."""
        self._staged.update(blobs)
        self._blobs += blobs

    def refer(self, blobs: Sequence[str]) -> None:
        """The next write refers to these blobs, by a wait and not by a record."""
        self._blobs += blobs

    def save(self, dump: bytes) -> None:
        """The state of an interpreter that contains what is recorded: it takes the place of what was saved before."""
        self._dump = dump

    async def flush(
        self,
        waits: tuple[WaitRow, ...] = (),
        park: tuple[str, ...] = (),
        awaits: tuple[str, ...] = (),
        heard: int | None = None,
    ) -> Appended | None:
        """Make everything recorded durable; None when there was nothing to do. The arguments are those of `Append`."""
        if not (self._pending or waits or park or self.spending or self._in_doubt or self._writing.locked()):
            return None
        await self._writing.acquire()  # not `async with`, whose two steps cost as much again
        try:
            if self._in_doubt is not None:
                await self._settle()
            if not (self._pending or waits or park or self.spending):
                return None
            pending, referred, saved = list(self._pending), len(self._blobs), self._dump
            if self._ordinal + len(pending) > MAX_ORDINAL:
                pending = self._fitting()
            bodies, blobs = await self._encode(pending)
            needed = blobs
            if waits:
                waits = tuple([await self._small(wait) for wait in waits])
                needed = (*blobs, *[digest for wait in waits if (digest := spilled(wait.body)) is not None])
            dump = None if saved is None else await self._dumped(saved)
            if dump is not None and dump.digest is not None:
                needed = (*needed, dump.digest)
            nodes = tuple([Node(self._ordinal + i, body) for i, body in enumerate(bodies)])
            # Whether all that happened is that calls are attempted again which took their worker's life, perhaps.
            repeats = bool(pending) and type(pending[0]) is Started
            repeats = repeats and all(type(each) is Started and each.repeated > 0 for each in pending)
            append = Append(
                self.scope, nodes, self._clock.now(), taken(pending), waits, park, blobs, repeats, awaits, heard, dump,
                tuple(self.spending),
            )  # fmt: skip
            self._in_doubt = append, needed
            self.spending.clear()
            # Only now: others may have recorded more while blobs were written.
            del self._pending[: len(pending)], self._blobs[:referred]
            if self._dump is saved:
                self._dump = None
            self._ordinal += len(nodes)
            return await self._settle()
        finally:
            self._writing.release()

    def _answered(self, write: Write[Appended], answer: Appended) -> None:
        self.cancel, self.inputs = answer.cancel, self.inputs or answer.inputs
        if answer.granted and isinstance(write, Append):
            for asked, given in zip(write.spending, answer.granted, strict=True):
                if asked.ask is not None:
                    self.granted[given.op] = given

    def _fitting(self) -> list[Record]:
        """What is pending, as far as there are ordinals for it besides that of the commit, which takes the others."""
        fits = max(MAX_ORDINAL - self._ordinal, 0)
        if any(type(each) is not Ended for each in self._pending[fits:]):
            raise TurnFull(f"{self.scope.session_id}.{self.scope.turn}", MAX_ORDINAL)
        return self._pending[:fits]

    async def commit(self, head: int, end: commits.End) -> Committed | CancelWon:
        """Write what is left and close the turn, in one transaction."""
        await self._writing.acquire()
        try:
            if self._in_doubt is not None:
                await self._settle()
            pending = list(self._pending)
            reply = pending.pop() if pending and isinstance(pending[-1], Replied) else None
            closed = commits.close(end, reply if isinstance(reply, Replied) else None, self._clock.now())
            first, over = self._ordinal, self._ordinal > MAX_ORDINAL
            if first + len(pending) > MAX_ORDINAL:
                fits = max(MAX_ORDINAL - first, 0)
                closed = replace(closed, rest=(*(await self._last() if over else ()), *pending[fits:]))
                del pending[fits:]
            bodies, blobs = await self._encode([*pending, closed])
            tail = commits.Tail(MAX_ORDINAL if over else first, bodies, taken([*self._pending, closed]), blobs, over)
            commit = commits.plan(self.scope, head, tail, closed, end)
            if self._dump is not None:
                commit = replace(commit, dump=await self._dumped(self._dump))
                if commit.dump is not None and commit.dump.digest is not None:
                    blobs = (*blobs, commit.dump.digest)
            if self.spending:
                commit = replace(commit, spending=tuple(self.spending))
            return await self.patiently(self._store.write, commit, blobs)
        finally:
            self._writing.release()

    async def _last(self) -> list[Any]:
        """The record that has the last ordinal there is: the commit takes its place."""
        return [record for _, record in await load(self._store, self.scope.sid, self.scope.turn, self.scope.turn)][-1:]

    async def _encode(self, records: Sequence[Record]) -> tuple[list[bytes], tuple[str, ...]]:
        """Bytes for rows; what is too large for one goes to a blob first."""
        blobs = tuple(self._blobs)
        for digest in blobs:
            if digest in self._staged:
                await self.keep(self._staged[digest])
                del self._staged[digest]  # only now: a caller who is cancelled meanwhile must not lose it
        bodies = []
        for record in records:
            body = encode(record)
            if len(body) > SPILL_BYTES:
                digest = await self.keep(body)
                body, blobs = encode(Spilled(digest, len(body))), (*blobs, digest)
            bodies.append(body)
        return bodies, blobs

    async def _dumped(self, dump: bytes) -> Dump:
        """A dump as it is written: one that is too large for a row is a blob."""
        return Dump(dump) if len(dump) <= SPILL_BYTES else Dump(digest=await self.keep(dump))

    async def _small(self, wait: WaitRow) -> WaitRow:
        """A wait whose row is not too large: what it asks may be."""
        if len(wait.body) <= SPILL_BYTES:
            return wait
        return replace(wait, body=encode(Spilled(await self.keep(wait.body), len(wait.body))))


def taken(records: Iterable[Record]) -> tuple[int, ...]:
    """Inputs whose delivery these records tell of."""
    found: list[int] = []
    for record in records:
        slot = getattr(record, "slot", None)
        if slot is not None and slot.delivered:
            found += [d.input for d in slot.delivered]
    return tuple(found)


async def spill(store: Store, body: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The row for `body` and the blobs it refers to."""
    if len(body) <= SPILL_BYTES:
        return body, ()
    digest = await store.blobs.put(body)
    return encode(Spilled(digest, len(body))), (digest,)


async def write_referring(write: Callable[[], Awaitable[R]], put_again: Callable[[], Awaitable[object]]) -> R:
    """Send a write that refers to blobs. Where one was swept since its put, it is put again and the write tried once
    more: it was refused as a whole, and a blob just put is too young to be swept."""
    try:
        return await write()
    except BlobMissing:
        await put_again()
        return await write()


async def load(store: Store, sid: int, first: int, last: int) -> list[tuple[int, Record]]:
    """The records of some turns, each with the number of its turn."""
    return [(turn.number, record) for turn in await load_turns(store, sid, first, last) for record in turn.records]


async def load_turns(store: Store, sid: int, first: int, last: int) -> list[Turn]:
    """Some turns with their records. A missing or unreadable one is damage, never a shorter history."""
    found: list[Turn] = []
    current, records = 0, list[Record]()
    for number, ordinal, body in await store.nodes(sid, first, last):
        if number != current:
            current, records = number, []
            found.append(Turn(number, records))
        if ordinal != len(records):
            raise StoreDamaged(f"session number {sid}", f"turn {number} lacks a record before {ordinal}")
        try:
            row = decode_row(body)
            if type(row) is Spilled:
                row = decode_row(await store.blobs.get(row.digest))
        except ValueError as error:
            raise StoreDamaged(f"session number {sid}", f"a record of turn {number} is unreadable: {error}") from None
        if type(row) is Spilled:
            raise StoreDamaged(f"session number {sid}", f"a blob of turn {number} stands for another blob")
        if type(row) is Closed and row.rest:
            records += row.rest
            row = replace(row, rest=())
        records.append(row)
    return found
