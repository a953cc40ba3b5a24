"""How turns and tool calls end, for applications: `isinstance(result.outcome, BudgetSpent)`.

A turn ends with a member of `Outcome`, a tool call with a member of `ToolOutcome`.
"""

from perdure.model.outcome import (
    BudgetSpent,
    Cancelled,
    Failed,
    Finished,
    Incomplete,
    InvalidInput,
    LimitReached,
    Outcome,
    PendingCall,
    PluginAborted,
    ProviderFailed,
    Queued,
    Waiting,
)
from perdure.model.tool import Denied, Ok, OutcomeUnknown, ToolOutcome

__all__ = [
    "BudgetSpent",
    "Cancelled",
    "Denied",
    "Failed",
    "Finished",
    "Incomplete",
    "InvalidInput",
    "LimitReached",
    "Ok",
    "Outcome",
    "OutcomeUnknown",
    "PendingCall",
    "PluginAborted",
    "ProviderFailed",
    "Queued",
    "ToolOutcome",
    "Waiting",
]
