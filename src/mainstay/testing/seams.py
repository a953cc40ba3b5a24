"""Ports with seams: the store, the model and the tools of an agent, with every call a point of `faults`."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from mainstay.model.agent import AgentSpec
from mainstay.model.codec import decode, decode_row, encode
from mainstay.model.llm import Delta, ModelRequest
from mainstay.model.process import Event, ProcessRow, WakeRow
from mainstay.model.process_write import Advance, LetGo, ProcessFilter, Register, Stop, Take, Tell
from mainstay.model.record import Ended, Faltered, Replied, Row, Started
from mainstay.model.session import Deaths, InboxRow, SessionRow, WaitRow, WorkerRow
from mainstay.model.tool import PreparedCall, ToolOutcome, ToolSpec
from mainstay.model.write import Accept, Append, Commit, Release, Resolve, Retire, SessionFilter, StoreFacts, Write
from mainstay.ports.provider import Provider, candidates
from mainstay.ports.store import SWEEP_GRACE, BlobStore, Store, WorkerLease
from mainstay.ports.tool import CallContext, ToolProvider
from mainstay.providers.fallback import Fallback
from mainstay.sessions.definition import Defined, Definition
from mainstay.testing.faults import Kind, Ledger, LedgerLine, Seams
from mainstay.tools.catalog import Catalog, Entry
from mainstay.tools.context import ToolContext
from mainstay.tools.define import Tool

R = TypeVar("R")


def name_of(write: Write[Any]) -> str:
    """A write as a person would call it."""
    if isinstance(write, Accept):
        return f"accept {write.kind}"
    if isinstance(write, Append):
        told = " + ".join(_told(decode_row(node.body)) for node in write.nodes)
        words = [told or "nothing", "opening a wait" if write.waits else "", "parking" if write.park else ""]
        return f"append {write.scope.turn}: {', '.join(w for w in words if w)}"
    if isinstance(write, Commit):
        return f"commit {write.scope.turn}"
    if isinstance(write, Resolve):
        return f"{'expire' if write.answer is None else 'resolve'} {write.wait_id.rpartition(':')[2]}"
    if isinstance(write, Release):
        return "release" if write.stuck is None else "release as stuck"
    if isinstance(write, Retire):
        return "bury" if write.dead else "retire"
    return _name_of_process_write(write)


def _name_of_process_write(write: Write[Any]) -> str:
    if isinstance(write, Register):
        return f"register {write.registration.id}"
    if isinstance(write, Advance):
        told = ["starting" if write.first else "", *(_step(node.body) for node in write.records)]
        told += [event.type for event in write.events]
        told += ["parking" if write.park else "", "ending" if write.outcome is not None else ""]
        return f"advance {write.scope.id}: {', '.join(word for word in told if word) or 'nothing'}"
    if isinstance(write, LetGo):
        return f"let {write.scope.id} go{'' if write.stuck is None else ' as stuck'}"
    if isinstance(write, Take | Tell | Stop):
        return f"{type(write).__name__.lower()} {write.process_id}"
    return type(write).__name__.lower()


def _step(body: bytes) -> str:
    """A record of a durable function, as far as it says what it is: an engine of your own may write others."""
    try:
        found = decode(body)
    except ValueError:
        return "record"
    kind, key = (found.get("type", ""), found.get("key", "")) if isinstance(found, dict) else ("", "")
    return f"{kind.partition('.')[0] or 'record'} {key}".strip()


def _told(record: Row) -> str:
    match record:
        case Replied(step=step):
            return f"replied {step}"
        case Started(call=call):
            return f"started {call}"
        case Ended(call=call):
            return f"ended {call}"
        case Faltered(call=call, step=step):
            return f"faltered {call or step}"
        case _:
            return type(record).__name__.lower()


# ---------------------------------------------------------------------- ports


class SeamStore:
    """A store whose writes and blobs are points. Reads are none: dying before one is dying after the write before."""

    def __init__(self, inner: Store, seams: Seams) -> None:
        self.inner, self._seams = inner, seams

    @property
    def blobs(self) -> BlobStore:
        return SeamBlobs(self.inner.blobs, self._seams)

    async def open(self) -> None:
        await self._seams.quietly(self.inner.open())

    async def close(self) -> None:
        await self._seams.quietly(self.inner.close())

    async def write(self, write: Write[R]) -> R:
        kind: Kind = "record" if isinstance(write, Append | Commit | Release | Advance | LetGo) else "write"
        return await self._seams.call(kind, name_of(write), lambda: self.inner.write(write))

    def submit(self, write: Write[R], done: Callable[[R | None, BaseException | None], None]) -> None:
        # Renewals come by the clock: they are no points, but a dead worker sends none.
        if not self._seams.dead:
            self.inner.submit(write, done)

    async def session(self, session_id: str) -> SessionRow | None:
        return await self._seams.quietly(self.inner.session(session_id))

    async def session_by_sid(self, sid: int) -> SessionRow | None:
        return await self._seams.quietly(self.inner.session_by_sid(sid))

    async def sessions(self, wanted: SessionFilter) -> list[SessionRow]:
        return await self._seams.quietly(self.inner.sessions(wanted))

    async def open_sessions(self) -> list[SessionRow]:
        return await self._seams.quietly(self.inner.open_sessions())

    async def nodes(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        return await self._seams.quietly(self.inner.nodes(sid, first, last))

    async def inbox(self, sid: int) -> list[InboxRow]:
        return await self._seams.quietly(self.inner.inbox(sid))

    async def waits(self, sid: int | None = None, due: int | None = None) -> list[WaitRow]:
        return await self._seams.quietly(self.inner.waits(sid, due))

    async def wait(self, wait_id: str) -> WaitRow | None:
        return await self._seams.quietly(self.inner.wait(wait_id))

    async def process(self, process_id: str) -> ProcessRow | None:
        return await self._seams.quietly(self.inner.process(process_id))

    async def processes(self, wanted: ProcessFilter) -> list[ProcessRow]:
        return await self._seams.quietly(self.inner.processes(wanted))

    async def active_processes(self) -> list[ProcessRow]:
        return await self._seams.quietly(self.inner.active_processes())

    async def unowned_processes(self, after: int, limit: int) -> list[ProcessRow]:
        return await self._seams.quietly(self.inner.unowned_processes(after, limit))

    async def due_processes(self, now: int, limit: int = 1000, skip: int = 0) -> list[ProcessRow]:
        return await self._seams.quietly(self.inner.due_processes(now, limit, skip))

    async def events(self, pid: int, after: int = 0, limit: int = 1000) -> list[tuple[int, int, Event]]:
        return await self._seams.quietly(self.inner.events(pid, after, limit))

    async def changes(self, after: int = 0, limit: int = 1000) -> list[tuple[int, ProcessRow]]:
        return await self._seams.quietly(self.inner.changes(after, limit))

    async def last_change(self) -> int:
        return await self._seams.quietly(self.inner.last_change())

    async def steps(self, pid: int) -> list[tuple[int, bytes]]:
        return await self._seams.quietly(self.inner.steps(pid))

    async def is_granted(self, session_id: str, process_id: str) -> bool:
        return await self._seams.quietly(self.inner.is_granted(session_id, process_id))

    async def grantees(self, process_id: str) -> list[str]:
        return await self._seams.quietly(self.inner.grantees(process_id))

    async def wakes(self, session_id: str | None = None, state: str = "pending") -> list[WakeRow]:
        return await self._seams.quietly(self.inner.wakes(session_id, state))

    async def workers(self) -> list[WorkerRow]:
        return await self._seams.quietly(self.inner.workers())

    async def deaths(self) -> list[Deaths]:
        return await self._seams.quietly(self.inner.deaths())

    async def changed(self) -> bool:
        return await self._seams.quietly(self.inner.changed())

    async def facts(self, deep: bool = False) -> StoreFacts:
        return await self._seams.quietly(self.inner.facts(deep))

    async def sweep(self, grace: float = SWEEP_GRACE) -> int:
        return await self._seams.call("write", "sweep", lambda: self.inner.sweep(grace))

    def identity(self) -> str:
        return self.inner.identity()

    def held(self) -> str | None:
        return self.inner.held()

    def secret(self) -> bytes:
        return self.inner.secret()

    def lease(self, worker_id: str) -> WorkerLease:
        lease = self.inner.lease(worker_id)
        # What the kernel does for a killed process: its lock is free.
        self._seams.on_death.append(lease.drop)
        return SeamLease(lease, self._seams)


def _seamed(provider: Provider, seams: Seams, ledger: Ledger) -> Provider:
    models = [SeamProvider(each, seams, ledger) for each in candidates(provider)]
    return models[0] if len(models) == 1 else Fallback(*models)


class SeamBlobs:
    def __init__(self, inner: BlobStore, seams: Seams) -> None:
        self._inner, self._seams = inner, seams

    async def put(self, data: bytes) -> str:
        return await self._seams.call("blob", "put blob", lambda: self._inner.put(data))

    async def put_file(self, path: str) -> tuple[str, int]:
        return await self._seams.call("blob", "put file", lambda: self._inner.put_file(path))

    async def get(self, digest: str) -> bytes:
        return await self._seams.quietly(self._inner.get(digest))

    def pieces(self, digest: str) -> AsyncIterator[bytes]:
        return self._inner.pieces(digest)


class SeamLease:
    def __init__(self, inner: WorkerLease, seams: Seams) -> None:
        self._inner, self._seams = inner, seams

    def hold(self) -> None:
        if not self._seams.dead:
            self._inner.hold()

    def drop(self) -> None:
        if not self._seams.dead:
            self._inner.drop()

    @property
    def process(self) -> str:
        """Every incarnation passes for an OS process of its own, also where all of them are played in one."""
        return f"{self._inner.process}.{self._seams.incarnation}"

    def proven_dead(self, worker: WorkerRow) -> bool:
        return self._inner.proven_dead(worker)


class SeamProvider:
    """A model whose requests are counted in the ledger and whose every piece is a point."""

    def __init__(self, inner: Provider, seams: Seams, ledger: Ledger) -> None:
        self._inner, self._seams, self._ledger = inner, seams, ledger

    @property
    def name(self) -> str:
        return self._inner.name

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        seams, step = self._seams, ".".join(request.call_id.rsplit(".", 2)[1:])
        said = hashlib.blake2b(encode(request.messages), digest_size=8).hexdigest()
        line = LedgerLine("model", request.call_id, seams.incarnation, said)

        async def ask() -> None:
            self._ledger.write(line)

        await seams.call("model", f"ask model {step}", ask)
        count = 0
        async for delta in self._inner.stream(request):
            count += 1
            await seams.reach("chunk", f"chunk {count} of model {step}")
            yield delta
            await seams.alive()


class SeamTool(Tool[..., Any]):
    """A tool whose body begins and ends at points, and is a line in the ledger once it has returned.

    A body that writes its own effects with `Lab.effect` under the call's key is not counted a second time.
    """

    def __init__(self, inner: Tool[..., Any], seams: Seams, ledger: Ledger) -> None:
        self.__dict__.update(inner.__dict__)
        self._inner, self._seams, self._ledger = inner, seams, ledger

    def invoke(self, kwargs: dict[str, Any], ctx: ToolContext[Any]) -> Any:
        return self._later(kwargs, ctx) if self.is_async else self._now(kwargs, ctx)

    async def _later(self, kwargs: dict[str, Any], ctx: ToolContext[Any]) -> Any:
        await self._seams.reach("body", f"begin {_call(ctx)}")
        before = self._counted(ctx)
        value = await self._inner.invoke(kwargs, ctx)
        await self._seams.alive()
        self._count(ctx, before)
        await self._seams.reach("body", f"end {_call(ctx)}")
        return value

    def _now(self, kwargs: dict[str, Any], ctx: ToolContext[Any]) -> Any:
        self._seams.reach_now("body", f"begin {_call(ctx)}")
        before = self._counted(ctx)
        value = self._inner.invoke(kwargs, ctx)
        self._seams.alive_now()
        self._count(ctx, before)
        self._seams.reach_now("body", f"end {_call(ctx)}")
        return value

    def _counted(self, ctx: ToolContext[Any]) -> int:
        return sum(1 for line in self._ledger.lines() if line.key == ctx.idempotency_key)

    def _count(self, ctx: ToolContext[Any], before: int) -> None:
        if self._counted(ctx) == before:
            self._ledger.write(LedgerLine(ctx.tool, ctx.idempotency_key, self._seams.incarnation))


class SeamToolProvider:
    """The same for a set of tools."""

    def __init__(self, inner: ToolProvider, seams: Seams, ledger: Ledger) -> None:
        self._inner, self._seams, self._ledger = inner, seams, ledger

    def specs(self) -> Any:
        return self._inner.specs()

    async def prepare(self, call: PreparedCall, ctx: CallContext) -> PreparedCall | ToolOutcome:
        await self._seams.alive()
        return await self._inner.prepare(call, ctx)

    async def execute(self, call: PreparedCall, ctx: CallContext) -> Any:
        name = f"{call.name} {'.'.join(ctx.call_id.rsplit('.', 3)[1:])}"
        await self._seams.reach("body", f"begin {name}")
        value = await self._inner.execute(call, ctx)
        await self._seams.alive()
        self._ledger.write(LedgerLine(call.name, ctx.idempotency_key, self._seams.incarnation))
        await self._seams.reach("body", f"end {name}")
        return value


def _call(ctx: ToolContext[Any]) -> str:
    return f"{ctx.tool} {'.'.join(ctx.call_id.rsplit('.', 3)[1:])}"


class SeamCatalog(Catalog):
    """The tools of an agent, each behind its seam."""

    def __init__(self, inner: Catalog, seams: Seams, ledger: Ledger) -> None:
        self._inner, self._seams, self._ledger = inner, seams, ledger

    def refresh(self) -> None:
        self._inner.refresh()

    def extended(self, tools: Iterable[Any]) -> Catalog:
        return SeamCatalog(self._inner.extended(tools), self._seams, self._ledger)

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {name: self._behind(entry) for name, entry in self._inner.entries.items()}

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self._inner.generation

    def get(self, name: str) -> Entry | None:
        entry = self._inner.get(name)
        return None if entry is None else self._behind(entry)

    def _behind(self, entry: Entry) -> Entry:
        if entry.tool is not None:
            return Entry(entry.spec, tool=SeamTool(entry.tool, self._seams, self._ledger))
        assert entry.provider is not None
        return Entry(
            entry.spec, provider=SeamToolProvider(entry.provider, self._seams, self._ledger), fault=entry.fault
        )

    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(self._inner.specs())

    def names(self) -> list[str]:
        return self._inner.names()

    def as_json(self) -> list[dict[str, Any]]:
        return self._inner.as_json()


class SeamAgent:
    """An agent whose model and tools are behind seams."""

    def __init__(self, inner: Defined, seams: Seams, ledger: Ledger) -> None:
        self._inner, self._seams, self._ledger = inner, seams, ledger

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def spec(self) -> AgentSpec:
        return self._inner.spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeamAgent) and other._inner is self._inner

    def __hash__(self) -> int:
        return hash(self._inner)

    @property
    def subagents(self) -> tuple[SeamAgent, ...]:
        return tuple([SeamAgent(each, self._seams, self._ledger) for each in getattr(self._inner, "subagents", ())])

    def definition(self) -> Definition:
        plain = self._inner.definition()
        assert isinstance(plain.catalog, Catalog)
        return replace(
            plain,
            provider=_seamed(plain.provider, self._seams, self._ledger),
            catalog=SeamCatalog(plain.catalog, self._seams, self._ledger),
        )
