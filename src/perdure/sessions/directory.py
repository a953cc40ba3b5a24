"""The sessions of a store: listing, deleting, and forgetting those that nothing has happened to for long."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec
from msgspec import Struct

from perdure.engine.lease import Worker
from perdure.errors import (
    BlobMissing,
    InvalidDefinition,
    InvalidInput,
    SearchUnavailable,
    StoreError,
    TurnFailed,
    quoted,
)
from perdure.model import validate
from perdure.model.codec import decode_row
from perdure.model.ids import check_session_id, turn_id
from perdure.model.message import Scalar
from perdure.model.outcome import Finished, kind_of
from perdure.model.process import SessionOrigin
from perdure.model.record import Closed, RecordRow, Said, Spilled
from perdure.model.search import SearchFilter, SearchPage, hit, query_words
from perdure.model.session import ListedSession, SessionRow, SessionState, TurnError, label, made_title
from perdure.model.tool import Cancelled
from perdure.model.write import ProcessFilter, SessionFilter
from perdure.ports.host import Clock
from perdure.ports.store import Searchable, Store
from perdure.processes.service import FOR_EVER
from perdure.sessions.parts import SessionParts

log = logging.getLogger("perdure.sessions")

DAY = 86_400
FORGET_SECONDS = 3600.0
AT_ONCE = 100
"""Sessions, or processes, that are looked at at a time."""
MOST_DAYS = 36_600
MAX_ERROR = 500
"""Characters of an error that a listing shows."""
CURSOR = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")
SEARCH_CURSOR = re.compile(r"([0-9]{1,9})\.([0-9]{1,7})\.([0-9]{1,5})")
INDEX_PAUSE = 10.0
"""Seconds between two attempts to go on with an index where the store failed."""


class Retention(Struct, frozen=True):
    """How long a Runtime keeps what is not used: sessions that were idle for so many days, and processes that ended so
    long ago.

    A session is left alone while it has an open turn, an input that waits, a fork, news that it has not heard, or a
    live process of its own. What is forgotten leaves its id, which stays spent.
    """

    days: float = 30.0

    def __post_init__(self) -> None:
        if type(self.days) not in (int, float) or not 0 < self.days <= MOST_DAYS:
            raise InvalidDefinition(f"days={quoted(self.days)} is not usable: give a number of days, more than 0")


async def forget(parts: SessionParts, worker: Worker, retention: Retention) -> None:
    """Forget what is older than that, unless another worker does so."""
    try:
        if not await worker.is_first_to_forget():
            return
        processes = await parts.processes.prune(retention.days * DAY)
        sessions = await forget_sessions(parts, parts.clock.now() - round(retention.days * DAY * 1000))
    except StoreError as error:
        log.warning("cannot forget what is older than %g days, it is tried again in an hour: %s", retention.days, error)
        return
    if sessions or processes:
        log.info("forgot %d sessions and %d processes, older than %g days", sessions, processes, retention.days)


async def forget_sessions(parts: SessionParts, since: int) -> int:
    """Delete the sessions that were last used before then; how many. Each is judged again where it is deleted."""
    count, before, busy = 0, since, await _with_live_processes(parts)
    while True:
        rows = await parts.store.sessions(SessionFilter(state="idle", before=before, limit=AT_ONCE))
        for row in rows:
            if row.id not in busy and await parts.requests.delete(row.id, since):
                count += 1
        if len(rows) < AT_ONCE:
            return count
        before = rows[-1].updated
        await asyncio.sleep(0)


async def _with_live_processes(parts: SessionParts) -> set[str]:
    """Sessions that asked for a process which lives, or are to hear of it. One that begins later is seen by its grant,
    where the session is deleted."""
    found, last = set[str](), None
    while True:
        rows = await parts.store.processes(ProcessFilter(live=True, before=last, limit=AT_ONCE))
        for row in rows:
            asked = row.registration
            if isinstance(asked.origin, SessionOrigin):
                found.add(asked.origin.session_id)
            wake = row.record.wake or asked.wake
            if wake is not None:
                found.add(wake.session_id)
        if len(rows) < AT_ONCE:
            return found
        last = rows[-1].pid
        await asyncio.sleep(0)


def _place(cursor: object) -> tuple[int, int]:
    found = CURSOR.fullmatch(cursor) if isinstance(cursor, str) else None
    if found is None:
        raise InvalidInput(f"cursor={quoted(cursor)} is not usable: give the `cursor` of the last session of a page")
    return int(found[1]), int(found[2])


async def described(store: Store, rows: Sequence[SessionRow]) -> list[ListedSession]:
    """Sessions as a listing shows them. Titles and errors are read from records: keeping them would cost every turn."""
    first = await store.turn_ends([(row.sid, 1) for row in rows])
    last = await store.turn_ends([(row.sid, row.head) for row in rows])
    found = []
    for row, opened, ended in zip(rows, first, last, strict=True):
        said = None if opened is None else await _record(store, opened[0])
        closed = None if ended is None or not row.head else await _record(store, ended[1])
        opening = made_title(said.message) if isinstance(said, Said) else ""
        error = _error(turn_id(row.id, row.head), closed) if isinstance(closed, Closed) else None
        found.append(ListedSession(**msgspec.structs.asdict(row), opening=opening, error=error))
    return found


async def _record(store: Store, body: bytes) -> RecordRow | None:
    """A record; None where it cannot be read, which reading the session reports."""
    try:
        row: RecordRow = decode_row(body)
        if isinstance(row, Spilled):
            row = decode_row(await store.blobs.get(row.digest))
        return row
    except (ValueError, BlobMissing):
        return None


def _error(turn: str, closed: Closed) -> TurnError | None:
    outcome = closed.outcome
    if isinstance(outcome, Finished | Cancelled):
        return None
    failure = TurnFailed(turn, kind_of(outcome), msgspec.to_builtins(outcome))
    why = failure.why if len(failure.why) <= MAX_ERROR else f"{failure.why[: MAX_ERROR - 1]}…"
    return TurnError(turn, failure.kind, why, closed.at)


# ---------------------------------------------------------------------- words


def searchable(store: Store) -> Searchable:
    if not isinstance(store, Searchable):
        raise SearchUnavailable(f"a {type(store).__name__} keeps no index of words")
    return store


async def take_in(store: Searchable, clock: Clock) -> None:
    """Take what a store held before it had an index into it, a little at a time: other writes go between."""
    steps = 0
    while True:
        try:
            if not await store.index_more():
                break
        except StoreError as error:
            log.warning("the index is not complete, it is gone on with in %g seconds: %s", INDEX_PAUSE, error)
            await clock.sleep(INDEX_PAUSE)
        steps += 1
        if steps % 100 == 0:
            log.info("the index is being made: %d steps so far", steps)
        await asyncio.sleep(0)
    if steps:
        log.info("the index holds everything now")


def _before(cursor: object) -> tuple[int, int, int]:
    found = SEARCH_CURSOR.fullmatch(cursor) if isinstance(cursor, str) else None
    if found is None:
        raise InvalidInput(f"cursor={quoted(cursor)} is not usable: give the `cursor` of a page, or of a hit")
    return int(found[1]), int(found[2]), int(found[3])


async def search_store(  # what is looked for, each by name
    store: Store,
    query: str,
    *,
    agent: str | None = None,
    metadata: Mapping[str, Scalar] | None = None,
    limit: int = 20,
    cursor: str | None = None,
) -> SearchPage:
    wanted = SearchFilter(
        query_words(query),
        None if agent is None else validate.name(agent, "agent"),
        labels(metadata),
        validate.count(limit, "limit"),
        None if cursor is None else _before(cursor),
    )
    found, indexed = await searchable(store).search(validate.readable(wanted, "what is searched for"))
    return SearchPage(tuple([hit(each) for each in found]), indexed)


def labels(metadata: Mapping[str, Scalar] | None) -> tuple[tuple[str, str], ...]:
    """What sessions are looked up by."""
    found = {} if metadata is None else validate.metadata(metadata)
    return tuple([(key, label(value)) for key, value in found.items()])


class Sessions:
    """The sessions of a store."""

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts

    async def list(  # noqa: PLR0913  # what sessions are found by, each by name
        self,
        *,
        agent: str | None = None,
        state: str | None = None,
        prefix: str = "",
        metadata: Mapping[str, Scalar] | None = None,
        since: int | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Sequence[ListedSession]:
        """Sessions, the most recently changed first: those with all of the given `metadata`, changed `since` a time (in
        milliseconds). A page goes on where another one ended with `cursor=page[-1].cursor`."""
        await asyncio.sleep(0)  # reads of a file do not wait: a host that polls must not keep its Runtime from working
        self._parts.mode.check()
        if state is not None and state not in get_args(SessionState):
            known = ", ".join(get_args(SessionState))
            raise InvalidInput(f"there is no state {quoted(state)} of a session: use {known}")
        wanted = SessionFilter(
            agent,
            state,
            prefix,
            validate.count(limit, "limit"),
            metadata=labels(metadata),
            since=None if since is None else validate.count(since, "since"),
            after=None if cursor is None else _place(cursor),
        )
        store = self._parts.store
        return await described(store, await store.sessions(validate.readable(wanted, "the filter")))

    async def search(
        self,
        query: str,
        *,
        agent: str | None = None,
        metadata: Mapping[str, Scalar] | None = None,
        limit: int = 20,
        cursor: str | None = None,
    ) -> SearchPage:
        """Where all words of the query were said, by a user or by the agent: the newest sessions first.

        Only in a store that keeps an index, `Runtime(search=True)`; otherwise SearchUnavailable is raised. Every other
        character of the query separates words. A page goes on with `cursor=page.cursor`.
        """
        self._parts.mode.check()
        store = self._parts.store
        return await search_store(store, query, agent=agent, metadata=metadata, limit=limit, cursor=cursor)

    async def prune(self, older_than: float) -> int:
        """Delete the sessions that nothing has happened to for `older_than` seconds, and that nothing can come of.

        Left alone is what has an open turn, an input that waits, a fork, news that it has not heard, or a live process
        of its own. Returns how many went; their ids stay spent.
        """
        self._parts.mode.check()
        if type(older_than) not in (int, float) or not 0 <= older_than <= FOR_EVER:
            raise InvalidInput(f"prune what was not used for 0 or more seconds, not {quoted(older_than)}")
        return await forget_sessions(self._parts, self._parts.clock.now() - round(older_than * 1000) + 1)

    async def delete(self, session_id: str) -> bool:
        """Delete a session for good; its id is never used again. False when there was none."""
        self._parts.mode.check()
        session_id = check_session_id(session_id)
        return await self._parts.requests.delete(session_id)
