"""Kill an agent at every boundary, resume it, and compare with the run that nobody killed.

A scenario is an async function that takes a `Lab` and does what your program does:

    async def scenario(lab: Lab) -> None:
        async with lab.runtime(agents=[agent]) as runtime:
            session = await runtime.session("order-7")
            await session.run("pay the invoice", key="pay-7")

    def test_survives_every_kill() -> None:
        report = crash.kill_everywhere(scenario)
        assert report.lost == 0

It runs once undisturbed, and every call that leaves the engine becomes a point: writes, blobs, requests to the model
and each piece of its answer, tool bodies, effects. Then it runs again for every point, dies there, and is started a
second time, as your program would be. Inputs should carry a `key`, so that the second start says the same thing again
instead of a second thing. With `real=True` each run is a process of its own on a SQLite file, killed with SIGKILL;
then the scenario must be a function at the top level of a file.

In process, a dead incarnation is frozen: its ports never answer again. What a tool changes outside without
`Lab.effect` cannot be frozen there; `real=True` has no such gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from mainstay.ports.store import Store
from mainstay.stores.memory import MemoryRows, MemoryStore
from mainstay.stores.sqlite import SqliteStore
from mainstay.testing.ending import Ending, ProcessEnding, capture
from mainstay.testing.faults import MODES, Crash, Ledger, Mode, Point, Seams
from mainstay.testing.forks import Forks
from mainstay.testing.lab import Lab, Played, Scenario, must_run_alone, on_a_thread, scratch

__all__ = [
    "Crash",
    "Lab",
    "Played",
    "Report",
    "Row",
    "kill_everywhere",
    "kill_everywhere_async",
    "play",
    "play_async",
]

StoreKind: TypeAlias = Literal["memory", "sqlite"]

USUAL: tuple[Mode, ...] = ("before", "lost", "hang")
REAL: tuple[Mode, ...] = ("before", "lost")


# ---------------------------------------------------------------------- one play: a run, its kills, its end


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
    with scratch() as folder, _quiet():
        world = _World(store, Path(folder))
        lives: list[_Life] = []
        try:
            return _play(world, lives, scenario, crashes, resume or scenario, timeout)
        finally:
            for life in lives:
                life.dispose()


async def play_async(scenario: Scenario, crashes: Sequence[Crash] = (), **options: Any) -> Played:
    """`play` for async code: on a thread, with event loops of its own. Takes what `play` takes."""
    return await on_a_thread(play, scenario, crashes, **options)


def _play(
    world: _World,
    lives: list[_Life],
    scenario: Scenario,
    crashes: Sequence[Crash],
    resume: Scenario,
    timeout: float,
) -> Played:
    problems: list[str] = []
    for number in range(1, len(crashes) + 2):
        crash = crashes[number - 1] if number <= len(crashes) else None
        life = _Life(world, crash, number)
        lives.append(life)
        end = life.live(scenario if number == 1 else resume, timeout)
        if crash is not None and crash.mode == "unheard" and life.passed and end.startswith("raised StoreUnavailable"):
            continue  # the host was told that nobody knows, and starts again
        if end == "ended":
            if crash is not None and not life.passed:
                problems.append(f"incarnation {number} ended without passing {crash.point!r}")
            break
        if end != "died":
            problems.append(f"incarnation {number} {end}")
            break
    ending = world.capture()
    problems += _arrive_late(world, lives, ending)
    return Played(ending, world.ledger.lines(), [life.trace for life in lives], [*problems, *ending.problems])


def _arrive_late(world: _World, lives: Sequence[_Life], before: Ending) -> list[str]:
    """Wake those that were only thought dead: they must find themselves relieved and change nothing.

    A blob that one of them still puts is no change: nothing refers to it, and the sweep takes it.
    """
    late = [life for life in lives if life.crash is not None and life.crash.mode == "late"]
    for life in late:
        life.wake()
    if late and replace(world.capture(), orphans=before.orphans) != before:
        return ["a relieved owner changed the store"]
    return []


class _World:
    """What outlives an incarnation: the rows or the file, and the ledger."""

    def __init__(self, kind: StoreKind, folder: Path) -> None:
        self._rows = MemoryRows() if kind == "memory" else None
        self._path = folder / "crash.db"
        self.ledger = Ledger()

    def store(self) -> Store:
        return MemoryStore(self._rows) if self._rows is not None else SqliteStore(self._path)

    def capture(self) -> Ending:
        async def read() -> Ending:
            store = self.store()
            await store.open()
            try:
                return await capture(store)
            finally:
                await store.close()

        return asyncio.run(read())


class _Life:
    """One incarnation, on an event loop of its own that is simply not run any more once it has died."""

    def __init__(self, world: _World, crash: Crash | None, number: int) -> None:
        self.crash, self._world, self._number = crash, world, number
        self._loop = asyncio.new_event_loop()
        self._seams: Seams | None = None
        self._store: Store | None = None
        self._task: asyncio.Future[None] | None = None

    @property
    def trace(self) -> list[Point]:
        return [] if self._seams is None else list(self._seams.trace)

    @property
    def passed(self) -> bool:
        """Whether it came to the point where it was to die."""
        return self.crash is not None and any(point.name == self.crash.point for point in self.trace)

    def live(self, scenario: Scenario, timeout: float) -> str:
        return self._loop.run_until_complete(self._live(scenario, timeout))

    async def _live(self, scenario: Scenario, timeout: float) -> str:
        seams = self._seams = Seams(self.crash, incarnation=self._number)
        seams.crashed = self._loop.create_future()
        self._store = self._world.store()
        task = self._task = asyncio.ensure_future(scenario(Lab(self._store, seams, self._world.ledger)))
        done, _ = await asyncio.wait({task, seams.crashed}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if seams.crashed in done:
            return "died"
        if task not in done:
            return f"did not end within {timeout:g} s; it last passed {[p.name for p in seams.trace[-3:]]}"
        error = task.exception()
        return "ended" if error is None else f"raised {type(error).__name__}: {error}"

    def wake(self) -> None:
        """Let the call that was held up arrive, and whatever it leads to."""
        seams = self._seams
        if seams is None or seams.released is None:
            return
        seams.released.set()
        self._loop.run_until_complete(seams.quiet())

    def dispose(self) -> None:
        """Unwind what is left, with ports that refuse everything: the case has been judged."""
        if self._seams is not None:
            self._seams.dispose()
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


@contextlib.contextmanager
def _quiet() -> Generator[None, None, None]:
    """Dying and being relieved is loud; here it is the plan."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


# ---------------------------------------------------------------------- everywhere


class Row(Struct, frozen=True):
    """One kill: what it cost. `lost` counts turns and effects that should be there and are not."""

    crash: Crash
    model_calls: int
    effects: int
    repeated: int
    unknown: int
    lost: int
    problems: list[str]
    played: Played


class Report(Struct, frozen=True):
    """All kills of a scenario beside the run that nobody killed (`plain`)."""

    name: str
    plain: Played
    rows: list[Row]
    seconds: float

    @property
    def kills(self) -> int:
        return len(self.rows)

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
    def problems(self) -> list[str]:
        return [f"{row.crash}: {problem}" for row in self.rows for problem in row.problems]

    def __str__(self) -> str:
        points = len({row.crash.point for row in self.rows})
        return (
            f"{self.name}: {points} points, {self.kills} kills in {self.seconds:.1f} s; {self.lost} lost, "
            f"{self.repeated} repeated, {self.unknown} unknown, {len(self.problems)} problems"
        )

    def table(self) -> str:
        """Every kill on a line."""
        width = max([len(str(row.crash)) for row in self.rows], default=10)
        head = f"{'killed':<{width}}  model  effects  repeated  unknown  lost"
        lines = [head, "-" * len(head)]
        for row in self.rows:
            figures = (row.model_calls, row.effects, row.repeated, row.unknown, row.lost)
            cells = "  ".join(f"{n:>{w}}" for n, w in zip(figures, (5, 7, 8, 7, 4), strict=True))
            lines.append(f"{row.crash!s:<{width}}  {cells}" + "".join(f"\n    ! {p}" for p in row.problems))
        return "\n".join([*lines, str(self)])


def kill_everywhere(
    scenario: Scenario,
    *,
    store: StoreKind = "memory",
    real: bool = False,
    modes: Sequence[Mode] | None = None,
    resume: Scenario | None = None,
    timeout: float = 30.0,
) -> Report:
    """Run `scenario`, then kill and resume it once at every point in each of `modes`.

    Call it from sync code; where an event loop runs, await `kill_everywhere_async`.

    `resume` is what runs after a kill, if not the scenario again. Raises AssertionError when the scenario does not
    even end undisturbed. On a terminal a line shows how far it is.
    """
    must_run_alone("kill_everywhere")
    began, name = time.monotonic(), getattr(scenario, "__name__", "scenario")
    with contextlib.ExitStack() as stack:
        if real:
            stage: Callable[[Sequence[Crash]], Played] = stack.enter_context(Forks(scenario, resume, timeout)).play
        else:

            def stage(crashes: Sequence[Crash]) -> Played:
                return play(scenario, crashes, store=store, resume=resume, timeout=timeout)

        plain = stage(())
        if plain.problems:
            raise AssertionError(f"{name} fails without any kill: {'; '.join(plain.problems)}")
        wanted = list(plans(plain.traces[0], modes or (REAL if real else USUAL)))
        rows = []
        for count, crash in enumerate(wanted, 1):
            _progress(f"{name}: killed {count} of {len(wanted)} times", last=count == len(wanted))
            rows.append(judge(crash, stage([crash]), plain))
    return Report(name, plain, rows, time.monotonic() - began)


async def kill_everywhere_async(scenario: Scenario, **options: Any) -> Report:
    """`kill_everywhere` for async code: on a thread, with event loops of its own. Takes what it takes."""
    return await on_a_thread(kill_everywhere, scenario, **options)


def plans(trace: Iterable[Point], modes: Sequence[Mode]) -> Generator[Crash, None, None]:
    """Every way to die at every point of a trace."""
    for point in trace:
        for mode in MODES[point.kind]:
            if mode in modes:
                yield Crash(point.name, mode)


def judge(crash: Crash, played: Played, plain: Played) -> Row:
    """Compare a killed run with the one that nobody killed."""
    return Row(
        crash,
        played.model_calls,
        sum(played.effects.values()),
        played.repeated,
        played.unknown,
        _lost(played, plain),
        [*played.problems, *_differences(played, plain)],
        played,
    )


def _lost(played: Played, plain: Played) -> int:
    """Turns that are not committed, processes that have not ended, and effects that their call's outcome claims but
    the world does not know."""
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
