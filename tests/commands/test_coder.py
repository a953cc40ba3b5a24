"""The coding agent, killed with SIGKILL wherever it is: what it does happens once, and its end is the same."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.examples.coder import SHOP, write_project
from perdure.model.tool import Ok
from tests.commands.conftest import size

FIXED = SHOP.replace("whole > 100", "whole >= 100")
KILLS = 3


def begin(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perdure.examples.coder", str(folder), "--unsandboxed"]
    with (folder / "coder.log").open("ab") as log:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ)


def kill_somewhere(folder: Path, lines: int, characters: int) -> None:
    """Kill the coder when it has printed so many lines and done a little more, or let it end."""
    child = begin(folder)
    assert child.stdout is not None
    with child.stdout:
        for _ in range(lines):
            child.stdout.readline()
        # Work of our own in place of a pause: how far the coder gets meanwhile differs, and makes no difference.
        sum(range(characters))
        child.kill()
        child.wait()


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(size(2, 60)))
async def test_a_coder_that_is_killed_at_random_edits_once_and_runs_each_test_once(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    write_project(folder / "project")
    chance = random.Random(seed)

    for _ in range(KILLS):
        kill_somewhere(folder, chance.randrange(8), chance.randrange(1, 3_000_000))
    last = begin(folder)
    printed, _ = last.communicate(timeout=240)

    assert last.returncode == 0, printed + (folder / "coder.log").read_text()
    assert (folder / "project/shop.py").read_text() == FIXED
    assert (folder / "project/runs.log").read_text().split("\n") == ["began", "ended", "began", "ended", ""]
    async with Runtime(folder / "agent/store.db", recover=False) as runtime:
        session = await runtime.session("fix")
        result = await session.result("fix.1")
        edits = [each.status for each in await session.edits()]
    assert result.text.endswith("all tests pass.")
    assert [(each.tool, isinstance(each.outcome, Ok)) for each in result.tool_calls] == [
        ("run_test", True), ("read_file", True), ("edit_file", True), ("run_test", True),
    ]  # fmt: skip
    assert [each.value["verdict"] for each in result.tool_calls if each.tool == "run_test"] == ["failed", "passed"]
    assert edits == ["applied"]
