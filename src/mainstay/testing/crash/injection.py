"""Fault injection: every call that leaves the engine passes a named point, and at one of them the process dies.

    kind     what passes                               ways to die there
    record   a write of an owner: turn or process      before, lost, hang, late, unheard
    write    any other write                           before, lost, hang, unheard
    blob     bytes put beside the store                before, lost, hang
    model    a request to the model                    before, lost, hang
    chunk    a piece of the answer arrives             before
    body     a tool's body begins, or has ended        before
    effect   something outside is changed              before, lost, hang
    mark     a point that a scenario names itself      before

`before`: the call was never applied. `lost`: it was applied and the process died before the reply arrived. `hang`: the
call never returned, all other tasks ran until the incarnation was idle, then the process died. `late`: as `hang`, but
the process is only presumed dead; its call arrives after another incarnation has taken over. `unheard`: no crash, the
reply was lost and the caller got StoreUnavailable.

The tasks of a dead incarnation wait for ever: its ports never answer again, so no `finally` of it can reach the store.
Cancelling the tasks would run those blocks, which a real kill never does.
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

IDLE_PASSES = 60
"""Passes of the event loop without a call at any port after which an incarnation counts as idle."""


class Point(Struct, frozen=True):
    """A point that a run passed. `name` is unique in its run: the call, and its number if it was made before."""

    name: str
    kind: Kind


class Crash(Struct, frozen=True):
    """Where an incarnation ends, and how."""

    point: str
    mode: Mode = "before"

    def __str__(self) -> str:
        return f"{self.mode} {self.point}"


class LedgerLine(Struct, frozen=True, omit_defaults=True):
    """An effect outside the store: `name` under `key`, caused by that incarnation."""

    name: str
    key: str
    incarnation: int = 1
    data: Any = None


class Ledger:
    """A log of effects outside the store, which no crash undoes: one line each, synced before the caller continues."""

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


class FaultInjector:
    """Records the points that one incarnation passes, and injects the fault at the point named by `crash`.

    `dead` is set by the crash and never cleared; `released` is set when a call in mode `late` may arrive. All state
    belongs to the incarnation's event loop; sync tools pass points from their threads, under `_lock`.
    """

    def __init__(self, crash: Crash | None = None, *, real: bool = False, incarnation: int = 1) -> None:
        self.crash, self.real, self.incarnation = crash, real, incarnation
        self.trace: list[Point] = []
        self.current: list[str] = []
        self.dead = False
        self.disposing = False
        self.released: asyncio.Event | None = None
        self.on_death: list[Callable[[], None]] = []
        self._loop = asyncio.get_running_loop()
        self.crashed: asyncio.Future[None] = self._loop.create_future()
        self._counts: dict[str, int] = {}
        self._busy = 0
        self._calls = 0
        self._returned = asyncio.Event()
        self._lock = threading.Lock()
        self._disposed = threading.Event()
        # An event loop refers to tasks weakly: without these futures, waiting tasks would be collected, and unwind.
        self._waiting: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------ passing

    async def call(self, kind: Kind, label: str, work: Callable[[], Awaitable[R]]) -> R:
        """Pass a point and do `work` there."""
        await self.check_alive()
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
        await self.check_alive()
        if mode == "lost":
            await self.die()
        if mode == "unheard":
            raise StoreUnavailable(f"the reply of {point.name} was lost")
        self._note_return()
        return result

    async def reach(self, kind: Kind, label: str) -> None:
        """Pass a point where nothing is done but arriving there."""
        await self.check_alive()
        _, mode = self._pass(kind, label)
        if mode is not None:
            await self.die()

    async def uncounted(self, work: Awaitable[R]) -> R:
        """Do `work` without a point, for reads."""
        if self.dead and isinstance(work, Coroutine):
            work.close()
        await self.check_alive()
        self._busy += 1
        try:
            return await work
        finally:
            self._busy -= 1

    def reach_in_thread(self, kind: Kind, label: str) -> None:
        """`reach` for a sync tool, called on its thread."""
        self.check_alive_in_thread()
        with self._lock:
            _, mode = self._pass(kind, label)
        if mode is not None:
            self.die_in_thread()

    def call_in_thread(self, kind: Kind, label: str, work: Callable[[], R]) -> R:
        """`call` for a sync tool, called on its thread; `hang` dies at once."""
        self.check_alive_in_thread()
        with self._lock:
            _, mode = self._pass(kind, label)
        if mode in ("before", "hang"):
            self.die_in_thread()
        result = work()
        if mode == "lost":
            self.die_in_thread()
        return result

    def _pass(self, kind: Kind, label: str) -> tuple[Point, Mode | None]:
        count = self._counts[label] = self._counts.get(label, 0) + 1
        point = Point(label if count == 1 else f"{label} #{count}", kind)
        self.trace.append(point)
        self._calls += 1
        mode = self.crash.mode if self.crash is not None and self.crash.point == point.name else None
        return point, mode

    def _note_return(self) -> None:
        self._calls += 1
        self._returned.set()

    async def wait_returned(self) -> None:
        """Wait until a call of this incarnation came back."""
        await self.check_alive()
        self._returned.clear()
        await self._returned.wait()

    # ------------------------------------------------------------------ dying

    async def die(self) -> None:
        """End this incarnation. Does not return."""
        self._kill()
        await self.check_alive()

    def die_in_thread(self) -> None:
        self._kill()
        self.check_alive_in_thread()

    def _kill(self) -> None:
        if self.real:
            os.kill(os.getpid(), signal.SIGKILL)
        self.dead = True
        for callback in self.on_death:
            callback()
        self._loop.call_soon_threadsafe(self._set_crashed)

    def _set_crashed(self) -> None:
        if not self.crashed.done():
            self.crashed.set_result(None)

    async def check_alive(self) -> None:
        """Return while the incarnation lives; wait for ever once it is dead."""
        while self.dead:
            if self.disposing:
                raise asyncio.CancelledError
            self._waiting.append(self._loop.create_future())
            await self._waiting[-1]

    def check_alive_in_thread(self) -> None:
        if self.dead:
            self._disposed.wait()
            raise SystemExit  # ends the body on its thread, long after its incarnation

    def dispose(self) -> None:
        """Let the tasks of a dead incarnation unwind, once its case has been judged; its ports refuse every call."""
        self.disposing = self.dead = True
        self._disposed.set()

    async def _hang(self) -> None:
        await self.wait_idle()
        await self.die()

    async def _wait_for_takeover(self) -> None:
        self.released = asyncio.Event()
        await self.wait_idle()
        for callback in self.on_death:
            callback()
        self._set_crashed()
        await self.released.wait()

    async def wait_idle(self) -> None:
        """Wait until no other task of this incarnation makes a call."""
        passes, seen = 0, self._calls
        while passes < IDLE_PASSES:
            await asyncio.sleep(0 if not self._busy else 0.001)
            if self._busy or self._calls != seen:
                passes, seen = 0, self._calls
            else:
                passes += 1
