"""A real worker process for the tests of suspects: `python -m tests.crash.suspects <folder> <what>`.

It starts what it is asked to, under the same ids every time, and leaves when nothing is left to do. What kills, kills
this process shortly after it has begun.

process     a process that kills, and one that takes a while
turn        a process that kills, and a turn whose model takes a while
poison      a turn whose tool kills, and a process that takes a while
two         two processes that kill, and one that takes a while
pid         a process that kills in one Runtime, and one that takes a while in another of the same OS process
slow        a process that kills, and one that ends when the other has killed five times
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from perdure import Agent, ModelRequest, Process, ProcessContext, Runtime, ToolCall, process, tool
from perdure.testing import FunctionModel
from perdure.testing.crash import Ledger, LedgerLine

SHORTLY = 0.15
A_WHILE = 0.6
DEATHS = 5


class Outside:
    """What happens outside, told in a ledger."""

    def __init__(self, folder: Path) -> None:
        self.store, self._ledger = folder / "agent.db", folder / "ledger"

    def note(self, name: str) -> None:
        Ledger(self._ledger).write(LedgerLine(name, "", os.getpid()))

    def count(self, name: str) -> int:
        return sum(line.name == name for line in Ledger(self._ledger).lines())

    async def kill(self, name: str) -> None:
        self.note(name)
        await asyncio.sleep(SHORTLY)
        os.kill(os.getpid(), signal.SIGKILL)

    async def work(self, name: str) -> str:
        self.note(name)
        await asyncio.sleep(A_WHILE)
        return "done"

    async def outlast(self, name: str) -> str:
        self.note(name)
        while self.count("bad") < DEATHS:  # noqa: ASYNC110  # what other processes did is seen by looking
            await asyncio.sleep(0.05)
        return "done"


@process
async def bad(ctx: ProcessContext[Outside]) -> None:
    await ctx.step(ctx.deps.kill, ctx.process_id, recovery="rerun")


@process
async def good(ctx: ProcessContext[Outside]) -> str:
    return await ctx.step(ctx.deps.work, ctx.process_id, recovery="rerun")


@process
async def slow(ctx: ProcessContext[Outside]) -> str:
    return await ctx.step(ctx.deps.outlast, ctx.process_id, recovery="rerun")


def agent_of(outside: Outside, poison: bool) -> Agent[str]:
    @tool(recovery="rerun")
    async def taste() -> str:
        """Taste it."""
        await outside.kill("bad")
        return "sweet"

    async def answer(request: ModelRequest) -> Any:
        return [ToolCall("c", "taste")] if poison else await outside.work("turn")

    return Agent(FunctionModel(answer), name="agent", tools=[taste])


STARTED: dict[str, list[tuple[Any, str]]] = {
    "process": [(bad, "bad"), (good, "good")],
    "turn": [(bad, "bad")],
    "poison": [(good, "good")],
    "two": [(bad, "bad"), (bad, "bad-2"), (good, "good")],
    "pid": [(bad, "bad")],
    "slow": [(slow, "slow"), (bad, "bad")],
}


async def main(folder: Path, what: str) -> None:
    outside = Outside(folder)
    functions: list[Process[..., Any]] = [bad, slow] if what == "pid" else [bad, good, slow]
    async with contextlib.AsyncExitStack() as entered:
        agents = [agent_of(outside, what == "poison")]
        first = await entered.enter_async_context(
            Runtime(outside.store, agents=agents, processes=functions, deps=outside)
        )
        second = first
        if what == "pid":
            second = await entered.enter_async_context(Runtime(outside.store, processes=[good], deps=outside))
            await second.start(good, id="good")
        for function, name in STARTED[what]:
            await first.start(function, id=name)
        if what in ("turn", "poison"):
            await (await first.session("s")).send("go", key="1")
        await asyncio.gather(first.wait_idle(), second.wait_idle())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
