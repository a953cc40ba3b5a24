"""The code protocol: a model answers with Python, and calls tools from there.

    reply                           means
    prose, no fence                 the answer
    prose and a closed fence        the fence is a cell: it is run, and its output is the next thing that is said
    half a fence, or another one    nothing is run, and the model is told why

What stands behind the first closed fence is not run, and the model is not shown it again: it would take what it made up
for what happened. History of native tool calls is shown as text, because no tools are offered with the request.

Which part of an answer is the cell goes by the rules that CommonMark has for fenced code, less what a model never
means:

- A fence opens with three or more backticks or tildes at the start of a line, after at most three spaces, and an info
  string whose first word names the language. With backticks the info string has no backtick, else the line is text.
- It closes with a line of at least as many of the same sign and nothing else. What looks like a fence inside an open
  one is part of it.
- `python`, `py`, `python3` and no language at all are Python, in any case. Blocks of other languages are skipped: a
  model may show JSON before its code.
- What is not closed is never run: the answer broke off, or the model forgot the line, and whether the code is whole
  cannot be known.

Sans-IO, like the machine that acts on what is read here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from perdure.model.codec import encode
from perdure.model.message import Message, Part, Text, ToolCall, ToolResult
from perdure.model.protocol import Prompt, Reading
from perdure.turn.tools import NATIVE, Describe

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

PYTHON = frozenset({"", "python", "py", "python3"})

RUN = frozenset({"bash", "sh", "shell", "zsh", "console", "javascript", "js", "typescript", "ts", "node", "tool_code"})
"""Other languages that a model means to be run. JSON, YAML, SQL or HTML in prose are part of an answer."""

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
"""Not `splitlines`, which also breaks at signs that may stand inside a string of the code."""
_OPEN = re.compile(r" {0,3}(?P<fence>`{3,}|~{3,})(?P<info>.*)")
"""What follows the fence has its blanks on: a pattern that took them off would try each of them as the last one."""
_HALF = (
    "The code block is not closed, so nothing of it was run: the answer may have broken off. Send the whole cell "
    "again, and end it with a line of ```."
)
_OTHER = "Only Python is run here, and the answer has code in {}. Send one block that begins with ```python."

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


class Fence(Struct, frozen=True):
    """The cell of an answer, or why there is none to run.

    `code` is where its code begins and ends, `end` the offset after its closing line. `dropped`: more than white space
    follows. `fault` is told to the model; then there is no code, and nothing may run.
    """

    code: tuple[int, int] = (0, 0)
    end: int = 0
    dropped: bool = False
    fault: str = ""


def cell_of(text: str) -> Fence | None:
    """The cell in `text`; None where it has no code at all, so that the prose is the answer."""
    others: list[str] = []
    opened: tuple[str, str, int] | None = None  # the fence, its language, where its code begins
    offset = 0
    for line in _LINE.findall(text):
        start, offset = offset, offset + len(line)
        bare = line.rstrip("\r\n")
        if opened is None:
            found = _OPEN.match(bare)
            if found is None or (found["fence"][0] == "`" and "`" in found["info"]):
                continue
            words = found["info"].split(maxsplit=1)
            opened = (found["fence"], words[0].strip("{}.").lower() if words else "", offset)
            continue
        fence, language, begin = opened
        if not _closes(bare, fence):
            continue
        opened = None
        if language in PYTHON:
            return Fence((begin, start), offset, bool(text[offset:].strip()))
        others.append(language)
    if opened is not None and opened[1] in PYTHON:
        return Fence(fault=_HALF)
    if opened is not None:
        others.append(opened[1])
    meant = sorted(RUN.intersection(others))
    return Fence(fault=_OTHER.format(", ".join(meant))) if meant else None


def _closes(line: str, fence: str) -> bool:
    bare = line.strip(" \t")
    return len(line) - len(line.lstrip(" ")) <= 3 and len(bare) >= len(fence) and set(bare) == {fence[0]}
