"""What is said: messages and their parts, as the model sees them and as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import force_setattr

from mainstay.errors import InvalidInput, quoted
from mainstay.model.media import Audio, Document, File, FileRef, Image

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ResultStatus: TypeAlias = Literal["ok", "failed", "denied", "cancelled", "outcome_unknown"]


class Text(Struct, frozen=True, gc=False, tag="text"):
    """Words."""

    text: str


class Reasoning(Struct, frozen=True, gc=False, tag="reasoning", omit_defaults=True):
    """A model's reasoning. `replay` is what its provider needs to see again, opaque to us."""

    text: str = ""
    replay: Any = None


class ToolCall(Struct, frozen=True, gc=False, tag="tool_call", omit_defaults=True):
    """A call the model asked for. `id` is the provider's; `raw` holds arguments that were not a JSON object."""

    id: str = ""
    name: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    replay: Any = None


class ToolResult(Struct, frozen=True, gc=False, tag="tool_result", omit_defaults=True):
    """What the model is told about one call. `call_id` repeats the provider's id of the call."""

    call_id: str
    name: str
    content: Any = None
    status: ResultStatus = "ok"
    files: tuple[File, ...] = ()


class ProviderPart(Struct, frozen=True, gc=False, tag="provider_part", omit_defaults=True):
    """Part of an answer that only its own provider understands: signed or encrypted reasoning, what a tool of the
    provider's did.

    `body` is its JSON, and goes back to the same `dialect` byte for byte. Another dialect is shown `text`, never the
    body. `kind` is the provider's own word for it.
    """

    dialect: str
    model: str
    kind: str
    body: str
    text: str = ""


Part: TypeAlias = Text | Reasoning | ToolCall | ToolResult | ProviderPart | Image | Document | Audio | FileRef


class Message(Struct, frozen=True, gc=False):
    """One message: a role and its parts. A plain string is accepted as the only part."""

    role: Role
    parts: tuple[Part, ...] = ()

    if TYPE_CHECKING:

        def __init__(self, role: Role, parts: str | Iterable[Part] = ()) -> None: ...

    def __post_init__(self) -> None:
        given: object = self.parts
        if type(given) is tuple:
            return
        if isinstance(given, str):
            force_setattr(self, "parts", (Text(given),))
        else:
            if not isinstance(given, Iterable):
                raise InvalidInput(f"the parts of a message are text, or a list of parts, not {quoted(given)}")
            force_setattr(self, "parts", tuple(given))

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join([p.text for p in self.parts if type(p) is Text])

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [p for p in self.parts if type(p) is ToolCall]

    @property
    def tool_results(self) -> list[ToolResult]:
        return [p for p in self.parts if type(p) is ToolResult]


InputContent: TypeAlias = str | Message | Sequence[str | Part]
"""What a host may say: words, a user message, or words and files in a list."""


def unanswered(messages: Iterable[Message]) -> list[str]:
    """Provider ids of calls that no result follows: a history with any of these cannot be continued."""
    waiting: dict[str, None] = {}
    for message in messages:
        for part in message.parts:
            if type(part) is ToolCall:
                waiting[part.id] = None
            elif type(part) is ToolResult:
                waiting.pop(part.call_id, None)
    return list(waiting)
