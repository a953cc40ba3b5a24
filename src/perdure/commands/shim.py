"""The program that stands between a Runtime and one command, and outlives the Runtime.

It runs in a process of its own, as the **spawner** first: started by a Runtime, it does nothing but fork. Each fork is
a **shim**: it begins one command, keeps what it prints, and says how it ended. The spawner ends with its Runtime; shims
go on. All of them run on what the interpreter has built in, import nothing of Perdure and hash nothing, so that a shim
costs a few megabytes and begins in milliseconds.

What a shim knows is in the job folder, which `job.py` reads:

    lock      flocked by the shim alone, for as long as it lives
    started   the identities of shim and leader, written beside and renamed under the lock; then the leader is let go.
              A folder that has this file begins nothing any more
    stdout    what the command wrote, byte by byte (with a terminal: all of it); made with its first byte. None where it
              writes to a pipe of ours
    stderr
    index     in which order: entries of ENTRY bytes, flushed INDEX_LATE seconds late at most
    status    how it ended: written beside, synced and renamed. Its blocks are reserved before the command begins
    control   a socket for requests (`Control`)

The order of the first two is what makes a crash harmless. The leader is a fork that waits to be told what to run: if
the shim dies before `started` is there, the leader reads the end of that pipe and leaves without having run anything.
If it dies later, the identities are on disk.

A fork takes longer than all files, and needs nothing of the request but which input and output there are. So a shim
forks the usual leader before it reads its request, and another one in its place for a terminal, pipes of ours or a
sandbox.

Files are made before the command begins only where they must be. A new file costs microseconds, but two thirds of a
millisecond on ext4 where a few thousand were deleted in the last minutes: it does not use their inodes again so soon,
and looks at each of them every time.

The shim is a *subreaper*: whatever the command begins, also with `setsid` or a double fork, becomes its child when the
parent in between ends. So "no children" is "nothing of it lives", and a walk down from the shim's own children finds
all.

The phases, each with one way on:

    STARTING ─▶ RUNNING ─▶ SETTLING ─▶ TERMINATING ─▶ KILLING ─▶ DRAINING ─▶ over
     exec         leader     strays may    TERM sent      KILL sent   what is in    `status`
     pending      lives      end           grace runs     until dead  the pipes

A kill, a timeout or a limit goes from RUNNING to TERMINATING. Nothing waits for the end of a pipe: a process elsewhere
may hold it.

A command may be *bound* to its Runtime: two pipes come with the request, and are its stdin and stdout. The shim reads
neither, and keeps the reading end of the first only to see that the Runtime has closed the other, or died. The command
then has `grace` seconds to leave by itself.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # ty: ignore[import-not-found]  # `signal` imports `enum`: a megabyte in each shim
import _socket
import gc
import os
import select
import sys
import time

try:
    import fcntl
except ImportError:
    pass  # not on Linux: a Runtime reads this module there too, and refuses commands

TYPE_CHECKING = False
if TYPE_CHECKING:
    from perdure.commands.confine import Confined

READ = 1 << 16
"""Bytes of output read at once."""
ENTRY = 32
"""Bytes of an entry of the index: offset in the combined output, offset in the stream, wall time in ms, and length and
stream in four bytes each, all little-endian."""
INDEX_LATE = 0.02
NEWS_EVERY = 0.02
"""Seconds between two notices of new output to one connection."""
SETTLE = 0.25
"""Seconds that strays have to end by themselves: the end of a pipeline may outlive its shell for a moment."""
DRAIN = 2.0
KILLS = 5.0
"""Seconds for which KILL is repeated. What lives then cannot be killed: it is in the kernel."""
KILL_PASS = 0.02
FOLDER_CHECK = 2.0
"""Seconds between two looks whether the folder is still there. Without it nobody finds the command again, or its
output: it is killed."""
STATUS_ROOM = 4096
STDIN_ROOM = 1 << 20
"""Bytes for a command that does not read. The next ones wait in their connection."""
FRAME_ROOM = STDIN_ROOM + 64
CONNECTIONS = 64
LISTED = 24
"""Processes that a status names; the others are counted."""
LOCK_TRIES = 400

OUT, ERR = 1, 2
NAMES = {OUT: "stdout", ERR: "stderr"}
STDIN, CLOSE_STDIN, RESIZE, SIGNAL, KILL, WATCH = range(1, 7)
STARTING, RUNNING, SETTLING, TERMINATING, KILLING, DRAINING, OVER = range(7)

PR_SET_CHILD_SUBREAPER = 36
TIOCSCTTY, TIOCSWINSZ = 0x540E, 0x5414
IGNORED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGPIPE")
"""Who stops everything with TERM ends the command; the shim must be there to write down that it was TERM."""
TOKEN = b"MAINSTAY_JOB"
"""Marks the OS processes of a command. The project's old name stays, so that commands of older versions are found."""
FREE, CONFINED = b"s", b"c"
"""What a shim is asked for. With the first for a confined command the spawner loads what makes sandboxes, for all."""


def pack(fields: list[bytes]) -> bytes:
    """A message: its length, then each field with its own."""
    body = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return len(body).to_bytes(4, "little") + body


def unpack(body: bytes) -> list[bytes]:
    fields, at = [], 0
    while at < len(body):
        end = at + 4 + int.from_bytes(body[at : at + 4], "little")
        fields.append(body[at + 4 : end])
        at = end
    return fields


def frame(code: int, body: bytes = b"") -> bytes:
    """A request on the control socket, and with code 0 an answer."""
    return (len(body) + 1).to_bytes(4, "little") + bytes((code,)) + body


def stat_of(pid: int) -> tuple[bytes, int, int, int, int, bytes] | None:
    """State, parent, process group, session, start time in ticks since boot, and name; None if there is no such pid.

    Raises OSError where that cannot be said: a process must not pass for gone because too many files are open here.
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        text = os.read(fd, 4096)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    head, _, rest = text.rpartition(b")")
    part = rest.split()
    if len(part) < 20:
        return None
    return part[0], int(part[1]), int(part[2]), int(part[3]), int(part[19]), head.partition(b"(")[2]


def start_of(pid: int) -> int:
    """When a process began that cannot be gone: it is ours, and was not reaped. In ticks since boot."""
    stat = stat_of(pid)
    if stat is None:
        raise OSError(2, "there is no /proc")
    return stat[4]


def send_signal(pid: int, start: int, number: int) -> bool:
    """Signal a process if it still is the one that began then. The descriptor pins it before its start time is read."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        stat = stat_of(pid)
        if stat is None or stat[4] != start:
            return False
        _signal.pidfd_send_signal(fd, number)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def plain(text: bytes, room: int = 200) -> bytes:
    """One line, for a value in a status or a list."""
    return bytes(byte if byte >= 32 and byte != 127 else 63 for byte in text[:room])


# ---------------------------------------------------------------------- spawner


def spawn_shims(parent: int) -> None:
    """Fork a shim for each socket that is sent here, until the Runtime closes its end or dies.

    The request itself comes through that socket, and is read by the shim: a large or slow one holds up nobody. For as
    long as the shim has not answered it holds the socket, so the end of it without an answer says that no shim is left.
    The answer is "started" with the lines of that file and an empty one, "failed" with the stage and the errno, or one
    after the other, if the leader could not run the program.
    """
    import _ctypes  # noqa: PLC0415  # only here: a Runtime reads this module too, and need not map the library

    for name in IGNORED:
        _signal.signal(getattr(_signal, name), _signal.SIG_IGN)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # the kernel reaps the shims
    requests = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, 0)
    boot = _read("/proc/sys/kernel/random/boot_id").strip()
    itself: str = None  # type: ignore[assignment]  # ty: ignore[invalid-assignment]  # which is what NULL means
    prctl = _ctypes.dlsym(_ctypes.dlopen(itself, 0), "prctl")
    watch = select.poll()
    watch.register(0, select.POLLIN)
    where = b"boot %s\nnamespace %s\n" % (boot, os.readlink("/proc/self/ns/pid").encode())
    with_parent = os.pidfd_open(parent)  # a fork of the Runtime's may hold its end of the socket for longer
    watch.register(with_parent, select.POLLIN)
    _named(b"perdure-spawn")
    os.dup2(1, 2)  # until here an error is for the Runtime to read
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        if all(fd != 0 for fd, _ in watch.poll()):
            return
        data, rights, _, _ = requests.recvmsg(1, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        if not rights:
            continue
        if data == CONFINED:
            import confine  # type: ignore[import-not-found]  # noqa: F401, PLC0415  # ty: ignore[import-not-found]
        fd = int.from_bytes(rights[0][2][:4], sys.byteorder)
        try:
            pid = os.fork()
        except OSError as error:
            os.write(fd, b"failed fork %d\n" % (error.errno or 0))
            os.close(fd)
            continue
        if pid == 0:
            try:
                os.dup2(1, 0)  # the null device, in place of the socket
                os.setsid()
                _ctypes.call_function(prctl, (PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
                _named(b"perdure-shim")
                _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)  # from here on, who ended is reaped here
                own = b"shim %d %d\n" % (os.getpid(), start_of(os.getpid())) + where
                ahead = _fork_ahead() if data == FREE else None
                body, pipes = _read_request(fd, with_parent)
                if body is not None:
                    Shim(unpack(body), own, fd, pipes).run(ahead)
            finally:
                os._exit(0)
        os.close(fd)


def _fork_ahead() -> Leader | None:
    """The leader that most commands have. None if there can be none now: `Shim.begin` tries again, and says why."""
    try:
        leader = Leader(None, [])
        leader.fork()
    except OSError:
        return None
    return leader


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _named(name: bytes) -> None:
    """How `ps` shows it. A system that does not allow this has its own reasons."""
    try:
        fd = os.open("/proc/self/comm", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    os.write(fd, name)
    os.close(fd)


def _read_request(fd: int, with_parent: int) -> tuple[bytes | None, list[int]]:
    """The request, and the pipes that came with it. None if the Runtime went before it was whole: nothing begins."""
    data, pipes = bytearray(), list[int]()
    need = 4
    watch = select.poll()
    watch.register(fd, select.POLLIN)
    watch.register(with_parent, select.POLLIN)
    if all(ready != fd for ready, _ in watch.poll()):
        return None, pipes
    os.close(with_parent)
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd)
    try:
        while len(data) < need:
            more, rights, _, _ = socket.recvmsg(1 << 16, _socket.CMSG_SPACE(8), _socket.MSG_CMSG_CLOEXEC)
            if not more:
                return None, pipes
            data += more
            for _, _, numbers in rights:
                pipes += [int.from_bytes(numbers[at : at + 4], sys.byteorder) for at in range(0, len(numbers), 4)]
            if len(data) >= 4:
                need = 4 + int.from_bytes(data[:4], "little")
    finally:
        socket.detach()
    return bytes(data[4:need]), pipes


# ---------------------------------------------------------------------- shim


class BeginRefused(Exception):
    """The command did not begin; `stage` and `number` say where and why."""

    def __init__(self, stage: str, number: int) -> None:
        self.stage, self.number = stage, number
        super().__init__(stage, number)


class OutputFiles:
    """The files of the command's output, and their index. A file that cannot be written is given up: what comes for it
    is counted, so that a full disk stops neither the command nor its status."""

    def __init__(self, limit: int) -> None:
        self.files: dict[str, int] = {}
        self.kept = {OUT: 0, ERR: 0}
        self.dropped = 0
        self.error = b""
        self.limit = limit
        self.index_due = 0.0
        self._entries = b""
        self._stream = self._offset = self._length = self._combined = self._time = 0

    def keep(self, stream: int, data: bytes, now: float) -> bool:
        """Write it; False once there is more than the limit allows."""
        within = True
        if self.limit and len(data) > self.limit - self.kept[OUT] - self.kept[ERR]:
            within = False
            self.dropped += len(data)
            data = data[: self.limit - self.kept[OUT] - self.kept[ERR]]
            self.dropped -= len(data)
        done = self._append(NAMES[stream], data)
        self.dropped += len(data) - done
        if done:
            self._note(stream, done, now)
        return within

    def _append(self, name: str, data: bytes) -> int:
        """How many bytes of it the file takes. The first ones make the file: what is there already is not ours."""
        done = 0
        try:
            if name not in self.files:
                self.files[name] = -1
                self.files[name] = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            file = self.files[name]
            while file >= 0 and done < len(data):
                done += os.write(file, data[done:] if done else data)
        except OSError as error:
            if self.files[name] >= 0:
                os.close(self.files[name])
                self.files[name] = -1
            self.error = self.error or plain(f"{name}: {error.strerror}".encode())
        return done

    def _note(self, stream: int, length: int, now: float) -> None:
        if self._length and self._stream != stream:
            self._entries += self._entry()
            self._length = 0
        if not self._length:
            self._stream, self._offset = stream, self.kept[stream]
            self._combined, self._time = self.kept[OUT] + self.kept[ERR], int(time.time() * 1000)
        self._length += length
        self.kept[stream] += length
        if not self.index_due:
            self.index_due = now + INDEX_LATE
        if len(self._entries) > READ or self._length > 1 << 30:
            self.flush()

    def _entry(self) -> bytes:
        wide = (self._combined, self._offset, self._time)
        return (
            b"".join(number.to_bytes(8, "little") for number in wide)
            + self._length.to_bytes(4, "little")
            + self._stream.to_bytes(4, "little")
        )

    def flush(self) -> None:
        """Append what is not in the index yet. An index that cannot be written is given up: readers take what it does
        not cover from the files, one after the other."""
        if self._length:
            self._entries += self._entry()
            self._length = 0
        entries, self._entries, self.index_due = self._entries, b"", 0.0
        if entries:
            self._append("index", entries)


class ShimClient:
    """One client of the control socket. `parked` is a request that waits for room in the command's stdin."""

    def __init__(self, socket: _socket.socket) -> None:
        self.socket = socket
        self.received, self.unsent = bytearray(), bytearray()
        self.parked: tuple[int, bytes] | None = None
        self.watches = self.awaits_end = False
        self.told, self.told_at = (-1, -1), 0.0


class Leader:
    """A fork that gets ready, waits to be told what to run, and becomes that.

    `streams` are our ends of its output, `stdin` is the one of its input; with a terminal all three are one. `bound` is
    its input where that is a pipe of the Runtime's. It leaves when `go` is closed, as it is when its shim dies.
    """

    def __init__(self, terminal: bytes | None, pipes: list[int]) -> None:
        self.pid, self.start = 0, 0
        self.terminal = self.bound = self.stdin = -1
        if terminal is not None:
            self.terminal, slave = os.openpty()
            resize(self.terminal, *map(int, terminal.split()))
            self.streams, self.stdin = {self.terminal: OUT}, self.terminal
            theirs = (slave, slave, slave)
        elif pipes:
            self.bound, out_theirs = pipes
            err, err_theirs = os.pipe2(os.O_CLOEXEC)
            self.streams = {err: ERR}
            theirs = (self.bound, out_theirs, err_theirs)
        else:
            in_theirs, self.stdin = os.pipe2(os.O_CLOEXEC)
            out, out_theirs = os.pipe2(os.O_CLOEXEC)
            err, err_theirs = os.pipe2(os.O_CLOEXEC)
            self.streams = {out: OUT, err: ERR}
            theirs = (in_theirs, out_theirs, err_theirs)
        self.failure, failure_theirs = os.pipe2(os.O_CLOEXEC)
        go_theirs, self.go = os.pipe2(os.O_CLOEXEC)
        for fd in {*self.streams, self.stdin} - {-1}:
            os.set_blocking(fd, False)
        self._theirs = (*theirs, go_theirs, failure_theirs)
        self._fields = [b"%d" % number for number in (*self._theirs, int(self.terminal >= 0))]

    def fork(self, lock: int = -1, confined: Confined | None = None) -> None:
        """Raises BeginRefused if it cannot be confined. `lock` is not to be held by it."""
        if confined is None:
            self.pid = os.fork()
        else:
            self.pid = confined.fork(self._fields, list(self._theirs), self._theirs[4])
        if self.pid == 0:
            os.close(self.go)
            if lock >= 0:
                os.close(lock)
            run_leader(self._fields, confined)
        for fd in {*self._theirs} - {self.bound}:
            os.close(fd)
        if self.pid < 0:
            stage, _, number = os.read(self.failure, 64).partition(b" ")
            raise BeginRefused(stage.decode() or "sandbox", int(number or 0))
        self.start = start_of(self.pid)

    def let_go(self, message: bytes) -> None:
        """Tell it what to run. One that was killed meanwhile is reaped as any other."""
        try:
            while message:
                message = message[os.write(self.go, message) :]
        except OSError:
            pass
        os.close(self.go)

    def dismiss(self) -> None:
        """Let it leave without having run anything."""
        for fd in {*self.streams, self.stdin, self.failure, self.go}:
            os.close(fd)


def resize(terminal: int, rows: int, columns: int) -> None:
    size = b"".join(n.to_bytes(2, sys.byteorder) for n in (rows, columns, 0, 0))
    fcntl.ioctl(terminal, TIOCSWINSZ, size)


class Shim:
    """One command. Everything happens in one thread, in `run`; a signal only wakes it up."""

    def __init__(self, request: list[bytes], itself: bytes, answer: int, pipes: list[int]) -> None:
        self.folder, self.process_id, self.token, self.cwd, options, rules, count = request[:7]
        self.argv, self.env = request[7 : 7 + int(count)], request[7 + int(count) :]
        self.rules = rules
        self.confined: Confined | None = None
        self.keepers: set[int] = set()
        self.option = dict(line.split(b" ", 1) for line in options.splitlines())
        self.itself, self.answer, self.lock = itself, answer, -1

        self.phase, self.deadline = STARTING, 0.0
        self.leader = 0
        self.leader_status: int | None = None
        self.childless = False
        self.cause = b""
        self.grace = float(self.option[b"grace"])
        self.refused: BeginRefused | None = None
        self.found: dict[tuple[int, int], bytes] = {}
        self.strays = b"none"
        self.forced = self.survivors = 0

        self.poll = select.poll()
        self.streams: dict[int, int] = {}
        self.connections: dict[int, ShimClient] = {}
        self.verdict: tuple[int, ...] = ()
        self.pipes = pipes
        self.bound = self.terminal = self.stdin = -1
        self.unbound_at: float | None = None
        self.stdin_queue = bytearray()
        self.stdin_last, self.stdin_closing = 0, False

    def run(self, ahead: Leader | None) -> None:
        """Begin the command, with the leader that is there already if that is one for it, and see it to its end."""
        try:
            self.begin(ahead)
        except BeginRefused as refused:
            if self.lock >= 0:
                os.close(self.lock)  # who hears of it finds the folder free
            self._reply(f"failed {refused.stage} {refused.number}\n".encode(), last=True)
            return
        try:
            while self.phase != OVER:
                self._turn()
        except Exception as error:
            # Our bug. The command must not go on unwatched, and its end must not be told as something that it was not.
            self.cause = b"failed " + plain(repr(error).encode())
            self._kill_all_now()
        self._finish()

    # ------------------------------------------------------------ beginning

    def begin(self, ahead: Leader | None) -> None:
        """Claim the folder, write down who the leader is, and let it go."""
        umask = os.umask(0o077)
        try:
            self._enter_folder()
        except OSError as error:
            raise BeginRefused("folder", error.errno or 0) from None
        self._claim()
        wake, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.wake = wake
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.output = OutputFiles(int(self.option.get(b"output_limit", b"0")))
        try:
            leader = self._fork(ahead)
        except OSError as error:
            raise BeginRefused("fork", error.errno or 0) from None
        try:
            self.status = os.open("status.tmp", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            if os.write(self.status, b"\n" * STATUS_ROOM) != STATUS_ROOM:
                raise OSError(28, "No space left on device")
            self._open_control()
            identity = self._identity(leader)
            self._write_whole("started", identity)
        except OSError as error:
            # The leader, if there is one, reads the end of its pipe and leaves.
            raise BeginRefused("folder", error.errno or 0) from None
        self.began, self.began_wall = time.monotonic(), time.time()
        self.heard = self.began
        self.folder_due = self.began + FOLDER_CHECK
        has_input = b"%d" % (max(self.stdin, self.bound) >= 0)
        what = [has_input, b"%d" % umask, self.cwd, b"%d" % len(self.argv), *self.argv, *self.env]
        leader.let_go(pack([*what, TOKEN + b"=" + self.token]))
        self.env, self.argv = [], []  # values may be secrets
        self._reply(b"started\n" + identity + b"\n")  # meanwhile the leader runs the program
        if self.confined is not None:
            self.verdict = self.confined.verdict()
        for fd in (self.failure, self.wake, self.control.fileno(), *self.streams, *self.verdict):
            self.poll.register(fd, select.POLLIN)
        if self.bound >= 0:
            self.poll.register(self.bound, 0)  # its hang-up; what is to be read there is the command's

    def _enter_folder(self) -> None:
        """Make the folder, unless it is there, with the id of the process in its lock."""
        try:
            os.mkdir(self.folder, 0o700)
        except FileExistsError:
            pass
        os.chdir(self.folder)
        self.lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self.process_id and not os.fstat(self.lock).st_size:
            os.write(self.lock, self.process_id)

    def _open_control(self) -> None:
        self.control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            os.unlink("control")  # of a shim that was killed before it began the command
        except FileNotFoundError:
            pass
        self.control.bind("control")
        self.control.listen(16)
        self.control.setblocking(False)

    def _claim(self) -> None:
        # A reader that asks whether the lock is held takes it for an instant.
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
        else:
            raise BeginRefused("taken", 0)
        try:
            os.lstat("started")
        except FileNotFoundError:
            return
        except OSError as error:
            raise BeginRefused("folder", error.errno or 0) from None
        raise BeginRefused("spent", 0)

    def _fork(self, ahead: Leader | None) -> Leader:
        terminal = self.option.get(b"pty")
        other = terminal is not None or self.pipes or self.rules
        if ahead is not None and (other or os.waitpid(ahead.pid, os.WNOHANG)[0]):  # it may have been killed meanwhile
            ahead.dismiss()
            ahead = None
        leader = ahead or Leader(terminal, self.pipes)
        if self.rules:
            self._fork_confined(leader)
        elif ahead is None:
            leader.fork(self.lock)
        if leader.stdin >= 0 and terminal is None and self.option[b"stdin"] != b"1":
            os.close(leader.stdin)
            leader.stdin = -1
        self.leader, self.failure, self.streams = leader.pid, leader.failure, leader.streams
        self.terminal, self.stdin, self.bound = leader.terminal, leader.stdin, leader.bound
        self.rules = b""
        return leader

    def _fork_confined(self, leader: Leader) -> None:
        import confine  # noqa: PLC0415  # ty: ignore[import-not-found]

        try:
            self.confined = confine.Confined(unpack(self.rules), self.folder)
            leader.fork(self.lock, self.confined)
            self.confined.limit_processes(leader.pid)
        except OSError as error:
            raise BeginRefused("sandbox", error.errno or 0) from None
        self.keepers = self.confined.keepers

    def _identity(self, leader: Leader) -> bytes:
        lines = (
            b"leader %d %d" % (leader.pid, leader.start),
            b"token " + self.token,
            b"time %d" % int(time.time() * 1000),
            b"folder %d" % os.stat(".").st_ino,
        )
        return self.itself + b"\n".join(lines) + b"\n"

    def _write_whole(self, name: str, text: bytes) -> None:
        fd = os.open(name + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, text) != len(text):
                raise OSError(28, "No space left on device")
        finally:
            os.close(fd)
        os.rename(name + ".tmp", name)

    def _reply(self, text: bytes, last: bool = False) -> None:
        """Tell the Runtime how the beginning goes, until that is decided."""
        if self.answer < 0:
            return
        try:
            os.write(self.answer, text)
        except OSError:
            pass  # the Runtime went; the folder says it all
        if last:
            os.close(self.answer)
            self.answer = -1

    # ------------------------------------------------------------ the loop

    def _turn(self) -> None:
        """One round: what is ready, then what is due."""
        for fd, event in self.poll.poll(self._patience(time.monotonic())):
            if fd in self.streams or fd == self.stdin:
                if fd in self.streams and event != select.POLLOUT:
                    self._read_stream(fd)
                if fd == self.stdin and (event & select.POLLOUT or fd not in self.streams):
                    self._write_stdin()  # of a terminal also while it never stops printing
            elif fd == self.bound:
                self.poll.unregister(fd)
                self.unbound_at = time.monotonic()
            elif fd == self.wake:
                os.read(fd, 4096)
            elif fd == self.failure:
                self._exec_ended()
            elif fd in self.verdict:
                self.poll.unregister(fd)  # it says one thing, which `_reap` reads
            elif fd == self.control.fileno():
                self._accept()
            elif fd in self.connections:
                self._serve(self.connections[fd])
        self._reap()
        now = time.monotonic()
        self._advance(now)
        if self.output.index_due and now >= self.output.index_due:
            self.output.flush()
        self._tell_watchers(now)

    def _patience(self, now: float) -> int:
        """Milliseconds until something is due."""
        due = [self.output.index_due] if self.output.index_due else []
        if self.phase == RUNNING:
            due.append(self.folder_due)
            for name, since in ((b"timeout", self.began), (b"silence", self.heard)):
                if name in self.option:
                    due.append(since + float(self.option[name]))
            if self.unbound_at is not None:
                due.append(self.unbound_at + self.grace)
        elif self.phase == KILLING:
            due.append(now + KILL_PASS)
        elif self.phase == DRAINING:
            return 0
        elif self.phase != STARTING:
            due.append(self.deadline)
        kept = (self.output.kept[OUT], self.output.kept[ERR])
        due.extend(c.told_at + NEWS_EVERY for c in self.connections.values() if c.watches and c.told != kept)
        if not due:
            return -1
        return max(0, min(int((min(due) - now) * 1000) + 1, 1 << 30))

    def _read_stream(self, fd: int) -> None:
        try:
            data = os.read(fd, READ)
        except BlockingIOError:
            return
        except OSError:  # a terminal that nobody has open any more
            data = b""
        if not data:
            self.poll.unregister(fd)
            del self.streams[fd]
            if fd == self.terminal:
                self.stdin = -1
            os.close(fd)
            return
        self.heard = time.monotonic()
        if not self.output.keep(self.streams[fd], data, self.heard) and self.bound < 0:
            self._kill(b"killed output_limit", self.grace)  # of a bound one, what is too much is not kept

    def _reap(self) -> None:
        if self.confined is not None and (status := self.confined.ended()) is not None:
            self._leader_ended(status)
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.leader:
                    self._leader_ended(status)
                elif self.confined is not None and pid == self.confined.keeper:
                    # It may have told the end since we asked; otherwise it was killed, and the leader with it.
                    told = self.confined.ended()
                    self._leader_ended(_signal.SIGKILL if told is None else told)
        except ChildProcessError:
            self.childless = True

    def _leader_ended(self, status: int) -> None:
        if self.leader_status is None:
            self.leader_status = status
            self.ended, self.ended_wall = time.monotonic(), time.time()

    def _exec_ended(self) -> None:
        """The pipe of the leader's failure ended: by exec, or after a message."""
        text = os.read(self.failure, 64)
        self.poll.unregister(self.failure)
        os.close(self.failure)
        self.failure = -1
        if text:
            stage, _, number = text.partition(b" ")
            self.refused = BeginRefused(stage.decode(), int(number))
        else:
            self._reply(b"", last=True)
        if self.phase == STARTING:
            self.phase = RUNNING

    def _advance(self, now: float) -> None:
        """Go on to the next phase, if it is time."""
        if self.phase == RUNNING and self.leader_status is not None:
            self.phase, self.deadline = SETTLING, now + SETTLE
        elif self.phase == RUNNING:
            self._check_limits(now)
        if self.phase == SETTLING and not self.childless:
            if self.option[b"strays"] == b"leave":
                self._signal_tree()
                self.strays, self.phase = b"left", DRAINING
            elif now >= self.deadline:
                self.strays = b"killed"
                self._terminate(self.grace)
        if self.phase == TERMINATING and now >= self.deadline and not self.childless:
            self.phase, self.deadline = KILLING, now + KILLS
            self.forced = self._signal_tree(_signal.SIGKILL)
        elif self.phase == KILLING and not self.childless:
            left = self._signal_tree(_signal.SIGKILL)
            if now >= self.deadline:
                self.survivors = left
                self.phase, self.deadline = DRAINING, now + DRAIN
        if self.childless and RUNNING < self.phase < DRAINING:
            self.phase = DRAINING
        if self.phase == DRAINING:
            self._drain(now + DRAIN)
            self.phase = OVER

    def _check_limits(self, now: float) -> None:
        if b"timeout" in self.option and now >= self.began + float(self.option[b"timeout"]):
            self._kill(b"timed_out wall", self.grace)
        elif b"silence" in self.option and now >= self.heard + float(self.option[b"silence"]):
            self._kill(b"timed_out silence", self.grace)
        elif self.unbound_at is not None and now >= self.unbound_at + self.grace:
            self._kill(b"killed its Runtime does not write to it any more", self.grace)
        elif now >= self.folder_due:
            self.folder_due = now + FOLDER_CHECK
            if os.fstat(self.lock).st_nlink == 0:
                self._kill(b"killed its folder was deleted", self.grace)

    def _drain(self, until: float) -> None:
        """Read what the pipes hold, and not what may come: whoever still has one open is not ours, or is left."""
        while self.streams and time.monotonic() < until:
            ready = [fd for fd, _ in self.poll.poll(0) if fd in self.streams]
            if not ready:
                return
            for fd in ready:
                self._read_stream(fd)

    # ------------------------------------------------------------ killing

    def _kill(self, cause: bytes, grace: float) -> None:
        """End the command. The first cause is the one that counts, and none if the leader ended before it came."""
        self._reap()
        if self.leader_status is None and not self.cause:
            self.cause = cause
        if self.phase <= SETTLING and not self.childless:
            self._terminate(grace)
        elif self.phase == TERMINATING:
            self.deadline = min(self.deadline, time.monotonic() + grace)

    def _terminate(self, grace: float) -> None:
        if grace > 0:
            self._signal_tree(_signal.SIGTERM, _signal.SIGCONT)  # a stopped process takes its TERM when it goes on
        self.phase, self.deadline = TERMINATING, time.monotonic() + grace

    def _signal_tree(self, *numbers: int) -> int:
        """Signal every living descendant, and note it; how many there are."""
        children: dict[int, list[tuple[int, int, bytes, bytes]]] = {}
        groups: set[int] = set()
        for name in os.listdir("/proc"):
            if name[0] in "123456789":
                try:
                    stat = stat_of(int(name))
                except OSError:
                    continue  # the next pass may see it; that nothing is left is said by `childless` alone
                if stat is not None:
                    children.setdefault(stat[1], []).append((int(name), stat[4], stat[0], stat[5]))
                    if stat[1] == os.getpid():
                        groups.add(stat[2])
        if _signal.SIGKILL in numbers:
            # At once for all members, so that none forks away meanwhile. The numbers of these groups are not another's:
            # a child of ours is in each, and is not reaped before this returns.
            for group in groups - {os.getpgrp()}:
                try:
                    os.killpg(group, _signal.SIGKILL)
                except OSError:
                    pass
        living, parents = 0, [os.getpid()]
        while parents:
            for pid, start, state, comm in children.pop(parents.pop(), ()):
                parents.append(pid)
                if state in b"ZX":
                    continue
                if pid not in self.keepers:
                    living += 1
                    self.found.setdefault((pid, start), comm)
                for number in numbers if pid not in self.keepers else {_signal.SIGKILL}.intersection(numbers):
                    send_signal(pid, start, number)
        return living

    def _kill_all_now(self) -> None:
        until = time.monotonic() + KILLS
        while not self.childless and time.monotonic() < until:
            self._signal_tree(_signal.SIGKILL)
            self._reap()
            time.sleep(0.005)

    # ------------------------------------------------------------ stdin and terminal

    def _take_stdin(self, number: int, data: bytes, close: bool) -> bytes | None:
        """Queue bytes for the command, once for each number; None while there is no room."""
        if number <= self.stdin_last:
            return b"repeated"
        if self.leader_status is not None:
            return b"exited"
        if self.stdin < 0 or self.stdin_closing:
            return b"closed"
        if self.stdin_queue and len(self.stdin_queue) + len(data) > STDIN_ROOM:
            return None
        self.stdin_last = number
        self.stdin_queue += data
        if close and self.terminal >= 0:
            self.stdin_queue += b"\x04"
        elif close:
            self.stdin_closing = True
        self._write_stdin()
        return b"ok"

    def _write_stdin(self) -> None:
        try:
            while self.stdin_queue:
                del self.stdin_queue[: os.write(self.stdin, self.stdin_queue[:READ])]
        except BlockingIOError:
            pass
        except OSError:  # nobody reads it any more
            self.stdin_queue.clear()
            self.stdin_closing = self.terminal < 0
        if self.stdin_queue:
            self._listen(self.stdin, select.POLLOUT)
        elif self.terminal < 0:
            self._listen(self.stdin, 0)
            if self.stdin_closing:
                os.close(self.stdin)
                self.stdin = -1
        else:
            self._listen(self.terminal, 0)
        for connection in [c for c in self.connections.values() if c.parked]:
            self._serve_parked(connection)

    def _listen(self, fd: int, also: int) -> None:
        """Poll a descriptor for its stream, if it is one, and for `also`."""
        events = also | (select.POLLIN if fd in self.streams else 0)
        if events:
            self.poll.register(fd, events)
        else:
            try:
                self.poll.unregister(fd)
            except KeyError:
                pass

    # ------------------------------------------------------------ control

    def _accept(self) -> None:
        try:
            accepted: tuple[int, object] = getattr(self.control, "_accept")()  # noqa: B009 - `accept` is Python's
        except OSError:
            return
        fd = accepted[0]
        socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd)
        socket.setblocking(False)
        if len(self.connections) >= CONNECTIONS:
            # A kill must be heard. Those that only listen go on by looking at the files.
            idle = [c for c in self.connections.values() if not c.awaits_end and c.parked is None]
            if not idle:
                socket.close()
                return
            self._drop(idle[0])
        self.connections[fd] = ShimClient(socket)
        self.poll.register(fd, select.POLLIN)

    def _drop(self, connection: ShimClient) -> None:
        fd = connection.socket.fileno()
        if fd in self.connections:
            del self.connections[fd]
            self.poll.unregister(fd)
            connection.socket.close()

    def _serve(self, connection: ShimClient) -> None:
        try:
            self._send(connection, b"")
            data = connection.socket.recv(READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        if not data or len(connection.received) > 2 * FRAME_ROOM:
            self._drop(connection)
            return
        self._serve_parked(connection)

    def _serve_parked(self, connection: ShimClient) -> None:
        """Answer requests in their order, until one has to wait."""
        received = connection.received
        while True:
            if connection.parked is None:
                size = int.from_bytes(received[:4], "little")
                if size > FRAME_ROOM or (len(received) >= 4 and size == 0):
                    self._drop(connection)
                    return
                if len(received) < 4 + size:
                    return
                connection.parked = received[4], bytes(received[5 : 4 + size])
                del received[: 4 + size]
            request, connection.parked = connection.parked, None  # what it changes may let another one go on
            try:
                answer = self._answer(connection, *request)
            except (ValueError, OverflowError):
                self._drop(connection)
                return
            if answer is None:
                connection.parked = request
                return
            if answer:
                self._send(connection, frame(0, answer))

    def _answer(self, connection: ShimClient, code: int, body: bytes) -> bytes | None:
        """The answer to a request; empty if it comes later, None if the request has to wait."""
        if code in (STDIN, CLOSE_STDIN):
            return self._take_stdin(int.from_bytes(body[:8], "little"), body[8:], code == CLOSE_STDIN)
        if code == WATCH:
            connection.watches = True
            return b""
        if code == KILL:
            connection.awaits_end = True
            grace, _, reason = body.partition(b" ")
            self._kill(b"killed " + plain(reason), float(grace))
            return b""
        if self.leader_status is not None:
            return b"exited"
        if code == SIGNAL:
            try:
                os.killpg(self.leader, int(body))
            except OSError:
                return b"unsupported"
            return b"ok"
        if code == RESIZE and self.terminal >= 0:
            rows, _, columns = body.partition(b" ")
            resize(self.terminal, int(rows), int(columns))
            return b"ok"
        return b"unsupported"

    def _send(self, connection: ShimClient, data: bytes) -> None:
        connection.unsent += data
        try:
            while connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        also = select.POLLOUT if connection.unsent else 0
        self.poll.register(connection.socket.fileno(), select.POLLIN | also)

    def _tell_watchers(self, now: float) -> None:
        kept = (self.output.kept[OUT], self.output.kept[ERR])
        for connection in list(self.connections.values()):
            if connection.watches and connection.told != kept and now >= connection.told_at + NEWS_EVERY:
                if self.output.index_due:
                    self.output.flush()
                connection.told, connection.told_at = kept, now
                if not connection.unsent:
                    self._send(connection, frame(0, b"news %d %d" % kept))

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        self.output.flush()
        if self.confined is not None:
            self.confined.close()
        text = self._status_text()
        os.pwrite(self.status, text, 0)
        os.ftruncate(self.status, len(text))
        try:
            os.fsync(self.status)
        except OSError:
            pass  # readers may still see it; after a power failure it is `lost`
        os.rename("status.tmp", "status")
        if self.refused is not None:
            self._reply(f"failed {self.refused.stage} {self.refused.number}\n".encode(), last=True)
        else:
            self._reply(b"", last=True)
        for connection in list(self.connections.values()):
            if connection.awaits_end:
                connection.socket.settimeout(1.0)
                try:
                    connection.socket.sendall(connection.unsent + frame(0, b"ended\n" + text))
                except OSError:
                    pass

    def _status_text(self) -> bytes:
        status = self.leader_status
        if self.refused is not None:
            end = f"spawn_failed {self.refused.stage} {self.refused.number}".encode()
        elif self.cause:
            end = self.cause
        elif status is None:
            end = b"failed the leader did not end"
        elif os.WIFSIGNALED(status):
            end = b"signaled %d" % os.WTERMSIG(status)
        else:
            end = b"exited %d" % os.WEXITSTATUS(status)
        if status is None:
            self.ended, self.ended_wall = time.monotonic(), time.time()
        lines = [
            b"end " + end,
            b"started %d" % int(self.began_wall * 1000),
            b"ended %d" % int(self.ended_wall * 1000),
            b"duration %.6f" % (self.ended - self.began),
            b"stdout %d" % self.output.kept[OUT],
            b"stderr %d" % self.output.kept[ERR],
            b"dropped %d" % self.output.dropped,
            b"drain " + (b"incomplete" if self.streams else b"complete"),
            b"strays " + self.strays,
            b"found %d" % len(self.found),
            b"forced %d" % self.forced,
            b"survivors %d" % self.survivors,
        ]
        if status is not None and os.WIFSIGNALED(status):
            lines.append(b"signal %d" % os.WTERMSIG(status))
        elif status is not None:
            lines.append(b"code %d" % os.WEXITSTATUS(status))
        if self.output.error:
            lines.append(b"error " + self.output.error)
        listed = list(self.found.items())[:LISTED]
        lines.extend(b"process %d %d %s" % (pid, start, plain(name, 32)) for (pid, start), name in listed)
        return b"\n".join(lines) + b"\n"


def run_leader(leader: list[bytes], confined: Confined | None) -> None:
    """The leader, from its fork to its exec: it gets ready, and waits to be told what to run."""
    stdin, stdout, stderr, go, failure, terminal = map(int, leader)
    stage = b"setup"
    try:
        os.setsid()
        if terminal:
            fcntl.ioctl(stdin, TIOCSCTTY, 0)
        _signal.set_wakeup_fd(-1)
        for number in _signal.valid_signals():
            if number not in (_signal.SIGKILL, _signal.SIGSTOP):
                _signal.signal(number, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        message = _read_message(go)
        if message is None:
            os._exit(0)
        has_input, umask, cwd, count, *rest = unpack(message)
        argv, env = rest[: int(count)], dict(pair.split(b"=", 1) for pair in rest[int(count) :])
        os.umask(int(umask))
        for number, fd in enumerate((stdin if has_input == b"1" else 0, stdout, stderr)):
            os.dup2(fd, number)
        os.closerange(3, failure)
        os.closerange(failure + 1, os.sysconf("SC_OPEN_MAX"))
        os.set_inheritable(failure, False)
        stage = b"cwd"
        os.chdir(cwd)
        if confined is not None:
            stage = b"sandbox"
            env = confined.environment(env)
            confined.lock()
        stage = b"exec"
        _exec(argv, env)
    except OSError as error:
        os.write(failure, b"%s %d" % (stage, error.errno or 0))
    finally:
        os._exit(127)


def _read_message(fd: int) -> bytes | None:
    """What a message says; None if it ends before it is whole."""
    data, need = b"", 4
    while len(data) < need:
        more = os.read(fd, need - len(data))
        if not more:
            return None
        data += more
        if len(data) >= 4:
            need = 4 + int.from_bytes(data[:4], "little")
    return data[4:]


def _exec(argv: list[bytes], env: dict[bytes, bytes]) -> None:
    """Replace this process, looking a bare name up in the command's own PATH."""
    if b"/" in argv[0]:
        os.execve(argv[0], argv, env)
    refused: OSError | None = None
    for folder in env.get(b"PATH", b"/bin:/usr/bin").split(b":"):
        try:
            os.execve((folder or b".") + b"/" + argv[0], argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            refused = refused or error
    raise refused or FileNotFoundError(2, "no such program")


if __name__ == "__main__":
    spawn_shims(int(sys.argv[1]))
