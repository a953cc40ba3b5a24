"""The OS process of a Runtime is killed at every step of a command's life, and over many commands at once.

What is found afterwards is written down by hand, for each step: what the row said, and that the command ran once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure import ProcessHandle, Runtime
from perdure.commands.job import Job
from perdure.commands.sandbox import IMPLEMENTATIONS, examine
from perdure.commands.shim import stat_of
from perdure.commands.spawner import Spawner, SpawnFailed, StartRequest
from perdure.model.command import CommandResult
from perdure.model.process import ProcessRow
from perdure.stores.sqlite import SqliteStore
from tests.commands.host import STEPS, lives
from tests.kit import until

pytestmark = [pytest.mark.kill, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

FOUND = {
    # point:             a row, begun, a job is named, its leader is known, it has ended
    "before register": (False, False, False, False, False),
    "after register": (True, True, True, False, False),
    "before identity": (True, True, True, False, False),
    "after identity": (True, True, True, True, False),
    "before outcome": (True, True, True, True, False),
    "after outcome": (True, True, True, True, True),
}


@contextmanager
def host(*argv: str) -> Generator[subprocess.Popen[str]]:
    program = [sys.executable, "-m", "tests.commands.host", *argv]
    child = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


async def row_of(path: Path, process_id: str) -> ProcessRow | None:
    store = SqliteStore(path)
    await store.open()
    try:
        return await store.process(process_id)
    finally:
        await store.close()


def test_every_step_has_its_row() -> None:
    assert sorted(FOUND) == sorted(f"{when} {step}" for step in STEPS for when in ("before", "after"))


@pytest.mark.parametrize("point", FOUND)
async def test_killed_at_every_step_a_command_runs_once_and_its_result_arrives(tmp_path: Path, point: str) -> None:
    path, marks = tmp_path / "a.db", tmp_path / "marks"
    argv = ["sh", "-c", 'echo ran >> "$0"; echo out; exit 3', str(marks)]
    with host(str(path), "die", point, *argv) as child:
        code = await asyncio.to_thread(child.wait)
    row = await row_of(path, "command.c")
    reference = None if row is None else row.record.external_ref
    found = (
        row is not None,
        row is not None and row.record.first_started is not None,
        reference is not None,
        reference is not None and "pid" in reference,
        row is not None and not row.live,
    )

    async with Runtime(path) as runtime:
        handle = await runtime.command(argv, key="c")
        result = await handle.result()
        after = await handle.record()

    assert (code, found) == (-signal.SIGKILL, FOUND[point])
    assert (result.status, result.exit_code, result.stdout) == ("exited", 3, "out\n")
    assert marks.read_text() == "ran\n"
    assert (after.attempts, after.stuck) == (1, None)


@pytest.mark.gate
@pytest.mark.parametrize("point", ["before intent", "after intent", "before identity", "after identity"])
async def test_killed_again_while_it_begins_anew_a_command_runs_once(tmp_path: Path, point: str) -> None:
    """The first host dies when a job is named and nothing is begun; the next one names another, and dies there."""
    path, marks = tmp_path / "a.db", tmp_path / "marks"
    argv = ["sh", "-c", 'echo ran >> "$0"; echo out; exit 3', str(marks)]
    names = list[str]()
    for died_at in ("after register", point):
        with host(str(path), "die", died_at, *argv) as child:
            assert await asyncio.to_thread(child.wait) == -signal.SIGKILL
        row = await row_of(path, "command.c")
        assert row is not None
        names.append(row.record.external_ref["job"])

    async with Runtime(path) as runtime:
        handle = await runtime.command(argv, key="c")
        result = await handle.result()
        after = await handle.record()

    assert (names[0] == names[1]) == (point == "before intent")
    assert (result.status, result.exit_code, result.stdout) == ("exited", 3, "out\n")
    assert marks.read_text() == "ran\n"
    assert (after.attempts, after.stuck) == (1, None)


async def test_fifty_running_commands_are_adopted(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with host(str(path), "hold", "50") as child:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == "ready\n"
        child.kill()
    async with Runtime(path) as runtime:
        handles = [runtime.handle(f"command.{n}") for n in range(50)]
        mine = runtime._worker.id

        async def adopted() -> bool:
            return {row.owner for row in await runtime.processes.list(kind="command", limit=100)} == {mine}

        await until(adopted)
        for n, each in enumerate(handles):
            await each.signal("stdin", {"text": f"to {n}\n", "close": True})
        results: list[CommandResult] = await asyncio.gather(*(each.result() for each in handles))
        rows = await asyncio.gather(*(each.record() for each in handles))

    assert [each.stdout for each in results] == [f"to {n}\n" for n in range(50)]
    assert {(row.attempts, row.takeovers) for row in rows} == {(1, 0)}


@pytest.mark.gate
async def test_two_hundred_commands_run_at_once(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "a.db") as runtime:
        handles = await asyncio.gather(*(runtime.command(["cat"], stdin=True) for _ in range(200)))
        running = {await each.status() for each in handles}
        for n, each in enumerate(handles):
            await each.signal("stdin", {"text": f"{n}", "close": True})
        results = await asyncio.gather(*(each.result() for each in handles))

    assert running == {"running"}
    assert [each.stdout for each in results] == [str(n) for n in range(200)]


@pytest.mark.gate
async def test_a_host_that_is_killed_five_times_finds_its_command_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    for _ in range(5):
        with host(str(path), "hold", "1") as child:
            assert child.stdout is not None
            assert await asyncio.to_thread(child.stdout.readline) == "ready\n"
            child.kill()
    async with Runtime(path) as runtime:
        handle = runtime.handle("command.0")
        row = await handle.record()
        await handle.signal("stdin", {"text": "once\n", "close": True})
        result = await handle.result()

    assert (result.status, result.stdout) == ("exited", "once\n")
    assert (row.attempts, row.takeovers, row.stuck) == (1, 0, None)


async def test_a_killed_host_whose_shim_is_killed_too_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with host(str(path), "hold", "1") as child:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == "ready\n"
        child.kill()
    row = await row_of(path, "command.0")
    assert row is not None
    os.kill(row.record.external_ref["shim"], signal.SIGKILL)

    async with Runtime(path) as runtime:
        handle: ProcessHandle[Any] = runtime.handle("command.0")
        result = await handle.result()

    assert (result.status, result.cleanup.verified) == ("lost", True)
    assert not lives(row.record.external_ref["pid"])


@pytest.mark.parametrize("also", ["nobody", "shim", "keeper"])
async def test_a_confined_command_of_a_killed_host_is_adopted_or_ended_with_all_it_has(
    tmp_path: Path, also: str
) -> None:
    """The keeper is process 1 of the command's own processes, which end with it."""
    if all(examine(how).refused for how in IMPLEMENTATIONS):
        pytest.skip("no sandbox here")
    path, root = tmp_path / "store" / "a.db", tmp_path / "root"
    path.parent.mkdir()
    root.mkdir()
    with host(str(path), "hold", "1", str(root)) as child:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == "ready\n"
        child.kill()
    row = await row_of(path, "command.0")
    assert row is not None
    leader, shim = row.record.external_ref["pid"], row.record.external_ref["shim"]
    stat = stat_of(leader)
    assert stat is not None
    keeper = stat[1]
    if also == "keeper" and keeper == shim:
        os.kill(shim, signal.SIGKILL)  # Landlock alone has none
    elif also != "nobody":
        os.kill(shim if also == "shim" else keeper, signal.SIGKILL)

    async with Runtime(path) as runtime:
        handle: ProcessHandle[Any] = runtime.handle("command.0")
        if also == "nobody":
            await handle.signal("stdin", {"text": "once\n", "close": True})
        result = await handle.result()
        after = await handle.record()

    told = (result.status, result.stdout, result.signal)
    if also == "nobody":
        assert (*told, result.exit_code) == ("exited", "once\n", None, 0)
    elif also == "shim" or keeper == shim:
        assert (result.status, result.cleanup.verified) == ("lost", True)
    else:
        assert told == ("signaled", "", "SIGKILL")
    assert (after.attempts, after.takeovers, after.stuck) == (1, 0, None)
    assert [pid for pid in (leader, keeper, shim) if lives(pid)] == []


async def test_a_worker_that_goes_on_late_begins_nothing_where_another_one_went_on(tmp_path: Path) -> None:
    """It may have been stopped for longer than its lease just before it made the folder that it had named."""
    path, marks = tmp_path / "a.db", tmp_path / "marks"
    argv = ["sh", "-c", 'echo ran >> "$0"', str(marks)]
    with host(str(path), "die", "after register", *argv) as child:
        await asyncio.to_thread(child.wait)
    row = await row_of(path, "command.c")
    assert row is not None
    async with Runtime(path) as runtime:
        await (await runtime.command(argv, key="c")).result()

    late, spawner = Job(tmp_path / "a.db-jobs" / row.record.external_ref["job"]), Spawner()
    late.create()
    answer = await spawner.start(StartRequest(late.folder, "late", argv, {"PATH": os.environ["PATH"]}, str(tmp_path)))
    await spawner.close()

    assert isinstance(answer, SpawnFailed)
    assert (answer.stage, answer.number) == ("spent", 0)
    assert marks.read_text() == "ran\n"


async def test_the_end_of_a_command_is_told_though_no_file_could_be_opened_meanwhile(tmp_path: Path) -> None:
    with host(str(tmp_path / "a.db"), "starve") as child:
        assert child.stdout is not None
        said = await asyncio.to_thread(child.stdout.readline)

    assert said == "signaled SIGTERM\n"
