"""Where a running turn keeps the artifacts of its calls, and finds those of the session's past."""

from __future__ import annotations

from collections.abc import Iterable

from mainstay.engine.driver import Run
from mainstay.engine.journal import load_turns
from mainstay.model.record import Ended, Record
from mainstay.model.session import SessionRow
from mainstay.model.tool import Artifact
from mainstay.plugins.turn import plugins_of
from mainstay.ports.store import Store

PIECE = 64
"""History is searched so many turns at a time, from the newest back."""


class SessionShelf:
    """The artifacts of a session, as a call of a running turn of it sees them."""

    def __init__(self, store: Store, run: Run, call_id: str, tool: str) -> None:
        self._store, self._run, self._call_id, self._tool = store, run, call_id, tool

    def passed(self, name: str, data: bytes, media_type: str) -> bytes:
        plugins = plugins_of(self._run)
        filters = None if plugins is None else plugins.filters
        if filters is None:
            return data
        return filters.content("artifact", self._call_id, self._tool, name, data, media_type)

    async def keep(self, data: bytes) -> str:
        return await self._run.journal.keep(data)

    async def kept(self, artifact: Artifact) -> None:
        """Nothing to do: the record of the call's outcome tells of it."""

    async def read(self, artifact: Artifact) -> bytes:
        return await self._store.blobs.get(artifact.digest)

    async def find(self, name: str) -> Artifact | None:
        """The newest of that name: in this turn, in those before it, then in what the session was forked from."""
        found = _newest(self._run.records, name)
        if found is None:
            row = await self._store.session_by_sid(self._run.scope.sid)
            found = await in_the_past(self._store, row, self._run.scope.turn - 1, name)
        return found


async def in_the_past(store: Store, row: SessionRow | None, last: int, name: str) -> Artifact | None:
    """The newest of that name in the turns of a session up to `last`, then in what it was forked from."""
    ordinal = None
    while row is not None:
        found = await _search(store, row.sid, last, ordinal, name)
        if found is not None or row.fork is None:
            return found
        last, ordinal = row.fork.turn, row.fork.ordinal
        row = await store.session_by_sid(row.fork.sid)
    return None


async def _search(store: Store, sid: int, last: int, ordinal: int | None, name: str) -> Artifact | None:
    """Turns 1 to `last`, of the last one only up to record `ordinal`, if given."""
    for end in range(last, 0, -PIECE):
        for turn in reversed(await load_turns(store, sid, max(end - PIECE + 1, 1), end)):
            whole = ordinal is None or turn.number != last
            found = _newest(turn.records if whole else turn.records[: (ordinal or 0) + 1], name)
            if found is not None:
                return found
    return None


def _newest(records: Iterable[Record], name: str) -> Artifact | None:
    ended = [r for r in records if isinstance(r, Ended)]
    return next((a for r in reversed(ended) for a in reversed(r.artifacts) if a.name == name), None)
