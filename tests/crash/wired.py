"""A turn with two tools over real HTTP, in each dialect: what the tests of kills in mid-stream run in child processes.

The server is in another process and outlives them. They find it by a variable, which the process that forks them
inherits; it finds the process to kill by a header.
"""

from __future__ import annotations

import os
from typing import Any

from mainstay import Agent, ToolContext, tool
from mainstay.providers.http import HttpProvider, no_key
from mainstay.testing.crash import Lab
from tests.providers.wire import MODEL, dialects

URL = "MAINSTAY_TEST_MODEL_SERVER"
PID = "x-test-pid"


async def _turn(lab: Lab, name: str) -> None:
    @tool(recovery="rerun")
    async def get(ctx: ToolContext[Any], n: int) -> str:
        """Get it."""
        await lab.effect("get", ctx.idempotency_key)
        return f"got {n}"

    @tool(recovery="once")
    async def put(ctx: ToolContext[Any]) -> str:
        """Put it."""
        await lab.effect("put", ctx.idempotency_key)
        return "put"

    url, pid = os.environ[URL], {PID: str(os.getpid())}
    model = HttpProvider(dialects()[name], MODEL, name=name, base_url=url, authorise=no_key, headers=pid)
    async with lab.runtime(agents=[Agent(model, name="wired", tools=[get, put])]) as runtime:
        session = await runtime.session("s")
        await session.run("go", key="go")


async def anthropic(lab: Lab) -> None:
    await _turn(lab, "anthropic")


async def openai(lab: Lab) -> None:
    await _turn(lab, "openai")


async def openai_chat(lab: Lab) -> None:
    await _turn(lab, "openai-chat")


async def google(lab: Lab) -> None:
    await _turn(lab, "google")


async def bedrock(lab: Lab) -> None:
    await _turn(lab, "bedrock")


SCENARIOS = {
    "anthropic": anthropic,
    "openai": openai,
    "openai-chat": openai_chat,
    "google": google,
    "bedrock": bedrock,
}
