"""The turn engine: from a claimed session to one commit, and on to the next input that waits.

    launch(row)     begin a task for this session's open turn, which this worker owns
      └ work        turn after turn, while inputs wait and this worker owns the session (`SessionTask`)
          └ turn    load the history, build the machine, replay its records, drive it, commit

A turn is written about by its owner alone. Inputs and cancel requests that others write meanwhile reach it by the
answers to its own writes, by this Runtime's verbs, and by the watch, which reads rows and reconciles them.
What is in memory of a session (`CachedSession`) is a cache of what is on disk, and may be dropped whenever it is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.admission import TurnPlaces
from perdure.engine.control import TurnAborted, TurnCancelled
from perdure.engine.deps import RunDeps, instructions_of
from perdure.engine.driver import Handler, Parked, Run, decode_cancel, drive
from perdure.engine.journal import TurnJournal, load, taken
from perdure.engine.lease import Worker
from perdure.engine.limits import Reserved, SpendLimits, TurnSpending
from perdure.engine.model_call import ModelCaller
from perdure.engine.rate_limits import RateLimits
from perdure.engine.retry_queue import RetryQueue
from perdure.engine.runner import Activity, RuntimeMode, ScopeRunner, Supervisor
from perdure.engine.waiters import CurrentWork, Deadlocks, current_metadata, lend_while_waiting, set_origin
from perdure.errors import (
    Fenced,
    NotPrepared,
    ProviderError,
    SessionDeleted,
    StoreDamaged,
    StoreUnavailable,
    TurnFailed,
)
from perdure.graph.cells import Cell
from perdure.graph.commit import End, ledger
from perdure.graph.view import Turn, View
from perdure.model.agent import Caller
from perdure.model.codec import clean_text
from perdure.model.command import COMMAND_KIND
from perdure.model.effect import Boundary, CallModel, CancelTurn, Checkpoint, Delivery, Effect, RunCode, RunTools
from perdure.model.event import InputDelivered, TurnCommitted, TurnStarted
from perdure.model.ids import turn_id
from perdure.model.limit import Spending
from perdure.model.message import Metadata, Scalar
from perdure.model.monitor import PluginMonitor
from perdure.model.outcome import Waiting, answerable
from perdure.model.plugin import Issue
from perdure.model.process import ProcessRow
from perdure.model.record import Asking, Closed, Delivered, Framed, Record, Replied, Said, since_reopened
from perdure.model.session import CancelRequest, InboxRow, SessionRow, load_settings, metadata_for
from perdure.model.spending import HOUR, UsageRow
from perdure.model.transcript import Transcript
from perdure.model.write import CancelWon, Claim, Committed, Release, SessionRef, TurnScope
from perdure.observe.feed import Feed, TurnEvents
from perdure.plugins.registry import PluginSession, PluginStates
from perdure.plugins.turn import TurnPlugins, plugins_of
from perdure.ports.process import Leaving
from perdure.ports.provider import Prices
from perdure.ports.services import TraceSink, TurnServices
from perdure.ports.tool import GathersTools
from perdure.sessions.cache import Archive, CachedSession, SessionCache
from perdure.sessions.definition import Definition, Models
from perdure.sessions.hold import HeldCommands, held
from perdure.sessions.outcomes import TurnOutcomes
from perdure.sessions.result import TurnResult
from perdure.sessions.setup import Setup, changed, equip, lean, probe_of
from perdure.sessions.usage import TURNS, turn_costs
from perdure.tools.cells import Cells
from perdure.tools.dispatcher import Dispatcher
from perdure.turn.machine import Machine, Phase, TurnState

log = logging.getLogger("perdure.sessions")

R = TypeVar("R")

SLACK = 256
"""Bytes by which the first request of a turn may be larger than it seems when its input is accepted."""


class Landed(Struct, frozen=True, gc=False):
    """A turn that is committed: how it ended, and the session after it."""

    row: SessionRow
    end: End


class TurnPorts(Struct, frozen=True):
    """What turns need of the parts that are built on them.

    `services` makes what plugins and tools of a turn may ask of their session. `between` is given the row of a session
    after a commit, and delivers the wakes that waited for it: those of the sessions in `blocked`. `resumed` is called
    when a turn goes on that was parked or left, `woken` with the processes that a commit has freed. `arm` starts the
    monitors that plugins want with a session, and tells what could not start. `commands` are those that turns may be
    held for.
    """

    services: Callable[[Run], TurnServices]
    between: Callable[[SessionRow], Awaitable[SessionRow]]
    blocked: Set[str]
    resumed: Callable[[], None]
    woken: Callable[[tuple[ProcessRow, ...]], None]
    arm: Callable[[SessionRow, Sequence[PluginMonitor]], Awaitable[list[Issue]]]
    commands: HeldCommands


class ParkedTurns:
    """Turns that are parked until a process ends, so that they go on as soon as that has happened in this Runtime.

    It is a hint: the row of the session and the store's own rules decide. The watch finds a turn whose process ended
    elsewhere, and turns that other Runtimes have parked.

    `waiting` are sessions by the processes that their turns wait for, `processes` the other way round. `_forget`
    takes a turn's waits out of the check for circles. It lives on the event loop."""

    def __init__(self, deadlocks: Deadlocks) -> None:
        self._deadlocks = deadlocks
        self.waiting: dict[str, set[str]] = {}
        self.processes: dict[str, tuple[str, ...]] = {}
        self._forget: dict[str, Callable[[], None]] = {}

    def add(self, session_id: str, turn: int, processes: tuple[str, ...]) -> None:
        """The turn of a session was parked."""
        self.drop(session_id)
        self.processes[session_id] = processes
        for process_id in processes:
            self.waiting.setdefault(process_id, set()).add(session_id)
        self._forget[session_id] = self._deadlocks.park((session_id, turn), [(each, None) for each in processes])

    def drop(self, session_id: str) -> None:
        """Its turn goes on, here or elsewhere, or is over."""
        for process_id in self.processes.pop(session_id, ()):
            sessions = self.waiting[process_id]
            sessions.discard(session_id)
            if not sessions:
                del self.waiting[process_id]
        if (forget := self._forget.pop(session_id, None)) is not None:
            forget()


class Turns:
    """Runs the turns of the sessions this worker owns."""

    def __init__(  # noqa: PLR0913  # put together in one place
        self,
        worker: Worker,
        mode: RuntimeMode,
        activity: Activity,
        feed: Feed,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        definitions: Mapping[str, Definition],
        models: Models,
        limits: RateLimits,
        cache: SessionCache[SessionTask],
        archive: Archive,
        outcomes: TurnOutcomes,
        ports: TurnPorts,
        traces: TraceSink | None,
        spend_limits: SpendLimits | None,
        retries: RetryQueue,
        prices: Prices | None,
        places: TurnPlaces,
    ) -> None:
        self.places = places
        self._worker, self.mode, self._activity, self._feed = worker, mode, activity, feed
        self._supervisor, self._dispatcher, self._definitions = supervisor, dispatcher, definitions
        self.models, self.cache, self._archive, self.outcomes = models, cache, archive, outcomes
        self._ports, self._traces, self.spend_limits = ports, traces, spend_limits
        self.store, self.clock = dispatcher.store, dispatcher.clock
        self.cells = Cells(dispatcher, self._past_cells)
        self.retries = retries
        caller = ModelCaller(
            dispatcher.admit, dispatcher.random, dispatcher.store, limits, retries, dispatcher.park_after, prices
        )
        self._handlers: dict[type[Effect], Handler] = {
            CallModel: caller.call,
            RunTools: dispatcher.run,
            RunCode: self.cells.run,
            Checkpoint: self._checkpoint,
        }
        self._lean: dict[str, Setup] = {}
        self._sizes: dict[str, int] = {}
        self.parked = ParkedTurns(dispatcher.deadlocks)
        self.runner: ScopeRunner[SessionRow] = ScopeRunner(self, self.store, worker, supervisor, log.name)

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents whose turns may be begun here now: none while the Runtime drains, or in a copy of a store."""
        return () if self.mode.draining or self.store.held() is not None else tuple(self._definitions)

    def worker_for(self, agent: str) -> str | None:
        """This worker, if it may begin turns of that agent now."""
        may = agent in self._definitions and not self.mode.draining and self.store.held() is None
        return self._worker.id if may else None

    # ------------------------------------------------------------------ what others wrote

    async def read(self, key: str) -> SessionRow | None:
        return await self.store.session(key)

    def is_unattended(self, row: SessionRow) -> bool:
        return row.owner == self._worker.id and row.state == "open" and row.id not in self.cache.tasks

    def reconcile(self, row: SessionRow) -> None:
        """Compare what is in memory of a session with a row read from the store: pass inputs and cancel requests on to
        the running turn; launch an open turn that this worker owns and has no task for."""
        task, request = self.cache.tasks.get(row.id), None if row.cancel is None else decode_cancel(row.cancel)
        if task is not None and task.run is not None:
            run = task.run
            run.journal.note_inputs()
            if request is not None and row.turn == run.scope.turn:
                run.control.cancel(request)
            run.control.nudge()
        elif task is not None:
            task.inputs = True
            if request is not None and row.turn is not None:
                task.cancel = (row.turn, request)
        elif row.turn is not None and row.owner == self._worker.id:
            self.launch(row)

    # ------------------------------------------------------------------ working

    def launch(
        self,
        row: SessionRow,
        opening: Said | None = None,
        reserved: Reserved | None = None,
        placed: bool = False,
    ) -> None:
        """Work on the open turn of a session we own. `opening` spares reading an input that was just accepted;
        `reserved` is what was reserved with it. `placed`: a place was taken for it."""
        if opening is None:
            self._ports.resumed()
            self.parked.drop(row.id)
            self.outcomes.resumed(row.id)
        task = self.cache.tasks.get(row.id)
        before = task
        if task is None:
            name, session = f"turn {row.id}.{row.turn}", self.cache.of(row.id)
            task = self.cache.tasks[row.id] = SessionTask(name, self, self._worker.id, session, row, opening)
        if reserved is not None and row.turn is not None:
            task.reserved = (row.turn, row.generation, reserved)
        if before is not None:
            # The turn before is committed, and its task does not know that yet or has still to call plugins.
            before.following = row
            if placed:
                self.places.release()
            return
        task.placed = placed
        _ = self._supervisor.spawn(self.runner.run(task), task.name)

    def first_spending(
        self, session_id: str, agent: str, op: str, size: int, metadata: dict[str, Scalar]
    ) -> Spending | None:
        """What is reserved for the first call of a turn with its acceptance, by what is in memory of its session; None
        where plugins have a say in it. Where it proves too little, it is asked for once more before the call."""
        definition, limits = self._definitions[agent], self.spend_limits
        if limits is None or not definition.plugins.lean:
            return None
        if agent not in self._sizes:
            said = (definition.instructions or "", list(definition.catalog.specs))
            self._sizes[agent] = len(msgspec.json.encode(said))
        cached = self.cache.get(session_id)
        bytes_before = 0 if cached is None else cached.weight
        whole = self._sizes[agent] + bytes_before + size + SLACK
        try:
            ask = limits.ask(clean_text(str(definition.models[0].name)), whole, definition.settings)
        except ProviderError:
            return None  # told when the model is about to be asked
        return Spending("", op, limits.bounds(), ask, metadata=metadata)

    def go_on(self, row: SessionRow) -> None:
        """Something was written about an open turn: wake its task, or launch one if the turn is ours."""
        self._activity.changed.set()
        if row.owner != self._worker.id or row.turn is None:
            return
        task = self.cache.tasks.get(row.id)
        if task is None:
            self.launch(row)
        elif task.was_claimed_before(row):
            task.following = row
        elif task.run is not None:
            task.run.control.nudge()

    def cancelled(self, row: SessionRow, request: CancelRequest, turn: int | None) -> None:
        """A cancel request is on disk: pass it to the running turn, or work on the turn that it freed."""
        task = self.cache.tasks.get(row.id)
        if task is not None and task.run is not None and task.run.scope.turn == turn:
            task.run.control.cancel(request)
        elif task is not None and turn is not None:
            task.cancel = (turn, request)
        else:
            self.go_on(row)

    def note_inputs(self, session_id: str) -> None:
        """An input waits that is no turn of its own: the running turn reads it at its next boundary. A turn that begins
        later reads its inbox in any case."""
        task = self.cache.tasks.get(session_id)
        if task is not None and task.run is not None:
            task.run.journal.note_inputs()
            task.run.control.nudge()
        elif task is not None:
            task.inputs = True

    def process_changed(self, row: ProcessRow) -> None:
        """Go on with parked turns of this Runtime that wait for it: it may have ended, or have news for them."""
        if not row.live or row.stuck is not None or row.registration.kind == COMMAND_KIND:
            for session_id in self.parked.waiting.get(row.id, ()):
                self.claim_soon(session_id)

    def claim_soon(self, session_id: str) -> None:
        """The turn of a session may be open without an owner: claim it, beside the caller."""
        _ = self._supervisor.spawn(self._claim_open(session_id), f"claim {session_id}")

    async def _claim_open(self, session_id: str) -> None:
        row = await self.store.session(session_id)
        if row is None or row.state != "parked":
            self.parked.drop(session_id)
        if row is not None and row.state == "open" and row.owner is None and row.turn is not None:
            await self.claim(row)

    def read_by_running(self, session_id: str) -> set[int]:
        """The inputs that the running turn of a session has read, whether or not that is on disk."""
        task = self.cache.tasks.get(session_id)
        run = None if task is None else task.run
        return set() if run is None else {*taken(run.records), *[d.input for d in run.machine.state.delivered]}

    async def claim(self, row: SessionRow) -> bool:
        """Take over an open turn and work on it, if there is a place for it; otherwise it waits for one."""
        if not self._may_claim(row):
            return False
        if row.cancel is not None:
            self.places.take_beyond()  # it is about to end
        elif not self.places.try_take():
            self.places.wait(row.id)
            return False
        won = False
        try:
            won = await self._claim(row)
        finally:
            if not won:
                self.places.release()
        return won

    def claim_waiting(self, session_id: str) -> None:
        """Claim the turn of a session for which a place was taken, in a task of its own."""
        _ = self._supervisor.spawn(self._claim_waiting(session_id), f"claim {session_id}")

    async def _claim_waiting(self, session_id: str) -> None:
        won = False
        try:
            row = await self.store.session(session_id)
            if row is not None and row.state == "open" and row.owner is None and row.turn is not None:
                won = self._may_claim(row) and await self._claim(row)
        finally:
            self.places.claiming.discard(session_id)
            if not won:
                self.places.release()

    def _may_claim(self, row: SessionRow) -> bool:
        return row.agent in self._definitions and self.may_begin(row) and self.store.held() is None

    async def _claim(self, row: SessionRow) -> bool:
        """True if the turn is ours now. Then the place that was taken for it is its own."""
        worker, now = self._worker, self.clock.now()
        death, lived = worker.death_of(row.owner), worker.lived
        claimed = await self.store.write(Claim(SessionRef(row.id), worker.id, row.generation, now, None, death, lived))
        if not claimed.won or claimed.row is None:
            if claimed.row is not None and claimed.row.state == "stuck" and row.turn is not None:
                stuck = TurnFailed(turn_id(row.id, row.turn), "stuck", {"reason": claimed.row.reason})
                self.outcomes.waiters.resolve(row.id, row.turn, stuck)  # no other task will: this claim was the last
            return False
        if claimed.row.takeovers:
            worker.claimed(row.sid, claimed.suspect)
        log.info("took over turn %s.%s from %s, generation %d", row.id, row.turn, row.owner, claimed.row.generation)
        if row.id in self.cache.tasks:
            self.places.release()
        else:
            self.launch(claimed.row, placed=True)
        return True

    def may_begin(self, row: SessionRow) -> bool:
        """While draining, only what work in hand waits for is begun, and what stands before that in its session."""
        if not self.mode.draining:
            return True
        return not self.mode.leaving and row.turn is not None and row.turn <= self.outcomes.needed.get(row.id, 0)

    def answer_queued(self, session_id: str) -> None:
        """Answer hosts that wait for a turn of this session, which cannot begin now."""
        _ = self._supervisor.spawn(self.outcomes.answer_queued(session_id), f"queued in {session_id}")

    async def turn(  # noqa: C901, PLR0915  # a turn from its row to its end, in one place
        self, task: SessionTask, row: SessionRow, scope: TurnScope
    ) -> SessionRow | None:
        """One turn; the session's row after its commit, or None when it was parked or given back."""
        opening, cached = task.opening, task.session
        records: list[Record] = [opening] if opening is not None else await self._load(row, scope)
        said = records[0]
        if not isinstance(said, Said):
            raise StoreDamaged(f"session {scope.session_id}", f"turn {scope.turn} does not begin with its input")
        if said.depth or said.metadata or row.settings:
            of_session = metadata_for(load_settings(row.settings), scope.turn)
            set_origin(said.depth, Metadata(of_session | said.metadata))
        view = await self.cache.view(row)
        setup, refused = await self._equip(cached, row, view, records)
        if setup.arming:
            setup.issues.extend(await self._ports.arm(row, setup.arming))
            setup.arming = ()
        definition = setup.definition
        if said.choice is not None:
            definition = await self.models.applied(definition, said.choice)
        for provider in definition.catalog.providers:
            if isinstance(provider, GathersTools):
                await provider.gather()
        inputs, task.inputs = opening is None or scope.turn > 1 or task.inputs, False
        reserved = None if task.reserved is None else task.reserved_for(scope.turn, scope.generation)
        run = task.run = self._begin(setup, definition, row, scope, view, records, inputs, reserved)
        if opening is None:
            self._feed.channel(row.id)  # a reader from before a restart may come back with an old cursor
        if row.cancel is not None:
            run.control.cancel(decode_cancel(row.cancel))
        elif task.cancel is not None and task.cancel[0] == scope.turn:
            run.control.cancel(task.cancel[1])
        task.cancel = None
        run.events.emit(TurnStarted, resumed=opening is None and (len(records) > 1 or row.takeovers > 0))
        try:
            if refused is not None:
                await self._dispatcher.conclude(run, refused.plugin)
                run.abort(refused)
            elif self._dispatcher.make_deps is not None or definition.instruct is not None:
                await self._prepare(task, run)
            end = await self._drive(run, row)
        except Leaving:
            self._dispatcher.withdraw(run)
            if run.spending is not None and (run.spending.asks or run.spending.reserved is not None):
                run.journal.spending.append(run.spending.close())  # no call was made with it
            await run.journal.flush()
            raise
        finally:
            task.run = None
            if cached.setup is not None:  # what plugins have in memory is worth something again after the commit
                cached.keep_setup(None)
            if run.held:
                self._dispatcher.release(run)
        late: list[Issue] = []
        if not isinstance(end, Parked) and setup.plugins is not None:
            if not setup.shared:
                setup.move_on(end.row, end.end)
                cached.keep_setup(setup)
            plugins = plugins_of(run) if run.hooks is not None and run.hooks.after_commit else None
            late = [] if plugins is None else await plugins.persisted(end.end.outcome)
        if task.deps is not None:
            await task.leave_deps(None)
        after = self._ended(run, view, end, late)
        return await self._ports.between(after) if after is not None and after.id in self._ports.blocked else after

    async def _prepare(self, task: SessionTask, run: Run) -> None:
        """Call the host's functions for this run. Raises NotPrepared where the turn has done something before."""
        make, instruct, random = self._dispatcher.make_deps, run.agent.instruct, self._dispatcher.random
        caller, guard, wait = (
            Caller(run.scope.session_id, run.agent.name, current_metadata()),
            run.control.guard,
            self.clock.sleep,
        )
        try:
            if make is not None:
                deps = task.deps = RunDeps(make, caller, random)
                run.give(await deps.enter(guard, wait))
            if instruct is not None:
                caller = replace(caller, deps=run.deps)
                run.use(run.agent.instructed(await instructions_of(instruct, caller, random, guard, wait)))
        except TurnCancelled:
            run.unprepared()
        except NotPrepared as failed:
            if run.resumed and run.machine.state.phase is not Phase.OPENING:
                raise
            log.warning("turn %s fails: %s", run.turn_id, failed)
            run.unprepared(failed)

    async def _load(self, row: SessionRow, scope: TurnScope) -> list[Record]:
        """The records of a turn that is ours as far as `row` tells. Raises Fenced where it is over meanwhile."""
        records = await self._archive.records(row, scope.turn)
        if type(records[-1]) is Closed:
            now = await self.store.session_by_sid(scope.sid)
            if now is None or now.turn != scope.turn or now.generation != scope.generation:
                raise Fenced(turn_id(scope.session_id, scope.turn), scope.generation)
        return records

    def _begin(  # noqa: PLR0913  # what a turn is made of
        self,
        setup: Setup,
        definition: Definition,
        row: SessionRow,
        scope: TurnScope,
        view: View,
        records: list[Record],
        inputs: bool,
        reserved: Reserved | None,
    ) -> Run:
        """A turn as far as its records tell, ready to be driven on."""
        said, name = records[0], turn_id(scope.session_id, scope.turn)
        assert isinstance(said, Said)
        if definition.catalog.providers:
            definition.catalog.refresh()
        state = TurnState(name, Transcript([said.message]))
        machine = Machine(state, definition.budget, definition.output_rule)
        history = view.messages
        if len(records) > 1:
            machine.replay(records[1:])
        if view.frame or view.summary or len(records) > 1:
            # In place of the past, the newest summary that this turn or an earlier one has begun with.
            framed = next((r for r in reversed(records) if type(r) is Framed), None)
            history = view.prompt() if framed is None else list(framed.summary)
        stalled = functools.partial(self.outcomes.waiters.resolve, scope.session_id, scope.turn)
        journal = TurnJournal(self.store, scope, len(records), self.clock, stalled, inputs)
        events = TurnEvents(self._feed, scope.session_id, name, asyncio.get_running_loop(), scope.generation)
        # With a direct completion in flight the turn's own question was not asked; what was lost is told there.
        interrupted = 0 if type(records[-1]) is Asking else row.takeovers
        hooks, session, kept = None, setup.plugins, setup.kept
        if session is not None and kept is not None and (session.acts or setup.issues):
            hooks = functools.partial(self._hooks, session, kept, setup.take_issues() if setup.issues else [])
        spending = None
        if self.spend_limits is not None:
            sizes = self.cache.of(scope.session_id).sizes
            spending = TurnSpending(self.spend_limits, str(scope.generation), said.metadata, reserved, sizes)
        return Run(
            scope, machine, journal, events, self.clock, definition, records, history, interrupted, hooks,
            self._dispatcher.deps, spending,
        )  # fmt: skip

    def _hooks(self, session: PluginSession, kept: PluginStates, issues: list[Issue], run: Run) -> TurnPlugins:
        return TurnPlugins(run, session, kept, self._ports.services(run), issues)

    async def _equip(
        self, cached: CachedSession, row: SessionRow, view: View, records: list[Record]
    ) -> tuple[Setup, TurnAborted | None]:
        """What the session runs with; the agent's own definition when a plugin refuses it."""
        definition = self._definitions[row.agent]
        if definition.plugins.lean and not row.settings and cached.overlay is None and len(records) == 1:
            if row.agent not in self._lean:
                self._lean[row.agent] = lean(definition)
            return self._lean[row.agent], None
        before = cached.setup
        if before is not None and before.fits(row, cached.overlay) and len(records) == 1:
            return before, None
        probe = probe_of(self._traces, row.id, None if row.turn is None else turn_id(row.id, row.turn))
        try:
            made = await equip(definition, row, view, records, self.store.blobs, self.models, cached.overlay, probe)
        except TurnAborted as refused:
            return Setup(definition), refused
        if before is not None:
            made.issues.extend(await changed(before, made, probe))
        cached.keep_setup(made)
        return made, None

    async def setup(self, row: SessionRow) -> Setup:
        """What a session runs with, for readers and operations: that of its running turn, or a fresh one."""
        cached = self.cache.of(row.id)
        kept = cached.setup
        if kept is not None and (self.cache.run(row.id) is not None or kept.fits(row, cached.overlay)):
            return kept
        view = await self.cache.view(row)
        records = await self._archive.records(row, row.turn) if row.turn is not None else []
        definition = self._definitions[row.agent]
        probe = probe_of(self._traces, row.id)
        made = await equip(definition, row, view, records, self.store.blobs, self.models, cached.overlay, probe)
        kept, run = cached.setup, self.cache.run(row.id)
        if kept is not None and (run is not None or kept.fits(row, cached.overlay)):
            return kept  # another task was faster: all use one, or what one changes the other would undo
        if run is None and made.plugins is not None and row.turn is None:
            cached.keep_setup(made)
        return made

    async def _drive(  # noqa: C901  # every turn passes here: what could be a function of its own would be called by all
        self, run: Run, row: SessionRow
    ) -> Parked | Landed:
        """Drive the turn and commit it. A cancel request that was there first turns the commit into a cancelled one."""
        told = False
        while True:
            outcome = await drive(run, self._handlers, self._dispatcher.conclude)
            if isinstance(outcome, Parked):
                return outcome
            plugins = None if run.hooks is None else plugins_of(run)
            if plugins is not None and plugins.at_end and not told:
                told = True
                outcome = await plugins.close(outcome)
            slot = run.slot()
            if plugins is None or not plugins.remembers:
                end = End(
                    outcome, run.machine.state.usage, slot, ledger(since_reopened(run.records)) if run.noted else None
                )
            else:
                end = plugins.end(outcome, slot)
            if row.head == 0 and row.settings:
                end = replace(end, prelude=load_settings(row.settings).prelude)
            if run.children or run.resumed:
                end = replace(end, children=True)
            if end.usage.calls or end.usage.unknown or end.ledger is not None:
                at, model, models, own = 0, "", 0, False
                recent = since_reopened(run.records) if run.resumed else run.records
                for record in recent:
                    if type(record) is Replied:
                        models += not models or record.model != model
                        model, at = record.model, record.at
                    elif type(record) is Said:
                        own = bool(record.metadata)
                at = at or self.clock.now()
                hour = at - at % HOUR
                if models > 1 or end.ledger is not None or row.settings or own or recent is not run.records:
                    costs = await turn_costs(self.store, row, run, end, hour)
                else:
                    costs = (UsageRow(row.sid, hour, TURNS, model, "{}", row.id, row.agent, (), end.usage),)
                end = replace(end, costs=costs)
            if run.spending is not None and not run.spending.is_settled_by(run.journal.spending):
                run.journal.spending.append(run.spending.close())
            receipt = await run.journal.commit(row.head, end)
            if isinstance(receipt, Committed):
                if receipt.woken:
                    self._ports.woken(receipt.woken)
                if run.spending is not None:
                    run.spending.limits.settled()
                return Landed(receipt.row, end)
            assert isinstance(receipt, CancelWon)
            request = decode_cancel(receipt.cancel)
            run.control.cancel(request)
            run.machine.receive(CancelTurn(request.by, request.reason))
            if plugins is not None:
                plugins.take_back(slot)

    def _ended(self, run: Run, view: View, ended: Parked | Landed, late: list[Issue]) -> SessionRow | None:
        """After the commit, or the parking: adopt it, announce it, answer who waits."""
        scope, machine, past = run.scope, run.machine, view.messages
        end = End(Waiting(ended.calls), machine.state.usage, machine.slot()) if isinstance(ended, Parked) else ended.end
        at = 0 if isinstance(ended, Parked) else ended.row.updated  # as it is on disk
        closed = Closed(end.outcome, end.usage, None, at, end.slot, end.ledger, end.prelude)
        records, usage = [*run.records, closed], end.usage
        if run.resumed:
            usage = Turn(scope.turn, records).usage
        result: TurnResult[Any] = TurnResult(
            run.turn_id, scope.session_id, run.agent.name, end.outcome, usage, records, past, run.agent.revive, late
        )
        if not isinstance(ended, Parked):
            if machine.state.transcript.calls:
                machine.state.transcript.pair(end.outcome)
            noted = run.noted or run.resumed or (run.hooks is not None and run.hooks.remembers)
            view.add(scope.turn, machine.messages(), records if noted else ())
            run.events.emit(TurnCommitted, outcome=end.outcome)
        else:
            if ended.processes:
                self.parked.add(scope.session_id, scope.turn, ended.processes)
            if not answerable(ended.calls):
                self.outcomes.parked(scope.session_id)
                return None  # it goes on by itself: who waits for its end waits on
        waiters = self.outcomes.waiters
        waiters.resolve(scope.session_id, scope.turn, result)
        if scope.session_id in waiters:  # inputs that were delivered into this turn end with it
            for number in taken(records):
                waiters.resolve(scope.session_id, number, result)
        return None if isinstance(ended, Parked) else ended.row

    async def _past_cells(self, run: Run, after: int) -> list[Cell]:
        row = await self.store.session_by_sid(run.scope.sid)
        return [] if row is None else await self._archive.cells(row, after, run.scope.turn - 1)

    # ------------------------------------------------------------------ parts of a turn

    async def _checkpoint(self, run: Run, effect: Checkpoint) -> Parked | None:
        """Deliver what was said to the running turn since the last boundary, from outside and by plugins. At its end
        hold it, where its agent says so, while commands of it run."""
        inputs: tuple[Delivered, ...] = ()
        if run.journal.inputs:
            run.journal.take_inputs()
            found = await self.store.inbox(run.scope.sid)
            if found and run.machine.may_ask():  # else it would not be answered here: the next turn does
                inputs = await self._read(run, found, effect.at)
        plugins = plugins_of(run) if run.hooks is not None and run.hooks.at_boundaries else None
        messages = () if plugins is None else await plugins.at(effect.at)
        rule = run.agent.wait_for_commands
        holds = rule is not None and effect.at == "before_completion" and not inputs and not messages
        if holds and run.machine.may_ask():
            hold = await held(self.store, self._ports.commands, run, rule)
            if isinstance(hold, Parked):
                return hold
            if hold is None and run.journal.inputs:
                return None  # something was said meanwhile: the same boundary once more
            messages = () if hold is None else (hold,)
        run.machine.receive(Delivery(inputs, messages))
        return None

    async def _read(self, run: Run, rows: Sequence[InboxRow], at: Boundary) -> tuple[Delivered, ...]:
        """Those of the inputs in the inbox that are for the running turn, and for this boundary of it."""
        found = []
        # A delivery leaves the inbox with the record that tells of it, which may not be written yet.
        held = {*taken(run.records), *[d.input for d in run.machine.state.delivered]}
        for row in rows:
            if row.kind == "queue" or row.input in held:
                continue
            records = await load(self.store, run.scope.sid, row.input, row.input)
            said = records[0][1] if records else None
            if isinstance(said, Said) and said.boundary == "before_completion" != at:
                run.journal.note_inputs()  # it is read again at the next boundary
            elif isinstance(said, Said):
                found.append(Delivered(row.input, said.message))
                name = turn_id(run.scope.session_id, row.input)
                run.events.emit(InputDelivered, input_id=name, metadata=said.metadata)
        return tuple(found)


@dataclass(slots=True, eq=False)
class SessionTask:
    """Works on one session: turn after turn, while inputs wait and this worker owns it.

    `run` is the running turn, `turn` its number until its end is announced, and `opening` its input if that was
    accepted just now. `following` is the row of a turn that was opened behind it, or claimed anew. `cancel` and
    `inputs` are a cancel request and an input that came while the turn was being loaded. `deps` are the live objects of
    the running turn, where a function makes them. `reserved` is what was reserved for the first call of a turn when it
    was accepted. `placed`: a place was taken for the next turn. `crowded_out`: there was none, so it waits on disk.
    """

    name: str
    _turns: Turns
    _worker: str
    session: CachedSession
    _row: SessionRow
    opening: Said | None
    _scope: TurnScope | None = None
    run: Run | None = None
    turn: int | None = None
    following: SessionRow | None = None
    cancel: tuple[int, CancelRequest] | None = None
    inputs: bool = False
    deps: RunDeps | None = None
    reserved: tuple[int, int, Reserved] | None = None
    placed: bool = False
    crowded_out: bool = False

    async def work(self) -> None:
        turns = self._turns
        while (row := self._row).turn is not None and row.owner == self._worker:
            scope = self._scope = TurnScope(row.id, row.sid, row.turn, self._worker, row.generation)
            if turns.mode.draining and not turns.may_begin(row):
                raise Leaving
            if not self._take_place(row):
                self.crowded_out = True
                raise Leaving
            self.turn = row.turn
            place = turns.places.begin()
            work = CurrentWork(self._worker, (row.id, row.turn)).begin()
            lend_while_waiting(place)
            try:
                after = await turns.turn(self, row, scope)
            except BaseException as error:  # the host's objects are left however the run ends
                if self.deps is not None:
                    await self.leave_deps(error)
                raise
            finally:
                work.end()
                place.end()
            if after is None:
                return
            self._row, self.opening = after, None

    def _take_place(self, row: SessionRow) -> bool:
        if self.placed:
            self.placed = False
        elif row.cancel is not None or self.cancel is not None:
            self._turns.places.take_beyond()  # the turn is about to end
        else:
            return self._turns.places.try_take()
        return True

    def reserved_for(self, turn: int | None, generation: int) -> Reserved | None:
        """What was reserved for the first call of a turn with its acceptance, while it is claimed as it was then."""
        kept = self.reserved
        return None if kept is None or kept[:2] != (turn, generation) else kept[2]

    def was_claimed_before(self, row: SessionRow) -> bool:
        """Whether its turn was claimed anew after this task had parked it: whoever hears that it waits may answer
        before the task is over."""
        scope = self._scope
        return scope is not None and row.turn == scope.turn and row.generation > scope.generation

    async def leave_deps(self, error: BaseException | None) -> None:
        deps, self.deps = self.deps, None
        if deps is not None:
            await deps.leave(error)

    async def give_back(self) -> None:
        if self._scope is not None:
            with contextlib.suppress(Fenced, SessionDeleted):
                await self._turns.store.write(Release(self._scope, self._turns.clock.now()))

    async def set_aside(self, error: Exception) -> None:
        """Park this one turn with the reason, and answer those who wait for it."""
        scope, turns = self._scope, self._turns
        if scope is None:
            return
        reason, told = f"{type(error).__name__}: {error}", error
        if isinstance(error, MemoryError):  # as a later reader is told
            told = TurnFailed(turn_id(scope.session_id, scope.turn), "stuck", {"reason": reason})
        turns.outcomes.waiters.resolve(scope.session_id, scope.turn, told)
        try:
            await turns.store.write(Release(scope, turns.clock.now(), stuck=reason))
        except Exception as second:  # the turn stays ours, and is found without a task
            log.error("turn %s.%s could not be parked: %s", scope.session_id, scope.turn, second)

    def stopped(self, error: Exception | None) -> None:
        """The last turn has ended, is parked, or is not ours any more."""
        row, turns, following = self._row, self._turns, self.following
        if self.placed:
            self.placed = False
            turns.places.release()
        if error is not None and not isinstance(error, Leaving):
            self.session.drop_view()
        if isinstance(error, SessionDeleted | StoreUnavailable):
            turns.outcomes.waiters.resolve(row.id, row.turn or 0, error)
        del turns.cache.tasks[row.id]
        last = 0 if self._scope is None else self._scope.turn
        if following is not None and (self.was_claimed_before(following) or (following.turn or 0) > last):
            turns.launch(following, reserved=self.reserved_for(following.turn, following.generation))
        elif row.id in turns.outcomes.waiters and turns.outcomes.awaited_by_hosts(row.id):
            turns.answer_queued(row.id)
        turns.cache.rest(row.id)
        if self.crowded_out and not turns.mode.leaving:
            turns.places.wait(row.id)
        if row.id in turns.parked.processes and not turns.mode.leaving:
            turns.claim_soon(row.id)  # what it waits for may have ended before that was known here
