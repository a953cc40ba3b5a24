"""Operations of plugins: calling them on sessions of this Runtime, and the engine that runs their tasks as processes.

An operation with a session runs on that session's own plugins; what it changed of their state is on disk when it
returns. A task is registered as a process of kind "operation", and its handle is returned. What the task declared
decides what becomes of it when its Runtime dies: `once`, the default, is given up as unknown, `rerun` is called again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.control import SelfCancelled
from perdure.engine.deps import deps_for
from perdure.engine.journal import write_referring
from perdure.engine.waiters import current_metadata
from perdure.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    OperationFailed,
    PluginError,
    RuntimeClosed,
    StaleSettings,
    Unavailable,
    UnknownOperation,
    UnknownSession,
)
from perdure.model import validate
from perdure.model.agent import Caller
from perdure.model.event import PluginEvent
from perdure.model.ids import check_session_id, turn_id
from perdure.model.message import Message, Metadata, Scalar
from perdure.model.plugin import PluginSnapshot
from perdure.model.process import Cancelled, Failure, ProcessOutcome, ProcessRecovery, Registration, Success
from perdure.model.session import SessionRow, Settings, dump_settings, load_settings
from perdure.model.write import Configure
from perdure.observe.feed import TurnEvents
from perdure.plugins.hooks import Plugin
from perdure.plugins.operations import OperationDefinition, OperationOutcome
from perdure.plugins.registry import PluginSession, PluginStates, revision_of
from perdure.ports.process import CancelRequested, EngineRun, Leaving
from perdure.sessions.definition import Definition
from perdure.sessions.operation_table import Operation, Operations, OperationSeams, TaskRun
from perdure.sessions.parts import SessionParts, new_session
from perdure.sessions.processes import SessionProcesses
from perdure.sessions.services.host import SessionHost
from perdure.sessions.setup import Setup

KIND = "operation"


class TaskCall(Struct, frozen=True):
    """A task of a plugin that is to be started, its arguments checked."""

    agent: str
    operation: str
    recovery: str
    session_id: str | None = None


class OperationEngine:
    """Runs tasks of plugins. `operations` gives what may be asked of an agent's plugins."""

    kind = KIND

    def __init__(self, definitions: Mapping[str, Definition], operations: Callable[[str], Operations]) -> None:
        self._definitions, self._operations = definitions, operations

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        if not isinstance(what, TaskCall):
            return None
        asked = {"agent": what.agent, "args": dict(args), "session_id": what.session_id}
        recovery: ProcessRecovery = "rerunnable" if what.recovery == "rerun" else "owner_bound"
        return Registration("", KIND, recovery, what.operation, "", asked, what.operation)

    def knows(self, registration: Registration) -> bool:
        asked = registration.input
        agent = self._definitions.get(asked["agent"]) if isinstance(asked, dict) and "agent" in asked else None
        return agent is not None and registration.name in agent.operations.names

    async def run(self, run: EngineRun) -> ProcessOutcome:
        asked = run.registration
        task = TaskRun(asked.id, run.attempt, run.progress, run.deps)
        try:
            operations = self._operations(asked.input["agent"])
        except RuntimeClosed:
            raise Leaving from None  # for the next worker
        await run.begin()
        try:
            work = operations.run_task(asked.name, asked.input["args"], asked.input["session_id"], task)
            return Success((await run.guard(work)).output)
        except CancelRequested as stop:
            return Cancelled(stop.request.by, stop.request.reason, unknown=True)
        except SelfCancelled as error:
            return Failure("raised", str(error))
        except OperationFailed as error:
            return Failure(error.code, str(error), {"accepted": list(error.accepted)} if error.accepted else None)
        except (Conflict, InvalidInput, NotFound, PluginError, Unavailable) as error:
            return Failure(error.code, str(error))


class RuntimeOperations:
    """`runtime.operations`: what may be asked of the plugins of every agent.

    An operation with a session runs on that session's own plugins, here in this process; what it changed of their state
    is on disk when it returns.

    A session handle gives the metadata that a new session was `opened` with, and what creates that session (`begin`).
    """

    def __init__(
        self,
        parts: SessionParts,
        opened: dict[str, Scalar] | None = None,
        begin: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        parts.mode.check()
        self._parts, self._opened, self._begin = parts, opened, begin

    def list(self, agent: str | None = None) -> Sequence[OperationDefinition]:
        """The operations of one agent, or of all."""
        names = list(self._parts.definitions) if agent is None else [validate.name(agent, "agent")]
        return [each for name in names for each in self.of(name).list()]

    async def call(
        self,
        name: str,
        args: Mapping[str, Any] | None = None,
        *,
        session: str | None = None,
        agent: str | None = None,
        default: str | None = None,
    ) -> OperationOutcome:
        """Call an operation by name with JSON arguments, on a session where it takes one.

        `default` is the session the caller is in, for operations that were told none.
        """
        self._parts.mode.check()
        name, agent = validate.name(name, "operation"), None if agent is None else validate.name(agent, "agent")
        where = session if session is not None else default
        if where is not None:
            row = await self._parts.store.session(check_session_id(where))
            if row is None and agent is None and where == session:
                raise UnknownSession(where)
            agent = agent if row is None else row.agent
        return await self.of(agent or self._owner(name)).call(name, args, session, default=default)

    def _owner(self, name: str) -> str:
        """The agent whose plugins offer it; without one, the first: it says what there is."""
        offering = [agent for agent, each in self._parts.definitions.items() if name in each.operations.names]
        if not offering and not self._parts.definitions:
            raise UnknownOperation(name, "this Runtime has no agents")
        return next(iter(offering or self._parts.definitions))

    def of(self, agent: str) -> Operations:
        definition = self._parts.definitions.get(agent)
        if definition is None:
            raise Unavailable(f"agent {agent!r} is not part of this Runtime")
        visit = Visit(self._parts, agent, self._opened)
        return Operations(
            definition.operations,
            OperationSeams(
                agent,
                visit.instances,
                functools.partial(self._host, agent),
                visit.persist,
                functools.partial(self._queue, agent),
                self._emit,
                self._parts.deps,
                functools.partial(self._start, agent),
                None if self._parts.make_deps is None else functools.partial(self._deps, agent),
                functools.partial(self._metadata, agent),
                self._begin,
            ),
        )

    # ------------------------------------------------------------------ seams

    @contextlib.asynccontextmanager
    async def _deps(self, agent: str, session_id: str | None) -> AsyncGenerator[Any]:
        """Live objects for one query or command, which belongs to no run."""
        parts = self._parts
        assert parts.make_deps is not None
        caller = Caller(session_id or "", agent, await self._metadata(agent, session_id))
        async with deps_for(parts.make_deps, caller, parts.random, parts.clock.sleep) as made:
            yield made

    async def _metadata(self, agent: str, session_id: str | None) -> Metadata:
        """Whom an operation is for."""
        if session_id is None:
            return current_metadata()
        return await self._host(agent, session_id).scope.metadata()

    def _host(self, agent: str, session_id: str | None) -> SessionHost:
        return SessionHost(self._parts, session_id or "", agent, opened=self._opened)

    async def _queue(self, agent: str, session_id: str, said: Message, key: str | None) -> str:
        accepted = await self._parts.inbox.accept(session_id, agent, said, "queue", key)
        return turn_id(session_id, accepted.turn)

    async def _start(
        self, agent: str, operation: Operation, args: Mapping[str, Any], session_id: str | None
    ) -> dict[str, str]:
        call = TaskCall(agent, operation.definition.name, operation.recovery, session_id)
        if session_id is None:
            return (await self._parts.processes.start(call, args)).to_json()
        owned = SessionProcesses(self._parts.processes, self._parts.store, session_id, agent)
        return (await owned.start(call, args, "none")).to_json()

    def _emit(self, session_id: str, plugin: str, events: tuple[Any, ...]) -> None:
        sink = TurnEvents(self._parts.feed, session_id, "", asyncio.get_running_loop())
        for value in events:
            sink.emit(PluginEvent, plugin=plugin, value=value)


def task_engine(parts: SessionParts) -> OperationEngine:
    """Runs the tasks of the agents' plugins."""
    return OperationEngine(parts.definitions, lambda agent: RuntimeOperations(parts).of(agent))


class Visit:
    """One call of an operation: the plugins it runs on, and putting on disk what it changed of them."""

    def __init__(self, parts: SessionParts, agent: str, opened: dict[str, Scalar] | None = None) -> None:
        self._parts, self._agent, self._opened = parts, agent, opened
        self._setup: Setup | None = None

    async def instances(self, session_id: str) -> PluginSession:
        services = SessionHost(self._parts, session_id, self._agent)
        async with self._parts.cache.of(session_id).saving:
            self._setup = await services.setup(await self._row(session_id))
        assert self._setup.plugins is not None, "an agent with operations has plugins"
        return self._setup.plugins

    async def persist(self, session_id: str, plugins: PluginSession) -> None:
        """Put what has changed of the plugins' state on disk, to be recorded by the session's next turn."""
        setup = self._setup
        assert setup is not None
        # A later save contains what was changed before, so an earlier one must not land after it.
        async with self._parts.cache.of(session_id).saving:
            assert setup.kept is not None, "a session with plugins of its own knows what is recorded of them"
            taken = [(each.id, setup.kept.take(each)) for each in _changed(setup.kept, plugins)]
            blobs = {digest: data for _, each in taken for digest, data in each.blobs.items()}
            await self._save(session_id, setup, {name: each.snapshot for name, each in taken}, blobs)

    async def _save(
        self, session_id: str, setup: Setup, taken: dict[str, PluginSnapshot], blobs: Mapping[str, bytes]
    ) -> None:
        put, saved = functools.partial(self._put, blobs), self._parts.mint("o")
        await put()
        while True:
            row = await self._row(session_id)
            settings = load_settings(row.settings)
            self._check(row, settings, setup)
            wanted = replace(settings, snapshots=settings.snapshots | taken, saved=saved)
            write = Configure(
                session_id, self._agent, dump_settings(wanted), self._parts.clock.now(), row.settings, tuple(blobs)
            )
            try:
                after = await write_referring(functools.partial(self._parts.store.write, write), put)
            except StaleSettings:
                continue
            setup.saved(row.settings, after.settings, wanted.snapshots)
            return

    def _check(self, row: SessionRow, settings: Settings, setup: Setup) -> None:
        """Refuse to write over what another writer did to the same plugins since they were loaded here."""
        cached = self._parts.cache.of(row.id)
        running = self._parts.cache.run(row.id) is not None
        if running and cached.setup is setup:
            return  # the turn that runs is ours, and on the same plugins
        if row.owner is None and row.head == setup.head and settings.snapshots == setup.waiting:
            return
        if not running and cached.setup is setup:
            cached.keep_setup(None)
        raise Conflict(f"session {row.id!r} went on elsewhere while the operation ran: call it again")

    async def _row(self, session_id: str) -> SessionRow:
        """The session's row; a blank one when nothing was said in it yet."""
        row = await self._parts.store.session(session_id)
        if row is not None and row.deleted:
            raise UnknownSession(session_id)
        return row or new_session(session_id, self._agent, self._opened)

    async def _put(self, blobs: Mapping[str, bytes]) -> None:
        for data in blobs.values():
            await self._parts.store.blobs.put(data)


def _changed(kept: PluginStates, plugins: PluginSession) -> list[Plugin]:
    """The plugins whose state is not in any record."""
    stateful = [plugin for plugin, _ in plugins.hooks("snapshot").entries]
    return [each for each in stateful if revision_of(each) != kept.counts.get(each.id)]
