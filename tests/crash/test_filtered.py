"""Killed at every point of a session whose tools leave a secret: it is not stored at any of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.testing.crash import KillResult, Report, StoreKind
from tests.crash.filtered import filtered

SAID = [
    "user: go",
    "assistant:  [fetch, crawl]",
    "tool: fetch ok",
    "tool: crawl ok",
    "assistant: done",
]


def faults(row: KillResult) -> list[str]:
    """What is wrong with a run that was killed once."""
    found, played = list(row.problems), row.played
    found += [f"the secret is stored in {line.key}" for line in played.ledger if line.name == "leaked"]
    session = played.ending.session("s")
    if session is None:
        return [*found, "the session is gone"]
    if session.said[:5] != SAID or [call.outcome for call in session.calls[:2]] != ["ok", "ok"]:
        found.append(f"said {session.said}")
    if [process.status for process in played.ending.processes] != ["completed"]:
        found.append(f"processes: {played.ending.processes}")
    return found


def check(report: Report) -> None:
    assert {str(row.crash): faults(row) for row in report.rows if faults(row)} == {}
    assert report.lost == 0
    crashes = {str(row.crash) for row in report.rows}
    assert any(each.startswith("before append") and "ended 1.0" in each for each in crashes), crashes
    assert any(each.startswith("lost append") and "ended 1.0" in each for each in crashes), crashes
    assert {"before deliver", "lost deliver"} <= crashes


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_no_secret_is_stored_wherever_it_is_killed(store: StoreKind, crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(filtered, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_no_secret_is_stored_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(filtered, real=True))
