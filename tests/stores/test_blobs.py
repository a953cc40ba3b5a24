"""Blobs as files: whole or not there, and checked when they are read."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.errors import BlobMissing, StoreDamaged, StoreUnavailable
from perdure.stores.blobs import FileBlobs

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


@pytest.fixture
def blobs(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path / "blobs")


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


@pytest.mark.slow
def test_many_writers_of_one_blob_leave_one_whole_file(blobs: FileBlobs) -> None:
    """Each from a process of its own."""
    code = "import sys, pathlib; from perdure.stores.blobs import FileBlobs; "
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
    code = "import sys, os, pathlib, itertools; from perdure.stores.blobs import FileBlobs; "
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


SYNCS = """
import os, pathlib, sys
from perdure.stores.blobs import FileBlobs

sync, folder = os.fsync, pathlib.Path(sys.argv[1])

def name(path):
    return "a temporary file" if path.endswith(".tmp") else os.path.relpath(path, folder.parent)

def told(descriptor):
    print("sync", name(os.readlink(f"/proc/self/fd/{descriptor}")))
    sync(descriptor)

def heard(event, args):
    if event == "os.rename":
        print("rename", name(str(args[0])), "to", name(str(args[1])))

os.fsync = told  # this process is ours alone
sys.addaudithook(heard)
for _ in range(2):
    FileBlobs(folder).write(b"hello")
    print("acknowledged")
"""


def test_a_blob_is_on_disk_before_its_name_is_and_its_name_before_anybody_hears_of_it(blobs: FileBlobs) -> None:
    """A row is synced that refers to it: after a power cut the blob must be there too, and whole. One that was there
    already may have been put an instant ago, by somebody who has not synced its name yet."""
    said = subprocess.run(
        [sys.executable, "-c", SYNCS, str(blobs.folder)], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()

    its_name = ["sync blobs/2c", "sync blobs", "sync .", "acknowledged"]
    assert said == [
        "sync a temporary file",
        f"rename a temporary file to blobs/2c/{HELLO[2:]}",
        *its_name,
        *its_name,
    ]


async def test_a_disk_that_takes_no_blob_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_bytes(b"a file where the folder should be")

    with pytest.raises(StoreUnavailable, match="cannot write a blob"):
        await FileBlobs(tmp_path / "blobs").put(b"hello")


def test_a_blob_that_does_not_fit_leaves_nothing_behind(blobs: FileBlobs) -> None:
    """In a process whose files may not grow beyond 100 kB."""
    code = "import sys, pathlib, resource, signal; from perdure.stores.blobs import FileBlobs; "
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)\n"
    code += "try: FileBlobs(pathlib.Path(sys.argv[1])).write(bytes(200_000))\n"
    code += "except Exception as error: print(type(error).__name__, error)"
    said = subprocess.run(
        [sys.executable, "-c", code, str(blobs.folder)], capture_output=True, text=True, check=True, timeout=60
    ).stdout

    assert said.startswith("StoreUnavailable cannot write a blob")
    assert os.strerror(errno.EFBIG) in said
    assert list(blobs.folder.glob("*/*")) == []


# ---------------------------------------------------------------------- a file that is a blob too


async def test_file_that_is_shared_with_its_blob_takes_no_room_of_its_own(tmp_path: Path) -> None:
    blobs, file = FileBlobs(tmp_path / "blobs"), tmp_path / "output"
    file.write_bytes(b"hello")
    digest, _ = await blobs.put_file(str(file))

    assert await blobs.share(digest, str(file))
    assert await blobs.share(digest, str(file)), "it may be done again"

    assert os.path.samefile(file, blobs.path(digest))
    file.unlink()
    assert await blobs.get(digest) == b"hello"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["blobs"]


async def test_file_whose_blob_is_gone_stays_as_it_is(tmp_path: Path) -> None:
    blobs, file = FileBlobs(tmp_path / "blobs"), tmp_path / "output"
    file.write_bytes(b"hello")

    assert not await blobs.share("0" * 64, str(file))

    assert file.read_bytes() == b"hello"
