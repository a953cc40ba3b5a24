"""Perdure in the comparison: the workloads on our own runtime, each checking its own work.

python benchmarks/perdure_adapter.py w1 '{"shapes": ["t1"], "seconds": 1}'
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import workload
from workload import (
    ANSWER,
    ARGS,
    DELTA,
    DELTAS,
    QUESTION,
    SHAPES,
    SYSTEM,
    TOOL,
    FileProbe,
    Sample,
    Span,
    Yard,
    measure_deltas,
    measure_slices,
    measure_together,
    measure_turns,
    median,
    tell_ready,
    weather,
)

from perdure import Agent, Limit, ModelRequest, ModelResponse, Runtime, Session, ToolCall, Usage, tool
from perdure.model.event import TextDelta
from perdure.model.plugin import PluginSnapshot
from perdure.plugins.hooks import Plugin, SessionContext, SnapshotReader, SnapshotWriter, ToolCallContext
from perdure.testing import FunctionModel

USAGE = Usage(input=50, output=10)


@tool
async def get_weather(city: str) -> dict[str, object]:
    """Weather in a city."""
    return weather(city)


def results_so_far(messages: Any) -> int:
    """Tool results since the last thing the user said: a model decides by looking at its request only."""
    done = 0
    for message in reversed(messages):
        if message.role == "user":
            break
        done += message.role == "tool"
    return done


class Ids:
    """Provider ids of calls, unique in the process."""

    last = 0

    @classmethod
    def next(cls) -> str:
        cls.last += 1
        return f"call_{cls.last}"


def fake_model(shape: str, delay: float = 0.0) -> FunctionModel:
    rounds, calls = SHAPES[shape]

    async def respond(request: ModelRequest) -> ModelResponse:
        if delay:
            await asyncio.sleep(delay)
        if results_so_far(request.messages) < rounds * calls:
            asked = tuple([ToolCall(Ids.next(), TOOL, ARGS) for _ in range(calls)])
            return ModelResponse(tool_calls=asked, usage=USAGE, stop="tool_calls")
        return ModelResponse(ANSWER, usage=USAGE)

    return FunctionModel(respond)


def agent_of(shape: str, delay: float = 0.0, tools: Sequence[Any] = (), plugins: Sequence[Plugin] = ()) -> Agent[str]:
    model = fake_model(shape, delay)
    return Agent(model, instructions=SYSTEM, tools=[get_weather, *tools], plugins=plugins)


def database(params: Sample) -> str:
    return os.path.join(params["dir"], "bench.db")


def store_of(params: Sample) -> str:
    return database(params) if "dir" in params else "memory"


def turn_in_new_session(runtime: Runtime) -> Callable[[], Coroutine[Any, Any, None]]:
    async def turn() -> None:
        session = await runtime.session()
        assert (await session.run(QUESTION)).text == ANSWER

    return turn


# ---------------------------------------------------------------------- turns


async def w1(params: Sample) -> Sample:
    """A turn in memory, a new session for each."""
    sample: Sample = {}
    for shape in params["shapes"]:
        async with Runtime("memory", agents=[agent_of(shape)]) as runtime:
            turn = turn_in_new_session(runtime)
            for _ in range(50):
                await turn()
            sample[shape] = await measure_turns(turn, params["seconds"], _calls(shape))
    return sample


async def w2(params: Sample) -> Sample:
    """The same on a file: every step synced before the next. `at_once` sessions, when given, share the writer."""
    if "at_once" in params:
        return await _busy(params)
    sample: Sample = {}
    for shape in params["shapes"]:
        async with Runtime(database(params), agents=[agent_of(shape)]) as runtime:
            turn = turn_in_new_session(runtime)
            for _ in range(20):
                await turn()
            # Whole cycles of the WAL's checkpoint, so that its bytes are neither left out nor counted twice. The first
            # cycle apart: the WAL grows in it, and each of its syncs has the length of a file to write down as well.
            least = params.get("turns", 1024) // SHAPES[shape].rounds
            growing = await measure_turns(turn, 0, _calls(shape), least // 3)
            for _ in range(least // 5):
                await turn()
            commits, probe = _commits(runtime), FileProbe(database(params))
            measured = await measure_turns(turn, params["seconds"], _calls(shape), least)
            turns = int(measured["turns"])
            sample[shape] = measured | probe.per(turns) | {"commits": (_commits(runtime) - commits) / turns}
            sample[shape]["growing"] = growing
    return sample


async def _busy(params: Sample) -> Sample:
    """Hosts that run turn after turn, all at once."""
    hosts = params["at_once"]
    async with Runtime(database(params), agents=[agent_of("t1")]) as runtime:
        turn = turn_in_new_session(runtime)

        async def host(until: float) -> int:
            done = 0
            while time.perf_counter() < until:
                await turn()
                done += 1
            return done

        async def some(until: float, least: int) -> int:
            return sum(await asyncio.gather(*(host(until) for _ in range(hosts))))

        await some(time.perf_counter() + params["seconds"] / 4, 0)
        commits, probe = _commits(runtime), FileProbe(database(params))
        sample = await measure_slices(some, params["seconds"], 1)
        turns = int(sample["turns"])
        return {"t1": sample | probe.per(turns) | {"commits": (_commits(runtime) - commits) / turns}}


def _calls(shape: str) -> int:
    return SHAPES[shape].rounds * SHAPES[shape].calls


def _commits(runtime: Runtime) -> int:
    """Transactions so far, as the store itself counts them."""
    return int(getattr(runtime.store, "batches", 0))


# ---------------------------------------------------------------------- plugins


class Idle(Plugin):
    """A plugin that overrides nothing."""

    def __init__(self, number: int) -> None:
        self.id = f"{type(self).__name__.lower()}-{number}"


class Vetting(Idle):
    """A plugin that looks at every call and lets it pass."""

    async def before_tool_call(self, ctx: ToolCallContext) -> None:
        return None


class Remembering(Idle):
    """A plugin with a state that never changes. `saved` counts how often it was asked for it."""

    saved = 0

    def for_session(self, ctx: SessionContext) -> Plugin:
        return Remembering(int(self.id.rpartition("-")[2]))

    @property
    def revision(self) -> int:
        return 0

    def snapshot(self, writer: SnapshotWriter) -> dict[str, int]:
        Remembering.saved += 1
        return {"n": 1}

    def restore(self, snapshot: PluginSnapshot, reader: SnapshotReader) -> None:
        return None


def _tool_named(name: str) -> Any:
    async def get(city: str) -> dict[str, object]:
        """Another tool, with a schema like any."""
        return {"city": city}

    return tool(name=name)(get)


async def wp(params: Sample) -> Sample:
    """A turn with one tool call, beside the same with plugins, with many tools or under a limit: slice by slice, in one
    process."""
    many = [_tool_named(f"tool_{number}") for number in range(499)]
    variants = {
        "plain": agent_of("t1"),
        "idle": agent_of("t1", plugins=[Idle(n) for n in range(20)]),
        "vetted": agent_of("t1", plugins=[Vetting(n) for n in range(20)]),
        "unchanged": agent_of("t1", plugins=[Remembering(n) for n in range(20)]),
        "tools5": agent_of("t1", tools=many[:4]),
        "tools500": agent_of("t1", tools=many),
        "limited": agent_of("t1"),
    }
    limits = [Limit(tokens=10**12, per="metadata.user", window="day")]
    sample: Sample = {name: {"cpu_ms": 0.0, "commits": 0.0} for name in variants}
    async with contextlib.AsyncExitStack() as stack:
        runtimes = {}
        for name, agent in variants.items():
            path = f"{params['dir']}/{name}.db" if "dir" in params else "memory"
            options: dict[str, Any] = {"limits": limits} if name == "limited" else {}
            runtimes[name] = await stack.enter_async_context(Runtime(path, agents=[agent], **options))
            for _ in range(20):
                await turn_in_new_session(runtimes[name])()
        rounds, turns = params["rounds"], params["turns"]
        names = list(runtimes)
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                gc.collect()
                runtime = runtimes[name]
                turn, commits = turn_in_new_session(runtime), _commits(runtime)
                with Span() as span:
                    for _ in range(turns):
                        await turn()
                sample[name]["cpu_ms"] += 1e3 * span.cpu / (turns * rounds)
                sample[name]["commits"] += (_commits(runtime) - commits) / (turns * rounds)
    assert Remembering.saved == 0, f"{Remembering.saved} snapshots of a state that never changed"
    return sample


# ---------------------------------------------------------------------- long sessions


async def w3(params: Sample) -> Sample:
    """Turns number 10, 100 and 1,000 of one session; and a very long one, opened cold."""
    sample: Sample = {}
    async with Runtime(database(params), agents=[agent_of("t1")]) as runtime:
        turn = turn_in_new_session(runtime)
        for _ in range(20):
            await turn()
        session, number = await runtime.session("long"), 1
        for mark in params["marks"]:
            while number < mark:
                await session.run(QUESTION)
                number += 1
            gc.collect()
            sample[str(mark)] = await _some_turns(session, database(params), params["repeats"])
            number += params["repeats"]
        assert len(await session.history()) == 4 * (number - 1)
    if params.get("deep"):
        sample["cold"] = await _cold_open(database(params), params["deep"])
    return sample


async def _some_turns(session: Session, path: str, repeats: int) -> Sample:
    """Medians of single turns: one in hundreds folds the WAL back, and W2 counts those."""
    spans, written = [], []
    for _ in range(repeats):
        probe = FileProbe(path)
        with Span() as span:
            result = await session.run(QUESTION)
        assert result.text == ANSWER
        spans.append(span)
        written.append(probe.per(1)["written_b"])
        if len(spans) % 5 == 0:
            Yard.take()
    return {
        "wall_ms": median(1e3 * s.wall for s in spans),
        "cpu_ms": median(1e3 * s.cpu for s in spans),
        "written_b": median(written),
    }


async def _cold_open(path: str, turns: int) -> Sample:
    """From `runtime.session` on a session that this Runtime has never seen, to the model being called."""
    await _lengthen(path, "deep", turns)
    wall, cpu = [], []
    for round_ in range(3):
        asked: list[tuple[float, float, int]] = []

        async def respond(request: ModelRequest, asked: list[tuple[float, float, int]] = asked) -> str:
            asked.append((time.perf_counter(), time.process_time(), len(request.messages)))
            return ANSWER

        async with Runtime(path, agents=[Agent(FunctionModel(respond), instructions=SYSTEM)]) as runtime:
            gc.collect()
            began, spent = time.perf_counter(), time.process_time()
            session = await runtime.session("deep")
            assert (await session.run(QUESTION)).text == ANSWER
        asked_at, used, seen = asked[0]
        assert seen == 1 + 4 * turns + 2 * round_ + 1, f"the model was shown {seen} messages"
        wall.append(1e3 * (asked_at - began))
        cpu.append(1e3 * (used - spent))
    return {"wall_ms": median(wall), "cpu_ms": median(cpu), "turns": turns}


async def _lengthen(path: str, session_id: str, turns: int) -> None:
    """Put committed turns into a session, by the writes a runtime makes: one turn that ran, again and again."""
    from msgspec.structs import replace

    from perdure.engine.journal import load
    from perdure.model.codec import encode
    from perdure.model.record import Said
    from perdure.model.session import Node
    from perdure.model.write import Accept, Commit, TurnScope, Write
    from perdure.stores.sqlite import SqliteStore

    async with Runtime(path, agents=[agent_of("t1")]) as runtime:
        session = await runtime.session("pattern")
        await session.run(QUESTION)
        row = await runtime.store.session("pattern")
        assert row is not None
        said, *rest = [record for _, record in await load(runtime.store, row.sid, 1, 1)]
    assert isinstance(said, Said)
    store = SqliteStore(path)
    await store.open()
    try:
        nodes = tuple([Node(i + 1, encode(record)) for i, record in enumerate(rest)])
        sid = row.sid + 1
        for first in range(1, turns + 1, 250):
            # Each acceptance claims its turn under the next generation, so what follows need not wait for its receipt.
            writes: list[Write[Any]] = []
            for number in range(first, min(first + 250, turns + 1)):
                body = encode(replace(said, op=f"{number}"))
                writes.append(Accept(session_id, row.agent, body, f"{number}", said.at, worker="bench"))
                writes.append(Commit(TurnScope(session_id, sid, number, "bench", number), nodes, number - 1, said.at))
            await asyncio.gather(*(store.write(write) for write in writes))
    finally:
        await store.close()


# ---------------------------------------------------------------------- processes


async def w4(params: Sample) -> Sample:
    """Durable processes. Imported when they are measured: a cold start must not pay for them."""
    import process_workloads

    return await process_workloads.w4(params)


async def wc(params: Sample) -> Sample:
    """OS commands."""
    import command_workloads

    return await command_workloads.wc(params)


async def wf(params: Sample) -> Sample:
    """Files of a workspace."""
    import workspace_workloads

    return await workspace_workloads.wf(params)


async def wm(params: Sample) -> Sample:
    """Python of a model."""
    import code_workloads

    return await code_workloads.wm(params)


async def wx(params: Sample) -> Sample:
    """Servers over MCP."""
    import mcp_workloads

    return await mcp_workloads.wx(params)


async def wh(params: Sample) -> Sample:
    """Models over HTTP."""
    import wire_workloads

    return await wire_workloads.wh(params)


async def wi(params: Sample) -> Sample:
    """Sessions by metadata, results by their type, live text in another process."""
    import front_workloads

    return await front_workloads.wi(params)


# ---------------------------------------------------------------------- many sessions, cold start, streaming


async def w5(params: Sample) -> Sample:
    """Many sessions at once, each waiting for its model. A host keeps the handle; the runtime what it likes."""
    async with Runtime(store_of(params), agents=[agent_of("t1", params["delay"])]) as runtime:

        async def session(number: int) -> object:
            handle = await runtime.session(f"s{number}")
            assert (await handle.run(QUESTION)).text == ANSWER
            return handle

        return await measure_together(session, params["sessions"])


def cold_start() -> Callable[[], Coroutine[Any, Any, object]]:
    """W6: what is imported and built before anything can be asked."""
    agent = agent_of("t1")
    return lambda: agent.run(QUESTION)


async def w7(params: Sample) -> Sample:
    """Text from the model to a reader. With `apart`, the model waits before each delta, so none travel together."""
    apart = params.get("apart", False)

    async def stream(request: ModelRequest) -> AsyncIterator[str]:
        for _ in range(DELTAS):
            if apart:
                await asyncio.sleep(0)
            yield DELTA

    async with Runtime("memory", agents=[Agent(FunctionModel(stream), instructions=SYSTEM)]) as runtime:

        async def consume() -> tuple[int, int]:
            session, events, characters = await runtime.session(), 0, 0
            async with session.stream(QUESTION) as turn:
                async for event in turn:
                    if isinstance(event, TextDelta):
                        events += 1
                        characters += len(event.text)
                result = await turn.result()
            assert result.text == DELTA * DELTAS
            return events, characters

        return await measure_deltas(consume, params.get("repeats", 3))


# ---------------------------------------------------------------------- recovery


class Steps:
    """How often each step of W8 ran in this process, and where its second one waits, if it may not end."""

    one = two = three = 0
    asked = 0
    hold: asyncio.Barrier | None = None


@tool
async def one() -> int:
    """Step one."""
    Steps.one += 1
    return 1


@tool(recovery="rerun")
async def two() -> int:
    """Step two: in the first process it never ends."""
    Steps.two += 1
    if Steps.hold is not None:
        await Steps.hold.wait()
        await asyncio.Event().wait()
    return 2


@tool
async def three() -> int:
    """Step three."""
    Steps.three += 1
    return 3


async def ask_steps(request: ModelRequest) -> ModelResponse:
    Steps.asked += 1
    done = results_so_far(request.messages)
    if done < 3:
        call = ToolCall(Ids.next(), ("one", "two", "three")[done], {})
        return ModelResponse(tool_calls=(call,), usage=USAGE, stop="tool_calls")
    return ModelResponse(ANSWER, usage=USAGE)


async def w8(params: Sample) -> Sample:
    """`phase` start: turns that all wait in their second tool, to be killed. Then: until all of them are done."""
    agent = Agent(FunctionModel(ask_steps), instructions=SYSTEM, tools=[one, two, three])
    units = params["units"]
    if params["phase"] == "start":
        Steps.hold = asyncio.Barrier(units + 1)
    began = time.perf_counter()
    async with Runtime(database(params), agents=[agent]) as runtime:
        if Steps.hold is not None:
            await _interrupted(runtime, units, Steps.hold, params["ready"])
        entered = time.perf_counter() - began
        await runtime.wait_idle()
        sample = {
            "launch_s": entered,
            "recover_s": time.perf_counter() - began,
            "since_start_s": time.time() - params["t0"],
            "units": units,
        }
        await _check_recovered(runtime, units)
    return sample


async def _interrupted(runtime: Runtime, units: int, together: asyncio.Barrier, ready: str) -> None:
    async def say(number: int) -> None:
        await (await runtime.session(f"u{number}")).send(QUESTION)

    await asyncio.gather(*(say(i) for i in range(units)))
    await together.wait()
    tell_ready(ready, {"units": units})
    await asyncio.Event().wait()


async def _check_recovered(runtime: Runtime, units: int) -> None:
    """What was recorded did not run again, what was in flight ran once more, and every answer is there."""
    ran = (Steps.one, Steps.two, Steps.three, Steps.asked)
    assert ran == (0, units, units, 2 * units), f"steps and model calls after the restart: {ran}"
    for number in range(units):
        session = await runtime.session(f"u{number}")
        result = await session.result(f"u{number}.1")
        assert result.text == ANSWER
        assert [call.repeated for call in result.tool_calls] == [0, 1, 0]


if __name__ == "__main__":
    workload.main(
        {
            "w1": w1,
            "w2": w2,
            "w3": w3,
            "w4": w4,
            "w5": w5,
            "w7": w7,
            "w8": w8,
            "wc": wc,
            "wf": wf,
            "wh": wh,
            "wi": wi,
            "wm": wm,
            "wp": wp,
            "wx": wx,
        },
        cold_start,
    )
