"""Running the tool calls of turns: all calls of a reply at once, each under its recovery contract.

    Dispatcher    one per Runtime: which calls start with their reply, the threads and places that all turns share
    Round         the calls of one reply under way: begin them, record what ends, wait for answers, stop

`tools/attempt.py` decides what a call needs next and what the end of an attempt means. This module does it: it records
in the journal of the turn, waits for its calls and for what reaches the turn from outside (`engine/control.py`), and
opens durable waits (`tools/call.py`) for answers. A round ends when every call has an outcome, or parks when all that
is left waits for an answer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from mainstay.engine.admission import Admission
from mainstay.engine.control import CANCEL_GRACE
from mainstay.engine.driver import Parked, Run
from mainstay.engine.lease import Worker
from mainstay.engine.waiters import Deadlocks
from mainstay.engine.waits import decode_pending
from mainstay.errors import Fenced, InternalError, MainstayError, ProcessPruned, StoreError
from mainstay.model.codec import model_text
from mainstay.model.effect import AskedCall, RunTools
from mainstay.model.event import ToolFinished, ToolStarted, WaitingFor
from mainstay.model.message import Part
from mainstay.model.record import INTERRUPTED, Answered, Ended, Faltered, Started
from mainstay.model.session import WaitRow
from mainstay.model.tool import (
    Cancelled,
    Failed,
    Ok,
    OutcomeUnknown,
    ToolOutcome,
    ToolSpec,
)
from mainstay.model.transcript import NEVER_RAN, calls_of
from mainstay.plugins.turn import plugins_of
from mainstay.ports.host import Clock, Random
from mainstay.ports.process import Leaving
from mainstay.ports.services import TurnServices
from mainstay.ports.store import Store
from mainstay.ports.tool import Handles
from mainstay.tools.attempt import (
    NOT_SEEN,
    TOOL_RETRIES,
    Again,
    Ask,
    Begin,
    Circumstances,
    Conclude,
    EndCall,
    Interruption,
    Need,
    Return,
    RunBody,
    StartProcess,
    StopCause,
    TryAgain,
    Vet,
    need_after,
    needs_of,
    next_need,
    settle,
)
from mainstay.tools.call import ActiveCall, CallEnd, CallWaits, HandedOver, NeedsApproval, body_is_over, stop_of
from mainstay.tools.invoke import Ready, Threads, checked, execute, prepared
from mainstay.tools.output import AttemptResult, returned
from mainstay.turn.machine import Phase

log = logging.getLogger("mainstay.tools")

_HERE = Circumstances(here=True)


class Dispatcher:
    """Handles RunTools for every turn of a Runtime, and owns what all attempts of tools share.

    `running` names the tool behind each call whose body is under way; `services` makes what a tool may ask of its
    session, `handles` what it may do with processes. `_abandoned` are tasks that did not end when they were cancelled:
    nothing waits for them, and asyncio itself keeps only weak references to tasks.
    """

    def __init__(self, store: Store, worker: Worker, clock: Clock, random: Random, deps: Any) -> None:
        self.store, self.worker, self.clock, self.random, self.deps = store, worker, clock, random, deps
        self.threads = Threads()
        self.admission, self.deadlocks = Admission(), Deadlocks(worker.id)
        self.running: dict[str, str] = {}
        self.services: Callable[[Run], TurnServices] | None = None
        self.handles: Callable[[Run, str], Handles] | None = None
        self._abandoned: set[asyncio.Task[Any]] = set()

    def admit(self, run: Run, step: int, parts: Sequence[Part]) -> tuple[int, ...]:
        """Which calls of a reply start with its record: nothing to ask, nothing to wait for. Their places are taken."""
        plugins = None if run.hooks is None else plugins_of(run)
        if plugins is not None and plugins.vets:
            return ()  # plugins are asked first, and what they decide is recorded with the start
        started = []
        for index, (key, call) in enumerate(calls_of(parts, step).items()):
            asked = AskedCall(key, call.id, call.name, call.args, call.raw)
            ready = checked(run.agent.catalog, asked, f"{run.turn_id}.{key}")
            if isinstance(ready, Failed) or ready.entry.provider is not None:
                continue
            spec = ready.entry.spec
            # A background call has a start record of its own: after a crash it must be registered again.
            plain = spec.approval == "never" and not spec.deferred and not spec.background
            if plain and ((spec.limit is None and spec.resource is None) or self.admission.try_take(needs_of(spec))):
                run.held[key] = ready
                started.append(index)
        return tuple(started)

    async def run(self, run: Run, effect: RunTools) -> Parked | None:
        calls = Round(self, run, effect.calls)
        try:
            return await calls.go()
        finally:
            # Whatever ended the round, no body of it goes on: a fenced owner must not act any more.
            for active in calls.running.values():
                if active.task is not None:
                    active.task.cancel()

    async def conclude(self, run: Run, refused: str = "") -> None:
        """The turn is cancelled or aborted: record how its calls without an outcome end."""
        state = run.machine.state
        if state.calls and state.phase is Phase.TOOLS:
            await Round(self, run, tuple(state.calls.values())).conclude(refused)

    def withdraw(self, run: Run) -> None:
        """The Runtime is left before calls began whose start is in their reply's record: record that they did not."""
        now = self.clock.now()
        for key in run.held:
            step = int(key.partition(".")[0])
            run.record(Faltered(INTERRUPTED, "the runtime was closed before it began", now, 0, step, key, now))

    def release(self, run: Run) -> None:
        """Release the places of calls that never ran here. Until then `held` says that they did not."""
        for ready in run.held.values():
            self.admission.release(needs_of(ready.entry.spec))
        run.held.clear()

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Keep a task that does not end when it is cancelled until it ends by itself."""
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)


class Round:
    """The calls of one RunTools effect under way. Lives on the event loop.

    `calls` are all of them in the order the model asked; `running` have a task, `waiting` only an answer from outside
    can end. `opened` are rows of waits for the next write: they and the records that lead to them are one transaction.
    """

    def __init__(self, dispatcher: Dispatcher, run: Run, calls: Iterable[AskedCall]) -> None:
        self.dispatcher, self.run = dispatcher, run
        self.calls = {call.call: ActiveCall(dispatcher, run, call) for call in calls}
        self.running: dict[str, ActiveCall] = {}
        self.waiting: dict[str, ActiveCall] = {}
        self.opened: list[WaitRow] = []

    @property
    def waits(self) -> CallWaits:
        return CallWaits(self.dispatcher.store, self.run)

    async def go(self) -> Parked | None:
        control = self.run.control
        # Only a turn that began before this run of it can have waits on disk.
        known = await self.waits.known() if self.run.resumed else {}
        todo = [(active, need) for active in self.calls.values() if (need := self._next(active, known)) is not None]
        if todo or not self.waiting:
            await self._flush()
        self._spawn(todo)
        while True:
            self._collect()
            if not self.running and not self.waiting:
                if self.opened:
                    await self._flush()
                return None
            if control.stopping:
                await self._stop_all()
            elif not self.running:
                parked = await self._park()
                if parked is not None:
                    return parked
                await self._read_answers()
            else:
                await self._flush()
                if control.nudged and self.waiting:
                    await self._read_answers()
                elif not any(each.late or each.task.done() for each in self.running.values() if each.task is not None):
                    await control.pause()

    # ------------------------------------------------------------------ how a call begins

    def _next(self, active: ActiveCall, waits: Mapping[str, WaitRow]) -> Need | None:
        """What the task of a call has to do; None when it has an outcome now, or waits for an answer."""
        call, run = active.asked, self.run
        held = run.held.get(call.call) if call.started else None
        if held is not None:
            active.ready = held
            return next_need(call, held.entry.spec, _HERE)
        found = active.checked()
        if isinstance(found, Ready):
            active.ready = found
        known, plugins = Circumstances(), active.plugins
        if call.started and call.deferred:
            completion = waits.get(self.waits.wait_id(call.call, "deferred"))
            if completion is not None and completion.state == "revoked":
                # Its body failed, and no record tells how: another attempt gets another key.
                active.answer = Answered("revoked")
            elif completion is not None:
                known = Circumstances(completed=body_is_over(completion))
        elif not call.started and not call.attempts:
            entry = run.agent.catalog.get(call.name)
            known = Circumstances(
                asked=bool(waits) and self.waits.wait_id(call.call, "approval") in waits,
                # They are asked about tools that are there, before anything is said about the arguments.
                vetted=plugins is not None and plugins.vets and entry is not None and entry.fault is None,
            )
        need = next_need(call, found.entry.spec if isinstance(found, Ready) else found, known)
        match need:
            case Ask(kind, reason):
                wait = waits.get(self.waits.wait_id(call.call, kind))
                if wait is not None and wait.state != "open":
                    return self._answered(active, wait)
                self._ask(active, kind, reason, wait)
                return None
            case Conclude(outcome):
                self._end(active, outcome)
                return None
            case _:
                return need

    def _ask(self, active: ActiveCall, kind: Any, reason: str, wait: WaitRow | None = None) -> None:
        """Wait for an answer from outside; `wait` is the row of a question that was asked before."""
        if wait is None:
            decisions, active.decisions = active.decisions, ()
            active.pending = self.waits.pending(active.asked, kind, reason=reason, decisions=decisions)
            self.opened.append(self.waits.row(active.asked, kind, active.pending))
        else:
            active.pending = decode_pending(wait.body)
        self.waiting[active.key] = active

    def _answered(self, active: ActiveCall, wait: WaitRow) -> Need | None:
        """Go on as the answer of a wait says, or the end of its time."""
        shown, answer = decode_pending(wait.body), self.waits.answer(active.asked, wait)
        # The next record of the call tells of it: the wait itself goes with the commit.
        active.answer = Answered(wait.state) if answer is None else Answered(answer.verdict, answer.by, answer.reason)
        need = need_after(answer, active.asked)
        if not isinstance(need, Begin):
            active.artifacts = shown.artifacts
            active.interruption = Interruption(over=True, acknowledged=True)
            if isinstance(need, Return):
                return need
            self._end(active, need.outcome)
            return None
        if not need.repeat:  # an approval is for what the person was shown, and nothing else
            active.decisions = shown.decisions
            active.asked = replace(active.asked, args=shown.args, raw=None)
        found = active.checked()
        if isinstance(found, Failed):
            self._end(active, found)
            return None
        active.ready = found
        return need

    def _spawn(self, todo: Iterable[tuple[ActiveCall, Need]]) -> None:
        loop = asyncio.get_running_loop()
        for active, need in todo:
            active.task = loop.create_task(self._carry_out(active, need))
            self.running[active.key] = active

    # ------------------------------------------------------------------ the task of a call

    async def _carry_out(self, active: ActiveCall, need: Need) -> CallEnd:
        """Do what a call needs, to the end of one attempt.

        It wakes the round as its last step: a done callback would do so one pass of the event loop later.
        """
        try:
            match need:
                case RunBody():
                    return await self._run_body(active)
                case Vet():
                    spec = active.spec
                    assert spec is not None
                    vetted = await active.vet(active.asked, spec)
                    if not isinstance(vetted, tuple):
                        return vetted
                    active.asked, active.ready = vetted
                    return await self._begin(active)
                case Begin(repeat):
                    return await self._begin(active, repeat)
                case StartProcess():
                    return await self._register(active)
                case Return(outcome):
                    return await self._returned(active, outcome)
                case _:
                    raise InternalError(f"a {type(need).__name__} needs no task")
        finally:
            self.run.control.wake()

    async def _begin(self, active: ActiveCall, repeat: bool = False) -> CallEnd:
        """The way to a body that did not start with its reply: due time, preparation, place, start record."""
        dispatcher, run, call, ready = self.dispatcher, self.run, active.asked, active.ready
        assert ready is not None
        now = dispatcher.clock.now()
        if call.due > now:
            await dispatcher.clock.sleep((TOOL_RETRIES.due(call.due, now) - now) / 1000)
        store = call.store or ("" if call.attempts else run.journal.store_id)
        if ready.entry.provider is not None:
            context = active.open_context(ready, call.attempts + 1, store)
            context.close()  # preparation has no effects
            found = await prepared(ready, context)
            if not isinstance(found, Ready):
                return AttemptResult(await active.filtered(ready.entry.spec, ready.call.args, found))
            ready = active.ready = found
        spec = ready.entry.spec
        needs = () if spec.background else needs_of(spec)
        if needs:
            await dispatcher.admission.take(needs)
        told, active.answer = active.answer, None
        approved = told is not None and told.verdict == "approved"
        started = Started(
            call.call,
            ready.call.args,
            call.attempts + 1,
            ready.call.payload,
            {"by": told.by} if told is not None and approved else None,
            spec.deferred,
            call.repeated + repeat,
            dispatcher.clock.now(),
            active.slot(),
            spec.background,
            None if approved else told,
            "" if call.store else store,
        )
        try:
            run.record(started)
            await self._flush(*([self.waits.reserved(call)] if spec.deferred else []))
        except BaseException:  # also a cancellation: a place that is not released is lost to all
            dispatcher.admission.release(needs)
            raise
        return await (self._register(active) if spec.background else self._run_body(active))

    async def _run_body(self, active: ActiveCall) -> CallEnd:
        """Run the body in the place that it holds; a thread holds that until it has really ended."""
        dispatcher, run, ready, key = self.dispatcher, self.run, active.ready, active.key
        assert ready is not None
        spec, call = ready.entry.spec, run.machine.state.calls[key]
        needs, loop = needs_of(spec), asyncio.get_running_loop()
        try:
            if not dispatcher.worker.sure():
                await self._confirm_owner()
        except BaseException:  # also a cancellation
            if key not in run.held:  # the places of held calls are released with the turn
                dispatcher.admission.release(needs)
            raise
        run.held.pop(key, None)
        context = active.context = active.open_context(ready, call.attempts, call.store)
        interruption = active.interruption = Interruption()
        dispatcher.running[active.id], active.began = spec.name, dispatcher.clock.monotonic()
        run.events.emit(ToolStarted, call_id=active.id, tool=call.name, args=ready.call.args, attempt=call.attempts)
        timer = None if spec.timeout is None else loop.call_later(spec.timeout, self._expire, active, spec.timeout)
        threaded = ready.entry.tool is not None and not ready.entry.tool.is_async
        ended = functools.partial(dispatcher.admission.release_from_thread, loop, needs) if threaded else None
        try:
            rules = active.output_rules(spec, ready.call.args)
            result = await execute(ready, context, dispatcher.threads, rules, interruption, ended)
        finally:
            if timer is not None:
                timer.cancel()
            dispatcher.running.pop(active.id, None)
            if not threaded and needs:
                dispatcher.admission.release(needs)
        if context.deferred:
            last = not isinstance(settle(result.end, call, spec), TryAgain)
            if isinstance(result.end, Ok) or await self.waits.completed(call, last):
                return HandedOver(context.defer_timeout)
        return result if active.plugins is None else await active.seen(ready, result)

    async def _register(self, active: ActiveCall) -> AttemptResult:
        """Leave a call to the workers of processes: what it returns is a handle.

        Its start is on disk, so after a crash it is registered again, under the same id: the call's own.
        """
        dispatcher, call, ready = self.dispatcher, active.asked, active.ready
        if not dispatcher.worker.sure():
            await self._confirm_owner()
        active.interruption = Interruption(over=True)  # a registration under way is not to be stopped half-way
        active.began = dispatcher.clock.monotonic()
        args = call.args if ready is None else ready.call.args
        attempt = max(self.run.machine.state.calls[active.key].attempts, 1)
        self.run.events.emit(ToolStarted, call_id=active.id, tool=call.name, args=args, attempt=attempt)
        outcome = await _registered(
            None if dispatcher.handles is None else dispatcher.handles(self.run, active.id), active
        )
        if isinstance(outcome, Ok):
            return await returned(outcome.value, active.output_rules(active.spec, args))
        return AttemptResult(outcome) if ready is None else await active.seen(ready, AttemptResult(outcome))

    async def _returned(self, active: ActiveCall, outcome: Ok | Failed) -> AttemptResult:
        """What an answer from outside says that the call returned: it passes plugins and the budget like any output."""
        spec, args, plugins = active.spec, active.asked.args, active.plugins
        if isinstance(outcome, Ok):
            return await returned(outcome.value, active.output_rules(spec, args))
        if plugins is None or not plugins.looks:
            return AttemptResult(outcome)
        return AttemptResult(await active.look(ToolSpec(active.asked.name) if spec is None else spec, args, outcome))

    async def _confirm_owner(self) -> None:
        """Before anything acts: an owner that was fenced while it stood still starts nothing."""
        if not await self.dispatcher.worker.confirm(self.run.scope):
            raise Fenced(self.run.turn_id, self.run.scope.generation)

    # ------------------------------------------------------------------ cutting a body off

    def _expire(self, active: ActiveCall, seconds: float) -> None:
        self._interrupt(active, f"it did not end within {seconds:g} s", timed_out=True)
        # The limit ends the wait, whatever the body makes of its cancellation.
        asyncio.get_running_loop().call_later(CANCEL_GRACE, self._give_up, active, active.task)

    def _give_up(self, active: ActiveCall, late: asyncio.Task[Any] | None) -> None:
        task, interruption = active.task, active.interruption
        if task is None or task.done() or task is not late or interruption is None:
            return  # it has ended, or another attempt is under way by now, with a time of its own
        if interruption.timed_out and not interruption.over:
            log.warning("call %s does not end when it is cancelled; it is left behind", active.id)
            active.late = True
            self.run.control.wake()

    def _interrupt(self, active: ActiveCall, reason: str, timed_out: bool = False) -> None:
        task, interruption = active.task, active.interruption
        if task is None or task.done() or (interruption is not None and interruption.over):
            return
        if interruption is not None and interruption.reason is None:
            interruption.reason, interruption.timed_out = reason, timed_out
        if active.context is not None:
            active.context.mark_cancelled()
        task.cancel()

    # ------------------------------------------------------------------ how a call ends

    def _collect(self) -> None:
        """Record what has ended since the last look, in the order in which the model asked."""
        for active in [each for key, each in self.calls.items() if key in self.running]:
            task = active.task
            if task is None or not (active.late or task.done()):
                continue
            active.task = None
            del self.running[active.key]
            if not task.done():
                self.dispatcher.abandon(task)
                reason = "" if active.interruption is None else active.interruption.reason
                self._attempted(active, AttemptResult(OutcomeUnknown(reason or "")))
            elif task.cancelled():
                self._attempted(active, self._cancelled_itself(active))
            else:
                self._attempted(active, task.result())

    def _cancelled_itself(self, active: ActiveCall) -> AttemptResult:
        """Something on the way cancelled its task: a provider's preparation, or a body in a way we did not see."""
        if self.run.machine.state.calls[active.key].started:
            return AttemptResult(OutcomeUnknown("it was cancelled while it ran"))
        return AttemptResult(Failed("tool_prepare_failed", "CancelledError: preparation cancelled itself"))

    def _attempted(self, active: ActiveCall, ended: CallEnd) -> None:
        """Record what the end of a task means for its call."""
        match ended:
            case NeedsApproval(asked, reason):
                active.asked = asked
                self._ask(active, "approval", reason)
            case HandedOver(seconds):
                self._hand_over(active, seconds)
            case AttemptResult(end, blobs, withheld):
                call = self.run.machine.state.calls[active.key]
                verdict = settle(end, call, active.spec, stop_of(self.run.control), self.run.room >= 2)
                if isinstance(verdict, EndCall):
                    self._end(active, verdict.outcome, blobs, withheld)
                elif isinstance(verdict, TryAgain):
                    self._faltered(active, call, verdict)
                    found = active.checked()
                    if isinstance(found, Failed):
                        self._end(active, found)
                    else:
                        active.ready = found
                        self._spawn([(active, Begin())])

    def _faltered(self, active: ActiveCall, call: AskedCall, verdict: TryAgain) -> None:
        """Record a failed attempt, and when the next one is due."""
        run, now, failed = self.run, self.dispatcher.clock.now(), verdict.failed
        active.close_context()  # and its artifacts are forgotten: only those of the last attempt count
        delay = TOOL_RETRIES.delay(call.attempts - call.repeated, verdict.after, self.dispatcher.random)
        due, step = now + int(delay * 1000), int(call.call.partition(".")[0])
        run.record(Faltered(failed.code, failed.message, due, call.attempts, step, call.call, now, run.slot()))
        active.asked = run.machine.state.calls[active.key]

    def _hand_over(self, active: ActiveCall, seconds: float | None) -> None:
        """The body of a deferred call is over: it waits for a completion under its key."""
        run, artifacts, waits = self.run, active.close_context(), self.waits
        due = None if seconds is None else run.clock.now() + int(seconds * 1000)
        active.pending = waits.pending(run.machine.state.calls[active.key], "deferred", due=due, artifacts=artifacts)
        self.waiting[active.key] = active
        self.opened.append(waits.row(active.asked, "deferred", active.pending))
        run.journal.refer([artifact.digest for artifact in artifacts])

    def _end(self, active: ActiveCall, outcome: ToolOutcome, blobs: tuple[str, ...] = (), withheld: str = "") -> None:
        dispatcher, run, call = self.dispatcher, self.run, self.run.machine.state.calls[active.key]
        spent = 0 if active.began is None else int((dispatcher.clock.monotonic() - active.began) * 1000)
        artifacts, slot, answer = active.close_context(), active.slot(), active.answer
        if answer is not None and answer.verdict in ("failed", "error") and answer.reason and type(outcome) is Failed:
            answer = replace(answer, reason=outcome.message)  # as plugins let it be recorded
        if answer is None and call.deferred and run.control.request is None:
            # A completion that was reserved in vain: its key is worth nothing any more. A cancel closes it by itself.
            self.opened.append(self.waits.revoked(call, "deferred"))
            answer = Answered("revoked")
        active.answer = None
        at, blobs = dispatcher.clock.now(), (*blobs, *[artifact.digest for artifact in artifacts])
        attempts, repeated = call.attempts, call.repeated
        run.record(Ended(call.call, outcome, attempts, repeated, spent, at, slot, artifacts, answer, withheld), blobs)
        run.events.emit(ToolFinished, call_id=active.id, tool=call.name, outcome=outcome)

    # ------------------------------------------------------------------ waiting and stopping

    async def _flush(self, *waits: WaitRow) -> None:
        """Make what is recorded durable, and with it the waits that were opened."""
        await self.run.journal.flush((*waits, *self._take_opened()) if self.opened else waits)

    def _take_opened(self) -> tuple[WaitRow, ...]:
        """The waits that the next write brings; with them goes what plugins changed on the way there."""
        if not self.opened:
            return ()
        plugins = plugins_of(self.run)
        if plugins is not None:
            plugins.note()
        opened, self.opened = self.opened, []
        return tuple(opened)

    async def _park(self) -> Parked | None:
        """Leave the turn to the disk; None when an answer came in between."""
        pending = [(active.key, active.pending) for active in self.waiting.values() if active.pending is not None]
        names = tuple([self.waits.wait_id(key, each.kind) for key, each in pending])
        appended = await self.run.journal.flush(self._take_opened(), names)
        if appended is None or not appended.parked:
            self.run.check_cancel()
            return None
        calls = tuple([each for _, each in pending])
        self.run.events.emit(WaitingFor, calls=calls)
        return Parked(calls)

    async def _read_answers(self) -> None:
        """Read the waits, and go on with the calls whose wait has ended."""
        self.run.control.nudged = False
        known, waits = await self.waits.known(), self.waits
        todo = []
        for key, active in list(self.waiting.items()):
            assert active.pending is not None
            wait = known.get(waits.wait_id(key, active.pending.kind))
            if wait is None:
                raise InternalError(f"the wait of {active.id} is gone")
            if wait.state == "open":
                continue
            del self.waiting[key]
            active.pending, active.asked = None, self.run.machine.state.calls[key]
            if (need := self._answered(active, wait)) is not None:
                todo.append((active, need))
        if todo:
            await self._flush()
        self._spawn(todo)

    async def _stop_all(self) -> None:
        """Cancel what runs, give it a moment, and record what is known of it. Raises why it was stopped."""
        leaving = stop_of(self.run.control) is StopCause.LEFT
        reason = "the runtime was closed while it ran" if leaving else "it was cancelled while it ran"
        for active in self.running.values():
            self._interrupt(active, reason)
        tasks = [each.task for each in self.running.values() if each.task is not None]
        acknowledged = [
            each.task
            for each in self.running.values()
            if each.task is not None and each.interruption is not None and each.interruption.acknowledged
        ]
        if acknowledged and not leaving:
            await asyncio.wait(acknowledged)  # hooks that look at an answer have a time limit
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE)
        for active in list(self.running.values()):
            task, active.task = active.task, None
            del self.running[active.key]
            if task is not None and not task.done():
                self.dispatcher.abandon(task)
                task = None
            self._stopped(active, None if task is None or task.cancelled() else task.result(), reason)
        if leaving:
            await self._flush()
            raise Leaving
        await self.conclude()
        self.run.control.check()

    def _stopped(self, active: ActiveCall, ended: CallEnd | None, reason: str) -> None:
        """A call that was told to stop. What it reported counts; what it did not is unknown; what never ran is not."""
        call, stop = self.run.machine.state.calls[active.key], stop_of(self.run.control)
        if not call.started or active.key in self.run.held or isinstance(ended, NeedsApproval):
            return
        if isinstance(ended, HandedOver):
            if stop is not StopCause.LEFT:  # else it stays on the wait that it has
                self._hand_over(active, ended.seconds)
            return
        result = AttemptResult(OutcomeUnknown(reason)) if ended is None else ended
        verdict = settle(result.end, call, active.spec, stop, self.run.room >= 2)
        if isinstance(verdict, EndCall):
            self._end(active, verdict.outcome, result.blobs, result.withheld)
        elif isinstance(verdict, TryAgain):
            self._faltered(active, call, verdict)

    async def conclude(self, refused: str = "") -> None:
        """The turn ends, and with it the calls without an outcome. An answer that was acknowledged says how its call
        ended; without one, the end of a call that has started is unknown.

        `refused`: the plugin without which no answer may be recorded, because it could not look at them.
        """
        run, answered = self.run, await self.waits.final()
        for call in list(run.machine.state.calls.values()):
            active = self.calls.get(call.call) or ActiveCall(self.dispatcher, run, call)
            pending, wait = active.pending, answered.get(call.call)
            active.asked, active.pending = call, None
            self.waiting.pop(call.call, None)
            if wait is not None:
                active.artifacts = decode_pending(wait.body).artifacts
            if pending is not None and pending.artifacts:
                active.artifacts = pending.artifacts  # handed over, and not on disk yet
            if wait is not None and wait.state in ("resolved", "expired"):
                await self._conclude_answered(active, wait, refused)
            elif call.started and call.call not in run.held:
                self._end(active, OutcomeUnknown(NOT_SEEN))

    async def _conclude_answered(self, active: ActiveCall, wait: WaitRow, refused: str) -> None:
        call, request = active.asked, self.run.control.request
        answer = self.waits.answer(call, wait, refused)
        active.answer = Answered(wait.state) if answer is None else Answered(answer.verdict, answer.by, answer.reason)
        match need_after(answer, call):
            case Begin():
                never = NEVER_RAN if request is None else Cancelled(request.by, request.reason)
                self._end(active, OutcomeUnknown(NOT_SEEN) if call.started else never)
            case Conclude(outcome):
                self._end(active, outcome)
            case Return(outcome) if refused:
                said = f"result withheld: plugin {refused!r} could not look at it"
                self._end(active, Ok(said) if isinstance(outcome, Ok) else Failed(outcome.code, said))
            case Return(outcome):
                result = await self._returned(active, outcome)
                assert not isinstance(result.end, Again)
                self._end(active, result.end, result.blobs, result.withheld)


_UNAVAILABLE = Failed("processes_unavailable", "nothing can be started in the background here")


async def _registered(handles: Handles | None, active: ActiveCall) -> ToolOutcome:
    """The handle of the call's process, which exists from now on; or why there is none."""
    if handles is None:
        return _UNAVAILABLE
    ready = active.ready
    if ready is None:
        # Its tool is gone. If its process was registered before, its handle is the outcome.
        found, gone = await handles.known(), active.checked()
        return Ok(found) if found is not None else gone if isinstance(gone, Failed) else _UNAVAILABLE
    try:
        return Ok(await handles.begin(ready.call, ready.entry.spec))
    except ProcessPruned:  # it has ended long ago, and is not kept; it was started, and that is what is asked here
        found = await handles.known()
        return _UNAVAILABLE if found is None else Ok(found)
    except StoreError:
        raise
    except MainstayError as error:
        return Failed(error.code, model_text(error))
