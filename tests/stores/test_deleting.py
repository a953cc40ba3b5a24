"""A store whose file was removed is reported as that, and `maintenance.delete` removes a store with all its parts."""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
from pathlib import Path

import pytest

from perdure import Agent, Image, Runtime
from perdure.errors import InvalidInput, NotAStore, StoreEmptied, StoreInUse
from perdure.stores.sqlite.maintenance import delete, parts_of
from perdure.testing import ScriptedModel
from tests.kit import texts


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    """A store with blobs and a job folder, and a file beside it that is not its own."""
    path = tmp_path / "store" / "agent.db"
    async with Runtime(path, agents=[Agent(ScriptedModel(["seen"]))]) as runtime:
        picture = Image.from_bytes(b"\x89PNG" + b"x" * 100_000, "image/png")
        await (await runtime.session("chat")).run(["look", picture])
    (path.parent / "agent.db-jobs" / "job-1").mkdir(parents=True)
    (path.parent / "agent.db-jobs" / "job-1" / "lock").write_text("p-1")
    (path.parent / "agent.db-notes").write_text("mine")
    return path


async def hello(path: Path) -> list[str]:
    async with Runtime(path, agents=[Agent(ScriptedModel(["hi"]))]) as runtime:
        await (await runtime.session("chat")).run("hello")
        return texts(await (await runtime.session("chat")).history())


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# ---------------------------------------------------------------------- a file that was removed


@pytest.mark.parametrize("how", ["removed", "emptied", "new", "new, with the old WAL"])
async def test_store_whose_file_was_removed_is_reported_with_the_command_that_begins_anew(
    store: Path, tmp_path: Path, how: str
) -> None:
    store.unlink()
    if how == "emptied":
        store.touch()
    elif how.startswith("new"):  # as an earlier version left it
        async with Runtime(tmp_path / "fresh.db", recover=False):
            pass
        with contextlib.closing(sqlite3.connect(tmp_path / "fresh.db")) as fresh:
            fresh.execute("UPDATE tip SET count = 0")
            fresh.execute("DELETE FROM workers")
            fresh.commit()
        (tmp_path / "fresh.db").rename(store)
        if "WAL" in how:
            store.with_name("agent.db-wal").write_bytes(b"old")
    before = store.exists()

    with pytest.raises(StoreEmptied) as refused:
        await hello(store)

    assert str(refused.value) == (
        f"{store} is missing or empty, but {store}-lock notes that acknowledged transactions are missing from it, so "
        "the database was deleted or replaced, or its -wal was removed: to begin anew, delete what is left of the old "
        f"store with `perdure delete-store {store} --yes`; otherwise put the database back, together with its -wal, or "
        "restore a backup"
    )
    assert store.exists() == before
    delete(store)
    assert await hello(store) == ["hello", "hi"]


async def test_store_that_was_never_written_to_may_be_removed_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    path.with_name("agent.db-lock").touch()

    assert await hello(path) == ["hello", "hi"]


# ---------------------------------------------------------------------- deleting one


async def test_deleted_store_is_gone_with_all_its_parts_and_nothing_else(store: Path) -> None:
    deleted = delete(store)

    assert [each.name for each in deleted] == [
        "agent.db",
        "agent.db-blobs",
        "agent.db-jobs",
        "agent.db-workers",
        "agent.db-lock",
    ]
    assert names(store.parent) == ["agent.db-notes"]
    with pytest.raises(InvalidInput, match="there is no store"):
        delete(store)
    assert await hello(store) == ["hello", "hi"]


@pytest.mark.parametrize("damage", ["header", "tables"])
async def test_damaged_store_can_be_deleted(store: Path, damage: str) -> None:
    data = bytearray(store.read_bytes())
    data[0 if damage == "header" else 100 : 2000] = b"\xff" * len(data[0 if damage == "header" else 100 : 2000])
    store.write_bytes(data)

    delete(store)

    assert names(store.parent) == ["agent.db-notes"]


@pytest.mark.parametrize("lock", ["agent.db-workers/w-1", "agent.db-jobs/job-1/lock", "agent.db-lock"])
async def test_store_is_not_deleted_while_a_lock_of_it_is_held(store: Path, lock: str) -> None:
    path = store.parent / lock
    path.parent.mkdir(exist_ok=True)
    before = parts_of(store)
    with path.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreInUse) as refused:
            delete(store)

    assert (refused.value.workers, refused.value.commands) == (
        ("w-1",) if "workers" in lock else (),
        ("p-1",) if "jobs" in lock else (),
    )
    assert parts_of(store) == before


async def test_store_that_a_connection_reads_is_not_deleted(store: Path) -> None:
    with contextlib.closing(sqlite3.connect(store)) as reader:
        reader.execute("SELECT count(*) FROM nodes").fetchall()
        with pytest.raises(StoreInUse, match="another process has"):
            delete(store)

    assert store.exists()


@pytest.mark.parametrize("part", ["", "-wal", "-lock", "-blobs", "-jobs", "-workers"])
async def test_link_in_the_place_of_a_part_is_refused_before_anything_is_deleted(
    store: Path, tmp_path: Path, part: str
) -> None:
    place, elsewhere = Path(f"{store}{part}"), tmp_path / "elsewhere"
    if place.exists():
        place.rename(elsewhere)
    else:
        elsewhere.mkdir()
    place.symlink_to(elsewhere)
    before = names(store.parent)

    with pytest.raises(InvalidInput, match="links are not followed: nothing was deleted"):
        delete(store)

    assert names(store.parent) == before
    assert elsewhere.exists()


async def test_links_inside_of_a_folder_are_removed_and_not_followed(store: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    for folder in ("agent.db-jobs", "agent.db-blobs"):
        (store.parent / folder / "away").symlink_to(kept)
    delete(store)

    assert names(store.parent) == ["agent.db-notes"]
    assert (kept / "file").read_text() == "mine"


@pytest.mark.parametrize("lock", [False, True])
def test_file_of_another_program_is_not_deleted(tmp_path: Path, lock: bool) -> None:
    notes, database = tmp_path / "notes.txt", tmp_path / "other.db"
    notes.write_bytes(b"Dear diary, " * 200)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    for path in (notes, database):
        if lock:  # as an attempt to open it leaves it
            Path(f"{path}-lock").touch()
        with pytest.raises(NotAStore):
            delete(path)

    assert notes.exists()
    assert database.exists()
