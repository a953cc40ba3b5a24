"""What runs processes: an engine for each kind. The runtime ships some; plugins may add more.

A worker that owns a process gives it to its engine as an `EngineRun`. The engine does the work and returns its outcome.

    begin               the start of the work is on disk, and this worker owns it: before anything acts outside
    emit, progress      events of the process, for its observers
    set_external_ref    where the work is done, if that is elsewhere: found in `record.external_ref` after a crash
    journal             records and blobs of the engine's own, read again by the next run
    signals, listen     what others write to the process while it runs
    guard               waits for the work, unless something ends this run first
    rest, place         a run that only waits needs no place among those that run at once
    park                the process waits on disk, and nothing of it stays in memory

Four things end a run besides the work itself. An engine tells them apart by their types:

    CancelRequested     the process was asked to end: stop the work, and return `Cancelled`
    Leaving             this worker gives the process up, and its recovery contract says what becomes of it: work that
                        lives elsewhere goes on, and the next run finds it
    Unloaded            the process is parked
    Fenced              another worker owns it (`perdure.errors`)

Let the last three through. Any other exception leaves the process stuck, until a person resumes it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from perdure.model.process import (
    Event,
    ParentEnd,
    ProcessOutcome,
    ProcessRecord,
    ProcessRow,
    Registration,
    Signal,
    WaitOn,
    WakePolicy,
)
from perdure.model.record import StepRecord
from perdure.model.session import CancelRequest
from perdure.model.write import Advanced, ProcessLimits, ProcessScope
from perdure.ports.host import Clock, Random
from perdure.ports.store import Store

R = TypeVar("R")
T = TypeVar("T")


class CancelRequested(Exception):
    """The process was asked to end."""

    def __init__(self, request: CancelRequest) -> None:
        self.request = request
        super().__init__(f"asked to end by {request.by or 'an unnamed caller'}: {request.reason}")


class Leaving(Exception):
    """The Runtime is left, or another worker owns the scope: a turn or a process stays open for the next owner."""


class Unloaded(BaseException):
    """The process leaves this worker's memory: it is parked, or another worker goes on with it."""


class ProcessListener(Protocol):
    """Given what happens to a process while it runs, on the event loop. It must neither wait nor raise."""

    def cancel(self, request: CancelRequest) -> None:
        """It was asked to end. May be called more than once."""
        ...

    def leave(self) -> None:
        """The Runtime is left, or another worker owns the process."""
        ...

    def on_event(self, sequence: int, kind: str, payload: Any) -> None:
        """Another writer has added an event to the process."""
        ...

    def process_ended(self, process_id: str) -> None:
        """A process has ended whose end was watched (`EngineRun.watch_end`)."""
        ...

    def awaited_signals(self) -> tuple[str, ...] | None:
        """The signals that it waits for in memory; None where that is not known."""
        ...


class EngineJournal(Protocol):
    """The records of a process, which only its engine reads. They are gathered, and written by the next `flush`."""

    @property
    def read_to(self) -> int:
        """The number of the last event that was read, and given to the listener."""
        ...

    async def load(self) -> list[StepRecord]:
        """All that earlier runs have recorded. Call it before recording anything where there was an earlier run."""
        ...

    def record(self, record: StepRecord, repeats: bool = False) -> None:
        """With `repeats` it only says that something is attempted again: an owner that dies then made no progress."""
        ...

    def event(self, event: Event) -> None:
        """An event that goes with the next write."""
        ...

    async def flush(self) -> Advanced:
        """Make all that was gathered durable: what the store answered."""
        ...

    async def report(self) -> None:
        """The same, and progress too though nothing else is to be written."""
        ...

    async def cut(self, segment: StepRecord, event: Event) -> None:
        """Write this record, and forget all before it."""
        ...

    async def keep(self, data: bytes) -> str:
        """Put a blob of any size, which belongs to the process with the next write: its digest."""
        ...

    async def keep_file(self, path: str, patient: bool = True) -> tuple[str, int]:
        """The same for a file: its digest and its size. Not `patient`, it raises StoreUnavailable on a full disk, in
        place of waiting for room."""
        ...

    async def patiently(self, work: Callable[[T], Awaitable[R]], subject: T) -> R:
        """Await `work(subject)`, again and again while the store is unavailable."""
        ...


class ChildOptions(Struct, frozen=True):
    """How a child is started."""

    parent_end: ParentEnd = "cancel"
    label: str = ""
    wake: WakePolicy = "none"


class EngineHost(Protocol):
    """What an engine may use of the Runtime that it runs in."""

    @property
    def store(self) -> Store: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def random(self) -> Random: ...

    @property
    def deps(self) -> Any:
        """Live objects of the host that all runs share; None where they are made for each run (`EngineRun.deps`)."""
        ...

    async def start_child(
        self, parent: ProcessRow, key: str, what: Any, args: Mapping[str, Any], options: ChildOptions
    ) -> str:
        """Start a process for another one: its id. Asked for twice under one key, it is started once."""
        ...

    async def signal(self, process_id: str, name: str, payload: Any, key: str) -> int:
        """Send a signal, once for each key: the number of its event."""
        ...

    async def cancel(self, process_id: str, request: CancelRequest) -> None:
        """Ask a process to end."""
        ...


class EngineRun(Protocol):
    """One process, owned by this worker, from here to its end or to where it leaves memory."""

    @property
    def row(self) -> ProcessRow:
        """The process as it was when this run began."""
        ...

    @property
    def registration(self) -> Registration: ...

    @property
    def record(self) -> ProcessRecord:
        """What is known of it now, as far as this worker has read."""
        ...

    @property
    def scope(self) -> ProcessScope:
        """The owner and generation that every write of this run carries."""
        ...

    @property
    def attempt(self) -> int:
        """1, and one more for every worker that died on it. Reattaching to work that lives elsewhere counts nothing."""
        ...

    @property
    def resumed(self) -> bool:
        """Whether its work had begun before this run."""
        ...

    @property
    def host(self) -> EngineHost: ...

    @property
    def deps(self) -> Any:
        """Live objects of the host for this run: `ctx.deps`."""
        ...

    @property
    def journal(self) -> EngineJournal: ...

    # ------------------------------------------------------------------ writing

    async def begin(self) -> None:
        """Make the start of the work, and all that was gathered, durable, and read what others wrote meanwhile.

        Call it before anything acts outside. Raises `Fenced` if another worker may own the process by now.
        """
        ...

    async def emit(self, event: str, payload: Any = None) -> None:
        """Add an event that the process declares; on disk when this returns."""
        ...

    def progress(self, value: Any) -> None:
        """How far it is: written with what is written next, a later value replaces it. May be called on any thread."""
        ...

    async def set_external_ref(self, reference: Any) -> None:
        """Say where the work is done, as JSON; on disk when this returns, in a write that only the owner can make."""
        ...

    # ------------------------------------------------------------------ what others write

    @property
    def cancel_request(self) -> CancelRequest | None: ...

    @property
    def leaving(self) -> bool: ...

    def check(self) -> None:
        """Raise CancelRequested or Leaving, if one holds. A request goes first: it ends the process for good."""
        ...

    def signals(self, after: int = 0) -> AsyncIterator[Signal]:
        """Signals with numbers above `after`, in order, and then as they arrive. Ends when the run is to stop.

        What a run has taken is given again to the next one, unless it asks for those after it: record the number of the
        last signal that was dealt with, or deal with them in a way that bears repeating.
        """
        ...

    async def listen(self, listener: ProcessListener, after: int | None = None) -> None:
        """Give this listener what happens from now on, in place of the one before, and every event after number
        `after`."""
        ...

    async def watch_end(self, process_id: str) -> ProcessRow | None:
        """Give the listener the end of another process, if that is still ahead. Its row now; None if there is none."""
        ...

    async def catch_up(self) -> None:
        """Read what others wrote. The worker does this by itself when it learns of a write."""
        ...

    # ------------------------------------------------------------------ waiting

    async def guard(self, work: Coroutine[Any, Any, R], seconds: float | None = None) -> R:
        """Run `work` unless the process is asked to end or the Runtime is left: then it is cancelled, and
        CancelRequested or Leaving is raised. TimedOut when `seconds` pass first."""
        ...

    def rest(self, resting: bool = True) -> None:
        """Give up the place of this run, because it only waits; `False`: it works again, in a place if one is free."""
        ...

    @property
    def placed(self) -> bool:
        """Whether it has a place."""
        ...

    async def place(self) -> None:
        """Wait for a place, unless it has one: after a rest, before anything acts outside."""
        ...

    async def park(self, *waits: WaitOn) -> None:
        """Leave the process on disk until one of `waits` is over, then another run begins: raises Unloaded.

        Returns when something has happened already that this run must act on first; it has been read then.
        """
        ...


class Engine(Protocol):
    """Runs the processes of one kind.

    One that has `draft` too (`Drafts`) says what `runtime.start` may be given besides a registration. Where the host's
    live objects are made for each run, one with `uses_deps = False` is run without them. With `needs_place = False` a
    process begins also where all places are taken, because it rests at once; with `needs_definitions = False`, also in
    a Runtime that has no agents and no functions.
    """

    @property
    def kind(self) -> str: ...

    def knows(self, registration: Registration) -> bool:
        """Whether this engine has what it takes to run it. What no engine can run waits, and `doctor` says so."""
        ...

    async def run(self, run: EngineRun) -> ProcessOutcome:
        """Do the work and return how it ended. After a crash it is called again where the recovery contract says so."""
        ...


class AdmittedCommand(NamedTuple):
    """A command that may be registered: where it will be found if it begins here, how many there may be, and what waits
    until its program runs, or could not be run."""

    reference: Any
    limits: ProcessLimits
    begun: Callable[[], Awaitable[None]]


class CommandStarts(Protocol):
    """What the engine of commands does about a start."""

    def admitted(
        self, registration: Registration, known: ProcessRow | None, what: Any
    ) -> AbstractContextManager[AdmittedCommand]:
        """Make ready what a command needs to begin, while it is registered, unless it is `known`."""
        ...

    async def check_output(self, registration: Registration) -> None:
        """Raise TooManyCommands where the running commands of its session have written as much as they may."""
        ...

    def not_begun_here(self, process_id: str) -> None:
        """It was registered, and another worker runs it, or will: undo what was made ready."""
        ...

    async def sweep(self) -> int:
        """Delete what is kept of commands that were pruned; how many."""
        ...


class Drafts(Protocol):
    """Engines that may be asked to start something."""

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | Awaitable[Registration] | None:
        """The registration of what is to be started, with "" as its id; None when it is for another engine. It is
        awaited where something must be found out first that takes its time."""
        ...
