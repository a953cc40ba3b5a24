"""What a run of tests or of a build tells: from the output of the usual tools to failures and diagnostics.

Pure: bytes go in, as they were written, and a `Diagnosis` comes out. `report.py` has what is told and how sure it is,
the other modules a reader for each tool; `detection.py` finds out what a project is tested and built with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from perdure.workspace.diagnosis.javascript import Jest, Tsc, Vitest
from perdure.workspace.diagnosis.junit import JUnit
from perdure.workspace.diagnosis.lines import Lines
from perdure.workspace.diagnosis.native import Cargo, Cc, Go
from perdure.workspace.diagnosis.python import Mypy, Pytest, Ruff, Unittest
from perdure.workspace.diagnosis.report import CommandEnd, Diagnosis, Reader, judge

READERS: dict[str, Callable[[], Reader]] = {
    "pytest": Pytest,
    "unittest": Unittest,
    "jest": Jest,
    "vitest": Vitest,
    "go": Go,
    "cargo": Cargo,
    "cc": Cc,
    "tsc": Tsc,
    "ruff": Ruff,
    "mypy": Mypy,
}


_BEGINS = re.compile(
    r"=|\d+ [a-z]|no tests ran|Ran \d|Found \d|Success: |All checks passed"  # Python
    r"|[A-Z]{1,8}\d{1,4} |[a-z]+(?:-[a-z]+)*: "
    r"| ?(?:PASS|FAIL) |  \u25cf |Tests?[ :]|\u23af| *(?:RUN|DEV|Test Files|Tests|Errors|Duration) "  # JavaScript
    r'|\{"| *=== | *--- |(?:ok|FAIL|\?)? *\t|running \d|test |---- |failures:|(?:error|warning)\b'  # Go, Rust
    r"| *--> | *(?:Compiling|Finished|Running|Doc-tests|Checking) "
)
_PLACE = re.compile(r"\.\w+[:(]\d")
_WORDS = ("error: ", "warning: ", "note: ", " TS", "ld: ", "undefined reference")


def begins(line: str) -> bool:
    """Whether a line may mean something to a reader that is not open. Most lines of a long output do not, and ten
    readers would look at them in vain."""
    if _BEGINS.match(line) is not None or _PLACE.search(line) is not None:
        return True
    return any(word in line for word in _WORDS)


class Diagnoser:
    """Reads the output of one command, first all of stdout, then all of stderr, in pieces of any size; then tells.

    Every reader sees every line that may be its own: what a command runs, `make test` say, does not tell what prints.
    """

    def __init__(self) -> None:
        self._readers = [make() for make in READERS.values()]
        self._open: list[Reader] = []
        self._report: JUnit | None = None
        self._lines = Lines()
        self._stream = "stdout"
        self._loose: list[str] = []

    def feed(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if stream != self._stream:
            self._loose += self._lines.last()
            self._lines, self._stream = Lines(), stream
        self._read(self._lines.feed(data))

    def report(self, data: bytes) -> None:
        """A part of a JUnit report that the command wrote. Where there is one, it tells about the tests."""
        self._report = self._report or JUnit()
        self._report.feed(data)

    def finish(self, ending: CommandEnd) -> Diagnosis | None:
        """What is known, or None if nothing of it was recognised."""
        if ending.exit_code is not None and ending.whole:  # else the last line may be half of one
            self._read(self._loose + self._lines.last())
        found = [each.findings() for each in self._readers]
        told = None if self._report is None else self._report.findings()
        if told is not None and told.recognised:
            found = [told, *[each for each in found if each.tests is None and not each.failures]]
        return judge(found, ending)

    def _read(self, lines: list[str]) -> None:
        for line in lines:
            every = begins(line)
            for reader in self._readers if every else self._open:
                reader.feed(line)
            if every or self._open:
                self._open = [reader for reader in self._readers if reader.open]
