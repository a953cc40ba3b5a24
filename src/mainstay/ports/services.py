"""What is handed to those who do not hold a Runtime: where events go, and the narrow services of plugins.

A service is a small Protocol; a role (`TurnHost`, `ToolHost`, …) is the services that fit a seam. What a session cannot
do raises Unavailable with its own words; nothing is silently ignored. `session_id` None is the session at hand.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from mainstay.model.event import AnyEvent, Event
from mainstay.model.llm import Completion, ModelSettings
from mainstay.model.message import Message
from mainstay.model.plugin import CreateSession
from mainstay.model.session import Appending, SessionSnapshot, StaleBranch, ToolState
from mainstay.ports.provider import Provider
from mainstay.ports.tasks import Tasks


class EventSink(Protocol):
    """Takes events of one turn. Must never wait and never raise: a reader's trouble is not the turn's."""

    def emit(self, kind: type[Event], /, **fields: Any) -> None: ...

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
        """Forget what is in memory of a child; an error for the session at hand, or while a turn runs."""
        ...


class StartedTurn(Protocol):
    """A turn of another session that runs, whether or not anybody listens."""

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
        """The result of a turn, once it ends or parks. A turn that would wait for its own session is told Conflict."""
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


class PromptHost(Snapshots, CatalogReads, Completions, Tasks, Protocol):
    """For prompts and views."""


class TurnHost(Snapshots, ToolStates, Lifecycle, Traces, Protocol):
    """For `before_turn`."""


class ResultHost(Lifecycle, Traces, Protocol):
    """For checkpoints and the end of a turn."""


class HistoryHost(Snapshots, Lifecycle, TurnStarts, GraphAppends, Completions, Tasks, Protocol):
    """For compactors."""


class ToolHost(
    Snapshots, CatalogReads, ToolStates, Lifecycle, TurnStarts, GraphAppends, Completions, Traces, Tasks, Protocol
):
    """For tool hooks and operations: everything there is."""


class TurnServices(ToolHost, Protocol):
    """What a running turn itself needs of its session on behalf of plugins."""

    @property
    def deps(self) -> Any: ...

    @property
    def probe(self) -> Callable[[str, str], None] | None:
        """Told of the begin and the end of a hook, where somebody traces."""
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
