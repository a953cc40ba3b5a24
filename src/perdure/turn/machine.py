"""How a turn thinks: a sans-IO machine that asks for effects and receives what came back.

    effect = machine.next_effect()      what the turn waits for; asking again gives the same
    machine.receive(record)             what happened, from the journal or just now: the machine cannot tell

Replay is therefore not a mode. Recorded outcomes are received in order, and the machine then waits where the crash
found it. Records have the last word: where a changed agent (another budget, another output type) would have decided
otherwise, what was recorded stands, and only what comes after it follows the new definition.

A turn waits for exactly one thing at a time, and its phase says for what:

    OPENING ──delivery──▶ ASKING ──reply with calls──▶ TOOLS ──all ended──▶ AFTER_WORK ──delivery──▶ ASKING
                             │  ╲──reply with a cell─▶ CODE ──cell ended──▶ AFTER_WORK, or BEFORE_COMPLETION (finish)
                             │   ╲─reply with cells among its calls─▶ TOOLS, then CODE for each of them
                             │  ▲                                                                       │
                     answer  │  └─ input arrived, or the output must be repaired ──┐                    │ budget spent
                             ▼                                                     │                    ▼
                    BEFORE_COMPLETION ──delivery (empty)──────────────────────▶ DONE ◀──────────────────┘

How a reply is read is the matter of the agent's protocol (`turn/tools.py`, `turn/code.py`), before it is recorded: here
its record says what it means.

Nothing here waits, writes or reads a clock. Everything a turn knows is in `TurnState`, which is plain data: encode it,
decode it, and the machine built on it asks for the same effect again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeAlias

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from perdure.errors import InternalError
from perdure.model.agent import Budget
from perdure.model.code import FINISH, SLEEP
from perdure.model.effect import (
    Aborted,
    AskedCall,
    CallModel,
    CancelTurn,
    Checkpoint,
    Delivery,
    Effect,
    Finish,
    GaveUp,
    NoRoom,
    Received,
    RunCode,
    RunTools,
    TimeIsUp,
    Unprepared,
)
from perdure.model.ids import MAX_ORDINAL
from perdure.model.llm import Usage
from perdure.model.message import Message, Text
from perdure.model.outcome import (
    UNUSABLE,
    BudgetSpent,
    Finished,
    Incomplete,
    InvalidInput,
    LimitReached,
    Outcome,
    PluginAborted,
    ProviderFailed,
)
from perdure.model.record import (
    INTERRUPTED,
    Asking,
    Called,
    Closed,
    Completed,
    Delivered,
    Ended,
    Faltered,
    Framed,
    Noted,
    Record,
    Reopened,
    Replied,
    Said,
    Slot,
    Started,
)
from perdure.model.spending import money
from perdure.model.tool import Cancelled, Failed, Ok
from perdure.model.transcript import Transcript, calls_in
from perdure.turn import prompt
from perdure.turn.code import MAX_SECONDS


class Phase(Enum):
    """What the turn waits for."""

    OPENING = "opening"
    ASKING = "asking"
    TOOLS = "tools"
    CODE = "code"
    AFTER_WORK = "after_work"
    BEFORE_COMPLETION = "before_completion"
    DONE = "done"

    # Members are singletons; the inherited hash is Python code, and a turn looks itself up at every step.
    __hash__ = object.__hash__


class TurnState(Struct):
    """Everything a turn knows. Only the machine changes it.

    `transcript` is what is recorded; `delivered` and `added` were gathered since and ride in the next record. `queued`
    was said by plugins while calls ran and is recorded: it is added when all of them have their results. `calls`
    restate the newest reply, keyed `<step>.<index>`, until each has an outcome; `called` counts those of all replies.
    `code` is the cell of the newest reply, written at `code_at`; `finished` holds the value that it finished with.
    `cells` are the calls that are cells and have not ended, in order: the first is the one that runs in CODE.
    `usage` is that of the model calls, `beside` that of direct completions made meanwhile. A turn that was continued
    counts its steps from `base`.
    """

    turn_id: str
    transcript: Transcript
    phase: Phase = Phase.OPENING
    step: int = 1
    attempt: int = 1
    due: int = 0
    candidate: int = 0
    failed: tuple[int, ...] = ()
    last: bool = False
    calls: dict[str, AskedCall] = field(default_factory=dict)
    delivered: tuple[Delivered, ...] = ()
    added: tuple[Message, ...] = ()
    queued: tuple[Message, ...] = ()
    usage: Usage = Usage()
    beside: Usage = Usage()
    progress: bool = False
    idle_steps: int = 0
    repairs: int = 0
    elapsed_ms: int = 0
    called: int = 0
    outcome: Outcome | None = None
    code: str = ""
    code_at: int = 0
    finished: tuple[Any] | None = None
    cells: tuple[str, ...] = ()
    base: int = 0


CUT_OFF = ("length", "filtered")
"""Stops that mean that the model was not done."""


OutputRule: TypeAlias = Callable[[str], Any]
"""Reads the final text as the agent's output type, as JSON; raises ValueError with words for the model."""

MAX_REPAIRS = 2
USUAL_BUDGET = Budget()

CHECKPOINTS = {phase: Checkpoint(phase.value) for phase in (Phase.OPENING, Phase.AFTER_WORK, Phase.BEFORE_COMPLETION)}


@dataclass(slots=True, eq=False)
class Machine:
    """One turn: built from a state that holds its first message, or that was dumped before."""

    state: TurnState
    _budget: Budget = USUAL_BUDGET
    _output: OutputRule | None = None

    def dump(self) -> bytes:
        return msgspec.json.encode(self.state)

    @classmethod
    def load(cls, data: bytes, budget: Budget = USUAL_BUDGET, output: OutputRule | None = None) -> Machine:
        return cls(msgspec.json.decode(data, type=TurnState), budget, output)

    # ------------------------------------------------------------------ asking

    def next_effect(self) -> Effect:
        """What the turn waits for. Changes nothing."""
        state, phase = self.state, self.state.phase
        match phase:
            case Phase.ASKING:
                return CallModel(state.step, state.attempt, state.due, state.last, state.candidate, state.failed)
            case Phase.TOOLS:
                plain = [call for key, call in state.calls.items() if key not in state.cells]
                return RunTools(state.step, tuple(plain))
            case Phase.CODE if state.cells:
                cell = state.calls[state.cells[0]]
                own = [call for key, call in state.calls.items() if key.startswith(f"{cell.call}.")]
                return RunCode(state.step, cell.args["code"], state.code_at, tuple(own), cell.call)
            case Phase.CODE:
                return RunCode(state.step, state.code, state.code_at, tuple(state.calls.values()))
            case Phase.DONE:
                if state.outcome is None:
                    raise InternalError(f"turn {state.turn_id} is done without an outcome")
                return Finish(state.outcome)
            case _:
                return CHECKPOINTS[phase]

    def messages(self) -> Sequence[Message]:
        """The turn's own messages, as the next model call should see them."""
        state = self.state
        if not state.delivered and not state.added:
            return state.transcript.messages
        return [*state.transcript.messages, *[d.message for d in state.delivered], *state.added]

    def slot(self, elapsed_ms: int = 0) -> Slot | None:
        """What the next record must carry: everything gathered since the one before."""
        state = self.state
        if not state.delivered and not state.added and not elapsed_ms and not state.last:
            return None
        return Slot(delivered=state.delivered, messages=state.added, elapsed_ms=elapsed_ms, last=state.last)

    def may_ask(self) -> bool:
        """Whether the budget grants one more model call: what is said to the turn is heard only then."""
        state = self.state
        step = state.step + (state.phase is Phase.BEFORE_COMPLETION)
        over = self._budget.steps is not None and step - state.base > self._budget.steps and state.last
        return not over and self._spent() is None

    def may_call(self, count: int) -> bool:
        """Whether the budget grants so many more calls."""
        return self._budget.calls is None or self.state.called + count <= self._budget.calls

    def refusal(self, count: int) -> BudgetSpent | None:
        """The limit that so many more calls of a cell would go beyond, if any."""
        if not self.may_call(count):
            return BudgetSpent("calls", self._budget.calls or 0)
        over = self._spent()
        return None if over is not None and over.which == "no_progress" else over

    # ------------------------------------------------------------------ receiving

    def receive(self, received: Received) -> None:
        """Take what came back. Raises InternalError for what this state does not wait for."""
        state = self.state
        handler = self._TABLE.get((state.phase, type(received)))
        if handler is None:
            raise InternalError(f"turn {state.turn_id} in {state.phase.name} got {type(received).__name__}")
        handler(self, received)

    def replay(self, records: Iterable[Record]) -> None:
        """Receive what was recorded, in order."""
        over: Closed | None = None
        for record in records:
            if isinstance(record, Replied | Called | Started | Faltered | Ended):
                self._align(record)
                self.receive(record)
            elif isinstance(record, Completed):
                self.note(record)
            elif isinstance(record, Closed):
                over = record
            elif isinstance(record, Reopened) and over is not None:
                self._reopened(over)
                over = None
            elif not isinstance(record, Said | Asking | Framed | Noted):
                raise InternalError(f"turn {self.state.turn_id} is over: a {type(record).__name__} is not replayed")
        if over is not None:
            raise InternalError(f"turn {self.state.turn_id} is over: a Closed is not replayed")

    def _reopened(self, end: Closed) -> None:
        """Continue the turn after an end without an answer: with its last reply, and results for calls without one, and
        with a new step. The model is asked with all that is recorded, and bounds count from zero.

        A turn that ended before its first model call begins at its opening, if its plugins or deps ended it there.
        """
        if end.reply is not None:
            self._align(end.reply)
            self.receive(end.reply)
        state = self.state
        state.transcript.add(replace(end, reply=None))
        fresh = TurnState(state.turn_id, state.transcript, step=state.step + 1, base=state.step)
        if state.phase is not Phase.OPENING or not isinstance(end.outcome, Failed | PluginAborted):
            fresh.phase = Phase.ASKING
            if state.transcript.messages[-1].role == "assistant":
                fresh.added = (prompt.go_on(),)  # models do not answer their own words
        self.state = fresh

    def note(self, record: Completed) -> None:
        """A direct completion was made in this turn, by a hook, a tool or for a server: the budget pays for it too."""
        self.state.beside = self.state.beside + (record.usage or Usage())

    def _align(self, record: Replied | Called | Started | Faltered | Ended) -> None:
        """Go on as recorded: whatever this definition would do here, a model call of that step was made, or its reply
        was run as a cell."""
        state = self.state
        if isinstance(record, Called) or (isinstance(record, Ended) and self._is_cell(record.call)):
            if state.phase is not Phase.CODE:
                state.step = record.step if isinstance(record, Called) else int(record.call.partition(".")[0])
                state.phase, state.outcome, state.added, state.finished = Phase.CODE, None, (), None
            return
        if isinstance(record, Started | Ended) or (isinstance(record, Faltered) and record.call):
            return
        if state.phase is not Phase.ASKING or state.step != record.step:
            state.phase, state.step, state.outcome = Phase.ASKING, record.step, None
        state.queued = ()  # said, and in this record or one before it
        state.last = record.slot is not None and record.slot.last

    def _keep(self, record: Replied | Called | Started | Faltered | Ended) -> None:
        """It is recorded, and with it what was gathered since the record before."""
        state = self.state
        state.transcript.add(record)
        state.delivered, state.added = (), ()
        slot = record.slot
        if slot is not None and (slot.elapsed_ms or slot.queued):
            state.elapsed_ms = slot.elapsed_ms or state.elapsed_ms
            state.queued += slot.queued

    def _delivered(self, delivery: Delivery) -> None:
        state = self.state
        state.delivered, state.added, state.queued = delivery.inputs, state.queued + delivery.messages, ()
        if state.phase is Phase.BEFORE_COMPLETION:
            if not (delivery.inputs or delivery.messages) or not self.may_ask():
                state.phase = Phase.DONE  # the answer stands, whatever came too late for the budget
                return
            state.outcome = None
            state.step += 1
        self._ask()

    def _replied(self, reply: Replied) -> None:
        state = self.state
        self._keep(reply)
        state.usage = state.usage + usage_of(reply)
        state.attempt, state.due, state.progress = 1, 0, False
        state.failed = ()  # the model that answered stays with the turn; the others may have recovered by the next step
        state.calls, started = {}, frozenset(reply.started)  # a reply may ask for tens of thousands of calls
        state.cells = ()
        for index, (key, call) in enumerate(state.transcript.calls.items()):
            begun = index in started  # with this record
            store = reply.store if begun else ""
            asked = AskedCall(key, call.id, call.name, call.args, call.raw, begun, attempts=int(begun), store=store)
            state.calls[key] = asked
        granted = not state.calls or bool(reply.started) or self.may_call(len(state.calls))
        state.called += len(state.calls)
        if reply.dropped:
            state.added = (prompt.too_many_calls(reply.dropped),)
            most = self._budget.calls_per_reply
            within = most is None or reply.dropped <= most
            self._finish(BudgetSpent("records", MAX_ORDINAL) if within else BudgetSpent("calls_per_reply", most or 0))
        elif not state.calls and (reply.cell is not None or (reply.fault and reply.stop not in CUT_OFF)):
            self._read(reply)
        elif not state.calls or (reply.stop in CUT_OFF and not reply.started):
            self._answered(reply)  # calls of a reply that was cut off are not run: their arguments may be cut off
        elif state.last:
            # The last step was granted for an answer: calls now would run for ever.
            self._finish(BudgetSpent("steps", self._budget.steps or 0))
        elif not granted:
            self._finish(BudgetSpent("calls", self._budget.calls or 0))
        else:
            state.phase = Phase.TOOLS
        if reply.cells and state.calls:  # set also where they are not run: records may tell of more
            state.cells, state.code_at = tuple([f"{reply.step}.{index}" for index in reply.cells]), reply.at
            if state.phase is Phase.TOOLS and len(state.cells) == len(state.calls):
                state.phase = Phase.CODE

    def _read(self, reply: Replied) -> None:
        """The reply has a cell, or nothing could be made of it."""
        state, code = self.state, reply.code
        state.code, state.code_at, state.finished = code or "", reply.at, None
        if state.last:
            self._finish(BudgetSpent("steps", self._budget.steps or 0))
        elif code is None:
            self._repair(reply.fault, reply.text, prompt.unread)
        else:
            state.phase = Phase.CODE

    def _answered(self, reply: Replied) -> None:
        state, text = self.state, "".join([part.text for part in reply.parts if type(part) is Text])
        if reply.stop == "paused" and not state.last:
            state.step += 1  # its own tools are at work at the provider: it goes on when it is shown its words so far
            self._ask()
            return
        if reply.stop in CUT_OFF:
            self._finish(Incomplete(reply.stop, text))
            return
        value = None
        if self._output is not None:
            try:
                value = self._output(text)
            except ValueError as error:
                self._repair(str(error), text)
                return
        state.outcome = Finished(text, value)
        state.phase = Phase.BEFORE_COMPLETION

    def _repair(self, error: str, text: str, words: Callable[[str], Message] = prompt.repair) -> None:
        state = self.state
        if state.repairs >= MAX_REPAIRS or state.last:
            self._finish(Incomplete(f"the output did not validate: {error}", text))
            return
        state.repairs += 1
        state.added = (words(error),)
        state.step += 1
        self._ask()

    def _model_faltered(self, record: Faltered) -> None:
        self._keep(record)
        state = self.state
        state.attempt, state.due = record.attempt + 1, record.due
        if record.final:
            state.failed = (*state.failed, state.candidate)
        state.candidate = record.candidate
        if record.code == INTERRUPTED or record.begun:
            self.state.usage = self.state.usage + Usage(unknown=1)

    def _gave_up(self, end: GaveUp) -> None:
        unusable = end.code == UNUSABLE
        if end.begun:
            self.state.usage = self.state.usage + Usage(unknown=1)
        failed = ProviderFailed(end.code, end.message, end.attempts, end.model)
        self._finish(InvalidInput(end.code, end.message) if unusable else failed)

    def _aborted(self, end: Aborted) -> None:
        self._finish(PluginAborted(end.plugin, end.code, end.message))

    def _time_is_up(self, end: TimeIsUp) -> None:
        self._finish(BudgetSpent("seconds", self._budget.seconds or 0))

    def _no_room(self, end: NoRoom) -> None:
        self._finish(BudgetSpent("records", MAX_ORDINAL))

    def _unprepared(self, end: Unprepared) -> None:
        self._finish(Failed(end.code, end.message))

    def _tool_started(self, record: Started) -> None:
        call = self._call(record.call)
        self._keep(record)
        self.state.calls[record.call] = replace(
            call,
            started=True,
            args=record.args,
            payload=record.payload,
            attempts=record.attempt,
            deferred=record.deferred,
            repeated=record.repeated,
            due=0,
            background=record.background,
            store=call.store or record.store,
        )

    def _tool_faltered(self, record: Faltered) -> None:
        call = self._call(record.call)
        self._keep(record)
        self.state.calls[record.call] = replace(call, started=False, attempts=record.attempt, due=record.due)

    def _tool_ended(self, record: Ended) -> None:
        state = self.state
        if state.calls.pop(record.call, None) is None:
            raise InternalError(f"turn {state.turn_id} does not wait for call {record.call}")
        self._keep(record)
        state.progress = state.progress or type(record.outcome) is Ok
        if not state.calls:
            state.idle_steps = 0 if state.progress else state.idle_steps + 1
            state.step += 1
            state.phase = Phase.AFTER_WORK
        elif len(state.calls) == len(state.cells):
            state.phase = Phase.CODE

    def _cell_called(self, record: Called) -> None:
        """A cell asked for calls. A sleep is due from here on, whoever wakes it."""
        state, started = self.state, frozenset(record.started)
        self._keep(record)
        for number, (key, call) in enumerate(calls_in(record).items(), record.first):
            begun, due = number in started, 0
            store = record.store if begun else ""
            if call.name == SLEEP:
                due = record.at + int(min(call.args.get("seconds") or 0, MAX_SECONDS) * 1000)
            state.calls[key] = AskedCall(
                key, call.id, call.name, call.args, call.raw, begun, attempts=int(begun), due=due, store=store
            )
        state.called += len(record.calls)

    def _cell_ended(self, record: Ended) -> None:
        """A call of a cell ended, or the cell itself did: it has then no calls without an outcome."""
        state = self.state
        if not self._is_cell(record.call):
            call = self._call(record.call)
            del state.calls[record.call]
            self._keep(record)
            if call.name == FINISH and isinstance(record.outcome, Ok):
                state.finished = (record.outcome.value,)
            return
        left = [key for key in state.calls if key not in state.cells]
        if left or (state.cells and record.call != state.cells[0]):
            first = [*left, *state.cells][0]
            raise InternalError(f"turn {state.turn_id}: cell {record.call} ended before {first}")
        if state.cells:
            state.cells, state.finished = state.cells[1:], None
            self._tool_ended(record)
            return
        self._keep(record)
        ended = record.outcome
        state.code, state.idle_steps = "", 0 if isinstance(ended, Ok) else state.idle_steps + 1
        if isinstance(ended, Ok) and state.finished is not None:
            state.outcome = Finished(ended.value["answer"], None if self._output is None else state.finished[0])
            state.phase = Phase.BEFORE_COMPLETION
            return
        state.step += 1
        state.phase = Phase.AFTER_WORK

    def _is_cell(self, call: str) -> bool:
        """Whether it is a cell that has this key, and no call of one."""
        return "." not in call or call in self.state.cells

    def _over_budget(self, spent: BudgetSpent | LimitReached) -> None:
        self._finish(spent)

    def _cancelled(self, request: CancelTurn) -> None:
        self._finish(Cancelled(request.by, request.reason))

    # ------------------------------------------------------------------ deciding

    def _call(self, key: str) -> AskedCall:
        call = self.state.calls.get(key)
        if call is None:
            raise InternalError(f"turn {self.state.turn_id} does not wait for call {key}")
        return call

    def _ask(self) -> None:
        """The next model call, unless the budget is spent; the step limit grants one last word without tools."""
        state = self.state
        over = self._spent()
        if over is not None:
            self._finish(over)
            return
        if self._budget.steps is not None and state.step - state.base > self._budget.steps:
            if state.last:
                self._finish(BudgetSpent("steps", self._budget.steps))
                return
            state.last = True
            state.added = (*state.added, prompt.step_limit(self._budget.steps))
        else:
            state.last = False  # a changed definition may grant more than the recorded one
        state.phase = Phase.ASKING

    def _spent(self) -> BudgetSpent | None:
        """The limit that the next model call would go beyond, if any. `steps` is not here: it grants a last word."""
        state, budget = self.state, self._budget
        bounded = budget.tokens is not None or budget.money is not None
        spent = state.usage + state.beside if bounded else state.usage
        if budget.tokens is not None and spent.total >= budget.tokens:
            return BudgetSpent("tokens", budget.tokens)
        most = None if budget.money is None else money(budget.money)
        if most is not None and (spent.cost or 0) >= most:
            return BudgetSpent("money", float(most))
        if budget.seconds is not None and state.elapsed_ms >= budget.seconds * 1000:
            return BudgetSpent("seconds", budget.seconds)
        if budget.no_progress is not None and state.idle_steps >= budget.no_progress:
            return BudgetSpent("no_progress", budget.no_progress)
        return None

    def _finish(self, outcome: Outcome) -> None:
        self.state.outcome = outcome
        self.state.phase = Phase.DONE

    _TABLE: ClassVar[dict[tuple[Phase, type], Callable[[Machine, Any], None]]] = {
        (Phase.OPENING, Delivery): _delivered,
        (Phase.ASKING, Replied): _replied,
        (Phase.ASKING, Faltered): _model_faltered,
        (Phase.ASKING, GaveUp): _gave_up,
        (Phase.ASKING, TimeIsUp): _time_is_up,
        (Phase.ASKING, LimitReached): _over_budget,
        (Phase.TOOLS, Started): _tool_started,
        (Phase.TOOLS, Faltered): _tool_faltered,
        (Phase.TOOLS, Ended): _tool_ended,
        (Phase.CODE, Called): _cell_called,
        (Phase.CODE, Started): _tool_started,
        (Phase.CODE, Faltered): _tool_faltered,
        (Phase.CODE, Ended): _cell_ended,
        (Phase.CODE, NoRoom): _no_room,
        (Phase.CODE, Aborted): _aborted,
        (Phase.CODE, CancelTurn): _cancelled,
        (Phase.AFTER_WORK, BudgetSpent): _over_budget,
        (Phase.AFTER_WORK, Delivery): _delivered,
        (Phase.BEFORE_COMPLETION, Delivery): _delivered,
        (Phase.OPENING, Unprepared): _unprepared,
        (Phase.OPENING, NoRoom): _no_room,
        (Phase.ASKING, NoRoom): _no_room,
        (Phase.TOOLS, NoRoom): _no_room,
        (Phase.AFTER_WORK, NoRoom): _no_room,
        (Phase.OPENING, Aborted): _aborted,
        (Phase.ASKING, Aborted): _aborted,
        (Phase.TOOLS, Aborted): _aborted,
        (Phase.AFTER_WORK, Aborted): _aborted,
        (Phase.BEFORE_COMPLETION, Aborted): _aborted,
        (Phase.DONE, Aborted): _aborted,
        (Phase.OPENING, CancelTurn): _cancelled,
        (Phase.ASKING, CancelTurn): _cancelled,
        (Phase.TOOLS, CancelTurn): _cancelled,
        (Phase.AFTER_WORK, CancelTurn): _cancelled,
        (Phase.BEFORE_COMPLETION, CancelTurn): _cancelled,
        (Phase.DONE, CancelTurn): _cancelled,
    }


def usage_of(reply: Replied) -> Usage:
    """The usage of a step: an interrupted ask and a provider that does not say are unknown, not zero."""
    seen = reply.usage or Usage(unknown=1)
    return replace(seen, calls=1, unknown=seen.unknown + reply.interrupted)
