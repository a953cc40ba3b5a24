"""WX: servers of others over MCP. What a call of a tool costs above the bare SDK's, and what an idle server holds."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from mcp import Client, StdioServerParameters
from workload import Sample, median

from perdure import Agent, Runtime
from perdure.mcp import McpServer
from perdure.model.tool import PreparedCall
from perdure.testing import ScriptedModel
from perdure.tools.context import ToolContext

STUB = Path(__file__).parents[1] / "tests" / "mcp" / "stub.py"


async def wx(params: Sample) -> Sample:
    what: dict[str, Callable[[Sample], Awaitable[Sample]]] = {"calls": _calls, "idle": _idle}
    return await what[params["what"]](params)


def _command(params: Sample, name: str) -> list[str]:
    behaviour = Path(params["dir"]) / f"{name}.json"
    behaviour.write_text(json.dumps({"ledger": os.devnull, "tools": ["echo"]}))
    return [sys.executable, "-I", "-S", str(STUB), str(behaviour)]


def _runtime(*servers: McpServer) -> Runtime:
    return Runtime("memory", agents=[Agent(ScriptedModel([]), name="a")], mcp=servers)


async def _calls(params: Sample) -> Sample:
    """The same call by the SDK, and by the set of tools that an agent has: without the journal of a turn."""
    command, times = _command(params, "stub"), params["times"]
    bare, ours = [], []
    async with Client(StdioServerParameters(command=command[0], args=command[1:]), cache=None) as client:
        for _ in range(times):
            began = time.process_time()
            await client.session.call_tool("echo", {"text": "hi"})
            bare.append(time.process_time() - began)
    async with _runtime(McpServer("stub", command=command)) as runtime:
        assert await runtime.mcp.ready()
        tools = runtime.mcp.tools_for("a", ())
        [spec] = tools.specs()
        for number in range(times):
            ctx: ToolContext[None] = ToolContext(session_id="s", call_id=str(number), tool=spec.name)
            call = PreparedCall(ctx.call_id, spec.tool_id, spec.name, {"text": "hi"})
            began = time.process_time()
            prepared = await tools.prepare(call, ctx)
            assert isinstance(prepared, PreparedCall)
            await tools.execute(prepared, ctx)
            ours.append(time.process_time() - began)
    return {"bare_cpu_ms": median(bare) * 1000, "call_cpu_ms": median(ours) * 1000}


async def _idle(params: Sample) -> Sample:
    """What a Runtime holds for each server that is attached and does nothing; the first one is not counted."""
    servers = [
        McpServer(f"s{number}", command=_command(params, f"s{number}")) for number in range(params["servers"] + 1)
    ]
    async with _runtime(servers[0]) as runtime:
        assert await runtime.mcp.ready()
        before = _resident()
        for server in servers[1:]:
            await runtime.mcp.attach(server)
        assert await runtime.mcp.ready()
        return {"held_kb": (_resident() - before) / params["servers"] / 1024}


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
