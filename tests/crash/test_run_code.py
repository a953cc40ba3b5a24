"""Killed at every point of a reply with two calls of run_code: code goes on in its middle, and what was run is not run
again."""

from __future__ import annotations

from typing import TypeAlias

import pytest

from perdure.testing.crash import Crash, ForkServer, Mode, Played, kill_everywhere
from tests.crash.coded import called
from tests.crash.reference import SESSION

Fate: TypeAlias = tuple[int, int, int, str]
"""Effects of `look`, `sign` and `pay`; and how the calls ended, first letters: the first call of run_code, look, sign,
the second one, pay."""

DONE: Fate = (1, 1, 1, "ooooo")
TWICE: Fate = (2, 1, 1, "ooooo")  # `look` had its effect, and is made again
# Whether `sign` took effect is unknown: the first code ends there. What it would have kept is missing in the second.
UNSIGNED: Fate = (1, 0, 0, "fouf")
SIGNED: Fate = (1, 1, 0, "fouf")
# The first code has run, and is not run again; whether `pay` took effect is unknown.
UNPAID: Fate = (1, 1, 0, "ooofu")
PAID: Fate = (1, 1, 1, "ooofu")

RULINGS: dict[str, dict[Mode, Fate]] = {
    "append 1: replied 1 + called 1.0.0": {"before": DONE, "lost": DONE},
    "begin look 1.0.0": {"before": DONE},
    "effect look": {"before": DONE, "lost": TWICE},
    "end look 1.0.0": {"before": TWICE},
    "append 1: ended 1.0.0 + called 1.0.1, opening a wait, parking": {"before": TWICE, "lost": DONE},
    "resolve approval": {"before": DONE, "lost": DONE},
    "append 1: started 1.0.1": {"before": DONE, "lost": UNSIGNED},
    "begin sign 1.0.1": {"before": UNSIGNED},
    "effect sign": {"before": UNSIGNED, "lost": SIGNED},
    "end sign 1.0.1": {"before": SIGNED},
    "append 1: ended 1.0.1 + ended 1.0 + called 1.1.0": {"before": SIGNED, "lost": UNPAID},
    "begin pay 1.1.0": {"before": UNPAID},
    "effect pay": {"before": UNPAID, "lost": PAID},
    "end pay 1.1.0": {"before": PAID},
    "append 1: ended 1.1.0 + ended 1.1": {"before": PAID, "lost": DONE},
    "commit 1": {"before": DONE, "lost": DONE},
}

REAL = [Crash("effect sign", "lost"), Crash("append 1: ended 1.0.1 + ended 1.0 + called 1.1.0", "lost")]


def fate(played: Played) -> Fate:
    session = played.ending.session(SESSION)
    assert session is not None
    assert (played.problems, session.state, session.turns) == ([], "idle", {1: "finished"})
    ends = "".join([call.outcome[0] if call.outcome != "outcome_unknown" else "u" for call in session.calls])
    return played.count("look"), played.count("sign"), played.count("pay"), ends


def test_kill_has_its_ruled_fate() -> None:
    report = kill_everywhere(called, modes=("before", "lost"))

    seen: dict[str, dict[Mode, Fate]] = {}
    for row in report.rows:
        if row.crash.point in RULINGS:
            seen.setdefault(row.crash.point, {})[row.crash.mode] = fate(row.played)
        else:  # a point that every turn has
            assert fate(row.played) == DONE, row.crash
    assert (report.lost, report.problems, report.unreached) == (0, [], [])
    assert seen == RULINGS


@pytest.mark.kill
def test_real_kill_has_its_ruled_fate() -> None:
    with ForkServer(called, timeout=60) as forks:
        fates = [fate(forks.play([crash], called)) for crash in REAL]

    assert fates == [RULINGS[crash.point][crash.mode] for crash in REAL]
