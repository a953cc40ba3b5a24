"""The cells of a session, read from its records: what ran, what it asked for, and what it was answered, in order.

Answers are the truth about a session's variables. Running its cells again from the first, each against what is recorded
here, makes the same variables anywhere. A cell whose variables were rolled back left none, and one without an end was
dropped with its turn: both are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from perdure.model.code import FINISH, SLEEP
from perdure.model.message import Message, ToolCall
from perdure.model.record import Called, Closed, Ended, Record, Replied
from perdure.model.tool import Failed, Ok, OutcomeUnknown
from perdure.model.transcript import calls_in

ROLLED_BACK, FRESH = "rolled_back", "fresh"
"""Marks in the record of a cell's end: it left no variables; it began without those of the cells before it."""


class Cell(Struct):
    """One cell: `calls` as it asked for them, `answers` in the order in which they were recorded.

    `sid` and `turn` say whose it is: a fork has cells of the session that it was forked from. `key` is what the keys of
    its calls begin with: the step of the reply that it is, or the call of `run_code`.
    """

    turn: int
    key: str
    code: str
    at: int
    calls: list[ToolCall] = field(default_factory=list)
    answers: list[Ended] = field(default_factory=list)
    end: Ended | None = None
    sid: int = 0

    @property
    def seed(self) -> str:
        """What random numbers in it are made from: the same wherever it is run again, in a fork too."""
        return f"{self.at}.{self.key}"

    def mark(self, name: str) -> Any:
        outcome = None if self.end is None else self.end.outcome
        told = outcome.value if isinstance(outcome, Ok) else outcome.data if isinstance(outcome, Failed) else None
        return told.get(name) if isinstance(told, dict) else None


def done_by(cell: Cell) -> str:
    """What a cell that left no variables has done all the same, in words: a model that is told only that it failed
    writes it again, and everything is done twice."""
    ended = {each.call: type(each.outcome) for each in cell.answers}
    made = [(call.name, ended.get(f"{cell.key}.{number}")) for number, call in enumerate(cell.calls)]
    words = ""
    for outcome, said in (
        (Ok, "What it had called before stays done"),
        (OutcomeUnknown, "Whether these were done is unknown"),
    ):
        times = Counter([name for name, how in made if how is outcome and name not in (FINISH, SLEEP)])
        if times:
            words += f"\n{said}: {', '.join([f'{name}() {count}x' for name, count in times.items()])}."
    return words


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
    newest: dict[str, Cell] = {}
    for record in records:
        reply = record.reply if type(record) is Closed else record
        if type(reply) is Replied:
            newest = {key: Cell(turn, key, code, reply.at) for key, code in _written(reply)}
        if type(record) is Called:
            cell = newest.get(record.key)
            if cell is not None:
                cell.calls += calls_in(record).values()
        elif type(record) is Ended:
            cell = newest.get(record.call)
            if cell is not None:
                cell.end = record
            elif (cell := newest.get(record.call.rpartition(".")[0])) is not None:
                cell.answers.append(record)
        else:
            continue
        if cell is not None and (not found or found[-1] is not cell):
            found.append(cell)
    return found


def _written(reply: Replied) -> Iterator[tuple[str, str]]:
    """The cells of a reply by their keys, with their code."""
    if (code := reply.code) is not None:
        yield str(reply.step), code
    calls = list(calls_in(reply).items())
    for index in reply.cells:
        key, call = calls[index]
        yield key, call.args["code"]
