"""A real host of commands, to be killed: `python -m tests.commands.host <store> <what> […]`.

die POINT ARGV…   run one command under the key "c", and die at a write of its life: "before identity", …
starve            let a command end while no file can be opened here; says how it ended
hold N [ROOT]     run N commands that read until they are told to end, confined to ROOT if there is one; says "ready",
                  then waits to be killed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, TypeVar

from perdure import Runtime, Workspace
from perdure.lifecycle.process import EXTERNAL_REF_SET
from perdure.model.write import Advance, Register, Write
from perdure.stores.sqlite import SqliteStore

R = TypeVar("R")

STEPS = ("register", "identity", "outcome")
"""The writes of a command's life. Between the first and the second it is spawned; before the last it has ended. One
that is claimed before anything was begun has a fourth, "intent", which names another job."""


def step_of(write: Write[Any]) -> str:
    if isinstance(write, Register):
        return "register"
    if not isinstance(write, Advance):
        return ""
    if write.outcome is not None:
        return "outcome"
    references = [event.payload for event in write.events if event.type == EXTERNAL_REF_SET]
    return "" if not references else "identity" if "pid" in references[-1] else "intent"


class MortalStore(SqliteStore):
    """A store whose OS process is killed at one write: just before it is made, or just after it was acknowledged."""

    def __init__(self, path: str, point: str) -> None:
        super().__init__(path)
        self._point = point

    def step_of(self, write: Write[Any]) -> str:
        return step_of(write)

    async def write(self, write: Write[R]) -> R:
        step = self.step_of(write)
        self._may_die(f"before {step}")
        receipt = await super().write(write)
        self._may_die(f"after {step}")
        return receipt

    def _may_die(self, point: str) -> None:
        if point == self._point:
            os.kill(os.getpid(), signal.SIGKILL)


def lives(pid: int) -> bool:
    """Whether a process of the OS lives; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    except OSError:
        return False


async def die(path: str, point: str, argv: list[str]) -> None:
    async with Runtime(MortalStore(path, point)) as runtime:
        handle = await runtime.command(argv, key="c")
        await handle.result()
    raise SystemExit("it was to die, and did not")


class Noticed(logging.Handler):
    """An event for what the engine of commands warns of."""

    def __init__(self) -> None:
        super().__init__()
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


async def starve(path: str) -> None:
    noticed, taken = Noticed(), list[int]()
    logging.getLogger("perdure.commands").addHandler(noticed)
    async with Runtime(path) as runtime:
        handle = await runtime.command(["sleep", "600"])
        pid = (await handle.record()).record.external_ref["pid"]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        os.kill(pid, signal.SIGTERM)
        await noticed.event.wait()
        for each in taken:
            os.close(each)
        result = await handle.result()
    print(result.status, result.signal, flush=True)


async def hold(path: str, number: int, root: str | None = None) -> None:
    sandbox = None if root is None else Workspace(root).confinement(path)
    async with Runtime(path) as runtime:
        starts = (runtime.command(["cat"], stdin=True, key=str(n), sandbox=sandbox) for n in range(number))
        await asyncio.gather(*starts)
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    store, what, *rest = sys.argv[1:]
    if what == "starve":
        asyncio.run(starve(store))
    else:
        asyncio.run(die(store, rest[0], rest[1:]) if what == "die" else hold(store, int(rest[0]), *rest[1:2]))
