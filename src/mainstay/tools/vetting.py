"""What plugins have to say about the calls of a round: before one begins, and when it has ended.

What they decide about a call and say beside it waits here until a record of that call carries it.
"""

from __future__ import annotations

import functools
from typing import Any

from msgspec.structs import replace

from mainstay.engine.driver import Run
from mainstay.model.effect import AskedCall
from mainstay.model.message import Message
from mainstay.model.plugin import Decision
from mainstay.model.record import Slot
from mainstay.model.session import Answer
from mainstay.model.tool import Denied, Failed, Ok, ToolOutcome, ToolSpec
from mainstay.plugins.turn import plugins_of
from mainstay.tools.attempt import Again, Asking, Attempted, Outlet
from mainstay.tools.prepare import Ready, inspect

WITHHELD = "what it said is withheld: plugins have not seen it"


def _withheld(again: Again) -> Again:
    """A failure after which the call is made again. Plugins see how it ends; until then nobody keeps what it said."""
    if not isinstance(again.otherwise, Failed):
        return again  # it was cut off, and said nothing
    failed = Failed(again.failed.code, WITHHELD)
    return Again(failed, again.after, failed)


class Vetting:
    """The plugins' side of a round. A turn without plugins passes through."""

    def __init__(self, run: Run) -> None:
        self._run, self._plugins = run, plugins_of(run)
        self._decided: dict[str, tuple[Decision, ...]] = {}
        self._said: dict[str, tuple[Message, ...]] = {}

    @property
    def acts(self) -> bool:
        """Whether plugins are asked about calls before they begin."""
        return self._plugins is not None and self._plugins.vets

    @property
    def catalog(self) -> Any:
        return self._run.agent.catalog

    def concerns(self, call: AskedCall) -> bool:
        """Plugins are asked about tools that are there, before anything is said about the arguments."""
        if not self.acts:
            return False
        entry = self._run.agent.catalog.get(call.name)
        return entry is not None and entry.fault is None

    async def before(self, call: AskedCall, spec: ToolSpec) -> Attempted | tuple[AskedCall, Ready]:
        """How a call ends, or waits for a person, that plugins do not let begin; else the call as they left it."""
        assert self._plugins is not None
        call_id = f"{self._run.turn_id}.{call.call}"
        verdict = await self._plugins.before_call(call_id, spec, call.args)
        self._decided[call.call] = verdict.decisions
        if verdict.outcome is not None:
            return Attempted(await self.filtered(call, spec, verdict.args, verdict.outcome))
        if verdict.args is not call.args:
            call = replace(call, args=verdict.args, raw=None)
        ready = inspect(self._run.agent.catalog, call, call_id)
        if isinstance(ready, Failed):
            return Attempted(ready)
        if verdict.ask is not None or spec.approval == "ask":
            reason = "the tool asks for approval" if verdict.ask is None else verdict.ask
            return Attempted(Denied(), asks=Asking(call, reason))
        return call, ready

    async def after(self, call: AskedCall, ready: Ready, attempted: Attempted) -> Attempted:
        """Let plugins look at a call that did not return a value; one that did has passed them already."""
        end, spec, shut = attempted.end, ready.entry.spec, self._run.gate.shut
        if self._plugins is None or not self._plugins.looks or isinstance(end, Ok):
            return attempted
        if isinstance(end, Again):
            if self._run.machine.state.calls[call.call].attempts <= spec.retries and not shut:
                return Attempted(_withheld(end)) if self._plugins.judges else attempted
            end = end.otherwise
        if shut and not isinstance(end, Failed):
            return attempted  # our own words: the body said nothing
        return Attempted(await self._look(call, spec, ready.call.args, end), attempted.blobs)

    async def settled(self, call: AskedCall, answer: Answer) -> Attempted:
        """The same for a call of which somebody outside says that it failed."""
        failed = Failed("settled_as_failed", answer.reason or "settled as failed", answer.value)
        entry = self._run.agent.catalog.get(call.name)
        if self._plugins is None or not self._plugins.looks:
            return Attempted(failed)
        spec = ToolSpec(call.name) if entry is None else entry.spec
        return Attempted(await self._look(call, spec, call.args, failed))

    async def filtered(
        self, call: AskedCall, spec: ToolSpec, args: dict[str, Any], outcome: ToolOutcome
    ) -> ToolOutcome:
        """The outcome of a call whose body did not run: what plugins, providers and people say passes filters too."""
        if self._plugins is None or not self._plugins.judges:
            return outcome
        return await self._plugins.filtered(f"{self._run.turn_id}.{call.call}", spec, args, outcome)

    async def _look(self, call: AskedCall, spec: ToolSpec, args: dict[str, Any], outcome: ToolOutcome) -> ToolOutcome:
        assert self._plugins is not None
        left, said = await self._plugins.after_call(f"{self._run.turn_id}.{call.call}", spec, args, outcome)
        self._decided[call.call] = left.decisions
        self._said[call.call] = said
        return left.outcome

    def outlet(self, call: AskedCall, spec: ToolSpec | None, args: dict[str, Any]) -> Outlet:
        """Where what a call returns goes: past the plugins first, also when its tool is gone meanwhile."""
        budget = (None if spec is None else spec.output_budget) or self._run.agent.output_budget
        if self._plugins is None:
            return Outlet(self._run.journal, budget)
        filters, call_id = self._plugins.filters, f"{self._run.turn_id}.{call.call}"
        filter_file = None if filters is None else functools.partial(filters.content, "file", call_id, call.name)
        if not self._plugins.looks:
            return Outlet(self._run.journal, budget, filter_file=filter_file)
        spec = ToolSpec(call.name) if spec is None else spec
        look = functools.partial(self._look, call, spec, args) if self._plugins.judges else None
        project = None
        if self._plugins.projects:
            project = functools.partial(self._plugins.project, call_id, spec, args)
        return Outlet(self._run.journal, budget, look, project, filter_file)

    # ------------------------------------------------------------------ until a record carries it

    def remember(self, call: AskedCall, decisions: tuple[Decision, ...]) -> None:
        """What was decided about a call before it waited for a person."""
        self._decided[call.call] = decisions

    def take(self, call: AskedCall) -> tuple[Decision, ...]:
        return self._decided.pop(call.call, ())

    def slot(self, call: AskedCall) -> Slot | None:
        """What a record of this call carries: with it, what plugins decided about it."""
        slot = self._run.slot()
        decisions, said = self._decided.pop(call.call, ()), self._said.pop(call.call, ())
        if not decisions and not said:
            return slot
        return replace(slot or Slot(), decisions=decisions, queued=said)

    def note(self) -> None:
        """The turn is about to wait: what plugins changed on the way there goes to disk with the waits."""
        if self._plugins is not None:
            self._plugins.note()
