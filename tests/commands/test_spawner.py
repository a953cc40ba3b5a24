"""Beginning commands: what is refused before anything is begun, spawners that die, and many at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from perdure.commands.job import Beginning, Job, StartedCommand
from perdure.commands.os_tree import end
from perdure.commands.spawner import Spawner, SpawnFailed, check
from perdure.errors import CommandsUnavailable, InvalidCommand, RuntimeClosed
from tests.commands.conftest import Commands, children_of, ended, size
from tests.commands.host import lives
from tests.kit import until

ENV = {"PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("argv", "env", "cwd", "why"),
    [
        ([], ENV, "/", "needs a program"),
        ([""], ENV, "/", "needs a program"),
        (["true", "a\0b"], ENV, "/", "NUL"),
        (["tr\0ue"], ENV, "/", "NUL"),
        (["true"], {"A": "b\0"}, "/", "NUL"),
        (["true"], {"A=B": "c"}, "/", "no name of a variable"),
        (["true"], {"": "c"}, "/", "no name of a variable"),
        (["true", *["x"] * 1_000_000], ENV, "/", "1,000,001 arguments are too many"),
        (["true", "x" * 131_072], ENV, "/", "too long"),
        (["true"], {"A": "x" * 131_072}, "/", "too long"),
        (["true", *["x" * 100_000] * 30], ENV, "/", "3,0.. bytes|bytes of arguments"),
        (["no-such-program-anywhere"], ENV, "/", "there is no program"),
        (["./true"], ENV, "/", "there is no program"),
        (["true"], {"PATH": "/nowhere"}, "/", "there is no program 'true' in PATH='/nowhere'"),
        (["/etc/passwd"], ENV, "/", "may not be executed"),
        (["/"], ENV, "/", "there is no program"),
        (["true"], ENV, "/no/such/folder", "cannot be used: No such file"),
        (["true"], ENV, "/etc/passwd", "is no directory"),
        (["true"], ENV, "relative", "no absolute path"),
        (["true"], ENV, "/\0", "no absolute path"),
    ],
    ids=range(20),
)
def test_what_the_system_would_refuse_is_refused_first(
    argv: list[str], env: dict[str, str], cwd: str, why: str
) -> None:
    with pytest.raises(InvalidCommand, match=why):
        check(argv, env, cwd)


def test_what_can_be_run_is_let_pass(tmp_path: Path) -> None:
    script = tmp_path / "here"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)

    check(["true", "", "é", "\udcff"], ENV, "/")
    check(["./here"], {}, str(tmp_path))
    check(["here"], {"PATH": ":/nowhere"}, str(tmp_path))
    check(["true", "x" * 131_071], ENV, "/")


async def test_arguments_arrive_as_they_are(commands: Commands) -> None:
    argv = ["", " ", "a b", "'\"\\", "é€😀", "line\nline", "\udcff\udc80", "x" * 131_000]
    job = await commands.start("printf", "%s|", *argv)
    await ended(job)

    assert (job.folder / "stdout").read_bytes() == b"|".join(os.fsencode(each) for each in argv) + b"|"


async def test_program_is_looked_up_in_the_commands_own_path(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "my-tool"
    script.write_text("#!/bin/sh\necho mine\n")
    script.chmod(0o755)
    job = await commands.start("my-tool", env={"PATH": f"/nowhere:{tmp_path / 'bin'}:/bin"})
    await ended(job)

    assert (job.folder / "stdout").read_text() == "mine\n"


async def test_job_folder_may_have_a_long_path(commands: Commands, tmp_path: Path) -> None:
    """Longer than a socket's path may be."""
    commands.folder = tmp_path / ("long name of a folder " * 8)
    commands.folder.mkdir()
    job = await commands.start("sleep", "100")
    status = await job.kill("enough", 60)

    assert status is not None
    assert status.end == "killed"


async def test_job_folder_that_is_not_there_is_told(commands: Commands) -> None:
    job = Job(commands.folder / "not made" / "job")
    failed = await commands.spawner.start(commands.request(job, ["true"]))

    assert str(failed) == "SpawnFailed(stage='folder', number=2)"
    assert job.beginning() is Beginning.UNTOUCHED


async def test_many_commands_at_once(commands: Commands) -> None:
    count = size(40, 200)
    jobs = await asyncio.gather(*(commands.start("sh", "-c", f"echo {n}; read x", stdin=True) for n in range(count)))
    assert all(job.held() for job in jobs)
    for job in jobs:
        await job.close_stdin(1)
    statuses = await asyncio.gather(*map(ended, jobs))

    assert {(status.end, status.code) for status in statuses} == {("exited", 1)}
    assert [int((job.folder / "stdout").read_text()) for job in jobs] == list(range(count))


@pytest.mark.kill
async def test_commands_go_on_when_their_spawner_is_killed_and_the_next_has_another(commands: Commands) -> None:
    job = await commands.start("cat", stdin=True)
    process = commands.spawner._process
    assert process is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    other = await commands.start("echo", "again")

    assert commands.spawner._process is not process
    assert (await ended(other)).code == 0
    await job.write_stdin(1, b"still here")
    await job.close_stdin(2)
    assert (await ended(job)).stdout == 10


@pytest.mark.kill
async def test_every_start_is_answered_though_spawners_are_killed(commands: Commands) -> None:
    """Killed at any moment of a start: it ran, or it did not and says so; never twice, never unanswered."""
    ran = commands.folder / "ran"
    ran.mkdir()
    stop = asyncio.Event()

    async def killer() -> None:
        while not stop.is_set():
            process = commands.spawner._process
            if process is not None and process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await asyncio.sleep(0.02)

    async def one(n: int) -> str:
        job = commands.job()
        request = commands.request(job, ["sh", "-c", f'echo x >> "{ran}/{n}"'])
        answer = await commands.spawner.start(request)
        if isinstance(answer, SpawnFailed):
            assert answer.stage == "shim"
            assert job.beginning() is Beginning.UNTOUCHED
            assert job.void()
            return "not"
        assert (await ended(job)).code == 0
        return "ran"

    killing = asyncio.create_task(killer())
    outcomes = await asyncio.gather(*(one(n) for n in range(size(20, 200))))
    stop.set()
    await killing
    found = {int(path.name): path.read_text() for path in ran.iterdir()}

    assert found == {n: "x\n" for n, outcome in enumerate(outcomes) if outcome == "ran"}


async def test_spawner_ends_with_its_runtime_and_the_commands_do_not(commands: Commands) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from perdure.commands.spawner import Spawner, StartRequest\n"
        "async def main():\n"
        "    spawner = Spawner()\n"
        "    env = {'PATH': os.environ['PATH']}\n"
        "    request = StartRequest(Path(sys.argv[1]), sys.argv[2], ['cat'], env, '/', stdin=True)\n"
        "    await spawner.start(request)\n"
        "    print(spawner._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    job = commands.job()
    request = commands.request(job, [])
    host = subprocess.run([sys.executable, "-c", program, job.folder, request.token], capture_output=True, timeout=120)
    assert host.returncode == -signal.SIGKILL, host.stderr
    await until(lambda: not Path(f"/proc/{int(host.stdout)}").exists())

    assert job.held()
    await job.write_stdin(1, b"hello")
    await job.close_stdin(2)
    status = await ended(job)
    assert (status.code, status.stdout) == (0, 5)


async def test_spawner_ends_though_a_fork_of_the_runtime_holds_its_socket(commands: Commands) -> None:
    program = (
        "import asyncio, os, sys, time\n"
        "from perdure.commands.spawner import Spawner\n"
        "async def main():\n"
        "    spawner = Spawner()\n"
        "    await spawner._open()\n"
        "    ahead = spawner.prepare()\n"
        "    if os.fork() == 0:\n"
        "        os.close(1)\n"
        "        sys.stdin.read()\n"
        "        os._exit(0)\n"
        "    pid, own = spawner._process.pid, []\n"
        "    while not own:\n"
        "        own = open(f'/proc/{pid}/task/{pid}/children').read().split()\n"
        "    print(pid, *own, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as host:
        assert host.stdout is not None
        spawner, shim = map(int, host.stdout.readline().split())
        await until(lambda: not lives(spawner) and not lives(shim))


async def test_half_a_request_begins_nothing(commands: Commands) -> None:
    job = commands.job()
    starting = asyncio.create_task(commands.spawner.start(commands.request(job, ["true", "x" * 100_000])))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await commands.end("true")

    # Cancelled as it is, it has begun or not; never is it in between.
    if job.beginning() is Beginning.UNTOUCHED:
        assert job.void()
    else:
        assert (await ended(job)).code == 0


async def test_closed_spawner_begins_nothing(commands: Commands) -> None:
    job = await commands.start("cat", stdin=True)
    await commands.spawner.close()
    await commands.spawner.close()

    with pytest.raises(RuntimeClosed):
        await commands.start("true")
    await job.close_stdin(1)
    assert (await ended(job)).code == 0


async def test_interpreter_that_cannot_run_shims_is_told(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(CommandsUnavailable, match="executable is empty"):
        await commands.start("true")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho it is broken >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(CommandsUnavailable, match="it is broken"):
        await commands.start("true")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(CommandsUnavailable, match="cannot be run"):
        await commands.start("true")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
async def test_elsewhere_than_on_linux_it_is_told(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(CommandsUnavailable, match="Linux"):
        await commands.start("true")


async def test_secrets_are_in_no_file_and_in_no_process_but_the_command(commands: Commands) -> None:
    secret = "very-secret-value"
    job = await commands.start("cat", stdin=True, env={"API_KEY": secret})
    started = job.started()
    assert isinstance(started, StartedCommand)

    assert secret.encode() in Path(f"/proc/{started.leader.pid}/environ").read_bytes()
    assert secret.encode() not in Path(f"/proc/{started.shim.pid}/environ").read_bytes()
    assert b"PATH" not in Path(f"/proc/{started.shim.pid}/environ").read_bytes()
    await job.close_stdin(1)
    await ended(job)
    for path in job.folder.iterdir():
        if path.is_file():
            assert secret.encode() not in path.read_bytes()


@pytest.mark.slow
async def test_commands_run_from_a_wheel(tmp_path: Path) -> None:
    """The shim is a program besides a module: it must be a file in what we ship."""
    root = Path(__file__).parents[2]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(build, cwd=root, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("perdure-*.whl")
    unpacked = tmp_path / "unpacked of a wheel"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    program = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "import perdure.commands.spawner as s\n"
        "from perdure.commands.job import Job\n"
        "assert s.__file__.startswith(sys.argv[1]), s.__file__\n"
        "async def main():\n"
        "    job = Job(Path(sys.argv[2]))\n"
        "    job.create()\n"
        "    spawner = s.Spawner()\n"
        "    await spawner.start(s.StartRequest(job.folder, 'token', ['echo', 'hi'], {'PATH': '/bin'}, '/'))\n"
        "    print((await job.wait()).code, (job.folder / 'stdout').read_text())\n"
        "    await spawner.close()\n"
        "asyncio.run(main())\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(unpacked), str(tmp_path / "job")],
        env=os.environ | {"PYTHONPATH": str(unpacked), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.stdout, ran.stderr) == ("0 hi\n\n", "")


async def test_spawners_of_two_runtimes_do_not_meet(commands: Commands) -> None:
    other = Spawner()
    job = commands.job()
    started, mine = await asyncio.gather(other.start(commands.request(job, ["true"])), commands.start("true"))
    await other.close()

    assert isinstance(started, StartedCommand)
    assert (await ended(job)).code == (await ended(mine)).code == 0


# ---------------------------------------------------------------------- ahead of the request


async def test_shim_that_was_forked_ahead_runs_the_command(commands: Commands) -> None:
    prepared = commands.spawner.prepare()
    job, told = commands.job(), list[StartedCommand]()
    started = await commands.spawner.start(commands.request(job, ["echo", "hello"]), prepared, told.append)

    assert told == [started]
    assert started == job.started()
    assert (await ended(job)).code == 0


async def test_who_runs_a_command_is_told_also_where_its_program_cannot_be_run(commands: Commands) -> None:
    job, told = commands.job(), list[StartedCommand]()
    failed = await commands.spawner.start(commands.request(job, ["/nowhere/program"]), identified=told.append)

    assert str(failed) == "SpawnFailed(stage='exec', number=2)"
    assert told == [job.started()]


@pytest.mark.kill
async def test_command_begins_though_the_shim_that_was_forked_ahead_died_with_its_spawner(commands: Commands) -> None:
    prepared = commands.spawner.prepare()
    assert prepared is not None
    waiting = await prepared.wait_forked()
    assert waiting is not None
    assert commands.spawner._process is not None
    for pid in (commands.spawner._process.pid, *children_of(commands.spawner._process.pid)):
        os.kill(pid, signal.SIGKILL)
    commands.spawner._process.wait()
    job = commands.job()
    started = await commands.spawner.start(commands.request(job, ["true"]), prepared)

    assert started == job.started()
    assert (await ended(job)).code == 0


async def test_shim_that_gets_no_request_leaves(commands: Commands) -> None:
    prepared = commands.spawner.prepare()
    assert prepared is not None
    assert await prepared.wait_forked() is not None
    spawner = commands.spawner._process
    assert spawner is not None
    await until(lambda: bool(children_of(spawner.pid)))

    prepared.dismiss()

    await until(lambda: not children_of(spawner.pid))


@pytest.mark.kill
async def test_leader_that_was_forked_ahead_leaves_with_its_shim(commands: Commands) -> None:
    prepared = commands.spawner.prepare()
    assert prepared is not None
    waiting = await prepared.wait_forked()
    assert waiting is not None
    assert commands.spawner._process is not None
    spawner = commands.spawner._process.pid
    await until(lambda: any(children_of(shim) for shim in children_of(spawner)))
    [shim] = children_of(spawner)
    [leader] = children_of(shim)

    os.kill(shim, signal.SIGKILL)

    await until(lambda: not lives(leader))
    waiting.close()


async def test_shim_of_the_next_command_is_forked_when_one_has_begun(commands: Commands) -> None:
    await commands.end("true")
    assert commands.spawner._process is not None
    spawner = commands.spawner._process.pid
    await until(lambda: [len(children_of(shim)) for shim in children_of(spawner)] == [1])
    [shim] = children_of(spawner)
    [leader] = children_of(shim)
    job = commands.job()
    started = await commands.spawner.start(commands.request(job, ["true"]), commands.spawner.prepare())

    assert isinstance(started, StartedCommand)
    assert (started.shim.pid, started.leader.pid) == (shim, leader)
    assert (await ended(job)).code == 0


async def test_command_that_stops_its_shim_does_not_stop_its_caller(commands: Commands) -> None:
    spawner = Spawner(exec_seconds=0.1)
    for _ in range(3):
        job = commands.job()
        request = commands.request(job, ["sleep", "600"])
        started = await spawner.start(request, None, lambda found: os.kill(found.shim.pid, signal.SIGSTOP))
        assert started == job.started()
        await end(job, "enough", 0, job.started())
        await ended(job)
    await spawner.close()


@pytest.mark.kill
async def test_command_begins_though_the_leader_that_was_forked_ahead_was_killed(commands: Commands) -> None:
    await commands.end("true")
    assert commands.spawner._process is not None
    spawner = commands.spawner._process.pid
    await until(lambda: [len(children_of(shim)) for shim in children_of(spawner)] == [1])
    [shim] = children_of(spawner)
    [leader] = children_of(shim)
    os.kill(leader, signal.SIGKILL)
    await until(lambda: not lives(leader))
    job = commands.job()
    started = await commands.spawner.start(commands.request(job, ["echo", "ran"]), commands.spawner.prepare())

    assert isinstance(started, StartedCommand)
    assert started.shim.pid == shim
    assert ((await ended(job)).code, (job.folder / "stdout").read_bytes()) == (0, b"ran\n")


async def test_shim_of_the_next_command_leaves_with_its_spawner(commands: Commands) -> None:
    await commands.end("true")
    assert commands.spawner._process is not None
    spawner = commands.spawner._process.pid
    await until(lambda: bool(children_of(spawner)))
    ready = children_of(spawner)

    await commands.spawner.close()

    await until(lambda: not any(map(lives, ready)))
