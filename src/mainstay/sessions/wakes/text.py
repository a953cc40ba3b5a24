"""News of processes in words, for the model that asked for them.

    [process "report" completed]
    handle: {"__handle__":"process","id":"chat.3.1.0"}
    what: make_report, asked for by call chat.3.1.0
    value: {"rows":1200,"file":"q3.csv"}

A value that is too large for this is cut, and marked; whoever has the handle can have all of it. Text of several lines
is quoted, each with `> ` before it, and so is a line of what somebody says that begins like news: neither a process nor
a person can put words into the runtime's mouth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mainstay.errors import BlobMissing, StoreDamaged
from mainstay.lifecycle.process import ENDS
from mainstay.model.process import Wake, WakeRow
from mainstay.model.tool import Cancelled, Failed, Ok, OutputBudget, ToolOutcome
from mainstay.model.transcript import told as shown_of
from mainstay.ports.store import Store
from mainstay.tools.output import project

IN_FULL = 50
"""So many processes of one input are told of at length; of the others the model is shown that they exist."""
ROOM, LEAST = 24 * 1024, 512
"""Bytes for all values of one input together, and for each of them at least."""
LINES = 200
MAX_NAME = 200
"""Characters of a name or a label."""

_decode = msgspec.json.Decoder(Wake).decode
_encode = msgspec.json.Encoder(order="deterministic").encode


class Heard(Struct, frozen=True):
    """A wake that was read. `value` is what its process returned or told; `lost` says why it cannot be shown."""

    wake: Wake
    value: Any = None
    lost: str = ""


def read(row: WakeRow) -> Wake:
    """What a wake says; ValueError when it says nothing that can be read."""
    return _decode(row.body)


async def heard(store: Store, row: WakeRow) -> Heard:
    """A wake with its value, which may be beside the store."""
    wake = read(row)
    payload = wake.payload
    if wake.type not in ENDS.values() or not isinstance(payload, dict) or payload.get("type") != "success":
        return Heard(wake, payload)
    if (blob := payload.get("blob")) is None:
        return Heard(wake, payload.get("value"))
    try:
        return Heard(wake, msgspec.json.decode(await store.blobs.get(blob["digest"])))
    except (BlobMissing, StoreDamaged) as error:
        return Heard(wake, None, str(error))


def outcome_of(told: Heard) -> ToolOutcome | None:
    """What a wake says as the outcome of a call; None when there is nothing to be shown of it."""
    wake, payload = told.wake, told.wake.payload
    if told.lost:
        return None
    kind = payload.get("type") if wake.type in ENDS.values() and isinstance(payload, dict) else None
    if kind == "failure":
        return Failed(payload["code"], payload.get("message", ""), payload.get("data"))
    if kind == "cancelled":
        return Cancelled(payload.get("by", ""), payload.get("reason", ""))
    return None if kind == "abandoned" else Ok(told.value)


def instead(told: Heard, outcome: ToolOutcome) -> Heard:
    """The same news with another outcome. What happened stays what it was; what is shown of it does not."""
    wake = told.wake
    if isinstance(outcome, Ok):
        payload = {"type": "success"} if wake.type in ENDS.values() else outcome.value
        return Heard(replace(wake, payload=payload), outcome.value)
    if wake.type not in ENDS.values():
        return Heard(replace(wake, payload=None), shown_of(outcome))
    if isinstance(outcome, Cancelled) and wake.payload.get("type") == "cancelled":
        return Heard(replace(wake, payload=wake.payload | {"by": outcome.by, "reason": outcome.reason}))
    failed = (
        outcome if isinstance(outcome, Failed) else Failed(str(type(outcome).__struct_config__.tag), outcome.reason)
    )
    payload = {"type": "failure", "code": failed.code, "message": failed.message, "data": failed.data}
    return Heard(replace(wake, payload=payload))


def in_words(told: Sequence[Heard]) -> str:
    """What a session is told, in the order in which it happened."""
    full, rest = told[:IN_FULL], told[IN_FULL:]
    room = max(LEAST, ROOM // max(len(full), 1))
    blocks = [_block(each, OutputBudget(room, LINES)) for each in full]
    if rest:
        lines = [f"- {each.wake.process_id}{_named(each.wake)}: {_event(each.wake)}" for each in rest]
        blocks.append("\n".join([f"[{len(rest)} more; wait for one to see what it returned]", *lines]))
    return "\n\n".join(blocks)


def _block(told: Heard, budget: OutputBudget) -> str:
    wake = told.wake
    lines = [f"[process{_named(wake)} {_event(wake)}]"]
    lines.append(f"handle: {_json({'__handle__': 'process', 'id': wake.process_id})}")
    asked = f"asked for by call {wake.call_id}" if wake.call_id else ""
    what = ", ".join(part for part in (_short(wake.name), asked) if part)
    if what:
        lines.append(f"what: {what}")
    lines += _body(told, budget)
    return "\n".join(lines)


def _named(wake: Wake) -> str:
    name = wake.label or wake.name
    return f" {_json(name[:MAX_NAME])}" if name else ""


def _short(name: str) -> str:
    """A name that cannot be mistaken for lines of ours."""
    return name[:MAX_NAME] if name.isprintable() else _json(name[:MAX_NAME])


def _event(wake: Wake) -> str:
    """What happened, in a word or two."""
    return wake.status if wake.type in ENDS.values() else f"tells: {_short(wake.type)}"


def _body(told: Heard, budget: OutputBudget) -> list[str]:
    wake, payload = told.wake, told.wake.payload
    if told.lost:
        return [f"value: it cannot be shown ({told.lost})"]
    if wake.type not in ENDS.values():
        return [f"payload: {_shown(told.value, budget)}"]
    kind = payload.get("type") if isinstance(payload, dict) else None
    if kind == "failure":
        error = f"{payload['code']}: {payload.get('message', '')}"
        lines = [f"error: {_shown(error, budget)}"]
        return [*lines, f"data: {_shown(payload['data'], budget)}"] if payload.get("data") is not None else lines
    if kind == "cancelled":
        why = f"by {payload.get('by') or 'somebody'}: {payload.get('reason') or 'it was asked to end'}"
        unknown = ["how far its last effect came is not known (outcome_unknown)"] if payload.get("unknown") else []
        return [f"cancelled {_shown(why, budget)}", *unknown]
    if kind == "abandoned":
        return ["it was given up: whether its last effect happened is not known (outcome_unknown)"]
    return [f"value: {_shown(told.value, budget)}"]


def _shown(value: Any, budget: OutputBudget) -> str:
    cut = project(value, budget).value
    if not isinstance(cut, str):
        return _json(cut)
    lines = cut.splitlines()
    return cut if len(lines) < 2 else "".join([f"\n> {line}" for line in lines])


def _json(value: Any) -> str:
    return _encode(value).decode()
