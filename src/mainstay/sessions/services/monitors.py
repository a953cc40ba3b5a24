"""Monitors of a session, as plugins, tools and operations ask for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mainstay.errors import UnknownMonitor
from mainstay.model import validate
from mainstay.model.monitor import MonitorSnapshot, MonitorSpec, MonitorStatus, MonitorUpdates, monitor_status
from mainstay.model.process import Cause
from mainstay.model.session import SessionRow
from mainstay.processes.handle import ProcessAsk
from mainstay.sessions.services.tasks import TaskServices
from mainstay.sessions.setup import Setup


class MonitorServices(TaskServices):
    """The part of a session's services that is about commands whose lines it is told."""

    async def setup(self, row: SessionRow) -> Setup:
        """What a session runs with. `SessionHost`, which these are a part of, finds it."""
        raise NotImplementedError

    async def monitor_snapshot(self, *, session_id: str | None = None) -> MonitorSnapshot:
        row = await self.scope.row_or_new(session_id)
        return await self._owned(row).monitors(await self._offered(row))

    async def take_monitor_updates(self, after: int = 0, *, session_id: str | None = None) -> MonitorUpdates:
        row = await self.scope.row_or_new(session_id)
        return await self._owned(row).monitor_updates(validate.count(after, "after"))

    async def start_monitor(self, spec: MonitorSpec | str, *, session_id: str | None = None) -> MonitorStatus:
        row, run = await self.scope.row_or_new(session_id), self.scope.run
        found, cause = await self.monitor_spec(spec, row), None
        if run is not None:
            cause = Cause("tool_call", self.scope.call) if self.scope.call else Cause("turn", run.turn_id)
        await self.scope.exist(row)
        asker = ProcessAsk("start", row.id, self.scope.call)
        begin = functools.partial(self._owned(row).monitor, found, cause)
        handle = await (begin(asker) if run is None else run.journal.patiently(begin, asker))
        return monitor_status(await self._processes.get(handle.id))

    async def stop_monitor(self, monitor_id: str, reason: str = "", *, session_id: str | None = None) -> MonitorStatus:
        row = await self.scope.row_or_new(session_id)
        name = validate.name(monitor_id, "monitor_id")
        found = await self._owned(row).monitor_rows(name)
        if not found:
            spec = await self.monitor_spec(name, row)
            return MonitorStatus(spec.id, "", "idle", False)
        await self._cancel(found[0], reason, row.id)
        return monitor_status(await self._processes.get(found[0].id))

    async def monitor_spec(self, given: MonitorSpec | str, row: SessionRow) -> MonitorSpec:
        """A spec, or that of a monitor which a plugin offers. Raises UnknownMonitor for an id of none."""
        if not isinstance(given, str):
            return given
        for each in await self._offered(row):
            if each.id == given:
                return each
        raise UnknownMonitor(given, row.id)

    async def _offered(self, row: SessionRow) -> Sequence[MonitorSpec]:
        """The monitors that plugins offer to a session; none where its agent is not here."""
        definition = self.scope.parts.definitions.get(row.agent)
        if definition is None or not definition.plugins.has("monitors"):
            return ()
        return [each.spec for each in (await self.setup(row)).monitors]
