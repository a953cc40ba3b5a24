"""Running the cells of turns: code that a model wrote, whose calls are effects like those of any reply.

    Cells     one per Runtime: the executor, and the variables of the sessions that worked last
    Running   one cell under way: what it asks for is recorded, begun, and answered
    Dialogue  what it asks and is answered, by its records

A cell runs until no branch of it can go on. What it has asked for since is recorded (`Called`) and begun, each call by
`tools/call.py` as the calls of a reply are. Then it gets one answer, the next one in the order of the records, and runs
on. Live and on replay this is one loop: a call that is recorded is compared with its record instead of being recorded,
and an answer that is recorded is there without waiting. So what a crash left is gone through again from the first line,
nothing that was recorded is done again, and shared state of branches comes out the same.

Variables are a cache. They are made again by running the cells of the session's branch against their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mainstay.engine.control import CANCEL_GRACE, TurnCancelled
from mainstay.engine.driver import PER_CALL, Parked, Run
from mainstay.errors import InternalError
from mainstay.graph.cells import FRESH, ROLLED_BACK, Cell, cells_of, effective
from mainstay.model.code import (
    FINISH,
    SLEEP,
    CellEnd,
    CodeAnswer,
    CodeCall,
    CodeStep,
    Given,
    Paused,
    Raise,
    StopCell,
)
from mainstay.model.codec import clean, decode, encode, model_text
from mainstay.model.effect import AskedCall, RunCode
from mainstay.model.message import ToolCall
from mainstay.model.record import Called, Ended
from mainstay.model.session import WaitRow
from mainstay.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown, OutputBudget, ToolOutcome, ToolSpec
from mainstay.ports.code import Executor, Repl
from mainstay.ports.process import Leaving
from mainstay.tools.attempt import BEGIN, CallNeed
from mainstay.tools.call import ActiveCall, CallEnd
from mainstay.tools.dispatcher import Dispatcher, Round
from mainstay.tools.output import AttemptResult, OutputRules, returned

MOST_CALLS = 10_000
"""Calls that the cells of one turn may make."""

MOST_KEPT = 64
"""Sessions whose variables are kept in memory."""

REBUILD_SECONDS = 10.0
"""How long cells may be run again to make variables anew; then they are lost, and the model is told."""

WRITE_AFTER = 0.005
"""Seconds after which an answer is written without waiting for what the cell asks for next."""

PARK_AFTER = 1.0
"""Seconds of a sleep that are slept in memory."""

NO_LIMIT = OutputBudget(None, None)
AFTER_UNKNOWN = Failed(
    "refused_after_unknown",
    "not called: how an earlier call of this cell ended is unknown, and this tool must not be repeated. "
    "Check what was done, in a new cell",
)
TOO_MANY_CALLS = Failed(
    "code_calls",
    f"The cells of one turn may make {MOST_CALLS:,} calls, and this would be more: nothing was kept of it.",
)
UNAVAILABLE = Failed("code_unavailable", "The cell was not run: nothing runs code here.", {ROLLED_BACK: True})

Past = Callable[[Run, int], Awaitable[Sequence[Cell]]]
"""The cells of a session's committed turns after one of them, oldest first; after 0 also those it was forked with."""


class Kept(Struct):
    """The variables of a session as cell `step` of its turn `turn` left them; 0 where no cell of its own has run."""

    repl: Repl
    turn: int = 0
    step: int = 0


class Diverged(Exception):
    """A cell that runs again does not ask for what is recorded: the message shows both."""


class Lost(Exception):
    """The variables of a session cannot be made again."""


class Cells:
    """Handles RunCode. `kept` are variables in memory, those used last at the end."""

    def __init__(self, dispatcher: Dispatcher, past: Past) -> None:
        self.dispatcher, self.past = dispatcher, past
        self.kept: dict[str, Kept] = {}

    async def run(self, run: Run, effect: RunCode) -> Parked | None:
        """Run a cell until it has ended, or waits for nothing but answers from outside."""
        executor: Executor | None = run.agent.executor
        if executor is None:
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

    async def keep(self, session_id: str, kept: Kept) -> None:
        self.kept[session_id] = kept
        while len(self.kept) > MOST_KEPT:
            await self.kept.pop(next(iter(self.kept))).repl.close()

    async def close(self) -> None:
        while self.kept:
            await self.kept.popitem()[1].repl.close()


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


class Dialogue:
    """What a cell asks and is answered, by its records, which a run that is live adds to.

    `fed` are the numbers of the calls whose answer it has got. `unknown`: it was told that the end of a call is.
    `sync` is the number of a call at whose line it stands: that is answered before others. The first `_given` answers
    are fed: a cell may have thousands.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.fed: set[int] = set()
        self.unknown = False
        self.sync: int | None = None
        self._given = 0

    def asked(self, calls: Iterable[CodeCall]) -> list[CodeCall]:
        """Those of the calls that are not recorded. Raises Diverged where one is recorded as another."""
        recorded, new = self.cell.calls, list[CodeCall]()
        for call in calls:
            if call.sync:
                self.sync = call.number
            if call.number >= len(recorded):
                new.append(call)
                continue
            before = recorded[call.number]
            if (before.name, before.args) != (call.name, decode(encode(call.args))):
                raise Diverged(
                    f"Line {call.line} calls {_words(call.name, call.args)}, and call {call.number} of this cell "
                    f"is recorded as {_words(before.name, before.args)}."
                )
        return new

    def next_answer(self) -> Ended | None:
        """The next answer in the order of the records, if it is there."""
        answers = self.cell.answers
        while self._given < len(answers) and _number(answers[self._given]) in self.fed:
            self._given += 1
        for index in range(self._given, len(answers)):
            number = _number(answers[index])
            if number == self.sync if self.sync is not None else number not in self.fed:
                return answers[index]
        return None

    def answer(self, ended: Ended) -> CodeAnswer:
        """An outcome as the cell sees it, the same from memory as from disk."""
        number, outcome = _number(ended), ended.outcome
        self.fed.add(number)
        name, self.sync = self.cell.calls[number].name, None if self.sync == number else self.sync
        match outcome:
            case Ok() if name == FINISH:
                return StopCell(number)
            case Ok(value=value):
                return Given(number, ended.withheld or decode(encode(value)))
            case Failed(message=message) if name == FINISH:
                return Raise(number, "invalid", message)
            case Failed(code=code, message=message):
                return Raise(number, "refused" if code == AFTER_UNKNOWN.code else "failed", f"{code}: {message}")
            case Denied(reason=reason):
                return Raise(number, "denied", reason or "the call was not approved")
            case Cancelled(reason=reason):
                return Raise(number, "failed", f"cancelled: {reason}")
            case OutcomeUnknown(reason=reason):
                self.unknown = True
                return Raise(number, "unknown", f"{name}: {reason}; it may or may not have taken effect")


class Running:
    """One cell under way.

    `round` are its calls without an outcome, `printed` what it has printed, `_seen` how many records of the turn are
    taken in. `_mark` says which cell left the variables that this one began with; `_fresh` why it began without any.
    """

    def __init__(self, cells: Cells, executor: Executor, run: Run, effect: RunCode) -> None:
        self._cells, self._executor, self._run, self._effect = cells, executor, run, effect
        self._shared, self._clock = cells.dispatcher, cells.dispatcher.clock
        found = cells_of(run.scope.turn, run.records)
        own = found.pop() if found and found[-1].step == effect.step else None
        self._cell, self._earlier = own or Cell(run.scope.turn, effect.step, effect.code, effect.at), effective(found)
        self._seen = len(run.records)
        self.round = Round(self._shared, run, ())
        self._dialogue, self.printed = Dialogue(self._cell), list[str]()
        self._repl: Repl | None = None
        self._mark, self._fresh = (0, 0), ""
        self._began = self._clock.monotonic()

    # ------------------------------------------------------------------ the loop

    async def work(self) -> Parked | None:
        run, effect, again = self._run, self._effect, True
        if effect.calls:
            await self._begin_calls(effect.calls, await self.round.waits.known())
        step = await self._start()
        while True:
            if isinstance(step, CellEnd):
                if step.error is not None and step.error.code == "lost" and again:
                    again = False  # a worker that died is no fault of the cell; a second one may be
                    await self.close()
                    step = await self._start()
                    continue
                await self._end(step)
                return None
            self.printed.append(step.printed)
            try:
                new = self._dialogue.asked(step.calls)
            except Diverged as error:
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
            step = await run.control.guard(self._step(self._repl.resume(self._dialogue.answer(answer), at=answer.at)))

    async def _start(self) -> CodeStep:
        """Begin the cell, on the variables that the cells before it left."""
        self._dialogue, self.printed = Dialogue(self._cell), []
        guard = self._run.control.guard
        self._repl = await guard(self._variables())
        return await guard(self._step(self._begin(self._repl, self._cell, check=not self._cell.calls)))

    async def _begin(self, repl: Repl, cell: Cell, check: bool) -> CodeStep:
        return await repl.begin(cell.code, self._run.agent.catalog.specs, at=cell.at, seed=cell.seed, check=check)

    async def _step(self, work: Coroutine[Any, Any, CodeStep]) -> CodeStep:
        """Let the cell run on. Where it computes for long, what is recorded is written meanwhile; else that goes into
        one write with what the cell asks for next."""
        going_on, patience = asyncio.ensure_future(work), asyncio.ensure_future(self._clock.sleep(WRITE_AFTER))
        try:
            _ = await asyncio.wait({going_on, patience}, return_when=asyncio.FIRST_COMPLETED)
            if not going_on.done():
                await self._run.journal.flush()
            return await going_on
        finally:
            for task in (going_on, patience):
                task.cancel()
            await asyncio.gather(going_on, patience, return_exceptions=True)

    # ------------------------------------------------------------------ its calls

    async def _record(self, new: Sequence[CodeCall]) -> None:
        """Record what the cell asks for, and begin it."""
        run, step, first, unknown = self._run, self._effect.step, new[0].number, self._dialogue.unknown
        asked = tuple([ToolCall(f"{run.turn_id}.{step}.{each.number}", each.name, clean(each.args)) for each in new])
        plain = not unknown and not any(call.name in (FINISH, SLEEP) for call in asked)
        started = self._shared.admit(run, step, asked, first) if plain else ()
        store = run.journal.store_id() if started else ""
        run.record(Called(step, first, asked, started, self._clock.now(), run.slot(), store))
        self._cell.calls += asked
        calls = run.machine.state.calls
        await self._begin_calls([calls[f"{step}.{call.number}"] for call in new], {})

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
        if rule is None:
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
                raise InternalError(f"cell {self._run.turn_id}.{self._effect.step} waits for no call")
            elif not running:
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
        records, prefix, count = self._run.records, f"{self._effect.step}.", len(self._cell.answers)
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
        if run.machine.state.calls:
            await rounds.conclude()
            for key in list(run.machine.state.calls):
                rounds.active[key].end(Cancelled("runtime", reason))
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
        spent = int((self._clock.monotonic() - self._began) * 1000)
        slot = run.slot()
        run.record(Ended(str(self._effect.step), ended, 1, 0, spent, self._clock.now(), slot), shown.blobs)
        if error is not None and error.code == "lost":
            await self.close()
        elif repl is not None:
            turn, step = self._mark if back else (run.scope.turn, self._effect.step)
            self._repl = None
            await self._cells.keep(run.scope.session_id, Kept(repl, turn, step))

    async def close(self) -> None:
        """Forget the variables in memory: they are made again when they are needed."""
        repl, self._repl = self._repl, None
        if repl is not None:
            await repl.close()

    # ------------------------------------------------------------------ its variables

    async def _variables(self) -> Repl:
        """The session's variables before this cell: those in memory, or made again from what is recorded."""
        run, past = self._run, self._cells.past
        self._fresh = ""
        kept = self._cells.kept.pop(run.scope.session_id, None)
        if kept is not None:
            since = self._earlier or effective(await past(run, max(kept.turn - 1, 0)))
            self._mark = (since[-1].turn, since[-1].step) if since else (0, 0)
            if (kept.turn, kept.step) == self._mark:
                return kept.repl
            await kept.repl.close()
        cells = effective([*await past(run, 0), *self._earlier])
        self._mark = (cells[-1].turn, cells[-1].step) if cells else (0, 0)
        repl, until = await self._executor.open(), self._clock.monotonic() + REBUILD_SECONDS
        try:
            for cell in cells:
                await self._run_again(repl, cell, until)
        except BaseException as error:  # also a cancellation: what is half made is of no use
            names = repl.names
            await repl.close()
            if not isinstance(error, Lost | Diverged):
                raise
            self._fresh = f"{error} They were: {', '.join(names) or 'none'}."
            repl = await self._executor.open()
        return repl

    async def _run_again(self, repl: Repl, cell: Cell, until: float) -> None:
        """Run a cell that has ended, against its answers: nothing is recorded, shown or done."""
        dialogue, step = Dialogue(cell), await self._begin(repl, cell, check=False)
        while isinstance(step, Paused):
            if self._clock.monotonic() > until:
                raise Lost(f"running the cells again took more than {REBUILD_SECONDS:.0f} s.")
            if dialogue.asked(step.calls) or (answer := dialogue.next_answer()) is None:
                raise Lost(f"cell {cell.turn}.{cell.step} asks for more than is recorded.")
            step = await repl.resume(dialogue.answer(answer), at=answer.at)
        if step.error is not None and step.error.rolled_back:
            raise Lost(f"cell {cell.turn}.{cell.step} cannot be run again: {step.error.message}")


def _number(ended: Ended) -> int:
    return int(ended.call.rpartition(".")[2])


def _is_once(spec: ToolSpec | None) -> bool:
    return spec is None or spec.recovery == "once"


def _words(name: str, args: dict[str, Any]) -> str:
    return f"{name}({encode(args).decode()})"
