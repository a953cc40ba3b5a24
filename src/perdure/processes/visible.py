"""What one call may do with processes on behalf of its session, and how it is recorded.

What the run at hand has started itself, by its registration, needs no grant; every other process does. Every await,
signal and cancel ends in a record, whatever came of it; a handle stands in it as it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeAlias, get_args

import msgspec
from msgspec import Struct, ValidationError, field
from msgspec.structs import replace

from perdure.engine.control import CANCEL_GRACE
from perdure.engine.driver import Run
from perdure.engine.journal import Journal, write_referring
from perdure.errors import (
    InvalidInput,
    PerdureError,
    ProcessNotVisible,
    ProcessPruned,
    StoreError,
    TimedOut,
    ToolError,
    UnknownProcess,
    quoted,
)
from perdure.lifecycle.process import AWAITED, ENDS, session_parent
from perdure.model import validate
from perdure.model.codec import clean, clean_text, convert, error_text, model_text
from perdure.model.command import COMMAND_KIND, CommandOptions, CommandOwner, CommandResult
from perdure.model.process import (
    Abandoned,
    AwaitOutput,
    Cancelled,
    Cause,
    Failure,
    Origin,
    ParentEnd,
    ProcessRow,
    SessionOrigin,
    Success,
    Wake,
    WakePolicy,
    WakeTarget,
)
from perdure.model.tool import Artifact, Failed, Ok, OutcomeUnknown, PreparedCall, ToolOutcome, ToolRecord, ToolSpec
from perdure.model.tool import Cancelled as CallCancelled
from perdure.model.write import Dismiss
from perdure.ports.process import EngineRun
from perdure.ports.tool import Parking, StartOptions, WaitEnd
from perdure.processes.command import CommandStart, in_foreground, owner_of, prepared
from perdure.processes.handle import BY_HANDLE, CancelAsk, ProcessAsk, ProcessHandle, ProcessVerb
from perdure.processes.service import ProcessService, Start
from perdure.processes.tool import ARTIFACT, BackgroundCall
from perdure.tools.dispatcher import Dispatcher
from perdure.tools.revive import value_codec
from perdure.tools.waiting import any_over
from perdure.wire import handle_json, parse_handle, status_json, view_json

decode_wake = msgspec.json.Decoder(Wake).decode

TURN_ONLY: tuple[CommandOwner, ...] = ("turn", "detached")

STOP_SECONDS = 0.8 * CANCEL_GRACE
"""How long a cancelled await waits for the end of what it stopped: its turn waits a little longer than that."""
TURN_CANCELLED = "its turn was cancelled"


AnsweredCall: TypeAlias = tuple[ToolOutcome, tuple[Artifact, ...]]
"""How a verb ended, and what it brings along."""


class Asker(Struct, frozen=True):
    """Who asks: a call of a session's turn (`run`), or a background tool (`process`). `parent` is that turn or process.

    `env` makes the environment at hand as bytes; in a process it is the digest of the one that was asked for in. `put`
    are digests of environments whose bytes were put before. `parking`: the call can be left where it waits.
    """

    session_id: str
    agent: str
    call_id: str
    parent: str
    run: Run | None = None
    process: EngineRun | None = None
    env: Callable[[], bytes] | str | None = None
    put: set[str] = field(default_factory=set)
    parking: Parking | None = None


class Visible:
    """The processes that one call sees. It is made for one attempt of it."""

    def __init__(self, service: ProcessService, home: Dispatcher, asker: Asker) -> None:
        self._service, self._store, self._home, self._asker = service, home.store, home, asker
        self._starts = 0
        self._resting = 0
        at = asker.run or asker.process
        journal = Journal[Any](home.store, home.clock, f"call {asker.call_id}", 0) if at is None else at.journal
        # A store in trouble must not become an outcome: everything here may be asked again.
        self._patiently = journal.patiently

    # ------------------------------------------------------------------ starting

    async def known(self) -> dict[str, str] | None:
        """The handle of the call itself as a process, if it is one already."""
        row = await self._store.process(self._asker.call_id)
        return None if row is None else handle_json(row.id)

    async def begin(self, call: PreparedCall, spec: ToolSpec, label: str = "") -> dict[str, str]:
        """Start the call as a process under its own id. The session may see it, and is woken by its end."""
        asker = self._asker
        what = BackgroundCall(asker.agent, call, spec)
        start = self._start(asker.call_id, StartOptions(label=label, wake="turn"), call.args)
        return (await self._patiently(functools.partial(self._started, what, {}), start)).to_json()

    async def start(self, what: Any, args: Mapping[str, Any], options: StartOptions) -> ProcessHandle[Any]:
        """Start a process besides the call: the same one when the call is made again."""
        self._starts += options.key is None
        name = self._starts if options.key is None else validate.name(options.key, "key")
        process_id = self._asker.call_id if name == "" else f"{self._asker.call_id}.{name}"
        for value, known in ((options.wake, WakePolicy), (options.parent_end, ParentEnd)):
            if value not in get_args(known):
                raise InvalidInput(f"{quoted(value):.80} is not usable here: give one of {', '.join(get_args(known))}")
        run = self._asker.run
        if run is not None and options.parent_end == "cancel":
            run.start_children()
        if isinstance(what, CommandStart) and run is not None and run.agent.wait_for_commands is not None:
            what = replace(what, command=replace(what.command, held=options.owner != "detached"))
        start = self._start(process_id, options)
        if options.owner == "session":
            start = replace(start, parent=session_parent(self._asker.session_id), parent_end="cancel")
        try:
            handle = await self._patiently(functools.partial(self._started, what, args), start)
        except asyncio.CancelledError:
            if options.owner == "session":
                self._stop_unheld(process_id)
            raise
        return handle if self._asker.process is None else RestingHandle(self._service, handle, self._rest)

    def _stop_unheld(self, process_id: str) -> None:
        """When the turn is cancelled while a process of its session is being started: no caller has its handle, so it
        is asked to stop. The request is written after the registration, if that is still on its way."""
        run = self._asker.run
        if run is None or run.control.request is None:
            return
        by = run.control.request.by

        async def stop() -> None:
            with contextlib.suppress(UnknownProcess):  # it was never registered
                await self._service.cancel(process_id, TURN_CANCELLED, by=by)

        self._home.abandon(asyncio.ensure_future(stop()))

    async def command(
        self, argv: Sequence[str], options: CommandOptions, background_after: float | None = None
    ) -> ProcessHandle[CommandResult] | CommandResult:
        """Run a command besides the call, and wait for it for so long."""
        what, here = prepared(argv, options), self._asker.session_id
        owner = owner_of(options, "session" if here else "turn", ("turn", "session", "detached") if here else TURN_ONLY)
        end: ParentEnd = "cancel" if owner == "turn" else "abandon"
        left = background_after is not None or options.get("watch") is not None
        wake = options.get("wake", "turn" if left else "none")
        asked = StartOptions(options.get("key"), clean_text(options.get("label", "")), wake, True, end, owner)
        handle: ProcessHandle[CommandResult] = await self.start(what, {}, asked)
        found = await in_foreground(handle, background_after)
        if found is not handle and wake != "none":
            row = await self._store.process(handle.id)
            if row is not None:
                await self._discard_wake(row)
        return found

    async def command_of(self, process_id: str) -> ProcessHandle[CommandResult]:
        """A command that the session may see."""
        row = await self._patiently(self._seen, process_id)
        if row.registration.kind != COMMAND_KIND:
            raise ProcessNotVisible(process_id, self._asker.session_id)
        handle: ProcessHandle[CommandResult] = ProcessHandle(self._service, row.id, value_codec(CommandResult))
        return handle if self._asker.process is None else RestingHandle(self._service, handle, self._rest)

    def _start(self, process_id: str, options: StartOptions, args: Mapping[str, Any] | None = None) -> Start:
        asker = self._asker
        origin: Origin = SessionOrigin(asker.session_id)
        cause, wake = Cause("tool_call", asker.call_id), WakeTarget(asker.session_id, asker.agent, options.wake)
        if asker.process is not None:
            above = asker.process.registration
            origin, cause = above.origin, Cause("process", asker.process.row.id)
            wake = wake if above.wake is None else WakeTarget(above.wake.session_id, above.wake.agent, options.wake)
        return Start(
            process_id,
            options.label,
            origin,
            cause,
            asker.parent,
            options.parent_end,
            wake if options.wake != "none" and wake.session_id else None,
            (asker.session_id,) if options.grant and asker.session_id else (),
            asker=ProcessAsk("start", asker.session_id, asker.call_id, data=args),
        )

    async def _started(self, what: Any, args: Mapping[str, Any], start: Start) -> ProcessHandle[Any]:
        env = self._asker.env
        if env is None or isinstance(env, str) or isinstance(what, CommandStart):
            env = None if isinstance(what, CommandStart) else env  # a command looks for no tool in it
            return await self._service.start(what, args, replace(start, env=env))
        data = env()
        digest = sha256(data).hexdigest()
        put, known = functools.partial(self._store.blobs.put, data), self._asker.put
        if digest not in known:
            await put()
            known.add(digest)
        # A sweep may have taken it since: then it is put again.
        return await write_referring(
            functools.partial(self._service.start, what, args, replace(start, env=digest)), put
        )

    def _rest(self, by: int) -> None:
        """A background tool that only waits for another process leaves its place: the other may need one."""
        self._resting += by
        if self._asker.process is not None:
            self._asker.process.rest(self._resting > 0)

    # ------------------------------------------------------------------ the verbs

    async def await_process(self, handle: Any, timeout: float | None = None) -> ToolRecord:
        """Wait for the end of a process; its outcome is the record's."""
        work = functools.partial(self._await, timeout=timeout)
        return await self._recorded("await_process", {"handle": handle}, work)

    async def wait_ended(self, handles: Sequence[Any], timeout: float | None = None) -> WaitEnd:
        """Wait for the first end of these processes; the turn may leave memory meanwhile."""
        validate.seconds(timeout)
        if not handles:
            raise InvalidInput("there is nothing to wait for: give a handle")
        rows = [await self._seen(each if isinstance(each, str) else _id_of(each)) for each in handles]
        for row in rows:
            await self._allowed("await", row)
        if self._asker.parking is None and self._asker.process is None:
            said = 'only a tool that may run again can be left where it waits: declare it with recovery="rerun"'
            raise ToolError(said, code="tool_wait_not_declared")
        return await self._first_end(tuple(dict.fromkeys([row.id for row in rows])), timeout)

    async def stop_own(self, processes: Sequence[str]) -> None:
        """The turn is cancelled while it waits for these: those that it has started itself are asked to stop."""
        request = None if self._asker.run is None else self._asker.run.control.request
        for process_id in processes:
            row = await self._store.process(process_id)
            if row is not None and row.live and self._own(row):
                by = "" if request is None else request.by
                await self._patiently(functools.partial(self._stop, by), process_id)

    async def _stop(self, by: str, process_id: str) -> None:
        await self._service.cancel(process_id, "its turn was cancelled", by=by)

    async def signal_process(self, handle: Any, signal_name: str, payload: Any = None) -> ToolRecord:
        """Send a signal, once however often the call is made."""
        args = {"handle": handle, "signal_name": signal_name, "payload": payload}
        work = functools.partial(self._signal, name=signal_name, payload=payload)
        return await self._recorded("signal_process", args, work)

    async def cancel_process(self, handle: Any, reason: str = "") -> ToolRecord:
        """Ask a process to end."""
        work = functools.partial(self._cancel, reason=reason)
        return await self._recorded("cancel_process", {"handle": handle}, work)

    async def list_processes(self, live: bool = True, limit: int = 50) -> list[dict[str, Any]]:
        """The processes that the session may see, newest first."""
        session_id, before = self._asker.session_id, None
        found: list[dict[str, Any]] = []
        while len(found) < limit:
            page = await self._service.list(
                session_id=session_id, live=True if live else None, limit=limit, before=before
            )
            found += [view_json(row) for row in await self._shown(page)]
            if len(page) < limit:
                break
            before = page[-1].pid
        return found[:limit]

    async def _recorded(
        self,
        tool: str,
        args: dict[str, Any],
        work: Callable[[Any], Awaitable[AnsweredCall]],
    ) -> ToolRecord:
        began = self._home.clock.monotonic()
        try:
            outcome, artifacts = await self._patiently(work, args["handle"])
        except StoreError:
            raise
        except PerdureError as error:
            outcome, artifacts = Failed(error.code, _error_words(error)), ()
        spent = int((self._home.clock.monotonic() - began) * 1000)
        return ToolRecord(self._asker.call_id, tool, args, outcome, duration_ms=spent, artifacts=artifacts)

    async def _await(self, handle: Any, timeout: float | None) -> AnsweredCall:
        process_id, _ = parse_handle(handle)
        row = await self._seen(process_id)
        await self._allowed("await", row)
        output = await self._end_of(row, timeout)
        if output is None:
            now = await self._seen(process_id)
            note = "it goes on: something was said to you, which comes first"
            return Ok({"process_id": process_id, "status": now.status, "note": note}), ()
        artifacts = await self._artifacts(row) if isinstance(output, Success) else ()
        await self._discard_wake(row)
        return as_call(process_id, output), artifacts

    async def _signal(self, handle: Any, name: str, payload: Any) -> AnsweredCall:
        process_id, _ = parse_handle(handle)
        try:
            row = await self._seen(process_id)
            await self._allowed("signal", row, name, payload)
            key = f"process-{self._asker.call_id}"
            receipt = await self._service.signal(process_id, name, payload, key=key)
        except StoreError:
            raise
        except PerdureError as error:
            return Failed(error.code, f"signal failed: {_error_words(error)}"), ()
        note = receipt.note(name)
        return Ok({"process_id": process_id, "sequence": int(receipt)} | ({"note": note} if note else {})), ()

    async def _cancel(self, handle: Any, reason: str) -> AnsweredCall:
        process_id, _ = parse_handle(handle)
        try:
            return Ok(status_json(await self._cancelled(process_id, handle, reason or BY_HANDLE))), ()
        except StoreError:
            raise
        except PerdureError as error:
            return Failed(error.code, f"cancel failed: {_error_words(error)}"), ()
        except ToolError as error:
            return Failed(error.code, f"cancel failed: {error.message}"), ()
        except Exception as error:  # the host's own policy may raise anything; the caller is told
            return Failed("cancel_refused", f"cancel failed: {error_text(error)}"), ()

    async def _cancelled(self, process_id: str, handle: Any, reason: str) -> ProcessRow:
        """The process after it was asked to end: at once where possession is enough, else as the host decides."""
        asker, row = self._asker, await self._store.process(process_id)
        started = row is not None and self._own(row)
        if self._service.cancel_policy is None and not started:
            await self._seen(process_id)
        granted = not started and row is not None and await self._is_shown(row)
        ask = CancelAsk(asker.session_id, process_id, asker.call_id, "process", clean(handle), reason, granted)
        return await self._service.cancel_for(ask, started=started)

    # ------------------------------------------------------------------ parts

    def _own(self, row: ProcessRow) -> bool:
        """Whether the run at hand has started it."""
        each, asker = row.registration, self._asker
        in_turn = asker.process is None and each.origin == SessionOrigin(asker.session_id)
        ours = each.cause is not None and each.cause.id.startswith(f"{asker.parent}.") and each.kind == COMMAND_KIND
        return (each.parent == asker.parent or ours) and (in_turn or asker.process is not None)

    async def _seen(self, process_id: str) -> ProcessRow:
        row = await self._store.process(process_id)
        if row is not None and row.pruned is not None:
            raise ProcessPruned(process_id, row.status, row.pruned)
        if row is not None and (self._own(row) or await self._is_shown(row)):
            return row
        raise ProcessNotVisible(process_id, self._asker.session_id)

    async def _is_shown(self, row: ProcessRow) -> bool:
        return await self._store.is_granted(self._asker.session_id, row.id) and bool(await self._shown([row]))

    async def _shown(self, rows: Sequence[ProcessRow]) -> Sequence[ProcessRow]:
        """Those that the host's policy lets the session see. What the run at hand has started is its own to see."""
        seen = await self._service.seen(self._asker.session_id, [row for row in rows if not self._own(row)])
        numbers = {row.pid for row in seen}
        return [row for row in rows if row.pid in numbers or self._own(row)]

    async def _allowed(self, verb: ProcessVerb, row: ProcessRow, name: str = "", data: Any = None) -> None:
        asker = self._asker
        await self._service.check(ProcessAsk(verb, asker.session_id, asker.call_id, name, data, row))

    async def _first_end(self, processes: tuple[str, ...], timeout: float | None) -> WaitEnd:
        """Wait for the first end of these, on disk where the call can be left there."""
        in_memory, parking = functools.partial(self._in_memory, processes), self._asker.parking
        if parking is not None:
            return await parking.wait_ended(processes, timeout, in_memory)
        try:
            async with asyncio.timeout(timeout):
                await in_memory()
        except TimeoutError:
            return "ended" if await any_over(self._store, processes) else "timeout"
        return "ended"

    async def _in_memory(self, processes: tuple[str, ...]) -> None:
        waits = [asyncio.ensure_future(self._service.outcome(each)) for each in processes]
        self._rest(1)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._rest(-1)
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)  # what it is, who asks for the outcome is told

    async def _end_of(self, row: ProcessRow, timeout: float | None) -> AwaitOutput | None:
        """How it ends; None where something was said to the session meanwhile. When the turn is cancelled, what it
        started itself is asked to stop: the caller gets the truth if that comes soon, and others' processes are left
        alone."""
        self._rest(1)
        try:
            if self._asker.parking is not None and row.live and row.stuck is None:
                validate.seconds(timeout)
                how = await self._first_end((row.id,), timeout)
                if how == "input":
                    return None
                if how == "timeout":
                    raise TimedOut(f"process {row.id!r} did not end", timeout)
            return await self._service.outcome(row.id, timeout)
        except asyncio.CancelledError:
            run = self._asker.run
            if run is None or run.control.request is None or not self._own(row):
                raise
            request = run.control.request
            stop = asyncio.ensure_future(self._service.cancel(row.id, TURN_CANCELLED, by=request.by))
            self._home.abandon(stop)
            ended = asyncio.ensure_future(self._service.outcome(row.id, STOP_SECONDS))
            await asyncio.wait({ended})
            if ended.cancelled() or ended.exception() is not None:
                raise
            return ended.result()
        finally:
            self._rest(-1)

    async def _artifacts(self, row: ProcessRow) -> tuple[Artifact, ...]:
        """What it kept under names: files of a background tool, or of an engine that declares this event."""
        if all(each.name != ARTIFACT for each in row.registration.events):
            return ()
        found: dict[str, Artifact] = {}
        async for event in self._service.events(row.id):
            if event.type == ARTIFACT:
                with contextlib.suppress(ValidationError):  # an engine of a host may emit anything
                    artifact: Artifact = convert(event.payload, Artifact)
                    found[artifact.name] = artifact
        return tuple(found.values())

    async def _discard_wake(self, row: ProcessRow) -> None:
        """The session has the end by asking for it: discard the wake for that."""
        waiting = [wake for wake in await self._store.wakes(self._asker.session_id) if wake.pid == row.pid]
        numbers = tuple(wake.number for wake in waiting if decode_wake(wake.body).type in ENDS.values())
        if numbers:
            try:
                await self._store.write(Dismiss(numbers, self._home.clock.now(), AWAITED))
            except asyncio.CancelledError:
                # The wake may be gone by now: the outcome is returned all the same, or the session would never get it.
                return


class RestingHandle(ProcessHandle[Any]):
    """The handle that a background tool has: its process rests while it waits."""

    __slots__ = ("_resting",)

    def __init__(self, service: ProcessService, handle: ProcessHandle[Any], rest: Callable[[int], None]) -> None:
        super().__init__(service, handle.id, handle.codec)
        self._resting = rest

    async def outcome(self, timeout: float | None = None) -> AwaitOutput:
        """How it ended, whatever that was."""
        self._resting(1)
        try:
            return await super().outcome(timeout)
        finally:
            self._resting(-1)


def _id_of(handle: Any) -> str:
    """The id of a process whose handle a tool has, as an object or as JSON."""
    return handle.id if isinstance(handle, ProcessHandle) else parse_handle(handle)[0]


def _error_words(error: PerdureError) -> str:
    """An error in the words of a model, which has tools for handles."""
    more = "; list_processes shows those that you may use" if isinstance(error, UnknownProcess) else ""
    return f"{model_text(error)}{more}"


def as_call(process_id: str, output: AwaitOutput) -> ToolOutcome:
    """How a process ended, as the outcome of a call that awaited it."""
    match output:
        case Success(value=value):
            return Ok(value)
        case Failure(code=code, message=message, data=data):
            return Failed(code, message, data)
        case Cancelled(by=by, reason=reason, unknown=False):
            return CallCancelled(by, reason)
        case Cancelled(by=by, reason=reason):
            why = f": {reason}" if reason else ""
            return OutcomeUnknown(f"process {process_id!r} was cancelled by {by or 'somebody'} while it ran{why}")
        case Abandoned(evidence=evidence):
            proof = f": {evidence.proof}" if evidence.proof else ""
            return OutcomeUnknown(f"process {process_id!r} was given up ({evidence.writer}){proof}")
        case _:
            gone = ProcessPruned(process_id, output.status, output.pruned_at)
            return Failed(gone.code, _error_words(gone))
