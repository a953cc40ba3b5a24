"""Servers that show a Runtime to programs outside. Each needs an extra, which is imported when the server is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perdure.model.message import Scalar
from perdure.runtime import Runtime

if TYPE_CHECKING:
    from mcp.server import Server

__all__ = ["mcp"]


def mcp(
    runtime: Runtime,
    *,
    namespace: str = "",
    metadata: Mapping[str, Scalar] | None = None,
    descriptions: Mapping[str, str] | None = None,
) -> Server[Any]:
    """An MCP server whose tools are the agents of a Runtime, and whose resources are its sessions.

    It is the SDK's own `Server`: run it on streams, or mount its `streamable_http_app()`. Make it before the Runtime is
    entered, because the SDK takes a second to import; the Runtime is entered before the server runs, and left after it.
    `namespace` is what the ids of its sessions begin with: clients neither see nor write that, and reach no other
    session. `metadata` is whom the sessions are for that clients begin. `descriptions` say what each agent is for, by
    its name.

    Raises MissingExtra without `perdure[mcp]`, and InvalidInput for metadata that no session can have and for
    descriptions of agents that the Runtime lacks.
    """
    from perdure.server.agents_as_tools import make_server  # noqa: PLC0415  # it needs the extra

    return make_server(runtime, namespace, metadata, descriptions or {})
