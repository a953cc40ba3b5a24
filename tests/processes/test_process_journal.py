"""The journal of a process: gathered, written once, sent again when nobody knows, and never behind its blobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perdure.errors import Fenced
from perdure.lifecycle.process import PROGRESS
from perdure.model.process import Event, EventType, Registration, Success, WaitOn
from perdure.model.record import Done, Segment
from perdure.model.write import Advance, Claim, ProcessRef, ProcessScope, Register, Write
from perdure.processes.run import ProcessJournal, load_steps
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import VirtualClock


class Held(MemoryStore):
    """Applies a write when it is told to, and keeps what was sent. `sweeps`: blobs go before the next write."""

    def __init__(self) -> None:
        super().__init__(MemoryRows())
        self.sent: list[Advance] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.applied = asyncio.Event()
        self.reply = asyncio.Event()
        self.reply.set()
        self.sweeps = 0

    async def write(self, write: Write[Any]) -> Any:
        if not isinstance(write, Advance):
            return await super().write(write)
        self.sent.append(write)
        await self.gate.wait()
        if self.sweeps and write.blobs:
            self.sweeps -= 1
            await self.sweep(grace=0)
        done = await super().write(write)
        self.applied.set()
        await self.reply.wait()
        return done


@pytest.fixture
async def store() -> AsyncIterator[Held]:
    held = Held()
    await held.open()
    yield held
    await held.close()


async def begun(store: Held) -> ProcessJournal:
    registration = Registration("p", "function", "rerunnable", events=(EventType("told"),))
    registered = await store.write(Register(registration, 1, "w"))
    row = registered.row
    return ProcessJournal(store, ProcessScope("p", row.pid, "w", row.generation), row, VirtualClock(), lambda row: None)


async def steps(store: Held, journal: ProcessJournal) -> list[Any]:
    return (await load_steps(store, journal.scope.pid, "p"))[0]


def done(key: str, value: Any = None) -> Done:
    return Done(key, "step", "s", "", value)


async def test_a_cancelled_flush_is_sent_again_before_anything_else_and_applied_once(store: Held) -> None:
    journal = await begun(store)
    journal.record(done("1"))
    journal.event(Event("told", 1))
    store.reply.clear()
    flushing = asyncio.create_task(journal.flush())
    await store.applied.wait()
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    store.reply.set()
    journal.record(done("2"))
    await journal.flush()

    assert [r.key for r in await steps(store, journal)] == ["1", "2"]
    assert [len(sent.records) for sent in store.sent] == [1, 1, 1]
    assert store.sent[0] is store.sent[1]
    events = [event.type for _, _, event in await store.events(journal.scope.pid)]
    assert events == ["process.created", "process.first_started", "told"]


async def test_whoever_flushes_waits_for_what_another_is_writing(store: Held) -> None:
    journal = await begun(store)
    journal.record(done("1"))
    store.gate.clear()
    first = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)
    second = asyncio.create_task(journal.flush())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not second.done()
    store.gate.set()
    await asyncio.gather(first, second)

    assert len(store.sent) == 1


async def test_records_keep_the_value_that_they_were_made_with(store: Held) -> None:
    journal = await begun(store)
    value = [1]
    journal.record(done("1", value))
    value.append(2)
    await journal.flush()

    assert [r.value for r in await steps(store, journal)] == [[1]]


async def test_what_was_swept_before_a_row_referred_to_it_is_put_again(store: Held) -> None:
    journal = await begun(store)
    journal.record(done("1", "x" * 100_000))
    store.sweeps = 1
    await journal.flush()
    store.sweeps = 1
    advanced = await journal.flush(outcome=Success("y" * 100_000))

    assert [r.value for r in await steps(store, journal)] == ["x" * 100_000]
    outcome = advanced.row.record.outcome
    assert isinstance(outcome, Success)
    assert outcome.blob is not None
    assert await store.blobs.get(outcome.blob.digest) == b'"' + b"y" * 100_000 + b'"'


async def test_a_cut_writes_once_and_what_it_makes_needless_never(store: Held) -> None:
    journal = await begun(store)
    journal.record(done("1", "x" * 100_000))
    await journal.cut(Segment(1, "state"), Event("process.continued", {"segment": 1}))
    journal.record(done("1"))
    await journal.flush()

    assert [type(r).__name__ for r in await steps(store, journal)] == ["Segment", "Done"]
    assert len(store.sent) == 2
    assert store.sent[0].blobs == ()


async def test_progress_alone_causes_no_write(store: Held) -> None:
    journal = await begun(store)
    await journal.flush()
    for number in range(3):
        journal.event(Event(PROGRESS, number))
    await journal.flush()
    assert len(store.sent) == 1
    journal.record(done("1"))
    await journal.flush()

    assert journal.row.record.progress == 2


async def test_news_are_what_others_wrote_and_not_what_the_owner_did(store: Held) -> None:
    journal = await begun(store)
    journal.event(Event("told", 1))
    await journal.flush()
    assert not journal.has_unread
    await journal.flush(park=(WaitOn("1", "signal", "go"),))

    assert not journal.has_unread
    assert journal.read_to == 4


async def test_a_relieved_owner_is_refused_every_time(store: Held) -> None:
    journal = await begun(store)
    await journal.flush()
    taken = await store.write(Claim(ProcessRef("p"), "other", 1, 2, "dead"))
    assert taken.won
    journal.record(done("1"))
    for _ in range(2):
        with pytest.raises(Fenced):
            await journal.flush()

    assert await steps(store, journal) == []
