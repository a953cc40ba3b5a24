"""Points: every call that leaves the engine passes one, and at one of them the process dies.

    kind     what passes                               ways to die there
    record   a write of an owner: turn or process      before, lost, hang, late, unheard
    write    any other write                           before, lost, hang, unheard
    blob     bytes put beside the store                before, lost, hang
    model    a request to the model                    before, lost, hang
    chunk    a piece of the answer arrives             before
    body     a tool's body begins, or has ended        before
    effect   something outside is changed              before, lost, hang
    mark     a point that a scenario names itself      before

`before`: the call never applied. `lost`: it applied and nobody heard of it. `hang`: it never came back, everything else
went on until nothing moved, then the process died. `late`: as `hang`, but the process was only thought dead; its call
arrives after another has taken over. `unheard`: no crash at all, the reply was lost and the caller told so.

A dead incarnation is frozen. Its ports never answer again, so no `finally` of it can reach the store: cancelling it
would be kinder than a kill is.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec import Struct

from mainstay.errors import StoreUnavailable

R = TypeVar("R")

Mode: TypeAlias = Literal["before", "lost", "hang", "late", "unheard"]
Kind: TypeAlias = Literal["record", "write", "blob", "model", "chunk", "body", "effect", "mark"]

MODES: dict[Kind, tuple[Mode, ...]] = {
    "record": ("before", "lost", "hang", "late", "unheard"),
    "write": ("before", "lost", "hang", "unheard"),
    "blob": ("before", "lost", "hang"),
    "model": ("before", "lost", "hang"),
    "chunk": ("before",),
    "body": ("before",),
    "effect": ("before", "lost", "hang"),
    "mark": ("before",),
}

QUIET_PASSES = 60
"""So many passes of the event loop without a call at any port: nothing moves any more."""


class Point(Struct, frozen=True):
    """A seam that a run passed. `name` is unique in its run: what is called, and how often it was before."""

    name: str
    kind: Kind


class Crash(Struct, frozen=True):
    """Where an incarnation ends, and how."""

    point: str
    mode: Mode = "before"

    def __str__(self) -> str:
        return f"{self.mode} {self.point}"


class LedgerLine(Struct, frozen=True, omit_defaults=True):
    """Something that happened outside: `name` under `key`, done by that incarnation."""

    name: str
    key: str
    incarnation: int = 1
    data: Any = None


class Ledger:
    """The world outside, which no crash undoes: one line for each effect, synced before the effect's caller goes on."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lines: list[LedgerLine] = []

    def write(self, line: LedgerLine) -> None:
        if self._path is None:
            self._lines.append(line)
            return
        text = json.dumps([line.name, line.key, line.incarnation, line.data]) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lines(self) -> list[LedgerLine]:
        if self._path is None:
            return list(self._lines)
        if not self._path.exists():
            return []
        return [LedgerLine(*json.loads(line)) for line in self._path.read_text().splitlines()]


class Seams:
    """The points of one incarnation, and what is to happen at one of them.

    `dead` is set for good by the crash. `late` holds the call that will arrive after the takeover. All of it belongs to
    the incarnation's event loop, except that sync tools pass from their threads under `_lock`.
    """

    def __init__(self, crash: Crash | None = None, *, real: bool = False, incarnation: int = 1) -> None:
        self.crash, self.real, self.incarnation = crash, real, incarnation
        self.trace: list[Point] = []
        self.current: list[str] = []
        self.dead = False
        self.disposing = False
        self.crashed: asyncio.Future[None] | None = None
        self.released: asyncio.Event | None = None
        self.on_death: list[Callable[[], None]] = []
        self._loop = asyncio.get_running_loop()
        self._counts: dict[str, int] = {}
        self._busy = 0
        self._moves = 0
        self._wrote = asyncio.Event()
        self._lock = threading.Lock()
        self._thaw = threading.Event()
        # An event loop refers to tasks weakly: without this, what is frozen would be collected, and unwind.
        self._frozen: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------ passing

    async def call(self, kind: Kind, label: str, work: Callable[[], Awaitable[R]]) -> R:
        """Do `work` at a point."""
        await self.alive()
        point, mode = self._pass(kind, label)
        if mode == "before":
            await self.die()
        elif mode == "hang":
            await self._hang()
        elif mode == "late":
            await self._wait_for_takeover()
        self._busy += 1
        self.current.append(point.name)
        try:
            result = await work()
        finally:
            self._busy -= 1
            self.current.remove(point.name)
        await self.alive()
        if mode == "lost":
            await self.die()
        if mode == "unheard":
            raise StoreUnavailable(f"the reply of {point.name} was lost")
        self._moved()
        return result

    async def reach(self, kind: Kind, label: str) -> None:
        """Pass a point where nothing is done but arriving there."""
        await self.alive()
        _, mode = self._pass(kind, label)
        if mode is not None:
            await self.die()

    async def quietly(self, work: Awaitable[R]) -> R:
        """Do something that is no point, such as reading."""
        if self.dead and isinstance(work, Coroutine):
            work.close()
        await self.alive()
        self._busy += 1
        try:
            return await work
        finally:
            self._busy -= 1

    def reach_now(self, kind: Kind, label: str) -> None:
        """The same as `reach` from a thread."""
        self.alive_now()
        with self._lock:
            _, mode = self._pass(kind, label)
        if mode is not None:
            self.die_now()

    def call_now(self, kind: Kind, label: str, work: Callable[[], R]) -> R:
        """The same as `call` from a thread; a hang there is a death."""
        self.alive_now()
        with self._lock:
            _, mode = self._pass(kind, label)
        if mode in ("before", "hang"):
            self.die_now()
        result = work()
        if mode == "lost":
            self.die_now()
        return result

    def _pass(self, kind: Kind, label: str) -> tuple[Point, Mode | None]:
        count = self._counts[label] = self._counts.get(label, 0) + 1
        point = Point(label if count == 1 else f"{label} #{count}", kind)
        self.trace.append(point)
        self._moves += 1
        mode = self.crash.mode if self.crash is not None and self.crash.point == point.name else None
        return point, mode

    def _moved(self) -> None:
        self._moves += 1
        self._wrote.set()

    async def next_move(self) -> None:
        """Wait until a call of this incarnation came back."""
        await self.alive()
        self._wrote.clear()
        await self._wrote.wait()

    # ------------------------------------------------------------------ dying

    async def die(self) -> None:
        """The end of this incarnation. Does not return."""
        self._kill()
        await self.alive()

    def die_now(self) -> None:
        self._kill()
        self.alive_now()

    def _kill(self) -> None:
        if self.real:
            os.kill(os.getpid(), signal.SIGKILL)
        self.dead = True
        for tell in self.on_death:
            tell()
        self._loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        if self.crashed is not None and not self.crashed.done():
            self.crashed.set_result(None)

    async def alive(self) -> None:
        """Pass while the incarnation lives; wait for ever when it is dead."""
        while self.dead:
            if self.disposing:
                raise asyncio.CancelledError
            self._frozen.append(self._loop.create_future())
            await self._frozen[-1]

    def alive_now(self) -> None:
        if self.dead:
            self._thaw.wait()
            raise SystemExit  # ends the body on its thread, long after its incarnation

    def dispose(self) -> None:
        """The case is over and judged: what is frozen may unwind now, with ports that refuse everything."""
        self.disposing = self.dead = True
        self._thaw.set()

    async def _hang(self) -> None:
        await self.quiet()
        await self.die()

    async def _wait_for_takeover(self) -> None:
        self.released = asyncio.Event()
        await self.quiet()
        for tell in self.on_death:
            tell()
        self._announce()
        await self.released.wait()

    async def quiet(self) -> None:
        """Wait until nothing moves but this."""
        passes, seen = 0, self._moves
        while passes < QUIET_PASSES:
            await asyncio.sleep(0 if not self._busy else 0.001)
            if self._busy or self._moves != seen:
                passes, seen = 0, self._moves
            else:
                passes += 1
