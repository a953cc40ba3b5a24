"""Running the cells of turns: code that a model wrote, whose calls are effects like those of any reply.

    Cells     one per Runtime: handles RunCode
    Running   one cell under way: what it asks for is recorded, begun, and answered

A cell runs until no branch of it can go on. What it has asked for since is recorded (`Called`) and begun, each call by
`tools/call.py` as the calls of a reply are. Then it gets one answer, the next one in the order of the records, and runs
on. Live and on replay this is one loop: a call that is recorded is compared with its record instead of being recorded,
and an answer that is recorded is there without waiting (`tools/dialogue.py`). So what a crash left can be gone through
again from the first line: nothing that was recorded is done again, and shared state of branches comes out the same.

The state of the interpreter is a cache of that. While it is small it is saved in every write that says what the cell
calls; else where the turn parks, where the cell ends, and after each `SAVE_EVERY` seconds of its running. Where it is
found again, and how variables are had without it, is `tools/variables.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from perdure.engine.control import CANCEL_GRACE, TurnCancelled
from perdure.engine.driver import PER_CALL, Parked, Run
from perdure.engine.journal import SPILL_BYTES
from perdure.errors import DumpRefused, InternalError
from perdure.graph.cells import FRESH, ROLLED_BACK, Cell, cells_of, done_by, effective
from perdure.model.code import (
    FINISH,
    RUN_CODE,
    SLEEP,
    CellEnd,
    CodeCall,
    CodeStep,
    Variable,
)
from perdure.model.codec import clean, encode, error_text, model_text
from perdure.model.effect import AskedCall, RunCode
from perdure.model.event import CellStarted
from perdure.model.message import ToolCall
from perdure.model.protocol import Reading
from perdure.model.record import Called, Ended
from perdure.model.session import WaitRow
from perdure.model.tool import Cancelled, Failed, Ok, OutputBudget, ToolOutcome, ToolSpec
from perdure.ports.code import Executor, Repl
from perdure.ports.process import Leaving
from perdure.tools.attempt import BEGIN, CallNeed
from perdure.tools.call import ActiveCall, CallEnd
from perdure.tools.dialogue import AFTER_UNKNOWN, CellDiverged, Dialogue
from perdure.tools.dispatcher import Dispatcher, Round
from perdure.tools.output import AttemptResult, OutputRules, returned
from perdure.tools.variables import KeptVariables, Mark, Past, Saved, Variables, begin, encode_saved, mark_of

log = logging.getLogger("perdure.tools")

MOST_CALLS = 10_000
"""Calls that the cells of one turn may make."""

WRITE_AFTER = 0.005
"""Seconds after which an answer is written without waiting for what the cell asks for next."""

PARK_AFTER = 1.0
"""Seconds of a sleep that are slept in memory."""

SMALL = SPILL_BYTES
"""Bytes of a state that is saved with every call. A larger one costs a file of its own."""

SAVE_EVERY = 1.0
"""Seconds that a cell with a larger state runs between two savings."""

NO_LIMIT = OutputBudget(None, None)
TOO_MANY_CALLS = Failed(
    "code_calls",
    f"The cells of one turn may make {MOST_CALLS:,} calls, and this would be more: nothing was kept of it.",
)
UNAVAILABLE = Failed("code_unavailable", "The cell was not run: nothing runs code here.", {ROLLED_BACK: True})


class Cells:
    """Handles RunCode for every turn of a Runtime."""

    def __init__(self, dispatcher: Dispatcher, past: Past) -> None:
        self.dispatcher, self._past = dispatcher, past
        self.variables = Variables(dispatcher.store, dispatcher.clock, past)

    async def list_variables(self, run: Run) -> list[Variable]:
        """What the cells of a session have bound, while none runs. Types are "" where they could not be had."""
        executor: Executor | None = run.agent.executor
        if executor is None:
            return []
        earlier, next_one = effective(_own_cells(run)), Cell(run.scope.turn, "", "", 0, sid=run.scope.sid)
        if not earlier and not effective(await self._past(run, 0)):
            return []
        kept = await run.control.guard(self.variables.find(run, executor, next_one, earlier))
        try:
            return [] if kept.fresh else await run.control.guard(kept.repl.variables())
        except Exception as error:  # whatever took the worker: the next cell has its variables, or says what it lost
            log.warning("the variables of %s cannot be listed: %s", run.turn_id, error_text(error))
            return [Variable(name, "") for name in kept.repl.names]
        finally:
            if kept.fresh:
                await kept.repl.close()
            else:
                await self.variables.keep(run.scope.session_id, KeptVariables(kept.repl, kept.mark))

    async def run(self, run: Run, effect: RunCode) -> Parked | None:
        """Run a cell until it has ended, or waits for nothing but answers from outside."""
        executor: Executor | None = run.agent.executor
        if executor is None or (effect.cell and run.agent.catalog.get(RUN_CODE) is None):
            await self.dispatcher.conclude(run, cell=UNAVAILABLE)
            return None
        cell = Running(self, executor, run, effect)
        try:
            return await cell.work()
        except (TurnCancelled, Leaving):
            await cell.close()
            if any(active.task is not None for active in cell.round.active.values()):
                await cell.round.stop()
            raise
        except BaseException:  # the turn is fenced or aborted: what runs is of no more use
            await cell.close()
            raise
        finally:
            # Whatever ended the cell, no body of it goes on: a fenced owner must not act any more.
            for active in cell.round.active.values():
                if active.task is not None:
                    active.task.cancel()


class CellCall(ActiveCall):
    """A call that a cell made. It gets the value itself: the output budget is for what is shown to a model."""

    __slots__ = ()

    def output_rules(self, spec: ToolSpec | None, args: dict[str, Any]) -> OutputRules:
        return replace(super().output_rules(spec, args), budget=NO_LIMIT)


class SleepCall(CellCall):
    """A sleep, due at a recorded time. A short one is slept here; a longer one is a wait that only time ends, so that
    the turn can be left to the disk meanwhile."""

    __slots__ = ()

    def next_need(self, known: Mapping[str, WaitRow]) -> CallNeed | None:
        if self.asked.due - self.shared.clock.now() <= PARK_AFTER * 1000:
            return BEGIN
        self.pending = self.waits.pending(self.asked, "sleep", due=self.asked.due)
        self.waits.opened.append(self.waits.row(self.asked, "sleep", self.pending))
        return None

    def answered(self, wait: WaitRow) -> CallNeed | None:
        self.end(Ok(None))
        return None

    async def _carry_out(self, need: CallNeed) -> CallEnd:
        try:
            clock = self.shared.clock
            while (left := self.asked.due - clock.now()) > 0:
                await clock.sleep(left / 1000)
            return AttemptResult(Ok(None))
        finally:
            self.run.control.wake()


class Running:
    """One cell under way.

    `round` are its calls without an outcome, `printed` what it has printed, `_seen` how many records of the turn are
    taken in. `_mark` says which cell left the variables that this one began with; `_fresh` why it began without any.
    `_last` is the last answer that it got. `_unsaved`: the interpreter has gone on since it was saved. `_large`: it was
    too large to be saved with every call; `_ran` is for how many seconds it has run since. `_writes`: what is recorded
    is being written while the cell computes.
    """

    def __init__(self, cells: Cells, executor: Executor, run: Run, effect: RunCode) -> None:
        self._cells, self._executor, self._run, self._effect = cells, executor, run, effect
        self._shared, self._clock = cells.dispatcher, cells.dispatcher.clock
        found, key = _own_cells(run), effect.cell or str(effect.step)
        own = found.pop() if found and found[-1].key == key else None
        self._cell = own or Cell(run.scope.turn, key, effect.code, effect.at, sid=run.scope.sid)
        self._earlier = effective(found)
        self._seen = len(run.records)
        self.round = Round(self._shared, run, ())
        self._dialogue, self.printed = Dialogue(self._cell), list[str]()
        self._repl: Repl | None = None
        self._mark: Mark | None = None
        self._fresh = ""
        self._last: Ended | None = None
        self._unsaved, self._large, self._ran = True, False, 0.0
        self._writes = False
        self._began = self._clock.monotonic()

    # ------------------------------------------------------------------ the loop

    async def work(self) -> Parked | None:
        run, effect, again = self._run, self._effect, True
        cell_id, resumed = f"{run.turn_id}.{self._cell.key}", bool(self._cell.calls)
        run.events.emit(CellStarted, cell_id=cell_id, code=effect.code, resumed=resumed)
        self._shared.services(run).trace("cell.started", {"cell_id": cell_id, "resumed": resumed})
        if effect.calls:
            await self._begin_calls(effect.calls, await self.round.waits.known())
        step = await self._start()
        while True:
            if isinstance(step, CellEnd):
                if step.error is not None and step.error.code == "lost" and again:
                    again = False  # a worker that died is no fault of the cell; a second one may be
                    await self.close()
                    step = await self._start(dumps=False)
                    continue
                await self._end(step)
                return None
            self.printed.append(step.printed)
            try:
                new = self._dialogue.asked(step.calls)
            except CellDiverged as error:
                await self._end(CellEnd(), Failed("code_diverged", str(error), {ROLLED_BACK: True}))
                return None
            if new:
                if run.machine.state.called + len(new) > MOST_CALLS or PER_CALL * len(new) >= run.room:
                    await self._end(CellEnd(), TOO_MANY_CALLS)
                    return None
                spent = run.machine.refusal(len(new))
                if spent is not None:
                    await self.close()
                    await self.cut_calls("the budget of the turn is spent")
                    await self._shared.conclude(run)
                    run.machine.receive(spent)
                    return None
                await self._record(new)
            answer = await self._next_answer()
            if isinstance(answer, Parked):
                await self.close()
                return answer
            assert self._repl is not None
            self._last, self._unsaved = answer, True
            resume = partial(self._repl.resume, self._dialogue.answer(answer), at=answer.at)
            step = await run.control.guard(self._step(resume))

    async def _start(self, dumps: bool = True) -> CodeStep:
        """Begin the cell, on the variables that the cells before it left; or go on in its middle, where it was saved
        there."""
        run, cell, guard = self._run, self._cell, self._run.control.guard
        self._dialogue, self.printed, self._last, self._unsaved = Dialogue(cell), [], None, True
        kept = await guard(self._cells.variables.find(run, self._executor, cell, self._earlier, dumps))
        self._repl, self._mark, self._fresh, saved = kept.repl, kept.mark, kept.fresh, kept.saved
        paused = kept.repl.paused
        if saved is None or paused is None:
            return await guard(self._step(partial(begin, run, kept.repl, cell, check=not cell.calls)))
        waiting = {call.number for call in paused.calls}
        self._dialogue = Dialogue(cell, [number for number in range(saved.asked) if number not in waiting])
        self._last = next((each for each in cell.answers if each.call == saved.call), None)
        self.printed, self._unsaved = [saved.printed], False
        return paused

    async def _step(self, work: Callable[[], Coroutine[Any, Any, CodeStep]]) -> CodeStep:
        """Let the cell run on. Where it computes for long, what is recorded is written meanwhile; else that goes into
        one write with what the cell asks for next."""
        began, writing = self._clock.monotonic(), list[asyncio.Task[None]]()
        # A task for the clock is made only then: most cells ask for something within a millisecond.
        timer = asyncio.get_running_loop().call_later(
            WRITE_AFTER / 2, lambda: writing.append(asyncio.create_task(self._write()))
        )
        try:
            return await work()
        finally:
            timer.cancel()
            self._ran += self._clock.monotonic() - began
            for task in writing:
                if not self._writes:
                    task.cancel()
                await asyncio.wait([task])  # a write that failed is in doubt, and the next one raises why

    async def _write(self) -> None:
        """After a while without a step, write what is recorded."""
        self._writes = False
        await self._clock.sleep(WRITE_AFTER / 2)
        self._writes = True
        await self._run.journal.flush()

    # ------------------------------------------------------------------ its calls

    async def _record(self, new: Sequence[CodeCall]) -> None:
        """Record what the cell asks for, and begin it."""
        run, key, first, unknown = self._run, self._cell.key, new[0].number, self._dialogue.unknown
        asked = tuple([ToolCall(f"{run.turn_id}.{key}.{each.number}", each.name, clean(each.args)) for each in new])
        plain = not unknown and not any(call.name in (FINISH, SLEEP) for call in asked)
        started = self._shared.admit(run, key, Reading(asked), first) if plain else ()
        store = run.journal.store_id() if started else ""
        effect, now = self._effect, self._clock.now()
        run.record(Called(effect.step, first, asked, started, now, run.slot(), store, effect.cell))
        self._cell.calls += asked
        if not self._large or self._ran >= SAVE_EVERY:
            await self._save()
        calls = run.machine.state.calls
        await self._begin_calls([calls[f"{key}.{call.number}"] for call in new], {})

    async def _begin_calls(self, calls: Sequence[AskedCall], known: Mapping[str, WaitRow]) -> None:
        """Begin calls that have no outcome: new ones, and those that were found so."""
        rounds, added = self.round, list[ActiveCall]()
        for call in calls:
            active = (SleepCall if call.name == SLEEP else CellCall)(self._shared, self._run, call, rounds.waits)
            if call.name == FINISH:
                active.end(self._checked(call.args.get("value")))
            elif self._dialogue.unknown and not call.started and _is_once(active.spec):
                active.end(AFTER_UNKNOWN)
            else:
                rounds.active[call.call] = active
                added.append(active)
        if added:
            await rounds.begin(known, added)
        self._take_ended()

    def _checked(self, value: Any) -> ToolOutcome:
        """Whether a value may be the turn's answer: it is checked where the cell gives it."""
        rule = self._run.agent.output_rule
        if rule is None or self._effect.cell:  # a call of run_code answers the model, not the turn
            return Ok(value if isinstance(value, str) else encode(value).decode())
        try:
            return Ok(rule(value))
        except ValueError as error:
            return Failed("invalid_output", model_text(error))

    async def _next_answer(self) -> Ended | Parked:
        """The next answer in the order of the records: one that is there, or the first that comes."""
        rounds, control = self.round, self._run.control
        while True:
            if (found := self._dialogue.next_answer()) is not None:
                if rounds.active:  # the next write may be long in coming: others are under way
                    await rounds.waits.flush()
                return found
            running = rounds.collect()
            if self._take_ended():
                continue
            waiting = any(each.pending is not None for each in rounds.active.values())
            if control.stopping:
                await rounds.stop()
            elif not running and not waiting:
                raise InternalError(f"cell {self._run.turn_id}.{self._cell.key} waits for no call")
            elif not running:
                await self._save()
                if (parked := await rounds.park()) is not None:
                    return parked
                await rounds.read_answers()
            else:
                await rounds.waits.flush()
                if control.nudged and waiting:
                    await rounds.read_answers()
                elif rounds.waits.ends and await rounds.end_waits():
                    pass  # waits for processes have ended, or are left to the disk
                elif not any(each.late or each.task is None or each.task.done() for each in running):
                    await control.pause()  # only now: what ended during the write has woken nothing
            self._take_ended()

    def _take_ended(self) -> bool:
        """Take in the calls that have ended since the last look; whether there are any."""
        records, prefix, count = self._run.records, f"{self._cell.key}.", len(self._cell.answers)
        for record in records[self._seen :]:
            if type(record) is Ended and record.call.startswith(prefix):
                self._cell.answers.append(record)
                self.round.active.pop(record.call, None)
        self._seen = len(records)
        return len(self._cell.answers) > count

    async def cut_calls(self, reason: str) -> None:
        """End the calls that run or wait: what is known of them is recorded."""
        run, rounds = self._run, self.round
        running = [each for each in rounds.active.values() if each.task is not None]
        for active in running:
            active.interrupt(reason)
        tasks = [each.task for each in running if each.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE)
        for active in running:
            active.stopped(reason)
        if rounds.active:
            await rounds.conclude()
            for active in [each for each in rounds.active.values() if each.key in run.machine.state.calls]:
                active.end(Cancelled("runtime", reason))
            self._shared.release(run)
        self._take_ended()

    # ------------------------------------------------------------------ how it ends

    async def _end(self, end: CellEnd, refused: Failed | None = None) -> None:
        """Record the end of the cell; every call that it made has an outcome then. `refused`: it is not to go on."""
        run, error, repl = self._run, end.error, self._repl
        if refused is not None and repl is not None:
            await repl.rollback()
        await self.cut_calls("the cell has ended")
        lost = f"[Variables of earlier cells are lost: {self._fresh}]" if self._fresh else ""
        output = "\n".join(
            [each for each in (lost, "".join([*self.printed, end.printed]).rstrip("\n"), end.value, *end.notes) if each]
        )
        shown = await returned(output, OutputRules(run.journal, run.agent.output_budget))
        value, whole = (shown.end.value, shown.end.whole) if isinstance(shown.end, Ok) else ("", None)
        told: dict[str, Any] = {"output": value}
        if self._fresh:
            told[FRESH] = self._fresh
        finished, back = run.machine.state.finished, refused is not None or (error is not None and error.rolled_back)
        ended: ToolOutcome = Ok(told, whole)
        if back:
            told[ROLLED_BACK] = True
        if refused is not None:
            ended = replace(refused, data=told)
        elif finished is not None:
            text = finished[0] if isinstance(finished[0], str) else encode(finished[0]).decode()
            ended = Ok({**told, "answer": text}, whole)
        elif error is not None:
            ended = Failed(f"code_{error.which or error.code}", error.message, told)
        if isinstance(ended, Failed) and back:
            ended = replace(ended, message=f"{ended.message}{done_by(self._cell)}")
        if isinstance(ended, Failed) and self._effect.cell and value:  # of a failed call only the message is shown
            ended = replace(ended, message=f"{value}\n\n{ended.message}")
        spent = int((self._clock.monotonic() - self._began) * 1000)
        slot = run.slot()
        self._cell.end = Ended(self._cell.key, ended, 1, 0, spent, self._clock.now(), slot)
        run.record(self._cell.end, shown.blobs)
        self._shared.tell_end(run, self._cell.key, ended)
        if (error is not None and error.code == "lost") or (back and self._fresh):
            await self.close()  # the second is without the variables that its mark would promise
        elif repl is not None:
            if not back:
                self._mark, self._unsaved = mark_of(self._cell), True
                await self._save()
            self._repl = None
            await self._cells.variables.keep(run.scope.session_id, KeptVariables(repl, self._mark))

    # ------------------------------------------------------------------ its state

    async def _save(self) -> None:
        """Save the interpreter as it is now, unless it is, with the next write of the turn."""
        repl, cell, last = self._repl, self._cell, self._last
        if repl is None or not self._unsaved or not self._executor.saves:
            return
        saved = Saved(self._mark)
        if cell.end is None:
            call, at = ("", 0) if last is None else (last.call, last.at)
            asked, printed = len(cell.calls), "".join(self.printed)
            saved = Saved(self._mark, cell.sid, cell.turn, cell.key, asked, call, at, printed, self._fresh)
        try:
            dump = await repl.dump(encode_saved(saved).decode())
        except DumpRefused:  # its worker died: the next step finds that
            return
        self._unsaved, self._large, self._ran = False, len(dump) > SMALL, 0.0
        self._run.journal.save(dump)

    async def close(self) -> None:
        """Forget the variables in memory: they are found again when they are needed."""
        repl, self._repl = self._repl, None
        if repl is not None:
            await repl.close()


def _is_once(spec: ToolSpec | None) -> bool:
    return spec is None or spec.recovery == "once"


def _own_cells(run: Run) -> list[Cell]:
    """The cells of a turn that is open."""
    found = cells_of(run.scope.turn, run.records)
    for each in found:
        each.sid = run.scope.sid
    return found
