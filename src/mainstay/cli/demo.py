"""`mainstay demo`: an agent at work is killed with SIGKILL, started again, and finishes; then everything is counted.

The parent is the stage: it starts the agent in a process of its own, watches its events, kills it at the point that
the seed picks, and starts the same program again. What it shows at the end it has read from the services' ledger and
from the store itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from mainstay.cli.demo_agent import SESSION, Point, World, agent, read_ledger
from mainstay.cli.demo_count import Death, Report, count
from mainstay.cli.host import FAILED, OK, JsonOption, Refused, is_terminal, on_signals, perform
from mainstay.cli.render import print_json
from mainstay.model.event import AnyEvent, TextDelta, ToolFinished, ToolProgress

if TYPE_CHECKING:
    from mainstay.cli.demo_view import View
    from mainstay.model.record import Record
    from mainstay.ports.store import Store

FAST = 0.04
MAX_LIVES = 5


class Watcher:
    """What the parent has seen of the agent: enough to recognise a kill point when it comes."""

    def __init__(self) -> None:
        self.finished: set[str] = set()
        self.words = 0

    def see(self, event: AnyEvent) -> None:
        match event:
            case TextDelta(text=text):
                self.words += len(text.split())
            case ToolFinished(tool=tool):
                self.finished.add(tool)
                self.words = 0
            case _:
                pass

    def reached(self, point: Point, event: AnyEvent) -> bool:
        if point.after and point.after not in self.finished:
            return False
        if point.who == "model":
            return isinstance(event, TextDelta) and self.words >= point.at
        return isinstance(event, ToolProgress) and event.tool == point.who and event.value["done"] * 10 >= point.at


POINTS = [
    Point("inside charge_card (once): the money has moved, nobody has written it down", "charge_card", 6),
    Point("inside charge_card (once): before any money moved", "charge_card", 2),
    Point("inside book_seat (rerun): the seat is taken, nobody has written it down", "book_seat", 6),
    Point("while the model speaks", "model", 6, after="search_trains"),
    Point("between two parallel calls: one is recorded, the other still runs", "book_seat", 9, after="reserve_room"),
    Point("just after charge_card was recorded", "model", 1, after="charge_card"),
    Point("inside write_plan (rerun): half a file is on disk", "write_plan", 5),
    Point("in the last words of the answer", "model", 8, after="write_plan"),
]


def points(seed: int) -> list[Point]:
    """One kill for the first seeds, two different ones for larger ones."""
    first = seed % len(POINTS)
    if seed < len(POINTS):
        return [POINTS[first]]
    second = (first + 1 + (seed // len(POINTS) - 1) % (len(POINTS) - 1)) % len(POINTS)
    return [POINTS[first], POINTS[second]]


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Where to kill: 0 to 7, and twice from 8 on.")] = 0,
    fast: Annotated[bool, typer.Option("--fast", help="Do not wait for people to read.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with the store and the ledger.")] = False,
    json: JsonOption = False,
) -> None:
    """Watch a durable agent being killed in mid-turn and finishing. No key, no network.

    Exit codes: 0 every promise held, 1 one was broken.
    """

    async def work() -> int:
        from mainstay.cli.demo_view import PlainView, RichView, SilentView

        folder = Path(tempfile.mkdtemp(prefix="mainstay-demo-"))
        pace = FAST if fast else 1.0
        view: View = SilentView() if json else RichView(pace) if is_terminal() else PlainView()
        me = asyncio.current_task()
        assert me is not None
        try:
            # Also when the terminal is closed: neither the agent nor the folder may stay behind.
            with on_signals(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), me.cancel)):
                report = await Stage(folder, seed, pace, view).play()
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
        if json:
            print_json(msgspec.to_builtins(report) | {"folder": str(folder) if keep else None})
        elif keep:
            sys.stdout.write(f"kept: {folder}\n")
        return FAILED if report.broken else OK

    perform(work, json)


class Stage:
    """One performance. `deaths` grows by one with every kill."""

    def __init__(self, folder: Path, seed: int, pace: float, view: View) -> None:
        self._folder, self._seed, self._pace, self._view = folder, seed, pace, view
        self._points = points(seed)
        self._watcher = Watcher()
        self._deaths: list[Death] = []

    async def play(self) -> Report:
        from mainstay.stores.sqlite import SqliteStore

        store = SqliteStore(self._folder / "demo.db")
        await store.open()
        try:
            with self._view:
                self._view.opened(self._seed, [p.where for p in self._points], self._folder)
                for life in range(1, MAX_LIVES + 1):
                    if await self._live(store, life):
                        break
                report = await self._count(store)
            self._view.report(report, self._deaths)
        finally:
            await store.close()
        return report

    async def _live(self, store: Store, life: int) -> bool:
        """One process from start to end; True when it ended by itself."""
        async with self._child() as child:
            self._view.started(child.pid, life)
            looking = asyncio.create_task(self._look(store))
            try:
                where = await self._watch(child)
                if where is not None:
                    child.send_signal(signal.SIGKILL)
                status = await child.wait()
            finally:
                looking.cancel()
            await self._outside(store)
            if where is None:
                if status != 0:
                    log = (self._folder / "agent.log").read_text(errors="replace").strip().splitlines()
                    raise Refused(f"the agent ended with status {status}: {log[-1] if log else 'it said nothing'}", 1)
                return True
            await self._mourn(store, child.pid, status, where)
        return False

    async def _mourn(self, store: Store, pid: int, status: int, where: str) -> None:
        lines = len(read_ledger(self._folder / "ledger.jsonl"))
        self._deaths.append(Death(pid, status, where, await turn_records(store), lines))
        self._view.died(self._deaths[-1])
        await asyncio.sleep(2.2 * self._pace)

    @contextlib.asynccontextmanager
    async def _child(self) -> AsyncGenerator[asyncio.subprocess.Process, None]:
        """The agent in a process of its own, which does not outlive us."""
        command = [sys.executable, "-m", "mainstay.cli.demo_agent", str(self._folder), str(self._pace)]
        command.append(msgspec.json.encode(self._points).decode())
        with (self._folder / "agent.log").open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        try:
            yield child
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()

    async def _watch(self, child: asyncio.subprocess.Process) -> str | None:
        """Follow the agent's events; the place where it is to be killed, or None when it ended."""
        assert child.stdout is not None
        decode = msgspec.json.Decoder(AnyEvent).decode
        async for line in child.stdout:
            event = decode(line)
            self._watcher.see(event)
            self._view.event(event)
            for point in self._points:
                if self._watcher.reached(point, event):
                    self._points.remove(point)
                    return point.where
        return None

    async def _look(self, store: Store) -> None:
        """Read the ledger and the store again and again, beside the agent that writes them."""
        while True:
            await self._outside(store)
            await asyncio.sleep(0.1)

    async def _outside(self, store: Store) -> None:
        self._view.outside(read_ledger(self._folder / "ledger.jsonl"), await turn_records(store))

    async def _count(self, store: Store) -> Report:
        contracts = {s.name: s.recovery for s in agent(World(self._folder, 0)).definition().tool_specs()}
        lines = read_ledger(self._folder / "ledger.jsonl")
        report = count(f"{SESSION}.1", lines, await turn_records(store), self._deaths, contracts)
        if not self._deaths:
            report.broken.append("it ended before it could be killed: nothing was shown")
        return report


async def turn_records(store: Store) -> list[Record]:
    """The records of the demo's only turn, as they are on disk now."""
    from mainstay.engine.journal import load

    row = await store.session(SESSION)
    return [] if row is None else [record for _, record in await load(store, row.sid, 1, 1)]
