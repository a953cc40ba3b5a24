"""Server-sent events, sans-IO: the bytes of a response body in, whole events out.

Follows the WHATWG rules for `text/event-stream`: a line ends with LF, CR or CRLF, a blank line ends an event, lines
that begin with a colon are comments, several `data` lines are joined by LF. An event that the end of the body cuts
off is never handed out. A chunk may end inside a UTF-8 character, an event never does: one that is no UTF-8 is refused,
so that no later decoding of a part of it can fail.
"""

from __future__ import annotations

from typing import NamedTuple

from perdure.errors import ProviderError

MAX_EVENT = 64 * 1024 * 1024
"""Bytes of one event. A server that sends more in one is broken, and would fill our memory."""


class ServerSentEvent(NamedTuple):
    """`event` is empty where the server named none."""

    event: str
    data: bytes


class SseReader:
    """Reads one response body."""

    def __init__(self, limit: int = MAX_EVENT) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []  # of a line whose end has not come yet
        self._after_cr = False  # the last byte was a CR: an LF that follows belongs to it
        self._begun = False
        self._event = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that these bytes complete, in order."""
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        if not chunk:
            return []
        self._size += len(chunk)
        events: list[ServerSentEvent] = []
        lines = chunk.splitlines(keepends=True)
        if self._pieces:
            if len(lines) == 1 and lines[0][-1:] not in b"\r\n":  # joined once, when the line ends: not once per chunk
                self._pieces.append(chunk)
                return self._bounded(events)
            lines[0] = b"".join([*self._pieces, lines[0]])
            self._pieces.clear()
        last = lines[-1]
        if last.endswith(b"\r"):
            self._after_cr = True
        elif not last.endswith(b"\n"):
            self._pieces.append(lines.pop())
        if not self._begun and lines:
            self._begun = True
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        for line in lines:
            self._line(line.rstrip(b"\r\n"), events)
        return self._bounded(events)

    def _line(self, line: bytes, events: list[ServerSentEvent]) -> None:
        if not line:
            if self._data:
                events.append(ServerSentEvent(self._event, _text(b"\n".join(self._data))))
                self._data = []
                self._size = sum(map(len, self._pieces))
            self._event = ""
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._event = value.removeprefix(b" ").decode("utf-8", "replace")

    def _bounded(self, events: list[ServerSentEvent]) -> list[ServerSentEvent]:
        if not self._pieces and not self._data:
            self._size = 0
        if self._size > self._limit:
            raise ProviderError(
                f"the provider sent an event of more than {self._limit:,} bytes: it is not the API it is taken for, "
                "or it is broken",
                code="provider_nonsense",
            )
        return events


def _text(data: bytes) -> bytes:
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError:
            shown = data[:200].decode("utf-8", "replace")
            raise ProviderError(
                f"the provider sent an event that is no UTF-8: {shown!r}", code="provider_nonsense"
            ) from None
    return data
