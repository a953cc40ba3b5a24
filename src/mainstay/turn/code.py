"""The code protocol: a model answers with Python, and calls tools from there.

    reply                           means
    prose, no fence                 the answer
    prose and a closed fence        the fence is a cell: it is run, and its output is the next thing that is said
    half a fence, or another one    nothing is run, and the model is told why

What stands behind the first closed fence is not run, and the model is not shown it again: it would take what it made up
for what happened. History of native tool calls is shown as text, because no tools are offered with the request.

Sans-IO, like the machine that acts on what is read here.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from mainstay.model.codec import encode
from mainstay.model.message import Message, Part, Text, ToolCall, ToolResult
from mainstay.model.protocol import Prompt, Reading
from mainstay.turn.fences import cell_of
from mainstay.turn.tools import NATIVE, Describe

MAX_SECONDS = 366 * 24 * 3600
"""The longest sleep of a cell."""

RULES = (
    "To do something, write one block of Python that begins with ```python and ends with ```. It is run, and you are "
    "told what it printed, the value of its last line, and errors. Write nothing after the block: it would not be "
    "read. When there is nothing left to do, answer in words, without a block."
)
FORM = (
    "The answer has a form: finish(value) with a value that fits this JSON schema, or nothing but such JSON without a "
    "block: {}"
)

BEHIND = "[what followed the cell was dropped]"


class CodeProtocol(Struct, frozen=True, gc=False):
    """How a turn of an agent with mode="code" reads replies and shows the conversation.

    `describe` writes, for tools and the schema of the output, what a model must know to write cells.
    """

    describe: Describe

    def ask(self, prompt: Prompt) -> Prompt:
        """After the agent's own instructions stand what its cells may do, and what the turn is to end with."""
        output = prompt.output
        form = "" if output is None else FORM.format(encode(output).decode())
        told = (prompt.instructions, RULES, self.describe(prompt.tools, output), form)
        return Prompt("\n\n".join([each for each in told if each]), [_shown(each) for each in prompt.messages])

    def read(self, parts: Sequence[Part], name: str) -> Reading:
        """Calls by the means of the provider are made as they are: none is offered, and a model may still make one."""
        kept = NATIVE.read(parts, name).parts
        if any(type(part) is ToolCall for part in kept):
            return Reading(kept)
        cell = cell_of("".join([part.text for part in kept if type(part) is Text]))
        if cell is None:
            return Reading(kept)
        return Reading(kept, fault=cell.fault) if cell.fault else Reading(kept, cell.code)


def _shown(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", tuple([_in_words(part) for part in message.parts]))
    if message.role != "assistant":
        return message
    parts = tuple([_in_words(part) for part in message.parts])
    text = "".join([part.text for part in parts if type(part) is Text])
    cell = cell_of(text)
    if cell is None or cell.fault or not cell.dropped:
        return message if parts == message.parts else replace(message, parts=parts)
    others = [part for part in parts if type(part) is not Text]
    return replace(message, parts=(*others, Text(f"{text[: cell.end]}\n\n{BEHIND}")))


def _in_words(part: Part) -> Part:
    if isinstance(part, ToolCall):
        return Text(f"[called {part.name}({encode(part.args).decode()})]")
    if isinstance(part, ToolResult):
        content = part.content if isinstance(part.content, str) else encode(part.content).decode()
        return Text(f"[{part.name} returned: {content}]")
    return part
