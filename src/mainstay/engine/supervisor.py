"""Tasks with an owner. A fault ends one task and is written down; it never cancels a neighbour or the host.

A task group would do the opposite, which is why there is none across scopes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("mainstay.engine")

STOP_SECONDS = 1.0
"""How long a cancelled task may take before it is left behind."""


class Supervisor:
    """All background tasks of a Runtime."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended by a fault of ours", task.get_name(), exc_info=error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def finish(self, timeout: float | None) -> bool:
        """Wait for all tasks, also for those that others of them begin meanwhile; True when they are done."""
        clock = asyncio.get_running_loop().time
        end = None if timeout is None else clock() + timeout
        while self._tasks:
            left = None if end is None else end - clock()
            if left is not None and left <= 0:
                break
            await asyncio.wait(self._tasks, timeout=left)
        return not self._tasks

    async def stop(self) -> None:
        """Cancel what is left and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
            for task in late:
                log.error("%s does not end when it is cancelled; it is left behind", task.get_name())
