"""A folder that is swapped for a link while its files are read, written and deleted.

By another process, as it comes; and by ourselves before every single call of the operating system, so that none of them
depends on chance.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from perdure import ToolError
from perdure.workspace import files
from perdure.workspace import paths as paths_module
from perdure.workspace import reading as reading_module
from perdure.workspace import search as search_module
from perdure.workspace.paths import Paths, telling
from perdure.workspace.reading import shown_file
from perdure.workspace.search import Tally, walk
from tests.workspace import swapping

ROUNDS = 1500


@pytest.fixture
def raced(tmp_path: Path) -> Iterator[Path]:
    """A workspace whose folder `sub` is, every other moment, a link to the folder `out` beside the workspace."""
    root = tmp_path / "work"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "file.txt").write_text("inside")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file.txt").write_text("outside")
    (root / "way").symlink_to("../out")
    with subprocess.Popen([sys.executable, "-I", swapping.__file__, str(root)], stdout=subprocess.PIPE) as swapper:
        try:
            assert swapper.stdout is not None
            assert swapper.stdout.readline() == b"at work\n"
            yield root
        finally:
            swapper.kill()


def test_what_is_read_is_always_inside(raced: Path) -> None:
    paths, read, rounds = Paths([str(raced)]), set[str](), 0
    while rounds < ROUNDS or not read:  # the other process may stand still while the link is there
        rounds += 1
        with contextlib.suppress(ToolError), paths.locate("sub/file.txt") as place, telling("sub"):
            read.add(shown_file(paths, place, 0, None, "lines")["content"])

    assert read == {"inside"}


def test_what_is_visited_is_always_inside(raced: Path) -> None:
    paths, read, rounds = Paths([str(raced)]), set[str](), 0
    while rounds < ROUNDS // 5 or not read:
        rounds += 1
        with contextlib.suppress(ToolError), paths.locate(".") as place, telling("."):
            for folder, name, _ in walk(paths, place, False, Tally()):
                with contextlib.suppress(OSError), open(paths.open_file(folder, name)) as file:
                    read.add(file.read())

    assert read == {"inside"}


def test_what_is_written_and_deleted_is_always_inside(raced: Path) -> None:
    paths, written, rounds = Paths([str(raced)]), 0, 0
    while rounds < ROUNDS // 5 or not written:
        rounds += 1
        with contextlib.suppress(ToolError):
            with paths.locate("sub/made/new.txt", change=True, make=True) as place, telling("sub"):
                files.replace(place, b"made", str(rounds), None)
                written += 1
            with paths.locate("sub/file.txt", change=True, follow=False) as place, telling("sub"):
                files.remove(place)
                files.replace(place, b"inside", str(rounds), None)

    assert os.listdir(raced.parent / "out") == ["file.txt"]
    assert (raced.parent / "out" / "file.txt").read_text() == "outside"


# ---------------------------------------------------------------------- at every step

SOURCES = {module.__file__ for module in (paths_module, files, reading_module, search_module)}


class Swapper:
    """Swaps the folder for the link before call number `step` of the operating system."""

    def __init__(self, root: Path, step: int) -> None:
        self._root, self._left, self.swapped = root, step, False

    def __call__(self, frame: FrameType, event: str, made: Any) -> None:
        if event != "c_call" or frame.f_code.co_filename not in SOURCES or made.__module__ not in ("posix", "_io"):
            return
        self._left -= 1
        if self._left == 0:
            self.swapped = True
            (self._root / "sub").rename(self._root / "real")
            (self._root / "way").rename(self._root / "sub")


def read(paths: Paths) -> None:
    with paths.locate("sub/deep/file.txt") as place, telling("sub"):
        assert shown_file(paths, place, 0, None, "lines")["content"] == "inside"


def visit(paths: Paths) -> None:
    with paths.locate(".") as place, telling("."):
        for folder, name, _ in walk(paths, place, False, Tally()):
            with open(paths.open_file(folder, name)) as file:
                assert file.read() == "inside"


def write(paths: Paths) -> None:
    with paths.locate("sub/made/new.txt", change=True, make=True) as place, telling("sub"):
        files.replace(place, b"made", "key", None, new=True)


def edit(paths: Paths) -> None:
    with paths.locate("sub/deep/file.txt", change=True) as place, telling("sub"):
        found = files.content(paths, place, 1000)
        assert found is not None
        assert found.data == b"inside"
        files.replace(place, b"edited", "key", found.mode)


def delete(paths: Paths) -> None:
    with paths.locate("sub/deep/file.txt", change=True, follow=False) as place, telling("sub"):
        files.remove(place)


def swapped_at(root: Path, step: int, work: Callable[[Paths], None]) -> bool:
    """Do some work, with a swap before a step of it. False where it has no such step."""
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "sub" / "deep" / "file.txt").write_text("inside")
    (root.parent / "out" / "deep").mkdir(parents=True)
    (root.parent / "out" / "deep" / "file.txt").write_text("outside")
    (root / "way").symlink_to("../out")
    paths, swapper = Paths([str(root)]), Swapper(root, step)
    sys.setprofile(swapper)
    try:
        with contextlib.suppress(ToolError, OSError):
            work(paths)
    finally:
        sys.setprofile(None)
    return swapper.swapped


@pytest.mark.parametrize("work", [read, visit, write, edit, delete], ids=lambda work: work.__name__)
def test_a_swap_at_any_step_leads_nowhere(work: Callable[[Paths], None], tmp_path: Path) -> None:
    step = 1
    while swapped_at(tmp_path / str(step) / "work", step, work):
        out = tmp_path / str(step) / "out"
        assert [str(path.relative_to(out)) for path in sorted(out.rglob("*"))] == ["deep", "deep/file.txt"], step
        assert (out / "deep" / "file.txt").read_text() == "outside", step
        step += 1

    assert step > 4
