"""Deciding a commit: what the one write that ends a turn contains. Stores apply it; nothing else decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from perdure.model.llm import Usage
from perdure.model.message import Message
from perdure.model.outcome import Finished, Incomplete, Outcome
from perdure.model.record import Asking, Closed, Completed, Record, Replied, Slot
from perdure.model.session import Node
from perdure.model.spending import UsageRow
from perdure.model.tool import Cancelled
from perdure.model.write import Commit, TurnScope


class Tail(Struct, frozen=True):
    """What of a turn is not written yet: bytes from ordinal `first` on, inputs they deliver, blobs they refer to.

    `over`: no ordinal is left, and the last record that is written gives its place to the only one here.
    """

    first: int
    bodies: list[bytes]
    taken: tuple[int, ...] = ()
    blobs: tuple[str, ...] = ()
    over: bool = False


class End(Struct, frozen=True, gc=False):
    """How a turn ends: its outcome, what it cost, and what was gathered last.

    `ledger` is what was asked of models beside the turn, by label; `tools` what was decided for single tools;
    `recorded` the newest revisions of plugins in its records; `prelude` what a session began with, at its first turn.
    `children`: it may have started processes that end with it. `costs` is what it adds to what its session has spent.
    """

    outcome: Outcome
    usage: Usage
    slot: Slot | None = None
    ledger: dict[str, Usage] | None = None
    tools: dict[str, bool | None] | None = None
    recorded: dict[str, int] | None = None
    prelude: tuple[Message, ...] = ()
    children: bool = False
    costs: tuple[UsageRow, ...] = ()


def ledger(records: Iterable[Record]) -> dict[str, Usage] | None:
    """What was asked of models beside a turn, by label."""
    found: dict[str, Usage] = {}
    for label, _, usage in completions(records):
        found[label] = found.get(label, Usage()) + usage
    return found or None


def completions(records: Iterable[Record]) -> Iterator[tuple[str, str, Usage]]:
    """What each direct completion of a turn has cost: its label, the model that answered, and the usage.

    One that was cut off is unknown, whether or not it was asked again.
    """
    cut_off: dict[str, str] = {}
    for record in records:
        if type(record) is Asking:
            cut_off[record.key] = record.label
        elif type(record) is Completed:
            cut_off.pop(record.key, None)
            seen = record.usage or Usage(unknown=1)
            calls = 0 if record.error else 1
            yield record.label, record.model, replace(seen, calls=calls, unknown=seen.unknown + record.interrupted)
    for label in cut_off.values():
        yield label, "", Usage(unknown=1)


def close(end: End, reply: Replied | None, at: int) -> Closed:
    """The turn's last record. A reply that was not recorded yet rides in it."""
    outcome = end.outcome
    if isinstance(outcome, Finished | Incomplete):
        outcome = replace(outcome, text="")  # it is in the reply beside it: `view.with_text` gives it back
    return Closed(outcome, end.usage, reply, at, end.slot, end.ledger, end.prelude)


def plan(scope: TurnScope, head: int, tail: Tail, closed: Closed, end: End | None = None) -> Commit:
    """The commit of an owned turn: its unwritten records, the last of which is `closed`, move the head to it."""
    nodes = tuple([Node(tail.first + i, body) for i, body in enumerate(tail.bodies)])
    cancelled = isinstance(closed.outcome, Cancelled)
    end = end or End(closed.outcome, closed.usage)
    return Commit(
        scope, nodes, head, closed.at, tail.taken, cancelled, tail.blobs, end.tools, end.recorded, end.children,
        tail.over, costs=end.costs,
    )  # fmt: skip
