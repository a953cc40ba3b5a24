"""The sweep: it takes blobs that nothing refers to and that are old, and none from under a reference."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import BlobMissing
from perdure.model.session import Node
from perdure.model.write import Accept, Append, Commit, Delete, TurnScope, Write
from perdure.ports.store import Store
from perdure.stores.blobs import FileBlobs
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.database import Sweep, WriterFile
from perdure.stores.sqlite.group_commit import GroupWriter
from perdure.stores.sqlite.store import SWEEP_AT_ONCE
from perdure.testing import VirtualClock

HOUR = 3600


class Shelf:
    """A store and the age of what is in it: by the virtual clock in memory, by the times of the files on disk."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.path, self.rows, self.clock = folder / "agent.db", MemoryRows(), VirtualClock()
        self.in_memory = kind == "memory"
        self.store = self.another()

    def another(self) -> Store:
        return MemoryStore(self.rows, self.clock) if self.in_memory else SqliteStore(self.path)

    def age(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for file in Path(f"{self.path}-blobs").glob("*/*"):
            changed = file.stat().st_mtime - seconds
            os.utime(file, (changed, changed))

    async def has(self, digest: str) -> bool:
        try:
            await self.store.blobs.get(digest)
        except BlobMissing:
            return False
        return True


@pytest.fixture(params=["memory", "sqlite"])
async def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shelf]:
    shelf = Shelf(request.param, tmp_path)
    await shelf.store.open()
    yield shelf
    await shelf.store.close()


@pytest.fixture
async def file_shelf(tmp_path: Path) -> AsyncIterator[Shelf]:
    shelf = Shelf("sqlite", tmp_path)
    await shelf.store.open()
    yield shelf
    await shelf.store.close()


def accept(session_id: str, *digests: str) -> Accept:
    return Accept(session_id, "clerk", b"see the blob", f"op-{session_id}", 1, worker="w1", blobs=digests)


# ---------------------------------------------------------------------- what goes, and when


async def test_only_what_nobody_put_for_an_hour_goes(shelf: Shelf) -> None:
    old = await shelf.store.blobs.put(b"put more than an hour ago")
    shelf.age(HOUR / 2 + 1)
    young = await shelf.store.blobs.put(b"put half an hour ago")
    shelf.age(HOUR / 2)

    assert await shelf.store.sweep() == 1
    assert (await shelf.has(old), await shelf.has(young)) == (False, True)


async def test_a_blob_that_is_put_again_is_young_again(shelf: Shelf) -> None:
    digest = await shelf.store.blobs.put(b"report")
    shelf.age(2 * HOUR)
    await shelf.store.blobs.put(b"report")

    assert await shelf.store.sweep() == 0
    await shelf.store.write(accept("a", digest))
    assert await shelf.store.blobs.get(digest) == b"report"


async def test_what_is_referred_to_stays_however_old_it_is(shelf: Shelf) -> None:
    kept, orphan = await shelf.store.blobs.put(b"kept"), await shelf.store.blobs.put(b"orphan")
    await shelf.store.write(accept("a", kept))
    shelf.age(1000 * HOUR)

    assert await shelf.store.sweep() == 1
    assert (await shelf.has(kept), await shelf.has(orphan)) == (True, False)


async def test_whoever_knows_that_nobody_writes_may_sweep_without_grace(shelf: Shelf) -> None:
    digest = await shelf.store.blobs.put(b"put this instant")

    assert await shelf.store.sweep() == 0
    assert await shelf.store.sweep(grace=0) == 1
    assert not await shelf.has(digest)


async def test_a_blob_goes_with_the_last_session_that_refers_to_it(shelf: Shelf) -> None:
    digest = await shelf.store.blobs.put(b"shared")
    await shelf.store.write(accept("a", digest))
    await shelf.store.write(accept("b", digest))
    shelf.age(2 * HOUR)

    await shelf.store.write(Delete("a", 2))
    assert await shelf.store.sweep() == 0
    await shelf.store.write(Delete("b", 3))
    assert await shelf.store.sweep() == 1


async def test_files_that_are_no_blobs_are_left_alone(file_shelf: Shelf) -> None:
    folder = Path(f"{file_shelf.path}-blobs")
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "notes.txt").write_bytes(b"the host's own")
    (folder / "README").write_bytes(b"the host's own")
    file_shelf.age(1000 * HOUR)

    assert await file_shelf.store.sweep() == 0
    assert (folder / "ab" / "notes.txt").exists()
    assert (folder / "README").exists()


async def test_what_killed_puts_left_goes_and_a_put_under_way_does_not(file_shelf: Shelf) -> None:
    """Not even without grace: a put under way is nobody's orphan."""
    folder = Path(f"{file_shelf.path}-blobs", "2c")
    folder.mkdir(parents=True)
    old, young = folder / ".dead.tmp", folder / ".alive.tmp"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))

    await file_shelf.store.sweep(grace=0)

    assert (old.exists(), young.exists()) == (False, True)


# ---------------------------------------------------------------------- references


@pytest.mark.parametrize("kind", ["accept", "append", "commit"])
async def test_a_reference_to_a_blob_swept_in_between_is_refused_and_nothing_is_written(
    shelf: Shelf, kind: str
) -> None:
    store = shelf.store
    await store.write(accept("a"))
    digest = await store.blobs.put(b"put, and swept before anybody refers to it")
    assert await store.sweep(grace=0) == 1
    scope, nodes = TurnScope("a", 1, 1, "w1", 1), (Node(1, b"see the blob"),)
    writes: dict[str, Write[Any]] = {
        "accept": accept("b", digest),
        "append": Append(scope, nodes, 2, blobs=(digest,)),
        "commit": Commit(scope, nodes, 0, 2, blobs=(digest,)),
    }

    with pytest.raises(BlobMissing, match="put it again"):
        await store.write(writes[kind])
    assert await store.session("b") is None
    assert [ordinal for _, ordinal, _ in await store.nodes(1, 1, 1)] == [0]

    await store.blobs.put(b"put, and swept before anybody refers to it")
    await store.write(writes[kind])
    assert await store.sweep(grace=0) == 0


class FailsOnce:
    """A real file whose next COMMIT fails, so that all of its transaction is rolled back."""

    def __init__(self, file: WriterFile) -> None:
        self._file = file
        self.fail = False

    def commit(self) -> None:
        if self.fail:
            self.fail = False
            raise OSError("COMMIT failed")
        self._file.commit()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def transact(file: Any, *writes: Write[Any]) -> list[Any]:
    """All of these in one transaction, as the writer's thread would."""
    writer = GroupWriter(file, "writer")
    answers: list[Any] = []
    for write in writes:
        writer.submit(write, lambda receipt, error: answers.append(error or receipt))
    writer.start()
    writer.stop()
    return answers


def sweep(*digests: str) -> Sweep:
    """The transaction that deletes these, whatever their age."""
    return Sweep(digests, before=2**62)


@pytest.fixture
def blobs(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path / "blobs")


@pytest.fixture
def file(tmp_path: Path, blobs: FileBlobs) -> Generator[Any, None, None]:
    file = FailsOnce(WriterFile(tmp_path / "agent.db", blobs))
    yield file
    file.close()


def test_a_rollback_that_brings_a_reference_back_finds_its_blob_there(file: Any, blobs: FileBlobs) -> None:
    """The deletion that orphaned the blob, and the sweep that took it, were in one transaction that failed."""
    digest = blobs.write(b"kept")
    transact(file, accept("a", digest))
    file.begin()
    file.apply(Delete("a", 2))
    assert file.apply(sweep(digest)) == 1
    file.rollback()

    assert blobs.read(digest) == b"kept"
    assert transact(file, sweep(digest)) == [0]


def test_a_failed_commit_with_a_deletion_and_a_sweep_is_done_over(file: Any, blobs: FileBlobs) -> None:
    digest = blobs.write(b"kept")
    transact(file, accept("a", digest), accept("b", digest))
    file.fail = True

    assert transact(file, Delete("a", 2), sweep(digest)) == [True, 0]
    assert blobs.read(digest) == b"kept"


def test_a_reference_later_in_the_sweeps_own_transaction_is_refused(file: Any, blobs: FileBlobs) -> None:
    digest = blobs.write(b"orphan")

    swept, refused = transact(file, sweep(digest), accept("a", digest))

    assert swept == 1
    assert isinstance(refused, BlobMissing)
    assert not blobs.has(digest)


def test_a_reference_earlier_in_the_sweeps_own_transaction_keeps_the_blob(file: Any, blobs: FileBlobs) -> None:
    digest = blobs.write(b"kept")

    accepted, swept = transact(file, accept("a", digest), sweep(digest))

    assert accepted.turn == 1
    assert swept == 0
    assert blobs.has(digest)


def test_a_blob_that_was_chosen_and_is_put_again_before_its_turn_comes_stays(file: Any, blobs: FileBlobs) -> None:
    digest = blobs.write(b"report")
    os.utime(blobs.path(digest), (1, 1))
    chosen = Sweep((digest,), before=2_000_000_000)
    blobs.write(b"report")

    assert transact(file, chosen) == [0]
    assert blobs.read(digest) == b"report"


def test_a_blob_that_is_put_again_while_its_sweep_commits_stays(file: Any, blobs: FileBlobs) -> None:
    digest = blobs.write(b"report")
    os.utime(blobs.path(digest), (1, 1))
    file.begin()
    assert file.apply(Sweep((digest,), before=2_000_000_000)) == 1
    blobs.write(b"report")
    file.commit()

    assert blobs.read(digest) == b"report"


# ---------------------------------------------------------------------- several at once


async def test_two_sweeps_at_once_take_every_orphan_once_and_nothing_else(shelf: Shelf) -> None:
    """More than one transaction takes, so that the two take turns."""
    count = SWEEP_AT_ONCE + 50
    other = shelf.another()
    await other.open()
    kept = [await shelf.store.blobs.put(b"kept %d" % n) for n in range(20)]
    await shelf.store.write(accept("a", *kept))
    for number in range(count):
        await shelf.store.blobs.put(b"orphan %d" % number)

    swept = await asyncio.gather(shelf.store.sweep(grace=0), other.sweep(grace=0))

    assert sum(swept) == count
    assert [await shelf.has(digest) for digest in kept] == [True] * 20
    assert (await shelf.store.facts()).blobs == 20
    await other.close()


@pytest.mark.slow
async def test_no_reference_dangles_while_two_stores_write_and_sweep(file_shelf: Shelf) -> None:
    """Without grace, to make it happen. Whoever is refused puts the blob again; every reference leads to a blob."""
    store, other = file_shelf.store, file_shelf.another()
    await other.open()
    await store.blobs.put(b"orphan")

    async def write_all() -> None:
        for number in range(150):
            data = b"blob %d" % (number % 5)
            while True:
                digest = await store.blobs.put(data)
                with contextlib.suppress(BlobMissing):
                    await store.write(accept(f"s{number}", digest))
                    break
            if number % 3 == 0:
                await store.write(Delete(f"s{number}", 2))

    writing = asyncio.ensure_future(write_all())
    swept = 0
    while not writing.done():
        swept += await other.sweep(grace=0)
    await writing

    assert swept > 0
    for number in range(5):
        assert await store.blobs.get(hashlib.sha256(b"blob %d" % number).hexdigest()) == b"blob %d" % number
    await other.close()
