"""A program with a monitor, for tests that kill it: `python monitored.py STORE SCRIPT`."""

import asyncio
import sys

from perdure import Agent, Runtime
from perdure.model.monitor import MonitorSpec
from perdure.testing import FunctionModel


def agent() -> Agent[str]:
    return Agent(FunctionModel(lambda request: "I see."), name="ear")


async def main(store: str, script: str) -> None:
    async with Runtime(store, agents=[agent()]) as runtime:
        session = await runtime.session("chat")
        await session.monitor(MonitorSpec("counter", ["sh", "-c", script], persistent=True, batch=0.02))
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
