"""`runtime.processes`: everything that a host may do with processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, get_args, overload

import msgspec
from msgspec import Struct

from perdure.engine.waiters import current_metadata, in_hand, inherited
from perdure.errors import (
    InvalidInput,
    InvalidProcess,
    ProcessEnded,
    ProcessRefused,
    ProcessStuck,
    TimedOut,
    ToolError,
    UnknownStep,
    quoted,
)
from perdure.lifecycle.process import (
    ABANDON_REQUESTED,
    CALLER_DEPARTED,
    EXTERNAL_REF_SET,
    SETTLES,
    SIGNAL,
    SUBSCRIPTION_RETARGETED,
    alive,
    check_args,
    check_process_id,
    check_signal,
    declared,
    known,
    unsettled_steps,
)
from perdure.model import validate
from perdure.model.codec import clean, clean_text, copied, encode_checked, error_text
from perdure.model.command import COMMAND_KIND, Output, OutputChunk, OutputQuery
from perdure.model.ids import check_session_id, mint
from perdure.model.message import Scalar
from perdure.model.process import (
    RETIRED,
    Abandoned,
    AbandonRequest,
    AwaitOutput,
    Cause,
    Event,
    EventType,
    Evidence,
    Failure,
    HostOrigin,
    NoLongerRetained,
    Origin,
    ParentEnd,
    ProcessEvent,
    ProcessOutcome,
    ProcessRow,
    Registration,
    Success,
    WaitOn,
    WakePolicy,
    WakeRow,
    WakeState,
    WakeTarget,
)
from perdure.model.session import Answer, CancelRequest
from perdure.model.write import (
    AddEvent,
    Authority,
    Cancel,
    Change,
    Complete,
    Dismiss,
    EndReceipt,
    EventAdded,
    ExternalOwner,
    ProcessFilter,
    ProcessRef,
    Prune,
    ReconciledAbandon,
    Resume,
    Share,
    Transfer,
)
from perdure.ports.process import ChildOptions, CommandStarts
from perdure.ports.store import Store
from perdure.processes.handle import (
    CancelAsk,
    CancelPolicy,
    ProcessAsk,
    ProcessHandle,
    ProcessPolicy,
    Settlement,
    SignalReceipt,
    Startable,
    handle_id,
    read_start,
    step_call_id,
)
from perdure.processes.worker import ProcessWorker
from perdure.tools.check import check

R = TypeVar("R")

FOLLOW_SECONDS = 0.25
LIVE = ("queued", "running", "waiting", "stuck")
"""How a process may be that has not ended."""
AGENT, MESSAGE = "turn", "message"
"""The kind of a process that is an agent at work (`sessions/subagents.py`), and the signal that speaks to it."""
FOR_EVER = 1e12
"""Seconds: more than any store has seen, and fewer than a store can count."""


class Start(Struct, frozen=True):
    """What a start says besides what is started."""

    id: str | None = None
    label: str = ""
    origin: Origin = HostOrigin()
    cause: Cause | None = None
    parent: str | None = None
    parent_end: ParentEnd = "abandon"
    wake: WakeTarget | None = None
    grants: tuple[str, ...] = ()
    env: str | None = None
    metadata: dict[str, Scalar] | None = None
    """Whom it is for; None: whom the work at hand is for."""
    asker: ProcessAsk | None = None
    """That a session wants it, for the host's policy; None: the host does."""


class ProcessService:
    """The processes of a store. Everything here works on any process, whichever worker owns it."""

    def __init__(
        self, worker: ProcessWorker, cancel_policy: CancelPolicy | None = None, policy: ProcessPolicy | None = None
    ) -> None:
        self._worker, self._clock = worker, worker.clock
        self.cancel_policy, self._policy = cancel_policy, policy

    @property
    def _store(self) -> Store:
        self._worker.mode.check_work()
        return self._worker.store

    # ------------------------------------------------------------------ starting

    async def start(
        self, what: Any, args: Mapping[str, Any] | None = None, start: Start | None = None
    ) -> ProcessHandle[Any]:
        """Begin a process; on disk when this returns. The same id with the same content is the same process."""
        start = start or Start()
        what, args, codec = read_start(what, args)
        draft = await self._worker.draft(what, clean(check_args(args)))
        process_id = (
            mint("p", self._clock.now(), self._worker.random.bits(40))
            if start.id is None
            else check_process_id(start.id)
        )
        if start.asker is not None and self._policy is not None and await self._store.process(process_id) is None:
            data = (args or draft.input) if start.asker.data is None else start.asker.data
            await self.check(msgspec.structs.replace(start.asker, name=draft.name, data=data))
        depth, metadata = inherited()
        registration = msgspec.structs.replace(
            draft,
            id=process_id,
            label=clean_text(start.label) or draft.label,
            origin=start.origin,
            cause=start.cause,
            parent=start.parent,
            parent_end=start.parent_end,
            wake=start.wake,
            env=start.env,
            depth=depth,
            metadata=dict(metadata) if start.metadata is None else start.metadata,
        )
        if registration.kind == AGENT and not in_hand():
            registration = await self._worker.events.filter_start(registration)
        encode_checked(registration, "the arguments of a process")
        blobs = () if start.env is None else (start.env,)
        self._worker.mode.check_work()
        if registration.kind == COMMAND_KIND:
            await self._begin_command(registration, what, start.grants, blobs)
        else:
            await self._worker.register(registration, start.grants, blobs)
        return ProcessHandle(self, process_id, codec)

    async def _begin_command(
        self, registration: Registration, what: Any, grants: tuple[str, ...], blobs: tuple[str, ...]
    ) -> None:
        """Register a command, and wait until its program runs, if it is begun here."""
        commands = cast(CommandStarts, self._worker.engines[COMMAND_KIND])
        known = await self._store.process(registration.id)
        if known is None:
            await commands.check_output(registration)
        with commands.admitted(registration, known, what) as admitted:
            await self._worker.register(registration, grants, blobs, admitted.reference, admitted.limits)
            if registration.id in self._worker.runs:
                await admitted.begun()
            else:
                commands.not_begun_here(registration.id)

    def output(self, process_id: str, query: OutputQuery) -> Output:
        """What a process wrote that has output: a command."""
        return Output(functools.partial(self._output, handle_id(process_id), query))

    async def _output(self, process_id: str, query: OutputQuery) -> AsyncIterator[OutputChunk]:
        row = known(await self._store.process(process_id), process_id)
        async with contextlib.aclosing(self.output_of(row, query)) as chunks:
            async for chunk in chunks:
                yield chunk

    def output_of(self, row: ProcessRow, query: OutputQuery) -> AsyncGenerator[OutputChunk, None]:
        """The same of a row that was just read."""
        read = getattr(self._worker.engines.get(row.registration.kind), "read_output", None)
        if read is None:
            raise InvalidProcess(f"process {row.id!r} is a {row.registration.kind}, and has no output to read")
        chunks: AsyncGenerator[OutputChunk, None] = read(row, query, functools.partial(self._store.process, row.id))
        return chunks

    async def start_child(
        self, parent: ProcessRow, key: str, what: Any, args: Mapping[str, Any], options: ChildOptions
    ) -> str:
        """A process that another one starts: it belongs to the same chain, and is asked for once."""
        wake = parent.registration.wake
        if options.wake not in get_args(WakePolicy):
            raise InvalidProcess(f"wake={options.wake!r} is not usable: say {', '.join(get_args(WakePolicy))}")
        if wake is not None:
            wake = msgspec.structs.replace(wake, policy=options.wake)
        start = Start(
            f"{parent.id}.{key}",
            options.label,
            parent.registration.origin,
            Cause("process", parent.id),
            parent.id,
            options.parent_end,
            wake,
            env=parent.registration.env,
        )
        return (await self.start(what, args, start)).id

    async def register(  # noqa: PLR0913  # what may be said about work of others, each by name
        self,
        process_id: str,
        *,
        label: str = "",
        metadata: Any = None,
        signals: Mapping[str, Any] | Iterable[str] = (),
        events: Iterable[EventType] = (),
        wake: WakeTarget | None = None,
        grants: Iterable[str] = (),
    ) -> ProcessHandle[Any]:
        """Register work that is done outside, by a program that will `complete` it.

        Only signals and events named here are taken. `signals` may give a JSON schema for each payload.
        """
        process_id, sessions = (
            check_process_id(process_id),
            tuple(map(check_session_id, validate.several(grants, "grants"))),
        )
        named = (
            signals
            if isinstance(signals, Mapping)
            else dict.fromkeys(map(check_signal, validate.several(signals, "signals")))
        )
        depth, inherits = inherited()
        types = (*(EventType(f"{SIGNAL}{check_signal(name)}", each) for name, each in named.items()),)
        registration = Registration(
            process_id,
            "external",
            "externally_owned",
            input=clean(metadata),
            label=clean_text(label),
            events=types + validate.several(events, "events"),
            wake=wake,
            depth=depth,
            metadata=dict(inherits),
        )
        validate.read_back(registration, f"process {process_id!r}", InvalidProcess)
        encode_checked(registration, "the metadata of a process")
        self._worker.mode.check_work()
        await self._worker.register(registration, sessions)
        return ProcessHandle(self, process_id)

    # ------------------------------------------------------------------ looking

    @overload
    def handle(self, process: Any, function: Startable[R]) -> ProcessHandle[R]: ...
    @overload
    def handle(self, process: Any, function: None = None) -> ProcessHandle[Any]: ...
    def handle(self, process: Any, function: Startable[Any] | None = None) -> ProcessHandle[Any]:
        """A handle from its JSON or its id. Nothing is looked up: any process that knows the id may ask for it.

        With the `function` that it runs, the result is of the type which that returns; otherwise it is JSON.
        """
        return ProcessHandle(self, handle_id(process), None if function is None else function.returns())

    async def get(self, process_id: str) -> ProcessRow:
        await asyncio.sleep(0)  # reads of a file do not wait: a host that polls must not keep its Runtime from working
        process_id = handle_id(process_id)
        return known(await self._store.process(process_id), process_id)

    async def list(
        self, status: str | Sequence[str] | None = None, *, limit: int = 100, **wanted: Any
    ) -> Sequence[ProcessRow]:
        """Processes, newest first. Filters: kind, name, definition, label, session_id, origin, parent, live, …"""
        await asyncio.sleep(0)  # reads of a file do not wait: a host that polls must not keep its Runtime from working
        statuses = (
            () if status is None else (status,) if isinstance(status, str) else validate.several(status, "status")
        )
        unknown = [each for each in statuses if each not in (*RETIRED, *LIVE)]
        if unknown:
            raise InvalidInput(
                f"there is no status {quoted(unknown)}: use {', '.join(LIVE)}, {', '.join(sorted(RETIRED))}"
            )
        try:
            chosen = ProcessFilter(status=statuses, limit=validate.count(limit, "limit"), **wanted)
        except TypeError as error:
            raise InvalidInput(f"{error}: filter by {', '.join(ProcessFilter.__struct_fields__)}") from None
        for each in ("since", "until", "before"):
            if getattr(chosen, each) is not None:
                validate.count(getattr(chosen, each), each)
        return await self._store.processes(validate.readable(chosen, "the filter"))

    async def events(self, process_id: str, after: int = 0, *, follow: bool = False) -> AsyncIterator[ProcessEvent]:
        """Events of a process after number `after`; with `follow`, until it has ended."""
        process_id, after = handle_id(process_id), validate.count(after, "after")
        row = known(await self._store.process(process_id), process_id)
        while True:
            over = not row.live
            found = await self._store.events(row.pid, after)
            for place, sequence, event in found:
                after = sequence
                yield ProcessEvent(row.id, sequence, place, event.type, event.payload, event.at, event.key)
            if found:
                continue
            if not follow or over:
                return
            await self._worker.wait_change(process_id, FOLLOW_SECONDS)
            row = known(await self._store.process(process_id), process_id)

    async def changes(self, cursor: int = 0, limit: int = 1000) -> Sequence[Change]:
        """Processes that have changed after `cursor`, in order; tombstones have no row. Go on from the last cursor."""
        found = await self._store.changes(validate.count(cursor, "cursor"), validate.count(limit, "limit"))
        return [Change(place, row.id, None if row.pruned is not None else row) for place, row in found]

    async def outcome(self, process_id: str, timeout: float | None = None) -> AwaitOutput:
        """How a process ended; waits for it. For a pruned one it returns `NoLongerRetained`."""
        process_id, timeout = handle_id(process_id), validate.seconds(timeout)
        self._worker.mode.check_work()
        try:
            async with asyncio.timeout(timeout):
                row = await self._worker.wait_end(process_id)
        except TimeoutError:
            raise TimedOut(f"process {process_id!r} did not end", timeout) from None
        if row.pruned is not None:
            return NoLongerRetained(row.status, row.pruned)
        if row.stuck is not None:
            raise ProcessStuck(row.id, f"is stuck ({row.stuck}): mend it, then resume it", {"stuck": row.stuck})
        outcome = row.record.outcome
        if outcome is None:
            raise ProcessEnded(row.id, row.status)
        if isinstance(outcome, Success) and outcome.blob is not None:
            return Success(msgspec.json.decode(await self._store.blobs.get(outcome.blob.digest)))
        return outcome

    # ------------------------------------------------------------------ asking

    async def signal(self, process_id: str, name: str, payload: Any = None, *, key: str | None = None) -> SignalReceipt:
        """Send a signal: the number of the event that it became, and whether the process waits for it.

        The same `key` is the same signal.
        """
        process_id, name, plain = handle_id(process_id), check_signal(name), clean(payload)
        if key is not None:
            key = validate.name(key, "key")
        encode_checked(plain, "the payload of a signal")
        row = known(await self._store.process(process_id), process_id)
        self.check_payload(row, f"{SIGNAL}{name}", plain)
        if row.registration.kind == AGENT and name == MESSAGE and row.live and not in_hand():
            plain = await self._worker.events.filter_message(row, plain)
        key = key or mint("p", self._clock.now(), self._worker.random.bits(40))
        key = f"process:{process_id}:{SIGNAL}{name}:{key}"
        here = self._worker.signals_awaited(process_id)
        return _receipt(await self._worker.send(process_id, name, plain, key), name, here)

    async def settle(
        self,
        process_id: str,
        call_id: str,
        verdict: Settlement,
        *,
        value: Any = None,
        reason: str = "",
        by: str = "host",
    ) -> None:
        """Say what became of a step that a crash interrupted and whose recovery is "ask". Raises UnknownStep."""
        if verdict not in get_args(Settlement):
            raise InvalidInput(f"settle a step as 'rerun', 'done' or 'failed', not {quoted(verdict):.80}")
        process_id = handle_id(process_id)
        answer = Answer(verdict, clean(value), clean_text(reason), clean_text(by))
        encode_checked(answer, "the settlement")
        row = alive(await self._store.process(process_id), process_id)
        here = [WaitOn("", "signal", name) for name in self._worker.signals_awaited(process_id) or ()]
        waiting = unsettled_steps((*row.record.waits, *here))
        step = next((each for each in waiting if step_call_id(process_id, each.key) == call_id), None)
        if step is None:
            raise UnknownStep(call_id)
        key = f"process:{process_id}:{SIGNAL}{step.signal}:{mint('p', self._clock.now(), self._worker.random.bits(40))}"
        await self._worker.send(process_id, step.signal, msgspec.to_builtins(answer), key)

    def check_payload(self, row: ProcessRow, event_type: str, payload: Any) -> None:
        """Refuse a payload that does not fit what the process declared."""
        if not row.live:
            return  # the write is refused, with the reason
        schema = declared(row.registration, event_type).schema
        problem = None if schema is None else check(schema, payload)
        if problem is not None:
            raise InvalidProcess(f"the payload of {event_type!r} does not fit: {problem}")

    async def cancel(self, process_id: str, reason: str = "", *, by: str = "host") -> str:
        """Ask a process to end: "requested", "already_requested" or "ended"."""
        request = CancelRequest(clean_text(by), clean_text(reason))
        stopped = await self._store.write(Cancel(ProcessRef(handle_id(process_id)), request, self._clock.now()))
        if stopped.row is not None:
            self._worker.reconcile_all((stopped.row, *stopped.woken))
        return "ended" if stopped.status == "completion_won" else stopped.status

    async def cancel_for(self, ask: CancelAsk, *, started: bool) -> ProcessRow:
        """Ask a process to end because a session wants it. Every such wish comes here: the host's policy decides,
        unless the run at hand has `started` the process itself. Without a policy the caller has checked whether it may.
        """
        if self.cancel_policy is not None and not started:
            return await self.cancel_policy.cancel(self, ask)
        await self.cancel(ask.process_id, ask.reason, by=f"session {ask.session_id}")
        return await self.get(ask.process_id)

    async def complete(
        self,
        process: Any,
        value: Any = None,
        *,
        error: str | None = None,
        code: str = "failed",
        outcome: ProcessOutcome | None = None,
        authority: Authority | None = None,
    ) -> EndReceipt:
        """Say how a process ended that no worker of ours works on: with a value, an error, or any `outcome`.

        By default as its external owner. "already_applied" and "superseded": it had ended before.
        """
        process_id = handle_id(process)
        if outcome is None:
            plain = clean(value)
            outcome = Success(plain) if error is None else Failure(clean_text(code), clean_text(error), plain)
        if not isinstance(outcome, ProcessOutcome):
            raise InvalidProcess(f"{quoted(outcome)} is no outcome: give Success, Failure, Cancelled or Abandoned")
        authority = ExternalOwner() if authority is None else authority
        if not isinstance(authority, Authority):
            raise InvalidProcess(f"{quoted(authority)} is no authority: leave it out, or give a WorkflowKey")
        validate.read_back(outcome, "an outcome", InvalidProcess)
        encode_checked(outcome, "the outcome of a process")
        ending = await self._store.write(Complete(process_id, outcome, authority, self._clock.now()))
        if ending.status == "committed":
            self._worker.ended(ending.row)
            self._worker.reconcile_all(ending.woken)
        return ending

    async def emit(self, process: Any, event: str, payload: Any = None, *, key: str | None = None) -> int:
        """Add an event that the process declares, from outside."""
        process_id, plain, key = handle_id(process), clean(payload), None if key is None else clean_text(key)
        row = known(await self._store.process(process_id), process_id)
        if not str(event).startswith("process."):
            self.check_payload(row, event, plain)
        return (await self._mark(process_id, Event(event, plain, self._clock.now(), key))).sequence

    async def _mark(self, process_id: str, event: Event) -> EventAdded:
        added = await self._store.write(AddEvent(process_id, event, self._clock.now()))
        self._worker.reconcile(added.row)
        return added

    async def set_external_ref(self, process: Any, reference: Any) -> None:
        """Keep where the work is done: a job's id, a link."""
        await self._mark(handle_id(process), Event(EXTERNAL_REF_SET, clean(reference), self._clock.now()))

    async def caller_departed(self, process: Any) -> None:
        """The program that launched this external work is gone, and will never say how it ended."""
        process_id = handle_id(process)
        added = await self._mark(process_id, Event(CALLER_DEPARTED, None, self._clock.now()))
        self._worker.ended(added.row)

    async def retarget(self, process: Any, wake: WakeTarget) -> None:
        """Another session is woken by this process from now on; with policy "none", no session is."""
        validate.read_back(wake, "a wake target", InvalidProcess)
        await self._mark(handle_id(process), Event(SUBSCRIPTION_RETARGETED, wake, self._clock.now()))

    async def request_abandon(self, process: Any, reason: str = "", *, by: str = "host") -> None:
        """Leave word that this process will never end by itself. It ends nothing; `reconcile_abandon` does."""
        now = self._clock.now()
        request = AbandonRequest(clean_text(by), now, clean_text(reason))
        await self._mark(handle_id(process), Event(ABANDON_REQUESTED, request, now))

    async def reconcile_abandon(self, process: Any, *, by: str = "host") -> EndReceipt:
        """Grant such a request, after a check by its caller: external work ends as abandoned."""
        process_id = handle_id(process)
        row = known(await self._store.process(process_id), process_id)
        if row.live and row.record.abandon is None:
            raise InvalidProcess(f"nobody asked to abandon process {process_id!r}: use request_abandon first")
        proof = "" if row.record.abandon is None else row.record.abandon.reason
        evidence = Evidence("reconciled_request", self._clock.now(), row.owner, proof)
        return await self.complete(process_id, outcome=Abandoned(evidence), authority=ReconciledAbandon(clean_text(by)))

    async def resume(self, process: Any) -> bool:
        """Work again on a process that is stuck (`doctor` says why). False when it is not."""
        row = await self._store.write(Resume(ProcessRef(handle_id(process)), self._clock.now()))
        if row is not None:
            self._worker.reconcile(row)
        return row is not None

    # ------------------------------------------------------------------ who sees it

    async def grant(self, session_id: str, *processes: Any) -> int:
        """Let a session see these processes. It changes nothing about how long they live."""
        return await self._share(session_id, processes)

    async def revoke(self, session_id: str, *processes: Any) -> int:
        return await self._share(session_id, processes, remove=True)

    async def transfer(self, source: str, target: str, *processes: Any) -> int:
        """Hand these processes on: in place of `source`, `target` sees them and is woken by them; all or none.

        What was `source`'s own is `target`'s own from then on.
        """
        source, target = validate.name(source, "source"), check_session_id(target)
        ids = tuple(handle_id(each) for each in processes)
        if not ids or source == target:
            return 0
        moved = await self._store.write(Transfer(source, target, ids, self._clock.now()))
        for process_id in ids:
            self._worker.runner.reread(process_id)  # wakes that the source has not had go to the target
        return moved

    async def _share(self, session_id: str, processes: Sequence[Any], remove: bool = False) -> int:
        session_id, ids = check_session_id(session_id), tuple(handle_id(each) for each in processes)
        return await self._store.write(Share(session_id, ids, self._clock.now(), remove)) if ids else 0

    async def seen(self, session_id: str, rows: Sequence[ProcessRow]) -> Sequence[ProcessRow]:
        """Those of the processes granted to a session that the host's policy lets it see."""
        if self._policy is None:
            return rows
        found = []
        for row in rows:
            sees = await self._asked(functools.partial(self._policy.sees, session_id, row), "see", row.id, session_id)
            if type(sees) is not bool:
                raise ProcessRefused("see", row.id, session_id, f"it answered {quoted(sees):.80}, not True or False")
            if sees:
                found.append(row)
        return found

    async def check(self, ask: ProcessAsk) -> None:
        """Raises ProcessRefused where the host's policy does not let a session do that."""
        if self._policy is not None:
            ask = msgspec.structs.replace(ask, data=copied(ask.data), metadata=current_metadata())
            name = ask.name if ask.process is None else ask.process.id
            await self._asked(functools.partial(self._policy.check, ask), ask.verb, name, ask.session_id)

    async def _asked(self, call: Callable[[], Any], verb: str, name: str, session_id: str) -> Any:
        try:
            answer = call()
            return await answer if inspect.isawaitable(answer) else answer
        except ProcessRefused:
            raise
        except ToolError as error:
            raise ProcessRefused(verb, name, session_id, error.message) from error
        except Exception as error:  # code of the host's: what it cannot decide is refused
            raise ProcessRefused(verb, name, session_id, error_text(error)) from error

    # ------------------------------------------------------------------ wakes of sessions

    async def wakes(self, state: WakeState = "pending", *, session_id: str | None = None) -> Sequence[WakeRow]:
        """Wakes of sessions by processes, oldest first: "pending", "enqueued" or, with its reason, "discarded"."""
        await asyncio.sleep(0)  # reads of a file do not wait: a host that polls must not keep its Runtime from working
        if state not in get_args(WakeState):
            raise InvalidInput(f"there is no state {quoted(state)} of a wake: use pending, enqueued or discarded")
        return await self._store.wakes(None if session_id is None else validate.name(session_id, "session_id"), state)

    async def discard(self, *wakes: int, reason: str) -> int:
        """Discard these wakes, by number. Returns how many were pending."""
        why = clean_text(reason) or "the host said so"
        changed = await self._store.write(Dismiss(_numbers(wakes), self._clock.now(), why))
        return len(changed)

    async def redrive(self, *wakes: int) -> int:
        """Bring discarded wakes back, by number, to be delivered now. Returns how many there were."""
        changed = await self._store.write(Dismiss(_numbers(wakes), self._clock.now()))
        for session_id in dict.fromkeys(wake.session_id for wake in changed):
            self._worker.events.woken(session_id)
        return len(changed)

    # ------------------------------------------------------------------ keeping house

    async def drain_status(self) -> dict[str, int]:
        """How many processes live, by definition. What is not in it may be retired."""
        counts: dict[str, int] = {}
        before: int | None = None
        while page := await self._store.processes(ProcessFilter(live=True, before=before, limit=1000)):
            for row in page:
                name = row.registration.definition or row.registration.kind
                counts[name] = counts.get(name, 0) + 1
            before = page[-1].pid
        return dict(sorted(counts.items()))

    async def prune(
        self,
        older_than: float,
        *,
        status: Sequence[str] = (),
        watermark: int | Literal["no_projector"] = "no_projector",
    ) -> int:
        """Forget processes that ended `older_than` seconds ago or earlier. Returns how many; their ids stay spent.

        `watermark` is the cursor up to which a reader of `changes` has come: what is beyond stays.
        """
        if type(older_than) not in (int, float) or not 0 <= older_than <= FOR_EVER:
            raise InvalidInput(f"prune what ended 0 or more seconds ago, not {quoted(older_than)}")
        now, count, statuses = self._clock.now(), 0, validate.several(status, "status")
        if not all(each in tuple(RETIRED) for each in statuses):
            raise InvalidInput(f"only what is over can be pruned, not {quoted(status)}: {', '.join(sorted(RETIRED))}")
        limit = None if watermark == "no_projector" else validate.count(watermark, "watermark")
        while True:
            gone = await self._store.write(Prune(now - round(older_than * 1000) + 1, now, statuses, watermark=limit))
            count += len(gone)
            for process_id in gone:
                row = await self._store.process(process_id)
                if row is not None:
                    self._worker.ended(row)
            if not gone:
                break
            await asyncio.sleep(0)
        if count:
            await cast(CommandStarts, self._worker.engines[COMMAND_KIND]).sweep()
        return count


def _receipt(added: EventAdded, name: str, here: tuple[str, ...] | None) -> SignalReceipt:
    """What became of a signal. `here`: the signals that it waited for in our memory."""
    record = added.row.record
    here = None if here is None else tuple([each for each in here if not each.startswith(SETTLES)])
    if record.status == "waiting":
        instead = [w.name for w in record.waits if w.kind == "signal" and not w.name.startswith(SETTLES)]
        return SignalReceipt(added.sequence, False, tuple(instead))
    if not added.known and record.sequence > added.sequence:
        return SignalReceipt(added.sequence, True)  # it was parked, and the same write resumed it
    if here is None:
        return SignalReceipt(added.sequence)
    return SignalReceipt(added.sequence, name in here, tuple(each for each in here if each != name))


def _numbers(wakes: Iterable[int]) -> tuple[int, ...]:
    return tuple(validate.count(each, "the number of a wake") for each in wakes)
