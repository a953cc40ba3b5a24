"""`perdure backup`, `perdure restore`, and what doctor says of a copy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perdure import Agent, Runtime
from tests.cli.shell import process, shell, shell_json


@pytest.fixture
def store(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with Runtime(tmp_path / "agent.db", agents=[Agent("scripted")]) as runtime:
            await (await runtime.session("chat")).run("x" * 100_000)

    asyncio.run(fill())
    return tmp_path / "agent.db"


def test_a_copy_is_made_named_by_doctor_and_restored(store: Path) -> None:
    copy = store.with_name("copy.db")

    made = shell("backup", store, copy)
    assert made.exit_code == 0
    assert made.stdout.startswith(f"copied {store} to {copy} (")

    looked = shell_json("doctor", store=copy)
    (need,) = looked["needs"]
    assert need["about"] == "store"
    assert f"perdure restore {copy}" in need["problem"]
    assert shell("sessions", store=copy).exit_code == 0

    assert shell("restore", copy).stdout.startswith(f"restored {copy}: its id is ")
    assert shell("doctor", "--deep", store=copy).exit_code == 0
    assert shell("doctor", "--deep", store=store).exit_code == 0


def test_nothing_is_overwritten_and_nothing_restored_that_is_not_there(store: Path) -> None:
    refused = shell("backup", store, store)
    missing = shell("restore", store.with_name("nothing.db"))
    unknown = shell("backup", store.with_name("nothing.db"), store.with_name("copy.db"))

    assert (refused.exit_code, missing.exit_code, unknown.exit_code) == (2, 2, 2)
    assert "exists already" in refused.stderr
    assert "there is no store" in missing.stderr
    assert not store.with_name("copy.db").exists()


def test_a_run_in_a_copy_says_what_to_do_and_does_not_hang(store: Path) -> None:
    copy = store.with_name("copy.db")
    shell("backup", store, copy)

    ran = process("run", "sample_agents:helper", "and?", "--session", "another", store=copy)

    assert ran.returncode == 7, "queued"
    assert "perdure restore" in ran.stderr


def test_a_store_is_compacted(store: Path) -> None:
    told = shell("compact", store)

    assert told.exit_code == 0
    assert told.stdout.startswith(f"compacted {store}: ")
    assert shell("compact", store.with_name("nothing.db")).exit_code == 2


def test_what_was_not_used_for_long_is_pruned_when_that_is_confirmed(store: Path) -> None:
    asked = shell("prune", "--older-than", "0s", store=store)
    young = shell("prune", "--older-than", "1d", "--yes", store=store)
    gone = shell("prune", "--older-than", "0s", "--yes", store=store)

    assert (asked.exit_code, young.exit_code, gone.exit_code) == (2, 0, 0)
    assert "say --yes" in asked.stderr
    assert young.stdout == "forgot 0 sessions and 0 processes\n"
    assert gone.stdout == "forgot 1 session and 0 processes\n"


def test_store_is_deleted_when_that_is_confirmed(store: Path) -> None:
    store.with_name("agent.db.notes").touch()
    asked = shell("delete-store", store)
    there = store.exists()
    deleted = shell_json("delete-store", store, "--yes")
    again = shell("delete-store", store, "--yes")
    names = [str(store), f"{store}-blobs", f"{store}-workers", f"{store}-lock"]

    assert (asked.exit_code, there) == (2, True)
    assert f"this would delete {', '.join(names)};" in asked.stderr
    assert "say --yes" in asked.stderr
    assert deleted == {"store": str(store), "deleted": names}
    assert [each.name for each in store.parent.iterdir()] == ["agent.db.notes"]
    assert (again.exit_code, again.stderr) == (2, f"perdure: there is no store at {store}\n")


def test_removed_store_is_named_with_the_command_that_begins_anew(store: Path) -> None:
    store.unlink()
    refused = shell("run", "sample_agents:helper", "hello", store=store)
    deleted = shell("delete-store", store, "--yes")
    anew = shell("run", "sample_agents:helper", "hello", store=store)

    assert refused.exit_code == 1
    assert f"perdure delete-store {store} --yes" in refused.stderr
    assert deleted.stdout == f"deleted {store}-blobs\ndeleted {store}-workers\ndeleted {store}-lock\n"
    assert anew.exit_code == 0
