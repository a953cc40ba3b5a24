"""How a store looks when everything is over: what crash tests compare, and what must hold of it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from mainstay.engine.journal import load_turns
from mainstay.errors import BlobMissing, StoreError
from mainstay.graph.view import View, turn_view
from mainstay.lifecycle.fold import replay
from mainstay.model.ids import turn_id
from mainstay.model.message import Message, ToolResult, unanswered
from mainstay.model.outcome import kind_of
from mainstay.model.process import ProcessRow, Success, WakeRow
from mainstay.model.process_write import ProcessFilter
from mainstay.model.session import SessionRow
from mainstay.model.tool import Ok
from mainstay.model.transcript import STATUS
from mainstay.model.write import SessionFilter
from mainstay.ports.store import Store


class CallEnding(Struct, frozen=True):
    """A tool call of a committed turn."""

    call_id: str
    tool: str
    outcome: str
    attempts: int = 1
    repeated: int = 0


class SessionEnding(Struct, frozen=True):
    """A session as it is on disk. `turns` has the outcome of every committed turn by number."""

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
    """A process as it is on disk. `told` has the states of what sessions are told of it."""

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
    """Read an open store. With `sweep` its orphaned blobs are collected first, and what is referred to must survive."""
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
        [_told(m) for m in view.messages],
        unknown,
        row.generation,
    )


def _told(message: Message) -> str:
    """A message on one line: its role and words, or the results it holds."""
    results = [p for p in message.parts if isinstance(p, ToolResult)]
    if results:
        return "tool: " + ", ".join(f"{p.name} {p.status}" for p in results)
    calls = ", ".join(call.name for call in message.tool_calls)
    return f"{message.role}: {message.text}" + (f" [{calls}]" if calls else "")
