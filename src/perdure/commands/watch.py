"""What of a command's output reaches its session while the command runs.

    stdout, stderr ─▶ lines ─▶ one event, with the offsets up to which it tells ─▶ outbox ─▶ an input of the session

The offsets are the process's progress, and are written with the event: after a crash the next run goes on where the
last event ended, so that no line is told twice and none is left out. What is in the files and not told yet is in no
event, and needs none.

Nothing is told while the session has still to read what it was told before: while a wake of this process waits, and
until the turn that it became has committed. A flood is one event then, with the newest lines and how many there were.
At the end of the command all that is left is told, before its end is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from perdure.commands.job import Job
from perdure.commands.output import read
from perdure.model.command import Command
from perdure.model.monitor import MATCHED, PROGRESS, SILENT, STDERR, OutputCursor, Watch, read_cursor
from perdure.ports.process import EngineRun

OutputFile: TypeAlias = Literal["stdout", "stderr"]
FILES: tuple[OutputFile, ...] = ("stdout", "stderr")

NEWEST = 128
"""Lines that an event tells; of more, how many there were."""
LINE_CHARACTERS = 400
BLOCK = 1 << 16
"""Bytes that are read at once. A line that is longer is taken in pieces."""
APART = 0.25
"""Seconds between two events of one process, at least."""
LONGEST_PAUSE = 2.0
"""Seconds between two looks at whether the session has read what it was told, at most."""
POLL = 0.05
EXCERPT = 2000
"""Bytes of stderr, and of each stream in a report of progress."""
LONGEST_INTERVAL = 300.0
FOR_EVER = 1e9


# ---------------------------------------------------------------------- lines, without I/O


def whole_lines(data: bytes, last: bool) -> int:
    """How many bytes the complete lines take with which some bytes begin. `last`: nothing comes after these bytes, so
    that they end with a line."""
    end = data.rfind(b"\n") + 1
    return len(data) if last or (end == 0 and len(data) >= BLOCK) else end


def split_lines(data: bytes) -> list[bytes]:
    """The lines that are not empty."""
    return [line for line in data.split(b"\n") if line and line != b"\r"]


class LinePattern:
    """A text that lines have in them, with * for anything: it takes one pass over a line, whatever it is."""

    __slots__ = ("first", "parts")

    def __init__(self, text: str) -> None:
        self.parts = [part.encode() for part in text.split("*") if part]
        self.first = self.parts[0]

    def matches(self, line: bytes) -> bool:
        place = 0
        for part in self.parts:
            found = line.find(part, place)
            if found < 0:
                return False
            place = found + len(part)
        return True


def matching(patterns: Iterable[LinePattern], data: bytes) -> list[bytes]:
    """The lines that match a pattern."""
    possible = [pattern for pattern in patterns if pattern.first in data]  # most output has none, and is not split
    return [line for line in split_lines(data) if any(each.matches(line) for each in possible)] if possible else []


class NewestLines:
    """The newest lines of many, as text, and how many there were."""

    __slots__ = ("_newest", "count")

    def __init__(self) -> None:
        self.count, self._newest = 0, deque[bytes](maxlen=NEWEST)

    def add(self, lines: list[bytes]) -> None:
        self.count += len(lines)
        self._newest.extend(lines[-NEWEST:])

    def add_all(self, data: bytes) -> None:
        """Add the lines that are not empty. Of a flood without empty ones, only the newest are split."""
        if b"\n\n" in data or b"\r" in data or data[:1] == b"\n":
            self.add(split_lines(data))
        elif data:
            whole = data.removesuffix(b"\n")
            self.count += whole.count(b"\n") + 1
            self._newest.extend(whole.rsplit(b"\n", NEWEST)[-NEWEST:])

    @property
    def newest(self) -> list[str]:
        return [_shown(line) for line in self._newest]

    def text(self, one: str, many: str) -> str:
        """What a session reads: how many there are, in these words, then the newest."""
        head = f"1 {one}" if self.count == 1 else f"{self.count:,} {many}"
        left = self.count > len(self._newest)
        head += f", of which these are the newest {len(self._newest)}:" if left else ":"
        return "\n".join([head, *self.newest])


def _shown(line: bytes) -> str:
    text = line[: 4 * LINE_CHARACTERS].decode(errors="replace").rstrip("\r")
    return text if len(text) <= LINE_CHARACTERS and len(line) <= 4 * LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]}…"


# ---------------------------------------------------------------------- telling


class Teller:
    """Tells the session of one process what there is in the files of a job, from its cursor on.

    `changed` is set when there is more, `over` when the command's shim is gone: then there will be no more.
    """

    def __init__(self, run: EngineRun, job: Job, cursor: OutputCursor) -> None:
        self.run, self.job, self.cursor = run, job, cursor
        self.changed, self.over = asyncio.Event(), asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._told = -FOR_EVER
        self._head: int | None = None

    @asynccontextmanager
    async def following(self) -> AsyncGenerator[None]:
        """Set `changed` for as long as the block lasts."""
        task = asyncio.create_task(self._follow(), name=f"output of {self.run.registration.id}")
        try:
            yield
            if task.done():
                task.result()  # what ended it may be a fault
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self) -> None:
        try:
            while self.job.status() is None and self.job.held():
                async for _ in self.job.news():
                    self.changed.set()
                self.changed.set()
                await asyncio.sleep(POLL)  # its shim is about to end, or takes no more connections
        finally:
            self.over.set()
            self.changed.set()

    async def wait_changed(self, seconds: float = FOR_EVER) -> None:
        """Wait until there is more, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        self.changed.clear()

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until the command has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.over.wait()

    async def wait_free(self) -> None:
        """Wait until the session may be told more. At the command's end there is nothing to wait for."""
        seconds = APART
        while not self.over.is_set() and not await self.is_free():
            await self.pause(seconds)
            seconds = min(2 * seconds, LONGEST_PAUSE)

    async def is_free(self) -> bool:
        """Whether the session has read what it was told before, and that is not just now."""
        return self._clock() >= self._told + APART and await self._is_heard()

    async def _is_heard(self) -> bool:
        run = self.run
        to = run.record.wake or run.registration.wake
        if to is None or to.policy == "none":
            return True
        store = run.host.store
        if any(wake.pid == run.row.pid for wake in await store.wakes(to.session_id)):
            return False
        session = await store.session(to.session_id)
        if session is None or session.deleted:
            return True
        # A note is read with the next turn that an input opens.
        return session.turn is None and (to.policy != "notify" or self._head is None or session.head > self._head)

    async def tell(self, kind: str, cursor: OutputCursor, payload: dict[str, Any]) -> None:
        """Write an event and the cursor after it, in one write."""
        to = self.run.record.wake or self.run.registration.wake
        if to is not None and to.policy == "notify":
            session = await self.run.host.store.session(to.session_id)
            self._head = 0 if session is None else session.head
        self.run.progress(msgspec.to_builtins(cursor))
        await self.run.emit(kind, payload)
        self.cursor, self._told = cursor, self._clock()

    async def collect(
        self, file: OutputFile, offset: int, patterns: Iterable[LinePattern] | None, into: NewestLines
    ) -> int:
        """Read whole lines from an offset on, those that match or all: the offset after them."""
        last = self.over.is_set()
        while True:
            chunk = read(self.job, file, offset, BLOCK)
            used = whole_lines(chunk.data, last and chunk.next == chunk.total)
            if not used:
                return offset
            data = chunk.data[:used]
            if patterns is None:
                into.add_all(data)
            else:
                into.add(matching(patterns, data))
            offset += used
            await asyncio.sleep(0)  # there may be a gigabyte of it

    def size(self, file: OutputFile) -> int:
        try:
            return (self.job.folder / file).stat().st_size
        except FileNotFoundError:
            return 0

    def tail(self, file: OutputFile, after: int) -> str:
        """The end of what was written after an offset, as text."""
        size = self.size(file)
        start = max(after, size - EXCERPT)
        text = read(self.job, file, start, EXCERPT).data.decode(errors="replace") if size > start else ""
        return text.strip("\r\n\ufffd")


class Watcher(Teller):
    """A command that is watched."""

    def __init__(self, run: EngineRun, job: Job, command: Command) -> None:
        super().__init__(run, job, read_cursor(run.record.progress))
        assert command.watch is not None
        self._watch: Watch = command.watch
        self._patterns = [LinePattern(text) for text in command.watch.match]
        self._place = {file: getattr(self.cursor, file) for file in FILES}
        self._bytes, self._heard, self._progress_from = -1, self._clock(), self._clock()

    async def work(self) -> None:
        """Tell what is watched for, until the command has ended and all of it is told."""
        async with self.following():
            while True:
                last = self.over.is_set()
                await self._look()
                if last:
                    return
                await self.wait_changed(self._next_time())

    async def _look(self) -> None:
        written = sum(map(self.size, FILES))
        if written != self._bytes:
            self._bytes, self._heard = written, self._clock()
        if self._watch.stderr and not self.cursor.told_stderr and self.size("stderr"):
            await self.wait_free()
            text = read(self.job, "stderr", 0, EXCERPT).data.decode(errors="replace").rstrip("\r\n\ufffd")
            told = {"text": f"its first output on stderr:\n{text}", "bytes": self.size("stderr")}
            await self.tell(STDERR, replace(self.cursor, told_stderr=True), told)
        if self._patterns:
            await self._match()
        if not self.over.is_set():
            await self._tell_silence()
            await self._tell_progress()

    async def _match(self) -> None:
        found = NewestLines()
        while True:
            last = self.over.is_set()
            for file in FILES:
                self._place[file] = await self.collect(file, self._place[file], self._patterns, found)
            if not found.count:
                return
            if last or await self.is_free():
                break
            await self.wait_free()  # and look again: what was written meanwhile is told with it
        lines = self.cursor.lines + found.count
        cursor = replace(self.cursor, lines=lines, last=found.newest[-1], **self._place)
        told = {"text": found.text("line matches", "lines match"), "count": found.count, "first": self.cursor.lines + 1}
        await self.tell(MATCHED, cursor, told)

    async def _tell_silence(self) -> None:
        limit = self._watch.silence
        if limit is None or self._clock() < self._heard + limit or self.cursor.silent == self._bytes:
            return
        await self.wait_free()
        if sum(map(self.size, FILES)) != self._bytes:
            return  # it has gone on meanwhile
        text = f"it has written nothing for {limit:g} seconds, and goes on; {self._bytes:,} bytes in all"
        last = self.tail("stdout", 0) or self.tail("stderr", 0)
        await self.tell(
            SILENT,
            replace(self.cursor, silent=self._bytes),
            {"text": f"{text}\n{last}" if last else text, "seconds": limit, "bytes": self._bytes},
        )

    async def _tell_progress(self) -> None:
        if self._watch.progress is None or self._clock() < self._progress_from + self._interval():
            return
        self._progress_from = self._clock()
        if self._bytes <= self.cursor.seen:
            return
        await self.wait_free()
        written = sum(map(self.size, FILES))
        parts = [f"{file}:\n{text}" for file in FILES if (text := self.tail(file, 0))]
        more = f"{written - self.cursor.seen:,} bytes more, {written:,} in all; the end of"
        cursor = replace(self.cursor, seen=written, rung=self.cursor.rung + 1)
        await self.tell(PROGRESS, cursor, {"text": "\n".join([more, *parts]), "bytes": written})

    def _interval(self) -> float:
        assert self._watch.progress is not None
        first = self._watch.progress
        return min(first * float(2 ** min(self.cursor.rung, 30)), max(LONGEST_INTERVAL, first))

    def _next_time(self) -> float:
        """Seconds until there is something to tell though nothing is written."""
        times = []
        if self._watch.silence is not None and self.cursor.silent != self._bytes:
            times.append(self._heard + self._watch.silence)
        if self._watch.progress is not None:
            times.append(self._progress_from + self._interval())
        return max(0.0, min(times, default=FOR_EVER + self._clock()) - self._clock())


async def watch(run: EngineRun, job: Job, command: Command) -> None:
    """Tell the session of a command what is watched for. Ends by itself after the command, with all of it told."""
    await Watcher(run, job, command).work()
