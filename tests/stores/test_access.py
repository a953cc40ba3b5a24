"""Who may use the files of a store: their owner alone, unless the owner has said otherwise of the database."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from perdure.stores.sqlite import SqliteStore
from perdure.tracing.jsonl import JsonlSink
from tests.stores.child import turn
from tests.stores.test_sqlite_file import ROOT, child, lines, needs_root, opened

BLOB = "5570a3cf02207f1d352d2cfea385be4bc0b2b9414f606baa6f55db60b232f221"  # of b"a blob"
FILES = (
    *("agent.db", "agent.db-lock", "agent.db-shm", "agent.db-wal", "agent.db-workers/w1"),
    f"agent.db-blobs/{BLOB[:2]}/{BLOB[2:]}",
)
FOLDERS = ("agent.db-blobs", f"agent.db-blobs/{BLOB[:2]}", "agent.db-workers")


def modes(folder: Path) -> dict[str, int]:
    """Of everything in it, at any depth."""
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


async def used(store: SqliteStore) -> dict[str, int]:
    """The modes of a store that has every file that a store can have."""
    await turn(store, "s", b"said", 1)
    lease = store.lease("w1")
    await lease.hold()
    await store.blobs.put(b"a blob")
    found = modes(store.path.parent)
    await lease.drop()
    # The folder that a blob was written in before it had its name: of any name, and as private as the others.
    spare = [name for name in found if name.startswith("agent.db-blobs/") and f"/{BLOB[:2]}" not in name]
    assert {found.pop(name) for name in spare} <= {found["agent.db-blobs"]}
    return found


@pytest.fixture(params=[0o022, 0o000, 0o077, 0o177], ids="umask {:03o}".format)
def umask(request: pytest.FixtureRequest) -> Generator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


async def test_a_new_store_is_its_owners_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    async with opened(tmp_path / "new" / "deeper" / "agent.db") as store:
        found = await used(store)

    assert found == dict.fromkeys(FILES, 0o600) | dict.fromkeys(FOLDERS, 0o700)
    assert modes(tmp_path)["new"] == modes(tmp_path)["new/deeper"] == 0o700


@pytest.mark.parametrize(
    ("mode", "folders"), [(0o600, 0o700), (0o640, 0o750), (0o660, 0o770), (0o644, 0o755)], ids="{:o}".format
)
async def test_what_is_added_to_a_store_has_the_access_of_its_database(
    tmp_path: Path, umask: int, mode: int, folders: int
) -> None:
    async with opened(tmp_path / "agent.db"):
        pass
    (tmp_path / "agent.db").chmod(mode)
    (tmp_path / "agent.db-lock").unlink()

    async with opened(tmp_path / "agent.db") as store:
        found = await used(store)

    assert found == dict.fromkeys(FILES, mode) | dict.fromkeys(FOLDERS, folders)


def test_a_trace_is_its_owners_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    sink = JsonlSink(tmp_path / "traces" / "deeper" / "trace.jsonl")
    sink.write("said", {"secret": "a word"})
    sink.close()

    assert modes(tmp_path) == {"traces": 0o700, "traces/deeper": 0o700, "traces/deeper/trace.jsonl": 0o600}


FIRST = """
import asyncio, os, pathlib, signal, sqlite3, sys
from perdure.stores.sqlite import SqliteStore

connect, folder, seen = sqlite3.connect, pathlib.Path(sys.argv[1]), []

def watched(*args, **options):
    connection = connect(*args, **options)
    connection.set_trace_callback(executed)
    return connection

def executed(text):
    seen.append(text)
    if len(seen) == number:
        os.kill(os.getpid(), signal.SIGKILL)

async def first():
    store = SqliteStore(folder / str(number) / "agent.db")
    await store.open()
    await store.blobs.put(b"a blob")
    await store.close()

os.umask(0)
sqlite3.connect = watched  # this process is ours alone
number, killed = 0, True
while killed:
    number += 1
    child = os.fork()
    if child == 0:
        asyncio.run(first())
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(number - 1)
"""


@pytest.mark.kill
def test_a_first_opening_killed_at_any_statement_leaves_nothing_that_others_may_read(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIRST, str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout

    assert int(said) > 30
    loose = {name: oct(mode) for name, mode in modes(tmp_path).items() if mode & 0o077}
    assert loose == {}


# ---------------------------------------------------------------------- other users


@pytest.fixture
def open_folder(tmp_path: Path) -> Generator[Path]:
    """A folder that every user can reach. The test's own temporary folders are private."""
    folder = Path("/var/tmp" if os.access("/var/tmp", os.W_OK) else "/tmp") / f"access-{os.getpid()}-{id(tmp_path)}"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@needs_root
async def test_other_users_cannot_read_a_store_or_hold_its_lock(open_folder: Path) -> None:
    path = open_folder / "agent.db"
    async with opened(path) as store:
        await used(store)
        said = lines(child("reaches_as_nobody", open_folder))

        assert await turn(store, "s", b"more", 2) == 2
    assert said == ["PermissionError"] * 4


@pytest.mark.slow
@needs_root
async def test_what_root_adds_to_the_store_of_a_user_is_that_users(open_folder: Path) -> None:
    path = open_folder / "agent.db"
    assert lines(child("as_nobody", path)) == ["wrote"]

    async with opened(path) as store:  # as `sudo perdure sessions` does
        await used(store)

    assert {file.lstat().st_uid for file in open_folder.rglob("*")} == {65534}
    assert lines(child("as_nobody", path)) == ["wrote"]
