"""What exists of a command, an OS process that we started: what was to be run, how it ended, and which limits hold.

A `Command` is the input of a process of kind "command", and is on disk before anything is spawned; a `CommandResult` is
its value. Exit codes other than 0, signals, timeouts and limits are results. Nothing here touches the OS.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias, TypedDict, get_args

from msgspec import Struct

from perdure.errors import InvalidCommand, InvalidDefinition, InvalidInput, quoted
from perdure.model import validate
from perdure.model.monitor import Watch, read_watch
from perdure.model.process import WakePolicy
from perdure.model.sandbox import Confinement, read_confinement

COMMAND_KIND = "command"
RESULT = "command_result"
"""By which the JSON of a result is known, where its type is not."""

CommandStatus: TypeAlias = Literal["exited", "signaled", "killed", "timed_out", "lost", "spawn_failed"]
"""How a command ended: by itself, by a signal of others, killed by us (a cancel, a limit), because its time was over,
unseen while no Runtime and no shim watched it, or never begun."""

Stream: TypeAlias = Literal["stdout", "stderr", "combined"]
Strays: TypeAlias = Literal["kill", "leave"]
CommandOwner: TypeAlias = Literal["turn", "session", "process", "detached"]
"""What a command ends with: the turn or process of the tool that started it, its session, the durable function that
started it, or nothing."""

MOST_ARGUMENTS = 32_768
LONGEST_ARGUMENT = 131_071
"""Bytes: what Linux takes as one argument, or as one variable with its value."""
ARGUMENT_BYTES = 1_048_576
"""Bytes of all arguments and variables together. Linux takes a quarter of the stack limit, which is usually 2 MiB."""
LONGEST_WAIT = 366 * 86_400.0
MOST_CELLS = 10_000
GRACE = 2.0
"""Seconds between TERM and KILL."""
FIRST_STDERR, RELEASED = "held.stderr", "held.released"
HELD = "held."
"""How the events begin that open a turn which is held for the command: it has written to stderr for the first time, or
is not to be waited for any more."""


class Command(Struct, frozen=True, gc=False, omit_defaults=True):
    """What is to be run. `env` is set besides what commands inherit; `grants` are names of variables whose values are
    never stored. `pty`: rows and columns of a terminal in place of pipes. `timeout` and `silence` are seconds,
    `output_limit` is bytes of both streams. `strays`: what becomes of processes that its leader leaves behind.
    `sandbox`: what it may do to the machine; None is all that its user may. `held`: its turn may be held for it."""

    argv: tuple[str, ...]
    cwd: str = ""
    env: dict[str, str] = {}
    grants: tuple[str, ...] = ()
    stdin: bool = False
    pty: tuple[int, int] | None = None
    timeout: float | None = None
    silence: float | None = None
    output_limit: int | None = None
    grace: float = GRACE
    strays: Strays = "kill"
    watch: Watch | None = None
    sandbox: Confinement | None = None
    held: bool = False

    @property
    def display(self) -> str:
        """The arguments, joined by blanks: for people, not for a shell."""
        return " ".join(self.argv)


class Cleanup(Struct, frozen=True, gc=False, omit_defaults=True):
    """What was found of a command's tree when it ended or was killed, and what became of that.

    `found`, `killed` and `left` count processes besides the leader. `verified`: none of them lives any more.
    """

    found: int = 0
    killed: int = 0
    left: int = 0
    verified: bool = True
    processes: tuple[str, ...] = ()
    """Some of them, as `pid name`."""
    note: str = ""


class CommandResult(Struct, frozen=True, gc=False, omit_defaults=True, tag_field="type", tag=RESULT):
    """How a command ended.

    `stdout` and `stderr` are the head and the tail of what it wrote, as text; `…_truncated` says that something is left
    out between them. `…_bytes`, `…_lines` and `…_sha256` are of the exact bytes, which `handle.output` reads, while the
    command runs and after it. With a terminal there is one stream, `stdout`. `drain` "incomplete": a pipe was still
    held open, and was read no longer. `artifact_error`: the exact bytes could not be kept, and why.
    """

    command_id: str
    status: CommandStatus
    command: str = ""
    cwd: str = ""
    exit_code: int | None = None
    signal: str | None = None
    signal_number: int | None = None
    reason: str = ""
    timed_out: bool = False
    pid: int | None = None
    process_group_id: int | None = None
    started_at: str | None = None
    ended_at: str | None = None
    duration_ms: int = 0
    stdout: str = ""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_lines: int = 0
    stderr_lines: int = 0
    stdout_sha256: str = ""
    stderr_sha256: str = ""
    stdout_path: str = ""
    stderr_path: str = ""
    dropped_bytes: int = 0
    drain: Literal["complete", "incomplete"] = "complete"
    cleanup: Cleanup = Cleanup()
    artifact_error: str = ""
    pty: bool = False

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with code 0."""
        return self.status == "exited" and self.exit_code == 0

    @property
    def truncated(self) -> bool:
        return self.stdout_truncated or self.stderr_truncated

    @property
    def byte_count(self) -> int:
        return self.stdout_bytes + self.stderr_bytes

    @property
    def line_count(self) -> int:
        return self.stdout_lines + self.stderr_lines


class CommandSettings(Struct, frozen=True):
    """What holds for all commands of a Runtime: `Runtime(commands=CommandSettings(…))`.

    `per_session` and `total` are how many may run at once, counted over all Runtimes of the store; `output_bytes` and
    `seconds` are the most that one may ask for, and what one has that asks for nothing. `session_output_bytes` is how
    much the running commands of one session may have written together, of all Runtimes of the store on this machine:
    another one gets what is left of it.
    `inherit` are names of variables that commands inherit besides the usual ones; `head` and `tail` the bytes of each
    stream in a result.
    """

    per_session: int = 64
    total: int = 512
    output_bytes: int | None = None
    session_output_bytes: int | None = None
    seconds: float | None = None
    inherit: tuple[str, ...] = ()
    head: int = 4096
    tail: int = 4096

    def __post_init__(self) -> None:
        for name in ("per_session", "total"):
            validate.count(getattr(self, name), name, 1, InvalidDefinition)
        for name in ("head", "tail"):
            if validate.count(getattr(self, name), name, 0, InvalidDefinition) > 1_000_000:
                raise InvalidDefinition(f"{name}={getattr(self, name)} is too much for a result: 1,000,000 is the most")
        for name in ("output_bytes", "session_output_bytes"):
            if getattr(self, name) is not None:
                validate.count(getattr(self, name), name, 1, InvalidDefinition)
        validate.seconds(self.seconds, "seconds", InvalidDefinition)
        for name in validate.several(self.inherit, "inherit", InvalidDefinition):
            if not _is_variable(name):
                raise InvalidDefinition(f"inherit: {quoted(name)} is no name of a variable")


AtLimit: TypeAlias = Literal["release", "cancel"]


class CommandHold(Struct, frozen=True):
    """For how long a turn waits whose model has answered while commands of it run: `Agent(wait_for_commands=…)`.

    Each command is waited for `seconds` from its start. Then it is not waited for any longer ("release": it goes on, or
    ends with the turn if that owns it), or it is ended, and the model is told how it ended ("cancel").
    """

    seconds: float
    at_limit: AtLimit = "release"

    def __post_init__(self) -> None:
        if validate.seconds(self.seconds, "wait_for_commands", InvalidDefinition) is None:
            raise InvalidDefinition("wait_for_commands: seconds=None is not usable: give a number")
        if self.at_limit not in get_args(AtLimit):
            known = ", ".join(get_args(AtLimit))
            raise InvalidDefinition(f"at_limit={quoted(self.at_limit)} is not usable: give one of {known}")


class CommandOptions(TypedDict, total=False):
    """What may be said about a command besides its arguments; each by name.

    `cwd`: its folder; that of the host if it is left out. `env`: variables that it has besides those that all commands
    inherit; they are stored. `grants`: names of variables of the host that it has too, or a mapping with values; these
    are not stored. `stdin`: it may be written to, with signal "stdin"; otherwise it reads an end. `pty`: rows and
    columns of a terminal. `timeout`, `silence`: seconds after which it is killed, in all or without output.
    `output_limit`: bytes after which it is killed. `grace`: seconds between TERM and KILL. `strays`: "kill" or "leave"
    what it leaves behind. `owner`: what it ends with. `key`: its name among the commands of the same asker; asked for
    again, it is the same command. `wake`: how its session hears of its end. `watch`: what it hears of its output.
    `sandbox`: what it may do to the machine, as `workspace.confinement(…)` says it.
    """

    cwd: str
    env: Mapping[str, str]
    grants: Iterable[str] | Mapping[str, str]
    stdin: bool
    pty: tuple[int, int] | bool | None
    timeout: float | None
    silence: float | None
    output_limit: int | None
    grace: float
    strays: Strays
    owner: CommandOwner
    key: str | None
    label: str
    wake: WakePolicy
    watch: Watch | Mapping[str, Any] | None
    sandbox: Confinement | None


NO_COMMAND_OPTIONS: CommandOptions = {}


def read_command(argv: object, options: Mapping[str, Any]) -> tuple[Command, dict[str, str]]:
    """A command from what a caller gave, and the values that were granted to it. Raises InvalidCommand."""
    unknown = next((each for each in options if each not in CommandOptions.__annotations__), None)
    if unknown is not None:
        known = ", ".join(CommandOptions.__annotations__)
        raise InvalidCommand(f"a command has no {unknown}=: there are {known}, background_after")
    arguments = _arguments(argv)
    env = _variables(options.get("env", {}), "env")
    granted = options.get("grants", ())
    values = _variables(granted, "grants") if isinstance(granted, Mapping) else {}
    names = tuple(dict.fromkeys(values or validate.several(granted, "grants", InvalidCommand)))
    for name in names:
        if not _is_variable(name):
            raise InvalidCommand(f"grants: {quoted(name)} is no name of a variable")
        if name in env:
            raise InvalidCommand(f"{name} is in env, which is stored, and in grants, which are not: leave one out")
    size = sum(len(each.encode()) + 1 for each in (*arguments, *env, *env.values(), *names, *values.values()))
    if size > ARGUMENT_BYTES:
        raise InvalidCommand(
            f"its arguments and variables have {size:,} bytes, {ARGUMENT_BYTES:,} are the most: put them in a file"
        )
    if options.get("key") == "":
        raise InvalidCommand(
            "key='' is not usable: leave it out, or give a name that is the same when it is asked again"
        )
    if options.get("watch") is not None and options.get("wake") == "none":
        raise InvalidCommand("watch= says what a session is told, and wake='none' that it hears nothing: leave one out")
    strays = options.get("strays", "kill")
    if strays not in get_args(Strays):
        raise InvalidCommand(f"strays={quoted(strays)} is not usable: say 'kill' or 'leave'")
    limit, grace = options.get("output_limit"), _limit(options, "grace", 0.0)
    return Command(
        arguments,
        _folder(options.get("cwd")),
        env,
        names,
        validate.flag(options.get("stdin", False), "stdin", InvalidCommand),
        _terminal(options.get("pty")),
        _limit(options, "timeout"),
        _limit(options, "silence"),
        None if limit is None else validate.count(limit, "output_limit", 1, InvalidCommand),
        GRACE if grace is None else grace,
        strays,
        read_watch(options.get("watch")),
        read_confinement(options.get("sandbox")),
    ), values


def _arguments(argv: object) -> tuple[str, ...]:
    if isinstance(argv, str | bytes) or not isinstance(argv, Sequence):
        example = 'such as ["make", "test"]; for a shell, ["sh", "-c", "…"]'
        raise InvalidCommand(f"a command is a list of arguments, {example}, not {quoted(argv):.200}")
    if not argv:
        raise InvalidCommand("a command needs a program: its list of arguments is empty")
    if len(argv) > MOST_ARGUMENTS:
        raise InvalidCommand(
            f"a command has at most {MOST_ARGUMENTS:,} arguments, and this one {len(argv):,}: put them in a file"
        )
    found = tuple([_text(each, f"argument {number}") for number, each in enumerate(argv)])
    if not found[0]:
        raise InvalidCommand("a command needs a program: its first argument is empty")
    return found


def _text(value: object, what: str) -> str:
    text = validate.plain_text(value)
    if text is None:
        raise InvalidCommand(f"{what} is {quoted(value):.200}: give text without NUL and without lone surrogates")
    if len(text) > LONGEST_ARGUMENT or len(text.encode()) > LONGEST_ARGUMENT:
        raise InvalidCommand(f"{what} has more than {LONGEST_ARGUMENT:,} bytes, which Linux takes: put it in a file")
    return text


def _is_variable(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) < 1024 and "=" not in name and validate.plain_text(name) == name


def _variables(given: object, what: str) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise InvalidCommand(f'{what}={quoted(given):.200} is not usable: give a dict, such as {{"CI": "1"}}')
    for name in given:
        if not _is_variable(name):
            raise InvalidCommand(f"{what}: {quoted(name):.200} is no name of a variable")
    return {str(name): _text(value, f"{what}[{name!r}]") for name, value in given.items()}


def _folder(cwd: object) -> str:
    if cwd is None:
        return ""
    path = getattr(cwd, "__fspath__", None)
    return _text(cwd if path is None else path(), "cwd")


def _limit(options: Mapping[str, Any], name: str, least: float = 0.001) -> float | None:
    value = validate.seconds(options.get(name), name, InvalidCommand)
    if value is not None and not least <= value <= LONGEST_WAIT:
        raise InvalidCommand(f"{name}={value} is not usable: give seconds, more than 0 and less than a year, or None")
    return None if value is None else float(value)


def _terminal(pty: object) -> tuple[int, int] | None:
    if pty is None or pty is False:
        return None
    if pty is True:
        return 24, 80
    if isinstance(pty, tuple | list) and len(pty) == 2 and all(type(n) is int and 0 < n < MOST_CELLS for n in pty):
        return pty[0], pty[1]
    raise InvalidCommand(f"pty={quoted(pty):.200} is not usable: give (rows, columns), True for 24 and 80, or None")


# ---------------------------------------------------------------------- reading its output

READ_BYTES = 1 << 20
"""Bytes of output that one read gives at most, unless it asks for fewer."""


class OutputChunk(bytes):
    """Some bytes that a command wrote. `next` is the offset after them, `total` how many there are now, `eof` whether
    there will be no more than these."""

    next: int
    total: int
    eof: bool

    def __new__(cls, data: bytes, next: int, total: int, eof: bool) -> Self:  # as it is read
        chunk = super().__new__(cls, data)
        chunk.next, chunk.total, chunk.eof = next, total, eof
        return chunk

    @property
    def text(self) -> str:
        """As text. Bytes that are no UTF-8 are replaced; a character over the end of a chunk is, too."""
        return self.decode(errors="replace")


def whole_characters(data: bytes) -> bytes:
    """Without the beginning of a UTF-8 character whose rest was cut off, or is still to come."""
    for back in range(1, min(4, len(data)) + 1):
        lead = data[-back]
        if lead >= 0xC0:
            return data[:-back] if back < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4) else data
        if lead < 0x80:
            break
    return data


class OutputQuery(Struct, frozen=True):
    """Which output is to be read, and from where on."""

    stream: Stream = "stdout"
    after: int = 0
    limit: int = READ_BYTES
    follow: bool = False


def read_query(stream: object, after: object, limit: object, follow: object) -> OutputQuery:
    if stream not in get_args(Stream):
        raise InvalidInput(f"a command has no stream {quoted(stream)}: use {', '.join(get_args(Stream))}")
    found: Any = stream
    return OutputQuery(
        found,
        validate.count(after, "after"),
        min(validate.count(limit, "limit", 1), READ_BYTES),
        validate.flag(follow, "follow"),
    )


class Output:
    """Output of a command, from an offset on. Awaited, it is one chunk; iterated, chunk after chunk.

    With `follow`, it waits for what is not there yet: awaited, for some bytes or the end; iterated, until the end.
    """

    __slots__ = ("_chunks",)

    def __init__(self, chunks: Callable[[], AsyncIterator[OutputChunk]]) -> None:
        self._chunks = chunks

    def __await__(self) -> Generator[Any, None, OutputChunk]:
        return self._first().__await__()

    async def _first(self) -> OutputChunk:
        chunks = self._chunks()
        try:
            return await anext(chunks)
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    def __aiter__(self) -> AsyncIterator[OutputChunk]:
        return self._chunks()
