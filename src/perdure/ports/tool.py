"""What a set of tools must offer, and what one call may do with processes.

A decorated function is the usual tool; a provider is a whole set.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from perdure.model.command import READ_BYTES, CommandOptions, CommandOwner, CommandResult, Output, Stream
from perdure.model.edit import FileRestore, UndoneFile
from perdure.model.process import AwaitOutput, ParentEnd, ProcessRow, WakePolicy
from perdure.model.secrets import Marks
from perdure.model.tool import PreparedCall, ToolOutcome, ToolRecord, ToolSpec


class CallContext(Protocol):
    """What preparation and execution may know of their call; `perdure.ToolContext` is the whole of it."""

    @property
    def session_id(self) -> str: ...
    @property
    def turn_id(self) -> str: ...
    @property
    def call_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def idempotency_key(self) -> str: ...
    @property
    def deps(self) -> Any: ...


@runtime_checkable
class ToolProvider(Protocol):
    """A set of tools whose members may change between turns.

    `prepare` sees checked arguments and may rewrite them, attach a payload that `execute` gets back, end the call at
    once with an outcome, or say that a person must approve it first (`PreparedCall.ask`): once the person has, it is
    prepared again. It must not have effects: preparation may run again after a crash. What it puts into `ctx.artifacts`
    is kept once the call has started: the record of the start refers to it. `execute` does the work and returns any
    JSON value, or raises ToolError or Retry.
    """

    def specs(self) -> Sequence[ToolSpec]: ...

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall | ToolOutcome: ...

    async def execute(self, call: PreparedCall, ctx: CallContext) -> Any: ...


@runtime_checkable
class GathersTools(Protocol):
    """A set of tools that may still be finding out what it offers."""

    async def gather(self) -> None:
        """Wait until it knows, within a limit of its own; a turn that begins waits for it."""
        ...


@runtime_checkable
class EditsFiles(Protocol):
    """A set of tools that changes files, and can bring them back (`session.undo`)."""

    def covers(self, path: str) -> bool:
        """Whether it may change what is at this path."""
        ...

    async def restore(
        self, wanted: Sequence[FileRestore], earlier: Mapping[str, bytes], store: str | None
    ) -> list[UndoneFile]:
        """Bring files back to what they were, or none of them: UndoRefused where one is not as an edit left it.

        `earlier` is content by its digest; `store` is the file of the store, which is off limits.
        """
        ...


@runtime_checkable
class LoadsParsers(Protocol):
    """Tools that import or compile something large before their first call."""

    def load_parsers(self) -> None:
        """Load it. A Runtime calls this on a thread when it is entered, so that no call blocks the event loop."""
        ...


@runtime_checkable
class HidesSecrets(Protocol):
    """A set of tools whose arguments may hold secrets."""

    def shown_args(self, call: PreparedCall, marks: Marks) -> Mapping[str, Any]:
        """The arguments of a call as plugins, events and `perdure show` see them: with `marks.mark(secret)`, or
        `marks.hide(text)`, in the place of secrets. It is asked before `prepare`, too, and has no effect."""
        ...


class Handle(Protocol):
    """A process as its starter holds it; `perdure.ProcessHandle` is the whole of it."""

    @property
    def id(self) -> str: ...

    def to_json(self) -> dict[str, str]: ...

    async def result(self, timeout: float | None = None) -> Any: ...

    async def outcome(self, timeout: float | None = None) -> AwaitOutput: ...

    async def signal(self, name: str, payload: Any = None, *, key: str | None = None) -> int: ...

    async def cancel(self, reason: str = "", *, by: str = "host") -> str: ...

    async def status(self) -> str: ...


class CommandHandle(Handle, Protocol):
    """A command as the tool holds it that started it; `perdure.ProcessHandle` is the whole of it."""

    async def result(self, timeout: float | None = None) -> CommandResult: ...

    async def record(self) -> ProcessRow: ...

    def output(
        self, stream: Stream = "stdout", after: int = 0, *, follow: bool = False, limit: int = READ_BYTES
    ) -> Output: ...


class StartOptions(Struct, frozen=True, gc=False):
    """How a call starts a process: `key` tells it from others that the same call starts, and "" is the call itself."""

    key: str | None = None
    label: str = ""
    wake: WakePolicy = "none"
    grant: bool = True
    parent_end: ParentEnd = "abandon"
    owner: CommandOwner = "turn"
    """What it ends with, if `parent_end` is "cancel", or its session."""


WaitEnd: TypeAlias = Literal["ended", "timeout", "input"]
"""How a wait for processes ended: one of them has, the time was up, or something was said to the session."""


class Parking(Protocol):
    """A call that can be left where it waits, with its turn, and gone on with by any worker."""

    async def wait_ended(
        self, processes: tuple[str, ...], timeout: float | None, in_memory: Callable[[], Awaitable[None]]
    ) -> WaitEnd:
        """Wait for the first end of these processes. `in_memory` waits for it as long as the turn is there."""
        ...


class Handles(Protocol):
    """What one call may do with processes, on behalf of its session.

    `begin` is the call itself as a process; `known` is the handle of that, when it exists already. The verbs answer
    every question, also a malformed one, with the record of it.
    """

    async def known(self) -> dict[str, str] | None: ...

    async def begin(self, call: PreparedCall, spec: ToolSpec, label: str = "") -> dict[str, str]: ...

    async def start(self, what: Any, args: Mapping[str, Any], options: StartOptions) -> Handle: ...

    async def command(
        self, argv: Sequence[str], options: CommandOptions, background_after: float | None = None
    ) -> CommandHandle | CommandResult: ...

    async def command_of(self, process_id: str) -> CommandHandle:
        """A command that the session may see, by its id. Raises UnknownProcess where it may not, or is another kind."""
        ...

    async def await_process(self, handle: Any, timeout: float | None = None) -> ToolRecord: ...

    async def wait_ended(self, handles: Sequence[Any], timeout: float | None = None) -> WaitEnd: ...

    async def stop_own(self, processes: Sequence[str]) -> None: ...

    async def signal_process(self, handle: Any, signal_name: str, payload: Any = None) -> ToolRecord: ...

    async def cancel_process(self, handle: Any, reason: str = "") -> ToolRecord: ...

    async def list_processes(self, live: bool = True, limit: int = 50) -> list[dict[str, Any]]: ...
