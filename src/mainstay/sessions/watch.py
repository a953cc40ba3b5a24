"""Noticing what happens elsewhere: other processes' writes, dead owners, waits whose time is up.

One loop per Runtime, four times a second. It costs a read of eight bytes, and one attempt at the lock of each other
worker, while no other process writes. Once an hour it has the blobs swept that nothing refers to, beside the loop: a
large folder must not keep it from looking.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from mainstay.engine.host import ClockSkew
from mainstay.engine.runner import Supervisor
from mainstay.engine.waits import asked
from mainstay.errors import MainstayError, StoreError
from mainstay.lifecycle import suspects
from mainstay.model.event import Gap, TurnCommitted
from mainstay.model.ids import turn_id
from mainstay.model.process import ProcessRow
from mainstay.model.session import Death, Deaths, SessionRow
from mainstay.model.write import Outlived, Retire
from mainstay.observe.feed import TurnEvents
from mainstay.processes.worker import ProcessWatch, ProcessWorker
from mainstay.sessions.directory import Retention, forget
from mainstay.sessions.parts import SessionParts
from mainstay.sessions.wakes.delivery import ProcessFeed, Wakes

log = logging.getLogger("mainstay.sessions")

PERIOD = 0.25
TRIM_SECONDS = 5.0
SWEEP_SECONDS = 3600.0
FORGET_SECONDS = 3600.0
SUSPECTS_AT_ONCE = 8
"""Suspects that are tried at a look, of which one may run."""
RECOVER_AT_ONCE = 256
"""Takeovers under way at the same time: a start after a crash must not starve the host."""


class Watch:
    """The Runtime's eyes. `runs`: it takes over what nobody alive works on, and ends what is due; what it has itself it
    sees to in any case."""

    def __init__(
        self,
        parts: SessionParts,
        processes: ProcessWatch,
        wakes: Wakes,
        process_feed: ProcessFeed,
        runs: bool,
        retention: Retention | None = None,
    ) -> None:
        self._parts, self._worker, self._processes, self._may_run = parts, parts.worker, processes, runs
        self._wakes, self._process_feed = wakes, process_feed
        self._recovering = asyncio.Semaphore(RECOVER_AT_ONCE)
        self._judged = self._trimmed = self._swept = parts.clock.monotonic()
        self._skew = ClockSkew(parts.clock)
        self._waiting = False  # a suspect of ours waits for room
        self._aside = Supervisor()
        self._sweeping: asyncio.Task[None] | None = None
        self._retention = retention
        self._forgot: float | None = None
        self._forgetting: asyncio.Task[None] | None = None

    @property
    def _runs(self) -> bool:
        return self._may_run and self._parts.store.held() is None

    async def watch(self) -> None:
        """For ever. A store in trouble is tried again; everything else that fails here is a bug, and is logged."""
        try:
            await self._watch()
        finally:
            await self._aside.stop()

    async def _watch(self) -> None:
        first = True
        while True:
            try:
                await self._look(first)
                first = False
            except StoreError as error:
                log.warning("cannot look at the store: %s", error)
            except Exception:  # a watch that ended would leave every turn of this Runtime to itself
                log.exception("a fault of ours; the watch goes on for everybody else")
            self._parts.activity.polled.set()
            self._parts.activity.changed.set()
            await asyncio.sleep(PERIOD)

    async def _look(self, first: bool) -> None:
        parts, clock = self._parts, self._parts.clock
        changed = await parts.store.changed()
        if changed and parts.store.held() is not None:
            await self._worker.speak()  # a writing transaction sees that the copy was restored; an idle one has none
        due = clock.monotonic() - self._judged >= self._worker.terms.renewal / 2
        # A killed worker writes nothing that `changed` would show; the lock that it held is free.
        due = due or await self._worker.died_meanwhile() or await self._has_room()
        if first or changed or due:
            self._judged = clock.monotonic()
            if self._runs:
                await self._take_over()
            else:
                await self._worker.gone()
                self._worker.uneasy = any(each.worker == self._worker.id for each in await parts.store.deaths())
                self._processes.adopt(await parts.store.active_processes())
            await self._see_to_ours()
        if changed or due:
            await self._observed()
        if changed:
            await self._notice()
            await self._processes.notice()
        if first or changed:
            await self._process_feed.look()
            await parts.tasks.look()
        if self._runs and (first or changed or due):
            await self._wakes.look()
        if self._runs:
            await self._expire()
            await self._processes.wake(clock.now())
        self._look_after_the_store()

    def _look_after_the_store(self) -> None:
        """What is done from time to time, beside the looking."""
        parts, clock = self._parts, self._parts.clock
        if clock.monotonic() - self._trimmed >= TRIM_SECONDS:
            self._trimmed = clock.monotonic()
            parts.feed.trim()
        if clock.monotonic() - self._swept >= SWEEP_SECONDS and (self._sweeping is None or self._sweeping.done()):
            self._swept = clock.monotonic()
            self._sweeping = self._aside.spawn(self._sweep(), "mainstay sweep")
        if self._retention is not None and parts.store.held() is None and not parts.mode.draining:
            self._forget(self._retention)

    def _forget(self, retention: Retention) -> None:
        """Forget what is too old: at the beginning, and once an hour."""
        now = self._parts.clock.monotonic()
        if self._forgetting is not None and not self._forgetting.done():
            return
        if self._forgot is None or now - self._forgot >= FORGET_SECONDS:
            self._forgot = now
            self._forgetting = self._aside.spawn(forget(self._parts, self._worker, retention), "mainstay retention")

    async def _sweep(self) -> None:
        """Several Runtimes may do this to one store at once: it takes each blob under its lock, or not at all."""
        try:
            swept = await self._parts.store.sweep()
        except StoreError as error:
            log.warning("cannot sweep the blobs of the store, it is tried again in an hour: %s", error)
        else:
            if swept:
                log.info("swept %d blobs that nothing refers to", swept)

    async def _expire(self) -> None:
        """End the waits whose time is up."""
        now = self._skew.look()
        for wait in await self._parts.store.waits(due=now + self._skew.back):
            for pending in await asked(self._parts.store, [wait]):
                if self._skew.due(pending.since, wait.due or 0) <= now:
                    await self._parts.requests.resolve(wait.id, None)

    async def _take_over(self) -> None:
        """Claim every open turn and process of ours that no living worker has: all at once but for suspects."""
        worker, store = self._worker, self._parts.store
        processes = await store.active_processes()  # before the workers: what a new one starts meanwhile is not free
        rows, gone = await worker.claimable()
        deaths = {each.scope: each for each in await store.deaths()}
        worker.uneasy = any(each.worker == worker.id for each in deaths.values())
        turns = [row for row in rows if row.takeovers]
        left = [row for row in processes if row.takeovers and row.owner in gone and row.after_owner_death == "rerun"]
        suspected = self._suspects(deaths, turns, left)
        held = {mark.scope for mark, _ in suspected}
        await asyncio.gather(*(self._claim(row) for row in rows if row.sid not in held))
        await self._processes.take_over(processes, gone, worker.known, {-scope for scope in held})
        needed = {row.owner for _, row in suspected}
        for worker_id in gone:
            if worker_id not in needed:
                await store.write(Retire(worker_id, dead=True, beside=tuple(gone)))
        await self._take_suspect([row for _, row in suspected], gone)

    def _suspects(
        self, deaths: Mapping[int, Deaths], turns: Sequence[SessionRow], processes: Sequence[ProcessRow]
    ) -> list[tuple[Deaths, SessionRow | ProcessRow]]:
        """Which of these are suspects, those first that have taken the fewest workers with them."""
        found = list[tuple[Deaths, SessionRow | ProcessRow]]()
        scopes: list[tuple[int, SessionRow | ProcessRow]] = [(row.sid, row) for row in turns]
        scopes += [(-row.pid, row) for row in processes]
        for scope, row in scopes:
            mark = deaths.get(scope)
            if row.owner is not None:
                mark = suspects.after(mark, scope, self._worker.death_of(row.owner) or Death(row.owner))
            if mark is not None and suspects.is_suspect(mark) and not suspects.is_stuck(mark):
                found.append((mark, row))
        return sorted(found, key=lambda each: each[0].alone)

    async def _take_suspect(self, found: Sequence[SessionRow | ProcessRow], gone: Mapping[str, str | None]) -> None:
        """Claim one suspect, if this OS process runs none."""
        ours = [row for row in found if self._is_for_us(row)]
        self._waiting = bool(ours) or self._processes.holds
        if self._worker.suspect is not None:
            return
        for row in ours[:SUSPECTS_AT_ONCE]:
            if isinstance(row, SessionRow):
                won = await self._parts.turns.claim(row)
            else:
                won = await self._processes.claim(row, gone.get(row.owner or ""))
            if won:
                return
        self._processes.retry_held()

    def _is_for_us(self, row: SessionRow | ProcessRow) -> bool:
        if isinstance(row, ProcessRow):
            return self._processes.is_for_us(row)
        return self._parts.turns.worker_for(row.agent) is not None

    async def _has_room(self) -> bool:
        """Whether a suspect that waits may be run now: the one before it is done, or has lived for long enough."""
        worker, store = self._worker, self._parts.store
        if worker.suspect is None:
            return self._waiting  # another Runtime of this OS process may run one
        deaths = {each.scope: each for each in await store.deaths()}
        mark = deaths.get(worker.suspect)
        if mark is not None and mark.worker == worker.id and suspects.is_suspect(mark):
            if worker.lived - mark.since < suspects.room_after(deaths.values()):
                return False
            await store.write(Outlived(mark.scope, worker.id))
        worker.suspect = None
        return True

    async def _see_to_ours(self) -> None:
        """What is ours, and what somebody here waits for, must not be forgotten."""
        self._parts.turns.runner.adopt(await self._parts.store.open_sessions())
        for resident in self._parts.cache.all():
            awaited = self._parts.cache.awaited(resident.session_id)
            if awaited and resident.task is None:
                # Nobody here is going to tell them: what they wait for may be stuck, or behind something that is.
                await self._tell(resident.session_id, awaited)

    async def _claim(self, row: SessionRow) -> None:
        async with self._recovering:
            await self._parts.turns.claim(row)

    async def _notice(self) -> None:
        """Another process wrote: cancel requests, answers and inputs for our turns, results for our waiters."""
        parts = self._parts
        for resident in parts.cache.all():
            if resident.run is None and not parts.cache.awaited(resident.session_id):
                continue
            row = await parts.store.session(resident.session_id)
            if row is None or row.deleted:
                parts.cache.deleted(resident.session_id)
                continue
            parts.turns.reconcile(row)
            # A relieved run may wait for its model for long, and will not say how another worker ended the turn.
            if resident.run is None or resident.run.scope.generation != row.generation:
                await self._tell(resident.session_id, parts.cache.awaited(resident.session_id))

    async def _observed(self) -> None:
        """Turns that ended in other processes: who observes their sessions here hears of that, after a gap."""
        parts = self._parts
        for session_id in parts.feed.sessions:
            row = await parts.store.session(session_id)
            if row is not None and row.deleted:
                parts.feed.end(session_id)
            elif row is not None and self._missed(row):
                outcome = await parts.archive.outcome(row, row.head)
                if self._missed(row):  # still: nobody has told of it meanwhile
                    name = turn_id(session_id, row.head)
                    events = TurnEvents(parts.feed, session_id, name, asyncio.get_running_loop())
                    events.emit(Gap, reason="another process worked on the session", last_committed=name)
                    events.emit(TurnCommitted, outcome=outcome)

    def _missed(self, row: SessionRow) -> bool:
        """Whether a turn has ended that nobody here works on, or is about to tell of."""
        resident = self._parts.cache.get(row.id)
        return (resident is None or resident.task is None) and self._parts.feed.behind(row.id, row.head)

    async def _tell(self, session_id: str, turns: list[int]) -> None:
        for turn in turns:
            try:
                result = await self._parts.outcomes.on_disk(session_id, turn)
            except MainstayError as error:
                self._parts.cache.tell(session_id, turn, error)
            else:
                if result is not None:
                    self._parts.cache.tell(session_id, turn, result)
        await self._parts.outcomes.tell_queued(session_id)


async def see_to_needs(parts: SessionParts, work: ProcessWorker) -> None:
    """Take up what work in hand waits for and nobody has, until the Runtime is left.

    It looks when somebody here begins to wait, when something here has changed, and with every look of the watch: what
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
    for session_id, turn in parts.cache.needed.items():
        row = await parts.store.session(session_id)
        if row is not None and row.state == "open" and row.owner is None and row.turn is not None and row.turn <= turn:
            await parts.turns.claim(row)


async def could_work(parts: SessionParts, work: ProcessWorker, wakes: Wakes, recovers: bool) -> bool:
    """Whether this Runtime could work on something now that is on disk."""
    if parts.mode.draining or parts.store.held() is not None:
        return False  # what runs is waited for, and nothing else is taken up
    turns = [r for r in await parts.store.open_sessions() if r.state == "open" and r.agent in parts.definitions]
    processes = [r for r in await parts.store.active_processes() if work.can(r.registration)]
    owners = {row.owner for row in turns} | {row.owner for row in processes}
    if parts.worker.id in owners:
        return True
    if not recovers:
        return False  # what others have or left behind is never taken up here
    if owners and (None in owners or await parts.worker.any_gone(owners)):
        return True
    return await wakes.could_deliver()
