"""Every plugin that comes with Perdure keeps the contract that other plugins are held to."""

from __future__ import annotations

import pytest

from perdure.builtin import (
    Compaction,
    InputRedaction,
    OutputLimit,
    Permissions,
    Plan,
    Redaction,
    RollingHistory,
    Rule,
    Subagents,
)
from perdure.testing.plugin_contract import plugin_contract

pytestmark = pytest.mark.slow

STEPS = [{"text": "look it up", "status": "active"}, {"text": "answer"}]
RULES = [Rule("allow", "look_up"), Rule("ask", "stumble", remember=True)]

TestCompaction = plugin_contract(lambda: Compaction(context_tokens=150))  # small enough for its turns to outgrow
TestInputRedaction = plugin_contract(InputRedaction)
TestOutputBudget = plugin_contract(lambda: OutputLimit(bytes=256))
TestPermissions = plugin_contract(
    lambda: Permissions(RULES),
    options={"rules": [{"decision": "deny", "tool": "look_up", "args": {"word": "secret*"}}]},
)
TestPlan = plugin_contract(Plan, calls=[("update_plan", {"steps": STEPS})])
TestRedaction = plugin_contract(Redaction)
TestRollingHistory = plugin_contract(lambda: RollingHistory(context_tokens=200, keep_turns=1))
TestSubagents = plugin_contract(lambda: Subagents("assistant"))
