"""What plugins say: directives at a seam of a turn, pieces of prompt, snapshots of their state, and their faults."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from perdure.model.message import Message
from perdure.model.tool import BlobRef, ToolOutcome

Seam: TypeAlias = Literal["before_turn", "before_tool_call", "after_tool_call", "at_checkpoint", "after_turn"]


class AbortTurn(Struct, frozen=True, gc=False, tag_field="kind", tag="abort_turn", omit_defaults=True):
    """End the turn; at a tool call, fail that call instead."""

    code: str
    message: str = ""


class EnqueueMessages(Struct, frozen=True, gc=False, tag_field="kind", tag="enqueue_messages"):
    """Say something to the model: user and system messages, from the next model call on."""

    messages: tuple[Message, ...]


class CreateSession(Struct, frozen=True, gc=False, tag_field="kind", tag="create_session", omit_defaults=True):
    """Begin a child session. Asked for again after a crash, it is the same one.

    `session_id` None derives an id from where it is asked for. It begins with no history, or (`start="fork"`) with that
    of its parent up to the last committed turn; then comes `prelude`, messages it finds as if they had been said, and
    `said` is its first input. `hidden` are tools it must not see, beyond those its parent may not; `only` are all that
    it may see, of those its parent may. `label` says what it is for, to readers of its snapshot or its parent's
    usage. With `output`, a JSON schema, its turns answer with JSON that fits it.
    """

    agent: str | None = None
    session_id: str | None = None
    said: Message | None = None
    options: dict[str, Any] = {}
    hidden: tuple[str, ...] = ()
    label: str = "child"
    only: tuple[str, ...] | None = None
    start: Literal["empty", "fork"] = "empty"
    prelude: tuple[Message, ...] = ()
    output: dict[str, Any] | None = None


class ReplaceArgs(Struct, frozen=True, gc=False, tag_field="kind", tag="replace_tool_args"):
    """Call the tool with these arguments instead. Plugins that saw the old ones look once more."""

    args: dict[str, Any]


class ShortCircuit(Struct, frozen=True, gc=False, tag_field="kind", tag="short_circuit_tool"):
    """The call ends like this: instead of running, or instead of what it returned."""

    outcome: ToolOutcome


class AskPerson(Struct, frozen=True, gc=False, tag_field="kind", tag="ask_person", omit_defaults=True):
    """The call waits for `session.approve` or `session.reject`, as if its tool had declared `approval="ask"`."""

    reason: str = ""


class EmitEvents(Struct, frozen=True, gc=False, tag_field="kind", tag="emit_runtime_events"):
    """Publish events to observers of the session. Each value is JSON."""

    events: tuple[Any, ...]


class EmitTrace(Struct, frozen=True, gc=False, tag_field="kind", tag="emit_trace", omit_defaults=True):
    """Write to the trace, under `plugin.<id>.<name>`."""

    name: str
    payload: Any = None
    context: dict[str, Any] = {}


Directive: TypeAlias = (
    AbortTurn | EnqueueMessages | CreateSession | ReplaceArgs | ShortCircuit | AskPerson | EmitEvents | EmitTrace
)

_ANYWHERE = (CreateSession, EmitEvents, EmitTrace)
LEGAL: dict[Seam, frozenset[type]] = {
    "before_turn": frozenset({AbortTurn, EnqueueMessages, *_ANYWHERE}),
    "before_tool_call": frozenset({AbortTurn, ReplaceArgs, ShortCircuit, AskPerson, *_ANYWHERE}),
    "after_tool_call": frozenset({AbortTurn, EnqueueMessages, ShortCircuit, *_ANYWHERE}),
    "at_checkpoint": frozenset({AbortTurn, EnqueueMessages, *_ANYWHERE}),
    "after_turn": frozenset({EnqueueMessages, *_ANYWHERE}),
}
"""Which directives mean something where. Anything else is a fault of the plugin that gave it."""


def kind_of(directive: Directive) -> str:
    """The stable snake_case name of a directive: its tag on the wire."""
    return str(type(directive).__struct_config__.tag)


class Decision(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a plugin decided at a seam, as a record keeps it. `over` names those whose weaker decision it displaced."""

    plugin: str
    seam: Seam
    kind: str
    detail: Any = None
    over: tuple[str, ...] = ()


class Issue(Struct, frozen=True, gc=False, omit_defaults=True):
    """Something that went wrong beside a turn without ending it."""

    code: str
    message: str
    plugin: str = ""


class PromptPart(Struct, frozen=True, gc=False, omit_defaults=True):
    """A piece of the system prompt. Pieces stand by slot name, then by priority, smaller first."""

    content: str
    slot: str = "guidance"
    priority: int = 0
    title: str = ""


class TriggerEvent(Struct, frozen=True, gc=False, omit_defaults=True):
    """A kind of event that a plugin's source reports; `source` and `name` together are unique in an agent."""

    source: str
    name: str
    description: str = ""
    payload_schema: dict[str, Any] = {}

    @property
    def source_type(self) -> str:
        return f"{self.source}.{self.name}"


class Extension(Struct, frozen=True, gc=False):
    """What `plugin` adds to another plugin of its agent: JSON."""

    plugin: str
    value: Any


class ExecRequest(Struct, frozen=True, gc=False):
    """Code that a model wrote. `accept_finish`: it may end the turn with a value."""

    language: str
    code: str
    accept_finish: bool = False


class PluginSnapshot(Struct, frozen=True, gc=False, omit_defaults=True):
    """A plugin's state at a revision. `blobs` are named bytes beside the store."""

    version: str
    revision: int
    state: Any = None
    blobs: dict[str, BlobRef] = {}


class CompactedHistory(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a model is shown from now on in place of the history before this turn."""

    summary: tuple[Message, ...]
    reason: str = "compacted"


Compaction = CompactedHistory
"""The name it had before: `perdure.builtin.Compaction` is the plugin that returns one."""
