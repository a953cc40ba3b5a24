"""Make the golden store of the present tree: work of every kind, left by processes of which two were killed.

    python -m tests.golden.make FOLDER

It is run once for each schema, on the last tree before the next one. The folder then holds the store as SIGKILL left
it, WAL included, and `keys.json` with the signed keys of deferred calls, which no test can know beforehand.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from mainstay import Runtime
from mainstay.model.message import Scalar
from mainstay.model.process import WakePolicy, WakeTarget
from mainstay.testing import VirtualClock
from tests.golden.definitions import LARGE, World, runtime
from tests.kit import until

STORE = "agent.db"

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


LIVES = {"begin": begin, "park": park, "answer": answer, "interrupt": interrupt}


def main(folder: Path) -> None:
    for life in LIVES:
        child = subprocess.Popen([sys.executable, "-m", "tests.golden.make", life, str(folder)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        if life in ("begin", "interrupt"):
            assert child.stdout.readline() == b"ready\n"
            child.kill()
        status = child.wait()
        assert status in (0, -9), f"{life} ended with {status}"
    (folder / f"{STORE}-shm").unlink()  # made anew by whoever opens the file first


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(LIVES[sys.argv[1]](Path(sys.argv[2])))
    else:
        where = Path(sys.argv[1])
        where.mkdir(parents=True)
        main(where)
