"""The contract of a store, to run on any store: yours too.

The same random writes go to your store and to the memory store. Both must give equal receipts, refuse alike, and read
alike after every write; also after your store was closed and opened again, and after the process that held it was
killed. Tell the kit where your store's rows live:

    from perdure.testing.store_contract import store_contract


    class MyPlace:  # a new one is empty; stores on the same place see the same rows
        def __init__(self) -> None:
            self.database = create_scratch_database()

        def store(self) -> MyStore:  # a new store object, not yet opened
            return MyStore(self.database)

        async def crash(self, store: MyStore) -> None:  # end it as kill -9 would
            await store.drop_connections()

        def clear(self) -> None:  # the place is not needed any more
            self.database.drop()


    TestMyStore = store_contract(MyPlace)

`TestMyStore` is a `unittest.TestCase`: pytest finds it and runs 40 lives of 60 steps, the same ones every time; with
`PERDURE_FUZZ=full` in the environment 2,000 new ones. A failure is reported as a short list of steps that shows it.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import random
import unittest
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import BlobMissing, PerdureError
from perdure.model.limit import Ask, Bound, Settle, Spending
from perdure.model.llm import Usage
from perdure.model.process import (
    Abandoned,
    Event,
    EventType,
    Evidence,
    Failure,
    ProcessRow,
    Registration,
    Success,
    WaitOn,
    WakeRule,
    WakeTarget,
)
from perdure.model.session import Answer, CancelRequest, Death, Dump, Node, SessionRow, WaitRow, WorkerRow
from perdure.model.spending import HOUR, UsageFilter, UsageRow
from perdure.model.write import (
    Accept,
    AddEvent,
    Advance,
    Append,
    Beat,
    Branch,
    Cancel,
    Claim,
    Commit,
    Complete,
    Configure,
    Delete,
    Deliver,
    Dismiss,
    ExternalOwner,
    Outlived,
    ProcessFilter,
    ProcessLimits,
    ProcessRef,
    ProcessScope,
    Prune,
    ReconciledAbandon,
    Register,
    Release,
    ReopenTurn,
    Resolve,
    Resume,
    Retire,
    SendSignal,
    SessionFilter,
    SessionRef,
    Share,
    Transfer,
    TurnScope,
    WorkflowKey,
    Write,
)
from perdure.ports.store import Store
from perdure.stores.memory import MemoryStore

__all__ = ["Place", "StoreContract", "store_contract"]

T = TypeVar("T")

LIVES, STEPS = 40, 60
SESSIONS = ("a", "b", "ä🦊", "d", "fork")
PROCESSES = ("p", "q", "r", "名前", "t", "u")
WORKERS = ("w1", "w2")
SETTINGS = (b"", b'{"label":"new"}', b'{"tools":{"generation":1,"members":{"look":false}}}')
EVENTS = (EventType("tick"), EventType("news", wake=WakeRule(input="/text")), EventType("signal.go"))
OUTCOMES = (Success({"n": 1}), Failure("bug", "why"), Abandoned(Evidence("engine_gave_up")))
BLOBS = (b"small", b"", bytes(range(256)) * 400)
MISSING = "0" * 64
DIGESTS = tuple(hashlib.sha256(data).hexdigest() for data in BLOBS)


class Place(Protocol):
    """Where the rows of one store live, while store objects come and go. A new place is empty."""

    def store(self) -> Store:
        """A new store object on this place, not yet opened."""
        ...

    async def crash(self, store: Store) -> None:
        """End `store` as a killed process would: it is not closed, and what it has not acknowledged may be lost."""
        ...

    def clear(self) -> None:
        """The place is not needed any more. Stores that were closed or crashed may be disposed of."""
        ...


def store_contract(place: Callable[[], Place]) -> type[unittest.TestCase]:
    """The contract as a test case for the store that lives in `place`."""

    def lives(unrest: float) -> None:
        full = os.environ.get("PERDURE_FUZZ") == "full"
        seeds = [random.randrange(1 << 32) for _ in range(1_000)] if full else range(LIVES // 2)
        for seed in seeds:
            contract = StoreContract(place)
            if (found := contract.live(seed, STEPS, unrest)) is not None:
                raise AssertionError(f"{found.why}\n\nThe steps that show it (life {seed}):\n{found.program}")

    def answers_alike(case: unittest.TestCase) -> None:
        lives(unrest=0.02)

    def survives(case: unittest.TestCase) -> None:
        lives(unrest=0.3)

    tests = {
        "test_it_answers_as_the_memory_store_does": answers_alike,
        "test_what_it_acknowledged_survives_reopening_and_kills": survives,
    }
    return type(f"StoreContract[{getattr(place, '__name__', type(place).__name__)}]", (unittest.TestCase,), tests)


# ---------------------------------------------------------------------- steps


class Send(Struct, frozen=True):
    """A write, awaited, or `submit`ted as from a thread."""

    write: Write[Any]
    submit: bool = False


class Reopen(Struct, frozen=True):
    """The store is closed, and another one opened on its place; `kill`: it is not closed, its process dies."""

    kill: bool


class KillWhileWriting(Struct, frozen=True):
    """The process dies before the write is acknowledged: it is there whole, or not at all."""

    write: Write[Any]


class WriteElsewhere(Struct, frozen=True):
    """Another store on the same place writes: it is seen, and is news to this one."""

    write: Write[Any]


class PutBlob(Struct, frozen=True):
    data: bytes


class SweepBlobs(Struct, frozen=True):
    """Blobs that nothing refers to go, whatever their age."""


LifeStep: TypeAlias = Send | Reopen | KillWhileWriting | WriteElsewhere | PutBlob | SweepBlobs


class Difference(Struct, frozen=True):
    """Why a store is not as the memory store is, after these steps."""

    why: str
    steps: tuple[LifeStep, ...]

    @property
    def program(self) -> str:
        return "\n".join(f"  {step}" for step in self.steps)


class Differs(AssertionError):
    """The store and the memory store do not agree."""


# ---------------------------------------------------------------------- a life


class StoreContract:
    """A store beside the memory store, through one life at a time."""

    def __init__(self, place: Callable[[], Place]) -> None:
        self._place = place

    def live(self, seed: int, steps: int, unrest: float) -> Difference | None:
        """Live through random steps, a part `unrest` of them reopening and kills. The first difference, shown by as few
        steps as were found to show it."""
        choice, taken = random.Random(seed), list[LifeStep]()
        found = asyncio.run(self._play(taken, Author(choice, unrest), steps))
        if found is None:
            return None
        kept = list(taken)
        for step in reversed(taken):  # one by one: a step that is not needed to show a difference is left out
            fewer = [each for each in kept if each is not step]
            again = asyncio.run(self._play(fewer, None, 0))
            if again is not None:
                kept, found = fewer, again
        return Difference(found, tuple(kept))

    async def _play(self, steps: list[LifeStep], author: Author | None, more: int) -> str | None:
        """Take these steps, and as many more of the author's, which are added to them; what differs then."""
        place = self._place()
        both = Both(place)
        try:
            await both.open()
            try:
                for step in list(steps):
                    await both.take(step)
                while author is not None and more > 0:
                    more -= 1
                    steps.append(await author.step(both.reference, STEPS - more))
                    await both.take(steps[-1])
            except Differs as difference:
                return str(difference)
            finally:
                await both.store.close()
            return None
        finally:
            place.clear()


class Both:
    """The store under test and the memory store, which are given the same steps."""

    def __init__(self, place: Place) -> None:
        self.place, self.reference = place, MemoryStore()
        self.store = place.store()
        self._known: tuple[object, ...] | None = None

    async def open(self) -> None:
        await self.store.open()
        # What a store has for good: its id and its secret. Another life of it must find the same.
        found = (self.store.identity(), await self.store.secret(), self.store.held())
        known, self._known = self._known or found, found
        agree(known, found, "the id and the secret of the store after it was opened again")

    async def take(self, step: LifeStep) -> None:
        match step:
            case Send(write, submit):
                expected = await answer(self.reference, write)
                agree(expected, await answer(self.store, write, submit), f"the answer to {write}")
            case Reopen(kill):
                await (self.place.crash(self.store) if kill else self.store.close())
                self.store = self.place.store()
                await self.open()
            case KillWhileWriting(write):
                await self._kill_while_writing(write)
            case WriteElsewhere(write):
                await self._write_elsewhere(write)
            case PutBlob(data):
                agree(await self.reference.blobs.put(data), await self.store.blobs.put(data), "the digest of a blob")
            case SweepBlobs():
                agree(await self.reference.sweep(grace=0), await self.store.sweep(grace=0), "blobs that were swept")
        agree(await everything(self.reference), await everything(self.store), f"what is read after {step}")
        if not isinstance(step, Send):  # slow to count on a disk
            agree(await counts(self.reference), await counts(self.store), f"what is counted after {step}")

    async def _kill_while_writing(self, write: Write[Any]) -> None:
        without = MemoryStore(copy.deepcopy(self.reference.rows))
        expected = await answer(self.reference, write)
        self.store.submit(write, lambda receipt, error: None)
        await self.place.crash(self.store)
        self.store = self.place.store()
        await self.open()
        if await everything(self.store) != await everything(self.reference):
            agree(await everything(without), await everything(self.store), f"what is left of {write}, not acknowledged")
            agree(expected, await answer(self.store, write), f"the answer to {write}, sent again after a kill")

    async def _write_elsewhere(self, write: Write[Any]) -> None:
        await self.store.changed()
        ours, self.store = self.store, self.place.store()
        await self.store.open()
        try:
            for each in (write, Beat(WorkerRow("w3", "there", "boot", 8, 0))):
                agree(await answer(self.reference, each), await answer(self.store, each), f"the answer to {each}")
        finally:
            await self.store.close()
            self.store = ours
        agree(True, await self.store.changed(), "whether another store's write is news")
        own = Beat(WorkerRow("w1", "here", "boot", 7, 0))
        agree(await answer(self.reference, own), await answer(self.store, own), f"the answer to {own}")
        agree(False, await self.store.changed(), "whether a store's own write is news to it")


def agree(expected: T, got: T, what: str) -> None:
    if got == expected:
        return
    if isinstance(expected, dict) and isinstance(got, dict):
        name = next(name for name in expected if expected[name] != got[name])
        what, expected, got = f"{what}, {name}", expected[name], got[name]
    raise Differs(f"{what}:\n  {got}\ninstead of\n  {expected}")


async def answer(store: Store, write: Write[Any], submit: bool = False) -> object:
    """The receipt, or the kind of refusal and its reason. Of the processes that a write woke, the order is free."""
    try:
        receipt = await (_submitted(store, write) if submit else store.write(write))
    except PerdureError as refusal:
        return type(refusal), str(refusal)
    woken = getattr(receipt, "woken", None)
    return replace(receipt, woken=tuple(sorted(woken, key=lambda row: row.pid))) if woken else receipt


async def _submitted(store: Store, write: Write[Any]) -> Any:
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Any] = loop.create_future()

    def done(receipt: Any, error: BaseException | None) -> None:
        if error is not None:
            loop.call_soon_threadsafe(answered.set_exception, error)
        else:
            loop.call_soon_threadsafe(answered.set_result, receipt)

    store.submit(write, done)
    return await answered


async def everything(store: Store) -> dict[str, object]:
    """Everything that can be read of a store, in an order of its own where a store may choose one."""
    sessions = [row for name in SESSIONS if (row := await store.session(name)) is not None]
    found = [each for name in PROCESSES if (each := await store.process(name)) is not None]
    waits = [wait for row in sessions for wait in await store.waits(row.sid)]
    return {
        "sessions": sessions,
        "sessions by number": [await store.session_by_sid(row.sid) for row in sessions],
        "turns": [await store.nodes(row.sid, 1, row.next) for row in sessions],
        "last turns": [await store.nodes(row.sid, row.next - 1, row.next) for row in sessions],
        "ends of turns": await store.turn_ends(
            [(row.sid, turn) for row in sessions for turn in (1, row.head, row.next)]
        ),
        "inboxes": [await store.inbox(row.sid) for row in sessions],
        "waits": sorted(waits, key=lambda wait: wait.id),
        "waits by id": [await store.wait(name) for name in sorted(wait.id for wait in waits)],
        "open waits": sorted(await store.waits(), key=lambda wait: wait.id),
        "dumps": [await store.dump(row.sid, last) for row in sessions for last in (0, row.head, row.next)],
        "due waits": sorted(await store.waits(due=5), key=lambda wait: wait.id),
        "listed": [await store.sessions(wanted) for wanted in _SESSION_FILTERS],
        "open": sorted(await store.open_sessions(), key=lambda row: row.sid),
        "processes": found,
        "events": [await store.events(row.pid) for row in found],
        "last events": [await store.events(row.pid, row.record.sequence - 1, 5) for row in found],
        "journals": [await store.steps(row.pid) for row in found],
        "listed processes": [await store.processes(wanted) for wanted in _PROCESS_FILTERS],
        "active": await store.active_processes(),
        "unowned": await store.unowned_processes(1, 2),
        "due": [await store.due_processes(40), await store.due_processes(1_000, 1, 1)],
        "changes": [await store.changes(), await store.changes(10, 5), await store.last_change()],
        "wakes": [await store.wakes(state=state) for state in ("pending", "enqueued", "discarded")],
        "wakes of a": await store.wakes("a"),
        "grants": [[await store.is_granted(name, row.id) for name in SESSIONS] for row in found],
        "grantees": [await store.grantees(row.id) for row in found],
        "workers": sorted(await store.workers(), key=lambda row: row.id),
        "deaths": sorted(await store.deaths(), key=lambda row: row.scope),
        "usage": [await store.usage(wanted) for wanted in _USAGE_FILTERS],
        "accounts": await store.accounts(),
        "reservations": [await store.reservations(), *[await store.reservations(row.sid) for row in sessions]],
        "nothing": [await store.session("nothing"), await store.process("nothing"), await store.wait("nothing")],
    }


async def counts(store: Store) -> dict[str, object]:
    """How much there is of everything, and the blobs."""
    facts = await store.facts()
    return {
        "counts": (facts.sessions, facts.nodes, facts.blobs, facts.processes),
        "blobs": [await _blob(store, digest) for digest in (*DIGESTS, MISSING)],
    }


async def _blob(store: Store, digest: str) -> bytes | None:
    try:
        return await store.blobs.get(digest)
    except BlobMissing:
        return None


_SESSION_FILTERS = (
    SessionFilter(),
    SessionFilter(agent="x"),
    SessionFilter(state="open"),
    SessionFilter(prefix="ä"),
    SessionFilter(limit=2),
    SessionFilter(before=30),
)
_BOUNDS = (
    Bound("tokens/session/ever", "tokens", "session", 0, 5_000, 2_000),
    Bound("money/all/day", "money", "all", 86_400_000, 10**8, 10**7),
    Bound("turns/agent/ever", "turns", "agent", 0, 2, 2),
)
_USAGE_FILTERS = (
    UsageFilter(),
    UsageFilter(since=HOUR),
    UsageFilter(until=HOUR, agent="x"),
    UsageFilter(session_id="a"),
)
_PROCESS_FILTERS = (
    ProcessFilter(),
    ProcessFilter(status=("running", "waiting")),
    ProcessFilter(live=False),
    ProcessFilter(kind="f", name="f"),
    ProcessFilter(session_id="a", limit=2),
    ProcessFilter(parent="p"),
    ProcessFilter(since=10, until=40, before=4),
    ProcessFilter(stuck=True),
)


# ---------------------------------------------------------------------- what is written


class Author:
    """Makes up steps: most of them make sense for what the memory store holds, some make none."""

    def __init__(self, choice: random.Random, unrest: float) -> None:
        self._random, self._unrest = choice, unrest
        self._written: list[Write[Any]] = []

    async def step(self, store: MemoryStore, at: int) -> LifeStep:
        chance = self._random.random()
        if chance < self._unrest / 2:
            return Reopen(kill=chance < self._unrest / 4)
        if chance < self._unrest * 0.8:
            return KillWhileWriting(await self.write(store, at))
        if chance < self._unrest:
            return WriteElsewhere(await self.write(store, at))
        if chance > 0.95:
            return SweepBlobs() if self._random.random() < 0.5 else PutBlob(self._random.choice(BLOBS))
        return Send(await self.write(store, at), submit=chance > 0.87)

    async def write(self, store: MemoryStore, at: int) -> Write[Any]:
        if self._written and self._random.random() < 0.15:
            write = self._random.choice(self._written[-8:])  # sent twice, as after a lost reply
        elif self._random.random() < 0.5:
            write = await self._about_a_session(store, at)
        else:
            write = await self._about_a_process(store, at)
        self._written.append(write)
        return write

    def _blobs(self) -> tuple[str, ...]:
        return self._random.choice([(), (), (), (), (), (self._random.choice(DIGESTS),), (MISSING,)])

    def _dump(self, at: int) -> Dump | None:
        state, blob, missing = Dump(b"state %d" % at), Dump(digest=DIGESTS[at % 3]), Dump(digest=MISSING)
        return (None, Dump(), None, state, None, blob, missing)[at % 7]

    async def _about_a_session(self, store: MemoryStore, at: int) -> Write[Any]:
        pick = self._random.choice
        name = pick(SESSIONS[:4])
        row = await store.session(name)
        if row is None or self._random.random() < 0.25:
            key, body = pick([None, None, "k1", "k2"]), b"said %d" % at
            kind: Any = pick(["queue", "steer", "note"])
            accept = Accept(name, pick("xxxy"), body, f"op{at}", at, kind, key, pick([b"1", b"2"]), pick([None, "w1"]))
            return replace(accept, blobs=self._blobs(), stuck=pick([None, None, None, "too deep"]))
        if row.turn is not None and self._random.random() < 0.7:
            return await self._of_a_turn(store, row, at)
        waits, of = await store.waits(row.sid), SessionRef(name)
        worker = WorkerRow(pick(WORKERS), "host", "boot", 1, at, pick([0, 1]), process=pick(["", "os-1"]))
        return pick(
            [
                Claim(of, pick(WORKERS), row.generation, at),
                Claim(of, pick(WORKERS), row.generation - 1, at),
                Claim(of, pick(WORKERS), row.generation, at, death=Death("w1", at, pick([None, row.sid])), lived=at),
                Outlived(row.sid, pick(WORKERS)),
                Cancel(
                    of, CancelRequest("ann"), at, pick([None, row.head, row.turn, row.next - 1]), pick([None, "w2"])
                ),
                Resolve(pick([w.id for w in waits] or ["no"]), pick([Answer("approved"), None]), at, "w2", ("x",)),
                Resume(of, at, pick([None, "w2"])),
                ReopenTurn(name, row.head, row.head - 1, Node(pick([2, 3]), b"again"), at, pick([None, "w2"])),
                Configure(name, pick("xxxy"), pick(SETTINGS), at, pick([None, None, row.settings, b"{}"])),
                Beat(worker),
                Retire(pick(WORKERS), pick([True, False])),
                Branch(pick(SESSIONS), "x", name, row.head, 0, at, whole=pick([True, False])),
                Delete(name, at, pick([None, at])) if at % 7 == 0 else Delete("nobody", at),
            ]
        )

    async def _of_a_turn(self, store: MemoryStore, row: SessionRow, at: int) -> Write[Any]:
        pick, turn = self._random.choice, row.turn or 1
        there = len(await store.nodes(row.sid, turn, turn))
        scope = TurnScope(row.id, row.sid, turn, row.owner or "w1", row.generation - pick([0, 0, 0, 0, 1]))
        nodes = tuple(Node(there + i, b"record %d.%d" % (at, i)) for i in range(pick([1, 1, 2])))
        take = tuple(m.input for m in await store.inbox(row.sid) if m.kind != "queue")[: pick([0, 9])]
        wait = WaitRow(f"{row.id}.{turn}.{pick([1, 2])}", row.sid, turn, "1.0", "approval", due=pick([None, 5]))
        children = pick([True, False])
        awaits = (PROCESSES[at % len(PROCESSES)],) if at % 2 else ()
        heard = row.next if at % 4 == 1 else None
        bound = pick(_BOUNDS)
        asking = Spending(pick(["", "c1"]), f"op{at}", (bound,), Ask(10, pick([100, 4_000]), 3_000, 15_000))
        settling = Spending(pick(["", "c1"]), f"end{at}", settle=pick([Settle(9, 10**7), Settle(), Settle(free=True)]))
        usage = pick([Usage(3, 1, calls=1, cost="0.1"), Usage(unknown=1)])
        what = (pick([0, HOUR]), pick(["turns", "aside"]), pick(["", "m-1"]), pick(["{}", '{"user":"ann"}']))
        costs = (UsageRow(row.sid, *what, row.id, row.agent, pick([(), ("a",)]), usage),)
        return pick(
            [
                Append(scope, nodes, at, take, blobs=self._blobs(), dump=self._dump(at)),
                Append(scope, nodes, at, waits=(wait,)),
                Append(scope, nodes[: pick([0, 1])], at, spending=(asking,)),
                Append(scope, nodes, at, spending=(settling, asking)),
                Commit(scope, nodes, row.head, at, cancelled=row.cancel is not None, spending=(settling,)),
                Append(scope, nodes, at, waits=(wait,), park=(wait.id,), awaits=awaits, heard=heard),
                Commit(scope, nodes, row.head - pick([0, 0, 0, 1]), at, take, cancelled=row.cancel is not None),
                Commit(scope, nodes, row.head, at, blobs=self._blobs(), children=children, dump=self._dump(at)),
                Commit(scope, nodes, row.head, at, tools={"look": pick([True, None])}, recorded={}),
                Commit(scope, nodes, row.head, at, cancelled=row.cancel is not None, costs=costs),
                Release(scope, at, stuck=pick([None, "why not"])),
            ]
        )

    async def _about_a_process(self, store: MemoryStore, at: int) -> Write[Any]:
        pick = self._random.choice
        name = pick(PROCESSES)
        row = await store.process(name)
        if row is None or self._random.random() < 0.1:
            recovery: Any = pick(["rerunnable", "rerunnable", "owner_bound", "reattachable", "externally_owned"])
            asked = Registration(
                name, pick("ffg"), recovery, name=pick("fg"), events=EVENTS, max_attempts=pick([None, 2]),
                parent=pick([None, None, *PROCESSES, "a.1"]), parent_end=pick(["cancel", "abandon"]),
                wake=pick([None, WakeTarget(pick("ab"), "x", "turn")]),
            )  # fmt: skip
            begun: dict[str, Any] = {"reference": {"job": name}, "store": "this"} if at % 3 == 0 else {}
            begun |= {"limits": ProcessLimits(3, 1) if at % 4 == 0 else None}
            return Register(asked, at, pick([None, "w1"]), pick([(), ("a", "b")]), blobs=self._blobs(), **begun)
        if row.owner is not None and self._random.random() < 0.6:
            return await self._of_a_process(store, row, at)
        target = pick([row.id] * 9 + ["nobody"])
        wakes = await store.wakes()
        numbers = tuple(wake.number for wake in wakes)[: pick([1, 2])]
        of, generation = ProcessRef(target), row.generation - pick([0, 0, 0, 1])
        authority: Any = pick([ExternalOwner(), WorkflowKey("1"), ReconciledAbandon()])
        mark = pick(["process.progress", "process.external_ref_set", "process.stuck"])
        return pick(
            [
                Claim(of, pick(WORKERS), generation, at, pick([None, None, "its lock is free"])),
                Claim(of, pick(WORKERS), generation, at, death=Death("w1", at, pick([None, -row.pid])), lived=at),
                SendSignal(target, pick(["go", "go", "no"]), at, f"s{at}", at),
                AddEvent(target, Event(mark, at), at),
                AddEvent(target, Event("process.abandon_requested", {"by": "ann"}, at), at),
                AddEvent(target, Event("process.caller_departed", None, at), at),
                AddEvent(target, Event("process.subscription_retargeted", {"session_id": "b"}, at), at),
                Cancel(of, CancelRequest("ann"), at),
                Complete(target, pick(OUTCOMES), authority, at),
                Resume(of, at),
                Share(pick("ab"), (target,), at, pick([True, False])),
                Transfer(pick("ab"), pick("ab"), (target,), at),
                Deliver(pick("ab"), "x", numbers, b"told %d" % at, "op", at, pick([True, False, False])),
                Dismiss(numbers, at, pick([None, "expired"])),
                Prune(at - pick([0, 20]), at, limit=pick([1, 1, 500]), watermark=pick([None, at])),
            ]
        )

    async def _of_a_process(self, store: MemoryStore, row: ProcessRow, at: int) -> Write[Any]:
        pick, there = self._random.choice, await store.steps(row.pid)
        scope = ProcessScope(row.id, row.pid, row.owner or "w1", row.generation - pick([0, 0, 0, 0, 1]))
        after = there[-1][0] + 1 if there else 0
        records = tuple(Node(after + i, b"record %d.%d" % (at, i)) for i in range(pick([1, 1, 2])))
        waits = (WaitOn("1", pick(["time", "signal"]), "go", at + 3), WaitOn("2", "process", pick(PROCESSES)))
        seen, first = row.record.sequence - pick([0, 0, 0, 1]), pick([True, False])
        told = (Event(pick(["tick", "news"]), {"text": at}, at, pick([None, f"k{at}"])),)
        return pick(
            [
                Advance(scope, at, records, told[: pick([0, 1])], first, seen, blobs=self._blobs()),
                Advance(scope, at, (), told, first, seen),
                Advance(scope, at, records, seen=seen, repeats=True),
                Advance(scope, at, records, first=True, seen=seen, park=waits[: pick([1, 2])]),
                Advance(scope, at, records, outcome=pick(OUTCOMES), first=first),
                Advance(scope, at, records, drop=records[-1].ordinal - pick([0, len(there) // 2])),
                Release(scope, at, pick([None, "why not"])),
            ]
        )
