"""Forgetting what is too old: sessions that nothing has happened to, and processes that are over."""

from __future__ import annotations

import asyncio
import logging

from msgspec import Struct

from mainstay.engine.lease import Worker
from mainstay.errors import InvalidDefinition, StoreError, quoted
from mainstay.model.process import SessionOrigin
from mainstay.model.process_write import ProcessFilter
from mainstay.model.write import Delete, SessionFilter
from mainstay.sessions.desk import Desk

log = logging.getLogger("mainstay.sessions")

DAY = 86_400
AT_ONCE = 100
"""Sessions, or processes, that are looked at at a time."""
MOST_DAYS = 36_600


class Retention(Struct, frozen=True):
    """How long a Runtime keeps what nobody uses: sessions that were idle for so many days, and processes that ended so
    long ago.

    A session is left alone while it has an open turn, an input that waits, a fork, news that it has not heard, or a
    live process of its own. What is forgotten leaves its id, which stays spent.
    """

    days: float = 30.0

    def __post_init__(self) -> None:
        if type(self.days) not in (int, float) or not 0 < self.days <= MOST_DAYS:
            raise InvalidDefinition(f"days={quoted(self.days)} is not usable: give a number of days, more than 0")


async def forget(desk: Desk, worker: Worker, retention: Retention) -> None:
    """Forget what is older than that, unless another worker does so."""
    try:
        if not await worker.is_first_to_forget():
            return
        processes = await desk.processes.prune(retention.days * DAY)
        sessions = await forget_sessions(desk, desk.clock.now() - round(retention.days * DAY * 1000))
    except StoreError as error:
        log.warning("cannot forget what is older than %g days, it is tried again in an hour: %s", retention.days, error)
        return
    if sessions or processes:
        log.info("forgot %d sessions and %d processes, older than %g days", sessions, processes, retention.days)


async def forget_sessions(desk: Desk, since: int) -> int:
    """Delete the sessions that were last used before then; how many. Each is judged again where it is deleted."""
    count, before, busy = 0, since, await _with_live_processes(desk)
    while True:
        rows = await desk.store.sessions(SessionFilter(state="idle", before=before, limit=AT_ONCE))
        for row in rows:
            if row.id in busy or not await desk.store.write(Delete(row.id, desk.clock.now(), since)):
                continue
            desk.turns.residents.deleted(row.id)
            desk.feed.end(row.id)
            count += 1
        if len(rows) < AT_ONCE:
            return count
        before = rows[-1].updated
        await asyncio.sleep(0)


async def _with_live_processes(desk: Desk) -> set[str]:
    """Sessions that asked for a process which lives, or are to hear of it. One that begins later is seen by its grant,
    where the session is deleted."""
    found, last = set[str](), None
    while True:
        rows = await desk.store.processes(ProcessFilter(live=True, before=last, limit=AT_ONCE))
        for row in rows:
            asked = row.registration
            if isinstance(asked.origin, SessionOrigin):
                found.add(asked.origin.session_id)
            wake = row.record.wake or asked.wake
            if wake is not None:
                found.add(wake.session_id)
        if len(rows) < AT_ONCE:
            return found
        last = rows[-1].pid
        await asyncio.sleep(0)
