"""An agent made ready to run: what a turn asks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mainstay.model.agent import AgentSpec, Budget
from mainstay.model.tool import OutputBudget, ToolSpec
from mainstay.plugins.registry import PluginSet
from mainstay.ports.provider import Provider
from mainstay.sessions.operations import OperationTable
from mainstay.tools.catalog import Catalog
from mainstay.tools.membership import Membership


@dataclass(slots=True)
class Definition:
    """A live agent. `output_rule` reads a final text as JSON of the output type; `revive` makes the typed value."""

    name: str
    provider: Provider
    instructions: str = ""
    catalog: Catalog | Membership = field(default_factory=Catalog)
    budget: Budget = field(default_factory=Budget)
    output_schema: dict[str, Any] | None = None
    output_rule: Callable[[str], Any] | None = None
    revive: Callable[[Any], Any] | None = None
    output_budget: OutputBudget = field(default_factory=OutputBudget)
    plugins: PluginSet = field(default_factory=PluginSet)
    operations: OperationTable = field(default_factory=OperationTable)

    def tool_specs(self) -> Sequence[ToolSpec]:
        return self.catalog.specs()


class Defined(Protocol):
    """What a Runtime takes as an agent."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> AgentSpec: ...

    def definition(self) -> Definition: ...
