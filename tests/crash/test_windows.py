"""Each window in which a process can die around a tool call, for every way to its start and every recovery contract."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from perdure.testing.crash import CallEnding, Crash, ForkServer, Played, play
from tests.crash import windows
from tests.keys import happened, within_store

# Kind of call -> its start record, where its body begins, its effect, and its end.
POINTS = {
    "plain": ("append 1: replied 1", "begin work 1.1.0", "effect work", "end work 1.1.0"),
    "queued": ("append 1: started 1.1", "begin work 1.1.1", "effect work #2", "end work 1.1.1"),
    "approved": ("append 1: started 1.0", "begin work 1.1.0", "effect work", "end work 1.1.0"),
    "retried": ("append 1: started 1.0", "begin work 1.1.0 #2", "effect work", "end work 1.1.0"),
    "deferred": ("append 1: started 1.0, opening a wait", "begin work 1.1.0", "effect work", "end work 1.1.0"),
}

# Recovery -> effects, outcome and counted repeats when it dies before its start record, between the record and the
# body, inside the body, after the effect, after the outcome's record.
EXPECTED = {
    "once": [
        (1, "ok", 0),
        (0, "outcome_unknown", 0),
        (0, "outcome_unknown", 0),
        (1, "outcome_unknown", 0),
        (1, "ok", 0),
    ],
    "rerun": [(1, "ok", 0), (1, "ok", 1), (1, "ok", 1), (2, "ok", 1), (1, "ok", 0)],
    "ask": [(1, "ok", 0), (1, "ok", 1), (1, "ok", 1), (1, "ok", 0), (1, "ok", 0)],
}
# A deferred call stays on its wait: what was handed out can still be resolved, what was not is for a person to cancel.
DEFERRED = [(1, "ok", 0), (0, "outcome_unknown", 0), (0, "outcome_unknown", 0), (1, "ok", 0), (1, "ok", 0)]

NAMES = ("before the start record", "before the body", "inside the body", "after the effect", "after the record")


def deaths() -> Generator[Any, None, None]:
    for kind, (start, begin, effect, end) in POINTS.items():
        places = [
            Crash(start, "before"),
            Crash(begin, "before"),
            Crash(effect, "before"),
            Crash(end, "before"),
            Crash("ask model 1.2", "before"),
        ]
        for recovery in windows.RECOVERIES:
            expected = DEFERRED if kind == "deferred" and recovery != "rerun" else EXPECTED[recovery]
            for name, crash, fate in zip(NAMES, places, expected, strict=True):
                yield pytest.param(f"{kind}_{recovery}", crash, fate, id=f"{kind}, {recovery}, {name}")


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(getattr(windows, "plain_once")) as ready:  # noqa: B009  # made at import, unknown to type checkers
        yield ready


def the_call(played: Played) -> CallEnding:
    assert played.problems == []
    session = played.ending.session("s")
    assert session is not None
    assert session.state == "idle"
    return session.calls[-1]


def seen(played: Played) -> tuple[int, str, int]:
    call = the_call(played)
    return happened(played, call), call.outcome, call.repeated


@pytest.mark.kill
@pytest.mark.parametrize(("scenario", "crash", "fate"), list(deaths()))
def test_real_kill_in_a_window(forks: ForkServer, scenario: str, crash: Crash, fate: tuple[int, str, int]) -> None:
    assert seen(forks.play([crash], getattr(windows, scenario))) == fate


@pytest.mark.parametrize(("scenario", "crash", "fate"), list(deaths()))
def test_crash_in_a_window_in_process(scenario: str, crash: Crash, fate: tuple[int, str, int]) -> None:
    assert seen(play(getattr(windows, scenario), [crash])) == fate


@pytest.mark.kill
@pytest.mark.parametrize("recovery", windows.RECOVERIES)
def test_recorded_failed_attempt_is_followed_by_the_next_one(forks: ForkServer, recovery: str) -> None:
    played = forks.play([Crash("append 1: faltered 1.0", "lost")], getattr(windows, f"retried_{recovery}"))

    assert seen(played) == (1, "ok", 0)
    assert the_call(played).attempts == 2


@pytest.mark.kill
@pytest.mark.parametrize(
    ("recovery", "fate"), [("once", (0, "outcome_unknown", 0)), ("rerun", (1, "ok", 1)), ("ask", (1, "ok", 1))]
)
def test_failed_attempt_that_was_not_recorded_is_one_nobody_saw_end(
    forks: ForkServer, recovery: str, fate: tuple[int, str, int]
) -> None:
    played = forks.play([Crash("append 1: faltered 1.0", "before")], getattr(windows, f"retried_{recovery}"))

    assert seen(played) == fate


@pytest.mark.kill
def test_every_attempt_has_the_same_idempotency_key(forks: ForkServer) -> None:
    played = forks.play([Crash("end work 1.1.0")], getattr(windows, "plain_rerun"))  # noqa: B009

    assert [(within_store(line.key), line.incarnation) for line in played.ledger if line.name == "work"] == [
        ("s.1.1.0", 1),
        ("s.1.1.0", 2),
    ]
