"""Kills around a turn that is parked until a process ends: before, in and after the write that parks it, the end of the
process that opens it, the claim, and the body that goes on.

Fates are written by hand. A body that was parked goes on, which is no repetition; one that was started and neither
parked nor ended is run again, counted, as its tool declares.
"""

from __future__ import annotations

import pytest
from msgspec import Struct

from perdure.testing.crash import Crash, ForkServer, Mode, Played, StoreKind, play
from tests.crash.parked import awaiting


class Fate(Struct, frozen=True):
    """How often each of two model calls was made, and the effect after the wait happened; how often the tool was run
    again because of a crash; model calls whose usage nobody saw."""

    first: int = 1
    second: int = 1
    built: int = 1
    repeated: int = 0
    unknown: int = 0


CLEAN = Fate()
ASKED = Fate(first=2, unknown=1)
# Its start is on disk, in the reply or in a record of its own, and neither a wait nor an end.
AGAIN = Fate(repeated=1)
BUILT = Fate(built=2, repeated=1)
ASKED_AFTER = Fate(second=2, unknown=1)

PARK = "append 1: nothing, opening a wait, parking"
AWAITING: dict[str, dict[Mode, Fate]] = {
    "beat": {"before": CLEAN, "lost": CLEAN},
    "accept queue": {"before": CLEAN, "lost": Fate(unknown=1), "hang": CLEAN},
    "ask model 1.1": {"before": Fate(unknown=1)},
    "chunk 1 of model 1.1": {"before": ASKED},
    "append 1: replied 1": {"before": ASKED, "lost": AGAIN, "hang": ASKED},
    "begin build 1.1.0": {"before": AGAIN},
    "put blob": {"before": AGAIN, "lost": AGAIN, "hang": AGAIN},
    "register s.1.1.0.work": {"before": AGAIN, "lost": AGAIN, "hang": AGAIN},
    PARK: {"before": AGAIN, "lost": CLEAN, "hang": AGAIN},
    "complete": {"before": CLEAN, "lost": CLEAN, "hang": CLEAN},
    "claim": {"before": CLEAN, "lost": CLEAN, "hang": CLEAN},
    "append 1: started 1.0": {"before": CLEAN, "lost": AGAIN, "hang": CLEAN},
    "begin build 1.1.0 #2": {"before": AGAIN},
    "register s.1.1.0.work #2": {"before": AGAIN, "lost": AGAIN, "hang": AGAIN},
    "effect built": {"before": AGAIN, "lost": BUILT, "hang": AGAIN},
    "end build 1.1.0": {"before": BUILT},
    "append 1: ended 1.0": {"before": BUILT, "lost": Fate(unknown=1), "hang": BUILT},
    "ask model 1.2": {"before": Fate(unknown=1)},
    "chunk 1 of model 1.2": {"before": ASKED_AFTER},
    "chunk 2 of model 1.2": {"before": ASKED_AFTER},
    "commit 1": {"before": ASKED_AFTER, "lost": CLEAN, "hang": ASKED_AFTER},
    "retire": {"before": CLEAN, "lost": CLEAN, "hang": CLEAN},
}
CRASHES = [Crash(point, mode) for point, fates in AWAITING.items() for mode in fates]


def check(played: Played, fate: Fate) -> None:
    assert (played.problems, played.unreached) == ([], [])
    [session] = played.ending.sessions
    asked = [line.key for line in played.ledger if line.name == "model"]
    built = [line.key for line in played.ledger if line.name == "built"]
    [call] = session.calls
    assert (session.head, session.state, session.waiting, session.turns) == (1, "idle", [], {1: "finished"})
    assert session.said[-1] == "assistant: it is built"
    assert set(built) == {"s.1.1.0"}
    assert call.attempts == 1 + call.repeated
    counts = asked.count("s.1.1"), asked.count("s.1.2"), len(built), call.repeated, session.unknown_usage
    assert Fate(*counts) == fate


def test_every_point_of_a_turn_that_parks_until_a_process_ends_has_a_ruling() -> None:
    assert [point.name for point in play(awaiting).traces[0]] == list(AWAITING)


@pytest.mark.parametrize("store", ["memory", "sqlite"])
@pytest.mark.parametrize("crash", CRASHES, ids=str)
def test_a_turn_that_waits_for_a_process_goes_on_once_wherever_its_host_is_killed(
    crash: Crash, store: StoreKind
) -> None:
    check(play(awaiting, [crash], store=store), AWAITING[crash.point][crash.mode])


@pytest.mark.parametrize("mode", ["before", "lost", "hang"])
def test_a_turn_that_waits_for_a_process_is_killed_at_the_park_and_again_at_its_claim(mode: Mode) -> None:
    played = play(awaiting, [Crash(PARK, mode), Crash("claim", "lost")])

    check(played, AWAITING[PARK][mode])


@pytest.mark.kill
@pytest.mark.parametrize("crash", [Crash(PARK, "lost"), Crash("claim", "lost"), Crash("effect built", "lost")], ids=str)
def test_a_turn_that_waits_for_a_process_goes_on_after_a_real_kill(crash: Crash) -> None:
    with ForkServer(awaiting) as forks:
        check(forks.play([crash]), AWAITING[crash.point][crash.mode])
