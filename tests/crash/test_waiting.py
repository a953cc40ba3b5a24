"""Kills while a model call waits for a rate limit, and around one that finds a file of an earlier turn unreadable.

Fates are written by hand. A model call without a record is asked once more, and its usage counts as unknown: also where
it had only waited to be made, since no record says so.
"""

from __future__ import annotations

import pytest
from msgspec import Struct

from perdure.testing.crash import Crash, ForkServer, Mode, Played, StoreKind, play
from tests.crash.waiting import WAITS, limited, lost_file


def crashes_of(rulings: dict[str, dict[Mode, Fate]]) -> list[Crash]:
    return [Crash(point, mode) for point, fates in rulings.items() for mode in fates]


class Fate(Struct, frozen=True):
    """How often each of two model calls was made, and how often its usage is unknown."""

    one: int = 1
    two: int = 1
    one_unknown: int = 0
    two_unknown: int = 0


def found(played: Played, one: str, two: str) -> tuple[int, int]:
    keys = [line.key for line in played.ledger if line.name == "model"]
    return keys.count(one), keys.count(two)


# ---------------------------------------------------------------------- waiting for a rate limit

CLEAN = Fate()
ONE_ASKED = Fate(one=2, one_unknown=1)
# The second call waited for the first one, and was never made before the kill.
BOTH_OPEN = Fate(one=2, one_unknown=1, two_unknown=1)
TWO_OPEN = Fate(two_unknown=1)
TWO_ASKED = Fate(two=2, two_unknown=1)

LIMITED: dict[str, dict[Mode, Fate]] = {
    "beat": {"before": CLEAN, "lost": CLEAN},
    "accept queue": {"before": CLEAN, "lost": Fate(one_unknown=1), "hang": CLEAN},
    "ask model 1.1": {"before": Fate(one_unknown=1)},
    "accept queue #2": {"before": ONE_ASKED, "lost": BOTH_OPEN, "hang": ONE_ASKED},
    WAITS: {"before": BOTH_OPEN},
    "chunk 1 of model 1.1": {"before": BOTH_OPEN},
    "chunk 2 of model 1.1": {"before": BOTH_OPEN},
    # While the commit of the first turn hangs, its place is free already: the second turn is asked, and commits.
    "commit 1": {"before": BOTH_OPEN, "lost": TWO_OPEN, "hang": ONE_ASKED},
    "ask model 1.1 #2": {"before": TWO_OPEN},
    "chunk 1 of model 1.1 #2": {"before": TWO_ASKED},
    "chunk 2 of model 1.1 #2": {"before": TWO_ASKED},
    "commit 1 #2": {"before": TWO_ASKED, "lost": CLEAN, "hang": TWO_ASKED},
    "retire": {"before": CLEAN, "lost": CLEAN, "hang": CLEAN},
}


def check_limited(played: Played, fate: Fate) -> None:
    assert (played.problems, played.unreached) == ([], [])
    one, two = played.ending.session("one"), played.ending.session("two")
    assert one is not None
    assert two is not None
    assert (one.said, two.said) == (
        ["user: first", "assistant: heard first"],
        ["user: second", "assistant: heard second"],
    )
    assert Fate(*found(played, "one.1.1", "two.1.1"), one.unknown_usage, two.unknown_usage) == fate


def test_every_point_of_two_calls_that_share_a_limit_has_a_ruling() -> None:
    assert [point.name for point in play(limited).traces[0]] == list(LIMITED)


@pytest.mark.parametrize("crash", crashes_of(LIMITED), ids=str)
def test_a_call_that_waits_for_a_rate_limit_is_made_once_after_a_kill(crash: Crash) -> None:
    check_limited(play(limited, [crash]), LIMITED[crash.point][crash.mode])


@pytest.mark.kill
def test_a_call_that_waits_for_a_rate_limit_is_made_once_after_a_real_kill() -> None:
    with ForkServer(limited) as forks:
        check_limited(forks.play([Crash(WAITS)]), BOTH_OPEN)


# ---------------------------------------------------------------------- a file of an earlier turn is unreadable

# Of the second turn, the call with the file fails when it reads it, and is made again with words in its place.
READ = Fate(one=1, two=2)
FIRST_ASKED = Fate(one=2, two=2, one_unknown=1)
# Which files are unreadable is in no record: a second host finds out by itself, at the cost of one more call.
FAILED = Fate(one=1, two=3, two_unknown=1)
WORDS_ASKED = Fate(one=1, two=4, two_unknown=1)

LOST_FILE: dict[str, dict[Mode, Fate]] = {
    "beat": {"before": READ, "lost": READ},
    "put blob": {"before": READ, "lost": READ, "hang": READ},
    "accept queue": {"before": READ, "lost": Fate(two=2, one_unknown=1), "hang": READ},
    "ask model 1.1": {"before": Fate(two=2, one_unknown=1)},
    "chunk 1 of model 1.1": {"before": FIRST_ASKED},
    "chunk 2 of model 1.1": {"before": FIRST_ASKED},
    "commit 1": {"before": FIRST_ASKED, "lost": READ, "hang": FIRST_ASKED},
    "effect first turn": {"before": READ, "lost": READ, "hang": READ},
    "accept queue #2": {"before": READ, "lost": Fate(two=2, two_unknown=1), "hang": READ},
    "ask model 2.1": {"before": Fate(two=2, two_unknown=1)},
    "append 2: faltered 1": {"before": FAILED, "lost": FAILED, "hang": FAILED},
    "ask model 2.1 #2": {"before": FAILED},
    "chunk 1 of model 2.1": {"before": WORDS_ASKED},
    "chunk 2 of model 2.1": {"before": WORDS_ASKED},
    "commit 2": {"before": WORDS_ASKED, "lost": READ, "hang": WORDS_ASKED},
    "retire": {"before": READ, "lost": READ, "hang": READ},
}


def check_lost_file(played: Played, fate: Fate) -> None:
    assert (played.problems, played.unreached) == ([], [])
    [session] = played.ending.sessions
    assert session.said == [
        "user: what is this?",
        "assistant: saw a picture",
        "user: and now?",
        "assistant: saw nothing",
    ]
    unknown = (fate.one_unknown, fate.two_unknown)
    assert (*found(played, "s.1.1", "s.2.1"), session.unknown_usage) == (fate.one, fate.two, sum(unknown))


def test_every_point_of_a_turn_with_a_lost_file_has_a_ruling() -> None:
    assert [point.name for point in play(lost_file).traces[0]] == list(LOST_FILE)


@pytest.mark.parametrize("store", ["memory", "sqlite"])
@pytest.mark.parametrize("crash", crashes_of(LOST_FILE), ids=str)
def test_a_turn_goes_on_without_a_lost_file_wherever_its_host_is_killed(crash: Crash, store: StoreKind) -> None:
    check_lost_file(play(lost_file, [crash], store=store), LOST_FILE[crash.point][crash.mode])


@pytest.mark.gate
@pytest.mark.kill
@pytest.mark.slow
def test_a_turn_goes_on_without_a_lost_file_after_a_real_kill() -> None:
    with ForkServer(lost_file) as forks:
        for crash in crashes_of(LOST_FILE):
            if crash.mode in ("before", "lost"):
                check_lost_file(forks.play([crash]), LOST_FILE[crash.point][crash.mode])
