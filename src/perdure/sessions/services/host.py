"""The services that plugins, tools and operations are given: narrow views on one session and its Runtime.

A child session is begun under the authority of the session at hand, once, however often it is asked for:

    noted in the parent ── created with its settings ── (a fork: its own write, before) ── its first input accepted

A caller that asks again after a crash in between goes on where it was left.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from perdure.engine.control import Control, TurnAborted
from perdure.engine.deps import deps_for, instructions_of
from perdure.engine.driver import Run
from perdure.engine.journal import load as load_records
from perdure.engine.journal import load_turns
from perdure.engine.waiters import current_metadata, in_hand
from perdure.errors import Conflict, InvalidInput, PluginError, StaleSettings, TooDeep, Unavailable, UnknownTurn
from perdure.model import ids, validate
from perdure.model.agent import Caller
from perdure.model.codec import CopiedOnRead, clean_message, clean_text, copied, encode, encode_checked
from perdure.model.llm import Completion, ModelRequest, ModelSettings
from perdure.model.message import InputContent, Message, Metadata, Scalar
from perdure.model.plugin import CreateSession
from perdure.model.protocol import Prompt
from perdure.model.record import Framed, Noted, Slot, slots
from perdure.model.session import (
    Appending,
    CancelRequest,
    Fork,
    SessionRow,
    SessionSnapshot,
    Settings,
    StaleBranch,
    ToolState,
    dump_settings,
    edited_tools,
    load_settings,
)
from perdure.model.write import Branch
from perdure.plugins.decisions import sound_child
from perdure.plugins.turn import plugins_of
from perdure.ports.provider import Provider
from perdure.sessions.inbox import pick_agent, save_files
from perdure.sessions.outcomes import BegunTurn, Listener
from perdure.sessions.parts import ServiceScope, SessionParts
from perdure.sessions.services.completions import DirectCompletions, tokens_of
from perdure.sessions.services.tasks import MonitorServices
from perdure.sessions.setup import Setup, Tracer, checked_options, probe_of
from perdure.tools.answer import schema_codec
from perdure.tools.catalog import Catalog, Membership
from perdure.turn.prompt import request_messages, variables

MAX_DEPTH = 5
"""How many parents a session may have above it: agents that begin agents must come to an end."""


class Children:
    """Begins child sessions. `tools` tells what is switched on and off in the parent now."""

    __slots__ = ("_at", "_tools")

    def __init__(self, at: ServiceScope, tools: Callable[[], Awaitable[ToolState]]) -> None:
        self._at, self._tools = at, tools

    async def create(self, request: CreateSession, place: str | None = None) -> str:
        """Begin a child; its id. In a turn the same request from the same place is the same child."""
        asked, run = sound_child(request), self._at.run
        if run is None:
            return await self._create(asked, asked.session_id or self._at.parts.mint("s"))
        if place is None:
            place = self._at.key(hashlib.blake2b(encode(asked), digest_size=12).hexdigest())
        name = hashlib.blake2b(place.encode(), digest_size=6).hexdigest()
        child = asked.session_id or f"{run.turn_id}~{name}"
        return await run.journal.patiently(functools.partial(self._create, asked), child)

    async def _create(self, request: CreateSession, child: str) -> str:
        agent = pick_agent(self._at.parts.definitions, request.agent or self._at.agent)
        while True:
            try:
                await self._make(request, ids.check_session_id(child), agent)
                break
            except StaleSettings:
                continue  # another task was faster: there is a child now, or something else that is in the way
        if request.said is not None:
            await self._at.parts.inbox.accept(child, agent, request.said, "queue", "first")
        return child

    async def _make(self, request: CreateSession, child: str, agent: str) -> None:
        parent, existing = await self._at.row_or_new(), await self._at.parts.store.session(child)
        if existing is not None and load_settings(existing.settings).parent == self._at.id:
            return
        if existing is not None and not self._is_bare_fork(existing, parent):
            raise Conflict(f"session {child!r} exists and is no child of {self._at.id!r}: choose another id")
        wanted = await self._settings(request, parent)
        if wanted.options:
            checked_options(self._at.parts.definitions.get(agent), child, wanted.options, replace(wanted, options={}))
        await self._note(child)
        if existing is None and request.start == "fork":
            existing = await self._fork(parent, child, agent)
        if existing is not None:  # what its plugins have of its parent's
            wanted = replace(wanted, snapshots=load_settings(existing.settings).snapshots)
        await self._at.configure(child, agent, dump_settings(wanted), b"" if existing is None else existing.settings)

    async def _settings(self, request: CreateSession, row: SessionRow) -> Settings:
        parent = load_settings(row.settings)
        prelude = request.prelude
        if parent.depth >= MAX_DEPTH:
            raise TooDeep(self._at.id, MAX_DEPTH)
        if request.output is not None:
            schema_codec(request.output)  # refused here, before there is a child
        if request.start == "fork" and row.head == 0:
            prelude = (*parent.prelude, *prelude)  # no turn of its parent has recorded it yet
        settings = Settings(
            options=request.options,
            tools=await self._tools(),  # what is switched off here is not to be had through a child
            parent=self._at.id,
            hidden=tuple(sorted({*parent.hidden, *request.hidden})),
            label=request.label,
            only=_narrowed(parent.only, request.only),
            prelude=prelude,
            output=request.output,
            depth=parent.depth + 1,
            metadata=dict(current_metadata()) if in_hand() else parent.metadata,
        )
        encode_checked(settings, "what the child begins with")
        return settings

    # ------------------------------------------------------------------ a fork

    async def _fork(self, parent: SessionRow, child: str, agent: str) -> SessionRow | None:
        """Give the child its parent's history up to the last committed turn; None when there is none."""
        if parent.head == 0 and parent.fork is None:
            return None
        ordinal = 0
        if parent.head:
            ordinal = len(await load_records(self._at.parts.store, parent.sid, parent.head, parent.head)) - 1
        branch = Branch(child, agent, parent.id, parent.head, ordinal, self._at.parts.clock.now(), whole=True)
        return await self._at.parts.store.write(branch)

    def _is_bare_fork(self, row: SessionRow, parent: SessionRow) -> bool:
        """Whether a crash left a child here that has its history and nothing else yet."""
        if row.deleted or row.next > 1 or row.fork is None or row.fork.sid != parent.sid:
            return False
        return row.id in (load_settings(parent.settings).children if self._at.run is None else _noted(self._at.run))

    # ------------------------------------------------------------------ in the parent's books

    async def _note(self, child: str) -> None:
        """Put down that there will be a child, before there is one: what it costs is part of its parent's usage."""
        if self._at.run is not None:
            await _note_in_turn(self._at.run, child)
            return
        while True:
            row = await self._at.row_or_new()
            settings = load_settings(row.settings)
            if child in settings.children:
                return
            wanted = dump_settings(replace(settings, children=(*settings.children, child)))
            try:
                await self._at.configure(row.id, row.agent, wanted, row.settings)
            except StaleSettings:
                continue  # another task changed something: on top of that
            return


async def _note_in_turn(run: Run, child: str) -> None:
    if child not in _noted(run):
        run.check_room()
        run.note(Noted(Slot(children=(child,)), run.clock.now()))
    await run.journal.flush()


def _noted(run: Run) -> set[str]:
    return {child for slot in slots(run.records) for child in slot.children}


def _narrowed(parent: Sequence[str] | None, child: Sequence[str] | None) -> tuple[str, ...] | None:
    """All that a child may see: nothing that its parent may not."""
    if parent is None or child is None:
        given = parent if child is None else child
        return None if given is None else tuple(sorted(set(given)))
    return tuple(sorted({*parent} & {*child}))


# ---------------------------------------------------------------------- the services of one session


class SessionHost(MonitorServices):
    """Everything a plugin may ask of the session `session_id`; in a turn (`run`) what it does is part of that turn."""

    def __init__(  # noqa: PLR0913  # who asks, each by its place
        self,
        parts: SessionParts,
        session_id: str,
        agent: str,
        run: Run | None = None,
        call: str = "",
        where: str = "",
        turn: str | None = None,
        opened: dict[str, Scalar] | None = None,
    ) -> None:
        self._parts, self._id, self._agent, self._run, self._opened = parts, session_id, agent, run, opened
        self._call, self._where, self._turn = call, where, turn if run is None else run.turn_id

    @property
    def deps(self) -> Any:
        return self._parts.deps if self._run is None else self._run.deps

    @functools.cached_property
    def scope(self) -> ServiceScope:
        """Who asks, and in which turn. Made when the first service is asked for: most hooks and calls ask for none."""
        return ServiceScope(
            self._parts, self._id, self._agent, self._run, self._call, self._where, self._turn, self._opened
        )

    def for_call(self, call_id: str) -> SessionHost:
        return SessionHost(self._parts, self._id, self._agent, self._run, call_id)

    def at(self, place: str) -> SessionHost:
        return SessionHost(self._parts, self._id, self._agent, self._run, where=place)

    def outside(self) -> SessionHost:
        return SessionHost(self._parts, self._id, self._agent, turn=self._turn)

    @property
    def probe(self) -> Callable[[str, str], None] | None:
        return probe_of(self._parts.traces, self._id, self._turn)

    # ------------------------------------------------------------------ reading

    async def snapshot(self, session_id: str | None = None) -> SessionSnapshot:
        row = await self.scope.row(session_id)
        view, settings = await self._parts.cache.view(row), load_settings(row.settings)
        tools = copied(settings.tools)  # what nothing was decided for has the state of all such sessions
        return SessionSnapshot(
            row.id, row.agent, row.head, CopiedOnRead(view.messages), row.turn, settings.parent, tools, settings.label
        )

    async def tool_catalog(self, session_id: str | None = None) -> Sequence[Mapping[str, Any]]:
        catalog = await self.catalog(session_id)
        try:
            return (catalog.current() if isinstance(catalog, Membership) else catalog).as_json()
        except TurnAborted as refused:  # who hides tools could not say which
            raise PluginError(refused.plugin, refused.message) from None

    async def catalog(self, session_id: str | None = None) -> Catalog | Membership:
        """The tools of a session, in this process."""
        if self._run is not None and self.scope.own(session_id):
            found: Catalog | Membership = self._run.agent.catalog
            return found
        return (await self.setup(await self.scope.row_or_new(session_id))).definition.catalog

    async def setup(self, row: SessionRow) -> Setup:
        """What a session runs with; PluginError where a plugin refuses it."""
        self.scope.definition(row.agent)
        try:
            return await self._parts.turns.setup(row)
        except TurnAborted as refused:
            raise PluginError(refused.plugin, refused.message) from None

    # ------------------------------------------------------------------ tool state

    async def tool_state(self, session_id: str | None = None) -> ToolState:
        catalog = self._run.agent.catalog if self._run is not None and self.scope.own(session_id) else None
        if isinstance(catalog, Membership):
            return copied(catalog.state)
        return copied(load_settings((await self.scope.row_or_new(session_id)).settings).tools)

    async def apply_tool_state(self, state: ToolState, session_id: str | None = None) -> int:
        if not isinstance(state, ToolState):
            raise InvalidInput(f"a {type(state).__name__} is no state of tools: change what `state()` gave")
        state, current = validate.readable(state, "the state of tools"), await self.tool_state(session_id)
        if current.generation != state.generation:
            raise StaleSettings(session_id or self._id)
        edits: dict[str, bool | None] = dict.fromkeys(current.members.keys() - state.members.keys())
        edits.update(state.members)
        return await self._edit(edits, session_id, state.generation)

    async def set_tools(self, names: Sequence[str], member: bool | None, session_id: str | None = None) -> int:
        known = [validate.name(each, "tool") for each in validate.several(names, "tools")]
        member = None if member is None else validate.flag(member, "member")
        return await self._edit(dict.fromkeys(known, member), session_id, None)

    async def _edit(self, edits: dict[str, bool | None], session_id: str | None, generation: int | None) -> int:
        if self._run is not None and self.scope.own(session_id):
            return self._edit_running(self._run, edits)
        row = await self.scope.row_or_new(session_id)
        probe = await self._membership(row)
        while True:  # an edit that is refused means that one of another task went through
            settings = load_settings(row.settings)
            if generation is not None and settings.tools.generation != generation:
                raise StaleSettings(row.id)
            probe.state = settings.tools
            probe.edit(edits)  # refuses names of no tool
            wanted = dump_settings(replace(settings, tools=edited_tools(settings.tools, edits)))
            try:
                row = await self.scope.configure(row.id, row.agent, wanted, row.settings)
            except StaleSettings:
                row = await self.scope.row_or_new(row.id)
                continue
            return load_settings(row.settings).tools.generation

    def _edit_running(self, run: Run, edits: dict[str, bool | None]) -> int:
        """In a turn: at once for its next model call, on disk with its next record, for others with its commit."""
        plugins = plugins_of(run)
        if plugins is None:
            raise Unavailable("tool state mutation is unavailable in this session")
        catalog = run.agent.catalog
        if not isinstance(catalog, Membership):
            catalog = Membership(catalog)
            run.use(replace(run.agent, catalog=catalog))
        state = catalog.edit(edits)
        plugins.switch(edits)
        return state.generation

    async def _membership(self, row: SessionRow) -> Membership:
        catalog = (await self.setup(row)).definition.catalog
        return catalog.copy() if isinstance(catalog, Membership) else Membership(catalog)

    # ------------------------------------------------------------------ other sessions

    async def create_session(self, request: CreateSession) -> str:
        return await Children(self.scope, self.tool_state).create(request)

    async def create_child(self, request: CreateSession, place: str) -> str:
        return await Children(self.scope, self.tool_state).create(request, place)

    async def close_session(self, session_id: str) -> None:
        if session_id == self._id:
            raise Conflict("a session cannot close itself")
        row = await self.scope.row(session_id)
        if not self._parts.cache.forget(session_id):
            raise Conflict(f"session {session_id!r} has a running turn: cancel it, or wait for it")
        await self.close_tasks(row)

    async def start_turn_stream(self, session_id: str, said: str | Message, *, key: str) -> BegunTurn:
        listener = Listener(self._parts.feed, (await self._other(session_id)).id)  # before its first event
        return BegunTurn(self._parts.outcomes, listener, await self._begin(session_id, said, key))

    async def _begin(self, session_id: str, said: str | Message, key: str) -> str:
        row = await self._other(session_id)
        accepted = await self._parts.inbox.accept(row.id, row.agent, said, "queue", key)
        return ids.turn_id(row.id, accepted.turn)

    async def _other(self, session_id: str) -> SessionRow:
        if session_id == self._id:
            raise Conflict("a turn cannot wait for another turn of its own session: append a message instead")
        return await self.scope.row(session_id)

    async def await_turn(self, turn_id: str) -> Any:
        session_id, (turn,) = ids.split(turn_id, 1)
        row = await self.scope.row(session_id)
        if not 0 < turn < row.next:
            raise UnknownTurn(turn_id)
        if row.id != self._id or self._turn is None:
            return await self._parts.outcomes.wait(row.id, turn, known=True)
        result = await self._parts.archive.result(row, turn)
        if result is None:
            raise Conflict(f"turn {turn_id} cannot end while another one of its session waits for it")
        return result

    async def start_turn(self, session_id: str, said: str | Message, *, key: str) -> Any:
        return await self.await_turn(await self._begin(session_id, said, key))

    async def cancel_turn(self, session_id: str, reason: str = "", *, turn_id: str | None = None) -> str:
        row, turn = await self.scope.row(session_id), None
        if turn_id is not None:
            owner, (turn,) = ids.split(turn_id, 1)
            if owner != row.id:
                raise UnknownTurn(turn_id)
        request = CancelRequest(f"session {self._id}", clean_text(reason))
        return await self._parts.requests.cancel(row.id, row.agent, request, turn)

    async def append(
        self, messages: Sequence[Message], *, after: str | None = None, session_id: str | None = None
    ) -> Appending | StaleBranch:
        # All are looked at before the first is written.
        said = [clean_message(each) for each in validate.several(messages, "messages")]
        if not said:
            raise InvalidInput("append at least one message")
        row = await self.scope.row(session_id)
        if after is not None and not await self._on_path(row, after):
            return StaleBranch(ids.turn_id(row.id, row.head) if row.head else None)
        nodes = []
        for message in said:
            key = None
            if self._run is not None:
                # Asked again after a crash, by the same hook or tool, it is the same message.
                digest = hashlib.blake2b(encode(message), digest_size=8).hexdigest()
                key = f"append {self._turn}:{self.scope.key(digest)}"
            accepted = await self._parts.inbox.accept(row.id, row.agent, message, "note", key)
            nodes.append(ids.node_id(row.id, accepted.turn, 0))
        return Appending(tuple(nodes), nodes[-1])

    async def _on_path(self, row: SessionRow, node: str) -> bool:
        """Whether a record is part of the history, or was accepted and will be with the next commit."""
        if node.startswith(f"{row.id}.") and node.count(".") == row.id.count(".") + 1:
            session_id, (turn, ordinal) = row.id, (*ids.split(node, 1)[1], 0)
        else:
            try:
                session_id, (turn, ordinal) = ids.split(node, 2)
            except UnknownTurn:
                session_id, (turn,) = ids.split(node, 1)
                ordinal = 0
        end: Fork | None = None
        while session_id != row.id:
            end = row.fork
            if end is None or (source := await self._parts.store.session_by_sid(end.sid)) is None:
                return False
            row = source
        if not 0 < turn < row.next or (end is not None and (turn, ordinal) > (end.turn, end.ordinal)):
            return False
        found = await load_turns(self._parts.store, row.sid, turn, turn)
        return bool(found) and ordinal < len(found[0].records)

    # ------------------------------------------------------------------ models and traces

    async def complete(  # noqa: PLR0913  # what a model may be asked with, each by name
        self,
        asked: str | Sequence[Message],
        *,
        label: str,
        output: Any = None,
        system: str = "",
        tools: Sequence[Any] = (),
        settings: ModelSettings | None = None,
        model: str | Provider | None = None,
    ) -> Completion:
        choice = self._parts.models.choice(model, settings)
        return await DirectCompletions(self.scope).complete(asked, label, output, system, tools, choice)

    async def count_tokens(
        self,
        asked: str | Sequence[Message],
        *,
        system: str = "",
        tools: Sequence[Any] = (),
        model: str | Provider | None = None,
    ) -> int:
        choice = self._parts.models.choice(model, None)
        return await DirectCompletions(self.scope).count_tokens(asked, system, tools, choice)

    async def count_next(self, said: InputContent | None) -> int:
        """How many tokens the first question of the next turn would have."""
        parts, row = self._parts, await self.scope.row_or_new()
        setup, choice = await self.setup(row), load_settings(row.settings).choice
        definition = setup.definition
        if setup.choice != choice:  # that of the running turn, which was accepted under another one
            definition = await parts.models.applied(definition, choice)
        if definition.instruct is not None:
            caller = Caller(self._id, definition.name, Metadata(load_settings(row.settings).metadata))
            async with contextlib.AsyncExitStack() as stack:
                deps = parts.deps
                if parts.make_deps is not None:
                    making = deps_for(parts.make_deps, caller, parts.random, parts.clock.sleep)
                    deps = await stack.enter_async_context(making)
                caller, guard = replace(caller, deps=deps), Control().guard
                made = await instructions_of(definition.instruct, caller, parts.random, guard, parts.clock.sleep)
            definition = definition.instructed(made)
        messages = [*(await parts.cache.view(row)).prompt()]
        if said is not None:
            message = await parts.inbox.filters.passed(self._id, row.agent, said, "queue", None, self._opened)
            message = clean_message(said, unsaved=True) if message is None else message
            messages.append((await save_files(parts.store.blobs, message))[0])
        asked = definition.protocol.ask(
            Prompt(definition.instructions, messages, definition.catalog.specs, definition.output_schema)
        )
        request = ModelRequest(
            request_messages(asked.instructions, asked.messages),
            asked.tools,
            asked.output,
            session_id=self._id,
            settings=definition.settings,
            label="count",
            open_file=lambda stored: parts.store.blobs.pieces(stored.digest),
            metadata=Metadata(row.metadata),
        )
        return await tokens_of(definition.provider, request)

    def trace(self, name: str, payload: Any = None, context: Mapping[str, Any] | None = None) -> None:
        if self._parts.traces is not None:
            Tracer(self._parts.traces, self._id, self._turn).write(name, payload, context)

    async def frame(self, reason: str, summary: tuple[Message, ...]) -> None:
        assert self._run is not None
        if listed := await self._parts.turns.cells.list_variables(self._run):
            summary = (*summary, variables(listed))
        self._run.note(Framed(reason, summary, self._parts.clock.now()))
        self._run.show(list(summary))
