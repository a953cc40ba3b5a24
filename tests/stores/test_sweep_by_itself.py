"""A Runtime sweeps its store by itself: after an hour, every hour, and to nobody's harm."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure import Agent, Runtime
from perdure.errors import StoreUnavailable
from perdure.ports.store import SWEEP_GRACE
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing import VirtualClock

HOUR = 3600
SOON = 60


class Looked(MemoryStore):
    """Tells how often a Runtime has looked at it and swept it. The next sweep does `instead`, if that is given."""

    def __init__(self, clock: VirtualClock, rows: MemoryRows | None = None) -> None:
        super().__init__(rows, clock)
        self.looks = 0
        self.sweeps: list[float] = []
        self.instead: Callable[[], object] | None = None
        self._changed = asyncio.Condition()

    async def changed(self) -> bool:
        self.looks += 1
        await self._tell()
        return await super().changed()

    async def sweep(self, grace: float = SWEEP_GRACE) -> int:
        self.sweeps.append(grace)
        await self._tell()
        if self.instead is not None:
            instead, self.instead = self.instead, None
            instead()
        return await super().sweep(grace)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON), self._changed:
            await self._changed.wait_for(met)

    async def looked_at_again(self) -> None:
        """A whole look has begun and ended since."""
        looks = self.looks + 2
        await self.until(lambda: self.looks >= looks)


@pytest.mark.slow
async def test_a_store_is_swept_after_an_hour_and_every_hour_and_not_at_entry() -> None:
    clock = VirtualClock()
    store = Looked(clock)
    old = await store.blobs.put(b"left behind by somebody")
    clock.advance(5 * HOUR)
    async with Runtime(store, clock=clock):
        await store.looked_at_again()
        assert store.sweeps == []

        clock.advance(HOUR - 1)
        await store.looked_at_again()
        assert store.sweeps == []

        clock.advance(1)
        await store.until(lambda: len(store.sweeps) == 1)
        clock.advance(HOUR)
        await store.until(lambda: len(store.sweeps) == 2)

    assert store.sweeps == [SWEEP_GRACE, SWEEP_GRACE]
    assert old not in store.rows.blobs


async def test_a_runtime_in_memory_knows_the_age_of_blobs_by_its_own_clock() -> None:
    clock = VirtualClock()
    async with Runtime("memory", clock=clock) as runtime:
        await runtime.store.blobs.put(b"orphan")
        clock.advance(HOUR - 1)
        first = await runtime.store.sweep()
        clock.advance(1)

        assert (first, await runtime.store.sweep()) == (0, 1)


@pytest.mark.parametrize(
    "fault", [StoreUnavailable("the disk is on fire"), ZeroDivisionError("a bug")], ids=["disk", "bug"]
)
@pytest.mark.slow
async def test_a_sweep_that_fails_is_logged_and_tried_again_an_hour_later(
    fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    store = Looked(clock)
    orphan = await store.blobs.put(b"orphan")

    def fail() -> None:
        raise fault

    store.instead = fail
    async with Runtime(store, agents=[Agent()], clock=clock) as runtime:
        clock.advance(HOUR)
        await store.until(lambda: len(store.sweeps) == 1)
        text = (await (await runtime.session("s")).run("hello")).text
        await store.looked_at_again()
        clock.advance(HOUR)
        await store.until(lambda: len(store.sweeps) == 2)

    assert text == "You said: hello"
    assert orphan not in store.rows.blobs
    told = [(r.levelno, r.getMessage() + str(r.exc_info)) for r in caplog.records if "sweep" in r.getMessage()]
    assert [level for level, _ in told] == [logging.WARNING if isinstance(fault, StoreUnavailable) else logging.ERROR]
    assert str(fault) in told[0][1]


@pytest.mark.slow
async def test_a_sweep_that_takes_for_ever_keeps_nobody_from_looking_or_leaving() -> None:
    clock = VirtualClock()

    class Endless(Looked):
        async def sweep(self, grace: float = SWEEP_GRACE) -> int:
            await super().sweep(grace)
            await asyncio.Event().wait()
            return 0

    store = Endless(clock)
    async with asyncio.timeout(SOON):
        async with Runtime(store, agents=[Agent()], clock=clock) as runtime:
            clock.advance(HOUR)
            await store.until(lambda: len(store.sweeps) == 1)
            clock.advance(HOUR)
            await store.looked_at_again()
            text = (await (await runtime.session("s")).run("hello")).text

    assert text == "You said: hello"
    assert len(store.sweeps) == 1, "one at a time"


@pytest.mark.slow
async def test_two_runtimes_on_one_file_sweep_it_and_harm_nobody(tmp_path: Path) -> None:
    clock, path = VirtualClock(), tmp_path / "agent.db"
    async with (
        Runtime(path, agents=[Agent()], clock=clock) as one,
        Runtime(path, agents=[Agent(name="other")], clock=clock) as two,
    ):
        session = await one.session("s")
        await session.run("long " * 20_000)
        blobs = [await two.store.blobs.put(b"orphan %d" % number) for number in range(50)]
        store = SqliteStore(path)
        for digest in blobs:
            os.utime(store.blobs.path(digest), (1, 1))
        clock.advance(HOUR)
        async with asyncio.timeout(SOON):
            while (await one.store.facts()).blobs != 2:  # noqa: ASYNC110  # what two Runtimes do is seen by looking
                await asyncio.sleep(0.01)
        said = [message.text for message in await (await two.session("s")).history()]

    assert said[0] == "long " * 20_000
