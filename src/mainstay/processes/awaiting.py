"""Who in this Runtime waits for something to happen to a process: its end, or any news of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from mainstay.engine.hands import in_hand
from mainstay.errors import RuntimeClosed
from mainstay.model.process import ProcessRow
from mainstay.ports.store import Store

T = TypeVar("T")


class Awaiting:
    """`_ends`: callers who want the end of a process, and `_needed` those of them that are work in hand; `_news`: those
    who follow it; `_others`: processes that run here and wait for the end of another, by that one's id. `on_need` is
    told when work in hand begins to wait."""

    def __init__(self) -> None:
        self._ends: dict[str, list[asyncio.Future[ProcessRow]]] = {}
        self._needed: dict[asyncio.Future[ProcessRow], str] = {}
        self._news: dict[str, list[asyncio.Future[None]]] = {}
        self._others: dict[str, set[str]] = {}
        self.on_need: Callable[[], None] | None = None

    @property
    def ids(self) -> set[str]:
        """Processes whose end somebody here waits for."""
        return {*self._ends, *self._others}

    async def needed(self, store: Store) -> dict[str, ProcessRow]:
        """Live processes whose end work in hand waits for, and those that these wait for themselves, on disk."""
        found, asked, wanted = dict[str, ProcessRow](), set[str](), {*self._needed.values(), *self._others}
        while wanted:
            process_id = wanted.pop()
            asked.add(process_id)
            row = await store.process(process_id)
            if row is not None and row.live:
                found[process_id] = row
                wanted |= {on.name for on in row.record.waits if on.kind == "process"} - asked
        return found

    def __contains__(self, process_id: str) -> bool:
        return process_id in self._ends

    def expect(self, process_id: str) -> asyncio.Future[ProcessRow]:
        """Told when the process has ended, or is stuck. Give it back with `forget`, whatever came of it."""
        future: asyncio.Future[ProcessRow] = asyncio.get_running_loop().create_future()
        self._ends.setdefault(process_id, []).append(future)
        if in_hand():
            self._needed[future] = process_id
            self._need()
        return future

    def forget(self, process_id: str, future: asyncio.Future[ProcessRow]) -> None:
        self._needed.pop(future, None)
        _remove(self._ends, process_id, future)

    def answer(self, row: ProcessRow) -> None:
        """It has ended, or it is stuck: whoever waits is told."""
        for future in self._ends.pop(row.id, ()):
            if not future.done():
                future.set_result(row)

    # ------------------------------------------------------------------ following

    async def change(self, process_id: str, seconds: float) -> None:
        """Wait until something here has happened to a process, or for so many seconds: others may have written."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news.setdefault(process_id, []).append(changed)
        try:
            await asyncio.wait({changed}, timeout=seconds)
            if changed.done():
                changed.result()
        finally:
            _remove(self._news, process_id, changed)

    def tell(self, process_id: str) -> None:
        """Something has happened to it."""
        for future in self._news.get(process_id, ()):
            if not future.done():
                future.set_result(None)

    # ------------------------------------------------------------------ processes that wait for others

    def listen(self, process_id: str, other: str) -> None:
        self._others.setdefault(other, set()).add(process_id)
        self._need()

    def _need(self) -> None:
        if self.on_need is not None:
            self.on_need()

    def leave(self, process_id: str, others: Iterable[str]) -> None:
        """A process does not run here any more."""
        for other in others:
            listening = self._others.get(other)
            if listening is not None:
                listening.discard(process_id)
                if not listening:
                    del self._others[other]

    def listening_to(self, other: str) -> set[str]:
        """Those that wait for its end, once."""
        return self._others.pop(other, set())

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """The Runtime was left: whoever still waits here is told, because nobody else will tell."""
        left = "the Runtime was left before process {!r} ended: it goes on, ask for it in another Runtime"
        waiting: list[tuple[str, list[Any]]] = [*self._ends.items(), *self._news.items()]
        for process_id, futures in waiting:
            for future in futures:
                if not future.done():
                    future.set_exception(RuntimeClosed(left.format(process_id)))


def _remove(waiting: dict[str, list[asyncio.Future[T]]], process_id: str, future: asyncio.Future[T]) -> None:
    futures = waiting.get(process_id, [])
    if future in futures:
        futures.remove(future)
        if not futures:
            del waiting[process_id]
