"""One more event of a process, and what follows from its end for others. Every rule about processes ends here."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from mainstay.lifecycle import fold as events
from mainstay.lifecycle.fold import ending, fold
from mainstay.lifecycle.wake import news
from mainstay.model.process import TERMINAL, Cancelled, Event, ProcessOutcome, ProcessRow, WaitOn
from mainstay.model.session import CancelRequest
from mainstay.stores.rules import takeovers
from mainstay.stores.rules.rows import Transaction

Woken = tuple[ProcessRow, ...]


async def appended(rows: Transaction, row: ProcessRow, event: Event) -> ProcessRow:
    """One more event: in the log, in the record, and for the session that it wakes. The row is put by the caller."""
    record = fold(row.record, event)
    place = await rows.next_place()
    rows.add_event(row.pid, record.sequence, event, place)
    row = replace(row, record=record)
    wake = news(row, event)
    if wake is not None:
        # Its event's place is its number: it grows, and no other event will ever have it.
        rows.add_wake(replace(wake, number=place))
    return row


async def resumed(rows: Transaction, row: ProcessRow, at: int) -> ProcessRow:
    """A parked process has something to do again. The row is put by the caller."""
    drop_awaits(rows, row)
    return await appended(rows, row, Event(events.RESUMED, None, at))


def drop_awaits(rows: Transaction, row: ProcessRow) -> None:
    if awaited(row.record.waits):
        rows.drop_awaits(row.pid)


def awaited(waits: tuple[WaitOn, ...]) -> tuple[str, ...]:
    """Whose end or going on a parked process waits for. No process has an id with a '#' in it: those are turns."""
    return tuple([w.name if w.kind == "process" else f"#{w.name}" for w in waits if w.kind in ("process", "turn")])


async def end(
    rows: Transaction, row: ProcessRow, outcome: ProcessOutcome, at: int, payload: Any = None
) -> tuple[ProcessRow, Woken]:
    """The end of a process, and what follows from it for others: who waited goes on, children are asked to stop."""
    row = await _ended(rows, row, outcome, at, payload)
    return row, await follow(rows, row, at)


async def _ended(
    rows: Transaction, row: ProcessRow, outcome: ProcessOutcome, at: int, payload: Any = None
) -> ProcessRow:
    drop_awaits(rows, row)
    row = await appended(rows, row, Event(ending(outcome), outcome if payload is None else payload, at))
    if row.takeovers:
        await takeovers.goes_on(rows, -row.pid, row.takeovers)
    row = replace(row, owner=None, takeovers=0, stuck=None)
    rows.put_process(row)
    return row


async def follow(rows: Transaction, row: ProcessRow, at: int) -> Woken:
    """What follows from the end of a process: those that have something to do because of it, or have ended with it.

    A loop, because a child that ends at once may have children of its own.
    """
    woken: dict[int, ProcessRow] = {}
    over = [row]
    while over:
        row = over.pop()
        woken |= {waiting.pid: waiting for waiting in await _resume_waiting(rows, row.id, at)}
        for child in await _stopped_with(rows, row.id, at):
            woken[child.pid] = child
            if child.status in TERMINAL:
                over.append(child)
    return tuple(woken.values())


async def turn_ended(rows: Transaction, turn: str, at: int) -> Woken:
    """What follows from the end of a turn for the processes that it started."""
    woken: dict[int, ProcessRow] = {}
    for child in await _stopped_with(rows, turn, at):
        found = await follow(rows, child, at) if child.status in TERMINAL else ()
        woken |= {row.pid: row for row in (child, *found)}
    return tuple(woken.values())


async def _stopped_with(rows: Transaction, parent: str, at: int) -> list[ProcessRow]:
    """The children that end with their parent, each asked to."""
    request = _farewell(parent)
    children = await rows.children(parent, False)
    mortal = [child for child in children if child.registration.parent_end == "cancel"]
    return [await _requested(rows, child, request, at) for child in mortal if child.record.cancel is None]


async def asked_by(rows: Transaction, parent: str) -> Woken:
    """The children that were asked to end because their parent had, also those that have."""
    children = await rows.children(parent, True)
    return tuple([child for child in children if child.record.cancel == _farewell(parent)])


def _farewell(parent: str) -> CancelRequest:
    return CancelRequest(f"parent {parent}", "its parent has ended")


async def turn_goes_on(rows: Transaction, turn: str, at: int) -> None:
    """A parked turn is open again: processes that were parked with it have something to do."""
    await _resume_waiting(rows, f"#{turn}", at)


async def _resume_waiting(rows: Transaction, target: str, at: int) -> list[ProcessRow]:
    woken = []
    for pid in await rows.awaiting(target):
        waiting = await rows.process_by_pid(pid)
        if waiting is not None and waiting.status == "waiting":
            waiting = await resumed(rows, waiting, at)
            rows.put_process(waiting)
            woken.append(waiting)
    return woken


async def asked_to_stop(
    rows: Transaction, row: ProcessRow, request: CancelRequest, at: int
) -> tuple[ProcessRow, Woken]:
    """A cancel request. What nobody has begun, or nobody can go on with, ends at once."""
    row = await _requested(rows, row, request, at)
    return row, await follow(rows, row, at) if row.status in TERMINAL else (row,)


async def _requested(rows: Transaction, row: ProcessRow, request: CancelRequest, at: int) -> ProcessRow:
    row = await appended(rows, row, Event(events.CANCEL_REQUESTED, request, at))
    idle = row.owner is None and row.registration.contract.may_begin
    begun = row.record.first_started is not None
    if idle and (not begun or row.stuck is not None):
        return await _ended(rows, row, Cancelled(request.by, request.reason, unknown=begun), at)
    if row.status == "waiting":
        row = await resumed(rows, row, at)
    rows.put_process(row)
    return row
