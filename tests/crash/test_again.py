"""A second crash, during the recovery from the first, at any point of it.

Expectations are bounds here, not a table: what was recorded stays, what was in flight twice may repeat twice, and
everything beyond the first time is counted in the record of its call.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from perdure.testing.crash import Crash, ForkServer, Played, plans, play
from tests.crash.outcomes import RULINGS
from tests.crash.reference import SESSION, scenario
from tests.keys import happened

FULL = os.environ.get("PERDURE_CRASH") == "full"
SEED = int(os.environ.get("PERDURE_CRASH_SEED", "1"))
FIRST = [Crash(r.point, mode) for r in RULINGS for mode in r.fates() if mode in ("before", "lost")]


def faults(played: Played, crashes: int) -> list[str]:
    """What is wrong with the end of a run that was killed so often."""
    found = list(played.problems)
    session = played.ending.session(SESSION)
    if session is None:
        return [*found, "the session is gone"]
    if (session.head, session.state, session.turns) != (3, "idle", {1: "finished", 3: "finished"}):
        found.append(f"it ended {session.state} at head {session.head}: {session.turns} {session.reason}")
    if session.inbox or session.waiting or session.said.count("user: greet them") != 1:
        found.append(f"inputs: {session.inbox}, waits: {session.waiting}, said: {session.said}")
    if not 3 <= played.model_calls <= 3 + crashes or session.unknown_usage > crashes:
        found.append(f"{played.model_calls} model calls, usage of {session.unknown_usage} unknown")
    for call in session.calls:
        done = happened(played, call)
        if done > 1 and call.tool in ("pay", "sign", "book"):
            found.append(f"{call.tool} happened {done} times")
        if done - 1 > call.repeated or (call.outcome == "ok" and not done):
            found.append(f"{call.tool} happened {done} times: {call.outcome}, {call.repeated} repeated")
        if call.outcome not in ("ok", "outcome_unknown") or (call.outcome != "ok" and call.tool not in ("pay", "book")):
            found.append(f"{call.tool} ended {call.outcome}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_second_crash_during_recovery_comes_to_the_same_end(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(SEED * 4 + part)
    first = FIRST[part::4] if FULL else rng.sample(FIRST[part::4], 10)
    wrong, count = [], 0
    for crash in first:
        recovery = play(scenario, [crash]).traces[1]
        seconds = list(plans(recovery, ("before", "lost", "hang")))
        for second in seconds if FULL else rng.sample(seconds, 8):
            count += 1
            played = play(scenario, [crash, second], timeout=60)
            wrong += [f"{crash}, then {second}: {fault}" for fault in faults(played, 2)]

    assert wrong == []
    record_property("perdure", f"crash pairs: {count} on memory, seed {SEED}, part {part + 1} of 4")


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_second_real_kill_during_recovery_comes_to_the_same_end(record_property: Callable[[str, object], None]) -> None:
    """Calls that recovery runs side by side may pass in another order: then the second kill may find no such point."""
    rng = random.Random(SEED)
    wrong, missed = [], 0
    chosen = FIRST if FULL else rng.sample(FIRST, 20)
    with ForkServer(scenario) as forks:
        for crash in chosen:
            second = rng.choice(list(plans(play(scenario, [crash], store="sqlite").traces[1], ("before", "lost"))))
            found = faults(forks.play([crash, second]), 2)
            missed += any("without passing" in fault for fault in found)
            wrong += [f"{crash}, then {second}: {fault}" for fault in found if "without passing" not in fault]

    assert wrong == []
    assert missed <= len(chosen) // 4
    pairs = f"{len(chosen) - missed} real ones, {missed} more whose second point did not come"
    record_property("perdure", f"crash pairs: {pairs}, seed {SEED}")
