"""What a session looks like: its messages, how each turn ended, and how sessions share history.

A fork's past is a stretch of its source's, which may itself be a fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from perdure.model.llm import Attempt, ModelRecord, Stop, Usage
from perdure.model.message import Message
from perdure.model.outcome import Finished, Incomplete, Outcome, ProviderFailed, Waiting
from perdure.model.plugin import PluginSnapshot
from perdure.model.record import (
    Called,
    Closed,
    Completed,
    Ended,
    Faltered,
    Framed,
    Joined,
    Record,
    Reopened,
    Replied,
    Said,
    Slot,
    Started,
    slots,
)
from perdure.model.session import SessionRow
from perdure.model.tool import Cancelled, ToolRecord
from perdure.model.transcript import NEVER_RAN, Transcript, calls_in


class View(Struct):
    """Committed history up to turn `head`.

    Prompts show `summary` in place of what is before `frame` in `messages`. `snapshots` are the newest ones of every
    plugin that ever made one. The list only grows, and readers take slices: a long session is never copied to be
    continued.
    """

    head: int = 0
    messages: list[Message] = field(default_factory=list)
    frame: int = 0
    summary: tuple[Message, ...] = ()
    snapshots: dict[str, PluginSnapshot] = field(default_factory=dict)

    def extend(self, number: int, records: Sequence[Record], prelude: tuple[Message, ...] = ()) -> None:
        """Take in one committed turn, or as much of it as a fork has; `prelude` stands before it."""
        self.messages.extend(prelude)
        add, begin = Transcript(self.messages).add, len(self.messages)
        for record in records:
            add(record)
        self._note(records, begin)
        self.head = number

    def reach(self, number: int) -> None:
        """What was taken in goes up to this turn of the session, also where others after the last one ended in it."""
        self.head = number

    def add(self, number: int, messages: Iterable[Message], records: Sequence[Record] = ()) -> None:
        """Take in a turn that was just committed here; `records` where plugins took part in it."""
        begin = len(self.messages)
        self.messages.extend(messages)
        if records:
            self._note(records, begin)
        self.head = number

    def _note(self, records: Iterable[Record], begin: int) -> None:
        """What records tell besides messages: a frame, states of plugins."""
        for record in records:
            if type(record) is Framed:
                self.frame, self.summary = begin, record.summary
            if type(record) is Closed and record.reply is not None and record.reply.slot is not None:
                self._keep(record.reply.slot)
            if (slot := getattr(record, "slot", None)) is not None:
                self._keep(slot)

    def _keep(self, slot: Slot) -> None:
        if slot.snapshots:
            self.snapshots.update(slot.snapshots)

    def prompt(self) -> list[Message]:
        """What a model is shown of the past: the newest frame."""
        return [*self.summary, *self.messages[self.frame :]] if self.summary or self.frame else self.messages


class TurnReader(Protocol):
    """What takes in the committed turns of a session, one after the other, as a `View` does."""

    @property
    def head(self) -> int: ...

    def extend(self, number: int, records: Sequence[Record], prelude: tuple[Message, ...] = ()) -> None: ...

    def reach(self, number: int) -> None: ...


class TurnView(Struct, frozen=True):
    """A turn as a result reads it."""

    outcome: Outcome
    usage: Usage
    messages: list[Message]
    tool_calls: list[ToolRecord]


def model_calls(records: Iterable[Record]) -> list[ModelRecord]:
    """Every model call that a turn's records tell of, with its attempts, in the order in which they ended."""
    calls: list[ModelRecord] = []
    failed: list[Attempt] = []
    step = 1
    for record in records:
        reply = record.reply if isinstance(record, Closed) else record
        if isinstance(reply, Faltered) and not reply.call:
            step, delay = reply.step, max(reply.due - reply.at, 0)
            failed.append(Attempt(reply.attempt, reply.model, reply.at, reply.code, reply.message, delay))
        elif isinstance(reply, Replied):
            answered = Attempt(reply.attempt, reply.model, reply.at)
            calls.append(ModelRecord(reply.step, (*failed, answered), reply.usage, reply.stop, reply.interrupted))
            failed, step = [], reply.step + 1
        elif isinstance(reply, Completed):
            asked = Attempt(1, reply.model, reply.at, reply.error)
            stop: Stop | None = None if reply.error else "end"
            calls.append(ModelRecord(0, (asked,), reply.usage, stop, reply.interrupted, reply.label))
        if isinstance(record, Closed) and isinstance(end := record.outcome, ProviderFailed):
            failed.append(Attempt(end.attempts, end.model, record.at, end.code, end.message))
        if isinstance(record, Reopened) and failed:
            calls.append(ModelRecord(step, tuple(failed)))
            failed = []
    return [*calls, *([ModelRecord(step, tuple(failed))] if failed else [])]


def turn_view(turn_id: str, records: Iterable[Record]) -> TurnView:
    """Read a turn that is committed, or that waits: then calls without an outcome are not shown as ended."""
    transcript, usage, outcome = Transcript(), Usage(), None
    calls: dict[str, ToolRecord] = {}
    ended: set[str] = set()
    for record in records:
        transcript.add(record)
        if isinstance(record, Closed):
            usage, outcome = usage + record.usage, record.outcome
            calls |= _asked(turn_id, record)
        elif isinstance(record, Replied | Called):
            calls |= _asked(turn_id, record)
        elif isinstance(record, Started):
            calls[record.call] = replace(calls[record.call], args=record.args, shown=record.shown)
        elif isinstance(record, Faltered) and record.call and record.attempt:
            ran = Cancelled("runtime", "the turn ended before the next attempt")
            calls[record.call] = replace(calls[record.call], outcome=ran, attempts=record.attempt)
        elif isinstance(record, Ended) and record.call in calls:  # else it is the end of a cell
            ended.add(record.call)
            calls[record.call] = replace(
                calls[record.call],
                outcome=record.outcome,
                attempts=record.attempts,
                repeated=record.repeated,
                duration_ms=record.ms,
                artifacts=record.artifacts,
            )
    assert outcome is not None, "a committed turn has an outcome"
    order = sorted(calls, key=lambda key: [int(number) for number in key.split(".")])  # calls of a call stand behind it
    shown = [calls[key] for key in order if key in ended or not isinstance(outcome, Waiting)]
    return TurnView(with_text(outcome, transcript.messages), usage, transcript.messages, shown)


def with_text(outcome: Outcome, messages: list[Message]) -> Outcome:
    """Give a stored outcome back the text that stands in the last reply."""
    if isinstance(outcome, Finished | Incomplete) and not outcome.text:
        last = next((m for m in reversed(messages) if m.role == "assistant"), None)
        return replace(outcome, text=last.text if last else "")
    return outcome


def _asked(turn_id: str, record: Record) -> dict[str, ToolRecord]:
    return {
        key: ToolRecord(f"{turn_id}.{key}", call.name, call.args, NEVER_RAN, attempts=0)
        for key, call in calls_in(record).items()
    }


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
        """Its end; None while it is open, for the first time or again."""
        last = self.records[-1] if self.records else None
        return last if isinstance(last, Closed) else None

    @property
    def last_end(self) -> Closed | None:
        """Its newest end, also if it was continued since: a fork of the turn reads up to this end."""
        return next((each for each in reversed(self.records) if isinstance(each, Closed)), None)

    @property
    def usage(self) -> Usage:
        """Return the usage of its model calls, up to its newest end."""
        return sum((each.usage for each in self.records if isinstance(each, Closed)), Usage())


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
    if transcript.cell is not None:
        return "the cell before it has not ended: choose a later node"
    return None
