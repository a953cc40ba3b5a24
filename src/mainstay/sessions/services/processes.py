"""The processes of one session: starting them for it, and handing them on to its forks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from msgspec.structs import replace

from mainstay.errors import InvalidInput, ProcessNotVisible, SessionDeleted, quoted
from mainstay.model import validate
from mainstay.model.process import SessionOrigin, WakePolicy, WakeTarget
from mainstay.model.write import ProcessFilter
from mainstay.ports.store import Store
from mainstay.processes.handle import ProcessHandle, handle_id
from mainstay.processes.service import ProcessService, Start

PAGE = 1000


class SessionProcesses:
    """Processes as a session has them: it asked for them, it may see them, it is told of their end."""

    __slots__ = ("_agent", "_id", "_service", "_store")

    def __init__(self, service: ProcessService, store: Store, session_id: str, agent: str) -> None:
        self._service, self._store, self._id, self._agent = service, store, session_id, agent

    async def start(
        self,
        what: Any,
        args: Mapping[str, Any] | None,
        wake: WakePolicy = "turn",
        start: Start | None = None,
        *,
        listed: bool = True,
    ) -> ProcessHandle:
        """Begin a process for the session, which may see it if it is `listed`; `start` says the rest."""
        if wake not in get_args(WakePolicy):
            raise InvalidInput(f"a session is woken by 'turn', 'notify' or 'none', not {quoted(wake):.80}")
        row = await self._store.session(self._id)
        if row is not None and row.deleted:
            raise SessionDeleted(self._id)
        ours = replace(
            start or Start(),
            origin=SessionOrigin(self._id),
            wake=WakeTarget(self._id, self._agent, wake),  # also for "none": it tells whose session it is
            grants=(self._id,) if listed else (),
        )
        return await self._service.start(what, args, ours)

    async def chosen(self, grants: Literal["none", "all"] | Sequence[Any]) -> tuple[str, ...]:
        """The ids of processes that a fork may see too. None may be among them that this session may not."""
        if grants == "none":
            return ()
        if grants == "all":
            return await self._all()
        if isinstance(grants, str):
            raise InvalidInput(f"a fork is granted 'none', 'all' or a list of processes, not {quoted(grants):.80}")
        chosen = tuple(dict.fromkeys(handle_id(each) for each in validate.several(grants, "grants")))
        for process_id in chosen:
            if not await self._store.is_granted(self._id, process_id):
                raise ProcessNotVisible(process_id, self._id)
        return chosen

    async def _all(self) -> tuple[str, ...]:
        found: list[str] = []
        before: int | None = None
        while page := await self._store.processes(ProcessFilter(session_id=self._id, before=before, limit=PAGE)):
            found += [row.id for row in page if row.pruned is None]
            before = page[-1].pid
        return tuple(found)
