"""The `process` decorator, and the engine of durable functions: it runs the code from its first line, answered from its
journal as far as that goes.

Everything that can be wrong with a definition is said at decoration, and never in the middle of a process.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeAlias, TypeVar, overload

import msgspec
from msgspec.structs import replace

from perdure.engine.journal import SPILL_BYTES
from perdure.errors import (
    Diverged,
    InvalidDefinition,
    InvalidInput,
    InvalidProcess,
    NotRevived,
    OutcomeUnknown,
    PerdureError,
    ProcessFailed,
    StepFailed,
    ToolError,
    quoted,
)
from perdure.lifecycle.process import RESERVED, SIGNAL
from perdure.model.codec import clean, clean_text, convert, decode, encode, error_text
from perdure.model.process import (
    Cancelled,
    EventType,
    Failure,
    ProcessOutcome,
    ProcessRecovery,
    ProcessRow,
    Registration,
    Success,
)
from perdure.model.session import Declared, Offers
from perdure.ports.process import EngineRun, Unloaded
from perdure.processes.function.calls import MAX_TEXT, Calls, checked, described, log_raised, traceback_text
from perdure.processes.function.context import BeginAnew, ProcessContext, begin_anew
from perdure.processes.function.replay import Replay
from perdure.processes.function.scheduler import Scheduler
from perdure.processes.handle import ProcessCall
from perdure.processes.run import Host
from perdure.tools.answer import output_codec
from perdure.tools.define import Arguments, read_signature, returns_codec
from perdure.tools.revive import ValueCodec, to_json

P = ParamSpec("P")
AnyContext: TypeAlias = ProcessContext[Any]
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,120}")

log = logging.getLogger("perdure.processes")

KIND = "function"
STEP_RECOVERY: Literal["once", "rerun"] = "rerun"
"""The recovery of steps that declare none, in processes begun from now on. Their registrations keep it."""


def is_name(name: str) -> bool:
    """Whether a durable function may have this name."""
    return _NAME.fullmatch(clean_text(name)) is not None


class Process(Generic[P, R_co]):
    """A durable function. You may call it too, as if it were not decorated, with a context of your own.

    `definition` is what a started process is pinned to: name and version. `code` tells people whether the code is the
    one it was begun with.
    """

    __name__: str
    recovery: ProcessRecovery = "rerunnable"
    fn: Callable[..., Coroutine[Any, Any, Any]]

    def __init__(
        self,
        fn: Callable[P, Coroutine[Any, Any, R_co]],
        *,
        name: str | None = None,
        version: str = "1",
        signals: Mapping[str, Any] | None = None,
        events: Iterable[EventType | str] = (),
        max_attempts: int | None = None,
    ) -> None:
        if isinstance(fn, Process) or not inspect.iscoroutinefunction(fn):
            raise InvalidDefinition(f"{fn!r} is no durable function: decorate an `async def` once")
        self.fn = fn
        functools.update_wrapper(self, fn, updated=())
        self.name = str(getattr(fn, "__name__", "")) if name is None else name
        owner = f"process {self.name!r}"
        if not is_name(self.name):
            raise InvalidDefinition(f"{owner}: use 1 to 120 letters, digits, '_', '-' or '.' as its name=")
        if not version or "@" in clean_text(version) or not version.isprintable():
            raise InvalidDefinition(f"{owner}: version={version!r} is not usable: give a short text such as '2'")
        if max_attempts is not None and (type(max_attempts) is not int or max_attempts < 1):
            raise InvalidDefinition(f"{owner}: max_attempts={max_attempts!r} is not usable: give 1 or more, or None")
        self.version, self.max_attempts = version, max_attempts
        self.definition = f"{self.name}@{version}"
        signature = read_signature(fn, owner, ProcessContext)
        if signature.context is None:
            raise InvalidDefinition(f"{owner} has no parameter for its context: annotate one as `ctx: ProcessContext`")
        if signature.needs_instance:
            raise InvalidDefinition(
                f"{owner} is a method, and no instance survives a crash: decorate a plain function, which finds what "
                "it needs in its arguments or `ctx.deps`"
            )
        self.context_parameter = signature.context.name
        self._arguments = Arguments(owner, signature.parameters)
        self._names = [each.name for each in signature.parameters]
        if signals is not None and not isinstance(signals, Mapping):
            raise InvalidDefinition(f"{owner}: signals={signals!r} is not usable: give their types by name, or None")
        self.open_signals = signals is None
        self.signals = {each: _payload(owner, each, kind) for each, kind in (signals or {}).items()}
        self.events = (*self.signals.values(), *(_event(owner, each) for each in events))
        code = getattr(inspect.unwrap(fn), "__code__", None)
        self.code = "" if code is None else hashlib.sha256(code.co_code).hexdigest()[:12]

    def returns(self) -> ValueCodec | None:
        """How its result is stored and brought back; None where that is JSON. Raises InvalidDefinition."""
        return returns_codec(self.fn, f"process {self.name!r}")

    @property
    def input_schema(self) -> dict[str, Any]:
        return self._arguments.schema

    @property
    def declared(self) -> Declared:
        """What a start by its name has to know of it."""
        return Declared(
            tuple([msgspec.to_builtins(each) for each in self.events]), self.open_signals, self.max_attempts
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, R_co]:
        made: Coroutine[Any, Any, R_co] = self.fn(*args, **kwargs)
        return made

    def call(self, *args: P.args, **kwargs: P.kwargs) -> ProcessCall[R_co]:
        """The function with its arguments, without the context: `runtime.start(nightly.call(day="Sunday"))`.

        It is taken wherever a process is started. Arguments may be of the types that the function declares; they are
        stored as JSON. Raises InvalidProcess for those that it would not take.
        """
        given = dict(zip(self._names, args, strict=False))
        twice = [name for name in given if name in kwargs]
        if len(args) > len(self._names) or twice:
            problem = f"{twice[0]!r} is given twice" if twice else f"it takes {len(self._names)}, not {len(args)}"
            raise InvalidProcess(f"invalid arguments for process {self.name}: {problem}")
        plain: dict[str, Any] = to_json({**given, **kwargs})
        _ = self.bind(plain)
        return ProcessCall(self, plain)

    def __repr__(self) -> str:
        return f"<Process {self.definition}>"

    def bind(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Stored arguments as keyword arguments, checked and converted."""
        try:
            return self._arguments.bind(dict(args))
        except ValueError as error:
            raise InvalidProcess(f"invalid arguments for process {self.name}: {error}") from None


def _payload(owner: str, name: str, kind: Any) -> EventType:
    if not clean_text(name):
        raise InvalidDefinition(f"{owner}: a signal needs a name, not {name!r}")
    schema = None if kind in (None, Any, object) else output_codec(kind).schema
    return EventType(f"{SIGNAL}{name}", schema)


def _event(owner: str, declared: EventType | str) -> EventType:
    made = declared if isinstance(declared, EventType) else EventType(declared)
    if not clean_text(made.name) or made.name.startswith((RESERVED, SIGNAL)):
        raise InvalidDefinition(f"{owner}: {declared!r} cannot be an event: '{RESERVED}' and '{SIGNAL}' are reserved")
    return made


# To a checker the context comes first, so that it sees the other arguments; when it runs it may stand anywhere.
@overload
def process(fn: Callable[Concatenate[AnyContext, P], Coroutine[Any, Any, R]], /) -> Process[P, R]: ...
@overload
def process(
    *,
    name: str | None = None,
    version: str = "1",
    signals: Mapping[str, Any] | None = None,
    events: Iterable[EventType | str] = (),
    max_attempts: int | None = None,
) -> Callable[[Callable[Concatenate[AnyContext, P], Coroutine[Any, Any, R]]], Process[P, R]]: ...
def process(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    version: str = "1",
    signals: Mapping[str, Any] | None = None,
    events: Iterable[EventType | str] = (),
    max_attempts: int | None = None,
) -> Any:
    """Make a durable function of an `async def` that takes a `ProcessContext`.

        @process
        async def nightly(ctx: ProcessContext, day: str) -> int:
            rows = await ctx.step(fetch_rows, day)
            await ctx.sleep(3600)
            return await ctx.step(publish, rows)

    A recorded call of `ctx` is never made again; an interrupted step runs again by default. `version` pins what
    is started to this code: keep the old version registered while any of its processes live
    (`runtime.processes.drain_status()`). `signals` says which ones
    it takes, and with what payload; without it, it takes any. `events` are those that it may emit.
    """
    made = functools.partial(
        Process, name=name, version=version, signals=signals, events=events, max_attempts=max_attempts
    )
    return made if fn is None else made(fn)


class FunctionEngine:
    """Runs durable functions. Several versions of one may be registered: a process keeps to the one it began with."""

    kind = KIND

    def __init__(self, functions: Iterable[Process[..., Any]], host: Host) -> None:
        self._functions = by_definition(functions)
        self._host = host
        self._warned: set[str] = set()  # definitions whose steps were seen to rely on the former default

    def knows(self, registration: Registration) -> bool:
        return self._named(registration.definition) is not None

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        """The registration of a function, given itself, or by its name or definition; None when it is none."""
        function = what if isinstance(what, Process) else self._named(what)
        if function is None:
            return None
        if self._functions.get(function.definition) is not function:
            raise InvalidProcess(
                f"{function!r} is not part of this Runtime: pass it in `processes=[…]`, or start it by its name "
                f"{function.name!r} for a worker that has it"
            )
        function.bind(args)
        return Registration(
            "", KIND, function.recovery, function.name, function.definition, dict(args), function.name,
            events=function.events, open_signals=function.open_signals, max_attempts=function.max_attempts,
            step_recovery=STEP_RECOVERY,
        )  # fmt: skip

    def draft_for_others(self, name: str, args: Mapping[str, Any], offered: Offers) -> Registration | None:
        """The registration of a function that only other workers have, by its name or definition.

        A definition that is a name alone is taken up by any worker that has a function of that name. Where no living
        worker has published what the function declares, every signal is taken.
        """
        chosen = [each for each in offered.functions if name in (each, each.partition("@")[0])]
        if not chosen or not is_name(name.partition("@")[0]):
            return None
        short, declared = name.partition("@")[0], offered.declared.get(chosen[-1], Declared())
        return Registration(
            "", KIND, "rerunnable", short, chosen[-1], dict(args), short,
            events=convert(declared.events, tuple[EventType, ...]), open_signals=declared.open_signals,
            max_attempts=declared.max_attempts, step_recovery=STEP_RECOVERY,
        )  # fmt: skip

    def _named(self, what: Any) -> Process[..., Any] | None:
        """The function of that definition, or the last one given of that name."""
        if not isinstance(what, str):
            return None
        found = self._functions.get(what)
        if found is None and "@" not in what:
            found = next((each for each in reversed(self._functions.values()) if each.name == what), None)
        return found

    async def run(self, run: EngineRun) -> ProcessOutcome:
        function = self._named(run.registration.definition)
        assert function is not None, "a worker takes what its engine knows"
        replay = Replay(run.row.id, await run.journal.load() if run.resumed else ())
        row, secret = run.row, await self._host.store.secret()
        if not row.registration.events and row.registration.open_signals:
            # Started by its name alone, where what the function declares was not known.
            declares = replace(row.registration, events=function.events, open_signals=function.open_signals)
            row = replace(row, registration=declares)
        while True:
            scheduler = Scheduler(run, replay, self._host.skew.seconds_until)
            await run.listen(scheduler, replay.segment.floor)
            calls = Calls(run, row, replay, scheduler, self._host, secret, self._warn_of_default)
            context: ProcessContext[Any] = ProcessContext(calls, function.bind)
            try:
                return await self._run_code(function, context, calls, run)
            except BeginAnew as anew:
                replay = Replay(run.row.id, [await begin_anew(context, anew)])
            finally:
                await scheduler.close()

    def _warn_of_default(self, row: ProcessRow) -> None:
        """Log, once per function, that the steps of a process follow the default that held when it was begun."""
        definition = row.registration.definition
        if definition not in self._warned:
            self._warned.add(definition)
            log.warning(
                "durable function %s has steps without recovery=, and process %s was begun when their default was "
                "'once', which it keeps. Processes begun from now on run such a step again after a crash "
                "(recovery='rerun'): say recovery='once' or 'ask' for steps that must not be done twice",
                definition,
                row.id,
            )

    async def _run_code(
        self, function: Process[..., Any], context: ProcessContext[Any], calls: Calls, run: EngineRun
    ) -> ProcessOutcome:
        """Run the code once, from its first line: how it ended, unless it was unloaded."""
        scheduler, segment = calls.scheduler, calls.segment
        args = run.registration.input if segment.args is None else segment.args
        # A copy: what it changes of its arguments is its own affair. If they do not fit, its code has changed.
        work = function.fn(**function.bind(decode(encode(args))), **{function.context_parameter: context})
        try:
            try:
                value = await scheduler.drive(work, scheduler.root)
            finally:
                if scheduler.root.own_cancels:
                    await scheduler.take_back_cancels()
            outcome: ProcessOutcome = Success(checked(value, "the result", function.returns()))
        except Unloaded:
            raise await self._why_unloaded(scheduler, run) from None
        except BeginAnew:
            if scheduler.unloaded:
                raise await self._why_unloaded(scheduler, run) from None
            raise
        except asyncio.CancelledError as error:
            outcome = self._cancelled(error, calls)
        except (GeneratorExit, KeyboardInterrupt):
            raise  # not by the function: everything ends
        except BaseException as error:  # a function may raise anything; it ends the process, and says how
            outcome = failure(error)
            if not scheduler.unloaded:
                log_raised(f"process {run.row.id} raised {outcome.message}", error)
        if scheduler.unloaded:  # its code has swallowed that
            raise await self._why_unloaded(scheduler, run)
        if not calls.replay.over:
            calls.replay.check_over(f"its end, as {type(outcome).__name__}")
        return outcome

    def _cancelled(self, error: asyncio.CancelledError, calls: Calls) -> ProcessOutcome:
        task = asyncio.current_task()
        if task is not None and task.cancelling() and not calls.scheduler.unloaded:
            raise error  # no request of ours: the task itself is cancelled
        request = calls.scheduler.request
        if request is None:
            return Failure("raised", f"CancelledError: {error_text(error) or 'the function cancelled itself'}")
        return Cancelled(request.by, request.reason, unknown=calls.stopped_unknown)

    async def _why_unloaded(self, scheduler: Scheduler, run: EngineRun) -> BaseException:
        fault, task = scheduler.fault, asyncio.current_task()
        if fault is None:
            return Unloaded()
        if task is not None and task.cancelling():
            return asyncio.CancelledError()
        if isinstance(fault, Diverged | NotRevived | InvalidProcess):
            await run.journal.flush()  # what other branches have done meanwhile has happened all the same
        return fault


def failure(error: BaseException) -> Failure:
    """What a function raised, as far as it can be stored."""
    where = traceback_text(error)
    match error:
        case OutcomeUnknown() | StepFailed():
            step = f"{error.traceback}\n\nThe step failed here:\n\n" if error.traceback else ""
            text = clean_text(f"step {error.step}: {error.message}")
            return Failure(clean_text(error.fault), text, _short(error.data), f"{step}{where}")
        case ToolError():
            return Failure(clean_text(error.code), clean_text(error.message)[:MAX_TEXT], _json(error.data), where)
        case ProcessFailed():
            return Failure(error.code, error_text(error)[:MAX_TEXT], _short(error.outcome), where)
        case PerdureError():
            return Failure(error.code, error_text(error), traceback=where)
        case _:
            return Failure("raised", described(error), traceback=where)


def _json(data: Any) -> Any:
    """The data of an error that a function of the host's made, as far as it can be stored."""
    try:
        return _short(clean(data))
    except InvalidInput:
        return None


def _short(data: Any) -> Any:
    """The data of an error, unless it is too long for the row of the process."""
    return data if len(encode(data)) <= SPILL_BYTES else None


def by_definition(functions: Iterable[Process[..., Any]]) -> dict[str, Process[..., Any]]:
    found: dict[str, Process[..., Any]] = {}
    for function in functions:
        if not isinstance(function, Process):
            raise InvalidDefinition(f"{quoted(function)} is no durable function: decorate it with @process")
        if function.definition in found:
            raise InvalidDefinition(
                f"two processes are {function.definition!r}: give each a name or version of its own"
            )
        _ = function.returns()  # refused here, not when its first process has done all its work
        found[function.definition] = function
    return found
