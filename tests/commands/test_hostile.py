"""Commands whose folders are damaged, copied or lied in, and starts that race each other."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import ProcessHandle, Runtime
from perdure.commands.job import Status
from perdure.commands.os_tree import end
from perdure.commands.output import read, summarize
from perdure.commands.shim import CONNECTIONS
from perdure.model.command import CommandResult, CommandSettings
from tests.commands.conftest import Commands, ended
from tests.commands.host import lives
from tests.kit import until


async def left_running(path: Path, marks: Path) -> dict[str, Any]:
    """Begin a command that goes on for long, and leave its Runtime: who runs it, and where."""
    async with Runtime(path) as runtime:
        handle = await runtime.command(["sh", "-c", 'echo ran >> "$0"; exec sleep 600', str(marks)], key="c")
        reference: dict[str, Any] = (await handle.record()).record.external_ref
        await until(marks.exists)
    return reference


async def result_of(path: Path) -> CommandResult:
    async with Runtime(path) as runtime:
        handle: ProcessHandle[CommandResult] = runtime.handle("command.c")
        return await handle.result()


def replaced_by_a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def replaced_by_a_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/passwd")


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "started is empty": ("started", lambda path: path.write_bytes(b"")),
    "started is gone": ("started", lambda path: path.unlink()),
    "started is no text": ("started", lambda path: path.write_bytes(b"\xff\0\n\n\xfe")),
    "started is a folder": ("started", replaced_by_a_folder),
    "started is a link": ("started", replaced_by_a_link),
    "started names others": (
        "started",
        lambda path: path.write_bytes(path.read_bytes().replace(b"leader ", b"leader 9")),
    ),
    "status is no text": ("status", lambda path: path.write_bytes(b"\xff\0\nprocess\n")),
    "status is a folder": ("status", replaced_by_a_folder),
    "status is a link": ("status", replaced_by_a_link),
    "status is huge": ("status", lambda path: path.write_bytes(b"x" * 1_000_000)),
    "the lock is gone": ("lock", lambda path: path.unlink()),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_folder_runs_nothing_again_and_leaves_nothing_running(tmp_path: Path, damage: str) -> None:
    path, marks = tmp_path / "a.db", tmp_path / "marks"
    reference = await left_running(path, marks)
    os.kill(reference["shim"], signal.SIGKILL)
    await until(lambda: not lives(reference["shim"]))
    name, do = DAMAGE[damage]
    do(tmp_path / "a.db-jobs" / reference["job"] / name)

    result = await result_of(path)

    assert (result.status, result.cleanup.verified, marks.read_text()) == ("lost", True, "ran\n")
    assert not lives(reference["pid"])


async def test_a_file_in_the_place_of_the_output_is_not_written_to(commands: Commands, tmp_path: Path) -> None:
    job, target = commands.job(), tmp_path / "target"
    target.write_text("mine")
    program = f"ln -s {shlex.quote(str(target))} {shlex.quote(str(job.folder))}/stdout; echo out; echo err >&2"
    await commands.spawner.start(commands.request(job, ["sh", "-c", program]))
    status = await ended(job)

    assert (status.code, status.stdout, status.stderr, status.dropped) == (0, 0, 4, 4)
    assert (status.error, target.read_text()) == ("stdout: File exists", "mine")


async def test_a_copy_of_everything_leaves_the_command_of_its_original_alone(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    path = tmp_path / "one" / "a.db"
    reference = await left_running(path, tmp_path / "marks")
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=shutil.ignore_patterns("control"))

    copied = await result_of(tmp_path / "two" / "a.db")
    alive = lives(reference["pid"])
    async with Runtime(path) as runtime:
        handle: ProcessHandle[CommandResult] = runtime.handle("command.c")
        await handle.cancel()
        result = await handle.result()

    assert (copied.status, copied.cleanup.verified, alive) == ("lost", False, True)
    assert (result.status, result.cleanup.verified) == ("killed", True)


async def test_a_folder_that_is_gone_is_not_said_to_be_verified(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    reference = await left_running(path, tmp_path / "marks")
    shutil.rmtree(tmp_path / "a.db-jobs" / reference["job"])

    result = await result_of(path)

    assert (result.status, result.cleanup.verified) == ("lost", False)
    await until(lambda: not lives(reference["pid"]))  # its shim ends it


async def test_a_command_that_another_runtime_runs_takes_no_room_here(tmp_path: Path) -> None:
    path, one = tmp_path / "a.db", CommandSettings(total=1)
    async with Runtime(path, commands=one) as first, Runtime(path, commands=one) as second:
        both = await asyncio.gather(*(each.command(["echo", "out"], key="c") for each in (first, second)))
        results = await asyncio.gather(*(each.result() for each in both))
        after = [
            await (await each.command(["true"], key=name)).result() for each, name in ((first, "1"), (second, "2"))
        ]

    assert [each.stdout for each in results] == ["out\n", "out\n"]
    assert [each.exit_code for each in after] == [0, 0]


async def test_the_name_of_a_process_cannot_forge_a_line_of_the_status(commands: Commands) -> None:
    program = r"""
import time
with open("/proc/self/comm", "wb") as file:
    file.write(b"\xe2\x80\xa8end exited 0")
print("named", flush=True)
time.sleep(600)
"""
    job = await commands.python(program)
    await until(lambda: read(job, "stdout").data == b"named\n")

    await job.kill("enough", 0)
    status = await ended(job)

    assert (status.end, status.reason) == ("killed", "enough")
    assert [each.name for each in status.processes] == ["\u2028end exited 0"]


async def test_a_kill_is_heard_however_many_listen(commands: Commands) -> None:
    job = await commands.start("sleep", "600")
    listening = [job.news() for _ in range(CONNECTIONS + 8)]
    for each in listening:
        await anext(each)

    status = await end(job, "enough", 0)
    for each in listening:
        await each.aclose()

    assert isinstance(status, Status)
    assert (status.end, status.reason) == ("killed", "enough")


@pytest.mark.parametrize("entries", [b"\xff" * 320, b"\x01" + b"\0" * 46, b"\0" * 96])
async def test_an_index_that_lies_costs_order_and_no_result(commands: Commands, entries: bytes) -> None:
    job = await commands.start("sh", "-c", "echo out; echo err >&2")
    await ended(job)
    (job.folder / "index").write_bytes(entries)

    summary = await summarize(job)
    chunk = read(job, "combined")

    assert (summary.stdout.bytes <= 4, summary.stderr.bytes <= 4) == (True, True)
    assert len(chunk.data) <= 8
    assert read(job, "stdout").data == b"out\n"
