"""Rules over a store that answers later: they decide the same, and the writes of every turn take two round trips."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from perdure.errors import Fenced, InternalError, KeyConflict
from perdure.model.process import Event, Registration, SessionOrigin, Success, WaitOn
from perdure.model.session import Death, Node, WaitRow
from perdure.model.write import (
    Accept,
    Accepted,
    Advance,
    Append,
    Claim,
    Commit,
    Committed,
    ProcessRef,
    ProcessScope,
    Register,
    SessionRef,
    TurnScope,
    Write,
)
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.stores.rules import READS, transact
from perdure.stores.rules.rows import (
    ALL_CHANGES,
    ALL_READS,
    OUTDATED,
    IsGranted,
    NextPid,
    PartlyApplied,
    PutGrant,
    Transaction,
    run,
)
from perdure.testing.store_contract import Author, answer, everything
from tests.fuzzing import cases
from tests.stores.network import NetworkStore, RemoteRows

OURS = TurnScope("s", 1, 1, "w1", 1)
WAIT = WaitRow("s.1.0", 1, 1, "1.0", "approval")
BEFORE: list[Write[Any]] = [Accept("s", "clerk", b"hello", "op", 1, worker="w1"), Append(OURS, (Node(1, b"reply"),), 2)]
TASK = Registration("p", "task", "rerunnable", "report", input={"task": 1}, origin=SessionOrigin("s"), parent="s.1")
WORK = ProcessScope("p", 1, "w1", 1)
LATER = WaitOn("timer", "time", due=99)
BEGUN: list[Write[Any]] = [
    *BEFORE,
    Register(TASK, 3, "w1", grants=("s",)),
    Advance(WORK, 4, (Node(0, b"begun"),), first=True, seen=1),
]

HOT: dict[str, tuple[list[Write[Any]], Write[Any]]] = {
    "a first input": ([], Accept("s", "clerk", b"hello", "op", 1, key="k", worker="w1")),
    "a queued input": (BEFORE, Accept("s", "clerk", b"and then", "op2", 3, kind="steer", key="k")),
    "records": (BEFORE, Append(OURS, (Node(2, b"ended"), Node(3, b"more")), 3)),
    "a delivered input": (
        [*BEFORE, Accept("s", "clerk", b"by the way", "op2", 3, kind="steer")],
        Append(OURS, (Node(2, b"said"),), 4, take=(2,)),
    ),
    "parking": (BEFORE, Append(OURS, (Node(2, b"asks"),), 3, waits=(WAIT,), park=(WAIT.id,))),
    "records after a takeover": (
        [*BEFORE, Claim(SessionRef("s"), "w2", 1, 3, death=Death("w1", 1))],
        Append(TurnScope("s", 1, 1, "w2", 2), (Node(2, b"again"),), 4),
    ),
    "a commit": (BEFORE, Commit(OURS, (Node(2, b"closed"),), 0, 3)),
    "a commit that opens the next turn": (
        [*BEFORE, Accept("s", "clerk", b"and then", "op2", 3)],
        Commit(OURS, (Node(2, b"closed"),), 0, 4),
    ),
    "a claim of a dead worker's turn": (BEFORE, Claim(SessionRef("s"), "w2", 1, 3, death=Death("w1", 1))),
    "a registration": (BEFORE, Register(TASK, 3, "w1", grants=("s",))),
    "records of a process": (BEGUN, Advance(WORK, 5, (Node(1, b"step"),), seen=2)),
    "events of a process": (BEGUN, Advance(WORK, 5, events=(Event("process.progress", 0.5, 5, "half"),), seen=2)),
    "a process that parks": (
        BEGUN,
        Advance(WORK, 5, (Node(1, b"waits"),), seen=2, park=(LATER,)),
    ),
    "a process that ends": (BEGUN, Advance(WORK, 5, (Node(1, b"result"),), seen=2, outcome=Success(1))),
    "a claim of a dead worker's process": (
        BEGUN,
        Claim(ProcessRef("p"), "w2", 1, 5, proof="gone", death=Death("w1", 1)),
    ),
}


@pytest.mark.parametrize("name", HOT)
async def test_a_write_of_every_turn_takes_one_round_trip_to_read_and_one_to_write(name: str) -> None:
    past, write = HOT[name]
    store = NetworkStore()
    await store.open()
    for each in past:
        await store.write(each)
    before = len(store.remote.trips), store.remote.read_trips

    await store.write(write)

    read = store.remote.read_trips - before[1]
    assert (read, len(store.remote.trips) - before[0] - read) == (1, 1), store.remote.trips[before[0] :]


def test_every_write_that_declares_its_reads_is_counted_here() -> None:
    assert {type(write) for _, write in HOT.values()} == set(READS)


@pytest.mark.parametrize("name", HOT)
async def test_a_write_is_answered_over_a_network_as_in_memory(name: str) -> None:
    past, write = HOT[name]
    store, memory = NetworkStore(), MemoryRows()
    await store.open()

    for each in (*past, write, write):
        assert await store.write(each) == run(transact(memory, each))


async def test_writes_of_one_batch_see_what_those_before_them_changed() -> None:
    store = NetworkStore()
    await store.open()

    first, second, closed = await asyncio.gather(
        store.write(Accept("s", "clerk", b"one", "op1", 1, key="k1", worker="w1")),
        store.write(Accept("s", "clerk", b"two", "op2", 2, key="k2")),
        store.write(Commit(OURS, (Node(1, b"closed"),), 0, 3)),
    )

    assert (first.turn, second.turn, second.opened) == (1, 2, False)
    assert isinstance(closed, Committed)
    assert closed.row.turn == 2
    assert (await store.session("s")) == closed.row


@pytest.mark.parametrize("seed", range(cases(12, 400)))
async def test_random_batches_are_answered_as_their_writes_one_by_one(seed: int) -> None:
    """What a batch fetched beforehand is brought up to date by its own writes, accepted and refused."""
    choice = random.Random(seed)
    author, memory, store = Author(choice, 0), MemoryStore(), NetworkStore()
    await store.open()

    for at in range(1, 40):
        batch = [await author.write(memory, at) for _ in range(choice.randint(1, 6))]
        expected = [await answer(memory, write) for write in batch]
        assert await asyncio.gather(*(answer(store, write) for write in batch)) == expected, batch
        assert await everything(store) == await everything(memory), batch


async def test_batches_of_many_sessions_take_two_round_trips() -> None:
    store = NetworkStore()
    await store.open()
    await asyncio.gather(*(store.write(Accept(f"s{n}", "clerk", b"hi", f"op{n}", 1, worker="w1")) for n in range(64)))
    rows = [await store.session(f"s{n}") for n in range(64)]
    store.remote.trips.clear()

    await asyncio.gather(
        *(
            store.write(Append(TurnScope(r.id, r.sid, 1, "w1", 1), (Node(1, b"reply"),), 2))
            for r in rows
            if r is not None
        )
    )

    assert len(store.remote.trips) == 2


async def test_a_refused_write_of_a_batch_leaves_nothing_and_gives_its_numbers_back() -> None:
    store = NetworkStore()
    await store.open()
    await store.write(Accept("s", "clerk", b"one", "op1", 1, key="k", worker="w1"))

    answers = await asyncio.gather(
        store.write(Accept("s", "clerk", b"other", "op2", 2, key="k", digest=b"!")),
        store.write(Append(TurnScope("s", 1, 1, "w9", 1), (Node(1, b"late"),), 2)),
        store.write(Accept("t", "clerk", b"two", "op3", 3)),
        return_exceptions=True,
    )

    assert [type(each) for each in answers[:2]] == [KeyConflict, Fenced]
    last = answers[2]
    assert isinstance(last, Accepted)
    assert last.row.sid == 2
    assert await store.nodes(1, 1, 9) == [(1, 0, b"one")]


async def test_a_refused_rule_leaves_none_of_its_changes_and_gives_its_numbers_back() -> None:
    rows = MemoryRows()
    tx = Transaction(rows)
    tx.change(PutGrant("s", await tx.number(NextPid())))
    before, numbers = tx.flushed + len(tx.changes), tx.numbers.copy()
    tx.change(PutGrant("s", await tx.number(NextPid())))

    tx.undo(before, numbers)

    await tx.flush()
    assert list(rows.grants["s"]) == [1]
    assert await tx.number(NextPid()) == 2


async def test_a_rule_that_is_refused_after_its_changes_were_flushed_rolls_the_batch_back() -> None:
    tx = Transaction(MemoryRows())
    before, numbers = tx.flushed + len(tx.changes), tx.numbers.copy()
    tx.change(PutGrant("s", 1))
    assert await tx.read(IsGranted("s", 1)), "a read sees what was changed before it"

    with pytest.raises(PartlyApplied):
        tx.undo(before, numbers)


def test_a_store_that_claims_to_answer_at_once_and_waits_is_named() -> None:
    remote: Any = RemoteRows(MemoryRows())

    with pytest.raises(InternalError, match="answers at once"):
        run(transact(remote, Accept("s", "clerk", b"hello", "op", 1)))


def test_it_is_said_of_every_change_which_reads_it_may_answer_otherwise() -> None:
    assert set(OUTDATED) == ALL_CHANGES
    assert frozenset().union(*OUTDATED.values()) <= ALL_READS
