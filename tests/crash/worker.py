"""A real worker process for the ownership tests: `python -m tests.crash.worker <what> <store> <ledger>`.

hold        begin a turn whose tool waits for the file `<ledger>.go`, and say so
open        begin 50 turns whose model never answers, and say so
both        begin a turn whose model never answers and a process whose step never ends, and say so
take        take over whatever is open, finish it, and leave
approve     approve whatever waits in session "s"
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from perdure import Agent, ModelRequest, ProcessContext, ToolCall, ToolContext, process, tool
from perdure.engine.lease import LeaseTerms
from perdure.runtime import Runtime
from perdure.testing import FunctionModel
from perdure.testing.crash import Ledger, LedgerLine
from tests.kit import print_line, until

SHORT = LeaseTerms(term=3, renewal=0.5)
SESSIONS = 50


def write(ledger: Path, name: str, key: str) -> None:
    Ledger(ledger).write(LedgerLine(name, key, os.getpid()))


def agent_for(ledger: Path, *, wait: bool = False, silent: bool = False, approval: bool = False) -> Agent[str]:
    """Asks for one tool, then answers. The tool waits for the file `<ledger>.go` if it should."""

    @tool(recovery="rerun", approval="ask" if approval else "never")
    async def work(ctx: ToolContext[Any]) -> str:
        """Work."""
        write(ledger, "begun", ctx.idempotency_key)
        await until(lambda: not wait or Path(f"{ledger}.go").exists())
        write(ledger, "work", ctx.idempotency_key)
        return f"done by {os.getpid()}"

    async def answer(request: ModelRequest) -> Any:
        write(ledger, "model", request.call_id)
        if silent:
            await asyncio.Event().wait()
        results = [r for m in request.messages for r in m.tool_results]
        return str(results[0].content) if results else [ToolCall("c", "work")]

    return Agent(FunctionModel(answer), name="worker", tools=[work])


async def hold(store: str, ledger: Path) -> None:
    async with Runtime(store, agents=[agent_for(ledger, wait=True)], lease=SHORT, grace=0.5) as runtime:
        session = await runtime.session("s")
        receipt = await session.send("go")
        await until(lambda: any(line.name == "begun" for line in Ledger(ledger).lines()))
        print_line("ready")
        result = await receipt.result()
        print_line(f"saw {result.text}")


async def open_many(store: str, ledger: Path) -> None:
    async with Runtime(store, agents=[agent_for(ledger, silent=True)]) as runtime:
        for number in range(SESSIONS):
            session = await runtime.session(f"s-{number:02}")
            await session.send("go")
        await until(lambda: sum(line.name == "model" for line in Ledger(ledger).lines()) == SESSIONS)
        print_line("ready")
        await asyncio.Event().wait()


@process
async def stepping(ctx: ProcessContext[dict[str, Any]]) -> str:
    return await ctx.step(step, ctx.deps["ledger"], ctx.deps["silent"], recovery="rerun")


async def step(ledger: str, silent: bool) -> str:
    write(Path(ledger), "step", "p")
    if silent:
        await asyncio.Event().wait()
    return f"done by {os.getpid()}"


async def both(store: str, ledger: Path) -> None:
    deps = {"ledger": str(ledger), "silent": True}
    async with Runtime(store, agents=[agent_for(ledger, silent=True)], processes=[stepping], deps=deps) as runtime:
        await (await runtime.session("s")).send("go")
        await runtime.start(stepping, id="p")
        await until(lambda: {"model", "step"} <= {line.name for line in Ledger(ledger).lines()})
        print_line("ready")
        await asyncio.Event().wait()


async def take(store: str, ledger: Path) -> None:
    print_line("ready")
    await until(lambda: Path(f"{ledger}.go").exists())
    async with Runtime(store, agents=[agent_for(ledger)]) as runtime:
        await runtime.wait_idle(timeout=60)


async def approve(store: str, ledger: Path) -> None:
    async with Runtime(store) as runtime:
        session = await runtime.session("s")
        for pending in await session.pending():
            await session.approve(pending.call_id)


if __name__ == "__main__":
    commands = {"hold": hold, "open": open_many, "both": both, "take": take, "approve": approve}
    asyncio.run(commands[sys.argv[1]](sys.argv[2], Path(sys.argv[3])))
