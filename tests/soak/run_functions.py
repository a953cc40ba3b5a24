"""The part of `make soak` about durable functions: two workers on one store, killed at random moments again and again.

    python tests/soak/run_functions.py [--kills N] [--seed N] [--processes N]

What the counters must end with is known beforehand. Besides that, everything is counted from outside: nothing that was
acknowledged may be lost, nothing paid twice, nothing added more often than the journal says.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from perdure.model.process import ProcessRow, Success  # noqa: E402  # found through the line above
from perdure.model.record import Done  # noqa: E402
from perdure.model.write import ProcessFilter  # noqa: E402
from perdure.processes.run import load_steps  # noqa: E402
from perdure.stores.sqlite import SqliteStore  # noqa: E402
from tests.soak.functions import sums  # noqa: E402
from tests.soak.lane import lines, report  # noqa: E402

WORKERS = 2
PATIENCE = 300.0


@dataclass
class Count:
    """What was found. `problems` are broken promises."""

    kills: int = 0
    rounds: int = 0
    acknowledged: int = 0
    completed: int = 0
    effects: int = 0
    repeated: int = 0
    unknown: int = 0
    takeovers: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills: {self.acknowledged} processes acknowledged, {self.completed} completed after "
            f"{self.takeovers} takeovers, {self.effects} effects; {self.repeated} repeated as allowed, "
            f"{self.unknown} declared unknown, {len(self.problems)} broken promises"
        )


class Workers:
    """The processes that do the work, and what becomes of them."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count
        self.running = [self._start() for _ in range(WORKERS)]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.soak.functions", str(self._folder), str(self._count)]
        with open(self._folder / "log", "ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    @property
    def over(self) -> bool:
        return all(each.poll() is not None for each in self.running)

    def kill(self, which: int) -> bool:
        """Kill one that is at work, and start another in its place. False when it had ended by itself."""
        victim = self.running[which]
        if victim.poll() is not None:
            return False
        victim.kill()
        victim.wait()
        self.running[which] = self._start()
        return True

    def await_work(self, which: int) -> None:
        """Until it is past its start: to kill it before is easy, and proves little."""
        worker, until = self.running[which], time.monotonic() + PATIENCE
        ready = self._folder / f"ready-{worker.pid}"
        while not ready.exists() and worker.poll() is None and time.monotonic() < until:
            time.sleep(0.01)

    def finish(self) -> list[int]:
        return [each.wait(timeout=PATIENCE) for each in self.running]

    def stop(self) -> None:
        for each in self.running:
            if each.poll() is None:
                each.kill()
                each.wait()


def soak(folder: Path, kills: int, seed: int, processes: int) -> Count:
    """Kill workers `kills` times at random moments, let them end, and count; again where they get through before."""
    dice, count = random.Random(seed), Count()
    while count.kills < kills:
        count.rounds += 1
        place = folder / f"round-{count.rounds}"
        place.mkdir()
        _round(place, kills, dice, processes, count)
    return count


def _round(folder: Path, kills: int, dice: random.Random, processes: int, count: Count) -> None:
    workers = Workers(folder, processes)
    try:
        while count.kills < kills and not workers.over:
            which = dice.randrange(WORKERS)
            workers.await_work(which)
            time.sleep(dice.random() * 0.4)
            count.kills += workers.kill(which)
            if sys.stderr.isatty():
                print(f"\r{count.kills} of {kills} kills", end="", file=sys.stderr, flush=True)
        statuses = workers.finish()
    finally:
        workers.stop()
    if any(statuses):
        log = (folder / "log").read_text()[-2000:]
        count.problems.append(f"the workers ended with {statuses}\n{log}")
    asyncio.run(tally(folder, count, processes))


async def tally(folder: Path, count: Count, processes: int) -> None:
    ledger = Counter(lines(folder / "ledger"))
    acknowledged = set(lines(folder / "acknowledged"))
    count.acknowledged += len(acknowledged)
    count.effects += ledger.total()
    store = SqliteStore(folder / "agent.db")
    await store.open()
    try:
        rows = {row.id: row for row in await store.processes(ProcessFilter(limit=10 * processes))}
        for row in rows.values():
            count.takeovers += row.attempts - 1
            if not isinstance(row.record.outcome, Success):
                count.problems.append(f"{row.id} is {row.status}: {row.record.outcome} {row.stuck}")
            elif row.id.startswith("a"):
                count.completed += 1
                _check_adder(count, row, (await load_steps(store, row.pid, row.id))[0], ledger)
    finally:
        await store.close()
    for process_id, wanted in sums(processes).items():
        outcome = rows[process_id].record.outcome
        if isinstance(outcome, Success) and outcome.value != wanted:
            count.problems.append(f"counter {process_id} has {outcome.value}, not {wanted}")
    count.problems += [f"acknowledged {each} is lost" for each in sorted(acknowledged - rows.keys())]
    count.problems += [f"effect without a record: {line}" for line in ledger if ledger[line] > 0]


def _check_adder(count: Count, row: ProcessRow, records: Sequence[object], ledger: Counter[str]) -> None:
    """Every effect of an adder is explained by its journal; what is explained is taken off the ledger."""
    number = row.id.removeprefix("a")
    done = {record.key: record for record in records if isinstance(record, Done)}
    for part in (0, 1):
        record, effects = done[f"1.{part}.1"], ledger.pop(f"add {number}.{part}", 0)
        count.repeated += max(0, effects - 1)
        if not 1 <= effects <= 1 + record.repeated:
            count.problems.append(f"{row.id} added {effects} times, {record.repeated} repeats declared")
    paid, outcome = ledger.pop(f"pay {number}", 0), row.record.outcome
    known = isinstance(outcome, Success) and outcome.value == "paid"
    count.unknown += not known
    if paid > 1 or (known and paid == 0):
        count.problems.append(f"{row.id} paid {paid} times and says {outcome}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--processes", type=int, default=1000)
    wanted = parser.parse_args()
    print(f"soak of durable functions: {wanted.kills} kills, seed {wanted.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="perdure-soak-") as folder:
        count = soak(Path(folder), wanted.kills, wanted.seed, wanted.processes)
    return report(count)


if __name__ == "__main__":
    sys.exit(main())
