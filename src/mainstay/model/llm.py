"""What a model is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import astuple

from mainstay.model.message import Message, Part, Reasoning, Text, ToolCall
from mainstay.model.tool import ToolSpec

Stop: TypeAlias = Literal["end", "tool_calls", "length", "filtered"]


class Usage(Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens spent. `input` excludes what the cache answered; `reasoning` is part of `output`.

    `calls` counts answered model calls; `unknown` counts those whose usage nobody saw (a crash, or a provider that
    does not say): unknown is not zero. `cost` is money where the provider reports it.
    """

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0
    calls: int = 0
    unknown: int = 0
    cost: float = 0.0

    @property
    def total(self) -> int:
        return self.input + self.output + self.cache_read + self.cache_write

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(add, astuple(self), astuple(other)))


class ModelRequest(Struct, frozen=True, gc=False):
    """One question to a model. `call_id` names the model call and `attempt` counts from 1."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    output_schema: dict[str, Any] | None = None
    call_id: str = ""
    attempt: int = 1
    session_id: str = ""
    turn_id: str = ""
    tool_choice: Literal["auto", "none"] = "auto"


class ModelResponse(Struct, frozen=True, gc=False, omit_defaults=True):
    """One complete answer. A stream that ends without one is broken off, never finished."""

    text: str = ""
    tool_calls: Sequence[ToolCall] = ()
    usage: Usage | None = None
    stop: Stop = "end"
    reasoning: Sequence[Reasoning] = ()
    model: str = ""
    parts: Sequence[Part] = field(default=())

    def all_parts(self) -> tuple[Part, ...]:
        """The answer in emission order; providers that know the order give `parts` themselves."""
        if self.parts:
            return tuple(self.parts)
        text = (Text(self.text),) if self.text else ()
        return (*self.reasoning, *text, *self.tool_calls)


class Completion(Struct, frozen=True, gc=False, omit_defaults=True):
    """The answer to a direct completion. `value` is set when JSON or a type was asked for."""

    text: str
    value: Any = None
    usage: Usage | None = None
    model: str = ""


Delta: TypeAlias = str | Reasoning | ModelResponse
"""What a provider streams: pieces of text, pieces of reasoning, and last the whole answer."""
