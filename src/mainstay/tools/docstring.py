"""What a docstring says: the description of a tool, and one description for each parameter.

Google, NumPy and reST styles are read, also mixed. Nothing here fails: what is not understood stays in the description.
"""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

_GOOGLE = re.compile(r"(args|arguments|params|parameters|keyword args|keyword arguments|other parameters):$", re.I)
_GOOGLE_ENTRY = re.compile(r"[\\*]*(\w+)\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*:(?:\s+(.*)|$)")
_NUMPY = re.compile(r"(parameters|other parameters)$", re.I)
_NUMPY_ENTRY = re.compile(r"([\\*]*\w+(?:\s*,\s*[\\*]*\w+)*)(?:\s*:.*)?$")
_RULE = re.compile(r"-{3,}$|={3,}$")
_FIELD = re.compile(r"[:@](?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*[\s*\\])?(\w+)\s*:(?:\s+(.*)|$)")
_TYPE_FIELD = re.compile(r"[:@]type\s+[^:]*:")


class Docstring(NamedTuple):
    """The description without its parameter sections, and the descriptions of parameters by name."""

    description: str
    parameters: dict[str, str]


def parse(doc: object) -> Docstring:
    """Read a docstring; anything but a string is an empty one."""
    if not isinstance(doc, str):
        return Docstring("", {})
    lines = inspect.cleandoc(doc).splitlines()
    rest: list[str] = []
    found: dict[str, list[str]] = {}
    at = 0
    while at < len(lines):
        for read in (_read_field, _read_google, _read_numpy):
            end = read(lines, at, found)
            if end > at:
                at = end
                break
        else:
            rest.append(lines[at].rstrip())
            at += 1
    description = re.sub(r"\n{3,}", "\n\n", "\n".join(rest)).strip()
    texts = {name: " ".join(words).strip() for name, words in found.items()}
    return Docstring(description, {name: text for name, text in texts.items() if text})


# A reader looks at one line and returns where to go on: the same line when it is not for this reader.


def _read_field(lines: list[str], at: int, found: dict[str, list[str]]) -> int:
    line = lines[at].strip()
    if field := _FIELD.match(line):
        entry = found.setdefault(field[1], [])
        entry.append(field[2] or "")
    elif _TYPE_FIELD.match(line):
        entry = []
    else:
        return at
    end = _end_of_block(lines, at, blank_ends=True)
    entry.extend(text.strip() for text in lines[at + 1 : end])
    return end


def _read_google(lines: list[str], at: int, found: dict[str, list[str]]) -> int:
    if not _GOOGLE.match(lines[at].strip()):
        return at
    end = _end_of_block(lines, at)
    block = [line for line in lines[at + 1 : end] if line.strip()]
    if not block:
        return at
    entry: list[str] = []
    for line in block:
        named = _GOOGLE_ENTRY.match(line.strip()) if _indent(line) <= _indent(block[0]) else None
        if named:
            entry = found.setdefault(named[1], [])
        entry.append((named[2] or "") if named else line.strip())
    return end


def _read_numpy(lines: list[str], at: int, found: dict[str, list[str]]) -> int:
    if not (_NUMPY.match(lines[at].strip()) and _is_ruled(lines, at)):
        return at
    margin, end = _indent(lines[at]), at + 2
    entries: list[list[str]] = []
    while end < len(lines) and not _is_ruled(lines, end):
        line = lines[end].strip()
        if line and _indent(lines[end]) <= margin:
            named = _NUMPY_ENTRY.match(line)
            if not named:
                break
            entries = [found.setdefault(name.strip(" \\*"), []) for name in named[1].split(",")]
        elif line:
            for entry in entries:
                entry.append(line)
        end += 1
    return end


def _is_ruled(lines: list[str], at: int) -> bool:
    """Whether the line is a NumPy heading: words with a rule under them."""
    return bool(lines[at].strip()) and at + 1 < len(lines) and bool(_RULE.match(lines[at + 1].strip()))


def _end_of_block(lines: list[str], at: int, *, blank_ends: bool = False) -> int:
    """The first line after `at` that is not indented deeper than it."""
    margin, end = _indent(lines[at]), at + 1
    while end < len(lines):
        if lines[end].strip():
            if _indent(lines[end]) <= margin:
                break
        elif blank_ends:
            break
        end += 1
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
