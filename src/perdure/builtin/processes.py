"""The tools with which a model handles processes. Agents with a background tool have them without asking.

A handle is what a background call returned, as JSON: `{"__handle__": "process", "id": …}`. A model gets
the same JSON here as a host by the same verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.errors import ToolError
from perdure.model.tool import Ok, ToolRecord
from perdure.ports.tool import StartOptions
from perdure.processes.function.engine import Process
from perdure.tools.attempt import EndsAs
from perdure.tools.catalog import Catalog
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool, tool

AWAIT_SECONDS = 300.0
MAX_AWAIT = 86_400.0
MAX_LISTED = 200


def start_tool(functions: Sequence[Process[..., Any]] = ()) -> Tool[..., Any]:
    """`start_process` for an agent that may also start these durable functions."""
    offered = {each.name: each for each in functions}

    @tool(recovery="rerun")  # the process has the id of the call: asked again it is the same one
    async def start_process(
        name: str, ctx: ToolContext[Any], args: dict[str, Any] | None = None, label: str = ""
    ) -> dict[str, str]:
        """Run a tool in the background, and get the handle of its process at once.

        You are told when it ends. Use it for work that takes long while you go on with something else.

        Args:
            name: The tool to run.
            args: Its arguments.
            label: What to call it in lists.
        """
        found = await ctx.handles.known()
        if found is not None:
            return found
        if name in offered:
            options = StartOptions(key="", label=label, wake="turn")
            return (await ctx.handles.start(offered[name], args or {}, options)).to_json()
        call, spec = await ctx.prepare(name, args or {})
        return await ctx.handles.begin(call, spec, label)

    return start_process


@tool(recovery="rerun")  # waiting again has no effect
async def await_process(handle: Any, ctx: ToolContext[Any], timeout: float = AWAIT_SECONDS) -> Any:
    """Wait until a process has ended, and get what it returned.

    Args:
        handle: Its handle, as it was returned to you.
        timeout: Seconds to wait at most. The process goes on when they are over.
    """
    if not 0 <= timeout <= MAX_AWAIT:
        raise ToolError(f"wait for 0 to {MAX_AWAIT:,.0f} seconds, not {timeout:g}", code="invalid_tool_args")
    record = await ctx.handles.await_process(handle, timeout)
    for artifact in record.artifacts:
        ctx.artifacts.adopt(artifact)
    return _value(record)


@tool(recovery="rerun")  # the signal is named by its call: sent again it is the same one
async def signal_process(handle: Any, signal_name: str, ctx: ToolContext[Any], payload: Any = None) -> Any:
    """Send a signal to a process that takes it.

    Args:
        handle: Its handle, as it was returned to you.
        signal_name: Which signal.
        payload: What to tell it.
    """
    return _value(await ctx.handles.signal_process(handle, signal_name, payload))


@tool(recovery="rerun")  # asking a second time changes nothing
async def cancel_process(handle: Any, ctx: ToolContext[Any], reason: str = "") -> Any:
    """Ask a process to end. It may take a while to do so: its status tells.

    Args:
        handle: Its handle, as it was returned to you.
        reason: Why it is not needed any more.
    """
    return _value(await ctx.handles.cancel_process(handle, reason))


@tool(recovery="rerun")
async def list_processes(ctx: ToolContext[Any], live: bool = True, limit: int = 50) -> list[dict[str, Any]]:
    """List the processes that you may await, signal and cancel, newest first.

    Args:
        live: Only those that have not ended.
        limit: How many at most.
    """
    return await ctx.handles.list_processes(live, max(1, min(limit, MAX_LISTED)))


def process_tools(*functions: Process[..., Any]) -> list[Tool[..., Any]]:
    """The five tools; a model may start these durable functions with them too, besides its own tools."""
    return [start_tool(functions), await_process, signal_process, cancel_process, list_processes]


def with_process_tools(catalog: Catalog) -> Catalog:
    """The catalogue of an agent with a background tool, and what it needs to handle what that starts."""
    missing = [each for each in process_tools() if catalog.get(each.spec.name) is None]
    return catalog.extended(missing) if missing else catalog


def _value(record: ToolRecord) -> Any:
    """What the verb came to: a value, or how else it ended."""
    if isinstance(record.outcome, Ok):
        return record.outcome.value
    raise EndsAs(record.outcome)
