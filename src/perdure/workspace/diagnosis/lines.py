"""From the bytes of a terminal to lines of text, in bounded memory."""

from __future__ import annotations

import re

LONGEST_LINE = 1 << 16
_ESCAPES = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|[()*+][0-9A-Za-z]"  # character sets
    r"|[@-Z\\^_=>78c]"
    r"|\Z)"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Lines:
    """Cuts a stream of bytes into lines, without colours. Of a line that was drawn over (`\\r`), the last drawing
    counts; of one that is longer than 64 KiB, its beginning."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that are whole now."""
        if self._skipping:
            end = data.find(b"\n")
            if end < 0:
                return []
            data, self._skipping = data[end:], False
        *whole, rest = (self._rest + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            rest, self._skipping = rest[:LONGEST_LINE], True
        self._rest = rest
        return [clean(each) for each in whole]

    def last(self) -> list[str]:
        """The line that no newline ended, if there is one."""
        rest, self._rest, self._skipping = self._rest, b"", False
        return [clean(rest)] if rest else []


def clean(line: bytes) -> str:
    text = line[:LONGEST_LINE].decode(errors="replace").rstrip("\r")
    if text.isprintable():
        return text
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\r" in text:
        text = text.rsplit("\r", 1)[1]
    return _CONTROLS.sub("", text)
