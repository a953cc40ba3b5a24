"""What each write about a process does. The fold of its events is `perdure.lifecycle`'s to decide.

Which worker may claim a process that has begun, by its recovery contract:

    its owner            rerun, reattach             abandon                             leave
    parked it            any worker                  any worker                          (no worker owns it)
    let it go, or left   any worker                  none: abandoned
    is proven dead       any worker                  none: abandoned
    is only silent       any worker, fencing it      none, unless there is a request to
                                                     abandon it: then abandoned

The columns are `ProcessRow.after_owner_death`. Work that has not begun, any worker may begin. Time alone ends nothing.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from perdure.errors import (
    Conflict,
    Fenced,
    InternalError,
    InvalidInput,
    InvalidProcess,
    ProcessConflict,
    ProcessNotVisible,
    ProcessPruned,
    SessionDeleted,
    TooManyCommands,
    UnknownProcess,
)
from perdure.lifecycle import process as events
from perdure.lifecycle import suspects
from perdure.lifecycle.process import (
    alive,
    asking_digest,
    awaits,
    check,
    check_authority,
    declared,
    ending,
    fold,
    is_due,
    known,
    same,
    same_asking,
    wake_for,
    wake_target,
)
from perdure.model import validate
from perdure.model.command import HELD
from perdure.model.ids import turn_id
from perdure.model.process import (
    RETIRED,
    TERMINAL,
    Abandoned,
    Cancelled,
    Event,
    Evidence,
    Failure,
    FirstStart,
    ProcessOutcome,
    ProcessRecord,
    ProcessRow,
    Registration,
    SessionOrigin,
    Tombstone,
    WaitOn,
    WakeRow,
    WakeState,
    WakeTarget,
    is_task,
)
from perdure.model.session import CancelRequest
from perdure.model.write import (
    AddEvent,
    Advance,
    Advanced,
    Cancel,
    CancelReceipt,
    Claim,
    Claimed,
    Complete,
    Dismiss,
    EndReceipt,
    EventAdded,
    ProcessLimits,
    ProcessScope,
    Prune,
    ReconciledAbandon,
    Register,
    Registered,
    Released,
    Resume,
    SendSignal,
    Share,
    Transfer,
)
from perdure.stores.rules import takeovers
from perdure.stores.rules.rows import (
    ActiveProcessesReach,
    AddProcess,
    AddStep,
    AddWake,
    ChildrenOf,
    DeathsOfProcess,
    DropAwaits,
    DropGrant,
    DropSteps,
    Entomb,
    EventByKey,
    EventsAfter,
    IsGranted,
    LastEvent,
    LastStep,
    LiveProcessesNamed,
    LiveProcessesSeenBy,
    LogEvent,
    NextPid,
    NextPlace,
    PendingWakesOf,
    ProcessById,
    ProcessByPid,
    ProcessesAwaiting,
    PrunableProcesses,
    PutAwaits,
    PutDeaths,
    PutGrant,
    PutProcess,
    PutSession,
    PutWake,
    ReferToBlobs,
    SessionById,
    SessionBySid,
    StepAt,
    TombstoneOf,
    Transaction,
    WakeByNumber,
    check_blobs,
)

MARKS = frozenset(
    {
        events.ABANDON_REQUESTED,
        events.EXTERNAL_REF_SET,
        events.CALLER_DEPARTED,
        events.SUBSCRIPTION_RETARGETED,
        events.PROGRESS,
    }
)
"""Reserved event types that `AddEvent` may write."""

PAGE = 256
"""Processes that are read at once when old ones are pruned."""

Woken: TypeAlias = tuple[ProcessRow, ...]


async def register(tx: Transaction, write: Register) -> Registered:
    registration = check(write.registration)
    row = await tx.read(ProcessById(registration.id))
    if row is not None:
        if row.pruned is not None:
            tombstone = await tx.read(TombstoneOf(row.id))
            if tombstone is not None and tombstone.digest != asking_digest(registration):
                raise ProcessConflict(row.id)
            raise ProcessPruned(row.id, row.status, row.pruned)
        if not same_asking(row.registration, registration):
            raise ProcessConflict(row.id)
        return Registered(row, known=True)
    parent = registration.parent
    late = parent is not None and await _is_over(tx, parent, registration.id)
    if isinstance(registration.origin, SessionOrigin) and is_task(registration):
        await check_name(tx, registration.origin.session_id, registration.name)
    if write.limits is not None:
        await _check_limits(tx, registration, write.limits)
    if write.blobs:
        await check_blobs(tx, write.blobs)
    created = Event(events.CREATED, at=write.at)
    owner = write.worker if registration.contract.may_begin else None
    claimed = int(owner is not None)
    number, place = await tx.number(NextPid()), await tx.number(NextPlace())
    row = ProcessRow(number, registration, fold(ProcessRecord(), created), write.at, owner, claimed, claimed)
    tx.change(AddProcess(row))
    tx.change(LogEvent(row.pid, 1, created, place))
    if write.reference is not None and owner is not None and not late:
        start = FirstStart(owner, row.generation, row.attempts, write.at, write.store)
        row = await append_event(tx, row, Event(events.FIRST_STARTED, start, write.at))
        row = await append_event(tx, row, Event(events.EXTERNAL_REF_SET, write.reference, write.at))
        tx.change(PutProcess(row))
    for session_id in write.grants:
        tx.change(PutGrant(session_id, row.pid))
    if write.blobs:
        tx.change(ReferToBlobs(-row.pid, write.blobs))
    if parent is not None and late and registration.parent_end == "cancel":
        # It comes too late to be asked with the others.
        row, _ = await request_cancel(tx, row, _request_of(parent), write.at)
    return Registered(row)


async def _check_limits(tx: Transaction, registration: Registration, limits: ProcessLimits) -> None:
    """Counted in the transaction that adds one, so that Runtimes which start some at once do not pass the limits."""
    kind, origin = registration.kind, registration.origin
    if await tx.read(ActiveProcessesReach(kind, None, limits.total)):
        raise TooManyCommands("commands of this store", limits.total, limits.total)
    if isinstance(origin, SessionOrigin) and await tx.read(
        ActiveProcessesReach(kind, origin.session_id, limits.per_session)
    ):
        raise TooManyCommands(f"commands of session {origin.session_id!r}", limits.per_session, limits.per_session)


async def _is_over(tx: Transaction, parent: str, child: str) -> bool:
    """Whether a parent, a process, a turn or a session, has ended. A worker whose turn another one took over and
    committed may register something for it still, until its next write is fenced."""
    if parent.startswith(events.OF_SESSION):
        owner = await tx.read(SessionById(parent.removeprefix(events.OF_SESSION)))
        if owner is None:
            raise UnknownProcess(parent, f"the session that {child!r} was to end with is not here")
        return owner.deleted
    process = await tx.read(ProcessById(parent))
    if process is not None:
        return not process.live
    session_id, _, turn = parent.rpartition(".")
    session = await tx.read(SessionById(session_id)) if turn.isascii() and turn.isdigit() else None
    if session is None or not 0 < int(turn) < session.next:
        raise UnknownProcess(parent, f"it was to be the parent of {child!r}, and is not here")
    return session.deleted or int(turn) <= session.head


async def register_applied(tx: Transaction, write: Register) -> Registered | None:
    """The receipt of a registration whose reply was lost: applied again it would take itself for a second asking."""
    row = await tx.read(ProcessById(write.registration.id))
    written = 1 if write.reference is None or write.worker is None else 3
    if row is None or row.created != write.at or row.record.sequence != written or row.owner != write.worker:
        return None
    return Registered(row) if same(row.registration, write.registration) else None


# ---------------------------------------------------------------------- an owned process


async def claim(tx: Transaction, write: Claim[ProcessRow]) -> Claimed[ProcessRow]:
    row = await tx.read(ProcessById(write.target.id))
    if row is None or not row.live or row.stuck is not None or not row.registration.contract.may_begin:
        return Claimed(row, won=False)
    if row.owner == write.worker and row.generation == write.generation + 1:
        mark = await tx.read(DeathsOfProcess(row.id)) if row.takeovers else None
        return Claimed(row, won=True, suspect=mark is not None and suspects.is_suspect(mark))
    if row.generation != write.generation or row.owner == write.worker:
        return Claimed(row, won=False)
    if row.status == "waiting" and not is_due(row, write.at):
        return Claimed(row, won=False)
    if row.owner is not None and row.after_owner_death == "abandon":
        return await _give_up(tx, row, write)
    return await _take_over(tx, row, write)


async def _give_up(tx: Transaction, row: ProcessRow, write: Claim[ProcessRow]) -> Claimed[ProcessRow]:
    request = row.record.abandon
    if write.proof is not None:
        evidence = Evidence("sweep", write.at, row.owner, write.proof)
    elif request is not None:
        evidence = Evidence("reconciled_request", write.at, row.owner, f"{request.by}: {request.reason}")
    else:
        return Claimed(row, won=False)  # a silent owner may be alive, and no other worker may do this work
    row, woken = await end(tx, row, Abandoned(evidence), write.at)
    return Claimed(row, won=False, woken=woken)


async def _take_over(tx: Transaction, row: ProcessRow, write: Claim[ProcessRow]) -> Claimed[ProcessRow]:
    """Claimed, unless it has been begun too often.

    To reattach to work that lives is no takeover: its owner died, the work did not. Nothing is held against it.
    """
    dead_owner = row.owner if row.after_owner_death == "rerun" else None
    over = dead_owner is not None
    again = over and row.record.first_started is not None
    limit = row.registration.max_attempts
    if again and limit is not None and row.attempts >= limit:
        failure = Failure("attempts_exhausted", f"it was begun {row.attempts} times, and its owners died")
        row, woken = await end(tx, row, failure, write.at)
        return Claimed(row, won=False, woken=woken)
    mark = await tx.read(DeathsOfProcess(row.id)) if row.takeovers else None
    ruling = await takeovers.judge(tx, -row.pid, dead_owner, mark, (write.worker, write.death))
    if ruling.fate == "held":
        return Claimed(row, won=False, suspect=True)
    # Counted on when a person resumes it: a takeover is a step that may have been made for nothing.
    row = replace(row, generation=row.generation + 1, takeovers=row.takeovers + over)
    if ruling.fate == "stuck" and ruling.deaths is not None:
        tx.change(PutDeaths(ruling.deaths))
        row = await _set_stuck(tx, row, suspects.REASON.format("it"), write.at)
        return Claimed(row, won=False)
    await takeovers.mark_running(tx, ruling, write.worker, write.lived)
    row = replace(row, owner=write.worker, attempts=max(row.attempts + again, 1))
    if row.status == "waiting":
        row = await resume_parked(tx, row, write.at)
    tx.change(PutProcess(row))
    return Claimed(row, won=True, suspect=ruling.suspect)


async def advance(tx: Transaction, write: Advance) -> Advanced:
    scope = write.scope
    row = await tx.read(ProcessByPid(scope.pid))
    if row is not None and row.owner is None and row.generation == scope.generation:
        again = await _again(tx, row, write)
        if again is not None:
            return again
    row = before = _owned(row, scope)
    if write.drop is not None and (not write.records or write.records[-1].ordinal < write.drop):
        raise InternalError(f"process {scope.id} would drop its whole journal: something must stay to begin from")
    if write.blobs:
        await check_blobs(tx, write.blobs)
    ahead = bool(write.park) and before.record.sequence <= write.seen and await _nothing_awaited_has_ended(tx, write)
    if not await _is_known(tx, row, write):
        row = await _record(tx, row, write)
    if write.outcome is not None:
        row, woken = await end(tx, row, write.outcome, write.at)
        return Advanced(row, woken=woken)
    if ahead:
        row = await append_event(tx, row, Event(events.WAITING, {"waits": write.park}, write.at))
        await takeovers.clear(tx, -row.pid, row.takeovers)
        row = replace(row, owner=None, takeovers=0)
        tx.change(PutProcess(row))
        tx.change(PutAwaits(row.pid, awaited(write.park)))
        return Advanced(row, parked=True)
    if row.takeovers and write.records and not write.repeats:
        await takeovers.clear(tx, -row.pid, row.takeovers)
        row = replace(row, takeovers=0)
    if row is not before:
        tx.change(PutProcess(row))
    return Advanced(row)


async def _again(tx: Transaction, row: ProcessRow, write: Advance) -> Advanced | None:
    """The receipt of the write by which an owner parked or ended a process, sent again because its reply was lost.

    Processes that it woke are not named a second time.
    """
    if write.outcome is not None:
        return Advanced(row) if same(row.record.outcome, write.outcome) else None
    if not write.park or not row.live or row.stuck is not None:
        return None
    for node in write.records:
        if await tx.read(StepAt(row.pid, node.ordinal)) != node.body:
            return None
    return Advanced(row, parked=True)


async def _is_known(tx: Transaction, row: ProcessRow, write: Advance) -> bool:
    """Whether this was written before, by a first sending. Refuses what contradicts that, having changed nothing.

    Ordinals of a journal only grow, so what is not beyond its end was in it once, and may have been dropped since.
    Without records, events decide: the owner has seen all up to `seen`, so equal ones after that are this write's.
    """
    if write.records:
        if write.records[-1].ordinal <= await tx.read(LastStep(row.pid)):
            for node in write.records:
                if (body := await tx.read(StepAt(row.pid, node.ordinal))) not in (None, node.body):
                    found = f"record {node.ordinal} of process {row.id}"
                    raise InternalError(f"{found} exists with other content ({body!r})")
            return True
    elif write.events:
        there = await tx.read(EventsAfter(row.pid, write.seen))
        if all(any(same(event, each) for each in there) for event in write.events):
            return True
    for event in write.events:
        if event.key is not None and await tx.read(EventByKey(row.pid, event.key)) is not None:
            raise Conflict(f"key {event.key!r} of process {row.id!r} was used for another event: use a new one")
    return False


async def _record(tx: Transaction, row: ProcessRow, write: Advance) -> ProcessRow:
    """Change what the owner's write says: its records, its start and its events. The row is put by the caller."""
    first = 0 if write.drop is None else write.drop
    if write.drop is not None:
        tx.change(DropSteps(row.pid, write.drop))
    for node in write.records:
        if node.ordinal >= first:
            tx.change(AddStep(row.pid, node.ordinal, node.body))
    if write.blobs:
        tx.change(ReferToBlobs(-row.pid, write.blobs))
    if write.first and row.record.first_started is None:
        start = FirstStart(write.scope.owner, row.generation, row.attempts, write.at, write.store)
        row = await append_event(tx, row, Event(events.FIRST_STARTED, start, write.at))
    for event in write.events:
        row = await append_event(tx, row, event)
        if event.type.startswith(HELD):
            for pid in await tx.read(ProcessesAwaiting(row.id)):
                if pid < 0:
                    await _open_turn(tx, -pid, write.at)
    return row


async def _nothing_awaited_has_ended(tx: Transaction, write: Advance) -> bool:
    """Whether everything that it is to wait for is still ahead: processes live, turns are parked."""
    for wait in write.park:
        if wait.kind == "process":
            target = await tx.read(ProcessById(wait.name))
            if target is None or not target.live:
                return False
        elif wait.kind == "turn" and not await _is_parked(tx, wait.name):
            return False
    return True


async def _is_parked(tx: Transaction, turn: str) -> bool:
    session_id, _, number = turn.rpartition(".")
    session = await tx.read(SessionById(session_id))
    return session is not None and str(session.turn) == number and session.state == "parked"


async def release(tx: Transaction, scope: ProcessScope, at: int, stuck: str | None) -> Released[ProcessRow]:
    row = await tx.read(ProcessByPid(scope.pid))
    free = row is not None and row.owner is None and row.generation == scope.generation
    if row is not None and free and (stuck is None or row.stuck == stuck):
        return Released(row)  # sent again, because its reply was lost
    row = _owned(row, scope)
    await takeovers.release(tx, -row.pid, row.takeovers)
    if stuck is not None:
        return Released(await _set_stuck(tx, row, stuck, at))
    return await _free(tx, row, at, "its owner let it go")


async def _free(tx: Transaction, row: ProcessRow, at: int, why: str) -> Released[ProcessRow]:
    """Clear the owner. What only its owner could do is abandoned, everything else is free to claim."""
    if row.after_owner_death == "abandon":
        row, woken = await end(tx, row, Abandoned(Evidence("owner_drain", at, row.owner, why)), at)
        return Released(row, woken)
    row = replace(row, owner=None)
    tx.change(PutProcess(row))
    return Released(row)


async def release_leaving(tx: Transaction, row: ProcessRow, at: int) -> None:
    """Free a process whose owner retires."""
    await _free(tx, row, at, "its owner left")


async def _set_stuck(tx: Transaction, row: ProcessRow, why: str, at: int) -> ProcessRow:
    row = await append_event(tx, replace(row, owner=None, stuck=why), Event(events.STUCK, {"reason": why}, at))
    tx.change(PutProcess(row))
    for number in await tx.read(ProcessesAwaiting(row.id)):
        if number < 0:  # a turn, whose model can be told; a durable function waits on until it is resumed
            await _open_turn(tx, -number, at)
    return row


def _owned(row: ProcessRow | None, scope: ProcessScope) -> ProcessRow:
    """The process, when `scope` still owns it. The only fence there is: every write of an owner passes here."""
    if row is None or row.id != scope.id or row.owner != scope.owner or row.generation != scope.generation:
        raise Fenced(f"process {scope.id}", scope.generation)
    return row


# ---------------------------------------------------------------------- from outside


async def send_signal(tx: Transaction, write: SendSignal) -> EventAdded:
    row = known(await tx.read(ProcessById(write.process_id)), write.process_id)
    event = Event(f"{events.SIGNAL}{write.name}", write.payload, write.at, write.key)
    before = await _known_event(tx, row, event)
    if before is not None:
        return before
    row = alive(row, write.process_id)
    declared(row.registration, event.type)
    return await _add(tx, row, event)


async def add_event(tx: Transaction, write: AddEvent) -> EventAdded:
    row = known(await tx.read(ProcessById(write.process_id)), write.process_id)
    event = write.event
    before = await _known_event(tx, row, event)
    if before is not None:
        return before
    row = alive(row, write.process_id)
    if event.type not in MARKS:
        if event.type.startswith(events.RESERVED):
            raise InvalidProcess(f"event type {event.type!r} is reserved: only the runtime writes it")
        declared(row.registration, event.type)
    if event.type == events.CALLER_DEPARTED and row.registration.contract.may_begin:
        raise InvalidProcess(f"process {row.id!r} is worked on here: only a caller from outside can depart")
    validate.read_back(event, f"event {event.type!r}", InvalidProcess)
    try:
        fold(row.record, event)
    except msgspec.ValidationError as error:
        raise InvalidProcess(f"event {event.type!r} of process {row.id!r} cannot say this: {error}") from None
    return await _add(tx, row, event)


async def _known_event(tx: Transaction, row: ProcessRow, event: Event) -> EventAdded | None:
    """The receipt of an event that was added before under the same key."""
    found = None if event.key is None else await tx.read(EventByKey(row.pid, event.key))
    if found is None:
        return None
    sequence, before = found
    if not same(before, replace(event, at=before.at)):
        raise Conflict(f"key {event.key!r} of process {row.id!r} was used for another event: use a new one")
    return EventAdded(row, sequence, known=True)


async def _add(tx: Transaction, row: ProcessRow, event: Event) -> EventAdded:
    row = await append_event(tx, row, event)
    sequence = row.record.sequence
    if awaits(row, event):
        row = await resume_parked(tx, row, event.at)
    tx.change(PutProcess(row))
    if event.type == events.SUBSCRIPTION_RETARGETED:
        await retarget_wakes(tx, row)
    woken = await follow_end(tx, row, event.at) if row.status in RETIRED else ()
    return EventAdded(row, sequence, woken=woken)


async def cancel(tx: Transaction, write: Cancel[ProcessRow]) -> CancelReceipt[ProcessRow]:
    row = known(await tx.read(ProcessById(write.target.id)), write.target.id)
    if row.status in RETIRED:
        return CancelReceipt("completion_won", row=row)
    if row.record.cancel is not None:
        return CancelReceipt("already_requested", row=row)
    row, woken = await request_cancel(tx, row, write.request, write.at)
    return CancelReceipt("requested", row=row, woken=woken)


async def complete(tx: Transaction, write: Complete) -> EndReceipt:
    row = known(await tx.read(ProcessById(write.process_id)), write.process_id)
    check_authority(row, write.authority, write.outcome)
    if row.status in TERMINAL:
        return EndReceipt("already_applied" if same(row.record.outcome, write.outcome) else "superseded", row)
    row = alive(row, write.process_id)
    # A worker that reattaches on another machine may be gone with it; its silence is the operator's to judge.
    if row.owner is not None and not isinstance(write.authority, ReconciledAbandon):
        raise Conflict(
            f"process {row.id!r} is owned by worker {row.owner!r}, which says how it ends: cancel it instead"
        )
    payload = {"outcome": write.outcome, "authority": write.authority}
    row, woken = await end(tx, row, write.outcome, write.at, payload)
    return EndReceipt("committed", row, woken)


async def resume(tx: Transaction, write: Resume[ProcessRow]) -> ProcessRow | None:
    row = known(await tx.read(ProcessById(write.target.id)), write.target.id)
    if row.stuck is None:
        return None
    await takeovers.resume(tx, -row.pid, row.takeovers)
    row = await append_event(tx, replace(row, stuck=None), Event(events.REVIVED, None, write.at))
    tx.change(PutProcess(row))
    return row


# ---------------------------------------------------------------------- one more event, and what follows from an end


async def append_event(tx: Transaction, row: ProcessRow, event: Event) -> ProcessRow:
    """One more event: in the log, in the record, and for the session that it wakes. The row is put by the caller."""
    record = fold(row.record, event)
    place = await tx.number(NextPlace())
    tx.change(LogEvent(row.pid, record.sequence, event, place))
    row = replace(row, record=record)
    wake = wake_for(row, event)
    if wake is not None:
        # Its event's place is its number: it grows, and no other event will ever have it.
        tx.change(AddWake(replace(wake, number=place)))
    return row


async def resume_parked(tx: Transaction, row: ProcessRow, at: int) -> ProcessRow:
    """A parked process has something to do again. The row is put by the caller."""
    if row.record.waits and awaited(row.record.waits):
        tx.change(DropAwaits(row.pid))
    return await append_event(tx, row, Event(events.RESUMED, None, at))


def awaited(waits: tuple[WaitOn, ...]) -> tuple[str, ...]:
    """Whose end or going on a parked process waits for. No process has an id with a '#' in it: those are turns."""
    return tuple([w.name if w.kind == "process" else f"#{w.name}" for w in waits if w.kind in ("process", "turn")])


async def end(
    tx: Transaction, row: ProcessRow, outcome: ProcessOutcome, at: int, payload: Any = None
) -> tuple[ProcessRow, Woken]:
    """End a process; resume processes that wait for it, and ask its children to stop."""
    row = await _end_one(tx, row, outcome, at, payload)
    return row, await follow_end(tx, row, at)


async def _end_one(
    tx: Transaction, row: ProcessRow, outcome: ProcessOutcome, at: int, payload: Any = None
) -> ProcessRow:
    if row.record.waits and awaited(row.record.waits):
        tx.change(DropAwaits(row.pid))
    row = await append_event(tx, row, Event(ending(outcome), outcome if payload is None else payload, at))
    if row.takeovers:
        await takeovers.clear(tx, -row.pid, row.takeovers)
    row = replace(row, owner=None, takeovers=0, stuck=None)
    tx.change(PutProcess(row))
    return row


async def follow_end(tx: Transaction, row: ProcessRow, at: int) -> Woken:
    """What follows from the end of a process: those that have something to do because of it, or have ended with it.

    A loop, because a child that ends at once may have children of its own.
    """
    woken: dict[int, ProcessRow] = {}
    over = [row]
    while over:
        row = over.pop()
        for pid in await tx.read(ProcessesAwaiting(row.id)):
            if pid < 0:
                await _open_turn(tx, -pid, at)
            elif (waiting := await _resume_waiting(tx, pid, at)) is not None:
                woken[pid] = waiting
        for child in await _stop_children(tx, row.id, at):
            woken[child.pid] = child
            if child.status in TERMINAL:
                over.append(child)
    return tuple(woken.values())


async def _open_turn(tx: Transaction, sid: int, at: int) -> None:
    """What a parked turn waits for has ended, or has news for it: it is open again, for the next claim."""
    row = await tx.read(SessionBySid(sid))
    if row is None or row.state != "parked" or row.turn is None:
        return
    tx.change(DropAwaits(-sid))
    await resume_with_turn(tx, turn_id(row.id, row.turn), at)
    tx.change(PutSession(replace(row, state="open", reason=None, updated=at)))


async def all_live(tx: Transaction, process_ids: tuple[str, ...]) -> bool:
    """Whether the end of each of these processes is still ahead, as far as no person has to look at it first."""
    for process_id in process_ids:
        row = await tx.read(ProcessById(process_id))
        if row is None or not row.live or row.stuck is not None:
            return False
    return True


async def end_turn(tx: Transaction, turn: str, at: int) -> Woken:
    """What follows from the end of a turn for the processes that it started."""
    woken: dict[int, ProcessRow] = {}
    for child in await _stop_children(tx, turn, at):
        found = await follow_end(tx, child, at) if child.status in TERMINAL else ()
        woken |= {row.pid: row for row in (child, *found)}
    return tuple(woken.values())


async def _stop_children(tx: Transaction, parent: str, at: int) -> list[ProcessRow]:
    """The children that end with their parent, each asked to."""
    children = await tx.read(ChildrenOf(parent, False))
    asked = [each for each in children if each.registration.parent_end == "cancel" and each.record.cancel is None]
    return [await _request_one(tx, child, _request_of(parent), at) for child in asked]


async def end_session(tx: Transaction, session_id: str, at: int) -> None:
    """Ask everything to stop that ends with a session: what it started so and has not handed on, and what was handed
    on to it. What it may only see goes on."""
    children = await tx.read(ChildrenOf(events.session_parent(session_id), False))
    seen = await tx.read(LiveProcessesSeenBy(session_id))
    own = {row.pid: row for row in (*children, *seen) if _ends_with(row, session_id)}
    request = CancelRequest(f"session {session_id}", "its session was deleted")
    for row in own.values():
        await request_cancel(tx, row, request, at)


def _ends_with(row: ProcessRow, session_id: str) -> bool:
    parent, how = row.registration.parent, row.registration.parent_end
    owned = parent is not None and parent.startswith(events.OF_SESSION) and how == "cancel"
    return owned and row.holder == session_id and row.record.cancel is None


async def stopped_children(tx: Transaction, parent: str) -> Woken:
    """The children that were asked to end because their parent had, also those that have."""
    children = await tx.read(ChildrenOf(parent, True))
    return tuple([child for child in children if child.record.cancel == _request_of(parent)])


def _request_of(parent: str) -> CancelRequest:
    """How children are asked to stop whose parent has ended."""
    return CancelRequest(f"parent {parent}", "its parent has ended")


async def resume_with_turn(tx: Transaction, turn: str, at: int) -> None:
    """A parked turn is open again: processes that were parked with it have something to do."""
    for pid in await tx.read(ProcessesAwaiting(f"#{turn}")):
        await _resume_waiting(tx, pid, at)


async def _resume_waiting(tx: Transaction, pid: int, at: int) -> ProcessRow | None:
    """Resume a process that waits for what has ended or goes on. None: another event has resumed it already."""
    row = await tx.read(ProcessByPid(pid))
    if row is None or row.status != "waiting":
        return None
    row = await resume_parked(tx, row, at)
    tx.change(PutProcess(row))
    return row


async def request_cancel(tx: Transaction, row: ProcessRow, request: CancelRequest, at: int) -> tuple[ProcessRow, Woken]:
    """Add a cancel request. A process without an owner that has not begun, or is stuck, ends at once; one whose work
    lives elsewhere is looked for there first, also if it was stuck."""
    row = await _request_one(tx, row, request, at)
    return row, await follow_end(tx, row, at) if row.status in TERMINAL else (row,)


async def _request_one(tx: Transaction, row: ProcessRow, request: CancelRequest, at: int) -> ProcessRow:
    row = await append_event(tx, row, Event(events.CANCEL_REQUESTED, request, at))
    idle = row.owner is None and row.registration.contract.may_begin
    begun = row.record.first_started is not None
    if idle and (not begun or (row.stuck is not None and row.after_owner_death != "reattach")):
        return await _end_one(tx, row, Cancelled(request.by, request.reason, unknown=begun), at)
    if row.stuck is not None:
        await takeovers.resume(tx, -row.pid, row.takeovers)
        row = await append_event(tx, replace(row, stuck=None), Event(events.REVIVED, None, at))
    if row.status == "waiting":
        row = await resume_parked(tx, row, at)
    tx.change(PutProcess(row))
    return row


# ---------------------------------------------------------------------- who may see a process


async def share(tx: Transaction, write: Share) -> int:
    session = None if write.remove else await tx.read(SessionById(write.session_id))
    if session is not None and session.deleted:
        raise SessionDeleted(session.id)
    found = [
        known(await tx.read(ProcessById(process_id)), process_id) for process_id in dict.fromkeys(write.process_ids)
    ]
    chosen = [row for row in found if await tx.read(IsGranted(write.session_id, row.pid)) == write.remove]
    for row in chosen:
        if write.remove:
            row = await _revoke(tx, row, write.session_id, write.at)
        else:
            row = await _grant(tx, row, write.session_id, write.at)
        tx.change(PutProcess(row))
    return len(chosen)


async def _grant(tx: Transaction, row: ProcessRow, session_id: str, at: int) -> ProcessRow:
    """The process, visible to a session. The row is put by the caller."""
    tx.change(PutGrant(session_id, row.pid))
    return await append_event(tx, row, Event(events.OBSERVER_ADDED, {"session_id": session_id}, at))


async def _revoke(tx: Transaction, row: ProcessRow, session_id: str, at: int) -> ProcessRow:
    tx.change(DropGrant(session_id, row.pid))
    return await append_event(tx, row, Event(events.OBSERVER_REMOVED, {"session_id": session_id}, at))


async def transfer(tx: Transaction, write: Transfer) -> int:
    source, target = write.source, write.target
    session = await tx.read(SessionById(target))
    if session is not None and session.deleted:
        raise SessionDeleted(target)
    found = [
        known(await tx.read(ProcessById(process_id)), process_id) for process_id in dict.fromkeys(write.process_ids)
    ]
    if source == target:
        return 0
    ours = [row for row in found if await tx.read(IsGranted(source, row.pid))]
    for row in found:
        # Visible to the target alone, it was handed on by a first sending of this write, whose reply was lost.
        if not await tx.read(IsGranted(source, row.pid)) and not await tx.read(IsGranted(target, row.pid)):
            raise ProcessNotVisible(row.id, source)
    names = [row.registration.name for row in ours if row.live and row.task is not None and row.holder == source]
    for name in names:
        await check_name(tx, target, name)
        if names.count(name) > 1:
            raise Conflict(f"two of these are tasks {name!r}: session {target!r} may have one live task of a name")
    for row in ours:
        tx.change(PutProcess(await _transfer_one(tx, row, write, "" if session is None else session.agent)))
    return len(found)


async def _transfer_one(tx: Transaction, row: ProcessRow, write: Transfer, agent: str) -> ProcessRow:
    source, target, to = write.source, write.target, wake_target(row)
    if not await tx.read(IsGranted(target, row.pid)):
        row = await _grant(tx, row, target, write.at)
    row = await _revoke(tx, row, source, write.at)
    if row.live and row.holder == source:
        row = await append_event(tx, row, Event(events.TRANSFERRED, {"from": source, "session_id": target}, write.at))
    if row.live and to is not None and to.session_id == source:
        news = WakeTarget(target, agent or to.agent, to.policy)
        row = await append_event(tx, row, Event(events.SUBSCRIPTION_RETARGETED, news, write.at))
        await retarget_wakes(tx, row)
    return row


async def check_name(tx: Transaction, session_id: str, name: str) -> None:
    """Refuse a second live task of a name. Both writes that bring one look here, inside their transactions."""
    live = await tx.read(LiveProcessesNamed(session_id, name))
    if any(row.task is not None and row.holder == session_id for row in live):
        raise Conflict(f"session {session_id!r} has a live task {name!r} of its own: cancel that, or use another id")


# ---------------------------------------------------------------------- wakes


async def dismiss(tx: Transaction, write: Dismiss) -> tuple[WakeRow, ...]:
    before: WakeState = "discarded" if write.reason is None else "pending"
    after: WakeState = "pending" if write.reason is None else "discarded"
    changed = []
    for number in dict.fromkeys(write.numbers):
        wake = await tx.read(WakeByNumber(number))
        if wake is not None and wake.state == before:
            # Brought back, it has all its time again to be delivered in.
            at = write.at if write.reason is None else wake.at
            changed.append(replace(wake, state=after, reason=write.reason, at=at))
            tx.change(PutWake(changed[-1]))
    return tuple(changed)


async def retarget_wakes(tx: Transaction, row: ProcessRow) -> None:
    """Move the pending wakes of a process to the session that its wakes go to now."""
    to = row.record.wake
    for wake in await tx.read(PendingWakesOf(row.pid)):
        if to is None or to.policy == "none":
            tx.change(PutWake(replace(wake, state="discarded", reason="nobody is told of this process any more")))
        else:
            tx.change(PutWake(replace(wake, session_id=to.session_id, policy=to.policy)))


# ---------------------------------------------------------------------- retention


async def prune(tx: Transaction, write: Prune) -> tuple[str, ...]:
    statuses = write.statuses or tuple(sorted(RETIRED))
    if not RETIRED.issuperset(statuses):
        raise InvalidInput(f"only what is over can be pruned, and {sorted(set(statuses) - RETIRED)} is not")
    chosen: list[ProcessRow] = []
    after: tuple[int, int] = (-(2**62), 0)
    page: list[ProcessRow] | None = None
    while page != [] and len(chosen) < write.limit:
        page = await tx.read(PrunableProcesses(write.before, after, PAGE))
        for row in page:
            after = row.record.updated, row.pid
            projected = write.watermark is None or await tx.read(LastEvent(row.pid)) <= write.watermark
            # One that a session has not heard of yet stays until it has.
            if row.status in statuses and projected and not await tx.read(PendingWakesOf(row.pid)):
                chosen.append(row)
                if len(chosen) >= write.limit:
                    break
    for row in chosen:
        tombstone = Tombstone(row.id, row.pid, row.status, write.at, asking_digest(row.registration))
        tx.change(Entomb(tombstone, await tx.number(NextPlace())))
    return tuple(row.id for row in chosen)
