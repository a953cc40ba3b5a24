"""WC: OS commands. How soon one runs, what its shim holds, how its output gets here, and how soon a tree is dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from workload import Sample, Span, forget_peak, give_back_memory, median, status_mb, tell_ready

from perdure import ProcessHandle, Runtime
from perdure.commands.job import Job, StartedCommand
from perdure.commands.sandbox import IMPLEMENTATIONS, examine, rules_of
from perdure.commands.spawner import Spawner, StartRequest
from perdure.model.command import CommandSettings
from perdure.model.sandbox import Confinement

TREE = """
import os, signal
for _ in range({others}):
    if os.fork() == 0:
        break
else:
    os.write(1, b"ready")
signal.pause()
"""
STAMPS = """
import os, time
for _ in range({lines}):
    os.write(1, b"%.6f\\n" % time.time())
    time.sleep(0.05)
"""


async def wc(params: Sample) -> Sample:
    what: dict[str, Callable[[Sample], Awaitable[Sample]]] = {
        "starts": _starts,
        "output": _output,
        "news": _news,
        "tree": _tree,
        "adopted": _adopted,
        "confined": _confined,
    }
    return await what[params["what"]](params)


def _runtime(params: Sample) -> Runtime:
    return Runtime(
        os.path.join(params["dir"], "agent.db"), agents=[], commands=CommandSettings(per_session=1000, total=1000)
    )


async def _starts(params: Sample) -> Sample:
    """Calls until the handle is there, with nothing else to do; many at once; and the first one, without a spawner."""
    async with _runtime(params) as runtime:

        async def one() -> float:
            began = time.perf_counter()
            handle = await runtime.command(["/bin/true"])
            took = time.perf_counter() - began
            assert (await handle.result()).ok
            return took

        cold = await one()
        took = sorted([await one() for _ in range(params["starts"])])
        with Span() as span:
            handles = [runtime.command(["/bin/true"]) for _ in range(params["starts"])]
            done = await asyncio.gather(*(asyncio.create_task(each) for each in handles))
        assert all([(await handle.result()).ok for handle in done])
        file_ms = _file_ms(params["dir"])
        held = [await runtime.command(["sleep", "600"]) for _ in range(params["shims"])]
        pss = [await _pss_mb(handle) for handle in held]
        await _end_all(held)
    return {
        "cold_ms": 1e3 * cold,
        "p50_ms": 1e3 * median(took),
        "p99_ms": 1e3 * took[int(0.99 * len(took))],
        "starts_per_s": params["starts"] / span.wall,
        "shim_mb": max(pss),
        "shims": len(pss),
        "file_ms": file_ms,
    }


def _file_ms(folder: str) -> float:
    """What the file system takes for one new file, of which a start makes five. On ext4 that is a hundred times more
    than usual for some minutes after thousands of files were deleted, by an earlier round, say."""
    took = list[float]()
    for number in range(20):
        began = time.perf_counter()
        os.close(os.open(os.path.join(folder, f"new-{number}"), os.O_WRONLY | os.O_CREAT))
        took.append(1e3 * (time.perf_counter() - began))
    return median(took)


async def _confined(params: Sample) -> Sample:
    """What each sandbox that this machine has adds to a start, in turns with a start without one."""
    root = os.path.join(os.path.realpath(params["dir"]), "root")
    os.makedirs(os.path.join(root, ".git"))
    own = (os.path.realpath(sys.prefix), sys.base_prefix)
    usable = [how for how in IMPLEMENTATIONS if not examine(how).refused]
    confined = {how: rules_of(Confinement((root,), own, (f"{root}/.git",), how=how)) for how in usable}
    took: dict[str, list[float]] = {how: [] for how in ("plain", *usable)}
    spawner = Spawner()
    for _ in range(params["starts"] + 1):
        for how, seen in took.items():
            job = Job(Path(params["dir"], Job.new_name()))
            job.create()
            request = StartRequest(
                job.folder, secrets.token_hex(8), ["/bin/true"], {"PATH": "/bin"}, root, rules=confined.get(how, ())
            )
            began = time.perf_counter()
            started = await spawner.start(request)
            seen.append(1e3 * (time.perf_counter() - began))
            assert isinstance(started, StartedCommand), started
            ended = await job.wait()
            assert ended is not None
            assert ended.code == 0
    await spawner.close()
    typical = {how: median(seen[1:]) for how, seen in took.items()}  # the first one starts the spawner
    return {f"{how}_added_ms": typical[how] - typical["plain"] for how in usable} | {"plain_ms": typical["plain"]}


async def _output(params: Sample) -> Sample:
    """So many bytes of `yes`: what this process takes meanwhile, and for how long its event loop is blocked."""
    amount = params["bytes"]
    async with _runtime(params) as runtime:
        await (await runtime.command(["/bin/true"])).result()
        give_back_memory()
        forget_peak()
        before = status_mb("VmRSS")
        async with _lateness() as late:
            with Span() as span:
                handle = await runtime.command(["sh", "-c", f"yes | head -c {amount}"])
                result = await handle.result()
        assert result.stdout_bytes == amount, result
    return {
        "grown_mb": status_mb("VmHWM") - before,
        "lag_ms": max(each.blocked for each in late),
        "descheduled_ms": max(each.descheduled for each in late),
        "mb_per_s": amount / 1e6 / span.wall,
        "cpu_s": span.cpu,
    }


async def _news(params: Sample) -> Sample:
    """From a write of the command until a follower has it."""
    async with _runtime(params) as runtime:
        handle = await runtime.command(["python3", "-I", "-S", "-c", STAMPS.format(lines=params["lines"])])
        late, rest = list[float](), b""
        async for chunk in handle.output("stdout", follow=True):
            now = time.time()
            *lines, rest = (rest + chunk).split(b"\n")
            late += [now - float(line) for line in lines]
        assert len(late) == params["lines"]
    return {"p50_ms": 1e3 * median(late), "most_ms": 1e3 * sorted(late)[int(0.99 * len(late))]}


async def _tree(params: Sample) -> Sample:
    """A cancel until a tree of processes is verified dead."""
    async with _runtime(params) as runtime:
        program = TREE.format(others=params["processes"] - 1)
        handle = await runtime.command(["python3", "-I", "-S", "-c", program])
        async for chunk in handle.output("stdout", follow=True):
            if b"ready" in chunk:
                break
        with Span() as span:
            await handle.cancel()
            result = await handle.result()
        assert result.status == "killed"
        assert result.cleanup.verified
    return {"wall_s": span.wall, "processes": params["processes"]}


async def _adopted(params: Sample) -> Sample:
    """`phase` start: commands that run, and their Runtime is killed. Then: until all are watched again."""
    units = params["units"]
    if params["phase"] == "start":
        async with _runtime(params) as runtime:
            handles = await asyncio.gather(
                *(runtime.command(["cat"], stdin=True, key=f"c{number}") for number in range(units))
            )
            tell_ready(params["ready"], {"ids": [handle.id for handle in handles]})
            await asyncio.Event().wait()
    began = time.perf_counter()
    async with _runtime(params) as runtime:
        known = dict[str, str | None]()
        while len(known) < units:
            rows = await runtime.processes.list(kind="command", live=True, limit=units)
            known = {row.id: row.owner for row in rows if row.owner == runtime._worker.id}
            await asyncio.sleep(0.002)
        adopted = time.perf_counter() - began
        handles = [runtime.handle(each) for each in known]
        for handle in handles:
            await handle.signal("stdin", {"text": "still here", "close": True})
        results = await asyncio.gather(*(handle.result() for handle in handles))
        assert {result.stdout for result in results} == {"still here"}
    return {"adopted_s": adopted, "since_start_s": time.time() - params["t0"], "units": units}


async def _pss_mb(handle: ProcessHandle[Any]) -> float:
    """The proportional set size of a command's shim: pages that several share count for each in part."""
    reference: dict[str, Any] = (await handle.record()).record.external_ref
    with open(f"/proc/{reference['shim']}/smaps_rollup") as smaps:
        return sum(int(line.split()[1]) for line in smaps if line.startswith("Pss:")) / 1024


async def _end_all(handles: list[ProcessHandle[Any]]) -> None:
    for handle in handles:
        await handle.cancel()
    await asyncio.gather(*(handle.result() for handle in handles))


class Late(NamedTuple):
    """How many ms the event loop came late to a timer: because something blocked it, and because its thread was ready
    to run while the kernel gave the CPUs to others, such as `yes`, `head`, the shim and the hashing thread."""

    blocked: float
    descheduled: float


@contextlib.asynccontextmanager
async def _lateness() -> AsyncGenerator[list[Late], None]:
    found = [Late(0.0, 0.0)]

    async def watch() -> None:
        while True:
            due, before = time.perf_counter() + 0.005, _descheduled_ms()
            await asyncio.sleep(0.005)
            late, waited = 1e3 * (time.perf_counter() - due), _descheduled_ms() - before
            found.append(Late(max(0.0, late - waited), waited))

    watching = asyncio.create_task(watch())
    try:
        yield found
    finally:
        watching.cancel()


def _descheduled_ms() -> float:
    """For how long this thread was ready to run, and did not; 0 where the kernel does not count it."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e6
    except OSError:
        return 0.0
