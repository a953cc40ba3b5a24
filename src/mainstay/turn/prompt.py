"""The words the runtime itself says to a model."""

from __future__ import annotations

from collections.abc import Iterable

from mainstay.model.message import Message, Text
from mainstay.model.plugin import PromptPart


def compose(instructions: str, parts: Iterable[PromptPart]) -> str:
    """Instructions and the pieces that plugins add, by slot and priority; what is said twice is said once."""
    kept: dict[tuple[str, int, str], PromptPart] = {}
    for part in parts:
        content = part.content.strip()
        if content:
            kept.setdefault((part.slot, part.priority, content), part)
    ordered = sorted(kept.values(), key=lambda part: (part.slot, part.priority))
    shown = [f"## {part.title}\n{part.content.strip()}" if part.title else part.content.strip() for part in ordered]
    return "\n\n".join([instructions, *shown] if instructions else shown)


def request_messages(instructions: str, messages: list[Message]) -> list[Message]:
    """What a model is shown: instructions, then the conversation."""
    return [Message("system", (Text(instructions),)), *messages] if instructions else messages


def step_limit(limit: int) -> Message:
    return Message(
        "system",
        (Text(f"The limit of {limit} steps for this turn is reached. Answer now with what you have; tools are off."),),
    )


def too_many_calls(count: int) -> Message:
    return Message(
        "system", (Text(f"That reply asked for {count:,} calls, which is more than the limit: none of them was made."),)
    )


def repair(error: str) -> Message:
    return Message("user", (Text(f"The answer does not have the required form: {error}. Answer again, corrected."),))
