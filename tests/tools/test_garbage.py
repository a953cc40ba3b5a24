"""What a turn leaves behind is freed when its last reference goes, not when the collector runs."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from typing import Any

from perdure import Agent, Runtime, ToolCall, ToolContext, tool
from perdure.testing import FunctionModel


@tool
async def note(text: str, ctx: ToolContext[Any]) -> str:
    """Keep a text."""
    ctx.progress(text)
    await ctx.artifacts.put(text, name="note")
    return text


@tool
def shout(text: str) -> str:
    """Say it loudly, from a thread."""
    return text.upper()


def both(request: Any) -> Any:
    if request.messages[-1].role == "tool":
        return "done"
    return [ToolCall(name="note", args={"text": "x"}), ToolCall(name="shout", args={"text": "x"})]


async def unreachable_after_a_turn() -> list[str]:
    async with Runtime("memory", agents=[Agent(FunctionModel(both), tools=[note, shout])]) as runtime:
        session = await runtime.session("chat")
        await session.run("once, so that everything is made that is made once")
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        await session.run("again")
        gc.collect()
        return [type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("perdure")]


def test_a_turn_with_tools_leaves_no_reference_cycles() -> None:
    # In an interpreter of its own: what other tests have left behind may become garbage at any time.
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)

    assert ran.stdout == "[]\n"


if __name__ == "__main__":
    print(asyncio.run(unreachable_after_a_turn()))
