"""The tools of a session as its host sees them: what is there, what is switched off, what is laid over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from mainstay.model.plugin import PromptPart
from mainstay.model.session import ToolState
from mainstay.sessions.desk import Desk
from mainstay.sessions.services import Services
from mainstay.sessions.setup import Overlay
from mainstay.tools.membership import Membership


class SessionTools:
    """`session.tools`: membership is availability, so a tool that is switched off cannot be called, only seen here."""

    __slots__ = ("_agent", "_desk", "_ready", "_services", "_session_id")

    def __init__(self, desk: Desk, session_id: str, agent: str, ready: Callable[[], Awaitable[None]]) -> None:
        desk.check()
        self._desk, self._session_id, self._agent = desk, session_id, agent
        self._services = Services(desk, session_id, agent)
        self._ready = ready  # options that the session was opened with decide what plugins hide

    async def list(self) -> Sequence[Mapping[str, Any]]:
        """The tools that a model is shown in this session, as JSON."""
        await self._ready()
        return await self._services.tool_catalog()

    async def state(self) -> ToolState:
        """What was decided for single tools. Change it and give it to `apply`, or use the verbs below."""
        return await self._services.tool_state()

    async def orphans(self) -> Sequence[str]:
        """Tools that something was decided for and that nobody offers now; the decision waits for them."""
        await self._ready()
        catalog = await self._services.catalog()
        return catalog.orphans() if isinstance(catalog, Membership) else []

    async def apply(self, state: ToolState) -> int:
        """Replace the state, if nobody edited it since `state` was read; returns the new generation."""
        await self._ready()
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
        await self._ready()
        return await self._services.set_tools(names, member)

    def overlay(
        self, tools: Iterable[Any] = (), *, prompts: Iterable[PromptPart | str] = (), include_base: bool = True
    ) -> bool:
        """Lay tools and prompts over the session, from its next turn on, for as long as this Runtime lives.

        A tool of the overlay replaces one of the same name; with `include_base=False` the agent's own are left out.
        Nothing is stored: give it again after a restart. False: it is what was there already.
        """
        return self._desk.turns.residents.lay_over(self._session_id, Overlay(tools, prompts, include_base))

    def refresh(self) -> None:
        """Ask the providers of tools, and the plugins that hide some, again: from the next turn on."""
        definition, resident = self._desk.definition(self._agent), self._desk.turns.residents.of(self._session_id)
        if resident.run is not None or definition is None:
            return  # every turn asks the providers when it begins
        catalogs = [definition.catalog, *([] if resident.setup is None else [resident.setup.definition.catalog])]
        for catalog in catalogs:
            catalog.refresh()
            if isinstance(catalog, Membership):
                catalog.invalidate()
