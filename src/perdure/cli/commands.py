"""What the command line shows of commands: their output as it comes, where they run, and what doctor says of them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct

from perdure.cli.host import FAILED, Refusal, find_process, is_terminal
from perdure.cli.render import json_line, safe, size, span
from perdure.commands import output
from perdure.commands.job import Job
from perdure.model.command import COMMAND_KIND, CommandStatus, Stream
from perdure.model.process import ProcessRow
from perdure.ports.store import JobFolders, Store

POLL = 0.1
FILES = ("stdout", "stderr")


class CommandFacts(Struct, frozen=True, omit_defaults=True):
    """Where a command runs, and what it has written so far. `here`: on this machine, so that its output can be read."""

    host: str
    here: bool
    argv: list[str]
    pid: int | None = None
    output_bytes: int | None = None


def job_of(store: Store, row: ProcessRow) -> Job | None:
    """The job folder of a command that is on this machine and has one."""
    reference = row.record.external_ref
    if not isinstance(reference, dict) or not isinstance(store, JobFolders) or not is_here(row):
        return None
    folder = Path(store.jobs_folder()) / Path(str(reference.get("job", ""))).name
    return Job(folder) if reference.get("job") and folder.is_dir() else None


def is_here(row: ProcessRow) -> bool:
    return row.registration.definition == socket.gethostname()


def facts_of(store: Store, row: ProcessRow) -> CommandFacts | None:
    """What is known of a process that is a command; None of any other."""
    asked, reference = row.registration, row.record.external_ref
    if asked.kind != COMMAND_KIND:
        return None
    job = job_of(store, row)
    argv = asked.input.get("argv", ()) if isinstance(asked.input, dict) else ()
    pid = reference.get("pid") if isinstance(reference, dict) and row.live else None
    written = None if job is None else sum(_size(job.folder / name) for name in FILES)
    return CommandFacts(asked.definition, is_here(row), [str(each) for each in argv], pid, written)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def facts_text(facts: CommandFacts) -> str:
    """`pid 4711, 1.2 MiB`"""
    parts = [f"pid {facts.pid}"] if facts.pid is not None else []
    parts += [f"on {facts.host}"] if not facts.here else []
    parts += [size(facts.output_bytes)] if facts.output_bytes is not None else []
    return ", ".join(parts)


# ---------------------------------------------------------------------- output


async def show_output(store: Store, process: str, stream: Stream, after: int, following: bool, json: bool) -> None:
    """Print what a command wrote, with `following` until its end: byte by byte, on a terminal as text that cannot
    command it, or as JSON lines with offsets."""
    decoder, at = output.TextDecoder(), after
    async with aclosing(_chunks(store, process, stream, after, following)) as chunks:
        async for chunk in chunks:
            if json:
                text = decoder.add(chunk)
                line = {"stream": stream, "offset": at, "next": chunk.next, "text": text, "eof": chunk.eof}
                sys.stdout.write(json_line(line) + "\n")
            elif is_terminal():
                sys.stdout.write(safe(decoder.add(chunk).replace("\r\n", "\n")))
            else:
                sys.stdout.buffer.write(chunk.data)
            sys.stdout.flush()
            at = chunk.next


async def _chunks(
    store: Store, process: str, stream: Stream, after: int, following: bool
) -> AsyncGenerator[output.Chunk]:
    while True:
        row = await find_process(store, process)
        job = job_of(store, row)
        if job is not None:
            break
        if not is_here(row):
            host = row.registration.definition
            raise Refusal(f"command {row.id!r} is on host {host!r}: read its output there", FAILED, "elsewhere")
        if not row.live:
            raise Refusal(f"command {row.id!r} is {row.status} and has left no output", FAILED, "no_output")
        if not following:
            return  # it has not begun
        await asyncio.sleep(POLL)
    if following:
        async for chunk in output.follow(job, stream, after):
            yield chunk
        return
    while True:
        chunk = output.read(job, stream, after)
        if not chunk.data:
            return
        yield chunk
        after = chunk.next
        await asyncio.sleep(0)


# ---------------------------------------------------------------------- how it ended


def command_end(value: Any) -> str:
    """How a command ended, or the one of a monitor, in words; empty for what says nothing of that."""
    if not isinstance(value, dict) or value.get("status") not in get_args(CommandStatus):
        return ""
    status, reason = value["status"], value.get("reason") or ""
    if status == "exited":
        words = f"exited {value.get('exit_code')}"
    elif status == "signaled":
        words = f"ended by {value.get('signal')}"
    else:
        words = f"{status.replace('_', ' ')}: {reason}" if reason else status.replace("_", " ")
    more = [f"after {span(value['duration_ms'])}"] if "duration_ms" in value else []
    more += [lines_text(value["lines"])] if "lines" in value else []
    return ", ".join([words, *more])


def lines_text(count: int) -> str:
    return f"{count:,} line{'' if count == 1 else 's'}"


# ---------------------------------------------------------------------- doctor


class CommandHealth(Struct, frozen=True, omit_defaults=True):
    """What doctor found about commands: how many run here, elsewhere and nobody knows where, and folders of none.

    `notes` are about this machine: what ends commands that no Runtime ended.
    """

    here: int = 0
    elsewhere: dict[str, int] = {}
    lost: int = 0
    orphans: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def notes_of(cgroup: str, container: bool) -> tuple[str, ...]:
    """What ends the commands of a program that runs in such a control group."""
    found = []
    unit = next((part for part in reversed(cgroup.strip().split("/")) if part.endswith(".service")), None)
    if unit is not None and not unit.startswith(("user@", "session-")):
        found.append(
            f"this shell is part of {unit}: systemd ends all processes of a unit that stops, its commands too, unless "
            "the unit says KillMode=process (or mixed)"
        )
    if container:
        found.append(
            "this is a container: its end ends all its commands, which are then lost. For commands that outlive an "
            "upgrade, run them outside, or keep the container and restart the program in it (with an init: --init)"
        )
    return tuple(found)


def machine_notes() -> tuple[str, ...]:
    try:
        cgroup = Path("/proc/self/cgroup").read_text()
    except OSError:
        cgroup = ""
    container = any(os.path.exists(mark) for mark in ("/.dockerenv", "/run/.containerenv"))
    return notes_of(cgroup, container or bool(os.environ.get("KUBERNETES_SERVICE_HOST")))


async def examine_commands(store: Store, live: Iterable[ProcessRow], lost: int) -> CommandHealth:
    """`live` are the live commands; `lost`, how many ended without anybody knowing how."""
    here, elsewhere = 0, dict[str, int]()
    for row in live:
        if is_here(row):
            here += 1
        else:
            host = row.registration.definition
            elsewhere[host] = elsewhere.get(host, 0) + 1
    return CommandHealth(here, elsewhere, lost, await _orphans(store), machine_notes() if here else ())


async def _orphans(store: Store) -> tuple[str, ...]:
    """Job folders whose process is not in this store any more, and in which something lives."""
    if not isinstance(store, JobFolders):
        return ()
    location = getattr(store, "path", None)
    folder = None if location is None else Path(f"{location}-jobs")
    if folder is None or not folder.is_dir():
        return ()
    found = []
    for each in sorted(folder.iterdir()):
        if (process_id := Job(each).process_id()) is None:
            continue
        row = await store.process(process_id)
        if (row is None or row.pruned is not None or not row.live) and Job(each).held():
            found.append(str(each))
    return tuple(found)


def health_json(health: CommandHealth) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(health)
    return {name: fields.get(name, getattr(health, name)) for name in health.__struct_fields__}
