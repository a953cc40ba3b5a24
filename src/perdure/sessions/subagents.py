"""The engine of kind "turn": a process that is one turn of a session of its own, a subagent.

    child session made ── input accepted under the process's id ── its turn awaited ── how that ended ends the process

The turn is the session's. The turn engine runs it and recovers it; the process only waits for it, and holds
no place among those that are worked on. Every step is idempotent, so a process that is begun again goes on where it
was left: nothing is asked of a model twice because its parent died.

    its turn waits for a person   the process is parked with it, and taken up when the turn goes on
    a signal "message" comes      it is said to the turn that runs; one that comes too late is answered by another turn
    a cancel request comes        the turn is cancelled, and what its session has started; its real end is awaited
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import (
    Conflict,
    InvalidInput,
    InvalidProcess,
    NotFound,
    PerdureError,
    PluginError,
    ProcessEnded,
    ProcessNotVisible,
    ProcessStuck,
    RuntimeClosed,
    SessionDeleted,
    StoreError,
    ToolError,
    TurnFailed,
    Unavailable,
    UnknownSession,
)
from perdure.lifecycle.process import SIGNAL
from perdure.model.agent import AgentSpec
from perdure.model.codec import clean_message, convert, error_text, model_text
from perdure.model.ids import MAX_SESSION_ID, turn_id
from perdure.model.message import Message
from perdure.model.outcome import BudgetSpent, Finished, Incomplete, LimitReached, Outcome, Waiting, kind_of
from perdure.model.plugin import CreateSession
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Cause,
    EventType,
    Failure,
    ProcessOutcome,
    ProcessRow,
    Registration,
    SessionOrigin,
    Success,
    WaitOn,
    WakeTarget,
)
from perdure.model.record import Begun
from perdure.model.session import CancelRequest, Offers, Settings, dump_settings
from perdure.model.tool import Cancelled as TurnCancelled
from perdure.model.write import Configure, ProcessFilter
from perdure.plugins.decisions import sound_child
from perdure.ports.process import EngineRun, Leaving
from perdure.processes import service
from perdure.processes.handle import ProcessHandle
from perdure.processes.service import Start
from perdure.processes.worker import ProcessWorker
from perdure.sessions.definition import Defined
from perdure.sessions.parts import SessionParts
from perdure.sessions.result import TurnResult
from perdure.sessions.services.host import SessionHost
from perdure.tools.answer import schema_codec
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool, ToolOptions
from perdure.wire import parse_handle

KIND = service.AGENT
MESSAGE = f"{SIGNAL}{service.MESSAGE}"
EVENTS = (EventType(MESSAGE, {"type": "string", "minLength": 1}),)

REFUSALS = (InvalidInput, Conflict, NotFound, PluginError, Unavailable)
"""What is wrong with the asking, and would be wrong again: it fails the process, and is told to who asked."""


class SubagentRequest(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a subagent is started with.

    `input` is what it is told. It begins with `seed`, messages as if they had been said before; with `output`, a JSON
    schema, it answers with JSON that fits. `hidden`, `only` and `options` are about its tools and plugins, as for any
    child session. `session_id` is a session to go on with, which has all this from when it was begun.
    """

    input: str | Message
    session_id: str | None = None
    output: dict[str, Any] | None = None
    seed: tuple[Message, ...] = ()
    hidden: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    options: dict[str, Any] = {}

    @property
    def decides(self) -> bool:
        """Whether it says anything that is settled when a session begins."""
        return bool(self.output is not None or self.seed or self.hidden or self.only is not None or self.options)


def read_asked(agent: str, args: Mapping[str, Any]) -> SubagentRequest:
    """The arguments of a start. InvalidProcess says what to mend."""
    try:
        return checked(agent, convert(dict(args), SubagentRequest))
    except msgspec.ValidationError as error:
        known = ", ".join(SubagentRequest.__struct_fields__)
        raise InvalidProcess(f"agent {agent!r} cannot be started like this: {error} (it takes: {known})") from None


def checked(agent: str, asked: SubagentRequest) -> SubagentRequest:
    """What a subagent is asked, when it makes sense. InvalidProcess says what to mend."""
    if asked.session_id is not None and asked.decides:
        raise InvalidProcess(
            "output, seed, hidden, only and options are settled when a session begins: leave them out to go on with one"
        )
    try:
        clean_message(asked.input)
        sound_child(creating(asked, agent, asked.session_id, ""))
        if asked.output is not None:
            schema_codec(asked.output)
    except InvalidInput as error:
        raise InvalidProcess(f"agent {agent!r} cannot be started like this: {error}") from None
    return asked


def creating(asked: SubagentRequest, agent: str, child: str | None, label: str) -> CreateSession:
    """The request for the session of a subagent."""
    return CreateSession(
        agent,
        child,
        options=asked.options,
        hidden=asked.hidden,
        label=label,
        only=asked.only,
        prelude=asked.seed,
        output=asked.output,
    )


def child_session(process_id: str, agent: str) -> str:
    """The session of a process: its id says whose it is, and is the same for every caller."""
    name = f"{process_id}~{agent}".strip()
    if len(name) <= MAX_SESSION_ID:
        return name
    return f"~{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


class Attention:
    """What a process of this kind hears while it runs here. All of it is set on the event loop."""

    def __init__(self) -> None:
        self.request: CancelRequest | None = None
        self.leaving = False
        self.messages: deque[tuple[int, str]] = deque()
        self.changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cancel(self, request: CancelRequest) -> None:
        if self.request is None:
            self.request = request
            self._notify()

    def leave(self) -> None:
        self.leaving = True
        self._notify()

    def on_event(self, sequence: int, kind: str, payload: Any) -> None:
        if kind == MESSAGE:
            self.messages.append((sequence, payload))
            self._notify()

    def process_ended(self, process_id: str) -> None:
        """Nothing to do: it waits for a turn."""

    def awaited_signals(self) -> tuple[str, ...] | None:
        return None

    def _notify(self) -> None:
        if not self.changed.done():
            self.changed.set_result(None)

    def reset(self) -> None:
        """From here on, what comes is news again."""
        if self.changed.done():
            self.changed = asyncio.get_running_loop().create_future()


class Child(Struct):
    """The session of a process that runs here. `turns` are what was said to it; the last one's end is the process's."""

    process_id: str
    agent: str
    session_id: str
    turns: list[int] = []
    ended: int = 0
    stopped: bool = False


class TurnEngine:
    """Runs agents as processes."""

    kind = KIND
    uses_deps = False

    def __init__(self, parts: SessionParts, work: ProcessWorker) -> None:
        self._parts, self._work, self._store, self._clock = parts, work, parts.store, parts.clock

    def knows(self, registration: Registration) -> bool:
        return registration.name in self._parts.definitions

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        """How an agent is registered that is to be started: the agent itself, or its name."""
        name = self._name(what)
        if name is None:
            return None
        read_asked(name, args)
        return Registration("", KIND, "rerunnable", name, name, dict(args), name, events=EVENTS)

    def draft_for_others(self, name: str, args: Mapping[str, Any], offered: Offers) -> Registration | None:
        """How an agent is registered that only others have, by its name."""
        if name not in offered.agents:
            return None
        read_asked(name, args)
        return Registration("", KIND, "rerunnable", name, name, dict(args), name, events=EVENTS)

    def _name(self, what: Any) -> str | None:
        spec = getattr(what, "spec", None)
        if not isinstance(spec, AgentSpec):
            return what if isinstance(what, str) and what in self._parts.definitions else None
        if spec.name not in self._parts.definitions and not self._work.passive:
            raise InvalidProcess(f"agent {spec.name!r} is not part of this Runtime: pass it in `agents=[…]`")
        return spec.name

    # ------------------------------------------------------------------ filters of what a host says

    async def filter_start(self, registration: Registration) -> Registration:
        """The registration as it may be stored: with what filters of its agent leave of what a host starts it with.

        Asked for again under the same id, it is compared by what was given, not by what was left of that.
        """
        filters, agent = self._parts.inbox.filters, registration.name
        if agent in filters.unfiltered:
            return registration
        asked = msgspec.convert(registration.input, SubagentRequest)
        session_id = asked.session_id or child_session(registration.id, agent)

        async def passed(said: str | Message) -> Message | None:
            return await filters.passed(session_id, agent, said, "queue", registration.metadata, unsaved=False)

        message = await passed(asked.input)
        if message is None:
            return registration
        seed = [await passed(each) if each.role == "user" else each for each in asked.seed]
        left = replace(asked, input=message, seed=tuple([each for each in seed if each is not None]))
        digest = await filters.digest(registration.input)
        return replace(registration, input=msgspec.to_builtins(left), asked=digest.hex())

    async def filter_message(self, row: ProcessRow, text: Any) -> Any:
        """The text of a signal as it may be stored."""
        filters, asked = self._parts.inbox.filters, row.registration
        if asked.name in filters.unfiltered:
            return text
        session_id = asked.input.get("session_id") or child_session(asked.id, asked.name)
        message = await filters.passed(session_id, asked.name, text, "steer", asked.metadata, unsaved=False)
        return text if message is None else message.text

    # ------------------------------------------------------------------ one process

    async def run(self, run: EngineRun) -> ProcessOutcome:
        asked, attention = msgspec.convert(run.registration.input, SubagentRequest), Attention()
        agent = run.registration.name
        child = Child(run.row.id, agent, asked.session_id or child_session(run.row.id, agent))
        await run.listen(attention, after=0)  # a message that was passed on before is known by its key
        if attention.request is not None and not await self._is_begun(run, child):
            return Cancelled(attention.request.by, attention.request.reason)
        if not run.resumed:
            await run.set_external_ref({"session_id": child.session_id})
        await run.begin()
        run.rest()
        try:
            await self._begin(run, asked, child)
            await self._show_life(run, child)
            result = await self._end_of(run, attention, child)
        except REFUSALS as error:
            return Failure(error.code, error_text(error), {"session_id": child.session_id})
        typed = asked.output is not None or self._parts.definitions[agent].output_schema is not None
        return _ending(result, attention.request, typed)

    async def _is_begun(self, run: EngineRun, child: Child) -> bool:
        """Whether something may have been said to the child before a cancel request came."""
        row = await self._store.session(child.session_id) if run.resumed else None
        return row is not None and row.next > 1

    async def _begin(self, run: EngineRun, asked: SubagentRequest, child: Child) -> None:
        """Make the session, and say to it what it was started for: both once, however often this is done."""
        if asked.session_id is None:
            await self._create(run.registration, asked, child)
        key = f"process {child.process_id}"
        accepted = await self._parts.inbox.accept(child.session_id, child.agent, asked.input, "queue", key)
        child.turns.append(accepted.turn)

    async def _create(self, registration: Registration, asked: SubagentRequest, child: Child) -> None:
        request = creating(asked, child.agent, child.session_id, registration.label)
        parent = registration.origin.session_id if isinstance(registration.origin, SessionOrigin) else None
        if parent is not None:
            await self._create_under(parent, registration, request)
        elif asked.decides and await self._store.session(child.session_id) is None:
            sound = sound_child(request)
            settings = Settings(
                options=sound.options, hidden=sound.hidden, label=sound.label, only=sound.only, prelude=sound.prelude,
                output=sound.output, metadata=dict(registration.metadata),
            )  # fmt: skip
            write = Configure(child.session_id, child.agent, dump_settings(settings), self._clock.now(), b"")
            await self._store.write(write)

    async def _create_under(self, parent: str, registration: Registration, request: CreateSession) -> None:
        """A child of the session that asked: under its authority, and in its books."""
        row, wake = await self._store.session(parent), registration.wake
        agent = row.agent if row is not None else wake.agent if wake is not None and wake.session_id == parent else ""
        if not agent:
            raise UnknownSession(parent)
        await SessionHost(self._parts, parent, agent).create_session(request)

    async def _show_life(self, run: EngineRun, child: Child) -> None:
        """After workers died on it: it has come as far as it can. If something kills them it is in the turn, which
        counts its dead by itself; a long one that goes on must not be given up here."""
        if run.row.takeovers:
            await run.journal.load()
            run.journal.record(Begun(str(run.row.generation), "result", child.session_id, at=self._clock.now()))
            await run.journal.flush()

    # ------------------------------------------------------------------ waiting

    async def _end_of(self, run: EngineRun, attention: Attention, child: Child) -> TurnResult[Any]:
        """How the last of its turns ended, once it has."""
        while True:
            attention.reset()
            if attention.leaving:
                raise Leaving
            await self._pass_on(attention, child)
            if attention.request is not None and not child.stopped:
                await self._stop(attention.request, child)
            result = await self._wait(attention, child)
            if result is None:
                continue
            if isinstance(result.outcome, Waiting):
                if not attention.changed.done():
                    # The child waits for an answer: so does the process, on disk.
                    await run.park(WaitOn("turn", "turn", result.turn_id), WaitOn("message", "signal", "message"))
                continue
            child.ended += 1
            if child.ended < len(child.turns):
                continue
            await run.catch_up()  # another Runtime may have accepted an input for it
            if attention.messages:
                continue
            if attention.request is not None:
                await self._stop_others(child)
            return result

    async def _wait(self, attention: Attention, child: Child) -> TurnResult[Any] | None:
        """How the turn that is due ended or parked; None when something else came first."""
        waiters, turn = self._parts.outcomes.waiters, child.turns[child.ended]
        future = waiters.expect(child.session_id, turn)  # before the read: it may end meanwhile, and is announced once
        try:
            result = await self._parts.outcomes.on_disk(child.session_id, turn)
            if result is None:
                self._parts.activity.changed.set()
                with self._parts.deadlocks.waiting((child.session_id, turn)):
                    await asyncio.wait((future, attention.changed), return_when=asyncio.FIRST_COMPLETED)
                result = _result_of(future, turn_id(child.session_id, turn)) if future.done() else None
        finally:
            waiters.withdraw(child.session_id, turn, future)
        return result

    async def _pass_on(self, attention: Attention, child: Child) -> None:
        """Say to the child what came for it by signal."""
        while attention.messages:
            sequence, text = attention.messages[0]
            key = f"process {child.process_id} event {sequence}"
            accepted = await self._parts.inbox.accept(child.session_id, child.agent, text, "steer", key)
            attention.messages.popleft()
            child.turns.append(accepted.turn)

    # ------------------------------------------------------------------ stopping

    async def _stop(self, request: CancelRequest, child: Child) -> None:
        """Ask every turn to stop that has not ended yet."""
        child.stopped = True
        asked = CancelRequest(request.by or f"process {child.process_id}", request.reason)
        for turn in child.turns[child.ended :]:
            await self._parts.requests.cancel(child.session_id, child.agent, asked, turn)

    async def _stop_others(self, child: Child) -> None:
        """Cancelling a subagent cancels all that it has started, in the background too."""
        request = CancelRequest(f"process {child.process_id}", "what started it was cancelled")
        before: int | None = None
        while page := await self._store.processes(ProcessFilter(origin=child.session_id, live=True, before=before)):
            for row in page:
                await self._work.cancel(row.id, request)
            before = page[-1].pid


def _result_of(future: asyncio.Future[TurnResult[Any] | None], turn: str) -> TurnResult[Any] | None:
    error = future.exception()
    if error is None or isinstance(error, SessionDeleted | StoreError | RuntimeClosed):
        return future.result()
    raise TurnFailed(turn, "stuck", {"reason": error_text(error)}) from error


def _ending(result: TurnResult[Any], request: CancelRequest | None, typed: bool) -> ProcessOutcome:
    """How a process ends whose turn ended like this."""
    outcome = result.outcome
    if isinstance(outcome, Finished):
        return Success(outcome.value if typed or outcome.value is not None else outcome.text)
    if isinstance(outcome, TurnCancelled):
        by, reason = (outcome.by, outcome.reason) if request is None else (request.by, request.reason)
        return Cancelled(by, reason)
    data = {"session_id": result.session_id, "turn_id": result.turn_id, "outcome": msgspec.to_builtins(outcome)}
    return Failure(kind_of(outcome), _words_of(outcome), data)


def _words_of(outcome: Outcome) -> str:
    """What went wrong with a turn, in a sentence."""
    match outcome:
        case BudgetSpent(which=which, limit=limit):
            return f"its budget of {limit:g} {which} is spent"
        case LimitReached(limit=limit, kind=kind, per=per):
            return f"the limit of {limit:g} {kind} per {per} is spent"
        case Incomplete(reason=reason):
            return f"it stopped before it was done: {reason}"
        case _:
            parts = [getattr(outcome, name, "") for name in ("plugin", "code", "message")]
            return ": ".join([part for part in parts if part])


class AgentTool(Tool[..., Any]):
    """An agent as something that another agent may call."""

    agent: Defined
    in_background: bool


def agent_tool(
    agent: Defined, returns: Any, name: str | None = None, description: str | None = None, background: bool = False
) -> AgentTool:
    """The tool that gives a task to an agent. `returns` is the type of its answers."""

    async def ask(task: str, ctx: ToolContext[Any]) -> Any:
        """
        Args:
            task: What to do. The agent knows nothing of this conversation: say all that it needs.
        """
        return await delegate(ctx, agent.name, SubagentRequest(task), background=background)

    ask.__annotations__["return"] = dict[str, str] if background else returns
    told = f"Give a task to the agent {agent.name}, who works on it alone and answers."
    if background:
        told = f"Give a task to the agent {agent.name}, who works on it in the background. Returns a handle at once."
    options = ToolOptions(
        name=_tool_name(agent.name) if name is None else name,
        description=told if description is None else description,
        recovery="rerun",  # made again it finds the agent at work: its process has the id of the call
    )
    made = AgentTool(ask, options)
    made.agent, made.in_background = agent, background
    return made


def _tool_name(name: str) -> str:
    """An agent's name as far as a tool may carry it."""
    return re.sub(r"[^a-zA-Z0-9_-]+", "_", name)[:64]


async def delegate(
    ctx: ToolContext[Any], agent: str, asked: SubagentRequest, *, label: str = "", background: bool = False
) -> Any:
    """Run an agent as a subagent of the calling session: its answer, or with `background` its handle at once.

    A background one outlives the turn, and the session is woken when it ends.
    """
    try:
        handle = await _start(ctx, agent, checked(agent, asked), label or agent, background)
        return handle.to_json() if background else await answer(handle)
    except StoreError:
        raise  # the store is in trouble, not the call
    except PerdureError as error:
        raise ToolError(model_text(error), code=error.code) from error


async def follow_up(ctx: ToolContext[Any], handle: Any, text: str, *, background: bool = False) -> Any:
    """Say more to a subagent of this session: to its turn while it works or waits, else as its next turn.

    Which of both it was stays so when the call is made again: the process keeps the message under the call's id.
    """
    try:
        process_id, _ = parse_handle(handle)
        parts = _services(ctx).scope.parts
        row = await parts.store.process(process_id)
        if row is None or not await parts.store.is_granted(ctx.session_id, process_id):
            raise ProcessNotVisible(process_id, ctx.session_id)
        if row.registration.kind != KIND:
            raise ToolError(f"process {process_id!r} is no agent: nothing can be said to it", code="no_agent")
        found = parts.processes.handle(process_id)
        try:
            await found.signal("message", text, key=ctx.call_id)
        except ProcessEnded:
            session_id = row.registration.input.get("session_id") or child_session(process_id, row.registration.name)
            asked = SubagentRequest(text, session_id)
            return await delegate(
                ctx, row.registration.name, asked, label=row.registration.label, background=background
            )
        return found.to_json() if background else await answer(found)
    except StoreError:
        raise
    except PerdureError as error:
        raise ToolError(model_text(error), code=error.code) from error


async def answer(handle: ProcessHandle[Any]) -> Any:
    """The value of a subagent, once it has ended; ToolError tells the model why there is none."""
    try:
        outcome = await handle.outcome()
    except ProcessStuck as error:
        raise ToolError(model_text(error), code=error.code, data=handle.to_json()) from error
    match outcome:
        case Success(value=value):
            return value
        case Failure(code=code, message=message):
            why = f"it failed ({code}): {message}"
        case Cancelled(by=by, reason=reason):
            code, why = "cancelled", f"it was cancelled by {by or 'somebody'}: {reason or 'no reason was given'}"
        case Abandoned():
            code, why = "outcome_unknown", "it was given up, and nobody knows how far it came"
        case _:
            code, why = "no_longer_retained", "it ended long ago, and what it answered was not kept"
    raise ToolError(why, code=code, data={"handle": handle.to_json(), "outcome": msgspec.to_builtins(outcome)})


async def _start(
    ctx: ToolContext[Any], agent: str, asked: SubagentRequest, label: str, background: bool
) -> ProcessHandle[Any]:
    services = _services(ctx)
    at = services.scope
    if asked.session_id is None:
        child = child_session(ctx.call_id, agent)
        asked = SubagentRequest(asked.input, await services.create_session(creating(asked, agent, child, label)))
    if at.run is not None and not background:
        at.run.start_children()
    start = Start(
        id=ctx.call_id,
        label=label,
        origin=SessionOrigin(at.id),
        cause=Cause("tool_call", ctx.call_id),
        parent=ctx.turn_id,
        parent_end="abandon" if background else "cancel",
        wake=WakeTarget(at.id, at.agent, "turn" if background else "none"),
        grants=(at.id,),
    )
    return await at.parts.processes.start(agent, msgspec.to_builtins(asked), start)


def _services(ctx: ToolContext[Any]) -> SessionHost:
    host = ctx.host
    if not isinstance(host, SessionHost):
        raise ToolError("agents are started by a call of a session, and not from here", code="unavailable")
    return host
