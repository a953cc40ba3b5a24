"""The services that plugins, tools and operations are given: narrow views on one session and its Runtime."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from mainstay.engine.driver import Run
from mainstay.engine.gate import TurnAborted
from mainstay.engine.retry import MODEL_RETRIES
from mainstay.errors import (
    Conflict,
    InvalidInput,
    PluginError,
    ProviderError,
    ProviderUnavailable,
    StaleSettings,
    Unavailable,
    UnknownSession,
    UnknownTurn,
)
from mainstay.model import ids
from mainstay.model.codec import clean, clean_text, encode, error_text
from mainstay.model.llm import Completion, ModelRequest, ModelResponse, Usage
from mainstay.model.message import Message, Text
from mainstay.model.plugin import CreateSession
from mainstay.model.record import Completed, Framed
from mainstay.model.session import Appending, CancelRequest, SessionRow, SessionSnapshot, StaleBranch, ToolState
from mainstay.model.settings import Settings, dump, edited, load
from mainstay.model.write import Configure
from mainstay.plugins.turn import plugins_of
from mainstay.ports.services import TraceSink
from mainstay.sessions.definition import Definition
from mainstay.sessions.desk import Desk
from mainstay.sessions.inbox import pick_agent
from mainstay.sessions.setup import Setup, checked_options
from mainstay.tools.answer import output_codec
from mainstay.tools.catalog import Catalog
from mainstay.tools.membership import Membership

log = logging.getLogger("mainstay.sessions")


class Services:
    """Everything a plugin may ask of the session `session_id`; in a turn (`run`) what it does is part of that turn."""

    def __init__(
        self, desk: Desk, session_id: str, agent: str, run: Run | None = None, call: str | None = None
    ) -> None:
        self._desk, self._id, self._agent, self._run, self._call = desk, session_id, agent, run, call
        self._asked: dict[str, int] = {}
        self._turn = None if run is None else run.turn_id

    def for_call(self, call_id: str) -> Services:
        return Services(self._desk, self._id, self._agent, self._run, call_id)

    def outside(self) -> Services:
        made = Services(self._desk, self._id, self._agent)
        made._turn = self._turn
        return made

    @property
    def deps(self) -> Any:
        return self._desk.turns.deps

    @property
    def _traces(self) -> TraceSink | None:
        return self._desk.turns.traces

    @property
    def probe(self) -> Callable[[str, str], None] | None:
        return None if self._traces is None else lambda phase, edge: self.trace(phase, edge)

    async def _row(self, session_id: str | None) -> SessionRow:
        self._needs_session(session_id)
        row = await self._desk.store.session(session_id or self._id)
        if row is None or row.deleted:
            raise UnknownSession(session_id or self._id)
        return row

    def _needs_session(self, session_id: str | None) -> None:
        if not session_id and not self._id:
            raise Unavailable("this operation is about no session: name the session to work on")

    def _definition(self, agent: str) -> Definition:
        found = self._desk.definition(agent)
        if found is None:
            raise ProviderUnavailable(agent, self._id)
        return found

    # ------------------------------------------------------------------ reading

    async def snapshot(self, session_id: str | None = None) -> SessionSnapshot:
        row = await self._row(session_id)
        view, settings = await self._desk.turns.view(row), load(row.settings)
        return SessionSnapshot(
            row.id, row.agent, row.head, tuple(view.messages), row.turn, settings.parent, settings.tools, settings.label
        )

    async def tool_catalog(self, session_id: str | None = None) -> Sequence[Mapping[str, Any]]:
        catalog = await self.catalog(session_id)
        try:
            return (catalog.current() if isinstance(catalog, Membership) else catalog).as_json()
        except TurnAborted as refused:  # who hides tools could not say which
            raise PluginError(refused.plugin, refused.message) from None

    async def catalog(self, session_id: str | None = None) -> Catalog | Membership:
        """The tools of a session, in this process."""
        if self._run is not None and session_id in (None, self._id):
            found: Catalog | Membership = self._run.agent.catalog
            return found
        return (await self.setup(await self._row_or_new(session_id))).definition.catalog

    async def _row_or_new(self, session_id: str | None) -> SessionRow:
        """The session's row; a blank one when nothing was said in it yet."""
        self._needs_session(session_id)
        row = await self._desk.store.session(session_id or self._id)
        if row is None and session_id in (None, self._id):
            return SessionRow(0, self._id, self._agent)
        if row is None or row.deleted:
            raise UnknownSession(session_id or self._id)
        return row

    async def setup(self, row: SessionRow) -> Setup:
        """What a session runs with; PluginError where a plugin refuses it."""
        self._definition(row.agent)
        try:
            return await self._desk.turns.setup(row)
        except TurnAborted as refused:
            raise PluginError(refused.plugin, refused.message) from None

    # ------------------------------------------------------------------ tool state

    async def tool_state(self, session_id: str | None = None) -> ToolState:
        catalog = self._run.agent.catalog if self._run is not None and session_id in (None, self._id) else None
        if isinstance(catalog, Membership):
            return catalog.state
        return load((await self._row_or_new(session_id)).settings).tools

    async def apply_tool_state(self, state: ToolState, session_id: str | None = None) -> int:
        current = await self.tool_state(session_id)
        if current.generation != state.generation:
            raise StaleSettings(session_id or self._id)
        edits: dict[str, bool | None] = dict.fromkeys(current.members.keys() - state.members.keys())
        edits.update(state.members)
        return await self._edit(edits, session_id, state.generation)

    async def set_tools(self, names: Sequence[str], member: bool | None, session_id: str | None = None) -> int:
        return await self._edit(dict.fromkeys(names, member), session_id, None)

    async def _edit(self, edits: dict[str, bool | None], session_id: str | None, generation: int | None) -> int:
        if self._run is not None and session_id in (None, self._id):
            return self._edit_running(self._run, edits)
        row = await self._row_or_new(session_id)
        probe = await self._membership(row)
        while True:  # an edit that is refused means that somebody else's went through
            settings = load(row.settings)
            if generation is not None and settings.tools.generation != generation:
                raise StaleSettings(row.id)
            probe.state = settings.tools
            probe.edit(edits)  # refuses names that nobody knows
            wanted = dump(replace(settings, tools=edited(settings.tools, edits)))
            try:
                row = await self._configure(row.id, row.agent, wanted, row.settings)
            except StaleSettings:
                row = await self._row_or_new(row.id)
                continue
            return load(row.settings).tools.generation

    def _edit_running(self, run: Run, edits: dict[str, bool | None]) -> int:
        """In a turn: at once for its next model call, on disk with its next record, for others with its commit."""
        plugins = plugins_of(run)
        if plugins is None:
            raise Unavailable("tool state mutation is unavailable in this session")
        catalog = run.agent.catalog
        if not isinstance(catalog, Membership):
            catalog = Membership(catalog)
            run.agent = dataclasses.replace(run.agent, catalog=catalog)
        state = catalog.edit(edits)
        plugins.switch(edits)
        return state.generation

    async def _membership(self, row: SessionRow) -> Membership:
        catalog = (await self.setup(row)).definition.catalog
        return catalog.copy() if isinstance(catalog, Membership) else Membership(catalog)

    async def _configure(self, session_id: str, agent: str, settings: bytes, expected: bytes | None) -> SessionRow:
        return await self._desk.store.write(Configure(session_id, agent, settings, self._desk.clock.now(), expected))

    # ------------------------------------------------------------------ other sessions

    async def create_session(self, request: CreateSession) -> str:
        return await self._create(request, request.session_id or self._desk.mint("s"))

    async def create_child(self, request: CreateSession, place: str) -> str:
        name = hashlib.blake2b(place.encode(), digest_size=6).hexdigest()
        assert self._run is not None
        child = request.session_id or f"{self._run.turn_id}~{name}"
        return await self._run.journal.patiently(functools.partial(self._create, request), child)

    async def _create(self, request: CreateSession, child: str) -> str:
        agent = pick_agent(self._desk.definitions, request.agent or self._agent)
        parent = load((await self._row_or_new(None)).settings)
        settings = Settings(
            options=clean(request.options),
            tools=await self.tool_state(),  # what is switched off here is not to be had through a child
            parent=self._id,
            hidden=tuple(sorted({*parent.hidden, *request.hidden})),
            label=clean_text(request.label),
            only=_narrowed(parent.only, request.only),
        )
        existing = await self._desk.store.session(ids.check_session_id(child))
        if existing is None:
            if settings.options:
                bare = replace(settings, options={})
                checked_options(self._desk.definition(agent), child, settings.options, bare)
            await self._configure(child, agent, dump(settings), b"")
        elif load(existing.settings).parent != self._id:
            raise Conflict(f"session {child!r} exists and is no child of {self._id!r}: choose another id")
        if request.said is not None:
            await self._desk.inbox.accept(child, agent, request.said, "queue", "first")
        return child

    async def close_session(self, session_id: str) -> None:
        if session_id == self._id:
            raise Conflict("a session cannot close itself")
        await self._row(session_id)
        if not self._desk.turns.residents.forget(session_id):
            raise Conflict(f"session {session_id!r} has a running turn: cancel it, or wait for it")

    async def start_turn(self, session_id: str, said: str | Message, *, key: str) -> Any:
        if session_id == self._id:
            raise Conflict("a turn cannot wait for another turn of its own session: append a message instead")
        row = await self._row(session_id)
        accepted = await self._desk.inbox.accept(row.id, row.agent, said, "queue", key)
        return await self._desk.outcome(row.id, accepted.turn, accepted.known)

    async def cancel_turn(self, session_id: str, reason: str = "") -> str:
        row = await self._row(session_id)
        request = CancelRequest(f"session {self._id}", clean_text(reason))
        return await self._desk.cancel(row.id, row.agent, request, None)

    async def append(
        self, messages: Sequence[Message], *, after: str | None = None, session_id: str | None = None
    ) -> Appending | StaleBranch:
        if not messages:
            raise InvalidInput("append at least one message")
        row = await self._row(session_id)
        if after is not None and not await self._on_path(row, after):
            return StaleBranch(ids.turn_id(row.id, row.head) if row.head else None)
        nodes = []
        for message in messages:
            accepted = await self._desk.inbox.accept(row.id, row.agent, message, "note")
            nodes.append(ids.node_id(row.id, accepted.turn, 0))
        return Appending(tuple(nodes), nodes[-1])

    async def _on_path(self, row: SessionRow, node: str) -> bool:
        try:
            session_id, (turn, _) = ids.split(node, 2)
        except UnknownTurn:
            session_id, (turn,) = ids.split(node, 1)
        while session_id != row.id:
            if row.fork is None or (source := await self._desk.store.session_by_sid(row.fork.sid)) is None:
                return False
            if source.id == session_id:
                return 0 < turn <= row.fork.turn
            row = source
        return 0 < turn <= row.head

    # ------------------------------------------------------------------ models and traces

    async def complete(
        self, asked: str | Sequence[Message], *, label: str, output: Any = None, system: str = ""
    ) -> Completion:
        codec = None if output is None or output == "json" else output_codec(output)
        schema = {"type": "object"} if output == "json" else None if codec is None else codec.schema
        messages = [Message("user", asked)] if isinstance(asked, str) else list(asked)
        if system:
            messages.insert(0, Message("system", system))
        known = self._known(encode((messages, schema)))
        record = known if isinstance(known, Completed) else await self._ask(messages, schema, clean_text(label), known)
        value = None
        if output is not None:
            try:
                value = msgspec.json.decode(record.text) if codec is None else codec.validate(record.text)
            except ValueError as error:
                raise ProviderError(
                    f"the completion for {label!r} does not have the required form: {error}", code="invalid_output"
                ) from None
        return Completion(record.text, value, record.usage, record.model)

    def _known(self, question: bytes) -> Completed | str:
        """The recorded answer to this question at this place of the turn, or the key to record it under."""
        digest = hashlib.blake2b(question, digest_size=12).hexdigest()
        if self._run is None:
            return digest
        state = self._run.machine.state
        place = f"{self._call or f'{state.phase.value}.{state.step}'}:{digest}"
        self._asked[place] = count = self._asked.get(place, -1) + 1
        key = f"{place}:{count}"
        if self._call is not None:
            return key  # what happens inside an attempt is part of it: the record of the call speaks for it
        return next((r for r in self._run.records if type(r) is Completed and r.key == key), None) or key

    async def _ask(self, messages: list[Message], schema: dict[str, Any] | None, label: str, key: str) -> Completed:
        if self._run is None:
            await self._row_or_new(None)  # nobody is asked whose cost could not be counted
        response = await self._answer(ModelRequest(messages, (), schema, f"{self._id}:{key}", 1, self._id))
        text = clean_text("".join([p.text for p in response.all_parts() if isinstance(p, Text)]))
        now = self._desk.clock.now()
        record = Completed(key, key.split(":")[-2] if ":" in key else key, label, text, response.usage,
                           clean_text(response.model), now)  # fmt: skip
        if self._run is not None and self._call is not None:
            self._run.note(replace(record, text=""))  # only what it cost, with whatever is written next
        elif self._run is not None:
            self._run.note(record)
            await self._run.journal.flush()
        else:
            await self._count(label, response.usage)
        return record

    async def _answer(self, request: ModelRequest) -> ModelResponse:
        """Ask until there is an answer, as often as a turn would."""
        definition = self._definition(self._agent)
        while True:
            try:
                return await _whole(definition, request)
            except ProviderError as error:
                if not error.retryable or request.attempt >= MODEL_RETRIES.attempts:
                    raise
                pause = MODEL_RETRIES.delay(request.attempt, error.after, self._desk.turns.random)
            await self._desk.clock.sleep(pause)
            request = replace(request, attempt=request.attempt + 1)

    async def _count(self, label: str, usage: Usage | None) -> None:
        """Outside of turns the ledger of the session itself takes the cost."""
        while True:  # somebody else's edit is all that can be in the way, and no cost may be lost
            row = await self._row_or_new(None)
            settings = load(row.settings)
            spent = settings.ledger.get(label, Usage()) + replace(usage or Usage(unknown=1), calls=1)
            # A name of its own: whoever counts the same at the same time must not take our count for its.
            wanted = dump(replace(settings, ledger=settings.ledger | {label: spent}, saved=self._desk.mint("o")))
            try:
                await self._configure(row.id, row.agent, wanted, row.settings)
            except StaleSettings:
                continue
            return

    def trace(self, name: str, payload: Any = None, context: Mapping[str, Any] | None = None) -> None:
        if self._traces is None:
            return
        told = {"session_id": self._id, "turn_id": self._turn, "payload": payload, "context": context or {}}
        try:
            self._traces.write(name, told)
        except Exception as error:  # a sink of the host may raise anything: no turn and no plugin is to blame for it
            log.warning("the trace did not take %s: %s: %s", name, type(error).__name__, error_text(error))

    async def frame(self, reason: str, summary: tuple[Message, ...]) -> None:
        assert self._run is not None
        self._run.note(Framed(reason, summary, self._desk.clock.now()))
        self._run.history = list(summary)


def _narrowed(parent: Sequence[str] | None, child: Sequence[str] | None) -> tuple[str, ...] | None:
    """All that a child may see: nothing that its parent may not."""
    if parent is None or child is None:
        given = parent if child is None else child
        return None if given is None else tuple(sorted(set(given)))
    return tuple(sorted({*parent} & {*child}))


async def _whole(definition: Definition, request: ModelRequest) -> ModelResponse:
    response: ModelResponse | None = None
    async for delta in definition.provider.stream(request):
        if isinstance(delta, ModelResponse):
            response = delta
    if response is None:
        raise ProviderError("the stream broke off before the answer was complete", retryable=True, code="broken_stream")
    return response


def services_of(desk: Desk, run: Run) -> Services:
    """The services of a running turn."""
    return Services(desk, run.scope.session_id, run.agent.name, run)
