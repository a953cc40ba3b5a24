"""What each write does, decided once for every store.

A rule reads rows, refuses with a typed error before it has changed anything, or changes rows and returns its receipt.
The store runs it inside one transaction. Rules know no SQL, no clock and no randomness; stores know no rules.

Two laws hold throughout. *Fencing*: a write of an owner names its generation, and after a claim by another nothing of
the old owner's changes anything. *Recognition*: a write sent twice because its reply was lost is applied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, cast

from msgspec.structs import replace

from mainstay.errors import (
    BlobMissing,
    Fenced,
    HeadMoved,
    InternalError,
    InvalidSessionId,
    KeyConflict,
    SessionDeleted,
    StaleSettings,
    UnknownSession,
    WrongAgent,
)
from mainstay.model.codec import encode
from mainstay.model.ids import turn_id
from mainstay.model.record import Joined
from mainstay.model.session import CancelRequest, Fork, InboxRow, Node, SessionRow, WaitRow, WorkerRow
from mainstay.model.settings import committed, forked
from mainstay.model.write import (
    Accept,
    Accepted,
    Append,
    Appended,
    Beat,
    Branch,
    Cancel,
    CancelReceipt,
    CancelWon,
    Claim,
    Claimed,
    Commit,
    Committed,
    Configure,
    Delete,
    Release,
    Resolve,
    Resolved,
    Resume,
    Retire,
    Scope,
    Write,
)

R = TypeVar("R")

MAX_TAKEOVERS = 3
READ_BACK = 256
"""How many of a session's newest inputs are searched for an acceptance whose reply was lost."""


class Rows(Protocol):
    """A transaction in progress, seen as rows."""

    def session(self, session_id: str) -> SessionRow | None: ...
    def session_by_sid(self, sid: int) -> SessionRow | None: ...
    def add_session(self, row: SessionRow) -> SessionRow: ...
    def put_session(self, row: SessionRow) -> None: ...
    def put_settings(self, sid: int, settings: bytes) -> None: ...
    def owned_by(self, worker_id: str) -> list[SessionRow]: ...
    def forks_of(self, sid: int) -> int: ...

    def key(self, sid: int, key: str) -> tuple[int, bytes] | None: ...
    def put_key(self, sid: int, key: str, turn: int, digest: bytes) -> None: ...

    def node(self, sid: int, turn: int, ordinal: int) -> bytes | None: ...
    def add_node(self, sid: int, turn: int, ordinal: int, body: bytes) -> bool: ...
    def add_nodes(self, sid: int, turn: int, nodes: Iterable[Node]) -> None: ...
    def drop_session_data(self, sid: int) -> None: ...
    def add_blobs(self, sid: int, digests: Iterable[str]) -> None: ...
    def has_blob(self, digest: str) -> bool: ...

    def first_mail(self, sid: int) -> InboxRow | None: ...
    def has_mail(self, sid: int) -> bool: ...
    def mail(self, sid: int, number: int) -> InboxRow | None: ...
    def put_mail(self, row: InboxRow) -> None: ...
    def drop_mail(self, sid: int, number: int) -> None: ...

    def wait(self, wait_id: str) -> WaitRow | None: ...
    def put_wait(self, row: WaitRow) -> None: ...
    def open_waits(self, sid: int) -> list[WaitRow]: ...

    def worker(self, worker_id: str) -> WorkerRow | None: ...
    def put_worker(self, row: WorkerRow) -> None: ...
    def drop_worker(self, worker_id: str) -> None: ...


def apply(rows: Rows, write: Write[R]) -> R:
    """Run the rule of a write."""
    return cast(R, RULES[type(write)](rows, write))


# ---------------------------------------------------------------------- inputs


def accept(rows: Rows, write: Accept) -> Accepted:
    row = rows.session(write.session_id)
    if row is not None:
        _check_usable(row, write.agent)
        if write.key is not None and (known := rows.key(row.sid, write.key)) is not None:
            turn, digest = known
            if digest != write.digest:
                raise KeyConflict(row.id, write.key, turn_id(row.id, turn))
            return Accepted(turn, row, opened=row.turn == turn, known=True)
    _check_blobs(rows, write.blobs)
    opens = write.kind != "note" and (row is None or row.turn is None)
    if row is None:
        turn = 1
        row = SessionRow(0, write.session_id, write.agent, next=2, created=write.at, updated=write.at)
        row = rows.add_session(_opened(row, turn, write) if opens else row)
    else:
        turn = row.next
        row = replace(row, next=turn + 1, updated=write.at)
        row = _opened(row, turn, write) if opens else row
        rows.put_session(row)
    if not opens:
        rows.put_mail(InboxRow(row.sid, turn, write.kind))
    if write.key is not None:
        rows.put_key(row.sid, write.key, turn, write.digest)
    rows.add_node(row.sid, turn, 0, write.body)
    rows.add_blobs(row.sid, write.blobs)
    return Accepted(turn, row, opens)


def _opened(row: SessionRow, turn: int, write: Accept) -> SessionRow:
    owner = write.worker
    return replace(
        row,
        turn=turn,
        state="open",
        owner=owner,
        generation=row.generation + (owner is not None),
        takeovers=0,
        cancel=None,
        reason=None,
        updated=write.at,
    )


def _accept_applied(rows: Rows, write: Accept) -> Accepted | None:
    row = rows.session(write.session_id)
    if row is None:
        return None
    for turn in range(row.next - 1, max(0, row.next - 1 - READ_BACK), -1):
        body = rows.node(row.sid, turn, 0)
        if body is not None and body == write.body:
            return Accepted(turn, row, opened=row.turn == turn)
    return None


# ---------------------------------------------------------------------- an owned turn


def claim(rows: Rows, write: Claim) -> Claimed:
    row = rows.session(write.session_id)
    if row is None or row.deleted or row.turn is None or row.state == "stuck":
        return Claimed(row, won=False)
    if row.owner == write.worker and row.generation == write.generation + 1:
        return Claimed(row, won=True)
    if row.generation != write.generation or row.owner == write.worker:
        return Claimed(row, won=False)
    takeovers = row.takeovers + (row.owner is not None)
    if row.owner is not None and takeovers % (MAX_TAKEOVERS + 1) == 0:
        # Counted on when a person resumes the turn: a takeover is a model call that may have been asked for nothing.
        why = f"{MAX_TAKEOVERS} workers in a row died on this turn without a new record"
        row = replace(row, state="stuck", owner=None, generation=row.generation + 1, takeovers=takeovers, reason=why)
        row = replace(row, updated=write.at)
        rows.put_session(row)
        return Claimed(row, won=False)
    row = replace(
        row,
        owner=write.worker,
        generation=row.generation + 1,
        takeovers=takeovers,
        state="open",
        reason=None,
        updated=write.at,
    )
    rows.put_session(row)
    return Claimed(row, won=True)


def append(rows: Rows, write: Append) -> Appended:
    scope = write.scope
    if write.park and (row := _let_go(rows, scope)) is not None and row.state == "parked" and _all_there(rows, write):
        return Appended(row.cancel, rows.has_mail(scope.sid), parked=True)
    row = _owned(rows.session_by_sid(scope.sid), scope)
    _check_blobs(rows, write.blobs)
    if _add_nodes(rows, scope, write.nodes):
        _take(rows, scope, write.take)
        for wait in write.waits:
            known = rows.wait(wait.id)
            if known is None or (known.state == "open" and known != wait):
                rows.put_wait(wait)
        rows.add_blobs(scope.sid, write.blobs)
    park = bool(write.park) and row.cancel is None and _all_open(rows, write.park)
    if park:
        rows.put_session(replace(row, state="parked", owner=None, takeovers=0, updated=write.at))
    elif row.takeovers and write.nodes:
        rows.put_session(replace(row, takeovers=0))
    return Appended(row.cancel, rows.has_mail(scope.sid), park)


def commit(rows: Rows, write: Commit) -> Committed | CancelWon:
    scope = write.scope
    row = rows.session_by_sid(scope.sid)
    if row is not None and row.head >= scope.turn and _same_last(rows, write):
        return Committed(row)
    row = _owned(row, scope)
    if row.head != write.head:
        raise HeadMoved(row.id, write.head, row.head)
    if row.cancel is not None and not write.cancelled:
        return CancelWon(row.cancel)
    _check_blobs(rows, write.blobs)
    if not _add_nodes(rows, scope, write.nodes):
        raise InternalError(f"records of {scope.session_id}.{scope.turn} were written before its commit")
    _take(rows, scope, write.take)
    rows.add_blobs(scope.sid, write.blobs)
    _close_waits(rows, scope.sid, "cancelled" if write.cancelled else "revoked")
    mail = rows.first_mail(scope.sid)
    if mail is None:
        row = replace(
            row, head=scope.turn, turn=None, state="idle", owner=None, takeovers=0, cancel=None, updated=write.at
        )
    else:
        rows.drop_mail(scope.sid, mail.input)
        row = replace(row, head=scope.turn, turn=mail.input, takeovers=0, cancel=mail.cancel, updated=write.at)
    if write.tools or row.settings:
        row = _configured(rows, row, committed(row.settings, write.tools, write.recorded))
    rows.put_session(row)
    return Committed(row)


def release(rows: Rows, write: Release) -> None:
    free = _let_go(rows, write.scope)
    if free is not None and (write.stuck is None or free.state == "stuck"):
        return
    row = _owned(rows.session_by_sid(write.scope.sid), write.scope)
    state = "stuck" if write.stuck is not None else row.state
    rows.put_session(replace(row, owner=None, state=state, reason=write.stuck, updated=write.at))


def _owned(row: SessionRow | None, scope: Scope) -> SessionRow:
    """The session, when `scope` still owns it. The only fence there is: every write of an owner passes here."""
    if row is None or row.deleted:
        raise SessionDeleted(scope.session_id)
    if row.owner != scope.owner or row.generation != scope.generation or row.turn != scope.turn:
        raise Fenced(turn_id(scope.session_id, scope.turn), scope.generation)
    return row


def _let_go(rows: Rows, scope: Scope) -> SessionRow | None:
    """The session, when `scope` was its last owner and gave it up: that write may come again, its reply was lost."""
    row = rows.session_by_sid(scope.sid)
    free = row is not None and row.owner is None and row.generation == scope.generation and row.turn == scope.turn
    return row if free else None


def _all_there(rows: Rows, write: Append) -> bool:
    return all(rows.node(write.scope.sid, write.scope.turn, n.ordinal) == n.body for n in write.nodes)


def _add_nodes(rows: Rows, scope: Scope, nodes: tuple[Node, ...]) -> bool:
    """Write records; False when they are there already, from a first sending of the same write."""
    if not nodes:
        return True
    first = nodes[0]
    if rows.add_node(scope.sid, scope.turn, first.ordinal, first.body):
        rows.add_nodes(scope.sid, scope.turn, nodes[1:])
        return True
    if any(rows.node(scope.sid, scope.turn, n.ordinal) != n.body for n in nodes):
        raise InternalError(f"record {first.ordinal} of {scope.session_id}.{scope.turn} exists with other content")
    return False


def _same_last(rows: Rows, write: Commit) -> bool:
    last = write.nodes[-1]
    return rows.node(write.scope.sid, write.scope.turn, last.ordinal) == last.body


def _take(rows: Rows, scope: Scope, numbers: tuple[int, ...]) -> None:
    """Settle inputs that were delivered into the turn: each gets a record that says so."""
    for number in numbers:
        rows.drop_mail(scope.sid, number)
        rows.add_node(scope.sid, number, 1, encode(Joined(scope.turn)))


def _all_open(rows: Rows, wait_ids: tuple[str, ...]) -> bool:
    """Whether no answer arrived between the owner's last look and this transaction: else there is work to do."""
    waits = [rows.wait(wait_id) for wait_id in wait_ids]
    return all(wait is not None and wait.state == "open" for wait in waits)


# ---------------------------------------------------------------------- from outside


def cancel(rows: Rows, write: Cancel) -> CancelReceipt:
    row = rows.session(write.session_id)
    if row is None or row.deleted:
        return CancelReceipt("unknown")
    turn = write.turn if write.turn is not None else row.turn
    if turn is None:
        return CancelReceipt("completion_won", row.head or None, row)
    if turn != row.turn:
        return _cancel_queued(rows, row, turn, write.request)
    if row.cancel is not None:
        return CancelReceipt("already_requested", turn, row)
    row = _wake(replace(row, cancel=encode(write.request), updated=write.at), write.worker)
    rows.put_session(row)
    return CancelReceipt("requested", turn, row)


def _cancel_queued(rows: Rows, row: SessionRow, turn: int, request: CancelRequest) -> CancelReceipt:
    mail = rows.mail(row.sid, turn)
    if mail is None or mail.kind == "note":
        # A note opens no turn, so there is none to stop; opened as a cancelled one it could move the head back.
        return CancelReceipt("completion_won" if 0 < turn < row.next else "unknown", turn, row)
    if mail.cancel is not None:
        return CancelReceipt("already_requested", turn, row)
    rows.put_mail(replace(mail, kind="queue", cancel=encode(request)))
    return CancelReceipt("requested", turn, row)


def resume(rows: Rows, write: Resume) -> SessionRow | None:
    row = rows.session(write.session_id)
    if row is None or row.deleted or row.state != "stuck":
        return None
    row = _wake(replace(row, updated=write.at), write.worker)
    rows.put_session(row)
    return row


def configure(rows: Rows, write: Configure) -> SessionRow:
    row = rows.session(write.session_id)
    if row is not None:
        _check_usable(row, write.agent)
        if row.settings == write.settings:
            return row
    if write.expected is not None and write.expected != (b"" if row is None else row.settings):
        raise StaleSettings(write.session_id)
    _check_blobs(rows, write.blobs)
    if row is None:
        row = rows.add_session(SessionRow(0, write.session_id, write.agent, created=write.at, updated=write.at))
    rows.add_blobs(row.sid, write.blobs)
    row = replace(_configured(rows, row, write.settings), updated=write.at)
    rows.put_session(row)
    return row


def _configured(rows: Rows, row: SessionRow, settings: bytes) -> SessionRow:
    if settings != row.settings:
        rows.put_settings(row.sid, settings)
    return replace(row, settings=settings)


def resolve(rows: Rows, write: Resolve) -> Resolved:
    wait = rows.wait(write.wait_id)
    if wait is None or wait.state == "revoked":
        return Resolved("unknown", wait)
    row = rows.session_by_sid(wait.sid)
    if row is None or row.deleted:
        return Resolved("unknown", wait)
    if wait.state != "open":
        return Resolved("already_resolved", wait, row)
    if write.answer is None:
        wait = replace(wait, state="expired")
    else:
        wait = replace(wait, state="resolved", answer=encode(write.answer))
    rows.put_wait(wait)
    if row.turn == wait.turn and row.owner is None:
        row = _wake(replace(row, updated=write.at), write.worker if row.agent in write.agents else None)
        rows.put_session(row)
    return Resolved("accepted", wait, row)


def _wake(row: SessionRow, worker: str | None) -> SessionRow:
    """A turn that nobody works on has something to do again: `worker` takes it, or whoever comes first."""
    if row.owner is not None:
        return row
    if worker is None:
        return replace(row, state="open", reason=None)
    return replace(row, state="open", owner=worker, generation=row.generation + 1, reason=None)


def branch(rows: Rows, write: Branch) -> SessionRow:
    source = rows.session(write.source)
    if source is None:
        raise UnknownSession(write.source)
    if source.deleted:
        raise SessionDeleted(source.id)
    fork = Fork(source.sid, write.turn, write.ordinal)
    existing = rows.session(write.session_id)
    if existing is not None:
        if existing.fork == fork and existing.agent == write.agent and not existing.deleted:
            return existing
        raise InvalidSessionId(write.session_id, "it is taken, and ids are used once per store: choose another")
    row = SessionRow(0, write.session_id, write.agent, fork=fork, created=write.at, updated=write.at)
    row = rows.add_session(row)
    if source.settings:
        row = _configured(rows, row, forked(source.settings))
        rows.put_session(row)
    return row


def delete(rows: Rows, write: Delete) -> bool:
    row = rows.session(write.session_id)
    if row is None or row.deleted:
        return False
    _close_waits(rows, row.sid, "revoked")
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
    row = _configured(rows, row, b"")
    rows.put_session(row)
    _collect(rows, row)
    return True


def _collect(rows: Rows, row: SessionRow | None) -> None:
    """Drop the nodes of deleted sessions that no fork reaches, up the line."""
    while row is not None and row.deleted and not rows.forks_of(row.sid):
        rows.drop_session_data(row.sid)
        source = row.fork
        rows.put_session(replace(row, fork=None))
        row = rows.session_by_sid(source.sid) if source is not None else None


# ---------------------------------------------------------------------- workers


def beat(rows: Rows, write: Beat) -> bool:
    known = rows.worker(write.worker.id)
    rows.put_worker(write.worker)
    return known is not None or write.worker.beat == 0


def retire(rows: Rows, write: Retire) -> None:
    owned = rows.owned_by(write.worker_id)
    if write.dead and owned:
        return  # what a dead worker owned is claimed first, each with its own fence
    for row in owned:
        rows.put_session(replace(row, owner=None))
    rows.drop_worker(write.worker_id)


# ---------------------------------------------------------------------- parts


def _check_usable(row: SessionRow, agent: str) -> None:
    if row.deleted:
        raise SessionDeleted(row.id)
    if row.agent != agent:
        raise WrongAgent(row.id, agent, row.agent)


def _check_blobs(rows: Rows, digests: tuple[str, ...]) -> None:
    """Inside the transaction: the sweep deletes inside one too, so a reference is never left dangling."""
    for digest in digests:
        if not rows.has_blob(digest):
            raise BlobMissing(digest)


def _close_waits(rows: Rows, sid: int, state: Any) -> None:
    for wait in rows.open_waits(sid):
        rows.put_wait(replace(wait, state=state))


RULES: dict[type, Callable[[Rows, Any], Any]] = {
    Accept: accept,
    Claim: claim,
    Append: append,
    Commit: commit,
    Release: release,
    Cancel: cancel,
    Resolve: resolve,
    Resume: resume,
    Configure: configure,
    Branch: branch,
    Delete: delete,
    Beat: beat,
    Retire: retire,
}


def applied(rows: Rows, write: Write[R]) -> R | None:
    """The receipt of a write that may have landed before its reply was lost; None when it must be sent again.

    All but an acceptance recognise themselves when they are applied again; one with a key would take itself for a
    second asking, and its turn would not be worked on.
    """
    if isinstance(write, Accept):
        return cast("R | None", _accept_applied(rows, write))
    return None
