"""How a turn ends. A closed union: exactly one of these is in every commit. `Waiting` and `Queued` are in none: they
tell of a turn that has not ended."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from perdure.model.plugin import Decision
from perdure.model.tool import Artifact
from perdure.model.tool import Cancelled as Cancelled  # a turn ends like a call, so these two are exported here
from perdure.model.tool import Failed as Failed


class Finished(Struct, frozen=True, gc=False, tag="finished", omit_defaults=True):
    """The model answered. `value` is the validated output when the agent declares a type."""

    text: str = ""
    value: Any = None


class PendingCall(Struct, frozen=True, gc=False, omit_defaults=True):
    """One thing a turn waits for: a person's approval or settlement, an outside completion, the end of a sleep, that of
    one of `processes`, or (`kind` "model") the next attempt of a model call. Of several waits that a tool makes one
    after the other, that is number `ordinal`; of the attempts of a model call likewise. `tool` is then the model.

    `approves` is a digest of what exactly is to be approved, where a provider gave one. `asks` are the parts of a
    question that `session.answer` answers, by name, each with a `message` and a `schema` or a `url`; `state` is what
    the tool that asks wants to see again."""

    call_id: str
    kind: Literal["approval", "recovery", "deferred", "sleep", "process", "input", "model"]
    tool: str
    args: dict[str, Any]
    since: int = 0
    due: int | None = None
    reason: str = ""
    artifacts: tuple[Artifact, ...] = ()
    decisions: tuple[Decision, ...] = ()
    approves: str = ""
    processes: tuple[str, ...] = ()
    ordinal: int = 0
    asks: dict[str, Any] | None = None
    state: Any = None


GOES_ON = ("sleep", "process", "model")
"""Kinds of waits that end without a person and without a key: with time, or with the end of a process."""


def answerable(calls: Iterable[PendingCall]) -> tuple[PendingCall, ...]:
    """Return the waits that a person or an outside key can answer."""
    return tuple([call for call in calls if call.kind not in GOES_ON])


class Waiting(Struct, frozen=True, gc=False, tag="waiting"):
    """The turn is parked on disk: it goes on when `calls` are answered or over, in whatever process."""

    calls: tuple[PendingCall, ...] = ()


class Queued(Struct, frozen=True, gc=False, tag="queued", omit_defaults=True):
    """The input is on disk and its turn cannot begin or go on now: the turn `behind` which it waits is parked until
    `calls` are answered, or (`behind` None) no living worker has its agent, or the store is a copy that was not
    restored yet. `reason` says what to do.

    Not an end, and never in a record: only the host's `run` and `stream` return it, and the same key returns how the
    turn ended once it has.
    """

    behind: str | None = None
    calls: tuple[PendingCall, ...] = ()
    reason: str = ""


class BudgetSpent(Struct, frozen=True, gc=False, tag="budget_spent"):
    """A limit of the agent's budget ended the turn; `records` is the one that every turn has."""

    which: Literal["steps", "tokens", "money", "seconds", "no_progress", "calls", "calls_per_reply", "records"]
    limit: float


class LimitReached(Struct, frozen=True, gc=False, tag="limit_reached", omit_defaults=True):
    """A limit of the Runtime (`Limit`) is spent: the model was not asked again. Amounts are for people; `key` is whose
    limit it is, None where it is that of all."""

    kind: Literal["money", "tokens", "turns"]
    limit: Decimal
    spent: Decimal
    per: str = "all"
    key: Any = None
    window: str = ""


class ProviderFailed(Struct, frozen=True, gc=False, tag="provider_failed", omit_defaults=True):
    """The model could not be reached, or kept failing, after `attempts` attempts. `model` was asked last."""

    code: str
    message: str
    attempts: int = 1
    model: str = ""


class PluginAborted(Struct, frozen=True, gc=False, tag="plugin_aborted", omit_defaults=True):
    plugin: str
    code: str
    message: str = ""


UNUSABLE = "invalid_input"
"""The code with which a provider says that it is the conversation, not the call, that is at fault."""


class InvalidInput(Struct, frozen=True, gc=False, tag="invalid_input"):
    """The model does not take what it would be asked: it is too long, or of a kind that it cannot read.

    What no model could take is refused when it is said, with an exception of the same name.
    """

    code: str
    message: str


class Incomplete(Struct, frozen=True, gc=False, tag="incomplete", omit_defaults=True):
    """The model stopped before it was done: a token cap, a filter, or output that never validated."""

    reason: str
    text: str = ""


Outcome: TypeAlias = (
    Finished
    | Waiting
    | Queued
    | Cancelled
    | BudgetSpent
    | LimitReached
    | ProviderFailed
    | PluginAborted
    | InvalidInput
    | Incomplete
    | Failed
)


def text_of(outcome: Outcome) -> str:
    """Return the text of an outcome: the answer of Finished, the partial text of Incomplete, "" of every other one."""
    return outcome.text if isinstance(outcome, Finished | Incomplete) else ""


def kind_of(outcome: Outcome) -> str:
    """The stable snake_case name of an outcome: its tag on the wire."""
    tag = type(outcome).__struct_config__.tag
    assert isinstance(tag, str)
    return tag
