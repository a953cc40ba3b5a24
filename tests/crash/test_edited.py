"""Killed at every point of a turn that changes files, and of its undo: each change is made once and known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.testing.crash import KillResult, Report, StoreKind, play
from tests.crash.edited import AFTER, BEFORE, FOLDER, edited
from tests.crash.reference import SESSION
from tests.fuzzing import REAL_KILLS

EDITS = [["edit_file", "applied", True], ["write_file", "applied", True], ["delete_file", "applied", True]]


@pytest.fixture(autouse=True)
def workspaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))


def faults(row: KillResult) -> list[str]:
    """What is wrong with a run that was killed once."""
    found, played = list(row.problems), row.played
    seen = [line.data for line in played.ledger if line.name == "edits"]
    undone = [line.data for line in played.ledger if line.name == "undone"]
    if not seen or any(each != [EDITS, AFTER] for each in seen):
        found.append(f"edits and files: {seen}")
    if not undone or any(each != BEFORE for each in undone):
        found.append(f"after the undo: {undone}")
    session = played.ending.session(SESSION)
    ends = [] if session is None else [call.outcome for call in session.calls]
    if ends != ["ok", "ok", "ok"]:
        found.append(f"calls ended {ends}")
    return found


def check(report: Report) -> None:
    assert {str(row.crash): faults(row) for row in report.rows if faults(row)} == {}
    assert (report.lost, report.unknown) == (0, 0)


def test_an_undisturbed_turn_edits_and_undoes() -> None:
    played = play(edited)

    assert played.problems == []
    assert [line.data for line in played.ledger if line.name == "edits"] == [[EDITS, AFTER]]
    assert [line.data for line in played.ledger if line.name == "undone"] == [BEFORE]


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_changes_are_made_once_and_known_wherever_it_is_killed(
    store: StoreKind, crash_kit: Callable[..., Report]
) -> None:
    check(crash_kit(edited, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_changes_are_made_once_and_known_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(edited, real=True, sample=REAL_KILLS))
