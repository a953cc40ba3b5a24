"""The states of a turn.

A turn waits for exactly one thing at a time, and its state says for what:

    OPENING ──delivery──▶ ASKING ──reply with calls──▶ TOOLS ──all ended──▶ AFTER_WORK ──delivery──▶ ASKING
                             │  ▲                                                                       │
                     answer  │  └─ input arrived, or the output must be repaired ──┐                    │ budget spent
                             ▼                                                     │                    ▼
                    BEFORE_COMPLETION ──delivery (empty)──────────────────────▶ DONE ◀──────────────────┘

Nothing here waits, writes or reads a clock. Everything a turn knows is in `TurnState`, which is plain data: encode it,
decode it, and the machine built on it asks for the same effect again.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field

from mainstay.model.effect import AskedCall
from mainstay.model.llm import Usage
from mainstay.model.message import Message
from mainstay.model.outcome import Outcome
from mainstay.model.record import Delivered
from mainstay.model.transcript import Transcript


class Phase(Enum):
    """What the turn waits for."""

    OPENING = "opening"
    ASKING = "asking"
    TOOLS = "tools"
    AFTER_WORK = "after_work"
    BEFORE_COMPLETION = "before_completion"
    DONE = "done"

    # Members are singletons; the inherited hash is Python code, and a turn looks itself up at every step.
    __hash__ = object.__hash__


class TurnState(Struct):
    """Everything a turn knows. Only the machine changes it.

    `transcript` is what is recorded; `delivered` and `added` were gathered since and ride in the next record. `queued`
    was said by plugins while calls ran and is recorded: it is added when all of them have their results. `calls`
    restate the reply in hand, keyed `<step>.<index>`, until each has an outcome; `called` counts those of all replies.
    """

    turn_id: str
    transcript: Transcript
    phase: Phase = Phase.OPENING
    step: int = 1
    attempt: int = 1
    due: int = 0
    candidate: int = 0
    failed: tuple[int, ...] = ()
    last: bool = False
    calls: dict[str, AskedCall] = field(default_factory=dict)
    delivered: tuple[Delivered, ...] = ()
    added: tuple[Message, ...] = ()
    queued: tuple[Message, ...] = ()
    usage: Usage = Usage()
    progress: bool = False
    idle_steps: int = 0
    repairs: int = 0
    elapsed_ms: int = 0
    called: int = 0
    outcome: Outcome | None = None
