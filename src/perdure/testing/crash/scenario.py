"""What a scenario under crash test is given (`Lab`), and what is left of it afterwards (`Played`, `Ending`).

An `Ending` is the content of a store in a form that two runs can be compared by, with the promises that every store
must keep already checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import msgspec
from msgspec import Struct, field

from perdure.engine.journal import load_turns
from perdure.errors import BlobMissing, InvalidInput, StoreError
from perdure.graph.view import View, turn_view
from perdure.lifecycle.process import replay
from perdure.model.ids import turn_id
from perdure.model.message import Message, ToolResult, unanswered
from perdure.model.outcome import kind_of
from perdure.model.process import ProcessRow, Success, WakeRow
from perdure.model.session import SessionRow
from perdure.model.tool import Ok
from perdure.model.transcript import STATUS
from perdure.model.write import ProcessFilter, SessionFilter
from perdure.ports.store import Store
from perdure.runtime import Runtime
from perdure.sessions.definition import Defined
from perdure.testing.crash.injection import (
    FaultInjector,
    InstrumentedAgent,
    InstrumentedStore,
    Ledger,
    LedgerLine,
    Point,
)

Scenario: TypeAlias = "Callable[[Lab], Awaitable[None]]"


class Lab:
    """What a scenario is given: a store and agents with fault injection, and a ledger for effects outside."""

    def __init__(self, store: Store, faults: FaultInjector, ledger: Ledger) -> None:
        self._raw, self._faults, self._ledger = store, faults, ledger
        self.store: Store = InstrumentedStore(store, faults)

    @property
    def incarnation(self) -> int:
        """1 in the first run, one more after every kill."""
        return self._faults.incarnation

    def runtime(self, agents: Iterable[Defined] = (), **options: Any) -> Runtime:
        """A Runtime on the lab's store, with every port of its agents instrumented."""
        return Runtime(self.store, agents=[self.agent(a) for a in agents], **options)

    def agent(self, agent: Defined) -> Defined:
        """An agent whose model and tools are instrumented, for a Runtime that you make yourself."""
        return InstrumentedAgent(agent, self._faults, self._ledger)

    async def effect(self, name: str, key: str, data: Any = None) -> None:
        """Write a line to the ledger, which no crash undoes. Call it where a tool has its effect."""
        line = LedgerLine(name, key, self.incarnation, data)

        async def happen() -> None:
            self._ledger.write(line)

        await self._faults.call("effect", f"effect {name}", happen)

    def effect_now(self, name: str, key: str, data: Any = None) -> None:
        """`effect` for a sync tool."""
        line = LedgerLine(name, key, self.incarnation, data)
        self._faults.call_in_thread("effect", f"effect {name}", lambda: self._ledger.write(line))

    async def mark(self, name: str) -> None:
        """Pass a point of your own."""
        await self._faults.reach("mark", name)

    @property
    def ledger(self) -> list[LedgerLine]:
        """All effects so far, of all incarnations."""
        return self._ledger.lines()

    async def until(self, check: Callable[[Store], Awaitable[bool]]) -> None:
        """Wait until `check` holds of the store; it is asked again after each write of this incarnation.

        Not while a call is under way: it may have changed the store although its caller never gets the reply.
        """
        while self._faults.current or not await check(self._raw):
            await self._faults.wait_returned()


# ---------------------------------------------------------------------- what is left in the store


class CallEnding(Struct, frozen=True):
    """A tool call of a committed turn."""

    call_id: str
    tool: str
    outcome: str
    attempts: int = 1
    repeated: int = 0


class SessionEnding(Struct, frozen=True):
    """A session as it is in the store. `turns` has the outcome of every committed turn by number."""

    id: str
    head: int
    state: str
    turn: int | None = None
    reason: str | None = None
    inbox: list[int] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    turns: dict[int, str] = field(default_factory=dict)
    calls: list[CallEnding] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    unknown_usage: int = 0
    generation: int = 0


class ProcessEnding(Struct, frozen=True):
    """A process as it is in the store. `told` has the states of its wakes, in order."""

    id: str
    status: str
    outcome: Any = None
    stuck: str | None = None
    attempts: int = 0
    events: list[str] = field(default_factory=list)
    steps: int = 0
    told: list[str] = field(default_factory=list)
    generation: int = 0


class Ending(Struct, frozen=True):
    """A whole store. `problems` are broken promises: unanswered calls, dangling references, unreadable history."""

    sessions: list[SessionEnding] = field(default_factory=list)
    orphans: int = 0
    problems: list[str] = field(default_factory=list)
    processes: list[ProcessEnding] = field(default_factory=list)

    def session(self, session_id: str) -> SessionEnding | None:
        return next((s for s in self.sessions if s.id == session_id), None)

    def process(self, process_id: str) -> ProcessEnding | None:
        return next((p for p in self.processes if p.id == process_id), None)


async def capture(store: Store, *, sweep: bool = True) -> Ending:
    """Read an open store. With `sweep` orphaned blobs are deleted first; referenced ones must survive that."""
    orphans = await store.sweep(grace=0) if sweep else 0
    problems: list[str] = []
    rows = await store.sessions(SessionFilter(limit=100_000))
    found = []
    for row in sorted(rows, key=lambda r: r.id):
        try:
            found.append(await _session(store, row, problems))
        except StoreError as error:
            problems.append(f"{row.id}: {error}")
    wakes = [w for state in ("pending", "enqueued", "discarded") for w in await store.wakes(state=state)]
    processes = [
        await _process(store, process, wakes, problems)
        for process in sorted(await store.processes(ProcessFilter(limit=100_000)), key=lambda p: p.id)
    ]
    return Ending(found, orphans, problems, processes)


async def _process(store: Store, row: ProcessRow, wakes: list[WakeRow], problems: list[str]) -> ProcessEnding:
    events = [event for _, _, event in await store.events(row.pid, limit=1_000_000)]
    if replay(events) != row.record:
        problems.append(f"process {row.id}: its record is not the fold of its events")
    if (outcome := row.record.outcome) is not None and isinstance(outcome, Success) and outcome.blob is not None:
        try:
            await store.blobs.get(outcome.blob.digest)
        except BlobMissing as error:
            problems.append(f"process {row.id}: {error}")
    return ProcessEnding(
        row.id,
        row.status,
        msgspec.to_builtins(outcome),
        row.stuck,
        row.attempts,
        [event.type for event in events],
        len(await store.steps(row.pid)),
        [wake.state for wake in sorted(wakes, key=lambda w: w.number) if wake.pid == row.pid],
        row.generation,
    )


async def _session(store: Store, row: SessionRow, problems: list[str]) -> SessionEnding:
    view, outcomes, calls, unknown = View(), dict[int, str](), list[CallEnding](), 0
    for turn in await load_turns(store, row.sid, 1, row.head):
        if turn.closed is None:
            continue
        view.extend(turn.number, turn.records, turn.closed.prelude)
        read = turn_view(turn_id(row.id, turn.number), turn.records)
        outcomes[turn.number] = kind_of(read.outcome)
        unknown += read.usage.unknown
        for call in read.tool_calls:
            status = STATUS[type(call.outcome)]
            calls.append(CallEnding(call.call_id, call.tool, status, call.attempts, call.repeated))
            if isinstance(call.outcome, Ok) and call.outcome.whole is not None:
                try:
                    await store.blobs.get(call.outcome.whole.digest)
                except BlobMissing as error:
                    problems.append(f"{call.call_id}: {error}")
    if open_calls := unanswered(view.messages):
        problems.append(f"{row.id}: cannot be continued, {open_calls} have no result")
    return SessionEnding(
        row.id,
        row.head,
        row.state,
        row.turn,
        row.reason,
        [m.input for m in await store.inbox(row.sid)],
        [w.id for w in await store.waits(row.sid) if w.state == "open"],
        outcomes,
        calls,
        [_one_line(m) for m in view.messages],
        unknown,
        row.generation,
    )


def _one_line(message: Message) -> str:
    """A message on one line: its role and words, or the results it holds."""
    results = [p for p in message.parts if isinstance(p, ToolResult)]
    if results:
        return "tool: " + ", ".join(f"{p.name} {p.status}" for p in results)
    calls = ", ".join(call.name for call in message.tool_calls)
    return f"{message.role}: {message.text}" + (f" [{calls}]" if calls else "")


# ---------------------------------------------------------------------- one run


class Played(Struct, frozen=True):
    """One run with its kills.

    `traces` has the points of each incarnation, `broken` the broken promises, and `unreached` the points at which it
    was to be killed and which it never passed.
    """

    ending: Ending
    ledger: list[LedgerLine]
    traces: list[list[Point]]
    broken: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Empty when all went well: no promise was broken, and every kill happened."""
        return [*self.broken, *(f"it ended without passing {point!r}" for point in self.unreached)]

    @property
    def model_calls(self) -> int:
        return sum(1 for line in self.ledger if line.name == "model")

    @property
    def effects(self) -> Counter[tuple[str, str]]:
        """How often each effect happened, by name and key."""
        return Counter((line.name, line.key) for line in self.ledger if line.name != "model")

    def count(self, name: str) -> int:
        return sum(1 for line in self.ledger if line.name == name)

    @property
    def repeated(self) -> int:
        return sum(count - 1 for count in self.effects.values())

    @property
    def repeated_by_tool(self) -> dict[str, int]:
        """Count the repeated effects by tool, or by the name given to `lab.effect`."""
        found = Counter[str]()
        for (name, _), count in self.effects.items():
            found[name] += count - 1
        return {name: count for name, count in sorted(found.items()) if count}

    @property
    def unknown(self) -> int:
        """Calls with an unknown outcome, and abandoned processes."""
        calls = sum(1 for s in self.ending.sessions for c in s.calls if c.outcome == "outcome_unknown")
        return calls + sum(1 for process in self.ending.processes if process.status == "abandoned")


# ---------------------------------------------------------------------- shared by the kits

P = ParamSpec("P")
R = TypeVar("R")


def must_run_alone(name: str) -> None:
    """Raise InvalidInput inside a running event loop: the kits run event loops of their own, one after another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise InvalidInput(f"an event loop is running here, and {name} runs its own: await {name}_async(…) instead")


async def on_a_thread(kit: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Run a kit on a thread, beside the running event loop. Cancelling the wait does not stop the thread."""
    return await asyncio.get_running_loop().run_in_executor(None, functools.partial(kit, *args, **options))


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for one run, on a RAM disk where there is one: SIGKILL loses no page there, and syncs are free."""
    memory = "/dev/shm"
    return tempfile.TemporaryDirectory(prefix="perdure-crash-", dir=memory if os.access(memory, os.W_OK) else None)


@contextlib.contextmanager
def without_logging() -> Generator[None, None, None]:
    """Disable logging: crashes and faults on purpose would fill the log."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
