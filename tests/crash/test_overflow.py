"""Killed at every point of a turn that is made shorter because the model refused it: shortened once, asked again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from perdure.testing.crash import KillResult, Report, StoreKind, play
from tests.crash.overflowing import LONG, SAID, overflowing
from tests.fuzzing import REAL_KILLS

SHOWN = ["A", "AB", "sum C", "sum CD"]
"""What the model was shown of the user's words in each turn."""
PIECES = 4
"""The two turns before the third are summed up message by message: nobody knows how much the model would take."""
UNDISTURBED = 4 + 1 + PIECES
"""Four answers, one refusal, and the summaries."""


def said() -> list[str]:
    found = []
    for word, shown in zip(SAID, SHOWN, strict=True):
        found += [f"user: {word * LONG}", f"assistant: {shown.ljust(LONG, '.')}"]
    return found


def faults(row: KillResult) -> list[str]:
    """What is wrong with a run that was killed once."""
    found, played = list(row.problems), row.played
    session = played.ending.session("s")
    if session is None:
        return [*found, "the session is gone"]
    if session.said != said():
        found.append(f"said {[line.rstrip('.')[:40] for line in session.said]}")
    frames = [line.data for line in played.ledger if line.name == "frames"]
    if not frames or frames[-1] != [3]:
        found.append(f"frames before turns {frames}")
    summaries = [line for line in played.ledger if line.name == "model" and ":" in line.key]
    lives = max(line.incarnation for line in played.ledger)
    if not PIECES <= len(summaries) <= PIECES + lives - 1:
        found.append(f"{len(summaries)} summaries were asked for")
    recorded = Counter((line.incarnation, line.key) for line in played.ledger if line.name == "recorded")
    asked = Counter(line.incarnation for line in summaries)
    for number in range(2, lives + 1):
        if asked[number] > PIECES - recorded[number, "Completed"]:
            found.append("a recorded summary was asked for again")
        if recorded[number, "Faltered"] > 1:
            found.append("it was refused more than once")
    return found


def check(report: Report) -> None:
    assert {str(row.crash): faults(row) for row in report.rows if faults(row)} == {}
    assert report.lost == 0
    # Each death costs at most the one question that it cut off.
    assert {
        str(row.crash): row.played.model_calls for row in report.rows if row.played.model_calls > UNDISTURBED + 1
    } == {}


def test_undisturbed_conversation_is_shortened_once() -> None:
    played = play(overflowing)

    assert played.problems == []
    session = played.ending.session("s")
    assert session is not None
    assert session.said == said()
    assert played.model_calls == UNDISTURBED


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_turn_is_shortened_once_and_answered_wherever_it_is_killed(
    store: StoreKind, crash_kit: Callable[..., Report]
) -> None:
    check(crash_kit(overflowing, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_a_turn_is_shortened_once_and_answered_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(overflowing, real=True, sample=REAL_KILLS))
