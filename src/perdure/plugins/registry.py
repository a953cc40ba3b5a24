"""The plugins of an agent, checked as a whole; what a session has of them, and what it keeps of their state."""

from __future__ import annotations

import hashlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import InvalidDefinition, InvalidInput, PluginConflict, PluginError, PluginFault
from perdure.model import validate
from perdure.model.codec import INT_MAX, INT_MIN, clean, clean_text, copied, encode_checked, error_text, read_only_spec
from perdure.model.plugin import Extension, Issue, PluginSnapshot, TriggerEvent
from perdure.model.tool import BlobRef, ToolSpec
from perdure.plugins.calls import Hooks, notify
from perdure.plugins.hooks import EXCLUSIVE, HOOKS, Plugin, SessionContext, SnapshotReader, SnapshotWriter
from perdure.plugins.operations import is_operation
from perdure.ports.process import Engine

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger("perdure.plugins")

GROUP = "perdure.plugins"

SESSION_HOOKS = (
    "for_session",
    "session_ready",
    "restore",
    "configure",
    "tools",
    "hidden_tools",
    "monitors",
    "session_restored",
    "session_config_changed",
    "trigger_events",
    "engines",
    "project_prose",
    "protocol",
    "transform_input",
    "shutdown",
    "extensions",
)
"""Hooks of a session or a Runtime rather than of a turn."""

OF_THE_AGENT = ("tools", "transform_input", "shutdown", "extensions")
"""Those of them that are the same in every session of plugins that keep nothing for one."""

BY_PRIORITY = ("transform_view", "compact")
"""Hooks that run by descending priority; all others in the order of the plugins."""

FILTERS_LAST = ("after_tool_call", "transform_text", "transform_response")
"""Hooks that see what is about to be recorded: filters have the last word there."""

PLAIN = (
    *("for_session", "tools", "hidden_tools", "trigger_events", "engines", "transform_text", "project_prose"),
    *("filter_value", "snapshot", "restore", "extensions", "monitors", "protocol", "code_executor"),
)
"""Hooks that are asked where nothing can wait, or for every piece of text."""

_NOBODY = {hook: Hooks(hook) for hook in HOOKS}


class PluginSet:
    """Who has which hook. Made once per agent; nothing is registered when anything is wrong with it."""

    def __init__(self, plugins: Iterable[Any] = ()) -> None:
        self.plugins = tuple([_checked(plugin) for plugin in validate.several(plugins, "plugins", InvalidDefinition)])
        self._owners: dict[str, tuple[int, ...]] = {}
        seen: set[str] = set()
        for plugin in self.plugins:
            if plugin.id in seen:
                raise PluginConflict(plugin.id, plugin.id, f"the id {plugin.id!r}")
            seen.add(plugin.id)
        for hook in HOOKS:
            owners = [i for i, plugin in enumerate(self.plugins) if overrides(plugin, hook)]
            if hook in EXCLUSIVE and len(owners) > 1:
                first, second = self.plugins[owners[0]], self.plugins[owners[1]]
                raise PluginConflict(second.id, first.id, f"the slot {hook}")
            if hook in BY_PRIORITY:
                owners.sort(key=lambda i: -self.plugins[i].priority)
            if owners:
                self._owners[hook] = tuple(owners)
        self.trigger_events = self._triggers()
        self._extensions = self._added()
        self._shared = self._session(self.plugins)
        # The tools of a plugin that makes no instances are the agent's own: they are the same in every session.
        makers = {self.plugins[i].id for i in self._owners.get("for_session", ())}
        self.shared_tools = [p for p in self.plugins if overrides(p, "tools") and p.id not in makers]
        self.lean = not makers and not any(hook in self._owners for hook in SESSION_HOOKS if hook not in OF_THE_AGENT)

    def __bool__(self) -> bool:
        return bool(self.plugins)

    def has(self, hook: str) -> bool:
        return hook in self._owners

    def _triggers(self) -> tuple[TriggerEvent, ...]:
        """The events that plugins will report; each kind belongs to one of them."""
        found: dict[str, tuple[str, TriggerEvent]] = {}
        for index in self._owners.get("trigger_events", ()):
            plugin = self.plugins[index]
            for event in _events(plugin):
                if not isinstance(event, TriggerEvent):
                    raise InvalidDefinition(
                        f"plugin {plugin.id!r} declares a {type(event).__name__} as a trigger event"
                    )
                if event.source_type in found:
                    raise PluginConflict(plugin.id, found[event.source_type][0], f"the event {event.source_type!r}")
                found[event.source_type] = (plugin.id, event)
        return tuple([event for _, event in found.values()])

    def _added(self) -> dict[str, tuple[Extension, ...]]:
        """What plugins add to each other, by what they add to."""
        found: dict[str, tuple[Extension, ...]] = {}
        for index in self._owners.get("extensions", ()):
            plugin = self.plugins[index]
            for name, value in _extensions_of(plugin).items():
                found[name] = (*found.get(name, ()), Extension(plugin.id, value))
        return found

    @property
    def extensions(self) -> dict[str, tuple[Extension, ...]]:
        """The same, as a copy of its own for each caller."""
        return {
            name: tuple([Extension(each.plugin, copied(each.value)) for each in added])
            for name, added in self._extensions.items()
        }

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple([plugin.id for plugin in self.plugins])

    def hooks(self, name: str) -> Hooks:
        """Who has this hook, on the objects that the agent was given."""
        return self._shared.hooks(name)

    def owner(self, hook: str) -> Plugin | None:
        """The plugin that has an exclusive slot."""
        owners = self._owners.get(hook)
        return self.plugins[owners[0]] if owners else None

    @property
    def shared(self) -> PluginSession | None:
        """What every session has of plugins that keep nothing for one (`lean`); None when they do nothing in turns."""
        return self._shared if self._shared.acts else None

    def open(self, contexts: Mapping[str, SessionContext]) -> PluginSession:
        """What a session has of the plugins; the same for all when no plugin keeps anything per session."""
        if "for_session" not in self._owners:
            return self._shared
        instances = list(self.plugins)
        for index in self._owners["for_session"]:
            instances[index] = _made(self.plugins[index], contexts[self.plugins[index].id])
        return self._session(tuple(instances))

    def _session(self, instances: tuple[Plugin, ...]) -> PluginSession:
        table = {}
        for hook, owners in self._owners.items():
            if isinstance(getattr(Plugin, hook), property):
                continue
            entries = tuple([(instances[i], getattr(instances[i], hook)) for i in owners])
            table[hook] = _hooks(hook, entries)
        return PluginSession(instances, table)


class PluginSession:
    """The plugins of one session: their instances, and the hooks that they have.

    `table` has the hooks that one of them has. `absent` are plugins whose snapshot could not be read: their hooks are
    not called until it can. `acts`: they have something to do while a turn runs. `shown` are the tools as hooks were
    shown them, each with the one that it was made from.
    """

    __slots__ = ("absent", "acts", "plugins", "shown", "table")

    def __init__(self, plugins: tuple[Plugin, ...], table: dict[str, Hooks]) -> None:
        self.plugins, self.table = plugins, table
        self.shown: dict[str, tuple[ToolSpec, ToolSpec]] = {}
        self.absent: frozenset[str] = frozenset()
        self.acts = any(hook not in SESSION_HOOKS for hook in table)

    def hooks(self, name: str) -> Hooks:
        """The plugins that have this hook."""
        return self.table.get(name) or _NOBODY[name]

    def has(self, name: str) -> bool:
        return name in self.table

    def show(self, tool: ToolSpec) -> ToolSpec:
        """A tool as hooks are shown it: its schemas are the catalogue's, and read-only for them."""
        known = self.shown.get(tool.name)
        if known is None or known[0] is not tool:
            known = self.shown[tool.name] = (tool, read_only_spec(tool))
        return known[1]

    @property
    def names(self) -> Iterable[str]:
        """The hooks that at least one plugin has."""
        return self.table.keys()

    def and_also(self, plugin: Plugin) -> PluginSession:
        """The same with one more plugin, after the others."""
        table = dict(self.table)
        for name in HOOKS:
            if overrides(plugin, name) and not isinstance(getattr(Plugin, name), property):
                table[name] = _hooks(name, (*self.hooks(name).entries, (plugin, getattr(plugin, name))))
        more = PluginSession((*self.plugins, plugin), table)
        more.absent = self.absent
        return more

    def without(self, absent: Iterable[str]) -> PluginSession:
        """The same without some plugins."""
        gone = self.absent | frozenset(absent)
        table = {}
        for name, hooks in self.table.items():
            entries = tuple([each for each in hooks.entries if each[0].id not in gone])
            if entries:
                table[name] = _hooks(name, entries)
        rest = PluginSession(self.plugins, table)
        rest.absent = gone
        return rest


def _events(plugin: Plugin) -> list[object]:
    try:
        return list(plugin.trigger_events())
    except Exception as error:  # a plugin that cannot say what it reports is not what the agent was made with
        why = f"trigger_events of plugin {plugin.id!r} raised {type(error).__name__}: {error_text(error)}"
        raise InvalidDefinition(why) from error


def _extensions_of(plugin: Plugin) -> dict[str, Any]:
    ask: Callable[[], object] = plugin.extensions
    try:
        added = ask()
        if not isinstance(added, Mapping):
            raise TypeError(f"a {type(added).__name__} is no dict of JSON")
        plain: dict[str, Any] = clean(dict(added))
    except Exception as error:  # its own code runs here, and the error names it
        why = f"extensions of plugin {plugin.id!r} cannot be used: {type(error).__name__}: {error_text(error)}"
        raise InvalidDefinition(why) from error
    return plain


def overrides(plugin: Plugin, hook: str) -> bool:
    return getattr(type(plugin), hook) is not getattr(Plugin, hook)


def _hooks(name: str, entries: tuple[tuple[Plugin, Callable[..., Any]], ...]) -> Hooks:
    filters = sum(plugin.is_filter for plugin, _ in entries) if name in FILTERS_LAST else 0
    if filters:
        entries = tuple(sorted(entries, key=lambda entry: entry[0].is_filter))
    return Hooks(name, entries, any(inspect.iscoroutinefunction(method) for _, method in entries), filters)


def _made(plugin: Plugin, ctx: SessionContext) -> Plugin:
    """A plugin's instance for one session."""
    try:
        made: object = plugin.for_session(ctx)
    except BaseException as error:  # its options make no sense to it, or it is broken: the session is refused
        raise PluginError(plugin.id, f"for_session: {type(error).__name__}: {error_text(error)}") from error
    if type(made) is not type(plugin) or made.id != plugin.id:
        what = type(made).__name__
        raise PluginError(plugin.id, f"for_session gave a {what}: make one of its own class and id")
    if made is plugin and overrides(plugin, "snapshot"):
        raise PluginError(plugin.id, "for_session gave the shared object: make a new one, or sessions share its state")
    return made


def _checked(plugin: object) -> Plugin:
    """A plugin that can be told apart, called and remembered."""
    if isinstance(plugin, type) and issubclass(plugin, Plugin):
        raise InvalidDefinition(f"pass a plugin object, not its class: plugins=[{plugin.__name__}(…)]")
    if not isinstance(plugin, Plugin):
        raise InvalidDefinition(f"a {type(plugin).__name__} is no plugin: derive it from perdure.Plugin")
    _check_attributes(plugin)
    for hook in HOOKS:
        _check_hook(plugin, hook)
    if type(plugin) not in _SOUND:
        for hook in HOOKS:
            _check_shape(plugin, hook)
        _check_names(plugin)
        _SOUND.add(type(plugin))
    if overrides(plugin, "snapshot"):
        _check_state(plugin)
    return plugin


def _check_attributes(plugin: Plugin) -> None:
    name: object = plugin.id
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > 100 or "/" in name:
        raise InvalidDefinition(
            f"plugin {type(plugin).__name__} needs an id of 1 to 100 printable characters without '/', not {name!r}"
        )
    version: object = plugin.version
    if not isinstance(version, str) or not version.isprintable():
        raise InvalidDefinition(f"the version of plugin {name!r} is printable text, not {version!r}")
    if not _is_number(plugin.time_limit) or not plugin.time_limit > 0:
        raise InvalidDefinition(
            f"the time limit of plugin {name!r} is a positive number of seconds, not {plugin.time_limit!r}"
        )
    for flag in ("required", "is_filter"):
        if not isinstance(getattr(plugin, flag), bool):
            raise InvalidDefinition(f"`{flag}` of plugin {name!r} is True or False, not {getattr(plugin, flag)!r:.80}")
    if not _is_number(plugin.priority):
        raise InvalidDefinition(f"the priority of plugin {name!r} is a number, not {plugin.priority!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value == value


def _check_hook(plugin: Plugin, hook: str) -> None:
    own = getattr(type(plugin), hook)
    if hook in getattr(plugin, "__dict__", ()) and callable(getattr(Plugin, hook)):
        raise InvalidDefinition(f"{hook} of plugin {plugin.id!r} is set on the object: define it in the class")
    if own is getattr(Plugin, hook) or not callable(getattr(Plugin, hook)):
        return
    if not callable(own):
        raise InvalidDefinition(f"{hook} of plugin {plugin.id!r} is a hook: make it a method")
    if inspect.isasyncgenfunction(own) or (hook in PLAIN and inspect.iscoroutinefunction(own)):
        raise InvalidDefinition(f"{hook} of plugin {plugin.id!r} is asked where nothing can wait: make it plain")


def _check_shape(plugin: Plugin, hook: str) -> None:
    """A hook takes what it is called with: found out at its first call, a guard has guarded nothing until then."""
    if not overrides(plugin, hook) or not callable(getattr(Plugin, hook)):
        return
    usual = [name for name in inspect.signature(getattr(Plugin, hook)).parameters if name != "self"]
    try:
        signature = inspect.signature(getattr(plugin, hook))
    except (TypeError, ValueError):  # a callable that does not tell
        return
    try:
        signature.bind(*usual)
    except TypeError as error:
        raise InvalidDefinition(
            f"{hook} of plugin {plugin.id!r} is called with ({', '.join(usual)}): {error}"
        ) from None


_SOUND: weakref.WeakSet[type[Plugin]] = weakref.WeakSet()
"""Classes whose methods have the names and parameters of hooks. They do not change, and agents are made often."""


def _check_names(plugin: Plugin) -> None:
    """A method whose name is nearly a hook's is never called: refuse it where its author can still see why."""
    line = [kind for kind in type(plugin).__mro__ if kind not in (Plugin, object)]
    exempt = {name for kind in line for name in _given_names(kind)}
    methods = {name for kind in line for name, value in vars(kind).items() if _is_method(value)}
    for name in sorted(methods - exempt - set(dir(Plugin))):
        near = None if name.startswith("_") else next((hook for hook in HOOKS if _is_near(name, hook)), None)
        if near is not None:
            raise InvalidDefinition(
                f"{name} of plugin {plugin.id!r} is no hook and would never be called: do you mean {near}? If not, "
                f"give it another name, or say so in the class: not_hooks = ({name!r},)"
            )


def _given_names(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("not_hooks", ())
    if not isinstance(names, tuple | list | set | frozenset):
        raise InvalidDefinition(f"`not_hooks` of {kind.__name__} is a tuple of names, not {names!r:.80}")
    return tuple(names)


def _is_method(value: object) -> bool:
    """Whether it stands in a class as a hook does; operations and tools are found by what they are."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return (inspect.isfunction(value) and not is_operation(value)) or isinstance(value, property)


def _is_near(name: str, hook: str) -> bool:
    """Whether one is the other with a slip or two: one for short names. Case and underscores do not count."""
    mine, theirs = name.replace("_", "").lower(), hook.replace("_", "").lower()
    most = 1 if len(theirs) < LONG_NAME else 2
    return abs(len(mine) - len(theirs)) <= most and _distance(mine, theirs) <= most


LONG_NAME = 9
"""Letters of a name in which two slips are still one word."""


def _distance(one: str, other: str) -> int:
    """How many letters are to be put in, left out, changed, or swapped with their neighbour."""
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def _check_state(plugin: Plugin) -> None:
    if not (overrides(plugin, "revision") and overrides(plugin, "for_session")):
        raise InvalidDefinition(
            f"plugin {plugin.id!r} has a snapshot: let `revision` count its changes, or it would never be saved, and "
            "let `for_session` make an instance for each session, or they would share it"
        )


def discover(*names: str) -> list[Plugin]:
    """Plugins that installed packages offer under the entry-point group `perdure.plugins`, by name.

    Nothing is loaded unless you ask: `Agent(plugins=discover())` takes all, `discover("audit")` one. An entry point
    names a Plugin class without arguments, a function that returns a plugin, or a plugin.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415  # slow to import, and few ask for it

    found: dict[str, list[EntryPoint]] = {}
    for each in entry_points(group=GROUP):
        found.setdefault(each.name, []).append(each)
    missing = [name for name in names if name not in found]
    if missing:
        raise InvalidDefinition(f"no installed package offers the plugin {missing[0]!r}; offered: {sorted(found)}")
    return [_loaded(name, found[name]) for name in (names or sorted(found))]


def _loaded(name: str, offers: list[EntryPoint]) -> Plugin:
    if len(offers) > 1:
        places = " and ".join(sorted([each.value for each in offers]))
        raise InvalidDefinition(
            f"several installed packages offer the plugin {name!r}: {places}; uninstall all but one"
        )
    try:
        loaded: object = offers[0].load()
        made = loaded() if callable(loaded) and not isinstance(loaded, Plugin) else loaded
    except Exception as error:  # a package we know nothing about was imported and run
        why = f"{type(error).__name__}: {error_text(error)}"
        raise InvalidDefinition(f"the plugin {name!r} of {offers[0].value} cannot be made: {why}") from error
    return _checked(made)


# ---------------------------------------------------------------------- engines of plugins

OURS = ("function", "tool", "turn", "external", "command", "task")
"""Kinds that the runtime itself runs, now or in a later version."""


def engines_of(sets: Iterable[PluginSet]) -> list[Engine]:
    """The engines of all plugins; one that several agents share is asked once. Raises what says whose is wrong."""
    asked = {id(plugin): plugin for each in sets for plugin in each.plugins if overrides(plugin, "engines")}
    found: dict[str, tuple[Plugin, Engine]] = {}
    for plugin in asked.values():
        for engine in _engines(plugin):
            if engine.kind in found:
                raise PluginConflict(plugin.id, found[engine.kind][0].id, f"the engine of kind {engine.kind!r}")
            found[engine.kind] = (plugin, engine)
    return [engine for _, engine in found.values()]


def _engines(plugin: Plugin) -> list[Engine]:
    try:
        engines = list(plugin.engines())
    except Exception as error:  # its own code runs here, and its author is told whose it is
        raise InvalidDefinition(
            f"plugin {plugin.id!r}: its engines cannot be used: {type(error).__name__}: {error_text(error)}"
        ) from error
    for engine in engines:
        _check(plugin, engine)
    return engines


def _check(plugin: Plugin, engine: Any) -> None:
    kind = getattr(engine, "kind", None)
    if not isinstance(kind, str) or not kind:
        raise InvalidDefinition(f"plugin {plugin.id!r}: {engine!r} is no engine: its `kind` is a text")
    if kind in OURS:
        raise InvalidDefinition(f"plugin {plugin.id!r}: kind {kind!r} is the runtime's own: choose another")
    for method in ("knows", "run"):
        if not callable(getattr(engine, method, None)):
            raise InvalidDefinition(f"plugin {plugin.id!r}: the engine of kind {kind!r} has no method `{method}`")


async def shut_down(sets: Iterable[PluginSet]) -> None:
    """Let plugins close what they hold open, at the end of a Runtime; one that several agents share is asked once.

    What goes wrong is logged: it keeps no other plugin, and not the Runtime, from closing.
    """
    asked = {id(plugin): plugin for each in sets for plugin in each.plugins if overrides(plugin, "shutdown")}
    if asked:
        hooks = _hooks("shutdown", tuple([(plugin, plugin.shutdown) for plugin in asked.values()]))
        for issue in await notify(hooks, lambda _: ()):
            log.error("%s", issue.message)


# ---------------------------------------------------------------------- state of plugins

# Snapshots are taken when a revision has moved, and restored when a session is opened again.


class Taken(Struct, frozen=True):
    """A snapshot to record, and the bytes that must be kept first. `count` is the plugin's own revision."""

    snapshot: PluginSnapshot
    blobs: dict[str, bytes]
    count: int = 0


class PluginStates:
    """What is stored of each plugin's state. Lives as long as the session is in memory.

    `counts` are the plugins' own revisions when their state was last recorded; a plugin without one is to be saved.
    `stored` are the revisions of the newest snapshots on disk. They only grow, also where a plugin begins to count
    anew: which of two states is the later one is told by them.
    """

    __slots__ = ("_taken", "counts", "stored")

    def __init__(self, plugins: Iterable[Plugin], snapshots: Mapping[str, PluginSnapshot]) -> None:
        """After `plugins` were restored from `snapshots`. Raises PluginFault."""
        self.counts: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self.stored = {name: each.revision for name, each in snapshots.items()}
        for plugin in plugins:
            count, known = revision_of(plugin), snapshots.get(plugin.id)
            # What another version wrote, or restoring it has changed, is saved as it is now.
            if known is None or (known.version == plugin.version and count <= known.revision):
                self.counts[plugin.id] = count

    def take(self, plugin: Plugin) -> Taken:
        """Serialise a plugin; what has changed, under a revision later than all that are stored. Raises PluginFault."""
        taken, stored = take_snapshot(plugin), self.stored.get(plugin.id)
        number = taken.snapshot.revision
        if stored is not None:
            same = self._taken.get(plugin.id) == taken.count
            number = stored if same else min(max(taken.count, stored + 1), INT_MAX)
        self.stored[plugin.id], self._taken[plugin.id] = number, taken.count
        return Taken(replace(taken.snapshot, revision=number), taken.blobs, taken.count)


def revision_of(plugin: Plugin) -> int:
    """Where a plugin's state is. Raises PluginFault: this is the plugin's code, and asked at every record."""
    try:
        count: object = plugin.revision
    except BaseException as error:  # SystemExit of a plugin is its own trouble too
        raise PluginFault(plugin.id, "revision", f"{type(error).__name__}: {error_text(error)}") from error
    if type(count) is not int or not INT_MIN <= count <= INT_MAX:
        raise PluginFault(plugin.id, "revision", f"{count!r} is no count: let it be an int of 64 bits")
    return count


def take_snapshot(plugin: Plugin) -> Taken:
    """Serialise one plugin. Raises PluginFault; the plugin's state is then as it was recorded before."""
    count = revision_of(plugin)  # before the state: what changes meanwhile is taken once more
    writer = SnapshotWriter()
    try:
        state = clean(plugin.snapshot(writer))
        encode_checked(state, "the state")
        kept = {hashlib.sha256(data).hexdigest(): data for data in writer.blobs.values()}
        refs = {_name(name): _ref(data) for name, data in writer.blobs.items()}
    except BaseException as error:  # whatever it raises, the turn goes on and says so
        raise PluginFault(plugin.id, "snapshot", f"{type(error).__name__}: {error_text(error)}") from error
    return Taken(PluginSnapshot(plugin.version, count, state, refs), kept, count)


def _name(name: object) -> str:
    if not isinstance(name, str) or clean_text(name) != name:
        raise InvalidInput(f"{name!r} cannot name a blob: use text")
    return name


def _ref(data: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data), "application/octet-stream")


def restore_snapshot(plugin: Plugin, snapshot: PluginSnapshot | None, blobs: Mapping[str, bytes]) -> Issue | None:
    """Give a plugin its state back, or tell it that there is none. An issue: it cannot read it."""
    if snapshot is not None and is_newer(snapshot.version, plugin.version):
        return Issue(
            "plugin_snapshot_newer",
            f"its snapshot is of version {snapshot.version}, the plugin is {plugin.version}: upgrade it; "
            "the snapshot is kept",
            plugin.id,
        )
    try:
        entry = PluginSnapshot(plugin.version, revision_of(plugin)) if snapshot is None else copied(snapshot)
        gone = [name for name, ref in entry.blobs.items() if ref.digest not in blobs]
        if gone:  # half a state is not shown as a whole one
            raise LookupError(f"its bytes {gone[0]!r} are gone")
        reader = SnapshotReader({name: blobs[ref.digest] for name, ref in entry.blobs.items()})
        give_back: Callable[[PluginSnapshot, SnapshotReader], object] = plugin.restore
        given = give_back(entry, reader)
        if inspect.iscoroutine(given):  # a wrapper hid that it is async: nothing was restored
            given.close()
            raise TypeError("it is asked where nothing can wait: make it plain")
    except BaseException as error:  # the session opens without it, and its snapshot stays where it is
        return Issue(
            "plugin_snapshot_unreadable",
            f"its snapshot cannot be restored: {type(error).__name__}: {error_text(error)}; the snapshot is kept: use "
            "a version of the plugin that can read it",
            plugin.id,
        )
    return None


def is_newer(stored: str, known: str) -> bool:
    """Whether a dotted version is later than another; other versions are the plugin's own to judge."""
    later, own = _numbers(stored), _numbers(known)
    return later is not None and own is not None and later > own


def _numbers(version: str) -> list[int] | None:
    """`1.2.0` as [1, 2]: zeros at the end make no difference."""
    parts = version.split(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        return None
    numbers = [int(part) for part in parts]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def fingerprint(plugins: Iterable[Plugin]) -> int:
    """One number for who is there, in which version, at which revision."""
    digest = hashlib.sha256()
    for plugin in plugins:
        digest.update(plugin.id.encode() + b"\0" + plugin.version.encode() + b"\0")
        digest.update((revision_of(plugin) % 2**64).to_bytes(8, "little") + b"\xff")
    return int.from_bytes(digest.digest()[:8], "little")
