"""The worker that owns the processes of a Runtime. Everything that runs a process passes here, its first run too.

    register    write a new process; this worker owns it at once if it has a place
    claim       own one that no living worker owns
    launch      run one that is owned here: its engine runs it to its end, or to where it parks
    reconcile   compare with a row read from the store: wake the local run if there is one, otherwise queue the process
                for claiming
    release     give it up: parked, freed for another worker, or stuck

At most `concurrency` processes run at once. One that only waits has given up its place; one that is parked is nothing
but its row. What a run does is its engine's; how a row may change is decided by the store's rules.

`ProcessWatch` is how the watcher of the Runtime claims and reconciles them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from perdure.engine.admission import Capacity, Needs
from perdure.engine.deps import RunDeps
from perdure.engine.host import ClockSkew
from perdure.engine.runner import RuntimeMode, ScopeRunner, Supervisor
from perdure.engine.waiters import CurrentWork, Waiters, current_metadata, in_hand, lend_while_waiting
from perdure.errors import (
    Fenced,
    InvalidDefinition,
    InvalidProcess,
    RuntimeClosed,
    StoreUnavailable,
    UnknownProcess,
    quoted,
)
from perdure.lifecycle.process import OF_SESSION, wake_target
from perdure.model.agent import Caller
from perdure.model.codec import error_text
from perdure.model.message import Metadata
from perdure.model.process import Cancelled, ProcessOutcome, ProcessRow, Registration, SessionOrigin
from perdure.model.session import CancelRequest, Offers
from perdure.model.write import (
    Cancel,
    Claim,
    EventAdded,
    ProcessFilter,
    ProcessLimits,
    ProcessRef,
    Register,
    Registered,
    Release,
    SendSignal,
)
from perdure.ports.process import CancelRequested, ChildOptions, Engine, Leaving, Unloaded
from perdure.processes.run import ProcessRun
from perdure.tools.dispatcher import Dispatcher

log = logging.getLogger("perdure.processes")

What: TypeAlias = Literal["end", "change"]

PLACE = "processes"
"""What a place is called in `Admission`."""
CONCURRENCY = 64
PAGE = 256
"""Processes that are read at a time."""
DUE_AT_ONCE = 1024
"""Parked processes whose time has come that are read at a time."""


class ProcessEvents(Struct, frozen=True):
    """What the worker asks of the rest of its Runtime, or lets it know.

    `needed`: work in hand waits for a process. `changed`: something has happened to a process here. `woken`: a session
    may have a wake in the outbox. `start_child` starts the process that another one asks for under a key.
    `filter_start` and `filter_message` are asked what may be stored of what a host says to an agent: in a registration,
    and with a signal.
    """

    needed: Callable[[], None]
    changed: Callable[[ProcessRow], None]
    woken: Callable[[str], None]
    start_child: Callable[[ProcessRow, str, Any, Mapping[str, Any], ChildOptions], Awaitable[str]]
    filter_start: Callable[[Registration], Awaitable[Registration]]
    filter_message: Callable[[ProcessRow, Any], Awaitable[Any]]


class ProcessWorker:
    """Owns the processes that one Runtime works on. It lives on the event loop.

    `runs` are those that run here, by id. `place_needs` is the place that each of them takes while it works, and while
    it is being claimed; runs in memory stand in line for one in `admission`, before processes on disk: `_found` are
    those, and `_more_unowned` says that there may be more. `held` are suspects that may not run beside another one.
    `passive`: this Runtime has no definitions, and works on nothing but what needs none.

    `waiters` are the tasks of this Runtime that wait for the end of a process, or for any change of it. `_listening`
    are the processes that run here and wait for the end of another, by that one's id.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        supervisor: Supervisor,
        mode: RuntimeMode,
        events: ProcessEvents,
        passive: bool,
        concurrency: int = CONCURRENCY,
    ) -> None:
        self.worker, self.store, self.clock = dispatcher.worker, dispatcher.store, dispatcher.clock
        self.id = self.worker.id
        self.random, self.threads, self.deps = dispatcher.random, dispatcher.threads, dispatcher.deps
        self.make_deps, self.thread_places = dispatcher.make_deps, dispatcher.thread_places
        self.admission, self.deadlocks, self.skew = dispatcher.admission, dispatcher.deadlocks, ClockSkew(self.clock)
        self._supervisor, self.mode, self.passive = supervisor, mode, passive
        self.place_needs: Needs = (Capacity(PLACE, concurrency),)
        self.engines: dict[str, Engine] = {}
        self.runs: dict[str, ProcessTask] = {}
        self._found: dict[str, ProcessRow] = {}
        self.held: set[str] = set()
        self._more_unowned = False
        self._filling: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self.events, self.waiters = events, Waiters[What, ProcessRow]()
        self._listening: dict[str, set[str]] = {}
        self.runner: ScopeRunner[ProcessRow] = ScopeRunner(self, self.store, self.worker, supervisor, log.name)

    def serve(self, engines: Iterable[Engine]) -> None:
        """Which engines run what is registered here."""
        for engine in engines:
            if engine.kind in self.engines:
                raise InvalidDefinition(f"two engines run processes of kind {engine.kind!r}: leave one of them out")
            self.engines[engine.kind] = engine

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.engines)

    def can(self, registration: Registration) -> bool:
        """Whether an engine here can run it."""
        engine = self.engines.get(registration.kind)
        if engine is None or (self.passive and getattr(engine, "needs_definitions", True)):
            return False
        return registration.contract.may_begin and engine.knows(registration)

    async def draft(self, what: Any, args: Mapping[str, Any]) -> Registration:
        """A registration, still without id, of what is to be started."""
        if isinstance(what, Registration):
            return self._checked(what)
        for engine in self.engines.values():
            draft: Registration | Awaitable[Registration] | None = getattr(engine, "draft", _none)(what, args)
            if draft is not None:
                return draft if isinstance(draft, Registration) else await draft
        if isinstance(what, str) and (draft := await self._draft_for_others(what, args)) is not None:
            return draft
        raise InvalidProcess(
            f"{quoted(what)} cannot be started: give a durable function, a tool or an agent which is part of this "
            "Runtime, or the name of one that a worker on this store has"
        )

    async def _draft_for_others(self, name: str, args: Mapping[str, Any]) -> Registration | None:
        """A registration of what another living worker has; for a Runtime without definitions, of what one may have.

        The rule is that of agents (`find_agent`): what no living worker has is refused where others are published and
        the store has never seen it. Otherwise its workers may be down just now, and it waits for them.
        """
        offers = await self.worker.offered_elsewhere()
        published = [each.partition("@")[0] for offer in offers for each in (*offer.functions, *offer.agents)]
        short = name.partition("@")[0]
        is_typo = self.passive and published and short not in published
        if is_typo and not await self.store.processes(ProcessFilter(name=short, limit=1)):
            have = ", ".join(dict.fromkeys(published))
            raise InvalidProcess(f"no worker on this store has {quoted(name)}, and none ever had: give one of {have}")
        if self.passive:
            offers.append(Offers(functions=(name,)))
        for each in offers:
            for engine in self.engines.values():
                draft: Registration | None = getattr(engine, "draft_for_others", _none)(name, args, each)
                if draft is not None:
                    return draft
        return None

    def _checked(self, draft: Registration) -> Registration:
        """A registration that the host made itself, for an engine of its own."""
        if draft.kind not in self.engines and not self.passive:
            raise InvalidProcess(
                f"there is no engine of kind {draft.kind!r} here; there are: {', '.join(self.engines)}"
            )
        return draft

    @property
    def _free_places(self) -> int:
        """How many processes more may be taken up."""
        return self.admission.free(self.place_needs[0]) if self.works and not self.mode.leaving else 0

    @property
    def works(self) -> bool:
        """Whether processes are worked on here: in a store that is no copy to be restored."""
        return self.store.held() is None

    # ------------------------------------------------------------------ owning

    async def register(
        self,
        registration: Registration,
        grants: tuple[str, ...] = (),
        blobs: tuple[str, ...] = (),
        reference: Any = None,
        limits: ProcessLimits | None = None,
    ) -> Registered:
        """Begin a process. When this returns it is on disk, owned here or free to be claimed.

        `reference` is where its work will be found, if it begins here at once.
        """
        begins = (not self.mode.draining or self._is_here(registration)) and self.can(registration)
        placed = begins and self.works and not self.mode.leaving
        placed = placed and (self.admission.try_take(self.place_needs) or self._begins_beyond(registration))
        try:
            register = Register(
                registration, self.clock.now(), self.id if placed else None, grants, blobs,
                reference, "" if reference is None else self.store.identity(), limits,
            )  # fmt: skip
            registered = await self.runner.write(registration.id, register)
        except BaseException:  # also a cancellation: a place that is not given back would block another process
            if placed:
                self.admission.release(self.place_needs)
            raise
        row = registered.row
        if row.owner == self.id:
            self.launch(row, placed)
        elif placed:
            self.admission.release(self.place_needs)
        elif self._is_free(row):
            if self._is_here(registration):
                self._found[row.id] = row
            self._more_unowned = True
            self.fill_places()
        if not registered.known:
            self.announce(row)
        return registered

    def _begins_beyond(self, registration: Registration) -> bool:
        """Begin it though no place is free, if its engine needs one only for the moment in which it begins."""
        if getattr(self.engines[registration.kind], "needs_place", True):
            return False
        self.admission.take_beyond(self.place_needs)
        return True

    async def claim(self, row: ProcessRow, proof: str | None = None) -> bool:
        """Claim a process that no living worker owns, and run it. False: it may not run here, or another was first."""
        if self.mode.leaving or not self.works or not self.can(row.registration):
            return False
        free = not self.mode.draining or self._is_here(row.registration)
        return (free or row.id in await self._needed()) and await self._claim(row, proof)

    def _is_here(self, registration: Registration) -> bool:
        """Whether its code is in our memory: no other Runtime could ever begin it."""
        return registration.definition == self.id

    async def _claim(self, row: ProcessRow, proof: str | None) -> bool:
        # The wall clock may have jumped back since a wait was set. The caller has judged that it is due.
        at = max(self.clock.now(), row.due or 0)
        # Its place is taken while it is claimed: a sweep of many must not claim more than can run.
        self.admission.take_beyond(self.place_needs)
        try:
            death, lived = self.worker.death_of(row.owner), self.worker.lived
            take = Claim(ProcessRef(row.id), self.id, row.generation, at, proof, death, lived)
            taken = await self.runner.write(row.id, take)
        except BaseException:  # also a cancellation: a place that is not given back would block another process
            self.admission.release(self.place_needs)
            raise
        if taken.row is not None and not taken.row.live:
            self.ended(taken.row)
        elif taken.row is not None and taken.row.stuck is not None:
            self.waiters.resolve(row.id, "end", taken.row)
        self.reconcile_all(taken.woken)
        if not taken.won or taken.row is None:
            self.admission.release(self.place_needs)
            if taken.suspect:
                self.held.add(row.id)
            self.fill_places()
            return False
        self.held.discard(row.id)
        if taken.row.takeovers:
            self.worker.claimed(-row.pid, taken.suspect)
        self.launch(taken.row, placed=True)
        return True

    async def recover(self, row: ProcessRow, proof: str | None) -> None:
        """Claim it if there is a place, or queue it. One that is only to be abandoned needs no place."""
        given_up = row.after_owner_death == "abandon" and (proof is not None or row.record.abandon is not None)
        if given_up and self.works and not self.passive:
            await self._claim(row, proof)
        elif self._free_places and not self._found:
            await self.claim(row, proof)
        elif (row.owner is None or proof is not None) and self.can(row.registration):
            self._found.setdefault(row.id, row)  # not if its owner is only silent: that may speak again
            self.fill_places()

    def launch(self, row: ProcessRow, placed: bool = False) -> None:
        """Run a process that is owned here. `placed`: a place was taken for it."""
        if row.id in self.runs:
            if placed:
                self.admission.release(self.place_needs)
            return
        if not placed:
            self.admission.take_beyond(self.place_needs)
        run = self.runs[row.id] = ProcessTask(row, self, self.id)
        _ = self._supervisor.spawn(self.runner.run(run), run.name)
        if self.mode.leaving:
            run.leave()  # it became ours too late; its engine releases it, so that nothing of it is abandoned unseen

    @property
    def backlog(self) -> bool:
        """Whether processes were found that have no place yet."""
        return bool(self._found)

    def retry_held(self) -> None:
        """No suspect runs here: those that were held back may be tried again."""
        if self.held:
            self.held.clear()
            self.find_unowned()

    def find_unowned(self) -> None:
        """There are processes on disk that no worker owns: claim them, page by page."""
        self._more_unowned = True
        self.fill_places()

    def fill_places(self) -> None:
        """Give free places to processes that wait on disk for one."""
        wanted = (self._more_unowned or self._found) and self._free_places
        if wanted and (self._filling is None or self._filling.done()):
            self._filling = self._supervisor.spawn(self._claim_found(), "perdure intake")

    async def _claim_found(self) -> None:
        while self._free_places and (self._found or await self._find_more()):
            page = [self._found.pop(each) for each in list(itertools.islice(self._found, self._free_places))]
            await asyncio.gather(*(self.claim(row) for row in page))

    async def _find_more(self) -> bool:
        """Find processes that no worker owns, a page at a time, past those that cannot run here."""
        if self.mode.draining:
            self._more_unowned = False
            needed = await self._needed()
            self._found.update({row.id: row for row in needed.values() if self._is_free(row)})
            return bool(self._found)
        while self._more_unowned:
            self._more_unowned, after = False, 0  # before reading: what loses its owner meanwhile is read again
            while page := await self.store.unowned_processes(after, PAGE):
                after = page[-1].pid
                self._found.update({row.id: row for row in page if self._is_free(row)})
                if self._found:
                    self._more_unowned = True
                    return True
        return False

    def _is_free(self, row: ProcessRow) -> bool:
        return row.active and row.owner is None and row.id not in self.held and self.can(row.registration)

    def run_ended(self, run: ProcessTask) -> None:
        """A process does not run here any more. Reconcile those that its writes gave something to do."""
        del self.runs[run.row.id]
        for other in run.listens:
            if (listening := self._listening.get(other)) is not None:
                listening.discard(run.row.id)
                if not listening:
                    del self._listening[other]
        if run.journal.woken:
            self.reconcile_all(run.journal.woken)

    # ------------------------------------------------------------------ reconciling with the store

    def reconcile_all(self, rows: Iterable[ProcessRow]) -> None:
        """Reconcile processes that a write of ours gave something to do."""
        for row in rows:
            self.reconcile(row)

    def session_deleted(self, session_id: str) -> None:
        """A write of ours has deleted a session, and with it ended its turn: the processes that this turn had started,
        and those that end with the session, were asked to stop, and one that waited with the turn goes on."""
        for run in self.runs.values():
            parent = run.registration.parent or ""
            if parent.rpartition(".")[0] == session_id or parent.startswith(OF_SESSION):
                self.runner.reread(run.row.id)
        self.find_unowned()
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = self._supervisor.spawn(self._sweep(), "perdure sweep of commands")

    async def _sweep(self) -> None:
        """Delete what engines keep of processes whose session is gone."""
        for engine in self.engines.values():
            if (sweep := getattr(engine, "sweep", None)) is not None:
                await sweep()

    async def read(self, key: str) -> ProcessRow | None:
        return await self.store.process(key)

    def is_unattended(self, row: ProcessRow) -> bool:
        return row.owner == self.id and row.id not in self.runs

    def reconcile(self, row: ProcessRow) -> None:
        """Compare what is in memory of a process with a row read from the store: let its run read what others wrote;
        queue one that no worker owns for claiming; answer who waits for one that has ended or is stuck."""
        run = self.runs.get(row.id)
        if run is not None:
            _ = self._supervisor.spawn(run.noticed(), f"events of process {row.id}")
        elif not row.live:
            self.ended(row)
            return
        elif row.stuck is not None:
            self.waiters.resolve(row.id, "end", row)
        elif self._is_free(row):
            self._found[row.id] = row
            self.fill_places()
        elif row.active and row.owner == self.id:
            self.launch(row)
        self.announce(row)

    def ended(self, row: ProcessRow) -> None:
        """A process has ended: resolve its waiters, and give that to the runs that wait for it."""
        self.waiters.resolve(row.id, "end", row)
        for process_id in self._listening.pop(row.id, ()):
            if (run := self.runs.get(process_id)) is not None:
                run.process_ended(row.id)
        self.announce(row)

    def announce(self, row: ProcessRow) -> None:
        """Something has happened to a process."""
        self.waiters.resolve(row.id, "change", row)
        self.events.changed(row)

    async def wait_end(self, process_id: str) -> ProcessRow:
        """The process, once it has ended or is stuck. A waiter may be cancelled."""
        future = self.waiters.expect(process_id, "end")
        if in_hand():
            self.events.needed()
        try:
            if process_id not in self.runs:
                # Another worker may have ended it before we began to wait.
                row = await self.store.process(process_id)
                if row is None:
                    raise UnknownProcess(process_id)
                if not row.live or row.stuck is not None:
                    return row
            with self.deadlocks.waiting((process_id, None)):
                return await future
        finally:
            self.waiters.withdraw(process_id, "end", future)

    async def wait_change(self, process_id: str, seconds: float) -> None:
        """Wait until something here has happened to a process, or for so many seconds: others may have written."""
        changed = self.waiters.expect(process_id, "change")
        try:
            await asyncio.wait({changed}, timeout=seconds)
            if changed.done():
                changed.result()
        finally:
            self.waiters.withdraw(process_id, "change", changed)

    def listen(self, process_id: str, other: str) -> None:
        """A process that runs here waits for the end of another."""
        self._listening.setdefault(other, set()).add(process_id)
        self.events.needed()

    @property
    def awaited(self) -> set[str]:
        """Processes whose end is waited for here."""
        return {*(name for name, what in self.waiters if what == "end"), *self._listening}

    async def _needed(self) -> dict[str, ProcessRow]:
        """Live processes whose end work of this Runtime waits for, and those that these wait for in turn, on disk."""
        found, asked = dict[str, ProcessRow](), set[str]()
        wanted = {*(name for name, what in self.waiters.needed if what == "end"), *self._listening}
        while wanted:
            process_id = wanted.pop()
            asked.add(process_id)
            row = await self.store.process(process_id)
            if row is not None and row.live:
                found[process_id] = row
                wanted |= {on.name for on in row.record.waits if on.kind == "process"} - asked
        return found

    # ------------------------------------------------------------------ for engines (`Host`)

    async def still_ours(self, row: ProcessRow) -> bool:
        await self.worker.speak()
        now = await self.store.process(row.id)
        return now is not None and now.owner == self.id and now.generation == row.generation

    async def start_child(
        self, parent: ProcessRow, key: str, what: Any, args: Mapping[str, Any], options: ChildOptions
    ) -> str:
        return await self.events.start_child(parent, key, what, args, options)

    async def signal(self, process_id: str, name: str, payload: Any, key: str) -> int:
        return (await self.send(process_id, name, payload, key)).sequence

    async def send(self, process_id: str, name: str, payload: Any, key: str) -> EventAdded:
        """Send a signal to a process, whichever worker owns it."""
        added = await self.store.write(SendSignal(process_id, name, payload, key, self.clock.now()))
        self.reconcile(added.row)
        return added

    def signals_awaited(self, process_id: str) -> tuple[str, ...] | None:
        """The signals that a process waits for in our memory; None when it is not there."""
        run = self.runs.get(process_id)
        return None if run is None else run.awaited_signals()

    async def cancel(self, process_id: str, request: CancelRequest) -> None:
        stopped = await self.store.write(Cancel(ProcessRef(process_id), request, self.clock.now()))
        if stopped.row is not None:
            self.reconcile_all((stopped.row, *stopped.woken))

    # ------------------------------------------------------------------ leaving

    def drain(self) -> None:
        """The Runtime drains: what waits for a place, and what lives elsewhere, is left to others."""
        self._found.clear()
        self.leave_resting()

    def leave_resting(self) -> None:
        """Give up the processes whose work lives elsewhere, unless work in hand waits for them: they need no grace."""
        needed = {*(name for name, what in self.waiters.needed if what == "end"), *self._listening}
        for process_id, run in list(self.runs.items()):
            if run.resting and process_id not in needed and run.registration.contract.once_begun == "reattach":
                run.leave()

    def unawaited(self) -> dict[str, str]:
        """Runs whose work goes on elsewhere and whose end nothing in memory waits for and no session is woken by, as a
        server's: their names, by id."""
        awaited = self.awaited
        return {
            process_id: run.name
            for process_id, run in self.runs.items()
            if run.resting and process_id not in awaited and wake_target(run.row) is None
            if run.registration.contract.once_begun == "reattach"
        }

    def leave(self) -> None:
        """The Runtime is left: every run releases its process, and none begins."""
        for run in list(self.runs.values()):
            run.leave()
        self.fill_places()

    def close(self) -> None:
        """The Runtime was left: nothing else will resolve what is left."""
        left = "the Runtime was left before process {!r} ended: it goes on, ask for it in another Runtime"
        self.waiters.close(lambda process_id: RuntimeClosed(left.format(process_id)))


def _none(*asked: Any) -> None:
    return None


class ProcessTask(ProcessRun[ProcessWorker]):
    """A run as the scope runner works on it (`ScopeTask`): until its process ends, parks or is given back."""

    async def work(self) -> None:
        """Have the engine of its kind run it, and write how it ended."""
        worker = self.host
        work = CurrentWork(
            worker.id,
            (self.row.id, None),
            depth=self.registration.depth,
            metadata=Metadata(self.registration.metadata),
        ).begin()
        if self.row.record.cancel is not None:
            self.cancel(self.row.record.cancel)
        try:
            try:
                engine = worker.engines[self.registration.kind]
                made = worker.make_deps is not None and getattr(engine, "uses_deps", True)
                lend_while_waiting(None)
                outcome: ProcessOutcome = await (self._run_with_deps(engine) if made else engine.run(self))
            except CancelRequested as asked:
                outcome = Cancelled(asked.request.by, asked.request.reason)
            worker.ended((await self.journal.flush(outcome=outcome)).row)
        except (Unloaded, Leaving):
            if not self.parked:
                raise Leaving from None
        except BaseException as error:  # an engine of the host's may raise anything, and is not run again for it
            if isinstance(error, Exception | asyncio.CancelledError):
                raise
            raise InvalidDefinition(f"its engine raised {type(error).__name__}: {error_text(error)}") from error
        finally:
            work.end()

    async def _run_with_deps(self, engine: Engine) -> ProcessOutcome:
        """Run it with live objects of its own, which are left at its end and where it leaves memory."""
        worker, origin = self.host, self.registration.origin
        session_id = origin.session_id if isinstance(origin, SessionOrigin) else ""
        row = await worker.store.session(session_id) if session_id else None
        assert worker.make_deps is not None
        caller = Caller(session_id, "" if row is None else row.agent, current_metadata())
        deps = RunDeps(worker.make_deps, caller, worker.random)
        try:
            self.deps = await deps.enter(self.guard, self._wait_for_deps)
            outcome = await engine.run(self)
        except BaseException as error:  # the host's objects are left however the run ends
            await deps.leave(error)
            raise
        await deps.leave()
        return outcome

    async def _wait_for_deps(self, seconds: float) -> None:
        """Wait without a place: processes whose objects can be made run meanwhile."""
        self.rest()
        await self.host.clock.sleep(seconds)
        self.rest(False)
        await self.place()

    async def give_back(self) -> None:
        """Give it up for another worker, with what has happened written down."""
        worker = self.host
        try:
            if self.journal.begun:  # otherwise its start must stay unwritten: any worker may begin it
                await self.journal.flush()
            freed = await worker.store.write(Release(self.scope, worker.clock.now()))
        except (Fenced, StoreUnavailable) as error:
            log.warning("%s: %s", self.name, error)
            return
        if not freed.row.live:
            worker.ended(freed.row)  # no other worker may do it: it is abandoned
        worker.reconcile_all(freed.woken)

    async def set_aside(self, error: Exception) -> None:
        worker = self.host
        try:
            await worker.store.write(Release(self.scope, worker.clock.now(), f"{type(error).__name__}: {error}"))
        except Exception as second:  # the process stays ours, and is found without a task
            log.error("%s could not be set aside: %s", self.name, second)
        row = await worker.store.process(self.row.id)
        if row is not None and row.stuck is not None:
            worker.waiters.resolve(row.id, "end", row)
            worker.announce(row)

    def stopped(self, error: Exception | None) -> None:
        """The task is over: give its place to another process, and pass on what was written meanwhile."""
        worker, process_id = self.host, self.row.id
        self._listener, self._over = None, True  # without its listener, which refers to it, it is freed at once
        if self._placing is not None:
            self._placing.cancel()
        if self.placed:
            self.placed = False
            worker.admission.release(worker.place_needs)
        worker.run_ended(self)
        if self.parked:
            worker.announce(self.journal.row)
        # A write of another worker may have ended the process.
        written = self.written_about or worker.waiters.of(process_id, "end")
        if written and (self.parked or self.leaving or isinstance(error, Fenced)) and not worker.mode.leaving:
            worker.runner.reread(process_id)
        worker.fill_places()


class ProcessWatch:
    """Active processes, as the watcher finds, claims and reconciles them (`WatchedKind`)."""

    def __init__(self, worker: ProcessWorker) -> None:
        self._worker, self._store = worker, worker.store

    async def read_open(self) -> Sequence[ProcessRow]:
        return await self._store.active_processes()

    def number(self, row: ProcessRow) -> int:
        return -row.pid

    def adopt(self, rows: Sequence[ProcessRow]) -> None:
        self._worker.runner.adopt(rows)

    async def recover(self, row: ProcessRow, proof: str | None) -> None:
        if row.owner is None:
            self._worker.find_unowned()
        else:
            await self._worker.recover(row, proof)

    def may_be_suspect(self, row: ProcessRow, gone: Mapping[str, str | None]) -> bool:
        return row.takeovers > 0 and row.owner in gone and row.after_owner_death == "rerun"

    def may_claim(self, row: ProcessRow) -> bool:
        return self._worker.works and self._worker.can(row.registration) and not self._worker.mode.leaving

    async def claim(self, row: ProcessRow, proof: str | None) -> bool:
        return await self._worker.claim(row, proof)

    @property
    def holds_suspects(self) -> bool:
        return bool(self._worker.held)

    def retry_suspects(self) -> None:
        self._worker.retry_held()

    async def end_due(self) -> None:
        """Claim the parked processes whose time has come."""
        if self._worker.backlog:
            return  # what was found before has no place yet, and would be found again
        skew = self._worker.skew
        now = skew.measure()
        passed = 0
        while True:
            due = await self._store.due_processes(now + skew.back, DUE_AT_ONCE, passed)
            over = [row for row in due if any(w.due and skew.due(w.since, w.due) <= now for w in row.record.waits)]
            ours = [row for row in over if self._worker.can(row.registration)]
            await asyncio.gather(*(self._worker.recover(row, None) for row in ours))
            if len(due) < DUE_AT_ONCE or ours:
                return
            passed += len(due)  # none of them is for us: do not let them stand in the way of those that are

    async def reconcile(self, changed: bool) -> None:
        if not changed:
            return
        for process_id in {*self._worker.awaited, *self._worker.runs}:
            row = await self._store.process(process_id)
            if row is not None and (not row.live or row.stuck is not None or self._has_changed(row)):
                self._worker.reconcile(row)

    def _has_changed(self, row: ProcessRow) -> bool:
        run = self._worker.runs.get(row.id)
        return run is not None and (row.record.sequence > run.journal.read_to or row.owner != self._worker.id)
