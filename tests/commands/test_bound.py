"""Commands that are bound to their Runtime: they speak over its pipes, and nothing of them outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.commands.bound import OWNER, PipedCommand, PipedCommands
from perdure.commands.engine import CommandEngine
from perdure.commands.job import Job
from perdure.commands.shim import stat_of
from perdure.errors import CommandsUnavailable, InvalidCommand
from perdure.model.command import Command, CommandSettings
from perdure.model.sandbox import Confinement
from perdure.stores import open_store
from tests.commands.conftest import MARK
from tests.kit import until

ECHO = "import sys\nfor line in sys.stdin.buffer:\n    sys.stdout.buffer.write(line)\n    sys.stdout.buffer.flush()\n"
STUBBORN = (
    "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.write(1, b'up')\ntime.sleep(600)\n"
)


class Bound:
    """Bound commands of a store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(folder / "store.db")
        self.engine = CommandEngine(self.store, CommandSettings())
        self.commands = PipedCommands(self.engine)

    async def python(self, program: str, grace: float = 2.0, sandbox: Confinement | None = None) -> PipedCommand:
        argv = (sys.executable, "-I", "-S", "-c", program)
        return await self.commands.start("test", Command(argv, env={"MARK": MARK}, grace=grace, sandbox=sandbox), {})

    @property
    def folders(self) -> list[Path]:
        return [path.parent for path in self.engine.jobs().glob(f"*/{OWNER}")]


@pytest.fixture
async def bound(tmp_path: Path) -> AsyncIterator[Bound]:
    made = Bound(tmp_path)
    await made.store.open()
    yield made
    await made.engine.close()
    await made.store.close()


async def read(fd: int) -> bytes:
    """What is in a pipe, once there is something or its end."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
        return os.read(fd, 1 << 16)
    finally:
        loop.remove_reader(fd)


def close(command: PipedCommand) -> None:
    os.close(command.stdin)
    os.close(command.stdout)


def lives(pid: int) -> bool:
    stat = stat_of(pid)
    return stat is not None and stat[0] not in b"ZX"


async def test_what_is_written_comes_back_over_its_own_pipes(bound: Bound) -> None:
    command = await bound.python(ECHO)
    os.write(command.stdin, b"hello\n")
    answer = await read(command.stdout)
    close(command)
    await command.end()

    assert answer == b"hello\n"
    assert bound.folders == []
    assert not lives(command.pid)


async def test_end_of_the_program_ends_its_stdout(bound: Bound) -> None:
    command = await bound.python("import os; os.write(1, b'x'); os.write(2, b'no such thing\\n')")

    assert await read(command.stdout) == b"x"
    assert await read(command.stdout) == b""
    await until(lambda: not lives(command.pid))
    close(command)
    assert await command.end() == "no such thing"


async def test_program_that_does_not_leave_is_killed_with_what_it_began(bound: Bound) -> None:
    begins = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {STUBBORN!r}])\n{STUBBORN}"
    command = await bound.python(begins, grace=0.05)
    await read(command.stdout)
    close(command)
    await command.end()  # `nothing_left` sees that the child is gone too

    assert not lives(command.pid)


async def test_complaints_without_end_are_kept_up_to_a_limit_and_harm_nothing(bound: Bound) -> None:
    command = await bound.python(f"import os\nfor _ in range(40): os.write(2, b'x' * 65536)\n{ECHO}")
    os.write(command.stdin, b"still here\n")

    assert await read(command.stdout) == b"still here\n"
    assert (bound.folders[0] / "stderr").stat().st_size == 1 << 20
    close(command)
    await command.end()


async def test_confined_program_speaks_over_its_pipes(bound: Bound, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    tries = (
        f"import os\ntry: open('/etc/shadow'); os.write(1, b'open')\nexcept OSError: os.write(1, b'refused')\n{ECHO}"
    )
    python = tuple({os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)})
    command = await bound.python(tries, sandbox=Confinement(write=(str(tmp_path / "given"),), read=python))

    assert await read(command.stdout) == b"refused"
    close(command)
    await command.end()


async def test_what_cannot_be_started_is_refused_and_leaves_no_folder(bound: Bound) -> None:
    with pytest.raises(InvalidCommand, match="there is no program"):
        await bound.commands.start("test", Command(("no-such-program",)), {})
    with pytest.raises(InvalidCommand, match="has no value"):
        await bound.commands.start("test", Command(("true",), grants=("NO_SUCH_TOKEN",)), {})
    script = bound.engine.jobs() / "broken"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(CommandsUnavailable, match="test cannot be started: its program cannot be run"):
        await bound.commands.start("test", Command((str(script),)), {})

    assert bound.folders == []


HOST = """
import asyncio, os, sys
from pathlib import Path
from tests.commands.test_bound import Bound, STUBBORN, read

async def main():
    bound = Bound(Path(sys.argv[1]))
    await bound.store.open()
    command = await bound.python(STUBBORN, grace=0.05)
    await read(command.stdout)
    if sys.argv[2] == "forked" and os.fork() == 0:
        os.close(1)
        os.read(0, 1)  # holds the pipes until its parent's parent lets it go
        os._exit(0)
    print(command.pid, os.getpid(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def host(folder: Path, how: str) -> tuple[subprocess.Popen[bytes], int]:
    """A Runtime's process with a bound command, and the pid of that."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOST), str(folder), how],
        cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        pid, own = process.stdout.readline().split()
    assert int(own) == process.pid
    return process, int(pid)


@pytest.mark.kill
async def test_nothing_of_it_outlives_a_runtime_that_is_killed(tmp_path: Path) -> None:
    process, pid = host(tmp_path, "killed")
    with process:
        process.kill()

    await until(lambda: not lives(pid))


@pytest.mark.kill
async def test_next_runtime_ends_what_is_left_when_the_shim_was_killed_too(bound: Bound, tmp_path: Path) -> None:
    process, pid = host(tmp_path, "killed")
    [folder] = bound.folders
    started = Job(folder).started()
    assert started is not None
    assert await bound.commands.end_leftovers() == 0  # its Runtime lives
    os.kill(started.shim.pid, signal.SIGKILL)
    with process:
        process.kill()
    await until(lambda: not lives(started.shim.pid))
    assert lives(pid)

    assert await bound.commands.end_leftovers() == 1
    assert not lives(pid)
    assert bound.folders == []


@pytest.mark.kill
async def test_next_runtime_ends_what_a_fork_of_the_killed_one_holds_open(bound: Bound, tmp_path: Path) -> None:
    process, pid = host(tmp_path, "forked")
    with process:
        process.kill()
        process.wait()
        assert lives(pid)

        assert await bound.commands.end_leftovers() == 1
        assert not lives(pid)
    assert bound.folders == []
