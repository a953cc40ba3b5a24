"""Handles: a process seen from outside, in the same JSON for models, hosts and the command line.

    {"__handle__": "process", "id": "nightly-1"}

`ProcessPolicy` lets a host narrow what sessions see of processes and do with them; `CancelPolicy`, who may cancel one
that a session did not start in the run at hand. Without the latter, a model may cancel what its session sees
(`cancel_process`), and plugins and tools end what is the session's own (`ctx.host.cancel_background_task` and its kin).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Struct

from perdure.errors import InvalidProcess, ProcessAbandoned, ProcessCancelled, ProcessFailed, ProcessPruned, quoted
from perdure.lifecycle.process import check_process_id, unsettled_steps
from perdure.model.command import READ_BYTES, RESULT, CommandResult, Output, OutputQuery, Stream, read_query
from perdure.model.message import NO_METADATA, Metadata
from perdure.model.outcome import PendingCall
from perdure.model.process import AwaitOutput, ProcessEvent, ProcessRow, ProcessState
from perdure.tools.revive import ValueCodec, revived, value_codec
from perdure.wire import handle_json, parse_handle

A_co = TypeVar("A_co", covariant=True)

if TYPE_CHECKING:
    # Type checkers know it on every Python: what is written without an argument is of any type.
    from typing_extensions import TypeVar as DefaultTypeVar

    R_co = DefaultTypeVar("R_co", covariant=True, default=Any)
else:
    R_co = TypeVar("R_co", covariant=True)

Settlement: TypeAlias = Literal["rerun", "done", "failed"]
CancelSource: TypeAlias = Literal["tool", "process", "host_api"]


def step_call_id(process_id: str, key: str) -> str:
    """Return the id of a step, as its tool context has it; `key` is unique in the process."""
    return f"{process_id}.{key}"


def pending_steps(row: ProcessRow) -> list[PendingCall]:
    """Return the steps of a process that wait until a person has settled them."""
    return [
        PendingCall(step_call_id(row.id, each.key), "recovery", each.step, {}, each.since)
        for each in unsettled_steps(row.record.waits)
        if row.live
    ]


BY_HANDLE = "requested by process handle"


def handle_id(value: Any) -> str:
    """The id of a process from whatever a user has of it: its handle, its JSON, that as text, its id."""
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError):
            return parse_handle(msgspec.json.decode(value))[0]
    if isinstance(value, str):
        return check_process_id(value)
    found = getattr(value, "id", None)
    if not isinstance(value, Mapping) and isinstance(found, str):
        return check_process_id(found)
    return parse_handle(value)[0]


def value_of(process_id: str, output: Any) -> Any:
    """The value of an outcome as JSON. Raises ProcessFailed or one of its kind where there is none."""
    kind = output["type"]
    if kind == "success":
        return output.get("value")
    if kind == "failure":
        raise ProcessFailed(process_id, f"failed: {output['code']}: {output.get('message', '')}", output)
    if kind in ("cancelled", "abandoned") and output.get("value") is not None:
        return output["value"]  # it has something to show all the same, which says how it ended
    if kind == "cancelled":
        why = output.get("reason") or "it was asked to end"
        raise ProcessCancelled(process_id, f"was cancelled by {output.get('by') or 'somebody'}: {why}", output)
    if kind == "abandoned":
        evidence = output["evidence"]
        raise ProcessAbandoned(
            process_id, f"was given up ({evidence['writer']}): whether its last effect happened is not known", output
        )
    raise ProcessPruned(process_id, output["status"], output["pruned_at"])


class SignalReceipt(int):
    """The number of the event that a signal became, and whether the process waits for it.

    `awaited`: the process waited for this signal; None when that is not known, because another worker has it in memory
    or the work is done outside. `waits_for`: the signals that it waits for instead. A signal that no branch waits for
    yet is kept until the function asks for it.
    """

    awaited: bool | None
    waits_for: tuple[str, ...]

    def __new__(cls, sequence: int, awaited: bool | None = None, waits_for: tuple[str, ...] = ()) -> Self:
        receipt = super().__new__(cls, sequence)
        receipt.awaited, receipt.waits_for = awaited, waits_for
        return receipt

    def note(self, name: str) -> str:
        """A note for the sender of a signal that the process does not wait for; "" if it does, or may."""
        if self.awaited is not False:
            return ""
        instead = f"it waits for: {', '.join(self.waits_for)}" if self.waits_for else "it waits for no signal now"
        return f"it does not wait for {name!r}, {instead}; the signal is kept until it asks for it"


class Processes(Protocol):
    """What a handle asks of its Runtime."""

    async def outcome(self, process_id: str, timeout: float | None = None) -> AwaitOutput: ...

    async def signal(
        self, process_id: str, name: str, payload: Any = None, *, key: str | None = None
    ) -> SignalReceipt: ...

    async def cancel(self, process_id: str, reason: str = "", *, by: str = "host") -> str: ...

    async def settle(
        self,
        process_id: str,
        call_id: str,
        verdict: Settlement,
        *,
        value: Any = None,
        reason: str = "",
        by: str = "host",
    ) -> None: ...

    async def get(self, process_id: str) -> ProcessRow: ...

    def events(self, process_id: str, after: int = 0, *, follow: bool = False) -> AsyncIterator[ProcessEvent]: ...

    def output(self, process_id: str, query: OutputQuery) -> Output: ...


class Startable(Protocol[A_co]):
    """A durable function, as its callers see it."""

    @property
    def name(self) -> str: ...

    def returns(self) -> ValueCodec | None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, A_co]: ...


class ProcessCall(Generic[R_co]):
    """A durable function with its arguments as JSON, ready to be started."""

    __slots__ = ("args", "function")

    def __init__(self, function: Startable[R_co], args: Mapping[str, Any]) -> None:
        self.function, self.args = function, args

    def __repr__(self) -> str:
        return f"<call of {self.function!r} with {quoted(dict(self.args))}>"


def read_start(what: Any, args: Mapping[str, Any] | None) -> tuple[Any, Mapping[str, Any] | None, ValueCodec | None]:
    """What is to be started, with which arguments, and how its result is brought back."""
    if isinstance(what, ProcessCall):
        if args:
            raise InvalidProcess(f"{what!r} has its arguments: give them to `.call(…)`")
        what, args = what.function, what.args
    returns = getattr(type(what), "returns", None)  # not by the protocol: to check that costs more than to start
    return what, args, None if returns is None else returns(what)


class ProcessHandle(Generic[R_co]):
    """A process seen from outside. It holds nothing: any number of them may exist, in any process, at any time.

    One that was made from a durable function knows what that returns (`codec`): `result` gives a value of that type.
    Otherwise it gives JSON.
    """

    __slots__ = ("_processes", "codec", "id")

    def __init__(self, processes: Processes, process_id: str, codec: ValueCodec | None = None) -> None:
        self._processes, self.id, self.codec = processes, process_id, codec

    def __repr__(self) -> str:
        return f"<ProcessHandle {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessHandle) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def to_json(self) -> dict[str, str]:
        """The handle as JSON: a program that has it may ask for the process with `runtime.handle(…)`."""
        return handle_json(self.id)

    async def result(self, timeout: float | None = None) -> R_co:
        """Its value, once it has ended; `ProcessFailed` when it has none. `TimedOut` ends the wait, not the process.

        `NotRevived` when the value is not of the type that its function returns today; `outcome` has it as JSON.
        """
        value = value_of(self.id, msgspec.to_builtins(await self.outcome(timeout)))
        codec = self.codec
        if codec is None and isinstance(value, dict) and value.get("type") == RESULT:
            codec = value_codec(CommandResult)  # of a command, which has no function that could be named
        return cast(R_co, revived(codec, value, f"process {self.id!r}", "its result"))

    async def outcome(self, timeout: float | None = None) -> AwaitOutput:
        """How it ended, whatever that was."""
        return await self._processes.outcome(self.id, timeout)

    async def signal(self, name: str, payload: Any = None, *, key: str | None = None) -> SignalReceipt:
        """Send it a signal: the number of the event that it became, with whether the process waits for it.

        The same `key` is the same signal. One that its function does not declare is refused.
        """
        return await self._processes.signal(self.id, name, payload, key=key)

    async def pending(self) -> list[PendingCall]:
        """Return the steps that wait until a person has said what became of them (`recovery="ask"`), see `settle`.

        A step is listed once the process is parked, which it is when all of its branches wait.
        """
        return pending_steps(await self._processes.get(self.id))

    async def settle(
        self, call_id: str, verdict: Settlement, *, value: Any = None, reason: str = "", by: str = "host"
    ) -> None:
        """Say what became of a step that a crash interrupted; `pending` has its `call_id`.

        "rerun" does it again, under the same idempotency key. "done" makes `value` its result, "failed" raises
        `StepFailed` at its line. The step returns the value if it fits the annotation of its function; otherwise it
        goes on waiting, and the log says why. Raises UnknownStep if no step waits under this id.
        """
        await self._processes.settle(self.id, call_id, verdict, value=value, reason=reason, by=by)

    async def cancel(self, reason: str = "", *, by: str = "host") -> str:
        """Ask it to end: "requested", "already_requested" or "ended". `outcome` tells how it did."""
        return await self._processes.cancel(self.id, reason, by=by)

    async def status(self) -> ProcessState:
        """How it is: queued, running, waiting, stuck, completed, failed, cancelled, abandoned or caller_departed."""
        return (await self._processes.get(self.id)).state

    async def progress(self) -> Any:
        """What it last said of how far it is, with `ctx.progress(…)`; None before that."""
        return (await self._processes.get(self.id)).record.progress

    async def record(self) -> ProcessRow:
        """Everything that is kept of it."""
        return await self._processes.get(self.id)

    def events(self, after: int = 0, *, follow: bool = False) -> AsyncIterator[ProcessEvent]:
        """Its events after number `after`; with `follow`, until it has ended."""
        return self._processes.events(self.id, after, follow=follow)

    def output(
        self, stream: Stream = "stdout", after: int = 0, *, follow: bool = False, limit: int = READ_BYTES
    ) -> Output:
        """What a command wrote, from offset `after` on: `await` it for one chunk of at most `limit` bytes, or iterate
        over all of it with `async for`. With `follow`, it waits for more until the command has ended.

        "combined" is both streams in the order in which they were read.
        """
        return self._processes.output(self.id, read_query(stream, after, limit, follow))


class CancelAsk(Struct, frozen=True):
    """A session wants a process to end. `handle` is what it gave, `call_id` the call in which it did.

    `granted`: it may see the process. `source`: "process" when a model gave a handle to `cancel_process`, "host_api"
    when a plugin or a tool asked through its services.
    """

    session_id: str
    process_id: str
    call_id: str = ""
    source: CancelSource = "process"
    handle: Any = None
    reason: str = BY_HANDLE
    granted: bool = False


ProcessVerb: TypeAlias = Literal["start", "await", "signal"]


class ProcessAsk(Struct, frozen=True):
    """A session wants to start, await or signal a process, in call `call_id`; "" where a plugin does.

    `name` is what is to be started, or the signal. `data` are the arguments, of a command all that it is to be; or
    what the signal says. `process` is the process as it is, None where it is to be started. `metadata` says whom the
    session works for.
    """

    verb: ProcessVerb
    session_id: str
    call_id: str = ""
    name: str = ""
    data: Any = None
    process: ProcessRow | None = None
    metadata: Metadata = NO_METADATA


class ProcessPolicy:
    """A host's own rules for what sessions may do with processes: `Runtime(process_policy=…)`. Override what you need;
    each method may be async.

    It is asked about what models, tools and plugins do in a session, never about calls of the host. It can narrow what
    a session may do, and never widen it. What it raises refuses the wish, in its words. Cancels are `CancelPolicy`'s.
    """

    def sees(self, session_id: str, process: ProcessRow) -> bool | Awaitable[bool]:
        """Whether a session may see a process that it was granted: list, await, signal and cancel it. Not asked about
        what the run at hand has started itself."""
        return True

    def check(self, ask: ProcessAsk) -> Awaitable[None] | None:
        """Raise ToolError, or anything else, to refuse a start, an await or a signal."""


class CancelPolicy(Protocol):
    """A host's own way to decide about cancels: `Runtime(cancel_policy=…)`.

    Asked for every process that the run at hand has not started itself. It cancels through `processes` or raises; what
    it raises is the answer to the caller.
    """

    async def cancel(self, processes: Processes, ask: CancelAsk) -> ProcessRow: ...
