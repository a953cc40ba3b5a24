"""The Runtime's side of the spawner: beginning commands.

One spawner serves a Runtime. It is started with the first command, and again if it died; its shims know nothing of
either. A request goes to the shim through a socket of its own (`shim.spawn_shims`), and the answer comes back on it in
two parts: who runs the command, as soon as that is in its folder, and then, with the end of the socket, that its
program runs, or why it could not be run.

A shim can be forked before there is a request for it (`prepare`), while the Runtime still writes down what it is about
to do. It gets ready, touches nothing until the request comes, and leaves if none does. That takes longer than the
write: so once a command has begun, the shim of the next one is forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from perdure.commands import shim
from perdure.commands.job import Beginning, Job, StartedCommand, check_supported, parse_started
from perdure.errors import CommandsUnavailable, InvalidCommand, RuntimeClosed, quoted

T = TypeVar("T")

AT_ONCE = 32
"""Requests that are with the spawner at a time: each is an open socket here and there."""
TRIES = 3
SPARE_AFTER = 0.005
"""Seconds after the start of a command in which the one for the next is not forked: its caller has its handle first."""
STARTED = b"started\n"
"""Begins the first part of a shim's answer, which ends with an empty line."""
CLOSE_SECONDS = 5.0
EXEC_SECONDS = 10.0
"""For so long it is waited, twice, whether the program runs. A command may have stopped its shim."""
LONGEST = 131_072
"""Bytes of one argument, or of one variable with its value, with the zero at its end: MAX_ARG_STRLEN."""
DEFAULT_PATH = "/bin:/usr/bin"
PASSED_ON = ("LD_LIBRARY_PATH", "LD_PRELOAD", shim.TOKEN.decode())
"""Variables of ours that the spawner needs to run at all, or to be found if we are a command ourselves. It has no
others."""

STAGES: Mapping[str, str] = {
    "fork": "no process could be begun for it",
    "folder": "its job folder cannot be written",
    "taken": "another shim is in its job folder",
    "spent": "its job folder was used before",
    "setup": "it could not be set up",
    "cwd": "its working directory cannot be entered",
    "sandbox": "its sandbox cannot be made",
    "exec": "its program cannot be run",
    "shim": "its shim died before the command began",
}


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What to run, and where to keep what it says. `check` must have let it pass.

    `folder` is made if it is not there, and then says that it belongs to `process_id`, if there is one. `token` is in
    the command's environment, to find its processes by. `pty` is rows and columns. `timeout` and `silence` are seconds,
    `output_limit` is bytes of both streams together; they hold though no Runtime lives. `rules` are those of its
    sandbox (`sandbox.rules_of`); without any it is not confined. `pipes` are the ends that become its stdin and stdout:
    it is then bound to whoever has the others, and ends when these are closed.
    """

    folder: Path
    token: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdin: bool = False
    pty: tuple[int, int] | None = None
    timeout: float | None = None
    silence: float | None = None
    output_limit: int | None = None
    grace: float = 2.0
    strays: Literal["kill", "leave"] = "kill"
    rules: Sequence[bytes] = ()
    pipes: tuple[int, int] | None = None
    process_id: str = ""


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The command never ran. `stage` is a key of `STAGES`, `number` an errno or 0. `searched` names its program and the
    places where it was looked for."""

    stage: str
    number: int
    searched: str = field(default="", repr=False)

    @property
    def reason(self) -> str:
        why = f" ({errno.errorcode.get(self.number, self.number)}: {os.strerror(self.number)})" if self.number else ""
        where = f": {self.searched}" if self.stage == "exec" and self.searched else ""
        return f"{STAGES.get(self.stage, self.stage)}{why}{where}"


def check(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    """Raise InvalidCommand for what the OS would refuse. It looks at files, and begins nothing.

    What changes between this and the start is found out then: `SpawnFailed`.
    """
    if not argv or not argv[0]:
        raise InvalidCommand("a command needs a program: the first of its arguments is empty or missing")
    room = os.sysconf("SC_ARG_MAX") - 4096
    if len(argv) * 9 > room:  # before a million of them are looked at
        raise InvalidCommand(f"{len(argv):,} arguments are too many: pass them in a file, or on stdin")
    size = 0
    for what, text in (*(("argument", each) for each in argv), *(("variable", f"{k}={v}") for k, v in env.items())):
        if "\0" in text:
            raise InvalidCommand(f"{what} {quoted(text)} has a NUL character, which no program can be given")
        length = len(os.fsencode(text)) + 1
        if length > LONGEST:
            raise InvalidCommand(
                f"an {what} of {length:,} bytes is too long for the OS: pass it in a file, or on stdin"
            )
        size += length + 8
    if size > room:
        raise InvalidCommand(
            f"{size:,} bytes of arguments and variables are too many: pass them in a file, or on stdin"
        )
    if bad := [name for name in env if not name or "=" in name]:
        raise InvalidCommand(f"{quoted(bad[0])} is no name of a variable")
    if "\0" in cwd or not os.path.isabs(cwd):
        raise InvalidCommand(f"the working directory {quoted(cwd)} is no absolute path")
    try:
        if not stat.S_ISDIR(os.stat(cwd).st_mode):
            raise InvalidCommand(f"the working directory {quoted(cwd)} is no directory")
        if not os.access(cwd, os.X_OK):
            raise InvalidCommand(f"the working directory {quoted(cwd)} may not be entered")
    except OSError as error:
        raise InvalidCommand(f"the working directory {quoted(cwd)} cannot be used: {error.strerror}") from None
    _find_program(argv[0], env.get("PATH", DEFAULT_PATH), cwd)


def searched(request: StartRequest) -> str:
    """Name the program of a command, each link of it, and the places where it is looked for."""
    name = request.argv[0]
    if "/" in name:
        found: str | None = os.path.join(request.cwd, name)
        where = f"{quoted(name)} was looked for"
    else:
        path = request.env.get("PATH", DEFAULT_PATH)
        found, where = shutil.which(name, path=path), f"{quoted(name)} was looked for in PATH={quoted(path)}"
    if found is not None and (real := os.path.realpath(found)) != found:
        where += f" ({found} leads to {real})"
    if not request.rules:
        return where
    return (
        f"{where}, inside the sandbox, which has the folders of the system and those that are granted. If it is "
        "somewhere else, grant its folder: Workspace(read=[…])"
    )


def _find_program(name: str, path: str, cwd: str) -> None:
    folders = [cwd] if "/" in name else [os.path.join(cwd, folder) for folder in path.split(":")]
    there = [file for file in (os.path.join(folder, name) for folder in folders) if os.path.isfile(file)]
    if not there:
        where = "" if "/" in name else f" in PATH={quoted(path)}"
        raise InvalidCommand(f"there is no program {quoted(name)}{where}")
    if not any(os.access(file, os.X_OK) for file in there):
        raise InvalidCommand(f"{quoted(there[0])} may not be executed")


class PreparedShim:
    """A shim that is forked before there is a request for it. It is given to one `start`, or dismissed."""

    def __init__(self, forking: asyncio.Future[socket.socket | None]) -> None:
        self._forking = forking

    async def wait_forked(self) -> socket.socket | None:
        """Its socket, which is the caller's to close; None if none could be forked, or it was dismissed."""
        try:
            return await asyncio.shield(self._forking)
        except (OSError, CommandsUnavailable, RuntimeClosed):
            return None  # the next attempt says why

    def dismiss(self) -> None:
        """Let it go without a request."""
        self._forking.add_done_callback(_close_result)


def _done(ours: socket.socket) -> asyncio.Future[socket.socket | None]:
    forking: asyncio.Future[socket.socket | None] = asyncio.get_running_loop().create_future()
    forking.set_result(ours)
    return forking


def _close_result(forking: asyncio.Future[socket.socket | None]) -> None:
    if not forking.cancelled() and forking.exception() is None and (unused := forking.result()) is not None:
        unused.close()


class Spawner:
    """Begins commands for one Runtime, in its event loop.

    `_forking` are the tasks that have a shim forked ahead of its request. `_spare` is the one for the next command, and
    `_begins` counts those that are being begun.
    """

    def __init__(self, exec_seconds: float = EXEC_SECONDS) -> None:
        self._exec_seconds = exec_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._opening = asyncio.Lock()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._forking: set[asyncio.Task[socket.socket | None]] = set()
        self._spare: PreparedShim | None = None
        self._begins = 0
        self._closed = False

    def prepare(self, confined: bool = False) -> PreparedShim | None:
        """Have a shim forked, and the spawner started if there is none. None while many are being begun."""
        kind = shim.CONFINED if confined else shim.FREE
        if not confined and self._spare is not None:
            spare, self._spare = self._spare, None
            return spare
        if self._slots.locked() or len(self._forking) >= AT_ONCE:
            return None
        if (ours := self._fork_shim_now(kind)) is not None:
            return PreparedShim(_done(ours))
        forking = asyncio.create_task(self._fork_shim(kind), name="fork of a shim")
        self._forking.add(forking)
        forking.add_done_callback(self._forking.discard)
        return PreparedShim(forking)

    async def start(
        self,
        request: StartRequest,
        prepared: PreparedShim | None = None,
        identified: Callable[[StartedCommand], None] | None = None,
    ) -> StartedCommand | SpawnFailed:
        """Run a command: returns when its program runs, with who it is, or why it does not.

        `identified` is called as soon as the shim and the leader are known, which may be before the program runs.
        Cancelling this does not undo it: the folder says whether the command began.
        """
        message, kind = _encode(request), shim.CONFINED if request.rules else shim.FREE
        async with contextlib.AsyncExitStack() as stack:
            self._begins += 1
            stack.callback(self._has_begun)
            if prepared is not None:
                stack.callback(prepared.dismiss)  # also if this is cancelled before it is used
            await stack.enter_async_context(self._slots)
            for number in range(TRIES):
                first = prepared if number == 0 else None
                ours = await (self._fork_shim(kind) if first is None else first.wait_forked())
                answer = None if ours is None else await self._send(ours, message, request.pipes, identified)
                if isinstance(answer, SpawnFailed):
                    return replace(answer, searched=searched(request))
                if answer is not None:
                    return answer
                # The shim held the socket until its end, so there is none. The folder says how far it got.
                job = Job(request.folder)
                beginning = job.beginning()
                if beginning is Beginning.STARTED and (started := job.started()) is not None:
                    return started
                if beginning is not Beginning.UNTOUCHED:
                    break
        return SpawnFailed("shim", 0)

    def _has_begun(self) -> None:
        self._begins -= 1
        asyncio.get_running_loop().call_later(SPARE_AFTER, self._fork_spare)

    def _fork_spare(self) -> None:
        if not self._begins and self._spare is None and (ours := self._fork_shim_now(shim.FREE)) is not None:
            self._spare = PreparedShim(_done(ours))

    async def close(self) -> None:
        """End the spawner. The shims go on, and so do their commands."""
        self._closed = True
        if self._spare is not None:
            self._spare.dismiss()
            self._spare = None
        async with self._opening:
            await self._end()
        if self._forking:
            await asyncio.wait(self._forking)

    def _fork_shim_now(self, kind: bytes) -> socket.socket | None:
        """The socket of a new shim, if the spawner is there and takes a request at once.

        A task would come to it only after the caller has handed its write to a thread, which then has the interpreter
        lock for milliseconds.
        """
        if self._socket is None or self._closed or self._opening.locked():
            return None
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            return None
        with theirs:
            try:
                socket.send_fds(self._socket, [kind], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        ours.setblocking(False)
        return ours

    async def _fork_shim(self, kind: bytes) -> socket.socket | None:
        """The socket of a new shim; None if the spawner takes no requests."""
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            with theirs:
                requests = await self._open()
                try:
                    await _send_socket(requests, kind, theirs)
                except OSError:
                    await self._reopen(requests)
                    ours.close()
                    return None
        except BaseException:  # also a cancellation: its socket is closed
            ours.close()
            raise
        return ours

    async def _send(
        self,
        ours: socket.socket,
        message: bytes,
        pipes: tuple[int, int] | None,
        identified: Callable[[StartedCommand], None] | None,
    ) -> StartedCommand | SpawnFailed | None:
        """One try; None if the socket ended without an answer."""
        loop, answer, started = asyncio.get_running_loop(), bytearray(), None
        woken = False
        with ours:
            try:
                if pipes is not None:  # they go with the first byte, for which a new socket has room
                    message = message[socket.send_fds(ours, [message[:1]], pipes) :]
                await loop.sock_sendall(ours, message)
                while True:
                    try:
                        async with asyncio.timeout(None if started is None else self._exec_seconds):
                            data = await loop.sock_recv(ours, 1 << 16)
                    except TimeoutError:
                        if started is None or woken:
                            return started  # whether it runs is in its folder then
                        woken = shim.send_signal(*started.shim, signal.SIGCONT)
                        continue
                    if not data:
                        break
                    answer += data
                    if started is None and answer.startswith(STARTED) and (end := answer.find(b"\n\n")) > 0:
                        started = parse_started(bytes(answer[len(STARTED) : end]))
                        del answer[: end + 2]
                        if identified is not None:
                            identified(started)
            except OSError:
                return started
        if answer.startswith(b"failed "):
            _, stage, number = answer.decode().split()
            return SpawnFailed(stage, int(number))
        return started

    async def _open(self) -> socket.socket:
        async with self._opening:
            if self._closed:
                raise RuntimeClosed("begin a command")
            if self._process is not None and self._process.poll() is not None:
                await self._end_dead(self._process)
            if self._socket is None:
                await _in_thread(self._begin)
            assert self._socket is not None
            return self._socket

    async def _reopen(self, broken: socket.socket) -> None:
        """Forget a spawner that takes no requests; the next one opens another."""
        async with self._opening:
            if self._socket is broken and self._process is not None:
                await self._end_dead(self._process)

    async def _end_dead(self, process: subprocess.Popen[bytes]) -> None:
        """Forget a spawner that ended by itself. Raises if it could not even begin: another one could not either."""
        trouble = await self._end()
        if trouble and process.returncode not in (0, -signal.SIGKILL, -signal.SIGTERM):
            raise CommandsUnavailable(f"the spawner of commands ended: {trouble}")

    def _begin(self) -> None:
        self._process, self._socket = _begin_spawner()

    async def _end(self) -> str:
        """The last line of what the spawner complained of."""
        process, requests = self._process, self._socket
        self._process = self._socket = None
        if requests is not None:
            requests.close()
        return await _in_thread(lambda: _reap(process)) if process is not None else ""


async def _in_thread(function: Callable[[], T]) -> T:
    """Run it in a thread, to its end also if we are cancelled: it holds a process."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _begin_spawner() -> tuple[subprocess.Popen[bytes], socket.socket]:
    check_supported()
    if not sys.executable:
        raise CommandsUnavailable("commands need a Python interpreter to run their shims, and sys.executable is empty")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = subprocess.Popen(
                # The source itself would be compiled at each start; imported, its bytecode is cached.
                [sys.executable, "-I", "-S", "-E", "-c", _PROGRAM, str(Path(shim.__file__).parent), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise CommandsUnavailable(f"the spawner of commands cannot be run: {error}") from error
    ours.setblocking(False)
    return process, ours


_PROGRAM = "import sys; sys.path.append(sys.argv[1]); import shim; shim.spawn_shims(int(sys.argv[2]))"


def _reap(process: subprocess.Popen[bytes]) -> str:
    """Wait for a spawner whose socket was closed; the last line of what it complained of."""
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:  # stopped, say
        process.kill()
        process.wait()
    assert process.stderr is not None
    with process.stderr:
        lines = process.stderr.read().decode(errors="replace").splitlines()
    return lines[-1] if lines else ""


async def _send_socket(requests: socket.socket, kind: bytes, theirs: socket.socket) -> None:
    """Give a socket away. Waits while the spawner is behind."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            socket.send_fds(requests, [kind], [theirs.fileno()])
            return
        except BlockingIOError:
            ready = asyncio.Event()
            loop.add_writer(requests, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_writer(requests)


def _encode(request: StartRequest) -> bytes:
    options = [f"stdin {int(request.stdin)}", f"grace {request.grace}", f"strays {request.strays}"]
    for name in ("timeout", "silence", "output_limit"):
        if (value := getattr(request, name)) is not None:
            options.append(f"{name} {value}")
    if request.pty is not None:
        options.append("pty {} {}".format(*request.pty))
    return shim.pack(
        [
            os.fsencode(request.folder),
            request.process_id.encode(),
            request.token.encode(),
            os.fsencode(request.cwd),
            "\n".join(options).encode(),
            shim.pack(list(request.rules))[4:],
            b"%d" % len(request.argv),
            *map(os.fsencode, request.argv),
            *(os.fsencode(f"{name}={value}") for name, value in request.env.items()),
        ]
    )
