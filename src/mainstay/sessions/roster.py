"""The sessions of a store: listing and deleting them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from mainstay.errors import InvalidInput, quoted
from mainstay.model import given
from mainstay.model.ids import check_session_id
from mainstay.model.session import SessionRow, SessionState
from mainstay.model.write import Delete, SessionFilter
from mainstay.sessions.desk import Desk


class Sessions:
    """The sessions of a store."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def list(
        self, *, agent: str | None = None, state: str | None = None, prefix: str = "", limit: int = 100
    ) -> Sequence[SessionRow]:
        """Sessions, the most recently changed first."""
        self._desk.check()
        if state is not None and state not in get_args(SessionState):
            known = ", ".join(get_args(SessionState))
            raise InvalidInput(f"there is no state {quoted(state)} of a session: use {known}")
        wanted = SessionFilter(agent, state, prefix, given.count(limit, "limit"))
        return await self._desk.store.sessions(given.readable(wanted, "the filter"))

    async def delete(self, session_id: str) -> bool:
        """Delete a session for good; its id is never used again. False when there was none."""
        self._desk.check()
        session_id = check_session_id(session_id)
        deleted = await self._desk.store.write(Delete(session_id, self._desk.clock.now()))
        self._desk.turns.residents.deleted(session_id)
        self._desk.feed.end(session_id)
        return deleted
