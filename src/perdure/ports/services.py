"""What is handed to those who do not hold a Runtime: where events go, the narrow services of plugins, and what plugins
do to a running turn.

A service is a small Protocol; a role (`TurnHost`, `ToolHost`, …) is the services that fit a seam. What a session cannot
do raises Unavailable with its own words; nothing is silently ignored. `session_id` None is the caller's own session.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from perdure.model.event import AnyEvent, LiveEvent
from perdure.model.llm import Completion, ModelResponse, ModelSettings
from perdure.model.message import Message
from perdure.model.monitor import MonitorSnapshot, MonitorSpec, MonitorStatus, MonitorUpdates
from perdure.model.plugin import CreateSession
from perdure.model.process import LiveState, ParentEnd, TaskEnd, TaskEvent, TaskKind, TaskRecord, TaskSpec, WakePolicy
from perdure.model.record import Slot
from perdure.model.session import Appending, SessionSnapshot, StaleBranch, ToolState
from perdure.model.tool import ToolSpec
from perdure.ports.provider import Provider
from perdure.ports.tool import Handle


class EventSink(Protocol):
    """Takes events of one turn. Must never wait and never raise: a reader's trouble is not the turn's."""

    def emit(self, kind: type[LiveEvent], /, **fields: Any) -> None: ...

    def text(self, step: int, text: str) -> None: ...


class TraceSink(Protocol):
    """Takes trace events, one JSON object each. Must never wait and never raise."""

    def write(self, name: str, payload: Mapping[str, Any]) -> None: ...


class Snapshots(Protocol):
    async def snapshot(self, session_id: str | None = None) -> SessionSnapshot:
        """What is committed of a session."""
        ...


class CatalogReads(Protocol):
    async def tool_catalog(self, session_id: str | None = None) -> Sequence[Mapping[str, Any]]:
        """The tools a session is shown, as JSON."""
        ...


class ToolStates(Protocol):
    async def tool_state(self, session_id: str | None = None) -> ToolState: ...

    async def apply_tool_state(self, state: ToolState, session_id: str | None = None) -> int:
        """Replace the state if `state.generation` is still the current one; returns the new generation."""
        ...

    async def set_tools(self, names: Sequence[str], member: bool | None, session_id: str | None = None) -> int:
        """Enable, disable, or (None) forget what was decided for these tools, in one edit."""
        ...


class Lifecycle(Protocol):
    async def create_session(self, request: CreateSession) -> str:
        """Begin a child session; returns its id. In a turn the same request from the same place is the same child."""
        ...

    async def close_session(self, session_id: str) -> None:
        """Forget what is in memory of a child; an error for the caller's own session, or while a turn runs.

        Tasks of the child go on, are cancelled or handed on to its parent, as they were begun (`TaskSpec.close`)."""
        ...


class StartedTurn(Protocol):
    """A turn of another session. It runs whether or not its events are read."""

    @property
    def turn_id(self) -> str: ...

    @property
    def events(self) -> AsyncIterator[AnyEvent]:
        """What it tells from its start on, until it commits or parks. Who reads too slowly finds a Gap."""
        ...


class TurnStarts(Protocol):
    async def start_turn_stream(self, session_id: str, said: str | Message, *, key: str) -> StartedTurn:
        """Start a turn of another session and return once that is durable; the same key is the same turn."""
        ...

    async def await_turn(self, turn_id: str) -> Any:
        """The result of a turn, once it ends or parks. Raises Conflict where a turn would wait for its own session."""
        ...

    async def start_turn(self, session_id: str, said: str | Message, *, key: str) -> Any:
        """Start a turn of another session and wait for its result."""
        ...

    async def cancel_turn(self, session_id: str, reason: str = "", *, turn_id: str | None = None) -> str:
        """Ask the running turn of a session to stop, or the given one, which may be queued still."""
        ...


class GraphAppends(Protocol):
    async def append(
        self, messages: Sequence[Message], *, after: str | None = None, session_id: str | None = None
    ) -> Appending | StaleBranch:
        """Add messages to a session's history: with the commit of its running turn, or at its next one.

        `after` is a turn that must be part of the history still.
        """
        ...


class Completions(Protocol):
    async def complete(  # noqa: PLR0913  # what a model may be asked with, each by name
        self,
        asked: str | Sequence[Message],
        *,
        label: str,
        output: Any = None,
        system: str = "",
        tools: Sequence[Any] = (),
        settings: ModelSettings | None = None,
        model: str | Provider | None = None,
    ) -> Completion:
        """Ask a model once, outside of the conversation: the session's, or the one that `model` names.

        `output` is None, "json" or a type. `tools` are ToolSpecs, or tools, that the model may call: calls are returned
        and not run. `settings` are all that it is asked with; those of the agent and the session are for turns.
        """
        ...

    async def count_tokens(
        self,
        asked: str | Sequence[Message],
        *,
        system: str = "",
        tools: Sequence[Any] = (),
        model: str | Provider | None = None,
    ) -> int:
        """How many tokens a model would be asked with, by its provider's own count. Recorded nowhere.

        ProviderError with the code "no_token_count" where its API has none.
        """
        ...


class Traces(Protocol):
    def trace(self, name: str, payload: Any = None, context: Mapping[str, Any] | None = None) -> None: ...


# ---------------------------------------------------------------------- tasks

# Background work of a session, for plugins and tools: a thin layer over processes.
#
#     hidden        not listed; `await_hidden_tasks` waits for all of them
#     managed       runs here under a name, is listed, can be cancelled
#     registered    runs outside of this Runtime, and its caller reports how it ended
#
# A hidden or managed task is code in memory: it does not outlive its Runtime, and is then read as abandoned. What must
# survive is a durable function: `start_process`. `session_id` None is the caller's own session.

Work: TypeAlias = Callable[[], Awaitable[Any]]
"""What a task does: called once, where it was spawned."""
CancelHook: TypeAlias = Callable[[], Awaitable[None] | None]


class TaskReads(Protocol):
    async def list_background_tasks(
        self, *, kind: TaskKind | None = None, include_ended: bool = False, session_id: str | None = None
    ) -> Sequence[TaskRecord]:
        """Everything that the session may see, as tasks, the oldest first."""
        ...

    async def validate_handles_visible(self, handles: Sequence[Any], *, session_id: str | None = None) -> None:
        """Raises ProcessNotVisible for the first that the session may not see."""
        ...


class Tasks(TaskReads, Protocol):
    async def inject_turn_input(
        self, said: str | Message, *, session_id: str | None = None, key: str | None = None
    ) -> str:
        """Say something to the running turn at its next boundary, or with the next turn; returns the input's id.

        The same `key` with the same content is the same input, from whatever part of the session it comes.
        """
        ...

    async def start_process(
        self,
        what: Any,
        args: Mapping[str, Any] | None = None,
        *,
        key: str,
        label: str = "",
        wake: WakePolicy = "none",
        parent_end: ParentEnd = "abandon",
    ) -> Handle:
        """Begin a durable process for the caller's session. In a turn, the same key from the same place is the same.

        With parent_end="cancel" it is asked to stop when the turn that started it has ended.
        """
        ...

    async def spawn_hidden_task(self, label: str, work: Work, *, session_id: str | None = None) -> Handle: ...

    async def await_hidden_tasks(self, *, session_id: str | None = None) -> None:
        """Wait until no hidden task is left, also of those that they spawn; raises the first failure."""
        ...

    async def spawn_managed_task(self, task: TaskSpec, work: Work, *, session_id: str | None = None) -> Handle: ...

    async def cancel_managed_task(
        self, task_id: str, reason: str = "", *, session_id: str | None = None
    ) -> TaskRecord: ...

    async def register_background_task(
        self, task: TaskSpec, cancel: CancelHook | None = None, *, session_id: str | None = None
    ) -> Handle:
        """List work that is done elsewhere. `cancel` is called once when it is to stop; then it is cancelled."""
        ...

    async def unregister_background_task(self, task_id: str, *, session_id: str | None = None) -> None:
        """List it no longer. Its end will not be reported."""
        ...

    async def complete_background_task(
        self, task_id: str, state: TaskEnd, value: Any = None, *, error: str = "", session_id: str | None = None
    ) -> None:
        """Say how a registered task ended. What has ended stays as it is."""
        ...

    async def transition_live_state(self, task_id: str, state: LiveState, *, session_id: str | None = None) -> None:
        """Say that a task works, or waits for something. What has ended stays as it is."""
        ...

    def task_events(
        self, *, kind: TaskKind | None = None, include_ended: bool = True, session_id: str | None = None
    ) -> AsyncIterator[TaskEvent]:
        """What happens from now on to the tasks that the session may see, until it is deleted; without `include_ended`,
        no ends. Who reads too slowly misses some."""
        ...

    async def cancel_background_task(
        self, task_id: str, reason: str = "", *, session_id: str | None = None
    ) -> TaskRecord: ...

    async def cancel_all_background_tasks(
        self, reason: str = "", *, session_id: str | None = None
    ) -> Sequence[TaskRecord]:
        """Cancel what is live, in order. The first that cannot be cancelled ends it, and is raised."""
        ...

    async def transfer_handles(self, target: str, handles: Sequence[Any], *, session_id: str | None = None) -> int:
        """Hand processes on to another session, with their names and their wakes. Returns how many."""
        ...

    async def cancel_unreferenced_handles(
        self, keep: Sequence[Any], reason: str = "", *, session_id: str | None = None
    ) -> Sequence[TaskRecord]:
        """Cancel every live process of the session that is not among `keep`."""
        ...


# ---------------------------------------------------------------------- monitors

# Commands whose lines a session is told. They outlive the Runtime, and end with their session. Where no command can run
# (not on Linux, a store without folders), starting one raises CommandsUnavailable; reading works everywhere.


class MonitorReads(Protocol):
    async def monitor_snapshot(self, *, session_id: str | None = None) -> MonitorSnapshot:
        """The monitors of a session as they are, also those that plugins offer and that were not started."""
        ...

    async def take_monitor_updates(self, after: int = 0, *, session_id: str | None = None) -> MonitorUpdates:
        """What its monitors told after revision `after`, the oldest 128 updates of that.

        The caller keeps the revision that it got, in its snapshot or its result: so none is lost to a crash.
        """
        ...


class Monitors(MonitorReads, Protocol):
    async def start_monitor(self, spec: MonitorSpec | str, *, session_id: str | None = None) -> MonitorStatus:
        """Start a monitor, or one that a plugin offers, by its id `plugin:id`.

        The same spec while it lives is the same monitor, and in a call that runs again after a crash also later.
        """
        ...

    async def stop_monitor(self, monitor_id: str, reason: str = "", *, session_id: str | None = None) -> MonitorStatus:
        """Ask a monitor to stop, with everything that its command began. What has ended stays as it is."""
        ...


# ---------------------------------------------------------------------- roles


class PromptHost(Snapshots, CatalogReads, Completions, Tasks, Protocol):
    """For prompts and views."""


class TurnHost(Snapshots, ToolStates, Lifecycle, Traces, Protocol):
    """For `before_turn`."""


class ResultHost(Lifecycle, Traces, Protocol):
    """For checkpoints and the end of a turn."""


class HistoryHost(Snapshots, Lifecycle, TurnStarts, GraphAppends, Completions, Tasks, Protocol):
    """For compactors."""


class ToolHost(
    Snapshots,
    CatalogReads,
    ToolStates,
    Lifecycle,
    TurnStarts,
    GraphAppends,
    Completions,
    Traces,
    Tasks,
    Monitors,
    Protocol,
):
    """For tool hooks and operations: everything there is."""


class TurnServices(ToolHost, Protocol):
    """What a running turn itself needs of its session on behalf of plugins."""

    @property
    def deps(self) -> Any: ...

    @property
    def probe(self) -> Callable[[str, str], None] | None:
        """Called at the begin and the end of a hook, where there is a trace."""
        ...

    async def frame(self, reason: str, summary: tuple[Message, ...]) -> None:
        """Begin a new frame before this turn."""
        ...

    def for_call(self, call_id: str) -> ToolHost:
        """The same for a tool: what it asks of models is part of its attempt, and only counted."""
        ...

    def at(self, place: str) -> ToolHost:
        """The same for hooks that run beside others: what they ask for is told apart by its place."""
        ...

    def outside(self) -> TurnServices:
        """The same once the turn is committed: nothing that is asked for now can be a part of it."""
        ...

    async def create_child(self, request: CreateSession, place: str) -> str:
        """The child session that was asked for at `place` of this turn: made once, however often it is asked for."""
        ...


# ---------------------------------------------------------------------- hooks, as the engine calls them

# A turn whose plugins do nothing has none of this.

StreamEnd: TypeAlias = Literal["complete", "attempt_reset", "aborted", "cancelled", "provider_error"]


class TextStream(Protocol):
    """The text of one model call on its way to observers. `stopped`: a plugin has seen enough."""

    @property
    def stopped(self) -> bool: ...

    def feed(self, text: str) -> str:
        """A piece as it is shown."""
        ...

    def finish(self, response: ModelResponse | None) -> str:
        """What was held back until now; all of it, when the text came with the whole answer only."""
        ...

    def shown(self, response: ModelResponse | None) -> ModelResponse:
        """The answer with the text that was shown."""
        ...


class TurnHooks(Protocol):
    """Raises TurnAborted where a plugin ends the turn, or one that it cannot do without has failed."""

    at_boundaries: bool
    in_model_calls: bool
    at_end: bool
    after_commit: bool
    """Whether a plugin has a hook for these moments of a turn: otherwise nothing but `slot` is called there."""

    remembers: bool
    """Whether records of this turn may hold state of plugins, or which tools they have switched."""

    def may_shrink(self) -> bool:
        """Whether a plugin could make the conversation before this turn shorter."""
        ...

    def give(self, deps: Any) -> None:
        """The live objects of this run are made: hooks see them from here on."""
        ...

    async def shrink(self) -> bool:
        """Make it shorter, because the model refuses it as too long; False when that cannot be done."""
        ...

    async def shape(
        self, step: int, tools: Sequence[ToolSpec], instructions: str, messages: list[Message]
    ) -> tuple[str, list[Message]]:
        """The instructions with what plugins add, and the messages as they want them shown."""
        ...

    def stream(self, step: int) -> TextStream | None:
        """How text is shown; None when no plugin changes it."""
        ...

    async def respond(self, response: ModelResponse, step: int) -> ModelResponse: ...

    async def stream_finished(self, step: int, reason: StreamEnd) -> None: ...

    def slot(self, slot: Slot | None) -> Slot | None:
        """What the next record carries, with the state of plugins that has changed."""
        ...
