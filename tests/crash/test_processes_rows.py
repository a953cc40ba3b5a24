"""Every row of the failure model of processes has tests that are there, or a reason why not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.process_rows import ENVIRONMENT, OWED, PROCESSES

TESTS = Path(__file__).parents[1]
ALL = {**PROCESSES, **ENVIRONMENT}


@pytest.mark.parametrize("row", ALL)
def test_a_row_names_tests_that_exist(row: str) -> None:
    for name in ALL[row]:
        file, _, test = name.partition("::")
        assert re.search(rf"def {test}\(", (TESTS / file).read_text()), f"{row}: there is no {name}"


def test_every_row_about_processes_is_covered_or_owed(record_property: Callable[[str, object], None]) -> None:
    covered = {row for words in PROCESSES for row in re.findall(r"P\d+", words)}
    owed = {row for words in OWED for row in re.findall(r"P\d+", words)}

    assert covered | owed == {f"P{n}" for n in range(1, 21)}
    record_property("perdure", f"processes: {len(covered)} of 20 rows covered")
    for words, reason in OWED.items():
        record_property("perdure", f"owed: {words}: {reason}")
