"""A turn that killed five workers is stuck; a person resumes it, and dies at every point of that.

The first five incarnations die with the model's answer on its way: the owner, the one that took the turn over at once,
and three that had it as their only suspect. The sixth finds the turn stuck and resumes it: it is the one that dies
here, and a seventh comes to the end.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from msgspec import Struct

from perdure import Agent, ModelRequest, ModelResponse, Usage
from perdure.ports.store import Store
from perdure.testing import FunctionModel
from perdure.testing.crash import MODES, Crash, ForkServer, Lab, Mode, Played, StoreKind, play
from tests.crash.reference import ATTENDED, patiently

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")
POISON = [Crash("ask model 1.1", "lost")] * 5


class Fate(Struct, frozen=True):
    """Requests to the model, the five of the dead among them; and those whose usage is reported as unknown."""

    model: int
    usage: int = 0


# The dead had asked five times, and no answer was recorded.
RESUMED = Fate(6, usage=5)
# Taken over once more before the model was asked: it may have been, so its usage counts as unknown.
UNSURE = Fate(6, usage=6)
# Asked, and the answer was not on disk.
ASKED = Fate(7, usage=6)

RULINGS: dict[str, dict[Mode, Fate]] = {
    "beat": {"before": RESUMED, "lost": RESUMED, "hang": RESUMED},
    "accept queue": {"before": RESUMED, "lost": RESUMED, "hang": RESUMED},
    # The claim that sets the turn aside instead of taking it.
    "claim": {"before": RESUMED, "lost": RESUMED, "hang": RESUMED},
    "bury": {"before": RESUMED, "lost": RESUMED, "hang": RESUMED},
    "bury #2": {"before": RESUMED, "lost": RESUMED, "hang": RESUMED},
    # Not sent, the turn is stuck still and the next one resumes it. Sent, the turn had an owner who died on it.
    "resume": {"before": RESUMED, "lost": UNSURE, "hang": RESUMED},
    "ask model 1.1": {"before": UNSURE, "lost": ASKED, "hang": UNSURE},
    "chunk 1 of model 1.1": {"before": ASKED},
    "chunk 2 of model 1.1": {"before": ASKED},
    "commit 1": {"before": ASKED, "lost": RESUMED, "hang": ASKED, "late": ASKED},
    "retire": {"before": RESUMED, "lost": RESUMED, "hang": RESUMED},
}


async def set_aside(store: Store) -> bool:
    """Whether the turn is stuck and nobody but us is left of the workers, or it is over."""
    row = await store.session("s")
    if row is None:
        return False
    return row.head == 1 or (row.state == "stuck" and len(await store.workers()) == 1)


def answer(request: ModelRequest) -> ModelResponse:
    return ModelResponse("Hello yourself.", usage=Usage(input=1, output=2))


async def resume_it(lab: Lab) -> None:
    """What a host does who knows of the trouble, written so that it may be started again at any time."""
    async with lab.runtime([Agent(FunctionModel(answer), name="poison")], lease=ATTENDED) as runtime:
        session = await runtime.session("s")
        receipt = await patiently(lambda: session.send("hello", key="1"))
        await lab.until(set_aside)
        await patiently(session.resume)
        await patiently(receipt.result)


def check(played: Played, fate: Fate) -> None:
    assert played.problems == []
    session = played.ending.session("s")
    assert session is not None
    assert (session.state, session.head, session.turns) == ("idle", 1, {1: "finished"})
    assert session.said == ["user: hello", "assistant: Hello yourself."]
    assert Fate(played.model_calls, session.unknown_usage) == fate


DEATHS = [
    pytest.param(Crash(point, mode), fate, id=f"{mode} {point}")
    for point, fates in RULINGS.items()
    for mode, fate in fates.items()
]
KILLS = [death for death in DEATHS if str(death.id).split()[0] in ("before", "lost")]
WRITES = ["beat", "accept queue", "claim", "bury", "resume", "commit 1", "retire"]


@pytest.mark.parametrize("store", STORES)
def test_every_point_of_a_resumption_is_ruled(store: StoreKind) -> None:
    played = play(resume_it, POISON, store=store)

    check(played, RESUMED)
    kinds = {point.name: set(MODES[point.kind]) - {"unheard"} for point in played.traces[-1]}
    assert list(kinds) == list(RULINGS)
    assert {point: set(fates) for point, fates in RULINGS.items()} == kinds


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("crash", "fate"), DEATHS)
def test_kill_while_a_stuck_turn_is_resumed_has_its_ruled_fate(crash: Crash, fate: Fate, store: StoreKind) -> None:
    check(play(resume_it, [*POISON, crash], store=store, timeout=60), fate)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("point", WRITES)
def test_lost_reply_costs_a_resumption_nothing(point: str, store: StoreKind) -> None:
    check(play(resume_it, [*POISON, Crash(point, "unheard")], store=store, timeout=60), RESUMED)


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(resume_it, timeout=60) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize(
    ("crash", "fate"), [death for death in DEATHS if str(death.id).split()[0] in ("before", "lost")]
)
def test_real_kill_while_a_stuck_turn_is_resumed_has_its_ruled_fate(
    forks: ForkServer, crash: Crash, fate: Fate
) -> None:
    check(forks.play([*POISON, crash]), fate)
