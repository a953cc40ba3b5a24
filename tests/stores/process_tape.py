"""Writes about processes at random: most of them make sense for what the memory store holds, some make none."""

import random
from typing import Any

from mainstay.errors import MainstayError
from mainstay.model.process import (
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
from mainstay.model.session import CancelRequest, Node
from mainstay.model.write import (
    AddEvent,
    Advance,
    Cancel,
    Claim,
    Complete,
    Deliver,
    Dismiss,
    ExternalOwner,
    ProcessFilter,
    ProcessRef,
    ProcessScope,
    Prune,
    ReconciledAbandon,
    Register,
    Release,
    Resume,
    SendSignal,
    Share,
    Transfer,
    WorkflowKey,
    Write,
)
from mainstay.ports.store import Store
from mainstay.stores.memory import MemoryStore

IDS = ("p", "q", "r", "ä🦊", "t", "u")
SESSIONS = ("a", "b")
WORKERS = ("w1", "w2")
EVENTS = (EventType("tick"), EventType("news", wake=WakeRule(input="/text")), EventType("signal.go"))
OUTCOMES = (Success({"n": 1}), Failure("bug", "why"), Abandoned(Evidence("engine_gave_up")))


async def answer(store: Store, write: Write[Any]) -> object:
    """The receipt, or what kind of refusal it was and why."""
    try:
        return await store.write(write)
    except MainstayError as refusal:
        return type(refusal), str(refusal)


class ProcessTape:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._store = MemoryStore()
        self.writes: list[Write[Any]] = []

    async def record(self, length: int) -> list[Write[Any]]:
        for at in range(1, length + 1):
            repeat = self.writes and self._random.random() < 0.15
            write = self.writes[-self._random.randrange(1, 4) :][0] if repeat else await self._write(at)
            self.writes.append(write)
            await answer(self._store, write)
        return self.writes

    async def _write(self, at: int) -> Write[Any]:
        name = self._random.choice(IDS)
        row = await self._store.process(name)
        if row is None or self._random.random() < 0.1:
            return self._register(name, at)
        if row.owner is not None and self._random.random() < 0.6:
            return await self._of_owner(row, at)
        return await self._of_others(row, at)

    def _register(self, name: str, at: int) -> Register:
        pick = self._random.choice
        recovery: Any = pick(["rerunnable", "rerunnable", "owner_bound", "reattachable", "externally_owned"])
        asked = Registration(
            name, pick("ffg"), recovery, events=EVENTS, max_attempts=pick([None, 2]), parent=pick([None, *IDS]),
            parent_end=pick(["cancel", "abandon"]), wake=pick([None, WakeTarget(pick(SESSIONS), "x", "turn")]),
        )  # fmt: skip
        return Register(asked, at, pick([None, "w1"]), pick([(), SESSIONS]))

    async def _of_owner(self, row: ProcessRow, at: int) -> Write[Any]:
        pick = self._random.choice
        scope = ProcessScope(row.id, row.pid, row.owner or "w1", row.generation - pick([0, 0, 0, 0, 1]))
        there = len(await self._store.steps(row.pid))
        last = max([n for n, _ in await self._store.steps(row.pid)], default=-1)
        records = tuple(Node(last + 1 + i, b"record %d.%d" % (at, i)) for i in range(pick([1, 1, 2])))
        waits = (WaitOn("1", pick(["time", "signal"]), "go", at + 3), WaitOn("2", "process", pick(IDS)))
        seen, first = row.record.sequence - pick([0, 0, 0, 1]), pick([True, False])
        told = (Event(pick(["tick", "news"]), {"text": at}, at, pick([None, f"k{at}"])),)
        return pick(
            [
                Advance(scope, at, records, told[: pick([0, 1])], first, seen),
                Advance(scope, at, (), told, first, seen),
                Advance(scope, at, records, seen=seen, repeats=True),
                Advance(scope, at, records, first=True, seen=seen, park=waits[: pick([1, 2])]),
                Advance(scope, at, records, outcome=pick(OUTCOMES), first=first),
                Advance(scope, at, records, drop=records[-1].ordinal - pick([0, there // 2])),
                Release(scope, at, pick([None, "why not"])),
            ]
        )

    async def _of_others(self, row: ProcessRow, at: int) -> Write[Any]:
        pick, wakes = self._random.choice, await self._store.wakes()
        numbers = tuple(w.number for w in wakes)[: pick([1, 2])]
        generation = row.generation - pick([0, 0, 0, 1])
        authority: Any = pick([ExternalOwner(), WorkflowKey("1"), ReconciledAbandon()])
        return pick(
            [
                Claim(ProcessRef(row.id), pick(WORKERS), generation, at, pick([None, None, "its lock is free"])),
                Claim(ProcessRef(row.id), pick(WORKERS), generation, at),
                SendSignal(row.id, pick(["go", "go", "no"]), at, f"s{at}", at),
                AddEvent(
                    row.id, Event(pick(["process.progress", "process.external_ref_set", "process.stuck"]), at), at
                ),
                AddEvent(row.id, Event("process.abandon_requested", {"by": "ann"}, at), at),
                AddEvent(row.id, Event("process.caller_departed", None, at), at),
                AddEvent(row.id, Event("process.subscription_retargeted", {"session_id": "b"}, at), at),
                Cancel(ProcessRef(row.id), CancelRequest("ann"), at),
                Complete(row.id, pick(OUTCOMES), authority, at),
                Resume(ProcessRef(row.id), at),
                Share(pick(SESSIONS), (row.id,), at, pick([True, False])),
                Transfer(pick(SESSIONS), pick(SESSIONS), (row.id,), at),
                Deliver(pick(SESSIONS), "x", numbers, b"told %d" % at, "op", at, pick([True, False, False])),
                Dismiss(numbers, at, pick([None, "expired"])),
                Prune(at - pick([0, 20]), at, limit=pick([1, 1, 500]), watermark=pick([None, at])),
            ]
        )


async def all_of(store: Store) -> object:
    """Everything that can be read of processes."""
    rows = [row for name in IDS if (row := await store.process(name)) is not None]
    logs = [(await store.events(row.pid), await store.steps(row.pid)) for row in rows]
    lists = (await store.processes(ProcessFilter()), await store.active_processes(), await store.due_processes(150))
    wakes = [await store.wakes(state=state) for state in ("pending", "enqueued", "discarded")]
    seen = [[await store.is_granted(session, name) for name in IDS] for session in SESSIONS]
    sessions = [await store.session(session) for session in SESSIONS]
    return rows, logs, lists, wakes, seen, sessions, await store.changes(), await store.last_change()
