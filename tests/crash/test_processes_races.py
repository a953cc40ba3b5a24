"""Several OS processes at one store of durable processes, all at the same moment: each thing happens once."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.errors import ProcessEnded, ProcessPruned
from perdure.model.process import Failure, NoLongerRetained, Success
from perdure.testing import VirtualClock
from tests.crash.children import Child, child, count, folder, rows
from tests.crash.process_worker import PATIENCE, Outside, asking, quick, runtime, working
from tests.kit import until
from tests.soak.races import race

__all__ = ["folder"]

pytestmark = [pytest.mark.kill, pytest.mark.slow, pytest.mark.gate]

SAMPLE = 150


def let_go(folder: Path, *children: Child) -> None:
    """Let children go on at the same moment, once all of them are there."""
    assert [each.line() for each in children] == ["ready"] * len(children)
    (folder / "go").touch()


# ---------------------------------------------------------------------- cancel against completion


def test_a_cancel_that_races_completion_leaves_one_end_that_both_see(folder: Path) -> None:
    """A sample; `make soak` runs all thousand."""
    count = race(folder, SAMPLE)
    print(count)

    assert count.problems == []
    assert count.completed + count.cancelled == SAMPLE
    assert min(count.completed, count.cancelled) > SAMPLE // 20, "both have won"


# ---------------------------------------------------------------------- two who sweep


def expected(total: int) -> int:
    """The sum of what `fill` starts: a quarter adds 1000, a quarter is told 5000, a quarter asks for what adds 1000."""
    return sum(range(total)) + total // 4 * (1000 + 5000 + 1000)


async def end_all(outside: Outside, total: int) -> int:
    """Signal who waits for it, and wait for all, as somebody who works on nothing. The sum of their results."""
    async with Runtime(outside.store) as host:
        for n in range(1, total, 4):
            await host.handle(f"p-{n:04}").signal("more", 5000, key="once")
        return sum([await host.handle(f"p-{n:04}").result(PATIENCE) for n in range(total)])


async def test_two_workers_sweep_what_four_left_behind_and_each_process_runs_once(folder: Path) -> None:
    outside, total = Outside(folder), 400
    with child("fill", folder, total) as opener:
        assert opener.line() == "ready"
        opener.kill()
    left = await rows(outside)
    with child("sweep", folder) as one, child("sweep", folder) as other:
        let_go(folder, one, other)
        await until(lambda: {one.pid, other.pid} <= {line.incarnation for line in outside.lines("begun")})
        (folder / "both").touch()
        result = await end_all(outside, total)
        (folder / "stop").touch()
        assert (one.wait(), other.wait()) == (0, 0)
    after = await rows(outside)

    assert result == expected(total)
    assert {row.status for row in after.values()} == {"completed"}
    added = {name for name, row in after.items() if row.registration.name == "adding"}
    assert len(added) == total // 2
    assert count(outside, "work") == dict.fromkeys(added, 1)
    by_sweepers = Counter(line.key for line in outside.lines("begun") if line.incarnation in (one.pid, other.pid))
    assert by_sweepers == dict.fromkeys(added, 1), "whoever came second has run nothing"
    assert {line.incarnation for line in outside.lines("work")} == {one.pid, other.pid}, "both have worked"
    begun = {name for name, row in left.items() if row.record.first_started is not None}
    assert {name: after[name].attempts for name in added} == {name: 1 + (name in begun) for name in added}


async def test_two_thousand_open_processes_are_recovered_after_a_kill(
    folder: Path, record_property: Callable[[str, object], None]
) -> None:
    outside, total = Outside(folder), 2000
    with child("fill", folder, total) as opener:
        assert opener.line() == "ready"
        opener.kill()
    began = time.monotonic()
    async with runtime(outside) as successor:
        result = await end_all(outside, total)
        seconds = time.monotonic() - began
        assert await successor.wait_idle(PATIENCE)
        statuses = await successor.processes.drain_status()

    assert result == expected(total)
    assert statuses == {}, "nothing lives any more"
    added = {f"p-{n:04}" for n in range(0, total, 4)} | {f"p-{n:04}.1" for n in range(3, total, 4)}
    assert count(outside, "work") == dict.fromkeys(added, 1)
    record_property("perdure", f"processes: {total} open ones recovered in {seconds:.1f} s after a kill")


# ---------------------------------------------------------------------- starts while others sweep


async def test_what_is_started_in_the_moment_of_a_sweep_is_not_adopted(folder: Path) -> None:
    outside, left, new = Outside(folder), 200, 200
    with child("fill", folder, left) as opener:
        assert opener.line() == "ready"
        opener.kill()
    with child("storm", folder, "a", new) as one, child("storm", folder, "b", new) as other:
        let_go(folder, one, other)
        sums = one.line(), other.line()
        assert (one.wait(), other.wait()) == (0, 0)
    after = await rows(outside)

    assert sums == (str(sum(range(new))),) * 2
    started = [row for name, row in after.items() if name[0] in "ab"]
    assert len(started) == 2 * new
    assert Counter((row.generation, row.attempts) for row in started) == {(1, 1): 2 * new}, "each claimed once"
    added = count(outside, "add")
    assert {added[f"{who}-{n:03} {n}"] for who in "ab" for n in range(new)} == {1}
    interrupted = [f"p-{n:04}" for n in range(0, left, 4)]
    assert {count(outside, "work")[name] for name in interrupted} == {1}, "and what was left behind went on"


async def test_a_start_in_the_very_millisecond_of_a_sweep_is_not_adopted(folder: Path) -> None:
    """Neither clock moves at all, so every start and every look carry the same time."""
    outside = Outside(folder)
    async with (
        runtime(outside, clock=VirtualClock()) as one,
        runtime(outside, clock=VirtualClock()) as other,
    ):
        for n in range(50):
            starting = asyncio.create_task(one.start(quick, {"n": n}, id=f"p-{n}"))
            while not starting.done():
                await other._watcher.poll(first=True)
                await asyncio.sleep(0)  # what it reads, it reads at once
            assert await (await starting).result(PATIENCE) == n
    after = await rows(outside)

    assert {(row.generation, row.attempts) for row in after.values()} == {(1, 1)}
    assert count(outside, "add") == {f"p-{n} {n}": 1 for n in range(50)}


# ---------------------------------------------------------------------- two workers, one row


async def test_two_workers_that_start_the_same_processes_run_each_once(folder: Path) -> None:
    outside, total = Outside(folder), 300
    with child("same", folder, total) as one, child("same", folder, total) as other:
        let_go(folder, one, other)
        sums = one.line(), other.line()
        assert (one.wait(), other.wait()) == (0, 0)
    after = await rows(outside)

    assert sums == (str(sum(range(total))),) * 2, "both have every result"
    assert {(row.status, row.generation, row.attempts) for row in after.values()} == {("completed", 1, 1)}
    assert count(outside, "add") == {f"p-{n:03} {n}": 1 for n in range(total)}


async def test_wall_clocks_that_jump_cost_no_ownership(folder: Path) -> None:
    outside, total = Outside(folder), 40
    with child("jumpy", folder, total) as one, child("jumpy", folder, total) as other:
        let_go(folder, one, other)
        sums = one.line(), other.line()
        assert (one.wait(), other.wait()) == (0, 0)
    after = await rows(outside)

    assert sums == (str(sum(range(total))),) * 2
    assert {(row.status, row.generation, row.attempts) for row in after.values()} == {("completed", 1, 1)}
    assert count(outside, "add") == {f"p-{n:03} {n}": 1 for n in range(total)}


# ---------------------------------------------------------------------- prune


async def answer(asking: Awaitable[object]) -> object:
    """What was answered: a value, or the type of a refusal. Anything that is not a refusal of ours is a fault."""
    try:
        return await asking
    except (ProcessEnded, ProcessPruned) as refusal:
        return type(refusal)


async def forgotten(host: Runtime, name: str) -> None:
    """Wait until somebody has pruned it: a busy machine may keep the pruner from being quick."""
    while not isinstance(await host.processes.outcome(name, PATIENCE), NoLongerRetained):  # noqa: ASYNC110
        await asyncio.sleep(0.003)


async def test_prune_racing_everybody_gives_typed_answers_and_wakes_no_dead(folder: Path) -> None:
    outside, total = Outside(folder), 200
    answers: dict[str, Counter[object]] = {each: Counter() for each in ("outcome", "signal", "cancel", "start")}
    async with runtime(outside) as host:
        with child("prune", folder) as pruner:
            assert pruner.line() == "ready"
            for n in range(total):
                handle = await host.start(quick, {"n": n}, id=f"p-{n:03}")
                outcome = await host.processes.outcome(handle.id, PATIENCE)
                answers["outcome"][type(outcome)] += 1
                if n == total - 1:
                    await forgotten(host, handle.id)
                answers["signal"][await answer(handle.signal("late", n))] += 1
                answers["cancel"][await answer(handle.cancel())] += 1
                answers["start"][await answer(host.start(quick, {"n": n}, id=f"p-{n:03}"))] += 1
            (folder / "stop").touch()
            pruned = int(pruner.line())
            assert pruner.wait() == 0
        live = await host.processes.list(live=True)
        refused = [await answer(host.start(quick, {"n": n}, id=f"p-{n:03}")) for n in range(total)]
        gone = [await host.processes.outcome(f"p-{n:03}", PATIENCE) for n in range(total)]
        handles = {host.handle(f"p-{n:03}") for n in range(total)}
    after = await rows(outside)

    assert set(answers["outcome"]) <= {Success, NoLongerRetained}
    assert set(answers["signal"]) <= {ProcessEnded, ProcessPruned}
    assert set(answers["cancel"]) <= {"ended", ProcessPruned}
    assert answers["start"].keys() - {ProcessPruned} <= handles
    assert ProcessPruned in answers["signal"], "the pruner was quick enough"
    assert pruned == total
    assert live == []
    assert refused == [ProcessPruned] * total
    assert {type(each) for each in gone} == {NoLongerRetained}
    assert all(row.pruned is not None for row in after.values())
    assert count(outside, "add") == {f"p-{n:03} {n}": 1 for n in range(total)}, "no id was ever used twice"


async def test_a_parent_whose_child_is_pruned_under_it_has_its_value_or_is_told(folder: Path) -> None:
    outside, total = Outside(folder), 60
    async with runtime(outside) as host:
        with child("prune", folder) as pruner:
            assert pruner.line() == "ready"
            handles = [await host.start(asking, {"n": n}, id=f"p-{n:03}") for n in range(total)]
            outcomes = [await host.processes.outcome(handle.id, PATIENCE) for handle in handles]
            (folder / "stop").touch()
            assert pruner.wait() == 0

    for n, outcome in enumerate(outcomes):
        if isinstance(outcome, Failure):
            assert outcome.code == "process_no_longer_retained"
        else:
            assert outcome == Success(n + 1000) or isinstance(outcome, NoLongerRetained)
    assert count(outside, "work") == {f"p-{n:03}.1": 1 for n in range(total)}


# ---------------------------------------------------------------------- handles elsewhere


async def test_a_handle_is_as_good_in_another_process_and_whoever_waits_may_vanish(folder: Path) -> None:
    outside = Outside(folder, wait=True)
    async with runtime(outside) as owner:
        handle = await owner.start(working, id="w")
        copied = json.dumps(handle.to_json())
        with child("follow", folder, copied) as vanishing, child("follow", folder, copied) as staying:
            assert (vanishing.line(), staying.line()) == ("ready", "ready")
            vanishing.kill()
            here = asyncio.create_task(handle.result())
            await asyncio.sleep(0)
            here.cancel()
            with pytest.raises(asyncio.CancelledError):
                await here
            (folder / "go").touch()
            told = await asyncio.to_thread(staying.line)
            result = await handle.result(PATIENCE)
        row = await owner.processes.get("w")

    assert copied == '{"__handle__": "process", "id": "w"}'
    assert told == result == f"done by {os.getpid()}"
    assert (row.generation, row.record.cancel) == (1, None)
