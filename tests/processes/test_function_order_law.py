"""The law of order: any function with shared memory, replayed from any part of its journal, sees what it saw.

A program is run live, with steps that end in an order of their own; what its branches see of each other is its result,
and the argument of its steps. Then its journal is cut at every record. From what is left it goes on to an end, perhaps
another one than before, with other steps first; and its whole journal then leads to that end again, with nothing done.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure import ProcessContext, Runtime, process
from perdure.model.codec import encode
from perdure.model.record import StepRecord
from perdure.model.session import Node
from perdure.model.write import Advance
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import VirtualClock
from perdure.testing.clock import EPOCH_MS
from tests.fuzzing import cases
from tests.kit import SOON, crash
from tests.processes.functions import journal_of

EXAMPLES = cases(25, 1_000)

Ctx = ProcessContext["Outside"]
Program: TypeAlias = Any
"""A list of calls, each a list of its name and, for those that hold programs, these."""


class Outside:
    """Where steps happen: each ends after so many passes of the event loop."""

    def __init__(self) -> None:
        self.ran = 0
        self.begun = asyncio.Event()

    async def act(self, passes: int, seen: list[Any]) -> int:
        self.ran += 1
        for _ in range(passes):
            await asyncio.sleep(0)
        return passes


class Shared:
    """What the branches of a function share. `log` is what they have seen, in order."""

    def __init__(self) -> None:
        self.log, self.count = list[Any](), 0
        self.lock, self.room = asyncio.Lock(), asyncio.Semaphore(2)
        self.queue: asyncio.Queue[str] = asyncio.Queue()

    def note(self, path: str, what: Any) -> None:
        self.count += 1
        self.log.append([path, what, self.count])


async def obey(ctx: Ctx, shared: Shared, program: Program, path: str) -> int:
    for number, call in enumerate(program):
        shared.note(f"{path}{number}", await one(ctx, shared, call, f"{path}{number}"))
    return len(program)


async def one(ctx: Ctx, shared: Shared, call: Any, path: str) -> Any:  # a table of calls
    name, *inner = call
    match name:
        case "step":
            # What it has seen is its argument: a replay that saw something else diverges.
            return await ctx.step(ctx.deps.act, inner[0], shared.log[-1:], recovery="rerun")
        case "now":
            ctx.now()
            return "now"
        case "sleep":
            return await ctx.sleep(0.5)
        case "pass":
            await asyncio.sleep(0)
            return "passed"
        case "put":
            shared.queue.put_nowait(path)
            return "put"
        case "get":
            return shared.queue.get_nowait() if not shared.queue.empty() else None
        case "lock":
            async with shared.lock:
                return await obey(ctx, shared, inner[0], f"{path}.")
        case "room":
            async with shared.room:
                return await obey(ctx, shared, inner[0], f"{path}.")
        case _:
            works = [obey(ctx, shared, program, f"{path}.{n}.") for n, program in enumerate(inner)]
            if name == "any":
                return list(await ctx.any(*works))
            return await (ctx.gather(*works) if name == "gather" else ctx.all(*works))


@process(name="obeying")
async def obeying(ctx: Ctx, program: list[Any]) -> list[Any]:
    shared = Shared()
    await obey(ctx, shared, program, "")
    return shared.log


@process(name="obeying")
async def waiting(ctx: Ctx, program: list[Any]) -> None:
    """In its place while its journal is written."""
    ctx.deps.begun.set()
    await asyncio.Event().wait()


# ---------------------------------------------------------------------- programs

steps = st.integers(0, 6).map(lambda passes: ["step", passes])
leaves = st.one_of(steps, steps, st.sampled_from([["now"], ["sleep"], ["pass"], ["put"], ["get"]]))


def holding(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    programs = st.lists(inner, min_size=1, max_size=3)
    joins = st.sampled_from(["gather", "gather", "all", "any"])
    return st.one_of(
        st.tuples(st.sampled_from(["lock", "room"]), st.lists(leaves, max_size=2)).map(list),
        st.tuples(joins, programs, programs).map(list),
        st.tuples(joins, programs, programs, programs).map(list),
    )


programs = st.lists(st.recursive(leaves, holding, max_leaves=9), min_size=1, max_size=4)


# ---------------------------------------------------------------------- lives


async def live(program: Program) -> tuple[list[Any], list[StepRecord]]:
    outside = Outside()
    async with Runtime("memory", processes=[obeying], deps=outside, clock=VirtualClock(auto=True)) as runtime:
        handle = await runtime.start(obeying, {"program": program}, id="p")
        return await handle.result(SOON), await journal_of(runtime, handle)


async def left_with(program: Program, records: list[StepRecord]) -> MemoryRows:
    """A store in which a worker has died on the process, with these records written."""
    rows, outside = MemoryRows(), Outside()
    runtime = Runtime(MemoryStore(rows), processes=[waiting], deps=outside)
    await runtime.__aenter__()
    try:
        await runtime.start(waiting, {"program": program}, id="p")
        await outside.begun.wait()
        nodes = tuple(Node(number, encode(record)) for number, record in enumerate(records))
        await runtime.store.write(Advance(runtime._work.runs["p"].scope, 0, nodes, first=True))
    finally:
        await crash(runtime)
    return rows


async def gone_on(program: Program, records: list[StepRecord]) -> tuple[list[Any], list[StepRecord], int]:
    """How it ends from these records on, with what journal, and how many steps that took."""
    rows, outside = await left_with(program, records), Outside()
    clock = VirtualClock(max((each.at for each in records), default=EPOCH_MS), auto=True)
    async with Runtime(MemoryStore(rows), processes=[obeying], deps=outside, clock=clock) as runtime:
        handle = runtime.handle("p")
        return await handle.result(SOON), await journal_of(runtime, handle), outside.ran


async def check(program: Program) -> None:
    wanted, records = await live(program)
    for size in range(len(records)):
        ended, journal, _ = await gone_on(program, records[:size])
        assert journal[:size] == records[:size]
        assert await gone_on(program, journal) == (ended, journal, 0)
    assert await gone_on(program, records) == (wanted, records, 0)


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(program=programs)
def test_a_function_with_shared_memory_ends_like_its_replay_from_every_cut_of_its_journal(program: Program) -> None:
    asyncio.run(check(program))
