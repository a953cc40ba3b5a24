"""The tools that run the tests of a project and build it, and tell a model what came out as failures and diagnostics.

    runner from the project's files, or a command → `Programs.run` → wait → all of its output → `Diagnosis`

They are commands like those of `run_command`: after a crash the run is found by the id of its call and awaited, never
begun again. The diagnosis is not stored: it is made from the output, which is, and so it can be asked for at any later
time, also of a run that went on in the background (`read_diagnosis`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import to_builtins

from perdure.errors import ToolError
from perdure.model.codec import encode
from perdure.model.command import CommandResult
from perdure.ports.tool import CommandHandle
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool, tool
from perdure.workspace.commands import READ_BUDGET, awaited, command_of, did_begin, ended, program_of, seconds_of
from perdure.workspace.diagnosis import Diagnoser
from perdure.workspace.diagnosis.detection import TEST_FOLDERS, Detected, Purpose, Runner, detect, wanted
from perdure.workspace.diagnosis.report import CommandEnd, Diagnosis, FailedTest, unread_verdict
from perdure.workspace.paths import Paths, telling
from perdure.workspace.spawning import Program, Programs, SpawnOptions, refusals

KEY = "check"
BACKGROUND_AFTER = 120.0
MOST_NAMES = 10_000
LONGEST_FILE = 256 * 1024
SHOWN_BYTES = 24 * 1024
SHOWN_EXCERPT = 1200
TAIL = 2000
"""Characters of output that are shown where nothing in it was understood, or nothing failed."""
SKEW = 0.05
"""Seconds by which the time of a file may be behind the clock."""
PURPOSES: dict[str, Purpose] = {"run_test": "test", "run_build_command": "build"}


class CheckTools:
    """The tools for tests and builds, a part of the tools of a workspace."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        tools: tuple[Tool[..., Any], ...] = (self.run_test, self.run_build_command, self.read_diagnosis)
        self.tools = {each.spec.name: each for each in tools}

    async def program(self, name: str, kwargs: Mapping[str, Any], ctx: ToolContext[Any]) -> Program | None:
        """What a call runs. It reads the project's files and runs nothing."""
        if name not in PURPOSES:
            return None
        return (await self._chosen(PURPOSES[name], kwargs, ctx))[0]

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def run_test(  # noqa: PLR0913  # what a model may say, each by name
        self,
        ctx: ToolContext[Any],
        command: str | list[str] | None = None,
        cwd: str = ".",
        runner: str | None = None,
        filter: str | None = None,
        report: str | None = None,
        timeout: float | None = None,
        background_after: float = BACKGROUND_AFTER,
    ) -> dict[str, Any]:
        """Run the tests of a project, and get the failures with file, line and message. The verdict is passed, failed,
        incomplete (it was cut), unclear, or unknown where the output was not understood ("diagnosis": null).

        Args:
            command: What to run, a line for the shell or a list of arguments; if you leave it out, the runner is found
                from the project's files.
            cwd: The folder of the project.
            runner: Which one, where the files speak for several.
            filter: Run only tests that match this, in the runner's own way; not together with command.
            report: A JUnit XML file that the run writes, to be read in place of the output.
            timeout: Seconds after which it is killed.
            background_after: Seconds to wait for its end; then you get its id, and it goes on.
        """
        asked = {"command": command, "cwd": cwd, "runner": runner, "filter": filter}
        return await self._run("test", asked, ctx, timeout, background_after, report)

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def run_build_command(  # what a model may say, each by name
        self,
        ctx: ToolContext[Any],
        command: str | list[str] | None = None,
        cwd: str = ".",
        runner: str | None = None,
        timeout: float | None = None,
        background_after: float = BACKGROUND_AFTER,
    ) -> dict[str, Any]:
        """Build, lint or type-check a project, and get the errors and warnings with file, line and message.

        Args:
            command: What to run, a line for the shell or a list of arguments; if you leave it out, the build is found
                from the project's files.
            cwd: The folder of the project.
            runner: Which one, where the files speak for several.
            timeout: Seconds after which it is killed.
            background_after: Seconds to wait for its end; then you get its id, and it goes on.
        """
        asked = {"command": command, "cwd": cwd, "runner": runner}
        return await self._run("build", asked, ctx, timeout, background_after)

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def read_diagnosis(
        self, id: str, ctx: ToolContext[Any], offset: int = 0, report: str | None = None
    ) -> dict[str, Any]:
        """Read the failures and diagnostics of a command that has ended: of tests or a build that went on in the
        background, or more of them than a call has shown.

        Args:
            id: The command.
            offset: How many failures and diagnostics to pass over; next_offset of the last call goes on from there.
            report: A JUnit XML file that the run wrote, to be read in place of the output.
        """
        if offset < 0:
            raise ToolError("offset is 0 or more", code="invalid_tool_args")
        handle = await command_of(id, ctx)
        if (await handle.record()).live:
            raise ToolError(f"command {id} still runs: wait_command waits for it", code="still_running")
        return await self._told(handle, ctx, report, offset)

    # ------------------------------------------------------------------ running

    async def _run(
        self,
        purpose: Purpose,
        asked: Mapping[str, Any],
        ctx: ToolContext[Any],
        timeout: float | None,
        background_after: float,
        report: str | None = None,
    ) -> dict[str, Any]:
        wait = seconds_of(background_after, "background_after", 0)
        limit = None if timeout is None else seconds_of(timeout, "timeout", 0.001)
        with refusals():
            handle = await self._programs.begun(ctx, KEY)
        begun = None if handle is None else (await handle.record()).registration.label
        try:
            program, why = await self._chosen(purpose, asked, ctx)
        except ToolError:
            if begun is None:
                raise
            why = {}
        else:
            # CI=1: test runners that would watch the files and never end run once.
            options = SpawnOptions(KEY, program.text, "turn", timeout=limit, env={"CI": "1"})
            handle = handle or await self._programs.run(ctx, program, options)
            if begun not in (None, program.text):  # the project's files speak for another one by now
                why = {}
            begun = begun or program.text
        assert handle is not None
        answer = {"command": begun, **why}
        state = did_begin(await awaited(handle, ctx, wait))
        if (await handle.record()).live:
            note = "It goes on, and you are told when it ends; then read_diagnosis tells what came out."
            return {**answer, **state, "note": note}
        return {**answer, **await self._told(handle, ctx, report)}

    async def _chosen(
        self, purpose: Purpose, asked: Mapping[str, Any], ctx: ToolContext[Any]
    ) -> tuple[Program, dict[str, Any]]:
        """What is run, and why that."""
        command, cwd, named, only = (asked.get(name) for name in ("command", "cwd", "runner", "filter"))
        if command is not None:
            if named is not None or only is not None:
                raise ToolError("give a command, or runner and filter: not both", code="invalid_tool_args")
            return program_of(command, cwd or "."), {}
        found = await asyncio.to_thread(self._detected, purpose, cwd or ".", ctx.store_location)
        runner = _one(found, purpose, cwd or ".", named)
        why: dict[str, Any] = {"runner": runner.name, "because": runner.because}
        others = [each.name for each in (*found.runners, *found.also) if each.name != runner.name]
        if others:
            why["other_runners"] = others
        return Program(_filtered(runner, only), cwd or "."), why

    def _detected(self, purpose: Purpose, cwd: str, store: str | None) -> Detected:
        paths = self._programs.paths.sparing(store)
        names = _names(paths, cwd)
        for folder in TEST_FOLDERS:
            if folder in names:
                with contextlib.suppress(ToolError):  # it tells nothing, then
                    names += [f"{folder}{each}" for each in _names(paths, os.path.join(cwd, folder))]
        texts = {name: _text(paths, os.path.join(cwd, name)) for name in wanted(names)}
        return detect(purpose, names, {name: text for name, text in texts.items() if text is not None})

    # ------------------------------------------------------------------ what came out

    async def _told(
        self, handle: CommandHandle, ctx: ToolContext[Any], report: str | None, offset: int = 0
    ) -> dict[str, Any]:
        result = await handle.result()
        diagnosis, note = await self._diagnosis(handle, result, ctx, report)
        answer = ended(result)
        if diagnosis is None:
            unread = "the output is of no tool that is known here: whether something failed, it alone tells"
            answer |= {"verdict": unread_verdict(_ending(result)), "diagnosis": None}
            return {**answer, "note": "; ".join(filter(None, (answer.get("note"), note, unread)))}
        told = shown(diagnosis, offset)
        if note:
            told["note"] = f"{told['note']}; {note}" if "note" in told else note
        if told.get("failures") or told.get("diagnostics"):
            for name in ("stdout", "stderr", "truncated"):
                answer.pop(name, None)
        else:
            for name in ("stdout", "stderr"):
                answer[name] = answer[name][-TAIL:]
        return {**answer, **told}

    async def _diagnosis(
        self, handle: CommandHandle, result: CommandResult, ctx: ToolContext[Any], report: str | None
    ) -> tuple[Diagnosis | None, str]:
        """From all of the output, a block at a time."""
        diagnoser = Diagnoser()
        ending = _ending(result)
        for stream in ("stdout", "stderr"):
            offset = 0
            while ending.whole:
                chunk = await handle.output(stream, offset)
                await asyncio.to_thread(diagnoser.feed, stream, bytes(chunk))
                offset = chunk.next
                if chunk.eof or not chunk:
                    break
        note = ""
        if report is not None:
            paths = self._programs.paths.sparing(ctx.store_location)
            note = await asyncio.to_thread(_read_report, diagnoser, paths, report, result.started_at)
        return await asyncio.to_thread(diagnoser.finish, ending), note


def _ending(result: CommandResult) -> CommandEnd:
    whole = not (result.artifact_error or result.dropped_bytes or result.drain == "incomplete")
    return CommandEnd(result.exit_code if result.status == "exited" else None, whole)


def _one(found: Detected, purpose: Purpose, cwd: str, named: str | None) -> Runner:
    told = [f"{each.name} ({each.because})" for each in (*found.runners, *found.also)]
    if named is not None:
        runner = found.named(named)
        if runner is not None:
            return runner
        raise ToolError(
            f"{cwd} has no runner {named!r:.100}: there is {', '.join(told) or 'none'}; or give a command",
            code="no_runner",
        )
    if found.runner is not None:
        return found.runner
    if not found.runners:
        raise ToolError(f"the files in {cwd} do not tell how to {purpose} it: give a command", code="no_runner")
    raise ToolError(
        f"{cwd} can be {'tested' if purpose == 'test' else 'built'} with {', '.join(told)}: say which one with runner",
        code="ambiguous_runner",
        data={"runners": [each.name for each in found.runners]},
    )


def _filtered(runner: Runner, only: str | None) -> tuple[str, ...]:
    if only is None:
        return runner.argv
    if runner.filter is None:
        raise ToolError(f"{runner.name} takes no filter that is known: give a command", code="invalid_tool_args")
    if not only or only.startswith("-"):
        raise ToolError("a filter is the name of a test or a part of it, and no option", code="invalid_tool_args")
    return runner.selecting(only)


def _names(paths: Paths, path: str) -> list[str]:
    """What is in a folder; folders with a slash."""
    with paths.locate(path) as place, telling(path):
        folder = paths.open_folder(place.folder, place.name)
        try:
            with os.scandir(folder) as entries:
                found = zip(entries, range(MOST_NAMES), strict=False)
                return [f"{entry.name}/" if entry.is_dir() else entry.name for entry, _ in found]
        finally:
            os.close(folder)


def _text(paths: Paths, path: str) -> str | None:
    """A file of a project. One that cannot be read tells nothing."""
    with contextlib.suppress(ToolError, OSError), paths.locate(path) as place:
        descriptor = paths.open_file(place.folder, place.name)
        with open(descriptor, "rb", buffering=0) as file:
            return (file.read(LONGEST_FILE) or b"").decode(errors="replace")
    return None


def _read_report(diagnoser: Diagnoser, paths: Paths, report: str, started_at: str | None) -> str:
    """Give a report to the diagnoser; "" or why it was not read."""
    try:
        with paths.locate(report) as place, telling(report):
            descriptor = paths.open_file(place.folder, place.name)
            with open(descriptor, "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                began = datetime.fromisoformat(started_at).timestamp() if started_at else 0.0
                if not stat.S_ISREG(found.st_mode) or found.st_mtime < began - SKEW:
                    return f"{report} is older than this run, and was not read"
                while block := file.read(1 << 20):
                    diagnoser.report(block)
    except ToolError as error:
        return f"no report was read: {error}"
    return ""


def shown(diagnosis: Diagnosis, offset: int = 0) -> dict[str, Any]:
    """A diagnosis for a model: as many of its failures, then diagnostics, as there is room for. `offset` passes over so
    many of both together. Errors come before what is only worth a warning."""
    order = {"error": 0, "warning": 1}
    ranked = sorted(diagnosis.diagnostics, key=lambda each: order.get(each.severity, 2))
    listed: list[tuple[str, dict[str, Any]]] = [
        *[("failures", _failure(each)) for each in diagnosis.failures],
        *[("diagnostics", to_builtins(each)) for each in ranked],
    ]
    answer: dict[str, Any] = {"verdict": diagnosis.verdict, "tool": diagnosis.tool}
    if diagnosis.verdict == "passed":  # a model that reads `failures` finds that there are none
        answer["failures"] = []
    if diagnosis.tests is not None:
        tests = diagnosis.tests
        counts = {"passed": tests.passed, "failed": tests.failed, "skipped": tests.skipped, "errors": tests.errors}
        answer["tests"] = {name: "unknown" if count is None else count for name, count in counts.items()}
    room, at = SHOWN_BYTES, offset
    for kind, each in listed[offset:]:
        size = len(encode(each))
        if room < size and at > offset:
            break
        answer.setdefault(kind, []).append(each)
        room, at = room - size, at + 1
    if at < len(listed):
        answer |= {"next_offset": at, "more": f"{len(listed) - at} more: read_diagnosis(id, offset={at})"}
    elif diagnosis.truncated:
        answer["more"] = "There are more than are kept: the output has all of them."
    if diagnosis.note:
        answer["note"] = diagnosis.note
    return answer


def _failure(failure: FailedTest) -> dict[str, Any]:
    found: dict[str, Any] = to_builtins(failure)
    excerpt = failure.excerpt
    if len(excerpt) > SHOWN_EXCERPT:  # the end tells what was raised, the beginning what was called
        half = SHOWN_EXCERPT // 2
        excerpt = f"{excerpt[:half]}\n…\n{excerpt[-half:]}"
    return {**found, "excerpt": excerpt} if excerpt else found
