"""What runs processes: an engine for each kind. The runtime ships some; plugins may add more."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from mainstay.model.process import ProcessOutcome, ProcessRecord, Registration

R = TypeVar("R")


class EngineRun(Protocol):
    """One process in the hands of one worker."""

    @property
    def registration(self) -> Registration: ...

    @property
    def record(self) -> ProcessRecord: ...

    @property
    def attempt(self) -> int:
        """1, and one more for every worker that died on it."""
        ...

    @property
    def resumed(self) -> bool:
        """Whether its work had begun before this run."""
        ...

    async def begin(self) -> None:
        """Make the start of the work a durable fact. Call it before anything acts outside."""
        ...

    async def guard(self, work: Coroutine[Any, Any, R], seconds: float | None = None) -> R:
        """Run `work` unless the process is asked to end or the Runtime is left: then it is cancelled, and what led to
        that is raised. Let it through."""
        ...

    async def emit(self, event: str, payload: Any = None) -> None:
        """Add an event that the process declares."""
        ...

    def progress(self, value: Any) -> None: ...


class Engine(Protocol):
    """Runs the processes of one kind. What it raises by itself leaves the process stuck, to be looked at."""

    @property
    def kind(self) -> str: ...

    def knows(self, registration: Registration) -> bool:
        """Whether this engine has what it takes to run it. What nobody knows waits, and `doctor` says so."""
        ...

    async def run(self, run: EngineRun) -> ProcessOutcome:
        """Do the work and say how it ended. After a crash it is called again where the recovery contract says so."""
        ...
