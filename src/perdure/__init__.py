"""Perdure: a durable runtime for LLM agents. What it acknowledged is on disk; what it recorded is never done twice.

Public names are those below, and what is in `perdure.outcomes`, `perdure.events`, `perdure.model`, `perdure.ports`,
`perdure.plugins`, `perdure.builtin`, `perdure.providers`, `perdure.stores`, `perdure.tracing` and `perdure.testing`.
Everything else is internal and may change in any release.
"""

from perdure.agent import Agent
from perdure.errors import NoAnswer, PerdureError, Retry, ToolError, TurnFailed, TurnPending
from perdure.model import VERSION as _VERSION
from perdure.model.agent import Budget, Caller
from perdure.model.limit import Limit
from perdure.model.llm import ModelRequest, ModelResponse, ModelSettings, RateLimit, Usage
from perdure.model.message import Audio, Document, FileRef, Image, Message, ToolCall, ToolResult
from perdure.model.retries import Retries
from perdure.model.spending import Price
from perdure.model.tool import ProviderTool
from perdure.plugins.hooks import Plugin
from perdure.ports.tool import ToolProvider
from perdure.processes.function.calls import call
from perdure.processes.function.context import ProcessContext
from perdure.processes.function.engine import Process, process
from perdure.processes.handle import ProcessHandle
from perdure.runtime import Runtime
from perdure.sessions.directory import Retention
from perdure.sessions.result import TurnResult
from perdure.sessions.session import Receipt, Session
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool, tool
from perdure.workspace import Workspace

__version__ = _VERSION

__all__ = [
    "Agent",
    "Audio",
    "Budget",
    "Caller",
    "Document",
    "FileRef",
    "Image",
    "Limit",
    "Message",
    "ModelRequest",
    "ModelResponse",
    "ModelSettings",
    "NoAnswer",
    "PerdureError",
    "Plugin",
    "Price",
    "Process",
    "ProcessContext",
    "ProcessHandle",
    "ProviderTool",
    "RateLimit",
    "Receipt",
    "Retention",
    "Retries",
    "Retry",
    "Runtime",
    "Session",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolError",
    "ToolProvider",
    "ToolResult",
    "TurnFailed",
    "TurnPending",
    "TurnResult",
    "Usage",
    "Workspace",
    "call",
    "process",
    "tool",
]
