"""A protocol that no agent has by itself: the model answers with one JSON object, a plan of calls or the answer.

{"calls": [{"tool": "look", "args": {"n": 1}}]}
{"answer": "It is 2."}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from perdure import Plugin
from perdure.model.message import Message, Part, Text, ToolCall, ToolResult
from perdure.model.protocol import Prompt, Reading

RULES = 'Answer with JSON alone: {"calls": [{"tool": …, "args": {…}}]} or {"answer": "…"}. There are: '


class PlanProtocol:
    """Calls and results are shown as the JSON that they are made of."""

    def ask(self, prompt: Prompt) -> Prompt:
        told = RULES + ", ".join([tool.name for tool in prompt.tools])
        return Prompt(
            "\n\n".join([each for each in (prompt.instructions, told) if each]), [*map(_shown, prompt.messages)]
        )

    def read(self, parts: Sequence[Part], name: str) -> Reading:
        text = "".join([part.text for part in parts if isinstance(part, Text)])
        try:
            said: Any = msgspec.json.decode(text)
            if isinstance(said.get("answer"), str):
                return Reading((Text(said["answer"]),))
            calls = [ToolCall(f"{name}.{i}", each["tool"], each["args"]) for i, each in enumerate(said["calls"])]
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError) as error:
            return Reading((Text(text),), fault=f"it is no plan ({type(error).__name__})")
        return Reading(tuple(calls))


def _shown(message: Message) -> Message:
    calls = [{"tool": call.name, "args": call.args} for call in message.tool_calls]
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    if calls:
        return Message("assistant", (Text(msgspec.json.encode({"calls": calls}).decode()),))
    if results:
        told = [{"tool": part.name, "gave": part.content} for part in results]
        return Message("user", (Text(msgspec.json.encode(told).decode()),))
    return message


class Planning(Plugin):
    """Brings it to an agent."""

    id = "planning"

    def protocol(self) -> PlanProtocol:
        return PlanProtocol()
