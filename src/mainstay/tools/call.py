"""One tool call of a turn in memory: what its context can reach, what plugins say about it, and its durable waits.

A wait (a person's approval or settlement, or the completion of a deferred call) is a row that opens with a write of the
turn, is resolved by the first answer, and is found again after a crash by its id, which follows from the call.
`CallWaits` makes the rows and reads them; which calls wait is in the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mainstay.engine.control import Control
from mainstay.engine.driver import Run
from mainstay.engine.lease import Worker
from mainstay.engine.waiters import CurrentWork, depth
from mainstay.engine.waits import decode_pending, sign, wait_id, whole
from mainstay.model.codec import clean, encode
from mainstay.model.effect import AskedCall
from mainstay.model.event import ToolProgress
from mainstay.model.message import Message
from mainstay.model.outcome import PendingCall
from mainstay.model.plugin import Decision
from mainstay.model.record import Answered, Slot, Started
from mainstay.model.session import Answer, WaitRow
from mainstay.model.tool import Artifact, Failed, Ok, PreparedCall, ToolOutcome, ToolSpec
from mainstay.plugins.calls import withheld
from mainstay.plugins.turn import plugins_of
from mainstay.ports.services import ToolHost, TurnServices
from mainstay.ports.store import Store
from mainstay.ports.tool import Handles
from mainstay.tools.artifacts import SessionArtifacts
from mainstay.tools.attempt import Again, EndsAs, Interruption, StopCause, TryAgain, settle
from mainstay.tools.context import CallHost, ToolContext
from mainstay.tools.invoke import Ready, checked, prepared
from mainstay.tools.output import AttemptResult, OutputRules

_ANSWER = msgspec.json.Decoder(Answer).decode
RESERVED = "its tool has not handed it over yet"
"""Why a deferred call's wait is open before its body has returned: only then may recovery run the body again."""


def completion_of(run: Run, key: str) -> str:
    """The wait for the completion of a deferred call. It outlives attempts that failed, but not a person's word to have
    the call made again: that answered it, and the next attempt has another."""
    again = [r for r in run.records if type(r) is Started and r.call == key and r.answer is not None]
    return wait_id(f"{run.turn_id}.{key}", "deferred", 1 + len(again))


class CallWaits:
    """The waits of the calls of one turn. Holds no state: every answer comes from the store or the turn's records."""

    def __init__(self, store: Store, run: Run) -> None:
        self._store, self._run = store, run

    # ------------------------------------------------------------------ rows

    def wait_id(self, key: str, kind: str) -> str:
        if kind == "deferred":
            return completion_of(self._run, key)
        # An answer about recovery stands for one attempt: about the next one a person is asked anew.
        attempt = self._run.machine.state.calls[key].attempts if kind == "recovery" else 1
        return wait_id(f"{self._run.turn_id}.{key}", kind, attempt)

    def pending(self, call: AskedCall, kind: Any, **told: Any) -> PendingCall:
        """What is shown to those who may answer."""
        call_id = f"{self._run.turn_id}.{call.call}"
        return PendingCall(call_id, kind, call.name, call.args, self._run.clock.now(), **told)

    def row(self, call: AskedCall, kind: str, pending: PendingCall) -> WaitRow:
        scope, name = self._run.scope, self.wait_id(call.call, kind)
        return WaitRow(name, scope.sid, scope.turn, call.call, kind, "open", pending.due, encode(pending))

    def reserved(self, call: AskedCall) -> WaitRow:
        """The wait of a deferred call: its key is durable before its body can hand it out."""
        return self.row(call, "deferred", self.pending(call, "deferred", reason=RESERVED))

    def revoked(self, call: AskedCall, kind: str) -> WaitRow:
        """The same wait, closed: from this write on the store refuses answers."""
        pending = replace(self.pending(call, kind), args={})
        return replace(self.row(call, kind, pending), state="revoked")

    # ------------------------------------------------------------------ reading

    async def known(self) -> dict[str, WaitRow]:
        """The waits of the calls without an outcome, as they are on disk: each by its id, so that the cost does not
        grow with the waits that a long session has had."""
        found = {}
        for call in list(self._run.machine.state.calls.values()):
            kinds = ("approval",) if not call.started else ("recovery", "deferred") if call.deferred else ("recovery",)
            for kind in kinds:
                wait = await self._store.wait(self.wait_id(call.call, kind))
                if wait is not None and (wait := await whole(self._store, wait)) is not None:
                    found[wait.id] = wait
        return found

    async def final(self) -> dict[str, WaitRow]:
        """The waits by call in a turn that ends: no answer is accepted after this.

        The store refuses answers to a cancelled turn by itself. In an aborted one, questions that are open are revoked
        first: an answer that was accepted between this read and the commit would be lost.
        """
        waits = await self.known()
        if self._run.control.request is None:
            calls = self._run.machine.state.calls
            still = [wait for wait in waits.values() if wait.state == "open"]
            if still:
                await self._run.journal.flush(tuple([self.revoked(calls[wait.call], wait.kind) for wait in still]))
                waits = await self.known()
        return {wait.call: wait for wait in sorted(waits.values(), key=lambda wait: wait.state != "open")}

    async def completed(self, call: AskedCall, last: bool) -> bool:
        """Whether a deferred call was completed while its body ran: that was acknowledged, however the body ends.

        `last`: no attempt comes after this one, so its key is revoked at once. The store decides which came first: a
        completion that comes later is refused, and not accepted where nothing would read it. A cancelled turn needs no
        revocation: the store refuses its completions.
        """
        if last and self._run.control.request is None:
            await self._run.journal.flush((self.revoked(call, "deferred"),))
        wait = await self._store.wait(self.wait_id(call.call, "deferred"))
        return wait is not None and wait.state == "resolved"

    def answer(self, call: AskedCall, wait: WaitRow, refused: str = "") -> Answer | None:
        """The answer that a wait holds; None when it ended without one. Its reason is as the filters of the session let
        it be recorded; its value passes them later.

        `refused`: the plugin that keeps the session from opening, so that it could not look at the reason.
        """
        if wait.answer is None:
            return None
        answer, plugins = _ANSWER(wait.answer), plugins_of(self._run)
        if not answer.reason or (plugins is None and not refused):
            return answer
        if plugins is None:
            return replace(answer, reason=withheld("reason", refused))
        filters = plugins.filters
        if filters is None:
            return answer
        reason = filters.value("answer", answer.reason, f"{self._run.turn_id}.{call.call}", call.name)
        return replace(answer, reason=reason)


def body_is_over(wait: WaitRow) -> bool:
    """Whether the body of a deferred call handed its completion over, or that has come: then it is not run again."""
    return wait.state != "open" or decode_pending(wait.body).reason != RESERVED


WITHHELD = "what it said is withheld: plugins have not seen it"
"""The message of a failure after which the call is attempted again. Plugins see how the call ends; until then nothing
that it said is stored."""


class NeedsApproval(Struct, frozen=True, gc=False):
    """Plugins let the call run with these arguments once a person has approved it."""

    call: AskedCall
    reason: str


class HandedOver(Struct, frozen=True, gc=False):
    """The body is over, and the completion of the call comes from outside, within `seconds` if there is a limit."""

    seconds: float | None


CallEnd: TypeAlias = AttemptResult | NeedsApproval | HandedOver
"""What the task of a call returns."""


def stop_of(control: Control) -> StopCause | None:
    """Why attempts are stopped. A cancel request goes before leaving: it ends the turn or process for good."""
    if control.request is not None:
        return StopCause.CANCELLED
    return StopCause.LEFT if control.leaving else None


class Shared(Protocol):
    """What the calls of a Runtime share, as far as one of them needs it; the `Dispatcher` has it.

    `services` makes what a tool may ask of its session, `handles` what it may do with processes.
    """

    store: Store
    worker: Worker
    deps: Any
    services: Callable[[Run], TurnServices] | None
    handles: Callable[[Run, str], Handles] | None


class ActiveCall(CallHost):
    """One call of a round in memory. Lives on the event loop, besides `progress`, which any thread may call.

    `asked` is the call with the arguments that it runs with, `ready` how it is prepared. `task` carries out what it
    needs, until one attempt has ended; `interruption` and `context` belong to that attempt. `pending` is what it waits
    for outside, `answer` how that wait ended and is not recorded yet. `decisions` and `said` are what plugins decided
    and said, until a record carries it. `artifacts` were put by a deferred call, whose body was over before.
    """

    __slots__ = (
        "_key",
        "_loop",
        "_work",
        "answer",
        "artifacts",
        "asked",
        "began",
        "context",
        "decisions",
        "id",
        "interruption",
        "key",
        "late",
        "pending",
        "plugins",
        "ready",
        "run",
        "said",
        "shared",
        "task",
    )

    def __init__(self, shared: Shared, run: Run, asked: AskedCall) -> None:
        self.shared, self.run, self.asked, self.plugins = (
            shared,
            run,
            asked,
            None if run.hooks is None else plugins_of(run),
        )
        self.key, self.id = asked.call, f"{run.turn_id}.{asked.call}"
        self.ready: Ready | None = None
        self.task: asyncio.Task[CallEnd] | None = None
        self.context: ToolContext[Any] | None = None
        self.interruption: Interruption | None = None
        self.pending: PendingCall | None = None
        self.answer: Answered | None = None
        self.began: float | None = None
        self.late = False
        self.decisions: tuple[Decision, ...] = ()
        self.said: tuple[Message, ...] = ()
        self.artifacts: tuple[Artifact, ...] = ()
        self._key: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: CurrentWork | None = None

    @property
    def spec(self) -> ToolSpec | None:
        """The contract of its tool: as it was prepared, else as the catalogue has it; None when the tool is gone."""
        if self.ready is not None:
            return self.ready.entry.spec
        entry = self.run.agent.catalog.get(self.asked.name)
        return None if entry is None else entry.spec

    def checked(self) -> Ready | Failed:
        return checked(self.run.agent.catalog, self.asked, self.id)

    # ------------------------------------------------------------------ its context

    def open_context(self, ready: Ready, attempt: int, store: str) -> ToolContext[Any]:
        """What one attempt is given, of a call whose first attempt started in `store`. The running task works for the
        call from here on."""
        run, shared, scope = self.run, self.shared, self.run.scope
        self._loop = asyncio.get_running_loop()
        if self._work is not None:
            self._work.end()  # that of its preparation
        self._work = CurrentWork(shared.worker.id, (scope.session_id, scope.turn), depth=depth()).begin()
        if ready.entry.spec.deferred:
            self._key = sign(shared.store.secret(), completion_of(run, self.key))
        return ToolContext(
            session_id=scope.session_id,
            turn_id=run.turn_id,
            call_id=self.id,
            tool=ready.call.name,
            attempt=attempt,
            generation=scope.generation,
            deps=shared.deps,
            payload=ready.call.payload,
            host=self,
            store=store,
        )

    def close_context(self) -> tuple[Artifact, ...]:
        """The artifacts of a call whose body is over, or is not waited for any more. Its context takes no more.

        The reference is dropped: the context refers to this object, and a cycle would be left to the collector.
        """
        context, artifacts = self.context, self.artifacts
        self.context, self.artifacts = None, ()
        if self._work is not None:
            self._work.end()
        return artifacts if context is None else (*artifacts, *context.close())

    def progress(self, value: Any) -> None:
        plain = clean(value)
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: a thread outlived it, and nothing listens
            self._loop.call_soon_threadsafe(self._show, plain)  # plugins are called on the event loop only

    def _show(self, value: Any) -> None:
        filters, name = None if self.plugins is None else self.plugins.filters, self.asked.name
        shown = value if filters is None else filters.value("progress", value, self.id, name)
        self.run.events.emit(ToolProgress, call_id=self.id, tool=name, value=shown)

    def completion_key(self) -> str | None:
        return self._key

    def artifact_store(self) -> SessionArtifacts:
        return SessionArtifacts(self.shared.store, self.run, self.plugins, self.id, self.asked.name)

    def services(self) -> ToolHost:
        make = self.shared.services
        return super().services() if make is None else make(self.run).for_call(self.id)

    def handles(self) -> Handles:
        make = self.shared.handles
        return super().handles() if make is None else make(self.run, self.id)

    async def prepare(self, ctx: ToolContext[Any], name: str, args: Mapping[str, Any]) -> tuple[PreparedCall, ToolSpec]:
        """Plugins are asked about that tool, not only about the one which starts it: else it would be a way round
        them."""
        asked = AskedCall(self.key, self.asked.provider_id, name, dict(args))
        ready = checked(self.run.agent.catalog, asked, self.id)
        if isinstance(ready, Failed):
            raise EndsAs(ready)
        if self.plugins is not None and self.plugins.vets:
            vetted = await self.vet(asked, ready.entry.spec)
            if isinstance(vetted, AttemptResult):
                raise EndsAs(vetted.end.otherwise if isinstance(vetted.end, Again) else vetted.end)
            if isinstance(vetted, NeedsApproval):
                raise EndsAs(_approval_needed(name))
            ready = vetted[1]
        if ready.entry.spec.approval == "ask":
            raise EndsAs(_approval_needed(name))
        found = await prepared(ready, ctx, anew=True)
        if not isinstance(found, Ready):
            raise EndsAs(found)
        return found.call, found.entry.spec

    # ------------------------------------------------------------------ what plugins say

    async def vet(self, asked: AskedCall, spec: ToolSpec) -> AttemptResult | NeedsApproval | tuple[AskedCall, Ready]:
        """How a call ends that plugins do not let begin, or whom it waits for; else the call as they left it."""
        assert self.plugins is not None
        verdict = await self.plugins.before_call(self.id, spec, asked.args)
        self.decisions = verdict.decisions
        if verdict.outcome is not None:
            return AttemptResult(await self.filtered(spec, verdict.args, verdict.outcome))
        if verdict.args is not asked.args:
            asked = replace(asked, args=verdict.args, raw=None)
        ready = checked(self.run.agent.catalog, asked, self.id)
        if isinstance(ready, Failed):
            return AttemptResult(ready)
        if verdict.ask is not None or spec.approval == "ask":
            return NeedsApproval(asked, "the tool asks for approval" if verdict.ask is None else verdict.ask)
        return asked, ready

    async def filtered(self, spec: ToolSpec, args: dict[str, Any], outcome: ToolOutcome) -> ToolOutcome:
        """The outcome of a call whose body did not run: what plugins, providers and people say passes filters too."""
        if self.plugins is None or not self.plugins.judges:
            return outcome
        return await self.plugins.filtered(self.id, spec, args, outcome)

    async def look(self, spec: ToolSpec, args: dict[str, Any], outcome: ToolOutcome) -> ToolOutcome:
        """What plugins let be recorded of how the call ended."""
        assert self.plugins is not None
        left, said = await self.plugins.after_call(self.id, spec, args, outcome)
        self.decisions, self.said = left.decisions, said
        return left.outcome

    async def seen(self, ready: Ready, result: AttemptResult) -> AttemptResult:
        """Let plugins look at an attempt that did not return a value; one that did has passed them already."""
        end, plugins, stop = result.end, self.plugins, stop_of(self.run.control)
        if plugins is None or not plugins.looks or isinstance(end, Ok):
            return result
        spec = ready.entry.spec
        if isinstance(end, Again):
            if isinstance(settle(end, self.run.machine.state.calls[self.key], spec, stop), TryAgain):
                if not plugins.judges or not isinstance(end.otherwise, Failed):
                    return result  # it was cut off, and said nothing
                failed = Failed(end.failed.code, WITHHELD)
                return AttemptResult(Again(failed, end.after, failed))
            end = end.otherwise
        if stop is not None and not isinstance(end, Failed):
            return result  # our own words: the body said nothing
        return AttemptResult(await self.look(spec, ready.call.args, end), result.blobs)

    def output_rules(self, spec: ToolSpec | None, args: dict[str, Any]) -> OutputRules:
        """What a returned value passes, also when its tool is gone meanwhile: plugins, then the budget."""
        budget = (None if spec is None else spec.output_budget) or self.run.agent.output_budget
        plugins = self.plugins
        if plugins is None:
            return OutputRules(self.run.journal, budget)
        filters, name = plugins.filters, self.asked.name
        filter_file = None if filters is None else functools.partial(filters.content, "file", self.id, name)
        if not plugins.looks:
            return OutputRules(self.run.journal, budget, filter_file=filter_file)
        spec = ToolSpec(name) if spec is None else spec
        look = functools.partial(self.look, spec, args) if plugins.judges else None
        project = functools.partial(plugins.project, self.id, spec, args) if plugins.projects else None
        return OutputRules(self.run.journal, budget, look, project, filter_file)

    def slot(self) -> Slot | None:
        """What a record of this call carries: what the turn has gathered, and what plugins decided about the call."""
        slot = self.run.slot()
        decisions, said = self.decisions, self.said
        if not decisions and not said:
            return slot
        self.decisions, self.said = (), ()
        return replace(slot or Slot(), decisions=decisions, queued=said)


def _approval_needed(name: str) -> Failed:
    return Failed("approval_needed", f"tool {name} waits for approval: call it itself, and it will be asked for")
