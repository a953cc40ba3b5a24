"""Noticing what happens elsewhere: other processes' writes, dead owners, waits whose time is up.

One loop per Runtime, four times a second. It costs a read of eight bytes while nobody else writes.
"""

from __future__ import annotations

import asyncio
import logging

from mainstay.engine.driver import decode_cancel
from mainstay.engine.lease import Worker
from mainstay.errors import StoreError
from mainstay.model.session import SessionRow
from mainstay.model.write import Retire
from mainstay.sessions.desk import Desk

log = logging.getLogger("mainstay.sessions")

PERIOD = 0.25
RECOVER_AT_ONCE = 256
"""Takeovers under way at the same time: a start after a crash must not starve the host."""


class Watch:
    """The Runtime's eyes. `runs`: it takes over turns whose owners are gone."""

    def __init__(self, desk: Desk, worker: Worker, runs: bool) -> None:
        self._desk, self._worker, self._runs = desk, worker, runs
        self._recovering = asyncio.Semaphore(RECOVER_AT_ONCE)
        self._judged = 0.0
        self._unattended: set[str] = set()

    async def watch(self) -> None:
        """For ever. A store in trouble is tried again; everything else that fails here is a bug and is seen."""
        first = True
        while True:
            try:
                await self._look(first)
                first = False
            except StoreError as error:
                log.warning("cannot look at the store: %s", error)
            await asyncio.sleep(PERIOD)

    async def _look(self, first: bool) -> None:
        desk, clock = self._desk, self._desk.clock
        changed = await desk.store.changed()
        due = clock.monotonic() - self._judged >= self._worker.terms.renewal / 2
        if self._runs and (first or changed or due):
            self._judged = clock.monotonic()
            await self._take_over()
        if changed:
            await self._notice()
        for wait in await desk.store.waits(due=clock.now()) if self._runs else ():
            await desk.resolve(wait.id, None)
        if due:
            desk.feed.trim()

    async def _take_over(self) -> None:
        """Claim every open turn of ours that nobody alive works on."""
        rows, gone = await self._worker.claimable()
        if rows:
            await asyncio.gather(*(self._claim(row) for row in rows))
        for worker_id in gone:
            await self._desk.store.write(Retire(worker_id, dead=True))
        self._attend(await self._desk.store.open_sessions())

    def _attend(self, rows: list[SessionRow]) -> None:
        """Open turns that are ours and that nobody here works on, seen twice in a row: work on them again.

        Once is normal: an acceptance may be on disk whose task is about to start. Twice means that a turn rested
        because the store was in trouble.
        """
        ours = [r for r in rows if r.owner == self._worker.id and r.state == "open"]
        found = {r.id: r for r in ours if self._desk.turns.resident(r.id).task is None}
        for session_id in self._unattended & found.keys():
            self._desk.goes_on(found.pop(session_id))
        self._unattended = set(found)

    async def _claim(self, row: SessionRow) -> None:
        async with self._recovering:
            await self._desk.turns.claim(row)

    async def _notice(self) -> None:
        """Another process wrote: cancel requests, answers and inputs for our turns, results for our waiters."""
        desk = self._desk
        for resident in desk.turns.residents():
            if resident.run is None and not resident.waiters:
                continue
            row = await desk.store.session(resident.session_id)
            if row is None:
                continue
            run = resident.run
            if run is not None:
                run.journal.mail = True
                if row.cancel is not None and row.turn == run.scope.turn:
                    run.gate.cancel(decode_cancel(row.cancel))
                run.gate.nudge()
            else:
                desk.goes_on(row)
                await self._tell(resident.session_id, list(resident.waiters))

    async def _tell(self, session_id: str, turns: list[int]) -> None:
        for turn in turns:
            result = await self._desk.on_disk(session_id, turn)
            if result is not None:
                self._desk.turns.tell(session_id, turn, result)
