"""A part of `make soak`: `perdure worker` is told to stop (SIGTERM) at a random moment under load, fifty times.

    python tests/soak/run_stops.py [--stops N] [--seed N]

Every time: it ends with status 0 within its grace period and five seconds, its ready file is gone, no call that would
have ended within the grace period is unknown, no call is made twice, and a second worker ends all that was accepted,
also what was said while the first one drained.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from perdure import Runtime  # noqa: E402  # found through the line above
from perdure.model.outcome import Finished  # noqa: E402
from perdure.model.tool import Ok, OutcomeUnknown  # noqa: E402
from perdure.sessions.result import TurnResult  # noqa: E402
from perdure.sessions.session import Receipt  # noqa: E402
from tests.kit import until  # noqa: E402
from tests.soak.lane import lines, report  # noqa: E402
from tests.soak.stopped import LASTS, STEPS, WORDS  # noqa: E402

SESSIONS, INPUTS, CHORES = 4, 8, 4
BUSY = 3.0
"""Seconds of load within which the signal falls."""
LATE = 5.0
"""Seconds after its grace period within which a worker ends."""
ENDS_WITHIN = 120.0
SLACK = 1.0
"""Seconds by which a call may take longer than it should on a busy machine."""


@dataclass
class Count:
    """What was found. `problems` are broken promises."""

    stops: int = 0
    calls: int = 0
    unknown: int = 0
    longest: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.stops} stops: {self.calls} calls, {self.unknown} cut off by the grace period and unknown, "
            f"at most {self.longest:.1f} s after a grace period, {len(self.problems)} broken promises"
        )


async def start(folder: Path, grace: float) -> asyncio.subprocess.Process:
    """A worker that accepts work."""
    ready = folder / "ready"
    command = [
        "-m",
        "perdure",
        "worker",
        "tests.soak.stopped:runtime",
        "--ready-file",
        str(ready),
        "--grace",
        f"{grace}",
    ]
    log = (folder / "log").open("ab")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, env=os.environ | {"FOLDER": str(folder)}, stdout=log, stderr=log
    )
    log.close()
    await until(lambda: ready.exists() or process.returncode is not None)
    return process


async def stop(count: Count, folder: Path, process: asyncio.subprocess.Process, grace: float) -> float:
    """Send SIGTERM and wait for the end of the worker; returns when the signal was sent."""
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    try:
        status = await asyncio.wait_for(process.wait(), grace + LATE)
    except TimeoutError:
        count.problems.append(f"told to stop, it was still there {LATE:g} s after its grace of {grace:g} s")
        process.kill()
        await process.wait()
    else:
        count.longest = max(count.longest, time.monotonic() - sent - grace)
        if status != 0:
            count.problems.append(f"told to stop, it ended with status {status}: {lines(folder / 'log')[-3:]}")
    if (folder / "ready").exists():
        count.problems.append("its ready file is still there")
    return sent


async def stop_under_load(count: Count, folder: Path, seed: int) -> None:
    """Put a worker under load, stop it at a moment drawn from the seed, let another one end the work, and count."""
    dice = random.Random(seed)
    grace = dice.choice([0.3, 1.5, 20.0, 20.0])
    process = await start(folder, grace)
    async with Runtime(folder / "agent.db", recover=False) as front:

        async def say(number: int) -> Receipt:
            session = await front.session(f"s{number % SESSIONS}", agent="clerk")
            return await session.send(f"order {number}", key=f"k{number}")

        async def stream() -> TurnResult[str]:
            session = await front.session("streamed", agent="clerk")
            async with session.stream("order of the stream", key="stream") as turn:
                async for _ in turn:
                    pass
                return await turn.result()

        reading = asyncio.create_task(stream())
        receipts = [await say(number) for number in range(INPUTS)]
        handles = [await front.start("chore", {"n": n}, id=f"c{n}") for n in range(CHORES)]
        try:
            await asyncio.wait_for(process.wait(), dice.random() * BUSY)
        except TimeoutError:
            pass
        else:
            count.problems.append(f"the worker ended by itself: {lines(folder / 'log')[-3:]}")
            return
        stopping = asyncio.create_task(stop(count, folder, process, grace))
        receipts.append(await say(INPUTS))  # to a worker that drains
        sent = await stopping
        count.stops += 1

        second = await start(folder, 20.0)
        async with asyncio.timeout(ENDS_WITHIN):
            results = [await receipt.result() for receipt in receipts]
            results.append(await reading)
            steps = {
                f"step c{n}.{part}": done for n in range(CHORES) for part, done in enumerate(await handles[n].result())
            }
        await stop(count, folder, second, 20.0)
        tally(count, folder, results, steps, sent + grace, front.store.identity())


def tally(
    count: Count, folder: Path, results: list[TurnResult[str]], steps: dict[str, str], end: float, store_id: str
) -> None:
    """Compare the ledger with the outcomes. `end` is when the grace period was over."""
    begun: dict[str, float] = {}
    times = Counter[str]()
    for line in lines(folder / "ledger"):
        what, kind, key, at = line.split(" ")
        if what == "begin":
            times[f"{kind} {key}"] += 1
            begun[f"{kind} {key}"] = float(at)
    count.problems += [f"{name} was made {many} times" for name, many in times.items() if many > 1]
    ends = dict(steps)
    for result in results:
        if result.outcome != Finished("".join(WORDS)) or len(result.tool_calls) != len(LASTS) - 1:
            count.problems.append(f"{result.turn_id} ended as {result.outcome} with {len(result.tool_calls)} calls")
        for call in result.tool_calls:
            word = {Ok: "done", OutcomeUnknown: "unknown"}.get(type(call.outcome), str(call.outcome))
            ends[f"{call.tool} {store_id}.{call.call_id}"] = word
    count.calls += len(ends)
    for name, word in ends.items():
        count.unknown += word == "unknown"
        if word not in ("done", "unknown") or (word == "done") > times[name]:
            count.problems.append(f"{name} ended as {word} after {times[name]} effects")
        elif word == "unknown" and begun[name] + LASTS[name.partition(" ")[0]] + SLACK < end:
            count.problems.append(f"{name} is unknown and would have ended {end - begun[name]:.1f} s before the end")
    if len(steps) != CHORES * STEPS:
        count.problems.append(f"{len(steps)} steps ended")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    wanted = parser.parse_args()
    print(f"stops: {wanted.stops}, seed {wanted.seed}", flush=True)
    count = Count()
    for seed in range(wanted.seed, wanted.seed + wanted.stops):
        before = len(count.problems)
        with tempfile.TemporaryDirectory(prefix="perdure-stops-") as folder:
            asyncio.run(stop_under_load(count, Path(folder), seed))
        count.problems[before:] = [f"seed {seed}: {problem}" for problem in count.problems[before:]]
    return report(count)


if __name__ == "__main__":
    sys.exit(main())
