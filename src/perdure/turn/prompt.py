"""The words the runtime itself says to a model."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from msgspec.structs import replace

from perdure.model.code import Variable
from perdure.model.codec import encode
from perdure.model.message import Message, Part, Stored, Text, ToolResult
from perdure.model.plugin import PromptPart

MOST_NAMED = 100
"""Variables that a model is told of."""


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


def request_messages(instructions: str, messages: Sequence[Message]) -> Sequence[Message]:
    """What a model is shown: instructions where there are any, then the conversation."""
    return [Message("system", (Text(instructions),)), *messages] if instructions else messages


def go_on() -> Message:
    """Return the message that asks a model to go on, where a continued turn ends with an answer."""
    return Message("user", (Text("Go on where you were stopped."),))


def stored_in(messages: Iterable[Message]) -> Iterator[Stored]:
    """The files of messages whose bytes are in the store."""
    for message in messages:
        for part in message.parts:
            for file in part.files if isinstance(part, ToolResult) else (part,):
                source = getattr(file, "source", None)
                if isinstance(source, Stored):
                    yield source


def without_files(messages: Iterable[Message], digests: Container[str]) -> list[Message]:
    """The messages with words in place of files whose bytes cannot be had."""
    return [
        Message(message.role, tuple([_in_words(part, digests) for part in message.parts]))
        if any(source.digest in digests for source in stored_in([message]))
        else message
        for message in messages
    ]


def _in_words(part: Part, digests: Container[str]) -> Part:
    if isinstance(part, ToolResult):
        gone = [file for file in part.files if _is_gone(file, digests)]
        if not gone:
            return part
        content = part.content if isinstance(part.content, str) else encode(part.content).decode()
        kept = tuple([file for file in part.files if file not in gone])
        return replace(part, content="\n".join([content, *map(unreadable, gone)]), files=kept)
    return Text(unreadable(part)) if _is_gone(part, digests) else part


def _is_gone(part: object, digests: Container[str]) -> bool:
    source = getattr(part, "source", None)
    return isinstance(source, Stored) and source.digest in digests


def unreadable(file: object) -> str:
    """What a model is shown in place of a file."""
    name = getattr(file, "name", "") or getattr(file, "media_type", "")
    return f"[{type(file).__name__} {name!r} is not shown: its bytes are missing or damaged in the store]"


def step_limit(limit: int) -> Message:
    return Message(
        "system",
        (Text(f"The limit of {limit} steps for this turn is reached. Answer now with what you have; tools are off."),),
    )


def too_many_calls(count: int) -> Message:
    return Message(
        "system", (Text(f"That reply asked for {count:,} calls, which is more than the limit: none of them was made."),)
    )


def variables(listed: Sequence[Variable]) -> Message:
    """What a model is told of its variables when the cells that made them are not shown any more."""
    told = [f"{each.name}: {each.type}{'' if each.size is None else f' ({each.size})'}" for each in listed[:MOST_NAMED]]
    more = f", and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    said = f"[Variables of your earlier code, with the lengths of some: {', '.join(told)}{more}]"
    return Message("user", (Text(said),))


def unread(fault: str) -> Message:
    return Message("user", (Text(f"Nothing was run: {fault}"),))


def repair(error: str) -> Message:
    return Message("user", (Text(f"The answer does not have the required form: {error}. Answer again, corrected."),))
