"""Records: what a turn writes down while it runs, and the nodes of the session once it is committed.

A turn is one `Said`, then what happened in order, then one `Closed`. A record holds, besides its outcome, what was
gathered since the record before it (`Slot`), so the newest record always tells the whole state. Tags carry a version;
a change that old readers cannot bear gets a new tag beside the old one.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from mainstay.model.llm import Stop, Usage
from mainstay.model.message import Message, Part
from mainstay.model.outcome import Outcome
from mainstay.model.tool import ToolOutcome

InputKind: TypeAlias = Literal["queue", "steer", "note"]


class Delivered(Struct, frozen=True, gc=False):
    """An input that reached a running turn: its ordinal in the session, and what it said."""

    input: int
    message: Message


class Slot(Struct, frozen=True, gc=False, omit_defaults=True):
    """What was gathered between two records. Empty for most records, and then not written.

    `last` marks the records of the step that a spent step limit granted.
    """

    delivered: tuple[Delivered, ...] = ()
    messages: tuple[Message, ...] = ()
    decisions: tuple[Any, ...] = ()
    snapshots: dict[str, Any] | None = None
    tool_state: dict[str, Any] | None = None
    elapsed_ms: int = 0
    last: bool = False


class Said(Struct, frozen=True, gc=False, tag="said.1", omit_defaults=True):
    """An accepted input. `op` names the acceptance, so that a lost reply can be read back."""

    message: Message
    at: int = 0
    op: str = ""
    kind: InputKind = "queue"
    key: str | None = None


class Joined(Struct, frozen=True, gc=False, tag="joined.1"):
    """This input did not open a turn: it was delivered into `turn`."""

    turn: int


class Replied(Struct, frozen=True, gc=False, tag="replied.1", omit_defaults=True):
    """A model answered. `started` lists the calls whose start this record is.

    `interrupted` counts earlier asks of the same step that a crash cut off: their usage is unknown.
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


class Started(Struct, frozen=True, gc=False, tag="started.1", omit_defaults=True):
    """A call is about to run that did not start with its model reply. `call` is `<step>.<index>`."""

    call: str
    args: dict[str, Any]
    attempt: int = 1
    payload: Any = None
    approved: Any = None
    deferred: bool = False
    repeated: int = 0
    at: int = 0
    slot: Slot | None = None


INTERRUPTED = "interrupted"
"""The code of an attempt that was cut off: its usage is unknown."""


class Faltered(Struct, frozen=True, gc=False, tag="faltered.1", omit_defaults=True):
    """An attempt failed and the next one is due at `due` (ms). `call` is empty for a model call."""

    code: str
    message: str
    due: int
    attempt: int = 1
    step: int = 0
    call: str = ""
    at: int = 0
    slot: Slot | None = None


class Ended(Struct, frozen=True, gc=False, tag="ended.1", omit_defaults=True):
    """A tool call ended. `attempts` were made, `repeated` of them because a crash left the one before unknown."""

    call: str
    outcome: ToolOutcome
    attempts: int = 1
    repeated: int = 0
    ms: int = 0
    at: int = 0
    slot: Slot | None = None


class Framed(Struct, frozen=True, gc=False, tag="framed.1", omit_defaults=True):
    """A new frame: prompts show `summary` in place of everything before. History itself is never rewritten."""

    reason: str
    summary: tuple[Message, ...] = ()
    at: int = 0
    slot: Slot | None = None


class Closed(Struct, frozen=True, gc=False, tag="closed.1", omit_defaults=True):
    """The commit's own node. A finished turn's text is that of the last reply and is not written again."""

    outcome: Outcome
    usage: Usage
    reply: Replied | None = None
    at: int = 0
    slot: Slot | None = None


class Spilled(Struct, frozen=True, gc=False, tag="spilled.1"):
    """Stands in a row for a record too large for one: its bytes are a blob beside the store."""

    digest: str
    size: int


Record: TypeAlias = Said | Joined | Replied | Started | Faltered | Ended | Framed | Closed
Row: TypeAlias = Record | Spilled
"""What a node's row may hold."""
