"""A turn with two tools over real HTTP, in each dialect: what the tests of kills in mid-stream run in child processes.

The server is in another process and outlives them. They find it by a variable, which the process that forks them
inherits; it finds the process to kill by a header. Which turn it is to be, they read from a file, which a variable
names as well: one process forks all of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from perdure import Agent, ModelSettings, ProviderTool, ToolContext, tool
from perdure.providers.http import HttpProvider, no_key
from perdure.testing.crash import Lab
from tests.providers.wire import MODEL, dialects

URL = "PERDURE_TEST_MODEL_SERVER"
CASE = "PERDURE_TEST_CASE"
PID = "x-test-pid"

Kind: TypeAlias = Literal["text", "tool", "prompt", "provider tools"]
"""How the turn ends: with words, a typed answer by tool or by prompt, or what a tool of the provider found."""


class Case(Struct, frozen=True):
    """Which turn it is to be."""

    dialect: str
    kind: Kind = "text"

    def __str__(self) -> str:
        return f"{self.dialect}, {self.kind}"


class Person(Struct, frozen=True):
    """What a typed answer is."""

    name: str


OWN_TOOLS = {"anthropic": "web_search", "openai": "web_search", "google": "code_execution"}


async def turn(lab: Lab) -> None:
    case = msgspec.json.decode(Path(os.environ[CASE]).read_bytes(), type=Case)

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
    dialect = dialects()[case.dialect]
    model = HttpProvider(dialect, MODEL, name=case.dialect, base_url=url, authorise=no_key, headers=pid)
    agent: Agent[Any] = Agent(model, name="wired", tools=[get, put])
    if case.kind == "provider tools":
        agent = Agent(model, name="wired", tools=[get, put, ProviderTool(OWN_TOOLS[case.dialect])])
    elif case.kind != "text":
        settings = ModelSettings(output_mode=case.kind)
        agent = Agent(model, name="wired", tools=[get, put], output=Person, settings=settings)
    async with lab.runtime(agents=[agent]) as runtime:
        session = await runtime.session("s")
        await session.run("go", key="go")
