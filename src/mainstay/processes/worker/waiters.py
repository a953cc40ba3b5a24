"""Who in this Runtime waits for processes: callers for an end or a change, and processes for the end of another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from mainstay.engine.deadlock import in_hand
from mainstay.engine.waiters import Waiters
from mainstay.errors import RuntimeClosed
from mainstay.model.process import ProcessRow
from mainstay.ports.store import Store

What: TypeAlias = Literal["end", "change"]


class ProcessWaiters:
    """`_calls` are the callers; `_listening` the processes that run here and wait for the end of another, by that one's
    id. `needs` is called when work of this Runtime begins to wait."""

    def __init__(self, needs: Callable[[], None]) -> None:
        self._calls: Waiters[What, ProcessRow] = Waiters()
        self._listening: dict[str, set[str]] = {}
        self._needs = needs

    # ------------------------------------------------------------------ callers

    @property
    def ids(self) -> set[str]:
        """Processes whose end is waited for here."""
        return {*(name for name, what in self._calls if what == "end"), *self._listening}

    def awaits_end(self, process_id: str) -> bool:
        return bool(self._calls.of(process_id, "end"))

    def expect_end(self, process_id: str) -> asyncio.Future[ProcessRow]:
        """Resolved when the process has ended, or is stuck. Give it back with `withdraw`."""
        future = self._calls.expect(process_id, "end")
        if in_hand():
            self._needs()
        return future

    def withdraw(self, process_id: str, future: asyncio.Future[ProcessRow]) -> None:
        self._calls.withdraw(process_id, "end", future)

    async def wait_change(self, process_id: str, seconds: float) -> None:
        """Wait until something here has happened to a process, or for so many seconds: others may have written."""
        changed = self._calls.expect(process_id, "change")
        try:
            await asyncio.wait({changed}, timeout=seconds)
            if changed.done():
                changed.result()
        finally:
            self._calls.withdraw(process_id, "change", changed)

    def changed(self, row: ProcessRow) -> None:
        """Something has happened to a process."""
        self._calls.resolve(row.id, "change", row)

    def settled(self, row: ProcessRow) -> None:
        """A process has ended, or is stuck."""
        self._calls.resolve(row.id, "end", row)

    # ------------------------------------------------------------------ processes that wait for others

    def listen(self, process_id: str, other: str) -> None:
        self._listening.setdefault(other, set()).add(process_id)
        self._needs()

    def leave(self, process_id: str, others: Iterable[str]) -> None:
        """A process does not run here any more."""
        for other in others:
            listening = self._listening.get(other)
            if listening is not None:
                listening.discard(process_id)
                if not listening:
                    del self._listening[other]

    def take_listening(self, other: str) -> set[str]:
        """Those that wait for its end; they are forgotten."""
        return self._listening.pop(other, set())

    # ------------------------------------------------------------------ draining and leaving

    async def needed(self, store: Store) -> dict[str, ProcessRow]:
        """Live processes whose end work of this Runtime waits for, and those that these wait for in turn, on disk."""
        found, asked = dict[str, ProcessRow](), set[str]()
        wanted = {*(name for name, what in self._calls.needed if what == "end"), *self._listening}
        while wanted:
            process_id = wanted.pop()
            asked.add(process_id)
            row = await store.process(process_id)
            if row is not None and row.live:
                found[process_id] = row
                wanted |= {on.name for on in row.record.waits if on.kind == "process"} - asked
        return found

    def close(self) -> None:
        """The Runtime was left: nothing else will resolve what is left."""
        self._calls.close(_left)


def _left(process_id: str) -> RuntimeClosed:
    left = "the Runtime was left before process {!r} ended: it goes on, ask for it in another Runtime"
    return RuntimeClosed(left.format(process_id))
