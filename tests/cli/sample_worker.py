"""Runtimes for the tests of `perdure worker`. The folder is named by the variable PLACE."""

import asyncio
import os
import threading
from pathlib import Path

from perdure import Agent, Runtime, ToolContext, tool
from tests.kit import agent_calling, print_line

helper = Agent("scripted", name="helper")


@tool
async def hang(ctx: ToolContext[None]) -> str:
    """Begin a thread that goes on when its call is cancelled."""
    print_line("hanging")
    await asyncio.to_thread(threading.Event().wait)
    return "never"


def working() -> Runtime:
    return Runtime(Path(os.environ["PLACE"]), agents=[helper, agent_calling("hang", tools=[hang], name="hanging")])


def other() -> int:
    return 1


place = os.environ.get("PLACE")
made = None if place is None else Runtime(place, agents=[helper])
