"""What every call of a durable function has in common: its key, its journal, its branch, and a request to end."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

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
from mainstay.lifecycle.fold import PROGRESS
from mainstay.model.codec import clean, clean_text, decode, encode, error_text
from mainstay.model.process import Event, ProcessRow, SessionOrigin, WaitOn
from mainstay.model.step import Begun, Done, Fault, Segment, StepKind
from mainstay.processes.branch import Branch, Cut
from mainstay.processes.branches import Branches
from mainstay.processes.host import Host
from mainstay.processes.journal import ProcessJournal
from mainstay.processes.limits import AROUND_ME
from mainstay.processes.replay import Replay, shown
from mainstay.processes.waiting import CUT, Signal

C = TypeVar("C", bound="Caller")
P = ParamSpec("P")
R = TypeVar("R")

FIRST = "1"
"""The key of a function's first call, and of the first one after a checkpoint."""
TIME_LIMIT = "time_limit_around"
NO_TIME_LIMIT = (
    "cannot be kept to: on replay it would not have happened. The call was not made: use its own `timeout=`, or "
    "`ctx.any(work(), ctx.sleep(seconds))`"
)
BROKEN = (Fenced, StoreError, Diverged, InternalError)
"""Errors that no function can know what to make of, and that no replay would repeat: they go past its code."""


def call(
    method: Callable[Concatenate[C, Branch, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[C, P], Coroutine[Any, Any, R]]:
    """A call of the context: made by a branch, and by nobody while the process is put away."""

    @functools.wraps(method)
    async def called(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        branch = await self._branches.enter()
        self._order.enter(branch)
        try:
            return await method(self, branch, *args, **kwargs)
        except Cut:
            raise
        except asyncio.CancelledError:
            raise self._branches.interrupted() from None
        except BROKEN as error:
            raise self._branches.fail(error) from error
        finally:
            self._order.leave(branch)

    return called


class Caller:
    """One run of one process in this worker, seen from its calls."""

    def __init__(
        self, row: ProcessRow, journal: ProcessJournal, replay: Replay, branches: Branches, host: Host
    ) -> None:
        self._row, self._journal, self._replay, self._branches, self._host = row, journal, replay, branches, host
        self._clock, self._order = host.clock, branches.order
        self._segment: Segment = replay.segment
        # Workers that died since the newest record: what was in flight then may have been attempted before.
        self._interrupted = row.takeovers
        self._cut_unknown = False
        # The first call since the function began: every replay from a checkpoint begins with it.
        self._first: tuple[StepKind, str] | None = None
        origin = row.registration.origin
        self.process_id, self.attempt, self.deps, self.threads = row.id, row.attempts, host.deps, host.threads
        self.session_id = origin.session_id if isinstance(origin, SessionOrigin) else None

    @property
    def state(self) -> Any:
        """A copy each time: whoever changes it has to say so with a checkpoint."""
        self._branches.current()
        return decode(encode(self._segment.state))

    @property
    def cut_unknown(self) -> bool:
        """Whether a step was cut off by a cancel request, so that nobody knows how far it came."""
        return self._cut_unknown

    def progress(self, value: Any) -> None:
        """Nothing is told again of what is only replayed."""
        branch = self._branches.known()
        if branch is None or not self._replay.is_ahead(branch.key, branch.calls):
            self._journal.event(Event(PROGRESS, clean(value), self._clock.now()))

    def _place(self, key: str) -> str:
        """A key that no other call of this process has: keys begin anew with every segment."""
        number = self._segment.number
        return f"s{number}.{key}" if number else key

    # ------------------------------------------------------------------ answers

    async def _answer(self, branch: Branch, key: str, kind: StepKind, name: str, asked: str) -> Done | None:
        """How this call ended before, if it did, or that it is refused. One that was cut off is cut off again."""
        if key == FIRST:
            self._check_first(branch, kind, name)
        done = await self._order.answer(branch, key, kind, name, asked)
        if done is None:
            branch.unrecorded += 1
            if not self._order.replaying and not branch.owes and (limit := await AROUND_ME) is not None:
                self._replay.left_open(key, kind, name, asked)  # older code may have begun it
                fault = Fault(TIME_LIMIT, f"{limit} {NO_TIME_LIMIT}")
                done = Done(key, kind, name, asked, fault=fault, at=self._clock.now())
                await self._order.hand_out(branch, done)
        elif done.cut:
            branch.has_paid(done.dropped)
            self._cut_unknown = self._cut_unknown or (done.unknown is not None and not done.dropped)
            raise Cut(f"process {self.process_id} was asked to end")
        return done

    def _check_first(self, branch: Branch, kind: StepKind, name: str) -> None:
        """Refuse a call after a checkpoint that is not the one the function begins with: no replay would make it there.

        Arguments are not compared: they may come from the state. A checkpoint leaves nothing for a replay to find.
        """
        asked = (kind, "" if kind in ("result", "stop") else name)  # of these, the name is an argument
        if self._first is None:
            self._first = asked
        elif asked != self._first and kind != "checkpoint":
            branch.calls = 0  # it was not made: the next one is the first
            raise MisplacedCheckpoint(shown(*self._first, ""), shown(*asked, ""))

    def _refused(self, key: str, kind: StepKind, name: str, asked: str, error: MainstayError) -> Done:
        """A call that could not be made like this: that is what it says on every replay, whatever changes outside."""
        fault = Fault(error.code, clean_text(error_text(error)))
        return Done(key, kind, name, asked, fault=fault, at=self._clock.now())

    # ------------------------------------------------------------------ waits

    def _begun(self, on: WaitOn, kind: StepKind, asked: str, seconds: float | None) -> WaitOn:
        """A wait that begins now, or that had begun before: its time is that of the first time."""
        before = self._replay.left_open(on.key, kind, on.name, asked)
        if before is not None and before.begun is not None:
            return replace(on, due=before.begun.due, since=before.begun.at)
        now = self._host.jumps.look()  # a jump that nobody has noticed yet came before this wait, not after it
        due = None if seconds is None else now + math.ceil(seconds * 1000)
        self._order.record(Begun(on.key, kind, on.name, asked, due, at=now))
        return replace(on, due=due, since=now)

    async def _wait(self, branch: Branch, kind: StepKind, asked: str, on: WaitOn, name: str | None = None) -> Any:
        """What a wait brought; None when its time was up. A branch that is asked to end meanwhile takes nothing."""
        called = on.name if name is None else name
        await self._check_cut(branch, on.key, kind, called, asked)
        told = await self._branches.wait(on)
        if branch.owes and isinstance(told, Signal):
            self._branches.waiting.give_back(on.name, told)
        await self._check_cut(branch, on.key, kind, called, asked)
        return None if told is CUT else told

    async def _check_cut(self, branch: Branch, key: str, kind: StepKind, name: str, asked: str) -> None:
        """A branch that was asked to end pays at the call at hand, which is the first that no record answers."""
        if branch.owes:
            dropped = branch.pay()
            cut = Done(key, kind, name, asked, cut=True, dropped=dropped, at=self._clock.now())
            await self._order.hand_out(branch, cut)
            raise Cut(f"process {self.process_id} was asked to end")


def answered(done: Done) -> Any:
    """What a recorded call gives back, or raises, at its line."""
    if done.unknown is not None:
        raise OutcomeUnknown(done.name, done.unknown)
    fault = done.fault
    if fault is None:
        return done.value
    if done.kind == "result" and fault.code == UnknownProcess.code:
        raise UnknownProcess(done.name)
    what = done.name if done.kind == "step" else f"{done.kind} {done.name}".rstrip()
    raise StepFailed(what, fault.code, fault.message, fault.data, fault.traceback)
