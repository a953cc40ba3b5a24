"""Runtimes that tests run from the command line, on the store that `DESK` names: `perdure run sample_desk:desk …`."""

import os

from perdure import Agent, Limit, ModelRequest, Plugin, Runtime, ToolCall, ToolContext, tool
from perdure.plugins import CommandContext, command
from perdure.testing import FunctionModel


@tool
def whose(ctx: ToolContext[str]) -> str:
    """Whose desk this is."""
    return ctx.deps


def model(request: ModelRequest) -> str | list[ToolCall]:
    last = request.messages[-1]
    return f"it is {last.tool_results[0].content}" if last.role == "tool" else [ToolCall(name="whose")]


class Bell(Plugin):
    id = "bell"

    @command(session="forbidden")
    def ring(self, ctx: CommandContext) -> str:
        """Ring it."""
        return f"rang for {ctx.deps}"


clerk = Agent(FunctionModel(model), name="clerk", tools=[whose], plugins=[Bell()])
guard = Agent(FunctionModel(lambda request: "who goes there?"), name="guard")


def desk() -> Runtime:
    """Two turns for all of its sessions, and no more."""
    limits = [Limit(turns=2, per="all")]
    return Runtime(os.environ["DESK"], agents=[clerk, guard], deps="Ada", limits=limits)


def named(where: str) -> Runtime:
    return Runtime(where)


async def later() -> Runtime:
    return desk()


def nothing() -> None:
    """Gives no Runtime."""


shared = Runtime(os.environ["DESK"], agents=[clerk], deps="Bob") if "DESK" in os.environ else None
