"""`ProcessContext`: the calls of a durable function. Each is recorded, and never made twice.

A call's key is its number within its branch, so the function must make the same calls in the same order when it runs
again: what differs from run to run (time, randomness, the outside) has to come through here. How a call is answered
from the journal is in `calls`, how branches take turns in `scheduler`.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import hmac
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, Literal, NoReturn, ParamSpec, TypeAlias, TypeVar, Unpack, overload
from uuid import UUID

import msgspec
from msgspec.structs import replace

from perdure.errors import (
    Conflict,
    Diverged,
    InvalidCommand,
    InvalidInput,
    InvalidProcess,
    NotFound,
    TimedOut,
    UnknownProcess,
)
from perdure.lifecycle.process import PROGRESS, SIGNAL, check_args, check_signal, declared
from perdure.model.codec import clean, clean_text, decode, encode, encode_checked
from perdure.model.command import RESULT, CommandOptions, CommandResult
from perdure.model.message import Metadata
from perdure.model.process import (
    Event,
    Failure,
    NoLongerRetained,
    ParentEnd,
    ProcessRow,
    Success,
    WaitOn,
    WakePolicy,
)
from perdure.model.record import Done, Segment, StepKind
from perdure.model.retries import Retries
from perdure.model.session import CancelRequest
from perdure.ports.process import ChildOptions
from perdure.processes.command import owner_of, prepared
from perdure.processes.function.calls import (
    FIRST,
    Call,
    Calls,
    StepOptions,
    StepRun,
    answered,
    read_step,
    recorded,
)
from perdure.processes.function.replay import shape
from perdure.processes.function.scheduler import FunctionBranch, Group, Works
from perdure.processes.handle import ProcessCall, ProcessHandle, R_co, Startable, handle_id, read_start, value_of
from perdure.tools.check import check
from perdure.tools.context import Deps
from perdure.tools.define import Tool
from perdure.tools.revive import ValueCodec, revived, value_codec

T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")

P = ParamSpec("P")

BranchWork: TypeAlias = Coroutine[Any, Any, T]
"""A branch: what runs beside others."""
StepRecovery: TypeAlias = Literal["once", "rerun", "ask"]
"""What becomes of a step that a crash interrupted."""

MAX_SLEEP = 100 * 366 * 86_400
"""Seconds: what is longer than a hundred years is a mistake."""

DECIDES: dict[StepKind, Callable[[BaseException | None], bool]] = {
    "gather": lambda _: False,
    "all": lambda error: error is not None,
    "any": lambda error: error is None,
}
"""Whether the end of one branch makes all others needless."""


class BeginAnew(BaseException):
    """The function begins again, with this state, or with other arguments if there are any."""

    def __init__(self, state: Any = None, args: Mapping[str, Any] | None = None) -> None:
        self.state, self.new_args = state, args


class SeededRandom(random.Random):
    """The same on every replay: `ctx.random()` is a float, `ctx.random.choice(…)` works too."""

    def __call__(self) -> float:
        return self.random()


class ProcessContext(Generic[Deps]):
    """Given to a durable function as its parameter of this type.

    Use it from the function itself, and from what runs in `gather`, `any` and `all`; a task of asyncio's own is
    refused, and so is a call from inside a step, or of an `asyncio.timeout`: calls have their own limits.
    """

    def __init__(self, calls: Calls, check_args: Callable[[Mapping[str, Any]], object]) -> None:
        """One per run of the process. `check_args` refuses arguments that the function would not take."""
        self._calls, self._check_args = calls, check_args
        self._randoms: dict[str, SeededRandom] = {}

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
        return self._calls.row.attempts

    @property
    def metadata(self) -> Metadata:
        """Whom it is for: the metadata of the turn or process that asked for it. The same in every run."""
        return Metadata(self._calls.run.registration.metadata)

    @property
    def deps(self) -> Deps:
        """Live objects of the host, never stored."""
        found: Deps = self._calls.run.deps
        return found

    # ------------------------------------------------------------------ doing

    # With options, a checker sees the arguments of `call(…)` alone: a keyword of ours cannot stand between those of the
    # function. The forms that take both leave them, and the result, unchecked. A tool may have its context anywhere
    # among its parameters, so its arguments are not checked either.
    @overload
    async def step(
        self,
        what: Call[R],
        /,
        *,
        name: str | None = None,
        recovery: StepRecovery | None = None,
        retries: int | Retries | None = None,
        timeout: float | None = None,
    ) -> R: ...
    @overload
    async def step(self, tool: Tool[..., Awaitable[R]], /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    async def step(self, tool: Tool[..., R], /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    async def step(self, fn: Callable[..., Any], /, *args: Any, name: str | None, **kwargs: Any) -> Any: ...
    @overload
    async def step(
        self, fn: Callable[..., Any], /, *args: Any, recovery: StepRecovery | None, **kwargs: Any
    ) -> Any: ...
    @overload
    async def step(
        self, fn: Callable[..., Any], /, *args: Any, retries: int | Retries | None, **kwargs: Any
    ) -> Any: ...
    @overload
    async def step(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None, **kwargs: Any) -> Any: ...
    @overload
    async def step(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def step(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @recorded
    async def step(
        self,
        branch: FunctionBranch,
        fn: Callable[..., Any] | Call[Any],
        /,
        *args: Any,
        name: str | None = None,
        recovery: StepRecovery | None = None,
        retries: int | Retries | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Do something outside and record its result, so that it is not done again. Sync functions run in a thread.

        What it returns is stored as JSON and brought back by the annotation of the function, on the first run too; a
        type that cannot be is refused before anything runs, and without an annotation it is JSON.

        `recovery` says what happens to a step that a crash interrupted. "rerun", the default, does it again, counted.
        "once" never does, and raises `OutcomeUnknown` here. "ask" parks the process until a person has said what became
        of it (`handle.settle`). `retries` is the number of further attempts when it raises, or `Retries(…)`. A tool
        brings its own recovery, retries and time limit.
        """
        if isinstance(fn, Call):
            what, fn = fn, fn.fn
            if args or kwargs:
                raise InvalidInput(f"{what!r} has its arguments: give them to `call(…)`, and options to the step")
            args, kwargs = what.args, dict(what.kwargs)
        options = StepOptions(name, recovery, retries, timeout)
        step = read_step(branch.next_key(), fn, args, kwargs, options, self._calls.step_recovery)
        if not step.declares_recovery:
            self._calls.note_default()
        done = await self._calls.answer(branch, step.key, "step", step.name, step.asked)
        if done is None:
            if step.refusal is not None:
                raise step.refusal
            done = await StepRun(self._calls, branch, step, self.progress).run()
        return step.returned(self._calls.process_id, done)

    @recorded
    async def sleep(self, branch: FunctionBranch, seconds: float) -> None:
        """Wait. A long sleep costs nothing: the process is on disk, and comes back when it is over."""
        _check_seconds(seconds, "sleep for")
        key, asked = branch.next_key(), f"{seconds:g}"
        calls = self._calls
        done = await calls.answer(branch, key, "sleep", "", asked)
        if done is None:
            on = calls.begin_wait(WaitOn(key, "time"), "sleep", asked, seconds)
            await calls.wait(branch, "sleep", asked, on)
            done = Done(key, "sleep", "", asked, at=calls.clock.now())
            await calls.scheduler.deliver(branch, done)
        answered(done)

    @overload
    async def wait_signal(self, name: str, kind: type[T], /, *, timeout: float | None = None) -> T: ...
    @overload
    async def wait_signal(self, name: str, /, *, timeout: float | None = None) -> Any: ...
    @recorded
    async def wait_signal(
        self, branch: FunctionBranch, name: str, kind: Any = None, /, *, timeout: float | None = None
    ) -> Any:
        """The payload of the next signal of this name, also of one that came before. `kind` is what it becomes.

        Raises `TimedOut` when none came in time.
        """
        check_signal(name)
        _check_timeout(timeout)
        declared(self._calls.row.registration, f"{SIGNAL}{name}")
        read = None if kind is None else value_codec(kind).convert
        key, asked = branch.next_key(), _limit(timeout)
        done = await self._calls.answer(branch, key, "signal", name, asked)
        if done is None:
            done = await self._next_signal(branch, key, name, asked, timeout)
        if done.late:
            raise TimedOut(f"no signal {name!r} came", timeout)
        value = answered(done)
        if read is None:
            return value
        try:
            return read(value)
        except ValueError as error:
            raise InvalidInput(f"signal {name!r} came with a payload that does not fit: {error}") from None

    async def _next_signal(
        self, branch: FunctionBranch, key: str, name: str, asked: str, timeout: float | None
    ) -> Done:
        calls, scheduler = self._calls, self._calls.scheduler
        on = calls.begin_wait(WaitOn(key, "signal", name), "signal", asked, timeout)
        await calls.check_stop(branch, key, "signal", name, asked)
        signal = scheduler.waits.take_signal(name)
        if signal is None:
            signal = await calls.wait(branch, "signal", asked, on)
        if signal is None:
            done = Done(key, "signal", name, asked, late=True, at=calls.clock.now())
        else:
            done = Done(key, "signal", name, asked, signal.payload, event=signal.sequence, at=calls.clock.now())
            scheduler.taken.add(signal.sequence)
        if not await scheduler.deliver(branch, done):
            scheduler.taken.discard(signal.sequence)
            scheduler.waits.add_signal(signal)
            await calls.check_stop(branch, key, "signal", name, asked)
        return done

    @recorded
    async def emit(self, branch: FunctionBranch, event: str, payload: Any = None) -> None:
        """Add an event, declared with `@process(events=[…])`, to the process's own log."""
        calls = self._calls
        schema, plain = declared(calls.row.registration, event).schema, clean(payload)
        problem = None if schema is None else check(schema, plain)
        if problem is not None:
            raise InvalidProcess(f"the payload of {event!r} does not fit: {problem}")
        if event.startswith(SIGNAL):
            raise InvalidProcess(f"{event!r} is a signal: it is for others to send")
        key, asked = branch.next_key(), shape((plain,), {})
        done = await calls.answer(branch, key, "emit", event, asked)
        if done is None:
            await calls.check_stop(branch, key, "emit", event, asked)
            now = calls.clock.now()
            done = Done(key, "emit", event, asked, at=now)
            await calls.scheduler.deliver(branch, done, Event(event, plain, now))
            await calls.journal.flush()
        answered(done)

    def progress(self, value: Any) -> None:
        """Say how far it is. Kept with the next record; a later one replaces it."""
        # Steps call it from threads too. Progress that lies before recorded calls was kept when they were made.
        calls, branch = self._calls, self._calls.scheduler.running_branch()
        if branch is None or not calls.replay.is_ahead(branch.key, branch.calls):
            calls.journal.event(Event(PROGRESS, clean(value), calls.clock.now()))

    # ------------------------------------------------------------------ other processes

    @overload
    async def start(
        self, what: ProcessCall[R], *, parent_end: ParentEnd = "cancel", label: str = "", wake: WakePolicy = "none"
    ) -> ChildHandle[R]: ...
    @overload
    async def start(
        self,
        what: Startable[R],
        args: Mapping[str, Any] | None = None,
        *,
        parent_end: ParentEnd = "cancel",
        label: str = "",
        wake: WakePolicy = "none",
    ) -> ChildHandle[R]: ...
    @overload
    async def start(
        self,
        what: Any,
        args: Mapping[str, Any] | None = None,
        *,
        parent_end: ParentEnd = "cancel",
        label: str = "",
        wake: WakePolicy = "none",
    ) -> ChildHandle[Any]: ...
    async def start(
        self,
        what: Any,
        args: Mapping[str, Any] | None = None,
        *,
        parent_end: ParentEnd = "cancel",
        label: str = "",
        wake: WakePolicy = "none",
    ) -> ChildHandle[Any]:
        """Start a process of its own: a durable function, a tool or an agent. Asked for twice, it is started once.

        `parent_end` says what becomes of it when this process ends first.
        """
        what, args, codec = read_start(what, args)
        return ChildHandle(self, await self._start(what, args, ChildOptions(parent_end, label, wake)), codec)

    @overload
    async def command(
        self, argv: Sequence[str], *, background_after: None = None, **options: Unpack[CommandOptions]
    ) -> ChildHandle[CommandResult]: ...
    @overload
    async def command(
        self, argv: Sequence[str], *, background_after: float, **options: Unpack[CommandOptions]
    ) -> ChildHandle[CommandResult] | CommandResult: ...
    async def command(
        self, argv: Sequence[str], *, background_after: float | None = None, **options: Unpack[CommandOptions]
    ) -> ChildHandle[CommandResult] | CommandResult:
        """Run a program, once however often this line is replayed. `options` are those of `CommandOptions`.

        It is asked to stop when this process ends, unless `owner` says "detached". Its id derives from this line, and
        takes no `key`. One with a `watch` wakes the session that hears of this process. With `background_after`, the
        result if it comes within so many seconds.
        """
        what, owner = prepared(argv, options), owner_of(options, "process", ("process", "detached"))
        if options.get("key") is not None:
            raise InvalidCommand("a command of a durable function has its line as its key: leave key= out")
        end: ParentEnd = "cancel" if owner == "process" else "abandon"
        watched = options.get("watch") is not None
        if watched and self._calls.row.registration.wake is None:
            raise InvalidCommand(
                "watch= says what a session is told, and no session hears of this process: "
                "start it with session.start(…), or read what its command writes with output(…)"
            )
        wake = options.get("wake", "turn" if watched else "none")
        asked = ChildOptions(end, clean_text(options.get("label", "")), wake)
        handle = ChildHandle[CommandResult](self, await self._start(what, {"argv": list(argv)}, asked), None)
        if background_after is None:
            return handle
        try:
            return await handle.result(timeout=background_after)
        except TimedOut:
            return handle

    @recorded
    async def _start(
        self, branch: FunctionBranch, what: Any, args: Mapping[str, Any] | None, options: ChildOptions
    ) -> str:
        plain, calls = clean(check_args(args)), self._calls
        name = getattr(what, "name", None) or getattr(getattr(what, "spec", None), "name", None) or str(what)
        key = branch.next_key()

        async def begin(_: object) -> str:
            return await calls.host.start_child(calls.row, calls.unique(key), what, plain, options)

        return str(await self._act(branch, key, "start", name, shape((plain,), {}), begin))

    @overload
    async def result(self, process: ChildHandle[R] | ProcessHandle[R], /, *, timeout: float | None = None) -> R: ...
    @overload
    async def result(self, process: Any, /, *, timeout: float | None = None) -> Any: ...
    @recorded
    async def result(self, branch: FunctionBranch, process: Any, /, *, timeout: float | None = None) -> Any:
        """How another process ended, by its handle or id: its value, or `ProcessFailed`."""
        process_id = handle_id(process)
        if process_id == self.process_id:
            raise InvalidInput(f"process {process_id!r} would wait for its own end")
        _check_timeout(timeout)
        key, asked = branch.next_key(), _limit(timeout)
        done = await self._calls.answer(branch, key, "result", process_id, asked)
        if done is None:
            done = await self._end_of(branch, key, process_id, asked, timeout)
            await self._calls.scheduler.deliver(branch, done)
        if done.late:
            raise TimedOut(f"process {process_id!r} did not end", timeout)
        value = value_of(process_id, answered(done))
        codec = process.codec if isinstance(process, ChildHandle | ProcessHandle) else None
        if codec is None and isinstance(value, dict) and value.get("type") == RESULT:
            codec = value_codec(CommandResult)
        return revived(codec, value, f"process {self.process_id!r} at {key}", f"the result of process {process_id!r}")

    async def _end_of(
        self, branch: FunctionBranch, key: str, process_id: str, asked: str, timeout: float | None
    ) -> Done:
        calls = self._calls
        on = calls.begin_wait(WaitOn(key, "process", process_id), "result", asked, timeout)
        while True:
            await calls.check_stop(branch, key, "result", process_id, asked)
            row = await calls.run.watch_end(process_id)
            if row is None:
                return calls.refused(key, "result", process_id, asked, UnknownProcess(process_id))
            if not row.live:
                return Done(key, "result", process_id, asked, await self._outcome_of(row), at=calls.clock.now())
            if await calls.wait(branch, "result", asked, on) is None:
                return Done(key, "result", process_id, asked, late=True, at=calls.clock.now())

    async def _outcome_of(self, row: ProcessRow) -> Any:
        """How another process ended, as JSON."""
        outcome, calls = row.record.outcome, self._calls
        if row.pruned is not None:
            return msgspec.to_builtins(NoLongerRetained(row.status, row.pruned))
        if outcome is None:
            return msgspec.to_builtins(Failure(row.status, "its caller has departed: how it ended will never be known"))
        if isinstance(outcome, Success) and outcome.blob is not None:
            outcome = Success(decode(await calls.journal.patiently(calls.host.store.blobs.get, outcome.blob.digest)))
        if isinstance(outcome, Failure):
            outcome = replace(outcome, traceback="")  # it is in the other's record
        return msgspec.to_builtins(outcome)

    @recorded
    async def _signal(self, branch: FunctionBranch, process_id: str, name: str, payload: Any) -> None:
        plain, calls = clean(payload), self._calls
        key = branch.next_key()

        async def send(_: object) -> None:
            check_signal(name)
            row = await calls.host.store.process(process_id)
            schema = None if row is None or not row.live else declared(row.registration, f"{SIGNAL}{name}").schema
            problem = None if schema is None else check(schema, plain)
            if problem is not None:
                raise InvalidProcess(f"the payload of signal {name!r} does not fit: {problem}")
            await calls.host.signal(process_id, name, plain, f"{self.process_id}.{calls.unique(key)}")

        await self._act(branch, key, "tell", name, shape((process_id, plain), {}), send)

    @recorded
    async def _cancel(self, branch: FunctionBranch, process_id: str, reason: str) -> None:
        request = CancelRequest(f"process {self.process_id}", clean_text(reason))

        async def ask(_: object) -> None:
            await self._calls.host.cancel(process_id, request)

        await self._act(branch, branch.next_key(), "stop", process_id, shape((reason,), {}), ask)

    async def _act(
        self,
        branch: FunctionBranch,
        key: str,
        kind: StepKind,
        name: str,
        asked: str,
        act: Callable[[object], Awaitable[Any]],
    ) -> Any:
        """Write to another process. `act` may run several times, also after a crash: what it writes carries a key that
        is the same every time, so it counts once."""
        calls = self._calls
        done = await calls.answer(branch, key, kind, name, asked)
        if done is None:
            await calls.check_stop(branch, key, kind, name, asked)
            await calls.journal.flush()
            try:
                done = Done(key, kind, name, asked, await calls.journal.patiently(act, key), at=calls.clock.now())
            except (InvalidInput, Conflict, NotFound) as error:
                done = calls.refused(key, kind, name, asked, error)
            await calls.scheduler.deliver(branch, done)
        return answered(done)

    # ------------------------------------------------------------------ branches

    # Branches of different types keep them, up to five; a checker that sees more of them takes one type for all.
    @overload
    async def gather(self, a: BranchWork[A], /) -> tuple[A]: ...
    @overload
    async def gather(self, a: BranchWork[A], b: BranchWork[B], /) -> tuple[A, B]: ...
    @overload
    async def gather(self, a: BranchWork[A], b: BranchWork[B], c: BranchWork[C], /) -> tuple[A, B, C]: ...
    @overload
    async def gather(
        self, a: BranchWork[A], b: BranchWork[B], c: BranchWork[C], d: BranchWork[D], /
    ) -> tuple[A, B, C, D]: ...
    @overload
    async def gather(
        self, a: BranchWork[A], b: BranchWork[B], c: BranchWork[C], d: BranchWork[D], e: BranchWork[E], /
    ) -> tuple[A, B, C, D, E]: ...
    @overload
    async def gather(self, *branches: BranchWork[T]) -> tuple[T, ...]: ...
    @overload
    async def gather(self, a: BranchWork[A], /, *, return_exceptions: Literal[True]) -> tuple[A | BaseException]: ...
    @overload
    async def gather(
        self, a: BranchWork[A], b: BranchWork[B], /, *, return_exceptions: Literal[True]
    ) -> tuple[A | BaseException, B | BaseException]: ...
    @overload
    async def gather(
        self, a: BranchWork[A], b: BranchWork[B], c: BranchWork[C], /, *, return_exceptions: Literal[True]
    ) -> tuple[A | BaseException, B | BaseException, C | BaseException]: ...
    @overload
    async def gather(
        self,
        a: BranchWork[A],
        b: BranchWork[B],
        c: BranchWork[C],
        d: BranchWork[D],
        /,
        *,
        return_exceptions: Literal[True],
    ) -> tuple[A | BaseException, B | BaseException, C | BaseException, D | BaseException]: ...
    @overload
    async def gather(
        self,
        a: BranchWork[A],
        b: BranchWork[B],
        c: BranchWork[C],
        d: BranchWork[D],
        e: BranchWork[E],
        /,
        *,
        return_exceptions: Literal[True],
    ) -> tuple[A | BaseException, B | BaseException, C | BaseException, D | BaseException, E | BaseException]: ...
    @overload
    async def gather(
        self, *branches: BranchWork[T], return_exceptions: Literal[True]
    ) -> tuple[T | BaseException, ...]: ...
    async def gather(self, *branches: BranchWork[Any], return_exceptions: bool = False) -> tuple[Any, ...]:
        """Run branches at once and wait for all of them: their results, in order. The first error is raised last."""
        group = await self._run_all("gather", branches)
        if return_exceptions:
            ends = zip(group.values, group.errors, strict=True)
            return tuple([value if error is None else error for value, error in ends])
        if group.error is not None:
            raise group.error
        return tuple(group.values)

    @overload
    async def any(self, a: BranchWork[A], /) -> tuple[int, A]: ...
    @overload
    async def any(self, a: BranchWork[A], b: BranchWork[B], /) -> tuple[int, A | B]: ...
    @overload
    async def any(self, a: BranchWork[A], b: BranchWork[B], c: BranchWork[C], /) -> tuple[int, A | B | C]: ...
    @overload
    async def any(
        self, a: BranchWork[A], b: BranchWork[B], c: BranchWork[C], d: BranchWork[D], /
    ) -> tuple[int, A | B | C | D]: ...
    @overload
    async def any(
        self, a: BranchWork[A], b: BranchWork[B], c: BranchWork[C], d: BranchWork[D], e: BranchWork[E], /
    ) -> tuple[int, A | B | C | D | E]: ...
    @overload
    async def any(self, *branches: BranchWork[T]) -> tuple[int, T]: ...
    async def any(self, *branches: BranchWork[Any]) -> tuple[int, Any]:
        """Run branches at once: which one succeeded first, and its result. The others are dropped.

        A dropped branch is stopped at the call where it is, as by a cancel request. It may clean up; this waits for it.
        """
        if not branches:
            raise InvalidInput("ctx.any needs at least one branch")
        group = await self._run_all("any", branches)
        if group.chosen is None:
            assert group.error is not None
            raise group.error
        return group.chosen, group.values[group.chosen]

    @overload
    async def all(self, a: BranchWork[A], /) -> tuple[A]: ...
    @overload
    async def all(self, a: BranchWork[A], b: BranchWork[B], /) -> tuple[A, B]: ...
    @overload
    async def all(self, a: BranchWork[A], b: BranchWork[B], c: BranchWork[C], /) -> tuple[A, B, C]: ...
    @overload
    async def all(
        self, a: BranchWork[A], b: BranchWork[B], c: BranchWork[C], d: BranchWork[D], /
    ) -> tuple[A, B, C, D]: ...
    @overload
    async def all(
        self, a: BranchWork[A], b: BranchWork[B], c: BranchWork[C], d: BranchWork[D], e: BranchWork[E], /
    ) -> tuple[A, B, C, D, E]: ...
    @overload
    async def all(self, *branches: BranchWork[T]) -> tuple[T, ...]: ...
    async def all(self, *branches: BranchWork[Any]) -> tuple[Any, ...]:
        """Run branches at once: all results, in order. The first error drops the others, and is raised then."""
        group = await self._run_all("all", branches)
        error = None if group.chosen is None else group.errors[group.chosen]
        if error is not None:
            raise error
        return tuple(group.values)

    async def _run_all(self, kind: StepKind, works: Works) -> Group:
        try:
            return await self._fork(kind, works)
        finally:
            for work in works:  # those that were never begun would warn that they were not awaited
                if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                    work.close()

    @recorded
    async def _fork(self, branch: FunctionBranch, kind: StepKind, works: Works) -> Group:
        """Run branches to their ends. Which one was chosen is recorded before the others are asked to stop."""
        for work in works:
            if not inspect.iscoroutine(work):
                raise InvalidInput(f"ctx.{kind} runs coroutines such as ctx.sleep(1) or your own, not {work!r}")
        if len(set(map(id, works))) != len(works):
            raise InvalidInput(f"ctx.{kind} was given the same coroutine twice: call the function once for each branch")
        calls, scheduler = self._calls, self._calls.scheduler
        key, asked = branch.next_key(), str(len(works))
        before = await calls.answer(branch, key, kind, "", asked)
        if before is not None:
            answered(before)
        if before is None and not calls.replay.was_forked(key, kind, len(works)) and not scheduler.replaying:
            await calls.check_stop(branch, key, kind, "", asked)
        # Known beforehand only in a journal without order: otherwise its branches are replayed until one decides.
        chosen: int | None = None if before is None else before.value
        group = Group(branch, works, DECIDES[kind], functools.partial(self._choose, key, kind, asked))
        await scheduler.fork(branch, key, group, chosen)
        if chosen is not None and not DECIDES[kind](group.errors[chosen]):
            raise Diverged(self.process_id, f"{key}.{chosen}", f"that it decided {kind}", "another end of that branch")
        return group

    def _choose(self, key: str, kind: StepKind, asked: str, index: int) -> None:
        calls = self._calls
        before = calls.replay.take(key)
        if before is None:
            calls.scheduler.record(Done(key, kind, "", asked, index, at=calls.clock.now()))
        elif before.value != index:
            there = f"that it decided {kind}"
            calls.scheduler.fail(Diverged(self.process_id, f"{key}.{before.value}", there, f"branch {index} before it"))
        else:
            calls.scheduler.recorded_used()

    # ------------------------------------------------------------------ what differs from run to run

    def now(self) -> datetime.datetime:
        """The time when this line was first reached."""
        calls, scheduler = self._calls, self._calls.scheduler
        branch = scheduler.current()
        key = branch.next_key()
        if key == FIRST:
            calls.check_first(branch, "now", "")
        try:
            done = calls.replay.answer(key, "now", "", "")
        except Diverged as error:
            raise scheduler.fail(error) from error
        if done is None:
            branch.made_unrecorded()
            done = Done(key, "now", "", "", calls.clock.now())
            scheduler.record(done)
        else:
            scheduler.recorded_used()
        return datetime.datetime.fromtimestamp(done.value / 1000, datetime.UTC)

    @property
    def random(self) -> SeededRandom:
        """Randomness that is this branch's own, and the same on every replay."""
        calls, branch = self._calls, self._calls.scheduler.current()
        found = self._randoms.get(branch.key)
        if found is None:
            first = calls.row.record.first_started
            # A restored copy has the secret of its original, and must not draw the same for what begins in it.
            store = calls.host.store.identity() if first is None else first.store
            place = f"{store and store + '#'}{self.process_id}#{calls.segment.number}#{branch.key}".encode()
            seed = hmac.new(calls.secret, place, hashlib.sha256).digest()
            found = self._randoms[branch.key] = SeededRandom(int.from_bytes(seed, "big"))
        return found

    def uuid(self) -> UUID:
        """An id that is the same on every replay."""
        return UUID(int=self.random.getrandbits(128), version=4)

    # ------------------------------------------------------------------ work that never ends

    @property
    def state(self) -> Any:
        """What the last checkpoint kept, a copy each time; None before the first."""
        self._calls.scheduler.current()
        return decode(encode(self._calls.segment.state))

    @recorded
    async def checkpoint(self, branch: FunctionBranch, state: Any, *, restart: bool = False) -> None:
        """Keep `state` and forget what was recorded so far: after a crash the function begins again with it.

        Write a loop that never ends as one that goes on from `ctx.state`, with the checkpoint as the last call of a
        round: a replay begins with the first line, so the next call must be the one that the function begins with.
        Where that depends on the state, say `restart=True`: it begins again at once, and this does not return.
        """
        plain = clean(state)
        encode_checked(plain, "the state of a process")
        await self._end_segment(branch, "checkpoint")
        if restart:
            raise BeginAnew(state=plain)
        await self._calls.begin_segment(plain, None)
        branch.begin_anew()
        self._randoms.clear()

    @recorded
    async def continue_as_new(self, branch: FunctionBranch, args: Mapping[str, Any] | None = None) -> NoReturn:
        """Begin again, as the same process, with other arguments and nothing to replay."""
        plain = clean(check_args(args))
        self._check_args(plain)
        encode_checked(plain, "the arguments of a process")
        await self._end_segment(branch, "continue_as_new")
        raise BeginAnew(args=plain)

    async def _end_segment(self, branch: FunctionBranch, what: str) -> None:
        """Refuse unless nothing is left to replay and no other branch runs."""
        calls = self._calls
        if branch is not calls.scheduler.root or not calls.scheduler.has_one_branch:
            raise InvalidInput(f"{what} is for the function itself, while none of its branches runs")
        key = branch.next_key()
        before = await calls.answer(branch, key, "checkpoint", what, "")
        if before is not None:
            answered(before)  # refused; if it was stopped, that was raised
        calls.replay.check_over(what)
        await calls.check_stop(branch, key, "checkpoint", what, "")


async def begin_anew(context: ProcessContext[Any], anew: BeginAnew) -> Segment:
    """The rest of `continue_as_new`, or of a checkpoint that begins again, once the function has unwound."""
    return await context._calls.begin_segment(anew.state, None if anew.new_args is None else dict(anew.new_args))


class ChildHandle(Generic[R_co]):
    """A process that a durable function has started: its calls are the function's own. `codec` brings back what it
    returns; without one that is JSON."""

    def __init__(self, context: ProcessContext[Any], process_id: str, codec: ValueCodec | None) -> None:
        self._context, self.id, self.codec = context, process_id, codec

    def __repr__(self) -> str:
        return f"<ChildHandle {self.id}>"

    def to_json(self) -> dict[str, str]:
        return {"__handle__": "process", "id": self.id}

    async def result(self, *, timeout: float | None = None) -> R_co:
        """Its value, or `ProcessFailed`."""
        value: R_co = await self._context.result(self, timeout=timeout)
        return value

    async def signal(self, name: str, payload: Any = None) -> None:
        await self._context._signal(self.id, name, payload)

    async def cancel(self, reason: str = "") -> None:
        """Ask it to end; `result` is how it did."""
        await self._context._cancel(self.id, reason)


def _limit(timeout: float | None) -> str:
    return "" if timeout is None else f"{timeout:g}"


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None:
        _check_seconds(timeout, "wait without a limit, or for")


def _check_seconds(seconds: object, what: str) -> None:
    fine = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds <= MAX_SLEEP
    if not fine:
        raise InvalidInput(f"{what} 0 to {MAX_SLEEP:,} seconds, not {seconds!r}")
