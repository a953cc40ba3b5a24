"""Calling the operations of plugins: by name, with JSON, on a session's own instance or on the shared object.

    find the name ── which session? ── check the arguments ── call ── check the answer ── save ── queue ── tell

Nothing is called before everything about the call is checked, and nothing is queued or told of an answer that makes no
sense. State that a command changed is on disk before its turns are queued, and both before the caller has its answer.
If the process dies in between, the caller has none, and may call again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin

from msgspec import Struct

from perdure.errors import (
    Conflict,
    InvalidArguments,
    InvalidDefinition,
    InvalidInput,
    MissingSession,
    OperationFailed,
    Unavailable,
    UnexpectedSession,
    UnknownOperation,
)
from perdure.model.codec import clean, clean_message, error_text
from perdure.model.ids import check_session_id
from perdure.model.message import NO_METADATA, Message, Metadata
from perdure.model.monitor import MonitorSnapshot, MonitorUpdates
from perdure.model.process import TaskKind, TaskRecord
from perdure.model.session import SessionSnapshot
from perdure.plugins.hooks import Plugin
from perdure.plugins.operations import (
    CONTEXTS,
    CommandContext,
    Offer,
    OperationContext,
    OperationDefinition,
    OperationKind,
    OperationOutcome,
    QueryContext,
    QueryHost,
    QueueTurn,
    Result,
    TaskContext,
    TaskRecovery,
    collect,
)
from perdure.plugins.registry import PluginSession, revision_of
from perdure.ports.services import ToolHost
from perdure.tools.answer import OutputCodec, output_codec
from perdure.tools.define import Arguments, Signature, read_signature, resolve
from perdure.tools.schema import parse_docstring

log = logging.getLogger("perdure.plugins")

Args: TypeAlias = Mapping[str, Any] | None
StartTask: TypeAlias = "Callable[[Operation, Mapping[str, Any], str | None], Awaitable[dict[str, str]]]"


# ---------------------------------------------------------------------- what an agent offers


class Operation(Struct, frozen=True):
    """An operation made ready to be called."""

    definition: OperationDefinition
    plugin: Plugin
    method: str
    context: str | None
    arguments: Arguments
    codec: OutputCodec
    recovery: TaskRecovery = "once"

    def bind(self, args: Args) -> dict[str, Any]:
        """JSON as keyword arguments."""
        try:
            return self.arguments.bind(clean({} if args is None else args))
        except Exception as error:  # whatever a type of the plugin raises when it is made, its argument is refused
            raise InvalidArguments(self.definition.name, self.definition.plugin, error_text(error)) from None

    def failed(self, why: str, accepted: tuple[str, ...] = ()) -> OperationFailed:
        return OperationFailed(self.definition.name, self.definition.plugin, why, accepted)

    async def invoke(self, plugin: Plugin, kwargs: dict[str, Any], ctx: OperationContext) -> Any:
        """Call the method. Whatever it raises is its failure; only a cancellation from outside is not."""
        try:
            answer = getattr(plugin, self.method)(**kwargs, **({} if self.context is None else {self.context: ctx}))
            return await answer if inspect.isawaitable(answer) else answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self.failed("it cancelled itself") from None
        except GeneratorExit:
            raise
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a plugin are its own trouble too
            log.warning("operation %s of plugin %s raised", self.definition.name, plugin.id, exc_info=error)
            raise self.failed(f"{type(error).__name__}: {error_text(error)}") from error


class OperationTable:
    """The operations of an agent's plugins, checked as a whole: made once per agent, before anything runs."""

    def __init__(self, plugins: Iterable[Plugin] = ()) -> None:
        self._operations = {offer.name: _ready(offer) for offer in collect(plugins)}

    def __bool__(self) -> bool:
        return bool(self._operations)

    @property
    def definitions(self) -> list[OperationDefinition]:
        """Queries, commands, tasks, each by name."""
        return [operation.definition for operation in self._operations.values()]

    @property
    def names(self) -> Iterable[str]:
        return self._operations.keys()

    def find(self, name: str, kind: OperationKind | None = None) -> Operation:
        operation = self._operations.get(name)
        if operation is None:
            import difflib  # noqa: PLC0415  # for a mistake only

            near = difflib.get_close_matches(str(name), list(self._operations), 3, 0.5)
            raise UnknownOperation(name, f"no plugin offers it; near: {', '.join(near)}" if near else "no such name")
        if kind is not None and operation.definition.kind != kind:
            raise UnknownOperation(name, f"it is a {operation.definition.kind}, not a {kind}")
        return operation


def _ready(offer: Offer) -> Operation:
    owner = f"operation {offer.name!r}"
    fn = getattr(offer.plugin, offer.method)
    signature = read_signature(fn, owner, OperationContext)
    if signature.context is not None:
        _check_context(owner, offer.mark.kind, signature.context.annotation)
    text = parse_docstring(fn.__doc__)
    described = [one._replace(description=text.parameters.get(one.name, "")) for one in signature.parameters]
    arguments = Arguments(owner, described)
    codec = _answer_codec(owner, signature)
    description = text.description if offer.mark.description is None else inspect.cleandoc(offer.mark.description)
    definition = OperationDefinition(
        offer.name,
        offer.mark.kind,
        offer.plugin.id,
        description.strip(),
        offer.mark.session,
        arguments.schema,
        codec.schema,
    )
    context = None if signature.context is None else signature.context.name
    return Operation(definition, offer.plugin, offer.method, context, arguments, codec, offer.mark.recovery)


def _check_context(owner: str, kind: OperationKind, annotation: Any) -> None:
    given = CONTEXTS[kind]
    if not (isinstance(annotation, type) and issubclass(given, annotation)):
        wanted = getattr(annotation, "__name__", repr(annotation))
        raise InvalidDefinition(f"{owner}: a {kind} is given a {given.__name__}, not a {wanted}")


def _answer_codec(owner: str, signature: Signature) -> OutputCodec:
    kind = resolve(signature.returns, signature.written, f"{owner}, what it returns")
    try:
        return output_codec(_answer_type(kind))
    except InvalidDefinition as error:
        raise InvalidDefinition(f"{owner}: what it returns has no JSON form: {error}") from None


def _answer_type(annotation: Any) -> Any:
    """The type of the output: a Result is what is in it."""
    if get_origin(annotation) in (Union, UnionType):
        return reduce(or_, [_answer_type(each) for each in get_args(annotation)])
    if annotation is Result or get_origin(annotation) is Result:
        return next(iter(get_args(annotation)), Any)
    return annotation


# ---------------------------------------------------------------------- calling


class OperationSeams(Struct, frozen=True):
    """What operations of one agent need of the Runtime.

    `instances` gives what a session has of the plugins, restored; `host` the services for a session, or for none;
    `persist` makes durable what has changed in those instances; `queue` accepts an input durably and gives
    the id of its turn; `emit` tells those who observe the session what a plugin has to say; `start` makes a task a
    process and gives its handle; `metadata` says whom a session is for; `begin` creates it, where nothing was said yet,
    before a command or task does.
    """

    agent: str
    instances: Callable[[str], Awaitable[PluginSession]]
    host: Callable[[str | None], ToolHost]
    persist: Callable[[str, PluginSession], Awaitable[None]]
    queue: Callable[[str, Message, str | None], Awaitable[str]]
    emit: Callable[[str, str, tuple[Any, ...]], None]
    deps: Any = None
    start: StartTask | None = None
    make_deps: Callable[[str | None], AbstractAsyncContextManager[Any]] | None = None
    metadata: Callable[[str | None], Awaitable[Metadata]] | None = None
    begin: Callable[[], Awaitable[None]] | None = None


class TaskRun(Struct, frozen=True):
    """The process that a task is."""

    process_id: str
    attempt: int
    progress: Callable[[Any], None]
    deps: Any = None


class Operations:
    """What may be asked of an agent's plugins.

    `session_id` names the session to work on. `default` is the session the caller is in: it serves operations that take
    one and were told none, and means nothing to those that take none.
    """

    def __init__(self, table: OperationTable, seams: OperationSeams) -> None:
        self._table, self._seams = table, seams

    def list(self) -> Sequence[OperationDefinition]:
        """Queries, commands, tasks, each by name."""
        return self._table.definitions

    async def query(
        self, name: str, args: Args = None, session_id: str | None = None, *, default: str | None = None
    ) -> OperationOutcome:
        """Ask something."""
        return await self._perform(self._table.find(name, "query"), args, session_id, default)

    async def command(
        self, name: str, args: Args = None, session_id: str | None = None, *, default: str | None = None
    ) -> OperationOutcome:
        """Have something done. What it changed and queued is on disk when this returns."""
        return await self._perform(self._table.find(name, "command"), args, session_id, default)

    async def task(
        self, name: str, args: Args = None, session_id: str | None = None, *, default: str | None = None
    ) -> OperationOutcome:
        """Begin long work. The output is the handle of a process, which is on disk when this returns."""
        return await self._perform(self._table.find(name, "task"), args, session_id, default)

    async def call(
        self, name: str, args: Args = None, session_id: str | None = None, *, default: str | None = None
    ) -> OperationOutcome:
        """The same for a caller who knows only the name."""
        return await self._perform(self._table.find(name), args, session_id, default)

    async def _perform(
        self, operation: Operation, args: Args, session_id: str | None, default: str | None
    ) -> OperationOutcome:
        kind = operation.definition.kind
        session = effective_session(operation.definition, session_id, default)
        kwargs = operation.bind(args)
        if kind != "query" and session is not None and self._seams.begin is not None:
            await self._seams.begin()
        if kind == "task":
            return await self._start(operation, args, session)
        if self._seams.make_deps is None:
            return await self._answer(operation, kwargs, session, self._seams.deps)
        async with self._seams.make_deps(session) as deps:
            return await self._answer(operation, kwargs, session, deps)

    async def _answer(
        self, operation: Operation, kwargs: dict[str, Any], session: str | None, deps: Any
    ) -> OperationOutcome:
        """What a query or a command says."""
        plugins = None if session is None else await self._seams.instances(session)
        plugin = operation.plugin if plugins is None else _instance(operation, plugins)
        host, metadata = self._seams.host(session), await self._metadata(session)
        if operation.definition.kind == "query":
            ctx = QueryContext(session, self._seams.agent, deps, ReadOnly(host), metadata=metadata)
            return _read_query(operation, await operation.invoke(plugin, kwargs, ctx))
        told = CommandContext(session, self._seams.agent, deps, host, metadata=metadata)
        return await self._act(operation, session, plugins, operation.invoke(plugin, kwargs, told))

    async def _metadata(self, session: str | None) -> Metadata:
        return NO_METADATA if self._seams.metadata is None else await self._seams.metadata(session)

    async def _start(self, operation: Operation, args: Args, session: str | None) -> OperationOutcome:
        name, plugin = operation.definition.name, operation.definition.plugin
        if self._seams.start is None:
            raise Unavailable(f"operation {name!r}: nobody here works on tasks")
        handle = await self._seams.start(operation, clean({} if args is None else dict(args)), session)
        return OperationOutcome(plugin, handle)

    async def run_task(self, name: str, args: Args, session: str | None, task: TaskRun) -> OperationOutcome:
        """Do what a task is there for: what its process runs."""
        operation = self._table.find(name, "task")
        kwargs = operation.bind(args)
        plugins = None if session is None else await self._seams.instances(session)
        plugin = operation.plugin if plugins is None else _instance(operation, plugins)
        told = TaskContext(
            session,
            self._seams.agent,
            task.deps,
            self._seams.host(session),
            task.process_id,
            task.attempt,
            task.progress,
            metadata=await self._metadata(session),
        )
        return await self._act(operation, session, plugins, operation.invoke(plugin, kwargs, told), task.process_id)

    async def _act(
        self,
        operation: Operation,
        session: str | None,
        plugins: PluginSession | None,
        work: Awaitable[Any],
        process_id: str = "",
    ) -> OperationOutcome:
        before = _revisions(plugins)
        try:
            outcome = _read_command(operation, session, await work, process_id)
        finally:
            # Also when it failed: what later hooks see of its state and what a restart would show them stay the same.
            if session is not None and plugins is not None and _revisions(plugins) != before:
                await self._seams.persist(session, plugins)
        return outcome if session is None else await self._lead_to(operation, session, outcome)

    async def _lead_to(self, operation: Operation, session: str, outcome: OperationOutcome) -> OperationOutcome:
        """Carry out what a command answered beside its output."""
        accepted: tuple[str, ...] = ()
        for turn in outcome.directives:
            assert isinstance(turn.input, Message)
            try:
                accepted = (*accepted, await self._seams.queue(session, turn.input, turn.key))
            except (Conflict, InvalidInput) as error:
                raise operation.failed(f"a turn was not queued: {error}", accepted) from error
        if outcome.events:
            self._seams.emit(session, outcome.plugin, outcome.events)
        return OperationOutcome(outcome.plugin, outcome.output, outcome.events, outcome.directives, accepted)


def effective_session(
    definition: OperationDefinition, session_id: str | None = None, default: str | None = None
) -> str | None:
    """The session an operation works on. The default says where the caller is, not what it asks for."""
    if definition.session_param == "forbidden":
        if session_id is not None:
            raise UnexpectedSession(definition.name, definition.plugin, session_id)
        return None
    if session_id is not None:
        return check_session_id(session_id)
    if not default and definition.session_param == "required":
        raise MissingSession(definition.name, definition.plugin)
    return default or None


def _instance(operation: Operation, plugins: PluginSession) -> Plugin:
    wanted = operation.definition.plugin
    if wanted in plugins.absent:
        # Its snapshot is kept for a version that can read it: whatever it did now would be lost, or write over it.
        raise Unavailable(
            f"operation {operation.definition.name!r}: plugin {wanted!r} is left out of this session because its "
            "snapshot cannot be read: install a version that can"
        )
    return next(plugin for plugin in plugins.plugins if plugin.id == wanted)


def _revisions(plugins: PluginSession | None) -> list[int]:
    return [] if plugins is None else [revision_of(plugin) for plugin in plugins.plugins]


# ---------------------------------------------------------------------- answers


def _read_query(operation: Operation, answer: object) -> OperationOutcome:
    if isinstance(answer, Result):
        raise operation.failed("a query returns a value: events and directives are for commands")
    return OperationOutcome(operation.definition.plugin, _output(operation, answer))


def _read_command(operation: Operation, session: str | None, answer: object, process_id: str = "") -> OperationOutcome:
    plugin = operation.definition.plugin
    if not isinstance(answer, Result):
        return OperationOutcome(plugin, _output(operation, answer))
    for name in ("events", "directives"):
        if not isinstance(getattr(answer, name), tuple | list):
            raise operation.failed(f"its {name} are a {type(getattr(answer, name)).__name__}: give a tuple")
    if session is None and answer.directives:
        raise operation.failed("it was called without a session, so there is none to carry out its directives")
    try:
        events = tuple([clean(event) for event in answer.events])
        directives = tuple([_directive(each) for each in answer.directives])
        if process_id:  # a task that is called again after a crash queues the same turns
            directives = tuple(
                [QueueTurn(each.input, each.key or f"{process_id} {n}") for n, each in enumerate(directives)]
            )
    except InvalidInput as error:
        raise operation.failed(f"what it returned cannot be used: {error}") from None
    return OperationOutcome(plugin, _output(operation, answer.output), events, directives)


def _output(operation: Operation, value: Any) -> Any:
    try:
        return operation.codec.to_json(value)
    except Exception as error:  # whatever its own types do when they are shown as JSON
        raise operation.failed(f"its output is not JSON: {error_text(error)}") from None


def _directive(given: object) -> QueueTurn:
    if not isinstance(given, QueueTurn):
        raise InvalidInput(f"a {type(given).__name__} is no directive of an operation: use QueueTurn")
    key: object = given.key
    if key is not None and not (isinstance(key, str) and key):
        raise InvalidInput(f"a key is a string, not {key!r:.80}")
    return QueueTurn(clean_message(given.input), given.key)


class ReadOnly:
    """The services of a query. Others fail in words, so that no caller finds out from a stack trace."""

    __slots__ = ("_host",)

    def __init__(self, host: QueryHost) -> None:
        self._host = host

    async def snapshot(self, session_id: str | None = None) -> SessionSnapshot:
        return await self._host.snapshot(session_id)

    async def tool_catalog(self, session_id: str | None = None) -> Any:
        return await self._host.tool_catalog(session_id)

    async def list_background_tasks(
        self, *, kind: TaskKind | None = None, include_ended: bool = False, session_id: str | None = None
    ) -> Sequence[TaskRecord]:
        return await self._host.list_background_tasks(kind=kind, include_ended=include_ended, session_id=session_id)

    async def validate_handles_visible(self, handles: Sequence[Any], *, session_id: str | None = None) -> None:
        await self._host.validate_handles_visible(handles, session_id=session_id)

    async def monitor_snapshot(self, *, session_id: str | None = None) -> MonitorSnapshot:
        return await self._host.monitor_snapshot(session_id=session_id)

    async def take_monitor_updates(self, after: int = 0, *, session_id: str | None = None) -> MonitorUpdates:
        return await self._host.take_monitor_updates(after, session_id=session_id)

    def __getattr__(self, name: str) -> Any:
        if hasattr(ToolHost, name):
            raise Unavailable(f"a query only reads and has no {name!r}: make it a command")
        raise AttributeError(name)
