"""What a session is told of a process: its end, and those of its events that were declared to wake."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from mainstay.lifecycle.fold import CANCELLED, ENDS
from mainstay.model.codec import encode
from mainstay.model.process import Event, Failure, ProcessRow, Wake, WakeRow, WakeTarget

_ENDS = frozenset(ENDS.values())
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}").fullmatch


def target(row: ProcessRow) -> WakeTarget | None:
    """The session that hears of a process; None when nobody does."""
    found = row.record.wake or row.registration.wake
    return None if found is None or found.policy == "none" else found


def news(row: ProcessRow, event: Event) -> WakeRow | None:
    """The wake that goes with an event, for the outbox; None for most. `row` is the process after the event."""
    to = target(row)
    if to is None:
        return None
    if event.type == CANCELLED and _asked_for(row, to.session_id):
        return None
    if event.type in _ENDS:
        payload: Any = row.record.outcome
        if isinstance(payload, Failure):
            payload = replace(payload, traceback="")  # for people who look after it, and not for a model
    else:
        rule = next((each.wake for each in row.registration.events if each.name == event.type), None)
        if rule is None or (rule.when is not None and not _found(event.payload, rule.when)):
            return None
        payload = _at(event.payload, rule.input)
    cause = row.registration.cause
    call = cause.id if cause is not None and cause.type == "tool_call" else None
    each = row.registration
    wake = Wake(row.id, event.type, each.name, each.label, row.status, payload, call, event.at, each.depth)
    return WakeRow(0, to.session_id, row.pid, row.record.sequence, to.policy, encode(wake), event.at)


def _asked_for(row: ProcessRow, session_id: str) -> bool:
    """Whether the session has ended the process itself, and knows."""
    return row.record.cancel is not None and row.record.cancel.by == f"session {session_id}"


def _found(payload: Any, pointer: str) -> bool:
    found = _at(payload, pointer)
    return found is not None and found is not False


def _at(payload: Any, pointer: str) -> Any:
    """What a JSON pointer points at; None where there is nothing."""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(payload, dict):
            payload = payload.get(name)
        elif isinstance(payload, list | tuple) and _INDEX(name) and int(name) < len(payload):
            payload = payload[int(name)]
        else:
            return None
    return payload
