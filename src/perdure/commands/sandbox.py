"""Which sandbox a command runs in: chosen by a self-test of this machine, as this user; never silently a weaker one.

    bubblewrap    if the program is there
    namespaces    our own: mounts, processes, network; as an unprivileged user in a user namespace
    landlock      Landlock and a filter of system calls, without a file system of its own

Each is tried in this order with the attacks of `probe.py`. One that lets a single attack through is not used. The three
refuse the same; the last one can do less for a command: it cannot cover a store inside of a root, and keeps a root
read-only unless its host accepts that `.git` is open to changes (`SandboxGap`).

`confine.py` makes the sandbox; what is here decides which, and says it what is granted (`rules_of`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from perdure.errors import InvalidCommand, SandboxUnavailable, quoted
from perdure.model.sandbox import Confinement, Implementation, folder_of_store

IMPLEMENTATIONS: tuple[Implementation, ...] = ("bubblewrap", "namespaces", "landlock")

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix")
"""Folders of programs and libraries, which every command may read."""
ETC = (
    "passwd", "group", "hosts", "hostname", "host.conf", "resolv.conf", "nsswitch.conf", "gai.conf", "protocols",
    "services", "networks", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload", "localtime", "timezone",
    "alternatives", "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust", "ca-certificates",
    "ca-certificates.conf", "crypto-policies", "mime.types", "magic", "os-release", "debian_version", "lsb-release",
    "locale.alias", "locale.conf", "profile", "profile.d", "bash.bashrc", "bashrc", "inputrc", "shells", "terminfo",
    "fonts", "java", "maven", "python3", "perl", "gitconfig",
)  # fmt: skip
"""Of /etc, what programs need to run at all. Not its passwords and keys."""
LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/nix/store", "/etc/ld.so.cache")
"""What a program needs to be loaded."""
NOT_INHERITED = frozenset(
    {"HOME", "TMPDIR", "TEMP", "TMP", "DISPLAY", "WAYLAND_DISPLAY", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
     "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"}
)  # fmt: skip
"""Variables of the host's that lead to what a confined command has of its own, or has not."""

MOST_LINKS = 40
"""Links that the kernel follows to open one path."""
LOOKED_AT, DEEPEST = 500, 4
"""Folders that are searched for repositories in the roots of a command, and how far below a root."""
NOT_ENTERED = frozenset({"node_modules", "__pycache__"})
PROBE = "perdure-probe-"
"""Begins the name of a self-test's folder."""
EXAMINE_SECONDS = 60.0
REFUSED_SECONDS = 30.0
"""For how long a sandbox that failed its self-test is not tried again: it may have been a lack of memory."""
ALONE = frozenset({"store in a root", "old store in a root"})
"""Attacks that Landlock alone does not stop: whoever asks for that is refused."""
WORKS = {"landlock": ("reading", "temporary files")}
WORKS_IN_ALL = ("reading", "temporary files", "changing")

_EXAMINE = "import sys; sys.path.append(sys.argv[1]); import probe; probe.main(sys.stdin.buffer.read())"
_INSIDE = "import sys; sys.path.append(sys.argv[1]); import confine; confine.run_inside(int(sys.argv[2]))"


@dataclass(frozen=True, slots=True)
class Examined:
    """What a self-test found. `refused` is why this sandbox cannot be used here, or empty; `attacks` what became of
    each of them."""

    how: Implementation
    refused: str
    attacks: Mapping[str, bool] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    """Results of self-tests in this OS process, by what they depend on. A failed one is forgotten after a while.

    `lock` is held during a self-test: who else asks meanwhile takes its result."""

    results: dict[tuple[str, int, str], tuple[Examined, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_known = _Known()


class Sandbox:
    """The sandboxes of one Runtime. `jobs` is where its commands' folders are, `store` the path of its store, if it is
    in a file: no command sees either."""

    def __init__(
        self,
        jobs: Callable[[], Path],
        store: str | None,
        implementations: Iterable[Implementation] = IMPLEMENTATIONS,
    ) -> None:
        self._jobs, self._store = jobs, None if store is None else os.path.realpath(store)
        self._implementations = tuple(implementations)

    def choose(self, asked: Confinement) -> Confinement:
        """The same with what will enforce it. Raises SandboxUnavailable. The first time it takes a tenth of a second
        or two, in which a real command is run: not for an event loop."""
        try:
            wanted = self._with_own(asked)
        except SandboxUnavailable:
            if asked.unsandboxed:
                return replace(asked, how="none")
            raise
        reasons = []
        for how in self._implementations:
            why = self._unfit(how, wanted) or examine(how).refused
            if not why:
                return replace(wanted, how=how)
            reasons.append(f"{how}: {why}")
        if asked.unsandboxed:
            return replace(wanted, how="none")
        raise SandboxUnavailable(
            f"this machine cannot confine the command as asked ({'; '.join(reasons)}): change that, or let it run "
            "without a sandbox, Workspace(unsandboxed=True)"
        )

    def check(self, chosen: Confinement) -> str:
        """Why a sandbox that was chosen before cannot be used now; empty if it can."""
        if not chosen.how:
            return "no sandbox was chosen for it"
        if chosen.how == "none":
            return "" if chosen.unsandboxed else "it may not run without a sandbox"
        why = self._unfit(chosen.how, chosen) or examine(chosen.how).refused
        return f"its sandbox ({chosen.how}) is not enforced here any more: {why}" if why else ""

    def rules(self, chosen: Confinement) -> list[bytes]:
        """For the shim; none if it runs without a sandbox."""
        return [] if chosen.how in ("", "none") else rules_of(chosen)

    def _with_own(self, asked: Confinement) -> Confinement:
        """What the caller asked for, and this Runtime's own files hidden."""
        granted = (*asked.write, *asked.read)
        own = folder_of_store(self._store, granted) if self._store is not None else ()
        jobs = os.path.realpath(self._jobs())
        if any(path == jobs or path.startswith(f"{jobs}/") for path in granted):
            raise SandboxUnavailable(f"{jobs} holds the folders of commands: no command may see it")
        own += (jobs,) if any(jobs.startswith(f"{path}/") for path in granted) else ()
        return replace(asked, hide=tuple(dict.fromkeys((*asked.hide, *own))))

    def _unfit(self, how: Implementation, wanted: Confinement) -> str:
        """Why this one cannot enforce what is asked for, whatever the machine."""
        if wanted.limits.processes is not None and not counts_processes(how):
            return (
                "a limit on processes needs the pids cgroup when commands run as root"
                if os.geteuid() == 0
                else "it cannot count the processes of a command"
            )
        if how != "landlock":
            return ""
        granted = (*wanted.write, *wanted.read)
        seen = [path for path in wanted.hide if os.path.lexists(path) and _below(path, granted)]
        if seen:
            return f"it cannot hide {seen[0]}, which is in a folder that is granted"
        if "unix_sockets" in wanted.accept:
            return "it cannot keep commands from sockets outside of the folders that are granted"
        if "git" in wanted.accept:
            carved = [path for path in wanted.read if _below(path, wanted.write)]
            return f"it cannot keep {carved[0]} read-only in a folder that may be changed" if carved else ""
        return ""


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def check_folders(chosen: Confinement, cwd: str) -> None:
    """Raise InvalidCommand for folders that are not there, and for a command that begins where it may not be."""
    for path in chosen.write:
        if not os.path.isdir(path) or os.path.realpath(path) != path:
            raise InvalidCommand(f"sandbox: {quoted(path)} is no folder, or has links on the way: resolve them")
    granted = (*chosen.write, *chosen.read)
    real = os.path.realpath(cwd)
    if chosen.how != "none" and not any(f"{real}/".startswith(f"{path}/") for path in granted):
        raise InvalidCommand(
            f"the working directory {quoted(cwd)} is outside of what its sandbox grants: {', '.join(granted)}"
        )


def counts_processes(how: Implementation) -> bool:
    """Whether a limit on the number of processes of a command holds."""
    return pids_group() is not None if os.geteuid() == 0 else how != "landlock"


def pids_group() -> str | None:
    """A folder of the cgroup file system in which groups that count processes may be made."""
    if os.geteuid() != 0:
        return None
    if os.access("/sys/fs/cgroup/pids/cgroup.procs", os.W_OK):
        return "/sys/fs/cgroup/pids"
    try:
        controllers = Path("/sys/fs/cgroup/cgroup.subtree_control").read_text()
    except OSError:
        return None
    return "/sys/fs/cgroup" if "pids" in controllers.split() and os.access("/sys/fs/cgroup", os.W_OK) else None


def links_to(*paths: str) -> tuple[str, ...]:
    """Return every symbolic link that the kernel follows to open the paths, each by a name without links before it."""
    found = dict[str, None]()
    for path in paths:
        at, names, hops = "", path.split("/") if path.startswith("/") else [], 0
        while names and hops < MOST_LINKS:
            name, *names = names
            if name == "..":
                at = at.rpartition("/")[0]
            elif name not in ("", "."):
                step = f"{at}/{name}"
                try:
                    target = os.readlink(step)
                except OSError:  # a folder, a file, or nothing
                    at = step
                    continue
                hops += 1
                found[step] = None
                at, names = "" if target.startswith("/") else at, [*target.split("/"), *names]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class HelperPrograms:
    """The interpreter and the modules of Perdure that a sandbox runs for its command. `links` are the symbolic links on
    the way to that interpreter and its folders.

    `links` is computed once, when this module is imported: a command that may change the environment of this Python
    could replace a link in it later.
    """

    here: str = str(Path(__file__).parent)
    python: str = os.path.realpath(sys.executable)
    prefix: str = os.path.realpath(sys.base_prefix)
    links: tuple[str, ...] = links_to(sys.executable, sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))

    @property
    def paths(self) -> tuple[str, str, str]:
        return self.prefix, self.python, self.here


OWN = HelperPrograms()


def _links(chosen: Confinement, granted: Iterable[str], own: HelperPrograms) -> list[str]:
    """Return the links of this Python that the file system of a sandbox lacks.

    In a virtual environment of uv, asdf, mise or Homebrew, `python` is a link to a link that is in no folder that is
    granted. The sandbox gets the link, never what it leads to, so that it grants no file. Links in a granted folder are
    there already, and the kernel follows links without asking Landlock.
    """
    if chosen.computes or chosen.how == "landlock":
        return []
    there = [*granted, "/proc", "/dev"]
    return [
        link
        for link in own.links
        if not any(f"{link}/".startswith(f"{each}/") or each.startswith(f"{link}/") for each in there)
    ]


def rules_of(chosen: Confinement, own: HelperPrograms = OWN) -> list[bytes]:
    """A confinement as `confine.Rules` reads it."""
    system = LIBRARIES if chosen.computes else (*SYSTEM, *(f"/etc/{name}" for name in ETC))
    paths = (*system, *chosen.read)
    if chosen.how == "bubblewrap":  # the keeper is begun inside
        paths = (*paths, *own.paths)
    read = [each for each in dict.fromkeys(paths) if each not in chosen.write]
    fields = {
        "write": chosen.write,
        "read": read,
        "link": _links(chosen, (*chosen.write, *read), own),
        "protect": chosen.protect,
        "keep": protected_below(chosen) if chosen.how != "landlock" else (),
        "hide": chosen.hide,
        "accept": chosen.accept,
        "network": (str(int(chosen.network)),),
        "computes": (str(int(chosen.computes)),),
        "how": (chosen.how,),
        "bwrap": (_bubblewrap(),),
        "python": (own.python, "-I", "-S", "-E", "-c", _INSIDE, own.here),
        "pids": (pids_group() or "",),
    } | {
        name: (str(value),)
        for name in chosen.limits.__struct_fields__
        if (value := getattr(chosen.limits, name)) is not None
    }
    return [os.fsencode(f"{name} {value}") for name, values in fields.items() for value in values if value]


def protected_below(chosen: Confinement) -> list[str]:
    """What is protected in a root, where it is also in a folder below: repositories in repositories.

    The search is bounded, since it is part of each start. A link is passed over: a mount would follow it.
    """
    found, looked = list[str](), 0
    for root in chosen.write:
        names = [path[len(root) + 1 :] for path in chosen.protect if path.startswith(f"{root}/")]
        folders = deque([(root, 0)] if names else [])
        while folders and looked < LOOKED_AT:
            folder, depth = folders.popleft()
            looked += 1
            for entry in _entries(folder):
                below = [name for name in names if name.partition("/")[0] == entry.name] if depth else []
                found += [path for name in below if os.path.lexists(path := f"{folder}/{name}") and not _has_link(path)]
                if depth < DEEPEST and not entry.name.startswith(".") and entry.name not in NOT_ENTERED:
                    folders.append((entry.path, depth + 1))
    return [path for path in dict.fromkeys(found) if path not in chosen.protect]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Those that may hold something, without links."""
    try:
        with os.scandir(folder) as entries:
            return [each for each in entries if each.is_dir(follow_symlinks=False) or each.name.startswith(".")]
    except OSError:
        return []  # a file, or it is gone, or not ours to read: then the command cannot change it either


def _has_link(path: str) -> bool:
    return os.path.realpath(path) != path


def confined_environment(env: Mapping[str, str], given: Iterable[str]) -> dict[str, str]:
    """Without what is private in a sandbox, unless it was given for this command."""
    dropped = NOT_INHERITED.difference(given)
    return {name: value for name, value in env.items() if name not in dropped}


# ---------------------------------------------------------------------- the self-test


def _bubblewrap() -> str:
    """The program, which runs outside of every sandbox: from a folder of the system, or the one that the host names. A
    folder of the PATH may be in a root, such as that of an environment, where a command could put its own."""
    if named := os.environ.get("PERDURE_BWRAP", ""):
        return os.path.realpath(named) if os.path.isabs(named) and os.access(named, os.X_OK) else ""
    folders = [each for each in os.environ.get("PATH", "/usr/bin:/bin").split(":") if each.startswith("/")]
    of_system = [each for each in folders if f"{os.path.realpath(each)}/".startswith(tuple(f"{x}/" for x in SYSTEM))]
    found = shutil.which("bwrap", path=":".join(of_system) or "/nowhere")
    return os.path.realpath(found) if found else ""


def examine(how: Implementation) -> Examined:
    """Attack the machine from inside of a sandbox, or remember what came of it."""
    key = (how, os.geteuid(), _bubblewrap() if how == "bubblewrap" else "")
    with _known.lock:
        known = _known.results.get(key)
        if known is None or (known[0].refused and time.monotonic() - known[1] > REFUSED_SECONDS):
            known = _known.results[key] = examine_now(how), time.monotonic()
    return known[0]


def remove_left(folder: str) -> None:
    """Delete the folders of self-tests whose OS process was killed. One that still runs is younger."""
    oldest = time.time() - 2 * EXAMINE_SECONDS
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(PROBE) or not entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):  # another one deleted it
                found = entry.stat(follow_symlinks=False)
                if found.st_uid == os.geteuid() and found.st_mtime < oldest:
                    shutil.rmtree(entry.path, ignore_errors=True)


def examine_now(how: Implementation) -> Examined:
    if sys.platform != "linux":
        return Examined(how, f"it is a matter of Linux, and this is {sys.platform}")
    if how == "bubblewrap" and not _bubblewrap():
        return Examined(how, "there is no program bwrap in a folder of the system")
    if how == "landlock":
        from perdure.commands import confine  # noqa: PLC0415  # it maps a library, and knows Linux alone

        try:
            version = confine.Kernel().landlock_version()
        except OSError as error:
            return Examined(how, str(error))
        if version < confine.LANDLOCK_ALONE:
            return Examined(how, f"Landlock has version {version} here, and {confine.LANDLOCK_ALONE} is needed")
    try:
        remove_left(tempfile.gettempdir())
        base = os.path.realpath(tempfile.mkdtemp(prefix=PROBE))
        try:
            attacks = attack(how, base)
        finally:
            shutil.rmtree(base, ignore_errors=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Examined(how, f"its self-test could not be run: {error}")
    if isinstance(attacks, str):
        return Examined(how, attacks)
    if how == "none":
        return Examined(how, "", attacks)
    works = WORKS.get(how, WORKS_IN_ALL)
    broken = [name for name in works if attacks.get(name, True)]
    through = [name for name, refused in attacks.items() if not refused and name not in WORKS_IN_ALL]
    through = [name for name in through if how != "landlock" or name not in ALONE]
    if through:
        return Examined(how, f"it does not stop: {', '.join(through)}", attacks)
    return Examined(how, f"it stops what is granted: {', '.join(broken)}" if broken else "", attacks)


def attack(
    how: Implementation, base: str, own: HelperPrograms = OWN, user: int | None = None, landlock: int | None = None
) -> dict[str, bool] | str:
    """By name of an attack: whether it was refused. A text if there was no result.

    `base` is an empty folder of the user's, who is another one if `user` says so, and must be able to read `own`. Of
    Landlock no more is used than its version `landlock` has.
    """
    roots = (f"{base}/root", f"{base}/second")
    confinement = Confinement(
        write=roots,
        read=own.paths,
        protect=tuple(f"{root}/.git" for root in roots),
        hide=(f"{base}/root/data/.perdure", f"{base}/root/data/.mainstay"),
        how=how,
    )
    fields = [] if how == "none" else rules_of(confinement, own)
    fields += [] if landlock is None else [b"landlock %d" % landlock]
    request = [base.encode(), b"%d" % len(fields), *fields, *map(os.fsencode, (own.python, "-I", "-S", "-E"))]
    done = subprocess.run(
        [own.python, "-I", "-S", "-E", "-c", _EXAMINE, own.here],
        input=b"".join(len(each).to_bytes(4, "little") + each for each in request),
        capture_output=True,
        timeout=EXAMINE_SECONDS,
        check=False,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        cwd="/",
    )
    lines = [line.rpartition(": ") for line in done.stdout.decode(errors="replace").splitlines() if ": " in line]
    if done.returncode or not lines:
        said = (done.stdout or done.stderr).decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"its self-test ended with {done.returncode}"
    return {name: not word.startswith("open") for name, _, word in lines}
