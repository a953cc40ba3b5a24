"""The session handle that hosts hold: what may be said to a conversation, asked of it and decided for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Never,
    NoReturn,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    get_args,
    overload,
)

import msgspec
from msgspec.structs import replace

from perdure.engine.journal import load, load_turns
from perdure.engine.waiters import NEXT
from perdure.engine.waits import asked, ending, wait_id
from perdure.errors import (
    AlreadyAnswered,
    CannotRetry,
    InvalidCommand,
    InvalidInput,
    KeyConflict,
    NotFound,
    ProviderUnavailable,
    SessionDeleted,
    StaleSettings,
    TimedOut,
    UndoRefused,
    UnknownCall,
    UnknownNode,
    UnknownSession,
    UnknownTurn,
    quoted,
)
from perdure.graph.view import delivered_by, forkable
from perdure.lifecycle.process import session_parent
from perdure.model import ids, validate
from perdure.model.codec import clean, clean_text, copied, encode_checked
from perdure.model.command import CommandOptions, CommandResult
from perdure.model.edit import FileEdit, UndoneFile
from perdure.model.event import AnyEvent
from perdure.model.llm import ModelChoice, ModelSettings, Usage
from perdure.model.message import InputContent, Message, Scalar
from perdure.model.monitor import MonitorSnapshot, MonitorSpec, read_spec
from perdure.model.outcome import PendingCall
from perdure.model.plugin import PromptPart
from perdure.model.process import ProcessRow, WakePolicy
from perdure.model.record import Ended, InputKind, Said, SteerBoundary
from perdure.model.session import Answer, CancelRequest, QueuedInput, SessionRow, ToolState, load_settings
from perdure.model.tool import OutcomeUnknown
from perdure.model.transcript import calls_in
from perdure.model.write import Accepted, Branch, CancelStatus, Configure, Resolved
from perdure.plugins.operations import OperationOutcome
from perdure.ports.provider import Provider
from perdure.processes.command import in_foreground, owner_of, prepared
from perdure.processes.handle import ProcessCall, ProcessHandle, Startable
from perdure.processes.service import Start
from perdure.sessions.definition import SettingsEdit, edit_settings, with_choice, with_description, with_options
from perdure.sessions.edits import edits_of, newest_edits, plan_undo, undo
from perdure.sessions.input_filters import FilteredInput
from perdure.sessions.operations import RuntimeOperations
from perdure.sessions.outcomes import Listener, PartialOutputs
from perdure.sessions.parts import SessionParts
from perdure.sessions.processes import SessionProcesses
from perdure.sessions.result import Answering, T_co, TurnResult
from perdure.sessions.services.host import SessionHost
from perdure.sessions.setup import Overlay, shown
from perdure.sessions.usage import spent
from perdure.sessions.wakes.late_results import LateResults
from perdure.tools.call import RESERVED
from perdure.tools.catalog import Membership
from perdure.tools.waiting import checked_answer

R = TypeVar("R")

MAX_TITLE = 200


WAITS_FOR = {
    "approval": "an approval",
    "input": "an answer to what it asks",
    "recovery": "a settlement",
    "deferred": "its completion from outside",
    "sleep": "a time",
    "process": "the end of processes",
    "model": "the next attempt of a model call",
}
"""What a call waits for, for who gives it something else."""


class Receipt(Generic[T_co]):
    """Proof that an input is on disk.

    `turn_id` is the turn it opens. One that was steered opens none if it reaches the running turn: then `turn_id` names
    the input (events call it `input_id`), and the `turn_id` of its result is the turn it joined.
    """

    __slots__ = ("_session", "known", "turn_id")

    def __init__(self, session: Session[T_co], turn_id: str, known: bool) -> None:
        self._session, self.turn_id, self.known = session, turn_id, known

    async def result(self, timeout: float | None = None) -> TurnResult[T_co]:
        """Wait as `Session.run` does. Giving up the wait does not stop the turn."""
        validate.seconds(timeout)
        try:
            async with asyncio.timeout(timeout):
                return await self._session.result(self.turn_id)
        except TimeoutError:
            raise TimedOut(f"turn {self.turn_id} did not end", timeout) from None

    def __repr__(self) -> str:
        return f"Receipt({self.turn_id!r})"


QueueCancelStatus: TypeAlias = Literal["cancelled", "already_cancelled", "taken", "unknown"]
"""What became of a request to cancel an input that waited. "taken": a turn has begun with it, or has read it."""
QUEUE_STATUSES: dict[CancelStatus, QueueCancelStatus] = {
    "requested": "cancelled",
    "already_requested": "already_cancelled",
    "completion_won": "taken",
    "unknown": "unknown",
}


class InputQueue(Sequence[QueuedInput]):
    """What waited in a session when it was asked, oldest first (`session.queue()`)."""

    def __init__(self, parts: SessionParts, session_id: str, inputs: Sequence[QueuedInput]) -> None:
        self._parts, self._session_id, self._inputs = parts, session_id, tuple(inputs)

    @overload
    def __getitem__(self, index: int) -> QueuedInput: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[QueuedInput]: ...
    def __getitem__(self, index: int | slice) -> QueuedInput | Sequence[QueuedInput]:
        return self._inputs[index]

    def __len__(self) -> int:
        return len(self._inputs)

    async def cancel(
        self, *inputs: str | QueuedInput, reason: str = "", by: str = "host"
    ) -> dict[str, QueueCancelStatus]:
        """Cancel the named inputs, or all of this list, in one write: what became of each, by turn id.

        The turn of a cancelled input ends as `Cancelled` without beginning, when its turn comes. One that was "taken"
        meanwhile is not stopped: `session.cancel(turn_id=…)` does that. What was accepted after the list is not in it.
        """
        self._parts.mode.check()
        numbers: dict[str, int] = {}
        for each in inputs or self._inputs:
            name = each.turn_id if isinstance(each, QueuedInput) else validate.name(each, "turn_id")
            session_id, (numbers[name],) = ids.split(name, 1)
            if session_id != self._session_id:
                raise UnknownTurn(name)
        if not numbers:
            return {}
        request = CancelRequest(clean_text(by), clean_text(reason))
        statuses = await self._parts.requests.cancel_queued(self._session_id, tuple(numbers.values()), request)
        self._parts.relay.announce_write()
        return {name: QUEUE_STATUSES[status] for name, status in zip(numbers, statuses, strict=True)}

    def __repr__(self) -> str:
        return f"InputQueue({[each.turn_id for each in self._inputs]})"


class Session(Generic[T_co]):
    """A durable conversation. A handle costs nothing: make as many as you like, in as many processes.

    One that was opened with an Agent object (`answers`) gives results of that agent's output type.
    """

    __slots__ = ("_answers", "_metadata", "_options", "_parts", "agent", "id")

    def __init__(
        self,
        parts: SessionParts,
        session_id: str,
        agent: str,
        options: Mapping[str, Any] | None = None,
        answers: Answering[T_co] | None = None,
        metadata: dict[str, Scalar] | None = None,
    ) -> None:
        self._parts, self.id, self.agent, self._answers = parts, session_id, agent, answers
        self._metadata = metadata  # what the session has to be for, until the first write has compared it
        self._options = options  # written before the first thing that is said or asked of plugins

    if not TYPE_CHECKING:  # to a checker it has the attributes that it has

        def __getattr__(self, word: str) -> NoReturn:
            validate.unknown_attribute(self, word, validate.SESSION_ATTRIBUTES)

    def __repr__(self) -> str:
        return f"Session({self.id!r}, agent={self.agent!r})"

    # ------------------------------------------------------------------ saying

    async def run(
        self,
        said: InputContent,
        *,
        key: str | None = None,
        timeout: float | None = None,
        model: str | Provider | None = None,
        settings: ModelSettings | None = None,
        metadata: Mapping[str, Scalar] | None = None,
        **foreign: Never,
    ) -> TurnResult[T_co]:
        """Say something and wait until its turn ends, or waits for a person or an outside key.

        While it waits for time, its model, commands, subagents or processes only, this goes on waiting, for up to
        `Runtime(wait_for=60)` seconds in all; then the outcome is `Waiting`, and the turn goes on without this caller.

        `model` and `settings` are for this turn alone, and kept with the input. So is `metadata`, which its turn sees
        over that of the session.

        The turn goes on if the wait is cancelled; `timeout` and `cancel()` stop the turn itself. The same `key` with
        the same content is the same turn, however often it is said. Behind a parked turn, and where no living worker
        has the agent, the outcome is `Queued`: the input is on disk and runs when its turn comes.
        """
        if foreign:
            validate.unknown_keywords("run", foreign, validate.SESSION_KEYWORDS)
        self._parts.mode.check()
        if timeout is not None:
            validate.seconds(timeout)
        if key is None:  # refuse to wait in a turn for one behind it; one with a key may be over
            self._parts.deadlocks.check((self.id, NEXT))
        choice = None
        if model is not None or settings is not None:
            choice = self._parts.models.choice(model, settings)
        own, inbox = None if metadata is None else validate.metadata(metadata), self._parts.inbox
        content: InputContent | FilteredInput = said
        if self.agent not in inbox.filters.unfiltered:
            content = await inbox.filtered(self.id, self.agent, said, "queue", key, own, self._metadata)
        if self._options is not None:
            await self._keep_options()
        accepted = await inbox.accept(self.id, self.agent, content, "queue", key, choice, own, self._metadata)
        self._metadata = None
        if accepted.row.owner != self._parts.worker.id:
            self._parts.relay.announce_write()
        if timeout is None:
            return self.read(await self._parts.outcomes.wait(self.id, accepted.turn, accepted.known, "host"))
        try:
            async with asyncio.timeout(timeout):
                return self.read(await self._parts.outcomes.wait(self.id, accepted.turn, accepted.known, "host"))
        except TimeoutError:
            turn = ids.turn_id(self.id, accepted.turn)
            await self.cancel(f"it did not end within {timeout:g} s", by="timeout", turn_id=turn)
            return await self.result(turn)

    async def send(
        self,
        said: InputContent,
        *,
        key: str | None = None,
        model: str | Provider | None = None,
        settings: ModelSettings | None = None,
        metadata: Mapping[str, Scalar] | None = None,
        **foreign: Never,
    ) -> Receipt[T_co]:
        """Say something and return as soon as it is on disk. It runs after what was said before it."""
        if foreign:
            validate.unknown_keywords("send", foreign, validate.SESSION_KEYWORDS)
        self._parts.mode.check()
        choice = self._parts.models.choice(model, settings)
        return self._receipt(await self.accept(said, "queue", key, choice, metadata))

    async def steer(
        self,
        said: InputContent,
        *,
        key: str | None = None,
        metadata: Mapping[str, Scalar] | None = None,
        boundary: SteerBoundary = "after_work",
        **foreign: Never,
    ) -> Receipt[T_co]:
        """Say something to the running turn. With none running, it opens a turn.

        It arrives at the next boundary: after the calls that run now, or before the turn completes. With
        `boundary="before_completion"` it waits until the model has nothing left to do, and disturbs no work.
        """
        if foreign:
            validate.unknown_keywords("steer", foreign, validate.SESSION_KEYWORDS)
        self._parts.mode.check()
        if boundary not in get_args(SteerBoundary):
            known = " or ".join(map(repr, get_args(SteerBoundary)))
            raise InvalidInput(f"boundary={quoted(boundary):.80} is not usable: give {known}")
        return self._receipt(await self.accept(said, "steer", key, None, metadata, boundary))

    def stream(
        self,
        said: InputContent,
        *,
        key: str | None = None,
        model: str | Provider | None = None,
        settings: ModelSettings | None = None,
        metadata: Mapping[str, Scalar] | None = None,
        **foreign: Never,
    ) -> TurnStream[T_co]:
        """Say something and watch its turn: `async with session.stream(…) as turn: async for event in turn: …`."""
        if foreign:
            validate.unknown_keywords("stream", foreign, validate.SESSION_KEYWORDS)
        self._parts.mode.check()
        return TurnStream(self, said, key, self._parts.models.choice(model, settings), metadata)

    async def configure(
        self, *, model: str | Provider | None = None, settings: ModelSettings | None = None, reset: bool = False
    ) -> None:
        """Ask another model from the next input on, or ask it differently, in this session; `reset` first takes back
        what was said before. Durable: it holds in every process. What was accepted before asks as it was accepted."""
        self._parts.mode.check()
        validate.flag(reset, "reset")
        choice = self._parts.models.choice(model, settings)
        await self._begin()
        await self._edit(with_choice(choice, reset))

    async def update(self, *, metadata: Mapping[str, Scalar] | None = None, title: str | None = None) -> None:
        """Say anew whom the session is for, in place of all its metadata, or what it is called.

        On disk when this returns. Turns that are opened from now on see it; one that is open keeps what it was opened
        under.
        """
        self._parts.mode.check()
        wanted = None if metadata is None else validate.metadata(metadata)
        called = None if title is None else validate.name(title, "title")
        if called is not None and len(called) > MAX_TITLE:
            raise InvalidInput(f"a title of {len(called)} characters is too long: {MAX_TITLE} are the most")
        await self._begin()
        await self._edit(with_description(wanted, called))

    async def accept(
        self,
        said: InputContent,
        kind: InputKind,
        key: str | None,
        choice: ModelChoice | None = None,
        metadata: Mapping[str, Scalar] | None = None,
        boundary: SteerBoundary = "after_work",
    ) -> Accepted:
        """Make an input durable; before it, the options that the session was opened with."""
        own, inbox = None if metadata is None else validate.metadata(metadata), self._parts.inbox
        content: InputContent | FilteredInput = said
        if self.agent not in inbox.filters.unfiltered:
            content = await inbox.filtered(self.id, self.agent, said, kind, key, own, self._metadata)
        if self._options is not None:
            await self._keep_options()
        accepted = await inbox.accept(self.id, self.agent, content, kind, key, choice, own, self._metadata, boundary)
        self._metadata = None
        if accepted.row.owner != self._parts.worker.id:
            self._parts.relay.announce_write()
        return accepted

    async def output_schema(self) -> dict[str, Any]:
        """The schema of what its turns answer with. Raises InvalidInput where they answer with text."""
        definition, row = self._parts.definitions.get(self.agent), await self._row()
        schema = load_settings(row.settings).output
        if schema is None and definition is not None:
            schema = definition.output_schema
        if schema is None:
            raise InvalidInput(
                f"agent {self.agent!r} has no output type, and no partial output: iterate over the events instead"
            )
        return schema

    async def _keep_options(self) -> None:
        if self._options is not None:
            await self._edit(with_options(self._options, self._metadata))
            self._options = None

    async def _begin(self) -> None:
        """Before something else than an input creates the session: what it was opened with is there first."""
        if self._options is not None or self._metadata is not None:
            await self._edit(with_options(self._options or {}, self._metadata))
            self._options = self._metadata = None

    async def _exist(self) -> None:
        """Create the session if nothing was said to it yet: what ends with it can only end with one that is there."""
        store = self._parts.store
        if await store.session(self.id) is None:
            with contextlib.suppress(StaleSettings):  # it was created meanwhile
                await store.write(Configure(self.id, self.agent, b"", self._parts.clock.now(), b""))

    async def _edit(self, edit: SettingsEdit) -> None:
        await edit_settings(self._parts.store, self._parts.clock, self.id, self.agent, edit)

    def _receipt(self, accepted: Accepted) -> Receipt[T_co]:
        return Receipt(self, ids.turn_id(self.id, accepted.turn), accepted.known)

    # ------------------------------------------------------------------ asking

    async def result(self, turn_id: str) -> TurnResult[T_co]:
        """How a turn of this session ended, or what it waits for; waits as `run` does, but for a queued turn without
        end. Works in any process, at any later time."""
        return self.read(await self._parts.outcomes.wait(self.id, await self._turn(turn_id), True, "reader"))

    async def result_or_queued(self, turn_id: str) -> TurnResult[T_co]:
        """What `run` returns, for a turn that was accepted before."""
        return self.read(await self._parts.outcomes.wait(self.id, await self._turn(turn_id), True, "host"))

    def read(self, result: TurnResult[Any]) -> TurnResult[T_co]:
        """A result with the output type of the agent that the session was opened with."""
        return result if self._answers is None else result.read_by(self._answers)

    async def _turn(self, turn_id: str) -> int:
        self._parts.mode.check()
        session_id, (turn,) = ids.split(turn_id, 1)
        row = await self._row()
        if session_id != self.id or not 0 < turn < row.next:
            raise UnknownTurn(turn_id)
        return turn

    async def history(self) -> list[Message]:
        """All committed messages, oldest first."""
        await asyncio.sleep(0)  # reads of a file do not wait: a host that polls must not keep its Runtime from working
        self._parts.mode.check()
        row = await self._parts.store.session(self.id)
        if row is None:
            return []
        self._usable(row)
        messages = list((await self._parts.cache.view(row)).messages)
        self._parts.cache.rest(self.id)
        definition = self._parts.definitions.get(row.agent)
        if definition is None or not definition.plugins.has("project_prose"):
            return [copied(each) for each in messages]
        return shown(await LateResults(self._parts).setup(row), row.id, messages)

    async def pending(self) -> list[PendingCall]:
        """What waits for a person or an outside completion. Once a turn is asked to stop, nothing of it does."""
        await asyncio.sleep(0)  # reads of a file do not wait: a host that polls must not keep its Runtime from working
        self._parts.mode.check()
        row = await self._parts.store.session(self.id)
        if row is None or self._usable(row).cancel is not None:
            return []
        return list(await self._parts.archive.pending(row))

    async def queue(self) -> InputQueue:
        """The inputs that wait: for their turn, or for the next boundary of the running one. Not notes, which begin no
        turn, and not those that were cancelled.

            queue = await session.queue()
            await queue.cancel(queue[0].turn_id)       # or several, or none named: all of this list
        """
        await asyncio.sleep(0)  # reads of a file do not wait: a host that polls must not keep its Runtime from working
        self._parts.mode.check()
        row = await self._parts.store.session(self.id)
        found: list[QueuedInput] = []
        for waiting in [] if row is None else await self._parts.store.inbox(self._usable(row).sid):
            if waiting.kind == "note" or waiting.cancel is not None:
                continue
            records = await load(self._parts.store, waiting.sid, waiting.input, waiting.input)
            said = records[0][1] if records else None
            if isinstance(said, Said):
                name = ids.turn_id(self.id, waiting.input)
                message, metadata = copied(said.message), dict(said.metadata)
                found.append(QueuedInput(name, waiting.kind, message, said.at, said.key, metadata, said.boundary))
        return InputQueue(self._parts, self.id, found)

    async def edits(self, turn_id: str | None = None) -> list[FileEdit]:
        """The changes of files that calls of this session made with the tools of a workspace, or those of one turn, in
        the order in which they were begun. `session.undo()` takes them back."""
        await asyncio.sleep(0)  # reads of a file do not wait: a host that polls must not keep its Runtime from working
        self._parts.mode.check()
        if turn_id is not None:
            turn = await self._turn(turn_id)
            return await edits_of(self._parts.store, await self._row(), turn, turn)
        row = await self._parts.store.session(self.id)
        return [] if row is None else await edits_of(self._parts.store, self._usable(row), 1, row.next - 1)

    async def usage(self, by: Literal["label", "model"] = "label") -> dict[str, Usage]:
        """What this session has asked of models so far: under "turns" its turns, under its label every other question.

        A child session counts under its label, with all that it has led to. By model, "" is what no answer was seen
        of, or what came without a name. A fork begins with nothing.
        """
        self._parts.mode.check()
        if by not in ("label", "model"):
            raise InvalidInput(f"usage is told by 'label' or 'model', not {quoted(by):.80}")
        row = await self._parts.store.session(self.id)
        row = SessionRow(0, self.id, self.agent) if row is None else self._usable(row)
        return await spent(self._parts.store, row, by)

    async def count_tokens(self, said: InputContent | None = None) -> int:
        """How many tokens the next turn would begin with: instructions, tools, history and `said`, by the provider's
        own count, without what plugins add to a request. Nothing is said, and nothing is charged for.

        ProviderError with the code "no_token_count" where the API of the model has no count.
        """
        self._parts.mode.check()
        await self._keep_options()
        return await SessionHost(self._parts, self.id, self.agent, opened=self._metadata).count_next(said)

    @property
    def tools(self) -> SessionTools:
        """What this session is shown, and switching single tools on and off."""
        return SessionTools(self._parts, self.id, self.agent, self._metadata, self._keep_options, self._begin)

    async def call(self, operation: str, args: Mapping[str, Any] | None = None) -> OperationOutcome:
        """Call an operation of this session's plugins."""
        self._parts.mode.check()
        await self._keep_options()
        operations = RuntimeOperations(self._parts, self._metadata, self._begin)
        return await operations.call(operation, args, agent=self.agent, default=self.id)

    def observe(self, cursor: str | None = None) -> AsyncIterator[AnyEvent]:
        """Live events after `cursor`, or from now on, until the session is deleted. A gap is an event.

        They come from whatever worker on this machine runs the turn. Of a turn that runs where they cannot be read, its
        end is told, after a gap. A cursor is good in every Runtime of the store.
        """
        self._parts.mode.check()
        return self._parts.relay.observe(self.id, cursor)

    # ------------------------------------------------------------------ processes

    @overload
    async def start(
        self, what: ProcessCall[R], *, wake: WakePolicy = "turn", id: str | None = None, label: str = ""
    ) -> ProcessHandle[R]: ...
    @overload
    async def start(
        self,
        what: Startable[R],
        args: Mapping[str, Any] | None = None,
        *,
        wake: WakePolicy = "turn",
        id: str | None = None,
        label: str = "",
    ) -> ProcessHandle[R]: ...
    @overload
    async def start(
        self,
        what: Any,
        args: Mapping[str, Any] | None = None,
        *,
        wake: WakePolicy = "turn",
        id: str | None = None,
        label: str = "",
    ) -> ProcessHandle[Any]: ...
    async def start(
        self,
        what: Any,
        args: Mapping[str, Any] | None = None,
        *,
        wake: WakePolicy = "turn",
        id: str | None = None,
        label: str = "",
    ) -> ProcessHandle[Any]:
        """Begin a process for this session: a durable function, a tool or an agent. On disk when this returns.

        `wake` says how the session hears of its end: "turn" runs one when the session is idle, "notify" tells it with
        its next turn, "none" does not wake it. The same `id` with the same content is the same process, started once.
        """
        self._parts.mode.check()
        await self._begin()
        return await self._processes.start(what, args, wake, Start(id, label))

    @overload
    async def command(
        self, argv: Sequence[str], *, background_after: None = None, **options: Unpack[CommandOptions]
    ) -> ProcessHandle[CommandResult]: ...
    @overload
    async def command(
        self, argv: Sequence[str], *, background_after: float, **options: Unpack[CommandOptions]
    ) -> ProcessHandle[CommandResult] | CommandResult: ...
    async def command(
        self, argv: Sequence[str], *, background_after: float | None = None, **options: Unpack[CommandOptions]
    ) -> ProcessHandle[CommandResult] | CommandResult:
        """Run a program for this session; its handle, once it runs. `options` are those of `CommandOptions`.

        The command outlives the Runtime, also a crash of it. It ends with the session unless `owner` says "detached",
        or "turn" for the turn that runs here now. `wake` says how the session hears of its end, as for `start`. The
        same `key` is the same command. With `background_after`, the result if it comes within so many seconds.
        """
        self._parts.mode.check()
        what = prepared(argv, options)
        owner = owner_of(options, "session", ("turn", "session", "detached"))
        await self._begin()
        parent = None
        if owner == "session":
            await self._exist()
            parent = session_parent(self.id)
        if owner == "turn":
            run = self._parts.cache.run(self.id)
            if run is None:
                raise InvalidCommand(f"owner='turn': session {self.id!r} has no turn that runs here: say 'session'")
            run.start_children()
            parent = run.turn_id
        key = options.get("key")
        name = None if key is None else f"{self.id}.command.{validate.name(key, 'key', InvalidCommand)}"
        start = Start(name, options.get("label", ""), parent=parent, parent_end="cancel" if parent else "abandon")
        handle = await self._processes.start(what, None, options.get("wake", "turn"), start)
        return await in_foreground(handle, background_after)

    async def monitor(self, spec: MonitorSpec | str) -> ProcessHandle[Any]:
        """Start a command whose lines this session is told; its handle, which stops it with `cancel`.

        It outlives the Runtime, also a crash of it, and ends with the session. The same spec while it lives is the same
        monitor; another one under its id is a Conflict. One that a plugin offers is started by its id, `plugin:id`.
        """
        self._parts.mode.check()
        if not isinstance(spec, str):
            read_spec(spec)
        await self._begin()
        if isinstance(spec, str):
            host = SessionHost(self._parts, self.id, self.agent)
            spec = await host.monitor_spec(spec, await host.scope.row_or_new())
        await self._exist()
        return await self._processes.monitor(spec)

    async def monitors(self) -> MonitorSnapshot:
        """The monitors of this session as they are, also those that have ended: the last one under each id.

        Those that plugins offer and that were not started are idle.
        """
        self._parts.mode.check()
        with contextlib.suppress(UnknownSession):  # it is deleted: plugins offer it nothing any more
            return await SessionHost(self._parts, self.id, self.agent, opened=self._metadata).monitor_snapshot()
        return await self._processes.monitors()

    async def processes(self, status: str | Sequence[str] | None = None, **wanted: Any) -> Sequence[ProcessRow]:
        """The processes that this session may see, newest first; filters as for `runtime.processes.list`."""
        self._parts.mode.check()
        if "session_id" in wanted:
            raise InvalidInput("session.processes() lists what this session may see: ask runtime.processes.list()")
        return await self._parts.processes.list(status, session_id=self.id, **wanted)

    @property
    def _processes(self) -> SessionProcesses:
        return SessionProcesses(self._parts.processes, self._parts.store, self.id, self.agent)

    # ------------------------------------------------------------------ deciding

    async def cancel(self, reason: str = "", *, by: str = "host", turn_id: str | None = None) -> CancelStatus:
        """Ask the running turn, or the given one, to stop. It commits as cancelled unless its completion won.

        Returns once the request is on disk; `result()` tells how the turn ended.
        """
        self._parts.mode.check()
        turn = None
        if turn_id is not None:
            session_id, (turn,) = ids.split(turn_id, 1)
            if session_id != self.id:
                raise UnknownTurn(turn_id)
        request = CancelRequest(clean_text(by), clean_text(reason))
        status = await self._parts.requests.cancel(self.id, self.agent, request, turn)
        self._parts.relay.announce_write()
        return status

    async def resume(self) -> bool:
        """Work again on a turn that got stuck (`doctor` says why). True if one was. A turn that ended without an answer
        is continued by `retry()`."""
        self._parts.mode.check()
        return await self._parts.requests.resume(self.id, self.agent)

    async def retry(self, turn_id: str | None = None, *, by: str = "host") -> TurnResult[T_co]:
        """Continue the last turn, which ended without an answer, and wait as `run` does.

            result = await session.run("Book the trip.", key="trip-7")
            if result.failed:                                  # ProviderFailed, BudgetSpent, LimitReached, …
                result = await session.retry()

        The turn keeps its input, its id and all that is recorded: no recorded call and no hook of it runs again. The
        model is asked with that history, and the bounds of the agent count from zero. Its input's key answers with the
        new end. Two callers at once continue it once. Raises CannotRetry for a turn that has an answer, was cancelled,
        could not be asked (`InvalidInput`), or is not the last one any more.
        """
        return await (await self.reopen(turn_id, by=by)).result()

    async def reopen(self, turn_id: str | None = None, *, by: str = "host") -> Receipt[T_co]:
        """Do what `retry` does, and return as soon as it is on disk that the turn goes on."""
        self._parts.mode.check()
        row = await self._row()
        turn = row.turn or row.head
        if turn_id is not None:
            turn = await self._parts.archive.joined(row, await self._turn(turn_id))
        if not turn:
            raise CannotRetry(f"{self.id}.1", "nothing was ever said to this session")
        await self._parts.requests.reopen(row, turn, clean_text(by))
        self._parts.relay.announce_write()
        return Receipt(self, ids.turn_id(self.id, turn), True)

    async def retry_now(self, *, by: str = "host") -> bool:
        """Make the next attempt of a parked turn's model call at once. True if the turn waited for one."""
        self._parts.mode.check()
        done = await self._parts.requests.retry_now(await self._row(), clean_text(by))
        self._parts.relay.announce_write()
        return done

    async def approve(self, call_id: str, *, by: str = "host") -> None:
        """Let a call run that its tool declared with `approval="ask"`."""
        await self._answer(call_id, "approval", Answer("approved", by=clean_text(by)))

    async def reject(self, call_id: str, reason: str = "", *, by: str = "host") -> None:
        """Refuse such a call; the model is told the reason."""
        why = await self._parts.inbox.filters.text(self.id, self.agent, clean_text(reason))
        await self._answer(call_id, "approval", Answer("rejected", reason=why, by=clean_text(by)))

    async def answer(self, call_id: str, value: Mapping[str, Any] | None, *, by: str = "host") -> None:
        """Answer what a call asks for (`pending()` has its `asks`): the fields that its schema names, or None, which
        declines it. A call that asks several things is given an answer to each, by name.

        An answer that does not fit is refused, and the question stays open.
        """
        _split(call_id, 3, UnknownCall(call_id, "this is no call id"))
        asked = next((each for each in await self.pending() if each.call_id == call_id and each.kind == "input"), None)
        if asked is None:
            turn, key = self._place(call_id)
            name = await self._newest_wait(wait_id(ids.turn_id(self.id, turn), key, "input"))
            wait = await self._parts.requests.ended(name)
            if wait is not None:
                raise AlreadyAnswered(f"call {call_id}", ending(wait))
            raise await self._not_asked(call_id)
        answer = Answer("value", checked_answer(asked, value), by=clean_text(by))
        encode_checked(answer, "the answer")
        await self._answer(call_id, "input", answer)

    async def cancel_waits(self, reason: str = "", *, by: str = "host") -> list[str]:
        """Take back all questions that wait for a person or a completion from outside: the ids of their calls.

        The turn goes on, and its model is told. A call that waited for approval ends as cancelled and has not run; the
        outcome of one that had started stays unknown. An answer that came first stands. `cancel` ends the turn as well.
        """
        self._parts.mode.check()
        row = await self._parts.store.session(self.id)
        if row is None or self._usable(row).cancel is not None:
            return []
        why = await self._parts.inbox.filters.text(self.id, self.agent, clean_text(reason))
        answer = Answer("cancelled", None, why, clean_text(by))
        encode_checked(answer, "the reason")
        rows = await self._parts.store.waits(row.sid)
        waits = [wait for wait in rows if wait.state == "open" and wait.kind not in ("process", "model")]
        taken_back = []
        for wait in sorted(waits, key=lambda each: [int(number) for number in each.call.split(".")]):
            found = await asked(self._parts.store, [wait])
            if not found or (found[0].reason == RESERVED and row.state != "parked"):
                continue  # its body runs: nothing is asked yet
            if (await self._parts.requests.resolve(wait.id, answer)).status == "accepted":
                taken_back.append(found[0].call_id)
        self._parts.relay.announce_write()
        return taken_back

    async def settle(
        self,
        call_id: str,
        verdict: Literal["rerun", "done", "failed"],
        *,
        value: Any = None,
        reason: str = "",
        by: str = "host",
    ) -> None:
        """Say what became of a call that a crash left unknown.

        A call that waits (`recovery="ask"`, or a deferred one whose key was lost) goes on accordingly; of one that
        ended as unknown, the model is told with the next turn.
        """
        if verdict not in ("rerun", "done", "failed"):
            raise InvalidInput(f"settle a call as 'rerun', 'done' or 'failed', not {quoted(verdict):.80}")
        self._place(call_id)
        why = await self._parts.inbox.filters.text(self.id, self.agent, clean_text(reason))
        answer = Answer(verdict, clean(value), why, clean_text(by))
        encode_checked(answer, "the settlement")
        for kind in ("recovery", "deferred"):
            try:
                return await self._answer(call_id, kind, answer)
            except UnknownCall:
                continue
        return await self._annotate(call_id, answer)

    async def undo(self, turn_id: str | None = None, *, paths: Sequence[str] | None = None) -> list[UndoneFile]:
        """Bring back the files that a turn changed with the tools of a workspace; of the newest turn with edits, unless
        one is named, and all of its files, unless `paths` (as `session.edits()` tells them) names some.

        All of them or none: UndoRefused where a file is no longer what the edit left, or what it was is not kept.
        Nothing is recorded, since the files say whether it was done: made again after a crash, it does what is left.
        The model is not told.
        """
        self._parts.mode.check()
        row = await self._row()
        if turn_id is None:
            found = await newest_edits(self._parts.store, row)
        else:
            turn = await self._turn(turn_id)
            found = await edits_of(self._parts.store, row, turn, turn)
        if paths is not None:
            wanted = set(paths)
            unknown = sorted(wanted - {name for each in found for name in (each.path, each.location)})
            if unknown:
                raise InvalidInput(f"the turn has not changed {quoted(unknown[0])}: `session.edits()` has the paths")
            found = [each for each in found if wanted & {each.path, each.location}]
        definition = self._parts.definitions.get(row.agent)
        if definition is None:
            raise ProviderUnavailable(row.agent, self.id)
        shown = {each.location: each.path for each in found}
        try:
            done = await undo(self._parts.store, definition.catalog.providers, plan_undo(found))
        except UndoRefused as refused:
            files = {shown.get(path, path): why for path, why in refused.files.items()}
            raise UndoRefused(files, [shown.get(path, path) for path in refused.undone]) from None
        return [replace(each, path=shown.get(each.path, each.path)) for each in done]

    async def fork(
        self,
        at: str | None = None,
        *,
        session_id: str | None = None,
        grants: Literal["none", "all"] | Sequence[Any] = "none",
    ) -> Session[T_co]:
        """A new session that shares this one's history up to node `at` (its id, or a turn's), or to the end.

        It begins with the same options, tools and overlay, and with the state that plugins had there; at the end, with
        what commands have changed of it since. Of the processes that this one may see it sees those that
        `grants` names: "none", "all", or a list of handles.
        """
        self._parts.mode.check()
        row = await self._row()
        turn, ordinal, whole = await self._fork_point(row, None if at is None else validate.name(at, "at"))
        name = ids.check_session_id(session_id) if session_id is not None else self._parts.mint("s")
        shared, now = await self._processes.chosen(grants), self._parts.clock.now()
        branch = await self._parts.store.write(Branch(name, self.agent, self.id, turn, ordinal, now, shared, whole))
        overlay = self._parts.cache.of(self.id).overlay
        if overlay is not None and self._parts.cache.of(branch.id).overlay is None:
            self._parts.cache.lay_over(branch.id, overlay)
        return Session(self._parts, branch.id, branch.agent, answers=self._answers)

    # ------------------------------------------------------------------ parts

    async def _row(self) -> SessionRow:
        row = await self._parts.store.session(self.id)
        if row is None:
            raise UnknownSession(self.id)
        return self._usable(row)

    @staticmethod
    def _usable(row: SessionRow) -> SessionRow:
        if row.deleted:
            raise SessionDeleted(row.id)
        return row

    async def _answer(self, call_id: str, kind: str, answer: Answer) -> None:
        self._parts.mode.check()
        turn, key = self._place(call_id)
        name = wait_id(ids.turn_id(self.id, turn), key, kind)
        if kind != "approval":  # there may be several: one for each attempt that a person was asked about
            name = await self._newest_wait(name)
        resolved: Resolved = await self._parts.requests.resolve(name, answer)
        self._parts.relay.announce_write()
        if resolved.status == "unknown":
            raise await self._not_asked(call_id)
        if resolved.status == "already_resolved":
            assert resolved.wait is not None
            raise AlreadyAnswered(f"call {call_id}", ending(resolved.wait))

    async def _not_asked(self, call_id: str) -> UnknownCall:
        """The error of an answer that the call does not wait for; it says what the call waits for instead."""
        row = await self._parts.store.session(self.id)
        usable = row is not None and not row.deleted and row.cancel is None
        waits = await self._parts.archive.waits(row) if row is not None and usable else ()
        kind = next((each.kind for each in waits if each.call_id == call_id), None)
        return UnknownCall(call_id) if kind is None else UnknownCall(call_id, f"it waits for {WAITS_FOR[kind]}")

    def _place(self, call_id: str) -> tuple[int, str]:
        """The turn and the key of a call of this session."""
        try:
            return ids.call_in(self.id, call_id)
        except UnknownTurn:
            _split(call_id, 3, UnknownCall(call_id, "this is no call id"))
            raise UnknownCall(call_id, "it belongs to another session") from None

    async def _newest_wait(self, name: str) -> str:
        """The wait about the newest attempt of a call, if there were several."""
        row = await self._parts.store.session(self.id)
        waits = [] if row is None else [w.id for w in await self._parts.store.waits(row.sid)]
        return max([name, *[w for w in waits if w.startswith(f"{name}#")]], key=lambda w: (len(w), w))

    async def _annotate(self, call_id: str, answer: Answer) -> None:
        """Tell the session about a call that is over: a note that the next turn reads."""
        turn, key = self._place(call_id)
        row = await self._row()
        records = [r for _, r in await load(self._parts.store, row.sid, turn, turn)]
        ended = next((r for r in records if isinstance(r, Ended) and r.call == key), None)
        call = next((found for r in records if (found := calls_in(r).get(key)) is not None), None)
        if ended is None or call is None:
            raise await self._not_asked(call_id)
        if not isinstance(ended.outcome, OutcomeUnknown):
            raise AlreadyAnswered(f"call {call_id}", msgspec.to_builtins(ended.outcome))
        said = Message("user", await LateResults(self._parts).annotation(row, call_id, call, answer))
        try:
            await self._parts.inbox.accept(self.id, self.agent, said, "note", f"settle {call_id}")
        except KeyConflict:
            raise AlreadyAnswered(f"call {call_id}", "another settlement") from None

    async def _fork_point(self, row: SessionRow, at: str | None) -> tuple[int, int, bool]:
        """The turn and the record that a fork goes up to, and whether that is all of the turn."""
        if at is None:
            if row.head == 0:
                if row.fork is not None:
                    return 0, 0, True  # nothing of its own yet: all of its past, through it
                raise UnknownNode(f"{self.id}.0", "the session has no committed turn yet")
            turn, ordinal = row.head, None
        elif at.startswith(f"{self.id}.") and at.count(".") == self.id.count(".") + 1:
            turn, ordinal = ids.split(at, 1)[1][0], None
        else:
            malformed = UnknownNode(at, "this is no node id: use a turn's id, or <turn>.<ordinal>")
            session_id, (turn, ordinal) = _split(at, 2, malformed)
            if session_id != self.id:
                raise UnknownNode(at, f"it is not a node of session {self.id!r}")
        found = await load_turns(self._parts.store, row.sid, turn, turn) if 0 < turn < row.next else []
        if not found:
            raise UnknownNode(at or self.id, "there is no such node")
        if (into := found[0].joined) is not None and ordinal == 0:
            # Said into another turn: it is part of the history from the record on that delivers it.
            number, turn = turn, into
            found = await load_turns(self._parts.store, row.sid, turn, turn)
            ordinal = delivered_by(found[0], number) if found else None
        ordinal = len(found[0].records) - 1 if ordinal is None else ordinal
        why = forkable(found[0], ordinal)
        if why is not None:
            raise UnknownNode(at or self.id, why)
        return turn, ordinal, ordinal == len(found[0].records) - 1


def _split(text: str, parts: int, otherwise: NotFound) -> tuple[str, tuple[int, ...]]:
    try:
        return ids.split(text, parts)
    except UnknownTurn:
        raise otherwise from None


class TurnStream(Generic[T_co]):
    """A turn under watch. Iterating ends when the turn commits, parks or is queued behind a parked one; leaving early
    does not stop the turn."""

    def __init__(
        self,
        session: Session[T_co],
        said: InputContent,
        key: str | None,
        choice: ModelChoice | None,
        metadata: Mapping[str, Scalar] | None,
    ) -> None:
        self._session, self._said, self._key, self._choice, self._metadata = session, said, key, choice, metadata
        self._listener = Listener(session._parts.feed, session.id)
        self._done: asyncio.Task[TurnResult[Any]] | None = None
        self._left = self._follows = False
        self.turn_id = ""

    async def __aenter__(self) -> Self:
        parts, session = self._session._parts, self._session
        self._listener.skip()
        if self._key is None:  # as `Session.run`
            parts.deadlocks.check((session.id, NEXT))
        accepted = await session.accept(self._said, "queue", self._key, self._choice, self._metadata)
        self.turn_id = ids.turn_id(session.id, accepted.turn)
        if accepted.row.owner != parts.worker.id:
            await parts.relay.follow(session.id, accepted.row, since=accepted.turn)
            self._follows = True
            parts.relay.announce_write()
        self._done = asyncio.create_task(parts.outcomes.wait(session.id, accepted.turn, accepted.known, "host"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._follows:
            self._follows = False
            self._session._parts.relay.unfollow(self._session.id)
        if self._done is not None and not self._done.done():
            self._done.cancel()
            self._left = True

    async def result(self) -> TurnResult[T_co]:
        """How the turn ended or parked; also after leaving, which only stopped the watching."""
        if self._left:
            return await self._session.result(self.turn_id)
        if self._task().cancelled():  # it was left early, and the turn goes on
            return await self._session.result(self.turn_id)
        return self._session.read(await asyncio.shield(self._task()))

    def __aiter__(self) -> AsyncIterator[AnyEvent]:
        settle = self._settle if self._follows else None
        return self._listener.events(self.turn_id, self._task(), settle)

    async def _settle(self) -> None:
        await self._session._parts.relay.settle(self._session.id, ids.split(self.turn_id, 1)[1][0])

    async def partial_output(self) -> AsyncGenerator[Any, None]:
        """The typed answer as it grows, in place of the events: `async for value in turn.partial_output(): …`.

        A value is JSON, not the output type: parts may be missing, and texts may go on. None takes back what was shown
        before it, because the attempt failed or the answer did not fit; the answer itself is in `result()` alone.
        """
        values = PartialOutputs(await self._session.output_schema())
        async for event in self:
            for value in values.receive(event):
                yield value

    def _task(self) -> asyncio.Task[TurnResult[Any]]:
        if self._done is None:
            raise InvalidInput("watch a turn inside `async with session.stream(…) as turn`")
        return self._done


class SessionTools:
    """`session.tools`: membership is availability, so a tool that is switched off cannot be called, only seen here."""

    __slots__ = ("_agent", "_begin", "_parts", "_ready", "_services", "_session_id")

    def __init__(
        self,
        parts: SessionParts,
        session_id: str,
        agent: str,
        opened: dict[str, Scalar] | None,
        ready: Callable[[], Awaitable[None]],
        begin: Callable[[], Awaitable[None]],
    ) -> None:
        parts.mode.check()
        self._parts, self._session_id, self._agent = parts, session_id, agent
        self._services = SessionHost(parts, session_id, agent, opened=opened)
        self._ready = ready  # options that the session was opened with decide what plugins hide
        self._begin = begin  # what is switched may be the first thing that is kept of the session

    async def list(self) -> Sequence[Mapping[str, Any]]:
        """The tools that a model is shown in this session, as JSON."""
        await self._ready()
        return await self._services.tool_catalog()

    async def state(self) -> ToolState:
        """What was decided for single tools. Change it and give it to `apply`, or use the verbs below."""
        return await self._services.tool_state()

    async def orphans(self) -> Sequence[str]:
        """Tools that something was decided for and that are not offered now; the decision waits for them."""
        await self._ready()
        catalog = await self._services.catalog()
        return catalog.orphans() if isinstance(catalog, Membership) else []

    async def apply(self, state: ToolState) -> int:
        """Replace the state, if it was not edited since `state` was read; returns the new generation."""
        await self._begin()
        return await self._services.apply_tool_state(state)

    async def enable(self, *names: str) -> int:
        """Show these tools again. What a plugin or a parent session hides stays hidden."""
        return await self._set(names, True)

    async def disable(self, *names: str) -> int:
        """Take these tools away, until they are enabled or cleared."""
        return await self._set(names, False)

    async def clear(self, *names: str) -> int:
        """Forget what was decided for these tools."""
        return await self._set(names, None)

    async def _set(self, names: Sequence[str], member: bool | None) -> int:
        await self._begin()
        return await self._services.set_tools(names, member)

    def overlay(
        self, tools: Iterable[Any] = (), *, prompts: Iterable[PromptPart | str] = (), include_base: bool = True
    ) -> bool:
        """Lay tools and prompts over the session, from its next turn on, for as long as this Runtime lives.

        A tool of the overlay replaces one of the same name; with `include_base=False` the agent's own are left out.
        Nothing is stored: give it again after a restart. False: it is what was there already.
        """
        return self._parts.cache.lay_over(self._session_id, Overlay(tools, prompts, include_base))

    def refresh(self) -> None:
        """Ask the providers of tools, and the plugins that hide some, again: from the next turn on."""
        definition, cached = self._parts.definitions.get(self._agent), self._parts.cache.of(self._session_id)
        if self._parts.cache.run(self._session_id) is not None or definition is None:
            return  # every turn asks the providers when it begins
        catalogs = [definition.catalog, *([] if cached.setup is None else [cached.setup.definition.catalog])]
        for catalog in catalogs:
            catalog.refresh()
            if isinstance(catalog, Membership):
                catalog.invalidate()
