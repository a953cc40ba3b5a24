"""What the turns of a Runtime share to run tools: threads, slots, live objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mainstay.engine.driver import Run
from mainstay.engine.lease import Worker
from mainstay.engine.threads import Threads
from mainstay.ports.host import Clock, Random
from mainstay.ports.services import TurnServices
from mainstay.ports.store import Store
from mainstay.tools.slots import Slots


class Workshop:
    """One per Runtime. `running` names the tool behind each call whose body is under way; `services` makes what a
    tool may ask of its session."""

    def __init__(self, store: Store, worker: Worker, clock: Clock, random: Random, deps: Any) -> None:
        self.store, self.worker, self.clock, self.random, self.deps = store, worker, clock, random, deps
        self.threads = Threads()
        self.slots = Slots()
        self.running: dict[str, str] = {}
        self.services: Callable[[Run], TurnServices] | None = None
        self._left: set[asyncio.Task[Any]] = set()

    def left_behind(self, task: asyncio.Task[Any]) -> None:
        """Keep a body that does not listen until it ends by itself: nobody waits for it any more."""
        self._left.add(task)
        task.add_done_callback(self._left.discard)
