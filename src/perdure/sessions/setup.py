"""What a session runs with: its agent's definition, and everything that plugins and settings change about it.

    equip   settings → instances of plugins → their state → configuration → tools

A session without settings whose plugins keep nothing for it runs with the agent's own definition, and costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, ValidationError, structs

from perdure.engine.control import TurnAborted
from perdure.engine.waiters import current_metadata
from perdure.errors import BlobMissing, InvalidDefinition, InvalidInput, PluginError, PluginFault, quoted
from perdure.graph.commit import End
from perdure.graph.view import View
from perdure.model import validate
from perdure.model.codec import clean, clean_text, convert, copied, error_text
from perdure.model.llm import ModelChoice
from perdure.model.message import Message, Metadata, Scalar, Text
from perdure.model.monitor import PluginMonitor, plugin_monitors
from perdure.model.plugin import Issue, PluginSnapshot, PromptPart
from perdure.model.record import Record
from perdure.model.session import (
    SessionRow,
    Settings,
    choice_for,
    edited_tools,
    load_settings,
    metadata_for,
    settings_after_commit,
)
from perdure.model.tool import ToolSpec
from perdure.plugins import calls
from perdure.plugins.calls import PhaseProbe, PluginProtocol, withheld
from perdure.plugins.hooks import CatalogContext, Plugin, PromptContext, SessionConfig, SessionContext, StreamContext
from perdure.plugins.registry import PluginSession, PluginStates, fingerprint, overrides, restore_snapshot
from perdure.ports.services import TraceSink
from perdure.ports.store import BlobStore
from perdure.sessions.definition import Definition, Missing, Models, answering
from perdure.tools.catalog import Catalog, Membership

log = logging.getLogger("perdure.sessions")


class Overlay(Plugin):
    """What a host lays over one session: tools beside, or in place of, its agent's, and pieces of prompt."""

    id = "context"

    def __init__(self, tools: Iterable[Any] = (), prompts: Iterable[PromptPart | str] = (), base: bool = True) -> None:
        self.given = validate.several(tools, "tools", InvalidDefinition)
        self.base = validate.flag(base, "include_base", InvalidDefinition)
        self.prompts = tuple(_piece(part) for part in validate.several(prompts, "prompts", InvalidDefinition))
        try:
            self.catalog = Catalog(self.given)  # refused here, before anything changes
        except InvalidDefinition as error:
            raise InvalidDefinition(f"failed to build session tool registry: {error}") from error

    def prompt(self, ctx: PromptContext) -> Sequence[PromptPart]:
        return self.prompts

    def same(self, other: Overlay | None) -> bool:
        """Whether it would change nothing: the same objects in the same order, and equal prompts."""
        if other is None:
            return not self.given and not self.prompts and self.base
        return (
            self.base == other.base
            and self.prompts == other.prompts
            and len(self.given) == len(other.given)
            and all(a is b for a, b in zip(self.given, other.given, strict=True))
        )


def _piece(part: object) -> PromptPart:
    made = PromptPart(clean_text(part)) if isinstance(part, str) else part
    if not isinstance(made, PromptPart):
        raise InvalidDefinition(f"a {type(made).__name__} is no piece of prompt: give text or a PromptPart")
    return validate.readable(made, "a piece of prompt", InvalidDefinition)


class Setup(Struct):
    """`definition` is the agent's as this session sees it; `issues` are what its next turn has to report.
    `waiting` are the states that commands put on disk and no turn has recorded yet.

    Valid for the settings it was made from, and for what was committed up to `head`. `choice` and `metadata` are those
    that the turn it was made for was accepted and opened under: the same settings may have others for the next one.
    `monitors` are those that plugins offer, and `arming` the ones of them that no turn of this setup has seen to yet.
    """

    definition: Definition
    plugins: PluginSession | None = None
    kept: PluginStates | None = None
    config: SessionConfig | None = None
    contexts: dict[str, SessionContext] = {}
    settings: bytes = b""
    head: int = 0
    issues: list[Issue] = []
    overlay: Overlay | None = None
    waiting: dict[str, PluginSnapshot] = {}
    shared: bool = False
    choice: ModelChoice | None = None
    metadata: dict[str, Scalar] = {}
    monitors: tuple[PluginMonitor, ...] = ()
    arming: tuple[PluginMonitor, ...] = ()

    def move_on(self, row: SessionRow, end: End) -> None:
        """A turn of this setup is committed. Where anybody changed the settings meanwhile, it does not fit any more."""
        expected = settings_after_commit(self.settings, end.tools, end.recorded) if self.settings else b""
        self.head, self.waiting = row.head, load_settings(row.settings).snapshots
        if row.settings == expected and not end.tools:
            self.settings = row.settings

    def saved(self, before: bytes, after: bytes, waiting: dict[str, PluginSnapshot]) -> None:
        """A command put its plugins' states on disk: it still fits if nothing else has changed the settings."""
        self.waiting = waiting
        if self.settings == before:
            self.settings = after

    def take_issues(self) -> list[Issue]:
        """What the turn that begins now reports, and no later one."""
        issues, self.issues = self.issues, []
        return issues

    def fits(self, row: SessionRow, overlay: Overlay | None) -> bool:
        """Whether it was made from what is the case now."""
        if self.head != row.head or self.settings != row.settings or self.overlay is not overlay:
            return False
        if isinstance(self.definition.provider, Missing):
            return False  # what the model lacks may be there by now
        return not row.settings or (self.choice, self.metadata) == opened_under(load_settings(row.settings), row)


def opened_under(settings: Settings, row: SessionRow) -> tuple[ModelChoice | None, dict[str, Scalar]]:
    """The choice of model that the open turn was accepted under, and the metadata that it was opened under; without an
    open turn, those of the next one."""
    turn = row.turn or row.next
    return choice_for(settings, turn), metadata_for(settings, turn)


def lean(definition: Definition) -> Setup:
    """For every session without decisions of its own, of an agent whose plugins keep nothing for one."""
    return Setup(definition, definition.plugins.shared, PluginStates((), {}), shared=True)


async def equip(  # noqa: PLR0913  # everything that a session is made of
    definition: Definition,
    row: SessionRow,
    view: View,
    records: Sequence[Record],
    blobs: BlobStore,
    models: Models,
    overlay: Overlay | None = None,
    probe: calls.PhaseProbe | None = None,
) -> Setup:
    """Make a session ready. Raises TurnAborted where a plugin refuses it."""
    settings = load_settings(row.settings)
    choice, metadata = opened_under(settings, row)
    definition = await models.applied(definition, choice)
    contexts = contexts_of(definition, row.id, structs.replace(settings, metadata=metadata))
    try:
        session = definition.plugins.open(contexts)
        await calls.collect(session.hooks("session_ready"), lambda plugin: (contexts[plugin.id],))
    except PluginError as error:
        raise TurnAborted(error.plugin, "plugin_session", str(error)) from error
    recorded, tools = dict[str, PluginSnapshot](), settings.tools
    for slot in [slot for record in records if (slot := getattr(record, "slot", None)) is not None]:
        recorded.update(slot.snapshots or {})
        tools = edited_tools(tools, slot.tool_state) if slot.tool_state else tools
    # What waits is later than all that is committed, since a commit takes out what it has recorded; it may be earlier
    # than what this turn has recorded since.
    waiting = {n: s for n, s in settings.snapshots.items() if n not in recorded or s.revision >= recorded[n].revision}
    snapshots = {**view.snapshots, **recorded, **waiting}
    session, issues = await _restored(session, snapshots, blobs)
    kept = _kept(session, snapshots)
    for name in waiting:
        kept.counts.pop(name, None)  # changed between turns: the next record carries it
    config, configured = await _configured(definition, session, contexts, models, issues)
    if view.head or len(records) > 1:
        hooks = calls.probed(session.hooks("session_restored"), probe)
        issues += await calls.notify(hooks, lambda plugin: (contexts[plugin.id],))
    catalog = _membership(definition, session, structs.replace(settings, tools=tools, metadata=metadata), row.id)
    if overlay is not None:
        session = session.and_also(overlay)
        catalog = catalog if isinstance(catalog, Membership) else Membership(catalog)
        catalog.overlay(overlay.catalog, overlay.base)
    own = structs.replace(configured, catalog=catalog)
    for plugin, method in session.hooks("protocol").entries:  # one at most
        own = structs.replace(own, protocol=PluginProtocol(plugin.id, method, own.protocol))
    if settings.output is not None:
        own = answering(own, settings.output)
    known, monitors = settings.snapshots, _monitors(session, contexts)
    arming = tuple([each for each in monitors if each.spec.arm_on == "session_start"])
    return Setup(
        own, session, kept, config, contexts, row.settings, row.head, issues, overlay, known,
        choice=choice, metadata=metadata, monitors=monitors, arming=arming,
    )  # fmt: skip


def _monitors(session: PluginSession, contexts: Mapping[str, SessionContext]) -> tuple[PluginMonitor, ...]:
    """The monitors that plugins offer to a session."""
    found: list[PluginMonitor] = []
    for plugin, method in session.hooks("monitors").entries:
        try:
            found += plugin_monitors(plugin.id, method(contexts[plugin.id]))
        except BaseException as error:  # a plugin without its monitors is not what the agent was made with
            what = f"monitors: {type(error).__name__}: {error_text(error)}"
            raise TurnAborted(plugin.id, "plugin_session", what) from error
    return tuple(found)


def _kept(session: PluginSession, snapshots: Mapping[str, PluginSnapshot]) -> PluginStates:
    try:
        return PluginStates([plugin for plugin in session.plugins if overrides(plugin, "snapshot")], snapshots)
    except PluginFault as fault:
        raise TurnAborted(fault.plugin, "plugin_session", str(fault)) from fault


async def changed(before: Setup, after: Setup, probe: calls.PhaseProbe | None = None) -> list[Issue]:
    """Tell plugins when a session runs differently from the turn before."""
    old, new, session = before.config, after.config, after.plugins
    if old is None or new is None or old == new or session is None:
        return []
    hooks = calls.probed(session.hooks("session_config_changed"), probe)
    return await calls.notify(hooks, lambda plugin: (after.contexts[plugin.id], old, new))


def contexts_of(definition: Definition, session_id: str, settings: Settings) -> dict[str, SessionContext]:
    """What each plugin is told of a session."""
    hidden = frozenset(settings.hidden)
    return {
        plugin.id: SessionContext(
            session_id,
            definition.name,
            copied(settings.options.get(plugin.id)),
            settings.parent,
            hidden,
            settings.depth,
            Metadata(settings.metadata),
            definition.plugins.extensions,
        )
        for plugin in definition.plugins.plugins
    }


def checked_options(
    definition: Definition | None, session_id: str, options: Mapping[str, Any], settings: Settings
) -> dict[str, Any]:
    """Options as JSON, after plugins have had a look at them beside what was decided for the session before."""
    if definition is None:
        raise InvalidInput("options are for plugins of an agent, and its agent is not part of this Runtime")
    if not isinstance(options, Mapping):
        raise InvalidInput(f"options are given by the id of their plugin, not as a {type(options).__name__}")
    known = definition.plugins.ids
    unknown = [name for name in options if name not in known]
    if unknown:
        there = ", ".join(known) or "none"
        raise InvalidInput(
            f"there is no plugin {quoted(unknown[0])} to give options to; agent {definition.name!r} has: {there}"
        )
    plain: dict[str, Any] = clean(dict(options))
    beside = structs.replace(settings, options=settings.options | plain)
    definition.plugins.open(contexts_of(definition, session_id, beside))
    return plain


def shown(setup: Setup | TurnAborted, session_id: str, messages: Sequence[Message]) -> list[Message]:
    """Committed messages as people see them: a plugin of the session shows an assistant's text differently."""
    if isinstance(setup, TurnAborted):  # there is no instance to ask
        text = Text(withheld("text", setup.plugin))
        return [_shown(lambda _: text, each) for each in messages]
    plugins = setup.plugins
    entries = () if plugins is None else plugins.hooks("project_prose").entries
    if not entries:
        return [copied(each) for each in messages]
    (plugin, method), metadata = entries[0], Metadata(setup.metadata)
    ctx = StreamContext(session_id, "", setup.definition.name, None, 0, metadata=metadata)

    def projected(part: Text) -> Text:
        try:
            text: object = method(ctx, part.text)
            if not isinstance(text, str):
                raise TypeError(f"it returned a {type(text).__name__}, not text")
            return Text(clean_text(text))
        except Exception as error:  # history can always be read, and what it was to hide is not shown
            log.warning("project_prose of plugin %s: %s: %s", plugin.id, type(error).__name__, error)
            return Text(withheld("text", plugin.id))

    return [_shown(projected, each) for each in messages]


def _shown(projected: Callable[[Text], Text], message: Message) -> Message:
    if message.role != "assistant":
        return copied(message)
    return Message(message.role, tuple([projected(p) if isinstance(p, Text) else copied(p) for p in message.parts]))


async def _restored(
    session: PluginSession, snapshots: dict[str, PluginSnapshot], blobs: BlobStore
) -> tuple[PluginSession, list[Issue]]:
    """Plugins with their state; without those that cannot read theirs."""
    issues: list[Issue] = []
    absent: list[str] = []
    for plugin in session.plugins:
        if not overrides(plugin, "restore"):
            continue
        snapshot = snapshots.get(plugin.id)
        issue = restore_snapshot(plugin, snapshot, await _bytes(snapshot, blobs))
        if issue is None:
            continue
        if plugin.required or plugin.is_filter:  # without a filter, what it hides would be recorded
            raise TurnAborted(plugin.id, issue.code, f"plugin {plugin.id!r}: {issue.message}")
        log.warning("plugin %s is left out: %s", plugin.id, issue.message)
        issues.append(issue)
        absent.append(plugin.id)
    return (session.without(absent) if absent else session), issues


async def _bytes(snapshot: PluginSnapshot | None, blobs: BlobStore) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for ref in snapshot.blobs.values() if snapshot is not None else ():
        try:
            found[ref.digest] = await blobs.get(ref.digest)
        except BlobMissing:
            continue  # the plugin sees that a name has no bytes, and says what it makes of that
    return found


async def _configured(
    definition: Definition,
    session: PluginSession,
    contexts: dict[str, SessionContext],
    models: Models,
    issues: list[Issue],
) -> tuple[SessionConfig, Definition]:
    """The configuration after every plugin had its say, and the definition with it. A plugin that fails changes
    nothing."""
    model = clean_text(str(definition.provider.name))
    config = SessionConfig(
        definition.instructions, definition.budget, model, definition.settings, definition.output_budget
    )
    for plugin, method in session.hooks("configure").entries:
        hooks = calls.Hooks("configure", ((plugin, method),), True)
        told = (contexts[plugin.id], config)
        try:
            changed: object = (await calls.collect(hooks, lambda _, told=told: told))[0][1]  # type: ignore[misc]
            if not isinstance(changed, SessionConfig):
                raise PluginFault(plugin.id, "configure", f"it returned a {type(changed).__name__}")
            wanted = convert(clean(changed), SessionConfig)
            if wanted.model not in ("", model, config.model):
                models.choice(wanted.model, None)  # refuses a name that nothing could answer to
            config = SessionConfig(
                wanted.instructions,
                wanted.budget,
                wanted.model or config.model,
                wanted.settings or config.settings,
                wanted.output_budget or config.output_budget,
            )
        except (PluginFault, InvalidInput, ValidationError) as error:
            fault = error if isinstance(error, PluginFault) else PluginFault(plugin.id, "configure", str(error))
            log.warning("%s", fault)
            issues.append(Issue("config_mutator_failed", str(fault), plugin.id))
    provider = definition.provider if config.model == model else await models.provider(config.model)
    return config, structs.replace(
        definition,
        provider=provider,
        instructions=config.instructions,
        budget=config.budget,
        settings=config.settings or definition.settings,
        output_budget=config.output_budget or definition.output_budget,
    )


def _membership(
    definition: Definition, session: PluginSession, settings: Settings, session_id: str
) -> Membership | Catalog:
    """The tools of the session; the agent's own where nothing makes a difference."""
    assert isinstance(definition.catalog, Catalog)
    makers = [each for each in session.hooks("tools").entries if overrides(each[0], "for_session")]
    base = definition.catalog
    for plugin, method in makers:
        tools = _tools(plugin, method)
        try:
            base = base.extended(tools) if tools else base
        except InvalidDefinition as error:
            raise TurnAborted(plugin.id, "plugin_session", f"tools: {error}") from error
    hiding = session.hooks("hidden_tools")
    if not hiding and not settings.hidden and settings.only is None and not settings.tools.members:
        return base

    def removals(specs: Sequence[ToolSpec]) -> set[str]:
        shown, gone = tuple([session.show(spec) for spec in specs]), set()
        ctx = CatalogContext(session_id, definition.name, shown, metadata=Metadata(settings.metadata))
        for plugin, method in hiding.entries:
            try:
                gone |= _names(method(ctx))
            except BaseException as error:  # who hides tools protects something: without it, no turn
                what = f"hidden_tools: {type(error).__name__}: {error_text(error)}"
                raise TurnAborted(plugin.id, "plugin_session", what) from error
        return gone

    def version() -> int:
        try:
            return fingerprint(counted)
        except PluginFault as fault:  # what it hides may have changed, which cannot be known
            raise TurnAborted(fault.plugin, "plugin_session", str(fault)) from fault

    counted = [plugin for plugin, _ in hiding.entries]
    return Membership(base, settings.tools, settings.hidden, removals, version, settings.only)


def _tools(plugin: Plugin, method: Callable[[], Iterable[object]]) -> list[object]:
    try:
        return list(method())
    except BaseException as error:  # a plugin without its tools is not what the agent was made with
        what = f"tools: {type(error).__name__}: {error_text(error)}"
        raise TurnAborted(plugin.id, "plugin_session", what) from error


def _names(given: Iterable[str]) -> set[str]:
    """Names of tools. A single string would be taken apart, and hide nothing."""
    names: set[object] = set([given] if isinstance(given, str) else given)
    wrong = next((name for name in names if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"a {type(wrong).__name__} is no name of a tool")
    return {name for name in names if isinstance(name, str)}


# ---------------------------------------------------------------------- traces

# Lines of a host's trace about one session. A sink that raises or is slow ends no turn.


class Tracer:
    """Writes what it is told to a sink, under a session and, in a turn, its id."""

    __slots__ = ("_session_id", "_sink", "_turn_id")

    def __init__(self, sink: TraceSink, session_id: str, turn_id: str | None = None) -> None:
        self._sink, self._session_id, self._turn_id = sink, session_id, turn_id

    def write(self, name: str, payload: Any = None, context: Mapping[str, Any] | None = None) -> None:
        told = {"session_id": self._session_id, "turn_id": self._turn_id, "payload": payload, "context": context or {}}
        if metadata := current_metadata():
            told["metadata"] = dict(metadata)
        try:
            self._sink.write(name, told)
        except Exception as error:  # a sink of the host may raise anything: no turn and no plugin is to blame for it
            log.warning("the trace did not take %s: %s: %s", name, type(error).__name__, error_text(error))


def probe_of(sink: TraceSink | None, session_id: str, turn_id: str | None = None) -> PhaseProbe | None:
    """What writes when hooks begin and end, where there is a trace."""
    return None if sink is None else Tracer(sink, session_id, turn_id).write
