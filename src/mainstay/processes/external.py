"""The engine of external work: somebody else does it and says how it ended, and no worker of ours ever claims it.

    build = External("build", signals=["stop"], events=["built"])
    handle = await runtime.start(build, {"branch": "main"})
    …
    await runtime.processes.complete(handle, {"artifact": "main.tar"})     # from anywhere, by whoever does the work

Who may say how it ended is decided by authority (`mainstay.lifecycle.decide`): its external owner, or a request to
abandon it that was looked into.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mainstay.errors import InternalError, InvalidDefinition
from mainstay.lifecycle.fold import RESERVED, SIGNAL
from mainstay.model.codec import clean_text
from mainstay.model.process import EventType, ProcessOutcome, Registration
from mainstay.ports.process import EngineRun

KIND = "external"


class External:
    """Work that somebody outside does: its name, and the signals and events that it may have.

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

    kind = KIND

    def knows(self, registration: Registration) -> bool:
        return False

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        if not isinstance(what, External):
            return None
        return Registration(
            "", KIND, "externally_owned", what.name, what.name, dict(args), what.name, events=what.events
        )

    async def run(self, run: EngineRun) -> ProcessOutcome:
        raise InternalError(f"process {run.registration.id!r} is done outside, and was begun here")
