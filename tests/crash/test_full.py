"""Killed at every point of a turn that asks for too many calls, and around the commit of one without a record left."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from perdure.testing.crash import Crash, ForkServer, Mode, Played, Report, play
from tests.crash.full import asked_too_much, filled_up
from tests.crash.reference import SESSION

CANCELLED: dict[str, tuple[Mode, ...]] = {
    "cancel": ("before", "lost"),
    "commit 1": ("before", "lost", "late"),
}


@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=[pytest.mark.kill, pytest.mark.gate])], ids=["played", "real"]
)
def test_a_reply_with_too_many_calls_ends_its_turn_wherever_it_is_killed(
    crash_kit: Callable[..., Report], real: bool
) -> None:
    report = crash_kit(asked_too_much, real=real)

    assert report.problems == []
    for row in report.rows:
        session = row.played.ending.session(SESSION)
        assert session is not None
        assert (session.state, session.turns) == ("idle", {1: "budget_spent"})
        assert len(session.calls) == 2
        assert set(row.played.effects.values()) <= {1}


def check(played: Played) -> None:
    """The turn is cancelled once, its last call is unknown, and the others are as they were recorded."""
    assert played.problems == []
    session = played.ending.session(SESSION)
    assert session is not None
    assert (session.state, session.head, session.turns) == ("idle", 1, {1: "cancelled"})
    assert [call.outcome for call in session.calls[-2:]] == ["ok", "outcome_unknown"]
    assert {call.outcome for call in session.calls[:-1]} == {"ok"}
    assert played.model_calls == 0


@pytest.mark.slow
@pytest.mark.parametrize(("point", "mode"), [(point, mode) for point, modes in CANCELLED.items() for mode in modes])
def test_a_full_turn_is_cancelled_whatever_is_killed(point: str, mode: Mode) -> None:
    check(play(filled_up, [Crash(point, mode)], store="sqlite", timeout=60))


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(filled_up, timeout=60) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize("mode", [pytest.param("before", marks=pytest.mark.gate), "lost"])
def test_real_kill_around_the_commit_of_a_full_turn(forks: ForkServer, mode: Mode) -> None:
    check(forks.play([Crash("commit 1", mode)]))
