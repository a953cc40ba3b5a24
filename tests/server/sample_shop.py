"""An agent that pays, for servers in a process of their own. `SHOP` is a folder: `paid` has a line for each payment,
and a delivery ends when `go` is there."""

import asyncio
import os
from pathlib import Path

from perdure import Agent, ModelRequest, Runtime, ToolCall, ToolContext, tool
from perdure.testing import FunctionModel

SHOP = Path(os.environ.get("SHOP", "."))


@tool(approval="ask", recovery="rerun")
async def pay(amount: int) -> str:
    """Pay an amount."""
    with open(SHOP / "paid", "a") as ledger:
        ledger.write(f"{amount}\n")
    return f"paid {amount}"


@tool(recovery="rerun")
async def deliver() -> str:
    """Deliver, once somebody lets it."""
    (SHOP / "begun").touch()
    while not (SHOP / "go").exists():  # noqa: ASYNC110  # another process makes it
        await asyncio.sleep(0.01)
    return "delivered"


@tool
def owner(ctx: ToolContext[str | None]) -> str | None:
    """Who owns the shop."""
    return ctx.deps


def model(request: ModelRequest) -> str | list[ToolCall]:
    last = request.messages[-1]
    match last.role, last.text.split(" "):
        case "user", ["pay", amount]:
            return [ToolCall(name="pay", args={"amount": int(amount)})]
        case "user", ["deliver"]:
            return [ToolCall(name="deliver")]
        case "user", ["owner"]:
            return [ToolCall(name="owner")]
        case "user", said:
            return f"you said {' '.join(said)}"
        case _ if last.tool_results[0].name == "owner":
            return f"owned by {last.tool_results[0].content}"
        case _:
            return "thank you"


shop = Agent(FunctionModel(model), name="shop", tools=[pay, deliver, owner])


def owned() -> Runtime:
    """The shop with what its host gives it, too."""
    return Runtime(SHOP / "a.db", agents=[shop], deps="Ada")
