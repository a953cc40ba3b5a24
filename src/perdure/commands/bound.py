"""Commands that are bound to their Runtime: servers that it talks to over pipes (`ports.bound`).

They begin like every command: by the spawner, with the environment of commands, in a sandbox if one is asked for, in a
job folder that says who they are. What differs is what becomes of them:

    the Runtime closes their stdin     they have `grace` seconds to leave, then their shim ends the whole tree
    the Runtime is killed              the same: the kernel closes its end
    their shim is killed too           the next Runtime finds the folder with a free lock and no status, and ends what
                                       is left by the identity there, as it does for any command
    a fork of the Runtime holds the    the next Runtime finds that the owner named in the folder is dead, and has the
    pipe open                          shim end the command

`owner` in a folder names the OS process of its Runtime. A folder without it is none of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from perdure.commands.job import Identity, Job, StartedCommand, is_supported, own_boot
from perdure.commands.os_tree import end
from perdure.commands.shim import stat_of
from perdure.commands.spawner import Spawner, SpawnFailed, StartRequest, check
from perdure.errors import CommandsUnavailable
from perdure.model.codec import clean_text
from perdure.model.command import GRACE, Command
from perdure.ports.store import JobFolders, Store

OWNER = "owner"
KEPT = 1 << 20
"""Bytes of stderr that are kept of one."""
SHOWN = 2000
"""Bytes of stderr that a complaint is made of."""


class Starts(Protocol):
    """What the engine of commands has that these need."""

    @property
    def store(self) -> Store: ...

    @property
    def spawner(self) -> Spawner: ...

    def bound_jobs(self) -> Path: ...

    def environment_of(self, command: Command, values: Mapping[str, str]) -> dict[str, str]: ...

    async def confined(self, command: Command) -> tuple[Command, list[bytes]]:
        """The command with its folder and what enforces its sandbox, and the rules for that. Raises
        SandboxUnavailable."""
        ...


class PipedCommand:
    """A bound command that runs."""

    def __init__(self, job: Job, started: StartedCommand, stdin: int, stdout: int, grace: float) -> None:
        self._job, self._started, self._grace = job, started, grace
        self.stdin, self.stdout = stdin, stdout

    @property
    def pid(self) -> int:
        return self._started.leader.pid

    async def complaints(self) -> str:
        return await asyncio.to_thread(_tail, self._job.folder / "stderr")

    async def end(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await self._job.wait(self._started)
        await end(self._job, "its Runtime has no use for it any more", self._grace, self._started)
        await self._job.wait(self._started)
        said = await self.complaints()
        await asyncio.to_thread(self._job.remove)
        return said


class PipedCommands:
    """Begins the bound commands of one Runtime, on its event loop."""

    def __init__(self, starts: Starts) -> None:
        self._starts = starts

    async def start(self, label: str, command: Command, values: Mapping[str, str]) -> PipedCommand:
        starts = self._starts
        jobs = starts.bound_jobs()
        command, rules = await starts.confined(command)
        env, cwd = starts.environment_of(command, values), command.cwd
        check(command.argv, env, cwd)
        job = Job(jobs / Job.new_name())
        try:
            await asyncio.to_thread(_make, job, label)
        except OSError as error:
            raise CommandsUnavailable(f"the job folder of {label} cannot be made: {error.strerror}") from error
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                read, write = os.pipe2(os.O_CLOEXEC)
                theirs.callback(os.close, read)
                ours.callback(os.close, write)
                out, out_theirs = os.pipe2(os.O_CLOEXEC)
                ours.callback(os.close, out)
                theirs.callback(os.close, out_theirs)
            except OSError as error:
                raise CommandsUnavailable(f"{label} cannot be given pipes: {error.strerror}") from error
            os.set_blocking(write, False)
            os.set_blocking(out, False)
            request = StartRequest(
                job.folder, Job.new_name(), command.argv, env, cwd, output_limit=KEPT, grace=command.grace, rules=rules,
                pipes=(read, out_theirs),
            )  # fmt: skip
            starting = asyncio.ensure_future(starts.spawner.start(request))
            try:
                started = await asyncio.shield(starting)
            except asyncio.CancelledError:
                ours.close()  # what has begun by now has nobody to serve
                started = await starting
                if isinstance(started, StartedCommand):
                    await PipedCommand(job, started, -1, -1, command.grace).end()
                raise
            if isinstance(started, SpawnFailed):
                await job.wait()
                await asyncio.to_thread(job.remove)
                raise CommandsUnavailable(f"{label} cannot be started: {started.reason}")
            ours.pop_all()
            return PipedCommand(job, started, write, out, command.grace)

    async def check(self, command: Command) -> None:
        _ = await self._starts.confined(command)

    async def end_leftovers(self) -> int:
        store = self._starts.store
        if not isinstance(store, JobFolders) or not is_supported():
            return 0
        count = 0
        for folder in await asyncio.to_thread(_left_behind, store.jobs_folder(make=False), own_boot()):
            job = Job(folder)
            await end(job, "its Runtime is dead", GRACE)
            await job.wait()
            count += await asyncio.to_thread(job.remove)
        return count


def _make(job: Job, label: str) -> None:
    job.create()
    stat = stat_of(os.getpid())
    text = f"{os.getpid()} {0 if stat is None else stat[4]} {own_boot()}\n{label}\n"
    (job.folder / OWNER).write_text(text, encoding="utf-8")


def _left_behind(jobs: str, boot: str) -> list[Path]:
    """The folders of bound commands whose Runtime is dead."""
    try:
        with os.scandir(jobs) as found:
            folders = [Path(each.path) for each in found if each.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return [folder for folder in folders if (owner := _owner(folder)) is not None and not _lives(*owner, boot)]


def _owner(folder: Path) -> tuple[Identity, str] | None:
    try:
        pid, start, boot = (folder / OWNER).read_text(encoding="utf-8").partition("\n")[0].split()
        return Identity(int(pid), int(start)), boot
    except (OSError, ValueError):
        return None


def _lives(owner: Identity, boot: str, ours: str) -> bool:
    stat = stat_of(owner.pid) if boot == ours else None
    return stat is not None and stat[4] == owner.start and stat[0] not in b"ZX"


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN))
            return clean_text(file.read(SHOWN).decode(errors="replace")).strip()
    except OSError:
        return ""
