"""What passes between a cell and its turn, by the records: what it asks for, and the answers that it gets, in order.

Live and on replay this is the same: a call that is recorded is compared with its record, and an answer that is recorded
is given in the order of the records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from perdure.graph.cells import Cell
from perdure.model.code import FINISH, CodeAnswer, CodeCall, Given, Raise, StopCell
from perdure.model.codec import decode, encode
from perdure.model.record import Ended
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown

AFTER_UNKNOWN = Failed(
    "refused_after_unknown",
    "not called: how an earlier call of this cell ended is unknown, and this tool must not be repeated. "
    "Check what was done, in a new cell",
)


class CellDiverged(Exception):
    """A cell that runs again does not ask for what is recorded: the message shows both."""


class Dialogue:
    """What a cell asks and is answered, by its records, which a run that is live adds to.

    `fed` are the numbers of the calls whose answer it has got. `unknown`: it was told that the end of a call is.
    `sync` is the number of a call at whose line it stands: that is answered before others. The first `_given` answers
    are fed: a cell may have thousands.
    """

    def __init__(self, cell: Cell, fed: Collection[int] = ()) -> None:
        self.cell = cell
        self.fed = set(fed)
        told = [each.outcome for each in cell.answers if _number(each) in self.fed] if fed else []
        self.unknown = any(type(outcome) is OutcomeUnknown for outcome in told)
        self.sync: int | None = None
        self._given = 0

    def asked(self, calls: Iterable[CodeCall]) -> list[CodeCall]:
        """Those of the calls that are not recorded. Raises Diverged where one is recorded as another."""
        recorded, new = self.cell.calls, list[CodeCall]()
        for call in calls:
            if call.sync:
                self.sync = call.number
            if call.number >= len(recorded):
                new.append(call)
                continue
            before = recorded[call.number]
            if (before.name, before.args) != (call.name, decode(encode(call.args))):
                raise CellDiverged(
                    f"Line {call.line} calls {_words(call.name, call.args)}, and call {call.number} of this cell "
                    f"is recorded as {_words(before.name, before.args)}."
                )
        return new

    def next_answer(self) -> Ended | None:
        """The next answer in the order of the records, if it is there."""
        answers = self.cell.answers
        while self._given < len(answers) and _number(answers[self._given]) in self.fed:
            self._given += 1
        for index in range(self._given, len(answers)):
            number = _number(answers[index])
            if number == self.sync if self.sync is not None else number not in self.fed:
                return answers[index]
        return None

    def answer(self, ended: Ended) -> CodeAnswer:
        """An outcome as the cell sees it, the same from memory as from disk."""
        number, outcome = _number(ended), ended.outcome
        self.fed.add(number)
        name, self.sync = self.cell.calls[number].name, None if self.sync == number else self.sync
        match outcome:
            case Ok() if name == FINISH:
                return StopCell(number)
            case Ok(value=value):
                return Given(number, ended.withheld or decode(encode(value)))
            case Failed(message=message) if name == FINISH:
                return Raise(number, "invalid", message)
            case Failed(code=code, message=message):
                return Raise(number, "refused" if code == AFTER_UNKNOWN.code else "failed", f"{code}: {message}")
            case Denied(reason=reason):
                return Raise(number, "denied", reason or "the call was not approved")
            case Cancelled(reason=reason):
                return Raise(number, "failed", f"cancelled: {reason}")
            case OutcomeUnknown(reason=reason):
                self.unknown = True
                return Raise(number, "unknown", f"{name}: {reason}; it may or may not have taken effect")


def _number(ended: Ended) -> int:
    return int(ended.call.rpartition(".")[2])


def _words(name: str, args: dict[str, Any]) -> str:
    return f"{name}({encode(args).decode()})"
