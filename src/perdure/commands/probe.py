"""Attacks on the machine, made from inside a sandbox: the self-test that says what is enforced here, as this user.

`examine` runs outside: it makes what can be attacked (files, a store, listening sockets, a process with a secret), runs
`attack` as a confined command, and prints for each attack whether it was refused. Without a confinement all of them
succeed, which a test proves; so a line that says "refused" tells something of the sandbox, and not of the machine.

Like the shim it runs on what the interpreter has built in, because it is part of the first start of a command.
"""

from __future__ import annotations

import _ctypes
import _socket
import fcntl
import os
import select

import confine  # type: ignore[import-not-found]  # ty: ignore[import-not-found]  # its folder is on the path
import shim  # type: ignore[import-not-found]  # ty: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = b"probe-secret"
READING, TEMPORARY, CHANGING = "reading", "temporary files", "changing"
GETFLAGS, SETFLAGS, NODUMP = 0x80086601, 0x40086602, 0x40
SYS = {"x86_64": (425, 101, 56), "aarch64": (425, 117, 220)}
"""io_uring_setup, ptrace, clone."""


def _write(path: bytes, data: bytes = b"x", flags: int = os.O_CREAT) -> None:
    fd = os.open(path, os.O_WRONLY | flags, 0o600)
    os.write(fd, data)
    os.close(fd)


def _read(path: bytes) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _must(found: bool) -> None:
    if not found:
        raise PermissionError(1, "nothing of the host's was reached")


def _connect(family: int, kind: int, address: object, message: bytes = b"") -> None:
    with_host = _socket.socket(family, kind)
    with_host.settimeout(2.0)
    with_host.connect(address)  # type: ignore[arg-type]  # ty: ignore[invalid-argument-type]
    if message:
        with_host.send(message)
        _must(with_host.recv(16) == b"answer")
    with_host.close()


def _call(number: int, *args: int | bytes | None) -> None:
    kernel = confine.Kernel()
    confine.CALLS["probe"] = (number, number)
    kernel.do("probe", *args)


def _read_by_link(base: bytes, root: bytes) -> bytes:
    os.symlink(base + b"/outside", root + b"/link")
    return _read(root + b"/link/secret")


def _send_from_pair(address: bytes) -> None:
    """One of a pair may be told to send elsewhere, if it is one for datagrams."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    try:
        ours.sendto(b"message", address)
    finally:
        ours.close()
        theirs.close()


def _make_with_mode(path: bytes, mode: int) -> None:
    _write(path)
    os.chmod(path, mode)
    _must(os.stat(path).st_mode & mode == mode)


def _change_flags(path: bytes) -> None:
    """Through a descriptor that may only be read: no permission of the file is asked for."""
    fd = os.open(path, os.O_RDONLY)
    try:
        flags = int.from_bytes(fcntl.ioctl(fd, GETFLAGS, bytes(8)), "little")
        fcntl.ioctl(fd, SETFLAGS, (flags ^ NODUMP).to_bytes(8, "little"))
    finally:
        os.close(fd)


def _change_mode(path: str | int) -> None:
    """To what it is: the attack is made on devices of the machine."""
    os.chmod(path, os.stat(path).st_mode & 0o7777)


def _change_mode_of_input() -> None:
    _change_mode(0 if os.fstat(0).st_rdev == os.stat("/dev/null").st_rdev else "/dev/null")


def _change_times(path: bytes) -> None:
    """Through a descriptor that may only be read, as the flags of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.utime(fd, (0, 0))
    finally:
        os.close(fd)


MMAP, READ_WRITE_RUN, PRIVATE_ANONYMOUS = 9, 7, 0x22
SOCKET_32 = bytes.fromhex("53 b867010000 bb01000000 b901000000 31d2 cd80 5b 4898 c3")
"""socket(AF_UNIX, SOCK_STREAM, 0) as a program for 32 bits asks for it: number 359, by interrupt 0x80."""


def _connect_by_32_bits(address: bytes) -> None:
    """Which a filter that looks at numbers alone takes for another call."""

    def connect() -> None:
        kernel = confine.Kernel()
        confine.CALLS["probe"] = (MMAP, MMAP)
        page = kernel.do("probe", 0, 4096, READ_WRITE_RUN, PRIVATE_ANONYMOUS, -1, 0)
        itself: str = None  # type: ignore[assignment]  # ty: ignore[invalid-assignment]  # as in confine
        copy = confine._Function(_ctypes.dlsym(_ctypes.dlopen(itself, 0), "memmove"))
        copy(confine._Long(page), SOCKET_32, confine._Long(len(SOCKET_32)))
        fd = confine._Function(page)()
        _must(fd >= 0)
        _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd).connect(address)

    _in_child(connect)


def _connect_by_x32(address: bytes) -> None:
    kernel = confine.Kernel()
    confine.CALLS["probe"] = (confine.X32 | 41, confine.X32 | 41)
    fd = kernel.do("probe", _socket.AF_UNIX, _socket.SOCK_STREAM, 0)
    _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd).connect(address)


def _in_child(attempt: Callable[[], None]) -> None:
    """What may end its process, or leave it unusable."""
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
            os._exit(0)
        finally:
            os._exit(1)
    _must(os.waitpid(pid, 0)[1] == 0)


def _make_git(root: bytes) -> None:
    if not os.path.isdir(root + b"/.git"):
        os.mkdir(root + b"/.git")
    os.mkdir(root + b"/.git/hooks")


def _rename_git(root: bytes) -> None:
    os.rename(root + b"/.git", root + b"/moved")
    os.mkdir(root + b"/.git")


class Target:
    """What is attacked, as both sides know it."""

    def __init__(self, base: bytes, pid: int, tcp: int, udp: int, token: bytes) -> None:
        self.base, self.root = base, base + b"/root"
        self.pid, self.tcp, self.udp, self.token = pid, tcp, udp, token
        self.uring, self.ptrace, self.clone = SYS.get(os.uname().machine, (425, 117, 220))

    def granted(self) -> dict[str, tuple[object, ...]]:
        """What must work."""
        return {
            READING: (lambda: (_read(self.root + b"/file"), _read(b"/dev/urandom")),),
            TEMPORARY: (lambda: _write(os.environb[b"TMPDIR"] + b"/made"),),
            CHANGING: (_write, self.root + b"/made"),
        }

    def attacks(self) -> dict[str, tuple[object, ...]]:
        """By name: a function, and what it is called with."""
        base, root = self.base, self.root
        proc = b"/proc/%d/" % self.pid
        inet, stream, datagram = _socket.AF_INET, _socket.SOCK_STREAM, _socket.SOCK_DGRAM
        return {
            "write outside": (_write, base + b"/outside/new"),
            "read outside": (_read, base + b"/outside/secret"),
            "truncate outside": (os.truncate, base + b"/outside/secret", 0),
            "link to outside": (_read_by_link, base, root),
            "chmod outside": (os.chmod, base + b"/outside/secret", 0o777),
            "git configuration": (_write, root + b"/.git/config", b"[core]\n", 0),
            "git hooks": (_write, root + b"/.git/hooks/post-checkout"),
            "times of a protected file": (_change_times, root + b"/.git/config"),
            "git replaced": (_rename_git, root),
            "git made": (_make_git, base + b"/second"),
            "store": (_read, base + b"/store/runtime.db"),
            "store in a root": (_read, root + b"/data/.perdure/runtime.db"),
            "old store in a root": (_read, root + b"/data/.mainstay/runtime.db"),
            "store in a root replaced": (os.rename, root + b"/data", root + b"/elsewhere"),
            "tcp": (_connect, inet, stream, ("127.0.0.1", self.tcp)),
            "udp and dns": (_connect, inet, datagram, ("127.0.0.1", self.udp), b"question"),
            "socket in the file system": (_connect, _socket.AF_UNIX, stream, b"service.sock"),
            "datagrams to the file system": (_send_from_pair, b"datagrams.sock"),
            "set-user-id program": (_make_with_mode, os.environb[b"TMPDIR"] + b"/as-user", 0o4755),
            "set-group-id program": (_make_with_mode, os.environb[b"TMPDIR"] + b"/as-group", 0o2755),
            "abstract socket": (_connect, _socket.AF_UNIX, stream, b"\0" + self.token),
            "io_uring": (_call, self.uring, 1, bytes(120)),
            "environment of others": (lambda: _must(SECRET in _read(proc + b"environ")),),
            "memory of others": (lambda: os.close(os.open(proc + b"mem", os.O_RDONLY)),),
            "command line of others": (lambda: _must(self.token in _read(proc + b"cmdline")),),
            "environment of its parent": (lambda: _must(len(_read(b"/proc/%d/environ" % os.getppid())) > 0),),
            "memory of its parent": (lambda: os.close(os.open(b"/proc/%d/mem" % os.getppid(), os.O_RDWR)),),
            "descriptors of its parent": (os.readlink, b"/proc/%d/fd/0" % os.getppid()),
            "signals": (os.kill, self.pid, 0),
            "priority of others": (lambda: os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(0, self.pid)),),
            "ptrace": (_in_child, lambda: _call(self.ptrace, 0, 0, None, None)),
            "new namespaces": (_new_namespace, self.clone),
        }

    def possible(self) -> dict[str, tuple[object, ...]]:
        """Attacks that need something which not every kernel, processor or file system has."""
        return {
            "socket by 32-bit calls": (_connect_by_32_bits, b"service.sock"),
            "socket by x32 calls": (_connect_by_x32, b"service.sock"),
            "flags of a file": (_change_flags, self.root + b"/.git/config"),
            "mode of a device": (_change_mode, "/dev/full"),
            "mode of its input": (_change_mode_of_input,),
        }


def _new_namespace(clone: int) -> None:
    kernel = confine.Kernel()
    pid = kernel.do("clone", confine.NEWUSER | confine.NEWNS | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def attack(target: Target, possible: list[str]) -> None:
    """Inside. One line for each attack, and one that says that what is granted works."""
    lines = []
    more = {name: each for name, each in target.possible().items() if name in possible}
    for name, (function, *args) in {**target.granted(), **more, **target.attacks()}.items():
        try:
            function(*args)  # type: ignore[operator]  # ty: ignore[call-non-callable]
            lines.append(f"{name}: open")
        except OSError as error:
            lines.append(f"{name}: refused {error.errno}")
    os.write(1, ("\n".join(lines) + "\n").encode())


def examine(base: bytes, fields: list[bytes], python: list[bytes]) -> None:
    """Outside. `base` is an empty folder of ours; the lines of `attack` go to stdout."""
    token = b"perdure-probe-%d" % os.getpid()
    git, own, old = b"root/.git", b"root/data/.perdure", b"root/data/.mainstay"
    for name in (b"root", git, git + b"/hooks", b"root/data", own, old, b"outside", b"second", b"store", b"job"):
        os.mkdir(base + b"/" + name, 0o700)
    stores = (b"store/runtime.db", own + b"/runtime.db", old + b"/runtime.db")
    for name in (b"outside/secret", b"root/file", git + b"/config", *stores):
        _write(base + b"/" + name, SECRET)
    tcp = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    tcp.bind(("127.0.0.1", 0))
    tcp.listen(8)
    udp = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    services = []
    for address in (b"service.sock", b"\0" + token, b"datagrams.sock"):
        stream = address != b"datagrams.sock"
        service = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM if stream else _socket.SOCK_DGRAM)
        os.chdir(base + b"/root")  # an address has room for 107 bytes
        service.bind(address)
        if stream:
            service.listen(8)
        services.append(service)
    victim, ready = _victim(token)
    here = os.fsencode(os.path.dirname(os.path.abspath(__file__)))
    ports = [b"%d" % each.getsockname()[1] for each in (tcp, udp)]
    target = Target(base, victim, 0, 0, token)
    possible = [name for name, (function, *args) in target.possible().items() if _works(function, args)]
    argv = [*python, b"-c", _ATTACK, here, base, b"%d" % victim, *ports, token, ",".join(possible).encode()]
    try:
        os.write(1, run(base, fields, argv, udp))
    finally:
        os.close(ready)
        os.waitpid(victim, 0)


_ATTACK = b"""
import os, sys
sys.path.append(sys.argv[1])
import probe
target = probe.Target(os.fsencode(sys.argv[2]), *map(int, sys.argv[3:6]), os.fsencode(sys.argv[6]))
probe.attack(target, sys.argv[7].split(","))
"""


def _works(function: object, args: list[object]) -> bool:
    try:
        _in_child(lambda: function(*args))  # type: ignore[operator]  # ty: ignore[call-non-callable]
    except OSError:
        return False
    return True


def _victim(token: bytes) -> tuple[int, int]:
    """A process of this user with a secret in its environment and its name on its command line, until the returned
    descriptor is closed."""
    read, write = os.pipe()
    up, up_theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(read, 0)
        os.dup2(up_theirs, 1)
        try:
            os.execve("/bin/sh", ["sh", "-c", "echo; read x", os.fsdecode(token)], {"PROBE": os.fsdecode(SECRET)})
        finally:
            os._exit(1)
    os.close(read)
    os.close(up_theirs)
    os.read(up, 1)
    os.close(up)
    return pid, write


def run(base: bytes, fields: list[bytes], argv: list[bytes], udp: _socket.socket) -> bytes:
    """Run a program as a shim would, without a job: what it printed. Its questions are answered meanwhile."""
    os.chdir(base + b"/job")
    out, out_theirs = os.pipe2(os.O_CLOEXEC)
    failure, failure_theirs = os.pipe2(os.O_CLOEXEC)
    go_theirs, go = os.pipe2(os.O_CLOEXEC)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    theirs = [null, out_theirs, failure_theirs, go_theirs]
    leader = [b"%d" % each for each in (null, out_theirs, out_theirs, go_theirs, failure_theirs, 0)]
    what = [b"1", b"%d" % 0o077, base + b"/root", b"%d" % len(argv), *argv, b"PATH=/usr/bin:/bin"]
    confined = confine.Confined(fields, base + b"/job") if fields else None
    if confined is None:
        what.append(b"TMPDIR=" + base)
        pid = os.fork()
    else:
        pid = confined.fork(leader, theirs, failure_theirs)
    if pid == 0:
        os.close(go)
        shim.run_leader(leader, confined)
    for fd in theirs:
        os.close(fd)
    if pid > 0:
        os.write(go, shim.pack(what))
    printed = _read_answering(out, udp)
    why = os.read(failure, 64)
    try:
        os.waitpid(pid if confined is None else confined.keeper or pid, 0)
    except ChildProcessError:
        pass  # it did not begin
    return b"failed " + why + b"\n" if why or pid < 0 else printed


def _read_answering(out: int, udp: _socket.socket) -> bytes:
    printed = b""
    watch = select.poll()
    watch.register(out, select.POLLIN)
    watch.register(udp.fileno(), select.POLLIN)
    while True:
        for fd, _ in watch.poll():
            if fd != out:
                _, asker = udp.recvfrom(64)
                udp.sendto(b"answer", asker)
            elif data := os.read(out, 1 << 16):
                printed += data
            else:
                return printed


def main(request: bytes) -> None:
    """What `sandbox.py` asks for: the folder, the rules with their number, and how to run Python."""
    base, count, *fields = shim.unpack(request)
    examine(base, fields[: int(count)], fields[int(count) :])
