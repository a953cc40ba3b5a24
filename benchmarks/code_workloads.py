"""WM: Python of a model. What a cell costs beside the same calls as tool calls, a resume, and an idle session."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence

from workload import Sample, median

from perdure import Agent, Runtime, ToolCall, tool
from perdure.codemode.monty import MontyExecutor
from perdure.model.code import CellEnd, CPython, Given, Paused
from perdure.model.llm import ModelRequest
from perdure.testing import FunctionModel

KEY = bytes(32)
NOW = 1_700_000_000_000
ANSWER = 0.05
"""Seconds of a model that answers quickly."""


@tool
async def search(query: str) -> str:
    """Search."""
    return query * 2


async def wm(params: Sample) -> Sample:
    what: dict[str, Callable[[Sample], Awaitable[Sample]]] = {
        "cells": _cells,
        "resume": _resume,
        "idle": _idle,
        "cpython": _cpython,
    }
    return await what[params["what"]](params)


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _answering(first: str | list[ToolCall], steps: int, seconds: float = 0) -> FunctionModel:
    """In the only turn of a session: `first` so many times, then the end; each answer takes `seconds`."""

    async def answer(request: ModelRequest) -> str | list[ToolCall]:
        if seconds:
            await asyncio.sleep(seconds)
        return "done" if sum(message.role == "assistant" for message in request.messages) >= steps else first

    return FunctionModel(answer)


async def _cells(params: Sample) -> Sample:
    """The same calls from a cell and as tool calls, turn by turn on one store: CPU of the runtime and wall, medians.

    The CPU is that of a model which answers at once; the wall of ten calls also that of one which takes `ANSWER`.
    """
    one, ten = [ToolCall(name="search", args={"query": "tea"})], _fence("for i in range(10):\n    await search('tea')")
    agents = {
        "call": Agent(_answering(one, 1), name="call", tools=[search]),
        "calls": Agent(_answering(one, 10), name="calls", tools=[search]),
        "cell": Agent(_answering(_fence("x = await search('tea')"), 1), name="cell", tools=[search], mode="code"),
        "loop": Agent(_answering(ten, 1), name="loop", tools=[search], mode="code"),
        "slow calls": Agent(_answering(one, 10, ANSWER), name="slow-calls", tools=[search]),
        "slow loop": Agent(_answering(ten, 1, ANSWER), name="slow-loop", tools=[search], mode="code"),
    }
    cpu: dict[str, list[float]] = {name: [] for name in agents}
    wall: dict[str, list[float]] = {name: [] for name in agents}
    async with Runtime(f"{params['dir']}/agent.db", agents=list(agents.values())) as runtime:
        for name in agents:
            await (await runtime.session(f"{name}-warm", agent=agents[name])).run("go")
        for number in range(params["times"]):
            for name in agents:
                if name.startswith("slow") and number % 10:
                    continue
                session = await runtime.session(f"{name}{number}", agent=agents[name])
                began, spent = time.perf_counter(), time.process_time()
                await session.run("go")
                cpu[name].append((time.process_time() - spent) * 1000)
                wall[name].append((time.perf_counter() - began) * 1000)
    return {
        "above_cpu_ms": median(cpu["cell"]) - median(cpu["call"]),
        "above_wall_ms": median(wall["cell"]) - median(wall["call"]),
        "loop_cpu_ms": median(cpu["loop"]),
        "calls_cpu_ms": median(cpu["calls"]),
        "slow_loop_ms": median(wall["slow loop"]),
        "slow_calls_ms": median(wall["slow calls"]),
    }


async def _cpython(params: Sample) -> Sample:
    """A turn with one call from a cell of CPython against the same tool call, in sessions that go on, so that the
    process of the REPL is there; and the first such turn of a session, which begins it. Medians."""

    def model(first: str | list[ToolCall]) -> FunctionModel:
        return FunctionModel(lambda request: first if request.messages[-1].text == "go" else "done")

    fence = _fence("x = await search('tea')")
    agents = [
        Agent(model([ToolCall(name="search", args={"query": "tea"})]), name="call", tools=[search]),
        Agent(model(fence), name="cell", tools=[search], mode="code", code=CPython()),
    ]
    cpu: dict[str, list[float]] = {"call": [], "cell": []}
    wall: dict[str, list[float]] = {"call": [], "cell": [], "first": []}
    async with Runtime(f"{params['dir']}/agent.db", agents=agents) as runtime:
        sessions = {each.name: await runtime.session(each.name, agent=each.name) for each in agents}
        for session in sessions.values():
            await session.run("go")
        for _ in range(params["times"]):
            for name, session in sessions.items():
                began, spent = time.perf_counter(), time.process_time()
                await session.run("go")
                cpu[name].append((time.process_time() - spent) * 1000)
                wall[name].append((time.perf_counter() - began) * 1000)
        for number in range(max(params["times"] // 6, 2)):
            session = await runtime.session(f"first{number}", agent="cell")
            began = time.perf_counter()
            await session.run("go")
            wall["first"].append((time.perf_counter() - began) * 1000)
    return {
        "above_cpu_ms": median(cpu["cell"]) - median(cpu["call"]),
        "above_wall_ms": median(wall["cell"]) - median(wall["call"]),
        "first_ms": median(wall["first"]),
    }


async def _begun(executor: MontyExecutor, cells: Sequence[str]) -> bytes:
    """The dump of a REPL that waits in the last of these cells."""
    repl = await executor.open()
    for code in cells:
        step = await repl.begin(code, [search.spec], at=NOW, seed="s")
    assert isinstance(step, Paused)
    saved = await repl.dump("here")
    await repl.close()
    return saved


async def _resume(params: Sample) -> Sample:
    """From a dump with a megabyte of variables to the end of its cell, on workers that are warm."""
    executor, took = MontyExecutor(key=KEY), list[float]()
    saved = await _begun(executor, ["big = 'x' * 500_000", "y = await search('a')"])
    for _ in range(params["times"]):
        began = time.perf_counter()
        repl = await executor.open(saved, [search.spec])
        assert isinstance(await repl.resume(Given(0, "b")), CellEnd)
        took.append((time.perf_counter() - began) * 1000)
        await repl.close()
    await executor.aclose()
    return {"resume_ms": median(took), "dump_kb": len(saved) / 1000}


async def _idle(params: Sample) -> Sample:
    """Sessions that have run a cell, and do nothing."""
    executor = MontyExecutor(key=KEY)
    await _begun(executor, ["await search('a')"])
    repls = []
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(params["sessions"]):
        repl = await executor.open()
        await repl.begin("rows = [1, 2, 3]\nname = 'tea'", [search.spec], at=NOW, seed="s")
        repls.append(repl)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    workers = executor.workers
    await executor.aclose()
    return {"held_kb": held / len(repls) / 1024, "workers": workers}
