"""The environment that a process was asked for in, and how its tool is found there again.

Captured once, content-addressed and never changed: the agent, what its plugins were told, which tools were switched
on and off. A process inside keeps it. Most sessions share one, so that most starts write nothing for it.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import Struct

from perdure.engine.driver import Run
from perdure.errors import PluginError
from perdure.model.codec import convert, decode
from perdure.model.process import Registration
from perdure.model.session import Settings, load_settings
from perdure.model.tool import PreparedCall, ToolSpec
from perdure.plugins.calls import Filters
from perdure.plugins.registry import overrides
from perdure.ports.process import EngineRun
from perdure.ports.services import ToolHost
from perdure.ports.tool import Parking
from perdure.processes.service import ProcessService
from perdure.processes.tool import session_of
from perdure.processes.visible import Asker, Visible
from perdure.sessions.definition import Definition
from perdure.sessions.parts import SessionParts
from perdure.sessions.services.host import SessionHost
from perdure.sessions.setup import contexts_of
from perdure.sessions.wakes.late_results import LateResults
from perdure.tools.catalog import Catalog, Membership, ToolEntry
from perdure.tools.define import Tool
from perdure.tools.dispatcher import Dispatcher
from perdure.tools.output import Review


class Environment(Struct, frozen=True, tag="environment.1", omit_defaults=True):
    """What a session ran with when it started a process. `tools` are those it switched on or off."""

    agent: str
    options: dict[str, Any] = {}
    tools: dict[str, bool] = {}
    hidden: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None


def capture(run: Run, settings: Settings) -> bytes:
    """The environment of a running turn."""
    catalog = run.agent.catalog
    tools = catalog.state.members if isinstance(catalog, Membership) else settings.tools.members
    only = None if settings.only is None else tuple(sorted(settings.only))
    found = Environment(run.agent.name, settings.options, dict(tools), tuple(sorted(settings.hidden)), only)
    return msgspec.json.encode(found, order="deterministic")  # the same content has the same name


class Environments:
    """Where processes of a Runtime find their tools, and calls what they may do with processes."""

    def __init__(self, parts: SessionParts, home: Dispatcher, service: ProcessService) -> None:
        self._parts, self._home, self._service = parts, home, service
        self._put: set[str] = set()

    # ------------------------------------------------------------------ tools of processes

    def owner(self, tool: Tool[..., Any]) -> str | None:
        """The agent that has this tool: the first, if several do."""
        for name, definition in self._parts.definitions.items():
            entry = definition.catalog.get(tool.spec.name)
            if entry is not None and entry.tool is not None and entry.tool.fn == tool.fn:
                return name
        return None

    def offers(self, agent: str, name: str, session_id: str | None) -> bool:
        """Whether a process of this tool can be worked on here."""
        definition = self._parts.definitions.get(agent)
        if definition is None:
            return False
        if self._at_hand(definition, name, session_id) is not None:
            return True
        # What plugins make for single sessions is only known once it is made.
        plugins = definition.plugins
        return any(overrides(each, "tools") and each not in plugins.shared_tools for each in plugins.plugins)

    async def find(self, agent: str, name: str, session_id: str | None, env: str | None) -> ToolEntry | None:
        definition = self._parts.definitions.get(agent)
        if definition is None:
            return None
        entry = self._at_hand(definition, name, session_id)
        if entry is None and session_id is not None and env is not None:
            entry = _made_for(definition, name, session_id, await self._load(env))
        return entry

    def _at_hand(self, definition: Definition, name: str, session_id: str | None) -> ToolEntry | None:
        """What the session at work has goes before what its agent has: its plugins, and what its host laid over it."""
        found = None
        if session_id is not None:
            cached, running = self._parts.cache.get(session_id), self._parts.cache.run(session_id)
            if running is not None:
                found = running.agent.catalog.get(name)
            if found is None and cached is not None and cached.overlay is not None:
                found = cached.overlay.catalog.get(name)
        return found or definition.catalog.get(name)

    async def _load(self, digest: str) -> Environment:
        return convert(decode(await self._home.store.blobs.get(digest)), Environment)

    def host(self, agent: str, session_id: str) -> ToolHost:
        return SessionHost(self._parts, session_id, agent)

    def review(self, agent: str, session_id: str, call: PreparedCall, spec: ToolSpec) -> Review | None:
        return LateResults(self._parts).review(agent, session_id, call, spec)

    async def filters(self, agent: str, session_id: str) -> Filters | None:
        return await LateResults(self._parts).filters(agent, session_id)

    # ------------------------------------------------------------------ what calls may do

    def for_call(self, run: Run, call_id: str, parking: Parking | None) -> Visible:
        """For a call of a turn."""
        env, session_id = functools.partial(self._capture, run), run.scope.session_id
        asker = Asker(session_id, run.agent.name, call_id, run.turn_id, run, None, env, self._put, parking)
        return Visible(self._service, self._home, asker)

    def _capture(self, run: Run) -> bytes:
        setup = self._parts.cache.of(run.scope.session_id).setup
        return capture(run, load_settings(b"" if setup is None else setup.settings))

    def handles(self, run: EngineRun, agent: str) -> Visible:
        """For a background tool: what it starts belongs to it, in the environment that it has itself."""
        registration: Registration = run.registration
        session_id = session_of(registration) or ""
        asker = Asker(session_id, agent, run.row.id, run.row.id, process=run, env=registration.env)
        return Visible(self._service, self._home, asker)


def _made_for(definition: Definition, name: str, session_id: str, env: Environment) -> ToolEntry | None:
    """A tool that a plugin makes for single sessions, made for this one as it was."""
    settings = Settings(options=env.options, hidden=env.hidden)
    try:
        session = definition.plugins.open(contexts_of(definition, session_id, settings))
    except PluginError:
        return None  # it refuses the session by now
    for _, method in session.hooks("tools").entries:
        entry = Catalog(method()).get(name)
        if entry is not None:
            return entry
    return None
