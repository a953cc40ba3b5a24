"""One process killed at every point of its life, by both contracts: what its successor finds, does and says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest
from msgspec import Struct

from perdure import ProcessContext, process
from perdure.model.process import ProcessRecovery, Registration, Success
from perdure.ports.process import EngineRun
from perdure.testing.crash import Crash, ForkServer, Lab, Played, StoreKind, play

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")


class Pays:
    """An engine that has one effect, under the contract that it is told."""

    kind = "pays"

    def __init__(self, lab: Lab, recovery: ProcessRecovery) -> None:
        self._lab, self._recovery = lab, recovery

    def knows(self, registration: Registration) -> bool:
        return True

    def draft(self, what: Any, args: Any) -> Registration | None:
        return Registration("", self.kind, self._recovery) if what == "pay" else None

    async def run(self, run: EngineRun) -> Success:
        await self._lab.mark("claimed")
        await run.begin()
        await self._lab.effect("pay", run.registration.id)
        return Success("paid")


@process
async def idle(ctx: ProcessContext[None]) -> None:
    """Nothing to do: a Runtime that has something to run takes over what others have left."""


async def pay(lab: Lab, recovery: ProcessRecovery) -> None:
    """Asks for the same process after every start, as a host does that does not know how far it came."""
    async with lab.runtime(processes=[idle]) as runtime:
        runtime._work.serve([Pays(lab, recovery)])
        handle = await runtime.start("pay", id="p")
        await runtime.processes.outcome(handle.id)


async def pay_bound(lab: Lab) -> None:
    await pay(lab, "owner_bound")


async def pay_again(lab: Lab) -> None:
    await pay(lab, "rerunnable")


SCENARIOS: dict[str, Callable[[Lab], Awaitable[None]]] = {"bound": pay_bound, "again": pay_again}


class Fate(Struct, frozen=True):
    """How it ends: its status, how often it was begun, and how often it has paid."""

    status: str = "completed"
    attempts: int = 1
    paid: int = 1


FINE = Fate()
AGAIN, TWICE = Fate(attempts=2), Fate(attempts=2, paid=2)
UNPAID, UNSURE = Fate("abandoned", paid=0), Fate("abandoned")

# Where it dies, and what becomes of it: when only its owner could do it, and when it may be done again.
FATES: dict[Crash, tuple[Fate, Fate]] = {
    Crash("register p", "before"): (FINE, FINE),
    Crash("register p", "lost"): (FINE, FINE),
    Crash("claimed", "before"): (FINE, FINE),
    Crash("advance p: starting", "before"): (FINE, FINE),
    Crash("advance p: starting", "lost"): (UNPAID, AGAIN),
    Crash("effect pay", "before"): (UNPAID, AGAIN),
    Crash("effect pay", "lost"): (UNSURE, TWICE),
    Crash("advance p: ending", "before"): (UNSURE, TWICE),
    Crash("advance p: ending", "lost"): (FINE, FINE),
    Crash("retire", "before"): (FINE, FINE),
    Crash("retire", "lost"): (FINE, FINE),
}
UNHEARD = ("register p", "advance p: starting", "advance p: ending")

CASES = [
    pytest.param(contract, crash, fates[at], id=f"{contract} {crash}")
    for at, contract in enumerate(SCENARIOS)
    for crash, fates in FATES.items()
]


def check(played: Played, fate: Fate) -> None:
    process = played.ending.process("p")

    assert played.problems == []
    assert process is not None
    assert Fate(process.status, process.attempts, played.count("pay")) == fate
    assert process.events.count("process.created") == 1
    assert process.events.count("process.first_started") == 1
    assert process.events[-1] == f"process.{fate.status}"
    assert sum(each.removeprefix("process.") in ("completed", "abandoned") for each in process.events) == 1


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("contract", "crash", "fate"), CASES)
def test_a_process_killed_here_ends_as_its_contract_says(
    contract: str, crash: Crash, fate: Fate, store: StoreKind
) -> None:
    check(play(SCENARIOS[contract], [crash], store=store), fate)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("contract", SCENARIOS)
@pytest.mark.parametrize("point", UNHEARD)
def test_a_reply_that_is_lost_changes_nothing(contract: str, point: str, store: StoreKind) -> None:
    check(play(SCENARIOS[contract], [Crash(point, "unheard")], store=store), FINE)


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(pay_bound) as helper:
        yield helper


@pytest.mark.kill
@pytest.mark.parametrize(("contract", "crash", "fate"), CASES)
def test_a_process_really_killed_here_ends_as_its_contract_says(
    forks: ForkServer, contract: str, crash: Crash, fate: Fate
) -> None:
    check(forks.play([crash], SCENARIOS[contract]), fate)


def test_every_point_of_its_life_has_a_ruling() -> None:
    played = play(pay_bound)
    ruled = {crash.point for crash in FATES}

    assert {point.name for point in played.traces[0]} - {"beat"} == ruled
