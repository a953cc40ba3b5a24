"""Killed at every point of a turn that a person calls off, and of one whose runtime is left: fates written by hand."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from msgspec import Struct

from perdure.testing.crash import MODES, Crash, ForkServer, Mode, Played, StoreKind, play
from tests.crash.halted import called_off, left
from tests.crash.reference import SESSION

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")


class Fate(Struct, frozen=True):
    """How the turn ended; model calls; effects in the ledger; what is recorded of each call: its outcome, and how many
    of its attempts are repeats; model calls whose usage nobody saw."""

    turn: str
    model: int
    pay: int
    hold: int
    paid: str = "ok"
    held: tuple[str, int] = ("outcome_unknown", 0)
    usage: int = 0


# ---------------------------------------------------------------------- called off

OFF = Fate("cancelled", model=1, pay=1, hold=1)
# Nobody can know whether the model had been asked; or it had been, and is asked again.
OFF_UNSURE = Fate("cancelled", model=1, pay=1, hold=1, usage=1)
OFF_ASKED = Fate("cancelled", model=2, pay=1, hold=1, usage=1)
# Both calls had started with the reply: `pay` is unknown from then on, `hold` runs again until it is called off.
OFF_STARTED = Fate("cancelled", model=1, pay=0, hold=1, paid="outcome_unknown", held=("outcome_unknown", 1))
OFF_PAID = Fate("cancelled", model=1, pay=1, hold=1, paid="outcome_unknown", held=("outcome_unknown", 1))
OFF_RECORDED = Fate("cancelled", model=1, pay=1, hold=1, held=("outcome_unknown", 1))
OFF_HELD = Fate("cancelled", model=1, pay=1, hold=2, held=("outcome_unknown", 1))

CALLED_OFF: dict[str, dict[Mode, Fate]] = {
    "beat": {"before": OFF, "lost": OFF, "hang": OFF},
    "accept queue": {"before": OFF, "lost": OFF_UNSURE, "hang": OFF},
    "ask model 1.1": {"before": OFF_UNSURE, "lost": OFF_ASKED, "hang": OFF_UNSURE},
    "chunk 1 of model 1.1": {"before": OFF_ASKED},
    "append 1: replied 1": {"before": OFF_ASKED, "lost": OFF_STARTED, "hang": OFF_ASKED, "late": OFF_ASKED},
    "begin pay 1.1.0": {"before": OFF_STARTED},
    "effect pay": {"before": OFF_STARTED, "lost": OFF_PAID, "hang": OFF_STARTED},
    "end pay 1.1.0": {"before": OFF_PAID},
    "begin hold 1.1.1": {"before": OFF_PAID},
    "append 1: ended 1.0": {"before": OFF_PAID, "lost": OFF_RECORDED, "hang": OFF_PAID, "late": OFF_PAID},
    "effect hold": {"before": OFF_RECORDED, "lost": OFF_HELD, "hang": OFF_RECORDED},
    # Once the request is on disk nothing is begun any more, whoever finds the turn.
    "cancel": {"before": OFF_HELD, "lost": OFF, "hang": OFF_HELD},
    "commit 1": {"before": OFF, "lost": OFF, "hang": OFF, "late": OFF},
    "retire": {"before": OFF, "lost": OFF, "hang": OFF},
}

# ---------------------------------------------------------------------- left

# `hold` runs a second time, in the next runtime: it was cut off, and its contract allows it.
BACK = Fate("finished", model=2, pay=1, hold=2, held=("ok", 1))
BACK_UNSURE = Fate("finished", model=2, pay=1, hold=2, held=("ok", 1), usage=1)
BACK_ASKED = Fate("finished", model=3, pay=1, hold=2, held=("ok", 1), usage=1)
BACK_STARTED = Fate("finished", model=2, pay=0, hold=1, paid="outcome_unknown", held=("ok", 1))
BACK_PAID = Fate("finished", model=2, pay=1, hold=1, paid="outcome_unknown", held=("ok", 1))
BACK_RECORDED = Fate("finished", model=2, pay=1, hold=1, held=("ok", 1))
# Killed in its second attempt: there is a third.
THIRD = Fate("finished", model=2, pay=1, hold=2, held=("ok", 2))
THIRD_HELD = Fate("finished", model=2, pay=1, hold=3, held=("ok", 2))

LEFT: dict[str, dict[Mode, Fate]] = {
    "beat": {"before": BACK, "lost": BACK, "hang": BACK},
    "accept queue": {"before": BACK, "lost": BACK_UNSURE, "hang": BACK},
    "ask model 1.1": {"before": BACK_UNSURE, "lost": BACK_ASKED, "hang": BACK_UNSURE},
    "chunk 1 of model 1.1": {"before": BACK_ASKED},
    "append 1: replied 1": {"before": BACK_ASKED, "lost": BACK_STARTED, "hang": BACK_ASKED, "late": BACK_ASKED},
    "begin pay 1.1.0": {"before": BACK_STARTED},
    "effect pay": {"before": BACK_STARTED, "lost": BACK_PAID, "hang": BACK_STARTED},
    "end pay 1.1.0": {"before": BACK_PAID},
    "begin hold 1.1.1": {"before": BACK_PAID},
    "append 1: ended 1.0": {"before": BACK_PAID, "lost": BACK_RECORDED, "hang": BACK_PAID, "late": BACK_PAID},
    "effect hold": {"before": BACK_RECORDED, "lost": BACK, "hang": BACK_RECORDED},
    "release": {"before": BACK, "lost": BACK, "hang": BACK, "late": BACK},
    "retire": {"before": BACK, "lost": BACK, "hang": BACK},
    "beat #2": {"before": BACK, "lost": BACK, "hang": BACK},
    "claim": {"before": BACK, "lost": BACK, "hang": BACK},
    "append 1: started 1.1": {"before": BACK, "lost": THIRD, "hang": BACK, "late": BACK},
    "begin hold 1.1.1 #2": {"before": THIRD},
    "effect hold #2": {"before": THIRD, "lost": THIRD_HELD, "hang": THIRD},
    "end hold 1.1.1": {"before": THIRD_HELD},
    "append 1: ended 1.1": {"before": THIRD_HELD, "lost": BACK_UNSURE, "hang": THIRD_HELD, "late": THIRD_HELD},
    "ask model 1.2": {"before": BACK_UNSURE, "lost": BACK_ASKED, "hang": BACK_UNSURE},
    "chunk 1 of model 1.2": {"before": BACK_ASKED},
    "chunk 2 of model 1.2": {"before": BACK_ASKED},
    "commit 1": {"before": BACK_ASKED, "lost": BACK, "hang": BACK_ASKED, "late": BACK_ASKED},
    "retire #2": {"before": BACK, "lost": BACK, "hang": BACK},
}

SCENARIOS = ((called_off, CALLED_OFF, OFF), (left, LEFT, BACK))
DEATHS = [
    pytest.param(scenario, Crash(point, mode), fate, id=f"{scenario.__name__}, {mode} {point}")
    for scenario, rulings, _ in SCENARIOS
    for point, fates in rulings.items()
    for mode, fate in fates.items()
]
KILLS = [death for death in DEATHS if str(death.id).split(", ")[1].split()[0] in ("before", "lost")]


def check(played: Played, fate: Fate) -> None:
    assert played.problems == []
    session = played.ending.session(SESSION)
    assert session is not None
    assert (session.state, session.head, session.inbox, session.waiting) == ("idle", 1, [], [])
    pay, hold = session.calls
    assert (pay.repeated, hold.attempts) == (0, hold.repeated + 1)
    seen = Fate(
        session.turns[1],
        played.model_calls,
        played.count("pay"),
        played.count("hold"),
        pay.outcome,
        (hold.outcome, hold.repeated),
        session.unknown_usage,
    )
    assert seen == fate


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("scenario", "rulings", "fate"), SCENARIOS, ids=["called off", "left"])
def test_every_point_is_ruled(
    scenario: Any, rulings: dict[str, dict[Mode, Fate]], fate: Fate, store: StoreKind
) -> None:
    played = play(scenario, store=store)

    check(played, fate)
    kinds = {point.name: set(MODES[point.kind]) - {"unheard"} for point in played.traces[0]}
    assert {point: set(fates) for point, fates in rulings.items()} == kinds
    assert list(kinds) == list(rulings)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("scenario", "crash", "fate"), DEATHS)
def test_kill_has_its_ruled_fate(scenario: Any, crash: Crash, fate: Fate, store: StoreKind) -> None:
    check(play(scenario, [crash], store=store, timeout=60), fate)


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(called_off, timeout=60) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize(("scenario", "crash", "fate"), KILLS)
def test_real_kill_has_its_ruled_fate(forks: ForkServer, scenario: Any, crash: Crash, fate: Fate) -> None:
    check(forks.play([crash], scenario), fate)
