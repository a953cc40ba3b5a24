"""Who is told what while branches wait: nothing that came is lost, and signals keep their order."""

from __future__ import annotations

import asyncio

from perdure.model.process import Signal, WaitOn
from perdure.processes.function.scheduler import ProcessWaits
from perdure.testing import VirtualClock


class Process:
    """The waits of a process with so many branches, none of which is ever parked."""

    def __init__(self, branches: int) -> None:
        self.failures: list[Exception] = []
        self.waits = ProcessWaits(
            VirtualClock(), lambda since, due: 3600.0, self._park, lambda resting: None, self.failures.append
        )
        self.waits.working = branches

    async def _park(self, waits: tuple[WaitOn, ...]) -> bool:
        return False

    async def listens(self, key: str, name: str) -> asyncio.Task[object]:
        """A branch that waits for a signal when this returns."""
        before = self.waits.working
        task = asyncio.create_task(self.waits.wait(WaitOn(key, "signal", name)))
        await asyncio.sleep(0)
        assert self.waits.working == before - 1
        return task


async def test_an_end_that_came_before_anybody_waited_for_it_is_no_wait() -> None:
    process = Process(1)
    process.waits.process_ended("q")

    assert await asyncio.wait_for(process.waits.wait(WaitOn("1", "process", "q")), 60) is True
    assert process.waits.working == 1
    await process.waits.close()


async def test_a_signal_that_is_given_back_keeps_its_place() -> None:
    process = Process(1)
    one, two, three = (Signal(number, "go", f"payload {number}") for number in (1, 2, 3))
    for signal in (one, two, three):
        process.waits.add_signal(signal)
    assert (process.waits.take_signal("go"), process.waits.take_signal("go")) == (one, two)
    process.waits.add_signal(two)
    process.waits.add_signal(one)

    assert process.waits.kept_signals() == [1, 2, 3]
    assert [process.waits.take_signal("go") for _ in range(4)] == [one, two, three, None]
    await process.waits.close()


async def test_a_signal_goes_to_who_has_waited_longest() -> None:
    process, signal = Process(3), Signal(1, "go", "payload")
    first = await process.listens("1", "go")
    second = await process.listens("2", "go")
    process.waits.add_signal(signal)

    assert await asyncio.wait_for(first, 60) == signal
    assert (second.done(), process.waits.take_signal("go")) == (False, None)
    process.waits.resolve("2", "enough")
    assert await asyncio.wait_for(second, 60) == "enough"
    assert (process.waits.working, process.failures) == (3, [])
    await process.waits.close()
