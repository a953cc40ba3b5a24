"""What a running tool can see and do: its identity, live objects, progress, artifacts, deferral, processes."""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast, overload

from perdure.errors import ToolError, quoted
from perdure.model.command import CommandOptions, CommandResult
from perdure.model.message import NO_METADATA, Metadata
from perdure.model.process import ParentEnd, WakePolicy
from perdure.model.tool import Artifact, PreparedCall, ToolSpec
from perdure.ports.services import ToolHost
from perdure.ports.tool import CommandHandle, Handle, Handles, StartOptions, WaitEnd
from perdure.tools.artifacts import Artifacts, ArtifactStore, MemoryArtifacts, must_be_awaited

if TYPE_CHECKING:
    # Type checkers know it on every Python: a context whose deps are not used needs no argument.
    from typing_extensions import TypeVar as DefaultTypeVar

    Deps = DefaultTypeVar("Deps", default=Any)
else:
    Deps = TypeVar("Deps")

MAX_DEFER = 10 * 366 * 86_400
"""Seconds: what is longer than ten years is a mistake."""


class CallHost:
    """What a context asks of the driver that attempts its call. Drivers say what they have in place of these answers,
    which are those of a context that belongs to no session, as tests of tools make them."""

    __slots__ = ()

    def progress(self, value: Any) -> None:
        """Show how far the call is; from any thread."""

    def completion_key(self) -> str | None:
        """The signed key of a deferred call; None where the tool does not declare that it defers."""
        return None

    def artifact_store(self) -> ArtifactStore:
        return MemoryArtifacts()

    def store_location(self) -> str | None:
        """The file of the store, where it is one: what handles paths keeps away from it."""
        return None

    def services(self) -> ToolHost:
        raise ToolError("host services are unavailable here: they belong to the call of a session")

    def handles(self) -> Handles:
        raise ToolError("processes are unavailable here: they belong to the call of a session")

    async def prepare(self, ctx: ToolContext[Any], name: str, args: Mapping[str, Any]) -> tuple[PreparedCall, ToolSpec]:
        """Another tool of the catalogue, prepared as if the model had asked for it in this call."""
        raise ToolError(f"{ctx.tool} starts tools from the conversation, not from a tool in the background")


_NO_HOST = CallHost()


class ToolContext(Generic[Deps]):
    """Given to a tool that has a parameter of this type; never shown to the model.

    `idempotency_key` is the same for every attempt of one call, also after a crash, independent of the arguments, and
    no other call's in any store: pass it to whatever you call, so that a repeated attempt can be recognised there.
    `metadata` says whom the call is for: that of the session and of the input, as they held when the turn was opened.
    """

    __slots__ = (
        "_artifacts",
        "_cancelled",
        "_handles",
        "_host",
        "_over",
        "_services",
        "_store",
        "attempt",
        "call_id",
        "defer_timeout",
        "deferred",
        "deps",
        "generation",
        "metadata",
        "payload",
        "session_id",
        "tool",
        "turn_id",
    )

    def __init__(  # noqa: PLR0913  # what is known of one attempt, each by name
        self,
        *,
        session_id: str = "",
        turn_id: str = "",
        call_id: str = "",
        tool: str = "",
        attempt: int = 1,
        generation: int = 1,
        deps: Deps | None = None,
        payload: Any = None,
        host: CallHost = _NO_HOST,
        store: str = "",
        metadata: Metadata = NO_METADATA,
    ) -> None:
        self.session_id, self.turn_id, self.call_id, self.tool = session_id, turn_id, call_id, tool
        self.attempt, self.generation, self.payload = attempt, generation, payload
        self.metadata = metadata
        # A tool that asks for deps is given them by its host; one that does not never looks.
        self.deps = cast(Deps, deps)
        self._host, self._store = host, store
        self._artifacts: Artifacts | None = None
        self._services: ToolHost | None = None
        self._handles: Handles | None = None
        self.deferred = self._over = False
        self.defer_timeout: float | None = None
        # Made when it is needed: most calls are never cancelled, and a lock costs as much as all of the above.
        self._cancelled: threading.Event | None = None

    @property
    def idempotency_key(self) -> str:
        # Without a store: a call of a test, or one that an earlier version started. It keeps the key it had then.
        return f"{self._store}.{self.call_id}" if self._store else self.call_id

    @property
    def cancelled(self) -> bool:
        """Whether the turn was cancelled or the call timed out. A tool on a thread looks here between its steps."""
        return self._cancelled is not None and self._cancelled.is_set()

    def mark_cancelled(self) -> None:
        """The runtime's side of `cancelled`."""
        if self._cancelled is None:
            self._cancelled = threading.Event()
        self._cancelled.set()

    @property
    def host(self) -> ToolHost:
        """What a tool may ask of its session and its Runtime; for async tools."""
        if self._services is None:  # one for the whole attempt: it tells what is asked twice from what is asked again
            self._services = self._host.services()
        return self._services

    @property
    def store_location(self) -> str | None:
        """The file of the store, where it is one. A tool that is given paths by a model keeps away from it and from all
        that is beside it under its name."""
        return self._host.store_location()

    @property
    def handles(self) -> Handles:
        """What the tools for processes do; others use `start`."""
        if self._handles is None:  # one for the whole attempt: it counts what is started
            self._handles = self._host.handles()
        return self._handles

    def prepare(self, name: str, args: Mapping[str, Any]) -> Coroutine[Any, Any, tuple[PreparedCall, ToolSpec]]:
        """For tools that start other tools: one of the catalogue, prepared as if the model had asked for it here."""
        return self._host.prepare(self, name, args)

    def start(  # noqa: PLR0913  # what may be said about a start, each by name
        self,
        what: Any,
        args: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        label: str = "",
        wake: WakePolicy = "none",
        grant: bool = True,
        parent_end: ParentEnd = "abandon",
    ) -> Coroutine[Any, Any, Handle]:
        """Start a process (a durable function, a tool, an agent) and get its handle; await it. It never waits for it.

        Its id derives from this call and `key`, or its number among the starts of the call: an attempt that is made
        again starts the same process. The session may see it unless `grant` is False; then it is this run's alone.
        `wake` says how the session hears of its end: "turn", "notify" or "none". With `parent_end="cancel"` it is asked
        to stop when the turn, or the process, that this tool runs in has ended.
        """
        must_be_awaited("a start", self.tool, "start_needs_async")
        return self.handles.start(what, args or {}, StartOptions(key, label, wake, grant, parent_end))

    @overload
    def command(
        self, argv: Sequence[str], *, background_after: None = None, **options: Unpack[CommandOptions]
    ) -> Coroutine[Any, Any, CommandHandle]: ...
    @overload
    def command(
        self, argv: Sequence[str], *, background_after: float, **options: Unpack[CommandOptions]
    ) -> Coroutine[Any, Any, CommandHandle | CommandResult]: ...
    def command(
        self, argv: Sequence[str], *, background_after: float | None = None, **options: Unpack[CommandOptions]
    ) -> Coroutine[Any, Any, CommandHandle | CommandResult]:
        """Run a program and get its handle, once it runs; await it. `options` are those of `CommandOptions`.

        Its id derives from this call and `key`, or its number among the starts of the call: an attempt that is made
        again finds the same command, running or ended. It ends with the session, or with the turn or process that this
        tool runs in (`owner="turn"`), or with nothing ("detached"). With `background_after` the call waits for so many
        seconds: it gives the result of a command that has ended by then, and the handle of one that has not. The end of
        such a one, or of one with a `watch`, wakes the session unless `wake` says otherwise. Any other wakes it only if
        `wake` says so.
        """
        must_be_awaited("a command", self.tool, "start_needs_async")
        return self.handles.command(argv, options, background_after)

    def wait_ended(self, *handles: Any, timeout: float | None = None) -> Coroutine[Any, Any, WaitEnd]:
        """Wait until one of these processes or commands has ended; await it. For tools with `recovery="rerun"`.

        It gives "ended"; or "timeout" after so many seconds; or "input" where something was said to the session that
        its turn should hear of. While nothing but such waits is left of a turn, it is parked on disk: it holds no
        memory and no place, and goes on in any Runtime that has its agent. This tool then runs again from its first
        line, as the same attempt, and comes back from its earlier waits at once: what it starts through this context
        before the wait is found again, and whatever else it does there must bear to be done twice.
        """
        must_be_awaited("a wait for processes", self.tool, "wait_needs_async")
        return self.handles.wait_ended(handles, timeout)

    def progress(self, value: Any = None) -> None:
        """Show in the feed how far the call is. Live only: it is not stored and never reaches the model."""
        self._host.progress(value)

    @property
    def artifacts(self) -> Artifacts:
        """Bytes by name: `await ctx.artifacts.put(…)` for later tools and the host, `await ctx.artifacts.get(name)`."""
        if self._artifacts is None:
            self._artifacts = Artifacts(self._host.artifact_store(), self.tool, over=self._over)
        return self._artifacts

    def close(self) -> tuple[Artifact, ...]:
        """The runtime's side of `artifacts`: what the call has put, and from now on it may put no more."""
        self._over = True
        return () if self._artifacts is None else self._artifacts.taken()

    def defer(self, timeout: float | None = None) -> str:
        """The signed key under which this call will be completed later with `runtime.resolve(key, value)`.

        After this the tool's return value is ignored and the turn parks until the key is resolved, in whatever
        process. Only for tools declared with `deferred=True`: their key is durable before their body runs.
        """
        key = self._host.completion_key()
        if key is None:
            raise ToolError(
                f"tool {self.tool!r} may not defer: declare it with @tool(deferred=True)",
                code="tool_deferral_not_declared",
            )
        if timeout is not None and not (type(timeout) in (int, float) and 0 <= timeout < MAX_DEFER):
            raise ToolError(f"defer for 0 to {MAX_DEFER:,} seconds or without a limit, not {quoted(timeout)}")
        self.deferred, self.defer_timeout = True, timeout
        return key
