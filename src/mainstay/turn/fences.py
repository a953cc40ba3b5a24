"""Which part of a model's answer is the cell: the first closed fence of Python.

Rules, as CommonMark has them for fenced code, less what a model never means:

- A fence opens with three or more backticks or tildes at the start of a line, after at most three spaces, and an info
  string whose first word names the language. With backticks the info string has no backtick, else the line is text.
- It closes with a line of at least as many of the same sign and nothing else. What looks like a fence inside an open
  one is part of it.
- `python`, `py`, `python3` and no language at all are Python, in any case. Blocks of other languages are skipped: a
  model may show JSON before its code.
- What is not closed is never run: the answer broke off, or the model forgot the line; either way nobody knows whether
  the code is whole.
- One answer has one cell. What follows its closing line was written without knowing what the cell returns, so it is
  dropped, and the drop is marked.
"""

from __future__ import annotations

import re

from msgspec import Struct

PYTHON = frozenset({"", "python", "py", "python3"})

RUN = frozenset({"bash", "sh", "shell", "zsh", "console", "javascript", "js", "typescript", "ts", "node", "tool_code"})
"""Other languages that a model means to be run. JSON, YAML, SQL or HTML in prose are part of an answer."""

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
"""Not `splitlines`, which also breaks at signs that may stand inside a string of the code."""
_OPEN = re.compile(r" {0,3}(?P<fence>`{3,}|~{3,})(?P<info>.*)")
"""What follows the fence has its blanks on: a pattern that took them off would try each of them as the last one."""


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


_HALF = (
    "The code block is not closed, so nothing of it was run: the answer may have broken off. Send the whole cell "
    "again, and end it with a line of ```."
)


_OTHER = "Only Python is run here, and the answer has code in {}. Send one block that begins with ```python."
