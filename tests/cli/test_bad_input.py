"""Wrong ids, wrong paths and files that are no stores: one line or one JSON object, a code, never a traceback."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure import Agent, Runtime
from tests.cli.shell import shell


def a_folder(path: Path) -> Path:
    path.mkdir()
    return path


def an_empty_file(path: Path) -> Path:
    path.touch()
    return path


def a_text(path: Path) -> Path:
    path.write_text("once upon a time, " * 300)
    return path


def another_program(path: Path) -> Path:
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE accounts (id)")
    file.close()
    return path


def another_program_with_versions(path: Path) -> Path:
    """Its version is one of ours too: nothing of it may be brought to our schema."""
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE nodes (id)")
        file.execute("PRAGMA user_version = 1")
    file.close()
    return path


def in_a_file(path: Path) -> Path:
    path.touch()
    return path / "agent.db"


def too_long(path: Path) -> Path:
    return path / ("x" * 5000)


NO_STORES: list[Callable[[Path], Path]] = [
    a_folder,
    a_text,
    another_program,
    another_program_with_versions,
    in_a_file,
    too_long,
]

LOOKING: list[tuple[str, ...]] = [
    ("sessions",),
    ("show", "s"),
    ("pending",),
    ("ps",),
    ("logs", "p"),
    ("doctor",),
    ("send", "s", "hello"),
    ("cancel", "s"),
    ("delete", "s", "--yes"),
    ("fork", "s"),
    ("signal", "p", "go"),
]


@pytest.mark.parametrize("verb", LOOKING, ids=lambda verb: verb[0])
@pytest.mark.parametrize("make", NO_STORES)
def test_what_is_no_store_is_refused_in_one_line_and_left_as_it_was(
    tmp_path: Path, make: Callable[[Path], Path], verb: tuple[str, ...]
) -> None:
    store = make(tmp_path / "agent.db")
    before = store.read_bytes() if make is not too_long and store.is_file() else b""

    said = shell(*verb, store=store)
    told = shell(*verb, "--json", store=store)

    assert said.exit_code in (1, 2)
    assert said.stderr.startswith("perdure: ")
    assert told.exit_code == said.exit_code
    assert json.loads(told.stdout)
    assert (store.read_bytes() if before else b"") == before


WRONG_IDS = ["", " ", "nope", "s.99", "s.x.y.z", "caf\udce9", "x" * 5000, "{", '{"__handle__": "process"}', "../.."]

ABOUT: list[tuple[str, ...]] = [
    ("show", "ID"),
    ("logs", "ID"),
    ("approve", "ID"),
    ("reject", "ID"),
    ("settle", "ID", "done"),
    ("signal", "ID", "go"),
    ("cancel", "ID"),
    ("fork", "ID"),
    ("fork", "s", "--at", "ID"),
    ("delete", "ID", "--yes"),
    ("send", "ID", "hello"),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    asyncio.run(_greet(tmp_path / "agent.db"))
    return tmp_path / "agent.db"


async def _greet(path: Path) -> None:
    async with Runtime(path, agents=[Agent("scripted")]) as runtime:
        await (await runtime.session("s")).run("hello")


@pytest.mark.parametrize("verb", ABOUT, ids=lambda verb: " ".join(verb))
def test_an_id_of_nothing_is_refused_as_a_mistake_of_the_caller(store: Path, verb: tuple[str, ...]) -> None:
    for wrong in WRONG_IDS:
        words = [wrong if word == "ID" else word for word in verb]
        said, told = shell(*words, store=store), shell(*words, "--json", store=store)

        assert (wrong, said.exit_code, told.exit_code) == (wrong, 2, 2)
        assert said.stderr.startswith("perdure: ")
        assert len(said.stderr) < 6000
        assert json.loads(told.stdout)["error"]["message"]
    assert [session["id"] for session in json.loads(shell("sessions", "--json", store=store).stdout)] == ["s"]


def test_bytes_that_are_no_text_find_no_session(store: Path) -> None:
    assert shell("sessions", "--prefix", "caf\udce9", store=store).exit_code == 2
    assert shell("sessions", "--agent", "caf\udce9", store=store).exit_code == 2
