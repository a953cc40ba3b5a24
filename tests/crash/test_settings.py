"""What was decided for a session besides its history is there after every kill, for its child and its fork too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.testing.crash import Report, StoreKind
from tests.crash.settled import settled

ENDED = {
    "s": ["user: go", "assistant: kind, add, say", "user: and now?", "assistant: kind, add, drop, say"],
    "child": ["user: what can you do?", "assistant: stern, add"],
    "fork": ["user: and you?", "assistant: kind, add, say"],
}


def check(report: Report) -> None:
    assert (report.lost, report.problems) == (0, [])
    for row in report.rows:
        found = {session.id: session.said for session in row.played.ending.sessions}
        assert found == ENDED, str(row.crash)
    assert {"before configure", "lost configure", "before branch"} <= {str(row.crash) for row in report.rows}


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_decisions_hold_wherever_it_is_killed(store: StoreKind, crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(settled, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_decisions_hold_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(settled, real=True))
