"""An agent that begins work in the background: with a tool, and with a durable function of this module."""

from perdure import Agent, ModelRequest, Plugin, ProcessContext, ToolCall, ToolContext, process, tool
from perdure.plugins import QueueTurn, Result, task
from perdure.testing import FunctionModel


@tool(background=True)
async def survey(item: str) -> str:
    """Survey something."""
    return f"{item} is rare"


@process
async def parcel(ctx: ProcessContext[object], item: str) -> str:
    return f"{item} is on its way"


@tool
async def ship(item: str, ctx: ToolContext) -> dict[str, str]:
    """Send something."""
    return (await ctx.start(parcel, {"item": item}, wake="turn")).to_json()


class Stock(Plugin):
    id = "stock"

    @task
    def order(self) -> Result[str]:
        """Order something, and tell the agent."""
        return Result("ordered", directives=(QueueTurn("survey", key="ordered"),))


def answers(request: ModelRequest) -> str | list[ToolCall]:
    last = request.messages[-1]
    if last.role == "tool":
        return f"{last.tool_results[0].name}: {last.tool_results[0].status}"
    if last.text.startswith("[process"):
        return f"news: {last.text.rpartition('value: ')[2]}"
    return [ToolCall("call-1", last.text, {"item": "tea"})]


clerk = Agent(FunctionModel(answers), name="clerk", tools=[survey, ship], plugins=[Stock()])
