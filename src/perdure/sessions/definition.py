"""What a turn asks of its agent: the definition made ready to run, the model, and the settings of its session."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from perdure.engine.deps import Make
from perdure.errors import (
    InvalidDefinition,
    InvalidInput,
    MetadataConflict,
    PerdureError,
    ProviderError,
    StaleSettings,
    quoted,
)
from perdure.model import validate
from perdure.model.agent import WAKE_DEPTH, AgentSpec, Budget, Mode
from perdure.model.code import CPython
from perdure.model.command import CommandHold
from perdure.model.llm import DEFAULT_SETTINGS, Delta, ModelChoice, ModelRequest, ModelSettings
from perdure.model.message import Scalar
from perdure.model.outcome import Finished
from perdure.model.retries import Retries
from perdure.model.session import (
    SessionRow,
    Settings,
    choosing,
    describing,
    dump_settings,
    load_settings,
    same_metadata,
)
from perdure.model.tool import OutputBudget, ProviderTool
from perdure.model.write import Configure
from perdure.plugins.registry import PluginSet
from perdure.ports.code import Executor
from perdure.ports.host import Clock
from perdure.ports.protocol import TurnProtocol
from perdure.ports.provider import Connecting, Provider, candidates, is_provider
from perdure.ports.store import Store
from perdure.sessions.operation_table import OperationTable
from perdure.tools.answer import schema_codec
from perdure.tools.catalog import Catalog, Membership
from perdure.turn.code import CodeProtocol
from perdure.turn.tools import NATIVE, ToolsProtocol


class Definition(Struct):
    """A live agent. `output_rule` reads a final text as JSON of the output type; `revive` makes the typed output.
    `instruct` makes the instructions of one run of a turn, where the host gave a function; `instructions` are then what
    plugins have added to them. `models` are those that `provider` stands for, in the order in which they are asked.
    `executor` runs the cells of an agent in code mode; `code` says which it is to be, where that is not Monty.
    `protocol` is how its model is asked, and what answers mean."""

    name: str
    provider: Provider
    instructions: str = ""
    catalog: Catalog | Membership = field(default_factory=Catalog)
    budget: Budget = field(default_factory=Budget)
    output_schema: dict[str, Any] | None = None
    output_rule: Callable[[str], Any] | None = None
    revive: Callable[[Finished], Any] | None = None
    output_budget: OutputBudget = field(default_factory=OutputBudget)
    plugins: PluginSet = field(default_factory=PluginSet)
    operations: OperationTable = field(default_factory=OperationTable)
    wake_depth: int | None = WAKE_DEPTH
    settings: ModelSettings = DEFAULT_SETTINGS
    provider_tools: tuple[ProviderTool, ...] = ()
    models: tuple[Provider, ...] = ()
    instruct: Make | None = None
    mode: Mode = "tools"
    executor: Executor | None = None
    protocol: TurnProtocol = NATIVE
    wait_for_commands: CommandHold | None = None
    code: CPython | None = None
    retries: Retries | None = None

    def __post_init__(self) -> None:
        self.models = candidates(self.provider)  # made once, and again when a turn chooses another provider

    @property
    def runs_code(self) -> bool:
        """Whether its model writes cells: in code mode, or with the tool `run_code`."""
        return self.mode == "code" or (isinstance(self.catalog, Catalog) and self.catalog.runs_code)

    def executed_by(self, executor: Executor) -> Definition:
        """The definition of an agent whose model writes cells, with what runs them."""
        describe = executor.describe
        protocol = CodeProtocol(describe) if self.mode == "code" else ToolsProtocol(describe)
        return replace(self, executor=executor, protocol=protocol)

    def instructed(self, text: str) -> Definition:
        """The definition with the instructions that its function has made."""
        both = [each for each in (text, self.instructions) if each]
        return replace(self, instructions="\n\n".join(both), instruct=None)


def with_retries(definition: Definition, usual: Retries) -> Definition:
    """Return a definition that was just made with these retries of model calls, unless its agent has its own."""
    if definition.retries is None:
        definition.retries = usual
    return definition


def answering(definition: Definition, schema: dict[str, Any]) -> Definition:
    """The definition with another output: JSON that fits a schema."""
    codec = schema_codec(schema)
    return replace(definition, output_schema=schema, output_rule=codec.validate, revive=plainly)


def plainly(finished: Finished) -> Any:
    """The typed output of a schema without a type: the JSON itself."""
    return finished.value


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


# ---------------------------------------------------------------------- models

# Which model a turn asks, where a session or an input names another than its agent's.
#
# What is kept is a name: a string that the registry knows, or one under which the Runtime was given a Provider
# (`Runtime(models={…})`). So an interrupted turn asks the same model in the process that takes it up: a choice of the
# input is in its record, one of the session holds for the inputs that are accepted after it (`settings.choice_for`).
# Settings of the input go before those of the session, and those before the agent's.


class Models:
    """The models of a Runtime besides those of its agents; each is made when it is first asked for."""

    def __init__(self, given: Mapping[str, Provider], opened: contextlib.AsyncExitStack) -> None:
        self._given, self._opened = given, opened
        self._made: dict[str, Provider] = {}

    def choice(self, model: object, settings: object) -> ModelChoice | None:
        """What a caller asks for, as it is kept."""
        if settings is not None and not isinstance(settings, ModelSettings):
            raise InvalidInput(f"settings={quoted(settings)} is not usable: give ModelSettings(…)")
        name = "" if model is None else self._name(model)
        return ModelChoice(name, settings) if name or settings is not None else None

    def _name(self, model: object) -> str:
        if isinstance(model, str):
            if model not in self._given and model != "scripted":
                _registry().check(model)
            return model
        for name, each in self._given.items():
            if each is model:
                return name
        raise InvalidInput(
            f"{quoted(model)} cannot be named, and only names are kept: give it to the Runtime, "
            "Runtime(models={'mine': …}), and say model='mine'"
        )

    async def applied(self, definition: Definition, *choices: ModelChoice | None) -> Definition:
        """The definition as these choices leave it, the first going before the others."""
        made = [choice for choice in choices if choice is not None]
        if not made:
            return definition
        name = next((choice.model for choice in made if choice.model), "")
        settings = definition.settings
        for choice in reversed(made):
            settings = settings if choice.settings is None else choice.settings.over(settings)
        provider = await self.provider(name) if name else definition.provider
        return replace(definition, provider=provider, settings=settings)

    async def provider(self, name: str) -> Provider:
        """The model by that name; one that cannot be had refuses when it is asked."""
        if name not in self._made:
            try:
                found = self._given.get(name) or _registry().named(name)
            except PerdureError as error:
                # Not kept: what is missing may be set in the environment before the next turn.
                return Missing(name, str(error) if ":" in name else f"give it one, models={{{name!r}: …}}")
            self._made[name] = found  # before the first wait: another turn may ask for it meanwhile
            await keep_open(found, self._opened, made=name not in self._given)
        return self._made[name]


async def keep_open(provider: Provider, opened: contextlib.AsyncExitStack, made: bool) -> None:
    """Keep the connections of a model until `opened` is left.

    One that this Runtime `made` from a string is closed then. An object of the host's is the host's to close: it may be
    in other Runtimes, and in the next one.
    """
    for each in candidates(provider):
        if isinstance(each, Connecting):
            await opened.enter_async_context(each.connected())
        elif made and callable(close := getattr(each, "aclose", None)):
            opened.push_async_callback(close)


def _registry() -> ModuleType:
    from perdure.providers import registry  # noqa: PLC0415  # `import perdure` loads no provider

    return registry


class Missing:
    """Stands for a model that was named in another process and cannot be had in this one."""

    def __init__(self, name: str, why: str) -> None:
        self.name, self._why = name, why

    def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        raise ProviderError(
            f"this turn is to ask the model {self.name!r}, which is not to be had in this Runtime: {self._why}",
            code="no_model",
        )


def checked(models: Any) -> dict[str, Provider]:
    """`Runtime(models=…)`: names and what answers under them."""
    if not isinstance(models, Mapping):
        raise InvalidDefinition(f"models={quoted(models)} is not usable: give a dict of names and models")
    found: dict[str, Provider] = {}
    for name, model in models.items():
        if not isinstance(name, str) or not name.strip() or len(name) > 200:
            raise InvalidDefinition(f"{quoted(name)} is no name of a model")
        if isinstance(model, str):
            found[name] = _registry().named(model)
        elif is_provider(model):
            found[name] = model
        else:
            raise InvalidDefinition(f"models[{name!r}]={quoted(model)} is no model: name one, or give a Provider")
    return found


def check_limited(limits: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a limit for a service that there is not: it would limit nothing. `names` are those of models at hand."""
    known = {part.partition(":")[0] for name in names for part in name.split(" | ")}  # a list of models names them all
    for limit in limits:
        service, colon, _ = limit.partition(":")
        if colon and service not in known and not _registry().is_service(service):
            raise InvalidDefinition(
                f"rate_limits[{quoted(limit)}] limits nothing: there is no provider {quoted(service)}, and no agent or "
                "model of this Runtime is named so"
            )


# ---------------------------------------------------------------------- settings

# A session's row is replaced only if it has not changed since it was read.

SettingsEdit: TypeAlias = Callable[[Settings, SessionRow], Settings]
"""The settings of a session as an edit leaves them, from those in its row."""


async def edit_settings(store: Store, clock: Clock, session_id: str, agent: str, edit: SettingsEdit) -> None:
    """Make an edit durable, on top of whatever others have changed meanwhile."""
    while True:
        row = await store.session(session_id) or SessionRow(0, session_id, agent)
        wanted = dump_settings(edit(load_settings(row.settings), row))
        if wanted == row.settings:
            return
        try:
            await store.write(
                Configure(session_id, agent, wanted, clock.now(), row.settings, next=row.next, head=row.head)
            )
        except StaleSettings:
            continue
        return


def with_options(options: Mapping[str, Any], metadata: dict[str, Scalar] | None) -> SettingsEdit:
    """The edit that sets options of plugins. They are durable because recovery has no host code to ask for them.

    A session that they create begins with `metadata`, which one that exists must have.
    """

    def edit(old: Settings, row: SessionRow) -> Settings:
        if metadata is not None and row.sid and not same_metadata(metadata, old.metadata):
            raise MetadataConflict(row.id, metadata, old.metadata)
        begun = old if row.sid else replace(old, metadata=metadata or {})
        return replace(begun, options=old.options | dict(options))

    return edit


def with_description(metadata: dict[str, Scalar] | None, title: str | None) -> SettingsEdit:
    """The edit that says anew whom a session is for, from its next turn on, and what it is called; None leaves it."""

    def edit(old: Settings, row: SessionRow) -> Settings:
        described = old if metadata is None else describing(old, metadata, row.turn)
        return described if title is None else replace(described, title=title)

    return edit


def with_choice(choice: ModelChoice | None, reset: bool) -> SettingsEdit:
    """The edit that sets which model is asked by turns whose input is accepted from now on; over what was chosen
    before, unless that is `reset`."""

    def edit(old: Settings, row: SessionRow) -> Settings:
        before, wanted = None if reset else old.choice, choice
        if wanted is None or before is None:
            wanted = wanted or before
        else:
            settings = before.settings if wanted.settings is None else wanted.settings.over(before.settings)
            wanted = ModelChoice(wanted.model or before.model, settings)
        return choosing(old, wanted, row.next if row.turn is None else row.turn, row.next)

    return edit
