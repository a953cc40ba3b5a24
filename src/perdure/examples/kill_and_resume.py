"""Start the agent in a process of its own, kill it with SIGKILL at chosen points, start it again, and count.

The seed picks the points. What is counted at the end is read from the ledger of the services and from the store, not
from the agent itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec
from msgspec import Struct, field

from perdure.engine.journal import load
from perdure.errors import PerdureError
from perdure.examples.trip import SESSION, KillPoint, Line, Services, agent, read_ledger
from perdure.model.event import AnyEvent, TextDelta, ToolFinished, ToolProgress
from perdure.model.message import ToolCall
from perdure.model.outcome import Finished
from perdure.model.record import Closed, Ended, Record, Replied
from perdure.ports.store import Store
from perdure.stores.sqlite import SqliteStore
from perdure.wire import outcome_kind

MAX_STARTS = 5


class EventWatcher:
    """What the agent's events said so far: enough to recognise a kill point."""

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

    def reached(self, point: KillPoint, event: AnyEvent) -> bool:
        if point.after and point.after not in self.finished:
            return False
        if point.who == "model":
            return isinstance(event, TextDelta) and self.words >= point.at
        return isinstance(event, ToolProgress) and event.tool == point.who and event.value["done"] * 10 >= point.at


POINTS = [
    KillPoint("inside charge_card (once): the money has moved, and no record says so", "charge_card", 6),
    KillPoint("inside charge_card (once): before any money moved", "charge_card", 2),
    KillPoint("inside book_seat (rerun): the seat is taken, and no record says so", "book_seat", 6),
    KillPoint("while the model speaks", "model", 6, after="search_trains"),
    KillPoint("between two parallel calls: one is recorded, the other runs", "book_seat", 9, after="reserve_room"),
    KillPoint("just after charge_card was recorded", "model", 1, after="charge_card"),
    KillPoint("inside write_plan (rerun): half a file is on disk", "write_plan", 5),
    KillPoint("in the last words of the answer", "model", 8, after="write_plan"),
]


def points(seed: int) -> list[KillPoint]:
    """One kill for the first seeds, two different ones for larger ones."""
    first = seed % len(POINTS)
    if seed < len(POINTS):
        return [POINTS[first]]
    second = (first + 1 + (seed // len(POINTS) - 1) % (len(POINTS) - 1)) % len(POINTS)
    return [POINTS[first], POINTS[second]]


# ---------------------------------------------------------------------- the run


class Kill(Struct, frozen=True):
    """One kill: who died, where, and the records that were on disk at that moment."""

    pid: int
    status: int
    where: str
    records: list[Record]
    lines: int


class EffectCount(Struct):
    """One thing that was done outside: how often it began, how often it took effect, and what its record says."""

    key: str
    who: str
    contract: str
    began: int = 0
    effects: int = 0
    recorded: str = "nothing"
    claimed: int = 0


class DemoReport(Struct):
    """What the demo proves, or fails to. `broken` is empty when every promise held."""

    kills: int
    answers: int
    outcomes: int
    commits: int
    rows: list[EffectCount]
    repeated: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


class DemoView(Protocol):
    """What shows a run while it happens."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def opened(self, seed: int, where: list[str], folder: Path) -> None: ...

    def started(self, pid: int, start: int) -> None: ...

    def event(self, event: AnyEvent) -> None: ...

    def outside(self, lines: Sequence[Line], records: Sequence[Record]) -> None: ...

    def killed(self, kill: Kill) -> None: ...

    def report(self, report: DemoReport, kills: Sequence[Kill]) -> None: ...


class SilentDemo:
    """Shows nothing."""

    def __enter__(self) -> SilentDemo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def opened(self, seed: int, where: list[str], folder: Path) -> None: ...

    def started(self, pid: int, start: int) -> None: ...

    def event(self, event: AnyEvent) -> None: ...

    def outside(self, lines: Sequence[Line], records: Sequence[Record]) -> None: ...

    def killed(self, kill: Kill) -> None: ...

    def report(self, report: DemoReport, kills: Sequence[Kill]) -> None: ...


class KillAndResume:
    """One run: the agent is started until it ends by itself. `_kills` grows by one with every kill."""

    def __init__(self, folder: Path, seed: int, pace: float, view: DemoView) -> None:
        self._folder, self._seed, self._pace, self._view = folder, seed, pace, view
        self._points = points(seed)
        self._watcher = EventWatcher()
        self._kills: list[Kill] = []

    async def run(self) -> DemoReport:
        store = SqliteStore(self._folder / "demo.db")
        await store.open()
        try:
            with self._view:
                self._view.opened(self._seed, [p.where for p in self._points], self._folder)
                for start in range(1, MAX_STARTS + 1):
                    if await self._run_once(store, start):
                        break
                report = await self._count(store)
            self._view.report(report, self._kills)
        finally:
            await store.close()
        return report

    async def _run_once(self, store: Store, start: int) -> bool:
        """One process from start to end; True when it ended by itself."""
        async with self._child() as child:
            self._view.started(child.pid, start)
            polling = asyncio.create_task(self._poll(store))
            try:
                where = await self._watch(child)
                if where is not None:
                    child.send_signal(signal.SIGKILL)
                status = await child.wait()
            finally:
                polling.cancel()
            await self._outside(store)
            if where is None:
                if status != 0:
                    log = (self._folder / "agent.log").read_text(errors="replace").strip().splitlines()
                    raise PerdureError(f"the agent ended with status {status}: {log[-1] if log else 'it said nothing'}")
                return True
            await self._record_kill(store, child.pid, status, where)
        return False

    async def _record_kill(self, store: Store, pid: int, status: int, where: str) -> None:
        lines = len(read_ledger(self._folder / "ledger.jsonl"))
        self._kills.append(Kill(pid, status, where, await turn_records(store), lines))
        self._view.killed(self._kills[-1])
        await asyncio.sleep(2.2 * self._pace)

    @contextlib.asynccontextmanager
    async def _child(self) -> AsyncGenerator[asyncio.subprocess.Process, None]:
        """The agent in a process of its own, killed when this context is left."""
        command = [sys.executable, "-m", "perdure.examples.trip", str(self._folder), str(self._pace)]
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

    async def _poll(self, store: Store) -> None:
        """Read the ledger and the store again and again, beside the agent that writes them."""
        while True:
            await self._outside(store)
            await asyncio.sleep(0.1)

    async def _outside(self, store: Store) -> None:
        self._view.outside(read_ledger(self._folder / "ledger.jsonl"), await turn_records(store))

    async def _count(self, store: Store) -> DemoReport:
        contracts = {s.name: s.recovery for s in agent(Services(self._folder, 0)).definition().catalog.specs}
        lines = read_ledger(self._folder / "ledger.jsonl")
        report = count(f"{SESSION}.1", lines, await turn_records(store), self._kills, contracts)
        if not self._kills:
            report.broken.append("it ended before it could be killed: nothing was shown")
        return report


async def turn_records(store: Store) -> list[Record]:
    """The records of the agent's only turn, as they are on disk now."""
    row = await store.session(SESSION)
    return [] if row is None else [record for _, record in await load(store, row.sid, 1, 1)]


# ---------------------------------------------------------------------- the count


def count(
    turn: str, lines: Sequence[Line], records: Sequence[Record], kills: Sequence[Kill], contracts: Mapping[str, str]
) -> DemoReport:
    """Compare what happened outside with what is on disk."""
    rows = _rows(turn, lines, records, contracts)
    closed = [r for r in records if isinstance(r, Closed)]
    replies = _replies(records)
    ended = [r for r in records if isinstance(r, Ended)]
    report = DemoReport(len(kills), len(replies), len(ended), len(closed), rows)
    report.unknown = [f"{r.who} ({r.key})" for r in rows if r.recorded == "outcome_unknown"]
    _count_repeats(report)
    _count_losses(report, records, kills)
    _check_once(report)
    _check_recorded_stays(report, turn, lines, kills)
    if len(closed) != 1 or not isinstance(closed[0].outcome, Finished):
        report.broken.append("the turn did not end in exactly one commit as finished")
    return report


def _replies(records: Sequence[Record]) -> list[Replied]:
    found = [r for r in records if isinstance(r, Replied)]
    return found + [r.reply for r in records if isinstance(r, Closed) and r.reply is not None]


def _rows(
    turn: str, lines: Sequence[Line], records: Sequence[Record], contracts: Mapping[str, str]
) -> list[EffectCount]:
    rows: dict[str, EffectCount] = {}
    for line in lines:
        row = rows.setdefault(line.key, EffectCount(line.key, line.who, contracts.get(line.who, "model")))
        row.began += line.what in ("began", "asked")
        row.effects += line.what == "effect"
    for reply in _replies(records):
        asked = rows.get(f"{turn}.{reply.step}")
        if asked is not None:
            asked.recorded, asked.claimed = "answer", reply.interrupted
    for record in records:
        if isinstance(record, Ended):
            key = f"{turn}.{record.call}"
            row = rows.setdefault(key, EffectCount(key, _tool_name(records, record.call), "?"))
            row.recorded, row.claimed = outcome_kind(record.outcome), record.repeated
    return list(rows.values())


def _tool_name(records: Sequence[Record], call: str) -> str:
    step, _, index = call.partition(".")
    for reply in _replies(records):
        calls = [p for p in reply.parts if isinstance(p, ToolCall)]
        if reply.step == int(step) and int(index) < len(calls):
            return calls[int(index)].name
    return "?"


def _count_repeats(report: DemoReport) -> None:
    """A second start is allowed for what was in flight at a kill, if its contract says so, and must be on record."""
    for row in report.rows:
        again = max(0, row.began - 1)
        if row.contract != "once" and row.claimed != again:
            report.broken.append(f"{row.who} was repeated {again} times, its record says {row.claimed}")
        if not again:
            continue
        report.repeated.append(f"{row.who} ({row.key}) {'asked' if row.contract == 'model' else 'began'} {row.began}×")
        if row.contract == "once":
            continue  # judged below
        if again > report.kills:
            report.broken.append(f"{row.who} was repeated {again} times for {report.kills} kills")


def _count_losses(report: DemoReport, records: Sequence[Record], kills: Sequence[Kill]) -> None:
    """Lost is: a record that was on disk and is not any more, or an effect outside that no record knows of."""
    for kill in kills:
        for ordinal, record in enumerate(kill.records):
            if ordinal >= len(records) or records[ordinal] != record:
                report.lost.append(f"record {ordinal}, on disk when {kill.pid} was killed")
    for row in report.rows:
        if row.recorded == "nothing":
            report.lost.append(f"{row.who} ({row.key}) happened outside and has no record")
    report.broken += [f"lost: {what}" for what in report.lost]


def _check_once(report: DemoReport) -> None:
    for row in report.rows:
        if row.contract == "once" and (row.began > 1 or row.effects > 1):
            report.broken.append(f"{row.who} is once and began {row.began} times, with {row.effects} effects")
    charged = sum(row.effects for row in report.rows if row.who == "charge_card")
    if charged != 1:
        report.broken.append(f"the card was charged {charged} times")


def _check_recorded_stays(report: DemoReport, turn: str, lines: Sequence[Line], kills: Sequence[Kill]) -> None:
    """What was on record at a kill must not happen again after it."""
    for kill in kills:
        settled = {f"{turn}.{r.call}" for r in kill.records if isinstance(r, Ended)}
        settled |= {f"{turn}.{r.step}" for r in kill.records if isinstance(r, Replied)}
        again = Counter(line.who for line in lines[kill.lines :] if line.key in settled)
        report.broken += [f"{who} was recorded before the kill and happened again" for who in again]
