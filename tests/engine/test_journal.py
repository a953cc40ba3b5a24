"""The journal of a turn: what has happened is on disk before anything else is done, and is read back whole."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pytest

from perdure.engine.journal import SPILL_BYTES, TurnJournal, load, load_turns, spill
from perdure.errors import BlobMissing, Fenced, StoreDamaged, StoreError, StoreInherited, StoreUnavailable
from perdure.graph.commit import End
from perdure.graph.view import Turn
from perdure.model.codec import encode
from perdure.model.llm import Usage
from perdure.model.message import Message, Text, ToolCall
from perdure.model.outcome import Finished
from perdure.model.record import Closed, Delivered, Ended, Joined, Record, Replied, Said, Slot, Spilled
from perdure.model.session import CancelRequest, WaitRow
from perdure.model.tool import Cancelled, Ok
from perdure.model.write import Accept, Cancel, CancelWon, Claim, Committed, SessionRef, TurnScope, Write
from perdure.stores.memory import MemoryBlobs, MemoryRows, MemoryStore
from perdure.testing import VirtualClock

R = TypeVar("R")

HI = Said(Message("user", "hi"))
CALL = Replied(1, (ToolCall("a", "look"),), started=(0,))
ENDED = Ended("1.0", Ok("seen"))
ANSWER = Replied(2, (Text("good day"),))
USAGE = Usage(calls=2)
BIG = Ended("1.0", Ok("x" * 100_000))


class FaultyStore(MemoryStore):
    """A store with a full disk (`full` writes are refused) or a bad line (`lost` replies never arrive)."""

    def __init__(self) -> None:
        super().__init__()
        self.blobs = FaultyBlobs(self)
        self.full = self.full_blobs = self.lost = 0
        self.hold: asyncio.Event | None = None
        self.error: StoreError = StoreUnavailable("the disk is full")

    async def write(self, write: Write[R]) -> R:
        if self.hold is not None:
            await self.hold.wait()
        if self.full:
            self.full -= 1
            raise self.error
        receipt = await super().write(write)
        if self.lost:
            self.lost -= 1
            raise StoreUnavailable("the line broke")
        return receipt


class FaultyBlobs(MemoryBlobs):
    def __init__(self, store: FaultyStore) -> None:
        super().__init__(store.rows)
        self._store = store

    async def put(self, data: bytes) -> str:
        if self._store.hold is not None:
            await self._store.hold.wait()
        if self._store.full_blobs:
            self._store.full_blobs -= 1
            raise StoreUnavailable("the disk is full")
        return await super().put(data)


async def begin(store: MemoryStore, clock: VirtualClock | None = None) -> TurnJournal:
    """The journal of a turn that was just accepted."""
    accepted = await store.write(Accept("s", "a", encode(HI), "op", 0, worker="w"))
    scope = TurnScope("s", accepted.row.sid, accepted.turn, "w", accepted.row.generation)
    return TurnJournal(store, scope, 1, clock or VirtualClock())


async def read(store: MemoryStore, turn: int = 1) -> list[Record]:
    return [record for _, record in await load(store, 1, turn, turn)]


# ---------------------------------------------------------------------- writing


async def test_records_are_durable_in_order_after_a_flush() -> None:
    store = MemoryStore()
    journal = await begin(store)

    journal.record(CALL)
    await journal.flush()
    journal.record(ENDED)
    journal.record(ANSWER)
    assert await read(store) == [HI, CALL]
    await journal.flush()

    assert await read(store) == [HI, CALL, ENDED, ANSWER]


async def test_a_flush_without_anything_to_write_writes_nothing() -> None:
    store = MemoryStore()
    journal = await begin(store)
    before = store.rows.changes

    assert await journal.flush() is None
    assert store.rows.changes == before


async def test_waits_are_opened_and_the_turn_parked_without_a_record() -> None:
    store = MemoryStore()
    journal = await begin(store)
    wait = WaitRow("s.1.1.0:approval", 1, 1, "1.0", "approval")

    appended = await journal.flush((wait,), (wait.id,))

    assert appended is not None
    assert appended.parked
    assert await store.waits(1) == [wait]


async def test_a_commit_writes_what_is_left_with_the_last_reply_riding_in_it() -> None:
    store = MemoryStore()
    journal = await begin(store, VirtualClock(1_000))
    journal.record(CALL)
    await journal.flush()
    journal.record(ENDED)
    journal.record(ANSWER)

    receipt = await journal.commit(0, End(Finished("good day"), USAGE, None))

    assert isinstance(receipt, Committed)
    assert receipt.row.head == 1
    assert await read(store) == [HI, CALL, ENDED, Closed(Finished(), USAGE, ANSWER, 1_000)]


async def test_a_commit_without_a_last_reply_says_what_was_gathered() -> None:
    store = MemoryStore()
    journal = await begin(store, VirtualClock(1_000))
    journal.record(CALL)
    journal.record(ENDED)
    slot = Slot(messages=(Message("user", "late"),))

    await journal.commit(0, End(Cancelled("ann"), USAGE, slot))

    assert await read(store) == [HI, CALL, ENDED, Closed(Cancelled("ann"), USAGE, None, 1_000, slot)]


async def test_a_commit_that_lost_to_a_cancel_request_has_written_nothing_and_forgotten_nothing() -> None:
    store = MemoryStore()
    journal = await begin(store, VirtualClock(1_000))
    await store.write(Cancel(SessionRef("s"), CancelRequest("ann"), 0))
    journal.record(ANSWER)

    assert isinstance(await journal.commit(0, End(Finished("good day"), USAGE, None)), CancelWon)
    assert await read(store) == [HI]
    assert isinstance(await journal.commit(0, End(Cancelled("ann"), USAGE, None)), Committed)

    assert await read(store) == [HI, Closed(Cancelled("ann"), USAGE, ANSWER, 1_000)]


async def test_inputs_that_a_record_delivers_are_settled_with_it() -> None:
    store = MemoryStore()
    journal = await begin(store)
    steered = Said(Message("user", "also"), kind="steer")
    for op in ("op2", "op3", "op4"):
        await store.write(Accept("s", "a", encode(steered), op, 0, kind="steer"))
    slots = [Slot(delivered=(Delivered(n, steered.message),)) for n in (2, 3, 4)]

    journal.record(Replied(1, (ToolCall("a", "look"),), slot=slots[0]))
    await journal.flush()
    journal.record(Replied(2, (Text("ok"),), slot=slots[1]))
    await journal.commit(0, End(Finished("ok"), USAGE, slots[2]))

    assert [await read(store, turn) for turn in (2, 3, 4)] == [[steered, Joined(1)]] * 3
    assert await store.inbox(1) == []


async def test_every_append_brings_news_back() -> None:
    store = MemoryStore()
    journal = await begin(store)
    await store.write(Accept("s", "a", encode(HI), "op2", 0, kind="steer"))
    await store.write(Cancel(SessionRef("s"), CancelRequest("ann"), 0))

    journal.record(CALL)
    await journal.flush()

    assert journal.inputs
    assert journal.cancel == encode(CancelRequest("ann"))


# ---------------------------------------------------------------------- large records


async def test_a_large_record_goes_to_a_blob_and_comes_back() -> None:
    store = MemoryStore()
    journal = await begin(store)

    journal.record(CALL)
    journal.record(BIG)
    await journal.flush()

    (_, _, row) = (await store.nodes(1, 1, 1))[2]
    assert len(row) < 200
    assert await read(store) == [HI, CALL, BIG]
    assert await store.sweep(grace=0) == 0, "the row refers to its blob"


async def test_a_large_commit_goes_to_a_blob_and_comes_back() -> None:
    store = MemoryStore()
    journal = await begin(store, VirtualClock(1_000))
    answer = Replied(1, (Text("y" * 100_000),))

    journal.record(answer)
    text = answer.parts[0].text if isinstance(answer.parts[0], Text) else ""
    await journal.commit(0, End(Finished(text), USAGE))

    assert await read(store) == [HI, Closed(Finished(), USAGE, answer, 1_000)]
    assert await store.sweep(grace=0) == 0


async def test_a_record_stays_in_its_row_up_to_the_limit() -> None:
    store = MemoryStore()
    journal = await begin(store)
    room = SPILL_BYTES - len(encode(Ended("1.0", Ok(""))))

    journal.record(Ended("1.0", Ok("x" * room)))
    journal.record(Ended("1.0", Ok("x" * (room + 1))))
    await journal.flush()

    sizes = [len(body) for _, _, body in await store.nodes(1, 1, 1)][1:]
    assert sizes[0] == SPILL_BYTES == 65_536
    assert sizes[1] < 200


async def test_only_what_is_large_becomes_a_blob() -> None:
    store = MemoryStore()

    assert await spill(store, b"small") == (b"small", ())
    row, blobs = await spill(store, b"x" * (SPILL_BYTES + 1))

    assert row == encode(Spilled(blobs[0], 65_537))
    assert await store.blobs.get(blobs[0]) == b"x" * 65_537


async def test_blobs_named_while_another_is_written_keep_their_reference() -> None:
    store = FaultyStore()
    journal = await begin(store)
    whole = await store.blobs.put(b"the whole output")
    journal.record(BIG)
    store.hold = asyncio.Event()
    flushing = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)

    journal.record(ENDED, (whole,))
    store.hold.set()
    await flushing
    await journal.flush()

    assert await read(store) == [HI, BIG, ENDED]
    assert await store.sweep(grace=0) == 0


async def test_a_blob_that_is_gone_is_reported_and_not_skipped() -> None:
    store = MemoryStore()
    journal = await begin(store)
    journal.record(BIG)
    await journal.flush()

    store.rows.blobs.clear()

    with pytest.raises(BlobMissing):
        await read(store)


# ---------------------------------------------------------------------- damage


class HoledStore(MemoryStore):
    """A store that has lost a row."""

    def __init__(self, rows: MemoryRows, hole: tuple[int, int]) -> None:
        super().__init__(rows)
        self._hole = hole

    async def nodes(self, sid: int, first: int, last: int) -> list[tuple[int, int, bytes]]:
        return [row for row in await super().nodes(sid, first, last) if row[:2] != self._hole]


@pytest.mark.parametrize("hole", [(1, 0), (1, 1)])
async def test_a_hole_in_the_records_is_damage(hole: tuple[int, int]) -> None:
    store = MemoryStore()
    journal = await begin(store)
    journal.record(CALL)
    journal.record(ENDED)
    await journal.flush()

    with pytest.raises(StoreDamaged, match="lacks a record"):
        await load(HoledStore(store.rows, hole), 1, 1, 1)


@pytest.mark.parametrize("body", [b"", b"garbage", b'{"type":"said.9"}', encode({"type": "joined.1"})])
async def test_an_unreadable_record_is_damage(body: bytes) -> None:
    store = MemoryStore()
    journal = await begin(store)
    journal.record(CALL)
    await journal.flush()
    store.rows.bodies[1][1][1] = body

    with pytest.raises(StoreDamaged, match="is unreadable"):
        await read(store)


async def test_a_blob_that_stands_for_another_blob_is_damage() -> None:
    store = MemoryStore()
    await begin(store)
    digest = await store.blobs.put(encode(Spilled("other", 5)))
    store.rows.bodies[1][1][0] = encode(Spilled(digest, 5))

    with pytest.raises(StoreDamaged, match="stands for another blob"):
        await read(store)


async def test_several_turns_are_read_in_order() -> None:
    store = MemoryStore()
    journal = await begin(store, VirtualClock(1_000))
    await journal.commit(0, End(Finished(""), USAGE, None))
    await store.write(Accept("s", "a", encode(HI), "op2", 0))

    closed = Closed(Finished(), USAGE, None, 1_000)
    assert await load_turns(store, 1, 1, 2) == [Turn(1, [HI, closed]), Turn(2, [HI])]
    assert await load_turns(store, 1, 3, 9) == []
    assert await load(store, 1, 1, 2) == [(1, HI), (1, closed), (2, HI)]


# ---------------------------------------------------------------------- a store in trouble


async def test_a_full_disk_stalls_the_turn_until_it_has_room() -> None:
    store, clock = FaultyStore(), VirtualClock()
    journal = await begin(store, clock)
    store.full = 6
    journal.record(CALL)

    flushing = asyncio.create_task(journal.flush())

    for seconds in (0.1, 0.3, 1.0, 3.0, 3.0, 3.0):
        await clock.wait_sleeping()
        assert isinstance(journal.stalled, StoreUnavailable)
        clock.advance(seconds - 0.01)
        await asyncio.sleep(0)
        assert clock.sleeping
        clock.advance(0.01)
        await asyncio.sleep(0)
    await flushing
    assert journal.stalled is None
    assert await read(store) == [HI, CALL]


async def test_a_full_disk_stalls_a_commit_too() -> None:
    store, clock = FaultyStore(), VirtualClock(auto=True)
    journal = await begin(store, clock)
    store.full = 2
    journal.record(ANSWER)

    await journal.commit(0, End(Finished("good day"), USAGE, None))

    assert len(await read(store)) == 2


async def test_whoever_listens_is_told_once_that_the_turn_stalls() -> None:
    store, clock = FaultyStore(), VirtualClock(auto=True)
    scope = (await begin(store)).scope
    told: list[str] = []
    journal = TurnJournal(store, scope, 1, clock, lambda error: told.append(str(error)))

    for _ in range(2):
        store.full = 3
        journal.record(CALL)
        await journal.flush()

    assert told == ["the disk is full", "the disk is full"]


async def test_a_disk_too_full_for_a_blob_loses_nothing() -> None:
    store, clock = FaultyStore(), VirtualClock(auto=True)
    journal = await begin(store, clock)
    store.full_blobs = 2
    journal.record(BIG)

    await journal.flush()

    assert await read(store) == [HI, BIG]


async def test_what_is_recorded_while_the_store_stalls_is_written_after_it() -> None:
    store, clock = FaultyStore(), VirtualClock()
    journal = await begin(store, clock)
    store.full = 1
    journal.record(CALL)
    first = asyncio.create_task(journal.flush())
    await clock.wait_sleeping()

    journal.record(ENDED)
    second = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)
    clock.advance(1)
    await asyncio.gather(first, second)

    assert await read(store) == [HI, CALL, ENDED]


async def test_a_flush_waits_for_the_one_that_carries_its_record() -> None:
    store = FaultyStore()
    journal = await begin(store)
    store.hold = asyncio.Event()
    journal.record(CALL)
    first = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)

    second = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)
    assert not second.done(), "its record is not durable yet"
    store.hold.set()

    assert await second is None
    assert first.done()
    assert await read(store) == [HI, CALL]


async def test_a_forked_child_is_not_kept_waiting() -> None:
    store = FaultyStore()
    journal = await begin(store)
    store.full, store.error = 1, StoreInherited(1, 2)
    journal.record(CALL)

    with pytest.raises(StoreInherited):
        await journal.flush()


async def test_an_append_whose_reply_was_lost_is_recognised() -> None:
    store, clock = FaultyStore(), VirtualClock(auto=True)
    journal = await begin(store, clock)
    store.lost = 2
    journal.record(CALL)
    journal.record(ENDED)

    await journal.flush()

    assert await read(store) == [HI, CALL, ENDED]


async def test_a_commit_whose_reply_was_lost_is_recognised() -> None:
    store, clock = FaultyStore(), VirtualClock(auto=True)
    journal = await begin(store, clock)
    await store.write(Accept("s", "a", encode(HI), "op2", 0))
    store.lost = 2
    journal.record(ANSWER)

    receipt = await journal.commit(0, End(Finished("good day"), USAGE, None))

    assert isinstance(receipt, Committed)
    assert (receipt.row.head, receipt.row.turn) == (1, 2)
    assert len(await read(store)) == 2


async def test_a_parking_whose_reply_was_lost_is_recognised() -> None:
    store, clock = FaultyStore(), VirtualClock(auto=True)
    journal = await begin(store, clock)
    store.lost = 2
    wait = WaitRow("s.1.1.0:approval", 1, 1, "1.0", "approval")
    journal.record(CALL)

    appended = await journal.flush((wait,), (wait.id,))

    assert appended is not None
    assert appended.parked


# ---------------------------------------------------------------------- callers that go away


async def test_a_flush_whose_caller_went_away_leaves_no_hole() -> None:
    store, clock = FaultyStore(), VirtualClock()
    journal = await begin(store, clock)
    store.full = 1
    journal.record(CALL)
    flushing = asyncio.create_task(journal.flush())
    await clock.wait_sleeping()

    flushing.cancel()
    await asyncio.wait({flushing})
    journal.record(ENDED)
    await journal.flush()

    assert await read(store) == [HI, CALL, ENDED]


async def test_a_flush_that_landed_after_its_caller_went_away_is_not_written_twice() -> None:
    store, clock = FaultyStore(), VirtualClock()
    journal = await begin(store, clock)
    store.lost = 1
    journal.record(CALL)
    flushing = asyncio.create_task(journal.flush())
    await clock.wait_sleeping()

    flushing.cancel()
    await asyncio.wait({flushing})
    journal.record(ANSWER)
    await journal.commit(0, End(Finished("good day"), USAGE, None))

    assert [type(record) for record in await read(store)] == [Said, Replied, Closed]


async def test_a_flush_whose_caller_went_away_while_a_blob_was_written_forgets_nothing() -> None:
    store, clock = FaultyStore(), VirtualClock()
    journal = await begin(store, clock)
    store.full_blobs = 1
    journal.record(BIG)
    flushing = asyncio.create_task(journal.flush())
    await clock.wait_sleeping()

    flushing.cancel()
    await asyncio.wait({flushing})
    await journal.flush()

    assert await read(store) == [HI, BIG]


async def test_nobody_goes_on_with_a_record_that_was_refused() -> None:
    """Two calls record their start, the first flush takes both and is fenced: neither body may run."""
    store = FaultyStore()
    journal = await begin(store)
    row = await store.session("s")
    assert row is not None
    store.hold = asyncio.Event()
    journal.record(CALL)
    first = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)
    second = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)
    MemoryStore(store.rows).submit(Claim(SessionRef("s"), "another", row.generation, 0), lambda receipt, error: None)

    store.hold.set()
    ends = await asyncio.gather(first, second, return_exceptions=True)

    assert [type(end) for end in ends] == [Fenced, Fenced]
    assert await read(store) == [HI]


async def test_an_append_is_one_write() -> None:
    store = MemoryStore()
    journal = await begin(store)
    before = store.rows.changes

    journal.record(CALL)
    await journal.flush()
    for record in (ENDED, ANSWER):
        journal.record(record)
    await journal.flush()

    assert store.rows.changes == before + 2
