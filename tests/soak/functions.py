"""A worker that is killed: durable functions that add known amounts to counters, which are durable functions too.

    python -m tests.soak.functions FOLDER COUNT

Adder `a<n>` adds to counter `c<n % KEYS>`, twice, in two branches, and pays once outside. A counter is a loop that
keeps its sum in checkpoints, and ends when it has heard of every adder. Several of these processes may run at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from perdure import ProcessContext, Runtime, process
from perdure.engine.lease import LeaseTerms
from perdure.errors import OutcomeUnknown
from tests.soak.program import append

KEYS = 10
ROUND = 16
"""Amounts that a counter hears of between two checkpoints."""
AT_ONCE = 8
WORK = 0.05
"""Seconds that a step takes, half of them before its effect: most kills shall find one under way."""


class Outside:
    """What the steps act on."""

    def __init__(self, folder: Path) -> None:
        self.ledger = folder / "ledger"
        self.runtime: Runtime | None = None

    async def add(self, key: int, amount: int, once: str) -> None:
        """Repeated, it is the same signal: its key says so."""
        await asyncio.sleep(WORK / 2)
        append(self.ledger, f"add {once}")
        assert self.runtime is not None
        await self.runtime.handle(f"c{key}").signal("add", amount, key=once)
        await asyncio.sleep(WORK / 2)

    def pay(self, n: int) -> str:
        time.sleep(WORK / 2)
        append(self.ledger, f"pay {n}")
        time.sleep(WORK / 2)
        return "paid"


Ctx = ProcessContext[Outside]


@process
async def counter(ctx: Ctx, expected: int) -> int:
    total, heard = ctx.state or [0, 0]
    while heard < expected:
        for _ in range(min(ROUND, expected - heard)):
            total += await ctx.wait_signal("add", int)
            heard += 1
        await ctx.checkpoint([total, heard])
    return total


@process
async def adder(ctx: Ctx, n: int) -> str:
    async def add(part: int) -> None:
        await ctx.step(ctx.deps.add, n % KEYS, amounts(n)[part], f"{n}.{part}", name="add", recovery="rerun")

    await ctx.gather(add(0), add(1))
    await ctx.sleep(WORK)
    try:
        return await ctx.step(ctx.deps.pay, n, name="pay", recovery="once")
    except OutcomeUnknown:
        return "unknown"


def amounts(n: int) -> tuple[int, int]:
    return n + 1, 7 * n % 100


def sums(count: int) -> dict[str, int]:
    """What every counter must end with."""
    found = {f"c{key}": 0 for key in range(KEYS)}
    for n in range(count):
        found[f"c{n % KEYS}"] += sum(amounts(n))
    return found


async def main(folder: Path, count: int) -> None:
    outside = Outside(folder)
    terms = LeaseTerms(term=15, renewal=0.5)  # who is killed is known to be dead; who is only slow is left alone
    async with Runtime(folder / "agent.db", processes=[counter, adder], deps=outside, lease=terms) as runtime:
        outside.runtime = runtime
        append(folder / f"ready-{os.getpid()}", "ready")
        expected = {key: 2 * len(range(key, count, KEYS)) for key in range(KEYS)}
        counters = [await runtime.start(counter, {"expected": expected[key]}, id=f"c{key}") for key in range(KEYS)]
        places = asyncio.Semaphore(AT_ONCE)

        async def begin(n: int) -> Any:
            async with places:
                handle = await runtime.start(adder, {"n": n}, id=f"a{n}")
                append(folder / "acknowledged", handle.id)
                return await handle.result()

        await asyncio.gather(*(begin(n) for n in range(count)))
        for handle in counters:
            await handle.result()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
