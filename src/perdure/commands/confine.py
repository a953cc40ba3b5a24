"""The confinement of one command: made by its shim between fork and exec, and loaded by no other shim.

    namespaces    shim ──clone──▶ keeper (process 1 of its own pid namespace) ──fork──▶ leader ──▶ lock ──▶ exec
    bubblewrap    shim ──fork──▶ bwrap ──▶ keeper ──fork──▶ leader ──▶ lock ──▶ exec
    landlock      shim ──fork──▶ leader ──▶ lock ──▶ exec

The shim itself stays outside, in the host's namespaces. The **keeper** sees the command's namespaces made, begins the
leader and reaps what the leader leaves. It tells the shim through a socket who the leader is, as the kernel's stamp on
the message says it in the shim's own numbers, and how it ended: process 1 of a namespace cannot end itself with a
signal. It ends when nothing is left, and all processes of the namespace end with it. It ignores every signal but KILL,
as process 1 does, so a TERM to the whole tree ends the command and not what reaps it.

What holds, and by what:

    files             a file system of its own: an empty one into which the granted folders are mounted, read-only or
                      not; what is protected is mounted read-only over itself, what is hidden is covered. Landlock says
                      the same once more where the kernel has it, and alone where there is no mount namespace
    links             on the way to this Python are made again where no granted folder has them: as links, which grant
                      nothing
    names to come     a folder that is protected or hidden and not there yet is made, empty, to be mounted over
    renaming          every folder between a root and what is protected in it is a mount too: those cannot be renamed
    network           a network namespace with nothing but its own loopback; seccomp refuses the other families, and
                      those in the file system (AF_UNIX), which no namespace covers; without one it refuses all
    other processes   a pid namespace with its own /proc; without one Landlock's scopes, and /proc is not granted
    the kernel        no capabilities, no new privileges, and the calls in `REFUSED`

A command that only `computes` is granted less: it can make no file, no process and no thread. The kernel ends it when
its shim dies.

Attributes (mode, owner, times) are no matter of Landlock's, so without a mount namespace the calls that change them are
refused. Calls are refused with EPERM; an architecture other than the interpreter's is refused as a whole.

It runs on what the interpreter has built in, like the shim: paths are bytes, and the kernel is called by number.
"""

from __future__ import annotations

import _ctypes
import _signal  # type: ignore[import-not-found]  # ty: ignore[import-not-found]  # as in the shim
import _socket
import fcntl
import os
import sys

SETUP_SECONDS = 30.0
TEMPORARY_BYTES = min(2 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
"""Of the private /tmp and of /dev/shm, each, which are in memory."""
COPIED_BYTES = 1 << 18
"""Of a file of the system's that a sandbox may have as a copy."""
TEMPORARY, HOME = b"/tmp", b"/tmp/home"
DEVICES = (b"null", b"zero", b"full", b"random", b"urandom", b"tty")
PROC_FILES = (b"cpuinfo", b"meminfo", b"stat", b"version", b"uptime", b"loadavg", b"filesystems")
"""Of /proc, where it is the host's: nothing about a process."""
FOLDERS = (b".git", b".perdure", b".mainstay", b"hooks", b"modules")
"""Names that are made as folders where they are protected and not there; others are made as files."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_EMPTY_PATH, AT_RECURSIVE = 0x1000, 0x8000
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
NEW_ANY = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
ADDR_NO_RANDOMIZE = 0x40000
CAPABILITY_VERSION = 0x20080522
EPERM, ENOENT, EAGAIN, EINVAL, ENOSYS, ELOOP, ETIMEDOUT = 1, 2, 11, 22, 38, 40, 110
S_IFMT, S_IFLNK, S_IFREG = 0o170000, 0o120000, 0o100000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
RLIMIT = {b"cpu": 0, b"file_size": 1, b"processes": 6, b"memory": 9}
RLIMIT_CORE = 4
SCM_CREDENTIALS = 2

# Landlock: what may be done to files, by the version of the interface that knows it.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
MAKE_CHAR, MAKE_BLOCK, REFER = 1 << 6, 1 << 11, 1 << 13
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
READING = EXECUTE | READ_FILE | READ_DIR
SCOPES = 3
"""Neither abstract sockets of processes outside nor signals to them."""
LANDLOCK_ALONE = 6
"""The version from which on Landlock does without namespaces: it knows truncation (3) and scopes (6)."""

MACHINES = {"x86_64": 0, "aarch64": 1}
AUDIT = (0xC000003E, 0xC00000B7)
X32 = 0x40000000

CALLS = {
    "clone": (56, 220), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "mount_setattr": (442, 442),
    "prctl": (157, 167), "capset": (126, 91), "seccomp": (317, 277), "prlimit64": (302, 261),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    "socket": (41, 198), "socketpair": (53, 199), "openat2": (437, 437), "ioctl": (16, 29), "clone3": (435, 435),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "personality": (135, 92),
}  # fmt: skip
REFUSED = (
    # other processes
    (101, 117), (310, 270), (311, 271), (438, 438), (440, 440), (312, 272),  # ptrace, process_vm_*, pidfd_getfd, kcmp
    # keys, bpf, faults, counters, rings
    (248, 217), (249, 218), (250, 219), (321, 280), (323, 282), (298, 241), (425, 425), (426, 426), (427, 427),
    # mounts and namespaces
    (165, 40), (166, 39), (155, 41), (161, 51), (428, 428), (429, 429), (430, 430), (431, 431), (432, 432), (433, 433),
    (442, 442), (467, 467), (272, 97), (308, 268),
    # files by handle, marks on file systems
    (304, 265), (300, 262),
    # modules, other kernels, power, swap, clocks, names, accounting, quotas, the log
    (175, 105), (313, 273), (176, 106), (246, 104), (320, 294), (169, 142), (167, 224), (168, 225), (164, 170),
    (227, 112), (305, 266), (170, 161), (171, 162), (163, 89), (179, 60), (443, 443), (103, 116), (153, 58),
)  # fmt: skip
REFUSED_X86 = (172, 173)
"""Ports: iopl, ioperm."""
FORKS_X86 = (57, 58)
"""The older shapes of clone: fork, vfork."""
SHARED = (
    # System V and POSIX: memory, semaphores and queues of other processes of this user
    (29, 194), (30, 196), (31, 195), (64, 190), (65, 193), (66, 191), (220, 192), (68, 186), (69, 189), (70, 188),
    (71, 187), (240, 180), (241, 181), (279, 239), (256, 238),
)  # fmt: skip
MODES = ((91, 52, 1), (268, 53, 2), (452, 452, 2), (259, 33, 2))
MODES_X86 = ((90, 1), (85, 1), (133, 1))
"""Calls that give a file its mode, with the argument that is it: fchmod, fchmodat, fchmodat2, mknodat; chmod, creat,
mknod."""
OPENING, OPENING_X86 = (257, 56, 2), (2, 1)
"""openat and open, with the argument that is their flags; the mode is behind it, where they make a file."""
OF_OTHERS = ((302, 261), (203, 122), (144, 119), (142, 118), (314, 274))
"""Calls whose first argument names a process, 0 being the caller: limits and scheduling."""
ATTRIBUTES = (
    # mode, owner, times and extended attributes
    (91, 52), (268, 53), (452, 452), (93, 55), (260, 54), (188, 5), (189, 6), (190, 7), (197, 14), (198, 15),
    (199, 16), (463, 463), (466, 466), (469, 469),
)  # fmt: skip
FLAGS = (0x6600, 0x5800, 0x7600)
"""Families of requests to file systems (ioctl), which change flags of a file through any descriptor of it."""
TIMES = (280, 88)
"""Of a path, or of an open file if there is no path; to some time, or to now if none is given. `touch` sets an open
file to now, which is let through: it makes no file without that. No filter sees whether a file was opened to be
changed, so any other time is refused."""
ATTRIBUTES_X86 = (90, 92, 94, 132, 235, 261)
"""The same in their older shapes: chmod, chown, lchown, utime, utimes, futimesat."""


class _Long(_ctypes._SimpleCData):  # type: ignore[type-arg]  # ty: ignore[missing-type-argument]
    _type_ = "l"


class _Text(_ctypes._SimpleCData):  # type: ignore[type-arg]  # ty: ignore[missing-type-argument]
    _type_ = "z"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Long


class Kernel:
    """Calls by number, as this machine counts."""

    def __init__(self) -> None:
        machine = os.uname().machine
        if machine not in MACHINES or sys.maxsize < 1 << 32:
            raise OSError(ENOSYS, f"the system calls of {machine} are not known here")
        self.column = MACHINES[machine]
        itself: str = None  # type: ignore[assignment]  # ty: ignore[invalid-assignment]  # which is what NULL means
        self._syscall = _Function(_ctypes.dlsym(_ctypes.dlopen(itself, 0), "syscall"))

    def attempt(self, name: str, *args: int | bytes | None) -> int:
        """What a call returns; a negative errno where it fails."""
        number = CALLS[name][self.column]
        _ctypes.set_errno(0)
        result: int = self._syscall(_Long(number), *(_Long(each) if isinstance(each, int) else each for each in args))
        return -_ctypes.get_errno() if result == -1 else result

    def do(self, name: str, *args: int | bytes | None) -> int:
        result = self.attempt(name, *args)
        if result < 0:
            raise OSError(-result, f"{name}: {os.strerror(-result)}")
        return result

    def landlock_version(self) -> int:
        return max(self.attempt("landlock_create_ruleset", None, 0, 1), 0)


class Rules:
    """What is granted, as the fields of a request say it: a word and a value each."""

    def __init__(self, fields: list[bytes]) -> None:
        self.fields = fields
        self.values: dict[bytes, list[bytes]] = {}
        for field in fields:
            word, _, value = field.partition(b" ")
            self.values.setdefault(word, []).append(value)
        self.how = self.one(b"how")
        self.write, self.read, self.links = self.all(b"write"), self.all(b"read"), self.all(b"link")
        self.protect, self.hide, self.keep = self.all(b"protect"), self.all(b"hide"), self.all(b"keep")
        self.network, self.accept = self.one(b"network") == b"1", self.all(b"accept")
        self.computes = self.one(b"computes") == b"1"
        self.home = b"/" if self.computes else HOME

    def all(self, word: bytes) -> list[bytes]:
        return self.values.get(word, [])

    def one(self, word: bytes) -> bytes:
        return (self.all(word) or [b""])[0]

    def root_of(self, path: bytes) -> bytes:
        """The innermost folder that the command may change and that a path is in; empty if there is none. What is
        there may be a link by now, which another command made."""
        return max((each for each in self.write if path.startswith(each + b"/")), key=len, default=b"")

    def around(self, path: bytes, hide: bool) -> bytes:
        """The folder in which a path is to be covered; empty if it cannot be changed, or not be seen."""
        seen = self.read if hide else []
        return self.root_of(path) or max((each for each in seen if path.startswith(each + b"/")), key=len, default=b"")


class Confined:
    """The confinement of one command, from its shim's side."""

    def __init__(self, fields: list[bytes], folder: bytes) -> None:
        self.rules = Rules(fields)
        self.kernel = Kernel()
        self.folder = folder
        self.uid, self.gid = os.geteuid(), os.getegid()
        self.keeper = 0
        self.keepers: set[int] = set()
        self.status: int | None = None
        self.socket: _socket.socket | None = None
        self.group = b""
        self.parent = os.getpid()
        if self.rules.how == b"landlock" and not self.rules.computes:
            self.rules.home = folder + b"/tmp"
            os.mkdir("tmp", 0o700)

    # ------------------------------------------------------------------ in the shim

    def fork(self, leader: list[bytes], inherited: list[int], failure: int) -> int:
        """Like `os.fork`, with the leader as the child, wherever it is; -1 if there is none, and `failure` says why.

        `leader` is what `shim.run_leader` needs, packed, and `inherited` are the descriptors that it names.
        """
        if self.rules.how == b"landlock":
            return os.fork()
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        ours.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
        ours.settimeout(SETUP_SECONDS)
        if self.rules.how == b"bubblewrap":
            self.keeper = os.fork()
            if self.keeper == 0:
                self._run_bubblewrap(leader, inherited, theirs.fileno(), failure)
        else:
            namespaces = NEWNS | NEWPID | NEWIPC | NEWUTS | (0 if self.rules.network else NEWNET)
            namespaces |= NEWUSER if self.uid else 0
            self.keeper = self.kernel.do("clone", namespaces | _signal.SIGCHLD, 0, 0, 0, 0)
            if self.keeper == 0:
                try:
                    os.setsid()
                    if self.rules.computes:  # a shim that died before this is found gone by `begin_leader`
                        self.kernel.do("prctl", PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
                    self._make_namespaces()
                    if begin_leader(self.kernel, theirs) == 0:
                        return 0
                except OSError as error:
                    os.write(failure, b"sandbox %d" % (error.errno or 0))
                finally:
                    if os.getpid() == 1:
                        os._exit(1)
        theirs.close()
        self.socket = ours
        return self._leader(ours)

    def _leader(self, ours: _socket.socket) -> int:
        """Who sent what: the keeper, then the leader."""
        self.keepers.add(self.keeper)
        leader = -1
        try:
            while leader < 0:
                data, stamps, _, _ = ours.recvmsg(1, _socket.CMSG_SPACE(12))
                if not data:
                    break
                sender = next(
                    int.from_bytes(value[:4], sys.byteorder) for _, kind, value in stamps if kind == SCM_CREDENTIALS
                )
                if data == b"l":
                    leader = sender
                else:
                    self.keepers.add(sender)
        except TimeoutError:
            os.kill(self.keeper, _signal.SIGKILL)
        ours.setblocking(False)
        return leader

    def verdict(self) -> tuple[int, ...]:
        """The descriptor that becomes readable when the leader has ended."""
        return () if self.socket is None else (self.socket.fileno(),)

    def ended(self) -> int | None:
        """How the leader ended, once the keeper said it."""
        if self.status is None and self.socket is not None:
            try:
                data = self.socket.recv(8)
            except OSError:
                return None
            if len(data) == 4:
                self.status = int.from_bytes(data, "little")
        return self.status

    def limit_processes(self, leader: int) -> None:
        """Put the leader into a group of its own that counts processes, where the user's own limit does not."""
        parent, most = self.rules.one(b"pids"), self.rules.one(b"processes")
        if not parent or not most:
            return
        for name in os.listdir(parent):
            if name.startswith((b"perdure-", b"mainstay-")):
                try:  # left by a shim that was killed; one with processes in it is busy
                    os.rmdir(parent + b"/" + name)
                except OSError:
                    pass
        self.group = parent + b"/perdure-%d" % leader
        for tries in range(8):
            try:
                os.mkdir(self.group)
                for name, value in ((b"pids.max", most), (b"cgroup.procs", b"%d" % leader)):
                    fd = os.open(self.group + b"/" + name, os.O_WRONLY | os.O_CLOEXEC)
                    try:
                        os.write(fd, value)
                    finally:
                        os.close(fd)
                return
            except FileNotFoundError:  # another shim took the empty group for one that was left
                if tries == 7:
                    raise

    def close(self) -> None:
        """The command is over."""
        if self.group:
            try:
                os.rmdir(self.group)
            except OSError:
                pass  # something of it is left alive

    # ------------------------------------------------------------------ in the leader

    def environment(self, env: dict[bytes, bytes]) -> dict[bytes, bytes]:
        temporary = self.rules.home if self.rules.how == b"landlock" or self.rules.computes else TEMPORARY
        return {b"HOME": self.rules.home, b"TMPDIR": temporary} | env

    def lock(self) -> None:
        """Give up what the command may not do, for ever. The last thing before its exec."""
        rules, kernel = self.rules, self.kernel
        reopen_null()
        for word, number in RLIMIT.items():
            value = rules.one(word)
            if value and not (word == b"processes" and rules.one(b"pids")):
                # The keeper is one of this user's processes in the namespace.
                most = int(value) + (1 if word == b"processes" else 0)
                kernel.do("prlimit64", 0, number, most.to_bytes(8, sys.byteorder) * 2, None)
        kernel.do("prlimit64", 0, RLIMIT_CORE, bytes(16), None)
        if rules.computes:
            # The same addresses each time: what is sorted by them is too.
            kernel.attempt("personality", ADDR_NO_RANDOMIZE)
            if rules.how == b"landlock":
                kernel.do("prctl", PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
                if os.getppid() != self.parent:
                    os._exit(127)
        drop_capabilities(kernel)
        kernel.do("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        self._landlock()
        install_filter(kernel, rules)

    def _landlock(self) -> None:
        rules, kernel = self.rules, self.kernel
        alone, version = rules.how == b"landlock", kernel.landlock_version()
        if known := rules.one(b"landlock"):  # tests, which are about older kernels
            version = min(version, int(known))
        if version < (LANDLOCK_ALONE if alone else 1):
            if alone:
                raise OSError(ENOSYS, "landlock")
            return
        files = (1 << 13) - 1
        files |= (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0) | (IOCTL_DEV if version >= 5 else 0)
        scopes = SCOPES if version >= 6 else 0
        attributes = [files] if version < 4 else [files, 0] if version < 6 else [files, 0, scopes]
        packed = b"".join(each.to_bytes(8, sys.byteorder) for each in attributes)
        ruleset = kernel.do("landlock_create_ruleset", packed, len(packed), 0)
        changing = files & ~(MAKE_CHAR | MAKE_BLOCK)
        if alone:
            granted = [(path, READING) for path in rules.read]
            granted += [(b"/proc/" + name, READ_FILE) for name in PROC_FILES]
            granted += [(b"/dev/" + name, READ_FILE | WRITE_FILE | IOCTL_DEV) for name in DEVICES]
            granted += [(path, changing if b"git" in rules.accept else READING) for path in rules.write]
            # What is in a root is granted with it; by its own name it may be a link by now.
            granted = [(path, access) for path, access in granted if not rules.root_of(path)]
            granted += [] if rules.computes else [(rules.home, changing)]
        else:
            granted = [(b"/", READING), (b"/dev", READING | WRITE_FILE | IOCTL_DEV)]
            own = () if rules.computes else (TEMPORARY, b"/dev/shm")
            granted += [(path, changing) for path in (*rules.write, *own) if not rules.root_of(path)]
        for path, access in granted:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if not os.path.isdir(path):
                access &= OF_FILES
            rule = (access & files).to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
            kernel.do("landlock_add_rule", ruleset, 1, rule, 0)
            os.close(fd)
        kernel.do("landlock_restrict_self", ruleset, 0)
        os.close(ruleset)

    # ------------------------------------------------------------------ own namespaces

    def _make_namespaces(self) -> None:
        if self.uid:
            for name, text in (
                ("setgroups", b"deny"),
                ("uid_map", b"%d %d 1" % (self.uid, self.uid)),
                ("gid_map", b"%d %d 1" % (self.gid, self.gid)),
            ):
                fd = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
                os.write(fd, text)
                os.close(fd)
        if not self.rules.network:
            device = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
            request = b"lo".ljust(16, b"\0") + IFF_UP.to_bytes(2, sys.byteorder)
            fcntl.ioctl(device.fileno(), SIOCSIFFLAGS, request.ljust(40, b"\0"))
            device.close()
        Root(self.kernel, self.rules).make()

    # ------------------------------------------------------------------ bubblewrap

    def _run_bubblewrap(self, leader: list[bytes], inherited: list[int], socket: int, failure: int) -> None:
        """Become bubblewrap, which begins the keeper. It keeps the three standard descriptors, which are not the
        command's, and no others."""
        try:
            program, made = self.rules.one(b"bwrap"), Bubblewrap(self.rules)
            arguments, rules = made.arguments(), [*self.rules.fields, *made.meant]
            inherited = [*inherited, *made.copied]
            fields = [b"%d" % socket, b"%d" % len(rules), *rules, *leader]
            spec = os.memfd_create("leader", 0)
            os.write(spec, b"".join(len(field).to_bytes(4, "little") + field for field in fields))
            os.lseek(spec, 0, os.SEEK_SET)
            for fd in (socket, *inherited):
                os.set_inheritable(fd, True)
            os.setsid()
            os.chdir("/")
            argv = [program, *arguments, b"--", *self.rules.all(b"python"), b"%d" % spec]
            os.execve(program, argv, {b"PATH": b"/usr/bin:/bin"})
        except OSError as error:
            os.write(failure, b"sandbox %d" % (error.errno or 0))
        finally:
            os._exit(1)


# ---------------------------------------------------------------------- the keeper


def begin_leader(kernel: Kernel, shim: _socket.socket) -> int:
    """Fork the leader, and reap what there is until nothing is left. Returns in the leader only.

    The keeper has the memory, the environment and the descriptors of a shim, so it is closed to the command before
    there is one. The leader opens up again with its exec.
    """
    kernel.do("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    shim.send(b"k")
    leader = os.fork()
    if leader == 0:
        try:
            shim.send(b"l")
        except OSError:
            os._exit(127)  # the shim was killed: nothing begins
        return 0
    drop_capabilities(kernel)
    # The command's output must end with the command, and the lock of the folder with its shim.
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, shim.fileno())
    os.closerange(shim.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    try:
        while True:
            pid, status = os.wait()
            if pid == leader:
                try:
                    shim.send(status.to_bytes(4, "little"))
                except OSError:
                    pass  # the shim was killed
    except ChildProcessError:
        os._exit(0)


def run_inside(spec: int) -> None:
    """The keeper, begun by bubblewrap in the namespaces that it made."""
    import shim  # type: ignore[import-not-found]  # noqa: PLC0415  # ty: ignore[import-not-found]

    data = b""
    while more := os.read(spec, 1 << 20):
        data += more
    os.close(spec)
    socket, count, *fields = shim.unpack(data)
    rules, leader = fields[: int(count)], fields[int(count) :]
    confined = Confined(rules, b"")
    try:
        check_mounted(confined.rules)
        if os.geteuid() == 0:  # no other user owns a device, and bubblewrap knows none that is read-only
            for name in DEVICES:
                restrict(confined.kernel, b"/dev/" + name, ATTR_RDONLY)
    except OSError as error:
        os.write(int(leader[4]), b"sandbox %d" % (error.errno or 0))
        os._exit(1)
    if begin_leader(confined.kernel, _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, int(socket))) == 0:
        shim.run_leader(leader, confined)


def reopen_null() -> None:
    """Let a command that has no input read the null device of its own file system. The one that its shim opened is the
    host's, and its owner, such as root, may change the mode of an open file."""
    try:
        if os.fstat(0).st_rdev != os.stat("/dev/null").st_rdev:
            return
    except OSError:
        return
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def drop_capabilities(kernel: Kernel) -> None:
    number = 0
    while kernel.attempt("prctl", PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    kernel.attempt("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = CAPABILITY_VERSION.to_bytes(4, sys.byteorder) + bytes(4)
    kernel.do("capset", header, bytes(24))


# ---------------------------------------------------------------------- the file system


class Root:
    """The file system of a command: made in the keeper, in a mount namespace of its own."""

    OLD = b"/.old"

    def __init__(self, kernel: Kernel, rules: Rules) -> None:
        self.kernel, self.rules = kernel, rules

    def make(self) -> None:
        self._mount(None, b"/", None, MS_REC | MS_PRIVATE)
        base = b"/tmp" if os.path.isdir(b"/tmp") else b"/dev"
        self._mount(b"tmpfs", base, b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=755,size=1m")
        os.mkdir(base + self.OLD)
        self.kernel.do("pivot_root", base, base + self.OLD)
        os.chdir("/")
        for name in (b"/proc", b"/dev", b"/tmp"):
            os.mkdir(name)
        self._mount(b"proc", b"/proc", b"proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        size = b"mode=%s,size=%d" % (b"700", TEMPORARY_BYTES)
        self._mount(b"tmpfs", TEMPORARY, b"tmpfs", MS_NOSUID | MS_NODEV, size)
        os.mkdir(HOME, 0o700)
        self._make_devices()
        writable = set(self.rules.write)
        for path in sorted({*self.rules.read, *writable}, key=lambda each: (each.count(b"/"), each)):
            self._bring(path, path in writable)
        for path in self.rules.links:
            if os.path.islink(self.OLD + path) and not os.path.lexists(path):
                os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
                os.symlink(os.readlink(self.OLD + path), path)
        for path in self.rules.protect:
            self._cover(path, hide=False)
        for path in self.rules.keep:
            self._cover(path, hide=False, make=False)
        for path in self.rules.hide:
            self._cover(path, hide=True)
        self.kernel.do("umount2", self.OLD, MNT_DETACH)
        os.rmdir(self.OLD)
        for path in (b"/", TEMPORARY, b"/dev/shm") if self.rules.computes else (b"/",):
            self._restrict(path, ATTR_RDONLY)

    def _make_devices(self) -> None:
        for name in DEVICES:
            if os.path.exists(self.OLD + b"/dev/" + name):
                os.close(os.open(b"/dev/" + name, os.O_WRONLY | os.O_CREAT, 0o666))
                self._mount(self.OLD + b"/dev/" + name, b"/dev/" + name, None, MS_BIND)
                self._restrict(b"/dev/" + name, ATTR_RDONLY | ATTR_NOSUID)  # written to all the same, and not changed
        for name, target in ((b"fd", b""), (b"stdin", b"/0"), (b"stdout", b"/1"), (b"stderr", b"/2")):
            os.symlink(b"/proc/self/fd" + target, b"/dev/" + name)
        for name in (b"/dev/shm", b"/dev/pts"):
            os.mkdir(name)
        self._mount(b"tmpfs", b"/dev/shm", b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=700,size=%d" % TEMPORARY_BYTES)
        self._mount(b"devpts", b"/dev/pts", b"devpts", MS_NOSUID | MS_NOEXEC, b"newinstance,ptmxmode=0666,mode=620")
        os.symlink(b"pts/ptmx", b"/dev/ptmx")

    def _bring(self, path: bytes, writable: bool) -> None:
        """Mount a path of the host's where it is there."""
        if root := self.rules.root_of(path):
            self._bring_below(root, path[len(root) + 1 :].split(b"/"), writable)
            return
        source = self.OLD + path
        if os.path.islink(source) and path.count(b"/") == 1:  # /bin, mostly
            os.symlink(os.readlink(source), path)
            return
        if os.path.islink(source):  # of the host's root, which is not ours any more
            source = self._followed(path)
        try:
            folder = os.path.isdir(source)
            os.lstat(source)
        except OSError:
            if writable:
                raise
            return
        if not os.path.lexists(path):
            os.makedirs(path if folder else os.path.dirname(path), 0o755, exist_ok=True)
            if not folder:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
        self._mount(source, path, None, MS_BIND | MS_REC)
        self._restrict(path, ATTR_NOSUID | ATTR_NODEV | (0 if writable else ATTR_RDONLY), AT_RECURSIVE)

    def _followed(self, path: bytes) -> bytes:
        for _ in range(40):
            source = self.OLD + path
            if not os.path.islink(source):
                break
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(source)))
        return self.OLD + path

    def _bring_below(self, root: bytes, names: list[bytes], writable: bool) -> None:
        """The same for a path in a root, where no link is followed: it may lead anywhere by now."""
        folder = os.open(self.OLD + root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in names:
            source = self._open(folder, name, False)
            os.close(folder)
            if source < 0:
                if writable:
                    raise OSError(ENOENT, "a root is not there")
                return
            folder = source
        above = self._pin(root, names[:-1])
        target = self._open(above, names[-1], False) if above >= 0 else -1
        if target < 0:
            raise OSError(ENOENT, "it was there for a moment only")
        self._mount(self._at(folder), self._at(target), None, MS_BIND | MS_REC)
        mounted = self._open(above, names[-1], False)
        self._restrict(self._at(mounted), ATTR_NOSUID | ATTR_NODEV | (0 if writable else ATTR_RDONLY), AT_RECURSIVE)
        for fd in (folder, above, target, mounted):
            os.close(fd)

    def _cover(self, path: bytes, hide: bool, make: bool = True) -> None:
        """Make a path read-only or empty, and what is between it and its root impossible to rename."""
        root = self.rules.around(path, hide)
        if not root:
            return
        names = path[len(root) + 1 :].split(b"/")
        folder = self._pin(root, names[:-1])
        found = self._open(folder, names[-1], make) if folder >= 0 else -1
        if found < 0:
            return
        if hide:
            data = b"mode=000,size=4k"
            self._mount(b"tmpfs", self._at(found), b"tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, data)
        else:
            self._mount(self._at(found), self._at(found), None, MS_BIND | MS_REC)
            mounted = self._open(folder, names[-1], False)
            self._restrict(self._at(mounted), ATTR_RDONLY, AT_RECURSIVE)
            os.close(mounted)
        os.close(found)
        os.close(folder)

    def _pin(self, root: bytes, names: list[bytes]) -> int:
        """A folder below a root, -1 if it is not there. It and those on the way to it become mounts, which the command
        cannot rename; what they are is decided by what was opened, not by names that change meanwhile."""
        folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in names:
            found = self._open(folder, name, False)
            if found >= 0:
                self._mount(self._at(found), self._at(found), None, MS_BIND | MS_REC)
                os.close(found)
                found = self._open(folder, name, False)  # the mount that is on it now
            os.close(folder)
            if found < 0:
                return -1
            folder = found
        return folder

    def _at(self, fd: int) -> bytes:
        return b"%s/proc/self/fd/%d" % (self.OLD, fd)

    def _open(self, folder: int, name: bytes, make: bool) -> int:
        """A name in a folder, made if that is wanted and it is not there; otherwise -1. No link is followed."""
        for _ in range(2):
            found = open_unlinked(name, folder)
            if found >= 0 or not make:
                return found
            make_empty(name, folder)
        raise OSError(ENOENT, "it was there for a moment only")

    def _mount(
        self, source: bytes | None, target: bytes, kind: bytes | None, flags: int, data: bytes | None = None
    ) -> None:
        self.kernel.do("mount", source, target, kind, flags, data)

    def _restrict(self, path: bytes, attributes: int, flags: int = 0) -> None:
        restrict(self.kernel, path, attributes, flags)


def restrict(kernel: Kernel, path: bytes, attributes: int, flags: int = 0) -> None:
    """Change what holds for a mount."""
    packed = attributes.to_bytes(8, sys.byteorder) + bytes(24)
    kernel.do("mount_setattr", -100, path, flags, packed, len(packed))


def small_file(path: bytes) -> int:
    """An open file of at most `COPIED_BYTES`; -1 if there is none that can be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
    found = os.fstat(file)
    if found.st_mode & S_IFMT == S_IFREG and found.st_size <= COPIED_BYTES:
        return file
    os.close(file)
    return -1


def open_unlinked(name: bytes, folder: int) -> int:
    """A name in a folder, -1 if it is not there. Raises OSError where it is a link."""
    try:
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return -1
    if os.fstat(found).st_mode & S_IFMT == S_IFLNK:
        os.close(found)
        raise OSError(ELOOP, "a link is where a folder was granted, protected or hidden")
    return found


def make_empty(path: bytes, folder: int | None = None) -> None:
    """Make what is to be mounted over, unless another command that begins at the same moment has made it."""
    try:
        if os.path.basename(path) in FOLDERS:
            os.mkdir(path, 0o755, dir_fd=folder)
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder))
    except FileExistsError:
        pass


class Bubblewrap:
    """The same file system and namespaces, in bubblewrap's words.

    It is told names, and mounts what they lead to by then. So what was meant by names in a root is written down
    (`meant`), found without following a link, and the keeper looks at what was mounted before it begins the command.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.meant: list[bytes] = []
        self.copied: list[int] = []
        # bubblewrap mounts what the host has there: a folder that is mounted twice loses what was mounted in it.
        self.mounted: set[bytes] = set()

    def arguments(self) -> list[bytes]:
        rules, writable = self.rules, set(self.rules.write)
        argv = [b"--unshare-ipc", b"--unshare-pid", b"--unshare-uts", b"--unshare-cgroup-try", b"--as-pid-1"]
        argv += [] if rules.network else [b"--unshare-net"]
        argv += [b"--die-with-parent"] if rules.computes else []
        argv += [b"--proc", b"/proc", b"--dev", b"/dev"]
        for path in (TEMPORARY, b"/dev/shm"):
            argv += [b"--size", b"%d" % TEMPORARY_BYTES, b"--tmpfs", path]
        argv += [b"--dir", HOME]
        for path in sorted({*rules.read, *writable}, key=lambda each: (each.count(b"/"), each)):
            if rules.root_of(path):
                argv += self._below(rules.root_of(path), path, b"--bind" if path in writable else b"--ro-bind")
            elif os.path.islink(path) and path.count(b"/") == 1:
                argv += [b"--symlink", os.readlink(path), path]
            elif path.startswith(b"/etc/") and (file := small_file(path)) >= 0:
                # Every mount has bubblewrap read the table of all mounts, and there are dozens of these files.
                self.copied.append(file)
                argv += [b"--perms", b"0444", b"--file", b"%d" % file, path]
            else:
                argv += [b"--bind" if path in writable else b"--ro-bind-try", os.path.realpath(path), path]
        for path in rules.links:
            argv += [b"--symlink", os.readlink(path), path] if os.path.islink(path) else []
        for path in rules.protect:
            argv += self._below(rules.around(path, False), path, b"--ro-bind", make=True)
        for path in rules.keep:
            argv += self._below(rules.around(path, False), path, b"--ro-bind")
        for path in rules.hide:
            argv += self._below(rules.around(path, True), path, b"--tmpfs", make=True)
        own = [b"--remount-ro", TEMPORARY, b"--remount-ro", b"/dev/shm"] if rules.computes else []
        return [*argv, b"--remount-ro", b"/proc", b"--remount-ro", b"/dev", *own, b"--remount-ro", b"/"]

    def _below(self, root: bytes, path: bytes, how: bytes, make: bool = False) -> list[bytes]:
        """A path in a root, and what is between the two, which nobody can rename then."""
        if not root:
            return []
        argv: list[bytes] = []
        folder, at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), root
        names = path[len(root) + 1 :].split(b"/")
        for index, name in enumerate(names):
            last = index == len(names) - 1
            found = open_unlinked(name, folder)
            if found < 0 and last and make:
                make_empty(name, folder)
                found = open_unlinked(name, folder)
            os.close(folder)
            if found < 0:
                if path in self.rules.write:
                    raise OSError(ENOENT, "a root is not there")
                return []
            folder, at = found, at + b"/" + name
            is_now = os.fstat(folder)
            if not last:
                argv += [] if at in self.mounted else [b"--bind", at, at]
            if not last or how != b"--tmpfs":
                self.meant.append(b"meant %d:%d %s" % (is_now.st_dev, is_now.st_ino, at))
            else:
                self.meant.append(b"covered %s" % at)
            self.mounted.add(at)
        os.close(folder)
        return [*argv, *([how, path, b"--remount-ro", path] if how == b"--tmpfs" else [how, path, path])]


def check_mounted(rules: Rules) -> None:
    """Raise OSError where something else was mounted than was meant. In the namespace, before the command begins."""
    for each in rules.all(b"meant"):
        identity, _, path = each.partition(b" ")
        found = os.lstat(path)
        if identity != b"%d:%d" % (found.st_dev, found.st_ino):
            raise OSError(ELOOP, "a folder was exchanged for another one while it was mounted")
    for path in rules.all(b"covered"):
        found = os.lstat(path)
        if found.st_mode & S_IFMT == S_IFLNK or found.st_dev == os.lstat(os.path.dirname(path)).st_dev:
            raise OSError(ELOOP, "a folder that is hidden was exchanged for another one")


# ---------------------------------------------------------------------- the filter of system calls

LOAD, EQUAL, ANY_BIT, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
RUNS_AS_ITS_OWNER, O_CREAT, O_TMPFILE = 0o6000, 0o100, 0o20000000
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


class Filter:
    """A filter of system calls, as the kernel's virtual machine reads it: lines of eight bytes. After the number of a
    call was looked at, it is still loaded; a line that looks at an argument is followed by nothing but ends."""

    def __init__(self, column: int) -> None:
        self.column, self.program = column, b""

    def line(self, code: int, value: int, yes: int = 0, no: int = 0) -> None:
        head = code.to_bytes(2, sys.byteorder) + bytes((yes, no))
        self.program += head + (value & 0xFFFFFFFF).to_bytes(4, sys.byteorder)

    def argument(self, number: int, high: bool = False) -> None:
        self.line(LOAD, 16 + 8 * number + (4 if high == (sys.byteorder == "little") else 0))

    def refuse(self, numbers: list[int], error: int = EPERM) -> None:
        for number in numbers:
            self.line(EQUAL, number, 0, 1)
            self.line(RETURN, ERRNO | error)

    def end(self) -> None:
        self.line(RETURN, ERRNO | EPERM)
        self.line(RETURN, ALLOW)

    def check_machine(self) -> None:
        self.line(LOAD, 4)
        self.line(EQUAL, AUDIT[self.column], 1, 0)
        self.line(RETURN, ERRNO | EPERM)
        self.line(LOAD, 0)
        if self.column == 0:
            self.line(AT_LEAST, X32, 0, 1)
            self.line(RETURN, ERRNO | EPERM)

    def check_clone(self, computes: bool) -> None:
        self.refuse([CALLS["clone3"][self.column]], ENOSYS)  # the C library goes on with clone, whose flags can be seen
        if computes:  # neither a process nor a thread
            self.refuse([CALLS["clone"][self.column], *(FORKS_X86 if self.column == 0 else ())], EAGAIN)
            return
        self.line(EQUAL, CALLS["clone"][self.column], 0, 4)
        self.argument(0)
        self.line(ANY_BIT, NEW_ANY, 0, 1)
        self.end()

    def check_requests(self, flags: bool) -> None:
        """No input for a terminal as if it were typed; no flags of files, unless these may be changed."""
        families = FLAGS if flags else ()
        self.line(EQUAL, CALLS["ioctl"][self.column], 0, 5 + (1 + len(families) if families else 0))
        self.argument(1)
        left = 2 + (1 + len(families) if families else 0)
        for request in (TIOCSTI, TIOCLINUX):
            left -= 1
            self.line(EQUAL, request, left, 0 if left else 1)
        if families:
            self.line(AND, 0xFF00)
            left -= 1
            for family in families:
                left -= 1
                self.line(EQUAL, family, left, 0 if left else 1)
        self.end()

    def check_modes(self) -> None:
        """No program that runs as its owner or group, for whoever finds it outside. `openat2` has its mode where no
        filter sees it; programs go on with openat."""
        self.refuse([CALLS["openat2"][self.column]], ENOSYS)
        modes = [(each[self.column], each[2]) for each in MODES] + (list(MODES_X86) if self.column == 0 else [])
        for number, argument in modes:
            self.line(EQUAL, number, 0, 4)
            self.argument(argument)
            self.line(ANY_BIT, RUNS_AS_ITS_OWNER, 0, 1)
            self.end()
        for number, flags in ((OPENING[self.column], OPENING[2]), *([OPENING_X86] if self.column == 0 else [])):
            self.line(EQUAL, number, 0, 6)
            self.argument(flags)
            self.line(ANY_BIT, O_CREAT | O_TMPFILE, 0, 3)
            self.argument(flags + 1)
            self.line(ANY_BIT, RUNS_AS_ITS_OWNER, 0, 1)
            self.end()

    def check_pairs(self) -> None:
        """No pairs for datagrams: one of those may send to any socket that it can name."""
        self.line(EQUAL, CALLS["socketpair"][self.column], 0, 8)
        self.argument(0)
        self.line(EQUAL, AF_UNIX, 0, 4)
        self.argument(1)
        self.line(AND, 0xF)
        self.line(EQUAL, _socket.SOCK_STREAM, 2, 0)
        self.line(EQUAL, _socket.SOCK_SEQPACKET, 1, 0)
        self.end()

    def check_others(self) -> None:
        for number in OF_OTHERS:
            self.line(EQUAL, number[self.column], 0, 4)
            self.argument(0)
            self.line(EQUAL, 0, 1, 0)
            self.end()
        for name, process in (("setpriority", 0), ("ioprio_set", 1)):  # of a process, which is the caller's own
            self.line(EQUAL, CALLS[name][self.column], 0, 6)
            self.argument(0)
            self.line(EQUAL, process, 0, 2)
            self.argument(1)
            self.line(EQUAL, 0, 1, 0)
            self.end()

    def check_attributes(self) -> None:
        self.refuse([each[self.column] for each in ATTRIBUTES])
        self.refuse(list(ATTRIBUTES_X86) if self.column == 0 else [])
        self.line(EQUAL, TIMES[self.column], 0, 10)
        for left, (number, high) in zip((6, 4, 2, 0), ((1, False), (1, True), (2, False), (2, True)), strict=True):
            self.argument(number, high)
            self.line(EQUAL, 0, 0 if left else 1, left)
        self.end()

    def check_sockets(self, families: list[int]) -> None:
        self.line(EQUAL, CALLS["socket"][self.column], 0, 2 + len(families))
        self.argument(0)
        for index, family in enumerate(families):
            self.line(EQUAL, family, len(families) - index, 0)
        self.end()


def filter_program(column: int, rules: Rules) -> bytes:
    found = Filter(column)
    found.check_machine()
    found.refuse([each[column] for each in REFUSED])
    found.refuse(list(REFUSED_X86) if column == 0 else [])
    found.check_clone(rules.computes)
    found.check_requests(flags=rules.how == b"landlock" and b"attributes" not in rules.accept)
    if b"unix_sockets" not in rules.accept:
        found.check_pairs()
    if rules.how == b"landlock":
        found.refuse([each[column] for each in SHARED])
        found.check_others()
        if b"attributes" not in rules.accept:
            found.check_attributes()
    found.check_modes()
    found.check_sockets(families_allowed(rules))
    return found.program


def families_allowed(rules: Rules) -> list[int]:
    """Of sockets. A namespace has no network but its own; without one there is nothing that would hold them."""
    inet = [AF_INET, AF_INET6, AF_NETLINK] if rules.how != b"landlock" or rules.network else []
    return inet + ([AF_UNIX] if b"unix_sockets" in rules.accept and rules.how != b"landlock" else [])


def install_filter(kernel: Kernel, rules: Rules) -> None:
    program = filter_program(kernel.column, rules)
    pointer = bytes(memoryview(_Text(program)).cast("B"))
    kernel.do("seccomp", 1, 0, (len(program) // 8).to_bytes(2, sys.byteorder) + bytes(6) + pointer)
