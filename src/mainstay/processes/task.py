"""The engine of kind "task": code in the memory of one Runtime, as a process that others can see and cancel.

It is owner-bound: begun and not ended when its Runtime dies, it is abandoned. Not begun, no other Runtime can begin it:
the next Runtime gives it up, which is known to be harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct

from mainstay.engine.gate import Leaving, SelfCancelled, TurnCancelled
from mainstay.model.codec import clean
from mainstay.model.process import (
    Abandoned,
    Cancelled,
    Evidence,
    Failure,
    ProcessOutcome,
    Registration,
    Success,
)
from mainstay.ports.process import EngineRun
from mainstay.ports.store import Store
from mainstay.processes.function.engine import failure
from mainstay.processes.tracebacks import log_raised
from mainstay.processes.worker.run import ProcessRun

KIND = "task"


class LocalWork(Struct, frozen=True):
    """Something to be registered that is no code of ours to run elsewhere: `spec` is shown to those who ask.

    `token` tells this asking from every other, also from one for the same id at the same time: that has other code.
    `outside`: the work is done elsewhere, and completed by authority.
    """

    name: str
    label: str
    spec: dict[str, Any]
    token: str
    outside: bool = False


class LocalEngine:
    """Runs what was put into `works` under the token of its asking.

    `alive` are the workers that were not gone when the Runtime last read them, or None before that.
    """

    kind = KIND

    def __init__(self, store: Store, worker_id: str, alive: Callable[[], set[str] | None]) -> None:
        self._store, self._worker_id, self.alive = store, worker_id, alive
        self.works: dict[str, Callable[[], Awaitable[Any]]] = {}
        # Workers that have come since the Runtime last read them, with what it read then.
        self._new: dict[str, set[str] | None] = {}

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        if not isinstance(what, LocalWork):
            return None
        spec = what.spec | {"token": what.token}
        if what.outside:
            return Registration("", "external", "externally_owned", what.name, "", spec, what.label)
        return Registration("", KIND, "owner_bound", what.name, self._worker_id, spec, what.label)

    def knows(self, registration: Registration) -> bool:
        """Ours, to be run or abandoned; those of others, to be abandoned, once the Runtime with their code is gone."""
        owner, alive = registration.definition, self.alive()
        if owner == self._worker_id:
            return True
        return alive is not None and owner not in alive and self._new.get(owner) is not alive

    async def run(self, run: EngineRun) -> ProcessOutcome:
        assert isinstance(run, ProcessRun)
        work = self.works.pop(token_of(run.registration), None)
        if work is None:
            return await self._give_up(run.registration.definition)
        await run.begin()
        try:
            return Success(clean(await run.guard(_called(work))))
        except TurnCancelled:
            request = run.gate.request
            assert request is not None
            return Cancelled(request.by, request.reason, unknown=True)
        except SelfCancelled as error:
            return Failure("raised", str(error))
        except (Leaving, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # a task may raise anything; it ends this process, and says how
            outcome = failure(error)
            log_raised(f"task {run.registration.name} of process {run.row.id} raised {outcome.message}", error)
            return outcome

    async def _give_up(self, owner: str) -> ProcessOutcome:
        if owner == self._worker_id:
            why = "the code that spawned it was cancelled meanwhile; it was never begun"
            return Abandoned(Evidence("engine_gave_up", owner=owner, proof=why))
        if any(row.id == owner for row in await self._store.workers()):
            self._new[owner] = self.alive()
            raise Leaving  # it has come since we looked, and has its own work to do
        why = "its code was in the memory of a Runtime that is gone; it was never begun"
        return Abandoned(Evidence("engine_gave_up", owner=owner, proof=why))


def token_of(registration: Registration) -> str:
    """The token of the asking that led to a task; "" for a process that is none."""
    spec = registration.input
    return str(spec.get("token", "")) if isinstance(spec, dict) else ""


async def _called(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()
