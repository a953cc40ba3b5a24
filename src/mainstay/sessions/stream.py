"""The events of one turn, for as long as it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from mainstay.model.event import AnyEvent, Gap, Retracted, TextDelta, TurnCommitted, WaitingFor
from mainstay.model.ids import split
from mainstay.observe.feed import Feed, Reader
from mainstay.sessions.parts import SessionParts
from mainstay.tools.partial import NOTHING, PartialOutput


class Listener:
    """Reads what a session tells from now on. Whoever falls behind finds a gap; nobody waits for a listener."""

    __slots__ = ("_channel", "_position")

    def __init__(self, feed: Feed, session_id: str) -> None:
        self._channel = feed.channel(session_id)
        self._position = self._channel.next

    def skip(self) -> None:
        """Forget what was told until now."""
        self._position = self._channel.next

    async def events(self, turn_id: str, over: asyncio.Future[Any]) -> AsyncGenerator[AnyEvent, None]:
        """The events of a turn until it commits or parks. `over`: it has ended, perhaps where nobody can hear it."""
        with Reader(self._channel) as reader:
            over.add_done_callback(reader.wake)
            try:
                while True:
                    taken = self._channel.take(self._position)
                    if taken is not None:
                        event, self._position = taken
                        if event.turn_id == turn_id or isinstance(event, Gap):
                            yield event
                            if isinstance(event, TurnCommitted | WaitingFor):
                                return
                    elif over.done():
                        return  # it ended in another process, whose events are not seen here
                    else:
                        await reader.wait()
            finally:
                over.remove_done_callback(reader.wake)


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

    __slots__ = ("_listener", "_parts", "turn_id")

    def __init__(self, parts: SessionParts, listener: Listener, turn_id: str) -> None:
        self._parts, self._listener, self.turn_id = parts, listener, turn_id

    @property
    def events(self) -> AsyncGenerator[AnyEvent, None]:
        """Ends when the turn commits or parks. Reading on later goes on where reading was left."""
        return self._read()

    async def _read(self) -> AsyncGenerator[AnyEvent, None]:
        session_id, (turn,) = split(self.turn_id, 1)
        over = asyncio.create_task(self._parts.outcomes.wait(session_id, turn, known=True))
        try:
            async for event in self._listener.events(self.turn_id, over):
                yield event
        finally:
            over.add_done_callback(_look_at)  # `await_turn` tells how it ended; nobody asks the task
            over.cancel()


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
