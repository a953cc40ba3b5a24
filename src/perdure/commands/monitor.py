"""Monitors: processes that keep a command running and tell their session what it prints.

    MonitorSpec ─▶ process of kind "monitor" ─▶ its command, a child of that process ─▶ job folder
                            │                                                              │
                            └── one event for the lines since the last one ◀───────────────┘

The command outlives the Runtime as every command does. The next Runtime on its machine goes on with the monitor, from
the offsets that were written with its last event. If the command itself is lost, the monitor has failed, or begins
another one if it is to (`restart_on_restore`).

    spec              state     its command
    started           idle      has not begun
                      running   runs
    stopped           stopped   was ended, with everything that it began
    exited            exited    ended by itself, with any code
    timed out, lost…  failed    was ended after `timeout`, could not begin, or is lost
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.commands.engine import CommandEngine
from perdure.commands.job import Job
from perdure.commands.watch import POLL, NewestLines, Teller, watch
from perdure.errors import Conflict, InvalidCommand, InvalidInput, Unavailable
from perdure.model.command import Command, CommandResult, CommandSettings, read_command
from perdure.model.monitor import (
    LINES,
    MONITOR_KIND,
    RESTARTED,
    MonitorSpec,
    OutputCursor,
    monitor_events,
    read_cursor,
    read_spec,
)
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Failure,
    ProcessOutcome,
    ProcessRow,
    Registration,
    Success,
)
from perdure.ports.process import CancelRequested, ChildOptions, EngineRun
from perdure.ports.store import JobFolders, Store

GRACE = 0.2
"""Seconds between TERM and KILL for the command of a monitor."""
STOP_SECONDS = 15.0
"""For so long a monitor that is stopped waits for its command to be verified dead."""
FLOODED = 30.0
"""Seconds between two events of a monitor whose command never pauses, at most."""
SHELLS = ("/bin/bash", "/bin/sh")


def command_of(spec: MonitorSpec) -> Command:
    """What is run for a monitor. Raises InvalidCommand for what cannot be."""
    argv: Sequence[str] = spec.command if not isinstance(spec.command, str) else ()
    if isinstance(spec.command, str):
        if not spec.command.strip():
            raise InvalidCommand(f"monitor {spec.id!r} needs a command: a line for a shell, or a list of arguments")
        shell = next((each for each in SHELLS if Path(each).exists()), SHELLS[-1])
        argv = (shell, "-lc", spec.command)
    timeout = None if spec.persistent else spec.timeout
    options = {"env": spec.env, "timeout": timeout, "grace": GRACE} | ({"cwd": spec.cwd} if spec.cwd else {})
    command, _ = read_command(argv, options)
    return command


class MonitorEngine:
    """Runs monitors. One is bound to its machine, as its command is."""

    kind = MONITOR_KIND
    uses_deps = False
    needs_definitions = False

    def __init__(self, commands: CommandEngine) -> None:
        self._commands = commands

    def knows(self, registration: Registration) -> bool:
        return self._commands.knows(registration)

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | None:
        if not isinstance(what, MonitorSpec):
            return None
        spec = read_spec(what)
        drafted = self._commands.draft(command_of(spec), {})
        assert isinstance(drafted, Registration), "it is a command, and monitors are not confined"
        self._commands.check_runnable(drafted, {})
        return Registration(
            "",
            MONITOR_KIND,
            "reattachable",
            spec.id,
            definition=drafted.definition,
            input=msgspec.to_builtins(spec),
            label=f"monitor {spec.id}",
            events=monitor_events(),
        )

    async def run(self, run: EngineRun) -> ProcessOutcome:
        spec = msgspec.convert(run.registration.input, MonitorSpec)
        await run.begin()
        run.rest()
        while True:
            cursor = read_cursor(run.record.progress)
            try:
                child = await _begin(run, spec, str(cursor.command))
            except (InvalidInput, Unavailable, Conflict) as refused:
                # What was fine when it was asked for is not any more: a folder is gone, too many commands run.
                return Failure("spawn_failed", f"its command could not begin: {refused}")
            try:
                ended = await run.guard(_follow(run, spec, child))
            except CancelRequested as stop:
                await run.host.cancel(child, stop.request)
                dead = await _has_ended(run, child)
                return Cancelled(stop.request.by, stop.request.reason, unknown=not dead)
            if not (ended.status == "lost" and spec.restart_on_restore):
                return _outcome(run, spec, ended)
            text = f"its command was lost ({ended.reason or 'with its machine'}), and begins again"
            after = read_cursor(run.record.progress)
            again = OutputCursor(lines=after.lines, last=after.last, command=after.command + 1, error=text)
            run.progress(msgspec.to_builtins(again))
            await run.emit(RESTARTED, {"text": text})


def command_engines(store: Store, settings: CommandSettings) -> tuple[CommandEngine, MonitorEngine]:
    """The engines of a Runtime for commands and for monitors."""
    commands = CommandEngine(store, settings, watch)
    return commands, MonitorEngine(commands)


async def _begin(run: EngineRun, spec: MonitorSpec, key: str) -> str:
    """The id of its command, which is begun unless it was before.

    A Runtime that goes on with a monitor may be elsewhere and have other limits: one that runs is not asked for anew.
    """
    known = await run.host.store.process(f"{run.row.id}.{key}")
    if known is not None:
        return known.id
    options = ChildOptions("cancel", f"command of monitor {spec.id}")
    return await run.host.start_child(run.row, key, command_of(spec), {}, options)


async def _follow(run: EngineRun, spec: MonitorSpec, child: str) -> CommandResult:
    """Tell the lines of a command until it has ended: how it did."""
    row = await _wait_begun(run, child)
    store = run.host.store
    reference = row.record.external_ref
    if isinstance(reference, dict) and "job" in reference and isinstance(store, JobFolders):
        await LineTeller(run, Job(Path(store.jobs_folder()) / str(reference["job"])), spec.batch).work()
    return result_of(await _wait_end(run, child))


async def _wait_begun(run: EngineRun, child: str) -> ProcessRow:
    """The row of a command that was spawned, or will not be any more."""
    while True:
        row = await run.host.store.process(child)
        assert row is not None, "it is a child of this process, which lives"
        if not row.live or (isinstance(row.record.external_ref, dict) and "pid" in row.record.external_ref):
            return row
        await asyncio.sleep(POLL)


async def _wait_end(run: EngineRun, child: str) -> ProcessRow:
    while True:
        row = await run.host.store.process(child)
        assert row is not None, "it is a child of this process, which lives"
        if not row.live:
            return row
        await asyncio.sleep(POLL)


async def _has_ended(run: EngineRun, child: str) -> bool:
    """Whether a command that was asked to end did, in the time that this takes."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await _wait_end(run, child)
    except TimeoutError:
        return False
    return True


def result_of(row: ProcessRow) -> CommandResult:
    """How a command ended, from its row."""
    outcome = row.record.outcome
    value = outcome.value if isinstance(outcome, Success | Cancelled | Abandoned) else None
    if isinstance(value, dict | CommandResult):
        return msgspec.convert(value, CommandResult)
    if isinstance(outcome, Failure):
        return CommandResult(row.id, "spawn_failed", reason=outcome.message)
    return CommandResult(row.id, "lost" if isinstance(outcome, Abandoned) else "killed")


def _outcome(run: EngineRun, spec: MonitorSpec, ended: CommandResult) -> ProcessOutcome:
    told = read_cursor(run.record.progress).lines
    data = {"status": ended.status, "exit_code": ended.exit_code, "signal": ended.signal, "lines": told}
    if ended.status == "exited":
        return Success(data)
    words = {
        "timed_out": f"it ran for its limit of {spec.timeout:g} seconds and was ended",
        "lost": f"its command is lost: {ended.reason}",
        "spawn_failed": f"its command could not begin: {ended.reason}",
        "signaled": f"its command was ended by {ended.signal}",
        "killed": f"its command was killed: {ended.reason}",
    }
    return Failure(ended.status, words[ended.status], data)


class LineTeller(Teller):
    """Tells every line of a command. Those of stderr are told too, and wake nobody."""

    def __init__(self, run: EngineRun, job: Job, batch: float) -> None:
        super().__init__(run, job, read_cursor(run.record.progress))
        self._batch, self._apart = batch, 0.0

    async def work(self) -> None:
        async with self.following():
            while True:
                last = self.over.is_set()
                if self._has_more():
                    await self.pause(max(self._batch, self._apart))
                    await self.wait_free()
                    await self._tell_lines()
                elif last:
                    return
                else:
                    self._apart = 0.0
                    await self.wait_changed()

    def _has_more(self) -> bool:
        return self.size("stdout") > self.cursor.stdout or self.size("stderr") > self.cursor.stderr

    async def _tell_lines(self) -> None:
        out, err = NewestLines(), NewestLines()
        stdout = await self.collect("stdout", self.cursor.stdout, None, out)
        stderr = await self.collect("stderr", self.cursor.stderr, None, err)
        cursor = replace(self.cursor, stdout=stdout, stderr=stderr)
        if not out.count and not err.count:
            # Half a line, or empty ones: there is nothing to tell. The offsets are kept in memory.
            nothing_new = cursor == self.cursor
            self.cursor = cursor
            if nothing_new:
                await self.wait_changed()
            return
        newest = (out.newest or err.newest)[-1]
        cursor = replace(cursor, lines=self.cursor.lines + out.count + err.count, last=newest)
        payload: dict[str, Any] = {"first": self.cursor.lines + 1, "count": out.count, "stderr_count": err.count}
        # Without `text` it does not wake.
        payload |= {"text": out.text("line", "lines")} if out.count else {}
        payload |= {"stderr": err.text("line of stderr", "lines of stderr")} if err.count else {}
        await self.tell(LINES, cursor, payload)
        # A command that never pauses is told of less and less often.
        flooded = out.count > len(out.newest)
        self._apart = min(max(2 * self._apart, 1.0), FLOODED) if flooded else 0.0
