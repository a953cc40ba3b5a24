"""The exceptions that Perdure raises in host code.

    PerdureError
    ├── InvalidInput          the caller gave something unusable; nothing was written
    │   ├── InvalidSessionId
    │   ├── InvalidCursor
    │   ├── InvalidDefinition   an agent, tool or Runtime is defined wrongly
    │   ├── InvalidProcess      a registration or event of a process is invalid
    │   │   ├── InvalidCommand    the arguments, folder or limits of a command are invalid
    │   │   │   └── SandboxUnavailable this machine cannot enforce the command's confinement
    │   │   ├── InvalidHandle     not a process handle
    │   │   ├── MisplacedCheckpoint the call after a checkpoint is not the function's first call
    │   │   └── UndeclaredEvent   the process declares no such event or signal
    │   ├── TooLarge
    │   ├── SessionFull         the session has reached its maximum number of inputs
    │   └── TurnFull            the turn has reached its maximum number of records
    ├── Conflict              the request contradicts the stored state
    │   ├── KeyConflict         a key was used before with other content
    │   ├── MetadataConflict    the session exists with other metadata
    │   ├── WrongAgent          the session belongs to another agent
    │   ├── AlreadyAnswered     an approval or wait was answered before
    │   ├── CannotRetry         the turn has an answer, was cancelled, or is not the last one
    │   ├── StaleSettings       the settings of a session have changed since they were read
    │   ├── TooDeep             a session has too many ancestors to begin another one
    │   ├── WaitsForItself      a tool waits for work that can end only after the tool
    │   ├── ProcessConflict     the id of a process was used before for something else
    │   ├── ProcessEnded        the process has ended: it takes no signal and no cancel
    │   ├── WrongAuthority      the caller may not report the process's end
    │   ├── ProcessShared       the session may see the process and may not end it
    │   ├── ProcessRefused      the host's policy refuses this use of a process
    │   ├── TooManyCommands     the maximum number of commands is running
    │   ├── UndoRefused         a file was changed since its edit, or its earlier content is gone
    │   └── HeadMoved           another writer committed first
    ├── NotFound
    │   ├── UnknownSession
    │   ├── UnknownTurn
    │   ├── UnknownCall
    │   │   └── UnknownStep       no step of a process waits for a settlement under this id
    │   ├── UnknownNode
    │   ├── UnknownTool
    │   ├── UnknownWait
    │   ├── UnknownProcess
    │   │   ├── ProcessPruned     the process ended and was pruned
    │   │   └── ProcessNotVisible this session may not see the process
    │   ├── UnknownMonitor
    │   └── SessionDeleted      the id cannot be used again
    ├── NoAnswer              a turn has no answer to read; `outcome` says why
    │   ├── TurnFailed          the turn ended without an answer
    │   └── TurnPending         the turn waits or is queued
    ├── ProcessFailed         a process ended without a value; `outcome` says how
    │   ├── ProcessCancelled    the process was cancelled
    │   ├── ProcessAbandoned    the process was given up; its last effect is unknown
    │   └── ProcessStuck        the process needs a person before it can continue
    ├── StepFailed            a step of a durable function failed for good
    │   └── OutcomeUnknown      the step started and its end was not recorded
    ├── LimitReached          a spending limit is reached, so the model is not called
    ├── TimedOut              a wait ended because its caller had set a limit
    ├── Diverged              a durable function makes another call than its journal has
    ├── NotRevived            a record does not fit the type that the code declares today
    ├── ForeignTask           a durable context was used outside of its branches
    ├── Fenced                this worker lost its claim; reload and stop writing
    ├── StoreError
    │   ├── StoreDamaged        refused to open: the file is not whole
    │   │   ├── StoreEmptied      the database was deleted or replaced, and its lock file was not
    │   │   └── NotAStore         the file is another program's
    │   ├── StoreTooNew         written by a newer Perdure
    │   ├── StoreUnavailable    disk full, locked or read-only: retry when repaired
    │   ├── StoreInUse          an open Runtime must be left first
    │   ├── StoreMoved          the store is still in the folder of the project's old name
    │   ├── StoreInherited      a forked child used its parent's store
    │   └── BlobMissing         a referenced blob is gone; put it again
    ├── RuntimeClosed         the Runtime was left
    ├── WrongLoop             used from an event loop that is not its own
    ├── PluginError           a plugin is at fault; `plugin` names it
    │   ├── PluginFault         a hook raised, hung or returned an invalid value
    │   ├── PluginConflict      two plugins claim one id, name or slot
    │   └── OperationError      an operation of a plugin cannot be called like this, or failed
    │       ├── UnknownOperation  no plugin offers the operation
    │       ├── MissingSession    the operation needs a session
    │       ├── UnexpectedSession the operation takes no session
    │       ├── InvalidArguments  the arguments do not fit the schema
    │       └── OperationFailed   the operation raised or returned an invalid value
    ├── Unavailable           this session or machine lacks a feature; the text names it
    │   ├── CodeUnavailable     the session runs no code
    │   ├── CodeRuntimeExited   the interpreter of the session's code is gone
    │   ├── DumpRefused         a saved interpreter is not loaded; its cells run again
    │   ├── MissingExtra        a package that this part needs is not installed; an ImportError too
    │   ├── LiveEventsUnavailable a worker's events can be read only from the store
    │   ├── CommandsUnavailable this platform or this store cannot run commands
    │   ├── McpUnavailable      an MCP server is down, or was refused
    │   ├── SearchUnavailable   the store has no search index
    │   ├── SignalsUnavailable  only the main thread of a program receives signals
    │   ├── InputFilterMissing  the agent filters inputs, and this Runtime lacks the filter
    │   └── ProviderUnavailable the agent, and so its model, is not part of this Runtime
    ├── ProviderError         a model call failed; `retryable` says what happens next
    ├── NotPrepared           a function of the host failed before a run
    │   ├── DepsFailed          the function in `Runtime(deps=…)`
    │   └── InstructionsFailed  the function in `Agent(instructions=…)`
    ├── ScriptExhausted       a scripted model has no answer left, or answers left over
    └── InternalError         a bug in Perdure

    ToolError, Retry          raised by tools *to* Perdure; they reach the model, never the host

Exceptions hold ids and JSON, never live structs. The message is made from the fields and says what to do.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

MAX_QUOTED = 500
PAGE = "docs/troubleshooting.md"
"""The page that has an entry for every class of this module."""


def quoted(value: object) -> str:
    """Return the repr of a caller's value for a message: bounded in length, and safe if `__repr__` raises."""
    try:
        text = repr(value)
    except (Exception, SystemExit):  # `__repr__` is code of the caller, and a value may contain itself
        return f"<a {type(value).__name__} that cannot be shown>"
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


class PerdureError(Exception):
    """Base class of all errors that Perdure raises. `code` is stable; the text may improve.

    `summary` is the text without `hint`, which gives advice in Python. Models and the command line show other advice.
    `page` is the entry of the documentation.
    """

    code = "perdure_error"
    hint = ""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"See {self.page}")

    @property
    def page(self) -> str:
        """Where the documentation says what to do: a page and its heading. A traceback ends with it, as a note."""
        known = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return f"{PAGE}#{known.__name__.lower()}"

    @property
    def summary(self) -> str:
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.summary}{self.hint}"


class InvalidInput(PerdureError, ValueError):
    """Unusable input from the caller. Nothing was written; correct the input and call again."""

    code = "invalid_input"


class InvalidSessionId(InvalidInput):
    """A session id must be 1 to 200 printable characters, and a fork needs an id that was never used."""

    code = "invalid_session_id"

    def __init__(self, session_id: object, why: str = "use 1 to 200 printable characters") -> None:
        self.session_id = session_id
        super().__init__(f"session id {quoted(session_id)} is not usable: {why}")


class InvalidCursor(InvalidInput):
    """The cursor is malformed or belongs to another session."""

    code = "invalid_cursor"

    def __init__(self, cursor: object, why: str) -> None:
        self.cursor = cursor
        super().__init__(f"cursor {quoted(cursor)} {why}: start again without a cursor")


class InvalidDefinition(InvalidInput):
    """A wrong definition of an agent, a tool or a Runtime."""

    code = "invalid_definition"


class TooLarge(InvalidInput):
    """A value is larger than the limit that protects every session of the store."""

    code = "too_large"

    def __init__(self, what: str, size: int, limit: int) -> None:
        self.what, self.size, self.limit = what, size, limit
        super().__init__(f"{what} has {size:,} bytes, the limit is {limit:,}: store it outside and pass a reference")


class SessionFull(InvalidInput):
    """A session that has reached its maximum number of inputs."""

    code = "session_full"

    def __init__(self, session_id: str, limit: int) -> None:
        self.session_id, self.limit = session_id, limit
        super().__init__(
            f"session {session_id!r} has had {limit:,} inputs and takes no more: fork it, or begin another"
        )


class TurnFull(InvalidInput):
    """A turn that has reached its maximum number of records. The remaining room is reserved for ending the turn."""

    code = "turn_full"

    def __init__(self, turn_id: str, limit: int) -> None:
        self.turn_id, self.limit = turn_id, limit
        super().__init__(
            f"turn {turn_id!r} has nearly {limit:,} records and takes no more: do the rest in another turn"
        )


class Conflict(PerdureError):
    """A request that contradicts the stored state. Nothing was written."""

    code = "conflict"


class InvalidProcess(InvalidInput):
    """An invalid registration, signal or event of a process."""

    code = "invalid_process"


class InvalidCommand(InvalidProcess):
    """Invalid arguments, folder, variables or limits of a command. The command was not started."""

    code = "invalid_command"


class SandboxUnavailable(InvalidCommand):
    """A confinement that this machine cannot enforce for this user. Nothing was started: see `perdure doctor`."""

    code = "sandbox_unavailable"


class InvalidHandle(InvalidProcess):
    """A value that is not a process handle."""

    code = "invalid_handle"


class MisplacedCheckpoint(InvalidProcess):
    """A call after a checkpoint that differs from the first call of the function, with which a replay would begin."""

    code = "misplaced_checkpoint"

    def __init__(self, first: str, asked: str) -> None:
        self.first, self.asked = first, asked
        super().__init__(
            f"the first call after a checkpoint is {asked}, but the function begins with {first}, and so would every "
            "replay from that checkpoint: make the checkpoint the last call of a round (step, sleep, then checkpoint), "
            "or, where the first call depends on the state, begin again with `ctx.checkpoint(state, restart=True)`"
        )


class UndeclaredEvent(InvalidProcess):
    """An event or signal that the process does not declare."""

    code = "undeclared_event"

    def __init__(self, process_id: str, event_type: str, declared: list[str]) -> None:
        self.process_id, self.event_type, self.declared = process_id, event_type, declared
        ours, signal = event_type.partition("signal.")[1:] if event_type.startswith("signal.") else ("", "")
        known = ", ".join(each.removeprefix(ours) for each in declared if each.startswith(ours)) or "none"
        what = (
            f"takes no signal {quoted(signal)}; it takes"
            if ours
            else f"declares no event {quoted(event_type)}; it declares"
        )
        super().__init__(f"process {process_id!r} {what}: {known}")


class ProcessConflict(Conflict):
    """A process id that was used before for another registration."""

    code = "process_conflict"

    def __init__(self, process_id: str) -> None:
        self.process_id = process_id
        super().__init__(f"process {process_id!r} was registered before as something else: choose another id")


class ProcessEnded(Conflict):
    """A process that has ended already."""

    code = "process_already_terminal"

    def __init__(self, process_id: str, status: str) -> None:
        self.process_id, self.status = process_id, status
        super().__init__(f"process {process_id!r} is {status}: nothing more can happen to it")


class WrongAuthority(Conflict):
    """A report of a process's end by a caller without the authority for it."""

    code = "wrong_authority"

    def __init__(self, process_id: str, authority: str, contract: str) -> None:
        self.process_id, self.authority, self.contract = process_id, authority, contract
        super().__init__(f"{authority} may not end process {process_id!r}: its contract is {contract}")


class ProcessShared(Conflict):
    """A process that the session may see and may not end, because it is only shared with the session."""

    code = "process_shared"

    def __init__(self, process_id: str, session_id: str) -> None:
        self.process_id, self.session_id = process_id, session_id
        super().__init__(
            f"process {process_id!r} is shared with session {session_id!r} and not its own: the session that started "
            "it, or the host, says when it ends"
        )


class ProcessRefused(Conflict):
    """A start, await or signal that the host's policy refused, or about which the policy failed. Nothing was done."""

    code = "process_refused"

    def __init__(self, verb: str, name: str, session_id: str, reason: str = "") -> None:
        self.verb, self.name, self.session_id, self.reason = verb, name, session_id, reason
        why = f": {reason}" if reason else ""
        super().__init__(f"session {session_id!r} may not {verb} {name!r}, by the policy of its host{why}")


class TooManyCommands(Conflict):
    """The limit of running commands, or of their stored output, is reached. The command was not started."""

    code = "too_many_commands"

    def __init__(self, what: str, used: int, limit: int) -> None:
        self.used, self.limit = used, limit
        super().__init__(f"{what}: {used:,} of {limit:,}; wait for one to end, cancel one, or raise the limit")


class KeyConflict(Conflict):
    """The same key was used before with other content."""

    code = "key_conflict"

    def __init__(self, session_id: str, key: str, turn_id: str) -> None:
        self.session_id, self.key, self.turn_id = session_id, key, turn_id
        super().__init__(
            f"key {key!r} of session {session_id!r} was used for turn {turn_id} with other content: use a new key"
        )


class MetadataConflict(Conflict):
    """A session that exists with other metadata."""

    code = "metadata_conflict"

    def __init__(self, session_id: str, given: Mapping[str, object], stored: Mapping[str, object]) -> None:
        self.session_id, self.given, self.stored = session_id, dict(given), dict(stored)
        keys = sorted(key for key in {*given, *stored} if repr(given.get(key)) != repr(stored.get(key)))
        super().__init__(
            f"session {session_id!r} has other metadata than the given one, in {', '.join(map(repr, keys))}: open it "
            "without metadata=, or change it with session.update(metadata=…)"
        )


class WrongAgent(Conflict):
    """The session belongs to another agent."""

    code = "wrong_agent"

    def __init__(self, session_id: str, expected: str, actual: str) -> None:
        self.session_id, self.expected, self.actual = session_id, expected, actual
        super().__init__(
            f"session {session_id!r} belongs to agent {actual!r}, not {quoted(expected)}: "
            f"open it with agent={actual!r} or use another session id"
        )


class AlreadyAnswered(Conflict):
    """An approval, settlement or wait that was answered before. The first answer stands."""

    code = "already_answered"

    def __init__(self, what: str, answer: Any) -> None:
        self.what, self.answer = what, answer
        given = answer.get("verdict") if isinstance(answer, dict) else None
        told = quoted(answer) if given is None else f"{quoted(given)}{f' by {by}' if (by := answer.get('by')) else ''}"
        super().__init__(f"{what} was answered before with {told}: the first answer stands")


class CannotRetry(Conflict):
    """A turn that cannot be continued: `why` tells the reason."""

    code = "cannot_retry"

    def __init__(self, turn_id: str, why: str) -> None:
        self.turn_id, self.why = turn_id, why
        super().__init__(f"turn {turn_id} cannot be retried: {why}")


class StaleSettings(Conflict):
    """Session settings that were changed after the caller read them. Read them again, then edit."""

    code = "stale_settings"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"the settings of session {session_id!r} have changed meanwhile: read them again, then edit")


class TooDeep(Conflict):
    """A session with too many ancestors to begin another session."""

    code = "too_deep"

    def __init__(self, session_id: str, limit: int) -> None:
        self.session_id = session_id
        super().__init__(f"session {session_id!r} is {limit} sessions deep: it must do its work by itself")


class WaitsForItself(Conflict):
    """A wait that could never end, because the awaited work can end only after the waiting tool or process."""

    code = "waits_for_itself"

    def __init__(self, what: str, waiting: str) -> None:
        self.what, self.waiting = what, waiting
        super().__init__(
            f"{what} can only end after {waiting}, which would wait for it: use `send`, `steer` or `start` and do not "
            "wait for the result, or ask in another session"
        )


class UndoRefused(Conflict):
    """Edits that cannot be undone, because a file was changed since, or because its earlier content is gone.

    `files` has the reason for each path. `undone` lists files that were restored before another file was found to be
    changed; it is usually empty, because all files are checked first.
    """

    code = "undo_refused"

    def __init__(self, files: Mapping[str, str], undone: Sequence[str] = ()) -> None:
        self.files, self.undone = dict(files), list(undone)
        done = f"undone: {', '.join(undone)}" if undone else "nothing was undone"
        super().__init__(f"{done}; {'; '.join(self.files.values())}")


class HeadMoved(Conflict):
    """Another writer committed first; the loser reloads."""

    code = "head_moved"

    def __init__(self, session_id: str, expected: int, actual: int) -> None:
        self.session_id, self.expected, self.actual = session_id, expected, actual
        super().__init__(f"session {session_id!r} is at turn {actual}, not {expected}: reload it")


class NotFound(PerdureError, LookupError):
    """An id or name that does not exist in this store."""

    code = "not_found"


class UnknownSession(NotFound):
    code = "unknown_session"
    hint = ": `runtime.sessions.list()` lists the sessions"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"there is no session {quoted(session_id)} in this store")


class UnknownTurn(NotFound):
    code = "unknown_turn"

    def __init__(self, turn_id: str) -> None:
        self.turn_id = turn_id
        super().__init__(f"there is no turn {quoted(turn_id)} in this store: turn ids come from a receipt or result")


class UnknownCall(NotFound):
    code = "unknown_call"
    hint = "; `session.pending()` lists what waits for a person"

    def __init__(self, call_id: str, why: str = "nothing waits under this id") -> None:
        self.call_id = call_id
        super().__init__(f"call {quoted(call_id)}: {why}")


class UnknownStep(UnknownCall):
    """No step waits for a settlement under this id: it may have been settled, or its process is at work."""

    code = "unknown_step"
    hint = "; `await handle.pending()` lists the steps that wait for one"

    def __init__(self, call_id: str) -> None:
        super().__init__(call_id, "no step waits for a settlement under this id")


class UnknownNode(NotFound):
    code = "unknown_node"

    def __init__(self, node_id: str, why: str) -> None:
        self.node_id = node_id
        super().__init__(f"cannot fork at {quoted(node_id)}: {why}")


class UnknownTool(NotFound):
    code = "unknown_tool"

    def __init__(self, name: str, known: list[str]) -> None:
        self.name, self.known = name, known
        super().__init__(
            f"there is no tool {quoted(name)} in this session; there are: {', '.join(known[:20]) or 'none'}"
        )


class UnknownWait(NotFound):
    """The key is forged, revoked or of another store."""

    code = "unknown_or_revoked"

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__("this completion key is unknown or revoked: it works only in the store that issued it")


class UnknownProcess(NotFound):
    code = "unknown_process"
    hint = "; `runtime.processes.list()` lists the processes"

    def __init__(self, process_id: str, why: str = "there is no such process in this store") -> None:
        self.process_id = process_id
        super().__init__(f"process {quoted(process_id)}: {why}")


class UnknownMonitor(NotFound):
    code = "unknown_monitor"
    hint = "; `session.monitors()` lists the monitors"

    def __init__(self, monitor_id: str, session_id: str) -> None:
        self.monitor_id, self.session_id = monitor_id, session_id
        super().__init__(
            f"session {quoted(session_id)} has no monitor {quoted(monitor_id):.200}, and no plugin offers one"
        )


class ProcessPruned(UnknownProcess):
    """A process that ended and was pruned. Its id cannot be used again."""

    code = "process_no_longer_retained"

    def __init__(self, process_id: str, status: str, at: int) -> None:
        self.status, self.at = status, at
        super().__init__(process_id, f"it was {status}, and is no longer retained")


class ProcessNotVisible(UnknownProcess):
    """A process that this session may not see. A grant makes it visible."""

    code = "process_not_visible"

    def __init__(self, process_id: str, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(process_id, f"it is neither live nor visible in session {session_id!r}")


class SessionDeleted(NotFound):
    """A deleted session. Its id cannot be used again."""

    code = "session_deleted"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"session {session_id!r} was deleted: ids are used once per store, choose another")


def _details(outcome: Any) -> list[str]:
    """Return the fields of an outcome in words, without its kind."""
    if not isinstance(outcome, dict):
        return []
    told = [str(outcome[name]) for name in ("code", "message", "which", "reason") if outcome.get(name)]
    if "spent" in outcome:  # a limit of the Runtime
        per, key, window = (outcome.get(name) for name in ("per", "key", "window"))
        span = f", window {window}" if window else ""
        whose = f" by {per} {quoted(key)}" if key is not None else " by all"
        spent, limit = (Decimal(str(outcome[name])) for name in ("spent", "limit"))
        told.append(f"{spent:,} of {limit:,} {outcome['kind']} are spent{whose}{span}")
    return told + [f"{call['tool']} ({call['call_id']}) waits for {call['kind']}" for call in outcome.get("calls", ())]


class NoAnswer(PerdureError):
    """A turn without an answer, raised where its `text` or `output` is read.

    `outcome` is the outcome as JSON, `why` the same in words without its kind; `turn_id` finds the evidence.
    """

    code = "no_answer"
    says = "has no answer"

    def __init__(self, turn_id: str, kind: str, outcome: Any) -> None:
        self.turn_id, self.kind, self.outcome = turn_id, kind, outcome
        details = _details(outcome)
        self.why = ": ".join(details)
        super().__init__(f"turn {turn_id} {self.says}: {': '.join([kind, *details])}")


AFTER_FAILURE = {
    "provider_failed": "correct the model's name, key or address, or wait for its provider; then session.retry()",
    "cancelled": "run again to go on",
    "budget_spent": "raise Agent(budget=Budget(…)) and call session.retry(), or ask for less",
    "limit_reached": "raise it in Runtime(limits=[…]) or wait for the next window, then call session.retry()",
    "plugin_aborted": "change the input, or the plugin's settings, then run again",
    "invalid_input": "shorten the conversation or change the input, then run again",
    "incomplete": "read the partial text as result.outcome.text, or allow longer answers and run again",
    "failed": "correct the agent's deps or instructions, then run again",
    "stuck": "correct the cause and call session.resume()",
}
"""Advice about a turn that ended without an answer, by the kind of its outcome."""


class TurnFailed(NoAnswer):
    """A turn ended without an answer: its model failed, it was cancelled, a budget was spent."""

    code = "turn_failed"
    says = "did not finish"

    def __init__(self, turn_id: str, kind: str, outcome: Any) -> None:
        super().__init__(turn_id, kind, outcome)
        self.hint = f"; {AFTER_FAILURE[kind]}" if kind in AFTER_FAILURE else ""


class TurnPending(NoAnswer):
    """A turn has not ended: it waits on disk, or is queued.

    The message names the calls that it waits for, and the methods that answer them.
    """

    code = "turn_pending"
    says = "has no answer yet"

    def __init__(self, turn_id: str, kind: str, outcome: Any) -> None:
        super().__init__(turn_id, kind, outcome)
        calls = outcome.get("calls", ()) if isinstance(outcome, dict) else ()
        verbs = [verb for call in calls if (verb := _answered_with(call["kind"], call["call_id"]))]
        more = [f"{len(verbs) - MAX_VERBS} more in result.pending"] if len(verbs) > MAX_VERBS else []
        answer = f"answer with {', '.join([*verbs[:MAX_VERBS], *more])}, then" if verbs else "once it has ended,"
        self.hint = f"; {answer} read it with `await session.result({turn_id!r})`"


MAX_VERBS = 3
"""Calls for which the message of a TurnPending says how they are answered."""


def _answered_with(kind: str, call_id: str) -> str:
    """Return the method that ends a wait of this kind, or "" if the wait ends by itself."""
    match kind:
        case "approval":
            return f"session.approve({call_id!r}) or session.reject({call_id!r}, 'reason')"
        case "recovery":
            return f"session.settle({call_id!r}, 'done' | 'failed' | 'rerun')"
        case "deferred":
            return f"runtime.resolve(key, value) with the key of {call_id}"
        case "input":
            return f"session.answer({call_id!r}, {{…}})"
        case _:
            return ""


class ProcessFailed(PerdureError):
    """A process that ended without a value. `outcome` is its outcome as JSON."""

    code = "process_failed"

    def __init__(self, process_id: str, what: str, outcome: Any) -> None:
        self.process_id, self.outcome = process_id, outcome
        super().__init__(f"process {process_id!r} {what}")


class ProcessCancelled(ProcessFailed):
    """A process that was cancelled."""

    code = "process_cancelled"


class ProcessAbandoned(ProcessFailed):
    """A process that was given up. Its last effect may or may not have happened."""

    code = "process_abandoned"


class ProcessStuck(ProcessFailed):
    """A process that has not ended and needs a person before it can continue. `outcome` has the reason."""

    code = "process_stuck"


class StepFailed(PerdureError):
    """A step of a durable function that failed. Raised at the line of the step, in every run."""

    code = "step_failed"

    def __init__(self, step: str, fault: str, message: str, data: Any = None, traceback: str = "") -> None:
        self.step, self.fault, self.message, self.data, self.traceback = step, fault, message, data, traceback
        super().__init__(f"step {step}: {fault}: {message}" if message else f"step {step}: {fault}")


class OutcomeUnknown(StepFailed):
    """A step that started and whose end was not recorded. Its effect may or may not have happened."""

    code = "outcome_unknown"

    def __init__(self, step: str, why: str) -> None:
        super().__init__(step, "outcome_unknown", why)


class LimitReached(PerdureError):
    """A spending limit (`Limit`) that is reached, so that a model was not called. The turn ends with an outcome of this
    name."""

    code = "limit_reached"

    def __init__(self, kind: str, limit: Decimal, spent: Decimal, per: str, key: Any = None, window: str = "") -> None:
        self.kind, self.limit, self.spent, self.per, self.key, self.window = kind, limit, spent, per, key, window
        whose = "all" if per == "all" else f"{per} {quoted(key)}"
        span = f" a {window}" if window else ""
        super().__init__(
            f"the limit of {limit:g} {kind}{span} of {whose} is spent ({spent:g}): raise it in Runtime(limits=[…]), or "
            "wait for the next window, and call session.retry()"
        )


class TimedOut(PerdureError, TimeoutError):
    """A wait that ended at the time limit of its caller. The awaited work is unharmed."""

    code = "timed_out"

    def __init__(self, what: str, seconds: float | None = None) -> None:
        self.what, self.seconds = what, seconds
        super().__init__(f"{what} within {seconds:g} s" if seconds is not None else what)


class Diverged(PerdureError):
    """A durable function that makes another call than its journal has: its code has changed, or is not deterministic.

    The message shows both calls. Nothing was done; the process is stuck until the code that began it is back.
    """

    code = "diverged"

    def __init__(self, process_id: str, key: str, recorded: str, asked: str) -> None:
        self.process_id, self.key, self.recorded, self.asked = process_id, key, recorded, asked
        super().__init__(
            f"process {process_id!r} at {key}: its journal says {recorded}, its code asks for {asked}: run the code "
            "that began it (register that version beside the new one), then resume it"
        )


class NotRevived(PerdureError):
    """A record that does not fit the type that the code declares today. The record is kept; a process that reads it is
    stuck until the code can read it."""

    code = "not_revived"

    def __init__(self, where: str, what: str, why: str) -> None:
        self.where, self.what, self.why = where, what, why
        super().__init__(
            f"{where}: its record does not bring back {what} ({why}): run code whose annotation takes what is "
            "recorded, such as a union with the old type"
        )


class ForeignTask(PerdureError):
    """A durable context that was used outside of its branches, so that a replay could not assign the call."""

    code = "foreign_task"

    def __init__(self, process_id: str) -> None:
        self.process_id = process_id
        super().__init__(
            f"the context of process {process_id!r} was used from another task, from a step, or after its function "
            "ended: run branches with `ctx.gather(…)`, `ctx.any(…)` or `ctx.all(…)` instead of asyncio's own"
        )


class Fenced(PerdureError):
    """A write by a worker that lost its claim: a newer generation owns the turn or process. Nothing was written."""

    code = "fenced"

    def __init__(self, scope: str, generation: int) -> None:
        self.scope, self.generation = scope, generation
        super().__init__(f"generation {generation} of {scope} was relieved by another worker: nothing was written")


class StoreError(PerdureError):
    """A store that could not do its work. Acknowledged writes stay."""

    code = "store_error"


class StoreDamaged(StoreError):
    """A file that is not whole. It is refused, because serving it would shorten the history."""

    code = "store_damaged"

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(
            f"{path} is damaged ({why}): restore it from a backup, or copy what is readable with "
            f"`sqlite3 {path} .recover`; Perdure does not serve a shortened history"
        )


class StoreEmptied(StoreDamaged):
    """A database that was deleted or replaced: it is missing or empty, and its lock file notes acknowledged work.

    No new store was made.
    """

    code = "store_emptied"

    def __init__(self, path: str) -> None:
        self.path, self.why = path, "its lock file notes work that it does not hold"
        StoreError.__init__(
            self,
            f"{path} is missing or empty, but {path}-lock notes that acknowledged transactions are missing from it, so "
            "the database was deleted or replaced, or its -wal was removed: to begin anew, delete what is left of the "
            f"old store with `perdure delete-store {shlex.quote(path)} --yes`; otherwise put the database back, "
            "together with its -wal, or restore a backup",
        )


class NotAStore(StoreDamaged):
    """A database of another program. Nothing in it was changed."""

    code = "not_a_store"

    def __init__(self, path: str) -> None:
        self.path, self.why = path, "it is a SQLite database of another program"
        StoreError.__init__(
            self, f"{path} is not a Perdure store ({self.why}): choose another path; nothing in it was changed"
        )


class StoreTooNew(StoreError):
    """A file that a newer Perdure wrote."""

    code = "store_too_new"

    def __init__(self, path: str, found: int, known: int) -> None:
        self.path, self.found, self.known = path, found, known
        super().__init__(f"{path} has schema {found}, this Perdure knows {known}: upgrade perdure to open it")


class StoreUnavailable(StoreError):
    """A full disk, a long lock or a read-only file. Nothing was half-applied; retry after the repair."""

    code = "store_unavailable"


class StoreInUse(StoreError):
    """A store that is open while an operation needs it closed everywhere.

    `workers` are the Runtimes that have it open, `commands` its OS commands that still run. Both are empty if another
    program has the file open.
    """

    code = "store_in_use"

    def __init__(self, path: str, workers: Sequence[str], commands: Sequence[str] = ()) -> None:
        self.path, self.workers, self.commands = path, tuple(workers), tuple(commands)
        who = ", ".join(self.workers[:5])
        problem = f"{path} is open in {len(self.workers)} Runtimes ({who}): stop them, and try again"
        if not self.workers:
            problem = f"another process has {path} open: close it there, and try again"
        if self.commands and not self.workers:
            ids = ", ".join(self.commands[:5])
            problem = (
                f"{len(self.commands)} commands of {path} still run ({ids}): end them with `perdure cancel ID`, and "
                "try again"
            )
        super().__init__(problem)


class StoreMoved(StoreError):
    """A store in `.mainstay`, the folder of the project's old name. Nothing was moved and no new store was made.

    `workers` and `commands` are the Runtimes and OS commands that still use it.
    """

    code = "store_moved"

    def __init__(self, path: str, old: str, move: str, workers: Sequence[str], commands: Sequence[str]) -> None:
        self.path, self.old, self.move = path, old, move
        self.workers, self.commands = tuple(workers), tuple(commands)
        users = [
            f"{what} ({', '.join(ids[:5])}{', …' if len(ids) > 5 else ''})"
            for ids, what in ((self.workers, "workers"), (self.commands, "commands"))
            if ids
        ]
        stop = f"{' and '.join(users)} still use it: stop them, then run" if users else "nothing uses it: run"
        super().__init__(
            f"there is no store at {path}, but {old} has one from before the project was renamed to Perdure; {stop} "
            f"`{move}`"
        )


class StoreInherited(StoreError):
    """A forked child that used its parent's store."""

    code = "store_inherited"

    def __init__(self, parent: int, child: int) -> None:
        self.parent, self.child = parent, child
        super().__init__(
            f"process {child} inherited this store from process {parent} by fork: open it only after forking, or start "
            "the child with the spawn method"
        )


class BlobMissing(StoreError):
    """A record that refers to a missing blob. Nothing was written."""

    code = "blob_missing"

    def __init__(self, digest: str) -> None:
        self.digest = digest
        super().__init__(f"blob {digest} is missing: put it again before recording a reference to it")


class RuntimeClosed(PerdureError):
    """A Runtime that was left or never entered."""

    code = "runtime_closed"

    def __init__(self, why: str = "this Runtime is closed: use it inside `async with`") -> None:
        super().__init__(why)


class WrongLoop(PerdureError):
    """A Runtime that was used on another event loop than its own."""

    code = "wrong_loop"

    def __init__(self) -> None:
        super().__init__("this Runtime was entered on another event loop: make one Runtime per loop")


class PluginError(PerdureError):
    """An error of a plugin. `plugin` is its id."""

    code = "plugin_error"

    def __init__(self, plugin: str, why: str) -> None:
        self.plugin, self.why = plugin, why
        super().__init__(f"plugin {plugin!r}: {why}")


class PluginFault(PluginError):
    """A hook that raised, hung or returned an invalid value."""

    code = "plugin_fault"

    def __init__(self, plugin: str, hook: str, what: str) -> None:
        self.hook, self.what = hook, what
        super().__init__(plugin, f"{hook}: {what}")


class PluginConflict(PluginError, InvalidDefinition):
    """Two plugins that claim the same id, tool name, operation or exclusive slot."""

    code = "plugin_conflict"

    def __init__(self, plugin: str, other: str, what: str) -> None:
        self.other, self.what = other, what
        super().__init__(plugin, f"{what} belongs to {other!r} already: leave one of them out")


class OperationError(PluginError):
    """A wrong call of a plugin's operation, or its failure. `plugin` is "" if no plugin offers the operation."""

    code = "operation_error"

    def __init__(self, operation: str, plugin: str, why: str) -> None:
        super().__init__(plugin, why)
        self.operation = operation
        self.args = (f"operation {quoted(operation)}: {why}",)


class UnknownOperation(OperationError, NotFound):
    """No plugin offers an operation of this name and kind."""

    code = "unknown_operation"

    def __init__(self, operation: str, why: str) -> None:
        super().__init__(operation, "", why)


class MissingSession(OperationError, InvalidInput):
    """A call without a session of an operation that needs one."""

    code = "missing_session"

    def __init__(self, operation: str, plugin: str) -> None:
        super().__init__(operation, plugin, "it works on a session: name one, or call it from inside a session")


class UnexpectedSession(OperationError, InvalidInput):
    """A call with a session of an operation that takes none."""

    code = "unexpected_session"

    def __init__(self, operation: str, plugin: str, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(operation, plugin, f"it works on no session: call it without {quoted(session_id)}")


class InvalidArguments(OperationError, InvalidInput):
    """Arguments that do not fit the operation's schema. The operation was not called."""

    code = "invalid_arguments"


class OperationFailed(OperationError):
    """An operation that raised or returned an unusable value. `accepted` are the turns that it had queued before."""

    code = "operation_failed"

    def __init__(self, operation: str, plugin: str, why: str, accepted: tuple[str, ...] = ()) -> None:
        self.accepted = accepted
        super().__init__(operation, plugin, f"{why}; queued before: {', '.join(accepted)}" if accepted else why)


class Unavailable(PerdureError):
    """A feature that this session, machine or version lacks."""

    code = "unavailable"


class MissingExtra(Unavailable, ImportError):
    """A missing package that this part of Perdure needs. It is an ImportError, too."""

    code = "missing_extra"

    def __init__(self, what: str, extra: str) -> None:
        self.extra = extra
        super().__init__(
            f"{what} needs packages that are not installed: run `pip install -e '.[{extra}]'` in Perdure's folder"
        )


class CodeUnavailable(Unavailable):
    code = "code_unavailable"

    def __init__(self) -> None:
        super().__init__("code execution is not available in this session")


class CodeRuntimeExited(Unavailable):
    code = "code_runtime_exited"

    def __init__(self) -> None:
        super().__init__("code execution runtime exited unexpectedly")


class DumpRefused(Unavailable):
    """A saved interpreter that is not loaded. Running its cells again restores its variables."""

    code = "dump_refused"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the saved state of the code is not loaded: {reason}")


class LiveEventsUnavailable(Unavailable):
    """A worker whose live events cannot be read here. Observers read its turns from the store, after a gap.

    `gone` is True if the worker's socket has no listener, as after the worker's death.
    """

    code = "live_events_unavailable"

    def __init__(self, worker_id: str, why: str, *, gone: bool = False) -> None:
        self.worker_id, self.why, self.gone = worker_id, why, gone
        super().__init__(f"live events of worker {worker_id} cannot be read here: {why}")


class CommandsUnavailable(Unavailable):
    """A machine or store on which commands cannot run, or their output cannot be read."""

    code = "commands_unavailable"


class McpUnavailable(Unavailable):
    """An MCP server that cannot be asked now. Nothing was sent to it; `runtime.mcp.status()` lists all servers."""

    code = "mcp_unavailable"

    def __init__(self, server: str, why: str) -> None:
        self.server, self.why = server, why
        super().__init__(f"MCP server {server!r} cannot be asked now: {why}")


class SearchUnavailable(Unavailable):
    """A store whose conversations cannot be searched."""

    code = "search_unavailable"
    hint = ": Runtime(search=True) makes an index of a store in a file, or in memory"

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


class SignalsUnavailable(Unavailable):
    """A wait for signals outside of the main thread, the only one in which Python runs signal handlers."""

    code = "signals_unavailable"

    def __init__(self) -> None:
        super().__init__(
            "signals reach the main thread only: call run_until_stopped() there, or elsewhere stop the Runtime with "
            "`await runtime.drain(timeout=30)`"
        )


class InputFilterMissing(Unavailable):
    """An input for an agent that filters inputs, in a Runtime without these filters. Nothing was written."""

    code = "input_filter_missing"
    hint = ": give this Runtime the agent, or its filters, Runtime(input_filters={…})"

    def __init__(self, agent: str, session_id: str) -> None:
        self.agent, self.session_id = agent, session_id
        super().__init__(
            f"inputs of agent {agent!r} pass filters before they are stored, and this Runtime has none of them"
        )


class ProviderUnavailable(Unavailable):
    """A session whose agent is not part of this Runtime, so that its model cannot be called here."""

    code = "provider_unavailable"

    def __init__(self, agent: str, session_id: str) -> None:
        self.agent, self.session_id = agent, session_id
        super().__init__(f"agent {agent!r} is not part of this Runtime, which session {session_id!r} belongs to")


class ProviderError(PerdureError):
    """A failed model call. Providers raise it, and the engine retries the call if it is `retryable`.

    `unseen` is True if the request was sent and its outcome is not known. Its cost is then unknown and not zero, as for
    an answer that broke off.
    """

    code = "provider_error"

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = False,
        after: float | None = None,
        code: str | None = None,
        unseen: bool = False,
    ) -> None:
        self.retryable, self.after, self.unseen = retryable, after, unseen
        if code is not None:
            self.code = code
        super().__init__(message)


class NotPrepared(PerdureError):
    """A function that is called before every run and that raised or returned an unusable value.

    A turn without records ends as `Failed(code, …)`. A turn with records, and a process, are set aside with this error
    as the reason; they continue when the function is corrected and they are resumed.
    """

    code = "not_prepared"
    what = "function"

    def __init__(self, reason: str, session_id: str = "") -> None:
        self.reason, self.session_id = reason, session_id
        super().__init__(f"the {self.what} failed for this run: {reason}")


class DepsFailed(NotPrepared):
    """A failure of the function that makes `ctx.deps`."""

    code = "deps_failed"
    what = "deps function"


class InstructionsFailed(NotPrepared):
    """A failure of the function that writes an agent's instructions."""

    code = "instructions_failed"
    what = "instructions function"


class ScriptExhausted(PerdureError):
    """A scripted model ran dry, or was left with answers that were not asked for."""

    code = "script_exhausted"


class InternalError(PerdureError):
    """An impossible state: this is a bug in Perdure, please report it with the message."""

    code = "internal_error"


class ToolError(Exception):
    """Raised by a tool to tell the model what went wrong. Ends the call as failed; never retried."""

    def __init__(self, message: str = "", *, code: str = "tool_error", data: Any = None) -> None:
        self.message, self.code, self.data = message, code, data
        super().__init__(message)


class Retry(ToolError):
    """Raised by a tool that failed *before* any effect, so that running it again is safe."""

    def __init__(self, message: str = "", *, after: float | None = None, code: str = "retry", data: Any = None) -> None:
        self.after = after
        super().__init__(message or "the tool asked for another attempt", code=code, data=data)
