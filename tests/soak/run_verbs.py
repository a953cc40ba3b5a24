"""The part of `make soak` about everything at once: three processes on one file, all verbs, and every way to lose one.

    python tests/soak/run_verbs.py [--minutes N] [--seed N]

Processes are killed (SIGKILL), stopped for longer than their lease (SIGSTOP) and told to leave (SIGTERM), at random.
Everything is judged from outside: what was acknowledged and what had an effect against what is on disk in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from perdure.engine.journal import load_turns  # noqa: E402  # found through the line above
from perdure.graph.view import turn_view  # noqa: E402
from perdure.model.process import TERMINAL, ProcessRow, Success  # noqa: E402
from perdure.model.record import Begun, Joined  # noqa: E402
from perdure.model.tool import Denied, Ok, OutcomeUnknown, ToolRecord  # noqa: E402
from perdure.model.write import ProcessFilter, SessionFilter  # noqa: E402
from perdure.processes.run import load_steps  # noqa: E402
from perdure.stores.sqlite import SqliteStore  # noqa: E402
from tests.soak.lane import lines, report  # noqa: E402
from tests.soak.verbs import LEASE  # noqa: E402

PROCESSES = 3
EVERY = 10**9
ENDS = {f"process.{status}" for status in TERMINAL}
PATIENCE = 240.0


@dataclass
class Count:
    """What was found. `cases` are verbs that were carried out; `problems` are broken promises."""

    kills: int = 0
    stops: int = 0
    leavings: int = 0
    cases: int = 0
    turns: int = 0
    processes: int = 0
    effects: int = 0
    repeated: int = 0
    unknown: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.cases} verbs under {self.kills} kills, {self.stops} stops and {self.leavings} leavings: "
            f"{self.turns} turns, {self.processes} processes, {self.effects} effects; {self.repeated} repeated as "
            f"allowed, {self.unknown} declared unknown, {len(self.problems)} broken promises"
        )


class Crew:
    """The processes, and what becomes of them."""

    def __init__(self, folder: Path, dice: random.Random, count: Count) -> None:
        self._folder, self._dice, self._count = folder, dice, count
        self._running = [self._start() for _ in range(PROCESSES)]

    def _start(self, what: str | None = None) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.soak.verbs", str(self._folder), what or str(self._dice.random())]
        with open(self._folder / "log", "ab") as log:
            return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)

    def strike(self, way: str) -> None:
        """Lose one that is at work, in one way, and replace it."""
        which = self._dice.randrange(PROCESSES)
        victim = self._running[which]
        self._await_work(victim)
        if victim.poll() is not None:
            self._count.problems.append(f"a process ended by itself with {victim.returncode}")
        elif way == "stop":
            victim.send_signal(signal.SIGSTOP)
            time.sleep(LEASE.term + LEASE.renewal + self._dice.random())
            victim.send_signal(signal.SIGCONT)
            self._count.stops += 1
            return
        elif way == "kill":
            victim.kill()
            self._count.kills += 1
            victim.wait()
        else:
            self._leave(victim)
        self._running[which] = self._start()

    def _await_work(self, victim: subprocess.Popen[bytes]) -> None:
        """Until it is past its start: to end it before is easy, and proves little."""
        until = time.monotonic() + PATIENCE
        while not (self._folder / f"ready-{victim.pid}").exists() and victim.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError("a process did not begin")
            time.sleep(0.01)

    def _leave(self, victim: subprocess.Popen[bytes]) -> None:
        self._await_work(victim)
        victim.terminate()
        self._count.leavings += 1
        if victim.wait(timeout=PATIENCE) != 0:
            self._count.problems.append(f"a process left with {victim.returncode}")

    def finish(self) -> None:
        """All leave; one more comes, and ends what is open."""
        for each in self._running:
            self._leave(each)
        last = self._start("finish")
        self._running.append(last)
        if last.wait(timeout=PATIENCE) != 0:
            self._count.problems.append(f"what was open did not end: {last.returncode}")

    def stop(self) -> None:
        for each in self._running:
            if each.poll() is None:
                each.kill()
                each.wait()


def soak(folder: Path, seconds: float, seed: int, least: int = 0) -> Count:
    """Strike for so long, and at least so often; then let everything end, and judge."""
    dice, count, begun = random.Random(seed), Count(), time.monotonic()
    ways = ["kill", "kill", "leave", "stop", "kill"]
    crew = Crew(folder, dice, count)
    try:
        strikes = 0
        while (passed := time.monotonic() - begun) < seconds or strikes < least:
            crew.strike(ways[strikes % len(ways)])
            strikes += 1
            time.sleep(dice.random() * 0.6)
            _progress(passed / seconds, strikes)
        crew.finish()
    finally:
        crew.stop()
    count.cases = len(lines(folder / "cases"))
    asyncio.run(judge(folder, count))
    if count.problems:
        count.problems.append((folder / "log").read_text()[-3000:])
    return count


def _progress(part: float, strikes: int) -> None:
    if sys.stderr.isatty():
        done = round(40 * min(part, 1))
        print(f"\r[{'#' * done}{'.' * (40 - done)}] {strikes} strikes", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- judging


async def judge(folder: Path, count: Count) -> None:
    ledger = Counter(lines(folder / "ledger"))
    count.effects = ledger.total()
    store = SqliteStore(folder / "agent.db")
    await store.open()
    try:
        facts = await store.facts(deep=True)
        if facts.checks != ("ok",):
            count.problems.append(f"the store is damaged: {facts.checks}")
        calls, turns = await _sessions(store, count)
        rows = {row.id: row for row in await store.processes(ProcessFilter(limit=EVERY))}
        for row in rows.values():
            await _process(store, count, row, ledger)
        count.problems += [f"a wake was not delivered: {wake}" for wake in await store.wakes("pending")]
    finally:
        await store.close()
    count.turns, count.processes = len(turns), len(rows)
    for call_id, call in calls.items():
        _call(count, call, call_id, ledger)
    _acknowledged(folder, count, calls, turns, rows)
    count.problems += [f"effect without a record: {line}" for line, times in ledger.items() if times > 0]


async def _sessions(store: SqliteStore, count: Count) -> tuple[dict[str, ToolRecord], set[str]]:
    """Every call and every turn, or input that joined one, that is committed."""
    calls, turns = dict[str, ToolRecord](), set[str]()
    for row in await store.sessions(SessionFilter(limit=EVERY)):
        if row.turn is not None:
            count.problems.append(f"turn {row.id}.{row.turn} is still open: {row.state} {row.reason}")
        for turn in await load_turns(store, row.sid, 1, row.next - 1):
            name = f"{row.id}.{turn.number}"
            turns.add(name)
            if turn.number > row.head and not any(isinstance(each, Joined) for each in turn.records):
                count.problems.append(f"{name} has no end")
            elif turn.closed is not None:
                calls |= {call.call_id: call for call in turn_view(name, turn.records).tool_calls}
    return calls, turns


def _call(count: Count, call: ToolRecord, call_id: str, ledger: Counter[str]) -> None:
    """Every effect of a call is explained by its record; what is explained is taken off the ledger."""
    if call.tool in ("build", "survey"):
        return  # one has no effect of its own, the other is a process
    effects, settled = ledger.pop(f"{call.tool} {call_id}", 0), call.outcome == Ok("settled")
    known = isinstance(call.outcome, Ok) and not settled
    count.unknown += isinstance(call.outcome, OutcomeUnknown)
    count.repeated += max(0, effects - 1)
    most = 1 + call.repeated if call.tool in ("note", "check") else 1
    if effects > most or (known and effects == 0):
        count.problems.append(f"{call.tool} {call_id}: {effects} effects, {call.repeated} repeats, {call.outcome}")


async def _process(store: SqliteStore, count: Count, row: ProcessRow, ledger: Counter[str]) -> None:
    if row.record.outcome is None:
        count.problems.append(f"process {row.id} is {row.status}: {row.stuck}")
        return
    ends = [event.type for _, _, event in await store.events(row.pid, limit=EVERY) if event.type in ENDS]
    if ends != [f"process.{row.status}"]:
        count.problems.append(f"process {row.id} has not one end but {ends}")
    ended, repeats = isinstance(row.record.outcome, Success), row.attempts - 1
    steps, _ = await load_steps(store, row.pid, row.id)
    if row.registration.kind == "tool":
        left = sum(isinstance(step, Begun) for step in steps)  # each is an attempt that its worker left in the middle
        _explain(count, f"survey {row.id}", 1 + repeats + left, ended, ledger)
        return
    repeats += sum(getattr(step, "repeated", 0) for step in steps)
    if row.id.startswith("a-"):
        for number in (0, 1):
            _explain(count, f"part {row.id}.{number}", 1 + repeats, ended, ledger)
        _explain(count, f"end {row.id}", 1, ended and "unknown" not in _value(row), ledger)


def _explain(count: Count, line: str, most: int, known: bool, ledger: Counter[str]) -> None:
    effects = ledger.pop(line, 0)
    count.repeated += max(0, effects - 1)
    if effects > most or (known and effects == 0):
        count.problems.append(f"{line}: {effects} effects, at most {most}, known: {known}")


def _acknowledged(
    folder: Path, count: Count, calls: dict[str, ToolRecord], turns: set[str], rows: dict[str, ProcessRow]
) -> None:
    """What was told to somebody is so."""
    tried = set(lines(folder / "tried"))
    heard = {name: _value(row) for name, row in rows.items() if name.startswith("c") and _value(row) is not None}
    for name, amounts in heard.items():
        if len(set(amounts)) != len(amounts) or not {f"signal {name} {each}" for each in amounts} <= tried:
            count.problems.append(f"{name} heard of what was never said, or of something twice: {amounts}")
    for line in lines(folder / "told"):
        what, name, *more = line.split(" ")
        match what:
            case "turn" | "fork":
                fine = name in turns or what == "fork"
            case "same":
                fine = name == more[0]
            case "process":
                fine = name in rows
            case "signal":
                fine = name not in heard or int(more[0]) in heard[name]
            case "denied":
                fine = name in calls and isinstance(calls[name].outcome, Denied)
            case _:
                fine = name in calls and calls[name].outcome == Ok(more[0])
        if not fine:
            count.problems.append(f"acknowledged, and not so: {line}: {calls.get(name)}")


def _value(row: ProcessRow) -> Any:
    outcome = row.record.outcome
    return outcome.value if isinstance(outcome, Success) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    wanted = parser.parse_args()
    print(f"soak of all verbs: {wanted.minutes:g} minutes, seed {wanted.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="perdure-soak-") as folder:
        count = soak(Path(folder), wanted.minutes * 60, wanted.seed)
    return report(count)


if __name__ == "__main__":
    sys.exit(main())
