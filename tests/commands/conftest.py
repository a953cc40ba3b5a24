"""Real commands, and the check that no test leaves a process of the OS behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.commands.job import Job, StartedCommand, Status
from perdure.commands.sandbox import IMPLEMENTATIONS, examine, rules_of
from perdure.commands.spawner import Spawner, SpawnFailed, StartRequest, check
from perdure.model.sandbox import Confinement, Implementation
from tests.kit import SOON
from tests.programs import bubblewrap, missing

MARK = f"test-{os.getpid()}-"
"""Every token of this worker's commands begins with it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and sys.platform != "linux":
            item.add_marker(pytest.mark.skip(reason="commands run on Linux"))


WHOLE = os.environ.get("PERDURE_COMMANDS") == "whole"


def size(part: int, whole: int) -> int:
    """How much of something a test takes: in the gate, and in `make test-commands`."""
    return whole if WHOLE else part


def children_of(pid: int) -> list[int]:
    """Those of all its threads, as far as these are still there."""
    found = list[str]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += path.read_text().split()
    return [int(each) for each in found]


def written(job: Job, stream: str = "stdout") -> bytes:
    """What a command has written so far: the file of a stream is made with its first byte."""
    file = job.folder / stream
    return file.read_bytes() if file.exists() else b""


class Commands:
    """Begins commands in job folders of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spawner, self.jobs = folder, Spawner(), list[Job]()

    def job(self) -> Job:
        job = Job(self.folder / Job.new_name())
        job.create()
        self.jobs.append(job)
        return job

    def request(self, job: Job, argv: list[str], **options: Any) -> StartRequest:
        env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **options.pop("env", {})}
        cwd = str(options.pop("cwd", self.folder))
        sandbox: Confinement | None = options.pop("sandbox", None)
        rules = () if sandbox is None else rules_of(sandbox)
        return StartRequest(job.folder, MARK + secrets.token_hex(8), argv, env, cwd, rules=rules, **options)

    async def start(self, *argv: str, **options: Any) -> Job:
        """Begin a command that can be begun."""
        job = self.job()
        request = self.request(job, list(argv), **options)
        check(request.argv, request.env, request.cwd)
        started = await self.spawner.start(request)
        assert isinstance(started, StartedCommand), started
        assert started == job.started()
        return job

    async def python(self, program: str, *argv: str, **options: Any) -> Job:
        return await self.start(sys.executable, "-I", "-S", "-c", program, *argv, **options)

    async def refused(self, *argv: str, **options: Any) -> SpawnFailed:
        failed = await self.spawner.start(self.request(self.job(), list(argv), **options))
        assert isinstance(failed, SpawnFailed), failed
        return failed

    async def tried(self, *argv: str, **options: Any) -> str:
        """What a command printed; nothing where it could not begin."""
        job = self.job()
        if not isinstance(await self.spawner.start(self.request(job, list(argv), **options)), StartedCommand):
            return ""
        await ended(job)
        return printed(job)

    async def end(self, *argv: str, **options: Any) -> Status:
        return await ended(await self.start(*argv, **options))


async def ended(job: Job) -> Status:
    status = await job.wait()
    assert status is not None
    assert not job.held()
    return status


@pytest.fixture
async def commands(tmp_path: Path) -> AsyncIterator[Commands]:
    """Whatever a test leaves running on purpose is its own to end: `nothing_left` looks."""
    made = Commands(tmp_path)
    yield made
    await made.spawner.close()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    check_nothing_left(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_at_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    check_nothing_left(tmp_path_factory.getbasetemp())


def check_nothing_left(folder: Path) -> None:
    """Wait until no process of `left_behind` lives.

    A shim leaves shortly after it has written how its command ended, and the last test of a session may be one of
    another folder, which does not wait for it.
    """
    end = time.monotonic() + SOON
    while found := left_behind(folder):
        assert time.monotonic() < end, found
        time.sleep(0.005)  # processes of the OS end in wall time, and no event tells of a stranger's child


def left_behind(folder: Path) -> list[str]:
    """Processes that live: with our mark in their environment, shims in this folder, and children of ours."""
    found = list[str]()
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        try:
            text = Path(f"/proc/{pid}/stat").read_bytes()
            state, parent = text.rpartition(b")")[2].split()[:2]
            name = text.partition(b"(")[2].rpartition(b")")[0]
            if state in b"ZX":
                continue
            where = os.readlink(f"/proc/{pid}/cwd") if name.endswith(b"-shim") else ""  # also an older tree's
            marked = MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        spawner = name == b"perdure-spawn" and int(parent) == os.getpid()
        if marked or spawner or (where and Path(where).is_relative_to(folder)):
            found.append(f"{pid} {name.decode()}")
    return found


# ---------------------------------------------------------------------- confined ones


def require(how: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where this machine has no such sandbox, unless it is required. One that can be made, and lets something
    through, is our fault: its tests run, and fail."""
    if how == "bubblewrap":
        monkeypatch.setenv("PERDURE_BWRAP", str(bubblewrap()))
    found = examine(how)
    if found.refused and not found.attacks:
        missing(how, found.refused)


@pytest.fixture(params=IMPLEMENTATIONS)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Implementation:
    found: Implementation = request.param
    require(found, monkeypatch)
    return found


@pytest.fixture
def sandbox(how: Implementation, tmp_path: Path) -> Confinement:
    """A root, `work`, in which all may be done."""
    (tmp_path / "work").mkdir()
    own = (os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix))
    return Confinement((str(tmp_path / "work"),), own, accept=("git",), how=how)


@pytest.fixture
def options(sandbox: Confinement) -> dict[str, Any]:
    return {"sandbox": sandbox, "cwd": sandbox.write[0]}


def printed(job: Job) -> str:
    return written(job).decode().replace("\r\n", "\n")
