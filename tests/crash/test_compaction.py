"""T20: killed at every point of a turn that compacts. Nothing that was said is lost, and a frame is there or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.testing.crash import KillResult, Report, StoreKind, play
from tests.crash.compacting import LONG, SAID, compacting

SHOWN = ["A", "AB", "ABC", "ABCD", "sum DE", "sum DEF"]
"""What the model was shown of the user's words in each turn."""


def faults(row: KillResult) -> list[str]:
    """What is wrong with a run that was killed once."""
    found, played = list(row.problems), row.played
    session = played.ending.session("s")
    if session is None:
        return [*found, "the session is gone"]
    if session.said != said():
        found.append(f"said {[line.rstrip('.')[:40] for line in session.said]}")
    frames = [line.data for line in played.ledger if line.name == "frames"]
    if not frames or frames[-1] != [5]:
        found.append(f"frames before turns {frames}")
    for line in played.ledger:
        # What was committed when the process died is whole: the words of every turn, in order.
        if line.name == "history" and line.data != "".join(SAID[: int(line.key)]):
            found.append(f"after {line.key} turns the history was {line.data!r}")
    return found + _asked(row)


def _asked(row: KillResult) -> list[str]:
    """A summary that is recorded is not asked for again, nor one whose frame is."""
    lines = [line for line in row.played.ledger if line.name == "model" and ":" in line.key]
    recorded = {line.key for line in row.played.ledger if line.name == "recorded"}
    if not 1 <= len(lines) <= 2:
        return [f"the summary was asked for {len(lines)} times"]
    if recorded and any(line.incarnation > 1 for line in lines):
        return [f"the summary was asked for again although {recorded} was recorded"]
    return []


def said() -> list[str]:
    found = []
    for word, shown in zip(SAID, SHOWN, strict=True):
        found += [f"user: {word * LONG}", f"assistant: {shown.ljust(LONG, '.')}"]
    return found


def check(report: Report) -> None:
    assert {str(row.crash): faults(row) for row in report.rows if faults(row)} == {}
    assert report.lost == 0
    asked_again = {str(row.crash) for row in report.rows if row.played.model_calls > 7}
    assert "before append 5: completed" in asked_again, "killed before the summary is recorded, it is asked for again"
    assert "lost append 5: completed" not in asked_again


def test_undisturbed_conversation_is_summed_up_once() -> None:
    played = play(compacting)

    assert played.problems == []
    session = played.ending.session("s")
    assert session is not None
    assert session.said == said()
    assert played.model_calls == 7


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_history_is_whole_and_framed_once_wherever_it_is_killed(
    store: StoreKind, crash_kit: Callable[..., Report]
) -> None:
    check(crash_kit(compacting, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_history_is_whole_and_framed_once_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(compacting, real=True))
