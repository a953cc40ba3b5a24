"""What may be asked of a process, and what may happen to it next. Nothing here waits or writes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from mainstay.errors import (
    InvalidProcess,
    ProcessEnded,
    ProcessPruned,
    UndeclaredEvent,
    UnknownProcess,
    WrongAuthority,
    quoted,
)
from mainstay.lifecycle.fold import RESERVED, SIGNAL
from mainstay.model import validate
from mainstay.model.codec import clean_text, encode
from mainstay.model.process import (
    MAX_PROCESS_ID,
    RETIRED,
    Abandoned,
    Event,
    EventType,
    ProcessOutcome,
    ProcessRow,
    Registration,
)
from mainstay.model.write import Authority, ExternalOwner, ReconciledAbandon, WorkflowKey

S = TypeVar("S", bound=Struct)


COMPLETES_OUR_WORK: dict[type, bool] = {ExternalOwner: False, WorkflowKey: True, ReconciledAbandon: False}
"""Whether an authority may end a process that workers may begin; the others may end work that is done outside."""


def check_process_id(process_id: object) -> str:
    """The id itself when a process may carry it."""
    if not isinstance(process_id, str) or not process_id or len(process_id) > MAX_PROCESS_ID:
        wanted = f"use 1 to {MAX_PROCESS_ID} printable characters"
        raise InvalidProcess(f"process id {quoted(process_id)} is not usable: {wanted}")
    if not process_id.isprintable() or process_id != process_id.strip() or "#" in process_id:
        raise InvalidProcess(f"process id {quoted(process_id)} is not usable: use printable characters, and no '#'")
    # An enum of strings is its value: its name, which `format` would show, is in no row.
    return process_id if type(process_id) is str else str.__str__(process_id)


def readable(value: S, what: str) -> S:
    """The value itself, when it can be read back: a wrong type is told to whoever gave it, not to who reads it next."""
    validate.read_back(value, what, InvalidProcess)
    return value


def check(registration: Registration) -> Registration:
    """The registration itself, when it is one."""
    check_process_id(registration.id)
    readable(replace(registration, input=None), f"process {registration.id!r}")
    if not registration.kind:
        raise InvalidProcess("a process needs a kind: it says which engine runs it")
    if registration.max_attempts is not None and registration.max_attempts < 1:
        raise InvalidProcess(f"a process is begun at least once, not {registration.max_attempts} times")
    seen = set[str]()
    for each in registration.events:
        _check_event_type(each, seen)
    return registration


def _check_event_type(declared: EventType, seen: set[str]) -> None:
    if not declared.name or declared.name == SIGNAL:
        raise InvalidProcess("an event type needs a name")
    if declared.name.startswith(RESERVED):
        raise InvalidProcess(f"event type {declared.name!r} is reserved: choose a name that begins otherwise")
    if declared.name in seen:
        raise InvalidProcess(f"event type {declared.name!r} is declared twice")
    seen.add(declared.name)
    for pointer in () if declared.wake is None else (declared.wake.when, declared.wake.input):
        if pointer and not pointer.startswith("/"):
            raise InvalidProcess(f"{pointer!r} of event type {declared.name!r} is no JSON pointer: begin it with '/'")


def same_asking(one: Registration, other: Registration) -> bool:
    """Whether two registrations are the same asking. Code and environment may have moved on since the first."""
    return same(_content(one), _content(other))


def asking_digest(registration: Registration) -> int:
    """A digest of what `same_asking` compares, as a signed integer of 64 bits."""
    content = hashlib.sha256(encode(_content(registration))).digest()
    return int.from_bytes(content[:8], "big", signed=True)


def _content(each: Registration) -> tuple[Any, ...]:
    return (each.kind, each.name, each.input, each.recovery, each.origin, each.parent)


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same on disk: one of them comes from there, the other from a caller."""
    return one == other or encode(one) == encode(other)


def declared(registration: Registration, event_type: str) -> EventType:
    """The declaration of an event that the process may have; refused when there is none."""
    for each in registration.events:
        if each.name == event_type:
            return each
    event_type = clean_text(event_type)
    if event_type.startswith(SIGNAL) and len(event_type) > len(SIGNAL) and registration.open_signals:
        return EventType(event_type)
    raise UndeclaredEvent(registration.id, event_type, [each.name for each in registration.events])


def check_args(args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments as they are kept: by name."""
    if args is not None and not isinstance(args, Mapping):
        raise InvalidProcess(f"arguments are given by name, such as {{'day': 'Sunday'}}, not as {type(args).__name__}")
    return dict(args or {})


def check_signal(name: object) -> str:
    """The name itself when a signal may carry it."""
    if not isinstance(name, str) or not name or clean_text(name) != name:
        raise InvalidProcess(f"a signal needs a name, not {quoted(name)}")
    return name if type(name) is str else str.__str__(name)


def known(row: ProcessRow | None, process_id: str) -> ProcessRow:
    """The process, when there is still something of it."""
    if row is None:
        raise UnknownProcess(process_id)
    if row.pruned is not None:
        raise ProcessPruned(process_id, row.status, row.pruned)
    return row


def alive(row: ProcessRow | None, process_id: str) -> ProcessRow:
    """The process, when something may still happen to it."""
    found = known(row, process_id)
    if found.status in RETIRED:
        raise ProcessEnded(process_id, found.status)
    return found


def awaits(row: ProcessRow, event: Event) -> bool:
    """Whether a parked process has something to do because of this."""
    told = event.type
    return row.status == "waiting" and any(w.kind == "signal" and told == SIGNAL + w.name for w in row.record.waits)


def is_due(row: ProcessRow, now: int) -> bool:
    due = row.due
    return row.status == "waiting" and due is not None and due <= now


def check_authority(row: ProcessRow, authority: Authority, outcome: ProcessOutcome) -> None:
    """Refuse whoever may not say how this process ended."""
    if COMPLETES_OUR_WORK.get(type(authority)) is not row.registration.contract.may_begin:
        raise WrongAuthority(row.id, type(authority).__name__, row.registration.recovery)
    if isinstance(authority, ReconciledAbandon) and not isinstance(outcome, Abandoned):
        raise WrongAuthority(row.id, "ReconciledAbandon", "an outcome that is not abandoned")
