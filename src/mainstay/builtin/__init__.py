"""Plugins that come with Mainstay. They use the same interface as others: read them as examples."""

from mainstay.builtin.compaction import Compaction
from mainstay.builtin.history import OutputLimit, RollingHistory
from mainstay.builtin.permissions import Permissions, Rule
from mainstay.builtin.plan import Plan
from mainstay.builtin.redaction import InputRedaction, Redaction
from mainstay.builtin.subagents import Subagents

OutputBudget = OutputLimit
"""The name that `OutputLimit` had while `mainstay.model.tool.OutputBudget`, the numbers, was the other one."""

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
