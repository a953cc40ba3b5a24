"""Records: the journals of turns and of durable functions, answered from on replay.

A turn is one `Said`, then what happened in order, then one `Closed`; once committed, its records are the nodes of the
session. A turn that is continued has `Reopened` behind its `Closed`, and another `Closed` at its new end. A record
holds, besides its outcome, what was gathered since the record before it (`Slot`), so the newest record always tells the
whole state.

In a durable function, every call of its context has a key: its number within its branch, after the branch's own key. A
key that has a `Done` is never done again. `ordered`, on the first record of a journal, says that results were handed
out in the order of their records; a journal without it was begun by code that did not.

Tags carry a version; a change that old readers cannot bear gets a new tag beside the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from perdure.model.llm import ModelChoice, Stop, Usage
from perdure.model.message import Message, Part, Scalar, Text, ToolCall
from perdure.model.outcome import Outcome
from perdure.model.plugin import Decision, Issue, PluginSnapshot
from perdure.model.tool import Artifact, ToolOutcome

InputKind: TypeAlias = Literal["queue", "steer", "note"]
SteerBoundary: TypeAlias = Literal["after_work", "before_completion"]
"""When a steered input joins the running turn: at the first boundary that comes, or when the turn would end."""


class Delivered(Struct, frozen=True, gc=False):
    """An input that reached a running turn: its ordinal in the session, and what it said."""

    input: int
    message: Message


class Slot(Struct, frozen=True, gc=False, omit_defaults=True):
    """What was gathered between two records. Empty for most records, and then not written.

    `messages` are said here; `queued` are said by plugins once the calls of the newest reply have their results.
    `decisions` are what plugins decided about this record's call or turn, `snapshots` the state of plugins that has
    changed since the record before, `tool_state` what was decided for single tools (None: nothing any more). `last`
    marks the records of the step that a spent step limit granted. `children` are sessions about to be begun: their
    cost is part of this one's.
    """

    delivered: tuple[Delivered, ...] = ()
    messages: tuple[Message, ...] = ()
    decisions: tuple[Decision, ...] = ()
    snapshots: dict[str, PluginSnapshot] | None = None
    tool_state: dict[str, bool | None] | None = None
    elapsed_ms: int = 0
    last: bool = False
    queued: tuple[Message, ...] = ()
    issues: tuple[Issue, ...] = ()
    children: tuple[str, ...] = ()


class Said(Struct, frozen=True, gc=False, tag="said.1", omit_defaults=True):
    """An accepted input. `op` names the acceptance, so that a lost reply can be read back.

    `wakes` are the processes that it reports: then the runtime wrote the input, not a person. `depth` counts the
    wakes that led to it: 0 for what was said from outside, one more for each wake by work that a turn has started.
    `metadata` is the input's own, beside that of its session. `boundary` is the first one of a running turn at which a
    steered input may join it.
    """

    message: Message
    at: int = 0
    op: str = ""
    kind: InputKind = "queue"
    key: str | None = None
    wakes: tuple[str, ...] = ()
    depth: int = 0
    choice: ModelChoice | None = None
    metadata: dict[str, Scalar] = {}
    boundary: SteerBoundary = "after_work"


class Joined(Struct, frozen=True, gc=False, tag="joined.1"):
    """This input did not open a turn: it was delivered into `turn`."""

    turn: int


class Replied(Struct, frozen=True, gc=False, tag="replied.1", omit_defaults=True):
    """A model answered. `started` lists the calls whose start this record is; `store` is the id of the store that they
    started in, which their idempotency keys are made from.

    `interrupted` counts earlier asks of the same step that a crash cut off: their usage is unknown. `dropped` counts
    its calls where they were more than one reply may ask for: none of them is kept, and none was made.

    How it was read is the rest (`model.protocol.Reading`): `cell` is where in its text the code of a cell stands,
    `fault` why nothing could be made of it, `cells` which of its calls are cells.
    """

    step: int
    parts: tuple[Part, ...]
    usage: Usage | None = None
    stop: Stop = "end"
    model: str = ""
    started: tuple[int, ...] = ()
    attempt: int = 1
    interrupted: int = 0
    at: int = 0
    slot: Slot | None = None
    store: str = ""
    dropped: int = 0
    cell: tuple[int, int] | None = None
    fault: str = ""
    cells: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.parts if type(part) is Text])

    @property
    def code(self) -> str | None:
        """The code of its cell, if it has one."""
        return None if self.cell is None else self.text[slice(*self.cell)]


class Answered(Struct, frozen=True, gc=False, omit_defaults=True):
    """How the wait of a call ended: the verdict, by whom and why. A value that was given is the call's outcome.

    Verdicts without a person: `expired`, its time ran out; `revoked`, the call ended by itself and its key with it.
    """

    verdict: str
    by: str = ""
    reason: str = ""


class Started(Struct, frozen=True, gc=False, tag="started.1", omit_defaults=True):
    """A call is about to run that did not start with its model reply. `call` is `<step>.<index>`.

    `background`: it runs as a process, whose id is the call's. `approved` says who approved of it, `answer` who had it
    run again. `store` is the id of the store that the call's first attempt started in; later attempts go by that one.
    `shown` are the arguments with marks in place of secrets, where they hold any.
    """

    call: str
    args: dict[str, Any]
    attempt: int = 1
    payload: Any = None
    approved: Any = None
    deferred: bool = False
    repeated: int = 0
    at: int = 0
    slot: Slot | None = None
    background: bool = False
    answer: Answered | None = None
    store: str = ""
    shown: dict[str, Any] | None = None


class Called(Struct, frozen=True, gc=False, tag="called.1", omit_defaults=True):
    """A cell has asked for calls: number `first` and those after it, as the cell asked, before preparation and plugins.

    The cell itself is in the reply of its step. `started` are the numbers of those whose start this record is, in the
    store with the id `store`. The end of the cell is an `Ended` whose `call` is the step alone. Where the cell itself
    is a call of the reply, `cell` is that call (`<step>.<index>`), and the end of the call is that of the cell.
    """

    step: int
    first: int
    calls: tuple[ToolCall, ...]
    started: tuple[int, ...] = ()
    at: int = 0
    slot: Slot | None = None
    store: str = ""
    cell: str = ""

    @property
    def key(self) -> str:
        """What the keys of the calls begin with."""
        return self.cell or str(self.step)


INTERRUPTED = "interrupted"
"""The code of an attempt that was cut off: its usage is unknown."""


class Faltered(Struct, frozen=True, gc=False, tag="faltered.1", omit_defaults=True):
    """An attempt failed and the next one is due at `due` (ms). `call` is empty for a model call.

    `begun`: a part of the model's answer had come, so that it has a cost that was not reported.
    Of several models that may answer, the next attempt asks number `candidate`; with `final`, the one that failed is
    not asked again in this step. `model` is the name of the one that failed.
    """

    code: str
    message: str
    due: int
    attempt: int = 1
    step: int = 0
    call: str = ""
    at: int = 0
    slot: Slot | None = None
    begun: bool = False
    candidate: int = 0
    final: bool = False
    model: str = ""


class Ended(Struct, frozen=True, gc=False, tag="ended.1", omit_defaults=True):
    """A tool call ended. `attempts` were made, `repeated` of them because a crash left the one before unknown.

    `artifacts` are what the last attempt put. `answer` is how its wait ended, if that ended it. `withheld`: a plugin
    that decides what the model sees of a result failed, and this is shown in its place.
    """

    call: str
    outcome: ToolOutcome
    attempts: int = 1
    repeated: int = 0
    ms: int = 0
    at: int = 0
    slot: Slot | None = None
    artifacts: tuple[Artifact, ...] = ()
    answer: Answered | None = None
    withheld: str = ""


class Asking(Struct, frozen=True, gc=False, tag="asking.1", omit_defaults=True):
    """A direct completion is about to be asked. One that no `Completed` follows was cut off: its usage is unknown."""

    key: str
    label: str
    at: int = 0


class Completed(Struct, frozen=True, gc=False, tag="completed.1", omit_defaults=True):
    """A direct completion: the model was asked once, outside of the conversation.

    `key` says where in the turn and what: a hook that runs again after a crash and asks the same is answered from here.
    `interrupted` counts earlier asks of the same that a crash cut off. `error` is the code of what came in place of an
    answer; a replay is not answered from that, and `usage` is then None where something may have been spent. An answer
    that is more than text is in `parts`, and `text` is empty.
    """

    key: str
    label: str
    text: str
    usage: Usage | None = None
    model: str = ""
    at: int = 0
    slot: Slot | None = None
    interrupted: int = 0
    error: str = ""
    stop: Stop = "end"
    parts: tuple[Part, ...] = ()

    def answer(self) -> tuple[Part, ...]:
        return self.parts or ((Text(self.text),) if self.text else ())


class Framed(Struct, frozen=True, gc=False, tag="framed.1", omit_defaults=True):
    """A new frame: prompts show `summary` in place of everything before this turn. History is never rewritten."""

    reason: str
    summary: tuple[Message, ...] = ()
    at: int = 0
    slot: Slot | None = None


class Noted(Struct, frozen=True, gc=False, tag="noted.1", omit_defaults=True):
    """Something is about to happen that what was gathered cannot wait for: a call that parks, a child session."""

    slot: Slot | None = None
    at: int = 0


class Closed(Struct, frozen=True, gc=False, tag="closed.1", omit_defaults=True):
    """The commit's own node. A finished turn's text is that of the last reply and is not written again.

    `usage` is what the turn's own model calls cost, `ledger` what else was asked for it, by label. `prelude` stands
    before the first turn of a child session that was begun with messages. `rest` are records of the turn that no
    ordinal was left for: `load_turns` gives them back before this one.
    """

    outcome: Outcome
    usage: Usage
    reply: Replied | None = None
    at: int = 0
    slot: Slot | None = None
    ledger: dict[str, Usage] | None = None
    prelude: tuple[Message, ...] = ()
    rest: tuple[Replied | Called | Started | Faltered | Ended | Asking | Completed | Framed | Noted, ...] = ()


class Reopened(Struct, frozen=True, gc=False, tag="reopened.1", omit_defaults=True):
    """The turn ended without an answer, and is continued: `Closed` stands before it, and another one follows at its new
    end. `by` is who asked for that."""

    at: int = 0
    by: str = ""


class Spilled(Struct, frozen=True, gc=False, tag="spilled.1"):
    """Stands in a row for a record too large for one: its bytes are a blob beside the store."""

    digest: str
    size: int


Record: TypeAlias = (
    Said
    | Joined
    | Replied
    | Called
    | Started
    | Faltered
    | Ended
    | Asking
    | Completed
    | Framed
    | Noted
    | Closed
    | Reopened
)
RecordRow: TypeAlias = Record | Spilled
"""What a node's row may hold."""


def since_reopened(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records since a turn was continued last; all of them for a turn that never was."""
    for index in range(len(records) - 1, 0, -1):
        if type(records[index]) is Reopened:
            return records[index + 1 :]
    return records


def slots(records: Iterable[Record]) -> Iterator[Slot]:
    """What was gathered on the way, in order. A reply that rides in a commit has a slot of its own."""
    for record in records:
        for each in (record.reply, record) if type(record) is Closed else (record,):
            slot = getattr(each, "slot", None)
            if slot is not None:
                yield slot


# ------------------------------------------------------------- durable functions


StepKind: TypeAlias = Literal[
    "step", "sleep", "signal", "result", "start", "emit", "now", "gather", "any", "all", "tell", "stop", "checkpoint"
]


class Fault(Struct, frozen=True, gc=False, omit_defaults=True):
    """How a step failed, as far as it can be stored, and where its code raised that."""

    code: str
    message: str = ""
    data: Any = None
    traceback: str = ""


class Begun(Struct, frozen=True, gc=False, tag="begun.1", omit_defaults=True):
    """A step is about to run, or a wait has begun. `asked` is what it was asked for: another one is another code.

    `repeated` counts attempts made because a crash left the one before unknown. `life` is which begin of its process
    made this attempt of a step that may be repeated: the begins since then may each have made another. `store` is the
    id of the store that the first attempt started in.
    """

    key: str
    kind: StepKind
    name: str = ""
    asked: str = ""
    due: int | None = None
    attempt: int = 1
    repeated: int = 0
    at: int = 0
    life: int = 0
    store: str = ""
    ordered: bool = False


class StepFaltered(Struct, frozen=True, gc=False, tag="faltered.1", omit_defaults=True):
    """An attempt of a step failed, and the next one is due at `due`."""

    key: str
    code: str
    message: str
    due: int
    attempt: int = 1
    at: int = 0
    traceback: str = ""


class Done(Struct, frozen=True, gc=False, tag="done.1", omit_defaults=True):
    """How it ended: with a value, a fault, out of time, cut off by a cancel request, or not known (`unknown`).

    `event` is the number of the signal that it took. `dropped`: it was cut off because another branch was chosen.
    """

    key: str
    kind: StepKind
    name: str = ""
    asked: str = ""
    value: Any = None
    fault: Fault | None = None
    unknown: str | None = None
    late: bool = False
    cut: bool = False
    dropped: bool = False
    event: int | None = None
    attempts: int = 1
    repeated: int = 0
    ms: int = 0
    at: int = 0
    ordered: bool = False


class Segment(Struct, frozen=True, gc=False, tag="segment.1", omit_defaults=True):
    """The function may begin again from here: `state` is what it kept, `args` its new arguments if it has new ones.

    What was recorded before is gone. No signal up to event `floor` waits any more, nor do those in `taken`. `cut`: a
    cancel request has reached the function already.
    """

    number: int
    state: Any = None
    args: dict[str, Any] | None = None
    floor: int = 0
    taken: tuple[int, ...] = ()
    cut: bool = False
    at: int = 0
    ordered: bool = False


StepRecord: TypeAlias = Begun | StepFaltered | Done | Segment
StepRow: TypeAlias = StepRecord | Spilled
