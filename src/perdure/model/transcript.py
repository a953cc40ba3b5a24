"""How records read as messages. One fold serves the running turn and the committed history, so they cannot differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from perdure.model.message import Message, Part, ResultStatus, Text, ToolCall, ToolResult
from perdure.model.outcome import Outcome, Waiting
from perdure.model.record import Called, Closed, Ended, Record, Replied, Said, Slot
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown, ToolOutcome

STATUS: dict[type, ResultStatus] = {
    Ok: "ok",
    Failed: "failed",
    Denied: "denied",
    Cancelled: "cancelled",
    OutcomeUnknown: "outcome_unknown",
}


TOLD = 4096
"""Characters of an explanation that a model is told: within the output budget whatever they are."""

NEVER_RAN = Cancelled("runtime", "the turn ended before the call ran")


class Transcript(Struct):
    """Messages so far, and the calls of the newest reply with the outcomes that have arrived.

    Results stand in emission order: they join the messages when the last of them is there. Of a cell, its output is
    shown when it has ended, and not what it called; `cell` is the step of one that has called something and goes on.
    """

    messages: list[Message] = field(default_factory=list)
    calls: dict[str, ToolCall] = field(default_factory=dict)
    ended: dict[str, ToolOutcome] = field(default_factory=dict)
    cell: int | None = None

    def add(self, record: Record) -> None:
        if type(record) is Said:
            self.messages.append(record.message)
            return
        if type(record) is Closed:
            # What the turn gathered last came after the reply that rides here.
            if record.reply is not None:
                self.add(record.reply)
            if self.calls and not isinstance(record.outcome, Waiting):
                self.pair(record.outcome)
        slot: Slot | None = getattr(record, "slot", None)
        if slot is not None:
            self.messages.extend([d.message for d in slot.delivered])
            self.messages.extend(slot.messages)
        if type(record) is Replied:
            parts = [part for part in record.parts if type(part) is not Text or part.text]
            if any(type(part) is not Text or not part.text.isspace() for part in parts):
                # An answer that says nothing is no message: models refuse a conversation that has one.
                self.messages.append(Message("assistant", tuple(parts)))
            self.calls, self.ended = calls_of(record.parts, record.step), {}
        elif type(record) is Called:
            self.cell = None if record.cell else record.step  # else the call is open, and says as much
        elif type(record) is Ended and record.call not in self.calls:
            if "." not in record.call:
                self._show_cell(record.outcome)
        elif type(record) is Ended:
            self.ended[record.call] = Ok(record.withheld) if record.withheld else record.outcome
            if len(self.ended) == len(self.calls):
                self.pair(None)

    def pair(self, end: Outcome | None) -> None:
        """Give every call its result: a history with an unanswered call could not be continued."""
        never = end if isinstance(end, Cancelled) else NEVER_RAN
        for key, call in self.calls.items():
            outcome = self.ended.get(key, never)
            content, files = (outcome.value, outcome.files) if isinstance(outcome, Ok) else (shown_outcome(outcome), ())
            result = ToolResult(call.id, call.name, content, STATUS[type(outcome)], files)
            self.messages.append(Message("tool", (result,)))
        self.calls, self.ended = {}, {}

    def _show_cell(self, outcome: ToolOutcome) -> None:
        """What a model is shown of a cell that has ended, and after it the answer that it finished with, if it did."""
        self.cell = None
        self.messages.append(Message("user", (Text(cell_text(outcome)),)))
        told = outcome.value if isinstance(outcome, Ok) else None
        if isinstance(told, dict) and isinstance(answer := told.get("answer"), str):
            self.messages.append(Message("assistant", (Text(answer or "(finished)"),)))


def cell_text(outcome: ToolOutcome) -> str:
    """The end of a cell in words: what it printed and its last value, and why it ended if not at its last line."""
    told: Any = outcome.value if isinstance(outcome, Ok) else getattr(outcome, "data", None)
    output = str(told.get("output", "")) if isinstance(told, dict) else ""
    lines = [f"Output of the cell:\n{output}" if output else "The cell printed nothing."]
    if isinstance(outcome, Failed):
        lines.append(_short(outcome.message))
    return "\n\n".join(lines)


def calls_of(parts: Sequence[Part], key: int | str, first: int = 0) -> dict[str, ToolCall]:
    """The calls of a reply by their keys, in emission order: `key` is the step, or the cell whose calls they are, from
    number `first` on."""
    found = [p for p in parts if type(p) is ToolCall]
    return {f"{key}.{index}": call for index, call in enumerate(found, first)} if found else {}


def calls_in(record: Record) -> dict[str, ToolCall]:
    """The calls that a record is the first to tell of, by their key."""
    if type(record) is Called:
        return calls_of(record.calls, record.key, record.first)
    reply = record.reply if type(record) is Closed else record
    return calls_of(reply.parts, reply.step) if type(reply) is Replied else {}


def shown_outcome(outcome: ToolOutcome) -> object:
    """An outcome for the model: the value where the tool returned one, an explanation where not."""
    if isinstance(outcome, Ok):
        return outcome.value
    match outcome:
        case Failed(code=code, message=message):
            return {"error": code, "message": _short(message)}
        case Denied(reason=reason):
            return {"error": "denied", "message": _short(reason) or "the call was not approved"}
        case Cancelled(reason=reason):
            return {"error": "cancelled", "message": _short(reason) or "the call was cancelled"}
        case _:
            return {
                "error": "outcome_unknown",
                "message": f"{_short(outcome.reason)}: the call may or may not have taken effect and was not repeated; "
                "check before you call it again",
            }


def _short(text: str) -> str:
    """Words for the model: an exception may hold megabytes. The record keeps all of them."""
    if len(text) <= TOLD:
        return text
    half, dropped = TOLD // 2, len(text) - TOLD
    return f"{text[:half]}\n[… {dropped:,} characters dropped; the record has them all …]\n{text[-half:]}"
