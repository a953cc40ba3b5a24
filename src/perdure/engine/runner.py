"""Working on scopes. A scope is what one worker owns at a time: the open turn of a session, or a process.

    write       send a write that may make a scope ours: it may land although its caller is cancelled
    run         work on a scope, in a task of the supervisor, until it ends, parks or is given back
    reconcile   compare what is in memory of a scope with its row in the store
    adopt       launch what is ours on disk and has no task

How a task ends decides what becomes of its scope:

    by itself            it has ended or is parked, and the row says so
    Leaving              the Runtime is left: it is given back, with what has happened written down
    Fenced, deleted      another worker owns it, or none: this worker may write nothing more about it
    StoreUnavailable     it rests: the row still names this worker, and `adopt` launches it again
    anything else        a fault of ours: this one scope is set aside with the reason, until a person resumes it

What is particular to turns and to processes is passed in: `sessions/turns.py`, `processes/worker.py`.

All tasks of a Runtime belong to its `Supervisor`. A fault ends one task and is logged; it never cancels a neighbour or
the host, as a task group across scopes would.

How far a Runtime has come is one value that everything in it reads, the `RuntimeMode`. It only moves forward:

    running    takes up whatever it may work on
    draining   goes on with what it works on, and with what that waits for; takes up nothing else
    leaving    the host's calls are refused; running effects have their grace, then they are cancelled
    closed     nothing of it works any more; calls on a handle of it raise RuntimeClosed
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Container, Coroutine, Iterable
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

from perdure.engine.lease import Worker
from perdure.errors import Fenced, RuntimeClosed, SessionDeleted, StoreInherited, StoreUnavailable, WrongLoop
from perdure.model.process import ProcessRow
from perdure.model.session import SessionRow
from perdure.model.write import Write
from perdure.ports.process import Leaving
from perdure.ports.store import Store

ScopeRow = TypeVar("ScopeRow", SessionRow, ProcessRow)
R = TypeVar("R")


class ScopeTask(Protocol):
    """One scope that this worker works on."""

    name: str
    """What it is called in logs."""

    async def work(self) -> None:
        """Take it to its end, or to where it parks. Raises Leaving where it is to be given back."""
        ...

    async def give_back(self) -> None:
        """Write that no worker owns it any more. It may be fenced by now."""
        ...

    async def set_aside(self, error: Exception) -> None:
        """Write that it is stuck, and why. Must not raise: the first error is the one to tell."""
        ...

    def stopped(self, error: Exception | None) -> None:
        """The task is over: forget what was in memory for it. `error` is what ended it, unless it came to its end."""
        ...


class ScopeKind(Protocol[ScopeRow]):
    """What is particular to turns, or to processes. A row is found by its key: the id of its session or process."""

    async def read(self, key: str) -> ScopeRow | None: ...

    def reconcile(self, row: ScopeRow) -> None:
        """Pass on what the row says to the task that works on it; launch one if the row is ours and has none."""
        ...

    def is_unattended(self, row: ScopeRow) -> bool:
        """Whether this worker owns it, and nothing here works on it."""
        ...

    def launch(self, row: ScopeRow) -> None:
        """Work on what this worker owns."""
        ...


class ScopeRunner(Generic[ScopeRow]):
    """Runs the scopes of one kind in one Runtime. `_unattended` are keys of rows that were ours and had no task when
    the store was last looked at."""

    def __init__(
        self, kind: ScopeKind[ScopeRow], store: Store, worker: Worker, supervisor: Supervisor, log: str
    ) -> None:
        self._kind: ScopeKind[ScopeRow] = kind
        self._store, self._worker, self._supervisor = store, worker, supervisor
        self._log = logging.getLogger(log)
        self._unattended: set[str] = set()

    async def write(self, key: str, write: Write[R]) -> R:
        """Send a write that may give a scope something to do, or make it ours."""
        try:
            return await self._store.write(write)
        except asyncio.CancelledError:
            _ = self._supervisor.spawn(self._catch_up(key), f"catch up {key}")
            raise

    async def _catch_up(self, key: str) -> None:
        await self._worker.speak()  # writes are applied in order: the cancelled one is decided when this one is
        await self._reread(key)

    def reread(self, key: str) -> None:
        """Something may have been written about a scope: read its row, beside the caller."""
        _ = self._supervisor.spawn(self._reread(key), f"reread {key}")

    async def _reread(self, key: str) -> None:
        row = await self._kind.read(key)
        if row is not None:
            self._kind.reconcile(row)

    async def run(self, task: ScopeTask) -> None:
        """Work on a scope. `stopped` is called in any case, also when this is cancelled."""
        ended: Exception | None = None
        try:
            try:
                await task.work()
            except Leaving as leaving:
                ended = leaving
                await task.give_back()
        except (Fenced, SessionDeleted) as lost:
            self._log.warning("%s", lost)
            ended = lost
        except StoreUnavailable as trouble:
            self._log.warning("%s rests: %s", task.name, trouble)
            ended = trouble
        except Exception as fault:  # a fault of ours or of the disk: it sets this scope aside and harms no other
            self._log.exception("%s is stuck", task.name)
            ended = fault
            await task.set_aside(fault)
        finally:
            task.stopped(ended)

    def adopt(self, rows: Iterable[ScopeRow]) -> None:
        """Launch what is ours and was without a task twice in a row.

        Once is normal: a write that made it ours may have been acknowledged just now. Twice means that it rested
        because the store was in trouble.
        """
        found = {row.id: row for row in rows if self._kind.is_unattended(row)}
        for key in self._unattended & found.keys():
            self._kind.launch(found.pop(key))
        self._unattended = set(found)


log = logging.getLogger("perdure.engine")

LOOK_SECONDS = 0.1
"""How often `finish_but` looks whether a task has come to where it is not waited for."""
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

    async def finish_but(self, apart: Callable[[], Container[str]]) -> None:
        """Wait for all tasks but those with these names, which may become others meanwhile."""
        while busy := [task for task in self._tasks if task.get_name() not in apart()]:
            await asyncio.wait(busy, timeout=LOOK_SECONDS)

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


class Stage(IntEnum):
    RUNNING = 0
    DRAINING = 1
    LEAVING = 2
    CLOSED = 3


class RuntimeMode:
    """The stage of one Runtime, and whether a caller may use it: made on the event loop that the Runtime lives on.

    `draining` and `leaving`: it has come at least so far.
    """

    __slots__ = ("_loop", "_pid", "_stage", "draining", "leaving")

    def __init__(self) -> None:
        self._stage, self.draining, self.leaving = Stage.RUNNING, False, False
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()

    def advance(self, stage: Stage) -> None:
        self._stage = max(self._stage, stage)
        self.draining, self.leaving = self._stage >= Stage.DRAINING, self._stage >= Stage.LEAVING

    def check(self) -> None:
        """Refuse a call of the host after the Runtime was left, from another loop, or in a forked child."""
        if self._stage >= Stage.LEAVING:
            raise RuntimeClosed
        if self._pid != os.getpid():
            raise StoreInherited(self._pid, os.getpid())
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop

    def check_work(self) -> None:
        """The same for what running work asks for: it goes on while the Runtime is being left."""
        if self._stage is Stage.CLOSED:
            raise RuntimeClosed
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop


class Activity:
    """When to look again: `changed` is set when something of this Runtime has changed or running work begins to wait,
    `polled` when the store was looked at for what others have written, `written` when another process says that it
    wrote."""

    __slots__ = ("changed", "polled", "written")

    def __init__(self) -> None:
        self.changed, self.polled, self.written = asyncio.Event(), asyncio.Event(), asyncio.Event()
