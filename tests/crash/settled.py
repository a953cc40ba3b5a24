"""A session with options and a tool switched off, a child with a grant, and a fork: each says what it has."""

from __future__ import annotations

from typing import Any

from perdure import Agent, Message, ModelRequest, tool
from perdure.model.plugin import CreateSession
from perdure.plugins.hooks import Plugin, PromptContext, SessionContext, TurnContext
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab


class Tone(Plugin):
    """Says how to speak, as its options say, and delegates once."""

    id = "tone"

    def __init__(self, tone: str = "plain") -> None:
        self.tone = tone

    def for_session(self, ctx: SessionContext) -> Plugin:
        return Tone((ctx.options or {}).get("tone", "plain"))

    def prompt(self, ctx: PromptContext) -> str:
        return self.tone

    async def before_turn(self, ctx: TurnContext) -> Any:
        if ctx.session_id != "s":
            return None
        said = Message("user", "what can you do?")
        return CreateSession(session_id="child", only=("add", "drop"), options={"tone": {"tone": "stern"}}, said=said)


@tool
def add() -> str:
    """Add."""
    return "added"


@tool
def drop() -> str:
    """Drop."""
    return "dropped"


@tool
def say() -> str:
    """Say."""
    return "said"


def shown(request: ModelRequest) -> str:
    return ", ".join([request.messages[0].text, *sorted([each.name for each in request.tools])])


def agent() -> Agent[str]:
    return Agent(FunctionModel(shown), name="agent", tools=[add, drop, say], plugins=[Tone()])


async def settled(lab: Lab) -> None:
    async with lab.runtime([agent()]) as runtime:
        session = await runtime.session("s", options={"tone": {"tone": "kind"}})
        if "drop" not in (await session.tools.state()).members:  # decided once, also by a program that starts again
            await session.tools.disable("drop")
        await session.run("go", key="go")
        fork = await session.fork("s.1", session_id="fork")
        await fork.run("and you?", key="you")
        await session.tools.enable("drop")
        await session.run("and now?", key="now")
        await runtime.wait_idle(timeout=60)
