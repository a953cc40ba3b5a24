"""The one way by which tools of a workspace run programs: a model's commands, git, ripgrep, test runners.

    what is to run → the policy: deny, ask, allow → the confinement of the workspace → its environment → a command

A program is a durable command of the session, under an id that derives from the call: a call that is attempted again
after a crash finds the command that runs or has ended, and asks neither the policy nor the machine a second time.

The policy is asked when a call is prepared, because a person may have to approve it before it begins, and again before
anything is spawned: it may have changed since. What a person approved is in the payload of the call.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Literal, Protocol, cast

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import PerdureError, StoreError, ToolError, UnknownProcess
from perdure.model.codec import clean_text, model_text
from perdure.model.command import CommandOptions
from perdure.model.process import WakePolicy
from perdure.model.sandbox import Confinement
from perdure.model.tool import PreparedCall
from perdure.ports.tool import CommandHandle, StartOptions
from perdure.processes.command import prepared
from perdure.tools.context import ToolContext
from perdure.tools.define import Tool
from perdure.workspace.approvals import digest, hidden, question
from perdure.workspace.paths import Paths, telling
from perdure.workspace.policy import CommandLine, Policy, Verdict

ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",  # messages that models and parsers know, whatever the host speaks
    "TERM": "dumb",
    "NO_COLOR": "1",
    "PAGER": "cat",  # nothing waits for a key that nobody presses
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "DEBIAN_FRONTEND": "noninteractive",
}
"""What every program of a workspace has besides what commands inherit."""


SEARCHED = ("PATH", "LD_LIBRARY_PATH")
"""Variables by which programs and their libraries are found."""

PAYLOAD = "policy"
"""In the payload of a call: what the policy said when it was prepared, and the digest of what it was asked about. After
"ask", a person has approved that."""


def _shell() -> str:
    """What models write is written for bash."""
    return "bash" if shutil.which("bash") else "sh"


class Program(Struct, frozen=True):
    """What a tool is about to run: a list of arguments, or a line for a shell. `cwd` is a path of the workspace.

    `made_by`: a model wrote it, or a tool made it of what a model wrote, with arguments that were checked. `runs`: what
    is run in its place, where a tool needs more to run it safely than people need to read.
    """

    command: tuple[str, ...] | str
    cwd: str = "."
    made_by: Literal["model", "tool"] = "model"
    runs: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        """The arguments; of a line, those of the shell that reads it."""
        if self.runs:
            return self.runs
        return (_shell(), "-c", self.command) if isinstance(self.command, str) else self.command

    @property
    def text(self) -> str:
        """As people read it."""
        return self.command if isinstance(self.command, str) else shlex.join(self.command)


class ProgramVerdict(Struct, frozen=True):
    """What the policy says about a program. `approves` is a digest of what exactly it was asked about."""

    verdict: Verdict
    line: CommandLine
    approves: str

    @property
    def reason(self) -> str:
        """What decided, and what the command may do, for a model and for those who watch: without secrets."""
        # Each part by itself: `credential_read: .env` would read as a credential and its value.
        told = [hidden(self.verdict.because), *[f"{each.label}: {hidden(each.reason)}" for each in self.verdict.risks]]
        return "; ".join([each for each in told if each])


class SpawnOptions(Struct, frozen=True):
    """How a program is run. `key` names it in its call. `listed`: it is a command of the session, which its tools show
    and the session's end ends; any other ends with its turn and is nobody's to see."""

    key: str
    label: str = ""
    wake: WakePolicy = "none"
    listed: bool = True
    stdin: bool = False
    timeout: float | None = None
    output_limit: int | None = None
    env: Mapping[str, str] = {}


class ToolPart(Protocol):
    """Some tools of a workspace that run programs."""

    @property
    def tools(self) -> Mapping[str, Tool[..., Any]]: ...

    async def program(self, name: str, kwargs: Mapping[str, Any], ctx: ToolContext[Any]) -> Program | None:
        """What a call of one of them is about to run; None where it runs nothing. It has no effect."""
        ...


class Programs:
    """Runs programs for the tools of one workspace."""

    def __init__(self, paths: Paths, policy: Policy, confine: Callable[[str | None], Confinement | None]) -> None:
        self.paths, self._policy, self._confine = paths, policy, confine
        self._sparing: dict[str | None, Paths] = {}

    def sparing(self, store: str | None) -> Paths:
        """The paths of the workspace without those of a store."""
        found = self._sparing.get(store)
        if found is None:
            found = self._sparing[store] = self.paths.sparing(store)
        return found

    def of_host(self) -> dict[str, str]:
        """Variables with which programs are found where nobody in the workspace could have put them. A tool runs its
        own programs unasked, and a folder of the PATH may be in a root."""
        found = dict[str, str]()
        for name in SEARCHED:
            folders = [each for each in os.environ.get(name, "").split(":") if each[:1] == "/"]
            found[name] = ":".join([each for each in folders if not self.paths.changeable(each)])
        return {**found, "PATH": found["PATH"] or os.defpath}

    def folder(self, cwd: str, store: str | None) -> str:
        """The folder of a program, without links. Raises ToolError where it is none of the workspace."""
        with self.sparing(store).locate(cwd) as place, telling(cwd):
            if not stat.S_ISDIR(os.stat(place.name, dir_fd=place.folder, follow_symlinks=False).st_mode):
                raise ToolError(f"{cwd} is no folder: give the folder it is in", code="not_a_folder")
            return place.path

    def judge(self, program: Program, ctx: ToolContext[Any], env: Iterable[str] = ()) -> ProgramVerdict:
        """What the policy says about a program. Raises ToolError where it is denied."""
        line, store = program.command, ctx.store_location
        asked = CommandLine(
            () if isinstance(line, str) else line,
            line if isinstance(line, str) else "",
            self.folder(program.cwd, store),
            self.paths.roots,
            tuple(env),
            store,
            program.made_by,
        )
        # Approved is what is run, and how: by which shell, with which variables, in which sandbox.
        approves = digest(replace(asked, env=()), program.argv, self._confine(store), ENVIRONMENT)
        found = ProgramVerdict(self._policy.judge(asked), asked, approves)
        if found.verdict.decision == "deny":
            raise ToolError(
                f"the policy of this workspace denies that, nothing was run: {found.reason}", code="denied_by_policy"
            )
        return found

    def prepare(self, call: PreparedCall, program: Program, ctx: ToolContext[Any]) -> PreparedCall:
        """A call that is to run a program, as far as the policy lets it begin."""
        found = self.judge(program, ctx)
        payload = {**(call.payload or {}), PAYLOAD: [found.verdict.decision, found.approves]}
        if found.verdict.decision != "ask":
            return replace(call, payload=payload)
        return replace(call, payload=payload, ask=question(found.line, found.verdict), approves=found.approves)

    async def run(self, ctx: ToolContext[Any], program: Program, options: SpawnOptions) -> CommandHandle:
        """Run a program, or find the one that an earlier attempt of this call has begun."""
        with refusals():
            return await self.begun(ctx, options.key) or await self._start(ctx, program, options)

    async def begun(self, ctx: ToolContext[Any], key: str) -> CommandHandle | None:
        """The program that an earlier attempt of this call has begun."""
        try:
            return await ctx.handles.command_of(f"{ctx.call_id}.{key}")
        except UnknownProcess:
            return None

    async def _start(self, ctx: ToolContext[Any], program: Program, options: SpawnOptions) -> CommandHandle:
        found = self.judge(program, ctx, options.env)
        approved = isinstance(ctx.payload, dict) and ctx.payload.get(PAYLOAD) == ["ask", found.approves]
        if found.verdict.decision == "ask" and not approved:
            raise ToolError(
                f"the policy of this workspace asks for approval now, nothing was run: {found.reason}; call it again",
                code="approval_needed",
            )
        asked: CommandOptions = {
            "cwd": self.folder(program.cwd, ctx.store_location),
            "env": {**ENVIRONMENT, **options.env, **(self.of_host() if program.made_by == "tool" else {})},
            "stdin": options.stdin,
            "timeout": options.timeout,
            "output_limit": options.output_limit,
            "sandbox": self._confine(ctx.store_location),
        }
        start = StartOptions(
            options.key,
            clean_text(hidden(options.label)),  # events and lists of processes show it
            options.wake,
            grant=options.listed,
            parent_end="abandon" if options.listed else "cancel",
            owner="session" if options.listed and ctx.session_id else "turn",
        )
        return cast("CommandHandle", await ctx.handles.start(prepared(program.argv, asked), {}, start))


@contextlib.contextmanager
def refusals() -> Generator[None, None, None]:
    """Refusals of the runtime as what a model is told. A store in trouble is none: the call is attempted again."""
    try:
        yield
    except StoreError:
        raise
    except PerdureError as error:
        raise ToolError(model_text(error), code=error.code) from None
