"""Killed at every point of a turn that is continued after it failed, or that waits on disk for its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from perdure.testing.crash import Lab, Report, StoreKind, play
from tests.crash.continued import OUTAGE, continued, waited_out
from tests.fuzzing import REAL_KILLS

SCENARIOS = [continued, waited_out]


def payments(report: Report) -> dict[str, list[int]]:
    """Return how often each payment was made, by the kill."""
    return {
        str(row.crash): list(Counter(line.key for line in row.played.ledger if line.name == "pay").values())
        for row in report.rows
    }


def check(report: Report) -> None:
    assert {str(row.crash): row.problems for row in report.rows if row.problems} == {}
    assert report.lost == 0
    # Two payments, each under its own key, and the one that a kill cut off once more.
    assert {kill: made for kill, made in payments(report).items() if len(made) != 2 or sum(made) > 3} == {}


def test_undisturbed_turns_ask_their_model_as_often_as_it_fails_and_answers() -> None:
    assert [play(scenario).model_calls for scenario in SCENARIOS] == [4, 3 + OUTAGE]


OUTCOMES = {
    # Killed before the write: the turn is as it ended. The next life asks the model once more, which answers.
    "before reopen 1": (4, 2),
    # Killed after it: the turn is open again. The next life works on it before the key is renewed there, so it fails
    # once more, and is continued again.
    "lost reopen 1": (5, 2),
}
"""Model calls and payments in both lives, by the kill at the write that continues the turn."""


@pytest.mark.slow
def test_turn_killed_where_it_is_continued_is_as_it_ended_or_open_again(crash_kit: Callable[..., Report]) -> None:
    rows = {str(row.crash): row.played for row in crash_kit(continued).rows}

    assert {
        kill: (rows[kill].model_calls, sum(line.name == "pay" for line in rows[kill].ledger)) for kill in OUTCOMES
    } == OUTCOMES


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=["continued", "waited out"])
def test_turn_pays_once_and_finishes_wherever_it_is_killed(
    scenario: Callable[[Lab], object], store: StoreKind, crash_kit: Callable[..., Report]
) -> None:
    check(crash_kit(scenario, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=["continued", "waited out"])
def test_turn_pays_once_and_finishes_wherever_it_is_really_killed(
    scenario: Callable[[Lab], object], crash_kit: Callable[..., Report]
) -> None:
    check(crash_kit(scenario, real=True, sample=REAL_KILLS))
