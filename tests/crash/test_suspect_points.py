"""Two turns were there at two deaths: one is slow, the other is held back until it makes room. Killed at every point.

The first two incarnations die when both turns have asked their model. The third runs "a" as its suspect, whose model
answers when "b" has ended; "a" outlives the ten seconds, "b" runs, both end. It is the one that dies here, and a fourth
comes to the end.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Generator

import pytest
from msgspec import Struct

from perdure import Agent, ModelRequest, ModelResponse, Usage
from perdure.ports.store import Store
from perdure.testing import FunctionModel, VirtualClock
from perdure.testing.crash import MODES, Crash, ForkServer, Lab, Mode, Played, StoreKind, play
from tests.crash.reference import patiently

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")
TWICE = [Crash("ask model 1.1 #2", "lost")] * 2


class Fate(Struct, frozen=True):
    """Requests to the model, four of the dead among them; and how many of each turn's have an unknown usage."""

    model: int = 6
    a: int = 2
    b: int = 2


PLAIN = Fate()
# Taken over once more before its model was asked: it may have been, so its usage counts as unknown.
UNSURE_A = Fate(6, a=3)
# "a" had asked, and is taken over once more; so with "b" taken and not yet asked, or asked too.
ASKED_A = Fate(7, a=3)
UNSURE_B = Fate(7, a=3, b=3)
ASKED_B = Fate(8, a=3, b=3)

# From the claim on. Before it the host and the watch write side by side, in no order.
RULINGS: dict[str, dict[Mode, Fate]] = {
    "claim": {"before": PLAIN, "lost": UNSURE_A, "hang": PLAIN},
    "ask model 1.1": {"before": UNSURE_A, "lost": ASKED_A, "hang": UNSURE_A},
    # Whether or not "a" has made room when it dies, the death costs it no more than its call in flight.
    "outlived": {"before": ASKED_A, "lost": ASKED_A, "hang": ASKED_A},
    "claim #2": {"before": ASKED_A, "lost": UNSURE_B, "hang": ASKED_A},
    "ask model 1.1 #2": {"before": UNSURE_B, "lost": ASKED_B, "hang": UNSURE_B},
    "chunk 1 of model 1.1": {"before": ASKED_B},
    "chunk 2 of model 1.1": {"before": ASKED_B},
    "commit 1": {"before": ASKED_B, "lost": ASKED_A, "hang": ASKED_B, "late": ASKED_B},
    "chunk 1 of model 1.1 #2": {"before": ASKED_A},
    "chunk 2 of model 1.1 #2": {"before": ASKED_A},
    "commit 1 #2": {"before": ASKED_A, "lost": PLAIN, "hang": ASKED_A, "late": ASKED_A},
    "retire": {"before": PLAIN, "lost": PLAIN, "hang": PLAIN},
}
RACING = {"beat", "accept queue", "bury"}


async def b_has_ended(store: Store) -> bool:
    row = await store.session("b")
    return row is not None and row.head == 1


async def has_suspect(store: Store) -> bool:
    """Whether a suspect runs, or nothing is left to run."""
    rows = [await store.session(name) for name in ("a", "b")]
    over = all(row is not None and row.head == 1 for row in rows)
    return over or any(row.suspect is not None for row in await store.workers())


async def say_both(lab: Lab) -> None:
    async def answer(request: ModelRequest) -> ModelResponse:
        said = request.messages[-1].text
        if said == "a":
            await lab.until(b_has_ended)
        return ModelResponse(f"after {said}", usage=Usage(input=1, output=1))

    clock = VirtualClock()
    async with lab.runtime([Agent(FunctionModel(answer), name="agent")], clock=clock) as runtime:
        receipts = []
        for name in ("a", "b"):
            session = await runtime.session(name)
            receipts.append(await patiently(functools.partial(session.send, name, key="1")))
        await lab.until(has_suspect)
        clock.advance(11)
        await asyncio.gather(*(patiently(receipt.result) for receipt in receipts))


def check(played: Played, fate: Fate) -> None:
    assert played.problems == []
    a, b = played.ending.session("a"), played.ending.session("b")
    assert a is not None
    assert b is not None
    assert [(each.state, each.head, each.turns) for each in (a, b)] == [("idle", 1, {1: "finished"})] * 2
    assert Fate(played.model_calls, a.unknown_usage, b.unknown_usage) == fate


DEATHS = [
    pytest.param(Crash(point, mode), fate, id=f"{mode} {point}")
    for point, fates in RULINGS.items()
    for mode, fate in fates.items()
]
KILLS = [death for death in DEATHS if str(death.id).split()[0] in ("before", "lost")]
WRITES = ["outlived"]


@pytest.mark.parametrize("store", STORES)
def test_every_point_of_a_suspect_is_ruled(store: StoreKind) -> None:
    played = play(say_both, TWICE, store=store)

    check(played, PLAIN)
    points = [point for point in played.traces[-1] if point.name.partition(" #")[0] not in RACING]
    assert [point.name for point in points] == list(RULINGS)
    assert {point.name: set(MODES[point.kind]) - {"unheard"} for point in points} == {
        point: set(fates) for point, fates in RULINGS.items()
    }


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("crash", "fate"), DEATHS)
def test_kill_while_a_suspect_runs_has_its_ruled_fate(crash: Crash, fate: Fate, store: StoreKind) -> None:
    check(play(say_both, [*TWICE, crash], store=store, timeout=60), fate)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("point", WRITES)
def test_lost_reply_costs_a_suspect_nothing(point: str, store: StoreKind) -> None:
    check(play(say_both, [*TWICE, Crash(point, "unheard")], store=store, timeout=60), PLAIN)


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(say_both, timeout=60) as ready:
        yield ready


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "fate"), KILLS)
def test_real_kill_while_a_suspect_runs_has_its_ruled_fate(forks: ForkServer, crash: Crash, fate: Fate) -> None:
    check(forks.play([*TWICE, crash]), fate)
