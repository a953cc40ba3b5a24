"""A turn whose model writes a cell: what is killed.

The cell calls in a loop, in a comprehension and at once, prints, and finishes the turn. `pay` must not be repeated,
`look` may be. Where the end of a `pay` is unknown the cell ends there, and the model stops.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from perdure import Agent, ModelRequest, ModelResponse, Plugin, ToolCall, ToolContext, ToolResult, Usage, tool
from perdure.codemode import run_code
from perdure.codemode.monty import MontyExecutor
from perdure.engine.host import SystemClock
from perdure.errors import AlreadyAnswered
from perdure.model.code import CPython
from perdure.ports.code import Executor
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab
from perdure.tools.cells import WRITE_AFTER
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


class Saved(Plugin):
    """Runs cells on Monty under a key that every life has: what one has saved the next one loads."""

    id = "saved"

    def code_executor(self) -> Executor:
        return MontyExecutor(key=b"0123456789abcdef0123456789abcdef")


class Unhurried(SystemClock):
    """Never writes an answer before it is known what the cell asks for next, however slow the machine is: so the
    writes of a turn are the same every time."""

    async def sleep(self, seconds: float) -> None:
        if seconds == WRITE_AFTER / 2:
            await asyncio.Event().wait()
        await super().sleep(seconds)


def coder(lab: Lab, saves: bool, code: CPython | None = None) -> Agent[str]:
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

    plugins = [Saved()] if saves else []
    return Agent(FunctionModel(answer), name="coder", tools=[pay, look], mode="code", code=code, plugins=plugins)


SIGNED = ["```python\nseen = [await look(n) for n in range(2)]\n```"]
SIGNED += ["```python\nprint('asking')\nname = await sign(seen[1])\nfinish(f'{seen} {name}')\n```", "I stop."]


def clerk(lab: Lab, saves: bool) -> Agent[str]:
    """An agent whose second cell waits for a person, with a variable of the first."""

    @tool(recovery="rerun")
    async def look(n: int, ctx: ToolContext[Any]) -> int:
        """Look."""
        await lab.effect("look", ctx.idempotency_key)
        return n + 1

    @tool(approval="ask")
    async def sign(n: int, ctx: ToolContext[Any]) -> str:
        """Sign."""
        await lab.effect("sign", ctx.idempotency_key)
        return f"signed {n}"

    def answer(request: ModelRequest) -> ModelResponse:
        given = sum(message.role == "assistant" for message in request.messages)
        return ModelResponse(SIGNED[given], (), Usage(input=1, output=2))

    plugins = [Saved()] if saves else []
    return Agent(FunctionModel(answer), name="clerk", tools=[look, sign], mode="code", plugins=plugins)


async def approved(lab: Lab, saves: bool = True) -> None:
    async with lab.runtime([clerk(lab, saves)], clock=Unhurried()) as runtime:
        session = await runtime.session(SESSION)
        if (await session.run("go", key="go")).waiting:
            with contextlib.suppress(AlreadyAnswered):
                await session.approve(f"{SESSION}.1.2.0", by="operator")
            await session.result(f"{SESSION}.1")


async def approved_without_key(lab: Lab) -> None:
    """The same where no life can load what the one before has saved."""
    await approved(lab, saves=False)


async def coded(lab: Lab, saves: bool = True) -> None:
    async with lab.runtime([coder(lab, saves)], clock=Unhurried()) as runtime:
        await (await runtime.session(SESSION)).run("go", key="go")


async def coded_without_key(lab: Lab) -> None:
    await coded(lab, saves=False)


async def coded_in_cpython(lab: Lab) -> None:
    async with lab.runtime([coder(lab, False, CPython())], clock=Unhurried()) as runtime:
        await (await runtime.session(SESSION)).run("go", key="go")


TWO = [
    ToolCall("a", "run_code", {"code": "seen = await look(1)\nname = await sign(seen)"}),
    ToolCall("b", "run_code", {"code": "print(name, await pay(3))"}),
]


def caller(lab: Lab) -> Agent[str]:
    """An agent that calls tools, and run_code twice in one reply; the first call of it waits for a person."""

    @tool
    async def pay(n: int, ctx: ToolContext[Any]) -> int:
        """Pay."""
        await lab.effect("pay", ctx.idempotency_key)
        return n

    def answer(request: ModelRequest) -> ModelResponse:
        results = [part for message in request.messages for part in message.parts if isinstance(part, ToolResult)]
        if not results:
            return ModelResponse("", tuple(TWO), Usage(input=1, output=2))
        return ModelResponse(str(results[-1].content), (), Usage(input=1, output=2))

    return Agent(
        FunctionModel(answer), name="caller", tools=[*clerk(lab, True).tools, pay, run_code], plugins=[Saved()]
    )


async def called(lab: Lab) -> None:
    async with lab.runtime([caller(lab)], clock=Unhurried()) as runtime:
        session = await runtime.session(SESSION)
        if (await session.run("go", key="go")).waiting:
            with contextlib.suppress(AlreadyAnswered):
                await session.approve(f"{SESSION}.1.1.0.1", by="operator")
            await session.result(f"{SESSION}.1")


SLEEPS = """```python
print('before')
await sleep(0.01)
print('after')
seen = await look(1)
finish(f'slept, {seen}')
finish('never')
print('never')
```"""


def sleeper(lab: Lab) -> Agent[str]:
    """An agent whose cell prints, sleeps, calls and finishes."""

    @tool(recovery="rerun")
    async def look(n: int, ctx: ToolContext[Any]) -> int:
        """Look."""
        await lab.effect("look", ctx.idempotency_key)
        return n + 1

    answer = FunctionModel(lambda request: ModelResponse(SLEEPS, (), Usage(input=1, output=2)))
    return Agent(answer, name="sleeper", tools=[look], mode="code", plugins=[Saved()])


async def slept(lab: Lab) -> None:
    async with lab.runtime([sleeper(lab)], clock=Unhurried()) as runtime:
        await (await runtime.session(SESSION)).run("go", key="go")


WAITS = "```python\nprint('before')\nwhole = False\nawait hang()\nwhole = True\n```"


def hanging(lab: Lab, begun: asyncio.Event) -> Agent[str]:
    """An agent whose cell calls what never ends."""

    @tool
    async def hang(ctx: ToolContext[Any]) -> None:
        """Never end."""
        await lab.effect("hang", ctx.idempotency_key)
        begun.set()
        await asyncio.Event().wait()

    def answer(request: ModelRequest) -> ModelResponse:
        again = any(message.role == "assistant" for message in request.messages)
        return ModelResponse("I stop." if again else WAITS, (), Usage(input=1, output=2))

    return Agent(FunctionModel(answer), name="hanging", tools=[hang], mode="code", plugins=[Saved()])


async def cancelled(lab: Lab) -> None:
    """The cell is cancelled while its call runs; in a life after that, the turn ends by itself."""
    begun = asyncio.Event()
    async with lab.runtime([hanging(lab, begun)], clock=Unhurried()) as runtime:
        session = await runtime.session(SESSION)
        receipt = await session.send("go", key="go")
        running = asyncio.ensure_future(receipt.result())
        hangs = asyncio.ensure_future(begun.wait())
        await asyncio.wait({running, hangs}, return_when=asyncio.FIRST_COMPLETED)
        hangs.cancel()
        await session.cancel()
        await running
