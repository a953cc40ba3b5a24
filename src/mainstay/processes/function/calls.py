"""What all calls of a durable function have in common: a key, an answer from the journal, a wait, a stop.

A call's key is its number within its branch. A call that is recorded as done is answered from the record. Any other
call is made, and its result is recorded when it is delivered to its branch. What has happened is written to the store
before anything else acts outside: a step is preceded by a flush, and so are a child's start and a signal. What only
reads (the time, a wait) is written with the next thing that acts.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from msgspec.structs import replace

from mainstay.errors import (
    Diverged,
    Fenced,
    InternalError,
    MainstayError,
    MisplacedCheckpoint,
    OutcomeUnknown,
    StepFailed,
    StoreError,
    UnknownProcess,
)
from mainstay.model.codec import clean_text, error_text
from mainstay.model.process import ProcessRow, SessionOrigin, WaitOn
from mainstay.model.record import Begun, Done, Fault, Segment, StepKind
from mainstay.processes.function.replay import Replay, shown
from mainstay.processes.function.scheduler import Branch, BranchStopped, Scheduler
from mainstay.processes.function.timeouts import limit_around_caller
from mainstay.processes.function.waits import STOP, Signal
from mainstay.processes.worker.host import Host
from mainstay.processes.worker.journal import ProcessJournal

FIRST = "1"
"""The key of a function's first call, and of the first one after a checkpoint."""
TIME_LIMIT = "time_limit_around"
NO_TIME_LIMIT = (
    "cannot be kept to: on replay it would not have happened. The call was not made: use its own `timeout=`, or "
    "`ctx.any(work(), ctx.sleep(seconds))`"
)
BROKEN = (Fenced, StoreError, Diverged, InternalError)
"""Errors that no function can handle, and that no replay would repeat: they unload the process."""


class HasCalls(Protocol):
    @property
    def _calls(self) -> Calls: ...


C = TypeVar("C", bound=HasCalls)
P = ParamSpec("P")
R = TypeVar("R")


def call(
    method: Callable[Concatenate[C, Branch, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[C, P], Coroutine[Any, Any, R]]:
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
    """

    def __init__(
        self, row: ProcessRow, journal: ProcessJournal, replay: Replay, scheduler: Scheduler, host: Host
    ) -> None:
        self.row, self.journal, self.replay, self.scheduler, self.host = row, journal, replay, scheduler, host
        self.clock = host.clock
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

    # ------------------------------------------------------------------ answers

    async def answer(self, branch: Branch, key: str, kind: StepKind, name: str, asked: str) -> Done | None:
        """How this call ended before, if it did, or that it is refused. A call that was stopped is stopped again."""
        if key == FIRST:
            self.check_first(branch, kind, name)
        if self.scheduler.replaying:
            done = await self.scheduler.replayed(branch, key, kind, name, asked)
        else:
            done = None if self.replay.over else self.replay.answer(key, kind, name, asked)
        if done is None:
            branch.unrecorded += 1
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

    def check_first(self, branch: Branch, kind: StepKind, name: str) -> None:
        """Refuse a call after a checkpoint that is not the one the function begins with: no replay would make it there.

        Arguments are not compared: they may come from the state. A checkpoint leaves nothing for a replay to find.
        """
        asked = (kind, "" if kind in ("result", "stop") else name)  # of these, the name is an argument
        if self._first is None:
            self._first = asked
        elif asked != self._first and kind != "checkpoint":
            branch.calls = 0  # it was not made: the next one is the first
            raise MisplacedCheckpoint(shown(*self._first, ""), shown(*asked, ""))

    def refused(self, key: str, kind: StepKind, name: str, asked: str, error: MainstayError) -> Done:
        """A call that could not be made. It is recorded: every replay raises the same, whatever changes outside."""
        fault = Fault(error.code, clean_text(error_text(error)))
        return Done(key, kind, name, asked, fault=fault, at=self.clock.now())

    # ------------------------------------------------------------------ waits

    def begin_wait(self, on: WaitOn, kind: StepKind, asked: str, seconds: float | None) -> WaitOn:
        """A wait that begins now, or that began in an earlier run: its time counts from the first beginning."""
        before = self.replay.left_open(on.key, kind, on.name, asked)
        if before is not None and before.begun is not None:
            return replace(on, due=before.begun.due, since=before.begun.at)
        now = self.host.skew.look()  # a clock jump that was not noticed yet came before this wait, not after it
        due = None if seconds is None else now + math.ceil(seconds * 1000)
        self.scheduler.record(Begun(on.key, kind, on.name, asked, due, at=now))
        return replace(on, due=due, since=now)

    async def wait(self, branch: Branch, kind: StepKind, asked: str, on: WaitOn, name: str | None = None) -> Any:
        """What a wait brought; None when its time was up. A branch that is stopped meanwhile takes nothing."""
        called = on.name if name is None else name
        await self.check_stop(branch, on.key, kind, called, asked)
        found = await self.scheduler.wait(on)
        if branch.pending and isinstance(found, Signal):
            self.scheduler.waits.return_signal(on.name, found)
        await self.check_stop(branch, on.key, kind, called, asked)
        return None if found is STOP else found

    # ------------------------------------------------------------------ stops

    async def check_stop(self, branch: Branch, key: str, kind: StepKind, name: str, asked: str) -> None:
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
        raise OutcomeUnknown(done.name, done.unknown)
    fault = done.fault
    if fault is None:
        return done.value
    if done.kind == "result" and fault.code == UnknownProcess.code:
        raise UnknownProcess(done.name)
    what = done.name if done.kind == "step" else f"{done.kind} {done.name}".rstrip()
    raise StepFailed(what, fault.code, fault.message, fault.data, fault.traceback)
