"""Calling the tools of a workspace as the runtime does: without one, or in a session."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure import Agent, ModelRequest, Runtime, Session, ToolCall, ToolContext, ToolError, TurnResult
from perdure.model.tool import Failed, PreparedCall
from perdure.testing import FunctionModel
from perdure.tools.context import CallHost
from perdure.workspace.tools import FileTools


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


class Conversation:
    """A session whose model calls what the test says, and is told nothing else."""

    def __init__(self, tools: FileTools, name: str = "model") -> None:
        self._replies: list[str | list[ToolCall]] = []
        self.agent = Agent(FunctionModel(self._reply), name=name, tools=[tools])
        self.session: Session[Any] | None = None
        self.runtime: Runtime

    def _reply(self, request: ModelRequest) -> str | list[ToolCall]:
        return self._replies.pop(0) if self._replies else "I see."

    async def turn(self, name: str, **args: Any) -> TurnResult[Any]:
        assert self.session is not None
        self._replies = [[ToolCall(name=name, args=args)]]
        return await self.session.run(f"call {name}")

    async def call(self, name: str, **args: Any) -> Any:
        """What a call returns; of a failed one, its code."""
        [record] = (await self.turn(name, **args)).tool_calls
        return record.outcome.code if isinstance(record.outcome, Failed) else record.value

    async def told(self, name: str, **args: Any) -> str:
        """What a call that fails tells the model."""
        [record] = (await self.turn(name, **args)).tool_calls
        assert isinstance(record.outcome, Failed), record.outcome
        return record.outcome.message
