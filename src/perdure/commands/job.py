"""The folder of one command: what its shim wrote there, and the requests that a living shim answers.

A folder is enough to find a command again, from any Runtime on its machine:

    `status` there                 it ended; this is how
    `lock` held                    its shim lives, and so does the command, or its end is being written
    `started` there                the shim died: what it left is to be looked for (`os_tree.end_lost`)
    none of these                  the command never ran, and never will: `void` sees to that

`shim.py` makes it and writes there, and says what each file is.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from perdure.commands import shim
from perdure.errors import CommandsUnavailable, InternalError, InvalidInput, TimedOut, TooLarge

with suppress(ImportError):  # `check_supported` says so to who asks for a command
    import fcntl

ANSWER_SECONDS = 10.0
POLL = 0.01
VOID = b"void\n"
UNREADABLE = b"\0"
LARGEST_TEXT = 1 << 16
LOCK = "lock"
EARLIER = "process"
"""Where folders of earlier releases have the id of their process."""


def is_supported() -> bool:
    """Whether commands can be run here."""
    return sys.platform == "linux" and "fcntl" in sys.modules


def check_supported() -> None:
    """Raise CommandsUnavailable where no commands can be run."""
    if not is_supported():
        what = f"this is {sys.platform}" if sys.platform != "linux" else "this Python has no fcntl"
        raise CommandsUnavailable(f"commands run on Linux, and {what}")


class Identity(NamedTuple):
    """A process of the OS: its number is used again, its number with its start time (in ticks since boot) is not."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class StartedCommand:
    """Who runs a command, and where. The leader's pid is also its process group and its session."""

    shim: Identity
    leader: Identity
    boot: str
    namespace: str
    token: str
    time: int
    """Wall clock in milliseconds."""
    folder: int = 0
    """Inode of the job folder. A copy of the folder has another one; 0 if it is not known."""


class Found(NamedTuple):
    """A process that belonged to a command, when it was to be ended."""

    pid: int
    start: int
    name: str


@dataclass(frozen=True, slots=True)
class Status:
    """How a command ended, as its shim saw it.

    `end` is `exited`, `signaled`, `killed`, `timed_out`, `spawn_failed` or `failed` (the shim itself did); `reason` is
    what killed it, which time was out, or where and why it did not begin. `code` or `signal` is the leader's own end,
    also if it was made to.
    """

    end: str
    reason: str
    code: int | None
    signal: int | None
    started: int
    ended: int
    duration: float
    stdout: int
    stderr: int
    dropped: int
    """Bytes that were not kept: over the limit, or for a disk that took no more (`error`)."""
    error: str
    drained: bool
    """False if a process that was not ended still had the output open: what it writes is not in the files."""
    strays: str
    """What became of processes that outlived the leader: `none`, `killed`, `left`."""
    found: int
    forced: int
    """How many needed KILL."""
    survivors: int
    """How many lived on for seconds after KILL: they hang in the kernel."""
    processes: tuple[Found, ...]
    """The first of those found."""


class Beginning(Enum):
    """How far a folder's command got, by its files alone."""

    UNTOUCHED = "untouched"
    """Nothing ran. A shim that holds the lock may be about to begin it."""
    STARTED = "started"
    VOID = "void"


class ShimAnswer(Enum):
    """What a shim said to a request."""

    OK = "ok"
    REPEATED = "repeated"
    """This number was applied before."""
    CLOSED = "closed"
    """The command takes no input: it was given none, it closed it, or it was closed."""
    EXITED = "exited"
    UNSUPPORTED = "unsupported"
    """It has no terminal, or may not be signalled."""


class Job:
    """The folder of a command. Cheap to make: it holds nothing but the path.

    What is not async is a few calls to the file system.
    """

    __slots__ = ("folder",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def new_name() -> str:
        return secrets.token_hex(16)

    def create(self) -> None:
        """Make the folder, for its owner alone."""
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def process_id(self) -> str | None:
        """The process that the folder belongs to; None if it does not say."""
        try:
            text = self._text(LOCK) or self._text(EARLIER)
        except OSError:
            return None
        return text.decode(errors="replace") if text and text != UNREADABLE else None

    # ------------------------------------------------------------ what is there

    def beginning(self) -> Beginning:
        text = self._text("started")
        if not text:
            return Beginning.UNTOUCHED
        return Beginning.VOID if text == VOID else Beginning.STARTED

    def started(self) -> StartedCommand | None:
        """Who runs the command, or ran it; None if it has not begun, or what is there cannot be read."""
        text = self._text("started")
        if not text or text == VOID:
            return None
        try:
            return parse_started(text)
        except InternalError:
            return None

    def status(self) -> Status | None:
        """How it ended; None if it has not. One that cannot be read says that the shim `failed`."""
        text = self._text("status")
        if text is None:
            return None
        try:
            return parse_status(text)
        except InternalError as error:
            return unreadable_status(str(error))

    def held(self) -> bool:
        """Whether a shim lives."""
        with self._lock(fcntl.LOCK_SH) as taken:
            return taken is False

    def void(self) -> bool:
        """See to it that nothing begins here, now or later; False if something did, or may just be about to."""
        self.create()
        os.close(os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with self._lock(fcntl.LOCK_EX) as taken:
            if not taken:
                return False
            if self.beginning() is Beginning.STARTED:
                return False
            mark = self.folder / "started.void"
            mark.write_bytes(VOID)
            mark.rename(self.folder / "started")
            return True

    def remove(self) -> bool:
        """Delete the folder; False if a shim lives in it."""
        with self._lock(fcntl.LOCK_EX) as taken:
            if taken is False:
                return False
            shutil.rmtree(self.folder, ignore_errors=True)
        return not self.folder.exists()

    def _text(self, name: str) -> bytes | None:
        """A small file of the shim's; None if there is none, UNREADABLE if there is something else in its place.

        The command runs as the same user, and may have put anything there: a link, a pipe without a writer.
        """
        try:
            fd = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR, errno.EACCES):
                return UNREADABLE
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return UNREADABLE
            text = os.read(fd, LARGEST_TEXT + 1)
            return text if len(text) <= LARGEST_TEXT else UNREADABLE
        finally:
            os.close(fd)

    @contextmanager
    def _lock(self, how: int) -> Generator[bool | None, None, None]:
        """Whether the lock could be taken, for as long as the block lasts; None if there is none."""
        try:
            fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)

    # ------------------------------------------------------------ waiting

    async def wait(self, known: StartedCommand | None = None) -> Status | None:
        """Wait until no shim lives here; how the command ended, or None if its shim could not say.

        `known` is who runs it, if the caller has that from elsewhere: the command could have changed what is here.
        """
        started = known or self.started()
        if started is not None and started.namespace == own_namespace():
            await _wait_gone(started.shim)
        # Elsewhere its number means another process or none. The kernel closes its connections when it dies.
        async for _ in self.news():
            pass
        while self.held():  # noqa: ASYNC110 - a lock has no event, and is free moments later
            await asyncio.sleep(POLL)
        return self.status()

    async def news(self) -> AsyncGenerator[tuple[int, int], None]:
        """How many bytes of stdout and stderr there are: now, and whenever there are more, until the shim is gone."""
        connection = await self._connect()
        if connection is None:
            return
        with connection:
            try:
                await connection.send(shim.WATCH, b"")
                while (answer := await connection.receive()) is not None:
                    _, out, err = answer.split()
                    yield int(out), int(err)
            except OSError:
                return

    # ------------------------------------------------------------ requests

    async def write_stdin(self, number: int, data: bytes) -> ShimAnswer:
        """Write to the command's stdin, once for each number; numbers only grow.

        Waits while the command does not read; raises TimedOut if it goes on not to: then nothing of it was written.
        """
        if len(data) > shim.STDIN_ROOM:
            raise TooLarge("stdin of a command", len(data), shim.STDIN_ROOM)
        return await self._ask(shim.STDIN, number.to_bytes(8, "little") + data)

    async def close_stdin(self, number: int) -> ShimAnswer:
        """Let the command read the end of its stdin, after what was written. On a terminal: Ctrl-D."""
        return await self._ask(shim.CLOSE_STDIN, number.to_bytes(8, "little"))

    async def resize(self, rows: int, columns: int) -> ShimAnswer:
        """Change the size of the command's terminal; it gets a WINCH."""
        if not (0 < rows < 1 << 16 and 0 < columns < 1 << 16):
            raise InvalidInput(f"a terminal cannot have {rows} rows of {columns} columns")
        return await self._ask(shim.RESIZE, b"%d %d" % (rows, columns))

    async def signal(self, number: int) -> ShimAnswer:
        """Signal the process group of the leader."""
        if number not in signal.valid_signals():
            raise InvalidInput(f"there is no signal {number}")
        return await self._ask(shim.SIGNAL, b"%d" % number)

    async def kill(self, reason: str, grace: float) -> Status | None:
        """End the command and everything that it began: TERM, `grace`, KILL. Returns when they are dead, also if the
        command ended before; None if the shim is gone and left no status."""
        grace = max(0.0, grace)
        connection = await self._connect()
        if connection is not None:
            with connection:
                limit = grace + shim.KILLS + shim.DRAIN + ANSWER_SECONDS
                try:
                    async with asyncio.timeout(limit):
                        await connection.send(shim.KILL, b"%f %s" % (grace, reason.encode(errors="replace")))
                        while (answer := await connection.receive()) is not None:
                            if answer.startswith(b"ended\n"):
                                return parse_status(answer.partition(b"\n")[2])
                except TimeoutError:
                    raise TimedOut("the end of a command", limit) from None
                except OSError:
                    pass
        return self.status()

    async def _ask(self, code: int, body: bytes) -> ShimAnswer:
        connection = await self._connect()
        if connection is None:
            return ShimAnswer.EXITED
        with connection:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await connection.send(code, body)
                    answer = await connection.receive()
            except TimeoutError:
                raise TimedOut("an answer of a command's shim", ANSWER_SECONDS) from None
            except OSError:
                answer = None
        return ShimAnswer.EXITED if answer is None else ShimAnswer(answer.decode())

    async def _connect(self) -> _Connection | None:
        """None if there is no shim any more. The path goes through a descriptor: those of sockets must be short."""
        try:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            os.close(folder)
            raise
        client.setblocking(False)
        try:
            until = time.monotonic() + ANSWER_SECONDS
            while True:
                try:
                    client.connect(f"/proc/self/fd/{folder}/control")
                    return _Connection(client)
                except BlockingIOError:  # its backlog is full
                    if time.monotonic() > until:
                        raise TimedOut("a connection to a command's shim", ANSWER_SECONDS) from None
                    await asyncio.sleep(POLL)
        except (FileNotFoundError, ConnectionRefusedError):
            client.close()
            return None
        except BaseException:  # also a cancellation: its socket is closed
            client.close()
            raise
        finally:
            os.close(folder)


class _Connection:
    """A connection to a shim's control socket."""

    def __init__(self, client: socket.socket) -> None:
        self._socket, self._received = client, bytearray()

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    async def send(self, code: int, body: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, shim.frame(code, body))

    async def receive(self) -> bytes | None:
        """The next answer; None at the end of the connection."""
        loop, received = asyncio.get_running_loop(), self._received
        while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "little"):
            data = await loop.sock_recv(self._socket, 1 << 16)
            if not data:
                return None
            received += data
        size = 4 + int.from_bytes(received[:4], "little")
        answer = bytes(received[5:size])
        del received[:size]
        return answer


# ---------------------------------------------------------------------- formats


def parse_started(text: bytes) -> StartedCommand:
    try:
        of = dict(line.split(b" ", 1) for line in text.split(b"\n") if line)
        shim_pid, shim_start = of[b"shim"].split()
        leader_pid, leader_start = of[b"leader"].split()
        return StartedCommand(
            Identity(int(shim_pid), int(shim_start)),
            Identity(int(leader_pid), int(leader_start)),
            of[b"boot"].decode(),
            of[b"namespace"].decode(),
            of[b"token"].decode(),
            int(of[b"time"]),
            int(of.get(b"folder", b"0")),
        )
    except (KeyError, ValueError) as error:
        raise InternalError(f"a job's `started` cannot be read: {error!r}") from error


def parse_status(text: bytes) -> Status:
    of, processes = dict[str, str](), []
    try:
        # Not `splitlines`: a process may have a line separator of Unicode in its name.
        for line in text.decode(errors="replace").split("\n"):
            name, _, value = line.partition(" ")
            if name == "process":
                pid, start, comm = value.split(" ", 2)
                processes.append(Found(int(pid), int(start), comm))
            else:
                of[name] = value
        end, _, reason = of["end"].partition(" ")
        return Status(
            end=end,
            reason="" if end in ("exited", "signaled") else reason,
            code=int(of["code"]) if "code" in of else None,
            signal=int(of["signal"]) if "signal" in of else None,
            started=int(of["started"]),
            ended=int(of["ended"]),
            duration=float(of["duration"]),
            stdout=int(of["stdout"]),
            stderr=int(of["stderr"]),
            dropped=int(of["dropped"]),
            error=of.get("error", ""),
            drained=of["drain"] == "complete",
            strays=of["strays"],
            found=int(of["found"]),
            forced=int(of["forced"]),
            survivors=int(of["survivors"]),
            processes=tuple(processes),
        )
    except (KeyError, ValueError) as error:
        raise InternalError(f"a job's `status` cannot be read: {error!r}") from error


def unreadable_status(why: str) -> Status:
    return Status("failed", why, None, None, 0, 0, 0.0, 0, 0, 0, "", True, "none", 0, 0, 0, ())


# ---------------------------------------------------------------------- this machine


def own_boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def own_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


async def _wait_gone(who: Identity) -> None:
    """Wait until a process is gone, if it is there at all."""
    try:
        fd = os.pidfd_open(who.pid)
    except OSError as error:
        # Besides ESRCH, a kernel says ENOENT, and an older one EINVAL, if a thread has the number by now.
        if error.errno not in (errno.ESRCH, errno.ENOENT, errno.EINVAL):
            raise
        return
    try:
        stat = shim.stat_of(who.pid)
        if stat is None or stat[4] != who.start:
            return  # the number is another process's
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(fd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(fd)
    finally:
        with suppress(OSError):
            os.close(fd)
