"""A store whose rows are far away: every read and every flush is a round trip, which gives way to other tasks.

It has the rules and rows of the memory store, and shows what they cost a store over a network: writes that wait are
taken together, what they declare is fetched in one round trip, and their changes go in one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from perdure.errors import PerdureError
from perdure.model.write import Write
from perdure.ports.store import Store
from perdure.stores import rules
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.stores.rules import reads
from perdure.stores.rules.rows import ALL_READS, RowChange, RowRead, Transaction

R = TypeVar("R")


class RemoteRows:
    """Rows behind a wire. `trips` are the round trips so far: one entry for each, its reads or its changes."""

    def __init__(self, rows: MemoryRows) -> None:
        self._rows = rows
        self.trips: list[Sequence[RowRead[Any]] | Sequence[RowChange]] = []
        self.read_trips = 0

    @property
    def readers(self) -> dict[type[RowRead[Any]], Any]:
        return dict.fromkeys(ALL_READS, RemoteRows.fetch_one)

    async def fetch_one(self, read: RowRead[Any]) -> Any:
        return (await self.fetch([read]))[read]

    async def fetch(self, wanted: Sequence[RowRead[Any]]) -> dict[RowRead[Any], Any]:
        await asyncio.sleep(0)
        self.trips.append(wanted)
        self.read_trips += 1
        return {read: await self._rows.readers[type(read)](self._rows, read) for read in wanted}

    async def flush(self, changes: Sequence[RowChange]) -> None:
        await asyncio.sleep(0)
        self.trips.append(changes)
        await self._rows.flush(changes)


class NetworkStore(MemoryStore):
    """The memory store over `RemoteRows`."""

    def __init__(self, rows: MemoryRows | None = None) -> None:
        super().__init__(rows)
        self.remote = RemoteRows(self.rows)
        self._waiting: list[tuple[Write[Any], Callable[[Any, BaseException | None], None]]] = []
        self._killed = False
        self._writer: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        await super().open()
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        if self._writer is not None:
            await self._writer

    async def kill(self) -> None:
        """End as a killed process would: what waits is lost, the transaction under way lands."""
        self._killed = True
        self._waiting.clear()
        await self.close()

    async def write(self, write: Write[R]) -> R:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(receipt: Any, error: BaseException | None) -> None:
            if answer.cancelled():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(receipt)

        self._enqueue(write, done)
        return cast(R, await answer)

    def submit(self, write: Write[R], done: Callable[[R | None, BaseException | None], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._enqueue, write, done)

    def _enqueue(self, write: Write[Any], done: Callable[[Any, BaseException | None], None]) -> None:
        if self._killed:
            return  # submitted from a thread, and not begun when the process died
        self._waiting.append((write, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            transaction, answers = Transaction(self.remote), list[tuple[Any, BaseException | None]]()
            declared = list(dict.fromkeys(read for write, _ in batch for read in reads(write)))
            if declared:
                transaction.learn(await self.remote.fetch(declared))
            for write, _ in batch:
                try:
                    answers.append((await rules.apply(transaction, write, self.rows.held is not None), None))
                except PerdureError as refusal:
                    answers.append((None, refusal))
                except Exception as error:
                    answers.append((None, error))
            await transaction.flush()
            self.rows.changes += len(batch)
            self._ours += len(batch)
            for (_, done), answer in zip(batch, answers, strict=True):
                done(*answer)


class OverNetwork:
    """Where the rows of a network store live."""

    def __init__(self) -> None:
        self.rows = MemoryRows()

    def store(self) -> NetworkStore:
        return NetworkStore(self.rows)

    async def crash(self, store: Store) -> None:
        assert isinstance(store, NetworkStore)
        await store.kill()

    def clear(self) -> None: ...
