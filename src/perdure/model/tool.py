"""Tools as data: what a model is shown, what was prepared, and how a call ended."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast

from msgspec import Struct, field

from perdure.errors import InvalidDefinition, quoted
from perdure.model.message import File

Recovery: TypeAlias = Literal["once", "rerun", "ask"]
Approval: TypeAlias = Literal["never", "ask"]


LEAST_BYTES, LEAST_LINES = 256, 8
"""Below these an output budget has no room for the marker that says what is missing."""


class OutputBudget(Struct, frozen=True, gc=False, omit_defaults=True):
    """How much of a tool's output the model is shown; None is no limit. What does not fit is kept whole beside it."""

    bytes: int | None = 16 * 1024
    lines: int | None = 400

    def __post_init__(self) -> None:
        for name, value, least in (("bytes", self.bytes, LEAST_BYTES), ("lines", self.lines, LEAST_LINES)):
            if value is not None and (type(value) is not int or value < least):
                raise InvalidDefinition(
                    f"an output budget of {quoted(value)} {name} is not usable: give {least} or more"
                )


class ToolSpec(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a model is shown of a tool, and what the runtime must know to run it safely.

    `id` stays the same when the name changes. `recovery` is the contract for a call that was in flight when its
    process died: never repeat (`once`), repeat under the same idempotency key (`rerun`), or ask a person (`ask`).
    `output_budget` goes before the agent's. A call of a `background` tool starts a process and returns its handle.
    """

    name: str
    description: str = ""
    input_schema: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    output_schema: dict[str, Any] | None = None
    id: str = ""
    recovery: Recovery = "once"
    approval: Approval = "never"
    deferred: bool = False
    timeout: float | None = None
    retries: int = 0
    limit: int | None = None
    resource: str | None = None
    output_budget: OutputBudget | None = None
    background: bool = False

    @property
    def tool_id(self) -> str:
        return self.id or f"tool:{self.name}"


class ProviderTool(Struct, frozen=True, gc=False, omit_defaults=True):
    """A tool of the provider's own, which it runs while it answers: `Agent(tools=[ProviderTool("web_search")])`.

    `kind` is "web_search", "code_execution" or "web_fetch"; a provider that has none of that kind refuses it by name.
    `options` go into the provider's description of the tool as they are.

    It is part of a model call. No record is written before it runs and no plugin or approval sees it, and a call that a
    crash or a failed attempt cuts off is made again: what the tool did then is done again.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind, options = cast("object", self.kind), cast("object", self.options)
        if not isinstance(kind, str) or not kind:
            raise InvalidDefinition(f"ProviderTool({quoted(kind)}) is not usable: give a kind such as 'web_search'")
        if not isinstance(options, dict):
            raise InvalidDefinition(f"ProviderTool(options={quoted(options)}) is not usable: give a dict of JSON")


class PreparedCall(Struct, frozen=True, gc=False, omit_defaults=True):
    """A call after preparation: arguments checked, and what its provider wants to see again at execution.

    `ask`: a person must approve the call before it begins, and why; as if its tool had declared `approval="ask"`.
    `approves`: a digest of what exactly would be done. An approval holds for that: a call that is prepared to do
    something else by the time it is approved does not begin.
    """

    call_id: str
    tool_id: str
    name: str
    args: dict[str, Any]
    payload: Any = None
    ask: str = ""
    approves: str = ""


class BlobRef(Struct, frozen=True, gc=False, tag="blob", omit_defaults=True):
    """Bytes kept beside the store, named by their SHA-256."""

    digest: str
    size: int
    media_type: str = "application/json"


class Artifact(Struct, frozen=True, gc=False, omit_defaults=True):
    """Bytes that a tool put under a name, for later tools of its session and for the host."""

    name: str
    digest: str
    size: int
    media_type: str = "application/octet-stream"


class Ok(Struct, frozen=True, gc=False, tag="ok", omit_defaults=True):
    """The tool returned. `value` is what the model sees; `whole` keeps what did not fit.

    `files` are the pictures and documents in the value, in order; the model is shown them, too.
    """

    value: Any = None
    whole: BlobRef | None = None
    files: tuple[File, ...] = ()


class Failed(Struct, frozen=True, gc=False, tag="failed", omit_defaults=True):
    """Something went wrong and is known to have. `code` is stable, `message` is for people and models."""

    code: str
    message: str
    data: Any = None


class Denied(Struct, frozen=True, gc=False, tag="denied", omit_defaults=True):
    """A person or a policy said no; the tool never ran."""

    reason: str = ""
    by: str = ""


class Cancelled(Struct, frozen=True, gc=False, tag="cancelled", omit_defaults=True):
    """Stopped on request before it could end by itself."""

    by: str = ""
    reason: str = ""


class OutcomeUnknown(Struct, frozen=True, gc=False, tag="outcome_unknown", omit_defaults=True):
    """The call was started and its end was not seen: its effect may or may not have happened."""

    reason: str = ""


ToolOutcome: TypeAlias = Ok | Failed | Denied | Cancelled | OutcomeUnknown


class ToolRecord(Struct, frozen=True, gc=False, omit_defaults=True):
    """One tool call of a turn, as a person reads it. `shown` are its arguments for those who watch, where they hold
    secrets."""

    call_id: str
    tool: str
    args: dict[str, Any]
    outcome: ToolOutcome
    attempts: int = 1
    repeated: int = 0
    duration_ms: int = 0
    artifacts: tuple[Artifact, ...] = ()
    shown: dict[str, Any] | None = None

    @property
    def value(self) -> Any:
        """What the tool returned, as the model saw it; None where it returned nothing, or did not return."""
        return self.outcome.value if isinstance(self.outcome, Ok) else None
