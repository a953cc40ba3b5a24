"""A turn whose model writes a cell: what is killed.

The cell calls in a loop, in a comprehension and at once, prints, and finishes the turn. `pay` must not be repeated,
`look` may be. Where the end of a `pay` is unknown the cell ends there, and the model stops.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mainstay import Agent, ModelRequest, ModelResponse, ToolContext, Usage, tool
from mainstay.engine.host import SystemClock
from mainstay.testing import FunctionModel
from mainstay.testing.crash import Lab
from mainstay.tools.cells import WRITE_AFTER
from tests.crash.reference import SESSION

CELL = """```python
import asyncio
paid = 0
for n in range(2):
    try:
        paid += await pay(n)
    except Exception:
        print('never')
seen = [await look(n) for n in range(2)]
print('so far', paid, seen)
both = await asyncio.gather(look(10), pay(20))
finish(f'{paid} {seen} {both}')
```"""

ANSWER = "1 [1, 2] [11, 20]"


class Unhurried(SystemClock):
    """Never writes an answer before it is known what the cell asks for next, however slow the machine is: so the
    writes of a turn are the same every time."""

    async def sleep(self, seconds: float) -> None:
        if seconds <= WRITE_AFTER:
            await asyncio.Event().wait()
        await super().sleep(seconds)


def coder(lab: Lab) -> Agent[str]:
    @tool
    async def pay(n: int, ctx: ToolContext[Any]) -> int:
        """Pay."""
        await lab.effect("pay", ctx.idempotency_key)
        return n

    @tool(recovery="rerun")
    async def look(n: int, ctx: ToolContext[Any]) -> int:
        """Look."""
        await lab.effect("look", ctx.idempotency_key)
        return n + 1

    def answer(request: ModelRequest) -> ModelResponse:
        again = any(message.role == "assistant" for message in request.messages)
        return ModelResponse("I stop." if again else CELL, (), Usage(input=1, output=2))

    return Agent(FunctionModel(answer), name="coder", tools=[pay, look], mode="code")


async def coded(lab: Lab) -> None:
    async with lab.runtime([coder(lab)], clock=Unhurried()) as runtime:
        await (await runtime.session(SESSION)).run("go", key="go")
