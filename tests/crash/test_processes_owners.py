"""Owners of processes that die, stop, leave or block: what becomes of their work, by its contract."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.engine.lease import LeaseTerms
from perdure.model.process import Abandoned, Cancelled, Failure, Success
from tests.crash.children import beats, child, count, disk, folder, kinds, rows
from tests.crash.process_worker import PATIENCE, SHORT, Outside, entered, runtime, working
from tests.kit import crash, until

__all__ = ["folder"]

pytestmark = [pytest.mark.kill, pytest.mark.slow]

HERE = os.getpid()
HOUR = LeaseTerms(term=3600, renewal=1)
"""With it only a proof of death lets anybody in."""


# ---------------------------------------------------------------------- killed


async def test_a_killed_workers_processes_end_as_each_declared(folder: Path) -> None:
    outside = Outside(folder, wait=True)
    with child("hold", folder) as owner:
        assert owner.line() == "ready"
        owner.kill()
        left = await rows(outside)
        async with entered(outside, lease=HOUR) as successor:
            await until(lambda: HERE in beats(outside, "rerun"))
            (folder / "go").touch()
            outcomes = {name: await successor.processes.outcome(name, PATIENCE) for name in ("rerun", "once", "bound")}
            ended = await successor.processes.complete("external", "the job is done")
    after = await rows(outside)

    assert outcomes["rerun"] == Success(f"done by {HERE}")
    assert (after["rerun"].attempts, after["rerun"].generation) == (2, 2)
    assert isinstance(outcomes["once"], Failure)
    assert outcomes["once"].code == "outcome_unknown"
    abandoned = outcomes["bound"]
    assert isinstance(abandoned, Abandoned)
    assert (abandoned.evidence.writer, abandoned.evidence.owner) == ("sweep", left["bound"].owner)
    assert f"pid {owner.pid} " in abandoned.evidence.proof
    assert ended.status == "committed"
    assert (left["external"].record.sequence, ended.row.record.sequence) == (1, 2), "nobody else had touched it"
    assert count(outside, "begun") == {"rerun": 2, "once": 1, "bound": 1}
    assert count(outside, "work") == {"rerun": 1}
    writers = [pid for pid, _ in itertools.groupby(beats(outside, "rerun"))]
    assert writers == [owner.pid, HERE], "one after the other, never two at a time"


async def test_children_end_as_was_declared_though_the_worker_died_in_between(folder: Path) -> None:
    """The worker dies, and the parent is cancelled while nobody works on any of them."""
    outside = Outside(folder, wait=True)
    with child("lead", folder) as owner:
        assert owner.line() == "ready"
        owner.kill()
    async with Runtime(outside.store) as host:
        assert await host.handle("parent").cancel("enough") == "requested"
    async with runtime(outside) as successor:
        outcomes = {name: await successor.processes.outcome(name, PATIENCE) for name in ("parent", "parent.1")}
        other = await successor.handle("parent.2").status()
        (folder / "go").touch()
        outcomes["parent.2"] = await successor.processes.outcome("parent.2", PATIENCE)

    assert outcomes == {
        "parent": Cancelled("host", "enough"),
        "parent.1": Cancelled("parent parent", "its parent has ended", unknown=True),
        "parent.2": Success(f"done by {HERE}"),
    }
    assert other == "running"
    assert count(outside, "work") == {"parent.2": 1}


async def test_work_that_is_cancelled_after_its_worker_died_is_told_as_unknown(folder: Path) -> None:
    """Nobody will run it again, so nobody can say how far the dead worker came."""
    outside = Outside(folder, wait=True)
    before = runtime(outside)
    await before.__aenter__()
    await before.start(working, id="w")
    await until(lambda: outside.lines("begun"))
    await crash(before)
    async with Runtime(outside.store) as host:
        assert await host.handle("w").cancel("enough") == "requested"
    async with runtime(outside) as successor:
        outcome = await successor.processes.outcome("w", PATIENCE)

    assert outcome == Cancelled("host", "enough", unknown=True)
    assert count(outside, "begun") == {"w": 1}


# ---------------------------------------------------------------------- places


async def test_a_sweep_takes_no_more_than_it_has_places_for_and_forgets_nothing(folder: Path) -> None:
    """The others are not left to the next sweep, which is hours away, but taken when a place is free."""
    outside = Outside(folder, wait=True)
    before = runtime(outside)
    await before.__aenter__()
    for n in range(30):
        await before.start(working, id=f"w-{n}")
    await until(lambda: len(outside.lines("begun")) == 30)
    await crash(before)
    async with runtime(outside, lease=LeaseTerms(term=36_000, renewal=10_000), concurrency=3) as successor:
        await until(lambda: len(outside.lines("begun")) >= 33)
        inside = len(successor._work.runs)
        (folder / "go").touch()
        for n in range(30):
            assert await successor.handle(f"w-{n}").result(PATIENCE) == f"done by {HERE}"

    assert inside == 3
    assert count(outside, "begun") == {f"w-{n}": 2 for n in range(30)}
    assert count(outside, "work") == {f"w-{n}": 1 for n in range(30)}


# ---------------------------------------------------------------------- stopped past its term


async def more_beats(outside: Outside, key: str) -> None:
    """Wait for some more signs of life."""
    before = len(beats(outside, key))
    await until(lambda: len(beats(outside, key)) >= before + 20)


async def test_a_stopped_worker_wakes_up_fenced_and_stops_what_is_no_longer_its_own(folder: Path) -> None:
    """What is bound to it goes on: it holds its lease, so nothing proves that it is dead."""
    outside = Outside(folder)
    with child("hold", folder) as owner:
        assert owner.line() == "ready"
        owner.send(signal.SIGSTOP)
        async with entered(outside, lease=SHORT) as successor:
            outcomes = {name: await successor.processes.outcome(name, PATIENCE) for name in ("rerun", "once")}
            bound_meanwhile = await successor.processes.get("bound")
            relieved = await disk(outside, "rerun", "once", "external")
            owner.send(signal.SIGCONT)
            seen_by_owner = [owner.line(), owner.line()]
            await more_beats(outside, "bound")  # it may have been in the middle of one of the others
            beaten = len(beats(outside, "rerun")), len(beats(outside, "once"))
            await more_beats(outside, "bound")
            beaten_later = len(beats(outside, "rerun")), len(beats(outside, "once"))
            (folder / "go").touch()
            bound = await successor.processes.outcome("bound", PATIENCE)
            assert owner.line() == f"bound Success done by {owner.pid}"
            assert owner.wait() == 0
    after = await disk(outside, "rerun", "once", "external")

    assert outcomes["rerun"] == Success(f"done by {HERE}")
    assert isinstance(outcomes["once"], Failure)
    assert outcomes["once"].code == "outcome_unknown"
    assert seen_by_owner == [f"rerun Success done by {HERE}", "once Failure None"], "it reads the other's results"
    assert beaten_later == beaten, "its own copies have stopped"
    assert bound == Success(f"done by {owner.pid}")
    assert after == relieved, "and it has written nothing"
    assert (bound_meanwhile.status, bound_meanwhile.generation) == ("running", 1)
    assert count(outside, "work") == {"rerun": 1, "bound": 1}


async def test_a_stopped_worker_whose_work_ends_as_it_wakes_cannot_say_so(folder: Path) -> None:
    """Its successor is done, so its own copy of what may be repeated ends at once, before it has heard of anything."""
    outside = Outside(folder)
    with child("hold", folder) as owner:
        assert owner.line() == "ready"
        owner.send(signal.SIGSTOP)
        async with runtime(outside, lease=SHORT) as successor:
            assert await successor.handle("rerun").result(PATIENCE) == f"done by {HERE}"
            await successor.processes.outcome("once", PATIENCE)
            relieved = await disk(outside, "rerun", "once")
            (folder / "go").touch()
            owner.send(signal.SIGCONT)
            seen_by_owner = owner.line()
            assert owner.wait() == 0
    after = await disk(outside, "rerun", "once")
    row = (await rows(outside))["rerun"]

    assert seen_by_owner == f"rerun Success done by {HERE}"
    assert after == relieved
    assert row.attempts == 2, "what was done twice was counted"
    assert Counter(line.incarnation for line in outside.lines("work") if line.key == "rerun") == {HERE: 1, owner.pid: 1}


# ---------------------------------------------------------------------- told to leave


async def test_a_worker_that_is_told_to_stop_ends_parks_or_gives_up_what_it_has(folder: Path) -> None:
    outside = Outside(folder)
    with child("serve", folder) as worker:
        assert worker.line() == "ready"
        worker.send(signal.SIGTERM)
        assert worker.line() == "left"
        assert worker.wait() == 0
        left = await rows(outside)
        begun = count(outside, "begun")
        async with entered(outside) as successor:
            await successor.handle("parked").signal("more", 10)
            names = ("rerun", "other", "waiting", "parked", "finishing")
            results = {name: await successor.handle(name).result(PATIENCE) for name in names}
            once = await successor.processes.outcome("once", PATIENCE)
            history = await kinds(successor, "finishing")

    assert {name: (row.status, row.owner) for name, row in left.items()} == {
        "parked": ("waiting", None),
        "finishing": ("completed", None),
        "rerun": ("running", None),
        "other": ("running", None),
        "waiting": ("running", None),
        "once": ("running", None),
        "bound": ("abandoned", None),
    }
    assert begun == {"rerun": 1, "once": 1, "bound": 1, "finishing": 1, "other": 1}, "it has claimed nothing more"
    bound = left["bound"].record.outcome
    assert isinstance(bound, Abandoned)
    assert bound.evidence.writer == "owner_drain"
    done = f"done by {HERE}"
    assert results == {"rerun": done, "other": done, "waiting": done, "parked": 11, "finishing": "finished"}
    assert isinstance(once, Failure)
    assert once.code == "outcome_unknown"
    assert history.count("process.completed") == 1
    assert count(outside, "work") == {"rerun": 1, "other": 1, "waiting": 1, "finishing": 1}


# ---------------------------------------------------------------------- blocked


async def test_a_blocked_event_loop_is_named_and_costs_no_ownership(folder: Path) -> None:
    outside = Outside(folder)
    with child("block", folder) as worker:
        await until(lambda: count(outside, "begun"))
        async with runtime(outside, lease=SHORT) as other:  # it would take over whoever were silent for the term
            outcome = await other.processes.outcome("blocking", PATIENCE)
        said = worker.rest()
        assert worker.wait() == 0
    row = (await rows(outside))["blocking"]

    assert outcome == Success(f"done by {worker.pid}")
    assert (row.generation, row.attempts) == (1, 1)
    named = [line for line in said if line.startswith("ERROR the event loop has been blocked")]
    assert len([line for line in named if "process blocking" in line]) == 1
    assert any("time.sleep(4.5)" in line for line in said), "with the line that does it"
