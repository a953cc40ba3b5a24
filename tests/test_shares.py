"""The time of a lane: what is said of it, and what is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.shares import KILLED_STATUS, SHARES, main, run, told

ROOT = Path(__file__).parent.parent


def test_the_time_of_a_lane_is_printed_beside_its_share() -> None:
    assert told("test", 301.7, 330) == ["lane test: 5 min 01 s of 5 min 30 s"]


def test_a_lane_gets_a_warning_once_it_has_passed_its_share_by_more_than_half() -> None:
    assert len(told("test", 150, 100)) == 1

    _, warning = told("test", 160, 100)

    assert warning.startswith("WARNING: lane test took 1.6 times its share")


def test_a_lane_that_was_killed_says_so() -> None:
    assert told("gate", 300, 100, killed=True)[1].startswith("KILLED: lane gate did not end within 3 times its share")


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_lane_has_the_exit_status_of_its_command(status: int) -> None:
    ended, _, killed = run([sys.executable, "-c", f"raise SystemExit({status})"], limit=60)

    assert (ended, killed) == (status, False)


CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
HANGING = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}]); signal.pause()"
LIMITED = f"import sys; from tests.shares import run; print(run([sys.executable, '-c', {HANGING!r}], 0.5, 0.1)[0::2])"


def test_a_lane_that_hangs_is_killed_with_what_it_started() -> None:
    # The child holds the write end of this pipe, and ignores SIGTERM: while it lives, the output does not end.
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )

    assert ran.stdout == f"({KILLED_STATUS}, True)\n"


@pytest.mark.parametrize("arguments", [[], ["test"], ["tests", "make"]], ids=["nothing", "no command", "no such lane"])
def test_a_wrong_use_is_told_which_lanes_there_are(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert ", ".join(SHARES) in capsys.readouterr().err


def test_a_program_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "no-such-program-here"]) == 127
    assert "no-such-program-here" in capsys.readouterr().err
