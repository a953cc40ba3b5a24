"""Live events over a socket: from the worker that runs a turn to other Runtimes on this machine.

A worker listens on a socket that its store gives it (`WorkerSockets.new_socket`) and its row names. The socket is its
owner's alone, and each end asks the kernel which user the other one is before it sends anything.

Frames are a length of four bytes and JSON. The reader begins with `Hello`; then it may ask:

    Subscribe     events of a session from a cursor of this worker on, or from a turn on; answered by `RelayDone`
    Unsubscribe
    StateRequest  what the worker does for a session; answered by `RelayDone` after every event published until then
    ReplayRequest the events kept after a cursor, in one frame (`Replayed`), beside what is subscribed to

or say, without an answer:

    Wrote         something in the store is new, so that the worker need not wait for its next poll

A worker that is left sends `Bye` after its last event: nothing of what it published is missing. A connection that ends
without it leaves that open.

Nothing here makes a turn wait. Events stay in the bounded channel of their session until the kernel takes them; a
reader that does not read is sent a gap when it goes on, and is disconnected after `STALLED` seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from perdure.errors import InvalidCursor, LiveEventsUnavailable
from perdure.model.event import AnyEvent, Gap
from perdure.observe.feed import Channel, Feed
from perdure.ports.store import WorkerSocket

log = logging.getLogger("perdure.observe")

VERSION = 1
MAX_ASK = 1 << 16
MAX_FRAME = 1 << 26
BUFFER = 1 << 18
"""Bytes that wait for a reader in this process; more stay in the channels."""
AT_ONCE = 64
"""Events of a session that are written at once; then it is seen whether the kernel takes more."""
PACE = 0.008
"""Seconds between two sendings of events to one reader: what is published after them is sent with the event at hand."""
LATEST = 0.012
"""Seconds after a sending in which all is sent that was published since, also if nothing follows it."""
STALLED = 30.0
READERS = 512
"""Connections at a time. A Runtime needs one for all of its sessions."""
ANSWER_SECONDS = 5.0

_LENGTH = struct.Struct(">I")
_PEER = struct.Struct("3i")


# ---------------------------------------------------------------------- frames


class Hello(Struct, frozen=True, tag_field="ask", tag="hello"):
    """What a reader believes to talk to."""

    version: int
    worker: str
    store: str


class Subscribe(Struct, frozen=True, tag_field="ask", tag="subscribe", omit_defaults=True):
    """Without a cursor, everything that is kept of turns from `since` on, and then what comes."""

    number: int
    session_id: str
    cursor: str = ""
    since: int = 0


class Unsubscribe(Struct, frozen=True, tag_field="ask", tag="unsubscribe"):
    session_id: str


class StateRequest(Struct, frozen=True, tag_field="ask", tag="ask"):
    number: int
    session_id: str


class ReplayRequest(Struct, frozen=True, tag_field="ask", tag="replay"):
    number: int
    session_id: str
    cursor: str


class Wrote(Struct, frozen=True, tag_field="ask", tag="wrote"):
    """A hint: the worker polls its store in any case, four times a second."""


class Welcome(Struct, frozen=True, tag_field="event", tag="live_welcome"):
    worker: str


class RelayRefused(Struct, frozen=True, tag_field="event", tag="live_refused"):
    reason: str


class RelayDone(Struct, frozen=True, tag_field="event", tag="live_done", omit_defaults=True):
    """`works` is the turn of the session that a task of the worker is at, until its end was announced, or 0. `lost` is
    why events after the cursor are missing."""

    number: int
    works: int = 0
    lost: str = ""


class Replayed(Struct, frozen=True, tag_field="event", tag="live_replayed", omit_defaults=True):
    number: int
    events: list[AnyEvent] | None = None


class Bye(Struct, frozen=True, tag_field="event", tag="live_bye"):
    """The worker is left."""


Request: TypeAlias = Subscribe | StateRequest | ReplayRequest
_REQUESTS = msgspec.json.Decoder(Hello | Subscribe | Unsubscribe | StateRequest | ReplayRequest | Wrote)
_ANSWERS = msgspec.json.Decoder(AnyEvent | Welcome | RelayRefused | RelayDone | Replayed | Bye)
_encode = msgspec.json.Encoder().encode


def _frame(message: Struct) -> bytes:
    data = _encode(message)
    return _LENGTH.pack(len(data)) + data


class _Frames:
    """Cuts what arrives into frames of at most `limit` bytes."""

    __slots__ = ("_data", "_limit")

    def __init__(self, limit: int) -> None:
        self._data, self._limit = bytearray(), limit

    def receive(self, data: bytes) -> list[bytes]:
        """The frames that are complete now. Raises ValueError for one that is too large."""
        self._data += data
        found, begin, have = list[bytes](), 0, len(self._data)
        while have - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, begin)
            if length > self._limit:
                raise ValueError(f"a frame of {length} bytes")
            if have - begin < _LENGTH.size + length:
                break
            begin += _LENGTH.size
            found.append(bytes(self._data[begin : begin + length]))
            begin += length
        del self._data[:begin]
        return found


# ---------------------------------------------------------------------- who the other end is


def _peer(connection: socket.socket) -> int | None:
    """Which user the other end is; None where the platform does not tell, and the file's owner has to do."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    return int(_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _PEER.size))[1])


# ---------------------------------------------------------------------- the worker's end


class LiveServer:
    """Sends events of a worker's turns to Runtimes that subscribe. `works_on` is the turn of a session that a task here
    is at; `written` is set when another Runtime says that it wrote."""

    def __init__(self, feed: Feed, store: str, works_on: Callable[[str], int], written: asyncio.Event) -> None:
        self.feed, self.store, self.works_on, self.written = feed, store, works_on, written
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, path: str) -> None:
        """Begin to listen. What fails is logged: other Runtimes then hear of turns from the store alone."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)
            listening.bind(path)
            os.chmod(path, 0o600)  # nothing can connect before the server listens
            loop = asyncio.get_running_loop()
            # In two steps: a cancel in the midst of the second finds a server that `close` knows of.
            self._server = await loop.create_unix_server(lambda: _Connection(self), sock=listening, start_serving=False)
            await self._server.start_serving()
        except OSError as error:
            listening.close()
            log.warning("other processes cannot follow turns of this Runtime live: %s: %s", path, error)

    def close(self) -> None:
        """Send what there is, then the end."""
        for connection in list(self.connections):
            connection.leave()
        self.abandon()

    def abandon(self) -> None:
        """Let go of everything at once, as a crash would."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.abort()


class _Subscription:
    """A session that one connection reads: the position that was sent last."""

    __slots__ = ("_connection", "channel", "position")

    def __init__(self, connection: _Connection, channel: Channel, position: int) -> None:
        self._connection, self.channel, self.position = connection, channel, position
        channel.subscribers.add(self)

    def wake(self, _: object = None) -> None:
        self._connection.schedule(self)

    def end(self) -> None:
        self.channel.subscribers.discard(self)


class _Connection(asyncio.Protocol):
    """One Runtime that reads. `_waiting` are subscriptions with events that are not sent yet."""

    def __init__(self, server: LiveServer) -> None:
        self._server, self._frames = server, _Frames(MAX_ASK)
        self._loop = asyncio.get_running_loop()
        self._subscriptions: dict[str, _Subscription] = {}
        self._waiting: dict[_Subscription, None] = {}
        self._full = self._known = False
        self._sent = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=BUFFER)
        self._server.connections.add(self)
        peer = _peer(transport.get_extra_info("socket"))
        if peer is not None and peer not in (os.geteuid(), 0):
            log.warning("user %d asked for live events of user %d: refused", peer, os.geteuid())
            transport.abort()
        elif len(self._server.connections) > READERS:
            self._refuse(f"{READERS} Runtimes read its events already")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.connections.discard(self)
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        for subscription in self._subscriptions.values():
            subscription.end()
        self._subscriptions.clear()
        self._waiting.clear()

    # ------------------------------------------------------------------ asking

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.receive(data):
                self._answer(_REQUESTS.decode(frame))
        except (ValueError, RecursionError) as error:  # also what msgspec cannot decode
            self._refuse(f"this is no request: {error}")

    def _answer(self, asked: Hello | Request | Unsubscribe | Wrote) -> None:
        server = self._server
        if isinstance(asked, Hello):
            known = (VERSION, server.feed.incarnation, server.store)
            if (asked.version, asked.worker, asked.store) != known:
                self._refuse(f"it speaks version {VERSION} for worker {known[1]} of store {known[2]}")
            else:
                self._known = True
                self._send(_frame(Welcome(server.feed.incarnation)))
        elif not self._known:
            self._refuse("say who you are first")
        elif isinstance(asked, Unsubscribe):
            subscription = self._subscriptions.pop(asked.session_id, None)
            if subscription is not None:
                self._waiting.pop(subscription, None)
                subscription.end()
        elif isinstance(asked, Wrote):
            server.written.set()
        elif isinstance(asked, Subscribe):
            self._subscribe(asked)
        elif isinstance(asked, StateRequest):
            self._flush()
            self._send(_frame(RelayDone(asked.number, server.works_on(asked.session_id))))
        else:
            self._replay(asked)

    def _subscribe(self, asked: Subscribe) -> None:
        feed, lost = self._server.feed, ""
        channel = feed.channel(asked.session_id)
        if asked.cursor:
            position = _position(feed, asked)
            lost = "the reader fell behind the bounded replay" if position < channel.first else ""
        else:
            position = channel.from_turn(asked.since)
        before = self._subscriptions.get(asked.session_id)
        if before is not None:
            self._waiting.pop(before, None)
            before.end()
        subscription = _Subscription(self, channel, max(position, channel.first))
        self._subscriptions[asked.session_id] = subscription
        self._send(_frame(RelayDone(asked.number, self._server.works_on(asked.session_id), lost)))
        if subscription.position < channel.next:
            self.schedule(subscription)

    def _replay(self, asked: ReplayRequest) -> None:
        feed = self._server.feed
        channel, position = feed.channel(asked.session_id), _position(feed, asked)
        events = None if position < channel.first else channel.own_events(position)[0]
        answer = _frame(Replayed(asked.number, events))
        self._send(answer if len(answer) <= MAX_FRAME else _frame(Replayed(asked.number)))

    # ------------------------------------------------------------------ sending

    def schedule(self, subscription: _Subscription) -> None:
        """A subscription has something new: it is sent at once, or with what comes within `PACE` of the last sending.

        To wake another process costs more than everything else here, and a pass of the event loop nearly as much. So
        the timer is for the last of several events; while more come, the first one after `PACE` sends all, in its pass.
        """
        self._waiting[subscription] = None
        if self._full:
            return
        if self._loop.time() >= self._sent + PACE:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._sent + LATEST, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sent = self._loop.time()
        while self._waiting and not self._full:
            subscription, _ = self._waiting.popitem()
            channel = subscription.channel
            events, subscription.position = channel.own_events(subscription.position, AT_ONCE)
            if subscription.position < channel.next:
                self._waiting[subscription] = None
            if events:
                self._send(b"".join([_sendable(event) for event in events]))

    def _send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._full = True
        self._transport.pause_reading()  # a reader that asks and does not read must not fill the buffer either
        self._stalled = self._loop.call_later(STALLED, self._transport.abort)

    def resume_writing(self) -> None:
        self._full = False
        if self._stalled is not None:
            self._stalled.cancel()
        if self._transport is not None:
            self._transport.resume_reading()
            self._flush()

    def _refuse(self, why: str) -> None:
        self._send(_frame(RelayRefused(why)))
        if self._transport is not None:
            self._transport.close()

    def leave(self) -> None:
        """Send what there is and the end, as far as the reader takes it at once."""
        self._flush()
        if not self._full and not self._waiting:
            self._send(_frame(Bye()))
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()


def _position(feed: Feed, asked: Subscribe | ReplayRequest) -> int:
    """Where a cursor leads in this feed; before its beginning when it is none of it."""
    try:
        cursor = feed.parse(asked.cursor, asked.session_id)
    except InvalidCursor:
        return -1
    return cursor.position if cursor.incarnation == feed.incarnation else -1


def _sendable(event: AnyEvent) -> bytes:
    """The frame of an event; that of a gap where there is none."""
    try:
        frame = _frame(event)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        log.warning("a live event of session %s cannot be sent: %s", event.session_id, error)
        return _frame(Gap(event.session_id, "", event.cursor, f"an event cannot be sent: {error}"))
    if len(frame) > MAX_FRAME:
        return _frame(Gap(event.session_id, "", event.cursor, "an event is too large to be sent"))
    return frame


# ---------------------------------------------------------------------- the reader's end


class LinkEvents(Protocol):
    """Who hears of what a link brings."""

    def receive(self, worker_id: str, event: AnyEvent) -> None: ...

    def lost(self, link: Link, left: bool) -> None:
        """The connection is over. `left`: the worker was left, and everything that it had published has come."""
        ...


class Link(asyncio.Protocol):
    """A connection to one worker, for all sessions that are followed here."""

    def __init__(self, worker_id: str, events: LinkEvents) -> None:
        self.worker_id, self._events = worker_id, events
        self._frames = _Frames(MAX_FRAME)
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[RelayDone | Replayed]] = {}
        self._welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._left = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        waiting: list[asyncio.Future[Any]] = [self._welcome, *self._asked.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(self._broken())
                future.exception()  # it may have no reader any more
        self._asked.clear()
        self._events.lost(self, self._left)

    def _broken(self) -> LiveEventsUnavailable:
        return LiveEventsUnavailable(self.worker_id, "the connection ended", gone=True)

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.receive(data):
                self._receive(_ANSWERS.decode(frame))
        except (ValueError, RecursionError) as error:  # also what msgspec cannot decode
            log.warning("worker %s sends what is not understood here: %s", self.worker_id, error)
            self.abort()

    def _receive(self, message: AnyEvent | Welcome | RelayRefused | RelayDone | Replayed | Bye) -> None:
        if isinstance(message, RelayDone | Replayed):
            future = self._asked.pop(message.number, None)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Welcome):
            if not self._welcome.done():
                self._welcome.set_result(None)
        elif isinstance(message, Bye):
            self._left = True
        elif isinstance(message, RelayRefused):
            if not self._welcome.done():
                self._welcome.set_exception(LiveEventsUnavailable(self.worker_id, message.reason))
            self.abort()
        else:
            self._events.receive(self.worker_id, message)

    async def greet(self, store: str, users: frozenset[int]) -> None:
        """Make sure of the other end before anything is sent to it, then wait until it agrees."""
        transport = self._transport
        if transport is None:
            raise self._broken()
        peer = _peer(transport.get_extra_info("socket"))
        if peer is not None and peer not in users:
            raise LiveEventsUnavailable(self.worker_id, f"its socket is served by user {peer}")
        transport.write(_frame(Hello(VERSION, self.worker_id, store)))
        await self._welcome

    async def ask(self, make: Callable[[int], Request]) -> RelayDone | Replayed:
        """Send a request and wait for its answer. Raises LiveEventsUnavailable when there is none."""
        if self._transport is None:
            raise self._broken()
        number = next(self._numbers)
        future: asyncio.Future[RelayDone | Replayed] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._transport.write(_frame(make(number)))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await future
        except TimeoutError:
            raise LiveEventsUnavailable(self.worker_id, f"it did not answer within {ANSWER_SECONDS:g} s") from None
        finally:
            self._asked.pop(number, None)

    def say(self, what: Unsubscribe | Wrote) -> None:
        if self._transport is not None:
            self._transport.write(_frame(what))

    def abort(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()


async def connect(where: WorkerSocket, store: str, worker_id: str, events: LinkEvents) -> Link:
    """A link to a worker. Raises LiveEventsUnavailable, with the reason."""
    link = Link(worker_id, events)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await asyncio.get_running_loop().create_unix_connection(lambda: link, where.path)
            await link.greet(store, where.users)
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise LiveEventsUnavailable(worker_id, f"{where.path}: {error.strerror}", gone=True) from None
    except OSError as error:  # TimeoutError is one of them
        link.abort()
        why = error.strerror or f"it did not answer within {ANSWER_SECONDS:g} s"
        raise LiveEventsUnavailable(worker_id, f"{where.path}: {why}") from None
    except BaseException:  # also a cancellation: the connection has no other owner yet
        link.abort()
        raise
    return link
