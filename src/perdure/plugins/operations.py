"""Operations: what may be asked of a plugin by name, from Python, the command line or HTTP.

    query     reads; returns a value
    command   may change things; returns a value, or a Result with events and directives
    task      long work with a durable scope of its own

An operation is a method of a Plugin with a decorator. Its arguments are JSON described by its signature, its answer is
JSON too. A parameter annotated with a context is filled by the runtime.

    class Notes(Plugin):
        id = "notes"

        @query
        def search(self, word: str) -> list[str]:
            return [note for note in self.notes if word in note]

        @command(name="notes.add")
        def write(self, text: str, ctx: CommandContext) -> int: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, get_args, overload

from msgspec import Struct

from perdure.errors import InvalidDefinition, PluginConflict
from perdure.model.codec import decode, encode
from perdure.model.message import Message
from perdure.plugins.hooks import MetadataContext, Plugin
from perdure.ports.services import CatalogReads, MonitorReads, Snapshots, TaskReads, ToolHost

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

OperationKind: TypeAlias = Literal["query", "command", "task"]
KINDS: tuple[OperationKind, ...] = ("query", "command", "task")
"""In the order of a listing."""

SessionParam: TypeAlias = Literal["required", "optional", "forbidden"]

TaskRecovery: TypeAlias = Literal["once", "rerun"]

MAX_NAME = 200


# ---------------------------------------------------------------------- what operations are told


class QueryHost(Snapshots, CatalogReads, TaskReads, MonitorReads, Protocol):
    """For queries: reading of sessions and of their background work."""


def _nobody(value: Any) -> None:
    """No reader listens."""


class OperationContext(MetadataContext, frozen=True):
    """What every operation knows. `session_id` is None when it works on no session; `deps` are the host's objects.

    `metadata` is that of the session; of a task, and of what a turn asks for, that of the work which asked.
    """

    session_id: str | None
    agent: str
    deps: Any


class QueryContext(OperationContext, frozen=True):
    host: QueryHost


class CommandContext(OperationContext, frozen=True):
    host: ToolHost


class TaskContext(OperationContext, frozen=True):
    """What a task knows besides: the process that it is, how often that was begun, and whom to tell how far it is."""

    host: ToolHost
    process_id: str = ""
    attempt: int = 1
    progress: Callable[[Any], None] = _nobody


CONTEXTS: dict[OperationKind, type[OperationContext]] = {
    "query": QueryContext,
    "command": CommandContext,
    "task": TaskContext,
}


# ---------------------------------------------------------------------- what they answer


class QueueTurn(Struct, frozen=True, tag_field="kind", tag="queue_turn", omit_defaults=True):
    """Say something to the operation's session, as `session.send` does: on disk before the caller has its answer.

    The same key with the same words is the same turn, however often the command is called.
    """

    input: str | Message
    key: str | None = None


class Result(Struct, Generic[T], frozen=True):
    """A command's answer with what else it leads to: events for observers of the session, and directives."""

    output: T
    events: tuple[Any, ...] = ()
    directives: tuple[QueueTurn, ...] = ()


class OperationOutcome(Struct, frozen=True):
    """What a caller gets. `accepted` are the turns that its directives queued, in their order."""

    plugin: str
    output: Any
    events: tuple[Any, ...] = ()
    directives: tuple[QueueTurn, ...] = ()
    accepted: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = decode(encode(self))
        return found


class OperationDefinition(Struct, frozen=True):
    """An operation as others see it."""

    name: str
    kind: OperationKind
    plugin: str
    description: str
    session_param: SessionParam
    input_schema: dict[str, Any]
    output_schema: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = decode(encode(self))
        return found


# ---------------------------------------------------------------------- declaring them


class OperationMark(Struct, frozen=True):
    """What a decorator said about a method."""

    kind: OperationKind
    name: str | None = None
    description: str | None = None
    session: SessionParam = "required"
    recovery: TaskRecovery = "once"


_MARK = "__perdure_operation__"


class Marker:
    """A decorator for methods of plugins: they stay what they are, and may be called by name too.

    `session` says whether the operation works on a session: "required" (the default), "optional" or "forbidden". `name`
    is `<plugin id>.<method>` unless given, `description` the docstring. `recovery` says what becomes of a task whose
    Runtime died: "once" (the default) is not repeated and reads as unknown, "rerun" is called again.
    """

    __slots__ = ("_kind",)

    def __init__(self, kind: OperationKind) -> None:
        self._kind: OperationKind = kind

    @overload
    def __call__(self, fn: F, /) -> F: ...
    @overload
    def __call__(
        self,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        session: SessionParam = "required",
        recovery: TaskRecovery = "once",
    ) -> Callable[[F], F]: ...
    def __call__(
        self,
        fn: Any = None,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        session: SessionParam = "required",
        recovery: TaskRecovery = "once",
    ) -> Any:
        mark = OperationMark(self._kind, name, description, session, recovery)
        return _marked(fn, mark) if fn is not None else lambda each: _marked(each, mark)

    def __repr__(self) -> str:
        return f"<decorator {self._kind}>"


query = Marker("query")
command = Marker("command")
task = Marker("task")


def is_operation(fn: object) -> bool:
    """Whether a method is one that may be asked of its plugin by name."""
    return hasattr(fn, _MARK)


def _marked(fn: F, mark: OperationMark) -> F:
    owner = f"{mark.kind} {getattr(fn, '__qualname__', repr(fn))}"
    if not inspect.isfunction(fn):
        raise InvalidDefinition(f"{owner}: decorate a method of a plugin, below any other decorator")
    if hasattr(fn, _MARK):
        raise InvalidDefinition(f"{owner} is an operation already: decorate it once")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise InvalidDefinition(f"{owner} is a generator: return a list")
    if mark.session not in get_args(SessionParam):
        raise InvalidDefinition(f'{owner}: session={mark.session!r} is not "required", "optional" or "forbidden"')
    if mark.recovery not in get_args(TaskRecovery) or (mark.kind != "task" and mark.recovery != "once"):
        raise InvalidDefinition(f'{owner}: recovery={mark.recovery!r}: a task is "once" or "rerun", others have none')
    if mark.description is not None and not isinstance(mark.description, str):
        raise InvalidDefinition(f"{owner}: description={mark.description!r} is not a string")
    if mark.name is not None:
        _check_name(owner, mark.name)
    setattr(fn, _MARK, mark)
    return fn


def _check_name(owner: str, name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable() or "/" in name:
        raise InvalidDefinition(
            f"{owner}: {name!r:.80} is no name for an operation: use 1 to {MAX_NAME} printable characters without '/'"
        )


# ---------------------------------------------------------------------- collecting them


class Offer(Struct, frozen=True):
    """An operation of a plugin: its name, what its decorator said, and the method that it is."""

    name: str
    mark: OperationMark
    plugin: Plugin
    method: str


def collect(plugins: Iterable[Plugin]) -> tuple[Offer, ...]:
    """All operations of an agent's plugins: queries, commands, tasks, each by name. No name may be there twice."""
    offers: dict[str, Offer] = {}
    for plugin in plugins:
        for method, mark in _marks(type(plugin)).items():
            owner = f"{mark.kind} {method!r} of plugin {plugin.id!r}"
            if hasattr(Plugin, method):
                raise InvalidDefinition(f"{owner}: every plugin has a {method!r}: call the method something else")
            name = f"{plugin.id}.{method}" if mark.name is None else mark.name
            _check_name(owner, name)
            if name in offers:
                raise PluginConflict(plugin.id, offers[name].plugin.id, f"the operation {name!r}")
            offers[name] = Offer(name, mark, plugin, method)
    return tuple(sorted(offers.values(), key=lambda offer: (KINDS.index(offer.mark.kind), offer.name)))


def _marks(kind: type[Plugin]) -> dict[str, OperationMark]:
    """The operations of a class. One that overrides a method keeps what was said about it, as with hooks."""
    found: dict[str, OperationMark] = {}
    for each in reversed(kind.__mro__):
        for name, value in vars(each).items():
            mark = getattr(getattr(value, "__func__", value), _MARK, None)
            if isinstance(mark, OperationMark):
                found[name] = mark
    return {name: mark for name, mark in found.items() if callable(getattr(kind, name))}
