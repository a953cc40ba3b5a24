"""Results that come after their turn, and the plugins that must see them first.

    a background tool    `after_tool_call` sees how it ended before its process records that
    any other process    `after_tool_call` sees what a session is told of it before that becomes an input
    both                 `project_result` decides what the session is told
    whatever it is       `filter_value` sees the text that the session is told, and progress and artifacts of its tools

The id of the process stands for that of the call. There is no turn: a result may be replaced, and a fault withholds it,
as in one; events and traces are emitted. What a plugin wants said or created beside it has no place, and is logged.
What was decided is in what is written next, so nobody is asked again once that is on disk.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from mainstay.engine.gate import TurnAborted
from mainstay.errors import PluginFault
from mainstay.lifecycle.process import ENDS
from mainstay.model.event import PluginEvent
from mainstay.model.message import ToolCall
from mainstay.model.own import shown_spec
from mainstay.model.plugin import EmitEvents, EmitTrace, kind_of
from mainstay.model.process import ProcessRow
from mainstay.model.session import Answer, SessionRow
from mainstay.model.tool import Failed, Ok, PreparedCall, ToolOutcome, ToolSpec
from mainstay.observe.feed import TurnEvents
from mainstay.plugins import decisions
from mainstay.plugins.calls import Hooks, probed
from mainstay.plugins.filters import Filters, withheld
from mainstay.plugins.hooks import ToolEndContext
from mainstay.plugins.turn import projected
from mainstay.processes.tool import KIND, read_input, session_of
from mainstay.sessions.parts import SessionParts
from mainstay.sessions.services.host import SessionHost
from mainstay.sessions.setup import Setup
from mainstay.sessions.wakes.text import IN_FULL, Heard, in_words, instead, outcome_of
from mainstay.tools.output import Look

log = logging.getLogger("mainstay.sessions")

HOOKS = ("after_tool_call", "project_result", "filter_value")
"""Hooks that are concerned with what comes after its turn."""


class LateResults:
    """Shows late results to the plugins of their sessions."""

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts

    def look(self, agent: str, session_id: str, call: PreparedCall, tool: ToolSpec) -> Look | None:
        """What becomes of the outcome of a background tool; None when no plugin wants to see it."""
        if not self._concerned(agent, "after_tool_call"):
            return None
        return functools.partial(self._ended, agent, session_id, call, tool)

    async def _ended(
        self, agent: str, session_id: str, call: PreparedCall, tool: ToolSpec, outcome: ToolOutcome
    ) -> ToolOutcome:
        row = await self._parts.store.session(session_id)
        if row is None or row.deleted or row.agent != agent:
            row = SessionRow(0, session_id, agent)  # as it was when the tool was asked for
        setup = await self.setup(row)
        return await Showing(self._parts, row, setup, call.call_id, tool, call.args).vetted(outcome)

    async def filters(self, agent: str, session_id: str) -> Filters | None:
        """What values of a session pass that come outside of its turns; None when nobody filters them."""
        if not self._concerned(agent, "filter_value"):
            return None
        row = await self._parts.store.session(session_id)
        if row is None or row.deleted or row.agent != agent:
            row = SessionRow(0, session_id, agent)
        return self._filters(row, await self.setup(row))

    async def annotation(self, row: SessionRow, call_id: str, call: ToolCall, answer: Answer) -> str:
        """What somebody outside says about a call that is over, as its session is told of it."""
        value, reason = answer.value, answer.reason
        if answer.verdict != "rerun" and self._concerned(row.agent, "after_tool_call"):
            given = Ok(value) if answer.verdict == "done" else Failed("settled_as_failed", reason, value)
            seen = await Showing(
                self._parts, row, await self.setup(row), call_id, ToolSpec(call.name), call.args
            ).vetted(given)
            value = seen.value if isinstance(seen, Ok) else getattr(seen, "data", None)
            if not isinstance(seen, Ok):
                reason = seen.message if isinstance(seen, Failed) else seen.reason
        words = {"done": "it took effect", "failed": "it did not take effect", "rerun": "call it again"}
        text = f"[About call {call_id}, whose outcome was unknown: {words[answer.verdict]}"
        text += f"; value: {msgspec.json.encode(value).decode()}" if value is not None else ""
        text += f"; {reason}]" if reason else "]"
        filters = await self.filters(row.agent, row.id)
        passed: str = text if filters is None else filters.value("answer", text, call_id, call.name)
        return passed

    def _filters(self, row: SessionRow, setup: Setup | TurnAborted) -> Filters:
        base = (row.id, "", row.agent, self._parts.deps)
        if isinstance(setup, TurnAborted):
            return Filters(Hooks("filter_value"), base, _log, setup.plugin)
        assert setup.plugins is not None, "somebody has the hook"
        return Filters(setup.plugins.hooks("filter_value"), base, _log)

    async def told(self, row: SessionRow, told: Sequence[Heard]) -> str:
        """What a session is told of its processes, in words. Of those that it only hears the names of nobody sees
        more."""
        concerned = [hook for hook in HOOKS if self._concerned(row.agent, hook)]
        if not concerned:
            return in_words(told)
        setup = await self.setup(row)
        if concerned != ["filter_value"]:
            told = [await self._seen(row, setup, each) for each in told[:IN_FULL]] + list(told[IN_FULL:])
        if "filter_value" not in concerned:
            return in_words(told)
        text: str = self._filters(row, setup).value("wake", in_words(told))
        return text

    async def _seen(self, row: SessionRow, setup: Setup | TurnAborted, told: Heard) -> Heard:
        outcome = outcome_of(told)
        if outcome is None:
            return told  # there is nothing to see
        process = await self._parts.store.process(told.wake.process_id)
        tool, args = _asked(process, setup, told.wake.name)
        showing = Showing(self._parts, row, setup, told.wake.process_id, tool, args)
        # Why it was cancelled is whoever's words that wanted it: the tool's engine has not seen them.
        ended = told.wake.type in ENDS.values() and isinstance(outcome, Ok | Failed)
        seen = outcome if ended and _is_vetted(process, row.id) else await showing.vetted(outcome)
        seen = await showing.projected(seen)
        return told if seen == outcome else instead(told, seen)

    def _concerned(self, agent: str, hook: str) -> bool:
        definition = self._parts.definitions.get(agent)
        return definition is not None and definition.plugins.has(hook)

    async def setup(self, row: SessionRow) -> Setup | TurnAborted:
        """What the session runs with, or which plugin refuses it."""
        try:
            async with self._parts.cache.of(row.id).saving:
                return await self._parts.turns.setup(row)
        except TurnAborted as refused:
            return refused


class Showing:
    """One late result before the plugins of its session."""

    def __init__(
        self,
        parts: SessionParts,
        row: SessionRow,
        setup: Setup | TurnAborted,
        call_id: str,
        tool: ToolSpec,
        args: dict[str, Any],
    ) -> None:
        self._parts, self._agent, self._session_id, self._setup = parts, row.agent, row.id, setup
        self._call_id, self._tool, self._args = call_id, shown_spec(tool), args
        self._services = SessionHost(parts, row.id, row.agent)

    async def vetted(self, outcome: ToolOutcome) -> ToolOutcome:
        """The outcome as `after_tool_call` leaves it."""
        if isinstance(self._setup, TurnAborted):
            return Failed(self._setup.code, f"{decisions.WITHHELD}: {self._setup.message}")
        hooks = self._hooks("after_tool_call")
        if not hooks:
            return outcome
        left = await decisions.after(hooks, self._context, outcome)
        self._asides(left.asides)
        return left.outcome

    async def projected(self, outcome: ToolOutcome) -> ToolOutcome:
        """What the model sees of it, if a plugin decides that."""
        if not isinstance(outcome, Ok):
            return outcome
        if isinstance(self._setup, TurnAborted):
            return Ok(withheld("result", self._setup.plugin))
        hooks = self._hooks("project_result")
        if not hooks:
            return outcome
        try:
            return Ok(await projected(hooks, self._context, outcome))
        except PluginFault as fault:
            log.warning("%s", fault)
            return Ok(withheld("result", fault.plugin))

    def _hooks(self, name: str) -> Hooks:
        plugins = self._setup.plugins if isinstance(self._setup, Setup) else None
        return Hooks(name) if plugins is None else probed(plugins.hooks(name), self._services.probe)

    def _context(self, outcome: ToolOutcome) -> ToolEndContext:
        base = (self._session_id, "", self._agent, self._services.deps)
        return ToolEndContext(*base, self._services, self._call_id, self._tool, self._args, outcome, late=True)

    def _asides(self, given: decisions.Asides) -> None:
        for plugin, directive in given:
            match directive:
                case EmitEvents(events=events):
                    sink = TurnEvents(self._parts.feed, self._session_id, "", asyncio.get_running_loop())
                    for value in events:
                        sink.emit(PluginEvent, plugin=plugin, value=value)
                case EmitTrace(name=name, payload=payload, context=context):
                    self._services.trace(f"plugin.{plugin}.{name}", payload, context)
                case _:
                    log.warning(
                        "plugin %s: %s means nothing after the result of process %s, which belongs to no turn",
                        *(plugin, kind_of(directive), self._call_id),
                    )


def _log(fault: PluginFault) -> None:
    log.warning("%s", fault)


def _is_vetted(process: ProcessRow | None, session_id: str) -> bool:
    """Whether its end was shown to this session's plugins before it was recorded."""
    if process is None or process.registration.kind != KIND:
        return False
    return session_of(process.registration) == session_id


def _asked(process: ProcessRow | None, setup: Setup | TurnAborted, name: str) -> tuple[ToolSpec, dict[str, Any]]:
    """What plugins are told of the call: its tool and arguments, or the name of a process that is none."""
    asked = None
    if process is not None and process.registration.kind == KIND:
        asked = read_input(process.registration)
    if asked is None:
        return ToolSpec(name, id=f"process:{name}"), {}  # not to be mistaken for a tool of that name
    try:
        entry = setup.definition.catalog.get(asked.tool) if isinstance(setup, Setup) else None
    except TurnAborted:  # who hides tools could not say which; the next turn will tell
        entry = None
    return (ToolSpec(asked.tool) if entry is None else entry.spec), asked.args
