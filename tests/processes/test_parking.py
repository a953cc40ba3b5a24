"""A process is about to be parked, and just then something happens to it: it must not miss that."""

from __future__ import annotations

import asyncio

from perdure.engine.host import SystemClock
from perdure.model.process import Signal, WaitOn
from perdure.model.session import CancelRequest
from perdure.model.write import Cancel, ProcessRef
from perdure.processes.function.scheduler import ProcessWaits
from tests.processes.test_process_journal import Held, begun, done

END = WaitOn("1", "signal", "end")


async def test_who_is_told_before_the_parking_begins_goes_on() -> None:
    parked: list[tuple[WaitOn, ...]] = []

    async def park(waits: tuple[WaitOn, ...]) -> bool:
        parked.append(waits)
        return True

    waiting = ProcessWaits(SystemClock(), lambda since, due: 0.0, park, lambda resting: None, lambda error: None)
    waiting.working = 1
    branch = asyncio.create_task(waiting.wait(END))
    await asyncio.sleep(0)
    waiting._begin_parking()  # its delay is over
    waiting.add_signal(Signal(2, "end", "now"))

    assert await branch == Signal(2, "end", "now")
    assert parked == []
    await waiting.close()


async def test_what_is_looked_at_on_the_way_to_disk_goes_against_parking() -> None:
    store = Held()
    journal = await begun(store)
    journal.record(done("1"))
    store.gate.clear()
    flushing = asyncio.create_task(journal.flush())
    parking = asyncio.create_task(journal.flush(park=(END,)))  # behind the flush, and decided already
    await asyncio.sleep(0)
    told = await store.write(Cancel(ProcessRef("p"), CancelRequest("ann"), 2))
    journal.read_to = told.row.record.sequence
    store.gate.set()
    await flushing

    assert not (await parking).parked
    row = await store.process("p")
    assert row is not None
    assert row.owner == "w"
