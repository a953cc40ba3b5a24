"""Who owns, who is believed to live, and who is relieved."""

from collections.abc import Callable
from math import inf, nan
from typing import TypeVar

import pytest

from perdure.engine.lease import LeaseTerms, Worker
from perdure.errors import InvalidDefinition
from perdure.model.write import Accept, Claim, Release, Retire, SessionRef, TurnScope, Write
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import VirtualClock
from tests.kit import claimable

R = TypeVar("R")

TERMS = LeaseTerms(term=30, renewal=10)


@pytest.mark.parametrize(("term", "renewal"), [(30, 10), (3, 1), (0.3, 0.1), (3600, 1)])
def test_a_term_of_three_renewals_or_more_is_taken(term: float, renewal: float) -> None:
    LeaseTerms(term, renewal)


@pytest.mark.parametrize(("term", "renewal"), [(29.9, 10), (30, 0), (30, -1), (0, 0), (nan, 1), (30, nan), (inf, 10)])
def test_a_tighter_term_is_refused(term: float, renewal: float) -> None:
    with pytest.raises(InvalidDefinition, match=r"term >= 3 \* renewal"):
        LeaseTerms(term, renewal)


class Pair:
    """Two workers on one store, each with a clock of its own. Only the first is watched, so its lock does not count."""

    def __init__(self) -> None:
        rows = MemoryRows()
        self.clocks = VirtualClock(), VirtualClock()
        self.stores = MemoryStore(rows), MemoryStore(rows)
        self.owner = Worker(self.stores[0], "w1", TERMS, self.clocks[0])
        self.judge = Worker(self.stores[1], "w2", TERMS, self.clocks[1])

    async def start(self) -> TurnScope:
        for store, worker in zip(self.stores, (self.owner, self.judge), strict=True):
            await store.open()
            await worker.start()
        accepted = await self.stores[0].write(Accept("s", "clerk", b"{}", "op", 1, worker="w1"))
        return TurnScope("s", accepted.row.sid, 1, "w1", accepted.row.generation)


async def test_a_worker_that_speaks_is_not_judged_by_anybodys_clock() -> None:
    pair = Pair()
    await pair.start()
    for _ in range(10):
        pair.clocks[1].advance(29)
        await pair.owner.speak()

        assert await pair.judge.gone() == {}


async def test_a_silent_worker_is_judged_by_how_long_it_was_watched() -> None:
    """Not by how old its row is: whoever comes late has not seen it being silent."""
    pair = Pair()
    await pair.start()
    pair.clocks[0].advance(3600)
    pair.clocks[1].advance(3600)

    assert await pair.judge.gone() == {}
    pair.clocks[1].advance(30)
    assert await pair.judge.gone() == {}
    pair.clocks[1].advance(0.1)
    assert await pair.judge.gone() == {"w1": None}


async def test_a_worker_is_sure_of_itself_for_a_term_after_it_spoke() -> None:
    pair = Pair()
    scope = await pair.start()
    pair.clocks[0].advance(29.9)
    assert pair.owner.sure()
    pair.clocks[0].advance(0.1)
    assert not pair.owner.sure()

    assert await pair.owner.confirm(scope)
    assert pair.owner.sure()


async def test_a_relieved_worker_finds_out_when_it_makes_sure() -> None:
    pair = Pair()
    scope = await pair.start()
    await pair.stores[1].write(Claim(SessionRef("s"), "w2", scope.generation, 2))
    pair.clocks[0].advance(31)

    assert not await pair.owner.confirm(scope)


async def test_a_worker_that_was_relieved_and_came_back_does_not_own_what_it_had_before() -> None:
    """The owner is the same again and the turn too: only the generation tells the old task from the new one."""
    pair = Pair()
    old = await pair.start()
    await pair.stores[1].write(Claim(SessionRef("s"), "w2", old.generation, 2))
    new = TurnScope("s", old.sid, 1, "w1", old.generation + 2)
    await pair.stores[1].write(Release(TurnScope("s", old.sid, 1, "w2", old.generation + 1), 3))
    claimed = await pair.stores[0].write(Claim(SessionRef("s"), "w1", old.generation + 1, 4))

    assert claimed.won
    assert await pair.owner.confirm(new)
    assert not await pair.owner.confirm(old)


class SlowStore(MemoryStore):
    """A disk on which a write lands at once and is heard of 20 seconds later."""

    def __init__(self, rows: MemoryRows, clock: VirtualClock) -> None:
        super().__init__(rows)
        self._clock = clock

    async def write(self, write: Write[R]) -> R:
        receipt = await super().write(write)
        self._clock.advance(20)
        return receipt

    def submit(self, write: Write[R], done: Callable[[R | None, BaseException | None], None]) -> None:
        def late(receipt: R | None, error: BaseException | None) -> None:
            self._clock.advance(20)
            done(receipt, error)

        super().submit(write, late)


@pytest.mark.parametrize("how", ["start", "renew", "speak"])
async def test_a_term_begins_when_a_worker_speaks_and_not_when_it_hears_of_it(how: str) -> None:
    """Whoever judges it may have seen the beat long before. Counted from the reply, two would be sure of themselves."""
    clock = VirtualClock()
    worker = Worker(SlowStore(MemoryRows(), clock), "w1", TERMS, clock)
    await worker.start()
    if how != "start":
        clock.advance(3600)
        assert not worker.sure()
    if how == "renew":
        worker.renew()
    elif how == "speak":
        await worker.speak()

    clock.advance(9.9)
    assert worker.sure(), "20 s for the reply, 9.9 s since"
    clock.advance(0.1)
    assert not worker.sure()


async def test_what_a_worker_without_a_row_owned_is_free_to_claim() -> None:
    pair = Pair()
    await pair.start()
    assert await claimable(pair.judge, pair.stores[1]) == ([], {})
    await pair.stores[1].write(Retire("w1"))

    rows, gone = await claimable(pair.judge, pair.stores[1])
    assert ([row.id for row in rows], gone) == (["s"], {})
    assert (await claimable(pair.owner, pair.stores[0]))[0][0].id == "s", "also for the one that was taken for dead"


async def test_expiry_permits_a_claim_and_only_a_claim_fences() -> None:
    pair = Pair()
    scope = await pair.start()
    await pair.judge.gone()
    pair.clocks[1].advance(31)
    rows, gone = await claimable(pair.judge, pair.stores[1])

    assert ([row.id for row in rows], gone) == (["s"], {"w1": None})
    assert await pair.owner.confirm(scope), "nobody has claimed it yet"
    claimed = await pair.stores[1].write(Claim(SessionRef("s"), "w2", rows[0].generation, 2))
    assert claimed.won
    assert not await pair.owner.confirm(scope)
