"""The file itself: who may open it, what happens when it is damaged, full, shared or its process is killed."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import StoreDamaged, StoreError, StoreTooNew, StoreUnavailable
from perdure.model.session import Node, WorkerRow
from perdure.model.write import Accept, Append, Beat, Commit, Delete, TurnScope
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.database import CHECKPOINT_WRITES, connect
from tests.fuzzing import cases
from tests.kit import until
from tests.stores.child import turn
from tests.stores.damage import DAMAGES, damage, healthy, image, served

ROOT = Path(__file__).parents[2]


def child(what: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.stores.child", what, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def lines(process: subprocess.Popen[str]) -> list[str]:
    """Everything that a child said; it ended well."""
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said.split("\n")[:-1]


@contextlib.asynccontextmanager
async def opened(path: Path) -> Any:
    store = SqliteStore(path)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def refused(path: Path) -> StoreError:
    store = SqliteStore(path)
    with pytest.raises(StoreError) as caught:
        await store.open()
    return caught.value


def integrity(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


# ---------------------------------------------------------------------- what is not ours


async def test_a_file_of_a_newer_perdure_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.db"):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "agent.db")) as connection:
        connection.execute("PRAGMA user_version = 99")

    error = await refused(tmp_path / "agent.db")

    assert isinstance(error, StoreTooNew)
    assert (error.found, error.known) == (99, 7)


async def test_a_database_of_some_other_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
        connection.commit()

    error = await refused(path)

    assert isinstance(error, StoreDamaged)
    assert "another program" in str(error)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]


async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"Dear diary, " * 200)

    assert isinstance(await refused(path), StoreDamaged)
    assert path.read_bytes() == b"Dear diary, " * 200


# ---------------------------------------------------------------------- damage


async def test_a_cut_wal_is_refused_with_a_hint(tmp_path: Path) -> None:
    path, _ = await healthy(tmp_path, folded=False)
    wal = Path(f"{path}-wal")
    frame = 24 + 1024
    frames = (wal.stat().st_size - 32) // frame
    os.truncate(wal, 32 + (frames - 6) * frame)

    error = await refused(path)

    assert isinstance(error, StoreDamaged)
    assert "acknowledged transactions are missing" in str(error)
    assert f"perdure restore {path}" in str(error)


async def test_a_removed_wal_is_refused_even_after_a_deletion(tmp_path: Path) -> None:
    """A reader that stays keeps the deletion in the WAL: without one it is folded into the file soon after."""
    async with opened(tmp_path / "agent.db") as store:
        store._file.checkpoint("TRUNCATE")
        with contextlib.closing(sqlite3.connect(store.path)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sessions").fetchone()
            await store.write(Accept("a", "clerk", b"said", "op", 1))
            await store.write(Delete("a", 2))
            path = image(store.path, tmp_path / "crashed")
    Path(f"{path}-wal").unlink()

    assert "acknowledged transactions are missing" in str(await refused(path))


async def test_a_lost_transaction_is_noticed_whatever_was_in_it(tmp_path: Path) -> None:
    """With records, and without."""
    async with opened(tmp_path / "agent.db") as store:
        images = []
        for number, write in enumerate([Accept("a", "clerk", b"said", "op", 1), Beat(WorkerRow("w1", "", "", 1, 1))]):
            before = Path(f"{store.path}-wal").read_bytes()
            await store.write(write)
            images.append(image(store.path, tmp_path / f"crashed-{number}"))
            Path(f"{images[-1]}-wal").write_bytes(before)

    for path in images:
        assert "acknowledged transactions are missing" in str(await refused(path))


async def test_an_old_copy_is_not_worked_on_though_its_lock_was_removed(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.db") as store:
        await turn(store, "a", b"first", 1)
        store._file.checkpoint("TRUNCATE")
        backup = store.path.read_bytes()
        await turn(store, "a", b"second", 2)
    (tmp_path / "agent.db").write_bytes(backup)
    assert isinstance(await refused(tmp_path / "agent.db"), StoreDamaged)

    Path(tmp_path / "agent.db-lock").unlink()

    async with opened(tmp_path / "agent.db") as store:
        row = await store.session("a")
        assert row.head == 1
        assert "perdure restore" in store.held()


async def test_a_flipped_bit_in_a_record_is_noticed_by_its_checksum(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.db") as store:
        await turn(store, "a", b"the words that were said", 1)
    data = bytearray((tmp_path / "agent.db").read_bytes())
    data[data.index(b"the words that were said")] ^= 1
    (tmp_path / "agent.db").write_bytes(data)

    assert "does not match its checksum" in str(await refused(tmp_path / "agent.db"))


@pytest.mark.parametrize("copy", [0, 1], ids=["one copy", "the other"])
async def test_a_session_id_that_its_index_spells_otherwise_is_noticed(tmp_path: Path, copy: int) -> None:
    """It stands in its row and in the index by which it is found: found by neither, it would be a lost session."""
    async with opened(tmp_path / "agent.db") as store:
        await turn(store, "an-unmistakable-id", b"said", 1)
    data = bytearray((tmp_path / "agent.db").read_bytes())
    first = data.index(b"an-unmistakable-id")
    second = data.index(b"an-unmistakable-id", first + 1)
    data[(first, second)[copy]] ^= 1
    (tmp_path / "agent.db").write_bytes(data)

    assert isinstance(await refused(tmp_path / "agent.db"), StoreDamaged)


@pytest.mark.parametrize("body", ["x'00'", "'text'", "7"])
async def test_a_record_damaged_behind_an_open_store_is_not_served(tmp_path: Path, body: str) -> None:
    async with opened(tmp_path / "agent.db") as store:
        await turn(store, "a", b"said", 1)
        with contextlib.closing(sqlite3.connect(store.path)) as connection:
            connection.execute(f"UPDATE nodes SET body = {body}")
            connection.commit()

        with pytest.raises(StoreDamaged, match="does not match its checksum"):
            await store.nodes(1, 1, 1)
        with pytest.raises(StoreDamaged, match="does not match its checksum"):
            await store.nodes(1, 1, 1000)
        assert len((await store.facts(deep=True)).checks) > 1


@pytest.mark.parametrize("column", ["head", "next", "turn", "generation", "agent"])
async def test_a_session_that_is_not_what_was_written_is_not_served(tmp_path: Path, column: str) -> None:
    """A head that slipped back would be a shorter history; SQLite itself notices nothing."""
    async with opened(tmp_path / "agent.db") as store:
        await turn(store, "a", b"first", 1)
        await turn(store, "a", b"second", 2)
        with contextlib.closing(sqlite3.connect(store.path)) as connection:
            connection.execute(f"UPDATE sessions SET {column} = 1")
            connection.commit()

        with pytest.raises(StoreDamaged):
            await store.session("a")
        with pytest.raises(StoreDamaged):
            await store.write(Accept("a", "clerk", b"third", "op", 3))


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("folded", [True, False], ids=["in the file", "half in the WAL"])
@pytest.mark.parametrize("how", DAMAGES)
async def test_a_damaged_file_is_refused_or_served_whole(tmp_path: Path, how: str, folded: bool) -> None:
    """Never a shorter history, and never an error without a type."""
    path, truth = await healthy(tmp_path, folded)
    for seed in range(cases(12, 400)):
        damaged = image(path, tmp_path / f"damaged-{seed}")
        what = damage(damaged, how, seed)
        store = SqliteStore(damaged)
        try:
            await store.open()
            assert await served(store) == truth, f"{what}: served something else"
        except StoreError:
            pass
        finally:
            await store.close()
        shutil.rmtree(damaged.parent)


# ---------------------------------------------------------------------- no access, no space


async def test_a_path_under_a_file_is_refused_typed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    assert isinstance(await refused(tmp_path / "file" / "agent.db"), StoreUnavailable)
    assert isinstance(await refused(tmp_path / "file" / "deeper" / "agent.db"), StoreUnavailable)


async def test_a_folder_in_place_of_the_file_is_refused_typed(tmp_path: Path) -> None:
    (tmp_path / "agent.db").mkdir()

    assert isinstance(await refused(tmp_path / "agent.db"), StoreUnavailable)


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that users without rights can reach. The test's own temporary folders are private."""
    folder = Path("/var/tmp" if os.access("/var/tmp", os.W_OK) else "/tmp") / f"perdure-{os.getpid()}-{id(tmp_path)}"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("what", ["folder", "file", "lock", "shared memory"])
async def test_what_is_read_only_is_refused_typed_and_left_whole(open_folder: Path, what: str) -> None:
    path = open_folder / "agent.db"
    async with opened(path) as store:
        await turn(store, "a", b"said", 1)
        if what == "shared memory":
            image(path, open_folder / "crashed")
    if what == "shared memory":
        path = open_folder / "crashed" / "agent.db"
        path.parent.chmod(0o777)
    for file in path.parent.glob("agent.db*"):
        file.chmod(0o666)
    if what == "folder":
        path.parent.chmod(0o555)
        for file in path.parent.glob("agent.db-*"):
            file.unlink()
    elif what == "lock":
        Path(f"{path}-lock").chmod(0o444)
    else:
        path.chmod(0o444)

    (said,) = lines(child("as_nobody", path))

    assert said.startswith("StoreUnavailable: ")
    path.parent.chmod(stat.S_IRWXU)
    async with opened(path) as store:
        row = await store.session("a")
        assert row.head == 1
        assert await store.session("mine") is None


async def test_a_full_disk_is_typed_and_the_old_head_stays_until_space_returns(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.db") as store:
        await turn(store, "a", b"said", 1)
        connection = store._file._connection
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        accept = Accept("a", "clerk", bytes(20_000), "op-2", 2, worker="w1")

        with pytest.raises(StoreUnavailable, match="the disk is full: free space and try again"):
            await store.write(accept)
        row = await store.session("a")
        assert (row.head, row.next, row.turn) == (1, 2, None)
        assert [ordinal for _, ordinal, _ in await store.nodes(1, 1, 9)] == [0, 1]

        connection.execute("PRAGMA max_page_count = 1000000")
        assert (await store.write(accept)).turn == 2
    assert integrity(tmp_path / "agent.db") == "ok"


@pytest.mark.kill
async def test_files_that_may_not_grow_give_a_typed_error_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    process = child("in_little_space", path, 200_000)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    *turns, error = said.split()[: said.split().index("StoreUnavailable:") + 1]

    assert error == "StoreUnavailable:"
    assert turns == [str(n) for n in range(1, len(turns) + 1)]
    async with opened(path) as store:
        row = await store.session("mine")
        assert row.head >= len(turns) > 10
        if row.turn is not None:  # it died between the two writes of a turn
            scope = TurnScope("mine", row.sid, row.turn, "w1", row.generation)
            await store.write(Commit(scope, (Node(1, b"late"),), row.head, 1))
        assert (await turn(store, "mine", b"again", 1)) == row.next
    assert integrity(path) == "ok"


# ---------------------------------------------------------------------- many processes


@pytest.mark.slow
async def test_two_processes_write_one_file_and_every_turn_counts(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    processes = [child("turns", path, name, 300) for name in ("a", "b")]
    said = [await asyncio.to_thread(lines, process) for process in processes]

    assert said == [[str(n) for n in range(1, 301)]] * 2
    async with opened(path) as store:
        for name in ("a", "b"):
            row = await store.session(name)
            assert (row.head, row.next) == (300, 301)
            history = await store.nodes(row.sid, 1, 300)
            assert history == [(n, o, b"%d" % n) for n in range(1, 301) for o in (0, 1)]
    assert integrity(path) == "ok"


@pytest.mark.slow
async def test_a_fresh_file_is_opened_by_many_at_once(tmp_path: Path) -> None:
    """Twenty first openings from eight processes: all see one store with one secret."""
    processes = [child("openings", tmp_path / "agent.db", 3 if number < 4 else 2) for number in range(8)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    secrets = [await asyncio.to_thread(lines, process) for process in processes]

    assert len({secret for (secret,) in secrets}) == 1


@pytest.mark.kill
async def test_a_host_that_peeks_into_the_file_costs_no_acknowledged_turn(tmp_path: Path) -> None:
    """Its connections come and go in the store's own process, which is then killed."""
    path = tmp_path / "agent.db"
    process = child("peeked", path, "a")
    assert process.stdout is not None
    said = [await asyncio.to_thread(process.stdout.readline) for _ in range(300)]
    process.kill()
    rest = await asyncio.to_thread(process.stdout.read)  # `communicate` passes over what `readline` has read ahead
    process.communicate(timeout=60)
    acknowledged = len(said) + rest.count("\n")

    async with opened(path) as store:
        row = await store.session("a")
        assert row.head in (acknowledged, acknowledged + 1)
        history = await store.nodes(row.sid, 1, row.head)
        assert history == [(n, o, b"%d" % n) for n in range(1, row.head + 1) for o in (0, 1)]
    assert integrity(path) == "ok"


def test_a_forked_child_refuses_its_parents_store_and_cannot_harm_it(tmp_path: Path) -> None:
    said = lines(child("forked", tmp_path / "agent.db"))

    refusals = ["StoreInherited"] * 4
    assert said == [*refusals, "NoneType", "2", "alive"]


@pytest.mark.kill
async def test_a_process_killed_in_a_transaction_blocks_nobody_though_its_forked_child_lives(tmp_path: Path) -> None:
    process = child("dies_with_the_lock", tmp_path / "agent.db")
    assert process.stdout is not None
    survivor = int(await asyncio.to_thread(process.stdout.readline))
    assert process.wait(60) == -signal.SIGKILL
    try:
        async with asyncio.timeout(60), opened(tmp_path / "agent.db") as store:
            assert await turn(store, "a", b"said", 1) == 1
    finally:
        os.kill(survivor, signal.SIGKILL)
        process.communicate(timeout=60)


# ---------------------------------------------------------------------- how it is written


@contextlib.contextmanager
def held(path: Path) -> Generator[None]:
    """The lock of a store, held by somebody else."""
    lock = os.open(f"{path}-lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


async def test_nothing_is_written_while_somebody_else_holds_the_lock(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.db") as store:
        await turn(store, "a", b"said", 1)
        before = Path(f"{store.path}-wal").read_bytes()
        with held(store.path):
            writing = asyncio.ensure_future(turn(store, "a", b"more", 2))
            done, _ = await asyncio.wait([writing], timeout=0.2)
            assert not done
            assert Path(f"{store.path}-wal").read_bytes() == before

        assert await writing == 2


async def test_nothing_is_folded_back_while_somebody_else_holds_the_lock(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.db") as store:
        await turn(store, "a", b"said", 1)
        before = store.path.read_bytes()
        with held(store.path):
            folding = asyncio.ensure_future(asyncio.to_thread(store._file.checkpoint, "PASSIVE"))
            done, _ = await asyncio.wait([folding], timeout=0.2)
            assert not done
            assert store.path.read_bytes() == before

        await folding
        assert store.path.read_bytes() != before


async def test_nobody_opens_the_file_while_somebody_else_holds_the_lock(tmp_path: Path) -> None:
    """Whoever comes first recovers it."""
    store, other = SqliteStore(tmp_path / "agent.db"), SqliteStore(tmp_path / "agent.db")
    await store.open()
    with held(store.path):
        waiting = [asyncio.ensure_future(other.open())]
        done, _ = await asyncio.wait(waiting, timeout=0.2)
        assert not done
    await waiting[0]
    await other.close()
    await store.close()


async def test_every_connection_syncs_fully_and_never_checkpoints_by_itself(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.db") as store:
        for connection in (store._file._connection, store._reader, connect(store.path)):
            settings = {
                name: connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("journal_mode", "synchronous", "wal_autocheckpoint", "page_size")
            }
            assert settings == {"journal_mode": "wal", "synchronous": 2, "wal_autocheckpoint": 0, "page_size": 1024}
        connection.close()
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store._reader.execute("DELETE FROM nodes")


async def test_the_wal_is_folded_back_when_it_has_grown(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.db") as store:
        await store.write(Accept("a", "clerk", b"said", "op", 1, worker="w1"))
        scope = TurnScope("a", 1, 1, "w1", 1)
        before = store.path.stat().st_size
        for ordinal in range(1, CHECKPOINT_WRITES, 64):
            appends = [Append(scope, (Node(n, b"record" * 20),), 1) for n in range(ordinal, ordinal + 64)]
            await asyncio.gather(*[store.write(append) for append in appends])

        # The writer thread folds it, after the loop has answered.
        await until(lambda: store.path.stat().st_size > before + 64 * 1024)
        records = len(await store.nodes(1, 1, 1))
    assert records == CHECKPOINT_WRITES + 1
    assert not Path(f"{tmp_path}/agent.db-wal").exists(), "the last to close leaves one file"
