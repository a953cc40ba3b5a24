"""What is measured, and with which clocks: the conversation every system plays, and how a sample leaves its process.

The words, shapes and yardsticks are those of the comparison with other systems, so that figures stand side by side.
Standard library only: what is imported here is part of every cold start.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import glob
import json
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn

# ---------------------------------------------------------------------- the conversation

SYSTEM = "You are a helpful assistant."
QUESTION = "What is the weather in Paris?"
ANSWER = "It is 21 C and clear in Paris."
TOOL = "get_weather"
ARGS = {"city": "Paris"}
DELTAS, DELTA = 5000, "tok "
SLICES = 8


class Shape(NamedTuple):
    """What the model asks for within one turn: rounds of tool calls before the answer, and calls in each round."""

    rounds: int
    calls: int


SHAPES = {"t1": Shape(1, 1), "t10": Shape(10, 1), "p4": Shape(1, 4)}


class Count:
    """How often the tool really ran: a turn that made a wrong number of calls is an error, not a figure."""

    tools = 0


def weather(city: str) -> dict[str, object]:
    """The tool's work: a small JSON object, no I/O."""
    Count.tools += 1
    return {"city": city, "temp_c": 21, "sky": "clear"}


# ---------------------------------------------------------------------- clocks


class Span:
    """Wall and CPU seconds of a block. CPU is that of all threads of this process."""

    def __enter__(self) -> Span:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._wall
        self.cpu = time.process_time() - self._cpu


def yardstick() -> float:
    """CPU ms that this thread needs for a fixed piece of plain Python: how fast the machine is just now."""
    began = time.thread_time()
    counts: dict[int, int] = {}
    total = 0
    for i in range(60_000):
        k = i % 97
        counts[k] = counts.get(k, 0) + i
        total += len(str(i))
    return 1e3 * (time.thread_time() - began)


class Yard:
    """The yardstick over a sample. On a shared machine speed changes within a second, so it is taken in between too."""

    taken: ClassVar[list[float]] = []

    @classmethod
    def take(cls, times: int = 1) -> None:
        cls.taken += [yardstick() for _ in range(times)]

    @classmethod
    def mean(cls) -> float:
        return sum(cls.taken) / len(cls.taken)


def disk_yardstick(folder: str, writes: int = 25) -> float:
    """Median ms of a 4 KiB write with fdatasync in `folder`: how fast the disk is just now."""
    path = os.path.join(folder, f"yard-{os.getpid()}")
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    spent = []
    try:
        for i in range(writes):
            began = time.perf_counter()
            os.pwrite(descriptor, b"x" * 4096, 4096 * i)
            os.fdatasync(descriptor)
            spent.append(1e3 * (time.perf_counter() - began))
    finally:
        os.close(descriptor)
        os.unlink(path)
    return median(spent)


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


# ---------------------------------------------------------------------- memory and disk


def status_mb(field: str) -> float:
    """VmRSS (memory now) or VmHWM (the most it was) of this process."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
    return 0.0


def forget_peak() -> None:
    """Let VmHWM begin again from here."""
    try:
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
    except OSError:
        return


def give_back_memory() -> None:
    """Let the C allocator return free pages, so that idle memory is what is really held."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def tell_ready(path: str, sample: Mapping[str, object]) -> None:
    """Say that all is in flight, to who waits for this file and then kills this process: it is there as a whole."""
    with open(f"{path}.part", "w") as file:
        json.dump(sample, file)
    os.replace(f"{path}.part", path)


class FileProbe:
    """Bytes that this process hands to write calls, and by how much its database grows."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._size, self._written = self._sizes(), _written()

    def _sizes(self) -> int:
        return sum(os.path.getsize(p) for p in glob.glob(f"{self._path}*") if os.path.isfile(p))

    def per(self, count: int) -> dict[str, float]:
        return {
            "written_b": (_written() - self._written) / count,
            "db_growth_b": (self._sizes() - self._size) / count,
        }


def _written() -> int:
    with open("/proc/self/io") as io:
        return next(int(line.split()[1]) for line in io if line.startswith("wchar:"))


# ---------------------------------------------------------------------- measuring


async def measure_turns(
    turn: Callable[[], Awaitable[None]], seconds: float, calls: int, least: int = 5
) -> dict[str, float]:
    """Turns one after another for `seconds`, and at least `least` of them, each making `calls` tool calls."""

    async def some(until: float, at_least: int) -> int:
        done = 0
        while done < at_least or time.perf_counter() < until:
            await turn()
            done += 1
        return done

    return await measure_slices(some, seconds, calls, least)


async def measure_slices(
    some: Callable[[float, int], Awaitable[int]], seconds: float, calls: int, least: int = 0
) -> dict[str, float]:
    """`some(until, least)` runs turns until then and returns how many; the yardstick is taken between the slices."""
    gc.collect()
    done, before, wall, cpu = 0, Count.tools, 0.0, 0.0
    for _ in range(SLICES):
        Yard.take()
        with Span() as span:
            done += await some(time.perf_counter() + seconds / SLICES, -(-least // SLICES))
        wall += span.wall
        cpu += span.cpu
    Yard.take()
    return per_turn(done, wall, cpu, Count.tools - before, calls)


def per_turn(done: int, wall: float, cpu: float, made: int, calls: int) -> dict[str, float]:
    """A sample of `done` turns. Refuses one in which the tool did not run as often as it should have."""
    assert made == done * calls, f"{made} tool calls in {done} turns of {calls}"
    return {
        "turns": done,
        "turns_per_s": done / wall,
        "cpu_ms": 1e3 * cpu / done,
        "wall_ms": 1e3 * wall / done,
        "tool_calls": made / done,
    }


async def measure_together(session: Callable[[int], Awaitable[object]], count: int) -> dict[str, float]:
    """`count` sessions at once, one turn each. What `session(i)` returns is what a host would keep of it.

    What an idle session takes is measured on as many again: the memory that the first ones needed stays with the
    process, and the next ones use it.
    """
    for i in range(3):
        await session(-1 - i)
    gc.collect()
    before, made = status_mb("VmRSS"), Count.tools
    forget_peak()
    with Span() as span:
        kept = await asyncio.gather(*(session(i) for i in range(count)))
    peak = status_mb("VmHWM")
    give_back_memory()
    idle = status_mb("VmRSS")
    kept += await asyncio.gather(*(session(count + i) for i in range(count)))
    give_back_memory()
    after = status_mb("VmRSS")
    assert len(kept) == 2 * count
    assert Count.tools - made == 2 * count
    return {
        "wall_s": span.wall,
        "cpu_ms": 1e3 * span.cpu / count,
        "peak_rss_mb": peak,
        "peak_kb_per_session": 1024 * (peak - before) / count,
        "idle_kb_per_session": 1024 * (after - idle) / count,
    }


async def measure_deltas(consume: Callable[[], Awaitable[tuple[int, int]]], repeats: int) -> dict[str, float]:
    """`consume` streams one answer of DELTAS deltas and returns the events and the characters it saw."""
    await consume()
    cpu, wall, events = [], [], 0
    for _ in range(repeats):
        gc.collect()
        Yard.take()
        with Span() as span:
            events, characters = await consume()
        assert characters == DELTAS * len(DELTA), f"{characters} characters in {events} events"
        cpu.append(1e6 * span.cpu / DELTAS)
        wall.append(1e6 * span.wall / DELTAS)
    return {"cpu_us_per_delta": median(cpu), "wall_us_per_delta": median(wall), "chunks_seen": events}


# ---------------------------------------------------------------------- leaving

Sample = dict[str, Any]
Workload = Callable[[Sample], Coroutine[Any, Any, Sample]]
ColdStart = Callable[[], Callable[[], Coroutine[Any, Any, object]]]


def main(workloads: Mapping[str, Workload], cold_start: ColdStart) -> NoReturn:
    """Run one workload of an adapter: `python adapter.py <workload> '<json>'`; the sample goes to $BENCH_OUT."""
    name = sys.argv[1]
    params: Sample = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    try:
        sample = _cold(cold_start, params) if name == "w6" else _measured(workloads[name], params)
    except BaseException as error:  # the driver says why there is no figure
        traceback.print_exc()
        sample = {"error": f"{type(error).__name__}: {error}"[:300]}
    out = os.environ.get("BENCH_OUT")
    if out:
        with open(out, "w") as file:
            json.dump(sample, file)
    else:
        print(json.dumps(sample))
    sys.stdout.flush()
    os._exit(1 if "error" in sample else 0)


def _measured(workload: Workload, params: Sample) -> Sample:
    folder = params.get("dir")
    disk = disk_yardstick(folder) if folder else 0.0
    Yard.take(2)
    sample = asyncio.run(workload(params))
    Yard.take(2)
    sample["yard_ms"] = Yard.mean()
    if folder:
        sample["fsync_ms"] = (disk + disk_yardstick(folder)) / 2
    return sample


def _cold(cold_start: ColdStart, params: Sample) -> Sample:
    """From the interpreter's first instruction to a built agent, then to its first answer."""
    first_turn = cold_start()
    sample = {
        "cold_cpu_ms": 1e3 * time.process_time(),
        "cold_wall_ms": 1e3 * (time.time() - params.get("t0", time.time())),
        "rss_mb": status_mb("VmRSS"),
    }
    asyncio.run(first_turn())
    return sample | {"answer_cpu_ms": 1e3 * time.process_time(), "answer_rss_mb": status_mb("VmRSS")}
