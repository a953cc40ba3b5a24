"""Processes that fork while a Runtime is open, and what a process may run out of."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def said(what: str, path: Path) -> list[str]:
    """The lines of a child that ended well."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.runtime.child", what, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_forked_child_may_not_open_the_file_that_its_parent_has_open(tmp_path: Path) -> None:
    """SQLite would take no locks for it, and a parent that leaves would remove the WAL under the child."""
    assert said("opens_after_fork", tmp_path / "agent.db") == ["StoreInherited", "['one', 'two']"]


def test_a_forked_child_may_open_what_its_parent_does_not_have_open(tmp_path: Path) -> None:
    assert said("opens_another_after_fork", tmp_path / "agent.db") == ["s.1", "s.1", "s.2"]


def test_a_forked_child_that_ends_leaves_the_transaction_of_its_parent_alone(tmp_path: Path) -> None:
    assert said("ends_after_fork", tmp_path / "agent.db") == ["3502"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts its descriptors there")
def test_a_process_without_descriptors_says_so_and_goes_on_when_it_has_some(tmp_path: Path) -> None:
    """The call that had ended when its output could not be kept is not made again."""
    assert said("without_descriptors", tmp_path / "agent.db") == ["StoreUnavailable", "StoreUnavailable", "done 1"]
