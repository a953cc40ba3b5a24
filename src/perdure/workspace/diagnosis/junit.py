"""JUnit XML: what most test runners can write besides their own output."""

from __future__ import annotations

import re
from xml.parsers import expat

from perdure.workspace.diagnosis.report import LONGEST_EXCERPT, FailedTest, Findings, Tests

MOST_BYTES = 64 * 1024 * 1024
DEEPEST = 64
_BLOCK = 1 << 16
_IN_TEXT = re.compile(r"(?:^|[\s(])([^\s():]+\.\w+):(\d+)")
_LIBRARY = re.compile(r"node_modules|site-packages|/lib/python")


class _Refused(Exception):  # not an error of the caller
    pass


class JUnit:
    """Reads a report, in blocks. It declares no entities and loads none: a report that does is not read.

    Its counts are those of the test cases in it, not the ones that it claims.
    """

    def __init__(self, tool: str = "junit") -> None:
        self._found = Findings(tool, complete=False)
        self._counts = {"passed": 0, "failure": 0, "skipped": 0, "error": 0}
        self._size = self._depth = 0
        self._case: dict[str, str] = {}
        self._kind = ""
        self._message = ""
        self._text: list[str] | None = None
        self._room = 0
        self._stopped = False
        parser = self._parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.EntityDeclHandler = self._refuse
        parser.StartDoctypeDeclHandler = self._refuse

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MOST_BYTES:
            self._stop("the report is longer than 64 MiB, and the rest of it was not read")
        if self._stopped:
            return
        try:
            for at in range(0, len(data), _BLOCK):
                self._parser.Parse(data[at : at + _BLOCK], False)
        except _Refused as refused:
            self._stop(str(refused))
        except (expat.ExpatError, ValueError, LookupError) as error:
            self._stop(f"the report is not whole: {error}")

    def findings(self) -> Findings:
        if not self._stopped:
            try:
                self._parser.Parse(b"", True)
                self._found.summarise(complete=self._found.recognised)
            except expat.ExpatError as error:
                self._stop(f"the report is not whole: {error}")
        if self._found.recognised:
            count = self._counts
            tests = Tests(count["passed"], count["failure"], count["skipped"], count["error"])
            self._found.summarise(tests, bool(self._found.complete))
        return self._found

    def _stop(self, why: str) -> None:
        self._stopped = True
        self._found.notes.append(why)

    def _refuse(self, *_: object) -> None:
        raise _Refused("the report declares a document type or entities, and was not read")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise _Refused("the report is nested too deeply")
        if name in ("testsuites", "testsuite"):
            self._found.recognise()
        elif name == "testcase":
            self._case, self._kind, self._message = attributes, "passed", ""
        elif self._case and name in ("failure", "error", "skipped") and self._kind in ("passed", "skipped"):
            self._kind, self._message, self._text, self._room = name, attributes.get("message", ""), [], LONGEST_EXCERPT

    def _characters(self, text: str) -> None:
        if self._text is not None and self._room > 0:
            self._text.append(text[: self._room])
            self._room -= len(text)

    def _end(self, name: str) -> None:
        self._depth -= 1
        if name == self._kind and self._text is not None:
            self._case["text"], self._text = "".join(self._text).strip("\n"), None
        elif name == "testcase" and self._case:
            self._counts[self._kind] += 1
            if self._kind in ("failure", "error"):
                self._found.add_failure(self._failure(self._case))
            self._case, self._kind = {}, ""

    def _failure(self, case: dict[str, str]) -> FailedTest:
        name = "::".join(part for part in (case.get("classname", ""), case.get("name", "")) if part)
        text, line = case.get("text", ""), case.get("line", "")
        file = case.get("file")
        number = int(line) if line.isdecimal() and len(line) < 10 else None
        places = [each for each in _IN_TEXT.findall(text) if not _LIBRARY.search(each[0])]
        if file is None and places:
            file, at = places[-1]
            number = int(at[:9])
        message = self._message or text.strip().split("\n", 1)[0]
        return FailedTest(name or "?", message, file, number, text)
