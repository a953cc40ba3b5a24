"""Tools to compose catalogues of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure import tool
from perdure.model.tool import PreparedCall, ToolOutcome, ToolSpec
from perdure.ports.tool import CallContext


@tool
def add(n: int) -> int:
    """Add one."""
    return n + 1


@tool
def drop() -> str:
    """Drop everything."""
    return "dropped"


@tool
def say() -> str:
    """Say something."""
    return "hello"


@tool(name="add")
def other_add(n: int) -> int:
    """Add two."""
    return n + 2


class Offering:
    """A set of tools that changes, and how often it was asked for them."""

    def __init__(self, *names: str) -> None:
        self.names, self.asked = names, 0

    def specs(self) -> Sequence[ToolSpec]:
        self.asked += 1
        return [ToolSpec(name) for name in self.names]

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall | ToolOutcome:
        return call

    async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
        return call.args
