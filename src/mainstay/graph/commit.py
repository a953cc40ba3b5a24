"""Deciding a commit: what the one write that ends a turn contains. Stores apply it; nothing else decides."""

from __future__ import annotations

from msgspec import Struct

from mainstay.graph.view import without_text
from mainstay.model.llm import Usage
from mainstay.model.outcome import Outcome
from mainstay.model.record import Closed, Replied, Slot
from mainstay.model.session import Node
from mainstay.model.tool import Cancelled
from mainstay.model.write import Commit, Scope


class Tail(Struct, frozen=True):
    """What of a turn is not written yet: bytes from ordinal `first` on, inputs they deliver, blobs they refer to."""

    first: int
    bodies: list[bytes]
    taken: tuple[int, ...] = ()
    blobs: tuple[str, ...] = ()


def close(outcome: Outcome, usage: Usage, reply: Replied | None, slot: Slot | None, at: int) -> Closed:
    """The turn's last record. A reply that was not recorded yet rides in it."""
    return Closed(without_text(outcome), usage, reply, at, slot)


def plan(scope: Scope, head: int, tail: Tail, closed: Closed) -> Commit:
    """The commit of an owned turn: its unwritten records, the last of which is `closed`, move the head to it."""
    nodes = tuple([Node(tail.first + i, body) for i, body in enumerate(tail.bodies)])
    return Commit(scope, nodes, head, closed.at, tail.taken, isinstance(closed.outcome, Cancelled), tail.blobs)
