"""Running the tool calls of turns: all calls of a reply at once, each under its recovery contract.

    Dispatcher    one per Runtime: which calls start with their reply, the threads and places that all turns share
    Round         the calls of one reply under way: collect what ends, wait for answers, stop

`tools/call.py` carries out one call. A round ends when every call has an outcome, or parks when all that is left waits
for an answer from outside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.admission import MOST_THREADS, Admission, Needs, ThreadPlaces
from perdure.engine.control import CANCEL_GRACE
from perdure.engine.deps import Make
from perdure.engine.driver import Parked, Run
from perdure.engine.lease import Worker
from perdure.engine.waiters import Deadlocks
from perdure.errors import InternalError
from perdure.graph.cells import ROLLED_BACK, cells_of, done_by
from perdure.model.effect import AskedCall, RunTools
from perdure.model.event import CellFinished, WaitingFor
from perdure.model.outcome import answerable
from perdure.model.protocol import Reading
from perdure.model.record import INTERRUPTED, Ended, Faltered
from perdure.model.session import WaitRow
from perdure.model.tool import Failed, ToolOutcome
from perdure.model.transcript import NEVER_RAN, calls_of
from perdure.plugins.turn import plugins_of
from perdure.ports.host import Clock, Random
from perdure.ports.process import Leaving
from perdure.ports.services import TurnServices
from perdure.ports.store import Store
from perdure.ports.tool import Handles, Parking
from perdure.tools.attempt import StopCause
from perdure.tools.call import ActiveCall, CallWaits, stop_of
from perdure.tools.catalog import ToolEntry
from perdure.tools.invoke import Threads, checked
from perdure.tools.waiting import PARK_AFTER, input_came
from perdure.turn.machine import Phase
from perdure.wire import outcome_kind

CELL_DROPPED = Failed(
    "cell_dropped", "The cell was dropped before its end: variables are as they were before it.", {ROLLED_BACK: True}
)

MOST_TRACED = 100
"""Calls that the line of a cell in a trace names."""


class CallPorts(Struct, frozen=True):
    """What tools reach of the parts that are built on the dispatcher: `services` makes what one may ask of its session,
    `handles` what it may do with processes."""

    services: Callable[[Run], TurnServices]
    handles: Callable[[Run, str, Parking | None], Handles]


class Dispatcher:
    """Handles RunTools for every turn of a Runtime, and owns what all attempts of tools share.

    `deps` are the live objects that all runs share; `make_deps` makes those of one run, where the host gave a function.
    `park_after`: for so many seconds a body that waits for processes stays in memory. `running` names the tool behind
    each call whose body is under way. `_abandoned` are tasks that did not end when they
    were cancelled: nothing waits for them, and asyncio itself keeps only weak references to tasks.
    """

    def __init__(  # noqa: PLR0913  # put together in one place
        self,
        store: Store,
        worker: Worker,
        clock: Clock,
        random: Random,
        deps: Any,
        ports: CallPorts,
        make_deps: Make | None = None,
        park_after: float | None = PARK_AFTER,
        threads: int = MOST_THREADS,
    ) -> None:
        self.store, self.worker, self.clock, self.random, self.deps = store, worker, clock, random, deps
        self.make_deps, self.park_after = make_deps, park_after
        self.services, self.handles = ports.services, ports.handles
        self.threads = Threads()
        self.admission, self.deadlocks = Admission(), Deadlocks(worker.id)
        self.thread_places = ThreadPlaces(self.admission, threads)
        self.running: dict[str, str] = {}
        self._abandoned: set[asyncio.Task[Any]] = set()

    def admit(self, run: Run, key: int | str, asked_for: Reading, first: int = 0) -> tuple[int, ...]:
        """Which calls of a reply start with its record: nothing to ask, nothing to wait for. Their places are taken.

        `key` is what the keys of the calls begin with. The calls of a cell are numbered from `first` on.
        """
        plugins = None if run.hooks is None else plugins_of(run)
        if plugins is not None and plugins.vets:
            return ()  # plugins are asked first, and what they decide is recorded with the start
        started = []
        for index, (name, call) in enumerate(calls_of(asked_for.parts, key, first).items(), first):
            if index in asked_for.cells:
                continue
            asked = AskedCall(name, call.id, call.name, call.args, call.raw)
            ready = checked(run.agent.catalog, asked, f"{run.turn_id}.{name}")
            if isinstance(ready, Failed) or ready.entry.provider is not None:
                continue
            spec = ready.entry.spec
            # A background call has a start record of its own: after a crash it must be registered again.
            plain = spec.approval == "never" and not spec.deferred and not spec.background
            if plain and (not (needs := self.needs(ready.entry)) or self.admission.try_take(needs)):
                run.held[name] = ready
                started.append(index)
        return tuple(started)

    async def run(self, run: Run, effect: RunTools) -> Parked | None:
        """Run the calls of a reply until all have an outcome, or all that are left wait for an answer."""
        calls, control = Round(self, run, effect.calls), run.control
        try:
            # Only a turn that began before this run of it can have waits on disk.
            await calls.begin(await calls.waits.known() if run.resumed else {})
            while True:
                running = calls.collect()
                waiting = any(each.pending is not None for each in calls.active.values())
                if not running and not waiting:
                    if calls.waits.opened:
                        await calls.waits.flush()
                    return None
                if control.stopping:
                    await calls.stop()
                elif not running:
                    parked = await calls.park()
                    if parked is not None:
                        return parked
                    await calls.read_answers()
                else:
                    await calls.waits.flush()
                    if control.nudged and waiting:
                        await calls.read_answers()
                    elif calls.waits.ends and await calls.end_waits():
                        continue
                    elif not any(each.late or each.task is None or each.task.done() for each in running):
                        await control.pause()  # only now: what ended during the write has woken nothing
        finally:
            # Whatever ended the round, no body of it goes on: a fenced owner must not act any more.
            for active in calls.active.values():
                if active.task is not None:
                    active.task.cancel()

    async def conclude(self, run: Run, refused: str = "", cell: Failed | None = None) -> None:
        """The turn is cancelled or aborted: record how its calls without an outcome end, and the cell that made them,
        if one did."""
        state = run.machine.state
        calls = Round(self, run, [call for key, call in state.calls.items() if key not in state.cells])
        if state.phase is Phase.TOOLS:
            await calls.conclude(refused)
        elif state.phase is Phase.CODE:
            key = state.cells[0] if state.cells else str(state.step)
            await calls.conclude(refused)
            for active in [each for each in calls.active.values() if each.key in state.calls]:
                active.end(NEVER_RAN)
            outcome = cell or CELL_DROPPED
            found = cells_of(run.scope.turn, run.records)
            if found and found[-1].key == key:
                outcome = replace(outcome, message=f"{outcome.message}{done_by(found[-1])}")
            run.record(Ended(key, outcome, at=self.clock.now(), slot=run.slot()))
            self.tell_end(run, key, outcome)

    def tell_end(self, run: Run, key: str, outcome: ToolOutcome) -> None:
        """Tell observers of the turn how a cell ended, and the trace of the host what it called besides."""
        cell_id = f"{run.turn_id}.{key}"
        run.events.emit(CellFinished, cell_id=cell_id, outcome=outcome)
        services = self.services(run)
        if services.probe is None:
            return
        cell = next((each for each in reversed(cells_of(run.scope.turn, run.records)) if each.key == key), None)
        ends = {} if cell is None else {each.call: outcome_kind(each.outcome) for each in cell.answers}
        made = [] if cell is None else [(f"{key}.{number}", call.name) for number, call in enumerate(cell.calls)]
        calls = [{"call_id": f"{run.turn_id}.{own}", "tool": tool, "outcome": ends.get(own)} for own, tool in made]
        # Names and ends: what a cell was given and printed may hold secrets, and is in the records.
        told = {"cell_id": cell_id, "outcome": outcome_kind(outcome), "calls": calls[:MOST_TRACED]}
        services.trace("cell.ended", told | {"more_calls": len(calls[MOST_TRACED:])})

    def withdraw(self, run: Run) -> None:
        """The Runtime is left before calls began whose start is in their reply's record: record that they did not."""
        now = self.clock.now()
        for key in run.held:
            step = int(key.partition(".")[0])
            run.record(Faltered(INTERRUPTED, "the runtime was closed before it began", now, 0, step, key, now))

    def release(self, run: Run) -> None:
        """Release the places of calls that never ran here. Until then `held` says that they did not."""
        for ready in run.held.values():
            self.admission.release(self.needs(ready.entry))
        run.held.clear()

    def needs(self, entry: ToolEntry) -> Needs:
        """Return what an attempt takes a place of."""
        tool = entry.tool
        return entry.needs if tool is None or tool.is_async else (*entry.needs, self.thread_places.capacity)

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Keep a task that does not end when it is cancelled until it ends by itself."""
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)


class Round:
    """The calls of one RunTools effect under way, in the order the model asked. Lives on the event loop."""

    def __init__(self, dispatcher: Dispatcher, run: Run, calls: Iterable[AskedCall]) -> None:
        self.run, self.waits, self._store = run, CallWaits(dispatcher.store, run), dispatcher.store
        self._looked = False
        self.active = {call.call: ActiveCall(dispatcher, run, call, self.waits) for call in calls}

    async def begin(self, known: Mapping[str, WaitRow], calls: Iterable[ActiveCall] | None = None) -> None:
        """Begin every call that has something to do here, once all that is recorded is on disk; or those of `calls`."""
        chosen = self.active.values() if calls is None else calls
        todo = [(active, need) for active in chosen if (need := active.next_need(known)) is not None]
        if todo or all(active.pending is None for active in self.active.values()):
            await self.waits.flush()
        for active, need in todo:
            active.start(need)

    def collect(self) -> list[ActiveCall]:
        """Record what has ended since the last look, in the order in which the model asked; the calls that run on."""
        for active in self.active.values():
            if active.task is not None and (active.late or active.task.done()):
                active.collect()
        return [active for active in self.active.values() if active.task is not None]

    async def park(self) -> Parked | None:
        """Leave the turn to the disk; None when an answer came in between."""
        run, waits = self.run, self.waits
        pending = [(active.asked, active.pending) for active in self.active.values() if active.pending is not None]
        names = tuple([waits.wait_id(call.call, each.kind) for call, each in pending])
        rows = tuple([waits.row(call, "process", each) for call, each in pending if each.kind == "process"])
        awaits = tuple(dict.fromkeys([name for _, each in pending for name in each.processes]))
        if rows:
            await waits.flush()
            heard = None if len(rows) < len(pending) else await self._heard()
            if heard == 0:
                return None
            if (plugins := plugins_of(run)) is not None:
                plugins.note()  # what plugins changed on the way here goes with it
            appended = await run.journal.flush(rows, names, awaits, heard)
        else:
            appended = await run.journal.flush(waits.take_opened(), names)
        if appended is None or not appended.parked:
            run.check_cancel()
            return None
        calls = tuple([each for _, each in pending])
        if answers := answerable(calls):
            run.events.emit(WaitingFor, calls=answers)
        return Parked(calls, awaits)

    async def _heard(self) -> int:
        """The number of the next input, when all before it have been looked at; 0 where one of them is for the turn."""
        row = await self._store.session_by_sid(self.run.scope.sid)
        return 0 if row is None or await input_came(self._store, self.run) else row.next

    async def end_waits(self) -> bool:
        """Look at the bodies that wait for processes in memory: end the waits where an input came; unwind them where
        nothing else runs any more. Whether something is to be collected."""
        run, waits = self.run, list(self.waits.ends.values())
        if run.journal.inputs and (run.control.nudged or not self._looked):
            run.control.take_nudge()
            self._looked = True
            if await input_came(self._store, run):
                for each in waits:
                    each.stop("input")
                return False
        running = [active for active in self.active.values() if active.task is not None]
        if len(waits) < len(running) or not all(each.may_park for each in waits):
            return False
        for each in waits:
            each.unwind()
        await asyncio.wait([active.task for active in running if active.task is not None], timeout=CANCEL_GRACE)
        return True

    async def read_answers(self) -> None:
        """Read the waits, and go on with the calls whose wait has ended."""
        self.run.control.take_nudge()
        self._looked = False
        known, todo = await self.waits.known(), []
        for active in self.active.values():
            if active.pending is None:
                continue
            kind = active.pending.kind
            wait = known.get(self.waits.wait_id(active.key, kind))
            if wait is None and kind == "process":  # it is written with the parking only
                wait = await self.waits.judged(self.waits.row(active.asked, kind, active.pending))
            if wait is None:
                raise InternalError(f"the wait of {active.id} is gone")
            if wait.state != "open" and (need := active.go_on(wait)) is not None:
                todo.append((active, need))
        if todo:
            await self.waits.flush()
        for active, need in todo:
            active.start(need)

    async def stop(self) -> None:
        """Cancel what runs, give it a moment, and record what is known of it. Raises why it was stopped."""
        leaving = stop_of(self.run.control) is StopCause.LEFT
        reason = "the runtime was closed while it ran" if leaving else "it was cancelled while it ran"
        running = [each for each in self.active.values() if each.task is not None]
        for active in running:
            active.interrupt(reason)
        tasks = [each.task for each in running if each.task is not None]
        acknowledged = [
            each.task
            for each in running
            if each.task is not None and each.interruption is not None and each.interruption.acknowledged
        ]
        if acknowledged and not leaving:
            await asyncio.wait(acknowledged)  # hooks that look at an answer have a time limit
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE)
        for active in running:
            active.stopped(reason)
        if leaving:
            await self.waits.flush()
            raise Leaving
        await self.conclude()
        self.run.control.check()

    async def conclude(self, refused: str = "") -> None:
        """The turn ends, and with it the calls without an outcome.

        `refused`: the plugin without which no answer may be recorded, because it could not look at them.
        """
        answered = await self.waits.final()
        for key in [key for key in self.run.machine.state.calls if key in self.active]:
            await self.active[key].conclude(answered.get(key), refused)
