"""The sessions of a store: listing and deleting them."""

from __future__ import annotations

from collections.abc import Sequence

from mainstay.model.ids import check_session_id
from mainstay.model.session import SessionRow
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
        return await self._desk.store.sessions(SessionFilter(agent, state, prefix, limit))

    async def delete(self, session_id: str) -> bool:
        """Delete a session for good; its id is never used again. False when there was none."""
        deleted = await self._desk.store.write(Delete(check_session_id(session_id), self._desk.clock.now()))
        self._desk.turns.residents.deleted(session_id)
        return deleted
