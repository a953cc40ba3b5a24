"""Which tests may be run again when they failed."""

import json
from pathlib import Path

from tests.again import failed, refusal


def test_a_few_failures_are_run_again_unless_they_are_about_a_promise() -> None:
    assert refusal(["tests/runtime/test_one.py::test_it", "tests/cli/test_two.py::test_it[3]"]) == ""
    assert "promise" in refusal(["tests/runtime/test_one.py::test_it", "tests/crash/test_two.py::test_it"])


def test_many_failures_and_none_are_not() -> None:
    assert "4 tests" in refusal([f"tests/cli/test_one.py::test_it[{number}]" for number in range(4)])
    assert "something else" in refusal([])


def test_failures_are_those_that_pytest_noted(tmp_path: Path) -> None:
    assert failed(tmp_path) == []
    noted = tmp_path / "v" / "cache" / "lastfailed"
    noted.parent.mkdir(parents=True)
    noted.write_text(json.dumps({"tests/cli/test_one.py::test_it": True}))
    assert failed(tmp_path) == ["tests/cli/test_one.py::test_it"]
