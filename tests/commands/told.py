"""A real host whose command is watched, to be killed: `python -m tests.commands.told <store> <point>`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from perdure import Agent, Runtime
from perdure.model.monitor import MATCHED, Watch
from perdure.model.write import Advance, Commit, Deliver, Write
from perdure.testing import FunctionModel
from tests.commands import host

STEPS = ("matched", "outcome", "deliver", "commit")
"""The writes between a line of a command, its end, and the turns that tell of them."""


def agent() -> Agent[str]:
    return Agent(FunctionModel(lambda request: "I see."), name="ear")


class MortalStore(host.MortalStore):
    def step_of(self, write: Write[Any]) -> str:
        if isinstance(write, Deliver):
            return "deliver"
        if isinstance(write, Commit):
            return "commit"
        if isinstance(write, Advance) and any(event.type == MATCHED for event in write.events):
            return "matched"
        return host.step_of(write)


async def main(store: str, point: str) -> None:
    async with Runtime(MortalStore(store, point), agents=[agent()]) as runtime:
        session = await runtime.session("chat")
        script = "echo fine; echo FAILED one; exit 3"
        await session.command(["sh", "-c", script], key="c", watch=Watch(match=("FAILED*",)))
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
