"""Plugins: what shapes every session of an agent without touching the runtime.

What a plugin is written with: `Plugin`, what its hooks are told, and the decorators of its operations. What it answers
with is in `mainstay.model.plugin`.
"""

from mainstay.plugins.hooks import (
    CatalogContext,
    CheckpointContext,
    CompactContext,
    FilterContext,
    HookContext,
    Plugin,
    PromptContext,
    SessionConfig,
    SessionContext,
    SnapshotReader,
    SnapshotWriter,
    StopStream,
    StreamContext,
    ToolCallContext,
    ToolEndContext,
    TurnContext,
    TurnEndContext,
    ViewContext,
)
from mainstay.plugins.operations import (
    CommandContext,
    OperationContext,
    OperationDefinition,
    OperationOutcome,
    QueryContext,
    QueueTurn,
    Result,
    TaskContext,
    command,
    query,
    task,
)
from mainstay.plugins.registry import discover

__all__ = [
    "CatalogContext",
    "CheckpointContext",
    "CommandContext",
    "CompactContext",
    "FilterContext",
    "HookContext",
    "OperationContext",
    "OperationDefinition",
    "OperationOutcome",
    "Plugin",
    "PromptContext",
    "QueryContext",
    "QueueTurn",
    "Result",
    "SessionConfig",
    "SessionContext",
    "SnapshotReader",
    "SnapshotWriter",
    "StopStream",
    "StreamContext",
    "TaskContext",
    "ToolCallContext",
    "ToolEndContext",
    "TurnContext",
    "TurnEndContext",
    "ViewContext",
    "command",
    "discover",
    "query",
    "task",
]
