"""T15 for all that waits: killed at every point of a turn whose input, questions and answers are too large for a row.

A blob is put first and referred to second. Killed in between, the blob is an orphan that the next sweep takes; nothing
that is on disk ever refers to a blob that is not. Fates written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
from msgspec import Struct
from msgspec.structs import replace

from perdure.testing.crash import MODES, Crash, ForkServer, Mode, Played, StoreKind, play
from tests.crash.reference import SESSION
from tests.crash.spilled import spilled

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")
WAITS = 4
"""Blobs that only waits refer to, so that they go with the commit: a question and three answers."""


class Fate(Struct, frozen=True):
    """Model calls; effects; how the sealing ended; attempts of the survey; model calls whose usage nobody saw; orphans
    that the next incarnation found when it began, and those that were left when all was over."""

    model: int = 2
    seal: int = 1
    survey: int = 1
    sealed: str = "ok"
    surveyed: int = 1
    usage: int = 0
    swept: int = 0
    left: int = WAITS


CLEAN = Fate()
# A put that nothing came to refer to.
ORPHAN = Fate(swept=1)
# From here on the input is on disk. Said again under its key it is put again, and known: that blob is left.
AGAIN = Fate(left=WAITS + 1)
AGAIN_ORPHAN = replace(AGAIN, swept=1)
UNSURE = replace(AGAIN, usage=1)
# The model had answered, and its answer was not on disk: neither as a record nor as the question to a person.
ASKED = replace(AGAIN, model=3, usage=1)
ASKED_ORPHAN = replace(ASKED, swept=1)
ASKED_ORPHANS = replace(ASKED, swept=2)
STARTED = replace(AGAIN, surveyed=2)
SURVEYED = replace(AGAIN, survey=2, surveyed=2)
SEAL_STARTED = replace(AGAIN, seal=0, sealed="outcome_unknown")
SEALED = replace(AGAIN, sealed="outcome_unknown")
# The waits went with the commit: the sweep of the next incarnation takes what they referred to.
COMMITTED = replace(AGAIN, swept=WAITS, left=1)


def call(before: Fate, lost: Fate) -> dict[Mode, Fate]:
    return {"before": before, "lost": lost, "hang": before}


def record(before: Fate, lost: Fate) -> dict[Mode, Fate]:
    return {**call(before, lost), "late": before}


RULINGS: dict[str, dict[Mode, Fate]] = {
    "beat": call(CLEAN, CLEAN),
    # The input.
    "put blob": call(CLEAN, ORPHAN),
    "accept queue": call(ORPHAN, UNSURE),
    "ask model 1.1": call(UNSURE, ASKED),
    "chunk 1 of model 1.1": {"before": ASKED},
    # The reply's record, and the body of the wait for approval: two blobs, one write.
    "put blob #2": call(ASKED, ASKED_ORPHAN),
    "put blob #3": call(ASKED_ORPHAN, ASKED_ORPHANS),
    "append 1: spilled, opening a wait": record(ASKED_ORPHANS, AGAIN),
    "append 1: started 1.2, opening a wait": record(AGAIN, STARTED),
    "begin survey 1.1.2": {"before": STARTED},
    "effect survey": call(STARTED, SURVEYED),
    "end survey 1.1.2": {"before": SURVEYED},
    "append 1: nothing, opening a wait, parking": record(SURVEYED, AGAIN),
    # The completion of the deferred call, then its outcome: an answer that is on disk is never asked for again.
    "put blob #4": call(AGAIN, AGAIN_ORPHAN),
    "resolve deferred": call(AGAIN_ORPHAN, AGAIN),
    "put blob #5": call(AGAIN, AGAIN_ORPHAN),
    "append 1: ended 1.2, parking": record(AGAIN_ORPHAN, AGAIN),
    # The refusal, then its record.
    "put blob #6": call(AGAIN, AGAIN_ORPHAN),
    "resolve approval": call(AGAIN_ORPHAN, AGAIN),
    "put blob #7": call(AGAIN, AGAIN_ORPHAN),
    "append 1: spilled, parking": record(AGAIN_ORPHAN, AGAIN),
    # The approval, then the start of its call, which tells who approved.
    "put blob #8": call(AGAIN, AGAIN_ORPHAN),
    "resolve approval #2": call(AGAIN_ORPHAN, AGAIN),
    "put blob #9": call(AGAIN, AGAIN_ORPHAN),
    "append 1: spilled": record(AGAIN_ORPHAN, SEAL_STARTED),
    "begin seal 1.1.0": {"before": SEAL_STARTED},
    "effect seal": call(SEAL_STARTED, SEALED),
    "end seal 1.1.0": {"before": SEALED},
    "append 1: ended 1.0": record(SEALED, UNSURE),
    "ask model 1.2": call(UNSURE, ASKED),
    "chunk 1 of model 1.2": {"before": ASKED},
    "chunk 2 of model 1.2": {"before": ASKED},
    "commit 1": record(ASKED, COMMITTED),
    "retire": call(COMMITTED, COMMITTED),
}

DEATHS = [
    pytest.param(Crash(point, mode), fate, id=f"{mode} {point}")
    for point, fates in RULINGS.items()
    for mode, fate in fates.items()
]
KILLS = [death for death in DEATHS if str(death.id).split()[0] in ("before", "lost")]
WRITES = ["accept queue", "append 1: spilled, opening a wait", "resolve deferred", "resolve approval", "commit 1"]


def check(played: Played, fate: Fate) -> None:
    assert played.problems == []
    session = played.ending.session(SESSION)
    assert session is not None
    assert (session.state, session.head, session.turns) == ("idle", 1, {1: "finished"})
    assert (session.inbox, session.waiting) == ([], [])
    seal, burn, survey = session.calls
    assert (burn.outcome, played.count("burn")) == ("denied", 0)
    assert (survey.outcome, survey.repeated) == ("ok", survey.attempts - 1)
    seen = Fate(
        played.model_calls,
        played.count("seal"),
        played.count("survey"),
        seal.outcome,
        survey.attempts,
        session.unknown_usage,
        sum(line.data for line in played.ledger if line.name == "swept"),
        played.ending.orphans,
    )
    assert seen == fate


@pytest.mark.parametrize("store", STORES)
def test_every_point_is_ruled(store: StoreKind) -> None:
    played = play(spilled, store=store)

    check(played, CLEAN)
    kinds = {point.name: set(MODES[point.kind]) - {"unheard"} for point in played.traces[0]}
    assert list(kinds) == list(RULINGS)
    assert {point: set(fates) for point, fates in RULINGS.items()} == kinds


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("crash", "fate"), DEATHS)
def test_kill_has_its_ruled_fate(crash: Crash, fate: Fate, store: StoreKind) -> None:
    check(play(spilled, [crash], store=store, timeout=10), fate)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("point", WRITES)
def test_lost_reply_to_what_refers_to_a_blob_costs_nothing(point: str, store: StoreKind) -> None:
    fate = AGAIN if point == "accept queue" else CLEAN
    check(play(spilled, [Crash(point, "unheard")], store=store, timeout=10), fate)


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(spilled, timeout=15) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "fate"), KILLS)
def test_real_kill_has_its_ruled_fate(forks: ForkServer, crash: Crash, fate: Fate) -> None:
    check(forks.play([crash]), fate)


def test_each_of_the_nine_puts_dies_in_three_ways(record_property: Callable[[str, object], None]) -> None:
    assert len([death for death in DEATHS if "put blob" in str(death.id)]) == 27
    cases = len(STORES) * (len(DEATHS) + len(WRITES)) + len(KILLS)
    record_property("perdure", f"crash, spilled: {len(RULINGS)} points, {cases} cases")
