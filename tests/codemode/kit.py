"""What tests of code mode share: an executor, a few tools, and a driver that answers the calls of a cell in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perdure.codemode.cpython import CPythonExecutor
from perdure.codemode.monty import MontyExecutor
from perdure.commands.bound import PipedCommands
from perdure.commands.engine import CommandEngine
from perdure.commands.sandbox import IMPLEMENTATIONS, examine
from perdure.model.code import CellEnd, CodeAnswer, CodeCall, CodeLimits, CodeStep, CPython, Given, Paused
from perdure.model.command import CommandSettings
from perdure.model.tool import ToolSpec
from perdure.ports.code import Repl
from perdure.stores import open_store

KEY = b"0123456789abcdef0123456789abcdef"
AT = 1_700_000_000_000
"""2023-11-14 22:13:20 UTC."""


def tool(name: str, *required: str, optional: Sequence[str] = (), **options: Any) -> ToolSpec:
    properties = {each.partition(":")[0]: _typed(each.partition(":")[2]) for each in (*required, *optional)}
    schema = {"type": "object", "properties": properties, "required": [each.partition(":")[0] for each in required]}
    return ToolSpec(name, options.pop("description", ""), {**schema, **options.pop("schema", {})}, **options)


def _typed(kind: str) -> dict[str, Any]:
    return {"type": kind} if kind else {}


SEARCH = tool("search", "query:string", optional=["limit:integer"], description="Search the web.")
PAY = tool("pay", "cents:integer")
ISSUES = tool("github.list-issues", "repo:string", optional=["from"])
TOOLS = [SEARCH, PAY, ISSUES]


KINDS = ["monty", "cpython"]
"""The executors that pass one contract."""


def require_sandbox() -> None:
    """Skip where CPython cannot be confined."""
    if all(examine(how).refused for how in IMPLEMENTATIONS):
        pytest.skip("no sandbox can be made here")


@asynccontextmanager
async def cpython(
    *, limits: CodeLimits | None = None, workers: int = 2, packages: tuple[str, ...] = ()
) -> AsyncGenerator[CPythonExecutor]:
    """CPython in the best sandbox that this machine can make."""
    require_sandbox()
    store = open_store("memory")
    await store.open()
    engine = CommandEngine(store, CommandSettings())
    executor = CPythonExecutor(PipedCommands(engine), CPython(packages, limits or CodeLimits()), workers=workers)
    try:
        yield executor
    finally:
        await executor.aclose()
        await engine.close()
        await store.close()


@asynccontextmanager
async def either(
    kind: str, *, limits: CodeLimits | None = None, workers: int = 2
) -> AsyncGenerator[MontyExecutor | CPythonExecutor]:
    """An executor of this kind."""
    if kind == "monty":
        async with executing(limits=limits, workers=workers) as monty:
            yield monty
    else:
        async with cpython(limits=limits, workers=workers) as full:
            yield full


@asynccontextmanager
async def executing(
    *, key: bytes = KEY, limits: CodeLimits | None = None, workers: int = 2
) -> AsyncGenerator[MontyExecutor]:
    executor = MontyExecutor(key=key, limits=limits, workers=workers)
    try:
        yield executor
    finally:
        await executor.aclose()


def echo(call: CodeCall) -> CodeAnswer:
    """An answer that tells which call it is for."""
    return Given(call.number, f"{call.name}{call.number}")


class Ran:
    """A cell from its first step to its end."""

    def __init__(self) -> None:
        self.calls: list[CodeCall] = []
        self.steps: list[CodeStep] = []
        self.end = CellEnd()

    def take(self, step: CodeStep) -> None:
        self.steps.append(step)
        if isinstance(step, Paused):
            self.calls += step.calls
        else:
            self.end = step

    @property
    def printed(self) -> str:
        return "".join(step.printed for step in self.steps)

    @property
    def told(self) -> list[tuple[str, dict[str, Any]]]:
        return [(call.name, call.args) for call in self.calls]


async def go_on(repl: Repl, step: CodeStep, answer: Callable[[CodeCall], CodeAnswer] = echo) -> Ran:
    """Answer one call after the other, a synchronous one first, as they came out."""
    ran = Ran()
    ran.take(step)
    while isinstance(step, Paused):
        paused = repl.paused
        assert paused is not None
        first = next((call for call in paused.calls if call.sync), paused.calls[0])
        step = await repl.resume(answer(first))
        ran.take(step)
    return ran


async def run(
    repl: Repl,
    code: str,
    answer: Callable[[CodeCall], CodeAnswer] = echo,
    *,
    tools: Sequence[ToolSpec] = TOOLS,
    check: bool = True,
    at: int = AT,
    seed: str = "seed",
) -> Ran:
    return await go_on(repl, await repl.begin(code, tools, at=at, seed=seed, check=check), answer)
