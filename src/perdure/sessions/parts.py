"""The parts that session handles, services and operations work with, put together once in `runtime.py`, and a session
as one caller of the services sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.deps import Make
from perdure.engine.driver import Run
from perdure.engine.lease import Worker
from perdure.engine.limits import SpendLimits
from perdure.engine.rate_limits import RateLimits
from perdure.engine.runner import Activity, RuntimeMode
from perdure.engine.waiters import Deadlocks, current_metadata, in_hand
from perdure.errors import ProviderUnavailable, StaleSettings, Unavailable, UnknownSession
from perdure.model import validate
from perdure.model.ids import mint
from perdure.model.limit import Spending
from perdure.model.message import Metadata, Scalar
from perdure.model.session import SessionRow, Settings, dump_settings
from perdure.model.spending import UsageRow
from perdure.model.write import Configure
from perdure.observe.feed import Feed
from perdure.observe.relay import Relay
from perdure.ports.host import Clock, Random
from perdure.ports.provider import Prices
from perdure.ports.services import TraceSink
from perdure.ports.store import Store
from perdure.processes.service import ProcessService
from perdure.sessions.cache import Archive, SessionCache
from perdure.sessions.definition import Definition, Models
from perdure.sessions.inbox import Inbox, TurnRequests
from perdure.sessions.outcomes import TurnOutcomes
from perdure.sessions.processes import TaskTable
from perdure.sessions.turns import SessionTask, Turns


class SessionParts(Struct, frozen=True):
    mode: RuntimeMode
    activity: Activity
    store: Store
    clock: Clock
    random: Random
    worker: Worker
    definitions: Mapping[str, Definition]
    models: Models
    limits: RateLimits
    prices: Prices | None
    spend_limits: SpendLimits | None
    feed: Feed
    relay: Relay
    deadlocks: Deadlocks
    cache: SessionCache[SessionTask]
    archive: Archive
    outcomes: TurnOutcomes
    turns: Turns
    requests: TurnRequests
    inbox: Inbox
    processes: ProcessService
    tasks: TaskTable
    deps: Any
    make_deps: Make | None
    traces: TraceSink | None

    def mint(self, prefix: str) -> str:
        """A new id."""
        return mint(prefix, self.clock.now(), self.random.bits(40))


# ---------------------------------------------------------------------- services


def new_session(session_id: str, agent: str, metadata: dict[str, Scalar] | None = None) -> SessionRow:
    """The row of a session in which nothing was said yet, for readers. `metadata` is what it was opened with."""
    return SessionRow(0, session_id, agent, settings=dump_settings(Settings(metadata=metadata or {})))


class ServiceScope:
    """A session as one asker sees it: a hook of the turn `run`, a tool in its `call`, or a caller outside of turns.

    `where` tells hooks apart that may run at the same time; `turn` is also known to who asks after its commit. `opened`
    is the metadata that a session is to begin with which is not there yet.
    """

    __slots__ = ("_asked", "agent", "call", "id", "opened", "parts", "run", "turn", "where")

    def __init__(  # noqa: PLR0913  # who asks, each by its place
        self,
        parts: SessionParts,
        session_id: str,
        agent: str,
        run: Run | None = None,
        call: str = "",
        where: str = "",
        turn: str | None = None,
        opened: dict[str, Scalar] | None = None,
    ) -> None:
        self.parts, self.id, self.agent, self.run, self.call, self.where = parts, session_id, agent, run, call, where
        self.opened = opened
        self.turn = turn if run is None else run.turn_id
        self._asked: dict[str, int] = {}

    def key(self, what: str) -> str:
        """A name for what a turn asks for here: the same one when a hook or a tool runs again and asks for the same."""
        assert self.run is not None, "only a turn has places"
        state = self.run.machine.state
        place = f"{self.call or self.where or f'{state.phase.value}.{state.step}'}:{what}"
        self._asked[place] = count = self._asked.get(place, -1) + 1
        return f"{place}:{count}"

    def own(self, session_id: str | None) -> bool:
        """Whether the session at hand is meant."""
        return session_id is None or session_id == self.id

    def needs_session(self, session_id: str | None) -> None:
        if session_id is not None:
            validate.name(session_id, "session_id")
        if not session_id and not self.id:
            raise Unavailable("this operation is about no session: name the session to work on")

    async def row(self, session_id: str | None = None) -> SessionRow:
        self.needs_session(session_id)
        row = await self.parts.store.session(session_id or self.id)
        if row is None or row.deleted:
            raise UnknownSession(session_id or self.id)
        return row

    async def row_or_new(self, session_id: str | None = None) -> SessionRow:
        """The session's row; a blank one when nothing was said in it yet."""
        self.needs_session(session_id)
        row = await self.parts.store.session(session_id or self.id)
        if row is None and self.own(session_id):
            return new_session(self.id, self.agent, self.opened)
        if row is None or row.deleted:
            raise UnknownSession(session_id or self.id)
        return row

    async def metadata(self) -> Metadata:
        """Whom it is asked for: what holds for the work at hand; outside of any, the session's."""
        return current_metadata() if in_hand() else Metadata((await self.row_or_new()).metadata)

    async def configure(
        self,
        session_id: str,
        agent: str,
        settings: bytes,
        expected: bytes,
        costs: tuple[UsageRow, ...] = (),
        spending: Spending | None = None,
    ) -> SessionRow:
        """Replace settings, if they are still the expected ones."""
        write = Configure(session_id, agent, settings, self.parts.clock.now(), expected, costs=costs)
        if spending is not None:
            write = replace(write, spending=(spending,), worker=self.parts.worker.id)
        return await self.parts.store.write(write)

    async def exist(self, row: SessionRow) -> None:
        """Create the session of a blank row: what ends with a session can only end with one that is there."""
        if not row.sid:
            with contextlib.suppress(StaleSettings):  # it was created meanwhile
                await self.configure(row.id, row.agent, b"", b"")

    def definition(self, agent: str) -> Definition:
        found = self.parts.definitions.get(agent)
        if found is None:
            raise ProviderUnavailable(agent, self.id)
        return found
