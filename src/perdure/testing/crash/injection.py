"""Fault injection: every call that leaves the engine passes a named point, and at one of them the process dies.

    kind     what passes                               ways to die there
    record   a write of an owner: turn or process      before, lost, hang, late, unheard
    write    any other write                           before, lost, hang, unheard
    blob     bytes put beside the store                before, lost, hang
    model    a request to the model                    before, lost, hang
    chunk    a piece of the answer arrives             before
    body     a tool's body begins, or has ended        before
    effect   something outside is changed              before, lost, hang
    mark     a point that a scenario names itself      before

`before`: the call was never applied. `lost`: it was applied and the process died before the reply arrived. `hang`: the
call never returned, all other tasks ran until the incarnation was idle, then the process died. `late`: as `hang`, but
the process is only presumed dead; its call arrives after another incarnation has taken over. `unheard`: no crash, the
reply was lost and the caller got StoreUnavailable.

The tasks of a dead incarnation wait for ever: its ports never answer again, so no `finally` of it can reach the store.
Cancelling the tasks would run those blocks, which a real kill never does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import CommandsUnavailable, SearchUnavailable, StoreUnavailable
from perdure.model.agent import AgentSpec
from perdure.model.codec import decode, decode_row, encode
from perdure.model.limit import Account, Reservation
from perdure.model.llm import Delta, ModelRequest
from perdure.model.process import Event, ProcessRow, WakeRow
from perdure.model.record import Called, Ended, Faltered, RecordRow, Replied, Started
from perdure.model.search import FoundRecord, SearchFilter
from perdure.model.session import Deaths, Dump, InboxRow, SessionRow, WaitRow, WorkerRow
from perdure.model.spending import UsageFilter, UsageRow
from perdure.model.tool import PreparedCall, ToolOutcome, ToolSpec
from perdure.model.write import (
    Accept,
    AddEvent,
    Advance,
    Append,
    Cancel,
    Claim,
    Commit,
    ProcessFilter,
    ProcessRef,
    ProcessScope,
    Register,
    Release,
    ReopenTurn,
    Resolve,
    Resume,
    Retire,
    SendSignal,
    SessionFilter,
    StoreFacts,
    Write,
)
from perdure.ports.provider import Provider, candidates
from perdure.ports.store import SWEEP_GRACE, BlobStore, JobFolders, Searchable, Store, WorkerLease
from perdure.ports.tool import CallContext, ToolProvider
from perdure.providers.fallback import Fallback
from perdure.sessions.definition import Defined, Definition
from perdure.stores.rules.rows import run
from perdure.tools.catalog import Catalog, ToolEntry
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool

R = TypeVar("R")

FaultMode: TypeAlias = Literal["before", "lost", "hang", "late", "unheard"]
Kind: TypeAlias = Literal["record", "write", "blob", "model", "chunk", "body", "effect", "mark"]

MODES: dict[Kind, tuple[FaultMode, ...]] = {
    "record": ("before", "lost", "hang", "late", "unheard"),
    "write": ("before", "lost", "hang", "unheard"),
    "blob": ("before", "lost", "hang"),
    "model": ("before", "lost", "hang"),
    "chunk": ("before",),
    "body": ("before",),
    "effect": ("before", "lost", "hang"),
    "mark": ("before",),
}

IDLE_PASSES = 60
"""Passes of the event loop without a call at any port after which an incarnation counts as idle."""


class Point(Struct, frozen=True):
    """A point that a run passed. `name` is unique in its run: the call, and its number if it was made before."""

    name: str
    kind: Kind


class Crash(Struct, frozen=True):
    """Where an incarnation ends, and how."""

    point: str
    mode: FaultMode = "before"

    def __str__(self) -> str:
        return f"{self.mode} {self.point}"


class LedgerLine(Struct, frozen=True, omit_defaults=True):
    """An effect outside the store: `name` under `key`, caused by that incarnation."""

    name: str
    key: str
    incarnation: int = 1
    data: Any = None


class Ledger:
    """A log of effects outside the store, which no crash undoes: one line each, synced before the caller continues."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lines: list[LedgerLine] = []

    def write(self, line: LedgerLine) -> None:
        if self._path is None:
            self._lines.append(line)
            return
        text = json.dumps([line.name, line.key, line.incarnation, line.data]) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lines(self) -> list[LedgerLine]:
        if self._path is None:
            return list(self._lines)
        if not self._path.exists():
            return []
        return [LedgerLine(*json.loads(line)) for line in self._path.read_text().splitlines()]


class FaultInjector:
    """Records the points that one incarnation passes, and injects the fault at the point named by `crash`.

    `dead` is set by the crash and never cleared; `released` is set when a call in mode `late` may arrive. All state
    belongs to the incarnation's event loop; sync tools pass points from their threads, under `_lock`.
    """

    def __init__(self, crash: Crash | None = None, *, real: bool = False, incarnation: int = 1) -> None:
        self.crash, self.real, self.incarnation = crash, real, incarnation
        self.trace: list[Point] = []
        self.current: list[str] = []
        self.dead = False
        self.disposing = False
        self.released: asyncio.Event | None = None
        self.on_death: list[Callable[[], None]] = []
        self._loop = asyncio.get_running_loop()
        self.crashed: asyncio.Future[None] = self._loop.create_future()
        self._counts: dict[str, int] = {}
        self._busy = 0
        self._calls = 0
        self._returned = asyncio.Event()
        self._lock = threading.Lock()
        self._disposed = threading.Event()
        # An event loop refers to tasks weakly: without these futures, waiting tasks would be collected, and unwind.
        self._waiting: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------ passing

    async def call(self, kind: Kind, label: str, work: Callable[[], Awaitable[R]]) -> R:
        """Pass a point and do `work` there."""
        await self.check_alive()
        point, mode = self._pass(kind, label)
        if mode == "before":
            await self.die()
        elif mode == "hang":
            await self._hang()
        elif mode == "late":
            await self._wait_for_takeover()
        self._busy += 1
        self.current.append(point.name)
        try:
            result = await work()
        finally:
            self._busy -= 1
            self.current.remove(point.name)
        await self.check_alive()
        if mode == "lost":
            await self.die()
        if mode == "unheard":
            raise StoreUnavailable(f"the reply of {point.name} was lost")
        self._note_return()
        return result

    async def reach(self, kind: Kind, label: str) -> None:
        """Pass a point where nothing is done but arriving there."""
        await self.check_alive()
        _, mode = self._pass(kind, label)
        if mode is not None:
            await self.die()

    async def uncounted(self, work: Awaitable[R]) -> R:
        """Do `work` without a point, for reads."""
        if self.dead and isinstance(work, Coroutine):
            work.close()
        await self.check_alive()
        self._busy += 1
        try:
            return await work
        finally:
            self._busy -= 1

    def reach_in_thread(self, kind: Kind, label: str) -> None:
        """`reach` for a sync tool, called on its thread."""
        self.check_alive_in_thread()
        with self._lock:
            _, mode = self._pass(kind, label)
        if mode is not None:
            self.die_in_thread()

    def call_in_thread(self, kind: Kind, label: str, work: Callable[[], R]) -> R:
        """`call` for a sync tool, called on its thread; `hang` dies at once."""
        self.check_alive_in_thread()
        with self._lock:
            _, mode = self._pass(kind, label)
        if mode in ("before", "hang"):
            self.die_in_thread()
        result = work()
        if mode == "lost":
            self.die_in_thread()
        return result

    def _pass(self, kind: Kind, label: str) -> tuple[Point, FaultMode | None]:
        count = self._counts[label] = self._counts.get(label, 0) + 1
        point = Point(label if count == 1 else f"{label} #{count}", kind)
        self.trace.append(point)
        self._calls += 1
        mode = self.crash.mode if self.crash is not None and self.crash.point == point.name else None
        return point, mode

    def _note_return(self) -> None:
        self._calls += 1
        self._returned.set()

    async def wait_returned(self) -> None:
        """Wait until a call of this incarnation came back."""
        await self.check_alive()
        self._returned.clear()
        await self._returned.wait()

    # ------------------------------------------------------------------ dying

    async def die(self) -> None:
        """End this incarnation. Does not return."""
        self._kill()
        await self.check_alive()

    def die_in_thread(self) -> None:
        self._kill()
        self.check_alive_in_thread()

    def _kill(self) -> None:
        if self.real:
            os.kill(os.getpid(), signal.SIGKILL)
        self.dead = True
        for callback in self.on_death:
            callback()
        self._loop.call_soon_threadsafe(self._set_crashed)

    def _set_crashed(self) -> None:
        if not self.crashed.done():
            self.crashed.set_result(None)

    async def check_alive(self) -> None:
        """Return while the incarnation lives; wait for ever once it is dead."""
        while self.dead:
            if self.disposing:
                raise asyncio.CancelledError
            self._waiting.append(self._loop.create_future())
            await self._waiting[-1]

    def check_alive_in_thread(self) -> None:
        if self.dead:
            self._disposed.wait()
            raise SystemExit  # ends the body on its thread, long after its incarnation

    def dispose(self) -> None:
        """Let the tasks of a dead incarnation unwind, once its case has been judged; its ports refuse every call."""
        self.disposing = self.dead = True
        self._disposed.set()

    async def _hang(self) -> None:
        await self.wait_idle()
        await self.die()

    async def _wait_for_takeover(self) -> None:
        self.released = asyncio.Event()
        await self.wait_idle()
        for callback in self.on_death:
            callback()
        self._set_crashed()
        await self.released.wait()

    async def wait_idle(self) -> None:
        """Wait until no other task of this incarnation makes a call."""
        passes, seen = 0, self._calls
        while passes < IDLE_PASSES:
            await asyncio.sleep(0 if not self._busy else 0.001)
            if self._busy or self._calls != seen:
                passes, seen = 0, self._calls
            else:
                passes += 1


# ---------------------------------------------------------------------- names of points


def name_of(write: Write[Any]) -> str:
    """The name of a write's point, short and the same in every run."""
    if isinstance(write, Accept):
        return f"accept {write.kind}"
    if isinstance(write, Append):
        records = " + ".join(_record_name(decode_row(node.body)) for node in write.nodes)
        words = [records or "nothing", "opening a wait" if write.waits else "", "parking" if write.park else ""]
        return f"append {write.scope.turn}: {', '.join(w for w in words if w)}"
    if isinstance(write, Commit):
        return f"commit {write.scope.turn}"
    if isinstance(write, Resolve):
        return f"{'expire' if write.answer is None else 'resolve'} {write.wait_id.rpartition(':')[2]}"
    if isinstance(write, Release):
        whose = f" {write.scope.id}" if isinstance(write.scope, ProcessScope) else ""
        return f"release{whose}{'' if write.stuck is None else ' as stuck'}"
    if isinstance(write, ReopenTurn):
        return f"reopen {write.turn}"
    if isinstance(write, Claim | Cancel | Resume):
        whose = f" {write.target.id}" if isinstance(write.target, ProcessRef) else ""
        return f"{type(write).__name__.lower()}{whose}"
    if isinstance(write, Retire):
        return "bury" if write.dead else "retire"
    return _name_of_process_write(write)


def _name_of_process_write(write: Write[Any]) -> str:
    if isinstance(write, Register):
        return f"register {write.registration.id}"
    if isinstance(write, Advance):
        words = ["starting" if write.first else "", *(_step_name(node.body) for node in write.records)]
        words += [event.type for event in write.events]
        words += ["parking" if write.park else "", "ending" if write.outcome is not None else ""]
        return f"advance {write.scope.id}: {', '.join(word for word in words if word) or 'nothing'}"
    if isinstance(write, SendSignal):
        return f"signal {write.process_id}"
    if isinstance(write, AddEvent):
        return "event"
    return type(write).__name__.lower()


def _step_name(body: bytes) -> str:
    """The kind and key of a durable function's record; "record" for those of other engines, which may be any bytes."""
    try:
        found = decode(body)
    except ValueError:
        return "record"
    kind, key = (found.get("type", ""), found.get("key", "")) if isinstance(found, dict) else ("", "")
    return f"{kind.partition('.')[0] or 'record'} {key}".strip()


def _record_name(record: RecordRow) -> str:
    match record:
        case Replied(step=step):
            return f"replied {step}"
        case Called(first=first):
            return f"called {record.key}.{first}"
        case Started(call=call):
            return f"started {call}"
        case Ended(call=call):
            return f"ended {call}"
        case Faltered(call=call, step=step):
            return f"faltered {call or step}"
        case _:
            return type(record).__name__.lower()


# ---------------------------------------------------------------------- ports of which every call passes a point


class InstrumentedStore:
    """A store whose writes and blobs pass points. Reads pass none: dying before one is dying after the last write."""

    def __init__(self, inner: Store, faults: FaultInjector) -> None:
        self.inner, self._faults = inner, faults

    @property
    def blobs(self) -> BlobStore:
        return InstrumentedBlobs(self.inner.blobs, self._faults)

    async def open(self) -> None:
        await self._faults.uncounted(self.inner.open())

    async def close(self) -> None:
        await self._faults.uncounted(self.inner.close())

    async def write(self, write: Write[R]) -> R:
        kind: Kind = "record" if isinstance(write, Append | Commit | Release | Advance | Release) else "write"
        return await self._faults.call(kind, name_of(write), lambda: self.inner.write(write))

    def submit(self, write: Write[R], done: Callable[[R | None, BaseException | None], None]) -> None:
        # Renewals depend on the clock, so they pass no points; a dead worker must not renew its lease.
        if not self._faults.dead:
            self.inner.submit(write, done)

    async def session(self, session_id: str) -> SessionRow | None:
        return await self._faults.uncounted(self.inner.session(session_id))

    async def session_by_sid(self, sid: int) -> SessionRow | None:
        return await self._faults.uncounted(self.inner.session_by_sid(sid))

    async def sessions(self, wanted: SessionFilter) -> list[SessionRow]:
        return await self._faults.uncounted(self.inner.sessions(wanted))

    async def open_sessions(self) -> list[SessionRow]:
        return await self._faults.uncounted(self.inner.open_sessions())

    async def nodes(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        return await self._faults.uncounted(self.inner.nodes(sid, first, last))

    async def turn_ends(self, turns: Sequence[tuple[int, int]]) -> list[tuple[bytes, bytes] | None]:
        return await self._faults.uncounted(self.inner.turn_ends(turns))

    async def keep_index(self, keep: bool) -> None:
        inner = self._searchable()
        await self._faults.call("write", "keep_index", lambda: inner.keep_index(keep))

    async def index_more(self) -> bool:
        inner = self._searchable()
        return await self._faults.call("write", "index_more", inner.index_more)

    async def search(self, wanted: SearchFilter) -> tuple[list[FoundRecord], float]:
        return await self._faults.uncounted(self._searchable().search(wanted))

    def _searchable(self) -> Searchable:
        if not isinstance(self.inner, Searchable):
            raise SearchUnavailable("the store of this experiment cannot be searched")
        return self.inner

    @property
    def outlives_us(self) -> bool:
        return self._with_jobs().outlives_us

    def jobs_folder(self, make: bool = True) -> str:
        return self._with_jobs().jobs_folder(make)

    def _with_jobs(self) -> JobFolders:
        if not isinstance(self.inner, JobFolders):
            raise CommandsUnavailable("the store of this experiment keeps no folders for commands")
        return self.inner

    async def inbox(self, sid: int) -> list[InboxRow]:
        return await self._faults.uncounted(self.inner.inbox(sid))

    async def waits(self, sid: int | None = None, due: int | None = None) -> list[WaitRow]:
        return await self._faults.uncounted(self.inner.waits(sid, due))

    async def wait(self, wait_id: str) -> WaitRow | None:
        return await self._faults.uncounted(self.inner.wait(wait_id))

    async def dump(self, sid: int, last: int) -> tuple[int, Dump] | None:
        return await self._faults.uncounted(self.inner.dump(sid, last))

    async def usage(self, wanted: UsageFilter) -> list[UsageRow]:
        return await self._faults.uncounted(self.inner.usage(wanted))

    async def accounts(self) -> list[Account]:
        return await self._faults.uncounted(self.inner.accounts())

    async def reservations(self, sid: int | None = None) -> list[Reservation]:
        return await self._faults.uncounted(self.inner.reservations(sid))

    async def process(self, process_id: str) -> ProcessRow | None:
        return await self._faults.uncounted(self.inner.process(process_id))

    async def processes(self, wanted: ProcessFilter) -> list[ProcessRow]:
        return await self._faults.uncounted(self.inner.processes(wanted))

    async def active_processes(self) -> list[ProcessRow]:
        return await self._faults.uncounted(self.inner.active_processes())

    async def unowned_processes(self, after: int, limit: int) -> list[ProcessRow]:
        return await self._faults.uncounted(self.inner.unowned_processes(after, limit))

    async def due_processes(self, now: int, limit: int = 1000, skip: int = 0) -> list[ProcessRow]:
        return await self._faults.uncounted(self.inner.due_processes(now, limit, skip))

    async def events(self, pid: int, after: int = 0, limit: int = 1000) -> list[tuple[int, int, Event]]:
        return await self._faults.uncounted(self.inner.events(pid, after, limit))

    async def changes(self, after: int = 0, limit: int = 1000) -> list[tuple[int, ProcessRow]]:
        return await self._faults.uncounted(self.inner.changes(after, limit))

    async def last_change(self) -> int:
        return await self._faults.uncounted(self.inner.last_change())

    async def steps(self, pid: int) -> list[tuple[int, bytes]]:
        return await self._faults.uncounted(self.inner.steps(pid))

    async def is_granted(self, session_id: str, process_id: str) -> bool:
        return await self._faults.uncounted(self.inner.is_granted(session_id, process_id))

    async def grantees(self, process_id: str) -> list[str]:
        return await self._faults.uncounted(self.inner.grantees(process_id))

    async def wakes(self, session_id: str | None = None, state: str = "pending") -> list[WakeRow]:
        return await self._faults.uncounted(self.inner.wakes(session_id, state))

    async def workers(self) -> list[WorkerRow]:
        return await self._faults.uncounted(self.inner.workers())

    async def deaths(self) -> list[Deaths]:
        return await self._faults.uncounted(self.inner.deaths())

    async def changed(self) -> bool:
        return await self._faults.uncounted(self.inner.changed())

    async def facts(self, deep: bool = False) -> StoreFacts:
        return await self._faults.uncounted(self.inner.facts(deep))

    async def sweep(self, grace: float = SWEEP_GRACE) -> int:
        return await self._faults.call("write", "sweep", lambda: self.inner.sweep(grace))

    def identity(self) -> str:
        return self.inner.identity()

    def held(self) -> str | None:
        return self.inner.held()

    async def secret(self) -> bytes:
        return await self._faults.uncounted(self.inner.secret())

    async def proven_dead(self, worker: WorkerRow) -> bool:
        return await self.inner.proven_dead(worker)

    def lease(self, worker_id: str) -> WorkerLease:
        lease = self.inner.lease(worker_id)
        # As the kernel does for a killed process: its lock is released. Stores that are killed here free it at once.
        self._faults.on_death.append(lambda: run(lease.drop()))
        return InstrumentedLease(lease, self._faults)


def _instrumented(provider: Provider, faults: FaultInjector, ledger: Ledger) -> Provider:
    models = [InstrumentedProvider(each, faults, ledger) for each in candidates(provider)]
    return models[0] if len(models) == 1 else Fallback(*models)


class InstrumentedBlobs:
    def __init__(self, inner: BlobStore, faults: FaultInjector) -> None:
        self._inner, self._faults = inner, faults

    async def put(self, data: bytes) -> str:
        return await self._faults.call("blob", "put blob", lambda: self._inner.put(data))

    async def put_file(self, path: str) -> tuple[str, int]:
        return await self._faults.call("blob", "put file", lambda: self._inner.put_file(path))

    async def get(self, digest: str) -> bytes:
        return await self._faults.uncounted(self._inner.get(digest))

    def pieces(self, digest: str) -> AsyncIterator[bytes]:
        return self._inner.pieces(digest)


class InstrumentedLease:
    def __init__(self, inner: WorkerLease, faults: FaultInjector) -> None:
        self._inner, self._faults = inner, faults

    async def hold(self) -> None:
        if not self._faults.dead:
            await self._inner.hold()

    async def drop(self) -> None:
        if not self._faults.dead:
            await self._inner.drop()

    @property
    def process(self) -> str:
        """An id of its own for each incarnation, also where all of them run in one OS process."""
        return f"{self._inner.process}.{self._faults.incarnation}"


class InstrumentedProvider:
    """A model that logs its requests in the ledger and passes a point for each piece of an answer."""

    def __init__(self, inner: Provider, faults: FaultInjector, ledger: Ledger) -> None:
        self._inner, self._faults, self._ledger = inner, faults, ledger

    @property
    def name(self) -> str:
        return self._inner.name

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        faults, step = self._faults, ".".join(request.call_id.rsplit(".", 2)[1:])
        said = hashlib.blake2b(encode(request.messages), digest_size=8).hexdigest()
        line = LedgerLine("model", request.call_id, faults.incarnation, said)

        async def ask() -> None:
            self._ledger.write(line)

        await faults.call("model", f"ask model {step}", ask)
        count = 0
        async for delta in self._inner.stream(request):
            count += 1
            await faults.reach("chunk", f"chunk {count} of model {step}")
            yield delta
            await faults.check_alive()


class InstrumentedTool(Tool[..., Any]):
    """A tool whose body begins and ends at points, and is a line in the ledger once it has returned.

    A body that writes its own effects with `Lab.effect` under the call's key is not counted a second time.
    """

    def __init__(self, inner: Tool[..., Any], faults: FaultInjector, ledger: Ledger) -> None:
        self.__dict__.update(inner.__dict__)
        self._inner, self._faults, self._ledger = inner, faults, ledger

    def invoke(self, kwargs: dict[str, Any], ctx: ToolContext[Any]) -> Any:
        return self._later(kwargs, ctx) if self.is_async else self._now(kwargs, ctx)

    async def _later(self, kwargs: dict[str, Any], ctx: ToolContext[Any]) -> Any:
        await self._faults.reach("body", f"begin {_call(ctx)}")
        before = self._counted(ctx)
        value = await self._inner.invoke(kwargs, ctx)
        await self._faults.check_alive()
        self._count(ctx, before)
        await self._faults.reach("body", f"end {_call(ctx)}")
        return value

    def _now(self, kwargs: dict[str, Any], ctx: ToolContext[Any]) -> Any:
        self._faults.reach_in_thread("body", f"begin {_call(ctx)}")
        before = self._counted(ctx)
        value = self._inner.invoke(kwargs, ctx)
        self._faults.check_alive_in_thread()
        self._count(ctx, before)
        self._faults.reach_in_thread("body", f"end {_call(ctx)}")
        return value

    def _counted(self, ctx: ToolContext[Any]) -> int:
        return sum(1 for line in self._ledger.lines() if line.key == ctx.idempotency_key)

    def _count(self, ctx: ToolContext[Any], before: int) -> None:
        if self._counted(ctx) == before:
            self._ledger.write(LedgerLine(ctx.tool, ctx.idempotency_key, self._faults.incarnation))


class InstrumentedToolProvider:
    """A tool provider whose calls pass the same points."""

    def __init__(self, inner: ToolProvider, faults: FaultInjector, ledger: Ledger) -> None:
        self._inner, self._faults, self._ledger = inner, faults, ledger

    def specs(self) -> Any:
        return self._inner.specs()

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall | ToolOutcome:
        await self._faults.check_alive()
        return await self._inner.prepare(call, ctx)

    async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
        name = f"{call.name} {'.'.join(ctx.call_id.rsplit('.', 3)[1:])}"
        await self._faults.reach("body", f"begin {name}")
        value = await self._inner.execute(call, ctx)
        await self._faults.check_alive()
        self._ledger.write(LedgerLine(call.name, ctx.idempotency_key, self._faults.incarnation))
        await self._faults.reach("body", f"end {name}")
        return value


def _call(ctx: ToolContext[Any]) -> str:
    return f"{ctx.tool} {'.'.join(ctx.call_id.rsplit('.', 3)[1:])}"


class InstrumentedCatalog(Catalog):
    """A catalog whose tools are instrumented."""

    def __init__(self, inner: Catalog, faults: FaultInjector, ledger: Ledger) -> None:
        self._inner, self._faults, self._ledger = inner, faults, ledger

    def refresh(self) -> None:
        self._inner.refresh()

    def extended(self, tools: Iterable[Any]) -> Catalog:
        return InstrumentedCatalog(self._inner.extended(tools), self._faults, self._ledger)

    @property
    def entries(self) -> Mapping[str, ToolEntry]:
        return {name: self._wrap(entry) for name, entry in self._inner.entries.items()}

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self._inner.generation

    @property
    def providers(self) -> list[ToolProvider]:  # type: ignore[override]  # ty: ignore[incompatible-property-override]
        return self._inner.providers

    def get(self, name: str) -> ToolEntry | None:
        entry = self._inner.get(name)
        return None if entry is None else self._wrap(entry)

    def _wrap(self, entry: ToolEntry) -> ToolEntry:
        if entry.tool is not None:
            return replace(entry, tool=InstrumentedTool(entry.tool, self._faults, self._ledger))
        assert entry.provider is not None
        wrapped = InstrumentedToolProvider(entry.provider, self._faults, self._ledger)
        return replace(entry, provider=wrapped, hides=False)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:  # type: ignore[override]  # ty: ignore[incompatible-property-override]
        return self._inner.specs

    def names(self) -> list[str]:
        return self._inner.names()

    def as_json(self) -> list[dict[str, Any]]:
        return self._inner.as_json()


class InstrumentedAgent:
    """An agent whose model and tools are behind faults."""

    def __init__(self, inner: Defined, faults: FaultInjector, ledger: Ledger) -> None:
        self._inner, self._faults, self._ledger = inner, faults, ledger

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def spec(self) -> AgentSpec:
        return self._inner.spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InstrumentedAgent) and other._inner is self._inner

    def __hash__(self) -> int:
        return hash(self._inner)

    @property
    def subagents(self) -> tuple[InstrumentedAgent, ...]:
        return tuple(
            [InstrumentedAgent(each, self._faults, self._ledger) for each in getattr(self._inner, "subagents", ())]
        )

    def definition(self) -> Definition:
        plain = self._inner.definition()
        assert isinstance(plain.catalog, Catalog)
        return replace(
            plain,
            provider=_instrumented(plain.provider, self._faults, self._ledger),
            catalog=InstrumentedCatalog(plain.catalog, self._faults, self._ledger),
        )
