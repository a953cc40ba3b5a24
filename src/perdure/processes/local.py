"""Engines of work whose code is not durable: tasks of one Runtime, and work that is done outside.

A process of kind "task" is code in the memory of one Runtime, which others can see and cancel. It is owner-bound: begun
and not ended when its Runtime dies, it is abandoned. Not begun, no other Runtime can begin it: the next Runtime gives
it up, which is known to be harmless.

A process of kind "external" is done outside, and no worker of ours ever claims it:

    build = External("build", signals=["stop"], events=["built"])
    handle = await runtime.start(build, {"branch": "main"})
    …
    await runtime.processes.complete(handle, {"artifact": "main.tar"})     # from anywhere, by the program that did it

Who may end it is decided by authority (`perdure.lifecycle.process`): its external owner, or a granted request to
abandon it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from perdure.engine.control import SelfCancelled
from perdure.errors import InternalError, InvalidDefinition
from perdure.lifecycle.process import RESERVED, SIGNAL
from perdure.model.codec import clean, clean_text
from perdure.model.process import (
    Abandoned,
    Cancelled,
    EventType,
    Evidence,
    Failure,
    ProcessOutcome,
    Registration,
    Success,
)
from perdure.ports.process import CancelRequested, EngineRun, Leaving
from perdure.ports.store import Store
from perdure.processes.function.calls import log_raised
from perdure.processes.function.engine import failure

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
    uses_deps = False

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
        work = self.works.pop(token_of(run.registration), None)
        if work is None:
            return await self._give_up(run.registration.definition)
        await run.begin()
        try:
            return Success(clean(await run.guard(_called(work))))
        except CancelRequested as asked:
            return Cancelled(asked.request.by, asked.request.reason, unknown=True)
        except SelfCancelled as error:
            return Failure("raised", str(error))
        except (Leaving, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # a task may raise anything; it ends this process, and says how
            outcome = failure(error)
            log_raised(f"task {run.registration.name} of process {run.registration.id} raised {outcome.message}", error)
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


class External:
    """Work that is done outside: its name, and the signals and events that it may have.

    `signals` may give a JSON schema for each payload. Only what is named here is taken.
    """

    __slots__ = ("events", "name")

    def __init__(
        self,
        name: str,
        *,
        signals: Mapping[str, Any] | Iterable[str] = (),
        events: Iterable[EventType | str] = (),
    ) -> None:
        if not clean_text(name) or not name.isprintable() or len(name) > 120:
            raise InvalidDefinition(f"external work has a name of 1 to 120 printable characters, not {name!r}")
        schemas = dict(signals) if isinstance(signals, Mapping) else dict.fromkeys(signals)
        types = [each if isinstance(each, EventType) else EventType(clean_text(each)) for each in events]
        wrong = next((each.name for each in types if each.name.startswith((RESERVED, SIGNAL))), None)
        if wrong is not None:
            raise InvalidDefinition(f"external work {name!r}: event {wrong!r} is reserved: choose another name")
        self.name = name
        self.events = (*(EventType(f"{SIGNAL}{each}", schema) for each, schema in schemas.items()), *types)

    def __repr__(self) -> str:
        return f"<External {self.name}>"


class ExternalEngine:
    """Registers external work, and runs none."""

    kind = "external"
    uses_deps = False

    def knows(self, registration: Registration) -> bool:
        return False

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        if not isinstance(what, External):
            return None
        return Registration(
            "", self.kind, "externally_owned", what.name, what.name, dict(args), what.name, events=what.events
        )

    async def run(self, run: EngineRun) -> ProcessOutcome:
        raise InternalError(f"process {run.registration.id!r} is done outside, and was begun here")
