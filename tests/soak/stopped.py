"""The worker that is told to stop under load: `perdure worker tests.soak.stopped:runtime --ready-file …`.

Each turn streams its text, runs an async and a sync tool of one second side by side, then one that waits for a command.
A durable function does three steps of half a second. The folder is named by the variable FOLDER; every call writes its
key and the time to a ledger there, when it begins and when it ends.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from perdure import Agent, ModelRequest, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.engine.lease import LeaseTerms
from perdure.errors import OutcomeUnknown
from perdure.testing import FunctionModel
from tests.soak.program import append

LASTS = {"pay": 1.0, "note": 1.0, "build": 0.3, "step": 0.5}
"""Seconds that each kind of call takes."""
STEPS = 3
WORDS = ("It ", "is ", "done", ".")


def tell(what: str, name: str) -> None:
    append(Path(os.environ["FOLDER"]) / "ledger", f"{what} {name} {time.monotonic():.3f}")


@tool
async def pay(order: str, ctx: ToolContext[None]) -> str:
    tell("begin", f"pay {ctx.idempotency_key}")
    await asyncio.sleep(LASTS["pay"])
    tell("end", f"pay {ctx.idempotency_key}")
    return f"paid {order}"


@tool
def note(order: str, ctx: ToolContext[None]) -> str:
    tell("begin", f"note {ctx.idempotency_key}")
    time.sleep(LASTS["note"])  # load of the soak: a sync tool that blocks its thread while the worker is stopped
    tell("end", f"note {ctx.idempotency_key}")
    return f"noted {order}"


@tool
async def build(ctx: ToolContext[None]) -> str:
    tell("begin", f"build {ctx.idempotency_key}")
    job = await ctx.command(["sleep", str(LASTS["build"])])
    code = (await job.result()).exit_code
    tell("end", f"build {ctx.idempotency_key}")
    return f"exit {code}"


@process
async def chore(ctx: ProcessContext[None], n: int) -> list[str]:
    async def work(part: int) -> str:
        tell("begin", f"step c{n}.{part}")
        await asyncio.sleep(LASTS["step"])
        tell("end", f"step c{n}.{part}")
        return "done"

    found = []
    for part in range(STEPS):
        try:
            found.append(await ctx.step(work, part, recovery="once"))
        except OutcomeUnknown:
            found.append("unknown")
    return found


async def model(request: ModelRequest) -> AsyncIterator[str | ToolCall]:
    said = request.messages[-1]
    if said.role != "tool":
        yield ToolCall("p", "pay", {"order": said.text})
        yield ToolCall("n", "note", {"order": said.text})
    elif said.tool_results[0].name != "build":
        yield ToolCall("b", "build", {})
    else:
        for word in WORDS:
            await asyncio.sleep(0.02)  # load of the soak: a stream that is under way when the signal comes
            yield word


def runtime() -> Runtime:
    agent = Agent(FunctionModel(model), name="clerk", tools=[pay, note, build])
    terms = LeaseTerms(term=3.0, renewal=0.5)
    return Runtime(Path(os.environ["FOLDER"]) / "agent.db", agents=[agent], processes=[chore], lease=terms)
