"""Limits and terminals: they hold in the shim, whether a Runtime lives or not."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from perdure import Agent, ProcessHandle, Runtime
from perdure.commands.job import ShimAnswer
from perdure.errors import InvalidInput, TooManyCommands
from perdure.model.command import CommandSettings
from perdure.testing import FunctionModel
from tests.commands.conftest import Commands, children_of, ended, written
from tests.kit import until

AGENT = Agent(FunctionModel(lambda _: "I see."))
LONG = ["sleep", "600"]


async def test_time_that_is_over_ends_the_tree(commands: Commands) -> None:
    status = await commands.end("sh", "-c", "sleep 100 & sleep 100", timeout=0.05, grace=60)

    assert (status.end, status.reason, status.signal) == ("timed_out", "wall", signal.SIGTERM)
    assert status.duration >= 0.05
    assert status.survivors == 0


async def test_command_that_ends_in_time_is_not_timed_out(commands: Commands) -> None:
    status = await commands.end("true", timeout=3600, silence=3600, output_limit=1)

    assert (status.end, status.code, status.reason) == ("exited", 0, "")


async def test_silence_ends_a_command_that_said_something_before(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "echo still here; exec sleep 100", silence=0.3, grace=60)
    status = await ended(job)

    assert (status.end, status.reason) == ("timed_out", "silence")
    assert written(job) in (b"still here\n", b"")  # on a very busy machine it was silent from the beginning


async def test_output_over_the_limit_ends_the_command_and_is_kept_up_to_it(commands: Commands) -> None:
    job = await commands.start("yes", output_limit=100_000, grace=60)
    status = await ended(job)

    assert (status.end, status.reason, status.stdout) == ("killed", "output_limit", 100_000)
    assert written(job) == b"y\n" * 50_000
    assert status.dropped > 0


async def test_limit_is_of_both_streams_together(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "printf 12345; printf 67890 >&2; exec sleep 100", output_limit=9, grace=60)
    status = await ended(job)

    assert (status.end, status.reason, status.stdout + status.stderr, status.dropped) == (
        "killed",
        "output_limit",
        9,
        1,
    )


async def test_output_at_the_limit_is_no_offence(commands: Commands) -> None:
    status = await commands.end("printf", "12345", output_limit=5)

    assert (status.end, status.stdout, status.dropped) == ("exited", 5, 0)


async def test_limits_hold_while_nobody_watches(commands: Commands) -> None:
    job = await commands.start("sleep", "100", timeout=0.2, grace=60)
    await commands.spawner.close()

    assert (await ended(job)).end == "timed_out"


async def test_large_input_and_output_at_once(commands: Commands) -> None:
    job = await commands.start("cat", stdin=True)
    block = bytes(range(256)) * 4000
    for number in range(1, 9):
        assert await job.write_stdin(number, block) is ShimAnswer.OK
    assert await job.close_stdin(9) is ShimAnswer.OK
    status = await ended(job)

    assert (status.code, status.stdout) == (0, 8 * len(block))
    assert written(job) == 8 * block


# ---------------------------------------------------------------------- terminals

ECHO = """
import os, signal
def say(text): os.write(1, text.encode() + b"\\n")  # a handler must not print while the program prints
def size(*_): say("size %d %d" % (os.get_terminal_size().lines, os.get_terminal_size().columns))
signal.signal(signal.SIGWINCH, size)
say("%s %s %s %s" % (os.isatty(0), os.isatty(1), os.isatty(2), os.open("/dev/tty", os.O_RDWR) > 2))
size()
while line := os.read(0, 100):
    say("line " + line.decode().strip())
os.write(2, b"end\\n")
"""


async def test_terminal_has_one_stream_a_size_and_an_end(commands: Commands) -> None:
    job = await commands.python(ECHO, pty=(24, 80))
    await until(lambda: b"size 24 80" in written(job))
    assert await job.resize(50, 132) is ShimAnswer.OK
    await until(lambda: b"size 50 132" in written(job))
    assert await job.write_stdin(1, b"hello\n") is ShimAnswer.OK
    await until(lambda: b"line hello" in written(job))
    assert await job.close_stdin(2) is ShimAnswer.OK
    status = await ended(job)

    assert (status.end, status.code, status.stderr, status.drained) == ("exited", 0, 0, True)
    assert written(job).startswith(b"True True True True\r\n")
    assert written(job).endswith(b"end\r\n")


async def test_interrupt_key_reaches_what_is_in_the_foreground(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "echo ready; exec sleep 100", pty=(24, 80))
    await until(lambda: b"ready" in written(job))
    assert await job.write_stdin(1, b"\x03") is ShimAnswer.OK
    status = await ended(job)

    assert (status.end, status.signal) == ("signaled", signal.SIGINT)


FLOOD = """
import os, signal, tty
tty.setraw(0)
printing = os.fork()
while printing == 0:
    os.write(1, b"y" * 65536)
read = 0
while read < 100_000:
    read += len(os.read(0, 65536))
os.kill(printing, signal.SIGKILL)
"""


async def test_terminal_that_never_stops_printing_is_written_to(commands: Commands) -> None:
    job = await commands.python(FLOOD, pty=(24, 80))
    await until(lambda: b"y" in written(job))
    answer = await job.write_stdin(1, b"x" * 100_000)
    status = await ended(job)

    assert (answer, status.code) == (ShimAnswer.OK, 0)


async def test_kill_ends_a_terminal(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "echo ready; sleep 100; echo after", pty=(24, 80))
    await until(lambda: b"ready" in written(job))
    status = await job.kill("enough", 60)

    assert status is not None
    assert (status.end, status.survivors) == ("killed", 0)
    assert written(job) == b"ready\r\n"


async def test_without_a_terminal_there_is_no_size(commands: Commands) -> None:
    job = await commands.start("sleep", "100")

    assert await job.resize(10, 10) is ShimAnswer.UNSUPPORTED
    for rows, columns in ((0, 80), (24, 1 << 16), (-1, 80)):
        with pytest.raises(InvalidInput, match="rows"):
            await job.resize(rows, columns)
    for number in (0, -1, 999):
        with pytest.raises(InvalidInput, match="no signal"):
            await job.signal(number)
    assert await job.kill("enough", 60)


# ---------------------------------------------------------------------- how many


async def test_commands_are_counted_over_all_runtimes_of_a_store(tmp_path: Path) -> None:
    settings = CommandSettings(per_session=2, total=3)
    async with (
        Runtime(tmp_path / "a.db", commands=settings, agents=[AGENT]) as one,
        Runtime(tmp_path / "a.db", commands=settings, agents=[AGENT]) as other,
    ):
        here, there = await one.session("chat"), await other.session("chat")
        first, second = await here.command(LONG, key="1"), await there.command(LONG, key="2")
        with pytest.raises(TooManyCommands, match="commands of session 'chat': 2 of 2"):
            await here.command(LONG, key="3")
        third = await other.command(LONG, key="3")
        with pytest.raises(TooManyCommands, match="commands of this store: 3 of 3"):
            await one.command(LONG, key="4")
        assert (await one.command(LONG, key="3")).id == third.id, "one that runs is no other one"

        await first.cancel()
        await first.result(timeout=60)
        fourth = await one.command(LONG, key="4")
        for each in (second, third, fourth):
            await each.cancel()
            await each.result(timeout=60)


async def test_two_runtimes_that_start_at_once_do_not_pass_the_limit(tmp_path: Path) -> None:
    settings = CommandSettings(total=3)
    async with (
        Runtime(tmp_path / "a.db", commands=settings) as one,
        Runtime(tmp_path / "a.db", commands=settings) as other,
    ):
        starts = [each.command(LONG) for _ in range(4) for each in (one, other)]
        found = await asyncio.gather(*starts, return_exceptions=True)

        began = [each for each in found if isinstance(each, ProcessHandle)]
        assert (len(began), sum(isinstance(each, TooManyCommands) for each in found)) == (3, 5)
        for each in began:
            await each.cancel()
            await each.result(timeout=60)


async def test_command_that_is_refused_leaves_no_shim_that_waits(tmp_path: Path) -> None:
    """A shim is forked while a command is registered."""
    async with Runtime(tmp_path / "a.db", commands=CommandSettings(total=1)) as runtime:
        running = await runtime.command(LONG)
        for _ in range(5):
            with pytest.raises(TooManyCommands):
                await runtime.command(LONG)
        await until(lambda: shims_below(os.getpid()) <= 2)  # of the one that runs, and of the next one
        await running.cancel()
        await running.result(timeout=60)


def shims_below(pid: int) -> int:
    return sum(len(children_of(each)) for each in children_of(pid) if name_of(each) == "perdure-spawn")


def name_of(pid: int) -> str:
    """What `ps` calls a process; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
