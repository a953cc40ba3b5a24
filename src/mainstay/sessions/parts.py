"""The parts that session handles, services and operations work with, put together once in `runtime.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mainstay.engine.deadlock import Deadlocks
from mainstay.engine.lease import Worker
from mainstay.engine.mode import Activity, Mode
from mainstay.engine.rate_limits import RateLimits
from mainstay.model.ids import mint
from mainstay.observe.feed import Feed
from mainstay.ports.host import Clock, Random
from mainstay.ports.services import TraceSink
from mainstay.ports.store import Store
from mainstay.processes.service import ProcessService
from mainstay.sessions.archive import Archive
from mainstay.sessions.cache import SessionCache
from mainstay.sessions.definition import Definition
from mainstay.sessions.inbox import Inbox
from mainstay.sessions.models import Models
from mainstay.sessions.outcomes import TurnOutcomes
from mainstay.sessions.requests import TurnRequests
from mainstay.sessions.task_table import TaskTable
from mainstay.sessions.turns import Turns


class SessionParts(Struct, frozen=True):
    mode: Mode
    activity: Activity
    store: Store
    clock: Clock
    random: Random
    worker: Worker
    definitions: Mapping[str, Definition]
    models: Models
    limits: RateLimits
    feed: Feed
    deadlocks: Deadlocks
    cache: SessionCache
    archive: Archive
    outcomes: TurnOutcomes
    turns: Turns
    requests: TurnRequests
    inbox: Inbox
    processes: ProcessService
    tasks: TaskTable
    deps: Any
    traces: TraceSink | None

    def mint(self, prefix: str) -> str:
        """A new id."""
        return mint(prefix, self.clock.now(), self.random.bits(40))
