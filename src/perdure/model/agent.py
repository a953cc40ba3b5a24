"""Agents as data: the budget of a turn, and what is shown and compared of a definition."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct

from perdure.errors import InvalidDefinition, quoted
from perdure.model.message import NO_METADATA, Metadata
from perdure.model.spending import money
from perdure.model.tool import OutputBudget

Mode: TypeAlias = Literal["tools", "code"]
"""How a model reaches tools: by native tool calls, or by code that calls them."""

MOST = 2**53
"""What is more than this is no limit, and not every number beyond can be told from its neighbour."""


WAKE_DEPTH = 25
"""How many wakes in a row a session may have, each by work that the turn before has started."""


class Budget(Struct, frozen=True, gc=False, omit_defaults=True):
    """Limits of one turn; None is no limit.

    `steps` counts model calls, `tokens` and `money` what they cost, `seconds` the time that a worker ran the turn
    (not the time it was parked or had no owner), `no_progress` consecutive steps without a successful tool call.
    `calls` counts the tool calls of the turn, `calls_per_reply` those of one reply: where a reply asks for more, none
    of its calls is made.
    """

    steps: int | None = 100
    tokens: int | None = None
    if TYPE_CHECKING:
        money: Decimal | float | str | None = None
    else:
        money: Decimal | float | None = None  # text is read as a decimal: no decoder takes both
    seconds: float | None = None
    no_progress: int | None = 12
    calls: int | None = 10_000
    calls_per_reply: int | None = 1_000

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "no_progress", "calls", "calls_per_reply"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 0 <= value < MOST):
                raise InvalidDefinition(f"a budget of {quoted(value)} {name} is not usable: give 0 or more, or None")
        if self.money is not None and money(self.money) is None:
            raise InvalidDefinition(f"a budget of {quoted(self.money)} money is not usable: give 0 or more, or None")
        if self.seconds is not None and not (type(self.seconds) in (int, float) and 0 <= self.seconds < MOST):
            raise InvalidDefinition(
                f"a budget of {quoted(self.seconds)} seconds is not usable: give 0 or more, or None"
            )


class Caller(Struct, frozen=True):
    """What a run works for: what a function of `Runtime(deps=…)` and of `Agent(instructions=…)` is given.

    `session_id` and `agent` are those of the turn; of a process, those of the session that asked for it, "" where the
    host did. `metadata` is what held when the turn was opened, or the process started. `deps` are the live objects of
    the run, as tools see them; None while a function of `Runtime(deps=…)` makes them.
    """

    session_id: str = ""
    agent: str = ""
    metadata: Metadata = NO_METADATA
    deps: Any = None


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
