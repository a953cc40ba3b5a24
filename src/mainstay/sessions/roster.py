"""The sessions of a store: listing and deleting them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import get_args

from mainstay.errors import InvalidInput, quoted
from mainstay.model import given
from mainstay.model.ids import check_session_id
from mainstay.model.session import SessionRow, SessionState
from mainstay.model.write import Delete, SessionFilter
from mainstay.processes.service import FOR_EVER
from mainstay.sessions.desk import Desk
from mainstay.sessions.retention import forget_sessions


class Sessions:
    """The sessions of a store."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def list(
        self, *, agent: str | None = None, state: str | None = None, prefix: str = "", limit: int = 100
    ) -> Sequence[SessionRow]:
        """Sessions, the most recently changed first."""
        await asyncio.sleep(0)  # reads of a file do not wait: a host that polls must not keep its Runtime from working
        self._desk.check()
        if state is not None and state not in get_args(SessionState):
            known = ", ".join(get_args(SessionState))
            raise InvalidInput(f"there is no state {quoted(state)} of a session: use {known}")
        wanted = SessionFilter(agent, state, prefix, given.count(limit, "limit"))
        return await self._desk.store.sessions(given.readable(wanted, "the filter"))

    async def prune(self, older_than: float) -> int:
        """Delete the sessions that nothing has happened to for `older_than` seconds, and that nothing can come of.

        Left alone is what has an open turn, an input that waits, a fork, news that it has not heard, or a live process
        of its own. Returns how many went; their ids stay spent.
        """
        self._desk.check()
        if type(older_than) not in (int, float) or not 0 <= older_than <= FOR_EVER:
            raise InvalidInput(f"prune what was not used for 0 or more seconds, not {quoted(older_than)}")
        return await forget_sessions(self._desk, self._desk.clock.now() - round(older_than * 1000) + 1)

    async def delete(self, session_id: str) -> bool:
        """Delete a session for good; its id is never used again. False when there was none."""
        self._desk.check()
        session_id = check_session_id(session_id)
        deleted = await self._desk.store.write(Delete(session_id, self._desk.clock.now()))
        self._desk.deleted(session_id)
        return deleted
