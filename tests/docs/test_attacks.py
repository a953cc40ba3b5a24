"""The table of attacks in the documentation names tests and mutants that are there, and every mutant of a guard."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUARD = re.compile(r"commands/(confine|sandbox|probe)|workspace/(paths|git|spawning)")


def test_attacks_name_their_tests_and_every_mutant_of_a_guard() -> None:
    rows = [line.split("|") for line in (ROOT / "docs" / "sandbox.md").read_text().splitlines() if line.count("|") == 4]
    table = rows[[row[1].strip() for row in rows].index("attack") + 2 :]
    tests = {name for row in table for name in re.findall(r"`([\w/]+\.py)`", row[2])}
    mutants = {name for row in table for name in re.findall(r"`([\w-]+)`", row[3])}
    diffs = {file.stem: file.read_text() for file in (ROOT / "tests" / "mutants").glob("*.diff")}

    assert [name for name in tests if not (ROOT / "tests" / name).exists()] == []
    assert mutants == {name for name, text in diffs.items() if GUARD.search(text)}
