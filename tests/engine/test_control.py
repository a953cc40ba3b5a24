"""The control of a running turn: a cancel request, a nudge, the end of the Runtime."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from typing import Any

import pytest

from perdure.engine.control import Control, OutOfTime, SelfCancelled, TurnCancelled
from perdure.model.session import CancelRequest
from perdure.ports.process import Leaving

REQUEST = CancelRequest("ann", "enough")

Shutting = Callable[[Control], None]


def cancelled(control: Control) -> None:
    control.cancel(REQUEST)


def left(control: Control) -> None:
    control.leave()


SHUT = pytest.mark.parametrize(("shut", "raised"), [(cancelled, TurnCancelled), (left, Leaving)])


class Work:
    """A body that waits until it is told to go on, and says what became of it."""

    def __init__(self, deaf: bool = False) -> None:
        self.began, self.go, self.deaf = asyncio.Event(), asyncio.Event(), deaf
        self.end = "not yet"

    async def run(self) -> str:
        self.began.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.end = "cancelled"
            if not self.deaf:
                raise
            await self.go.wait()
        self.end = "done" if self.end == "not yet" else "done, though cancelled"
        return self.end


async def test_an_open_gate_lets_work_through() -> None:
    async def work() -> int:
        return 5

    assert await Control().guard(work()) == 5


async def test_an_open_gate_lets_errors_through() -> None:
    async def work() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await Control().guard(work())


@SHUT
async def test_a_shut_gate_cancels_what_runs(shut: Shutting, raised: type[Exception]) -> None:
    control, work = Control(), Work()
    task = asyncio.create_task(control.guard(work.run()))
    await work.began.wait()

    shut(control)

    with pytest.raises(raised):
        await task
    assert work.end == "cancelled"


@SHUT
async def test_a_shut_gate_starts_nothing(shut: Shutting, raised: type[Exception]) -> None:
    control, work = Control(), Work()
    shut(control)

    with pytest.raises(raised):
        await control.guard(work.run())

    assert not work.began.is_set()


@SHUT
async def test_the_task_lives_on_after_its_work_was_cut_off(shut: Shutting, raised: type[Exception]) -> None:
    control, work = Control(), Work()

    async def turn() -> str:
        try:
            await control.guard(work.run())
        except raised:
            await asyncio.sleep(0)  # a leftover cancellation would strike here
            return "went on"
        return "finished"

    task = asyncio.create_task(turn())
    await work.began.wait()
    shut(control)

    assert await task == "went on"
    assert task.cancelling() == 0


async def test_work_that_swallows_its_cancellation_does_not_undo_the_request() -> None:
    control, work = Control(), Work(deaf=True)
    task = asyncio.create_task(control.guard(work.run()))
    await work.began.wait()
    control.cancel(REQUEST)
    await asyncio.sleep(0)
    work.go.set()

    with pytest.raises(TurnCancelled):
        await task
    assert work.end == "done, though cancelled"
    assert task.cancelling() == 0


@pytest.mark.slow
@SHUT
async def test_work_that_never_listens_is_left_behind(shut: Shutting, raised: type[Exception]) -> None:
    control, began, ends = Control(), asyncio.Event(), list[str]()

    async def deaf() -> None:
        began.set()
        try:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        finally:
            ends.append("closed")

    task = asyncio.create_task(control.guard(deaf()))
    await began.wait()
    shut(control)

    with pytest.raises(raised):
        await task
    assert task.cancelling() == 0
    assert ends == ["closed"]


@pytest.mark.slow
async def test_work_that_ignores_even_its_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    control, began, over = Control(), asyncio.Event(), asyncio.Event()

    class Deaf:
        """Waits on, whatever is thrown into it, until the test is over."""

        def __await__(self) -> Generator[Any, Any, None]:
            self.waiting = self._wait()
            return self.waiting

        def _wait(self) -> Generator[Any, Any, None]:
            while not over.is_set():
                with contextlib.suppress(BaseException):
                    yield from asyncio.Event().wait().__await__()

    stone = Deaf()

    async def deaf() -> None:
        began.set()
        await stone

    task = asyncio.create_task(control.guard(deaf()))
    await began.wait()
    control.cancel(REQUEST)

    with pytest.raises(TurnCancelled) as raised:
        await task
    over.set()
    assert "it gets no further step" in caplog.text
    assert raised.value.__cause__ is None


@SHUT
async def test_an_error_made_of_a_cancellation_does_not_hide_the_request(
    shut: Shutting, raised: type[Exception]
) -> None:
    control, began = Control(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OSError("connection lost") from None

    task = asyncio.create_task(control.guard(work()))
    await began.wait()
    shut(control)

    with pytest.raises(raised):
        await task
    assert task.cancelling() == 0


async def test_work_is_cut_off_when_its_time_is_up() -> None:
    control, work = Control(), Work()

    with pytest.raises(OutOfTime):
        await control.guard(work.run(), 0.001)

    assert work.end == "cancelled"
    control.check()


async def test_an_answer_that_came_out_of_time_counts() -> None:
    async def work() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "late"

    assert await Control().guard(work(), 0.001) == "late"


async def test_work_that_ends_in_time_is_not_disturbed_later() -> None:
    control, work = Control(), Work()
    work.go.set()

    assert await control.guard(work.run(), 0.001) == "done"
    await asyncio.sleep(0.005)  # a timer left over would strike here


async def test_a_timeout_of_the_works_own_is_its_own() -> None:
    async def work() -> None:
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await Control().guard(work(), 60)


async def test_work_that_ended_before_the_request_has_ended() -> None:
    control = Control()

    async def work() -> int:
        return 5

    result = await control.guard(work())
    control.cancel(REQUEST)

    assert result == 5
    with pytest.raises(TurnCancelled):
        control.check()


async def test_work_that_cancels_itself_is_a_fault_of_the_work() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(SelfCancelled):
        await Control().guard(work())


async def test_cancelling_the_turns_task_itself_is_passed_on() -> None:
    control, work = Control(), Work()
    task = asyncio.create_task(control.guard(work.run()))
    await work.began.wait()

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.end == "cancelled"


async def test_cancelling_the_task_and_the_turn_at_once_cancels_the_task() -> None:
    control, work = Control(), Work()
    task = asyncio.create_task(control.guard(work.run()))
    await work.began.wait()

    control.cancel(REQUEST)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancel_request_goes_before_leaving() -> None:
    control, work = Control(), Work()
    task = asyncio.create_task(control.guard(work.run()))
    await work.began.wait()

    control.leave()
    control.cancel(REQUEST)

    with pytest.raises(TurnCancelled):
        await task


async def test_the_first_cancel_request_stands() -> None:
    control = Control()

    control.cancel(REQUEST)
    control.cancel(CancelRequest("bob"))

    assert control.request == REQUEST


async def test_an_open_gate_has_nothing_to_say() -> None:
    control = Control()

    control.check()
    assert not control.stopping


@pytest.mark.parametrize("wake", [cancelled, left, Control.nudge, Control.wake])
async def test_a_pause_ends_with_the_next_news(wake: Shutting) -> None:
    control = Control()
    task = asyncio.create_task(control.pause())
    await asyncio.sleep(0)
    assert not task.done()

    wake(control)
    wake(control)  # twice before it is noticed is once

    await task


async def test_a_nudge_is_remembered_by_whoever_looks_later() -> None:
    control = Control()

    control.nudge()

    assert control.nudged
    assert not control.stopping


async def test_a_nudge_does_not_disturb_guarded_work() -> None:
    control, work = Control(), Work()
    task = asyncio.create_task(control.guard(work.run()))
    await work.began.wait()

    control.nudge()
    work.go.set()

    assert await task == "done"
