"""What each write about a process does. The fold of its events is `mainstay.lifecycle`'s to decide.

Who may go on with a process that somebody has begun, by its recovery contract:

    its owner            rerun, reattach             abandon                             leave
    parked it            any worker                  any worker                          (no worker owns it)
    let it go, or left   any worker                  none: abandoned
    is proven dead       any worker                  none: abandoned
    is only silent       any worker, fencing it      none, unless there is a request to
                                                     abandon it: then abandoned

The columns are `ProcessRow.after_owner_death`. Work that has not begun, any worker may begin. Time alone ends nothing.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from mainstay.errors import (
    Conflict,
    Fenced,
    InternalError,
    InvalidProcess,
    ProcessConflict,
    ProcessPruned,
    UnknownProcess,
)
from mainstay.lifecycle import fold as events
from mainstay.lifecycle import suspects
from mainstay.lifecycle.decide import (
    alive,
    asking_digest,
    awaits,
    check,
    check_authority,
    declared,
    is_due,
    known,
    readable,
    same,
    same_asking,
)
from mainstay.lifecycle.fold import fold
from mainstay.model.process import (
    RETIRED,
    TERMINAL,
    Abandoned,
    Event,
    Evidence,
    Failure,
    FirstStart,
    ProcessRecord,
    ProcessRow,
    SessionOrigin,
    is_task,
)
from mainstay.model.process_write import (
    AddEvent,
    Advance,
    Advanced,
    Complete,
    Ending,
    EventAdded,
    Register,
    Registered,
    SendSignal,
)
from mainstay.model.session import CancelRequest
from mainstay.model.write import Cancel, CancelReceipt, Claim, Claimed, ProcessScope, Released, Resume
from mainstay.stores.rules import takeovers
from mainstay.stores.rules.process_events import appended, asked_to_stop, awaited, end, follow, resumed
from mainstay.stores.rules.rows import Transaction, check_blobs
from mainstay.stores.rules.wakes import check_name, retargeted

MARKS = frozenset(
    {
        events.ABANDON_REQUESTED,
        events.EXTERNAL_REF_SET,
        events.CALLER_DEPARTED,
        events.SUBSCRIPTION_RETARGETED,
        events.PROGRESS,
    }
)
"""Events of ours that somebody outside may write."""


async def register(rows: Transaction, write: Register) -> Registered:
    registration = check(write.registration)
    row = await rows.process(registration.id)
    if row is not None:
        if row.pruned is not None:
            tombstone = await rows.tombstone(row.id)
            if tombstone is not None and tombstone.digest != asking_digest(registration):
                raise ProcessConflict(row.id)
            raise ProcessPruned(row.id, row.status, row.pruned)
        if not same_asking(row.registration, registration):
            raise ProcessConflict(row.id)
        return Registered(row, known=True)
    late = registration.parent is not None and await _is_over(rows, registration.parent, registration.id)
    if is_task(registration) and isinstance(registration.origin, SessionOrigin):
        await check_name(rows, registration.origin.session_id, registration.name)
    await check_blobs(rows, write.blobs)
    created = Event(events.CREATED, at=write.at)
    owner = write.worker if registration.contract.may_begin else None
    claimed = int(owner is not None)
    number, place = await rows.next_pid(), await rows.next_place()
    row = ProcessRow(number, registration, fold(ProcessRecord(), created), write.at, owner, claimed, claimed)
    rows.add_process(row)
    rows.add_event(row.pid, 1, created, place)
    for session_id in write.grants:
        rows.put_grant(session_id, row.pid)
    rows.add_blobs(-row.pid, write.blobs)
    if late and registration.parent_end == "cancel":
        # It comes too late to be asked with the others.
        request = CancelRequest(f"parent {registration.parent}", "its parent has ended")
        row, _ = await asked_to_stop(rows, row, request, write.at)
    return Registered(row)


async def _is_over(rows: Transaction, parent: str, child: str) -> bool:
    """Whether a parent, a process or a turn, has ended. Who was relieved of a turn, and does not know, may still start
    something for it."""
    process = await rows.process(parent)
    if process is not None:
        return not process.live
    session_id, _, turn = parent.rpartition(".")
    session = await rows.session(session_id) if turn.isascii() and turn.isdigit() else None
    if session is None or not 0 < int(turn) < session.next:
        raise UnknownProcess(parent, f"it was to be the parent of {child!r}, and is not here")
    return session.deleted or int(turn) <= session.head


async def register_applied(rows: Transaction, write: Register) -> Registered | None:
    """The receipt of a registration whose reply was lost: applied again it would take itself for a second asking."""
    row = await rows.process(write.registration.id)
    if row is None or row.created != write.at or row.record.sequence != 1 or row.owner != write.worker:
        return None
    return Registered(row) if same(row.registration, write.registration) else None


# ---------------------------------------------------------------------- an owned process


async def claim(rows: Transaction, write: Claim[ProcessRow]) -> Claimed[ProcessRow]:
    row = await rows.process(write.target.id)
    if row is None or not row.live or row.stuck is not None or not row.registration.contract.may_begin:
        return Claimed(row, won=False)
    if row.owner == write.worker and row.generation == write.generation + 1:
        mark = await rows.process_deaths(row.id) if row.takeovers else None
        return Claimed(row, won=True, suspect=mark is not None and suspects.is_suspect(mark))
    if row.generation != write.generation or row.owner == write.worker:
        return Claimed(row, won=False)
    if row.status == "waiting" and not is_due(row, write.at):
        return Claimed(row, won=False)
    if row.owner is not None and row.after_owner_death == "abandon":
        return await _given_up(rows, row, write)
    return await _taken(rows, row, write)


async def _given_up(rows: Transaction, row: ProcessRow, write: Claim[ProcessRow]) -> Claimed[ProcessRow]:
    request = row.record.abandon
    if write.proof is not None:
        evidence = Evidence("sweep", write.at, row.owner, write.proof)
    elif request is not None:
        evidence = Evidence("reconciled_request", write.at, row.owner, f"{request.by}: {request.reason}")
    else:
        return Claimed(row, won=False)  # silent is not dead, and nobody else may do this work
    row, woken = await end(rows, row, Abandoned(evidence), write.at)
    return Claimed(row, won=False, woken=woken)


async def _taken(rows: Transaction, row: ProcessRow, write: Claim[ProcessRow]) -> Claimed[ProcessRow]:
    """Claimed, unless it has been begun too often.

    To reattach to work that lives is no takeover: its owner died, the work did not. Nothing is held against it.
    """
    dead_owner = row.owner if row.after_owner_death == "rerun" else None
    over = dead_owner is not None
    again = over and row.record.first_started is not None
    limit = row.registration.max_attempts
    if again and limit is not None and row.attempts >= limit:
        failure = Failure("attempts_exhausted", f"it was begun {row.attempts} times, and its owners died")
        row, woken = await end(rows, row, failure, write.at)
        return Claimed(row, won=False, woken=woken)
    mark = await rows.process_deaths(row.id) if row.takeovers else None
    ruling = await takeovers.rule_on(rows, -row.pid, dead_owner, mark, (write.worker, write.death))
    if ruling.fate == "held":
        return Claimed(row, won=False, suspect=True)
    # Counted on when a person resumes it: a takeover is a step that may have been made for nothing.
    row = replace(row, generation=row.generation + 1, takeovers=row.takeovers + over)
    if ruling.fate == "stuck" and ruling.deaths is not None:
        rows.put_deaths(ruling.deaths)
        row = await _stuck(rows, row, suspects.REASON.format("it"), write.at)
        return Claimed(row, won=False)
    await takeovers.taken(rows, ruling, write.worker, write.lived)
    row = replace(row, owner=write.worker, attempts=max(row.attempts + again, 1))
    if row.status == "waiting":
        row = await resumed(rows, row, write.at)
    rows.put_process(row)
    return Claimed(row, won=True, suspect=ruling.suspect)


async def advance(rows: Transaction, write: Advance) -> Advanced:
    scope = write.scope
    row = await rows.process_by_pid(scope.pid)
    again = await _again(rows, row, write)
    if again is not None:
        return again
    row = before = _owned(row, scope)
    if write.drop is not None and (not write.records or write.records[-1].ordinal < write.drop):
        raise InternalError(f"process {scope.id} would drop its whole journal: something must stay to begin from")
    await check_blobs(rows, write.blobs)
    ahead = bool(write.park) and before.record.sequence <= write.seen and await _all_ahead(rows, write)
    if not await _is_known(rows, row, write):
        row = await _told(rows, row, write)
    if write.outcome is not None:
        row, woken = await end(rows, row, write.outcome, write.at)
        return Advanced(row, woken=woken)
    if ahead:
        row = await appended(rows, row, Event(events.WAITING, {"waits": write.park}, write.at))
        await takeovers.goes_on(rows, -row.pid, row.takeovers)
        row = replace(row, owner=None, takeovers=0)
        rows.put_process(row)
        rows.put_awaits(row.pid, awaited(write.park))
        return Advanced(row, parked=True)
    if row.takeovers and write.records and not write.repeats:
        await takeovers.goes_on(rows, -row.pid, row.takeovers)
        row = replace(row, takeovers=0)
    if row is not before:
        rows.put_process(row)
    return Advanced(row)


async def _again(rows: Transaction, row: ProcessRow | None, write: Advance) -> Advanced | None:
    """The receipt of an owner's last write, which may come again because its reply was lost.

    Whoever woke because of it is not named a second time.
    """
    if row is None or row.owner is not None or row.generation != write.scope.generation:
        return None
    if write.outcome is not None:
        return Advanced(row) if same(row.record.outcome, write.outcome) else None
    if not write.park or not row.live or row.stuck is not None:
        return None
    for node in write.records:
        if await rows.step(row.pid, node.ordinal) != node.body:
            return None
    return Advanced(row, parked=True)


async def _is_known(rows: Transaction, row: ProcessRow, write: Advance) -> bool:
    """Whether this was written before, by a first sending. Refuses what contradicts that, having changed nothing.

    Ordinals of a journal only grow, so what is not beyond its end was in it once, and may have been dropped since.
    Without records it is the events that tell: an owner has looked at all up to `seen`.
    """
    if write.records:
        if write.records[-1].ordinal > await rows.last_step(row.pid):
            await _check_keys(rows, row, write.events)
            return False
        for node in write.records:
            if (body := await rows.step(row.pid, node.ordinal)) not in (None, node.body):
                raise InternalError(f"record {node.ordinal} of process {row.id} exists with other content ({body!r})")
        return True
    if not write.events:
        return False
    there = await rows.events_after(row.pid, write.seen)
    if all(any(same(event, each) for each in there) for event in write.events):
        return True
    await _check_keys(rows, row, write.events)
    return False


async def _check_keys(rows: Transaction, row: ProcessRow, told: tuple[Event, ...]) -> None:
    for event in told:
        if event.key is not None and await rows.event_by_key(row.pid, event.key) is not None:
            raise Conflict(f"key {event.key!r} of process {row.id!r} was used for another event: use a new one")


async def _told(rows: Transaction, row: ProcessRow, write: Advance) -> ProcessRow:
    """What the owner tells, the first time it does."""
    first = 0 if write.drop is None else write.drop
    if write.drop is not None:
        rows.drop_steps(row.pid, write.drop)
    for node in write.records:
        if node.ordinal >= first:
            rows.add_step(row.pid, node.ordinal, node.body)
    rows.add_blobs(-row.pid, write.blobs)
    if write.first and row.record.first_started is None:
        start = FirstStart(write.scope.owner, row.generation, row.attempts, write.at, write.store)
        row = await appended(rows, row, Event(events.FIRST_STARTED, start, write.at))
    for event in write.events:
        row = await appended(rows, row, event)
    return row


async def _all_ahead(rows: Transaction, write: Advance) -> bool:
    """Whether nothing that it wants to wait for is there already."""
    for wait in write.park:
        if wait.kind == "process":
            target = await rows.process(wait.name)
            if target is None or not target.live:
                return False
        elif wait.kind == "turn" and not await _is_parked(rows, wait.name):
            return False
    return True


async def _is_parked(rows: Transaction, turn: str) -> bool:
    session_id, _, number = turn.rpartition(".")
    session = await rows.session(session_id)
    return session is not None and str(session.turn) == number and session.state == "parked"


async def release(rows: Transaction, scope: ProcessScope, at: int, stuck: str | None) -> Released[ProcessRow]:
    row = await rows.process_by_pid(scope.pid)
    free = row is not None and row.owner is None and row.generation == scope.generation
    if row is not None and free and (stuck is None or row.stuck == stuck):
        return Released(row)  # sent again, because its reply was lost
    row = _owned(row, scope)
    await takeovers.let_go(rows, -row.pid, row.takeovers)
    if stuck is not None:
        return Released(await _stuck(rows, row, stuck, at))
    return await _freed(rows, row, at, "its owner let it go")


async def _freed(rows: Transaction, row: ProcessRow, at: int, why: str) -> Released[ProcessRow]:
    """Nobody owns it any more: what only its owner could do is given up, everything else is free to claim."""
    if row.after_owner_death == "abandon":
        row, woken = await end(rows, row, Abandoned(Evidence("owner_drain", at, row.owner, why)), at)
        return Released(row, woken)
    row = replace(row, owner=None)
    rows.put_process(row)
    return Released(row)


async def drained(rows: Transaction, row: ProcessRow, at: int) -> None:
    """Its owner leaves."""
    await _freed(rows, row, at, "its owner left")


async def _stuck(rows: Transaction, row: ProcessRow, why: str, at: int) -> ProcessRow:
    row = await appended(rows, replace(row, owner=None, stuck=why), Event(events.STUCK, {"reason": why}, at))
    rows.put_process(row)
    return row


def _owned(row: ProcessRow | None, scope: ProcessScope) -> ProcessRow:
    """The process, when `scope` still owns it. The only fence there is: every write of an owner passes here."""
    if row is None or row.id != scope.id or row.owner != scope.owner or row.generation != scope.generation:
        raise Fenced(f"process {scope.id}", scope.generation)
    return row


# ---------------------------------------------------------------------- from outside


async def send_signal(rows: Transaction, write: SendSignal) -> EventAdded:
    row = known(await rows.process(write.process_id), write.process_id)
    event = Event(f"{events.SIGNAL}{write.name}", write.payload, write.at, write.key)
    before = await _told_before(rows, row, event)
    if before is not None:
        return before
    row = alive(row, write.process_id)
    declared(row.registration, event.type)
    return await _added(rows, row, event)


async def add_event(rows: Transaction, write: AddEvent) -> EventAdded:
    row = known(await rows.process(write.process_id), write.process_id)
    event = write.event
    before = await _told_before(rows, row, event)
    if before is not None:
        return before
    row = alive(row, write.process_id)
    if event.type not in MARKS:
        if event.type.startswith(events.RESERVED):
            raise InvalidProcess(f"event type {event.type!r} is reserved: nobody but the runtime writes it")
        declared(row.registration, event.type)
    if event.type == events.CALLER_DEPARTED and row.registration.contract.may_begin:
        raise InvalidProcess(f"process {row.id!r} is worked on here: only a caller from outside can depart")
    readable(event, f"event {event.type!r}")
    try:
        fold(row.record, event)
    except msgspec.ValidationError as error:
        raise InvalidProcess(f"event {event.type!r} of process {row.id!r} cannot say this: {error}") from None
    return await _added(rows, row, event)


async def _told_before(rows: Transaction, row: ProcessRow, event: Event) -> EventAdded | None:
    """The receipt of an event that was told before under the same key."""
    found = None if event.key is None else await rows.event_by_key(row.pid, event.key)
    if found is None:
        return None
    sequence, before = found
    if not same(before, replace(event, at=before.at)):
        raise Conflict(f"key {event.key!r} of process {row.id!r} was used for another event: use a new one")
    return EventAdded(row, sequence, known=True)


async def _added(rows: Transaction, row: ProcessRow, event: Event) -> EventAdded:
    row = await appended(rows, row, event)
    sequence = row.record.sequence
    if awaits(row, event):
        row = await resumed(rows, row, event.at)
    rows.put_process(row)
    if event.type == events.SUBSCRIPTION_RETARGETED:
        await retargeted(rows, row)
    woken = await follow(rows, row, event.at) if row.status in RETIRED else ()
    return EventAdded(row, sequence, woken=woken)


async def cancel(rows: Transaction, write: Cancel[ProcessRow]) -> CancelReceipt[ProcessRow]:
    row = known(await rows.process(write.target.id), write.target.id)
    if row.status in RETIRED:
        return CancelReceipt("completion_won", row=row)
    if row.record.cancel is not None:
        return CancelReceipt("already_requested", row=row)
    row, woken = await asked_to_stop(rows, row, write.request, write.at)
    return CancelReceipt("requested", row=row, woken=woken)


async def complete(rows: Transaction, write: Complete) -> Ending:
    row = known(await rows.process(write.process_id), write.process_id)
    check_authority(row, write.authority, write.outcome)
    if row.status in TERMINAL:
        return Ending("already_applied" if same(row.record.outcome, write.outcome) else "superseded", row)
    row = alive(row, write.process_id)
    if row.owner is not None:
        raise Conflict(
            f"process {row.id!r} is owned by worker {row.owner!r}, which says how it ends: cancel it instead"
        )
    payload = {"outcome": write.outcome, "authority": write.authority}
    row, woken = await end(rows, row, write.outcome, write.at, payload)
    return Ending("committed", row, woken)


async def resume(rows: Transaction, write: Resume[ProcessRow]) -> ProcessRow | None:
    row = known(await rows.process(write.target.id), write.target.id)
    if row.stuck is None:
        return None
    await takeovers.resumed(rows, -row.pid, row.takeovers)
    row = await appended(rows, replace(row, stuck=None), Event(events.REVIVED, None, write.at))
    rows.put_process(row)
    return row
