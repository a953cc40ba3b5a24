"""Writes about processes: each is applied in one transaction and answered with its receipt, as those of sessions."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from mainstay.model.process import (
    Event,
    ProcessOutcome,
    ProcessRow,
    Registration,
    WaitOn,
    WakeRow,
)
from mainstay.model.session import Node
from mainstay.model.write import Accepted, ProcessScope, Write


class Registered(Struct, frozen=True, gc=False):
    """`known`: the same was registered before, and this is that."""

    row: ProcessRow
    known: bool = False


class Register(Write[Registered], frozen=True, gc=False):
    """Begin a process, and claim it for `worker` if given. The sessions of `grants` may see it."""

    registration: Registration
    at: int
    worker: str | None = None
    grants: tuple[str, ...] = ()
    blobs: tuple[str, ...] = ()


class Advanced(Struct, frozen=True, gc=False):
    """The process after it. `parked`: it waits on disk now. `woken`: processes that have something to do because of it,
    or have ended with it.

    A row whose sequence is beyond what its owner has `seen` holds news: a signal, a cancel request.
    """

    row: ProcessRow
    parked: bool = False
    woken: tuple[ProcessRow, ...] = ()


class Advance(Write[Advanced], frozen=True, gc=False):
    """What the owner of a process has to say: records of its journal, events, and then where it parks or how it ended.

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
    """Send a signal. A process that waits for it has something to do again. `key` makes telling it twice harmless."""

    process_id: str
    name: str
    payload: Any
    key: str
    at: int


class ExternalOwner(Struct, frozen=True, gc=False, tag_field="authority", tag="external_owner", omit_defaults=True):
    """Whoever does the work outside says how it ended."""

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


class Ending(Struct, frozen=True, gc=False):
    """`status`: "already_applied" when it had ended exactly so, "superseded" when it had ended otherwise."""

    status: Literal["committed", "already_applied", "superseded"]
    row: ProcessRow
    woken: tuple[ProcessRow, ...] = ()


class Complete(Write[Ending], frozen=True, gc=False):
    """End a process that no worker owns, by an authority that its recovery contract admits."""

    process_id: str
    outcome: ProcessOutcome
    authority: Authority
    at: int


class AddEvent(Write[EventAdded], frozen=True, gc=False):
    """Write down something about a process that ends nothing: an event that it declared, or one of ours."""

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
    """Hand processes on from one session to another: who sees them, whose own they are, who hears of them.

    All or none: refused when one of them is not visible to `source`, or is a live task whose name `target` has a live
    task of its own for. Of what `source` only sees, only the seeing moves. Returns how many.
    """

    source: str
    target: str
    process_ids: tuple[str, ...]
    at: int


class Deliver(Write[Accepted | None], frozen=True, gc=False):
    """Tell a session what waits for it: its wakes of these numbers become one input, whose `body` tells of all.

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
