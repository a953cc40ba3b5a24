"""Killed at every point of a turn whose model writes a cell: it goes on in mid-cell, and nothing is done twice."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
from msgspec import Struct

from perdure.testing.crash import MODES, Crash, ForkServer, Mode, Played, StoreKind, kill_everywhere, play
from tests.codemode.kit import require_sandbox
from tests.crash.coded import (
    ANSWER,
    approved,
    approved_without_key,
    cancelled,
    coded,
    coded_in_cpython,
    coded_without_key,
    slept,
)
from tests.crash.reference import SESSION


class Fate(Struct, frozen=True):
    """What the turn answered; effects of `pay` and `look`; model calls, and those whose usage nobody saw; attempts that
    a crash made necessary."""

    said: str = ANSWER
    pay: int = 3
    look: int = 3
    model: int = 1
    usage: int = 0
    repeated: int = 0


DONE = Fate()
# Nobody can know whether the model had been asked; or it had been, and is asked again.
UNSURE = Fate(usage=1)
ASKED = Fate(model=2, usage=1)
# `look` had begun, and is made again: without a trace of the first time, or with one.
AGAIN = Fate(repeated=1)
TWICE = Fate(look=4, repeated=1)


def stopped(pay: int, look: int = 0, repeated: int = 0) -> Fate:
    """A `pay` had begun whose end is unknown: the cell ends at its line, and what it asked for before stays done."""
    return Fate("I stop.", pay, look, model=2, repeated=repeated)


RULINGS: dict[str, dict[Mode, Fate]] = {
    "beat": {"before": DONE, "lost": DONE, "hang": DONE},
    "accept queue": {"before": DONE, "lost": UNSURE, "hang": DONE},
    "ask model 1.1": {"before": UNSURE, "lost": ASKED, "hang": UNSURE},
    "chunk 1 of model 1.1": {"before": ASKED},
    "chunk 2 of model 1.1": {"before": ASKED},
    # In a loop: the first call starts with the record that has the reply.
    "append 1: replied 1 + called 1.0": {"before": ASKED, "lost": stopped(0), "hang": ASKED, "late": ASKED},
    "begin pay 1.1.0": {"before": stopped(0)},
    "effect pay": {"before": stopped(0), "lost": stopped(1), "hang": stopped(0)},
    "end pay 1.1.0": {"before": stopped(1)},
    "append 1: ended 1.0 + called 1.1": {
        "before": stopped(1), "lost": stopped(1), "hang": stopped(1), "late": stopped(1),
    },
    "begin pay 1.1.1": {"before": stopped(1)},
    "effect pay #2": {"before": stopped(1), "lost": stopped(2), "hang": stopped(1)},
    "end pay 1.1.1": {"before": stopped(2)},
    # In a comprehension.
    "append 1: ended 1.1 + called 1.2": {"before": stopped(2), "lost": AGAIN, "hang": stopped(2), "late": stopped(2)},
    "begin look 1.1.2": {"before": AGAIN},
    "effect look": {"before": AGAIN, "lost": TWICE, "hang": AGAIN},
    "end look 1.1.2": {"before": TWICE},
    "append 1: ended 1.2 + called 1.3": {"before": TWICE, "lost": AGAIN, "hang": TWICE, "late": TWICE},
    "begin look 1.1.3": {"before": AGAIN},
    "effect look #2": {"before": AGAIN, "lost": TWICE, "hang": AGAIN},
    "end look 1.1.3": {"before": TWICE},
    # At once: both start with one record.
    "append 1: ended 1.3 + called 1.4": {"before": TWICE, "lost": stopped(2, 3, 1), "hang": TWICE, "late": TWICE},
    "begin look 1.1.4": {"before": stopped(2, 3, 1)},
    # While `look` hangs, `pay` ends and is recorded: an answer of the two is there.
    "effect look #3": {"before": stopped(2, 3, 1), "lost": stopped(2, 4, 1), "hang": AGAIN},
    "end look 1.1.4": {"before": stopped(2, 4, 1)},
    "begin pay 1.1.5": {"before": stopped(2, 4, 1)},
    "effect pay #3": {"before": stopped(2, 4, 1), "lost": stopped(3, 4, 1), "hang": stopped(2, 3)},
    "end pay 1.1.5": {"before": stopped(3, 4, 1)},
    # The finish, the end of the cell and what ended last are in the commit.
    "commit 1": {"before": stopped(3, 4, 1), "lost": DONE, "hang": stopped(3, 4, 1), "late": stopped(3, 4, 1)},
    "retire": {"before": DONE, "lost": DONE, "hang": DONE},
}  # fmt: skip

DEATHS = [
    pytest.param(Crash(point, mode), fate, id=f"{mode} {point}")
    for point, fates in RULINGS.items()
    for mode, fate in fates.items()
]
# Each takes most of a second: those of the loop, the gather and the commit, in every window.
REAL = ("append 1: ended 1.0", "effect pay #2", "end pay 1.1.1", "append 1: ended 1.3", "effect look #3", "commit 1")
KILLS = [
    death for death in DEATHS if str(death.id).startswith(tuple(f"{m} {p}" for m in ("before", "lost") for p in REAL))
]


def check(played: Played, fate: Fate) -> None:
    assert played.problems == []
    session = played.ending.session(SESSION)
    assert session is not None
    assert (session.state, session.turns, session.inbox, session.waiting) == ("idle", {1: "finished"}, [], [])
    seen = Fate(
        session.said[-1].removeprefix("assistant: "),
        played.count("pay"),
        played.count("look"),
        played.model_calls,
        session.unknown_usage,
        sum(call.repeated for call in session.calls),
    )
    assert seen == fate


def test_every_point_is_ruled() -> None:
    played = play(coded)

    check(played, DONE)
    kinds = {point.name: set(MODES[point.kind]) - {"unheard"} for point in played.traces[0]}
    assert {point: set(fates) for point, fates in RULINGS.items()} == kinds
    assert list(kinds) == list(RULINGS)


@pytest.mark.parametrize(("crash", "fate"), DEATHS)
def test_kill_has_its_ruled_fate(crash: Crash, fate: Fate) -> None:
    """What a life has saved the next one loads; each of these writes is gone with the dump that it carries, or there
    with it."""
    check(play(coded, [crash], timeout=60), fate)


@pytest.mark.parametrize(("crash", "fate"), [death for death in DEATHS if "called" in str(death.id)])
def test_kill_has_the_same_fate_where_the_cell_is_run_again(crash: Crash, fate: Fate) -> None:
    check(play(coded_without_key, [crash], timeout=60), fate)


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(coded, timeout=60) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "fate"), KILLS)
def test_real_kill_has_its_ruled_fate(forks: ForkServer, crash: Crash, fate: Fate) -> None:
    check(forks.play([crash], coded), fate)


# In CPython every cell is begun again in a new process: a part of the points, and with PERDURE_CODE=cpython all.
SAMPLE = DEATHS if os.environ.get("PERDURE_CODE") == "cpython" else DEATHS[7::17]


def test_every_point_is_ruled_in_cpython_too() -> None:
    require_sandbox()
    played = play(coded_in_cpython, timeout=60)

    check(played, DONE)
    assert [point.name for point in played.traces[0]] == list(RULINGS)


@pytest.mark.parametrize(("crash", "fate"), SAMPLE)
def test_kill_has_its_ruled_fate_in_cpython(crash: Crash, fate: Fate) -> None:
    require_sandbox()
    check(play(coded_in_cpython, [crash], timeout=60), fate)


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "fate"), KILLS if SAMPLE is DEATHS else KILLS[5:6])
def test_real_kill_has_its_ruled_fate_in_cpython(forks: ForkServer, crash: Crash, fate: Fate) -> None:
    require_sandbox()
    check(forks.play([crash], coded_in_cpython), fate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "store"), [(approved, "memory"), (approved, "sqlite"), (approved_without_key, "memory")]
)
def test_cell_that_waits_for_a_person_survives_every_crash(scenario: Any, store: StoreKind) -> None:
    """It goes on at its line with the variables of the cell before it; what was approved is done once at most."""
    report = kill_everywhere(scenario, store=store)

    assert (report.lost, report.problems, report.unreached) == (0, [], [])
    assert "append 1: replied 2 + called 2.0, opening a wait, parking" in {row.crash.point for row in report.rows}
    for row in report.rows:
        session = row.played.ending.session(SESSION)
        assert session is not None
        assert row.played.count("sign") <= 1
        unknown = session.calls[-1].outcome == "outcome_unknown"
        assert session.said[-1] == ("assistant: I stop." if unknown else "assistant: [1, 2] signed 2"), row.crash


@pytest.mark.slow
def test_cell_that_prints_sleeps_and_finishes_survives_every_crash() -> None:
    """What it printed is told once, the sleep is made once, and of two finishes the first one stands."""
    report = kill_everywhere(slept)

    assert (report.lost, report.problems, report.unreached) == (0, [], [])
    assert {"append 1: replied 1 + called 1.0", "append 1: ended 1.0 + called 1.1", "commit 1"} <= {
        row.crash.point for row in report.rows
    }
    for row in report.rows:
        session = row.played.ending.session(SESSION)
        assert session is not None
        assert session.said[-1] == "assistant: slept, 2", row.crash
        assert [call.tool for call in session.calls] == ["sleep", "look", "finish"], row.crash
        assert row.played.count("look") <= 2, row.crash


@pytest.mark.slow
def test_cell_that_is_cancelled_survives_every_crash() -> None:
    """Its call is begun once at most; the turn ends as cancelled, or, where its call was cut off by the crash, by its
    model, who was told that its end is unknown."""
    report = kill_everywhere(cancelled)

    assert (report.lost, report.problems, report.unreached) == (0, [], [])
    for row in report.rows:
        session = row.played.ending.session(SESSION)
        assert session is not None
        assert (session.state, session.inbox, session.waiting) == ("idle", [], []), row.crash
        assert session.turns in ({1: "cancelled"}, {1: "finished"}), row.crash
        assert row.played.count("hang") <= 1, row.crash
        if session.turns == {1: "finished"}:
            assert session.said[-1] == "assistant: I stop.", row.crash
            assert session.calls[-1].outcome == "outcome_unknown", row.crash
