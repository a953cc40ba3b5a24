"""What kills its workers is set aside; what was only there when they died is not. Real processes, really killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.model.process import ProcessRow, Success
from perdure.stores.sqlite import SqliteStore
from tests.crash.suspects import STARTED

pytestmark = [pytest.mark.kill, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
MOST = 16
REASON = "3 workers in a row took it over and died without a new record"


def lives(folder: Path, what: str) -> int:
    """Start workers until one of them has nothing left to do; how many were killed before it."""
    command = [sys.executable, "-m", "tests.crash.suspects", str(folder), what]
    for killed in range(MOST):
        ended = subprocess.run(command, cwd=ROOT, timeout=120, check=False)
        if ended.returncode == 0:
            return killed
        assert ended.returncode == -signal.SIGKILL
    pytest.fail(f"{MOST} workers died")


async def found(folder: Path, process_id: str) -> ProcessRow:
    store = SqliteStore(folder / "agent.db")
    await store.open()
    row = await store.process(process_id)
    await store.close()
    assert row is not None
    return row


async def check_stuck(folder: Path, process_id: str = "bad") -> None:
    row = await found(folder, process_id)
    assert (row.stuck or "").startswith(REASON)


async def check_done(folder: Path, process_id: str = "good") -> None:
    row = await found(folder, process_id)
    assert row.record.outcome == Success("done")


async def test_a_process_beside_one_that_kills_ends_well(tmp_path: Path) -> None:
    killed = lives(tmp_path, "process")

    # Twice beside its neighbour, three times as the only suspect.
    assert killed == 5
    await check_stuck(tmp_path)
    await check_done(tmp_path)


@pytest.mark.gate
async def test_a_turn_that_waits_for_its_model_beside_a_process_that_kills_ends_well(tmp_path: Path) -> None:
    killed = lives(tmp_path, "turn")

    assert killed == 5
    await check_stuck(tmp_path)
    store = SqliteStore(tmp_path / "agent.db")
    await store.open()
    row = await store.session("s")
    await store.close()
    assert row is not None
    assert (row.head, row.state) == (1, "idle")


@pytest.mark.gate
async def test_a_process_beside_a_turn_that_kills_ends_well(tmp_path: Path) -> None:
    killed = lives(tmp_path, "poison")

    assert killed == 5
    await check_done(tmp_path)
    store = SqliteStore(tmp_path / "agent.db")
    await store.open()
    row = await store.session("s")
    await store.close()
    assert row is not None
    assert row.state == "stuck"
    assert (row.reason or "").startswith("3 workers in a row took this turn over and died without a new record")


async def test_two_that_kill_are_told_apart(tmp_path: Path) -> None:
    killed = lives(tmp_path, "two")

    # Twice together, then each three times by itself.
    assert killed == 8
    await check_stuck(tmp_path, "bad")
    await check_stuck(tmp_path, "bad-2")
    await check_done(tmp_path)


@pytest.mark.gate
async def test_runtimes_of_one_os_process_die_one_death(tmp_path: Path) -> None:
    killed = lives(tmp_path, "pid")

    assert killed == 5
    await check_stuck(tmp_path)
    await check_done(tmp_path)


@pytest.mark.gate
async def test_a_suspect_that_is_only_slow_makes_room_for_the_one_that_kills(tmp_path: Path) -> None:
    killed = lives(tmp_path, "slow")

    assert killed == 5
    await check_stuck(tmp_path)
    await check_done(tmp_path, "slow")


def test_every_scenario_is_tried() -> None:
    assert set(STARTED) == {"process", "turn", "poison", "two", "pid", "slow"}
