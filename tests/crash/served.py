"""A turn that calls a tool of an MCP server, and one whose call the server answers with a question: what is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from perdure import Agent, ToolCall
from perdure.mcp import McpServer
from perdure.model.llm import ModelRequest
from perdure.model.outcome import Waiting
from perdure.testing import FunctionModel
from perdure.testing.crash import Lab

STUB = Path(__file__).parents[1] / "mcp" / "stub.py"


def calling(tool: str) -> Agent[str]:
    def model(request: ModelRequest) -> Any:
        answered = any(message.role == "tool" for message in request.messages)
        return "done" if answered else [ToolCall("1", f"mcp__stub__{tool}", {"text": "hi"})]

    return Agent(FunctionModel(model), name="served")


class Served:
    """A scripted server, whose ledger of calls outlives the kills."""

    def __init__(self, folder: Path, *tools: str) -> None:
        self._behaviour, self._ledger = folder / "stub.json", folder / "stub.ledger"
        self._behaviour.write_text(json.dumps({"ledger": str(self._ledger), "tools": list(tools)}))

    @property
    def server(self) -> McpServer:
        return McpServer("stub", command=[sys.executable, "-I", "-S", str(STUB), str(self._behaviour)])

    @property
    def calls(self) -> int:
        return len(self._ledger.read_text().splitlines()) if self._ledger.exists() else 0


def called(served: Served) -> Any:
    async def scenario(lab: Lab) -> None:
        async with lab.runtime([calling("echo")], mcp=[served.server]) as runtime:
            await (await runtime.session("s")).run("go", key="1")

    return scenario


def asked(served: Served) -> Any:
    async def scenario(lab: Lab) -> None:
        async with lab.runtime([calling("ask")], mcp=[served.server]) as runtime:
            session = await runtime.session("s")
            result = await session.run("go", key="1")
            if isinstance(result.outcome, Waiting):
                for pending in await session.pending():
                    await session.answer(pending.call_id, {"name": "Ann"})
                await session.result(result.turn_id)

    return scenario
