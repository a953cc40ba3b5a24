"""The engine of durable functions: runs the code from its first line, answered from its journal as far as that goes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from mainstay.engine.journal import SPILL_BYTES
from mainstay.errors import (
    Diverged,
    InvalidDefinition,
    InvalidProcess,
    MainstayError,
    OutcomeUnknown,
    ProcessFailed,
    StepFailed,
    ToolError,
    quoted,
)
from mainstay.model.codec import clean_text, decode, encode, error_text
from mainstay.model.process import Cancelled, Failure, ProcessOutcome, Registration, Success, WaitOn
from mainstay.model.record import StepRecord
from mainstay.model.session import Offers
from mainstay.ports.process import EngineRun
from mainstay.processes.function.calls import Calls
from mainstay.processes.function.context import BeginAnew, ProcessContext, begin_anew
from mainstay.processes.function.definition import Process, is_name
from mainstay.processes.function.replay import Replay
from mainstay.processes.function.scheduler import Scheduler
from mainstay.processes.function.step import MAX_TEXT, checked, described
from mainstay.processes.tracebacks import log_raised, traceback_text
from mainstay.processes.worker.host import Host
from mainstay.processes.worker.journal import load_steps
from mainstay.processes.worker.run import ProcessRun, Unloaded

KIND = "function"


class FunctionEngine:
    """Runs durable functions. Several versions of one may be registered: a process keeps to the one it began with."""

    kind = KIND

    def __init__(self, functions: Iterable[Process[..., Any]], host: Host) -> None:
        self._functions = by_definition(functions)
        self._host = host

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
        )  # fmt: skip

    def draft_for_others(self, name: str, args: Mapping[str, Any], offered: Offers) -> Registration | None:
        """The registration of a function that only other workers have, by its name or definition.

        A definition that is a name alone is taken up by any worker that has a function of that name. What the function
        declares is known to that worker: here every signal is taken.
        """
        chosen = [each for each in offered.functions if name in (each, each.partition("@")[0])]
        if not chosen or not is_name(name.partition("@")[0]):
            return None
        short = name.partition("@")[0]
        return Registration("", KIND, "rerunnable", short, chosen[-1], dict(args), short, open_signals=True)

    def _named(self, what: Any) -> Process[..., Any] | None:
        """The function of that definition, or the last one given of that name."""
        if not isinstance(what, str):
            return None
        found = self._functions.get(what)
        if found is None and "@" not in what:
            found = next((each for each in reversed(self._functions.values()) if each.name == what), None)
        return found

    async def run(self, run: EngineRun) -> ProcessOutcome:
        assert isinstance(run, ProcessRun)
        function = self._named(run.registration.definition)
        assert function is not None, "a worker takes what its engine knows"
        records: list[StepRecord] = []
        if run.resumed:
            records, ordinal = await load_steps(self._host.store, run.row.pid, run.row.id)
            run.journal.begin_at(ordinal)
        replay = Replay(run.row.id, records)
        row = run.row
        if not row.registration.events and row.registration.open_signals:
            # Started by its name alone, where what the function declares was not known.
            declares = replace(row.registration, events=function.events, open_signals=function.open_signals)
            row = replace(row, registration=declares)
        while True:
            scheduler = await self._scheduler(run, replay)
            calls = Calls(row, run.journal, replay, scheduler, self._host)
            context: ProcessContext[Any] = ProcessContext(calls, function.bind)
            try:
                return await self._run_code(function, context, calls, run)
            except BeginAnew as anew:
                replay = Replay(run.row.id, [await begin_anew(context, anew)])
            finally:
                await scheduler.close()

    async def _scheduler(self, run: ProcessRun, replay: Replay) -> Scheduler:
        """The branches of one run, with the signals that were kept and the cancel request if there is one."""
        host, segment = self._host, replay.segment
        park = functools.partial(self._park, run)
        scheduler = Scheduler(run.journal, replay, host.clock, host.skew.seconds_until, park, run.rest)
        run.listener = scheduler
        if run.leaving:
            scheduler.leave()
        if run.resumed or segment.number or run.row.record.sequence > 1:
            await run.read_events_after(segment.floor)
        if run.journal.row.record.cancel is not None:
            scheduler.cancel(run.journal.row.record.cancel)
        return scheduler

    async def _park(self, run: ProcessRun, waits: tuple[WaitOn, ...]) -> bool:
        """Leave it on disk, unless something has happened meanwhile: then its branches get that.

        Another process may have ended after its branch looked and before this worker listened for that, so its row is
        read again.
        """
        run.parked = not run.journal.has_unread and await run.journal.park(waits)
        if run.parked:
            return True
        await run.journal.patiently(ProcessRun.catch_up, run)
        for wait in waits:
            if wait.kind == "process":
                target = await run.journal.patiently(self._host.store.process, wait.name)
                if target is None or not target.live:
                    run.listener.process_ended(wait.name)
        return False

    async def _run_code(
        self, function: Process[..., Any], context: ProcessContext[Any], calls: Calls, run: ProcessRun
    ) -> ProcessOutcome:
        """Run the code once, from its first line: how it ended, unless it was unloaded."""
        scheduler, segment = calls.scheduler, calls.segment
        args = run.registration.input if segment.args is None else segment.args
        # A copy: what it changes of its arguments is its own affair. If they do not fit, its code has changed.
        work = function.begin(decode(encode(args)), context)
        try:
            try:
                value = await scheduler.drive(work, scheduler.root)
            finally:
                if scheduler.root.own_cancels:
                    await scheduler.take_back_cancels()
            outcome: ProcessOutcome = Success(checked(value, "the result"))
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

    async def _why_unloaded(self, scheduler: Scheduler, run: ProcessRun) -> BaseException:
        fault, task = scheduler.fault, asyncio.current_task()
        if fault is None:
            return Unloaded()
        if task is not None and task.cancelling():
            return asyncio.CancelledError()
        if isinstance(fault, Diverged | InvalidProcess):
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
            return Failure(clean_text(error.code), clean_text(error.message)[:MAX_TEXT], traceback=where)
        case ProcessFailed():
            return Failure(error.code, error_text(error)[:MAX_TEXT], _short(error.outcome), where)
        case MainstayError():
            return Failure(error.code, error_text(error), traceback=where)
        case _:
            return Failure("raised", described(error), traceback=where)


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
        found[function.definition] = function
    return found
