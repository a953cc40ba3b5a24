"""Killed at every point of a turn that is answered and then called off: acknowledged answers stand."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from msgspec import Struct

from perdure.testing.crash import MODES, Crash, ForkServer, Mode, Played, StoreKind, play
from tests.crash.answered import answered
from tests.crash.reference import SESSION

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")


class Fate(Struct, frozen=True):
    """How the turn ended; model calls; effects of `build`; the outcomes of both calls; model calls whose usage nobody
    saw. `pay` never runs."""

    turn: str = "cancelled"
    model: int = 1
    build: int = 1
    built: str = "ok"
    paid: str = "denied"
    usage: int = 0


OFF = Fate()
# Nobody can know whether the model had been asked; or it had been, and is asked again.
UNSURE = Fate(usage=1)
ASKED = Fate(model=2, usage=1)
# Its start is recorded and its key was given to nobody: nobody completes it.
STARTED = Fate(build=0, built="outcome_unknown")
# Both answers are on disk and the cancel is not: the next worker takes the turn to its end.
DONE = Fate("finished", model=2)

RULINGS: dict[str, dict[Mode, Fate]] = {
    "beat": {"before": OFF, "lost": OFF, "hang": OFF},
    "accept queue": {"before": OFF, "lost": UNSURE, "hang": OFF},
    "ask model 1.1": {"before": UNSURE, "lost": ASKED, "hang": UNSURE},
    "chunk 1 of model 1.1": {"before": ASKED},
    "append 1: replied 1, opening a wait": {"before": ASKED, "lost": OFF, "hang": ASKED, "late": ASKED},
    "append 1: started 1.0, opening a wait": {"before": OFF, "lost": STARTED, "hang": OFF, "late": OFF},
    "begin build 1.1.0": {"before": STARTED},
    "effect build": {"before": STARTED, "lost": OFF, "hang": STARTED},
    "end build 1.1.0": {"before": OFF},
    "append 1: nothing, opening a wait, parking": {"before": OFF, "lost": OFF, "hang": OFF, "late": OFF},
    "retire": {"before": OFF, "lost": OFF, "hang": OFF},
    "beat #2": {"before": OFF, "lost": OFF, "hang": OFF},
    "resolve deferred": {"before": OFF, "lost": OFF, "hang": OFF},
    "resolve approval": {"before": OFF, "lost": DONE, "hang": OFF},
    "cancel": {"before": DONE, "lost": OFF, "hang": DONE},
    "retire #2": {"before": OFF, "lost": OFF, "hang": OFF},
    "beat #3": {"before": OFF, "lost": OFF, "hang": OFF},
    "claim": {"before": OFF, "lost": OFF, "hang": OFF},
    "commit 1": {"before": OFF, "lost": OFF, "hang": OFF, "late": OFF},
    "retire #3": {"before": OFF, "lost": OFF, "hang": OFF},
}

DEATHS = [
    pytest.param(Crash(point, mode), fate, id=f"{mode} {point}")
    for point, fates in RULINGS.items()
    for mode, fate in fates.items()
]
KILLS = [death for death in DEATHS if str(death.id).split()[0] in ("before", "lost")]


def check(played: Played, fate: Fate) -> None:
    assert played.problems == []
    session = played.ending.session(SESSION)
    assert session is not None
    assert (session.state, session.head, session.inbox, session.waiting) == ("idle", 1, [], [])
    build, pay = session.calls
    assert played.count("pay") == 0
    seen = Fate(
        session.turns[1],
        played.model_calls,
        played.count("build"),
        build.outcome,
        pay.outcome,
        session.unknown_usage,
    )
    assert seen == fate


@pytest.mark.parametrize("store", STORES)
def test_every_point_is_ruled(store: StoreKind) -> None:
    played = play(answered, store=store)

    check(played, OFF)
    kinds = {point.name: set(MODES[point.kind]) - {"unheard"} for point in played.traces[0]}
    assert {point: set(fates) for point, fates in RULINGS.items()} == kinds
    assert list(kinds) == list(RULINGS)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("crash", "fate"), DEATHS)
def test_kill_has_its_ruled_fate(crash: Crash, fate: Fate, store: StoreKind) -> None:
    check(play(answered, [crash], store=store, timeout=60), fate)


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(answered, timeout=60) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "fate"), KILLS)
def test_real_kill_has_its_ruled_fate(forks: ForkServer, crash: Crash, fate: Fate) -> None:
    check(forks.play([crash], answered), fate)
