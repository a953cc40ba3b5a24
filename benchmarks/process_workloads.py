"""W4: durable processes. Units of one step, many that wait, one that is long, and many that were interrupted."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

from workload import FileProbe, Sample, Span, Yard, give_back_memory, median, status_mb, tell_ready

from perdure import Process, ProcessContext, Runtime, process

PAGES_FULL = 12_000
"""Characters: two thousand processes with so much text fill the pages that SQLite keeps for us."""
HELD = 60
"""Processes that one Runtime of the killed OS process holds: fewer than it works on at once."""


class Ran:
    """How often steps really ran in this OS process, and where those wait that may not end."""

    steps = 0
    held = 0
    hold: asyncio.Barrier | None = None


async def note(n: int) -> int:
    Ran.steps += 1
    return n


async def hold(n: int) -> int:
    """In the first OS process it never ends."""
    Ran.held += 1
    if Ran.hold is not None:
        await Ran.hold.wait()
        await asyncio.Event().wait()
    return n


@process
async def unit(ctx: ProcessContext[Any], n: int) -> int:
    """One step, never run twice."""
    return await ctx.step(note, n)


@process
async def unit_again(ctx: ProcessContext[Any], n: int) -> int:
    """One step that may be run again after a crash."""
    return await ctx.step(note, n, recovery="rerun")


@process
async def echo(ctx: ProcessContext[Any], text: str) -> str:
    """Leaves a large row behind."""
    return text


@process
async def listener(ctx: ProcessContext[Any], n: int) -> int:
    """Waits for somebody."""
    answer: int = await ctx.wait_signal("go")
    return n + answer


@process
async def sleeper(ctx: ProcessContext[Any], until: float) -> None:
    """Waits for a moment."""
    await ctx.sleep(max(0.0, until - ctx.now().timestamp()))


@process
async def long(ctx: ProcessContext[Any], steps: int, marks: int) -> int:
    """Many steps, one after another; then one that is in flight when the OS process dies."""
    for n in range(steps):
        if n % marks == 0:
            Marks.set(n)
        await ctx.step(note, n)
    Marks.set(steps)
    return await ctx.step(hold, steps, recovery="rerun")


@process
async def three(ctx: ProcessContext[Any], n: int) -> int:
    """Three steps; in the second one the OS process dies."""
    one = await ctx.step(note, n)
    two = await ctx.step(hold, one, recovery="rerun")
    return await ctx.step(note, two)


class Marks:
    """When the long process came by: step, wall and CPU seconds."""

    seen: list[tuple[int, float, float]]

    @classmethod
    def set(cls, step: int) -> None:
        cls.seen.append((step, time.perf_counter(), time.process_time()))


async def w4(params: Sample) -> Sample:
    """Which part of it, `what` says."""
    return await WORKLOADS[params.get("what", "units")](params)


def _database(params: Sample) -> str:
    return f"{params['dir']}/bench.db"


# ---------------------------------------------------------------------- units


async def _units(params: Sample) -> Sample:
    """Units of start, one durable step and result: one at a time, then so many at once."""
    function: Process[..., Any] = unit if params.get("recovery", "once") == "once" else unit_again
    count = params["units"]
    async with Runtime(_database(params), processes=[function]) as runtime:

        async def one(n: int) -> float:
            began = time.perf_counter()
            assert await (await runtime.start(function, {"n": n})).result() == n
            return 1e3 * (time.perf_counter() - began)

        for n in range(50):
            await one(n)
        lone = [await one(n) for n in range(max(50, count // 10))]
        before, commits, probe = Ran.steps, _commits(runtime), FileProbe(_database(params))
        together = await _gated(one, count, params["at_once"])
        assert Ran.steps - before == count, f"{Ran.steps - before} steps in {count} units"
        figures = {"commits": (_commits(runtime) - commits) / count, "seq_p50_ms": median(lone)}
        return together | figures | {"seq_p99_ms": sorted(lone)[int(0.99 * len(lone))]} | probe.per(count)


async def _gated(one: Callable[[int], Awaitable[float]], count: int, at_once: int) -> Sample:
    gate = asyncio.Semaphore(at_once)

    async def gated(n: int) -> float:
        async with gate:
            return await one(n)

    gc.collect()
    Yard.take()
    with Span() as span:
        spent = await asyncio.gather(*(gated(n) for n in range(count)))
    Yard.take()
    return {"units_per_s": count / span.wall, "cpu_ms": 1e3 * span.cpu / count, "p50_ms": median(spent)}


def _commits(runtime: Runtime) -> int:
    """Transactions so far, as the store itself counts them."""
    return int(getattr(runtime.store, "batches", 0))


# ---------------------------------------------------------------------- many that wait


async def _parked(params: Sample) -> Sample:
    """Processes that wait for a signal, then for a moment: what they hold meanwhile, and how long waking takes."""
    count = params["processes"]
    async with Runtime(_database(params), processes=[echo, listener, sleeper]) as runtime:
        await _warm_up(runtime, params.get("before", 2000))
        give_back_memory()
        tasks, memory = len(asyncio.all_tasks()), status_mb("VmRSS")
        cursor = await runtime.store.last_change()
        with Span() as parking:
            await _begin(runtime, listener, [{"n": n} for n in range(count)], "l")
            await _all_parked(runtime, count, cursor)
        await asyncio.sleep(0.1)  # on disk they are; the tasks of the last ones have a step to go
        give_back_memory()
        held = {"tasks": len(asyncio.all_tasks()) - tasks, "memory_mb": status_mb("VmRSS") - memory}
        Yard.take(2)
        with Span() as told:
            await asyncio.gather(*(runtime.handle(f"l{n}").signal("go", 1) for n in range(count)))
            assert await asyncio.gather(*(runtime.handle(f"l{n}").result() for n in range(count))) == [
                n + 1 for n in range(count)
            ]
        Yard.take(2)
        until = time.time() + 1.5 * parking.wall + 2
        cursor = await runtime.store.last_change()
        await _begin(runtime, sleeper, [{"until": until}] * count, "s")
        await _all_parked(runtime, count, cursor)
        early = until - time.time()
        assert early > 0, f"they were parked {-early:.1f} s too late to be woken together"
        await asyncio.gather(*(runtime.handle(f"s{n}").result() for n in range(count)))
        woken = time.time() - until
    return held | {
        "processes": count,
        "parking_s": parking.wall,
        "park_ms": 1e3 * parking.wall / count,
        "signalled_s": told.wall,
        "due_s": woken,
    }


async def _warm_up(runtime: Runtime, count: int) -> None:
    """The same before, in small, after as much text as SQLite keeps pages: what is kept from it are caches."""
    for _ in range(count):
        handle = await runtime.start(echo, {"text": "x" * PAGES_FULL})
        assert len(await handle.result()) == PAGES_FULL
        assert len([event async for event in handle.events()]) == 3
    cursor = await runtime.store.last_change()
    await _begin(runtime, listener, [{"n": n} for n in range(count)], "w")
    await _all_parked(runtime, count, cursor)
    for n in range(count):
        await runtime.handle(f"w{n}").signal("go", 1)
    await asyncio.gather(*(runtime.handle(f"w{n}").result() for n in range(count)))


async def _begin(runtime: Runtime, function: Process[..., Any], args: list[Sample], prefix: str) -> None:
    """Start them all, some at a time."""
    for first in range(0, len(args), 200):
        page = range(first, min(first + 200, len(args)))
        await asyncio.gather(*(runtime.start(function, args[n], id=f"{prefix}{n}") for n in page))


async def _all_parked(runtime: Runtime, count: int, cursor: int) -> None:
    """Until so many that have changed since then wait, by the change feed: to look at all of them again and again would
    be most of what is measured."""
    waiting = set[str]()
    while len(waiting) < count:
        page = await runtime.processes.changes(cursor, 200)
        for change in page:
            cursor = change.cursor
            if change.row is not None and change.row.status == "waiting":
                waiting.add(change.process_id)
        if not page:
            await asyncio.sleep(0.02)


# ---------------------------------------------------------------------- one that is long


async def _long(params: Sample) -> Sample:
    """`phase` start: all its steps, and one in flight, to be killed. Then: until it has ended."""
    steps, marks = params["steps"], params["steps"] // 10
    Marks.seen = []
    if params["phase"] == "start":
        Ran.hold = asyncio.Barrier(2)
        async with Runtime(_database(params), processes=[long]) as runtime:
            Yard.take(2)
            await runtime.start(long, {"steps": steps, "marks": marks}, id="long")
            await Ran.hold.wait()
            Yard.take(2)
            tell_ready(params["ready"], _costs(marks) | {"start_yard_ms": Yard.mean()})
            await asyncio.Event().wait()
    began = time.perf_counter()
    async with Runtime(_database(params), processes=[long]) as runtime:
        assert await runtime.handle("long").result() == steps
        sample = _recovered(params, began)
        assert (Ran.steps, Ran.held) == (0, 1), f"steps that ran again: {Ran.steps}, {Ran.held}"
    return sample | {"steps": steps}


def _costs(marks: int) -> Sample:
    """What a step cost in each tenth; the first one warms up."""
    pairs = list(zip(Marks.seen, Marks.seen[1:], strict=False))
    wall, cpu = ([1e3 * (b[i] - a[i]) / marks for a, b in pairs] for i in (1, 2))
    return {
        "second": {"wall_ms": wall[1], "cpu_ms": cpu[1]},
        "last": {"wall_ms": wall[-1], "cpu_ms": cpu[-1]},
        "cpu_ms_by_tenth": [round(each, 4) for each in cpu],
    }


def _recovered(params: Sample, began: float) -> Sample:
    return {"recover_s": time.perf_counter() - began, "since_start_s": time.time() - params["t0"]}


# ---------------------------------------------------------------------- many that were interrupted


async def _interrupted(params: Sample) -> Sample:
    """`phase` start: processes that are all in their second step, to be killed. Then: until all have ended."""
    units = params["units"]
    if params["phase"] == "start":
        Ran.hold = asyncio.Barrier(units + 1)
        await _hold_all(params, units, Ran.hold)
    began = time.perf_counter()
    async with Runtime(_database(params), processes=[three]) as runtime:
        entered = time.perf_counter() - began
        values = await asyncio.gather(*(runtime.handle(f"u{n}").result() for n in range(units)))
        sample = _recovered(params, began) | {"launch_s": entered, "units": units}
        assert values == list(range(units))
        assert (Ran.held, Ran.steps) == (units, units), f"steps after the restart: {Ran.held}, {Ran.steps}"
    return sample


async def _hold_all(params: Sample, units: int, together: asyncio.Barrier) -> None:
    """As many Runtimes as it takes, all in this OS process: each works on so many processes at once, and no more.

    None of them looks for work of the others.
    """
    runtimes = []
    for first in range(0, units, HELD):
        runtime = Runtime(_database(params), processes=[three], recover=False)
        runtimes.append(await runtime.__aenter__())
        page = range(first, min(first + HELD, units))
        await asyncio.gather(*(runtime.start(three, {"n": n}, id=f"u{n}") for n in page))
    await together.wait()
    tell_ready(params["ready"], {"runtimes": len(runtimes)})
    await asyncio.Event().wait()


WORKLOADS: dict[str, Callable[[Sample], Awaitable[Sample]]] = {
    "units": _units,
    "parked": _parked,
    "long": _long,
    "interrupted": _interrupted,
}
