"""Run a scenario with kills, in this process or in forks, and compare with the run without one.

In forks the kills are real: a server imports everything once and forks for each run, which kills itself with SIGKILL.

    this process  ──job──▶  server: no thread, no event loop  ──fork──▶  a run: ends, or dies by SIGKILL at its point
                  ◀─how it ended──────────────────────────────waitpid──

A fork costs milliseconds, a new interpreter hundreds. Besides the points of `injection`, a run can die at any SQL
statement that its SQLite writer is about to execute, so also inside a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import InvalidDefinition
from perdure.ports.store import Store
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing.crash.injection import MODES, Crash, FaultInjector, FaultMode, Ledger, Point
from perdure.testing.crash.scenario import (
    Ending,
    Lab,
    Played,
    ProcessEnding,
    Scenario,
    capture,
    must_run_alone,
    on_a_thread,
    scratch,
    without_logging,
)

StoreKind: TypeAlias = Literal["memory", "sqlite", "sqlite-thread"]
"""`sqlite` commits on the event loop whatever it can, `sqlite-thread` nothing. In use, the disk decides."""

USUAL: tuple[FaultMode, ...] = ("before", "lost", "hang")
REAL: tuple[FaultMode, ...] = ("before", "lost")

SLOW_DISK = 0.08
"""Seconds a statement takes before the process dies in it, when a slow disk is asked for."""


class Reference(Struct, frozen=True):
    """The address of a function, by which another process imports it."""

    module: str
    file: str
    name: str


class Statement(Struct, frozen=True):
    """The nth statement that writes; `within` names the store's write under way. `slow`: it takes a while first.

    `place` counts the statements of that write alone. A statement with `number` 0 is found by these two: for scenarios
    whose writes come in an order of their own each time, such as those with commands.
    """

    number: int
    text: str = ""
    within: str = ""
    slow: bool = False
    place: int = 0


class CrashRun(Struct, frozen=True):
    """One run."""

    scenario: Reference
    folder: str
    incarnation: int = 1
    crash: Crash | None = None
    statement: Statement | None = None
    timeout: float = 30.0
    store: StoreKind = "sqlite"


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


# ---------------------------------------------------------------------- forks: the side of the kit


class ForkServer:
    """The server process, and the scenario it runs unless `play` is given another. Use it with `with`."""

    def __init__(
        self,
        scenario: Callable[[Lab], Any],
        resume: Callable[[Lab], Any] | None = None,
        timeout: float = 30.0,
        store: StoreKind = "sqlite",
    ) -> None:
        if store == "memory":
            raise InvalidDefinition("rows in memory end with their OS process: use one of the SQLite stores")
        self._scenario, self._resume, self._timeout, self._store = scenario, resume, timeout, store
        refer_to(scenario)
        self._server: subprocess.Popen[bytes] | None = None
        self.statements: list[Statement] = []

    def __enter__(self) -> ForkServer:
        module = "perdure.testing.crash.runner"
        code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {module} as runner; runner.serve()"
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
        job = CrashRun(
            refer_to(scenario),
            folder,
            number,
            crash if isinstance(crash, Crash) else None,
            crash if isinstance(crash, Statement) else None,
            self._timeout,
            self._store,
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


# ---------------------------------------------------------------------- forks: the server


def serve() -> None:
    """Fork for every job on stdin, and answer with how the fork ended. Runs no thread and no event loop."""
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=CrashRun)
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
    name = f"perdure_crash_{abs(hash(reference.file))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, reference.file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------- forks: a run


def _become(job: CrashRun, scenario: Callable[[Lab], Any]) -> None:
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


async def _live(job: CrashRun, scenario: Callable[[Lab], Any]) -> RunResult:
    faults = FaultInjector(job.crash, real=True, incarnation=job.incarnation)
    statements = _Statements(faults, job.statement)
    path = Path(job.folder, "crash.db")
    try:
        await scenario(Lab(_sqlite(path, job.store), faults, Ledger(Path(job.folder, "ledger"))))
    except Exception as error:  # a scenario may raise anything: the process that judges it wants to know
        return RunResult(faults.trace, statements.seen, None, "".join(traceback.format_exception(error)))
    statements.enough = True
    store = SqliteStore(path)
    await store.open()
    try:
        return RunResult(faults.trace, statements.seen, await capture(store))
    finally:
        await store.close()


def _sqlite(path: Path, kind: StoreKind) -> SqliteStore:
    return SqliteStore(path, loop_sync=0 if kind == "sqlite-thread" else math.inf)


class _Statements:
    """Counts the statements that write, on every connection of this process, and dies at one of them."""

    def __init__(self, faults: FaultInjector, target: Statement | None) -> None:
        self._faults, self._target = faults, target
        self.seen: list[Statement] = []
        self._places: dict[str, int] = {}
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
        place = self._places[within] = self._places.get(within, 0) + 1
        self.seen.append(Statement(len(self.seen) + 1, " ".join(words), within, place=place))
        target = self._target
        if target is None:
            return
        by_number, by_place = target.number == len(self.seen), (target.within, target.place) == (within, place)
        if by_number or (by_place and not target.number):
            if target.slow:
                time.sleep(SLOW_DISK)
            os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------- in this process: a run, its kills, its end


def play(
    scenario: Scenario,
    crashes: Sequence[Crash] = (),
    *,
    store: StoreKind = "memory",
    resume: Scenario | None = None,
    timeout: float = 30.0,
) -> Played:
    """Run a scenario in this process, with one kill for each of `crashes`, each in the incarnation after the last."""
    must_run_alone("play")
    with scratch() as folder, without_logging():
        durable = _Durable(store, Path(folder))
        incarnations: list[_Incarnation] = []
        try:
            return _play(durable, incarnations, scenario, crashes, resume or scenario, timeout)
        finally:
            for incarnation in incarnations:
                incarnation.dispose()


async def play_async(scenario: Scenario, crashes: Sequence[Crash] = (), **options: Any) -> Played:
    """`play` for async code: on a thread, with event loops of its own. Takes what `play` takes."""
    return await on_a_thread(play, scenario, crashes, **options)


def _play(
    durable: _Durable,
    incarnations: list[_Incarnation],
    scenario: Scenario,
    crashes: Sequence[Crash],
    resume: Scenario,
    timeout: float,
) -> Played:
    broken, unreached = list[str](), list[str]()
    for number in range(1, len(crashes) + 2):
        crash = crashes[number - 1] if number <= len(crashes) else None
        incarnation = _Incarnation(durable, crash, number)
        incarnations.append(incarnation)
        end = incarnation.run(scenario if number == 1 else resume, timeout)
        if crash is not None and crash.mode == "unheard" and incarnation.passed:
            if end.startswith("raised StoreUnavailable"):
                continue  # the host got the error that says so, and starts again
        elif crash is not None and end == "ended" and not incarnation.passed:
            unreached.append(crash.point)
        if end != "died":
            broken += [] if end == "ended" else [f"incarnation {number} {end}"]
            break
    ending = durable.capture()
    broken += _release_late(durable, incarnations, ending)
    traces = [incarnation.trace for incarnation in incarnations]
    return Played(ending, durable.ledger.lines(), traces, [*broken, *ending.problems], unreached)


def _release_late(durable: _Durable, incarnations: Sequence[_Incarnation], before: Ending) -> list[str]:
    """Let the calls of incarnations that were only presumed dead arrive: they must be fenced and change nothing.

    A blob that one of them still puts is no change: no row refers to it, and the sweep deletes it.
    """
    late = [each for each in incarnations if each.crash is not None and each.crash.mode == "late"]
    for incarnation in late:
        incarnation.release()
    if late and replace(durable.capture(), orphans=before.orphans) != before:
        return ["a relieved owner changed the store"]
    return []


class _Durable:
    """What outlives an incarnation: the rows or the file, and the ledger."""

    def __init__(self, kind: StoreKind, folder: Path) -> None:
        self._rows, self._kind = MemoryRows() if kind == "memory" else None, kind
        self._path = folder / "crash.db"
        self.ledger = Ledger()

    def store(self) -> Store:
        return MemoryStore(self._rows) if self._rows is not None else _sqlite(self._path, self._kind)

    def capture(self) -> Ending:
        async def read() -> Ending:
            store = self.store()
            await store.open()
            try:
                return await capture(store)
            finally:
                await store.close()

        return asyncio.run(read())


class _Incarnation:
    """One incarnation, on an event loop of its own. Once it has died the loop is not run again until `dispose`."""

    def __init__(self, durable: _Durable, crash: Crash | None, number: int) -> None:
        self.crash, self._durable, self._number = crash, durable, number
        self._loop = asyncio.new_event_loop()
        self._faults: FaultInjector | None = None
        self._store: Store | None = None
        self._task: asyncio.Future[None] | None = None

    @property
    def trace(self) -> list[Point]:
        return [] if self._faults is None else list(self._faults.trace)

    @property
    def passed(self) -> bool:
        """Whether it passed the point where it was to die."""
        return self.crash is not None and any(point.name == self.crash.point for point in self.trace)

    def run(self, scenario: Scenario, timeout: float) -> str:
        return self._loop.run_until_complete(self._run(scenario, timeout))

    async def _run(self, scenario: Scenario, timeout: float) -> str:
        faults = self._faults = FaultInjector(self.crash, incarnation=self._number)
        self._store = self._durable.store()
        task = self._task = asyncio.ensure_future(scenario(Lab(self._store, faults, self._durable.ledger)))
        done, _ = await asyncio.wait({task, faults.crashed}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if faults.crashed in done:
            return "died"
        if task not in done:
            return f"did not end within {timeout:g} s; it last passed {[p.name for p in faults.trace[-3:]]}"
        error = task.exception()
        return "ended" if error is None else f"raised {type(error).__name__}: {error}"

    def release(self) -> None:
        """Let the call that was held up arrive, and run until the incarnation is idle again."""
        faults = self._faults
        if faults is None or faults.released is None:
            return
        faults.released.set()
        self._loop.run_until_complete(faults.wait_idle())

    def dispose(self) -> None:
        """Unwind the tasks, with ports that refuse every call. Only after the case has been judged."""
        if self._faults is not None:
            self._faults.dispose()
        self._loop.set_exception_handler(lambda *_: None)
        try:
            self._loop.run_until_complete(self._unwind())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _unwind(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for _ in range(20):
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=0.2)
            tasks = {task for task in asyncio.all_tasks() if not task.done()} - {asyncio.current_task()}
            if not tasks:
                break
        if self._store is not None:
            await self._store.close()


# ---------------------------------------------------------------------- a kill at every point


MAX_UNREACHED = 0.1
"""The share of points that a report may miss."""


class KillResult(Struct, frozen=True):
    """One kill and what it cost.

    `repeated_by_tool` has the repeated effects by tool, or by the name that `lab.effect` was given; they add up to
    `repeated`. `lost` counts turns and effects that should be there and are not; `unreached` is the point if the run
    never passed it, so that there was no kill at all. That is no broken promise: tasks that run at once may take
    another order.
    """

    crash: Crash
    model_calls: int
    effects: int
    repeated: int
    unknown: int
    lost: int
    problems: list[str]
    played: Played
    unreached: str = ""
    repeated_by_tool: dict[str, int] = {}


Row = KillResult
"""Its former name."""


class Report(Struct, frozen=True):
    """All kills of a scenario beside the undisturbed run (`plain`)."""

    name: str
    plain: Played
    rows: list[KillResult]
    seconds: float

    @property
    def kills(self) -> int:
        return len(self.rows) - len(self.unreached)

    @property
    def lost(self) -> int:
        return sum(row.lost for row in self.rows)

    @property
    def repeated(self) -> int:
        return sum(row.repeated for row in self.rows)

    @property
    def unknown(self) -> int:
        return sum(row.unknown for row in self.rows)

    @property
    def unreached(self) -> list[str]:
        """Points of the undisturbed run at which no kill happened, because the run for it never passed them."""
        return [str(row.crash) for row in self.rows if row.unreached]

    @property
    def problems(self) -> list[str]:
        """Broken promises; and that so many points were not reached that the others say little."""
        found = [f"{row.crash}: {problem}" for row in self.rows for problem in row.problems]
        if len(self.unreached) > MAX_UNREACHED * len(self.rows):
            found.append(f"{len(self.unreached)} of {len(self.rows)} points were not reached")
        return found

    def __str__(self) -> str:
        points = len({row.crash.point for row in self.rows})
        return (
            f"{self.name}: {points} points, {self.kills} kills in {self.seconds:.1f} s; {self.lost} lost, "
            f"{self.repeated} repeated, {self.unknown} unknown, {len(self.problems)} problems"
            + (f", {len(self.unreached)} not reached" if self.unreached else "")
        )

    def table(self) -> str:
        """Every kill on a line."""
        width = max([len(str(row.crash)) for row in self.rows], default=10)
        head = f"{'killed':<{width}}  model  effects  repeated  unknown  lost"
        lines = [head, "-" * len(head)]
        for row in self.rows:
            figures = (row.model_calls, row.effects, row.repeated, row.unknown, row.lost)
            cells = "  ".join(f"{n:>{w}}" for n, w in zip(figures, (5, 7, 8, 7, 4), strict=True))
            notes = [*(["point not reached"] if row.unreached else []), *row.problems]
            lines.append(f"{row.crash!s:<{width}}  {cells}" + "".join(f"\n    ! {note}" for note in notes))
        return "\n".join([*lines, str(self)])


def kill_everywhere(  # noqa: PLR0913  # what a test may say, each by name
    scenario: Scenario,
    *,
    store: StoreKind = "memory",
    real: bool = False,
    modes: Sequence[FaultMode] | None = None,
    resume: Scenario | None = None,
    timeout: float = 30.0,
    sample: int | None = None,
    seed: int = 0,
) -> Report:
    """Run `scenario`, then kill and resume it once at every point in each of `modes`.

    Call it from sync code; where an event loop runs, await `kill_everywhere_async`.

    `resume` is what runs after a kill, if not the scenario again. `sample` kills so often at most, where `seed` says:
    for a build that shall not wait for all of them. Raises AssertionError when the scenario does not even end
    undisturbed. On a terminal a line shows how far it is.
    """
    must_run_alone("kill_everywhere")
    began, name = time.monotonic(), getattr(scenario, "__name__", "scenario")
    with contextlib.ExitStack() as stack:
        if real:
            run: Callable[[Sequence[Crash]], Played] = stack.enter_context(ForkServer(scenario, resume, timeout)).play
        else:

            def run(crashes: Sequence[Crash]) -> Played:
                return play(scenario, crashes, store=store, resume=resume, timeout=timeout)

        plain = run(())
        if plain.problems:
            raise AssertionError(f"{name} fails without any kill: {'; '.join(plain.problems)}")
        wanted = list(plans(plain.traces[0], modes or (REAL if real else USUAL)))
        if sample is not None and sample < len(wanted):
            chosen = random.Random(seed).sample(range(len(wanted)), sample)
            wanted = [wanted[place] for place in sorted(chosen)]
        rows = []
        for count, crash in enumerate(wanted, 1):
            _progress(f"{name}: killed {count} of {len(wanted)} times", last=count == len(wanted))
            rows.append(judge(crash, run([crash]), plain))
    return Report(name, plain, rows, time.monotonic() - began)


async def kill_everywhere_async(scenario: Scenario, **options: Any) -> Report:
    """`kill_everywhere` for async code: on a thread, with event loops of its own. Takes what it takes."""
    return await on_a_thread(kill_everywhere, scenario, **options)


def plans(trace: Iterable[Point], modes: Sequence[FaultMode]) -> Generator[Crash, None, None]:
    """Every way to die at every point of a trace."""
    for point in trace:
        for mode in MODES[point.kind]:
            if mode in modes:
                yield Crash(point.name, mode)


def judge(crash: Crash, played: Played, plain: Played) -> KillResult:
    """Compare a killed run with the undisturbed one."""
    return KillResult(
        crash,
        played.model_calls,
        sum(played.effects.values()),
        played.repeated,
        played.unknown,
        _lost(played, plain),
        [*played.broken, *_differences(played, plain)],
        played,
        ", ".join(played.unreached),
        played.repeated_by_tool,
    )


def _lost(played: Played, plain: Played) -> int:
    """Count turns that are not committed, processes that have not ended, and effects that a call's outcome claims but
    the ledger does not have."""
    lost = 0
    for wanted in plain.ending.sessions:
        found = played.ending.session(wanted.id)
        if found is None:
            lost += len(wanted.turns)
            continue
        lost += max(0, len(wanted.turns) - len(found.turns))
        for call in found.calls:
            counted = (call.tool, call.call_id)
            if call.outcome == "ok" and plain.effects[counted] and not played.effects[counted]:
                lost += 1
    for process in plain.ending.processes:
        ended = played.ending.process(process.id)
        lost += process.outcome is not None and (ended is None or ended.outcome is None)
    return lost


def _differences(played: Played, plain: Played) -> list[str]:
    """What must be as in the undisturbed run, unless an outcome is unknown: then the model may go another way."""
    found = []
    for wanted in plain.ending.sessions:
        session = played.ending.session(wanted.id)
        if session is None:
            found.append(f"session {wanted.id} is gone")
        elif session.state != wanted.state or session.turn != wanted.turn:
            found.append(f"session {wanted.id} is {session.state} with turn {session.turn}: {session.reason}")
        elif not played.unknown and session.said != wanted.said:
            found.append(f"session {wanted.id} reads differently")
    return found + [text for process in plain.ending.processes if (text := _difference(played, process))]


def _difference(played: Played, wanted: ProcessEnding) -> str:
    process = played.ending.process(wanted.id)
    if process is None:
        return f"process {wanted.id} is gone"
    if process.status not in (wanted.status, "abandoned"):
        return f"process {wanted.id} is {process.status}, not {wanted.status}: {process.stuck}"
    if not played.unknown and process.outcome != wanted.outcome:
        return f"process {wanted.id} ended differently"
    return "" if len(process.told) == len(wanted.told) else f"process {wanted.id} told {process.told} of it"


def _progress(text: str, last: bool) -> None:
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        print(f"\r\x1b[K{'' if last else text}", end="", file=sys.stderr, flush=True)
