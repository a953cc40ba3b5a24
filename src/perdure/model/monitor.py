"""What of a command's output reaches a session while the command runs: `Watch`, and monitors.

A watch belongs to one command, and tells its session of single things. A monitor is a process of its own (kind
"monitor") that keeps a command running and tells its session every line which that prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct, ValidationError, convert
from msgspec.structs import replace

from perdure.errors import InvalidCommand, quoted
from perdure.model import validate
from perdure.model.process import (
    Abandoned,
    Cancelled,
    Event,
    EventType,
    Failure,
    ProcessRow,
    Success,
    WakePolicy,
    WakeRule,
)

MONITOR_KIND = "monitor"

MATCHED, STDERR, SILENT, PROGRESS, LINES = (
    "output.matched",
    "output.stderr",
    "output.silent",
    "output.progress",
    "output.lines",
)
"""Types of the events by which a session hears of output."""
RESTARTED = "monitor.restarted"

MOST_PATTERNS = 32
LONGEST_PATTERN = 500
"""Characters."""
LONGEST_TIME = 366 * 86_400.0
LONGEST_MONITOR = 3600.0
"""Seconds that a monitor which is not persistent may run."""
MOST_BATCH = 60.0


class Watch(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a session is told of a running command besides its end.

    `stderr`: that it wrote something there, once. `silence`: that it has written nothing for so many seconds, once for
    each silence. `match`: lines of either stream with one of these texts in them; `*` stands for anything, and nothing
    else has a meaning, so that no pattern can take longer than its line is long. `progress`: what it wrote since the
    last time, after so many seconds, then after twice as many, up to five minutes; nothing if it wrote nothing.
    """

    stderr: bool = False
    silence: float | None = None
    match: tuple[str, ...] = ()
    progress: float | None = None


ArmOn: TypeAlias = Literal["manual", "session_start"]


class MonitorSpec(Struct, frozen=True, omit_defaults=True):
    """A command whose lines a session is told.

    `command` is a line for a login shell, or a list of arguments. `id` is its name in its session, which one live
    monitor at a time may have. One that is not `persistent` is ended after `timeout` seconds, 3600 at most. `wake` says
    how lines of stdout reach the session: "turn" runs one, "notify" tells it with its next turn, "none" only keeps
    them. `batch`: so many seconds after a line, what came meanwhile is told with it. `restart_on_restore`: if the
    command is lost with its machine or its container, it is begun again. `arm_on` is for those of plugins: with
    "session_start" it starts with the first turn that the session has with the plugin, and never again by itself.
    """

    id: str
    command: str | Sequence[str]
    cwd: str = ""
    env: dict[str, str] = {}
    persistent: bool = False
    timeout: float = 300.0
    wake: WakePolicy = "turn"
    restart_on_restore: bool = False
    batch: float = 0.2
    arm_on: ArmOn = "manual"


class PluginMonitor(Struct, frozen=True):
    """A monitor that a plugin offers; `spec.id` is `plugin:id`."""

    plugin: str
    spec: MonitorSpec


MonitorState: TypeAlias = Literal["idle", "running", "stopped", "exited", "failed"]


class MonitorStatus(Struct, frozen=True, omit_defaults=True):
    """One monitor as it is. `armed`: it runs, or will. `event_count`: lines that it has told; `last_event` is the
    newest of them. `last_exit_status`: the exit code of its command, once that has ended. One that a plugin offers and
    that was never started is idle, without a `process_id`."""

    id: str
    process_id: str
    state: MonitorState
    armed: bool
    event_count: int = 0
    last_event: str | None = None
    last_error: str | None = None
    last_exit_status: int | None = None
    restarts: int = 0


class MonitorSnapshot(Struct, frozen=True):
    """The monitors of a session, by id. `revision` grows with everything that happens to one of them; updates after it
    are those that this snapshot does not count."""

    revision: int
    active_count: int
    monitors: tuple[MonitorStatus, ...]


class MonitorUpdate(Struct, frozen=True, omit_defaults=True):
    """Lines that a monitor told together. `message` has those of stdout under their number, the newest 128 of a flood,
    `stderr` those of stderr; `lines` says how many there were in all. `wakes`: the session is woken with `message`.
    A monitor that began its command again says so in `message`, without lines.
    """

    sequence: int
    monitor_id: str
    message: str = ""
    stderr: str = ""
    lines: int = 0
    wakes: bool = False


class MonitorUpdates(Struct, frozen=True):
    """What the monitors of a session told, in the order of that. Give `revision` as `after` to go on behind it."""

    revision: int
    active_count: int
    events: tuple[MonitorUpdate, ...]


class OutputCursor(Struct, frozen=True, gc=False, omit_defaults=True):
    """How far a session was told: the progress of its process.

    `stdout`, `stderr`: offsets in the files. `lines`: how many lines were told in all, and `last` the newest of them.
    `silent` and `seen`: bytes that there were when a silence and progress were last told. `rung`: how often progress
    was. `command`: the number of a monitor's command. `error`: what was last wrong with it.
    """

    stdout: int = 0
    stderr: int = 0
    lines: int = 0
    last: str = ""
    told_stderr: bool = False
    silent: int = -1
    seen: int = 0
    rung: int = 0
    command: int = 1
    error: str = ""


def read_cursor(progress: Any) -> OutputCursor:
    """A cursor from the progress of a process; a new one where there is none, or one of a stranger."""
    try:
        return convert(progress, OutputCursor)
    except ValidationError:
        return OutputCursor()


def monitor_status(row: ProcessRow) -> MonitorStatus:
    """A monitor as it is, from its process."""
    told, outcome = read_cursor(row.record.progress), row.record.outcome
    data: Any = None
    state: MonitorState = "idle" if row.record.first_started is None else "running"
    error = told.error or None
    match outcome:
        case Success(value=data):
            state = "exited"
        case Failure(message=error, data=data):
            state = "failed"
        case Cancelled():
            state = "stopped"
        case Abandoned():
            state, error = "failed", "it was given up"
        case None:
            pass
    code = data.get("exit_code") if isinstance(data, dict) else None
    return MonitorStatus(
        row.registration.name,
        row.id,
        state,
        row.live,
        told.lines,
        told.last or None,
        error,
        code if isinstance(code, int) else None,
        told.command - 1,
    )


def monitor_update(row: ProcessRow, place: int, event: Event) -> MonitorUpdate | None:
    """What an event of a monitor's process tells of its lines; None if that is nothing."""
    if event.type not in (LINES, RESTARTED):
        return None
    told = event.payload if isinstance(event.payload, dict) else {}
    target, text = row.registration.wake, str(told.get("text", ""))
    wakes = bool(text) and target is not None and target.policy == "turn"
    lines = told.get("count", 0) + told.get("stderr_count", 0)
    return MonitorUpdate(place, row.registration.name, text, str(told.get("stderr", "")), lines, wakes)


def watch_events(watch: Watch | None) -> tuple[EventType, ...]:
    """The events that a watched command may have. All of them wake its session."""
    if watch is None:
        return ()
    wanted = {
        STDERR: watch.stderr,
        SILENT: watch.silence is not None,
        MATCHED: bool(watch.match),
        PROGRESS: watch.progress is not None,
    }
    return tuple([EventType(name, wake=WakeRule("/text", "/text")) for name, on in wanted.items() if on])


def monitor_events() -> tuple[EventType, ...]:
    """The events of a monitor: lines wake its session if there is one of stdout among them."""
    return EventType(LINES, wake=WakeRule("/text", "/text")), EventType(RESTARTED, wake=WakeRule("/text", "/text"))


# ---------------------------------------------------------------------- what a caller gave


def read_watch(given: object) -> Watch | None:
    """A watch as it is kept. Raises InvalidCommand for what none can be."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        unknown = [each for each in given if each not in Watch.__struct_fields__]
        if unknown:
            raise InvalidCommand(
                f"watch has no {quoted(unknown[0]):.80}: there are {', '.join(Watch.__struct_fields__)}"
            )
        given = Watch(**given)
    if not isinstance(given, Watch):
        raise InvalidCommand(f"watch={quoted(given):.200} is not usable: give Watch(match=[…], silence=…, …)")
    return Watch(
        validate.flag(given.stderr, "stderr", InvalidCommand),
        _time(given.silence, "silence"),
        tuple([_pattern(each) for each in _several(given.match)]),
        _time(given.progress, "progress"),
    )


def _several(match: object) -> tuple[Any, ...]:
    found = (match,) if isinstance(match, str | re.Pattern) else validate.several(match, "match", InvalidCommand)
    if len(found) > MOST_PATTERNS:
        raise InvalidCommand(f"at most {MOST_PATTERNS} texts are looked for in a line, not {len(found)}")
    return found


def _pattern(given: object) -> str:
    if isinstance(given, re.Pattern):
        raise InvalidCommand(
            f"{quoted(given.pattern):.200} is a regular expression, which may take for ever on one line: give the text "
            "that the line has in it, with * for anything"
        )
    text = validate.plain_text(given)
    if not text or not text.strip("*") or "\n" in text or len(text) > LONGEST_PATTERN:
        wanted = f"1 to {LONGEST_PATTERN} characters of one line, with * for anything"
        raise InvalidCommand(f"match={quoted(given):.200} is not usable: give {wanted}")
    return text


def _time(given: object, what: str) -> float | None:
    seconds = validate.seconds(given, what, InvalidCommand)
    if seconds is not None and not 0 < seconds <= LONGEST_TIME:
        raise InvalidCommand(f"{what}={given} is not usable: give seconds, more than 0 and less than a year, or None")
    return None if seconds is None else float(seconds)


def plugin_monitors(plugin: str, given: Iterable[object]) -> list[PluginMonitor]:
    """The monitors that a plugin offers, under their ids in a session. Raises InvalidCommand for what none can be."""
    found: dict[str, PluginMonitor] = {}
    for each in validate.several(given, "monitors", InvalidCommand):
        spec = read_spec(each)
        spec = read_spec(replace(spec, id=f"{plugin}:{spec.id}"))
        if spec.id in found:
            raise InvalidCommand(f"two monitors have the id {spec.id!r}")
        found[spec.id] = PluginMonitor(plugin, spec)
    return list(found.values())


def read_spec(given: object) -> MonitorSpec:
    """A monitor as it is kept. Raises InvalidCommand for what none can be; its command is checked by who starts it."""
    if not isinstance(given, MonitorSpec):
        raise InvalidCommand(f"{quoted(given):.200} is no monitor: give MonitorSpec(id, command, …)")
    name = validate.plain_text(given.id)
    if not name or len(name) > 100 or not name.isprintable() or "#" in name:
        raise InvalidCommand(f"monitor id {quoted(given.id):.200} is not usable: 1 to 100 printable characters, no '#'")
    if given.wake not in get_args(WakePolicy):
        raise InvalidCommand(
            f"monitor {name!r}: wake={quoted(given.wake):.80} is not usable: say 'turn', 'notify' or 'none'"
        )
    timeout, batch = _time(given.timeout, "timeout"), validate.seconds(given.batch, "batch", InvalidCommand)
    persistent = validate.flag(given.persistent, "persistent", InvalidCommand)
    if timeout is None or (timeout > LONGEST_MONITOR and not persistent):
        raise InvalidCommand(
            f"monitor {name!r}: timeout={given.timeout} is not usable: give up to {LONGEST_MONITOR:g} seconds, or "
            "persistent=True for one that runs on"
        )
    if batch is None or not 0 <= batch <= MOST_BATCH:
        raise InvalidCommand(f"monitor {name!r}: batch={given.batch} is not usable: give up to {MOST_BATCH:g} seconds")
    if given.arm_on not in get_args(ArmOn):
        raise InvalidCommand(
            f"monitor {name!r}: arm_on={quoted(given.arm_on):.80} is not usable: say 'manual' or 'session_start'"
        )
    restart = validate.flag(given.restart_on_restore, "restart_on_restore", InvalidCommand)
    command = given.command if isinstance(given.command, str) else tuple(given.command)
    return MonitorSpec(
        name, command, given.cwd, dict(given.env), persistent, timeout, given.wake, restart, float(batch), given.arm_on
    )
