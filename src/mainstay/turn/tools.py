"""The tools protocol: a model calls tools by the means of its provider.

    reply              means
    calls              they are made, all at once
    no calls           the answer

Every call needs an id that is its own in the reply: results are paired by it. History of cells is text already.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from mainstay.model.message import Part, ToolCall
from mainstay.model.protocol import Prompt, Reading


class ToolsProtocol(Struct, frozen=True, gc=False):
    """How a turn of an agent with mode="tools" is asked, and its replies are read: as they are."""

    def ask(self, prompt: Prompt) -> Prompt:
        return prompt

    def read(self, parts: Sequence[Part], name: str) -> Reading:
        ids = [part.id for part in parts if type(part) is ToolCall]
        given = set(ids)
        if len(given) == len(ids) and "" not in given:
            return Reading(tuple(parts))
        seen: set[str] = set()
        out: list[Part] = []
        index = 0
        for part in parts:
            if type(part) is ToolCall:
                if not part.id or part.id in seen:
                    own = f"{name}.{index}"
                    while own in given or own in seen:
                        own += "'"
                    part = replace(part, id=own)
                seen.add(part.id)
                index += 1
            out.append(part)
        return Reading(tuple(out))


NATIVE = ToolsProtocol()
