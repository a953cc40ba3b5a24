"""Polling the store for what others have changed, and for turns and processes that no living worker owns.

One loop per Runtime, four times a second, and as soon as a front end says that it has written:

    changed?           another OS process has written, half a renewal has passed, or a worker has died
      adopt            launch what this worker owns and has no task for
      claim            what no living worker owns: all at once, but for suspects, which run one at a time
      reconcile        what runs here, or is waited for here, with its row in the store
      followers        others that read what was written: the feed of processes, tasks, wakes
    every time         end what is due

While no other process writes, a poll costs a read of eight bytes and one attempt at the lock of each other worker. What
is particular to turns and to processes is passed in: `sessions/watch.py`, `processes/worker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from perdure.engine.lease import Worker
from perdure.engine.runner import Activity, ScopeRow, Supervisor
from perdure.errors import StoreError
from perdure.lifecycle import suspects
from perdure.model.session import Death, Deaths
from perdure.model.write import Retire
from perdure.ports.host import Clock
from perdure.ports.store import Store

log = logging.getLogger("perdure.engine")

PERIOD = 0.25
SOONEST = 0.01
"""Seconds between two polls where other processes say all the time that they have written."""
SUSPECTS_AT_ONCE = 8
"""Suspects that are tried in one poll, of which one may run."""
CLAIMS_AT_ONCE = 256
"""Claims under way at the same time: a start after a crash must not starve the host."""


class WatchedKind(Protocol[ScopeRow]):
    """What is particular to turns, or to processes."""

    async def read_open(self) -> Sequence[ScopeRow]:
        """The rows that a worker owns or may claim."""
        ...

    def number(self, row: ScopeRow) -> int:
        """The number of its scope, unique among turns and processes (`Deaths.scope`)."""
        ...

    def adopt(self, rows: Sequence[ScopeRow]) -> None:
        """Launch what this worker owns and has no task for."""
        ...

    async def recover(self, row: ScopeRow, proof: str | None) -> None:
        """Claim what no living worker owns, or queue it for claiming. `proof` tells why its owner is dead."""
        ...

    def may_be_suspect(self, row: ScopeRow, gone: Mapping[str, str | None]) -> bool:
        """Whether it may have killed its owner: it is then claimed only while no other suspect runs."""
        ...

    def may_claim(self, row: ScopeRow) -> bool:
        """Whether this worker could work on it now."""
        ...

    async def claim(self, row: ScopeRow, proof: str | None) -> bool:
        """Claim it now; False if another worker was first, or it may not run here."""
        ...

    @property
    def holds_suspects(self) -> bool:
        """Whether scopes that no worker owns wait until a suspect may run."""
        ...

    def retry_suspects(self) -> None:
        """No suspect runs here: claim those again that waited."""
        ...

    async def reconcile(self, changed: bool) -> None:
        """Compare what is in memory with the store. `changed`: another process has written since the last poll."""
        ...

    async def end_due(self) -> None:
        """End the waits whose time is up."""
        ...


def always() -> bool:
    return True


class PeriodicJob(Struct, frozen=True):
    """What is done every so many `seconds` beside the polling, while it is `allowed`; `at_once`: also at the start."""

    name: str
    seconds: float
    run: Callable[[], Coroutine[Any, Any, None]]
    allowed: Callable[[], bool] = always
    at_once: bool = False


class ScopeWatcher:
    """Polls for one Runtime. `runs`: it claims what no living worker owns and ends what is due. What this worker owns
    is launched in any case.

    `_suspects_wait`: a suspect that could run here waits until another one has ended or has lived long enough.
    """

    def __init__(  # noqa: PLR0913  # put together in one place
        self,
        worker: Worker,
        store: Store,
        clock: Clock,
        activity: Activity,
        kinds: Sequence[WatchedKind[Any]],
        followers: Sequence[Callable[[], Awaitable[None]]],
        jobs: Sequence[PeriodicJob],
        runs: bool,
    ) -> None:
        self._worker, self._store, self._clock, self._activity = worker, store, clock, activity
        self._kinds, self._followers, self._jobs, self._may_run = kinds, followers, jobs, runs
        self._claiming = asyncio.Semaphore(CLAIMS_AT_ONCE)
        self._judged = self._started = clock.monotonic()
        self._suspects_wait = False
        self._beside = Supervisor()
        self._ran: dict[str, tuple[float, asyncio.Task[None] | None]] = {}

    @property
    def _runs(self) -> bool:
        return self._may_run and self._store.held() is None

    async def watch(self) -> None:
        """For ever. A store in trouble is polled again; everything else that fails here is a bug, and is logged."""
        first = True
        try:
            while True:
                try:
                    await self.poll(first)
                    first = False
                except StoreError as error:
                    log.warning("cannot poll the store: %s", error)
                except Exception:  # without the watcher no turn or process of this Runtime would be found again
                    log.exception("a fault of ours; the watcher goes on for all other scopes")
                self._activity.polled.set()
                self._activity.changed.set()
                await asyncio.sleep(SOONEST)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD - SOONEST):
                        await self._activity.written.wait()
                self._activity.written.clear()
        finally:
            await self._beside.stop()

    async def poll(self, first: bool = False) -> None:
        worker, store = self._worker, self._store
        changed = await store.changed()
        if changed and store.held() is not None:
            await worker.speak()  # a writing transaction sees that the copy was restored; an idle one has none
        due = self._clock.monotonic() - self._judged >= worker.terms.renewal / 2
        # A killed worker writes nothing that `changed` would show; the lock that it held is free.
        due = due or await worker.died_meanwhile() or await self._suspect_has_room() or worker.restart_is_overdue()
        if first or changed or due:
            self._judged = self._clock.monotonic()
            await self._find_orphans()
            for kind in self._kinds:
                await kind.reconcile(changed)
            for follow in self._followers:
                await follow()
        if self._runs:
            for kind in self._kinds:
                await kind.end_due()
        self._start_jobs()

    def _start_jobs(self) -> None:
        now = self._clock.monotonic()
        for job in self._jobs:
            at, task = self._ran.get(job.name, (None if job.at_once else self._started, None))
            over = task is None or task.done()
            if over and (at is None or now - at >= job.seconds) and job.allowed():
                self._ran[job.name] = now, self._beside.spawn(job.run(), job.name)

    # ------------------------------------------------------------------ what no living worker owns

    async def _find_orphans(self) -> None:
        """Launch what is ours; claim what no living worker owns, all at once but for suspects."""
        worker = self._worker
        found = list[tuple[WatchedKind[Any], Any]]()
        for kind in self._kinds:
            rows = await kind.read_open()  # before the workers: what a new one starts meanwhile is not free
            kind.adopt(rows)
            found += [(kind, row) for row in rows]
        gone, deaths = await worker.gone(), await worker.deaths()
        if not self._runs:
            return
        orphans = [
            (kind, row, worker.proof_of_death(row.owner, gone))
            for kind, row in found
            if worker.may_claim(row.owner, gone)
        ]
        suspected = self._suspects(orphans, deaths, gone)
        held = {mark.scope for mark, _, _ in suspected}
        free = [each for each in orphans if each[0].number(each[1]) not in held]
        free.sort(key=lambda each: each[1].owner is None)  # those left by the dead before those that only wait
        await asyncio.gather(*(self._recover(*each) for each in free))
        needed = {row.owner for _, _, row in suspected}
        for worker_id in gone:
            if worker_id not in needed:
                await self._store.write(Retire(worker_id, dead=True, beside=tuple(gone)))
        await self._claim_suspect([(kind, row) for _, kind, row in suspected], gone)

    async def _recover(self, kind: WatchedKind[Any], row: Any, proof: str | None) -> None:
        async with self._claiming:
            await kind.recover(row, proof)

    # ------------------------------------------------------------------ suspects

    def _suspects(
        self,
        orphans: Sequence[tuple[WatchedKind[Any], Any, str | None]],
        deaths: Mapping[int, Deaths],
        gone: Mapping[str, str | None],
    ) -> list[tuple[Deaths, WatchedKind[Any], Any]]:
        """Which of these are suspects, those first that have taken the fewest workers with them."""
        found = list[tuple[Deaths, WatchedKind[Any], Any]]()
        for kind, row, _ in orphans:
            if not kind.may_be_suspect(row, gone):
                continue
            scope = kind.number(row)
            mark = deaths.get(scope)
            if row.owner is not None:
                mark = suspects.after(mark, scope, self._worker.death_of(row.owner) or Death(row.owner))
            if mark is not None and suspects.is_suspect(mark) and not suspects.is_stuck(mark):
                found.append((mark, kind, row))
        return sorted(found, key=lambda each: each[0].alone)

    async def _claim_suspect(
        self, found: Sequence[tuple[WatchedKind[Any], Any]], gone: Mapping[str, str | None]
    ) -> None:
        """Claim one suspect, if this OS process runs none."""
        ours = [(kind, row) for kind, row in found if kind.may_claim(row)]
        self._suspects_wait = bool(ours) or any(kind.holds_suspects for kind in self._kinds)
        if self._worker.suspect is not None:
            return
        for kind, row in ours[:SUSPECTS_AT_ONCE]:
            if await kind.claim(row, gone.get(row.owner or "")):
                return
        for kind in self._kinds:
            kind.retry_suspects()

    async def _suspect_has_room(self) -> bool:
        """Whether a suspect that waits may be run now: the one before it is done, or has lived for long enough."""
        if self._worker.suspect is None:
            return self._suspects_wait  # another Runtime of this OS process may run one
        return await self._worker.outlived_suspect()
