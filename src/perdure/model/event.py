"""Live events: what an observer sees while turns run. Hints, not truth: records are the truth.

Every event names its session and turn and carries the cursor after it. Only `TurnCommitted` settles text that deltas
showed before; `Retracted` takes it back; `Gap` says that events are missing and history must be read again.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct

from perdure.model.message import Scalar
from perdure.model.outcome import Outcome, PendingCall
from perdure.model.tool import ToolOutcome


class LiveEvent(Struct, frozen=True, gc=False, tag_field="event"):
    """What all events have. `cursor` is where to go on from after this one."""

    session_id: str
    turn_id: str
    cursor: str


class TurnStarted(LiveEvent, frozen=True, gc=False, tag="turn_started"):
    """A worker runs the turn. `resumed`: it was begun before, and goes on from what is recorded of it; a model call
    that was cut off is asked again, and its text comes from its beginning."""

    resumed: bool = False


class TextDelta(LiveEvent, frozen=True, gc=False, tag="text_delta"):
    text: str = ""
    step: int = 0


class ReasoningDelta(LiveEvent, frozen=True, gc=False, tag="reasoning_delta"):
    text: str = ""
    step: int = 0


class ToolCallDelta(LiveEvent, frozen=True, gc=False, tag="tool_call_delta"):
    """A model writes a call: a piece of the arguments' JSON. `index` counts the calls of the step. Nothing runs yet.

    `text` is empty where the arguments of the tool may hold secrets."""

    tool: str = ""
    text: str = ""
    index: int = 0
    step: int = 0


class Retracted(LiveEvent, frozen=True, gc=False, tag="retracted"):
    """The live text of this step came from an attempt that failed: remove it."""

    step: int = 0
    reason: str = ""


class ModelRetry(LiveEvent, frozen=True, gc=False, tag="model_retry"):
    """A model call failed, and is made again: attempt number `attempt`, of `model`, at `due` (ms) at the earliest.
    `error` is why the attempt before it failed."""

    model: str = ""
    attempt: int = 0
    error: str = ""
    due: int = 0
    step: int = 0


class RateLimitWait(LiveEvent, frozen=True, gc=False, tag="rate_limit_wait"):
    """The model is not asked yet: its rate limit has no room. `limit` is the name under which that is set.

    `reason` is "concurrency", "requests", "tokens" or "provider", which told us to wait. In `seconds` there may be
    room; None where that depends on other calls.
    """

    step: int = 0
    model: str = ""
    limit: str = ""
    reason: str = ""
    seconds: float | None = None


class LimitWait(LiveEvent, frozen=True, gc=False, tag="limit_wait"):
    """The model is not asked yet: calls in flight have reserved what is left of a limit (`name`) of `key`."""

    step: int = 0
    name: str = ""
    key: Any = None


class LimitNear(LiveEvent, frozen=True, gc=False, tag="limit_near"):
    """A limit (`name`) of `key` is nearly spent: what is `spent`, and what calls in flight have `reserved`."""

    name: str = ""
    key: Any = None
    spent: float = 0
    reserved: float = 0
    limit: float = 0


class ToolStarted(LiveEvent, frozen=True, gc=False, tag="tool_started"):
    call_id: str = ""
    tool: str = ""
    args: dict[str, Any] = {}
    attempt: int = 1


class ThreadWait(LiveEvent, frozen=True, gc=False, tag="thread_wait"):
    """A call has not begun: its tool is not async, and all threads are in use (`Runtime(threads=…)`)."""

    call_id: str = ""
    tool: str = ""


class ToolProgress(LiveEvent, frozen=True, gc=False, tag="tool_progress"):
    call_id: str = ""
    tool: str = ""
    value: Any = None


class ToolFinished(LiveEvent, frozen=True, gc=False, tag="tool_finished"):
    call_id: str = ""
    tool: str = ""
    outcome: ToolOutcome | None = None


class CellStarted(LiveEvent, frozen=True, gc=False, tag="cell_started"):
    """Code that the model wrote is run. The ids of its calls begin with `cell_id`. `resumed`: it goes on, after a crash
    or a wait, from what is recorded of it."""

    cell_id: str = ""
    code: str = ""
    resumed: bool = False


class CellFinished(LiveEvent, frozen=True, gc=False, tag="cell_finished"):
    """The code has ended. `outcome` holds what the model is told."""

    cell_id: str = ""
    outcome: ToolOutcome | None = None


class WaitingFor(LiveEvent, frozen=True, gc=False, tag="waiting_for"):
    """The turn parks until these are answered."""

    calls: tuple[PendingCall, ...] = ()


class InputDelivered(LiveEvent, frozen=True, gc=False, tag="input_delivered"):
    """A steered input reached the running turn. `metadata` is its own."""

    input_id: str = ""
    metadata: dict[str, Scalar] = {}


class TurnCommitted(LiveEvent, frozen=True, gc=False, tag="turn_committed"):
    """The turn is durable, whole and final."""

    outcome: Outcome | None = None


class PluginEvent(LiveEvent, frozen=True, gc=False, tag="plugin_event"):
    """What a plugin emits for observers, as JSON of its own."""

    plugin: str = ""
    value: Any = None


class ProcessChanged(LiveEvent, frozen=True, gc=False, tag="process_changed"):
    """Something has happened to a process that this session asked for, or may see: event `sequence` of its log.

    `change` is the type of that event (`process.waiting`, `signal.go`, `process.progress`, …), `status` how the process
    was after it, `at` when it happened. What the event says is in `handle.events(after=sequence - 1)`.
    """

    process_id: str = ""
    status: str = ""
    name: str = ""
    label: str = ""
    change: str = ""
    sequence: int = 0
    at: int = 0


class Gap(LiveEvent, frozen=True, gc=False, tag="gap"):
    """Events between the given cursor and here are gone. Read `history()`, then go on from here."""

    reason: str = ""
    last_committed: str = ""


AnyEvent: TypeAlias = (
    TurnStarted
    | TextDelta
    | ReasoningDelta
    | ToolCallDelta
    | Retracted
    | ModelRetry
    | RateLimitWait
    | LimitWait
    | LimitNear
    | ThreadWait
    | ToolStarted
    | ToolProgress
    | ToolFinished
    | CellStarted
    | CellFinished
    | WaitingFor
    | InputDelivered
    | TurnCommitted
    | PluginEvent
    | ProcessChanged
    | Gap
)
