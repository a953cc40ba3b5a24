"""Reading what a command wrote: by offset, as it comes, and in sum.

Offsets are bytes. `stdout` and `stderr` are files of exact bytes; `combined` is both in the order in which the shim
read them, found through the index. Two writes of the command that are close together may have been read in the other
order: the pipes are two.

While a shim lives, `combined` ends where the index ends. Of one that died, or could not write its index, the rest
follows, stdout first.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import os
import struct
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Literal, NamedTuple

from perdure.commands import shim
from perdure.commands.job import POLL, Job
from perdure.errors import InvalidInput
from perdure.model.command import Stream, whole_characters

BLOCK = 1 << 18
LARGEST = 1 << 20
"""Bytes that one read returns at most."""
_ENTRY = struct.Struct("<QQQII")
_STREAMS: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")


class Chunk(NamedTuple):
    """Some bytes, the offset after them, how many bytes there are now, and whether there will be no more than these."""

    data: bytes
    next: int
    total: int
    eof: bool


class OutputPiece(NamedTuple):
    """Some of one stream: where it is in the combined output and in its own, and when it was read, in ms."""

    stream: Literal["stdout", "stderr"]
    combined: int
    offset: int
    length: int
    time: int


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """One stream in sum. `head` and `tail` are its beginning and its end as text; if it is not `truncated`, `head` is
    all of it. Bytes that are no UTF-8 are replaced, and no character is cut."""

    bytes: int
    lines: int
    sha256: str
    head: str
    tail: str
    truncated: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """Both streams in sum. `missing` is how many bytes the shim wrote that are not in the files: it is 0 unless the
    machine lost power, or somebody deleted them."""

    stdout: StreamSummary
    stderr: StreamSummary
    combined_sha256: str
    missing: int


def read(job: Job, stream: Stream, after: int = 0, limit: int = BLOCK) -> Chunk:
    """Bytes from an offset on, at most `limit`; none if there are none yet. Raises InvalidInput past the end."""
    if stream not in ("stdout", "stderr", "combined"):
        raise InvalidInput(f"a command has no stream {stream!r}: use stdout, stderr or combined")
    if limit < 1:
        raise InvalidInput(f"limit={limit}: ask for at least one byte")
    limit = min(limit, LARGEST)
    ended = job.status() is not None or not job.held()  # before the sizes: what is there then is all
    with ExitStack() as stack:
        view = _View(job, stack, ended)
        total = view.combined if stream == "combined" else view.sizes[stream]
        if not 0 <= after <= total:
            raise InvalidInput(f"offset {after} is not within the {total} bytes of {stream}")
        if stream == "combined":
            parts, room = [], limit
            for piece in view.pieces(after):
                skip = max(0, after - piece.combined)
                parts.append(view.bytes_of(piece.stream, piece.offset + skip, min(piece.length - skip, room)))
                room -= len(parts[-1])
                if room <= 0:
                    break
            data = b"".join(parts)
        else:
            data = view.bytes_of(stream, after, min(limit, total - after))
    end = after + len(data)
    return Chunk(data, end, total, ended and end == total)


async def follow(job: Job, stream: Stream, after: int = 0, limit: int = BLOCK) -> AsyncGenerator[Chunk, None]:
    """Bytes from an offset on as they come, until the end. The last chunk may be empty; it has `eof`."""
    async with aclosing(job.news()) as news:
        while True:
            chunk = read(job, stream, after, limit)
            if chunk.data or chunk.eof:
                yield chunk
                after = chunk.next
            if chunk.eof:
                return
            if chunk.next == chunk.total and await anext(news, None) is None:
                await asyncio.sleep(POLL)  # its shim is about to end, or takes no more connections


def pieces(job: Job, after: int = 0) -> Iterator[OutputPiece]:
    """The index from an offset of the combined output on: which stream, where, and when."""
    with ExitStack() as stack:
        yield from _View(job, stack, job.status() is not None or not job.held()).pieces(after)


class TextDecoder:
    """Bytes that come in chunks, as text: a character over a border waits for its rest, other bytes are replaced."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, chunk: Chunk) -> str:
        return self._decoder.decode(chunk.data, chunk.eof)


async def summarize(job: Job, head: int = 16_384, tail: int = 16_384) -> Summary:
    """Count and hash what an ended command wrote, in a thread, block by block."""
    return await asyncio.to_thread(_summarize, job, head, tail)


class _View:
    """The files of a command, open, at one moment."""

    def __init__(self, job: Job, stack: ExitStack, ended: bool) -> None:
        self._ended = ended
        # The index first: it covers no more than what the streams have already.
        self._index = self._open(job, "index", stack)
        self._entries = self._size(self._index) // shim.ENTRY
        self._files = {name: self._open(job, name, stack) for name in _STREAMS}
        self.sizes = {name: self._size(file) for name, file in self._files.items()}
        self._indexed = {"stdout": 0, "stderr": 0}
        if self._entries:
            last = self._entry(self._entries - 1)
            covered = last.combined + last.length
            self._indexed[last.stream] = min(last.offset + last.length, self.sizes[last.stream])
            other: Literal["stdout", "stderr"] = "stderr" if last.stream == "stdout" else "stdout"
            self._indexed[other] = max(0, min(covered - last.offset - last.length, self.sizes[other]))
        self.combined = sum(self.sizes.values()) if ended else sum(self._indexed.values())

    @staticmethod
    def _open(job: Job, name: str, stack: ExitStack) -> int | None:
        try:
            fd = os.open(job.folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        stack.callback(os.close, fd)
        return fd

    @staticmethod
    def _size(fd: int | None) -> int:
        return os.fstat(fd).st_size if fd is not None else 0

    def _entry(self, number: int) -> OutputPiece:
        assert self._index is not None
        return _piece(_ENTRY.unpack(os.pread(self._index, shim.ENTRY, number * shim.ENTRY)))

    def bytes_of(self, stream: Literal["stdout", "stderr"], offset: int, length: int) -> bytes:
        file = self._files[stream]
        # An index that says more than there is was not written by the shim.
        if file is None or length <= 0 or offset >= self.sizes[stream]:
            return b""
        return os.pread(file, length, offset)

    def pieces(self, after: int) -> Iterator[OutputPiece]:
        """From the piece that holds this combined offset on."""
        low, high = 0, self._entries
        while low < high:
            middle = (low + high) // 2
            entry = self._entry(middle)
            if entry.combined + entry.length <= after:
                low = middle + 1
            else:
                high = middle
        while low < self._entries:
            assert self._index is not None
            count = min(self._entries - low, 4096)
            block = os.pread(self._index, count * shim.ENTRY, low * shim.ENTRY)
            yield from map(_piece, _ENTRY.iter_unpack(block))
            low += count
        if self._ended:
            combined = sum(self._indexed.values())
            for stream in _STREAMS:
                length = self.sizes[stream] - self._indexed[stream]
                if length > 0 and combined + length > after:
                    yield OutputPiece(stream, combined, self._indexed[stream], length, 0)
                combined += max(0, length)


def _piece(entry: tuple[int, ...]) -> OutputPiece:
    combined, offset, time, length, stream = entry
    return OutputPiece("stdout" if stream == shim.OUT else "stderr", combined, offset, length, time)


class _Sum:
    def __init__(self, head: int, tail: int) -> None:
        self._head_room, self._tail_room = head, tail
        self._head, self._tail = bytearray(), bytearray()
        self._hash = hashlib.sha256()
        self._bytes = self._newlines = 0
        self._last = b"\n"

    def add(self, data: bytes) -> None:
        self._hash.update(data)
        self._bytes += len(data)
        self._newlines += data.count(b"\n")
        self._last = data[-1:] or self._last
        self._head += data[: max(0, self._head_room + self._tail_room - len(self._head))]
        self._tail = (self._tail + data[-self._tail_room :])[-self._tail_room :] if self._tail_room else self._tail

    def summary(self) -> StreamSummary:
        lines = self._newlines + (self._bytes > 0 and self._last != b"\n")
        truncated = self._bytes > self._head_room + self._tail_room
        if truncated:
            head, tail = whole_characters(bytes(self._head[: self._head_room])), _whole_tail(bytes(self._tail))
        else:
            head, tail = bytes(self._head), b""
        texts = head.decode("utf-8", "replace"), tail.decode("utf-8", "replace")
        return StreamSummary(self._bytes, lines, self._hash.hexdigest(), *texts, truncated)


def _whole_tail(data: bytes) -> bytes:
    """Without the rest of a character at its beginning."""
    skip = 0
    while skip < min(3, len(data)) and data[skip] & 0xC0 == 0x80:
        skip += 1
    return data[skip:]


def _summarize(job: Job, head: int, tail: int) -> Summary:
    sums, combined = {name: _Sum(head, tail) for name in ("stdout", "stderr")}, hashlib.sha256()
    with ExitStack() as stack:
        view = _View(job, stack, ended=True)
        for piece in view.pieces(0):
            done = 0
            while done < piece.length:
                data = view.bytes_of(piece.stream, piece.offset + done, min(BLOCK, piece.length - done))
                if not data:
                    break  # the file is shorter than its index: the sizes tell
                sums[piece.stream].add(data)
                combined.update(data)
                done += len(data)
    out, err = sums["stdout"].summary(), sums["stderr"].summary()
    status = job.status()
    missing = max(0, status.stdout - out.bytes) + max(0, status.stderr - err.bytes) if status is not None else 0
    return Summary(out, err, combined.hexdigest(), missing)
