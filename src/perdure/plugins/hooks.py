"""Every hook a plugin may have: one typed method each, and what it is told.

A hook may be `async def` or plain `def`. A plain one runs on the event loop and must not block; an async one is cut
off after `time_limit` seconds. A hook that is not overridden is never called and costs nothing.

When the process dies, hooks between two records run again: at least once, never for a step that is recorded. What they
decided is part of the record that follows them, so a decision is either whole on disk or made again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec import Struct

from perdure.model.agent import Budget
from perdure.model.effect import Boundary
from perdure.model.llm import ModelResponse, ModelSettings, Usage
from perdure.model.message import NO_METADATA, InputContent, Message, Metadata
from perdure.model.monitor import MonitorSpec
from perdure.model.outcome import Outcome
from perdure.model.plugin import CompactedHistory, Directive, Extension, PluginSnapshot, PromptPart, TriggerEvent
from perdure.model.record import InputKind
from perdure.model.tool import OutputBudget, ToolOutcome, ToolSpec
from perdure.ports.code import Executor
from perdure.ports.process import Engine
from perdure.ports.protocol import TurnProtocol
from perdure.ports.services import HistoryHost, PromptHost, ResultHost, StreamEnd, ToolHost, TurnHost

T = TypeVar("T")

Maybe: TypeAlias = T | Awaitable[T]
"""What a hook returns: at once, or when awaited."""

Directives: TypeAlias = Directive | Iterable[Directive] | None

DEFAULT_LIMIT = 30.0


# ---------------------------------------------------------------------- what hooks are told


class SessionContext(Struct, frozen=True):
    """The session an instance is made for. `options` are this plugin's own, as given when the session was opened.

    `parent` is set for a child session, and `depth` counts the parents above it. `hidden` are tools it may not see,
    whatever anybody enables. `extensions` are what plugins of the agent add to each other, by what they add to.
    """

    session_id: str
    agent: str
    options: Any = None
    parent: str | None = None
    hidden: frozenset[str] = frozenset()
    depth: int = 0
    metadata: Metadata = NO_METADATA
    extensions: Mapping[str, tuple[Extension, ...]] = {}


class SessionConfig(Struct, frozen=True):
    """How the turns of a session run: what its agent says, with what was decided for the session over it.

    `model` is its name; a plugin may give that of another one, which the Runtime has or whose provider it knows. What
    an input asks for itself, `run(model=…, settings=…)`, goes over all this. In what a plugin returns, "" and None
    leave a value as it was.
    """

    instructions: str = ""
    budget: Budget = Budget()
    model: str = ""
    settings: ModelSettings | None = None
    output_budget: OutputBudget | None = None


class MetadataContext(Struct, frozen=True, kw_only=True):
    """`metadata` says whom something is done for: that of the session and of the input, when the turn was opened."""

    metadata: Metadata = NO_METADATA


InputSource: TypeAlias = InputKind | Literal["answer"]


class InputContext(MetadataContext, frozen=True):
    """Something is about to be said to a session from outside; nothing of it is stored yet.

    `kind` says what: an input that begins a turn ("queue"), one for the running turn ("steer"), or the reason that a
    person gives with an answer ("answer"). `metadata` is that of the session with that of the input over it.
    """

    session_id: str
    agent: str
    kind: InputSource


class HookContext(MetadataContext, frozen=True):
    """What every hook of a turn knows. `deps` are the host's live objects."""

    session_id: str
    turn_id: str
    agent: str
    deps: Any


class PromptContext(HookContext, frozen=True):
    """A model call is about to be made. `tools` are those it will be shown."""

    host: PromptHost
    step: int
    tools: Sequence[ToolSpec]


class ViewContext(HookContext, frozen=True):
    """The same, for what is shown of the past. `history` counts the messages that come from before this turn."""

    host: PromptHost
    step: int
    history: int


class CompactContext(HookContext, frozen=True):
    """A turn begins. `messages` is what a model would be shown of the session before it.

    `overflow`: the model has refused it as too long, whatever it was estimated at. What is left must be shorter.
    """

    host: HistoryHost
    messages: Sequence[Message]
    overflow: bool = False


class TurnContext(HookContext, frozen=True):
    """A turn begins with `said`."""

    host: TurnHost
    said: Message
    history: Sequence[Message]


class CheckpointContext(HookContext, frozen=True):
    """A safe boundary: after a round of tools, or before the turn completes."""

    host: ResultHost
    boundary: Boundary
    messages: Sequence[Message]


class TurnEndContext(HookContext, frozen=True):
    """The turn has ended and is not committed yet; for `turn_persisted`, it is."""

    host: ResultHost
    outcome: Outcome
    messages: Sequence[Message]
    usage: Usage


class ToolCallContext(HookContext, frozen=True):
    """A call is about to be prepared. `inspecting`: these arguments replace others that this plugin let pass."""

    host: ToolHost
    call_id: str
    tool: ToolSpec
    args: dict[str, Any]
    inspecting: bool = False


class ToolEndContext(HookContext, frozen=True):
    """A call has ended. `outcome` is what the plugins before have left of it; `inspecting` is never set here.

    `late`: it is the result of a process, which comes in no turn: `call_id` is its id. Of a process that is no tool,
    `tool` has the name and an id that begins with `process:`, and `args` is empty. Perhaps nobody was asked before it
    began.
    """

    host: ToolHost
    call_id: str
    tool: ToolSpec
    args: dict[str, Any]
    outcome: ToolOutcome
    inspecting: bool = False
    late: bool = False


FilterKind: TypeAlias = Literal["progress", "artifact", "file", "projection", "wake", "answer", "issue"]


class FilterContext(HookContext, frozen=True):
    """A value is about to be stored or shown beside the outcome of a call. `turn_id` is "" where there is no turn.

    `kind` says which: what a tool tells of its progress (JSON); an artifact, or a file that a tool returns (text, or
    bytes that are no UTF-8), with its `name` and `media_type`; what a projector made of a result (JSON); the text of a
    wake; what a person gave as the reason of an answer, or said about a call that was over (text); an issue.
    """

    kind: FilterKind
    call_id: str = ""
    tool: str = ""
    name: str = ""
    media_type: str = ""


class StreamContext(HookContext, frozen=True):
    """Text is streamed. `final`: nothing more comes, give out what was held back."""

    step: int
    final: bool = False


class StopStream(Struct, frozen=True):
    """Returned by a stream transform: stop the model here; the turn goes on with the text so far and `text`."""

    text: str = ""
    reason: str = ""


class CatalogContext(MetadataContext, frozen=True):
    """The tools a session could be shown. `metadata` is that of the session, without its inputs'."""

    session_id: str
    agent: str
    tools: Sequence[ToolSpec]


class SnapshotWriter:
    """Takes the named bytes of a snapshot."""

    __slots__ = ("blobs",)

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self.blobs[name] = bytes(data)


class SnapshotReader:
    """Gives the named bytes of a snapshot back; None where there are none."""

    __slots__ = ("_blobs",)

    def __init__(self, blobs: dict[str, bytes] | None = None) -> None:
        self._blobs = blobs or {}

    def get(self, name: str) -> bytes | None:
        return self._blobs.get(name)


# ---------------------------------------------------------------------- the plugin


class Plugin:
    """Adds tools, prompts, hooks, operations and remembered state to every session of an agent.

    One object is shared by all sessions. A plugin that keeps something per session overrides `for_session` and returns
    a new object of its own class. `id` names it in records and errors, `version` goes into its snapshots. `priority`
    orders `transform_view` and `compact`, higher first; all other hooks run in the order of `Agent(plugins=[…])`.
    A `required` plugin whose snapshot cannot be read stops turns; any other one is left out until it can.
    A filter (`is_filter`) has the last word about what is stored and shown: its `after_tool_call`, `transform_text` and
    `transform_response` run after those of all other plugins, wherever it stands, and it is always `required`.
    A method whose name is nearly a hook's is refused with the agent, unless it begins with `_` or is in `not_hooks`.
    """

    id: str = ""
    version: str = "1"
    priority: int = 0
    required: bool = False
    is_filter: bool = False
    not_hooks: tuple[str, ...] = ()
    time_limit: float = DEFAULT_LIMIT

    # ------------------------------------------------------------------ a session opens

    def for_session(self, ctx: SessionContext) -> Plugin:
        """The instance for one session; called when it is opened, and again after a restart. Keep it cheap.

        Raise ValueError for options that make no sense: the session is refused with your words.
        """
        return self

    def session_ready(self, ctx: SessionContext) -> Maybe[None]:
        """The instance is complete and not yet restored. An exception refuses the session."""

    def configure(self, ctx: SessionContext, config: SessionConfig) -> Maybe[SessionConfig]:
        """Change how the session runs; later plugins see the change. An exception keeps the config and is reported.

        Called when the session is opened, and before the first turn after anything has changed that it was made from:
        the agent's definition, `session.configure`, `session.update`, options, tools that were switched. `config` is
        always the whole of it, without what plugins made of it before.
        """
        return config

    # ------------------------------------------------------------------ something is said

    def transform_input(self, ctx: InputContext, message: Message) -> Maybe[InputContent]:
        """Change what is said to the agent from outside, before anything of it is stored; return text or a message.

        The next plugin gets what this one returned, and what the last one returns is stored. Called on the object that
        the agent was given, not on a session's instance, by whatever Runtime takes the input in: a Runtime without the
        agent needs the plugin in `input_filters`. An exception refuses the input; of its text nothing is logged or
        told, unless it is an InvalidInput, which the caller gets as it is.
        """
        return message

    # ------------------------------------------------------------------ what it adds

    def tools(self) -> Iterable[Any]:
        """Tools of the plugin: decorated functions, bound methods, providers."""
        return ()

    def hidden_tools(self, ctx: CatalogContext) -> Iterable[str]:
        """Names of tools to take away from this session. An exception refuses the turn."""
        return ()

    def monitors(self, ctx: SessionContext) -> Iterable[MonitorSpec]:
        """Monitors that the plugin offers to a session, each under the id `plugin:id`.

        Asked when the session is opened or has changed. One with arm_on="session_start" starts with the next turn if
        the session has never had it; others are started by a tool, a plugin or the host. A change to one that runs
        counts from its next start. An exception refuses the session.
        """
        return ()

    def extensions(self) -> Mapping[str, Any]:
        """What it adds to other plugins: JSON, by an id that the plugin which reads it has documented.

        Asked once, with the agent. Every plugin sees what all have added, in their order, as `ctx.extensions` of a
        SessionContext.
        """
        return {}

    def trigger_events(self) -> Iterable[TriggerEvent]:
        """Events that the plugin's sources will report; listed for subscribers."""
        return ()

    def engines(self) -> Iterable[Engine]:
        """Engines for kinds of durable processes. Asked once by every Runtime; a kind has one engine."""
        return ()

    def shutdown(self) -> Maybe[None]:
        """A Runtime ends that had this plugin, after its turns and processes: close what the plugin holds open.

        Called on the object in `Agent(plugins=[…])`, once by every Runtime; not when the process dies. The object may
        be used by another Runtime, now or later: open things when they are first needed. An exception is logged.
        """

    def prompt(self, ctx: PromptContext) -> Maybe[Iterable[PromptPart | str]]:
        """Pieces of system prompt for the next model call. An exception ends the turn as aborted by the plugin."""
        return ()

    def transform_view(self, ctx: ViewContext, messages: Sequence[Message]) -> Maybe[Sequence[Message]]:
        """Change what the next model call is shown; what is stored stays. An exception ends the turn."""
        return messages

    def compact(self, ctx: CompactContext) -> Maybe[CompactedHistory | None]:
        """Begin a new frame before the turn's first model call, or None. The first answer wins.

        Called again, once in a turn, when the model refuses the conversation as too long (`ctx.overflow`): the model is
        asked again with the new frame, and without one the turn ends. An exception ends the turn.
        """
        return None

    # ------------------------------------------------------------------ a turn

    def before_turn(self, ctx: TurnContext) -> Maybe[Directives]:
        """Before anything else. May abort, enqueue messages, create sessions, emit. An exception ends the turn."""

    def at_checkpoint(self, ctx: CheckpointContext) -> Maybe[Directives]:
        """After a round of tools and before completion; messages then lead to another model call.

        May abort, enqueue messages, create sessions, emit. An exception ends the turn.
        """

    def after_turn(self, ctx: TurnEndContext) -> Maybe[Directives]:
        """The turn has its outcome and is not committed. May enqueue messages, create sessions, emit.

        An exception turns the outcome into PluginAborted; what was said stays in the history.
        """

    def turn_finalized(self, ctx: TurnEndContext) -> Maybe[None]:
        """Told with all others at once, before the commit. An exception becomes an issue of the turn."""

    def turn_persisted(self, ctx: TurnEndContext) -> Maybe[None]:
        """Told after the commit; not again if the process dies first. An exception becomes an issue of the result."""

    def session_restored(self, ctx: SessionContext) -> Maybe[None]:
        """The session was loaded from disk and its snapshots are restored. An exception becomes an issue."""

    def session_config_changed(self, ctx: SessionContext, before: SessionConfig, after: SessionConfig) -> Maybe[None]:
        """The session runs differently from the turn before. An exception becomes an issue."""

    # ------------------------------------------------------------------ the model's answer

    def transform_text(self, ctx: StreamContext, text: str) -> str | StopStream:
        """Change a piece of streamed text before anybody sees it; what is recorded is what was shown.

        Plain only: it is called for every piece. The next plugin gets what this one returned. StopStream ends the model
        call. An exception ends the turn.
        """
        return text

    def transform_response(self, ctx: StreamContext, response: ModelResponse) -> Maybe[ModelResponse]:
        """Change a whole answer before it is recorded. An exception ends the turn."""
        return response

    def stream_finished(self, ctx: StreamContext, reason: StreamEnd) -> Maybe[None]:
        """A model call is over. An exception ends the turn."""

    # ------------------------------------------------------------------ a tool call

    def before_tool_call(self, ctx: ToolCallContext) -> Maybe[Directives]:
        """Before a call's arguments are checked. May abort, short-circuit, ask a person, replace arguments and emit.

        Runs before the call is recorded as started, and not again once it is. An exception denies the call.
        """

    def after_tool_call(self, ctx: ToolEndContext) -> Maybe[Directives]:
        """A body has ended and its outcome is not recorded yet. May abort, replace the outcome, enqueue, create, emit.

        A chain: each plugin sees what the one before it left, filters last. A replacement never makes a success of an
        outcome that is none.

        Also told, as `late`, of what comes after its turn: how a background tool ended, before that is recorded, and
        what any other process tells the session, before it does. No turn can be aborted or added to then.
        An exception withholds the result from the model.
        """

    def filter_value(self, ctx: FilterContext, value: Any) -> Any:
        """What is stored and shown of a value beside the outcomes of calls: `ctx.kind` says which.

        Plain only. Return it as it is, or another of the same type; None withholds an artifact or a file. An exception
        withholds the value.
        """
        return value

    # ------------------------------------------------------------------ exclusive slots: one plugin each
    # Without an owner the runtime does this itself, so there is no default to fall back on: these, and `snapshot`
    # below, are called only where they are overridden.

    def project_result(self, ctx: ToolEndContext) -> Any:
        """What the model sees of a result, as JSON; the whole of it is kept. May be async.

        An exception withholds the result from the model; the turn goes on, and reports it.
        """
        raise NotImplementedError

    def project_prose(self, ctx: StreamContext, text: str) -> str:
        """What people see of an assistant's text in `session.history()`. An exception withholds that text."""
        raise NotImplementedError

    def protocol(self) -> TurnProtocol:
        """How turns talk with their model, in place of native tool calls. Called for each session when it is opened.

        What it raises, here or later, ends the turn as `PluginAborted`.
        """
        raise NotImplementedError

    def code_executor(self) -> Executor:
        """What runs the cells of an agent in code mode. Called once for each Runtime, which closes it."""
        raise NotImplementedError

    # ------------------------------------------------------------------ state

    @property
    def revision(self) -> int:
        """Grows whenever what `snapshot` would give has changed. Asked at every record: keep it a plain counter."""
        return 0

    def snapshot(self, writer: SnapshotWriter) -> Any:
        """The state as JSON; large bytes go to the writer by name. Called only when `revision` has moved."""
        raise NotImplementedError

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        """Take a state back. `state` is None when nothing was saved yet. Raise when it cannot be read."""


HOOKS = tuple(name for name in vars(Plugin) if not name.startswith("_") and name not in Plugin.__annotations__)
"""The names of all hooks."""

EXCLUSIVE = ("project_result", "project_prose", "protocol", "code_executor")
"""Hooks that one plugin of an agent may have: a second owner is refused."""
