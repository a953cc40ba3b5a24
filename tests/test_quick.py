"""What `make quick` runs: of each test the variant in memory, one way to die, and nothing that is marked slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def collected(*options: str) -> list[str]:
    paths = ["tests/observe/test_feed.py", "tests/crash/test_queued.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options, *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in ran.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_quick_leaves_files_and_all_but_one_way_to_die_to_the_other_lanes() -> None:
    all_of_them, quick = collected(), collected("--quick")

    assert set(quick) < set(all_of_them)
    assert [test for test in all_of_them if "sqlite" in test and "[lost " in test]
    assert [test for test in quick if "sqlite" in test or "[lost " in test or "[hang " in test] == []
    assert {test.partition("[")[0] for test in quick if "before" in test}
