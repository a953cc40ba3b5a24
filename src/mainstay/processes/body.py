"""A background tool at work: its attempts, and what becomes of whatever its body does.

What is recorded of it, under the one key it has: `StepFaltered` after an attempt that had no effect, and `Begun` where
nobody may make that attempt again, or where it was left in the middle. A rerun writes nothing when its worker has died:
three deaths in a row without a record, and nobody tries any more.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mainstay.engine.gate import CANCEL_GRACE, Leaving, TurnCancelled
from mainstay.errors import Fenced, StoreError
from mainstay.model.codec import clean, encode_checked
from mainstay.model.process import (
    Abandoned,
    Cancelled,
    Event,
    Evidence,
    Failure,
    ProcessOutcome,
    SessionOrigin,
    Success,
    WaitOn,
)
from mainstay.model.step import Begun, StepFaltered, StepRecord
from mainstay.model.tool import Artifact, Denied, Failed, Ok, OutcomeUnknown, OutputBudget, ToolOutcome
from mainstay.model.tool import Cancelled as ToolCancelled
from mainstay.plugins.filters import Filters
from mainstay.ports.services import ToolHost
from mainstay.ports.tool import Handles
from mainstay.processes.host import Host
from mainstay.processes.run import ProcessRun, Unloaded
from mainstay.tools.attempt import Again, Attempted, Interrupted, Look, Outlet, attempt, needs_of
from mainstay.tools.context import ToolContext
from mainstay.tools.prepare import Ready
from mainstay.tools.round import TOOL_RETRIES
from mainstay.tools.shelf import in_the_past
from mainstay.tools.vetting import WITHHELD
from mainstay.tools.workshop import Workshop

log = logging.getLogger("mainstay.processes")

KEY = "1"
ARTIFACT = "artifact"
WHOLE = OutputBudget(None, None)
"""Nobody reads it yet: whoever shows it to a model cuts it there."""
PROGRESS_SECONDS = 1.0
"""How often progress is written at most. The newest counts, and the last is never lost."""


class ToolWork:
    """One process of a tool in the hands of this worker. `attempts` have begun, `repeated` of them after a death.

    `look` is what plugins make of how it ended, where there are any who want to see that before it is recorded;
    `filters` what they let be stored of its progress and its artifacts.
    """

    def __init__(self, run: ProcessRun, ready: Ready, home: Workshop, host: Host) -> None:
        self._run, self._ready, self._home, self._host = run, ready, home, host
        self._spec, self._clock = ready.entry.spec, home.clock
        self.services: Callable[[], ToolHost] | None = None
        self.handles: Callable[[], Handles] | None = None
        self.look: Look | None = None
        self.filters: Filters | None = None
        self.attempts = self.repeated = 0
        self._expired = False

    async def go(self, records: Sequence[StepRecord]) -> ProcessOutcome:
        """Take it from where its records leave it to its end, or to where it parks."""
        last, deaths = records[-1] if records else None, self._run.attempt - 1
        if self._spec.recovery != "rerun" and self._run.resumed and not isinstance(last, StepFaltered):
            return self._given_up("it was begun, and nobody saw it end")
        if isinstance(last, StepFaltered | Begun):
            self.attempts = last.attempt
        self.attempts += min(self._run.row.takeovers, deaths)
        self.repeated = deaths + sum(isinstance(each, Begun) for each in records if self._spec.recovery == "rerun")
        try:
            if isinstance(last, StepFaltered):
                await self._until(TOOL_RETRIES.due(last.due, self._clock.now()))
            return await self._attempts()
        except TurnCancelled:  # while no body ran; what a worker died on before may have had its effect
            return self._cancelled(unknown=self.repeated > 0)

    async def _attempts(self) -> ProcessOutcome:
        while True:
            await self._may_begin()
            end = await self._seen(await self._attempt())
            outcome = self._outcome(end)
            if outcome is not None:
                return outcome
            assert isinstance(end, Again)
            delay = TOOL_RETRIES.delay(self.attempts, end.after, self._home.random)
            await self._put_off(end.failed, self._clock.now() + round(delay * 1000))

    async def _seen(self, end: ToolOutcome | Again) -> ToolOutcome | Again:
        """How an attempt ended, as the plugins of its session leave it. One that is made again ends nothing."""
        gate = self._run.gate
        if isinstance(end, Again):
            if gate.request is not None or self.attempts <= self._spec.retries:
                return end
            end = end.otherwise
        known = isinstance(end, Ok | Failed)
        return end if self.look is None or (gate.shut and not known) else await self.look(end)

    async def _may_begin(self) -> None:
        """Raise what the process was asked for. Left between two attempts it parks: who lets go of work that only its
        owner may do gives it up."""
        gate = self._run.gate
        if gate.request is None and gate.leaving and self._run.record.first_started is not None:
            await self._until(self._clock.now())
        gate.check()

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self) -> ToolOutcome | Again:
        """Wait for a place, make the start durable, run the body."""
        await self._place()
        try:
            self.attempts += 1
            if self._spec.recovery != "rerun":
                self._record_begun()
            await self._run.begin()
            if self._run.journal.has_unread:
                await self._run.catch_up()
            if self._run.gate.shut:
                await self._withdraw()
            if not await self._host.still_ours(self._run.row):
                raise Fenced(f"process {self._run.row.id}", self._run.scope.generation)
        except BaseException:  # also a cancellation: a place that nobody gives back is lost to all
            self._home.admission.release(needs_of(self._spec))
            raise
        return await self._body()

    def _record_begun(self) -> None:
        begun = Begun(KEY, "step", self._spec.name, "", None, self.attempts, self.repeated, self._clock.now())
        self._run.journal.record(begun)

    async def _place(self) -> None:
        """Wait until the tool's limits leave room; whoever only waits holds none of the worker's places."""
        if self._home.admission.try_take(needs_of(self._spec)):
            return
        self._run.rest(True)
        try:
            await self._run.guard(self._home.admission.take(needs_of(self._spec)))
        except Leaving:
            await self._may_begin()
            raise
        finally:
            self._run.rest(False)

    async def _withdraw(self) -> None:
        """It was to end, or to be left, just before its body began: what is on disk must not say that it did."""
        self.attempts -= 1
        if self._run.gate.request is None:
            await self._put_off(Failed("interrupted", "it had not begun"), self._clock.now())
        await self._may_begin()

    async def _body(self) -> ToolOutcome | Again:
        spec, home, process_id = self._spec, self._home, self._run.row.id
        loop, self._expired = asyncio.get_running_loop(), False
        progress = Progress(self._run, home, self.filters, spec.name)
        context, interrupted, begun = self._context(progress), Interrupted(), Begins()
        on_thread = self._ready.entry.tool is not None and not self._ready.entry.tool.is_async
        ended = functools.partial(home.admission.release_from_thread, loop, needs_of(spec)) if on_thread else None
        filters = self.filters
        passing = None if filters is None else functools.partial(filters.content, "file", process_id, spec.name)
        outlet = Outlet(self._run.journal, WHOLE, filter_file=passing)
        work = functools.partial(attempt, self._ready, context, home.threads, outlet, interrupted, ended)
        task = loop.create_task(begun.run(work))
        task.add_done_callback(lambda _: self._run.gate.wake())
        # A thread gives its place back itself, when it has really ended.
        task.add_done_callback(lambda _: None if on_thread and begun.yet else home.admission.release(needs_of(spec)))
        timer = None if spec.timeout is None else loop.call_later(spec.timeout, self._expire)
        home.running[process_id] = spec.name
        try:
            end = await self._ended(task, context, interrupted)
        except BaseException:  # not by the gate: the task itself is cancelled, and nothing of it goes on
            task.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()
            home.running.pop(process_id, None)
            progress.close()
            context.close()
        if not begun.yet:
            await self._withdraw()
        return end

    async def _ended(
        self, task: asyncio.Task[Attempted], context: ToolContext[Any], interrupted: Interrupted
    ) -> ToolOutcome | Again:
        """How the body ended. Told to stop it may still say so; what does not listen is left behind."""
        gate = self._run.gate
        while not task.done() and not gate.shut and not self._expired:
            await gate.pause()
        if not task.done() and not interrupted.over:
            interrupted.timed_out = self._expired and not gate.shut
            interrupted.reason = self._why()
            context.mark_cancelled()
            task.cancel()
        if not task.done():
            await asyncio.wait({task}, timeout=None if interrupted.over else CANCEL_GRACE)
        if not task.done():
            log.warning("process %s does not end when it is cancelled; it is left behind", self._run.row.id)
            self._home.left_behind(task)
        if not task.done() or task.cancelled():
            return OutcomeUnknown(interrupted.reason or "it was cancelled while it ran")
        return task.result().end

    def _expire(self) -> None:
        self._expired = True
        self._run.gate.wake()

    def _why(self) -> str:
        if self._run.gate.request is not None:
            return "it was cancelled while it ran"
        if self._run.gate.leaving:
            return "the runtime was left while it ran"
        return f"it did not end within {self._spec.timeout or 0:g} s"

    def _context(self, progress: Progress) -> ToolContext[Any]:
        registration, run = self._run.registration, self._run
        origin, cause = registration.origin, registration.cause
        session_id = origin.session_id if isinstance(origin, SessionOrigin) else ""
        first = run.journal.row.record.first_started
        in_a_turn = cause is not None and cause.type == "tool_call" and registration.parent is not None
        return ToolContext(
            session_id=session_id,
            turn_id=registration.parent or "" if in_a_turn else "",
            call_id=run.row.id,
            tool=self._spec.name,
            attempt=self.attempts,
            generation=run.scope.generation,
            deps=self._home.deps,
            payload=self._ready.call.payload,
            progress=progress.tell,
            shelf=ProcessShelf(run, self._host, session_id, self.filters, self._spec.name),
            host=self.services,
            handles=self.handles,
            store="" if first is None else first.store,
        )

    # ------------------------------------------------------------------ what it means

    def _outcome(self, end: ToolOutcome | Again) -> ProcessOutcome | None:
        """How the process ends; None when there is another attempt."""
        request = self._run.gate.request
        if isinstance(end, Again):
            if request is not None:  # it said that it had no effect
                return self._cancelled(unknown=self.repeated > 0)
            if self.attempts <= self._spec.retries:
                return None
            end = end.otherwise
        if isinstance(end, Ok):
            return Success(end.value)
        if isinstance(end, Failed):
            return Failure(end.code, end.message, end.data)
        if isinstance(end, Denied | ToolCancelled):  # a plugin's word: the body says no such thing
            return Failure(str(type(end).__struct_config__.tag), end.reason)
        if request is not None:
            return self._cancelled(unknown=True)
        if self._run.gate.leaving and not self._expired:
            if self._spec.recovery == "rerun":
                self._record_begun()
            raise Leaving  # the next owner runs it again, or it is given up: its contract decides
        return self._given_up(getattr(end, "reason", ""))

    def _cancelled(self, unknown: bool) -> Cancelled:
        request = self._run.gate.request
        assert request is not None
        return Cancelled(request.by, request.reason, unknown)

    def _given_up(self, why: str) -> Abandoned:
        return Abandoned(Evidence("engine_gave_up", self._clock.now(), self._run.scope.owner, why))

    # ------------------------------------------------------------------ until the next attempt

    async def _put_off(self, failed: Failed, due: int) -> None:
        # What plugins see is how the tool ends. Until then nobody has looked through what it says.
        now, message = self._clock.now(), failed.message if self.look is None else WITHHELD
        self._run.journal.record(StepFaltered(KEY, failed.code, message, due, self.attempts, now))
        await self._until(due)

    async def _until(self, due: int) -> None:
        """Leave the process on disk until then. Returns when it is due already, or something has happened to it."""
        run = self._run
        while run.gate.request is None and (run.gate.leaving or due > self._clock.now()):
            wait = WaitOn(KEY, "time", due=due, since=self._clock.now())
            run.parked = not run.journal.has_unread and await run.journal.park((wait,))
            if run.parked:
                raise Unloaded
            await run.catch_up()
        await run.journal.flush()


class Begins:
    """Whether a body has begun: one that was cancelled before has had no effect."""

    __slots__ = ("yet",)

    def __init__(self) -> None:
        self.yet = False

    async def run(self, work: Callable[[], Awaitable[Attempted]]) -> Attempted:
        self.yet = True
        return await work()


class Progress:
    """How far a tool is, on disk for whoever watches its process."""

    def __init__(self, run: ProcessRun, home: Workshop, filters: Filters | None, tool: str) -> None:
        self._run, self._clock, self._filters, self._tool = run, home.clock, filters, tool
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._newest: list[Any] = []
        self._over = False

    def tell(self, value: Any) -> None:
        """From any thread."""
        plain = clean(value)
        encode_checked(plain, "the progress of a process")
        self._loop.call_soon_threadsafe(self._take, plain)

    def _take(self, plain: Any) -> None:
        if self._over:
            return
        if self._filters is not None:  # here and not in `tell`: plugins are called on the event loop only
            plain = self._filters.value("progress", plain, self._run.row.id, self._tool)
        self._newest = [plain]
        if self._task is None:
            self._task = self._loop.create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._newest:
                self._run.progress(self._newest.pop())
                await self._run.journal.report()
                await self._clock.sleep(PROGRESS_SECONDS)
        except (Fenced, StoreError) as error:
            log.warning("progress of process %s: %s", self._run.row.id, error)  # its end will meet the same
        finally:
            self._task = None

    def close(self) -> None:
        """The attempt is over: what was not written yet is, with its end."""
        self._over = True
        if self._newest:
            self._run.progress(self._newest.pop())
        if self._task is not None:
            self._task.cancel()


class ProcessShelf:
    """Where a background tool keeps artifacts: with its process at once, and found in the past of its session."""

    def __init__(self, run: ProcessRun, host: Host, session_id: str, filters: Filters | None, tool: str) -> None:
        self._run, self._host, self._session_id = run, host, session_id
        self._filters, self._tool = filters, tool

    def passed(self, name: str, data: bytes, media_type: str) -> bytes:
        filters = self._filters
        if filters is None:
            return data
        return filters.content("artifact", self._run.row.id, self._tool, name, data, media_type)

    async def keep(self, data: bytes) -> str:
        return await self._run.journal.keep(data)

    async def kept(self, artifact: Artifact) -> None:
        self._run.journal.event(Event(ARTIFACT, clean(artifact), self._host.clock.now()))
        await self._run.journal.flush()

    async def read(self, artifact: Artifact) -> bytes:
        return await self._host.store.blobs.get(artifact.digest)

    async def find(self, name: str) -> Artifact | None:
        row = await self._host.store.session(self._session_id) if self._session_id else None
        return None if row is None else await in_the_past(self._host.store, row, row.head, name)
