"""The tool by which a model that calls tools may run code, too.

    Agent(model, tools=[search, run_code])

It is a tool only to the model. Its calls are cells: the protocol of the agent finds them in a reply (`turn/tools.py`),
and they run as the cells of code mode do (`tools/cells.py`).
"""

from __future__ import annotations

from typing import Any

from perdure.errors import ToolError
from perdure.tools.define import tool


@tool
async def run_code(code: str) -> Any:
    """Run Python that may call the other tools, and tell what it printed and the value of its last line."""
    raise ToolError("run_code cannot be offered to a session alone: give it to the agent, Agent(tools=[run_code, …])")
