"""What is read from the output of the real tools: recorded (`record.py`), with their versions, passing and failing, cut
anywhere, coloured, and hostile. The expected values are written by hand from the recorded texts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from perdure.workspace.diagnosis import READERS, Diagnoser
from perdure.workspace.diagnosis.detection import Purpose, Runner, detect
from perdure.workspace.diagnosis.lines import LONGEST_LINE, Lines, clean
from perdure.workspace.diagnosis.report import MOST_FAILURES, CommandEnd, Diagnosis, Tests, judge
from tests.fuzzing import FULL

STREAMS: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")
RECORDED = Path(__file__).parent / "recorded"
CASES = {
    f"{folder.name}/{name}": case
    for folder in sorted(RECORDED.iterdir())
    for name, case in json.loads((folder / "cases.json").read_text()).items()
}


def diagnosed(case: str, block: int = 1 << 20) -> Diagnosis | None:
    diagnoser = Diagnoser()
    for stream in STREAMS:
        data = (RECORDED / f"{case}.{stream}").read_bytes()
        for at in range(0, len(data), block):
            diagnoser.feed(stream, data[at : at + block])
    report = RECORDED / f"{case}.xml"
    if report.exists():
        diagnoser.report(report.read_bytes())
    return diagnoser.finish(CommandEnd(CASES[case]["exit_code"]))


def told(text: str | bytes, exit_code: int | None = 1, whole: bool = True) -> Diagnosis | None:
    diagnoser = Diagnoser()
    diagnoser.feed("stdout", text.encode() if isinstance(text, str) else text)
    return diagnoser.finish(CommandEnd(exit_code, whole))


# ---------------------------------------------------------------------- tests

PYTEST = [
    ("tests/test_price.py::test_needs", "tests/test_price.py", 20, "RuntimeError: no database"),
    ("tests/test_price.py::test_total_counts_all", "tests/test_price.py", 6, "assert 5 == 6"),
    ("tests/test_price.py::test_raises", "shop/price.py", 5, "ValueError: no price"),
    ("tests/test_price.py::test_prints_a_lie", "tests/test_price.py", 16, "AssertionError: lists differ"),
    ("tests/test_price.py::TestGroup::test_in_class[2]", "tests/test_price.py", 28, "assert 2 == 1"),
]
UNITTEST = [
    ("test_bad.T.test_b", "/tmp/project/test_bad.py", 7, "ValueError: no"),
    (
        "unittest.loader._FailedTest.test_import",
        "/tmp/project/test_import.py",
        1,
        "ModuleNotFoundError: No module named 'nowhere'",
    ),
    ("test_bad.T.test_a", "/tmp/project/test_bad.py", 5, "AssertionError: Lists differ: [1, 2] != [1, 3]"),
    ("test_bad.T.test_d (n=2)", "/tmp/project/test_bad.py", 13, "AssertionError: 2 != 1"),
]
JEST = [
    (
        "sum.test.js > adds two",
        "sum.test.js",
        4,
        "expect(received).toBe(expected) // Object.is equality; Expected: 3; Received: -1",
    ),
    ("sum.test.js > a group > throws", "sum.js", 2, "TypeError: no price"),
    ("broken.test.js", "broken.test.js", 1, "SyntaxError: Unexpected token"),
]
VITEST = [
    ("broken.test.js", "broken.test.js", None, "RolldownError: Parse failure: Parse failed with 1 error:"),
    ("sum.test.js > adds two", "sum.test.js", 5, "AssertionError: expected -1 to be 3 // Object.is equality"),
    ("sum.test.js > a group > throws", "sum.js", 2, "TypeError: no price"),
]
PANIC = "panic: assignment to entry in nil map [recovered, repanicked]"
GO = [
    ("example.com/shop.TestTotal", "price_test.go", 10, "got 2, want 3"),
    ("example.com/shop.TestTable/case_2", "price_test.go", 18, "two is bad"),
    ("example.com/shop/broken", None, None, "it does not build"),
    ("example.com/shop/deep.TestPanics", "/tmp/project/deep/deep_test.go", 7, PANIC),
]
CARGO = [
    ("tests::adds", "src/lib.rs", 9, "assertion `left == right` failed: the sum"),
    ("tests::panics", "src/lib.rs", 15, "index out of bounds: the len is 0 but the index is 0"),
    ("tests::should", "src/lib.rs", 23, "note: test did not panic as expected"),
]
BAD_PYTEST = Tests(2, 4, 1, 1)
UNNAMED = [(name.split("::", 1)[1].replace("::", "."), *more) for name, *more in PYTEST]
COLLECTED = [
    ("test_import.py", "test_import.py", 1, "ModuleNotFoundError: No module named 'nowhere'"),
    ("test_syntax.py", "/tmp/project/test_syntax.py", 1, "SyntaxError: invalid syntax"),
]

TESTED: list[tuple[str, str, str, Tests, list[Any]]] = [
    ("pytest-9.2.0/passing", "pytest", "passed", Tests(3, 0, 1, 0), []),
    ("pytest-9.2.0/failing", "pytest", "failed", BAD_PYTEST, PYTEST),
    ("pytest-9.2.0/failing-coloured", "pytest", "failed", BAD_PYTEST, PYTEST),
    ("pytest-9.2.0/failing-short", "pytest", "failed", BAD_PYTEST, PYTEST),
    ("pytest-9.2.0/failing-verbose", "pytest", "failed", BAD_PYTEST, PYTEST),
    ("pytest-9.2.0/failing-no-summary", "pytest", "failed", BAD_PYTEST, UNNAMED),
    (
        "pytest-9.2.0/failing-line",
        "pytest",
        "failed",
        BAD_PYTEST,
        [(name, "tests/test_price.py", None, message) for name, _, _, message in PYTEST],
    ),
    ("pytest-9.2.0/stopped", "pytest", "failed", Tests(0, 1, 0, 0), PYTEST[1:2]),
    ("pytest-9.2.0/collection", "pytest", "failed", Tests(0, 0, 0, 2), COLLECTED),
    ("pytest-9.2.0/nothing", "pytest", "failed", Tests(0, 0, 0, 0), []),
    ("unittest-3.11.7/passing", "unittest", "passed", Tests(1, 0, 1, 0), []),
    ("unittest-3.11.7/failing", "unittest", "failed", Tests(1, 2, 1, 2), UNITTEST),
    ("unittest-3.11.7/failing-verbose", "unittest", "failed", Tests(1, 2, 1, 2), UNITTEST),
    ("jest-30.5.2/passing", "jest", "passed", Tests(2, 0, 1, 0), []),
    ("jest-30.5.2/failing", "jest", "failed", Tests(1, 2, 1, 1), JEST),
    ("jest-30.5.2/failing-coloured", "jest", "failed", Tests(1, 2, 1, 1), JEST),
    ("jest-30.5.2/failing-verbose", "jest", "failed", Tests(1, 2, 1, 1), JEST),
    ("vitest-4.1.12/passing", "vitest", "passed", Tests(2, 0, 1, 0), []),
    ("vitest-4.1.12/failing", "vitest", "failed", Tests(1, 2, 1, 1), VITEST),
    ("vitest-4.1.12/failing-coloured", "vitest", "failed", Tests(1, 2, 1, 1), VITEST),
    ("vitest-4.1.12/failing-verbose", "vitest", "failed", Tests(1, 2, 1, 1), VITEST),
    ("go-1.27.3/passing", "go", "passed", Tests(None, 0, None, 0), []),
    ("go-1.27.3/passing-json", "go", "passed", Tests(1, 0, 1, 0), []),
    ("go-1.27.3/failing", "go", "failed", Tests(None, 4, None, 1), GO),
    ("go-1.27.3/failing-verbose", "go", "failed", Tests(3, 4, 0, 1), GO),
    ("go-1.27.3/failing-json", "go", "failed", Tests(3, 4, 0, 1), GO),
    ("cargo-1.95.0/passing", "cargo", "passed", Tests(2, 0, 1, 0), []),
    ("cargo-1.95.0/failing", "cargo", "failed", Tests(2, 3, 0, 0), CARGO),
    ("cargo-1.95.0/failing-coloured", "cargo", "failed", Tests(1, 3, 0, 0), CARGO),
]


@pytest.mark.parametrize(("case", "tool", "verdict", "tests", "failures"), TESTED, ids=[each[0] for each in TESTED])
def test_tests_are_read_as_they_were_recorded(
    case: str, tool: str, verdict: str, tests: Tests, failures: list[Any]
) -> None:
    found = diagnosed(case)

    assert found is not None
    assert (found.tool, found.verdict, found.tests) == (tool, verdict, tests)
    assert sorted((f.name, f.file, f.line, f.message) for f in found.failures) == sorted(failures)


@pytest.mark.parametrize(("tool", "failed"), [("pytest-9.2.0", 5), ("vitest-4.1.12", 3)])
def test_a_junit_report_tells_about_the_tests_in_place_of_the_output(tool: str, failed: int) -> None:
    found = diagnosed(f"{tool}/junit")

    assert found is not None
    assert (found.tool, found.verdict, len(found.failures)) == ("junit", "failed", failed)
    assert found.tests == {"pytest-9.2.0": Tests(2, 4, 1, 1), "vitest-4.1.12": Tests(1, 3, 1, 0)}[tool]


# ---------------------------------------------------------------------- builds

RUST = [("src/inner.rs", 2, 5, "error", "E0425"), ("src/lib.rs", 5, 5, "error", "E0308")]
RUFF = [
    ("a.py", 1, 1, "error", "I001"), ("a.py", 1, 8, "error", "F401"), ("a.py", 2, 8, "error", "F401"),
    ("a.py", 5, 5, "error", "F841"), ("a.py", 6, 12, "error", "F821"), ("b.py", 1, 7, "error", "invalid-syntax"),
]  # fmt: skip
TSC = [
    ("src/a.ts", 1, 7, "error", "TS2322"), ("src/a.ts", 2, 40, "error", "TS2322"),
    ("src/a.ts", 3, 1, "error", "TS2304"), ("src/b.ts", 1, 19, "error", "TS7006"),
]  # fmt: skip
MYPY = [
    ("b.py", 1, 10, "error", "assignment"), ("b.py", 1, 10, "note", ""), ("a.py", 2, 12, "error", "return-value"),
    ("a.py", 4, 3, "error", "arg-type"), ("a.py", 5, 1, "error", "import-not-found"), ("a.py", 5, 1, "note", ""),
    ("a.py", 6, 13, "note", ""),
]  # fmt: skip
GCC = [
    ("shop.h", 1, 13, "error", ""), ("shop.h", 3, 36, "note", ""), ("shop.h", 1, 13, "note", ""),
    ("shop.h", 3, 36, "note", ""), ("main.c", 5, 18, "warning", "-Wint-conversion"), ("shop.h", 2, 15, "note", ""),
    ("main.c", 5, 28, "error", ""), ("main.c", 4, 9, "warning", "-Wunused-variable"),
]  # fmt: skip
CLANG = [
    ("./shop.h", 3, 36, "error", ""), ("./shop.h", 1, 13, "note", ""), ("main.c", 5, 18, "error", "-Wint-conversion"),
    ("./shop.h", 2, 15, "note", ""), ("main.c", 5, 28, "error", ""),
]  # fmt: skip
GO_BUILD = [
    ("other/other.go", 4, 1, "error", ""), ("./main.go", 3, 8, "error", ""), ("./main.go", 6, 6, "error", ""),
    ("./main.go", 6, 14, "error", ""), ("./main.go", 7, 2, "error", ""),
]  # fmt: skip
BUILT: list[tuple[str, str, str, list[Any]]] = [
    ("cargo-1.95.0/build", "cargo", "failed", RUST),
    ("cargo-1.95.0/build-coloured", "cargo", "failed", RUST),
    ("cargo-1.95.0/build-short", "cargo", "failed", RUST),
    ("cargo-1.95.0/test-does-not-build", "cargo", "failed", RUST),
    ("go-1.27.3/build", "go", "failed", GO_BUILD),
    ("gcc-12.2.0/failing", "cc", "failed", GCC),
    ("gcc-12.2.0/failing-coloured", "cc", "failed", GCC),
    ("gcc-12.2.0/warning", "cc", "passed", [("main.c", 2, 9, "warning", "-Wunused-variable")]),
    ("gcc-12.2.0/fatal", "cc", "failed", [("main.c", 1, 10, "error", "")]),
    ("gcc-12.2.0/link", "cc", "failed", [("main.c", None, None, "error", "")]),
    ("clang-22.1.8/failing", "cc", "failed", CLANG),
    ("clang-22.1.8/failing-coloured", "cc", "failed", CLANG),
    ("clang-22.1.8/warning", "cc", "passed", [("main.c", 2, 9, "warning", "-Wunused-variable")]),
    ("clang-22.1.8/fatal", "cc", "failed", [("main.c", 1, 10, "error", "")]),
    ("tsc-7.0.2/failing", "tsc", "failed", TSC),
    ("tsc-7.0.2/failing-pretty", "tsc", "failed", TSC),
    ("ruff-0.17.4/passing", "ruff", "passed", []),
    ("ruff-0.17.4/failing", "ruff", "failed", [*RUFF, ("b.py", 1, 9, "error", "invalid-syntax")]),
    ("ruff-0.17.4/failing-coloured", "ruff", "failed", [*RUFF, ("b.py", 1, 9, "error", "invalid-syntax")]),
    ("ruff-0.17.4/failing-concise", "ruff", "failed", [*RUFF, ("b.py", 2, 1, "error", "invalid-syntax")]),
    ("ruff-0.17.4/format", "ruff", "failed", [("a.py", 1, 2, "error", "unformatted")]),
    ("mypy-2.4.1/passing", "mypy", "passed", []),
    ("mypy-2.4.1/failing", "mypy", "failed", [(file, line, None, *more) for file, line, _, *more in MYPY]),
    ("mypy-2.4.1/failing-pretty", "mypy", "failed", MYPY),
    ("mypy-2.4.1/failing-coloured", "mypy", "failed", MYPY),
]


@pytest.mark.parametrize(("case", "tool", "verdict", "diagnostics"), BUILT, ids=[each[0] for each in BUILT])
def test_diagnostics_are_read_as_they_were_recorded(case: str, tool: str, verdict: str, diagnostics: list[Any]) -> None:
    found = diagnosed(case)

    assert found is not None
    assert (found.tool, found.verdict, found.tests, found.failures) == (tool, verdict, None, ())
    assert [(d.file, d.line, d.column, d.severity, d.code) for d in found.diagnostics] == diagnostics
    assert all(d.message for d in found.diagnostics)


def test_every_recorded_case_is_expected() -> None:
    silent = {"tsc-7.0.2/passing", "pytest-9.2.0/junit", "vitest-4.1.12/junit"}

    assert set(CASES) == {each[0] for each in TESTED} | {each[0] for each in BUILT} | silent


def test_a_tool_that_says_nothing_is_no_diagnosis() -> None:
    assert diagnosed("tsc-7.0.2/passing") is None
    assert told("Hello\nall is well\n", 0) is None
    assert told("", 1) is None


# ---------------------------------------------------------------------- cut, in pieces


@pytest.mark.parametrize("case", [each[0] for each in TESTED + BUILT])
def test_the_size_of_the_pieces_makes_no_difference(case: str) -> None:
    assert diagnosed(case, 7) == diagnosed(case)


@pytest.mark.fuzz
@pytest.mark.parametrize("case", sorted(CASES))
def test_a_run_that_was_cut_anywhere_never_passed(case: str) -> None:
    """At every tenth byte; in the gate, the larger outputs at 100 places."""
    streams = {stream: (RECORDED / f"{case}.{stream}").read_bytes() for stream in STREAMS}
    whole = diagnosed(case)
    names = {f.name for f in whole.failures} if whole else set()
    bare = {name.rpartition("::")[2].rpartition(".")[2] for name in names} | {"TestTable"}  # failed by its subtest

    for stream, data in streams.items():
        for end in range(0, len(data), 10 if FULL else max(10, len(data) // 100)):
            diagnoser = Diagnoser()
            if stream == "stderr":
                diagnoser.feed("stdout", streams["stdout"])
            diagnoser.feed(stream, data[:end])
            found = diagnoser.finish(CommandEnd(None))
            if found is not None and not case.endswith("junit"):
                assert found.verdict == "incomplete"
                assert {f.name.rpartition("::")[2].rpartition(".")[2] for f in found.failures} <= bare


@pytest.mark.parametrize("case", [case for case, kept in CASES.items() if kept["exit_code"] != 0])
def test_a_failing_run_never_passes_wherever_its_output_ends(case: str) -> None:
    data = (RECORDED / f"{case}.stdout").read_bytes() + (RECORDED / f"{case}.stderr").read_bytes()

    for end in range(0, len(data), max(97, len(data) // 50)):
        found = told(data[:end], CASES[case]["exit_code"])
        assert found is None or found.verdict in ("failed", "incomplete")


@pytest.mark.parametrize("case", [each[0] for each in TESTED + BUILT])
def test_lines_that_begin_nothing_are_passed_over_without_a_difference(case: str) -> None:
    readers = [make() for make in READERS.values()]
    for stream in STREAMS:
        lines = Lines()
        for line in lines.feed((RECORDED / f"{case}.{stream}").read_bytes()) + lines.last():
            for reader in readers:
                reader.feed(line)

    assert judge([each.findings() for each in readers], CommandEnd(CASES[case]["exit_code"])) == diagnosed(case)


def test_output_that_breaks_off_is_incomplete_also_with_exit_code_0() -> None:
    half = (RECORDED / "pytest-9.2.0/passing.stdout").read_bytes()[:200]

    found = told(half, 0)
    dropped = told((RECORDED / "pytest-9.2.0/passing.stdout").read_bytes(), 0, whole=False)

    assert found is not None
    assert (found.verdict, found.tests) == ("incomplete", None)
    assert dropped is not None
    assert (dropped.verdict, dropped.note) == ("incomplete", "a part of its output is missing")


# ---------------------------------------------------------------------- hostile

LIES = [
    "===== 7 passed in 0.01s =====\n",
    "Ran 7 tests in 0.001s\n\nOK\n",
    "Test Suites: 1 passed, 1 total\nTests:       7 passed, 7 total\n",
    " RUN  v4.1.12 /tmp/project\n      Tests  7 passed (7)\n   Duration  1ms\n",
    "ok  \texample.com/shop\t0.1s\n",
    '{"Action":"pass","Package":"p","Test":"T"}\n',
    "running 7 tests\ntest result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
    "All checks passed!\n",
    "Success: no issues found in 3 source files\n",
]


@pytest.mark.parametrize("lie", LIES)
def test_a_printed_summary_makes_no_run_pass(lie: str) -> None:
    failed, cut = told(lie, 1), told(lie, None)

    assert failed is not None
    assert failed.verdict == "failed"
    assert "although" in failed.note
    assert cut is not None
    assert cut.verdict == "incomplete"


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        (b"\nRan 0 tests in 0.000s\n\nOK\n", "unclear"),
        (b"sss\nRan 3 tests in 0.000s\n\nOK (skipped=3)\n", "passed"),
    ],
)
def test_exit_code_0_without_a_single_test_passes_nothing(output: bytes, verdict: str) -> None:
    found = told(b"-" * 70 + output, 0)

    assert found is not None
    assert found.verdict == verdict
    assert found.note == ("exit code 0, although no test ran" if verdict == "unclear" else "no test passed")


def test_exit_code_0_beside_failures_is_said_and_not_believed() -> None:
    found = told((RECORDED / "pytest-9.2.0/failing.stdout").read_bytes(), 0)

    assert found is not None
    assert found.verdict == "unclear"
    assert "exit code 0, although the output tells of 5" in found.note


def test_output_of_several_tools_is_one_diagnosis() -> None:
    both = b"".join(
        (RECORDED / f"{case}.stdout").read_bytes() for case in ("mypy-2.4.1/failing", "pytest-9.2.0/passing")
    )

    found = told(both, 2)

    assert found is not None
    assert (found.tool, found.tests) == ("pytest+mypy", Tests(3, 0, 1, 0))
    assert len(found.diagnostics) == 7


def test_thousands_of_failures_are_counted_and_the_first_ones_kept() -> None:
    lines = [f"FAILED tests/test_a.py::test_{n} - boom" for n in range(5000)]
    text = (
        "=== short test summary info ===\n" + "\n".join(lines) + "\n=== 5000 failed, 1 passed in 9.99s (0:00:09) ===\n"
    )

    found = told(text)

    assert found is not None
    assert found.tests == Tests(1, 5000, 0, 0)
    assert (len(found.failures), found.truncated) == (MOST_FAILURES, True)
    assert found.failures[0].name == "tests/test_a.py::test_0"


def test_time_for_failures_of_go_grows_with_their_number_and_not_faster() -> None:
    diagnoser, began = Diagnoser(), time.process_time()
    diagnoser.feed("stdout", b"".join(b"--- FAIL: TestTotal%d (0.00s)\n" % number for number in range(16_000)))
    diagnoser.feed("stdout", b"FAIL\texample.com/shop\t0.01s\n")
    found = diagnoser.finish(CommandEnd(1))

    assert found is not None
    assert found.tests == Tests(None, 16_000, None, 0)
    assert time.process_time() - began < 10  # half a second; by pairs, 25


def test_bytes_that_are_no_text_do_no_harm() -> None:
    data = (RECORDED / "pytest-9.2.0/failing.stdout").read_bytes().replace(b"no price", b"\xff\xfe no \x00 price\x1b[")

    found = told(data)

    assert found is not None
    assert found.tests == BAD_PYTEST
    assert "\x00" not in "".join(f.message + f.excerpt for f in found.failures)


def test_lines_are_cleaned() -> None:
    assert clean(b"\x1b[31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07 \x1b(Bend\r") == "red link end"
    assert clean(b"10%\r100%") == "100%"
    lines = Lines()
    assert lines.feed(b"a" * (LONGEST_LINE + 10)) == []
    assert lines.feed(b"a" * 1000) == []
    assert lines.feed(b"a\nb\nc") == ["a" * LONGEST_LINE, "b"]
    assert lines.last() == ["c"]
    assert lines.last() == []


# ---------------------------------------------------------------------- reports


def reported(report: str | bytes, exit_code: int | None = 1) -> Diagnosis | None:
    diagnoser = Diagnoser()
    diagnoser.report(report.encode() if isinstance(report, str) else report)
    return diagnoser.finish(CommandEnd(exit_code))


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><testsuites><testcase name="&b;"/></testsuites>'
OUTSIDE = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><testsuites><testcase name="&a;"/></testsuites>'


@pytest.mark.parametrize("report", [BOMB, OUTSIDE, "<a>" * 100_000, "", "no xml", b"\xff\xfe\x00"])
def test_a_report_with_entities_or_without_sense_tells_nothing(report: str | bytes) -> None:
    assert reported(report, 0) is None


def test_a_report_that_is_cut_is_incomplete() -> None:
    report = (RECORDED / "pytest-9.2.0/junit.xml").read_bytes()

    for end in range(0, len(report), 50):
        for code in (0, 1, None):
            found = reported(report[:end], code)
            assert found is None or found.verdict in ("incomplete", "unclear")


def test_a_report_counts_its_cases_and_not_its_claims() -> None:
    report = (
        '<testsuite tests="9" failures="0"><testcase name="a"/><testcase classname="c" name="b" file="b.rb" line="3">'
    )
    report += '<failure message="no">at b.rb:4</failure></testcase><testcase name="c"><skipped/></testcase></testsuite>'

    found = reported(report)

    assert found is not None
    assert found.tests == Tests(1, 1, 1, 0)
    assert [(f.name, f.file, f.line, f.message) for f in found.failures] == [("c::b", "b.rb", 3, "no")]


# ---------------------------------------------------------------------- detection


def runners(purpose: Purpose, files: dict[str, str]) -> list[tuple[str, str]]:
    found = detect(purpose, files, {name: text for name, text in files.items() if text})
    return [(each.name, " ".join(each.argv)) for each in found.runners]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pytest.ini": ""}, ("pytest", "python3 -m pytest")),
        ({"pyproject.toml": "[tool.pytest.ini_options]\n", ".venv/": ""}, ("pytest", ".venv/bin/python -m pytest")),
        ({"pyproject.toml": "[dependency-groups]\ndev = ['pytest>=8']\n", "uv.lock": ""}, ("pytest", "uv run pytest")),
        ({"setup.cfg": "[tool:pytest]\n", "poetry.lock": ""}, ("pytest", "poetry run pytest")),
        ({"tox.ini": "[pytest]\n"}, ("pytest", "python3 -m pytest")),
        ({"requirements-dev.txt": "pytest-cov\npytest==9\n"}, ("pytest", "python3 -m pytest")),
        ({"test_a.py": ""}, ("unittest", "python3 -m unittest")),
        ({"test_a.py": "class A(TestCase):\n    def test_a(self): ...\n"}, ("unittest", "python3 -m unittest")),
        ({"test_a.py": "def test_a():\n    assert 1\n"}, ("pytest", "python3 -m pytest")),
        ({"a_test.py": "async def test_a():\n    assert 1\n"}, ("pytest", "python3 -m pytest")),
        ({"test_a.py": "class TestA:\n    def test_a(self): ...\n"}, ("pytest", "python3 -m pytest")),
        ({"test_a.py": "import pytest\n"}, ("pytest", "python3 -m pytest")),
        ({"tests/": "", "tests/test_a.py": "from pytest import mark\n"}, ("pytest", "python3 -m pytest")),
        ({"setup.py": "", "tests/": ""}, ("unittest", "python3 -m unittest discover -s tests -t .")),
        ({"package.json": '{"scripts": {"test": "vitest run"}}'}, ("npm test", "npm test")),
        ({"package.json": '{"scripts": {"test": "jest"}}', "yarn.lock": ""}, ("yarn test", "yarn test")),
        ({"package.json": '{"devDependencies": {"vitest": "4"}}'}, ("vitest", "npx --no-install vitest run")),
        ({"package.json": '{"dependencies": {"jest": "30"}}'}, ("jest", "npx --no-install jest")),
        ({"go.mod": "module x\n"}, ("go", "go test -json ./...")),
        ({"Cargo.toml": "[package]\n"}, ("cargo", "cargo test")),
        ({"CMakeLists.txt": "", "build/": ""}, ("ctest", "ctest --test-dir build --output-on-failure")),
        ({"Makefile": "all: x\n\ntest: all\n\tsh test.sh\n"}, ("make test", "make test")),
    ],
)
def test_the_test_runner_is_found_from_the_files(files: dict[str, str], expected: tuple[str, str]) -> None:
    assert runners("test", files) == [expected]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pyproject.toml": "[tool.mypy]\nfiles = ['src']\n"}, ("mypy", "python3 -m mypy")),
        ({"mypy.ini": "", "uv.lock": ""}, ("mypy", "uv run mypy")),
        ({"ruff.toml": ""}, ("ruff", "python3 -m ruff check")),
        ({"tsconfig.json": "", "package.json": "{}"}, ("tsc", "npx --no-install tsc --noEmit")),
        ({"tsconfig.json": "", "package.json": '{"scripts": {"build": "tsc"}}'}, ("npm run build", "npm run build")),
        ({"go.mod": ""}, ("go", "go build ./...")),
        ({"Cargo.toml": ""}, ("cargo", "cargo build --all-targets")),
        ({"CMakeLists.txt": ""}, ("cmake", "sh -c cmake -S . -B build && cmake --build build")),
        ({"Makefile": "all:\n\tcc main.c\n"}, ("make all", "make all")),
        ({"Makefile": "main.o: main.c\nprogram: main.o\n"}, ("make", "make")),
    ],
)
def test_the_build_is_found_from_the_files(files: dict[str, str], expected: tuple[str, str]) -> None:
    assert runners("build", files) == [expected]


def test_files_that_speak_for_several_runners_are_told_and_not_guessed() -> None:
    found = detect("test", ["go.mod", "pytest.ini"], {"go.mod": "module x"})

    assert found.runner is None
    assert [each.name for each in found.runners] == ["pytest", "go"]
    assert found.named("go") == Runner("go", ("go", "test", "-json", "./..."), "go.mod", ("-run",))
    assert found.named("jest") is None
    assert runners("test", {"package.json": '{"devDependencies": {"vitest": "4", "jest": "30"}}'}) == [
        ("vitest", "npx --no-install vitest run"),
        ("jest", "npx --no-install jest"),
    ]


def test_a_makefile_gives_way_to_the_runner_of_a_language_and_is_told() -> None:
    found = detect("test", ["pytest.ini", "Makefile"], {"Makefile": "test:\n\tpytest\n"})

    assert found.runner is not None
    assert found.runner.name == "pytest"
    assert [each.name for each in found.also] == ["make test"]


def test_a_folder_that_says_nothing_has_no_runner() -> None:
    placeholder = '{"scripts": {"test": "echo \\"Error: no test specified\\" && exit 1"}}'

    assert runners("test", {}) == []
    assert runners("test", {"package.json": placeholder}) == []
    assert runners("test", {"pyproject.toml": "not toml [", "package.json": "[1", "Makefile": "TEST := x\n"}) == []
    assert runners("build", {"notes.md": ""}) == []


def test_a_filter_goes_where_the_runner_takes_it() -> None:
    files = {"package.json": '{"scripts": {"test": "vitest run"}}'}
    [runner] = detect("test", files, files).runners

    assert runner.selecting("adds two") == ("npm", "test", "--", "-t", "adds two")
