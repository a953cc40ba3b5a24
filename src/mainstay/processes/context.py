"""What a durable function can do: every call here is recorded, and never done twice.

A call's key is its number within its branch, so the function must ask for the same things in the same order when it
runs again: what differs from run to run (time, chance, the outside) has to come through here.
"""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, overload
from uuid import UUID

from mainstay.model.process import ParentEnd, WakePolicy
from mainstay.processes.calls import Calls
from mainstay.processes.host import ChildOptions
from mainstay.processes.steps import Options
from mainstay.tools.context import Deps

if TYPE_CHECKING:
    from mainstay.processes.chance import Chance

T = TypeVar("T")
R = TypeVar("R")


class ProcessContext(Generic[Deps]):
    """Given to a durable function as its parameter of this type.

    Use it from the function itself, and from what runs in `gather`, `any` and `all`; a task of asyncio's own is
    refused, and so is a call from inside a step, or of an `asyncio.timeout`: calls have their own limits.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    # ------------------------------------------------------------------ who it is

    @property
    def process_id(self) -> str:
        return self._calls.process_id

    @property
    def session_id(self) -> str | None:
        """The session that asked for it, if one did."""
        return self._calls.session_id

    @property
    def attempt(self) -> int:
        """1, and one more for every worker that died on it."""
        return self._calls.attempt

    @property
    def deps(self) -> Deps:
        """Live objects of the host, never stored."""
        found: Deps = self._calls.deps
        return found

    # ------------------------------------------------------------------ doing

    @overload
    async def step(
        self,
        fn: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        name: str | None = None,
        recovery: Literal["once", "rerun"] | None = None,
        retries: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    async def step(
        self,
        fn: Callable[..., R],
        /,
        *args: Any,
        name: str | None = None,
        recovery: Literal["once", "rerun"] | None = None,
        retries: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> R: ...
    async def step(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        name: str | None = None,
        recovery: Literal["once", "rerun"] | None = None,
        retries: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Do something outside, once, and keep what it returned (as JSON). Sync functions run in a thread.

        A step that a crash cut off raises `OutcomeUnknown` here, unless `recovery="rerun"` says that doing it again is
        fine. `retries` more attempts are made when it raises. A tool brings its own recovery, retries and time limit.
        """
        return await self._calls.step(fn, args, kwargs, Options(name, recovery, retries, timeout))

    async def sleep(self, seconds: float) -> None:
        """Wait. A long sleep costs nothing: the process is on disk, and comes back when it is over."""
        await self._calls.sleep(seconds)

    @overload
    async def wait_signal(self, name: str, kind: type[T], /, *, timeout: float | None = None) -> T: ...
    @overload
    async def wait_signal(self, name: str, /, *, timeout: float | None = None) -> Any: ...
    async def wait_signal(self, name: str, kind: Any = None, /, *, timeout: float | None = None) -> Any:
        """The payload of the next signal of this name, also of one that came before. `kind` is what it becomes.

        Raises `TimedOut` when none came in time.
        """
        return await self._calls.wait_signal(name, kind, timeout)

    async def emit(self, event: str, payload: Any = None) -> None:
        """Add an event, declared with `@process(events=[…])`, to the process's own log."""
        await self._calls.emit(event, payload)

    def progress(self, value: Any) -> None:
        """Say how far it is. Kept with the next record; a later one replaces it."""
        self._calls.progress(value)

    # ------------------------------------------------------------------ others

    async def start(
        self,
        what: Any,
        args: Mapping[str, Any] | None = None,
        *,
        parent_end: ParentEnd = "cancel",
        label: str = "",
        wake: WakePolicy = "none",
    ) -> Child:
        """Start a process of its own: a durable function, a tool or an agent. Asked for twice, it is started once.

        `parent_end` says what becomes of it when this process ends first.
        """
        return Child(self._calls, await self._calls.start(what, args, ChildOptions(parent_end, label, wake)))

    async def result(self, process: Any, *, timeout: float | None = None) -> Any:
        """How another process ended, by its handle or id: its value, or `ProcessFailed`."""
        return await self._calls.result(process, timeout)

    # ------------------------------------------------------------------ branches

    async def gather(self, *branches: Coroutine[Any, Any, Any], return_exceptions: bool = False) -> list[Any]:
        """Run branches at once and wait for all of them: their results, in order. The first error is raised last."""
        return await self._calls.gather(branches, return_exceptions)

    async def any(self, *branches: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
        """Run branches at once: which one succeeded first, and its result. The others are dropped.

        A dropped branch is cut off at the call where it is, as by a cancel request. It may clean up; this waits for it.
        """
        return await self._calls.first_of(branches)

    async def all(self, *branches: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run branches at once: all results, in order. The first error drops the others, and is raised then."""
        return await self._calls.all_of(branches)

    # ------------------------------------------------------------------ what differs from run to run

    def now(self) -> datetime.datetime:
        """The time when this line was first reached."""
        return datetime.datetime.fromtimestamp(self._calls.now() / 1000, datetime.UTC)

    @property
    def random(self) -> Chance:
        """Chance that is this branch's own, and the same on every replay."""
        return self._calls.chance()

    def uuid(self) -> UUID:
        """An id that is the same on every replay."""
        return UUID(int=self._calls.chance().getrandbits(128), version=4)

    # ------------------------------------------------------------------ work that never ends

    @property
    def state(self) -> Any:
        """What the last checkpoint kept, a copy each time; None before the first."""
        return self._calls.state

    async def checkpoint(self, state: Any, *, restart: bool = False) -> None:
        """Keep `state` and forget what was recorded so far: after a crash the function begins again with it.

        Write a loop that never ends as one that goes on from `ctx.state`, with the checkpoint as the last call of a
        round: a replay begins with the first line, so the next call must be the one that the function begins with.
        Where that depends on the state, say `restart=True`: it begins again at once, and this does not return.
        """
        await self._calls.checkpoint(state, restart)

    async def continue_as_new(self, args: Mapping[str, Any] | None = None) -> NoReturn:
        """Begin again, as the same process, with other arguments and nothing to replay."""
        await self._calls.continue_as_new(args)


class Child:
    """A process that a durable function has started: its calls are the function's own."""

    def __init__(self, calls: Calls, process_id: str) -> None:
        self._calls, self.id = calls, process_id

    def __repr__(self) -> str:
        return f"<Child {self.id}>"

    def to_json(self) -> dict[str, str]:
        return {"__handle__": "process", "id": self.id}

    async def result(self, *, timeout: float | None = None) -> Any:
        """Its value, or `ProcessFailed`."""
        return await self._calls.result(self.id, timeout)

    async def signal(self, name: str, payload: Any = None) -> None:
        await self._calls.tell(self.id, name, payload)

    async def cancel(self, reason: str = "") -> None:
        """Ask it to end; `result` tells how it did."""
        await self._calls.stop(self.id, reason)
