"""One tool call of a turn in memory: how it begins, runs and ends, what its context can reach, what plugins say.

`tools/attempt.py` decides what a call needs next and what the end of an attempt means. `ActiveCall` does it for one
call of a turn: it records in the journal of the turn, and opens durable waits for answers from outside.

A wait (a person's approval, settlement or answer, or the completion of a deferred call) is a row that opens with a
write of the turn, is resolved by the first answer, and is found again after a crash by its id, which follows from the
call. `CallWaits` makes the rows and reads them; which calls wait is in the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.admission import Admission, Needs, ThreadPlaces
from perdure.engine.control import CANCEL_GRACE, Control
from perdure.engine.driver import Run
from perdure.engine.lease import Worker
from perdure.engine.retry import is_over, kept_due, next_due
from perdure.engine.waiters import CurrentWork, current_metadata, depth, on_thread_of
from perdure.engine.waits import decode_pending, sign, wait_id, whole
from perdure.errors import Fenced, InternalError, PerdureError, ProcessPruned, StoreError
from perdure.model.codec import clean, encode, model_text
from perdure.model.effect import AskedCall
from perdure.model.event import ThreadWait, ToolFinished, ToolProgress, ToolStarted
from perdure.model.message import Message
from perdure.model.outcome import PendingCall
from perdure.model.plugin import Decision
from perdure.model.record import Answered, Ended, Faltered, Slot, Started
from perdure.model.retries import Retries
from perdure.model.session import Answer, WaitRow
from perdure.model.tool import Artifact, Cancelled, Failed, Ok, OutcomeUnknown, PreparedCall, ToolOutcome, ToolSpec
from perdure.model.transcript import NEVER_RAN
from perdure.plugins.calls import withheld
from perdure.plugins.shown_args import ShownArgs
from perdure.plugins.turn import plugins_of
from perdure.ports.host import Clock, Random
from perdure.ports.services import ToolHost, TurnServices
from perdure.ports.store import OnDisk, Store
from perdure.ports.tool import Handles, HidesSecrets, Parking, WaitEnd
from perdure.tools.artifacts import SessionArtifacts
from perdure.tools.attempt import (
    BEGIN,
    GO_ON,
    NOT_SEEN,
    Again,
    AskPlugins,
    AttemptEnd,
    AwaitAnswer,
    Begin,
    CallNeed,
    Circumstances,
    Conclude,
    EndCall,
    EndsAs,
    Return,
    RunBody,
    StartProcess,
    StopCause,
    TryAgain,
    need_after,
    next_need,
    settle,
)
from perdure.tools.catalog import ToolEntry
from perdure.tools.context import CallHost, ToolContext
from perdure.tools.invoke import Interruption, Ready, Threads, checked, execute, prepared
from perdure.tools.output import AttemptResult, OutputRules, returned
from perdure.tools.waiting import BodyWaits, InputNeeded, ParkCall, PastWait, Unwound, judged

log = logging.getLogger("perdure.tools")

_decode_answer = msgspec.json.Decoder(Answer).decode
RESERVED = "its tool has not handed it over yet"
"""Why a deferred call's wait is open before its body has returned: only then may recovery run the body again."""


def completion_of(run: Run, key: str) -> str:
    """The wait for the completion of a deferred call. It outlives attempts that failed, but not a person's word to have
    the call made again: that answered it, and the next attempt has another."""
    again = [r for r in run.records if type(r) is Started and r.call == key and r.answer is not None]
    return wait_id(run.turn_id, key, "deferred", 1 + len(again))


@dataclass(slots=True, eq=False)
class CallWaits:
    """The waits of the calls of one turn. Every answer comes from the store or the turn's records.

    `opened` are rows for the next write: they and the records that lead to them are one transaction. `ends` are the
    bodies that wait for processes in memory, by their calls.
    """

    _store: Store
    _run: Run
    opened: list[WaitRow] = field(default_factory=list)
    ends: dict[str, BodyWaits] = field(default_factory=dict)

    async def flush(self, *rows: WaitRow) -> None:
        """Make what is recorded durable, and with it the waits that were opened."""
        await self._run.journal.flush((*rows, *self.take_opened()) if self.opened else rows)

    def take_opened(self) -> tuple[WaitRow, ...]:
        """The waits that the next write brings; with them goes what plugins changed on the way there."""
        if not self.opened:
            return ()
        plugins = plugins_of(self._run)
        if plugins is not None:
            plugins.note()
        opened, self.opened = self.opened, []
        return tuple(opened)

    # ------------------------------------------------------------------ rows

    def wait_id(self, key: str, kind: str) -> str:
        if kind == "deferred":
            return completion_of(self._run, key)
        if kind in ("process", "input"):
            # Each run of the body has its own: one that was started since has not waited yet.
            starts = [r for r in self._run.records if type(r) is Started and r.call == key]
            return wait_id(self._run.turn_id, key, kind, 1 + len(starts))
        # An answer about recovery stands for one attempt: about the next one a person is asked anew.
        attempt = self._run.machine.state.calls[key].attempts if kind == "recovery" else 1
        return wait_id(self._run.turn_id, key, kind, attempt)

    def pending(self, call: AskedCall, kind: Any, **told: Any) -> PendingCall:
        """What is shown to those who may answer."""
        call_id = f"{self._run.turn_id}.{call.call}"
        return PendingCall(call_id, kind, call.name, call.args, self._run.clock.now(), **told)

    def row(self, call: AskedCall, kind: str, pending: PendingCall) -> WaitRow:
        scope, name = self._run.scope, self.wait_id(call.call, kind)
        return WaitRow(name, scope.sid, scope.turn, call.call, kind, "open", pending.due, encode(pending))

    def reserved(self, call: AskedCall) -> WaitRow:
        """The wait of a deferred call: its key is durable before its body can hand it out."""
        return self.row(call, "deferred", self.pending(call, "deferred", reason=RESERVED))

    def revoked(self, call: AskedCall, kind: str) -> WaitRow:
        """The same wait, closed: from this write on the store refuses answers."""
        pending = replace(self.pending(call, kind), args={})
        return replace(self.row(call, kind, pending), state="revoked")

    # ------------------------------------------------------------------ reading

    async def known(self) -> dict[str, WaitRow]:
        """The waits of the calls without an outcome, as they are on disk: each by its id, so that the cost does not
        grow with the waits that a long session has had."""
        found = {}
        for call in list(self._run.machine.state.calls.values()):
            kinds: tuple[str, ...] = ("approval",)
            if call.started:
                kinds = ("recovery", "deferred") if call.deferred else ("recovery", "process", "input")
            if call.due and not call.started:
                kinds = (*kinds, "sleep")
            for kind in kinds:
                wait = await self._store.wait(self.wait_id(call.call, kind))
                if wait is not None and (wait := await whole(self._store, wait)) is not None:
                    found[wait.id] = await self.judged(wait) if kind == "process" else wait
        return found

    async def judged(self, wait: WaitRow) -> WaitRow:
        """A wait for processes with how it ended, if it has."""
        return await judged(self._store, self._run, wait, decode_pending(wait.body).processes)

    async def final(self) -> dict[str, WaitRow]:
        """The waits by call in a turn that ends: no answer is accepted after this.

        The store refuses answers to a cancelled turn by itself. In an aborted one, questions that are open are revoked
        first: an answer that was accepted between this read and the commit would be lost.
        """
        waits = await self.known()
        if self._run.control.request is None:
            calls = self._run.machine.state.calls
            still = [wait for wait in waits.values() if wait.state == "open"]
            if still:
                await self._run.journal.flush(tuple([self.revoked(calls[wait.call], wait.kind) for wait in still]))
                waits = await self.known()
        return {wait.call: wait for wait in sorted(waits.values(), key=lambda wait: wait.state != "open")}

    async def completed(self, call: AskedCall, last: bool) -> bool:
        """Whether a deferred call was completed while its body ran: that was acknowledged, however the body ends.

        `last`: no attempt comes after this one, so its key is revoked at once. The store decides which came first: a
        completion that comes later is refused, and not accepted where nothing would read it. A cancelled turn needs no
        revocation: the store refuses its completions.
        """
        if last and self._run.control.request is None:
            await self._run.journal.flush((self.revoked(call, "deferred"),))
        wait = await self._store.wait(self.wait_id(call.call, "deferred"))
        return wait is not None and wait.state == "resolved"

    def answer(self, call: AskedCall, wait: WaitRow, refused: str = "") -> Answer | None:
        """The answer that a wait holds; None when it ended without one. Its reason is as the filters of the session let
        it be recorded; its value passes them later.

        `refused`: the plugin that keeps the session from opening, so that it could not look at the reason.
        """
        if wait.answer is None:
            return None
        answer, plugins = _decode_answer(wait.answer), plugins_of(self._run)
        if not answer.reason or (plugins is None and not refused):
            return answer
        if plugins is None:
            return replace(answer, reason=withheld("reason", refused))
        filters = plugins.filters
        if filters is None:
            return answer
        reason = filters.value("answer", answer.reason, f"{self._run.turn_id}.{call.call}", call.name)
        return replace(answer, reason=reason)


def body_is_over(wait: WaitRow) -> bool:
    """Whether the body of a deferred call handed its completion over, or that has come: then it is not run again."""
    return wait.state != "open" or decode_pending(wait.body).reason != RESERVED


_HERE = Circumstances(here=True)
_NOT_STARTED = Failed("processes_unavailable", "nothing can be started in the background here")

OUTDATED = "what it would do is no longer what was approved, and nothing was done: call it again to have it approved"
WITHHELD = "what it said is withheld: plugins have not seen it"
"""The message of a failure after which the call is attempted again. Plugins see how the call ends; until then nothing
that it said is stored."""


class NeedsApproval(Struct, frozen=True, gc=False):
    """Plugins, or its provider, let the call run with these arguments once a person has approved it."""

    call: AskedCall
    reason: str
    approves: str = ""


class HandedOver(Struct, frozen=True, gc=False):
    """The body is over, and the completion of the call comes from outside, within `seconds` if there is a limit."""

    seconds: float | None


CallEnd: TypeAlias = AttemptResult | NeedsApproval | HandedOver | Unwound | InputNeeded
"""What the task of a call returns."""


def stop_of(control: Control) -> StopCause | None:
    """Why attempts are stopped. A cancel request goes before leaving: it ends the turn or process for good."""
    if control.request is not None:
        return StopCause.CANCELLED
    return StopCause.LEFT if control.leaving else None


class Shared(Protocol):
    """What the calls of a Runtime share; the `Dispatcher` has it.

    `running` names the tool behind each call whose body is under way. `services` makes what a tool may ask of its
    session, `handles` what it may do with processes.
    """

    @property
    def store(self) -> Store: ...

    @property
    def worker(self) -> Worker: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def random(self) -> Random: ...

    @property
    def threads(self) -> Threads: ...

    @property
    def admission(self) -> Admission: ...

    @property
    def thread_places(self) -> ThreadPlaces: ...

    def needs(self, entry: ToolEntry) -> Needs: ...

    @property
    def running(self) -> dict[str, str]: ...

    @property
    def park_after(self) -> float | None: ...

    @property
    def services(self) -> Callable[[Run], TurnServices]: ...

    @property
    def handles(self) -> Callable[[Run, str, Parking | None], Handles]: ...

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Keep a task that does not end when it is cancelled until it ends by itself."""
        ...


class ActiveCall(CallHost):
    """One call of a round in memory. Lives on the event loop, besides `progress`, which any thread may call.

    It has an outcome, or it runs (`task` carries out what it needs, until one attempt has ended; `late`: it was given
    up although it goes on), or it waits for an answer from outside (`pending` is what is asked). `asked` is the call
    with the arguments that it runs with, `ready` how it is prepared. `context` and `interruption` belong to the attempt
    under way. `answer` is how a wait ended and is not recorded yet. `hiding` shows its arguments where they hold
    secrets. `decisions` and `said` are what plugins decided and said, until a record carries it. `artifacts` were put
    by a deferred call, whose body was over before. `past` is the wait for processes that its body was unwound in.
    """

    __slots__ = (
        "_key",
        "_loop",
        "_work",
        "answer",
        "approves",
        "artifacts",
        "asked",
        "began",
        "context",
        "decisions",
        "hiding",
        "id",
        "interruption",
        "key",
        "late",
        "past",
        "pending",
        "plugins",
        "ready",
        "run",
        "said",
        "shared",
        "task",
        "waits",
    )

    def __init__(self, shared: Shared, run: Run, asked: AskedCall, waits: CallWaits) -> None:
        self.shared, self.run, self.asked, self.waits = shared, run, asked, waits
        self.plugins = None if run.hooks is None else plugins_of(run)
        self.key, self.id = asked.call, f"{run.turn_id}.{asked.call}"
        self.ready: Ready | None = None
        self.task: asyncio.Task[CallEnd] | None = None
        self.context: ToolContext[Any] | None = None
        self.interruption: Interruption | None = None
        self.pending: PendingCall | None = None
        self.answer: Answered | None = None
        self.approves = ""  # what exactly a person approved, if its provider said so
        self.began: float | None = None
        self.late = False
        self.decisions: tuple[Decision, ...] = ()
        self.hiding: ShownArgs | None = None
        self.said: tuple[Message, ...] = ()
        self.artifacts: tuple[Artifact, ...] = ()
        self.past: PastWait | None = None
        self._key: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: CurrentWork | None = None

    @property
    def spec(self) -> ToolSpec | None:
        """The contract of its tool: as it was prepared, else as the catalogue has it; None when the tool is gone."""
        if self.ready is not None:
            return self.ready.entry.spec
        entry = self.run.agent.catalog.get(self.asked.name)
        return None if entry is None else entry.spec

    def checked(self) -> Ready | Failed:
        return checked(self.run.agent.catalog, self.asked, self.id)

    # ------------------------------------------------------------------ how it begins

    def next_need(self, known: Mapping[str, WaitRow]) -> CallNeed | None:
        """What its task has to do; None when it has an outcome now, or waits for an answer. `known` are the waits that
        the turn has on disk."""
        call, run, waits = self.asked, self.run, self.waits
        held = run.held.get(call.call) if call.started else None
        if held is not None:
            self.ready = held
            return next_need(call, held.entry.spec, _HERE)
        found = self.checked()
        if isinstance(found, Ready):
            self.ready = found
        circumstances, plugins = Circumstances(), self.plugins
        if call.started and call.deferred:
            completion = known.get(waits.wait_id(call.call, "deferred"))
            if completion is not None and completion.state == "revoked":
                # Its body failed, and no record tells how: another attempt gets another key.
                self.answer = Answered("revoked")
            elif completion is not None:
                circumstances = Circumstances(completed=body_is_over(completion))
        elif call.started:
            if known:
                parked, asks = [waits.wait_id(call.call, kind) in known for kind in ("process", "input")]
                circumstances = Circumstances(parked=parked, asks=asks)
        elif not call.attempts:
            entry = run.agent.catalog.get(call.name)
            circumstances = Circumstances(
                asked=bool(known) and waits.wait_id(call.call, "approval") in known,
                # They are asked about tools that are there, before anything is said about the arguments.
                vetted=plugins is not None and plugins.vets and entry is not None and entry.fault is None,
            )
        need = next_need(call, found.entry.spec if isinstance(found, Ready) else found, circumstances)
        match need:
            case AwaitAnswer(kind, reason):
                wait = known.get(waits.wait_id(call.call, kind))
                if wait is not None and wait.state != "open":
                    return self.answered(wait)
                self._ask(kind, reason, wait)
                return None
            case Conclude(outcome):
                self.end(outcome)
                return None
            case _:
                return need

    def _ask(self, kind: Any, reason: str, wait: WaitRow | None = None, **told: Any) -> None:
        """Wait for an answer from outside; `wait` is the row of a question that was asked before."""
        if wait is not None:
            self.pending = decode_pending(wait.body)
            return
        decisions, self.decisions = self.decisions, ()
        self.pending = self.waits.pending(self.asked, kind, reason=reason, decisions=decisions, **told)
        self.waits.opened.append(self.waits.row(self.asked, kind, self.pending))

    def go_on(self, wait: WaitRow) -> CallNeed | None:
        """Its wait has ended: what its task has to do; None when it has an outcome now."""
        self.pending, self.asked = None, self.run.machine.state.calls[self.key]
        return self.answered(wait)

    def answered(self, wait: WaitRow) -> CallNeed | None:
        """Go on as the answer of a wait says, or the end of its time."""
        shown = decode_pending(wait.body)
        if wait.kind == "process":
            end: WaitEnd = "timeout" if wait.answer is None else _decode_answer(wait.answer).value
            self.past = PastWait(shown.ordinal, end)
            return self._ready_for(GO_ON)
        answer = self.waits.answer(self.asked, wait)
        if wait.kind == "input" and answer is not None and answer.verdict == "value":
            # The record of the start that follows has the fields in its payload, and who gave them.
            self.answer = Answered("value", answer.by)
            self.asked = replace(self.asked, payload={"input": answer.value, "state": shown.state})
            self.past = PastWait(0, "input")  # its body has begun before: no wait of it has this number
            return self._ready_for(GO_ON)
        # The next record of the call tells of it: the wait itself goes with the commit.
        self.answer = Answered(wait.state) if answer is None else Answered(answer.verdict, answer.by, answer.reason)
        need = need_after(answer, self.asked)
        if not isinstance(need, Begin):
            self.artifacts = shown.artifacts
            self.interruption = Interruption(over=True, acknowledged=True)
            if isinstance(need, Return):
                return need
            self.end(need.outcome)
            return None
        if not need.repeat:  # an approval is for what the person was shown, and nothing else
            self.decisions, self.approves = shown.decisions, shown.approves
            self.asked = replace(self.asked, args=shown.args, raw=None)
        return self._ready_for(need)

    def _ready_for(self, need: Begin) -> Begin | None:
        """What it needs, if it can be attempted still; otherwise it has an outcome now."""
        found = self.checked()
        if isinstance(found, Failed):
            self.end(found)
            return None
        self.ready = found
        return need

    def start(self, need: CallNeed) -> None:
        """Begin the task that does what the call needs."""
        self.task = asyncio.get_running_loop().create_task(self._carry_out(need))

    # ------------------------------------------------------------------ its task

    async def _carry_out(self, need: CallNeed) -> CallEnd:
        """Do what the call needs, to the end of one attempt.

        It wakes the round as its last step: a done callback would do so one pass of the event loop later.
        """
        try:
            if self.ready is None or self.ready.entry.hides:
                self.hiding = await self._hiding(self.asked.name)
            match need:
                case RunBody():
                    return await self._run_body()
                case AskPlugins():
                    spec = self.spec
                    assert spec is not None
                    vetted = await self.vet(self.asked, spec, self.hiding)
                    if not isinstance(vetted, tuple):
                        return vetted
                    self.asked, self.ready = vetted
                    return await self._begin()
                case Begin(repeat, goes_on):
                    return await self._begin(repeat, goes_on)
                case StartProcess():
                    return await self._register()
                case Return(outcome):
                    return await self.returned(outcome)
                case _:
                    raise InternalError(f"a {type(need).__name__} needs no task")
        finally:
            self.run.control.wake()

    async def _begin(self, repeat: bool = False, goes_on: bool = False) -> CallEnd:
        """The way to a body that did not start with its reply: due time, preparation, place, start record. One that
        goes on after a wait is prepared, and is the same attempt."""
        shared, run, call, ready = self.shared, self.run, self.asked, self.ready
        assert ready is not None
        now = shared.clock.now()
        if call.due > now:
            await shared.clock.sleep((kept_due(self.retries, call.due, now) - now) / 1000)
        store = call.store or ("" if call.attempts else run.journal.store_id())
        blobs: tuple[str, ...] = ()  # that preparation kept: the start refers to them
        if ready.entry.provider is not None and not goes_on:
            await self._sign(ready)
            context = self.open_context(ready, call.attempts + 1, store)
            found = await prepared(ready, context)
            blobs = tuple([artifact.digest for artifact in context.close()])
            if not isinstance(found, Ready):
                return AttemptResult(await self.filtered(ready.entry.spec, self._shown(ready.call.args), found))
            if found.call.ask and (self.answer is None or self.answer.verdict != "approved"):
                return NeedsApproval(call, found.call.ask, found.call.approves)
            # Where plugins asked, the person approved the arguments: these are the same, see `answered`.
            if found.call.ask and self.approves and found.call.approves != self.approves:
                return AttemptResult(Failed("approval_outdated", OUTDATED))
            ready = self.ready = found
        spec = ready.entry.spec
        needs = () if spec.background else shared.needs(ready.entry)
        if needs and not shared.admission.try_take(needs):
            if shared.thread_places.capacity in needs and shared.thread_places.full:
                run.events.emit(ThreadWait, call_id=self.id, tool=call.name)
            await shared.admission.take(needs)
        told, self.answer = self.answer, None
        approved = told is not None and told.verdict == "approved"
        shown = self._shown(ready.call.args)
        started = Started(
            call.call,
            ready.call.args,
            call.attempts if goes_on else call.attempts + 1,
            ready.call.payload,
            {"by": told.by} if told is not None and approved else None,
            spec.deferred,
            call.repeated + repeat,
            shared.clock.now(),
            self._slot(),
            spec.background,
            None if approved else told,
            "" if call.store else store,
            None if shown is ready.call.args else shown,
        )
        try:
            run.record(started, blobs)
            await self.waits.flush(*([self.waits.reserved(call)] if spec.deferred else []))
        except BaseException:  # also a cancellation: a place that is not released is lost to all
            shared.admission.release(needs)
            raise
        return await (self._register() if spec.background else self._run_body())

    async def _run_body(self) -> CallEnd:
        """Run the body in the place that it holds; a thread holds that until it has really ended."""
        shared, run, ready = self.shared, self.run, self.ready
        assert ready is not None
        spec, tool, call = ready.entry.spec, ready.entry.tool, run.machine.state.calls[self.key]
        threaded = tool is not None and not tool.is_async
        needs = shared.needs(ready.entry) if threaded else ready.entry.needs
        try:
            if spec.deferred:
                await self._sign(ready)
            if not shared.worker.sure():
                await self._confirm_owner()
        except BaseException:  # also a cancellation
            if self.key not in run.held:  # the places of held calls are released with the turn
                shared.admission.release(needs)
            raise
        run.held.pop(self.key, None)
        context = self.context = self.open_context(ready, call.attempts, call.store)
        interruption = self.interruption = Interruption()
        shared.running[self.id], self.began = spec.name, shared.clock.monotonic()
        args = ready.call.args if self.hiding is None else self.hiding.shown(ready.call.args)
        if self.past is None:
            run.events.emit(ToolStarted, call_id=self.id, tool=call.name, args=args, attempt=call.attempts)
        timer, loop = None, asyncio.get_running_loop()
        if spec.timeout is not None:
            timer = loop.call_later(spec.timeout, self._expire, spec.timeout)
        place = shared.thread_places.begin(self.id, needs) if threaded else None
        try:
            rules = self.output_rules(spec, args)
            if place is None:
                result = await execute(ready, context, shared.threads, rules, interruption, None)
            else:
                ended = functools.partial(place.end_from_thread, loop)
                with on_thread_of(place):
                    result = await execute(ready, context, shared.threads, rules, interruption, ended)
        except ParkCall as parked:
            return parked.where
        finally:
            if place is not None:
                place.leave()
            if timer is not None:
                timer.cancel()
            shared.running.pop(self.id, None)
            if not threaded and needs:
                shared.admission.release(needs)
        if context.deferred:
            last = not isinstance(settle(result.end, call, spec, room=self._may_retry(result.end)), TryAgain)
            if isinstance(result.end, Ok) or await self.waits.completed(call, last):
                return HandedOver(context.defer_timeout)
        reviews = self.plugins is not None and self.plugins.reviews
        return await self.seen(ready, result) if reviews else result

    async def _register(self) -> AttemptResult:
        """Leave the call to the workers of processes: what it returns is a handle.

        Its start is on disk, so after a crash it is registered again, under the same id: the call's own.
        """
        call, ready = self.asked, self.ready
        if not self.shared.worker.sure():
            await self._confirm_owner()
        self.interruption = Interruption(over=True)  # a registration under way is not to be stopped half-way
        self.began = self.shared.clock.monotonic()
        args = self._shown(call.args if ready is None else ready.call.args)
        attempt = max(self.run.machine.state.calls[self.key].attempts, 1)
        self.run.events.emit(ToolStarted, call_id=self.id, tool=call.name, args=args, attempt=attempt)
        outcome = await self._registered(self.shared.handles(self.run, self.id, None))
        if isinstance(outcome, Ok):
            return await returned(outcome.value, self.output_rules(self.spec, args))
        return AttemptResult(outcome) if ready is None else await self.seen(ready, AttemptResult(outcome))

    async def _registered(self, handles: Handles) -> ToolOutcome:
        """The handle of the call's process, which exists from now on; or why there is none."""
        ready = self.ready
        if ready is None:
            # Its tool is gone. If its process was registered before, its handle is the outcome.
            found, gone = await handles.known(), self.checked()
            return Ok(found) if found is not None else gone if isinstance(gone, Failed) else _NOT_STARTED
        try:
            return Ok(await handles.begin(ready.call, ready.entry.spec))
        except ProcessPruned:  # it has ended long ago, and is not kept; it was started, and that is what is asked here
            found = await handles.known()
            return _NOT_STARTED if found is None else Ok(found)
        except StoreError:
            raise
        except PerdureError as error:
            return Failed(error.code, model_text(error))

    async def returned(self, outcome: Ok | Failed) -> AttemptResult:
        """What an answer from outside says that the call returned: it passes plugins and the budget like any output."""
        spec, plugins = self.spec, self.plugins
        self.hiding = await self._hiding(self.asked.name)
        args = self._shown(self.asked.args)
        if isinstance(outcome, Ok):
            return await returned(outcome.value, self.output_rules(spec, args))
        if plugins is None or not plugins.reviews:
            return AttemptResult(outcome)
        return AttemptResult(await self.review(ToolSpec(self.asked.name) if spec is None else spec, args, outcome))

    async def _confirm_owner(self) -> None:
        """Before anything acts: an owner that was fenced while it stood still starts nothing."""
        if not await self.shared.worker.confirm(self.run.scope):
            raise Fenced(self.run.turn_id, self.run.scope.generation)

    # ------------------------------------------------------------------ interrupting its body

    def _expire(self, seconds: float) -> None:
        self.interrupt(f"it did not end within {seconds:g} s", timed_out=True)
        # The limit ends the wait, whatever the body makes of its cancellation.
        asyncio.get_running_loop().call_later(CANCEL_GRACE, self._give_up, self.task)

    def _give_up(self, late: asyncio.Task[Any] | None) -> None:
        task, interruption = self.task, self.interruption
        if task is None or task.done() or task is not late or interruption is None:
            return  # it has ended, or another attempt is under way by now, with a time of its own
        if interruption.timed_out and not interruption.over:
            log.warning("call %s does not end when it is cancelled; it is left behind", self.id)
            self.late = True
            self.run.control.wake()

    def interrupt(self, reason: str, timed_out: bool = False) -> None:
        """Cancel its task, unless the body is over."""
        task, interruption = self.task, self.interruption
        if task is None or task.done() or (interruption is not None and interruption.over):
            return
        if interruption is not None:
            interruption.because(reason, timed_out)
        if self.context is not None:
            self.context.mark_cancelled()
        task.cancel()

    # ------------------------------------------------------------------ how it ends

    def collect(self) -> None:
        """Record what the end of its task means. A failed attempt that may be repeated is: the task of the next one
        begins at once, and waits until it is due."""
        task, self.task = self.task, None
        assert task is not None
        call, control = self.run.machine.state.calls[self.key], self.run.control
        if not task.done():
            self.shared.abandon(task)
            reason = None if self.interruption is None else self.interruption.reason
            ended: CallEnd = AttemptResult(OutcomeUnknown(reason or ""))
        elif not task.cancelled():
            ended = task.result()
        # Something on the way cancelled its task: a provider's preparation, or a body in a way we did not see.
        elif call.started:
            ended = AttemptResult(OutcomeUnknown("it was cancelled while it ran"))
        else:
            ended = AttemptResult(Failed("tool_prepare_failed", "CancelledError: preparation cancelled itself"))
        match ended:
            case NeedsApproval(asked, why, approves):
                self.asked = asked
                self._ask("approval", why, approves=approves)
            case HandedOver(seconds):
                self._hand_over(seconds)
            case InputNeeded(reason, asks, state):
                self._close_context()
                self._ask("input", reason, asks=asks, state=state)
            case Unwound(ordinal, processes, due):
                self._close_context()  # and its artifacts are forgotten: only those of the last run count
                told = {"due": due, "processes": processes, "ordinal": ordinal}
                self.pending = self.waits.pending(call, "process", **told)
            case AttemptResult(end, blobs, withheld):
                stop = stop_of(control) if control.stopping else None
                spec = self.spec if self.ready is None else self.ready.entry.spec
                room = not isinstance(end, Again) or self._may_retry(end)
                verdict = settle(end, call, spec, stop, room)
                if isinstance(verdict, EndCall):
                    self.end(verdict.outcome, blobs, withheld)
                elif isinstance(verdict, TryAgain):
                    self._faltered(call, verdict)
                    found = self.checked()
                    if isinstance(found, Failed):
                        self.end(found)
                    else:
                        self.ready = found
                        self.start(BEGIN)

    def stopped(self, reason: str) -> None:
        """It was told to stop, and had a moment to. What it reported counts; what it did not is unknown; what never ran
        is not."""
        task, self.task = self.task, None
        ended: CallEnd | None = None
        if task is not None and not task.done():
            self.shared.abandon(task)
        elif task is not None and not task.cancelled():
            ended = task.result()
        call, stop = self.run.machine.state.calls[self.key], stop_of(self.run.control)
        if not call.started or self.key in self.run.held or isinstance(ended, NeedsApproval | Unwound):
            return
        if isinstance(ended, InputNeeded):
            if stop is StopCause.LEFT:  # else its question goes with the turn
                self._ask("input", ended.reason, asks=ended.asks, state=ended.state)
            return
        if isinstance(ended, HandedOver):
            if stop is not StopCause.LEFT:  # else it stays on the wait that it has
                self._hand_over(ended.seconds)
            return
        result = AttemptResult(OutcomeUnknown(reason)) if ended is None else ended
        verdict = settle(result.end, call, self.spec, stop, self._may_retry(result.end))
        if isinstance(verdict, EndCall):
            self.end(verdict.outcome, result.blobs, result.withheld)
        elif isinstance(verdict, TryAgain):
            self._faltered(call, verdict)

    @property
    def retries(self) -> Retries:
        """The retries of its tool; one attempt where the tool is gone."""
        entry = self.run.agent.catalog.get(self.asked.name) if self.ready is None else self.ready.entry
        return Retries(attempts=1) if entry is None else entry.retries

    def _failed_since(self, now: int) -> int:
        """Return when the first of its recorded attempts failed; `now` if none has."""
        records = self.run.records
        failed = (each.at for each in records if type(each) is Faltered and each.call == self.key and each.attempt)
        return next(failed, now)

    def _may_retry(self, end: AttemptEnd) -> bool:
        """True if the records of the turn and the time of `Retries(within=…)` leave room for another attempt."""
        if not isinstance(end, Again):
            return True
        now = self.shared.clock.now()
        return self.run.room >= 2 and not is_over(self.retries, end.after, now, self._failed_since(now))

    def _faltered(self, call: AskedCall, verdict: TryAgain) -> None:
        """Record a failed attempt, and when the next one is due."""
        run, now, failed = self.run, self.shared.clock.now(), verdict.failed
        self._close_context()  # and its artifacts are forgotten: only those of the last attempt count
        failures, since = call.attempts - call.repeated, self._failed_since(now)
        due = next_due(self.retries, failures, verdict.after, now, since, self.shared.random) or now
        step = int(call.call.partition(".")[0])
        run.record(Faltered(failed.code, failed.message, due, call.attempts, step, call.call, now, run.slot()))
        self.asked = run.machine.state.calls[self.key]

    def _hand_over(self, seconds: float | None) -> None:
        """The body of a deferred call is over: it waits for a completion under its key."""
        run, artifacts, waits = self.run, self._close_context(), self.waits
        due = None if seconds is None else run.clock.now() + int(seconds * 1000)
        self.pending = waits.pending(run.machine.state.calls[self.key], "deferred", due=due, artifacts=artifacts)
        waits.opened.append(waits.row(self.asked, "deferred", self.pending))
        run.journal.refer([artifact.digest for artifact in artifacts])

    def end(self, outcome: ToolOutcome, blobs: tuple[str, ...] = (), withheld: str = "") -> None:
        """Record how it ended."""
        shared, run, call = self.shared, self.run, self.run.machine.state.calls[self.key]
        spent = 0 if self.began is None else int((shared.clock.monotonic() - self.began) * 1000)
        artifacts, answer = self._close_context(), self.answer
        if answer is not None and answer.verdict in ("failed", "error") and answer.reason and type(outcome) is Failed:
            answer = replace(answer, reason=outcome.message)  # as plugins let it be recorded
        if answer is None and call.deferred and run.control.request is None:
            # A completion that was reserved in vain: its key is worth nothing any more. A cancel closes it by itself.
            self.waits.opened.append(self.waits.revoked(call, "deferred"))
            answer = Answered("revoked")
        self.answer = None
        slot = self._slot() if self.decisions or self.said else run.slot()
        at, blobs = shared.clock.now(), (*blobs, *[artifact.digest for artifact in artifacts])
        attempts, repeated = call.attempts, call.repeated
        run.record(Ended(call.call, outcome, attempts, repeated, spent, at, slot, artifacts, answer, withheld), blobs)
        run.events.emit(ToolFinished, call_id=self.id, tool=call.name, outcome=outcome)

    async def conclude(self, wait: WaitRow | None, refused: str) -> None:
        """The turn ends, and the call has no outcome. `wait` is what was asked about it: an answer that was
        acknowledged says how it ended; without one, the end of a call that has started is unknown."""
        call, pending = self.run.machine.state.calls[self.key], self.pending
        self.asked, self.pending = call, None
        if wait is not None:
            self.artifacts = decode_pending(wait.body).artifacts
        if pending is not None and pending.artifacts:
            self.artifacts = pending.artifacts  # handed over, and not on disk yet
        if wait is not None and wait.kind in ("process", "input"):
            if self.run.control.request is not None:
                await self.shared.handles(self.run, self.id, None).stop_own(decode_pending(wait.body).processes)
            wait = None
        if wait is None or wait.state not in ("resolved", "expired"):
            if call.started and self.key not in self.run.held:
                self.end(OutcomeUnknown(NOT_SEEN))
            return
        request, answer = self.run.control.request, self.waits.answer(call, wait, refused)
        self.answer = Answered(wait.state) if answer is None else Answered(answer.verdict, answer.by, answer.reason)
        match need_after(answer, call):
            case Begin():
                never = NEVER_RAN if request is None else Cancelled(request.by, request.reason)
                self.end(OutcomeUnknown(NOT_SEEN) if call.started else never)
            case Conclude(outcome):
                self.end(outcome)
            case Return(outcome) if refused:
                said = f"result withheld: plugin {refused!r} could not look at it"
                self.end(Ok(said) if isinstance(outcome, Ok) else Failed(outcome.code, said))
            case Return(outcome):
                result = await self.returned(outcome)
                assert not isinstance(result.end, Again)
                self.end(result.end, result.blobs, result.withheld)

    # ------------------------------------------------------------------ its context

    async def _sign(self, ready: Ready) -> None:
        """Make the key by which a deferred call is completed from outside."""
        if ready.entry.spec.deferred and self._key is None:
            self._key = sign(await self.shared.store.secret(), completion_of(self.run, self.key))

    def open_context(self, ready: Ready, attempt: int, store: str) -> ToolContext[Any]:
        """What one attempt is given, of a call whose first attempt started in `store`. The running task works for the
        call from here on."""
        run, shared, scope = self.run, self.shared, self.run.scope
        self._loop, metadata = asyncio.get_running_loop(), current_metadata()
        if self._work is not None:
            self._work.end()  # that of its preparation
        self._work = CurrentWork(shared.worker.id, (scope.session_id, scope.turn), False, depth(), metadata).begin()
        return ToolContext(
            session_id=scope.session_id,
            turn_id=run.turn_id,
            call_id=self.id,
            tool=ready.call.name,
            attempt=attempt,
            generation=scope.generation,
            deps=run.deps,
            payload=ready.call.payload,
            host=self,
            store=store,
            metadata=metadata,
        )

    def _close_context(self) -> tuple[Artifact, ...]:
        """The artifacts of a call whose body is over, or is not waited for any more. Its context takes no more.

        The reference is dropped: the context refers to this object, and a cycle would be left to the collector.
        """
        context, artifacts = self.context, self.artifacts
        self.context, self.artifacts = None, ()
        if self._work is not None:
            self._work.end()
        return artifacts if context is None else (*artifacts, *context.close())

    def progress(self, value: Any) -> None:
        plain = clean(value)
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: a thread outlived it, and nothing listens
            self._loop.call_soon_threadsafe(self._show, plain)  # plugins are called on the event loop only

    def _show(self, value: Any) -> None:
        filters, name = None if self.plugins is None else self.plugins.filters, self.asked.name
        shown = value if filters is None else filters.value("progress", value, self.id, name)
        self.run.events.emit(ToolProgress, call_id=self.id, tool=name, value=shown)

    def completion_key(self) -> str | None:
        return self._key

    def artifact_store(self) -> SessionArtifacts:
        return SessionArtifacts(self.shared.store, self.run, self.plugins, self.id, self.asked.name)

    def store_location(self) -> str | None:
        store = self.shared.store
        return store.location if isinstance(store, OnDisk) else None

    def services(self) -> ToolHost:
        return self.shared.services(self.run).for_call(self.id)

    def handles(self) -> Handles:
        spec, parking = self.spec, None
        if spec is not None and spec.recovery == "rerun" and not spec.deferred:
            parking = BodyWaits(self.shared, self.run, self.waits.ends, self.key, self.past)
        return self.shared.handles(self.run, self.id, parking)

    async def prepare(self, ctx: ToolContext[Any], name: str, args: Mapping[str, Any]) -> tuple[PreparedCall, ToolSpec]:
        """Plugins are asked about that tool, not only about the one which starts it: else it would be a way round
        them."""
        asked = AskedCall(self.key, self.asked.provider_id, name, dict(args))
        ready = checked(self.run.agent.catalog, asked, self.id)
        if isinstance(ready, Failed):
            raise EndsAs(ready)
        if self.plugins is not None and self.plugins.vets:
            vetted = await self.vet(asked, ready.entry.spec, await self._hiding(name))
            if isinstance(vetted, AttemptResult):
                raise EndsAs(vetted.end.otherwise if isinstance(vetted.end, Again) else vetted.end)
            if isinstance(vetted, NeedsApproval):
                raise EndsAs(_approval_needed(name))
            ready = vetted[1]
        if ready.entry.spec.approval == "ask":
            raise EndsAs(_approval_needed(name))
        found = await prepared(ready, ctx, anew=True)
        if not isinstance(found, Ready):
            raise EndsAs(found)
        if found.call.ask:
            raise EndsAs(_approval_needed(name))
        return found.call, found.entry.spec

    # ------------------------------------------------------------------ what plugins are shown, and say

    async def _hiding(self, name: str) -> ShownArgs | None:
        """What shows the arguments of a call of this tool, where they may hold secrets."""
        entry = self.run.agent.catalog.get(name)
        if entry is None or not isinstance(entry.provider, HidesSecrets):
            return None
        return ShownArgs(entry.provider, entry.spec, self.id, await self.shared.store.secret())

    def _shown(self, args: dict[str, Any]) -> dict[str, Any]:
        return args if self.hiding is None else self.hiding.shown(args)

    async def vet(
        self, asked: AskedCall, spec: ToolSpec, hiding: ShownArgs | None
    ) -> AttemptResult | NeedsApproval | tuple[AskedCall, Ready]:
        """How a call ends that plugins do not let begin, or whom it waits for; else the call as they left it."""
        assert self.plugins is not None
        verdict = await self.plugins.before_call(self.id, spec, asked.args, hiding)
        self.decisions = verdict.decisions
        if verdict.outcome is not None:
            args = verdict.args if hiding is None else hiding.shown(verdict.args)
            return AttemptResult(await self.filtered(spec, args, verdict.outcome))
        if verdict.args is not asked.args:
            asked = replace(asked, args=verdict.args, raw=None)
        ready = checked(self.run.agent.catalog, asked, self.id)
        if isinstance(ready, Failed):
            return AttemptResult(ready)
        if verdict.ask is not None or spec.approval == "ask":
            return NeedsApproval(asked, "the tool asks for approval" if verdict.ask is None else verdict.ask)
        return asked, ready

    async def filtered(self, spec: ToolSpec, args: dict[str, Any], outcome: ToolOutcome) -> ToolOutcome:
        """The outcome of a call whose body did not run: what plugins, providers and people say passes filters too."""
        if self.plugins is None or not self.plugins.judges:
            return outcome
        return await self.plugins.filtered(self.id, spec, args, outcome)

    async def review(self, spec: ToolSpec, args: dict[str, Any], outcome: ToolOutcome) -> ToolOutcome:
        """What plugins let be recorded of how the call ended."""
        assert self.plugins is not None
        left, said = await self.plugins.after_call(self.id, spec, args, outcome)
        self.decisions, self.said = left.decisions, said
        return left.outcome

    async def seen(self, ready: Ready, result: AttemptResult) -> AttemptResult:
        """Let plugins look at an attempt that did not return a value; one that did has passed them already."""
        end, plugins, stop = result.end, self.plugins, stop_of(self.run.control)
        if plugins is None or not plugins.reviews or isinstance(end, Ok):
            return result
        spec = ready.entry.spec
        if isinstance(end, Again):
            call = self.run.machine.state.calls[self.key]
            if isinstance(settle(end, call, spec, stop, self._may_retry(end)), TryAgain):
                if not plugins.judges or not isinstance(end.otherwise, Failed):
                    return result  # it was cut off, and said nothing
                failed = Failed(end.failed.code, WITHHELD)
                return AttemptResult(Again(failed, end.after, failed))
            end = end.otherwise
        if stop is not None and not isinstance(end, Failed):
            return result  # our own words: the body said nothing
        return AttemptResult(await self.review(spec, self._shown(ready.call.args), end), result.blobs)

    def output_rules(self, spec: ToolSpec | None, args: dict[str, Any]) -> OutputRules:
        """What a returned value passes, also when its tool is gone meanwhile: plugins, then the budget."""
        budget = (None if spec is None else spec.output_budget) or self.run.agent.output_budget
        plugins = self.plugins
        if plugins is None:
            return OutputRules(self.run.journal, budget)
        filters, name = plugins.filters, self.asked.name
        filter_file = None if filters is None else functools.partial(filters.content, "file", self.id, name)
        if not plugins.reviews:
            return OutputRules(self.run.journal, budget, filter_file=filter_file)
        spec = ToolSpec(name) if spec is None else spec
        review = functools.partial(self.review, spec, args) if plugins.judges else None
        project = functools.partial(plugins.project, self.id, spec, args) if plugins.projects else None
        return OutputRules(self.run.journal, budget, review, project, filter_file)

    def _slot(self) -> Slot | None:
        """What a record of this call carries: what the turn has gathered, and what plugins decided about the call."""
        slot, decisions, said = self.run.slot(), self.decisions, self.said
        self.decisions, self.said = (), ()
        return replace(slot or Slot(), decisions=decisions, queued=said) if decisions or said else slot


def _approval_needed(name: str) -> Failed:
    return Failed("approval_needed", f"tool {name} waits for approval: call it itself, and it will be asked for")
