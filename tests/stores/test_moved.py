"""A default store from before the project was renamed is never ignored, and never moved by a Runtime."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure import Agent, Runtime
from perdure.errors import StoreMoved
from perdure.testing import FunctionModel


def echo() -> Agent[str]:
    return Agent(FunctionModel(lambda request: f"re: {request.messages[-1].text}"), name="echo")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a store in `.mainstay/`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def old_store() -> None:
    async with Runtime(".mainstay/runtime.db", agents=[echo()]) as runtime:
        assert (await (await runtime.session("chat")).run("hello")).text == "re: hello"


@pytest.fixture
def locked(here: Path) -> Iterator[None]:
    """Locks as a living worker and a running command hold them."""
    held = []
    for name in ("runtime.db-workers/w-1", "runtime.db-workers/w-dead", "runtime.db-jobs/job-1/lock"):
        path = here / ".mainstay" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        held.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if "dead" not in name:
            fcntl.flock(held[-1], fcntl.LOCK_EX)
    yield
    for descriptor in held:
        os.close(descriptor)


async def test_default_store_is_refused_while_the_old_one_is_there(here: Path) -> None:
    await old_store()
    before = sorted(here.rglob("*"))

    with pytest.raises(StoreMoved) as refused:
        async with Runtime(agents=[echo()]):
            pytest.fail("an empty store was begun")

    assert str(refused.value) == (
        "there is no store at .perdure/runtime.db, but .mainstay has one from before the project was renamed to "
        "Perdure; nothing uses it: run `mv .mainstay .perdure`"
    )
    assert sorted(here.rglob("*")) == before


async def test_after_the_move_the_store_goes_on(here: Path) -> None:
    await old_store()
    with pytest.raises(StoreMoved) as refused:
        async with Runtime(agents=[echo()]):
            pass

    subprocess.run(shlex.split(refused.value.move), check=True)

    async with Runtime(agents=[echo()]) as runtime:
        session = await runtime.session("chat")
        assert [message.text for message in await session.history()] == ["hello", "re: hello"]
        assert (await session.run("again")).text == "re: again"


async def test_an_empty_new_folder_does_not_hide_the_old_store(here: Path) -> None:
    """A sandbox makes the folder to mount over it."""
    await old_store()
    (here / ".perdure").mkdir()
    with pytest.raises(StoreMoved) as refused:
        async with Runtime(agents=[echo()]):
            pass

    subprocess.run(shlex.split(refused.value.move), check=True)

    async with Runtime(agents=[echo()]) as runtime:
        assert len(await (await runtime.session("chat")).history()) == 2


async def test_an_empty_old_folder_is_no_store(here: Path) -> None:
    (here / ".mainstay").mkdir()

    async with Runtime(agents=[echo()]) as runtime:
        assert (await (await runtime.session("chat")).run("hello")).text == "re: hello"

    assert (here / ".perdure" / "runtime.db").exists()


async def test_a_new_store_is_opened_beside_the_old_one(here: Path) -> None:
    await old_store()
    async with Runtime(here / "other" / "runtime.db", agents=[echo()]):
        pass
    (here / "other").rename(here / ".perdure")

    async with Runtime(agents=[echo()]) as runtime:
        assert await (await runtime.session("chat")).history() == []


@pytest.mark.usefixtures("locked")
async def test_running_workers_and_commands_are_named(here: Path) -> None:
    with pytest.raises(StoreMoved) as refused:
        async with Runtime():
            pass

    assert (refused.value.workers, refused.value.commands) == (("w-1",), ("job-1",))
    assert "workers (w-1) and commands (job-1) still use it: stop them, then run" in str(refused.value)


async def test_a_path_with_a_space_is_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    (folder / ".mainstay").mkdir(parents=True)
    (folder / ".mainstay" / "runtime.db").write_bytes(b"")

    with pytest.raises(StoreMoved, match=r"mv '.*/a b/\.mainstay' '.*/a b/\.perdure'"):
        async with Runtime(folder / ".perdure" / "runtime.db"):
            pass


async def test_the_command_line_says_it_too(here: Path) -> None:
    await old_store()

    ended = subprocess.run([sys.executable, "-m", "perdure", "sessions"], capture_output=True, text=True, cwd=here)

    assert ended.returncode != 0
    assert "run `mv .mainstay .perdure`" in ended.stderr
    assert "Traceback" not in ended.stderr
