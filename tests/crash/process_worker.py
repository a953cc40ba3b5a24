"""A real worker process for the tests of durable processes: `python -m tests.crash.process_worker <what> <folder> […]`.

The folder holds the store, a ledger of what was done outside, and the file `go` once the others may go on.

hold        one process of each contract, all in the middle of their work; says "ready", then waits for `go` and leaves
lead        a process with two children in the middle of their work; says "ready"
fill N      N processes of every kind on several workers: begun, parked, asleep, waiting for a place; says "ready"
sweep       at `go`, enter and take over whatever is open, until `stop` is there; what it adds waits for `both`
storm WHO N at `go`, enter and start N processes at once, while what was left behind is taken over; then leave
same N      at `go`, start the same N processes as others do, wait for all of them, and leave
race N      start N processes, each to be cancelled by somebody else, say how each ended, and leave
cancel N    cancel the processes of `race`, each at a moment of chance, and say what came of it
prune       forget whatever has ended, over and over, until `stop` is there
jumpy N     as `same`, with longer work on a short lease, and a wall clock that jumps by an hour, back and forth
doze N      start N processes that sleep for five minutes, by a wall clock an hour behind; wait for all, and leave
ahead       work by a wall clock an hour ahead, until `stop` is there
serve       work until SIGTERM, then leave
follow JSON wait for the process of this handle
block       run a durable function that blocks the event loop, on a short lease
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from perdure import ProcessContext, Runtime, process
from perdure.engine.host import SystemClock
from perdure.engine.lease import LeaseTerms
from perdure.model.process import Registration, Success
from perdure.ports.process import EngineRun
from perdure.processes.function.engine import Process
from perdure.testing.crash import Ledger, LedgerLine
from tests.kit import print_line, until

SHORT = LeaseTerms(term=3, renewal=0.5)
"""Short for a test that waits for its end, and long enough for a thread that a busy machine holds up."""
BEAT = 0.01
WAVE = 50
PATIENCE = 60.0
HOUR = 3600


class Outside:
    """The world that these processes act on. `wait`: their work is not done before the file `go` is there."""

    def __init__(self, folder: Path, *, wait: bool = False) -> None:
        self.folder, self.wait = folder, wait

    @property
    def store(self) -> Path:
        return self.folder / "agent.db"

    @property
    def go(self) -> bool:
        return (self.folder / "go").exists()

    def lines(self, name: str | None = None) -> list[LedgerLine]:
        return [line for line in Ledger(self.folder / "ledger").lines() if name in (None, line.name)]

    def note(self, name: str, key: str) -> None:
        """One line for the ledger. It is not synced as the ledger's own are: a kill takes no bytes back."""
        with open(self.folder / "ledger", "ab", buffering=0) as ledger:  # it takes microseconds
            ledger.write(json.dumps([name, key, os.getpid(), None]).encode() + b"\n")

    async def work(self, key: str) -> str:
        """Work that shows in the ledger that it lives, as long as it does; its effect comes last."""
        self.note("begun", key)
        while self.wait and not self.go:
            self.note("beat", key)
            await asyncio.sleep(BEAT)
        self.note("work", key)
        return f"done by {os.getpid()}"

    async def add(self, key: str, number: int) -> int:
        self.note("add", f"{key} {number}")
        return number

    async def never(self, key: str) -> None:
        self.note("begun", key)
        if self.wait:
            await asyncio.Event().wait()
        self.note("work", key)


@process
async def working(ctx: ProcessContext[Outside]) -> str:
    return await ctx.step(ctx.deps.work, ctx.process_id, recovery="rerun")


@process
async def working_once(ctx: ProcessContext[Outside]) -> str:
    return await ctx.step(ctx.deps.work, ctx.process_id, recovery="once")


@process
async def quick(ctx: ProcessContext[Outside], n: int) -> int:
    await ctx.step(ctx.deps.add, ctx.process_id, n, recovery="rerun")
    return n


@process
async def racing(ctx: ProcessContext[Outside], n: int) -> int:
    """Takes up to a third of a second, so that its end and a cancel meet now and then. A tenth waits for it."""
    await ctx.step(asyncio.sleep, 3600 if n % 10 == 0 else n * 7 % 30 / 90, recovery="rerun")
    return await ctx.step(ctx.deps.add, ctx.process_id, n, recovery="rerun")


@process
async def lasting(ctx: ProcessContext[Outside], n: int) -> int:
    """Takes longer than the lease under which it is worked on."""
    await ctx.step(asyncio.sleep, 4.5, recovery="once")
    return await ctx.step(ctx.deps.add, ctx.process_id, n, recovery="once")


@process
async def adding(ctx: ProcessContext[Outside], n: int) -> int:
    """Adds three numbers, the middle one while nobody lets it go on."""
    first = await ctx.step(ctx.deps.add, ctx.process_id, n, recovery="rerun")
    await ctx.step(ctx.deps.never, ctx.process_id, recovery="rerun")
    return first + await ctx.step(ctx.deps.add, ctx.process_id, 1000, recovery="rerun")


@process
async def listening(ctx: ProcessContext[Outside], n: int) -> int:
    more: int = await ctx.wait_signal("more")
    return await ctx.step(ctx.deps.add, ctx.process_id, n, recovery="rerun") + more


@process
async def sleeping(ctx: ProcessContext[Outside], n: int) -> int:
    await ctx.sleep(2)
    return await ctx.step(ctx.deps.add, ctx.process_id, n, recovery="rerun")


@process
async def dozing(ctx: ProcessContext[Outside], n: int) -> int:
    await ctx.sleep(300)
    return await ctx.step(ctx.deps.add, ctx.process_id, n, recovery="once")


@process
async def asking(ctx: ProcessContext[Outside], n: int) -> int:
    """Waits for a child of its own."""
    child = await ctx.start(adding, {"n": n})
    found: int = await child.result()
    return found


@process
async def leading(ctx: ProcessContext[Outside]) -> None:
    """Has a child that ends with it, and one that does not."""
    await ctx.start(working, parent_end="cancel")
    await ctx.start(working, parent_end="abandon")
    await ctx.wait_signal("never")


@process
async def blocking(ctx: ProcessContext[Outside]) -> str:
    ctx.deps.note("begun", ctx.process_id)
    time.sleep(4.5)  # noqa: ASYNC251  # what nobody should do, and somebody will
    return await ctx.step(ctx.deps.work, ctx.process_id, recovery="once")


FUNCTIONS: list[Process[..., Any]] = [
    working,
    working_once,
    quick,
    racing,
    lasting,
    adding,
    listening,
    sleeping,
    dozing,
    asking,
    leading,
    blocking,
]


class Bound:
    """An engine whose work nobody but its owner can do."""

    kind = "bound"

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def knows(self, registration: Registration) -> bool:
        return True

    def draft(self, what: Any, args: Any) -> Registration | None:
        return Registration("", "bound", "owner_bound") if what == "bound" else None

    async def run(self, run: EngineRun) -> Success:
        await run.begin()
        return Success(await run.guard(self._outside.work(run.registration.id)))


def runtime(outside: Outside, **options: Any) -> Runtime:
    return Runtime(outside.store, processes=FUNCTIONS, deps=outside, **options)


@contextlib.asynccontextmanager
async def entered(outside: Outside, **options: Any) -> AsyncGenerator[Runtime]:
    """A Runtime with an engine for work that is bound to its owner, there before it first looks at the store."""
    async with runtime(outside, **options) as made:
        made._work.serve([Bound(outside)])
        yield made


# ---------------------------------------------------------------------- what a child does


async def hold(folder: Path) -> None:
    outside = Outside(folder, wait=True)
    async with entered(outside, lease=SHORT, grace=0.5) as made:
        await made.start(working, id="rerun")
        await made.start(working_once, id="once")
        await made.start("bound", id="bound")
        await made.processes.register("external", metadata={"job": 7})
        await until(lambda: len(outside.lines("begun")) == 3)
        print_line("ready")
        for name in ("rerun", "once", "bound"):
            outcome = await made.processes.outcome(name)
            print_line(f"{name} {type(outcome).__name__} {getattr(outcome, 'value', None)}")


async def lead(folder: Path) -> None:
    outside = Outside(folder, wait=True)
    async with runtime(outside) as made:
        await made.start(leading, id="parent")
        await until(lambda: len(outside.lines("begun")) == 2)
        print_line("ready")
        await asyncio.Event().wait()


async def fill(folder: Path, count: str) -> None:
    """A quarter adds and is begun or waits for a place, a quarter listens, a quarter sleeps, a quarter asks a child."""
    outside, kinds = Outside(folder, wait=True), (adding, listening, sleeping, asking)
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(runtime(outside)) for _ in range(4)]
        await asyncio.gather(
            *(workers[n // 4 % 4].start(kinds[n % 4], {"n": n}, id=f"p-{n:04}") for n in range(int(count)))
        )
        await until(lambda: len(outside.lines("begun")) >= min(int(count) // 8, 4 * 64))
        print_line("ready")
        await asyncio.Event().wait()


class Shared(Outside):
    """Work that is held up until the file `both` is there: who has all places taken leaves the rest to others."""

    async def never(self, key: str) -> None:
        self.note("begun", key)
        await until((self.folder / "both").exists)
        self.note("work", key)


async def sweep(folder: Path) -> None:
    outside = Shared(folder)
    print_line("ready")
    await until(lambda: outside.go)
    async with runtime(outside):
        await until((folder / "stop").exists)


async def storm(folder: Path, who: str, count: str) -> None:
    outside = Outside(folder)
    print_line("ready")
    await until(lambda: outside.go)
    async with runtime(outside) as made:
        handles = await asyncio.gather(*(made.start(quick, {"n": n}, id=f"{who}-{n:03}") for n in range(int(count))))
        print_line(str(sum([await handle.result(PATIENCE) for handle in handles])))
        await made.wait_idle(PATIENCE)


async def same(folder: Path, count: str) -> None:
    await start_same(Outside(folder), quick, count)


async def start_same(outside: Outside, what: Any, count: str, **options: Any) -> None:
    print_line("ready")
    await until(lambda: outside.go)
    async with runtime(outside, **options) as made:
        handles = await asyncio.gather(*(made.start(what, {"n": n}, id=f"p-{n:03}") for n in range(int(count))))
        print_line(str(sum([await handle.result(PATIENCE) for handle in handles])))


async def race(folder: Path, count: str) -> None:
    outside = Outside(folder)
    async with runtime(outside) as made:

        async def run(n: int) -> None:
            handle = await made.start(racing, {"n": n}, id=f"p-{n:04}")
            print_line(f"{handle.id} {await made.processes.outcome(handle.id, PATIENCE)!r}")

        for wave in range(0, int(count), WAVE):
            first = str(wave)
            await until(lambda: first in [line.key for line in outside.lines("ready")])  # noqa: B023  # over before it changes
            await asyncio.gather(*(run(n) for n in range(wave, min(wave + WAVE, int(count)))))


async def cancel(folder: Path, count: str) -> None:
    """Somebody without a worker's rights. It waits for each process, then a moment of chance, and asks. A tenth it asks
    when they have ended."""
    outside, dice = Outside(folder), random.Random(11)
    async with Runtime(outside.store) as made:

        async def stop(n: int) -> None:
            name, moment = f"p-{n:04}", dice.random() * 0.3
            while await made.store.process(name) is None:  # noqa: ASYNC110  # it is another process that starts it
                await asyncio.sleep(0.001)
            if n % 10 == 5:
                await made.processes.outcome(name, PATIENCE)
            await asyncio.sleep(moment)
            asked = await made.processes.cancel(name, "race")
            outcome = await made.processes.outcome(name, PATIENCE)
            again = await made.processes.cancel(name, "again")
            print_line(f"{name} {asked} {again} {outcome!r}")

        for first in range(0, int(count), WAVE):
            outside.note("ready", str(first))
            await asyncio.gather(*(stop(n) for n in range(first, min(first + WAVE, int(count)))))


async def prune(folder: Path) -> None:
    async with Runtime(folder / "agent.db") as made:
        print_line("ready")
        count = 0
        while not (folder / "stop").exists():
            count += await made.processes.prune(0)
            await asyncio.sleep(0)
        count += await made.processes.prune(0)
        print_line(str(count))


class Skewed(SystemClock):
    """The wall clock of a machine that is wrong by so many seconds, and stays so."""

    def __init__(self, seconds: float) -> None:
        self._ms = round(seconds * 1000)

    def now(self) -> int:
        return super().now() + self._ms


class Jumpy(SystemClock):
    """The wall clock of a machine whose administrator cannot make up his mind."""

    def __init__(self) -> None:
        self._dice, self._offset = random.Random(os.getpid()), 0

    def now(self) -> int:
        if self._dice.random() < 0.5:
            self._offset = self._dice.choice((-3_600_000, -120_000, 0, 120_000, 3_600_000))
        return super().now() + self._offset


async def jumpy(folder: Path, count: str) -> None:
    await start_same(Outside(folder), lasting, count, clock=Jumpy(), lease=SHORT)


async def doze(folder: Path, count: str) -> None:
    await start_same(Outside(folder), dozing, count, clock=Skewed(-HOUR))


async def ahead(folder: Path) -> None:
    async with runtime(Outside(folder), clock=Skewed(HOUR)):
        print_line("ready")
        await until((folder / "stop").exists)


async def serve(folder: Path) -> None:
    """What a host does that is told to stop: it leaves, and that is all."""
    outside, told = Outside(folder, wait=True), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with entered(outside, grace=3, concurrency=5) as made:
        await made.start(listening, {"n": 1}, id="parked")
        await until(lambda: not made._work.runs)
        await made.start(working, id="rerun")
        await made.start(working_once, id="once")
        await made.start("bound", id="bound")
        await made.start(finishing, id="finishing")
        await made.start(working, id="other")
        await made.start(working, id="waiting")  # there is no place left
        await until(lambda: len(outside.lines("begun")) == 5)
        print_line("ready")
        await told.wait()
        (folder / "told").touch()
    print_line("left")


@process
async def finishing(ctx: ProcessContext[Outside]) -> str:
    """Ends by itself once its worker was told to stop."""

    async def last() -> str:
        ctx.deps.note("begun", ctx.process_id)
        await until((ctx.deps.folder / "told").exists)
        ctx.deps.note("work", ctx.process_id)
        return "finished"

    return await ctx.step(last, recovery="once")


FUNCTIONS.append(finishing)


async def follow(folder: Path, handle: str) -> None:
    """Wait for a process that another started, by the JSON of its handle."""
    async with Runtime(folder / "agent.db") as made:
        waiting = asyncio.ensure_future(made.handle(json.loads(handle)).result(PATIENCE))
        await asyncio.sleep(0)
        print_line("ready")
        print_line(await waiting)


async def block(folder: Path) -> None:
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
    outside = Outside(folder)
    async with runtime(outside, lease=SHORT) as made:
        handle = await made.start(blocking, id="blocking")
        print_line(await handle.result(PATIENCE))


COMMANDS: dict[str, Any] = {
    each.__name__: each
    for each in (hold, lead, fill, sweep, storm, same, race, cancel, prune, jumpy, doze, ahead, serve, block, follow)
}

if __name__ == "__main__":
    asyncio.run(COMMANDS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:]))
