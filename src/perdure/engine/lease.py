"""Ownership. A Runtime is one worker; it renews one row whatever the number of its sessions.

Others judge a worker twice. Its lease (on a file store a lock the kernel frees) tells at once that it is dead. While
the lease is held, only time can tell: a worker whose beat has not moved for its whole term, on the judge's own
monotonic clock, may be relieved. Wall clocks are never compared, so a jump of either clock ends nothing early.

The renewals come from a thread of their own, through the store's writer: a blocked event loop does not cost ownership.
The same thread notices a blocked loop and names what blocks it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import InvalidDefinition, StoreError, StoreUnavailable, quoted
from perdure.lifecycle import suspects
from perdure.model.session import Death, Deaths, Offers, WorkerRow, WorkerUse
from perdure.model.write import Beat, Outlived, Retire, TurnScope
from perdure.ports.host import Clock
from perdure.ports.store import Store

log = logging.getLogger("perdure.engine")

BLOCKED_AFTER = 1.0
TICK = 0.2
UNEASY = 2.0
"""Seconds between the beats of a worker that may die: its last one tells how long it lived."""
NOTHING = Offers()
FOR_EVER = 1e9
"""Seconds: no lease is longer."""


class LeaseTerms(Struct, frozen=True):
    """How long a silent worker is believed to live, and how often it speaks. `term` is at least three renewals.

    `restart` is how long a host waits for another worker before it is told that the last one with an agent is gone
    (`Queued`): it may be just being started again.
    """

    term: float = 30.0
    renewal: float = 10.0
    restart: float = 5.0

    def __post_init__(self) -> None:
        if type(self.restart) not in (int, float) or not 0 <= self.restart < FOR_EVER:
            raise InvalidDefinition(f"restart={quoted(self.restart)} is not usable: give seconds, 0 or more")
        seconds = all(type(each) in (int, float) for each in (self.term, self.renewal))
        # Said so that what is not a number is refused too; 0.3 is three times 0.1 for people.
        if not (seconds and 0 < self.renewal <= self.term < FOR_EVER and 3 * self.renewal <= self.term * (1 + 1e-9)):
            term, renewal = quoted(self.term), quoted(self.renewal)
            raise InvalidDefinition(
                f"a lease of {term} s renewed every {renewal} s is too tight, or none: use term >= 3 * renewal"
            )


class Worker:
    """This Runtime as others see it."""

    def __init__(
        self,
        store: Store,
        worker_id: str,
        terms: LeaseTerms,
        clock: Clock,
        offers: Offers = NOTHING,
        use: Callable[[], WorkerUse | None] = lambda: None,
    ) -> None:
        self._store, self._clock, self.terms, self._offers, self._use = store, clock, terms, offers, use
        self.id = worker_id
        self._lease = store.lease(worker_id)
        self._row = WorkerRow(
            worker_id,
            socket.gethostname(),
            _boot_id(),
            os.getpid(),
            clock.now(),
            term_ms=int(terms.term * 1000),
            offers=offers,
            process=self._lease.process,
        )
        self._born = clock.monotonic()
        self._renewed = clock.monotonic()
        self._seen: dict[str, tuple[int, float]] = {}
        self._living: tuple[WorkerRow, ...] = ()  # other workers, as of the last look at their rows
        self._missed: dict[str, float] = {}  # agents that a worker had which is gone since then
        self.known: set[str] = set()
        self.renewals: list[Callable[[], None]] = []  # called after each confirmed renewal, on any thread
        self.alive: set[str] | None = None  # the rows of workers have not been read yet
        self._deaths: dict[str, Death] = {}
        # Copies of what is on disk: the suspect that this worker runs; whether it has anything that was taken over
        # from the dead and has no new record yet.
        self.suspect: int | None = None
        self.uneasy = False

    @property
    def lived(self) -> int:
        """Milliseconds since this worker began, on its monotonic clock."""
        return round((self._clock.monotonic() - self._born) * 1000)

    async def start(self) -> None:
        await self._lease.hold()
        self._renewed = self._clock.monotonic()
        await self._store.write(Beat(self._row))

    async def stop(self) -> None:
        try:
            await self._store.write(Retire(self.id, at=self._clock.now()))
        except StoreError as error:
            # The freed lock says the same to other workers.
            log.warning("worker %s leaves without a word: %s", self.id, error)
        finally:
            await self._lease.drop()

    async def abandon(self) -> None:
        """Let go of the lock without a word, as a crash would."""
        await self._lease.drop()

    def renew(self) -> None:
        """Send one beat, from any thread."""
        at = self._clock.monotonic()
        self._row = self._next_row()

        def done(known: bool | None, error: BaseException | None) -> None:
            if error is not None:
                log.warning("the renewal of worker %s failed: %s", self.id, error)
            else:
                self._renewed = at
                for renewed in tuple(self.renewals):
                    renewed()

        self._store.submit(Beat(self._row), done)

    def sure(self) -> bool:
        """Whether no other worker can have relieved this one: the last renewal that landed is younger than the term."""
        return self._clock.monotonic() - self._renewed < self.terms.term

    async def speak(self) -> None:
        """Send one beat and wait for it: whatever this process wrote before is decided then."""
        at = self._clock.monotonic()
        self._row = self._next_row()
        await self._store.write(Beat(self._row))
        self._renewed = at

    def _next_row(self) -> WorkerRow:
        """Return the row for the next beat, with the use of this worker as it is now."""
        offers = replace(self._offers, use=self._use())
        return replace(self._row, beat=self._row.beat + 1, lived=self.lived, offers=offers)

    async def confirm(self, scope: TurnScope) -> bool:
        """Make sure: speak up again, then see whether the scope is still ours."""
        await self.speak()
        row = await self._store.session_by_sid(scope.sid)
        return row is not None and row.owner == scope.owner and row.generation == scope.generation

    # ------------------------------------------------------------------ judging others

    async def gone(self) -> dict[str, str | None]:
        """Workers that are dead, with what proves it, or silent for a whole term as far as we have watched (None)."""
        now = self._clock.monotonic()
        found, rows = dict[str, str | None](), await self._store.workers()
        for row in rows:
            if row.id == self.id:
                self.suspect = row.suspect
                continue
            beat, since = self._seen.get(row.id, (-1, now))
            if beat != row.beat:
                since = now
                self._seen[row.id] = (row.beat, now)
            if await self._store.proven_dead(row):
                found[row.id] = f"worker {row.id} (pid {row.pid} on {row.host}) holds its lease no more"
            elif now - since > row.term_ms / 1000:
                found[row.id] = None
        self.known = {row.id for row in rows}
        self.alive = {row.id for row in rows if row.id not in found}
        # Locks of one OS process are not freed at the same instant, so what is not found gone yet may have died too.
        dead = [row for row in rows if row.id in found or row.process != self._row.process]
        self._deaths = {row.id: suspects.death_of(row, dead) for row in rows if row.id in found}
        living = tuple([row for row in rows if row.id in self.alive and row.id != self.id])
        for row in self._living:
            if row.id not in self.alive and row.offers is not None:
                self._missed |= dict.fromkeys(row.offers.agents, now)
        self._living = living
        self._seen = {k: v for k, v in self._seen.items() if k in self.known}
        return found

    def death_of(self, worker_id: str | None) -> Death | None:
        """What is known of the death of a worker that was found gone."""
        return None if worker_id is None else self._deaths.get(worker_id)

    def claimed(self, scope: int, suspect: bool) -> None:
        """A scope that other workers have died with is ours."""
        self.uneasy = True
        if suspect:
            self.suspect = scope

    async def died_meanwhile(self) -> bool:
        """Whether a worker that lived when its row was last read has died. Reads no row: a death writes nothing."""
        for row in self._living:
            if await self._store.proven_dead(row):
                return True
        return False

    async def is_offered(self, agent: str) -> bool:
        """Whether a living worker, this one or another, takes up turns of this agent by itself."""
        await self.gone()
        return any(row.offers is None or agent in row.offers.agents for row in (self._row, *self._living))

    def may_be_restarted(self, agent: str) -> bool:
        """Whether a worker with this agent is gone for so short a time that it may be just being started again."""
        since = self._missed.get(agent)
        return since is not None and self._clock.monotonic() - since < self.terms.restart

    def restart_is_overdue(self) -> bool:
        """Whether the time has run out in which a worker may be started again, since this was last asked."""
        late = [agent for agent in self._missed if not self.may_be_restarted(agent)]
        for agent in late:
            del self._missed[agent]
        return bool(late)

    async def others(self) -> tuple[WorkerRow, ...]:
        """The other workers that live."""
        await self.gone()
        return self._living

    async def is_first_to_forget(self) -> bool:
        """Whether this is the one of all living workers which forgets what is too old: one is enough."""
        await self.gone()
        return all(self.id <= row.id for row in self._living if row.offers is not None and row.offers.retention)

    async def offered_elsewhere(self) -> list[Offers]:
        """What other living workers take up by themselves."""
        await self.gone()
        return [row.offers for row in self._living if row.offers is not None]

    def is_alive(self, worker_id: str) -> bool:
        """Whether a worker lived when the rows of all were last read."""
        return self.alive is not None and worker_id in self.alive

    async def any_gone(self, workers: Iterable[str | None]) -> bool:
        """Whether one of these is a worker that may be relieved, or has retired."""
        gone = await self.gone()
        return any(each in gone or each not in self.known for each in workers)

    def may_claim(self, owner: str | None, gone: Mapping[str, str | None]) -> bool:
        """Whether a scope may be claimed: it has no `owner`, or another one that is gone or has retired."""
        return owner is None or (owner != self.id and (owner in gone or owner not in self.known))

    def proof_of_death(self, owner: str | None, gone: Mapping[str, str | None]) -> str | None:
        """Why a worker found `gone` is dead; None when it may still live, and is only silent."""
        return None if owner is None else gone.get(owner, None if owner in self.known else "its worker has retired")

    # ------------------------------------------------------------------ suspects

    async def deaths(self) -> dict[int, Deaths]:
        """The scopes that workers have died with, by number; takes note of whether this worker has one of them."""
        found = {each.scope: each for each in await self._store.deaths()}
        self.uneasy = any(each.worker == self.id for each in found.values())
        return found

    async def outlived_suspect(self) -> bool:
        """Whether the suspect that this worker runs is done, or has lived for long enough to be none any more."""
        deaths = await self.deaths()
        mark = None if self.suspect is None else deaths.get(self.suspect)
        if mark is not None and mark.worker == self.id and suspects.is_suspect(mark):
            if self.lived - mark.since < suspects.room_after(deaths.values()):
                return False
            await self._store.write(Outlived(mark.scope, self.id))
        self.suspect = None
        return True


class Pulse:
    """The thread that renews, and that notices when the event loop is stuck."""

    def __init__(self, worker: Worker, loop: asyncio.AbstractEventLoop, busy_with: Callable[[], str]) -> None:
        self._worker, self._loop, self._busy_with = worker, loop, busy_with
        self._loop_thread = threading.get_ident()
        self._heard = time.monotonic()
        self._complained = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"perdure-pulse {worker.id}", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StoreUnavailable(f"there is no thread to be had for the renewals of this worker: {error}") from None

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        renew_at = time.monotonic() + self._worker.terms.renewal
        asked_at: float | None = None
        while not self._end.wait(min(TICK, self._worker.terms.renewal / 2)):
            now = time.monotonic()
            if self._worker.uneasy:
                renew_at = min(renew_at, now + UNEASY)
            if now >= renew_at:
                self._renew()
                renew_at = now + self._worker.terms.renewal
            try:
                if asked_at is not None and self._heard < asked_at:
                    # Asked up to a tick after it began, seen up to a tick late.
                    if now - asked_at > BLOCKED_AFTER - 2 * TICK:
                        self._complain(now - asked_at)
                else:
                    asked_at = now if self._ask() else None
            except MemoryError:
                asked_at = None  # the renewals go on

    def _renew(self) -> None:
        try:
            self._worker.renew()
        except Exception:  # the thread must live: without it the Runtime would lose what it owns
            log.exception("the renewal of worker %s failed; it is tried again", self._worker.id)

    def _ask(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._answered)
        except RuntimeError:
            return False
        return True

    def _answered(self) -> None:
        self._heard = time.monotonic()
        self._complained = False

    def _complain(self, seconds: float) -> None:
        if self._complained:
            return
        self._complained = True
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)"
        task = asyncio.current_task(self._loop)
        log.error(
            "the event loop has been blocked for %.1f s by %s, in task %r: make it async or let it run in a thread\n%s",
            seconds,
            self._busy_with(),
            None if task is None else task.get_name(),
            stack,
        )


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"
