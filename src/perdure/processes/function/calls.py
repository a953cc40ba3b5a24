"""The calls of a durable function: what all of them have in common, and the attempts of a step.

A call's key is its number within its branch. A call that is recorded as done is answered from the record. Any other
call is made, and its result is recorded when it is delivered to its branch. What has happened is written to the store
before anything else acts outside: a step is preceded by a flush, and so are a child's start and a signal. What only
reads (the time, a wait) is written with the next thing that acts.

A step that may be repeated (`recovery="rerun"`, the default) needs no record of its start: the row counts the workers
that died since the newest record. The start of any other step's attempt is on disk before its body runs, so a crash
finds it either certainly not started or possibly started. Then `recovery="once"` raises `OutcomeUnknown` at its line,
and `recovery="ask"` parks the process until a person has settled it: the settlement is a signal under a name that no
host can send, with the number of the attempt in it, because an answer about one attempt says nothing about the next.

A fault is recorded with the traceback of the host's code that raised it: files, lines and source, as Python shows them,
and no values of variables.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import decimal
import functools
import inspect
import logging
import math
import traceback
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.admission import Needs
from perdure.engine.control import OutOfTime, SelfCancelled, TurnCancelled
from perdure.engine.retry import is_over, is_retried, next_due
from perdure.engine.waiters import current_metadata, on_thread_of
from perdure.errors import (
    Diverged,
    Fenced,
    InternalError,
    InvalidDefinition,
    InvalidInput,
    MisplacedCheckpoint,
    NotRevived,
    PerdureError,
    Retry,
    StepFailed,
    StoreError,
    ToolError,
    UnknownProcess,
)
from perdure.errors import OutcomeUnknown as UnknownOutcome
from perdure.lifecycle.process import CONTINUED, settlement_name
from perdure.model.codec import MAX_VALUE, clean, clean_text, convert, encode, error_text
from perdure.model.process import Event, ProcessRow, SessionOrigin, Signal, WaitOn
from perdure.model.record import Begun, Done, Fault, Segment, StepFaltered, StepKind
from perdure.model.retries import Retries, read_retries
from perdure.model.session import Answer
from perdure.model.tool import Failed, Ok, OutcomeUnknown, Recovery, ToolOutcome, ToolSpec
from perdure.ports.process import EngineRun, Leaving, Unloaded
from perdure.processes.function.replay import FORKS, Open, Replay, limit_around_caller, shape, shown
from perdure.processes.function.scheduler import CANCEL, STOP, BranchStopped, FunctionBranch, Scheduler
from perdure.processes.run import Host
from perdure.tools.attempt import (
    NOT_BEGUN,
    Again,
    AttemptEnd,
    AttemptVerdict,
    AwaitAnswer,
    Conclude,
    EndCall,
    Leave,
    NotBegun,
    StopCause,
    TryAgain,
    Withdraw,
    cut_off,
    needs_of,
    next_need,
    settle,
)
from perdure.tools.context import CallHost, ToolContext
from perdure.tools.define import Tool, returns_codec
from perdure.tools.invoke import on_thread
from perdure.tools.revive import ValueCodec, revived
from perdure.tools.revive import shown as shown_type

log = logging.getLogger("perdure.processes")

FIRST = "1"
"""The key of a function's first call, and of the first one after a checkpoint."""
TIME_LIMIT = "time_limit_around"
NO_TIME_LIMIT = (
    "cannot be kept to: on replay it would not have happened. The call was not made: use its own `timeout=`, or "
    "`ctx.any(work(), ctx.sleep(seconds))`"
)
ONE_ATTEMPT = Retries(attempts=1)
BROKEN = (Fenced, StoreError, Diverged, NotRevived, InternalError)
"""Errors that no function can handle, and that no replay would repeat: they unload the process."""
MAX_TEXT = 16_000
"""Characters of an error that are kept."""

DIED = "its worker died before its end was written"

ATOMS: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, type(len), type(lambda: None)}
    | {datetime.date, datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID}
)
"""Types whose objects cannot change."""

_NO_SCHEMA: dict[str, Any] = {}
MAX_TRACEBACK = 4_000
"""Characters. The innermost calls are at the end, so the end is what is kept."""
_OURS = str(Path(__file__).parents[2])


class HasCalls(Protocol):
    @property
    def _calls(self) -> Calls: ...


C = TypeVar("C", bound=HasCalls)
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


def recorded(
    method: Callable[Concatenate[C, FunctionBranch, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[C, P], Coroutine[object, None, R]]:
    """Make a call of the context of a method that takes the branch which makes it, as its first argument.

    Only a branch may make a call, and none while the process is unloaded. What no function can handle goes past its
    code, as `Unloaded`.
    """

    @functools.wraps(method)
    async def called(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        scheduler = self._calls.scheduler
        branch = scheduler.enter_call()
        if branch is None:
            await scheduler.refuse_call()
        try:
            return await method(self, branch, *args, **kwargs)
        except BranchStopped:
            raise
        except asyncio.CancelledError:
            raise scheduler.interrupted() from None
        except BROKEN as error:
            raise scheduler.fail(error) from error
        finally:
            scheduler.leave_call(branch)

    signature = inspect.signature(method)
    shown_to_users = [each for each in signature.parameters.values() if each.name != "branch"]
    called.__dict__["__signature__"] = signature.replace(parameters=shown_to_users)
    return called


class Calls:
    """One run of one process in this worker, as its calls see it.

    `interrupted` counts the workers that died since the newest record: what was in flight then may have been attempted
    before. `stopped_unknown`: a cancel request stopped a step that had begun. `segment` is the last checkpoint.
    `secret` is the store's, which seeds the randomness of branches.
    """

    def __init__(  # noqa: PLR0913  # the parts of one run, made in one place
        self,
        run: EngineRun,
        row: ProcessRow,
        replay: Replay,
        scheduler: Scheduler,
        host: Host,
        secret: bytes,
        warn_of_default: Callable[[ProcessRow], None],
    ) -> None:
        self.run, self.row, self.journal = run, row, run.journal
        self.replay, self.scheduler, self.host, self.clock = replay, scheduler, host, host.clock
        self.secret, self._warn_of_default = secret, warn_of_default
        self.step_recovery = row.registration.step_recovery
        self.segment: Segment = replay.segment
        self.interrupted = row.takeovers
        self.stopped_unknown = False
        # The first call since the function began: every replay from a checkpoint begins with it.
        self._first: tuple[StepKind, str] | None = None
        origin = row.registration.origin
        self.process_id, self.session_id = row.id, origin.session_id if isinstance(origin, SessionOrigin) else None

    def unique(self, key: str) -> str:
        """A key that no other call of this process has: keys begin anew with every segment."""
        number = self.segment.number
        return f"s{number}.{key}" if number else key

    def note_default(self) -> None:
        """Warn of the former default if a step without a recovery of its own follows it."""
        if self.step_recovery == "once":
            self._warn_of_default(self.row)

    # ------------------------------------------------------------------ answers

    async def answer(self, branch: FunctionBranch, key: str, kind: StepKind, name: str, asked: str) -> Done | None:
        """How this call ended before, if it did, or that it is refused. A call that was stopped is stopped again."""
        if key == FIRST:
            self.check_first(branch, kind, name)
        if self.scheduler.replaying:
            done = await self.scheduler.replayed(branch, key, kind, name, asked)
        else:
            done = None if self.replay.over else self.replay.answer(key, kind, name, asked)
        if done is None:
            if kind not in FORKS:  # of a fork, the calls of its branches count
                branch.made_unrecorded()
            if self.scheduler.replaying or branch.pending:
                return None  # it is held, or stopped, before it is made
            limit = await limit_around_caller()
            if limit is not None:
                self.replay.left_open(key, kind, name, asked)  # older code may have begun it
                fault = Fault(TIME_LIMIT, f"{limit} {NO_TIME_LIMIT}")
                done = Done(key, kind, name, asked, fault=fault, at=self.clock.now())
                await self.scheduler.deliver(branch, done)
        elif done.cut:
            branch.replay_stop(done.dropped)
            self.raise_stopped(done)
        return done

    def check_first(self, branch: FunctionBranch, kind: StepKind, name: str) -> None:
        """Refuse a call after a checkpoint that is not the one the function begins with: no replay would make it there.

        Arguments are not compared: they may come from the state. A checkpoint leaves nothing for a replay to find.
        """
        asked = (kind, "" if kind in ("result", "stop") else name)  # of these, the name is an argument
        if self._first is None:
            self._first = asked
        elif asked != self._first and kind != "checkpoint":
            branch.begin_anew()  # it was not made: the next one is the first
            raise MisplacedCheckpoint(shown(*self._first, ""), shown(*asked, ""))

    def refused(self, key: str, kind: StepKind, name: str, asked: str, error: PerdureError) -> Done:
        """A call that could not be made. It is recorded: every replay raises the same, whatever changes outside."""
        fault = Fault(error.code, clean_text(error_text(error)))
        return Done(key, kind, name, asked, fault=fault, at=self.clock.now())

    # ------------------------------------------------------------------ waits

    def begin_wait(self, on: WaitOn, kind: StepKind, asked: str, seconds: float | None) -> WaitOn:
        """A wait that begins now, or that began in an earlier run: its time counts from the first beginning."""
        before = self.replay.left_open(on.key, kind, on.name, asked)
        if before is not None and before.begun is not None:
            return replace(on, due=before.begun.due, since=before.begun.at)
        now = self.host.skew.measure()  # a clock jump that was not noticed yet came before this wait, not after it
        due = None if seconds is None else now + math.ceil(seconds * 1000)
        self.scheduler.record(Begun(on.key, kind, on.name, asked, due, at=now))
        return replace(on, due=due, since=now)

    async def wait(
        self, branch: FunctionBranch, kind: StepKind, asked: str, on: WaitOn, name: str | None = None
    ) -> Any:
        """What a wait brought; None when its time was up. A branch that is stopped meanwhile takes nothing."""
        called = on.name if name is None else name
        await self.check_stop(branch, on.key, kind, called, asked)
        found = await self.scheduler.wait(on)
        if branch.pending and isinstance(found, Signal):
            self.scheduler.waits.add_signal(found)
        await self.check_stop(branch, on.key, kind, called, asked)
        return None if found is STOP else found

    # ------------------------------------------------------------------ segments

    async def begin_segment(self, state: Any, args: dict[str, Any] | None) -> Segment:
        """Keep `state`, or begin with other arguments, and forget what was recorded so far."""
        before, scheduler = self.segment, self.scheduler
        kept, taken = scheduler.waits.kept_signals(), scheduler.taken
        floor = kept[0] - 1 if kept else self.journal.read_to
        still = tuple(sorted(each for each in taken if each > floor))
        number, now, stopped = before.number + 1, self.clock.now(), CANCEL in scheduler.root.delivered
        args = before.args if args is None else args
        segment = Segment(number, state, args, floor, still, stopped, now, ordered=True)
        await self.journal.cut(segment, Event(CONTINUED, {"segment": number}, now))
        self.segment = segment
        taken.intersection_update(still)
        return segment

    # ------------------------------------------------------------------ stops

    async def check_stop(self, branch: FunctionBranch, key: str, kind: StepKind, name: str, asked: str) -> None:
        """Stop a branch that was asked to, at this call, which is the first that no record answers."""
        if branch.pending:
            dropped = branch.deliver_stop()
            done = Done(key, kind, name, asked, cut=True, dropped=dropped, at=self.clock.now())
            await self.scheduler.deliver(branch, done)
            raise BranchStopped(f"process {self.process_id} was asked to end")

    def raise_stopped(self, done: Done) -> None:
        self.stopped_unknown = self.stopped_unknown or (done.unknown is not None and not done.dropped)
        raise BranchStopped(f"process {self.process_id} was asked to end")


def answered(done: Done) -> Any:
    """What a recorded call returns, or raises, at its line."""
    if done.unknown is not None:
        raise UnknownOutcome(done.name, done.unknown)
    fault = done.fault
    if fault is None:
        return done.value
    if done.kind == "result" and fault.code == UnknownProcess.code:
        raise UnknownProcess(done.name)
    what = done.name if done.kind == "step" else f"{done.kind} {done.name}".rstrip()
    raise StepFailed(what, fault.code, fault.message, fault.data, fault.traceback)


class Call(Generic[R_co]):
    """A function with its arguments, which a type checker has seen: `ctx.step(call(fetch, day), retries=3)`."""

    __slots__ = ("args", "fn", "kwargs")

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs

    def __repr__(self) -> str:
        return f"<call {getattr(self.fn, '__name__', self.fn)}({shape(self.args, self.kwargs)})>"


@overload
def call(fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...
@overload
def call(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...
def call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call[Any]:
    """A function with its arguments, to be made as a step with options: `ctx.step(call(fetch, day), retries=3)`."""
    if not callable(fn):
        raise InvalidInput(f"a step is a function and its arguments, not {fn!r}")
    return Call(fn, args, kwargs)


class StepOptions(Struct, frozen=True):
    """Options of one call of `ctx.step`. An option that is None comes from the tool, or has its default."""

    name: str | None = None
    recovery: Recovery | None = None
    retries: int | Retries | None = None
    timeout: float | None = None


class StepCall(Struct, frozen=True):
    """One step as it was asked for. `contract` is that of its tool with the options of the call; a plain function has
    one, too. Its limits hold for steps as for calls in turns. `codec` stores what it returns and brings it back, by the
    annotation of its function; `refusal` says why there is none.

    `reruns`: it may be done again after a crash. `sees_key`: its function is given a tool's context, and with it the
    idempotency key. `changes`: its arguments are objects that may change. `declares_recovery`: the call or its tool
    names the recovery, so that it is not the default.
    """

    key: str
    name: str
    asked: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    contract: ToolSpec
    retries: Retries
    reruns: bool
    changes: bool
    sees_key: bool = False
    needs: Needs = ()
    codec: ValueCodec | None = None
    refusal: InvalidDefinition | None = None
    declares_recovery: bool = True

    def as_begun(self, begun: Begun) -> StepCall:
        """Return the step with the recovery that the record of its start says, where the code declares none.

        An attempt that may be repeated has a `life` in its record, and any other one has none.
        """
        if self.declares_recovery or begun.life:
            return self
        contract = msgspec.structs.replace(self.contract, recovery="once")
        return msgspec.structs.replace(self, reruns=False, contract=contract)

    def returned(self, process_id: str, done: Done) -> Any:
        """What the recorded step returns, or raises, at its line. Raises NotRevived when the annotation of its function
        is another one than it was, and the record does not fit it."""
        value = answered(done)
        if self.refusal is not None:
            raise NotRevived(f"process {process_id!r} at {self.key}", f"step {self.name}", str(self.refusal))
        return revived(self.codec, value, f"process {process_id!r} at {self.key}", f"step {self.name}")

    def with_copies(self, deps: Any) -> StepCall:
        """The same step with arguments of its own. `deps` are live, whatever they are made of."""
        memo = {id(deps): deps}
        args, kwargs = copied(self.args, memo), copied(dict(self.kwargs), memo)
        return msgspec.structs.replace(self, args=args, kwargs=kwargs)


class StepAttempt(Struct, frozen=True):
    """One attempt of a step, whose first one started in `store`. `attempts` is its number; `repeated` of those before
    it were made because a crash left the one before unknown. `settled` is the number of the signal by which a person
    had it made. A step neither defers nor goes to the background."""

    attempts: int = 1
    repeated: int = 0
    store: str = ""
    started: bool = True
    deferred: bool = False
    background: bool = False
    settled: int | None = None

    @property
    def failures(self) -> int:
        """How many attempts have failed if this one does: what a crash cut off has not."""
        return self.attempts - self.repeated

    def after_failure(self) -> StepAttempt:
        return StepAttempt(self.attempts + 1, self.repeated, self.store, settled=self.settled)


class BodyEnd(Struct, frozen=True):
    """How a body ended, and why it was stopped, if it was. `fault` is a failure as a step records it, with its
    traceback."""

    end: AttemptEnd
    fault: Fault | None = None
    stop: StopCause | None = None


class StepRun:
    """One step that no record answers, from its first attempt in this run to its result.

    `_began`: the body of the attempt at hand may have had an effect. `_on_thread`: it runs, or ran, on a thread, which
    releases its places itself at its end, however long after the step was left.
    """

    __slots__ = (
        "_began",
        "_branch",
        "_calls",
        "_clock",
        "_failed_since",
        "_host",
        "_needs",
        "_on_thread",
        "_progress",
        "_step",
    )

    def __init__(self, calls: Calls, branch: FunctionBranch, step: StepCall, progress: Callable[[Any], None]) -> None:
        self._calls, self._branch, self._progress = calls, branch, progress
        self._host, self._clock = calls.host, calls.clock
        # Copied before anything is awaited: another branch may change the arguments while this one waits.
        self._step = step.with_copies(calls.run.deps) if step.changes else step
        function = step.fn.fn if isinstance(step.fn, Tool) else step.fn
        self._needs = self._host.thread_places.needs(step.needs, not inspect.iscoroutinefunction(function))
        self._began = self._on_thread = False
        self._failed_since: int | None = None

    async def run(self) -> Any:
        calls, branch, step = self._calls, self._branch, self._step
        before = None if calls.replay.over else calls.replay.left_open(step.key, "step", step.name, step.asked)
        if before is not None and before.begun is not None:
            step = self._step = step.as_begun(before.begun)
        # A step that may be repeated leaves no record when it begins: if it is the first call that no record answers,
        # every worker that died since may have made it.
        lost = calls.interrupted if step.reruns and branch.unrecorded == 1 else 0
        if before is None:
            attempt = StepAttempt(1 + lost, lost, self._host.store.identity())
        else:
            resumed = self._attempt_after(before, lost)
            if resumed is None:
                assert before.begun is not None
                resumed = await self._settled(before.begun)
            if isinstance(resumed, Done):
                return await self._end(resumed)
            attempt, self._failed_since = resumed, before.since
            if before.faltered is not None:
                await self._pause(before.faltered.due, before.faltered.at)
        while True:
            if not calls.run.placed:
                await self._place()
            if branch.pending:
                if attempt.repeated:  # what a dead worker did of it may have had its effect
                    dropped = branch.deliver_stop()
                    return await self._end(self._unknown(DIED, attempt.attempts - 1, cut=True, dropped=dropped))
                await calls.check_stop(branch, step.key, "step", step.name, step.asked)
            if self._needs and not await self._take_place():
                continue  # asked to stop meanwhile
            self._began = self._on_thread = False
            ended = await self._attempt(attempt)
            if isinstance(ended, Done):
                return await self._end(ended)
            await self._pause(ended, self._clock.now())
            attempt = attempt.after_failure()

    def _attempt_after(self, before: Open, lost: int) -> StepAttempt | Done | None:
        """Return the attempt that follows the recorded ones, or how the step ends if it may not be made again. None if
        a person has to say what became of the last attempt."""
        begun = before.begun
        repeated, store = (0, "") if begun is None else (begun.repeated, begun.store)
        if before.faltered is not None:
            return StepAttempt(before.faltered.attempt + 1, repeated, store)
        assert begun is not None
        match next_need(StepAttempt(begun.attempt, repeated), self._step.contract):
            case Conclude():
                return self._unknown(DIED, begun.attempt)
            case AwaitAnswer():
                return None
            case _:
                pass  # it may be made again
        lost = max(self._calls.row.attempts - begun.life if begun.life else lost, 1)
        return StepAttempt(begun.attempt + lost, repeated + lost, store)

    async def _settled(self, begun: Begun) -> StepAttempt | Done:
        """Wait, parked, until a person has said what became of the attempt that a crash cut off.

        Returns the next attempt, or how the step ends. A settlement that cannot be used is logged, and another one is
        waited for.
        """
        calls, branch, step = self._calls, self._branch, self._step
        name = settlement_name(calls.unique(step.key), begun.attempt, step.name)
        on = WaitOn(step.key, "signal", name, since=self._clock.now())
        call_id = f"{calls.process_id}.{calls.unique(step.key)}"
        log.warning(
            "step %s of process %s was interrupted, and waits until a person has said what became of it: "
            "handle.settle(%r, …), or perdure settle %s",
            step.name, calls.process_id, call_id, call_id,
        )  # fmt: skip
        while True:
            found = None if branch.pending else calls.scheduler.waits.take_signal(name)
            if found is None and not branch.pending:
                found = await calls.scheduler.wait(on)
            if branch.pending or not isinstance(found, Signal):
                if isinstance(found, Signal):
                    calls.scheduler.waits.add_signal(found)
                return self._unknown(DIED, begun.attempt, cut=True, dropped=branch.deliver_stop())
            calls.scheduler.taken.add(found.sequence)
            settled = self._read_settlement(begun, found)
            if settled is not None:
                return settled

    def _read_settlement(self, begun: Begun, signal: Signal) -> StepAttempt | Done | None:
        """Return what a settlement makes of the step. None if the value does not fit the annotation of its function."""
        step, answer, event = self._step, convert(signal.payload, Answer), signal.sequence
        if answer.verdict == "rerun":
            return StepAttempt(begun.attempt + 1, begun.repeated + 1, begun.store, settled=event)
        ended = functools.partial(
            Done, step.key, "step", step.name, step.asked, attempts=begun.attempt, repeated=begun.repeated,
            event=event, at=self._clock.now(),
        )  # fmt: skip
        if answer.verdict == "failed":
            return ended(fault=Fault("settled_as_failed", answer.reason or "settled as failed", answer.value))
        done = ended(value=answer.value)
        try:
            step.returned(self._calls.process_id, done)
        except NotRevived as error:
            log.error("the settlement of step %s is not used, settle it again: %s", step.name, error)
            return None
        return done

    def _unknown(self, why: str, attempts: int, **how: Any) -> Done:
        return Done(self._step.key, "step", self._step.name, self._step.asked, unknown=why, attempts=attempts, **how)

    async def _pause(self, due: int, since: int) -> None:
        step = self._step
        on = WaitOn(step.key, "time", due=due, since=since)
        await self._calls.wait(self._branch, "step", step.asked, on, step.name)

    async def _end(self, done: Done) -> Done:
        await self._calls.scheduler.deliver(self._branch, done)
        if done.cut:
            self._calls.raise_stopped(done)
        return done

    async def _place(self) -> None:
        """Wait for a place of the worker; a stop ends the wait."""
        try:
            await self._branch.control.guard(self._calls.run.place())
        except TurnCancelled:
            return
        except Leaving:
            raise Unloaded from None

    async def _take_place(self) -> bool:
        """Wait until the limits of its tool leave room; False when the branch is asked to stop before.

        A branch gives up the worker's place while it waits for one of its tool, and does not wait for the worker's once
        it has that: holding one while waiting for the other could deadlock.
        """
        admission, needs, scheduler = self._host.admission, self._needs, self._calls.scheduler
        if admission.try_take(needs):
            return True
        try:
            await self._branch.control.guard(scheduler.waits.queue(functools.partial(admission.take, needs)))
        except TurnCancelled:
            return False
        except Leaving:
            raise Unloaded from None
        if scheduler.unloaded:
            admission.release(needs)
            raise Unloaded
        return True

    async def _attempt(self, attempt: StepAttempt) -> Done | int:
        """One attempt, in the place that it holds: how the step ended, or when the next attempt is due.

        Its start is written before it if it may not be repeated, or sees its idempotency key, which every attempt must
        find as the first one had it. Otherwise the row tells how many workers died without a new record. Beside other
        branches, whose records hide that, and after a failure, whose record is there anyway, it is written too.
        """
        step, host, calls = self._step, self._host, self._calls
        repeats = attempt.repeated > 0
        recorded = not step.reruns or step.sees_key or attempt.attempts - attempt.repeated > 1
        recorded = recorded or (repeats and not calls.scheduler.has_one_branch)
        try:
            if recorded:
                self._record_begun(attempt, repeats)
            await calls.run.begin()
            began = self._clock.monotonic()
            ended = await self._run_body(attempt)
        finally:
            if self._needs and not self._on_thread:
                host.admission.release(self._needs)
        end, now = ended.end, self._clock.now()
        since = self._failed_since or now
        over = isinstance(end, Again) and is_over(step.retries, end.after, now, since)
        verdict = settle(end, attempt, step.contract, ended.stop, room=not over)
        match verdict:
            case TryAgain(failed, after):
                if not recorded:
                    self._record_begun(attempt)  # the attempt that `_retry_at` says has failed
                return self._retry_at(ended.fault or Fault(failed.code, failed.message), after, attempt)
            case EndCall(outcome) if ended.stop is not StopCause.LEFT:
                return self._done(attempt, outcome, ended, began)
            case Withdraw() if ended.stop is StopCause.CANCELLED:
                # This attempt did nothing; what a dead worker did of the one before may have had its effect.
                return self._done(attempt, OutcomeUnknown(DIED) if repeats else None, ended, began)
        self._leave(attempt, verdict, recorded)
        raise Unloaded

    def _done(self, attempt: StepAttempt, outcome: ToolOutcome | None, ended: BodyEnd, began: float) -> Done:
        stopped = ended.stop is StopCause.CANCELLED
        return Done(
            self._step.key,
            "step",
            self._step.name,
            self._step.asked,
            value=outcome.value if isinstance(outcome, Ok) else None,
            fault=ended.fault if isinstance(outcome, Failed) else None,
            unknown=outcome.reason if isinstance(outcome, OutcomeUnknown) else None,
            cut=stopped,
            dropped=stopped and self._branch.deliver_stop(),
            attempts=attempt.attempts,
            repeated=attempt.repeated,
            event=attempt.settled,
            ms=round((self._clock.monotonic() - began) * 1000),
            at=self._clock.now(),
        )

    def _record_begun(self, attempt: StepAttempt, repeats: bool = False) -> None:
        step, now = self._step, self._clock.now()
        life = self._calls.row.attempts if step.reruns else 0
        begun = Begun(
            step.key, "step", step.name, step.asked, None, attempt.attempts, attempt.repeated, now, life, attempt.store
        )
        self._calls.scheduler.record(begun, repeats=repeats)

    async def _run_body(self, attempt: StepAttempt) -> BodyEnd:
        step, contract = self._step, self._step.contract
        # An attempt that may be followed by another must not leave its changes of the arguments to it.
        own = step.with_copies(self._calls.run.deps) if contract.retries and step.changes else step
        context = self._tool_context(attempt) if step.sees_key else None
        try:
            value = await self._branch.control.guard(self._body(own, context), contract.timeout)
            return BodyEnd(Ok(checked(value, "the result", step.codec)))
        except (TurnCancelled, Leaving, OutOfTime) as stop:
            if context is not None:
                context.mark_cancelled()  # for a body on a thread, which goes on
            if isinstance(stop, OutOfTime):
                return BodyEnd(cut_off(contract.recovery, f"it did not end within {contract.timeout:g} s", True))
            cancelled = isinstance(stop, TurnCancelled)
            unknown = OutcomeUnknown(f"{'it was cancelled' if cancelled else 'the runtime was left'} while it ran")
            cause = StopCause.CANCELLED if cancelled else StopCause.LEFT
            return BodyEnd(unknown if self._began else NotBegun(), stop=cause)
        except SelfCancelled:
            return self._failed(Fault("raised", "CancelledError: the step cancelled itself"), again=False)
        except Retry as retry:
            return self._failed(self._fault(retry), again=True, after=retry.after)
        except ToolError as error:
            return self._failed(self._fault(error), again=self._is_retried(error, False))
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise  # not by the step: its task is ended, or everything is
        except BaseException as error:
            # A step may raise anything. Unlike a tool that a model calls, it is tried again without asking for that:
            # its function says how often, and handles the fault.
            return self._failed(self._fault(error), again=self._is_retried(error, True))

    def _is_retried(self, error: BaseException, usual: bool) -> bool:
        return is_retried(self._step.retries, error, usual)

    async def _body(self, step: StepCall, context: ToolContext[Any] | None) -> Any:
        self._began = True
        fn, kwargs = step.fn, dict(step.kwargs)
        if isinstance(fn, Tool):
            if context is not None and fn.context_parameter is not None:
                kwargs.setdefault(fn.context_parameter, context)
            fn = fn.fn
        if inspect.iscoroutinefunction(fn):
            return await fn(*step.args, **kwargs)
        self._on_thread = True
        place = self._host.thread_places.begin(f"{self._calls.process_id} {step.key}", self._needs)
        ended = functools.partial(place.end_from_thread, asyncio.get_running_loop())
        try:
            with on_thread_of(place):
                return await on_thread(functools.partial(fn, *step.args, **kwargs), self._host.threads, ended, grace=0)
        finally:
            place.leave()

    def _failed(self, fault: Fault, again: bool, after: float | None = None) -> BodyEnd:
        failed = Failed(fault.code, fault.message, fault.data)
        return BodyEnd(Again(failed, after, failed) if again else failed, fault)

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

    def _retry_at(self, fault: Fault, after: float | None, attempt: StepAttempt) -> int:
        """Record a failed attempt and when the next one is due."""
        now = self._clock.now()
        since = self._failed_since = self._failed_since or now
        due = next_due(self._step.retries, attempt.failures, after, now, since, self._host.random) or now
        failed = StepFaltered(self._step.key, fault.code, fault.message, due, attempt.attempts, now, fault.traceback)
        self._calls.scheduler.record(failed)
        return due

    def _leave(self, attempt: StepAttempt, verdict: AttemptVerdict, recorded: bool) -> None:
        """The Runtime is left while a step runs, or just before: the next worker must know which."""
        step, scheduler, now = self._step, self._calls.scheduler, self._clock.now()
        match verdict:
            case Withdraw() if recorded:
                code, message = NOT_BEGUN.code, NOT_BEGUN.message
                scheduler.record(StepFaltered(step.key, code, message, now, attempt.attempts - 1, now))
            case Leave() if not recorded:
                self._record_begun(attempt)
            case EndCall(OutcomeUnknown(reason)):
                scheduler.record(self._unknown(reason, attempt.attempts, at=now))
            case _:
                pass  # the records on disk are enough

    def _tool_context(self, attempt: StepAttempt) -> ToolContext[Any]:
        calls = self._calls
        return ToolContext(
            session_id=calls.session_id or "",
            call_id=f"{calls.process_id}.{calls.unique(self._step.key)}",
            tool=self._step.name,
            attempt=attempt.attempts,
            generation=calls.run.scope.generation,
            deps=self._calls.run.deps,
            host=StepCallHost(self._progress),
            store=attempt.store,
            metadata=current_metadata(),
        )


class StepCallHost(CallHost):
    """What the context of a tool can reach that runs as a step: progress, which is that of its process."""

    def __init__(self, progress: Callable[[Any], None]) -> None:
        self._progress = progress

    def progress(self, value: Any) -> None:
        self._progress(value)


def read_step(
    key: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: StepOptions,
    default: Recovery,
) -> StepCall:
    """Return a step with its options: those of the call, then those of its tool, then the defaults.

    `default` is the recovery of a step whose call and function declare none.
    """
    if not callable(fn):
        raise InvalidInput(f"a step is a function and its arguments, not {fn!r}")
    spec = fn.spec if isinstance(fn, Tool) else None
    declared = options.recovery if spec is None or options.recovery is not None else spec.recovery
    if declared not in (None, "once", "rerun", "ask"):
        raise InvalidInput(f"recovery={declared!r} is not usable for a step: say recovery='rerun', 'once' or 'ask'")
    recovery = default if declared is None else declared
    given = options.retries
    own = fn.retries if isinstance(fn, Tool) else ONE_ATTEMPT
    retries = own if given is None else read_retries(given, "retries", InvalidInput)
    timeout = options.timeout if options.timeout is not None else spec.timeout if spec is not None else None
    if timeout is not None and (type(timeout) not in (int, float) or not timeout > 0):
        raise InvalidInput(f"timeout={timeout!r} is not usable: give seconds, more than 0")
    name = clean_text(
        options.name or (spec.name if spec is not None else str(getattr(fn, "__name__", type(fn).__name__)))
    )
    asked, reruns, codec, refusal = shape(args, kwargs), recovery == "rerun", None, None
    try:
        codec = returns_codec(fn, f"step {name}")
    except InvalidDefinition as error:  # of one that is recorded already, another worker may know more
        refusal = error
    if spec is None:
        contract = ToolSpec(name, input_schema=_NO_SCHEMA, recovery=recovery, retries=retries.more, timeout=timeout)
    else:
        contract = msgspec.structs.replace(spec, recovery=recovery, retries=retries.more, timeout=timeout)
    return StepCall(
        key,
        name,
        asked,
        fn,
        args,
        kwargs,
        contract,
        retries,
        reruns,
        changes=bool(kwargs) or not all(type(each) in ATOMS for each in args),
        sees_key=isinstance(fn, Tool) and fn.context_parameter is not None,
        needs=() if spec is None else needs_of(spec),  # those of the tool, whatever the step is called
        codec=codec,
        refusal=refusal,
        declares_recovery=declared is not None,
    )


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


def checked(value: Any, what: str, codec: ValueCodec | None) -> Any:
    """A result as JSON, from which its annotation will bring it back: on the first run too, so that no replay differs.

    A value that does not fit goes into the record of the failure.
    """
    try:
        plain = clean(value) if codec is None else codec.store(value)
    except InvalidInput as error:
        raise ToolError(str(error), code="invalid_output") from None
    except ValueError as error:
        assert codec is not None
        text = f"{what} does not fit its annotation {shown_type(codec.kind)}: {error}"
        raise ToolError(text, code="invalid_output", data=value) from None
    if type(plain) in (dict, list, str):
        size = len(encode(plain))
        if size > MAX_VALUE:
            raise ToolError(f"{what} has {size:,} bytes, the limit is {MAX_VALUE:,}", code="output_too_large")
    return plain


def described(error: BaseException) -> str:
    """The type and text of an exception, as far as a record has room for it."""
    text = f"{type(error).__name__}: {error_text(error)}"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"


def log_raised(what: str, error: BaseException) -> None:
    """Log that code of the host's raised, with its traceback."""
    whole = _whole(error)
    if clean_text(whole) == whole:
        log.warning("%s", what, exc_info=error)
    else:  # no file takes this text as it is, and the line would be lost
        log.warning("%s\n%s", what, clean_text(whole))


def traceback_text(error: BaseException) -> str:
    """The traceback of an exception that was raised, as a record keeps it; "" for one that was not raised."""
    text = clean_text(_whole(error)) if error.__traceback__ is not None else ""
    if len(text) <= MAX_TRACEBACK:
        return text
    return f"… (the last {MAX_TRACEBACK:,} of {len(text):,} characters)\n{text[-MAX_TRACEBACK:]}"


def _whole(error: BaseException) -> str:
    try:
        whole = traceback.TracebackException.from_exception(error)
        _leave_out_ours(whole, set())
        return "".join(whole.format()).strip()
    except Exception:  # code of the exception's own runs here; its type and text are recorded beside this
        return ""


def _leave_out_ours(whole: traceback.TracebackException, seen: set[int]) -> None:
    """Remove the calls inside of Perdure, unless there are no others, here and in what led to it."""
    if id(whole) in seen:
        return
    seen.add(id(whole))
    theirs = [frame for frame in whole.stack if not frame.filename.startswith(_OURS)]
    if theirs:
        whole.stack = traceback.StackSummary.from_list(theirs)
    for cause in (whole.__cause__, whole.__context__, *(getattr(whole, "exceptions", None) or ())):
        if cause is not None:
            _leave_out_ours(cause, seen)
