"""Python: pytest, unittest, mypy, ruff."""

from __future__ import annotations

import re
from collections import Counter

from perdure.workspace.diagnosis.report import FailureReader, FailureText, Findings, Tests, diagnostic

# ---------------------------------------------------------------------- pytest

_BAR = re.compile(r"^=+ (.+?) =+$")
_TITLE = re.compile(r"^_+ (\S.*?) _+$")
_COUNTS = re.compile(r"^((?:\d+ [a-z][a-z ]*?(?:, )?)+|no tests ran) in \d[\d.]*s(?: \([\d:]+\))?$")
_COUNT = re.compile(r"(\d+) ([a-z][a-z ]*)")
_PLACE = re.compile(r"^(\S[^:]*\.\w+):(\d+): ?(.*)$")
_LISTED = re.compile(r"^(FAILED|ERROR) (\S.*?)(?: - (.*))?$")
_FRAME = re.compile(r'^ +File "(.+?)", line (\d+)')
_ERROR = re.compile(r"^\w+Error: ")
_AT = re.compile(r"^ERROR (?:at (?:setup|teardown) of|collecting) ")


class Pytest:
    """Failures are told twice: in full under a title, and in short with their node ids. Both are brought together."""

    def __init__(self) -> None:
        self._found = Findings("pytest", complete=False)
        self._section = ""
        self._block: FailureText | None = None
        self._captured = self._syntax = False
        self._blocks: list[FailureText] = []

    @property
    def open(self) -> bool:
        return bool(self._section)

    def feed(self, line: str) -> None:
        if line[:1] == "=" and (bar := _BAR.match(line)) is not None:
            if self._bar(bar[1]):
                return
        elif line[:1].isdigit() or line.startswith("no tests ran"):
            self._ended(line)
        if self._section == "summary":
            if (listed := _LISTED.match(line)) is not None:
                self._listed(listed[2], listed[3] or "")
        elif self._section:
            self._told(line)

    def _bar(self, title: str) -> bool:
        """A line between `=` signs. It may be the output of a test: the last one counts."""
        if title in ("FAILURES", "ERRORS", "short test summary info", "test session starts"):
            self._found.recognise()
            self._section = {"short test summary info": "summary", "test session starts": ""}.get(title, title)
            self._block = None
            return True
        return self._ended(title)

    def _ended(self, text: str) -> bool:
        if (counts := _COUNTS.match(text)) is None:
            return False
        by_word = Counter[str]()
        for number, word in _COUNT.findall(counts[1]):
            by_word[word.strip()] += int(number)
        self._found.recognise()
        self._found.summarise(
            Tests(
                by_word["passed"] + by_word["xpassed"],
                by_word["failed"],
                by_word["skipped"] + by_word["xfailed"],
                by_word["error"] + by_word["errors"],
            )
        )
        return True

    def _told(self, line: str) -> None:
        title = _TITLE.match(line)
        if title is not None and title[1].strip("_ "):
            self._captured = self._syntax = False
            self._block = FailureText(_AT.sub("", title[1]))
            if len(self._blocks) < 1000:
                self._blocks.append(self._block)
            else:
                self._found.cut_off()
            return
        block = self._block
        if block is None:
            return
        block.excerpt.add(line)
        if line.startswith("---") and " Captured " in line:
            self._captured = True
        if self._captured:
            return
        if line.startswith("E  "):
            self._raised(block, line[1:].strip())
        elif (place := _PLACE.match(line)) is not None:
            block.found_at(place[1], place[2])

    def _raised(self, block: FailureText, text: str) -> None:
        if (frame := _FRAME.match(f" {text}")) is not None:  # the place of a syntax error, which is told at its end
            block.set_place(frame[1], frame[2])
            block.set_message("")
            self._syntax = True
        elif self._syntax:
            if _ERROR.match(text):
                block.set_message(text)
                self._syntax = False
        elif not block.message:
            block.set_message(text)

    def _listed(self, node: str, message: str) -> None:
        """A line of the short summary: it names the test in full."""
        name = node.split("::", 1)[1].replace("::", ".") if "::" in node else node
        for block in self._blocks:
            if block.name == name:
                block.set_full_name(node, node.split("::", 1)[0], message)
                return
        if len(self._blocks) >= 1000:
            self._found.cut_off()
            return
        block = FailureText(node)
        block.set_full_name(node, node.split("::", 1)[0], message)
        self._blocks.append(block)

    def findings(self) -> Findings:
        for block in self._blocks:
            self._found.add_failure(block.failure)
        return self._found


# ---------------------------------------------------------------------- unittest

_FAILED_TEST = re.compile(r"^(FAIL|ERROR): (.+)$")
_RAN = re.compile(r"^Ran (\d+) tests? in [\d.]+s$")
_RESULT = re.compile(r"^(OK|FAILED|NO TESTS RAN)(?: \((.*)\))?$")
_TEST_ID = re.compile(r"^(\S+) \(([\w.]+)\)(.*)$")
_CLASS_LEVEL = ("setUpClass ", "tearDownClass ", "setUpModule ", "tearDownModule ")


class Unittest(FailureReader):
    """Also Django's runner, which prints the same."""

    def __init__(self) -> None:
        super().__init__("unittest")
        self._ruled = self._expected = False
        self._failed: set[str] = set()
        self._ran: int | None = None

    @property
    def open(self) -> bool:
        return self._ruled or super().open or self._ran is not None

    def feed(self, line: str) -> None:
        if line.startswith("=" * 70) and not line.strip("="):
            self._close()
            self._ruled = True
            return
        if self._ruled and (failed := _FAILED_TEST.match(line)) is not None:
            self._block = FailureText(self._named(failed[2]))
            self._found.recognise()
        elif (ran := _RAN.match(line)) is not None:
            self._close()
            self._found.recognise()
            self._ran = int(ran[1])
        elif self._ran is not None and (result := _RESULT.match(line)) is not None:
            self._ended(self._ran, result[2] or "")
        elif self._block is not None:
            self._told(self._block, line)
        self._ruled = False

    def _named(self, name: str) -> str:
        parts = _TEST_ID.match(name)
        if parts is None:
            self._failed.add(name)
            return name
        method, where, more = parts.groups()
        full = where if where.endswith(f".{method}") else f"{where}.{method}"
        if not name.startswith(_CLASS_LEVEL):
            self._failed.add(full)
        return full + more

    def _told(self, block: FailureText, line: str) -> None:
        if line.startswith("-" * 70) and not line.strip("-"):
            return
        block.excerpt.add(line)
        if (frame := _FRAME.match(line)) is not None:
            block.found_at(frame[1], frame[2])
            self._expected = True
        elif self._expected and line and not line.startswith(" "):
            block.set_message(line)
            self._expected = False

    def _ended(self, ran: int, counts: str) -> None:
        by_word = {word: int(number) for word, number in re.findall(r"([a-z ]+?)=(\d+)", counts)}
        given = {word.strip(): number for word, number in by_word.items()}
        skipped = given.get("skipped", 0) + given.get("expected failures", 0)
        # A test with subtests may fail several times, and a class that cannot be set up is no test.
        failed = len(self._failed) + given.get("unexpected successes", 0)
        unexpected = given.get("unexpected successes", 0)
        self._found.summarise(
            Tests(
                max(0, ran - failed - skipped), given.get("failures", 0) + unexpected, skipped, given.get("errors", 0)
            )
        )
        self._ran = None


# ---------------------------------------------------------------------- mypy

_MYPY = re.compile(
    r"^(?P<file>[^\s:][^:]*\.pyi?):(?P<line>\d+):(?:(?P<column>\d+):)?(?:\d+:\d+:)? "
    r"(?P<severity>error|warning|note): (?P<message>.*)$"
)
_MYPY_CODE = re.compile(r"^(.*?) {1,2}\[([a-z][a-z0-9-]*)\]$")
_MYPY_END = re.compile(r"^(?:Found \d+ errors? in \d+ files? \(|Success: no issues found in )")


class Mypy:
    def __init__(self) -> None:
        self._found = Findings("mypy")
        self._open: tuple[re.Match[str], str] | None = None

    @property
    def open(self) -> bool:
        return self._open is not None

    def feed(self, line: str) -> None:
        if (told := _MYPY.match(line)) is not None:
            self._close()
            self._open = told, told["message"].strip()
        elif _MYPY_END.match(line):
            self._close()
            self._found.recognise()
        elif self._open is not None:
            told, message = self._open
            if line and not line.startswith(" ") and told["severity"] == "error" and _MYPY_CODE.match(message) is None:
                self._open = told, f"{message}  {line}" if line.startswith("[") else f"{message} {line}"  # --pretty
            else:
                self._close()

    def _close(self) -> None:
        if self._open is not None:
            told, message = self._open
            code = _MYPY_CODE.match(message)
            self._found.add_diagnostic(
                diagnostic(told, message if code is None else code[1].strip(), "" if code is None else code[2])
            )
        self._open = None

    def findings(self) -> Findings:
        self._close()
        return self._found


# ---------------------------------------------------------------------- ruff

_RUFF_SHORT = re.compile(
    r"^(?P<file>[^\s:][^:]*\.(?:pyi?|ipynb|toml)):(?P<line>\d+):(?P<column>\d+): "
    r"(?P<code>[A-Z]{1,8}\d{1,4}|[a-z]+(?:-[a-z]+)+):? (?:\[\*\] )?(?P<message>.+)$"
)
_RUFF_HEAD = re.compile(r"^(?!error|warning|note|help)([A-Z]{1,8}\d{1,4}|[a-z]+(?:-[a-z]+)*)(:?) (?:\[\*\] )?(.+)$")
_RUFF_PLACE = re.compile(r"^ *--> (?P<file>.+?\.(?:pyi?|ipynb|toml)):(?P<line>\d+):(?P<column>\d+)$")
_RUFF_END = re.compile(r"^(?:All checks passed!$|\d+ files? would be reformatted|\d+ files? already formatted)")


class Ruff:
    def __init__(self) -> None:
        self._found = Findings("ruff")
        self._before = ""

    @property
    def open(self) -> bool:
        return False

    def feed(self, line: str) -> None:
        if (told := _RUFF_SHORT.match(line)) is not None:
            self._found.add_diagnostic(diagnostic(told, told["message"], told["code"]))
        elif (place := _RUFF_PLACE.match(line)) is not None:
            if (head := _RUFF_HEAD.match(self._before)) is not None and (head[2] or head[1][0].isupper()):
                self._found.add_diagnostic(diagnostic(place, head[3], head[1]))
        elif _RUFF_END.match(line):
            self._found.recognise()
        self._before = line

    def findings(self) -> Findings:
        return self._found
