"""Live events with cursors and bounded replay.

A session with readers has one channel: a bounded run of recent events that any number of readers walk at their
own pace. A writer never waits for a reader. A reader who falls behind, or comes with a cursor from before a restart,
gets a `Gap` event and goes on from there; a committed turn is never lost that way, because history is on disk.

A session without readers so far has no channel and its events are not even made: a cursor can only come from an event
that a reader has got.

A cursor is `<incarnation>:<position>:<session>`, and tells after its position how far turns were told there, so that
another Runtime can go on from it and knows whether anything is missing:

    17.6        turns below 6 are told, and none was under way
    17.6+       turn 6 was under way
    17.6=3      turn 6 was parked, in generation 3 of its session

Other Runtimes on this machine read a channel over a socket (`remote.py`), and copy what they read into one of their own
(`relay.py`). They are sent what turns of this Runtime emit; `relayed`, which came from another worker or from the
store, they get from there themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

from msgspec import Struct

from perdure.errors import InvalidCursor
from perdure.model.codec import clean_text, copied
from perdure.model.event import (
    AnyEvent,
    Gap,
    LiveEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    TurnCommitted,
    TurnStarted,
    WaitingFor,
)
from perdure.model.ids import split, turn_id

REPLAY_EVENTS = 2048
REPLAY_SECONDS = 120.0

DELTAS = frozenset((TextDelta, ReasoningDelta, ToolCallDelta))
"""Most events are pieces of text, in which there is nothing that a reader could change."""
_MARKING = frozenset((TurnStarted, TurnCommitted, WaitingFor))
_PLACE = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,15})(?:(\+)|=([0-9]{1,15}))?)?", re.ASCII)


class Cursor(Struct, frozen=True):
    """A cursor that was read. All turns below `turn` were told; None when that is not known, as in older cursors.

    `state` is how that turn was: "" not begun, "+" under way, "=" parked in this `generation` of its session.
    """

    incarnation: str
    position: int
    turn: int | None = None
    state: Literal["", "+", "="] = ""
    generation: int = 0


class ChannelListener(Protocol):
    """What is told that a channel has something new, or has ended."""

    def wake(self, _: object = None) -> None: ...


class FeedReader:
    """One reader of a channel: registered there once, from its first wait to its last, and not for each event."""

    __slots__ = ("_channel", "waiter")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> FeedReader:
        self._channel.readers.add(self)
        return self

    def __exit__(self, *how: object) -> None:
        self._channel.readers.discard(self)

    def wake(self, _: object = None) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self) -> None:
        """Until something is published, or the channel ends. Nothing may be awaited between a look and this."""
        self.waiter = asyncio.get_running_loop().create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None


class Channel:
    """Recent events of one session. `first` is the position of the oldest kept, `next` of the one to come.

    `head` is the newest turn that readers know to be committed, if that was read; `over`: the session is deleted;
    `unread`: no reader has taken anything since the newest event. `subscribers` are readers in other OS
    processes. `relayed` is the cursor of the newest event that came from another worker; what is published after it has
    the same one, because only that worker can be asked for what follows. `_relayed` are the positions of events that
    turns of other workers emitted, or that were read from the store.
    """

    __slots__ = (
        "__weakref__",
        "_events",
        "_feed",
        "_prefix",
        "_relayed",
        "_suffix",
        "_times",
        "first",
        "head",
        "next",
        "over",
        "readers",
        "relayed",
        "session_id",
        "subscribers",
        "unread",
    )

    def __init__(self, feed: Feed, session_id: str, start: int) -> None:
        self._feed, self.session_id = feed, session_id
        # Of its cursors, which are made for every piece of text.
        self._prefix, self._suffix = f"{feed.incarnation}:", f":{session_id}"
        self.first = self.next = start
        self.head: int | None = None
        self.over, self.unread = False, True
        self.relayed = ""
        self._events: deque[Any] = deque()
        self._times: deque[float] = deque()
        self._relayed: set[int] = set()
        self.readers: set[FeedReader] = set()
        self.subscribers: set[ChannelListener] = set()

    def publish(self, kind: type[LiveEvent], turn_id: str, fields: dict[str, Any]) -> None:
        # Every piece of text passes here: what `relay` shares with it is written out twice.
        self.next = position = self.next + 1
        cursor = self.relayed or f"{self._prefix}{position}{self._suffix}"
        self._events.append(kind(self.session_id, turn_id, cursor, **fields))
        self._times.append(self._feed.monotonic())
        if len(self._events) > REPLAY_EVENTS:
            self._drop()
        self.unread = True
        for reader in self.readers:
            if reader.waiter is not None and not reader.waiter.done():
                reader.waiter.set_result(None)
        if self.subscribers:
            for subscriber in self.subscribers:
                subscriber.wake()

    def publish_relayed(self, kind: type[LiveEvent], turn_id: str, fields: dict[str, Any]) -> None:
        """Publish what was read from the store, where every Runtime can find it."""
        self._relayed.add(self.next)
        self.publish(kind, turn_id, fields)

    def publish_gap(self, reason: str, turn: str = "") -> None:
        """Publish a gap in what came from another worker, or before the end of a `turn` that the store tells of."""
        last = turn or (turn_id(self.session_id, self.head) if self.head else "")
        self.relayed = ""
        self.publish_relayed(Gap, turn, {"reason": reason, "last_committed": last})

    def set_head(self, head: int) -> None:
        """Readers know of the turns up to this one, and are to be told of those after it."""
        self.head = head

    def relay(self, event: AnyEvent) -> None:
        """Publish an event of another worker. It is sent to no other Runtime: those follow that worker themselves."""
        self._relayed.add(self.next)
        self.next += 1
        self.relayed = event.cursor
        self._events.append(event)
        self._times.append(self._feed.monotonic())
        if len(self._events) > REPLAY_EVENTS:
            self._drop()
        self.unread = True
        for reader in self.readers:
            reader.wake()

    def mark(self, kind: type[LiveEvent], turn: str, generation: int) -> None:
        """A turn begins, parks or ends with the next event: its cursor, and those after it, tell so."""
        number = split(turn, 1)[1][0]
        if kind is TurnCommitted:
            self.head, place = number, f".{number + 1}"
        else:
            place = f".{number}+" if kind is TurnStarted else f".{number}={generation}"
        self._suffix = f"{place}:{self.session_id}"

    def wake(self) -> None:
        for reader in (*self.readers, *self.subscribers):
            reader.wake()

    def trim(self, before: float) -> None:
        """Forget what is older than the replay time."""
        while self._times and self._times[0] < before:
            self._drop()

    def _drop(self) -> None:
        self._events.popleft()
        self._times.popleft()
        self._relayed.discard(self.first)
        self.first += 1

    @property
    def busy(self) -> bool:
        return bool(self._events or self.readers or self.subscribers)

    def take(self, position: int) -> tuple[AnyEvent, int] | None:
        """The event at `position`, with JSON of the reader's own, and the position after it.

        A gap when it is gone, None when it is yet to come.
        """
        if position < self.first:
            return self.gap("the reader fell behind the bounded replay"), self.first
        if position < self.next:
            self.unread = False
            event = self._events[position - self.first]
            return event if type(event) in DELTAS else copied(event), position + 1
        return None

    def own_events(self, position: int, limit: int = REPLAY_EVENTS) -> tuple[list[AnyEvent], int]:
        """Events from `position` on that turns of this Runtime emitted, not to be changed, and the position after them.
        A gap comes first where some are gone."""
        self.unread = False
        begin, events = position, list[AnyEvent]()
        if position < self.first:
            begin = self.first
            events.append(self.gap("the reader fell behind the bounded replay"))
        end = min(begin + limit, self.next)
        if begin + 1 == self.next and not self._relayed:
            events.append(self._events[-1])  # the usual case, without indexing into the middle
        else:
            kept = itertools.islice(self._events, begin - self.first, end - self.first)
            events += [event for at, event in enumerate(kept, begin) if at not in self._relayed]
        return events, end

    def from_turn(self, turn: int) -> int:
        """The position of the first event that is kept of this turn, or a later one."""
        found = self.next
        for position in range(self.next - 1, self.first - 1, -1):
            about = self._events[position - self.first].turn_id
            if about and split(about, 1)[1][0] < turn:
                break
            found = position if about else found
        return found

    def resuming(self, wanted: Cursor) -> int:
        """Where a reader with this cursor goes on after a gap: with the first turn that the gap does not name as
        committed. A cursor that names no turn is from before all that is kept."""
        return self.first if wanted.turn is None else self.from_turn((self.head or 0) + 1)

    def after(self, cursor: str) -> int | None:
        """The position after the first event with this cursor; None when there is none."""
        for position, event in enumerate(self._events, self.first):
            if event.cursor == cursor:
                return position + 1
        return None

    async def read(self, position: int, reason: str = "") -> AsyncGenerator[AnyEvent, None]:
        """Events from `position` on, until the feed is closed. With `reason`, a gap comes first."""
        if reason:
            yield self.gap(reason)
        with FeedReader(self) as reader:
            while True:
                taken = self.take(position)
                if taken is not None:
                    event, position = taken
                    yield event
                elif self._feed.closed or self.over:
                    return
                else:
                    await reader.wait()

    def gap(self, reason: str) -> Gap:
        last = turn_id(self.session_id, self.head) if self.head else ""
        return Gap(self.session_id, "", f"{self._feed.incarnation}:{self.first}:{self.session_id}", reason, last)


class Feed:
    """All channels of one Runtime. `incarnation` tells its cursors from those of another run."""

    def __init__(self, incarnation: str, monotonic: Callable[[], float]) -> None:
        self.incarnation, self.monotonic = incarnation, monotonic
        self._channels: dict[str, Channel] = {}
        # Channels without events, for as long as a reader holds one: what is published later must reach it.
        self._quiet: WeakValueDictionary[str, Channel] = WeakValueDictionary()
        self._some_quiet = False  # whether there may be any: asked for every event, and cheaper than counting them
        self.unread = True  # no session has a channel, nor had one since the last `trim`: nothing needs to be looked up
        # Where new channels begin: beyond all that were dropped, so that a cursor of one of those is a gap.
        self._start = 0
        self.closed = False

    def close(self) -> None:
        """Readers see what there is, and then the end."""
        self.closed = True
        for channel in (*self._channels.values(), *self._quiet.values()):
            channel.wake()

    def channel(self, session_id: str) -> Channel:
        """The session's channel, from now on kept for readers that come back with a cursor."""
        channel = self.listening(session_id)
        if channel is None:
            channel = self._channels[session_id] = Channel(self, session_id, self._start)
            self.unread = False
        return channel

    def listening(self, session_id: str) -> Channel | None:
        """The session's channel, if it has readers or had some not long ago."""
        channel = self._channels.get(session_id)
        if channel is None and self._some_quiet:
            channel = self._quiet.pop(session_id, None)
            if channel is not None:
                self._channels[session_id] = channel
        return channel

    def end(self, session_id: str) -> None:
        """The session is deleted: readers see what there is, and then the end."""
        channel = self.listening(session_id)
        if channel is not None:
            del self._channels[session_id]
            self._start = max(self._start, channel.next + 1)
            channel.over = True
            channel.wake()

    def behind(self, session_id: str, head: int) -> bool:
        """Whether a turn up to `head` was committed that readers have not heard of. The first one knows all so far."""
        channel = self.listening(session_id)
        if channel is not None and channel.head is None:
            channel.head = head
        return channel is not None and channel.head is not None and channel.head < head

    @property
    def sessions(self) -> list[str]:
        """The sessions that have readers, or had some not long ago."""
        return [*self._channels, *self._quiet] if self._channels or self._quiet else []

    def parse(self, cursor: object, session_id: str) -> Cursor:
        """Read a cursor. Raises InvalidCursor when it cannot be one of this session."""
        parts = cursor.split(":", 2) if isinstance(cursor, str) else []
        place = _PLACE.fullmatch(parts[1]) if len(parts) == 3 else None
        if place is None:
            raise InvalidCursor(cursor, "is not a cursor")
        if parts[2] != session_id:
            raise InvalidCursor(cursor, f"belongs to session {parts[2]!r}, not {session_id!r}")
        position, turn, under_way, generation = place.groups()
        state: Literal["", "+", "="] = "+" if under_way else "=" if generation else ""
        found = Cursor(parts[0], int(position), None if turn is None else int(turn), state, int(generation or 0))
        if found.incarnation == self.incarnation and found.position > self.channel(session_id).next:
            raise InvalidCursor(cursor, "is ahead of its session")
        return found

    def trim(self) -> None:
        """Called now and then: forgets old events, and channels that have none."""
        before = self.monotonic() - REPLAY_SECONDS
        self._some_quiet = bool(self._quiet)
        for session_id, channel in list(self._channels.items()):
            channel.trim(before)
            if not channel.busy:
                self._quiet[session_id], self._some_quiet = self._channels.pop(session_id), True
                self._start = max(self._start, channel.next + 1)
        self.unread = not self._channels and not self._some_quiet


@dataclass(slots=True, eq=False)
class TurnEvents:
    """The sink of one running turn.

    A piece of text is published at once when a reader has taken what came before it. Otherwise it is gathered with
    those that follow it in the same pass of the event loop: no reader can run in between.
    """

    _feed: Feed
    _session_id: str
    _turn_id: str
    _loop: asyncio.AbstractEventLoop
    _generation: int = 0
    _parts: list[str] = field(default_factory=list)
    _step: int = 0

    def emit(self, kind: type[LiveEvent], /, **fields: Any) -> None:
        if self._parts:
            self.flush()
        channel = None if self._feed.unread else self._feed.listening(self._session_id)
        if channel is not None:
            if kind in _MARKING:
                channel.relayed = ""
                channel.mark(kind, self._turn_id, self._generation)
            channel.publish(kind, self._turn_id, fields)

    def text(self, step: int, text: str) -> None:
        if not self._parts or step != self._step:
            if self._parts:
                self.flush()
            channel = None if self._feed.unread else self._feed.listening(self._session_id)
            if channel is None:
                return
            if not channel.unread:
                channel.publish(TextDelta, self._turn_id, {"text": clean_text(text), "step": step})
                return
            self._step = step
            self._loop.call_soon(self.flush)
        self._parts.append(text)

    def flush(self) -> None:
        if self._parts:
            text, self._parts = clean_text("".join(self._parts)), []
            channel = self._feed.listening(self._session_id)
            if channel is not None:
                channel.publish(TextDelta, self._turn_id, {"text": text, "step": self._step})
