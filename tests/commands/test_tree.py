"""Whatever a command begins ends with it: escapees, processes that ignore TERM or are stopped, and those that outlived
their shim. Never a stranger."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from perdure.commands import shim
from perdure.commands.job import Beginning, Job, StartedCommand, Status, own_boot
from perdure.commands.os_tree import Remains, end, end_lost
from tests.commands.conftest import Commands, ended, size, written
from tests.kit import until

GROW = """
import os, signal, sys, time
count, how = int(sys.argv[1]), sys.argv[2]
for number in range(count - 1):
    if os.fork() == 0:
        if how == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if how == "escape":
            os.setsid()
            if os.fork():
                os._exit(0)
        if how == "chain" and os.fork():
            signal.pause()
        print(os.getpid(), flush=True)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            signal.pause()
print(os.getpid(), flush=True)
if how != "leave":
    while True:
        signal.pause()
"""


def lines(job: Job) -> list[str]:
    return written(job).decode().splitlines()


def lives(pid: int) -> bool:
    stat = shim.stat_of(pid)
    return stat is not None and stat[0] not in b"ZX"


async def grown(commands: Commands, count: int, how: str, **options: object) -> tuple[Job, list[int]]:
    """A command of so many processes, all of which have said who they are."""
    job = await commands.python(GROW, str(count), how, **options)
    await until(lambda: len(lines(job)) == count)
    return job, [int(line) for line in lines(job)]


@pytest.mark.parametrize("how", ["plain", "escape", "stop", "chain"])
async def test_kill_ends_the_whole_tree_by_term(commands: Commands, how: str) -> None:
    job, pids = await grown(commands, size(8, 50), how)
    status = await job.kill("enough", 60)

    assert status is not None
    assert [pid for pid in pids if lives(pid)] == []
    assert (status.end, status.reason, status.survivors, status.forced) == ("killed", "enough", 0, 0)
    assert status.found >= len(pids)
    assert status.drained


async def test_kill_ends_what_ignores_term(commands: Commands) -> None:
    job, pids = await grown(commands, 4, "ignore")
    status = await job.kill("enough", 0.05)

    assert status is not None
    assert [pid for pid in pids if lives(pid)] == []
    assert status.forced >= 3
    assert status.survivors == 0


async def test_kill_without_grace_sends_no_term(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "trap 'echo term' TERM; echo ready; while :; do sleep 0.01; done")
    await until(lambda: lines(job))
    status = await job.kill("at once", 0)

    assert status is not None
    assert status.signal == signal.SIGKILL
    assert lines(job) == ["ready"]


async def test_what_is_written_while_it_is_terminated_is_kept(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.01; done")
    await until(lambda: lines(job))
    status = await job.kill("enough", 60)

    assert status is not None
    assert (status.end, status.code, lines(job)) == ("killed", 5, ["ready", "bye"])


async def test_later_kill_with_less_grace_wins(commands: Commands) -> None:
    job, pids = await grown(commands, 2, "ignore")
    first = asyncio.create_task(job.kill("polite", 3600))
    await until(lambda: not lives(pids[-1]) or not lives(pids[0]))  # the one that does not ignore it
    second = await job.kill("now", 0)

    assert second is not None
    assert await first == second
    assert second.reason == "polite"
    assert not any(map(lives, pids))


async def test_kills_at_once_have_one_end(commands: Commands) -> None:
    job = await commands.start("sleep", "100")
    statuses = await asyncio.gather(*(job.kill(f"reason {n}", 2) for n in range(5)))

    assert len(set(map(repr, statuses))) == 1
    assert isinstance(statuses[0], Status)


async def test_grandchild_that_holds_the_pipes_is_found_and_ended(commands: Commands) -> None:
    job, pids = await grown(commands, 2, "leave", grace=60)
    status = await ended(job)

    assert (status.end, status.code, status.strays, status.found, status.forced) == ("exited", 0, "killed", 1, 0)
    assert not any(map(lives, pids))
    assert status.drained


async def test_daemon_that_left_its_session_is_found_and_ended(commands: Commands) -> None:
    """A command that puts itself into the background: its leader has ended long before."""
    program = (
        "import os, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "null = os.open('/dev/null', os.O_RDWR)\n"
        "os.write(1, b'%d\\n' % os.getpid())\n"
        "for fd in (0, 1, 2): os.dup2(null, fd)\n"
        "time.sleep(100)\n"
    )
    job = await commands.python(program, grace=60)
    status = await ended(job)

    assert (status.end, status.code, status.strays, status.found, status.survivors) == ("exited", 0, "killed", 1, 0)
    assert not lives(int(lines(job)[0]))


async def test_strays_are_left_where_that_was_asked_for(commands: Commands) -> None:
    job, pids = await grown(commands, 2, "leave", strays="leave")
    status = await ended(job)

    assert (status.end, status.code, status.strays, status.found, status.drained) == ("exited", 0, "left", 1, False)
    stray = next(pid for pid in pids if lives(pid))
    assert status.processes[0].pid == stray
    os.kill(stray, signal.SIGKILL)


async def test_end_of_a_pipeline_may_outlive_its_shell_for_a_moment(commands: Commands) -> None:
    job = await commands.start("bash", "-c", "echo before; (sleep 0.01; echo after) & exit 3")
    status = await ended(job)

    assert status.code == 3
    # On a busy machine that may be more than a moment.
    assert (status.strays, lines(job)) in [("none", ["before", "after"]), ("killed", ["before"])]


async def test_zombies_neither_hold_a_command_up_nor_count(commands: Commands) -> None:
    program = (
        "import os\n"
        "for _ in range(20):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os._exit(0)\n"
        "    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\n"
    )
    status = await ended(await commands.python(program))

    assert (status.end, status.code, status.found) == ("exited", 0, 0)


async def test_kill_does_not_wait_for_a_process_elsewhere_that_holds_a_pipe(commands: Commands) -> None:
    job = await commands.start("sh", "-c", "echo ready; exec sleep 100")
    await until(lambda: lines(job))
    started = job.started()
    assert started is not None
    with open(f"/proc/{started.leader.pid}/fd/1", "wb"):
        status = await job.kill("enough", 60)

    assert status is not None
    assert (status.end, status.drained, lines(job)) == ("killed", False, ["ready"])


@pytest.mark.slow
async def test_command_whose_folder_was_deleted_is_ended(commands: Commands) -> None:
    job, pids = await grown(commands, 3, "escape")
    shutil.rmtree(job.folder)

    await until(lambda: not any(map(lives, pids)))


# ---------------------------------------------------------------------- without a shim


async def killed_shim(job: Job) -> StartedCommand:
    """SIGKILL to a command's shim, which leaves no status."""
    started = job.started()
    assert started is not None
    assert shim.send_signal(*started.shim, signal.SIGKILL)
    assert await job.wait() is None
    assert not job.held()
    return started


@pytest.mark.kill
@pytest.mark.parametrize("how", ["plain", "escape", "stop", "chain"])
async def test_what_a_dead_shim_left_is_found_and_ended(commands: Commands, how: str) -> None:
    job, pids = await grown(commands, size(6, 50), how)
    await killed_shim(job)
    remains = await end_lost(job, 60)

    assert remains.verified
    assert {process.pid for process in remains.processes} >= set(pids)
    assert not any(map(lives, pids))
    assert (remains.survivors, remains.unproven, remains.note) == ((), 0, "")


@pytest.mark.kill
async def test_what_a_dead_shim_left_is_killed_if_it_ignores_term(commands: Commands) -> None:
    job, pids = await grown(commands, 4, "ignore")
    await killed_shim(job)
    remains = await end_lost(job, 0.05)

    assert remains.verified
    assert remains.forced >= 3
    assert not any(map(lives, pids))


@pytest.mark.kill
async def test_output_up_to_the_death_of_the_shim_is_there(commands: Commands) -> None:
    job, pids = await grown(commands, 2, "plain")
    await killed_shim(job)
    await end_lost(job, 60)

    assert sorted(map(int, lines(job))) == sorted(pids)


@pytest.mark.kill
async def test_end_without_a_shim_is_that_of_lost_ones(commands: Commands) -> None:
    job, pids = await grown(commands, 2, "plain")
    await killed_shim(job)
    remains = await end(job, "enough", 60)

    assert isinstance(remains, Remains)
    assert remains.verified
    assert not any(map(lives, pids))


async def test_end_with_a_shim_is_its_status(commands: Commands) -> None:
    job = await commands.start("sleep", "100")
    status = await end(job, "enough", 60)

    assert isinstance(status, Status)
    assert status.reason == "enough"


async def test_end_wakes_a_shim_that_was_stopped(commands: Commands) -> None:
    job, pids = await grown(commands, 3, "plain")
    started = job.started()
    assert started is not None
    assert shim.send_signal(*started.shim, signal.SIGSTOP)
    await until(lambda: (stat := shim.stat_of(started.shim.pid)) is not None and stat[0] == b"T")
    status = await end(job, "enough", 60)

    assert isinstance(status, Status)
    assert (status.end, status.reason) == ("killed", "enough")
    assert not any(map(lives, pids))


@pytest.mark.kill
async def test_process_that_cleared_its_environment_is_found_by_its_session(commands: Commands) -> None:
    job = await commands.start("env", "-i", "/bin/sh", "-c", "echo $$; exec sleep 100")
    await until(lambda: lines(job))
    await killed_shim(job)
    remains = await end_lost(job, 60)

    assert [process.pid for process in remains.processes] == [int(lines(job)[0])]
    assert remains.verified


@pytest.mark.kill
async def test_member_of_a_session_without_its_leader_and_without_the_token_is_left_alone(commands: Commands) -> None:
    job = await commands.start("env", "-i", "/bin/sh", "-c", "sleep 100 & echo $!; exec sleep 100")
    await until(lambda: lines(job))
    started, orphan = await killed_shim(job), int(lines(job)[0])
    assert shim.send_signal(*started.leader, signal.SIGKILL)
    await until(lambda: not lives(started.leader.pid))
    remains = await end_lost(job, 60)

    assert (remains.processes, remains.unproven, lives(orphan)) == ((), 1, True)
    os.kill(orphan, signal.SIGKILL)


def rewritten(job: Job, **changes: str) -> None:
    """Another identity on disk, as a machine that started again or a number that was used again would make it wrong."""
    text = dict(line.split(" ", 1) for line in (job.folder / "started").read_text().splitlines())
    (job.folder / "started").write_text("".join(f"{key} {value}\n" for key, value in (text | changes).items()))


@pytest.mark.kill
async def test_pid_that_was_used_again_is_no_concern_of_ours(commands: Commands, tmp_path: Path) -> None:
    """The recorded leader has the number, and a session, of a process that lives and is a stranger."""
    job = await commands.start("sleep", "100")
    started = await killed_shim(job)
    assert shim.send_signal(*started.leader, signal.SIGKILL)
    await until(lambda: not lives(started.leader.pid))
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as stranger:
        stat = shim.stat_of(stranger.pid)
        assert stat is not None
        rewritten(job, leader=f"{stranger.pid} {stat[4] - 1}", shim=f"{stranger.pid} {stat[4] - 1}")
        assert await job.wait() is None
        remains = await end_lost(job, 0)

        assert (remains.processes, remains.verified, stranger.poll()) == ((), True, None)
        assert not shim.send_signal(stranger.pid, stat[4] - 1, signal.SIGKILL)
        stranger.kill()


@pytest.mark.kill
async def test_number_of_a_dead_shim_may_be_that_of_a_thread_now(commands: Commands) -> None:
    """The kernel opens no pidfd of a thread, and says so with an error of its own."""
    job = await commands.start("sleep", "100")
    started = await killed_shim(job)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        rewritten(job, shim=f"{thread.native_id} 1")
        assert await job.wait() is None
        remains = await end(job, "enough", 0)
    finally:
        over.set()
        thread.join()

    assert isinstance(remains, Remains)
    assert remains.verified
    assert not lives(started.leader.pid)


@pytest.mark.kill
async def test_number_of_a_leader_that_the_kernel_used_again_is_spared(commands: Commands) -> None:
    """The real thing: the kernel is told which number to give out next."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("only root may choose the next pid")
    job = await commands.start("sleep", "100")
    started = await killed_shim(job)
    assert shim.send_signal(*started.leader, signal.SIGKILL)
    await until(lambda: shim.stat_of(started.leader.pid) is None)
    for _ in range(200):
        last.write_text(str(started.leader.pid - 1))
        stranger = subprocess.Popen(["sleep", "100"], start_new_session=True)
        if stranger.pid == started.leader.pid:
            break
        stranger.kill()
        stranger.wait()
    else:
        pytest.skip("others took the number each time")
    remains = await end_lost(job, 0)

    assert (remains.processes, remains.unproven, stranger.poll()) == ((), 0, None)
    stranger.kill()
    stranger.wait()


@pytest.mark.kill
async def test_after_another_boot_nothing_is_looked_for(commands: Commands) -> None:
    job, pids = await grown(commands, 2, "plain")
    await killed_shim(job)
    rewritten(job, boot="00000000-0000-0000-0000-000000000000")
    remains = await end_lost(job, 60)

    assert "started again" in remains.note
    assert remains.verified
    assert all(map(lives, pids))
    rewritten(job, boot=own_boot())
    assert (await end_lost(job, 60)).verified
    assert not any(map(lives, pids))


async def test_shim_that_cannot_say_who_it_is_begins_nothing(commands: Commands, tmp_path: Path) -> None:
    """It dies, or gives up, after it forked the leader: nothing lets that go."""
    job, ran = commands.job(), tmp_path / "ran"
    (job.folder / "started.tmp").mkdir()
    failed = await commands.spawner.start(commands.request(job, ["touch", str(ran)]))

    assert str(failed) == "SpawnFailed(stage='folder', number=21)"
    assert job.beginning() is Beginning.UNTOUCHED
    assert "nothing was begun" in (await end_lost(job)).note
    assert job.void()
    assert job.beginning() is Beginning.VOID
    assert not ran.exists()


# ---------------------------------------------------------------------- another pid namespace

ELSEWHERE = """
import asyncio, os, sys
from pathlib import Path
from perdure.commands.job import Job
from perdure.commands.spawner import Spawner, StartRequest

async def main():
    job = Job(Path(sys.argv[1]))
    request = StartRequest(job.folder, sys.argv[2], ["sleep", "100"], {"PATH": os.environ["PATH"]}, "/")
    print(await Spawner().start(request), flush=True)
    sys.stdin.read()
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.kill
@pytest.mark.slow
async def test_command_in_another_pid_namespace_is_watched_and_ended_through_its_folder(commands: Commands) -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no pid namespace may be made here")
    killed, gone = commands.job(), commands.job()
    for job in (killed, gone):
        inside = await asyncio.create_subprocess_exec(
            *unshare, sys.executable, "-c", ELSEWHERE, str(job.folder), commands.request(job, []).token,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert inside.stdin is not None
        assert inside.stdout is not None
        assert b"Started" in await inside.stdout.readline()
        assert job.held()
        waiting = asyncio.create_task(job.wait())
        if job is killed:
            status = await job.kill("from outside", 60)
            assert status is not None
            assert status.reason == "from outside"
            assert await waiting == status
        inside.stdin.close()
        await inside.wait()
        if job is gone:  # its namespace ended, and all in it
            assert await waiting is None
            remains = await end_lost(job)
            assert "another pid namespace" in remains.note
            assert not remains.verified
