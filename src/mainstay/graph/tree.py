"""How sessions share history. A fork's past is a stretch of its source's, which may itself be a fork."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from mainstay.model.record import Closed, Joined, Record, Said, slots
from mainstay.model.session import SessionRow
from mainstay.model.transcript import Transcript


class Stretch(Struct, frozen=True):
    """Turns 1 to `last` of a session's own nodes; of the last one only up to record `ordinal`, if given."""

    sid: int
    last: int
    ordinal: int | None = None


def stretches(lineage: Sequence[SessionRow]) -> list[Stretch]:
    """The stretches of history of `lineage[0]`, oldest first. `lineage` goes from a session to its sources."""
    found = [Stretch(lineage[0].sid, lineage[0].head)]
    for child in lineage:
        if child.fork is not None:
            found.append(Stretch(child.fork.sid, child.fork.turn, child.fork.ordinal))
    return found[::-1]


class Turn(Struct):
    """The records of one turn, in order."""

    number: int
    records: list[Record]

    @property
    def joined(self) -> int | None:
        """The turn this input was delivered into, when it did not open one itself."""
        second = self.records[1] if len(self.records) > 1 else None
        return second.turn if isinstance(second, Joined) else None

    @property
    def said(self) -> Said | None:
        first = self.records[0] if self.records else None
        return first if isinstance(first, Said) else None

    @property
    def closed(self) -> Closed | None:
        last = self.records[-1] if self.records else None
        return last if isinstance(last, Closed) else None


def delivered_by(turn: Turn, number: int) -> int | None:
    """The ordinal of the record that tells of an input which was said into this turn."""
    for ordinal, record in enumerate(turn.records):
        if any(each.input == number for slot in slots([record]) for each in slot.delivered):
            return ordinal
    return None


def forkable(turn: Turn, ordinal: int) -> str | None:
    """Why history cannot branch after this record, or None: every call before it must have its result."""
    if turn.joined is not None:
        return f"input {turn.number} was delivered into turn {turn.joined}: fork there"
    if turn.closed is None:
        return "its turn is not committed"
    if not 0 <= ordinal < len(turn.records):
        return f"its turn has records 0 to {len(turn.records) - 1}"
    transcript = Transcript()
    for record in turn.records[: ordinal + 1]:
        transcript.add(record)
    if transcript.calls:
        return "tool calls before it have no result yet: choose a later node"
    return None
