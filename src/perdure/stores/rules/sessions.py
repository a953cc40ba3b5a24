"""What each write about a session does."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.errors import (
    Fenced,
    HeadMoved,
    InternalError,
    InvalidSessionId,
    KeyConflict,
    MetadataConflict,
    SessionDeleted,
    SessionFull,
    StaleSettings,
    TurnFull,
    UnknownSession,
    WrongAgent,
)
from perdure.lifecycle import suspects
from perdure.model.codec import encode, spilled
from perdure.model.ids import MAX_ORDINAL, MAX_TURN, turn_id
from perdure.model.limit import Granted
from perdure.model.process import WakeRow
from perdure.model.record import InputKind, Joined
from perdure.model.session import (
    AWAITS_PROCESSES,
    CancelRequest,
    Fork,
    InboxRow,
    Node,
    SessionRow,
    Settings,
    WaitRow,
    dump_settings,
    labels_of,
    load_settings,
    same_metadata,
    settings_after_commit,
    settings_of_fork,
)
from perdure.model.write import (
    Accept,
    Accepted,
    Append,
    Appended,
    Branch,
    Cancel,
    CancelReceipt,
    CancelStatus,
    CancelWon,
    Claim,
    Claimed,
    Commit,
    Committed,
    Configure,
    Delete,
    Deliver,
    Released,
    ReopenTurn,
    Resolve,
    Resolved,
    Resume,
    TurnScope,
)
from perdure.stores.rules import spending, takeovers
from perdure.stores.rules.processes import all_live, end_session, end_turn, resume_with_turn, stopped_children
from perdure.stores.rules.rows import (
    AddNode,
    AddSession,
    AddUsage,
    DeathsOfSession,
    DropAwaits,
    DropDumps,
    DropGrants,
    DropInput,
    DropSessionData,
    DropWaits,
    ForksOf,
    HasInputs,
    HasLiveProcesses,
    InputAt,
    InputByKey,
    IsGranted,
    NextSid,
    NodeAt,
    OwnedTurn,
    PendingWakesFor,
    ProcessById,
    PutAwaits,
    PutDeaths,
    PutDump,
    PutGrant,
    PutInput,
    PutKey,
    PutLabels,
    PutNode,
    PutSession,
    PutSettings,
    PutWait,
    PutWake,
    ReferToBlobs,
    ReservationAt,
    SessionById,
    SessionBySid,
    Transaction,
    WaitById,
    WakeByNumber,
    check_blobs,
    waits_of,
)

READ_BACK = 256
"""How many of a session's newest inputs are searched for an acceptance whose reply was lost."""


# ---------------------------------------------------------------------- inputs


async def accept(tx: Transaction, write: Accept) -> Accepted:  # noqa: C901  # all that may come with an input
    row = await tx.read(SessionById(write.session_id))
    if row is not None:
        _check_usable(row, write.agent)
        # Before the key: who opened the session for another person must not be given a turn of the first one's.
        if write.metadata is not None and not same_metadata(write.metadata, row.metadata):
            raise MetadataConflict(row.id, write.metadata, row.metadata)
        if write.key is not None and (known := await tx.read(InputByKey(row.id, write.key))) is not None:
            turn, digest = known
            if digest != write.digest:
                raise KeyConflict(row.id, write.key, turn_id(row.id, turn))
            return Accepted(turn, row, opened=row.turn == turn, known=True)
        if row.next > MAX_TURN:
            raise SessionFull(row.id, MAX_TURN)
    if write.blobs:
        await check_blobs(tx, write.blobs)
    opens = write.kind != "note" and (row is None or row.turn is None)
    created = row is None
    if row is None:
        row = SessionRow(await tx.number(NextSid()), write.session_id, write.agent, created=write.at)
        if write.metadata or write.filtered:
            row = _configured(tx, row, dump_settings(Settings(metadata=write.metadata or {}, filtered=write.filtered)))
    elif write.filtered and not (settings := load_settings(row.settings)).filtered:
        row = _configured(tx, row, dump_settings(replace(settings, filtered=True)))
    turn, owner = row.next, write.worker if write.stuck is None else None
    if opens:
        row = replace(
            row,
            next=turn + 1,
            turn=turn,
            state="open" if write.stuck is None else "stuck",
            owner=owner,
            generation=row.generation + (owner is not None),
            takeovers=0,
            cancel=None,
            reason=write.stuck,
            updated=write.at,
        )
    else:
        row = await _hear(tx, replace(row, next=turn + 1, updated=write.at), write)
    tx.change(AddSession(row) if created else PutSession(row))
    if not opens:
        tx.change(PutInput(InboxRow(row.sid, turn, write.kind)))
    if write.key is not None:
        tx.change(PutKey(row.sid, write.key, turn, write.digest))
    tx.change(AddNode(row.sid, turn, 0, write.body))
    if write.blobs:
        tx.change(ReferToBlobs(row.sid, write.blobs))
    if write.spending is None or not opens or owner is None:
        return Accepted(turn, row, opens)
    return Accepted(turn, row, opens, granted=(await spending.spend(tx, row, owner, (write.spending,), turn))[0])


async def _hear(tx: Transaction, row: SessionRow, write: Accept) -> SessionRow:
    """The session, whose turn is open again if it only waited for processes and this may join it."""
    if write.kind != "queue" and row.state == "parked" and row.reason == AWAITS_PROCESSES:
        return await _reopen(tx, row, write.worker)
    return row


async def accept_applied(tx: Transaction, write: Accept) -> Accepted | None:
    row = await tx.read(SessionById(write.session_id))
    if row is None:
        return None
    for turn in range(row.next - 1, max(0, row.next - 1 - READ_BACK), -1):
        body = await tx.read(NodeAt(row.sid, turn, 0))
        if body is not None and body == write.body:
            known = None if write.spending is None else await tx.read(ReservationAt(row.sid, write.spending.name))
            same = known is not None and write.spending is not None and known.granted.op == write.spending.op
            return Accepted(turn, row, opened=row.turn == turn, granted=known.granted if known and same else None)
    return None


async def deliver(tx: Transaction, write: Deliver) -> Accepted | None:
    session = await tx.read(SessionById(write.session_id))
    if session is not None and session.deleted:
        raise SessionDeleted(write.session_id)
    if session is None and not write.agent:
        raise UnknownSession(write.session_id)
    found = [await tx.read(WakeByNumber(number)) for number in write.numbers]
    wakes = [wake for wake in found if wake is not None and wake.session_id == write.session_id]
    if not wakes or len(wakes) < len(found):
        return None
    if session is not None and (landed := await _delivered(tx, session, wakes, write.body)) is not None:
        return landed
    if any(wake.state != "pending" for wake in wakes):
        return None  # `body` was made from all of them, and some are delivered or discarded
    if write.turn and session is not None and session.turn is not None:
        return None  # its wakes are delivered together, once it is idle
    agent = write.agent if session is None else session.agent
    kind: InputKind = "queue" if write.turn else "note"
    accepted = await accept(
        tx,
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
        tx.change(PutWake(replace(wake, state="enqueued", turn=accepted.turn)))
    return accepted


async def _delivered(tx: Transaction, session: SessionRow, wakes: list[WakeRow], body: bytes) -> Accepted | None:
    """The receipt of a delivery that landed before its reply was lost."""
    turns = {wake.turn for wake in wakes}
    turn = turns.pop()
    if turn is None or turns or await tx.read(NodeAt(session.sid, turn, 0)) != body:
        return None
    return Accepted(turn, session, opened=session.turn == turn)


# ---------------------------------------------------------------------- an owned turn


async def claim(tx: Transaction, write: Claim[SessionRow]) -> Claimed[SessionRow]:
    row = await tx.read(SessionById(write.target.id))
    if row is None or row.deleted or row.turn is None or row.state == "stuck":
        return Claimed(row, won=False)
    if row.owner == write.worker and row.generation == write.generation + 1:
        mark = await tx.read(DeathsOfSession(row.id)) if row.takeovers else None
        return Claimed(row, won=True, suspect=mark is not None and suspects.is_suspect(mark))
    if row.generation != write.generation or row.owner == write.worker:
        return Claimed(row, won=False)
    mark = await tx.read(DeathsOfSession(row.id)) if row.takeovers else None
    ruling = await takeovers.judge(tx, row.sid, row.owner, mark, (write.worker, write.death))
    if ruling.fate == "held":
        return Claimed(row, won=False, suspect=True)
    await _unpark(tx, row, write.at)
    await spending.lose(tx, row.id)
    # Counted on when a person resumes the turn: a takeover is a model call that may have been asked for nothing.
    taken_over = row.takeovers + (row.owner is not None)
    if ruling.fate == "stuck" and ruling.deaths is not None:
        why = suspects.REASON.format("this turn")
        row = replace(row, state="stuck", owner=None, generation=row.generation + 1, takeovers=taken_over, reason=why)
        row = replace(row, updated=write.at)
        tx.change(PutSession(row))
        tx.change(PutDeaths(ruling.deaths))
        return Claimed(row, won=False)
    await takeovers.mark_running(tx, ruling, write.worker, write.lived)
    row = replace(
        row,
        owner=write.worker,
        generation=row.generation + 1,
        takeovers=taken_over,
        state="open",
        reason=None,
        updated=write.at,
    )
    tx.change(PutSession(row))
    return Claimed(row, won=True, suspect=ruling.suspect)


async def append(tx: Transaction, write: Append) -> Appended:  # noqa: C901  # all that an owner may write at once
    scope = write.scope
    found = await tx.read(OwnedTurn(scope.sid, scope.turn, write.take))
    parked = _released_by(found.row, scope) if write.park else None
    landed = parked is not None and (parked.state == "parked" or (bool(write.awaits) and parked.state == "open"))
    if parked is not None and landed and await _are_there(tx, scope, write.nodes):
        since = await tx.read(OwnedTurn(scope.sid, scope.turn, ()))
        return Appended(parked.cancel, since.inputs, True, tuple([Granted(each.op) for each in write.spending]))
    row = _owned(found.row, scope)
    if write.blobs or write.dump is not None:
        await check_blobs(tx, _referred_to(write))
    if write.waits:
        await check_blobs(tx, _spilled([wait.body for wait in write.waits]))
    # Everything is read before anything is changed: a store over a network asks once.
    new = _is_new(scope, write.nodes, found.records)
    if not new and not await _are_there(tx, scope, write.nodes):
        first = write.nodes[0].ordinal
        raise InternalError(f"record {first} of {scope.session_id}.{scope.turn} exists with other content")
    waits = await _waits(tx, write, new) if write.waits or write.park else {}
    park = bool(write.park) and row.cancel is None and all(_is_open(waits.get(wait_id)) for wait_id in write.park)
    park = park and (not write.awaits or await all_live(tx, write.awaits))
    park = park and (write.heard is None or write.heard == row.next)
    if new:
        for node in write.nodes:
            tx.change(AddNode(scope.sid, scope.turn, node.ordinal, node.body))
        if write.take:
            _settle(tx, scope, write.take)
        for wait in write.waits if park or not write.awaits else ():
            if waits[wait.id] is wait:
                tx.change(PutWait(wait))
                tx.change(ReferToBlobs(waits_of(scope.sid), _spilled([wait.body])))
        if write.blobs or write.dump is not None:
            _refer(tx, scope, write)
        if write.blobs:
            tx.change(ReferToBlobs(scope.sid, write.blobs))
    granted = await spending.spend(tx, row, scope.owner, write.spending, scope.turn) if write.spending else ()
    if park:
        await takeovers.clear(tx, row.sid, row.takeovers)
        reason = None if write.heard is None else AWAITS_PROCESSES
        tx.change(PutSession(replace(row, state="parked", owner=None, takeovers=0, reason=reason, updated=write.at)))
        if write.awaits:
            tx.change(PutAwaits(-row.sid, write.awaits))
    elif row.takeovers and write.nodes and not write.repeats:
        await takeovers.clear(tx, row.sid, row.takeovers)
        tx.change(PutSession(replace(row, takeovers=0)))
    return Appended(row.cancel, found.inputs, park, granted)


async def commit(  # noqa: C901  # all that ends with a turn
    tx: Transaction, write: Commit
) -> Committed | CancelWon:
    scope = write.scope
    found = await tx.read(OwnedTurn(scope.sid, scope.turn, write.take))
    if found.row is not None and found.row.head >= scope.turn and await _are_there(tx, scope, write.nodes[-1:]):
        asked = await stopped_children(tx, turn_id(found.row.id, scope.turn)) if write.children else ()
        return Committed(found.row, asked)
    row = _owned(found.row, scope)
    if row.head != write.head:
        raise HeadMoved(row.id, write.head, row.head)
    if row.cancel is not None and not write.cancelled:
        return CancelWon(row.cancel)
    if write.blobs or write.dump is not None:
        await check_blobs(tx, _referred_to(write))
    if not write.over and not _is_new(scope, write.nodes, found.records):
        raise InternalError(f"records of {scope.session_id}.{scope.turn} were written before its commit")
    for node in write.nodes:
        kind = PutNode if write.over else AddNode
        tx.change(kind(scope.sid, scope.turn, node.ordinal, node.body))
    if write.take:
        _settle(tx, scope, write.take)
    if write.blobs or write.dump is not None:
        _refer(tx, scope, write)
    if row.takeovers:
        await takeovers.clear(tx, row.sid, row.takeovers)
    if found.waits:
        tx.change(DropWaits(scope.sid))  # what became of them is in the records
    waiting = found.following
    if waiting is None:
        row = replace(
            row, head=scope.turn, turn=None, state="idle", owner=None, takeovers=0, cancel=None, updated=write.at
        )
    else:
        tx.change(DropInput(scope.sid, waiting.input))
        row = replace(row, head=scope.turn, turn=waiting.input, takeovers=0, cancel=waiting.cancel, updated=write.at)
    if write.tools or row.settings:
        row = _configured(tx, row, settings_after_commit(row.settings, write.tools, write.recorded))
    tx.change(PutSession(row))
    for spent in write.costs:
        tx.change(AddUsage(spent))
    if write.spending:
        await spending.close(tx, row, scope.turn, write.spending)
    return Committed(row, await end_turn(tx, turn_id(row.id, scope.turn), write.at) if write.children else ())


async def release(tx: Transaction, scope: TurnScope, at: int, stuck: str | None) -> Released[SessionRow]:
    found = await tx.read(SessionBySid(scope.sid))
    free = _released_by(found, scope)
    if free is not None and (stuck is None or free.state == "stuck"):
        return Released(free)
    row = _owned(found, scope)
    await takeovers.release(tx, row.sid, row.takeovers)
    await spending.lose(tx, row.id)
    state = "stuck" if stuck is not None else row.state
    row = replace(row, owner=None, state=state, reason=stuck, updated=at)
    tx.change(PutSession(row))
    return Released(row)


def _owned(row: SessionRow | None, scope: TurnScope) -> SessionRow:
    """The session, when `scope` still owns it. The only fence there is: every write of an owner passes here."""
    if row is None or row.deleted:
        raise SessionDeleted(scope.session_id)
    if row.owner != scope.owner or row.generation != scope.generation or row.turn != scope.turn:
        raise Fenced(turn_id(scope.session_id, scope.turn), scope.generation)
    return row


def _released_by(row: SessionRow | None, scope: TurnScope) -> SessionRow | None:
    """The session, when `scope` was its last owner and gave it up: the write that did so may be sent again."""
    free = row is not None and row.owner is None and row.generation == scope.generation and row.turn == scope.turn
    return row if free else None


def _spilled(bodies: list[bytes]) -> tuple[str, ...]:
    return tuple([digest for body in bodies if (digest := spilled(body)) is not None])


def _referred_to(write: Append | Commit) -> tuple[str, ...]:
    dump = write.dump
    return write.blobs if dump is None or dump.digest is None else (*write.blobs, dump.digest)


def _refer(tx: Transaction, scope: TurnScope, write: Append | Commit) -> None:
    if write.blobs:
        tx.change(ReferToBlobs(scope.sid, write.blobs))
    if write.dump is not None:
        tx.change(PutDump(scope.sid, scope.turn, write.dump))


async def _are_there(tx: Transaction, scope: TurnScope, nodes: tuple[Node, ...]) -> bool:
    for node in nodes:
        if await tx.read(NodeAt(scope.sid, scope.turn, node.ordinal)) != node.body:
            return False
    return True


def _is_new(scope: TurnScope, nodes: tuple[Node, ...], records: int) -> bool:
    """Whether records are to be written; False when they are there already, from a first sending of the same write."""
    if nodes and nodes[-1].ordinal > MAX_ORDINAL:
        raise TurnFull(turn_id(scope.session_id, scope.turn), MAX_ORDINAL)
    return not nodes or nodes[0].ordinal >= records


def _settle(tx: Transaction, scope: TurnScope, numbers: tuple[int, ...]) -> None:
    """Settle inputs that were delivered into the turn: each gets a record that says so."""
    for number in numbers:
        tx.change(DropInput(scope.sid, number))
        tx.change(AddNode(scope.sid, number, 1, encode(Joined(scope.turn))))


async def _waits(tx: Transaction, write: Append, new: bool) -> dict[str, WaitRow | None]:
    """The waits that a write names, as they are after it: an answer that came before it stands."""
    named = (*(wait.id for wait in write.waits), *write.park)
    waits = {wait_id: await tx.read(WaitById(wait_id)) for wait_id in named}
    for wait in write.waits if new else ():
        known = waits[wait.id]
        if known is None or (known.state == "open" and known != wait):
            waits[wait.id] = wait
    return waits


def _is_open(wait: WaitRow | None) -> bool:
    """Whether no answer arrived between the owner's last look and this transaction: else there is work to do."""
    return wait is not None and wait.state == "open"


# ---------------------------------------------------------------------- from outside


async def cancel(tx: Transaction, write: Cancel[SessionRow]) -> CancelReceipt[SessionRow]:
    row = await tx.read(SessionById(write.target.id))
    if row is None or row.deleted:
        nothing: CancelStatus = "unknown"
        return CancelReceipt(nothing, each=(nothing,) * len(write.queued))
    if write.queued:
        each = [await _cancel_queued(tx, row, number, write.request) for number in write.queued]
        return CancelReceipt("requested", None, row, (), tuple([receipt.status for receipt in each]))
    turn = write.turn if write.turn is not None else row.turn
    if turn is None:
        return CancelReceipt("completion_won", row.head or None, row)
    if turn != row.turn:
        return await _cancel_queued(tx, row, turn, write.request)
    if row.cancel is not None:
        return CancelReceipt("already_requested", turn, row)
    row = await _reopen(tx, replace(row, cancel=encode(write.request), updated=write.at), write.worker)
    tx.change(PutSession(row))
    return CancelReceipt("requested", turn, row)


async def _cancel_queued(
    tx: Transaction, row: SessionRow, turn: int, request: CancelRequest
) -> CancelReceipt[SessionRow]:
    waiting = await tx.read(InputAt(row.sid, turn))
    if waiting is None or waiting.kind == "note":
        # A note opens no turn, so there is none to stop; opened as a cancelled one it could move the head back.
        return CancelReceipt("completion_won" if 0 < turn < row.next else "unknown", turn, row)
    if waiting.cancel is not None:
        return CancelReceipt("already_requested", turn, row)
    tx.change(PutInput(replace(waiting, kind="queue", cancel=encode(request))))
    return CancelReceipt("requested", turn, row)


async def resume(tx: Transaction, write: Resume[SessionRow]) -> SessionRow | None:
    row = await tx.read(SessionById(write.target.id))
    if row is None or row.deleted or row.state != "stuck":
        return None
    row = await _reopen(tx, replace(row, updated=write.at), write.worker)
    tx.change(PutSession(row))
    if write.worker is None:
        await takeovers.resume(tx, row.sid, row.takeovers)
    else:
        await takeovers.resume_for(tx, row.sid, row.takeovers, write.worker, write.lived)
    return row


async def reopen(tx: Transaction, write: ReopenTurn) -> SessionRow | None:
    row = await tx.read(SessionById(write.session_id))
    if row is None or row.deleted:
        return None
    there = await tx.read(NodeAt(row.sid, write.turn, write.node.ordinal))
    if row.turn == write.turn or (there is not None and row.turn is None and row.head == write.turn):
        return row  # another caller was first, or this write is sent again
    if there is not None or row.turn is not None or row.head != write.turn:
        return None
    if await tx.read(NodeAt(row.sid, write.turn, write.node.ordinal - 1)) is None:
        return None  # ordinals have no gaps
    if write.settings is not None and write.expected != row.settings:
        raise StaleSettings(row.id)
    tx.change(AddNode(row.sid, write.turn, write.node.ordinal, write.node.body))
    if write.settings is not None:
        row = _configured(tx, row, write.settings)
    row = replace(row, head=write.head, turn=write.turn, state="open", reason=None, cancel=None, updated=write.at)
    if write.worker is not None:
        row = replace(row, owner=write.worker, generation=row.generation + 1)
    tx.change(PutSession(row))
    return row


async def configure(tx: Transaction, write: Configure) -> SessionRow:
    row = await tx.read(SessionById(write.session_id))
    if row is not None:
        _check_usable(row, write.agent)
        if row.settings == write.settings:
            return row
    if write.expected is not None and write.expected != (b"" if row is None else row.settings):
        raise StaleSettings(write.session_id)
    if write.next is not None and write.next != (1 if row is None else row.next):
        raise StaleSettings(write.session_id)
    if write.head is not None and write.head != (0 if row is None else row.head):
        raise StaleSettings(write.session_id)
    await check_blobs(tx, write.blobs)
    if row is None:
        number = await tx.number(NextSid())
        row = SessionRow(number, write.session_id, write.agent, created=write.at, updated=write.at)
        tx.change(AddSession(row))
    tx.change(ReferToBlobs(row.sid, write.blobs))
    row = replace(_configured(tx, row, write.settings), updated=write.at)
    tx.change(PutSession(row))
    for spent in write.costs:
        tx.change(AddUsage(replace(spent, sid=row.sid)))
    if write.spending:
        await spending.spend(tx, row, write.worker, write.spending)
    return row


def _configured(tx: Transaction, row: SessionRow, settings: bytes) -> SessionRow:
    if settings != row.settings:
        tx.change(PutSettings(row.sid, settings))
        if (labels := labels_of(settings)) != labels_of(row.settings):
            tx.change(PutLabels(row.sid, labels))
    return replace(row, settings=settings)


async def resolve(tx: Transaction, write: Resolve) -> Resolved:
    wait = await tx.read(WaitById(write.wait_id))
    if wait is None or wait.state == "revoked":
        return Resolved("unknown", wait)
    row = await tx.read(SessionBySid(wait.sid))
    if row is None or row.deleted:
        return Resolved("unknown", wait)
    if wait.state != "open":
        return Resolved("already_resolved", wait, row)
    if row.cancel is not None and write.answer is not None:
        # The turn ends as cancelled and reads no answer any more, so it is not reported as accepted.
        return Resolved("already_resolved", replace(wait, state="cancelled"), row)
    if write.answer is None:
        wait = replace(wait, state="expired")
    else:
        body = encode(write.answer)
        await check_blobs(tx, _spilled([body]))
        wait = replace(wait, state="resolved", answer=body)
        tx.change(ReferToBlobs(waits_of(wait.sid), _spilled([body])))
    tx.change(PutWait(wait))
    if row.turn == wait.turn and row.owner is None:
        row = await _reopen(tx, replace(row, updated=write.at), write.worker if row.agent in write.agents else None)
        tx.change(PutSession(row))
    return Resolved("accepted", wait, row)


async def _reopen(tx: Transaction, row: SessionRow, worker: str | None) -> SessionRow:
    """Open a turn without an owner again, claimed for `worker`; without one, for the next claim."""
    if row.owner is not None:
        return row
    await _unpark(tx, row, row.updated)
    if worker is None:
        return replace(row, state="open", reason=None)
    return replace(row, state="open", owner=worker, generation=row.generation + 1, reason=None)


async def _unpark(tx: Transaction, row: SessionRow, at: int) -> None:
    """Forget what a parked turn waits for, and resume the processes that were parked with it. Every rule that changes a
    parked turn's state calls this."""
    if row.state == "parked" and row.turn is not None:
        tx.change(DropAwaits(-row.sid))
        await resume_with_turn(tx, turn_id(row.id, row.turn), at)


async def branch(tx: Transaction, write: Branch) -> SessionRow:
    source = await tx.read(SessionById(write.source))
    if source is None:
        raise UnknownSession(write.source)
    if source.deleted:
        raise SessionDeleted(source.id)
    fork = Fork(source.sid, write.turn, write.ordinal)
    existing = await tx.read(SessionById(write.session_id))
    if existing is not None:
        if existing.fork == fork and existing.agent == write.agent and not existing.deleted:
            return existing
        raise InvalidSessionId(write.session_id, "it is taken, and ids are used once per store: choose another")
    number = await tx.number(NextSid())
    row = SessionRow(number, write.session_id, write.agent, fork=fork, created=write.at, updated=write.at)
    tx.change(AddSession(row))
    if source.settings:
        row = _configured(tx, row, settings_of_fork(source.settings, write.whole and source.head == write.turn))
        tx.change(PutSession(row))
    for process_id in write.grants:
        process = await tx.read(ProcessById(process_id))
        if process is not None and await tx.read(IsGranted(source.id, process.pid)):
            tx.change(PutGrant(row.id, process.pid))
    return row


async def delete(tx: Transaction, write: Delete) -> bool:
    row = await tx.read(SessionById(write.session_id))
    if row is None or row.deleted:
        return False
    if write.unused_since is not None and not await _is_unused(tx, row, write.unused_since):
        return False
    tx.change(DropWaits(row.sid))
    tx.change(DropDumps(row.sid))  # also where forks need its records: they run its cells again
    await takeovers.clear(tx, row.sid, row.takeovers)
    await spending.delete(tx, row.id)
    if row.turn is not None:
        await end_turn(tx, turn_id(row.id, row.turn), write.at)
        await _unpark(tx, row, write.at)
    await end_session(tx, row.id, write.at)
    row = replace(
        row,
        deleted=True,
        turn=None,
        state="idle",
        owner=None,
        generation=row.generation + 1,
        cancel=None,
        reason=None,
        updated=write.at,
    )
    row = _configured(tx, row, b"")
    tx.change(PutSession(row))
    tx.change(DropGrants(row.id))
    for wake in await tx.read(PendingWakesFor(row.id)):
        tx.change(PutWake(replace(wake, state="discarded", reason="its session was deleted")))
    await _drop_unreachable(tx, row)
    return True


async def _is_unused(tx: Transaction, row: SessionRow, since: int) -> bool:
    """Whether a session has been idle since then, and nothing that exists can change that."""
    if row.turn is not None or row.state != "idle" or row.updated >= since:
        return False
    if await tx.read(HasInputs(row.sid)) or await tx.read(HasLiveProcesses(row.id)):
        return False
    forks, wakes = await tx.read(ForksOf(row.sid)), await tx.read(PendingWakesFor(row.id))
    return not forks and not wakes


async def _drop_unreachable(tx: Transaction, row: SessionRow | None) -> None:
    """Drop the nodes of deleted sessions that no fork reaches, up the line."""
    while row is not None and row.deleted and not await tx.read(ForksOf(row.sid)):
        tx.change(DropSessionData(row.sid))
        source = row.fork
        tx.change(PutSession(replace(row, fork=None)))
        row = await tx.read(SessionBySid(source.sid)) if source is not None else None


# ---------------------------------------------------------------------- parts


def _check_usable(row: SessionRow, agent: str) -> None:
    if row.deleted:
        raise SessionDeleted(row.id)
    if row.agent != agent:
        raise WrongAgent(row.id, agent, row.agent)
