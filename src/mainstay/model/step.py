"""What a durable function writes down while it runs: the records of its journal, answered from on replay.

Every call of its context has a key: its number within its branch, after the branch's own key. A key that has a `Done`
is never done again. Tags carry a version, as those of turns do. `ordered`, on the first record of a journal, says that
results were handed out in the order of their records; a journal without it was begun by code that did not.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

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
    """How it ended: with a value, a fault, out of time, cut off by a cancel request, or nobody knows (`unknown`).

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


class SpilledStep(Struct, frozen=True, gc=False, tag="spilled.1"):
    """Stands in a row for a record too large for one: its bytes are a blob beside the store."""

    digest: str
    size: int


StepRecord: TypeAlias = Begun | StepFaltered | Done | Segment
StepRow: TypeAlias = StepRecord | SpilledStep
