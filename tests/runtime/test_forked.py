"""Processes that fork while a Runtime is open, and what a process may run out of."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture
def folder_of_nobody(tmp_path: Path) -> Iterator[Path]:
    """A folder that a user without rights may do everything with."""
    folder = Path("/var/tmp" if os.access("/var/tmp", os.W_OK) else "/tmp") / f"lost-{os.getpid()}-{id(tmp_path)}"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    yield folder
    shutil.rmtree(folder)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@needs_root
def test_a_turn_is_not_stuck_when_its_history_cannot_be_read_for_a_while(folder_of_nobody: Path) -> None:
    """The turn rests, and goes on when the permission is back; resuming it by hand finds nothing to do. Where SQLite
    has kept a descriptor of the file, the first asking is answered, too."""
    *refused, answer, resumed = said("loses_its_file", folder_of_nobody / "agent.db")

    assert refused in ([], ["StoreUnavailable"])
    assert (answer, resumed) == ("echo go", "False")


@needs_root
def test_a_blob_that_cannot_be_looked_at_is_not_missing_and_no_fault_of_ours(folder_of_nobody: Path) -> None:
    lost = ["StoreUnavailable"] * 3
    assert said("loses_its_blobs", folder_of_nobody / "agent.db") == [*lost, "1"]


@needs_root
def test_a_runtime_can_be_left_while_its_folder_cannot_be_entered(folder_of_nobody: Path) -> None:
    assert said("leaves_without_its_folder", folder_of_nobody / "agent.db") == ["0", "echo two", "left"]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads its size there")
@pytest.mark.parametrize("megabytes", [4, 12, 18, 20, 22, 24, 26, 28])
def test_a_process_short_of_memory_or_threads_ends_typed_and_never_hangs(tmp_path: Path, megabytes: int) -> None:
    *lines, last = said("short_of_memory", tmp_path / f"agent-{megabytes}")

    assert last == "left"
    assert set(lines) <= {"StoreUnavailable", "TurnFailed", "echo go"}
