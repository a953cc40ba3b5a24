"""The tools with which a model runs commands and goes on working with them.

A command belongs to its session: it goes on when the turn ends, when the Runtime is left and when it is killed, and the
session is told of its end unless a tool has waited for it.

All tools declare `recovery="rerun"`, because nothing is done twice. A command is found by the id of the call that began
it; what is written to a command is numbered by its call; a cancel that is repeated changes nothing; reading and waiting
have no effect. A tool that waits costs no tokens, and after a crash it waits on.

Results are plain and short: how the command is, what it wrote as far as there is room, and how to read the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

from perdure.errors import InvalidInput, TimedOut, ToolError, quoted
from perdure.model.codec import encode, model_text
from perdure.model.command import CommandResult, OutputChunk, Stream, whole_characters
from perdure.model.process import ProcessRow
from perdure.model.tool import Failed, OutputBudget, ToolRecord
from perdure.ports.tool import CommandHandle
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool, tool
from perdure.workspace.search import SECONDS, FilePiece, Matcher, Query
from perdure.workspace.spawning import Program, Programs, SpawnOptions, refusals

KEY = "command"
BACKGROUND_AFTER = 60.0
WAIT_SECONDS = 300.0
LONGEST = 86_400.0
CANCEL_SECONDS = 10.0
"""How long a cancel waits for the end: TERM, then KILL, and what is left is looked for."""
SO_FAR = 4096
"""Bytes of what a running command wrote last that are shown beside its status."""
READ_BYTES, READ_LINES = 48 * 1024, 2000
READ_BUDGET = OutputBudget(96 * 1024, 2100)
CONTENT = 64 * 1024
"""Bytes of what is read, as JSON: a byte may be written as six."""
MAX_LISTED = 100
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
LONGEST_LINE = 1 << 20
"""Bytes of a line that is not complete which are kept: a longer one is looked at in pieces."""
LISTEN = "0A"
"""How the kernel writes in its tables that a port is open."""
MOST_PROCESSES = 256
"""Processes of a command that are looked at for open ports."""

RELEASE_POLL = 0.02
OWN = "list_commands shows those of this session"


class CommandTools:
    """The tools for commands, a part of the tools of a workspace."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        tools: tuple[Tool[..., Any], ...] = (
            self.run_command, self.read_command_output, self.wait_command, self.wait_command_output, self.wait_port,
            self.write_stdin, self.list_commands, self.release_command, self.cancel_command,
        )  # fmt: skip
        self.tools = {each.spec.name: each for each in tools}

    async def program(self, name: str, kwargs: Mapping[str, Any], ctx: ToolContext[Any]) -> Program | None:
        """What `run_command` runs; the others run nothing."""
        return program_of(kwargs["command"], kwargs.get("cwd", ".")) if name == "run_command" else None

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def run_command(  # noqa: PLR0913  # what a model may say, each by name
        self,
        command: str | list[str],
        ctx: ToolContext[Any],
        cwd: str = ".",
        timeout: float | None = None,
        background_after: float = BACKGROUND_AFTER,
        background: bool = False,
        stdin: bool = False,
    ) -> dict[str, Any]:
        """Run a command and get its exit code and output. One that takes longer goes on in the background, and you are
        told when it has ended.

        Args:
            command: A line for the shell, or a list: the program and its arguments, without a shell.
            cwd: The folder that it runs in.
            timeout: Seconds after which it is killed.
            background_after: Seconds to wait for its end; then you get its id, and it goes on.
            background: Do not wait at all: for servers and long builds.
            stdin: It can be written to with write_stdin; else it reads an end.
        """
        program = program_of(command, cwd)
        wait = 0.0 if background else seconds_of(background_after, "background_after", 0)
        limit = None if timeout is None else seconds_of(timeout, "timeout", 0.001)
        options = SpawnOptions(KEY, program.text, "turn", stdin=stdin, timeout=limit)
        handle = await self._programs.run(ctx, program, options)
        return did_begin(await awaited(handle, ctx, wait))

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def read_command_output(
        self, id: str, ctx: ToolContext[Any], offset: int = 0, stream: Stream = "combined", limit: int = READ_BYTES
    ) -> dict[str, Any]:
        """Read what a command wrote, while it runs and after it.

        Args:
            id: The command.
            offset: The first byte; next_offset of the last read goes on from there.
            stream: stdout, stderr, or both in the order in which they came.
            limit: How many bytes at most.
        """
        if offset < 0 or limit < 1:
            raise ToolError("offset is 0 or more, and limit 1 or more", code="invalid_tool_args")
        handle = await command_of(id, ctx)
        content, end, chunk = await shown_output(handle, stream, offset, min(limit, READ_BYTES))
        answer = {"id": id, "stream": stream, "offset": offset, "content": content, "next_offset": end}
        return {**answer, "total": chunk.total, "eof": chunk.eof and end == chunk.total}

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def wait_command(self, id: str, ctx: ToolContext[Any], timeout: float = WAIT_SECONDS) -> dict[str, Any]:
        """Wait until a command has ended, and get its exit code and output.

        Args:
            id: The command.
            timeout: Seconds to wait at most; the command goes on.
        """
        seconds = seconds_of(timeout, "timeout", 0)
        return await awaited(await command_of(id, ctx), ctx, seconds)

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def wait_command_output(  # noqa: PLR0913  # what a model may say, each by name
        self,
        id: str,
        pattern: str,
        ctx: ToolContext[Any],
        offset: int = 0,
        stream: Stream = "combined",
        fixed: bool = False,
        timeout: float = WAIT_SECONDS,
    ) -> dict[str, Any]:
        """Wait until a command has written a line that matches a pattern. Ends also when the command does.

        Args:
            id: The command.
            pattern: A regular expression of Python, looked for in each line.
            offset: Look at what was written from this byte on; next_offset of an answer goes on behind it.
            stream: stdout, stderr, or both in the order in which they came.
            fixed: Take the pattern as a text, not as a regular expression.
            timeout: Seconds to wait at most; the command goes on.
        """
        if not pattern or offset < 0:
            raise ToolError("give a pattern, and an offset of 0 or more", code="invalid_tool_args")
        seconds = seconds_of(timeout, "timeout", 0)
        handle = await command_of(id, ctx)
        total = (await _read(handle, stream, offset, 1)).total
        deadline = asyncio.get_running_loop().time() + seconds
        lines = LineSearch(pattern, fixed, offset)
        with contextlib.closing(lines), contextlib.suppress(TimeoutError), refusals():
            await lines.begin()
            # What is there already is looked at whatever the time: the limit is for what is still to come.
            async with asyncio.timeout_at(deadline if total == offset else None) as limit:
                async with contextlib.aclosing(_chunks(handle, stream, offset)) as chunks:
                    async for chunk in chunks:
                        match = await lines.look(chunk)
                        if match is not None:
                            status = await _status(handle)
                            return {"id": id, "matched": True, "stream": stream, **match, "status": status}
                        if chunk.next == chunk.total:
                            limit.reschedule(deadline)
        return {"matched": False, "stream": stream, **await _state(handle), "next_offset": lines.line_at}

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def wait_port(
        self, id: str, port: int, ctx: ToolContext[Any], timeout: float = WAIT_SECONDS
    ) -> dict[str, Any]:
        """Wait until a command, or a program that it started, accepts connections on a TCP port.

        Args:
            id: The command.
            port: The port, 1 to 65535.
            timeout: Seconds to wait at most; the command goes on.
        """
        if not 0 < port < 65_536:
            raise ToolError(f"there is no port {port}: give one from 1 to 65535", code="invalid_tool_args")
        seconds = seconds_of(timeout, "timeout", 0)
        handle = await command_of(id, ctx)
        waiting = asyncio.ensure_future(_listening(handle, port))
        ending = asyncio.ensure_future(handle.outcome())
        try:
            await asyncio.wait({waiting, ending}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
                return {"id": id, "port": port, "open": True}
            return {"port": port, "open": False, **await _state(handle)}
        finally:
            for task in (waiting, ending):
                task.cancel()
            await asyncio.gather(waiting, ending, return_exceptions=True)

    @tool(recovery="rerun")
    async def write_stdin(self, id: str, ctx: ToolContext[Any], text: str = "", close: bool = False) -> dict[str, Any]:
        """Write to a command that was started with stdin=true.

        Args:
            id: The command.
            text: What to write; a line ends with a line feed.
            close: There is no more to come after this.
        """
        if not text and not close:
            raise ToolError("give a text, or close=true", code="invalid_tool_args")
        handle = await command_of(id, ctx)
        row = await handle.record()
        if not row.live:
            raise ToolError(f"{_named(id)} has ended: nothing was written", code="command_ended")
        if not row.registration.input.get("stdin"):
            raise ToolError(f"{_named(id)} reads no input: start it with stdin=true", code="no_stdin")
        # The signal is named by its call: an attempt that is made again sends the same one, which is written once.
        record = await ctx.handles.signal_process(handle.to_json(), "stdin", {"text": text, "close": close})
        _value(record)
        return {"id": id, "written": len(text.encode()), "closed": close}

    @tool(recovery="rerun")
    async def list_commands(self, ctx: ToolContext[Any], live: bool = True, limit: int = 20) -> dict[str, Any]:
        """List the commands of this session, newest first.

        Args:
            live: Only those that run; false shows ended ones too.
            limit: How many at most.
        """
        if limit < 1:
            raise ToolError("limit is 1 or more", code="invalid_tool_args")
        most = min(limit, MAX_LISTED)
        found: list[dict[str, Any]] = []
        for each in await ctx.handles.list_processes(live, MAX_LISTED):
            if each["kind"] == "command" and len(found) < most:
                with refusals():
                    found.append(_listed(await (await ctx.handles.command_of(each["id"])).record()))
        return {"commands": found}

    @tool(recovery="rerun")
    async def release_command(self, id: str, ctx: ToolContext[Any]) -> dict[str, Any]:
        """Do not wait for a command before you finish, such as a server that is to go on.

        Args:
            id: The command.
        """
        handle = await command_of(id, ctx)
        row = await handle.record()
        if row.live and row.registration.input.get("held"):
            _value(await ctx.handles.signal_process(handle.to_json(), "release"))
            row = await _released(handle)
        return {"id": id, "status": "running" if row.live else "ended", "waited_for": False}

    @tool(recovery="rerun", output_budget=READ_BUDGET)
    async def cancel_command(self, id: str, ctx: ToolContext[Any], reason: str = "") -> dict[str, Any]:
        """End a command, with all that it started.

        Args:
            id: The command.
            reason: Why it is not needed any more.
        """
        handle = await command_of(id, ctx)
        _value(await ctx.handles.cancel_process(handle.to_json(), reason or "cancel_command"))
        return await awaited(handle, ctx, CANCEL_SECONDS)


async def _released(handle: CommandHandle) -> ProcessRow:
    """Wait until the engine of a command has written down that no turn is to be held for it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            while (row := await handle.record()).live:
                if row.record.external_ref.get("released"):
                    break
                await asyncio.sleep(RELEASE_POLL)
            return row
    raise ToolError(f"{_named(handle.id)} is not watched by any worker now: try again", code="not_released")


# ---------------------------------------------------------------------- what a model gives


def program_of(command: str | list[str], cwd: str) -> Program:
    if not command or (isinstance(command, str) and not command.strip()):
        raise ToolError("give a command: a line for the shell, or a list of arguments", code="invalid_tool_args")
    return Program(command if isinstance(command, str) else tuple(command), cwd)


def seconds_of(value: float, name: str, least: float) -> float:
    if not least <= value <= LONGEST:  # also what is no number
        usable = f"{least:g} to {LONGEST:g} seconds"
        raise ToolError(f"{name}={value} is not usable: give {usable}", code="invalid_tool_args")
    return float(value)


async def command_of(id: str, ctx: ToolContext[Any]) -> CommandHandle:
    """A command of this session."""
    try:
        with refusals():
            return await ctx.handles.command_of(id)
    except ToolError as error:
        raise ToolError(f"there is no command {quoted(id):.200} here: {OWN}", code="unknown_command") from error


def _named(id: str) -> str:
    return f"command {id}"


def _value(record: ToolRecord) -> Any:
    if isinstance(record.outcome, Failed):
        raise ToolError(record.outcome.message, code=record.outcome.code)
    return record.outcome


# ---------------------------------------------------------------------- what a model is shown


async def awaited(handle: CommandHandle, ctx: ToolContext[Any], seconds: float) -> dict[str, Any]:
    """How a command ended, or that it runs on after so many seconds. The session is not told of an end that is here."""
    outcome = (await ctx.handles.await_process(handle.to_json(), seconds)).outcome
    if isinstance(outcome, Failed) and outcome.code != TimedOut.code:
        raise ToolError(outcome.message, code=outcome.code)
    return await _state(handle)


def did_begin(state: dict[str, Any]) -> dict[str, Any]:
    """What is told of a command. One that never began has done nothing: for the call that wanted it, that is a
    failure."""
    if state["status"] == "spawn_failed":
        raise ToolError(f"it could not begin, nothing was run: {state.get('reason', '')}", code="spawn_failed")
    return state


async def _state(handle: CommandHandle) -> dict[str, Any]:
    """A command as it is now, with what it wrote last."""
    row = await handle.record()
    if not row.live:
        with refusals():
            return ended(await handle.result())
    total = (await _read(handle, "combined", 0, 1)).total
    after = max(0, total - SO_FAR)
    chunk = await _read(handle, "combined", after, SO_FAR)
    content, end = _shown(chunk, after, SO_FAR)
    answer: dict[str, Any] = {"id": handle.id, "status": "running", "output": content, "next_offset": end}
    if after:
        answer["truncated"] = f"the last {len(chunk):,} of {total:,} bytes; read_command_output has all"
    return {**answer, "note": "It goes on, and you are told when it ends; wait_command waits for it."}


async def _status(handle: CommandHandle) -> str:
    return "running" if (await handle.record()).live else "ended"


def ended(result: CommandResult) -> dict[str, Any]:
    """How a command ended, for a model."""
    answer: dict[str, Any] = {"id": result.command_id, "status": result.status}
    if result.exit_code is not None:
        answer["exit_code"] = result.exit_code
    if result.signal is not None:
        answer["signal"] = result.signal
    if result.status == "timed_out":
        answer["reason"] = "its time was over"
    elif result.reason:
        answer["reason"] = result.reason
    answer |= {"stdout": result.stdout, "stderr": result.stderr, "duration_ms": result.duration_ms}
    cut = [
        f"{name} has {getattr(result, f'{name}_bytes'):,} bytes, of which the first and the last are shown"
        for name in ("stdout", "stderr")
        if getattr(result, f"{name}_truncated")
    ]
    if cut:
        answer["truncated"] = f"{'; '.join(cut)}: read_command_output(id, offset, stream) has all"
    if result.status == "lost":
        answer["note"] = "Nobody saw its end: whether it did all of its work is not known."
    if result.cleanup.left:
        answer["left_running"] = result.cleanup.left
    return answer


def _listed(row: ProcessRow) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": row.id, "command": row.registration.label}
    if row.live:
        return {**answer, "status": "running"}
    value = getattr(row.record.outcome, "value", None)
    result = value if isinstance(value, dict) else {}
    shown = {name: result[name] for name in ("exit_code", "reason") if result.get(name) not in (None, "")}
    return {**answer, "status": result.get("status", row.state), **shown}


async def shown_output(handle: CommandHandle, stream: Stream, offset: int, limit: int) -> tuple[str, int, OutputChunk]:
    """What a command wrote from an offset on, as far as there is room; the offset behind it; and what was read."""
    chunk = await _read(handle, stream, offset, limit)
    return *_shown(chunk, offset, limit), chunk


async def _read(handle: CommandHandle, stream: Stream, offset: int, limit: int) -> OutputChunk:
    try:
        return await handle.output(stream, offset, limit=limit)
    except InvalidInput as error:
        raise ToolError(f"{model_text(error)}: read from an offset that is there", code="past_the_end") from None


def _shown(chunk: OutputChunk, offset: int, limit: int) -> tuple[str, int]:
    """As much of a chunk as there is room for, in whole characters, and the offset behind it."""
    data = bytes(chunk[:limit])
    if data.count(b"\n") > READ_LINES:
        data = b"\n".join(data.split(b"\n", READ_LINES)[:READ_LINES]) + b"\n"
    while len(encode(data.decode(errors="replace"))) > CONTENT:
        data = data[: len(data) // 2]
    if offset + len(data) < chunk.total or not chunk.eof:
        data = whole_characters(data) or data
    return data.decode(errors="replace"), offset + len(data)


# ---------------------------------------------------------------------- waiting for a line


async def _chunks(handle: CommandHandle, stream: Stream, offset: int) -> AsyncGenerator[OutputChunk, None]:
    """What a command writes from an offset on, as it comes, until its end."""
    chunks = aiter(handle.output(stream, offset, follow=True))
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


class LineSearch:
    """Looks for a pattern in lines as they come. A line that is not complete yet counts as it is: a program that asks
    a question waits behind it. `line_at` is the offset of the first line that may still match."""

    def __init__(self, pattern: str, fixed: bool, offset: int, seconds: int = SECONDS) -> None:
        self._matcher = Matcher(Query(pattern, fixed=fixed, most=0, seconds=seconds))
        self._partial, self.line_at = b"", offset

    async def begin(self) -> None:
        """Raises ToolError where the pattern is not usable."""
        await asyncio.to_thread(self._matcher.begin)

    async def look(self, chunk: OutputChunk) -> dict[str, Any] | None:
        """The first line that matches, with its offset and the one behind it."""
        data = self._partial + chunk
        found = await asyncio.to_thread(self._matcher.ask, [FilePiece("", 0, data)])
        if not found:
            end = len(data) if len(data) - data.rfind(b"\n") > LONGEST_LINE else data.rfind(b"\n") + 1
            self._partial = data[end:]
            self.line_at += end
            return None
        _, number, _, text, _, _ = found[0]
        lines = data.split(b"\n", number + 1)
        start = self.line_at + sum(len(each) + 1 for each in lines[:number])
        end = min(start + len(lines[number]) + 1, self.line_at + len(data))
        return {"line": text, "offset": start, "next_offset": end}

    def close(self) -> None:
        self._matcher.close()


# ---------------------------------------------------------------------- waiting for a port


async def _listening(handle: CommandHandle, port: int) -> None:
    """Wait until a port is open. The kernel tells nobody of that, so it is asked again and again."""
    pause = FIRST_PAUSE
    while True:
        reference = (await handle.record()).record.external_ref
        pid = reference.get("pid") if isinstance(reference, dict) else None
        if isinstance(pid, int) and await asyncio.to_thread(listens, pid, port):
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def listens(pid: int, port: int) -> bool:
    """Whether a TCP port is open where a process or one of its descendants is: a confined one has a network of its own,
    in which nobody else could connect to it."""
    for each in _descendants(pid):
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{each}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                        return True
    return False


def _descendants(pid: int) -> Iterator[int]:
    found = [pid]
    for count, each in enumerate(found):
        if count >= MOST_PROCESSES:
            return
        yield each
        with contextlib.suppress(OSError, ValueError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text(encoding="ascii").split()]
