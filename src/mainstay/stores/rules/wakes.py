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
from mainstay.stores.rules.process_log import appended
from mainstay.stores.rules.rows import Rows
from mainstay.stores.rules.sessions import accept

# ---------------------------------------------------------------------- grants


def share(rows: Rows, write: Share) -> int:
    session = None if write.remove else rows.session(write.session_id)
    if session is not None and session.deleted:
        raise SessionDeleted(session.id)
    found = [known(rows.process(process_id), process_id) for process_id in dict.fromkeys(write.process_ids)]
    chosen = [row for row in found if rows.granted(write.session_id, row.pid) is write.remove]
    for row in chosen:
        change = _unseen_by if write.remove else _seen_by
        rows.put_process(change(rows, row, write.session_id, write.at))
    return len(chosen)


def _seen_by(rows: Rows, row: ProcessRow, session_id: str, at: int) -> ProcessRow:
    """The process, visible to a session. The row is put by the caller."""
    rows.put_grant(session_id, row.pid)
    return appended(rows, row, Event(events.OBSERVER_ADDED, {"session_id": session_id}, at))


def _unseen_by(rows: Rows, row: ProcessRow, session_id: str, at: int) -> ProcessRow:
    rows.drop_grant(session_id, row.pid)
    return appended(rows, row, Event(events.OBSERVER_REMOVED, {"session_id": session_id}, at))


def transfer(rows: Rows, write: Transfer) -> int:
    source, target = write.source, write.target
    session = rows.session(target)
    if session is not None and session.deleted:
        raise SessionDeleted(target)
    found = [known(rows.process(process_id), process_id) for process_id in dict.fromkeys(write.process_ids)]
    if source == target:
        return 0
    ours = [row for row in found if rows.granted(source, row.pid)]
    for row in found:
        # Visible to the target alone, it was handed on by a first sending of this write, whose reply was lost.
        if not rows.granted(source, row.pid) and not rows.granted(target, row.pid):
            raise ProcessNotVisible(row.id, source)
    names = [row.registration.name for row in ours if row.live and row.task is not None and row.holder == source]
    for name in names:
        check_name(rows, target, name)
        if names.count(name) > 1:
            raise Conflict(f"two of these are tasks {name!r}: session {target!r} may have one live task of a name")
    for row in ours:
        rows.put_process(_handed_on(rows, row, write, "" if session is None else session.agent))
    return len(found)


def _handed_on(rows: Rows, row: ProcessRow, write: Transfer, agent: str) -> ProcessRow:
    source, target, to = write.source, write.target, heard_by(row)
    if not rows.granted(target, row.pid):
        row = _seen_by(rows, row, target, write.at)
    row = _unseen_by(rows, row, source, write.at)
    if row.live and row.holder == source:
        row = appended(rows, row, Event(events.TRANSFERRED, {"from": source, "session_id": target}, write.at))
    if row.live and to is not None and to.session_id == source:
        news = WakeTarget(target, agent or to.agent, to.policy)
        row = appended(rows, row, Event(events.SUBSCRIPTION_RETARGETED, news, write.at))
        retargeted(rows, row)
    return row


def check_name(rows: Rows, session_id: str, name: str) -> None:
    """Refuse a second live task of a name. Both writes that bring one look here, inside their transactions."""
    if any(row.task is not None and row.holder == session_id for row in rows.live_named(session_id, name)):
        raise Conflict(f"session {session_id!r} has a live task {name!r} of its own: cancel that, or use another id")


# ---------------------------------------------------------------------- wakes


def deliver(rows: Rows, write: Deliver) -> Accepted | None:
    session = rows.session(write.session_id)
    if session is not None and session.deleted:
        raise SessionDeleted(write.session_id)
    if session is None and not write.agent:
        raise UnknownSession(write.session_id)
    found = [rows.wake(number) for number in write.numbers]
    wakes = [wake for wake in found if wake is not None and wake.session_id == write.session_id]
    if not wakes or len(wakes) < len(found):
        return None
    if session is not None and (landed := _delivered(rows, session, wakes, write.body)) is not None:
        return landed
    if any(wake.state != "pending" for wake in wakes):
        return None  # `body` tells of all of them, and some are told of already, or not to be
    if write.turn and session is not None and session.turn is not None:
        return None  # busy: what waits is told at once when it is idle
    agent = write.agent if session is None else session.agent
    kind: InputKind = "queue" if write.turn else "note"
    accepted = accept(
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


def _delivered(rows: Rows, session: SessionRow, wakes: list[WakeRow], body: bytes) -> Accepted | None:
    """The receipt of a delivery that landed before its reply was lost."""
    turns = {wake.turn for wake in wakes}
    turn = turns.pop()
    if turn is None or turns or rows.node(session.sid, turn, 0) != body:
        return None
    return Accepted(turn, session, opened=session.turn == turn)


def dismiss(rows: Rows, write: Dismiss) -> tuple[WakeRow, ...]:
    before: WakeState = "discarded" if write.reason is None else "pending"
    after: WakeState = "pending" if write.reason is None else "discarded"
    changed = []
    for number in dict.fromkeys(write.numbers):
        wake = rows.wake(number)
        if wake is not None and wake.state == before:
            # Brought back, it has all its time again to be delivered in.
            at = write.at if write.reason is None else wake.at
            changed.append(replace(wake, state=after, reason=write.reason, at=at))
            rows.put_wake(changed[-1])
    return tuple(changed)


def retargeted(rows: Rows, row: ProcessRow) -> None:
    """What the session before has not heard of yet, the new one hears."""
    to = row.record.wake
    for wake in rows.pending_wakes(row.pid):
        if to is None or to.policy == "none":
            rows.put_wake(replace(wake, state="discarded", reason="nobody is told of this process any more"))
        else:
            rows.put_wake(replace(wake, session_id=to.session_id, policy=to.policy))


# ---------------------------------------------------------------------- retention


def prune(rows: Rows, write: Prune) -> tuple[str, ...]:
    statuses = write.statuses or tuple(sorted(RETIRED))
    if not RETIRED.issuperset(statuses):
        raise InvalidInput(f"only what is over can be pruned, and {sorted(set(statuses) - RETIRED)} is not")
    chosen: list[ProcessRow] = []
    for row in rows.prunable(write.before):
        if len(chosen) >= write.limit:
            break
        projected = write.watermark is None or rows.last_event(row.pid) <= write.watermark
        # One that a session has not heard of yet stays until it has.
        if row.status in statuses and projected and not rows.pending_wakes(row.pid):
            chosen.append(row)
    for row in chosen:
        rows.entomb(Tombstone(row.id, row.pid, row.status, write.at, asking_digest(row.registration)))
    return tuple(row.id for row in chosen)
