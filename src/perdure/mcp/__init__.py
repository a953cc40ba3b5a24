"""Tools, resources and prompts of MCP servers: `Runtime(mcp=[McpServer("time", command=["mcp-server-time"])])`.

`server` is what a host says of a server, `listing` makes tools of what a server lists, without I/O, `approved` keeps
what was approved of that. `connection` is the life of one server, over `transport`; `answers` reads what servers send.
`servers` puts them together for a Runtime: what its agents are offered, and what its host may ask.

Nothing here imports the SDK before a server is attached, except `transport`, `answers` and `connection`.
"""

from __future__ import annotations

from importlib.util import find_spec

from perdure.errors import MissingExtra
from perdure.mcp.server import Elicitation, McpServer, Sampling, read_mcp_json

__all__ = ["Elicitation", "McpServer", "Sampling", "read_mcp_json", "require_mcp"]


def require_mcp() -> None:
    """Refuse MCP servers where the SDK is not installed. Looks for the package without importing it."""
    if find_spec("mcp") is None:
        raise MissingExtra("an MCP server", "mcp")
