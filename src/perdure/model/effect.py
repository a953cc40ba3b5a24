"""The vocabulary of the system: what a turn asks for. What comes back are records and deliveries.

    effect       comes back as                          meaning
    CallModel    Replied | Faltered | GaveUp | TimeIsUp  ask the model for step n
    RunTools     Started, Faltered, Ended (per call)    run the calls of one reply, all at once
    RunCode      Called, then as RunTools; Ended        run the cell of one reply, and what it calls
    Checkpoint   Delivery                               a boundary where inputs and plugins may join the turn
    Finish       nothing                                commit

A plugin may answer any of them with Aborted, and a host with CancelTurn.

Effects restate what a machine waits for: asking twice gives an equal effect.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from perdure.model.message import Message
from perdure.model.outcome import BudgetSpent, LimitReached, Outcome
from perdure.model.record import Called, Delivered, Ended, Faltered, Replied, Started

Boundary: TypeAlias = Literal["opening", "after_work", "before_completion"]


class CallModel(Struct, frozen=True, gc=False, tag="call_model", omit_defaults=True):
    """Ask the model. `last` is the grace step after a spent budget: no tools may be called.

    Of several models that may answer, `candidate` is asked; those in `failed` are not asked again in this step.
    """

    step: int
    attempt: int = 1
    due: int = 0
    last: bool = False
    candidate: int = 0
    failed: tuple[int, ...] = ()


class AskedCall(Struct, frozen=True, gc=False, omit_defaults=True):
    """A tool call that has no outcome yet, with everything that is recorded of it.

    `started` without an outcome is the window in which a crash leaves the effect unknown. `due` is the time of the
    next attempt after a recorded failed one. `store` is the id of the store that its first attempt started in, and ""
    before that, or where the record of the start is older than such ids.
    """

    call: str
    provider_id: str
    name: str
    args: dict[str, Any]
    raw: str | None = None
    started: bool = False
    deferred: bool = False
    attempts: int = 0
    repeated: int = 0
    due: int = 0
    payload: Any = None
    background: bool = False
    store: str = ""


class RunTools(Struct, frozen=True, gc=False, tag="run_tools"):
    """Run these calls concurrently; only those without an outcome are restated."""

    step: int
    calls: tuple[AskedCall, ...]


class RunCode(Struct, frozen=True, gc=False, tag="run_code"):
    """Run a cell. `calls` are those of its calls that have no outcome. `at` is when the model wrote it.

    `cell` is the call that it is, `<step>.<index>`, and "" where it is what a reply says.
    """

    step: int
    code: str
    at: int
    calls: tuple[AskedCall, ...] = ()
    cell: str = ""


class Checkpoint(Struct, frozen=True, gc=False, tag="checkpoint"):
    """A safe boundary: inputs that wait may be delivered here."""

    at: Boundary


class Finish(Struct, frozen=True, gc=False, tag="finish"):
    """The turn is over; commit it with this outcome."""

    outcome: Outcome


Effect: TypeAlias = CallModel | RunTools | RunCode | Checkpoint | Finish


class Delivery(Struct, frozen=True, gc=False, tag="delivery", omit_defaults=True):
    """What a checkpoint brought: inputs from outside, messages of plugins, possibly nothing."""

    inputs: tuple[Delivered, ...] = ()
    messages: tuple[Message, ...] = ()


class GaveUp(Struct, frozen=True, gc=False, tag="gave_up"):
    """The model could not be asked, after `attempts` attempts. `begun`: a part of the last answer had come. `model` is
    the one that was asked last."""

    code: str
    message: str
    attempts: int = 1
    begun: bool = False
    model: str = ""


class CancelTurn(Struct, frozen=True, gc=False, tag="cancel_turn"):
    """The turn is cancelled: a request came before its end."""

    by: str
    reason: str = ""


class Aborted(Struct, frozen=True, gc=False, tag="aborted", omit_defaults=True):
    """A plugin ended the turn, or one that the turn cannot do without has failed."""

    plugin: str
    code: str
    message: str = ""


class NoRoom(Struct, frozen=True, gc=False, tag="no_room"):
    """The turn has used the records that it can have, up to those that its end takes."""


class Unprepared(Struct, frozen=True, gc=False, tag="unprepared"):
    """What the turn runs with could not be made, before it did anything."""

    code: str
    message: str


class TimeIsUp(Struct, frozen=True, gc=False, tag="time_is_up"):
    """The budget's seconds were spent in the middle of a model call."""


Received: TypeAlias = (
    Replied
    | Called
    | Started
    | Faltered
    | Ended
    | Delivery
    | GaveUp
    | TimeIsUp
    | NoRoom
    | BudgetSpent
    | LimitReached
    | Unprepared
    | Aborted
    | CancelTurn
)
