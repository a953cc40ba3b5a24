"""What a command was acknowledged to have changed is there after every kill, in forks and children too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.testing.crash import Report, StoreKind
from tests.crash.remembered import remembered

ENDED = {
    "s": ["user: one", "assistant: turn s.1", "user: two", "assistant: turn s.1+a+b+turn s.2"],
    "fork": ["user: two", "assistant: turn s.1+a+b+turn fork.1"],
    "child": ["user: three", "assistant: turn s.1+a+b+turn child.1"],
}


def check(report: Report) -> None:
    assert (report.lost, report.problems) == (0, [])
    for row in report.rows:
        found = {session.id: session.said for session in row.played.ending.sessions}
        assert found == ENDED, str(row.crash)
    crashes = {str(row.crash) for row in report.rows}
    assert {"before configure", "lost configure", "before branch", "lost branch"} <= crashes


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_acknowledged_state_holds_wherever_it_is_killed(store: StoreKind, crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(remembered, store=store))


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_acknowledged_state_holds_wherever_it_is_really_killed(crash_kit: Callable[..., Report]) -> None:
    check(crash_kit(remembered, real=True))
