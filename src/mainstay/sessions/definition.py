"""An agent made ready to run: what a turn asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from mainstay.errors import InvalidDefinition
from mainstay.model import validate
from mainstay.model.agent import WAKE_DEPTH, AgentSpec, Budget
from mainstay.model.llm import DEFAULT_SETTINGS, ModelSettings
from mainstay.model.tool import OutputBudget, ProviderTool, ToolSpec
from mainstay.plugins.registry import PluginSet
from mainstay.ports.provider import Provider
from mainstay.sessions.operation_table import OperationTable
from mainstay.tools.answer import schema_codec
from mainstay.tools.catalog import Catalog, Membership


class Definition(Struct):
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
    wake_depth: int | None = WAKE_DEPTH
    settings: ModelSettings = DEFAULT_SETTINGS
    provider_tools: tuple[ProviderTool, ...] = ()

    def tool_specs(self) -> Sequence[ToolSpec]:
        return self.catalog.specs()


def answering(definition: Definition, schema: dict[str, Any]) -> Definition:
    """The definition with another output: JSON that fits a schema."""
    codec = schema_codec(schema)
    return replace(definition, output_schema=schema, output_rule=codec.validate, revive=plainly)


def plainly(value: Any) -> Any:
    """The typed output of a schema without a type: the JSON itself."""
    return value


class Defined(Protocol):
    """What a Runtime takes as an agent."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> AgentSpec: ...

    def definition(self) -> Definition: ...


def by_name(agents: Iterable[Defined]) -> dict[str, Defined]:
    """Agents by name, and after them those that they give work to. Each name is one agent's."""
    found: dict[str, Defined] = {}
    for agent in validate.several(agents, "agents", InvalidDefinition):
        validate.having(agent, "an agent", "definition", refuse=InvalidDefinition)
        if agent.name in found:
            raise _two(agent.name)
        found[agent.name] = agent
    own, waiting = frozenset(found), list(found.values())
    while waiting:
        for agent in getattr(waiting.pop(), "subagents", ()):
            if agent.name not in found:
                found[agent.name] = agent
                waiting.append(agent)
            elif agent.name not in own and found[agent.name] != agent:
                raise _two(agent.name)
    return found


def _two(name: str) -> InvalidDefinition:
    return InvalidDefinition(f"two agents are named {name!r}: give each a name of its own")
