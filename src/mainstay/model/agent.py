"""Agents as data: the budget of a turn, and what is shown and compared of a definition."""

from __future__ import annotations

from msgspec import Struct

from mainstay.model.tool import OutputBudget


class Budget(Struct, frozen=True, gc=False, omit_defaults=True):
    """Limits of one turn; None is no limit.

    `steps` counts model calls, `tokens` and `money` what they cost, `seconds` the time somebody worked on the turn
    (not the time it was parked or nobody ran it), `no_progress` consecutive steps without a successful tool call.
    """

    steps: int | None = 100
    tokens: int | None = None
    money: float | None = None
    seconds: float | None = None
    no_progress: int | None = 12


class AgentSpec(Struct, frozen=True, gc=False, omit_defaults=True):
    """An agent's definition without its live parts, for listings."""

    name: str
    model: str
    instructions: str = ""
    tools: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    output: str | None = None
    budget: Budget = Budget()
    mode: str = "tools"
    output_budget: OutputBudget = OutputBudget()
