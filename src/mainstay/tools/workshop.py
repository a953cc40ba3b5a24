"""What the turns of a Runtime share to run tools: threads, slots, live objects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from mainstay.engine.admission import Admission
from mainstay.engine.driver import Run
from mainstay.engine.hands import Circles, Work, depth
from mainstay.engine.lease import Worker
from mainstay.engine.threads import Threads
from mainstay.engine.waits import sign
from mainstay.model.codec import clean
from mainstay.model.event import ToolProgress
from mainstay.plugins.turn import plugins_of
from mainstay.ports.host import Clock, Random
from mainstay.ports.services import TurnServices
from mainstay.ports.store import Store
from mainstay.ports.tool import Handles
from mainstay.tools.context import ToolContext
from mainstay.tools.prepare import Ready
from mainstay.tools.questions import completion_of
from mainstay.tools.shelf import SessionShelf


class Workshop:
    """One per Runtime. `running` names the tool behind each call whose body is under way; `services` makes what a
    tool may ask of its session, `handles` what it may do with processes."""

    def __init__(self, store: Store, worker: Worker, clock: Clock, random: Random, deps: Any) -> None:
        self.store, self.worker, self.clock, self.random, self.deps = store, worker, clock, random, deps
        self.threads = Threads()
        self.admission, self.circles = Admission(), Circles(worker.id)
        self.running: dict[str, str] = {}
        self.services: Callable[[Run], TurnServices] | None = None
        self.handles: Callable[[Run, str], Handles] | None = None
        self._left: set[asyncio.Task[Any]] = set()

    def context(self, run: Run, ready: Ready, attempt: int, store: str) -> ToolContext[Any]:
        """What one attempt of a call is given, which started in `store`. The task that asks for it works for the call
        from here on."""
        call_id, name = ready.call.call_id, ready.call.name
        services, handles = self.services, self.handles
        loop = asyncio.get_running_loop()

        def show(value: Any) -> None:
            plugins = plugins_of(run)
            filters = None if plugins is None else plugins.filters
            shown = value if filters is None else filters.value("progress", value, call_id, name)
            run.events.emit(ToolProgress, call_id=call_id, tool=name, value=shown)

        def progress(value: Any) -> None:
            plain = clean(value)
            with contextlib.suppress(RuntimeError):  # the loop is closed: a thread outlived it, and nobody watches
                loop.call_soon_threadsafe(show, plain)  # plugins are called on the event loop only

        work = Work(self.worker.id, (run.scope.session_id, run.scope.turn), depth=depth()).begin()
        return ToolContext(
            session_id=run.scope.session_id,
            turn_id=run.turn_id,
            call_id=call_id,
            tool=name,
            attempt=attempt,
            generation=run.scope.generation,
            deps=self.deps,
            work=work,
            payload=ready.call.payload,
            progress=progress,
            key=self._key(run, call_id) if ready.entry.spec.deferred else None,
            shelf=SessionShelf(self.store, run, call_id, name),
            host=None if services is None else lambda: services(run).for_call(call_id),
            handles=None if handles is None else lambda: handles(run, call_id),
            store=store,
        )

    def _key(self, run: Run, call_id: str) -> str:
        return sign(self.store.secret(), completion_of(run, call_id.removeprefix(f"{run.turn_id}.")))

    def left_behind(self, task: asyncio.Task[Any]) -> None:
        """Keep a body that does not listen until it ends by itself: nobody waits for it any more."""
        self._left.add(task)
        task.add_done_callback(self._left.discard)
