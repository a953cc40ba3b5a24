"""The cells of a session, read from its records: what ran, what it asked for, and what it was answered, in order.

Answers are the truth about a session's variables. Running its cells again from the first, each against what is recorded
here, makes the same variables anywhere. A cell whose variables were rolled back left none, and one without an end was
dropped with its turn: both are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, field

from mainstay.model.message import Message, ToolCall
from mainstay.model.record import Called, Closed, Ended, Record, Replied
from mainstay.model.tool import Failed, Ok
from mainstay.model.transcript import calls_in

ROLLED_BACK, FRESH = "rolled_back", "fresh"
"""Marks in the record of a cell's end: it left no variables; it began without those of the cells before it."""


class Cell(Struct):
    """One cell: `calls` as it asked for them, `answers` in the order in which they were recorded.

    `sid` and `turn` say whose it is: a fork has cells of the session that it was forked from.
    """

    turn: int
    step: int
    code: str
    at: int
    calls: list[ToolCall] = field(default_factory=list)
    answers: list[Ended] = field(default_factory=list)
    end: Ended | None = None
    sid: int = 0

    @property
    def key(self) -> str:
        """What the keys of its calls begin with."""
        return str(self.step)

    @property
    def seed(self) -> str:
        """What random numbers in it are made from: the same wherever it is run again, in a fork too."""
        return f"{self.at}.{self.step}"

    def mark(self, name: str) -> Any:
        outcome = None if self.end is None else self.end.outcome
        told = outcome.value if isinstance(outcome, Ok) else outcome.data if isinstance(outcome, Failed) else None
        return told.get(name) if isinstance(told, dict) else None


class PastCells:
    """Takes in turns of a session in order, as a `View` does, and keeps their cells."""

    def __init__(self, sid: int) -> None:
        self._sid = sid
        self.head = 0
        self.cells: list[Cell] = []

    def reach(self, number: int) -> None:
        self.head = number

    def extend(self, number: int, records: Sequence[Record], prelude: tuple[Message, ...] = ()) -> None:
        for cell in cells_of(number, records):
            cell.sid = self._sid
            self.cells.append(cell)
        self.head = number


def effective(cells: Iterable[Cell]) -> list[Cell]:
    """The cells that the variables after them come from."""
    found: list[Cell] = []
    for cell in cells:
        if cell.end is None or cell.mark(ROLLED_BACK):
            continue
        if cell.mark(FRESH) is not None:
            found.clear()
        found.append(cell)
    return found


def cells_of(turn: int, records: Iterable[Record]) -> list[Cell]:
    """The cells of a turn that have called something or have ended; the last may go on."""
    found: list[Cell] = []
    newest: Cell | None = None
    for record in records:
        reply = record.reply if type(record) is Closed else record
        if type(reply) is Replied:
            code = reply.code
            newest = None if code is None else Cell(turn, reply.step, code, reply.at)
        if newest is None:
            continue
        if type(record) is Called and record.step == newest.step:
            newest.calls += calls_in(record).values()
        elif type(record) is Ended and record.call.partition(".")[0] == str(newest.step):
            if "." in record.call:
                newest.answers.append(record)
            else:
                newest.end = record
        else:
            continue
        if not found or found[-1] is not newest:
            found.append(newest)
    return found
