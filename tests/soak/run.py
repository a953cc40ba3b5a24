"""`make soak`: end a process at random moments, again and again, and count from outside what became of its work.

    python tests/soak/run.py [--kills N] [--leavings N] [--seed N] [--inputs N]

Some of the ends are kills (SIGKILL), some are orders to leave (SIGTERM), which must be obeyed at once and in peace.

Everything is counted from the ledger the tools write, the acknowledgements the program wrote, and the file itself:
nothing acknowledged may be lost, no `once` effect repeated, no `rerun` effect repeated more often than the store says.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from perdure.engine.journal import load_turns  # noqa: E402  # found through the line above
from perdure.graph.view import TurnView, turn_view  # noqa: E402
from perdure.model.outcome import Finished  # noqa: E402
from perdure.model.tool import Ok  # noqa: E402
from perdure.model.write import SessionFilter  # noqa: E402
from perdure.stores.sqlite import SqliteStore  # noqa: E402
from tests.soak.lane import lines, report  # noqa: E402

LEAVES_WITHIN = 60.0
"""Seconds: far more than leaving takes, so that only one that hangs is found."""
STARTS_WITHIN = 60.0


@dataclass
class Count:
    """What was found. `problems` are broken promises."""

    kills: int = 0
    leavings: int = 0
    acknowledged: int = 0
    turns: int = 0
    effects: int = 0
    repeated: int = 0
    unknown: int = 0
    lost: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.leavings} leavings: {self.acknowledged} inputs acknowledged, "
            f"{self.turns} turns committed, {self.effects} effects; "
            f"{self.lost} lost, {self.repeated} repeated as allowed, {self.unknown} declared unknown, "
            f"{len(self.problems)} broken promises"
        )


def start(folder: Path, inputs: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.soak.program", str(folder), str(inputs)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def soak(folder: Path, kills: int, leavings: int, seed: int, inputs: int) -> Count:
    """Kill the program and tell it to leave, so many times each, at random moments; let it end, and count."""
    dice, count = random.Random(seed), Count()
    while count.kills < kills or count.leavings < leavings:
        process = start(folder, inputs)
        left = kills - count.kills, leavings - count.leavings
        _await_start(folder / f"ready-{process.pid}", process)
        try:
            process.wait(timeout=dice.random() * 0.6)
        except subprocess.TimeoutExpired:
            if dice.randrange(sum(left)) < left[0]:
                process.kill()
                process.wait()
                count.kills += 1
            else:
                _tell_to_leave(process, count)
            if sys.stderr.isatty():
                ended = f"{count.kills} of {kills} kills, {count.leavings} of {leavings} leavings"
                print(f"\r{ended}", end="", file=sys.stderr, flush=True)
            continue
        if process.returncode != 0:
            count.problems.append(f"the program ended by itself with status {process.returncode}")
            break
        inputs += 50  # it got through: give it more to do
    if start(folder, inputs).wait(timeout=300) != 0:
        count.problems.append("the last run did not end well")
    asyncio.run(tally(folder, count))
    return count


def _await_start(ready: Path, process: subprocess.Popen[bytes]) -> None:
    """Until it listens: on a busy machine that takes longer than any moment that could be drawn."""
    until = time.monotonic() + STARTS_WITHIN
    while not ready.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)


def _tell_to_leave(process: subprocess.Popen[bytes], count: Count) -> None:
    process.terminate()
    try:
        status = process.wait(timeout=LEAVES_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        count.problems.append(f"told to leave, it was still there after {LEAVES_WITHIN:g} s")
        return
    if status == 0:
        count.leavings += 1
    elif status != -signal.SIGTERM:  # that is the interpreter's own end, before the program listened
        count.problems.append(f"told to leave, it ended with status {status}")


async def tally(folder: Path, count: Count) -> None:
    ledger = Counter(lines(folder / "ledger"))
    acknowledged = {line.split(" ")[1] for line in lines(folder / "acknowledged")}
    count.acknowledged, count.effects = len(acknowledged), ledger.total()
    store = SqliteStore(folder / "agent.db")
    await store.open()
    try:
        committed = set()
        for row in await store.sessions(SessionFilter(limit=1000)):
            if row.turn is not None:
                count.problems.append(f"turn {row.id}.{row.turn} is still open: {row.state} {row.reason}")
            for turn in await load_turns(store, row.sid, 1, row.head):
                committed.add(f"{row.id}.{turn.number}")
                _check(count, turn_view(f"{row.id}.{turn.number}", turn.records), ledger, store.identity())
    finally:
        await store.close()
    count.turns, count.lost = len(committed), len(acknowledged - committed)
    count.problems += [f"acknowledged {turn_id} is lost" for turn_id in sorted(acknowledged - committed)]
    count.problems += [f"effect without a record: {line}" for line in ledger if ledger[line] > 0]


def _check(count: Count, view: TurnView, ledger: Counter[str], store_id: str) -> None:
    """Every effect of a turn is explained by its records; what is explained is taken off the ledger."""
    if not isinstance(view.outcome, Finished):
        count.problems.append(f"a turn ended as {view.outcome}")
    for call in view.tool_calls:
        line = f"{call.tool} {store_id}.{call.call_id}"  # the idempotency key
        effects = ledger.pop(line, 0)
        known = isinstance(call.outcome, Ok)
        count.unknown += not known
        count.repeated += max(0, effects - 1)
        most = 1 + call.repeated if call.tool == "note" else 1
        if effects > most or (known and effects == 0):
            count.problems.append(f"{line}: {effects} effects, {call.repeated} repeats declared, {call.outcome}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--leavings", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--inputs", type=int, default=200)
    wanted = parser.parse_args()
    print(f"soak: {wanted.kills} kills, {wanted.leavings} leavings, seed {wanted.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="perdure-soak-") as folder:
        count = soak(Path(folder), wanted.kills, wanted.leavings, wanted.seed, wanted.inputs)
    return report(count)


if __name__ == "__main__":
    sys.exit(main())
