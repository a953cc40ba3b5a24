"""A change of a file, and its undo, killed with SIGKILL before every call of the operating system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.workspace import killed

BEFORE = {"a.txt": "one\n"}
AFTER = {
    "edit": {"a.txt": "two\n"},
    "make": {"a.txt": "one\n", "deep/new.txt": "new\n"},
    "delete": {},
}
STEPS = {"edit": 9, "make": 6, "delete": 2}
"""How many calls there are for each; for an edit, one less as another user than root."""
UNDONE = {"edit": "edit", "make": "delete", "delete": "make"}
"""What the undo of each does."""


def start(folder: Path, what: str, step: int) -> tuple[int, str]:
    """The exit status of the program, and what it printed."""
    command = [sys.executable, killed.__file__, str(folder / "agent.db"), str(folder / "work"), what, str(step)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode in (0, -9), ran.stderr
    return ran.returncode, ran.stdout


def contents(work: Path) -> dict[str, str]:
    return {str(path.relative_to(work)): path.read_text() for path in sorted(work.rglob("*")) if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("one\n")
    return tmp_path


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "step"), [(what, step) for what, last in STEPS.items() for step in range(1, last + 1)]
)
def test_a_change_that_is_killed_is_made_once_and_known(folder: Path, what: str, step: int) -> None:
    status, _ = start(folder, what, step)
    seen = {name: text for name, text in contents(folder / "work").items() if not name.endswith(".tmp")}
    _, told = start(folder, what, 0)

    assert seen in (BEFORE, AFTER[what]), "whoever reads sees the earlier content or the new one"
    assert "Ok(" in told
    assert "['applied']" in told
    assert contents(folder / "work") == AFTER[what], "and nothing else is left"
    if status == 0:
        assert seen == AFTER[what]


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "step"), [(what, step) for what, like in UNDONE.items() for step in range(1, STEPS[like] + 1, 2)]
)
def test_an_undo_that_is_killed_is_made_again(folder: Path, what: str, step: int) -> None:
    _, first = start(folder, f"undo {what}", step)
    seen = {name: text for name, text in contents(folder / "work").items() if not name.endswith(".tmp")}
    _, told = start(folder, f"undo {what}", 0)

    assert "applied" in first
    assert seen in (BEFORE, AFTER[what])
    assert "['undone']" in told or "['unchanged']" in told
    assert contents(folder / "work") == BEFORE
