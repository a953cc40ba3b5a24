"""Child sessions: begun under the authority of the session at hand, once, however often they are asked for.

    noted in the parent ── created with its settings ── (a fork: its own write, before) ── its first input accepted

Whoever asks again after a crash in between goes on where it was left.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from mainstay.engine.driver import Run
from mainstay.engine.journal import load as load_records
from mainstay.errors import Conflict, StaleSettings, TooDeep
from mainstay.model import ids
from mainstay.model.codec import encode, encode_checked
from mainstay.model.plugin import CreateSession
from mainstay.model.record import Noted, Slot, slots
from mainstay.model.session import SessionRow, Settings, ToolState, dump_settings, load_settings
from mainstay.model.write import Branch
from mainstay.plugins.decisions import sound_child
from mainstay.sessions.inbox import pick_agent
from mainstay.sessions.parts import ServiceScope
from mainstay.sessions.setup import checked_options
from mainstay.tools.answer import schema_codec

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
                continue  # somebody else was faster: there is a child now, or something else that is in the way
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
                continue  # somebody else changed something: on top of that
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
