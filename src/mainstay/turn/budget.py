"""When a turn has had enough."""

from __future__ import annotations

from mainstay.model.agent import Budget
from mainstay.model.outcome import BudgetSpent
from mainstay.turn.states import TurnState


def spent(budget: Budget, state: TurnState) -> BudgetSpent | None:
    """The limit that the next model call would go beyond, if any. `steps` is not here: it grants a last word."""
    if budget.tokens is not None and state.usage.total >= budget.tokens:
        return BudgetSpent("tokens", budget.tokens)
    if budget.money is not None and (state.usage.cost or 0) >= budget.money:
        return BudgetSpent("money", budget.money)
    if budget.seconds is not None and state.elapsed_ms >= budget.seconds * 1000:
        return BudgetSpent("seconds", budget.seconds)
    if budget.no_progress is not None and state.idle_steps >= budget.no_progress:
        return BudgetSpent("no_progress", budget.no_progress)
    return None
