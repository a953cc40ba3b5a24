"""A worker whose model speaks at the pace that a test sets: `python -m tests.observe.speaking_worker <folder>`.

An input says how many pieces the answer has, and after which of them the model waits until the file `go` is there.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from perdure import Agent, ModelRequest, Runtime
from perdure.testing import FunctionModel
from tests.kit import print_line, until


def speaker(folder: Path) -> Agent[str]:
    async def speak(request: ModelRequest) -> AsyncIterator[str]:
        count, hold = map(int, request.messages[-1].text.split())
        for n in range(count):
            yield f"{n} "
            await asyncio.sleep(0)
            if n == hold:
                await until((folder / "go").exists)

    return Agent(FunctionModel(speak), name="speaker")


async def work(folder: Path) -> None:
    async with Runtime(folder / "agent.db", agents=[speaker(folder)]) as runtime:
        print_line(runtime._worker.id)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1])))
