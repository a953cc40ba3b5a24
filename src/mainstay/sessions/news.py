"""Telling whoever observes a session that a process of it has changed.

A process is a session's when the session asked for it, is woken by it, or may see it. Nothing is looked up while nobody
observes anything.
"""

from __future__ import annotations

from collections import OrderedDict

from mainstay.engine.supervisor import Supervisor
from mainstay.lifecycle.wake import target
from mainstay.model.event import ProcessChanged
from mainstay.model.process import ProcessRow, SessionOrigin
from mainstay.observe.feed import Feed
from mainstay.ports.store import Store

REMEMBERED = 4096
"""Processes whose last told event is remembered, so that nothing is told twice."""


class News:
    """Brings changes of processes into the feed, each once: `_rows` wait for it, `_told` has the last event of each."""

    def __init__(self, feed: Feed, store: Store, supervisor: Supervisor) -> None:
        self._feed, self._store, self._supervisor = feed, store, supervisor
        self._rows: dict[str, ProcessRow] = {}
        self._told: OrderedDict[str, int] = OrderedDict()
        self._cursor: int | None = None

    def of(self, row: ProcessRow) -> None:
        """A process has changed here."""
        if not self._feed.sessions:
            return
        if not self._rows:
            _ = self._supervisor.spawn(self._tell(), "news of processes")
        self._rows[row.id] = row

    async def look(self) -> None:
        """Others may have written."""
        before, self._cursor = self._cursor, await self._store.last_change()
        if before is None or not self._feed.sessions:
            return  # who observes from now on hears of what changes from now on
        while before < self._cursor and (found := await self._store.changes(before)):
            for _, row in found:
                await self._publish(row)
            before = found[-1][0]

    async def _tell(self) -> None:
        while self._rows:
            row = self._rows.pop(next(iter(self._rows)))
            await self._publish(row)

    async def _publish(self, row: ProcessRow) -> None:
        if self._told.get(row.id, 0) >= row.record.sequence:
            return
        self._told[row.id] = row.record.sequence
        self._told.move_to_end(row.id)
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        each, to = row.registration, target(row)
        near = {each.origin.session_id if isinstance(each.origin, SessionOrigin) else "", to.session_id if to else ""}
        for session_id in self._feed.sessions:
            if session_id in near or await self._store.is_granted(session_id, row.id):
                channel = self._feed.listening(session_id)
                if channel is not None:
                    fields = {"process_id": row.id, "status": row.status, "name": each.name, "label": each.label}
                    channel.publish(ProcessChanged, "", fields)
