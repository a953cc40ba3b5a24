"""A program whose plugin starts a monitor with its session, for tests that kill it: `plugged.py STORE SCRIPT`."""

import asyncio
import sys
from collections.abc import Iterable

from perdure import Agent, Plugin, Runtime
from perdure.model.monitor import MonitorSpec
from perdure.plugins import SessionContext
from perdure.testing import FunctionModel


class Watching(Plugin):
    """Offers the monitors that it is made with."""

    id = "ops"

    def __init__(self, *specs: MonitorSpec) -> None:
        self.specs = specs

    def monitors(self, ctx: SessionContext) -> Iterable[MonitorSpec]:
        return self.specs


def starting(script: str) -> MonitorSpec:
    """A monitor that starts with its session."""
    command = ["sh", "-c", script]
    return MonitorSpec("log", command, persistent=True, wake="none", batch=0.02, arm_on="session_start")


def agent(*specs: MonitorSpec) -> Agent[str]:
    return Agent(FunctionModel(lambda request: "I see."), name="ear", plugins=[Watching(*specs)])


async def main(store: str, script: str) -> None:
    async with Runtime(store, agents=[agent(starting(script))]) as runtime:
        session = await runtime.session("chat")
        await session.run("hello")
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
