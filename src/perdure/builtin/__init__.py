"""Plugins that come with Perdure. They use the same interface as others: read them as examples."""

from perdure.builtin.compaction import Compaction
from perdure.builtin.history import OutputLimit, RollingHistory
from perdure.builtin.permissions import Permissions, Rule
from perdure.builtin.plan import Plan
from perdure.builtin.redaction import InputRedaction, Redaction
from perdure.builtin.subagents import Subagents

OutputBudget = OutputLimit
"""The name that `OutputLimit` had while `perdure.model.tool.OutputBudget`, the numbers, was the other one."""

__all__ = [
    "Compaction",
    "InputRedaction",
    "OutputBudget",
    "OutputLimit",
    "Permissions",
    "Plan",
    "Redaction",
    "RollingHistory",
    "Rule",
    "Subagents",
]
