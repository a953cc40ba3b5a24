"""Plugins that come with Mainstay. Each is written as anybody would write one: read them as examples."""

from mainstay.builtin.compaction import Compaction
from mainstay.builtin.history import RollingHistory
from mainstay.builtin.output_budget import OutputBudget
from mainstay.builtin.permissions import Permissions, Rule
from mainstay.builtin.plan import Plan
from mainstay.builtin.redaction import Redaction
from mainstay.builtin.subagents import Subagents

__all__ = ["Compaction", "OutputBudget", "Permissions", "Plan", "Redaction", "RollingHistory", "Rule", "Subagents"]
