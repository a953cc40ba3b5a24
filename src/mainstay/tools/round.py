"""Running the calls of one reply: all at once, each under its recovery contract, results as they come.

What a call needs before its body may run is decided from what is recorded of it:

    not started                 prepare it; ask for approval, reserve a completion, wait for a slot: then record its
                                start in a transaction of its own, and run
    started with its reply      its start is that record: run (only in the process that recorded it)
    started, and found so       the process died: `once` is unknown, `rerun` runs again, `ask` asks a person
    a failed attempt recorded   run again when it is due, with a start record
    deferred                    stays on its reserved wait
    in the background           its process is registered (again), and its handle is the outcome

The round ends when every call has an outcome, or parks when all that is left waits for somebody outside.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import msgspec

from mainstay.engine.driver import Parked, Run
from mainstay.engine.gate import CANCEL_GRACE, Leaving
from mainstay.engine.retry import RetryPolicy
from mainstay.errors import Fenced, InternalError
from mainstay.model.effect import AskedCall, RunTools
from mainstay.model.event import ToolFinished, ToolStarted, WaitingFor
from mainstay.model.record import Ended, Faltered, Started
from mainstay.model.session import Answer, WaitRow
from mainstay.model.tool import Artifact, Cancelled, Denied, Failed, Ok, OutcomeUnknown, ToolOutcome, ToolSpec
from mainstay.model.transcript import NEVER_RAN
from mainstay.tools.attempt import Again, Attempted, Interrupted, attempt, needs_of, returned
from mainstay.tools.background import prepared_instead, sent_off
from mainstay.tools.context import ToolContext
from mainstay.tools.prepare import Ready, consult, inspect
from mainstay.tools.questions import Questions
from mainstay.tools.vetting import Vetting
from mainstay.tools.workshop import Workshop

log = logging.getLogger("mainstay.tools")

TOOL_RETRIES = RetryPolicy(attempts=0, base=0.5, cap=30.0, asked_cap=3600.0)
DIED = "the process died while the call ran"
NOT_SEEN = "the turn ended before its end was seen"
GOES_ON = ("approved", "rerun")
"""Verdicts that let a call run. Any other says how it ended."""

Work: TypeAlias = Callable[[], Coroutine[Any, Any, Attempted]]
"""The way to a call's end, made when its task begins: one that is cancelled before leaves nothing behind."""


class Round:
    """One RunTools effect under way.

    `tasks` are bodies (or the way to them) by call, `late` those that did not end in time, `contexts` what the newest
    attempts were given; `put` are artifacts of deferred calls, whose bodies were over before. All of it lives on the
    event loop.
    """

    def __init__(self, home: Workshop, run: Run, effect: RunTools) -> None:
        self.home, self.run, self.effect = home, run, effect
        self.questions = Questions(home.store, run)
        self.tasks: dict[str, asyncio.Task[Attempted]] = {}
        self.cut: dict[str, Interrupted] = {}
        self.contexts: dict[str, ToolContext[Any]] = {}
        self.put: dict[str, tuple[Artifact, ...]] = {}
        self.began: dict[str, float] = {}
        self.late: set[str] = set()
        self.vetting = Vetting(run)

    async def go(self) -> Parked | None:
        waits = await self._known_waits()
        starts = [start for call in self.effect.calls if (start := self._begin(call, waits)) is not None]
        if starts or not self.questions.waiting:
            await self._flush()
        for start in starts:
            start()
        while True:
            self._collect()
            if not self.tasks and not self.questions.waiting:
                await self._flush_waits()
                return None
            if self.run.gate.shut:
                await self._stop_all()
            elif not self.tasks:
                parked = await self._park()
                if parked is not None:
                    return parked
                await self._answers()
            else:
                await self._flush()
                if self.run.gate.nudged and self.questions.waiting:
                    await self._answers()
                elif not any(task.done() or key in self.late for key, task in self.tasks.items()):
                    await self.run.gate.pause()

    def abandon(self) -> None:
        """Whatever ended the round, nothing of it goes on: a relieved owner starts no body any more."""
        for task in self.tasks.values():
            task.cancel()

    # ------------------------------------------------------------------ how a call begins

    def _begin(self, call: AskedCall, waits: dict[str, WaitRow]) -> Callable[[], None] | None:
        """Decide what a call needs. Returns what starts it once everything recorded is durable."""
        held = self.run.held.get(call.call)
        if held is not None and call.started:
            return functools.partial(self._spawn, call, functools.partial(self._body, call, held, call.attempts))
        if not call.started and not call.attempts:
            if waits and self.questions.wait_id(call.call, "approval") in waits:
                # Somebody was asked: that counts, whatever has become of the plugin or the definition that asked.
                return self._ask(call, "approval", waits, "")
            if self.vetting.concerns(call):
                return functools.partial(self._spawn, call, functools.partial(self._vetted, call))
        ready = inspect(self.run.agent.catalog, call, self._call_id(call))
        if call.started:
            return self._recover(call, ready, waits)
        if isinstance(ready, Failed):
            self._end(call, ready, attempts=call.attempts)
            return None
        spec = ready.entry.spec
        if spec.approval == "ask" and not call.attempts:
            return self._ask(call, "approval", waits, "the tool asks for approval")
        return functools.partial(self._spawn, call, functools.partial(self._queued, call, ready))

    async def _vetted(self, call: AskedCall) -> Attempted:
        """Ask the plugins, then go on with the arguments as they left them."""
        spec = self._spec(call)
        assert spec is not None
        vetted = await self.vetting.before(call, spec)
        return vetted if isinstance(vetted, Attempted) else await self._queued(*vetted)

    def _recover(self, call: AskedCall, ready: Ready | Failed, waits: dict[str, WaitRow]) -> Callable[[], None] | None:
        """The window in which the process died: the tool's contract decides, never a guess."""
        recovery = "once" if isinstance(ready, Failed) else ready.entry.spec.recovery
        if call.background:
            return functools.partial(self._spawn, call, functools.partial(self._send_off, call, ready))
        if call.deferred and (recovery != "rerun" or self.questions.handed_over(call, waits)):
            return self._ask(call, "deferred", waits, "")
        if recovery == "once":
            self._end(call, OutcomeUnknown(DIED), call.attempts, call.repeated)
            return None
        if recovery == "ask":
            return self._ask(call, "recovery", waits, DIED)
        assert isinstance(ready, Ready)
        return functools.partial(self._spawn, call, functools.partial(self._queued, call, ready, repeat=True))

    def _ask(self, call: AskedCall, kind: Any, waits: dict[str, WaitRow], reason: str) -> Callable[[], None] | None:
        """Wait for somebody, unless the answer is there already."""
        answered = self.questions.ask(call, kind, waits, reason)
        return None if answered is None else self._answered(call, answered)

    def _answered(self, call: AskedCall, wait: WaitRow) -> Callable[[], None] | None:
        """Go on as a person, or an outside completion, has decided."""
        answer = self.questions.hear(call, wait)
        self.put[call.call] = self.questions.artifacts(wait)
        if answer is None or answer.verdict not in GOES_ON:
            self.cut[call.call] = Interrupted(over=True, acknowledged=True)
            return functools.partial(self._spawn, call, functools.partial(self._ended_by, call, answer))
        self.put.pop(call.call)
        if answer.verdict == "approved":
            shown = self.questions.shown(wait)
            self.vetting.remember(call, shown.decisions)
            call = msgspec.structs.replace(call, args=shown.args, raw=None)
        ready = inspect(self.run.agent.catalog, call, self._call_id(call))
        if isinstance(ready, Failed):
            self._end(call, ready, call.attempts, call.repeated)
            return None
        work = functools.partial(self._queued, call, ready, repeat=answer.verdict == "rerun")
        return functools.partial(self._spawn, call, work)

    async def _ended_by(self, call: AskedCall, answer: Answer | None) -> Attempted:
        """How a call ended of which somebody outside has said so, or has not in time."""
        match answer:
            case None:
                late = "nobody answered in time"
                return Attempted(OutcomeUnknown(late) if call.started else Denied(late))
            case Answer(verdict="rejected"):
                return Attempted(Denied(answer.reason, answer.by))
            case Answer(verdict="done" | "value"):
                # It comes from outside like any output, and has the same budget.
                return await returned(answer.value, self.vetting.outlet(call, self._spec(call), call.args))
            case _:
                return await self.vetting.settled(call, answer)

    # ------------------------------------------------------------------ how a call runs

    def _spawn(self, call: AskedCall, work: Work) -> None:
        self.tasks[call.call] = asyncio.get_running_loop().create_task(self._waking(work))

    async def _waking(self, work: Work) -> Attempted:
        """The last step of the work wakes the round: sooner by a pass of the event loop than a callback would."""
        try:
            return await work()
        finally:
            self.run.gate.wake()

    async def _queued(self, call: AskedCall, ready: Ready, repeat: bool = False) -> Attempted:
        """The way to a body that did not start with its reply: due time, preparation, slot, start record."""
        now = self.home.clock.now()
        if call.due > now:
            await self.home.clock.sleep((TOOL_RETRIES.due(call.due, now) - now) / 1000)
        prepared: Ready | ToolOutcome = ready
        store = call.store or ("" if call.attempts else self.run.journal.store_id)
        if ready.entry.provider is not None:
            context = self.home.context(self.run, ready, call.attempts + 1, store)
            context.close()  # preparation has no effects
            prepared = await consult(ready, context)
        if not isinstance(prepared, Ready):
            return Attempted(await self.vetting.filtered(call, ready.entry.spec, ready.call.args, prepared))
        spec = prepared.entry.spec
        if not spec.background:
            await self.home.admission.take(needs_of(spec))
        number = call.attempts + 1
        approved, settled = self.questions.heard(call)
        try:
            started = Started(
                call.call,
                prepared.call.args,
                number,
                prepared.call.payload,
                approved,
                spec.deferred,
                call.repeated + repeat,
                self.home.clock.now(),
                self.vetting.slot(call),
                spec.background,
                settled,
                "" if call.store else store,
            )
            self.run.record(started)
            await self._flush(*([self.questions.reserve(call)] if spec.deferred else []))
        except BaseException:  # also a cancellation: a slot that nobody gives back is lost to all
            if not spec.background:
                self.home.admission.release(needs_of(spec))
            raise
        return await (self._send_off(call, prepared) if spec.background else self._body(call, prepared, number))

    async def _send_off(self, call: AskedCall, ready: Ready | Failed) -> Attempted:
        """Leave a call to the workers of processes: what it returns is a handle."""
        home, call_id = self.home, self._call_id(call)
        await self._must_own()
        self.cut[call.call] = Interrupted(over=True)  # a registration under way is not to be stopped half-way
        self.began[call.call] = home.clock.monotonic()
        args = call.args if isinstance(ready, Failed) else ready.call.args
        self.run.events.emit(ToolStarted, call_id=call_id, tool=call.name, args=args, attempt=max(call.attempts, 1))
        outcome = await sent_off(None if home.handles is None else home.handles(self.run, call_id), ready)
        if isinstance(outcome, Ok):
            return await returned(outcome.value, self.vetting.outlet(call, self._spec(call), args))
        attempted = Attempted(outcome)
        return attempted if isinstance(ready, Failed) else await self.vetting.after(call, ready, attempted)

    async def _must_own(self) -> None:
        """Before anything acts: a relieved owner starts nothing."""
        if not self.home.worker.sure() and not await self.home.worker.confirm(self.run.scope):
            raise Fenced(self.run.turn_id, self.run.scope.generation)

    async def _body(self, call: AskedCall, ready: Ready, number: int) -> Attempted:
        """Run the body while holding its slots; a thread holds them until it has really ended."""
        home, spec = self.home, ready.entry.spec
        try:
            await self._must_own()
        except BaseException:  # also a cancellation
            if call.call not in self.run.held:  # what is held is given back with the turn
                home.admission.release(needs_of(spec))
            raise
        self.run.held.pop(call.call, None)
        context = self.contexts[call.call] = home.context(
            self.run, ready, number, self.run.machine.state.calls[call.call].store
        )
        context.prepare = functools.partial(prepared_instead, self.vetting, call, context)
        interrupted, call_id = Interrupted(), context.call_id
        self.cut[call.call], home.running[call_id] = interrupted, call.name
        self.began[call.call] = home.clock.monotonic()
        self.run.events.emit(ToolStarted, call_id=call_id, tool=call.name, args=ready.call.args, attempt=number)
        loop, timer = asyncio.get_running_loop(), None
        if spec.timeout is not None:
            timer = loop.call_later(spec.timeout, self._expire, call, spec.timeout)
        on_thread = ready.entry.tool is not None and not ready.entry.tool.is_async
        ended = functools.partial(home.admission.release_from_thread, loop, needs_of(spec)) if on_thread else None
        try:
            outlet = self.vetting.outlet(call, spec, ready.call.args)
            attempted = await attempt(ready, context, home.threads, outlet, interrupted, ended)
        finally:
            if timer is not None:
                timer.cancel()
            home.running.pop(call_id, None)
            if not on_thread:
                home.admission.release(needs_of(spec))
        if context.deferred:
            last = number > spec.retries or not isinstance(attempted.end, Again)
            if isinstance(attempted.end, Ok) or await self.questions.completed(call, last):
                return Attempted(attempted.end, deferred=True, due=context.defer_timeout)
        return await self.vetting.after(call, ready, attempted)

    def _expire(self, call: AskedCall, seconds: float) -> None:
        self._cut_off(call.call, f"it did not end within {seconds:g} s", timed_out=True)
        # The limit ends the wait, whatever the body makes of its cancellation.
        late = self.tasks.get(call.call)
        asyncio.get_running_loop().call_later(CANCEL_GRACE, self._leave_behind, call.call, late)

    def _leave_behind(self, key: str, late: asyncio.Task[Attempted] | None) -> None:
        task, cut = self.tasks.get(key), self.cut.get(key)
        if task is not late:
            return  # another attempt is under way by now, with a time of its own
        if task is not None and not task.done() and cut is not None and cut.timed_out and not cut.over:
            log.warning("call %s.%s does not end when it is cancelled; it is left behind", self.run.turn_id, key)
            self.late.add(key)
            self.run.gate.wake()

    def _cut_off(self, key: str, reason: str, timed_out: bool = False) -> None:
        task, cut = self.tasks.get(key), self.cut.get(key)
        if task is None or task.done() or (cut is not None and cut.over):
            return
        if cut is not None and cut.reason is None:
            cut.reason, cut.timed_out = reason, timed_out
        if key in self.contexts:
            self.contexts[key].mark_cancelled()
        task.cancel()

    def _spec(self, call: AskedCall) -> ToolSpec | None:
        entry = self.run.agent.catalog.get(call.name)
        return None if entry is None else entry.spec

    # ------------------------------------------------------------------ how a call ends

    def _collect(self) -> None:
        """Record what has ended since the last look, in emission order."""
        for call in self.effect.calls:
            task = self.tasks.get(call.call)
            if task is None or not (task.done() or call.call in self.late):
                continue
            del self.tasks[call.call]
            current = self.run.machine.state.calls[call.call]
            if not task.done():
                self.home.left_behind(task)
                self._attempted(current, Attempted(OutcomeUnknown(self.cut[call.call].reason or "")))
                continue
            self._attempted(current, self._lost(current) if task.cancelled() else task.result())

    def _lost(self, call: AskedCall) -> Attempted:
        """Something on the way cancelled itself: a provider's preparation, or a body in a way we did not see."""
        if call.started:
            return Attempted(OutcomeUnknown("it was cancelled while it ran"))
        return Attempted(Failed("tool_prepare_failed", "CancelledError: preparation cancelled itself"))

    def _attempted(self, call: AskedCall, attempted: Attempted) -> None:
        if attempted.asks is not None:
            asks = attempted.asks
            answered = self.questions.ask(asks.call, "approval", {}, asks.reason, self.vetting.take(call))
            assert answered is None
            return
        if attempted.deferred:
            self.questions.hand_over(call, attempted.due, self._left_by(call))
            return
        end = attempted.end
        if not isinstance(end, Again):
            self._end(call, end, call.attempts, call.repeated, attempted.blobs, attempted.withheld)
            return
        spec = self._spec(call)
        if call.attempts > (0 if spec is None else spec.retries) or self.run.gate.shut or self.run.room < 2:
            self._end(call, end.otherwise, call.attempts, call.repeated)
            return
        self._left_by(call)  # and forgotten: only the last attempt counts
        now = self.home.clock.now()
        due = now + int(TOOL_RETRIES.delay(call.attempts, end.after, self.home.random) * 1000)
        code, message, slot = end.failed.code, end.failed.message, self.run.slot()
        self.run.record(Faltered(code, message, due, call.attempts, self.effect.step, call.call, now, slot))
        call = self.run.machine.state.calls[call.call]
        ready = inspect(self.run.agent.catalog, call, self._call_id(call))
        if isinstance(ready, Failed):
            self._end(call, ready, call.attempts, call.repeated)
        else:
            self._spawn(call, functools.partial(self._flushed, functools.partial(self._queued, call, ready)))

    async def _flushed(self, work: Work) -> Attempted:
        await self._flush()
        return await work()

    def _end(
        self,
        call: AskedCall,
        outcome: ToolOutcome,
        attempts: int = 1,
        repeated: int = 0,
        blobs: tuple[str, ...] = (),
        withheld: str = "",
    ) -> None:
        began = self.began.get(call.call)
        spent = 0 if began is None else int((self.home.clock.monotonic() - began) * 1000)
        put, slot, told = self._left_by(call), self.vetting.slot(call), self.questions.over(call, outcome)
        self.run.record(
            Ended(call.call, outcome, attempts, repeated, spent, self.home.clock.now(), slot, put, told, withheld),
            (*blobs, *[artifact.digest for artifact in put]) if put else blobs,
        )
        self.run.events.emit(ToolFinished, call_id=self._call_id(call), tool=call.name, outcome=outcome)

    def _left_by(self, call: AskedCall) -> tuple[Artifact, ...]:
        """The artifacts of a call whose body is over, or is not waited for any more."""
        context, put = self.contexts.pop(call.call, None), self.put.pop(call.call, ())
        return put if context is None else (*put, *context.close())

    # ------------------------------------------------------------------ waiting and stopping

    async def _flush(self, *waits: WaitRow) -> None:
        await self.run.journal.flush((*waits, *self._opened()))

    def _opened(self) -> tuple[WaitRow, ...]:
        """The waits that the next write brings; with them goes what plugins changed on the way there."""
        if not self.questions.opened:
            return ()
        self.vetting.note()
        return self.questions.take_opened()

    async def _flush_waits(self) -> None:
        if self.questions.opened:
            await self._flush()

    async def _park(self) -> Parked | None:
        """Give the turn up to the disk; None when an answer came in between."""
        appended = await self.run.journal.flush(self._opened(), self.questions.names())
        if appended is None or not appended.parked:
            self.run.heed()
            self.run.gate.check()
            return None
        calls = tuple(self.questions.waiting.values())
        self.run.events.emit(WaitingFor, calls=calls)
        return Parked(calls)

    async def _answers(self) -> None:
        """Look at what the waits say now, and go on where one is answered."""
        self.run.gate.nudged = False
        waits = await self.questions.known()
        starts = []
        for key, pending in list(self.questions.waiting.items()):
            wait = waits.get(self.questions.wait_id(key, pending.kind))
            if wait is None:
                raise InternalError(f"the wait of {pending.call_id} is gone")
            if wait.state == "open":
                continue
            del self.questions.waiting[key]
            start = self._answered(self.run.machine.state.calls[key], wait)
            if start is not None:
                starts.append(start)
        if starts:
            await self._flush()
        for start in starts:
            start()

    async def _known_waits(self) -> dict[str, WaitRow]:
        """Waits of this turn that exist already; no reply without waits reads them."""
        return await self.questions.known() if self.run.resumed or any(map(self._may_wait, self.effect.calls)) else {}

    def _may_wait(self, call: AskedCall) -> bool:
        if call.started and call.call not in self.run.held:
            return True  # the process died while it ran, and somebody may have been asked about it
        spec = self._spec(call)
        return spec is not None and (spec.approval == "ask" or spec.deferred)

    async def _stop_all(self) -> None:
        """Cancel what runs, give it a moment, and record what is known of it. Raises what shut the gate."""
        leaving = self.run.gate.request is None
        reason = "the runtime was closed while it ran" if leaving else "it was cancelled while it ran"
        for key in list(self.tasks):
            self._cut_off(key, reason)
        told = [task for key, task in self.tasks.items() if key in self.cut and self.cut[key].acknowledged]
        if told and not leaving:
            await asyncio.wait(told)  # hooks that look at an answer have a time limit
        if self.tasks:
            await asyncio.wait(self.tasks.values(), timeout=CANCEL_GRACE)
        for key, task in list(self.tasks.items()):
            del self.tasks[key]
            if not task.done():
                self.home.left_behind(task)
            call = self.run.machine.state.calls[key]
            ended = None if not task.done() or task.cancelled() else task.result()
            self._stopped(call, ended, reason, leaving)
        if leaving:
            await self._flush()
            raise Leaving
        await self.conclude()
        self.run.gate.check()

    async def conclude(self, refused: str = "") -> None:
        """The turn ends, and with it the calls in hand. An answer that was acknowledged says how its call ended;
        without one, the end of a call that has started is unknown.

        `refused`: the plugin without which no answer may be recorded, because it could not look at them.
        """
        answered = await self.questions.final()
        for call in list(self.run.machine.state.calls.values()):
            pending, wait = self.questions.waiting.pop(call.call, None), answered.get(call.call)
            if wait is not None:
                self.put[call.call] = self.questions.artifacts(wait)
            if pending is not None and pending.artifacts:
                self.put[call.call] = pending.artifacts  # handed over, and not on disk yet
            if wait is not None and wait.state in ("resolved", "expired"):
                await self._concluded(call, wait, refused)
            elif call.started and call.call not in self.run.held:
                self._end(call, OutcomeUnknown(NOT_SEEN), call.attempts, call.repeated)

    async def _concluded(self, call: AskedCall, wait: WaitRow, refused: str) -> None:
        answer = self.questions.hear(call, wait, refused)
        if answer is not None and answer.verdict in GOES_ON:
            request = self.run.gate.request
            never = NEVER_RAN if request is None else Cancelled(request.by, request.reason)
            attempted = Attempted(OutcomeUnknown(NOT_SEEN) if call.started else never)
        elif refused and answer is not None and answer.verdict != "rejected":
            said = f"result withheld: plugin {refused!r} could not look at it"
            done = answer.verdict in ("done", "value")
            attempted = Attempted(Ok(said) if done else Failed("settled_as_failed", said))
        else:
            attempted = await self._ended_by(call, answer)
        assert not isinstance(attempted.end, Again)
        self._end(call, attempted.end, call.attempts, call.repeated, attempted.blobs, attempted.withheld)

    def _stopped(self, call: AskedCall, ended: Attempted | None, reason: str, leaving: bool) -> None:
        """A call that was told to stop. What it reported counts; what it did not is unknown; what never ran is not."""
        if not call.started or call.call in self.run.held:
            return
        if ended is not None and ended.deferred and not leaving:
            self.questions.hand_over(call, ended.due, self._left_by(call))
            return  # a completion may have come
        end = OutcomeUnknown(reason) if ended is None else ended.end
        if isinstance(end, Again):
            end = end.otherwise
        spec = self._spec(call)
        recovery = "once" if spec is None else spec.recovery
        if leaving and isinstance(end, OutcomeUnknown) and (recovery != "once" or call.background):
            return  # the next owner reruns it, or asks; what goes to the background is sent there again
        if leaving and (call.deferred or (ended is not None and ended.deferred)):
            return  # it stays on its wait
        blobs, withheld = ((), "") if ended is None else (ended.blobs, ended.withheld)
        self._end(call, end, call.attempts, call.repeated, blobs, withheld)

    # ------------------------------------------------------------------ names

    def _call_id(self, call: AskedCall) -> str:
        return f"{self.run.turn_id}.{call.call}"
