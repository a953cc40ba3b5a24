"""Mainstay: a durable runtime for LLM agents. What it acknowledged is on disk; what it recorded is never done twice.

Public names are those below, and what is in `mainstay.model`, `mainstay.ports`, `mainstay.plugins`, `mainstay.builtin`,
`mainstay.providers`, `mainstay.stores`, `mainstay.tracing` and `mainstay.testing`. Everything else is internal and may
change in any release.
"""

from mainstay.agent import Agent
from mainstay.errors import MainstayError, Retry, ToolError, TurnFailed
from mainstay.model.agent import Budget, Caller
from mainstay.model.limit import Limit
from mainstay.model.llm import ModelRequest, ModelResponse, ModelSettings, RateLimit, Usage
from mainstay.model.message import Audio, Document, FileRef, Image, Message, ToolCall, ToolResult
from mainstay.model.spending import Price
from mainstay.model.tool import ProviderTool
from mainstay.plugins.hooks import Plugin
from mainstay.ports.tool import ToolProvider
from mainstay.processes.function.calls import call
from mainstay.processes.function.context import ProcessContext
from mainstay.processes.function.engine import Process, process
from mainstay.processes.handle import ProcessHandle
from mainstay.runtime import Runtime
from mainstay.sessions.directory import Retention
from mainstay.sessions.result import TurnResult
from mainstay.sessions.session import Receipt, Session
from mainstay.tools.context import ToolContext
from mainstay.tools.define import Tool, tool
from mainstay.workspace import Workspace

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "Audio",
    "Budget",
    "Caller",
    "Document",
    "FileRef",
    "Image",
    "Limit",
    "MainstayError",
    "Message",
    "ModelRequest",
    "ModelResponse",
    "ModelSettings",
    "Plugin",
    "Price",
    "Process",
    "ProcessContext",
    "ProcessHandle",
    "ProviderTool",
    "RateLimit",
    "Receipt",
    "Retention",
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
    "TurnResult",
    "Usage",
    "Workspace",
    "call",
    "process",
    "tool",
]
