"""`perdure doctor`: it finds what needs a person, on whole and on broken files."""

import asyncio
import hashlib
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from perdure import Agent, Image, Limit, Runtime, ToolCall, ToolContext, Workspace, tool
from perdure.model.codec import encode
from perdure.model.message import Message
from perdure.model.record import Said
from perdure.model.session import WorkerRow
from perdure.model.write import Accept, Beat, Claim, Release, Retire, SessionRef, TurnScope
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.database import CHECKPOINT_WRITES
from perdure.stores.sqlite.locks import LockFile
from perdure.testing import FunctionModel, ScriptedModel
from tests.cli.sample_agents import helper
from tests.cli.shell import say, shell, shell_json


def write(store: Path, work: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Write to a store as a runtime would."""

    async def main() -> None:
        opened = SqliteStore(store)
        await opened.open()
        await work(opened)
        await opened.close()

    asyncio.run(main())


async def accept(store: SqliteStore, worker: str | None) -> TurnScope:
    """An open turn `chat.1` of agent `helper`."""
    body = encode(Said(Message("user", "hello"), 1000, "op-1"))
    accepted = await store.write(Accept("chat", "helper", body, "op-1", 1000, worker=worker))
    return TurnScope("chat", accepted.row.sid, 1, worker or "", accepted.row.generation)


def test_a_healthy_store_is_well(store: Path) -> None:
    say(store, "chat", "hello", "look")

    result = shell("doctor", store=store)

    assert result.exit_code == 0
    assert "1 session, 6 records, 0 blobs" in result.stdout
    assert result.stdout.endswith("all is well\n")


def test_a_suspect_is_shown_with_its_reason(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        scope = await accept(opened, "w1")
        for number in (1, 2):
            await opened.write(Beat(WorkerRow(f"w{number + 1}", "here", "boot", 1, 0)))
            await opened.write(Claim(SessionRef("chat"), f"w{number + 1}", scope.generation + number - 1, 2000))

    write(store, work)

    told = shell_json("doctor", store=store)
    result = shell("doctor", store=store)

    assert list(told["suspects"]) == ["chat.1"]
    assert told["suspects"]["chat.1"].startswith("3 workers died with it in their hands, without a new record")
    assert "chat.1: 3 workers died" in " ".join(result.stdout.split())


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602], ids="{:o}".format)
def test_a_store_that_others_may_use_is_reported(store: Path, mode: int) -> None:
    say(store, "chat", "hello")
    store.chmod(mode)

    told = shell_json("doctor", store=store)
    result = shell("doctor", store=store)

    assert (told["healthy"], told["shared"][0]) == (False, str(store))
    assert result.exit_code == 1
    assert f"chmod -R go= {store}*" in " ".join(result.stdout.split())


async def grow(store: SqliteStore, number: int) -> None:
    """So many writes that the WAL is folded back after them, as far as that can be."""
    beats = [Beat(WorkerRow("w1", "here", "boot", 1, 0, number * 10_000 + n)) for n in range(CHECKPOINT_WRITES)]
    await asyncio.gather(*[store.write(beat) for beat in beats])
    await store.write(Retire("w1"))  # answered after the fold


def test_a_reader_that_keeps_the_wal_growing_is_reported_until_it_leaves(store: Path) -> None:
    say(store, "chat", "hello")
    reader = sqlite3.connect(store, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM nodes").fetchone()

    write(store, lambda opened: grow(opened, 1))
    assert shell_json("doctor", store=store)["needs"] == []  # a reader may take its time
    lock = LockFile(Path(f"{store}-lock"))
    assert lock.unfolded_since() > 0
    lock.note_unfolded(lock.unfolded_since() - 3 * 3600 * 1000)
    told, result = shell_json("doctor", store=store), shell("doctor", store=store)
    write(store, lambda opened: grow(opened, 2))
    later = shell_json("doctor", store=store)
    reader.close()
    after = shell_json("doctor", store=store)
    lock.close()

    assert told["wal_unfolded_since"] == later["wal_unfolded_since"]
    assert later["wal_bytes"] > told["wal_bytes"] > 0
    said = " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert "its WAL could not be folded for 3" in said
    assert f"lsof {store}" in said
    assert (after["wal_unfolded_since"], after["needs"]) == (None, [])


def test_deep_reads_every_record(store: Path) -> None:
    say(store, "chat", "hello", "look")

    told = shell_json("doctor", "--deep", store=store)

    assert (told["healthy"], told["checks"], told["records_read"]) == (True, ["ok"], 6)


def test_a_turn_that_waits_for_a_person_names_the_command(store: Path) -> None:
    say(store, "shop", "pay")

    result = shell("doctor", store=store)

    assert result.exit_code == 1
    assert "shop.1: waits for approval of pay" in result.stdout
    assert "→ perdure approve shop.1.1.0 (or reject)" in result.stdout


def test_a_command_that_waits_for_a_person_is_shown_on_lines_of_its_own(store: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    tools = Workspace([tmp_path / "work"], unsandboxed=True).tools(commands=True)
    call = ToolCall(name="run_command", args={"command": "touch made"})

    async def work() -> None:
        async with Runtime(store, agents=[Agent(ScriptedModel([[call]]), name="helper", tools=[tools])]) as runtime:
            await (await runtime.session("shop")).run("make it")

    asyncio.run(work())
    result = shell("doctor", store=store)

    assert "approval of run_command (shop.1.1.0)\n" in result.stdout
    assert "        | touch made\n      because: no rule allows it\n" in result.stdout
    assert "�" not in result.stdout


def test_a_stuck_turn_is_shown_with_its_reason_and_what_to_do(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        await opened.write(Release(await accept(opened, "w-1"), 2000, stuck="RuntimeError: the disk ate it"))

    write(store, work)

    result = shell("doctor", store=store)
    [need] = shell_json("doctor", store=store)["needs"]
    assert result.exit_code == 1
    assert (need["about"], need["problem"]) == ("chat.1", "stuck: RuntimeError: the disk ate it")
    assert "perdure cancel chat" in need["advice"]
    assert "stuck: RuntimeError: the disk ate it" in shell("sessions", store=store).stdout


def test_what_a_dead_worker_left_behind_is_found(store: Path) -> None:
    async def work(opened: SqliteStore) -> None:
        await opened.write(Beat(WorkerRow("w-dead", "host", "boot", 1, 1000)))
        await accept(opened, "w-dead")

    write(store, work)

    result = shell("doctor", store=store)
    told = shell_json("doctor", store=store)
    assert result.exit_code == 1
    assert [(w["id"], w["alive"]) for w in told["workers"]] == [("w-dead", False)]
    assert [(t["turn_id"], t["state"], t["owner"]) for t in told["open_turns"]] == [("chat.1", "interrupted", "w-dead")]
    assert "start a Runtime with agent 'helper'" in told["needs"][0]["advice"]
    assert "w-dead  dead" in result.stdout


async def test_a_living_runtime_is_seen_alive_from_another_process(store: Path) -> None:
    release = asyncio.Event()

    @tool
    async def hold() -> str:
        await release.wait()
        return "held"

    def answers(request: object) -> object:
        return "done" if release.is_set() else [ToolCall("c", "hold", {})]

    async with Runtime(store, agents=[Agent(FunctionModel(answers), name="holder", tools=[hold])]) as runtime:
        receipt = await (await runtime.session("chat")).send("hold")
        told = await asyncio.to_thread(shell_json, "doctor", store=store)
        state = (await asyncio.to_thread(shell_json, "sessions", store=store))[0]["state"]
        release.set()
        await receipt.result(timeout=60)

    assert [w["alive"] for w in told["workers"]] == [True]
    assert [(t["turn_id"], t["state"]) for t in told["open_turns"]] == [("chat.1", "running")]
    assert told["healthy"]
    assert state == "running"


# ---------------------------------------------------------------------- broken files


def test_a_file_of_another_program_is_refused_with_a_hint(store: Path) -> None:
    with sqlite3.connect(store) as other:
        other.execute("CREATE TABLE notes (text)")
    other.close()

    result = shell("doctor", store=store)

    assert result.exit_code == 1
    assert "it is a SQLite database of another program" in result.stderr


def test_a_damaged_file_is_refused_with_a_hint(store: Path) -> None:
    say(store, "chat", "hello")
    store.write_bytes(b"not a database at all, but long enough to be read as one" * 100)

    result = shell("doctor", store=store)
    told = shell_json("doctor", store=store)

    assert result.exit_code == 1
    assert "restore it from a backup" in result.stderr
    assert (told["healthy"], told["error"]) == (False, "store_damaged")


def test_a_file_of_a_newer_version_says_to_upgrade(store: Path) -> None:
    say(store, "chat", "hello")
    with sqlite3.connect(store) as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()

    result = shell("doctor", store=store)

    assert result.exit_code == 1
    assert "has schema 99" in result.stderr
    assert "upgrade perdure" in result.stderr


def test_a_folder_is_no_store(store: Path) -> None:
    store.mkdir()

    result = shell("doctor", store=store)

    assert result.exit_code == 1
    assert str(store) in result.stderr


def test_a_record_whose_bytes_changed_is_found(store: Path) -> None:
    """In a file of a few megabytes already when it is opened."""
    say(store, "chat", "hello")
    with sqlite3.connect(store) as file:
        file.execute("UPDATE nodes SET body = CAST(replace(body, 'hello', 'jello') AS BLOB)")
    file.close()

    result = shell("doctor", store=store)

    assert result.exit_code == 1
    assert "does not match its checksum" in result.stderr


def test_deep_finds_a_blob_that_is_gone(store: Path) -> None:
    say(store, "chat", "x" * 100_000)
    blob = next(p for p in Path(f"{store}-blobs").rglob("*") if p.is_file())
    assert shell("doctor", "--deep", store=store).exit_code == 0

    blob.unlink()

    shallow, deep = shell("doctor", store=store), shell("doctor", "--deep", store=store)
    assert (shallow.exit_code, deep.exit_code) == (0, 1)
    assert "is missing" in deep.stdout


def test_deep_finds_an_artifact_that_is_gone(store: Path) -> None:
    @tool
    async def draw(ctx: ToolContext) -> str:
        """Draw a plan."""
        return (await ctx.artifacts.put(b"<svg/>", name="plan.svg", media_type="image/svg+xml")).name

    async def work() -> None:
        model = ScriptedModel([[ToolCall("a", "draw")], "drawn"])
        async with Runtime(store, agents=[Agent(model, tools=[draw])]) as runtime:
            await (await runtime.session("chat")).run("draw")

    asyncio.run(work())
    assert shell("doctor", "--deep", store=store).exit_code == 0

    next(p for p in Path(f"{store}-blobs").rglob("*") if p.is_file()).unlink()

    deep = shell("doctor", "--deep", store=store)
    assert deep.exit_code == 1
    assert "is missing" in deep.stdout


@pytest.mark.parametrize("command", [["sessions"], ["show", "chat"], ["pending"]], ids=" ".join)
def test_other_commands_refuse_a_damaged_file_too(command: list[str], store: Path) -> None:
    store.write_bytes(b"not a database at all, but long enough to be read as one" * 100)

    result = shell(*command, store=store)

    assert result.exit_code == 1
    assert "is damaged" in result.stderr


def test_a_deep_look_finds_files_whose_bytes_are_gone(store: Path) -> None:
    async def main() -> None:
        async with Runtime(store, agents=[Agent(ScriptedModel(["fine"]))]) as runtime:
            await (await runtime.session("chat")).run(["see", Image.from_bytes(b"some picture", "image/png")])

    asyncio.run(main())
    digest = hashlib.sha256(b"some picture").hexdigest()
    [path] = store.parent.rglob(digest[2:])
    path.unlink()

    assert shell("doctor", store=store).exit_code == 0
    result = shell("doctor", "--deep", store=store)
    assert result.exit_code == 1
    assert digest in result.stdout.replace("\n", "").replace(" ", "")


def test_doctor_names_who_has_nearly_spent_a_limit(store: Path) -> None:
    async def work() -> None:
        limits = [Limit(turns=5, per="metadata.user"), Limit(turns=100, per="all", window="day")]
        async with Runtime(store, agents=[helper], limits=limits) as runtime:
            for number in range(4):
                await (await runtime.session(f"s{number}", metadata={"user": "ann"})).run("hello")
            await (await runtime.session("b", metadata={"user": "bob"})).run("hello")

    asyncio.run(work())
    found = shell_json("doctor", store=store)

    assert [(need["about"], need["problem"]) for need in found["needs"]] == [
        ('limit of metadata.user "ann"', "4 turns of 5 turns are spent")
    ]
