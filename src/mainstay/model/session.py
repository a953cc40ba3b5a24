"""What a store keeps of a session besides its nodes: the head, who owns it, what waits."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from mainstay.model.message import Message
from mainstay.model.record import InputKind

SessionState: TypeAlias = Literal["idle", "open", "parked", "stuck"]
WaitState: TypeAlias = Literal["open", "resolved", "expired", "cancelled", "revoked"]


class Fork(Struct, frozen=True, gc=False):
    """Where a session's history begins in another one: all before `turn`, and that turn up to record `ordinal`."""

    sid: int
    turn: int
    ordinal: int


class SessionRow(Struct, frozen=True, gc=False):
    """One session. `sid` is the store's own number for it, the prefix of its nodes.

    `turn` is the open turn, if any; `head` the last committed one; `next` the ordinal of the next input. A state of
    `parked` waits for an answer, `stuck` for a person: `reason` says why. `settings` is what was decided for it
    besides its history (`model.settings`).
    """

    sid: int
    id: str
    agent: str
    head: int = 0
    next: int = 1
    turn: int | None = None
    state: SessionState = "idle"
    owner: str | None = None
    generation: int = 0
    takeovers: int = 0
    cancel: bytes | None = None
    reason: str | None = None
    fork: Fork | None = None
    created: int = 0
    updated: int = 0
    deleted: bool = False
    settings: bytes = b""


class InboxRow(Struct, frozen=True, gc=False):
    """An accepted input that waits for its turn, or for a boundary of the running one."""

    sid: int
    input: int
    kind: InputKind
    cancel: bytes | None = None


class WaitRow(Struct, frozen=True, gc=False):
    """A durable one-shot promise of a turn. `body` tells a person what is asked, `answer` how it was resolved.

    Either may stand for a blob (`Spilled`), which is kept until the turn is committed.
    """

    id: str
    sid: int
    turn: int
    call: str
    kind: str
    state: WaitState = "open"
    due: int | None = None
    body: bytes = b"{}"
    answer: bytes | None = None


class Offers(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a worker takes up by itself: turns of these agents, processes of these definitions of durable functions, and
    forgetting what is too old."""

    agents: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    retention: bool = False


class WorkerRow(Struct, frozen=True, gc=False):
    """A live Runtime as others see it. `beat` grows with every renewal; wall clocks are never compared.

    `offers` is None for a worker of an older version, which may have any agent. `process` names its OS process, which
    several workers may share; `lived` is how many milliseconds it had lived at its last beat, on its own monotonic
    clock. `suspect` is the scope (`Deaths`) that it runs as its suspect.
    """

    id: str
    host: str
    boot: str
    pid: int
    started: int
    beat: int = 0
    term_ms: int = 30_000
    offers: Offers | None = None
    process: str = ""
    lived: int = 0
    suspect: int | None = None


class Death(Struct, frozen=True, gc=False):
    """The death of a worker as its successor knows it: how long it had lived, and the suspect of its OS process."""

    worker: str
    lived: int = 0
    suspect: int | None = None


class Deaths(Struct, frozen=True, gc=False):
    """What a scope (a session's number, or the negative of a process's) lived through since its last record.

    `counted` deaths of its owners may be its fault, `alone` of them those in which it was the only suspect; `life` is
    the longest of its lives that ended so, in milliseconds. `worker` has it since then, on that worker's clock.
    """

    scope: int
    counted: int = 0
    alone: int = 0
    life: int = 0
    worker: str = ""
    since: int = 0


class Node(Struct, frozen=True, gc=False):
    """A record's place in its turn, and its bytes."""

    ordinal: int
    body: bytes


class CancelRequest(Struct, frozen=True, gc=False, omit_defaults=True):
    """Who asked a turn to stop, and why: the evidence that its commit carries."""

    by: str
    reason: str = ""
    request: str = ""


class Answer(Struct, frozen=True, gc=False, omit_defaults=True):
    """How a wait was resolved: an approval, a denial, a settlement or a deferred value."""

    verdict: Literal["approved", "rejected", "rerun", "done", "failed", "value", "error"]
    value: Any = None
    reason: str = ""
    by: str = ""


class ToolState(Struct, frozen=True, gc=False, omit_defaults=True):
    """What was decided for single tools of a session: a member, or not. `generation` counts the edits."""

    generation: int = 0
    members: dict[str, bool] = {}


class SessionSnapshot(Struct, frozen=True, gc=False, omit_defaults=True):
    """What is committed of a session, for those who may read it. `turn` is the one that is open, if any.

    `label` is what a child session was created for.
    """

    session_id: str
    agent: str
    head: int
    messages: tuple[Message, ...]
    turn: int | None = None
    parent: str | None = None
    tools: ToolState = ToolState()
    label: str = ""


class Appending(Struct, frozen=True, gc=False, tag_field="status", tag="appended"):
    """The messages are accepted: they are part of the history with the next commit."""

    node_ids: tuple[str, ...]
    leaf_node_id: str


class StaleBranch(Struct, frozen=True, gc=False, tag_field="status", tag="stale_branch", omit_defaults=True):
    """The node that had to be part of the history is not: nothing was added."""

    current_leaf_node_id: str | None = None
