"""Working on scopes. A scope is what one worker owns at a time: the open turn of a session, or a process.

    write       send a write that may make a scope ours: it may land although its caller is cancelled
    run         one task works on a scope until it ends, parks or is given back
    reconcile   compare what is in memory of a scope with its row in the store
    adopt       launch what is ours on disk and has no task

How a task ends decides what becomes of its scope:

    by itself            it has ended or is parked, and the row says so
    Leaving              the Runtime is left: it is given back, with what has happened written down
    Fenced, deleted      another worker owns it, or nobody: this worker may write nothing more about it
    StoreUnavailable     it rests: the row still names this worker, and `adopt` launches it again
    anything else        a fault of ours: this one scope is set aside with the reason, until a person resumes it

What is particular to turns and to processes is passed in: `sessions/turns.py`, `processes/worker.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from mainstay.engine.gate import Leaving
from mainstay.engine.lease import Worker
from mainstay.engine.supervisor import Supervisor
from mainstay.errors import Fenced, SessionDeleted, StoreUnavailable
from mainstay.model.process import ProcessRow
from mainstay.model.session import SessionRow
from mainstay.model.write import Write
from mainstay.ports.store import Store

Row = TypeVar("Row", SessionRow, ProcessRow)
R = TypeVar("R")


class ScopeTask(Protocol):
    """One scope that this worker works on."""

    @property
    def name(self) -> str:
        """What it is called in logs."""
        ...

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


class ScopeKind(Protocol[Row]):
    """What is particular to turns, or to processes. A row is found by its key: the id of its session or process."""

    async def read(self, key: str) -> Row | None: ...

    def reconcile(self, row: Row) -> None:
        """Pass on what the row says to the task that works on it; launch one if the row is ours and has none."""
        ...

    def is_unattended(self, row: Row) -> bool:
        """Whether this worker owns it, and nothing here works on it."""
        ...

    def launch(self, row: Row) -> None:
        """Work on what this worker owns."""
        ...


class ScopeRunner(Generic[Row]):
    """Runs the scopes of one kind in one Runtime. `_unattended` are keys of rows that were ours and had no task when
    the store was last looked at."""

    def __init__(self, kind: ScopeKind[Row], store: Store, worker: Worker, supervisor: Supervisor, log: str) -> None:
        self._kind: ScopeKind[Row] = kind
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
        await self._look(key)

    def look(self, key: str) -> None:
        """Something may have been written about a scope: read its row, beside the caller."""
        _ = self._supervisor.spawn(self._look(key), f"look at {key}")

    async def _look(self, key: str) -> None:
        row = await self._kind.read(key)
        if row is not None:
            self._kind.reconcile(row)

    def run(self, task: ScopeTask) -> asyncio.Task[None]:
        """Begin to work on a scope. `stopped` is called in any case, also when the task is cancelled."""
        return self._supervisor.spawn(self._run(task), task.name)

    async def _run(self, task: ScopeTask) -> None:
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

    def adopt(self, rows: Iterable[Row]) -> None:
        """Launch what is ours and was without a task twice in a row.

        Once is normal: a write that made it ours may have been acknowledged just now. Twice means that it rested
        because the store was in trouble.
        """
        found = {row.id: row for row in rows if self._kind.is_unattended(row)}
        for key in self._unattended & found.keys():
            self._kind.launch(found.pop(key))
        self._unattended = set(found)
