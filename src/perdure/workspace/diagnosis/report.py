"""What is known about a run of tests or of a build, and how sure that is.

Readers gather `Findings` from the output, which whoever runs in the command may write as they like. So the output never
makes a run pass: `judge` says "passed" only where the command ended by itself with code 0, all of its output is there,
and nothing in it speaks against it. What the output adds is which tests failed, where and why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

Severity: TypeAlias = Literal["error", "warning", "note", "help"]
TestVerdict: TypeAlias = Literal["passed", "failed", "incomplete", "unclear", "unknown"]
"""What became of a run: it passed or failed; it was cut before its end, so that what is not told about is not known;
its exit code and its output contradict each other, which the note says; or nothing of its output was understood, and
its code alone does not make it pass."""

MOST_FAILURES = 200
MOST_DIAGNOSTICS = 500
LONGEST_MESSAGE = 2_000
LONGEST_EXCERPT = 4_000
LONGEST_NAME = 500


class Tests(Struct, frozen=True, gc=False, omit_defaults=True):
    """How many tests; None where the output does not tell. `errors` are those that could not run."""

    passed: int | None = None
    failed: int | None = None
    skipped: int | None = None
    errors: int | None = None


class FailedTest(Struct, frozen=True, gc=False, omit_defaults=True):
    """A test that failed. `file` and `line` are as the tool printed them: where it raised, if that is told."""

    name: str
    message: str = ""
    file: str | None = None
    line: int | None = None
    excerpt: str = ""


class Diagnostic(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a compiler, linter or type checker says about a place."""

    severity: Severity
    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    code: str = ""


class Diagnosis(Struct, frozen=True, gc=False, omit_defaults=True):
    """A run as its exit code and its output tell it.

    `tool` is what printed the output. `tests` is None where no test was told about. `truncated`: there are more
    failures or diagnostics than are listed.
    """

    tool: str
    verdict: TestVerdict
    tests: Tests | None = None
    failures: tuple[FailedTest, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    truncated: bool = False
    note: str = ""


class CommandEnd(Struct, frozen=True, gc=False):
    """How the command ended. `exit_code` is None if it did not end by itself; `whole`: all of its output is there."""

    exit_code: int | None
    whole: bool = True


class Excerpt:
    """The first lines of something, up to a bound."""

    __slots__ = ("_lines", "_room")

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._room = LONGEST_EXCERPT

    def add(self, line: str) -> None:
        if self._room > 0:
            self._lines.append(line[: self._room])
            self._room -= len(line) + 1

    @property
    def text(self) -> str:
        return "\n".join(self._lines).strip("\n")


class FailureText:
    """What is told about one failed test."""

    __slots__ = ("excerpt", "file", "line", "message", "name")

    def __init__(self, name: str) -> None:
        self.name, self.message, self.excerpt = name, "", Excerpt()
        self.file: str | None = None
        self.line: int | None = None

    def found_at(self, file: str, line: str) -> None:
        """The last place of the project that is told about; one of a library only if there is no other."""
        outside = file.startswith(("..", "<")) or "site-packages" in file or "/lib/python" in file
        if self.file is None or not outside:
            self.set_place(file, line)

    def set_place(self, file: str | None, line: str | None = None) -> None:
        self.file, self.line = file, None if line is None else int(line)

    def set_message(self, message: str) -> None:
        self.message = message

    def set_full_name(self, name: str, file: str | None = None, message: str = "") -> None:
        """A summary names it in full, and may tell what was not told before."""
        self.name, self.file, self.message = name, self.file or file, self.message or message

    @property
    def failure(self) -> FailedTest:
        return FailedTest(self.name, self.message, self.file, self.line, self.excerpt.text)


@dataclass(slots=True)
class Findings:
    """What one reader found. `complete`: the tool told about its end; None where the tool has no such words."""

    tool: str
    tests: Tests | None = None
    complete: bool | None = None
    failures: list[FailedTest] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    truncated: bool = False
    recognised: bool = False
    errors: int = 0

    def recognise(self) -> None:
        """A line is this tool's for certain."""
        self.recognised = True

    def cut_off(self) -> None:
        """There is more than is kept."""
        self.truncated = True

    def summarise(self, tests: Tests | None = None, complete: bool = True) -> None:
        """The tool told about its end, with these counts where it has any."""
        self.complete = complete
        self.tests = self.tests if tests is None else tests

    def add_failure(self, failure: FailedTest) -> None:
        self.recognised = True
        if len(self.failures) >= MOST_FAILURES:
            self.truncated = True
            return
        self.failures.append(
            FailedTest(
                failure.name[:LONGEST_NAME],
                failure.message[:LONGEST_MESSAGE],
                failure.file,
                failure.line,
                failure.excerpt,
            )
        )

    def add_diagnostic(self, diagnostic: Diagnostic) -> None:
        self.recognised = True
        self.errors += diagnostic.severity == "error"
        if len(self.diagnostics) >= MOST_DIAGNOSTICS:
            self.truncated = True
            return
        self.diagnostics.append(diagnostic)


_SEVERITIES: dict[str, Severity] = {
    "error": "error", "fatal error": "error", "warning": "warning", "note": "note", "message": "note", "help": "help",
}  # fmt: skip


def diagnostic(told: re.Match[str], message: str, code: str = "") -> Diagnostic:
    """A diagnostic from a match with `file`, `line`, and where they are told, `column` and `severity`."""
    parts = told.groupdict()
    column = parts.get("column")
    severity = _SEVERITIES[parts.get("severity") or "error"]
    at = int(column) if column else None
    return Diagnostic(severity, message[:LONGEST_MESSAGE], parts["file"], int(parts["line"]), at, code)


class Reader(Protocol):
    """Reads the output of one tool, line by line. `findings` closes it: no line comes after.

    A reader that is not `open` is only given lines that begin something (`Diagnoser`); one that is, every line.
    """

    @property
    def open(self) -> bool: ...

    def feed(self, line: str) -> None: ...

    def findings(self) -> Findings: ...


class FailureReader:
    """What readers share that are told of one failed test after another: `_block` is the one at hand."""

    def __init__(self, tool: str) -> None:
        self._found = Findings(tool, complete=False)
        self._block: FailureText | None = None

    @property
    def open(self) -> bool:
        return self._block is not None

    def _close(self) -> None:
        """Nothing more is told of the failed test at hand."""
        if self._block is not None:
            self._found.add_failure(self._block.failure)
        self._block = None

    def findings(self) -> Findings:
        self._close()
        return self._found


def judge(found: list[Findings], ending: CommandEnd) -> Diagnosis | None:
    """What all readers found together, and what becomes of it by the way in which the command ended. None if no reader
    recognised anything."""
    found = [each for each in found if each.recognised]
    if not found:
        return None
    tests = _sum([each.tests for each in found if each.tests is not None])
    failures = [failure for each in found for failure in each.failures]
    notes = [note for each in found for note in each.notes]
    counted = 0 if tests is None else (tests.failed or 0) + (tests.errors or 0)
    bad = max(counted, len(failures)) + sum(each.errors for each in found)
    cut = any(each.complete is False for each in found)
    none_ran = tests is not None and (tests.passed, bad) == (0, 0)
    none_found = tests is not None and none_ran and not tests.skipped
    verdict: TestVerdict
    if ending.exit_code is None or not ending.whole:
        verdict = "incomplete"
        notes.append(
            "the run did not come to its end" if ending.exit_code is None else "a part of its output is missing"
        )
    elif ending.exit_code != 0:
        verdict = "incomplete" if cut else "failed"
        if cut:
            notes.append(f"exit code {ending.exit_code}, and the output breaks off before its summary")
        elif not bad:
            what = "no test ran" if none_ran else "the output tells of no failure"
            notes.append(f"exit code {ending.exit_code}, although {what}" if not none_ran else what)
    elif bad:
        verdict = "unclear"
        notes.append(f"exit code 0, although the output tells of {bad} failures or errors")
    elif cut:
        verdict = "incomplete"
        notes.append("exit code 0, but the output breaks off before its summary")
    elif none_found:
        verdict = "unclear"
        notes.append("exit code 0, although no test ran")
    else:
        verdict = "passed"
        if none_ran:
            notes.append("no test passed")
    return Diagnosis(
        "+".join(dict.fromkeys(each.tool for each in found)),
        verdict,
        tests,
        tuple(failures[:MOST_FAILURES]),
        tuple([each for one in found for each in one.diagnostics][:MOST_DIAGNOSTICS]),
        any(each.truncated for each in found) or len(failures) > MOST_FAILURES,
        "; ".join(dict.fromkeys(notes)),
    )


def unread_verdict(ending: CommandEnd) -> TestVerdict:
    """What becomes of a run of which no reader recognised anything."""
    if ending.exit_code is None or not ending.whole:
        return "incomplete"
    return "failed" if ending.exit_code else "unknown"


def _sum(several: list[Tests]) -> Tests | None:
    """Counts of several tools together. A count that one of them does not tell is unknown."""
    if not several:
        return None

    def total(counts: list[int | None]) -> int | None:
        known = [each for each in counts if each is not None]
        return sum(known) if len(known) == len(counts) else None

    return Tests(
        total([each.passed for each in several]),
        total([each.failed for each in several]),
        total([each.skipped for each in several]),
        total([each.errors for each in several]),
    )
