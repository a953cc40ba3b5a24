"""JSON of turns, calls and processes, for models, hosts and the command line.

Every field is always present, so that programs need not know defaults. The functions only read structs: nothing here
imports the engine, so that a server and a client can use this module, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from perdure.errors import InvalidHandle
from perdure.model.llm import ModelRecord, Usage
from perdure.model.message import Message, Part
from perdure.model.outcome import Finished, Outcome, PendingCall, Waiting
from perdure.model.process import ProcessEvent, ProcessRow
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown, ToolOutcome, ToolRecord

# ---------------------------------------------------------------------- turns and calls


def outcome_json(outcome: Outcome | ToolOutcome) -> dict[str, Any]:
    """Return an outcome as `{"kind": "finished", …}`, with all its fields."""
    fields = {name: msgspec.to_builtins(getattr(outcome, name)) for name in outcome.__struct_fields__}
    if "calls" in fields:
        fields["calls"] = [pending_json(c) for c in getattr(outcome, "calls", ())]
    kind = outcome_kind(outcome)
    return {"kind": kind, **fields}


def outcome_kind(outcome: Outcome | ToolOutcome) -> str:
    tag = type(outcome).__struct_config__.tag
    return tag if isinstance(tag, str) else ""


def outcome_words(outcome: ToolOutcome) -> Any:
    """Return the value of a call that succeeded, or the reason why a call has no value."""
    match outcome:
        case Ok(value=value):
            return "" if value is None else value
        case Failed(code=code, message=message):
            return f"{code}: {message}"
        case Denied(reason=reason) | Cancelled(reason=reason) | OutcomeUnknown(reason=reason):
            return reason


def usage_json(usage: Usage) -> dict[str, Any]:
    return {name: getattr(usage, name) for name in usage.__struct_fields__} | {"total": usage.total}


def call_json(call: ToolRecord) -> dict[str, Any]:
    return {
        "call_id": call.call_id,
        "tool": call.tool,
        "args": call.args,
        "outcome": outcome_json(call.outcome),
        "attempts": call.attempts,
        "repeated": call.repeated,
        "duration_ms": call.duration_ms,
    }


def model_json(call: ModelRecord) -> dict[str, Any]:
    return {
        "step": call.step,
        "label": call.label,
        "stop": call.stop,
        "usage": None if call.usage is None else usage_json(call.usage),
        "interrupted": call.interrupted,
        "attempts": [{name: getattr(each, name) for name in each.__struct_fields__} for each in call.attempts],
    }


def pending_json(call: PendingCall) -> dict[str, Any]:
    hidden = (
        ("state",) if call.asks else ("state", "asks")
    )  # `state` is private to the tool; only questions have `asks`
    return {name: getattr(call, name) for name in call.__struct_fields__ if name not in hidden}


def message_json(message: Message) -> dict[str, Any]:
    return {"role": message.role, "parts": [_part_json(p) for p in message.parts]}


def _part_json(part: Part) -> dict[str, Any]:
    tag = type(part).__struct_config__.tag
    fields = {n: msgspec.to_builtins(getattr(part, n)) for n in part.__struct_fields__ if n not in ("replay", "body")}
    return {"type": tag, **fields}


class TurnFacts(Protocol):
    """The attributes of a TurnResult that `result_json` reads."""

    @property
    def turn_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def tool_calls(self) -> Sequence[ToolRecord]: ...
    @property
    def model_calls(self) -> Sequence[ModelRecord]: ...


def result_json(result: TurnFacts) -> dict[str, Any]:
    """Return the result of a turn as `perdure run --json` prints it."""
    outcome = result.outcome
    output = None
    if isinstance(outcome, Finished):
        output = outcome.text if outcome.value is None else outcome.value
    # Leave out waiting calls, which have no outcome; the outcome of the turn lists them.
    waiting = {c.call_id for c in outcome.calls} if isinstance(outcome, Waiting) else set()
    return {
        "turn_id": result.turn_id,
        "session_id": result.session_id,
        "outcome": outcome_json(outcome),
        "text": outcome.text if isinstance(outcome, Finished) else "",
        "output": output,
        "usage": usage_json(result.usage),
        "tool_calls": [call_json(c) for c in result.tool_calls if c.call_id not in waiting],
        "model_calls": [model_json(call) for call in result.model_calls],
    }


# ---------------------------------------------------------------------- processes

KIND = "process"


def handle_json(process_id: str) -> dict[str, str]:
    """Return the JSON handle of a process."""
    return {"__handle__": KIND, "id": process_id}


def status_json(row: ProcessRow) -> dict[str, str]:
    """Return the id and status of a process, as the answer to a request that changes it."""
    return {"process_id": row.id, "status": row.state}


def view_json(row: ProcessRow) -> dict[str, Any]:
    """Return a process as an entry of a list: handle, kind, definition and status."""
    each = row.registration
    optional = {"label": each.label or None, "definition": each.definition or None, "stuck": row.stuck}
    shown = {name: value for name, value in optional.items() if value is not None}
    return {**handle_json(row.id), "process_id": row.id, "kind": each.kind, **shown, "status": row.state}


def parse_handle(value: Any) -> tuple[str, str | None]:
    """Return the process id in a JSON handle, and its tool or None. Raises InvalidHandle."""
    kind = value.get("__handle__") if isinstance(value, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidHandle("Invalid process handle: missing `__handle__`")
    if kind != KIND:
        raise InvalidHandle(f"Invalid process handle kind: {kind}")
    process_id = value.get("id")
    if not isinstance(process_id, str) or not process_id:
        raise InvalidHandle("Invalid process handle: missing `id`")
    tool = value.get("tool")
    return process_id, tool if isinstance(tool, str) else None


def process_json(row: ProcessRow, state: str) -> dict[str, Any]:
    """Return a process with its registration and its record. `state` is the status as shown to people."""
    asked, record = row.registration, row.record
    return {
        **handle_json(row.id),
        "kind": asked.kind,
        "name": asked.name,
        "definition": asked.definition,
        "label": asked.label,
        "recovery": asked.recovery,
        "input": asked.input,
        "origin": msgspec.to_builtins(asked.origin),
        "cause": msgspec.to_builtins(asked.cause),
        "parent": asked.parent,
        "status": record.status,
        "state": state,
        "stuck": row.stuck,
        "created": row.created,
        "updated": record.updated,
        "owner": row.owner,
        "generation": row.generation,
        "attempts": row.attempts,
        "takeovers": row.takeovers,
        "progress": record.progress,
        "external_ref": record.external_ref,
        "waits": [{name: getattr(wait, name) for name in wait.__struct_fields__} for wait in record.waits],
        "due": row.due,
        "cancel": msgspec.to_builtins(record.cancel),
        "abandon": msgspec.to_builtins(record.abandon),
        "outcome": msgspec.to_builtins(record.outcome),
    }


def process_event_json(event: ProcessEvent) -> dict[str, Any]:
    return {name: msgspec.to_builtins(getattr(event, name)) for name in event.__struct_fields__}
