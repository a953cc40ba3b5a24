"""The loop. There is one, for every turn, live or recovered, watched or not.

The machine says what it waits for, a handler does it and records what came back, and the machine receives it. The
handler writes what is recorded (`journal.flush`) before it acts outside, so a crash finds every outcome either on disk
or not yet caused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.engine.control import Control, TurnAborted, TurnCancelled
from perdure.engine.journal import TurnJournal
from perdure.engine.limits import TurnSpending
from perdure.errors import NotPrepared, TurnFull
from perdure.model.effect import Aborted, CancelTurn, Effect, Finish, NoRoom, Unprepared
from perdure.model.ids import MAX_ORDINAL
from perdure.model.message import Message
from perdure.model.outcome import Outcome, PendingCall
from perdure.model.plugin import Issue
from perdure.model.record import (
    Asking,
    Called,
    Completed,
    Ended,
    Faltered,
    Framed,
    Noted,
    Record,
    Replied,
    Slot,
    Started,
)
from perdure.model.session import CancelRequest
from perdure.model.write import TurnScope
from perdure.ports.host import Clock
from perdure.ports.services import EventSink, TurnHooks
from perdure.turn.machine import Machine

PER_CALL = 3
"""Records that a call may take in the end: it is put off when the Runtime is left, starts, and ends."""
SPARE = 256
"""Records kept for what hooks and the commit add when a turn ends."""

decode_cancel = msgspec.json.Decoder(CancelRequest).decode


class Parked(Struct, frozen=True, gc=False):
    """The turn waits on disk for answers to these, and for the first end of these processes; no worker owns it any
    more."""

    calls: tuple[PendingCall, ...]
    processes: tuple[str, ...] = ()


class Run:
    """A turn that a task of this Runtime works on: its machine, its journal, and its control.

    `records` are the turn's records so far, for its result; the first `found` of them were there when this run began.
    `resumed`: the turn began before this run of it; `noted`: it has records beside its own course. `interrupted` counts
    takeovers since the newest record: a model call then in flight was asked before. `history` is what a model is shown
    of the past. `held` belongs to the tools: what was prepared and reserved for calls whose start is recorded. `hooks`
    is what plugins do to the turn, if they do anything. `children`: it has started processes that end with it.
    `deps` are the live objects of this run. `spending` is what it reserves of the Runtime's limits, if there are any.
    """

    __slots__ = (
        "_began",
        "agent",
        "children",
        "clock",
        "control",
        "deps",
        "events",
        "found",
        "held",
        "history",
        "hooks",
        "interrupted",
        "issues",
        "journal",
        "machine",
        "noted",
        "records",
        "resumed",
        "scope",
        "spending",
        "turn_id",
        "unreadable",
    )

    def __init__(  # noqa: PLR0913  # what a turn consists of, put together in one place
        self,
        scope: TurnScope,
        machine: Machine,
        journal: TurnJournal,
        events: EventSink,
        clock: Clock,
        agent: Any,
        records: list[Record],
        history: list[Message],
        interrupted: int = 0,
        hooks: Callable[[Run], TurnHooks] | None = None,
        deps: Any = None,
        spending: TurnSpending | None = None,
    ) -> None:
        self.scope, self.machine, self.journal = scope, machine, journal
        self.events, self.clock, self.agent = events, clock, agent
        self.records, self.history, self.interrupted = records, history, interrupted
        self.turn_id, self.deps, self.spending = machine.state.turn_id, deps, spending
        self.control = Control()
        self.held: dict[str, Any] = {}
        self.issues: list[Issue] = []
        self.unreadable: set[str] = set()
        self.found = len(records)
        self.resumed = self.noted = len(records) > 1
        self.children = False
        # When the turn would have begun without breaks; only a budget of time asks for it.
        timed = agent.budget.seconds is not None
        self._began = clock.monotonic() - machine.state.elapsed_ms / 1000 if timed else 0.0
        self.hooks: TurnHooks | None = None if hooks is None else hooks(self)

    def record(self, record: Replied | Called | Started | Faltered | Ended, blobs: tuple[str, ...] = ()) -> None:
        """Something happened: the journal keeps it and the machine goes on from it."""
        self.journal.record(record, blobs)
        self.records.append(record)
        self.machine.receive(record)
        if type(record) is not Faltered:
            self.interrupted = 0  # the reply has counted it; or the crash met a tool, and no model call was in flight

    @property
    def room(self) -> int:
        """How many records the turn may still have besides those that the calls in hand and its end take."""
        return MAX_ORDINAL - SPARE - len(self.records) - PER_CALL * len(self.machine.state.calls)

    def check_room(self) -> None:
        """Before something is begun that is none of the turn's own effects, and is recorded."""
        if self.room < 2:
            raise TurnFull(self.turn_id, MAX_ORDINAL)

    def note(self, record: Asking | Completed | Framed | Noted) -> None:
        """Something beside the turn's own course: kept, and nothing the machine waits for."""
        self.journal.record(record)
        self.records.append(record)
        if isinstance(record, Completed):
            self.machine.note(record)
        self.noted = True

    def use(self, agent: Any) -> None:
        """Go on with another definition of the agent: its tools were switched by the turn itself."""
        self.agent = agent

    def give(self, deps: Any) -> None:
        """The live objects of this run are made: tools and hooks see them from here on."""
        self.deps = deps
        if self.hooks is not None:
            self.hooks.give(deps)

    def unprepared(self, failed: NotPrepared | None = None) -> None:
        """What the turn runs with is not there, and so no hook is called. It ends: it is cancelled, or has `failed`."""
        self.hooks = None
        if failed is not None:
            self.machine.receive(Unprepared(failed.code, str(failed)))

    def show(self, history: list[Message]) -> None:
        """From the next model call on, show this in place of the past."""
        self.history = history

    def start_children(self) -> None:
        """Before a process is started that ends with the turn: its commit asks those to stop that it leaves behind."""
        self.children = True

    def abort(self, end: TurnAborted) -> None:
        """A plugin ends the turn."""
        self.machine.receive(Aborted(end.plugin, end.code, end.message))

    def check_cancel(self) -> None:
        """Take note of a cancel request that the last write brought back, and raise what has been asked for."""
        if self.journal.cancel is not None and self.control.request is None:
            self.control.cancel(decode_cancel(self.journal.cancel))
        self.control.check()

    def slot(self) -> Slot | None:
        """What the next record carries; the time spent so far where the budget counts it."""
        state, timed = self.machine.state, self.agent.budget.seconds is not None
        slot = None
        if timed or state.delivered or state.added or state.last:
            slot = self.machine.slot(self.elapsed_ms if timed else 0)
        if self.hooks is not None:
            slot = self.hooks.slot(slot)
        if self.issues:
            issues, self.issues = self.issues, []
            slot = replace(slot, issues=(*slot.issues, *issues)) if slot is not None else Slot(issues=tuple(issues))
        return slot

    @property
    def elapsed_ms(self) -> int:
        """How long the turn has been worked on, where its budget sets a time."""
        return int((self.clock.monotonic() - self._began) * 1000)

    async def sleep_until(self, due: int) -> None:
        """Wait for a recorded due time; a request to stop ends the wait."""
        wait = due - self.clock.now()
        if wait > 0:
            await self.control.guard(self.clock.sleep(wait / 1000))


Handler = Callable[[Run, Any], Awaitable[Parked | None]]

ConcludeCalls = Callable[[Run], Awaitable[None]]
"""Records how the calls in hand of a turn end that is cancelled or aborted."""


async def drive(run: Run, handlers: Mapping[type[Effect], Handler], conclude: ConcludeCalls) -> Outcome | Parked:
    """Take a turn to its end, or to where it parks. Raises Leaving or Fenced when this worker must stop."""
    machine = run.machine
    while True:
        effect = machine.next_effect()
        if type(effect) is Finish:
            return effect.outcome
        if run.room < 0 and machine.state.outcome is None:
            await conclude(run)
            machine.receive(NoRoom())
            continue
        try:
            if run.journal.cancel is not None or run.control.stopping:
                run.check_cancel()
            parked = await handlers[type(effect)](run, effect)
        except TurnCancelled:
            request = run.control.request
            assert request is not None
            await conclude(run)
            machine.receive(CancelTurn(request.by, request.reason))
        except TurnAborted as end:
            await conclude(run)
            run.abort(end)
        else:
            if parked is not None:
                return parked
