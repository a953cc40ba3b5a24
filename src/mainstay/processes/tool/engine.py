"""The engine of background tools: any tool as a process, under the recovery contract that the tool has.

    rerun         rerunnable: a worker that died on it costs one repeated, counted attempt
    once, ask     owner_bound: begun and not ended when its worker dies, it is abandoned: its outcome is unknown

    a place, if the tool has limits → its start on disk → the body → how it ended, on disk

An attempt that failed before it had any effect parks the process until the next one is due: no worker owns it
meanwhile, so that no death can make a known failure an unknown one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct, ValidationError

from mainstay.errors import InvalidProcess, ToolError
from mainstay.model.codec import clean, convert
from mainstay.model.process import (
    EventType,
    Failure,
    ProcessOutcome,
    ProcessRecovery,
    Registration,
    SessionOrigin,
)
from mainstay.model.tool import PreparedCall, ToolSpec
from mainstay.plugins.filters import Filters
from mainstay.ports.process import EngineRun
from mainstay.ports.services import ToolHost
from mainstay.ports.tool import Handles
from mainstay.processes.tool.work import ARTIFACT, ToolWork
from mainstay.processes.worker.host import Host
from mainstay.processes.worker.journal import load_steps
from mainstay.processes.worker.run import ProcessRun
from mainstay.tools.catalog import Entry
from mainstay.tools.define import Tool
from mainstay.tools.dispatcher import Dispatcher
from mainstay.tools.invoke import Ready
from mainstay.tools.output import Look

KIND = "tool"

CONTRACTS: dict[str, ProcessRecovery] = {"rerun": "rerunnable", "once": "owner_bound", "ask": "owner_bound"}


class ToolInput(Struct, frozen=True, omit_defaults=True):
    """What a background tool was asked for: a prepared call, whose id is the process's, of a tool of an agent."""

    agent: str
    tool: str
    tool_id: str
    args: dict[str, Any]
    payload: Any = None


class BackgroundCall(Struct, frozen=True):
    """A call that was prepared in a turn, to be started as a process."""

    agent: str
    call: PreparedCall
    spec: ToolSpec


class Tools(Protocol):
    """Where the tools of a process are found: the agents of a Runtime and what their sessions add to them."""

    def owner(self, tool: Tool[..., Any]) -> str | None:
        """The agent that has this tool."""
        ...

    def offers(self, agent: str, name: str, session_id: str | None) -> bool: ...

    async def find(self, agent: str, name: str, session_id: str | None, env: str | None) -> Entry | None:
        """The tool, as the environment that was captured knows it."""
        ...

    def host(self, agent: str, session_id: str) -> ToolHost: ...

    def handles(self, run: ProcessRun, agent: str) -> Handles: ...

    def look(self, agent: str, session_id: str, call: PreparedCall, spec: ToolSpec) -> Look | None:
        """What the plugins of its session make of how a call ended; None when none of them wants to know."""
        ...

    async def filters(self, agent: str, session_id: str) -> Filters | None:
        """What progress and artifacts of a session's tools pass before they are stored."""
        ...


class ToolEngine:
    """Runs tools as processes."""

    kind = KIND

    def __init__(self, tools: Tools, home: Dispatcher, host: Host) -> None:
        self._tools, self._home, self._host = tools, home, host

    def knows(self, registration: Registration) -> bool:
        asked = read_input(registration)
        return asked is not None and self._tools.offers(asked.agent, asked.tool, session_of(registration))

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        """The registration of a tool, given as a prepared call or itself; None when it is none."""
        if isinstance(what, BackgroundCall):
            return drafted(what.agent, what.call, what.spec)
        if not isinstance(what, Tool):
            return None
        agent = self._tools.owner(what)
        if agent is None:
            raise InvalidProcess(f"{what!r} is not part of this Runtime: give it to one of its agents (`tools=[…]`)")
        try:
            what.bind(dict(args))
        except ToolError as error:
            raise InvalidProcess(error.message) from None
        return drafted(agent, PreparedCall("", what.spec.tool_id, what.spec.name, dict(args)), what.spec)

    async def run(self, run: EngineRun) -> ProcessOutcome:
        assert isinstance(run, ProcessRun)
        asked, session_id = read_input(run.registration), session_of(run.registration)
        entry = None
        if asked is not None:
            entry = await self._tools.find(asked.agent, asked.tool, session_id, run.registration.env)
        if asked is None or entry is None:
            raise InvalidProcess(f"the tool of process {run.row.id!r} is not there: bring it back, then resume it")
        call = PreparedCall(run.row.id, asked.tool_id, asked.tool, asked.args, asked.payload)
        try:
            ready = Ready(entry, call, None if entry.tool is None else entry.tool.bind(asked.args))
        except ToolError as error:  # its definition has changed since
            return Failure(error.code, error.message)
        records, ordinal = await load_steps(self._host.store, run.row.pid, run.row.id) if run.resumed else ([], 0)
        run.journal.begin_at(ordinal)
        work = ToolWork(run, ready, self._home, self._host)
        work.services = None if session_id is None else lambda: self._tools.host(asked.agent, session_id)
        if session_id is not None:
            work.look = self._tools.look(asked.agent, session_id, call, entry.spec)
            work.filters = await self._tools.filters(asked.agent, session_id)
        work.handles = lambda: self._tools.handles(run, asked.agent)
        return await work.go(records)


def drafted(agent: str, call: PreparedCall, spec: ToolSpec) -> Registration:
    """A registration, still without id."""
    if spec.deferred:
        raise InvalidProcess(f"tool {spec.name} defers its completion, and a turn must wait for that: call it there")
    asked = ToolInput(agent, spec.name, spec.tool_id, call.args, call.payload)
    return Registration(
        "", KIND, CONTRACTS[spec.recovery], spec.name, spec.tool_id, clean(asked), spec.name,
        events=(EventType(ARTIFACT),),
    )  # fmt: skip


def read_input(registration: Registration) -> ToolInput | None:
    """What was asked for; None when that is not readable here."""
    try:
        found: ToolInput = convert(registration.input, ToolInput)
    except ValidationError:
        return None
    return found


def session_of(registration: Registration) -> str | None:
    origin = registration.origin
    return origin.session_id if isinstance(origin, SessionOrigin) else None
