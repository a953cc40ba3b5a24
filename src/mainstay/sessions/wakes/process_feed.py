"""Telling whoever observes a session what has happened to a process of it, one event after the other.

A process is a session's when the session asked for it, is woken by it, or may see it. Nothing is looked up while nobody
observes anything.
"""

from __future__ import annotations

from collections import OrderedDict

from mainstay.engine.supervisor import Supervisor
from mainstay.lifecycle.process import statuses, target
from mainstay.model.event import ProcessChanged
from mainstay.model.process import ProcessRow
from mainstay.observe.feed import Feed
from mainstay.ports.store import Store

REMEMBERED = 4096
"""Processes whose last told event is remembered, so that nothing is told twice."""
LATEST = 32
"""Events of a process that are told when nothing of it was told before, and another OS process has written them."""


class ProcessFeed:
    """Brings events of processes into the feed, each once and in order.

    `_rows` wait for that, each with the sequence after which its news begins; one task takes them. `_told` has the
    last event of each that was told.
    """

    def __init__(self, feed: Feed, store: Store, supervisor: Supervisor) -> None:
        self._feed, self._store, self._supervisor = feed, store, supervisor
        self._rows: dict[str, tuple[ProcessRow, int]] = {}
        self._telling = False
        self._told: OrderedDict[str, int] = OrderedDict()
        self._cursor: int | None = None

    def of(self, row: ProcessRow) -> None:
        """A process has changed here."""
        if self._feed.sessions:
            self._add(row, row.record.sequence - 1)

    async def look(self) -> None:
        """Others may have written."""
        before, self._cursor = self._cursor, await self._store.last_change()
        if before is None or not self._feed.sessions:
            return  # who observes from now on hears of what changes from now on
        while before < self._cursor and (found := await self._store.changes(before)):
            for _, row in found:
                self._add(row, await self._before(row, before))
            before = found[-1][0]

    async def _before(self, row: ProcessRow, cursor: int) -> int:
        """The last event of a process that had happened at a cursor."""
        if row.id in self._told:
            return self._told[row.id]
        oldest = max(0, row.record.sequence - LATEST)
        return next((n - 1 for place, n, _ in await self._store.events(row.pid, oldest) if place > cursor), oldest)

    def _add(self, row: ProcessRow, after: int) -> None:
        waiting = self._rows.get(row.id)
        if waiting is not None and waiting[0].record.sequence > row.record.sequence:
            row = waiting[0]
        self._rows[row.id] = row, after if waiting is None else min(after, waiting[1])
        if not self._telling:
            self._telling = True
            _ = self._supervisor.spawn(self._tell(), "news of processes")

    async def _tell(self) -> None:
        try:
            while self._rows:
                row, after = self._rows.pop(next(iter(self._rows)))
                await self._publish(row, self._told.get(row.id, after))
        finally:
            self._telling = False

    async def _publish(self, row: ProcessRow, after: int) -> None:
        if after >= row.record.sequence:
            return
        channels = [channel for each in await self._observers(row) if (channel := self._feed.listening(each))]
        found = await self._store.events(row.pid, after) if channels else []
        happened = [(sequence, event) for _, sequence, event in found if sequence <= row.record.sequence]
        self._told[row.id] = row.record.sequence
        self._told.move_to_end(row.id)
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        known = {"process_id": row.id, "name": row.registration.name, "label": row.registration.label}
        became = statuses([event.type for _, event in happened], row.status)
        for (sequence, event), status in zip(happened, became, strict=True):
            last = sequence == row.record.sequence
            fields = {
                "status": row.state if last else status,
                "change": event.type,
                "sequence": sequence,
                "at": event.at,
            }
            for channel in channels:
                channel.publish(ProcessChanged, "", known | fields)

    async def _observers(self, row: ProcessRow) -> list[str]:
        """Sessions that somebody observes and whose process it is."""
        to = target(row)
        near = {row.holder, None if to is None else to.session_id}
        observed = list(self._feed.sessions)
        return [each for each in observed if each in near or await self._store.is_granted(each, row.id)]
