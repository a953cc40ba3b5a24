"""Two turns that an older tree begins and the present one finishes.

    python -m tests.golden.two_trees STORE LEDGER    begin both and wait to be killed (with `old_trees.environment_of`)

Each turn books something in a tool and asks its model again. The turn of the session `tools` is then held in two tools,
and the turn of `model` in its second model call. Every effect is a line of the ledger, a file in the folder of the
store. The child prints the name of each action that is held.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import tests.golden.package  # noqa: F401  # first, because it decides which package the imports below find

# isort: split

from perdure import Agent, ModelRequest, Runtime, ToolCall, ToolContext, tool
from perdure.testing import FunctionModel

HELD = ("charge", "model 2 of model.1", "ship")
"""Actions that are under way when the child is killed."""


class Ledger:
    """A file with a line for each effect. An action named in `held` begins and never ends."""

    def __init__(self, path: Path, held: tuple[str, ...] = ()) -> None:
        self._path, self._held = path, held

    def write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def lines(self) -> list[str]:
        return self._path.read_text().splitlines()

    async def act(self, name: str, key: str) -> str:
        self.write(f"{name} begun {key}")
        if name in self._held:
            print(name, flush=True)
            await asyncio.Event().wait()
        self.write(f"{name} done {key}")
        return f"{name} done"


Context = ToolContext[Ledger]


@tool
async def book(ctx: Context) -> str:
    """Book, at most once."""
    return await ctx.deps.act("book", ctx.idempotency_key)


@tool
async def charge(ctx: Context) -> str:
    """Charge, at most once."""
    return await ctx.deps.act("charge", ctx.idempotency_key)


@tool(recovery="rerun")
async def ship(ctx: Context) -> str:
    """Ship, as often as need be."""
    return await ctx.deps.act("ship", ctx.idempotency_key)


def agent(ledger: Ledger) -> Agent[str]:
    """Return an agent whose turns are to book, then, if they are told to, to charge and ship at once, and to report."""

    async def model(request: ModelRequest) -> str | list[ToolCall]:
        turn_id, asked = request.call_id.split(".")[0], sum(m.role == "assistant" for m in request.messages)
        await ledger.act(f"model {asked + 1} of {turn_id}.1", "-")
        if asked == 0:
            return [ToolCall(name="book", args={})]
        if asked == 1 and request.messages[0].text == "order":
            return [ToolCall(name="charge", args={}), ToolCall(name="ship", args={})]
        results = [result for message in request.messages for result in message.tool_results]
        return "; ".join(f"{result.name} {result.status}" for result in results)

    return Agent(FunctionModel(model), name="orders", tools=[book, charge, ship])


async def begin(store: Path, ledger: Ledger) -> None:
    async with Runtime(store, agents=[agent(ledger)], deps=ledger) as runtime:
        await (await runtime.session("tools", agent="orders")).send("order")
        await (await runtime.session("model", agent="orders")).send("book only")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(begin(Path(sys.argv[1]), Ledger(Path(sys.argv[2]), HELD)))
