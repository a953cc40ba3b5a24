"""What must not overlap: at most `limit` calls of a tool at once, and one call at a time for a resource key."""

from __future__ import annotations

import asyncio
from collections import deque

from mainstay.model.tool import ToolSpec


class Slots:
    """Places in use across all sessions of a Runtime, first come first served."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._queue: deque[tuple[ToolSpec, asyncio.Future[None]]] = deque()

    def try_take(self, spec: ToolSpec) -> bool:
        """Take what the tool needs if it is free and nobody waits for it."""
        if spec.limit is None and spec.resource is None:
            return True
        if any(_overlap(spec, other) for other, waiter in self._queue if not waiter.done()):
            return False
        return self._grab(spec)

    async def take(self, spec: ToolSpec) -> None:
        """Wait for it. A cancelled wait holds nothing."""
        if self.try_take(spec):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((spec, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give(spec)
            else:
                self._serve()  # whoever stood behind it may not have to wait any more
            raise

    def give(self, spec: ToolSpec) -> None:
        """Return what was taken, and let the next in line have it."""
        if spec.limit is None and spec.resource is None:
            return
        for key, _ in _needs(spec):
            self._used[key] -= 1
            if not self._used[key]:
                del self._used[key]
        self._serve()

    def give_later(self, loop: asyncio.AbstractEventLoop, spec: ToolSpec) -> None:
        """The same from a tool's thread that has really ended, which may be long after its waiter gave up."""
        try:
            loop.call_soon_threadsafe(self.give, spec)
        except RuntimeError:
            return  # the loop is closed, and the slots with it

    def _serve(self) -> None:
        waiting, self._queue = self._queue, deque()
        blocked: set[str] = set()
        for spec_, waiter in waiting:
            keys = {key for key, _ in _needs(spec_)}
            if waiter.done():
                continue
            if not keys & blocked and self._grab(spec_):
                waiter.set_result(None)
            else:
                blocked |= keys
                self._queue.append((spec_, waiter))

    def _grab(self, spec: ToolSpec) -> bool:
        needs = _needs(spec)
        if any(self._used.get(key, 0) >= limit for key, limit in needs):
            return False
        for key, _ in needs:
            self._used[key] = self._used.get(key, 0) + 1
        return True


def _needs(spec: ToolSpec) -> list[tuple[str, int]]:
    needs = []
    if spec.limit is not None:
        needs.append((f"tool {spec.name}", spec.limit))
    if spec.resource is not None:
        needs.append((f"resource {spec.resource}", 1))
    return needs


def _overlap(one: ToolSpec, other: ToolSpec) -> bool:
    return bool({key for key, _ in _needs(one)} & {key for key, _ in _needs(other)})
