"""What passes between a turn and an interpreter that runs code which a model wrote.

A **cell** is one piece of code. It runs in a REPL, which keeps its variables between cells. A cell runs until no branch
of it can go on: then it is `Paused`, and lists the calls that came out of it since the step before. Each call is
answered by its number, one at a time; each answer leads to the next step. The last step is a `CellEnd`.

All of it is plain data: a call holds JSON, and what an interpreter does with an answer depends on nothing but the code,
the clock reading and the seed that the cell began with, and the answers in their order. So the same cell, run again
against recorded answers, makes the same calls.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

from perdure.errors import InvalidDefinition, quoted
from perdure.model import validate

FINISH = "finish"
"""The function of a cell that ends its turn with a value."""
SLEEP = "sleep"
"""The function of a cell that waits: `await sleep(3600)`, `asyncio.sleep` and `time.sleep` alike."""

RUN_CODE = "run_code"
"""The tool whose calls are cells, in tools mode: its argument `code` is run."""

CodeFault: TypeAlias = Literal["syntax", "check", "raised", "limit", "lost", "unfinished"]
"""How a cell failed: it does not parse; a check refused it before the run; an exception left it; a limit was reached;
its worker died; or it awaits what can never come."""

CodeLimit: TypeAlias = Literal["time", "memory", "output", "state", "recursion", "calls"]

RaiseKind: TypeAlias = Literal["failed", "denied", "invalid", "refused", "unknown"]
"""Why a call raises in the cell. "unknown" is the one that `except Exception` does not catch: the call may have had its
effect, and a loop that goes on after any failure would repeat it."""


LONGEST_RUN = 86_400
"""Seconds that the time limit of a cell may be."""


class CodeLimits(Struct, frozen=True, omit_defaults=True):
    """What one cell may use. A cell that reaches a limit ends, and the variables are as they were before it.

    `seconds` counts the time in which the interpreter works, not that in which the cell waits for a call; `memory` is
    what its values take; `output` is the bytes that it prints; `state` is the size of its variables as they are saved.
    """

    seconds: float = 30.0
    memory: int = 256 * 1024 * 1024
    output: int = 1024 * 1024
    state: int = 32 * 1024 * 1024
    recursion: int = 500
    calls: int = 10_000

    def __post_init__(self) -> None:
        if type(self.seconds) not in (int, float) or not 0 < self.seconds <= LONGEST_RUN:  # also what is no number
            raise InvalidDefinition(
                f"seconds={quoted(self.seconds)} is not usable: give more than 0, and {LONGEST_RUN:,} at most"
            )
        for what, least in (("memory", 1), ("output", 0), ("state", 1), ("recursion", 1), ("calls", 0)):
            validate.count(getattr(self, what), what, least, InvalidDefinition)


class CPython(Struct, frozen=True, omit_defaults=True):
    """Run the cells of an agent in full CPython, in the sandbox of commands: `Agent(mode="code", code=CPython())`.

    `packages` are folders, such as the site-packages of an environment, which cells may read and import from. The
    sandbox is refused where this machine cannot make one, unless `unsandboxed` accepts that: then a cell may do
    whatever this user may.
    """

    packages: tuple[str, ...] = ()
    limits: CodeLimits = CodeLimits()
    unsandboxed: bool = False


class CodeCall(Struct, frozen=True, omit_defaults=True):
    """A call that a cell made.

    `number` is the order in which the calls of a cell came out, from 0. `name` is the tool's name as the catalogue has
    it, or `finish` or `sleep`; `args` are by parameter name. A `sync` call stops the cell at its line, so nothing else
    of the cell can go on before its answer; it is the last of its step.
    """

    number: int
    name: str
    args: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    sync: bool = False


class CodeError(Struct, frozen=True, omit_defaults=True):
    """Why a cell ended without reaching its end.

    `message` is for the model and names the line. `kind` is the type of the exception where one left the cell, `which`
    the limit that was reached. `rolled_back`: the variables are as they were before the cell.
    """

    code: CodeFault
    message: str
    kind: str = ""
    which: CodeLimit | Literal[""] = ""
    line: int = 0
    rolled_back: bool = False


class Paused(Struct, frozen=True, omit_defaults=True, tag="paused"):
    """The cell waits for an answer: `calls` came out of it since the step before, in order."""

    calls: tuple[CodeCall, ...] = ()
    printed: str = ""


class CellEnd(Struct, frozen=True, omit_defaults=True, tag="end"):
    """The cell is over. `value` is its last expression as Python shows it, or None where there is nothing to show.

    `notes` are what the type check had to say beside: nothing that refuses a cell.
    """

    printed: str = ""
    value: str | None = None
    error: CodeError | None = None
    notes: tuple[str, ...] = ()


CodeStep: TypeAlias = Paused | CellEnd


class Given(Struct, frozen=True, tag="given"):
    """The call returned this, as plain JSON."""

    call: int
    value: Any = None


class Raise(Struct, frozen=True, tag="raise"):
    """The call raises in the cell."""

    call: int
    kind: RaiseKind
    message: str


class StopCell(Struct, frozen=True, tag="stop"):
    """The cell ends at this `sync` call: nothing after its line runs, no more calls come out, the variables stay."""

    call: int


CodeAnswer: TypeAlias = Given | Raise | StopCell


class Variable(Struct, frozen=True):
    """A variable of a REPL: `size` is its length where it has one, else None."""

    name: str
    type: str
    size: int | None = None
