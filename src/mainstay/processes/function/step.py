"""The attempts of one `ctx.step`: what a durable function does outside, once.

The start of an attempt is on disk before its body runs, so a crash finds it either certainly not started or possibly
started. A step that may be repeated (`recovery="rerun"`) needs no such record: the row counts the workers that died
since the newest one.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import decimal
import functools
import inspect
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from mainstay.engine.gate import Leaving, OutOfTime, SelfCancelled, TurnCancelled
from mainstay.engine.retry import RetryPolicy
from mainstay.engine.threads import Threads
from mainstay.errors import Fenced, InvalidInput, Retry, ToolError
from mainstay.model.codec import MAX_VALUE, clean, clean_text, encode, error_text
from mainstay.model.process import WaitOn
from mainstay.model.step import Begun, Done, Fault, StepFaltered
from mainstay.model.tool import ToolSpec
from mainstay.processes.function.calls import Calls, answered
from mainstay.processes.function.replay import Open, shape
from mainstay.processes.function.scheduler import Branch
from mainstay.processes.run import Unloaded
from mainstay.processes.tracebacks import log_raised, traceback_text
from mainstay.tools.attempt import needs_of
from mainstay.tools.context import CallHost, ToolContext
from mainstay.tools.define import Tool

STEP_RETRIES = RetryPolicy()
"""How long the pauses between attempts are; how many there are is the step's to say."""
MAX_TEXT = 16_000
"""Characters of an error that are kept."""

DIED = "its worker died before its end was written"

ATOMS: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, type(len), type(lambda: None)}
    | {datetime.date, datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID}
)
"""Types whose objects cannot change."""


class StepOptions(Struct, frozen=True):
    """What a call says of its step. What is None is taken from its tool, or has its default."""

    name: str | None = None
    recovery: str | None = None
    retries: int | None = None
    timeout: float | None = None


class StepCall(Struct, frozen=True):
    """One step as it was asked for. `tool` is set if it is one: its limits hold for steps as for calls in turns."""

    key: str
    name: str
    asked: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reruns: bool
    retries: int
    timeout: float | None
    tool: ToolSpec | None = None

    @property
    def sees_key(self) -> bool:
        """Whether its function is given a tool's context, and with it the idempotency key."""
        return isinstance(self.fn, Tool) and self.fn.context_parameter is not None

    def done(self, **how: Any) -> Done:
        return Done(self.key, "step", self.name, self.asked, **how)

    def with_copies(self, deps: Any) -> StepCall:
        """The same step with arguments of its own. `deps` are live, whatever they are made of."""
        if all(type(each) in ATOMS for each in self.args) and not self.kwargs:
            return self
        memo = {id(deps): deps}
        args, kwargs = copied(self.args, memo), copied(dict(self.kwargs), memo)
        return msgspec.structs.replace(self, args=args, kwargs=kwargs)


class Ended(Struct, frozen=True):
    """How one attempt ended. `again`: another one may be made, after so many seconds if it said so. `stopped`: its
    branch was asked to stop."""

    value: Any = None
    fault: Fault | None = None
    unknown: str | None = None
    stopped: bool = False
    dropped: bool = False
    again: bool = False
    after: float | None = None


class Attempt(Struct, frozen=True):
    """One attempt of a step, whose first one started in `store`. `repeated` of those before it were made because a
    crash left the one before unknown."""

    number: int = 1
    repeated: int = 0
    store: str = ""

    @property
    def failures(self) -> int:
        """How many attempts have failed if this one does: what a crash cut off has not."""
        return self.number - self.repeated

    def after_failure(self) -> Attempt:
        return Attempt(self.number + 1, self.repeated, self.store)


class StepRun:
    """One step that no record answers, from its first attempt in this run to its result."""

    __slots__ = ("_branch", "_calls", "_clock", "_host", "_progress", "_step")

    def __init__(self, calls: Calls, branch: Branch, step: StepCall, progress: Callable[[Any], None]) -> None:
        self._calls, self._branch, self._progress = calls, branch, progress
        self._host, self._clock = calls.host, calls.clock
        # Copied before anything is awaited: another branch may change the arguments while this one waits.
        self._step = step.with_copies(calls.host.deps)

    async def run(self) -> Any:
        calls, branch, step, host = self._calls, self._branch, self._step, self._host
        before = None if calls.replay.over else calls.replay.left_open(step.key, "step", step.name, step.asked)
        attempt = self._first_attempt(before)
        if attempt is None:
            assert before is not None
            assert before.begun is not None
            return await self._end(step.done(unknown=DIED, attempts=before.begun.attempt))
        if before is not None and before.faltered is not None:
            await self._pause(before.faltered.due, before.faltered.at)
        while True:
            if not host.placed(calls.process_id):
                await host.place(calls.process_id)
            if branch.pending:
                if attempt.repeated:  # what a dead worker did of it may have had its effect
                    dropped = branch.deliver_stop()
                    stopped = step.done(unknown=DIED, cut=True, dropped=dropped, attempts=attempt.number - 1)
                    return await self._end(stopped)
                await calls.check_stop(branch, step.key, "step", step.name, step.asked)
            if step.tool is not None and not await self._take_slot(step.tool):
                continue  # asked to stop meanwhile
            ended = await self._attempt(attempt)
            if isinstance(ended, Done):
                return await self._end(ended)
            await self._pause(ended, self._clock.now())
            attempt = attempt.after_failure()

    def _first_attempt(self, before: Open | None) -> Attempt | None:
        """The attempt that is due, after those that are recorded; None when the last one may not be made again."""
        calls, reruns = self._calls, self._step.reruns
        # A step that may be repeated leaves no record when it begins: if it is the first call that no record answers,
        # every worker that died since may have made it.
        lost = calls.interrupted if reruns and self._branch.unrecorded == 1 else 0
        if before is None:
            return Attempt(1 + lost, lost, self._host.store.identity())
        repeated, store = (0, "") if before.begun is None else (before.begun.repeated, before.begun.store)
        if before.faltered is not None:
            return Attempt(before.faltered.attempt + 1, repeated, store)
        assert before.begun is not None
        lost = max(calls.row.attempts - before.begun.life if before.begun.life else lost, 1)
        return Attempt(before.begun.attempt + lost, repeated + lost, store) if reruns else None

    async def _pause(self, due: int, since: int) -> None:
        step = self._step
        on = WaitOn(step.key, "time", due=due, since=since)
        await self._calls.wait(self._branch, "step", step.asked, on, step.name)

    async def _end(self, done: Done) -> Any:
        await self._calls.scheduler.deliver(self._branch, done)
        if done.cut:
            self._calls.raise_stopped(done)
        return answered(done)

    async def _take_slot(self, tool: ToolSpec) -> bool:
        """Wait until the tool's limits leave room; False when the branch is asked to stop before.

        A branch gives up the worker's place while it waits for a slot, and does not wait for a place once it has a
        slot: holding one while waiting for the other could deadlock.
        """
        admission, needs, scheduler = self._host.admission, needs_of(tool), self._calls.scheduler
        if admission.try_take(needs):
            return True
        try:
            await self._branch.gate.guard(scheduler.waits.queue(functools.partial(admission.take, needs)))
        except TurnCancelled:
            return False
        except Leaving:
            raise Unloaded from None
        if scheduler.unloaded:
            admission.release(needs)
            raise Unloaded
        return True

    async def _attempt(self, attempt: Attempt) -> Done | int:
        """One attempt: how the step ended, or when the next one is due.

        It holds a slot of its tool. A body on a thread gives that back itself, when it has really ended.
        """
        step, host, tool = self._step, self._host, self._step.tool
        # An attempt that may be followed by another must not leave its changes of the arguments to it.
        own = step.with_copies(host.deps) if step.retries else step
        context = self._tool_context(attempt) if step.sees_key else None
        ended = None
        if tool is not None:
            ended = functools.partial(host.admission.release_from_thread, asyncio.get_running_loop(), needs_of(tool))
        body = Body(host.threads, own, context, ended)
        try:
            return await self._try(attempt, body)
        finally:
            if tool is not None and not body.on_thread:
                host.admission.release(needs_of(tool))

    async def _try(self, attempt: Attempt, body: Body) -> Done | int:
        calls, step = self._calls, self._step
        recorded = self._records_begun(attempt)
        if recorded:
            self._record_begun(attempt, repeats=attempt.repeated > 0)
        await calls.journal.flush()
        if not await self._host.still_ours(calls.row):
            raise Fenced(f"process {calls.process_id}", calls.journal.scope.generation)
        began = self._clock.monotonic()
        try:
            ended = await self._run_body(body)
        except Leaving:
            self._leave(attempt, body.began, recorded)
            raise Unloaded from None
        if ended.fault is not None and ended.again and attempt.failures <= step.retries:
            if not recorded:
                self._record_begun(attempt)  # the attempt that `_retry_at` says has failed
            return self._retry_at(ended, attempt)
        return step.done(
            value=ended.value,
            fault=ended.fault if ended.unknown is None else None,
            unknown=ended.unknown or (DIED if ended.stopped and attempt.repeated else None),
            cut=ended.stopped,
            dropped=ended.dropped,
            attempts=attempt.number,
            repeated=attempt.repeated,
            ms=round((self._clock.monotonic() - began) * 1000),
            at=self._clock.now(),
        )

    def _records_begun(self, attempt: Attempt) -> bool:
        """Whether the start of an attempt is written before it: always, if it may not be repeated, or sees its
        idempotency key, which every attempt must find as the first one had it.

        Otherwise the row tells how many workers died without a new record. Beside other branches, whose records hide
        that, and after a failure, whose record is there anyway, it is written too.
        """
        if not self._step.reruns or self._step.sees_key:
            return True
        return attempt.failures > 1 or (attempt.repeated > 0 and not self._calls.scheduler.has_one_branch)

    def _record_begun(self, attempt: Attempt, repeats: bool = False) -> None:
        step, now = self._step, self._clock.now()
        life = self._calls.row.attempts if step.reruns else 0
        begun = Begun(
            step.key, "step", step.name, step.asked, None, attempt.number, attempt.repeated, now, life, attempt.store
        )
        self._calls.scheduler.record(begun, repeats=repeats)

    async def _run_body(self, body: Body) -> Ended:
        branch, step = self._branch, self._step
        branch.in_step = True
        try:
            return Ended(checked(await branch.gate.guard(body.run(), step.timeout), "the result"))
        except TurnCancelled:
            body.stop()
            unknown = "it was cancelled while it ran" if body.began else None
            return Ended(unknown=unknown, stopped=True, dropped=branch.deliver_stop())
        except OutOfTime:
            body.stop()
            late = f"it did not end within {step.timeout:g} s"
            return Ended(fault=Fault("timeout", late), unknown=late, again=step.reruns)
        except SelfCancelled:
            return Ended(fault=Fault("raised", "CancelledError: the step cancelled itself"))
        except Retry as retry:
            return Ended(fault=self._fault(retry), again=True, after=retry.after)
        except ToolError as error:
            return Ended(fault=self._fault(error))
        except Leaving:
            body.stop()
            raise
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise  # not by the step: its task is ended, or everything is
        except BaseException as error:  # a step may raise anything, and its function decides what it means
            return Ended(fault=self._fault(error), again=True)
        finally:
            branch.in_step = False

    def _fault(self, error: BaseException) -> Fault:
        """What a step raised, as far as it can be stored; it is logged too."""
        log_raised(f"step {self._step.name} of process {self._calls.process_id} raised {described(error)}", error)
        where = traceback_text(error)
        if not isinstance(error, ToolError):
            return Fault("raised", described(error), traceback=where)
        try:
            data = clean(error.data)
        except InvalidInput:
            data = None
        return Fault(clean_text(error.code), clean_text(error.message)[:MAX_TEXT], data, where)

    def _retry_at(self, ended: Ended, attempt: Attempt) -> int:
        """Record a failed attempt and when the next one is due."""
        now, fault = self._clock.now(), ended.fault
        assert fault is not None
        due = now + round(STEP_RETRIES.delay(attempt.failures, ended.after, self._host.random) * 1000)
        failed = StepFaltered(self._step.key, fault.code, fault.message, due, attempt.number, now, fault.traceback)
        self._calls.scheduler.record(failed)
        return due

    def _leave(self, attempt: Attempt, began: bool, recorded: bool) -> None:
        """The Runtime is left while a step runs, or just before: the next worker must know which."""
        step, scheduler, now = self._step, self._calls.scheduler, self._clock.now()
        if not began:
            if recorded:
                waits = StepFaltered(step.key, "interrupted", "it had not begun", now, attempt.number - 1, now)
                scheduler.record(waits)
        elif not step.reruns:
            unknown = "the runtime was left while it ran"
            scheduler.record(step.done(unknown=unknown, attempts=attempt.number, at=now))
        elif not recorded:
            self._record_begun(attempt)

    def _tool_context(self, attempt: Attempt) -> ToolContext[Any]:
        calls = self._calls
        return ToolContext(
            session_id=calls.session_id or "",
            call_id=f"{calls.process_id}.{calls.unique(self._step.key)}",
            tool=self._step.name,
            attempt=attempt.number,
            generation=calls.journal.scope.generation,
            deps=self._host.deps,
            host=StepCallHost(self._progress),
            store=attempt.store,
        )


class StepCallHost(CallHost):
    """What the context of a tool can reach that runs as a step: progress, which is that of its process."""

    def __init__(self, progress: Callable[[Any], None]) -> None:
        self._progress = progress

    def progress(self, value: Any) -> None:
        self._progress(value)


class Body:
    """One attempt of a step's function. `began`: it may have had an effect. `on_thread`: it runs, or ran, on one, which
    calls `ended` at its end, however long after its step was left."""

    __slots__ = ("_call", "_ctx", "_ended", "_threads", "began", "on_thread")

    def __init__(
        self, threads: Threads, call: StepCall, ctx: ToolContext[Any] | None, ended: Callable[[], None] | None
    ) -> None:
        self._threads, self._call, self._ctx, self._ended = threads, call, ctx, ended
        self.began = self.on_thread = False

    def stop(self) -> None:
        """Let a body on a thread see, in its context, that its step was left."""
        if self._ctx is not None:
            self._ctx.mark_cancelled()

    async def run(self) -> Any:
        self.began = True
        fn, args, kwargs = self._call.fn, self._call.args, dict(self._call.kwargs)
        if isinstance(fn, Tool):
            if self._ctx is not None and fn.context_parameter is not None:
                kwargs.setdefault(fn.context_parameter, self._ctx)
            fn = fn.fn
        if inspect.iscoroutinefunction(fn):
            return await fn(*args, **kwargs)
        running = self._threads.run(functools.partial(self._run_on_thread, fn, args, kwargs))
        self.on_thread = True
        found = await running
        return await found if inspect.isawaitable(found) else found

    def _run_on_thread(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return fn(*args, **kwargs)
        finally:
            if self._ended is not None:
                self._ended()


def read_step(
    key: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: StepOptions
) -> StepCall:
    """A step with its options: those of the call, then those of its tool, then the defaults."""
    if not callable(fn):
        raise InvalidInput(f"a step is a function and its arguments, not {fn!r}")
    spec = fn.spec if isinstance(fn, Tool) else None
    recovery = options.recovery or (spec.recovery if spec is not None else "once")
    if recovery not in ("once", "rerun"):
        raise InvalidInput(f"recovery={recovery!r} is not usable for a step: say recovery='once' or 'rerun'")
    retries = options.retries if options.retries is not None else spec.retries if spec is not None else 0
    timeout = options.timeout if options.timeout is not None else spec.timeout if spec is not None else None
    if type(retries) is not int or retries < 0:
        raise InvalidInput(f"retries={retries!r} is not usable: give a whole number, 0 or more")
    if timeout is not None and (type(timeout) not in (int, float) or not timeout > 0):
        raise InvalidInput(f"timeout={timeout!r} is not usable: give seconds, more than 0")
    name = clean_text(
        options.name or (spec.name if spec is not None else str(getattr(fn, "__name__", type(fn).__name__)))
    )
    return StepCall(key, name, shape(args, kwargs), fn, args, kwargs, recovery == "rerun", retries, timeout, spec)


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of the same type, if `value` is data: containers, dataclasses, structs and models of JSON, and objects
    with a `__deepcopy__`. Anything else is a live object, and is returned as it is, also inside of a container.

    `copy.deepcopy` alone would copy a client with its connections, as long as nothing in it objects.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    memo = {} if memo is None else memo
    made: Any = memo.get(id(value))
    if made is not None:
        return made
    match value:
        case list() | deque() | dict() if kind in (list, deque, dict, OrderedDict, defaultdict):
            made = memo[id(value)] = copy.copy(value)
            made.clear()  # filled below: it may hold itself
            if isinstance(value, dict):
                made.update((key, copied(each, memo)) for key, each in value.items())
            else:
                made.extend(copied(each, memo) for each in value)
        case tuple():
            parts = [copied(each, memo) for each in value]
            made = kind(*parts) if hasattr(kind, "_fields") else kind(parts)
        case set() | frozenset() | bytearray():
            made = copy.copy(value)
        case _:
            made = _copied_data(value, memo)
    memo[id(value)] = made
    return made


def _copied_data(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of an object that is all data, or has a `__deepcopy__`; otherwise the object."""
    if not hasattr(type(value), "__deepcopy__"):
        try:
            encode(value)
        except (TypeError, ValueError, msgspec.EncodeError, RecursionError):
            return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # its own code ran, and may raise anything
        return value


def checked(value: Any, what: str) -> Any:
    """A result as JSON: on the first run too, so that no replay can differ."""
    try:
        plain = clean(value)
    except InvalidInput as error:
        raise ToolError(str(error), code="invalid_output") from None
    if type(plain) in (dict, list, str):
        size = len(encode(plain))
        if size > MAX_VALUE:
            raise ToolError(f"{what} has {size:,} bytes, the limit is {MAX_VALUE:,}", code="output_too_large")
    return plain


def described(error: BaseException) -> str:
    """The type and text of an exception, as far as a record has room for it."""
    text = f"{type(error).__name__}: {error_text(error)}"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"
