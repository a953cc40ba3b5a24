"""Start the coder in a process of its own, kill it with SIGKILL while its tests run, and start it again when they have
ended. What is counted at the end is read from a file that the tests write and from the store, not from the agent."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from msgspec import Struct

from perdure import Runtime
from perdure.errors import PerdureError
from perdure.examples.coder import write_project
from perdure.model.outcome import text_of
from perdure.workspace.checks import KEY

LIMIT = 120.0
POLL = 0.02
MORE = 5
"""Lines that the tests write while the agent is dead, before the demo goes on."""


class CoderReport(Struct):
    """What was counted: how often the tests began, how often the file was edited, and what came out. `confined_by` is
    what kept the tests in their folder; "" if this machine has nothing that does."""

    confined_by: str = ""
    killed_pid: int = 0
    written_without_agent: int = 0
    test_runs_asked: int = 0
    test_runs_begun: int = 0
    edits: int = 0
    text: str = ""
    broken: list[str] = []


class KilledCoder:
    """One run: started, killed in the middle of its first test run, started again."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._project, self._log = folder / "project", folder / "project" / "runs.log"

    async def run(self) -> CoderReport:
        report = CoderReport()
        write_project(self._project)
        slow = self._project / "slow"  # the test run does not end while it is there
        slow.touch()
        try:
            async with self._coder() as child:
                self._say(f"started: process {child.pid}; its tests are slow")
                await self._until(lambda: self._count("at work") > 0, child)
                child.send_signal(signal.SIGKILL)
                status = await child.wait()
            report.killed_pid = child.pid
            self._say(f"KILLED: process {child.pid} with SIGKILL, in the middle of its test run; status {status}")
            before = self._count("at work")
            await self._until(lambda: self._count("at work") >= before + MORE)
            report.written_without_agent = self._count("at work") - before
            self._say("the test run goes on without it: it has written more lines since, and nobody reads them")
        finally:
            slow.unlink()
        await self._until(lambda: self._count("ended") > 0)
        self._say("the test run has ended, while no agent was there; its output and its exit code are kept")
        async with self._coder() as child:
            self._say(f"started again: process {child.pid}, the same program")
            status = await child.wait()
        if status != 0:
            raise PerdureError(f"the coder ended with status {status}: {self._last_words()}")
        await self._counted(report)
        return report

    @contextlib.asynccontextmanager
    async def _coder(self) -> AsyncGenerator[asyncio.subprocess.Process, None]:
        """The agent in a process of its own, killed when this context is left; what it prints is said."""
        command = [sys.executable, "-m", "perdure.examples.coder", str(self._folder), "--unsandboxed"]
        with (self._folder / "coder.log").open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        speaking = asyncio.create_task(self._speak(child))
        try:
            yield child
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
            await speaking

    async def _speak(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            self._say(f"  {line.decode(errors='replace').rstrip()}")

    async def _until(self, happened: Callable[[], bool], child: asyncio.subprocess.Process | None = None) -> None:
        async with asyncio.timeout(LIMIT):
            while not happened():
                if child is not None and child.returncode is not None:
                    raise PerdureError(f"the coder ended before its tests began: {self._last_words()}")
                await asyncio.sleep(POLL)

    def _count(self, what: str) -> int:
        try:
            return self._log.read_text().splitlines().count(what)
        except FileNotFoundError:
            return 0

    def _last_words(self) -> str:
        log = (self._folder / "coder.log").read_text(errors="replace").strip().splitlines()
        return log[-1] if log else "it said nothing"

    async def _counted(self, report: CoderReport) -> None:
        async with Runtime(self._folder / "agent" / "store.db", recover=False) as runtime:
            session = await runtime.session("fix")
            result = await session.result("fix.1")
            tests = await runtime.handle(f"{result.tool_calls[0].call_id}.{KEY}").record()
            report.confined_by = (tests.registration.input.get("sandbox") or {}).get("how", "")
            report.edits = len([each for each in await session.edits() if each.status == "applied"])
        report.text = text_of(result.outcome) or repr(result)
        report.test_runs_asked = len([each for each in result.tool_calls if each.tool == "run_test"])
        report.test_runs_begun = self._count("began")
        if report.test_runs_begun != report.test_runs_asked:
            report.broken.append(f"{report.test_runs_asked} test runs were asked for, {report.test_runs_begun} begun")
        if report.edits != 1:
            report.broken.append(f"the file was edited {report.edits} times")
        if "all tests pass" not in report.text:
            report.broken.append(f"the agent did not repair it: {report.text}")
