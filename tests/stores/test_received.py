"""A store that came from a stranger: nothing in it or beside it leads us to a file that is not the store's."""

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.errors import StoreDamaged, StoreUnavailable
from perdure.model.session import WorkerRow
from tests.stores.child import turn
from tests.stores.test_sqlite_file import ROOT, opened, refused

VICTIM = b"somebody else's file, which nobody may touch"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "elsewhere" / "victim.txt"
    file.parent.mkdir()
    file.write_bytes(VICTIM)
    return file


@pytest.fixture
def received(tmp_path: Path) -> Path:
    """The database of a store with one turn, which nobody has open."""

    async def write() -> None:
        async with opened(path) as store:
            await turn(store, "s", b"said", 1)

    path = tmp_path / "received" / "agent.db"
    asyncio.run(write())
    return path


def change(path: Path, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(statement, values)
        connection.commit()


def add_worker(path: Path, worker_id: object) -> None:
    (path.parent / "agent.db-workers").mkdir(exist_ok=True)
    columns = "(id, host, boot, pid, started, beat, term_ms)"
    change(path, f"INSERT INTO workers {columns} VALUES (?, 'host', 'boot', 1, 1, 1, 30000)", worker_id)


def perdure(path: Path, command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "perdure", command, "--store", str(path)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)


# ---------------------------------------------------------------------- ids that become names of files


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sessions", "doctor", "ps"])
@pytest.mark.parametrize("worker_id", ["../../elsewhere/victim.txt", "{victim}"], ids=["relative", "absolute"])
def test_looking_at_a_store_touches_no_file_outside_of_it(
    received: Path, victim: Path, worker_id: str, command: str
) -> None:
    add_worker(received, worker_id.format(victim=victim))

    done = perdure(received, command)

    assert victim.read_bytes() == VICTIM
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "worker_id",
    ["", ".", "..", "a/b", "a\0b", "a\nb", "x" * 300, "é"],
    ids=repr,
)
async def test_a_worker_whose_id_is_none_of_ours_is_dead_and_has_no_file(
    received: Path, victim: Path, worker_id: str
) -> None:
    add_worker(received, worker_id)
    before = sorted(received.parent.rglob("*"))

    async with opened(received) as store:
        gone = [await store.proven_dead(row) for row in await store.workers()]

    assert all(gone)
    assert victim.read_bytes() == VICTIM
    assert sorted(received.parent.rglob("*")) == before


@pytest.mark.parametrize("column", ["id", "pid", "beat", "term_ms"])
async def test_a_row_that_describes_no_worker_is_refused(received: Path, column: str) -> None:
    add_worker(received, "w-1")
    change(received, f"UPDATE workers SET {column} = ?", b"../../elsewhere/victim.txt")

    async with opened(received) as store:
        with pytest.raises(StoreDamaged, match="describes no worker"):
            await store.workers()


# ---------------------------------------------------------------------- links


@pytest.mark.parametrize("suffix", ["-lock", "-wal", "-shm", "-journal"])
async def test_a_link_beside_the_database_is_not_followed(received: Path, victim: Path, suffix: str) -> None:
    link = Path(f"{received}{suffix}")
    link.unlink(missing_ok=True)
    link.symlink_to(victim)

    error = await refused(received)

    assert isinstance(error, StoreUnavailable)
    assert f"{link}: it is a link" in str(error)
    assert victim.read_bytes() == VICTIM


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
@pytest.mark.parametrize("suffix", ["", "-lock"])
async def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, suffix: str, make: Callable[[str], None]
) -> None:
    make(f"{tmp_path}/agent.db{suffix}")

    assert isinstance(await refused(tmp_path / "agent.db"), StoreUnavailable)


async def test_locks_of_workers_are_not_made_or_removed_through_a_linked_folder(received: Path, victim: Path) -> None:
    add_worker(received, "victim")
    (received.parent / "agent.db-workers").rmdir()
    (received.parent / "agent.db-workers").symlink_to(victim.parent)
    victim.rename(victim.with_name("victim"))

    async with opened(received) as store:
        with pytest.raises(StoreUnavailable, match="it is a link"):
            await store.lease("mine").hold()
        (row,) = await store.workers()
        assert not await store.proven_dead(row)

    assert [file.name for file in victim.parent.iterdir()] == ["victim"]


async def test_a_link_in_place_of_a_workers_lock_proves_nothing(received: Path, victim: Path) -> None:
    add_worker(received, "w-1")
    (received.parent / "agent.db-workers" / "w-1").symlink_to(victim)

    async with opened(received) as store:
        assert not await store.proven_dead(WorkerRow("w-1", "", "", 1, 1))
        with pytest.raises(StoreUnavailable, match="it is a link"):
            await store.lease("w-1").hold()

    assert victim.read_bytes() == VICTIM


ORPHAN = hashlib.sha256(b"orphan").hexdigest()


@pytest.mark.parametrize("where", ["-blobs", f"-blobs/{ORPHAN[:2]}"], ids=["the folder", "a folder in it"])
async def test_blobs_are_not_read_written_or_swept_through_a_link(received: Path, victim: Path, where: str) -> None:
    """The sweep deletes what nothing refers to, and what killed writers left behind."""
    folder = victim.parent / ORPHAN[:2] if where == "-blobs" else victim.parent
    folder.mkdir(exist_ok=True)
    names = [ORPHAN[2:], ".0123456789abcdef.tmp"]
    for name in names:
        (folder / name).write_bytes(b"orphan")
        os.utime(folder / name, (1, 1))
    link = Path(f"{received}{where}")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim.parent)

    async with opened(received) as store:
        assert await store.sweep(0) == 0
        with pytest.raises(StoreUnavailable, match="it is a link"):
            await store.blobs.get(ORPHAN)
        with pytest.raises(StoreUnavailable, match="it is a link"):
            await store.blobs.put(b"orphan")
        assert list(store.blobs.all()) == []

    assert sorted(file.name for file in folder.iterdir() if file != victim) == sorted(names)


async def test_a_blob_that_is_a_link_is_not_read(received: Path, victim: Path) -> None:
    async with opened(received) as store:
        digest = await store.blobs.put(VICTIM)
        store.blobs.path(digest).unlink()
        store.blobs.path(digest).symlink_to(victim)

        assert not store.blobs.has(digest)
        with pytest.raises(StoreUnavailable, match="it is a link"):
            await store.blobs.get(digest)


# ---------------------------------------------------------------------- what SQLite itself would do


def journal_that_names(victim: Path, pages: int) -> bytes:
    """A rollback journal that belongs to a transaction over several databases, whose list is said to be `victim`:
    SQLite deletes that when none of the journals in the list is left."""
    magic, name = bytes.fromhex("d9d505f920a163d7"), str(victim).encode()
    header = magic + struct.pack(">IIIII", 0, 0, pages, 512, 1024)
    tail = struct.pack(">I", 0x40000000 // 1024 + 1) + name + struct.pack(">II", len(name), sum(name))
    return header.ljust(512, b"\0") + tail + magic


async def test_a_journal_that_names_a_file_elsewhere_deletes_nothing(received: Path, victim: Path) -> None:
    Path(f"{received}-journal").write_bytes(journal_that_names(victim, received.stat().st_size // 1024))

    error = await refused(received)

    assert isinstance(error, StoreDamaged)
    assert "several databases" in str(error)
    assert victim.read_bytes() == VICTIM


async def test_a_schema_of_a_stranger_calls_no_function_with_an_effect(received: Path) -> None:
    async with opened(received) as store:
        for connection in (store._file._connection, store._reader):
            assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
