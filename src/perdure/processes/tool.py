"""The engine of background tools: any tool as a process, under the recovery contract that the tool has.

    rerun         rerunnable: a worker that died on it costs one repeated, counted attempt
    once, ask     owner_bound: begun and not ended when its worker dies, it is abandoned: its outcome is unknown

    a place, if the tool has limits → its start on disk → the body → how it ended, on disk

An attempt that failed before it had any effect parks the process until the next one is due: no worker owns it
meanwhile, so that no death can make a known failure an unknown one.

A process of a tool has one key in its journal, with two kinds of records: `StepFaltered` after an attempt that had no
effect, and `Begun` where that attempt may not be made again, or where it was left in the middle. A rerun writes nothing
when its worker has died: after three deaths in a row without a record the process is stuck.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, assert_never

from msgspec import Struct, ValidationError
from msgspec.structs import replace

from perdure.engine.control import CANCEL_GRACE
from perdure.engine.retry import is_over, kept_due, next_due
from perdure.engine.waiters import current_metadata, on_thread_of
from perdure.errors import Fenced, InvalidProcess, StoreError, TimedOut, ToolError
from perdure.model.codec import clean, convert, encode_checked
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Event,
    EventType,
    Evidence,
    Failure,
    ProcessOutcome,
    ProcessRecovery,
    Registration,
    SessionOrigin,
    Success,
    WaitOn,
)
from perdure.model.record import Begun, StepFaltered, StepRecord
from perdure.model.tool import (
    Artifact,
    Denied,
    Failed,
    Ok,
    OutcomeUnknown,
    OutputBudget,
    PreparedCall,
    ToolOutcome,
    ToolSpec,
)
from perdure.model.tool import Cancelled as ToolCancelled
from perdure.plugins.calls import Filters
from perdure.ports.process import CancelRequested, EngineRun, Leaving
from perdure.ports.services import ToolHost
from perdure.ports.store import OnDisk, Store
from perdure.ports.tool import Handles
from perdure.tools.artifacts import in_the_past
from perdure.tools.attempt import (
    NOT_BEGUN,
    Again,
    AttemptEnd,
    Attempts,
    Conclude,
    EndCall,
    Leave,
    NotBegun,
    StopCause,
    TryAgain,
    Withdraw,
    next_need,
    settle,
)
from perdure.tools.call import WITHHELD
from perdure.tools.catalog import ToolEntry
from perdure.tools.context import CallHost, ToolContext
from perdure.tools.define import Tool
from perdure.tools.dispatcher import Dispatcher
from perdure.tools.invoke import Interruption, Ready, execute
from perdure.tools.output import AttemptResult, OutputRules, Review

log = logging.getLogger("perdure.processes")

KIND = "tool"
KEY = "1"
ARTIFACT = "artifact"
WHOLE = OutputBudget(None, None)
"""Output is kept whole: it is cut where it is shown to a model."""
PROGRESS_SECONDS = 1.0
"""How often progress is written at most. The newest counts, and the last is never lost."""

CONTRACTS: dict[str, ProcessRecovery] = {"rerun": "rerunnable", "once": "owner_bound", "ask": "owner_bound"}


class ToolInput(Struct, frozen=True, omit_defaults=True):
    """What a background tool was asked for: a prepared call, whose id is the process's, of a tool of an agent."""

    agent: str
    tool: str
    tool_id: str
    args: dict[str, Any]
    payload: Any = None


class BackgroundCall(Struct, frozen=True):
    """A call that was prepared in a turn, to be started as a process."""

    agent: str
    call: PreparedCall
    spec: ToolSpec


class Tools(Protocol):
    """Where the tools of a process are found: the agents of a Runtime and what their sessions add to them."""

    def owner(self, tool: Tool[..., Any]) -> str | None:
        """The agent that has this tool."""
        ...

    def offers(self, agent: str, name: str, session_id: str | None) -> bool: ...

    async def find(self, agent: str, name: str, session_id: str | None, env: str | None) -> ToolEntry | None:
        """The tool, as the environment that was captured knows it."""
        ...

    def host(self, agent: str, session_id: str) -> ToolHost: ...

    def handles(self, run: EngineRun, agent: str) -> Handles: ...

    def review(self, agent: str, session_id: str, call: PreparedCall, spec: ToolSpec) -> Review | None:
        """What the plugins of its session make of how a call ended; None when none of them wants to know."""
        ...

    async def filters(self, agent: str, session_id: str) -> Filters | None:
        """What progress and artifacts of a session's tools pass before they are stored."""
        ...


class ToolEngine:
    """Runs tools as processes."""

    kind = KIND

    def __init__(self, tools: Tools, home: Dispatcher) -> None:
        self._tools, self._home = tools, home

    def knows(self, registration: Registration) -> bool:
        asked = read_input(registration)
        return asked is not None and self._tools.offers(asked.agent, asked.tool, session_of(registration))

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        """The registration of a tool, given as a prepared call or itself; None when it is none."""
        if isinstance(what, BackgroundCall):
            return drafted(what.agent, what.call, what.spec)
        if not isinstance(what, Tool):
            return None
        agent = self._tools.owner(what)
        if agent is None:
            raise InvalidProcess(f"{what!r} is not part of this Runtime: give it to one of its agents (`tools=[…]`)")
        try:
            what.bind(dict(args))
        except ToolError as error:
            raise InvalidProcess(error.message) from None
        return drafted(agent, PreparedCall("", what.spec.tool_id, what.spec.name, dict(args)), what.spec)

    async def run(self, run: EngineRun) -> ProcessOutcome:
        asked, session_id = read_input(run.registration), session_of(run.registration)
        entry = None
        if asked is not None:
            entry = await self._tools.find(asked.agent, asked.tool, session_id, run.registration.env)
        if asked is None or entry is None:
            raise InvalidProcess(f"the tool of process {run.row.id!r} is not there: bring it back, then resume it")
        call = PreparedCall(run.row.id, asked.tool_id, asked.tool, asked.args, asked.payload)
        try:
            ready = Ready(entry, call, None if entry.tool is None else entry.tool.bind(asked.args))
        except ToolError as error:  # its definition has changed since
            return Failure(error.code, error.message)
        review, filters, services = None, None, None
        if session_id is not None:
            review = self._tools.review(asked.agent, session_id, call, entry.spec)
            filters = await self._tools.filters(asked.agent, session_id)
            services = functools.partial(self._tools.host, asked.agent, session_id)
        extras = CallExtras(review, filters, services, functools.partial(self._tools.handles, run, asked.agent))
        records = await run.journal.load() if run.resumed else []
        return await ToolWork(run, ready, self._home, extras).go(records)


def drafted(agent: str, call: PreparedCall, spec: ToolSpec) -> Registration:
    """A registration, still without id."""
    if spec.deferred:
        raise InvalidProcess(f"tool {spec.name} defers its completion, and a turn must wait for that: call it there")
    asked = ToolInput(agent, spec.name, spec.tool_id, call.args, call.payload)
    return Registration(
        "", KIND, CONTRACTS[spec.recovery], spec.name, spec.tool_id, clean(asked), spec.name,
        events=(EventType(ARTIFACT),),
    )  # fmt: skip


def read_input(registration: Registration) -> ToolInput | None:
    """What was asked for; None when that is not readable here."""
    try:
        found: ToolInput = convert(registration.input, ToolInput)
    except ValidationError:
        return None
    return found


def session_of(registration: Registration) -> str | None:
    origin = registration.origin
    return origin.session_id if isinstance(origin, SessionOrigin) else None


class CallExtras(Struct, frozen=True):
    """What a background call has from its session and the Runtime.

    `review` is what plugins make of how it ended, where there are any that see it before it is recorded; `filters` what
    they let be stored of its progress and its artifacts. `services` and `handles` make what its context offers; a
    process without a session has no services.
    """

    review: Review | None
    filters: Filters | None
    services: Callable[[], ToolHost] | None
    handles: Callable[[], Handles]


class ToolWork:
    """One process of a tool that this worker runs. `attempts` have begun, `repeated` of them after a death."""

    def __init__(self, run: EngineRun, ready: Ready, home: Dispatcher, extras: CallExtras) -> None:
        self._run, self._ready, self._home, self._extras = run, ready, home, extras
        self._spec, self._clock, self._needs = ready.entry.spec, home.clock, home.needs(ready.entry)
        # The start of the process approved of it, and there is no turn in which a person could be asked.
        recovery: Any = "rerun" if self._spec.recovery == "rerun" else "once"
        self._contract = replace(self._spec, recovery=recovery, approval="never")
        self.attempts = self.repeated = 0
        self._failed_since: int | None = None

    async def go(self, records: Sequence[StepRecord]) -> ProcessOutcome:
        """Take it from where its records leave it to its end, or to where it parks."""
        last, deaths = records[-1] if records else None, self._run.attempt - 1
        started = self._run.resumed and not isinstance(last, StepFaltered)
        if isinstance(next_need(Attempts(started=started), self._contract), Conclude):
            return self._given_up("it was begun, and nobody saw it end")
        if isinstance(last, StepFaltered | Begun):
            self.attempts = last.attempt
        failed = (each.at for each in records if isinstance(each, StepFaltered) and each.code != NOT_BEGUN.code)
        self._failed_since = next(failed, None)
        self.attempts += min(self._run.row.takeovers, deaths)
        self.repeated = deaths
        if self._contract.recovery == "rerun":
            self.repeated += sum(isinstance(each, Begun) for each in records)
        try:
            if isinstance(last, StepFaltered):
                await self._until(kept_due(self._ready.entry.retries, last.due, self._clock.now()))
            while True:
                await self._may_begin()
                outcome = await self._settled(await self._attempt())
                if outcome is not None:
                    return outcome
        except CancelRequested:  # while no body ran; what a worker died on before may have had its effect
            return self._cancelled(unknown=self.repeated > 0)

    async def _may_begin(self) -> None:
        """Raise what the process was asked for. Left between two attempts it parks: letting go of work that only its
        owner may do would give it up."""
        run = self._run
        if run.cancel_request is None and run.leaving and run.record.first_started is not None:
            await self._until(self._clock.now())
        run.check()

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self) -> AttemptEnd:
        """Wait for a place, make the start durable, run the body."""
        await self._take_place()
        try:
            self.attempts += 1
            if self._contract.recovery == "once":
                self._record_begun()
            await self._run.begin()
            if self._stop is not None:
                self._home.admission.release(self._needs)
                return NotBegun()
        except BaseException:  # also a cancellation: a place that is not released is lost to all
            self._home.admission.release(self._needs)
            raise
        return await self._body()

    def _record_begun(self) -> None:
        begun = Begun(KEY, "step", self._spec.name, "", None, self.attempts, self.repeated, self._clock.now())
        self._run.journal.record(begun)

    async def _take_place(self) -> None:
        """Wait until the tool's limits leave room. While it waits, the process needs no place of the worker."""
        if self._home.admission.try_take(self._needs):
            return
        self._run.rest()
        try:
            await self._run.guard(self._home.admission.take(self._needs))
        except Leaving:
            await self._may_begin()
            raise
        finally:
            self._run.rest(False)

    async def _body(self) -> AttemptEnd:
        spec, home, process_id = self._spec, self._home, self._run.row.id
        loop = asyncio.get_running_loop()
        progress = Progress(self._run, home, self._extras.filters, spec.name)
        context, interruption = self._context(progress), Interruption()
        threaded = self._ready.entry.tool is not None and not self._ready.entry.tool.is_async
        place = home.thread_places.begin(process_id, self._needs) if threaded else None
        ended = None if place is None else functools.partial(place.end_from_thread, loop)
        filters = self._extras.filters
        passing = None if filters is None else functools.partial(filters.content, "file", process_id, spec.name)
        rules = OutputRules(self._run.journal, WHOLE, filter_file=passing)
        with on_thread_of(place):
            task = loop.create_task(execute(self._ready, context, home.threads, rules, interruption, ended))

        def left(_: asyncio.Task[AttemptResult]) -> None:
            if place is None:
                home.admission.release(self._needs)
            elif interruption.begun:
                place.leave()  # its thread releases the place, when it has really ended
            else:
                place.end()

        task.add_done_callback(left)
        home.running[process_id] = spec.name
        try:
            end = await self._ended(task, context, interruption)
        except BaseException:  # not by `guard`: this task itself is cancelled, and nothing of it goes on
            task.cancel()
            raise
        finally:
            home.running.pop(process_id, None)
            progress.close()
            context.close()
        return end if interruption.begun else NotBegun()

    async def _ended(
        self, task: asyncio.Task[AttemptResult], context: ToolContext[Any], interruption: Interruption
    ) -> AttemptEnd:
        """How the body ended. A cancelled one may still return; one that ignores its cancellation is left behind."""
        timed_out = False
        try:
            await self._run.guard(asyncio.wait({task}), self._spec.timeout)
        except TimedOut:
            timed_out = True
        except (CancelRequested, Leaving):
            pass  # `_stop` says which
        if not task.done() and not interruption.over:
            interruption.because(self._why(), timed_out)
            context.mark_cancelled()
            task.cancel()
        if not task.done():
            await asyncio.wait({task}, timeout=None if interruption.over else CANCEL_GRACE)
        if not task.done():
            log.warning("process %s does not end when it is cancelled; it is left behind", self._run.row.id)
            self._home.abandon(task)
        if not task.done() or task.cancelled():
            return OutcomeUnknown(interruption.reason or "it was cancelled while it ran")
        return task.result().end

    @property
    def _stop(self) -> StopCause | None:
        """Why attempts are stopped. A cancel request goes before leaving: it ends the process for good."""
        if self._run.cancel_request is not None:
            return StopCause.CANCELLED
        return StopCause.LEFT if self._run.leaving else None

    def _why(self) -> str:
        match self._stop:
            case StopCause.CANCELLED:
                return "it was cancelled while it ran"
            case StopCause.LEFT:
                return "the runtime was left while it ran"
            case None:
                return f"it did not end within {self._spec.timeout or 0:g} s"

    def _context(self, progress: Progress) -> ToolContext[Any]:
        registration, run = self._run.registration, self._run
        origin, cause = registration.origin, registration.cause
        session_id = origin.session_id if isinstance(origin, SessionOrigin) else ""
        first = run.record.first_started
        in_a_turn = cause is not None and cause.type == "tool_call" and registration.parent is not None
        artifacts = ProcessArtifacts(run, session_id, self._extras.filters, self._spec.name)
        return ToolContext(
            session_id=session_id,
            turn_id=registration.parent or "" if in_a_turn else "",
            call_id=run.row.id,
            tool=self._spec.name,
            attempt=self.attempts,
            generation=run.scope.generation,
            deps=run.deps,
            payload=self._ready.call.payload,
            host=ProcessCallHost(progress, artifacts, self._extras, self._home.store),
            store="" if first is None else first.store,
            metadata=current_metadata(),
        )

    # ------------------------------------------------------------------ what it means

    async def _settled(self, end: AttemptEnd) -> ProcessOutcome | None:
        """How the process ends; None when there is another attempt."""
        stop, counts, now = self._stop, Attempts(True, self.attempts, self.repeated), self._clock.now()
        retries, since = self._ready.entry.retries, self._failed_since or now
        over = isinstance(end, Again) and is_over(retries, end.after, now, since)
        verdict = settle(end, counts, self._contract, stop, room=not over)
        match verdict:
            case TryAgain(failed, after):
                self._failed_since, failures = since, self.attempts - self.repeated
                await self._put_off(failed, next_due(retries, failures, after, now, since, self._home.random) or now)
                return None
            case Withdraw():
                self.attempts -= 1
                if stop is not StopCause.CANCELLED:
                    await self._put_off(NOT_BEGUN, self._clock.now())
                await self._may_begin()
                return None
            case Leave():
                self._record_begun()
                raise Leaving
            case EndCall(outcome, harmless):
                if stop is StopCause.CANCELLED and harmless:
                    return self._cancelled(unknown=self.repeated > 0)
                if self._extras.review is not None and (stop is None or isinstance(outcome, Ok | Failed)):
                    outcome = await self._extras.review(outcome)
                return self._outcome(outcome, stop)
            case _:
                assert_never(verdict)

    def _outcome(self, end: ToolOutcome, stop: StopCause | None) -> ProcessOutcome:
        match end:
            case Ok(value):
                return Success(value)
            case Failed(code, message, data):
                return Failure(code, message, data)
            case Denied() | ToolCancelled():  # from a plugin: a body cannot end so
                return Failure(str(type(end).__struct_config__.tag), end.reason)
            case OutcomeUnknown(reason):
                if stop is StopCause.CANCELLED:
                    return self._cancelled(unknown=True)
                if stop is StopCause.LEFT:
                    raise Leaving  # to release owner-bound work abandons it, which the store records
                return self._given_up(reason)
            case _:
                assert_never(end)

    def _cancelled(self, unknown: bool) -> Cancelled:
        request = self._run.cancel_request
        assert request is not None
        return Cancelled(request.by, request.reason, unknown)

    def _given_up(self, why: str) -> Abandoned:
        return Abandoned(Evidence("engine_gave_up", self._clock.now(), self._run.scope.owner, why))

    # ------------------------------------------------------------------ until the next attempt

    async def _put_off(self, failed: Failed, due: int) -> None:
        # Plugins see how the tool ends. Until then nothing that it said is stored.
        now, message = self._clock.now(), failed.message if self._extras.review is None else WITHHELD
        self._run.journal.record(StepFaltered(KEY, failed.code, message, due, self.attempts, now))
        await self._until(due)

    async def _until(self, due: int) -> None:
        """Leave the process on disk until then. Returns when it is due already, or something has happened to it."""
        run = self._run
        while run.cancel_request is None and (run.leaving or due > self._clock.now()):
            await run.park(WaitOn(KEY, "time", due=due, since=self._clock.now()))
        await run.journal.flush()


class ProcessCallHost(CallHost):
    """What the context of a background tool can reach. A process without a session has no services."""

    def __init__(self, progress: Progress, artifacts: ProcessArtifacts, extras: CallExtras, store: Store) -> None:
        self._progress, self._artifacts, self._store = progress, artifacts, store
        self._services, self._handles = extras.services, extras.handles

    def progress(self, value: Any) -> None:
        self._progress.report(value)

    def artifact_store(self) -> ProcessArtifacts:
        return self._artifacts

    def store_location(self) -> str | None:
        return self._store.location if isinstance(self._store, OnDisk) else None

    def services(self) -> ToolHost:
        return super().services() if self._services is None else self._services()

    def handles(self) -> Handles:
        return self._handles()


class Progress:
    """How far a tool is, written to the store for readers of its process."""

    def __init__(self, run: EngineRun, home: Dispatcher, filters: Filters | None, tool: str) -> None:
        self._run, self._clock, self._filters, self._tool = run, home.clock, filters, tool
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._newest: list[Any] = []
        self._over = False

    def report(self, value: Any) -> None:
        """From any thread."""
        plain = clean(value)
        encode_checked(plain, "the progress of a process")
        self._loop.call_soon_threadsafe(self._take, plain)

    def _take(self, plain: Any) -> None:
        if self._over:
            return
        if self._filters is not None:  # here and not in `report`: plugins are called on the event loop only
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


class ProcessArtifacts:
    """Where a background tool keeps artifacts: with its process at once, and found in the past of its session."""

    def __init__(self, run: EngineRun, session_id: str, filters: Filters | None, tool: str) -> None:
        self._run, self._host, self._session_id = run, run.host, session_id
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
