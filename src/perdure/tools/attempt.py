"""The attempt of a tool call, sans-IO: what a call needs next, and what the end of an attempt means.

Three drivers attempt tools by these rules: the dispatcher of a turn's calls (`tools/dispatcher.py`), the engine of
background tools, and the steps of durable functions (both in `processes/`). They differ in where they record and how
they wait. Nothing here waits, writes, or calls code of a tool.

What a call needs follows from what is recorded of it, from the contract of its tool, and from its circumstances:

    recorded                 contract and circumstances              it needs
    nothing                  a person was asked already              Ask("approval")
                             plugins decide about calls              AskPlugins, and then as below
                             its tool or arguments are not usable    Conclude(Failed)
                             approval="ask"                          Ask("approval")
                             otherwise                               Begin
    started by this run      its body has not begun                  RunBody
    started, and parked      it waits for processes                  Ask("process"), then Begin(goes_on)
    started, without an end  it was left to a process                StartProcess
                             deferred, and its body may be over      Ask("deferred")
                             recovery="once"                         Conclude(OutcomeUnknown)
                             recovery="rerun"                        Begin(repeat)
                             recovery="ask"                          Ask("recovery")
    a failed attempt         its tool or arguments are not usable    Conclude(Failed)
                             otherwise                               Begin, when it is due
    an answer from outside   approved, rerun                         Begin
                             done, value, failed, error              Return: what the call is said to have returned
                             rejected, cancelled, or none in time    Conclude

    Begin is: due time, preparation, a place, the start on disk, the body.

What the end of an attempt means:

    end                             work goes on       it is cancelled    the Runtime is left
    an outcome that is known        EndCall            EndCall            EndCall
    OutcomeUnknown                  EndCall            EndCall            "once": EndCall; otherwise Leave
    Again, failures ≤ retries       TryAgain           as `otherwise`     TryAgain, by the next owner
    Again, more failures than that  as `otherwise`     as `otherwise`     as `otherwise`
    NotBegun                        Withdraw           Withdraw           Withdraw

Again is the end of an attempt that had no effect, as its tool says, or that ran out of time and may be repeated. An
attempt that a crash cut off is repeated, not failed: `retries` count failures only.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.admission import Capacity, Needs
from perdure.engine.retry import is_retried
from perdure.errors import Retry, ToolError
from perdure.model.codec import clean, clean_text, error_text, model_text
from perdure.model.retries import Retries
from perdure.model.session import Answer
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown, Recovery, ToolOutcome, ToolSpec

DIED = "the process died while the call ran"
NOT_SEEN = "the turn ended before its end was seen"
NOT_BEGUN = Failed("interrupted", "it had not begun")
"""What is recorded of a start that is taken back: the next attempt has the same number."""


def needs_of(spec: ToolSpec) -> Needs:
    """What an attempt of this tool takes a place of: at most `limit` calls of it, one call at a time for a resource."""
    needs: Needs = ()
    if spec.limit is not None:
        needs = (Capacity(f"tool {spec.name}", spec.limit),)
    if spec.resource is not None:
        needs = (*needs, Capacity(f"resource {spec.resource}", 1))
    return needs


# ---------------------------------------------------------------------- what a call needs next


class CallRecord(Protocol):
    """What the records of a call tell. `AskedCall` has it for the calls of a turn."""

    @property
    def started(self) -> bool:
        """Its newest record is a start: a body may have run."""
        ...

    @property
    def attempts(self) -> int:
        """How many were made, with the one whose start is recorded."""
        ...

    @property
    def repeated(self) -> int:
        """How many of them were made because a crash left the one before unknown."""
        ...

    @property
    def deferred(self) -> bool: ...

    @property
    def background(self) -> bool: ...


class Attempts(Struct, frozen=True, gc=False):
    """What is recorded of a background tool or a step: a process has no calls that defer or go to the background."""

    started: bool = False
    attempts: int = 0
    repeated: int = 0
    deferred: bool = False
    background: bool = False


class AskPlugins(Struct, frozen=True, gc=False, tag="ask_plugins"):
    """Ask the plugins, who may deny it, change its arguments, or have a person asked."""


class AwaitAnswer(Struct, frozen=True, gc=False, tag="ask"):
    """Wait for an answer from outside, or the end of a process, unless it is there."""

    kind: Literal["approval", "recovery", "deferred", "process", "input"]
    reason: str = ""


class Begin(Struct, frozen=True, gc=False, tag="begin"):
    """Attempt it, with a start record. `repeat`: the end of the attempt before is unknown. `goes_on`: its body was left
    where it waited for processes, and runs again up to there, as the same attempt."""

    repeat: bool = False
    goes_on: bool = False


class RunBody(Struct, frozen=True, gc=False, tag="run_body"):
    """Run its body: its start is on disk, its place is taken."""


class StartProcess(Struct, frozen=True, gc=False, tag="start_process"):
    """Register the process that it is left to. Registered twice it is the same process."""


class Return(Struct, frozen=True, gc=False, tag="return"):
    """An answer from outside says how it ended. It passes plugins and the output budget like what a body returns."""

    outcome: Ok | Failed


class Conclude(Struct, frozen=True, gc=False, tag="conclude"):
    """It ends without an attempt."""

    outcome: ToolOutcome


CallNeed: TypeAlias = AskPlugins | AwaitAnswer | Begin | RunBody | StartProcess | Return | Conclude

RECOVERY: dict[Recovery, CallNeed] = {
    "once": Conclude(OutcomeUnknown(DIED)),
    "rerun": Begin(repeat=True),
    "ask": AwaitAnswer("recovery", DIED),
}
"""A call that is found started, without an end: its contract decides, never a guess."""

RUN_BODY, ASK_PLUGINS, BEGIN, START_PROCESS = RunBody(), AskPlugins(), Begin(), StartProcess()
GO_ON, AWAIT_PROCESSES, AWAIT_INPUT = Begin(goes_on=True), AwaitAnswer("process"), AwaitAnswer("input")
AWAIT_COMPLETION, AWAIT_APPROVAL = AwaitAnswer("deferred"), AwaitAnswer("approval", "the tool asks for approval")


class Circumstances(Struct, frozen=True, gc=False):
    """What a driver knows of a call beside its records.

    `here`: this run recorded its start and has not begun its body. `asked`: a person was asked to approve it. `vetted`:
    plugins decide about it before it begins. `completed`: the body of a deferred call is over, or its completion came.
    `parked`: its body was left where it waited for processes. `asks`: it was left with a question.
    """

    here: bool = False
    asked: bool = False
    vetted: bool = False
    completed: bool = False
    parked: bool = False
    asks: bool = False


NOTHING_KNOWN = Circumstances()


def next_need(call: CallRecord, usable: ToolSpec | Failed, known: Circumstances = NOTHING_KNOWN) -> CallNeed:
    """What a call without an outcome needs. `usable` is the contract of its tool, or why it cannot be attempted."""
    if call.started:
        if known.here:
            return RUN_BODY
        if known.parked:
            return AWAIT_PROCESSES
        if known.asks:
            return AWAIT_INPUT
        if call.background:
            return START_PROCESS
        # Without its definition there is no contract that would allow to repeat it.
        recovery: Recovery = "once" if isinstance(usable, Failed) else usable.recovery
        if call.deferred and (recovery != "rerun" or known.completed):
            return AWAIT_COMPLETION
        return RECOVERY[recovery]
    if not call.attempts:
        if known.asked:
            # The question counts, whatever has become of the plugin or the definition that had it asked.
            return AwaitAnswer("approval")
        if known.vetted:
            return ASK_PLUGINS
    if isinstance(usable, Failed):
        return Conclude(usable)
    return AWAIT_APPROVAL if usable.approval == "ask" and not call.attempts else BEGIN


def need_after(answer: Answer | None, call: CallRecord) -> Begin | Return | Conclude:
    """What a call needs whose question is answered; None: its time ran out without an answer."""
    match answer:
        case None:
            late = "nobody answered in time"
            return Conclude(OutcomeUnknown(late) if call.started else Denied(late))
        case Answer(verdict="approved"):
            return BEGIN
        case Answer(verdict="rerun"):
            return Begin(repeat=True)
        case Answer(verdict="rejected"):
            return Conclude(Denied(answer.reason, answer.by))
        case Answer(verdict="cancelled"):
            if not call.started:
                return Conclude(Cancelled(answer.by, answer.reason))
            why = f": {answer.reason}" if answer.reason else ""
            return Conclude(OutcomeUnknown(f"{answer.by or 'somebody'} does not wait for its end any more{why}"))
        case Answer(verdict="done" | "value"):
            return Return(Ok(answer.value))
        case _:
            return Return(Failed("settled_as_failed", answer.reason or "settled as failed", answer.value))


# ---------------------------------------------------------------------- how an attempt ends


class Again(Struct, frozen=True, gc=False):
    """The tool said that running it again is safe, or its contract allows it after a timeout."""

    failed: Failed
    after: float | None
    otherwise: ToolOutcome


class NotBegun(Struct, frozen=True, gc=False):
    """It was stopped after its start was recorded and before its body ran: it had no effect."""


AttemptEnd: TypeAlias = ToolOutcome | Again | NotBegun


class EndsAs(Exception):
    """Raised by tools of ours that know an outcome which is neither a value nor a failure."""

    def __init__(self, outcome: ToolOutcome) -> None:
        self.outcome = outcome
        super().__init__(type(outcome).__name__)


def raised(error: BaseException, retries: Retries) -> ToolOutcome | Again:
    """Return what an exception of a body means. `Retry` says itself that another attempt is safe; for other exceptions
    the tool says so, by `Retries(on=…)`."""
    match error:
        case EndsAs():
            return error.outcome
        case ToolError():
            failed = failure(error)
        case _:
            failed = Failed("tool_raised", f"{type(error).__name__}: {model_text(error)}")
    asks = isinstance(error, Retry)
    if (asks or retries.on is not None) and is_retried(replace(retries, on=None) if asks else retries, error, True):
        return Again(failed, error.after if isinstance(error, Retry) else None, failed)
    return failed


def cut_off(recovery: Recovery, reason: str | None, timed_out: bool) -> ToolOutcome | Again:
    """How a body ends that was cancelled, for this `reason`: unknown, unless it cancelled itself."""
    if reason is None:
        return Failed("tool_raised", "CancelledError: the tool cancelled itself")
    unknown = OutcomeUnknown(reason)
    if timed_out and recovery == "rerun":
        return Again(Failed("timeout", reason), None, unknown)
    return unknown


def failure(error: ToolError) -> Failed:
    """What a tool told us went wrong, as far as it can be stored."""
    try:
        return Failed(clean_text(error.code), clean_text(error.message), clean(error.data))
    except Exception:  # the tool put anything there, and its methods ran
        return Failed("tool_error", error_text(error))


# ---------------------------------------------------------------------- what that means


class StopCause(Enum):
    """Why attempts are stopped: their turn or process is cancelled, or the Runtime is left."""

    CANCELLED = "cancelled"
    LEFT = "left"


class EndCall(Struct, frozen=True, gc=False, tag="end_call"):
    """The call has ended. `harmless`: the last attempt said that it had no effect."""

    outcome: ToolOutcome
    harmless: bool = False


class TryAgain(Struct, frozen=True, gc=False, tag="try_again"):
    """Record the failure, and attempt it again when the pause is over; `after` is the pause that the tool asked for."""

    failed: Failed
    after: float | None = None


class Leave(Struct, frozen=True, gc=False, tag="leave"):
    """Record no end: the next owner finds a started call, and its contract decides."""


class Withdraw(Struct, frozen=True, gc=False, tag="withdraw"):
    """Take the recorded start back: what is on disk must not say that its body may have run."""


AttemptVerdict: TypeAlias = EndCall | TryAgain | Leave | Withdraw


def settle(
    end: AttemptEnd, call: CallRecord, contract: ToolSpec | None, stop: StopCause | None = None, room: bool = True
) -> AttemptVerdict:
    """What the end of an attempt means for its call, which is recorded as started.

    `contract` is None where the tool is gone. Without `room` for more records there is no further attempt.
    """
    if isinstance(end, NotBegun):
        return Withdraw()
    retries, recovery = (0, "once") if contract is None else (contract.retries, contract.recovery)
    again, outcome = isinstance(end, Again), end.otherwise if isinstance(end, Again) else end
    if isinstance(end, Again) and stop is not StopCause.CANCELLED and room and call.attempts - call.repeated <= retries:
        return TryAgain(end.failed, end.after)
    unknown = isinstance(outcome, OutcomeUnknown)
    if stop is StopCause.LEFT:
        if unknown and (recovery != "once" or call.background):
            return Leave()  # the next owner runs it again, asks a person, or registers its process again
        if call.deferred and (unknown or again):
            return Leave()  # its key may have been handed out: it stays on its wait
    return EndCall(outcome, harmless=again and not unknown)
