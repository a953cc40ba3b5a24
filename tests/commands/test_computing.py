"""Commands that only compute: they can make nothing, begin nothing, and do not outlive their shim."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from perdure.commands.bound import PipedCommands
from perdure.commands.engine import CommandEngine
from perdure.model.command import Command, CommandSettings
from perdure.model.sandbox import Confinement, Implementation
from tests.codemode.kit import require_sandbox
from tests.commands.conftest import Commands, ended
from tests.commands.test_bound import lives, read
from tests.kit import until

PYTHON = os.path.realpath(sys.executable)
READ = (PYTHON, f"{sys.base_prefix}/lib")

ATTEMPTS = """
import json, os, socket, sys, threading
def tried(attempt):
    try:
        attempt()
    except (OSError, RuntimeError) as error:
        return "refused"
    return "done"
def write(path):
    with open(path, "w") as file:
        file.write("x")
home = os.environ.get("TMPDIR", "/tmp")
print(json.dumps({
    "compute": tried(lambda: sum(range(10))),
    "read python": tried(lambda: open(os.__file__).read()),
    "process": tried(os.fork),
    "program": tried(lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})),
    "thread": tried(lambda: threading.Thread(target=print).start()),
    "file in /tmp": tried(lambda: write("/tmp/made")),
    "file in its home": tried(lambda: write(home + "/made")),
    "folder": tried(lambda: os.mkdir("/tmp/folder")),
    "shared memory": tried(lambda: write("/dev/shm/made")),
    "file beside python": tried(lambda: write(os.path.dirname(os.__file__) + "/made")),
    "passwords": tried(lambda: open("/etc/passwd").read()),
    "network": tried(lambda: socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1)),
}))
"""


async def test_nothing_but_computing_is_possible(how: Implementation, commands: Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        argv = (PYTHON, "-s", "-S", "-P", "-B", "-c", ATTEMPTS, str(server.getsockname()[1]))
        sandbox = Confinement(read=READ, how=how, computes=True)
        job = await commands.start(*argv, sandbox=sandbox, cwd=READ[1])
        status = await ended(job)

    assert status.code == 0
    found: dict[str, str] = json.loads((job.folder / "stdout").read_text())
    assert {name: word for name, word in found.items() if word == "done"} == {"compute": "done", "read python": "done"}


async def test_it_dies_with_its_shim(how: Implementation, commands: Commands) -> None:
    """Others do not: the next Runtime adopts them, or ends them."""
    sandbox = Confinement(read=READ, how=how, computes=True)
    job = await commands.start(PYTHON, "-S", "-c", "while True: pass", sandbox=sandbox, cwd=READ[1])
    started = job.started()
    assert started is not None
    assert lives(started.leader.pid)
    os.kill(started.shim.pid, signal.SIGKILL)

    await until(lambda: not lives(started.leader.pid))


class NoFolders:
    """A store that keeps no folders for commands, such as a database."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


async def test_bound_commands_need_no_folders_of_the_store() -> None:
    require_sandbox()
    store: Any = NoFolders()
    engine = CommandEngine(store, CommandSettings())
    argv = (PYTHON, "-S", "-c", "import os; os.write(1, str(sorted(os.environ)).encode())")
    command = Command(argv, cwd=READ[1], env={"MINE": "1"}, sandbox=Confinement(read=READ, computes=True))
    await PipedCommands(engine).check(command)
    started = await PipedCommands(engine).start("test", command, {})
    folder = engine.bound_jobs()
    said = await _whole(started.stdout)
    os.close(started.stdin)
    os.close(started.stdout)
    await started.end()
    await engine.close()

    assert said == b"['HOME', 'LC_CTYPE', 'MAINSTAY_JOB', 'MINE', 'TMPDIR']"
    assert not Path(folder).exists()


async def _whole(fd: int) -> bytes:
    data = b""
    while more := await read(fd):
        data += more
    return data
