"""Real kills: a fork server imports everything once and forks for each run, which kills itself with SIGKILL.

    this process  ──job──▶  server: no thread, no event loop  ──fork──▶  a run: ends, or dies by SIGKILL at its point
                  ◀─how it ended──────────────────────────────waitpid──

A fork costs milliseconds, a new interpreter hundreds. Besides the points of `injection`, a run can die at any SQL
statement that its SQLite writer is about to execute, so also inside a transaction.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Struct

from mainstay.errors import InvalidDefinition
from mainstay.stores.sqlite import SqliteStore
from mainstay.testing.crash.injection import Crash, FaultInjector, Ledger, Point
from mainstay.testing.crash.scenario import Ending, Lab, Played, capture, scratch

SLOW_DISK = 0.08
"""Seconds a statement takes before the process dies in it, when a slow disk is asked for."""


class Reference(Struct, frozen=True):
    """The address of a function, by which another process imports it."""

    module: str
    file: str
    name: str


class Statement(Struct, frozen=True):
    """The nth statement that writes; `within` names the store's write under way. `slow`: it takes a while first."""

    number: int
    text: str = ""
    within: str = ""
    slow: bool = False


class Job(Struct, frozen=True):
    """One run."""

    scenario: Reference
    folder: str
    incarnation: int = 1
    crash: Crash | None = None
    statement: Statement | None = None
    timeout: float = 30.0


class RunResult(Struct, frozen=True):
    """What a run reports that was not killed."""

    trace: list[Point]
    statements: list[Statement]
    ending: Ending | None = None
    error: str = ""


class ExitStatus(Struct, frozen=True):
    """How a run's process ended: `signal` is the one that killed it, 0 if none."""

    signal: int = 0
    timed_out: bool = False


# ---------------------------------------------------------------------- this side


class ForkServer:
    """The server process, and the scenario it runs unless `play` is given another. Use it with `with`."""

    def __init__(
        self, scenario: Callable[[Lab], Any], resume: Callable[[Lab], Any] | None = None, timeout: float = 30.0
    ) -> None:
        self._scenario, self._resume, self._timeout = scenario, resume, timeout
        refer_to(scenario)
        self._server: subprocess.Popen[bytes] | None = None
        self.statements: list[Statement] = []

    def __enter__(self) -> ForkServer:
        module = "mainstay.testing.crash.forked"
        code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {module} as forked; forked.serve()"
        self._server = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(self, *_: object) -> None:
        server = self._server
        if server is not None:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.close()
            server.wait(10)
            server.stdout.close()

    def play(
        self,
        crashes: Sequence[Crash | Statement] = (),
        scenario: Callable[[Lab], Any] | None = None,
        resume: Callable[[Lab], Any] | None = None,
    ) -> Played:
        """Run a scenario on a new file with one kill for each of `crashes`, each in the incarnation after the last."""
        first = scenario or self._scenario
        later = resume or scenario or self._resume or first
        broken, unreached, result = list[str](), list[str](), None
        with scratch() as folder:
            for number in range(1, len(crashes) + 2):
                crash = crashes[number - 1] if number <= len(crashes) else None
                ended, result = self._run(folder, number, crash, first if number == 1 else later)
                if ended.timed_out:
                    broken.append(f"incarnation {number} did not end within {self._timeout:g} s\n{_log(folder)}")
                elif result is None and ended.signal != signal.SIGKILL:
                    broken.append(f"incarnation {number} died by signal {ended.signal}\n{_log(folder)}")
                elif result is not None and result.error:
                    broken.append(result.error)
                elif result is not None and crash is not None:
                    unreached.append(crash.point if isinstance(crash, Crash) else str(crash))
                if ended.timed_out or result is not None:
                    break
            ledger = Ledger(Path(folder, "ledger")).lines()
        if result is None or result.ending is None:
            return Played(Ending(), ledger, [], broken or ["nothing was left to read"], unreached)
        if not crashes:
            self.statements = result.statements
        return Played(result.ending, ledger, [result.trace], [*broken, *result.ending.problems], unreached)

    def _run(
        self, folder: str, number: int, crash: Crash | Statement | None, scenario: Callable[[Lab], Any]
    ) -> tuple[ExitStatus, RunResult | None]:
        assert self._server is not None
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        job = Job(
            refer_to(scenario),
            folder,
            number,
            crash if isinstance(crash, Crash) else None,
            crash if isinstance(crash, Statement) else None,
            self._timeout,
        )
        self._server.stdin.write(msgspec.json.encode(job) + b"\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError("the server process of the crash kit has died")
        file = Path(folder, f"result-{number}")
        result = msgspec.json.decode(file.read_bytes(), type=RunResult) if file.exists() else None
        return msgspec.json.decode(line, type=ExitStatus), result


def _log(folder: str) -> str:
    file = Path(folder, "log")
    return file.read_text()[-4000:] if file.exists() else ""


def refer_to(fn: Callable[..., Any]) -> Reference:
    """A function's address; refuses one that another process could not find."""
    module, name = sys.modules.get(fn.__module__), str(getattr(fn, "__qualname__", fn))
    file = getattr(module, "__file__", None)
    if "<locals>" in name or file is None:
        raise InvalidDefinition(f"{name} cannot be found by another process: define it at the top level of a file")
    return Reference(fn.__module__, file, name)


# ---------------------------------------------------------------------- the server


def serve() -> None:
    """Fork for every job on stdin, and answer with how the fork ended. Runs no thread and no event loop."""
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        scenario = find(job.scenario)  # before the fork, so that it is imported once
        child = os.fork()
        if child == 0:
            _become(job, scenario)
        sys.stdout.buffer.write(msgspec.json.encode(_await_end(child, job.timeout)) + b"\n")
        sys.stdout.buffer.flush()


def _await_end(child: int, timeout: float) -> ExitStatus:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return ExitStatus(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return ExitStatus(timed_out=True)


def find(reference: Reference) -> Callable[[Lab], Any]:
    """Import a function by its address: by module name where that leads to the same file, else from the file."""
    found: Any = _module(reference)
    for part in reference.name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]  # it was one when its address was taken


def _module(reference: Reference) -> ModuleType:
    if reference.module != "__main__":
        try:
            module = importlib.import_module(reference.module)
        except ImportError:
            pass
        else:
            if module.__file__ == reference.file:
                return module
    name = f"mainstay_crash_{abs(hash(reference.file))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, reference.file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------- a run


def _become(job: Job, scenario: Callable[[Lab], Any]) -> None:
    """Run the job in the fork and exit. Never returns into the server's loop."""
    status = 1
    try:
        log = os.open(Path(job.folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        result = asyncio.run(_live(job, scenario))
        partial = Path(job.folder, "partial")
        partial.write_bytes(msgspec.json.encode(result))
        partial.rename(Path(job.folder, f"result-{job.incarnation}"))
        status = 0
    except BaseException:  # whatever it was, it must not unwind into the server
        traceback.print_exc()
    finally:
        os._exit(status)


async def _live(job: Job, scenario: Callable[[Lab], Any]) -> RunResult:
    faults = FaultInjector(job.crash, real=True, incarnation=job.incarnation)
    statements = _Statements(faults, job.statement)
    path = Path(job.folder, "crash.db")
    try:
        await scenario(Lab(SqliteStore(path), faults, Ledger(Path(job.folder, "ledger"))))
    except Exception as error:  # a scenario may raise anything: the process that judges it wants to know
        return RunResult(faults.trace, statements.seen, None, "".join(traceback.format_exception(error)))
    statements.enough = True
    store = SqliteStore(path)
    await store.open()
    try:
        return RunResult(faults.trace, statements.seen, await capture(store))
    finally:
        await store.close()


class _Statements:
    """Counts the statements that write, on every connection of this process, and dies at one of them."""

    def __init__(self, faults: FaultInjector, target: Statement | None) -> None:
        self._faults, self._target = faults, target
        self.seen: list[Statement] = []
        self.enough = False
        self._connect: Callable[..., sqlite3.Connection] = sqlite3.connect
        setattr(sqlite3, "connect", self._watched)  # noqa: B010  # this process is ours alone, and short-lived

    def _watched(self, *args: Any, **options: Any) -> sqlite3.Connection:
        connection = self._connect(*args, **options)
        connection.set_trace_callback(self._execute)
        return connection

    def _execute(self, text: str) -> None:
        words = text.split(None, 3)[:3] or ["--"]
        if self.enough or words[0].upper() in ("SELECT", "PRAGMA", "--"):
            return
        within = self._faults.current[0] if self._faults.current else ""
        self.seen.append(Statement(len(self.seen) + 1, " ".join(words), within))
        target = self._target
        if target is not None and target.number == len(self.seen):
            if target.slow:
                time.sleep(SLOW_DISK)
            os.kill(os.getpid(), signal.SIGKILL)
