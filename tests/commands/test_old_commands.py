"""Commands that the newest older tree began go on under the present one, and the present one can end them.

That tree has another name, and its shims outlive it: what they wrote, answer to and are marked with must not change.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from perdure import Runtime
from perdure.commands.shim import stat_of
from perdure.model.process import ProcessRow
from perdure.stores.sqlite import SqliteStore
from tests.commands.host import lives
from tests.golden.old_trees import NEWEST, environment_of
from tests.kit import until

pytestmark = [pytest.mark.kill, pytest.mark.slow]

OLD_RUNTIME = """
import asyncio, sys
from mainstay import Runtime

async def main(path, *argv):
    async with Runtime(path) as runtime:
        handle = await runtime.command(argv, stdin=True, key="c")
        async for chunk in handle.output(follow=True):
            print(chunk.decode(), end="", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
"""Begins a command with the older tree and prints what it prints, until it is killed."""


@contextmanager
def old_runtime(path: Path, *argv: str) -> Generator[subprocess.Popen[str]]:
    """Run a command under a Runtime of the older tree, which is killed at the end of the block. The command is not."""
    program = [sys.executable, "-c", OLD_RUNTIME, str(path), *argv]
    child = subprocess.Popen(program, env=environment_of(NEWEST), stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        code = child.wait()
        assert child.stdout is not None
        child.stdout.close()
    assert code == -signal.SIGKILL


async def printed(child: subprocess.Popen[str], lines: int) -> list[str]:
    assert child.stdout is not None
    return [(await asyncio.to_thread(child.stdout.readline)).rstrip("\n") for _ in range(lines)]


async def row_of(path: Path) -> ProcessRow:
    store = SqliteStore(path)
    await store.open()
    try:
        row = await store.process("command.c")
    finally:
        await store.close()
    assert row is not None
    return row


class Began(NamedTuple):
    """A process of the OS, which a test ends if the Runtime did not."""

    pid: int
    start: int


@pytest.fixture
async def began() -> AsyncIterator[list[Began]]:
    """The processes of a command. A test that fails leaves none of them behind."""
    found: list[Began] = []
    yield found
    for each in found:
        stat = stat_of(each.pid)
        if stat is not None and stat[4] == each.start:
            os.kill(each.pid, signal.SIGKILL)


def noted(began: list[Began], *pids: int) -> None:
    for pid in pids:
        stat = stat_of(pid)
        assert stat is not None
        began.append(Began(pid, stat[4]))


async def test_command_of_the_older_tree_is_adopted_with_all_that_it_printed(
    tmp_path: Path, began: list[Began]
) -> None:
    path, gate, passed = tmp_path / "a.db", tmp_path / "gate", tmp_path / "passed"
    os.mkfifo(gate)
    os.mkfifo(passed)
    script = 'echo before; read go < "$0"; echo between; echo on > "$1"; read go; echo "$go"; exit 3'
    with old_runtime(path, "sh", "-c", script, str(gate), str(passed)) as child:
        assert await printed(child, 1) == ["before"]
    noted(began, (await row_of(path)).record.external_ref["pid"])
    await asyncio.to_thread(gate.write_text, "go\n")
    assert await asyncio.to_thread(passed.read_text) == "on\n"

    async with Runtime(path) as runtime:
        handle = runtime.handle("command.c")

        async def adopted() -> bool:
            (row,) = await runtime.processes.list(kind="command")
            return row.owner == runtime._worker.id

        await until(adopted)
        await handle.signal("stdin", {"text": "after\n"})
        result = await handle.result()
        chunks = [chunk async for chunk in handle.output()]
        row = await handle.record()

    assert (result.status, result.exit_code, result.stdout) == ("exited", 3, "before\nbetween\nafter\n")
    assert b"".join(chunks) == b"before\nbetween\nafter\n"
    assert (row.attempts, row.takeovers, row.stuck) == (1, 0, None)


FAMILY = 'echo $$; sleep 100000 & echo $!; setsid sh -c "echo \\$\\$; exec sleep 100000" & wait'
"""Prints the numbers of three processes: the leader, a child, and a child in a session of its own."""


async def test_cancel_ends_all_processes_of_a_command_of_the_older_tree(tmp_path: Path, began: list[Began]) -> None:
    path = tmp_path / "a.db"
    with old_runtime(path, "sh", "-c", FAMILY) as child:
        pids = sorted(map(int, await printed(child, 3)))
    noted(began, *pids)

    async with Runtime(path) as runtime:
        handle = runtime.handle("command.c")
        await handle.cancel("enough")
        result = await handle.result()

    assert (result.status, result.reason) == ("killed", "cancelled by host: enough")
    assert (result.cleanup.left, result.cleanup.verified) == (0, True)
    assert [pid for pid in pids if lives(pid)] == []


async def test_orphans_of_a_command_of_the_older_tree_are_found_by_their_mark(
    tmp_path: Path, began: list[Began]
) -> None:
    """Their shim and their leader are gone, and one has a session of its own: only the environment says whose they
    are."""
    path = tmp_path / "a.db"
    with old_runtime(path, "sh", "-c", FAMILY) as child:
        leader, *orphans = map(int, await printed(child, 3))
    noted(began, leader, *orphans)
    reference: dict[str, Any] = (await row_of(path)).record.external_ref
    assert leader == reference["pid"]
    os.kill(reference["shim"], signal.SIGKILL)
    os.kill(leader, signal.SIGKILL)
    await until(lambda: not lives(reference["shim"]) and not lives(leader))
    assert [lives(pid) for pid in orphans] == [True, True]

    async with Runtime(path) as runtime:
        result = await runtime.handle("command.c").result()

    assert result.status == "lost"
    assert (result.cleanup.found, result.cleanup.left, result.cleanup.verified) == (2, 0, True)
    assert [pid for pid in orphans if lives(pid)] == []
