"""One of three processes on one file, which says and asks everything that a host may, in an order of chance.

    python -m tests.soak.verbs FOLDER SEED      until SIGTERM, which it obeys at once and in peace
    python -m tests.soak.verbs FOLDER finish    answer everything that waits, until nothing does

`ledger` has a line for each effect, `tried` one for each thing about to be asked, `told` one for each that was
acknowledged. None of them can be undone by a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from perdure import Agent, ModelRequest, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.engine.lease import LeaseTerms
from perdure.errors import OutcomeUnknown, PerdureError, UnknownProcess
from perdure.model.process import TERMINAL
from perdure.sessions.session import Session
from perdure.testing import FunctionModel
from tests.soak.program import append

SESSIONS = 6
COLLECTORS = 4
LEASE = LeaseTerms(term=3, renewal=0.5)
LASTS = 0.03
"""Seconds that an effect takes, half of them before it is done."""
PAUSE = 0.02
TOOLS = ("pay", "note", "check", "mail", "build", "survey")
PATIENCE = 120.0


class World:
    """What is outside of the store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def act(self, name: str, key: str) -> str:
        await asyncio.sleep(LASTS / 2)
        append(self.folder / "ledger", f"{name} {key}")
        await asyncio.sleep(LASTS / 2)
        return "done"

    def keys(self) -> list[tuple[str, str]]:
        """Calls that wait for a completion from outside, and the key of each."""
        path = self.folder / "keys"
        found = [line.split(" ") for line in path.read_text().splitlines()] if path.exists() else []
        return [(call_id, key) for call_id, key in found]


Tool = ToolContext[World]


@tool
async def pay(ctx: Tool) -> str:
    return await ctx.deps.act("pay", ctx.call_id)


@tool(recovery="rerun")
async def note(ctx: Tool) -> str:
    return await ctx.deps.act("note", ctx.call_id)


@tool(recovery="ask")
async def check(ctx: Tool) -> str:
    return await ctx.deps.act("check", ctx.call_id)


@tool(approval="ask")
async def mail(ctx: Tool) -> str:
    return await ctx.deps.act("mail", ctx.call_id)


@tool(deferred=True, recovery="rerun")
async def build(ctx: Tool) -> None:
    append(ctx.deps.folder / "keys", f"{ctx.call_id} {ctx.defer()}")


@tool(background=True, recovery="rerun")
async def survey(ctx: Tool) -> str:
    return await ctx.deps.act("survey", ctx.call_id)


def model(request: ModelRequest) -> str | list[ToolCall]:
    last = request.messages[-1]
    asked = [name for name in last.text.split(" ") if name in TOOLS] if last.text.startswith("do ") else []
    return [ToolCall(name=name) for name in asked] if last.role == "user" and asked else "well"


@process
async def collecting(ctx: ProcessContext[World]) -> list[int]:
    """Every amount that it hears of, until it hears of 0."""
    heard: list[int] = ctx.state or []
    while (amount := await ctx.wait_signal("add", int)) != 0:
        heard.append(amount)
        await ctx.checkpoint(heard)
    return heard


@process
async def adding(ctx: ProcessContext[World]) -> list[str]:
    """Two branches, a pause, and something that is done at most once."""

    async def part(number: int) -> str:
        return await ctx.step(ctx.deps.act, "part", f"{ctx.process_id}.{number}", recovery="rerun")

    done = await ctx.gather(part(0), part(1))
    await ctx.sleep(LASTS)
    try:
        return [*done, await ctx.step(ctx.deps.act, "end", ctx.process_id, recovery="once")]
    except OutcomeUnknown:
        return [*done, "unknown"]


def runtime(world: World) -> Runtime:
    agent = Agent(FunctionModel(model), name="host", tools=[pay, note, check, mail, build, survey])
    return Runtime(
        world.folder / "agent.db", agents=[agent], processes=[collecting, adding], deps=world, lease=LEASE, grace=0.2
    )


class Host:
    """Says and asks at random. Each verb notes what it is about to do, does it, and notes that it was acknowledged."""

    def __init__(self, made: Runtime, world: World, dice: random.Random) -> None:
        self.made, self.world, self.dice = made, world, dice
        self.count = 0

    def tried(self, line: str) -> None:
        append(self.world.folder / "tried", line)

    def told(self, line: str) -> None:
        append(self.world.folder / "told", line)

    async def session(self) -> Session:
        rows = await self.made.sessions.list(limit=40)
        names = [f"s{number}" for number in range(SESSIONS)] + [row.id for row in rows if row.id.startswith("f-")]
        return await self.made.session(self.dice.choice(names))

    def words(self) -> tuple[str, str]:
        """What to say, and a key that nobody else uses."""
        self.count += 1
        tools = self.dice.sample(TOOLS, self.dice.choice([0, 1, 1, 2, 3]))
        return f"do {' '.join(tools)} {self.count}", f"{os.getpid()}-{self.count}"

    async def send(self) -> None:
        session, (said, key) = await self.session(), self.words()
        receipt = await session.send(said, key=key)
        self.told(f"turn {receipt.turn_id}")
        if self.dice.random() < 0.2:
            again = await session.send(said, key=key)
            self.told(f"same {receipt.turn_id} {again.turn_id}")

    async def run(self) -> None:
        session, (said, key) = await self.session(), self.words()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                self.told(f"turn {(await session.run(said, key=key)).turn_id}")

    async def stream(self) -> None:
        session, (said, key) = await self.session(), self.words()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5), session.stream(said, key=key) as turn:
                self.told(f"turn {turn.turn_id}")
                async for _ in turn:
                    pass

    async def steer(self) -> None:
        self.count += 1
        receipt = await (await self.session()).steer("a hint", key=f"{os.getpid()}-{self.count}")
        self.told(f"turn {receipt.turn_id}")

    async def cancel(self) -> None:
        await (await self.session()).cancel("by chance")

    async def fork(self) -> None:
        session = await self.session()
        if len(await session.history()) > 1 and len(await self.made.sessions.list(prefix="f-")) < SESSIONS:
            self.count += 1
            fork = await session.fork(session_id=f"f-{os.getpid()}-{self.count}")
            self.told(f"fork {fork.id} {len(await fork.history())}")

    async def look(self) -> None:
        session = await self.session()
        await session.history()
        await session.usage()
        await self.made.processes.list()
        await self.made.processes.wakes()

    async def decide(self, session: Session | None = None) -> None:
        """Answer what waits in a session."""
        session = session or await self.session()
        for pending in await session.pending():
            match pending.kind, self.dice.random() < 0.7:
                case "approval", True:
                    await session.approve(pending.call_id)
                case "approval", False:
                    await session.reject(pending.call_id, "no")
                    self.told(f"denied {pending.call_id}")
                case "recovery", True:
                    await session.settle(pending.call_id, "rerun")
                case "recovery", False:
                    await session.settle(pending.call_id, "done", value="settled")
                    self.told(f"ok {pending.call_id} settled")
                case _:
                    pass

    async def resolve(self, all_of_them: bool = False) -> None:
        keys = self.world.keys()
        for call_id, key in keys if all_of_them else keys[-3:]:
            with contextlib.suppress(PerdureError):
                await self.made.resolve(key, "built")
                self.told(f"ok {call_id} built")

    async def start(self) -> None:
        self.count += 1
        handle = await self.made.start(adding, id=f"a-{os.getpid()}-{self.count}")
        self.told(f"process {handle.id}")

    async def stop(self) -> None:
        rows = await self.made.processes.list(status=["running", "waiting"])
        found = [row.id for row in rows if row.id.startswith("a-")]
        if found:
            await self.made.handle(self.dice.choice(found)).cancel("by chance")

    async def signal(self) -> None:
        self.count += 1
        name, amount = f"c{self.dice.randrange(COLLECTORS)}", os.getpid() * 10_000 + self.count
        self.tried(f"signal {name} {amount}")
        await self.made.handle(name).signal("add", amount, key=str(amount))
        self.told(f"signal {name} {amount}")

    def verbs(self) -> list[Callable[[], Awaitable[None]]]:
        often = [self.send, self.send, self.run, self.steer, self.decide, self.decide, self.signal, self.signal]
        return [*often, self.stream, self.cancel, self.fork, self.look, self.resolve, self.start, self.stop]

    async def chance(self) -> None:
        """One verb. What is refused, because another process was quicker, is refused typed."""
        verb = self.dice.choice(self.verbs())
        with contextlib.suppress(PerdureError):
            await verb()
        append(self.world.folder / "cases", getattr(verb, "__name__", "verb"))


async def live(folder: Path, seed: str) -> None:
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    world = World(folder)
    async with runtime(world) as made:
        host = Host(made, world, random.Random(seed))
        for number in range(COLLECTORS):
            await made.start(collecting, id=f"c{number}")
        (folder / f"ready-{os.getpid()}").touch()

        async def talk() -> None:
            while True:
                await host.chance()
                await asyncio.sleep(PAUSE)

        await asyncio.gather(talk(), talk(), talk())


async def finish(folder: Path) -> None:
    world = World(folder)
    async with runtime(world) as made, asyncio.timeout(PATIENCE):
        host = Host(made, world, random.Random(0))
        for number in range(COLLECTORS):
            with contextlib.suppress(UnknownProcess):
                await made.handle(f"c{number}").signal("add", 0, key="the last")
        while True:
            await made.wait_idle()
            rows = [row for row in await made.sessions.list(limit=10_000) if row.turn is not None]
            live = [row for row in await made.processes.list(limit=100_000) if row.status not in TERMINAL]
            if not rows and not live:
                return
            for row in rows:
                session = await made.session(row.id)
                with contextlib.suppress(PerdureError):
                    await session.resume()
                    await host.decide(session)
            for each in live:
                with contextlib.suppress(PerdureError):
                    await made.processes.resume(each.id)
            await host.resolve(all_of_them=True)
            await asyncio.sleep(PAUSE)


if __name__ == "__main__":
    where, what = Path(sys.argv[1]), sys.argv[2]
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(finish(where) if what == "finish" else live(where, what))
