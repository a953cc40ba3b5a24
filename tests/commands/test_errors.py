"""What is refused, and what cannot be said for now: typed, and before anything is written."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ProcessContext, Runtime, process
from perdure.commands import shim
from perdure.commands.job import Identity, Job, StartedCommand, own_boot, own_namespace
from perdure.errors import CommandsUnavailable, InvalidCommand, InvalidProcess
from perdure.model.monitor import Watch
from perdure.testing import FunctionModel
from tests.commands.conftest import Commands

AGENT = Agent(FunctionModel(lambda _: "I see."))


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(tmp_path / "a.db", agents=[AGENT]) as made:
        yield made


@contextmanager
def no_more_files(files: int = 0) -> Generator[None]:
    """Nothing that has this number, or a higher one, can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---------------------------------------------------------------------- too many open files


async def test_output_that_cannot_be_opened_for_now_is_no_bare_error(runtime: Runtime) -> None:
    handle = await runtime.command(["echo", "hello"])
    await handle.result(timeout=60)

    with no_more_files(), pytest.raises(CommandsUnavailable, match="cannot be read just now: Too many open files"):
        await handle.output()

    assert await handle.output() == b"hello\n"


async def test_a_process_is_not_gone_because_too_many_files_are_open(commands: Commands) -> None:
    job = await commands.start("sleep", "600")
    started = job.started()
    assert started is not None

    with no_more_files():
        with pytest.raises(OSError, match="Too many open files"):
            shim.stat_of(os.getpid())
        with pytest.raises(OSError, match="Too many open files"):
            await job.wait(started)

    await job.kill("enough", 0)


async def test_a_shim_that_cannot_be_asked_for_now_costs_no_file(commands: Commands) -> None:
    job = await commands.start("sleep", "600")
    next_file = os.dup(0)
    os.close(next_file)

    with no_more_files(next_file + 1), pytest.raises(OSError, match="Too many open files"):
        await job.signal(signal.SIGUSR1)  # its folder can be opened, and no socket

    after = os.dup(0)
    os.close(after)
    assert after == next_file
    await job.kill("enough", 0)


async def test_a_process_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    nobody = Identity(2**22 - 1, 1)  # PID_MAX_LIMIT: no process ever has it
    started = StartedCommand(nobody, nobody, own_boot(), own_namespace(), "token", 0)

    assert shim.stat_of(nobody.pid) is None
    assert await Job(tmp_path).wait(started) is None


# ---------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize("text", ["no base64!", "YQ", "YQ==\n", "YQ===", "ä"])
async def test_bytes_that_are_no_base64_are_refused_when_they_are_sent(runtime: Runtime, text: str) -> None:
    handle = await runtime.command(["cat"], stdin=True)

    with pytest.raises(InvalidProcess, match="base64"):
        await handle.signal("stdin", {"base64": text})

    await handle.signal("stdin", {"base64": "YQ==", "close": True})
    assert (await handle.result(timeout=60)).stdout == "a"


@pytest.mark.parametrize("size", [{"rows": 0, "columns": 80}, {"rows": 24, "columns": 65_536}])
async def test_a_size_that_no_terminal_has_is_refused_when_it_is_sent(runtime: Runtime, size: dict[str, int]) -> None:
    handle = await runtime.command(["cat"], pty=(24, 80))

    with pytest.raises(InvalidProcess, match=r"rows|columns"):
        await handle.signal("resize", size)

    await handle.cancel()
    await handle.result(timeout=60)


async def test_an_empty_key_is_refused(runtime: Runtime) -> None:
    session = await runtime.session("chat")

    with pytest.raises(InvalidCommand, match="key='' is not usable"):
        await runtime.command(["true"], key="")
    with pytest.raises(InvalidCommand, match="key='' is not usable"):
        await session.command(["true"], key="")


async def test_a_command_is_found_again_though_its_program_and_its_folder_are_gone(
    runtime: Runtime, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    program = folder / "program"
    program.write_text("#!/bin/sh\necho once\n")
    program.chmod(0o700)
    first = await runtime.command([str(program)], cwd=str(folder), key="one")
    await first.result(timeout=60)
    program.unlink()
    folder.rmdir()

    again = await runtime.command([str(program)], cwd=str(folder), key="one")

    assert (again.id, (await again.result()).stdout) == (first.id, "once\n")
    with pytest.raises(InvalidCommand, match="cannot be used"):
        await runtime.command([str(program)], cwd=str(folder), key="two")
    assert [row.id for row in await runtime.processes.list(kind="command")] == [first.id]


# ---------------------------------------------------------------------- a watch that nobody hears


async def test_a_watch_that_no_session_hears_is_refused(runtime: Runtime) -> None:
    session, watch = await runtime.session("chat"), Watch(match=("FAILED",))

    with pytest.raises(InvalidCommand, match="leave one out"):
        await session.command(["true"], watch=watch, wake="none")
    with pytest.raises(InvalidCommand, match="no session hears"):
        await runtime.command(["true"], watch=watch)


@process
async def watches(ctx: ProcessContext[Any]) -> int | None:
    command = await ctx.command(["sh", "-c", "echo FAILED one"], watch=Watch(match=("FAILED",)))
    return (await command.result()).exit_code


async def test_a_watch_of_a_durable_function_reaches_the_session_that_hears_of_it(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "a.db", agents=[AGENT], processes=[watches]) as runtime:
        session = await runtime.session("chat")
        assert await (await session.start(watches, wake="turn")).result(timeout=60) == 0
        await runtime.wait_idle()
        heard = [message.text for message in await session.history() if message.role == "user"]
        assert any("1 line matches:\n> FAILED one" in text for text in heard)

        alone = await runtime.start(watches)
        outcome = await alone.outcome(timeout=60)
        assert "no session hears of this process" in str(outcome)


# ---------------------------------------------------------------------- a system that is not Linux

WITHOUT_FCNTL = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "fcntl":
            raise ModuleNotFoundError("No module named 'fcntl'", name="fcntl")

sys.modules.pop("fcntl", None)
sys.meta_path.insert(0, Missing())

import asyncio
from perdure import Agent, Runtime
from perdure.errors import CommandsUnavailable, InvalidDefinition
from perdure.model.monitor import MonitorSpec
from perdure.testing import FunctionModel

async def main():
    async with Runtime("memory", agents=[Agent(FunctionModel(lambda _: "I see."))]) as runtime:
        session = await runtime.session("chat")
        assert (await session.run("hello")).text == "I see."
        for start in (lambda: session.command(["true"]), lambda: session.monitor(MonitorSpec("m", "true"))):
            try:
                await start()
            except CommandsUnavailable as error:
                print(error)
        await runtime.sessions.delete("chat")
    try:
        Runtime("agent.db")
    except InvalidDefinition as error:
        print(error)

asyncio.run(main())
"""


def test_a_runtime_works_without_what_only_commands_and_files_need(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_FCNTL], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    unavailable = "commands run on Linux, and this Python has no fcntl"
    file = "store='agent.db': a file needs the locks of a POSIX system (fcntl); here there is store='memory'"
    assert (ran.returncode, ran.stdout.splitlines()) == (0, [unavailable, unavailable, file]), ran.stderr
