"""The words the runtime itself says to a model."""

from __future__ import annotations

from collections.abc import Sequence

from mainstay.model.message import Message, Text


def request_messages(instructions: str, history: Sequence[Message], own: Sequence[Message]) -> list[Message]:
    """What a model is shown: instructions, committed history, and the turn so far."""
    head = [Message("system", (Text(instructions),))] if instructions else []
    return [*head, *history, *own]


def step_limit(limit: int) -> Message:
    return Message(
        "system",
        (Text(f"The limit of {limit} steps for this turn is reached. Answer now with what you have; tools are off."),),
    )


def repair(error: str) -> Message:
    return Message("user", (Text(f"The answer does not have the required form: {error}. Answer again, corrected."),))
