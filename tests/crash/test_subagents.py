"""Agents that give work to agents, killed at every point: none begins twice, none is left running, nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from perdure.testing.crash import Crash, KillResult, Played, Report, play
from perdure.testing.crash.scenario import Scenario
from tests.crash.delegated import cancelled, delegated, followed, reminded, waited
from tests.fuzzing import REAL_KILLS

SCENARIOS = [delegated, waited, followed, reminded]

# How many model calls are under way at once, at most: as many may be asked for again after a kill. A child in the
# background runs beside the turn that started it.
AT_ONCE = {"delegated": 2, "waited": 1, "followed": 2, "reminded": 2}


def asked(played: Played) -> Counter[str]:
    """How often each question was asked of a model."""
    return Counter(line.key for line in played.ledger if line.name == "model")


def faults(row: KillResult, plain: Played, at_once: int) -> list[str]:
    """What is wrong with a run that was killed once, besides what the kit finds."""
    found, played = list(row.problems), row.played
    if asked(played).keys() != asked(plain).keys():
        found.append(f"questions were {sorted(asked(played))}")
    if row.model_calls > plain.model_calls + at_once or max(asked(played).values()) > 2:
        found.append(f"models were asked {dict(asked(played))}")
    ends = {each.id: (each.status, each.outcome, each.told) for each in played.ending.processes}
    if ends != {each.id: (each.status, each.outcome, each.told) for each in plain.ending.processes}:
        found.append(f"processes ended {ends}")
    if any(count > 2 for count in played.effects.values()):
        found.append(f"effects were {played.effects}")
    return found


def _check_killed(report: Report) -> None:
    """Two children at once do not always write in the same order, and a point of one run may be none of the next."""
    assert len(report.unreached) < 0.1 * report.kills, report.unreached


def check(report: Report) -> None:
    _check_killed(report)
    at_once = AT_ONCE[report.name]
    assert {str(row.crash): found for row in report.rows if (found := faults(row, report.plain, at_once))} == {}
    assert report.lost == 0
    assert report.unknown == 0


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_children_go_on_where_they_were_wherever_it_is_killed(
    scenario: Scenario, crash_kit: Callable[..., Report]
) -> None:
    check(crash_kit(scenario))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_children_go_on_where_they_were_wherever_it_is_really_killed(
    scenario: Scenario, crash_kit: Callable[..., Report]
) -> None:
    check(crash_kit(scenario, real=True, sample=REAL_KILLS))


def test_killed_while_children_are_asked_only_they_ask_again() -> None:
    """Their parents were not asked anything when they died, and find the answers under the calls' own ids."""
    played = play(delegated, [Crash("chunk 1 of model 1.1 #4", "before")])

    again = {key for key, count in asked(played).items() if count > 1}
    boss = played.ending.session("s")
    assert played.problems == []
    assert boss is not None
    assert boss.said[-1] == "assistant: done: filed JOB 1 and done: filed JOB 2"
    assert again != set()
    assert all("clerk" in key for key in again), again
    assert [(call.outcome, call.repeated) for call in boss.calls] == [("ok", 1), ("ok", 1)]
    assert [each.attempts for each in played.ending.processes] == [2, 2, 2, 2]


def check_cancelled(report: Report) -> None:
    """Whoever dies when: in the end nobody of the tree runs, and every process says so."""
    assert [problem for row in report.rows for problem in row.problems] == []
    assert report.lost == 0
    _check_killed(report)
    for row in report.rows:
        assert {each.status for each in row.played.ending.processes} <= {"cancelled"}, row.crash
        assert {each.state for each in row.played.ending.sessions} == {"idle"}, row.crash


@pytest.mark.slow
def test_a_cancelled_tree_ends_as_a_whole_wherever_it_is_killed(crash_kit: Callable[..., Report]) -> None:
    check_cancelled(crash_kit(cancelled))


@pytest.mark.gate
@pytest.mark.kill
def test_a_cancelled_tree_ends_as_a_whole_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check_cancelled(crash_kit(cancelled, real=True, sample=REAL_KILLS))
