"""Results that come after their turn, and the plugins that must see them first.

    a background tool    `after_tool_call` sees how it ended before its process records that
    any other process    `after_tool_call` sees what a session is told of it before that becomes an input
    both                 `project_result` decides what the session is told
    whatever it is       `filter_value` sees the text that the session reads, and progress and artifacts of its tools

The id of the process stands for that of the call. There is no turn: a result may be replaced, and a fault withholds it,
as in one; events and traces are emitted. What a plugin wants said or created beside it has no place, and is logged.
What was decided is in what is written next, so no plugin is asked again once that is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.control import TurnAborted
from perdure.errors import BlobMissing, PluginFault, StoreDamaged
from perdure.lifecycle.process import ENDS
from perdure.model.codec import read_only_spec
from perdure.model.event import PluginEvent
from perdure.model.message import Metadata, ToolCall
from perdure.model.plugin import EmitEvents, EmitTrace, kind_of
from perdure.model.process import ProcessRow, Wake, WakeRow
from perdure.model.session import Answer, SessionRow, load_settings
from perdure.model.tool import Cancelled, Failed, Ok, OutputBudget, PreparedCall, ToolOutcome, ToolSpec
from perdure.model.transcript import shown_outcome
from perdure.observe.feed import TurnEvents
from perdure.plugins import decisions
from perdure.plugins.calls import Filters, Hooks, after_tool_call, probed, withheld
from perdure.plugins.hooks import ToolEndContext
from perdure.plugins.shown_args import ShownArgs
from perdure.plugins.turn import projected
from perdure.ports.store import Store
from perdure.ports.tool import HidesSecrets
from perdure.processes.tool import KIND, read_input, session_of
from perdure.sessions.parts import SessionParts
from perdure.sessions.services.host import SessionHost
from perdure.sessions.setup import Setup
from perdure.tools.output import Review, project

log = logging.getLogger("perdure.sessions")

HOOKS = ("after_tool_call", "project_result", "filter_value")
"""Hooks that are concerned with what comes after its turn."""


class LateResults:
    """Shows late results to the plugins of their sessions."""

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts

    def review(self, agent: str, session_id: str, call: PreparedCall, tool: ToolSpec) -> Review | None:
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
        """What values of a session pass that come outside of its turns; None when no plugin filters them."""
        if not self._concerned(agent, "filter_value"):
            return None
        row = await self._parts.store.session(session_id)
        if row is None or row.deleted or row.agent != agent:
            row = SessionRow(0, session_id, agent)
        return self._filters(row, await self.setup(row))

    async def annotation(self, row: SessionRow, call_id: str, call: ToolCall, answer: Answer) -> str:
        """What a program outside says about a call that is over, as its session is told of it."""
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
        metadata = Metadata(load_settings(row.settings).metadata)
        if isinstance(setup, TurnAborted):
            return Filters(Hooks("filter_value"), base, _log, setup.plugin, metadata)
        assert setup.plugins is not None, "somebody has the hook"
        return Filters(setup.plugins.hooks("filter_value"), base, _log, None, metadata)

    async def allowed_text(self, row: SessionRow, news: Sequence[WakeNews]) -> str:
        """What a session reads of its processes, as its plugins let it. Of those beyond the first few it reads the
        names, which no plugin sees."""
        concerned = [hook for hook in HOOKS if self._concerned(row.agent, hook)]
        if not concerned:
            return news_text(news)
        setup = await self.setup(row)
        if concerned != ["filter_value"]:
            news = [await self._seen(row, setup, each) for each in news[:IN_FULL]] + list(news[IN_FULL:])
        if "filter_value" not in concerned:
            return news_text(news)
        text: str = self._filters(row, setup).value("wake", news_text(news))
        return text

    async def _seen(self, row: SessionRow, setup: Setup | TurnAborted, news: WakeNews) -> WakeNews:
        outcome = outcome_of(news)
        if outcome is None:
            return news  # plugins have nothing to see
        process = await self._parts.store.process(news.wake.process_id)
        tool, args = _asked(process, setup, news.wake.name)
        showing = Showing(self._parts, row, setup, news.wake.process_id, tool, args)
        # The reason of a cancel comes from its caller: the tool's engine has not seen it.
        ended = news.wake.type in ENDS.values() and isinstance(outcome, Ok | Failed)
        seen = outcome if ended and _is_vetted(process, row.id) else await showing.vetted(outcome)
        seen = await showing.projected(seen)
        return news if seen == outcome else replaced(news, seen)

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
        self._call_id, self._tool, self._args = call_id, read_only_spec(tool), args
        self._hidden = False
        self._services = SessionHost(parts, row.id, row.agent)
        self._metadata = Metadata(load_settings(row.settings).metadata)

    async def vetted(self, outcome: ToolOutcome) -> ToolOutcome:
        """The outcome as `after_tool_call` leaves it."""
        if isinstance(self._setup, TurnAborted):
            return Failed(self._setup.code, f"{decisions.WITHHELD}: {self._setup.message}")
        hooks = self._hooks("after_tool_call")
        if not hooks:
            return outcome
        await self._hide()
        left = await after_tool_call(hooks, self._context, outcome)
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
        await self._hide()
        try:
            return Ok(await projected(hooks, self._context, outcome))
        except PluginFault as fault:
            log.warning("%s", fault)
            return Ok(withheld("result", fault.plugin))

    def _hooks(self, name: str) -> Hooks:
        plugins = self._setup.plugins if isinstance(self._setup, Setup) else None
        return Hooks(name) if plugins is None else probed(plugins.hooks(name), self._services.probe)

    async def _hide(self) -> None:
        """Plugins see the arguments with marks in place of secrets, as they did when the call began."""
        if isinstance(self._setup, Setup) and self._args and not self._hidden:
            with contextlib.suppress(TurnAborted):  # who hides tools could not say which; then it is a name alone
                entry = self._setup.definition.catalog.get(self._tool.name)
                provider: object = None if entry is None else entry.provider
                if isinstance(provider, HidesSecrets):
                    key = await self._parts.store.secret()
                    self._args = ShownArgs(provider, self._tool, self._call_id, key).shown(self._args)
        self._hidden = True

    def _context(self, outcome: ToolOutcome) -> ToolEndContext:
        base = (self._session_id, "", self._agent, self._services.deps)
        return ToolEndContext(
            *base,
            self._services,
            self._call_id,
            self._tool,
            self._args,
            outcome,
            late=True,
            metadata=self._metadata,
        )

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


# ---------------------------------------------------------------------- wakes as text

# What the model reads of a process that it asked for.
#
#     [process "report" completed]
#     handle: {"__handle__":"process","id":"chat.3.1.0"}
#     what: make_report, asked for by call chat.3.1.0
#     value: {"rows":1200,"file":"q3.csv"}
#
# A value that is too large for this is cut, and marked; with the handle, all of it can be read. Text of several lines
# is quoted, each with `> ` before it, and so is a line of an input that begins like a report: neither a process nor a
# person can imitate the runtime.

IN_FULL = 50
"""So many processes of one input are told of at length; of the others the model is shown that they exist."""
ROOM, LEAST = 24 * 1024, 512
"""Bytes for all values of one input together, and for each of them at least."""
LINES = 200
MAX_NAME = 200
"""Characters of a name or a label."""

_decode = msgspec.json.Decoder(Wake).decode
_encode = msgspec.json.Encoder(order="deterministic").encode


class WakeNews(Struct, frozen=True):
    """A wake that was read. `value` is what its process returned or told; `lost` says why it cannot be shown."""

    wake: Wake
    value: Any = None
    lost: str = ""


def read(row: WakeRow) -> Wake:
    """What a wake says; ValueError when it says nothing that can be read."""
    return _decode(row.body)


async def read_news(store: Store, row: WakeRow) -> WakeNews:
    """A wake with its value, which may be beside the store."""
    wake = read(row)
    payload = wake.payload
    if wake.type not in ENDS.values() or not isinstance(payload, dict) or payload.get("type") != "success":
        return WakeNews(wake, payload)
    if (blob := payload.get("blob")) is None:
        return WakeNews(wake, payload.get("value"))
    try:
        return WakeNews(wake, msgspec.json.decode(await store.blobs.get(blob["digest"])))
    except (BlobMissing, StoreDamaged) as error:
        return WakeNews(wake, None, str(error))


def outcome_of(news: WakeNews) -> ToolOutcome | None:
    """What a wake says as the outcome of a call; None when there is nothing to be shown of it."""
    wake, payload = news.wake, news.wake.payload
    if news.lost:
        return None
    kind = payload.get("type") if wake.type in ENDS.values() and isinstance(payload, dict) else None
    if kind == "failure":
        return Failed(payload["code"], payload.get("message", ""), payload.get("data"))
    if kind == "cancelled":
        return Cancelled(payload.get("by", ""), payload.get("reason", ""))
    return None if kind == "abandoned" else Ok(news.value)


def replaced(news: WakeNews, outcome: ToolOutcome) -> WakeNews:
    """The same news with another outcome. What happened stays what it was; what is shown of it does not."""
    wake = news.wake
    if isinstance(outcome, Ok):
        payload = {"type": "success"} if wake.type in ENDS.values() else outcome.value
        return WakeNews(replace(wake, payload=payload), outcome.value)
    if wake.type not in ENDS.values():
        return WakeNews(replace(wake, payload=None), shown_outcome(outcome))
    if isinstance(outcome, Cancelled) and wake.payload.get("type") == "cancelled":
        return WakeNews(replace(wake, payload=wake.payload | {"by": outcome.by, "reason": outcome.reason}))
    failed = (
        outcome if isinstance(outcome, Failed) else Failed(str(type(outcome).__struct_config__.tag), outcome.reason)
    )
    payload = {"type": "failure", "code": failed.code, "message": failed.message, "data": failed.data}
    return WakeNews(replace(wake, payload=payload))


def news_text(news: Sequence[WakeNews]) -> str:
    """What a session reads of its processes, in the order in which it happened."""
    full, rest = news[:IN_FULL], news[IN_FULL:]
    room = max(LEAST, ROOM // max(len(full), 1))
    blocks = [_block(each, OutputBudget(room, LINES)) for each in full]
    if rest:
        lines = [f"- {each.wake.process_id}{_named(each.wake)}: {_event(each.wake)}" for each in rest]
        blocks.append("\n".join([f"[{len(rest)} more; wait for one to see what it returned]", *lines]))
    return "\n\n".join(blocks)


def _block(news: WakeNews, budget: OutputBudget) -> str:
    wake = news.wake
    lines = [f"[process{_named(wake)} {_event(wake)}]"]
    lines.append(f"handle: {_json({'__handle__': 'process', 'id': wake.process_id})}")
    asked = f"asked for by call {wake.call_id}" if wake.call_id else ""
    what = ", ".join(part for part in (_short(wake.name), asked) if part)
    if what:
        lines.append(f"what: {what}")
    lines += _body(news, budget)
    return "\n".join(lines)


def _named(wake: Wake) -> str:
    name = wake.label or wake.name
    return f" {_json(name[:MAX_NAME])}" if name else ""


def _short(name: str) -> str:
    """A name that cannot be mistaken for lines of ours."""
    return name[:MAX_NAME] if name.isprintable() else _json(name[:MAX_NAME])


def _event(wake: Wake) -> str:
    """What happened, in a word or two."""
    return wake.status if wake.type in ENDS.values() else f"tells: {_short(wake.type)}"


def _body(news: WakeNews, budget: OutputBudget) -> list[str]:
    wake, payload = news.wake, news.wake.payload
    if news.lost:
        return [f"value: it cannot be shown ({news.lost})"]
    if wake.type not in ENDS.values():
        return [f"payload: {_shown(news.value, budget)}"]
    kind = payload.get("type") if isinstance(payload, dict) else None
    if kind == "failure":
        error = f"{payload['code']}: {payload.get('message', '')}"
        lines = [f"error: {_shown(error, budget)}"]
        return [*lines, f"data: {_shown(payload['data'], budget)}"] if payload.get("data") is not None else lines
    if kind == "cancelled":
        why = f"by {payload.get('by') or 'somebody'}: {payload.get('reason') or 'it was asked to end'}"
        unknown = ["how far its last effect came is not known (outcome_unknown)"] if payload.get("unknown") else []
        return [f"cancelled {_shown(why, budget)}", *unknown]
    if kind == "abandoned":
        return ["it was given up: whether its last effect happened is not known (outcome_unknown)"]
    return [f"value: {_shown(news.value, budget)}"]


def _shown(value: Any, budget: OutputBudget) -> str:
    cut = project(value, budget).value
    if not isinstance(cut, str):
        return _json(cut)
    lines = cut.splitlines()
    return cut if len(lines) < 2 else "".join([f"\n> {line}" for line in lines])


def _json(value: Any) -> str:
    return _encode(value).decode()
