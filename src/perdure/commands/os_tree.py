"""Ending a command from outside, when its shim cannot be relied on: who belongs to it, and never a stranger.

A living shim knows its descendants and ends them (`Job.kill`). A dead one leaves them to the init process, so they are
looked for in /proc by what cannot be another's:

- its leader: number and start time as recorded;
- members of the session that the leader opened, while the leader lives: only its own descendants can be in it;
- whoever has the job's token in its environment: 128 random bits, inherited by everything that does not clear it;
- and what descends from any of these.

A session whose leader is gone proves nothing: the number may have been used again since. Members of it without the
token are counted in the report, and left alone.

A copy of a folder, with a copy of its store, names the same processes. They are the original's, and are left alone.

Numbers mean something only within one boot and one pid namespace. After another boot nothing can be left. In another
namespace nothing can be said, and the report says that.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from dataclasses import dataclass
from typing import NamedTuple

from perdure.commands import shim
from perdure.commands.job import Beginning, Found, Job, StartedCommand, Status, own_boot, own_namespace
from perdure.errors import TimedOut

GRACE = 2.0


@dataclass(frozen=True, slots=True)
class Remains:
    """What was left of a command whose shim died, and what became of it.

    `verified`: nothing that could be proven to be the command's lives any more. `unproven` counts processes that may
    have been its, and were left alone. `note` says why nothing could be looked for, or is empty.
    """

    processes: tuple[Found, ...]
    forced: int
    survivors: tuple[Found, ...]
    unproven: int
    note: str

    @property
    def verified(self) -> bool:
        return not self.survivors and not self.note.startswith("unknown")


class _Stat(NamedTuple):
    pid: int
    parent: int
    session: int
    start: int
    name: str


async def end(job: Job, reason: str, grace: float = GRACE, known: StartedCommand | None = None) -> Status | Remains:
    """End a command, whatever its state: by its shim, and if that does not answer, without it.

    Returns when nothing of it lives; a command that ended before is left as it is. `known` is who runs it, if the
    caller has that from elsewhere than the folder.
    """
    started = known or job.started()
    within_reach = started is not None and started.namespace == own_namespace()
    if started is not None and within_reach:
        shim.send_signal(*started.shim, signal.SIGCONT)  # a shim that was stopped answers nothing
    try:
        status = await job.kill(reason, grace)
    except TimedOut:
        if started is not None and within_reach:  # it hangs: what it began is ended without it
            shim.send_signal(*started.shim, signal.SIGKILL)
            await job.wait(started)
        status = job.status()
    return status if status is not None else await end_lost(job, grace, known=known)


async def end_lost(
    job: Job, grace: float = GRACE, *, known: StartedCommand | None = None, boot: str | None = None
) -> Remains:
    """Find what a command left whose shim died without a status, end it (TERM, `grace`, KILL), and look again.

    `known` is who ran it, if the caller has that from elsewhere than the folder, where the command could change it.
    `boot` is the boot id of this machine, if the caller knows better than the kernel.
    """
    started = known or job.started()
    if started is None and job.beginning() is Beginning.STARTED:
        return Remains((), 0, (), 0, "unknown: its folder does not say who ran it")
    if started is None:
        return Remains((), 0, (), 0, "nothing was begun: its shim died before it let the command go")
    if started.boot != (boot or own_boot()):
        return Remains((), 0, (), 0, "the machine was started again since: nothing of it can live")
    if started.namespace != own_namespace():
        return Remains((), 0, (), 0, "unknown: it ran in another pid namespace, which cannot be looked into from here")
    if started.folder and await asyncio.to_thread(_inode, job) != started.folder:
        return Remains(
            (), 0, (), 0, "unknown: this folder is a copy, and the original may be at work: nothing was killed"
        )
    return await asyncio.to_thread(_end_lost, started, grace)


def _inode(job: Job) -> int:
    try:
        return os.stat(job.folder).st_ino
    except OSError:
        return 0


def _end_lost(started: StartedCommand, grace: float) -> Remains:
    found, unproven = _search(started)
    all_found = {(each.pid, each.start): each for each in found}
    if found and grace > 0:
        for each in found:
            shim.send_signal(each.pid, each.start, signal.SIGTERM)
            shim.send_signal(each.pid, each.start, signal.SIGCONT)
        _wait_ends(found, grace)
        found, unproven = _search(started)
    forced, until = len(found), time.monotonic() + shim.KILLS
    while found:
        all_found |= {(each.pid, each.start): each for each in found}
        for each in found:
            shim.send_signal(each.pid, each.start, signal.SIGKILL)
        _wait_ends(found, 0.1)
        found, unproven = _search(started)
        if time.monotonic() > until:
            break
    return Remains(tuple(all_found.values()), forced, tuple(found), unproven, "")


def _search(started: StartedCommand) -> tuple[list[Found], int]:
    """The living processes that are the command's, and how many more there are of which that is not certain."""
    processes = dict[int, _Stat]()
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := shim.stat_of(int(name))) is not None and stat[0] not in b"ZX":
            processes[int(name)] = _Stat(int(name), stat[1], stat[3], stat[4], stat[5].decode(errors="replace"))
    leader = processes.get(started.leader.pid)
    leader_lives = leader is not None and leader.start == started.leader.start
    mark = shim.TOKEN + b"=" + started.token.encode()
    ours, unproven = set[int](), 0
    for pid, process in processes.items():
        in_session = process.session == started.leader.pid
        if (in_session and leader_lives) or _has_variable(pid, mark):
            ours.add(pid)
        elif in_session and leader is None and process.start >= started.leader.start:
            unproven += 1
    children = dict[int, list[int]]()
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    open_ = list(ours)
    while open_:
        for child in children.get(open_.pop(), ()):
            if child not in ours:
                ours.add(child)
                open_.append(child)
    ours.discard(os.getpid())
    return [Found(pid, processes[pid].start, processes[pid].name) for pid in sorted(ours)], unproven


def _has_variable(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it is gone, or another user's
        return False


def _wait_ends(processes: list[Found], seconds: float) -> None:
    """Wait until they are gone, at most so long."""
    until, poll, open_ = time.monotonic() + seconds, select.poll(), set[int]()
    try:
        for each in processes:
            try:
                fd = os.pidfd_open(each.pid)
            except OSError:
                continue
            open_.add(fd)
            stat = shim.stat_of(each.pid)
            if stat is not None and stat[4] == each.start:
                poll.register(fd, select.POLLIN)
            else:
                os.close(fd)
                open_.discard(fd)
        while open_ and (left := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                os.close(fd)
                open_.discard(fd)
    finally:
        for fd in open_:
            os.close(fd)
