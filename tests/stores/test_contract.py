"""Both stores pass the contract, and answer one tape of writes alike."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mainstay.errors import MainstayError, MissingExtra
from mainstay.model.session import Answer, CancelRequest, Death, Node, SessionRow, WaitRow, WorkerRow
from mainstay.model.write import (
    Accept,
    Append,
    Beat,
    Branch,
    Cancel,
    Claim,
    Commit,
    Configure,
    Delete,
    Outlived,
    Release,
    Resolve,
    Resume,
    Retire,
    SessionFilter,
    SessionRef,
    TurnScope,
    Write,
)
from mainstay.ports.store import Store
from mainstay.stores.memory import MemoryStore
from mainstay.stores.rules import RULES
from mainstay.stores.sqlite import SqliteStore
from mainstay.testing.store_contract import store_contract
from mainstay.testing.store_model import StoreModel
from tests.stores.places import InMemory, InOneFile
from tests.stores.process_tape import ProcessTape, all_of, answer

TestMemoryStore = pytest.mark.fuzz(store_contract(InMemory))
TestSqliteStore = pytest.mark.fuzz(store_contract(InOneFile))

IDS = ("a", "b", "ä🦊", "d")
WORKERS = ("w1", "w2")
SETTINGS = (b"", b'{"label":"new"}', b'{"tools":{"generation":1,"members":{"look":false}}}')


class Tape:
    """Writes at random: most of them make sense for what the memory store holds, some make none."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._store = MemoryStore()
        self.writes: list[Write[Any]] = []

    async def record(self, length: int) -> list[Write[Any]]:
        for at in range(1, length + 1):
            repeat = self.writes and self._random.random() < 0.15
            write = self._random.choice(self.writes) if repeat else await self._write(at)
            self.writes.append(write)
            await answer(self._store, write)
        return self.writes

    async def _write(self, at: int) -> Write[Any]:
        pick, name = self._random.choice, self._random.choice(IDS)
        row = await self._store.session(name)
        if row is None or self._random.random() < 0.25:
            key, body = pick([None, None, "k1", "k2"]), b"said %d" % at
            kind: Any = pick(["queue", "steer", "note"])
            return Accept(name, pick("xxxy"), body, f"op{at}", at, kind, key, pick([b"1", b"2"]), pick([None, "w1"]))
        if row.turn is not None and self._random.random() < 0.7:
            return await self._of_owner(row, at)
        waits, of = await self._store.waits(row.sid), SessionRef(name)
        return pick(
            [
                Claim(of, pick(WORKERS), row.generation, at),
                Claim(of, pick(WORKERS), row.generation - 1, at),
                Claim(
                    of,
                    pick(WORKERS),
                    row.generation,
                    at,
                    death=Death("w1", at, pick([None, row.sid])),
                    lived=at,
                ),
                Outlived(row.sid, pick(WORKERS)),
                Cancel(
                    of,
                    CancelRequest("ann"),
                    at,
                    pick([None, row.head, row.turn, row.next - 1]),
                    pick([None, "w2"]),
                ),
                Resolve(pick([w.id for w in waits] or ["no"]), pick([Answer("approved"), None]), at, "w2", ("x",)),
                Resume(of, at, pick([None, "w2"])),
                Configure(name, pick("xxxy"), pick(SETTINGS), at, pick([None, None, row.settings, b"{}"])),
                Beat(WorkerRow(pick(WORKERS), "host", "boot", 1, at, pick([0, 1]))),
                Retire(pick(WORKERS), pick([True, False])),
                Branch(pick([*IDS, "fork"]), "x", name, row.head, 0, at, whole=pick([True, False])),
                Delete(name, at) if at % 7 == 0 else Delete("nobody", at),
            ]
        )

    async def _of_owner(self, row: SessionRow, at: int) -> Write[Any]:
        pick, turn = self._random.choice, row.turn or 1
        there = len(await self._store.nodes(row.sid, turn, turn))
        generation = row.generation - pick([0, 0, 0, 0, 1])
        scope = TurnScope(row.id, row.sid, turn, row.owner or "w1", generation)
        nodes = tuple(Node(there + i, b"record %d.%d" % (at, i)) for i in range(pick([1, 1, 2])))
        take = tuple(m.input for m in await self._store.inbox(row.sid) if m.kind != "queue")[: pick([0, 9])]
        wait = WaitRow(f"{row.id}.{turn}.{pick([1, 2])}", row.sid, turn, "1.0", "approval", due=pick([None, 5]))
        return pick(
            [
                Append(scope, nodes, at, take),
                Append(scope, nodes, at, waits=(wait,)),
                Append(scope, nodes, at, waits=(wait,), park=(wait.id,)),
                Commit(scope, nodes, row.head - pick([0, 0, 0, 1]), at, take, cancelled=row.cancel is not None),
                Commit(scope, nodes, row.head, at),
                Release(scope, at, stuck=pick([None, "why not"])),
            ]
        )


async def whole(store: Store) -> object:
    """Everything that can be read."""
    rows = [await store.session(name) for name in IDS]
    per_session = [
        (
            await store.nodes(r.sid, 1, r.next),
            await store.inbox(r.sid),
            sorted(await store.waits(r.sid), key=lambda w: w.id),
        )
        for r in rows
        if r is not None
    ]
    listed = await store.sessions(SessionFilter())
    opened = sorted(await store.open_sessions(), key=lambda r: r.sid)
    deaths = sorted(await store.deaths(), key=lambda d: d.scope)
    return rows, per_session, listed, opened, sorted(await store.workers(), key=lambda w: w.id), deaths


@pytest.mark.parametrize("seed", range(8))
async def test_one_tape_of_writes_gets_equal_receipts_from_both_stores(tmp_path: Path, seed: int) -> None:
    tape = await Tape(seed).record(200)
    memory, sqlite = MemoryStore(), SqliteStore(tmp_path / "agent.db")
    await sqlite.open()

    try:
        for number, write in enumerate(tape):
            expected = await answer(memory, write)
            assert await answer(sqlite, write) == expected, f"write {number} of the tape"
            assert await whole(sqlite) == await whole(memory), f"after write {number} of the tape"
    finally:
        await sqlite.close()


@pytest.mark.parametrize("seed", range(8))
async def test_one_tape_about_processes_gets_equal_receipts_from_both_stores(tmp_path: Path, seed: int) -> None:
    tape = await ProcessTape(seed).record(200)
    memory, sqlite = MemoryStore(), SqliteStore(tmp_path / "agent.db")
    await sqlite.open()

    try:
        for number, write in enumerate(tape):
            expected = await answer(memory, write)
            assert await answer(sqlite, write) == expected, f"write {number} of the tape"
            assert await all_of(sqlite) == await all_of(memory), f"after write {number} of the tape"
    finally:
        await sqlite.close()


async def test_the_tapes_reach_every_kind_of_write_accepted_and_refused() -> None:
    seen: set[tuple[str, bool]] = set()
    for seed in range(8):
        memory = MemoryStore()
        for write in [*await Tape(seed).record(200), *await ProcessTape(seed).record(200)]:
            receipt = await answer(memory, write)
            refused = isinstance(receipt, tuple) and bool(receipt) and isinstance(receipt[0], type)
            seen.add((type(write).__name__, refused))

    assert {name for name, refused in seen if not refused} == {write.__name__ for write in RULES}
    refusable = {"Accept", "Append", "Commit", "Configure", "Release", "Branch"}
    refusable |= {"Register", "Advance", "SendSignal", "AddEvent", "Cancel", "Complete", "Resume", "Share"}
    assert {name for name, refused in seen if refused} >= refusable


def test_every_write_that_a_store_may_be_asked_for_is_in_the_contract() -> None:
    assert set(StoreModel()._rules) == set(RULES)


def test_only_the_contract_needs_hypothesis() -> None:
    code = "import mainstay, mainstay.testing, sys; assert 'hypothesis' not in sys.modules; "
    code += "import mainstay.testing.store_contract; assert 'hypothesis' in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_hypothesis_the_contract_says_what_to_install() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; import mainstay.testing.store_contract"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    last = ended.stderr.splitlines()[-1]
    what = "the store contract needs hypothesis, which is not installed: pip install hypothesis"
    assert last == f"mainstay.errors.MissingExtra: {what}"
    assert issubclass(MissingExtra, MainstayError)
    assert issubclass(MissingExtra, ImportError)
