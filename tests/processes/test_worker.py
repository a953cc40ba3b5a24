"""Who works on processes: places, intake, takeovers, leaving."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from typing import Any

import pytest

from perdure import Process, ProcessContext, Retry, Runtime, process, tool
from perdure.engine.lease import LeaseTerms
from perdure.engine.runner import Stage
from perdure.errors import InvalidDefinition, ProcessStuck, RuntimeClosed
from perdure.model.process import Cancelled, Success
from perdure.model.record import Done
from perdure.ports.process import EngineRun
from perdure.testing import VirtualClock
from tests.kit import SOON, Place, agent_calling, crash, until
from tests.plugins.test_engines import Echo
from tests.processes.functions import journal_of


class Hall:
    """Where steps of these tests wait, and are counted."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self.done: Counter[int] = Counter()
        self.failed = False
        self.open = asyncio.Event()

    async def visit(self, n: int) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await self.open.wait()
        self.inside -= 1
        self.done[n] += 1
        return n

    async def pass_by(self, n: int) -> int:
        return n

    async def fail_then_visit(self, n: int) -> int:
        if not self.failed:
            self.failed = True
            raise Retry("not yet", after=0)
        return await self.visit(n)


@process
async def visiting(ctx: ProcessContext[Hall], n: int) -> int:
    return await ctx.step(ctx.deps.visit, n)


@process
async def calling(ctx: ProcessContext) -> Any:
    return await ctx.wait_signal("go")


@process
async def sleeping(ctx: ProcessContext, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "awake"


@process
async def faulty(ctx: ProcessContext) -> None:
    raise ValueError("no such thing")


# ---------------------------------------------------------------------- places


async def test_no_more_processes_run_at_once_than_there_are_places(place: Place) -> None:
    hall = Hall()
    async with place.runtime(processes=[visiting], deps=hall, concurrency=3) as runtime:
        handles = [await runtime.start(visiting, {"n": n}) for n in range(20)]
        await until(lambda: hall.inside == 3)
        hall.open.set()
        results = [await handle.result(SOON) for handle in handles]

    assert results == list(range(20))
    assert hall.most == 3
    assert set(hall.done.values()) == {1}


async def test_what_only_waits_has_given_up_its_place(place: Place) -> None:
    hall = Hall()
    async with place.runtime(processes=[visiting, calling], deps=hall, concurrency=1) as runtime:
        waiting = await runtime.start(calling)
        visitor = await runtime.start(visiting, {"n": 1})
        hall.open.set()

        assert await visitor.result(SOON) == 1
        await waiting.signal("go", "now")
        assert await waiting.result(SOON) == "now"


@process
async def parenting(ctx: ProcessContext) -> Any:
    return await (await ctx.start(calling)).result()


@tool(approval="ask")
async def pay() -> str:
    """Pay."""
    return "paid"


@pytest.mark.parametrize(
    ("what", "args"),
    [
        pytest.param(calling, {}, id="a signal"),
        pytest.param(sleeping, {"seconds": 0.9}, id="a short sleep, in memory"),
        pytest.param(sleeping, {"seconds": 3600}, id="a long sleep"),
        pytest.param(parenting, {}, id="a child"),
        pytest.param("payer", {"input": "pay"}, id="an approval"),
    ],
)
async def test_64_processes_that_wait_leave_room_for_the_next(place: Place, what: Any, args: dict[str, Any]) -> None:
    hall, payer = Hall(), agent_calling("pay", name="payer", tools=[pay])
    hall.open.set()
    functions = [calling, sleeping, parenting, visiting]
    async with place.runtime(payer, processes=functions, deps=hall, clock=VirtualClock(), grace=0) as runtime:
        for _ in range(64):
            await runtime.start(what, args)

        assert await (await runtime.start(visiting, {"n": 65})).result(SOON) == 65


@process
async def napping(ctx: ProcessContext[Hall], n: int) -> int:
    await ctx.sleep(0.3)
    return await ctx.step(ctx.deps.visit, n, recovery="once")


async def test_a_process_that_goes_on_after_a_nap_waits_for_a_place(place: Place) -> None:
    hall = Hall()
    async with place.runtime(processes=[napping], deps=hall, concurrency=3) as runtime:
        handles = [await runtime.start(napping, {"n": n}) for n in range(20)]
        await until(lambda: hall.inside == 3 and runtime._work.admission.waiting())
        hall.open.set()
        results = [await handle.result(SOON) for handle in handles]

    assert results == list(range(20))
    assert hall.most == 3


@process
async def napping_twice(ctx: ProcessContext[Hall]) -> list[int]:
    return [*await ctx.gather(nap_and_visit(ctx, 1), nap_and_visit(ctx, 2))]


async def nap_and_visit(ctx: ProcessContext[Hall], n: int) -> int:
    await ctx.sleep(0.2)
    return await ctx.step(ctx.deps.pass_by, n)


async def test_branches_that_go_on_after_a_nap_wait_for_one_place_of_their_process(place: Place) -> None:
    """Both wake while another process has the only place. It is enough for both."""
    hall, clock = Hall(), VirtualClock()
    options = {"processes": [napping_twice, visiting], "deps": hall, "concurrency": 1, "clock": clock}
    async with place.runtime(**options) as runtime:
        napping_pair = await runtime.start(napping_twice)
        await clock.wait_sleeping(1)
        visitor = await runtime.start(visiting, {"n": 0})
        await until(lambda: hall.inside == 1)
        clock.advance(0.3)
        await until(lambda: runtime._work.admission.waiting())
        hall.open.set()

        assert await visitor.result(SOON) == 0
        assert await napping_pair.result(SOON) == [1, 2]


async def test_a_cancel_reaches_a_process_that_waits_for_a_place(place: Place) -> None:
    hall = Hall()
    async with place.runtime(processes=[napping, visiting], deps=hall, concurrency=1) as runtime:
        waiting = await runtime.start(napping, {"n": 1})
        visitor = await runtime.start(visiting, {"n": 0})
        await until(lambda: hall.inside == 1 and runtime._work.admission.waiting())
        await waiting.cancel("enough", by="me")

        assert await waiting.outcome(SOON) == Cancelled("me", "enough")
        hall.open.set()
        assert await visitor.result(SOON) == 0


async def test_leaving_does_not_wait_for_places(place: Place) -> None:
    hall = Hall()
    async with place.runtime(processes=[napping], deps=hall, concurrency=1, grace=0) as runtime:
        handles = [await runtime.start(napping, {"n": n}) for n in range(3)]
        await until(lambda: hall.inside == 1 and runtime._work.admission.waiting())
    hall.open.set()
    async with place.runtime(processes=[napping], deps=hall) as runtime:
        outcomes = [await runtime.handle(handle.id).outcome(SOON) for handle in handles]

    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Failure", "Success", "Success"]


@process
async def napping_for(ctx: ProcessContext[Hall], n: int, seconds: float) -> int:
    await ctx.sleep(seconds)
    return await ctx.step(ctx.deps.visit, n)


async def test_while_it_is_being_left_no_more_work_at_once_than_there_are_places(place: Place) -> None:
    """One comes to stand in line then: that is no reason to let those go on who stand there."""
    hall, clock = Hall(), VirtualClock()
    runtime = place.runtime(processes=[napping_for], deps=hall, concurrency=1, clock=clock, grace=SOON)
    await runtime.__aenter__()
    waiting = runtime._work.admission.waiting
    for n, seconds in enumerate((0.1, 0.1, 0.5)):
        await runtime.start(napping_for, {"n": n, "seconds": seconds})
    await clock.wait_sleeping(3)
    clock.advance(0.2)
    await until(lambda: hall.inside == 1 and waiting() == 1)
    leaving = asyncio.create_task(runtime.__aexit__(None, None, None))
    await asyncio.sleep(0)
    clock.advance(0.5)
    await until(lambda: waiting() == 2 or hall.inside > 1)
    hall.open.set()
    await leaving

    assert (hall.most, hall.done) == (1, {0: 1, 1: 1, 2: 1})


async def test_parked_processes_are_no_tasks(place: Place) -> None:
    async with place.runtime(processes=[calling]) as runtime:
        handles = [await runtime.start(calling) for _ in range(100)]
        await until(lambda: not runtime._work.runs and len(runtime._supervisor) == 0)

        for handle in handles:
            await handle.signal("go", 1)
        assert [await handle.result(SOON) for handle in handles] == [1] * 100


# ---------------------------------------------------------------------- taking over


async def test_an_interrupted_process_is_taken_up_by_the_next_runtime(file: Place) -> None:
    async def interrupted() -> str:
        runtime = file.runtime(processes=[calling])
        await runtime.__aenter__()
        handle = await runtime.start(calling)
        await handle.signal("go", "still here")
        await crash(runtime)
        return handle.id

    name = await interrupted()
    async with file.runtime(processes=[calling]) as runtime:
        assert await runtime.handle(name).result(SOON) == "still here"


async def test_what_nobody_here_can_run_is_left_alone(place: Place) -> None:
    async with place.runtime(processes=[calling], recover=False) as runtime:
        runtime._work.mode.advance(Stage.DRAINING)
        handle = await runtime.start(calling)
    async with place.runtime(processes=[faulty]) as other:
        await other.start(faulty)
        await other.wait_idle(SOON)
        row = await other.processes.get(handle.id)

    assert (row.status, row.owner, row.attempts) == ("running", None, 0)


@process
async def rerunning(ctx: ProcessContext[Hall], n: int) -> int:
    return await ctx.step(ctx.deps.visit, n, recovery="rerun")


@process
async def rerunning_beside(ctx: ProcessContext[Hall], n: int) -> int:
    found = await ctx.gather(ctx.step(ctx.deps.visit, n, recovery="rerun"), ctx.wait_signal("never", timeout=3600))
    return int(found[0])


@process
async def rerunning_twice(ctx: ProcessContext[Hall], n: int) -> int:
    step = functools.partial(ctx.step, ctx.deps.visit, recovery="rerun")
    return sum(await ctx.gather(step(n), step(0)))


@process
async def rerunning_after_a_failure(ctx: ProcessContext[Hall], n: int) -> int:
    return await ctx.step(ctx.deps.fail_then_visit, n, recovery="rerun", retries=1)


KILLED = [(rerunning, 1), (rerunning_beside, 1), (rerunning_twice, 2), (rerunning_after_a_failure, 1)]
"""Functions that kill their worker, with how many steps are under way then."""


async def die_of(file: Place, hall: Hall, function: Process[..., Any], inside: int, start: bool) -> None:
    """One life that ends while steps are under way."""
    runtime = file.runtime(processes=[function], deps=hall)
    await runtime.__aenter__()
    if start:
        await runtime.start(function, {"n": 1}, id="v-1")
    await until(lambda: hall.inside == inside)
    hall.inside = 0
    await crash(runtime)


@pytest.mark.parametrize(("function", "inside"), KILLED, ids=["alone", "beside a wait", "beside a step", "failed"])
async def test_three_workers_that_die_on_a_process_as_their_only_suspect_leave_it_stuck(
    file: Place, function: Process[..., Any], inside: int
) -> None:
    hall = Hall()
    for start in (True, False, False, False, False):
        await die_of(file, hall, function, inside, start)
    async with file.runtime(processes=[function], deps=hall) as runtime:
        hall.open.set()
        with pytest.raises(ProcessStuck, match="3 workers in a row"):
            await runtime.handle("v-1").result(SOON)
        assert hall.done == {}
        assert await runtime.processes.resume("v-1")
        if function is rerunning_beside:
            await until(lambda: hall.done)
            await runtime.handle("v-1").signal("never", 1)
        assert await runtime.handle("v-1").result(SOON) == 1
        assert not await runtime.processes.resume("v-1")
        done = [each for each in await journal_of(runtime, runtime.handle("v-1")) if isinstance(each, Done)]

    assert hall.done[1] == 1
    failed = int(function is rerunning_after_a_failure)
    assert [(d.attempts, d.repeated) for d in done if d.kind == "step"] == [(6 + failed, 5)] * inside


async def test_progress_in_another_branch_lets_a_process_live_that_kills_its_workers(file: Place) -> None:
    """Three deaths in a row count, and these are not in a row: something was done between them."""
    hall, heard = Hall(), set[int]()

    @process
    async def listening(ctx: ProcessContext[Hall], n: int) -> int:
        async def listen() -> None:
            for life in range(1, 7):
                await ctx.wait_signal(f"life {life}")
                await ctx.step(heard.add, life, recovery="rerun")  # that it heard is on disk before this begins

        found = await ctx.gather(ctx.step(ctx.deps.visit, n, recovery="rerun"), listen())
        return int(found[0])

    for life in range(1, 7):
        runtime = file.runtime(processes=[listening], deps=hall)
        await runtime.__aenter__()
        handle = await runtime.start(listening, {"n": 1}, id="v-1") if life == 1 else runtime.handle("v-1")
        await until(lambda: hall.inside == 1)
        hall.inside = 0
        await handle.signal(f"life {life}")
        await until(functools.partial(heard.__contains__, life))
        await crash(runtime)
    hall.open.set()
    async with file.runtime(processes=[listening], deps=hall) as runtime:
        assert await runtime.handle("v-1").result(SOON) == 1


async def test_a_silent_worker_is_relieved_after_its_term_and_changes_nothing_then(place: Place) -> None:
    hall, clock = Hall(), VirtualClock()
    terms = LeaseTerms(term=30, renewal=10)
    async with (
        place.runtime(processes=[rerunning], deps=hall, clock=clock, lease=terms) as silent,
        place.runtime(processes=[rerunning], deps=hall, clock=clock, lease=terms) as other,
    ):
        handle = await silent.start(rerunning, {"n": 1}, id="v-1")
        await until(lambda: hall.inside == 1)
        silent._pulse.stop()  # as a stopped process: it neither renews nor looks
        await silent._background.stop()
        await other._worker.gone()
        clock.advance(31)
        other._worker.renew()
        await until(lambda: hall.inside == 2)
        hall.open.set()

        assert await other.handle(handle.id).result(SOON) == 1
        await until(lambda: not silent._work.runs)
        row = await other.processes.get("v-1")
        assert (row.generation, row.attempts) == (2, 2)
        assert [e.type async for e in other.handle("v-1").events()].count("process.completed") == 1


# ---------------------------------------------------------------------- time


async def test_a_sleeping_process_is_taken_up_when_its_time_has_come(place: Place) -> None:
    clock = VirtualClock()
    async with place.runtime(processes=[sleeping], clock=clock) as runtime:
        handle = await runtime.start(sleeping, {"seconds": 3600})
        await until(lambda: not runtime._work.runs)
        clock.advance(3599)
        assert await handle.status() == "waiting"
        clock.advance(2)

        assert await handle.result(SOON) == "awake"


async def test_many_that_are_due_at_once_are_all_taken_up(place: Place) -> None:
    clock = VirtualClock()
    async with place.runtime(processes=[sleeping], clock=clock, concurrency=4) as runtime:
        handles = [await runtime.start(sleeping, {"seconds": 60}) for _ in range(200)]

        async def all_parked() -> bool:
            return len(await runtime.processes.list("waiting", limit=1000)) == 200

        await until(all_parked)
        clock.advance(61)

        assert [await handle.result(SOON) for handle in handles] == ["awake"] * 200


# ---------------------------------------------------------------------- leaving


async def test_leaving_leaves_a_process_to_the_next_runtime(place: Place) -> None:
    hall = Hall()
    async with place.runtime(processes=[rerunning], deps=hall, grace=0) as runtime:
        handle = await runtime.start(rerunning, {"n": 1})
        await until(lambda: hall.inside == 1)
    async with place.runtime(processes=[rerunning], deps=hall) as runtime:
        hall.open.set()
        assert await runtime.handle(handle.id).result(SOON) == 1
        row = await runtime.processes.get(handle.id)

    assert (row.attempts, row.takeovers) == (1, 0)


async def test_draining_begins_nothing_new_and_ends_what_runs(place: Place) -> None:
    hall = Hall()
    async with place.runtime(processes=[visiting], deps=hall, concurrency=1) as runtime:
        first = await runtime.start(visiting, {"n": 1})
        second = await runtime.start(visiting, {"n": 2})
        await until(lambda: hall.inside == 1)
        draining = asyncio.create_task(runtime.drain())
        await asyncio.sleep(0)
        hall.open.set()

        assert await draining
        assert await first.result(SOON) == 1
        assert await second.status() == "queued"
        assert hall.done == {1: 1}


async def test_waiting_until_idle_counts_processes(place: Place) -> None:
    hall = Hall()
    async with place.runtime(processes=[visiting], deps=hall) as runtime:
        handle = await runtime.start(visiting, {"n": 1})
        assert not await runtime.wait_idle(0.05)
        hall.open.set()
        assert await runtime.wait_idle(SOON)
        assert await handle.status() == "completed"


async def test_a_closed_runtime_starts_nothing() -> None:
    runtime = Runtime("memory", processes=[calling])
    async with runtime:
        pass
    with pytest.raises(RuntimeClosed):
        await runtime.start(calling)
    with pytest.raises(RuntimeClosed):
        runtime.handle("p")


async def test_a_start_whose_caller_goes_away_is_worked_on(file: Place) -> None:
    hall = Hall()
    hall.open.set()
    async with file.runtime(processes=[visiting], deps=hall) as runtime:
        starting = asyncio.create_task(runtime.start(visiting, {"n": 1}, id="v-1"))
        await asyncio.sleep(0)  # the write is on its way
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        # Whether the write lands is the disk's to say; if it does, the process is not left to itself.
        await runtime._worker.speak()
        if await runtime.store.process("v-1") is not None:
            assert await runtime.handle("v-1").result(SOON) == 1


# ---------------------------------------------------------------------- engines


async def test_an_engine_may_be_added_and_a_kind_has_one() -> None:
    async with Runtime("memory", processes=[calling]) as runtime:
        runtime._work.serve([Echo()])
        handle = await runtime.start("echo", {"x": 1})

        assert await handle.result(SOON) == {"x": 1}
        with pytest.raises(InvalidDefinition, match="'echo'"):
            runtime._work.serve([Echo()])


@pytest.mark.parametrize("fault", [RuntimeError, SystemExit])
async def test_a_fault_of_an_engine_leaves_its_process_stuck_and_harms_no_other(
    place: Place, fault: type[BaseException]
) -> None:
    class Broken(Echo):
        async def run(self, run: EngineRun) -> Success:
            raise fault("out of order")

    async with place.runtime(processes=[calling]) as runtime:
        runtime._work.serve([Broken()])
        broken, fine = await runtime.start("echo"), await runtime.start(calling)
        with pytest.raises(ProcessStuck, match="out of order"):
            await broken.result(SOON)
        assert await broken.status() == "stuck"
        assert [row.id for row in await runtime.processes.list("stuck")] == [broken.id]
        await fine.signal("go", 1)

        assert await fine.result(SOON) == 1
        assert await broken.cancel("give up") == "requested"
        assert await broken.status() == "cancelled"
