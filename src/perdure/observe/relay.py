"""Events of sessions that other workers run, brought into the channels of this Runtime.

While a reader here reads a session, the session is followed: this Runtime subscribes to it at every living worker on
this machine, because any of them may take up its next turn. What they send goes into the session's own channel, with
the cursor that it has at its worker, so that a reader may go on from it in any Runtime.

One worker at a time is the source of a turn. The next one begins with `TurnStarted`; what a relieved one says after
that is dropped. When the source of a turn that is under way

    dies         what it had not sent is lost: readers get a gap
    is left      all of it has come: text that no record holds is retracted, because it will be asked for again

Nothing is lost with a worker between turns, or while the turn is parked. What is committed and came from no worker is
read from the store, and told after a gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Protocol

from perdure.errors import LiveEventsUnavailable, SessionDeleted, StoreError
from perdure.model.event import AnyEvent, Gap, Retracted, TurnCommitted, TurnStarted, WaitingFor
from perdure.model.ids import split, turn_id
from perdure.model.outcome import Outcome
from perdure.model.session import SessionRow, WorkerRow
from perdure.observe.feed import DELTAS, Channel, Cursor, Feed
from perdure.observe.remote import (
    ANSWER_SECONDS,
    Link,
    RelayDone,
    Replayed,
    ReplayRequest,
    StateRequest,
    Subscribe,
    Unsubscribe,
    Wrote,
    connect,
)
from perdure.ports.store import Store, WorkerSockets

log = logging.getLogger("perdure.observe")

FOLLOW_SECONDS = 1.0
"""How long a reader waits until its session is followed at every worker; it is followed at the rest beside it."""
RECONNECT_SECONDS = 1.0
"""A connection that breaks twice within this time is made again after it, not at once."""
AGAIN = 0.02
"""Seconds until a worker is asked again whether it has announced what it committed."""


class LocalTurns(Protocol):
    """What the relay asks of the rest of its Runtime."""

    async def workers(self) -> Sequence[WorkerRow]:
        """The other workers that live."""
        ...

    def works_on(self, session_id: str) -> int:
        """The turn that a task here is at, until its end was announced; 0 when there is none."""
        ...

    async def outcome(self, row: SessionRow) -> Outcome:
        """How the last committed turn of a session ended."""
        ...

    async def answer(self, session_id: str) -> None:
        """Give the tasks that wait for turns of a session what the store says of their ends."""
        ...


class Followed:
    """A session that is read here. Turns below `told` are over; those from `whole` on are to be heard from their
    beginning; a new worker is asked for all that it has kept from `since` on. `source` is the worker of turn `turn`,
    which is `under_way` there, and `step` its step with text that no record holds yet. `cursors` has the last cursor of
    each worker, `subscribed` those that have been asked.
    """

    __slots__ = (
        "channel",
        "cursors",
        "readers",
        "ready",
        "since",
        "source",
        "step",
        "subscribed",
        "told",
        "turn",
        "under_way",
        "whole",
    )

    def __init__(self, channel: Channel, told: int, whole: int) -> None:
        self.channel, self.told, self.whole, self.since = channel, told, whole, whole
        self.readers, self.ready = 0, asyncio.Event()
        self.source, self.turn, self.step, self.under_way = "", "", -1, False
        self.cursors: dict[str, str] = {}
        self.subscribed: set[str] = set()

    def receive(self, worker_id: str, event: AnyEvent) -> None:
        channel, kind = self.channel, type(event)
        other = event.turn_id != self.turn or worker_id != self.source or kind is TurnStarted
        if other and event.turn_id and not self._switch(worker_id, event):
            return
        self.cursors[worker_id] = event.cursor
        if kind in DELTAS:
            self.step = getattr(event, "step", -1)
        elif kind is not Gap:
            self.step = -1
            if isinstance(event, TurnStarted | TurnCommitted | WaitingFor):
                self.under_way = kind is TurnStarted
                channel.mark(kind, event.turn_id, 0)
                if kind is TurnCommitted and channel.head is not None:
                    self.told = self.since = channel.head + 1
        channel.relay(event)

    def _switch(self, worker_id: str, event: AnyEvent) -> bool:
        """A turn, or its source, is another one. False: the event is to be dropped."""
        number, begins = split(event.turn_id, 1)[1][0], isinstance(event, TurnStarted)
        if number < self.told or (self.channel.head is not None and number <= self.channel.head):
            return False
        if self.under_way and self.source != worker_id:
            if not begins:
                return False
            self.retract("another worker took the turn over")
        if not begins and number >= self.whole:
            self.channel.publish_gap("the turn had begun before its events could be asked for")
        self.source, self.turn, self.under_way, self.step = worker_id, event.turn_id, True, -1
        self.told, self.whole = number, max(self.whole, number + 1)
        if begins:
            self.since = number
        return True

    def retract(self, reason: str) -> None:
        """Take back text of the turn that its next attempt will show again."""
        if self.step >= 0:
            self.channel.publish_relayed(Retracted, self.turn, {"step": self.step, "reason": reason})
        self.step, self.under_way = -1, False

    def bereave(self, worker_id: str) -> None:
        """A worker is dead."""
        self.cursors.pop(worker_id, None)
        self.subscribed.discard(worker_id)
        if self.source == worker_id and self.under_way:
            self.under_way, self.step, self.source = False, -1, ""
            self.channel.publish_gap(f"worker {worker_id} died while it ran the turn: what it had not sent is lost")


class Relay:
    """Follows sessions at other workers. `sockets` is the store that has them; None: it is in no file, and has none.

    Its tasks belong to `spawn`. `_missing` are workers whose connection broke and that may live.
    """

    def __init__(
        self,
        feed: Feed,
        store: Store,
        sockets: WorkerSockets | None,
        turns: LocalTurns,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._feed, self._store, self._sockets, self._turns, self._spawn = feed, store, sockets, turns, spawn
        self._followed: dict[str, Followed] = {}
        self._links: dict[str, Link] = {}
        self._announcing: asyncio.Task[None] | None = None
        self._rows: dict[str, WorkerRow] = {}
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._missing: set[str] = set()
        self._lost_at: dict[str, float] = {}
        self._unreachable: dict[str, str] = {}
        self._polling: asyncio.Task[None] | None = None
        self._closed = False

    # ------------------------------------------------------------------ reading

    def observe(self, session_id: str, cursor: str | None) -> AsyncGenerator[AnyEvent, None]:
        """Events after `cursor`, or from now on. Raises InvalidCursor at once when it can be none of this session."""
        wanted = None if cursor is None else self._feed.parse(cursor, session_id)
        channel = self._feed.channel(session_id)
        return self._observe(channel, channel.next, wanted, cursor or "")

    async def _observe(
        self, channel: Channel, position: int, wanted: Cursor | None, cursor: str
    ) -> AsyncGenerator[AnyEvent, None]:
        session_id, reason, until = channel.session_id, "", -1
        row = await self._store.session(session_id) or SessionRow(0, session_id, "")
        if row.deleted:
            raise SessionDeleted(session_id)
        if wanted is not None and wanted.incarnation == self._feed.incarnation:
            position, wanted = wanted.position, None
        is_first = session_id not in self._followed
        if is_first and wanted is not None and wanted.turn is not None and not channel.readers:
            channel.set_head(row.head if wanted.turn > row.head else wanted.turn - 1)
        self._feed.behind(session_id, row.head)
        followed = await self.follow(session_id, row, wanted if is_first else None, cursor)
        try:
            if wanted is not None and is_first:
                if wanted.incarnation not in followed.subscribed and (reason := self._is_missing(wanted, row)):
                    channel.set_head(max(channel.head or 0, row.head))
                    position = channel.resuming(wanted)
                await self.announce_missed(session_id)
            elif wanted is not None and (found := channel.after(cursor)) is not None:
                position = found
            elif wanted is not None:
                position = channel.next  # before the question: what is published after its answer comes after this
                replayed = await self._replay(session_id, wanted.incarnation, cursor)
                for event in replayed or ():
                    until = self._feed.parse(event.cursor, session_id).position
                    yield event
                settled = wanted.turn == followed.told and not wanted.state and not followed.under_way
                if replayed is None and not settled:
                    reason, position = GONE, channel.resuming(wanted)
            async with contextlib.aclosing(channel.read(position, reason)) as events:
                async for event in events:
                    if until >= 0 and wanted is not None:
                        incarnation, place = event.cursor.split(":", 2)[:2]
                        if incarnation == wanted.incarnation:
                            if int(place.partition(".")[0]) <= until:
                                continue  # it was replayed
                            until = -1
                    yield event
        finally:
            self.unfollow(session_id)

    def _is_missing(self, wanted: Cursor, row: SessionRow) -> str:
        """Why events after a cursor are missing whose worker cannot be asked; "" when none are."""
        same = row.turn == wanted.turn and row.state == "parked" and row.generation == wanted.generation
        if wanted.turn is not None and (wanted.state == "" or (wanted.state == "=" and same)):
            return ""  # what was committed since then is told after a gap of its own
        return GONE

    async def _replay(self, session_id: str, worker_id: str, cursor: str) -> list[AnyEvent] | None:
        link = self._links.get(worker_id)
        if link is None:
            return None
        with contextlib.suppress(LiveEventsUnavailable):
            answer = await link.ask(lambda number: ReplayRequest(number, session_id, cursor))
            return answer.events if isinstance(answer, Replayed) else None
        return None

    async def follow(
        self, session_id: str, row: SessionRow, wanted: Cursor | None = None, cursor: str = "", since: int | None = None
    ) -> Followed:
        """Subscribe to a session at every worker that can be reached, until `unfollow`. From `since` on, its turns are
        to be heard from their beginning: all that are accepted from now on, unless it is given."""
        followed = self._followed.get(session_id)
        if followed is not None:
            followed.readers += 1
            await followed.ready.wait()
            return followed
        whole = row.next if since is None else since
        told = row.turn or row.next
        if wanted is not None and wanted.turn is not None:
            told = whole = wanted.turn
        followed = self._followed[session_id] = Followed(self._feed.channel(session_id), min(told, whole), whole)
        followed.readers = 1
        if wanted is not None:
            followed.cursors[wanted.incarnation] = cursor
            if wanted.state == "+":
                followed.source, followed.turn = wanted.incarnation, turn_id(session_id, whole)
                followed.under_way, followed.whole = True, whole + 1
        try:
            if self._sockets is not None:
                rows = [each for each in await self._turns.workers() if _listens(each)]
                at = [
                    self._spawn(self._subscribe_at(each, followed), f"follow {session_id} at {each.id}")
                    for each in rows
                ]
                if at:
                    # A worker that is stopped or blocked must not keep readers from what all others send.
                    await asyncio.wait(at, timeout=FOLLOW_SECONDS)
            if wanted is not None and wanted.incarnation not in followed.subscribed:
                followed.cursors.clear()
                followed.source, followed.under_way = "", False
        except BaseException:  # also a cancellation: a subscription without a reader would be kept for ever
            self.unfollow(session_id)
            raise
        finally:
            followed.ready.set()
        return followed

    def unfollow(self, session_id: str) -> None:
        followed = self._followed[session_id]
        followed.readers -= 1
        if followed.readers == 0:
            del self._followed[session_id]
            for worker_id in followed.subscribed:
                if worker_id in self._links:
                    self._links[worker_id].say(Unsubscribe(session_id))

    def announce_write(self) -> None:
        """Something was written that another worker may have to take up: the workers are told, and look at once."""
        for link in self._links.values():
            link.say(Wrote())
        idle = self._announcing is None or self._announcing.done()
        if not self._links and idle and self._sockets is not None and not self._closed:
            self._announcing = self._spawn(self._announce(), "perdure announce")

    async def _announce(self) -> None:
        """Connect to the workers to tell them. The next poll closes these, if no session is followed by then."""
        try:
            rows = await self._turns.workers()
        except StoreError as error:
            log.debug("other workers are not told of a write, they find it by themselves: %s", error)
            return
        for row in rows:
            if _listens(row):
                await self._connect(row)
                if (link := self._links.get(row.id)) is not None:
                    link.say(Wrote())

    # ------------------------------------------------------------------ connections

    async def _subscribe_at(self, row: WorkerRow, followed: Followed) -> None:
        if row.id not in self._links:
            await self._connect(row)
        link = self._links.get(row.id)
        if link is not None:
            await self._subscribe(link, followed)

    async def _connect(self, row: WorkerRow) -> None:
        """Connect to a worker, and subscribe to all that is followed; once at a time."""
        task = self._connecting.get(row.id)
        if task is None:
            task = self._connecting[row.id] = self._spawn(self._try(row), f"live events of {row.id}")
            task.add_done_callback(lambda _: self._connecting.pop(row.id, None))
        await asyncio.wait([task])

    async def _try(self, row: WorkerRow) -> None:
        assert self._sockets is not None
        self._rows[row.id] = row
        try:
            link = await connect(self._sockets.find_socket(row), self._store.identity(), row.id, self)
        except LiveEventsUnavailable as error:
            if row.id not in self._unreachable and not error.gone:
                log.warning("%s", error)
            self._unreachable[row.id] = str(error)
            if error.gone and row.id in self._missing:
                self._bereave(row.id)
            return
        self._links[row.id] = link
        self._missing.discard(row.id)
        self._unreachable.pop(row.id, None)
        for followed in list(self._followed.values()):
            await self._subscribe(link, followed)

    async def _subscribe(self, link: Link, followed: Followed) -> None:
        session_id, worker_id = followed.channel.session_id, link.worker_id
        if worker_id in followed.subscribed:
            return
        followed.subscribed.add(worker_id)
        cursor = followed.cursors.get(worker_id, "")
        try:
            done = await link.ask(lambda number: Subscribe(number, session_id, cursor, followed.since))
        except LiveEventsUnavailable:
            followed.subscribed.discard(worker_id)
            return
        if isinstance(done, RelayDone) and done.lost:
            followed.channel.publish_gap(done.lost)

    def receive(self, worker_id: str, event: AnyEvent) -> None:
        followed = self._followed.get(event.session_id)
        if followed is not None and not self._turns.works_on(event.session_id):  # else that worker was relieved
            followed.receive(worker_id, event)
            if isinstance(event, TurnCommitted | WaitingFor):
                _ = self._spawn(self._turns.answer(event.session_id), f"waiters of {event.session_id}")

    def lost(self, link: Link, left: bool) -> None:
        worker_id = link.worker_id
        if self._links.get(worker_id) is not link:
            return
        del self._links[worker_id]
        for followed in self._followed.values():
            followed.subscribed.discard(worker_id)
            if left:
                followed.cursors.pop(worker_id, None)
                if followed.source == worker_id:
                    followed.retract("its worker was left, and another one goes on with the turn")
                    followed.source = ""
        if not left and not self._closed and self._followed:
            self._missing.add(worker_id)
            _ = self._spawn(self._connect_again(self._rows[worker_id]), f"live events of {worker_id}, again")

    async def _connect_again(self, row: WorkerRow) -> None:
        """At once, unless its last connection broke just before: one that sends what is not understood here, as a newer
        version may, would break each."""
        now = asyncio.get_running_loop().time()
        before, self._lost_at[row.id] = self._lost_at.get(row.id), now
        if before is not None and now - before < RECONNECT_SECONDS:
            await asyncio.sleep(RECONNECT_SECONDS)
        if row.id in self._missing and self._followed:
            await self._connect(row)

    def _bereave(self, worker_id: str) -> None:
        self._missing.discard(worker_id)
        self._lost_at.pop(worker_id, None)
        self._unreachable.pop(worker_id, None)
        for followed in list(self._followed.values()):
            followed.bereave(worker_id)

    async def poll(self) -> None:
        """Called when the store has changed or a worker has died: see to both beside the caller."""
        if self._polling is None or self._polling.done():
            self._polling = self._spawn(self._poll(), "live events of other workers")

    async def _poll(self) -> None:
        try:
            if self._sockets is not None and self._followed:
                await self._compare(await self._turns.workers())
            for session_id in self._feed.sessions:
                await self.announce_missed(session_id)
        except StoreError as error:
            log.warning("cannot look at what is observed: %s", error)
        if not self._followed:
            for link in list(self._links.values()):
                link.abort()

    async def _compare(self, rows: Sequence[WorkerRow]) -> None:
        """Connect to workers that are new, and drop those that are dead."""
        living = {row.id for row in rows}
        for worker_id in (self._links.keys() | self._missing) - living:
            link = self._links.pop(worker_id, None)
            self._bereave(worker_id)
            if link is not None:
                link.abort()
        for worker_id in self._unreachable.keys() - living:
            del self._unreachable[worker_id]
        new = [row for row in rows if _listens(row) and row.id not in self._links]
        await asyncio.gather(*(self._connect(row) for row in new))

    def close(self) -> None:
        self._closed = True
        for link in list(self._links.values()):
            link.abort()

    # ------------------------------------------------------------------ what the store tells

    async def announce_missed(self, session_id: str) -> None:
        """A turn that ended where no event of it came from: readers of its session get that, after a gap."""
        row = await self._store.session(session_id)
        if row is not None and row.deleted:
            self._feed.end(session_id)
        elif row is not None and self._is_behind(row) and not await self._is_pending(session_id, row.head):
            outcome = await self._turns.outcome(row)
            channel = self._feed.listening(session_id)
            if channel is not None and self._is_behind(row):  # still: it was not announced meanwhile
                name, why = turn_id(session_id, row.head), "another process worked on the session"
                if self._unreachable:
                    why += f", and its events cannot be read: {next(iter(self._unreachable.values()))}"
                channel.publish_gap(why, name)
                channel.mark(TurnCommitted, name, 0)
                channel.publish_relayed(TurnCommitted, name, {"outcome": outcome})

    def _is_behind(self, row: SessionRow) -> bool:
        """Whether a turn has ended that readers have not heard of, and that no task here is about to announce."""
        return not self._turns.works_on(row.id) and self._feed.behind(row.id, row.head)

    async def _is_pending(self, session_id: str, turn: int) -> bool:
        """Whether a worker that can be reached has still to announce a turn. What others have announced is here."""
        answers = await asyncio.gather(*(self._ask(link, session_id) for link in list(self._links.values())))
        return any(0 < works <= turn for works in answers)

    async def _ask(self, link: Link, session_id: str) -> int:
        with contextlib.suppress(LiveEventsUnavailable):
            done = await link.ask(lambda number: StateRequest(number, session_id))
            return done.works if isinstance(done, RelayDone) else 0
        return 0

    async def settle(self, session_id: str, turn: int) -> None:
        """Wait until everything is here that workers have to say of a turn which has ended on disk."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                while await self._is_pending(session_id, turn):  # noqa: ASYNC110  # the event is another process's
                    await asyncio.sleep(AGAIN)


GONE = "the worker that this cursor is from is gone, or does not have what came after it any more"


def _listens(row: WorkerRow) -> bool:
    return row.offers is not None and row.offers.socket != ""
