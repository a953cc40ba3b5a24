"""Who may see a process, who is told of it, and when it is forgotten: grants, wakes and retention."""

from __future__ import annotations

from msgspec.structs import replace

from mainstay.errors import Conflict, InvalidInput, ProcessNotVisible, SessionDeleted, UnknownSession
from mainstay.lifecycle import fold as events
from mainstay.lifecycle.decide import asking_digest, known
from mainstay.lifecycle.wake import target as heard_by
from mainstay.model.process import (
    RETIRED,
    Event,
    ProcessRow,
    Tombstone,
    WakeRow,
    WakeState,
    WakeTarget,
)
from mainstay.model.process_write import Deliver, Dismiss, Prune, Share, Transfer
from mainstay.model.record import InputKind
from mainstay.model.session import SessionRow
from mainstay.model.write import Accept, Accepted
from mainstay.stores.rules.process_events import appended
from mainstay.stores.rules.rows import Transaction
from mainstay.stores.rules.sessions import accept

PAGE = 256
"""Processes that are read at once when old ones are pruned."""

# ---------------------------------------------------------------------- grants


async def share(rows: Transaction, write: Share) -> int:
    session = None if write.remove else await rows.session(write.session_id)
    if session is not None and session.deleted:
        raise SessionDeleted(session.id)
    found = [known(await rows.process(process_id), process_id) for process_id in dict.fromkeys(write.process_ids)]
    chosen = [row for row in found if await rows.granted(write.session_id, row.pid) == write.remove]
    for row in chosen:
        if write.remove:
            row = await _unseen_by(rows, row, write.session_id, write.at)
        else:
            row = await _seen_by(rows, row, write.session_id, write.at)
        rows.put_process(row)
    return len(chosen)


async def _seen_by(rows: Transaction, row: ProcessRow, session_id: str, at: int) -> ProcessRow:
    """The process, visible to a session. The row is put by the caller."""
    rows.put_grant(session_id, row.pid)
    return await appended(rows, row, Event(events.OBSERVER_ADDED, {"session_id": session_id}, at))


async def _unseen_by(rows: Transaction, row: ProcessRow, session_id: str, at: int) -> ProcessRow:
    rows.drop_grant(session_id, row.pid)
    return await appended(rows, row, Event(events.OBSERVER_REMOVED, {"session_id": session_id}, at))


async def transfer(rows: Transaction, write: Transfer) -> int:
    source, target = write.source, write.target
    session = await rows.session(target)
    if session is not None and session.deleted:
        raise SessionDeleted(target)
    found = [known(await rows.process(process_id), process_id) for process_id in dict.fromkeys(write.process_ids)]
    if source == target:
        return 0
    ours = [row for row in found if await rows.granted(source, row.pid)]
    for row in found:
        # Visible to the target alone, it was handed on by a first sending of this write, whose reply was lost.
        if not await rows.granted(source, row.pid) and not await rows.granted(target, row.pid):
            raise ProcessNotVisible(row.id, source)
    names = [row.registration.name for row in ours if row.live and row.task is not None and row.holder == source]
    for name in names:
        await check_name(rows, target, name)
        if names.count(name) > 1:
            raise Conflict(f"two of these are tasks {name!r}: session {target!r} may have one live task of a name")
    for row in ours:
        rows.put_process(await _handed_on(rows, row, write, "" if session is None else session.agent))
    return len(found)


async def _handed_on(rows: Transaction, row: ProcessRow, write: Transfer, agent: str) -> ProcessRow:
    source, target, to = write.source, write.target, heard_by(row)
    if not await rows.granted(target, row.pid):
        row = await _seen_by(rows, row, target, write.at)
    row = await _unseen_by(rows, row, source, write.at)
    if row.live and row.holder == source:
        row = await appended(rows, row, Event(events.TRANSFERRED, {"from": source, "session_id": target}, write.at))
    if row.live and to is not None and to.session_id == source:
        news = WakeTarget(target, agent or to.agent, to.policy)
        row = await appended(rows, row, Event(events.SUBSCRIPTION_RETARGETED, news, write.at))
        await retargeted(rows, row)
    return row


async def check_name(rows: Transaction, session_id: str, name: str) -> None:
    """Refuse a second live task of a name. Both writes that bring one look here, inside their transactions."""
    live = await rows.live_named(session_id, name)
    if any(row.task is not None and row.holder == session_id for row in live):
        raise Conflict(f"session {session_id!r} has a live task {name!r} of its own: cancel that, or use another id")


# ---------------------------------------------------------------------- wakes


async def deliver(rows: Transaction, write: Deliver) -> Accepted | None:
    session = await rows.session(write.session_id)
    if session is not None and session.deleted:
        raise SessionDeleted(write.session_id)
    if session is None and not write.agent:
        raise UnknownSession(write.session_id)
    found = [await rows.wake(number) for number in write.numbers]
    wakes = [wake for wake in found if wake is not None and wake.session_id == write.session_id]
    if not wakes or len(wakes) < len(found):
        return None
    if session is not None and (landed := await _delivered(rows, session, wakes, write.body)) is not None:
        return landed
    if any(wake.state != "pending" for wake in wakes):
        return None  # `body` tells of all of them, and some are told of already, or not to be
    if write.turn and session is not None and session.turn is not None:
        return None  # busy: what waits is told at once when it is idle
    agent = write.agent if session is None else session.agent
    kind: InputKind = "queue" if write.turn else "note"
    accepted = await accept(
        rows,
        Accept(
            write.session_id,
            agent,
            write.body,
            write.op,
            write.at,
            kind,
            worker=write.worker,
            blobs=write.blobs,
            stuck=write.stuck,
        ),
    )
    for wake in wakes:
        rows.put_wake(replace(wake, state="enqueued", turn=accepted.turn))
    return accepted


async def _delivered(rows: Transaction, session: SessionRow, wakes: list[WakeRow], body: bytes) -> Accepted | None:
    """The receipt of a delivery that landed before its reply was lost."""
    turns = {wake.turn for wake in wakes}
    turn = turns.pop()
    if turn is None or turns or await rows.node(session.sid, turn, 0) != body:
        return None
    return Accepted(turn, session, opened=session.turn == turn)


async def dismiss(rows: Transaction, write: Dismiss) -> tuple[WakeRow, ...]:
    before: WakeState = "discarded" if write.reason is None else "pending"
    after: WakeState = "pending" if write.reason is None else "discarded"
    changed = []
    for number in dict.fromkeys(write.numbers):
        wake = await rows.wake(number)
        if wake is not None and wake.state == before:
            # Brought back, it has all its time again to be delivered in.
            at = write.at if write.reason is None else wake.at
            changed.append(replace(wake, state=after, reason=write.reason, at=at))
            rows.put_wake(changed[-1])
    return tuple(changed)


async def retargeted(rows: Transaction, row: ProcessRow) -> None:
    """What the session before has not heard of yet, the new one hears."""
    to = row.record.wake
    for wake in await rows.pending_wakes(row.pid):
        if to is None or to.policy == "none":
            rows.put_wake(replace(wake, state="discarded", reason="nobody is told of this process any more"))
        else:
            rows.put_wake(replace(wake, session_id=to.session_id, policy=to.policy))


# ---------------------------------------------------------------------- retention


async def prune(rows: Transaction, write: Prune) -> tuple[str, ...]:
    statuses = write.statuses or tuple(sorted(RETIRED))
    if not RETIRED.issuperset(statuses):
        raise InvalidInput(f"only what is over can be pruned, and {sorted(set(statuses) - RETIRED)} is not")
    chosen: list[ProcessRow] = []
    after: tuple[int, int] = (-(2**62), 0)
    page: list[ProcessRow] | None = None
    while page != [] and len(chosen) < write.limit:
        page = await rows.prunable(write.before, after, PAGE)
        for row in page:
            after = row.record.updated, row.pid
            projected = write.watermark is None or await rows.last_event(row.pid) <= write.watermark
            # One that a session has not heard of yet stays until it has.
            if row.status in statuses and projected and not await rows.pending_wakes(row.pid):
                chosen.append(row)
                if len(chosen) >= write.limit:
                    break
    for row in chosen:
        tombstone = Tombstone(row.id, row.pid, row.status, write.at, asking_digest(row.registration))
        rows.entomb(tombstone, await rows.next_place())
    return tuple(row.id for row in chosen)
