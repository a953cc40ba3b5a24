"""Compiled languages: go test and go build, cargo and rustc, gcc and clang."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from typing import Any

from perdure.workspace.diagnosis.report import Diagnostic, FailedTest, FailureText, Findings, Tests, diagnostic

# ---------------------------------------------------------------------- go

_BUILD = re.compile(r"^(?:vet: )?(?P<file>[^\s:][^:]*\.go):(?P<line>\d+):(?P<column>\d+): (?P<message>.+)$")
_MARK = re.compile(r"^ *=== (RUN|PAUSE|CONT|NAME) +(\S+)$")
_DONE = re.compile(r"^ *--- (PASS|FAIL|SKIP): (\S+) \([\d.]+s\)$")
_PACKAGE = re.compile(r"^(ok|FAIL|\?|---)? *\t(\S+)(?:\t| \[)(.*)$")
_LOGGED = re.compile(r"^ +(\S+\.go):(\d+): (.*)$")
_FRAME = re.compile(r"^\t(\S+\.go):(\d+)")
_LIBRARY = re.compile(r"/src/(?:testing|runtime)/")
MOST_RUNNING = 10_000


class Go:
    """Plain, verbose and `-json`. Plain output names only what failed: how many passed is unknown then."""

    def __init__(self) -> None:
        self._found = Findings("go")
        self._running: dict[str, FailureText] = {}
        self._current: FailureText | None = None
        self._failed: list[FailureText] = []
        self._counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}
        self._errors = 0
        self._verbose = self._json = False
        self._packages: set[str] = set()
        self._open: set[str] = set()
        self._tested = False

    @property
    def open(self) -> bool:
        return self._current is not None

    def feed(self, line: str) -> None:
        if line.startswith('{"'):
            event = _event(line)
            if event is not None:
                self._json = self._verbose = True
                self._happened(event)
        elif not self._json:
            self._plain(line)
        elif (build := _BUILD.match(line)) is not None:
            self._found.add_diagnostic(diagnostic(build, build["message"]))

    # ------------------------------------------------------------------ text

    def _plain(self, line: str) -> None:
        if (mark := _MARK.match(line)) is not None:
            self._tested = self._verbose = True
            self._current = self._block(mark[2])
        elif (done := _DONE.match(line)) is not None:
            self._tested = True
            self._ended(done[1], done[2])
        elif (package := _PACKAGE.match(line)) is not None:
            self._package(package[1], package[2], "[build failed]" in line or "[setup failed]" in line)
        elif (build := _BUILD.match(line)) is not None and self._current is None:
            self._found.add_diagnostic(diagnostic(build, build["message"]))
        elif self._current is not None:
            _say(self._current, line)

    def _ended(self, how: str, name: str) -> None:
        self._counts[how] += 1
        block = self._block(name)
        if how == "FAIL":
            self._current = block
            self._failed.append(block)
        else:
            self._running.pop(name, None)
            self._current = None

    def _package(self, how: str | None, package: str, broken: bool) -> None:
        """The end of a package: what failed in it has a full name now. One that passed has nothing that failed or runs:
        such a line is the output of a test."""
        self._tested = True
        if how != "FAIL" and (self._failed or self._running):
            return
        if how == "FAIL":
            if broken or not self._failed:
                self._errors += 1
                self._found.add_failure(_broken(package) if broken else FailureText(package).failure)
            self._close(package)
        self._running.clear()
        self._failed.clear()
        self._current = None

    def _close(self, package: str) -> None:
        names = sorted([block.name for block in self._failed])
        for block in self._failed:
            at = bisect_left(names, f"{block.name}/")
            if not block.message and at < len(names) and names[at].startswith(f"{block.name}/"):
                continue  # only its subtests say something
            if package:
                block.set_full_name(f"{package}.{block.name}")
            self._found.add_failure(block.failure)
        self._failed.clear()

    def _block(self, name: str) -> FailureText:
        found = self._running.get(name)
        if found is None:
            found = FailureText(name)
            if len(self._running) < MOST_RUNNING:
                self._running[name] = found
        return found

    # ------------------------------------------------------------------ events

    def _happened(self, event: dict[str, Any]) -> None:
        action, package = event["Action"], str(event.get("Package", ""))
        test, output = event.get("Test"), str(event.get("Output", "")).rstrip("\n")
        self._found.recognise()
        self._tested = True
        if action == "build-output":
            if (build := _BUILD.match(output)) is not None:
                self._found.add_diagnostic(diagnostic(build, build["message"]))
        elif not package:
            pass
        elif test is None:
            self._open.add(package)
            if action in ("pass", "fail", "skip"):
                self._open.discard(package)
                if action == "fail" and package not in self._packages:
                    self._errors += 1
                    self._found.add_failure(
                        _broken(package) if "FailedBuild" in event else FailureText(package).failure
                    )
        else:
            self._test_event(action, package, f"{package}.{test}", output)

    def _test_event(self, action: str, package: str, name: str, output: str) -> None:
        if action == "output":
            if not _MARK.match(output) and not _DONE.match(output):
                _say(self._block(name), output)
        elif action in ("pass", "skip"):
            self._counts[action.upper()] += 1
            self._running.pop(name, None)
        elif action == "fail":
            self._counts["FAIL"] += 1
            block = self._running.pop(name, None) or FailureText(name)
            if len(self._packages) < MOST_RUNNING:
                self._packages.add(package)
            if block.message or not any(each.name.startswith(f"{name}/") for each in self._found.failures):
                self._found.add_failure(block.failure)

    def findings(self) -> Findings:
        cut = bool(self._open) if self._json else bool(self._failed or self._running)
        self._close("")
        if self._tested:
            self._found.recognise()
            count = self._counts
            known = self._verbose
            passed, skipped = (count["PASS"], count["SKIP"]) if known else (None, None)
            self._found.summarise(Tests(passed, count["FAIL"], skipped, self._errors), not cut)
        return self._found


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("Action"), str) else None


def _broken(package: str) -> FailedTest:
    block = FailureText(package)
    block.set_message("it does not build")
    return block.failure


def _say(block: FailureText, line: str) -> None:
    block.excerpt.add(line)
    if not block.message and (logged := _LOGGED.match(line)) is not None:
        block.set_place(logged[1], logged[2])
        block.set_message(logged[3])
    elif not block.message and line.startswith("panic: "):
        block.set_message(line)
    elif block.file is None and (frame := _FRAME.match(line)) is not None and not _LIBRARY.search(frame[1]):
        block.set_place(frame[1], frame[2])


# ---------------------------------------------------------------------- cargo, rustc

_RUNNING = re.compile(r"^running (\d+) tests?$")
_TEST = re.compile(r"^test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)\b")
_STDOUT = re.compile(r"^---- (.+?) std(?:out|err) ----$")
_RESULT = re.compile(r"^test result: (?:ok|FAILED)\. (\d+) passed; (\d+) failed; (\d+) ignored;")
_PANIC = re.compile(r"panicked at (.+?):(\d+):\d+:$")
_OLD_PANIC = re.compile(r"panicked at '(.*)', (.+?):(\d+):\d+$")
_NO_PANIC = re.compile(r"^(note: test did not panic as expected)(?: at (.+?):(\d+):\d+)?$")
_HEAD = re.compile(r"^(?P<severity>error|warning)(?:\[(?P<code>[\w:-]+)\])?: (?P<message>.+)$")
_ARROW = re.compile(r"^ *--> (?P<file>.+?):(?P<line>\d+):(?P<column>\d+)$")
_SHORT = re.compile(
    r"^(?P<file>[^\s:][^:]*\.rs):(?P<line>\d+):(?P<column>\d+): "
    r"(?P<severity>error|warning)(?:\[(?P<code>[\w:-]+)\])?: (?P<message>.+)$"
)
_CARGO = re.compile(r"^ *(?:Compiling|Finished|Running|Doc-tests|Checking) .")
_CARGO_SAYS = ("could not compile", "test failed, to rerun", "doctest failed", "build failed, waiting", "target failed")


class Cargo:
    """Tests of several programs, each with a summary of its own, and what the compiler says before."""

    def __init__(self) -> None:
        self._found = Findings("cargo")
        self._began = self._ended = 0
        self._passed = self._failed = self._ignored = 0
        self._blocks: dict[str, FailureText] = {}
        self._block: FailureText | None = None
        self._awaited = False
        self._head: re.Match[str] | None = None
        self._built = False

    @property
    def open(self) -> bool:
        return self._block is not None or self._head is not None

    def feed(self, line: str) -> None:
        if _RUNNING.match(line):
            self._began += 1
            self._found.recognise()
        elif (result := _RESULT.match(line)) is not None:
            self._close()
            self._ended += 1
            self._passed, self._failed = self._passed + int(result[1]), self._failed + int(result[2])
            self._ignored += int(result[3])
        elif self._began and (test := _TEST.match(line)) is not None:
            if test[2] == "FAILED" and len(self._blocks) < MOST_RUNNING:
                self._blocks[test[1]] = FailureText(test[1])
        elif self._began and (begun := _STDOUT.match(line)) is not None:
            self._block, self._awaited = self._blocks.setdefault(begun[1], FailureText(begun[1])), False
        elif line == "failures:":
            self._block = None
        elif self._block is not None:
            self._told(self._block, line)
        else:
            self._compiled(line)

    def _told(self, block: FailureText, line: str) -> None:
        block.excerpt.add(line)
        if self._awaited:
            block.set_message(line)
            self._awaited = False
        elif block.line is not None:
            pass
        elif (panic := _PANIC.search(line)) is not None:
            block.set_place(panic[1], panic[2])
            self._awaited = True
        elif (old := _OLD_PANIC.search(line)) is not None:
            block.set_message(old[1])
            block.set_place(old[2], old[3])
        elif (calm := _NO_PANIC.match(line)) is not None:
            block.set_message(calm[1])
            block.set_place(calm[2], calm[3])

    def _compiled(self, line: str) -> None:
        if (short := _SHORT.match(line)) is not None:
            self._found.add_diagnostic(diagnostic(short, short["message"], short["code"] or ""))
        elif (head := _HEAD.match(line)) is not None:
            self._close_head()
            self._head = head
        elif self._head is not None and (arrow := _ARROW.match(line)) is not None:
            place, head = diagnostic(arrow, ""), self._head
            self._found.add_diagnostic(
                Diagnostic(
                    "error" if head["severity"] == "error" else "warning",
                    head["message"],
                    place.file,
                    place.line,
                    place.column,
                    head["code"] or "",
                )
            )
            self._head = None
        elif _CARGO.match(line):
            self._built = True

    def _close_head(self) -> None:
        """A headline without a place. Other tools say "error: …" too: it counts where cargo was seen."""
        head, self._head = self._head, None
        if head is None or not self._built or any(words in head["message"] for words in _CARGO_SAYS):
            return
        if " generated " not in head["message"]:
            self._found.add_diagnostic(
                Diagnostic(
                    "error" if head["severity"] == "error" else "warning", head["message"], code=head["code"] or ""
                )
            )

    def _close(self) -> None:
        for block in self._blocks.values():
            self._found.add_failure(block.failure)
        self._blocks, self._block = {}, None

    def findings(self) -> Findings:
        self._close()
        self._close_head()
        if self._began:
            whole = self._began == self._ended
            failed = self._failed if whole else max(self._failed, len(self._found.failures))
            self._found.summarise(Tests(self._passed, failed, self._ignored, 0), whole)
        return self._found


# ---------------------------------------------------------------------- gcc, clang

_CC = re.compile(
    r"^(?P<file>(?!.*\.(?:pyi?|rs|go):)[^\s:][^:]*):(?P<line>\d+):(?:(?P<column>\d+):)? "
    r"(?P<severity>fatal error|error|warning|note): (?P<message>.*?)(?: \[(?P<code>-[\w=+-]+)\])?$"
)
_LINK = re.compile(r"^(?:\S*/?ld(?:\.\w+)?: )?(\S+?):(?:\(\.[\w.]+\+0x[0-9a-f]+\)|\S+): (undefined reference to .+)$")
_LD = re.compile(
    r"^(?:\S*/)?ld(?:\.\w+)?: (?:error: )?((?:cannot find|undefined symbol|unrecognized|duplicate symbol).*)$"
)


class Cc:
    """gcc, clang, and whatever else prints `file:line:column: severity: message`."""

    def __init__(self) -> None:
        self._found = Findings("cc")

    @property
    def open(self) -> bool:
        return False

    def feed(self, line: str) -> None:
        if ": " not in line:
            return
        if (told := _CC.match(line)) is not None:
            self._found.add_diagnostic(diagnostic(told, told["message"], told["code"] or ""))
        elif (link := _LINK.match(line)) is not None:
            self._found.add_diagnostic(Diagnostic("error", link[2], link[1]))
        elif (loader := _LD.match(line)) is not None:
            self._found.add_diagnostic(Diagnostic("error", loader[1]))

    def findings(self) -> Findings:
        return self._found
