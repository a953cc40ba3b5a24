"""Speaks to a session that others speak to as well: `python -m tests.crash.speaker <name> <store> <ledger>`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from perdure import Agent, Runtime, ToolContext, tool
from perdure.testing.crash import Ledger, LedgerLine
from tests.kit import agent_calling

INPUTS = 25


def agent_for(ledger: Path) -> Agent[str]:
    @tool
    async def work(ctx: ToolContext[Any]) -> str:
        """Work."""
        Ledger(ledger).write(LedgerLine("work", ctx.idempotency_key, os.getpid()))
        return "worked"

    return agent_calling("work", name="worker", tools=[work])


async def speak(name: str, store: str, ledger: Path) -> None:
    async with Runtime(store, agents=[agent_for(ledger)]) as runtime:
        session = await runtime.session("shared")
        for number in range(INPUTS):
            result = await session.run(f"{name} {number}", key=f"{name} {number}")
            print(result.turn_id, result.text, flush=True)


if __name__ == "__main__":
    asyncio.run(speak(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
