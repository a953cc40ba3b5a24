"""Background calls killed at every point: what may repeat repeats at most once, what may not is told as unknown.

The expected fates are written by hand.
"""

from __future__ import annotations

from typing import TypeAlias

import pytest

from perdure.testing.crash import Crash, ForkServer, Mode, Played, Report, StoreKind, kill_everywhere, play
from perdure.testing.crash.scenario import Scenario
from tests.processes_tools.crashing import (
    PROCESS,
    SESSION,
    awaited_once,
    awaited_rerun,
    heard_censored,
    signalled,
    wake_ask,
    wake_censored,
    wake_once,
    wake_rerun,
)

Fate: TypeAlias = frozenset[tuple[int, str]]
"""How often the effect may have happened, and how the process ended; more than one where two writes race."""

EVERY: tuple[Mode, ...] = ("before", "lost", "hang", "late", "unheard")
CLEAN: Fate = frozenset({(1, "completed")})
NEVER: Fate = frozenset({(0, "abandoned")})
MAYBE: Fate = frozenset({(1, "abandoned")})
TWICE: Fate = frozenset({(2, "completed")})

TRACE = [
    "beat",
    "accept queue",
    "ask model 1.1",
    "chunk 1 of model 1.1",
    "append 1: replied 1",
    "append 1: started 1.0",
    "put blob",
    "register chat.1.1.0",
    "advance chat.1.1.0: starting, begun 1",
    "append 1: ended 1.0",
    "ask model 1.2",
    "chunk 1 of model 1.2",
    "chunk 2 of model 1.2",
    "commit 1",
    "begin crawl 1.1.0",
    "effect crawl",
    "end crawl 1.1.0",
    "advance chat.1.1.0: ending",
    "deliver",
    "ask model 2.1",
    "chunk 1 of model 2.1",
    "chunk 2 of model 2.1",
    "commit 2",
    "retire",
]

ONCE: dict[str, dict[Mode, Fate]] = {
    # Its start is on disk, and its body waits for the turn's commit: begun and not ended, it is given up.
    "advance chat.1.1.0: starting, begun 1": {"lost": NEVER},
    # This write races the one that starts the process.
    "append 1: ended 1.0": dict.fromkeys(EVERY, NEVER | CLEAN),
    "ask model 1.2": dict.fromkeys(EVERY, NEVER),
    "chunk 1 of model 1.2": dict.fromkeys(EVERY, NEVER),
    "chunk 2 of model 1.2": dict.fromkeys(EVERY, NEVER),
    # Unheard, the host is told of trouble with the store and leaves: then it depends on who is first.
    "commit 1": {"before": NEVER, "lost": NEVER, "hang": NEVER, "late": NEVER, "unheard": NEVER | CLEAN},
    "begin crawl 1.1.0": {"before": NEVER},
    "effect crawl": {"before": NEVER, "lost": MAYBE, "hang": NEVER},
    "end crawl 1.1.0": {"before": MAYBE},
    "advance chat.1.1.0: ending": {"before": MAYBE, "hang": MAYBE, "late": MAYBE},
}

RERUN: dict[str, dict[Mode, Fate]] = {
    # The only window in which anything repeats: the effect has happened, and its end is not on disk.
    "effect crawl": {"lost": TWICE},
    "end crawl 1.1.0": {"before": TWICE},
    "advance chat.1.1.0: ending": {"before": TWICE, "hang": TWICE, "late": TWICE},
}


def fate_of(played: Played) -> tuple[int, str]:
    process = played.ending.process(PROCESS)
    assert process is not None
    assert process.stuck is None
    return played.count("crawl"), process.status


def check(report: Report, ruled: dict[str, dict[Mode, Fate]]) -> None:
    assert (report.problems, report.unreached) == ([], [])
    for row in report.rows:
        crash = row.crash
        assert fate_of(row.played) in ruled.get(crash.point, {}).get(crash.mode, CLEAN), crash
        check_told(crash, row.played)


def check_told(crash: Crash, played: Played) -> None:
    """One process, whatever happened; the model has its handle, and has heard once how it ended."""
    session, process = played.ending.session(SESSION), played.ending.process(PROCESS)
    assert session is not None
    assert process is not None
    assert [each.id for each in played.ending.processes] == [PROCESS], crash
    assert [(call.call_id, call.tool, call.outcome) for call in session.calls] == [(PROCESS, "crawl", "ok")], crash
    assert len(played.effects) <= 1, "a repeated attempt has the same key"
    assert process.told == ["enqueued"], crash
    assert session.turns == {1: "finished", 2: "finished"}, crash
    (news,) = [text for text in session.said if text.startswith("user: [process")]
    assert process.status in news
    if process.status == "abandoned":
        assert process.outcome["evidence"]["writer"] in ("sweep", "owner_drain")
        assert process.outcome["evidence"]["proof"]


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_nobody_is_killed(store: StoreKind) -> None:
    played = play(wake_once, store=store)

    assert played.problems == []
    assert [point.name for point in played.traces[0]] == TRACE
    assert fate_of(played) in CLEAN


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_once_tool_killed_anywhere_runs_at_most_once_and_is_told_as_it_is(store: StoreKind) -> None:
    check(kill_everywhere(wake_once, store=store, modes=EVERY, timeout=60), ONCE)


def test_a_tool_that_asks_is_not_repeated_either() -> None:
    check(kill_everywhere(wake_ask, timeout=60), ONCE)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_rerun_tool_killed_anywhere_ends_and_repeats_only_in_its_one_window(store: StoreKind) -> None:
    check(kill_everywhere(wake_rerun, store=store, modes=EVERY, timeout=60), RERUN)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_what_a_background_tool_came_to_passes_the_plugins_whoever_is_killed(store: StoreKind) -> None:
    report = kill_everywhere(wake_censored, store=store, timeout=60)

    assert {"effect look", "advance chat.1.1.0: ending", "deliver"} <= {row.crash.point for row in report.rows}
    for row in report.rows:
        assert row.problems == [], row.crash
        session, ended = row.played.ending.session(SESSION), row.played.ending.process(PROCESS)
        assert session is not None
        assert ended is not None
        assert ended.outcome == {"type": "success", "value": "censored crawled"}, row.crash
        (news,) = [text for text in session.said if text.startswith("user: [process")]
        assert news.endswith("value: censored crawled"), row.crash
        # Only what is not on disk yet is looked at again, and then its body ran again too.
        assert row.played.count("look") <= row.played.count("crawl") <= 2, row.crash


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_what_a_session_hears_passes_the_plugins_whoever_is_killed(store: StoreKind) -> None:
    report = kill_everywhere(heard_censored, store=store, timeout=60)

    assert {"effect look", "deliver"} <= {row.crash.point for row in report.rows}
    for row in report.rows:
        assert row.problems == [], row.crash
        session, ended = row.played.ending.session(SESSION), row.played.ending.process("greeting")
        assert session is not None
        assert ended is not None
        assert ended.outcome == {"type": "success", "value": "hello"}, row.crash
        (news,) = [text for text in session.said if text.startswith("user: [process")]
        assert news.endswith("value: censored hello"), row.crash
        looked = 2 if (row.crash.point, row.crash.mode) in AGAIN else 1
        assert row.played.count("look") == looked, row.crash


AGAIN = [("effect look", "lost"), ("deliver", "before"), ("deliver", "hang")]
"""Looked at, and nothing of that on disk."""

KILLS = [
    Crash("append 1: started 1.0", "lost"),
    Crash("register chat.1.1.0", "before"),
    Crash("register chat.1.1.0", "lost"),
    Crash("begin crawl 1.1.0", "before"),
    Crash("effect crawl", "before"),
    Crash("effect crawl", "lost"),
    Crash("end crawl 1.1.0", "before"),
    Crash("advance chat.1.1.0: ending", "before"),
    Crash("advance chat.1.1.0: ending", "lost"),
    Crash("deliver", "before"),
    Crash("deliver", "lost"),
]
"""Before the row, after it, begun, in the body, after it, around its end, and when it is told."""


@pytest.mark.kill
@pytest.mark.parametrize(
    ("scenario", "ruled", "started"),
    [
        (wake_once, ONCE, "advance chat.1.1.0: starting, begun 1"),
        pytest.param(wake_rerun, RERUN, "advance chat.1.1.0: starting", marks=pytest.mark.gate),
    ],
    ids=["once", "rerun"],
)
def test_killed_for_real_it_is_the_same(scenario: Scenario, ruled: dict[str, dict[Mode, Fate]], started: str) -> None:
    with ForkServer(scenario, timeout=60) as forks:
        for crash in [*KILLS, Crash(started, "before"), Crash(started, "lost")]:
            played = forks.play([crash])

            assert played.problems == [], crash
            assert fate_of(played) in ruled.get(crash.point, {}).get(crash.mode, CLEAN), crash
            check_told(crash, played)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_turn_that_awaits_what_it_started_hears_the_truth_whoever_is_killed(store: StoreKind) -> None:
    for row in kill_everywhere(awaited_once, store=store, modes=EVERY, timeout=60).rows:
        assert row.problems == [], row.crash
        check_awaited(row.crash, row.played, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_turn_that_awaits_a_rerun_tool_always_has_its_value(store: StoreKind) -> None:
    for row in kill_everywhere(awaited_rerun, store=store, modes=EVERY, timeout=60).rows:
        assert row.problems == [], row.crash
        assert check_awaited(row.crash, row.played, most=2) == "ok", row.crash


def check_awaited(crash: Crash, played: Played, most: int) -> str:
    """What the call was told is how the process ended, and nobody was woken for it besides."""
    session, process = played.ending.session(SESSION), played.ending.process(PROCESS)
    assert session is not None
    assert process is not None
    started, awaited = session.calls
    assert (started.tool, started.outcome) == ("crawl", "ok"), crash
    assert awaited.tool == "await_process"
    assert (process.status, awaited.outcome) in (("completed", "ok"), ("abandoned", "outcome_unknown")), crash
    assert played.count("crawl") <= most, crash
    assert process.status == "abandoned" or played.count("crawl") >= 1, crash
    assert process.told == ["discarded"], crash
    assert session.turns == {1: "finished"}, crash
    return awaited.outcome


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_signal_and_a_cancel_reach_their_process_once_whoever_is_killed(store: StoreKind) -> None:
    for row in kill_everywhere(signalled, store=store, modes=EVERY, timeout=60).rows:
        process, session = row.played.ending.process("job"), row.played.ending.session(SESSION)
        assert row.problems == [], row.crash
        assert process is not None
        assert session is not None
        assert process.events == ["process.created", "signal.go", "process.cancel_requested"], row.crash
        assert [each.outcome for each in session.calls] == ["ok", "ok"], row.crash
