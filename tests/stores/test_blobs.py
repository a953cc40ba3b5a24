"""Blobs: whole or not there, checked when read, and never swept from under a reference."""

import asyncio
import contextlib
import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mainstay.errors import BlobMissing, StoreDamaged, StoreUnavailable
from mainstay.model.session import Node
from mainstay.model.write import Accept, Append, Commit, Delete, Scope, Write
from mainstay.stores.blobs import FileBlobs
from mainstay.stores.sqlite import SqliteStore, Sweep, WriterFile
from mainstay.stores.writer import GroupWriter
from tests.stores.places import InMemory

ROOT = Path(__file__).parents[2]
HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


@pytest.fixture
def blobs(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path / "blobs")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "agent.db")
    await store.open()
    yield store
    await store.close()


async def test_a_blob_is_named_by_its_content_and_may_be_put_again(blobs: FileBlobs) -> None:
    assert await blobs.put(b"hello") == HELLO
    assert await blobs.put(b"hello") == HELLO
    assert await blobs.get(HELLO) == b"hello"
    assert list(blobs.all()) == [HELLO]


@pytest.mark.parametrize("data", [b"", b"\0", bytes(3_000_000)], ids=["empty", "a byte", "megabytes"])
async def test_any_bytes_are_kept(blobs: FileBlobs, data: bytes) -> None:
    assert await blobs.get(await blobs.put(data)) == data


@pytest.mark.parametrize(
    "digest",
    ["", "..", "../../etc/passwd", "../" * 21 + "x", "/" * 64, HELLO.upper(), HELLO[:-1], HELLO + "0", "é" * 64],
)
async def test_a_name_that_is_no_digest_reaches_no_file(blobs: FileBlobs, digest: str) -> None:
    await blobs.put(b"hello")

    with pytest.raises(BlobMissing):
        await blobs.get(digest)
    with pytest.raises(BlobMissing):
        blobs.has(digest)


@pytest.mark.parametrize("content", [b"hellx", b"hell", b""], ids=["flipped", "cut", "emptied"])
async def test_content_is_checked_when_it_is_read(blobs: FileBlobs, content: bytes) -> None:
    await blobs.put(b"hello")
    blobs.path(HELLO).write_bytes(content)

    with pytest.raises(StoreDamaged, match="does not match its name"):
        await blobs.get(HELLO)


def test_many_writers_of_one_blob_leave_one_whole_file(blobs: FileBlobs) -> None:
    """Each from a process of its own."""
    code = "import sys, pathlib; from mainstay.stores.blobs import FileBlobs; "
    code += "b = FileBlobs(pathlib.Path(sys.argv[1])); [print(b.write(bytes([n]) * 300_000)) for n in range(20)]"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(blobs.folder)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=60)[0].split() for process in processes]

    expected = [hashlib.sha256(bytes([n]) * 300_000).hexdigest() for n in range(20)]
    assert said == [expected] * 3
    assert [blobs.read(digest) for digest in expected] == [bytes([n]) * 300_000 for n in range(20)]
    assert sorted(p.name for p in blobs.folder.glob("*/.*")) == []


@pytest.mark.kill
def test_a_writer_killed_at_any_moment_leaves_whole_blobs_only(blobs: FileBlobs) -> None:
    code = "import sys, os, pathlib, itertools; from mainstay.stores.blobs import FileBlobs; "
    code += "b = FileBlobs(pathlib.Path(sys.argv[1]))\n"
    code += "for n in itertools.count(): os.write(1, (b.write(b'%d ' % n * 100_000) + '\\n').encode())"
    process = subprocess.Popen([sys.executable, "-c", code, str(blobs.folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().strip() for _ in range(10)]
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=60)

    found = set(blobs.all())
    assert found >= {*acknowledged, *rest.split()}
    for digest in found:
        blobs.read(digest)


async def test_a_disk_that_takes_no_blob_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_bytes(b"a file where the folder should be")

    with pytest.raises(StoreUnavailable, match="cannot write a blob"):
        await FileBlobs(tmp_path / "blobs").put(b"hello")


def test_a_blob_that_does_not_fit_leaves_nothing_behind(blobs: FileBlobs) -> None:
    """In a process whose files may not grow beyond 100 kB."""
    code = "import sys, pathlib, resource, signal; from mainstay.stores.blobs import FileBlobs; "
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)\n"
    code += "try: FileBlobs(pathlib.Path(sys.argv[1])).write(bytes(200_000))\n"
    code += "except Exception as error: print(type(error).__name__, error)"
    said = subprocess.run(
        [sys.executable, "-c", code, str(blobs.folder)], capture_output=True, text=True, check=True, timeout=60
    ).stdout

    assert said.startswith("StoreUnavailable cannot write a blob")
    assert os.strerror(errno.EFBIG) in said
    assert list(blobs.folder.glob("*/*")) == []


# ---------------------------------------------------------------------- references and the sweep


def accept(session_id: str, *digests: str) -> Accept:
    return Accept(session_id, "clerk", b"see the blob", f"op-{session_id}", 1, worker="w1", blobs=digests)


async def test_the_sweep_takes_what_nothing_refers_to(store: SqliteStore) -> None:
    kept, orphan = await store.blobs.put(b"kept"), await store.blobs.put(b"orphan")
    await store.write(accept("a", kept))

    assert await store.sweep() == 1
    assert await store.blobs.get(kept) == b"kept"
    with pytest.raises(BlobMissing):
        await store.blobs.get(orphan)


async def test_a_blob_goes_with_the_last_session_that_refers_to_it(store: SqliteStore) -> None:
    digest = await store.blobs.put(b"shared")
    await store.write(accept("a", digest))
    await store.write(accept("b", digest))

    await store.write(Delete("a", 2))
    assert await store.sweep() == 0
    await store.write(Delete("b", 3))
    assert await store.sweep() == 1


async def test_files_that_are_no_blobs_are_left_alone(store: SqliteStore) -> None:
    shelf = store.blobs.folder / "ab"
    shelf.mkdir(parents=True)
    (shelf / ".half-written.tmp").write_bytes(b"somebody writes this just now")
    (store.blobs.folder / "README").write_bytes(b"the host's own")

    assert await store.sweep() == 0
    assert (shelf / ".half-written.tmp").exists()
    assert (store.blobs.folder / "README").exists()


@pytest.mark.parametrize("kind", ["accept", "append", "commit"])
@pytest.mark.parametrize("place", ["memory", "sqlite"])
async def test_a_reference_to_a_blob_swept_in_between_is_refused_and_nothing_is_written(
    store: SqliteStore, kind: str, place: str
) -> None:
    where: Any = store if place == "sqlite" else InMemory().store()
    await where.write(accept("a"))
    digest = await where.blobs.put(b"put, and swept before anybody refers to it")
    assert await where.sweep() == 1
    scope, nodes = Scope("a", 1, 1, "w1", 1), (Node(1, b"see the blob"),)
    writes: dict[str, Write[Any]] = {
        "accept": accept("b", digest),
        "append": Append(scope, nodes, 2, blobs=(digest,)),
        "commit": Commit(scope, nodes, 0, 2, blobs=(digest,)),
    }

    with pytest.raises(BlobMissing, match="put it again"):
        await where.write(writes[kind])
    assert await where.session("b") is None
    assert [ordinal for _, ordinal, _ in await where.nodes(1, 1, 1)] == [0]

    await where.blobs.put(b"put, and swept before anybody refers to it")
    await where.write(writes[kind])
    assert await where.sweep() == 0


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


@pytest.fixture
def file(tmp_path: Path, blobs: FileBlobs) -> Any:
    file = FailsOnce(WriterFile(tmp_path / "agent.db", blobs))
    yield file
    file.close()


def test_a_rollback_that_brings_a_reference_back_finds_its_blob_there(file: Any, blobs: FileBlobs) -> None:
    """The deletion that orphaned the blob, and the sweep that took it, were in one transaction that failed."""
    digest = blobs.write(b"kept")
    transact(file, accept("a", digest))
    file.begin()
    file.apply(Delete("a", 2))
    file.apply(Sweep())
    file.rollback()

    assert blobs.read(digest) == b"kept"
    assert transact(file, Sweep()) == [0]


def test_a_failed_commit_with_a_deletion_and_a_sweep_is_done_over(file: Any, blobs: FileBlobs) -> None:
    digest = blobs.write(b"kept")
    transact(file, accept("a", digest), accept("b", digest))
    file.fail = True

    assert transact(file, Delete("a", 2), Sweep()) == [True, 0]
    assert blobs.read(digest) == b"kept"


def test_a_reference_later_in_the_sweeps_own_transaction_is_refused(file: Any, blobs: FileBlobs) -> None:
    digest = blobs.write(b"orphan")

    swept, refused = transact(file, Sweep(), accept("a", digest))

    assert swept == 1
    assert isinstance(refused, BlobMissing)
    assert not blobs.has(digest)


def test_a_reference_earlier_in_the_sweeps_own_transaction_keeps_the_blob(file: Any, blobs: FileBlobs) -> None:
    digest = blobs.write(b"kept")

    accepted, swept = transact(file, accept("a", digest), Sweep())

    assert accepted.turn == 1
    assert swept == 0
    assert blobs.has(digest)


@pytest.mark.slow
async def test_no_reference_dangles_while_two_stores_write_and_sweep(tmp_path: Path, store: SqliteStore) -> None:
    """Whoever is refused puts the blob again; in the end every reference leads to a whole blob."""
    other = SqliteStore(tmp_path / "agent.db")
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
        swept += await other.sweep()
    await writing

    assert swept > 0
    for number in range(5):
        assert await store.blobs.get(hashlib.sha256(b"blob %d" % number).hexdigest()) == b"blob %d" % number
    await other.close()


async def test_a_sweep_clears_what_killed_puts_left_and_no_put_under_way(tmp_path: Path, store: SqliteStore) -> None:
    shelf = store.blobs.folder / "2c"
    shelf.mkdir(parents=True)
    old, young = shelf / ".dead.tmp", shelf / ".alive.tmp"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))

    await store.sweep()

    assert (old.exists(), young.exists()) == (False, True)
