"""The engine of commands: processes of kind "command", whose work lives outside of every Runtime.

    registered ──▶ spawned ──▶ identified ─▶ watched ─▶ ended ─▶ result
    and its job    its shim    who it is,    the run    `status` in
    named, in      has begun   in a fenced   rests      the folder
    one write      it          write

A command that is claimed later names its job in a write of its own. Its shim is forked while that is written, and
waits; its identity is written while the shim lets the program run.

A run that finds the name of a job in its record adopts it, by what is in the folder:

    `status` is there              the result, as if it had been watched
    the lock is held               its shim lives: it is watched on. Nothing is counted: the work did not die
    begun, no lock, no status      its shim was killed: what is left of it is ended and verified, and it is `lost`
    not begun                      the folder is made void: no late shim begins anything there, and a new one is used
    another boot, or no folder     it is `lost`, and nothing is killed: whatever has its numbers now is a stranger

What decides is the shim's `status`, written once: a cancel that comes after the end finds it and changes nothing. A
cancel kills; leaving the Runtime does not, unless the store is in memory, where nobody could find the command again.

A command belongs to the machine that it was asked for on (`definition` of its registration). Elsewhere `knows` is
False: it is left alone, `doctor` names the machine, and an operator may abandon it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import datetime
import errno
import hashlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from perdure.commands.environment import check_names, environment
from perdure.commands.job import (
    Beginning,
    Found,
    Identity,
    Job,
    ShimAnswer,
    StartedCommand,
    Status,
    check_supported,
    is_supported,
    own_boot,
)
from perdure.commands.os_tree import Remains, end, end_lost
from perdure.commands.output import follow, read, summarize
from perdure.commands.sandbox import Sandbox, check_folders, confined_environment
from perdure.commands.shim import STDIN_ROOM
from perdure.commands.spawner import PreparedShim, Spawner, SpawnFailed, StartRequest, check
from perdure.errors import (
    CommandsUnavailable,
    InternalError,
    InvalidCommand,
    InvalidInput,
    PerdureError,
    RuntimeClosed,
    StoreError,
    TimedOut,
    TooManyCommands,
)
from perdure.lifecycle.process import SIGNAL
from perdure.model.codec import clean_text
from perdure.model.command import (
    COMMAND_KIND,
    FIRST_STDERR,
    RELEASED,
    Cleanup,
    Command,
    CommandResult,
    CommandSettings,
    OutputChunk,
    OutputQuery,
)
from perdure.model.monitor import watch_events
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Event,
    EventType,
    Evidence,
    ProcessOutcome,
    ProcessRow,
    Registration,
    SessionOrigin,
    Signal,
    Success,
)
from perdure.model.sandbox import Confinement
from perdure.model.session import CancelRequest
from perdure.model.tool import Artifact
from perdure.model.write import ProcessFilter, ProcessLimits
from perdure.ports.process import AdmittedCommand, CancelRequested, EngineRun, Leaving
from perdure.ports.store import JobFolders, SharesFiles, Store
from perdure.processes.command import CommandStart
from perdure.processes.tool import ARTIFACT

log = logging.getLogger("perdure.commands")

Watching: TypeAlias = Callable[[EngineRun, Job, Command], Coroutine[Any, Any, None]]

LABEL = 200
"""Characters of a command line that are its label."""
YOUNG = 3600.0
"""Seconds for which a folder that no process names is believed to be about to be named."""
CANCELLED = "cancelled"
ENDS = frozenset({"exited", "signaled", "killed", "timed_out", "spawn_failed"})
"""How a shim says that a command ended. Anything else is a fault of the shim's own."""
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})
"""What the OS refuses for now, and not because of the command."""
EXHAUSTED_SECONDS = 0.5
MEMORY_ARTIFACT = 16_000_000
"""Bytes of a stream that a store in memory keeps as an artifact, at most."""

NOTHING_FOUND = Cleanup()

PIECES = 16
"""Bits of the numbers of what is written to stdin that count the pieces of one signal."""

STDIN, RESIZE, INTERRUPT, RELEASE = "stdin", "resize", "interrupt", "release"

SENDABLE = ("INT", "TERM", "HUP", "QUIT", "KILL", "USR1", "USR2", "STOP", "CONT")
"""Signals that may be sent to the process group of a command."""

_TEXT: dict[str, Any] = {"type": "string"}
_BASE64: dict[str, Any] = _TEXT | {
    "pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?(?![\\s\\S])"
}
_SIZE: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 65_535}
SIGNALS: dict[str, EventType] = {
    STDIN: EventType(
        f"{SIGNAL}{STDIN}",
        {
            "type": "object",
            "properties": {"text": _TEXT, "base64": _BASE64, "close": {"type": "boolean"}},
            "additionalProperties": False,
        },
    ),
    RESIZE: EventType(
        f"{SIGNAL}{RESIZE}",
        {
            "type": "object",
            "properties": {"rows": _SIZE, "columns": _SIZE},
            "required": ["rows", "columns"],
            "additionalProperties": False,
        },
    ),
    INTERRUPT: EventType(
        f"{SIGNAL}{INTERRUPT}",
        {
            "anyOf": [
                {"type": "null"},
                {"type": "object", "properties": {"signal": {"enum": list(SENDABLE)}}, "additionalProperties": False},
            ]
        },
    ),
    RELEASE: EventType(f"{SIGNAL}{RELEASE}", {"type": "null"}),
}
"""What may be written to a running command: bytes for its stdin and that there are no more, the size of its terminal, a
signal for its process group, by name (INT if none is given), and that no turn is to be held for it any more."""


class CommandEngine:
    """Runs the commands of one Runtime, on its event loop.

    `_live` are the commands that run here or are about to, with their sessions ("" for none). Of commands that have not
    begun: `_values` are grants with values, `_named` the jobs that were named by us with their registration, `_shims`
    the shims that are forked for them, and `_begun` resolves when one has begun, or never will.
    """

    kind = COMMAND_KIND
    uses_deps = False
    needs_definitions = False
    needs_place = False

    def __init__(self, store: Store, settings: CommandSettings, watch: Watching | None = None) -> None:
        self.store, self.settings, self.watch = store, settings, watch
        self.host = socket.gethostname()
        self.boot = own_boot() if is_supported() else ""
        self.spawner = Spawner()
        path = getattr(store, "path", None)
        self._sandbox = Sandbox(self.bound_jobs, None if path is None else os.fspath(path))
        self._own_jobs = ""
        self._live: dict[str, str] = {}
        self._values: dict[str, dict[str, str]] = {}
        self._named: dict[str, str] = {}
        self._shims: dict[str, PreparedShim] = {}
        self._begun: dict[str, asyncio.Future[None]] = {}

    async def close(self) -> None:
        """The Runtime is left: its spawner ends. The shims go on."""
        await self.spawner.close()
        if self._own_jobs:
            await asyncio.to_thread(shutil.rmtree, self._own_jobs, ignore_errors=True)

    # ------------------------------------------------------------------ starting

    def draft(self, what: Any, args: Mapping[str, Any]) -> Registration | Awaitable[Registration] | None:
        if isinstance(what, Command):
            what = CommandStart(what)
        if not isinstance(what, CommandStart):
            return None
        self.jobs()
        asked = what.command.sandbox
        return self._draft(what, None) if asked is None else self._draft_confined(what, asked)

    async def _draft_confined(self, what: CommandStart, asked: Confinement) -> Registration:
        """The first one of an OS process runs a self-test, which takes its time."""
        return self._draft(what, await asyncio.to_thread(self._sandbox.choose, asked))

    def _draft(self, what: CommandStart, sandbox: Confinement | None) -> Registration:
        given = what.command
        cwd = os.path.abspath(os.path.expanduser(given.cwd)) if given.cwd else _usual_folder(sandbox)
        limits = self.settings
        command = replace(
            given,
            cwd=cwd,
            sandbox=sandbox,
            timeout=_least(given.timeout, limits.seconds),
            output_limit=_least(given.output_limit, limits.output_bytes),
        )
        check_names(command)
        label = command.display if len(command.display) <= LABEL else f"{command.display[: LABEL - 1]}…"
        events = [SIGNALS[INTERRUPT], EventType(ARTIFACT), *watch_events(command.watch)]
        events += [SIGNALS[STDIN]] if command.stdin or command.pty else []
        events += [SIGNALS[RESIZE]] if command.pty else []
        events += [SIGNALS[RELEASE], EventType(FIRST_STDERR), EventType(RELEASED)] if command.held else []
        asked = msgspec.json.encode(replace(given, held=False), order="sorted")
        return Registration(
            "", self.kind, "reattachable", what.name, self.host, msgspec.to_builtins(command), clean_text(label),
            events=tuple(events), asked=hashlib.sha256(asked).hexdigest(),
        )  # fmt: skip

    def check_runnable(self, registration: Registration, values: Mapping[str, str]) -> None:
        """Raise InvalidCommand for what the OS would not run. Only of a command that is new: one that is asked for
        again is found though its program or its folder is not there any more."""
        command = msgspec.convert(registration.input, Command)
        if command.sandbox is not None:
            check_folders(command.sandbox, command.cwd)
        check(command.argv, self.environment_of(command, values), command.cwd)

    def environment_of(self, command: Command, values: Mapping[str, str]) -> dict[str, str]:
        if command.sandbox is not None and command.sandbox.computes:
            return dict(command.env)
        env = environment(command, os.environ, values, self.settings.inherit)
        if command.sandbox is None or command.sandbox.how == "none":
            return env
        return confined_environment(env, (*command.env, *command.grants))

    async def confined(self, command: Command) -> tuple[Command, list[bytes]]:
        """The command with its folder and what enforces its sandbox, and the rules for that. Raises
        SandboxUnavailable."""
        if command.sandbox is None:
            return replace(command, cwd=command.cwd or _own_folder()), []
        chosen = await asyncio.to_thread(self._sandbox.choose, command.sandbox)
        cwd = command.cwd or _usual_folder(chosen)
        check_folders(chosen, cwd)
        return replace(command, sandbox=chosen, cwd=cwd), await asyncio.to_thread(self._sandbox.rules, chosen)

    def jobs(self) -> Path:
        """The folder of job folders. Raises CommandsUnavailable where there can be none."""
        check_supported()
        if not isinstance(self.store, JobFolders):
            raise CommandsUnavailable("this store keeps no folders for commands: use a file, or 'memory'")
        return Path(self.store.jobs_folder())

    def bound_jobs(self) -> Path:
        """The same for bound commands, which nothing but this Runtime needs to find: where the store keeps no folders
        there is one for as long as the Runtime lives."""
        check_supported()
        if isinstance(self.store, JobFolders):
            return self.jobs()
        self._own_jobs = self._own_jobs or tempfile.mkdtemp(prefix="perdure-jobs-")
        return Path(self._own_jobs)

    @contextlib.contextmanager
    def admitted(self, registration: Registration, known: ProcessRow | None, what: Any) -> Generator[AdmittedCommand]:
        process_id, session_id = registration.id, _session_of(registration)
        new = known is None and process_id not in self._live
        reference: dict[str, Any] | None = None
        if new:
            values = what.values if isinstance(what, CommandStart) else {}
            self.check_runnable(registration, values)
            self._live[process_id] = session_id
            self._begun[process_id] = asyncio.get_running_loop().create_future()
            if values:
                self._values[process_id] = values
            if self.knows(registration):
                reference = self.new_reference()
                self._named[process_id] = reference["job"]
                if (prepared := self.spawner.prepare(bool(registration.input.get("sandbox")))) is not None:
                    self._shims[process_id] = prepared
        begun = self._begun.get(process_id)
        try:
            limits = ProcessLimits(self.settings.total, self.settings.per_session)
            yield AdmittedCommand(reference, limits, lambda: _until(begun))
        except BaseException:  # also a cancellation: what was not registered must not count
            if new and not _is_done(begun):
                self.forget(process_id)
            raise

    async def check_output(self, registration: Registration) -> None:
        most, session_id = self.settings.session_output_bytes, _session_of(registration)
        if most is None or not session_id or registration.id in self._live:
            return
        if (written := await self._written(session_id)) >= most:
            raise TooManyCommands(f"bytes that running commands of session {session_id!r} wrote", written, most)

    async def _written(self, session_id: str) -> int:
        """How many bytes the running commands of a session have written, as far as they are on this machine."""
        wanted = ProcessFilter(
            kind=COMMAND_KIND, definition=self.host, origin=session_id, live=True, limit=self.settings.per_session
        )
        names = [_job_name(row.record.external_ref) for row in await self.store.processes(wanted)]
        folders = [self.jobs() / name for name in names if name is not None]
        return sum(_size(folder / stream) for folder in folders for stream in ("stdout", "stderr"))

    def not_begun_here(self, process_id: str) -> None:
        """It is queued, or another worker runs it. Values that it was granted stay: we may be the one who begins it."""
        values = self._values.get(process_id)
        self.forget(process_id)
        if values is not None:
            self._values[process_id] = values

    def forget(self, process_id: str) -> None:
        """It does not run here any more, or never did."""
        self._live.pop(process_id, None)
        self._values.pop(process_id, None)
        self._named.pop(process_id, None)
        if (prepared := self._shims.pop(process_id, None)) is not None:
            prepared.dismiss()
        self.has_begun(process_id)

    def has_begun(self, process_id: str) -> None:
        begun = self._begun.pop(process_id, None)
        if begun is not None and not begun.done():
            begun.set_result(None)

    # ------------------------------------------------------------------ running

    def knows(self, registration: Registration) -> bool:
        """Those of this machine: nobody elsewhere could find their processes."""
        return registration.definition == self.host and is_supported()

    async def run(self, run: EngineRun) -> ProcessOutcome:
        process_id = run.registration.id
        self._live[process_id] = _session_of(run.registration)
        try:
            return await CommandRun(self, run).go()
        finally:
            self.forget(process_id)

    def new_reference(self) -> dict[str, Any]:
        """Where a command that is about to begin will be found."""
        return {
            "job": Job.new_name(), "host": self.host, "boot": self.boot, "store": self.store.identity(),
            "token": secrets.token_hex(16),
        }  # fmt: skip

    def is_new(self, process_id: str, name: str) -> bool:
        """Whether a job was named with the registration of its command, by us, and nothing has been done about it."""
        return self._named.pop(process_id, None) == name

    async def spawn(
        self, process_id: str, command: Command, job: Job, token: str, identified: Callable[[StartedCommand], None]
    ) -> StartedCommand | str:
        """Begin a command: who runs it, or why nothing does. `identified` is called when that is in its folder."""
        try:
            env = self.environment_of(command, self._values.get(process_id, {}))
        except InvalidCommand as error:
            return str(error)
        rules: list[bytes] = []
        if command.sandbox is not None:
            if why := await asyncio.to_thread(self._sandbox.check, command.sandbox):
                return why
            rules = await asyncio.to_thread(self._sandbox.rules, command.sandbox)
        limit, most = command.output_limit, self.settings.session_output_bytes
        session_id = self._live.get(process_id, "")
        if session_id and most is not None:
            limit = _least(limit, max(most - await self._written(session_id), 1))
        request = StartRequest(
            job.folder, token, command.argv, env, command.cwd, command.stdin, command.pty, command.timeout,
            command.silence, limit, command.grace, command.strays, rules, process_id=process_id,
        )  # fmt: skip
        try:
            started = await self.spawner.start(request, self._shims.pop(process_id, None), identified)
        except CommandsUnavailable as error:
            return str(error)
        except RuntimeClosed:
            raise Leaving from None
        return started.reason if isinstance(started, SpawnFailed) else started

    # ------------------------------------------------------------------ output

    async def read_output(
        self, row: ProcessRow, query: OutputQuery, again: Callable[[], Awaitable[ProcessRow | None]]
    ) -> AsyncGenerator[OutputChunk, None]:
        """What a command wrote, from an offset on: all that there is, or with `follow` until its end."""
        try:
            async with contextlib.aclosing(self._chunks(row, query, again)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except OSError as error:
            raise CommandsUnavailable(
                f"the output of command {row.id!r} cannot be read just now: {error.strerror or error}; try again"
            ) from error

    async def _chunks(
        self, row: ProcessRow, query: OutputQuery, again: Callable[[], Awaitable[ProcessRow | None]]
    ) -> AsyncGenerator[OutputChunk, None]:
        job = await self._begun_job(row)
        while job is None and query.follow and row.live:
            await asyncio.sleep(0.05)
            row = await again() or row
            job = await self._begun_job(row)
        if job is None:
            yield _nothing(row, query)
            return
        after = query.after
        if query.follow:
            async with contextlib.aclosing(follow(job, query.stream, after, query.limit)) as chunks:
                async for chunk in chunks:
                    yield OutputChunk(*chunk)
            return
        while True:
            chunk = await asyncio.to_thread(read, job, query.stream, after, query.limit)
            if chunk.data or after == query.after:
                yield OutputChunk(*chunk)
            if not chunk.data or chunk.next == chunk.total:
                return
            after = chunk.next

    async def _begun_job(self, row: ProcessRow) -> Job | None:
        """The folder of a command that has begun, or has ended; one without a lock looks ended before its shim came."""
        job = self._find(row)
        if job is None or not await asyncio.to_thread(job.folder.is_dir):
            return None
        known = not row.live or "pid" in row.record.external_ref
        return job if known or await asyncio.to_thread(job.held) else None

    def _find(self, row: ProcessRow) -> Job | None:
        if not self.knows(row.registration):
            raise CommandsUnavailable(f"command {row.id!r} is on host {row.registration.definition!r}: read it there")
        name = _job_name(row.record.external_ref)
        return None if name is None else Job(self.jobs() / name)

    # ------------------------------------------------------------------ keeping house

    async def sweep(self, young: float = YOUNG) -> int:
        """Delete the folders of commands that were pruned, or that ended and whose session was deleted. How many."""
        if not isinstance(self.store, JobFolders) or not is_supported():
            return 0
        count = 0
        for folder in await asyncio.to_thread(_folders, self.store.jobs_folder(make=False)):
            if await self._is_over(folder, young) and await asyncio.to_thread(Job(folder).remove):
                count += 1
        return count

    async def _is_over(self, folder: Path, young: float) -> bool:
        process_id, age = await asyncio.to_thread(_named_by, folder)
        row = None if process_id is None else await self.store.process(process_id)
        if row is None or row.pruned is not None:
            return row is not None or age >= young
        if _job_name(row.record.external_ref) != folder.name:
            return age >= young
        if row.live or row.holder is None:
            return False
        session = await self.store.session(row.holder)
        return session is not None and session.deleted


class CommandRun:
    """One command that this worker owns, from its claim to its end, or to where it is left."""

    def __init__(self, engine: CommandEngine, run: EngineRun) -> None:
        self._engine, self._run = engine, run
        self._command = msgspec.convert(run.registration.input, Command)
        self._started: StartedCommand | None = None
        self._identifying: asyncio.Task[None] | None = None

    async def go(self) -> ProcessOutcome:
        """Bring it to its end. While no file can be opened here, its command goes on, and is adopted again then."""
        told = False
        while True:
            try:
                return await self._go()
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                if not told:
                    log.warning("command %s cannot be watched for the moment: %s", self._run.row.id, error)
                    told = True
            await asyncio.sleep(EXHAUSTED_SECONDS)
            if self._run.leaving:
                raise Leaving

    async def _go(self) -> ProcessOutcome:
        run = self._run
        try:
            name = _job_name(run.record.external_ref)
            new = name is not None and self._engine.is_new(run.registration.id, name)
            job = await (self._begin(named=new) if new or name is None else self._adopt())
        except CancelRequested as asked:
            return self._never_begun(asked.request)
        if not isinstance(job, Job):
            return job
        self._engine.has_begun(run.registration.id)
        run.rest()
        try:
            status = await run.guard(self._watched(job))
        except CancelRequested as asked:
            return await self._killed(job, asked.request)
        except Leaving:
            if not self._outlives_us:
                await end(job, "its Runtime was left, and its store was in memory", self._command.grace, self._started)
            raise
        return await self._lost(job) if status is None else await self._ended(job, status)

    @property
    def _outlives_us(self) -> bool:
        store = self._engine.store
        return isinstance(store, JobFolders) and store.outlives_us

    # ------------------------------------------------------------------ beginning

    async def _begin(self, named: bool = False) -> Job | ProcessOutcome:
        """Name a job on disk, unless it is, begin the command there, and write down who it is."""
        run, engine = self._run, self._engine
        run.check()
        jobs = engine.jobs()
        if not named:
            await run.set_external_ref(engine.new_reference())
        await run.begin()
        run.check()
        reference = run.record.external_ref
        job = Job(jobs / reference["job"])
        token = reference["token"]
        try:
            started = await engine.spawn(run.registration.id, self._command, job, token, self._identify_soon)
        except BaseException:  # also a cancellation: the folder says who it is
            await _stopped(self._identifying)
            raise
        if self._identifying is not None:
            await self._identifying
        if isinstance(started, str):
            return Success(msgspec.to_builtins(self._result("spawn_failed", reason=started)))
        if self._identifying is None:
            await self._identified(started)
        return job

    def _identify_soon(self, started: StartedCommand) -> None:
        """Write down who it is while its program is being run."""
        self._identifying = asyncio.create_task(self._identified(started), name=f"identity of {self._run.row.id}")

    async def _identified(self, started: StartedCommand) -> None:
        self._started, run = started, self._run
        known = run.record.external_ref
        who = {
            "pid": started.leader.pid, "pid_start": started.leader.start, "shim": started.shim.pid,
            "shim_start": started.shim.start, "namespace": started.namespace, "started": started.time,
            "folder": started.folder,
        }  # fmt: skip
        if any(known.get(name) != value for name, value in who.items()):
            await run.set_external_ref(known | who)

    # ------------------------------------------------------------------ adopting

    async def _adopt(self) -> Job | ProcessOutcome:
        """The job that an earlier run named: watched on, ended, lost, or never begun."""
        run, engine = self._run, self._engine
        reference = run.record.external_ref
        job = Job(engine.jobs() / str(_job_name(reference)))
        if reference.get("store") != engine.store.identity():
            return await self._gone(job, "unknown: it was begun from another store, of which this one is a copy")
        if reference.get("boot") != engine.boot:
            return await self._gone(job, "the machine was started again since: nothing of it can live")
        self._started = _who(reference)
        if self._started is not None and not await asyncio.to_thread(_is_folder, job.folder):
            return await self._gone(job, "unknown: its job folder is gone: nothing was looked for, nothing was killed")
        # The lock first: a shim that is gone has written all that it ever will.
        while not job.held() and job.status() is None:
            if self._started is not None or job.beginning() is Beginning.STARTED:
                return await self._lost(job)
            # Also where there is no folder yet: the worker that named it may only be stopped, and go on to make it.
            if await asyncio.to_thread(job.void):
                return await self._begin()
            await asyncio.sleep(0.01)  # a shim came meanwhile
        if self._started is None and (started := job.started()) is not None:
            await self._identified(started)
        return job

    async def _gone(self, job: Job, why: str) -> ProcessOutcome:
        """It cannot be found any more. What it left in its folder is its result, as far as that goes."""
        status = await asyncio.to_thread(_status, job)
        if status is not None and status.end in ENDS:
            return await self._ended(job, status)
        return await self._given_up(job, Cleanup(verified=not why.startswith("unknown"), note=why), why)

    async def _lost(self, job: Job) -> ProcessOutcome:
        """Its shim died without a status: end what is left of it, and only then say so."""
        remains = await end_lost(job, self._command.grace, known=self._started)
        return await self._remaining(job, remains)

    async def _remaining(self, job: Job, remains: Remains, why: str = "its shim was killed") -> ProcessOutcome:
        why = remains.note or f"{why}; {len(remains.processes)} of its processes were found and ended"
        found = len(remains.processes)
        left = len(remains.survivors)
        cleanup = Cleanup(found, found - left, left, remains.verified, _named(remains.processes), remains.note)
        return await self._given_up(job, cleanup, why)

    async def _given_up(self, job: Job, cleanup: Cleanup, why: str) -> ProcessOutcome:
        result = await self._with_output(job, self._result("lost", reason=why, cleanup=cleanup, job=job))
        run = self._run
        evidence = Evidence("engine_gave_up", run.host.clock.now(), run.row.owner, why)
        return Abandoned(evidence, msgspec.to_builtins(result))

    # ------------------------------------------------------------------ watching

    async def _watched(self, job: Job) -> Status | None:
        """Wait for its end. Meanwhile, bring it what is written to it, and tell what is watched for."""
        command, watch = self._command, self._engine.watch
        pump = asyncio.ensure_future(self._pump(job))
        told = None if watch is None or command.watch is None else asyncio.ensure_future(watch(self._run, job, command))
        alarm = asyncio.ensure_future(self._tell_first_stderr(job)) if command.held else None
        try:
            status = await job.wait(self._started)
            if told is not None:
                await asyncio.wait({told})  # it ends by itself, when all is told; a cancel ends it too
            return status
        finally:
            await _stopped(pump, told, alarm)

    async def _tell_first_stderr(self, job: Job) -> None:
        """Open the turn that is held for it when it first writes to stderr, and again after each adoption: the turn
        knows what its model was shown."""
        async with contextlib.aclosing(job.news()) as news:
            async for _, stderr in news:
                if stderr:
                    await self._run.emit(FIRST_STDERR)
                    return

    async def _pump(self, job: Job) -> None:
        """Bring signals to the command in their order. Its shim knows those which it has applied before."""
        async for each in self._run.signals():
            try:
                answer = await self._deliver_patiently(job, each)
            except (TimedOut, InvalidInput) as error:
                log.warning("signal %d of command %s was not delivered: %s", each.sequence, self._run.row.id, error)
            else:
                if answer is ShimAnswer.EXITED:
                    return

    async def _deliver_patiently(self, job: Job, each: Signal) -> ShimAnswer:
        while True:
            try:
                return await self._deliver(job, each)
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
            await asyncio.sleep(EXHAUSTED_SECONDS)

    async def _deliver(self, job: Job, each: Signal) -> ShimAnswer:
        payload = each.payload if isinstance(each.payload, dict) else {}
        if each.name == STDIN:
            return await self._write_stdin(
                job, each.sequence << PIECES, stdin_bytes(payload), payload.get("close") is True
            )
        if each.name == RESIZE:
            return await job.resize(int(payload["rows"]), int(payload["columns"]))
        if each.name == RELEASE:
            await self._run.set_external_ref(self._run.record.external_ref | {"released": True})
            await self._run.emit(RELEASED)
            return ShimAnswer.OK
        if each.sequence <= self._applied():
            return ShimAnswer.REPEATED
        answer = await job.signal(signal.Signals[f"SIG{payload.get('signal', 'INT')}"])
        await self._run.set_external_ref(self._run.record.external_ref | {"interrupted": each.sequence})
        return answer

    async def _write_stdin(self, job: Job, number: int, data: bytes, close: bool) -> ShimAnswer:
        """Write bytes piece by piece, under numbers that only grow. A command that does not read is waited for."""
        answer = ShimAnswer.OK
        for at in range(0, len(data), STDIN_ROOM):
            number += 1
            waiting = True
            while waiting:
                try:
                    answer = await job.write_stdin(number, data[at : at + STDIN_ROOM])
                    waiting = False
                except TimedOut:
                    log.info("command %s does not read its stdin; it is waited for", self._run.row.id)
        return await job.close_stdin(number + 1) if close else answer

    def _applied(self) -> int:
        """The last signal that was passed on to its process group: a shim remembers only what is written to stdin."""
        return int(self._run.record.external_ref.get("interrupted", 0))

    # ------------------------------------------------------------------ ending

    async def _killed(self, job: Job, request: CancelRequest) -> ProcessOutcome:
        """It was asked to end. What its shim wrote decides: it may have ended before."""
        found = await end(job, _why(request), self._command.grace, self._started)
        if isinstance(found, Status):
            return await self._ended(job, found, request)
        outcome = await self._remaining(job, found)
        value = outcome.value if isinstance(outcome, Abandoned) else None
        return Cancelled(request.by, request.reason, True, value)

    def _never_begun(self, request: CancelRequest) -> ProcessOutcome:
        result = self._result("killed", reason=f"{_why(request)}, before it had begun")
        return Cancelled(request.by, request.reason, False, msgspec.to_builtins(result))

    async def _ended(self, job: Job, status: Status, request: CancelRequest | None = None) -> ProcessOutcome:
        if status.end not in ENDS:
            remains = await end_lost(job, self._command.grace, known=self._started)
            return await self._remaining(job, remains, f"its shim failed: {status.reason}")
        result = await self._with_output(job, self._result_of(job, status))
        request = request or self._run.record.cancel
        if request is not None and status.end == "killed" and status.reason.startswith(CANCELLED):
            return Cancelled(request.by, request.reason, False, msgspec.to_builtins(result))
        return Success(msgspec.to_builtins(result))

    def _result_of(self, job: Job, status: Status) -> CommandResult:
        known: Any = status.end
        left = status.found - status.survivors if status.strays == "left" else 0
        cleanup = Cleanup(
            status.found,
            0 if status.strays == "left" else status.found - status.survivors,
            left or status.survivors,
            not status.survivors and status.strays != "left",
            _named(status.processes),
        )
        number = status.signal
        return self._result(
            known,
            reason=status.reason,
            cleanup=cleanup,
            job=job,
            exit_code=status.code,
            signal=None if number is None else signal_name(number),
            signal_number=number,
            timed_out=known == "timed_out",
            ended_at=_stamp(status.ended),
            duration_ms=round(status.duration * 1000),
            dropped_bytes=status.dropped,
            drain="complete" if status.drained else "incomplete",
            artifact_error=status.error,
        )

    def _result(
        self, status: Any, *, reason: str, cleanup: Cleanup = NOTHING_FOUND, job: Job | None = None, **more: Any
    ) -> CommandResult:
        command, started = self._command, self._started
        if started is None and job is not None:
            with contextlib.suppress(OSError, InternalError):
                started = job.started()
        who: dict[str, Any] = {}
        if started is not None:
            pid = started.leader.pid
            who = {"pid": pid, "process_group_id": pid, "started_at": _stamp(started.time)}
        return CommandResult(
            self._run.registration.id,
            status,
            command.display,
            command.cwd,
            reason=reason,
            cleanup=cleanup,
            pty=command.pty is not None,
            **who,
            **more,
        )

    async def _with_output(self, job: Job, result: CommandResult) -> CommandResult:
        """The result with head and tail of what it wrote. It arrives also where that cannot be read or kept."""
        settings, run = self._engine.settings, self._run
        try:
            summary = await summarize(job, settings.head, settings.tail)
        except (OSError, PerdureError) as error:
            return replace(result, artifact_error=result.artifact_error or f"its output cannot be read: {error}")
        found: dict[str, Any] = {}
        for name in ("stdout", "stderr"):
            stream = getattr(summary, name)
            text = f"{stream.head}\n…\n{stream.tail}" if stream.truncated else stream.head
            found |= {
                name: clean_text(text),
                f"{name}_truncated": stream.truncated,
                f"{name}_bytes": stream.bytes,
                f"{name}_lines": stream.lines,
                f"{name}_sha256": stream.sha256,
                f"{name}_path": str(job.folder / name) if stream.bytes else "",
            }
            if stream.truncated:
                if not self._outlives_us and stream.bytes > MEMORY_ARTIFACT:
                    found["artifact_error"] = f"{name} is too large to be kept as an artifact in memory"
                    continue
                try:
                    digest, size = await run.journal.keep_file(str(job.folder / name), patient=False)
                    if isinstance(blobs := self._engine.store.blobs, SharesFiles):
                        await blobs.share(digest, str(job.folder / name))
                except (StoreError, InvalidInput, OSError) as error:
                    found["artifact_error"] = f"{name} could not be kept as an artifact: {error}"
                else:
                    artifact = Artifact(f"{run.registration.id}.{name}", digest, size)
                    run.journal.event(Event(ARTIFACT, msgspec.to_builtins(artifact), run.host.clock.now()))
        return replace(result, **found)


# ---------------------------------------------------------------------- parts


def _why(request: CancelRequest) -> str:
    """A cancel request in one line, as its shim writes it down."""
    why = f"{CANCELLED} by {request.by or 'somebody'}" + (f": {request.reason}" if request.reason else "")
    return " ".join(why.split())[:LABEL]


def _own_folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise InvalidCommand(f"the folder of this program cannot be used ({error.strerror}): say cwd=") from None


def _least(one: Any, other: Any) -> Any:
    return min((each for each in (one, other) if each is not None), default=None)


def _usual_folder(sandbox: Confinement | None) -> str:
    return sandbox.write[0] if sandbox is not None and sandbox.write else _own_folder()


def _session_of(registration: Registration) -> str:
    origin = registration.origin
    return origin.session_id if isinstance(origin, SessionOrigin) else ""


def _job_name(reference: Any) -> str | None:
    """The name of a job folder in a reference, which anybody may have written: no path, and nothing hidden."""
    name = reference.get("job") if isinstance(reference, dict) else None
    return name if isinstance(name, str) and name.isalnum() else None


def _who(reference: Mapping[str, Any]) -> StartedCommand | None:
    """Who runs a command, by what its owner wrote down; None if it had not yet."""
    try:
        return StartedCommand(
            Identity(reference["shim"], reference["shim_start"]),
            Identity(reference["pid"], reference["pid_start"]),
            reference["boot"],
            reference["namespace"],
            reference["token"],
            reference["started"],
            reference.get("folder", 0),
        )
    except KeyError:
        return None


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _folders(jobs: str) -> list[Path]:
    """The job folders of a store; none where no command was ever run."""
    try:
        with os.scandir(jobs) as found:
            return [Path(each.path) for each in found if each.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _named_by(folder: Path) -> tuple[str | None, float]:
    """The process that a job folder names, and how old the folder is, in seconds."""
    age = 0.0
    with contextlib.suppress(OSError):
        age = time.time() - folder.stat().st_mtime
    return Job(folder).process_id(), age


def _status(job: Job) -> Status | None:
    with contextlib.suppress(OSError):
        return job.status()
    return None


def _nothing(row: ProcessRow, query: OutputQuery) -> OutputChunk:
    """What there is to read of a command without a folder: nothing yet, or nothing any more."""
    if query.after:
        raise InvalidInput(f"offset {query.after} is not within the 0 bytes of {query.stream}")
    if not row.live and _job_name(row.record.external_ref) is not None:
        raise CommandsUnavailable(f"the output of command {row.id!r} is not here any more: it was removed")
    return OutputChunk(b"", 0, 0, not row.live)


def _named(processes: tuple[Found, ...]) -> tuple[str, ...]:
    return tuple([clean_text(f"{each.pid} {each.name}") for each in processes])


def _stamp(milliseconds: int) -> str:
    at = datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def stdin_bytes(payload: Mapping[str, Any]) -> bytes:
    """The bytes that a signal brings to stdin."""
    try:
        return str(payload.get("text", "")).encode() + base64.b64decode(payload.get("base64", ""), validate=True)
    except binascii.Error as error:
        raise InvalidInput(f"signal stdin: base64 cannot be read: {error}") from None


async def _until(begun: asyncio.Future[None] | None) -> None:
    if begun is not None:
        await asyncio.shield(begun)


def _is_done(begun: asyncio.Future[None] | None) -> bool:
    return begun is None or begun.done()


async def _stopped(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel these, and wait for them."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    for found in await asyncio.gather(*left, return_exceptions=True):
        if isinstance(found, Exception):
            log.warning("what goes on beside a command ended with %s: %s", type(found).__name__, found)
