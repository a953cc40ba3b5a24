"""JavaScript and TypeScript: jest, vitest, tsc."""

from __future__ import annotations

import re
from collections import Counter

from perdure.workspace.diagnosis.report import Diagnostic, FailureReader, FailureText, Findings, Tests, diagnostic

_SOURCE = r"[^\s:()]+\.(?:[cm]?[jt]sx?|vue|svelte)"
_COUNT = re.compile(r"(\d+) ([a-z]+)")


def _counted(text: str) -> Counter[str]:
    return Counter({word: int(number) for number, word in _COUNT.findall(text)})


# ---------------------------------------------------------------------- jest

_FILE = re.compile(rf"^ ?(?:PASS|FAIL) +(?:\S+ +)??({_SOURCE})(?: \([\d.]+ m?s\))?$")
_TESTS = re.compile(r"^Tests: +(.*?)(?:, )?(\d+) total$")
_SUITES = re.compile(r"^Test Suites: ")
_STACK = re.compile(rf"^ +at (?:.*\()?({_SOURCE}):(\d+):\d+\)?$")
_CODE = re.compile(r"^ *>? *\d* \|")
_PARSE = re.compile(rf"^ +SyntaxError: ({_SOURCE}): (.*?) \((\d+):\d+\)$")
BETWEEN = " \u203a "  # between the names of groups and tests
BROKEN_SUITE = "Test suite failed to run"


class Jest(FailureReader):
    """A failure is a block below its file. In a large run all of them are told again at the end."""

    def __init__(self) -> None:
        super().__init__("jest")
        self._file = ""
        self._placed = self._framed = False
        self._seen: set[str] = set()
        self._broken = 0

    def feed(self, line: str) -> None:
        if (file := _FILE.match(line)) is not None:
            self._close()
            self._file = file[1].removeprefix("./")
        elif self._file and line.startswith("  ● "):
            self._close()
            self._begin(line[4:].strip())
        elif (tests := _TESTS.match(line)) is not None:
            self._close()
            self._ended(_counted(tests[1]))
        elif _SUITES.match(line):
            self._close()
            self._found.recognise()
        elif self._block is not None:
            if line and not line.startswith(" "):
                self._close()
            else:
                self._told(self._block, line)

    def _begin(self, title: str) -> None:
        self._found.recognise()
        broken = title == BROKEN_SUITE
        name = self._file if broken else " > ".join((self._file, *title.split(BETWEEN)))
        if title == "Console" or name in self._seen:
            return
        if len(self._seen) < 10_000:
            self._seen.add(name)
        self._broken += broken
        self._block, self._placed, self._framed = FailureText(name), False, False
        self._block.set_place(self._file)

    def _told(self, block: FailureText, line: str) -> None:
        block.excerpt.add(line[4:] if line.startswith("    ") else line)
        if (parse := _PARSE.match(line)) is not None:
            block.set_message(f"SyntaxError: {parse[2]}")
            block.set_place(block.file, parse[3])
            self._placed = True
        elif _CODE.match(line):
            self._framed = True
        elif (stack := _STACK.match(line)) is not None:
            if not self._placed and "node_modules" not in stack[1]:
                block.set_place(stack[1], stack[2])
                self._placed = True
        elif line.strip() and not self._framed and not self._placed and len(block.message) < 500:
            block.set_message("; ".join(filter(None, (block.message, line.strip()))))

    def _ended(self, count: Counter[str]) -> None:
        self._found.recognise()
        skipped = count["skipped"] + count["todo"] + count["pending"]
        self._found.summarise(Tests(count["passed"], count["failed"], skipped, self._broken))


# ---------------------------------------------------------------------- vitest

_RUN = re.compile(r"^ *(?:RUN|DEV) +v\d")
_FAILED_HEAD = re.compile(r"^⎯+ *(?:Failed (?:Suites|Tests)|Unhandled (?:Errors|Rejection|Error)).*⎯")
_FAIL = re.compile(rf"^ FAIL +(?:\|[^|]*\| +)?({_SOURCE})(?: \[ .* \])?(?: > (.*))?$")
_SUMMARY = re.compile(r"^ *(Test Files|Tests|Errors) +(.*)$")
_WHERE = re.compile(rf"^ +\u276f (?:.* )?({_SOURCE}):(\d+):\d+$")
_DURATION = re.compile(r"^ *Duration +\d")


class Vitest(FailureReader):
    """Counts are on stdout, failures on stderr."""

    def __init__(self) -> None:
        super().__init__("vitest")
        self._placed = self._failing = self._counted = False
        self._tests = Tests()
        self._broken = 0

    def feed(self, line: str) -> None:
        if _FAILED_HEAD.match(line):
            self._found.recognise()
            self._failing = True
        elif self._failing and (fail := _FAIL.match(line)) is not None:
            self._close()
            self._broken += fail[2] is None
            self._block, self._placed = FailureText(f"{fail[1]} > {fail[2]}" if fail[2] else fail[1]), False
            self._block.set_place(fail[1])
        elif line.startswith("⎯⎯⎯⎯"):
            self._close()
        elif self._block is not None:
            self._told(self._block, line)
        elif _RUN.match(line):
            self._found.recognise()
        elif self._found.recognised and (summary := _SUMMARY.match(line)) is not None:
            self._summed(summary[1], summary[2])
        elif self._counted and _DURATION.match(line):
            self._found.summarise()

    def _summed(self, what: str, text: str) -> None:
        count = _counted(text.rsplit("(", 1)[0])
        if what == "Tests":
            self._counted = True
            self._tests = Tests(count["passed"], count["failed"], count["skipped"] + count["todo"])
        elif what == "Errors":
            self._broken += count["error"] + count["errors"]

    def _told(self, block: FailureText, line: str) -> None:
        block.excerpt.add(line)
        if (where := _WHERE.match(line)) is not None:
            if not self._placed and "node_modules" not in where[1]:
                block.set_place(where[1], where[2])
                self._placed = True
        elif not block.message:
            block.set_message(line.strip())

    def findings(self) -> Findings:
        self._close()
        if self._counted:
            counts = self._tests
            tests = Tests(counts.passed, counts.failed, counts.skipped, self._broken)
            self._found.summarise(tests, bool(self._found.complete))
        return self._found


# ---------------------------------------------------------------------- tsc

_TSC = re.compile(
    r"^(?P<file>[^\s(][^(]*?)\((?P<line>\d+),(?P<column>\d+)\): "
    r"(?P<severity>error|warning|message) (?P<code>TS\d+): (?P<message>.*)$"
)
_PRETTY = re.compile(
    r"^(?P<file>[^\s:][^:]*):(?P<line>\d+):(?P<column>\d+) - "
    r"(?P<severity>error|warning|message) (?P<code>TS\d+): (?P<message>.*)$"
)
_GLOBAL = re.compile(r"^error (TS\d+): (.*)$")


class Tsc:
    def __init__(self) -> None:
        self._found = Findings("tsc")

    @property
    def open(self) -> bool:
        return False

    def feed(self, line: str) -> None:
        if " TS" not in line:
            return
        told = _TSC.match(line) or _PRETTY.match(line)
        if told is not None:
            self._found.add_diagnostic(diagnostic(told, told["message"], told["code"]))
        elif (everywhere := _GLOBAL.match(line)) is not None:
            self._found.add_diagnostic(Diagnostic("error", everywhere[2], code=everywhere[1]))

    def findings(self) -> Findings:
        return self._found
