"""What a user writes for a store, and what it leads to."""

import asyncio
import os
from pathlib import Path

import pytest

from perdure import Agent, Runtime
from perdure.errors import InvalidDefinition, StoreUnavailable
from perdure.stores import open_store
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.locks import LockFile
from perdure.tracing.jsonl import JsonlSink
from tests.cli.shell import shell


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("where", ["~/deep/x.db", Path("~/deep/x.db"), "sqlite:///~/deep/x.db"], ids=repr)
def test_a_tilde_is_the_home_folder(home: Path, where: str | Path) -> None:
    async def say() -> None:
        async with Runtime(where, agents=[Agent("scripted")]) as runtime:
            await (await runtime.session("s")).run("hello")

    asyncio.run(say())

    assert (home / "deep" / "x.db").exists()
    assert [file.name for file in home.parent.iterdir()] == ["home"]
    listed = shell("sessions", "--store", str(where))
    assert (listed.exit_code, "s" in listed.stdout) == (0, True)


async def test_a_backup_to_a_tilde_goes_home(home: Path) -> None:
    async with Runtime("~/x.db") as runtime:
        await runtime.backup("~/copy.db")

    assert (home / "copy.db").exists()


def test_a_trace_may_begin_with_a_tilde(home: Path) -> None:
    sink = JsonlSink("~/trace.jsonl")
    sink.write("said", {})
    sink.close()

    assert (home / "trace.jsonl").exists()


@pytest.mark.parametrize("where", ["~nobody-is-called-so/x.db", "~nobody-is-called-so"])
def test_the_home_of_a_user_who_is_not_there_is_refused(home: Path, where: str) -> None:
    with pytest.raises(InvalidDefinition, match=rf"there is no such user; \./{where} is a file of that name"):
        open_store(where)

    assert shell("sessions", "--store", where).exit_code == 2
    store = open_store(f"./{where}")
    assert isinstance(store, SqliteStore)
    assert store.path == home.parent / where


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="Linux has such descriptors")
def test_a_lock_that_fails_is_a_typed_error(tmp_path: Path) -> None:
    """As on a file system that has none; here because the descriptor was replaced by one that is good for nothing."""
    lock = LockFile(tmp_path / "lock")
    useless = os.open(tmp_path / "lock", os.O_PATH)
    os.dup2(useless, lock._descriptor)
    os.close(useless)

    with pytest.raises(StoreUnavailable, match=r"cannot lock .*: Bad file descriptor"):
        lock.hold()
    with pytest.raises(StoreUnavailable, match="cannot read"):
        lock.noted()
    lock.free()
    lock.close()
