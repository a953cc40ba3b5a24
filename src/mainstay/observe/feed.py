"""Live events with cursors and bounded replay.

A session with readers has one channel: a bounded run of recent events that any number of readers walk at their
own pace. A writer never waits for a reader. A reader who falls behind, or comes with a cursor from before a restart,
gets a `Gap` event and goes on from there; a committed turn is never lost that way, because history is on disk.

A session without readers so far has no channel and its events are not even made: a cursor can only come from an event
that a reader has got.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any
from weakref import WeakValueDictionary

from mainstay.errors import InvalidCursor
from mainstay.model.codec import clean_text
from mainstay.model.event import AnyEvent, Gap, LiveEvent, ReasoningDelta, TextDelta, ToolCallDelta, TurnCommitted
from mainstay.model.ids import split, turn_id
from mainstay.model.own import own

REPLAY_EVENTS = 2048
REPLAY_SECONDS = 120.0

_DELTAS = frozenset((TextDelta, ReasoningDelta, ToolCallDelta))
"""Most events are pieces of text, in which there is nothing that a reader could change."""


class Reader:
    """One reader of a channel: registered there once, from its first wait to its last, and not for each event."""

    __slots__ = ("_channel", "waiter")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Reader:
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
    `unread`: no reader has taken anything since the newest event.
    """

    __slots__ = (
        "__weakref__",
        "_events",
        "_feed",
        "_prefix",
        "_suffix",
        "_times",
        "first",
        "head",
        "next",
        "over",
        "readers",
        "session_id",
        "unread",
    )

    def __init__(self, feed: Feed, session_id: str, start: int) -> None:
        self._feed, self.session_id = feed, session_id
        # Of its cursors, which are made for every piece of text.
        self._prefix, self._suffix = f"{feed.incarnation}:", f":{session_id}"
        self.first = self.next = start
        self.head: int | None = None
        self.over, self.unread = False, True
        self._events: deque[Any] = deque()
        self._times: deque[float] = deque()
        self.readers: set[Reader] = set()

    def publish(self, kind: type[LiveEvent], turn_id: str, fields: dict[str, Any]) -> None:
        self.next = position = self.next + 1
        self._events.append(kind(self.session_id, turn_id, f"{self._prefix}{position}{self._suffix}", **fields))
        self._times.append(self._feed.monotonic())
        if len(self._events) > REPLAY_EVENTS:
            self._drop()
        self.unread = True
        for reader in self.readers:
            if reader.waiter is not None and not reader.waiter.done():
                reader.waiter.set_result(None)

    def wake(self) -> None:
        for reader in self.readers:
            reader.wake()

    def trim(self, before: float) -> None:
        """Forget what is older than the replay time."""
        while self._times and self._times[0] < before:
            self._drop()

    def _drop(self) -> None:
        self._events.popleft()
        self._times.popleft()
        self.first += 1

    @property
    def busy(self) -> bool:
        return bool(self._events or self.readers)

    def take(self, position: int) -> tuple[AnyEvent, int] | None:
        """The event at `position`, with JSON of the reader's own, and the position after it.

        A gap when it is gone, None when it is yet to come.
        """
        if position < self.first:
            return self.gap("the reader fell behind the bounded replay"), self.first
        if position < self.next:
            self.unread = False
            event = self._events[position - self.first]
            return event if type(event) in _DELTAS else own(event), position + 1
        return None

    async def read(self, position: int, reason: str = "") -> AsyncGenerator[AnyEvent, None]:
        """Events from `position` on, until the feed is closed. With `reason`, a gap comes first."""
        if reason:
            yield self.gap(reason)
        with Reader(self) as reader:
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
        return Gap(self.session_id, "", self._feed.cursor(self.session_id, self.first), reason, last)


class Feed:
    """All channels of one Runtime. `incarnation` tells its cursors from those of another run."""

    def __init__(self, incarnation: str, monotonic: Callable[[], float]) -> None:
        self.incarnation, self.monotonic = incarnation, monotonic
        self._channels: dict[str, Channel] = {}
        # Channels without events, for as long as a reader holds one: what is published later must reach it.
        self._quiet: WeakValueDictionary[str, Channel] = WeakValueDictionary()
        self._hushed = False  # whether there may be any: asked for every event, and cheaper than counting them
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
        if channel is None and self._hushed:
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

    def cursor(self, session_id: str, position: int) -> str:
        return f"{self.incarnation}:{position}:{session_id}"

    def read(self, session_id: str, cursor: str | None) -> AsyncGenerator[AnyEvent, None]:
        """Events after `cursor`, or from now on. Raises InvalidCursor at once when it cannot be one of ours."""
        channel = self.channel(session_id)
        if cursor is None:
            return channel.read(channel.next)
        incarnation, position = _parse(cursor, session_id)
        if incarnation != self.incarnation:
            return channel.read(channel.first, "the cursor is from before this runtime started")
        if position > channel.next:
            raise InvalidCursor(cursor, "is ahead of its session")
        return channel.read(position)

    def trim(self) -> None:
        """Called now and then: forgets old events, and channels that have none."""
        before = self.monotonic() - REPLAY_SECONDS
        self._hushed = bool(self._quiet)
        for session_id, channel in list(self._channels.items()):
            channel.trim(before)
            if not channel.busy:
                self._quiet[session_id], self._hushed = self._channels.pop(session_id), True
                self._start = max(self._start, channel.next + 1)
        self.unread = not self._channels and not self._hushed


class TurnEvents:
    """The sink of one running turn.

    A piece of text is published at once when a reader has taken what came before it. Otherwise it is gathered with
    those that follow it in the same pass of the event loop: no reader can run in between.
    """

    __slots__ = ("_feed", "_loop", "_parts", "_session_id", "_step", "_turn_id")

    def __init__(self, feed: Feed, session_id: str, turn_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self._feed, self._session_id, self._turn_id, self._loop = feed, session_id, turn_id, loop
        self._parts: list[str] = []
        self._step = 0

    def emit(self, kind: type[LiveEvent], /, **fields: Any) -> None:
        if self._parts:
            self.flush()
        channel = None if self._feed.unread else self._feed.listening(self._session_id)
        if channel is not None:
            if kind is TurnCommitted:
                channel.head = split(self._turn_id, 1)[1][0]
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


def _parse(cursor: str, session_id: str) -> tuple[str, int]:
    try:
        incarnation, position, owner = cursor.split(":", 2)
        number = int(position)
    except (ValueError, AttributeError, TypeError):
        raise InvalidCursor(cursor, "is not a cursor") from None
    if owner != session_id:
        raise InvalidCursor(cursor, f"belongs to session {owner!r}, not {session_id!r}")
    if number < 0:
        raise InvalidCursor(cursor, "is not a cursor")
    return incarnation, number
