"""Writes: what a store may be asked to change. Each is applied in one transaction and answered with its receipt.

A write that returns is durable. A refused write raises a typed error and has changed nothing. A write whose reply was
lost may be sent again: every one of them recognises itself (`op`, ordinals, generations) and answers as the first did.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct

from perdure.model.limit import Granted, Spending
from perdure.model.message import Scalar
from perdure.model.process import Event, ProcessOutcome, ProcessRow, Registration, WaitOn, WakeRow
from perdure.model.record import InputKind, Spilled
from perdure.model.session import Answer, CancelRequest, Death, Dump, Node, SessionRow, WaitRow, WorkerRow
from perdure.model.spending import UsageRow

R = TypeVar("R")
Row = TypeVar("Row", SessionRow, ProcessRow)


class Write(Struct, Generic[R], frozen=True, gc=False):
    """A transaction to apply, whose receipt is an R."""


# ---------------------------------------------------------------------- of turns and processes alike


class ScopeRef(Struct, Generic[Row], frozen=True, gc=False):
    """The name of what can be owned, for a caller that does not own it: the open turn of a session, or a process."""

    id: str


class SessionRef(ScopeRef[SessionRow], frozen=True, gc=False):
    """The open turn of a session."""


class ProcessRef(ScopeRef[ProcessRow], frozen=True, gc=False):
    """A process."""


class OwnedScope(Struct, Generic[Row], frozen=True, gc=False):
    """What an owner owns: every write of it carries this, and after a claim by another one it changes nothing."""


class TurnScope(OwnedScope[SessionRow], frozen=True, gc=False):
    """An owned turn."""

    session_id: str
    sid: int
    turn: int
    owner: str
    generation: int


class ProcessScope(OwnedScope[ProcessRow], frozen=True, gc=False):
    """An owned process."""

    id: str
    pid: int
    owner: str
    generation: int


Scope: TypeAlias = TurnScope | ProcessScope


class Claimed(Struct, Generic[Row], frozen=True, gc=False):
    """`row` is what was claimed, after it, or as it is when `won` is false: another worker was faster, or the process
    was given up because its owner is proven dead, which woke the processes `woken`.

    `suspect`: it runs as the suspect of its worker's OS process, or, not won, was held back because another one does.
    """

    row: Row | None
    won: bool
    suspect: bool = False
    woken: tuple[ProcessRow, ...] = ()


class Claim(Write[Claimed[Row]], Generic[Row], frozen=True, gc=False):
    """Own an open turn or a process whose owner is gone. `generation` is what the claimant saw: it fences all before.

    `proof` says why the owner of a process is known to be dead; without it the owner was silent for longer than its
    lease. `death` is what the claimant knows of the owner's death, `lived` how long it has lived itself, in
    milliseconds.
    """

    target: ScopeRef[Row]
    worker: str
    generation: int
    at: int
    proof: str | None = None
    death: Death | None = None
    lived: int = 0


class Released(Struct, Generic[Row], frozen=True, gc=False):
    """The row after it. `woken`: processes that have something to do because a process was abandoned with it."""

    row: Row
    woken: tuple[ProcessRow, ...] = ()


class Release(Write[Released[Row]], Generic[Row], frozen=True, gc=False):
    """Give up an open turn or a process: it is free to claim, or, with `stuck`, set aside until a person resumes it.

    A process that only its owner could do, and that has begun, is abandoned: no other worker may go on with it.
    """

    scope: OwnedScope[Row]
    at: int
    stuck: str | None = None


CancelStatus: TypeAlias = Literal["requested", "already_requested", "completion_won", "unknown"]


class CancelReceipt(Struct, Generic[Row], frozen=True, gc=False):
    """Status "completion_won": it had ended before. `turn` is which one, of a session. `woken`: processes that have
    something to do because of it, or have ended with it. `each` are the statuses of the inputs in `Cancel.queued`."""

    status: CancelStatus
    turn: int | None = None
    row: Row | None = None
    woken: tuple[ProcessRow, ...] = ()
    each: tuple[CancelStatus, ...] = ()


class Cancel(Write[CancelReceipt[Row]], Generic[Row], frozen=True, gc=False):
    """Ask a turn or a process to stop. The first request stands.

    Of a session it is the open turn, or `turn` if it is still open or queued; `worker` claims it if it has no
    owner. With `queued` it is these inputs, all in one transaction, as far as they still wait: the open turn goes on.
    A process that has not begun ends at once.
    """

    target: ScopeRef[Row]
    request: CancelRequest
    at: int
    turn: int | None = None
    worker: str | None = None
    queued: tuple[int, ...] = ()


class Resume(Write[Row | None], Generic[Row], frozen=True, gc=False):
    """Let a stuck turn or process be worked on again, because a person asks for it. None: it is not stuck.

    `worker` claims the turn; a process is left to the next claim.
    """

    target: ScopeRef[Row]
    at: int
    worker: str | None = None
    lived: int = 0


# ---------------------------------------------------------------------- of turns


class ReopenTurn(Write["SessionRow | None"], frozen=True, gc=False):
    """Continue the last turn of a session, which ended without an answer; `worker` claims it. None: it is not the last
    one any more, or another turn is open.

    `node` is the record of it, behind the turn's last one. The head moves back to `head`, the committed turn before.
    `settings` replaces those of the session, if they are `expected` still. A turn that is open or was continued by
    another write is left as it is.
    """

    session_id: str
    turn: int
    head: int
    node: Node
    at: int
    worker: str | None = None
    settings: bytes | None = None
    expected: bytes = b""


class Accepted(Struct, frozen=True, gc=False):
    """`turn` is the input's ordinal. `opened`: it is the session's open turn now. `known`: the key was seen before.
    `granted` is what is reserved for the first call of the turn."""

    turn: int
    row: SessionRow
    opened: bool
    known: bool = False
    granted: Granted | None = None


class Accept(Write[Accepted], frozen=True, gc=False):
    """Take an input in: create the session if need be, open a turn or queue, and claim it for `worker` if given.

    `stuck` says why a turn that it opens is set aside until a person resumes it; it is not claimed then. `metadata`, if
    given, is that of a new session; one that exists must have the same, or `MetadataConflict` is raised. `filtered`:
    the input has passed filters, which is kept with the session. `spending` reserves for the first call of a turn that
    it opens and claims.
    """

    session_id: str
    agent: str
    body: bytes
    op: str
    at: int
    kind: InputKind = "queue"
    key: str | None = None
    digest: bytes = b""
    worker: str | None = None
    blobs: tuple[str, ...] = ()
    stuck: str | None = None
    metadata: dict[str, Scalar] | None = None
    filtered: bool = False
    spending: Spending | None = None


class Appended(Struct, frozen=True, gc=False):
    """What the owner should know: a cancel request, whether inputs wait, whether the turn is parked now, and what was
    granted of what it wants to spend."""

    cancel: bytes | None = None
    inputs: bool = False
    parked: bool = False
    granted: tuple[Granted, ...] = ()


class Append(Write[Appended], frozen=True, gc=False):
    """Record outcomes of a turn. In the same transaction: inputs that were delivered, waits that open, and parking.

    The turn parks on the waits named in `park`, and only if all of them are open still. `repeats`: the records only say
    that something is attempted once more, which is no progress.

    With `awaits`, which are ids of processes, `waits` are those for their ends: they are written with the parking or
    not at all, and the turn does not park where one of these processes has ended or is stuck. The first that does opens
    it again. With `heard` it waits for nothing else, so that an input which may join it opens it too: the owner has
    looked at inputs below that number, and the turn does not park where there is one more.

    `dump` takes the place of the one that the turn has, if any. `spending` settles what was reserved for calls, and
    reserves for others.

    The owner of a process has a write of its own (`Advance`): it carries events, which others follow, and
    its end, where a turn ends by a `Commit` that moves the head of its session.
    """

    scope: TurnScope
    nodes: tuple[Node, ...]
    at: int
    take: tuple[int, ...] = ()
    waits: tuple[WaitRow, ...] = ()
    park: tuple[str, ...] = ()
    blobs: tuple[str, ...] = ()
    repeats: bool = False
    awaits: tuple[str, ...] = ()
    heard: int | None = None
    dump: Dump | None = None
    spending: tuple[Spending, ...] = ()


class Committed(Struct, frozen=True, gc=False):
    """The commit landed. `row` is the session after it: its next turn is open when an input waited.

    `woken` are processes that were asked to stop because their turn has ended.
    """

    row: SessionRow
    woken: tuple[ProcessRow, ...] = ()


class CancelWon(Struct, frozen=True, gc=False):
    """A cancel request was there first: nothing was written, commit the turn as cancelled instead."""

    cancel: bytes


class Commit(Write["Committed | CancelWon"], frozen=True, gc=False):
    """End a turn: the last records, the head moved from `head` to the turn, its waits gone, the next input opened.

    `tools` are what the turn decided for single tools of its session, `recorded` the revisions of plugins that its
    records hold. `children`: it may have started processes that end with it. `over`: every ordinal of the turn is used,
    and the only node, which holds the record that has the last one, takes its place. `dump` is as in `Append`. `costs`
    is what the turn spent, `spending` settles what was reserved for its last call: a turn that limits hold for has one
    in any case.
    """

    scope: TurnScope
    nodes: tuple[Node, ...]
    head: int
    at: int
    take: tuple[int, ...] = ()
    cancelled: bool = False
    blobs: tuple[str, ...] = ()
    tools: dict[str, bool | None] | None = None
    recorded: dict[str, int] | None = None
    children: bool = False
    over: bool = False
    dump: Dump | None = None
    costs: tuple[UsageRow, ...] = ()
    spending: tuple[Spending, ...] = ()


class Resolved(Struct, frozen=True, gc=False):
    """`row` is the session after it; its turn is claimed for the resolver when it had no owner.

    The wait of a turn that was asked to stop is shown as cancelled. That of a committed one is gone; its outcome is in
    the records.
    """

    status: Literal["accepted", "already_resolved", "unknown"]
    wait: WaitRow | None = None
    row: SessionRow | None = None


class Resolve(Write[Resolved], frozen=True, gc=False):
    """Resolve a wait. The first answer stands; a large one is a blob. `answer` None: its time ran out.

    A signal to a process (`SendSignal`) is no answer: any number may be sent before anything waits for
    one, and each is an event that stays.
    """

    wait_id: str
    answer: Answer | Spilled | None
    at: int
    worker: str | None = None
    agents: tuple[str, ...] = ()


class Configure(Write[SessionRow], frozen=True, gc=False):
    """Replace the settings of a session, which is created if need be.

    `expected`: only if they are these still. `next`: only if no input was accepted since it was the next one's number.
    `head`: only if no turn has ended since this was the last one, for the next one may have been opened then.
    `costs` is what a direct completion outside of turns has spent, which the settings tell of too; of a session that is
    created it has no number yet. `spending` reserves for such a completion by `worker`, and settles; what was granted
    is in the reservation then.
    """

    session_id: str
    agent: str
    settings: bytes
    at: int
    expected: bytes | None = None
    blobs: tuple[str, ...] = ()
    next: int | None = None
    head: int | None = None
    costs: tuple[UsageRow, ...] = ()
    spending: tuple[Spending, ...] = ()
    worker: str = ""


class Branch(Write[SessionRow], frozen=True, gc=False):
    """A new session over shared history. `grants` are processes that it may see, as its source does.

    `whole`: it shares all of that turn. Where that is the last one, what was changed of plugins since is its own too.
    """

    session_id: str
    agent: str
    source: str
    turn: int
    ordinal: int
    at: int
    grants: tuple[str, ...] = ()
    whole: bool = False


class Delete(Write[bool], frozen=True, gc=False):
    """Spend a session id for good. Nodes go as soon as no fork reaches them. False: there was nothing.

    With `unused_since`, only a session that nothing has happened to since then and that nothing can come of: no open
    turn, no input that waits, no fork of it, no pending wake, no live process that it may see. False otherwise.
    """

    session_id: str
    at: int
    unused_since: int | None = None


# ---------------------------------------------------------------------- of processes


class Registered(Struct, frozen=True, gc=False):
    """`known`: the same was registered before, and this is that."""

    row: ProcessRow
    known: bool = False


class ProcessLimits(Struct, frozen=True, gc=False):
    """How many processes of one kind may be active at once: in a store, and of one session."""

    total: int
    per_session: int


class Register(Write[Registered], frozen=True, gc=False):
    """Begin a process, and claim it for `worker` if given. The sessions of `grants` may see it.

    With a `reference`, its work begins now, in the store of the id `store`, and that is where it can be found: what
    that worker's first `Advance` would say otherwise. Not where it is asked to stop at once, because its parent has
    ended. It is refused if there are as many of its kind as `limits` allow.
    """

    registration: Registration
    at: int
    worker: str | None = None
    grants: tuple[str, ...] = ()
    blobs: tuple[str, ...] = ()
    reference: Any = None
    store: str = ""
    limits: ProcessLimits | None = None


class Advanced(Struct, frozen=True, gc=False):
    """The process after it. `parked`: it waits on disk now. `woken`: processes that have something to do because of it,
    or have ended with it.

    A row whose sequence is beyond what its owner has `seen` has events that the owner must read: a signal, a cancel
    request.
    """

    row: ProcessRow
    parked: bool = False
    woken: tuple[ProcessRow, ...] = ()


class Advance(Write[Advanced], frozen=True, gc=False):
    """Record what the owner of a process has done: records of its journal, events, and where it parks or how it ended.

    It parks only if nothing has happened since event `seen` and nothing it waits for is there already. `first`: its
    work begins now, in the store of the id `store`. `drop`: records of the journal before this one go; the last one
    here stays. `repeats`: the records only say that steps are attempted again which a dead worker had begun, which
    is no progress. Sent again because its reply was lost it is recognised by its records, whose ordinals only grow,
    or else by events after `seen`.
    """

    scope: ProcessScope
    at: int
    records: tuple[Node, ...] = ()
    events: tuple[Event, ...] = ()
    first: bool = False
    seen: int = 0
    park: tuple[WaitOn, ...] = ()
    outcome: ProcessOutcome | None = None
    drop: int | None = None
    blobs: tuple[str, ...] = ()
    repeats: bool = False
    store: str = ""


class EventAdded(Struct, frozen=True, gc=False):
    """It is event `sequence` of the process. `known`: it was there before, under the same key."""

    row: ProcessRow
    sequence: int
    known: bool = False
    woken: tuple[ProcessRow, ...] = ()


class SendSignal(Write[EventAdded], frozen=True, gc=False):
    """Send a signal. A process that waits for it has something to do again. `key` makes sending it twice harmless."""

    process_id: str
    name: str
    payload: Any
    key: str
    at: int


class ExternalOwner(Struct, frozen=True, gc=False, tag_field="authority", tag="external_owner", omit_defaults=True):
    """Reported by the owner of the work outside."""

    by: str = ""


class WorkflowKey(Struct, frozen=True, gc=False, tag_field="authority", tag="workflow_key"):
    """An engine elsewhere ran it, under this key of its own."""

    workflow_key: str


class ReconciledAbandon(
    Struct, frozen=True, gc=False, tag_field="authority", tag="reconciled_abandon", omit_defaults=True
):
    """A request to give it up was looked into, and granted."""

    by: str = ""


Authority: TypeAlias = ExternalOwner | WorkflowKey | ReconciledAbandon


class EndReceipt(Struct, frozen=True, gc=False):
    """`status`: "already_applied" when it had ended exactly so, "superseded" when it had ended otherwise."""

    status: Literal["committed", "already_applied", "superseded"]
    row: ProcessRow
    woken: tuple[ProcessRow, ...] = ()


class Complete(Write[EndReceipt], frozen=True, gc=False):
    """End a process that no worker owns, by an authority that its recovery contract admits."""

    process_id: str
    outcome: ProcessOutcome
    authority: Authority
    at: int


class AddEvent(Write[EventAdded], frozen=True, gc=False):
    """Add an event to a process that does not end it: an event that it declared, or one of ours."""

    process_id: str
    event: Event
    at: int


class Share(Write[int], frozen=True, gc=False):
    """Let a session see processes, or no longer. Returns how many."""

    session_id: str
    process_ids: tuple[str, ...]
    at: int
    remove: bool = False


class Transfer(Write[int], frozen=True, gc=False):
    """Move processes from one session to another: grants, ownership as a task, and wakes.

    All or none: refused when one of them is not visible to `source`, or is a live task whose name `target` has a live
    task of its own for. Of what `source` only sees, only the seeing moves. Returns how many.
    """

    source: str
    target: str
    process_ids: tuple[str, ...]
    at: int


class Deliver(Write[Accepted | None], frozen=True, gc=False):
    """Deliver wakes to a session: those of these numbers become one input, whose `body` was made from all of them.

    None: some of them are not pending any more, or not this session's. `turn`: the input opens a turn, and only if the
    session is idle (None when it is not); otherwise its next turn reads it. `stuck` says why that turn is set aside
    until a person looks.
    """

    session_id: str
    agent: str
    numbers: tuple[int, ...]
    body: bytes
    op: str
    at: int
    turn: bool = True
    worker: str | None = None
    blobs: tuple[str, ...] = ()
    stuck: str | None = None


class Dismiss(Write[tuple[WakeRow, ...]], frozen=True, gc=False):
    """Discard pending wakes with a reason, or, with none, bring discarded ones back."""

    numbers: tuple[int, ...]
    at: int
    reason: str | None = None


class Prune(Write[tuple[str, ...]], frozen=True, gc=False):
    """Forget processes that ended before `before`: a tombstone stays of each. Returns their ids, `limit` at a time.

    Events after `watermark`, if given, were not projected yet, and their processes stay.
    """

    before: int
    at: int
    statuses: tuple[str, ...] = ()
    limit: int = 500
    watermark: int | None = None


# ---------------------------------------------------------------------- of workers


class Beat(Write[bool], frozen=True, gc=False):
    """Register or renew a worker. False: the row was gone, because the worker was presumed dead."""

    worker: WorkerRow


class Retire(Write[None], frozen=True, gc=False):
    """A worker leaves, or is proven dead: its row goes and what it owned is free to claim.

    A dead one's row stays while there is something to claim from it, or, if it says which suspect its OS process ran,
    from another worker that died with it (`beside`).
    """

    worker_id: str
    dead: bool = False
    at: int = 0
    beside: tuple[str, ...] = ()


class Outlived(Write[bool], frozen=True, gc=False):
    """The suspect of a worker has lived for long enough to make room for the next one. False: it is not its suspect."""

    scope: int
    worker: str


# ---------------------------------------------------------------------- what is listed


class SessionFilter(Struct, frozen=True, gc=False, omit_defaults=True):
    """Which sessions to list, oldest change last."""

    agent: str | None = None
    state: str | None = None
    prefix: str = ""
    limit: int = 100
    before: int | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    """Keys with their values as JSON (`model.session.label`); a session has all of them."""
    since: int | None = None
    after: tuple[int, int] | None = None
    """The time of the last change and the number of the session that a page before this one ended with."""


class StoreFacts(Struct, frozen=True, gc=False):
    """What `doctor` shows of a store. `held` is why nothing in it is worked on, if so."""

    kind: str
    location: str
    schema: int
    sessions: int
    nodes: int
    blobs: int
    bytes: int
    checks: tuple[str, ...] = ()
    processes: int = 0
    shared: tuple[str, ...] = ()
    """Its files and folders that others than their owner may use."""
    wal_bytes: int = 0
    held: str | None = None
    unfolded_since: int = 0
    """Since when its WAL could not be folded whole, in milliseconds of wall time; 0 when it can be."""


class ProcessFilter(Struct, frozen=True, gc=False, omit_defaults=True):
    """Which processes to list, newest first. `status`: their state; `session_id`: those that it may see. Times are a
    half-open range."""

    status: tuple[str, ...] = ()
    kind: str | None = None
    name: str | None = None
    definition: str | None = None
    label: str | None = None
    session_id: str | None = None
    origin: str | None = None
    parent: str | None = None
    cause: str | None = None
    since: int | None = None
    until: int | None = None
    stuck: bool | None = None
    live: bool | None = None
    limit: int = 100
    before: int | None = None


class Change(Struct, frozen=True, gc=False):
    """A process that has changed, as it is now; `row` is None for one that is a tombstone."""

    cursor: int
    process_id: str
    row: ProcessRow | None
