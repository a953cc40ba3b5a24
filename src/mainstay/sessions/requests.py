"""What is asked of the turns of sessions from outside, durably: answers to their waits, cancels, resuming, deletion."""

from __future__ import annotations

import functools
from collections.abc import Callable

from msgspec.structs import replace

from mainstay.engine.journal import spill, write_referring
from mainstay.engine.lease import Worker
from mainstay.engine.waits import named, whole
from mainstay.model.codec import encode
from mainstay.model.record import Spilled
from mainstay.model.session import Answer, CancelRequest, SessionRow
from mainstay.model.write import Cancel, CancelReceipt, CancelStatus, Delete, Resolve, Resolved, Resume, SessionRef
from mainstay.observe.feed import Feed
from mainstay.ports.host import Clock
from mainstay.ports.store import Store
from mainstay.sessions.archive import Archive
from mainstay.sessions.turns import Turns

SETTLEMENTS = ("rerun", "done", "failed")


class TurnRequests:
    """`on_deleted` is called with the id of each session that was deleted here."""

    def __init__(  # noqa: PLR0913  # put together in one place
        self,
        store: Store,
        clock: Clock,
        worker: Worker,
        archive: Archive,
        feed: Feed,
        turns: Turns,
        on_deleted: Callable[[str], None],
    ) -> None:
        self._store, self._clock, self._worker, self._archive = store, clock, worker, archive
        self._feed, self._turns, self._on_deleted = feed, turns, on_deleted

    async def resolve(self, wait_id: str, answer: Answer | None) -> Resolved:
        """Resolve a wait, and work on its turn if this Runtime may."""
        agents = self._turns.agents
        data = encode(answer)
        _, blobs = await spill(self._store, data)
        given = Spilled(blobs[0], len(data)) if blobs else answer
        resolve = Resolve(wait_id, given, self._clock.now(), self._worker.id if agents else None, agents)
        write = functools.partial(self._turns.write, named(wait_id)[0], resolve)
        put_again = functools.partial(spill, self._store, data)
        resolved: Resolved = await (write_referring(write, put_again) if blobs else write())
        if resolved.status == "accepted" and resolved.row is not None:
            self._turns.go_on(resolved.row)
            return resolved
        wait = None if resolved.wait is None else await whole(self._store, resolved.wait)
        if wait is not None:
            return replace(resolved, wait=wait)
        return await self._too_late(wait_id, answer) or Resolved("unknown")

    async def _too_late(self, wait_id: str, answer: Answer | None) -> Resolved | None:
        """How a wait of a committed turn had ended; None when there was none."""
        row = await self._store.session(named(wait_id)[0])
        wait = None if row is None or row.deleted else await self._archive.recalled(row, wait_id)
        if wait is None:
            return None
        if wait.state == "cancelled" and answer is not None and answer.verdict in SETTLEMENTS:
            return None  # the outcome of the call is unknown still, and may be settled
        return Resolved("already_resolved", wait, row)

    async def cancel(self, session_id: str, agent: str, request: CancelRequest, turn: int | None) -> CancelStatus:
        """Ask a turn to stop: the running one, or the given one. The request is on disk when this returns."""
        write = Cancel(SessionRef(session_id), request, self._clock.now(), turn, self._turns.worker_for(agent))
        receipt: CancelReceipt[SessionRow] = await self._turns.write(session_id, write)
        if receipt.status == "requested" and receipt.row is not None:
            self._turns.cancelled(receipt.row, request, receipt.turn)
        return receipt.status

    async def resume(self, session_id: str, agent: str) -> bool:
        """Work again on a turn that is stuck. False when none is."""
        resume = Resume(SessionRef(session_id), self._clock.now(), self._turns.worker_for(agent), self._worker.lived)
        row = await self._turns.write(session_id, resume)
        if row is not None:
            self._turns.go_on(row)
        return row is not None

    async def delete(self, session_id: str, unused_since: int | None = None) -> bool:
        """Delete a session; with `unused_since` only if nothing has happened to it since then. False: it was not."""
        deleted = await self._store.write(Delete(session_id, self._clock.now(), unused_since))
        if deleted or unused_since is None:
            self._turns.cache.deleted(session_id)
            self._feed.end(session_id)
        if unused_since is None:
            self._on_deleted(session_id)
        return deleted
