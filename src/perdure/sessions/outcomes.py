"""How turns end, and their events until then: from the task that works on the turn here, or from the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias

from perdure.engine.admission import TurnPlaces
from perdure.engine.lease import Worker
from perdure.engine.runner import Activity
from perdure.engine.waiters import Deadlocks, Waiters, in_hand
from perdure.errors import PerdureError, SessionDeleted, TurnFailed, UnknownSession
from perdure.model.event import AnyEvent, Gap, Retracted, TextDelta, TurnCommitted, TurnStarted, WaitingFor
from perdure.model.ids import MAX_TURN, split, turn_id
from perdure.model.outcome import Outcome, Queued, answerable
from perdure.model.session import AWAITS_PROCESSES, SessionRow, WorkerRow
from perdure.observe.feed import Feed, FeedReader
from perdure.ports.store import Store
from perdure.sessions.cache import Archive, SessionCache
from perdure.sessions.definition import Definition
from perdure.sessions.result import TurnResult
from perdure.tools.answer import NOTHING, PartialOutput

TurnFuture: TypeAlias = "asyncio.Future[TurnResult[Any] | None]"
Asker: TypeAlias = Literal["host", "reader", "work"]

MAX_TIMER = 86_400.0
"""Seconds: event loops refuse timers that are far away."""


def _give_up(future: TurnFuture) -> None:
    if not future.done():
        future.set_result(None)


class TurnOutcomes:
    """`waiters` wait for the end of a turn, by session and number. `_hosts` are those that are also answered when their
    turn is only queued. They and `_readers` wait for a parked turn only so long: `_left` has the seconds that are left
    once it was parked. `_timers` run while it is parked: each with the time when it began. All live on the event loop.
    """

    def __init__(  # noqa: PLR0913  # each is another place where an outcome is found
        self,
        store: Store,
        worker: Worker,
        definitions: Mapping[str, Definition],
        cache: SessionCache[Any],
        archive: Archive,
        deadlocks: Deadlocks,
        activity: Activity,
        places: TurnPlaces,
        wait_for: float | None = None,
    ) -> None:
        self._places, self._wait_for = places, wait_for
        self._store, self._worker, self._definitions = store, worker, definitions
        self._cache, self._archive, self._deadlocks, self._activity = cache, archive, deadlocks, activity
        self.waiters: Waiters[int, TurnResult[Any] | None] = Waiters()
        self._hosts: set[TurnFuture] = set()
        self._readers: set[TurnFuture] = set()
        self._left: dict[TurnFuture, float] = {}
        self._timers: dict[TurnFuture, tuple[asyncio.TimerHandle, float]] = {}

    async def wait(self, session_id: str, turn: int, known: bool, who: Asker = "work") -> TurnResult[Any]:
        """Return how a turn ends, or its waits. `known`: it may have ended already.

        A "host" is also told that the turn is queued. It and a "reader" are told after `wait_for` seconds that a turn
        is parked which goes on by itself; "work" waits without end.
        """
        # Registered before the store is read: the turn may end in between, and its end is announced once.
        future = self.waiters.expect(session_id, turn)
        if who == "host":
            self._hosts.add(future)
            future.add_done_callback(self._hosts.discard)
        elif who == "reader":
            self._readers.add(future)
            future.add_done_callback(self._readers.discard)
        try:
            # A task of this Runtime that works on the turn publishes its events first, then its end.
            task = self._cache.tasks.get(session_id)
            if task is None or (known and task.turn != turn):
                result = await self.on_disk(session_id, turn)
                if result is None and who == "host":
                    result = await self.queued(session_id, turn)
                if result is not None:
                    self._withdraw(session_id, turn, future)
                    return result
                await self._compare(session_id)
            inside = self._deadlocks.check((session_id, turn))
        except BaseException:  # also a cancellation: the future would be kept for ever
            self._withdraw(session_id, turn, future)
            raise
        if inside is None:
            ended = await future
        else:
            self._activity.changed.set()
            with self._deadlocks.waiting((session_id, turn)):
                ended = await future
        if ended is None:  # it was parked for too long, unless it goes on just now
            ended = await self._parked(session_id, turn, who)
        return ended if ended is not None else await self.wait(session_id, turn, True, who)

    def _withdraw(self, session_id: str, turn: int, future: TurnFuture) -> None:
        """Its task waits no more."""
        self._hosts.discard(future)
        self._readers.discard(future)
        self._stop_timer(future)
        self._left.pop(future, None)
        self.waiters.withdraw(session_id, turn, future)

    # ------------------------------------------------------------------ turns that are parked and go on by themselves

    def parked(self, session_id: str) -> None:
        """Start the timers of bounded waiters, because the turn of a session was parked."""
        if self._wait_for is None:
            return
        loop = asyncio.get_running_loop()
        for turn in self.waiters.parts(session_id):
            for future in self.waiters.of(session_id, turn):
                if future in self._timers or not (future in self._hosts or future in self._readers):
                    continue
                if future not in self._left:
                    self._left[future] = self._wait_for
                    future.add_done_callback(self._over)
                left = min(max(self._left[future], 0), MAX_TIMER)
                self._timers[future] = loop.call_later(left, _give_up, future), loop.time()

    def resumed(self, session_id: str) -> None:
        """Stop the timers of waiters, because the turn goes on."""
        if not self._timers:
            return
        now = asyncio.get_running_loop().time()
        for turn in self.waiters.parts(session_id):
            for future in self.waiters.of(session_id, turn):
                if (began := self._stop_timer(future)) is not None:
                    self._left[future] -= now - began

    def _stop_timer(self, future: TurnFuture) -> float | None:
        """Stop the timer of a waiter; returns when it began, if there was one."""
        timer = self._timers.pop(future, None)
        if timer is None:
            return None
        timer[0].cancel()
        return timer[1]

    def _over(self, future: TurnFuture) -> None:
        """Forget the timer of a waiter that has its result."""
        self._stop_timer(future)
        self._left.pop(future, None)

    async def _compare(self, session_id: str) -> None:
        """Start or stop the timers of waiters by the row of a session that no task here works on."""
        if self._wait_for is not None and session_id not in self._cache.tasks:
            row = await self._store.session(session_id)
            if row is not None and row.state == "parked":
                self.parked(session_id)
            else:
                self.resumed(session_id)

    async def _parked(self, session_id: str, turn: int, who: Asker) -> TurnResult[Any] | None:
        """Return the result for a waiter whose time is over; None if the turn is no longer parked."""
        row = await self._store.session(session_id)
        if row is None or row.deleted or row.turn is None or row.state != "parked":
            return None
        if await self._archive.joined(row, turn) == row.turn:
            return await self._archive.parked(row, (await self._cache.view(row)).messages)
        return await self._behind(row, turn) if who == "host" and row.turn < turn else None

    async def _behind(self, row: SessionRow, turn: int) -> TurnResult[Any]:
        """Return a result that says that a turn is queued behind a parked one."""
        assert row.turn is not None
        ahead, calls = turn_id(row.id, row.turn), await self._archive.waits(row)
        waits = ", ".join(f"{call.tool} ({call.call_id})" for call in calls)
        why = f"turn {ahead} waits for an answer to {waits}: it goes first, so answer that, or cancel it"
        if not answerable(calls):
            why = f"turn {ahead} waits for {waits}, and goes on by itself: this turn runs after it"
        return await self._archive.queued(row, turn, Queued(ahead, calls, why))

    async def _goes_on(self, row: SessionRow) -> bool:
        """True if a parked turn waits for nothing that a person or an outside key can answer."""
        return row.reason == AWAITS_PROCESSES or not await self._archive.pending(row)

    def session_deleted(self, session_id: str) -> None:
        """Stop what runs of it, and answer the tasks that wait for its turns."""
        self._cache.deleted(session_id)
        for turn in self.waiters.parts(session_id):
            self.waiters.resolve(session_id, turn, SessionDeleted(session_id))

    @property
    def needed(self) -> dict[str, int]:
        """Sessions with a turn that work in hand waits for: the last such turn of each."""
        last: dict[str, int] = {}
        for session_id, turn in self.waiters.needed:
            last[session_id] = max(turn, last.get(session_id, 0))
        return last

    async def workers(self) -> tuple[WorkerRow, ...]:
        """The other workers that live: they may be at turns of which this Runtime has readers."""
        return await self._worker.others()

    def works_on(self, session_id: str) -> int:
        """The turn that a task here is at, until its end was announced; 0 when there is none."""
        task = self._cache.tasks.get(session_id)
        return 0 if task is None else task.turn or MAX_TURN

    async def outcome(self, row: SessionRow) -> Outcome:
        """How the last committed turn of a session ended."""
        return await self._archive.outcome(row, row.head)

    async def on_disk(self, session_id: str, turn: int) -> TurnResult[Any] | None:
        """How a turn ended or parked as far as the store knows; None while it is under way."""
        row = await self._store.session(session_id)
        if row is None:
            raise UnknownSession(session_id)
        if row.deleted:
            raise SessionDeleted(session_id)
        turn = await self._archive.joined(row, turn)
        result = await self._archive.result(row, turn)
        if result is None and row.turn == turn and row.state == "parked" and not await self._goes_on(row):
            return await self._archive.parked(row, (await self._cache.view(row)).messages)
        result = result or await self._archive.refused(row, turn)
        if result is None and row.turn is not None and row.turn <= turn and row.state == "stuck":
            # No worker takes it, nor what was said after it, until a person resumes it.
            raise TurnFailed(turn_id(session_id, row.turn), "stuck", {"reason": row.reason})
        return result

    def awaited_by_hosts(self, session_id: str) -> list[int]:
        """Turns of a session whose waiters are to be answered when the turn is only queued."""
        turns = self.waiters.parts(session_id)
        return [turn for turn in turns if not self._hosts.isdisjoint(self.waiters.of(session_id, turn))]

    async def answer(self, session_id: str) -> None:
        """Give the tasks that wait for turns of a session what the store says of their ends."""
        for turn in self.waiters.parts(session_id):
            try:
                result = await self.on_disk(session_id, turn)
            except PerdureError as error:
                self.waiters.resolve(session_id, turn, error)
            else:
                if result is not None:
                    self.waiters.resolve(session_id, turn, result)
        await self.answer_queued(session_id)
        await self._compare(session_id)

    async def answer_queued(self, session_id: str) -> None:
        """Answer hosts that wait for a turn of a session which cannot begin now with the reason; others wait on."""
        for turn in self.awaited_by_hosts(session_id):
            result = await self.queued(session_id, turn)
            if result is None:
                continue
            for future in [each for each in self.waiters.of(session_id, turn) if each in self._hosts]:
                if not future.done():
                    future.set_result(result)
                self._withdraw(session_id, turn, future)

    async def queued(self, session_id: str, turn: int) -> TurnResult[Any] | None:
        """That a turn is queued and nothing will begin it by itself; None while it runs, has ended or may begin."""
        row = await self._store.session(session_id)
        if row is None or row.deleted or row.turn is None or turn < row.turn:
            return None
        if row.state == "parked" and await self._goes_on(row):
            return None
        if row.state == "parked" and row.turn < turn:
            return await self._behind(row, turn)
        if row.state == "open" and (held := self._store.held()) is not None:
            return await self._archive.queued(row, turn, Queued(None, (), held))
        if self._places.expects(session_id):
            return None
        if row.state != "open" or (row.agent in self._definitions and in_hand()):
            return None  # what running work waits for is begun here, also while this Runtime drains
        if await self._worker.is_offered(row.agent) or (row.owner is not None and self._worker.is_alive(row.owner)):
            return None
        if self._worker.may_be_restarted(row.agent):
            return None  # hosts that wait are answered by the watch, when the time for it is over
        why = f"no living worker has agent {row.agent!r}: start a Runtime with it on this store, and the turn runs"
        return await self._archive.queued(row, turn, Queued(None, (), why))


# ---------------------------------------------------------------------- events of a turn


class Listener:
    """Reads the events of a session from now on. A reader that falls behind gets a gap; emitting never waits."""

    __slots__ = ("_channel", "_position")

    def __init__(self, feed: Feed, session_id: str) -> None:
        self._channel = feed.channel(session_id)
        self._position = self._channel.next

    def skip(self) -> None:
        """Pass over the events until now."""
        self._position = self._channel.next

    async def events(
        self, turn_id: str, over: asyncio.Future[Any], settle: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncGenerator[AnyEvent, None]:
        """The events of a turn until it commits or parks. `over`: it has ended, perhaps where its events cannot be
        read; `settle` waits until those are here that another worker has still to send. A gap in an earlier turn of the
        session is none of them."""
        own = split(turn_id, 1)[1][0]
        with FeedReader(self._channel) as reader:
            over.add_done_callback(reader.wake)
            try:
                while True:
                    taken = self._channel.take(self._position)
                    if taken is not None:
                        event, self._position = taken
                        if event.turn_id == turn_id or (type(event) is Gap and not _is_before(event.turn_id, own)):
                            yield event
                            if type(event) is TurnCommitted or type(event) is WaitingFor:
                                return
                    elif over.done() and settle is not None:
                        await settle()
                        settle = None
                    elif over.done():
                        return  # it ended in another process, whose events are not seen here
                    else:
                        await reader.wait()
            finally:
                over.remove_done_callback(reader.wake)


def _is_before(turn: str, own: int) -> bool:
    return turn != "" and split(turn, 1)[1][0] < own


class PartialOutputs:
    """The typed answer of a turn as its events tell it: values, and None where what was shown is taken back.

    An answer begins with its step, and again when an attempt is retracted. After a gap the rest of the step is passed
    over: its beginning is not known.
    """

    __slots__ = ("_gap", "_partial", "_schema", "_shown", "_step")

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._step: int | None = None
        self._partial: PartialOutput | None = None
        self._gap = self._shown = False

    def receive(self, event: AnyEvent) -> list[Any]:
        if isinstance(event, TextDelta):
            out = [] if event.step == self._step else self._begin(event.step)
            value = NOTHING if self._partial is None else self._partial.feed(event.text)
            if value is not NOTHING:
                self._shown = True
                out.append(value)
            return out
        if isinstance(event, Gap):
            out = self._begin(None)
            self._gap = True
            return out
        if isinstance(event, TurnStarted):  # also after a takeover: what follows begins with a step
            self._gap = False
            return self._begin(None)
        if isinstance(event, Retracted):
            self._gap = False
            return self._begin(event.step)
        return []

    def _begin(self, step: int | None) -> list[Any]:
        taken_back = [None] if self._shown else []
        self._partial = None if self._gap else PartialOutput(self._schema)
        self._step, self._shown, self._gap = step, False, False
        return taken_back


class BegunTurn:
    """A turn of another session that was begun, and its events from then on. It runs whether or not anybody listens."""

    __slots__ = ("_listener", "_outcomes", "turn_id")

    def __init__(self, outcomes: TurnOutcomes, listener: Listener, turn_id: str) -> None:
        self._outcomes, self._listener, self.turn_id = outcomes, listener, turn_id

    @property
    def events(self) -> AsyncGenerator[AnyEvent, None]:
        """Ends when the turn commits or parks. Reading on later goes on where reading was left."""
        return self._read()

    async def _read(self) -> AsyncGenerator[AnyEvent, None]:
        session_id, (turn,) = split(self.turn_id, 1)
        over = asyncio.create_task(self._outcomes.wait(session_id, turn, known=True))
        try:
            async for event in self._listener.events(self.turn_id, over):
                yield event
        finally:
            over.add_done_callback(_retrieve)  # `await_turn` reports how it ended: this task's own error is not used
            over.cancel()


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
