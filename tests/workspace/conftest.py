"""What tests of the tools of a workspace begin with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def linux() -> None:
    """For tests that run commands."""
    if sys.platform != "linux":
        pytest.skip("commands run on Linux")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty folder to work in. Files with tests that need more in it have their own."""
    (tmp_path / "a project").mkdir()
    return tmp_path / "a project"
