"""A host that does what it is told, line by line, in a process of its own: `python -m tests.stores.obedient <file>`.

    turn            one turn of session "s": says its number, or the error that it got
    read, copy      what a host may do to its own files: read the database, copy its whole folder
    look            open a connection of its own, and keep it
    fork            fork a child that ends at once, as `multiprocessing` does
    another         open a second store on the same file; `one less` closes it
    close           close the store
    at, COMMIT, …   do the rest of the line just before that statement of the next turn: `read`, `remove` (the WAL),
                    `let in` (another process opens the file, reads and leaves), `die`

With `--plain-locks`, the system has no locks but POSIX ones, as macOS.
"""

import asyncio
import fcntl
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

if "--plain-locks" in sys.argv:
    for missing in ("F_OFD_SETLK", "F_OFD_SETLKW", "F_OFD_GETLK"):
        delattr(fcntl, missing)

from perdure.errors import PerdureError
from perdure.stores.sqlite import SqliteStore
from tests.kit import print_line
from tests.stores.child import turn


def let_in(path: Path) -> None:
    look = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT count(*) FROM nodes'); c.close()"
    subprocess.run([sys.executable, "-c", look, str(path)], check=True, timeout=60)


DEEDS: dict[str, Callable[[Path], object]] = {
    "read": lambda path: path.read_bytes(),
    "remove": lambda path: Path(f"{path}-wal").unlink(),
    "let in": let_in,
    "die": lambda path: os.kill(os.getpid(), signal.SIGKILL),
}


def at(connection: sqlite3.Connection, path: Path, statement: str, deeds: list[str]) -> None:
    """Do these once, before the next such statement runs."""

    def run(text: str) -> None:
        if text.startswith(statement):
            while deeds:
                DEEDS[deeds.pop(0)](path)

    connection.set_trace_callback(run)


class Host:
    """What is open in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stores: list[SqliteStore] = []
        self.connections: list[sqlite3.Connection] = []
        self.turns = 0

    async def another(self) -> None:
        self.stores.append(SqliteStore(self.path))
        await self.stores[-1].open()

    async def one_less(self) -> None:
        await self.stores.pop().close()

    async def close(self) -> None:
        while self.stores:
            await self.one_less()

    async def turn(self) -> str:
        self.turns += 1
        try:
            return str(await turn(self.stores[0], "s", b"%d" % self.turns, self.turns))
        except PerdureError as error:
            return f"{type(error).__name__}: {error}"

    async def read(self) -> None:
        self.path.read_bytes()

    async def copy(self) -> None:
        shutil.copytree(self.path.parent, self.path.parent.with_name("copied"), dirs_exist_ok=True)

    async def look(self) -> None:
        self.connections.append(sqlite3.connect(self.path))
        self.connections[-1].execute("SELECT count(*) FROM nodes").fetchone()

    async def fork(self) -> None:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)

    async def at(self, statement: str, *deeds: str) -> None:
        file = self.stores[0]._file
        assert file is not None
        at(file._connection, self.path, statement, list(deeds))


async def obey(path: Path) -> None:
    host = Host(path)
    await host.another()
    print_line("ready")
    for line in sys.stdin:
        verb, *rest = line.strip().split(", ")
        print_line(await getattr(host, verb.replace(" ", "_"))(*rest) or "done")


if __name__ == "__main__":
    asyncio.run(obey(Path(sys.argv[1])))
