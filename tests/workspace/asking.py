"""Calling the tools of a workspace as the runtime does, without one."""

from __future__ import annotations

from typing import Any

import msgspec

from mainstay import ToolContext, ToolError
from mainstay.model.tool import PreparedCall
from mainstay.tools.context import CallHost
from mainstay.workspace.tools import FileTools


class Beside(CallHost):
    """A host whose store is a file."""

    def __init__(self, store: str | None) -> None:
        self._store = store

    def store_location(self) -> str | None:
        return self._store


async def prepare(
    tools: FileTools, name: str, store: str | None = None, call_id: str = "c", **args: Any
) -> PreparedCall:
    context = ToolContext[Any](call_id=call_id, tool=name, host=Beside(store))
    call = await tools.prepare(PreparedCall(call_id, f"tool:{name}", name, args), context)
    return msgspec.structs.replace(call, payload=msgspec.to_builtins(call.payload))


async def execute(tools: FileTools, call: PreparedCall, store: str | None = None, attempt: int = 1) -> Any:
    context = ToolContext[Any](call_id=call.call_id, tool=call.name, host=Beside(store), attempt=attempt)
    return await tools.execute(call, context)


async def ask(tools: FileTools, name: str, store: str | None = None, **args: Any) -> Any:
    """What a call returns."""
    return await execute(tools, await prepare(tools, name, store, **args), store)


async def refused(tools: FileTools, name: str, store: str | None = None, **args: Any) -> str:
    """The code of the error that a call ends with; "" where it returns."""
    try:
        await ask(tools, name, store, **args)
    except ToolError as error:
        return error.code
    return ""
