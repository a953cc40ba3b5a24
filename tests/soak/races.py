"""A part of `make soak`: one process completes its work while another cancels it, a thousand times.

    python tests/soak/races.py [--races N]

Whoever comes first decides how it ends; the other is told so. Both are real processes on one file.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from perdure.model.process import TERMINAL, Cancelled, ProcessRow, Success  # noqa: E402  # found through the line above
from perdure.stores.sqlite import SqliteStore  # noqa: E402
from tests.crash.children import child, count  # noqa: E402
from tests.crash.process_worker import Outside  # noqa: E402
from tests.soak.lane import report  # noqa: E402


@dataclass
class Count:
    """What was found. `late`: asked to cancel what had ended. `problems` are broken promises."""

    completed: int = 0
    cancelled: int = 0
    late: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.completed + self.cancelled} races of cancel and completion: {self.completed} completed, "
            f"{self.cancelled} cancelled, {self.late} asked too late, {len(self.problems)} broken promises"
        )


def race(folder: Path, races: int) -> Count:
    """Let two processes race, and compare what each was told with what is on disk."""
    found = Count()
    with child("race", folder, races) as runner, child("cancel", folder, races) as canceller:
        ran = [line for line in runner.rest() if line.startswith("p-")]
        asked = [line for line in canceller.rest() if line.startswith("p-")]
        if (runner.wait(), canceller.wait()) != (0, 0):
            found.problems.append("a process ended by a fault")
    told = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in ran}
    answers = {line.split(" ", 3)[0]: line.split(" ", 3)[1:] for line in asked}
    if len(told) != races or len(answers) != races:
        found.problems.append(f"{races} races, {len(told)} seen by one and {len(answers)} by the other")
    asyncio.run(_judge(found, Outside(folder), told, answers))
    return found


async def _judge(found: Count, outside: Outside, told: dict[str, str], answers: dict[str, list[str]]) -> None:
    effects = count(outside, "add")
    store = SqliteStore(outside.store)
    await store.open()
    try:
        for _, row in await store.changes(0, 1_000_000):
            ends = [event.type for _, _, event in await store.events(row.pid) if event.type in ENDS]
            asked, again, outcome = answers.get(row.id, ["", "", ""])
            if len(ends) != 1 or not told.get(row.id) == outcome == repr(row.record.outcome) or again != "ended":
                found.problems.append(f"{row.id}: {ends}, {row.record.outcome}, {told.get(row.id)}, {answers[row.id]}")
            _sort(found, row, asked, effects)
    finally:
        await store.close()


ENDS = {f"process.{status}" for status in TERMINAL}


def _sort(found: Count, row: ProcessRow, asked: str, effects: Counter[str]) -> None:
    number = int(row.id.removeprefix("p-"))
    done = effects[f"{row.id} {number}"]
    match row.record.outcome:
        case Success(value):
            found.completed += 1
            fine = value == number and done == 1
        case Cancelled(by="host", reason="race"):
            found.cancelled += 1
            fine = asked == "requested" and done <= 1
        case _:
            fine = False
    found.late += asked == "ended"
    if not fine:
        found.problems.append(f"{row.id}: {row.record.outcome} after {done} effects, the cancel was {asked}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=1000)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perdure-races-") as folder:
        found = race(Path(folder), wanted.races)
    return report(found)


if __name__ == "__main__":
    sys.exit(main())
