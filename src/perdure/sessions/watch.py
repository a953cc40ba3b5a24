"""Turns as the watcher of a Runtime claims and reconciles them, and what a Runtime waits for while it drains."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from perdure.engine.host import ClockSkew
from perdure.engine.waits import asked, named
from perdure.errors import StoreError
from perdure.model.ids import turn_id
from perdure.model.session import AWAITS_PROCESSES, SessionRow, WaitRow
from perdure.ports.store import Store
from perdure.processes.worker import ProcessWorker
from perdure.sessions.parts import SessionParts
from perdure.sessions.wakes.delivery import Wakes

log = logging.getLogger("perdure.sessions")

TRIM_SECONDS = 5.0
SWEEP_SECONDS = 3600.0


class TurnWatch:
    """Open turns (`WatchedKind`), with the tasks that wait for their end. `passive`: this Runtime goes on with none."""

    holds_suspects = False

    def __init__(self, parts: SessionParts, passive: bool = False) -> None:
        self._parts, self._turns, self._skew = parts, parts.turns, ClockSkew(parts.clock)
        self._passive = passive
        self._trimmed = parts.clock.monotonic()

    async def read_open(self) -> Sequence[SessionRow]:
        rows = await self._parts.store.open_sessions()
        if not self._passive:
            await self._note_parked([row for row in rows if row.state == "parked" and row.reason == AWAITS_PROCESSES])
        return [row for row in rows if row.state == "open"]

    async def _note_parked(self, rows: Sequence[SessionRow]) -> None:
        """Know what turns wait for that other Runtimes have parked: their processes may end here."""
        parked, store = self._turns.parked, self._parts.store
        for session_id in parked.processes.keys() - {row.id for row in rows}:
            parked.drop(session_id)
        for row in rows:
            if row.id not in parked.processes and row.turn is not None:
                waits = [w for w in await store.waits(row.sid) if w.state == "open" and w.kind == "process"]
                names = [name for pending in await asked(store, waits) for name in pending.processes]
                parked.add(row.id, row.turn, tuple(dict.fromkeys(names)))

    def number(self, row: SessionRow) -> int:
        return row.sid

    def adopt(self, rows: Sequence[SessionRow]) -> None:
        self._turns.runner.adopt(rows)

    async def recover(self, row: SessionRow, proof: str | None) -> None:
        await self._turns.claim(row)

    def may_be_suspect(self, row: SessionRow, gone: Mapping[str, str | None]) -> bool:
        return row.takeovers > 0

    def may_claim(self, row: SessionRow) -> bool:
        return self._turns.worker_for(row.agent) is not None

    async def claim(self, row: SessionRow, proof: str | None) -> bool:
        return await self._turns.claim(row)

    def retry_suspects(self) -> None:
        """Every turn without an owner is claimed in each poll."""

    async def end_due(self) -> None:
        if self._passive:
            return  # workers that go on with the turns end their waits
        now, retries = self._skew.measure(), self._turns.retries
        for wait in await self._parts.store.waits(due=now + self._skew.back):
            if wait.kind == "model" and (retries.knows(wait.id) or not await self._may_retry(wait)):
                continue
            for pending in await asked(self._parts.store, [wait]):
                due = self._skew.due(pending.since, wait.due or 0)
                if due <= now and wait.kind == "model":
                    session_id, turn, *_ = named(wait.id)
                    retries.park(pending.tool, due, wait.id, turn_id(session_id, turn))
                elif due <= now:
                    await self._parts.requests.expire(wait.id)

    async def _may_retry(self, wait: WaitRow) -> bool:
        """True if this Runtime may make the next attempt of a model call whose turn another one has parked."""
        row = await self._parts.store.session_by_sid(wait.sid)
        return row is not None and self._turns.worker_for(row.agent) is not None

    async def reconcile(self, changed: bool) -> None:
        parts = self._parts
        for session_id in parts.outcomes.waiters.names:
            if session_id not in parts.cache.tasks:
                # No task here will answer them: what they wait for may be stuck, or behind something that is.
                await parts.outcomes.answer(session_id)
        if changed:
            await self._reconcile_running()
        if parts.clock.monotonic() - self._trimmed >= TRIM_SECONDS:
            self._trimmed = parts.clock.monotonic()
            parts.feed.trim()

    async def _reconcile_running(self) -> None:
        """Another process wrote: cancel requests, answers and inputs for our turns, results for our waiters."""
        parts = self._parts
        running = [session_id for session_id, task in parts.cache.tasks.items() if task.run is not None]
        for session_id in dict.fromkeys([*running, *parts.outcomes.waiters.names]):
            row = await parts.store.session(session_id)
            if row is None or row.deleted:
                parts.outcomes.session_deleted(session_id)
                continue
            parts.turns.reconcile(row)
            # A relieved run may wait for its model for long, and will not say how another worker ended the turn.
            run = parts.cache.run(session_id)
            if run is None or run.scope.generation != row.generation:
                await parts.outcomes.answer(session_id)


async def sweep(store: Store, sweep_jobs: Callable[[], Awaitable[int]]) -> None:
    """Delete blobs that nothing refers to, and folders of commands that were pruned. Several Runtimes may do this to
    one store at once: it takes each under its lock, or not at all."""
    try:
        swept = await store.sweep()
        await sweep_jobs()
    except (StoreError, OSError) as error:
        log.warning("cannot sweep the store, it is tried again in an hour: %s", error)
    else:
        if swept:
            log.info("swept %d blobs that nothing refers to", swept)


async def see_to_needs(parts: SessionParts, work: ProcessWorker) -> None:
    """Take up what work in hand waits for and no worker owns, until the Runtime is left.

    It looks when a task here begins to wait, when something here has changed, and with every poll of the watch: what
    is waited for becomes free in many ways, also by what others write.
    """
    while not parts.mode.leaving:
        parts.activity.changed.clear()
        try:
            work.find_unowned()
            await _claim_turns(parts)
        except StoreError as error:
            log.warning("cannot look at what running work waits for: %s", error)
        await parts.activity.changed.wait()


async def _claim_turns(parts: SessionParts) -> None:
    for session_id, turn in parts.outcomes.needed.items():
        row = await parts.store.session(session_id)
        if row is not None and row.state == "open" and row.owner is None and row.turn is not None and row.turn <= turn:
            await parts.turns.claim(row)


async def could_work(parts: SessionParts, work: ProcessWorker, wakes: Wakes, recovers: bool) -> bool:
    """Whether this Runtime could work on something now that is on disk."""
    if parts.mode.draining or parts.store.held() is not None:
        return False  # what runs is waited for, and nothing else is taken up
    turns = [r for r in await parts.store.open_sessions() if r.state == "open" and r.agent in parts.definitions]
    unawaited = work.unawaited()
    active = await parts.store.active_processes()
    processes = [r for r in active if work.can(r.registration) and r.id not in unawaited]
    owners = {row.owner for row in turns} | {row.owner for row in processes}
    if parts.worker.id in owners:
        return True
    if parts.turns.places.waiting or parts.turns.places.claiming:
        return True
    if not recovers:
        return False  # what others have or left behind is never taken up here
    if owners and (None in owners or await parts.worker.any_gone(owners)):
        return True
    return await wakes.could_deliver()
