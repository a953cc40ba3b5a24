"""The process that is killed: eight sessions of inputs with keys, two tools with different contracts, a ledger outside.

    python -m tests.soak.program FOLDER INPUTS

It says every input again after each start, under the same key, and notes each acknowledgement in a file of its own.
Told to end (SIGTERM), it leaves its Runtime and ends with status 0; `ready-<pid>` is there once it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from perdure import Agent, ModelRequest, Runtime, ToolCall, ToolContext, tool
from perdure.testing import FunctionModel

SESSIONS = 8
LASTS = 0.02
"""Seconds that a tool goes on after its effect: long enough for an end to fall there."""


def append(path: Path, line: str) -> None:
    """One line, whole and on disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{line}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def agent(folder: Path) -> Agent[str]:
    ledger = folder / "ledger"

    @tool
    async def pay(order: str, ctx: ToolContext[None]) -> str:
        append(ledger, f"pay {ctx.idempotency_key}")
        await asyncio.sleep(LASTS)
        return f"paid {order}"

    @tool(recovery="rerun")
    def note(order: str, ctx: ToolContext[None]) -> str:
        append(ledger, f"note {ctx.idempotency_key}")
        time.sleep(LASTS)
        return f"noted {order}"

    def model(request: ModelRequest) -> str | list[ToolCall]:
        if request.messages[-1].role == "tool":
            return "done"
        order = {"order": request.messages[-1].text}
        return [ToolCall("p", "pay", order), ToolCall("n", "note", order)]

    return Agent(FunctionModel(model), tools=[pay, note])


async def main(folder: Path, inputs: int) -> None:
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    (folder / f"ready-{os.getpid()}").touch()
    async with Runtime(folder / "agent.db", agents=[agent(folder)]) as runtime:

        async def talk(number: int) -> None:
            session = await runtime.session(f"s{number}")
            await session.resume()
            for i in range(number, inputs, SESSIONS):
                receipt = await session.send(f"order {i}", key=f"k{i}")
                append(folder / "acknowledged", f"{i} {receipt.turn_id}")
                await receipt.result()

        await asyncio.gather(*(talk(n) for n in range(SESSIONS)))
        await runtime.wait_idle()


if __name__ == "__main__":
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
