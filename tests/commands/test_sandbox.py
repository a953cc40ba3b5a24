"""Confined commands: they live, end and are ended like others, and nothing that is not granted works.

Every test runs in each sandbox that this machine can make, as the user of the tests; `tests/programs.py` says what
becomes of those that it cannot make.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Runtime, Workspace
from perdure.commands import confine, shim
from perdure.commands.job import Job, StartedCommand
from perdure.commands.os_tree import end_lost
from perdure.commands.sandbox import (
    ALONE,
    IMPLEMENTATIONS,
    PROBE,
    WORKS_IN_ALL,
    HelperPrograms,
    Sandbox,
    attack,
    counts_processes,
    examine,
    remove_left,
)
from perdure.errors import InvalidCommand, InvalidDefinition, SandboxUnavailable
from perdure.model.command import Command
from perdure.model.sandbox import Confinement, Implementation, SandboxLimits
from tests.commands.conftest import WHOLE, Commands, ended, printed, require
from tests.kit import until
from tests.programs import bubblewrap, copied_for_others, missing

NOBODY = 65534
POSSIBLE = (
    "socket by 32-bit calls", "socket by x32 calls", "flags of a file", "mode of a device", "mode of its input",
)  # fmt: skip


def tree(job: Job) -> list[int]:
    """The living processes below a shim, in our numbers."""
    started = job.started()
    assert started is not None
    found, parents = list[int](), [started.shim.pid]
    stats = {int(name): shim.stat_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    while parents:
        parent = parents.pop()
        below = [pid for pid, stat in stats.items() if stat is not None and stat[1] == parent and stat[0] not in b"ZX"]
        found += below
        parents += below
    return found


def _runs(pid: int, argv: bytes) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() == argv
    return False


# ---------------------------------------------------------------------- attacks


def test_every_attack_succeeds_without_a_sandbox() -> None:
    attacks = examine("none").attacks

    assert [name for name, refused in attacks.items() if refused] == []
    assert len(set(attacks) - set(POSSIBLE)) == 35


@pytest.mark.parametrize("name", POSSIBLE)
def test_attack_that_needs_more_than_every_machine_has(name: str) -> None:
    """It is left out of the list where it does not succeed without a sandbox."""
    if name not in examine("none").attacks:
        missing(name, "this kernel, processor or file system does not have it")


def test_every_attack_is_refused_in_a_sandbox(how: Implementation) -> None:
    attacks = examine(how).attacks
    through = {name for name, refused in attacks.items() if not refused}

    assert through - set(WORKS_IN_ALL) == (ALONE if how == "landlock" else set())


@pytest.mark.parametrize("version", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_older_versions_of_landlock_let_nothing_through(
    how: Implementation, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(how, monkeypatch)
    attacks = attack(how, str(tmp_path), landlock=version)

    if how == "landlock" and version < confine.LANDLOCK_ALONE:
        assert attacks == f"failed sandbox {errno.ENOSYS}"
    else:
        assert isinstance(attacks, dict), attacks
        through = {name for name, refused in attacks.items() if not refused}
        assert through - set(WORKS_IN_ALL) == (ALONE if how == "landlock" else set())


PYTHONS = (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3")


def runs_as_nobody(python: str) -> bool:
    try:
        return subprocess.run([python, "-I", "-S", "-c", ""], user=NOBODY, cwd="/", check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run something as another user")
@pytest.mark.parametrize("how", ["none", *IMPLEMENTATIONS])
def test_an_unprivileged_user_is_confined_alike(how: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    if how != "none":
        require(how, monkeypatch)
    python = next((each for each in PYTHONS if runs_as_nobody(each)), None)
    if python is None:
        pytest.skip("no Python here that another user can run")
    with tempfile.TemporaryDirectory(prefix="perdure-nobody-") as folder:
        here, base = Path(folder, "programs"), Path(folder, "base")
        here.mkdir()
        base.mkdir(mode=0o700)
        for name in ("confine.py", "probe.py", "shim.py"):
            shutil.copy(Path(str(shim.__file__)).with_name(name), here)
        if how == "bubblewrap":
            monkeypatch.setenv("PERDURE_BWRAP", str(copied_for_others(bubblewrap(), here)))
        Path(folder).chmod(0o755)
        os.chown(base, NOBODY, NOBODY)
        attacks = attack(how, str(base), HelperPrograms(str(here), python, str(Path(python).parents[1])), NOBODY)

    assert isinstance(attacks, dict), attacks
    through = {name for name, refused in attacks.items() if not refused}
    if how == "none":
        assert through == set(attacks)
    else:
        assert through - set(WORKS_IN_ALL) == (ALONE if how == "landlock" else set())


def test_keeper_is_closed_to_its_command_before_there_is_one() -> None:
    """A process that is open belongs to its user in /proc, and a closed one to root."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hold, release = os.pipe()
    kernel = confine.Kernel()
    keeper = os.fork()
    if keeper == 0:
        try:
            os.close(release)
            os.setuid(os.geteuid() or NOBODY)
            kernel.do("prctl", confine.PR_SET_DUMPABLE, 1, 0, 0, 0)
            confine.begin_leader(kernel, theirs)
            os.read(hold, 1)  # the leader, until the test has looked
        finally:
            os._exit(0)
    theirs.close()
    os.close(hold)
    try:
        begun = ours.recv(1), ours.recv(1)
        owner = os.stat(f"/proc/{keeper}/environ").st_uid
    finally:
        os.close(release)
        os.waitpid(keeper, 0)
        ours.close()

    assert begun == (b"k", b"l")
    assert owner == 0


# ---------------------------------------------------------------------- living and ending


async def test_confined_command_ends_as_others_do(commands: Commands, options: dict[str, Any]) -> None:
    status = await commands.end("sh", "-c", "echo out; echo err >&2; exit 7", **options)
    killed = await commands.end("sh", "-c", "kill -USR1 $$", **options)

    assert (status.end, status.code, status.drained, status.found) == ("exited", 7, True, 0)
    assert (killed.end, killed.signal) == ("signaled", signal.SIGUSR1)


async def test_program_that_is_not_there_is_told_with_its_errno(commands: Commands, options: dict[str, Any]) -> None:
    failed = await commands.refused("/nowhere/program", **options)

    assert (failed.stage, failed.number) == ("exec", 2)


async def test_root_that_is_gone_is_told_as_a_sandbox_that_cannot_be_made(
    commands: Commands, options: dict[str, Any], how: Implementation
) -> None:
    missing = replace(options["sandbox"], write=(*options["sandbox"].write, "/nowhere/at/all"))
    if how == "landlock":
        pytest.skip("nothing is mounted there")
    failed = await commands.refused("true", **{**options, "sandbox": missing})

    assert failed.stage == "sandbox"


async def test_stdin_and_terminal_work(commands: Commands, options: dict[str, Any]) -> None:
    job = await commands.start("cat", stdin=True, **options)
    await job.write_stdin(1, b"hello\n")
    await job.close_stdin(2)
    first = await ended(job)
    second = await commands.start("sh", "-c", "test -t 0 && stty size < /dev/tty", pty=(33, 44), **options)
    terminal = await ended(second)

    assert (first.code, printed(job)) == (0, "hello\n")
    assert (terminal.code, printed(second)) == (0, "33 44\n")


async def test_term_ends_the_tree_in_its_grace(commands: Commands, options: dict[str, Any]) -> None:
    program = "trap 'echo bye; exit 5' TERM; sleep 1000 & setsid sleep 1000 & echo ready; while :; do sleep 0.01; done"
    job = await commands.start("sh", "-c", program, **options)
    await until(lambda: printed(job) and sum(_runs(pid, b"sleep\x001000\x00") for pid in tree(job)) == 2)
    pids = tree(job)
    status = await job.kill("enough", 60)

    assert status is not None
    assert (status.end, status.code, status.forced, status.survivors) == ("killed", 5, 0, 0)
    assert printed(job) == "ready\nbye\n"
    assert [pid for pid in pids if shim.stat_of(pid)] == []


async def test_kill_ends_what_ignores_term(commands: Commands, options: dict[str, Any]) -> None:
    program = "trap '' TERM; sh -c 'trap \"\" TERM; echo ready; while :; do sleep 1000; done' & wait"
    job = await commands.start("sh", "-c", program, **options)
    await until(lambda: printed(job))
    pids = tree(job)
    status = await job.kill("enough", 0.05)

    assert status is not None
    assert (status.end, status.signal, status.survivors) == ("killed", signal.SIGKILL, 0)
    assert [pid for pid in pids if shim.stat_of(pid)] == []


async def test_strays_are_killed_or_left_as_asked(commands: Commands, options: dict[str, Any]) -> None:
    killed = await commands.end("sh", "-c", "setsid sleep 1000 & exit 3", grace=0.0, **options)
    job = await commands.start("sh", "-c", "setsid sleep 1000 & echo $!; exit 3", strays="leave", **options)
    left = await ended(job)
    remains = await end_lost(job, 60)

    assert (killed.code, killed.strays, killed.found, killed.survivors) == (3, "killed", 1, 0)
    assert (left.code, left.strays, left.found) == (3, "left", 1)
    assert len(remains.processes) == 1
    assert remains.verified


async def test_what_a_killed_shim_leaves_is_found_and_ended(commands: Commands, options: dict[str, Any]) -> None:
    job = await commands.start("sh", "-c", "sleep 1000 & echo ready; wait", **options)
    await until(lambda: printed(job))
    started = job.started()
    assert isinstance(started, StartedCommand)
    os.kill(started.shim.pid, signal.SIGKILL)
    await until(lambda: not job.held())
    remains = await end_lost(job, 60)

    assert remains.verified
    assert len(remains.processes) >= 2


async def test_signal_to_all_reaches_nobody_else(commands: Commands, options: dict[str, Any]) -> None:
    status = await commands.end("sh", "-c", "kill -KILL -1; kill -KILL 1; exit 4", **options)

    assert status.code == 4 or status.signal == signal.SIGKILL


# ---------------------------------------------------------------------- what is private, and limits


async def test_folder_for_temporary_files_and_home_are_its_own(commands: Commands, options: dict[str, Any]) -> None:
    mark = f"mark-{secrets.token_hex(8)}"
    program = f'cd && test "$PWD" = "$HOME" && touch "$HOME/{mark}" "$TMPDIR/{mark}" && echo fine'
    job = await commands.start("sh", "-c", program, **options)
    status = await ended(job)

    assert (status.code, printed(job)) == (0, "fine\n")
    assert not (Path(tempfile.gettempdir()) / mark).exists()
    assert not (Path.home() / mark).exists()


SIZES = "import os; print([os.statvfs(p).f_frsize * os.statvfs(p).f_blocks for p in ('/tmp', '/dev/shm')])"


async def test_what_it_may_write_into_memory_is_bounded(
    commands: Commands, options: dict[str, Any], how: Implementation
) -> None:
    if how == "landlock":
        pytest.skip("its temporary files are on the disk")
    job = await commands.python(SIZES, **options)
    await ended(job)

    assert printed(job) == f"{[confine.TEMPORARY_BYTES] * 2}\n"
    assert confine.TEMPORARY_BYTES <= 2 << 30


async def test_files_of_the_system_are_there_and_cannot_be_changed(commands: Commands, options: dict[str, Any]) -> None:
    program = "cat /etc/passwd; (echo x >> /etc/passwd) 2>&- && echo changed; chmod 777 /etc/hosts 2>&- && echo changed"
    job = await commands.start("sh", "-c", program, **options)
    await ended(job)

    assert printed(job) == Path("/etc/passwd").read_text()


async def test_devices_work_and_nothing_is_made_beside_them(commands: Commands, options: dict[str, Any]) -> None:
    program = "echo x > /dev/null; head -c 4 /dev/zero | wc -c; cat; echo x > /dev/made || echo refused"
    job = await commands.start("sh", "-c", program, **options)
    await ended(job)

    assert printed(job) == "4\nrefused\n"


async def test_other_jobs_and_its_own_folder_are_out_of_reach(commands: Commands, options: dict[str, Any]) -> None:
    other = await commands.start("echo", "secret", **options)
    await ended(other)
    program = f"cat {other.folder}/stdout; echo x > {other.folder}/status; cat {other.folder}/control"
    job = await commands.start("sh", "-c", program, **options)
    status = await ended(job)

    assert status.code != 0
    assert printed(job) == ""
    assert other.status() is not None


PRIVILEGES = """
import ctypes
prctl = ctypes.CDLL(None).prctl
print(prctl(39, 0, 0, 0, 0), [number for number in range(64) if prctl(23, number, 0, 0, 0) == 1])
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
print(ctypes.CDLL(None).capget(header, data), list(data))
"""
"""Whether there can be new privileges, the capabilities that a program could have, and those that this one has."""


async def test_no_privileges_are_left(commands: Commands, options: dict[str, Any]) -> None:
    job = await commands.start(sys.executable, "-I", "-c", PRIVILEGES, **options)
    await ended(job)

    assert printed(job) == "1 []\n0 [0, 0, 0, 0, 0, 0]\n"


async def test_limits_hold(commands: Commands, options: dict[str, Any]) -> None:
    limited = replace(options["sandbox"], limits=SandboxLimits(memory=1 << 30, file_size=1000))
    options = {**options, "sandbox": limited}
    python = (sys.executable, "-I", "-S", "-c")
    memory = await commands.end(*python, "bytearray(2 << 30)", **options)
    file = await commands.end("sh", "-c", "head -c 5000 /dev/zero > big; wc -c < big", **options)

    assert memory.code == 1
    assert (Path(limited.write[0]) / "big").stat().st_size == 1000
    assert file.end == "exited"


@pytest.mark.skipif(not WHOLE, reason="takes a second of processor time: in make test-commands")
async def test_limit_on_processor_time_holds(commands: Commands, options: dict[str, Any]) -> None:
    limited = replace(options["sandbox"], limits=SandboxLimits(cpu=1))
    cpu = await commands.end(sys.executable, "-I", "-S", "-c", "while True: pass", **{**options, "sandbox": limited})

    assert cpu.signal in (signal.SIGXCPU, signal.SIGKILL)


FORK = """
import os, signal
count = 0
try:
    while count < 60:
        if os.fork() == 0:
            signal.pause()
        count += 1
except OSError as error:
    print(error.errno)
print(count)
"""


async def test_fork_bomb_meets_its_limit(commands: Commands, options: dict[str, Any], how: Implementation) -> None:
    if not counts_processes(how):
        pytest.skip(f"{how} cannot count processes here")
    limited = replace(options["sandbox"], limits=SandboxLimits(processes=20))
    job = await commands.python(FORK, grace=0.0, **{**options, "sandbox": limited})
    status = await ended(job)

    assert printed(job).split() == ["11", "19"]
    assert status.survivors == 0


async def test_fork_bomb_without_a_limit_meets_none(commands: Commands, options: dict[str, Any]) -> None:
    job = await commands.python(FORK, grace=0.0, **options)
    await ended(job)

    assert printed(job).split() == ["60"]


async def test_network_works_where_it_is_granted(commands: Commands, options: dict[str, Any]) -> None:
    program = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
    with socket.create_server(("127.0.0.1", 0)) as server:
        argv = (sys.executable, "-I", "-S", "-c", program, str(server.getsockname()[1]))
        refused = await commands.end(*argv, **options)
        granted = await commands.end(*argv, **{**options, "sandbox": replace(options["sandbox"], network=True)})

    assert (refused.code, granted.code) == (1, 0)


async def test_repositories_in_a_root_are_protected_as_its_own_is(
    commands: Commands, options: dict[str, Any], how: Implementation
) -> None:
    if how == "landlock":
        pytest.skip("it keeps roots read-only as a whole")
    root = Path(options["cwd"])
    for name in ("", "a", "a/b"):
        (root / name / ".git" / "hooks").mkdir(parents=True)
        (root / name / ".git" / "config").write_text("theirs")
    (root / "module").mkdir()
    (root / "module" / ".git").write_text("gitdir: elsewhere")
    (root / "link").symlink_to("a")
    whole = replace(options["sandbox"], accept=(), protect=(f"{root}/.git",))
    parts = replace(options["sandbox"], protect=(f"{root}/.git/config", f"{root}/.git/hooks"))
    places = ".git/config a/.git/config a/b/.git/config .git/hooks/x a/.git/hooks/x a/b/.git/hooks/x module/.git"
    program = f"for f in {places} .git/new a/.git/new a/new; do (echo ours > $f) 2>&- && echo $f; done; mv a c 2>&-"
    first = await commands.start("sh", "-c", program, **{**options, "sandbox": whole})
    await ended(first)
    second = await commands.start("sh", "-c", program, **{**options, "sandbox": parts})
    await ended(second)

    assert printed(first).split() == ["a/new"]
    assert printed(second).split() == ["module/.git", ".git/new", "a/.git/new", "a/new"]
    assert (root / "a" / "b" / ".git" / "config").read_text() == "theirs"
    assert not (root / "c").exists()


# ---------------------------------------------------------------------- choosing


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(tmp_path / "store" / "agent.db") as made:
        yield made


def test_program_of_a_folder_that_commands_may_change_makes_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of an environment is in the PATH of a host, and may be in a root."""
    planted = tmp_path / "root" / ".venv" / "bin" / "bwrap"
    planted.parent.mkdir(parents=True)
    planted.write_text(f"#!/bin/sh\ntouch '{tmp_path}/escaped'\n")
    planted.chmod(0o755)
    monkeypatch.delenv("PERDURE_BWRAP", raising=False)
    monkeypatch.setenv("PATH", f"{planted.parent}:{os.environ['PATH']}")
    examine("bubblewrap")

    assert not (tmp_path / "escaped").exists()


async def test_runtime_chooses_a_sandbox_and_stores_it(runtime: Runtime, tmp_path: Path) -> None:
    if all(examine(each).refused for each in IMPLEMENTATIONS):
        pytest.skip("no sandbox here")
    (tmp_path / "root").mkdir()
    workspace = Workspace(tmp_path / "root")
    handle = await runtime.command(["pwd"], sandbox=workspace.confinement(tmp_path / "store" / "agent.db"))
    result = await handle.result()
    asked = (await runtime.processes.get(handle.id)).registration.input["sandbox"]

    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'root'}\n")
    assert asked["how"] in IMPLEMENTATIONS


async def test_python_finds_this_package_wherever_it_is_installed(runtime: Runtime, tmp_path: Path) -> None:
    if all(examine(each).refused for each in IMPLEMENTATIONS):
        pytest.skip("no sandbox here")
    (tmp_path / "root").mkdir()
    sandbox = Workspace(tmp_path / "root").confinement(tmp_path / "store" / "agent.db")
    handle = await runtime.command([sys.executable, "-c", "import perdure.testing"], sandbox=sandbox)

    assert (await handle.result()).exit_code == 0


@pytest.mark.parametrize("name", [b".perdure", b".mainstay", b"config"])
def test_what_another_command_has_made_to_mount_over_does_for_this_one(tmp_path: Path, name: bytes) -> None:
    path = os.fsencode(tmp_path) + b"/" + name
    confine.make_empty(path)

    confine.make_empty(path)

    assert os.path.isdir(path) == (name != b"config")


@pytest.mark.parametrize("name", [b"perdure-7", b"mainstay-7"])
def test_groups_that_a_killed_shim_left_are_removed_under_either_name(tmp_path: Path, name: bytes) -> None:
    (tmp_path / os.fsdecode(name)).mkdir()
    confined = confine.Confined([b"pids " + os.fsencode(tmp_path), b"processes 3"], b"")

    with pytest.raises(FileExistsError):  # a plain folder has no `pids.max`, so it is tried again
        confined.limit_processes(8)

    assert os.listdir(tmp_path) == ["perdure-8"]


def test_the_folder_of_a_store_is_hidden_under_the_old_name_where_it_is_there(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    before = Workspace(root).confinement(None)
    (root / ".mainstay").mkdir()

    after = Workspace(root).confinement(None)

    assert before.hide == (f"{root}/.perdure",)
    assert after.hide == (f"{root}/.perdure", f"{root}/.mainstay")


async def test_self_test_is_not_run_on_the_event_loop(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    sandbox = Workspace(tmp_path / "root", unsandboxed=True).confinement()
    worker = runtime._open().processes._worker
    drafting = asyncio.create_task(worker.draft(Command(("true",), sandbox=sandbox), {}))
    await asyncio.sleep(0)  # its first step

    assert not drafting.done()
    assert (await drafting).input["sandbox"]["how"]


def test_folders_that_killed_self_tests_left_are_deleted_by_the_next_one(tmp_path: Path) -> None:
    for name in (f"{PROBE}old", f"{PROBE}young", "another"):
        (tmp_path / name / "root").mkdir(parents=True)
    for name in (f"{PROBE}old", "another"):
        os.utime(tmp_path / name, (0, 0))
    remove_left(str(tmp_path))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", f"{PROBE}young"]


async def test_nothing_that_enforces_it_is_refused_unless_the_host_allows_that(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "jobs").mkdir()
    none = Sandbox(lambda: tmp_path / "jobs", None, implementations=())
    asked = Confinement((str(tmp_path / "root"),))

    with pytest.raises(SandboxUnavailable, match="unsandboxed=True"):
        none.choose(asked)
    assert none.choose(replace(asked, unsandboxed=True)).how == "none"


def test_command_never_begins_in_a_weaker_sandbox_than_was_chosen(tmp_path: Path) -> None:
    here = Sandbox(lambda: tmp_path, None)

    assert (
        "not enforced" in here.check(Confinement((str(tmp_path),), how="bubblewrap"))
        or not examine("bubblewrap").refused
    )
    assert here.check(Confinement((str(tmp_path),), how="none")) == "it may not run without a sandbox"
    assert here.check(Confinement((str(tmp_path),))) == "no sandbox was chosen for it"


async def test_store_in_a_root_itself_is_refused_and_in_a_folder_of_its_own_hidden(
    tmp_path: Path, how: Implementation
) -> None:
    root = tmp_path / "root"
    (root / ".perdure").mkdir(parents=True)
    workspace = Workspace(root)

    with pytest.raises(SandboxUnavailable, match="folder of its own"):
        workspace.confinement(root / "agent.db")
    hidden = workspace.confinement(root / ".perdure" / "runtime.db")
    assert hidden.hide == (str(root / ".perdure"),)
    chooser = Sandbox(lambda: root / ".perdure" / "runtime.db-jobs", str(root / ".perdure" / "runtime.db"), [how])
    (root / ".perdure" / "runtime.db-jobs").mkdir()
    if how == "landlock":
        with pytest.raises(SandboxUnavailable, match="cannot hide"):
            chooser.choose(hidden)
    else:
        assert chooser.choose(hidden).how == how


async def test_store_is_hidden_whatever_the_caller_says(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "agent.db") as runtime:
        with pytest.raises(SandboxUnavailable, match="folder of its own"):
            await runtime.command(["true"], sandbox=Confinement((str(tmp_path),)))


async def test_working_directory_outside_is_refused(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    if all(examine(each).refused for each in IMPLEMENTATIONS):
        pytest.skip("no sandbox here")

    with pytest.raises(InvalidCommand, match="outside of what its sandbox grants"):
        await runtime.command(["true"], cwd="/usr", sandbox=Workspace(tmp_path / "root").confinement())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"network": "yes"}, "network='yes'"),
        ({"accept": ("all",)}, "there is no gap"),
        ({"accept": "git"}, "give a list"),
        ({"limits": {"memory": 1}}, "give SandboxLimits"),
        ({"read": ["/nowhere/at/all"]}, "/nowhere/at/all"),
        ({"unsandboxed": 1}, "unsandboxed=1"),
    ],
)
def test_workspace_that_is_not_usable_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidDefinition, match=says):
        Workspace(tmp_path, **options)
