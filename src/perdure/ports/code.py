"""What runs the code that a model wrote.

An executor knows nothing of turns, records or tools: it is given source and the specs of functions that the source may
call, and tells of each call as data (`model.code`). Who answers, in which order and from which record is its caller's
matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from perdure.model.code import CodeAnswer, CodeLimits, CodeStep, Paused, Variable
from perdure.model.tool import ToolSpec


class Repl(Protocol):
    """The variables of one session, and the cell that runs on them. One caller at a time.

    It holds no worker of its executor while it is idle or waits long for an answer. A step that is cancelled leaves a
    REPL that can only be rolled back or closed.
    """

    @property
    def contains(self) -> str:
        """What was given to `dump` for the state it was opened from, under the same seal; "" for a new one."""
        ...

    @property
    def paused(self) -> Paused | None:
        """While a cell waits: every call of it that has no answer yet, in order. None between cells."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that cells have bound so far."""
        ...

    @property
    def size(self) -> int:
        """About how many bytes it holds in this process between two cells."""
        ...

    async def begin(self, code: str, tools: Sequence[ToolSpec], *, at: int, seed: str, check: bool = True) -> CodeStep:
        """Run a cell until it waits or ends. Between cells only.

        `at` is what its clock reads, in milliseconds since 1970, until an answer moves it. `seed` is where random
        numbers come from: unpredictable to the model, and kept by the caller. Without `check` the code was checked
        when it ran first.
        """
        ...

    async def resume(self, answer: CodeAnswer, *, at: int = 0) -> CodeStep:
        """Answer one call that has no answer yet, and run on. `at` moves the clock; it never goes back."""
        ...

    async def rollback(self) -> None:
        """Drop the cell that runs: the variables are as before `begin`."""
        ...

    async def variables(self) -> list[Variable]:
        """What the cells have bound, with type and size. Between cells only."""
        ...

    async def dump(self, contains: str) -> bytes:
        """The whole state, in the middle of a cell or between two, to be opened in any process that has the key.

        `contains` names the last record that is in it, in its caller's words. Raises DumpRefused where the state is
        gone with its worker, or where there can be none.
        """
        ...

    async def close(self) -> None: ...


class Executor(Protocol):
    """Opens REPLs. One for each Runtime; its workers start when they are needed."""

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> CodeLimits: ...

    @property
    def saves(self) -> bool:
        """Whether its REPLs can be dumped. Those of others are made again by running their cells."""
        ...

    def describe(self, tools: Sequence[ToolSpec], output_schema: dict[str, Any] | None = None) -> str:
        """What the prompt says of this executor: what of Python it supports, and the functions with their types."""
        ...

    def binds(self, code: str) -> tuple[str, ...]:
        """The names that a cell binds for later ones, without running it."""
        ...

    def fault(self, tools: Sequence[ToolSpec]) -> str | None:
        """Why these tools cannot be functions side by side, or None."""
        ...

    async def open(self, state: bytes | None = None, tools: Sequence[ToolSpec] = ()) -> Repl:
        """A new REPL, or the one that was dumped. Raises DumpRefused: then the cells are to be run again.

        `tools` are those that the cell in the dump may go on to call: today's, as for a cell that begins.
        """
        ...

    async def aclose(self) -> None: ...
