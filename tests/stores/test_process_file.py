"""Processes in a file: brought forward, damaged, shared by processes, killed in between, and what they cost."""

import asyncio
import contextlib
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import Fenced, InternalError, StoreDamaged
from perdure.lifecycle.process import replay
from perdure.model.process import Event, EventType, Failure, ProcessRow, Registration, Success, WaitOn, WakeTarget
from perdure.model.session import CancelRequest, Node
from perdure.model.write import (
    Accept,
    AddEvent,
    Advance,
    Cancel,
    Claim,
    Deliver,
    Dismiss,
    ProcessFilter,
    ProcessRef,
    ProcessScope,
    Prune,
    Register,
    Release,
    Resume,
    SendSignal,
    Share,
    Write,
)
from perdure.stores.blobs import FileBlobs
from perdure.stores.sqlite import SqliteStore, schema
from perdure.stores.sqlite.database import WriterFile
from perdure.stores.sqlite.group_commit import GroupWriter
from tests.stores.test_group_commit import LosesReplies
from tests.stores.test_sqlite_file import child, integrity, lines, opened, refused

ASKED = Registration("p", "function", "rerunnable", events=(EventType("signal.go"), EventType("tick")))
SCOPE = ProcessScope("p", 1, "w1", 1)


def named(process_id: str, **more: Any) -> Registration:
    return Registration(process_id, "function", more.pop("recovery", "rerunnable"), **more)


async def begun(store: SqliteStore, process_id: str = "p", **more: Any) -> ProcessScope:
    row = (await store.write(Register(named(process_id, **more), 1, "w1"))).row
    scope = ProcessScope(process_id, row.pid, "w1", 1)
    await store.write(Advance(scope, 2, (Node(0, b"begun"),), first=True, seen=1))
    return scope


# ---------------------------------------------------------------------- the file


async def test_a_file_from_before_there_were_processes_is_brought_forward(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for number in (1, 2):
            for statement in schema.MIGRATIONS[number]:
                connection.execute(statement)
        secret = bytes(range(32))
        crc = b"\x8a\x7e\x26\x91"  # of that secret, little-endian
        connection.execute("INSERT INTO meta VALUES ('secret', ?), ('secret_crc', ?)", (secret, crc))
        connection.execute("PRAGMA user_version = 2")

    async with opened(path) as store:
        assert await store.secret() == secret
        assert await store.processes(ProcessFilter()) == []
        await begun(store)
        await store.write(Accept("s", "clerk", b"said", "op", 1))
        assert (await store.facts(deep=True)).schema == 7
    async with opened(path) as store:
        assert [row.id for row in await store.active_processes()] == ["p"]
        assert (await store.facts(deep=True)).checks == ("ok",)


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE processes SET generation = 7",
        "UPDATE processes SET owner = NULL",
        "UPDATE processes SET active = 0",
        "UPDATE processes SET due = 1",
        "UPDATE processes SET record = replace(record, 'running', 'waiting')",
        "UPDATE processes SET stuck = 'x'",
        "UPDATE registrations SET body = replace(body, 'function', 'functiom')",
        "UPDATE registrations SET body = x''",
        "DELETE FROM registrations",
    ],
)
async def test_a_process_that_is_not_what_was_written_is_not_served(tmp_path: Path, harm: str) -> None:
    async with opened(tmp_path / "agent.db") as store:
        await begun(store)
        await store.write(Register(named("parked"), 1, "w1"))
        with contextlib.closing(sqlite3.connect(store.path)) as connection:
            connection.execute(harm)
            connection.commit()

        with pytest.raises(StoreDamaged):
            await store.process("p")
        with pytest.raises(StoreDamaged):
            await store.processes(ProcessFilter())
        with pytest.raises(StoreDamaged):
            await store.write(Cancel(ProcessRef("p"), CancelRequest("ann"), 9))
        assert len((await store.facts(deep=True)).checks) > 1


@pytest.mark.parametrize(
    ("harm", "read"),
    [
        ("UPDATE events SET body = replace(body, 'go', 'no')", "events"),
        ("UPDATE events SET key = 'other' WHERE key IS NOT NULL", "events"),
        ("UPDATE events SET sequence = sequence + 10", "events"),
        ("UPDATE events SET body = 7", "events"),
        ("UPDATE steps SET body = x'00'", "steps"),
        ("UPDATE steps SET body = 'text'", "steps"),
        ("UPDATE steps SET place = place + 1", "steps"),
        ("UPDATE wakes SET state = 'pending', reason = 'x'", "wakes"),
        ("UPDATE wakes SET session_id = 'other'", "wakes"),
    ],
)
async def test_a_damaged_event_record_or_wake_is_noticed(tmp_path: Path, harm: str, read: str) -> None:
    async with opened(tmp_path / "agent.db") as store:
        scope = await begun(store, wake=WakeTarget("chat"), open_signals=True)
        await store.write(SendSignal("p", "go", 1, "k", 3))
        await store.write(Advance(scope, 4, outcome=Success(1)))
        with contextlib.closing(sqlite3.connect(store.path)) as connection:
            connection.execute(harm)
            connection.commit()

        reads = {"events": lambda: store.events(1), "steps": lambda: store.steps(1), "wakes": store.wakes}
        with pytest.raises(StoreDamaged, match="does not match its checksum"):
            await reads[read]()
        assert len((await store.facts(deep=True)).checks) > 1
    assert isinstance(await refused(tmp_path / "agent.db"), StoreDamaged)


async def test_facts_count_what_is_retained(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.db") as store:
        await begun(store, "p")
        scope = await begun(store, "q")
        await store.write(Advance(scope, 3, outcome=Success()))
        assert (await store.facts()).processes == 2
        await store.write(Prune(9, 9))
        assert (await store.facts()).processes == 1


async def test_a_cursor_that_was_handed_out_never_belongs_to_a_later_event(tmp_path: Path) -> None:
    """The newest events go first when their process is pruned, and with them their places."""
    async with opened(tmp_path / "agent.db") as store:
        await begun(store, "older")
        scope = await begun(store, "newest", wake=WakeTarget("chat"))
        await store.write(Advance(scope, 3, outcome=Success()))
        cursor, (wake,) = await store.last_change(), await store.wakes()
        await store.write(Dismiss((wake.number,), 3, "expired"))
        await store.write(Prune(9, 9))

        ((place, tomb),) = await store.changes(cursor)

        assert (tomb.id, tomb.pruned, tomb.status) == ("newest", 9, "completed")
        assert place > cursor
        again = await begun(store, "third", wake=WakeTarget("chat"))
        await store.write(Advance(again, 10, outcome=Success()))
        assert (await store.wakes())[0].number > wake.number


# ---------------------------------------------------------------------- what it costs


@pytest.mark.slow
async def test_a_pruned_process_leaves_a_hundred_bytes_at_most(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    async with opened(path) as store:
        for number in range(2000):
            scope = await begun(store, f"report-{number:06}.1.1.0", input="x" * 300, label="weekly")
            await store.write(Advance(scope, 3, (Node(1, b"y" * 300),), outcome=Success("z" * 300)))
        while await store.write(Prune(9, 9)):
            pass
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM")
        pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        tables = connection.execute("SELECT count(*) FROM sqlite_schema WHERE rootpage > 0").fetchone()[0]

        assert connection.execute("SELECT count(*) FROM tombstones").fetchone()[0] == 2000
        assert (pages - tables) * size <= 2000 * 100


async def test_a_tombstone_that_was_changed_on_disk_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    async with opened(path) as store:
        await store.write(Advance(await begun(store), 3, outcome=Success()))
        await store.write(Prune(9, 9))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE tombstones SET digest = digest + 1")
        connection.commit()

    assert "malformed row of tombstones" in str(await refused(path))


async def test_a_unit_of_work_takes_ten_statements(tmp_path: Path) -> None:
    """Register; first record; last record and outcome: nobody asks who waits, or for children, when nobody can be."""
    async with opened(tmp_path / "agent.db") as store:
        await begun(store, "before")  # the first ones also read what the store is, and the next numbers of rows
        seen: list[str] = []
        store._file._connection.set_trace_callback(seen.append)

        scope = await begun(store)
        await store.write(Advance(scope, 3, (Node(1, b"done"),), outcome=Success(1)))

        counted = Counter(statement.split()[0] for statement in seen)
        assert counted == {"BEGIN": 3, "PRAGMA": 3, "INSERT": 7, "UPDATE": 2 + 3, "SELECT": 1, "COMMIT": 3}


async def test_the_end_of_a_parent_with_many_dead_children_asks_for_the_live_ones_only(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.db") as store:
        parent = await begun(store, "parent")
        for number in range(30):
            scope = await begun(store, f"child {number}", parent="parent", parent_end="cancel")
            await store.write(Advance(scope, 3, outcome=Success()))
        await begun(store, "alive", parent="parent", parent_end="cancel")
        await begun(store, "free", parent="parent", parent_end="abandon")
        with contextlib.closing(sqlite3.connect(store.path)) as connection:
            plan = connection.execute(
                "EXPLAIN QUERY PLAN SELECT pid FROM processes WHERE parent = 'parent' AND live = 1 ORDER BY pid"
            ).fetchall()

        ended = await store.write(Advance(parent, 4, outcome=Success()))

        assert [row.id for row in ended.woken] == ["alive"]
        assert "processes_children (parent=? AND live=?)" in plan[0][3]


# ---------------------------------------------------------------------- two stores on one file


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[tuple[SqliteStore, SqliteStore]]:
    async with opened(tmp_path / "agent.db") as ours, opened(tmp_path / "agent.db") as theirs:
        yield ours, theirs


async def test_an_owner_relieved_by_another_process_is_fenced(stores: tuple[SqliteStore, SqliteStore]) -> None:
    ours, theirs = stores
    scope = await begun(ours)
    assert (await theirs.write(Claim(ProcessRef("p"), "w2", 1, 3))).won

    writes: list[Write[Any]] = [Advance(scope, 4, (Node(1, b"late"),)), Advance(scope, 4, outcome=Success())]
    for late in (*writes, Release(scope, 4)):
        with pytest.raises(Fenced):
            await ours.write(late)

    assert await ours.steps(1) == [(0, b"begun")]


async def test_what_another_process_wrote_is_news_to_the_owner_and_it_does_not_park(
    stores: tuple[SqliteStore, SqliteStore],
) -> None:
    ours, theirs = stores
    scope = await begun(ours)
    await theirs.write(Cancel(ProcessRef("p"), CancelRequest("ann"), 3))

    advanced = await ours.write(Advance(scope, 4, (Node(1, b"1"),), park=(WaitOn("1", "time", due=9),), seen=2))

    assert not advanced.parked
    assert advanced.row.record.cancel == CancelRequest("ann")


async def test_children_and_waiters_that_another_process_brought_are_found(
    stores: tuple[SqliteStore, SqliteStore],
) -> None:
    """What this one remembers says that nobody waits for it: it must not be believed any more."""
    ours, theirs = stores
    scope = await begun(ours, "parent")
    await theirs.write(Register(named("child", parent="parent", parent_end="cancel"), 2, "w2"))
    waiter = (await theirs.write(Register(named("waiter"), 2, "w2"))).row
    waits = (WaitOn("1", "process", "parent"),)
    await theirs.write(Advance(ProcessScope("waiter", waiter.pid, "w2", 1), 3, first=True, seen=1, park=waits))

    ended = await ours.write(Advance(scope, 4, outcome=Success()))

    assert [row.id for row in ended.woken] == ["waiter", "child"]


@pytest.mark.parametrize("undone", [1, 2])
def test_what_was_rolled_back_is_not_remembered(tmp_path: Path, undone: int) -> None:
    """Neither how far a journal went, nor who owned it, nor that nobody waited for it."""
    file = WriterFile(tmp_path / "agent.db", FileBlobs(tmp_path / "blobs"))
    file.begin()
    file.apply(Register(named("p"), 1, "w1"))
    file.apply(Advance(SCOPE, 2, (Node(0, b"begun"),), first=True, seen=1))
    file.commit()
    writes = [Advance(SCOPE, 3, (Node(1, b"1"),), (Event("tick", 1, 3),), seen=2), Advance(SCOPE, 4, outcome=Success())]
    file.begin()
    for write in writes[:undone]:
        file.apply(write)
    file.rollback()

    file.begin()
    answers = [file.apply(write) for write in writes]
    file.commit()

    assert [answer.row.record.sequence for answer in answers] == [3, 4]
    with contextlib.closing(sqlite3.connect(tmp_path / "agent.db")) as connection:
        assert connection.execute("SELECT body FROM steps ORDER BY place").fetchall() == [(b"begun",), (b"1",)]
    file.close()


async def test_claims_of_one_process_race_and_one_wins(stores: tuple[SqliteStore, SqliteStore]) -> None:
    ours, theirs = stores
    for number in range(40):
        await ours.write(Register(named(f"p{number}"), 1))
    claims = [
        store.write(Claim(ProcessRef(f"p{number}"), worker, 0, 2))
        for number in range(40)
        for store, worker in ((ours, "ours"), (theirs, "theirs"))
    ]

    taken = await asyncio.gather(*claims)

    winners = Counter(answer.row.id for answer in taken if answer.won and answer.row is not None)
    assert winners == Counter({f"p{number}": 1 for number in range(40)})


@pytest.mark.gate
@pytest.mark.slow
async def test_two_workers_take_ten_thousand_rows_each_exactly_once(tmp_path: Path) -> None:
    path, many = tmp_path / "agent.db", 10_000
    async with opened(path) as store:
        await asyncio.gather(*(store.write(Register(named(f"p{n}"), 1)) for n in range(many)))
    workers = [child("takes", path, worker) for worker in ("w1", "w2")]
    for process in workers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in workers:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()

    won = [await asyncio.to_thread(lines, process) for process in workers]

    assert Counter(won[0] + won[1]) == Counter({f"p{n}": 1 for n in range(many)})
    async with opened(path) as store:
        rows = await store.active_processes()
        assert Counter(row.owner for row in rows) == Counter({"w1": len(won[0]), "w2": len(won[1])})
        assert {(row.generation, row.attempts) for row in rows} == {(1, 1)}
    assert integrity(path) == "ok"


# ---------------------------------------------------------------------- killed in between


@pytest.mark.kill
@pytest.mark.parametrize("units", [3, 40, 200])
async def test_a_process_killed_while_it_writes_leaves_every_log_whole(tmp_path: Path, units: int) -> None:
    path = tmp_path / "agent.db"
    process = child("units", path)
    assert process.stdout is not None
    said = [await asyncio.to_thread(process.stdout.readline) for _ in range(units)]
    process.kill()
    rest, _ = process.communicate(timeout=60)
    acknowledged = [line.strip() for line in said] + rest.split("\n")[:-1]

    async with opened(path) as store:
        rows = await store.processes(ProcessFilter(limit=100_000))
        ended = {row.id: row for row in rows if row.status == "completed"}
        assert set(acknowledged) <= set(ended), "acknowledged is durable"
        for row in rows:
            events = await store.events(row.pid)
            assert replay(event for _, _, event in events) == row.record
            check_unit(row, [event.type for _, _, event in events], [n for n, _ in await store.steps(row.pid)])
        told = [wake.pid for wake in await store.wakes()]
        assert sorted(told) == sorted(row.pid for row in ended.values()), "one wake with each end, and no other"
    assert integrity(path) == "ok"


def check_unit(row: ProcessRow, events: list[str], steps: list[int]) -> None:
    """Each of its three writes is there whole, or not at all."""
    stages = {
        ("process.created",): [],
        ("process.created", "process.first_started"): [0],
        ("process.created", "process.first_started", "process.completed"): [0, 1],
    }
    assert stages[tuple(events)] == steps, row.id


# ---------------------------------------------------------------------- replies that are lost


@pytest.fixture
def lossy(tmp_path: Path) -> Iterator[tuple[LosesReplies, GroupWriter]]:
    backend: Any = LosesReplies(WriterFile(tmp_path / "agent.db", FileBlobs(tmp_path / "blobs")))
    writer = GroupWriter(backend, "writer")
    writer.start()
    yield backend, writer
    writer.stop()
    backend.close()


TICK = Event("tick", {"n": 1}, 5)
BEFORE: list[Write[Any]] = [
    Register(named("p", events=(EventType("tick"), EventType("signal.go")), wake=WakeTarget("chat")), 1, "w1"),
    Advance(SCOPE, 2, (Node(0, b"begun"),), first=True, seen=1),
    Register(named("stuck", wake=WakeTarget("chat")), 1, "w1"),
    Release(ProcessScope("stuck", 2, "w1", 1), 2, "why"),
    Register(named("over", wake=WakeTarget("chat")), 1, "w1"),
    Advance(ProcessScope("over", 3, "w1", 1), 3, outcome=Success(1)),
]


@pytest.mark.parametrize(
    "write",
    [
        Register(named("new"), 5, "w1", ("chat",)),
        Register(named("new"), 5),
        Claim(ProcessRef("p"), "w2", 1, 5),
        Advance(SCOPE, 5, (Node(1, b"1"), Node(2, b"2")), (TICK,), seen=2),
        Advance(SCOPE, 5, (), (TICK,), seen=2),
        Advance(SCOPE, 5, (), (Event("tick", None, 5, "k1"),), seen=2),
        Advance(SCOPE, 5, (Node(1, b"1"), Node(2, b"segment")), (TICK,), seen=2, drop=2),
        Advance(SCOPE, 5, (Node(1, b"1"),), park=(WaitOn("1", "time", due=9), WaitOn("2", "signal", "go")), seen=2),
        Advance(SCOPE, 5, (Node(1, b"1"),), outcome=Failure("bug", data=[1])),
        Release(SCOPE, 5),
        Release(SCOPE, 5, "diverged"),
        Share("chat", ("p",), 5),
        Deliver("chat", "clerk", (8,), b"told", "op", 5, worker="w1"),
        Prune(4, 9),
    ],
    ids=[
        "register and claim", "register", "take", "records and events", "events", "keyed events", "cut", "park", "end",
        "let go", "stuck", "share", "deliver", "prune",
    ],
)  # fmt: skip
async def test_a_write_whose_reply_was_lost_is_applied_once(
    tmp_path: Path, lossy: tuple[LosesReplies, GroupWriter], write: Write[Any]
) -> None:
    backend, writer = lossy
    async with opened(tmp_path / "undisturbed.db") as undisturbed:
        for earlier in BEFORE:
            assert await writer.write(earlier) == await undisturbed.write(earlier)
        backend.lose = True

        answer = await writer.write(write)

        assert not backend.lose, "the reply was not lost"
        first = await undisturbed.write(write)
        if not isinstance(write, Share | Prune):  # these tell how many they changed: none, the second time
            assert answer == first
        async with opened(tmp_path / "agent.db") as again:
            assert await everything(again) == await everything(undisturbed)


async def everything(store: SqliteStore) -> list[Any]:
    found: list[Any] = [await store.changes(), await store.wakes(), await store.wakes(state="enqueued")]
    for pid in range(1, 5):
        found += [await store.events(pid), await store.steps(pid)]
    return [*found, await store.session("chat"), await store.is_granted("chat", "p")]


@pytest.mark.parametrize(
    "write",
    [
        Cancel(ProcessRef("p"), CancelRequest("ann"), 5),
        Resume(ProcessRef("stuck"), 5),
        SendSignal("p", "go", 1, "k", 5),
    ],
)
async def test_somebody_outside_whose_reply_was_lost_is_heard_once(
    tmp_path: Path, lossy: tuple[LosesReplies, GroupWriter], write: Write[Any]
) -> None:
    backend, writer = lossy
    async with opened(tmp_path / "undisturbed.db") as undisturbed:
        for earlier in BEFORE:
            await writer.write(earlier)
            await undisturbed.write(earlier)
        backend.lose = True

        await writer.write(write)

        await undisturbed.write(write)
        async with opened(tmp_path / "agent.db") as again:
            assert await everything(again) == await everything(undisturbed)


async def test_a_refused_write_of_an_owner_takes_its_later_ones_with_it_and_nobody_else(
    tmp_path: Path, lossy: tuple[LosesReplies, GroupWriter]
) -> None:
    """They were made in the belief that it would land."""
    backend, writer = lossy
    other = ProcessScope("other", 4, "w1", 1)
    for write in [*BEFORE, Register(named("other"), 1, "w1")]:
        await writer.write(write)
    backend._file._lock.hold()
    batch = [
        writer.write(Advance(SCOPE, 5, (Node(0, b"not what it was"),))),
        writer.write(Advance(other, 5, (Node(0, b"others"),), first=True, seen=1)),
        writer.write(Advance(SCOPE, 6, (Node(1, b"1"),), outcome=Success())),
        writer.write(Release(SCOPE, 7)),
        writer.write(SendSignal("p", "go", 1, "k", 8)),
    ]
    backend._file._lock.free()

    answers = await asyncio.gather(*batch, return_exceptions=True)

    assert [isinstance(answer, InternalError) for answer in answers] == [True, False, True, True, False]
    async with opened(tmp_path / "agent.db") as store:
        assert await store.steps(1) == [(0, b"begun")]
        assert await store.steps(4) == [(0, b"others")]
        row = await store.process("p")
        assert (row.owner, row.status) == ("w1", "running")


async def test_a_whole_batch_whose_reply_was_lost_is_applied_once(
    tmp_path: Path, lossy: tuple[LosesReplies, GroupWriter]
) -> None:
    """Each is sent again alone, after all of them have landed: a cut journal does not grow its old records again."""
    backend, writer = lossy
    batch: list[Write[Any]] = [
        Advance(SCOPE, 5, (Node(1, b"1"),), (TICK,), seen=2),
        SendSignal("p", "go", 1, "k", 5),
        AddEvent("p", Event("process.progress", 1, 5, "k2"), 5),
        Advance(SCOPE, 6, (), (Event("tick", 2, 6),), seen=2),
        Advance(SCOPE, 6, (Node(2, b"2"), Node(3, b"segment")), seen=2, drop=3),
        Advance(SCOPE, 7, (Node(4, b"4"),), outcome=Success("end")),
        Claim(ProcessRef("p"), "w2", 1, 8),
    ]
    async with opened(tmp_path / "undisturbed.db") as undisturbed:
        for write in BEFORE:
            await writer.write(write)
            await undisturbed.write(write)
        blocked = backend._file._lock
        blocked.hold()
        backend.lose = True
        answers = [writer.write(write) for write in batch]
        blocked.free()
        await asyncio.gather(*answers, return_exceptions=True)

        for write in batch:
            await undisturbed.write(write)

        async with opened(tmp_path / "agent.db") as again:
            assert await everything(again) == await everything(undisturbed)
            assert await again.steps(1) == [(3, b"segment"), (4, b"4")]
