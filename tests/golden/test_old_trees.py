"""The frozen source trees are those that their list describes, and their work goes on with the present code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.golden.old_trees import ALL, NEWEST, TREES, BadTree, digests, environment_of, unpack


def test_every_archive_is_listed() -> None:
    assert sorted(digests()) == sorted(ALL)
    assert sorted(path.name for path in TREES.glob("*.tar.xz")) == sorted(f"{commit}.tar.xz" for commit in ALL)


def test_child_imports_the_older_tree_and_not_the_present_one() -> None:
    program = "import mainstay; print(mainstay.__file__)"
    environment = environment_of(NEWEST)
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)

    source = Path(environment["PYTHONPATH"].partition(":")[0])
    assert Path(ran.stdout.strip()) == source / "mainstay" / "__init__.py"
    assert environment_of(NEWEST) == environment, "it is unpacked once"
    assert not source.is_relative_to(TREES.parents[2])


def test_one_folder_may_be_unpacked_to_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: unpack(NEWEST, tmp_path), range(4))]

    assert found == [tmp_path / NEWEST] * 4
    assert [path.name for path in tmp_path.iterdir()] == [NEWEST]
    assert (tmp_path / NEWEST / "src" / "mainstay" / "__init__.py").exists()


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    """A copy of the folder of archives, to be damaged."""
    folder = tmp_path / "trees"
    shutil.copytree(TREES, folder)
    return folder


def test_tree_with_another_digest_is_refused(trees: Path, tmp_path: Path) -> None:
    archive = trees / f"{NEWEST}.tar.xz"
    archive.write_bytes(archive.read_bytes() + b"\0")

    with pytest.raises(BadTree, match=r"README\.md says 345581e6.*restore both files"):
        unpack(NEWEST, tmp_path, trees)
    assert not (tmp_path / NEWEST).exists()


def test_tree_without_its_archive_is_refused(trees: Path, tmp_path: Path) -> None:
    (trees / f"{NEWEST}.tar.xz").unlink()

    with pytest.raises(BadTree, match=r"82f0b67\.tar\.xz is missing: restore it"):
        unpack(NEWEST, tmp_path, trees)


def test_tree_that_is_not_listed_is_refused() -> None:
    with pytest.raises(BadTree, match="no tree of commit 'abc1234': use one of these: 82f0b67, b8c4c5f"):
        environment_of("abc1234")
