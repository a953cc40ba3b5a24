"""Real child processes: started, spoken to with signals, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.model.process import ProcessRow
from perdure.stores.sqlite import SqliteStore
from perdure.testing.crash import scratch
from tests.crash.process_worker import PATIENCE, Outside

ROOT = Path(__file__).parents[2]


class Child:
    """A worker process. It is resumed and killed at the end, whatever became of it."""

    def __init__(self, module: str, *words: object) -> None:
        command = [sys.executable, "-m", module, *map(str, words)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def rest(self) -> list[str]:
        """Everything that it has still to say; returns when it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.read().splitlines()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def folder() -> Generator[Path, None, None]:
    """Where the store is: in memory, if there is such a disk. A kill loses no page of it, and syncing is free."""
    with scratch() as found:
        yield Path(found)


@contextlib.contextmanager
def child(what: str, folder: Path, *words: object) -> Generator[Child, None, None]:
    """A process that runs one command of `process_worker`."""
    one = Child("tests.crash.process_worker", what, folder, *words)
    try:
        yield one
    finally:
        one.end()


async def rows(outside: Outside) -> dict[str, ProcessRow]:
    """All processes of a store, whoever has it open."""
    store = SqliteStore(outside.store)
    await store.open()
    try:
        return {each.id: each for _, each in await store.changes(0, 1_000_000)}
    finally:
        await store.close()


async def disk(outside: Outside, *names: str) -> dict[str, object]:
    """Everything that the store has of some processes: row, events and journal."""
    store = SqliteStore(outside.store)
    await store.open()
    try:
        found = {name: await store.process(name) for name in names}
        return {n: (r, await store.events(r.pid), await store.steps(r.pid)) for n, r in found.items() if r is not None}
    finally:
        await store.close()


async def kinds(runtime: Runtime, name: str) -> list[str]:
    """The types of a process's events."""
    return [event.type async for event in runtime.handle(name).events()]


def count(outside: Outside, name: str) -> Counter[str]:
    """How often something happened outside, by key."""
    return Counter(line.key for line in outside.lines(name))


def beats(outside: Outside, key: str) -> list[int]:
    """Who has shown to be working on it, in order, by pid."""
    return [line.incarnation for line in outside.lines("beat") if line.key == key]
