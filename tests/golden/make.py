"""Make the golden store of the present tree: work of every kind, left by processes of which three were killed.

    python -m tests.golden.make FOLDER

It is run once for each schema, on the last tree before the next one. The folder then holds the store as SIGKILL left
it, WAL included, and `keys.json` with the signed keys of deferred calls, which no test can know beforehand. It runs on
an older tree, too (`package.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import tests.golden.package  # noqa: F401  # first, because it decides which package the imports below find

# isort: split

from perdure import Runtime, Workspace
from perdure.model.message import Scalar
from perdure.model.monitor import MonitorSpec
from perdure.model.process import WakePolicy, WakeTarget
from perdure.testing import VirtualClock
from tests.golden.definitions import (
    FUNCTIONS,
    FUNCTIONS_SINCE_7,
    HOST,
    LARGE,
    WORKSPACE,
    World,
    agents,
    runtime,
    runtime_since_7,
)

STORE = "agent.db"
JOBS = f"{STORE}-jobs"

INTERRUPTED = ("think", "pay", "fetch", "order", "survey", "dig", "pay-step", "fetch-step", "slow")
"""What is under way when the last process is killed."""

KIM: dict[str, Scalar] = {"user": "kim", "tenant": 4, "paying": True}
"""The metadata of a session with a queue and a title, of one with a subagent, and of one that is deleted."""

PARKED = ("sleeping", "racing", "tidying", "leading", "listening", "counting", "orphan")

UNKNOWN = (
    "clerk",
    "chief",
    "listener",
    "listening",
    "tidying",
    "counting",
    "following",
    "leading",
)
"""What the last process has no definition of: answers, signals and wakes for these are on disk and not acted on."""


async def rest() -> None:
    print("ready", flush=True)
    await asyncio.Event().wait()


async def until(met: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition by polling it. `tests.kit` has the same, and imports a package that an older tree lacks."""
    async with asyncio.timeout(60):
        while True:
            if await met():
                return
            await asyncio.sleep(0.001)


# ---------------------------------------------------------------------- first life: killed in a tool that asks


async def begin(folder: Path) -> None:
    world = World(["order"])
    async with runtime(folder / STORE, world, clock=VirtualClock()) as made:
        await (await made.session("settlement", agent="clerk")).send("call order article=lamp")

        async def begun() -> bool:
            return world.begun == ["order"]

        await until(begun)
        await rest()


# ---------------------------------------------------------------------- second life: everything that parks


async def park(folder: Path) -> None:
    world, clock = World(), VirtualClock()
    clock.advance(10)
    async with runtime(folder / STORE, world, clock=clock) as made:
        assert (await (await made.session("settlement")).result("settlement.1")).waiting
        await _park_turns(made)
        await _fork(made)
        await _park_processes(made)
        await made.wait_idle(30)
    (folder / "keys.json").write_text(json.dumps(world.keys, indent=1) + "\n")


async def _park_turns(made: Runtime) -> None:
    async def run(
        session_id: str, *said: str, options: dict[str, object] | None = None, metadata: dict[str, Scalar] | None = None
    ) -> None:
        session = await made.session(session_id, agent="clerk", options=options, metadata=metadata)
        for each in said:
            await session.run(each)

    await run("approval", "hello", "call mail to=kim", metadata=KIM)
    queued = await made.session("approval")
    await queued.update(title="Mail for Kim")
    await queued.send("first in the queue", key="queued-1")
    await queued.send("second in the queue", key="queued-2", metadata={"channel": "sms"})
    await run("rejected", "call mail to=kim and look")
    await run("approved", "call mail to=lee")
    await run("deferred", "call build name=plain and look")
    await (await made.session("deferred")).steer("and hurry", key="steer-1")
    await run("late", "call build name=late")
    await run("resolved", "call build name=early")
    await run("failed", "call build name=broken")
    await run("cancelled", "call mail to=max")
    await run("noted", "hello", "call remember fact=tea", options={"notes": {"prefix": "it is "}})
    noted = await made.session("noted")
    await noted.tools.disable("look")
    await noted.call("notes.add", {"text": "said by the host"})
    await noted.run("call remember fact=milk and mail to=kim")
    await run("drawn", "call draw", LARGE)
    await (await made.session("listener", agent="listener")).run("hello")
    chief = await made.session("chief", agent="chief", metadata=KIM)
    await chief.run("call clerk task=what_is_new")
    await chief.send("call clerk task=call_mail_to=kim")

    async def asked() -> bool:
        return bool(await (await made.session("chief.2.1.0~clerk", agent="clerk")).pending())

    await until(asked)


async def _fork(made: Runtime) -> None:
    source = await made.session("source", agent="clerk")
    await source.run("one")
    await source.run("call remember fact=tea")
    await source.run("three")
    await source.fork(at="source.2", session_id="fork")
    grown = await source.fork(session_id="fork-grown")
    await grown.run("four, elsewhere")
    await made.sessions.delete("source")


async def _park_processes(made: Runtime) -> None:
    pruned = await made.start("reporting", {"text": "forgotten"}, id="pruned")
    await pruned.result(30)
    await made.processes.prune(0)
    for name in ("sleeping", "racing", "tidying", "leading"):
        await made.start(name, id=name)
    heard = await made.start("listening", id="listening")
    await heard.signal("go", "early")
    counter = await made.start("counting", {"rounds": 4}, id="counting")
    for amount in (5, 7):
        await counter.signal("add", amount, key=f"add-{amount}")
    ended = await made.start("reporting", {"text": "told"}, id="ended")
    await ended.result(30)
    await made.processes.register(
        "external",
        label="a build",
        signals=["retry"],
        wake=WakeTarget("listener", agent="listener"),
        grants=["listener"],
    )
    session = await made.session("listener")
    await (await session.start("reporting", {"text": "old news"}, id="old-news")).result(30)
    gone = await made.session("gone", agent="listener", metadata=KIM)
    await gone.run("hello")
    await gone.start("following", {"word": "orphan"}, id="orphan")
    await made.sessions.delete("gone")

    async def parked() -> bool:
        rows = {row.id: row for row in await made.processes.list()}
        return all(rows[name].status == "waiting" for name in PARKED)

    await until(parked)


# ---------------------------------------------------------------------- third life: answers that nobody acts on


async def answer(folder: Path) -> None:
    """By a Runtime without definitions: everything here is on disk, and nothing of it is done."""
    clock, keys = VirtualClock(), json.loads((folder / "keys.json").read_text())
    clock.advance(20)
    async with Runtime(folder / STORE, clock=clock) as made:
        await (await made.session("approved")).approve("approved.1.1.0", by="kim")
        await made.resolve(keys["early"], "all green")
        await made.resolve(keys["broken"], error="all red")
        await (await made.session("cancelled")).cancel("not needed any more")
        await made.handle("tidying").cancel("enough")
        await made.handle("counting").signal("add", 11, key="add-11")
        await made.handle("leading").signal("unheard", "kept")
        await (await made.session("listener")).send("are you there?", key="unheard-1")


# ---------------------------------------------------------------------- fourth life: killed in everything else


async def interrupt(folder: Path) -> None:
    world, clock = World(INTERRUPTED), VirtualClock()
    clock.advance(30)
    async with runtime(folder / STORE, world, without=UNKNOWN, clock=clock) as made:
        said = {
            "thinking": "think",
            "paying": "call pay",
            "fetching": "call fetch",
            "ordering": "call order article=desk",
            "calling": "call call",
            "half": "call remember fact=half and pay and fetch",
            "surveying": "call survey",
            "digging": "call dig",
        }
        for name, each in said.items():
            await (await made.session(name, agent="worker")).send(each, key=f"{name}-1")
        await (await made.session("paying")).send("and then?", key="paying-2")
        for name in ("paying", "fetching", "insisting", "branching"):
            await made.start(name, id=name)
        listener = await made.session("listener")
        wakes: dict[int, WakePolicy] = {1: "turn", 2: "turn", 3: "notify"}
        for number, wake in wakes.items():
            name, text = f"news-{number}", f"news {number}"
            await (await listener.start("reporting", {"text": text}, id=name, label=text, wake=wake)).result(30)
        wanted = sorted([*INTERRUPTED, "pay", "fetch", "call", "first-step", "quick", "try"])

        async def everything() -> bool:
            over = [await (await made.session(name)).history() for name in ("surveying", "digging")]
            retried = await made.handle("insisting").status() == "waiting"
            return sorted(world.begun) == wanted and all(over) and retried

        await until(everything)
        await asyncio.sleep(1)  # and whatever else is on its way to the disk
        await rest()


# ---------------------------------------------------------------------- fifth life: killed in what schema 7 brings

HELD = (
    "weigh-pear", "weigh-pear", "spend", "step", "step", "gather-2", "choose", "after-save", "quit", "wait here",
    "wait here",
)  # fmt: skip
"""What is under way when the fifth process is killed: in both cells, in models, and in steps, one of them a child's."""

DONE = ("weigh-apple", "weigh-apple", "weigh-plum", "weigh-plum", "gather-1", "before-doze", "before-save")


async def cut_off(folder: Path) -> None:
    """Begin new work, by a Runtime without definitions of the earlier work, which stays as it is."""
    world, clock = World(HELD), VirtualClock()
    clock.advance(40)
    shutil.rmtree(WORKSPACE, ignore_errors=True)
    Path(WORKSPACE).mkdir()
    (Path(WORKSPACE) / "note.txt").write_text("one\n")
    files, earlier = Workspace(WORKSPACE).tools(), [*agents(world), *FUNCTIONS]
    async with runtime_since_7(folder / STORE, world, files, without=earlier, clock=clock) as made:
        # A command is lost if its machine was started again. The maker's machine was not, so tests there would adopt
        # the commands: they are given another boot id.
        made._command_engine.boot = "boot of the maker"
        await _begin_turns(made)
        for name in FUNCTIONS_SINCE_7.keys() - {"stepping"}:
            await made.start(name, id=name)
        await made.start("stepping", {"word": "alone"}, id="stepping")
        await until(lambda: _waits(made, "quitting"))
        await made.handle("quitting").cancel("enough")
        await made.command(["sh", "-c", "echo begun; exec sleep 100000"], key="server", cwd="/")
        await _begin_monitors(made)

        async def everything() -> bool:
            booking = await (await made.session("booking")).pending()
            building = await (await made.session("building")).pending()
            compiling = await made.store.session("compiling")
            begun = sorted(world.begun) == sorted([*HELD, *DONE])
            held = compiling is not None and compiling.state == "parked"
            return begun and held and bool(booking and building) and await _waits(made, "dozing")

        await until(everything)
        keys = folder / "keys.json"
        keys.write_text(json.dumps(json.loads(keys.read_text()) | world.keys, indent=1) + "\n")
        await asyncio.sleep(1)  # for what is still on its way to the disk
        await rest()


async def _begin_turns(made: Runtime) -> None:
    for name in ("monty", "cpython"):
        await (await made.session(f"in-{name}", agent=name)).send("weigh them", key=f"{name}-1")
    await (await made.session("compiling", agent="compiler")).send("call compile_all")
    await (await made.session("spending", agent="spender", metadata={"purse": "red"})).send("spend")
    await (await made.session("booking", agent="booker")).send("call mcp__tables__book place=garden")
    await (await made.session("building", agent="builder")).send("call build name=golden")
    cashier = await made.session("paying-by-card", agent="cashier")
    await cashier.run("my card is 4000-1234", key="card-1")
    await cashier.send("wait here with 5000-4321", key="card-2")
    await cashier.send("and 6000-7890 too", key="card-3")
    edits = "call edit_file path=note.txt old_text=one new_text=two and write_file path=new.txt content=three"
    await (await made.session("editing", agent="editor")).run(edits)


async def _begin_monitors(made: Runtime) -> None:
    """Start two monitors. A line of the first runs a turn, whose model is held; its next line is in the output, and the
    session is not told of it. A line of the second waits in the outbox for the next turn."""
    watching = await made.session("watching", agent="watcher")
    script = "echo wait here for line one; sleep 2; echo line two; exec sleep 100000"
    await watching.monitor(MonitorSpec("lines", ["sh", "-c", script], cwd="/", persistent=True))
    noting = await made.session("noting", agent="watcher")
    script = "echo line three; exec sleep 100000"
    await noting.monitor(MonitorSpec("notes", ["sh", "-c", script], cwd="/", persistent=True, wake="notify"))

    async def told() -> bool:
        if [each.event_count for one in (watching, noting) for each in (await one.monitors()).monitors] != [1, 1]:
            return False
        output = [chunk async for chunk in made.handle("watching.monitor.lines.1").output()]
        return b"line two" in b"".join(output)

    await until(told)


async def _waits(made: Runtime, name: str) -> bool:
    return await made.handle(name).status() == "waiting"


LIVES = {"begin": begin, "park": park, "answer": answer, "interrupt": interrupt, "cut_off": cut_off}
KILLED = ("begin", "interrupt", "cut_off")


def main(folder: Path) -> None:
    for life in LIVES:
        child = subprocess.Popen([sys.executable, "-m", "tests.golden.make", life, str(folder)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        if life in KILLED:
            assert child.stdout.readline() == b"ready\n"
            child.kill()
        status = child.wait()
        assert status == (-signal.SIGKILL if life in KILLED else 0), f"{life} ended with {status}"
    end_commands(folder / JOBS)
    shutil.rmtree(WORKSPACE)
    (folder / f"{STORE}-shm").unlink()  # made anew by the next process that opens the file
    for path in folder.rglob("*"):
        if path.is_socket():
            path.unlink()


def end_commands(jobs: Path) -> None:
    """Kill the commands that outlived their Runtime. The shims are killed first, so that they write no status and the
    store stays as its Runtime left it."""
    groups = [
        (int(found["shim"].split()[0]), int(found["leader"].split()[0]))
        for started in jobs.glob("*/started")
        for found in [dict(line.split(" ", 1) for line in started.read_text().splitlines())]
    ]
    for shim, leader in groups:
        with contextlib.suppress(ProcessLookupError):
            os.kill(shim, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pair in groups for pid in pair):
        assert time.monotonic() < end, "a command of the maker still lives"
        time.sleep(0.01)


if __name__ == "__main__":
    setattr(socket, "gethostname", lambda: HOST)  # noqa: B010  # type checkers refuse the assignment
    if len(sys.argv) == 3:
        asyncio.run(LIVES[sys.argv[1]](Path(sys.argv[2])))
    else:
        where = Path(sys.argv[1])
        where.mkdir(parents=True)
        main(where)
