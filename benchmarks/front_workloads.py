"""WI: sessions found by whom they are for, results brought back by their type, and live text through another process.

`python front_workloads.py <database>` is the worker whose text is read: it prints the CPU time that each turn took it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import decimal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

from workload import DELTA, Sample, Yard, median

from perdure import Agent, ModelRequest, Runtime, Session
from perdure.model.event import TextDelta
from perdure.model.session import Settings, dump_settings
from perdure.model.write import Configure
from perdure.testing import FunctionModel
from perdure.tools.revive import value_codec

LATEST = 200
"""Sessions in which something was said, changed after all others: a page shows their titles."""
OF_USER = 20
TENANTS = 10
PACE = 0.002


async def wi(params: Sample) -> Sample:
    what: dict[str, Callable[[Sample], Awaitable[Sample]]] = {
        "listing": _listing,
        "reviving": _reviving,
        "elsewhere": _elsewhere,
    }
    return await what[params["what"]](params)


# ---------------------------------------------------------------------- sessions by metadata


async def _listing(params: Sample) -> Sample:
    """Pages of a store with many sessions of one app: each user has twenty, each tenant a tenth of all."""
    count, times = params["sessions"], params["times"]
    begun = count - params.get("latest", LATEST)
    agent = Agent(FunctionModel(lambda _: "ok"), name="support")
    filters: dict[str, dict[str, Any]] = {
        "user": {"metadata": {"user": "u-1"}},
        "tenant": {"metadata": {"tenant": 1}, "limit": 100},
        "both": {"metadata": {"user": "u-1", "tenant": 1}, "agent": "support", "state": "idle"},
        "all": {"metadata": {"app": "shop"}},
        "none": {"metadata": {"user": "nobody"}},
        "latest": {"limit": 100},
    }
    async with Runtime(str(Path(params["dir"]) / "bench.db"), agents=[agent]) as runtime:
        old = [
            Configure(f"s-{n}", "support", dump_settings(Settings(metadata=_whom(n, count))), n * 200)
            for n in range(begun)
        ]
        for begin in range(0, len(old), 1000):
            await asyncio.gather(*(runtime.store.write(each) for each in old[begin : begin + 1000]))
        for n in range(begun, count):
            session = await runtime.session(f"s-{n}", metadata=_whom(n, count))
            await session.run(f"Question {n}")
        found: Sample = {}
        for name, wanted in filters.items():
            taken = []
            for _ in range(times):
                began = time.perf_counter()
                page = await runtime.sessions.list(**wanted)
                taken.append(1e3 * (time.perf_counter() - began))
            found[f"{name}_ms"], found[f"{name}_rows"] = median(taken), len(page)
    return found | {"most_ms": max(found[f"{name}_ms"] for name in filters)}


def _whom(n: int, count: int) -> dict[str, str | int | float | bool]:
    """Sessions of one user are spread over the whole store."""
    return {"user": f"u-{n % max(1, count // OF_USER)}", "tenant": n % TENANTS, "app": "shop"}


# ---------------------------------------------------------------------- results by their type


@dataclasses.dataclass
class Row:
    day: datetime.date
    amount: decimal.Decimal


@dataclasses.dataclass
class Report:
    id: uuid.UUID
    rows: list[Row]
    note: str | None = None


async def _reviving(params: Sample) -> Sample:
    """From the JSON of a record to a value, and from a value to JSON with the proof that it comes back."""
    row = Row(datetime.date(2026, 11, 16), decimal.Decimal("1.10"))
    report = Report(uuid.UUID(int=7), [row] * 10)
    found: Sample = {}
    for name, kind, value in (("row", Row, row), ("report", Report, report)):
        codec = value_codec(kind)
        stored = codec.store(value)
        assert codec.from_json(stored) == value
        found[f"{name}_us"] = _us(lambda codec=codec, stored=stored: codec.from_json(stored), params["times"])
        found[f"{name}_store_us"] = _us(lambda codec=codec, value=value: codec.store(value), params["times"])
    return found


def _us(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(5):
        Yard.take()
        began = time.thread_time()
        for _ in range(times):
            work()
        taken.append(1e6 * (time.thread_time() - began) / times)
    return median(taken)


# ---------------------------------------------------------------------- live text


async def _elsewhere(params: Sample) -> Sample:
    """A worker in another process, and a reader of its text here: as fast as the model speaks, and a delta every two
    milliseconds. What the same answers cost the worker without a reader is measured beside it."""
    path = str(Path(params["dir"]) / "bench.db")
    read: dict[str, list[float]] = {"fast": [], "paced": []}
    unread: dict[str, list[float]] = {"fast": [], "paced": []}
    behind: list[float] = []
    with _worker(path) as worker:
        async with Runtime(path) as front:
            session = await front.session("s", agent="speaker")
            for _ in range(params["repeats"] + 1):
                for how in read:
                    said = f"{how} {params[how]}"
                    late = await _read(session, said)
                    behind += late if how == "paced" else []
                    read[how].append(await _told(worker))
                    await session.run(said)
                    unread[how].append(await _told(worker))
                    Yard.take()
    found: Sample = {
        how: {"cpu_us": median(read[how][1:]), "unread_us": median(unread[how][1:])} for how in read
    }  # the first warmed up
    for each in found.values():
        each["more_us"] = each["cpu_us"] - each["unread_us"]
    behind.sort()
    return found | {"p50_ms": median(behind), "p99_ms": behind[len(behind) * 99 // 100], "deltas": len(behind)}


async def _read(session: Session, said: str) -> list[float]:
    """Milliseconds from the model's saying a delta to its being read. The text of a paced one begins with its time."""
    late, text = [], ""
    async with session.stream(said) as turn:
        async for event in turn:
            if isinstance(event, TextDelta):
                now, text = time.monotonic(), text + event.text
                late += [1e3 * (now - float(each)) for each in event.text.split()] if said.startswith("paced") else []
        result = await turn.result()
    assert text == result.text
    return late


@contextlib.contextmanager
def _worker(path: str) -> Generator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, __file__, path], stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            worker.stdout.readline()
            yield worker
        finally:
            worker.kill()


async def _told(worker: subprocess.Popen[str]) -> float:
    assert worker.stdout is not None
    return float(await asyncio.to_thread(worker.stdout.readline))


async def _speak(request: ModelRequest) -> AsyncIterator[str]:
    how, count = request.messages[-1].text.split()
    began = time.process_time()
    for _ in range(int(count)):
        await asyncio.sleep(PACE if how == "paced" else 0)  # a pass of the event loop at least: none travel together
        yield f"{time.monotonic():.6f} " if how == "paced" else DELTA
    await asyncio.sleep(0.05)  # what is still to be sent is sent, and is counted
    print(1e6 * (time.process_time() - began) / int(count), flush=True)


async def work(path: str) -> None:
    async with Runtime(path, agents=[Agent(FunctionModel(_speak), name="speaker")]):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
