"""What a host says about processes of others, killed just before and just after it is on disk.

Each verb is one write: killed before it nothing of it is there, killed after it all of it, and nobody half-way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import pytest
from msgspec import Struct

from perdure.errors import ProcessStuck
from perdure.model.process import Registration, Success, WakeTarget
from perdure.ports.process import EngineRun
from perdure.testing.crash import Crash, ForkServer, Lab, Played, StoreKind, play
from tests.crash.test_processes_points import idle

STORES: tuple[StoreKind, ...] = ("memory", "sqlite")


async def speak(lab: Lab) -> None:
    """Register work of others, say everything that may be said of it, complete and forget it."""
    async with lab.runtime() as runtime:
        # The session is of an agent that this Runtime lacks: the wake stays in the outbox until it is discarded.
        build = await runtime.processes.register("build", wake=WakeTarget("chat", "elsewhere", policy="notify"))
        await runtime.processes.set_external_ref(build, "ci/7")
        await runtime.processes.grant("chat", build)
        await runtime.processes.request_abandon(build, "it is silent")
        await runtime.processes.complete(build, "built")
        [wake] = await runtime.processes.wakes()
        await runtime.processes.discard(wake.number, reason="nobody reads it")
        await runtime.processes.prune(0)


async def open_and_close(lab: Lab) -> None:
    """Open the store and leave it: what is there was there when the host died."""
    async with lab.runtime():
        pass


class There(Struct, frozen=True):
    """What is on disk: events but for the first, and the states of what a session is told."""

    events: tuple[str, ...] = ()
    told: tuple[str, ...] = ()


NOTHING = None
REGISTERED = There()
REFERRED = There(("external_ref_set",))
SHARED = There(("external_ref_set", "observer_added"))
DOUBTED = There(("external_ref_set", "observer_added", "abandon_requested"))
ENDED = ("external_ref_set", "observer_added", "abandon_requested", "completed")
COMPLETED, DISMISSED = There(ENDED, ("pending",)), There(ENDED, ("discarded",))
PRUNED = NOTHING

# The write at which the host dies; what is there when it was not sent, and when it was.
THERE: dict[str, tuple[There | None, There | None]] = {
    "register build": (NOTHING, REGISTERED),
    "event": (REGISTERED, REFERRED),
    "share": (REFERRED, SHARED),
    "event #2": (SHARED, DOUBTED),
    "complete": (DOUBTED, COMPLETED),
    "dismiss": (COMPLETED, DISMISSED),
    "prune": (DISMISSED, PRUNED),
    "prune #2": (PRUNED, PRUNED),
}
CRASHES = {
    crash: there
    for point, (unsent, sent) in THERE.items()
    for crash, there in ((Crash(point, "before"), unsent), (Crash(point, "lost"), sent))
}
CASES = [pytest.param(crash, there, id=str(crash)) for crash, there in CRASHES.items()]


def check(played: Played, there: There | None) -> None:
    found = played.ending.process("build")

    assert played.problems == []
    if there is None:
        assert found is None
    else:
        assert found is not None
        assert found.events == ["process.created", *(f"process.{event}" for event in there.events)]
        assert found.told == list(there.told)


def test_every_verb_has_its_ruling() -> None:
    [trace] = play(speak, []).traces

    assert [point.name for point in trace if point.name not in ("beat", "retire")] == list(THERE)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("crash", "there"), CASES)
def test_a_host_killed_here_has_said_all_of_it_or_nothing(crash: Crash, there: There | None, store: StoreKind) -> None:
    check(play(speak, [crash], store=store, resume=open_and_close), there)


@pytest.fixture(scope="module")
def forks() -> Generator[ForkServer, None, None]:
    with ForkServer(speak) as helper:
        yield helper


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "there"), CASES)
def test_a_host_really_killed_here_has_said_all_of_it_or_nothing(
    forks: ForkServer, crash: Crash, there: There | None
) -> None:
    check(forks.play([crash], speak, resume=open_and_close), there)


# ---------------------------------------------------------------------- handed on


async def hand_on(lab: Lab) -> None:
    """Hand two processes of a session on to another, once they are all there."""
    async with lab.runtime() as runtime:
        for name in ("one", "two"):
            await runtime.processes.register(name, wake=WakeTarget("chat", policy="notify"), grants=["chat"])
        await runtime.processes.transfer("chat", "desk", "one", "two")


HANDED_ON = ["process.observer_added", "process.observer_removed", "process.subscription_retargeted"]
MOVED = {Crash("transfer", "before"): [], Crash("transfer", "lost"): HANDED_ON}


def check_moved(played: Played, events: list[str]) -> None:
    assert played.problems == []
    for name in ("one", "two"):
        found = played.ending.process(name)
        assert found is not None
        assert found.events == ["process.created", *events]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("crash", "events"), MOVED.items(), ids=map(str, MOVED))
def test_a_host_killed_while_it_hands_on_has_handed_on_all_or_nothing(
    crash: Crash, events: list[str], store: StoreKind
) -> None:
    check_moved(play(hand_on, [crash], store=store, resume=open_and_close), events)


@pytest.mark.kill
@pytest.mark.parametrize(("crash", "events"), MOVED.items(), ids=map(str, MOVED))
def test_a_host_really_killed_while_it_hands_on_has_handed_on_all_or_nothing(crash: Crash, events: list[str]) -> None:
    with ForkServer(hand_on) as helper:
        check_moved(helper.play([crash], hand_on, resume=open_and_close), events)


# ---------------------------------------------------------------------- set aside, and taken up again


class Moody:
    """An engine that is out of order until its host has mended it."""

    kind = "moody"
    mended = False

    def knows(self, registration: Registration) -> bool:
        return True

    def draft(self, what: Any, args: Any) -> Registration | None:
        return Registration("", self.kind, "rerunnable") if what == "moody" else None

    async def run(self, run: EngineRun) -> Success:
        await run.begin()
        if not self.mended:
            raise RuntimeError("out of order")
        return Success("mended")


async def mend(lab: Lab) -> None:
    """Start it, find it stuck, mend what it needs, and let it go on; all over again after a kill."""
    async with lab.runtime(processes=[idle]) as runtime:
        engine = Moody()
        runtime._work.serve([engine])
        handle = await runtime.start("moody", id="p")
        with contextlib.suppress(ProcessStuck):
            await handle.result()
        engine.mended = True
        await runtime.processes.resume("p")
        assert await handle.result() == "mended"


# How often it was set aside in the end: a resumed one whose mended host died is set aside once more.
ASIDE = {
    Crash("release p as stuck", "before"): 1,
    Crash("release p as stuck", "lost"): 1,
    Crash("resume p", "before"): 1,
    Crash("resume p", "lost"): 2,
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("crash", "times"), ASIDE.items(), ids=map(str, ASIDE))
def test_a_process_set_aside_is_mended_wherever_its_host_dies(crash: Crash, times: int, store: StoreKind) -> None:
    played = play(mend, [crash], store=store)
    found = played.ending.process("p")

    assert played.problems == []
    assert found is not None
    assert (found.status, found.stuck) == ("completed", None)
    assert found.events.count("process.stuck") == times
    assert found.events.count("process.revived") == times
