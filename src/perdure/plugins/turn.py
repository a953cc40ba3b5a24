"""The plugins of one running turn: when each hook is called, and what becomes of its answer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.control import TurnAborted, TurnCancelled
from perdure.engine.driver import Run
from perdure.engine.waiters import current_metadata
from perdure.errors import InvalidInput, PluginFault
from perdure.graph.commit import End, ledger
from perdure.model.codec import MAX_VALUE, CopiedOnRead, clean, clean_text, convert, copied, encode, error_text
from perdure.model.effect import Boundary
from perdure.model.event import PluginEvent
from perdure.model.llm import ModelResponse
from perdure.model.message import Message, Part, Text
from perdure.model.outcome import Outcome
from perdure.model.plugin import (
    AbortTurn,
    CompactedHistory,
    CreateSession,
    EmitEvents,
    EmitTrace,
    EnqueueMessages,
    Issue,
    PluginSnapshot,
    PromptPart,
    Seam,
)
from perdure.model.record import Framed, Noted, Said, Slot, since_reopened
from perdure.model.tool import ToolOutcome, ToolSpec
from perdure.plugins import decisions
from perdure.plugins.calls import (
    EndContext,
    Filters,
    HookArguments,
    HookChain,
    Hooks,
    after_tool_call,
    before_tool_call,
    collect,
    filtered_outcome,
    first,
    notify,
    pipe,
    probed,
    withheld,
)
from perdure.plugins.decisions import read, sound_history
from perdure.plugins.hooks import (
    CheckpointContext,
    CompactContext,
    Plugin,
    PromptContext,
    StopStream,
    StreamContext,
    ToolCallContext,
    ToolEndContext,
    TurnContext,
    TurnEndContext,
    ViewContext,
)
from perdure.plugins.registry import PluginSession, PluginStates, revision_of
from perdure.plugins.shown_args import ShownArgs
from perdure.ports.process import Leaving
from perdure.ports.services import StreamEnd, TurnServices
from perdure.turn.prompt import compose

log = logging.getLogger("perdure.plugins")

_PARTS = get_args(Part)

CODES = {
    "before_turn": "plugin_prepare_turn",
    "prompt": "context_prepare_turn",
    "transform_view": "context_prepare_turn",
    "compact": "context_prepare_turn",
    "at_checkpoint": "plugin_checkpoint",
    "after_turn": "plugin_finalize_turn",
}
"""How a turn ends when a hook fails that it cannot do without; the others end as `plugin_output`."""


BOUNDARY_HOOKS = frozenset(("before_turn", "compact", "at_checkpoint"))
MODEL_HOOKS = frozenset(
    ("prompt", "transform_view", "transform_text", "transform_response", "stream_finished", "compact")
)
END_HOOKS = frozenset(("after_turn", "turn_finalized"))


class Projected(Struct, frozen=True, gc=False):
    """What the model sees of a result: `value`, or where a plugin failed what is said in its place."""

    value: Any = None
    withheld: str = ""


class TurnPlugins:
    """What plugins do to one turn. `issues` are what went wrong beside it and is not recorded yet.

    Which hooks the session's plugins have is known when the turn begins: `at_boundaries`, `in_model_calls`, `at_end`
    and `after_commit` say whether there are any of these moments. `vets` before a call begins, `judges` before its
    outcome is recorded, `projects` what the model sees of it, `reviews` one of these two; `filters` for what is stored
    and shown beside outcomes, None where no plugin has any.
    """

    __slots__ = (
        "_base",
        "_edits",
        "_host",
        "_kept",
        "_metadata",
        "_mute",
        "_run",
        "_session",
        "_stateful",
        "_stream",
        "_table",
        "after_commit",
        "at_boundaries",
        "at_end",
        "filters",
        "in_model_calls",
        "issues",
        "judges",
        "projects",
        "remembers",
        "reviews",
        "vets",
    )

    def __init__(
        self, run: Run, session: PluginSession, kept: PluginStates, host: TurnServices, issues: list[Issue]
    ) -> None:
        self._run, self._session, self._kept, self._host = run, session, kept, host
        self._table = table = session.table
        self._base = (run.scope.session_id, run.turn_id, run.agent.name, run.deps)
        self._metadata = current_metadata()
        self._stateful = [plugin for plugin, _ in table["snapshot"].entries] if "snapshot" in table else []
        self._stream: Transformed | None = None
        self._edits: dict[str, bool | None] = {}
        self.remembers = bool(self._stateful) or len(run.records) > 1
        self._mute: set[str] = set()
        self.issues = issues
        self.at_boundaries = not BOUNDARY_HOOKS.isdisjoint(table)
        self.in_model_calls = not MODEL_HOOKS.isdisjoint(table)
        self.at_end, self.after_commit = not END_HOOKS.isdisjoint(table), "turn_persisted" in table
        self.vets, self.judges = "before_tool_call" in table, "after_tool_call" in table
        self.projects = "project_result" in table
        self.reviews = self.judges or self.projects
        filtering = table.get("filter_value")
        self.filters = None if filtering is None else Filters(filtering, self._base, self._report, None, self._metadata)

    def give(self, deps: Any) -> None:
        session_id, turn_id, agent, _ = self._base
        self._base = session_id, turn_id, agent, deps
        if self.filters is not None:
            self.filters = Filters(self._table["filter_value"], self._base, self._report, None, self._metadata)

    # ------------------------------------------------------------------ a turn begins

    async def at(self, boundary: Boundary) -> tuple[Message, ...]:
        """A boundary of the turn; what plugins say there."""
        if boundary == "opening":
            return await self._open() if "before_turn" in self._table or "compact" in self._table else ()
        return await self._checkpoint(boundary) if "at_checkpoint" in self._table else ()

    async def _open(self) -> tuple[Message, ...]:
        """Before the first model call of a turn: `before_turn`, then perhaps a new frame."""
        run, said = self._run, self._run.records[0]
        assert isinstance(said, Said)
        messages: tuple[Message, ...] = ()
        if (hooks := self._table.get("before_turn")) is not None:
            hooks = probed(hooks, self._host.probe)
            ctx = TurnContext(*self._base, self._host, said.message, CopiedOnRead(run.history), metadata=self._metadata)
            asked = collect(hooks, lambda _: (replace(ctx, said=copied(said.message)),))
            messages = await self._directed("before_turn", await self._asked(asked))
        if not any(type(r) is Framed for r in run.records):
            await self._compact()
        return messages

    def may_shrink(self) -> bool:
        return bool(self._run.history) and "compact" in self._table

    async def shrink(self) -> bool:
        return await self._compact(overflow=True)

    async def _compact(self, overflow: bool = False) -> bool:
        """Perhaps begin a new frame; whether there is one."""
        hooks = self._table.get("compact")
        if hooks is None:
            return False
        past = CompactContext(
            *self._base, self._host, CopiedOnRead(self._run.history), overflow, metadata=self._metadata
        )
        found = await self._asked(first(hooks, lambda _: (past,), _frame))
        if found is not None:
            await self._host.frame(found[1].reason, found[1].summary)
        return found is not None

    async def _checkpoint(self, boundary: Boundary) -> tuple[Message, ...]:
        """A boundary in the middle of a turn."""
        hooks = self._table["at_checkpoint"]
        await self._run.journal.flush()  # what a hook has seen is not asked for again
        ctx = CheckpointContext(
            *self._base,
            self._host,
            boundary,
            CopiedOnRead(self._run.machine.messages()),
            metadata=self._metadata,
        )
        return await self._directed("at_checkpoint", await self._asked(collect(hooks, lambda _: (ctx,))))

    # ------------------------------------------------------------------ the model

    async def shape(
        self, step: int, tools: Sequence[ToolSpec], instructions: str, messages: list[Message]
    ) -> tuple[str, list[Message]]:
        if (hooks := self._table.get("prompt")) is not None:
            ctx = PromptContext(
                *self._base,
                self._host,
                step,
                tuple([self._session.show(tool) for tool in tools]),
                metadata=self._metadata,
            )
            answers = await self._asked(collect(hooks, lambda _: (ctx,), _parts))
            instructions = compose(instructions, [part for _, parts in answers for part in parts])
        if (hooks := self._table.get("transform_view")) is not None:
            hooks = probed(hooks, self._host.probe)
            view = ViewContext(*self._base, self._host, step, len(self._run.history), metadata=self._metadata)
            ours = len(messages) - len(self._run.history)
            shown: CopiedOnRead[Message] = await self._asked(
                pipe(
                    hooks,
                    CopiedOnRead(messages),
                    lambda _, now: (replace(view, history=max(len(now) - ours, 0)), now),
                    _messages,
                )
            )
            messages = shown.shared()
        return instructions, messages

    def stream(self, step: int) -> Transformed | None:
        self._stream = Transformed(self, step) if "transform_text" in self._table else None
        return self._stream

    def transform(self, step: int, text: str, final: bool = False) -> tuple[str, bool]:
        """A piece of text as it is shown, and whether the model is stopped here."""
        ctx = StreamContext(*self._base, step, final, metadata=self._metadata)
        stopped = False
        for plugin, method in self._table["transform_text"].entries:
            try:
                answer = method(ctx, text)
            except BaseException as error:  # it may raise anything; the turn says whose fault it was
                what = f"{type(error).__name__}: {error_text(error)}"
                raise self._fault(PluginFault(plugin.id, "transform_text", what)) from error
            if isinstance(answer, StopStream):
                stopped, answer = True, answer.text
            if not isinstance(answer, str):
                what = type(answer).__name__
                raise self._fault(PluginFault(plugin.id, "transform_text", f"it returned a {what}, not text"))
            text = answer
        return text, stopped

    async def respond(self, response: ModelResponse, step: int) -> ModelResponse:
        if (hooks := self._table.get("transform_response")) is not None:
            ctx = StreamContext(*self._base, step, metadata=self._metadata)
            try:
                response = await self._asked(pipe(hooks, response, lambda _, value: (ctx, copied(value)), _response))
            except (TurnAborted, TurnCancelled, Leaving) as end:
                with contextlib.suppress(TurnAborted):  # the first fault is the one to tell
                    await self.stream_finished(step, "aborted" if isinstance(end, TurnAborted) else "cancelled")
                raise
        if "stream_finished" in self._table:
            stopped = self._stream is not None and self._stream.stopped
            await self.stream_finished(step, "aborted" if stopped else "complete")
        return response

    async def stream_finished(self, step: int, reason: StreamEnd) -> None:
        """Tell that a model call is over. Also while the turn is being cancelled, so only its time limit guards it."""
        if (hooks := self._table.get("stream_finished")) is not None:
            ctx = StreamContext(*self._base, step, metadata=self._metadata)
            try:
                await collect(hooks, lambda _: (ctx, reason))
            except PluginFault as fault:
                raise self._fault(fault) from fault

    # ------------------------------------------------------------------ tool calls

    async def before_call(
        self, call_id: str, tool: ToolSpec, args: dict[str, Any], hiding: ShownArgs | None = None
    ) -> decisions.CallVerdict:
        known = self._session.shown.get(tool.name)
        shown = known[1] if known is not None and known[0] is tool else self._session.show(tool)
        base = (*self._base, self._host.at(f"{call_id}.before"), call_id, shown)
        asked, visible = self._table["before_tool_call"], args if hiding is None else hiding.shown(args)
        verdict = await before_tool_call(
            asked, lambda now, again: ToolCallContext(*base, now, again, metadata=self._metadata), visible, hiding
        )
        if hiding is not None:
            verdict = replace(verdict, args=args if verdict.args is visible else hiding.restored(verdict.args))
        if verdict.asides:
            await self._asides("before_tool_call", verdict.asides, f"{call_id}.before")
        return verdict

    async def after_call(
        self, call_id: str, tool: ToolSpec, args: dict[str, Any], outcome: ToolOutcome
    ) -> tuple[decisions.Left, tuple[Message, ...]]:
        """What is recorded of a call that has ended, and what is said after its round."""
        if not self.judges:
            return decisions.Left(outcome), ()
        left = await after_tool_call(self._table["after_tool_call"], self._end_context(call_id, tool, args), outcome)
        return left, await self._asides("after_tool_call", left.asides, f"{call_id}.after")

    async def filtered(self, call_id: str, tool: ToolSpec, args: dict[str, Any], outcome: ToolOutcome) -> ToolOutcome:
        """What is recorded of a call whose body did not run."""
        hooks = self._table.get("after_tool_call")
        return (
            outcome if hooks is None else await filtered_outcome(hooks, self._end_context(call_id, tool, args), outcome)
        )

    def _end_context(self, call_id: str, tool: ToolSpec, args: dict[str, Any]) -> EndContext:
        base = (*self._base, self._host.at(f"{call_id}.after"), call_id, self._session.show(tool), args)
        return lambda outcome: ToolEndContext(*base, outcome, metadata=self._metadata)

    async def project(self, call_id: str, tool: ToolSpec, args: dict[str, Any], outcome: ToolOutcome) -> Projected:
        """What the model sees of a result: what its plugin, and then filters, make of it."""
        hooks, context = self._table["project_result"], self._end_context(call_id, tool, args)
        try:
            value = await projected(hooks, context, outcome)
        except PluginFault as fault:
            self._report(fault)
            return Projected(withheld=withheld("result", fault.plugin))
        if self.filters is None:
            return Projected(value)
        try:
            return Projected(self.filters.passed("projection", value, call_id, tool.name))
        except PluginFault as fault:
            return Projected(withheld=withheld("result", fault.plugin))

    # ------------------------------------------------------------------ a turn ends

    async def close(self, outcome: Outcome) -> Outcome:
        """The outcome is there and not committed: `after_turn`, then `turn_finalized`. How the turn ends after them.

        A turn that is being cancelled comes here too, so only their time limits guard these hooks.
        """
        state = self._run.machine.state
        if (hooks := self._table.get("after_turn")) is not None:
            hooks = probed(hooks, self._host.probe)
            await self._run.journal.flush()
            try:
                said = await self._directed("after_turn", await collect(hooks, self._end(outcome)))
                state.added = (*state.added, *said)
            except PluginFault as fault:
                self._run.abort(self._fault(fault))
            except TurnAborted as end:
                self._run.abort(end)
            outcome = state.outcome or outcome
        if (hooks := self._table.get("turn_finalized")) is not None:
            self.issues += await notify(probed(hooks, self._host.probe), self._end(outcome))
        return outcome

    async def persisted(self, outcome: Outcome) -> list[Issue]:
        """The turn is committed: nothing that goes wrong now can change it."""
        hooks = self._table.get("turn_persisted")
        if hooks is None:
            return []
        hooks, self._host = probed(hooks, self._host.probe), self._host.outside()
        return await notify(hooks, self._end(outcome))

    def _end(self, outcome: Outcome) -> HookArguments:
        """What each plugin is shown of the end; an answer may hold JSON that is about to be committed."""
        machine, base = self._run.machine, self._base
        messages, usage = CopiedOnRead(machine.messages()), machine.state.usage
        return lambda _: (TurnEndContext(*base, self._host, copied(outcome), messages, usage, metadata=self._metadata),)

    # ------------------------------------------------------------------ what rides in records

    def slot(self, slot: Slot | None) -> Slot | None:
        """The slot with the state of plugins that has changed since the record before."""
        changed: dict[str, PluginSnapshot] = {}
        for plugin in self._stateful:
            try:
                if revision_of(plugin) == self._kept.counts.get(plugin.id):
                    continue
                taken = self._kept.take(plugin)
            except PluginFault as fault:
                if plugin.id not in self._mute:  # tried again at every record, told once
                    self._mute.add(plugin.id)
                    self._report(fault)
                continue
            self._kept.counts[plugin.id] = taken.count
            changed[plugin.id] = taken.snapshot
            self._run.journal.stage(taken.blobs)
        if not changed and not self.issues and not self._edits:
            return slot
        issues, self.issues = tuple(self.issues), []
        edits, self._edits = self._edits or None, {}
        return replace(slot or Slot(), snapshots=changed or None, issues=issues, tool_state=edits)

    def note(self) -> None:
        """A call is about to wait for an answer from outside: what has changed is recorded with its question."""
        slot = self.slot(None)
        if slot is not None:
            self._run.note(Noted(slot, self._run.clock.now()))

    def take_back(self, slot: Slot | None) -> None:
        """The record with this slot was not written: the next one carries what it held."""
        if slot is None:
            return
        for name in slot.snapshots or ():
            self._kept.counts.pop(name, None)
        self.issues = [*slot.issues, *self.issues]
        self._edits = (slot.tool_state or {}) | self._edits

    def switch(self, edits: Mapping[str, bool | None]) -> None:
        """Tools of the session were switched by this turn: the next record says so, and its commit does it."""
        self.remembers = True
        self._edits.update(edits)

    def end(self, outcome: Outcome, last: Slot | None) -> End:
        """How the turn ends, with everything that plugins did in it up to its last record."""
        slots = [getattr(record, "slot", None) for record in self._run.records]
        tools: dict[str, bool | None] = {}
        recorded: dict[str, int] = {}
        for slot in (*slots, last):
            if slot is not None:
                tools.update(slot.tool_state or {})
                recorded.update({name: each.revision for name, each in (slot.snapshots or {}).items()})
        run = self._run
        asked = ledger(since_reopened(run.records)) if run.noted else None
        return End(outcome, run.machine.state.usage, last, asked, tools or None, recorded or None)

    # ------------------------------------------------------------------ answers

    async def _asked(self, work: Any) -> Any:
        """Wait for hooks, as long as the turn is not cancelled; a fault ends the turn."""
        try:
            return await self._run.control.guard(work)
        except PluginFault as fault:
            raise self._fault(fault) from fault

    def _fault(self, fault: PluginFault) -> TurnAborted:
        return TurnAborted(fault.plugin, CODES.get(fault.hook, "plugin_output"), str(fault))

    def _report(self, fault: PluginFault) -> None:
        """A fault that does not end the turn. Its words may quote a value that filters were to see first."""
        log.warning("%s", fault)
        filters = None if fault.hook == "filter_value" else self.filters
        text = str(fault) if filters is None else filters.value("issue", str(fault))
        self.issues.append(Issue(fault.code, text, fault.plugin))

    async def _directed(self, seam: Seam, answers: Sequence[tuple[Plugin, Any]]) -> tuple[Message, ...]:
        """Do what directives at a turn's own seam say. The last abort counts."""
        try:
            given = [(plugin.id, each) for plugin, answer in answers for each in read(plugin, seam, answer)]
        except PluginFault as fault:
            raise self._fault(fault) from fault
        aborts = [(plugin, each) for plugin, each in given if isinstance(each, AbortTurn)]
        state = self._run.machine.state
        messages = await self._asides(seam, tuple(given), f"{seam}.{state.phase.value}.{state.step}")
        if aborts:
            plugin, abort = aborts[-1]
            raise TurnAborted(plugin, abort.code, abort.message)
        return messages

    async def _asides(self, seam: Seam, given: decisions.Asides, place: str) -> tuple[Message, ...]:
        """Create, emit and trace; what is to be said comes back."""
        said: list[Message] = []
        for index, (plugin, directive) in enumerate(given):
            match directive:
                case EnqueueMessages(messages=messages):
                    said += messages
                case EmitEvents(events=events):
                    for value in events:
                        self._run.events.emit(PluginEvent, plugin=plugin, value=value)
                case EmitTrace(name=name, payload=payload, context=context):
                    self._host.trace(f"plugin.{plugin}.{name}", payload, context)
                case CreateSession():
                    await self._create(seam, plugin, directive, f"{place}.{plugin}.{index}")
                case _:
                    pass
        return tuple(said)

    async def _create(self, seam: Seam, plugin: str, request: CreateSession, place: str) -> None:
        try:
            await self._host.create_child(request, place)
        except Exception as error:  # the child could not be made: the turn goes on and says so
            self._report(PluginFault(plugin, seam, f"its session could not be created: {error}"))


async def projected(hooks: Hooks, context: EndContext, outcome: ToolOutcome) -> Any:
    """What the owner of a projection lets a model see of a result, as JSON. Raises PluginFault."""
    ctx, chain, ((plugin, method), *_) = context(copied(outcome)), HookChain(hooks), hooks.entries
    asked = chain.call(plugin, method, (replace(ctx, args=copied(ctx.args)),), _projection)
    return await chain.run(asked, alone=True)


def _projection(plugin: Plugin, answer: object) -> Any:
    value = clean(answer)
    if (size := len(encode(value))) > MAX_VALUE:
        raise PluginFault(plugin.id, "project_result", f"it lets the model see {size:,} bytes: {MAX_VALUE:,} at most")
    return value


def _frame(plugin: Plugin, answer: object) -> CompactedHistory | None:
    """What a compactor answered, normalised; None when it leaves the history as it is."""
    if answer is None:
        return None
    if not isinstance(answer, CompactedHistory):
        raise PluginFault(plugin.id, "compact", f"it returned a {type(answer).__name__}")
    try:
        summary = sound_history(answer.summary)
    except (InvalidInput, AttributeError, TypeError) as error:
        raise PluginFault(plugin.id, "compact", f"its summary cannot be stored: {error}") from None
    return CompactedHistory(summary, clean_text(answer.reason)) if summary else None


def _parts(plugin: Plugin, answer: object) -> list[PromptPart]:
    given = [answer] if isinstance(answer, str | PromptPart) else answer or ()
    if not isinstance(given, Iterable):
        raise PluginFault(plugin.id, "prompt", f"it returned a {type(answer).__name__} in place of prompt")
    parts = []
    for part in given:
        if not isinstance(part, str | PromptPart):
            raise PluginFault(plugin.id, "prompt", f"a {type(part).__name__} is no piece of prompt")
        whole = PromptPart(part) if isinstance(part, str) else part
        parts.append(convert(clean(whole), PromptPart))
    return parts


def _messages(plugin: Plugin, shown: Any) -> CopiedOnRead[Message]:
    if type(shown) is CopiedOnRead and shown:
        own: CopiedOnRead[Message] = shown  # what it was given, or a part of it: no plugin can make one
        return own
    given = list(shown) if isinstance(shown, Sequence) else []
    messages = [message for message in given if isinstance(message, Message)]
    if not messages or len(messages) < len(given):
        raise PluginFault(plugin.id, "transform_view", "it returned no list of messages")
    if not all(isinstance(part, _PARTS) for message in messages for part in message.parts):
        raise PluginFault(plugin.id, "transform_view", "it returned a message whose parts are none")
    return CopiedOnRead(messages)


def _response(plugin: Plugin, answer: object) -> ModelResponse:
    if not isinstance(answer, ModelResponse):
        raise PluginFault(plugin.id, "transform_response", f"it returned a {type(answer).__name__}")
    return answer


def plugins_of(run: Run) -> TurnPlugins | None:
    """What plugins do to a turn, if they do anything."""
    hooks = run.hooks
    assert hooks is None or isinstance(hooks, TurnPlugins)
    return hooks


class Transformed:
    """The text of one model call, changed by plugins on its way."""

    __slots__ = ("_plugins", "_step", "_text", "stopped")

    def __init__(self, plugins: TurnPlugins, step: int) -> None:
        self._plugins, self._step = plugins, step
        self._text: list[str] = []
        self.stopped = False

    def feed(self, text: str) -> str:
        shown, self.stopped = self._plugins.transform(self._step, text)
        self._text.append(shown)
        return shown

    def finish(self, response: ModelResponse | None) -> str:
        parts = () if self._text or response is None else response.all_parts()
        late = "".join([part.text for part in parts if isinstance(part, Text)])
        shown, _ = self._plugins.transform(self._step, late, final=True)
        self._text.append(shown)
        return shown

    def shown(self, response: ModelResponse | None) -> ModelResponse:
        """The answer with its text as it was shown: what is recorded is what people saw."""
        text = "".join(self._text)
        if response is None:
            return ModelResponse(text)
        if not response.parts:
            return replace(response, text=text)
        rest = [part for part in response.parts if not isinstance(part, Text)]
        first_text = next((i for i, part in enumerate(response.parts) if isinstance(part, Text)), len(rest))
        return replace(response, parts=(*rest[:first_text], *((Text(text),) if text else ()), *rest[first_text:]))
