"""Durable one-shot waits: their ids and the signed keys that let a program outside resolve them.

A key is a bearer capability: the wait's id and a signature made with the store's secret. It works in any process on the
same store, for as long as the wait is open, and the first resolution wins.

Waits go with the commit of their turn. How one ended can be read from the turn's records ever after.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.errors import BlobMissing, UnknownWait, quoted
from perdure.model.codec import decode, encode, spilled
from perdure.model.ids import split
from perdure.model.outcome import PendingCall
from perdure.model.record import Answered, Called, Closed, Ended, Record, Replied, Started
from perdure.model.session import WaitRow
from perdure.model.tool import Cancelled, Failed, Ok, ToolOutcome
from perdure.model.transcript import calls_in
from perdure.ports.store import Store

PREFIX = "msw1"

decode_pending = msgspec.json.Decoder(PendingCall).decode


def wait_id(turn_id: str, key: str, kind: str, attempt: int = 1) -> str:
    """A wait's id. A person who is asked about a later attempt is asked anew: an answer stands for one attempt.

    The call of a call (`<step>.<index>.<n>`) stands behind a stroke: with four numbers alone, its id would be that of a
    call of another session, whose name ends in a number.
    """
    step, index, *own = key.split(".")
    place = f"{turn_id}.{step}.{index}/{own[0]}" if own else f"{turn_id}.{key}"
    return f"{place}:{kind}" if attempt <= 1 else f"{place}:{kind}#{attempt}"


def ending(wait: WaitRow) -> Any:
    """How a wait ended: its answer as JSON, or the word for an end without one (expired, cancelled, revoked)."""
    return wait.state if wait.answer is None else decode(wait.answer)


async def whole(store: Store, wait: WaitRow) -> WaitRow | None:
    """A wait with what lies beside the store for it; None when its turn has been committed meanwhile."""
    try:
        if (digest := spilled(wait.body)) is not None:
            wait = replace(wait, body=await store.blobs.get(digest))
        if wait.answer is not None and (digest := spilled(wait.answer)) is not None:
            wait = replace(wait, answer=await store.blobs.get(digest))
    except BlobMissing:
        if await store.wait(wait.id) is not None:
            raise
        return None
    return wait


async def asked(store: Store, waits: Iterable[WaitRow]) -> list[PendingCall]:
    """What these waits ask."""
    return [decode_pending(found.body) for wait in waits if (found := await whole(store, wait)) is not None]


def named(wait: str) -> tuple[str, int, str, str]:
    """Whose a wait is: its session, turn, call (`<step>.<index>`, or one more number) and kind."""
    call_id, _, kind = wait.rpartition(":")
    outer, _, own = call_id.rpartition("/")
    if not own.isdigit():
        outer, own = call_id, ""
    session_id, (turn, step, index) = split(outer, 3)
    return session_id, turn, f"{step}.{index}.{own}" if own else f"{step}.{index}", kind.partition("#")[0]


def recalled(wait: str, sid: int, records: Iterable[Record]) -> WaitRow | None:
    """A wait of a committed turn as it ended; None where the records know of none, or it was revoked.

    Of several about one call, the last that was answered counts. A value that was given is told as the model was told.
    """
    _, turn, call, kind = named(wait)
    memory = _Memory(call, kind)
    for record in records:
        memory.add(record)
    if memory.answer is None:
        return WaitRow(wait, sid, turn, call, kind, "cancelled") if memory.cancelled else None
    if memory.answer.verdict == "revoked":
        return None
    if memory.answer.verdict == "expired":
        return WaitRow(wait, sid, turn, call, kind, "expired")
    if memory.answer.verdict == "cancelled":
        return WaitRow(wait, sid, turn, call, kind, "cancelled")
    told: dict[str, Any] = msgspec.to_builtins(memory.answer)
    value = {} if memory.value is None else {"value": memory.value}
    return WaitRow(wait, sid, turn, call, kind, "resolved", answer=encode({**told, **value}))


class _Memory:
    """What the records of a turn tell about one kind of wait of one call."""

    def __init__(self, call: str, kind: str) -> None:
        self._call, self._kind = call, kind
        self._asked = self._started = self._deferred = self._stopped = False
        self._outcome: ToolOutcome | None = None
        self._fields: Any = None
        self.answer: Answered | None = None

    def add(self, record: Record) -> None:
        if isinstance(record, Replied | Called):
            self._asked |= self._call in calls_in(record)
            key = record.key if isinstance(record, Called) else record.step
            self._started |= self._call in [f"{key}.{index}" for index in record.started]
        elif isinstance(record, Closed):
            self._stopped = isinstance(record.outcome, Cancelled)
        elif isinstance(record, Started) and record.call == self._call:
            self._started, self._deferred = True, record.deferred
            self._take(None if record.approved is None else Answered("approved", record.approved.get("by", "")))
            if self._take(record.answer) == "input":
                self._fields = record.payload["input"]
        elif isinstance(record, Ended) and record.call == self._call:
            self._outcome = record.outcome
            self._take(record.answer)

    def _take(self, answer: Answered | None) -> str:
        """The kind of the wait that this answered; "" where nothing was."""
        if answer is None:
            return ""
        early = answer.verdict in ("approved", "rejected") or (answer.verdict == "cancelled" and not self._started)
        of_it = "approval" if early else self._after_start(answer)
        self.answer = answer if of_it == self._kind else self.answer
        return of_it

    def _after_start(self, answer: Answered) -> str:
        """What a person or a program was asked about a call that has started."""
        if self._deferred:
            return "deferred"
        return "input" if answer.verdict == "value" else "recovery"

    @property
    def cancelled(self) -> bool:
        """Whether the turn was stopped while the question was open, or might have been. After a crash none is: then
        the outcome is unknown, and stays open to a settlement."""
        if self._kind == "approval":
            return self._stopped and self._asked and not self._started and self._outcome is None
        return self._stopped and self._kind == "deferred" and self._deferred

    @property
    def value(self) -> Any:
        """What was given with the answer: the outcome is made of it, but where the tool asked for fields."""
        if self._kind == "input":
            return self._fields
        verdict, outcome = "" if self.answer is None else self.answer.verdict, self._outcome
        if isinstance(outcome, Ok):
            return outcome.value if verdict in ("value", "done") else None
        return outcome.data if isinstance(outcome, Failed) and verdict in ("error", "failed") else None


def sign(secret: bytes, wait: str) -> str:
    """The completion key of a wait."""
    name = base64.urlsafe_b64encode(wait.encode()).decode().rstrip("=")
    return f"{PREFIX}.{name}.{_signature(secret, wait)}"


def verify(secret: bytes, key: str) -> str:
    """The wait behind a key. A forged, mangled or foreign key is unknown, and nothing more is said."""
    try:
        _, name, _ = key.split(".")
        wait = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        # The whole key is compared: base64 reads several spellings as the same bytes.
        genuine = hmac.compare_digest(key.encode(), sign(secret, wait).encode())
    except (ValueError, AttributeError, TypeError):
        genuine, wait = False, ""
    if not genuine:
        raise UnknownWait(key if type(key) is str else quoted(key))
    return wait


def _signature(secret: bytes, wait: str) -> str:
    digest = hmac.new(secret, wait.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest[:24]).decode()
